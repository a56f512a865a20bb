"""tools/plan.py: every pretraining config; FLOPs, bytes and memory by hand and by runs; it writes
nothing.
"""

import os
import re
from unittest import mock

import pytest
import torch

import train_gpt as T
from conftest import ROOT, environment, load_tool, read_json

CONFIGS = sorted(
    path
    for path in ROOT.glob("configs/*.env")
    if "train_gpt.py" in path.read_text(encoding="utf-8")
)
EVERYDAY = {"cpu": (), "golf_8gpu": ()}
PATHS = [pytest.param(path, marks=EVERYDAY.get(path.stem, pytest.mark.full)) for path in CONFIGS]
SMALL = dict(MODEL_DIM=32, NUM_HEADS=2, NUM_KV_HEADS=1, TRAIN_SEQ_LEN=64, ATTN_WINDOW=16)
SMALL |= dict(VOCAB_SIZE=48, TRAIN_BATCH_TOKENS=1024)
PHASES = {"warmup", "warmdown", "ema", "swa", "qat"}
PRESETS = {"ARCH_MODE": T.ARCH_PRESETS, "OPTIMIZER": T.OPTIMIZER_PRESETS}
bench, tool = load_tool("bench"), load_tool("plan")


@pytest.fixture
def plan(tmp_path, monkeypatch, capsys):
    """Function: the plan for arguments and an environment, made in an empty folder: {name: rest of
    its line}.

    A phase stands under its own name. A plan that fails gives {"error": message}.
    """
    monkeypatch.chdir(tmp_path)

    def run(*arguments, code=0, **changes):
        with mock.patch.dict(os.environ, environment(**changes), clear=True):
            assert tool.main(list(arguments)) == code
        out, err = capsys.readouterr()
        assert bool(out) == (code == 0) == (err == "")
        lines = [line.removeprefix("phase: ") for line in out.splitlines()]
        return dict(re.split(": | from ", line, maxsplit=1) for line in lines) or {"error": err}

    return run


def parts(line):
    """Return (sum, its parts by name) of a line "5 = a 2 + b 3"."""
    total, _, rest = line.partition(" = ")
    named = dict(re.fullmatch(r"(.+) ([\d,]+)", part).groups() for part in rest.split(" + "))
    return int(total.replace(",", "")), {
        name: int(text.replace(",", "")) for name, text in named.items()
    }


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_every_pretraining_config_has_a_plan(plan, path, tmp_path):
    """Without data, on a CPU, as eight GPUs: sums hold, parameters are the network's, nothing is
    written.
    """
    found = plan(str(path), "DEVICE=cuda", WORLD_SIZE=8)
    assert list(tmp_path.iterdir()) == []
    settings = T.load_settings(T.Settings, {}, [str(path)], PRESETS)
    with torch.device("meta"):
        counts = T.count_parameters(T.GPT(T.model_config(settings, 1024, 1)))
    total = counts.pop("total")
    assert parts(found["parameters"]) == (total, counts)
    for what, line in found.items():
        if " = " in line and what != "batch":
            whole, each = parts(line)
            assert abs(whole - sum(each.values())) <= len(each)  # each is rounded
    assumed = f"{settings.data_path}, vocabulary 1,024, both assumed: there are no data"
    assert found["data"] == assumed
    form = r".* tokens = 8 ranks x (\d+) micro-steps x (\d+) windows x (\d+) tokens, on cuda"
    steps, windows, length = map(int, re.fullmatch(form, found["batch"]).groups())
    assert steps * windows * length * 8 == settings.train_batch_tokens
    assert windows * length <= 131072
    assert set(T.Plan(settings).planned) == PHASES & set(found)
    own = sum(map(os.path.getsize, (T.__file__, path)))
    assert parts(found["estimated bytes, at most 16,000,000 allowed"])[1]["code"] == own


# An artifact of this shape after 609 steps of 2,048 tokens (docs/lab/2026-11.md, 2026-11-22, "A dry
# run's bytes").
SHAPE = dict(LAYER_PATTERN="g s g s", MODEL_DIM=128, NUM_HEADS=4, NUM_KV_HEADS=2, ATTN_WINDOW=256)
SHAPE |= dict(TRAIN_SEQ_LEN=256, TRAIN_BATCH_TOKENS=2048)


def test_bytes_are_those_of_an_artifact(plan):
    _, found = parts(plan(**SHAPE)["estimated bytes, at most 16,000,000 allowed"])
    assert sum(found.values()) - found["code"] == pytest.approx(433_604, rel=0.01)
    assert found["matrix"] == pytest.approx(322_648, rel=0.02)
    assert found["embedding"] == pytest.approx(93_301, rel=0.03)


@pytest.mark.parametrize("optimizer", ["muon", "lion", "adamw8bit", "tables"])
def test_memory_is_that_of_optimizers(plan, optimizer):
    """State of a step of the real optimizer; weights, gradients, two averages and masters are 4
    bytes a parameter.
    """
    changes = SMALL | dict(LAYER_PATTERN="g s", OPTIMIZER=optimizer, MODEL_DIM=128, VOCAB_SIZE=256)
    if optimizer == "tables":
        changes |= dict(OPTIMIZER="muon", BIGRAM_VOCAB_SIZE=5000)
    found = plan(**changes)
    total, memory = parts(found["memory a rank, bytes, without activations"])
    settings = T.load_settings(T.Settings, {name: str(value) for name, value in changes.items()})
    network = T.GPT(T.model_config(settings, 256, 1))
    runtime = T.Runtime(0, 1, torch.device("cpu"), False)
    optimizers = T.make_optimizers(network, settings, runtime)
    for param in network.parameters():
        param.grad = torch.zeros_like(param)
    T.step_optimizers(optimizers, 0.0, torch.tensor(True))
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    held = sum(tensor.nbytes for state in states for tensor in state.values())
    assert memory["optimizer"] == pytest.approx(held, rel=0.03)
    assert total - memory["optimizer"] == 5 * 4 * parts(found["parameters"])[0]
    plain = plan(**changes, EMA=0, SWA=0, QAT=0)["memory a rank, bytes, without activations"]
    assert parts(plain)[0] == total - 3 * 4 * parts(found["parameters"])[0]


def test_seconds_steps_and_tokens(plan):
    """A million tokens a second for 180 - 8 s; ITERATIONS, where fewer, end it before; without a
    clock in steps.
    """
    clock = dict(MAX_WALLCLOCK_SECONDS=180, RESERVE_SECONDS=8, NUM_LAYERS=2)
    found = plan(**SMALL, **clock)
    assert found["clock"] == "172 s to train, then 8 s to choose weights, quantize and pack"
    assert (found["warmdown"], found["qat"]) == ("86.0 to 172.0 s", "146.2 to 172.0 s")
    assert found["warmup"] == "0.0 to 1.7 s"
    speed = r"[\d.]+ TFLOP/s"
    (key,) = (key for key in found if key.startswith("at 1,000,000"))
    assert re.fullmatch(rf"at 1,000,000 tokens/s, {speed}", key)
    flops, _ = parts(found["FLOPs a token, both ways"])
    assert key.endswith(f" {flops / 1e6:,.2f} TFLOP/s")
    assert found[key] == f"{172e6 / 1024:,.0f} steps, 172,000,000 tokens"
    found = plan(**SMALL, **clock, ITERATIONS=1000)
    assert found[key] == "1,000 steps, 1,024,000 tokens"
    found = plan(**SMALL, NUM_LAYERS=2, MAX_WALLCLOCK_SECONDS=0, ITERATIONS=1000)
    assert found["warmdown"] == "500.0 to 1,000.0 steps"
    assert found[key] == "1,000 steps, 1,024,000 tokens"


def test_what_would_stop_a_run_stops_its_plan(plan):
    for changes, said in (
        ({"TRAIN_BATCH_TOKENS": 1000}, "TRAIN_BATCH_TOKENS=1000"),
        ({"WORLD_SIZE": 3}, "TRAIN_BATCH_TOKENS=1024: .* = 192"),
        ({"MAX_WALLCLOCK_SECONDS": 9}, "RESERVE_SECONDS=12.0"),
        ({"NUM_LAYER": 4}, "NUM_LAYERS"),
        ({"DATA_PATH": "."}, "DATA_PATH"),
        ({"WORLD_SIZE": "eight"}, "^error: WORLD_SIZE='eight': "),
        ({"WORLD_SIZE": 0}, "^error: WORLD_SIZE='0': "),
        ({"INIT_FROM": "runs/first"}, "^error: INIT_FROM='runs/first': "),
    ):
        assert re.search(said, plan(code=2, **{**SMALL, **changes})["error"])


def test_the_data_that_are_there_are_taken(plan, tiny_data):
    """Their vocabulary and epochs."""
    given = {**SMALL, "DATA_PATH": tiny_data, "ITERATIONS": 100}
    found = plan(**{**given, "VOCAB_SIZE": 0})
    manifest = read_json(tiny_data / "manifest.json")
    assert found["data"] == f"{tiny_data}, vocabulary 400"
    line = next(text for key, text in found.items() if key.startswith("at "))
    epochs = 100 * 1024 / (0.95 * manifest["train"]["tokens"])  # a twentieth is held out
    shown = re.fullmatch(r"100 steps, 102,400 tokens, ([\d.]+) epochs", line)[1]
    assert float(shown) == pytest.approx(epochs, rel=0.02)  # of whole windows
    assert "VOCAB_SIZE=48" in plan(code=2, **given)["error"]
