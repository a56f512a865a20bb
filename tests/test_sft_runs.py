"""Whole runs of train_sft.py, tiny: what they leave, learn, resume, repeat and refuse;
distillation; the guides.
"""

import functools
import json
import re
import signal
import string

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_data import train_model

import sample as P
import train_sft as S
from conftest import (
    BYTES,
    POST,
    Place,
    check_result,
    own_settings,
    pack,
    phases_of,
    run_guide,
    small_network,
    stop_at,
    write_lines,
)

SHORT = dict(ITERATIONS=2, EMA=0, SWA=0, QAT=0, SAVE_EVERY=0)


def rows_of(count):
    """Return rows: a word of three letters, and it in capitals."""
    words = []
    for n in range(count):
        words.append("".join(chr(97 + 11 * n // 26**place % 26) for place in range(3)))
    return [{"instruction": word, "output": word.upper()} for word in words]


def read(path):
    settings = S.Settings(train_seq_len=64, train_files=str(path))
    tokenizer = S.load_tokenizer("bytes")
    parse = functools.partial(S.parse_row, tokenizer=tokenizer, settings=settings)
    return S.read_examples(settings, parse, [].append)


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """Return a place for runs from random weights on 300 rows."""
    folder = tmp_path_factory.mktemp("sft")
    tiny = own_settings("train_sft", dict(POST, ITERATIONS=20, SAVE_EVERY=8, LEARNING_RATE=0.02))
    tiny |= dict(TRAIN_FILES=write_lines(folder / "rows.jsonl", rows_of(300)), EVAL_PROMPTS=512)
    return Place(
        folder,
        None,
        dict(tiny, INIT_FROM=pack(small_network(), BYTES, folder / "blank")),
        "train_sft",
    )


@pytest.fixture(scope="session")
def straight(place):
    """Return a run without faults that others are compared with; its folder's name."""
    assert place.run("straight").err == ""
    return "straight"


# ------------------------------------------------------------------------------------ one whole run
def test_the_result_is_complete_and_agrees_with_the_log(place, straight):
    check_result(place, straight, "train_sft")
    result = place.result(straight)
    log = place.log(straight)
    for name in ("loss", "accuracy"):
        scores = [result[key][name] for key in ("before", "after", "gain", "packed")]
        cells = [re.escape("{:.4f} [{:.4f}, {:.4f}]".format(*score)) for score in scores]
        assert re.search(rf"^ +{name} +{' *'.join(cells)}$", log, re.M)
    steps = place.steps(straight)
    assert len(steps) == result["steps"] == 20
    assert 0 < sum(step["targets"] for step in steps) < result["tokens"]
    assert 285 < result["rows"] + result["before"]["rows"] < 300
    assert "data: " in log and "300 rows, used 300 Alpaca; left out none\n" in log
    facts = {"used": {"Alpaca": 300}, "left_out": {}, "twice": 0}
    assert [*result["row_files"].values()] == [facts]
    said = r"^first scores: the losses of \d+ held-out rows, and some answers$"
    assert re.search(said, log, re.M)


def test_it_learns_and_all_phases_fire(place, straight):
    result = place.result(straight)
    steps = place.steps(straight)
    assert result["gain"]["loss"][1] > 1 and steps[-1]["loss"] < steps[0]["loss"] - 1
    assert result["gain"]["accuracy"][1] > 0.05
    phases = dict(warmup=(1, 1), warmdown=(11, 10), ema=(18, 3), qat=(18, 3), swa=(19, 2))
    assert phases_of(place, straight) == phases
    for step in steps:
        assert step["loss"] == step["nats"] and "kd" not in step and step["grad_norm"] > 0


def test_the_file_alone_gives_the_score(place, straight):
    """sample.py's load_model and a forward of each held-out row by itself: loss, accuracy,
    intervals and gain; of the trained weights, and of the artifact.
    """
    for file, name in (("final", "after"), ("model.upar", "packed")):
        check_score_of_file(place, straight, file, name)
    after, packed = (place.result(straight)[name]["loss"][0] for name in ("after", "packed"))
    assert after != packed == pytest.approx(after, abs=0.05)
    assert f"packing: {packed - after:+.4f} nats per token against" in place.log(straight)


def check_score_of_file(place, straight, file, key):
    """Check the scores that the result has under this key: they are of the file's network."""
    result = place.result(straight)
    network, *_ = P.load_model("ARTIFACT", str(place.of(straight) / file))
    found = []
    for row in read(place.tiny["TRAIN_FILES"]).held_out:
        said = row.targets >= 0
        assert said.sum() == 4  # three letters and the end
        with torch.no_grad():
            logits = network(row.ids[None])[0, said]
        nats = F.cross_entropy(logits, row.targets[said]).item()
        found.append([nats, (logits.argmax(-1) == row.targets[said]).float().mean().item()])
    assert result[key]["rows"] == len(found) and result[key]["tokens"] == 4 * len(found)
    for name, each, sign in zip(("loss", "accuracy"), np.array(found).T, (-1, 1), strict=True):
        mean, low, high = result[key][name]
        assert mean == pytest.approx(each.mean(), rel=1e-4)
        assert high - mean == pytest.approx(1.96 * each.std(ddof=1) / len(each) ** 0.5, rel=1e-3)
        assert high - mean == pytest.approx(mean - low)
        change = mean - result["before"][name][0]
        if key == "after":
            assert result["gain"][name][0] == pytest.approx(sign * change)


def test_rl_goes_on_from_here(place, straight):
    """Its prompts are laid out as they were learned: what the policy samples are capitals, and
    ends.
    """
    network, tokenizer, _ = P.load_model("INIT_FROM", str(place.of(straight)))
    prompt = P.asked_ids(tokenizer, [("<|user|>", "cat")])
    samples = P.generate(network, [prompt], 50, 8, 1.0, [(0,)], P.stop_ids(tokenizer))
    text = "".join(P.completion(tokenizer, prompt, sample.ids) for sample in samples)
    assert sum(letter in string.ascii_uppercase for letter in text) > 0.7 * len(text) > 40
    assert sum(sample.finished for sample in samples) > 30


def test_recorded_answers_are_what_the_model_writes(place, straight):
    """The likeliest ones, as `generate` draws them with its caches, at the start and at the end."""
    lines = (place.of(straight) / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    steps = place.result(straight)["steps"]
    assert {row["step"] for row in rows} >= {0, steps}
    assert len({row["prompt"] for row in rows}) == S.RECORDED_PROMPTS
    network, tokenizer, _ = P.load_model("ARTIFACT", str(place.of(straight) / "final"))
    for row in rows:
        assert row["phase"] == "held_out" and row["answer"] == row["prompt"].upper()
        if row["step"] == steps:
            prompt = P.asked_ids(tokenizer, [("<|user|>", row["prompt"])])
            (sample,) = P.generate(network, [prompt], 1, 8, 0.0, [(0,)], P.stop_ids(tokenizer))
            assert row["completion"] == P.completion(tokenizer, prompt, sample.ids)
            assert row["finished"] == sample.finished
    prompt = rows[-S.RECORDED_PROMPTS]["prompt"]
    assert f"sample: end, held out, prompt {prompt!r}\n" in place.log(straight)


# --------------------------------------------------------------------------- stopped, and once more
def test_stopped_by_sigterm_and_resumed_to_the_same_byte(place, straight):
    child = place.run("stopped", stop_at(12), 128 + signal.SIGTERM)
    said = r"stopped by SIGTERM after step 13; RESUME=\S+ continues it"
    assert child.err == "" and re.search(said, child.out)
    assert not (place.of("stopped") / "result.json").exists()
    place.resume("stopped")
    place.same("stopped", straight)
    samples = [(place.of(run) / "samples.jsonl").read_bytes() for run in ("stopped", straight)]
    assert samples[0] == samples[1]
    assert [event["event"] for event in place.result("stopped")["events"]] == ["resume"]


def test_two_ranks_learn_the_same(place, straight):
    """As one process in its first steps, but for the order of sums."""
    place.ranks("on 2", ITERATIONS=4, SWA=0, QAT=0)
    assert place.result("on 2")["world_size"] == 2
    one = place.result(straight)["before"]["loss"]
    assert place.result("on 2")["before"]["loss"] == pytest.approx(one, rel=1e-2)
    steps = list(zip(place.steps(straight), place.steps("on 2"), strict=False))[:2]
    for one, two in steps:
        assert two["targets"] == one["targets"]
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-3)
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-2)


@pytest.mark.full
def test_fewer_rows_than_ranks(place):
    files = dict(
        TRAIN_FILES=write_lines(place.folder / "one.jsonl", rows_of(1)),
        VAL_FILES=write_lines(place.folder / "two.jsonl", rows_of(3)[1:]),
    )
    place.ranks("few", ranks=3, TRAIN_BATCH_TOKENS=384, **{**SHORT, **files})
    place.run("few alone", TRAIN_BATCH_TOKENS=384, **{**SHORT, **files})
    few, alone = (place.result(name)["after"]["loss"] for name in ("few", "few alone"))
    assert few == pytest.approx(alone, rel=1e-3)


def test_epochs_set_the_steps_where_iterations_do_not(place):
    """From a small new model, with a clock that does not end the run; AdamW in 8 bits, layers
    computed twice.
    """
    path = write_lines(place.folder / "few.jsonl", rows_of(90))
    given = dict(EPOCHS=3, ITERATIONS=0, MAX_WALLCLOCK_SECONDS=600, VAL_LOSS_EVERY=3, INIT_FROM="")
    given |= dict(TRAIN_FILES=path, EVAL_PROMPTS=6, OPTIMIZER="adamw8bit")
    place.run("epochs", ACTIVATION_CHECKPOINTING=1, **given)
    result = place.result("epochs")
    log = place.log("epochs")
    steps = int(re.search(r"an epoch is \d+ windows in (\d+) steps", log)[1])
    data = read(path)
    assert result["steps"] == 3 * steps and result["rows"] == len(data.train)
    assert result["before"]["rows"] == 6 and result["init_from"] == "new"
    assert result["tokens"] == 3 * sum(len(row.ids) for row in data.train)
    targets = sum(int((row.targets >= 0).sum()) for row in data.train)
    assert sum(step["targets"] for step in place.steps("epochs")) <= 3 * targets
    held_out = r"held_out/rows:6 held_out/tokens:24 held_out/loss:\S+ held_out/accuracy:"
    said = re.findall(rf"^step:(\d+)/\d+ {held_out}", log, re.M)
    assert list(map(int, said)) == list(range(0, 3 * steps + 1, 3))


# ------------------------------------------------------------------------- where a run starts from
def test_adapters_alone_are_trained_and_the_artifact_has_none(place, straight):
    given = dict(INIT_FROM=place.of(straight), LORA_RANK=4, QAT=0, ITERATIONS=8)
    place.run("lora", "T.KEEP_CHECKPOINTS = 9", **given)
    before, after = (place.checkpoint("lora", step) for step in (0, 8))
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved and all(name.endswith((".lora_a", ".lora_b")) for name in moved)
    _, tensors, _ = S.read_artifact(place.of("lora") / "model.upar")
    assert not any("lora" in name or "parametrizations" in name for name in tensors)
    result = place.result("lora")
    assert result["init_from"] == str(place.of(straight) / "final")
    assert f"start: {place.of(straight) / 'final'}\n" in place.log("lora")
    final = place.of("lora") / "final"
    assert sorted(path.name for path in final.iterdir()) == ["SHA256SUMS", "meta.json", "model.pt"]
    state = torch.load(final / "model.pt", weights_only=True)
    assert state.keys() == tensors.keys()  # adapters are merged
    assert result["gain"]["loss"][0] > 0 and result["before"] == place.result(straight)["after"]


@pytest.fixture(scope="session")
def plain(tmp_path_factory):
    """Return the folder of a model whose tokenizer has no role tokens."""
    folder = tmp_path_factory.mktemp("plain")
    tokenizer = S.load_tokenizer(train_model(folder / "tokenizer.model", control_symbols=[]))
    return pack(small_network(tokenizer=tokenizer), tokenizer, folder)


def test_a_vocabulary_grows_by_role_tokens(place, plain):
    place.run("grown", INIT_FROM=plain)
    result = place.result("grown")
    size = S.load_tokenizer(plain / "tokenizer.model").vocab_size
    _, tensors, _ = S.read_artifact(place.of("grown") / "model.upar")
    assert len(tensors["embed"]) == size + 4 and result["gain"]["loss"][1] > 0.5
    rows = tensors["embed"][-4:]
    assert (rows[1] - rows[2]).abs().max() > 0.01  # they began alike
    place.run("grown further", INIT_FROM=place.of("grown"), **SHORT)
    assert place.result("grown further")["before"] == result["after"]
    line = place.refused("grown lora", INIT_FROM=plain, LORA_RANK=2, QAT=0)
    assert "has no role tokens, and adapters would not learn" in line


# ------------------------------------------------------------------------------------ distillation
def test_a_half_size_student_learns_from_a_teacher(place, straight):
    """Stopped in QAT, resumed to the same byte, with a projection that is kept and not exported."""
    student = pack(small_network(layers="g", model_dim=16), BYTES, place.folder / "half")
    given = dict(INIT_FROM=student, TEACHER=place.of(straight), KD_LOSS="projection")
    place.run("half run", **given)
    result = place.result("half run")
    steps = place.steps("half run")
    assert result["gain"]["loss"][1] > 0.3 and steps[-1]["kd"] < steps[0]["kd"]
    for step in steps:
        assert step["loss"] == pytest.approx(0.5 * step["nats"] + 0.5 * step["kd"], rel=1e-3)
    teacher = place.result(straight)["after"]  # its unrounded weights
    assert {name: result["teacher"][name] for name in teacher} == teacher
    assert re.search(r"^ +before +teacher$", place.log("half run"), re.M)
    place.run("half stopped", stop_at(17), 128 + signal.SIGTERM, **given)
    (folder, _) = S.newest_checkpoint(place.of("half stopped"))
    training = torch.load(folder / "training.pt", weights_only=True)
    assert [list(w.shape) for w in training["projection"].values()] == [[32, 16]]
    place.resume("half stopped")
    place.same("half stopped", "half run")
    _, tensors, _ = S.read_artifact(place.of("half run") / "model.upar")
    network, *_ = P.load_model("ARTIFACT", str(place.of("half run")))
    assert tensors.keys() == network.state_dict().keys() and network.config.model_dim == 16


FAULTS = [
    (
        {"INIT_FROM": "PLAIN", "TEACHER": "STRAIGHT"},
        r"TEACHER='.*': .*final has the tokenizer bytes \(sha256 \w{12}\); must be the student's, "
        r"tokenizer.model \(sha256 \w{12}\), with role tokens",
    ),
    ({"KD_ALPHA": 0.9}, "KD_ALPHA=0.9: needs a TEACHER"),
    (
        {"TEACHER": "STRAIGHT", "KD_LOSS": "pool", "KD_ALPHA": 1},
        "KD_ALPHA=1: must be less, or KD_LOSS=pool trains no head",
    ),
    ({"TEACHER": "STRAIGHT", "KD_TOP_K": 1}, "KD_TOP_K=1: must be 0 or at least 2"),
    ({"TEACHER": "STRAIGHT", "COMPILE": 1}, "COMPILE=1: must be 0 with a TEACHER"),
    ({"TRAIN_BATCH_TOKENS": 100}, "TRAIN_BATCH_TOKENS=100: must be a multiple of TRAIN_SEQ_LEN x"),
    ({"LORA_RANK": 4, "QAT": 1}, "QAT=1: adapters are not quantized"),
    (
        {"TRAIN_SEQ_LEN": 8, "TRAIN_BATCH_TOKENS": 8},
        r"used none; left out more than TRAIN_SEQ_LEN=8 tokens: 300 .*must hold one",
    ),
]


def test_a_fault_is_one_line(place, straight, plain):
    words = {"STRAIGHT": place.of(straight), "PLAIN": plain}
    for changes, said in FAULTS:
        given = {name: words.get(value, value) for name, value in changes.items()}
        line = place.refused("fault", **{**SHORT, **given})
        assert re.search(said, line), line


# --------------------------------------------------------------------------------------- the guides
@pytest.mark.full
@pytest.mark.parametrize("guide", ["sft.md", "distillation.md"])
def test_every_command_of_the_guides(tmp_path, guide):
    rows = rows_of(200)
    write_lines(tmp_path / "a.jsonl", rows)
    turns = [(("user", row["output"]), ("assistant", row["instruction"])) for row in rows]
    rows = [{"messages": [dict(role=role, content=text) for role, text in row]} for row in turns]
    write_lines(tmp_path / "b.jsonl", rows)
    run_guide(guide, tmp_path, least=5)
