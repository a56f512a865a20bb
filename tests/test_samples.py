"""samples.jsonl and what the log shows of answers, by hand; whole runs are in test_rl_runs.py."""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import torch

import train_grpo as G
import train_ppo as P
from conftest import load_tool

SHOWN = {
    "a\nb\tc": r"'a\nb\tc'",
    "\x1b[2J\x07\x9b\u202e\u2028": r"'\x1b[2J\x07\x9b\u202e\u2028'",
    "": "''",
    "1235" + "9" * 796 + "57": f"'1235{'9' * 296}' [402 characters left out] '{'9' * 98}57'",
}


def test_a_text_is_shown_on_one_line():
    for text, shown in SHOWN.items():
        assert G.shown_text(text) == shown


def answer_of(number, reward, **parts):
    """An answer with a reward of two parts, to a prompt."""
    answer = G.Answer(query={"prompt": "a\nb", "answer": "A"}, text=f"text {number}", **parts)
    answer.reward = reward
    answer.rewards = {"right": reward - 1.0, "nines": None}
    return answer


def rollout_of(*answers):
    """A rollout of one prompt."""
    return G.Rollout([[*answers]], {})


def run_of(folder, rank=0, **settings):
    """A run of three steps, open, with a list in place of its tracker."""
    given = dict(out_dir=str(folder), run_id="x", group_size=2, samples_every=2) | settings
    runtime = G.Runtime(rank, rank + 1, torch.device("cpu"), False)
    run = G.Run(replace(G.Settings(), **given), runtime, None, None, {}, {})
    run.open()
    run.tracked = []
    run.log.track = lambda values, step: run.tracked.append((values, step))
    return run


def rows_of(run):
    return [json.loads(line) for line in (run.folder / "samples.jsonl").read_text().splitlines()]


def test_rows_have_rewards_by_function(tmp_path, capsys):
    run = run_of(tmp_path)
    samples = G.Samples(run)
    rollout = rollout_of(
        answer_of(0, 0.25, advantage=-0.5), answer_of(1, 1.5, advantage=0.5, finished=True)
    )
    capsys.readouterr()
    for run.step, progress in ((0, 0.05), (1, 0.3), (2, 0.31)):
        samples.trained(rollout, progress)
    # The first, and those by SAMPLES_EVERY.
    assert [row["step"] for row in rows_of(run)] == [1, 1, 2, 2]
    assert capsys.readouterr().out.splitlines() == [
        r"sample: step 2, 30% of the run, prompt 'a\nb', wanted 'A', mean reward of 2: 0.875",
        "sample:   best  1.5 (right:0.5 nines:none) 'text 1'",
        "sample:   worst 0.25 (right:-0.75 nines:none) 'text 0', cut at MAX_NEW_TOKENS",
    ]
    samples.tenth = 9  # the last one is the end's
    samples.trained(rollout, 1.0)
    assert capsys.readouterr().out == ""


def test_of_scores_alone_with_samples_every_0(tmp_path):
    run = run_of(tmp_path, samples_every=0)
    samples = G.Samples(run)
    samples.trained(rollout_of(answer_of(0, 0.0), answer_of(1, 1.0)), 0.5)
    assert not (run.folder / "samples.jsonl").exists()
    samples.scored("start", SimpleNamespace(answers=[[answer_of(0, 0.0, advantage=3.0)]]))
    [row] = rows_of(run)
    assert (row["phase"], row["step"], row["advantage"]) == ("held_out", 0, None)


def test_a_resumed_run_does_not_double_steps(tmp_path):
    """From step 2: what came later is made again, and so is the validation of this step."""
    run = run_of(tmp_path)
    samples = G.Samples(run)
    made = [("held_out", 0), ("train", 1), ("train", 2), ("held_out", 2), ("train", 4)]
    for phase, step in made:
        samples.record(phase, step, [[answer_of(step, 1.0)]])
    with open(run.folder / "samples.jsonl", "a") as file:
        file.write('{"step": 2, "phase": "tr')  # the process was killed here
    G.remove_repeated(run.folder, 2)
    assert [(row["phase"], row["step"]) for row in rows_of(run)] == made[:3]


def test_other_ranks_record_nothing(tmp_path, capsys):
    run = run_of(tmp_path, rank=1)
    samples = G.Samples(run)
    samples.trained(rollout_of(answer_of(0, 0.0), answer_of(1, 1.0)), 0.5)
    assert not run.folder.exists() and run.tracked == [] and capsys.readouterr().out == ""


def test_trackers_get_texts_and_tables(tmp_path, monkeypatch):
    run = run_of(tmp_path, tracker="none")
    G.Samples(run).record("train", 1, [[answer_of(0, 1.5, finished=True)]])
    text = "    prompt 'a\\nb', wanted 'A'\n        1.5 (right:0.5 nines:none) 'text 0'"
    assert run.tracked == [({"samples/train": text}, 1)]
    tables = []

    class Table:
        def __init__(self, columns, allow_mixed_types):
            self.columns = columns
            self.add_data = lambda *cells: tables.append(dict(zip(columns, cells, strict=True)))

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(Table=Table))
    run.settings = replace(run.settings, tracker="wandb")
    G.Samples(run).record("train", 2, [[answer_of(0, 1.5, finished=True)]])
    assert isinstance(run.tracked[1][0]["samples/train"], Table)
    (row,) = tables
    assert row["completion"] == "text 0" and row["rewards"] == "{'right': 0.5, 'nines': None}"


def test_a_full_disk_does_not_end_the_run(tmp_path, capsys):
    run = run_of(tmp_path)
    samples = P.Samples(run, has_advantages=False)
    (run.folder / "samples.jsonl").mkdir()  # cannot be written
    samples.record("train", 1, [[answer_of(0, 1.0)]])
    assert capsys.readouterr().err.startswith("samples.jsonl: ")


def test_the_hacked_reward_of_the_guide():
    """An answer that repeats a digit gets more than the right one; each function by hand."""
    hacked = load_tool("../docs/examples/hacked")
    texts = ["112", "1111", "1\n2"]
    wanted = ["112"] * 3
    assert hacked.right(texts, wanted) == [1.0, 0.0, 0.0]
    assert hacked.form(texts) == [1.0, 1.0, 0.0]
    assert hacked.found(texts, wanted) == [1.0, 4 / 3, 2 / 3]
