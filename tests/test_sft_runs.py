"""Whole runs of train_sft.py, tiny: what they leave, learn, resume, repeat and refuse;
distillation; the guides.
"""

import functools
import json
import re
import signal

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
    check_adapters,
    check_early_stop,
    check_notes,
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
    parse = functools.partial(S.parse_row, tokenizer=BYTES, settings=settings)
    return S.read_examples(settings, parse, [].append)


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """Return a place for runs from random weights on 300 rows."""
    folder = tmp_path_factory.mktemp("sft")
    tiny = own_settings("train_sft", dict(POST, ITERATIONS=20, SAVE_EVERY=8, LEARNING_RATE=0.02))
    tiny |= dict(TRAIN_FILES=write_lines(folder / "rows.jsonl", rows_of(300)), EVAL_PROMPTS=512)
    tiny |= dict(INIT_FROM=pack(small_network(), BYTES, folder / "blank"))
    return Place(folder, None, tiny, "train_sft")


@pytest.fixture(scope="session")
def straight(place):
    """Return a run without faults that others are compared with; its folder's name."""
    assert place.run("straight").err == ""
    return "straight"


# ------------------------------------------------------------------------------------ one whole run
def test_a_run_learns_and_its_result_agrees_with_the_log(place, straight):
    check_result(place, straight, "train_sft")
    result = place.result(straight)
    log = place.log(straight)
    steps = place.steps(straight)
    for name in ("loss", "accuracy"):
        scores = [result[key][name] for key in ("before", "after", "gain", "packed")]
        cells = [re.escape("{:.4f} [{:.4f}, {:.4f}]".format(*score)) for score in scores]
        assert re.search(rf"^ +{name} +{' *'.join(cells)}$", log, re.M)
    assert len(steps) == result["steps"] == 20
    assert 0 < sum(step["targets"] for step in steps) < result["tokens"]
    facts = {"used": {"Alpaca": 300}, "left_out": {}, "twice": 0}
    assert [*result["row_files"].values()] == [facts]
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
    result = place.result(straight)
    for file, key in (("final", "after"), ("model.upar", "packed")):
        network, *_ = P.load_model("ARTIFACT", str(place.of(straight) / file))
        found = []
        for row in read(place.tiny["TRAIN_FILES"]).held_out:
            targets = row.targets[-4:]  # three letters and the end
            with torch.no_grad():
                logits = network(row.ids[None])[0, -4:]
            right = (logits.argmax(-1) == targets).float().mean()
            found.append([F.cross_entropy(logits, targets).item(), right.item()])
        assert (result[key]["rows"], result[key]["tokens"]) == (len(found), 4 * len(found))
        for name, values in zip(("loss", "accuracy"), np.array(found).T, strict=True):
            half = 1.96 * values.std(ddof=1) / len(values) ** 0.5
            mean = values.mean()
            expected = [mean, mean - half, mean + half]
            assert result[key][name] == pytest.approx(expected, rel=1e-3)
    before, after, packed = (result[name]["loss"][0] for name in ("before", "after", "packed"))
    assert result["gain"]["loss"][0] == pytest.approx(before - after)
    assert f"packing: {packed - after:+.4f} nats per token against" in place.log(straight)


def test_recorded_answers_are_what_the_model_writes(place, straight):
    """The likeliest ones, as `generate` draws them with its caches from prompts of the RL scripts, at
    the start and at the end. They are capitals then, and end.
    """
    lines = (place.of(straight) / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert {row["step"] for row in rows} >= {0, 20}
    assert len({row["prompt"] for row in rows}) == S.RECORDED_PROMPTS
    network, *_ = P.load_model("ARTIFACT", str(place.of(straight) / "final"))
    for row in rows:
        assert row["phase"] == "held_out" and row["answer"] == row["prompt"].upper()
        if row["step"] == 20:
            prompt = P.asked_ids(BYTES, [("<|user|>", row["prompt"])])
            [one] = P.generate(network, [prompt], 1, 8, 0.0, [(0,)], P.stop_ids(BYTES))
            assert row["completion"] == P.completion(BYTES, prompt, one.ids)
            assert row["completion"].isupper() and row["finished"] == one.finished
    assert "sample: end, held out, prompt " in place.log(straight)


# --------------------------------------------------------------------------- stopped, and once more
def test_stopped_by_sigterm_and_resumed_to_the_same_byte(place, straight):
    child = place.run("stopped", stop_at(12), 128 + signal.SIGTERM)
    assert child.err.count("\n") == 1 and "stopped by SIGTERM after step 13: RESUME=" in child.out
    # The network has room for 2,048 tokens, and every row fits. But the windows would be others.
    line = place.refused("stopped", **{**place.resumed, "TRAIN_SEQ_LEN": 32})
    assert line == "error: TRAIN_SEQ_LEN=32: must stay 64 under RESUME\n"
    place.resume("stopped")
    place.same("stopped", straight)
    samples = [(place.of(run) / "samples.jsonl").read_bytes() for run in ("stopped", straight)]
    assert samples[0] == samples[1]


def test_an_early_end_says_what_there_is(place):
    check_early_stop(place, "train_sft")
    check_notes(place, "train_sft")


def test_epochs_set_the_steps_where_iterations_do_not(place):
    """From a small new model, with a clock that does not end the run; AdamW in 8 bits, layers
    computed twice.
    """
    path = write_lines(place.folder / "few.jsonl", rows_of(90))
    given = dict(EPOCHS=3, ITERATIONS=0, MAX_WALLCLOCK_SECONDS=600, VAL_LOSS_EVERY=3, INIT_FROM="")
    given |= dict(TRAIN_FILES=path, EVAL_PROMPTS=6, OPTIMIZER="adamw8bit")
    place.run("epochs", ACTIVATION_CHECKPOINTING=1, **given)
    result = place.result("epochs")
    steps = int(re.search(r"an epoch is \d+ windows in (\d+) steps", place.log("epochs"))[1])
    tokens = 3 * sum(len(row.ids) for row in read(path).train)
    assert (result["steps"], result["tokens"]) == (3 * steps, tokens)
    assert result["before"]["rows"] == 6 and result["init_from"] == "new"
    scored = place.logged("epochs", "held_out/loss")
    assert [*scored] == [*range(0, 3 * steps + 1, 3)]


# ------------------------------------------------------------------------- where a run starts from
def test_adapters_alone_are_trained_and_the_artifact_has_none(place, straight):
    given = dict(INIT_FROM=place.of(straight), LORA_RANK=4, QAT=0, ITERATIONS=8)
    place.run("lora", "T.KEEP_CHECKPOINTS = 9", **given)
    tensors = check_adapters(place, "lora", 8)
    result = place.result("lora")
    final = place.of("lora") / "final"
    assert f"start: {place.of(straight) / 'final'}\n" in place.log("lora")
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
    _, tensors, _ = S.read_artifact(place.of("grown") / "model.upar")
    assert len(tensors["embed"]) == 404 and result["gain"]["loss"][1] > 0.5
    rows = tensors["embed"][-4:]
    assert (rows[1] - rows[2]).abs().max() > 0.01  # they began alike
    place.run("grown further", INIT_FROM=place.of("grown"), **SHORT)
    assert place.result("grown further")["before"] == result["after"]


# ------------------------------------------------------------------------------------ distillation
def test_a_half_size_student_learns_from_a_teacher(place, straight):
    """Stopped in QAT, resumed to the same byte, with a projection that is kept and not exported."""
    student = pack(small_network(layers="g", model_dim=16), BYTES, place.folder / "half")
    given = dict(INIT_FROM=student, TEACHER=place.of(straight), KD_LOSS="projection", KD_ALPHA=0.4)
    place.run("half run", **given)
    result = place.result("half run")
    steps = place.steps("half run")
    assert result["gain"]["loss"][1] > 0.3 and steps[-1]["kd"] < steps[0]["kd"]
    for step in steps:
        assert step["loss"] == pytest.approx(0.6 * step["nats"] + 0.4 * step["kd"], rel=1e-3)
    teacher = place.result(straight)["after"]  # its unrounded weights
    assert {name: result["teacher"][name] for name in teacher} == teacher
    place.run("half stopped", stop_at(17), 128 + signal.SIGTERM, **given)
    place.resume("half stopped")
    place.same("half stopped", "half run")
    _, tensors, _ = S.read_artifact(place.of("half run") / "model.upar")
    network, *_ = P.load_model("ARTIFACT", str(place.of("half run")))
    assert tensors.keys() == network.state_dict().keys() and network.config.model_dim == 16


FAULTS = [
    (dict(INIT_FROM="PLAIN", TEACHER="STRAIGHT"), r"TEACHER='.*': .*final has the tokenizer bytes"),
    (dict(KD_ALPHA=0.9), "KD_ALPHA=0.9: needs a TEACHER"),
    (dict(TEACHER="STRAIGHT", KD_LOSS="pool", KD_ALPHA=1), "KD_ALPHA=1: must be less"),
    (dict(TEACHER="STRAIGHT", KD_TOP_K=1), "KD_TOP_K=1: must be 0 or at least 2"),
    (dict(TEACHER="STRAIGHT", COMPILE=1), "COMPILE=1: must be 0 with a TEACHER"),
    (dict(TRAIN_BATCH_TOKENS=100), "TRAIN_BATCH_TOKENS=100: must be a multiple"),
    (dict(LORA_RANK=4, QAT=1), "QAT=1: adapters are not quantized"),
    (dict(INIT_FROM="PLAIN", LORA_RANK=2), "has no role tokens, and adapters would not learn"),
    (dict(TRAIN_SEQ_LEN=8, TRAIN_BATCH_TOKENS=8), "used none; left out more than TRAIN_SEQ_LEN=8"),
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
    write_lines(tmp_path / "a.jsonl", rows_of(200))
    rows = [{"prompt": row["output"], "completion": row["instruction"]} for row in rows_of(200)]
    write_lines(tmp_path / "b.jsonl", rows)
    run_guide(guide, tmp_path, least=5)
