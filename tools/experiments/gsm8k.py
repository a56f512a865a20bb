"""Measure what post-training makes of a published model, over seeds, with intervals and a control.

    python convert.py import MODEL runs/smollm2
    python tools/experiments/gsm8k.py sums runs/smollm2 [--arms GRPO coin] [--seeds 3] [--write docs/lab/FILE]
    python tools/experiments/gsm8k.py rows runs/smollm2 --arms LoRA --train rows.jsonl
    python tools/experiments/gsm8k.py pairs runs/smollm2 --arms LoRA --train pairs.jsonl --test others.jsonl
    python tools/experiments/gsm8k.py gsm8k runs/smollm2 --arms full GRPO --seeds 1 \\
        --train train.jsonl --test test.jsonl

`sums` are sums of two numbers, which data/tasks.py writes. This form, `rows` and `pairs` are made for
0.1 billion weights on two CPU cores: a run takes less than half an hour. `gsm8k` takes GSM8K's own files on
one GPU: with the arms full and GRPO and one seed it took 7 minutes on an H200 (docs/gpu.md).

Arms that train by rewards go on from the model, in `gsm8k` from its arm `full`. `coin` is GRPO by random
rewards: its gain must be none. A run that has ended is not repeated.

Gains have 95% intervals, paired over held-out rows, and their means Student's over seeds. On problems, arms
of SFT are scored by their answers, too, with sample.py; these intervals are not paired.
"""

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tools/

from common import (
    ROOT,
    call_script,
    difference,
    half_width,
    has_ended,
    load_script,
    markdown_table,
    parse_set,
    refuse_other_settings,
    setting_names,
)

PROBLEMS = "data/tasks.py"
RIGHT = f"{PROBLEMS}:gsm8k"  # the reward that marks answers
SAVED_KEYS = (
    "before after gain steps train_seconds total_seconds peak_memory_mib seed commit code_sha256 "
    "hardware versions"
).split()
SCORES = {  # of a script's table
    "train_sft.py": ("loss", "accuracy"),
    "train_dpo.py": ("loss", "accuracy", "likelier"),
}
ANSWER_SCORES = ("greedy", "pass1")  # of the scripts with rewards, and of all arms on problems


@dataclass
class Arm:
    """A way to train, with a run for each seed."""

    script: str
    settings: dict[str, object]  # by field
    start: str = ""  # the arm from whose result it goes on; empty: the model


@dataclass
class Form:
    """Arms that are compared on the same rows. They are problems if `settings` have a reward."""

    settings: dict[str, object]  # of all arms; each script takes those that it has
    arms: dict[str, Arm]


LORA = dict(lora_rank=16)
COIN = dict(reward=f"{PROBLEMS}:coin", mark=RIGHT)
ON_CPU = dict(save_every=0, max_wallclock_seconds=600, train_seq_len=512, eval_prompts=100)
RL_ON_CPU = LORA | dict(learning_rate=2e-4, mini_batches=2, max_wallclock_seconds=900)
SFT_ON_GPU = dict(max_wallclock_seconds=90, train_batch_tokens=16384)
RL_ON_GPU = dict(
    max_wallclock_seconds=200, prompts_per_step=64, learning_rate=1e-5, resample_rounds=1
)
FORMS = {
    "sums": Form(
        # At a temperature of 1 this model is right in one answer of twenty.
        ON_CPU | dict(reward=RIGHT, max_new_tokens=16, temperature=0.5, prompts_per_step=16),
        {
            "LoRA": Arm("train_sft.py", LORA),
            "full": Arm("train_sft.py", {}),
            "GRPO": Arm("train_grpo.py", RL_ON_CPU),
            "GSPO": Arm("train_gspo.py", RL_ON_CPU),
            "coin": Arm("train_grpo.py", RL_ON_CPU | COIN),
        },
    ),
    "rows": Form(ON_CPU, {"LoRA": Arm("train_sft.py", LORA), "full": Arm("train_sft.py", {})}),
    "pairs": Form(
        ON_CPU | dict(eval_prompts=200, iterations=0, pairs_per_step=16),
        {
            "LoRA": Arm("train_dpo.py", LORA | dict(learning_rate=1e-4)),
            "full": Arm("train_dpo.py", {}),
        },
    ),
    "gsm8k": Form(
        dict(save_every=0, reward=RIGHT, eval_prompts=660, max_new_tokens=256, temperature=1),
        {
            "LoRA": Arm("train_sft.py", LORA | SFT_ON_GPU),
            "full": Arm("train_sft.py", SFT_ON_GPU | dict(learning_rate=1e-4)),
            "GRPO": Arm("train_grpo.py", RL_ON_GPU, "full"),
            "GSPO": Arm("train_gspo.py", RL_ON_GPU, "full"),
            "coin": Arm("train_grpo.py", RL_ON_GPU | COIN, "full"),
        },
    ),
}


# --------------------------------------------------------------------------------------------- runs
def known_settings(script: str, settings: dict[str, object]) -> dict[str, object]:
    """Return those settings that a script has."""
    names = setting_names(load_script(ROOT / script))
    return {name: value for name, value in settings.items() if name.upper() in names}


def answer_scores(model: Path, path: Path, settings: dict[str, object]) -> dict[str, list[float]]:
    """Return the scores of a model by its answers to held-out problems, which `path` keeps."""
    if not path.is_file():
        given = known_settings("sample.py", settings)
        given |= dict(
            mode="score", score="task", artifact=model, score_file=path, top_k=0, eval_samples=1
        )
        given |= dict(score_path=settings.get("val_files", settings["train_files"]))
        given |= dict(held_out=int("val_files" not in settings))
        call_script("sample.py", **given)
    [scores] = json.loads(path.read_bytes())["scores"].values()
    return {name: scores[name] for name in ANSWER_SCORES}


def run_arm(form: Form, name: str, start: Path, run: Path, common: dict[str, object]) -> dict:
    """Return the figures of an arm's run, which begins from `start`; common: settings of all arms.

    Raises SystemExit if the run has ended with other settings.
    """
    arm = form.arms[name]
    settings = known_settings(arm.script, form.settings | arm.settings | common)
    given = settings | dict(out_dir=run.parent, run_id=run.name, init_from=start)
    if not has_ended(run):
        call_script(arm.script, **given)
    result = json.loads((run / "result.json").read_bytes())
    refuse_other_settings(run, given, result["settings"])
    figures = {key: result[key] for key in SAVED_KEYS}
    if "reward" in form.settings and arm.script == "train_sft.py":
        asked = form.settings | common
        before = answer_scores(start, run.parent / f"start_{asked['seed']}.json", asked)
        after = answer_scores(run / "final", run.parent / f"{run.name}.json", asked)
        gain = {score: difference(before[score], after[score]) for score in ANSWER_SCORES}
        figures |= {"before": before, "after": after, "gain": gain}
    return figures


# -------------------------------------------------------------------------------------------- table
def show(values: list[float]) -> str:
    """Return [mean, low, high] as a text."""
    return "{:.3f} [{:.3f}, {:.3f}]".format(*values)


def table_rows(arm: str, names: tuple[str, ...], runs: list[dict]) -> list[list]:
    """Return a row of the table for each score and seed of an arm, and the means of its gains."""
    rows = []
    for name in names:
        for run in runs:
            cells = [show(run[key][name]) for key in ("before", "after", "gain")]
            seconds = f"{run['total_seconds']:.0f}"
            memory = f"{run['peak_memory_mib']:.0f}"
            rows.append([arm, name, run["seed"], *cells, run["steps"], seconds, memory])
        if len(runs) > 1:
            gains = [run["gain"][name][0] for run in runs]
            mean = statistics.fmean(gains)
            half = half_width(gains)
            rows.append(
                [arm, name, "mean", "", "", show([mean, mean - half, mean + half]), *[""] * 3]
            )
    return rows


def main() -> None:
    """Run the command line described at the top of this file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("form", choices=FORMS)
    parser.add_argument("model", type=Path, help="the run folder of convert.py import")
    parser.add_argument("--arms", nargs="+", help="names of the form's arms; else all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--train", type=Path, help="file of rows, for all forms but sums")
    parser.add_argument("--test", type=Path, help="file of held-out rows; else one in ten")
    parser.add_argument(
        "--set",
        type=parse_set,
        action="append",
        default=[],
        help="NAME=VALUE of all arms",
    )
    parser.add_argument("--out", type=Path, help="of the runs; else runs/FORM")
    parser.add_argument("--write", type=Path, help="file names without suffix; else OUT/table")
    args = parser.parse_args()
    form = FORMS[args.form]
    wanted = args.arms or [*form.arms]
    if not form.arms.keys() >= {*wanted}:
        parser.error(f"--arms: must be of {', '.join(form.arms)}")
    if (args.form == "sums") != (args.train is None):
        parser.error("--train: must be given for all forms but sums")
    starts = {form.arms[name].start for name in wanted}
    out = (args.out or Path("runs", args.form)).resolve()
    if args.form == "sums":
        call_script(PROBLEMS, "sums", "--out", out)
        args.train = out / "sums.jsonl"
    given = dict(train_files=args.train.resolve())
    if args.test:
        given |= dict(val_files=args.test.resolve())
    changes = {name.lower(): value for name, value in args.set}
    scripts = {arm.script for arm in form.arms.values()}
    taken = set().union(*(known_settings(script, changes) for script in scripts))
    if changes.keys() != taken:
        parser.error(f"--set: no script has {', '.join(changes.keys() - taken)}")
    given |= changes
    figures = {name: [] for name in form.arms if name in {*wanted, *starts}}
    for seed in range(1, args.seeds + 1):
        for name in figures:
            start = form.arms[name].start
            path = out / f"{start}_{seed}" if start else args.model.resolve()
            run = run_arm(form, name, path, out / f"{name}_{seed}", given | dict(seed=seed))
            figures[name].append(run)
    rows = [["arm", "score", "seed", "before", "after", "gain", "steps", "seconds", "MiB"]]
    for name, runs in figures.items():
        scores = SCORES.get(form.arms[name].script, ANSWER_SCORES)
        rows += table_rows(name, ANSWER_SCORES if "reward" in form.settings else scores, runs)
    command = " ".join(["python", "tools/experiments/gsm8k.py", *sys.argv[1:]])
    text = f"`{command}`\n\n{markdown_table(rows)}\n"
    path = args.write or out / "table"
    data = {"command": command, "date": time.strftime("%Y-%m-%d"), "arms": figures}
    path.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
