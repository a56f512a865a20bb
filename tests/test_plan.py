"""tools/plan.py: every pretraining config; FLOPs, bytes and memory by hand and by runs; it writes nothing."""

from __future__ import annotations

import json
import math
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import environment, load_tool

import train_gpt as T

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = sorted(path for path in ROOT.glob("configs/*.env") if "train_gpt.py" in path.read_text(encoding="utf-8"))
SMALL = dict(MODEL_DIM=32, NUM_HEADS=2, NUM_KV_HEADS=1, TRAIN_SEQ_LEN=64, ATTN_WINDOW=16, VOCAB_SIZE=48,
             TRAIN_BATCH_TOKENS=1024)
PRESETS = {"ARCH_MODE": T.ARCH_PRESETS, "OPTIMIZER": T.OPTIMIZER_PRESETS}
bench = load_tool("bench")
tool = load_tool("plan")


@pytest.fixture
def plan(tmp_path, monkeypatch, capsys):
    """Function: the plan for arguments and an environment, made in an empty folder: {name: rest of its line}.

    A phase stands under its own name. A plan that ends with an exit code above 0 gives {"error": message}.
    """
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, code: int = 0, **changes: object) -> dict[str, str]:
        with mock.patch.dict(os.environ, environment(**changes), clear=True):
            assert tool.main(list(arguments)) == code
        out, err = capsys.readouterr()
        assert bool(out) == (code == 0) == (err == "")
        lines = [line.removeprefix("phase: ") for line in out.splitlines()]
        return dict(re.split(": | from ", line, maxsplit=1) for line in lines) or {"error": err}

    return run


def parts(line: str) -> tuple[int, dict[str, int]]:
    """Return (sum, its parts by name) of a line "5 = a 2 + b 3"."""
    total, _, rest = line.partition(" = ")
    named = dict(re.fullmatch(r"(.+) ([\d,]+)", part).groups() for part in rest.split(" + "))
    return int(total.replace(",", "")), {name: int(text.replace(",", "")) for name, text in named.items()}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_pretraining_config_has_a_plan(plan, path, tmp_path):
    """Without data, on a CPU, as eight GPUs: sums hold, parameters are the network's, nothing is written."""
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
    assert found["data"] == "data/embedded, vocabulary 1,024, both assumed: there are no data"
    form = r"[\d,]+ tokens = (\d+) ranks x (\d+) micro-steps x (\d+) windows x (\d+) tokens, on cuda"
    world, steps, windows, length = map(int, re.fullmatch(form, found["batch"]).groups())
    assert world == 8 and steps * windows * length * 8 == settings.train_batch_tokens and windows * length <= 131072
    assert {name for name in ("warmup", "warmdown", "ema", "swa", "qat") if name in found} == set(
        T.Plan(settings).planned)
    own = sum(map(os.path.getsize, (T.__file__, path)))
    assert parts(found["estimated bytes, at most 16,000,000 allowed"])[1]["code"] == own


def test_flops_of_attention_by_hand(plan):
    """2 layers of dim 32: qkv 32 x (32 + 16 + 16), out 32 x 32, MLP 2 x 96 x 32; head 48 x 32; keys 32.5 and 14.125."""
    matrices, head = 6 * 2 * (32 * 64 + 32 * 32 + 2 * 96 * 32), 6 * 48 * 32
    attention = 12 * 32 * (65 / 2 + (16 * 17 / 2 + 48 * 16) / 64)
    found = plan(**SMALL, LAYER_PATTERN="a s")
    assert (matrices + head, attention) == (119_808, 17_904)
    assert found["FLOPs a token, both ways"] == "137,712 = products with weights 119,808 + attention 17,904"


@pytest.mark.parametrize("changes", [
    {"LAYER_PATTERN": "g g s1 s1", "MLP": "swiglu"}, {"LAYER_PATTERN": "A1 G2 A1 G2", "POSITIONS": "learned"},
    {"LAYER_PATTERN": "a", "MLP": "bio_hard", "TIE_EMBEDDINGS": 0},
], ids=str)
def test_flops_are_those_of_a_real_network(plan, changes):
    """What is counted without weights is what tools/bench.py counts with them, which its tests do by hand."""
    given = {name: str(value) for name, value in {**SMALL, **changes}.items()}
    config = T.model_config(T.load_settings(T.Settings, given), 48, 1)
    total, found = parts(plan(**given)["FLOPs a token, both ways"])
    assert total == pytest.approx(bench.flops_per_token(T.GPT(config), 64).total(), abs=1)
    assert set(found) <= {"products with weights", "attention", "Gated DeltaNet"}


# Artifacts of this shape after so many steps of 2,048 tokens (docs/lab.md, 2026-11-22, "A dry run's bytes").
SHAPE = dict(LAYER_PATTERN="g s g s", MODEL_DIM=128, NUM_HEADS=4, NUM_KV_HEADS=2, TRAIN_SEQ_LEN=256, ATTN_WINDOW=256,
             TRAIN_BATCH_TOKENS=2048)


@pytest.mark.parametrize(("steps", "size", "matrix", "embedding"), [
    (609, 433_604, 322_648, 93_301), (955, 432_056, 320_130, 93_390), (1180, 429_069, 318_386, 92_235),
    (1800, 430_434, 320_600, 91_447)])
def test_bytes_are_those_of_artifacts(plan, steps, size, matrix, embedding):
    _, found = parts(plan(**SHAPE)["estimated bytes, at most 16,000,000 allowed"])
    assert sum(found.values()) - found["code"] == pytest.approx(size, rel=0.01)
    assert found["matrix"] == pytest.approx(matrix, rel=0.02)
    assert found["embedding"] == pytest.approx(embedding, rel=0.03)


def test_bytes_follow_the_quantizer(plan):
    """With 5 bits the largest code is 15 in place of 31, at the same clip: log2(31 / 15) bits less for each weight."""
    def sizes(**changes: object) -> dict[str, int]:
        return parts(plan(**SHAPE, **changes)["estimated bytes, at most 16,000,000 allowed"])[1]

    base, narrow, counts = sizes(), sizes(MATRIX_BITS=5), parts(plan(**SHAPE)["parameters"])[1]
    assert base["matrix"] - narrow["matrix"] == pytest.approx(counts["matrix"] * math.log2(31 / 15) / 8, abs=1)
    assert narrow["embedding"] == base["embedding"]


@pytest.mark.parametrize("optimizer", ["muon", "lion", "adamw", "adamw8bit"])
def test_memory_is_that_of_optimizers(plan, optimizer, one_thread):
    """State of a step of the real optimizer; weights, gradients, two averages and masters are 4 bytes a parameter."""
    changes = {**SMALL, "LAYER_PATTERN": "g s", "OPTIMIZER": optimizer, "MODEL_DIM": 128, "VOCAB_SIZE": 256}
    found = plan(**changes)
    total, memory = parts(found["memory a rank, bytes, without activations"])
    settings = T.load_settings(T.Settings, {name: str(value) for name, value in changes.items()})
    network = T.GPT(T.model_config(settings, 256, 1))
    runtime = T.Runtime(0, 1, torch.device("cpu"), False)
    optimizers = T.Optimizers(network, settings.optimizer, T.pretraining_rates(settings), runtime)
    optimizers.step(0.0, 0.9, torch.tensor(False))
    held = sum(tensor.nbytes for own in optimizers.state_dict().values() for tensor in own.values())
    assert memory["optimizer"] == pytest.approx(held, rel=0.03)
    assert total - memory["optimizer"] == 5 * 4 * parts(found["parameters"])[0]
    _, without = parts(plan(**changes, EMA=0, SWA=0, QAT=0)["memory a rank, bytes, without activations"])
    assert sum(without.values()) == total - 3 * 4 * parts(found["parameters"])[0]


def test_seconds_steps_and_tokens(plan):
    """A million tokens a second for 180 - 8 s; ITERATIONS, where fewer, end it before; without a clock in steps."""
    clock = dict(MAX_WALLCLOCK_SECONDS=180, RESERVE_SECONDS=8, NUM_LAYERS=2)
    found = plan(**SMALL, **clock)
    assert found["clock"] == "172 s to train, then 8 s to choose weights, calibrate and pack"
    assert (found["warmdown"], found["qat"]) == ("86.0 to 172.0 s", "146.2 to 172.0 s")
    assert found["warmup"] == "0.0 to 1.7 s"
    speed = r"[\d.]+ TFLOP/s"
    key, = (key for key in found if key.startswith("at 1,000,000"))
    assert re.fullmatch(rf"at 1,000,000 tokens/s, {speed}", key)
    flops, _ = parts(found["FLOPs a token, both ways"])
    assert key.endswith(f" {flops / 1e6:,.2f} TFLOP/s")
    assert found[key] == f"{172e6 / 1024:,.0f} steps, 172,000,000 tokens"
    found = plan(**SMALL, **clock, ITERATIONS=1000)
    assert found[key] == "1,000 steps, 1,024,000 tokens"
    found = plan(**SMALL, NUM_LAYERS=2, MAX_WALLCLOCK_SECONDS=0, ITERATIONS=1000)
    assert found["warmdown"] == "500.0 to 1,000.0 steps" and found[key] == "1,000 steps, 1,024,000 tokens"


@pytest.mark.parametrize(("changes", "said"), [
    ({"TRAIN_BATCH_TOKENS": 1000}, "TRAIN_BATCH_TOKENS=1000: must be a multiple of"),
    ({"WORLD_SIZE": 3}, "TRAIN_BATCH_TOKENS=1024: must be a multiple of TRAIN_SEQ_LEN x ranks = 192"),
    ({"MAX_WALLCLOCK_SECONDS": 9}, "RESERVE_SECONDS=12.0: must be below MAX_WALLCLOCK_SECONDS=9.0"),
    ({"LAYER_PATTERN": "x"}, "LAYER_PATTERN='x'"), ({"NUM_LAYER": 4}, "did you mean NUM_LAYERS?"),
    ({"DATA_PATH": "a:0.5,b:0.5"}, "no manifest of format 1"), ({"DATA_PATH": "."}, "no manifest of format 1"),
])
def test_what_would_stop_a_run_stops_its_plan(plan, changes, said):
    assert said in plan(code=2, **{**SMALL, **changes})["error"]


def test_arguments_stand_above_the_environment(plan, tmp_path):
    """They are a config file, NAME=value and --name=value; a word of another form is an error."""
    (tmp_path / "small.env").write_text("".join(f"{name}={value}\n" for name, value in SMALL.items()))
    found = plan("small.env", "NUM_LAYERS=2", "--train_batch_tokens=2048", NUM_LAYERS=3, TRAIN_BATCH_TOKENS=512)
    assert found["batch"].startswith("2,048 tokens = 1 ranks x ")
    assert found["parameters"] == plan(**{**SMALL, "NUM_LAYERS": 2})["parameters"]
    assert "'cpu'" in plan("cpu", code=2)["error"]
    assert "NUM_LAYER='4'" in plan("NUM_LAYER=4", code=2)["error"]
    assert "none.env" in plan("none.env", code=2)["error"]


def test_the_data_that_are_there_are_taken(plan, tmp_path):
    """Their vocabulary and epochs."""
    rng = random.Random(0)
    rows = [{"text": " ".join(str(rng.randrange(10**6)) for _ in range(60))} for _ in range(140)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [ROOT / "data" / "prepare.py", "text.jsonl", "--out", "data", "--tokenizer", "bytes", "--workers", "1"]
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (tmp_path / "text.jsonl").unlink()
    given = {**SMALL, "VOCAB_SIZE": 0, "DATA_PATH": "data", "HOLDOUT_TOKENS": 1024, "ITERATIONS": 100}
    found = plan(**given)
    manifest = json.loads((tmp_path / "data" / "manifest.json").read_text())
    assert found["data"] == "data, vocabulary 264"
    line = next(text for key, text in found.items() if key.startswith("at "))
    epochs = 100 * 1024 / (manifest["train"]["tokens"] - 1024)
    assert line == f"100 steps, 102,400 tokens, {epochs:.3f} epochs"
    assert "VOCAB_SIZE=48: must be 0 or 264" in plan(code=2, **{**given, "VOCAB_SIZE": 48})["error"]
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_the_command(tmp_path):
    """`python tools/plan.py`, from another folder: the plan, an error of one line, and its help; it writes nothing."""
    (tmp_path / "small.env").write_text("".join(f"{name}={value}\n" for name, value in SMALL.items()))

    def run(*words: str, **changes: object) -> tuple[int, str, str]:
        done = subprocess.run([sys.executable, ROOT / "tools" / "plan.py", *words], cwd=tmp_path,
                              env=environment(**changes), capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    code, out, err = run("small.env", WORLD_SIZE=2)
    assert (code, err) == (0, "") and "\nbatch: 1,024 tokens = 2 ranks x 1 micro-steps x 8 windows x 64" in out
    said = "error: TRAIN_BATCH_TOKENS=1000: must be a multiple of TRAIN_SEQ_LEN x ranks = 64\n"
    assert run("small.env", "TRAIN_BATCH_TOKENS=1000") == (2, "", said)
    code, out, err = run("--help")
    assert (code, err) == (0, "") and "python tools/plan.py configs/golf_8gpu.env\n" in out
    assert [path.name for path in tmp_path.iterdir()] == ["small.env"]


@pytest.mark.full
def test_the_estimate_of_the_cpu_config(plan, tmp_path):
    """configs/cpu.env as it stands, trained for 60 s on Python's standard library: within 3% of what it packs."""
    config = ROOT / "configs" / "cpu.env"
    env = environment(CONFIG=config, DATA_PATH="data", RUN_ID="run", MAX_WALLCLOCK_SECONDS=60, COMPILE=0)
    for words in (["data/prepare.py", "--out", "data", "--val-max-bytes", "40000"], ["train_gpt.py"]):
        done = subprocess.run([sys.executable, str(ROOT / words[0]), *words[1:]], cwd=tmp_path, env=env,
                              capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "runs" / "run" / "result.json").read_text())
    line = next(text for what, text in plan(str(config), DATA_PATH="data").items() if what.startswith("estimated"))
    total, found = parts(line)
    limit = result["settings"]["artifact_bytes_max"]
    assert min(total, limit) - found["code"] == pytest.approx(result["artifact_bytes"], rel=0.03)
    assert found["code"] == result["code_bytes"]
