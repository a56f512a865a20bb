"""The whole chain, script by script: pretrain, SFT, reward model, DPO, PPO, pack, chat.

The everyday form is too short to learn much and asserts that each link reads what the one before
wrote; the `full` form trains every link for more steps and asserts what each gains on held-out
rows.
"""

import json
import re

import pytest

from conftest import ROOT, environment, read_json, start


class Chain:
    """Runs in a folder, one a link; each takes settings and has a result."""

    def __init__(self, folder):
        self.folder = folder
        always = dict(MAX_WALLCLOCK_SECONDS=0, RESERVE_SECONDS=0, SAVE_EVERY=0, TRAIN_SEQ_LEN=64)
        self.always = dict(always, OUT_DIR=folder / "runs")

    def call(self, script, *words, given="", **settings):
        """Return what a script prints, which must end well."""
        done = start([ROOT / script, *words], environment(**settings), self.folder, given)
        assert done.returncode == 0, done.stdout[-800:] + done.stderr[-2000:]
        assert "Traceback" not in done.stderr, done.stderr
        return done.stdout

    def train(self, name, script, steps, **settings):
        """Return the result of a run of so many steps."""
        given = {**self.always, "RUN_ID": name, "ITERATIONS": steps, **settings}
        if script == "train_ppo.py":
            del given["TRAIN_SEQ_LEN"]
        self.call(script, **given)
        result = read_json(self.of(name) / "result.json")
        assert all(phase["steps"] for phase in result["phases"].values()), (name, result["phases"])
        return result

    def of(self, name):
        return self.folder / "runs" / name

    def prepare(self, lines):
        """Write problems and pairs, and text about digits, which has seen them sorted but never
        asked for.

        If the text said nothing of the task, tuning was slower from the base than from nothing
        (docs/lab/2026-11.md, 2026-11-22).
        """
        self.call("data/tasks.py", "sort", "--problems", lines // 2, "--pairs", lines // 2)
        numbers = [f"{i * 7919 % 100003:05d}" for i in range(lines)]
        orders = {number: "".join(sorted(number)) for number in numbers}
        texts = [f"{n} in order is {orders[n]}, backwards {n[::-1]}." for n in numbers]
        rows = [json.dumps({"text": "\n".join(texts[i : i + 20])}) for i in range(0, lines, 20)]
        (self.folder / "text.jsonl").write_text("\n".join(rows))
        words = "text.jsonl --out data --tokenizer bytes --workers 1".split()
        self.call("data/prepare.py", *words)

    def pretrain(self, name, steps, layers, dim, heads):
        given = dict(DATA_PATH=self.folder / "data", COMPILE=0, EVAL_STRIDE=0)
        given |= dict(LAYER_PATTERN=layers, MODEL_DIM=dim, NUM_HEADS=heads, NUM_KV_HEADS=heads)
        return self.train(name, "train_gpt.py", steps, TRAIN_BATCH_TOKENS=2048, **given)

    def chat(self, name, lines):
        settings = dict(ARTIFACT=self.of(name) / "model.upar", TEMPERATURE=0, MAX_NEW_TOKENS=16)
        return self.call("sample.py", given=lines, MODE="chat", **settings)


def test_each_link_reads_what_the_one_before_wrote(tmp_path):
    chain = Chain(tmp_path)
    chain.prepare(1000)
    chain.pretrain("base", 12, "g a", 48, 2)
    few = dict(EVAL_PROMPTS=8)
    rows = dict(few, INIT_FROM=chain.of("base"), TRAIN_BATCH_TOKENS=1024)
    sft = chain.train("sft", "train_sft.py", 10, **rows)
    assert sft["after"]["loss"][0] < sft["before"]["loss"][0]
    pairs = dict(few, INIT_FROM=chain.of("sft"), PAIRS_PER_STEP=16)
    judge = chain.train("judge", "train_dpo.py", 7, OBJECTIVE="reward", **pairs)
    assert 0 <= judge["after"]["accuracy"][0] <= 1
    chain.train("dpo", "train_dpo.py", 7, **pairs)
    rollout = dict(few, PROMPTS_PER_STEP=4, GROUP_SIZE=2, MAX_NEW_TOKENS=8)
    models = dict(INIT_FROM=chain.of("dpo"), REWARD_MODEL=chain.of("judge"))
    ppo = chain.train("ppo", "train_ppo.py", 7, **models, **rollout)
    assert ppo["init_from"] == str(chain.of("dpo") / "final")
    packed = tmp_path / "ppo4.upar"
    chain.call("quantize.py", "pack", chain.of("ppo"), packed, "--bits", 4)
    assert packed.stat().st_size < (chain.of("ppo") / "model.upar").stat().st_size
    assert chain.chat("ppo", "52713\n/reset\n9081\n").endswith("\n")  # at most a few words


@pytest.mark.full
def test_every_link_learns(tmp_path):
    """What every link gains, by its own held-out figures."""
    chain = Chain(tmp_path)
    chain.prepare(8000)
    chain.pretrain("base", 150, "g a g", 64, 4)
    chain.pretrain("half", 60, "g a", 32, 2)
    sft = chain.train("sft", "train_sft.py", 120, INIT_FROM=chain.of("base"))
    assert sft["gain"]["loss"][1] > 0
    start = dict(INIT_FROM=chain.of("sft"))
    judge = chain.train("judge", "train_dpo.py", 200, OBJECTIVE="reward", **start)
    dpo = chain.train("dpo", "train_dpo.py", 60, **start)
    assert judge["after"]["accuracy"][1] > 0.75 and dpo["after"]["accuracy"][1] > 0.75
    ppo = chain.train("ppo", "train_ppo.py", 100, EVAL_PROMPTS=256, **start)
    assert ppo["gain"]["pass1"][1] > 0
    # A hundred rows: with 20,000 the labels say what the teacher says (docs/distillation.md).
    chain.call("data/tasks.py", *"sort --problems 100 --seed 2 --out few".split())
    files = dict(TRAIN_FILES="few/sort.jsonl", VAL_FILES="data/sort.jsonl")
    teacher = dict(TEACHER=chain.of("ppo"), KD_ALPHA=1, KD_TEMPERATURE=4)
    losses = []
    for given in ({}, teacher):
        given = {**files, **given, "INIT_FROM": chain.of("half")}
        done = chain.train(f"few_{len(given)}", "train_sft.py", 200, **given)
        losses.append(done["after"]["loss"])
    alone, taught = losses
    assert taught[2] < alone[1]  # their intervals do not meet
    assert re.search(r"[0-9]{5}", chain.chat("ppo", "52713\n"))
