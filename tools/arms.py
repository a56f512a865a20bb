"""Choices against each other on this machine: pairs of options in turn, arms of equal seconds and parameters.

Starts train_gpt.py with settings in its environment and reads its result.json and log.txt. Settings that the shell
exports are not passed on: `--set NAME=VALUE` is. Step time is the median over the run, tokens/s is the batch over that
time. Without --data the text is Python's own standard library, with little of it for validation.
"""

import argparse
import importlib
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
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import torch

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "train_gpt.py"  # the file that is measured
BENCH_DATA = "data/bench"  # made at the first use
OPTIONS, ARMS = ROOT / "configs" / "options.json", ROOT / "configs" / "arms.json"  # what `options` and `arms` run


# === shared: runs ===
# Environment variables that a run gets from the shell. Settings are not among them: they would override the config.
PASSED_ON = re.compile(r"PATH|HOME|TMPDIR|LANG|LD_LIBRARY_PATH|PYTHONPATH|VIRTUAL_ENV|CC|CXX|"
                       r"(OMP|MKL|CUDA|NCCL|TORCHINDUCTOR|TRITON)_\w+")


def load_script(path: Path) -> ModuleType:
    """Import a script of this repository by its path."""
    sys.path.insert(0, str(path.parent))
    return importlib.import_module(path.stem)


def setting_names(script: ModuleType) -> set[str]:
    """The names that train_gpt.py reads from its environment, CONFIG aside."""
    return {name.upper() for name in script.Settings.__dataclass_fields__}


def run_script(script: ModuleType, place: Path, config: str, settings: dict[str, str], threads: int = 0,
               words: Sequence[str] = ()) -> dict:
    """Make a run in the folder `place` unless it stands there finished: its result and speed, or {"failed": why}.

    `config` is a CONFIG file seen from the repository, or ""; `words` go to Python in place of the script. Raises
    SystemExit where the folder holds a finished run of other settings, config or code.
    """
    unknown = sorted(set(settings) - setting_names(script))
    if unknown:  # train_gpt.py would not look at them: two arms would be one
        return {"failed": f"{', '.join(unknown)}: no setting of {SCRIPT.name}"}
    if config and not (ROOT / config).is_file():
        return {"failed": f"CONFIG={config!r}: no such file"}
    asked = {"settings": settings, "config": (ROOT / config).read_text(encoding="utf-8") if config else "",
             "code": script.sha256_file(SCRIPT)}
    done = place / "bench.json"  # written after a run that ended well
    if not done.is_file():
        if place.exists():  # it failed or was broken off
            shutil.rmtree(place)
        environ = {name: value for name, value in os.environ.items() if PASSED_ON.fullmatch(name)}
        environ |= {"OMP_NUM_THREADS": str(threads)} if threads else {}
        environ |= {**settings, "CONFIG": config, "OUT_DIR": str(place.parent), "RUN_ID": place.name}
        print(f"run: {place}", flush=True)
        ended = subprocess.run([sys.executable, *(words or [str(SCRIPT)])], cwd=ROOT, env=environ,
                               capture_output=True, text=True)
        if ended.returncode:
            said = ended.stderr.strip().splitlines()
            return {"failed": said[-1] if said else f"exit code {ended.returncode}, nothing on stderr"}
        done.write_text(json.dumps(asked, indent=1) + "\n", encoding="utf-8")
    found = json.loads(done.read_text(encoding="utf-8"))
    different = [key for key in asked if found[key] != asked[key]]
    if different:
        raise SystemExit(f"error: {place} was made with other {' and '.join(different)}; name another folder: --runs")
    result = json.loads((place / "result.json").read_text(encoding="utf-8"))
    milliseconds = step_ms((place / "log.txt").read_text(encoding="utf-8"))
    if math.isnan(milliseconds):
        return {"failed": f"{result['steps']} steps are too few to time; use more --seconds"}
    result["parameters"], result["step_ms"] = result["params"]["total"], milliseconds
    result["tokens_per_second"] = 1000 * result["tokens"] / result["steps"] / milliseconds
    result["state_bytes_per_parameter"] = result["optimizer_state_bytes"] / result["parameters"]
    return result


def step_ms(log: str) -> float:
    """Return the milliseconds of a step: the median over steps, NaN if fewer than three steps are logged.

    The log has whole milliseconds, so steps are taken together until a stretch lasts 200 ms. A run logs its first five
    steps and then a step every ten seconds, so every step of a stretch counts, with the stretch's mean.
    """
    logged = re.finditer(r"^step:(\d+)/\S+ train_loss:.* train_time:(\d+)ms", log, re.MULTILINE)
    points = [(int(line[1]), int(line[2])) for line in logged]
    if len(points) < 3:
        return math.nan
    stretches, (step, ms) = [], points[0]
    for next_step, next_ms in points[1:]:
        if next_ms - ms >= 200 or (next_step == points[-1][0] and not stretches):
            count = next_step - step
            stretches += [(next_ms - ms) / count] * count
            step, ms = next_step, next_ms
    return statistics.median(stretches)


def figures(run: dict) -> dict:
    """What a JSON document keeps of a run."""
    keys = ("failed", "parameters", "steps", "tokens", "step_ms", "tokens_per_second", "peak_memory_mib",
            "optimizer_state_bytes", "state_bytes_per_parameter", "train_seconds", "val_bpb", "events")
    return {key: run[key] for key in keys if key in run}


def open_data(script: ModuleType, path: str) -> tuple[str, dict]:
    """(DATA_PATH, manifest) of --data, made first where none is named. Raises SystemExit where there is no data."""
    if not path and not (ROOT / BENCH_DATA / "manifest.json").is_file():
        command = ["data/prepare.py", "--out", BENCH_DATA, "--val-max-bytes", "40000"]
        print(f"data: python {shlex.join(command)}", flush=True)
        subprocess.run([sys.executable, *command], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    path = str(Path(path).resolve()) if path else BENCH_DATA
    try:
        return path, script.load_manifest(ROOT / path)
    except script.UserError as error:
        raise SystemExit(f"error: {error}") from None


def replace_between(text: str, tag: str, body: str) -> str:
    """`text` with `body` between <!-- tag --> and <!-- /tag -->. Raises SystemExit unless both stand in it once."""
    parts = re.split(f"<!-- (/?){tag} -->", text)
    if parts[1::2] != ["", "/"]:
        raise SystemExit(f"error: the page must have <!-- {tag} --> and then <!-- /{tag} -->, once each")
    return f"{parts[0]}<!-- {tag} -->\n{body}\n<!-- /{tag} -->{parts[-1]}"


def short_run(script: ModuleType, args: argparse.Namespace, **more: str) -> tuple[dict[str, str], dict]:
    """Settings of a run of --seconds without validation, `more` and --set above them; the manifest of its data."""
    data, manifest = open_data(script, args.data)
    return {"DATA_PATH": data, "MAX_WALLCLOCK_SECONDS": f"{args.seconds + 5:g}", "RESERVE_SECONDS": "5",
            "ITERATIONS": "0", "WARMDOWN_ITERS": "0", "VAL_LOSS_EVERY": "0", "EVAL_STRIDE": "0",
            **more, **dict(args.set)}, manifest


def publish(args: argparse.Namespace, path: str, runs: list[tuple[str, dict]], rows: list[list[str]], notes: str, /,
            **body) -> list[str]:
    """Print a Markdown table of `rows` (the first is its head), command, date, machine and notes. Returns failures.

    `body` goes with command, date and machine into a JSON file: --out, or `path` with the date put in.
    """
    first, info = next((run for _, run in runs if "failed" not in run), {}), Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.*)$", info.read_text(), re.MULTILINE) if info.is_file() else []
    about = {
        "date": time.strftime("%Y-%m-%d"),
        "command": shlex.join(["python", f"tools/{Path(__file__).name}", *sys.argv[1:]]),
        "cpu": names[0] if names else platform.processor(), "cores": os.cpu_count(),
        **{key: first.get(key) for key in ("hardware", "versions", "commit", "code_sha256", "manifest_sha256")},
    }
    table = "\n".join("| " + " | ".join(cells) + " |" for cells in [rows[0], ["---"] * len(rows[0]), *rows[1:]])
    text = (f"{table}\n\n`{about['command']}`, {about['date']}, {about['cores']} cores of {about['cpu']}, a run on "
            f"{about['hardware']}, torch {torch.__version__}. {notes}")
    print(text)
    out, page = ROOT / (args.out or path.format(date=about["date"])), ROOT / "docs" / "choices.md"
    out.parent.mkdir(parents=True, exist_ok=True)
    given = {"seconds": args.seconds, "set": dict(args.set)} if "seconds" in args else {}
    content = json.dumps({**about, **given, **body}, indent=1)
    out.write_text(content.replace(": Infinity", ": null") + "\n", encoding="utf-8")  # JSON has no infinity
    print(f"written: {out}")
    if args.write_docs:
        page.write_text(replace_between(page.read_text(encoding="utf-8"), args.command, text), encoding="utf-8")
    return [f"{name}: {run['failed']}" for name, run in runs if "failed" in run]


def parse_set(text: str) -> tuple[str, str]:
    """NAME and VALUE of NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def add_run_command(commands, name: str, text: str, function: Callable, seconds: float,
                    runs: str) -> argparse.ArgumentParser:
    """A command of `commands`, argparse's subparsers, that starts runs of some seconds in a folder."""
    parser = commands.add_parser(name, help=text)
    parser.add_argument("--seconds", type=float, default=seconds, help=f"of training, each run ({seconds:g})")
    parser.add_argument("--data", default="", help=f"data folder ({BENCH_DATA}, made if missing)")
    parser.add_argument("--set", type=parse_set, action="append", default=[], metavar="NAME=VALUE",
                        help="a setting of every run; may be repeated")
    parser.add_argument("--runs", default=runs, help=f"folder for the runs ({runs})")
    parser.add_argument("--out", default="", help="the JSON file")
    parser.set_defaults(run=function, write_docs=False)
    return parser


def run_command(parser: argparse.ArgumentParser) -> None:
    """Do what the command line says; failures go to stderr, and the exit code is 1 if there are any."""
    args = parser.parse_args()
    failures = args.run(args) or []
    sys.stderr.writelines(f"failed: {failure}\n" for failure in failures)
    sys.exit(1 if failures else 0)
# === end: runs ===


# ---------------------------------------------------------------------------------------------------------- options
# What a choice's last column compares: key, word where it is less, word where it is more.
COMPARED = {"speed": ("tokens_per_second", "slower", "faster"),
            "memory": ("peak_memory_mib", "less memory", "more memory"),
            "state": ("optimizer_state_bytes", "less state", "more state")}
OPTION_COLUMNS = {"tokens/s": ("tokens_per_second", ",.0f"), "step, ms": ("step_ms", ",.0f"),
                  "peak memory, MiB": ("peak_memory_mib", ",.0f"),
                  "optimizer state, bytes": ("optimizer_state_bytes", ",.0f"),
                  "bytes per parameter": ("state_bytes_per_parameter", ".2f")}


def library_memory() -> float:
    """MiB that a process holds which has imported train_gpt.py and done nothing."""
    code = "import resource, train_gpt; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return int(said) / (2**20 if sys.platform == "darwin" else 2**10)


def compare(base: list[float], other: list[float], less: str, more: str) -> str:
    """How far `other`'s median is from `base`'s, in words, and how far that of each repeat is, signed, in brackets."""
    change = 100 * (statistics.median(other) / statistics.median(base) - 1)
    each = ", ".join(f"{100 * (b / a - 1):+.1f}" for a, b in zip(base, other, strict=True))
    return f"{abs(change):.1f}% {less if change < 0 else more} ({each})"


def option_row(base: tuple[str, list[dict]], other: tuple[str, list[dict]], kind: str, claim: str,
               libraries: float) -> list[str]:
    """The table's row of two arms (label, runs), compared by a `kind` of COMPARED; `libraries` in MiB."""
    cells, sides = [f"{base[0]} → {other[0]}"], (base[1], other[1])
    failed = next((run["failed"] for run in base[1] + other[1] if "failed" in run), None)
    if failed:
        return [*cells, *[""] * len(OPTION_COLUMNS), claim, f"failed: {failed}"]
    values = {key: [[run.get(key, math.nan) for run in side] for side in sides] for key, _ in OPTION_COLUMNS.values()}
    for key, form in OPTION_COLUMNS.values():
        a, b = map(statistics.median, values[key])
        cells.append("not reported" if math.isnan(a + b) else f"{a:{form}} → {b:{form}} (×{b / a:.2f})")
    key, *words = COMPARED[kind]
    said = compare(*values[key], *words)
    if kind == "memory":
        net = [[value - libraries for value in side] for side in values[key]]
        said += f"; without the libraries {compare(*net, *words)}"
    return [*cells, claim, said]


def bench_options(args: argparse.Namespace) -> list[str]:
    """Run the arms of each choice in turn, again and again, and tell what they differ by. Returns failures."""
    script, libraries = load_script(SCRIPT), library_memory()
    options = json.loads(OPTIONS.read_text(encoding="utf-8"))
    model = {**options["model"], "MAX_WALLCLOCK_SECONDS": f"{args.seconds + 1:g}", **dict(args.set)}
    common = {**model, "DATA_PATH": open_data(script, args.data)[0]}
    names = args.only or list(options["choices"])
    if not set(names) <= set(options["choices"]):
        raise SystemExit(f"error: --only {' '.join(names)}: there are {', '.join(options['choices'])}")
    choices = {name: options["choices"][name] for name in names}
    plan = [(name, arm, again) for name in names for again in range(args.repeats) for arm in choices[name]["arms"]]
    folder, runs = ROOT / args.runs / time.strftime("options_%Y%m%d_%H%M%S"), {}
    for name, arm, again in plan:
        place = folder / re.sub(r"\W+", "_", f"{name}_{arm}_{again + 1}")
        runs[name, arm, again] = run_script(script, place, "", {**common, **choices[name]["arms"][arm]})
    rows = [["choice", *OPTION_COLUMNS, "the seed's claim", "measured"]]
    for name, choice in choices.items():
        arms = [(arm, [runs[name, arm, again] for again in range(args.repeats)]) for arm in choice["arms"]]
        rows += [option_row(arms[0], arm, choice["compare"], claim, libraries)
                 for arm, claim in zip(arms[1:], choice["claims"], strict=True)]
    notes = (f"ARCH_MODE={model['ARCH_MODE']}, {model['NUM_LAYERS']} layers, {model['MODEL_DIM']} wide, "
             f"{model['TRAIN_BATCH_TOKENS']} tokens a step in windows of {model['TRAIN_SEQ_LEN']}; runs of "
             f"{args.seconds:g} s, {args.repeats} of each arm in turn; medians, and in brackets each repeat's change "
             f"in percent. Memory is the most that the process held: {libraries:,.0f} MiB of it are Python and its "
             "libraries, and where compiled the compiler.")
    named = [(f"{name}, {arm}", run) for (name, arm, _), run in runs.items()]
    return publish(args, "docs/lab/options_{date}.json", named, rows, notes, model=model, choices=choices,
                   repeats=args.repeats, libraries_mib=libraries,
                   runs=[{"choice": name, "arm": arm, **figures(run)} for (name, arm, _), run in runs.items()])


# ------------------------------------------------------------------------------------------------------------- arms
TOLERANCE = 0.05  # of the first arm's parameters
# Student's t, 97.5%, for 1 to 10 degrees of freedom (any table); the last one serves for more, on the safe side.
T_QUANTILES = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)


def interval(values: list[float]) -> tuple[float, float]:
    """Mean and half-width of its 95% interval (Student), infinite for a single value."""
    quantile = T_QUANTILES[min(len(values) - 1, len(T_QUANTILES)) - 1]
    half = quantile * statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else math.inf
    return statistics.fmean(values), half


def read_arms(words: list[str]) -> dict[str, dict[str, str]]:
    """Arms {name: {SETTING: value}}: CONFIG files, those of a .json file, or of ARMS by name. Raises SystemExit."""
    if words and words[0].endswith(".env"):
        return {Path(word).stem: {"CONFIG": os.path.relpath(word, ROOT)} for word in words}
    from_file = bool(words) and words[0].endswith(".json")
    arms = json.loads(Path(words[0] if from_file else ARMS).read_text(encoding="utf-8"))
    names = list(arms) if from_file or not words else words
    if wrong := [name for name in names if name not in arms]:
        raise SystemExit(f"error: {wrong[0]!r} is no arm; there are {', '.join(arms)}, or a .json file with others")
    return {name: {setting: str(value) for setting, value in arms[name].items()} for name in names}


def check_arms(script: ModuleType, config: str, arms: dict[str, dict[str, str]], tokenizer: dict) -> None:
    """Print the parameters of every arm; SystemExit if one cannot be built, or has too many or few and is no CONFIG."""
    first = 0
    for name, settings in arms.items():
        own = {**settings, "CONFIG": str(ROOT / settings.get("CONFIG", config))}
        try:
            resolved = script.load_settings(script.Settings, own, presets={"ARCH_MODE": script.ARCH_PRESETS})
            shape = script.model_config(resolved, tokenizer["vocab_size"], tokenizer["bos_id"])
        except script.UserError as error:
            raise SystemExit(f"error: arm {name}: {error}") from None
        count = sum(param.numel() for param in script.GPT(shape).parameters())
        first = first or count
        print(f"arm {name}: {count:,} parameters, {100 * (count / first - 1):+.1f}%")
        if not set(settings) <= setting_names(script):
            raise SystemExit(f"error: arm {name}: {', '.join(settings)}: not all are settings of {SCRIPT.name}")
        if "CONFIG" not in settings and abs(count / first - 1) > TOLERANCE:
            raise SystemExit(f"error: arm {name}: {count:,} parameters are more than {TOLERANCE:.0%} from {first:,}")


def run_pinned(make: Callable[[tuple], dict], runs: list[tuple], jobs: int, threads: int) -> list[dict]:
    """`make` of each of `runs`, `jobs` at a time, each job on its own `threads` cores; results in their order."""
    pinning = hasattr(os, "sched_setaffinity")  # Linux
    cores = sorted(os.sched_getaffinity(0)) if pinning else list(range(os.cpu_count() or 1))
    if jobs * threads > len(cores):
        raise SystemExit(f"error: --jobs {jobs} x --threads {threads} are more than the {len(cores)} cores here")
    slots = iter([cores[job * threads : (job + 1) * threads] for job in range(jobs)])
    pin = (lambda: os.sched_setaffinity(0, next(slots))) if pinning else None  # 0: this thread; its children inherit it
    with ThreadPoolExecutor(jobs, initializer=pin) as pool:
        return list(pool.map(make, runs))


def summarize(runs: dict[int, dict], first: dict[int, dict]) -> dict:
    """Means of an arm (seed -> run) with intervals, and of its difference to the first arm, seed by seed."""
    good = {seed: run for seed, run in runs.items() if "failed" not in run}
    if not good:
        return {}
    keys = ("tokens", "steps", "parameters", "tokens_per_second", "peak_memory_mib")
    summary = {key: round(statistics.fmean(run[key] for run in good.values())) for key in keys}
    summary["val_bpb"], summary["half_width"] = interval([run["val_bpb"] for run in good.values()])
    pairs = [run["val_bpb"] - first[seed]["val_bpb"] for seed, run in good.items() if "failed" not in first[seed]]
    if runs is not first and pairs:
        difference, half = interval(pairs)
        verdict = "wins" if difference + half < 0 else "loses" if difference - half > 0 else "tie"
        share = difference / statistics.fmean(first[seed]["val_bpb"] for seed in good if "failed" not in first[seed])
        summary.update(difference=difference, difference_half_width=half, share=share, verdict=verdict)
    return summary


def arm_row(name: str, summary: dict) -> list[str]:
    """The table's row of an arm."""
    if not summary:
        return [name, *[""] * 8, "failed"]
    form = "{parameters:,}|{tokens:,}|{steps:,}|{tokens_per_second:,}|{mfu:.1%}|{peak_memory_mib:,}|"
    form += "{val_bpb:.4f} ± {half_width:.4f}|"
    form += "{difference:+.4f} ± {difference_half_width:.4f} ({share:+.1%})" * ("verdict" in summary)
    return [name, *form.format(**summary).split("|"), summary.get("verdict", "")]


def write_configs(arms: dict[str, dict[str, str]], folder: Path, common: dict[str, str]) -> dict[str, str]:
    """Name -> CONFIG file with the settings of all runs too, of arms that are CONFIG files: so runs can be a record's,
    whose environment sets paths and the seed alone.
    """
    files = {name: folder / f"{name}.env" for name, own in arms.items() if "CONFIG" in own}
    for name, path in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = "".join(f"{key}={value}\n" for key, value in common.items())
        text = (ROOT / arms[name]["CONFIG"]).read_text(encoding="utf-8").rstrip("\n")
        path.write_text(f"{text}\n{lines}", encoding="utf-8")
    return {name: os.path.relpath(path, ROOT) for name, path in files.items()}


def add_mfu(script: ModuleType, runs: dict[str, dict], summaries: dict[str, dict], tokenizer: dict,
            threads: int) -> dict[str, float]:
    """Put the MFU of each arm's runs into its summary; dtype -> FLOP/s of which it is a share, of tools/bench.py."""
    torch.set_num_threads(threads)
    bench = load_script(Path(__file__).with_name("bench.py"))
    done = {name: run for name, own in runs.items() for run in own.values() if "failed" not in run}
    device = "cpu" if all("CPU" in run["hardware"] for run in done.values()) else "cuda"
    dtypes = sorted({run["dtype"] for run in done.values()})
    peaks = {dtype: bench.matmul_peak(device, getattr(torch, dtype)) for dtype in dtypes}
    for name, run in done.items():
        flops = bench.run_flops(script, run, tokenizer)
        summaries[name]["mfu"] = summaries[name]["tokens_per_second"] * flops / peaks[run["dtype"]]
    return peaks


def bench_arms(args: argparse.Namespace) -> list[str]:
    """Train every arm with every seed for the same seconds: bits per byte with intervals. Returns failures."""
    script = load_script(SCRIPT)
    arms, config = read_arms(args.arms), os.path.relpath(args.config, ROOT)
    data, manifest = open_data(script, args.data)
    check_arms(script, config, {name: {**dict(args.set), **own} for name, own in arms.items()}, manifest["tokenizer"])
    common = {"MAX_WALLCLOCK_SECONDS": f"{args.seconds:g}", "EVAL_STRIDE": "0",
              "VAL_LOSS_EVERY": "0", **dict(args.set)}
    files = write_configs(arms, ROOT / args.runs, common)
    plan = [(seed, name) for seed in range(1, args.seeds + 1) for name in arms]  # a drift of speed meets every arm

    def make(run: tuple[int, str]) -> dict:
        seed, name = run
        settings = {"DATA_PATH": data, **({} if name in files else {**common, **arms[name]}), "SEED": str(seed)}
        place = ROOT / args.runs / f"{name}_s{seed}"
        return run_script(script, place, files.get(name, config), settings, args.threads)

    runs = dict(zip(plan, run_pinned(make, plan, args.jobs, args.threads), strict=True))
    by_arm = {name: {seed: runs[seed, name] for seed in range(1, args.seeds + 1)} for name in arms}
    base = next(iter(arms))
    summaries = {name: summarize(by_arm[name], by_arm[base]) for name in arms}
    peaks = add_mfu(script, by_arm, summaries, manifest["tokenizer"], args.threads)
    rows = [["arm", "parameters", "tokens", "steps", "tokens/s", "MFU", "peak memory, MiB", "bits per byte",
             f"less {base}", "verdict"],
            *(arm_row(name, summary) for name, summary in summaries.items())]
    speeds = " and ".join(f"{peak / 1e9:,.0f} GFLOP/s in {dtype}" for dtype, peak in peaks.items())
    notes = (f"{manifest['name']}, {args.seconds:g} s a run, seeds 1 to {args.seeds}, {args.jobs} at a time on "
             f"{args.threads} cores each. 95% intervals: of the mean, and of the difference seed by seed, without a "
             f"correction for {len(arms) - 1} comparisons. MFU is of {speeds}, the best of "
             "20 square products of matrices here after the runs. "
             f"Runs that chose their weights past the clock: {sum(bool(run.get('events')) for run in runs.values())}.")
    named = [(f"{name}, seed {seed}", run) for (seed, name), run in runs.items()]
    return publish(args, "docs/lab/arms_{date}.json", named, rows, notes, config=args.config, data=manifest["name"],
                   jobs=args.jobs, threads=args.threads,
                   arms={name: {"settings": arms[name], **summaries[name],
                                "runs": {seed: figures(run) for seed, run in by_arm[name].items()}} for name in arms})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands, number = parser.add_subparsers(dest="command", required=True), {
        "type": int, "choices": range(1, 100), "metavar": "N"}
    options = add_run_command(commands, "options", "pairs of options in turn, beside what was claimed", bench_options,
                              20.0, "runs/bench")
    options.add_argument("--repeats", **number, default=2, help="runs of each arm (2)")
    options.add_argument("--only", nargs="+", default=[], metavar="CHOICE", help="of configs/options.json (all)")
    options.add_argument("--write-docs", action="store_true", help="put the table into docs/choices.md")
    arms = add_run_command(commands, "arms", "arms at equal seconds, intervals; goes on where it stopped", bench_arms,
                           120.0, "runs/arms")
    arms.add_argument("--arms", nargs="*", default=[], help="names of arms, a .json file {name: {SETTING: value}}, or "
                      "CONFIG files, each an arm of any size (all of configs/arms.json)")
    arms.add_argument("--config", default="configs/cpu.env", help="what the arms change (configs/cpu.env)")
    arms.add_argument("--seeds", **number, default=3, help="seeds 1 to this (3)")
    arms.add_argument("--jobs", **number, default=1, help="runs at a time (1)")
    arms.add_argument("--threads", **number, default=1, help="cores of each run (1)")
    run_command(parser)


if __name__ == "__main__":
    main()
