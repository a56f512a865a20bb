"""tools/rate.py: its interpolation by a closed form, its bytes by entropies, and the table of a small run."""

import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import load_tool

import train_gpt as T

ROOT = Path(__file__).resolve().parents[1]
rate = load_tool("rate")


def test_bytes_at_a_gap_lie_on_a_power_law():
    """Bytes 1000 gap**-0.25 are a line in logarithms, so every point between the measured ones is exact."""
    rows = [{"quantizer": "none"}] + [{"quantizer": "a", "gptq": True, "gap": gap, "bytes": 1000 * gap**-0.25}
                                      for gap in (0.001, 0.004, 0.02)]
    for gap in (0.001, 0.002, 0.01, 0.02):
        assert rate.bytes_at(rows, "a", True, "bytes", gap) == pytest.approx(1000 * gap**-0.25, rel=1e-12)
    assert math.isnan(rate.bytes_at(rows, "a", True, "bytes", 0.0005))
    assert math.isnan(rate.bytes_at(rows, "a", True, "bytes", 0.03))


def test_bytes_alone_are_order_0_entropies_and_tables():
    generator = torch.Generator().manual_seed(0)
    codes = [torch.randint(-3, 4, (64, 500), generator=generator).to(torch.int8), torch.zeros(20, 20, dtype=torch.int8)]
    coded = {f"w_{at}": T.Coded(each, torch.ones(1).half(), 6) for at, each in enumerate(codes)}
    sizes = {"matrix": 10**6, "coder": 132, "control": 1000, "header": 300}
    share = np.unique(codes[0], return_counts=True)[1] / codes[0].numel()
    entropy = -(share * np.log2(share)).sum() * codes[0].numel() / 8
    alone = rate.bytes_alone(T, coded, sizes) - 1300 - entropy
    assert 10 < alone < 120  # two tables, one of seven entries and one of two, packed


@pytest.mark.full
def test_the_table_of_a_run(tmp_path):
    """All quantizers of a run of 12 steps: bytes fall and the files are what pack_artifact writes; JSON as printed."""
    words = ["".join(random.Random(at).choices("abcdefgh", k=4)) for at in range(60)]
    texts = [" ".join(random.Random(at).choices(words, k=60)) for at in range(300)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    env = {name: os.environ[name] for name in ("PATH", "HOME", "VIRTUAL_ENV") if name in os.environ}
    env |= {"OMP_NUM_THREADS": "1", "DEVICE": "cpu", "COMPILE": "0", "OUT_DIR": str(tmp_path), "RUN_ID": "run",
            "DATA_PATH": str(tmp_path / "data"), "LAYER_PATTERN": "g s", "MODEL_DIM": "32", "NUM_HEADS": "2",
            "NUM_KV_HEADS": "1", "TRAIN_SEQ_LEN": "32", "TRAIN_BATCH_TOKENS": "512", "HOLDOUT_TOKENS": "1024",
            "ITERATIONS": "12", "MAX_WALLCLOCK_SECONDS": "0", "EVAL_STRIDE": "0", "QAT": "0"}
    prepare = ["data/prepare.py", str(tmp_path / "text.jsonl"), "--out", str(tmp_path / "data"), "--vocab-size", "300"]
    measure = ["tools/rate.py", str(tmp_path / "run"), "--weights", "raw", "--tokens", "2048", "--calibration", "2",
               "--write", str(tmp_path / "rate.json")]
    for command in (prepare, ["train_gpt.py"], measure):
        ran = subprocess.run([sys.executable, *command], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr
    found = json.loads((tmp_path / "rate.json").read_text())
    rows = found["rows"][1:]
    assert found["command"].startswith("python tools/rate.py ") and len(rows) == ran.stdout.count(" bytes, a table a")
    for name, varied in rate.QUANTIZERS.items():
        for way in (False, True):
            own = [row["bytes"] for row in rows if (row["quantizer"], row["gptq"]) == (name, way)]
            assert len(own) == len(varied) and own == sorted(own, reverse=True)
    for words, said in ((["nowhere"], "error: nowhere: no whole checkpoint"),
                        (["run", "--data", "nowhere"], "error: nowhere/manifest.json: no manifest of format 1"),
                        (["run/step_000000"], "run/step_000000: it has no ema weights; --weights raw"),
                        (["run", "--tokens", "0"], "error: --tokens 0: must be at least 1"),
                        (["run", "--write", "no/rate.json"], "error: --write no/rate.json: the folder")):
        ran = subprocess.run([sys.executable, str(ROOT / "tools/rate.py"), *words], cwd=tmp_path, env=env,
                             capture_output=True, text=True, check=False)
        assert ran.returncode == 2 and said in ran.stderr and ran.stderr.count("\n") == 1, ran.stderr
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    packed = [row for row in rows if row["quantizer"] == "one step a tensor" and row.get("widen") == 1.0]
    assert min(abs(row["bytes"] - result["artifact_bytes"]) for row in packed) < 200  # all but meta, header's digits
