"""PPO: advantages, losses, divergences, values against closed forms; a trainer's updates, its faults.

Everything but ranks and generation is float64 with an independent reference.
"""

from __future__ import annotations

import copy
import functools
import math
import random
import statistics
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from test_objective import (
    ALONE,
    ASSISTANT,
    BYTES,
    CPU,
    END,
    QUERIES,
    Table,
    answers_of,
    by,
    clips_of,
    compare_ranks,
    furthest,
    lengths_score,
    on_ranks,
    padded,
    report_clips,
    rows_of,
    scripted,
    state,
    take,
    three_steps,
    with_logps,
)

import train_grpo as G
import train_ppo as P
from conftest import refusal

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.usefixtures("one_thread", "default_dtype")


# -------------------------------------------------------------------------------------------- advantages and rewards
def double_sum(rewards, values, gamma, lam):
    """A_t = sum over l of (gamma lambda)^l d_{t+l}, d_t = r_t + gamma V_{t+1} - V_t, V after the last 0."""
    errors = [
        r + gamma * after - v
        for r, v, after in zip(rewards, values, [*values[1:], 0.0], strict=True)
    ]
    return [
        sum((gamma * lam) ** (at - begin) * errors[at] for at in range(begin, len(errors)))
        for begin in range(len(errors))
    ]


@pytest.mark.parametrize("seed", range(6))
def test_advantages_are_the_double_sum(seed):
    """Of random masks, with holes too: only the tokens of the mask are there."""
    generator = torch.Generator().manual_seed(seed)
    rewards, values = (torch.randn(7, 11, generator=generator) for _ in range(2))
    mask = torch.rand(7, 11, generator=generator) < (0.3, 0.6, 0.9)[seed % 3]
    if seed > 2:  # responses as they are: one piece, behind a prompt
        begin, end = (
            torch.randint(0, 5, (7, 1), generator=generator),
            torch.randint(6, 12, (7, 1), generator=generator),
        )
        mask = (torch.arange(11) >= begin) & (torch.arange(11) < end)
    for gamma, lam in ((1.0, 0.95), (0.9, 0.7), (1.0, 1.0), (0.99, 0.0), (0.0, 1.0)):
        found = P.advantage_estimates(rewards, values, mask, gamma, lam)
        assert torch.equal(found != 0, mask)
        for row in range(7):
            own = mask[row]
            expected = double_sum(rewards[row, own].tolist(), values[row, own].tolist(), gamma, lam)
            assert (
                (found[row, own] - torch.tensor(expected)).abs().max() < 1e-12
                if own.any()
                else True
            )


def test_the_score_lands_on_the_last_token_and_the_divergence_on_each():
    """Of three responses behind prompts of 2, 0 and 1 tokens, one of a single token; by hand."""
    mask = torch.tensor([[0, 0, 1, 1, 1, 0], [1, 0, 0, 0, 0, 0], [0, 1, 1, 1, 1, 1]]) > 0
    divergence = torch.arange(18.0).view(3, 6) / 10
    found = P.shaped_rewards(torch.tensor([[5.0], [-2.0], [0.25]]), divergence, mask, 0.1)
    expected = [
        [0, 0, -0.02, -0.03, 5 - 0.04, 0],
        [-2 - 0.06, 0, 0, 0, 0, 0],
        [0, -0.13, -0.14, -0.15, -0.16, 0.25 - 0.17],
    ]
    assert (found - torch.tensor(expected)).abs().max() < 1e-15


def test_both_estimates_have_the_divergence_as_their_mean():
    """k1 and k3 by the definitions, and their means over a whole distribution: sum of p log(p / q)."""
    p, q = (
        torch.randn(9, generator=torch.Generator().manual_seed(seed)).softmax(0) for seed in (1, 2)
    )
    mask = torch.ones(1, 9) > 0
    k1, k3 = P.divergences(p.log()[None], q.log()[None], mask)
    x = p.log() - q.log()
    assert (k1[0] - x).abs().max() < 1e-15 and (k3[0] - ((-x).exp() - 1 + x)).abs().max() < 1e-14
    exact = (p * (p / q).log()).sum().item()
    assert (
        (p * k1[0]).sum().item()
        == pytest.approx(exact, abs=1e-14)
        == pytest.approx((p * k3[0]).sum().item())
    )
    assert k3.min() >= 0 > k1.min()
    assert all(each.abs().max() == 0 for each in P.divergences(p.log()[None], q.log()[None], ~mask))


def test_the_coefficient_is_steered_to_the_target():
    """1909.08593: e = clip(KL / target - 1, -0.2, 0.2), beta (1 + 0.1 e)."""
    for divergence, factor in (
        (6.0, 1.0),
        (6.6, 1.01),
        (5.4, 0.99),
        (60.0, 1.02),
        (0.0, 0.98),
        (-3.0, 0.98),
    ):
        assert P.steered(0.05, divergence, 6.0) == pytest.approx(0.05 * factor, abs=1e-15)
    assert P.steered(0.05, 60.0, 0.0) == 0.05


def test_moments_are_those_of_a_sample():
    values = (
        torch.randn(6, 5, generator=torch.Generator().manual_seed(0)) + 1e6
    )  # far from 0: two passes
    mask = torch.rand(6, 5, generator=torch.Generator().manual_seed(1)) < 0.5
    chosen = values[mask].tolist()
    mean, variance = P.moments(values[mask], ALONE)
    assert mean.item() == pytest.approx(statistics.mean(chosen), abs=1e-9)
    assert variance.item() == pytest.approx(statistics.variance(chosen), rel=1e-9)
    assert P.moments(values[0, :1], ALONE)[1] == 0  # of one token


# ---------------------------------------------------------------------------------------------------------------- loss
LENGTHS = (5, 3, 1, 6, 2)
BAND = dict(left_clip_range=0.1, right_clip_range=0.15)


def case(seed, width=6, pad=0.0):
    """A batch for ppo_loss of ragged rows, with log-probabilities and values near the rollout's."""
    rng = random.Random(seed)
    size = {
        "logps": 0.2,
        "values": 0.4,
        "old_values": 0.5,
        "returns": 0.8,
        "advantages": 1.0,
        "sampled": 0.01,
    }
    old = [[-rng.uniform(0.1, 4) for _ in range(length)] for length in LENGTHS]
    rows = {name: [[rng.gauss(0, wide) for _ in row] for row in old] for name, wide in size.items()}
    for name in ("logps", "sampled"):
        rows[name] = [
            [a + b for a, b in zip(*pair, strict=True)]
            for pair in zip(old, rows[name], strict=True)
        ]
    rows["values"] = [
        [a + b for a, b in zip(*pair, strict=True)]
        for pair in zip(rows["old_values"], rows["values"], strict=True)
    ]
    parts = {name: padded(row, width, pad) for name, row in {**rows, "old": old}.items()}
    mask = padded([[1.0] * length for length in LENGTHS], width, 0.0) > 0
    return SimpleNamespace(
        rows={**rows, "old": old},
        mask=mask,
        batch=SimpleNamespace(
            mask=mask,
            old=parts["old"],
            values=parts["old_values"],
            returns=parts["returns"],
            advantages=parts["advantages"],
            sampled=parts["sampled"],
        ),
        logps=parts["logps"].requires_grad_(),
        values=parts["values"].requires_grad_(),
    )


def measured(made, settings):
    """Sum of the losses, its gradients by log-probabilities and values, and the seven sums."""
    losses, parts = P.ppo_loss(made.logps, made.values, made.batch, settings)
    assert [*parts] == [*P.METRICS[3:]]
    assert not any(part.requires_grad for part in parts.values())
    return (
        losses.sum().detach(),
        *torch.autograd.grad(losses.sum(), (made.logps, made.values)),
        torch.stack([part.sum() for part in parts.values()]),
    )


def written_out(rows, s):
    """The same in loops over Python's floats."""
    loss, by_logp, by_value, sums = 0.0, [], [], [0.0] * 7
    low, high, band = 1 - s.left_clip_range, 1 + s.right_clip_range, P.VALUE_CLIP_RANGE
    for at, old_row in enumerate(rows["old"]):
        by_logp.append([])
        by_value.append([])
        for t, old in enumerate(old_row):
            now, A, V, V_old, R = (
                rows[name][at][t]
                for name in ("logps", "advantages", "values", "old_values", "returns")
            )
            r = math.exp(now - old)
            policy = max(-A * r, -A * max(low, min(high, r)))
            stopped = r > high if A > 0 else r < low
            near = V_old + max(-band, min(band, V - V_old))
            value = 0.5 * max((V - R) ** 2, (near - R) ** 2)
            taken = (near - R) ** 2 > (V - R) ** 2
            loss += policy + P.VALUE_COEF * value
            by_logp[-1].append(0.0 if stopped else -A * r)
            by_value[-1].append(0.0 if taken else P.VALUE_COEF * (V - R))
            for name, number in enumerate(
                (
                    policy,
                    value,
                    stopped,
                    not low <= r <= high,
                    taken,
                    (now - old) ** 2 / 2,
                    abs(old - rows["sampled"][at][t]),
                )
            ):
                sums[name] += number
    return loss, by_logp, by_value, sums


@pytest.mark.parametrize(
    ("changes", "band"),
    [(BAND, 0.2), (BAND, math.inf), ({}, 0.2)],
    ids=["narrow", "values free", "defaults"],
)
@pytest.mark.parametrize("seed", range(3))
def test_the_loss_is_its_closed_form(changes, band, seed, monkeypatch):
    monkeypatch.setattr(P, "VALUE_CLIP_RANGE", band)
    monkeypatch.setattr(P, "VALUE_COEF", 0.3)
    settings, made = P.Settings(**changes), case(seed)
    loss, by_logp, by_value, sums = measured(made, settings)
    expected, own_logp, own_value, own_sums = written_out(made.rows, settings)
    assert abs(loss - expected) < 1e-10 and (sums - torch.tensor(own_sums)).abs().max() < 1e-10
    assert (by_logp - padded(own_logp, 6, 0.0)).abs().max() < 1e-10
    assert (by_value - padded(own_value, 6, 0.0)).abs().max() < 1e-10
    if changes is BAND and band < 1:
        assert 0 < own_sums[2] < own_sums[3] < sum(LENGTHS) and 0 < own_sums[4] < sum(LENGTHS)
    for name, slopes in (
        ("logps", by_logp),
        ("values", by_value),
    ):  # finite differences, of the script's own value
        for at in made.mask.nonzero().tolist():
            moved = []
            for step in (1e-6, -1e-6):
                near = copy.copy(made)
                setattr(near, name, getattr(made, name).detach().clone())
                getattr(near, name)[tuple(at)] += step
                getattr(near, name).requires_grad_()
                moved.append(measured(near, settings)[0])
            assert abs((moved[0] - moved[1]) / 2e-6 - slopes[tuple(at)]) < 1e-8


@pytest.mark.parametrize("pad", [-7.5, 0.0, 3.0])
def test_the_content_and_the_width_of_padding_change_nothing(pad):
    settings, expected = P.Settings(**BAND), measured(case(0), P.Settings(**BAND))
    for width in (6, 7, 11):
        made = case(0, width, pad)
        found = measured(made, settings)
        assert abs(found[0] - expected[0]) < 1e-14 and (found[3] - expected[3]).abs().max() < 1e-13
        for one, other in zip(found[1:3], expected[1:3], strict=True):
            assert (one[:, :6] - other).abs().max() < 1e-15 and torch.equal(
                one[:, 6:], torch.zeros(5, width - 6)
            )


def test_the_defaults_are_those_of_the_field():
    s = P.Settings
    assert (P.GAMMA, s.gae_lambda) == (1.0, 0.95)
    assert (s.left_clip_range, s.right_clip_range, P.VALUE_CLIP_RANGE) == (0.2, 0.2, 0.2)
    assert (
        s.group_size == G.Settings.group_size and s.prompts_per_step == G.Settings.prompts_per_step
    )


# ------------------------------------------------------------------------------------------------ values, and a trainer
SMALL = dict(
    prompts_per_step=4,
    group_size=3,
    max_new_tokens=6,
    mini_batches=1,
    epochs=1,
    learning_rate=0.01,
    grad_clip_norm=0.0,
    kl_beta=0.0,
    temperature=1.0,
)
UNEQUAL = {"gen_tok_s", "train_tok_s", "clips"}


@pytest.fixture(autouse=True)
def smooth_adamw(monkeypatch):
    """So large an epsilon that rounding in a gradient near zero does not decide the sign of its update."""
    monkeypatch.setattr(P, "ADAM_EPS", 1e-4)
    report_clips(P, monkeypatch)


def policy(layers="g a", dim=16, lora_rank=0):
    """A small network, random in every weight but a fresh adapter's."""
    norms = " ".join("rms" for _ in layers.split())
    shape = dict(model_dim=dim, num_heads=2, num_kv_heads=2, attn_window=1 << 20)
    torch.manual_seed(1337)
    network = P.GPT(P.GPTConfig(264, 1, layers, norms, **shape, embed_init_std=0.02))
    P.adapt(network, P.Settings(lora_rank=lora_rank), CPU)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, param in network.named_parameters():
            if not name.endswith("lora_b"):
                param.add_(0.1 * torch.randn(param.shape, generator=generator))
    return network


def valued(seed=3, **changes):
    """Such a network with a value head that says something."""
    network = policy(**changes)
    P.add_value_head(network)
    torch.nn.init.normal_(network.w_value, std=0.3, generator=torch.Generator().manual_seed(seed))
    return network


def trainer(network=None, **changes):
    more = {
        name: changes.pop(name)
        for name in ("ref_model", "reward_model", "runtime")
        if name in changes
    }
    network = policy() if network is None else network
    return P.PPOTrainer(network, BYTES, P.Settings(**{**SMALL, **changes}), **more)


def buffered(own, reward=lengths_score, step=0):
    """The batches of a rollout of QUERIES as the first update finds them, what was measured, the rollout."""
    own.reward_funcs = [by(reward)]
    rollout = own.rollout(QUERIES, step)
    minis, found = own.experience(rollout)
    return [batch for mini in minis for batch in mini], found, rollout


def test_values_are_of_the_state_that_draws_the_token(monkeypatch):
    """A table's features are the rows of the token before, so a value that is shifted by one is another's."""
    samples = {
        0: ([10, 11, END], True),
        1: ([20, END], True),
        2: ([30, 31, 32, 33, 34, 35], False),
        3: ([END], True),
    }
    scripted(monkeypatch, P, lambda seed, s: samples[s])
    table, rewards = Table(), [1.0, 0.0, 0.5, 0.25]
    table.w_value = torch.nn.Parameter(
        torch.randn(264, generator=torch.Generator().manual_seed(1)) / 16
    )
    monkeypatch.setattr(P, "GAMMA", 0.9)
    own = trainer(table, group_size=4, gae_lambda=0.7)
    own.reward_funcs = [lambda **columns: rewards]
    rollout = own.rollout(["xyz"], 0)
    [[batch]], found = own.experience(rollout)
    every = []
    for (ids, _), score in zip(samples.values(), rewards, strict=True):
        [at] = [
            row
            for row, targets in enumerate(batch.targets)
            if targets[targets >= 0].tolist() == ids
        ]
        values = (table.embed[[ASSISTANT, *ids[:-1]]] @ table.w_value).tolist()
        advantages = double_sum(
            [*[0.0] * (len(ids) - 1), score], values, 0.9, 0.7
        )  # what was cut off ends there too
        own_mask = batch.mask[at]
        assert batch.values[at, own_mask].tolist() == pytest.approx(values, abs=1e-12)
        assert batch.values[at, ~own_mask].abs().sum() == 0
        returns = [a + v for a, v in zip(advantages, values, strict=True)]
        assert batch.returns[at, own_mask].tolist() == pytest.approx(returns, abs=1e-12)
        every.append((at, advantages, returns))
    flat = [a for _, advantages, _ in every for a in advantages]
    for at, advantages, _ in every:  # whitened over all tokens, of a sample
        expected = [
            (a - statistics.mean(flat)) / (statistics.variance(flat) + 1e-8) ** 0.5
            for a in advantages
        ]
        assert batch.advantages[at, batch.mask[at]].tolist() == pytest.approx(expected, abs=1e-12)
    spread = statistics.variance([r for _, _, returns in every for r in returns])
    assert found == {
        "explained_variance": pytest.approx(1 - statistics.variance(flat) / spread, abs=1e-12)
    }


def test_a_constant_critic_gives_the_plain_policy_gradient(monkeypatch):
    """lambda = gamma = 1, one update: the mean over tokens of whitened reward times grad log p, row by row by hand."""
    samples = {
        0: ([10, 11, END], True),
        1: ([20, END], True),
        2: ([30, 31, 32, 33], False),
        3: ([END], True),
    }
    scripted(monkeypatch, P, lambda seed, s: samples[s])
    rewards, table = [1.0, 0.0, 0.5, 0.25], Table()
    own = trainer(table, group_size=4, temperature=0.8, gae_lambda=1.0)
    start = table.embed.detach().clone()
    metrics = take(own, ["xyz"], lambda queries, texts: rewards)
    flat = [reward for (ids, _), reward in zip(samples.values(), rewards, strict=True) for _ in ids]
    mean, spread = statistics.mean(flat), (statistics.variance(flat) + 1e-8) ** 0.5
    probabilities, expected = (start / 0.8).softmax(-1), torch.zeros_like(start)
    for (ids, _), reward in zip(samples.values(), rewards, strict=True):
        for before, token in zip([ASSISTANT, *ids[:-1]], ids, strict=True):
            slope = (F.one_hot(torch.tensor(token), 264) - probabilities[before]) / 0.8
            expected[before] -= (reward - mean) / spread / len(flat) * slope
    assert (table.embed.grad - expected).abs().max() < 1e-12
    assert expected.abs().sum(1).nonzero().flatten().tolist() == [10, 11, 20, 30, 31, 32, ASSISTANT]
    # the head's: VALUE_COEF times the mean of (V - R) f, with V = 0 and R the reward
    head = sum(
        (
            0.1 * -reward / len(flat) * start[before]
            for (ids, _), reward in zip(samples.values(), rewards, strict=True)
            for before in [ASSISTANT, *ids[:-1]]
        ),
        torch.zeros(264),
    )
    assert (table.w_value.grad - head).abs().max() < 1e-12
    both = (expected.square().sum() + head.square().sum()).sqrt().item()
    assert metrics["grad_norm"] == pytest.approx(both, abs=1e-12)
    assert metrics["approx_kl"] == 0 and clips_of(metrics) == [[0.0, 0.0]]
    assert metrics["value_loss"] == pytest.approx(
        statistics.mean(r * r / 2 for r in flat), abs=1e-12
    )
    assert abs(metrics["policy_loss"]) < 1e-12  # minus the mean of the whitened advantages


def test_an_entropy_bonus_raises_the_mean_over_tokens(monkeypatch):
    """Its gradient, beside that of the same step without it, is that of the entropies at TEMPERATURE."""
    scripted(monkeypatch, P)
    slopes = []
    for beta in (0.0, 0.3):
        table = Table()
        own = trainer(table, entropy_beta=beta, temperature=0.5)
        take(own, QUERIES, lengths_score, multiplier=0.0)
        slopes.append(table.embed.grad)
    plain = table.embed.detach().clone().requires_grad_()
    answers = own.sample(QUERIES, 3, 0.5, [(own.settings.seed, 0, at) for at in range(4)])
    before = [token for answer in answers for token in [ASSISTANT, *answer.ids[:-1]]]
    logps = (plain[before] / 0.5).log_softmax(-1)
    (logps.exp() * logps).sum(1).mean().backward()
    assert (slopes[1] - slopes[0] - 0.3 * plain.grad).abs().max() < 1e-12 < plain.grad.abs().max()


def test_what_stands_in_the_padding_never_reaches_a_value():
    own = trainer(valued())
    [batch] = P.make_batches(answers_of(P, with_logps(rows_of(2, 5))), CPU, 1 << 30)
    expected = own.forward(batch)
    for ids, mask, values in zip(
        batch.ids, batch.mask, expected[1], strict=True
    ):  # each alone, without padding
        end = int(mask.nonzero()[-1]) + 1
        alone = (own.network.features(ids[None, :end]) @ own.network.w_value)[0]
        assert (alone[mask[:end]] - values[mask]).abs().max() < 1e-12 and values[
            ~mask
        ].abs().sum() == 0
    after = batch.mask.flip(1).cumsum(1).flip(1) == 0
    batch.ids = torch.where(after, torch.randint(1, 264, batch.ids.shape), batch.ids)
    for one, other in zip(own.forward(batch), expected, strict=True):
        assert torch.equal(one, other) and torch.equal(one != 0, batch.mask)


def test_micro_batches_add_up_to_one_batch(monkeypatch):
    scripted(monkeypatch, P)
    found = []
    for tokens in (1 << 20, 40, 1):
        own = trainer(
            valued(),
            mini_batches=2,
            epochs=2,
            micro_batch_tokens=tokens,
            kl_beta=0.1,
        )
        for step in range(2):
            metrics = take(own, QUERIES, lengths_score, step)
        grads = [param.grad for param in own.trained.values()]
        found.append(
            (
                state(own.network),
                grads,
                {name: value for name, value in metrics.items() if name not in UNEQUAL},
            )
        )
    assert (
        found[0][2]["kl"] != 0
        and found[0][2]["clip_outside"] > 0
        and found[0][2]["value_clip"] >= 0
    )
    for split in found[1:]:
        assert furthest(split[0], found[0][0]) < 1e-9 and furthest(split[1], found[0][1]) < 1e-12
        assert split[2] == pytest.approx(found[0][2], abs=1e-9)


def test_the_first_update_is_where_the_rollout_was_bit_for_bit(monkeypatch, float32):
    scripted(monkeypatch, P)
    own = trainer(valued(), mini_batches=2, micro_batch_tokens=60)
    seen, original = [], P.ppo_loss
    monkeypatch.setattr(
        P,
        "ppo_loss",
        lambda logps, values, batch, settings: (
            seen.append(torch.equal(logps, batch.old) and torch.equal(values, batch.values)),
            original(logps, values, batch, settings),
        )[1],
    )
    metrics = take(own, QUERIES, lengths_score)
    assert clips_of(metrics)[0] == [0.0, 0.0] and seen[0] and not seen[-1] and len(seen) > 2
    seen.clear()
    metrics = take(own, QUERIES, lengths_score, multiplier=0.0)
    assert all(seen) and metrics["approx_kl"] == metrics["value_clip"] == 0


def test_metrics_of_divergences_are_honest_and_steer(monkeypatch):
    """Means over the tokens of k1 and k3 under the policy that drew them; KL_BETA by the rule; rewards shaped by it."""
    scripted(monkeypatch, P)
    other = policy()
    with torch.no_grad():
        for param in other.parameters():
            param.add_(0.05 * torch.randn(param.shape, generator=torch.Generator().manual_seed(9)))
    for shaping in ("k1", "k3"):
        own = trainer(
            valued(),
            ref_model=other,
            kl_beta=0.3,
            kl_shaping=shaping,
            kl_target=0.01,
            gae_lambda=1.0,
        )
        batches, found, rollout = buffered(own)
        [batch] = batches
        apart = (batch.old - P.token_logps(other, batch, 1.0)[0].detach())[batch.mask]
        k3 = (-apart).exp() - 1 + apart
        assert (
            found["kl"] == pytest.approx(apart.mean().item(), abs=1e-12) and found["kl_beta"] == 0.3
        )
        assert (
            found["kl_k3"] == pytest.approx(k3.mean().item(), abs=1e-12) and found["kl_k3"] > 1e-4
        )
        beta = P.steered(0.3, found["kl"] * rollout.metrics["length"], 0.01)
        assert beta != 0.3 and buffered(own, step=1)[1]["kl_beta"] == beta == pytest.approx(
            0.3, rel=0.0201
        )
        # at lambda = gamma = 1 the first token's return is the score less 0.3 times what the answer cost
        scores = {tuple(answer.ids): answer.advantage for answer in rollout.answers[0]}
        for at, mask in enumerate(batch.mask):
            span = slice(int(mask.nonzero()[0]), int(mask.nonzero()[-1]) + 1)
            cost = (
                {"k1": apart, "k3": k3}[shaping][batch.mask[:at].sum() : batch.mask[: at + 1].sum()]
                .sum()
                .item()
            )
            score = scores[tuple(batch.targets[at, span].tolist())]
            assert batch.returns[at, span.start].item() == pytest.approx(
                score - 0.3 * cost, abs=1e-12
            )
    assert "kl" not in buffered(trainer(kl_beta=0.0))[1]  # there is no reference


def test_values_are_learned(monkeypatch):
    """Of a policy that stays, whose samples are two, worth 1 and -1 from their first tokens on."""
    samples = {
        0: ([10, 11, 12, END], True),
        1: ([20, 21, 22, END], True),
        2: ([10, 11, 12, END], True),
    }
    scripted(monkeypatch, P, lambda seed, s: samples[s])
    monkeypatch.setattr(P, "VALUE_CLIP_RANGE", math.inf)
    monkeypatch.setattr(P, "VALUE_COEF", 1.0)
    own = trainer(
        epochs=4,
        learning_rate=0.01,
        gae_lambda=1.0,
        left_clip_range=0.0,
        right_clip_range=0.0,
    )
    found = [
        take(own, QUERIES, lambda queries, texts: [1.0, -1.0, 1.0] * 4, step) for step in range(15)
    ]
    assert found[0]["explained_variance"] == 0 and found[-1]["explained_variance"] > 0.6
    assert found[-1]["value_loss"] < 0.4 * found[0]["value_loss"]
    batches, *_ = buffered(own, lambda queries, texts: [1.0, -1.0, 1.0] * 4)
    for batch in batches:
        second = batch.values[batch.targets == 11].mean() - batch.values[batch.targets == 21].mean()
        assert second > 1


def test_the_value_head_of_a_start_goes_on_and_is_trained_beside_adapters(monkeypatch):
    network = valued()
    was = network.w_value.detach().clone()
    assert torch.equal(trainer(network).network.w_value, was)
    own = trainer(valued(lora_rank=2), lora_rank=2, qat=False)
    scripted(monkeypatch, P)
    take(own, QUERIES, lengths_score)
    assert not torch.equal(own.network.w_value, was)  # adapters and the head, nothing else
    names = {name.rpartition(".")[2] for name in own.trained}
    assert names == {"lora_a", "lora_b", "w_value"}


# --------------------------------------------------------------------------------------------------------- reward model
def test_a_reward_model_scores_the_last_token_of_the_very_ids():
    judge, rows = valued(), [(prompt, response) for prompt, response, *_ in rows_of(4, 9)]
    expected = [
        (judge.features(torch.tensor([prompt + response]))[0, -1] @ judge.w_value).item()
        for prompt, response in rows
    ]
    rows = [SimpleNamespace(prompt=prompt, ids=response) for prompt, response in rows]
    for tokens in (1 << 30, 30, 1):
        assert P.answer_values(judge, rows, tokens).tolist() == pytest.approx(expected, abs=1e-12)
    assert P.answer_values(judge, [], 10).tolist() == []
    assert max(expected) - min(expected) > 0.1


def test_a_reward_model_takes_the_functions_place(monkeypatch):
    scripted(monkeypatch, P)
    judge = valued(4, dim=32)  # of another width
    before = state(judge)
    own = trainer(reward_model=judge)
    rollout = own.rollout(QUERIES, 0)
    found = [answer.advantage for mini in rollout.answers for answer in mini]
    answers = own.sample(QUERIES, 3, 1.0, [(own.settings.seed, 0, at) for at in range(4)])
    expected = P.answer_values(judge, answers, 1 << 30).tolist()
    assert found == pytest.approx(expected, abs=1e-12) and len(set(expected)) == 12
    assert rollout.metrics["reward"] == pytest.approx(statistics.mean(expected), abs=1e-9)
    take(own, QUERIES, None)
    assert all(map(torch.equal, before, state(judge)))
    problems = [{"prompt": query, "answer": "?"} for query in QUERIES]
    exam = P.JudgedExam(problems, P.load_rewards("exact"))
    found = exam.scores(own)["reward_model"]
    answers = own.sample(
        problems, 8, 1.0, [(own.settings.seed, P.EVAL_STEP, at) for at in range(4)]
    )
    own_scores = P.answer_values(judge, answers, 1 << 30).view(4, 8).mean(1)
    assert (found - own_scores).abs().max() < 1e-9


# ----------------------------------------------------------------------------------------------------- faults, settings


# The one line of the UserError that a call must raise.
refused = functools.partial(refusal, P.UserError, "")


def test_gradients_that_are_not_finite_move_no_weight(monkeypatch):
    scripted(monkeypatch, P)
    own = trainer()
    original, before = P.ppo_loss, state(own.network)
    for wrong in (math.nan, math.inf):
        with monkeypatch.context() as patch:
            patch.setattr(
                P,
                "ppo_loss",
                lambda logps, values, *given, wrong=wrong: original(logps, values * wrong, *given),
            )
            assert take(own, QUERIES, lengths_score, step=0)["bad"] == 1
        assert all(map(torch.equal, before, state(own.network)))
    take(own, QUERIES, lengths_score, step=1)
    assert 0 < furthest(before, state(own.network)) < 1


WRONG = [
    (
        dict(prompts_per_step=6, mini_batches=4),
        "PROMPTS_PER_STEP=6: must be a multiple of MINI_BATCHES x ranks = 4",
    ),
    (dict(temperature=0.0), "TEMPERATURE=0.0: must be a number from 0.01 to 100.0"),
    (dict(kl_beta=0.0, kl_target=6.0), "KL_TARGET=6.0: needs a KL_BETA above 0 to begin with"),
    (dict(gae_lambda=-0.1), "GAE_LAMBDA=-0.1: must be a number from 0.0 to 1.0"),
    (dict(kl_shaping="K1"), "KL_SHAPING='K1': must be one of k1, k3"),
]


@pytest.mark.parametrize(("changes", "said"), WRONG)
def test_settings_that_do_not_fit_are_refused_when_they_are_made(changes, said):
    assert refused(P.PPOConfig, **changes) == said


def test_one_sample_of_a_prompt_is_enough(monkeypatch):
    scripted(monkeypatch, P)
    own = trainer(group_size=1, mini_batches=2)
    before = state(own.network)
    assert (
        take(own, QUERIES, lengths_score)["grad_norm"] > 0
        and furthest(before, state(own.network)) > 1e-3
    )


def test_a_reward_model_that_is_not_finite_is_one_line(monkeypatch):
    scripted(monkeypatch, P)
    judge = valued()
    judge.w_value.data.fill_(math.inf)
    assert "REWARD_MODEL: gives a score that is not finite" in refused(
        trainer(reward_model=judge).train_step, QUERIES, None
    )


def test_use_in_a_program(monkeypatch, float32):
    config = P.PPOConfig(**{**SMALL, "iterations": 3, "prompts_per_step": 2, "kl_beta": 0.1})
    seen = scripted(monkeypatch, P)
    own = P.PPOTrainer(
        model=policy(), ref_model=policy(), args=config, tokenizer=BYTES, train_dataset=QUERIES[:3]
    )
    asked = []
    found = own.train(
        lambda queries, texts: asked.append(queries[::3]) or lengths_score(queries, texts)
    )
    assert asked == [["a", "bcd"], ["ef", "a"], ["bcd", "ef"]] and len(found) == 3
    assert [seed[1:] for seed in seen] == [
        (step, number) for step in range(3) for number in range(2)
    ]
    unrewarded = P.PPOTrainer(policy(), BYTES, config, train_dataset=QUERIES)
    assert "reward_funcs: none" in refused(unrewarded.train)
    judged = P.PPOTrainer(policy(), BYTES, config, reward_model=valued(), train_dataset=QUERIES[:3])
    assert len(judged.train()) == 3


# --------------------------------------------------------------------------------------------------------------- ranks
def test_two_ranks_are_one(float32, monkeypatch):
    loss, loss_of = P.ppo_loss, {}

    def ppo_loss(logps, values, batch, settings):
        return loss(logps * loss_of.get(id(settings), 1), values, batch, settings)

    monkeypatch.setattr(P, "ppo_loss", ppo_loss)

    def make(runtime):
        changes = dict(prompts_per_step=8, mini_batches=2, epochs=2, kl_beta=0.1, kl_target=0.5)
        return trainer(valued(), runtime=runtime, **changes)

    def work(own):
        return three_steps(own, lambda _, texts: [sum(map(ord, t)) % 3 > 0 for t in texts], loss_of)

    [one] = on_ranks(1, make, work)
    compare_ranks(one, on_ranks(2, make, work), 4, 1e-3)
