"""What the reinforcement-learning scripts gain on held-out prompts, seed by seed, with a control; a table and a plot.

    python tools/gains.py [--tasks sort reverse] [--seeds 3] [--jobs 1] [--write docs/lab/gains]
    python tools/gains.py --tasks sort --scripts GRPO PPO --set MAX_WALLCLOCK_SECONDS=60 --no-control

Each script runs each task by the clock, from a start that is the seed's (the same for all scripts), at its defaults but
for --set; the control's rewards are coins. Runs are subprocesses of one thread that see no settings of the environment.
Two at a time on two cores share memory and caches: --jobs 1 is what a user gets. A run that has ended is not repeated.

Gains are paired over held-out prompts: `greedy`; `pass1` over the start's; `pass1` over the start at its best
temperature (learning, not sharpening); `pass8`. They hold if greedy is up by 5 points with its interval above 0, pass1
over the best start is above 0, and pass8 is not down by over 3 points.
"""

import argparse
import hashlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = {"GRPO": "train_grpo.py", "GSPO": "train_gspo.py", "PPO": "train_ppo.py"}
CONTROL = "random"  # REWARD of the control
GAINS = ("greedy", "pass1", "pass1_over_best", "pass8")


def make_plan(
    tasks: list[str], names: list[str], seeds: int, settings: dict, control: bool
) -> list[dict]:
    """Rows of the table: task, name of the script, reward ("" is the task's own) and runs, one a seed."""
    rows = []
    for task in tasks:
        for reward in ("", CONTROL)[: 1 + control]:
            for name in names:
                script = SCRIPTS[name]
                given = {**settings, "task": task, **({"reward": reward} if reward else {})}
                runs = [
                    SimpleNamespace(
                        name=f"{script[6:-3]}_{task}_{reward or 'task'}_seed_{seed}",
                        script=script,
                        settings={**given, "seed": seed},
                        start="",
                    )
                    for seed in range(1, seeds + 1)
                ]
                rows.append(dict(task=task, name=name, reward=reward, runs=runs))
    return rows


def summarize(log: str, result: dict) -> dict:
    """What the table keeps of a run."""
    keys = (
        "before",
        "after",
        "gain",
        "steps",
        "train_seconds",
        "total_seconds",
        "phases",
        "commit",
        "code_sha256",
        "hardware",
        "versions",
        "weights",
    )
    return {key: result[key] for key in keys}


def tell(run: dict) -> str:
    """A run in a few words."""
    gains = ", ".join(f"{name} {run['gain'][name][0]:+.3f}" for name in GAINS)
    return f"{gains}; {run['steps']} steps, {run['total_seconds']:.0f} s"


def holds(gain: dict) -> bool:
    """See the head of this file. gain: name -> [mean, low, high]."""
    return (
        gain["greedy"][0] >= 0.05
        and gain["greedy"][1] > 0
        and gain["pass1_over_best"][0] > 0
        and gain["pass8"][0] >= -0.03
    )


# === shared: jobs ===
T95 = (
    12.706,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
)  # Student's t, two-sided, by degrees of freedom
KEPT = (
    "PATH",
    "HOME",
    "TMPDIR",
    "LANG",
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
    "VIRTUAL_ENV",
    "CUDA_VISIBLE_DEVICES",
)


def read_run(
    run: SimpleNamespace, out: Path, summarize: Callable[[str, dict], dict]
) -> dict | None:
    """`summarize` of log and result of a run; None if it has not ended. SystemExit if it was made in another way.

    run: name, of its folder in `out`; script; settings, {field: value}; start, the name of the run whose step_000000 it
    begins from, or "".
    """
    folder = out / run.name
    if not (folder / "result.json").exists():
        return None
    result = json.loads((folder / "result.json").read_bytes())
    stored = {**result["settings"], "code": result["code_sha256"]}
    asked = {**run.settings, "code": hashlib.sha256((ROOT / run.script).read_bytes()).hexdigest()}
    if wrong := [key for key, value in asked.items() if type(stored[key])(value) != stored[key]]:
        raise SystemExit(
            f"error: {folder}: made with another {', '.join(wrong)}; remove it, or name another --out"
        )
    return summarize((folder / "log.txt").read_text(encoding="utf-8"), result)


def start_run(run: SimpleNamespace, out: Path) -> subprocess.Popen:
    """Start a run in a folder of its own; stderr goes to NAME.err."""
    shutil.rmtree(out / run.name, ignore_errors=True)  # one that was broken off
    settings = {"OUT_DIR": out, "RUN_ID": run.name, "OMP_NUM_THREADS": 1, **run.settings}
    if run.start:
        settings["INIT_FROM"] = out / run.start / "step_000000"
    environ = {name: os.environ[name] for name in KEPT if name in os.environ}
    environ |= {name.upper(): str(value) for name, value in settings.items()}
    environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), environ.get("PYTHONPATH", "")])
    module = Path(run.script).stem
    # By itself a script logs a step every ten seconds.
    every_step = f"import sys, {module} as T; T.LOG_SECONDS = 0; sys.exit(T.exit_code(T.main))"
    with open(
        out / f"{run.name}.err", "wb"
    ) as errors:  # a session of its own: Ctrl-C is for this process
        return subprocess.Popen(
            [sys.executable, "-c", every_step],
            env=environ,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
        )


def run_all(
    runs: list[SimpleNamespace],
    out: Path,
    jobs: int,
    summarize: Callable[[str, dict], dict],
    tell: Callable[[dict], str],
) -> dict[str, dict | None]:
    """By name what read_run gives, after `jobs` at a time have made what had not ended; None where that failed.

    tell: of a summary, what is printed when the run has ended.
    """
    found = {run.name: read_run(run, out, summarize) for run in runs}
    left, active, done, began = [run for run in runs if found[run.name] is None], [], 0, time.time()
    total = len(left)
    try:
        while left or active:
            while left and len(active) < jobs:
                active.append((left[0], start_run(left.pop(0), out)))
            time.sleep(0.1)
            for run, process in [pair for pair in active if pair[1].poll() is not None]:
                active.remove((run, process))
                summary = found[run.name] = read_run(run, out, summarize)
                last = (out / f"{run.name}.err").read_text(encoding="utf-8").splitlines() or [""]
                said = (
                    tell(summary)
                    if summary
                    else f"FAILED, exit code {process.returncode}: {last[-1]}"
                )
                done, minutes = done + 1, (time.time() - began) / 60
                print(
                    f"[{done}/{total}] {run.name}: {said}; {minutes:.1f} min, "
                    f"about {minutes / done * (total - done):.0f} left",
                    flush=True,
                )
    finally:
        for _, process in active:
            process.kill()
            process.wait()
    return found


def interval(values: list[float]) -> list[float]:
    """Mean of values, one a seed, and the ends of its 95% interval, by Student's t; of a single value that alone."""
    if len(values) == 1:
        return values
    t = T95[len(values) - 2] if len(values) - 2 < len(T95) else 1.96
    mean, half = statistics.fmean(values), t * statistics.stdev(values) / len(values) ** 0.5
    return [mean, mean - half, mean + half]


# === end: jobs ===


def fill_rows(rows: list[dict], found: dict[str, dict | None]) -> list[dict]:
    """Rows with, where all runs have ended: each run's `before`, `gain`, `holds`, steps, seconds; `mean`, of gains over
    seeds with intervals; and of a control `share`, its greedy gain over that of the real reward (nothing gained: 0).
    """
    filled, real = [], {}
    for row in rows:
        runs = [found[run.name] for run in row["runs"]]
        new = {**row, "runs": [run.name for run in row["runs"]], "ended": all(runs)}
        if all(runs):
            new |= {
                "before": [run["before"] for run in runs],
                "gain": [run["gain"] for run in runs],
                "holds": [holds(run["gain"]) for run in runs],
                "steps": [run["steps"] for run in runs],
                "seconds": [run["total_seconds"] for run in runs],
                "mean": {name: interval([run["gain"][name][0] for run in runs]) for name in GAINS},
            }
            key = row["task"], row["name"]
            if not row["reward"]:
                real[key] = new["mean"]["greedy"][0]
            elif real.get(key, 0) > 0:
                new["share"] = max(0.0, new["mean"]["greedy"][0]) / real[key]
        filled.append(new)
    return filled


def markdown(rows: list[dict], note: str) -> str:
    """The table: a line a seed, and the mean over seeds."""

    def score(values: list[float], sign: str = "+") -> str:
        return f"{values[0]:{sign}.3f}" + (
            f" [{values[1]:{sign}.3f}, {values[2]:{sign}.3f}]" if values[1:] else ""
        )

    head = [
        "task",
        "script",
        "reward",
        "seed",
        "greedy before",
        *(f"{name} gain" for name in GAINS),
        "holds",
        "steps",
        "seconds",
    ]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        cells = [row["task"], row["name"], row["reward"] or "task"]
        if not row["ended"]:
            lines.append([*cells, "", "failed", *[""] * (len(head) - 5)])
            continue
        for seed, (before, gain) in enumerate(zip(row["before"], row["gain"], strict=True)):
            numbers = [score(before["greedy"][:1], ""), *(score(gain[name]) for name in GAINS)]
            lines.append(
                [
                    *cells,
                    str(seed + 1),
                    *numbers,
                    "yes" if row["holds"][seed] else "no",
                    str(row["steps"][seed]),
                    f"{row['seconds'][seed]:.0f}",
                ]
            )
        share = f"{row['share']:.2f} of the real gain" if "share" in row else ""
        lines.append(
            [*cells, "mean", share, *(score(row["mean"][name]) for name in GAINS), *[""] * 3]
        )
    return f"{note}\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def plot(rows: list[dict], path: Path) -> str:
    """Draw gains, a panel each, a point with its interval a seed; a line that says where, or how to install matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return "no plot: needs matplotlib; `pip install matplotlib` and this command again, which repeats no run"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(GAINS), figsize=(5 * len(GAINS), 5), layout="constrained")
    rows = [row for row in rows if row["ended"]]
    for axis, name in zip(axes, GAINS, strict=True):
        for at, row in enumerate(rows):
            for seed, gain in enumerate(row["gain"]):
                mean, low, high = gain[name]
                axis.errorbar(
                    at + 0.15 * seed, mean, [[mean - low], [high - mean]], fmt="o", color=f"C{seed}"
                )
        axis.axhline(0, color="grey", linewidth=0.5)
        axis.set(title=f"{name} gain", xticks=range(len(rows)))
        axis.set_xticklabels(
            [f"{row['name']} {row['task']} {row['reward']}" for row in rows],
            rotation=60,
            ha="right",
        )
    figure.savefig(path, dpi=80)
    return f"plot: {path}"


def parse_set(text: str) -> tuple[str, str]:
    """Field and value of NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name.lower(), value


def main() -> int:
    """Make the runs, write table, JSON and plot; 1 if a run failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", default=["sort", "reverse"])
    parser.add_argument("--scripts", nargs="+", choices=SCRIPTS, default=list(SCRIPTS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--set",
        type=parse_set,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="of every run",
    )
    parser.add_argument(
        "--no-control", action="store_true", help="leave out the runs whose rewards are coins"
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, of one thread each")
    parser.add_argument(
        "--out", type=Path, default=Path("runs", "gains"), help="folder of the runs"
    )
    parser.add_argument(
        "--write", type=Path, help="what is written, without .md, .json, .png; else OUT/gains"
    )
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    rows, out = (
        make_plan(args.tasks, args.scripts, args.seeds, dict(args.set), not args.no_control),
        args.out.resolve(),
    )
    out.mkdir(parents=True, exist_ok=True)
    try:
        found = run_all(
            [run for row in rows for run in row["runs"]], out, args.jobs, summarize, tell
        )
    except KeyboardInterrupt:
        print(f"stopped; the same command goes on, and leaves alone what has ended in {args.out}")
        return 130
    command, filled = " ".join(["python", "tools/gains.py", *sys.argv[1:]]), fill_rows(rows, found)
    made = next(
        (
            {key: run[key] for key in ("commit", "hardware", "versions")}
            for run in found.values()
            if run
        ),
        {},
    )
    text = markdown(filled, f"`{command}`\n")
    path = args.write or args.out / "gains"
    data = {
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        **made,
        "rows": filled,
        "runs": found,
    }
    path.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text + "\n" + plot(filled, path.with_suffix(".png")))
    return 0 if all(found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
