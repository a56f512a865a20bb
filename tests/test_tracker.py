"""TRACKER: the numbers of the log, and no others, reach a stand-in for TensorBoard or W&B; what is
refused.
"""

import importlib.machinery
import json
import math
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch

import train_gpt as T
from conftest import refusal

# Metrics of step 3 -> the line that the log has of them.
METRICS = {
    "train_loss": 5.5732,
    "lr_mul": 0.5,
    "train_time": 69.4,
    "step_avg": 23.256,
    "tok_s": 29570.3,
}
LINE = "train_loss:5.5732 lr_mul:0.5 train_time:69ms step_avg:23.26ms tok_s:29570"


def stand_in(monkeypatch, name, **parts):
    """A module of this name for imports."""
    module = ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(module).update(parts)
    monkeypatch.setitem(sys.modules, name, module)


def run_of(folder, kind, rank=0):
    """Return an open run with this TRACKER at its seventh step."""
    given = dict(tracker=kind, out_dir=str(folder), run_id="a", iterations=0)
    settings = replace(T.Settings(), **given)
    runtime = T.Runtime(rank, rank + 1, torch.device("cpu"), False)
    run = T.Run(settings, runtime, None, None, {}, {})
    run.open()
    run.step = 7
    return run


@pytest.mark.parametrize("kind", ["tensorboard", "wandb"])
def test_the_numbers_of_the_log_are_mirrored(monkeypatch, tmp_path, kind):
    found = []
    calls = []

    class Writer:
        def __init__(self, folder, purge_step):
            assert purge_step is None
            calls.append(folder)

        def add_scalar(self, name, value, step):
            found.append((name, value, step))

        def flush(self):
            calls.append("flush")

    def log(numbers, step):
        found.extend((*pair, step) for pair in numbers.items())

    stand_in(monkeypatch, "tensorboard")
    stand_in(monkeypatch, "torch.utils.tensorboard", SummaryWriter=Writer)
    stand_in(monkeypatch, "wandb", init=lambda **own: calls.append(own), log=log)
    run = run_of(tmp_path, kind)
    run.log("parameters: matrix:131072 total:151348")
    run.log.metrics(3, METRICS)
    assert found == [(name, value, 3) for name, value in METRICS.items()]
    run.log.last_step_line += 1000  # the log has a fresh step: later metrics are not due
    run.log.metrics(6, METRICS, seconds_left=1.0)
    run.log.last_step_line -= 2000
    run.log.metrics(7, METRICS | {"bad": math.nan}, seconds_left=1.0)
    assert len(found) == 3 * len(METRICS) + 1 and found[-1][2] == 7
    folder = tmp_path / "a"
    if kind == "tensorboard":  # what is written is there, whatever comes
        assert str(calls[0]) == str(folder) and calls[-1] == "flush"
    else:
        (own,) = calls
        run_id = own.pop("id")
        expected = dict(project="underpar", name="a", dir=str(folder), resume="allow")
        assert own == expected | dict(config=vars(run.settings))
        T.make_tracker(run.settings, folder, folder / "step_000007")
        assert calls[1]["id"] == run_id  # the resumed run is the same one
    lines = (folder / "log.txt").read_text(encoding="utf-8").splitlines()
    assert lines[-2:] == [f"step:3/? {LINE}", f"step:7/? {LINE} bad:nan"]
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [{"step": 3}, {"step": 6}, {"step": 7, "bad": None}]
    assert [json.loads(line) for line in lines] == [METRICS | step for step in steps]


@pytest.mark.parametrize(("iterations", "seconds", "left"), [(10, 0, 6), (0, 30, 26), (10, 9, 5)])
def test_a_terminal_has_the_seconds_that_are_left(monkeypatch, iterations, seconds, left):
    """Of the clock, or of the steps if these end first: four are done, in 4 s."""
    limits = dict(iterations=iterations, max_wallclock_seconds=seconds, reserve_seconds=0)
    clock = T.Clock(T.Settings(**limits), T.Runtime(0, 1, torch.device("cpu"), False))
    report = T.StepReport(loss=1.0, grad_norm=1.0, stop_requested=False, seconds=4.0)
    monkeypatch.setattr(clock, "previous_report", lambda: report)
    shown = []
    log = SimpleNamespace(metrics=lambda step, metrics, seconds_left: shown.append(seconds_left))
    T.log_step(SimpleNamespace(clock=clock, log=log, step=4, skipped_in_a_row=0), {})
    assert shown == [left]


@pytest.mark.parametrize("kind", ["tensorboard", "wandb"])
def test_a_package_that_is_missing_is_an_error_at_the_start(monkeypatch, tmp_path, kind):
    monkeypatch.setitem(sys.modules, kind, None)
    said = f"^TRACKER='{kind}': .*{kind}.*; must be installed .pip install {kind}"
    refusal(T.UserError, said, run_of, tmp_path, kind)
    # The folder is empty, so the same RUN_ID may be used once it is installed.
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


def test_a_tracker_that_fails_is_left_and_the_run_goes_on(monkeypatch, tmp_path, capsys):
    """As TensorBoard's does on a full disk; once it is said, in the log, too."""

    def full(numbers, step):
        raise OSError(28, "No space left on device")

    stand_in(monkeypatch, "wandb", init=lambda **own: None, log=full)
    log = run_of(tmp_path, "wandb").log
    for step in (3, 4):
        log.metrics(step, METRICS)
    said = "warning: TRACKER gets nothing from step 3 on: OSError(28, 'No space left on device')\n"
    assert capsys.readouterr().err == said
    assert (tmp_path / "a" / "log.txt").read_text(encoding="utf-8").count(said) == 1
    assert len((tmp_path / "a" / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_tracker_that_cannot_begin_leaves_nothing(monkeypatch, tmp_path):
    """W&B without a login: one line with its reason. The same RUN_ID may be used after the login."""

    def refuse(**own):
        raise ValueError("No API key.\nUse `wandb login`")

    stand_in(monkeypatch, "wandb", init=refuse, log=None)
    reason = "^TRACKER='wandb': cannot begin: No API key. Use `wandb login`; wandb needs a login or WANDB_MODE=offline"
    refusal(T.UserError, reason, run_of, tmp_path, "wandb")
    assert not any(path.is_file() for path in tmp_path.rglob("*"))
    stand_in(monkeypatch, "wandb", init=lambda **own: None, log=None)
    run_of(tmp_path, "wandb")


def test_other_ranks_mirror_nothing(monkeypatch, tmp_path):
    stand_in(monkeypatch, "wandb", init=lambda **own: pytest.fail("not on the first rank alone"))
    run_of(tmp_path, "wandb", rank=1).log.metrics(1, METRICS)
    assert list(tmp_path.iterdir()) == []
