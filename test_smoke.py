"""Whole runs, tiny: data/prepare.py, train_gpt.py on one and two ranks, sample.py; what a run
leaves and refuses.
"""

import ast
import hashlib
import json
import math
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, fields, replace

import numpy as np
import pytest

import train_dpo as D
import train_gpt as T
from conftest import ROOT, TICKS, TINY, Place, environment, exit_code, start

SCRIPT = ROOT / "train_gpt.py"
FIELDS = {field.name: field for field in fields(T.Settings)}
PHASES = ("warmup", "warmdown", "ema", "swa", "qat")
# A patch: the exact losses of all steps, in OUT_DIR.<rank>.
EXACT = """
import os
count_skipped = T.count_skipped
def recording(run, report):
    with open(os.environ["OUT_DIR"] + "." + os.environ.get("RANK", "0"), "a") as file:
        print(repr(report.loss), file=file)
    count_skipped(run, report)
T.count_skipped = recording
"""
# A patch: what each step trains and what it leaves, in OUT_DIR.steps.
STEPS = """
import os, torch
facts = {}
forward_backward, step, send_report = T.forward_backward, T.step_optimizers, T.Clock.send_report
def watched_forward(model, batches, number):
    facts["kinds"] = len(model.mixers[0].w_o.unique())  # of numbers in a matrix
    return forward_backward(model, batches, number)
def watched_step(optimizers, *given):
    facts["momentum"] = optimizers[0].param_groups[0]["momentum"]
    step(optimizers, *given)
averages = []
init = T.Average.__init__
def watched_init(self, params, memory=None):
    init(self, params, memory)
    averages.append(self)
T.Average.__init__ = watched_init
def watched_report(self, *given):
    facts["weights"] = float(averages[1].params[0].sum())
    facts["swa"] = float(averages[1].values[0].sum()) if averages[1].count else None
    with open(os.environ["OUT_DIR"] + ".steps", "a") as file:
        print(facts, file=file)
    send_report(self, *given)
T.forward_backward, T.step_optimizers, T.Clock.send_report = (
    watched_forward, watched_step, watched_report
)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_data):
    return Place(tmp_path_factory.mktemp("smoke"), tiny_data, TINY)


@pytest.fixture(scope="module")
def first(place):
    """Return the run that most tests look at."""
    return place.run("first", EXACT + STEPS, VAL_LOSS_EVERY=10, EVAL_STRIDE=16)


def exact_losses(place, out, rank=0):
    return [float(line) for line in (place.folder / f"{out}.{rank}").read_text().split()]


# ----------------------------------------------------------------------------------- one whole run
def test_loss_rate_and_phases_of_a_run(place, first):
    """The loss falls from that of uniform weights; phases begin beyond their share of 30 steps."""
    losses = list(place.logged("first", "train_loss").values())
    assert len(losses) == 30 and losses[0] == pytest.approx(math.log(400), abs=0.02)
    assert sum(losses[-5:]) / 5 < losses[0] - 1.5
    # A warmdown over the last half, in which no step has a rate of 0.
    rates = [min(1.0, (31 - step) / 15) for step in range(1, 31)]
    assert list(place.logged("first", "lr_mul").values()) == pytest.approx(rates, abs=1e-4)
    assert min(place.logged("first", "grad_norm").values()) > 0
    expected = zip(PHASES, (0.0, 0.5, 0.85, 0.9, 0.85), (1, 16, 26, 28, 26), strict=True)
    phases = place.result("first")["phases"]
    for name, begin, step in expected:
        phase = phases.pop(name)
        steps = 1 if name == "warmup" else 31 - step
        assert (phase["begin"], phase["start_step"], phase["steps"]) == (begin, step, steps), name
    assert not phases


def test_what_each_step_trains_and_averages(place, first):
    """QAT rounds the weights of the forward pass from step 26 on; momentum rises at the start;
    SWA is the mean of the weights after steps 28, 29 and 30.
    """
    lines = (place.folder / "first.steps").read_text().splitlines()[-30:]
    steps = [ast.literal_eval(line) for line in lines]
    assert all(facts["kinds"] > 63 for facts in steps[1:25])  # it begins with zeros
    assert all(facts["kinds"] <= 63 for facts in steps[25:])
    warm = [min(1.0, (step + 1) / 30 / T.MUON_WARMUP_FRAC) for step in range(30)]
    start = T.MUON_MOMENTUM_START
    expected = [start + share * (T.MUON_MOMENTUM - start) for share in warm]
    assert [facts["momentum"] for facts in steps] == pytest.approx(expected, abs=1e-9)
    mean = sum(facts["weights"] for facts in steps[27:]) / 3
    assert steps[26]["swa"] is None and steps[29]["swa"] == pytest.approx(mean, rel=1e-4, abs=1e-3)


def test_the_log_has_its_parts_in_order(place, first):
    text = (place.of("first") / "log.txt").read_text(encoding="utf-8")
    assert text.startswith(SCRIPT.read_text(encoding="utf-8") + "\n" + "=" * 120 + "\ncommand: ")
    log = text.split("=" * 120 + "\n")[-1]
    parts = ["command: ", "\ncommit:", "\n* RUN_ID=run\n", "\nparameters: ", "\ndata: text"]
    parts += [f"\nplan: {name} from " for name in PHASES]
    parts += ["\nbatch: 1 micro-steps of 16 windows on each rank\n"]
    parts += [
        "\nphase: warmup begins at step 1",
        "\nstep:1/30 train_loss:",
        "\nstep:10/30 val_loss:",
    ]
    parts += ["\nphase: warmdown begins at step 16", "\nphase: qat begins at step 26"]
    parts += ["\nstep:30/30 train_loss:", "of the run, begun at step 1, on for 1 steps\n"]
    parts += ["\nweights: raw", "\nweights: ema", "\nweights: swa"]
    parts += ["\nbefore quantization: val_", "\nfrom the artifact: val_"]
    parts += ["\nfrom the artifact: sliding val_", "\n---\n"]
    places = [log.find(part) for part in parts]
    assert -1 not in places, parts[places.index(-1)]
    assert places == sorted(places)
    assert log.count(" val_loss:") == 5  # steps 10 and 20; before and after packing; sliding
    assert first.out == log  # the terminal shows the log
    result = place.result("first")
    end = [f"{key}: {value}" for key, value in result.items() if not isinstance(value, dict)]
    assert log.split("\n---\n")[1].splitlines() == end


def test_the_result_is_complete_and_consistent(place, first):
    result = place.result("first")
    names = """hardware versions train_seconds total_seconds peak_memory_mib params val_loss val_bpb
        val_bpb_sliding bytes_per_token before_quantization bigram_bpb trigram_bpb zstd22_bpb xz_bpb
        phases commit"""
    assert set(names.split()) - set(result) == set()
    manifest_bytes = (place.data / "manifest.json").read_bytes()
    manifest = json.loads(manifest_bytes)
    artifact = place.artifact("first")
    source = SCRIPT.read_bytes()
    tokenizer = (place.of("first") / "tokenizer.model").read_bytes()
    environ = place.environment("first", VAL_LOSS_EVERY=10, EVAL_STRIDE=16)
    given = {name.lower(): text for name, text in environ.items() if name.lower() in FIELDS}
    given = {name: T.parse_setting(FIELDS[name], text) for name, text in given.items()}
    exact = {
        "script": "train_gpt.py",
        "run_id": "run",
        "seed": 1337,
        "world_size": 1,
        "steps": 30,
        "tokens": 30 * 512,
        "settings": asdict(replace(T.Settings(), **given)),
        "events": [],
        "artifact": str(place.of("first") / "model.upar"),
        "code_sha256": hashlib.sha256(source).hexdigest(),
        "code_bytes": len(source),
        "manifest_sha256": hashlib.sha256(manifest_bytes).hexdigest(),
        "tokenizer_sha256": hashlib.sha256(tokenizer).hexdigest(),
        "artifact_sha256": hashlib.sha256(artifact).hexdigest(),
        "artifact_bytes": len(artifact),
        "total_bytes": len(artifact) + len(source),
        "val_bytes": manifest["val"]["decoded_bytes"],
        "val_tokens": manifest["val"]["tokens"] - 1,
    }
    assert {key: result[key] for key in exact} == exact
    nats = result["val_nats"]
    ratios = {
        "val_bpb": nats / math.log(2) / result["val_bytes"],
        "val_loss": nats / result["val_tokens"],
        "bytes_per_token": result["val_bytes"] / result["val_tokens"],
    }
    assert {key: result[key] for key in ratios} == pytest.approx(ratios, rel=1e-12)
    before = result["before_quantization"]
    ratio = result["val_bpb"] / result["val_loss"]
    assert before["val_bpb"] / before["val_loss"] == pytest.approx(ratio, rel=1e-12)
    assert 0 < abs(result["val_bpb"] / before["val_bpb"] - 1) < 0.05
    assert 0 < result["train_seconds"] < result["total_seconds"]
    total = result["params"].pop("total")
    assert total == sum(result["params"].values())


def sample(**settings):
    """Return what sample.py prints."""
    done = start([ROOT / "sample.py"], environment(**settings))
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_sample_writes_text_from_the_artifact(place, first):
    asked = dict(PROMPT="größer 日本", MAX_NEW_TOKENS=30, NUM_SAMPLES=2)
    before, *texts = sample(ARTIFACT=place.of("first") / "model.upar", **asked).split("größer 日本")
    assert before == "" and len(texts) >= 2 and texts[0] != texts[1]
    assert all(len(text.strip()) > 10 for text in texts[:2])


def test_sample_scores_text_as_the_run_did(place, first):
    """The validation documents as JSON lines give the scores of result.json, nats and bytes."""
    manifest = T.load_manifest(place.data)
    facts = manifest["tokenizer"]
    tokenizer = D.load_tokenizer(place.data / facts["file"])
    _, val = T.check_dataset(place.data, manifest)
    tokens = val.read(0, len(val))
    documents = np.split(tokens, np.flatnonzero(tokens == tokenizer.bos_id))[1:]
    texts = [b"".join(tokenizer.pieces[i] for i in ids).decode() for ids in documents]
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    (place.folder / "val.jsonl").write_text("".join(lines), encoding="utf-8")
    paths = dict(SCORE_PATH=place.folder / "val.jsonl", SCORE_FILE=place.folder / "scores.json")
    sample(MODE="score", ARTIFACT=place.of("first"), EVAL_STRIDE=16, **paths)
    result = place.result("first")
    [found] = json.loads((place.folder / "scores.json").read_text())["scores"].values()
    assert (found["tokens"], found["bytes"]) == (result["val_tokens"], result["val_bytes"])
    assert found["source_bytes"] == found["bytes"] and found["documents"] == len(documents)
    for ours, name in (
        ("bpb", "val_bpb"),
        ("bpb_sliding", "val_bpb_sliding"),
        ("nats", "val_nats"),
    ):
        assert found[ours] == pytest.approx(result[name], rel=1e-6)


# ------------------------------------------------------------------------------- the same run again
def test_the_artifact_is_the_same_to_the_byte(place, first):
    """By the script as a process of its own; with a warm-up and without validations.

    They leave weights, optimizer and data as they were. The log has few lines.
    """
    environ = place.environment("again", PYTHONHASHSEED=1)
    done = subprocess.run([sys.executable, SCRIPT], env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert place.artifact("again") == place.artifact("first")
    assert place.result("again")["val_nats"] == place.result("first")["val_nats"]
    steps = list(place.logged("again", "train_loss"))
    assert steps[:5] == [1, 2, 3, 4, 5] and len(steps) < 30  # the first; then one in LOG_SECONDS


def test_ranks_and_micro_batches_do_not_change_the_losses(place):
    """One rank, one in micro-steps of 2 windows, two gloo ranks: float32 sums in another order.

    Within 1e-5 of a loss until the weights are quantized, from step 11 on; then
    within 2e-4 (measured: 2e-5): a weight at the edge of two codes may fall to either side.
    """
    changes = dict(ITERATIONS=12, GRAD_CLIP_NORM=1)
    place.run("one", EXACT, **changes)
    place.run("micro", EXACT, MICRO_BATCH_TOKENS=64, **changes)
    place.ranks("two", EXACT, **changes)
    losses = exact_losses(place, "one")
    assert len(losses) == 12 and losses[-1] < losses[0] - 1
    assert exact_losses(place, "two") == exact_losses(place, "two", rank=1)
    nats = place.result("one")["val_nats"]
    for out, shape in (
        ("micro", "8 micro-steps of 2"),
        ("two", "1 micro-steps of 8"),
    ):
        others = exact_losses(place, out)
        assert others[:10] == pytest.approx(losses[:10], rel=1e-5)
        assert others == pytest.approx(losses, rel=2e-4)
        assert place.result(out)["val_nats"] == pytest.approx(nats, rel=1e-4)
        line = f"\nbatch: {shape} windows on each rank\n"
        assert line in place.log(out)
    assert place.result("two")["world_size"] == 2


# ------------------------------------------------------------------------------------ every choice
# Together they have every value of the settings of model and optimizer, each of which has its own
# test in test_family.py and test_optimizer.py.
CHOICES = [
    dict(MLP="bio", NORM="rms_weight", POSITIONS="learned", OPTIMIZER="lion", LR_SCHEDULE="cosine"),
    dict(MLP="bio_soft", NORM="layer", POSITIONS="none", OPTIMIZER="adamw", LR_SCHEDULE="wsd"),
    dict(MLP="relu2", NORM="rms layer", ROPE_DIMS=8, TIE_EMBEDDINGS=0, OPTIMIZER="adafactor"),
    dict(MLP="leaky_relu2", QK_GAIN_INIT=0.0, OPTIMIZER="adamw8bit", LR_SCHEDULE="constant"),
    dict(MLP="gelu", BIGRAM_VOCAB_SIZE=64, DTYPE="bfloat16", ACTIVATION_CHECKPOINTING=1),
    dict(MLP="swiglu", LAYER_PATTERN="A1 g A1", GRAD_CLIP_NORM=0.5, EVAL_STATEFUL=1, DTYPE="auto"),
    dict(ARCH_MODE="llama", NUM_LAYERS=2, LAYER_PATTERN=None, EMA=0, SWA=0, QAT=0),
]


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: next(iter(choice.values())))
def test_every_choice_trains_and_packs(place, choice):
    """20 steps lower the loss, and the artifact scores near the weights that it was made of."""
    out = next(iter(choice.values()))
    place.run(out, **{"LAYER_PATTERN": "g s", "ITERATIONS": 20, **choice})
    losses = list(place.logged(out, "train_loss").values())
    assert len(losses) == 20 and losses[0] == pytest.approx(math.log(400), abs=0.1)
    assert sum(losses[-3:]) / 3 < losses[0] - 0.25
    result = place.result(out)
    for name, value in choice.items():
        assert value is None or result["settings"][name.lower()] == value, name
    assert result["val_bpb"] == pytest.approx(result["before_quantization"]["val_bpb"], rel=0.03)


# ---------------------------------------------------------------------------------- against a clock
def test_every_phase_fires_under_a_clock_that_cuts_the_run(place):
    """ITERATIONS=9999 WARMDOWN_ITERS=3000, 40 steps by the clock: in the field nothing fired."""
    clock = dict(MAX_WALLCLOCK_SECONDS=3, RESERVE_SECONDS=1)
    place.run("clock", TICKS, ITERATIONS=9999, WARMDOWN_ITERS=3000, **clock)
    result = place.result("clock")
    assert 1.9 < result["train_seconds"] < 2.1 and 30 < result["steps"] < 50
    assert result["phases"]["warmdown"]["begin"] == pytest.approx(1 - 3000 / 9999)
    assert set(result["phases"]) == set(PHASES)
    for name, phase in result["phases"].items():
        assert phase["steps"] > 0 and phase["start_progress"] >= phase["begin"], name
        assert phase["start_step"] + phase["steps"] == result["steps"] + 1 or name == "warmup"
    rates = list(place.logged("clock", "lr_mul").values())
    assert max(rates) == 1.0 and rates[-1] < 0.1


def test_a_reserve_that_is_too_short_leaves_out_averages(place):
    """Scoring takes a second of none: raw weights, and the events say so."""
    slow = """
score = T.Scorer.score
def slow(*arguments):
    Tick.seconds += 1
    return score(*arguments)
T.Scorer.score = slow
"""
    clock = dict(ITERATIONS=0, MAX_WALLCLOCK_SECONDS=2, RESERVE_SECONDS=0)
    place.run("no reserve", TICKS + slow, **clock)
    result = place.result("no reserve")
    events = ["weights_left_out", "weights_left_out", "over_clock"]
    assert [event["event"] for event in result["events"]] == events
    assert [event["weights"] for event in result["events"][:2]] == ["ema", "swa"]
    assert result["weights"] == "raw"
    place.run("replay", **{**place.unset, "REPLAY": place.of("no reserve")})
    assert place.result("replay")["weights"] == "raw"
    assert place.result("replay")["events"] == result["events"][:2]


def error_lines(place, out):
    return re.findall(r"^error: .*", place.log(out), re.M)


def test_a_run_too_short_for_its_phases_fails_and_names_them(place):
    """A step or two, which begin before the time of any step is known, at 0% of the run."""
    clock = dict(ITERATIONS=0, MAX_WALLCLOCK_SECONDS=0.002, RESERVE_SECONDS=0.001)
    child = place.run("short", code=1, **clock)
    assert "configs/cpu.env is made for CPUs" in child.out
    line = "error: phase {} was enabled and never fired; everything was saved"
    assert sorted(error_lines(place, "short")) == sorted(map(line.format, PHASES))
    result = place.result("short")
    assert "qat" not in result["phases"] and result["steps"] in (1, 2)
    assert hashlib.sha256(place.artifact("short")).hexdigest() == result["artifact_sha256"]


def test_too_large_an_artifact_fails_and_is_saved(place):
    """The artifact itself is below the limit; script and config count, too."""
    config = place.folder / "small.env"
    cap = len(SCRIPT.read_bytes()) + 1000
    config.write_text(f"# a cap\nARTIFACT_BYTES_MAX={cap}\n")
    child = place.run("large", code=1, CONFIG=config, ITERATIONS=8)
    assert "configs/cpu.env is made for CPUs" not in child.out
    result = place.result("large")
    (line,) = error_lines(place, "large")
    assert line == "error: code and artifact exceed ARTIFACT_BYTES_MAX; everything was saved"
    assert result["code_bytes"] == len(SCRIPT.read_bytes()) + len(config.read_bytes())
    assert result["total_bytes"] == result["code_bytes"] + len(place.artifact("large"))


# ----------------------------------------------------------------------------------------- refusals
def shorten(split):
    def spoil(folder):
        (path,) = folder.glob(f"*_{split}_*.bin")
        path.write_bytes(path.read_bytes()[:-2])

    return spoil


def add(split, key, count):
    """Return a function that changes a number of a folder's manifest."""

    def spoil(folder):
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest[split][key] += count
        (folder / "manifest.json").write_text(json.dumps(manifest))

    return spoil


def swap_token(folder):
    (path,) = folder.glob("*_val_*.bin")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def remove_shard(folder):
    next(folder.glob("*_train_*.bin")).unlink()


# What is wrong, and what the one line of the error says.
MISTAKES = [
    ({"ITERATONS": 5}, "ITERATONS='5'.*did you mean ITERATIONS"),
    ({"PROMPT": "hello"}, "PROMPT='hello'.*setting of this script"),
    ({"ITERATIONS": "ten"}, "ITERATIONS='ten': must be a whole number"),
    ({"MATRIX_BITS": 9}, "MATRIX_BITS=9: must be a whole number from 2 to 8"),
    ({"CONFIG": "none.env"}, "CONFIG='none.env': must be a file of text in UTF-8"),
    (shutil.rmtree, "data/manifest.json: .Errno 2. No such file .*data/prepare.py"),
    (remove_shard, "train_000000.bin: no such file"),
    (shorten("train"), "train_000000.bin: truncated, damaged or "),
    (shorten("val"), "val_000000.bin: truncated, damaged or "),
    (swap_token, "_val_000000.bin: its SHA-256 is not"),
    (
        {"TOKENIZER_PATH": "bytes"},
        "bytes: missing, or its SHA-256 is not .* must be the tokenizer of",
    ),
    (
        {"TOKENIZER_PATH": "none.model"},
        "none.model: missing, or its SHA-256 .* must be the tokenizer of",
    ),
    ({"VOCAB_SIZE": 1024}, "VOCAB_SIZE=1024: must be 0 or the tokenizer's 400"),
    (add("val", "decoded_bytes", 1), "bytes.*manifest.json"),
    (add("val", "decoded_bytes", -1), "bytes.*manifest.json"),
    (add("train", "tokens", 1), "number of tokens than the shards"),
    ({"TRAIN_SEQ_LEN": 8192}, "TRAIN_SEQ_LEN=8192: no such window .*EMA=0 SWA=0"),
    ({"TRAIN_SEQ_LEN": 10**8}, "TRAIN_SEQ_LEN=100000000: must be at most"),
    ({"TRAIN_BATCH_TOKENS": 500}, "TRAIN_BATCH_TOKENS=500: must be a multiple of .*32"),
    ({"ITERATIONS": 0}, "ITERATIONS=0 and MAX_WALLCLOCK_SECONDS=0: set one, or it never ends"),
    ({"NUM_HEADS": 3}, "MODEL_DIM=32: must be a multiple"),
    ({"LAYER_PATTERN": "g x"}, "LAYER_PATTERN='g x': each word must be"),
]


def refused(capsys, environ, expected=2):
    """Return the one line on stderr with which main() ends in this exit code."""
    code = exit_code(T, **environ)
    shown = capsys.readouterr()
    assert (code, shown.out) == (expected, ""), shown
    assert re.fullmatch(r"error: .+\n", shown.err), shown.err
    return shown.err


@pytest.mark.parametrize(("mistake", "said"), MISTAKES, ids=[said for _, said in MISTAKES])
def test_a_mistake_is_one_line_before_anything_is_written(place, mistake, said, tmp_path, capsys):
    changes = {"DATA_PATH": place.data, "OUT_DIR": tmp_path / "runs"}
    if callable(mistake):
        changes["DATA_PATH"] = shutil.copytree(place.data, tmp_path / "data")
        mistake(changes["DATA_PATH"])
    else:
        changes |= mistake
    line = refused(capsys, environment(**{**TINY, **changes}))
    assert re.search(said, line), line
    assert not (tmp_path / "runs").exists()


def test_an_existing_run_is_not_overwritten(place, first, capsys, tmp_path):
    def files():
        return {path: path.read_bytes() for path in place.of("first").rglob("*") if path.is_file()}

    before = files()
    line = refused(capsys, place.environment("first"))
    assert line.startswith("error: RUN_ID='run': must be a plain name that no run in")
    assert files() == before and [path.name for path in place.of("first").parent.iterdir()] == [
        "run"
    ]
    (tmp_path / "runs").write_text("a file")
    line = refused(capsys, place.environment("first", OUT_DIR=tmp_path / "runs"), 1)
    assert line.startswith(f"error: [Errno 20] Not a directory: '{tmp_path}/runs/run")
