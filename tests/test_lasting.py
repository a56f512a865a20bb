"""Nothing is lost: kills, signals, hangs, bad steps, damaged files, full disks, provoked; resumes and replays."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
import typing
from pathlib import Path

import pytest
import torch
from test_data import write_shard

import train_gpt as T

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "train_gpt.py"
GUIDE = ROOT / "docs" / "runs.md"
TINY = {
    "DEVICE": "cpu", "DTYPE": "float32", "COMPILE": "0",
    "LAYER_PATTERN": "g s1 g s1", "MODEL_DIM": "32", "NUM_HEADS": "2",
    "NUM_KV_HEADS": "1", "ATTN_WINDOW": "16", "TRAIN_SEQ_LEN": "32", "TRAIN_BATCH_TOKENS": "256",
    "HOLDOUT_TOKENS": "2048", "EVAL_STRIDE": "0", "ITERATIONS": "16", "MAX_WALLCLOCK_SECONDS": "0",
    "RESERVE_SECONDS": "0", "SAVE_EVERY": "4", "GPTQ_CALIBRATION_BATCHES": "2",
}
# Constants of the script, for all runs here: a line for each step, and no untimed steps.
CONSTANTS = "T.LOG_SECONDS = 0.0\nT.WARMUP_STEPS = 0\n"
UNSET = dict.fromkeys([*TINY, "RUN_ID", "DATA_PATH"])  # what a run takes from the one it resumes or repeats
KEPT = ("PATH", "HOME", "TMPDIR", "LANG", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV")

# Forks a process for each line of its input, {"env", "patch", "out", "err"}: T.main() behind the code of `patch`, which
# may change functions of T. To import torch anew takes ten times as long as a run. A line with "poll" asks for the exit
# code of a process, null while it runs. Whole processes of the script are started in the tests of torchrun.
SERVER = '''
import json, os, sys, traceback
sys.path.insert(0, sys.argv[1])
import numpy, torch
import torch._dynamo, torch.profiler
import train_gpt as T

for line in sys.stdin:
    order = json.loads(line)
    if "poll" in order:
        done, status = os.waitpid(order["poll"], os.WNOHANG)
        print(json.dumps(os.waitstatus_to_exitcode(status) if done else None), flush=True)
        continue
    child = os.fork()
    if child:
        print(child, flush=True)
        continue
    os.setsid()
    for number, path in ((1, order["out"]), (2, order["err"])):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(order["env"])
    sys.argv = ["train_gpt.py"]
    try:
        exec(order["patch"], {"T": T})
        code = T.exit_code(T.main)
    except BaseException:
        traceback.print_exc()
        code = 99
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
'''


def environment(**changes: object) -> dict[str, str]:
    """Of a run: TINY and `changes`; None leaves a setting out."""
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    settings = {**TINY, **{name: str(value) for name, value in changes.items()}}
    return {**kept, "OMP_NUM_THREADS": "1", **{name: text for name, text in settings.items() if text != "None"}}


def at(step: int, code: str) -> str:
    """A patch that runs `code` at the begin of data step `step`, counted from 0; it may use T and rank."""
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


# A patch: training seconds by the steps that were begun, 20 to 80 ms each, whatever the machine does.
TICKS = """
class Tick:
    steps = seconds = 0
def ticking(inner):
    def forward_backward(*args):
        Tick.steps += 1
        Tick.seconds += 0.02 + 0.06 * (0.618 * Tick.steps % 1)
        return inner(*args)
    return forward_backward
T.forward_backward = ticking(T.forward_backward)
import time, types
T.time = types.SimpleNamespace(**{**vars(time), "perf_counter": lambda: Tick.seconds})
"""


def stop_at(step: int, name: str = "SIGTERM") -> str:
    """A patch that sends the process a signal in the middle of data step `step`."""
    return at(step, f"os.kill(os.getpid(), signal.{name}); time.sleep(0.3)")


class Child:
    """A run in a process of its own; `code` is its exit code once it has ended, -n where signal n ended it."""

    def __init__(self, server: subprocess.Popen, folder: Path, name: str, patch: str, environ: dict[str, str]):
        self.server, self.code, self.began = server, None, time.monotonic()
        self.paths = [folder / f"{name}.{kind}" for kind in ("out", "err")]
        order = {"env": environ, "patch": CONSTANTS + patch, "out": str(self.paths[0]), "err": str(self.paths[1])}
        self.pid = self.ask(order)

    def ask(self, order: dict):
        self.server.stdin.write(json.dumps(order) + "\n")
        self.server.stdin.flush()
        return json.loads(self.server.stdout.readline())

    def poll(self) -> int | None:
        if self.code is None:
            self.code = self.ask({"poll": self.pid})
        return self.code

    def wait(self, seconds: float = 120) -> int:
        end = time.monotonic() + seconds
        while self.poll() is None and time.monotonic() < end:
            time.sleep(0.01)
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)
            pytest.fail(f"still running after {seconds} s: {self.out[-500:]} {self.err[-500:]}")
        return self.code

    def send(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    @property
    def out(self) -> str:
        return self.paths[0].read_text(encoding="utf-8") if self.paths[0].exists() else ""

    @property
    def err(self) -> str:
        return self.paths[1].read_text(encoding="utf-8") if self.paths[1].exists() else ""


class Place:
    """A folder with `data` and the runs of the tests, each in <out>/run of it."""

    def __init__(self, folder: Path):
        self.folder, self.data, self.count = folder, folder / "data", 0
        words = [sys.executable, "-c", SERVER, str(ROOT)]
        self.server = subprocess.Popen(words, env=environment(), text=True, stdin=subprocess.PIPE,
                                       stdout=subprocess.PIPE)

    def environment(self, out: str, **changes: object) -> dict[str, str]:
        own = {"DATA_PATH": self.data, "OUT_DIR": self.folder / out, "RUN_ID": "run"}
        return environment(**{**own, **changes})

    def begin(self, out: str, patch: str = "", **changes: object) -> Child:
        """Start a run in the folder `out`."""
        self.count += 1
        return Child(self.server, self.folder, f"{out}_{self.count}", patch, self.environment(out, **changes))

    def run(self, out: str, patch: str = "", code: int = 0, **changes: object) -> Child:
        """A run from beginning to end, which must have this exit code."""
        child = self.begin(out, patch, **changes)
        assert child.wait() == code, child.out[-800:] + child.err[-2000:]
        assert "Traceback" not in child.err, child.err
        return child

    def ranks(self, out: str, patch: str = "", ranks: int = 2, **changes: object) -> list[Child]:
        """Start a run on gloo ranks."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        shared = {"WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        return [self.begin(out, patch, **{**shared, "RANK": rank, "LOCAL_RANK": rank, **changes})
                for rank in range(ranks)]

    def torchrun(self, out: str, patch: str = "", *options: str, **changes: object) -> subprocess.Popen:
        """Start whole processes: two ranks of torchrun."""
        driver = self.folder / f"{out}.py"
        driver.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nimport train_gpt as T\n{CONSTANTS}{patch}\n"
                          "sys.exit(T.exit_code(T.main))\n")
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", *options, driver]
        return subprocess.Popen(list(map(str, words)), env=self.environment(out, **changes), text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def resume(self, out: str, patch: str = "", code: int = 0, **changes: object) -> Child:
        """Go on with the run of `out`, with its settings."""
        return self.run(out, patch, code, **{**UNSET, "RESUME": "run", **changes})

    def of(self, out: str) -> Path:
        return self.folder / out / "run"

    def log(self, out: str) -> str:
        """Behind the script's source."""
        text = (self.of(out) / "log.txt").read_text(encoding="utf-8")
        return text.replace(SCRIPT.read_text(encoding="utf-8"), "")

    def result(self, out: str) -> dict:
        return json.loads((self.of(out) / "result.json").read_text())

    def artifact(self, out: str) -> bytes:
        return (self.of(out) / "model.upar").read_bytes()

    def same(self, out: str, other: str) -> None:
        """Asserts that two runs ended in the same model, to the byte, and had the same averages and phases."""
        assert self.artifact(out) == self.artifact(other)
        for key in ("val_nats", "steps", "weights", "phases"):
            assert self.result(out)[key] == self.result(other)[key], key
        averages = [re.findall(r"^weights: .*", self.log(each), re.M)[-4:] for each in (out, other)]
        assert averages[0] == averages[1] and len(averages[0]) == 4


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder, rng = tmp_path_factory.mktemp("lasting"), random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 8))) for _ in range(120)]
    lines = [" ".join(rng.choices(words, k=rng.randint(4, 12))) for _ in range(2500)]
    documents = ["\n".join(lines[at : at + 10]) for at in range(0, len(lines), 10)]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    command = [sys.executable, ROOT / "data" / "prepare.py", folder / "text.jsonl", "--out", folder / "data",
               "--vocab-size", "400", "--workers", "1"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    made = Place(folder)
    yield made
    made.server.stdin.close()
    made.server.wait(10)


@pytest.fixture(scope="session")
def straight(place: Place) -> str:
    """The run without faults that others are compared with: 16 steps, a checkpoint each 4."""
    place.run("straight")
    return "straight"


@pytest.fixture(scope="session")
def stopped(place: Place) -> str:
    """The same run, ended by SIGTERM in its sixth step."""
    place.run("stopped", stop_at(5), 128 + signal.SIGTERM)
    return "stopped"


def copied(place: Place, out: str, name: str) -> Path:
    """The folder of a copy of a run, as <name>/run."""
    return Path(shutil.copytree(place.of(out), place.of(name)))


def newest(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint of a run, and a line on each newer one."""
    return T.newest_checkpoint(T.list_checkpoints(folder))


def steps_kept(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("step_*"))


# --------------------------------------------------------------------------------------------------------- checkpoints
def save(folder: Path, step: int) -> Path:
    parts = {"model": {"w": torch.arange(5.0) + step}, "training": {"clock": {"before": 0.1 * step}, "plan": {}}}
    T.save_checkpoint(folder, step, parts, {"step": step, "settings": {"seed": step}})
    return folder / f"step_{step:06d}"


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Two checkpoints of the run tmp_path/run, the older one first."""
    (tmp_path / "run").mkdir()
    return save(tmp_path / "run", 4), save(tmp_path / "run", 8)


def test_a_checkpoint_has_its_files_and_their_hashes(pair):
    for folder, step in zip(pair, (4, 8), strict=True):
        assert {path.name for path in folder.iterdir()} == {"meta.json", "model.pt", "training.pt", "SHA256SUMS"}
        done = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=folder, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, "meta.json: OK\nmodel.pt: OK\ntraining.pt: OK\n")
        assert json.loads((folder / "meta.json").read_bytes()) == {"step": step, "settings": {"seed": step}}
        assert torch.equal(torch.load(folder / "model.pt", weights_only=True)["w"], torch.arange(5.0) + step)
        assert torch.load(folder / "training.pt", weights_only=True)["clock"] == {"before": 0.1 * step}
    assert newest(pair[0].parent) == (pair[1], [])


def flip(path: Path, bit: int = 99) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


@pytest.mark.parametrize("harm", [flip, cut, Path.unlink], ids=["flipped bit", "truncated", "missing"])
@pytest.mark.parametrize("name", ["model.pt", "training.pt", "meta.json", "SHA256SUMS"])
def test_a_damaged_checkpoint_is_named_and_skipped(pair, name, harm):
    older, newer = pair
    harm(newer / name)
    found, (fault,) = newest(older.parent)
    assert found == older
    assert fault.startswith(f"checkpoint {newer} is damaged and skipped: ")
    assert name in fault or name == "SHA256SUMS" and len(fault) > len(f"checkpoint {newer} is damaged and skipped: ")
    harm(older / name)
    found, faults = newest(older.parent)
    assert found is None and [str(path) in fault for path, fault in zip((newer, older), faults, strict=True)] == [1, 1]
    must = "must be an unfinished run with a whole checkpoint"
    with pytest.raises(T.UserError, match=f"^RESUME='.*run': {must}; checkpoint {newer} is damaged"):
        T.stored_settings({"RESUME": "run", "OUT_DIR": str(older.parent.parent)})


def test_every_byte_of_the_list_of_hashes_counts(pair):
    """But that a line may also end in a vertical tab, which lists the same."""
    older, newer = pair
    whole = (newer / "SHA256SUMS").read_bytes()
    for bit in (8 * place + place % 8 for place in range(len(whole))):
        (newer / "SHA256SUMS").write_bytes(whole)
        flip(newer / "SHA256SUMS", bit)
        same = (newer / "SHA256SUMS").read_bytes()[bit // 8] == ord("\v")
        assert newest(older.parent)[0] == (newer if same else older), bit
    lines = [match.end() for match in re.finditer(b"\n", whole)]
    for size in [*range(0, len(whole) - 1, 10), *lines[:-1], lines[0] + 1]:
        (newer / "SHA256SUMS").write_bytes(whole[:size])
        assert newest(older.parent)[0] == older, whole[:size]


def test_a_half_written_checkpoint_is_skipped_and_cleared_away(pair):
    older, newer = pair
    part = older.parent / "step_000012.part"
    shutil.copytree(newer, part)
    found, (fault,) = newest(older.parent)
    assert found == newer and fault == f"checkpoint {part} is damaged and skipped: half-written"
    save(older.parent, 16)
    assert steps_kept(older.parent) == ["step_000008", "step_000016"]


def test_the_two_newest_stay_and_a_failed_save_leaves_them(tmp_path, monkeypatch):
    for step in range(1, 6):
        save(tmp_path, step)
    assert steps_kept(tmp_path) == ["step_000004", "step_000005"]
    monkeypatch.setattr(T.os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, 6)
    assert steps_kept(tmp_path) == ["step_000004", "step_000005"]
    assert newest(tmp_path) == (tmp_path / "step_000005", [])


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "file"
    T.replace_file(path, b"old")
    for call in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(T.os, call, lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
            with pytest.raises(OSError):
                T.replace_file(path, b"new, longer")
        assert path.read_bytes() == b"old"
    T.replace_file(str(path), b"new")
    assert path.read_bytes() == b"new" and [each.name for each in tmp_path.iterdir()] == ["file"]


def test_what_a_run_leaves(place, straight):
    """Two checkpoints of 16 steps; weights_only loads all of it; no file is half-written."""
    folder = place.of(straight)
    assert steps_kept(folder) == ["step_000012", "step_000016"] and not list(folder.rglob("*.part"))
    meta = json.loads((folder / "step_000016" / "meta.json").read_bytes())
    assert meta["step"] == 16 and meta["settings"] == place.result(straight)["settings"]
    training = torch.load(folder / "step_000016" / "training.pt", weights_only=True)
    assert set(training) == {"run", "optimizers", "plan", "clock", "exporter", "ema", "swa"}
    assert training["run"] == {"step": 16, "skipped_steps": 0, "skipped_in_a_row": 0, "events": []}
    assert training["ema"]["count"] == 3
    assert training["clock"]["used"] == [step / 16 for step in range(1, 17)]
    model = torch.load(folder / "step_000012" / "model.pt", weights_only=True)
    assert sum(value.numel() for value in model.values()) == place.result(straight)["params"]["total"]
    assert [line for line in place.log(straight).splitlines() if " saved in " in line][0].startswith("step:0 saved in ")
    assert re.findall(r"^step:(\d+) saved in \d+ms$", place.log(straight), re.M) == ["0", "4", "8", "12", "16"]


def test_a_run_goes_on_from_the_newest_whole_checkpoint(place, straight, stopped):
    folder = copied(place, stopped, "damaged")
    assert steps_kept(folder) == ["step_000004", "step_000006"]
    flip(folder / "step_000006" / "training.pt")
    (folder / "step_000008.part").mkdir()
    place.resume("damaged")
    log = place.log("damaged")
    assert f"checkpoint {folder}/step_000006 is damaged and skipped: training.pt\n" in log
    assert f"checkpoint {folder}/step_000008.part is damaged and skipped: " in log
    assert [event["step"] for event in place.result("damaged")["events"]] == [4]
    place.same("damaged", straight)
    assert not list(folder.rglob("*.part"))


def test_a_run_without_a_whole_checkpoint_is_one_line(place, stopped):
    folder = copied(place, stopped, "hopeless")
    for path in folder.glob("step_*"):
        cut(path / "model.pt")
    child = place.resume("hopeless", code=2)
    said = r"must be an unfinished run with a whole checkpoint; checkpoint .*step_000006 is damaged and skipped"
    assert re.match(rf"error: RESUME='\S+run': {said}: model.pt .*\n$", child.err), child.err


# ------------------------------------------------------------------------------------------------------------- signals
@pytest.mark.parametrize(("name", "step"), [("SIGTERM", 10), ("SIGINT", 15)])
def test_a_signal_ends_the_step_saves_and_leaves(place, straight, name, step):
    """With EMA running; and one step before the end, with averages that began again with QAT."""
    out = f"signal {name}"
    child = place.run(out, stop_at(step - 1, name), 128 + getattr(signal, name))
    assert time.monotonic() - child.began < 30 and child.err == ""
    folder = place.of(out)
    assert newest(folder) == (folder / f"step_{step:06d}", [])
    lines = place.log(out).splitlines()
    assert lines[-1] == f"stopped by {name} after step {step}; RESUME={folder} goes on"
    assert sum("stopped by" in line for line in lines) == 1 and not (folder / "result.json").exists()
    place.resume(out)
    event, = place.result(out)["events"]
    assert (event["event"], event["step"], event["ranks"], event["changed"]) == ("resume", step, 1, {})
    assert re.findall(r"^step:(\d+)/", place.log(out), re.M) == [str(step) for step in range(1, 17)]
    place.same(out, straight)


def test_a_signal_during_a_save_lets_it_end(place, straight):
    patch = """
import os, signal, time
inner = T.save_checkpoint
def slow(folder, step, *rest):
    if step == 8:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.5)
    inner(folder, step, *rest)
    if step == 8:
        time.sleep(0.5)
T.save_checkpoint = slow
"""
    place.run("in a save", patch, 143)
    folder = place.of("in a save")
    assert newest(folder) == (folder / "step_000009", [])
    assert steps_kept(folder) == ["step_000008", "step_000009"]
    shutil.rmtree(folder / "step_000009")
    assert newest(folder) == (folder / "step_000008", [])
    place.resume("in a save")
    place.same("in a save", straight)


def test_a_second_signal_ends_at_once(place, straight):
    """More than a second after the first; torchrun repeats a terminal's Ctrl-C at once, which must not end the save."""
    early = at(5, "os.kill(os.getpid(), signal.SIGINT); time.sleep(0.4); os.kill(os.getpid(), signal.SIGTERM)\n"
                  "time.sleep(0.4)")
    place.run("twice", early, 143)
    assert newest(place.of("twice"))[0].name == "step_000006"
    late = at(5, "os.kill(os.getpid(), signal.SIGTERM); time.sleep(1.4); os.kill(os.getpid(), signal.SIGTERM)\n"
                 "time.sleep(60)")
    child = place.run("at once", late, 143)
    assert time.monotonic() - child.began < 20
    assert child.err == "SIGTERM: ended without a checkpoint\n"
    assert newest(place.of("at once"))[0].name == "step_000004"
    place.resume("at once")
    place.same("at once", straight)


def test_a_signal_in_set_up_or_in_the_final_evaluation_ends_at_once(place, straight):
    wait = """
import os, signal, time
inner = T.NAME
def slow(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
T.NAME = slow
"""
    child = place.run("set-up", wait.replace("NAME", "warm_up"), -signal.SIGTERM)
    assert time.monotonic() - child.began < 20 and steps_kept(place.of("set-up")) == []
    child = place.run("packing", wait.replace("NAME", "read_artifact"), -signal.SIGTERM)
    assert time.monotonic() - child.began < 20
    place.resume("packing")
    assert [event["step"] for event in place.result("packing")["events"]] == [16]
    place.same("packing", straight)


# -------------------------------------------------------------------------------------------------------- RESUME rules
def test_resume_refuses_what_is_no_unfinished_run(place, straight, stopped):
    def refused(**changes) -> str:
        child = place.resume(stopped, code=2, **changes)
        assert re.fullmatch(r"error: .*\n", child.err), child.err
        return child.err

    before = {path: path.read_bytes() for path in place.of(stopped).rglob("*") if path.is_file()}
    for wrong in (place.folder / "stopped" / "none", place.of(straight)):  # the second is finished
        assert f"RESUME='{wrong}': must be an unfinished run with a whole checkpoint; \n" in refused(RESUME=wrong)
    assert f"RESUME='{place.folder}/stopped/none': must be an unfinished run" in refused(RESUME="none")
    assert "RUN_ID='other': must be that of RESUME, 'run'" in refused(RUN_ID="other")
    for name, value, was in (("MODEL_DIM", 64, 32), ("SEED", 5, 1337), ("TRAIN_BATCH_TOKENS", 512, 256)):
        assert f"{name}={value}: must stay {was} under RESUME\n" in refused(**{name: value})
    files = {path: path.read_bytes() for path in place.of(stopped).rglob("*") if path.is_file()}
    log = place.of(stopped) / "log.txt"
    assert files.pop(log).startswith(before.pop(log)) and files == before
    assert not (place.folder / "stopped" / "none").exists()


def test_resume_of_a_run_that_never_saved_is_refused(place, stopped):
    """With RESUME alone its settings would be the defaults: those of another run."""
    folder = place.folder / "bare" / "run"
    folder.mkdir(parents=True)
    child = place.resume("bare", code=2)
    assert re.fullmatch(r"error: RESUME='\S+run': must be an unfinished run .*\n", child.err), child.err
    assert list(folder.iterdir()) == []


def test_resume_takes_the_stored_settings_and_lists_those_changed(place, straight, stopped):
    """By path, from another folder of runs; the checkpoint that it starts from is not written again."""
    folder = copied(place, stopped, "changed")
    here = {**UNSET, "OUT_DIR": None, "RESUME": folder}
    place.run("elsewhere", **{**here, "MATRIX_LR": 0.01, "SAVE_EVERY": 3})
    event, = place.result("changed")["events"]
    assert event["changed"] == {"matrix_lr": 0.01, "save_every": "3"}
    assert "event: resume step:6 ranks:1 changed:{" in place.log("changed")
    expected = {**place.result(straight)["settings"], "matrix_lr": 0.01, "save_every": "3",
                "resume": str(folder), "out_dir": str(place.folder / "stopped")}
    assert place.result("changed")["settings"] == expected
    assert place.artifact("changed") != place.artifact(straight)
    saves = place.log("changed").split("event: resume")[1]
    assert re.findall(r"^step:(\d+) saved", saves, re.M) == ["9", "12", "15", "16"]  # not 6 again


def test_the_clock_goes_on_from_where_it_stood(place):
    """2.8 s of a clock of 3, and 2 to choose, are gone when the run is stopped; what is left is trained."""
    clock = {"ITERATIONS": 0, "MAX_WALLCLOCK_SECONDS": 5, "RESERVE_SECONDS": 2}
    place.run("clock", TICKS + at(12, "Tick.seconds += 2") + stop_at(15), 143, **clock)
    saved = torch.load(place.of("clock") / "step_000016" / "training.pt", weights_only=True)
    steps = [0.02 + 0.06 * (0.618 * step % 1) for step in range(1, 16)]  # that of the 16th is on its way
    assert saved["clock"]["seconds"][-1] == pytest.approx(2 + sum(steps))
    place.resume("clock", TICKS)
    times = [int(value) for value in re.findall(r"train_time:(\d+)ms", place.log("clock"))]
    assert times == sorted(times) and times[11] < 1000 and times[12] >= 2000
    result = place.result("clock")
    assert 2.9 < result["train_seconds"] < 3.1 and 18 <= result["steps"] <= 24
    progress = json.loads((place.of("clock") / "progress.json").read_text())["progress"]
    assert progress == sorted(progress) and len(progress) == result["steps"]
    assert progress[11] < 1 / 2 < 2 / 3 < progress[14] and progress[-1] == pytest.approx(1, abs=0.05)


# -------------------------------------------------------------------------------------------------- replay and crashes
@pytest.fixture(scope="session")
def source(place: Place) -> str:
    """A run against the clock, to be repeated; it validates and saves on its way."""
    place.run("source", TICKS, ITERATIONS=0, MAX_WALLCLOCK_SECONDS=3, RESERVE_SECONDS=1, SAVE_EVERY="1s",
              VAL_LOSS_EVERY=50)
    assert place.result("source")["steps"] > 20
    return "source"


@pytest.fixture(scope="session")
def replayed(place: Place, source: str) -> str:
    """The straight run that crashed ones are compared with: a replay."""
    place.run("replayed", **replay_of(place, source, SAVE_EVERY=7))
    return "replayed"


def replay_of(place: Place, source: str, **changes: object) -> dict[str, object]:
    return {**UNSET, "RUN_ID": "run", "REPLAY": place.of(source), **changes}


def test_replays_of_a_wallclock_run_are_the_same_to_the_byte(place, source, replayed):
    place.run("again", "T.WARMUP_STEPS = 1\n", **replay_of(place, source, SAVE_EVERY=0, VAL_LOSS_EVERY=9))
    for out in (replayed, "again"):
        place.same(out, source)
        assert place.result(out)["events"] == [{"event": "replay", "of": str(place.of(source))}]
        found, asked = ({name: phase["start_step"] for name, phase in place.result(each)["phases"].items()}
                        for each in (out, source))
        assert found == asked and all(found.values())
    assert len(steps_kept(place.of("again"))) == 1  # the end, whatever SAVE_EVERY says
    times = dict(re.findall(r"^step:(\d+)/.* train_time:(\d+)ms", place.log(source), re.M))
    first, middle, last = re.findall(r"^step:(\d+) saved in", place.log(source), re.M)  # SAVE_EVERY=1s, and at the end
    assert first == "0" and 1000 <= int(times[middle]) < 1200 and int(last) == place.result(source)["steps"]
    stored, again = (json.loads((place.of(out) / "progress.json").read_text()) for out in (source, "again"))
    assert again["progress"] == stored["progress"]
    losses = [re.findall(r"^step:\d+/\S+ train_loss:(\S+)", place.log(out), re.M) for out in (source, "again")]
    assert losses[0] == losses[1] and len(losses[0]) == len(stored["progress"])


def test_a_replay_of_an_unfinished_run_is_refused(place, stopped):
    child = place.run("refused", **replay_of(place, stopped), code=2)
    file = place.of(stopped) / "progress.json"
    assert child.err == f"error: REPLAY='{file.parent}': no {file}; must be a run that trained to its end\n"
    assert not (place.folder / "refused").exists()


# What a run is at: a letter in the file `at`: u set-up, t a step, s a save, v a score on the way, f the final part.
MARKED = '''
import os
file = os.open(os.environ["OUT_DIR"] + ".at", os.O_RDWR | os.O_CREAT)
os.pwrite(file, b"u", 0)
def marked(place, name, letter):
    inner = getattr(place, name)
    def outer(*args, **kwargs):
        before = os.pread(file, 1, 0)
        os.pwrite(file, b"f" if before == b"f" else letter, 0)
        done = inner(*args, **kwargs)
        os.pwrite(file, letter if before != b"f" and letter == b"t" else before, 0)
        return done
    setattr(place, name, outer)
for place, name, letter in ((T, "forward_backward", b"t"), (T, "save_checkpoint", b"s"), (T.Scorer, "score", b"v")):
    marked(place, name, letter)
replace_file = T.replace_file
def replacing(path, data):
    if str(path).endswith("progress.json"):
        os.pwrite(file, b"f", 0)
    replace_file(path, data)
T.replace_file = replacing
'''
KINDS = {"u": "in set-up", "t": "in a step", "s": "in a save", "v": "in a validation", "f": "after training"}


def crash(place: Place, out: str, source: str, kinds: str, seed: int) -> dict[str, int]:
    """Replay `source` under kill -9, once for each letter of `kinds`, and to its end; the kills by what they hit.

    A letter is what the kill waits for; when it comes is drawn from `seed`.
    """
    rng, killed, mark = random.Random(seed), dict.fromkeys(KINDS.values(), 0), Path(f"{place.folder / out}.at")
    first = replay_of(place, source, SAVE_EVERY=2, VAL_LOSS_EVERY=9)
    for kind in kinds:
        mark.write_bytes(b"u")
        stored = newest(place.of(out))[0] is not None
        if not stored:  # killed before its first checkpoint: there is nothing to go on with
            shutil.rmtree(place.folder / out, ignore_errors=True)
        child = place.begin(out, MARKED, **({**UNSET, "RESUME": "run"} if stored else first))
        seen, last, wanted = 0, "", rng.randint(1, 3) if kind in "sv" else 1
        while seen < wanted and child.poll() is None:
            now = mark.read_text()
            seen, last = seen + (now == kind != last), now
            time.sleep(0.0002)
        time.sleep(rng.uniform(0, {"u": 0.06, "t": 0.15, "s": 0.005, "v": 0.06, "f": 0.1}[kind]))
        child.send(signal.SIGKILL)
        if child.wait() == -signal.SIGKILL:
            killed[KINDS[mark.read_text()]] += 1
        else:
            assert child.code == 0, child.err
            break
    if not (place.of(out) / "result.json").exists():
        place.resume(out)
    events = place.result(out)["events"]
    resumes, same = sum(event["event"] == "resume" for event in events), place.artifact(out) == place.artifact(source)
    print(f"{sum(killed.values())} kills ({', '.join(f'{count} {kind}' for kind, count in killed.items())}), {resumes} "
          f"resumes that count, {place.result(out)['steps']} steps; artifact "
          f"{'identical' if same else 'DIFFERENT'}")
    return killed


def test_kills_change_nothing(place, replayed, source):
    """The short form: a kill in a step, a save, a validation and behind the last step."""
    killed = crash(place, "crashed", source, "tsvf", seed=1)
    assert sum(killed.values()) == 4 and killed["after training"] == 1
    place.same("crashed", replayed)
    place.same("crashed", source)


@pytest.mark.full
def test_a_replay_of_a_resumed_run(place, source):
    """Its stored settings name what it was resumed from; with other settings on its way it cannot be repeated."""
    place.run("halved", stop_at(9), 143)
    place.resume("halved")
    place.run("halved again", **replay_of(place, "halved"))
    place.same("halved again", "halved")
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
    assert steps_kept(place.of("pruned")) == ["step_000008", "step_000009"]
    place.resume("pruned")
    place.same("pruned", straight)


def test_a_full_disk_under_the_terminal_does_not_end_the_run(place, straight):
    """Python's own exit code for a stdout that it cannot flush at the end is 120; all is saved by then."""
    patch = "import os\nos.dup2(os.open('/dev/full', os.O_WRONLY), 1)"
    assert place.begin("full terminal", patch).wait() == 120
    assert place.artifact("full terminal") == place.artifact(straight)
    assert (place.of("full terminal") / "result.json").exists()


@pytest.mark.full
def test_fifty_kills_change_nothing(place):
    place.run("long", ITERATIONS=0, MAX_WALLCLOCK_SECONDS=7, RESERVE_SECONDS=1, SAVE_EVERY="2s")
    place.run("long straight", **replay_of(place, "long"))
    kinds = ["u"] * 5 + ["t"] * 18 + ["s"] * 14 + ["v"] * 9
    random.Random(2).shuffle(kinds)
    killed = crash(place, "long crashed", "long", "".join(kinds) + "ffff", seed=3)
    assert sum(killed.values()) == 50 and min(killed.values()) >= 1, killed
    place.same("long crashed", "long straight")


# ----------------------------------------------------------------------------------------------------- numbers of ranks
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


def rows_read(place: Place, out: str) -> dict[int, list]:
    """Data step -> its windows, of all ranks, from RECORD; two parts of a run that read the same must agree."""
    rows: dict[int, list] = {}
    ranks = []
    for path in sorted(place.folder.glob(f"{out}.rows.*")):
        ranks.append([json.loads(line) for line in path.read_text().splitlines()])
    alone = ranks[0]
    for step, part in alone:
        other = [their for at, their in ranks[1] if at == step] if len(ranks) > 1 and len(part) == 4 else [[]]
        assert rows.setdefault(step, part + other[0]) == part + other[0], step
    return rows


def losses_of(place: Place, out: str) -> list[float]:
    """Of each step, as the log has them; a step that two parts of a run logged counts once, as the later part says."""
    losses = dict(re.findall(r"^step:(\d+)/\S+ train_loss:(\S+)", place.log(out), re.M))
    return [float(losses[str(step)]) for step in range(1, len(losses) + 1)]


def test_one_rank_two_ranks_one_rank(place):
    """Losses as in the straight run: within 1e-5 until the weights are quantized, then 2e-4 (see test_smoke.py)."""
    long = {"ITERATIONS": 30, "GRAD_CLIP_NORM": 1}
    place.run("ranks straight", RECORD, **long)
    place.run("ranks", RECORD + stop_at(9), 143, **long)
    stop = at(17, "if rank == 0: os.kill(os.getpid(), signal.SIGTERM); time.sleep(0.3)")
    children = place.ranks("ranks", RECORD + stop, **UNSET, RESUME="run")
    assert [child.wait() for child in children] == [143, 143], [child.err for child in children]
    step = int(re.findall(r"stopped by SIGTERM after step (\d+)", place.log("ranks"))[-1])
    assert 18 <= step <= 20 and newest(place.of("ranks"))[0].name == f"step_{step:06d}"
    place.resume("ranks", RECORD)
    events = place.result("ranks")["events"]
    assert [(event["step"], event["ranks"]) for event in events] == [(10, 2), (step, 1)]
    straight, found = losses_of(place, "ranks straight"), losses_of(place, "ranks")
    assert len(straight) == len(found) == 30
    quantized = place.result("ranks straight")["phases"]["qat"]["start_step"] - 1
    assert quantized >= 25 and found[:quantized] == pytest.approx(straight[:quantized], abs=2e-4)
    assert found == pytest.approx(straight, rel=3e-4)
    assert place.result("ranks")["val_nats"] == pytest.approx(place.result("ranks straight")["val_nats"], rel=3e-4)
    rows, asked = rows_read(place, "ranks"), rows_read(place, "ranks straight")
    assert all(rows[step] == asked[step] for step in range(30))


# ----------------------------------------------------------------------------------------------------------- bad steps
# Step s turns bad as bad["s"] says: "loss", NaN; "gradient", one of NaN. Prints each step with a hash of the weights
# that it saw.
SPOIL = '''
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
'''


def spoil(bad: dict[int, str]) -> str:
    return f"bad = {json.dumps(bad)}\n{SPOIL}"


def read_by(child: Child) -> tuple[list[int], dict[int, str]]:
    """Steps in the order in which they read their data, and the hash of the weights that each saw."""
    found = re.findall(r"^read (\d+) (\w+)$", child.out, re.M)
    return [int(step) for step, _ in found], {int(step): seen for step, seen in found}


def test_bad_steps_are_skipped_and_counted(place):
    """Weights stay as they were, for a NaN of the loss as of a gradient; in the last step too."""
    child = place.run("skip", spoil({6: "loss", 9: "gradient", 15: "gradient"}), QAT=0)
    steps, seen = read_by(child)
    assert steps == list(range(16)) and child.err == ""
    assert [step for step in range(15) if seen[step] == seen[step + 1]] == [6, 9]
    result, log = place.result("skip"), place.log("skip")
    assert [(event["event"], event["step"]) for event in result["events"]] == [
        ("skipped_step", 7), ("skipped_step", 10), ("skipped_step", 16)]
    assert result["events"][0]["loss"] == "nan" and 3 < float(result["events"][1]["loss"]) < 6
    assert re.findall(r"^event: skipped_step step:(\d+) loss:", log, re.M) == ["7", "10", "16"]
    assert result["steps"] == 16 and result["skipped_steps"] == 3


def test_ranks_skip_together(place):
    """The gradient turns bad on rank 1 alone."""
    bad = spoil({5: "gradient"}).replace("bad.get(str(step))", "bad.get(str(step)) if os.environ['RANK'] == '1' else 0")
    children = place.ranks("ranks skip", f"import os\n{bad}")
    assert [child.wait() for child in children] == [0, 0], [child.err for child in children]
    for child in children:
        _, seen = read_by(child)
        assert [step for step in range(15) if seen[step] == seen[step + 1]] == [5]
    assert [event["step"] for event in place.result("ranks skip")["events"]] == [6]


def test_ten_bad_steps_in_a_row_end_the_run(place, straight):
    child = place.run("diverged", spoil(dict.fromkeys(range(3, 99), "loss")), 1)
    folder = place.of("diverged")
    assert child.err == ("error: 10 steps in a row had a loss or gradient that is not finite; the last checkpoint of "
                         f"{folder} is good\n")
    assert place.log("diverged").count("event: skipped_step ") == 10 and not (folder / "result.json").exists()
    assert read_by(child)[0] == list(range(14))  # the tenth is known in the step after it
    nine = dict.fromkeys([*range(3, 12), *range(13, 15)], "gradient")
    place.run("nine", spoil(nine))
    assert place.result("nine")["skipped_steps"] == 11


@pytest.mark.full
def test_a_replay_repeats_skips(place):
    clock = {"ITERATIONS": 0, "MAX_WALLCLOCK_SECONDS": 4, "RESERVE_SECONDS": 2.5}
    bad = spoil({6: "gradient", 13: "loss"})
    source = place.run("skip source", TICKS + bad, **clock)
    replay = place.run("skip replay", bad, **replay_of(place, "skip source"))
    place.same("skip replay", "skip source")
    assert read_by(replay) == read_by(source)
    *events, last = place.result("skip replay")["events"]
    assert last["event"] == "replay" and events == place.result("skip source")["events"] and len(events) == 2


# --------------------------------------------------------------------------------------------------------- data faults
HARMS = {
    "truncated": "data = path.read_bytes(); path.write_bytes(data[:-1000])",
    "removed": "path.unlink()",
    "rewritten": "data = path.read_bytes(); path.write_bytes(data)",
    "replaced": "path.with_suffix('.new').write_bytes(path.read_bytes()); path.with_suffix('.new').replace(path)",
}


@pytest.mark.parametrize("how", HARMS)
def test_a_shard_that_changes_during_the_run(place, straight, how):
    data = shutil.copytree(place.data, place.folder / f"data {how}")
    shard, = data.glob("*_train_*.bin")
    whole = shard.read_bytes()
    harm = at(6, f"from pathlib import Path\npath = Path({str(shard)!r})\n{HARMS[how]}")
    child = place.run(how, harm, 1 if how == "removed" else 2, DATA_PATH=data)
    expected = f"shard {shard}: was changed while in use, or has a wrong token id"
    if how == "removed":
        expected = f"[Errno 2] No such file or directory: '{shard}'"
    assert child.err == f"error: {expected}\n"
    assert newest(place.of(how))[0].name == "step_000004"
    if how == "truncated":
        child = place.resume(how, code=2)
        assert re.fullmatch(rf"error: shard {shard}: truncated or damaged, .*\n", child.err)
    shard.write_bytes(whole)
    place.resume(how)
    place.same(how, straight)


def test_a_token_outside_the_vocabulary(place):
    """In the fourth of the eight windows of step 9."""
    data = shutil.copytree(place.data, place.folder / "data tokens")
    shard, = data.glob("*_train_*.bin")
    tokens = T.read_shard(shard).copy()
    stream = T.TokenStream([shard], 400)
    T.hold_out(stream, 1.0, T.Settings(train_seq_len=32, holdout_tokens=2048))
    window = stream.windows[T.shuffle(len(stream.windows), T.Settings.seed, 0)[9 * 8 + 3]]
    tokens[window * 32 + 16] = 60000
    write_shard(shard, tokens)
    child = place.run("tokens", code=2, DATA_PATH=data)
    assert child.err == f"error: shard {shard}: was changed while in use, or has a wrong token id\n"
    assert newest(place.of("tokens"))[0].name == "step_000008"


# ---------------------------------------------------------------------------------------------------------------- disk
def limit(size: int) -> str:
    """No file may become larger than `size` bytes; more fails as a full disk does."""
    return f"import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, ({size}, resource.RLIM_INFINITY))"


NO_LIMIT = limit(-1)


def test_a_save_that_fails_is_an_event(place, straight):
    """A limit between the sizes of the log and of a checkpoint, while the saves of steps 8 and 12 fall due."""
    look = f"from pathlib import Path\nfolder = Path({str(place.of('full'))!r})\nfound = T.list_checkpoints(folder)\n" \
           "print('stands', sorted(path.name for path in folder.glob('step_*')), T.newest_checkpoint(found)[0].name)"
    size = (place.of(straight) / "log.txt").stat().st_size + 20000
    assert size < (place.of(straight) / "step_000016" / "model.pt").stat().st_size
    child = place.run("full", at(6, limit(size)) + at(13, f"{look}\n{NO_LIMIT}"))
    assert "stands ['step_000000', 'step_000004'] step_000004\n" in child.out
    events = place.result("full")["events"]
    assert [(event["event"], event["step"]) for event in events] == [("save_failed", 8), ("save_failed", 12)]
    assert all("File too large" in event["error"] for event in events)
    assert re.findall(r"^event: save_failed step:(\d+) error:.*File too large", place.log("full"), re.M) == ["8", "12"]
    assert steps_kept(place.of("full")) == ["step_000004", "step_000016"]
    place.same("full", straight)


def test_a_disk_that_is_full_at_the_end_loses_nothing(place, straight):
    child = place.run("end", at(13, limit(20000)), 1)
    assert re.search(r"^error: \[Errno 27\] File too large", child.err, re.M)
    assert newest(place.of("end"))[0].name == "step_000012"
    assert not (place.of("end") / "model.upar").exists()
    place.resume("end")
    place.same("end", straight)


def test_a_disk_that_is_full_at_the_start_is_one_line(place):
    child = place.run("start", limit(190000), 1)
    assert re.fullmatch(r"error: \[Errno 27\] File too large.*\n", child.err), child.err
    assert "step:1/" not in child.out
    assert steps_kept(place.of("start")) == []


def test_a_log_that_cannot_be_written_does_not_end_the_run(place, straight):
    child = place.run("no log", at(6, limit(20000)) + at(13, NO_LIMIT), SAVE_EVERY=0)
    steps = [str(step) for step in range(1, 17)]  # step 6 is logged in the middle of step 7
    assert re.findall(r"^log.txt: File too large, lost: step:(\d+)/", child.err, re.M) == steps[5:12]
    assert re.findall(r"^step:(\d+)/", place.log("no log"), re.M) == steps[:5] + steps[12:]
    assert re.findall(r"^step:(\d+)/", child.out, re.M) == steps
    place.same("no log", straight)


def test_a_folder_that_may_not_be_written(place, straight):
    """During the saves of steps 8 and 12 it is read-only, and the process is not root's."""
    patch = """
import os
inner = T.save_checkpoint
def refused(folder, step, *rest):
    if step in (8, 12):
        os.chmod(folder, 0o555)
        os.seteuid(65534) if os.getuid() == 0 else None
    try:
        inner(folder, step, *rest)
    finally:
        os.seteuid(os.getuid())
        os.chmod(folder, 0o755)
T.save_checkpoint = refused
"""
    place.run("refused saves", patch)
    events = place.result("refused saves")["events"]
    assert [(event["event"], event["step"]) for event in events] == [("save_failed", 8), ("save_failed", 12)]
    assert all("Permission denied" in event["error"] for event in events)
    assert steps_kept(place.of("refused saves")) == ["step_000004", "step_000016"]
    place.same("refused saves", straight)


def test_the_exit_code_of_each_fault(capsys, monkeypatch):
    def end(error: Exception | int) -> tuple[int, str]:
        def main() -> int:
            if isinstance(error, int):
                return error
            raise error
        return T.exit_code(main), capsys.readouterr().err

    assert [end(code) for code in (0, 1, 143)] == [(0, ""), (1, ""), (143, "")]
    assert end(T.UserError("wrong\nmore")) == (2, "error: wrong\n")
    assert end(FloatingPointError("nan")) == (1, "error: nan\n")
    assert end(OSError(28, "No space left on device")) == (1, "error: [Errno 28] No space left on device\n")
    assert end(torch.OutOfMemoryError("much")) == (1, "error: much\n")
    with pytest.raises(RuntimeError, match="a bug"):
        end(RuntimeError("a bug"))


# --------------------------------------------------------------------------------------------------------------- hangs
STUCK = """
import os, time
T.HANG_SECONDS = 1.0
inner = T.Batches.micro_batches
def stuck(self, step):
    if step == 6:
        time.sleep(2.5)
    yield from inner(self, step)
T.Batches.micro_batches = stuck
"""


def test_a_hang_prints_the_stacks_and_the_run_goes_on(place, straight):
    child = place.run("hang", STUCK)
    assert re.match(r"Timeout \(0:00:0[1-9]", child.err) and " in stuck\n" in child.err and " in main\n" in child.err
    place.same("hang", straight)


@pytest.mark.full
def test_a_long_validation_is_no_hang(place):
    score = """
import time
T.HANG_SECONDS = 1.0
inner, naps = T.Scorer.score, [1.6]
def slow(*args, **words):
    time.sleep(naps.pop() if naps else 0)
    return inner(*args, **words)
T.Scorer.score = slow
"""
    child = place.run("no hang", score, ITERATIONS=6, VAL_LOSS_EVERY=4, EMA=0, SWA=0, QAT=0)
    assert child.err == ""


# ------------------------------------------------------------------------------------------------------------ torchrun
def ended(process: subprocess.Popen, seconds: float) -> str:
    """What a torchrun has said on stderr; it must end by itself within this time."""
    try:
        return process.communicate(timeout=seconds)[1]
    finally:
        if process.poll() is None:
            process.terminate()  # it ends its ranks
            process.communicate()


def wait_for(path: Path, text: str, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not (path.exists() and text in path.read_text(encoding="utf-8", errors="replace")):
        assert time.monotonic() < end, f"no {text!r} in {path}"
        time.sleep(0.02)


# Rank 0 comes two seconds late to the reduction of step 7; rank 1 dies in it a second before, once.
DIE = """
import os, signal, threading, time
inner = T.forward_backward
def dying(model, batches, step):
    loss, flag = inner(model, batches, step), os.environ["OUT_DIR"] + ".died"
    if step == 6 and not os.path.exists(flag):
        if os.environ["RANK"] == "0":
            time.sleep(2)
            open(flag, "w").close()
        else:
            threading.Timer(1, os.kill, (os.getpid(), signal.SIGKILL)).start()
    return loss
T.forward_backward = dying
"""


def test_sigterm_to_torchrun_saves_once(place):
    process = place.torchrun("term", at(1000, "pass"), ITERATIONS=3000, SAVE_EVERY=0)
    log = place.of("term") / "log.txt"
    wait_for(log, "step:9/")
    process.send_signal(signal.SIGTERM)
    said = ended(process, 30)
    assert process.returncode != 0 and "ended without" not in said and "rank 0 lost" not in said
    lines = place.log("term").splitlines()
    step, = (int(match[1]) for line in lines if (match := re.match(r"stopped by SIGTERM after step (\d+)", line)))
    assert [line.split()[0] for line in lines if " saved in " in line] == [f"step:{step}"]
    assert newest(place.of("term")) == (place.of("term") / f"step_{step:06d}", [])
    assert json.loads((place.of("term") / f"step_{step:06d}" / "meta.json").read_bytes())["step"] == step


def test_a_rank_killed_inside_a_collective_ends_the_other(place):
    process = place.torchrun("killed", DIE)
    began = time.monotonic()
    said = ended(process, 90)
    assert process.returncode != 0 and time.monotonic() - began < 60
    assert re.search(r"^error: rank 0 lost another rank \(.*\); RESUME continues$", said, re.M), said
    folder = place.of("killed")
    assert newest(folder) == (folder / "step_000004", []) and not (folder / "result.json").exists()
    assert "step:5/16" in place.log("killed") and "step:6/16" not in place.log("killed")  # 6 is logged in step 7


@pytest.mark.full
def test_two_nodes_meet_by_the_command_of_the_guide(place, straight):
    """Both on this machine, a rank each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = re.search(r"^RUN_ID=big (torchrun .*) train_gpt.py$", GUIDE.read_text(encoding="utf-8"), re.M).group(1)
    command = command.replace("HOST:29400", f"127.0.0.1:{port}").replace("--nproc_per_node=8", "--nproc_per_node=1")
    words = command.split()
    assert words[:3] == ["torchrun", "--nnodes=2", "--nproc_per_node=1"]
    environ = place.environment("nodes", SAVE_EVERY=4)
    nodes = [subprocess.Popen([sys.executable, "-m", "torch.distributed.run", *words[1:], SCRIPT], env=environ,
                              text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
    said = [ended(node, 120) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    assert place.result("nodes")["world_size"] == 2 and place.result("nodes")["steps"] == 16
    assert place.result("nodes")["val_nats"] == pytest.approx(place.result(straight)["val_nats"], rel=1e-4)


@pytest.mark.full
def test_the_guides_commands_on_one_process(place):
    """Those of docs/runs.md, in its order; the first is stopped in its seventh step, settings make all tiny."""
    blocks = re.findall(r"^```bash\n(.*?)^```", GUIDE.read_text(encoding="utf-8"), re.M | re.S)
    lines = [line.split("#")[0].split() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    commands = [dict(word.split("=", 1) for word in words[:-2]) for words in lines if words[-2] == "python"]
    assert [*map(list, commands)] == [["RUN_ID", "CONFIG"], ["RESUME"], ["REPLAY"], ["PROFILE", "CONFIG"]]
    for changes, patch, code in zip(commands, (stop_at(6), "", "", ""), (143, 0, 0, 0), strict=True):
        if "CONFIG" in changes:
            changes |= {"CONFIG": ROOT / changes["CONFIG"]}
        place.run("guide", patch, code, **{**({"RUN_ID": "profile"} if "CONFIG" in changes else UNSET), **changes})
    again, = place.folder.glob("guide/run_*/model.upar")
    assert again.read_bytes() == (place.folder / "guide" / "first" / "model.upar").read_bytes()
    assert (place.folder / "guide" / "profile" / "trace.json").is_file()


def test_ranks_that_are_signalled_save_once(place, straight):
    """The signal reaches rank 1 alone; both end after the same step, and one process goes on."""
    stop = at(9, "if rank == 1: os.kill(os.getpid(), signal.SIGTERM); time.sleep(0.3)")
    children = place.ranks("both", stop)
    assert [child.wait() for child in children] == [143, 143], [child.err for child in children]
    step, = (int(step) for step in re.findall(r"^stopped by SIGTERM after step (\d+);", place.log("both"), re.M))
    assert 10 <= step <= 12 and newest(place.of("both"))[0].name == f"step_{step:06d}"
    place.resume("both")
    assert [(event["step"], event["ranks"]) for event in place.result("both")["events"]] == [(step, 1)]
    assert place.result("both")["val_nats"] == pytest.approx(place.result(straight)["val_nats"], rel=1e-4)


# ----------------------------------------------------------------------------------------------------------- profiling
def test_profile_traces_three_steps(place):
    place.run("profile", PROFILE=1, ITERATIONS=8, SAVE_EVERY=0)
    trace = json.loads((place.of("profile") / "trace.json").read_text())
    steps = [event for event in trace["traceEvents"] if event.get("name", "").startswith("Optimizer.step#Muon")]
    assert len(steps) == 3 and {"forward_backward", "aten::embedding"} & {e.get("name") for e in trace["traceEvents"]}
    line = f"profile: {place.of('profile')}/trace.json opens at https://ui.perfetto.dev"
    assert line in place.log("profile").splitlines()


@pytest.mark.parametrize("mode", typing.get_args(T.Settings.__annotations__["compile_mode"]))
def test_the_compile_mode_reaches_the_compiler(place, mode):
    patch = "T.torch.compile = lambda net, **words: print('compile', words, flush=True) or net"
    child = place.run(f"compile {mode}", patch, COMPILE=1, COMPILE_MODE=mode, ITERATIONS=8)
    words = {"dynamic": False, "fullgraph": True, "mode": mode}
    assert [line for line in child.out.splitlines() if line.startswith("compile ")] == [f"compile {words}"] * 2
