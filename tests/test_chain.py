"""The whole chain, script by script as a user types it: pretrain, SFT, reward model, DPO, PPO, distil, pack, chat.

The everyday form is too short to learn much and asserts that each link reads what the one before wrote; the `full` form
trains every link for its share of ten minutes on two cores and asserts what each gains on held-out rows.
"""

import json
import math
import os
import re
import time
from pathlib import Path

import pytest
import test_smoke as smoke

ROOT = Path(__file__).resolve().parents[1]
KEPT = ("PATH", "HOME", "TMPDIR", "LANG", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV")
SHAPE = dict(LAYER_PATTERN="g a g", MODEL_DIM=64, NUM_HEADS=4, TRAIN_SEQ_LEN=128)


class Chain:
    """Runs in a folder, one a link; each takes settings and has a result."""

    def __init__(self, folder, threads, **always):
        self.folder, self.threads, self.always, self.seconds = folder, threads, always, {}

    def call(self, script, *words, given="", **settings):
        """What a script prints, which must end well."""
        kept = {name: os.environ[name] for name in KEPT if name in os.environ}
        environ = {
            **kept,
            "OMP_NUM_THREADS": str(self.threads),
            "DEVICE": "cpu",
            **{name: str(value) for name, value in settings.items()},
        }
        done = smoke.start([ROOT / script, *words], environ, self.folder, given)
        assert done.returncode == 0, done.stdout[-800:] + done.stderr[-2000:]
        assert "Traceback" not in done.stderr, done.stderr
        return done.stdout

    def train(self, name, script, seconds=0, steps=0, **settings):
        """The result of a run of so many steps, or with so many seconds on its clock."""
        begin = time.perf_counter()
        clock = dict(
            MAX_WALLCLOCK_SECONDS=seconds, RESERVE_SECONDS=min(3.0, 0.3 * seconds), ITERATIONS=steps
        )
        self.call(
            script,
            RUN_ID=name,
            OUT_DIR=self.folder / "runs",
            **{**self.always, **clock, **settings},
        )
        self.seconds[name] = time.perf_counter() - begin
        result = json.loads((self.of(name) / "result.json").read_text())
        assert all(phase["steps"] for phase in result["phases"].values()), (name, result["phases"])
        return result

    def of(self, name):
        return self.folder / "runs" / name

    def score(self, name, **settings):
        """What sample.py writes of a model."""
        path = self.folder / "score.json"
        self.call("sample.py", MODE="score", ARTIFACT=self.of(name), SCORE_FILE=path, **settings)
        return json.loads(path.read_text())


def pretrain(chain, **clock):
    """A model of text about digits, over bytes, which has seen them sorted but never asked for. Where text said nothing
    of the task, tuning was slower from the base than from nothing (docs/lab.md, 2026-11-22)."""
    numbers = [f"{at * 7919 % 100003:05d}" for at in range(6000)]
    lines = [
        f"{number} in order is {''.join(sorted(number))}, backwards {number[::-1]}."
        for number in numbers
    ]
    text = "\n".join(
        json.dumps({"text": "\n".join(lines[at : at + 20])}) for at in range(0, len(lines), 20)
    )
    (chain.folder / "text.jsonl").write_text(text)
    chain.call(
        "data/prepare.py",
        chain.folder / "text.jsonl",
        "--out",
        chain.folder / "data",
        "--tokenizer",
        "bytes",
        "--workers",
        1,
    )
    return chain.train(
        "base",
        "train_gpt.py",
        **clock,
        DATA_PATH=chain.folder / "data",
        **SHAPE,
        NUM_KV_HEADS=4,
        TRAIN_BATCH_TOKENS=2048,
        COMPILE=0,
        EVAL_STRIDE=0,
        VAL_LOSS_EVERY=0,
        HOLDOUT_TOKENS=4096,
        POSITIONS="rope",
        ROPE_DIMS=0,
        BIGRAM_VOCAB_SIZE=0,
    )


def chat(chain, name, lines):
    return chain.call(
        "sample.py",
        given=lines,
        MODE="chat",
        ARTIFACT=chain.of(name) / "model.upar",
        TEMPERATURE=0,
        MAX_NEW_TOKENS=16,
    )


def test_each_link_reads_what_the_one_before_wrote(tmp_path):
    tiny = dict(EVAL_PROMPTS=16, SAVE_EVERY=0)
    chain = Chain(tmp_path, 1, SAVE_EVERY=0)
    base = pretrain(chain, steps=30)
    assert base["val_bpb"] < 5
    sft = chain.train(
        "sft", "train_sft.py", steps=30, INIT_FROM=chain.of("base"), DEMONSTRATIONS=2000, **tiny
    )
    assert sft["after"]["loss"][0] < sft["before"]["loss"][0]
    judge = chain.train(
        "judge",
        "train_dpo.py",
        steps=20,
        INIT_FROM=chain.of("sft"),
        OBJECTIVE="reward",
        TRAIN_PAIRS=512,
        **tiny,
    )
    dpo = chain.train(
        "dpo", "train_dpo.py", steps=20, INIT_FROM=chain.of("sft"), TRAIN_PAIRS=512, **tiny
    )
    assert 0 <= judge["after"]["accuracy"][0] <= 1 and dpo["init_from"] == str(
        chain.of("sft") / "model.upar"
    )
    ppo = chain.train(
        "ppo",
        "train_ppo.py",
        steps=12,
        INIT_FROM=chain.of("dpo"),
        REWARD_MODEL=chain.of("judge"),
        EVAL_SAMPLES=2,
        PROMPTS_PER_STEP=8,
        GROUP_SIZE=4,
        **tiny,
    )
    assert ppo["init_from"] == str(chain.of("dpo") / "model.upar")
    half = dict(MODEL_DIM=32, NUM_HEADS=2, LAYER_PATTERN="g a", DEMONSTRATIONS=2000)
    small = chain.train("small", "train_sft.py", steps=20, TEACHER=chain.of("ppo"), **half, **tiny)
    assert small["params"]["total"] < 0.5 * ppo["params"]["total"]
    chain.call(
        "quantize.py", "pack", chain.of("small"), tmp_path / "runs" / "small4.upar", MATRIX_BITS=4
    )
    assert (tmp_path / "runs" / "small4.upar").stat().st_size < (
        chain.of("small") / "model.upar"
    ).stat().st_size
    assert chat(chain, "small", "52713\n/reset\n9081\n").strip()


@pytest.mark.full
def test_the_chain_learns_within_ten_minutes(tmp_path):
    """What every link gains, by its own held-out figures, and what all of it takes; -s prints them."""
    begin, chain = time.perf_counter(), Chain(tmp_path, 2, SAVE_EVERY=0)
    base = pretrain(chain, seconds=15)
    sft = chain.train("sft", "train_sft.py", seconds=14, INIT_FROM=chain.of("base"))
    assert sft["gain"]["loss"][1] > 0
    judge = chain.train(
        "judge", "train_dpo.py", seconds=40, INIT_FROM=chain.of("sft"), OBJECTIVE="reward"
    )
    assert judge["after"]["accuracy"][1] > 0.75
    dpo = chain.train("dpo", "train_dpo.py", seconds=30, INIT_FROM=chain.of("sft"))
    assert dpo["after"]["accuracy"][1] > 0.75
    by_model = chain.train(
        "by_model",
        "train_ppo.py",
        seconds=45,
        INIT_FROM=chain.of("sft"),
        REWARD_MODEL=chain.of("judge"),
    )
    ppo = chain.train("ppo", "train_ppo.py", seconds=120, INIT_FROM=chain.of("sft"))
    assert ppo["gain"]["pass1"][1] > 0
    # A hundred rows: with 20,000 the labels say what the teacher says, and its forward costs steps
    # (docs/distillation.md).
    half = dict(MODEL_DIM=32, NUM_HEADS=2, LAYER_PATTERN="g a", DEMONSTRATIONS=100, EPOCHS=1000)
    students = {"alone": [], "taught": []}
    for seed in (1, 2, 3):
        for name, given in (
            ("alone", {}),
            ("taught", dict(TEACHER=chain.of("ppo"), KD_ALPHA=1, KD_TEMPERATURE=4)),
        ):
            done = chain.train(
                f"{name}_{seed}", "train_sft.py", seconds=25, SEED=seed, **half, **given
            )
            students[name].append({key: done["after"][key] for key in ("loss", "accuracy")})
    assert done["params"]["total"] < 0.5 * ppo["params"]["total"]
    chain.call("quantize.py", "pack", chain.of("taught_1"), tmp_path / "small.upar", MATRIX_BITS=5)
    said = chat(chain, "ppo", "52713\n")
    seconds = time.perf_counter() - begin
    print(
        json.dumps(
            {
                "seconds": seconds,
                "each": chain.seconds,
                "bpb": base["val_bpb"],
                "sft": sft["gain"],
                "judge": judge["after"]["accuracy"],
                "dpo": dpo["after"]["accuracy"],
                "ppo by model": by_model["gain"],
                "ppo": ppo["gain"],
                "students": students,
                "chat": said,
            },
            indent=1,
        )
    )
    for alone, taught in zip(*students.values(), strict=True):  # their intervals do not meet
        assert taught["loss"][2] < alone["loss"][1]
    assert re.search(r"[0-9]{5}", said) and seconds < 600 and math.isfinite(seconds)
