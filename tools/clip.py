"""The clip experiment: what the clip range does in GRPO and GSPO, all else being equal; tables, their JSON and a plot.

    python tools/clip.py [--jobs 2] [--out runs/clip] [--write docs/lab/clip]
    python tools/clip.py --quick                                               # all runs, but tiny, and one seed

Four clip ranges by the seeds, then at the first seed learning rates, group sizes (with as many samples a step) and
numbers of mini-batches. The runs of a seed start from the same weights. The learning rate is constant; no averages, no
quantization-aware training, 8 bits: the end is the policy of the last step. Runs go by steps, in subprocesses that see
no settings of the environment, and one that has ended is not repeated: after an interruption the same command goes on.

Active: the clip is what the loss takes, so the token has no gradient. Outside: the ratio is out of the range. Both are
shares of tokens. Stable: held-out pass1 at the end is at least its highest on the way, the start included, less twice
its standard error over problems, in every seed; and no step is non-finite.
"""

import argparse
import ast
import hashlib
import itertools
import json
import os
import re
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
# arm -> script, and all in which it differs from the others
ARMS = {
    "GRPO .2/.28": ("train_grpo.py", dict(left_clip_range=0.2, right_clip_range=0.28)),
    "GSPO 3e-4/4e-4": ("train_gspo.py", dict(left_clip_range=3e-4, right_clip_range=4e-4)),
    "GSPO .002/.002": ("train_gspo.py", dict(left_clip_range=0.002, right_clip_range=0.002)),
    "no clip": ("train_grpo.py", dict(left_clip_range=1e9, right_clip_range=1e9)),  # ratio of a token
}
VARIED = dict(learning_rate=(1e-4, 3e-4, 1e-3), group_size=(2, 4, 8, 16), mini_batches=(1, 2, 4, 8))  # of two arms
BASE = dict(task="sort", learning_rate=3e-4, group_size=8, mini_batches=4, epochs=1, lr_schedule="constant", ema=0,
            swa=0, qat=0, matrix_bits=8, save_every=0, max_wallclock_seconds=0, iterations=100, val_loss_every=10,
            eval_prompts=512, eval_samples=8)
QUICK = dict(iterations=2, val_loss_every=1, eval_prompts=8)
START = dict(iterations=1, learning_rate=0, save_every=1, prompts_per_step=2, group_size=2, mini_batches=1,
             eval_prompts=2, eval_samples=1)  # a run whose step_000000 the others of its seed start from
SAMPLES = 256  # of a step
MEASURED = ("reward", "entropy", "clip_active", "clip_outside", "log_ratio", "grad_norm", "zero_variance", "length")


# === shared: jobs ===
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # Student's t, two-sided, by degrees of freedom
KEPT = ("PATH", "HOME", "TMPDIR", "LANG", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "CUDA_VISIBLE_DEVICES")


def read_run(run: SimpleNamespace, out: Path, summarize: Callable[[str, dict], dict]) -> dict | None:
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
        raise SystemExit(f"error: {folder}: made with another {', '.join(wrong)}; remove it, or name another --out")
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
    with open(out / f"{run.name}.err", "wb") as errors:  # a session of its own: Ctrl-C is for this process
        return subprocess.Popen([sys.executable, "-c", every_step], env=environ, stdout=subprocess.DEVNULL,
                                stderr=errors, start_new_session=True)


def run_all(runs: list[SimpleNamespace], out: Path, jobs: int, summarize: Callable[[str, dict], dict],
            tell: Callable[[dict], str]) -> dict[str, dict | None]:
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
                said = tell(summary) if summary else f"FAILED, exit code {process.returncode}: {last[-1]}"
                done, minutes = done + 1, (time.time() - began) / 60
                print(f"[{done}/{total}] {run.name}: {said}; {minutes:.1f} min, "
                      f"about {minutes / done * (total - done):.0f} left", flush=True)
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


def make_plan(seeds: int, samples: int, changes: dict) -> tuple[list[SimpleNamespace], list[dict]]:
    """The runs that make the starts; and the rows of the tables: what is varied, arm, value, runs (one a seed)."""
    base = {**BASE, **changes}

    def run(seed: int, script: str, settings: dict, *names: object) -> SimpleNamespace:
        name = re.sub(r"[^a-z0-9.]+", "_", " ".join(map(str, (*names, "seed", seed))).lower())
        start = "" if names == ("start",) else f"start_seed_{seed}"
        return SimpleNamespace(name=name, script=script, settings={**settings, "seed": seed}, start=start)

    def of_arm(arm: str, seed: int, key: str = "epochs", value: float = 1) -> SimpleNamespace:
        settings = {**base, key: value, **ARMS[arm][1]}
        settings["prompts_per_step"] = samples // settings["group_size"]
        change = [key, value] if value != base[key] else []  # where there is none, the arm's own run is in this row too
        return run(seed, ARMS[arm][0], settings, arm, *change)

    every = range(1, seeds + 1)
    rows = [dict(varied="", arm=arm, value="", runs=[of_arm(arm, seed) for seed in every]) for arm in ARMS]
    rows += [dict(varied=key, arm=arm, value=value, runs=[of_arm(arm, 1, key, value)])
             for key, values in VARIED.items() for value in values for arm in list(ARMS)[:2]]
    return [run(seed, "train_grpo.py", {**base, **START}, "start") for seed in every], rows


def read_log(text: str) -> SimpleNamespace:
    """Of a log: `steps`, each a dict of MEASURED, step and `clips`, [active, outside] by mini-batch; `curve`, [step,
    held-out scores] but for the end; `bad`, how many steps were not finite.
    """
    found = SimpleNamespace(steps=[], curve=[], bad=0)
    for line in text.splitlines():
        if start := re.match(r"step:(\d+)/(\d+) (reward|held_out/)", line):
            step, last, kind = int(start[1]), int(start[2]), start[3]
            values = {name: value for name, value in (pair.split(":") for pair in line.split())}
            if kind == "reward":
                updates = range(1, 1 + sum(name.startswith("clip_active_") for name in values))
                clips = [[float(values[f"clip_{name}_{at}"]) for name in ("active", "outside")] for at in updates]
                measured = {name: float(values[name]) for name in MEASURED}
                found.steps.append({"step": step, **measured, "clips": clips})
            elif 0 < step < last:
                means = {name.removeprefix("held_out/"): [float(value)] for name, value in values.items()
                         if name.startswith("held_out/") and name != "held_out/n"}
                found.curve.append([step, means])
        elif start := re.match(r"before: ({.*})$", line):
            found.curve.append([0, ast.literal_eval(start[1])])
        found.bad += line.startswith("event: skipped_step ")
    return found


def is_stable(curve: list, bad: int) -> bool:
    """See the head of this file. curve: [step, scores], pass1 being a mean and its 95% interval; the last: the end."""
    mean, low, high = curve[-1][1]["pass1"]
    return not bad and mean >= max(scores["pass1"][0] for _, scores in curve) - (high - low) / 1.96


def summarize(text: str, result: dict) -> dict:
    """A run in numbers, from its log and result: `means` over steps; `curves`, [x, y], by mini-batch and over time,
    every so many steps the mean of those before, or the held-out scores; `end`, the last, with intervals; `bad`;
    `stable`; how it was `made`.
    """
    log, end = read_log(text), {name: score for name, score in result["after"].items() if name != "n"}
    curve, curves = [*log.curve, [result["steps"], end]], {name: [] for name in MEASURED}
    every = result["settings"]["val_loss_every"]
    for part, steps in itertools.groupby(log.steps, lambda step: -(-step["step"] // every) * every):
        for name, mean in mean_of([{name: step[name] for name in MEASURED} for step in steps]).items():
            curves[name].append([part, mean])
    curves |= {name: [[step, scores[name][0]] for step, scores in curve] for name in end}
    clips = mean_of([step["clips"] for step in log.steps])
    for at, name in enumerate(("active_by_mini_batch", "outside_by_mini_batch")):
        curves[name] = [[number, pair[at]] for number, pair in enumerate(clips, 1)]
    return {"bad": log.bad, "stable": is_stable(curve, log.bad), "end": end, "curves": curves,
            "means": mean_of([{name: step[name] for name in MEASURED} for step in log.steps]),
            "made": {key: result[key] for key in ("code_sha256", "commit", "hardware", "versions", "total_seconds")}}


def tell(summary: dict) -> str:
    """A run in a few words."""
    first, *_, last = (f"{y:.3f}" for _, y in summary["curves"]["pass1"])
    shares = [f"{name} {summary['means'][f'clip_{name}']:.3f}" for name in ("active", "outside")]
    return f"pass1 {first} -> {last}, clipped: {', '.join(shares)}"


def mean_of(values: list):
    """Mean, number by number, of dicts and lists of one shape."""
    if isinstance(values[0], dict):
        return {key: mean_of([value[key] for value in values]) for key in values[0]}
    if isinstance(values[0], list):
        return [mean_of(list(each)) for each in zip(*values, strict=True)]
    return statistics.fmean(values)


def fill_rows(rows: list[dict], found: dict[str, dict | None]) -> list[dict]:
    """Rows with means over their seeds, where all have ended; found: of run_all.

    end: with intervals over seeds, or a single seed's own, over problems. less_grpo: pass1 at the end less that of the
    first arm with the same value, a seed being a pair.
    """
    filled, grpo = [], {}
    for row in rows:
        runs = [found[run.name] for run in row["runs"]]
        new = {**row, "runs": [run.name for run in row["runs"]]}
        new["stable"] = [bool(run and run["stable"]) for run in runs]
        if all(runs):
            new |= mean_of([{"means": run["means"], "curves": run["curves"]} for run in runs])
            new |= {"bad": sum(run["bad"] for run in runs), "ends": [run["end"]["pass1"][0] for run in runs]}
            new["end"] = {name: interval([run["end"][name][0] for run in runs]) if len(runs) > 1 else score
                          for name, score in runs[0]["end"].items()}
            key = row["varied"], row["value"]
            if row["arm"] == next(iter(ARMS)):
                grpo[key] = new["ends"]
            elif key in grpo:
                new["less_grpo"] = interval([own - other for own, other in zip(new["ends"], grpo[key], strict=True)])
        filled.append(new)
    return filled


def markdown(rows: list[dict], note: str) -> str:
    """The tables: the arms, and one for each thing that is varied."""
    def score(values: list[float], sign: str = "") -> str:
        ends = f" [{values[1]:{sign}.3f}, {values[2]:{sign}.3f}]" if len(values) > 1 else ""
        return f"{values[0]:{sign}.3f}{ends}" if values else ""

    def cells(row: dict) -> list[str]:
        name = f"{row['arm']}, {row['varied'].upper()}={row['value']}" if row["varied"] else row["arm"]
        stable = f"{sum(row['stable'])} of {len(row['stable'])}"
        if "end" not in row:
            return [name, stable, *["failed"] * (len(columns) - 2)]
        curves = {name: " ".join(f"{y:.3f}" for _, y in curve) for name, curve in row["curves"].items()}
        return [name, stable, str(row["bad"]), *(f"{row['means'][key]:.3f}" for key in ("clip_active", "clip_outside")),
                curves["active_by_mini_batch"], curves["outside_by_mini_batch"],
                *(f"{row['means'][key]:.3g}" for key in ("log_ratio", "entropy", "grad_norm", "reward")),
                *(score(row["end"][key]) for key in scores), score(row.get("less_grpo", []), "+"), curves["pass1"]]

    scores = list(next((row["end"] for row in rows if "end" in row), {}))  # greedy, pass1, pass8
    columns = ["arm", "stable", "steps not finite", "active", "outside", "active by mini-batch",
               "outside by mini-batch", "mean abs log ratio", "entropy", "gradient norm", "reward",
               *(f"{name} at the end" for name in scores), "pass1 less GRPO's", "held-out pass1 over time"]
    tables = [[columns, ["---"] * len(columns), *map(cells, group)]
              for _, group in itertools.groupby(rows, lambda row: row["varied"])]
    return note + "".join("\n" + "".join(f"| {' | '.join(line)} |\n" for line in table) for table in tables)


def plot(rows: list[dict], path: Path) -> str:
    """Draw arms and what is varied; a line that says where, or how to install what is missing."""
    try:
        import matplotlib
    except ImportError:
        return "no plot: needs matplotlib; `pip install matplotlib` and this command again, which repeats no run"
    matplotlib.use("Agg")
    from matplotlib import pyplot
    names = ("active_by_mini_batch", "outside_by_mini_batch", "pass1", "reward", "entropy", "grad_norm", "log_ratio")
    figure, axes = pyplot.subplots(2, 5, figsize=(24, 9), layout="constrained")
    for axis, name in zip(axes.flat, (*names, *VARIED), strict=True):
        for arm in ARMS:
            varied = name if name in VARIED else ""
            own = [row for row in rows if (row["arm"], row["varied"]) == (arm, varied) and "end" in row]
            if own:
                points = [[row["value"], row["end"]["pass1"][0]] for row in own] if varied else own[0]["curves"][name]
                axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=arm)
        axis.set(title=f"pass1 at the end by {name}" if name in VARIED else name.replace("_", " "),
                 xscale="log" if name in VARIED else "linear", yscale="log" if name == "log_ratio" else "linear")
    axes[0, 0].legend()
    figure.savefig(path, dpi=80)
    return f"plot: {path}"


def main() -> int:
    """Make the runs, write tables, JSON and plot; 1 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder of the runs; else runs/clip, or runs/clip_quick")
    parser.add_argument("--write", type=Path, help="what is written, without .md, .json, .png; else OUT/clip")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, of one thread each")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=BASE["iterations"], help="of a run; held-out scores ten times")
    parser.add_argument("--quick", action="store_true", help="2 tiny steps, one seed: shows that all of it works")
    args = parser.parse_args()
    args.out = args.out or Path("runs", "clip_quick" if args.quick else "clip")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    out, steps = args.out.resolve(), {"iterations": args.steps, "val_loss_every": max(1, args.steps // 10)}
    out.mkdir(parents=True, exist_ok=True)
    starts, rows = make_plan(1, 64, QUICK) if args.quick else make_plan(args.seeds, SAMPLES, steps)
    runs = list({run.name: run for row in rows for run in row["runs"]}.values())
    try:
        if not all(run_all(starts, out, args.jobs, summarize, tell).values()):
            return 1
        found = run_all(runs, out, args.jobs, summarize, tell)
    except KeyboardInterrupt:
        print(f"stopped; the same command goes on, and leaves alone what has ended in {args.out}")
        return 130
    command, filled = " ".join(["python", "tools/clip.py", *sys.argv[1:]]), fill_rows(rows, found)
    path = args.write or args.out / "clip"
    made = {run.name: {"script": run.script, **run.settings, **(found[run.name] or {}).get("made", {})} for run in runs}
    data, text = {"command": command, "rows": filled, "runs": made}, markdown(filled, f"`{command}`\n")
    path.with_suffix(".json").write_text(json.dumps(data) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text + "\n" + plot(filled, path.with_suffix(".png")))
    return 0 if all(found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
