"""Whole scripts, tiny: data/prepare.py, train_gpt.py on one and two ranks, sample.py; what a run leaves and refuses."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, fields, replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

import train_gpt as T

ROOT = Path(__file__).resolve().parent
SCRIPT = ROOT / "train_gpt.py"
VOCAB = 400
FIELDS = {field.name: field for field in fields(T.Settings)}
TINY = {
    "DEVICE": "cpu", "DTYPE": "float32", "COMPILE": "0",
    "LAYER_PATTERN": "g s1 g s1", "MODEL_DIM": "32", "NUM_HEADS": "2",
    "NUM_KV_HEADS": "1", "ATTN_WINDOW": "16", "TRAIN_SEQ_LEN": "32", "TRAIN_BATCH_TOKENS": "512",
    "HOLDOUT_TOKENS": "1024", "EVAL_STRIDE": "0", "GPTQ_CALIBRATION_BATCHES": "2",
    "ITERATIONS": "30", "MAX_WALLCLOCK_SECONDS": "0", "RESERVE_SECONDS": "0",
}
# What processes need of the environment; a setting that the user exported must not reach a test.
KEPT = ("PATH", "HOME", "TMPDIR", "LANG", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV")

# Runs train_gpt.main() in each rank with additions: a log line for each step, other constants, the losses as exact
# numbers in FILE.<rank>; and the gradients of one rank become NaN at one step (-1: never).
DRIVER = '''
import os, sys
root, out, bad_rank, bad_step, *constants = sys.argv[1:]
sys.path.insert(0, root)
import train_gpt as T

rank, count_skipped, forward_backward = os.environ.get("RANK", "0"), T.Run.count_skipped, T.forward_backward

def recording(run, report):
    with open(f"{out}.{rank}", "a") as file:
        print(run.step - 1, repr(report.loss), file=file)
    count_skipped(run, report)

def poisoned(model, batches, step):
    loss = forward_backward(model, batches, step)
    if (rank, str(step)) == (bad_rank, bad_step):
        next(model.parameters()).grad.fill_(float("nan"))
    return loss

T.Run.count_skipped, T.forward_backward, T.LOG_SECONDS = recording, poisoned, 0.0
for constant in constants:
    name, value = constant.split("=")
    assert hasattr(T, name)
    setattr(T, name, float(value))
sys.argv = ["train_gpt.py"]
sys.exit(T.exit_code(T.main))
'''


def environment(**changes: object) -> dict[str, str]:
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    return {**kept, "OMP_NUM_THREADS": "1", **TINY, **{name: str(value) for name, value in changes.items()}}


# Forks a process for each line of its input, {"words", "env", "cwd", "given", "out", "err"}: a script with arguments,
# as `python SCRIPT …` runs it, but that torch is there already: to import it takes longer than most of these runs.
SERVER = """
import json, os, runpy, signal, sys
import numpy, sentencepiece, tiktoken, torch, torch._dynamo, torch.profiler

for line in sys.stdin:
    order = json.loads(line)
    child = os.fork()
    if child:
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    for number, name in enumerate(("given", "out", "err")):
        os.dup2(os.open(order[name], os.O_RDWR), number)
    signal.alarm(600)
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    sys.argv, sys.path[0] = order["words"], os.path.dirname(os.path.abspath(order["words"][0]))
    sys.stdin = open(0)
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.exit(0)
"""


@functools.cache
def server(threads: str) -> subprocess.Popen:
    """One for all tests of a worker, for torch asks for OMP_NUM_THREADS but once; it ends with its input."""
    return subprocess.Popen([sys.executable, "-c", SERVER], env=environment(OMP_NUM_THREADS=threads), text=True,
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def start(command: Iterable[object], environ: dict[str, str], cwd: Path | str = ".",
          given: str = "") -> subprocess.CompletedProcess:
    """What a command line of Python left: `-m` as a new process, a script as a fork of `server`."""
    words = list(map(str, command))
    if words[0] == "-m":
        return subprocess.run([sys.executable, *words], env=environ, capture_output=True, text=True, timeout=300,
                              cwd=cwd, input=given)
    with contextlib.ExitStack() as stack:
        files = {name: stack.enter_context(tempfile.NamedTemporaryFile("w+", encoding="utf-8"))
                 for name in ("given", "out", "err")}
        files["given"].write(given)
        files["given"].flush()
        names = {name: file.name for name, file in files.items()}
        order = dict(words=words, env=environ, cwd=str(Path(cwd).resolve()), **names)
        child = server(environ["OMP_NUM_THREADS"])
        try:
            child.stdin.write(json.dumps(order) + "\n")
            child.stdin.flush()
            code = int(child.stdout.readline())
        except BaseException:  # an answer that comes later would be taken for the next one's
            child.kill()
            server.cache_clear()
            raise
        assert code != -signal.SIGALRM, f"{words} ran for 600 s"
        return subprocess.CompletedProcess(words, code, *(Path(files[name].name).read_text(encoding="utf-8")
                                                          for name in ("out", "err")))


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `data`, 200 KB of random words prepared by data/prepare.py, and `driver.py`."""
    folder, rng = tmp_path_factory.mktemp("smoke"), random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 8))) for _ in range(120)]
    words += ["naïve", "größer", "日本", "🙂", "x\t=\t1", "  indented", "don't", "\r\n"]
    lines = [" ".join(rng.choices(words, k=rng.randint(4, 12))) for _ in range(4500)]
    documents = ["\n".join(lines[at : at + 10]) for at in range(0, len(lines), 10)]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    (folder / "driver.py").write_text(DRIVER)
    done = start([ROOT / "data" / "prepare.py", folder / "text.jsonl", "--out", folder / "data", "--vocab-size", VOCAB,
                  "--val-frac", 0.025, "--workers", 1], environment())
    assert done.returncode == 0, done.stderr
    return folder


def tiny(place: Path, out: str, **changes: object) -> dict[str, str]:
    """The environment of a run named "tiny" in the folder `out`."""
    return environment(DATA_PATH=place / "data", OUT_DIR=place / out, RUN_ID="tiny", **changes)


def train(place: Path, out: str, **changes: object) -> subprocess.CompletedProcess:
    """A run of the script as it is."""
    return start([SCRIPT], tiny(place, out, **changes))


def drive(place: Path, out: str, ranks: int = 1, bad: tuple[int, int] = (-1, -1), constants: str = "",
          **changes: object) -> subprocess.CompletedProcess:
    """A run under the driver: one process, or `ranks` gloo ranks of torchrun."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    words = [place / "driver.py", ROOT, place / out, *bad, *constants.split()]
    return start([*launcher, *words], tiny(place, out, **changes))


def asked(request: pytest.FixtureRequest, test: str, parameter: str) -> set[str]:
    """The values of a parameter for which pytest was asked to run a test: what others would need is not made."""
    return {item.callspec.params[parameter] for item in request.session.items
            if getattr(item, "originalname", "") == test}


def result_of(place: Path, out: str) -> dict:
    return json.loads((place / out / "tiny" / "result.json").read_text())


def log_of(place: Path, out: str) -> str:
    """The log behind the script's source and the rule."""
    text = (place / out / "tiny" / "log.txt").read_text(encoding="utf-8")
    return text.split("=" * 120 + "\n")[-1]


def artifact_of(place: Path, out: str) -> bytes:
    return (place / out / "tiny" / "model.upar").read_bytes()


@pytest.fixture(scope="session")
def first(place: Path) -> subprocess.CompletedProcess:
    """The run that most tests look at."""
    done = drive(place, "first", VAL_LOSS_EVERY=10, EVAL_STRIDE=16)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done


# ------------------------------------------------------------------------------------------------------- one whole run
def test_the_loss_falls_from_uniform(place, first):
    losses = [float(loss) for loss in re.findall(r"^step:\d+/30 train_loss:(\S+)", log_of(place, "first"), re.M)]
    assert len(losses) == 30
    assert losses[0] == pytest.approx(math.log(VOCAB), abs=0.02)  # weights that mean nothing yet: every token alike
    assert sum(losses[-5:]) / 5 < losses[0] - 1.5


def test_the_learning_rate_and_the_phases_follow_the_plan(place, first):
    """A warmdown over the last half to 0, and with 30 steps the first step beyond each share of the run."""
    rates = [float(rate) for rate in re.findall(r"lr_mul:(\S+)", log_of(place, "first"))]
    assert rates == pytest.approx([min(1.0, (30 - step) / 15) for step in range(1, 31)], abs=1e-4)
    expected = {"warmup": (0.0, 1, 1), "warmdown": (0.5, 16, 15), "ema": (0.5, 16, 15), "swa": (0.9, 28, 3),
                "qat": (0.85, 26, 5)}
    phases = result_of(place, "first")["phases"]
    assert {name: (phase["begin"], phase["start_step"], phase["steps"]) for name, phase in phases.items()} == expected


def test_the_log_has_its_parts_in_order(place, first):
    text = (place / "first" / "tiny" / "log.txt").read_text(encoding="utf-8")
    source = SCRIPT.read_text(encoding="utf-8")
    assert text.startswith(source + "\n" + "=" * 120 + "\ncommand: ")
    log = log_of(place, "first")
    settings = replace(T.Settings(), **result_of(place, "first")["settings"])
    table = [f"{' *'[value != getattr(T.Settings, name)]} {name.upper()}="
             f"{int(value) if isinstance(value, bool) else value}" for name, value in vars(settings).items()]
    names = ("warmup", "warmdown", "ema", "swa", "qat")
    parts = [
        "command: ", "\ncommit:", "\n".join(table), "\nparameters: ", "\ndata: text",
        *(f"\nplan: {name} from " for name in names), "\nbatch: 512 tokens", "\nset-up and warm-up: ",
        "\nphase: warmup begins at step 1", "\nstep:1/30 train_loss:", "\nstep:10/30 val_loss:",
        "\nphase: warmdown begins at step 16", "\nphase: qat begins at step 26", "\nphase: swa begins at step 28",
        "\nstep:30/30 train_loss:",
        *(f"\nweights: {name}" for name in ("raw", "ema", "swa")), " chosen\n",
        *(f"\nphase: {name:8s} planned " for name in names), "\nclock: ", "\nbefore quantization: val_",
        "\nfrom the artifact: val_", "\nfrom the artifact: sliding val_", "\n---\n",
    ]
    places = [log.find(part) for part in parts]
    assert -1 not in places, parts[places.index(-1)]
    assert places == sorted(places)
    assert log.count("\nphase: ") == 10 and "NEVER FIRED" not in log
    assert log.count(" val_loss:") == 5  # at steps 10 and 20; before and after packing, then sliding


def test_the_terminal_shows_the_log(place, first):
    assert first.stdout == log_of(place, "first")


def test_the_log_ends_with_the_result(place, first):
    result = result_of(place, "first")
    lines = log_of(place, "first").split("\n---\n")[1].splitlines()
    assert lines == [f"{key}: {value}" for key, value in result.items() if not isinstance(value, dict)]


def test_the_result_is_complete_and_consistent(place, first):
    result, run = result_of(place, "first"), place / "first" / "tiny"
    expected = set("""
        script run_id seed commit code_sha256 manifest_sha256 tokenizer_sha256 settings hardware versions world_size
        steps tokens train_seconds total_seconds peak_memory_mib params val_loss val_bpb val_bpb_sliding val_tokens
        val_bytes bytes_per_token before_quantization bigram_bpb trigram_bpb zstd22_bpb xz_bpb artifact artifact_sha256
        artifact_bytes code_bytes total_bytes phases events
    """.split())
    assert expected - set(result) == set()
    manifest = json.loads((place / "data" / "manifest.json").read_text())
    artifact = (run / "model.upar").read_bytes()
    settings = replace(T.Settings(), **{
        name.lower(): T.parse_setting(FIELDS[name.lower()], text)
        for name, text in {**TINY, "VAL_LOSS_EVERY": "10", "EVAL_STRIDE": "16"}.items()}, run_id="tiny",
        out_dir=str(place / "first"), data_path=str(place / "data"))
    exact = {
        "script": "train_gpt.py", "run_id": "tiny", "seed": 1337, "world_size": 1, "steps": 30, "tokens": 30 * 512,
        "settings": asdict(settings), "events": [], "artifact": str(run / "model.upar"),
        "code_sha256": hashlib.sha256(SCRIPT.read_bytes()).hexdigest(), "code_bytes": len(SCRIPT.read_bytes()),
        "manifest_sha256": hashlib.sha256((place / "data" / "manifest.json").read_bytes()).hexdigest(),
        "tokenizer_sha256": hashlib.sha256((run / "tokenizer.model").read_bytes()).hexdigest(),
        "artifact_sha256": hashlib.sha256(artifact).hexdigest(), "artifact_bytes": len(artifact),
        "total_bytes": len(artifact) + len(SCRIPT.read_bytes()),
        "val_bytes": manifest["val"]["decoded_bytes"], "val_tokens": manifest["val"]["tokens"] - 1,
    }
    assert {key: result[key] for key in exact} == exact
    assert sum(result["bytes_by_class"].values()) == len(artifact)
    assert result["val_bpb"] == pytest.approx(result["val_nats"] / math.log(2) / result["val_bytes"], rel=1e-12)
    assert result["val_loss"] == pytest.approx(result["val_nats"] / result["val_tokens"], rel=1e-12)
    assert result["bytes_per_token"] == pytest.approx(result["val_bytes"] / result["val_tokens"], rel=1e-12)
    before = result["before_quantization"]
    assert before["val_bpb"] / before["val_loss"] == pytest.approx(result["val_bpb"] / result["val_loss"], rel=1e-12)
    assert result["val_bpb"] == pytest.approx(before["val_bpb"], rel=0.05) and result["val_bpb"] != before["val_bpb"]
    assert 0 < result["train_seconds"] < result["total_seconds"]
    assert result["params"]["total"] == sum(count for name, count in result["params"].items() if name != "total")


def test_the_score_is_that_of_the_artifact_file(place, first):
    """The network is built here again from the file, and scored again, each window by itself."""
    header, tensors, _ = T.read_artifact(place / "first" / "tiny" / "model.upar")
    network = T.GPT(T.GPTConfig(**header["settings"]))
    network.load_state_dict(tensors)
    shard, = sorted((place / "data").glob("*_val_*.bin"))
    tokens = torch.from_numpy(np.fromfile(shard, dtype="<u2", offset=1024).astype(np.int64))
    nats = 0.0
    with torch.no_grad():
        for at in range(0, len(tokens) - 1, 32):
            part = tokens[at : at + 33]
            logits = network(part[None, :-1])[0].double()
            nats -= logits.log_softmax(-1).gather(1, part[1:, None]).sum().item()
    assert nats == pytest.approx(result_of(place, "first")["val_nats"], rel=1e-6)
    assert sum(param.numel() for param in network.parameters()) == result_of(place, "first")["params"]["total"]


def test_sample_writes_text_from_the_artifact(place, first):
    kept = {name: value for name, value in environment().items() if name not in TINY}
    asked = {"ARTIFACT": str(place / "first" / "tiny" / "model.upar"), "PROMPT": "größer 日本", "DEVICE": "cpu",
             "MAX_NEW_TOKENS": "30", "NUM_SAMPLES": "2"}
    done = start([ROOT / "sample.py"], {**kept, **asked})
    assert (done.returncode, done.stderr) == (0, "")
    before, *texts = done.stdout.split("größer 日本")
    assert before == "" and len(texts) >= 2 and texts[0] != texts[1]
    assert all(len(text.strip()) > 10 for text in texts[:2])


def test_sample_scores_text_as_the_run_did(place, first):
    """The validation documents as JSON lines give val_bpb and val_bpb_sliding of result.json, nats and bytes."""
    manifest, result = T.load_manifest(place / "data"), result_of(place, "first")
    tokenizer = T.load_tokenizer(place / "data" / manifest["tokenizer"]["file"])
    _, val = T.check_dataset(place / "data", tokenizer, manifest)
    tokens = val.read(0, len(val))
    with open(place / "val.jsonl", "w", encoding="utf-8") as file:
        for document in np.split(tokens, np.flatnonzero(tokens == tokenizer.bos_id))[1:]:
            text = b"".join(tokenizer.pieces[i] for i in document).decode()
            file.write(json.dumps({"text": text}) + "\n")
    kept = {name: value for name, value in environment().items() if name not in TINY}
    asked = {"MODE": "score", "SCORE_PATH": str(place / "val.jsonl"), "SCORE_FILE": str(place / "scores.json"),
             "ARTIFACT": str(place / "first" / "tiny"), "EVAL_STRIDE": "16", "DEVICE": "cpu"}
    done = start([ROOT / "sample.py"], {**kept, **asked})
    assert (done.returncode, done.stderr) == (0, "")
    [found] = json.loads((place / "scores.json").read_text())["scores"].values()
    assert (found["tokens"], found["bytes"]) == (result["val_tokens"], result["val_bytes"])
    assert found["source_bytes"] == found["bytes"] and found["documents"] == manifest["val"]["documents"]
    for own, name in (("bpb", "val_bpb"), ("bpb_sliding", "val_bpb_sliding"), ("nats", "val_nats")):
        assert found[own] == pytest.approx(result[name], rel=1e-6)


# ------------------------------------------------------------------------------------------------- the same run again
def test_the_artifact_is_the_same_to_the_byte(place, first):
    """By the script as a process of its own, with few lines in its log."""
    environ = tiny(place, "again", VAL_LOSS_EVERY=10, PYTHONHASHSEED=1)
    done = subprocess.run([sys.executable, SCRIPT], env=environ, capture_output=True, text=True)  # no fork of a server
    assert done.returncode == 0, done.stderr
    assert artifact_of(place, "again") == artifact_of(place, "first")
    assert result_of(place, "again")["val_nats"] == result_of(place, "first")["val_nats"]
    steps = re.findall(r"^step:(\d+)/30 train_loss:", log_of(place, "again"), re.M)
    assert steps[:5] == ["1", "2", "3", "4", "5"] and len(steps) < 10  # the first steps, then one in LOG_SECONDS


def test_warm_up_and_validations_change_nothing(place, first):
    """They leave weights, optimizer and data as they were."""
    done = drive(place, "cold", constants="WARMUP_STEPS=0", VAL_LOSS_EVERY=0)
    assert done.returncode == 0, done.stderr
    assert artifact_of(place, "cold") == artifact_of(place, "first")
    assert losses_of(place, "cold", 0) == losses_of(place, "first", 0)


def losses_of(place: Path, out: str, rank: int) -> list[float]:
    lines = (place / f"{out}.{rank}").read_text().splitlines()
    assert [int(line.split()[0]) for line in lines] == list(range(len(lines)))
    return [float(line.split()[1]) for line in lines]


def test_ranks_and_micro_batches_do_not_change_the_losses(place):
    """20 steps on 1 rank, on 1 rank in micro-steps of 2 windows, on 2 gloo ranks: float32 sums in another order.

    Within 1e-5 of a loss (measured: 4e-7) until the weights are quantized, from step 18 on; then within 2e-4 (measured:
    2e-5), since a weight on the edge between two int6 codes may fall to either side.
    """
    changes = {"ITERATIONS": 20, "GRAD_CLIP_NORM": 1}
    runs = {"one": (1, {}), "micro": (1, {"MICRO_BATCH_TOKENS": 64}), "two": (2, {})}
    for out, (ranks, more) in runs.items():
        done = drive(place, out, ranks, **changes, **more)
        assert done.returncode == 0, done.stderr
    losses = losses_of(place, "one", 0)
    assert len(losses) == 20 and losses[-1] < losses[0] - 1
    assert losses_of(place, "two", 0) == losses_of(place, "two", 1)  # all ranks agree
    for out in ("micro", "two"):
        others = losses_of(place, out, 0)
        assert others[:18] == pytest.approx(losses[:18], rel=1e-5)
        assert others == pytest.approx(losses, rel=2e-4)
        assert result_of(place, out)["val_nats"] == pytest.approx(result_of(place, "one")["val_nats"], rel=1e-4)
    batches = [re.search(r"^batch: .*", log_of(place, out), re.M).group() for out in runs]
    assert batches == ["batch: 512 tokens a step = " + shape for shape in (
        "1 ranks x 1 micro-steps x 16 windows x 32 tokens", "1 ranks x 8 micro-steps x 2 windows x 32 tokens",
        "2 ranks x 1 micro-steps x 8 windows x 32 tokens")]
    assert result_of(place, "two")["world_size"] == 2


# ------------------------------------------------------------------------------------------------------- every choice
CHOICES = {
    **{f"preset {mode}": dict(ARCH_MODE=mode, LAYER_PATTERN=None, NUM_LAYERS=layers, MODEL_DIM=32)
       for mode, layers in {"D": 12, "gdn": 3, "hybrid": 11, "baseline": 5, "llama": 2}.items()},
    **{f"mlp {kind}": dict(MLP=kind) for kind in ("leaky_relu2", "gelu", "swiglu", "bio", "bio_soft", "bio_hard")},
    **{f"norm {kind}": dict(NORM=kind) for kind in ("rms_weight", "layer", "rms layer")},
    **{f"positions {kind}": dict(POSITIONS=kind) for kind in ("learned", "none")},
    "partial rope, untied": dict(ROPE_DIMS=8, TIE_EMBEDDINGS=0), "no norm of queries": dict(QK_GAIN_INIT=0.0),
    "bigram": dict(BIGRAM_VOCAB_SIZE=64), "recurrence": dict(LAYER_PATTERN="A1 g A1"),
    **{f"dtype {kind}": dict(DTYPE=kind) for kind in ("bfloat16", "auto")},
    "checkpointing": dict(ACTIVATION_CHECKPOINTING=1),
    **{f"optimizer {kind}": dict(OPTIMIZER=kind, LR_SCHEDULE=schedule) for kind, schedule in dict(
        lion="cosine", adamw="wsd", adamw8bit="constant", adafactor="linear").items()},
    "clip": dict(GRAD_CLIP_NORM=0.5), "stateful": dict(EVAL_STATEFUL=1), "raw": dict(EMA=0, SWA=0, QAT=0),
}
# One process: importing torch for each choice would take longer than the runs.
EACH = """
import json, os, sys, traceback
sys.path.insert(0, sys.argv[1])
import train_gpt as T
kept = dict(os.environ)
choices = json.loads(sys.argv[2])
T.LOG_SECONDS = 0.0
sys.argv = ["train_gpt.py"]
for name, changes in choices.items():
    os.environ.clear()
    os.environ.update({key: value for key, value in kept.items() if key not in changes}, RUN_ID=name)
    os.environ.update({key: str(value) for key, value in changes.items() if value is not None})
    try:
        print("exit", name, T.exit_code(T.main))
    except Exception:
        traceback.print_exc()
"""


# Those whose like is run in tests/test_configs.py every day: ./test.sh full runs them here too.
LONG = ("preset D", "preset gdn", "preset hybrid", "preset baseline")


@pytest.fixture(scope="session")
def choices(place: Path, request: pytest.FixtureRequest) -> subprocess.CompletedProcess:
    (place / "each.py").write_text(EACH)
    names = asked(request, "test_every_choice_trains_and_packs", "choice")
    wanted = {name: changes for name, changes in CHOICES.items() if name in names}
    return start([place / "each.py", ROOT, json.dumps(wanted)], environment(
        DATA_PATH=place / "data", OUT_DIR=place / "choices", ITERATIONS=20, LAYER_PATTERN="g s"))


@pytest.mark.parametrize("choice", [
    pytest.param(name, marks=pytest.mark.full if name in LONG else ()) for name in CHOICES])
def test_every_choice_trains_and_packs(place, choices, choice):
    """20 steps lower the loss, and the artifact gives a score near that of the weights it was made of."""
    assert f"exit {choice} 0" in choices.stdout, choices.stderr[-2000:]
    folder = place / "choices" / choice
    log = (folder / "log.txt").read_text(encoding="utf-8")
    losses = [float(loss) for loss in re.findall(r"^step:\d+/20 train_loss:(\S+)", log, re.M)]
    assert len(losses) == 20 and losses[0] == pytest.approx(math.log(VOCAB), abs=0.1)
    assert sum(losses[-3:]) / 3 < losses[0] - 0.25
    result = json.loads((folder / "result.json").read_text())
    asked = {name.lower(): str(value) for name, value in CHOICES[choice].items() if value is not None}
    assert {name: str(int(value) if isinstance(value, bool) else value)
            for name, value in result["settings"].items() if name in asked} == asked
    assert result["val_bpb"] == pytest.approx(result["before_quantization"]["val_bpb"], rel=0.03)


# ------------------------------------------------------------------------------------------------------ against a clock
def test_every_phase_fires_under_a_clock_that_cuts_the_run(place):
    """ITERATIONS=9999 WARMDOWN_ITERS=3000 and seconds for some hundred steps: in the field nothing fired."""
    done = drive(place, "clock", MAX_WALLCLOCK_SECONDS=8, RESERVE_SECONDS=1, ITERATIONS=9999, WARMDOWN_ITERS=3000)
    assert done.returncode == 0, done.stderr
    result = result_of(place, "clock")
    assert result["train_seconds"] <= 8 + 2  # a busy machine may stretch the last step
    assert 10 < result["steps"] < 9999
    assert result["phases"]["warmdown"]["begin"] == pytest.approx(1 - 3000 / 9999)
    assert set(result["phases"]) == {"warmup", "warmdown", "ema", "swa", "qat"}
    for name, phase in result["phases"].items():
        assert phase["steps"] > 0, name
        assert phase["start_progress"] >= phase["begin"]
        assert phase["start_step"] + phase["steps"] == result["steps"] + 1 or name == "warmup"
    rates = [float(rate) for rate in re.findall(r"lr_mul:(\S+)", log_of(place, "clock"))]
    assert max(rates) == 1.0 and rates[-1] < 0.1


def test_every_phase_fires_in_the_shortest_useful_run(place):
    """Two seconds of training, which no step count limits."""
    done = drive(place, "short clock", ITERATIONS=0, MAX_WALLCLOCK_SECONDS=3, RESERVE_SECONDS=1)
    assert done.returncode == 0, done.stderr
    assert "NEVER FIRED" not in done.stdout
    phases = result_of(place, "short clock")["phases"]
    assert sorted(phases) == ["ema", "qat", "swa", "warmdown", "warmup"]
    assert all(phase["steps"] > 0 for phase in phases.values())


def test_a_run_ends_at_the_validation_that_reaches_the_target(place):
    """The event says after how many steps and seconds. Phases that were still to come are no fault."""
    target = 5.5
    done = drive(place, "target", VAL_LOSS_EVERY=4, TARGET_VAL_LOSS=target, ITERATIONS=60)
    assert done.returncode == 0, done.stderr
    losses = dict(re.findall(r"^step:(\d+)/60 val_loss:(\S+)", log_of(place, "target"), re.M))
    *earlier, last = [float(loss) for loss in losses.values()]
    assert last <= target and all(loss > target for loss in earlier)
    result = result_of(place, "target")
    assert result["steps"] == int(list(losses)[-1]) < 30
    [event] = result["events"]
    assert (event["event"], event["step"]) == ("target_reached", result["steps"])
    assert 0 < event["seconds"] <= result["train_seconds"]
    assert "qat" not in result["phases"]  # it holds those that began


def test_without_a_target_reached_the_run_goes_on(place):
    done = drive(place, "far target", VAL_LOSS_EVERY=4, TARGET_VAL_LOSS=0.1, ITERATIONS=8)
    assert done.returncode == 0, done.stderr
    result = result_of(place, "far target")
    assert (result["steps"], result["events"]) == (8, [])


def test_a_reserve_that_is_too_short_leaves_out_averages_and_gptq(place):
    """Two seconds of training and nothing to choose weights in: raw weights, nearest codes, and the events say so."""
    done = drive(place, "no reserve", ITERATIONS=0, MAX_WALLCLOCK_SECONDS=2, RESERVE_SECONDS=0)
    assert done.returncode == 0, done.stderr
    result = result_of(place, "no reserve")
    assert result["weights"] == "raw"
    events = [event["event"] for event in result["events"]]
    assert events == ["weights_left_out", "weights_left_out", "gptq_out_of_time", "over_clock"]
    assert [event["weights"] for event in result["events"][:2]] == ["ema", "swa"]
    assert "\ncodes: nearest chosen\n" in log_of(place, "no reserve")


HEAVY = "warning: .* configs/cpu.env is made for CPUs"


def test_a_model_that_is_heavy_for_a_cpu_is_a_warning(place, first):
    """Here every model counts as heavy. The default settings do by themselves, and configs/cpu.env does not."""
    done = drive(place, "heavy", constants="HEAVY_FOR_CPU=0", ITERATIONS=2)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(HEAVY, done.stdout)) == 1 and not re.search(HEAVY, first.stdout)
    for config, is_heavy in (({}, True), ({"CONFIG": str(ROOT / "configs" / "cpu.env")}, False)):
        settings = T.load_settings(T.Settings, config)
        with torch.device("meta"):
            network = T.GPT(T.model_config(settings, 1024, 1))
        work = T.count_parameters(network)["total"] * settings.train_batch_tokens
        assert (work > T.HEAVY_FOR_CPU) == is_heavy


def error_lines(place: Path, out: str) -> list[str]:
    return [line for line in log_of(place, out).splitlines() if line.startswith("error: ")]


def test_a_run_too_short_for_its_phases_fails_and_names_them(place):
    """A millisecond: two steps, which begin before the time of any step is known, at 0% of the run."""
    done = train(place, "short", ITERATIONS=0, MAX_WALLCLOCK_SECONDS=0.002, RESERVE_SECONDS=0.001)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert error_lines(place, "short") == [f"error: phase {name} was enabled and never fired; everything was saved"
                                           for name in ("warmup", "warmdown", "ema", "swa", "qat")]
    result = result_of(place, "short")
    assert "qat" not in result["phases"] and result["steps"] == 2
    assert hashlib.sha256(artifact_of(place, "short")).hexdigest() == result["artifact_sha256"]


def test_too_large_an_artifact_fails_and_is_saved(place):
    """The script alone has more than 1,000 bytes; the config counts as code."""
    config = place / "small.env"
    config.write_text("# a cap\nARTIFACT_BYTES_MAX=1000\n")
    done = train(place, "large", CONFIG=config, ITERATIONS=8)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    result = result_of(place, "large")
    line, = error_lines(place, "large")
    assert line.startswith(f"error: {result['total_bytes']} bytes ") and "exceed ARTIFACT_BYTES_MAX;" in line
    assert result["code_bytes"] == len(SCRIPT.read_bytes()) + len(config.read_bytes())
    assert result["total_bytes"] == result["code_bytes"] + len(artifact_of(place, "large"))


# ------------------------------------------------------------------------------------------------------------ failures
def test_a_loss_that_is_not_finite_stops_the_run(place):
    """After ten steps in a row; a single one is skipped."""
    done = train(place, "infinite", SCALAR_LR="1e30", WARMUP_FRAC=0)
    assert done.returncode == 1
    line = r"error: 10 steps in a row had a loss or gradient that is not finite; the last checkpoint of .* is good\n"
    assert re.fullmatch(line, done.stderr), done.stderr
    assert not (place / "infinite" / "tiny" / "result.json").exists()


def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_by_all(place):
    done = drive(place, "poisoned", 2, bad=(1, 3), ITERATIONS=20)
    assert done.returncode == 0, done.stderr
    losses = losses_of(place, "poisoned", 0)
    assert losses == losses_of(place, "poisoned", 1) and len(losses) == 20
    assert losses[-1] < losses[0] - 1
    result = result_of(place, "poisoned")
    assert result["skipped_steps"] == 1
    assert result["events"] == [{"event": "skipped_step", "step": 4, "loss": str(losses[3])}]


def test_a_misspelt_setting_is_one_line_and_exit_code_2(place):
    done = train(place, "misspelt", ITERATONS=5)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"error: ITERATONS='5': .*did you mean ITERATIONS\?.*\n", done.stderr), done.stderr
    assert not (place / "misspelt").exists()


@pytest.fixture
def copied(place, tmp_path) -> Path:
    """A copy of the data to spoil."""
    return shutil.copytree(place / "data", tmp_path / "data")


def shorten(folder: Path, split: str) -> None:
    path, = folder.glob(f"*_{split}_*.bin")
    path.write_bytes(path.read_bytes()[:-2])


def add(folder: Path, split: str, key: str, count: int) -> None:
    """Change a number of the manifest."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest[split][key] += count
    (folder / "manifest.json").write_text(json.dumps(manifest))


def swap_token(folder: Path) -> None:
    path, = folder.glob("*_val_*.bin")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def leave(folder: Path) -> None:
    """The data stays as it is: the mistake is in the settings."""


MISTAKES = {
    "misspelt setting": (leave, {"ITERATONS": 5}, "ITERATONS='5'.*did you mean ITERATIONS"),
    "another script's setting": (leave, {"PROMPT": "hello"}, "PROMPT='hello'.*setting of this script"),
    "wrong type": (leave, {"ITERATIONS": "ten"}, "ITERATIONS='ten': must be a whole number"),
    "out of range": (leave, {"MATRIX_BITS": 9}, "MATRIX_BITS=9: must be a whole number from 2 to 8"),
    "missing config": (leave, {"CONFIG": "none.env"}, "CONFIG='none.env': no such file"),
    "missing data": (shutil.rmtree, {}, "data/manifest.json: no manifest of format 1.*data/prepare.py"),
    "missing shard": (lambda folder: next(folder.glob("*_train_*.bin")).unlink(), {}, "train_000000.bin: no such file"),
    "truncated training shard": (lambda folder: shorten(folder, "train"), {}, "train_000000.bin: truncated or "),
    "truncated validation shard": (lambda folder: shorten(folder, "val"), {}, "val_000000.bin: truncated or "),
    "changed validation shard": (swap_token, {}, "_val_000000.bin: its SHA-256 is not"),
    "another tokenizer": (leave, {"TOKENIZER_PATH": "bytes"}, "manifest.json: shards of another tokenizer"),
    "missing tokenizer": (leave, {"TOKENIZER_PATH": "none.model"}, "none.model: .*; must be a SentencePiece model"),
    "vocabulary": (leave, {"VOCAB_SIZE": 1024}, f"VOCAB_SIZE=1024: must be 0 or {VOCAB}"),
    "one byte more": (lambda folder: add(folder, "val", "decoded_bytes", 1), {}, "bytes.*manifest.json"),
    "one byte fewer": (lambda folder: add(folder, "val", "decoded_bytes", -1), {}, "bytes.*manifest.json"),
    "one token more": (lambda folder: add(folder, "train", "tokens", 1), {}, "number of tokens than the shards"),
    "no holdout": (leave, {"HOLDOUT_TOKENS": 0}, "HOLDOUT_TOKENS"),
    "holdout of everything": (leave, {"HOLDOUT_TOKENS": 10**8}, "HOLDOUT_TOKENS=100000000: must leave a window"),
    "uneven batch": (leave, {"TRAIN_BATCH_TOKENS": 500}, "TRAIN_BATCH_TOKENS=500: must be a multiple of .*32"),
    "endless run": (leave, {"ITERATIONS": 0}, "ITERATIONS=0 and MAX_WALLCLOCK_SECONDS=0: set one, or it never ends"),
    "shape": (leave, {"NUM_HEADS": 3}, "MODEL_DIM=32: must be a multiple"),
    "layers": (leave, {"LAYER_PATTERN": "g x"}, "LAYER_PATTERN='g x': each word must be"),
}


def refused(environ: dict[str, str], capsys: pytest.CaptureFixture, expected: int = 2) -> str:
    """The one line on stderr with which main() ends in this exit code; any other end fails the test."""
    try:
        with mock.patch.dict(os.environ, environ, clear=True), mock.patch.object(sys, "argv", ["train_gpt.py"]):
            code = T.exit_code(T.main)
    finally:
        torch.set_flush_denormal(False)  # the runtime sets it for the process
    shown = capsys.readouterr()
    assert code == expected, shown
    assert shown.out == ""
    assert re.fullmatch(r"error: .+\n", shown.err), shown.err
    return shown.err


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_before_anything_is_written(name, copied, tmp_path, capsys):
    """In this process: main() is what the script runs, and starting it 26 times would take minutes."""
    spoil, changes, said = MISTAKES[name]
    spoil(copied)
    line = refused(environment(DATA_PATH=copied, OUT_DIR=tmp_path / "runs", **changes), capsys)
    assert re.search(said, line), line
    assert not (tmp_path / "runs").exists()


def test_an_out_dir_that_cannot_be_written(copied, tmp_path, capsys):
    (tmp_path / "runs").write_text("a file")
    line = refused(environment(DATA_PATH=copied, OUT_DIR=tmp_path / "runs"), capsys, 1)
    assert line.startswith(f"error: [Errno 20] Not a directory: '{tmp_path}/runs/run_")
    assert (tmp_path / "runs").read_text() == "a file"


def test_an_existing_run_is_not_overwritten(place, first, capsys):
    before = {path: path.read_bytes() for path in (place / "first" / "tiny").rglob("*") if path.is_file()}
    line = refused(environment(DATA_PATH=place / "data", OUT_DIR=place / "first", RUN_ID="tiny"), capsys)
    assert line.startswith("error: RUN_ID='tiny': ") and "must be a plain name that does not exist in" in line
    assert {path: path.read_bytes() for path in (place / "first" / "tiny").rglob("*") if path.is_file()} == before
    assert [path.name for path in (place / "first").iterdir()] == ["tiny"]
