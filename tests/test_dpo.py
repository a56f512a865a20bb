"""Preference learning: objectives against hand-worked values, pairs and their scores, the reference's cache, runs."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import os
import random
import re
import shutil
import socket
import statistics
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import zstandard
from conftest import KEPT
from torch import nn

import sample as P
import train_dpo as D

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")
ALONE = D.Runtime(0, 1, CPU, False)
BYTES = D.load_tokenizer("bytes")
USER, ASSISTANT, END = 261, 262, 263
POLICIES = ("dpo", "ipo", "cdpo", "robust")
pytestmark = pytest.mark.usefixtures("one_thread", "default_dtype")


@pytest.fixture
def default_dtype(request):
    """float64 for all that a test makes, unless it asks for float32 by the fixture of that name."""
    torch.set_default_dtype(torch.float32 if "float32" in request.fixturenames else torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def float32():
    """Real runs are in float32."""


# --------------------------------------------------------------------------------------- objectives: values by hand
# Two pairs. Log-ratios (1, -0.5) and (0, 0.5): D = 1.5 and -0.5, so x = 0.15 and -0.05 at BETA = 0.1.
SCORES = ((-10.0, -12.0), (-3.0, -2.5))
FACTS = dict(reference=((-11.0, -11.5), (-3.0, -3.0)), lengths=((5, 4), (2, 1)), margin=(0.0, 0.5))
DPO = (0.620957047790, 0.718459648013)  # log(1 + e^-0.15), log(1 + e^0.05)
BY_HAND = {
    "dpo": DPO,
    "ipo": ((0.2 + 0.125 - 5) ** 2, (0.0 - 0.5 - 5) ** 2),  # log-ratios over lengths; 1 / (2 * 0.1) = 5
    "cdpo": (DPO[0] + 0.1 * 0.15, DPO[1] - 0.1 * 0.05),  # -log sigmoid(-x) = -log sigmoid(x) + x; e = 0.1
    "robust": (DPO[0] - 0.125 * 0.15, DPO[1] + 0.125 * 0.05),  # e / (1 - 2e) = 0.125
}


def facts(**changes) -> SimpleNamespace:
    return SimpleNamespace(**{name: torch.tensor(value) for name, value in {**FACTS, **changes}.items()})


def settings(**changes) -> D.Settings:
    own = dict(beta=0.1, label_smoothing=0.1, layer_pattern="g a", model_dim=16, num_heads=2, qat=False)
    return D.Settings(**{**own, **changes})


@pytest.mark.parametrize("objective", POLICIES)
def test_losses_are_the_values_worked_by_hand(objective):
    losses, rewards = D.pair_losses(torch.tensor(SCORES), facts(), settings(objective=objective))
    assert losses.tolist() == pytest.approx(BY_HAND[objective], abs=1e-11)
    ratios = ((0.2, -0.125), (0.0, 0.5)) if objective == "ipo" else ((1.0, -0.5), (0.0, 0.5))
    assert (rewards - 0.1 * torch.tensor(ratios)).abs().max() < 1e-15  # the implicit reward, BETA times the log-ratio


def test_bradley_terry_with_margin_and_centering():
    """Rewards (1, 0.5), margin 0: log(1 + e^-0.5) + c 1.5^2; (-1, 0.25), margin 0.5: log(1 + e^1.75) + c 0.75^2."""
    scores = torch.tensor(((1.0, 0.5), (-1.0, 0.25)))
    for centering in (0.0, 0.01, 2.0):
        losses, rewards = D.pair_losses(scores, facts(), settings(objective="reward", centering=centering))
        assert losses.tolist() == pytest.approx((0.474076984180 + centering * 2.25,
                                                 1.910224150438 + centering * 0.5625), abs=1e-11)
        assert torch.equal(rewards, scores)


@pytest.mark.parametrize("objective", [*POLICIES, "reward"])
@pytest.mark.parametrize("beta", [0.05, 0.5])
def test_gradients_are_finite_differences(objective, beta):
    rng = torch.Generator().manual_seed(3)
    s = settings(objective=objective, beta=beta, label_smoothing=0.2, centering=0.3)
    scores = (6 * torch.randn(7, 2, generator=rng)).requires_grad_()
    lengths = torch.randint(1, 9, (7, 2), generator=rng).tolist()
    own = facts(reference=(6 * torch.randn(7, 2, generator=rng)).tolist(), lengths=lengths, margin=[0.3] * 7)
    [slopes] = torch.autograd.grad(D.pair_losses(scores, own, s)[0].sum(), scores)
    for at in np.ndindex(7, 2):
        ends = []
        for step in (1e-6, -1e-6):
            moved = scores.detach().clone()
            moved[at] += step
            ends.append(D.pair_losses(moved, own, s)[0][at[0]])
        assert abs((ends[0] - ends[1]) / 2e-6 - slopes[at]) < 1e-7
    if objective != "reward":  # a common shift of both log-ratios is free, but where lengths divide them
        assert objective == "ipo" or slopes.sum(1).abs().max() < 1e-15


def test_at_the_start_rewards_are_0_and_losses_say_so():
    """Strictly greater: accuracy 0, not 0.5, where policy and reference are one."""
    scores = torch.tensor(SCORES)
    own = facts(reference=SCORES)
    for objective, value in (("dpo", math.log(2)), ("cdpo", math.log(2)), ("robust", math.log(2)), ("ipo", 25.0)):
        losses, rewards = D.pair_losses(scores, own, settings(objective=objective))
        assert losses.tolist() == pytest.approx([value] * 2, abs=1e-12) and not rewards.any()
        found = D.pair_summary(D.pair_metrics(losses, rewards, scores, own.lengths), False)
        assert found["accuracy"][0] == found["margin"][0] == found["longer_preferred"][0] == 0
        assert found["likelier"][0] == 0.5 and found["longer_chosen"][0] == 1.0


def test_smoothing_of_0_is_dpo():
    for objective in ("cdpo", "robust"):
        found = D.pair_losses(torch.tensor(SCORES), facts(), settings(objective=objective, label_smoothing=0.0))[0]
        assert found.tolist() == pytest.approx(DPO, abs=1e-11)


@pytest.mark.parametrize("e", [0.05, 0.2, 0.45])
def test_robust_is_unbiased_under_flips_and_cdpo_is_their_expectation(e):
    """Each pair is the wrong way round with probability e: the expectation of the robust loss is DPO's on the truth."""
    def flipped(objective: str) -> torch.Tensor:
        right = D.pair_losses(torch.tensor(SCORES), facts(), settings(objective=objective, label_smoothing=e))[0]
        turned = {name: [row[::-1] for row in FACTS[name]] for name in ("reference", "lengths")}
        scores = torch.tensor([row[::-1] for row in SCORES])
        return (1 - e) * right + e * D.pair_losses(scores, facts(**turned),
                                                   settings(objective=objective, label_smoothing=e))[0]

    assert flipped("robust").tolist() == pytest.approx(DPO, abs=1e-11)
    cdpo = D.pair_losses(torch.tensor(SCORES), facts(), settings(objective="cdpo", label_smoothing=e))[0]
    assert flipped("dpo").tolist() == pytest.approx(cdpo.tolist(), abs=1e-12)


def test_metrics_by_hand():
    """Four pairs: right, wrong, a tie, right; the third has answers of one length."""
    losses, lengths = torch.tensor([1.0, 2.0, 3.0, 6.0]), torch.tensor([[3, 5], [4, 2], [6, 6], [9, 1]])
    rewards = torch.tensor([[0.5, 0.25], [-1.0, 1.0], [0.25, 0.25], [2.0, 0.0]])
    scores = torch.tensor([[-1.0, -2.0], [-4.0, -2.0], [-2.0, -3.0], [-7.0, -5.0]])
    values = D.pair_metrics(losses, rewards, scores, lengths)
    found = D.pair_summary(values, False)
    means = dict(loss=3.0, accuracy=0.5, margin=0.0625, chosen_reward=0.4375, rejected_reward=0.375, chosen_logp=-3.5,
                 rejected_logp=-3.0, likelier=0.5, longer_preferred=1 / 3, longer_chosen=2 / 3)
    assert {name: value[0] for name, value in found.items() if name in means} == pytest.approx(means, abs=1e-12)
    assert (found["n"], found["n_of_different_lengths"]) == (4, 3)
    assert found["accuracy"] == D.wilson(2, 4) and found["longer_preferred"] == D.wilson(1, 3)
    spread = statistics.stdev([0.25, -2.0, 0.0, 2.0]) / 2
    assert found["margin"] == pytest.approx([0.0625, 0.0625 - 1.96 * spread, 0.0625 + 1.96 * spread], abs=1e-12)
    assert not {"likelier", "chosen_logp", "rejected_logp"} & set(D.pair_summary(values, True))


def test_wilsons_interval():
    """Newcombe 1998: 81 of 263 is 0.2553 to 0.3662, 1 of 29 is 0.0061 to 0.1718; ends solve |p - share| = 1.96 sd."""
    assert D.wilson(81, 263) == pytest.approx([81 / 263, 0.2553, 0.3662], abs=5e-5)
    assert D.wilson(1, 29) == pytest.approx([1 / 29, 0.0061, 0.1718], abs=5e-5)
    assert D.wilson(0, 0) == [0.0, 0.0, 1.0] and D.wilson(0, 9)[1] == pytest.approx(0, abs=1e-15)
    share, *ends = D.wilson(7, 20)
    for end in ends:
        assert (end - share) ** 2 == pytest.approx(1.96**2 * end * (1 - end) / 20, abs=1e-12)


# ------------------------------------------------------------------------------------------------- rows become pairs
def parse(row: dict, context: int = 64, margin: float = 0.0) -> tuple[str, D.Pair]:
    return D.parse_pair(row, BYTES, context, margin)


def test_the_ids_of_a_pair():
    kind, pair = parse({"prompt": "ab", "chosen": "c", "rejected": "de"})
    assert kind == "prompt/chosen/rejected" and pair.margin == 0.0 and pair.width() == 9
    assert pair.prompt.tolist() == [1, USER, 101, 102, END, ASSISTANT]  # a byte's id is 4 more
    assert [ids.tolist() for ids in pair.answers] == [[103, END], [104, 105, END]]
    messages = [("system", "s"), ("user", "u"), ("assistant", "v"), ("user", "w")]
    listed = [{"role": role, "content": text} for role, text in messages]
    _, pair = parse({"prompt": listed, "chosen": "x", "rejected": [{"role": "assistant", "content": "y"}], "margin": 2})
    assert pair.prompt.tolist() == [1, 260, 119, END, USER, 121, END, ASSISTANT, 122, END, USER, 123, END, ASSISTANT]
    assert [ids.tolist() for ids in pair.answers] == [[124, END], [125, END]] and pair.margin == 2.0
    for row in ({"chosen": [*listed, {"role": "assistant", "content": "x"}],
                 "rejected": [*listed, {"role": "assistant", "content": "y"}]},  # two whole conversations
                {"prompt": listed, "chosen": [*listed, {"role": "assistant", "content": "x"}],
                 "rejected": [*listed, {"role": "assistant", "content": "y"}]}):  # and the prompt beside them
        again = parse(row)[1]
        assert again.prompt.tolist() == pair.prompt.tolist() and again.key == pair.key
        assert [ids.tolist() for ids in again.answers] == [[124, END], [125, END]]


GOOD = {"prompt": "ab", "chosen": "c", "rejected": "d"}
BAD = {  # what the log calls it -> a row, or a line
    "missing field 'rejected'": {"prompt": "ab", "chosen": "c"},
    "missing field 'prompt'": {"chosen": "c", "rejected": "d"},
    "empty answer": {**GOOD, "rejected": " \n"}, "identical chosen and rejected": {**GOOD, "rejected": "c"},
    "unknown role 'narrator'": {**GOOD, "prompt": [{"role": "narrator", "content": "x"}]},
    "answer longer than the context, TRAIN_SEQ_LEN=64": {**GOOD, "rejected": "d" * 200},
    "field 'margin' is no number": {**GOOD, "margin": "1"},
    "chosen or rejected does not end with the assistant's turn": {**GOOD, "chosen": [{"role": "user", "content": "x"}]},
    "chosen and rejected differ before their last turn": {
        side: [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
        for side, text in (("chosen", "c"), ("rejected", "d"))},
    "field 'chosen' is no text": {**GOOD, "chosen": 3},
    "half a surrogate pair, which is no Unicode": {**GOOD, "chosen": "\ud800"},
    "invalid UTF-8": b'{"prompt": "\xff", "chosen": "c", "rejected": "d"}', "no JSON": b"{", "no JSON object": b"[1]",
}


def write_rows(path: Path, rows: list) -> str:
    lines = b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows)
    path.write_bytes(zstandard.compress(lines) if path.suffix == ".zst" else lines)
    return str(path)


@pytest.mark.parametrize("name", ["pairs.jsonl", "pairs.jsonl.zst"])
def test_each_malformed_row_is_counted_and_named(tmp_path, name):
    rows = [{"prompt": f"p{at}", "chosen": "c", "rejected": "d"} for at in range(60)]
    path, said = write_rows(tmp_path / name, [*BAD.values(), *BAD.values(), *rows]), []
    data = D.load_pairs(settings(train_files=path), BYTES, 64, said.append)
    assert len(data.pairs) + len(data.held_out) == 60
    for at, kind in enumerate(BAD, 1):
        assert f"{kind}: 2 (the first is row {at})" in said[0], kind
    assert f"{60 + 2 * len(BAD)} rows, used 60 prompt/chosen/rejected" in said[0]


def test_a_file_without_a_usable_row_is_an_error(tmp_path):
    path = write_rows(tmp_path / "pairs.jsonl", [*BAD.values()])
    with pytest.raises(D.UserError, match="pairs.jsonl: 14 rows, used none.*must hold one usable row at least"):
        D.load_pairs(settings(train_files=path), BYTES, 64, print)
    with pytest.raises(D.UserError, match="^TASK='sort': 0 pairs of sort; left out {'answer longer than the c.*': 8}"):
        D.load_pairs(settings(train_pairs=8), BYTES, 10, print)
    one = write_rows(tmp_path / "one.jsonl", [GOOD])
    with pytest.raises(D.UserError, match="^VAL_FILES='': 0 pairs held out, 1 of other prompts to train on; must be"):
        D.load_pairs(settings(train_files=one), BYTES, 64, print)
    for wrong in (f"{one}:0", f"{one},{one}:2", f"{one},,"):
        with pytest.raises(D.UserError, match="^TRAIN_FILES=.*: must be FILE or FILE:WEIGHT"):
            D.load_pairs(settings(train_files=wrong), BYTES, 64, print)


def test_held_out_prompts_are_never_trained(tmp_path):
    """Several pairs a prompt; without VAL_FILES one prompt in ten, whole; with them, their prompts leave training."""
    rows = [{"prompt": f"p{at % 200}", "chosen": f"c{at}", "rejected": "d"} for at in range(800)]
    path, said = write_rows(tmp_path / "pairs.jsonl", rows), []
    data = D.load_pairs(settings(train_files=path, eval_prompts=500), BYTES, 64, said.append)
    keys = [{pair.key for pair in own} for own in (data.pairs, data.held_out)]
    assert not keys[0] & keys[1] and len(keys[0] | keys[1]) == 200 and 10 <= len(keys[1]) <= 32
    assert len(data.held_out) == 4 * len(keys[1])
    assert said[1].endswith(f" held out; {len(data.held_out)} left out of training with a held-out prompt")
    assert [len(data.choice), len(set(data.choice))] == [len(data.pairs) // 10] * 2
    [(own, weight)] = data.parts
    assert weight == 1 and sorted([*own, *data.choice]) == list(range(len(data.pairs)))
    rows = [{"prompt": f"p{at}", "chosen": "x", "rejected": "y"} for at in range(9)]
    held = write_rows(tmp_path / "held.jsonl", rows)
    data = D.load_pairs(settings(train_files=path, val_files=held), BYTES, 64, said.append)
    assert len(data.held_out) == 9 and len(data.pairs) == 800 - 9 * 4 and said[-1].endswith(
        "36 left out of training with a held-out prompt")
    assert len(D.load_pairs(settings(train_files=path, eval_prompts=5), BYTES, 64, print).held_out) == 5


def test_a_pass_takes_each_pair_by_its_files_weight():
    parts = [(np.arange(0, 10), 1.0), (np.arange(10, 20), 2.5), (np.arange(20, 40), 0.25)]
    first, second = (D.pass_order(parts, 7, number) for number in range(2))
    for order in (first, second):
        counts = np.bincount(order, minlength=40)
        assert (counts[:10] == 1).all() and counts[20:].sum() == 5 and counts[20:].max() == 1
        assert counts[10:20].sum() == 25 and set(counts[10:20]) == {2, 3}
    assert not np.array_equal(first, second) and np.array_equal(first, D.pass_order(parts, 7, 0))
    assert not np.array_equal(first, D.pass_order(parts, 8, 0))


def text_of(ids: np.ndarray) -> str:
    return bytes(int(i) - 4 for i in ids if 4 <= i < 260).decode()


@pytest.mark.parametrize("name", ["sort", "reverse", "add", "countdown", "zebra"])
def test_synthetic_pairs_are_right_and_wrong_and_length_tells_little(name):
    said, s = [], settings(task=name, train_pairs=300, eval_prompts=100)
    data, task = D.load_pairs(s, BYTES, 256, said.append), D.make_task(name, "", s.seed)
    problems = {problem.prompt: problem for problem in (task.problem(at, False) for at in range(300))}
    problems |= {problem.prompt: problem for problem in task.held_out(100)}
    assert len(data.pairs) == 300 and len(data.held_out) == 100
    longer = [0, 0]
    for pair in (*data.pairs, *data.held_out):
        problem = problems[text_of(pair.prompt)]
        right, wrong = map(text_of, pair.answers)
        assert task.reward(problem, right) == 1 and task.reward(problem, wrong) == 0 and wrong.strip()
        assert abs(len(right) - len(wrong)) <= 1
        for side in (0, 1):
            longer[side] += len((right, wrong)[side]) > len((right, wrong)[1 - side])
    assert 0.35 < longer[0] / sum(longer) < 0.65 and sum(longer) > 70
    again = D.load_pairs(s, BYTES, 256, print)
    assert again.sha256 == data.sha256 != D.load_pairs(dataclasses.replace(s, seed=2), BYTES, 256, print).sha256


def test_slips_of_short_and_foreign_answers():
    task, rng = D.Task("jsonl", 0, ([], [])), random.Random(0)
    for answer, kinds in (("x", "letter"), ("é", "letter"), ("7", "digit"), ("A", "letter"), ("aa", "letter")):
        slips = {D.slip(task, D.Problem("p", answer), rng) for _ in range(300)}
        assert answer not in slips and "" not in slips and len(slips) > 5
        assert answer + answer in slips or len(answer) > 1
        assert all(slip.isdigit() for slip in slips) == (kinds == "digit")


# -------------------------------------------------------------------------------------------- scores of pairs, batches
class Table(nn.Module):
    """Features are running sums of the tokens' rows, so a place tells what stood before it; a next token's logits are
    those of the present token's row."""

    def __init__(self, size: int = 264, dim: int = 8):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.embed = nn.Parameter(torch.randn(size, dim, generator=generator))
        self.table = nn.Parameter(torch.randn(dim, size, generator=generator))
        self.w_value = nn.Parameter(torch.randn(dim, generator=generator))
        self.config, self.layers = SimpleNamespace(model_dim=dim, train_seq_len=128), [0]

    def features(self, ids, cache=None):
        return F.embedding(ids, self.embed).cumsum(1)

    def logits(self, x):
        return x @ self.table


def pairs_of(seed: int, count: int) -> list[D.Pair]:
    """Random prompts and answers of 1 to 9 tokens, END not among them: nothing but the place tells the last token."""
    rng = random.Random(seed)

    def ids(low: int, high: int) -> np.ndarray:
        return np.array([rng.randrange(4, 260) for _ in range(rng.randint(low, high))], np.int32)

    return [D.Pair(np.append(1, ids(1, 6)).astype(np.int32), (ids(1, 9), ids(1, 9)), rng.random(), rng.getrandbits(60))
            for _ in range(count)]


def by_hand(network: nn.Module, pair: D.Pair, reward: bool) -> list[float]:
    """Scores of one pair, row by row without padding, token by token."""
    found = []
    for answer in pair.answers:
        ids = torch.tensor([[*pair.prompt.tolist(), *answer.tolist()]])
        x = network.features(ids)[0].detach()
        logps = network.logits(x).detach().log_softmax(-1)
        begin = len(pair.prompt)
        found.append(float(x[-1] @ network.w_value.detach()) if reward else
                     sum(float(logps[at - 1, ids[0, at]]) for at in range(begin, ids.size(1))))
    return found


@pytest.mark.parametrize("reward", [False, True], ids=["policy", "reward"])
@pytest.mark.parametrize("tokens", [1, 40, 10**6])
def test_scores_take_the_whole_answer_and_the_value_its_last_token(reward, tokens):
    """Whatever stands beside a row: from its first token, which the prompt's last place predicts, to its end token."""
    network, pairs, seen = Table(), pairs_of(0, 17), []
    references = torch.randn(17, 2, generator=torch.Generator().manual_seed(0))
    for batch in D.pair_batches(pairs, references, CPU, tokens):
        n, width = len(batch.where), batch.ids.size(1)
        assert batch.ids.shape == (2 * n, width) and (2 * n * width <= max(tokens, 2 * width))
        scores = D.pair_scores(network, batch, reward)
        assert scores.shape == (n, 2) and scores.dtype == torch.float64
        for at, place in enumerate(batch.where):
            assert scores[at].tolist() == pytest.approx(by_hand(network, pairs[place], reward), abs=1e-11)
            assert batch.reference[at].tolist() == references[place].tolist()
            assert batch.lengths[at].tolist() == [len(answer) for answer in pairs[place].answers]
            assert batch.margin[at] == pairs[place].margin
        padded = copy.copy(batch)  # wider, and of other content
        ids = torch.full((2 * n, width + 5), 77)
        for row, last in enumerate(batch.last.tolist()):
            ids[row, : last + 1] = batch.ids[row, : last + 1]
        padded.ids, padded.targets = ids, F.pad(batch.targets, (0, 5), value=-1)
        padded.mask = padded.targets >= 0
        assert (D.pair_scores(network, padded, reward) - scores).abs().max() < 1e-11
        seen += batch.where
    assert sorted(seen) == list(range(17))


def test_each_token_of_the_answer_has_its_gradient():
    """Of log-probabilities by the features: at the place before each answer token, the end token's too, no other."""
    network, [pair] = Table(), pairs_of(3, 1)
    [batch] = D.pair_batches([pair], torch.zeros(1, 2), CPU, 10**6)
    places = torch.zeros(*batch.ids.shape, 8, requires_grad=True)
    features = network.features
    network.features = lambda ids: features(ids) + places
    D.pair_scores(network, batch, False).sum().backward()
    for row, answer in enumerate(pair.answers):
        used = places.grad[row].abs().sum(-1) > 0
        begin = len(pair.prompt) - 1
        assert used.nonzero()[:, 0].tolist() == list(range(begin, begin + len(answer)))


def network_of(reward: bool = False, **changes) -> D.GPT:
    """A small network, random in every weight."""
    s = settings(**changes)
    network, *_ = D.start_policy(s, ALONE)
    if reward:
        D.add_value_head(network)
    D.adapt(network, s)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for param in network.parameters():
            param.add_(0.1 * torch.randn(param.shape, generator=generator))
    return network


@pytest.mark.parametrize("objective", ["dpo", "ipo", "reward"])
def test_micro_batches_and_ranks_give_the_gradient_of_one_batch(objective):
    """And that is the gradient of the mean of losses, pair by pair, by another forward."""
    reward, pairs = objective == "reward", pairs_of(1, 12)
    references, found, whole = torch.randn(12, 2, generator=torch.Generator().manual_seed(2)), {}, {}
    for name, ranks, tokens in (("one", 1, 10**6), ("micro", 1, 30), ("single", 1, 1), ("ranks", 2, 10**6)):
        s, grads, means = settings(objective=objective, micro_batch_tokens=tokens, grad_clip_norm=0.0), [], []
        for rank in range(ranks):
            trainer = D.DPOTrainer(network_of(reward), s, D.Runtime(rank, ranks, CPU, False))
            means.append(trainer.update(pairs, references, 0.0))
            grads.append([param.grad.clone() for param in trainer.trained])
        found[name] = [sum(each) for each in zip(*grads, strict=True)]
        for key in whole:
            assert sum(each[key] for each in means) == pytest.approx(whole[key], abs=1e-12)
        whole = whole or {key: means[0][key] for key in ("loss", "accuracy", "margin")}
    network, total = network_of(reward), 0.0
    for at, pair in enumerate(pairs):
        scores = []
        for answer in pair.answers:
            ids = torch.tensor([[*pair.prompt.tolist(), *answer.tolist()]])
            if reward:
                scores.append(network.features(ids)[0, -1] @ network.w_value)
            else:
                targets = ids[:, 1:].clone()
                targets[:, : len(pair.prompt) - 1] = -1
                scores.append(-network(ids[:, :-1], targets).sum())
        own = SimpleNamespace(reference=references[at][None], margin=torch.tensor([pair.margin]),
                              lengths=torch.tensor([[len(answer) for answer in pair.answers]]))
        total = total + D.pair_losses(torch.stack(scores)[None], own, settings(objective=objective))[0][0] / 12
    params = [param for param in network.parameters() if param.requires_grad]
    slopes = torch.autograd.grad(total, params, allow_unused=True)
    expected = [torch.zeros_like(p) if slope is None else slope for p, slope in zip(params, slopes, strict=True)]
    assert max(slope.abs().max() for slope in expected) > 1e-3
    for name, grads in found.items():
        worst = max((one - other).abs().max() for one, other in zip(grads, expected, strict=True))
        assert worst < 1e-10, name


def test_wrong_settings_are_refused():
    for changes, said in ((dict(beta=0.0), "BETA=0: must be above"), (dict(reference="base"), "REFERENCE='base': no "),
                          (dict(pairs_per_step=7), "PAIRS_PER_STEP=7: must be a multiple of the 2 ranks"),
                          (dict(label_smoothing=0.2),
                           "LABEL_SMOOTHING=0.2: OBJECTIVE=dpo does not read it; it is for cdpo and robust"),
                          (dict(margin=0.5, objective="ipo"), "MARGIN=0.5: OBJECTIVE=ipo does not read it"),
                          (dict(centering=0.0), "CENTERING=0.0: OBJECTIVE=dpo does not read it; it is for reward")):
        with pytest.raises(D.UserError, match=f"^{re.escape(said)}"):
            D.DPOTrainer(network_of(), settings(qat=False, **changes), D.Runtime(0, 2, CPU, False))
    for name, value in (("label_smoothing", 0.5), ("objective", "kto"), ("pairs_per_step", 0), ("beta", -1.0)):
        with pytest.raises(D.UserError, match=f"^{name.upper()}={value!r}: must be"):
            D.load_settings(D.Settings, {name.upper(): str(value)})


# ------------------------------------------------------------------------------------------------ the reference's cache
def test_the_cache_is_read_for_the_same_weights_and_data_alone(tmp_path):
    pairs, s = pairs_of(4, 9), settings(qat=False)

    def scores(network, data: str = "data", **changes) -> tuple[torch.Tensor, str]:
        trainer = D.DPOTrainer(network, dataclasses.replace(s, **changes), ALONE)
        return trainer.reference([pairs], data, tmp_path / "cache")

    made, said = scores(network_of())
    assert "made in" in said and len([*tmp_path.rglob("*.npy")]) == 1
    assert made.tolist() == D.DPOTrainer(network_of(), s, ALONE).scores(pairs).tolist()
    read, said = scores(network_of())
    assert " read from " in said and torch.equal(read, made)
    other = network_of()
    with torch.no_grad():
        next(other.parameters())[0, 0] += 1e-3
    found, said = scores(other)
    assert "made in" in said and not torch.equal(found, made)
    assert "made in" in scores(network_of(), "other data")[1]
    assert " read from " in scores(other)[1] and len([*tmp_path.rglob("*.npy")]) == 3
    for path in tmp_path.rglob("*.npy"):
        path.write_bytes(path.read_bytes()[:-9])  # damaged: made again, and mended
    again, said = scores(network_of())
    assert "made in" in said and torch.equal(again, made)
    assert " read from " in scores(network_of())[1]
    (tmp_path / "file").write_text("")
    _, said = D.DPOTrainer(network_of(), s, ALONE).reference([pairs], "data", tmp_path / "file")
    assert "not kept, " in said


def test_a_changed_row_changes_the_hash_of_the_data(tmp_path):
    rows = [{"prompt": f"p{at}", "chosen": "c", "rejected": "d"} for at in range(40)]
    found = set()
    for change in ({}, {"chosen": "e"}, {"rejected": "e"}, {"prompt": "q"}, {"margin": 0.5}):
        path = write_rows(tmp_path / "pairs.jsonl", [{**rows[0], **change}, *rows[1:]])
        found.add(D.load_pairs(settings(train_files=path), BYTES, 64, print).sha256)
    assert len(found) == 5


def test_the_base_is_the_reference_without_adapters(tmp_path):
    """Adapters with a B that is not 0: the start is the policy with them, the base is without."""
    s, pairs = settings(qat=False, lora_rank=2), pairs_of(5, 6)
    network = network_of(lora_rank=2)
    start, base = (D.DPOTrainer(network, dataclasses.replace(s, reference=name), ALONE).reference(
        [pairs], "data", tmp_path)[0] for name in ("start", "base"))
    assert torch.equal(start, D.DPOTrainer(network, s, ALONE).scores(pairs)) and (start - base).abs().max() > 1e-3
    with torch.no_grad():
        for name, param in network.named_parameters():
            if name.endswith("lora_b"):
                param.zero_()
    assert (D.DPOTrainer(network, s, ALONE).scores(pairs) - base).abs().max() < 1e-10


# ---------------------------------------------------------------------------------------------- the head in an artifact
def test_a_reward_head_survives_packing(float32, tmp_path):
    """In 16 bits: to 2^-11 of each weight; and two readers of the file give the same rewards."""
    network, pairs = network_of(reward=True), pairs_of(6, 8)
    state = network.state_dict()
    packed, _ = D.pack_artifact(state, D.quantize_all(state, D.quant_table(D.Settings())),
                                settings=vars(network.config), tokenizer_sha256=BYTES.sha256,
                                meta={"seed": 1, "tokenizer": "bytes"})
    (tmp_path / "model.upar").write_bytes(packed)
    loaded = [M.load_model("INIT_FROM", str(tmp_path))[0] for M in (D, P)]
    for one in loaded:
        assert torch.equal(one.w_value, network.w_value.half().float()) and one.w_value.shape == (16,)
    assert ((loaded[0].w_value - network.w_value).abs() <= network.w_value.abs() * 2**-11 + 2**-25).all()
    [batch] = D.pair_batches(pairs, torch.zeros(8, 2), CPU, 10**6)
    with torch.no_grad(), D.quantized(network, D.quant_table(D.Settings())):
        expected = D.pair_scores(network, batch, True)
    with torch.no_grad():
        scores = [D.pair_scores(one, batch, True) for one in loaded]
    assert torch.equal(*scores) and expected.std() > 0.05
    assert (scores[0] - expected).abs().max() < 2e-3 * expected.abs().max()


# ---------------------------------------------------------------------------------------------------- whole runs, tiny
TINY = {
    "DEVICE": "cpu", "LAYER_PATTERN": "g a", "MODEL_DIM": "32", "NUM_HEADS": "2", "SFT_STEPS": "20",
    "PAIRS_PER_STEP": "16", "ITERATIONS": "24", "MAX_WALLCLOCK_SECONDS": "0", "RESERVE_SECONDS": "0",
    "SAVE_EVERY": "11", "LEARNING_RATE": "0.01",
}
# Forks a process, or some ranks, for each line of its input: to import torch takes longer than a run.
SERVER = '''
import json, os, sys, traceback
sys.path.insert(0, sys.argv[1])
import numpy, torch
import torch._dynamo
import train_dpo as T
T.LOG_SECONDS = 0.0  # a line for each step
T.KEEP_CHECKPOINTS = 9

for line in sys.stdin:
    order, children = json.loads(line), []
    for environ in order["ranks"]:
        child = os.fork()
        if child:
            children.append(child)
            continue
        for number, path in ((1, order["out"]), (2, order["err"])):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.clear()
        os.environ.update(environ)
        sys.argv = [T.__file__]
        torch.seed()
        try:
            code = T.exit_code(T.main)
        except BaseException:
            traceback.print_exc()
            code = 99
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]), flush=True)
'''


class Place:
    """A folder with pairs whose truth is known, and the runs of the tests, each in <out>/run of it."""

    def __init__(self, folder: Path):
        self.folder, letters = folder, "abcdefghijklmnopqrst"
        rows = [{"prompt": a + b, "chosen": "xy"[a >= "k"], "rejected": "yx"[a >= "k"]}
                for a in letters for b in letters]
        self.pairs = write_rows(folder / "pairs.jsonl", [*rows, *BAD.values()])
        self.server = subprocess.Popen([sys.executable, "-c", SERVER, str(ROOT)], env=self.environment(), text=True,
                                       stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def environment(self, **changes: object) -> dict[str, str]:
        kept = {name: os.environ[name] for name in KEPT if name in os.environ}
        found = {**TINY, "TRAIN_FILES": self.folder / "pairs.jsonl", "RUN_ID": "run", **changes}
        given = {name: str(value) for name, value in found.items() if value is not None}
        return {**kept, "OMP_NUM_THREADS": "1", **given}

    def run(self, out: str, code: int = 0, ranks: int = 1, **changes: object) -> str:
        """A whole run in the folder `out`; what stands on stderr."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        environ = self.environment(**{"OUT_DIR": self.folder / out, **changes})
        shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        each = [{**environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
        paths = {name: str(self.folder / f"{out}.{name}") for name in ("out", "err")}
        for path in paths.values():
            Path(path).unlink(missing_ok=True)
        self.server.stdin.write(json.dumps({"ranks": each if ranks > 1 else [environ], **paths}) + "\n")
        self.server.stdin.flush()
        codes = json.loads(self.server.stdout.readline())
        err = Path(paths["err"]).read_text()
        assert codes == [code] * ranks and "Traceback" not in err, err[-3000:]
        return err

    def of(self, out: str) -> Path:
        return self.folder / out / "run"

    def log(self, out: str) -> str:
        return (self.of(out) / "log.txt").read_text(encoding="utf-8").rpartition("=" * 120 + "\n")[2]

    def result(self, out: str) -> dict:
        return json.loads((self.of(out) / "result.json").read_text())

    def same(self, out: str, other: str) -> None:
        assert (self.of(out) / "model.upar").read_bytes() == (self.of(other) / "model.upar").read_bytes()
        for key in ("before", "after", "gain", "steps", "weights", "phases"):
            assert self.result(out)[key] == self.result(other)[key], key


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    made = Place(tmp_path_factory.mktemp("dpo"))
    yield made
    made.server.stdin.close()
    made.server.wait(10)


@pytest.fixture(scope="session")
def straight(place: Place) -> str:
    assert place.run("dpo") == ""
    return "dpo"


@pytest.fixture(scope="session")
def reward(place: Place) -> str:
    assert place.run("reward", OBJECTIVE="reward") == ""
    return "reward"


@pytest.mark.parametrize("out", ["straight", "reward"])
def test_a_run_learns_and_says_so(place, request, out, float32):
    out = request.getfixturevalue(out)
    result, log = place.result(out), place.log(out)
    assert result["before"]["accuracy"][0] == 0 and result["before"]["loss"][0] == pytest.approx(math.log(2), abs=1e-6)
    share, low, high = result["after"]["accuracy"]
    assert 0.5 < low <= share <= high <= 1 and result["after"]["n"] == result["before"]["n"] >= 20
    assert [share, low, high] == D.wilson(share * result["after"]["n"], result["after"]["n"])
    assert result["after"]["loss"][2] < math.log(2) and result["gain"]["loss"][2] < 0
    assert result["after"]["n_of_different_lengths"] == 0
    assert "note: accuracy counts pairs whose chosen reward is greater, not equal" in log
    assert "identical chosen and rejected: 1 (the first is row " in log and "used 400 prompt/chosen/rejected" in log
    assert ("none, for OBJECTIVE=reward" if out == "reward" else "made in") in log
    steps = re.findall(r"^step:\d+/24 loss:(\S+) accuracy:(\S+) margin:(\S+) ", log, re.MULTILINE)
    assert len(steps) == 24 and float(steps[-1][1]) > 0.5
    assert {name: phase["steps"] > 0 for name, phase in result["phases"].items()} == dict.fromkeys(
        ("warmup", "warmdown", "ema", "swa", "qat"), True)
    assert set("script run_id seed commit code_sha256 tokenizer_sha256 settings hardware versions world_size steps "
               "train_seconds total_seconds peak_memory_mib params artifact artifact_sha256 artifact_bytes code_bytes "
               "total_bytes phases events before after gain weights data_sha256 objective".split()) <= set(result)


def test_the_file_alone_gives_the_scores(place, reward, straight, float32):
    """sample.py's reader and a forward row by row: the reward model's mean rewards, the policy's log-probabilities."""
    data = D.load_pairs(D.Settings(train_files=place.pairs), BYTES, 128, print)
    for out, kind in ((reward, True), (straight, False)):
        network, tokenizer, _ = P.load_model("ARTIFACT", str(place.of(out)))
        assert hasattr(network, "w_value") == kind and tokenizer.sha256 == BYTES.sha256
        with torch.no_grad():
            scores = torch.tensor([by_hand(network, pair, kind) for pair in data.held_out], dtype=torch.float64)
        after, names = place.result(out)["after"], ("chosen_reward", "rejected_reward") if kind else (
            "chosen_logp", "rejected_logp")
        assert [after[name][0] for name in names] == pytest.approx(scores.mean(0).tolist(), abs=1e-4)
        if kind:
            assert after["accuracy"][0] == (scores[:, 0] > scores[:, 1]).double().mean().item()


def test_a_second_run_reads_the_cache_and_is_the_same(place, straight):
    place.run(straight, RUN_ID="again")
    (place.folder / "again").mkdir()
    (place.of(straight).parent / "again").rename(place.of("again"))
    said = r"^reference: log-probabilities of 400 pairs read from .*/cache/reference_"
    assert re.search(said, place.log("again"), re.M)
    place.same("again", straight)


@pytest.mark.parametrize("step", [11, 22])  # before QAT, and in it
def test_a_resumed_run_is_the_same_to_the_byte(place, straight, step):
    out = f"resumed{step}"
    shutil.copytree(place.of(straight), place.of(out))
    for path in place.of(out).iterdir():
        later = not path.suffix and path.name > f"step_{step:06d}"
        if later or path.name in ("result.json", "model.upar", "progress.json"):
            path.unlink() if path.is_file() else shutil.rmtree(path)
    place.run(out, RESUME=place.of(out), **dict.fromkeys([*TINY, "TRAIN_FILES", "RUN_ID", "OUT_DIR"]))
    place.same(out, straight)


def test_a_replay_is_the_same_to_the_byte(place, straight):
    place.run("replayed", REPLAY=place.of(straight), **dict.fromkeys([*TINY, "TRAIN_FILES"]))
    assert (place.of("replayed") / "model.upar").read_bytes() == (place.of(straight) / "model.upar").read_bytes()


def test_two_ranks_do_what_one_does(place, straight):
    """To float32's last digits, in the first steps; later the two go apart, as sums in another order do."""
    place.run("ranks", ranks=2)
    one, two = (re.findall(r"^step:\d+/24 loss:(\S+) accuracy:(\S+) margin", place.log(out), re.M)
                for out in (straight, "ranks"))
    assert len(two) == 24
    for first, second in list(zip(one, two, strict=True))[1:6]:
        assert float(first[0]) == pytest.approx(float(second[0]), abs=2e-3)
    assert place.result("ranks")["world_size"] == 2 and place.result("ranks")["after"]["accuracy"][1] > 0.5


@pytest.mark.parametrize("changes", [
    dict(OBJECTIVE="reward", LORA_RANK="2", QAT="0", OPTIMIZER="adamw8bit", ACTIVATION_CHECKPOINTING="1"),
    dict(OBJECTIVE="ipo", LORA_RANK="2", QAT="0", REFERENCE="base"),
    dict(OBJECTIVE="robust", MICRO_BATCH_TOKENS="64", TRAIN_FILES=None, TASK="add", TRAIN_PAIRS="64",
         EVAL_PROMPTS="20")],
    ids=["reward", "ipo", "robust"])
def test_other_runs_end_well(place, changes):
    out = "other_" + changes["OBJECTIVE"]
    assert place.run(out, ITERATIONS=8, **changes) == ""
    result = place.result(out)
    assert result["steps"] == 8 and result["after"]["n"] >= 20 and result["objective"] == changes["OBJECTIVE"]
    assert math.isfinite(result["after"]["loss"][0])


def test_a_start_from_a_run_and_other_data_at_a_resume(place, straight):
    """A reward model starts from a policy's artifact, with a longer context; no checkpoint goes on with other rows."""
    assert place.run("onward", OBJECTIVE="reward", INIT_FROM=place.of(straight), ITERATIONS=8, TRAIN_SEQ_LEN=200) == ""
    assert P.load_model("ARTIFACT", str(place.of("onward")))[0].config.train_seq_len == 200
    assert f"policy: {place.of(straight) / 'model.upar'}" in place.log("onward")
    shutil.copytree(place.of(straight), place.of("changed"))
    (place.of("changed") / "result.json").unlink()
    few = write_rows(place.folder / "few.jsonl", [
        {"prompt": f"p{at}", "chosen": "x", "rejected": "y"} for at in range(90)])
    names = dict.fromkeys([*TINY, "TRAIN_FILES", "RUN_ID", "OUT_DIR"])
    err = place.run("changed", 2, RESUME=place.of("changed"), **{**names, "TRAIN_FILES": few})
    assert re.fullmatch(r"error: DATA_SHA256='\w+': must stay '\w+' under RESUME\n", err), err
    err = place.run("changed", 2, RESUME=place.of("changed"), **{**names, "TRAIN_FILES": f"{place.pairs}:0.5"})
    assert re.fullmatch(r"error: TRAIN_FILES='.*:0.5': must stay '.*' under RESUME\n", err), err


# ------------------------------------------------------------------------------------------------------------ the guide
GUIDE = ROOT / "docs" / "dpo.md"


@pytest.mark.full
def test_every_command_of_the_guide(tmp_path):
    """As they stand there, one after the other in one folder, by bash; settings from the environment make them tiny."""
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    for name, module in (("python", ""), ("torchrun", "-m torch.distributed.run")):
        (bin_ / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
        (bin_ / name).chmod(0o755)
    for name in ("train_dpo.py", "sample.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name, count in (("pairs.jsonl", 80), ("more.jsonl", 40), ("held_out.jsonl", 20)):
        rows = [{"prompt": f"{name[0]}{at}", "chosen": "x", "rejected": "yy"} for at in range(count)]
        write_rows(tmp_path / name, rows)
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    tiny = {name: value for name, value in TINY.items() if name not in ("LEARNING_RATE", "PAIRS_PER_STEP")}
    environ = {**kept, **tiny, "ITERATIONS": "8", "TRAIN_PAIRS": "64", "EVAL_PROMPTS": "16", "OMP_NUM_THREADS": "1",
               "PATH": f"{bin_}:{os.environ['PATH']}"}
    commands = [line for block in re.findall(r"^```bash\n(.*?)^```", GUIDE.read_text(encoding="utf-8"), re.M | re.S)
                for line in block.replace("\\\n", " ").splitlines()]
    assert len(commands) >= 6
    for command in commands:
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", command], cwd=tmp_path, env=environ, text=True,
                              capture_output=True, timeout=300)
        assert done.returncode == 0, f"{command}: {done.stdout[-500:]} {done.stderr[-1500:]}"
    assert len([*tmp_path.glob("runs/*/result.json")]) == len(commands)
    [program] = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(encoding="utf-8"), re.M | re.S)
    own = {**environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=own, text=True,
                          capture_output=True, timeout=100)
    assert re.fullmatch(r"(123(57|75) -?[\d.e-]+\n){2}", done.stdout), done.stdout + done.stderr
