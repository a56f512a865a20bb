"""GRPO and GSPO: objectives against closed forms, rows and their log-probabilities, updates of a trainer, its faults.

Everything here is float64 with an independent reference, except where ranks and generation are the subject.
"""

import copy
import dataclasses
import functools
import itertools
import math
import random
import re
import statistics
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import train_grpo as G
import train_gspo as S
from conftest import add_noise, refusal

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")
ALONE = G.Runtime(0, 1, CPU, False)
BYTES = G.load_tokenizer("bytes")
END, ASSISTANT = 263, 262  # the token that ends an answer, and the last one of each prompt
TRAINERS = {G: G.GRPOTrainer, S: S.GSPOTrainer}
each_script = pytest.mark.parametrize("M", [G, S], ids=["grpo", "gspo"])
pytestmark = pytest.mark.usefixtures("one_thread", "default_dtype")


# ------------------------------------------------------------------------------------------- objectives: a second form
LENGTHS = (
    5,
    3,
    1,
    6,
    6,
    2,
    4,
    3,
)  # of 2 prompts x 4 samples; MAX_NEW_TOKENS=6 cut the fourth and the fifth
REWARDS = ((1.0, 0.0, 0.5, 0.0), (0.25, 1.0, 1.0, -1.0))
BAND = dict(
    left_clip_range=0.05, right_clip_range=0.08
)  # some of everything: inside, outside, active or not


def advantages_of(rewards, scale):
    everything = [r for group in rewards for r in group]
    found = []
    for group in rewards:
        over = {
            "group": statistics.stdev(group) + 1e-4,
            "batch": statistics.stdev(everything) + 1e-4,
            "none": 1.0,
        }
        found += [(r - statistics.mean(group)) / over[scale] for r in group]
    return found


def case(seed=0, spread=0.15):
    """Ragged log-probabilities of the 8 samples: now, old, of the reference and of the sampler; and advantages."""
    rng = random.Random(seed)
    old = [[-rng.uniform(0.1, 4) for _ in range(length)] for length in LENGTHS]
    near = {
        name: [[value + rng.gauss(0, size) for value in row] for row in old]
        for name, size in (("logps", spread), ("reference", 0.5), ("sampled", 0.01))
    }
    return SimpleNamespace(old=old, advantages=advantages_of(REWARDS, "group"), **near)


def padded(rows, width, pad):
    return torch.tensor([row + [pad] * (width - len(row)) for row in rows])


def tensors_of(rows, width=6, pad=0.0, reference=True):
    """What policy_loss wants, of `case`."""
    mask = padded([[1.0] * len(row) for row in rows.old], width, 0.0) > 0
    old, ref, sampled, logps = (
        padded(getattr(rows, name), width, pad) for name in ("old", "reference", "sampled", "logps")
    )
    return SimpleNamespace(
        mask=mask,
        advantages=torch.tensor(rows.advantages)[:, None],
        old=old,
        sampled=sampled,
        reference=ref if reference else None,
        logps=logps.requires_grad_(),
    )


def written_out(rows, settings, token_ratio):
    """Loss, its derivative by each log-probability, and the five sums, in loops over Python's floats."""
    low, high = 1 - settings.left_clip_range, 1 + settings.right_clip_range
    limit, kind = (
        getattr(settings, "ratio_limit", 0) or math.inf,
        getattr(settings, "reduction", "sequence"),
    )
    loss, slopes, sums, samples = 0.0, [], [0.0] * 5, len(rows.old)
    for now, old, ref, sampled, A in zip(
        rows.logps, rows.old, rows.reference, rows.sampled, rows.advantages, strict=True
    ):
        length, delta = len(now), [p - q for p, q in zip(now, old, strict=True)]
        weight = {
            "sequence": 1 / samples / length,
            "dapo": 1 / sum(LENGTHS),
            "bnpo": 1 / sum(LENGTHS),
            "dr_grpo": 1 / samples / settings.max_new_tokens,
        }[kind]
        slopes.append([])
        for at in range(length):
            r = math.exp(delta[at]) if token_ratio else math.exp(sum(delta) / length)
            away = ref[at] - now[at]
            kl = math.exp(away) - away - 1
            loss += weight * (
                -min(min(r, limit) * A, max(low, min(high, r)) * A) + settings.kl_beta * kl
            )
            stopped = r > high if A > 0 else r < low or r > limit
            slopes[-1].append(
                weight * ((0 if stopped else -A * r) + settings.kl_beta * (1 - math.exp(away)))
            )
            for name, value in enumerate(
                (stopped, not low <= r <= high, abs(delta[at]), kl, abs(old[at] - sampled[at]))
            ):
                sums[name] += value
    return loss, slopes, sums


def weights_of(M, mask, total, settings, ranks):
    """The weights of tokens; those of GSPO depend on the number of samples alone."""
    if M is S:
        return M.token_weights(mask, total[0])
    return M.token_weights(mask, total, settings, ranks)


def measured(M, batch, settings, total=None):
    """The script's loss, its gradient, and the five sums."""
    if total is None:
        total = torch.tensor([len(batch.mask), int(batch.mask.sum()), int(batch.mask.sum())])
    losses, parts = M.policy_loss(batch.logps, batch, settings)
    weights = weights_of(M, batch.mask, total, settings, 1)
    loss = (losses * weights).sum()
    [slopes] = torch.autograd.grad(loss, batch.logps)
    assert [*parts] == [*M.METRICS[3:]]
    assert not any(part.requires_grad for part in parts.values())
    return loss.detach(), slopes, torch.stack([part.sum() for part in parts.values()])


OBJECTIVES = [
    pytest.param(
        M, dict(BAND, **changes), id=f"{M.__name__[6:]}-{'-'.join(map(str, changes.values()))}"
    )
    for M, changes in (
        *(
            (G, dict(reduction=kind, ratio_limit=limit, kl_beta=beta))
            for kind, limit, beta in (
                ("sequence", 0.0, 0.0),
                ("sequence", 1.2, 0.04),
                ("dapo", 0.0, 0.3),
                ("dapo", 1.15, 0.0),
                ("bnpo", 0.0, 0.1),
                ("dr_grpo", 1.2, 0.1),
                ("dr_grpo", 0.0, 0.0),
            )
        ),
        *(
            (S, dict(importance=kind, kl_beta=beta))
            for kind in ("sequence", "token")
            for beta in (0.0, 0.2)
        ),
    )
]


@pytest.mark.parametrize(("M", "changes"), OBJECTIVES)
@pytest.mark.parametrize("seed", range(3))
def test_objectives_are_their_closed_forms(M, changes, seed):
    settings, rows = M.Settings(max_new_tokens=6, **changes), case(seed)
    batch = tensors_of(rows)
    loss, slopes, sums = measured(M, batch, settings)
    expected, own_slopes, own_sums = written_out(rows, settings, token_ratio=M is G)
    assert abs(loss - expected) < 1e-10
    assert (slopes - padded(own_slopes, 6, 0.0)).abs().max() < 1e-10
    assert (sums - torch.tensor(own_sums)).abs().max() < 1e-10
    assert (
        0 < own_sums[0] < own_sums[1] < sum(LENGTHS)
    )  # clips that are active, or only outside, or none

    for at in (batch.mask > 0).nonzero().tolist():  # finite differences, of the script's own value
        moved = []
        for step in (1e-6, -1e-6):
            near = copy.copy(batch)
            near.logps = batch.logps.detach().clone()
            near.logps[tuple(at)] += step
            near.logps.requires_grad_()
            moved.append(measured(M, near, settings)[0])
        assert abs((moved[0] - moved[1]) / 2e-6 - slopes[tuple(at)]) < 1e-8


@pytest.mark.parametrize("seed", range(3))
def test_cispo_is_its_closed_form(seed):
    """Loss and gradient of each token: its ratio, bounded and constant, times advantage and log p."""
    settings = G.Settings(loss="cispo", reduction="dapo", kl_beta=0.1, **BAND)
    rows = case(seed)
    loss, slopes, sums = measured(G, tensors_of(rows), settings)
    low, high = 1 - settings.left_clip_range, 1 + settings.right_clip_range
    expected, own_slopes, outside = 0.0, [], 0
    for now, old, ref, A in zip(rows.logps, rows.old, rows.reference, rows.advantages, strict=True):
        own_slopes.append([])
        for p, q, reference in zip(now, old, ref, strict=True):
            ratio = math.exp(p - q)
            weight = min(max(ratio, low), high)
            kl = math.exp(reference - p) - (reference - p) - 1
            expected += (-weight * A * p + 0.1 * kl) / sum(LENGTHS)
            slope = -weight * A + 0.1 * (1 - math.exp(reference - p))
            own_slopes[-1].append(slope / sum(LENGTHS))
            outside += not low <= ratio <= high
    assert abs(loss - expected) < 1e-10 and outside > 0
    assert (slopes - padded(own_slopes, 6, 0.0)).abs().max() < 1e-10
    assert sums[0] == sums[1] == outside


def test_weights_of_tokens_count_the_whole_mini_batch():
    """13 samples and 50 tokens in all, of which 20 on this one of 2 ranks, and 4 in this micro-batch."""
    mask, total = torch.tensor([[0, 1, 1, 1], [1, 0, 0, 0]]) > 0, torch.tensor([13, 50, 20])
    for kind, (first, second) in dict(
        sequence=(1 / 39, 1 / 13),
        dapo=(1 / 50, 1 / 50),
        bnpo=(1 / 40, 1 / 40),
        dr_grpo=(1 / 117, 1 / 117),
    ).items():
        expected = mask * torch.tensor([[first], [second]])
        settings = G.Settings(reduction=kind, max_new_tokens=9)
        assert (G.token_weights(mask, total, settings, 2) - expected).abs().max() < 1e-15
    expected = mask * torch.tensor([[1 / 39], [1 / 13]])
    assert (S.token_weights(mask, total[0]) - expected).abs().max() < 1e-15


def test_the_defaults_are_the_papers():
    assert (G.Settings.left_clip_range, G.Settings.right_clip_range) == (0.2, 0.28)
    assert (S.Settings.left_clip_range, S.Settings.right_clip_range) == (3e-4, 4e-4)
    assert G.Settings.kl_beta == S.Settings.kl_beta == 0 and S.Settings.importance == "sequence"
    assert G.Settings.reduction == "dapo"  # TRL's
    fields = [{field.name for field in dataclasses.fields(M.Settings)} for M in (G, S)]
    of_one = {"loss", "reduction", "ratio_limit", "importance", "teacher", "kd_alpha"}
    assert fields[0] ^ fields[1] == of_one


@each_script
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_are_their_formula(M, scale):
    spread = torch.tensor(statistics.stdev([r for group in REWARDS for r in group]))
    found = M.group_advantages(torch.tensor(REWARDS), scale, spread)
    assert (found.flatten() - torch.tensor(advantages_of(REWARDS, scale))).abs().max() < 1e-12
    assert found.sum(1).abs().max() < 1e-12
    if scale == "group":  # the deviation of a sample: 1 / 0.5 of two rewards, not of a population
        assert M.group_advantages(torch.tensor([[1.0, 0.0]]), scale, spread)[
            0, 0
        ].item() == pytest.approx(0.5 / (0.5**0.5 + 1e-4), abs=1e-12)
    shifted = M.group_advantages(torch.tensor(REWARDS) + 100, scale, spread)
    assert (shifted - found).abs().max() < 1e-10


@each_script
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_group_of_one_reward_has_advantages_of_exactly_0(M, scale):
    for size, value in itertools.product(
        (2, 3, 5, 6, 7, 8, 12), (0.1, 0.2, 1 / 3, 0.7, 1.0, -1e6 / 3)
    ):
        rewards = torch.tensor([[value] * size, [0.0, *[1.0] * (size - 1)]])
        found = M.group_advantages(rewards, scale, rewards.std())
        assert found[0].tolist() == [0.0] * size and found[1].abs().min() > 0


# --------------------------------------------------------------------------------------------- objectives: properties
def variants():
    """Every objective with the band, as (script, settings)."""
    return [
        (param.values[0], param.values[0].Settings(max_new_tokens=6, **param.values[1]))
        for param in OBJECTIVES
    ]


def test_at_ratio_1_grpo_and_gspo_have_one_gradient_and_a_loss_of_0():
    rows = case()
    rows.logps = copy.deepcopy(rows.old)
    found = {}
    for name, M, settings in (
        ("grpo", G, G.Settings(reduction="sequence")),
        ("gspo", S, S.Settings()),
        ("token", S, S.Settings(importance="token")),
    ):
        loss, found[name], sums = measured(M, tensors_of(rows, reference=False), settings)
        assert abs(loss) < 1e-14 and sums[:4].tolist() == [0.0] * 4
    expected = padded(
        [[-A / 8 / length] * length for A, length in zip(rows.advantages, LENGTHS, strict=True)],
        6,
        0.0,
    )
    for slopes in found.values():
        assert (slopes - expected).abs().max() < 1e-15


@pytest.mark.parametrize("pad", [-7.5, 0.0, 3.0])
def test_the_content_and_the_width_of_padding_change_nothing(pad):
    for M, settings in variants():
        for width in (6, 7, 11):
            loss, slopes, sums = measured(M, tensors_of(case(), width, pad), settings)
            expected = measured(M, tensors_of(case()), settings)
            assert abs(loss - expected[0]) < 1e-15 and (sums - expected[2]).abs().max() < 1e-13
            assert torch.equal(slopes[:, 6:], torch.zeros(8, width - 6))
            assert (slopes[:, :6] - expected[1]).abs().max() < 1e-15


# ------------------------------------------------------------------------------------- rows and log-probabilities
class Table(nn.Module):
    """A policy whose next token depends on the present one alone: row t of the table holds the logits after token t."""

    def __init__(self, size=264, seed=0):
        super().__init__()
        self.embed = nn.Parameter(
            torch.randn(size, size, generator=torch.Generator().manual_seed(seed))
        )
        self.config, self.layers = (
            SimpleNamespace(model_dim=size, train_seq_len=128, vocab_size=size),
            [0],
        )
        self.seen = []  # how many tokens logits were made for

    def features(self, ids, doc):
        return F.embedding(ids, self.embed)

    def logits(self, x):
        self.seen.append(x.numel() // x.size(-1))
        return 1.0 * x


def policy(M=G, **changes):
    """A small network, random in every weight."""
    layers = changes.pop("layer_pattern", "g a")
    settings = M.Settings(**changes)
    norms = " ".join("rms" for _ in layers.split())
    shape = dict(model_dim=16, num_heads=2, num_kv_heads=2, attn_window=1 << 20)
    torch.manual_seed(1337)
    network = M.GPT(M.GPTConfig(264, 1, layers, norms, **shape, embed_init_std=0.02))
    network.activation_checkpointing = settings.activation_checkpointing
    M.adapt(network, settings, CPU)
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for name, param in network.named_parameters():
            if not name.endswith("lora_b"):  # a fresh adapter
                param.add_(0.1 * torch.randn(param.shape, generator=generator))
    return network


def rows_of(seed, count, longest=12):
    """Rows for answers_of: random prompts that begin with a BOS, responses of 1 token and more."""
    rng = random.Random(seed)
    return [
        (
            [1, *(rng.randrange(4, 260) for _ in range(rng.randint(0, 8)))],
            [rng.randrange(4, 264) for _ in range(rng.randint(1, longest))],
            None,
            rng.gauss(0, 1),
        )
        for _ in range(count)
    ]


def with_logps(rows):
    return [
        (prompt, ids, [-0.01 * token for token in ids], advantage)
        for prompt, ids, _, advantage in rows
    ]


def answers_of(M, rows):
    """The Answers of rows: prompt, ids, log-probabilities, advantage."""
    return [
        M.Answer(prompt=prompt, ids=ids, logps=logps, advantage=advantage)
        for prompt, ids, logps, advantage in rows
    ]


@each_script
def test_batches_hold_every_response_token_at_the_place_that_predicts_it(M):
    rows = [
        ([1, 8, 9], [4, 5, 263], [-0.1, -0.2, -0.3], 2.0),
        ([7], [6], [-0.5], -1.0),
        ([1, 2], [3, 3], [-1, -2], 0.5),
    ]
    [batch] = M.make_batches(answers_of(M, rows), CPU, 1000)
    expected = {  # the advantage -> ids, targets, sampled; the last token is a target, and nowhere an input
        2.0: ([1, 8, 9, 4, 5], [-1, -1, 4, 5, 263], [0, 0, -0.1, -0.2, -0.3]),
        -1.0: ([7], [6], [-0.5]),
        0.5: ([1, 2, 3], [-1, 3, 3], [0, -1, -2]),
    }
    assert batch.ids.shape == (3, 5) and sorted(batch.advantages.tolist()) == [[-1.0], [0.5], [2.0]]
    for at, [advantage] in enumerate(batch.advantages.tolist()):
        ids, targets, sampled = expected[advantage]
        width = len(ids)
        assert batch.ids[at, :width].tolist() == ids and batch.targets[at].tolist() == targets + [
            -1
        ] * (5 - width)
        assert batch.mask[at].tolist() == [target >= 0 for target in targets] + [False] * (
            5 - width
        )
        assert batch.sampled[at].tolist() == sampled + [0] * (5 - width)


@each_script
def test_batches_are_of_at_most_so_many_tokens_and_lose_no_row(M):
    for seed, tokens in itertools.product(range(5), (1, 20, 57, 300, 1 << 30)):
        rows, found = with_logps(rows_of(seed, 13)), []
        for batch in M.make_batches(answers_of(M, rows), CPU, tokens):
            assert batch.ids.numel() <= tokens or len(batch.ids) == 1
            for ids, targets, sampled, advantage in zip(
                batch.ids, batch.targets, batch.sampled, batch.advantages, strict=True
            ):
                span, start = targets >= 0, int((targets >= 0).nonzero()[0])
                found.append(
                    (
                        ids[: start + 1].tolist(),
                        targets[span].tolist(),
                        sampled[span].tolist(),
                        advantage.item(),
                    )
                )
        assert sorted(found, key=str) == sorted(rows, key=str)
    answers = answers_of(M, rows)
    assert len(M.make_batches(answers, CPU, 1)) == 13
    assert len(M.make_batches(answers, CPU, 1 << 30)) == 1


@each_script
@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.5])
def test_log_probabilities_are_those_of_the_whole_softmax(M, temperature):
    network, rows = policy(M), with_logps(rows_of(1, 6))
    [batch] = M.make_batches(answers_of(M, rows), CPU, 1 << 30)
    logps, entropy = M.token_logps(network, batch, temperature)
    factors = torch.randn(logps.shape)
    found = torch.autograd.grad((logps * factors).sum(), list(network.parameters()))

    expected, expected_entropy, total = torch.zeros(logps.shape), torch.zeros(logps.shape), 0.0
    for (
        prompt,
        response,
        _,
        advantage,
    ) in rows:  # each row alone, without padding, and with the last token as input
        at = batch.advantages.tolist().index([advantage])
        scores = network(torch.tensor([prompt + response]))[0] / temperature
        every = scores - scores.exp().sum(-1, keepdim=True).log()
        for place, token in enumerate(response, len(prompt) - 1):
            expected[at, place], expected_entropy[at, place] = (
                every[place, token],
                -(every.exp() * every)[place].sum(),
            )
            total = total + factors[at, place] * every[place, token]
    assert (logps - expected).abs().max() < 1e-12 and (
        entropy - expected_entropy
    ).abs().max() < 1e-12
    assert not entropy.requires_grad and torch.equal(logps != 0, batch.mask)
    for one, other in zip(
        found, torch.autograd.grad(total, list(network.parameters())), strict=True
    ):
        assert (one - other).abs().max() < 1e-12


@each_script
def test_logits_are_made_for_4096_tokens_at_most(M):
    table, rows = (
        Table(40),
        [([1], [random.randrange(40) for _ in range(499)], [0.0] * 499, 1.0) for _ in range(11)],
    )
    [batch] = M.make_batches(answers_of(M, rows), CPU, 1 << 30)
    logps, entropy = M.token_logps(table, batch, 0.7)
    assert max(table.seen) <= 4096 and sum(table.seen) == 11 * 499
    factors = torch.randn(logps.shape)
    [found] = torch.autograd.grad((logps * factors).sum(), table.embed)
    assert (
        max(table.seen) <= 4096 and sum(table.seen) == 2 * 11 * 499
    )  # made again, so that they need not be kept
    whole = (table.embed[batch.ids] / 0.7).log_softmax(-1)
    expected = whole.gather(-1, batch.targets.clamp(min=0)[..., None])[..., 0]
    assert (logps - expected).abs().max() < 1e-12
    assert (entropy + (whole.exp() * whole).sum(-1)).abs().max() < 1e-12
    assert (
        found - torch.autograd.grad((expected * factors).sum(), table.embed)[0]
    ).abs().max() < 1e-12


def test_entropies_have_their_gradient_if_asked_and_no_graph_otherwise(monkeypatch):
    """By the whole softmax and by finite differences; a probability of 0 makes no NaN."""
    table = Table(40)
    with torch.no_grad():
        table.embed[3, 5] = -2000.0
    rows = [([3], [4, 3, 7], [0.0] * 3, 1.0), ([6], [3], [0.0], 1.0)]
    [batch] = G.make_batches(answers_of(G, rows), CPU, 1 << 30)
    factors = torch.randn(batch.mask.shape) * batch.mask

    def weighted():
        _, entropy = G.token_logps(table, batch, 0.6, True)
        return (factors * entropy).sum()

    whole = (table.embed[batch.ids] / 0.6).log_softmax(-1)
    expected = (factors * torch.special.entr(whole.exp()).sum(-1)).sum()
    assert abs(weighted() - expected) < 1e-12
    [found] = torch.autograd.grad(weighted(), table.embed)
    chance = whole.exp()
    slopes = -chance * (whole + torch.special.entr(chance).sum(-1, keepdim=True)) / 0.6
    by_hand = torch.zeros_like(found).index_put(
        (batch.ids,), slopes * factors[..., None], accumulate=True
    )
    assert (found - by_hand).abs().max() < 1e-12 and found[3, 5] == 0
    for place in [(3, 4), (3, 20), (4, 3), (6, 39)]:
        moved = []
        for step in (1e-6, -1e-6):
            table.embed.data[place] += step
            moved.append(weighted().item())
            table.embed.data[place] -= step
        assert (moved[0] - moved[1]) / 2e-6 == pytest.approx(found[place].item(), abs=1e-8)

    monkeypatch.setattr(G, "activation_checkpoint", lambda function, *given, **_: function(*given))
    kept = []
    large = {}  # tensors of a row for each token that the backward pass would read
    for entropy_grad in (False, True):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
            _, entropy = G.token_logps(table, batch, 0.6, entropy_grad)
        assert entropy.requires_grad == entropy_grad
        large[entropy_grad] = len({x.data_ptr() for x in kept if x.shape == (4, 40)})
    assert large[False] == 1 < large[True]


# ------------------------------------------------------------------------------------------------- updates of a trainer
SMALL = dict(
    temperature=1.0,
    prompts_per_step=4,
    group_size=3,
    max_new_tokens=6,
    mini_batches=1,
    learning_rate=0.01,
    grad_clip_norm=0.0,
    **BAND,
)


@pytest.fixture(autouse=True)
def smooth_adamw(monkeypatch):
    """So large an epsilon that rounding in a gradient near zero does not decide the sign of its update."""
    for script in (G, S):
        monkeypatch.setattr(script, "ADAM_EPS", 1e-4)
        report_clips(script, monkeypatch)


def report_clips(M, patch):
    """Add to the metrics of a step `clips`: the shares of tokens whose clip is active, and whose ratio
    is outside, of each update."""
    original = M.update_metrics

    def update_metrics(updates, seconds):
        clips = []
        for update in updates:
            tokens = update["tokens"].double().clamp(min=1)
            names = ("clip_active", "clip_outside")
            clips.append([(update[name].double() / tokens).item() for name in names])
        return {**original(updates, seconds), "clips": clips}

    patch.setattr(M, "update_metrics", update_metrics)


def trainer(M, network=None, **changes):
    changes.pop("layer_pattern", None)
    settings = M.Settings(**{**SMALL, **changes})
    return TRAINERS[M](policy(M) if network is None else network, BYTES, settings)


def scripted(monkeypatch, M, draw=None, longest=6):
    """generate() gives sample s of a prompt with `seed` as draw(seed, s): ids and whether they ended; seeds it saw."""
    seen = []

    def drawn(seed, s):
        rng = random.Random(f"{seed} {s}")
        ids, ended = (
            [rng.randrange(4, 260) for _ in range(rng.randint(1, longest))],
            rng.random() < 0.7,
        )
        return (ids[:-1] + [END] if ended else ids), ended

    def generate(
        network, prompts, count, max_new_tokens, temperature, seeds, stop, samples, compiled
    ):
        assert stop == {1, END} and not torch.is_grad_enabled()
        seen.extend(seeds)
        found = [(draw or drawn)(seed, s) for seed in seeds for s in range(count)]
        for sample, (ids, ended) in zip(samples, found, strict=True):
            sample.ids = ids
            sample.logps = [-1.0 - 0.01 * i for i in range(len(ids))]
            sample.finished = ended

    monkeypatch.setattr(M, "generate", generate)
    return seen


def by(score):
    """A reward function with TRL's signature, of one of lists of prompts and texts."""
    return lambda prompts, completions, **_: score(prompts, completions)


def take(own, queries, score, step=0, multiplier=1.0, qat=False):
    """The metrics of a step with samples of this step's seeds, at a multiple of the learning rate."""
    own.reward_funcs = [by(score)]
    rollout = own.rollout(queries, step, qat)
    return {**rollout.metrics, **own.update(rollout, multiplier, qat)}


def clips_of(metrics):
    """See report_clips."""
    return metrics["clips"]


def lengths_score(queries, texts):
    """A reward that says little and varies: the text's length, and its first character."""
    return [len(text) % 4 + ord(text[0]) % 3 / 2 if text else -1.0 for text in texts]


def state(model):
    return [param.detach().clone() for param in model.parameters()]


def furthest(one, other):
    return max((a - b).abs().max().item() for a, b in zip(one, other, strict=True))


QUERIES = ["a", "bcd", "ef", "ghijkl"]


@each_script
def test_metrics_of_a_step_are_their_definitions(M, monkeypatch):
    samples = {
        0: ([10, 11, END], True),
        1: ([20, END], True),
        2: ([30, 31, 32, 33, 34, 35], False),
        3: ([END], True),
    }
    scripted(monkeypatch, M, lambda seed, s: samples[(s + (seed[-1] > 1)) % 4])
    table = Table()
    own = trainer(M, table, group_size=3, mini_batches=2, epochs=2, learning_rate=0.1)
    start = table.embed.detach().clone()
    rewards = [1.0, 0.0, 0.0, 0.5, 0.5, 0.5, 0.25, 0.0, 1.0, 1.0, 1.0, 1.0]
    metrics = take(own, QUERIES, lambda queries, texts: rewards)
    assert metrics["reward"] == pytest.approx(statistics.mean(rewards), abs=1e-12)
    assert metrics["reward_std"] == pytest.approx(statistics.stdev(rewards), abs=1e-12)
    assert metrics["zero_variance"] == 0.5 and metrics["length"] == pytest.approx(
        (2 * 11 + 2 * 9) / 12, abs=1e-12
    )
    assert metrics["finished"] == pytest.approx(2 / 3)
    assert (
        len(clips_of(metrics)) == 4
        and clips_of(metrics)[0] == [0.0, 0.0]
        and clips_of(metrics)[3][1] > 0
    )
    for at, name in enumerate(
        ("clip_active", "clip_outside")
    ):  # of the tokens in groups of several rewards: 11 and 9 in the mini-batches
        sums = sum(
            clips[at] * tokens
            for clips, tokens in zip(clips_of(metrics), (11, 9, 11, 9), strict=True)
        )
        assert metrics[name] == pytest.approx(sums / 40, abs=1e-9)
    assert metrics["bad"] == 0 and metrics["kl"] == 0  # without a reference

    table.embed.data.copy_(start)  # one update alone, on what the first sample was
    alone = trainer(M, table, group_size=3)
    metrics, entropy, gap = take(alone, ["q"], lambda queries, texts: [1.0, 0.0, 0.25]), [], []
    every = start.log_softmax(-1)
    for ids, _ in [*samples.values()][:3]:
        for place, (before, token) in enumerate(zip([ASSISTANT, *ids[:-1]], ids, strict=True)):
            entropy.append(-(every[before].exp() * every[before]).sum().item())
            gap.append(abs(every[before, token].item() + 1.0 + 0.01 * place))
    assert metrics["entropy"] == pytest.approx(statistics.mean(entropy), abs=1e-12)
    assert metrics["sampler_gap"] == pytest.approx(statistics.mean(gap), abs=1e-12)
    slopes = advantages_of([[1.0, 0.0, 0.25]], "group")
    loss = -sum(A * length for A, length in zip(slopes, (3, 2, 6), strict=True)) / 11
    assert metrics["loss"] == pytest.approx(loss if M is G else 0.0, abs=1e-12)
    assert metrics["log_ratio"] == 0


VARIANTS = [
    pytest.param(M, dict(changes), id=" ".join(map(str, changes.values())))
    for M, changes in (
        (G, dict(reduction="sequence", kl_beta=0.1)),
        (G, dict(reduction="dapo")),
        (G, dict(reduction="bnpo")),
        (G, dict(reduction="dr_grpo", scale_rewards="none")),
        (S, dict(importance="sequence", kl_beta=0.1)),
        (S, dict(importance="token", scale_rewards="batch")),
    )
]


@pytest.mark.parametrize(("M", "changes"), VARIANTS)
def test_micro_batches_add_up_to_one_batch(M, changes, monkeypatch):
    scripted(monkeypatch, M)
    found = []
    for tokens in (1 << 20, 40, 1):
        own = trainer(M, mini_batches=2, epochs=2, micro_batch_tokens=tokens, **changes)
        metrics = take(own, QUERIES, lengths_score)
        values = [value for name, value in metrics.items() if not re.search("tok_s|clips", name)]
        found.append(
            (
                state(own.network),
                [param.grad for param in own.trained.values()],
                torch.tensor(values),
                torch.tensor(clips_of(metrics)),
            )
        )
    assert found[0][3][3, 1] > 0  # off-policy in the end
    for split in found[1:]:
        assert furthest(split[0], found[0][0]) < 1e-9 and furthest(split[1], found[0][1]) < 1e-12
        assert furthest(split[2:], found[0][2:]) < 1e-6  # sums of metrics may be float32


@pytest.mark.parametrize(
    ("M", "clip", "epsilon"), [(G, 0.0, 1e-8), (G, 0.01, 1e-4), (S, 0.0, 1e-8), (S, 0.01, 1e-4)]
)
def test_updates_are_those_of_a_plain_loop(M, clip, epsilon, monkeypatch):
    """2 mini-batches x 2 epochs by torch's AdamW, the loss sample by sample as written in the papers."""
    scripted(monkeypatch, M)
    adamw = functools.partial(M.OPTIMIZERS["adamw"], eps=epsilon)
    monkeypatch.setitem(M.OPTIMIZERS, "adamw", adamw)
    table = Table()
    plain = nn.Parameter(table.embed.detach().clone())
    own = trainer(
        M,
        table,
        mini_batches=2,
        epochs=2,
        grad_clip_norm=clip,
        weight_decay=0.1,
        learning_rate=0.035,
        temperature=0.2,
        left_clip_range=0.2,
        right_clip_range=0.28,
    )
    s, samples = (
        own.settings,
        own.sample(QUERIES, 3, 1.0, [(own.settings.seed, 0, at) for at in range(4)]),
    )
    metrics = take(own, QUERIES, lengths_score, step=0, multiplier=0.5)
    optimizer = torch.optim.AdamW(
        [plain], lr=0.0175, betas=(0.9, 0.99), eps=epsilon, weight_decay=0.1
    )
    rewards = lengths_score([], [sample.text for sample in samples])
    advantages = advantages_of([rewards[at : at + 3] for at in range(0, 12, 3)], "group")

    def logps(sample):
        return (plain[[ASSISTANT, *sample.ids[:-1]]] / 0.2).log_softmax(-1)[
            range(len(sample.ids)), sample.ids
        ]

    old, norms = [logps(sample).detach() for sample in samples], []
    for mini in (range(6), range(6, 12)) * 2:
        loss = 0.0
        tokens = sum(len(samples[at].ids) for at in mini)
        for at in mini:
            delta = logps(samples[at]) - old[at]
            ratio = delta.exp() if M is G else delta.mean().exp().expand_as(delta)
            clipped = ratio.clamp(1 - s.left_clip_range, 1 + s.right_clip_range)
            gained = torch.minimum(ratio * advantages[at], clipped * advantages[at])
            loss = loss - (gained.sum() / tokens if M is G else gained.mean() / 6)
        optimizer.zero_grad()
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_([plain], clip or math.inf).item())
        optimizer.step()
    assert clip or clips_of(metrics)[3][0] > 0
    assert (plain - table.embed).abs().max() < 1e-10 and (
        table.embed.grad - plain.grad
    ).abs().max() < 1e-10
    assert (
        metrics["grad_norm"] == pytest.approx(statistics.mean(norms), abs=1e-10) and max(norms) > 1
    )
    assert min(norms) > 0.01, (norms, clips_of(metrics))


@pytest.mark.parametrize(
    ("M", "changes"),
    [(G, dict(reduction="sequence")), (G, dict(reduction="dapo")), (S, dict())],
    ids=["sequence", "dapo", "gspo"],
)
def test_an_entropy_bonus_raises_the_mean_that_the_loss_takes(M, changes, monkeypatch):
    """Where rewards say nothing its gradient is all there is: that of the entropies at TEMPERATURE, by
    an answer's length or by token. Such answers are read.
    """
    scripted(monkeypatch, M)
    table = Table()
    own = trainer(M, table, entropy_beta=0.3, temperature=0.5, micro_batch_tokens=30, **changes)
    metrics = take(own, QUERIES, lambda queries, texts: [1.0] * 12, multiplier=0.0)
    plain = table.embed.detach().clone().requires_grad_()
    answers = own.sample(QUERIES, 3, 0.5, [(own.settings.seed, 0, at) for at in range(4)])
    tokens = sum(len(answer.ids) for answer in answers)
    mean = 0.0
    for answer in answers:
        logps = (plain[[ASSISTANT, *answer.ids[:-1]]] / 0.5).log_softmax(-1)
        weight = 1 / tokens if changes.get("reduction") == "dapo" else 1 / 12 / len(answer.ids)
        mean = mean - weight * (logps.exp() * logps).sum()
    mean.backward()
    assert metrics["loss"] == pytest.approx(-0.3 * mean.item(), abs=1e-12)
    assert (table.embed.grad + 0.3 * plain.grad).abs().max() < 1e-12 < plain.grad.abs().max()


@pytest.mark.parametrize("loss", ["clip", "cispo"])
def test_a_teachers_mean_gradient_is_that_of_the_reverse_divergence(loss):
    """All answers of two tokens, each by its probability: the gradient of KL(p, p_teacher) of the first
    token and of the second after each first, by loops.
    """
    size, temperature = 5, 0.7
    table, teacher = Table(size), Table(size, seed=1)
    settings = G.Settings(loss=loss, temperature=temperature, teacher="t")
    own = G.GRPOTrainer(table, BYTES, settings, teacher=teacher)
    logs = [(net.embed.detach() / temperature).log_softmax(-1).tolist() for net in (table, teacher)]
    answers = [
        G.Answer(prompt=[2], ids=[a, b], logps=[logs[0][2][a], logs[0][a][b]])
        for a in range(size)
        for b in range(size)
    ]
    [batch] = own.batches_of(answers)
    logps, _ = G.token_logps(table, batch, temperature)
    chances = logps.sum(1, keepdim=True).exp().detach()
    losses, _ = G.policy_loss(logps, batch, settings)
    [found] = torch.autograd.grad((losses * chances).sum(), table.embed)
    expected = [[0.0] * size for _ in range(size)]
    for before, weight in [(2, 1.0), *((a, math.exp(logs[0][2][a])) for a in range(size))]:
        p, t = (log[before] for log in logs)
        divergence = sum(math.exp(x) * (x - y) for x, y in zip(p, t, strict=True))
        for k in range(size):
            slope = math.exp(p[k]) * (p[k] - t[k] - divergence) / temperature
            expected[before][k] += weight * slope
    assert (found - torch.tensor(expected)).abs().max() < 1e-12 < found.abs().max()


@pytest.mark.parametrize("alpha", [1.0, 0.25])
def test_a_teacher_teaches_alone_or_beside_rewards(alpha, monkeypatch):
    """Each token has its own advantage, also in groups of one reward; by a plain loop."""
    scripted(monkeypatch, G)
    table, teacher = Table(), Table(seed=1)
    settings = G.Settings(**{**SMALL, "kd_alpha": alpha, "mini_batches": 2, "teacher": "t"})
    own = G.GRPOTrainer(table, BYTES, settings, teacher=teacher)
    if alpha == 1:
        metrics = own.train_step(QUERIES)  # without a reward function
        assert metrics["reward"] == 0 and metrics["zero_variance"] == 1
        assert metrics["bad"] == 0 and metrics["grad_norm"] > 0
        table.embed.data.copy_(Table().embed)
    rewards = [1.0, 0.0, 1.0, 0.5, 0.5, 0.5, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    metrics = take(own, QUERIES, lambda queries, texts: rewards, multiplier=0.0)
    answers = own.sample(QUERIES, 3, 1.0, [(own.settings.seed, 0, at) for at in range(4)])
    groups = [rewards[at : at + 3] for at in range(0, 12, 3)]
    plain = table.embed.detach().clone().requires_grad_()
    gaps = []
    losses = []
    for answer, advantage in zip(answers, advantages_of(groups, "group"), strict=True):
        for before, token in zip([ASSISTANT, *answer.ids[:-1]], answer.ids, strict=True):
            logp = plain[before].log_softmax(-1)[token]
            gap = (teacher.embed[before].log_softmax(-1)[token] - logp).item()
            gaps.append(gap)
            losses.append(-((1 - alpha) * advantage + alpha * gap) * logp)
    assert metrics["teacher_kl"] == pytest.approx(-statistics.mean(gaps), abs=1e-9)
    count = sum(len(answer.ids) for answer in answers[6:])
    sum(losses[-count:]).div(count).backward()  # of the second mini-batch
    assert (table.embed.grad - plain.grad).abs().max() < 1e-10 < plain.grad.abs().max()


def recorded(monkeypatch, M):
    """What policy_loss was called with: (log-probabilities, batch)."""
    calls, original = [], M.policy_loss
    monkeypatch.setattr(
        M,
        "policy_loss",
        lambda logps, batch, settings: (
            calls.append((logps.detach().clone(), batch)),
            original(logps, batch, settings),
        )[1],
    )
    return calls


NETWORKS = [
    dict(),
    dict(layer_pattern="a s"),
    dict(layer_pattern="g1 g1 a"),
    dict(activation_checkpointing=True),
    dict(lora_rank=2, qat=False),
]


@each_script
@pytest.mark.parametrize(
    "changes", NETWORKS, ids=lambda changes: " ".join(map(str, changes.values())) or "default"
)
def test_old_log_probabilities_are_the_training_forwards_bit_for_bit(
    M, changes, monkeypatch, float32
):
    scripted(monkeypatch, M)
    calls = recorded(monkeypatch, M)
    own = trainer(M, policy(M, **changes), mini_batches=2, micro_batch_tokens=30, **changes)
    metrics = take(own, QUERIES, lengths_score)
    answers = [answer for answer in own.rollout(QUERIES, 0).answers[0] if answer.advantage]
    first = len(M.make_batches(answers, CPU, 30))
    assert first > 1
    for logps, batch in calls[:first]:
        assert torch.equal(logps, batch.old) and torch.equal(logps != 0, batch.mask)
    assert clips_of(metrics)[0] == [0.0, 0.0]
    assert any(not torch.equal(logps, batch.old) for logps, batch in calls[first:])
    calls.clear()
    metrics = take(
        own, QUERIES, lengths_score, multiplier=0.0
    )  # while weights stay, all ratios are 1
    assert (
        all(torch.equal(logps, batch.old) for logps, batch in calls) and metrics["log_ratio"] == 0
    )
    assert clips_of(metrics) == [[0.0, 0.0]] * 2


@pytest.mark.parametrize(
    ("M", "changes"),
    [
        (G, dict(reduction="sequence")),
        (G, dict(reduction="dapo", epochs=2, left_clip_range=1.0, right_clip_range=9.0)),
        (G, dict(reduction="bnpo", scale_rewards="batch")),
        (S, dict(epochs=2, left_clip_range=1.0, right_clip_range=9.0)),
    ],
)
def test_answers_without_an_advantage_are_left_out_and_count(M, changes, monkeypatch):
    """A group of each mini-batch has one reward. Weights become what they become if all answers are
    read, as they are for a KL_BETA that is too small to change a digit.
    """
    scripted(monkeypatch, M)
    make_batches = M.make_batches
    read = []

    def counted(answers, *arguments):
        read.append(len(answers))
        return make_batches(answers, *arguments)

    monkeypatch.setattr(M, "make_batches", counted)
    rewards = [1.0, 0.0, 1.0, 0.5, 0.5, 0.5, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    weights = []
    for kl_beta in (0.0, 1e-30):
        own = trainer(M, mini_batches=2, kl_beta=kl_beta, learning_rate=0.001, **changes)
        start = state(own.network)
        for _ in range(2):
            take(own, QUERIES, lambda queries, texts: rewards)
        weights.append(state(own.network))
        assert furthest(start, weights[-1]) > 0.001
    assert read == 4 * [3] + 4 * [6]
    assert furthest(*weights) < 1e-12


@each_script
def test_momentum_alone_moves_no_weight(M, monkeypatch):
    """A step in which no answer has an advantage, after one that left momentum."""
    scripted(monkeypatch, M)
    own = trainer(M, mini_batches=2)
    start = state(own.network)
    take(own, QUERIES, lengths_score)
    before = state(own.network)
    moments = copy.deepcopy(own.optimizer_state.state_dict())
    assert furthest(start, before) > 0.001
    metrics = take(own, QUERIES, lambda queries, texts: [0.5] * 12)
    assert metrics["entropy"] == metrics["train_tok_s"] == metrics["bad"] == 0
    assert metrics["grad_norm"] == 0 and metrics["zero_variance"] == 1
    assert furthest(before, state(own.network)) == 0
    for name, saved in own.optimizer_state.state_dict().items():
        for key, value in saved.items():
            assert torch.equal(value, moments[name][key]), (name, key)


class Rank(G.Runtime):
    """A rank that is a thread of this process; `sum` waits for all of them."""

    def __init__(self, rank, barrier, parts):
        super().__init__(rank, barrier.parties, CPU, True)
        self.barrier, self.parts = barrier, parts

    def sum(self, tensor):
        self.parts[self.rank] = tensor.clone()
        self.barrier.wait(timeout=60)
        total = sum(self.parts[rank] for rank in range(self.world_size))
        self.barrier.wait(timeout=60)
        return tensor.copy_(total)


def on_ranks(count, make, work):
    """What `work` returns of the trainer that `make` makes for each rank; one rank is no thread."""
    barrier, parts, found = threading.Barrier(count), {}, {}
    runtimes = [Rank(rank, barrier, parts) for rank in range(count)] if count > 1 else [ALONE]
    trainers = [make(runtime) for runtime in runtimes]
    threads = [
        threading.Thread(target=lambda own=own: found.update({own.runtime.rank: work(own)}))
        for own in trainers
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    return [found[rank] for rank in range(count)]


def three_steps(own, score, loss_of):
    """Two steps, and one in which the last rank's loss is not a number: weights, metrics, samples,
    and how many updates were bad and how far weights moved then."""
    own.stop, own.reward_funcs = frozenset(range(0, 264, 4)), [by(score)]
    samples, sample = {}, own.sample

    def watched(queries, count, temperature, seeds, qat):
        answers = sample(queries, count, temperature, seeds, qat)
        for at, answer in enumerate(answers):
            samples[(*seeds[at // count], at % count)] = answer.ids
        return answers

    own.sample = watched
    queries = [str(number) for number in range(24)]

    def step(number):
        rollout = own.rollout(queries[8 * number : 8 * number + 8], number)
        return {**rollout.metrics, **own.update(rollout)}

    metrics, before = [step(0), step(1)], state(own.network)
    if own.runtime.rank == own.runtime.world_size - 1:
        loss_of[id(own.settings)] = math.nan
    bad = step(2)["bad"]
    return before, metrics, samples, (bad, furthest(before, state(own.network)))


def compare_ranks(one, ranks, bad, rel):
    weights, metrics, samples, _ = one
    first, second = ranks
    assert one[3] == first[3] == second[3] == (bad, 0)  # updates; and no weight moved, on no rank
    assert furthest(first[0], second[0]) == 0 and furthest(weights, first[0]) < 1e-5
    assert {**first[2], **second[2]} == samples and not set(first[2]) & set(second[2])
    assert len(samples) >= 3 * 8 * 3 and {1, 6} <= {len(ids) for ids in samples.values()}
    for own, others in zip(metrics, first[1], strict=True):
        clips = [torch.tensor(clips_of(found)) for found in (own, others)]
        assert clips[0] == pytest.approx(clips[1], abs=0.02)
        for key in own:
            if not re.search("tok_s|clips|idle", key):
                assert own[key] == pytest.approx(others[key], rel=rel, abs=5e-5), key


@pytest.mark.parametrize(
    ("M", "changes"),
    [
        (G, dict(resample_rounds=2)),
        (G, dict(reduction="dapo", scale_rewards="batch")),
        (S, dict(resample_rounds=1)),
    ],
)
def test_two_ranks_are_one(M, changes, float32, monkeypatch):
    loss, loss_of = M.policy_loss, {}

    def policy_loss(logps, batch, settings):
        losses, logged = loss(logps, batch, settings)
        return losses * loss_of.get(id(settings), 1), logged

    monkeypatch.setattr(M, "policy_loss", policy_loss)

    def make(runtime):
        settings = {**SMALL, "prompts_per_step": 8, "mini_batches": 2, "kl_beta": 0.1, **changes}
        return TRAINERS[M](policy(M), BYTES, M.Settings(**settings), runtime=runtime)

    def work(own):
        return three_steps(own, lambda _, texts: [sum(map(ord, t)) % 5 > 0 for t in texts], loss_of)

    [one] = on_ranks(1, make, work)
    compare_ranks(one, on_ranks(2, make, work), 2, 2e-4)
    assert 0 < one[1][0]["zero_variance"] < 1 < one[1][0]["length"]


def test_ranks_are_dealt_as_much_to_do():
    """By hand; and lengths that differ tenfold, in mini-batches of 16: less than 8% of the time is
    idle in the worst of 150 cases, and more than 20% where queries are dealt in turn.
    """
    assert G.deal([9, 1, 2, 8], 2, 4) == [[0, 1], [2, 3]]  # 9 + 1, 8 + 2
    # Of a mini-batch each rank has as many; that with less so far has the costlier one.
    assert G.deal([5, 1, 1, 5], 2, 2) == [[0, 2], [1, 3]]
    assert G.deal([3, 1, 2], 1, 3) == [[0, 1, 2]]
    rng = random.Random(1)
    worst = {"dealt": 0.0, "in turn": 0.0}
    for _ in range(50):
        costs = [rng.randint(10, 100) for _ in range(64)]
        for ranks in (2, 4, 8):
            dealt = G.deal(costs, ranks, 16)
            assert sorted(itertools.chain(*dealt)) == list(range(64))
            for share in dealt:
                assert [place // 16 for place in share] == sorted([0, 1, 2, 3] * (16 // ranks))
            in_turn = [range(rank, 64, ranks) for rank in range(ranks)]
            for name, shares in (("dealt", dealt), ("in turn", in_turn)):
                loads = [sum(costs[place] for place in share) for share in shares]
                idle = 1 - sum(loads) / ranks / max(loads)
                worst[name] = max(worst[name], idle)
    assert worst["dealt"] < 0.08 and worst["in turn"] > 0.2, worst


@each_script
def test_a_rollout_says_how_long_ranks_waited(M, float32, monkeypatch):
    """Of two ranks one takes 0.5 s longer for its samples."""

    def make(runtime):
        settings = {**SMALL, "prompts_per_step": 4, "mini_batches": 1}
        return TRAINERS[M](policy(M), BYTES, M.Settings(**settings), runtime=runtime)

    def work(own):
        sample = own.sample

        def slowly(*args):
            begin = time.perf_counter()
            time.sleep(0.5 * own.runtime.rank)
            answers = sample(*args)
            seconds[own.runtime.rank] = time.perf_counter() - begin
            return answers

        own.sample = slowly
        own.reward_funcs = [by(lambda _, texts: [1.0] * len(texts))]
        return own.rollout(list("abcd"), 0).metrics["idle"]

    seconds = {}
    idle, other = on_ranks(2, make, work)
    expected = 1 - statistics.mean(seconds.values()) / max(seconds.values())
    assert idle == other == pytest.approx(expected, abs=1e-3)
    assert 0.1 < idle < 0.5


# ----------------------------------------------------------------------------------------------------------- rollouts


@each_script
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_answers_of_a_rollout_are_the_samples_with_their_advantages(M, scale, monkeypatch):
    scripted(monkeypatch, M)
    own = trainer(M, mini_batches=2, scale_rewards=scale)
    own.reward_funcs = [by(lengths_score)]
    rollout = own.rollout(QUERIES, 5)
    answers = own.sample(QUERIES, 3, 1.0, [(own.settings.seed, 5, number) for number in range(4)])
    rewards = lengths_score([], [answer.text for answer in answers])
    found = [answer for mini in rollout.answers for answer in mini]
    assert [len(mini) for mini in rollout.answers] == [6, 6]
    assert [(answer.prompt, answer.ids, answer.logps) for answer in found] == [
        (answer.prompt, answer.ids, answer.logps) for answer in answers
    ]
    assert [answer.advantage for answer in found] == pytest.approx(
        advantages_of([rewards[at : at + 3] for at in range(0, 12, 3)], scale), abs=1e-12
    )
    plain = trainer(M)
    plain.reward_funcs = [by(lambda _, texts: [1.0] * 12)]
    rollout = plain.rollout(QUERIES, 0)
    assert {answer.advantage for answer in rollout.answers[0]} == {0.0}
    assert rollout.metrics["reward_std"] == 0


@each_script
@pytest.mark.parametrize("rounds", [0, 1, 2, 5])
def test_groups_of_one_reward_are_replaced(M, rounds, monkeypatch):
    """Of 4 queries the answers to the numbers 1 and 3 have one reward each, and so have those to 5,
    which replace the first ones; those to 7 and to 9, in the second round, have several.
    """
    seen = scripted(monkeypatch, M, lambda seed, s: ([10 + seed[-1], 40 + s, END], True))
    pool = [f"other {number}" for number in range(20)]
    words = dict(mini_batches=2, resample_rounds=rounds, scale_rewards="batch")
    own = TRAINERS[M](policy(M), BYTES, M.Settings(**{**SMALL, **words}), train_dataset=pool)

    def score(text):
        number = ord(text[0]) - 6
        return number / 4 if number in (1, 3, 5) else ord(text[1]) - 36 + number / 8

    own.reward_funcs = [by(lambda _, texts: [score(text) for text in texts])]
    rollout = own.rollout(QUERIES, 6)
    final = [0, {0: 1, 1: 5}.get(rounds, 9), 2, 7 if rounds else 3]
    asked = [0, 1, 2, 3, *[5, 7][: 2 * rounds], *[9][: max(0, rounds - 1)]]
    assert seen == [(1337, 6, number) for number in asked]
    answers = [*itertools.chain(*rollout.answers)]
    assert [len(part) for part in rollout.answers] == [6, 6]
    assert [answer.ids[0] - 10 for answer in answers[::3]] == final
    queries = []
    for number in final:
        drawn = np.random.default_rng((1337, 6, number)).integers(20)
        queries.append(QUERIES[number] if number < 4 else pool[drawn])
    assert [answer.query for answer in answers[::3]] == queries
    rewards = [[score(answer.text) for answer in answers[at : at + 3]] for at in (0, 3, 6, 9)]
    found = [answer.advantage for answer in answers]
    assert found == pytest.approx(advantages_of(rewards, "batch"), abs=1e-12)
    metrics = rollout.metrics
    assert metrics["zero_variance"] == [0.5, 0.25, 0, 0][min(rounds, 3)]
    assert metrics.get("resampled") == [None, 0.5, 0.75, 0.75][min(rounds, 3)]
    first = [score(chr(number + 6) + chr(36 + s)) for number in range(4) for s in range(3)]
    assert metrics["reward"] == pytest.approx(statistics.mean(first), abs=1e-12)


# ----------------------------------------------------------------------------------------------- faults and settings
@each_script
def test_gradients_that_are_not_finite_move_no_weight(M, monkeypatch):
    scripted(monkeypatch, M)
    own, original = trainer(M), M.policy_loss
    for wrong in (math.nan, math.inf):
        before = state(own.network)
        with monkeypatch.context() as patch:

            def policy_loss(*given, wrong=wrong):
                loss, parts = original(*given)
                return wrong * loss, parts

            patch.setattr(M, "policy_loss", policy_loss)
            assert take(own, QUERIES, lengths_score, step=0)["bad"] == 1
        assert all(map(torch.equal, before, state(own.network)))
    take(own, QUERIES, lengths_score, step=1)
    assert 0 < furthest(before, state(own.network)) < 1


# The one line of the UserError that a call must raise.
refused = functools.partial(refusal, (G.UserError, S.UserError), "")
WRONG_REWARDS = {
    "too few": ([1.0] * 11, "must return a list of 12 numbers"),
    "no list": (None, "must return a list of 12 numbers"),
    "text": (["1"] * 12, "must return a list of 12 numbers"),
    "nan": (
        [*[0.0] * 5, math.nan, *[0.0] * 6],
        "must be finite and below 1e15, or None, not nan for the prompt 'bcd', completion 'm'",
    ),
    "infinite": (
        [math.inf] * 12,
        "must be finite and below 1e15, or None, not inf for the prompt 'a', completion 'k'",
    ),
}


@each_script
@pytest.mark.parametrize("name", WRONG_REWARDS)
def test_what_a_reward_function_returns_is_checked(M, name, monkeypatch):
    returned, said = WRONG_REWARDS[name]
    scripted(monkeypatch, M, lambda seed, s: ([4 + ord("k") + s, END], True))
    own = trainer(M)
    before = state(own.network)
    assert said in refused(own.train_step, QUERIES, lambda queries, texts: returned)
    fault = refused(own.train_step, QUERIES, lambda queries, texts: 1 / 0)
    assert "raised ZeroDivisionError: division by zero" in fault
    assert all(map(torch.equal, before, state(own.network)))


WRONG_SETTINGS = [
    (G, dict(group_size=1), "GROUP_SIZE=1: must be a whole number from 2 to inf"),
    (G, dict(temperature=0.0), "TEMPERATURE=0.0: must be a number from 0.01 to 100.0"),
    (
        S,
        dict(prompts_per_step=6, mini_batches=4),
        "PROMPTS_PER_STEP=6: must be a multiple of MINI_BATCHES x ranks = 4",
    ),
    (G, dict(ratio_limit=1.05), "RATIO_LIMIT=1.05: must be 0, or above the band, 1.28"),
    (
        G,
        dict(ratio_limit=2.0, loss="cispo"),
        "RATIO_LIMIT=2.0: LOSS=cispo keeps all ratios in its band; must be 0",
    ),
    (G, dict(left_clip_range=-1), "LEFT_CLIP_RANGE=-1.0: must be a number from 0 to inf"),
    (S, dict(importance="tokens"), "IMPORTANCE='tokens': must be one of sequence, token"),
]


@pytest.mark.parametrize(("M", "changes", "said"), WRONG_SETTINGS)
def test_settings_that_do_not_fit_are_refused_when_they_are_made(M, changes, said):
    assert refused(M.Settings, **changes) == said


def test_values_of_trl_are_taken():
    for M in (G, S):
        assert M.Settings(scale_rewards=False) == M.Settings(scale_rewards="none")
        assert M.Settings(scale_rewards=True) == M.Settings(scale_rewards="group")
    assert S.GSPOConfig(importance="sequence_token").importance == "token"


@each_script
def test_calls_that_do_not_fit_are_refused_in_a_line(M):
    said = refused(M.load_start, M.Settings(lora_rank=2, init_from="x"))
    assert "QAT=1" in said and "LORA_RANK" in said
    own = trainer(M, mini_batches=2)
    assert "reward_funcs: none" in refused(own.train_step, QUERIES)
    for queries in ([], ["a"], ["a"] * 3):
        assert f"{len(queries)} queries" in refused(own.train_step, queries, lengths_score)
    assert "ITERATIONS=0" in refused(own.train, lengths_score)


@each_script
def test_a_prompt_that_is_longer_than_the_context_is_refused(M, float32):
    network = policy(M)
    network.config.train_seq_len = 20  # a prompt of n bytes has n + 4 tokens
    own = trainer(M, network, max_new_tokens=6)
    take(own, ["a", "b", "c", "d" * 10], lengths_score)
    said = refused(own.train_step, ["a", "b", "c", "d" * 11], lengths_score)
    assert "MAX_NEW_TOKENS=6" in said and set(re.findall("-?[0-9]+", said)) == {"6", "15", "20"}


# ------------------------------------------------------------------------------------------------- references, adapters
@each_script
@pytest.mark.parametrize("kind", ["whole", "new adapters", "trained adapters"])
def test_the_reference_is_the_policy_at_the_start(M, kind, monkeypatch):
    """By a copy, which shares with the policy what is not trained."""
    scripted(monkeypatch, M)
    calls, changes = (
        recorded(monkeypatch, M),
        {} if kind == "whole" else dict(lora_rank=2, qat=False),
    )
    network = policy(M, **changes)
    if kind == "trained adapters":
        for name, param in network.named_parameters():
            if name.endswith("lora_b"):
                torch.nn.init.normal_(param, std=0.5)
    start = copy.deepcopy(network)
    own = trainer(M, network, kl_beta=0.01, **changes)
    pairs = zip(own.ref_model.parameters(), network.parameters(), strict=True)
    assert all((one is other) != other.requires_grad for one, other in pairs)
    kls = [take(own, QUERIES, lengths_score, step)["kl"] for step in range(3)]
    assert kls[0] == 0 and 1e-6 < kls[1] < kls[2]
    for _, batch in calls:
        assert (batch.reference - M.token_logps(start, batch, 1.0)[0]).abs().max() < 1e-12
    assert kind == "whole" or all("lora" in name for name in own.trained)


@each_script
def test_adapters_of_the_start_are_merged_and_new_ones_are_made_by_the_seed(M, monkeypatch):
    found = []
    for noise in (1, 2):
        network = policy(M, lora_rank=3, qat=False)
        with torch.no_grad():
            for name, param in network.named_parameters():
                if name.endswith("lora_b"):
                    torch.nn.init.normal_(
                        param, std=0.1, generator=torch.Generator().manual_seed(1)
                    )
        merged = M.merge_lora(copy.deepcopy(network)).state_dict()
        monkeypatch.setattr(M, "find_start", str)
        monkeypatch.setattr(M, "load_stored", lambda given, made=network: (made, BYTES, given))
        settings = M.Settings(init_from="x", lora_rank=2, qat=False)
        start, _, source = M.load_start(settings)
        assert source == "x" and start.state_dict().keys() == merged.keys()
        assert all(torch.equal(w, merged[name]) for name, w in start.state_dict().items())
        torch.manual_seed(noise)  # what another rank drew
        M.adapt(start, settings, CPU)
        found.append(start.state_dict())
        trained = {name for name, param in start.named_parameters() if param.requires_grad}
        assert trained and all("lora_" in name for name in trained)
    assert all(map(torch.equal, found[0].values(), found[1].values()))


@each_script
def test_queries_are_strings_or_have_a_prompt(M):
    assert [M.prompt_of(query) for query in ("a", {"prompt": "b"})] == ["a", "b"]
    for query in ({"question": "x"}, 7, {"prompt": 7}):
        assert "with a string `prompt`, not" in refused(M.prompt_of, query)


@each_script
@pytest.mark.parametrize("adapted", [False, True])
def test_a_model_given_as_reference_is_what_the_policy_stays_near_to(M, adapted, monkeypatch):
    scripted(monkeypatch, M)
    calls, changes = recorded(monkeypatch, M), dict(lora_rank=2, qat=False) if adapted else {}
    other = policy(M)
    add_noise(other, 0.05)
    before = state(other)
    args = M.Settings(**{**SMALL, **changes, "kl_beta": 0.1, "temperature": 0.7})
    own = TRAINERS[M](model=policy(M, **changes), ref_model=other, args=args, tokenizer=BYTES)
    for step in range(2):
        assert take(own, QUERIES, lengths_score, step)["kl"] > 1e-3
        batch = calls.pop()[1]
        assert (batch.reference - M.token_logps(other, batch, 0.7)[0]).abs().max() < 1e-12
    assert all(map(torch.equal, before, state(other)))
    network = policy(M)  # the policy itself as reference: as it is now
    own = TRAINERS[M](
        model=network, ref_model=network, args=M.Settings(**SMALL, kl_beta=0.1), tokenizer=BYTES
    )
    kls = [take(own, QUERIES, lengths_score, step)["kl"] for step in range(2)]
    assert kls[0] == 0 < kls[1]


@each_script
def test_quantization_aware_training_samples_and_learns_by_quantized_weights(M, monkeypatch):
    scripted(monkeypatch, M)
    calls, own, sampled, original = (
        recorded(monkeypatch, M),
        trainer(M, mini_batches=2),
        [],
        M.generate,
    )
    monkeypatch.setattr(
        M,
        "generate",
        lambda *given, **more: sampled.append(state(given[0])) or original(*given, **more),
    )
    start, twin = state(own.network), copy.deepcopy(own.network)
    take(own, QUERIES, lengths_score, multiplier=0.0, qat=True)
    assert all(map(torch.equal, start, state(own.network)))  # the weights themselves, bit for bit
    for logps, batch in calls:
        with M.quantized(twin, own.table):
            expected = M.token_logps(twin, batch, 1.0)[0]
            assert furthest(sampled[0], state(twin)) == 0
        assert torch.equal(logps, batch.old) and (logps - expected).abs().max() < 1e-12
        assert (M.token_logps(twin, batch, 1.0)[0] - logps).abs().max() > 1e-4


# ------------------------------------------------------------------------------------------------- programmatic use
@each_script
def test_use_as_in_the_first_seed(M, monkeypatch, float32):
    config = getattr(M, {G: "GRPOConfig", S: "GSPOConfig"}[M])(
        learning_rate=0.02,
        left_clip_range=0.1,
        right_clip_range=0.2,
        group_size=5,
        mini_batches=1,
        max_new_tokens=2,
    )
    assert isinstance(config, M.Settings) and config.group_size == 5
    own = TRAINERS[M](policy(M), BYTES, config)
    rates = [g["lr"] for opt in own.optimizers for g in opt.param_groups]
    assert rates == pytest.approx([0.02] * len(rates))
    start, rewarded, seen, original = state(own.network), [], [], M.generate
    monkeypatch.setattr(
        M, "generate", lambda *given, **more: seen.append(given[5]) or original(*given, **more)
    )

    def reward_function(queries, texts):
        rewarded.append((queries, texts))
        return torch.rand(len(texts))

    assert len(clips_of(own.train_step(["12", "345"], reward_function))) == 1
    assert rewarded[0][0] == ["12"] * 5 + ["345"] * 5 and len(rewarded[0][1]) == 10
    assert furthest(start, state(own.network)) == pytest.approx(0.02, rel=0.1)  # AdamW's first step
    own.train_step(["12", "345"], reward_function)
    assert rewarded[1][0] == rewarded[0][0] and rewarded[1][1] != rewarded[0][1]
    assert len({*seen[0], *seen[1]}) == 4  # not the same random numbers again


@each_script
def test_use_as_in_the_second_seed(M, monkeypatch):
    seen, asked = scripted(monkeypatch, M), []
    own = TRAINERS[M](
        model=policy(M),
        ref_model=policy(M),
        tokenizer=BYTES,
        train_dataset=QUERIES[:3],
        args=M.Settings(**{**SMALL, "iterations": 3, "prompts_per_step": 2}),
    )
    found = own.train(
        lambda queries, texts: asked.append(queries[::3]) or lengths_score(queries, texts)
    )
    assert asked == [["a", "bcd"], ["ef", "a"], ["bcd", "ef"]] and len(found) == 3
    assert [seed[1:] for seed in seen] == [
        (step, number) for step in range(3) for number in range(2)
    ]


@each_script
def test_use_as_in_trl(M, monkeypatch):
    """reward_funcs: one or more, called with prompts, completions and the columns of dict rows; their sum counts."""
    scripted(monkeypatch, M)
    rows = [{"prompt": query, "answer": str(number)} for number, query in enumerate(QUERIES)]
    calls = []

    def first(completions, **columns):
        calls.append(columns)
        return [float(len(text)) for text in completions]

    def second(prompts, completions, answer):
        return [10.0 * int(number) for number in answer]

    own = TRAINERS[M](
        model=policy(M),
        tokenizer=BYTES,
        train_dataset=rows,
        reward_funcs=[first, second],
        args=M.Settings(**{**SMALL, "iterations": 1}),
    )
    [metrics] = own.train()
    [columns] = calls
    seeds = [(own.settings.seed, 0, at) for at in range(4)]
    answers = own.sample(rows, 3, 1.0, seeds)
    assert columns == {
        "prompts": [query for query in QUERIES for _ in range(3)],
        "answer": [digit for digit in "0123" for _ in range(3)],
        "completion_ids": [answer.ids for answer in answers],
    }
    texts = [answer.text for answer in answers]
    assert metrics["reward"] == pytest.approx(sum(map(len, texts)) / 12 + 15.0, abs=1e-9)
    own = TRAINERS[M](
        policy(M), BYTES, own.settings, reward_funcs=first
    )  # one, and queries that are strings
    assert own.train_step(QUERIES)["reward"] == pytest.approx(sum(map(len, texts)) / 12, abs=1e-9)
    assert set(calls[-1]) == {"prompts", "completion_ids"}
    own = TRAINERS[M](policy(M), BYTES, own.settings, reward_funcs=[first, lambda **columns: [1.0]])
    assert refused(own.train_step, QUERIES).startswith(
        "reward <lambda>: must return a list of 12 numbers (None: does not apply), not [1.0]"
    )


@each_script
def test_several_rewards_are_weighted_and_logged_by_name(M, monkeypatch):
    """None leaves a function out of an answer's total and of its mean; a missing column is None."""
    scripted(monkeypatch, M)
    rows = [{"prompt": query, "answer": str(number)} for number, query in enumerate(QUERIES)]
    rows[2]["level"] = 7

    def size(completions):
        return [len(text) for text in completions]

    def leveled(answer, level):
        return [
            None if hard is None else hard + int(digit)
            for digit, hard in zip(answer, level, strict=True)
        ]

    async def level(prompts, **columns):
        assert columns.keys() == {"completions", "completion_ids", "answer", "level"}
        return torch.zeros(len(prompts)) + 2

    functions = [size, leveled, level, lambda prompts: [None] * len(prompts)]
    words = dict(args=M.Settings(**SMALL), reward_funcs=functions)
    own = TRAINERS[M](policy(M), BYTES, reward_weights=[1, 0.5, -1, 3], **words)
    metrics = own.train_step(rows)
    means = {name: value for name, value in metrics.items() if name.startswith("rewards/")}
    assert means == {
        "rewards/size": means["rewards/size"],
        "rewards/leveled": 9,
        "rewards/level": 2,
    }
    assert metrics["reward"] == pytest.approx(means["rewards/size"] + 0.5 * 9 / 4 - 2, abs=1e-9)
    with pytest.raises(M.UserError, match=r"reward_weights=\[1\]: must be 4 numbers"):
        TRAINERS[M](policy(M), BYTES, reward_weights=[1], **words).train_step(rows)
    unmarked = TRAINERS[M](policy(M), BYTES, words["args"], reward_funcs=functions[3:])
    logged = []
    unmarked.log = logged.append
    assert unmarked.train_step(rows)["reward"] == 0
    assert logged == ["reward: 12 answers got None from each function; they count 0"]
    # A rank without a problem, of which the others have some.
    exam = M.Exam([], M.named_rewards(functions))
    assert own.score([], exam.rewards).tolist() == []
    right, values = exam.marks(own, [], 8)
    assert right.shape == (0, 8) and values.shape == (4, 0, 8)
    answers = [SimpleNamespace(rewards={"a": a, "b": 5.0}, reward=6.0) for a in (1.0, 0.9, None)]
    rewards = [M.Reward("a"), M.Reward("b")]
    assert [M.is_right(answer, rewards) for answer in answers] == [True, False, False]


@each_script
def test_training_raises_the_reward(M, float32, monkeypatch):
    """Two bytes, whatever the prompt: from a network that knows nothing, above half of them soon are small letters."""
    monkeypatch.setattr(M, "ADAM_EPS", 1e-8)
    own = trainer(
        M,
        policy(M, layer_pattern="a"),
        prompts_per_step=8,
        group_size=8,
        max_new_tokens=2,
        mini_batches=2,
        learning_rate=0.03,
        iterations=20,
        **{G: {}, S: dict(left_clip_range=0.003, right_clip_range=0.004)}[M],
    )
    own.dataset = [str(number) for number in range(8)]
    rewards = [
        step["reward"]
        for step in own.train(
            lambda queries, texts: [
                sum(c in "abcdefghijklmnopqrstuvwxyz" for c in text) / 2 for text in texts
            ]
        )
    ]
    assert statistics.mean(rewards[:2]) < 0.25 and statistics.mean(rewards[-2:]) > 0.5


@each_script
def test_intervals_of_shares_end_at_0_and_1_and_stand_in_a_table(M):
    greedy, sampled = torch.tensor([1.0] * 39 + [0.0]), torch.tensor([0.0] * 39 + [1.0])
    found = M.score_intervals({"greedy": greedy, "pass8": sampled})
    assert found["n"] == 40 and found["greedy"][0] == pytest.approx(0.975)
    assert 0.9 < found["greedy"][1] < 0.975 and found["greedy"][2] == 1
    assert found["pass8"][0] == pytest.approx(0.025) and found["pass8"][1] == 0
    gain = {"greedy": [0.1, -0.05, 0.25]}
    long = {"greedy": [-12345.6789] * 3}
    table = M.score_table({"a name of thirty letters, or so": long, "gain": gain}, gain)
    assert "or so  " in table and "]  " in table  # columns do not touch
    lines = M.score_table({"before": found, "gain": gain}, gain).splitlines()
    assert [line.split() for line in lines] == [
        ["before", "gain"],
        ["greedy", "0.9750", "[0.9260,", "1.0000]", "0.1000", "[-0.0500,", "0.2500]"],
    ]
