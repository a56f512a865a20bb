"""Nothing is lost: kills, signals, hangs, bad steps, damaged files, full disks, provoked; resumes
and replays. The faults stand in tests/faults.py.
"""

import contextlib
import functools
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
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from faults import limit

import train_gpt as T
import train_grpo as G
from conftest import (
    ROOT,
    TINY,
    Place,
    blocks,
    mutated,
    rank_environments,
    read_json,
    refusal,
    steps_kept,
    stop_at,
    write_json,
)

SHORT = dict(TINY, MODEL_DIM=48, TRAIN_BATCH_TOKENS=256, ITERATIONS=16, SAVE_EVERY=4)
FEW = dict(ITERATIONS=4, QAT=0, EMA=0, SWA=0)


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


def metrics_of(place, out):
    """Return the objects of metrics.jsonl, which has no line that is cut short."""
    text = (place.of(out) / "metrics.jsonl").read_text(encoding="utf-8")
    assert text.endswith("\n") and "NaN" not in text and "Infinity" not in text
    return list(map(json.loads, text.splitlines()))


def losses_of(place, out):
    """Return the losses of the trained steps of metrics.jsonl, each of which stands there once."""
    rows = [row for row in metrics_of(place, out) if "train_loss" in row]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [row["train_loss"] for row in rows]


def assert_same(place, out, other):
    """Two runs ended in the same model, to the byte, with the same steps, averages and phases."""
    place.same(out, other)
    assert place.result(out)["val_nats"] == place.result(other)["val_nats"]
    assert losses_of(place, out) == losses_of(place, other)
    averages = [re.findall(r"^weights: .*", place.log(run), re.M)[-4:] for run in (out, other)]
    assert averages[0] == averages[1] and len(averages[0]) == 4


def copied(place, out, name):
    """Return the folder of a copy of a run, as <name>/run."""
    return Path(shutil.copytree(place.of(out), place.of(name)))


def newest(folder):
    """Return the newest whole checkpoint of a run, and a line on each newer one."""
    return T.newest_checkpoint(folder)


def steps_logged(place, out, what=r"/\S+ train_loss"):
    return [int(step) for step in re.findall(rf"^step:(\d+){what}", place.log(out), re.M)]


def events(place, out, name="event"):
    return [event[name] for event in place.result(out)["events"]]


# -------------------------------------------------------------------------------------- checkpoints
def save(folder, step):
    model = {"w": torch.arange(5.0) + step}
    training = {"clock": {"before": 0.1 * step}, "plan": {}}
    T.save_checkpoint(folder, step, {"model": model, "training": training}, {"step": step})
    return folder / f"step_{step:06d}"


@pytest.fixture
def pair(tmp_path):
    """Return two checkpoints of the run tmp_path/run, the older one first."""
    (tmp_path / "run").mkdir()
    return save(tmp_path / "run", 4), save(tmp_path / "run", 8)


def test_a_checkpoint_has_its_files_and_their_hashes(pair):
    command = ["sha256sum", "-c", "SHA256SUMS"]
    done = subprocess.run(command, cwd=pair[1], capture_output=True, text=True)
    assert done.stdout == "meta.json: OK\nmodel.pt: OK\ntraining.pt: OK\n"
    assert newest(pair[0].parent) == (pair[1], [])


def flip(path, bit=9):
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def cut(path):
    path.write_bytes(path.read_bytes()[:-2])


def test_a_damaged_checkpoint_is_named_and_skipped(pair):
    older, newer = pair
    for name in ("model.pt", "training.pt", "meta.json"):
        path = newer / name
        whole = path.read_bytes()
        for harm in (flip, cut, Path.unlink):
            harm(path)
            found, (fault,) = newest(older.parent)
            assert found == older and str(newer) in fault and name in fault
            path.write_bytes(whole)
    for folder in pair:
        (folder / "SHA256SUMS").unlink()
    found, faults = newest(older.parent)
    assert found is None and len(faults) == 2
    given = {"RESUME": "run", "OUT_DIR": str(older.parent.parent)}
    refusal(T.UserError, "^RESUME='.*run': has no whole checkpoint", T.stored_settings, given)


def test_every_byte_of_the_list_of_hashes_counts(pair):
    older, newer = pair
    path = newer / "SHA256SUMS"
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place])
        assert newest(older.parent)[0] == older, place
        path.write_bytes(whole)
        flip(path, 8 * place + place % 8)
        assert newest(older.parent)[0] == older, place


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (r".*meta.json\n", ""),
        (r"(.*meta.json\n)", r"\1\1"),
        (r"(.*)(meta.json\n)", r"\1\2\1../step_000004/\2"),
        ("\n", "\r\n"),
        ("^", "\ufeff"),
    ],
)
def test_a_checkpoint_is_whole_only_if_its_sums_name_every_file(pair, old, new):
    older, newer = pair
    path = newer / "SHA256SUMS"
    path.write_text(re.sub(old, new, path.read_text()), newline="")
    assert newest(older.parent)[0] == older


def test_a_folder_without_training_is_whole_if_it_lists_what_it_has(tmp_path):
    """What quantize.py writes, and final/, have no training.pt."""
    folder = tmp_path / "final"
    T.write_checkpoint(folder, {"model": {}, "coded": {}}, {"step": 3})
    assert list(tmp_path.iterdir()) == [folder]
    (folder / "._model.pt").touch()  # as an archive that a Mac has made
    assert T.checkpoint_fault(folder) == ""
    path = folder / "SHA256SUMS"
    path.write_text(re.sub(".*coded.pt\n", "", path.read_text()))
    assert "coded.pt" in T.checkpoint_fault(folder)
    folder.rename(tmp_path / "step_000003")
    (tmp_path / "step_000003" / "coded.pt").unlink()
    assert "step_000003/training.pt" in T.checkpoint_fault(tmp_path / "step_000003")


def full_disk(*_):
    raise OSError(28, "No space left on device")


def test_the_two_newest_stay_and_a_failed_save_leaves_them(tmp_path, monkeypatch):
    """A checkpoint appears by a rename, or it would be seen half-written."""
    for step in (999_998, 999_999, 1_000_000):  # by number: as names the last is the least
        save(tmp_path, step)
    (tmp_path / "step_1000000" / "model.pt").write_bytes(b"damaged")
    save(tmp_path, 1_000_000)  # it takes the place of the damaged one
    for owner, name in ((T.os, "fsync"), (Path, "rename")):
        with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
            patch.setattr(owner, name, full_disk)
            save(tmp_path, 1_000_001)
        assert len(list(tmp_path.iterdir())) == 2
        assert newest(tmp_path) == (tmp_path / "step_1000000", [])
    (tmp_path / "unfinished").mkdir()  # of a process that was killed
    save(tmp_path, 1_000_002)
    assert {*steps_kept(tmp_path)} == {1_000_000, 1_000_002}
    assert len(list(tmp_path.iterdir())) == 2


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


def test_a_checkpoint_that_is_none_is_one_line(tmp_path):
    torch.save({}, tmp_path / "training.pt")
    torch.save(torch.nn.Linear(2, 2).state_dict(), tmp_path / "model.pt")
    parts = {"network": torch.nn.Linear(2, 2), "ema": torch.nn.Linear(2, 2)}
    T.load_parts(parts, tmp_path, ["ema"], "cpu")
    refusal(T.UserError, "RESUME: .*'ema'.* this version", T.load_parts, parts, tmp_path, [], "cpu")
    for content in (b"", b"PK\3\4", b"\x80\2}.", b"null"):
        (tmp_path / "model.pt").write_bytes(content)
        refusal(T.UserError, "RESUME: ", T.load_parts, parts, tmp_path, ["ema"], "cpu")


def test_what_a_run_leaves(place, straight):
    """Two checkpoints of 16 steps; weights_only loads all of it."""
    folder = place.of(straight) / "step_000016"
    meta = read_json(folder / "meta.json")
    assert (meta["step"], meta["settings"]) == (16, place.result(straight)["settings"])
    training = torch.load(folder / "training.pt", weights_only=True)
    assert training["run"]["step"] == 16 and training["ema"]["count"] == 3
    assert training["clock"]["used"] == [step / 16 for step in range(1, 17)]
    model = place.checkpoint(straight, 12)
    total = place.result(straight)["params"]["total"]
    assert sum(tensor.numel() for tensor in model.values()) == total
    assert steps_kept(folder.parent) == [12, 16]
    assert steps_logged(place, straight, " saved$") == [0, 4, 8, 12, 16]


# --------------------------------------------------------------------------------------- log, output
def test_what_a_resumed_run_writes_again_is_removed(tmp_path):
    """Steps after the checkpoint, its scores but not those of the start, and a line that was cut."""
    path = tmp_path / "metrics.jsonl"
    rows = ['{"step": 0, "score": 3}\n', '{"step": 1, "train_time": 2}\n']
    rows.append('{"step": 1, "score": 2}\n')
    for step, count in ((0, 1), (1, 2), (2, 3)):
        path.write_text("".join([*rows, '{"step": 3}\n', '{"step": 2, "tr']))
        T.remove_repeated(tmp_path, step)
        assert path.read_text() == "".join(rows[:count])


class NarrowFile(io.BytesIO):
    """A file that takes three bytes at a time, as a pipe or a full disk may."""

    def write(self, data):
        return super().write(data[:3])


def test_a_log_has_the_source_the_first_five_steps_and_the_last(tmp_path):
    """Unless LOG_SECONDS are over; metrics.jsonl has every step. A resumed run has the source, too."""
    log = T.Log(9)
    for _ in range(2):
        log.open(tmp_path, Path(T.__file__).read_bytes(), None)
    for step in range(1, 10):
        log.metrics(step, {"train_loss": step}, 1.0)
    log.file.file = NarrowFile()
    log("a line")
    assert log.file.file.getvalue() == b"a line\n"
    source = Path(T.__file__).read_text(encoding="utf-8") + "\n" + "=" * 120 + "\n"
    text = (tmp_path / "log.txt").read_text(encoding="utf-8")
    assert text.startswith(source) and text.count(source) == 1
    assert re.findall(r"^step:(\d)", text, re.M) == list("123459")
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 9
    T.ERROR_LOGS.clear()


def test_other_lines_keep_no_step_out_of_a_slow_log(tmp_path, monkeypatch):
    """Steps of 6 s, with a line of another kind behind each: every second step is written."""
    now = 0.0
    monkeypatch.setattr(T.time, "monotonic", lambda: now)
    log = T.Log(0)
    log.open(tmp_path, b"", None)
    for step in range(1, 12):
        log.metrics(step, {"reward": 0.5}, 1.0)
        log("sampling: 1 of 8 answers")
        now += 6
    text = (tmp_path / "log.txt").read_text()
    assert re.findall(r"^step:(\d+)", text, re.M) == "1 2 3 4 5 7 9 11".split()
    T.ERROR_LOGS.clear()


@pytest.mark.parametrize(
    "nats, bits, is_lost", [(0.04, 6, False), (0.06, 6, True), (0.06, 8, True), (math.nan, 6, True)]
)
def test_a_packing_that_lost_much_is_an_event(tmp_path, nats, bits, is_lost):
    """The warning names more bits only where there are more."""
    lines, found = [], []
    settings = SimpleNamespace(matrix_bits=bits)
    run = SimpleNamespace(
        folder=tmp_path, log=lambda *text: lines.append(text[0]), settings=settings
    )
    run.event = lambda name, **facts: found.append((name, facts["nats"]))
    G.report_packing(run, nats)
    assert found == ([("packing_lost", nats)] if is_lost else [])
    assert ("a higher MATRIX_BITS" in lines[-1]) == (is_lost and bits < 8)


def test_a_text_learned_by_heart_is_an_event():
    """Only a validation loss of more than a nat above the training loss is."""
    lines, found = [], []
    run = SimpleNamespace(log=lambda *text: lines.append(text[0]))
    run.event = lambda name, **losses: found.append((name, losses))
    for train_loss, val_loss in ((1.05, 4.23), (2.96, 3.01), (2.0, 3.0), (math.nan, 3.0)):
        T.report_overfit(run, train_loss, val_loss)
    (line,) = lines
    assert "1.05" in line and "4.23" in line and "TOKEN_NOISE" in line
    assert found == [("learned_by_heart", {"train_loss": 1.05, "val_loss": 4.23})]


def test_a_score_that_is_not_finite_is_a_fault():
    """Of a mean with an interval the mean counts: one row has no interval."""
    plan = SimpleNamespace(planned={}, phases={})
    run = SimpleNamespace(plan=plan, settings=T.Settings(artifact_bytes_max=0))
    nan = math.nan
    good = {"val_loss": 1.0, "before": {"loss": [2.0, nan, nan], "n": 1}, "after": {"loss": 3.0}}
    assert T.result_errors(run, good) == []
    bad = {"val_bpb": nan, "after": {"loss": [math.inf, 0.0, 1.0], "greedy": 0.5}}
    bad |= {"val_bpb_ttt": math.inf, "val_bpb_sliding": 1.0}
    names = ["val_bpb", "val_bpb_ttt", "after loss"]
    assert T.result_errors(run, bad) == [f"the score {name} is not finite" for name in names]


def test_a_number_that_is_not_finite_is_null_in_json():
    """In the file; the result keeps it, for result_errors."""
    written = {}
    run = SimpleNamespace(events=[{"nats": math.nan}], settings=T.Settings())
    run.write_file = written.__setitem__
    after = {"loss": [1.5, math.nan, math.inf], "n": 1}
    result = T.write_record(run, "x", {"after": after, "val_loss": -math.inf})
    assert result["after"] is after and result["val_loss"] == -math.inf
    found = json.loads(written["x"], parse_constant=lambda name: pytest.fail(name))
    assert found["after"] == {"loss": [1.5, None, None], "n": 1}
    assert found["val_loss"] is None and found["events"] == [{"nats": None}]


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
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as stream, contextlib.redirect_stdout(stream):
        assert T.exit_code(lambda: print("x" * 100_000, flush=True)) == 141
        assert T.exit_code(lambda: print("lost")) is None  # it leads nowhere now
    assert capfd.readouterr().err == ""
    for main in (lambda: print("x" * 100_000), lambda: print("kept until the end")):
        with open("/dev/full", "w") as stream, contextlib.redirect_stdout(stream):
            assert T.exit_code(main) == 1
        assert capfd.readouterr().err.startswith("error: [Errno 28]")


def test_the_exit_code_of_each_fault(capsys):
    def main(error):
        raise error

    for error, code in (
        (T.UserError("much\nmore"), 2),
        (FloatingPointError("much"), 1),
        (OSError("much"), 1),
    ):
        assert T.exit_code(functools.partial(main, error)) == code
        assert capsys.readouterr().err == "error: much\n"
    assert T.exit_code(functools.partial(main, OSError())) == 1
    assert capsys.readouterr().err == "error: OSError\n"
    for no_memory, words in (
        (functools.partial(main, torch.OutOfMemoryError("much")), "much"),
        (lambda: torch.empty(1 << 50), r".*can't allocate memory.*"),
        (lambda: np.empty(1 << 50), "Unable to allocate .*"),
    ):
        assert T.exit_code(no_memory) == 1
        line = f"error: {words}; in training, a smaller MICRO_BATCH_TOKENS or .*\n"
        assert re.fullmatch(line, capsys.readouterr().err)
    assert T.exit_code(functools.partial(main, KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == "stopped by SIGINT: nothing was saved\n"
    assert T.exit_code(lambda: 143) == 143
    assert T.exit_code(lambda: 1 / 0) == 1  # a bug
    assert re.match(r"(?s)Traceback .*\nZeroDivisionError: .*\n$", capsys.readouterr().err)


ENDS = {
    "a closed pipe": "r, w = os.pipe()\nos.close(r)\nos.dup2(w, 1)\n",
    "a full disk": "os.dup2(os.open('/dev/full', os.O_WRONLY), 1)\n",
    "closed": "os.closerange(0, 3)\nsys.stdin = sys.stdout = sys.stderr = None\n",
}


@pytest.mark.parametrize("how", ENDS)
def test_output_that_ends_does_not_end_the_run_or_its_log(place, how):
    place.run(how, ENDS[how], **FEW)
    assert len(losses_of(place, how)) == 4 and events(place, how) == []
    log = place.log(how)
    assert log.endswith("events: []\n")
    assert log.count("note: the output has ended") == (how != "closed")


def test_a_bug_that_ends_a_run_stands_in_its_log(place):
    child = place.begin("bug", "at_step(T, 3, {}.pop, 'bug')", **FEW)
    assert child.wait() == 1 and "KeyError: 'bug'" in child.err
    assert place.log("bug").endswith(child.err)


# ------------------------------------------------------------------------------------------ signals
def test_a_signal_ends_the_step_saves_and_leaves(place, straight):
    """One step before the end, twice: torchrun repeats a terminal's Ctrl-C at once."""
    child = place.run("signal", "at_step(T, 14, send, 'SIGINT')\n" * 2, 130)
    folder = place.of("signal")
    assert re.fullmatch("SIGINT: the run stops after this step; .*\n", child.err)
    assert newest(folder) == (folder / "step_000015", [])
    log = place.log("signal")
    assert log.count("stopped by") == 1
    said = f"stopped by SIGINT after step 15: RESUME={folder} continues from step_000015\n"
    assert log.endswith(said)
    assert not (folder / "result.json").exists()
    place.resume("signal")
    resumed = {"event": "resume", "step": 15, "ranks": 1, "changed": {}}
    assert place.result("signal")["events"] == [resumed]
    assert steps_logged(place, "signal") == list(range(1, 17))
    assert_same(place, "signal", straight)


def test_a_terminal_that_is_closed_saves_and_nohup_goes_on(place):
    default = "signal.signal(signal.SIGHUP, signal.{})\nstop(T, 2, 'SIGHUP')\n"
    place.run("hangup", default.format("SIG_DFL"), 129)
    assert len(losses_of(place, "hangup")) == 3 and steps_kept(place.of("hangup")) == [0, 3]
    place.run("nohup", default.format("SIG_IGN"), **FEW)
    assert place.result("nohup")["ended"] == "iterations"


@pytest.mark.parametrize(("step", "count", "kept"), [(8, 5, [8, 9]), (16, 9, [12, 16])])
def test_a_signal_during_a_save_lets_it_end(place, straight, step, count, kept):
    """The last save, too, and then the run ends before it packs. Each save opens a file and renames it."""
    out = f"in save {step}"
    place.run(out, f"at_file('unfinished/model.pt', {count}, send, 'SIGTERM')", 143)
    folder = place.of(out)
    assert steps_kept(folder) == kept and not (folder / "model.upar").exists()
    flip(folder / f"step_{kept[-1]:06d}" / "training.pt")  # the newest one is damaged
    place.resume(out)
    assert f"step_{kept[-1]:06d} is damaged" in place.log(out)
    assert events(place, out, "step") == kept[:1]
    assert_same(place, out, straight)


def test_a_signal_whose_save_fails_says_so(place):
    """The disk is full when step 6 ends; RESUME begins at the checkpoint of step 4."""
    child = place.run("unsaved", "at_step(T, 5, limit, 20000)\n" + stop_at(5), 143)
    assert re.search(
        r"save_failed step:6 .*\n.*after step 6: RESUME=.* from step_000004\n$", child.out
    )
    assert steps_kept(place.of("unsaved"))[-1] == 4


def test_a_second_interrupt_ends_at_once(place):
    """More than a second after the first signal."""
    twice = "at_step(T, 5, send, 'SIGINT', 600)\nat_step(T, 5, send, 'SIGTERM', 1.4)\n"
    child = place.run("at once", twice, 130)
    folder = place.of("at once")
    said = f"stopped by SIGINT: RESUME={folder} continues from step_000004"
    assert child.err.splitlines()[1:] == [said] and steps_kept(folder)[-1] == 4


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_in_set_up_or_in_the_final_evaluation_ends_at_once(place, straight, name):
    """A line says what the folder has, and what RESUME of it does."""
    code = 128 + getattr(signal, name)
    set_up = f"set-up {name}"
    child = place.run(set_up, f"at_file('log.txt', 2, send, '{name}', 600)", code)
    folder = place.of(set_up)
    said = f"stopped by {name}: nothing was saved; {folder} may be deleted\n"
    assert child.err == said and steps_kept(folder) == []
    line = place.refused(set_up, **place.resumed)
    assert f"; {folder} ended before its first checkpoint" in line and "damaged" not in line
    packing = f"packing {name}"
    child = place.run(packing, f"at_file('model.upar$', 1, send, '{name}', 600)", code)
    said = f"stopped by {name}: RESUME={place.of(packing)} continues from step_000016\n"
    assert child.err == said and place.log(packing).endswith(said)
    # No step is left; the last loss, with which the validation is compared, is still that of step 16.
    place.resume(
        packing, "before(T, 'report_overfit', lambda run, *losses: run.log(str(losses)))\n"
    )
    assert events(place, packing, "step") == [16]
    assert_same(place, packing, straight)
    before = place.result(packing)["before_quantization"]["val_loss"]
    assert f"\n{(losses_of(place, straight)[-1], before)}\n" in place.log(packing)


# ------------------------------------------------------------------------------------- RESUME rules
def test_resume_refuses_what_is_no_unfinished_run(place, straight, stopped, tmp_path):
    run = place.of(stopped)
    (tmp_path / "bare").mkdir()
    for wrong in ("none", "log.txt", "step_000004", tmp_path / "bare", place.of(straight)):
        message = f"^RESUME='{run / wrong}': "
        refusal(T.UserError, message, T.stored_settings, {"RESUME": str(run / wrong)})
    given = {"RESUME": str(run), "RUN_ID": "other"}
    refusal(T.UserError, "^RUN_ID='other'", T.stored_settings, given)

    def files():
        return {path: path.read_bytes() for path in run.rglob("*.*") if path.is_file()}

    before = files()
    for name, value in (("MODEL_DIM", 64), ("SEED", 5)):
        child = place.resume(stopped, code=2, **{name: value})
        assert re.fullmatch(f"error: {name}={value}: .*\n", child.err)
    line = place.resume(stopped, code=2, LAYER_PATTERN="g s").err
    assert line.startswith("error: LAYER_PATTERN (NUM_LAYERS words)='g s': must stay 'g s1 s1'")
    assert files() == before and "log.txt" in {path.name for path in before}
    assert len(losses_of(place, stopped)) == 6


def test_resume_takes_the_stored_settings_and_lists_those_changed(place, straight, stopped):
    """By path, from another folder of runs; the checkpoint that it starts from is not written
    again.
    """
    folder = copied(place, stopped, "changed")
    meta = read_json(folder / "step_000006" / "meta.json")
    digest = T.sha256_file(T.__file__)
    assert meta["code_sha256"] == digest
    write_json(folder / "step_000006" / "meta.json", {**meta, "code_sha256": "of another script"})
    repair(folder / "step_000006")
    changed = {"matrix_lr": 0.01, "save_every": 3}
    given = {**place.unset, "RUN_ID": None, "OUT_DIR": None, "RESUME": folder}
    place.run("elsewhere", **{**given, "MATRIX_LR": 0.01, "SAVE_EVERY": 3})
    assert events(place, "changed", "changed") == [{**changed, "code_sha256": digest}]
    paths = {"resume": str(folder), "out_dir": str(folder.parent)}  # where it is, not where it was
    expected = {**place.result(straight)["settings"], **changed, **paths}
    assert place.result("changed")["settings"] == expected
    assert place.artifact("changed") != place.artifact(straight)
    assert steps_logged(place, "changed", " saved") == [0, 4, 6, 9, 12, 15, 16]


def test_a_longer_plan_stands_still_until_it_is_as_far_and_says_so(place, stopped):
    """6 of 16 steps are 38%, and of 64 steps 9%; of 17 steps they are hardly less."""
    for steps, said in ((64, 1), (17, 0)):
        copied(place, stopped, f"longer{steps}")
        place.resume(f"longer{steps}", stop_at(7), 143, ITERATIONS=steps)
        note = "note: the run was at 38% of its plan, and is at 11% of the one that is given now"
        assert place.log(f"longer{steps}").count(note) == said
    progress = [row["progress"] for row in metrics_of(place, "longer64") if "progress" in row]
    assert progress[5:] == [6 / 16] * len(progress[5:]) and len(progress) == 8


def test_a_result_is_of_the_script_that_ran(place, tmp_path):
    """Also if the file is changed, or deleted, while the run trains."""
    script = tmp_path / "mine.py"
    script.write_bytes(Path(T.__file__).read_bytes())
    size = script.stat().st_size
    digest = T.sha256_file(script)
    settings = dict(iterations=1, run_id="x", out_dir=str(tmp_path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(T, "__file__", str(script))
        run = T.Run(
            T.Settings(**settings), T.Runtime(0, 1, torch.device("cpu"), False), None, None, {}, {}
        )
        assert run.open() is None
        script.unlink()
        run.plan = SimpleNamespace(phases={}, planned={})
        run.clock = SimpleNamespace(elapsed=lambda: 0.0, limit=1.0)
        assert T.write_result(run, {}, b"12") == 0
    result = read_json(run.folder / "result.json")
    assert result["code_sha256"] == digest and result["code_bytes"] == size
    assert (run.folder / "log.txt").read_bytes()[:size] == Path(T.__file__).read_bytes()
    T.ERROR_LOGS.clear()


def test_of_two_jobs_that_begin_a_run_at_once_one_ends(tmp_path, monkeypatch):
    """The other one makes its log after this one has seen an empty folder."""
    log = tmp_path / "x" / "log.txt"
    settings = T.Settings(iterations=1, run_id="x", out_dir=str(tmp_path))
    run = T.Run(settings, T.Runtime(0, 1, torch.device("cpu"), False), None, None, {}, {})
    monkeypatch.setattr(T, "make_tracker", lambda *_: log.write_text("of the other"))
    with pytest.raises(FileExistsError):
        run.open()
    assert log.read_text() == "of the other"


def test_a_run_of_another_version_needs_its_script(tmp_path):
    path = tmp_path / "meta.json"
    settings = dict.fromkeys(T.Settings.__dataclass_fields__, 0)
    write_json(path, {"settings": settings})
    assert T.read_record("RESUME", path)["settings"] == settings
    write_json(path, {"settings": {**settings, "holdout_tokens": 131072}})
    said = "RESUME: .* HOLDOUT_TOKENS.* log.txt"
    refusal(T.UserError, said, T.read_record, "RESUME", path)


def test_the_clock_goes_on_from_where_it_stood(place):
    """2.8 s of a clock of 3, and 2 to choose, are gone when the run is stopped; the rest is
    trained.
    """
    clock = {"ITERATIONS": 0, "MAX_WALLCLOCK_SECONDS": 5, "RESERVE_SECONDS": 2}
    place.run("clock", "ticks(T)\nat_step(T, 12, pass_time, 2)\n" + stop_at(15), 143, **clock)
    place.resume("clock", "ticks(T)\n")
    rows = [row for row in metrics_of(place, "clock") if "train_time" in row]
    seconds = [row["train_time"] / 1000 for row in rows]
    steps = [0.02 + 0.06 * (0.618 * step % 1) for step in range(1, 17)]
    assert seconds[15] == pytest.approx(2 + sum(steps)) and seconds[11] < 1 < seconds[12]
    result = place.result("clock")
    assert 2.9 < result["train_seconds"] < 3.1 and 18 <= len(seconds) <= 24
    progress = read_json(place.of("clock") / "progress.json")["progress"]
    assert progress == sorted(progress) and len(progress) == result["steps"] == len(seconds)
    assert progress[11] < 1 / 2 < 2 / 3 < progress[14]
    assert progress[-1] == pytest.approx(1, abs=0.05)


# ------------------------------------------------------------------------------- replay and crashes
@pytest.fixture(scope="session")
def source(place):
    """Return a run against the clock, to be repeated; it validates and saves on its way."""
    clock = dict(ITERATIONS=0, MAX_WALLCLOCK_SECONDS=2, RESERVE_SECONDS=1, SAVE_EVERY=15)
    place.run("source", "ticks(T)\n", VAL_LOSS_EVERY=9, **clock)
    assert place.result("source")["steps"] > 15
    return "source"


def replay_of(place, source, **changes):
    return {**place.unset, "REPLAY": place.of(source), **changes}


def test_replays_of_a_wallclock_run_are_the_same_to_the_byte(place, source):
    replay = replay_of(place, source, SAVE_EVERY=0, VAL_LOSS_EVERY=0)
    place.run("again", "T.WARMUP_STEPS = 1\n", **replay)
    assert_same(place, "again", source)
    assert events(place, "again") == [] and len(place.result(source)["phases"]) == 5
    assert [place.result(out)["ended"] for out in (source, "again")] == ["clock", "replay"]
    assert len(steps_kept(place.of("again"))) == 1  # the end, whatever SAVE_EVERY says


def test_a_replay_has_a_name_of_its_own_and_an_unchanged_source(tmp_path):
    settings = {**vars(T.Settings()), "run_id": "source", "resume": "runs/source", "seed": 3}
    stored = {"progress": [0.5, 1.0], "events": [], "settings": settings}
    given = {"REPLAY": str(tmp_path)}
    refusal(T.UserError, "^REPLAY=", T.stored_settings, given)  # it has not ended
    own = {"run_id": "", "resume": "", "out_dir": "runs"}
    for changed in ({}, {"matrix_lr": 0.1}):
        stored["events"] = [{"event": "resume", "changed": changed}]
        write_json(tmp_path / "progress.json", stored)
        if not changed:
            assert T.stored_settings(given) == {**settings, **own}
            for name, value in (("ITERATIONS", 0), ("MAX_WALLCLOCK_SECONDS", 600.0)):
                assert T.stored_settings({**given, name: value}) == {**settings, **own}
                refusal(T.UserError, f"^{name}=7: ", T.stored_settings, {**given, name: 7})
    refusal(T.UserError, "^REPLAY=.*'matrix_lr': 0.1", T.stored_settings, given)


# Files of a run by what it does with them: it begins, it saves, it ends.
MOMENTS = {"begin": ["log.txt", "metrics.jsonl"], "save": ["unfinished", "step_0"]}
MOMENTS["end"] = ["progress.json", "model.upar", "final", "result.json"]


def crash(place, out, source, moments, seed):
    """Replay `source` under kill -9, once for each of `moments`, and to its end."""
    rng = random.Random(seed)
    begin = replay_of(place, source, SAVE_EVERY=2, VAL_LOSS_EVERY=3)
    for moment in moments:
        pattern = rng.choice(MOMENTS[moment])
        count = rng.randint(1, 12 if moment == "save" else 1)
        given = {**place.unset, "RESUME": "run"}
        if newest(place.of(out))[0] is None:  # killed before its first checkpoint
            shutil.rmtree(place.folder / out, ignore_errors=True)
            given = begin
        child = place.begin(out, f"at_file({pattern!r}, {count}, send, 'SIGKILL')", **given)
        assert child.wait() == -signal.SIGKILL, (pattern, count, child.err)
    place.resume(out)
    assert_same(place, out, source)
    scored = [row["step"] for row in metrics_of(place, out) if "val_loss" in row]
    assert scored == sorted(set(scored))


def test_kills_change_nothing(place, source):
    crash(place, "crashed", source, "begin save save end".split(), seed=1)


@pytest.mark.full
def test_fifty_kills_change_nothing(place):
    clock = dict(ITERATIONS=0, MAX_WALLCLOCK_SECONDS=9, RESERVE_SECONDS=1, SAVE_EVERY=40)
    place.run("long", "ticks(T)\n", **clock)
    moments = ["begin"] * 10 + ["save"] * 34
    random.Random(2).shuffle(moments)
    crash(place, "long crashed", "long", [*moments, *["end"] * 6], seed=3)


def test_a_damaged_newer_checkpoint_does_not_count_as_kept(place, stopped):
    folder = copied(place, stopped, "pruned")
    (folder / "step_000006" / "model.pt").write_bytes(b"")
    place.resume("pruned", stop_at(4), 143, SAVE_EVERY=9)
    assert steps_kept(folder) == [4, 5]


# --------------------------------------------------------------------------------- numbers of ranks
def test_one_rank_two_ranks_one_rank(place, straight, stopped):
    """The second part on two ranks, of which one gets a signal; then one process goes on.

    Losses are those of the straight run, but for sums in another order (see test_smoke.py).
    """
    copied(place, stopped, "ranks")
    patch = "if os.environ['RANK'] == '1': stop(T, 9)\n"
    place.ranks("ranks", patch, code=143, **{**place.unset, "RESUME": "run"})
    step = int(re.findall(r"stopped by SIGTERM after step (\d+)", place.log("ranks"))[-1])
    assert 10 <= step <= 12 and steps_kept(place.of("ranks"))[-1] == step
    place.resume("ranks")
    assert events(place, "ranks", "step") == [6, step]
    assert events(place, "ranks", "ranks") == [2, 1]
    found, expected = losses_of(place, "ranks"), losses_of(place, straight)
    assert found[:13] == pytest.approx(expected[:13], abs=2e-4)  # not yet quantized
    assert found == pytest.approx(expected, rel=3e-4)
    nats = place.result(straight)["val_nats"]
    assert place.result("ranks")["val_nats"] == pytest.approx(nats, rel=3e-4)


def test_a_rank_killed_inside_a_collective_ends_the_other(place):
    """Rank 0 comes two seconds late to the reduction of step 7; rank 1 dies in it a second before."""
    patch = (
        "if os.environ['RANK'] == '0': at_step(T, 6, time.sleep, 2)\n"
        "else: at_step(T, 6, signal.alarm, 1)\n"
    )
    children = [place.begin("killed", patch, **environ) for environ in rank_environments(2)]
    assert children[1].wait() == -signal.SIGALRM and children[0].wait() == 1
    assert re.search("^error: rank 0 lost another rank", children[0].err, re.M), children[0].err
    folder = place.of("killed")
    assert newest(folder) == (folder / "step_000004", []) and not (folder / "result.json").exists()
    assert len(losses_of(place, "killed")) == 5  # 6 is logged in step 7


# ---------------------------------------------------------------------------------- bad steps, hangs
@pytest.mark.parametrize(("what", "ranks"), [("loss", 1), ("gradient", 2)])
def test_bad_steps_are_skipped_and_counted(place, what, ranks):
    """On rank 0, or on rank 1 alone: steps 7 and 16 leave no trace but in the events."""
    patch = f"if os.environ.get('RANK') != '0': spoil(T, [6, 15], {what!r})\n"
    out = f"bad {what}"
    if ranks == 1:
        assert place.run(out, patch, SAVE_EVERY=1, QAT=0).err == ""
    else:
        place.ranks(out, patch, SAVE_EVERY=1, QAT=0)
    assert events(place, out) == ["skipped_step"] * 2 and events(place, out, "step") == [7, 16]
    assert [value == "nan" for value in events(place, out, "loss")] == [what == "loss"] * 2
    result = place.result(out)
    assert (result["steps"], result["skipped_steps"]) == (16, 2)
    before, after = (place.checkpoint(out, step) for step in (15, 16))
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_ten_bad_steps_in_a_row_end_the_run(place):
    child = place.run("diverged", "spoil(T, range(3, 99), 'loss')", 1)
    folder = place.of("diverged")
    assert re.fullmatch(f"error: 10 steps .* {folder} is good\n", child.err)
    assert place.log("diverged").count("event: skipped_step ") == 10
    assert losses_of(place, "diverged")[3:] == [None] * 9
    assert not (folder / "result.json").exists()
    place.run("nine", "spoil(T, [*range(3, 12), 13, 14], 'gradient')")
    assert place.result("nine")["skipped_steps"] == 11


def test_a_bad_start_is_not_called_good(place):
    """Weights of NaN at the first step, in a later one, and a loss that was never finite."""
    for steps, what, said in (
        ([0], "weights", "embed .*first step on: INIT_FROM=''"),
        ([2], "weights", "embed are not finite$"),
        (range(99), "loss", "first step on: INIT_FROM=''"),
    ):
        out = f"bad {what} {steps}"
        line = place.run(out, f"spoil(T, {steps}, {what!r})", 1).err
        assert re.match(f"error: .*{said}", line.strip()) and "good" not in line


def test_a_hang_prints_the_stacks_and_the_run_goes_on(place):
    patch = "T.HANG_SECONDS = 1.0\nat_step(T, 3, time.sleep, 4.0)\n"
    child = place.run("hang", patch, **FEW)
    assert re.match(r"Timeout \(0:00:", child.err) and " in main\n" in child.err


def test_a_clock_that_ends_a_run_before_its_steps_says_so(place):
    """On a slow machine: a step takes 8.5 s of a clock of 150 s."""
    clock = dict(ITERATIONS=60, MAX_WALLCLOCK_SECONDS=150, RESERVE_SECONDS=5)
    child = place.run("slow", "ticks(T, 8.5)\n", **clock)
    (event,) = place.result("slow")["events"]
    rates = [row["lr_mul"] for row in metrics_of(place, "slow") if "lr_mul" in row]
    assert 16 <= len(rates) <= 17 and min(rates) > 0.05 and rates[0] == rates[1] == 1
    assert event == {"event": "ended_by_clock", "step": len(rates), "iterations": 60}
    assert "MAX_WALLCLOCK_SECONDS=150" in child.err and child.err in place.log("slow")


# --------------------------------------------------------------------------------------- full disks
def test_a_save_that_fails_is_an_event(place, straight):
    """A limit between the sizes of the log and of a checkpoint, while two saves fall due."""
    size = (place.of(straight) / "log.txt").stat().st_size + 20000
    assert size < (place.of(straight) / "step_000016" / "model.pt").stat().st_size
    place.run("full", f"at_step(T, 6, limit, {size})\nat_step(T, 13, limit, -1)\n")
    assert events(place, "full") == ["save_failed"] * 2
    assert events(place, "full", "step") == [8, 12]
    assert all("File too large" in error for error in events(place, "full", "error"))
    assert steps_kept(place.of("full")) == [4, 16]
    assert_same(place, "full", straight)


def test_a_disk_that_is_full_at_the_end_loses_nothing(place, straight):
    child = place.run("end", "at_step(T, 13, limit, 20000)\n", 1)
    assert re.search(r"^error: \[Errno 27\]", child.err, re.M)
    assert not (place.of("end") / "model.upar").exists()
    place.resume("end")
    assert_same(place, "end", straight)


def test_a_disk_that_is_full_at_the_start_is_one_line(place):
    child = place.run("start", "limit(190000)\n", 1)
    assert re.fullmatch(r"error: \[Errno 27\].*\n", child.err), child.err
    assert "step:1/" not in child.out and steps_kept(place.of("start")) == []


def test_a_line_that_a_full_disk_cuts_leaves_nothing(tmp_path, capsys):
    """There is room for a line and a half, and then for all."""
    path = tmp_path / "log"
    file = T.LineFile(path)
    for size, text in ((9, "first"), (9, "second"), (-1, "third")):
        limit(size)
        file.write(text)
    assert path.read_text() == "first\nthird\n"
    assert capsys.readouterr().err == "log: [Errno 27] File too large\n"


@pytest.mark.parametrize("method", ["seek", "truncate"])
def test_a_fault_of_a_disk_is_a_warning(tmp_path, capsys, method):
    """Whatever call it comes from; the next line opens the file anew, which may have been lost."""

    def fail(*arguments):
        raise OSError(5, "Input/output error")

    log = T.LineFile(tmp_path / "log")
    log.write("first")
    file = log.file
    log.file = SimpleNamespace(seek=file.seek, write=fail, truncate=file.truncate)
    setattr(log.file, method, fail)
    log.write("second")
    log.write("third")
    assert log.path.read_text() == "first\nthird\n"
    assert capsys.readouterr().err == "log: [Errno 5] Input/output error\n"


def test_a_log_that_cannot_be_written_does_not_end_the_run(place):
    patch = "at_step(T, 6, limit, 20000)\nat_step(T, 13, limit, -1)\n"
    child = place.run("no log", patch, SAVE_EVERY=0)
    steps = list(range(1, 17))  # step 6 is logged in the middle of step 7
    assert child.err.count("log.txt: [Errno 27] File too large\n") >= 7
    assert steps_logged(place, "no log") == steps[:5] + steps[12:]
    logged = re.findall(r"^step:(\d+)/\S+ train_loss", child.out, re.M)
    assert logged == [str(step) for step in steps]


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
    words = ["--standalone", "--nproc_per_node=2", ROOT / "train_gpt.py"]
    process = torchrun(place, "term", *words, ITERATIONS=30000, SAVE_EVERY=0)
    metrics = place.of("term") / "metrics.jsonl"
    end = time.monotonic() + 300
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") > 8):
        assert time.monotonic() < end
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    said = ended(process, 300)
    assert process.returncode != 0
    assert "continues from" not in said and "rank 0 lost" not in said
    (step,) = re.findall(r"^stopped by SIGTERM after step (\d+)", place.log("term"), re.M)
    assert steps_logged(place, "term", " saved") == steps_kept(place.of("term")) == [int(step)]


@pytest.mark.full
def test_two_nodes_meet_by_the_command_of_the_guide(place, straight):
    """Both on this machine, a rank each."""
    port = rank_environments(1)[0]["MASTER_PORT"]
    text = "".join(blocks("runs.md", "bash"))
    command = re.search("^RUN_ID=big torchrun (.*) train_gpt.py$", text, re.M)[1]
    command = command.replace("HOST:29400", f"127.0.0.1:{port}").replace("node=8", "node=1")
    words = [*command.split(), ROOT / "train_gpt.py"]
    nodes = [torchrun(place, "nodes", *words) for _ in range(2)]
    said = [ended(node, 300) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    result = place.result("nodes")
    assert (result["world_size"], result["steps"]) == (2, 16)
    assert result["val_nats"] == pytest.approx(place.result(straight)["val_nats"], rel=1e-4)


@pytest.mark.full
def test_the_guides_commands_on_one_process(place):
    """Those of docs/runs.md, in its order; the first is stopped in its seventh step."""
    lines = "".join(blocks("runs.md", "bash")).replace("\\\n", " ").splitlines()
    commands = [line.split("#")[0].split() for line in lines]
    single = [words[:-2] for words in commands if words[-2] == "python"]
    given = [dict(word.split("=", 1) for word in words) for words in single]
    names = [["RUN_ID", "CONFIG"], ["RESUME"], ["REPLAY"], ["RUN_ID", "INIT_FROM", "CONFIG"]]
    assert [[*one] for one in given] == names
    short = dict(ITERATIONS=12, COMPILE=0, TRAIN_BATCH_TOKENS=1024, BIGRAM_VOCAB_SIZE=256)
    for settings, patch in zip(given, (stop_at(6), "", "", ""), strict=True):
        changes = {**place.unset, "RUN_ID": None, **settings}
        if "CONFIG" in changes:
            changes |= {"CONFIG": ROOT / changes["CONFIG"], "DATA_PATH": place.data, **short}
        if "INIT_FROM" in changes:
            changes["INIT_FROM"] = place.folder / "guide" / "base"
        place.run("guide", patch, 143 if patch else 0, **changes)
    [again] = place.folder.glob("guide/run_*/model.upar")
    assert again.read_bytes() == (place.folder / "guide" / "base" / "model.upar").read_bytes()


# ----------------------------------------------------------------------------- seeded mutations
def repair(folder):
    """Write a SHA256SUMS that matches what a checkpoint has now, as who forges it would."""
    sums = folder / "SHA256SUMS"
    sums.unlink(missing_ok=True)
    lines = []
    for path in sorted(folder.iterdir()):
        lines.append(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n")
    sums.write_text("".join(lines))


def test_changed_settings_are_one_line_or_taken(place, stopped, tmp_path):
    """meta.json of a checkpoint and progress.json, whose sums are right: no setting is lost."""
    own = {"run_id": "", "resume": "", "replay": "", "out_dir": ""}
    for seed in range(24):
        folder = Path(shutil.copytree(place.of(stopped), tmp_path / str(seed)))
        name, path = "RESUME", folder / "step_000006" / "meta.json"
        record = read_json(path)
        if seed % 2:
            name, path = "REPLAY", folder / "progress.json"
            record |= {"progress": [0.2, 0.5, 1.0], "events": [{"event": "x"}]}
        record = mutated(record, random.Random(seed))
        write_json(path, record)
        repair(folder / "step_000006")
        try:
            settings = T.load_settings(T.Settings, {name: str(folder)}, stored=T.stored_settings)
        except T.UserError as error:
            assert "\n" not in str(error)
        else:  # a value of the right type that differs, or one that a resumed run compares
            assert {**vars(settings), **own} == {**record["settings"], **own}
