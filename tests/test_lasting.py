"""Nothing is lost: kills, signals, hangs, bad steps, damaged files, full disks, provoked; resumes
and replays.
"""

import contextlib
import hashlib
import io
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import train_gpt as T
import train_grpo as G
from conftest import CONSTANTS, ROOT, TICKS, TINY, Place, rank_environments, refusal, steps_kept

GUIDE = ROOT / "docs" / "runs.md"
SHORT = dict(TINY, MODEL_DIM=48, TRAIN_BATCH_TOKENS=256, ITERATIONS=16, SAVE_EVERY=4)


def at(step, code):
    """Return a patch that runs `code` at the begin of data step `step`; it may use T and rank."""
    return f"""
import os, signal, time
rank = int(os.environ.get("RANK", 0))
def wrap(inner):
    def forward_backward(model, batches, step):
        if step == {step}:
{textwrap.indent(textwrap.dedent(code).strip(), " " * 12)}
        return inner(model, batches, step)
    return forward_backward
T.forward_backward = wrap(T.forward_backward)
"""


def stop_at(step, name="SIGTERM"):
    """Return a patch that sends the process a signal in the middle of data step `step`."""
    return at(step, f"os.kill(os.getpid(), signal.{name}); time.sleep(0.3)")


@pytest.fixture(scope="session")
def place(tmp_path_factory, tiny_data):
    return Place(tmp_path_factory.mktemp("lasting"), tiny_data, SHORT)


@pytest.fixture(scope="session")
def straight(place):
    """Return the run without faults that others are compared with: 16 steps."""
    place.run("straight")
    return "straight"


@pytest.fixture(scope="session")
def stopped(place):
    """Return the same run, ended by SIGTERM in its sixth step."""
    place.run("stopped", stop_at(5), 143)
    return "stopped"


def assert_same(place, out, other):
    """Two runs ended in the same model, to the byte, and had the same averages and phases."""
    place.same(out, other)
    assert place.result(out)["val_nats"] == place.result(other)["val_nats"]
    averages = [re.findall(r"^weights: .*", place.log(run), re.M)[-4:] for run in (out, other)]
    assert averages[0] == averages[1] and len(averages[0]) == 4


def copied(place, out, name):
    """Return the folder of a copy of a run, as <name>/run."""
    return Path(shutil.copytree(place.of(out), place.of(name)))


def newest(folder):
    """Return the newest whole checkpoint of a run, and a line on each newer one."""
    return T.newest_checkpoint(folder)


def steps_logged(place, out, what="/"):
    return [int(step) for step in re.findall(rf"^step:(\d+){what}", place.log(out), re.M)]


def metrics_of(place, out):
    """Return the objects of metrics.jsonl, which has no line that is cut short."""
    text = (place.of(out) / "metrics.jsonl").read_text(encoding="utf-8")
    assert text.endswith("\n") and "NaN" not in text and "Infinity" not in text
    return list(map(json.loads, text.splitlines()))


def losses_of(place, out):
    """Return step -> loss of the trained steps of metrics.jsonl, each of which stands there once."""
    rows = [row for row in metrics_of(place, out) if "train_loss" in row]
    assert all(row.keys() == rows[0].keys() for row in rows)
    losses = {row["step"]: row["train_loss"] for row in rows}
    assert len(losses) == len(rows)
    return losses


def events(place, out, name="event"):
    return [event[name] for event in place.result(out)["events"]]


# -------------------------------------------------------------------------------------- checkpoints
def save(folder, step):
    model = {"w": torch.arange(5.0) + step}
    training = {"clock": {"before": 0.1 * step}, "plan": {}}
    meta = {"step": step, "settings": {"seed": step}}
    T.save_checkpoint(folder, step, {"model": model, "training": training}, meta)
    return folder / f"step_{step:06d}"


@pytest.fixture
def pair(tmp_path):
    """Return two checkpoints of the run tmp_path/run, the older one first."""
    (tmp_path / "run").mkdir()
    return save(tmp_path / "run", 4), save(tmp_path / "run", 8)


def test_a_checkpoint_has_its_files_and_their_hashes(pair):
    names = ["meta.json", "model.pt", "training.pt"]
    for folder, step in zip(pair, (4, 8), strict=True):
        assert sorted(path.name for path in folder.iterdir()) == sorted([*names, "SHA256SUMS"])
        command = ["sha256sum", "-c", "SHA256SUMS"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, "".join(f"{name}: OK\n" for name in names))
        meta = json.loads((folder / "meta.json").read_bytes())
        assert meta == {"step": step, "settings": {"seed": step}}
        model, training = (torch.load(folder / name, weights_only=True) for name in names[1:])
        assert torch.equal(model["w"], torch.arange(5.0) + step)
        assert training["clock"] == {"before": 0.1 * step}
    assert newest(pair[0].parent) == (pair[1], [])


def flip(path, bit=99):
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def cut(path):
    path.write_bytes(path.read_bytes()[:-2])


@pytest.mark.parametrize(
    "harm", [flip, cut, Path.unlink], ids=["flipped bit", "truncated", "missing"]
)
@pytest.mark.parametrize("name", ["model.pt", "training.pt", "meta.json", "SHA256SUMS"])
def test_a_damaged_checkpoint_is_named_and_skipped(pair, name, harm):
    older, newer = pair
    harm(newer / name)
    found, (fault,) = newest(older.parent)
    head = f"checkpoint {newer} is damaged and skipped: "
    assert found == older and fault.startswith(head)
    assert name in fault or name == "SHA256SUMS" and len(fault) > len(head)
    harm(older / name)
    found, faults = newest(older.parent)
    assert found is None
    assert [str(path) in fault for path, fault in zip((newer, older), faults, strict=True)] == [
        1,
        1,
    ]
    must = "has no whole checkpoint step_<step>"
    with pytest.raises(
        T.UserError, match=f"^RESUME='.*run': {must}; checkpoint {newer} is damaged"
    ):
        T.stored_settings({"RESUME": "run", "OUT_DIR": str(older.parent.parent)})


def test_every_byte_of_the_list_of_hashes_counts(pair):
    older, newer = pair
    path = newer / "SHA256SUMS"
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole)
        flip(path, 8 * place + place % 8)
        assert newest(older.parent)[0] == older, place
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        assert newest(older.parent)[0] == older, size


def test_a_half_written_checkpoint_is_skipped_and_cleared_away(pair):
    older, newer = pair
    shutil.copytree(newer, older.parent / "unfinished")
    assert newest(older.parent) == (newer, [])
    save(older.parent, 16)
    assert steps_kept(older.parent) == [8, 16] and not (older.parent / "unfinished").exists()


def full_disk(*_):
    raise OSError(28, "No space left on device")


def test_the_two_newest_stay_and_a_failed_save_leaves_them(tmp_path, monkeypatch):
    (tmp_path / "long").mkdir()
    for step in (999_998, 999_999, 1_000_000):  # by number: as names the last is the least
        save(tmp_path / "long", step)
    assert {*steps_kept(tmp_path / "long")} == {999_999, 1_000_000}
    assert newest(tmp_path / "long")[0].name == "step_1000000"
    for step in range(1, 6):
        save(tmp_path, step)
    (tmp_path / "step_000005" / "model.pt").write_bytes(b"damaged")
    save(tmp_path, 5)  # it takes the place of the damaged one
    monkeypatch.setattr(T.os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, 6)
    assert steps_kept(tmp_path) == [4, 5]
    assert newest(tmp_path) == (tmp_path / "step_000005", [])


def test_what_a_resumed_run_writes_again_is_removed(tmp_path):
    """Steps after the checkpoint, its scores but not those of the start, and a line that was cut."""
    path = tmp_path / "metrics.jsonl"
    rows = [{"step": 0, "val_loss": 3}, {"step": 1, "train_time": 2}, {"step": 1, "val_loss": 2}]
    lines = [json.dumps(row).encode() + b"\n" for row in rows]
    for step, kept in ((0, lines[:1]), (1, lines[:2]), (2, lines)):
        path.write_bytes(b"".join(lines) + b'{"step": 3}\n{"step": 2, "tr')
        T.remove_repeated(path, step, lambda row: "train_time" not in row)
        assert path.read_bytes() == b"".join(kept)


class NarrowFile(io.BytesIO):
    """A file that takes three bytes at a time, as a pipe or a full disk may."""

    def write(self, data):
        return super().write(data[:3])


def test_a_line_is_written_to_its_end(tmp_path):
    lines = T.LineFile(tmp_path / "log.txt")
    lines.file = NarrowFile()
    for text in ("a line", "and one more"):
        lines.write(text)
    assert lines.file.getvalue() == b"a line\nand one more\n"


def test_the_log_has_the_first_five_steps_and_the_last(tmp_path):
    """Unless LOG_SECONDS are over; metrics.jsonl has every step."""
    log = T.Log(9)
    log.open(tmp_path, None)
    for step in range(1, 10):
        log.metrics(step, {"train_loss": step}, 1.0)
    lines = (tmp_path / "log.txt").read_text().splitlines()
    steps = [int(line[5]) for line in lines if line.startswith("step:")]
    assert steps == [1, 2, 3, 4, 5, 9]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 9
    T.ERROR_LOGS.clear()


def test_the_source_stands_in_the_log_once(tmp_path):
    T.write_source(tmp_path / "log.txt")
    once = (tmp_path / "log.txt").read_text(encoding="utf-8")
    T.write_source(tmp_path / "log.txt")
    assert (tmp_path / "log.txt").read_text(encoding="utf-8") == once
    assert once == Path(T.__file__).read_text(encoding="utf-8") + "\n" + "=" * 120 + "\n"


def test_a_part_that_a_checkpoint_lacks_is_named(tmp_path):
    torch.save({}, tmp_path / "training.pt")
    torch.save(torch.nn.Linear(2, 2).state_dict(), tmp_path / "model.pt")
    parts = {"network": torch.nn.Linear(2, 2), "ema": torch.nn.Linear(2, 2)}
    T.load_parts(parts, tmp_path, ["ema"], "cpu")
    message = f"RESUME: {tmp_path} is no checkpoint of this run: 'ema'"
    refusal(T.UserError, re.escape(message), T.load_parts, parts, tmp_path, [], "cpu")


@pytest.mark.parametrize("nats, is_lost", [(0.04, False), (0.06, True), (math.nan, True)])
def test_a_packing_that_lost_much_is_an_event(tmp_path, nats, is_lost):
    events = []
    lines = []
    run = SimpleNamespace(
        folder=tmp_path,
        log=lambda text, stream=None: lines.append(text),
        event=lambda name, **facts: events.append((name, facts["nats"])),
    )
    G.report_packing(run, nats)
    assert len(lines) == 1 + is_lost
    assert events == ([("packing_lost", nats)] if is_lost else [])


def test_settings_of_older_runs_may_have_become_constants(tmp_path):
    path = tmp_path / "meta.json"
    settings = {name: 0 for name in T.Settings.__dataclass_fields__}
    path.write_text(json.dumps({"settings": {**settings, "holdout_tokens": 131072}}))
    assert "holdout_tokens" in T.read_record("RESUME", path)["settings"]
    path.write_text(json.dumps({"settings": {**settings, "holdout_tokens": 5}}))
    refusal(T.UserError, "RESUME: only one of .* has HOLDOUT_TOKENS", T.read_record, "RESUME", path)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "file"
    T.replace_file(path, b"old")
    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch, pytest.raises(OSError):
            patch.setattr(T.os, name, full_disk)
            T.replace_file(path, b"new, longer")
        assert path.read_bytes() == b"old"
    T.replace_file(str(path), b"new")
    assert path.read_bytes() == b"new" and list(tmp_path.iterdir()) == [path]


def test_what_a_run_leaves(place, straight):
    """Two checkpoints of 16 steps; weights_only loads all of it."""
    folder = place.of(straight)
    assert steps_kept(folder) == [12, 16]
    meta = json.loads((folder / "step_000016" / "meta.json").read_bytes())
    result = place.result(straight)
    assert (meta["step"], meta["settings"]) == (16, result["settings"])
    training = torch.load(folder / "step_000016" / "training.pt", weights_only=True)
    shared = {"run", "optimizers", "plan", "clock", "exporter"}
    assert set(training) == shared | {"ema", "swa"}
    counts = {"step": 16, "skipped_steps": 0, "skipped_in_a_row": 0, "events": []}
    assert training["run"] == counts and training["ema"]["count"] == 3
    assert training["clock"]["used"] == [step / 16 for step in range(1, 17)]
    model = torch.load(folder / "step_000012" / "model.pt", weights_only=True)
    assert sum(value.numel() for value in model.values()) == result["params"]["total"]
    assert steps_logged(place, straight, " saved$") == [0, 4, 8, 12, 16]


def test_a_run_goes_on_from_the_newest_whole_checkpoint(place, straight, stopped):
    folder = copied(place, stopped, "damaged")
    assert steps_kept(folder) == [4, 6]
    flip(folder / "step_000006" / "training.pt")
    place.resume("damaged")
    log = place.log("damaged")
    assert (
        f"checkpoint {folder}/step_000006 is damaged and skipped: training.pt was changed, or "
        in log
    )
    assert events(place, "damaged", "step") == [4]
    assert_same(place, "damaged", straight)
    assert losses_of(place, "damaged") == losses_of(place, straight)


CUT_SUMS = {
    "without the first line": lambda lines: lines[1:],
    "double names": lambda lines: [*lines, lines[0]],
    "a path": lambda lines: [*lines, lines[0].replace("meta", "../step_000004/meta")],
    "line ends of Windows": lambda lines: [line.replace("\n", "\r\n") for line in lines],
    "a byte order mark": lambda lines: ["\ufeff", *lines],
}


@pytest.mark.parametrize("how", CUT_SUMS)
def test_a_checkpoint_is_whole_only_if_its_sums_name_every_file(pair, how):
    older, newer = pair
    path = newer / "SHA256SUMS"
    path.write_text("".join(CUT_SUMS[how](path.read_text().splitlines(keepends=True))), newline="")
    flip(newer / "model.pt")  # what such a list let pass
    found, (fault,) = newest(older.parent)
    assert found == older and "\n" not in fault
    (path.unlink(), newer.rename(older.parent / "elsewhere"))
    assert newest(older.parent) == (older, [])


def test_a_folder_without_training_is_whole_if_it_lists_what_it_has(tmp_path):
    """What quantize.py writes, and final/, have no training.pt."""
    folder = tmp_path / "final"
    T.write_checkpoint(folder, {"model": {}, "coded": {}}, {"step": 3})
    assert T.checkpoint_fault(folder) == "" and list(tmp_path.iterdir()) == [folder]
    lines = (folder / "SHA256SUMS").read_text().splitlines(keepends=True)
    (folder / "SHA256SUMS").write_text("".join(line for line in lines if "coded" not in line))
    assert T.checkpoint_fault(folder) == "coded.pt was changed, or SHA256SUMS does not name it"
    (folder / "coded.pt").unlink()
    assert T.checkpoint_fault(folder) == ""
    folder.rename(tmp_path / "step_000003")
    assert "step_000003/training.pt" in T.checkpoint_fault(tmp_path / "step_000003")


# ------------------------------------------------------------------------------------------ signals
@pytest.mark.parametrize(("name", "step"), [("SIGTERM", 10), ("SIGINT", 15)])
def test_a_signal_ends_the_step_saves_and_leaves(place, straight, name, step):
    """With EMA running; and one step before the end, with averages that began again with QAT."""
    out = f"signal {name}"
    child = place.run(out, stop_at(step - 1, name), 128 + getattr(signal, name))
    folder = place.of(out)
    assert child.err == "" and newest(folder) == (folder / f"step_{step:06d}", [])
    lines = place.log(out).splitlines()
    assert lines[-1] == f"stopped by {name} after step {step}; RESUME={folder} continues it"
    assert sum("stopped by" in line for line in lines) == 1
    assert not (folder / "result.json").exists()
    place.resume(out)
    (event,) = place.result(out)["events"]
    expected = ("resume", step, 1, {})
    assert tuple(event[key] for key in ("event", "step", "ranks", "changed")) == expected
    assert steps_logged(place, out) == list(range(1, 17))
    assert losses_of(place, out) == losses_of(place, straight)
    assert_same(place, out, straight)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["lion", "adamw", "adafactor", "adamw8bit"])
def test_every_optimizer_resumes_to_the_byte(place, kind):
    """As Muon does in the tests above."""
    short = dict(OPTIMIZER=kind, ITERATIONS=8)
    place.run(f"{kind} whole", **short)
    place.run(f"{kind} stopped", stop_at(4), 143, **short)
    place.resume(f"{kind} stopped")
    assert losses_of(place, f"{kind} stopped") == losses_of(place, f"{kind} whole")
    assert_same(place, f"{kind} stopped", f"{kind} whole")


def test_a_terminal_that_is_closed_saves_and_nohup_goes_on(place):
    default = "import signal\nsignal.signal(signal.SIGHUP, signal.{})\n"
    place.run("hangup", default.format("SIG_DFL") + stop_at(2, "SIGHUP"), 129)
    assert place.log("hangup").endswith(f"after step 3; RESUME={place.of('hangup')} continues it\n")
    assert [*losses_of(place, "hangup")] == [1, 2, 3]
    short = dict(ITERATIONS=4, QAT=0, EMA=0, SWA=0)
    place.run("nohup", default.format("SIG_IGN") + stop_at(2, "SIGHUP"), **short)
    assert place.result("nohup")["ended"] == "iterations"
    line = "training has ended after step 4 of 4: all steps are done"
    assert f"\n{line}\n" in place.log("nohup")


def signal_in_save(at_step):
    """Return a patch: a signal while the checkpoint of this step is written."""
    return f"""
import os, signal, time
inner = T.save_checkpoint
def slow(folder, step, *rest):
    if step == {at_step}:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.5)
    inner(folder, step, *rest)
T.save_checkpoint = slow
"""


def test_a_signal_during_a_save_lets_it_end(place, straight):
    place.run("in a save", signal_in_save(8), 143)
    folder = place.of("in a save")
    assert newest(folder) == (folder / "step_000009", [])
    assert steps_kept(folder) == [8, 9]
    shutil.rmtree(folder / "step_000009")
    place.resume("in a save")
    assert events(place, "in a save", "step") == [8]
    assert_same(place, "in a save", straight)


def test_a_signal_during_the_last_save_comes_before_packing(place, straight):
    place.run("last save", signal_in_save(16), 143)
    folder = place.of("last save")
    assert newest(folder)[0].name == "step_000016" and not (folder / "model.upar").exists()
    place.resume("last save")
    assert_same(place, "last save", straight)


def test_a_signal_whose_save_fails_says_so(place):
    """The disk is full when step 6 ends; RESUME would begin at the checkpoint of step 4."""
    child = place.run("unsaved", at(5, limit(20000)) + stop_at(5), 143)
    folder = place.of("unsaved")
    line = f"stopped by SIGTERM after step 6; RESUME={folder} continues it from step 4: "
    assert child.out.endswith(f"{line}the last save failed\n")
    assert newest(folder)[0].name == "step_000004"


def test_a_second_signal_ends_at_once(place, straight):
    """More than a second after the first: torchrun repeats a terminal's Ctrl-C at once."""
    kill = "os.kill(os.getpid(), signal.SIGTERM); time.sleep({})\n"
    place.run("twice", at(5, kill.format(0.4) * 2), 143)
    assert newest(place.of("twice"))[0].name == "step_000006"
    child = place.run("at once", at(5, kill.format(1.4) + kill.format(600)), 143)
    assert child.err == "SIGTERM: ended without a checkpoint\n"
    assert newest(place.of("at once"))[0].name == "step_000004"
    place.resume("at once")
    assert_same(place, "at once", straight)


def test_a_signal_in_set_up_or_in_the_final_evaluation_ends_at_once(place, straight):
    patch = """
import os, signal, time
def slow(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(600)
T.NAME = slow
"""
    place.run("set-up", patch.replace("NAME", "warm_up"), -signal.SIGTERM)
    assert steps_kept(place.of("set-up")) == []
    place.run("packing", patch.replace("NAME", "read_artifact"), -signal.SIGTERM)
    place.resume("packing")
    assert events(place, "packing", "step") == [16]
    assert_same(place, "packing", straight)


# ------------------------------------------------------------------------------------- RESUME rules
def test_resume_refuses_what_is_no_unfinished_run(place, straight, stopped):
    def refused(**changes):
        child = place.resume(stopped, code=2, **changes)
        assert re.fullmatch(r"error: .*\n", child.err), child.err
        return child.err

    def files():
        return {path: path.read_bytes() for path in place.of(stopped).rglob("*") if path.is_file()}

    before = files()
    bare = place.folder / "bare" / "run"  # of a run that never saved, whose settings nobody knows
    bare.mkdir(parents=True)
    run = place.of(stopped)
    done = place.of(straight)
    for wrong, said in (
        (place.folder / "none", f"no such run; {place.folder} has none"),
        ("none", f"no such run; {run.parent} has run"),
        (run / "log.txt", f"no such run; {run} has none"),
        (bare, "has no whole checkpoint step_<step>; "),
        (done, f"the run has ended, for it has a result.json; REPLAY={done} repeats it"),
        (run / "step_000004", f"is a checkpoint; must be its run, RESUME={run}, which continues "),
    ):
        path = run.parent / wrong
        assert f"RESUME='{path}': {said}" in refused(RESUME=wrong)
    assert "RUN_ID='other': must be that of RESUME, 'run'" in refused(RUN_ID="other")
    rules = (
        ("MODEL_DIM", 64, 48),
        ("SEED", 5, 1337),
        ("TRAIN_BATCH_TOKENS", 512, 256),
        ("MATRIX_BITS", 4, 6),
    )
    for name, value, was in rules:
        assert f"{name}={value}: must stay {was} under RESUME\n" in refused(**{name: value})
    after = files()
    log = place.of(stopped) / "log.txt"
    assert after.pop(log).startswith(before.pop(log)) and after == before
    assert list(bare.iterdir()) == [] and not (place.folder / "none").exists()


def test_resume_takes_the_stored_settings_and_lists_those_changed(place, straight, stopped):
    """By path, from another folder of runs; the checkpoint that it starts from is not written
    again.
    """
    folder = copied(place, stopped, "changed")
    changed = {"matrix_lr": 0.01, "save_every": 3}
    given = {**place.unset, "RUN_ID": None, "OUT_DIR": None, "RESUME": folder}
    place.run("elsewhere", **{**given, "MATRIX_LR": 0.01, "SAVE_EVERY": 3})
    assert events(place, "changed", "changed") == [changed]
    log = place.log("changed")
    assert "event: resume step:6 ranks:1 changed:{" in log
    paths = {"resume": str(folder), "out_dir": str(folder.parent)}  # where it is, not where it was
    expected = {**place.result(straight)["settings"], **changed, **paths}
    assert place.result("changed")["settings"] == expected
    assert place.artifact("changed") != place.artifact(straight)
    saves = re.findall(r"^step:(\d+) saved", log.split("event: resume")[1], re.M)
    assert saves == ["9", "12", "15", "16"]


def test_the_clock_goes_on_from_where_it_stood(place):
    """2.8 s of a clock of 3, and 2 to choose, are gone when the run is stopped; the rest is
    trained.
    """
    clock = {"ITERATIONS": 0, "MAX_WALLCLOCK_SECONDS": 5, "RESERVE_SECONDS": 2}
    place.run("clock", TICKS + at(12, "Tick.seconds += 2") + stop_at(15), 143, **clock)
    training = torch.load(place.of("clock") / "step_000016" / "training.pt", weights_only=True)
    steps = [0.02 + 0.06 * (0.618 * step % 1) for step in range(1, 17)]
    assert training["clock"]["seconds"][-1] == pytest.approx(2 + sum(steps))
    place.resume("clock", TICKS)
    times = list(place.logged("clock", "train_time").values())
    assert times == sorted(times) and times[11] < 1000 and times[12] >= 2000
    result = place.result("clock")
    assert 2.9 < result["train_seconds"] < 3.1 and 18 <= result["steps"] <= 24
    progress = json.loads((place.of("clock") / "progress.json").read_text())["progress"]
    assert progress == sorted(progress) and len(progress) == result["steps"]
    assert progress[11] < 1 / 2 < 2 / 3 < progress[14]
    assert progress[-1] == pytest.approx(1, abs=0.05)


# ------------------------------------------------------------------------------- replay and crashes
@pytest.fixture(scope="session")
def source(place):
    """Return a run against the clock, to be repeated; it validates and saves on its way."""
    clock = dict(ITERATIONS=0, MAX_WALLCLOCK_SECONDS=3, RESERVE_SECONDS=1, SAVE_EVERY=15)
    place.run("source", TICKS, VAL_LOSS_EVERY=50, **clock)
    assert place.result("source")["steps"] > 20
    return "source"


def replay_of(place, source, **changes):
    return {**place.unset, "REPLAY": place.of(source), **changes}


def test_replays_of_a_wallclock_run_are_the_same_to_the_byte(place, source):
    replay = replay_of(place, source, SAVE_EVERY=0, VAL_LOSS_EVERY=9)
    place.run("again", "T.WARMUP_STEPS = 1\n", **replay)
    assert_same(place, "again", source)
    assert place.result("again")["events"] == []
    assert len(place.result(source)["phases"]) == 5
    assert [place.result(out)["ended"] for out in (source, "again")] == ["clock", "replay"]
    assert len(steps_kept(place.of("again"))) == 1  # the end, whatever SAVE_EVERY says
    begin, *middle, last = steps_logged(place, source, " saved")
    assert (begin, middle[0], last) == (0, 15, place.result(source)["steps"])
    used = [json.loads((place.of(out) / "progress.json").read_text()) for out in (source, "again")]
    assert used[0]["progress"] == used[1]["progress"]
    losses = place.logged(source, "train_loss")
    assert place.logged("again", "train_loss") == losses and len(losses) == len(used[0]["progress"])


def test_a_replay_of_an_unfinished_run_is_refused(place, stopped):
    child = place.run("refused", **replay_of(place, stopped), code=2)
    file = place.of(stopped) / "progress.json"
    assert child.err.startswith(f"error: REPLAY='{file.parent}': no {file}; must be a run that ")
    assert not (place.folder / "refused").exists()


# Kinds of moments: functions of a run's set-up, steps, saves, validations and final part.
MOMENTS = {
    "u": ["T.warm_up"],
    "t": ["T.forward_backward"],
    "s": ["T.save_checkpoint"],
    "v": ["T.Scorer.score"],
    "f": ["T.pack_artifact", "T.read_artifact", "T.write_record", "T.write_final"],
}


def die_in(function, entry, calls):
    """Return a patch: kill -9 in the call number `entry` of a function, when that has made so many
    calls, to Python or C, or at its end.
    """
    return f"""
import os, signal, sys
inner = {function}
left = [{entry}, {calls}]
def die(*_):
    left[1] -= 1
    if left[1] <= 0:
        os.kill(os.getpid(), signal.SIGKILL)
def outer(*args, **kwargs):
    left[0] -= 1
    if left[0] == 0:
        sys.setprofile(die)
    done = inner(*args, **kwargs)
    if left[0] == 0:
        left[1] = 0
        die()
    return done
{function} = outer
"""


def crash(place, out, source, kinds, seed):
    """Replay `source` under kill -9, once for each letter of `kinds`, and to its end."""
    rng = random.Random(seed)
    begin = replay_of(place, source, SAVE_EVERY=2, VAL_LOSS_EVERY=3)
    for kind in kinds:
        entry = rng.randint(1, 3) if kind in "ts" else 1
        patch = die_in(rng.choice(MOMENTS[kind]), entry, int(10 ** rng.uniform(0, 3.5)))
        given = {**place.unset, "RESUME": "run"}
        if newest(place.of(out))[0] is None:  # killed before its first checkpoint
            shutil.rmtree(place.folder / out, ignore_errors=True)
            given = begin
        child = place.begin(out, patch, **given)
        assert child.wait() == -signal.SIGKILL, (kind, child.err)
    place.resume(out)
    assert_same(place, out, source)
    scored = [row["step"] for row in metrics_of(place, out) if "val_loss" in row]
    assert scored == sorted(set(scored))


def test_kills_change_nothing(place, source):
    """The short form: a kill in a step, a save, a validation and behind the last step."""
    crash(place, "crashed", source, "tsvf", seed=1)


@pytest.mark.full
def test_fifty_kills_change_nothing(place):
    clock = dict(ITERATIONS=0, MAX_WALLCLOCK_SECONDS=9, RESERVE_SECONDS=1, SAVE_EVERY=40)
    place.run("long", TICKS, **clock)
    kinds = list("u" * 5 + "t" * 18 + "s" * 14 + "v" * 9)
    random.Random(2).shuffle(kinds)
    crash(place, "long crashed", "long", "".join(kinds) + "ffff", seed=3)


@pytest.mark.full
def test_a_replay_of_a_resumed_run(place):
    """Its stored settings name what it was resumed from; one with changes cannot be repeated."""
    place.run("halved", stop_at(9), 143)
    place.resume("halved")
    place.run("halved again", **replay_of(place, "halved"))
    assert_same(place, "halved again", "halved")
    place.run("bent", stop_at(9), 143)
    place.resume("bent", MATRIX_LR=0.01)
    child = place.run("bent again", code=2, **replay_of(place, "bent"))
    assert re.match("error: REPLAY=.*: was resumed with changed .*matrix_lr", child.err)


def test_a_damaged_newer_checkpoint_does_not_count_as_kept(place, straight):
    place.run("pruned", stop_at(9), 143)
    last = newest(place.of("pruned"))[0]
    assert last.name == "step_000010"
    (last / "model.pt").write_bytes(b"")
    place.resume("pruned", stop_at(8), 143, SAVE_EVERY=9)
    assert steps_kept(place.of("pruned")) == [8, 9]


# --------------------------------------------------------------------------------- numbers of ranks
RECORD = """
import json, os
name = os.environ["OUT_DIR"] + ".rows." + os.environ.get("RANK", "0")
inner = T.Batches.micro_batches
def micro_batches(self, step):
    rows = []
    for ids, targets in inner(self, step):
        rows += T.torch.cat([ids, targets[:, -1:]], dim=1).tolist()
        yield ids, targets
    with open(name, "a") as file:
        file.write(json.dumps([step, rows]) + "\\n")
T.Batches.micro_batches = micro_batches
"""


def rows_read(place, out):
    """Return the windows of every data step, of all ranks, from RECORD.

    Two parts of a run that read the same step must agree.
    """
    ranks = []
    for path in sorted(place.folder.glob(f"{out}.rows.*")):
        ranks.append([json.loads(line) for line in path.read_text().splitlines()])
    other = dict(ranks[-1])  # each step once
    rows = {}
    for step, part in ranks[0]:
        whole = part + other[step] if len(part) == 4 else part
        assert rows.setdefault(step, whole) == whole, step
    return rows


def test_one_rank_two_ranks_one_rank(place):
    """The second part on two ranks, of which one gets a signal; then one process goes on.

    Losses are those of the straight run, but for sums in another order (see test_smoke.py).
    """
    long = {"ITERATIONS": 30, "GRAD_CLIP_NORM": 1}
    place.run("ranks straight", RECORD, **long)
    place.run("ranks", RECORD + stop_at(9), 143, **long)
    stop = at(17, "if rank == 1: os.kill(os.getpid(), signal.SIGTERM); time.sleep(0.3)")
    resume = {**place.unset, "RESUME": "run"}
    place.ranks("ranks", RECORD + stop, code=143, **resume)
    step = int(re.findall(r"stopped by SIGTERM after step (\d+)", place.log("ranks"))[-1])
    assert 18 <= step <= 20 and newest(place.of("ranks"))[0].name == f"step_{step:06d}"
    place.resume("ranks", RECORD)
    assert events(place, "ranks", "step") == [10, step]
    assert events(place, "ranks", "ranks") == [2, 1]
    straight, found = (place.logged(out, "train_loss") for out in ("ranks straight", "ranks"))
    assert len(straight) == len(found) == 30
    quantized = place.result("ranks straight")["phases"]["qat"]["start_step"]
    exact = {step: loss for step, loss in straight.items() if step < quantized}
    assert len(exact) >= 25
    assert {step: found[step] for step in exact} == pytest.approx(exact, abs=2e-4)
    assert found == pytest.approx(straight, rel=3e-4)
    nats = place.result("ranks straight")["val_nats"]
    assert place.result("ranks")["val_nats"] == pytest.approx(nats, rel=3e-4)
    assert rows_read(place, "ranks") == rows_read(place, "ranks straight")


# ---------------------------------------------------------------------------------------- bad steps
# Step s turns bad as bad["s"] says: "loss", NaN; "gradient", one of NaN. Prints each step with a
# hash of the weights that it saw.
SPOIL = """
import hashlib
def wrap(forward_backward):
    def poisoned(model, batches, step):
        weights = b"".join(param.detach().numpy().tobytes() for param in model.parameters())
        print("read", step, hashlib.sha256(weights).hexdigest()[:12], flush=True)
        loss, how = forward_backward(model, batches, step), bad.get(str(step))
        if how == "gradient":
            next(model.parameters()).grad.fill_(float("nan"))
        return loss * float("nan") if how == "loss" else loss
    return poisoned
T.forward_backward = wrap(T.forward_backward)
"""


def spoil(bad):
    return f"bad = {json.dumps(bad)}\n{SPOIL}"


def steps_without_effect(child):
    """Return the steps that read their data, and those behind which the weights are as before."""
    found = re.findall(r"^read (\d+) (\w+)$", child.out, re.M)
    pairs = zip(found, found[1:], strict=False)
    return len(found), [int(step) for (step, seen), (_, after) in pairs if seen == after]


def test_bad_steps_are_skipped_and_counted(place):
    """Weights stay as they were, for a NaN of the loss as of a gradient; in the last step too."""
    child = place.run("skip", spoil({6: "loss", 9: "gradient", 15: "gradient"}), QAT=0)
    assert steps_without_effect(child) == (16, [6, 9]) and child.err == ""
    assert events(place, "skip") == ["skipped_step"] * 3
    assert events(place, "skip", "step") == [7, 10, 16]
    losses = events(place, "skip", "loss")
    assert losses[0] == "nan" and 3 < float(losses[1]) < 6
    logged = re.findall(r"^event: skipped_step step:(\d+) loss:", place.log("skip"), re.M)
    assert logged == ["7", "10", "16"]
    result = place.result("skip")
    assert (result["steps"], result["skipped_steps"]) == (16, 3)


def test_ranks_skip_together(place):
    """The gradient turns bad on rank 1 alone."""
    bad = 'import os\nbad = {"5": "gradient"} if os.environ["RANK"] == "1" else {}\n'
    for child in place.ranks("ranks skip", bad + SPOIL):
        assert steps_without_effect(child) == (16, [5])
    assert events(place, "ranks skip", "step") == [6]


def test_ten_bad_steps_in_a_row_end_the_run(place):
    child = place.run("diverged", spoil(dict.fromkeys(range(3, 99), "loss")), 1)
    folder = place.of("diverged")
    said = "error: 10 steps in a row had a loss or gradient that is not finite; the last checkpoint"
    assert child.err == f"{said} of {folder} is good\n"
    assert place.log("diverged").count("event: skipped_step ") == 10
    assert place.log("diverged").endswith(f"{said.removeprefix('error: ')} of {folder} is good\n")
    assert [row["train_loss"] for row in metrics_of(place, "diverged")[3:]] == [None] * 9
    assert not (folder / "result.json").exists()
    assert steps_without_effect(child)[0] == 14  # the tenth is known in the step after it
    place.run("nine", spoil(dict.fromkeys([*range(3, 12), *range(13, 15)], "gradient")))
    assert place.result("nine")["skipped_steps"] == 11


def test_a_bad_start_is_not_called_good(place):
    """Weights of NaN at the first step, in a later one, and a loss that was never finite."""
    spoil_weights = "next(model.parameters()).data[3] = float('nan')"
    child = place.run("bad start", at(0, spoil_weights), 1)
    name = "error: the weights embed are not finite"
    start = "from the first step on: INIT_FROM='' or the data are bad\n"
    assert child.err == f"{name}, {start}"
    assert place.run("bad later", at(2, spoil_weights), 1).err == f"{name}\n"
    child = place.run("bad data", spoil(dict.fromkeys(range(99), "loss")), 1)
    assert child.err.endswith(f"not finite, {start}")


@pytest.mark.parametrize(
    ("fault", "code", "line"),
    [
        ("raise T.UserError('wrong')", 2, "error: wrong"),
        ("raise T.torch.OutOfMemoryError('much')", 1, "error: much"),
        ("{}['bug']", 1, "KeyError: 'bug'\n"),
    ],
    ids=["user", "memory", "bug"],
)
def test_an_error_that_ends_a_run_stands_in_its_log(place, fault, code, line):
    out = f"fault {code}{line[:5]}"
    child = place.begin(out, at(3, fault), ITERATIONS=8)
    assert child.wait() == code and child.err.endswith(f"{line}\n")
    assert place.log(out).endswith(child.err)
    assert ("Traceback" in child.err) == ("bug" in line)


def test_a_clock_that_ends_a_run_before_its_steps_says_so(place):
    """On a slow machine: a step takes 8.5 s of a clock of 150 s."""
    slow = TICKS + "inner = T.forward_backward\n"
    slow += "def late(*words):\n    Tick.seconds += 8.5\n    return inner(*words)\n"
    slow += "T.forward_backward = late\n"
    clock = dict(ITERATIONS=60, MAX_WALLCLOCK_SECONDS=150, RESERVE_SECONDS=5)
    child = place.run("slow", slow, **clock)
    result = place.result("slow")
    (event,) = result["events"]
    assert event == {"event": "ended_by_clock", "step": result["steps"], "iterations": 60}
    assert result["ended"] == "clock" and 16 <= result["steps"] <= 17
    line = f"training has ended after step {result['steps']} of 60: MAX_WALLCLOCK_SECONDS=150 less "
    line += "RESERVE_SECONDS=5 leave no time for another one\n"
    assert child.err == line and f"\n{line}" in place.log("slow")
    rates = [row["lr_mul"] for row in metrics_of(place, "slow") if "lr_mul" in row]
    assert len(rates) == result["steps"] and min(rates) > 0.05 and rates[0] == rates[1] == 1


# ----------------------------------------------------------------------------------- data and disk
def limit(size):
    """Return a patch: a file of more than `size` bytes fails as on a full disk."""
    limits = f"({size}, resource.RLIM_INFINITY)"
    return f"import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, {limits})\n"


def test_a_save_that_fails_is_an_event(place, straight):
    """A limit between the sizes of the log and of a checkpoint, while two saves fall due."""
    folder = place.of("full")
    size = (place.of(straight) / "log.txt").stat().st_size + 20000
    assert size < (place.of(straight) / "step_000016" / "model.pt").stat().st_size
    look = f"import pathlib\nfolder = pathlib.Path({str(folder)!r})\n"
    look += "print('stands', sorted(path.name for path in folder.glob('step_*')))\n"
    child = place.run("full", at(6, limit(size)) + at(13, look + limit(-1)))
    assert "stands ['step_000000', 'step_000004']\n" in child.out
    assert events(place, "full") == ["save_failed"] * 2
    assert events(place, "full", "step") == [8, 12]
    assert all("File too large" in error for error in events(place, "full", "error"))
    assert place.log("full").count("\nevent: save_failed step:") == 2
    assert steps_kept(folder) == [4, 16]
    assert_same(place, "full", straight)


def test_a_disk_that_is_full_at_the_end_loses_nothing(place, straight):
    child = place.run("end", at(13, limit(20000)), 1)
    assert re.search(r"^error: \[Errno 27\] File too large", child.err, re.M)
    assert newest(place.of("end"))[0].name == "step_000012"
    assert not (place.of("end") / "model.upar").exists()
    place.resume("end")
    assert_same(place, "end", straight)


def test_a_disk_that_is_full_at_the_start_is_one_line(place):
    child = place.run("start", limit(190000), 1)
    assert re.fullmatch(r"error: \[Errno 27\] File too large.*\n", child.err), child.err
    assert "step:1/" not in child.out and steps_kept(place.of("start")) == []


def test_a_log_that_cannot_be_written_does_not_end_the_run(place, straight):
    child = place.run("no log", at(6, limit(20000)) + at(13, limit(-1)), SAVE_EVERY=0)
    steps = list(range(1, 17))  # step 6 is logged in the middle of step 7
    assert child.err.count("log.txt: [Errno 27] File too large\n") >= 7
    assert steps_logged(place, "no log") == steps[:5] + steps[12:]
    assert re.findall(r"^step:(\d+)/", child.out, re.M) == [str(step) for step in steps]
    assert_same(place, "no log", straight)


def test_a_full_disk_under_the_terminal_does_not_end_the_run(place, straight):
    place.run("full terminal", "import os\nos.dup2(os.open('/dev/full', os.O_WRONLY), 1)")
    note = "the output has ended ([Errno 28] No space left on device); the run and this log go on"
    assert place.log("full terminal").count(f"\nnote: {note}\n") == 1
    assert place.artifact("full terminal") == place.artifact(straight)
    assert (place.of("full terminal") / "result.json").exists()


ENDS = {
    "a closed pipe": "import os\nr, w = os.pipe()\nos.close(r)\nos.dup2(w, 1)\n",
    "closed": "import os, sys\nfor n in (0, 1, 2): os.close(n)\n"
    "sys.stdin = sys.stdout = sys.stderr = None\n",
}


@pytest.mark.parametrize("how", ENDS)
def test_output_that_ends_does_not_end_the_log(place, how):
    out = f"output {how}"
    place.run(out, ENDS[how], ITERATIONS=4, QAT=0, EMA=0, SWA=0)
    log = place.log(out)
    assert log.splitlines()[-1] == "events: []" and len(losses_of(place, out)) == 4
    assert log.count("note: the output has ended ([Errno 32] Broken pipe)") == (how != "closed")


def test_streams_take_any_text(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    monkeypatch.setattr(sys, "stderr", None)
    T.open_streams()
    assert T.write_stream(sys.stdout, "größer \ud800\n") is None
    assert written.getvalue() == b"gr\\xf6\\xdfer \\ud800\n"
    assert T.write_stream(sys.stderr, "nowhere") is None
    sys.stderr.close()


def test_a_command_whose_reader_is_gone_ends_plainly(capfd):
    def main():
        print("x" * 100_000, flush=True)

    read, write = os.pipe()
    os.close(read)
    for number, code in ((write, 141), (os.open("/dev/full", os.O_WRONLY), 1)):
        with open(number, "w") as stream, contextlib.redirect_stdout(stream):
            assert T.exit_code(main) == code
            if code == 141:  # it leads nowhere now
                assert T.exit_code(lambda: print("lost")) is None
    line = "error: [Errno 28] No space left on device\n"
    assert capfd.readouterr().err == line
    with open("/dev/full", "w") as stream, contextlib.redirect_stdout(stream):
        assert T.exit_code(lambda: print("kept until the end")) == 1
    assert capfd.readouterr().err == line.replace("\n", ": 'standard output'\n")


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (T.UserError("wrong\nmore"), 2, "error: wrong\n"),
        (FloatingPointError("nan"), 1, "error: nan\n"),
        (OSError(28, "No space left"), 1, "error: [Errno 28] No space left\n"),
        (torch.OutOfMemoryError("much"), 1, "error: much\n"),
    ],
    ids=repr,
)
def test_the_exit_code_of_each_fault(error, code, line, capsys):
    def main():
        raise error

    assert T.exit_code(main) == code and capsys.readouterr().err == line
    assert T.exit_code(lambda: 143) == 143
    assert T.exit_code(lambda: 1 / 0) == 1  # a bug
    text = capsys.readouterr().err
    assert text.startswith("Traceback ") and text.endswith(
        "\nZeroDivisionError: division by zero\n\n"
    )


# -------------------------------------------------------------------------------------------- hangs
def test_a_hang_prints_the_stacks_and_the_run_goes_on(place, straight):
    patch = TICKS + "T.HANG_SECONDS = 1.0\n" + at(6, "time.sleep(2.5)")
    child = place.run("hang", patch)
    assert re.match(r"Timeout \(0:00:", child.err) and " in forward_backward\n" in child.err
    assert " in main\n" in child.err
    assert_same(place, "hang", straight)


# Rank 0 comes two seconds late to the reduction of step 7; rank 1 dies in it a second before.
DIE = """
import os, signal, threading, time
inner = T.forward_backward
def dying(model, batches, step):
    loss = inner(model, batches, step)
    if step == 6:
        if os.environ["RANK"] == "0":
            time.sleep(2)
        else:
            threading.Timer(1, os.kill, (os.getpid(), signal.SIGKILL)).start()
    return loss
T.forward_backward = dying
"""


def test_a_rank_killed_inside_a_collective_ends_the_other(place):
    environments = rank_environments(2)
    children = [place.begin("killed", DIE, **environ) for environ in environments]
    assert children[1].wait() == -signal.SIGKILL and children[0].wait() == 1
    line = r"^error: rank 0 lost another rank; RESUME continues$"
    assert re.search(line, children[0].err, re.M), children[0].err
    folder = place.of("killed")
    assert newest(folder) == (folder / "step_000004", []) and not (folder / "result.json").exists()
    assert steps_logged(place, "killed") == [1, 2, 3, 4, 5]  # 6 is logged in step 7


# ----------------------------------------------------------------------------------------- torchrun
def ended(process, seconds):
    """Return what a process has said on stderr; it must end by itself within this time."""
    try:
        return process.communicate(timeout=seconds)[1]
    finally:
        if process.poll() is None:
            process.terminate()  # torchrun ends its ranks
            process.communicate()


def torchrun(place, out, *words, **changes):
    command = [sys.executable, "-m", "torch.distributed.run", *map(str, words)]
    pipes = dict(text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    return subprocess.Popen(command, env=place.environment(out, **changes), **pipes)


@pytest.mark.full
def test_sigterm_to_torchrun_saves_once(place):
    driver = place.folder / "term.py"
    lines = ["import sys", f"sys.path.insert(0, {str(ROOT)!r})", "import train_gpt as T", CONSTANTS]
    driver.write_text("\n".join([*lines, "sys.exit(T.exit_code(T.main))"]))
    words = ["--standalone", "--nproc_per_node=2", driver]
    process = torchrun(place, "term", *words, ITERATIONS=30000, SAVE_EVERY=0)
    log = place.of("term") / "log.txt"
    end = time.monotonic() + 300
    while not (log.exists() and "step:9/" in log.read_text(encoding="utf-8", errors="replace")):
        assert time.monotonic() < end
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    said = ended(process, 300)
    assert process.returncode != 0
    assert "ended without" not in said and "rank 0 lost" not in said
    (step,) = re.findall(r"^stopped by SIGTERM after step (\d+)", place.log("term"), re.M)
    assert steps_logged(place, "term", " saved") == [int(step)]
    assert newest(place.of("term")) == (place.of("term") / f"step_{int(step):06d}", [])


@pytest.mark.full
def test_two_nodes_meet_by_the_command_of_the_guide(place, straight):
    """Both on this machine, a rank each."""
    port = rank_environments(1)[0]["MASTER_PORT"]
    text = GUIDE.read_text(encoding="utf-8")
    command = re.search(r"^RUN_ID=big torchrun (.*) train_gpt.py$", text, re.M).group(1)
    command = command.replace("HOST:29400", f"127.0.0.1:{port}")
    words = command.replace("--nproc_per_node=8", "--nproc_per_node=1").split()
    assert words[:2] == ["--nnodes=2", "--nproc_per_node=1"]
    nodes = [torchrun(place, "nodes", *words, ROOT / "train_gpt.py") for _ in range(2)]
    said = [ended(node, 300) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    result = place.result("nodes")
    assert (result["world_size"], result["steps"]) == (2, 16)
    assert result["val_nats"] == pytest.approx(place.result(straight)["val_nats"], rel=1e-4)


@pytest.mark.full
def test_the_guides_commands_on_one_process(place):
    """Those of docs/runs.md, in its order; the first is stopped in its seventh step."""
    blocks = re.findall(r"^```bash\n(.*?)^```", GUIDE.read_text(encoding="utf-8"), re.M | re.S)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    commands = [line.split("#")[0].split() for line in lines]
    given = [
        dict(w.split("=", 1) for w in words[:-2]) for words in commands if words[-2] == "python"
    ]
    assert list(map(list, given)) == [
        ["RUN_ID", "CONFIG"],
        ["RESUME"],
        ["REPLAY"],
        ["RUN_ID", "INIT_FROM", "CONFIG"],
    ]
    data = place.folder / "embedded"  # the default, which ./run.sh prepares
    command = [sys.executable, ROOT / "data" / "prepare.py", "--out", data]
    subprocess.run(command, check=True, capture_output=True)
    for changes, patch in zip(given, (stop_at(6), "", "", ""), strict=True):
        base = {**place.unset, "RUN_ID": None}
        if "CONFIG" in changes:
            changes["CONFIG"] = ROOT / changes["CONFIG"]
            changes["DATA_PATH"] = data
        if "INIT_FROM" in changes:
            changes["INIT_FROM"] = place.folder / "guide" / "base"
        place.run("guide", patch, 143 if patch else 0, **{**base, **changes})
    (again,) = place.folder.glob("guide/run_*/model.upar")
    assert again.read_bytes() == (place.folder / "guide" / "base" / "model.upar").read_bytes()


def test_networks_are_compiled_whole(place):
    patch = "T.torch.compile = lambda net, **words: print('compile', words, flush=True) or net"
    child = place.run("compile", patch, COMPILE=1, ITERATIONS=8)
    words = {"dynamic": False, "fullgraph": True, "mode": "default"}
    assert child.out.count(f"compile {words}\n") == 2


# ------------------------------------------------------------------------------ what is read again
def test_a_replay_has_a_name_of_its_own_and_an_unchanged_source(tmp_path):
    settings = {**vars(T.Settings()), "run_id": "source", "resume": "runs/source", "seed": 3}
    stored = {"progress": [0.5, 1.0], "events": [], "settings": settings}
    path = tmp_path / "progress.json"
    path.write_text(json.dumps(stored))
    given = {"REPLAY": str(tmp_path)}
    own = {"run_id": "", "resume": "", "out_dir": "runs"}
    assert T.stored_settings(given) == {**settings, **own}
    event = {"event": "resume", "changed": {}}
    path.write_text(json.dumps({**stored, "events": [event]}))
    assert T.read_progress(str(tmp_path), "runs")["progress"] == [0.5, 1.0]
    event["changed"] = {"matrix_lr": 0.1}
    path.write_text(json.dumps({**stored, "events": [event]}))
    with pytest.raises(T.UserError, match="was resumed with changed {'matrix_lr': 0.1}"):
        T.stored_settings(given)


def test_a_checkpoint_appears_by_a_rename(tmp_path, monkeypatch):
    """A checkpoint that is copied into place would be seen half-written."""

    def fail(path, target):
        raise OSError("no rename")

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="no rename"):
        T.save_checkpoint(tmp_path, 3, {"model": {}}, {})
    assert list(tmp_path.iterdir()) == []


# ----------------------------------------------------------------------------- seeded mutations
def repair(folder):
    """Write a SHA256SUMS that matches what a checkpoint has now, as who forges it would."""
    names = sorted(path.name for path in folder.iterdir() if path.name != "SHA256SUMS")
    lines = [
        f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in names
    ]
    (folder / "SHA256SUMS").write_text("".join(lines))


ODD = (None, True, -1, 0, 3.5, 1e400, "", "x", [], [1], {}, {"a": 1})


def change_settings(path, rng):
    """Replace or delete a setting in a JSON file; say which."""
    content = json.loads(path.read_text())
    settings = content["settings"]
    name = rng.choice(list(settings))
    if rng.random() < 0.3:
        del settings[name]
    else:
        settings[name] = rng.choice(ODD)
    if rng.random() < 0.2:
        content[rng.choice(["settings", "added"])] = rng.choice(ODD)
    path.write_text(json.dumps(content))
    return name


def change_bytes(path, rng):
    """Flip a bit, cut the file, empty it, delete it, or write what is no such file."""
    data = path.read_bytes()
    how = rng.randrange(5)
    if how == 0:
        flip(path, rng.randrange(8 * len(data)))
    elif how == 1:
        path.write_bytes(data[: rng.randrange(len(data))])
    elif how == 2:
        path.write_bytes(b"")
    elif how == 3:
        path.unlink()
    else:
        path.write_bytes(rng.choice([b"PK\3\4", b"\x80\2}.", b"null", b"hello\n" * 99]))
    return f"bytes {how}"


@pytest.mark.full
@pytest.mark.parametrize("seed", range(16))
def test_damaged_checkpoints_load_rightly_or_are_one_line(place, straight, stopped, seed):
    """Damage costs the steps since the checkpoint before, or, with new sums, is refused."""
    rng = random.Random(seed)
    out = f"mutated {seed}"
    folder = copied(place, stopped, out)
    checkpoint = T.list_checkpoints(folder)[0]
    name = rng.choice(["meta.json", "model.pt", "training.pt", "SHA256SUMS"])
    change_bytes(checkpoint / name, rng)
    if seed % 2:
        repair(checkpoint)
    child = place.begin(out, **{**place.unset, "RUN_ID": None, "RESUME": "run"})
    code = child.wait()
    assert code in (0, 1, 2), child.err
    if code:
        assert re.fullmatch(r"error: .+\n", child.err), child.err
    elif seed % 2 == 0:
        assert place.artifact(out) == place.artifact(straight)


@pytest.mark.parametrize("seed", range(24))
def test_changed_settings_are_one_line(place, stopped, seed, tmp_path):
    """meta.json of a checkpoint and progress.json, whose sums are right: no setting is lost."""
    rng = random.Random(seed)
    folder = Path(shutil.copytree(place.of(stopped), tmp_path / "run"))
    checkpoint = T.list_checkpoints(folder)[0]
    before = T.stored_settings({"RESUME": str(folder)})
    stored = {"progress": [0.2, 0.5, 1.0], "events": [{"event": "x"}], "settings": before}
    (folder / "progress.json").write_text(json.dumps(stored))
    name = rng.choice(["RESUME", "REPLAY"])
    path = checkpoint / "meta.json" if name == "RESUME" else folder / "progress.json"
    changed = change_settings(path, rng)
    repair(checkpoint)
    try:
        settings = T.load_settings(T.Settings, {name: str(folder)}, stored=T.stored_settings)
    except T.UserError as error:
        assert "\n" not in str(error)
    else:  # a value of the right type that differs, or one that a resumed run compares
        record = json.loads(path.read_text())
        own = {"run_id": "", "resume": "", "replay": "", "out_dir": ""}
        assert {**vars(settings), **own} == {**record["settings"], **own}, changed


def test_a_score_that_is_not_finite_is_a_fault():
    """Of a mean with an interval the mean counts: one row has no interval."""
    nan = math.nan
    good = {"val_loss": 1.0, "before": {"loss": [2.0, nan, nan], "n": 1}, "after": {"loss": 3.0}}
    assert T.bad_scores(good) == []
    bad = {"val_bpb": nan, "after": {"loss": [math.inf, 0.0, 1.0], "greedy": 0.5}}
    assert T.bad_scores(bad) == ["val_bpb", "after loss"]
