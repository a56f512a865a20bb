"""Whole runs, tiny: data/prepare.py, train_gpt.py on one and two ranks, sample.py; what a run
leaves and refuses.
"""

import hashlib
import json
import math
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, fields, replace

import pytest

import train_gpt as T
from conftest import (
    ROOT,
    TINY,
    Child,
    Place,
    check_facts,
    environment,
    exit_code,
    rank_environments,
    read_json,
    server,
    start,
)

SCRIPT = ROOT / "train_gpt.py"
FIELDS = {field.name: field for field in fields(T.Settings)}
FIRST = dict(VAL_LOSS_EVERY=10, EVAL_STRIDE=16)
PHASES = dict(warmup=(1, 1), warmdown=(16, 15), ema=(26, 5), swa=(28, 3), qat=(26, 5))
# Losses of these steps, and the scores of the weights at the end on what is held out. They stand for
# the data's order, the start, every rate, Muon's momentum, QAT and averages: any other run has others.
LOSSES = {2: 5.8217, 3: 5.2137, 10: 4.1999, 20: 3.6135, 25: 3.5514, 26: 3.5777, 30: 3.4723}
HELD_OUT = {"raw": 3.5422, "ema": 3.5437, "swa": 3.5475}


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_data):
    return Place(tmp_path_factory.mktemp("smoke"), tiny_data, TINY)


@pytest.fixture(scope="module")
def first(place):
    """Return the run that most tests look at."""
    return place.run("first", **FIRST)


def metrics(place, out, name):
    """Return the values of a metric of all steps, as metrics.jsonl has them."""
    lines = (place.of(out) / "metrics.jsonl").read_text().splitlines()
    rows = map(json.loads, lines)
    return [row[name] for row in rows if name in row]


# ----------------------------------------------------------------------------------- one whole run
def test_losses_rates_and_phases_of_a_run(place, first):
    """The loss falls from that of uniform weights; phases begin beyond their share of 30 steps."""
    losses = metrics(place, "first", "train_loss")
    assert len(losses) == 30 and losses[0] == pytest.approx(math.log(400), abs=0.02)
    assert {step: losses[step - 1] for step in LOSSES} == pytest.approx(LOSSES, rel=1e-3)
    found = re.findall(r"^weights: (\w+), .* loss:([\d.]+)", place.log("first"), re.M)
    assert {name: float(loss) for name, loss in found} == pytest.approx(HELD_OUT, abs=2e-3)
    # A warmdown over the last half, in which no step has a rate of 0.
    rates = [min(1.0, (31 - step) / 15) for step in range(1, 31)]
    assert metrics(place, "first", "lr_mul") == pytest.approx(rates, abs=1e-4)
    assert min(metrics(place, "first", "grad_norm")) > 0
    phases = place.result("first")["phases"]
    assert {name: (row["start_step"], row["steps"]) for name, row in phases.items()} == PHASES


def test_the_log_has_its_parts_in_order(place, first):
    log = place.log("first")
    parts = ["command: ", "\ncommit:", "\n* RUN_ID=run\n", "\nparameters: ", "\ndata: text"]
    parts += [f"\nplan: {name} from " for name in PHASES]
    parts += ["\nbatch: 1 micro-steps of 16 windows on each rank\n", "\nphase: warmup begins"]
    parts += ["\nstep:1/30 train_loss:", "\nstep:10/30 val_loss:", "\nphase: qat begins at step 26"]
    parts += ["\nstep:30/30 train_loss:", "of the run, begun at step 1, on for 1 steps\n"]
    parts += ["\nweights: raw", "\nweights: ema", "\nweights: swa", "\nbefore quantization: val_"]
    parts += ["\nfrom the artifact: val_", "\nfrom the artifact: sliding val_", "\n---\n"]
    places = [log.find(part) for part in parts]
    assert -1 not in places, parts[places.index(-1)]
    assert places == sorted(places)
    assert (
        log.count(" val_loss:") == 6
    )  # steps 10, 20 and the end; before and after packing; sliding
    assert first.out == log  # the terminal shows the log


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_result_is_complete_and_consistent(place, first):
    result = check_facts(place, "first", "train_gpt")
    names = "val_bpb_sliding bigram_bpb trigram_bpb zstd22_bpb xz_bpb"
    assert set(names.split()) - set(result) == set()
    manifest = read_json(place.data / "manifest.json")
    environ = place.environment("first", **FIRST)
    given = {name.lower(): text for name, text in environ.items() if name.lower() in FIELDS}
    given = {name: T.parse_setting(FIELDS[name], text) for name, text in given.items()}
    nats, tokens, size = (result[name] for name in ("val_nats", "val_tokens", "val_bytes"))
    exact = {
        "steps": 30,
        "tokens": 30 * 512,
        "settings": asdict(replace(T.Settings(), **given)),
        "manifest_sha256": digest(place.data / "manifest.json"),
        "tokenizer_sha256": digest(place.of("first") / "tokenizer.model"),
        "val_bytes": manifest["val"]["decoded_bytes"],
        "val_tokens": manifest["val"]["tokens"] - 1,
        "val_bpb": pytest.approx(nats / math.log(2) / size, rel=1e-12),
        "val_loss": pytest.approx(nats / tokens, rel=1e-12),
        "bytes_per_token": pytest.approx(size / tokens, rel=1e-12),
    }
    assert {key: result[key] for key in exact} == exact
    assert 0 < abs(result["val_bpb"] / result["before_quantization"]["val_bpb"] - 1) < 0.05
    for name in (
        "val_loss",
        "val_bpb",
    ):  # the artifact's, behind the validations of steps 10 and 20
        *validations, last = metrics(place, "first", name)
        assert len(validations) == 2 and last == result[name]
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


# ------------------------------------------------------------------------------- the same run again
def test_the_artifact_is_the_same_to_the_byte(place, first):
    """By the script as a process of its own; with a warm-up and without validations.

    They leave weights, optimizer and data as they were.
    """
    environ = place.environment("again", PYTHONHASHSEED=1)
    done = subprocess.run([sys.executable, SCRIPT], env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert place.artifact("again") == place.artifact("first")
    assert place.result("again")["val_nats"] == place.result("first")["val_nats"]


def test_ranks_and_micro_batches_do_not_change_the_losses(place):
    """One rank, one in micro-steps of 2 windows, two gloo ranks: float32 sums in another order.

    Within 1e-5 of a loss until the weights are quantized, from step 11 on; then
    within 2e-4 (measured: 2e-5): a weight at the edge of two codes may fall to either side.
    """
    changes = dict(ITERATIONS=12, GRAD_CLIP_NORM=1)
    place.run("one", **changes)
    place.run("micro", MICRO_BATCH_TOKENS=64, **changes)
    place.ranks("two", **changes)
    losses = metrics(place, "one", "train_loss")
    assert len(losses) == 12 and losses[-1] < losses[0] - 1
    nats = place.result("one")["val_nats"]
    for out, shape in (("micro", "8 micro-steps of 2"), ("two", "1 micro-steps of 8")):
        others = metrics(place, out, "train_loss")
        assert others[:10] == pytest.approx(losses[:10], rel=1e-5)
        assert others == pytest.approx(losses, rel=2e-4)
        assert place.result(out)["val_nats"] == pytest.approx(nats, rel=1e-4)
        assert f"\nbatch: {shape} windows on each rank\n" in place.log(out)
    assert place.result("two")["world_size"] == 2


def test_ranks_with_another_setting_or_script_do_not_begin(place, first):
    """As if MATRIX_LR were given on one of two nodes, or one had an older copy of the script."""
    older = (
        "read = T.Path.read_bytes\n"
        "T.Path.read_bytes = lambda path: read(path) + b' ' * (path.suffix == '.py')\n"
    )
    others = {
        "MATRIX_LR: rank 1 has 0.5, rank 0 has 0.02": ("", {"MATRIX_LR": 0.5}),
        "MICRO_BATCH_TOKENS: rank 1 has 64, rank 0 has 0": ("", {"MICRO_BATCH_TOKENS": 64}),
        "INIT_FROM: rank 1 has 'a path', rank 0 has ''": ("", {"INIT_FROM": place.of("first")}),
        "SHA-256 of the script: rank 1 has": (older, {}),
    }
    hurry = "T.time.sleep = lambda seconds: None\n"  # ranks but 0 wait with their errors
    for fault, (patch, changes) in others.items():
        ranks = rank_environments(2)
        children = [
            place.begin("differ", **ranks[0]),
            place.begin("differ", hurry + patch, **ranks[1], **changes),
        ]
        assert [child.wait() for child in children] == [2, 2], [child.err for child in children]
        assert f"error: {fault}" in children[0].err and not place.of("differ").exists()


def adapt(place, out, *words, code=0):
    """Return the ended process of tools/adapt.py on a run."""
    done = start([ROOT / "tools" / "adapt.py", place.of(out), *words], environment(DEVICE=None))
    assert done.returncode == code and "Traceback" not in done.stderr, done.stderr
    return done


def test_test_time_training_is_beside_the_score(place):
    """In result.json and metrics; what the run wrote stays, but for its end of metrics.jsonl."""
    place.run("plain", ITERATIONS=12, GRAD_CLIP_NORM=1)
    log, artifact, plain = place.log("plain"), place.artifact("plain"), place.result("plain")
    assert "nothing was written" in adapt(place, "plain", "--documents", 2).stdout
    assert place.result("plain") == plain
    done = adapt(place, "plain", "--rank", 2, "--rows", 8)
    result = place.result("plain")
    assert (place.log("plain"), place.artifact("plain")) == (log, artifact)
    assert {name: result[name] for name in plain} == plain
    names = ["val_loss_ttt", "val_bpb_ttt", "val_bpb_ttt_off", "ttt_seconds"]
    assert result.keys() - plain.keys() == {*names, "ttt_lora_rank"}
    for name in names:
        assert metrics(place, "plain", name) == [result[name]]
    nats = result["val_loss_ttt"] * result["val_tokens"]
    assert result["val_bpb_ttt"] == pytest.approx(nats / math.log(2) / result["val_bytes"])
    assert result["val_bpb_ttt"] < result["val_bpb_ttt_off"]
    line = (
        r"^from the artifact: test-time training val_loss:\S+ bpb:(\S+) .* tokens:(\d+) bytes:(\d+)"
    )
    ((bpb, tokens, size),) = re.findall(line, done.stdout, re.M)
    assert bpb == f"{result['val_bpb_ttt']:.4f}"
    assert [int(tokens), int(size)] == [result["val_tokens"], result["val_bytes"]]


def test_ranks_and_rows_do_not_change_test_time_training(place):
    """One rank with rows of 8 and of 2 documents, and two gloo ranks."""
    place.run("adapted", ITERATIONS=12, GRAD_CLIP_NORM=1)
    results = []
    for ranks, rows in ((1, 8), (1, 2), (2, 2)):
        words = [str(ROOT / "tools" / "adapt.py"), str(place.of("adapted")), "--rows", str(rows)]
        children = []
        for rank in rank_environments(ranks):
            order = dict(
                words=[*words, "--rank", "2"],
                cwd=str(ROOT),
                environ=environment(DEVICE=None, **rank),
            )
            children.append(Child(server(), place.folder, f"adapt_{len(children)}", "", **order))
        assert [child.wait() for child in children] == [0] * ranks, children[0].err
        results.append(place.result("adapted"))
    for name in ("val_bpb_ttt", "val_bpb_ttt_off"):
        first, *others = [result[name] for result in results]
        assert others == pytest.approx([first] * 2, rel=1e-4)


def test_test_time_training_refuses_what_is_no_finished_run(place, first, tmp_path):
    """Nothing at all, another artifact, other data; as settings of training its names are errors."""
    shutil.copytree(place.of("first"), tmp_path / "run")
    shutil.copytree(place.data, tmp_path / "data")
    other = Place(tmp_path.parent, place.data, TINY)
    assert "must be a finished run" in adapt(other, "none", code=2).stderr
    manifest = tmp_path / "data" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes() + b"\n")
    other_data = adapt(other, tmp_path.name, "--data", tmp_path / "data", code=2)
    assert "must be the data of the run" in other_data.stderr
    with open(tmp_path / "run" / "model.upar", "ab") as artifact:
        artifact.write(b" ")
    assert "is of another artifact" in adapt(other, tmp_path.name, code=2).stderr
    for name, text in (("TTT_LORA_RANK", "8"), ("TTT_ENABLED", "1")):
        assert "python tools/adapt.py RUN" in place.refused("ttt", **{name: text})


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
    losses = metrics(place, out, "train_loss")
    assert len(losses) == 20 and losses[0] == pytest.approx(math.log(400), abs=0.1)
    assert sum(losses[-3:]) / 3 < losses[0] - 0.25
    result = place.result(out)
    for name, value in choice.items():
        assert value is None or result["settings"][name.lower()] == value, name
    assert result["val_bpb"] == pytest.approx(result["before_quantization"]["val_bpb"], rel=0.03)
    said = re.findall(r"^packing: .* in float32, .* in (\w+)$", place.log(out), re.M)
    assert said == ([] if result["dtype"] == "float32" else [result["dtype"]])


# ---------------------------------------------------------------------------------- against a clock
def test_every_phase_fires_under_a_clock_that_cuts_the_run(place):
    """ITERATIONS=9999 WARMDOWN_ITERS=3000, 40 steps by the clock: in the field nothing fired."""
    clock = dict(MAX_WALLCLOCK_SECONDS=3, RESERVE_SECONDS=1)
    place.run("clock", "ticks(T)\n", ITERATIONS=9999, WARMDOWN_ITERS=3000, **clock)
    result = place.result("clock")
    assert 1.9 < result["train_seconds"] < 2.1 and 30 < result["steps"] < 50
    assert result["phases"]["warmdown"]["begin"] == pytest.approx(1 - 3000 / 9999)
    assert set(result["phases"]) == set(PHASES)
    for name, phase in result["phases"].items():
        assert phase["steps"] > 0 and phase["start_progress"] >= phase["begin"], name
        assert phase["start_step"] + phase["steps"] == result["steps"] + 1 or name == "warmup"
    rates = metrics(place, "clock", "lr_mul")
    assert max(rates) == 1.0 and rates[-1] < 0.1


def test_a_reserve_that_is_too_short_leaves_out_averages(place):
    """Scoring takes a second of none: raw weights, and the events say so."""
    patch = "ticks(T)\nbefore(T.Scorer, 'score', lambda *_: pass_time(1))\n"
    clock = dict(ITERATIONS=0, MAX_WALLCLOCK_SECONDS=2, RESERVE_SECONDS=0)
    place.run("no reserve", patch, **clock)
    result = place.result("no reserve")
    events = ["weights_left_out", "weights_left_out", "over_clock"]
    assert [event["event"] for event in result["events"]] == events
    assert [event["weights"] for event in result["events"][:2]] == ["ema", "swa"]
    place.run("replay", **{**place.unset, "REPLAY": place.of("no reserve")})
    assert place.result("replay")["weights"] == result["weights"] == "raw"
    assert place.result("replay")["events"] == result["events"][:2]


def errors(place, out):
    return sorted(re.findall("^error: (.*)", place.log(out), re.M))


def test_a_run_too_short_for_its_phases_fails_and_names_them(place):
    """A step or two, which begin before the time of any step is known, at 0% of the run."""
    clock = dict(ITERATIONS=0, MAX_WALLCLOCK_SECONDS=0.002, RESERVE_SECONDS=0.001)
    child = place.run("short", code=1, **clock)
    assert "configs/cpu.env is made for CPUs" in child.out
    missed = sorted(PHASES.keys() - {"warmup"})
    assert [line.split()[1] for line in errors(place, "short")] == missed
    result = place.result("short")
    assert [*result["phases"]] == ["warmup"] and result["steps"] in (1, 2)
    assert digest(place.of("short") / "model.upar") == result["artifact_sha256"]


def test_too_large_an_artifact_fails_and_is_saved(place):
    """The artifact itself is below the limit; script and config count, too."""
    config = place.folder / "small.env"
    size = SCRIPT.stat().st_size
    config.write_text(f"# a cap\nARTIFACT_BYTES_MAX={size + 1000}\n")
    child = place.run("large", code=1, CONFIG=config, ITERATIONS=8)
    assert "configs/cpu.env is made for CPUs" not in child.out
    (line,) = errors(place, "large")
    assert "ARTIFACT_BYTES_MAX" in line
    result = place.result("large")
    assert result["code_bytes"] == size + config.stat().st_size
    assert result["total_bytes"] == result["code_bytes"] + len(place.artifact("large"))


# ----------------------------------------------------------------------------------------- refusals
# Of settings, data, shape and plan; each has its own tests in tests/.
MISTAKES = {
    "ITERATONS=5": "ITERATONS='5'.* ITERATIONS",
    "DATA_PATH=none": "none/manifest.json",
    "TOKENIZER_PATH=bytes": "bytes: .* tokenizer",
    "TRAIN_BATCH_TOKENS=500": "TRAIN_BATCH_TOKENS=500: .* 32",
    "ITERATIONS=0": "ITERATIONS=0 and MAX_WALLCLOCK_SECONDS=0",
    "ARTIFACT_BYTES_MAX=100000": f"ARTIFACT_BYTES_MAX=100000: .* {SCRIPT.stat().st_size}, ",
    "NUM_HEADS=3": "MODEL_DIM=32",
}


def refused(capsys, environ, expected=2):
    """Return the one line on stderr with which main() ends in this exit code."""
    code = exit_code(T, **environ)
    shown = capsys.readouterr()
    assert (code, shown.out) == (expected, ""), shown
    assert re.fullmatch(r"error: .+\n", shown.err), shown.err
    return shown.err


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_before_anything_is_written(place, mistake, tmp_path, capsys):
    name, _, value = mistake.partition("=")
    changes = {"DATA_PATH": place.data, "OUT_DIR": tmp_path / "runs", name: value}
    line = refused(capsys, environment(**{**TINY, **changes}))
    assert re.search(MISTAKES[mistake], line), line
    assert not (tmp_path / "runs").exists()


def test_an_existing_run_is_not_overwritten(place, first, capsys, tmp_path):
    def files():
        return {path: path.read_bytes() for path in place.folder.glob("first/**/*.*")}

    before = files()
    assert refused(capsys, place.environment("first")).startswith("error: RUN_ID='run'")
    assert files() == before
    (tmp_path / "runs").write_text("a file")
    line = refused(capsys, place.environment("first", OUT_DIR=tmp_path / "runs"), 1)
    assert line.startswith("error: [Errno 20]")
