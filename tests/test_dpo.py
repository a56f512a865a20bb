"""Preference learning: objectives against hand-worked values, pairs and their scores, the
reference's cache, runs.
"""

import functools
import itertools
import json
import math
import random
import re
import shutil
import statistics
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import zstandard

import sample as P
import train_dpo as D
from conftest import (
    BYTES,
    POST,
    ROOT,
    Place,
    blocks,
    check_result,
    environment,
    own_settings,
    pack,
    run_guide,
    small_network,
    spelt,
    start,
    write_lines,
)

CPU = torch.device("cpu")
ALONE = D.Runtime(0, 1, CPU, False)
POLICIES = ("dpo", "ipo", "cdpo", "robust")
pytestmark = pytest.mark.usefixtures("one_thread", "default_dtype")


# --------------------------------------------------------------------------------------- objectives: values by hand
# Two pairs. Log-ratios (1, -0.5) and (0, 0.5): D = 1.5 and -0.5, so x = 0.15 and -0.05 at BETA = 0.1.
SCORES = ((-10.0, -12.0), (-3.0, -2.5))
FACTS = dict(reference=((-11.0, -11.5), (-3.0, -3.0)), lengths=((5, 4), (2, 1)), margin=(0.0, 0.5))
DPO = (0.620957047790, 0.718459648013)  # log(1 + e^-0.15), log(1 + e^0.05)
BY_HAND = {
    "dpo": DPO,
    "ipo": (
        (0.2 + 0.125 - 5) ** 2,
        (0.0 - 0.5 - 5) ** 2,
    ),  # log-ratios over lengths; 1 / (2 * 0.1) = 5
    "cdpo": (
        DPO[0] + 0.1 * 0.15,
        DPO[1] - 0.1 * 0.05,
    ),  # -log sigmoid(-x) = -log sigmoid(x) + x; e = 0.1
    "robust": (DPO[0] - 0.125 * 0.15, DPO[1] + 0.125 * 0.05),  # e / (1 - 2e) = 0.125
}


def settings(**changes):
    return D.Settings(**{"beta": 0.1, "qat": False, **changes})


def pair_of(lengths, margin=0.0):
    return D.Pair(0, torch.ones(1), *(torch.ones(length) for length in lengths), margin)


def losses(
    objective,
    scores=SCORES,
    reference=FACTS["reference"],
    lengths=FACTS["lengths"],
    margin=FACTS["margin"],
    **changes,
):
    """pair_losses of tables of numbers."""
    pairs = [pair_of(*facts) for facts in zip(lengths, margin, strict=True)]
    s = settings(objective=objective, **changes)
    return D.pair_losses(torch.as_tensor(scores), torch.tensor(reference), pairs, s)


@pytest.mark.parametrize("objective", POLICIES)
def test_losses_are_the_values_worked_by_hand(objective):
    found, rewards = losses(objective)
    assert found.tolist() == pytest.approx(BY_HAND[objective], abs=1e-11)
    ratios = ((0.2, -0.125), (0.0, 0.5)) if objective == "ipo" else ((1.0, -0.5), (0.0, 0.5))
    assert (
        rewards - 0.1 * torch.tensor(ratios)
    ).abs().max() < 1e-15  # the implicit reward, BETA times the log-ratio


def test_bradley_terry_with_margin_and_centering():
    """Rewards (1, 0.5), margin 0: log(1 + e^-0.5) + c 1.5^2; (-1, 0.25), margin 0.5: log(1 + e^1.75) + c 0.75^2."""
    scores = torch.tensor(((1.0, 0.5), (-1.0, 0.25)))
    for centering in (0.0, 0.01, 2.0):
        found, rewards = losses("reward", scores, centering=centering)
        assert found.tolist() == pytest.approx(
            (0.474076984180 + centering * 2.25, 1.910224150438 + centering * 0.5625), abs=1e-11
        )
        assert torch.equal(rewards, scores)


@pytest.mark.parametrize("objective", [*POLICIES, "reward"])
@pytest.mark.parametrize("beta", [0.05, 0.5])
def test_gradients_are_finite_differences(objective, beta):
    rng = torch.Generator().manual_seed(3)
    scores = (6 * torch.randn(7, 2, generator=rng)).requires_grad_()
    lengths = torch.randint(1, 9, (7, 2), generator=rng).tolist()
    reference = (6 * torch.randn(7, 2, generator=rng)).tolist()
    smoothing = dict(label_smoothing=0.2)
    own = dict(cdpo=smoothing, robust=smoothing, reward=dict(centering=0.3)).get(objective, {})

    def loss(scores):
        return losses(objective, scores, reference, lengths, [0.3] * 7, beta=beta, **own)[0]

    assert torch.autograd.gradcheck(loss, scores, atol=1e-7, rtol=0)
    if objective in ("dpo", "cdpo", "robust"):  # a common shift of both log-ratios is free
        (slopes,) = torch.autograd.grad(loss(scores).sum(), scores)
        assert slopes.sum(1).abs().max() < 1e-15


@pytest.mark.parametrize("e", [0.0, 0.05, 0.2, 0.45])
def test_robust_is_unbiased_under_flips_and_cdpo_is_their_expectation(e):
    """Each pair is the wrong way round with probability e: the expectation of the robust loss is DPO's on the truth."""

    def flipped(objective, **changes):
        turned = [
            [row[::-1] for row in table] for table in (SCORES, FACTS["reference"], FACTS["lengths"])
        ]
        return (1 - e) * losses(objective, **changes)[0] + e * losses(
            objective, *turned, **changes
        )[0]

    assert flipped("robust", label_smoothing=e).tolist() == pytest.approx(DPO, abs=1e-11)
    cdpo = losses("cdpo", label_smoothing=e)[0]
    assert flipped("dpo").tolist() == pytest.approx(cdpo.tolist(), abs=1e-12)


def test_metrics_by_hand():
    """Four pairs: right, wrong, a tie, right; the third has answers of one length."""
    pairs = [pair_of(lengths) for lengths in ((3, 5), (4, 2), (6, 6), (9, 1))]
    scores = torch.tensor([[-1.0, -2.0], [-4.0, -2.0], [-2.0, -3.0], [-7.0, -5.0]])
    rewards = torch.tensor([[0.5, 0.25], [-1.0, 1.0], [0.25, 0.25], [2.0, 0.0]])
    metrics = D.pair_metrics(scores, scores - 10 * rewards, pairs, settings())
    assert metrics["loss"].tolist() == pytest.approx(
        [math.log1p(math.exp(-x)) for x in (0.25, -2, 0, 2)], abs=1e-12
    )
    found = D.pair_summary(metrics)
    means = dict(
        accuracy=0.5,
        margin=0.0625,
        chosen_reward=0.4375,
        rejected_reward=0.375,
        chosen_logp=-3.5,
        rejected_logp=-3.0,
        likelier=0.5,
        longer_preferred=1 / 3,
        longer_chosen=2 / 3,
    )
    assert {name: value[0] for name, value in found.items() if name in means} == pytest.approx(
        means, abs=1e-12
    )
    assert (found["n"], found["n_of_different_lengths"]) == (4, 3)
    assert found["accuracy"] == D.wilson(2, 4) and found["longer_preferred"] == D.wilson(1, 3)
    spread = statistics.stdev([0.25, -2.0, 0.0, 2.0]) / 2
    assert found["margin"] == pytest.approx(
        [0.0625, 0.0625 - 1.96 * spread, 0.0625 + 1.96 * spread], abs=1e-12
    )
    reward = D.pair_metrics(scores, scores, pairs, settings(objective="reward"))
    assert not {"likelier", "chosen_logp", "rejected_logp"} & set(reward)


def test_wilsons_interval():
    """Newcombe 1998: 81 of 263 is 0.2553 to 0.3662, 1 of 29 is 0.0061 to 0.1718."""
    assert D.wilson(81, 263) == pytest.approx([81 / 263, 0.2553, 0.3662], abs=5e-5)
    assert D.wilson(1, 29) == pytest.approx([1 / 29, 0.0061, 0.1718], abs=5e-5)
    assert D.wilson(0, 0) == [0.0, 0.0, 1.0] and D.wilson(0, 9)[1] == pytest.approx(0, abs=1e-15)


# ------------------------------------------------------------------------------------------------- rows become pairs
def parse(row):
    return D.parse_pair(row, set(), BYTES, settings(train_seq_len=64))


def turn(role, text):
    return {"role": role, "content": text}


def test_the_ids_of_a_pair():
    """Of two whole conversations, too, which have the same key."""
    kind, pair = parse({"prompt": "ab", "chosen": "c", "rejected": "de"})
    assert kind == "prompt/chosen/rejected" and pair.margin == 0.0
    assert pair.prompt.tolist() == spelt("^Uab.A")
    assert [pair.chosen.tolist(), pair.rejected.tolist()] == [spelt("c."), spelt("de.")]
    before = [turn("system", "s"), turn("user", "u"), turn("assistant", "v"), turn("user", "w")]
    x, y = turn("assistant", "x"), turn("assistant", "y")
    _, pair = parse({"prompt": before, "chosen": "x", "rejected": [y], "margin": 2})
    assert pair.prompt.tolist() == spelt("^Ss.Uu.Av.Uw.A") and pair.margin == 2.0
    assert [pair.chosen.tolist(), pair.rejected.tolist()] == [spelt("x."), spelt("y.")]
    whole = {"chosen": [*before, x], "rejected": [*before, y]}
    for row in (whole, {"prompt": before, **whole}):
        again = parse(row)[1]
        assert again.prompt.tolist() == pair.prompt.tolist() and again.key == pair.key
        assert again.chosen.tolist() == spelt("x.")


GOOD = {"prompt": "ab", "chosen": "c", "rejected": "d"}
BAD = {  # what the log calls it -> a row, or a line
    "empty answer": {**GOOD, "rejected": " \n"},
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
    return data, [*map(str, said)]


def test_each_malformed_row_is_counted_and_named(tmp_path):
    rows = [{"prompt": f"p{at}", "chosen": "c", "rejected": "d"} for at in range(60)]
    path = write_lines(tmp_path / "pairs.jsonl", [*BAD.values(), *BAD.values(), *rows])
    packed = tmp_path / "pairs.jsonl.zst"
    packed.write_bytes(zstandard.compress(path.read_bytes()))
    for file in (path, packed):
        data, said = load(file)
        assert len({*data.train, *data.choice, *data.held_out}) == 60
        for at, kind in enumerate(BAD, 1):
            assert f"{kind}: 2 (the first are rows {at}, {at + len(BAD)})" in said[0], kind
        assert f"{60 + 2 * len(BAD)} rows, used 60 prompt/chosen/rejected" in said[0]


# -------------------------------------------------------------------------------------------- scores of pairs, batches
def pairs_of(seed, count):
    """Random prompts and answers of 1 to 9 tokens, END not among them: nothing but the place tells the last token."""
    rng = random.Random(seed)

    def ids(low, high):
        return [rng.randrange(4, 260) for _ in range(rng.randint(low, high))]

    return [
        D.Pair(
            rng.getrandbits(60),
            *map(torch.tensor, ([1, *ids(1, 6)], ids(1, 9), ids(1, 9))),
            rng.random(),
        )
        for _ in range(count)
    ]


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


@pytest.mark.parametrize("reward", [False, True], ids=["policy", "reward"])
def test_scores_take_the_whole_answer_and_the_value_its_last_token(reward):
    """Whatever stands beside a row: from its first token, which the prompt's last place predicts,
    to its end token.
    """
    network = network_of(reward)
    pairs = pairs_of(0, 17)
    expected = torch.stack([by_hand(network, pair, reward) for pair in pairs])
    for numbers in ([3], [5, 1, 8], range(17)):
        batch = D.pair_batch(pairs, numbers, CPU)
        scores = D.pair_scores(network, batch, reward)
        assert scores.dtype == torch.float64 and batch.numbers == [*numbers]
        assert scores.shape == expected[[*numbers]].shape
        assert (scores - expected[[*numbers]]).abs().max() < 1e-11
        # Wider, and with other ids in the padding.
        last = batch.mask.long().cumsum(1).argmax(1)[:, None] + 1
        batch.ids = torch.where(torch.arange(batch.ids.size(1)) > last, 77, batch.ids)
        batch.ids = F.pad(batch.ids, (0, 5), value=77)
        batch.doc = torch.zeros_like(batch.ids)
        batch.targets = F.pad(batch.targets, (0, 5), value=-1)
        batch.mask = batch.targets >= 0
        assert (D.pair_scores(network, batch, reward) - scores).abs().max() < 1e-11


def network_of(reward=False, **changes):
    """Return a small network with what the settings add to it, random in every weight."""
    network = small_network(1337, model_dim=16)
    if reward:
        D.add_value_head(network)
    D.adapt(network, settings(**changes), torch.device("cpu"))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for param in network.parameters():
            param.add_(0.1 * torch.randn(param.shape, generator=generator))
    return network


@pytest.mark.parametrize("objective", ["dpo", "ipo", "reward"])
def test_micro_batches_and_ranks_give_the_gradient_of_one_batch(objective):
    """And that is the gradient of the mean of losses, pair by pair, by another forward."""
    is_reward = objective == "reward"
    pairs = pairs_of(1, 12)
    references = torch.randn(12, 2, generator=torch.Generator().manual_seed(2)).double()
    network = network_of(is_reward)
    scores = torch.stack([by_hand(network, pair, is_reward) for pair in pairs])
    losses, _ = D.pair_losses(scores, references, pairs, settings(objective=objective))
    slopes = torch.autograd.grad(
        losses.mean(), [*network.parameters()], allow_unused=True, materialize_grads=True
    )
    assert max(slope.abs().max() for slope in slopes) > 1e-3
    whole = {}
    for ranks, tokens in ((1, 10**6), (1, 600), (1, 1), (2, 10**6)):
        s = settings(objective=objective, micro_batch_tokens=tokens)
        grads = []
        for rank in range(ranks):
            trainer = D.DPOTrainer(network_of(is_reward), s, D.Runtime(rank, ranks, CPU, False))
            metrics = trainer.forward_backward(pairs, references)
            grads.append([param.grad.clone() for param in trainer.params])
        for parts, slope in zip(zip(*grads, strict=True), slopes, strict=True):
            assert (sum(parts) - slope).abs().max() < 1e-10, (ranks, tokens)
        whole = whole or metrics
        for key in metrics if ranks == 1 else ():
            assert (metrics[key].double() - whole[key].double()).abs().max() < 1e-11, key
    assert (whole["loss"] - losses).abs().max() < 1e-10


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (dict(beta=0.0), "BETA=0: must be above"),
        (
            dict(label_smoothing=0.2),
            "LABEL_SMOOTHING=0.2: OBJECTIVE=dpo does not read it, only cdpo, robust",
        ),
        (dict(margin=0.5, objective="ipo"), "MARGIN=0.5: OBJECTIVE=ipo does not read it"),
        (dict(centering=0.0), "CENTERING=0.0: OBJECTIVE=dpo does not read it, only reward"),
        (
            dict(label_smoothing=0.5, objective="cdpo"),
            "LABEL_SMOOTHING=0.5: must be a number from 0.0 to 0.499",
        ),
        (dict(objective="kto"), "OBJECTIVE='kto': must be one of dpo, ipo,"),
    ],
)
def test_wrong_settings_are_refused(changes, said):
    """In a program as in the environment."""
    environ = {name.upper(): str(value) for name, value in changes.items()}
    for make in (lambda: D.Settings(**changes), lambda: D.load_settings(D.Settings, environ)):
        with pytest.raises(D.UserError, match=f"^{re.escape(said)}"):
            make()


# ------------------------------------------------------------------------------------------------ the reference's cache
def reference_of(network, pairs, folder, data="data", **changes):
    """The reference's scores, and what the log says of them."""
    s, said = settings(**changes), []
    identity = {"data_sha256": data, "tokenizer_sha256": BYTES.sha256}
    run = SimpleNamespace(
        settings=s, runtime=ALONE, folder=folder / "run", log=said.append, identity=identity
    )
    return D.reference_scores(D.DPOTrainer(network, s, ALONE), [pairs], run), "; ".join(said)


def test_the_cache_is_read_for_the_same_weights_and_data_alone(tmp_path):
    pairs = pairs_of(4, 9)
    made, said = reference_of(network_of(), pairs, tmp_path)
    assert "made" in said and len([*tmp_path.rglob("*.scores")]) == 1
    assert made.tolist() == D.DPOTrainer(network_of(), settings(), ALONE).score(pairs).tolist()
    read, said = reference_of(network_of(), pairs, tmp_path)
    assert " read from " in said and torch.equal(read, made)
    other = network_of()
    with torch.no_grad():
        next(other.parameters())[0, 0] += 1e-3
    found, said = reference_of(other, pairs, tmp_path)
    assert "made" in said and not torch.equal(found, made)
    assert "made" in reference_of(network_of(), pairs, tmp_path, "other data")[1]
    assert (
        " read from " in reference_of(other, pairs, tmp_path)[1]
        and len([*tmp_path.rglob("*.scores")]) == 3
    )


def changed_file(content, kind):
    """Return the content of a file that somebody changed."""
    if kind == "flipped":
        return content[:-3] + bytes([content[-3] ^ 64]) + content[-2:]
    return {"cut": content[:-16], "longer": content + content[32:48], "empty": b""}[kind]


def test_a_cache_of_something_else_is_made_anew_with_a_word(tmp_path, monkeypatch):
    """Cut, longer, changed, of other weights under this name. Making it is not silent."""
    monkeypatch.setattr(D, "NOTE_SECONDS", 0.0)
    pairs = pairs_of(4, 9)
    made, said = reference_of(network_of(), pairs, tmp_path)
    assert "scored: 9 of 9 pairs" in said and "makes log-probabilities of 9 pairs" in said
    [path] = tmp_path.rglob("*.scores")
    content = path.read_bytes()
    other = network_of()
    with torch.no_grad():
        next(other.parameters())[0, 0] += 1e-3
    reference_of(other, pairs, tmp_path)
    [foreign] = {*tmp_path.rglob("*.scores")} - {path}
    contents = [changed_file(content, kind) for kind in ("flipped", "cut", "longer", "empty")]
    for wrong in (*contents, foreign.read_bytes()):
        path.write_bytes(wrong)
        found, said = reference_of(network_of(), pairs, tmp_path)
        assert "has not the scores of these weights and pairs; made anew" in said
        assert torch.equal(found, made) and path.read_bytes() == content


def test_the_snippet_of_the_guide_gives_the_rewards(place, reward, monkeypatch, capsys, float32):
    """Also where BOS stands in the text, as in the turns of some imported models."""
    text = (ROOT / "docs" / "dpo.md").read_text(encoding="utf-8")
    [snippet] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(snippet.replace("runs/rewarded", str(place.of(reward))), {})
    found = [float(line.split()[1]) for line in capsys.readouterr().out.splitlines()]
    network, tokenizer, _ = P.load_model("ARTIFACT", str(place.of(reward)))
    model = SimpleNamespace(network=network, tokenizer=tokenizer, context=64)
    turns = [("<|user|>", "52713")]
    talks = [[*turns, ("<|assistant|>", answer)] for answer in ("12357", "12375")]
    assert found == pytest.approx(P.rewards(model, talks), abs=1e-5) and found[0] != found[1]
    assert "doc=torch.zeros_like(ids)" in snippet


def test_a_changed_row_changes_the_hash_of_the_data(tmp_path):
    rows = [{"prompt": f"p{at}", "chosen": "c", "rejected": "d"} for at in range(40)]
    found = set()
    for change in ({}, {"chosen": "e"}, {"rejected": "e"}, {"prompt": "q"}, {"margin": 0.5}):
        path = write_lines(tmp_path / "pairs.jsonl", [{**rows[0], **change}, *rows[1:]])
        found.add(load(path)[0].sha256)
    assert len(found) == 5


# ---------------------------------------------------------------------------------------------- the head in an artifact
def test_a_reward_head_survives_packing(float32, tmp_path):
    """In 16 bits: to 2^-11 of each weight; and two readers of the file give the same rewards."""
    network, pairs = network_of(reward=True), pairs_of(6, 8)
    pack(network, BYTES, tmp_path)
    loaded = [M.load_model("INIT_FROM", str(tmp_path))[0] for M in (D, P)]
    assert all(torch.equal(one.w_value, network.w_value.half().float()) for one in loaded)
    error = (loaded[0].w_value - network.w_value).abs()
    assert (error <= network.w_value.abs() * 2**-11 + 2**-25).all() and error.shape == (16,)
    batch = D.pair_batch(pairs, range(8), CPU)
    with torch.no_grad(), D.quantized(network, D.quant_table(D.Settings())):
        expected = D.pair_scores(network, batch, True)
    with torch.no_grad():
        scores = [D.pair_scores(one, batch, True) for one in loaded]
    assert torch.equal(*scores) and expected.std() > 0.05
    assert (scores[0] - expected).abs().max() < 2e-3 * expected.abs().max()


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


KEEP = "T.KEEP_CHECKPOINTS = 9\n"


@pytest.fixture(scope="session")
def straight(place):
    assert place.run("dpo", KEEP).err == ""
    return "dpo"


@pytest.fixture(scope="session")
def reward(place):
    assert place.run("reward", OBJECTIVE="reward").err == ""
    return "reward"


@pytest.mark.parametrize("out", ["straight", "reward"])
def test_a_run_learns_and_says_so(place, request, out, float32):
    out = request.getfixturevalue(out)
    check_result(place, out, "train_dpo")
    result = place.result(out)
    log = place.log(out)
    before, after = result["before"], result["after"]
    assert before["accuracy"][0] == 0
    assert before["loss"][0] == pytest.approx(math.log(2), abs=1e-6)
    share, low, high = after["accuracy"]
    assert 0.5 < low <= share <= high <= 1 and after["n"] == before["n"] >= 20
    assert [share, low, high] == D.wilson(share * after["n"], after["n"])
    assert after["loss"][2] < math.log(2) and result["gain"]["loss"][2] < 0
    assert after["n_of_different_lengths"] == 0
    assert "note: accuracy counts pairs whose chosen reward is greater, not equal" in log
    assert "identical chosen and rejected: 1 (the first is row " in log
    assert "used 400 prompt/chosen/rejected" in log
    [facts] = result["row_files"].values()
    assert facts["used"] == {"prompt/chosen/rejected": 400}
    assert facts["left_out"]["identical chosen and rejected"] == 1
    assert ("log-probabilities made and stored in " in log) == (out != "reward")
    steps = place.steps(out)
    assert len(steps) == 24 and steps[-1]["accuracy"] > 0.5
    assert all(phase["steps"] > 0 for phase in result["phases"].values())
    assert set(result["phases"]) == {"warmup", "warmdown", "ema", "swa", "qat"}


def test_the_file_alone_gives_the_scores(place, reward, straight, float32):
    """sample.py's reader and a forward row by row: the reward model's mean rewards, the policy's
    log-probabilities.
    """
    data, _ = load(place.tiny["TRAIN_FILES"], eval_prompts=64)
    cases = itertools.product(((reward, True), (straight, False)), ("final", "model.upar"))
    for (out, kind), file in cases:
        network, tokenizer, _ = P.load_model("ARTIFACT", str(place.of(out) / file))
        assert hasattr(network, "w_value") == kind and tokenizer.sha256 == BYTES.sha256
        with torch.no_grad():
            scores = torch.stack([by_hand(network, pair, kind) for pair in data.held_out])
        after = place.result(out)["after" if file == "final" else "packed"]
        name = "reward" if kind else "logp"
        found = [after[f"{side}_{name}"][0] for side in ("chosen", "rejected")]
        assert found == pytest.approx(scores.mean(0).tolist(), abs=1e-4)
        if kind:
            assert after["accuracy"][0] == (scores[:, 0] > scores[:, 1]).double().mean().item()


def test_a_second_run_reads_the_cache_and_is_the_same(place, straight):
    """It is a replay, too."""
    given = dict(REPLAY=place.of(straight), OUT_DIR=place.folder / straight, RUN_ID="again")
    place.run("again", **{**place.unset, **given})
    shutil.move(place.folder / straight / "again", place.of("again"))
    said = r"^reference: log-probabilities read from .*/cache/reference_"
    assert re.search(said, place.log("again"), re.M)
    place.same("again", straight)


@pytest.mark.parametrize("step", [11, 22])  # before QAT, and in it
def test_a_resumed_run_is_the_same_to_the_byte(place, straight, step):
    out = f"resumed{step}"
    shutil.copytree(place.of(straight), place.of(out))
    for path in place.of(out).iterdir():
        if path.is_dir() and path.name > f"step_{step:06d}":
            shutil.rmtree(path)
        elif path.name in ("result.json", "model.upar", "progress.json"):
            path.unlink()
    place.resume(out)
    place.same(out, straight)


def test_two_ranks_do_what_one_does(place, straight):
    """To float32's last digits, in the first steps; later the two go apart, as sums in another
    order do.
    """
    place.ranks("ranks", ITERATIONS=6, SWA=0, QAT=0, WARMDOWN_FRAC=0)
    one, two = place.steps(straight)[1:6], place.steps("ranks")[1:]
    assert len(two) == 5 and place.result("ranks")["world_size"] == 2
    for first, second in zip(one, two, strict=True):
        assert first["loss"] == pytest.approx(second["loss"], abs=2e-3)


@pytest.mark.full
def test_fewer_pairs_than_ranks(place):
    rows = [dict(prompt=f"p{i}", chosen="yes", rejected="no") for i in range(3)]
    files = dict(
        TRAIN_FILES=write_lines(place.folder / "one.jsonl", rows[:1]),
        VAL_FILES=write_lines(place.folder / "two.jsonl", rows[1:]),
    )
    short = dict(ITERATIONS=2, EMA=0, SWA=0, QAT=0, SAVE_EVERY=0, PAIRS_PER_STEP=3)
    place.ranks("few", ranks=3, **short, **files)
    place.run("few alone", **short, **files)
    few, alone = (place.result(name)["after"]["loss"] for name in ("few", "few alone"))
    assert few == pytest.approx(alone, rel=1e-3)


def test_other_objectives_end_well(place, straight):
    """A reward model with adapters starts from a policy's artifact, with a longer context."""
    given = dict(OBJECTIVE="reward", LORA_RANK=2, QAT=0, OPTIMIZER="adamw8bit", TRAIN_SEQ_LEN=2100)
    given |= dict(ACTIVATION_CHECKPOINTING=1, INIT_FROM=place.of(straight))
    objectives = dict(
        reward=given, ipo=dict(LORA_RANK=2, QAT=0), robust=dict(MICRO_BATCH_TOKENS=64)
    )
    for objective, given in objectives.items():
        assert (
            place.run(f"other {objective}", ITERATIONS=4, **{"OBJECTIVE": objective, **given}).err
            == ""
        )
        result = place.result(f"other {objective}")
        assert result["steps"] == 4 and result["after"]["n"] >= 20
        assert result["settings"]["objective"] == objective and math.isfinite(
            result["after"]["loss"][0]
        )
    assert P.load_model("ARTIFACT", str(place.of("other reward")))[0].config.train_seq_len == 2100
    assert f"policy: {place.of(straight) / 'final'}" in place.log("other reward")


def test_no_checkpoint_goes_on_with_other_rows(place, straight):
    shutil.copytree(place.of(straight), place.of("changed"))
    (place.of("changed") / "result.json").unlink()
    rows = [{"prompt": f"p{at}", "chosen": "x", "rejected": "y"} for at in range(90)]
    files = place.tiny["TRAIN_FILES"]
    content = files.read_bytes()
    unset = {**place.unset, "RESUME": "run"}
    try:
        write_lines(files, rows)
        line = place.refused("changed", **unset)
        assert re.match(r"error: DATA_SHA256='\w+': must stay '\w+' under RESUME$", line), line
    finally:
        files.write_bytes(content)
    line = place.refused("changed", **{**unset, "TRAIN_FILES": f"{files}:0.5"})
    assert re.match(r"error: TRAIN_FILES='.*:0.5': must stay '.*' under RESUME$", line), line
    line = place.refused("changed", **{**unset, "OPTIMIZER": "adafactor"})
    assert re.match(r"error: OPTIMIZER='adafactor': must stay '\w+' under RESUME$", line), line


# ---------------------------------------------------------------------------------------- the guide
GUIDE = "dpo.md"


@pytest.mark.full
def test_every_command_of_the_guide(tmp_path):
    for name, count in (("pairs", 80), ("more", 40), ("held_out", 20)):
        rows = [dict(prompt=f"{name[0]}{at}", chosen="x", rejected="yy") for at in range(count)]
        write_lines(tmp_path / f"{name}.jsonl", rows)
    text = "".join(blocks(GUIDE, "bash"))
    for name in set(re.findall(r"runs/(\w+)", text)) - set(re.findall(r"RUN_ID=(\w+)", text)):
        pack(small_network(), BYTES, tmp_path / "runs" / name)
    run_guide(GUIDE, tmp_path, least=5)
    (program,) = blocks(GUIDE, "python")
    (tmp_path / "program.py").write_text(program)
    done = start(["program.py"], environment(PYTHONPATH=tmp_path), tmp_path)
    assert re.fullmatch(r"(123(57|75) -?[\d.e-]+\n){2}", done.stdout), done.stdout + done.stderr
