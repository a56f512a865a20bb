"""What tests of GRPO, GSPO and PPO share: small policies, their trainers, samples by a script."""

import random
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

import train_grpo as G
import train_gspo as S
import train_ppo as P
from conftest import BYTES, small_network

CPU = torch.device("cpu")
END, ASSISTANT = 263, 262  # the token that ends an answer, and the last one of each prompt
QUERIES = ["a", "bcd", "ef", "ghijkl"]
TRAINERS = {G: G.GRPOTrainer, S: S.GSPOTrainer, P: P.PPOTrainer}
BAND = dict(left_clip_range=0.05, right_clip_range=0.08)
SMALL = dict(
    temperature=1.0,
    prompts_per_step=4,
    group_size=3,
    max_new_tokens=6,
    mini_batches=1,
    learning_rate=0.01,
    grad_clip_norm=0.0,
    kl_beta=0.0,
    **BAND,
)
LENGTHS = (5, 3, 1, 6, 6, 2, 4, 3)  # of the answers that a loss is tried on, in ragged rows
MASK = torch.arange(6) < torch.tensor(LENGTHS)[:, None]


def padded(rows, width, pad):
    """Return rows (8, 6) at this width; what stands behind an answer is this padding."""
    rows = rows.where(MASK, pad)
    return F.pad(rows, (0, width - 6), value=pad)


class Table(nn.Module):
    """A policy whose next token depends on the present one alone: row t holds the logits after t."""

    activation_checkpointing = False
    dtype = None

    def __init__(self, size=264, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embed = nn.Parameter(torch.randn(size, size, generator=generator))
        self.config = SimpleNamespace(model_dim=size, train_seq_len=128, vocab_size=size)
        self.layers = [0]
        self.seen = []  # how many tokens logits were made for

    def features(self, ids, doc):
        return F.embedding(ids, self.embed)

    def logits(self, x):
        self.seen.append(x.numel() // x.size(-1))
        return 1.0 * x


def policy(lora_rank=0, seed=0, **changes):
    """Return a small network, random in every weight but a fresh adapter's."""
    network = small_network(seed, **{"model_dim": 16, **changes})
    G.adapt(network, G.Settings(lora_rank=lora_rank, qat=False), CPU)
    return network


def trainer(M, network=None, parts=(), **changes):
    """Return a trainer by SMALL and changes of settings; parts: other arguments of it.

    The epsilon of AdamW is so large that rounding in a gradient near zero does not decide the sign
    of its update.
    """
    settings = M.Settings(**{**SMALL, **changes})
    own = TRAINERS[M](network or policy(), BYTES, settings, **dict(parts))
    for optimizer in own.optimizers:
        for group in optimizer.param_groups:
            group["eps"] = 1e-4
    return own


def scripted(monkeypatch, M, draw=None):
    """Let generate() give sample s of a prompt with `seed` as draw(seed, s): ids and whether they
    ended. Return the list of the seeds that it sees.
    """
    seen = []

    def drawn(seed, s):
        rng = random.Random(f"{seed} {s}")
        ids = [rng.randrange(4, 260) for _ in range(rng.randint(1, 6))]
        if rng.random() < 0.3:
            return ids, False
        return [*ids[:-1], END], True

    def generate(network, prompts, count, length, temperature, seeds, stop, samples, compiled):
        assert stop == {1, END} and not torch.is_grad_enabled()
        seen.extend(seeds)
        found = [(draw or drawn)(seed, s) for seed in seeds for s in range(count)]
        for sample, (ids, ended) in zip(samples, found, strict=True):
            sample.ids = ids
            sample.logps = [-1.0 - 0.01 * i for i in range(len(ids))]
            sample.finished = ended

    monkeypatch.setattr(M, "generate", generate)
    return seen


def sampled(own, step=0):
    """Return the answers of a trainer to QUERIES in a step."""
    seeds = [(own.settings.seed, step, number) for number in range(4)]
    return own.sample(QUERIES, own.settings.group_size, own.settings.temperature, seeds)


def take(own, score, step=0, multiplier=1.0, qat=False):
    """Return the metrics of a step with QUERIES, at a multiple of the learning rate.

    score: rewards of a list of texts.
    """
    own.reward_funcs = [lambda completions: score(completions)]
    rollout = own.rollout(QUERIES, step, qat)
    return {**rollout.metrics, **own.update(rollout, multiplier, qat)}


def lengths_score(texts):
    """A reward that says little and varies: the text's length, and its first character."""
    return [len(text) % 4 + ord(text[0]) % 3 / 2 if text else -1.0 for text in texts]


def wrap_loss(monkeypatch, M, wrap):
    """Give what the script's loss returns, and its arguments, to wrap, which returns it instead."""
    name = "ppo_loss" if M is P else "policy_loss"
    original = getattr(M, name)
    monkeypatch.setattr(M, name, lambda *given: wrap(original(*given), *given))


def state(model):
    return [param.detach().clone() for param in model.parameters()]


def furthest(one, other):
    return max((a - b).abs().max().item() for a, b in zip(one, other, strict=True))


def answers_of(count, seed=0):
    """Return Answers: random prompts that begin with a BOS, and responses of 1 to 12 tokens."""
    rng = random.Random(seed)
    answers = []
    for _ in range(count):
        prompt = [1, *rng.choices(range(4, 260), k=rng.randint(0, 8))]
        ids = rng.choices(range(4, 264), k=rng.randint(1, 12))
        logps = [-0.01 * token for token in ids]
        answers.append(G.Answer(prompt=prompt, ids=ids, logps=logps, advantage=rng.gauss(0, 1)))
    return answers
