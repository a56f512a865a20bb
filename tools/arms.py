"""Compare choices on this machine: pairs of options, or variants of a run ("arms") at equal seconds.

    python tools/arms.py options --only compile
    python tools/arms.py arms --data data/mine --seconds 120 --seeds 3
    python tools/arms.py arms --arms train_gpt.py mine.py --seconds 60 --seeds 3

Runs train_gpt.py, or a changed copy of it, with settings in its environment and reads its
result.json and log.txt. Exported settings are not passed on; use `--set NAME=VALUE`. Step time is
the median over the run, tokens/s is the batch over that time. Without --data the text is Python's
own standard library.
"""

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import bench
import numpy as np
import torch
from common import (
    ROOT,
    SCRIPT,
    add_run_options,
    available_cores,
    half_width,
    load_script,
    open_data,
    publish,
    run_command,
    run_script,
    saved_figures,
    setting_names,
)
from endings import run_tool

OPTIONS = ROOT / "configs" / "options.json"
ARMS = ROOT / "configs" / "arms.json"

# ----------------------------------------------------------------------------------------- options
# What the last column of a choice compares: key, word for less, word for more.
COMPARED = {
    "speed": ("tokens_per_second", "slower", "faster"),
    "memory": ("peak_memory_mib", "less memory", "more memory"),
    "state": ("optimizer_state_bytes", "less state", "more state"),
}
OPTION_COLUMNS = {
    "tokens/s": ("tokens_per_second", ",.0f"),
    "step, ms": ("step_ms", ",.0f"),
    "peak memory, MiB": ("peak_memory_mib", ",.0f"),
    "optimizer state, bytes": ("optimizer_state_bytes", ",.0f"),
    "bytes per parameter": ("state_bytes_per_parameter", ".2f"),
}


def library_memory() -> float:
    """Return the MiB of a process that has imported train_gpt.py and done nothing."""
    code = "import resource, train_gpt; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return int(done.stdout) / unit


def describe_change(base: list[float], other: list[float], less: str, more: str) -> str:
    """Return the change of the medians in words, and the signed change of every repeat."""
    change = 100 * (statistics.median(other) / statistics.median(base) - 1)
    repeats = [f"{100 * (b / a - 1):+.1f}" for a, b in zip(base, other, strict=True)]
    return f"{abs(change):.1f}% {less if change < 0 else more} ({', '.join(repeats)})"


def option_row(
    base: tuple[str, list[dict]],
    other: tuple[str, list[dict]],
    kind: str,
    claim: str,
    libraries: float,
) -> list[str]:
    """Return the table row of two arms (label, runs). `libraries` is memory in MiB."""
    name = f"{base[0]} → {other[0]}"
    failures = [run["failed"] for run in base[1] + other[1] if "failed" in run]
    if failures:
        return [name, *[""] * len(OPTION_COLUMNS), claim, f"failed: {failures[0]}"]

    def values(key: str) -> tuple[list[float], list[float]]:
        old = [run.get(key, math.nan) for run in base[1]]
        new = [run.get(key, math.nan) for run in other[1]]
        return old, new

    cells = []
    for key, form in OPTION_COLUMNS.values():
        a, b = (statistics.median(side) for side in values(key))
        if math.isnan(a + b):
            cells.append("not reported")
        else:
            cells.append(f"{a:{form}} → {b:{form}} (×{b / a:.2f})")
    key, less, more = COMPARED[kind]
    measured = describe_change(*values(key), less, more)
    if kind == "memory":
        old, new = (np.array(side) - libraries for side in values(key))
        net = describe_change(old.tolist(), new.tolist(), less, more)
        measured += f"; without the libraries {net}"
    return [name, *cells, claim, measured]


def read_choices(names: list[str]) -> tuple[dict, dict]:
    """Return (settings of the model, choices by name) of configs/options.json."""
    options = json.loads(OPTIONS.read_text(encoding="utf-8"))
    choices = options["choices"]
    if not set(names) <= set(choices):
        raise SystemExit(f"error: --only {' '.join(names)}: there are {', '.join(choices)}")
    return options["model"], {name: choices[name] for name in names or choices}


def bench_options(args: argparse.Namespace) -> list[str]:
    """Run the arms of each choice in turn and report how they differ. Returns failures."""
    script = load_script(SCRIPT)
    libraries = library_memory()
    model, choices = read_choices(args.only)
    model |= {"MAX_WALLCLOCK_SECONDS": f"{args.seconds + 1:g}", **dict(args.set)}
    common = {**model, "DATA_PATH": open_data(script, args.data)[0]}
    folder = ROOT / args.runs / time.strftime("options_%Y%m%d_%H%M%S")
    runs = {}
    for name, choice in choices.items():
        for repeat in range(1, args.repeats + 1):
            for arm, settings in choice["arms"].items():
                place = folder / re.sub(r"\W+", "_", f"{name}_{arm}_{repeat}")
                runs[name, arm, repeat] = run_script(script, place, "", {**common, **settings})
    rows = [["choice", *OPTION_COLUMNS, "claimed elsewhere", "measured"]]
    for name, choice in choices.items():
        arms = []
        for arm in choice["arms"]:
            repeats = [runs[name, arm, repeat] for repeat in range(1, args.repeats + 1)]
            arms.append((arm, repeats))
        base, *others = arms
        for other, claim in zip(others, choice["claims"], strict=True):
            rows.append(option_row(base, other, choice["compare"], claim, libraries))
    notes = (
        f"ARCH_MODE={model['ARCH_MODE']}, {model['NUM_LAYERS']} layers, {model['MODEL_DIM']} wide, "
        f"{model['TRAIN_BATCH_TOKENS']} tokens a step in windows of {model['TRAIN_SEQ_LEN']}; runs "
        f"of {args.seconds:g} s, {args.repeats} of each arm in turn; medians, and in brackets each "
        "repeat's change in percent. Memory is the most that the process held, of which "
        f"{libraries:,.0f} MiB are Python and its libraries (and the compiler, where one runs)."
    )
    named = [(f"{name}, {arm}", run) for (name, arm, _), run in runs.items()]
    figures = {
        "model": model,
        "choices": choices,
        "repeats": args.repeats,
        "libraries_mib": libraries,
        "runs": [
            {"choice": name, "arm": arm, **saved_figures(run)}
            for (name, arm, _), run in runs.items()
        ],
    }
    return publish(args, "docs/lab/options_{date}.json", named, rows, notes, figures)


# -------------------------------------------------------------------------------------------- arms
TOLERANCE = 0.05  # of the first arm's parameters outside embeddings


def read_arms(words: list[str]) -> dict[str, dict[str, str]]:
    """Return arms, {name: {SETTING: value}}: scripts, CONFIG files, a .json file, or names in ARMS.

    The script of an arm is under SCRIPT, train_gpt.py if there is none.
    """
    if words and words[0].endswith((".env", ".py")):
        arms = {}
        for word in words:
            kind = "SCRIPT" if word.endswith(".py") else "CONFIG"
            arms[Path(word).stem] = {kind: os.path.relpath(word, ROOT)}
        return arms
    path = ARMS
    if words and words[0].endswith(".json"):
        path = Path(words[0])
        words = []
    arms = json.loads(path.read_text(encoding="utf-8"))
    for name in words:
        if name not in arms:
            raise SystemExit(
                f"error: {name!r} is no arm; there are {', '.join(arms)}, or a .json file"
            )
    chosen = {}
    for name in words or arms:
        chosen[name] = {setting: str(value) for setting, value in arms[name].items()}
    return chosen


def script_of(settings: dict[str, str]) -> ModuleType:
    """Return the script of an arm."""
    path = ROOT / settings.get("SCRIPT", SCRIPT)
    if not path.is_file():
        raise SystemExit(f"error: arm {path}: no such script")
    return load_script(path)


def check_arms(config: str, arms: dict[str, dict], tokenizer: dict) -> None:
    """Print the parameters of every arm, but for those of embeddings and of the head.

    Raises SystemExit if an arm cannot be built, or if it has settings of its own and its parameters
    differ from the first arm's by more than TOLERANCE.
    """
    first = 0
    for name, arm in arms.items():
        script = script_of(arm)
        settings = {key: value for key, value in arm.items() if key != "SCRIPT"}
        unknown = sorted(set(settings) - setting_names(script))
        environ = {**settings, "CONFIG": str(ROOT / settings.get("CONFIG", config))}
        presets = {"ARCH_MODE": script.ARCH_PRESETS}
        try:
            resolved = script.load_settings(script.Settings, environ, presets=presets)
            script.Plan(resolved)  # or a UserError, for example for RESERVE_SECONDS above --seconds
            shape = script.model_config(resolved, tokenizer["vocab_size"], tokenizer["bos_id"])
        except script.UserError as error:
            raise SystemExit(f"error: arm {name}: {error}") from None
        if unknown:
            raise SystemExit(f"error: arm {name}: {unknown[0]}: no setting of the script")
        counts = script.count_parameters(script.GPT(shape))
        count = counts["total"] - counts["embedding"]
        first = first or count
        change = count / first - 1
        print(f"arm {name}: {count:,} parameters outside embeddings, {100 * change:+.1f}%")
        if not {"CONFIG", "SCRIPT"} & arm.keys() and abs(change) > TOLERANCE:
            raise SystemExit(
                f"error: arm {name}: {count:,} parameters are more than {TOLERANCE:.0%} from "
                f"{first:,}"
            )


def run_pinned(
    make: Callable[[tuple], dict], runs: list[tuple], jobs: int, threads: int
) -> list[dict]:
    """Return make(run) of each run, `jobs` at a time, each job on its own `threads` cores."""
    can_pin = hasattr(os, "sched_setaffinity")  # Linux
    cores = available_cores()
    if jobs * threads > len(cores):
        raise SystemExit(
            f"error: --jobs {jobs} x --threads {threads} are more than the {len(cores)} cores here"
        )
    slots = iter([cores[job * threads : (job + 1) * threads] for job in range(jobs)])

    def pin() -> None:
        if can_pin:
            os.sched_setaffinity(0, next(slots))  # 0: this thread; its children inherit it

    with ThreadPoolExecutor(jobs, initializer=pin) as pool:
        return list(pool.map(make, runs))


def summarize(runs: dict[int, dict], first: dict[int, dict]) -> dict:
    """Return the means of an arm (seed -> run) and of its difference from the first arm.

    The difference is taken seed by seed. Both have half of a 95% interval.
    """
    good = {seed: run for seed, run in runs.items() if "failed" not in run}
    if not good:
        return {}
    summary = {}
    for key in ("tokens", "steps", "parameters", "tokens_per_second", "peak_memory_mib"):
        summary[key] = round(statistics.fmean(run[key] for run in good.values()))
    scores = [run["val_bpb"] for run in good.values()]
    summary["val_bpb"] = statistics.fmean(scores)
    summary["half_width"] = half_width(scores)
    paired = [seed for seed in good if "failed" not in first[seed]]
    if runs is first or not paired:
        return summary
    differences = [good[seed]["val_bpb"] - first[seed]["val_bpb"] for seed in paired]
    difference = statistics.fmean(differences)
    half = half_width(differences)
    verdict = "tie"
    if difference + half < 0:
        verdict = "wins"
    elif difference - half > 0:
        verdict = "loses"
    summary["difference"] = difference
    summary["difference_half_width"] = half
    summary["share"] = difference / statistics.fmean(first[seed]["val_bpb"] for seed in paired)
    summary["verdict"] = verdict
    return summary


def arm_row(name: str, summary: dict) -> list[str]:
    """Return the table row of an arm."""
    if not summary:
        return [name, *[""] * 8, "failed"]
    form = (
        "{parameters:,}|{tokens:,}|{steps:,}|{tokens_per_second:,}|{mfu:.1%}|{peak_memory_mib:,}|"
        "{val_bpb:.4f} ± {half_width:.4f}|"
    )
    if "verdict" in summary:
        form += "{difference:+.4f} ± {difference_half_width:.4f} ({share:+.1%})"
    return [name, *form.format(**summary).split("|"), summary.get("verdict", "")]


def write_configs(arms: dict[str, dict], folder: Path, common: dict[str, str]) -> dict[str, str]:
    """Write a CONFIG file with the common settings for each arm that is one; return their paths.

    The environment of such a run sets only paths and the seed, so a record can be made of it.
    """
    paths = {}
    for name, settings in arms.items():
        if "CONFIG" in settings:
            path = folder / f"{name}.env"
            path.parent.mkdir(parents=True, exist_ok=True)
            own = (ROOT / settings["CONFIG"]).read_text(encoding="utf-8").splitlines()
            # A config file may have each name once: a common setting replaces the file's.
            names = [line.partition("=")[0].removeprefix("export ").strip() for line in own]
            lines = [line for name, line in zip(names, own, strict=True) if name not in common]
            lines += [f"{key}={value}" for key, value in common.items()]
            path.write_text("\n".join([*lines, ""]), encoding="utf-8")
            paths[name] = os.path.relpath(path, ROOT)
    return paths


def add_mfu(
    script: ModuleType, runs: list[tuple], summaries: dict, tokenizer: dict
) -> dict[str, float]:
    """Add the model FLOPs utilization of each arm to its summary; return peak FLOP/s by dtype."""
    peaks = {}
    for name, run in runs:
        if "failed" in run:
            continue
        dtype = run["dtype"]
        if dtype not in peaks:
            device = "cpu" if "CPU" in run["hardware"] else "cuda"
            peaks[dtype] = bench.matmul_peak(device, getattr(torch, dtype))
        if "mfu" not in summaries[name]:
            flops = bench.run_flops(script, run, tokenizer)
            summaries[name]["mfu"] = summaries[name]["tokens_per_second"] * flops / peaks[dtype]
    return peaks


def run_arms(
    args: argparse.Namespace, arms: dict[str, dict], data: str
) -> dict[tuple[int, str], dict]:
    """Return the runs of every arm with every seed, by (seed, name)."""
    config = os.path.relpath(args.config, ROOT)
    common = {
        "MAX_WALLCLOCK_SECONDS": f"{args.seconds:g}",
        "EVAL_STRIDE": "0",
        "VAL_LOSS_EVERY": "0",
        **dict(args.set),
    }
    configs = write_configs(arms, ROOT / args.runs, common)

    def make(run: tuple[int, str]) -> dict:
        seed, name = run
        settings = {} if name in configs else {**common, **arms[name]}
        settings |= {"DATA_PATH": data, "SEED": str(seed)}
        settings.pop("SCRIPT", None)
        script = script_of(arms[name])
        folder = ROOT / args.runs / f"{name}_s{seed}"
        return run_script(script, folder, configs.get(name, config), settings, args.threads)

    # The arms take turns, so that a drift of the machine's speed affects all of them.
    plan = []
    for seed in range(1, args.seeds + 1):
        plan += [(seed, name) for name in arms]
    return dict(zip(plan, run_pinned(make, plan, args.jobs, args.threads), strict=True))


def bench_arms(args: argparse.Namespace) -> list[str]:
    """Train every arm with every seed for the same seconds, and compare. Returns failures."""
    script = load_script(SCRIPT)
    arms = read_arms(args.arms)
    data, manifest = open_data(script, args.data)
    tokenizer = manifest["tokenizer"]
    common = {"MAX_WALLCLOCK_SECONDS": f"{args.seconds:g}", **dict(args.set)}
    checked = {name: {**common, **settings} for name, settings in arms.items()}
    check_arms(os.path.relpath(args.config, ROOT), checked, tokenizer)
    runs = run_arms(args, arms, data)
    by_arm = {name: {} for name in arms}
    for (seed, name), run in runs.items():
        by_arm[name][seed] = run
    base = next(iter(arms))
    summaries = {name: summarize(by_arm[name], by_arm[base]) for name in arms}
    torch.set_num_threads(args.threads)
    peaks = add_mfu(script, [(name, run) for (_, name), run in runs.items()], summaries, tokenizer)
    head = "arm|parameters|tokens|steps|tokens/s|MFU|peak memory, MiB|bits per byte"
    rows = [[*head.split("|"), f"less {base}", "verdict"]]
    rows += [arm_row(name, summary) for name, summary in summaries.items()]
    speeds = [f"{peak / 1e9:,.0f} GFLOP/s in {dtype}" for dtype, peak in peaks.items()]
    late = sum(bool(run.get("events")) for run in runs.values())
    notes = (
        f"{manifest['name']}, {args.seconds:g} s a run, seeds 1 to {args.seeds}, {args.jobs} at a "
        f"time on {args.threads} cores each. 95% intervals: of the mean, and of the difference seed "
        f"by seed, without a correction for {len(arms) - 1} comparisons. MFU is relative to "
        f"{' and '.join(speeds)}, the best of 20 square matrix products here after the runs. "
        f"Runs that chose their weights past the clock: {late}."
    )
    named = [(f"{name}, seed {seed}", run) for (seed, name), run in runs.items()]
    figures = {
        "config": args.config,
        "data": manifest["name"],
        "jobs": args.jobs,
        "threads": args.threads,
        "arms": {},
    }
    for name, settings in arms.items():
        saved = {seed: saved_figures(run) for seed, run in by_arm[name].items()}
        figures["arms"][name] = {"settings": settings, **summaries[name], "runs": saved}
    return publish(args, "runs/arms/arms_{date}.json", named, rows, notes, figures)


def main() -> None:
    """Run the command line described at the top of this file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    number = {"type": int, "choices": range(1, 100), "metavar": "N"}
    options = commands.add_parser("options", help="pairs of options in turn, beside the claims")
    add_run_options(options, 20.0, "runs/bench")
    options.add_argument("--repeats", **number, default=2, help="runs of each arm (2)")
    options.add_argument(
        "--only", nargs="+", default=[], metavar="CHOICE", help="of configs/options.json (all)"
    )
    options.add_argument(
        "--write-docs", action="store_true", help="put the table into docs/choices.md"
    )
    options.set_defaults(run=bench_options)
    arms = commands.add_parser(
        "arms", help="arms at equal seconds, with intervals; continues where it stopped"
    )
    add_run_options(arms, 120.0, "runs/arms")
    arms.add_argument(
        "--arms",
        nargs="*",
        default=[],
        help="names of arms, a .json file {name: {SETTING: value}}, or CONFIG files and scripts, "
        "each an arm of any size (all of configs/arms.json)",
    )
    arms.add_argument(
        "--config", default="configs/cpu.env", help="what the arms change (configs/cpu.env)"
    )
    arms.add_argument("--seeds", **number, default=3, help="seeds 1 to this (3)")
    arms.add_argument("--jobs", **number, default=1, help="runs at a time (1)")
    arms.add_argument("--threads", **number, default=1, help="cores of each run (1)")
    arms.set_defaults(run=bench_arms)
    run_command(parser)


if __name__ == "__main__":
    run_tool(main)
