"""What several test files need: environments, forked processes, whole runs, tiny data."""

import functools
import hashlib
import importlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import pytest
import torch

import convert as C
import quantize as Q
import train_dpo as D

sys.path.insert(0, str(Path(__file__).resolve().parent / "tools"))

from common import ROOT, load_script

# transformers calls flash-linear-attention where it is installed, and its kernels fail without a GPU
# ("0 active drivers"). transformers chooses once per process, so it must never see the package.
if not torch.cuda.is_available():
    sys.modules["fla"] = None

KEPT = ("PATH", "HOME", "TMPDIR", "LANG", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV")
# Settings of a run of train_gpt.py that takes seconds.
TINY = dict(
    DTYPE="float32",
    COMPILE=0,
    LAYER_PATTERN="g s1 s1",
    MODEL_DIM=32,
    NUM_HEADS=2,
    NUM_KV_HEADS=1,
    ATTN_WINDOW=16,
    TRAIN_SEQ_LEN=32,
    TRAIN_BATCH_TOKENS=512,
    EVAL_STRIDE=0,
    ITERATIONS=30,
    MAX_WALLCLOCK_SECONDS=0,
    RESERVE_SECONDS=0,
)
# Constants of a patched script: a log line for each step, and no untimed steps.
CONSTANTS = "T.LOG_SECONDS = 0.0\nT.WARMUP_STEPS = 0\n"
# Settings of a tiny run of the post-training scripts; each takes those that it has.
POST = dict(
    TRAIN_SEQ_LEN=64,
    TRAIN_BATCH_TOKENS=512,
    PAIRS_PER_STEP=16,
    PROMPTS_PER_STEP=4,
    GROUP_SIZE=4,
    MINI_BATCHES=2,
    MAX_NEW_TOKENS=3,
    TEMPERATURE=1,
    EVAL_PROMPTS=16,
    ITERATIONS=10,
    MAX_WALLCLOCK_SECONDS=0,
    RESERVE_SECONDS=0,
    SAVE_EVERY=4,
    SAMPLES_EVERY=3,
    LEARNING_RATE=0.003,
)
# Forks a process for each line of its input: a command line `words`, or T.main() of `script` behind
# the code of `patch`, which calls functions of tests/faults.py. To import torch takes longer than most runs.
# A line with "poll" asks for the exit code of a process, null while it runs. It ends by os._exit,
# because Python takes seconds to clear away what a fork shares with its parent.
SERVER = """
import atexit, importlib, json, os, runpy, signal, sys, traceback
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/tests"]
import numpy, sentencepiece, tiktoken, torch, torch._dynamo, torch.profiler
import faults, train_gpt

def leave(call):
    code = 1
    try:
        code = call()
    except SystemExit as error:
        code = error.code or 0
        if isinstance(code, str):
            code = print(code, file=sys.stderr) or 1
    except BaseException:
        traceback.print_exc()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            code = 120
    os._exit(code)

def run_command(words, cwd):
    os.chdir(cwd)
    sys.argv, sys.path[0] = words, os.path.dirname(os.path.abspath(words[0]))
    runpy.run_path(words[0], run_name="__main__")
    return 0

def run_script(T, patch):
    sys.argv = [T.__file__]
    exec(patch, {**vars(faults), "T": T})
    return T.exit_code(T.main)

for line in sys.stdin:
    order = json.loads(line)
    if "poll" in order:
        done, status = os.waitpid(order["poll"], os.WNOHANG)
        print(json.dumps(os.waitstatus_to_exitcode(status) if done else None), flush=True)
        continue
    T = importlib.import_module(order.get("script", "train_gpt"))
    child = os.fork()
    if child:
        print(child, flush=True)
        continue
    os.setsid()
    torch.seed()  # as a fresh process, which has a seed of its own
    for number, path in enumerate((order.get("given", os.devnull), order["out"], order["err"])):
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC if number else os.O_RDONLY
        os.dup2(os.open(path, flags, 0o644), number)
    signal.alarm(600)
    os.environ.clear()
    os.environ.update(order["env"])
    sys.stdin = open(0)
    if "words" in order:
        leave(lambda: run_command(order["words"], order["cwd"]))
    leave(lambda: run_script(T, order["patch"]))
"""


def environment(**changes):
    """Return what a command line of a test finds in its environment; None leaves a name out."""
    given = {name: os.environ[name] for name in KEPT if name in os.environ}
    given |= {"OMP_NUM_THREADS": "1", "DEVICE": "cpu", **changes}
    return {name: str(value) for name, value in given.items() if value is not None}


@functools.cache
def server(threads="1"):
    """Return a process that forks others. It ends with its input."""
    words = [sys.executable, "-c", SERVER, str(ROOT)]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    return subprocess.Popen(words, env=environment(OMP_NUM_THREADS=threads), **pipes)


class Child:
    """A forked process; `code` is its exit code once it has ended, -n if signal n ended it."""

    def __init__(self, server, folder, name, patch, environ, **order):
        self.server = server
        self.code = None
        self.paths = [folder / f"{name}.{kind}" for kind in ("out", "err")]
        out, err = map(str, self.paths)
        self.pid = self.ask(dict(env=environ, patch=CONSTANTS + patch, out=out, err=err, **order))

    def ask(self, order):
        self.server.stdin.write(json.dumps(order) + "\n")
        self.server.stdin.flush()
        return json.loads(self.server.stdout.readline())

    def poll(self):
        if self.code is None:
            self.code = self.ask({"poll": self.pid})
        return self.code

    def wait(self, seconds=300):
        """Return the exit code; the process must end within this time."""
        end = time.monotonic() + seconds
        while self.poll() is None and time.monotonic() < end:
            time.sleep(0.01)
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)
            pytest.fail(f"still running after {seconds} s: {self.out[-500:]} {self.err[-500:]}")
        return self.code

    def send(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    @property
    def out(self):
        return self.paths[0].read_text(encoding="utf-8") if self.paths[0].exists() else ""

    @property
    def err(self):
        return self.paths[1].read_text(encoding="utf-8") if self.paths[1].exists() else ""


def refusal(error, match, call, *arguments, **words):
    """Return the line of the error that this call ends with, which matches."""
    with pytest.raises(error, match=match or None) as caught:
        call(*arguments, **words)
    line = str(caught.value)
    assert "\n" not in line
    return line


def start(command, environ, cwd=".", given=""):
    """Run a script with arguments to its end, in a fork; return what subprocess.run would."""
    words = list(map(str, command))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "given").write_text(given, encoding="utf-8")
        order = dict(words=words, cwd=str(Path(cwd).resolve()), given=f"{folder}/given")
        child = Child(server(environ["OMP_NUM_THREADS"]), Path(folder), "run", "", environ, **order)
        return subprocess.CompletedProcess(words, child.wait(600), child.out, child.err)


def exit_code(module, *words, **changes):
    """Run a command line of a script in this process; return its exit code."""
    environ = mock.patch.dict(os.environ, environment(**changes), clear=True)
    with environ, mock.patch.object(sys, "argv", [module.__file__, *map(str, words)]):
        return module.exit_code(module.main)


def rank_environments(count):
    """Return the variables that tell each of `count` processes its rank, as torchrun does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    shared["TORCHELASTIC_RUN_ID"] = "none"
    return [{**shared, "RANK": rank, "LOCAL_RANK": rank} for rank in range(count)]


class Place:
    """A folder with runs of a script, each in <out>/run of it, by `tiny` settings."""

    def __init__(self, folder, data, tiny, script="train_gpt"):
        self.folder = folder
        self.data = data
        self.tiny = tiny
        self.script = script
        self.unset = dict.fromkeys([*tiny, "DATA_PATH"])  # what a run takes from the one it resumes
        self.resumed = {**self.unset, "RUN_ID": None, "RESUME": "run"}
        self.count = 0

    def environment(self, out, **changes):
        paths = {"DATA_PATH": self.data, "OUT_DIR": self.folder / out, "RUN_ID": "run"}
        return environment(**{**self.tiny, **paths, **changes})

    def begin(self, out, patch="", script="", **changes):
        """Start a run in the folder `out`, of another script than its own if one is named."""
        self.count += 1
        order = dict(folder=self.folder, name=f"{out}_{self.count}", patch=patch)
        order |= dict(script=script or self.script, environ=self.environment(out, **changes))
        return Child(server(), **order)

    def run(self, out, patch="", code=0, **changes):
        """Return a run from beginning to end, which must have this exit code."""
        child = self.begin(out, patch, **changes)
        assert child.wait() == code, child.out[-800:] + child.err[-2000:]
        assert "Traceback" not in child.err, child.err
        return child

    def ranks(self, out, patch="", ranks=2, code=0, **changes):
        """Return the ended processes of a run on gloo ranks."""
        children = [self.begin(out, patch, **rank, **changes) for rank in rank_environments(ranks)]
        codes = [child.wait() for child in children]
        assert codes == [code] * ranks, [child.err for child in children]
        return children

    def resume(self, out, patch="", code=0, **changes):
        """Go on with the run of `out`, with its settings."""
        return self.run(out, patch, code, **{**self.resumed, **changes})

    def refused(self, out, patch="", code=2, **changes):
        """Return the only line that a run says on stderr, which ends with it and has no result."""
        err = self.run(out, patch, code, **changes).err
        assert re.fullmatch(r"error: .+\n", err), err
        assert changes.get("RESUME") or not (self.of(out) / "result.json").exists()
        return err

    def of(self, out):
        return self.folder / out / "run"

    def log(self, out):
        """Return the log behind the script's source and the rule."""
        text = (self.of(out) / "log.txt").read_text(encoding="utf-8")
        return text.partition("=" * 120 + "\n")[2]

    def steps(self, out):
        """Return the metrics of each step's line."""
        lines = re.findall(r"^step:\d+/\d+ (?!held_out)(.*)$", self.log(out), re.M)
        rows = [dict(pair.split(":") for pair in line.split()) for line in lines]
        return [{name: float(text.rstrip("ms%")) for name, text in row.items()} for row in rows]

    def logged(self, out, name):
        """Return the values of a metric by step; a later line replaces an earlier one."""
        found = re.findall(rf"^step:(\d+)/.*?\b{name}:([^\s]+?)(?:ms)?(?: |$)", self.log(out), re.M)
        return {int(step): float(value) for step, value in found}

    def result(self, out):
        return read_json(self.of(out) / "result.json")

    def artifact(self, out):
        return (self.of(out) / "model.upar").read_bytes()

    def same(self, out, other):
        """Two runs ended in the same model, to the byte, with the same scores and phases."""
        assert self.artifact(out) == self.artifact(other)
        results = [self.result(name) for name in (out, other)]
        for key in "before after gain steps weights phases tokens".split():
            assert results[0].get(key) == results[1].get(key), key

    def checkpoint(self, out, step):
        return torch.load(self.of(out) / f"step_{step:06d}" / "model.pt", weights_only=True)


def steps_kept(folder):
    """Return the steps of the checkpoints that stand in a run's folder."""
    return [int(path.name[5:]) for path in sorted(folder.glob("step_*"))]


def stop_at(step):
    """Return a patch that sends the process SIGTERM in data step `step` of any script."""
    return f"stop(T, {step})\n"


def check_early_stop(place, script):
    """Ctrl-C while the first answers are recorded, before step 1, is one line; nothing was saved."""
    out = f"{script} early"
    child = place.run(out, "at_file('samples', 1, send, 'SIGINT', 600)\n", 130, script=script)
    line = f"stopped by SIGINT: nothing was saved; {place.of(out)} may be deleted\n"
    assert child.err == line and place.log(out).endswith(line) and steps_kept(place.of(out)) == []
    assert "\nfirst scores: " in child.out


def check_notes(place, script):
    """What was left out of a file is said though the script ends before there is a log."""
    path = place.folder / "broken.jsonl"
    lines = Path(place.tiny["TRAIN_FILES"]).read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:3]) + "{\n")
    child = place.run("broken", code=2, script=script, TRAIN_FILES=path)
    assert re.fullmatch(rf"data: {path}: 4 rows, .*left out no JSON: 1 .*\n", child.out)
    assert re.fullmatch("error: .*\n", child.err) and not place.of("broken").exists()


def check_facts(place, out, script):
    """Return the result of a run without events, whose facts of any script are right; the log ends with it."""
    result = place.result(out)
    artifact = place.artifact(out)
    code = (ROOT / f"{script}.py").read_bytes()
    exact = {
        "script": f"{script}.py",
        "run_id": "run",
        "seed": 1337,
        "world_size": 1,
        "events": [],
        "code_sha256": hashlib.sha256(code).hexdigest(),
        "code_bytes": len(code),
        "artifact": str(place.of(out) / "model.upar"),
        "artifact_sha256": hashlib.sha256(artifact).hexdigest(),
        "artifact_bytes": len(artifact),
        "total_bytes": len(artifact) + len(code),
    }
    assert {key: result[key] for key in exact} == exact
    names = """commit tokenizer_sha256 settings hardware versions steps train_seconds total_seconds
        peak_memory_mib params phases"""
    assert set(names.split()) - set(result) == set()
    end = [f"{key}: {value}" for key, value in result.items() if not isinstance(value, dict)]
    assert place.log(out).split("\n---\n")[1].splitlines() == end
    return result


def check_result(place, out, script):
    """The facts of a result of a post-training script that any run has."""
    result = check_facts(place, out, script)
    assert set("before after gain packed weights init_from".split()) - set(result) == set()
    last = place.steps(out)[-1]
    shown = {name: value for name, value in result["last"].items() if name in last}
    assert len(shown) > 4
    assert shown == pytest.approx({name: last[name] for name in shown}, rel=1e-3, abs=1e-9)


def check_adapters(place, out, step):
    """Adapters alone have moved up to a step, and the artifact has none; return its tensors."""
    before, after = (place.checkpoint(out, at) for at in (0, step))
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved and all(name.endswith((".lora_a", ".lora_b")) for name in moved)
    _, tensors, _ = D.read_artifact(place.of(out) / "model.upar")
    assert not any("lora" in name or "parametrizations" in name for name in tensors)
    return tensors


def phases_of(place, out):
    """Return name -> first step and number of steps of the phases of a run."""
    phases = place.result(out)["phases"]
    assert all(phase["start_progress"] >= phase["begin"] for phase in phases.values())
    return {name: (phase["start_step"], phase["steps"]) for name, phase in phases.items()}


BYTES = D.load_tokenizer("bytes")
SIGNS = {"^": 1, "S": 260, "U": 261, "A": 262, ".": 263, "-": -1}


def spelt(text):
    """Return ids of the byte tokenizer: ^ is BOS, S, U, A roles, . their end, - no target."""
    return [SIGNS.get(char, 4 + ord(char)) for char in text]


def write_lines(path, rows):
    """Write rows as JSON lines; return the path. A row of bytes is a line as it is."""
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def read_json(path):
    return json.loads(path.read_bytes())


def write_json(path, value):
    path.write_text(json.dumps(value))


def pack(network, tokenizer, folder):
    """Write model.upar of a network, and its tokenizer's file beside it; return their folder."""
    state = network.state_dict()
    coded = D.quantize_all(state, D.quant_table(D.Settings().matrix_bits))
    facts = dict(settings=vars(network.config), tokenizer_sha256=tokenizer.sha256)
    content = D.pack_artifact(state, coded, meta={"tokenizer": tokenizer.file}, **facts)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.upar").write_bytes(content)
    if tokenizer.file != "bytes":
        (folder / tokenizer.file).write_bytes(tokenizer.content)
    return folder


def add_noise(network, size):
    """Add noise to every parameter, so that none is at a special value."""
    for param in network.parameters():
        param.data.add_(size * torch.randn_like(param))


def small_network(seed=0, layers="g a", tokenizer=BYTES, **changes):
    """Return a network of train_dpo.py that is random in every weight: new mixers put out zeros."""
    torch.manual_seed(seed)
    shape = dict(layers=layers, norms=" ".join("rms" for _ in layers.split()), embed_init_std=0.02)
    shape |= {"model_dim": 32, "num_heads": 2, "num_kv_heads": 2, **changes}
    network = D.GPT(D.GPTConfig(tokenizer.vocab_size, tokenizer.bos_id, **shape))
    add_noise(network, 0.1)
    return network


@pytest.fixture(scope="session")
def letters(tmp_path_factory):
    """Return a folder with a task, and `policy`, a tiny model that gets some of it right.

    Of two letters, the answer tells whether the first stands before k (x) or not (y). There are
    problems.jsonl and pairs.jsonl.
    """
    folder = tmp_path_factory.mktemp("letters")
    alphabet = "abcdefghijklmnopqrst"
    rows = [(a + b, "xy"[a >= "k"], "yx"[a >= "k"]) for a in alphabet for b in alphabet]
    write_lines(folder / "problems.jsonl", [{"prompt": p, "answer": a} for p, a, _ in rows])
    pairs = [{"prompt": p, "chosen": right, "rejected": wrong} for p, right, wrong in rows]
    write_lines(folder / "pairs.jsonl", pairs)
    tiny = dict(POST, TRAIN_FILES=folder / "problems.jsonl", ITERATIONS=12, LEARNING_RATE=0.02)
    place = Place(folder, None, own_settings("train_sft", tiny), "train_sft")
    place.run(
        "start", INIT_FROM=pack(small_network(), BYTES, folder / "blank"), EMA=0, SWA=0, QAT=0
    )
    place.of("start").rename(folder / "policy")
    return folder


def own_settings(script, settings):
    """Return those of `settings` that a script has."""
    fields = load_script(ROOT / f"{script}.py").Settings.__dataclass_fields__
    return {name: value for name, value in settings.items() if name.lower() in fields}


# Values that JSON may hold where something else is expected.
ODD = [
    None,
    True,
    -1,
    0,
    1.5,
    1e300,
    10**30,
    float("nan"),
    "",
    "x",
    "../x",
    "a/b",
    "a\0b",
    "\ud800",
]
ODD += ["a" * 999, [], {}, [1], [[]], {"a": 1}, [1] * 99]


def mutated(value, rng):
    """Return a JSON value with one random change: a value replaced or removed, at any depth."""
    if isinstance(value, dict | list) and value and rng.random() < 0.85:
        changed = value.copy()
        key = rng.choice(list(changed) if isinstance(value, dict) else range(len(changed)))
        if rng.random() < 0.2:
            del changed[key]
        else:
            changed[key] = mutated(changed[key], rng)
        return changed
    return rng.choice(ODD)


def blocks(guide, language):
    """Return the blocks of code in a language of docs/GUIDE."""
    text = (ROOT / "docs" / guide).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)


def run_guide(guide, folder, least, **changes):
    """Run a guide's commands as they stand there, one after the other in one folder, by bash.

    The folder may hold files that they need. Settings from the environment make them tiny: POST,
    and `changes`.
    """
    (folder / "bin").mkdir()
    for name, module in (("python", ""), ("torchrun", "-m torch.distributed.run")):
        path = folder / "bin" / name
        path.write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
        path.chmod(0o755)
    (folder / "data").mkdir(exist_ok=True)
    for path in [*ROOT.glob("*.py"), *ROOT.glob("data/*.py"), ROOT / "docs", ROOT / "tools"]:
        (folder / path.relative_to(ROOT)).symlink_to(path)
    tiny = {name: value for name, value in POST.items() if name != "LEARNING_RATE"}
    # 8 steps: a tiny policy never sorts, and after 10 steps without any reward a run ends
    tiny |= dict(ITERATIONS=8, MAX_NEW_TOKENS=10, SAVE_EVERY=0, **changes)
    commands = "".join(blocks(guide, "bash")).replace("\\\n", " ").splitlines()
    assert len(commands) >= least
    for command in commands:
        (script,) = re.findall(r"\btrain_[a-z]+(?=\.py)", command)[:1] or [""]
        own = own_settings(script, tiny) if script else {}
        environ = environment(PATH=f"{folder / 'bin'}:{os.environ['PATH']}", **own)
        bash = ["bash", "-euo", "pipefail", "-c", command]
        pipes = dict(capture_output=True, text=True, timeout=300)
        done = subprocess.run(bash, cwd=folder, env=environ, **pipes)
        assert done.returncode == 0, f"{command}: {done.stdout[-500:]} {done.stderr[-1500:]}"
    results = [read_json(path) for path in folder.glob("runs/*/result.json")]
    assert len(results) == sum("train_" in command for command in commands)
    assert all(phase["steps"] for result in results for phase in result["phases"].values())


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory):
    """Return a folder with 200 KB of random words, prepared by data/prepare.py: 400 tokens."""
    folder = tmp_path_factory.mktemp("tiny")
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 8))) for _ in range(120)]
    words += ["naïve", "größer", "日本", "🙂", "x\t=\t1", "  indented", "don't", "\r\n"]
    lines = [" ".join(rng.choices(words, k=rng.randint(4, 12))) for _ in range(4500)]
    rows = [json.dumps({"text": "\n".join(lines[i : i + 10])}) for i in range(0, 4500, 10)]
    (folder / "text.jsonl").write_text("\n".join(rows))
    options = "--vocab-size 400 --val-frac 0.01 --workers 1".split()
    command = [ROOT / "data" / "prepare.py", folder / "text.jsonl", "--out", folder / "data"]
    done = start([*command, *options], environment())
    assert done.returncode == 0, done.stderr
    return folder / "data"


def load_tool(name):
    """Return tools/NAME.py as a module."""
    return load_script(ROOT / "tools" / f"{name}.py")


@pytest.fixture(autouse=True)
def denormals():
    yield
    torch.set_flush_denormal(False)  # start_runtime sets it, as in training


@pytest.fixture
def default_dtype(request):
    """float64 for all that a test makes, unless it asks for float32 by the fixture of that name."""
    torch.set_default_dtype(torch.float32 if "float32" in request.fixturenames else torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def float32():
    """Real runs are in float32."""


@pytest.fixture(autouse=True)
def one_thread():
    """Workers share the cores, and sums have one order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def call(capsys):
    """Return a function: it runs a command line of quantize.py, or of convert.py, in this process.

    It returns the exit code, the output and what stands on stderr.
    """

    def run(*words, **changes):
        script = C if words[:1] in (("import",), ("export",)) else Q
        code = exit_code(script, *words, **changes)
        out, err = capsys.readouterr()
        is_line = out == "" and err.count("\n") == 1 and err.startswith("error: ")
        assert code == 0 or is_line, err
        return code, out, err

    return run


@pytest.fixture(scope="session")
def transformers():
    package = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("safetensors")
    package.utils.logging.set_verbosity_error()
    return package


@pytest.fixture(scope="module")
def remote_code(transformers, tmp_path_factory):
    """transformers copies code that it loads into a folder of these tests."""
    dynamic = importlib.import_module("transformers.dynamic_module_utils")
    with pytest.MonkeyPatch.context() as patch:
        folder = str(tmp_path_factory.mktemp("modules"))
        patch.setattr(dynamic, "HF_MODULES_CACHE", folder)
        patch.syspath_prepend(folder)
        for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
            patch.delitem(sys.modules, name)
        yield
