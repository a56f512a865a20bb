"""Preference learning: objectives against hand-worked values, pairs and their scores, the
reference's cache, runs.
"""

import functools
import json
import math
import random
import re
import shutil
import signal
import statistics
from types import SimpleNamespace

import pytest
import torch

import sample as P
import train_dpo as D
import train_grpo as R
from conftest import (
    BYTES,
    POST,
    Place,
    blocks,
    check_early_stop,
    check_notes,
    check_result,
    own_settings,
    pack,
    refusal,
    run_guide,
    small_network,
    spelt,
    stop_at,
    write_lines,
)

CPU = torch.device("cpu")
ALONE = D.Runtime(0, 1, CPU, False)
POLICIES = ("dpo", "ipo", "cdpo", "robust")
pytestmark = pytest.mark.usefixtures("default_dtype")


# --------------------------------------------------------------------------------------- objectives: values by hand
# Two pairs. Log-ratios (1, -0.5) and (0, 0.5): D = 1.5 and -0.5, so x = 0.15 and -0.05 at BETA = 0.1.
SCORES = ((-10.0, -12.0), (-3.0, -2.5))
REFERENCE = ((-11.0, -11.5), (-3.0, -3.0))
LENGTHS = ((5, 4), (2, 1))
DPO = (0.620957047790, 0.718459648013)  # log(1 + e^-0.15), log(1 + e^0.05)
BY_HAND = {
    "dpo": DPO,
    # Log-ratios over lengths; 1 / (2 * 0.1) = 5.
    "ipo": ((0.2 + 0.125 - 5) ** 2, (0.0 - 0.5 - 5) ** 2),
    # -log sigmoid(-x) = -log sigmoid(x) + x; e = 0.1.
    "cdpo": (DPO[0] + 0.1 * 0.15, DPO[1] - 0.1 * 0.05),
    # e / (1 - 2e) = 0.125.
    "robust": (DPO[0] - 0.125 * 0.15, DPO[1] + 0.125 * 0.05),
}


def settings(**changes):
    return D.Settings(**{"beta": 0.1, "qat": False, **changes})


def pair_of(lengths, margin=0.0):
    return D.Pair(0, torch.ones(1), *(torch.ones(length) for length in lengths), margin)


def losses(objective, scores=SCORES, reference=REFERENCE, lengths=LENGTHS, **changes):
    """Return pair_losses of tables of numbers; the margins are 0, 0.5, …"""
    pairs = [pair_of(pair, at / 2) for at, pair in enumerate(lengths)]
    s = settings(objective=objective, **changes)
    return D.pair_losses(torch.as_tensor(scores), torch.tensor(reference), pairs, s)


@pytest.mark.parametrize("objective", POLICIES)
def test_losses_are_the_values_worked_by_hand(objective):
    found, rewards = losses(objective)
    assert found.tolist() == pytest.approx(BY_HAND[objective], abs=1e-11)
    # The implicit reward, BETA times the log-ratio.
    ratios = (0.2, -0.125) if objective == "ipo" else (1.0, -0.5)
    assert rewards[0].tolist() == pytest.approx([0.1 * ratio for ratio in ratios])


def test_bradley_terry_with_margin_and_centering():
    """Rewards (1, 0.5), margin 0: log(1 + e^-0.5) + c 1.5^2; (-1, 0.25), margin 0.5: log(1 + e^1.75) + c 0.75^2."""
    for c in (0.0, 2.0):
        found, _ = losses("reward", ((1.0, 0.5), (-1.0, 0.25)), centering=c)
        expected = (0.474076984180 + c * 2.25, 1.910224150438 + c * 0.5625)
        assert found.tolist() == pytest.approx(expected, abs=1e-11)


@pytest.mark.parametrize("objective", [*POLICIES, "reward"])
def test_gradients_are_finite_differences(objective):
    rng = torch.Generator().manual_seed(3)
    scores = (6 * torch.randn(7, 2, generator=rng)).requires_grad_()
    lengths = torch.randint(1, 9, (7, 2), generator=rng).tolist()
    reference = (6 * torch.randn(7, 2, generator=rng)).tolist()

    def loss(scores):
        return losses(objective, scores, reference, lengths)[0]

    assert torch.autograd.gradcheck(loss, scores, atol=1e-7, rtol=0)


def test_metrics_by_hand():
    """Four pairs: right, wrong, a tie, right; the third has answers of one length."""
    pairs = [pair_of(lengths) for lengths in ((3, 5), (4, 2), (6, 6), (9, 1))]
    scores = torch.tensor([[-1.0, -2.0], [-4.0, -2.0], [-2.0, -3.0], [-7.0, -5.0]])
    rewards = torch.tensor([[0.5, 0.25], [-1.0, 1.0], [0.25, 0.25], [2.0, 0.0]])
    found = D.pair_summary(D.pair_metrics(scores, scores - 10 * rewards, pairs, settings()))
    expected = dict(
        loss=sum(math.log1p(math.exp(-x)) for x in (0.25, -2, 0, 2)) / 4,
        accuracy=0.5,
        margin=0.0625,
        chosen_reward=0.4375,
        rejected_reward=0.375,
        longer_preferred=1 / 3,
        longer_chosen=2 / 3,
        chosen_logp=-3.5,
        rejected_logp=-3.0,
        likelier=0.5,
    )
    assert (found.pop("n"), found.pop("n_of_different_lengths")) == (4, 3)
    assert {name: value for name, (value, *_) in found.items()} == pytest.approx(expected)
    assert found["accuracy"] == D.wilson(2, 4) and found["longer_preferred"] == D.wilson(1, 3)
    half = 1.96 * statistics.stdev([0.25, -2.0, 0.0, 2.0]) / 2
    assert found["margin"] == pytest.approx([0.0625, 0.0625 - half, 0.0625 + half])


def test_wilsons_interval():
    """Newcombe 1998: 81 of 263 is 0.2553 to 0.3662, 1 of 29 is 0.0061 to 0.1718."""
    assert D.wilson(81, 263) == pytest.approx([81 / 263, 0.2553, 0.3662], abs=5e-5)
    assert D.wilson(1, 29) == pytest.approx([1 / 29, 0.0061, 0.1718], abs=5e-5)
    assert D.wilson(0, 0) == [0.0, 0.0, 1.0]


# ------------------------------------------------------------------------------------------------- rows become pairs
def turn(role, text):
    return {"role": role, "content": text}


BEFORE = [turn("system", "s"), turn("user", "u"), turn("assistant", "v"), turn("user", "w")]
X, Y = turn("assistant", "x"), turn("assistant", "y")
WHOLE = {"chosen": [*BEFORE, X], "rejected": [*BEFORE, Y]}
TALKS = [{"prompt": BEFORE, "chosen": "x", "rejected": [Y]}, WHOLE, {"prompt": BEFORE, **WHOLE}]


def test_the_ids_of_a_pair():
    """Of two whole conversations, too, which have the same key."""
    rows = [{"prompt": "ab", "chosen": "x", "rejected": "y", "margin": 2}, *TALKS]
    found = [D.parse_pair(row, set(), BYTES, settings(train_seq_len=64))[1] for row in rows]
    prompts = [spelt("^Uab.A"), *[spelt("^Ss.Uu.Av.Uw.A")] * 3]
    for pair, prompt in zip(found, prompts, strict=True):
        assert pair.prompt.tolist() == prompt
        assert [pair.chosen.tolist(), pair.rejected.tolist()] == [spelt("x."), spelt("y.")]
    assert [pair.margin for pair in found] == [2.0, 0.0, 0.0, 0.0]
    assert len({pair.key for pair in found}) == 2


GOOD = {"prompt": "ab", "chosen": "c", "rejected": "d"}
BAD = {  # what the log calls it -> a row
    "identical chosen and rejected": {**GOOD, "rejected": "c"},
    "more than TRAIN_SEQ_LEN=64 tokens": {**GOOD, "rejected": "d" * 200},
    "field 'margin' is no number": {**GOOD, "margin": "1"},
}


def load(path, **changes):
    """Return the Examples of a file of pairs, and what the log says of them."""
    s = settings(**{"train_seq_len": 64, "train_files": str(path), **changes})
    said = []
    parse = functools.partial(D.parse_pair, tokenizer=BYTES, settings=s)
    data = D.read_examples(s, parse, said.append)
    return data, str(said[0])


def test_malformed_rows_are_named_and_a_changed_row_changes_the_hash(tmp_path):
    rows = [{"prompt": f"p{at}", "chosen": "c", "rejected": "d"} for at in range(40)]
    hashes = set()
    for change in ({}, {"chosen": "e"}, {"rejected": "e"}, {"prompt": "q"}, {"margin": 0.5}):
        changed = [*BAD.values(), {**rows[0], **change}, *rows[1:]]
        data, said = load(write_lines(tmp_path / "pairs.jsonl", changed))
        hashes.add(data.sha256)
        assert "used 40 prompt/chosen/rejected" in said
        for number, fault in enumerate(BAD, 1):
            assert f"{fault}: 1 (the first is row {number})" in said
    assert len(hashes) == 5


# -------------------------------------------------------------------------------------------- scores of pairs, batches
def pairs_of(seed, count):
    """Random prompts and answers of 1 to 9 tokens, END not among them: nothing but the place tells the last token."""
    rng = random.Random(seed)

    def ids(low, high):
        return [rng.randrange(4, 260) for _ in range(rng.randint(low, high))]

    pairs = []
    for _ in range(count):
        parts = map(torch.tensor, ([1, *ids(1, 6)], ids(1, 9), ids(1, 9)))
        pairs.append(D.Pair(rng.getrandbits(60), *parts, rng.random()))
    return pairs


def by_hand(network, pair, is_reward):
    """Return the scores of one pair, row by row without padding, token by token, (2,)."""
    scores = []
    for answer in (pair.chosen, pair.rejected):
        ids = torch.cat([pair.prompt, answer])
        x = network.features(ids[None])[0]
        if is_reward:
            scores.append(x[-1] @ network.w_value)
        else:
            logps = network.logits(x).log_softmax(-1)
            scores.append(sum(logps[at - 1, ids[at]] for at in range(len(pair.prompt), len(ids))))
    return torch.stack(scores)


def network_of(is_reward=False):
    """Return a small network, random in every weight, of a reward model too."""
    network = small_network(1337, model_dim=16)
    if is_reward:
        D.add_value_head(network)
        network.w_value.data.normal_(std=0.1)
    D.adapt(network, settings(), CPU)
    return network


@pytest.mark.parametrize("objective", ["dpo", "ipo", "reward"])
def test_micro_batches_and_ranks_give_the_gradient_of_one_batch(objective):
    """And that is the gradient of the mean of losses, pair by pair, by a forward of each answer alone."""
    is_reward = objective == "reward"
    pairs = pairs_of(1, 12)
    references = torch.randn(12, 2, generator=torch.Generator().manual_seed(2)).double()
    network = network_of(is_reward)
    scores = torch.stack([by_hand(network, pair, is_reward) for pair in pairs])
    losses, _ = D.pair_losses(scores, references, pairs, settings(objective=objective))
    params = [*network.parameters()]
    slopes = torch.autograd.grad(losses.mean(), params, materialize_grads=True)
    for ranks, tokens in ((1, 10**6), (1, 600), (1, 1), (2, 10**6)):
        s = settings(objective=objective, micro_batch_tokens=tokens)
        found = [torch.zeros_like(param) for param in params]
        for rank in range(ranks):
            trainer = D.DPOTrainer(network_of(is_reward), s, D.Runtime(rank, ranks, CPU, False))
            metrics = trainer.forward_backward(pairs, references)
            found = [x + param.grad for x, param in zip(found, trainer.params, strict=True)]
        for x, slope in zip(found, slopes, strict=True):
            assert (x - slope).abs().max() < 1e-10, (ranks, tokens)
        if ranks == 1:
            assert (metrics["loss"] - losses).abs().max() < 1e-10
            assert (trainer.score(pairs) - scores).abs().max() < 1e-10


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (dict(beta=0.0), "BETA=0: must be above"),
        (dict(label_smoothing=0.2), "LABEL_SMOOTHING=0.2: OBJECTIVE=dpo does not read it"),
        (dict(margin=0.5, objective="ipo"), "MARGIN=0.5: OBJECTIVE=ipo does not read it"),
        (dict(centering=0.0), "CENTERING=0.0: OBJECTIVE=dpo does not read it"),
        (dict(label_smoothing=0.5, objective="cdpo"), "LABEL_SMOOTHING=0.5: must be a number"),
    ],
)
def test_wrong_settings_are_refused(changes, said):
    refusal(D.UserError, f"^{said}", D.Settings, **changes)


# ------------------------------------------------------------------------------------------------ the reference's cache
def reference_of(network, pairs, folder, data="data", first=0, name="run", **changes):
    """Return the reference's scores, and what the log says of them. first: the first pair's number."""
    said = []
    identity = {"data_sha256": data, "tokenizer_sha256": BYTES.sha256}
    run = SimpleNamespace(runtime=ALONE, folder=folder / name, log=said.append, identity=identity)
    trainer = D.DPOTrainer(network, settings(**changes), ALONE)
    numbers = [*range(first, first + len(pairs))]
    return D.reference_scores(trainer, [pairs], numbers, run), "; ".join(said)


def test_the_cache_is_read_for_the_same_weights_and_data_alone(tmp_path, monkeypatch):
    """A file of something else under its name is made anew, with a word. Making it is not silent."""
    monkeypatch.setattr(D, "NOTE_SECONDS", 0.0)
    pairs = pairs_of(4, 9)
    made, said = reference_of(network_of(), pairs, tmp_path)
    assert "scored: 9 of 9 pairs" in said and "makes log-probabilities of 9 pairs" in said
    assert made.tolist() == D.DPOTrainer(network_of(), settings(), ALONE).score(pairs).tolist()
    read, said = reference_of(network_of(), pairs, tmp_path)
    assert " read from " in said and torch.equal(read, made)
    [path] = tmp_path.rglob("*.scores")
    other = network_of()
    other.embed.data[0, 0] += 1e-3
    for network, data in ((other, "data"), (network_of(), "other data")):
        assert "makes" in reference_of(network, pairs, tmp_path, data)[1]
    assert "makes" in reference_of(network_of(), pairs, tmp_path, dtype="bfloat16")[1]
    assert "makes" in reference_of(network_of(), pairs, tmp_path, first=1)[1]
    foreign, *_ = {*tmp_path.rglob("*.scores")} - {path}
    assert len([*tmp_path.rglob("*.scores")]) == 5
    content = path.read_bytes()
    flipped = content[:-3] + bytes([content[-3] ^ 64]) + content[-2:]
    longer = content + content[32:48]
    for wrong in (flipped, content[:-16], longer, b"", foreign.read_bytes()):
        path.write_bytes(wrong)
        found, said = reference_of(network_of(), pairs, tmp_path)
        assert "made anew" in said and torch.equal(found, made) and path.read_bytes() == content


def test_runs_of_a_sweep_store_the_reference_at_once(tmp_path, monkeypatch):
    """The second begins and ends while the first writes its file."""
    pairs = pairs_of(4, 3)

    def second(number):
        monkeypatch.undo()
        reference_of(network_of(), pairs, tmp_path, name="second")

    monkeypatch.setattr(D.os, "fsync", second)
    made, _ = reference_of(network_of(), pairs, tmp_path, name="first")
    read, said = reference_of(network_of(), pairs, tmp_path)
    assert " read from " in said and torch.equal(read, made)
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".scores"]


# ----------------------------------------------------------------------------- whole runs, tiny
@pytest.fixture(scope="session")
def place(tmp_path_factory, letters):
    """Return a place for runs from a policy that answers right or wrong, on pairs of both."""
    folder = tmp_path_factory.mktemp("dpo")
    pairs = [*map(json.loads, (letters / "pairs.jsonl").read_text().splitlines())]
    files = write_lines(folder / "pairs.jsonl", [*pairs, *BAD.values()])
    tiny = dict(POST, ITERATIONS=24, SAVE_EVERY=11, EVAL_PROMPTS=64, LEARNING_RATE=0.01)
    tiny = own_settings("train_dpo", dict(tiny, TRAIN_FILES=files, INIT_FROM=letters / "policy"))
    return Place(folder, None, tiny, "train_dpo")


@pytest.fixture(scope="session")
def straight(place):
    place.run("dpo", "T.KEEP_CHECKPOINTS = 9\n")
    return "dpo"


@pytest.fixture(scope="session")
def reward(place):
    place.run("reward", OBJECTIVE="reward")
    return "reward"


def test_an_early_end_says_what_there_is(place):
    check_early_stop(place, "train_dpo")
    check_notes(place, "train_dpo")


def test_runs_learn_and_say_so(place, straight, reward, float32):
    for out in (straight, reward):
        check_result(place, out, "train_dpo")
        result = place.result(out)
        before, after = result["before"], result["after"]
        assert before["accuracy"][0] == 0
        assert before["loss"][0] == pytest.approx(math.log(2), abs=1e-6)
        assert after["accuracy"][1] > 0.5 and after["n"] == before["n"] >= 20
        assert after["loss"][2] < math.log(2) and result["gain"]["loss"][2] < 0
        log = place.log(out)
        assert ("log-probabilities made and stored in " in log) == (out == straight)
        [facts] = result["row_files"].values()
        assert facts["used"] == {"prompt/chosen/rejected": 400}
        assert facts["left_out"] == dict.fromkeys(BAD, 1)
        steps = place.steps(out)
        assert len(steps) == 24 and steps[-1]["accuracy"] > 0.5
        assert set(result["phases"]) == {"warmup", "warmdown", "ema", "swa", "qat"}


def test_the_file_alone_gives_the_scores(place, reward, straight, float32):
    """sample.py's reader and a forward row by row: the reward model's mean rewards, the policy's
    log-probabilities.
    """
    data, _ = load(place.tiny["TRAIN_FILES"], eval_prompts=64)
    for out, file, key in (
        (reward, "model.upar", "packed"),
        (straight, "final", "after"),
        (straight, "model.upar", "packed"),
    ):
        is_reward = out == reward
        network, *_ = P.load_model("ARTIFACT", str(place.of(out) / file))
        with torch.no_grad():
            scores = torch.stack([by_hand(network, pair, is_reward) for pair in data.held_out])
        result = place.result(out)[key]
        name = "reward" if is_reward else "logp"
        found = [result[f"{side}_{name}"][0] for side in ("chosen", "rejected")]
        assert found == pytest.approx(scores.mean(0).tolist(), abs=1e-4)
        if is_reward:
            assert result["accuracy"][0] == (scores[:, 0] > scores[:, 1]).double().mean().item()


def test_the_snippet_of_the_guide_gives_the_rewards(place, reward, capsys, float32):
    """Also where BOS stands in the text, as in the turns of some imported models."""
    [snippet] = blocks("dpo.md", "python")
    exec(snippet.replace("runs/rewarded", str(place.of(reward))), {})
    found = [float(line.split()[1]) for line in capsys.readouterr().out.splitlines()]
    network, tokenizer, _ = P.load_model("ARTIFACT", str(place.of(reward)))
    model = SimpleNamespace(network=network, tokenizer=tokenizer, context=64)
    talks = [[("<|user|>", "52713"), ("<|assistant|>", text)] for text in ("12357", "12375")]
    rewards, _ = P.rewards(model, talks)
    assert found == pytest.approx(rewards, abs=1e-5) and found[0] != found[1]
    assert "doc=torch.zeros_like(ids)" in snippet


def test_a_second_run_reads_the_cache_and_is_the_same(place, straight):
    """It is a replay, too."""
    given = dict(REPLAY=place.of(straight), OUT_DIR=place.folder / straight, RUN_ID="again")
    place.run("again", **{**place.unset, **given})
    shutil.move(place.folder / straight / "again", place.of("again"))
    said = r"^reference: log-probabilities read from .*/cache/reference_"
    assert re.search(said, place.log("again"), re.M)
    place.same("again", straight)


def test_a_run_resumed_in_qat_is_the_same_to_the_byte_and_no_other_rows_go_on(place, straight):
    folder = shutil.copytree(place.of(straight), place.of("resumed"))
    shutil.rmtree(folder / "step_000024")
    for name in ("result.json", "model.upar", "progress.json"):
        (folder / name).unlink()
    files = place.tiny["TRAIN_FILES"]
    content = files.read_bytes()
    files.write_bytes(content.replace(b'"x"', b'"z"'))
    line = place.refused("resumed", **place.resumed)
    said = r"error: TRAIN_FILES .*=.\w+.: must stay .\w+. under RESUME$"
    assert re.match(said, line), line
    files.write_bytes(content)
    place.resume("resumed")
    place.same("resumed", straight)


def test_only_pairs_that_are_read_have_a_reference(place, straight):
    """Its first step is that of a run that scores all pairs. More steps under RESUME are refused."""
    place.run("few", stop_at(0), 128 + signal.SIGTERM, ITERATIONS=2, QAT=0)
    [scored] = re.findall(
        r"^reference: makes log-probabilities of (\d+) pairs", place.log("few"), re.M
    )
    counts = re.search(r"(\d+) to choose between averages, (\d+) held out", place.log("few"))
    others = int(counts[1]) + min(64, int(counts[2]))
    assert int(scored) == 2 * place.tiny["PAIRS_PER_STEP"] + others
    assert "ITERATIONS=2 are 0." in place.log("few")
    line = place.refused("few", **{**place.resumed, "ITERATIONS": 3})
    assert line.startswith("error: ITERATIONS=3: must not be more under RESUME")
    place.resume("few")
    for name in ("loss", "grad_norm", "chosen_logp"):
        assert place.steps("few")[0][name] == place.steps(straight)[0][name]


TRAINING_TERM = """
pair_losses = T.pair_losses
def with_term(*given):
    losses, rewards = pair_losses(*given)
    return losses + T.torch.is_grad_enabled(), rewards
T.pair_losses = with_term
"""


def test_a_term_of_training_alone_is_in_no_score(place):
    """And of pairs of equal lengths the log has no share of those whose longer answer wins."""
    rows = [dict(prompt=f"{i}", chosen="b", rejected="c") for i in range(100)]
    files = write_lines(place.folder / "equal.jsonl", rows)
    place.run("term", TRAINING_TERM, ITERATIONS=1, QAT=0, TRAIN_FILES=files)
    [step] = place.steps("term")
    result = place.result("term")
    assert step["loss"] == pytest.approx(1 + math.log(2), abs=1e-5)
    assert result["before"]["loss"][0] == pytest.approx(math.log(2), abs=1e-6)
    assert result["after"]["loss"][0] < 1 and result["packed"]["loss"][0] < 1
    chosen = re.findall(r"^weights: \w+, loss (.*)$", place.log("term"), re.M)
    assert chosen and max(map(float, chosen)) < 1
    assert "accuracy" in step and not any(name.startswith("longer") for name in step)


def test_defaults_of_an_imported_start():
    """A reward model begins with a head of zeros, which moves at LEAST_HEAD_RATE at least. Steps with
    rewards take as long as dozens of others, so checkpoints are not as rare.
    """
    assert D.imported_defaults(0)["save_every"] == 500
    assert "save_every" not in R.imported_defaults(0) and R.Settings.save_every == 100
    assert D.imported_defaults(0, "dpo")["learning_rate"] == 1e-6
    assert D.imported_defaults(16, "ipo")["learning_rate"] == 2e-5
    assert D.imported_defaults(0, "reward")["learning_rate"] == 1e-5
    network = network_of()
    D.add_value_head(network)
    for rate, expected in ((1e-6, 1e-4), (0.01, 0.01)):
        params = dict(network.named_parameters())
        optimizers = D.make_optimizers(params, settings(learning_rate=rate), ALONE)
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        rates = {id(param): group["lr"] for group in groups for param in group["params"]}
        assert rates.pop(id(network.w_value)) == expected and set(rates.values()) == {rate}
        assert len(rates) == len(params) - 1


def test_other_objectives_end_well(place, straight):
    """A reward model with adapters starts from a policy's artifact, with a longer context."""
    given = dict(OBJECTIVE="reward", LORA_RANK=2, QAT=0, OPTIMIZER="adamw8bit", TRAIN_SEQ_LEN=2100)
    given |= dict(ACTIVATION_CHECKPOINTING=1, INIT_FROM=place.of(straight))
    ipo = dict(OBJECTIVE="ipo", MICRO_BATCH_TOKENS=64)
    for out, changes in (("other reward", given), ("other ipo", ipo)):
        place.run(out, ITERATIONS=4, **changes)
        after = place.result(out)["after"]
        assert after["n"] >= 20 and math.isfinite(after["loss"][0])
    assert P.load_model("ARTIFACT", str(place.of("other reward")))[0].config.train_seq_len == 2100
    assert f"policy: {place.of(straight) / 'final'}" in place.log("other reward")


# ---------------------------------------------------------------------------------------- the guide
@pytest.mark.full
def test_every_command_of_the_guide(tmp_path):
    for name in ("pairs", "more", "held_out"):
        rows = [dict(prompt=f"{name}{at}", chosen="x", rejected="yy") for at in range(60)]
        write_lines(tmp_path / f"{name}.jsonl", rows)
    text = "".join(blocks("dpo.md", "bash"))
    for name in set(re.findall(r"runs/(\w+)", text)) - set(re.findall(r"RUN_ID=(\w+)", text)):
        pack(small_network(), BYTES, tmp_path / "runs" / name)
    run_guide("dpo.md", tmp_path, least=5)
