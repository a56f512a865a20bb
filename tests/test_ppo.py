"""PPO: advantages, losses, divergences and values against closed forms; reward models.

What the trainers of all three scripts do alike is tested in test_objective.py.
"""

import itertools
import math
import statistics
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from policies import (
    ASSISTANT,
    CPU,
    END,
    LENGTHS,
    MASK,
    QUERIES,
    P,
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
)

from conftest import BYTES, refusal

pytestmark = pytest.mark.usefixtures("default_dtype")


# -------------------------------------------------------------------------------------------- advantages and rewards
def double_sum(rewards, values, gamma, lam):
    """A_t = sum over l of (gamma lambda)^l d_{t+l}, d_t = r_t + gamma V_{t+1} - V_t, V after the last 0."""
    steps = zip(rewards, values, [*values[1:], 0.0], strict=True)
    errors = [r + gamma * after - v for r, v, after in steps]
    found = []
    for begin in range(len(errors)):
        found.append(sum((gamma * lam) ** later * d for later, d in enumerate(errors[begin:])))
    return found


@pytest.mark.parametrize("share", [0.3, 0.9])
def test_advantages_are_the_double_sum(share):
    """Of random masks with holes: only the tokens of the mask are there."""
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 7, 11, generator=generator)
    mask = torch.rand(7, 11, generator=generator) < share
    for gamma, lam in ((1.0, 0.95), (0.9, 0.7), (0.99, 0.0), (0.0, 1.0)):
        found = P.advantage_estimates(rewards, values, mask, gamma, lam)
        assert torch.equal(found != 0, mask)
        for row, own in enumerate(mask):
            expected = double_sum(rewards[row, own].tolist(), values[row, own].tolist(), gamma, lam)
            assert found[row, own].tolist() == pytest.approx(expected, abs=1e-12)


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


def test_the_coefficient_is_steered_to_the_target():
    """1909.08593: e = clip(KL / target - 1, -0.2, 0.2), beta (1 + 0.1 e)."""
    factors = {6.0: 1.0, 6.6: 1.01, 5.4: 0.99, 60.0: 1.02, -3.0: 0.98}
    for divergence, factor in factors.items():
        assert P.steered(0.05, divergence, 6.0) == pytest.approx(0.05 * factor, abs=1e-15)
    assert P.steered(0.05, 60.0, 0.0) == 0.05


# ---------------------------------------------------------------------------------------------------------------- loss
def case():
    """Return what ppo_loss takes of 8 answers, (8, 6) each, with log-probabilities and values near
    the rollout's.
    """
    old, old_values, now, values, returns, advantages, drawn = torch.randn(
        7, 8, 6, generator=torch.Generator().manual_seed(0)
    )
    return {
        "old": old,
        "old_values": 0.5 * old_values,
        "logps": old + 0.2 * now,
        "values": 0.5 * old_values + 0.4 * values,
        "returns": 0.8 * returns,
        "advantages": advantages,
        "sampled": old + 0.01 * drawn,
    }


def measured(rows, settings, width=6, pad=0.0):
    """Return the sum of the losses, its gradients by log-probabilities and values, and the seven sums."""
    batch = SimpleNamespace(**{name: padded(part, width, pad) for name, part in rows.items()})
    batch.mask = padded(MASK, width, False)
    logps, values = batch.logps.requires_grad_(), batch.values.requires_grad_()
    batch.values = batch.old_values
    losses, parts = P.ppo_loss(logps, values, batch, settings)
    assert [*parts] == [*P.UPDATE_SUMS[3:]]
    slopes = torch.autograd.grad(losses.sum(), (logps, values))
    return losses.sum().item(), *slopes, torch.stack([part.sum() for part in parts.values()])


def written_out(rows, s, band):
    """The same in loops over Python's floats."""
    loss = 0.0
    by_logp, by_value = torch.zeros(2, 8, 6)
    sums = [0.0] * 7
    low, high = 1 - s.left_clip_range, 1 + s.right_clip_range
    places = [(row, t) for row, length in enumerate(LENGTHS) for t in range(length)]
    for place in places:
        old, V_old, now, V, R, A, drawn = (part[place].item() for part in rows.values())
        r = math.exp(now - old)
        policy = max(-A * r, -A * max(low, min(high, r)))
        is_stopped = r > high if A > 0 else r < low
        near = V_old + max(-band, min(band, V - V_old))
        is_near = (near - R) ** 2 > (V - R) ** 2
        value = 0.5 * max((V - R) ** 2, (near - R) ** 2)
        loss += policy + 0.3 * value
        by_logp[place] = 0.0 if is_stopped else -A * r
        by_value[place] = 0.0 if is_near else 0.3 * (V - R)
        parts = (policy, value, is_stopped, not low <= r <= high, is_near)
        parts += ((now - old) ** 2 / 2, abs(old - drawn))
        sums = [total + part for total, part in zip(sums, parts, strict=True)]
    return loss, by_logp, by_value, torch.tensor(sums)


@pytest.mark.parametrize(("width", "pad"), [(6, 0.0), (9, -7.5)])
@pytest.mark.parametrize("band", [0.2, math.inf])
def test_the_loss_is_its_closed_form(width, pad, band, monkeypatch):
    monkeypatch.setattr(P, "VALUE_CLIP_RANGE", band)
    monkeypatch.setattr(P, "VALUE_COEF", 0.3)
    settings = P.Settings(left_clip_range=0.1, right_clip_range=0.15)
    rows = case()
    loss, by_logp, by_value, sums = measured(rows, settings, width, pad)
    expected, own_logp, own_value, own_sums = written_out(rows, settings, band)
    assert abs(loss - expected) < 1e-10 and (sums - own_sums).abs().max() < 1e-10
    assert (by_logp - padded(own_logp, width, 0.0)).abs().max() < 1e-10
    assert (by_value - padded(own_value, width, 0.0)).abs().max() < 1e-10
    assert 0 < own_sums[2] < own_sums[3] < sum(LENGTHS)
    assert (own_sums[4] > 0) == (band < 1)


# ------------------------------------------------------------------------------------------------ values, and a trainer
def valued(lora_rank=0, seed=3, **changes):
    """Return a policy with a value head that says something."""
    network = policy(lora_rank, **changes)
    P.add_value_head(network)
    torch.nn.init.normal_(network.w_value, std=0.3, generator=torch.Generator().manual_seed(seed))
    return network


def experienced(own, step=0):
    """Return the batch of a rollout of QUERIES as the update finds it, what was measured, the rollout."""
    own.reward_funcs = [lambda completions: lengths_score(completions)]
    rollout = own.rollout(QUERIES, step)
    [[batch]], found = own.experience(rollout)
    return batch, found, rollout


SAMPLES = [([10, 11, END], True), ([20, END], True), ([30, 31, 32, 33], False), ([END], True)]
SCORES = [1.0, 0.0, 0.5, 0.25]


def test_values_are_of_the_state_that_draws_the_token(monkeypatch):
    """A table's features are the rows of the token before, so a value that is shifted by one is another's."""
    scripted(monkeypatch, P, lambda seed, s: SAMPLES[s])
    table = Table()
    table.w_value = torch.nn.Parameter(torch.randn(264) / 16)
    monkeypatch.setattr(P, "GAMMA", 0.9)
    own = trainer(P, table, group_size=4, gae_lambda=0.7)
    own.reward_funcs = [lambda completions: SCORES]
    [[batch]], found = own.experience(own.rollout(["xyz"], 0))
    every = []
    for (ids, _), score in zip(SAMPLES, SCORES, strict=True):
        [at] = [row for row in range(4) if batch.targets[row, batch.mask[row]].tolist() == ids]
        mask = batch.mask[at]
        values = (table.embed[[ASSISTANT, *ids[:-1]]] @ table.w_value).tolist()
        # What was cut off ends there, too.
        advantages = double_sum([*[0.0] * (len(ids) - 1), score], values, 0.9, 0.7)
        returns = [a + v for a, v in zip(advantages, values, strict=True)]
        assert batch.values[at, mask].tolist() == pytest.approx(values, abs=1e-12)
        assert not batch.values[at, ~mask].any()
        assert batch.returns[at, mask].tolist() == pytest.approx(returns, abs=1e-12)
        every.append((batch.advantages[at, mask].tolist(), advantages, returns))
    white, flat, returns = (sum(column, []) for column in zip(*every, strict=True))
    # Whitened over all tokens, of a sample.
    mean, deviation = statistics.mean(flat), (statistics.variance(flat) + 1e-8) ** 0.5
    assert white == pytest.approx([(a - mean) / deviation for a in flat], abs=1e-12)
    explained = 1 - statistics.variance(flat) / statistics.variance(returns)
    assert found == {"explained_variance": pytest.approx(explained, abs=1e-12)}


def test_a_constant_critic_gives_the_plain_policy_gradient(monkeypatch):
    """lambda = gamma = 1, one update: the mean over tokens of whitened reward times grad log p, and of the
    gradient of entropies, row by row by hand.
    """
    scripted(monkeypatch, P, lambda seed, s: SAMPLES[s])
    table = Table()
    own = trainer(P, table, group_size=4, temperature=0.8, gae_lambda=1.0, entropy_beta=0.3)
    own.reward_funcs = [lambda completions: SCORES]
    start = table.embed.detach().clone()
    metrics = own.update(own.rollout(["xyz"], 0))
    rewards = sum([[r] * len(ids) for (ids, _), r in zip(SAMPLES, SCORES, strict=True)], [])
    before = sum([[ASSISTANT, *ids[:-1]] for ids, _ in SAMPLES], [])
    tokens = sum([ids for ids, _ in SAMPLES], [])
    mean, spread = statistics.mean(rewards), (statistics.variance(rewards) + 1e-8) ** 0.5
    chances = (start / 0.8).softmax(-1)
    expected = torch.zeros_like(start)
    head = torch.zeros(264)  # VALUE_COEF times the mean of (V - R) f, with V = 0 and R the reward
    for row, token, reward in zip(before, tokens, rewards, strict=True):
        slope = (F.one_hot(torch.tensor(token), 264) - chances[row]) / 0.8
        expected[row] -= (reward - mean) / spread / len(tokens) * slope
        surprise = -chances[row].log()
        steep = chances[row] * (surprise - (chances[row] * surprise).sum()) / 0.8
        expected[row] -= 0.3 / len(tokens) * steep
        head -= 0.1 * reward / len(tokens) * start[row]
    assert (table.embed.grad - expected).abs().max() < 1e-12 < expected.abs().max()
    assert (table.w_value.grad - head).abs().max() < 1e-12
    assert metrics["approx_kl"] == metrics["clip_outside"] == 0
    squares = [reward**2 / 2 for reward in rewards]
    assert metrics["value_loss"] == pytest.approx(statistics.mean(squares), abs=1e-12)
    assert abs(metrics["policy_loss"]) < 1e-12  # minus the mean of the whitened advantages


def test_what_stands_in_the_padding_never_reaches_a_value():
    own = trainer(P, valued())
    [batch] = P.make_batches(answers_of(5), CPU, 1 << 30)
    before = own.forward(batch)
    behind = batch.mask.flip(1).cumsum(1).flip(1) == 0
    batch.ids = torch.where(behind, torch.randint(1, 264, batch.ids.shape), batch.ids)
    for one, other in zip(own.forward(batch), before, strict=True):
        assert torch.equal(one, other) and torch.equal(one != 0, batch.mask)


@pytest.mark.parametrize("shaping", ["k1", "k3"])
def test_divergences_are_measured_steer_and_shape_rewards(shaping, monkeypatch):
    """Means over the tokens of k1 and k3 under the policy that drew them; KL_BETA by the rule."""
    scripted(monkeypatch, P)
    other = policy(seed=1)
    changes = dict(kl_beta=0.3, kl_shaping=shaping, kl_target=0.01, gae_lambda=1.0)
    own = trainer(P, valued(), dict(ref_model=other), **changes)
    batch, found, rollout = experienced(own)
    apart = batch.old - P.token_logps(other, batch, 1.0).detach()
    k3 = (-apart).exp() - 1 + apart
    means = {"kl": apart[batch.mask].mean().item(), "kl_k3": k3[batch.mask].mean().item()}
    assert {name: found[name] for name in means} == pytest.approx(means, abs=1e-12)
    every = torch.stack(P.divergences(batch.old, batch.old - 1, batch.mask))
    assert not every[:, ~batch.mask].any()
    beta = P.steered(0.3, found["kl"] * rollout.metrics["length"], 0.01)
    assert found["kl_beta"] == 0.3 != beta == experienced(own, step=1)[1]["kl_beta"]
    # At lambda = gamma = 1 the first token's return is the score less 0.3 times what the answer cost.
    scores = {tuple(answer.ids): answer.reward for answer in itertools.chain(*rollout.groups)}
    for row, mask in enumerate(batch.mask):
        cost = (apart if shaping == "k1" else k3)[row, mask].sum().item()
        score = scores[tuple(batch.targets[row, mask].tolist())]
        first = batch.returns[row, mask][0].item()
        assert first == pytest.approx(score - 0.3 * cost, abs=1e-12)
    assert "kl" not in experienced(trainer(P))[1]  # there is no reference


def test_the_value_head_of_a_start_goes_on_and_is_trained_beside_adapters(monkeypatch):
    """By one sample of a prompt, which is enough."""
    own = trainer(P, valued(lora_rank=2), lora_rank=2, qat=False, group_size=1)
    was = own.network.w_value.detach().clone()
    assert torch.equal(was, valued().w_value)
    scripted(monkeypatch, P)
    assert take(own, lengths_score)["grad_norm"] > 0
    assert not torch.equal(own.network.w_value, was)  # adapters and the head, nothing else
    assert {name.rpartition(".")[2] for name in own.trained} == {"lora_a", "lora_b", "w_value"}


# --------------------------------------------------------------------------------------------------------- reward model
def test_a_reward_model_takes_the_functions_place(monkeypatch):
    """It scores the last token of the very ids, in training and of held-out answers, and is not trained."""
    scripted(monkeypatch, P)
    judge = valued(seed=4, model_dim=32)  # of another width
    before = state(judge)
    answers = answers_of(9)
    for answer in answers[::2]:
        answer.finished = True
    expected = []
    for answer in answers:
        end = [] if answer.finished else [P.answer_end(BYTES)]
        features = judge.features(torch.tensor([[*answer.prompt, *answer.ids, *end]]))
        expected.append((features[0, -1] @ judge.w_value).item())
    for tokens in (1 << 30, 30, 1):
        assert P.answer_values(judge, BYTES, answers, tokens).tolist() == pytest.approx(expected)
    assert max(expected) - min(expected) > 0.1 and len(P.answer_values(judge, BYTES, [], 10)) == 0

    assert not P.answer_values(judge, BYTES, answers, 30).requires_grad
    # Llama 3's files name several ends; its template writes one of them.
    talk = "{% for m in messages %}<a>{{ m.content }}{{ eos }}{% endfor %}"
    facts = dict(added={"<a>": 5, "<b>": 6, "<c>": 7}, stop=[5, 6, 7], template=talk)
    for eos, expected in (("<b>", 6), ("<c>", 7), ("", 7)):
        found = SimpleNamespace(roles={}, bos_id=5, facts=facts | {"names": {"eos": eos}})
        assert P.answer_end(found) == expected
    refused = facts | {"template": "{{ raise_exception('no') }}", "names": {}}
    assert P.answer_end(SimpleNamespace(roles={}, bos_id=5, facts=refused)) == 7
    assert P.answer_end(P.with_roles(BYTES)) == P.with_roles(BYTES).roles["<|end|>"]

    own = trainer(P, parts=dict(reward_model=judge, train_dataset=QUERIES), iterations=2)
    rollout = own.rollout(QUERIES, 0)
    expected = P.answer_values(judge, own.tokenizer, sampled(own), 1 << 30).tolist()
    found = [answer.advantage for answer in itertools.chain(*rollout.groups)]
    assert found == pytest.approx(expected, abs=1e-12) and len(set(expected)) == 12
    assert rollout.metrics["reward"] == pytest.approx(statistics.mean(expected), abs=1e-9)
    problems = [{"prompt": query, "answer": "?"} for query in QUERIES]
    is_long = P.RewardFunction("long", lambda completions: [len(text) > 2 for text in completions])
    found = P.JudgedExam(problems, [is_long]).scores(own)
    seeds = [(1337, P.EVAL_STEP, number) for number in range(4)]
    answers = own.sample(QUERIES, 8, 1.0, seeds)
    expected = P.answer_values(judge, own.tokenizer, answers, 1 << 30).view(4, 8).mean(1)
    assert (found["reward_model"] - expected).abs().max() < 1e-9
    marks = torch.tensor([float(len(answer.text) > 2) for answer in answers]).view(4, 8)
    assert torch.equal(found["pass1"], marks.mean(1)) and torch.equal(found["pass8"], marks.amax(1))
    assert len(own.train()) == 2 and furthest(before, state(judge)) == 0
    judge.w_value.data.fill_(math.inf)
    refusal(P.UserError, "REWARD_MODEL", own.train)
