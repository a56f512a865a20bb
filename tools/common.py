"""What several tools share: loading scripts, timed runs of train_gpt.py, intervals, tables, marked parts of pages."""

import argparse
import importlib.util
import json
import math
import os
import platform
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "train_gpt.py"  # the script that is measured
BENCH_DATA = "data/bench"  # prepared on first use
# Environment variables that a run inherits. Exported settings are not among them: they would
# override the config.
INHERITED = re.compile(
    r"PATH|HOME|TMPDIR|LANG|LD_LIBRARY_PATH|PYTHONPATH|VIRTUAL_ENV|CC|CXX|"
    r"(OMP|MKL|CUDA|NCCL|TORCHINDUCTOR|TRITON)_\w+"
)
SAVED_KEYS = (
    "failed parameters steps tokens step_ms tokens_per_second peak_memory_mib optimizer_state_bytes "
    "state_bytes_per_parameter train_seconds val_bpb events"
).split()


def load_script(path: Path) -> ModuleType:
    """Return the module in a Python file. A file that was loaded before is not loaded again."""
    path = path.resolve()
    loaded = sys.modules.get(path.stem)
    if loaded is not None and getattr(loaded, "__file__", "") == str(path):
        return loaded
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


def inherited_environment() -> dict[str, str]:
    """Return the environment variables that a run inherits."""
    return {name: value for name, value in os.environ.items() if INHERITED.fullmatch(name)}


# ------------------------------------------------------------------------------------- statistics
@lru_cache
def quadrature(nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return nodes and weights of Gauss-Legendre quadrature, which take long to compute."""
    return np.polynomial.legendre.leggauss(nodes)


def student_tail(t: float, df: float) -> float:
    """Return P(T > t) of Student's t distribution, to eight digits.

    With t = sqrt(df) tan(a) the density is proportional to cos(a)**(df - 1), which 200 nodes
    integrate from one to hundreds of degrees of freedom.
    """
    nodes, weights = quadrature(200)
    low = math.atan(t / math.sqrt(df))
    half = (math.pi / 2 - low) / 2
    area = half * float(weights @ np.cos(low + half * (nodes + 1)) ** (df - 1))
    log_scale = math.lgamma((df + 1) / 2) - math.lgamma(df / 2)
    return area * math.exp(log_scale) / math.sqrt(math.pi)


def half_width(values: list[float]) -> float:
    """Return half of the 95% interval (Student) of the mean, infinite for a single value."""
    if len(values) == 1:
        return math.inf
    low = 0.0
    high = 100.0
    while high - low > 1e-10:  # bisection for the 97.5% quantile
        middle = (low + high) / 2
        if student_tail(middle, len(values) - 1) > 0.025:
            low = middle
        else:
            high = middle
    return low * statistics.stdev(values) / math.sqrt(len(values))


def difference(before: list[float], after: list[float]) -> list[float]:
    """Return [mean, low, high] of the difference of two independent scores [mean, low, high]."""
    mean = after[0] - before[0]
    half = math.hypot(before[2] - before[1], after[2] - after[1]) / 2
    return [mean, mean - half, mean + half]


# ------------------------------------------------------------------------------------------- pages
def markdown_table(rows: list[list]) -> str:
    """Return a Markdown table. The first row is its head."""
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def replace_marked(text: str, tag: str, body: str) -> str:
    """Return `text` with `body` between the lines <!-- tag --> and <!-- /tag -->.

    Raises SystemExit unless each mark occurs exactly once, in this order.
    """
    parts = re.split(f"<!-- (/?){tag} -->", text)
    if parts[1::2] != ["", "/"]:
        raise SystemExit(
            f"error: the page must have <!-- {tag} --> and then <!-- /{tag} -->, once each"
        )
    return f"{parts[0]}<!-- {tag} -->\n{body}\n<!-- /{tag} -->{parts[-1]}"


# -------------------------------------------------------------------------------------------- runs
def setting_names(script: ModuleType) -> set[str]:
    """Return the names of a script's settings as environment variables."""
    return {name.upper() for name in script.Settings.__dataclass_fields__}


def run_script(
    script: ModuleType, folder: Path, config: str, settings: dict[str, str], threads: int = 0
) -> dict:
    """Return result and speed of a run of a script in `folder`, or {"failed": reason}.

    A finished run in `folder` is not repeated. `config` is a CONFIG file relative to the
    repository, or "". Raises SystemExit if the folder holds a finished run of other settings,
    another config or other code.
    """
    unknown = sorted(set(settings) - setting_names(script))
    path = Path(script.__file__)
    if unknown:  # the script would ignore them, and two arms would be the same run
        return {"failed": f"{', '.join(unknown)}: no setting of {path.name}"}
    if config and not (ROOT / config).is_file():
        return {"failed": f"CONFIG={config!r}: no such file"}
    config_text = (ROOT / config).read_text(encoding="utf-8") if config else ""
    requested = {
        "settings": settings,
        "config": config_text,
        "code": script.sha256_file(path),
    }
    marker = folder / "bench.json"  # written once the run has ended well
    if not marker.is_file():
        failure = start_run(path, folder, config, settings, threads)
        if failure:
            return {"failed": failure}
        marker.write_text(json.dumps(requested, indent=1) + "\n", encoding="utf-8")
    stored = json.loads(marker.read_text(encoding="utf-8"))
    different = [key for key in requested if stored[key] != requested[key]]
    if different:
        raise SystemExit(
            f"error: {folder} was made with other {' and '.join(different)}; "
            "name another folder: --runs"
        )
    return timed_result(folder)


def call_script(*words, quiet: bool = False, **settings) -> None:
    """Run a Python script of the repository with settings. A fault ends the caller.

    words: the script and its arguments. quiet: what it prints is not shown.
    """
    given = {name.upper(): str(value) for name, value in settings.items()}
    command = [sys.executable, *map(str, words)]
    print(*command, given, flush=True)
    output = subprocess.DEVNULL if quiet else None
    environ = inherited_environment() | given
    subprocess.run(command, cwd=ROOT, env=environ, check=True, stdout=output)


def has_ended(run: Path) -> bool:
    """Return whether a run has ended; what is left of one that was broken off is deleted."""
    if (run / "result.json").is_file():
        return True
    shutil.rmtree(run, ignore_errors=True)
    return False


def is_same(given: object, stored: object) -> bool:
    """Return whether a run has a setting as it was given."""
    if isinstance(stored, bool):
        return str(given) == str(int(stored))
    return type(stored)(given) == stored


def refuse_other_settings(run: Path, given: dict[str, object], stored: dict[str, object]) -> None:
    """Raise SystemExit if a run that has ended was made with other settings than are given."""
    different = [key for key, value in given.items() if not is_same(value, stored[key])]
    if different:
        raise SystemExit(
            f"error: {run}: made with another {', '.join(different)}; remove it, or name another --out"
        )


def start_run(
    script: Path, folder: Path, config: str, settings: dict[str, str], threads: int
) -> str:
    """Run a script in a new `folder`; return why it failed, or ""."""
    if folder.exists():  # left by a run that failed or was interrupted
        shutil.rmtree(folder)
    environ = inherited_environment()
    if threads:
        environ["OMP_NUM_THREADS"] = str(threads)
    environ |= settings
    environ |= {"CONFIG": config, "OUT_DIR": str(folder.parent), "RUN_ID": folder.name}
    print(f"run: {folder}", flush=True)
    command = [sys.executable, str(script)]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    if done.returncode == 0:
        return ""
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"exit code {done.returncode}, nothing on stderr"


def timed_result(folder: Path) -> dict:
    """Return the result of a finished run with its speed, or {"failed": reason}."""
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    if result.get("val_bpb", 0) is None:
        return {"failed": "val_bpb is not finite"}
    milliseconds = step_ms((folder / "log.txt").read_text(encoding="utf-8"))
    if math.isnan(milliseconds):
        return {"failed": f"{result['steps']} steps are too few to time; use more --seconds"}
    parameters = result["params"]["total"]
    tokens_per_step = result["tokens"] / result["steps"]
    state = state_bytes(folder)
    return {
        **result,
        "parameters": parameters,
        "step_ms": milliseconds,
        "tokens_per_second": 1000 * tokens_per_step / milliseconds,
        "optimizer_state_bytes": state,
        "state_bytes_per_parameter": state / parameters,
    }


def state_bytes(folder: Path) -> float:
    """Return the bytes of the optimizers' state in a run's last checkpoint, NaN without one."""
    checkpoints = sorted(folder.glob("step_*"))
    if not checkpoints:
        return math.nan
    saved = torch.load(checkpoints[-1] / "training.pt", weights_only=True)["optimizers"]
    total = 0
    for state in saved.values():
        total += sum(tensor.nbytes for tensor in state.values())
    return total


def step_ms(log: str) -> float:
    """Return the median milliseconds of a step, NaN if fewer than three steps are logged.

    The log has whole milliseconds, so steps are grouped until a group lasts 200 ms. A run logs its
    first five steps and then one step every ten seconds, so each step of a group counts with the
    mean of the group.
    """
    pattern = r"^step:(\d+)/\S+ train_loss:.* train_time:(\d+)ms"
    points = [
        (int(step), int(milliseconds))
        for step, milliseconds in re.findall(pattern, log, re.MULTILINE)
    ]
    if len(points) < 3:
        return math.nan
    means = []
    step, milliseconds = points[0]
    for next_step, next_milliseconds in points[1:]:
        is_last = next_step == points[-1][0]
        if next_milliseconds - milliseconds >= 200 or (is_last and not means):
            steps = next_step - step
            means += [(next_milliseconds - milliseconds) / steps] * steps
            step = next_step
            milliseconds = next_milliseconds
    return statistics.median(means)


def saved_figures(run: dict) -> dict:
    """Return what the JSON file keeps of a run."""
    return {key: run[key] for key in SAVED_KEYS if key in run}


def open_data(script: ModuleType, path: str) -> tuple[str, dict]:
    """Return (DATA_PATH, manifest) of --data; without a path, of data prepared on first use.

    Raises SystemExit if there is no data.
    """
    if not path and not (ROOT / BENCH_DATA / "token_bytes.bin").is_file():
        command = ["data/prepare.py", "--out", BENCH_DATA, "--val-max-bytes", "40000"]
        print(f"data: python {shlex.join(command)}", flush=True)
        subprocess.run([sys.executable, *command], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    path = str(Path(path).resolve()) if path else BENCH_DATA
    try:
        return path, script.load_manifest(ROOT / path)
    except script.UserError as error:
        raise SystemExit(f"error: {error}") from None


def short_run(script: ModuleType, args: argparse.Namespace) -> tuple[dict[str, str], dict]:
    """Return (settings of a run of --seconds without validation, manifest of its data)."""
    data, manifest = open_data(script, args.data)
    settings = {
        "DATA_PATH": data,
        "MAX_WALLCLOCK_SECONDS": f"{args.seconds + 5:g}",
        "RESERVE_SECONDS": "5",
        "ITERATIONS": "0",
        "WARMDOWN_ITERS": "0",
        "VAL_LOSS_EVERY": "0",
        "EVAL_STRIDE": "0",
    }
    return settings | dict(args.set), manifest


def available_cores() -> list[int]:
    """Return the numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def cpu_name() -> str:
    """Return the name of this machine's processor."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.is_file() else ""
    name = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    return name[1] if name else platform.processor()


def publish(
    args: argparse.Namespace,
    path: str,
    runs: list[tuple[str, dict]],
    rows: list[list],
    notes: str,
    figures: dict,
) -> list[str]:
    """Print the table `rows` with command, date, machine and notes, and save JSON.

    The JSON file (--out, or `path` with the date filled in) has command, date, machine and
    `figures`. Returns the failures of `runs`, which are pairs of a name and a result.
    """
    first = next((run for _, run in runs if "failed" not in run), {})
    about = {
        "date": time.strftime("%Y-%m-%d"),
        "command": shlex.join(["python", f"tools/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
    }
    for key in ("hardware", "versions", "commit", "code_sha256", "manifest_sha256"):
        about[key] = first.get(key)
    text = (
        f"{markdown_table(rows)}\n\n`{about['command']}`, {about['date']}, {about['cores']} cores "
        f"of {about['cpu']}, a run on {about['hardware']}, torch {version('torch')}. {notes}"
    )
    print(text)
    if "seconds" in args:
        about |= {"seconds": args.seconds, "set": dict(args.set)}
    content = json.dumps(about | figures, indent=1)
    content = content.replace(": Infinity", ": null")  # JSON has no infinity
    out = ROOT / (args.out or path.format(date=about["date"]))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(content + "\n", encoding="utf-8")
    print(f"written: {out}")
    if "write_docs" in args and args.write_docs:
        page = ROOT / "docs" / "choices.md"
        new_text = replace_marked(page.read_text(encoding="utf-8"), args.command, text)
        page.write_text(new_text, encoding="utf-8")
    return [f"{name}: {run['failed']}" for name, run in runs if "failed" in run]


# ------------------------------------------------------------------------------------ command line
def parse_set(text: str) -> tuple[str, str]:
    """Return NAME and VALUE of NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def add_run_options(parser: argparse.ArgumentParser, seconds: float, runs: str) -> None:
    """Add the options of a command that starts runs of some seconds in a folder."""
    parser.add_argument(
        "--seconds", type=float, default=seconds, help=f"of training, each run ({seconds:g})"
    )
    parser.add_argument("--data", default="", help=f"data folder ({BENCH_DATA}, made if missing)")
    parser.add_argument(
        "--set",
        type=parse_set,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of every run; may be repeated",
    )
    parser.add_argument("--runs", default=runs, help=f"folder of the runs ({runs})")
    parser.add_argument("--out", default="", help="the JSON file")


def run_command(parser: argparse.ArgumentParser) -> None:
    """Call the chosen command; its failures go to stderr and make the exit code 1."""
    args = parser.parse_args()
    failures = args.run(args) or []
    sys.stderr.writelines(f"failed: {failure}\n" for failure in failures)
    sys.exit(1 if failures else 0)
