"""Preference learning: objectives against hand-worked values, pairs and their scores, the reference's cache, runs."""

from __future__ import annotations

import functools
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
from torch import nn

import sample as P
import train_dpo as D
from conftest import KEPT

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


def settings(**changes) -> D.Settings:
    own = dict(beta=0.1, layer_pattern="g a", model_dim=16, num_heads=2, qat=False)
    return D.Settings(**{**own, **changes})


def pair_of(lengths: tuple[int, int], margin: float = 0.0) -> D.Pair:
    return D.Pair(0, torch.ones(1), *(torch.ones(length) for length in lengths), margin)


def losses(
    objective: str,
    scores=SCORES,
    reference=FACTS["reference"],
    lengths=FACTS["lengths"],
    margin=FACTS["margin"],
    **changes,
) -> tuple[torch.Tensor, torch.Tensor]:
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
    own = dict(
        cdpo=dict(label_smoothing=0.2), robust=dict(label_smoothing=0.2), reward=dict(centering=0.3)
    )

    def loss(scores: torch.Tensor) -> torch.Tensor:
        return losses(
            objective, scores, reference, lengths, [0.3] * 7, beta=beta, **own.get(objective, {})
        )[0]

    [slopes] = torch.autograd.grad(loss(scores).sum(), scores)
    for at in np.ndindex(7, 2):
        ends = []
        for step in (1e-6, -1e-6):
            moved = scores.detach().clone()
            moved[at] += step
            ends.append(loss(moved)[at[0]])
        assert abs((ends[0] - ends[1]) / 2e-6 - slopes[at]) < 1e-7
    if (
        objective != "reward"
    ):  # a common shift of both log-ratios is free, but where lengths divide them
        assert objective == "ipo" or slopes.sum(1).abs().max() < 1e-15


def test_at_the_start_rewards_are_0_and_losses_say_so():
    """Strictly greater: accuracy 0, not 0.5, where policy and reference are one."""
    scores, pairs = torch.tensor(SCORES), [pair_of(lengths) for lengths in FACTS["lengths"]]
    for objective, value in (
        ("dpo", math.log(2)),
        ("cdpo", math.log(2)),
        ("robust", math.log(2)),
        ("ipo", 25.0),
    ):
        metrics = D.pair_metrics(scores, scores, pairs, settings(objective=objective))
        assert metrics["loss"].tolist() == pytest.approx([value] * 2, abs=1e-12)
        assert not metrics["chosen_reward"].any() and not metrics["rejected_reward"].any()
        found = D.pair_summary(metrics)
        assert found["accuracy"][0] == found["margin"][0] == found["longer_preferred"][0] == 0
        assert found["likelier"][0] == 0.5 and found["longer_chosen"][0] == 1.0


def test_smoothing_of_0_is_dpo():
    for objective in ("cdpo", "robust"):
        assert losses(objective, label_smoothing=0.0)[0].tolist() == pytest.approx(DPO, abs=1e-11)


@pytest.mark.parametrize("e", [0.05, 0.2, 0.45])
def test_robust_is_unbiased_under_flips_and_cdpo_is_their_expectation(e):
    """Each pair is the wrong way round with probability e: the expectation of the robust loss is DPO's on the truth."""

    def flipped(objective: str, **changes) -> torch.Tensor:
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
    """Newcombe 1998: 81 of 263 is 0.2553 to 0.3662, 1 of 29 is 0.0061 to 0.1718; ends solve |p - share| = 1.96 sd."""
    assert D.wilson(81, 263) == pytest.approx([81 / 263, 0.2553, 0.3662], abs=5e-5)
    assert D.wilson(1, 29) == pytest.approx([1 / 29, 0.0061, 0.1718], abs=5e-5)
    assert D.wilson(0, 0) == [0.0, 0.0, 1.0] and D.wilson(0, 9)[1] == pytest.approx(0, abs=1e-15)
    share, *ends = D.wilson(7, 20)
    for end in ends:
        assert (end - share) ** 2 == pytest.approx(1.96**2 * end * (1 - end) / 20, abs=1e-12)


# ------------------------------------------------------------------------------------------------- rows become pairs
def parse(row: dict) -> tuple[str, D.Pair]:
    return D.parse_pair(row, BYTES, settings(train_seq_len=64))


def test_the_ids_of_a_pair():
    kind, pair = parse({"prompt": "ab", "chosen": "c", "rejected": "de"})
    assert kind == "prompt/chosen/rejected" and pair.margin == 0.0
    assert pair.prompt.tolist() == [1, USER, 101, 102, END, ASSISTANT]  # a byte's id is 4 more
    assert [pair.chosen.tolist(), pair.rejected.tolist()] == [[103, END], [104, 105, END]]
    messages = [("system", "s"), ("user", "u"), ("assistant", "v"), ("user", "w")]
    listed = [{"role": role, "content": text} for role, text in messages]
    _, pair = parse(
        {
            "prompt": listed,
            "chosen": "x",
            "rejected": [{"role": "assistant", "content": "y"}],
            "margin": 2,
        }
    )
    assert pair.prompt.tolist() == [
        1,
        260,
        119,
        END,
        USER,
        121,
        END,
        ASSISTANT,
        122,
        END,
        USER,
        123,
        END,
        ASSISTANT,
    ]
    assert [pair.chosen.tolist(), pair.rejected.tolist()] == [
        [124, END],
        [125, END],
    ] and pair.margin == 2.0
    whole = {
        "chosen": [
            *listed,
            {"role": "assistant", "content": "x"},
        ],  # two whole conversations, with the same key
        "rejected": [*listed, {"role": "assistant", "content": "y"}],
    }
    for row in (whole, {"prompt": listed, **whole}):
        again = parse(row)[1]
        assert again.prompt.tolist() == pair.prompt.tolist() and again.key == pair.key
        assert again.chosen.tolist() == [124, END]


GOOD = {"prompt": "ab", "chosen": "c", "rejected": "d"}
BAD = {  # what the log calls it -> a row, or a line
    "missing field 'rejected'": {"prompt": "ab", "chosen": "c"},
    "missing field 'prompt'": {"chosen": "c", "rejected": "d"},
    "empty answer": {**GOOD, "rejected": " \n"},
    "identical chosen and rejected": {**GOOD, "rejected": "c"},
    "unknown role 'narrator'": {**GOOD, "prompt": [{"role": "narrator", "content": "x"}]},
    "more than TRAIN_SEQ_LEN=64 tokens": {**GOOD, "rejected": "d" * 200},
    "field 'margin' is no number": {**GOOD, "margin": "1"},
    "chosen or rejected does not end with the assistant's turn": {
        **GOOD,
        "chosen": [{"role": "user", "content": "x"}],
    },
    "chosen and rejected differ before their last turn": {
        side: [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
        for side, text in (("chosen", "c"), ("rejected", "d"))
    },
    "field 'chosen' is no text": {**GOOD, "chosen": 3},
    "half a surrogate pair, which is no Unicode": {**GOOD, "chosen": "\ud800"},
    "invalid UTF-8": b'{"prompt": "\xff", "chosen": "c", "rejected": "d"}',
    "no JSON": b"{",
    "no JSON object": b"[1]",
}


def write_rows(path: Path, rows: list) -> str:
    lines = b"".join(
        (row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows
    )
    path.write_bytes(zstandard.compress(lines) if path.suffix == ".zst" else lines)
    return str(path)


def load(**changes) -> tuple[D.Examples, list[str]]:
    s, said = settings(**{"train_seq_len": 64, **changes}), []
    parse = functools.partial(D.parse_pair, tokenizer=BYTES, settings=s)
    return D.read_examples(s, parse, D.right_and_wrong, s.train_pairs, said.append), said


@pytest.mark.parametrize("name", ["pairs.jsonl", "pairs.jsonl.zst"])
def test_each_malformed_row_is_counted_and_named(tmp_path, name):
    rows = [{"prompt": f"p{at}", "chosen": "c", "rejected": "d"} for at in range(60)]
    path = write_rows(tmp_path / name, [*BAD.values(), *BAD.values(), *rows])
    data, said = load(train_files=path)
    assert len({*data.train, *data.choice, *data.held_out}) == 60
    for at, kind in enumerate(BAD, 1):
        assert f"{kind}: 2 (the first is row {at})" in said[0], kind
    assert f"{60 + 2 * len(BAD)} rows, used 60 prompt/chosen/rejected" in said[0]


def test_a_file_without_a_usable_row_is_an_error(tmp_path):
    path = write_rows(tmp_path / "pairs.jsonl", [*BAD.values()])
    with pytest.raises(
        D.UserError, match="pairs.jsonl: 14 rows, used none.*must hold one usable row at least"
    ):
        load(train_files=path)
    with pytest.raises(
        D.UserError,
        match="^TASK=sort: 8 rows, used none; left out more than TRAIN_SEQ_LEN=10 .*: 8 ",
    ):
        load(train_pairs=8, train_seq_len=10)
    one = write_rows(tmp_path / "one.jsonl", [GOOD])
    with pytest.raises(
        D.UserError, match="^VAL_FILES='': 0 rows held out, 1 of other prompts to train on; must be"
    ):
        load(train_files=one)


def text_of(ids: torch.Tensor) -> str:
    return bytes(i - 4 for i in ids.tolist() if 4 <= i < 260).decode()


@pytest.mark.parametrize("name", ["sort", "reverse", "add", "countdown", "zebra"])
def test_synthetic_pairs_are_right_and_wrong_and_length_tells_little(name):
    data, _ = load(task=name, train_pairs=300, eval_prompts=100, train_seq_len=256)
    task = D.make_task(name, "", 1337)
    problems = [task.problem(D.DEMONSTRATION + at, False) for at in range(300)] + task.held_out(100)
    problems = {problem.prompt: problem for problem in problems}
    pairs = [*data.train, *data.choice]
    assert len({*pairs}) == 300 and len(data.held_out) == 100
    longer = [0, 0]
    for pair in (*pairs, *data.held_out):
        problem = problems[text_of(pair.prompt)]
        right, wrong = text_of(pair.chosen), text_of(pair.rejected)
        assert (
            task.reward(problem, right) == 1 and task.reward(problem, wrong) == 0 and wrong.strip()
        )
        assert abs(len(right) - len(wrong)) <= 1
        for side in (0, 1):
            longer[side] += len((right, wrong)[side]) > len((right, wrong)[1 - side])
    assert 0.35 < longer[0] / sum(longer) < 0.65 and sum(longer) > 70


def test_slips_of_short_and_foreign_answers():
    for answer, kinds in (
        ("x", "letter"),
        ("é", "letter"),
        ("7", "digit"),
        ("A", "letter"),
        ("aa", "letter"),
    ):
        task = [D.Task("jsonl", seed, ([], [])) for seed in range(300)]
        slips = {D.right_and_wrong(own, D.Problem("p", answer))["rejected"] for own in task}
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

    def ids(low: int, high: int) -> list[int]:
        return [rng.randrange(4, 260) for _ in range(rng.randint(low, high))]

    return [
        D.Pair(
            rng.getrandbits(60),
            *map(torch.tensor, ([1, *ids(1, 6)], ids(1, 9), ids(1, 9))),
            rng.random(),
        )
        for _ in range(count)
    ]


def by_hand(network: nn.Module, pair: D.Pair, reward: bool) -> list[float]:
    """Scores of one pair, row by row without padding, token by token."""
    found = []
    for answer in (pair.chosen, pair.rejected):
        ids = torch.cat([pair.prompt, answer])[None]
        x = network.features(ids)[0].detach()
        logps = network.logits(x).detach().log_softmax(-1)
        begin = len(pair.prompt)
        found.append(
            float(x[-1] @ network.w_value.detach())
            if reward
            else sum(float(logps[at - 1, ids[0, at]]) for at in range(begin, ids.size(1)))
        )
    return found


@pytest.mark.parametrize("reward", [False, True], ids=["policy", "reward"])
def test_scores_take_the_whole_answer_and_the_value_its_last_token(reward):
    """Whatever stands beside a row: from its first token, which the prompt's last place predicts, to its end token."""
    network, pairs = Table(), pairs_of(0, 17)
    for numbers in ([3], [5, 1, 8], range(17)):
        batch = D.pair_batch(pairs, numbers, CPU)
        n = len(numbers)
        scores = D.pair_scores(network, batch, reward)
        assert (
            scores.shape == (n, 2) and scores.dtype == torch.float64 and batch.numbers == [*numbers]
        )
        for found, number in zip(scores, numbers, strict=True):
            assert found.tolist() == pytest.approx(
                by_hand(network, pairs[number], reward), abs=1e-11
            )
        # Wider, and with other ids in the padding.
        last = batch.mask.long().cumsum(1).argmax(1)[:, None] + 1
        batch.ids = torch.where(torch.arange(batch.ids.size(1)) > last, 77, batch.ids)
        batch.ids, batch.targets = (
            F.pad(batch.ids, (0, 5), value=77),
            F.pad(batch.targets, (0, 5), value=-1),
        )
        batch.mask = batch.targets >= 0
        assert (D.pair_scores(network, batch, reward) - scores).abs().max() < 1e-11


def test_each_token_of_the_answer_has_its_gradient():
    """Of log-probabilities by the features: at the place before each answer token, the end token's too, no other."""
    network, [pair] = Table(), pairs_of(3, 1)
    batch = D.pair_batch([pair], [0], CPU)
    places = torch.zeros(*batch.ids.shape, 8, requires_grad=True)
    features = network.features
    network.features = lambda ids: features(ids) + places
    D.pair_scores(network, batch, False).sum().backward()
    for row, answer in enumerate((pair.chosen, pair.rejected)):
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
    references, found, whole = (
        torch.randn(12, 2, generator=torch.Generator().manual_seed(2)).double(),
        {},
        {},
    )
    for name, ranks, tokens in (
        ("one", 1, 10**6),
        ("micro", 1, 600),
        ("single", 1, 1),
        ("ranks", 2, 10**6),
    ):
        s, grads = settings(objective=objective, micro_batch_tokens=tokens), []
        for rank in range(ranks):
            trainer = D.DPOTrainer(network_of(reward), s, D.Runtime(rank, ranks, CPU, False))
            metrics = trainer.forward_backward(pairs, references)
            grads.append([param.grad.clone() for param in trainer.params])
        found[name] = [sum(each) for each in zip(*grads, strict=True)]
        whole = whole or metrics
        for key in metrics if ranks == 1 else ():
            assert (metrics[key].double() - whole[key].double()).abs().max() < 1e-11, key
    network, total = network_of(reward), 0.0
    for at, pair in enumerate(pairs):
        scores = []
        for answer in (pair.chosen, pair.rejected):
            ids = torch.cat([pair.prompt, answer])[None]
            if reward:
                scores.append(network.features(ids)[0, -1] @ network.w_value)
            else:
                targets = ids[:, 1:].clone()
                targets[:, : len(pair.prompt) - 1] = -1
                scores.append(-network(ids[:, :-1], targets).sum())
        loss, _ = D.pair_losses(
            torch.stack(scores)[None], references[at][None], [pair], settings(objective=objective)
        )
        total = total + loss[0] / 12
        assert whole["loss"][at].item() == pytest.approx(loss.item(), abs=1e-10)
    params = [param for param in network.parameters() if param.requires_grad]
    slopes = torch.autograd.grad(total, params, allow_unused=True)
    expected = [
        torch.zeros_like(p) if slope is None else slope
        for p, slope in zip(params, slopes, strict=True)
    ]
    assert max(slope.abs().max() for slope in expected) > 1e-3
    for name, grads in found.items():
        worst = max((one - other).abs().max() for one, other in zip(grads, expected, strict=True))
        assert worst < 1e-10, name


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (dict(beta=0.0), "BETA=0: must be above"),
        (dict(reference="base"), "REFERENCE='base': needs LORA_RANK"),
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
        (dict(beta=-1.0), "BETA=-1.0: must be"),
        (dict(pairs_per_step=0), "PAIRS_PER_STEP=0: must be"),
    ],
)
def test_wrong_settings_are_refused(changes, said):
    """In a program as in the environment."""
    environ = {name.upper(): str(value) for name, value in changes.items()}
    for make in (lambda: D.Settings(**changes), lambda: D.load_settings(D.Settings, environ)):
        with pytest.raises(D.UserError, match=f"^{re.escape(said)}"):
            make()


# ------------------------------------------------------------------------------------------------ the reference's cache
def reference_of(
    network: D.GPT, pairs: list[D.Pair], folder: Path, data: str = "data", **changes
) -> tuple:
    """The reference's scores, and what the log says of them."""
    s, said = settings(**changes), []
    run = SimpleNamespace(settings=s, runtime=ALONE, folder=folder / "run", log=said.append)
    return D.reference_scores(D.DPOTrainer(network, s, ALONE), [pairs], data, run), said[0]


def test_the_cache_is_read_for_the_same_weights_and_data_alone(tmp_path):
    pairs = pairs_of(4, 9)
    made, said = reference_of(network_of(), pairs, tmp_path)
    assert "made" in said and len([*tmp_path.rglob("*.npy")]) == 1
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
        and len([*tmp_path.rglob("*.npy")]) == 3
    )


def test_a_changed_row_changes_the_hash_of_the_data(tmp_path):
    rows = [{"prompt": f"p{at}", "chosen": "c", "rejected": "d"} for at in range(40)]
    found = set()
    for change in ({}, {"chosen": "e"}, {"rejected": "e"}, {"prompt": "q"}, {"margin": 0.5}):
        path = write_rows(tmp_path / "pairs.jsonl", [{**rows[0], **change}, *rows[1:]])
        found.add(load(train_files=path)[0].sha256)
    assert len(found) == 5


def test_the_base_is_the_reference_without_adapters(tmp_path):
    """Adapters with a B that is not 0: the start is the policy with them, the base is without."""
    network, pairs = network_of(lora_rank=2), pairs_of(5, 6)
    start, base = (
        reference_of(network, pairs, tmp_path, lora_rank=2, reference=name)[0]
        for name in ("start", "base")
    )
    trainer = D.DPOTrainer(network, settings(lora_rank=2), ALONE)
    assert torch.equal(start, trainer.score(pairs)) and (start - base).abs().max() > 1e-3
    with torch.no_grad():
        for name, param in network.named_parameters():
            if name.endswith("lora_b"):
                param.zero_()
    assert (trainer.score(pairs) - base).abs().max() < 1e-10


# ---------------------------------------------------------------------------------------------- the head in an artifact
def test_a_reward_head_survives_packing(float32, tmp_path):
    """In 16 bits: to 2^-11 of each weight; and two readers of the file give the same rewards."""
    network, pairs = network_of(reward=True), pairs_of(6, 8)
    state = network.state_dict()
    packed = D.pack_artifact(
        state,
        D.quantize_all(state, D.quant_table(D.Settings())),
        settings=vars(network.config),
        tokenizer_sha256=BYTES.sha256,
        meta={"seed": 1, "tokenizer": "bytes"},
    )
    (tmp_path / "model.upar").write_bytes(packed)
    loaded = [M.load_model("INIT_FROM", str(tmp_path))[0] for M in (D, P)]
    for one in loaded:
        assert torch.equal(one.w_value, network.w_value.half().float()) and one.w_value.shape == (
            16,
        )
    assert (
        (loaded[0].w_value - network.w_value).abs() <= network.w_value.abs() * 2**-11 + 2**-25
    ).all()
    batch = D.pair_batch(pairs, range(8), CPU)
    with torch.no_grad(), D.quantized(network, D.quant_table(D.Settings())):
        expected = D.pair_scores(network, batch, True)
    with torch.no_grad():
        scores = [D.pair_scores(one, batch, True) for one in loaded]
    assert torch.equal(*scores) and expected.std() > 0.05
    assert (scores[0] - expected).abs().max() < 2e-3 * expected.abs().max()


# ---------------------------------------------------------------------------------------------------- whole runs, tiny
TINY = {
    "DEVICE": "cpu",
    "LAYER_PATTERN": "g a",
    "MODEL_DIM": "32",
    "NUM_HEADS": "2",
    "SFT_STEPS": "20",
    "PAIRS_PER_STEP": "16",
    "ITERATIONS": "24",
    "MAX_WALLCLOCK_SECONDS": "0",
    "RESERVE_SECONDS": "0",
    "SAVE_EVERY": "11",
    "LEARNING_RATE": "0.01",
}
# Forks a process, or some ranks, for each line of its input: to import torch takes longer than a run.
SERVER = """
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
"""


class Place:
    """A folder with pairs whose truth is known, and the runs of the tests, each in <out>/run of it."""

    def __init__(self, folder: Path):
        self.folder, letters = folder, "abcdefghijklmnopqrst"
        rows = [
            {"prompt": a + b, "chosen": "xy"[a >= "k"], "rejected": "yx"[a >= "k"]}
            for a in letters
            for b in letters
        ]
        self.pairs = write_rows(folder / "pairs.jsonl", [*rows, *BAD.values()])
        self.server = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(ROOT)],
            env=self.environment(),
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

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
        each = [
            {**environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            for rank in range(ranks)
        ]
        paths = {name: str(self.folder / f"{out}.{name}") for name in ("out", "err")}
        for path in paths.values():
            Path(path).unlink(missing_ok=True)
        self.server.stdin.write(
            json.dumps({"ranks": each if ranks > 1 else [environ], **paths}) + "\n"
        )
        self.server.stdin.flush()
        codes = json.loads(self.server.stdout.readline())
        err = Path(paths["err"]).read_text()
        assert codes == [code] * ranks and "Traceback" not in err, err[-3000:]
        return err

    def of(self, out: str) -> Path:
        return self.folder / out / "run"

    def log(self, out: str) -> str:
        return (
            (self.of(out) / "log.txt").read_text(encoding="utf-8").rpartition("=" * 120 + "\n")[2]
        )

    def result(self, out: str) -> dict:
        return json.loads((self.of(out) / "result.json").read_text())

    def same(self, out: str, other: str) -> None:
        assert (self.of(out) / "model.upar").read_bytes() == (
            self.of(other) / "model.upar"
        ).read_bytes()
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
    assert result["before"]["accuracy"][0] == 0 and result["before"]["loss"][0] == pytest.approx(
        math.log(2), abs=1e-6
    )
    share, low, high = result["after"]["accuracy"]
    assert 0.5 < low <= share <= high <= 1 and result["after"]["n"] == result["before"]["n"] >= 20
    assert [share, low, high] == D.wilson(share * result["after"]["n"], result["after"]["n"])
    assert result["after"]["loss"][2] < math.log(2) and result["gain"]["loss"][2] < 0
    assert result["after"]["n_of_different_lengths"] == 0
    assert "note: accuracy counts pairs whose chosen reward is greater, not equal" in log
    assert (
        "identical chosen and rejected: 1 (the first is row " in log
        and "used 400 prompt/chosen/rejected" in log
    )
    assert ("log-probabilities made and stored in " in log) == (out != "reward")
    steps = re.findall(r"^step:\d+/24 loss:(\S+) accuracy:(\S+) margin:(\S+) ", log, re.MULTILINE)
    assert len(steps) == 24 and float(steps[-1][1]) > 0.5
    assert {name: phase["steps"] > 0 for name, phase in result["phases"].items()} == dict.fromkeys(
        ("warmup", "warmdown", "ema", "swa", "qat"), True
    )
    assert set(
        "script run_id seed commit code_sha256 tokenizer_sha256 settings hardware versions world_size steps "
        "train_seconds total_seconds peak_memory_mib params artifact artifact_sha256 artifact_bytes code_bytes "
        "total_bytes phases events before after gain weights data_sha256 objective".split()
    ) <= set(result)


def test_the_file_alone_gives_the_scores(place, reward, straight, float32):
    """sample.py's reader and a forward row by row: the reward model's mean rewards, the policy's log-probabilities."""
    data, _ = load(train_files=place.pairs, train_seq_len=128)
    for out, kind in ((reward, True), (straight, False)):
        network, tokenizer, _ = P.load_model("ARTIFACT", str(place.of(out)))
        assert hasattr(network, "w_value") == kind and tokenizer.sha256 == BYTES.sha256
        with torch.no_grad():
            scores = torch.tensor(
                [by_hand(network, pair, kind) for pair in data.held_out], dtype=torch.float64
            )
        after, names = (
            place.result(out)["after"],
            ("chosen_reward", "rejected_reward") if kind else ("chosen_logp", "rejected_logp"),
        )
        assert [after[name][0] for name in names] == pytest.approx(
            scores.mean(0).tolist(), abs=1e-4
        )
        if kind:
            assert after["accuracy"][0] == (scores[:, 0] > scores[:, 1]).double().mean().item()


def test_a_second_run_reads_the_cache_and_is_the_same(place, straight):
    place.run(straight, RUN_ID="again")
    (place.folder / "again").mkdir()
    (place.of(straight).parent / "again").rename(place.of("again"))
    said = r"^reference: log-probabilities read from .*/cache/reference_"
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
    place.run(
        out, RESUME=place.of(out), **dict.fromkeys([*TINY, "TRAIN_FILES", "RUN_ID", "OUT_DIR"])
    )
    place.same(out, straight)


def test_a_replay_is_the_same_to_the_byte(place, straight):
    place.run("replayed", REPLAY=place.of(straight), **dict.fromkeys([*TINY, "TRAIN_FILES"]))
    assert (place.of("replayed") / "model.upar").read_bytes() == (
        place.of(straight) / "model.upar"
    ).read_bytes()


def test_two_ranks_do_what_one_does(place, straight):
    """To float32's last digits, in the first steps; later the two go apart, as sums in another order do."""
    place.run("ranks", ranks=2)
    one, two = (
        re.findall(r"^step:\d+/24 loss:(\S+) accuracy:(\S+) margin", place.log(out), re.M)
        for out in (straight, "ranks")
    )
    assert len(two) == 24
    for first, second in list(zip(one, two, strict=True))[1:6]:
        assert float(first[0]) == pytest.approx(float(second[0]), abs=2e-3)
    assert (
        place.result("ranks")["world_size"] == 2
        and place.result("ranks")["after"]["accuracy"][1] > 0.5
    )


@pytest.mark.parametrize(
    "changes",
    [
        dict(
            OBJECTIVE="reward",
            LORA_RANK="2",
            QAT="0",
            OPTIMIZER="adamw8bit",
            ACTIVATION_CHECKPOINTING="1",
        ),
        dict(OBJECTIVE="ipo", LORA_RANK="2", QAT="0", REFERENCE="base"),
        dict(
            OBJECTIVE="robust",
            MICRO_BATCH_TOKENS="64",
            TRAIN_FILES=None,
            TASK="add",
            TRAIN_PAIRS="64",
            EVAL_PROMPTS="20",
        ),
    ],
    ids=["reward", "ipo", "robust"],
)
def test_other_runs_end_well(place, changes):
    out = "other_" + changes["OBJECTIVE"]
    assert place.run(out, ITERATIONS=8, **changes) == ""
    result = place.result(out)
    assert (
        result["steps"] == 8
        and result["after"]["n"] >= 20
        and result["objective"] == changes["OBJECTIVE"]
    )
    assert math.isfinite(result["after"]["loss"][0])


def test_a_start_from_a_run_and_other_data_at_a_resume(place, straight):
    """A reward model starts from a policy's artifact, with a longer context; no checkpoint goes on with other rows."""
    assert (
        place.run(
            "onward",
            OBJECTIVE="reward",
            INIT_FROM=place.of(straight),
            ITERATIONS=8,
            TRAIN_SEQ_LEN=200,
        )
        == ""
    )
    assert P.load_model("ARTIFACT", str(place.of("onward")))[0].config.train_seq_len == 200
    assert f"policy: {place.of(straight) / 'model.upar'}" in place.log("onward")
    shutil.copytree(place.of(straight), place.of("changed"))
    (place.of("changed") / "result.json").unlink()
    few = write_rows(
        place.folder / "few.jsonl",
        [{"prompt": f"p{at}", "chosen": "x", "rejected": "y"} for at in range(90)],
    )
    names = dict.fromkeys([*TINY, "TRAIN_FILES", "RUN_ID", "OUT_DIR"])
    err = place.run("changed", 2, RESUME=place.of("changed"), **{**names, "TRAIN_FILES": few})
    assert re.fullmatch(r"error: DATA_SHA256='\w+': must stay '\w+' under RESUME\n", err), err
    err = place.run(
        "changed", 2, RESUME=place.of("changed"), **{**names, "TRAIN_FILES": f"{place.pairs}:0.5"}
    )
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
        rows = [
            {"prompt": f"{name[0]}{at}", "chosen": "x", "rejected": "yy"} for at in range(count)
        ]
        write_rows(tmp_path / name, rows)
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    tiny = {
        name: value
        for name, value in TINY.items()
        if name not in ("LEARNING_RATE", "PAIRS_PER_STEP")
    }
    environ = {
        **kept,
        **tiny,
        "ITERATIONS": "8",
        "TRAIN_PAIRS": "64",
        "EVAL_PROMPTS": "16",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{bin_}:{os.environ['PATH']}",
    }
    commands = [
        line
        for block in re.findall(
            r"^```bash\n(.*?)^```", GUIDE.read_text(encoding="utf-8"), re.M | re.S
        )
        for line in block.replace("\\\n", " ").splitlines()
    ]
    assert len(commands) >= 6
    for command in commands:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=tmp_path,
            env=environ,
            text=True,
            capture_output=True,
            timeout=300,
        )
        assert done.returncode == 0, f"{command}: {done.stdout[-500:]} {done.stderr[-1500:]}"
    assert len([*tmp_path.glob("runs/*/result.json")]) == len(commands)
    [program] = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(encoding="utf-8"), re.M | re.S)
    own = {**environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=own,
        text=True,
        capture_output=True,
        timeout=100,
    )
    assert re.fullmatch(r"(123(57|75) -?[\d.e-]+\n){2}", done.stdout), done.stdout + done.stderr
