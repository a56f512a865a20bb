"""The whole chain, script by script: pretrain, SFT, reward model, DPO, PPO, distil, pack, chat.

The everyday form is too short to learn much and asserts that each link reads what the one before
wrote; the `full` form trains every link for its share of ten minutes on two quiet cores and asserts
what each gains on held-out rows.
"""

import json
import re
import time

import pytest

from conftest import ROOT, environment, start

HALF = dict(MODEL_DIM=32, NUM_HEADS=2, LAYER_PATTERN="g a")


class Chain:
    """Runs in a folder, one a link; each takes settings and has a result."""

    def __init__(self, folder, threads, **always):
        self.folder = folder
        self.threads = threads
        self.always = dict(always, SAVE_EVERY=0, OUT_DIR=folder / "runs")

    def call(self, script, *words, given="", **settings):
        """Return what a script prints, which must end well."""
        environ = environment(OMP_NUM_THREADS=self.threads, **settings)
        done = start([ROOT / script, *words], environ, self.folder, given)
        assert done.returncode == 0, done.stdout[-800:] + done.stderr[-2000:]
        assert "Traceback" not in done.stderr, done.stderr
        return done.stdout

    def train(self, name, script, seconds=0, steps=0, **settings):
        """Return the result of a run of so many steps, or with so many seconds on its clock."""
        clock = dict(MAX_WALLCLOCK_SECONDS=seconds, ITERATIONS=steps)
        clock["RESERVE_SECONDS"] = min(3.0, 0.3 * seconds)
        self.call(script, RUN_ID=name, **{**self.always, **clock, **settings})
        result = json.loads((self.of(name) / "result.json").read_text())
        assert all(phase["steps"] for phase in result["phases"].values()), (name, result["phases"])
        return result

    def of(self, name):
        return self.folder / "runs" / name

    def pretrain(self, lines, **settings):
        """Train on text about digits, over bytes, which has seen them sorted but never asked for.

        If the text said nothing of the task, tuning was slower from the base than from nothing
        (docs/lab.md, 2026-11-22).
        """
        numbers = [f"{i * 7919 % 100003:05d}" for i in range(lines)]
        orders = {number: "".join(sorted(number)) for number in numbers}
        texts = [f"{n} in order is {orders[n]}, backwards {n[::-1]}." for n in numbers]
        rows = [json.dumps({"text": "\n".join(texts[i : i + 20])}) for i in range(0, lines, 20)]
        (self.folder / "text.jsonl").write_text("\n".join(rows))
        words = "text.jsonl --out data --tokenizer bytes --workers 1".split()
        self.call("data/prepare.py", *words)
        data = dict(DATA_PATH=self.folder / "data", COMPILE=0, EVAL_STRIDE=0, HOLDOUT_TOKENS=4096)
        return self.train("base", "train_gpt.py", TRAIN_BATCH_TOKENS=2048, **data, **settings)

    def chat(self, name, lines):
        settings = dict(ARTIFACT=self.of(name) / "model.upar", TEMPERATURE=0, MAX_NEW_TOKENS=16)
        return self.call("sample.py", given=lines, MODE="chat", **settings)


def test_each_link_reads_what_the_one_before_wrote(tmp_path):
    chain = Chain(tmp_path, 1)
    tiny = dict(EVAL_PROMPTS=8)
    shape = dict(LAYER_PATTERN="g a", MODEL_DIM=48, NUM_HEADS=2, NUM_KV_HEADS=2, TRAIN_SEQ_LEN=64)
    chain.pretrain(2000, steps=12, **shape)
    few = dict(DEMONSTRATIONS=200, **tiny)
    sft = chain.train("sft", "train_sft.py", steps=10, INIT_FROM=chain.of("base"), **few)
    assert sft["after"]["loss"][0] < sft["before"]["loss"][0]
    pairs = dict(INIT_FROM=chain.of("sft"), TRAIN_PAIRS=64, **tiny)
    judge = chain.train("judge", "train_dpo.py", steps=4, OBJECTIVE="reward", **pairs)
    dpo = chain.train("dpo", "train_dpo.py", steps=4, **pairs)
    assert 0 <= judge["after"]["accuracy"][0] <= 1
    assert dpo["init_from"] == str(chain.of("sft") / "model.upar")
    rollout = dict(PROMPTS_PER_STEP=4, GROUP_SIZE=2, MAX_NEW_TOKENS=8, **tiny)
    models = dict(INIT_FROM=chain.of("dpo"), REWARD_MODEL=chain.of("judge"))
    ppo = chain.train("ppo", "train_ppo.py", steps=4, **models, **rollout)
    assert ppo["init_from"] == str(chain.of("dpo") / "model.upar")
    small = chain.train("small", "train_sft.py", steps=4, TEACHER=chain.of("ppo"), **HALF, **few)
    assert small["params"]["total"] < 0.7 * ppo["params"]["total"]
    packed = tmp_path / "small4.upar"
    chain.call("quantize.py", "pack", chain.of("small"), packed, MATRIX_BITS=4)
    assert packed.stat().st_size < (chain.of("small") / "model.upar").stat().st_size
    assert chain.chat("small", "52713\n/reset\n9081\n").endswith("\n")  # at most a few words


@pytest.mark.full
def test_the_chain_learns_within_ten_minutes(tmp_path):
    """What every link gains, by its own held-out figures; -s prints them."""
    begin = time.perf_counter()
    chain = Chain(tmp_path, 2)
    shape = dict(LAYER_PATTERN="g a g", MODEL_DIM=64, NUM_HEADS=4, NUM_KV_HEADS=4)
    base = chain.pretrain(6000, seconds=15, TRAIN_SEQ_LEN=128, **shape)
    sft = chain.train("sft", "train_sft.py", seconds=14, INIT_FROM=chain.of("base"))
    assert sft["gain"]["loss"][1] > 0
    init = dict(INIT_FROM=chain.of("sft"))
    judge = chain.train("judge", "train_dpo.py", seconds=40, OBJECTIVE="reward", **init)
    dpo = chain.train("dpo", "train_dpo.py", seconds=30, **init)
    assert judge["after"]["accuracy"][1] > 0.75 and dpo["after"]["accuracy"][1] > 0.75
    model = dict(REWARD_MODEL=chain.of("judge"), **init)
    by_model = chain.train("by_model", "train_ppo.py", seconds=45, **model)
    ppo = chain.train("ppo", "train_ppo.py", seconds=120, **init)
    assert ppo["gain"]["pass1"][1] > 0
    # A hundred rows: with 20,000 the labels say what the teacher says, and its forward costs steps
    # (docs/distillation.md).
    few = dict(DEMONSTRATIONS=100, EPOCHS=1000, **HALF)
    teacher = dict(TEACHER=chain.of("ppo"), KD_ALPHA=1, KD_TEMPERATURE=4)
    losses = []
    for seed in (1, 2, 3):
        for name, given in (("alone", {}), ("taught", teacher)):
            settings = dict(seconds=25, SEED=seed, **few, **given)
            done = chain.train(f"{name}_{seed}", "train_sft.py", **settings)
            losses.append(done["after"]["loss"])
    said = chain.chat("ppo", "52713\n")
    figures = [base["val_bpb"], sft["gain"], by_model["gain"], ppo["gain"], losses, said]
    print(f"{time.perf_counter() - begin:.0f} s", *figures, sep="\n")
    for alone, taught in zip(losses[::2], losses[1::2], strict=True):  # their intervals do not meet
        assert taught[2] < alone[1]
    assert re.search(r"[0-9]{5}", said)
