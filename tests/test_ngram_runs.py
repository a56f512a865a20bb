"""NGRAM_ORDER in whole runs: score, clock, the artifact alone, RESUME; sample.py and quantize.py on what they leave."""

import json
import random
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import environment

import sample as S
import test_smoke as smoke

ROOT = Path(__file__).resolve().parents[1]
TINY = dict(
    DTYPE="float32", COMPILE=0, LAYER_PATTERN="g s", MODEL_DIM=32, NUM_HEADS=2, NUM_KV_HEADS=1, ATTN_WINDOW=16,
    TRAIN_SEQ_LEN=32, TRAIN_BATCH_TOKENS=256, HOLDOUT_TOKENS=2048, EVAL_STRIDE=16, EVAL_STATEFUL=1, ITERATIONS=16,
    MAX_WALLCLOCK_SECONDS=0, RESERVE_SECONDS=0, TRAIN_LOG_EVERY=1, WARMUP_STEPS=1, GPTQ_CALIBRATION_BATCHES=1)
DRIVER = """
import sys, time
sys.path.insert(0, sys.argv.pop())
import train_gpt as T

count_ngrams = T.count_ngrams
T.count_ngrams = lambda *given: time.sleep(2) or count_ngrams(*given)  # there is little text to count
sys.exit(T.exit_code(T.main))
"""


class Place:
    """A folder with data and runs, each runs/NAME of it."""

    def __init__(self, folder: Path):
        rng, self.folder = random.Random(0), folder
        words = ["".join(rng.choices("abcdefgh", k=rng.randint(2, 7))) for _ in range(60)]
        texts = [" ".join(rng.choices(words, k=60)) for _ in range(300)]
        (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        (folder / "driver.py").write_text(DRIVER)
        self.start(ROOT / "data/prepare.py", "text.jsonl", "--out", "data", "--tokenizer", "bytes", "--workers", "1")

    def start(self, *words: object, code: int = 0, **changes: object) -> subprocess.CompletedProcess:
        done = smoke.start(words, environment(**changes), self.folder)
        assert done.returncode == code and "Traceback" not in done.stderr, done.stderr
        return done

    def train(self, name: str, **changes: object) -> dict:
        """A run; its result."""
        self.start("driver.py", ROOT, **{**TINY, "DATA_PATH": "data", "RUN_ID": name, **changes})
        return self.result(name)

    def result(self, name: str) -> dict:
        return json.loads((self.folder / "runs" / name / "result.json").read_text())


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Place:
    """With a run "plain" without n-grams, and "counted" with them."""
    place = Place(tmp_path_factory.mktemp("ngrams"))
    place.train("plain", EVAL_STATEFUL=0, EVAL_STRIDE=0)
    place.train("counted", NGRAM_ORDER=3, SAVE_EVERY=8, KEEP=3)
    return place


def test_a_run_with_counts_is_better_and_its_clock_counts_them(place):
    plain, counted = place.result("plain"), place.result("counted")
    assert counted["val_bpb"] < plain["val_bpb"] - 0.2 and counted["bytes_by_class"]["counts"] > 500
    assert counted["params"] == plain["params"] and "counts" not in plain["bytes_by_class"]
    for way in ("val_bpb_stateful", "val_bpb_sliding"):  # more is known of a document
        assert plain["val_bpb"] / 2 < counted[way] < counted["val_bpb"]
    assert counted["train_seconds"] > 2
    log = (place.folder / "runs" / "counted" / "log.txt").read_text()
    assert int(re.search(r"^step:1/16 .* train_time:(\d+)ms", log, re.M)[1]) >= 2000


def test_the_artifact_alone_scores_as_the_run_did(place):
    result, path = place.result("counted"), place.folder / "runs" / "counted" / "model.upar"
    network, _, _ = S.load_model("ARTIFACT", str(path), counts=S.NGrams)
    shard, = sorted((place.folder / "data").glob("*_val_*.bin"))
    tokens, nats = torch.from_numpy(np.fromfile(shard, dtype="<u2", offset=1024).astype(np.int64)), 0.0
    with torch.no_grad():
        for part in (tokens[at : at + 33] for at in range(0, len(tokens) - 1, 32)):
            nats -= network(part[None, :-1])[0].double().log_softmax(-1).gather(1, part[1:, None]).sum().item()
    assert nats == pytest.approx(result["val_nats"], rel=1e-6)
    alone, _, _ = S.load_model("ARTIFACT", str(path.parent / "step_000008"), counts=S.NGrams)
    assert alone.ngrams is None  # a checkpoint is the network's
    log = (path.parent / "log.txt").read_text(encoding="utf-8")
    said = re.search(r"^n-grams: weights of network and counts, by 1, its entropy and theirs: (.*)$", log, re.M)[1]
    mix = network.ngrams.mix.flatten()
    assert mix.tolist() == pytest.approx(list(map(float, said.split())), abs=2e-3) and mix.abs().max() > 0.1
    tuned, _, _ = S.load_model("INIT_FROM", str(path))  # as post-training begins
    assert tuned.ngrams is None and set(tuned.state_dict()) == set(alone.state_dict())
    asked = dict(ARTIFACT=path, PROMPT="ab", MAX_NEW_TOKENS=8, NUM_SAMPLES=2)
    assert place.start(ROOT / "sample.py", **asked).stderr == ""


def test_a_resumed_run_is_the_straight_one(place):
    """Bit for bit: it counts again."""
    runs = place.folder / "runs"
    shutil.copytree(runs / "counted", runs / "again")
    shutil.rmtree(runs / "again" / "step_000016")
    for name in ("result.json", "model.upar", "progress.json"):
        (runs / "again" / name).unlink()
    place.start("driver.py", ROOT, RESUME="again")
    counted, again = place.result("counted"), place.result("again")
    assert again["artifact_sha256"] == counted["artifact_sha256"] and again["val_nats"] == counted["val_nats"]
    assert again["events"][0]["event"] == "resume" and again["train_seconds"] > 2


def test_counts_that_leave_no_room_are_a_mistake_at_once(place):
    done = place.start("driver.py", ROOT, code=2, **{
        **TINY, "DATA_PATH": "data", "RUN_ID": "large", "NGRAM_ORDER": 4, "ARTIFACT_BYTES_MAX": (1 << 18) + 500})
    assert done.stderr.startswith("error: NGRAM_MIN_COUNT=2: counts leave ") and done.stderr.count("\n") == 1
    assert not (place.folder / "runs" / "large").exists()


def test_quantize_reads_what_has_counts(place, call):
    run, (out, again, delta, applied) = place.folder / "runs" / "counted", (place.folder / name for name in "abcd")
    for words in (["info", run / "model.upar", "--tensors"], ["verify", run / "model.upar"],
                  ["pack", run / "model.upar", again], ["verify", again], ["compare", run / "model.upar", again],
                  ["bitdelta", run / "model.upar", again, delta], ["apply", run / "model.upar", delta, applied],
                  ["pack", run, out, "--weights", "ema"], ["verify", out, run, "--weights", "ema"]):
        code, _, err = call(*words, DISTILL_STEPS=2, DATA_PATH=place.folder / "data")
        assert code == 0, (words, err)
    network, _, _ = S.load_model("ARTIFACT", str(run / "model.upar"), counts=S.NGrams)
    assert torch.equal(torch.load(applied / "model.pt")["ngrams.packed"], network.ngrams.packed)
    code, _, err = call("verify", run / "model.upar", run, "--weights", place.result("counted")["weights"])
    assert code == 0, err  # its network; a checkpoint has no counts
    code, _, err = call("export", run / "model.upar", place.folder / "exported")
    assert code == 2 and "ngram_order=3" in err
