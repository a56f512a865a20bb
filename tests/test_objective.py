"""GRPO and GSPO: objectives against closed forms, rows and their log-probabilities; updates, ranks and
faults of the trainers of all three scripts.

Everything here is float64 with an independent reference, except where ranks and generation are the subject.
"""

import copy
import functools
import itertools
import math
import random
import re
import statistics
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from policies import (
    ASSISTANT,
    BAND,
    CPU,
    END,
    LENGTHS,
    MASK,
    QUERIES,
    SMALL,
    TRAINERS,
    G,
    P,
    S,
    Table,
    answers_of,
    furthest,
    lengths_score,
    padded,
    policy,
    sampled,
    scripted,
    state,
    take,
    trainer,
    wrap_loss,
)

from conftest import BYTES, refusal

ALONE = G.Runtime(0, 1, CPU, False)
each_script = pytest.mark.parametrize("M", [G, S], ids=["grpo", "gspo"])
each_trainer = pytest.mark.parametrize("M", TRAINERS, ids=["grpo", "gspo", "ppo"])
pytestmark = pytest.mark.usefixtures("default_dtype")


# ------------------------------------------------------------------------------------------- objectives: a second form
REWARDS = [[1.0, 0.0, 0.5, 0.0], [0.25, 1.0, 1.0, -1.0]]


def advantages_of(rewards, scale):
    """Return those of groups of rewards, in a row."""
    found = []
    for group in rewards:
        over = 1.0
        if scale != "none":
            over = statistics.stdev(group if scale == "group" else sum(rewards, [])) + 1e-4
        found += [(reward - statistics.mean(group)) / over for reward in group]
    return found


def case(slope):
    """Return log-probabilities (8, 6) of two groups of samples: old, now, the reference's, the sampler's;
    and advantages (8, 6), which grow along a sample by this slope.
    """
    generator = torch.Generator().manual_seed(0)
    old, *noise = torch.randn(4, 8, 6, generator=generator)
    sizes = {"logps": 0.15, "reference": 0.5, "sampled": 0.01}
    near = {name: old + sizes[name] * own for name, own in zip(sizes, noise, strict=True)}
    advantages = torch.tensor(advantages_of(REWARDS, "group"))[:, None]
    return {"old": old, **near, "advantages": advantages * (1 + slope * torch.arange(6))}


def written_out(rows, s, token_ratio):
    """Return the loss, its derivatives (8, 6) by log-probabilities, and the five sums, in loops.

    The mini-batch has 13 samples and 50 tokens in all, of which 20 are on each of 2 ranks.
    """
    low = 1 - s.left_clip_range
    high = 1 + s.right_clip_range
    limit = getattr(s, "ratio_limit", 0) or math.inf
    loss = 0.0
    sums = [0.0] * 5
    slopes = torch.zeros(8, 6)
    for row, length in enumerate(LENGTHS):
        parts = (part[row, :length].tolist() for part in rows.values())
        old, now, reference, drawn, advantages = parts
        delta = [p - q for p, q in zip(now, old, strict=True)]
        weight = {
            "sequence": 1 / 13 / length,
            "dapo": 1 / 50,
            "bnpo": 1 / 40,
            "dr_grpo": 1 / 13 / s.max_new_tokens,
        }[getattr(s, "reduction", "sequence")]
        for t, (p, A) in enumerate(zip(now, advantages, strict=True)):
            r = math.exp(delta[t] if token_ratio else sum(delta) / length)
            bounded = max(low, min(high, r))
            is_stopped = r > high if A > 0 else r < low or r > limit
            gain = min(min(r, limit) * A, bounded * A)
            slope = 0 if is_stopped else r * A
            if getattr(s, "loss", "clip") == "cispo":
                is_stopped = r != bounded
                gain = bounded * A * p
                slope = bounded * A
            x = reference[t] - p
            kl = math.exp(x) - x - 1
            loss += weight * (s.kl_beta * kl - gain)
            slopes[row, t] = weight * (s.kl_beta * (1 - math.exp(x)) - slope)
            parts = is_stopped, r != bounded, abs(delta[t]), abs(old[t] - drawn[t]), kl
            sums = [total + part for total, part in zip(sums, parts, strict=True)]
    return loss, slopes, torch.tensor(sums)


def measured(M, rows, settings, width=6, pad=0.0):
    """Return the script's loss, its gradient, and the five sums, of rows at a width."""
    batch = SimpleNamespace(**{name: padded(part, width, pad) for name, part in rows.items()})
    batch.mask = padded(MASK, width, False)
    logps = batch.logps.requires_grad_()
    losses, parts = M.policy_loss(logps, batch, settings)
    total = torch.tensor([13, 50, 20])
    given = (total[0],) if M is S else (total, settings, 2)
    loss = (losses * M.token_weights(batch.mask, *given)).sum()
    [slopes] = torch.autograd.grad(loss, logps)
    assert [*parts] == [*M.UPDATE_SUMS[3:], "kl"]
    assert not any(part.requires_grad for part in parts.values())
    return loss.item(), slopes, torch.stack([part.sum() for part in parts.values()])


OBJECTIVES = [
    (G, dict(reduction="sequence", ratio_limit=1.2, kl_beta=0.04)),
    (G, dict(reduction="dapo", ratio_limit=1.15)),
    (G, dict(reduction="bnpo", kl_beta=0.1)),
    (G, dict(reduction="dr_grpo", kl_beta=0.3)),
    (G, dict(loss="cispo", kl_beta=0.1)),
    (S, dict(kl_beta=0.2)),
    (S, dict(importance="token")),
]


@pytest.mark.parametrize(("width", "pad"), [(6, 0.0), (9, -7.5)])
@pytest.mark.parametrize(("M", "changes"), OBJECTIVES)
def test_objectives_are_their_closed_forms(M, changes, width, pad):
    settings = M.Settings(max_new_tokens=6, **BAND, **changes)
    has_token_ratio = M is G or "importance" in changes
    rows = case(0.1 * has_token_ratio)
    loss, slopes, sums = measured(M, rows, settings, width, pad)
    expected, by_hand, own_sums = written_out(rows, settings, token_ratio=M is G)
    assert abs(loss - expected) < 1e-10
    assert (slopes - padded(by_hand, width, 0.0)).abs().max() < 1e-10
    assert (sums - own_sums).abs().max() < 1e-10
    assert 0 < own_sums[0] <= own_sums[1] < sum(LENGTHS)


def test_the_defaults_are_the_papers():
    assert (G.Settings.left_clip_range, G.Settings.right_clip_range) == (0.2, 0.28)
    assert (S.Settings.left_clip_range, S.Settings.right_clip_range) == (3e-4, 4e-4)
    assert (P.Settings.left_clip_range, P.Settings.right_clip_range) == (0.2, 0.2)
    assert G.Settings.kl_beta == S.Settings.kl_beta == 0 and S.Settings.importance == "sequence"
    assert (P.GAMMA, P.Settings.gae_lambda, P.VALUE_CLIP_RANGE) == (1.0, 0.95, 0.2)
    assert G.Settings.reduction == "dapo"  # TRL's


@each_script
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_are_their_formula(M, scale):
    """Those of a group of one reward are exactly 0."""
    rewards = torch.tensor(REWARDS)
    found = M.group_advantages(rewards, scale, rewards.std())
    assert found.flatten().tolist() == pytest.approx(advantages_of(REWARDS, scale), abs=1e-12)
    for size, value in itertools.product((3, 7, 12), (0.1, 1 / 3, -1e6 / 3)):
        assert not M.group_advantages(torch.tensor([[value] * size]), scale, rewards.std()).any()
    # Equal sums of different parts differ in their last digits.
    sums = torch.tensor([[0.3, 0.1 + 0.2, 0.3], [0.3, 0.2, 0.3]], dtype=torch.float64)
    assert sums[0, 0] != sums[0, 1]
    assert M.group_advantages(sums, scale, rewards.std()).any(1).tolist() == [False, True]
    answers = [M.Answer(advantage=value) for value in (0.0, 0.0, -1e-9, 0.0, 0.0, 0.0)]
    assert M.teaches_nothing([answers[:3], answers[3:]]).tolist() == [False, True]


# ------------------------------------------------------------------------------------- rows and log-probabilities
def test_batches_hold_every_token_at_the_place_that_predicts_it():
    """The last token is a target, and nowhere an input; one that was not drawn is no target."""
    rows = [
        ([1, 8, 9], [4, 5, 263], [-0.1, -0.2, -0.3], 2.0),
        ([7], [6], [-0.5], -1.0),
        ([1, 2], [3, 5], [None, -2], 0.5),
    ]
    words = ("prompt", "ids", "logps", "advantage")
    answers = [G.Answer(**dict(zip(words, row, strict=True))) for row in rows]
    [batch] = G.make_batches(answers, CPU, 1000)
    assert batch.ids.tolist() == [[7, 0, 0, 0, 0], [1, 2, 3, 0, 0], [1, 8, 9, 4, 5]]
    targets = torch.tensor([[6, -1, -1, -1, -1], [-1, -1, 5, -1, -1], [-1, -1, 4, 5, 263]])
    assert torch.equal(batch.targets, targets) and torch.equal(batch.mask, targets >= 0)
    expected = [[-0.5, 0, 0, 0, 0], [0, 0, -2, 0, 0], [0, 0, -0.1, -0.2, -0.3]]
    assert batch.sampled.tolist() == expected
    assert batch.advantages.tolist() == [[-1.0], [0.5], [2.0]] and batch.numbers == [1, 2, 0]
    answers = answers_of(13)
    for tokens in (1, 57, 1 << 30):
        batches = G.make_batches(answers, CPU, tokens)
        assert all(batch.ids.numel() <= tokens or len(batch.ids) == 1 for batch in batches)
        assert sum(len(batch.ids) for batch in batches) == 13
        for batch in batches:
            for row, number in zip(batch.ids.tolist(), batch.numbers, strict=True):
                ids = [*answers[number].prompt, *answers[number].ids[:-1]]
                assert row[: len(ids)] == ids
    assert len(batches) == 1


def test_log_probabilities_and_entropies_are_those_of_the_whole_softmax():
    """Logits are made for 4,096 tokens at a time at most, and again in the backward pass. Entropies
    have a gradient if it is asked for, in which a probability of 0 makes no NaN.
    """
    table = Table(40)
    rng = random.Random(0)
    answers = []
    for _ in range(11):
        ids = rng.choices(range(40), k=499)
        answers.append(G.Answer(prompt=[1], ids=ids, logps=[0.0] * 499))
    [batch] = G.make_batches(answers, CPU, 1 << 30)
    found = torch.stack(G.token_scores(table, batch, 0.7, entropy_grad=True))
    factors = torch.randn(found.shape)
    [slopes] = torch.autograd.grad((factors * found).sum(), table.embed)
    assert max(table.seen) <= 4096 and sum(table.seen) == 2 * 11 * 499
    whole = (table.embed[batch.ids] / 0.7).log_softmax(-1)
    logps = whole.gather(-1, batch.targets[..., None])[..., 0]
    expected = torch.stack([logps, torch.special.entr(whole.exp()).sum(-1)])
    assert (found - expected).abs().max() < 1e-12
    [by_autograd] = torch.autograd.grad((factors * expected).sum(), table.embed)
    assert (slopes - by_autograd).abs().max() < 1e-11

    assert not G.token_scores(table, batch, 0.7)[1].requires_grad
    alone = G.token_logps(table, batch, 0.7)
    assert (alone == found[0]).all() and G.token_scores(table, batch, 0.7, False)[1].sum() == 0
    table.embed.data[3, 5] = -2000.0
    [slopes] = torch.autograd.grad(
        G.token_scores(table, batch, 0.7, entropy_grad=True)[1].sum(), table.embed
    )
    assert slopes.isfinite().all() and slopes[3, 5] == 0


# ------------------------------------------------------------------------------------------------- updates of a trainer
def test_metrics_of_updates_are_means():
    """Loss and norm over updates, others over tokens; an update whose norm is not finite is bad."""
    names = ("loss", "grad_norm", "tokens", "entropy")
    updates = []
    for values in ((1.0, 2.0, 10, 5.0), (2.0, math.inf, 30, 55.0)):
        updates.append(dict(zip(names, map(torch.tensor, values), strict=True)))
    expected = dict(loss=1.5, grad_norm=math.inf, bad=1, train_tok_s=20.0, entropy=1.5)
    assert G.update_metrics(updates, 2.0) == expected


@pytest.mark.parametrize(
    ("M", "changes"),
    [(G, dict(reduction="sequence", kl_beta=0.1)), (G, dict(reduction="bnpo"))]
    + [(S, dict(scale_rewards="batch")), (P, dict(kl_beta=0.1))],
)
def test_micro_batches_add_up_to_one_batch(M, changes, monkeypatch):
    scripted(monkeypatch, M)
    found = []
    for tokens in (1 << 20, 1):
        own = trainer(M, mini_batches=2, epochs=2, micro_batch_tokens=tokens, **changes)
        metrics = [take(own, lengths_score, step) for step in range(2)][1]
        assert metrics["clip_outside"] > 0  # off-policy in the end
        numbers = {name: x for name, x in metrics.items() if not re.search("tok_s|idle", name)}
        found.append((state(own.network), [x.grad for x in own.trained.values()], numbers))
    whole, split = found
    assert furthest(split[0], whole[0]) < 1e-9 and furthest(split[1], whole[1]) < 1e-10
    assert split[2] == pytest.approx(whole[2], abs=1e-6)  # sums of metrics may be float32


@pytest.mark.parametrize(("M", "clip"), [(G, 0.0), (G, 0.01), (S, 0.0)])
def test_updates_are_those_of_a_plain_loop(M, clip, monkeypatch):
    """2 mini-batches x 2 epochs by torch's AdamW, the loss sample by sample as written in the papers, and
    a bonus of entropies at TEMPERATURE.
    """
    scripted(monkeypatch, M)
    table = Table()
    plain = torch.nn.Parameter(table.embed.detach().clone())
    changes = dict(mini_batches=2, epochs=2, grad_clip_norm=clip, weight_decay=0.1)
    changes |= dict(learning_rate=0.035, temperature=0.2, entropy_beta=0.3)
    own = trainer(M, table, **changes)
    samples = sampled(own)
    metrics = take(own, lengths_score, multiplier=0.5)
    optimizer = torch.optim.AdamW([plain], lr=0.0175, betas=(0.9, 0.99), eps=1e-4, weight_decay=0.1)
    rewards = lengths_score([sample.text for sample in samples])
    advantages = advantages_of([rewards[at : at + 3] for at in range(0, 12, 3)], "group")

    def logps_of(ids):
        every = (plain[[ASSISTANT, *ids[:-1]]] / 0.2).log_softmax(-1)
        return every[range(len(ids)), ids], -(every.exp() * every).sum(1)

    old = [logps_of(sample.ids)[0].detach() for sample in samples]
    norms = []
    entropies = []
    losses = []
    for mini in ((0, 3, 6, 9, 1, 4), (7, 10, 2, 5, 8, 11)) * 2:
        tokens = sum(len(samples[at].ids) for at in mini)
        loss = 0.0
        for at in mini:
            logps, entropy = logps_of(samples[at].ids)
            entropies += entropy.tolist()
            delta = logps - old[at]
            ratio = delta.exp() if M is G else delta.mean().exp().expand_as(delta)
            clipped = ratio.clamp(1 - BAND["left_clip_range"], 1 + BAND["right_clip_range"])
            gained = torch.minimum(ratio * advantages[at], clipped * advantages[at])
            gained = (gained + 0.3 * entropy).sum()
            loss = loss - gained / (tokens if M is G else 6 * len(logps))
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_([plain], clip or math.inf).item())
        optimizer.step()
    assert (plain - table.embed).abs().max() < 1e-10
    assert (table.embed.grad - plain.grad).abs().max() < 1e-10
    means = dict(loss=losses, grad_norm=norms, entropy=entropies)
    means = {name: statistics.mean(values) for name, values in means.items()}
    assert {name: metrics[name] for name in means} == pytest.approx(means, abs=1e-10)
    assert clip or metrics["clip_active"] > 0


@pytest.mark.parametrize("loss", ["clip", "cispo"])
def test_a_teachers_mean_gradient_is_that_of_the_reverse_divergence(loss):
    """All answers of two tokens, each by its probability: the gradient of KL(p, p_teacher) of the first
    token and of the second after each first.
    """
    table, teacher = Table(5), Table(5, seed=1)
    settings = G.Settings(loss=loss, temperature=0.7, teacher="t")
    own = G.GRPOTrainer(table, BYTES, settings, teacher=teacher)
    pairs = itertools.product(range(5), repeat=2)
    answers = [G.Answer(prompt=[2], ids=[*pair], logps=[0.0, 0.0]) for pair in pairs]
    [batch] = own.batches_of(answers)
    logps = G.token_logps(table, batch, 0.7)
    losses, _ = G.policy_loss(logps, batch, settings)
    loss = (losses * logps.sum(1, keepdim=True).exp().detach()).sum()
    [found] = torch.autograd.grad(loss, table.embed)
    logs, targets = ((net.embed / 0.7).log_softmax(1) for net in (table, teacher))
    divergences = (logs.exp() * (logs - targets)).sum(1)
    expected = divergences[2] + (logs[2].exp().detach() * divergences).sum()
    [slopes] = torch.autograd.grad(expected, table.embed)
    assert (found - slopes).abs().max() < 1e-12 < found.abs().max()


def test_a_teacher_teaches_alone_or_beside_rewards(monkeypatch):
    """Each token has its own advantage, also in groups of one reward."""
    scripted(monkeypatch, G)
    table, teacher = Table(), Table(seed=1)
    calls = recorded(monkeypatch, G)
    own = trainer(G, table, dict(teacher=teacher), kd_alpha=0.25, teacher="t")
    rewards = [1.0, 0.0, 1.0, 0.5, 0.5, 0.5, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    metrics = take(own, lambda texts: rewards)
    [[_, batch]] = calls
    gaps = G.token_logps(teacher, batch, 1.0) - batch.old
    assert metrics["teacher_kl"] == pytest.approx(-gaps[batch.mask].mean().item(), abs=1e-9)
    groups = [rewards[at : at + 3] for at in range(0, 12, 3)]
    found = (batch.advantages - 0.25 * gaps)[batch.mask] / 0.75
    expected = {round(value, 9) for value in advantages_of(groups, "group")}
    assert len(batch.mask) == 12 and {round(value, 9) + 0.0 for value in found.tolist()} == expected
    alone = trainer(G, table, dict(teacher=teacher), teacher="t")
    metrics = alone.train_step(QUERIES)  # without a reward function
    assert metrics["zero_variance"] == 1 and metrics["grad_norm"] > 0 == metrics["bad"]


def recorded(monkeypatch, M):
    """Return a list of what the loss is called with: log-probabilities, for PPO values, and the batch."""
    calls = []

    def note(result, *given):
        *outputs, batch, _ = given
        calls.append(([x.detach().clone() for x in outputs], batch))
        return result

    wrap_loss(monkeypatch, M, note)
    return calls


@each_trainer
@pytest.mark.parametrize("lora_rank", [0, 2])
def test_the_first_update_is_where_the_rollout_was_bit_for_bit(M, lora_rank, monkeypatch, float32):
    scripted(monkeypatch, M)
    calls = recorded(monkeypatch, M)
    network = policy(lora_rank, layers="g1 g1 a s", attn_window=4)
    network.activation_checkpointing = lora_rank > 0
    own = trainer(M, network, mini_batches=2, micro_batch_tokens=30, lora_rank=lora_rank, qat=False)

    def are_old():
        found = []
        for outputs, batch in calls:
            old = [batch.old, *([batch.values] if M is P else [])]
            found.append(all(map(torch.equal, outputs, old)))
        calls.clear()
        return found

    take(own, lengths_score)
    first, second, *_, last = are_old()
    assert first and second and not last
    metrics = take(own, lengths_score, multiplier=0.0)  # while weights stay, all ratios are 1
    assert all(are_old()) and metrics["clip_outside"] == 0


@pytest.mark.parametrize(
    ("M", "changes"),
    [(G, {}), (G, dict(reduction="bnpo", scale_rewards="batch")), (S, {})],
)
def test_answers_without_an_advantage_are_left_out_and_count(M, changes, monkeypatch):
    """A group of each mini-batch has one reward. Weights become what they become if all answers are
    read, as they are for a KL_BETA or an ENTROPY_BETA that is too small to change a digit.
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
    for name, size in (("kl_beta", 0.0), ("kl_beta", 1e-30), ("entropy_beta", 1e-30)):
        wide = dict(left_clip_range=1.0, right_clip_range=9.0, epochs=2, mini_batches=2)
        own = trainer(M, **{name: size}, **wide, **changes)
        take(own, lambda texts: rewards)
        weights.append(state(own.network))
    assert read == 2 * [3] + 4 * [6]
    first, *others = weights
    assert max(furthest(first, other) for other in others) < 1e-12
    assert furthest(first, state(policy())) > 1e-3


@each_script
def test_momentum_alone_moves_no_weight(M, monkeypatch):
    """A step in which no answer has an advantage, after one that left momentum."""
    scripted(monkeypatch, M)
    own = trainer(M, mini_batches=2)
    take(own, lengths_score)
    before = state(own.network)
    moments = copy.deepcopy(own.optimizer_state.state_dict())
    metrics = take(own, lambda texts: [0.5] * 12)
    assert metrics["grad_norm"] == 0 and metrics["zero_variance"] == 1
    assert metrics["train_tok_s"] == metrics["bad"] == 0
    assert "entropy" not in metrics  # 0 would be that of a policy that is sure
    assert furthest(before, state(own.network)) == 0
    for name, saved in own.optimizer_state.state_dict().items():
        assert all(torch.equal(value, moments[name][key]) for key, value in saved.items())


@each_script
def test_quantization_aware_training_samples_and_learns_by_quantized_weights(M, monkeypatch):
    scripted(monkeypatch, M)
    calls = recorded(monkeypatch, M)
    own = trainer(M)
    drawn_by = []
    original = M.generate

    def generate(network, *given, **more):
        drawn_by.append(state(network))
        original(network, *given, **more)

    monkeypatch.setattr(M, "generate", generate)
    start = state(own.network)
    twin = copy.deepcopy(own.network)
    take(own, lengths_score, multiplier=0.0, qat=True)
    assert furthest(start, state(own.network)) == 0  # the weights themselves, bit for bit
    [[[logps], batch]] = calls
    assert torch.equal(logps, batch.old)
    assert (M.token_logps(twin, batch, 1.0) - logps).abs().max() > 1e-4
    with M.quantized(twin, own.table):
        assert (M.token_logps(twin, batch, 1.0) - logps).abs().max() < 1e-12
        assert furthest(drawn_by[0], state(twin)) == 0


@each_script
@pytest.mark.parametrize("is_given", [False, True])
@pytest.mark.parametrize("lora_rank", [0, 2])
def test_the_reference_is_the_policy_at_the_start_or_a_given_model(
    M, is_given, lora_rank, monkeypatch
):
    """By a copy, which shares with the policy what is not trained."""
    scripted(monkeypatch, M)
    calls = recorded(monkeypatch, M)
    network = policy(lora_rank)
    for name, param in network.named_parameters():
        if name.endswith("lora_b"):
            torch.nn.init.normal_(param, std=0.5)
    given = policy(seed=1) if is_given else None
    start = copy.deepcopy(given or network)
    changes = dict(kl_beta=0.01, temperature=0.7, lora_rank=lora_rank, qat=False)
    own = trainer(M, network, dict(ref_model=given), **changes)
    kls = [take(own, lengths_score, step)["kl"] for step in range(3)]
    assert kls[0] > 1e-3 if is_given else kls[0] == 0 < 1e-6 < min(kls[1:])
    for _, batch in calls:
        assert (batch.reference - M.token_logps(start, batch, 0.7)).abs().max() < 1e-12
    if not is_given:
        pairs = zip(own.ref_model.parameters(), network.parameters(), strict=True)
        assert all((one is other) != other.requires_grad for one, other in pairs)
    assert not lora_rank or all("lora" in name for name in own.trained)


# --------------------------------------------------------------------------------------------------------------- ranks
class Rank(G.Runtime):
    """A rank that is a thread of this process; `sum` waits for all of them."""

    def __init__(self, rank, barrier, parts):
        super().__init__(rank, barrier.parties, CPU, True)
        self.barrier = barrier
        self.parts = parts

    def sum(self, tensor):
        self.parts[self.rank] = tensor.clone()
        self.barrier.wait(timeout=60)
        total = sum(self.parts[rank] for rank in range(self.world_size))
        self.barrier.wait(timeout=60)
        return tensor.copy_(total)


def on_ranks(count, work):
    """Return what `work` returns for the runtime of each rank."""
    barrier = threading.Barrier(count)
    parts = {}
    found = {}

    def run(rank):
        found[rank] = work(Rank(rank, barrier, parts) if count > 1 else ALONE)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    return [found[rank] for rank in range(count)]


@pytest.mark.parametrize(
    ("M", "changes"),
    [(G, dict(resample_rounds=2)), (G, dict(scale_rewards="batch")), (S, dict(resample_rounds=1))]
    + [(P, dict(epochs=2, kl_target=0.5))],
)
def test_two_ranks_are_one(M, changes, float32, monkeypatch):
    """In two steps; in a third the last rank's loss is not a number, and no weight moves on any."""
    factors = {}  # of the loss, by id of a trainer's settings

    def spoil(result, *given):
        losses, parts = result
        return losses * factors.get(id(given[-1]), 1), parts

    wrap_loss(monkeypatch, M, spoil)
    start = policy()  # threads share the seed of the random numbers

    def work(runtime):
        words = {**SMALL, "prompts_per_step": 8, "mini_batches": 2, "kl_beta": 0.1, **changes}
        own = TRAINERS[M](copy.deepcopy(start), BYTES, M.Settings(**words), runtime=runtime)
        own.stop = frozenset(range(0, 264, 4))
        own.reward_funcs = lambda completions: [sum(map(ord, x)) % 5 > 0 for x in completions]
        metrics = []
        for step in range(3):
            before = state(own.network)
            if step == 2 and runtime.rank == runtime.world_size - 1:
                factors[id(own.settings)] = math.nan
            rollout = own.rollout([str(8 * step + number) for number in range(8)], step)
            metrics.append({**rollout.metrics, **own.update(rollout)})
        assert furthest(before, state(own.network)) == 0
        factors.clear()  # other settings may get the same id
        return before, metrics

    [[weights, metrics]] = on_ranks(1, work)
    first, second = on_ranks(2, work)
    assert furthest(first[0], second[0]) == 0 and furthest(weights, first[0]) < 1e-4
    bad = {found[2]["bad"] for found in (metrics, first[1], second[1])}
    assert bad == {2 * changes.get("epochs", 1)} and 0 < metrics[0]["zero_variance"] < 1
    for own, others in zip(metrics[:2], first[1], strict=False):
        for name in own:
            if not re.search("tok_s|idle", name):
                assert own[name] == pytest.approx(others[name], rel=1e-3, abs=5e-5), name


def test_ranks_are_dealt_as_much_to_do():
    assert G.deal([9, 1, 2, 8], 2, 4) == [[0, 1], [2, 3]]  # 9 + 1, 8 + 2
    # Of `size` in a row each rank has as many; that with less so far has the costlier one.
    assert G.deal([5, 1, 1, 5], 2, 2) == [[0, 2], [1, 3]]
    assert G.deal([3, 1, 2], 1, 3) == [[0, 1, 2]]


def test_metrics_of_a_rollout_are_of_all_ranks():
    """Of two, which take one second and three."""
    rewards = torch.tensor([[1.0, 1.0], [0.0, 0.5]])

    def work(runtime):
        rank = runtime.rank
        answers = []
        for length in (15, 17 - 2 * rank):
            ids = [5] * length
            answers.append(G.Answer(ids=ids, logps=[0.0] * length, finished=rank > 0))
        return G.answer_metrics(answers, rewards[rank], 1.0 + 2 * rank, runtime)

    expected = {
        "reward": 0.625,
        "reward_std": rewards.flatten().std().item(),
        "length": 15.5,
        "finished": 0.5,
        "gen_tok_s": 62 / 3,
        "idle": 1 / 3,
    }
    for metrics in on_ranks(2, work):
        assert metrics == pytest.approx(expected)


# ----------------------------------------------------------------------------------------------------------- rollouts
@each_script
@pytest.mark.parametrize("rounds", [0, 1, 2, 5])
def test_groups_of_one_reward_are_replaced(M, rounds, monkeypatch):
    """Of 4 queries the answers to the numbers 1 and 3 have one reward each, and so have those to 5,
    which replace the first ones; those to 7 and to 9, in the second round, have several.
    """
    seen = scripted(monkeypatch, M, lambda seed, s: ([10 + seed[-1], 40 + s, END], True))
    pool = [f"other {number}" for number in range(20)]
    words = dict(mini_batches=2, resample_rounds=rounds, scale_rewards="batch")
    own = trainer(M, parts=dict(train_dataset=pool), **words)

    def score(text):
        number = ord(text[0]) - 6
        return number / 4 if number in (1, 3, 5) else ord(text[1]) - 36 + number / 8

    own.reward_funcs = lambda completions: [score(text) for text in completions]
    rollout = own.rollout(QUERIES, 6)
    final = [0, {0: 1, 1: 5}.get(rounds, 9), 2, 7 if rounds else 3]
    asked = [0, 1, 2, 3, *[5, 7][: 2 * rounds], *[9][: max(0, rounds - 1)]]
    assert seen == [(1337, 6, number) for number in asked]
    # 4 groups of 3: a part has the first answers of all and the second ones of two.
    first, second = rollout.mini_batches(2)
    assert first == [group[0] for group in rollout.groups] + [one[1] for one in rollout.groups[:2]]
    assert second == [one[1] for one in rollout.groups[2:]] + [one[2] for one in rollout.groups]
    answers = sum(rollout.groups, [])
    assert [answer.ids[0] - 10 for answer in answers[::3]] == final
    drawn = np.random.default_rng((1337, 6, 7)).integers(20)
    assert answers[9].query == (pool[drawn] if rounds else QUERIES[3])
    rewards = [[score(answer.text) for answer in answers[at : at + 3]] for at in (0, 3, 6, 9)]
    found = [answer.advantage for answer in answers]
    assert found == pytest.approx(advantages_of(rewards, "batch"), abs=1e-12)
    metrics = rollout.metrics
    assert metrics["zero_variance"] == [0.5, 0.25, 0, 0][min(rounds, 3)]
    assert metrics.get("resampled") == [None, 0.5, 0.75, 0.75][min(rounds, 3)]
    first = [score(chr(number + 6) + chr(36 + s)) for number in range(4) for s in range(3)]
    assert metrics["reward"] == pytest.approx(statistics.mean(first), abs=1e-12)


# ----------------------------------------------------------------------------------------------- faults and settings
@each_trainer
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_moves_no_weight(M, wrong, monkeypatch):
    scripted(monkeypatch, M)
    own = trainer(M)
    before = state(own.network)
    with monkeypatch.context() as patch:
        wrap_loss(patch, M, lambda result, *_: (wrong * result[0], result[1]))
        assert take(own, lengths_score)["bad"] == 1
    assert furthest(before, state(own.network)) == 0
    take(own, lengths_score, step=1)
    assert 0 < furthest(before, state(own.network)) < 1


WRONG_SETTINGS = [
    (G, "GROUP_SIZE", dict(group_size=1)),
    (P, "TEMPERATURE", dict(temperature=0.0)),
    (S, "PROMPTS_PER_STEP", dict(prompts_per_step=6, mini_batches=4)),
    (G, "RATIO_LIMIT", dict(ratio_limit=1.05)),
    (G, "RATIO_LIMIT", dict(ratio_limit=2.0, loss="cispo")),
    (G, "LEFT_CLIP_RANGE", dict(left_clip_range=-1)),
    (S, "IMPORTANCE", dict(importance="tokens")),
    (P, "KL_TARGET", dict(kl_beta=0.0, kl_target=6.0)),
    (P, "GAE_LAMBDA", dict(gae_lambda=-0.1)),
]


@pytest.mark.parametrize(("M", "name", "changes"), WRONG_SETTINGS)
def test_settings_that_do_not_fit_are_refused_when_they_are_made(M, name, changes):
    refusal(M.UserError, f"^{name}=", M.Settings, **changes)


def test_values_of_trl_are_taken():
    for M in (G, S):
        assert M.Settings(scale_rewards=False) == M.Settings(scale_rewards="none")
        assert M.Settings(scale_rewards=True) == M.Settings(scale_rewards="group")
    assert S.GSPOConfig(importance="sequence_token").importance == "token"


def test_calls_that_do_not_fit_are_refused_in_a_line(monkeypatch, float32):
    refusal(G.UserError, "QAT=1", G.load_start, G.Settings(lora_rank=2, init_from="x"))
    network = policy(train_seq_len=20)  # a prompt of n bytes has n + 4 tokens
    own = trainer(G, network, mini_batches=2)
    refusal(G.UserError, "reward_funcs", own.train_step, QUERIES)
    for queries in ([], ["a"] * 3):
        refusal(G.UserError, f"{len(queries)} queries", own.train_step, queries, len)
    refusal(G.UserError, "ITERATIONS=0", own.train, len)
    assert len(own.prompt_ids("d" * 10)) == 14
    said = refusal(G.UserError, "MAX_NEW_TOKENS=6", own.prompt_ids, "d" * 11)
    assert set(re.findall("[0-9]+", said)) == {"6", "15", "20"}
    refusal(G.UserError, "missing field 'prompt'", own.prompt_ids, {"question": "x"})
    assert own.prompt_ids(7) == own.prompt_ids({"prompt": 7}) == own.prompt_ids("7")


# ------------------------------------------------------------------------------------------------- programmatic use
@each_trainer
def test_train_takes_the_queries_in_turn_with_seeds_of_their_own(M, monkeypatch):
    seen = scripted(monkeypatch, M)
    asked = []

    def score(queries, texts):
        asked.append(queries[::3])
        return lengths_score(texts)

    parts = dict(train_dataset=QUERIES[:3])
    own = trainer(M, parts=parts, iterations=3, prompts_per_step=2, learning_rate=0.02)
    rates = [group["lr"] for optimizer in own.optimizers for group in optimizer.param_groups]
    assert set(rates) == {0.02}
    assert len(own.train(score)) == 3
    asked = sum(asked, [])
    assert asked[:3] == ["a", "bcd", "ef"] and sorted(asked[3:]) == asked[:3]
    assert seen == [(1337, *numbers) for numbers in itertools.product(range(3), range(2))]


@each_trainer
def test_a_reward_of_train_step_gets_its_arguments_by_their_names(M, monkeypatch):
    """As TRL calls it; by position where none of these is TRL's."""
    scripted(monkeypatch, M)
    rows = [{"prompt": query, "answer": str(number)} for number, query in enumerate(QUERIES)]
    answers = [row["answer"] for row in rows for _ in range(3)]
    prompts = [query for query in QUERIES for _ in range(3)]
    own = trainer(M)

    def by_columns(completions, answer):
        assert answer == answers and completions != answer
        return lengths_score(completions)

    def of_columns(answer, **columns):
        assert answer == answers
        return lengths_score(columns["completions"])

    def by_position(prompt, answer, scale=1):
        assert prompt == prompts and answer != answers
        return [scale * score for score in lengths_score(answer)]

    rewards = []
    thrice = functools.partial(by_position, scale=3)
    for function in (by_columns, of_columns, by_position, thrice, [by_columns, of_columns]):
        rewards.append(own.train_step(rows, function)["reward"])
        own.steps = 0
    assert rewards == pytest.approx([rewards[0] * times for times in (1, 1, 1, 3, 2)])


def test_several_rewards_get_their_columns_are_weighted_and_logged_by_name(monkeypatch):
    """As in TRL. None leaves a function out of an answer's total and of its mean; a missing column is None."""
    scripted(monkeypatch, G)
    rows = [{"prompt": query, "answer": str(number)} for number, query in enumerate(QUERIES)]
    rows[2]["level"] = 7
    given = {}

    def size(completions):
        return [len(text) for text in completions]

    def leveled(answer, level, **columns):
        given.update(columns, level=level)
        pairs = zip(answer, level, strict=True)
        return [None if hard is None else hard + int(digit) for digit, hard in pairs]

    functions = [size, leveled, lambda prompts: [None] * len(prompts)]
    parts = dict(reward_funcs=functions, reward_weights=[1, 0.5, 3])
    own = trainer(G, parts=parts)
    metrics = own.train_step(rows)
    answers = sampled(own)
    texts = [answer.text for answer in answers]
    assert given == {
        "prompts": [query for query in QUERIES for _ in range(3)],
        "completions": texts,
        "level": [None] * 6 + [7] * 3 + [None] * 3,
        "completion_ids": [answer.ids for answer in answers],
    }
    mean = statistics.mean(map(len, texts))
    means = {name: value for name, value in metrics.items() if name.startswith("rewards/")}
    assert means == {"rewards/size": mean, "rewards/leveled": 9}
    assert metrics["reward"] == pytest.approx(mean + 0.5 * 9 / 4, abs=1e-9)
    own = trainer(G, parts=dict(parts, reward_weights=[1]))
    refusal(G.UserError, "reward_weights", own.train_step, rows)
    # The weights are also those of functions that come later.
    own = trainer(G, parts=dict(reward_weights=[1, 0.5, 3]))
    for _ in range(2):
        assert own.train_step(rows, functions)["reward"] == metrics["reward"]
        own.steps = 0
    refusal(G.UserError, "reward_weights=.*1 number", own.train_step, rows, size)
    logged = []
    own = trainer(G, parts=dict(reward_funcs=functions[2:], log=logged.append))
    assert own.train_step(rows)["reward"] == 0
    assert logged == ["reward: 12 answers got None from each function; they count 0"]


@each_trainer
def test_queries_are_a_list_or_what_has_its_form(M):
    """Of a string letters would be trained on, of a DatasetDict its keys, and a generator ends."""
    bad = ["rows.jsonl", {"train": QUERIES}, {"prompt": "a"}, iter(QUERIES), {*QUERIES}, None]
    own = trainer(M, parts=dict(reward_funcs=lengths_score))
    for queries in bad:
        refusal(M.UserError, "^train_step: must be a list", own.train_step, queries)
        parts = dict(train_dataset=queries)
        refusal(M.UserError, "^train_dataset: must be a list", trainer, M, parts=parts)
    assert len(trainer(M, parts=dict(train_dataset=np.array(QUERIES))).dataset) == 4


@each_trainer
def test_a_program_computes_as_the_script_does(M, monkeypatch):
    """In DTYPE, with activation checkpointing, and with PyTorch set up for the device."""
    seen = []
    monkeypatch.setattr(torch, "set_flush_denormal", seen.append)
    network = trainer(M, dtype="bfloat16", activation_checkpointing=True).network
    assert network.dtype == torch.bfloat16 and network.activation_checkpointing and seen == [True]
    # What a program has set stays with the defaults.
    network = trainer(M, network).network
    assert network.dtype == torch.bfloat16 and network.activation_checkpointing


def test_a_trainer_belongs_to_the_process_group(monkeypatch):
    """Otherwise each rank would train a policy of its own."""
    assert trainer(G).runtime == ALONE
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        monkeypatch.setattr(dist, "get_rank", lambda: 2)
        monkeypatch.setattr(dist, "get_world_size", lambda: 4)
        assert trainer(G).runtime == G.Runtime(2, 4, CPU, True)
        assert trainer(G, parts=dict(runtime=ALONE)).runtime == ALONE
    finally:
        monkeypatch.undo()
        dist.destroy_process_group()


def test_adapters_leave_the_random_numbers_of_a_program_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    networks = []
    for seed in (0, 0, 1):
        networks.append(policy())
        torch.manual_seed(5)
        settings = G.Settings(lora_rank=2, qat=False, dtype="bfloat16", seed=seed)
        G.adapt(networks[-1], settings, CPU)
        assert torch.equal(torch.rand(3), expected)
    assert networks[0].dtype == torch.bfloat16
    assert networks[0].embed.dtype == torch.bfloat16  # frozen
    states = [{n: w for n, w in net.state_dict().items() if "lora_a" in n} for net in networks]
    assert all(torch.equal(w, states[1][name]) for name, w in states[0].items())
    assert not any(torch.equal(w, states[2][name]) for name, w in states[0].items())


@each_trainer
def test_the_default_dtype_of_a_program_may_be_another_one(M, monkeypatch):
    """It is float64 here, and the network is in float32."""
    scripted(monkeypatch, M)
    own = trainer(M, policy().float())
    metrics = own.train_step(QUERIES, lambda prompts, completions: lengths_score(completions))
    assert math.isfinite(metrics["loss"])


@each_trainer
def test_held_out_scores_of_several_rewards_have_their_weighted_sum(M, monkeypatch):
    scripted(monkeypatch, M)
    own = trainer(M, policy())
    size = M.RewardFunction("size", lambda completions: [*map(len, completions)], -0.25)
    is_long = M.RewardFunction("long", lambda completions: [len(text) > 2 for text in completions])
    problems = [{"prompt": query, "answer": "?"} for query in QUERIES]
    found = M.Exam(problems, [is_long, size]).scores(own)
    expected = found["rewards/long"] - 0.25 * found["rewards/size"]
    assert torch.allclose(found["reward"], expected) and expected.std() > 0
    assert "reward" not in M.Exam(problems, [size]).scores(own)


# ---------------------------------------------------------------------------- what RESUME compares
@pytest.mark.parametrize("name", ["held_out_sha256", "problems_sha256"])
def test_prompts_must_stay_under_resume(name):
    """In their order and number: `gain` compares scores by prompt. Answers may be mended."""
    network = policy()

    def digest(problems):
        both = {"held_out_sha256": [], "problems_sha256": []} | {name: problems}
        exam = G.Exam(both["held_out_sha256"], [])
        return G.run_identity(G.Settings(), network, BYTES, both["problems_sha256"], exam)[name]

    first = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}]
    mended = [{**problem, "answer": None} for problem in first]
    others = [first[::-1], first[:1], [*first, {"prompt": "c"}], range(2), range(3)]
    assert digest(first) == digest(mended)
    assert len({digest(first), *map(digest, others)}) == 6


def test_marks_of_two_functions_are_not_compared():
    """The function that marks must stay under RESUME; rewards are compared that both have."""
    network = policy()

    def exam_of(*names):
        return G.Exam([], [G.RewardFunction(name) for name in names])

    def identity(*names):
        return G.run_identity(G.Settings(), network, BYTES, [], exam_of(*names))

    begun = identity("exact", "short")
    G.check_identity(identity("exact"), begun)
    for mark, names in (("short", ["short", "exact"]), ("", [])):
        said = f"^MARK='{mark}': must stay 'exact'"
        refusal(G.UserError, said, G.check_identity, identity(*names), begun)
    del begun["mark"]  # a checkpoint of 2026-11-28 has none
    G.check_identity(identity("short"), begun)

    exam = exam_of("exact", "long")
    ones = torch.ones(5, dtype=torch.float64)
    exam.before = {"greedy": 0 * ones, "rewards/exact": 0 * ones, "rewards/short": 0 * ones}
    resumed = exam_of("exact", "long")
    resumed.load_state_dict(exam.state_dict())
    after = {name: ones for name in ("greedy", "rewards/exact", "rewards/long")}
    assert resumed.gain(after) == {name: [1.0] * 3 for name in ("greedy", "rewards/exact")}


# ------------------------------------------------------------------------------ settings of a program
@each_trainer
def test_a_trainer_refuses_settings_without_their_parts(M):
    """In a program: adapters that nobody made; an environment, a teacher, a judge that nobody gave."""
    refused = [dict(lora_rank=8, qat=False)]
    refused.append(dict(reward_model="judge") if M is P else dict(environment="games.py:Game"))
    if M is G:
        refused.append(dict(teacher="runs/big"))
    for changes in refused:
        name, *_ = changes
        refusal(M.UserError, f"^{name.upper()}=", trainer, M, policy(), **changes)


def test_resampling_has_no_teacher():
    refusal(G.UserError, "^RESAMPLE_ROUNDS=2: ", G.Settings, teacher="runs/big", resample_rounds=2)
