"""Measure what the reinforcement-learning scripts gain on held-out prompts, with a control.

    python tools/experiments/gains.py [--tasks sort reverse] [--seeds 3] [--jobs 1] [--write docs/lab/gains]
    python tools/experiments/gains.py --tasks sort --scripts GRPO PPO --set MAX_WALLCLOCK_SECONDS=60 --no-control
    python tools/experiments/gains.py --tasks sort --scripts GRPO SFT --teacher 600 --set MAX_WALLCLOCK_SECONDS=150

For each task, data/tasks.py writes a file of problems, and for each seed train_sft.py trains the
start: a small new network, a fixed number of steps. From it each script runs by the clock at its
defaults (but for --set); the rewards of the control are random. Runs are subprocesses of one thread
that see no exported settings. Two at a time on two cores share memory and caches, so --jobs 1 is what
a user gets. A run that has ended is not repeated.

--teacher STEPS compares distillations from one teacher, which train_sft.py trains for so many steps:
GRPO's, by the policy's own answers and without rewards, and SFT's, by the file's.

Gains are paired over held-out prompts, over the start's scores. A gain holds if greedy is up by 5
points with its interval above 0, pass1 is up, and pass8 is not down by more than 3 points. A run
scores itself by its REWARD, and SFT by tokens, so sample.py scores start and result of a control and
of SFT by the answers; the intervals of these gains are not paired.
"""

import argparse
import hashlib
import json
import shutil
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tools/

from common import (
    ROOT,
    difference,
    half_width,
    inherited_environment,
    markdown_table,
    parse_set,
    refuse_other_settings,
)

SCRIPTS = {"GRPO": "train_grpo.py", "GSPO": "train_gspo.py", "PPO": "train_ppo.py"}
DISTILLING = {"GRPO": "train_grpo.py", "SFT": "train_sft.py"}  # scripts with a TEACHER
TASKS = ROOT / "data" / "tasks.py"
CONTROL = f"{TASKS}:coin"  # REWARD of the control
START_STEPS = {"sort": 110, "reverse": 150}  # of a start that is right now and then, by task
GAINS = ("greedy", "pass1", "pass8")
SAVED_KEYS = (
    "before after gain steps train_seconds total_seconds phases commit code_sha256 hardware versions "
    "weights"
).split()


@dataclass
class Run:
    """A run of a seed."""

    name: str  # of its folder
    script: str
    settings: dict[str, object]  # by field


@dataclass
class Row:
    """A row of the table: a script on a task, with a run for each seed."""

    task: str
    script: str  # a name of SCRIPTS or DISTILLING
    reward: str  # task or random; teacher: none
    runs: list[Run]


def make_starts(task: str, seeds: int, out: Path) -> list[Run]:
    """Return the runs that train a task's starts. out: folder of all runs and of the problems."""
    given = {"train_files": str(out / f"{task}.jsonl"), "max_wallclock_seconds": 0}
    given["iterations"] = START_STEPS[task]
    return [
        Run(f"start_{task}_seed_{seed}", "train_sft.py", {**given, "seed": seed})
        for seed in range(1, seeds + 1)
    ]


def make_teacher(task: str, steps: int, out: Path) -> Run:
    """Return the run of so many steps that trains a task's teacher."""
    given = {"train_files": str(out / f"{task}.jsonl"), "max_wallclock_seconds": 0}
    return Run(f"teacher_{task}_{steps}", "train_sft.py", {**given, "iterations": steps, "seed": 0})


def plan_distillations(
    tasks: list[str], names: list[str], seeds: int, settings: dict, steps: int, out: Path
) -> list[Row]:
    """Return the rows of the table of distillations from teachers of so many steps."""
    rows = []
    for task in tasks:
        teacher = str(out / make_teacher(task, steps, out).name)
        for name in names:
            script = DISTILLING[name]
            runs = []
            for start in make_starts(task, seeds, out):
                given = {key: start.settings[key] for key in ("train_files", "seed")}
                given |= {**settings, "init_from": str(out / start.name), "teacher": teacher}
                if name == "SFT":
                    given["epochs"] = 1000  # the clock ends it
                run_name = f"{script[6:-3]}_{task}_teacher_{steps}_seed_{given['seed']}"
                runs.append(Run(run_name, script, given))
            rows.append(Row(task, name, "teacher", runs))
    return rows


def make_plan(
    tasks: list[str], names: list[str], seeds: int, settings: dict, control: bool, out: Path
) -> list[Row]:
    """Return the rows of the table."""
    rows = []
    for task in tasks:
        for reward in ("task", "random") if control else ("task",):
            for name in names:
                script = SCRIPTS[name]
                runs = []
                for start in make_starts(task, seeds, out):
                    given = {key: start.settings[key] for key in ("train_files", "seed")}
                    given |= {**settings, "init_from": str(out / start.name)}
                    if reward == "random":
                        given["reward"] = CONTROL
                    run_name = f"{script[6:-3]}_{task}_{reward}_seed_{given['seed']}"
                    runs.append(Run(run_name, script, given))
                rows.append(Row(task, name, reward, runs))
    return rows


def holds(gain: dict[str, list[float]]) -> bool:
    """Return whether a gain holds, see the top of this file. gain: name -> [mean, low, high]."""
    greedy, greedy_low, _ = gain["greedy"]
    is_up = greedy >= 0.05 and greedy_low > 0
    return is_up and gain["pass1"][0] > 0 and gain["pass8"][0] >= -0.03


# --------------------------------------------------------------------------------------------- runs
def score(artifact: Path, settings: dict, path: Path) -> dict[str, list[float]]:
    """Return the scores of a model by the answers, as the run with these settings would score it."""
    if not path.exists():
        given = {"MODE": "score", "SCORE": "task", "HELD_OUT": "1", "TOP_K": "0"}
        given |= {"ARTIFACT": str(artifact), "SCORE_PATH": settings["train_files"]}
        for name in ("seed", "device", "eval_prompts", "max_new_tokens", "temperature"):
            given[name.upper()] = str(settings[name])
        environ = (
            inherited_environment() | given | {"SCORE_FILE": str(path), "OMP_NUM_THREADS": "1"}
        )
        command = [sys.executable, str(ROOT / "sample.py")]
        subprocess.run(command, env=environ, stdout=subprocess.DEVNULL, check=True)
    [scores] = json.loads(path.read_bytes())["scores"].values()
    return {name: scores[name] for name in GAINS}


def read_run(run: Run, out: Path) -> dict | None:
    """Return what is kept of a run, None if it has not ended.

    Raises SystemExit if it was made with other settings or code.
    """
    path = out / run.name / "result.json"
    if not path.exists():
        return None
    result = json.loads(path.read_bytes())
    stored = {**result["settings"], "code": result["code_sha256"]}
    code = hashlib.sha256((ROOT / run.script).read_bytes()).hexdigest()
    refuse_other_settings(path.parent, {**run.settings, "code": code}, stored)
    by_answers = run.script == "train_sft.py" and "teacher" in run.settings
    if by_answers or run.settings.get("reward") == CONTROL:
        settings = {"max_new_tokens": 16, "temperature": 1.0, **result["settings"]}
        before = score(Path(settings["init_from"]), settings, path.with_name("before.json"))
        after = score(path.parent, settings, path.with_name("after.json"))
        gain = {name: difference(before[name], after[name]) for name in GAINS}
        result |= {"before": before, "after": after, "gain": gain}
    return {key: result[key] for key in SAVED_KEYS}


def start_run(run: Run, out: Path) -> subprocess.Popen:
    """Start a run in a folder of its own; stderr goes to NAME.err."""
    shutil.rmtree(out / run.name, ignore_errors=True)  # one that was interrupted
    environ = inherited_environment() | {"OUT_DIR": str(out), "RUN_ID": run.name}
    environ["OMP_NUM_THREADS"] = "1"
    environ |= {name.upper(): str(value) for name, value in run.settings.items()}
    command = [sys.executable, str(ROOT / run.script)]
    with open(out / f"{run.name}.err", "wb") as errors:
        # A session of its own: Ctrl-C is for this process.
        return subprocess.Popen(
            command, env=environ, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True
        )


def describe(run: Run, out: Path, result: dict | None) -> str:
    """Return a run that has ended in a few words."""
    if result is None:
        lines = (out / f"{run.name}.err").read_text(encoding="utf-8").splitlines()
        return f"FAILED: {lines[-1] if lines else 'nothing on stderr'}"
    gains = [f"{name} {gain[0]:+.3f}" for name, gain in result["gain"].items() if name in GAINS]
    return f"{', '.join(gains)}; {result['steps']} steps, {result['total_seconds']:.0f} s"


def run_all(runs: list[Run], out: Path, jobs: int) -> dict[str, dict | None]:
    """Return the result of each run by name, None if it failed. Runs what has not ended."""
    results = {run.name: read_run(run, out) for run in runs}
    waiting = [run for run in runs if results[run.name] is None]
    total = len(waiting)
    active = []
    done = 0
    begin = time.time()
    try:
        while waiting or active:
            while waiting and len(active) < jobs:
                run = waiting.pop(0)
                active.append((run, start_run(run, out)))
            time.sleep(0.1)
            for run, process in list(active):
                if process.poll() is None:
                    continue
                active.remove((run, process))
                results[run.name] = read_run(run, out)
                done += 1
                minutes = (time.time() - begin) / 60
                left = minutes / done * (total - done)
                text = describe(run, out, results[run.name])
                print(f"[{done}/{total}] {run.name}: {text}; about {left:.0f} min left", flush=True)
    finally:
        for _, process in active:
            process.kill()
            process.wait()
    return results


# -------------------------------------------------------------------------------------------- table
def interval(values: list[float]) -> list[float]:
    """Return [mean, low, high] of one value per seed, or the single value."""
    if len(values) == 1:
        return values
    mean = statistics.fmean(values)
    half = half_width(values)
    return [mean, mean - half, mean + half]


def fill_rows(rows: list[Row], results: dict[str, dict | None]) -> list[dict]:
    """Return the rows with the figures of their runs, where all have ended.

    `mean` has the gains over seeds. `share` of a control is its greedy gain relative to that of the
    real reward, at least 0.
    """
    filled = []
    real_gain = {}
    for row in rows:
        runs = [results[run.name] for run in row.runs]
        figures = {
            "task": row.task,
            "name": row.script,
            "reward": row.reward,
            "runs": [run.name for run in row.runs],
            "ended": all(runs),
        }
        filled.append(figures)
        if not all(runs):
            continue
        figures["before"] = [run["before"] for run in runs]
        figures["gain"] = [run["gain"] for run in runs]
        figures["holds"] = [holds(run["gain"]) for run in runs]
        figures["steps"] = [run["steps"] for run in runs]
        figures["seconds"] = [run["total_seconds"] for run in runs]
        figures["mean"] = {}
        for name in GAINS:
            figures["mean"][name] = interval([run["gain"][name][0] for run in runs])
        greedy = figures["mean"]["greedy"][0]
        key = (row.task, row.script)
        if row.reward == "task":
            real_gain[key] = greedy
        elif real_gain.get(key, 0) > 0:
            figures["share"] = max(0.0, greedy) / real_gain[key]
    return filled


def show(score: list[float]) -> str:
    """Return a gain as text, with its interval if it has one."""
    mean, *ends = (f"{value:+.3f}" for value in score)
    return f"{mean} [{', '.join(ends)}]" if ends else mean


def table_rows(rows: list[dict]) -> list[list]:
    """Return the rows of the table: one per seed, and the mean over seeds."""
    gains = [f"{name} gain" for name in GAINS]
    head = [
        "task",
        "script",
        "reward",
        "seed",
        "greedy before",
        *gains,
        "holds",
        "steps",
        "seconds",
    ]
    lines = [head]
    for row in rows:
        cells = [row["task"], row["name"], row["reward"]]
        if not row["ended"]:
            lines.append([*cells, "", "failed", *[""] * (len(head) - 5)])
            continue
        for index, gain in enumerate(row["gain"]):
            before = f"{row['before'][index]['greedy'][0]:.3f}"
            verdict = "yes" if row["holds"][index] else "no"
            figures = [verdict, row["steps"][index], f"{row['seconds'][index]:.0f}"]
            lines.append(
                [*cells, index + 1, before, *(show(gain[name]) for name in GAINS), *figures]
            )
        share = f"{row['share']:.2f} of the real gain" if "share" in row else ""
        means = [show(row["mean"][name]) for name in GAINS]
        lines.append([*cells, "mean", share, *means, "", "", ""])
    return lines


def plot(rows: list[dict], path: Path) -> str:
    """Draw the gains; return where, or how to install matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return "no plot: pip install matplotlib and repeat the command, which repeats no run"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(GAINS), figsize=(5 * len(GAINS), 5))
    rows = [row for row in rows if row["ended"]]
    labels = [f"{row['name']} {row['task']} {row['reward']}" for row in rows]
    for panel, name in zip(panels, GAINS, strict=True):
        for position, row in enumerate(rows):
            for seed, gain in enumerate(row["gain"]):
                mean, low, high = gain[name]
                error = [[mean - low], [high - mean]]
                panel.errorbar(position + 0.15 * seed, mean, error, fmt="o", color=f"C{seed}")
        panel.axhline(0, color="grey", linewidth=0.5)
        panel.set(title=f"{name} gain", xticks=range(len(rows)))
        panel.set_xticklabels(labels, rotation=60, ha="right")
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    return f"plot: {path}"


def main() -> int:
    """Make the runs; write table, JSON and plot. Returns 1 if a run failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=START_STEPS, default=list(START_STEPS))
    choices = [*SCRIPTS, "SFT"]
    parser.add_argument("--scripts", nargs="+", choices=choices, default=list(SCRIPTS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--set",
        type=parse_set,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of every run but the starts",
    )
    parser.add_argument("--no-control", action="store_true", help="no runs with random rewards")
    parser.add_argument(
        "--teacher", type=int, default=0, metavar="STEPS", help="of teachers to distill; 0: rewards"
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, of one thread each")
    parser.add_argument("--out", type=Path, default=Path("runs", "gains"), help="of the runs")
    parser.add_argument("--write", type=Path, help="file names without suffix; else OUT/gains")
    args = parser.parse_args()
    known = DISTILLING if args.teacher else SCRIPTS
    if not known.keys() >= {*args.scripts}:
        parser.error(f"--scripts: with --teacher {args.teacher} must be of {', '.join(known)}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    settings = {name.lower(): value for name, value in args.set}
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    starts = []
    for task in args.tasks:
        command = [sys.executable, str(TASKS), task, "--pairs", "0", "--out", str(out)]
        subprocess.run(command, check=True)
        starts += make_starts(task, args.seeds, out)
        if args.teacher:
            starts.append(make_teacher(task, args.teacher, out))
    given = args.tasks, args.scripts, args.seeds, settings
    if args.teacher:
        rows = plan_distillations(*given, args.teacher, out)
    else:
        rows = make_plan(*given, not args.no_control, out)
    runs = []
    for row in rows:
        runs += row.runs
    try:
        if not all(run_all(starts, out, args.jobs).values()):
            raise SystemExit("error: a start failed")
        results = run_all(runs, out, args.jobs)
    except KeyboardInterrupt:
        print(f"stopped; the same command continues, and keeps what has ended in {args.out}")
        return 130
    command = " ".join(["python", "tools/experiments/gains.py", *sys.argv[1:]])
    filled = fill_rows(rows, results)
    data = {"command": command, "date": time.strftime("%Y-%m-%d")}
    first = next((result for result in results.values() if result), {})
    data |= {key: first.get(key) for key in ("commit", "hardware", "versions")}
    data |= {"rows": filled, "runs": results}
    text = f"`{command}`\n\n{markdown_table(table_rows(filled))}\n"
    path = args.write or args.out / "gains"
    path.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text + "\n" + plot(filled, path.with_suffix(".png")))
    return 0 if all(results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
