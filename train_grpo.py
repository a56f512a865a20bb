"""Group relative policy optimization (GRPO, arXiv 2402.03300): train a language model on rewards, without a critic.

    TASK=sort python train_grpo.py                                          # makes its own small policy, on a CPU
    INIT_FROM=runs/<RUN_ID> TASK=gsm8k TASK_PATH=gsm8k.jsonl torchrun --standalone --nproc_per_node=8 train_grpo.py
    REWARD=mine.py:score TASK=prompts.jsonl python train_grpo.py            # score(prompts, completions, answers)

A step: GROUP_SIZE samples of each of PROMPTS_PER_STEP prompts, their rewards, then MINI_BATCHES x EPOCHS updates.
Every setting below is an environment variable: its name in capitals. A run writes runs/<RUN_ID>/: log.txt, checkpoints,
model.upar (the artifact, read back and scored at the end) and result.json. Sections between `# === shared:` fences
stand in other scripts too, byte for byte (tools/sync.py).
"""

import base64
import collections
import contextlib
import difflib
import faulthandler
import functools
import hashlib
import importlib.util
import io
import itertools
import json
import math
import operator
import os
import random
import re
import resource
import select
import shutil
import signal
import statistics
import string
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from decimal import Decimal
from fractions import Fraction
from numbers import Real
from pathlib import Path
from types import FunctionType, SimpleNamespace

import numpy as np
import sentencepiece
import tiktoken
import tiktoken_ext.openai_public
import torch
import torch.distributed as dist
import torch.nn.functional as F
import zstandard
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint


# ---------------------------------------------------------------------------------------------------------- settings
@dataclass(frozen=True)
class Settings:
    # run
    run_id: str = ""  # name of the run's folder; empty: a name made of the date
    out_dir: str = "runs"  # where runs are written
    config: str = ""  # file of NAME=value lines, below the environment
    resume: str = ""  # a run to go on with from its newest whole checkpoint, with its settings: RUN_ID or folder
    replay: str = ""  # a finished run to repeat step by step, with its settings, by its progress and not by the clock
    seed: int = 1337  # of every random draw
    device: str = "auto"  # auto, cpu or cuda
    deterministic: bool = False  # PyTorch's deterministic algorithms: slower on CUDA; on a CPU runs repeat without
    activation_checkpointing: bool = False  # keep each layer's input alone and compute the rest again: less memory
    # task
    task: str = "sort"  # sort, reverse, add, countdown, zebra, gsm8k, or jsonl: lines with prompt and answer
    task_path: str = ""  # file of gsm8k or jsonl
    reward: str = ""  # empty: the task's checker; random: a control; file.py:function, see load_reward
    reward_seconds: float = 60.0  # a reward function that takes longer ends the run
    eval_prompts: int = 512  # held-out prompts that score the policy
    eval_samples: int = 8  # of each, for pass@1 and pass@EVAL_SAMPLES
    # policy at the start
    init_from: str = ""  # a run, a checkpoint or an artifact; empty: a small model, warmed up on demonstrations
    tokenizer_path: str = ""  # .model file, tiktoken name, .tiktoken file or "bytes"; empty: that of data or artifact
    sft_steps: int = 180  # of that warm-up
    sft_lr: float = 0.003  # its AdamW's
    layer_pattern: str = "g a g"  # g GDN, k GDN with another's keys, s sliding, a full attention
    num_layers: int = 0  # the pattern is repeated or cut to this many layers; 0: as long as it is
    model_dim: int = 64  # width
    num_heads: int = 4  # query heads of attention, and heads of GDN
    mlp: str = "relu2"  # relu2, leaky_relu2, gelu, swiglu or bio
    train_seq_len: int = 128  # tokens in a window, in training and in evaluation
    lora_rank: int = 0  # of adapters, which alone are trained; 0: all weights are
    lora_alpha: float = 16.0  # adapters count by LORA_ALPHA / LORA_RANK
    # rollout
    prompts_per_step: int = 32  # over all ranks
    group_size: int = 8  # samples of a prompt
    max_new_tokens: int = 16  # length of each, at most
    temperature: float = 1.0  # of the distribution; 0: always the likeliest token
    dynamic_rounds: int = 0  # times that a group of one reward is drawn again, by another prompt (arXiv 2503.14476)
    overlong_buffer: int = 0  # last tokens of MAX_NEW_TOKENS that cost up to 1 of reward, evenly; 0: they cost nothing
    # objective
    left_clip_range: float = 0.2  # below 1, for the ratio of probabilities
    right_clip_range: float = 0.28  # above 1
    ratio_limit: float = 0.0  # of the ratio where the advantage is negative, too: two-sided clipping; 0: none
    reduction: str = "sequence"  # of token losses: sequence, dapo (tokens), bnpo (a rank's) or dr_grpo (constant)
    scale_rewards: str = "group"  # advantages over the standard deviation of the group, the batch, or none
    kl_beta: float = 0.0  # weight of the divergence from the reference
    reference: str = "start"  # of that: the policy as it starts, or the base, which is it without adapters
    mini_batches: int = 4  # updates by the samples of a step
    epochs: int = 1  # times that each sample is used
    micro_batch_tokens: int = 0  # per forward and rank; 0: fitted to memory. Never changes the global batch
    # clock
    iterations: int = 0  # steps; 0: no limit in steps
    max_wallclock_seconds: float = 120.0  # training clock; 0: no limit in time
    reserve_seconds: float = 5.0  # end of the clock kept for choosing among the averages and packing
    # checkpoints and faults
    save_every: str = "120s"  # between checkpoints: steps, or seconds of training; 0: only at the end or a signal
    keep: int = 2  # newest checkpoints that stay
    spike_policy: str = "stop"  # stop, skip the batch, or rewind to the newest checkpoint and go on with other data
    hang_seconds: float = 60.0  # a step that takes longer, and 20 medians: stacks of all ranks; 0: do not watch
    # log and validation
    train_log_every: int = 10  # steps between log lines
    val_loss_every: int = 0  # steps between validations, outside the clock; 0: only at the end
    # optimizer
    optimizer: str = "adamw"  # muon, lion, adamw, adamw8bit, adafactor: of matrices, without muon of embeddings too
    learning_rate: float = 0.0003  # of all weights
    weight_decay: float = 0.0  # decoupled, of all but scalars
    beta1: float = 0.9  # AdamW, 8-bit AdamW, Lion
    beta2: float = 0.95  # AdamW, 8-bit AdamW, Lion
    adam_eps: float = 1e-8  # AdamW, 8-bit AdamW
    grad_clip_norm: float = 1.0  # global gradient norm; 0: no clipping
    # schedule, in shares of the run (see Clock)
    lr_schedule: str = "linear"  # warmdown: linear, cosine, wsd (1 - sqrt) or constant (none: WARMDOWN_* is ignored)
    warmup_frac: float = 0.02  # learning rate from 0 to 1
    warmdown_frac: float = 0.3  # learning rate from 1 to the floor, at the end
    warmdown_iters: int = 0  # the same in steps of ITERATIONS; 0: use the share
    lr_floor: float = 0.1  # last multiplier of the learning rate
    ema: bool = True  # exponential average of the weights
    ema_start_frac: float = 0.5  # when it starts
    ema_memory_frac: float = 0.02  # its memory, as a share of the run
    swa: bool = True  # plain average of the weights
    swa_start_frac: float = 0.9  # when it starts
    qat: bool = True  # late quantization-aware training of every tensor that the exporter quantizes
    qat_start_frac: float = 0.85  # when it starts; EMA and SWA start again then
    # artifact
    matrix_bits: int = 6  # matrices of the layers: codes up to 2**(bits-1) - 1
    matrix_clip_sigmas: float = 8.0  # the largest code, in root mean squares; 0: the largest weight; -1: least error
    matrix_step: str = "tensor"  # what has a step of its own: tensor, row, or grid (a row, steps 2**(1/16) apart)
    embed_bits: int = 8  # the same for embeddings and head
    embed_clip_sigmas: float = 6.0  # the same
    embed_step: str = "tensor"  # the same
    artifact_bytes_max: int = 16000000  # script + config + artifact, decimal bytes: more is an error at the end

# === shared: settings ===
# === end: settings ===


# === shared: runtime ===
# === end: runtime ===


# === shared: watch ===
# === end: watch ===


# === shared: tokenizer ===
# === end: tokenizer ===


# === shared: text ===
# === end: text ===


# === shared: model ===
# === end: model ===


# === shared: lora ===
# === end: lora ===


# === shared: optimizer ===
# === end: optimizer ===


# === shared: schedule ===
# === end: schedule ===


# === shared: quantization ===
# === end: quantization ===


# === shared: artifact ===
# === end: artifact ===


# === shared: weights ===
# === end: weights ===


# === shared: checkpoint ===
# === end: checkpoint ===


# === shared: generation ===
# === end: generation ===


# === shared: tasks ===
GENERATED = ("sort", "reverse", "add", "countdown", "zebra")
FROM_FILE = {"gsm8k": ("question", "answer"), "jsonl": ("prompt", "answer")}  # keys of a line


@dataclass(frozen=True)
class Problem:
    """A question, a right answer (a warm start's demonstration; of most tasks the only one), and a checker's data."""

    prompt: str
    answer: str
    data: dict


def is_held_out(prompt: str) -> bool:
    """Whether a prompt is kept from training: one in five, by a hash, whatever task, seed and index it came from."""
    return int.from_bytes(hashlib.blake2b(prompt.encode(), digest_size=8).digest(), "big") % 5 == 0


def expression_value(text: str) -> Fraction | None:
    """Exact value of whole numbers, + - * / and parentheses; None of any other text, and where it divides by 0. A sign
    before a number is none. At most 100 characters bound time and depth, whatever a model writes."""
    operators = {"+": (1, operator.add), "-": (1, operator.sub), "*": (2, operator.mul), "/": (2, operator.truediv)}
    tokens = ["", *re.findall(r"[0-9]+|\S", text)[::-1]]  # the next one stands last

    def value_from(least: int) -> Fraction:  # an operand, and what follows by operators that bind at least so strongly
        token = tokens.pop()
        value = value_from(1) if token == "(" else Fraction(token)  # ValueError where it is no number
        if token == "(" and tokens.pop() != ")":
            raise ValueError("a parenthesis stays open")
        while operators.get(tokens[-1], (0,))[0] >= least:
            strength, apply = operators[tokens.pop()]
            value = apply(value, value_from(strength + 1))
        return value

    with contextlib.suppress(ValueError, ZeroDivisionError):
        value = value_from(1) if len(text) <= 100 and text.isascii() else None
        return value if tokens == [""] else None


def zebra_problem(rng: random.Random) -> Problem:
    """Who lives in houses 1 to 3, with which pet (and drink): `Ann<dog, Bob~cat, Cid=2`, clues that leave one world.

    = same house, < left of, > right of, ~ beside. The answer, house by house: `Ann eel, Cid cat, Bob dog`.
    """
    relations = {"=": operator.eq, "<": operator.lt, ">": operator.gt, "~": lambda x, y: abs(x - y) == 1}
    names = "Ann Bob Cid cat dog eel ale gin tea".split()[:rng.choice((6, 9))] + ["1", "2", "3"]
    orders = itertools.product(itertools.permutations((1, 2, 3)), repeat=len(names) // 3 - 1)
    worlds = [dict(zip(names, itertools.chain(*order, (1, 2, 3)), strict=True)) for order in orders]  # name -> house
    world, clues = rng.choice(worlds), []
    while len(worlds) > 1:
        (a, b), relation = sorted(rng.sample(names, 2), key=names.index), rng.choice("=<>~")
        left = [other for other in worlds if relations[relation](other[a], other[b])]
        if world in left and len(left) < len(worlds):
            worlds = left
            clues.append(f"{a}{relation}{b}")
    answer = ", ".join(" ".join(name for name in names[:-3] if world[name] == house) for house in (1, 2, 3))
    return Problem(", ".join(sorted(clues)), answer, {})


def draw_problem(name: str, rng: random.Random) -> Problem | None:
    """A problem of a generated task, as `prompt` and `answer` below or in `zebra_problem`; None: draw again.

    sort, 5 to 9 digits: `52713`, `12357`. reverse, 5 to 9 letters: `abcde`, `edcba`. add, 3 digits: `123+456`, `579`.
    countdown, three numbers up to 20 and a target below 100: `3 7 20=41`, `(3*7)+20` or what else uses each one once.
    """
    if name == "zebra":
        return zebra_problem(rng)
    if name == "add":
        a, b = rng.randint(100, 999), rng.randint(100, 999)
        return Problem(f"{a}+{b}", str(a + b), {})
    if name in ("sort", "reverse"):
        letters = rng.choices(string.digits if name == "sort" else string.ascii_lowercase, k=rng.randint(5, 9))
        return Problem("".join(letters), "".join(sorted(letters) if name == "sort" else letters[::-1]), {})
    given = sorted(rng.randint(1, 20) for _ in range(3))  # or one problem could stand on both sides of the split
    (a, b, c), (p, q) = rng.sample(given, 3), rng.choices("+-*/", k=2)
    answer = rng.choice((f"({a}{p}{b}){q}{c}", f"{a}{p}({b}{q}{c})"))  # every tree of three leaves
    if (target := expression_value(answer)) in range(1, 100):
        return Problem(f"{given[0]} {given[1]} {given[2]}={target}", answer, {"numbers": given, "target": int(target)})


def final_number(text: str, lenient: bool) -> Decimal | None:
    """The number that a GSM8K answer ends with, None without one. Strict: after the first `#### `, as the data set's
    own grader reads it. Lenient: the last number of the text, `It costs $18.` -> 18."""
    number = r"(?:(?<![0-9])-)?\$?(?:[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?|\.[0-9]+)" if lenient else r"#### (-?[0-9.,]+)"
    found = re.findall(number, text) or [""]  # leniently, a minus after a digit is a subtraction
    digits = re.sub("[,$]", "", found[-1 if lenient else 0]).removesuffix(".")
    return Decimal(digits) if re.fullmatch(r"-?([0-9]+(\.[0-9]+)?|\.[0-9]+)", digits) else None


@dataclass(frozen=True)
class Task:
    """Problems of one kind, split by `is_held_out`; problem i depends on name, file, seed and i alone."""

    name: str
    seed: int
    rows: tuple[list[Problem], list[Problem]]  # of a file: to train on, held out

    def problem(self, index: int, held_out: bool) -> Problem:
        """Problem `index` of a split: a draw of its own, or a row of the file, which begins again at its end."""
        if self.name in FROM_FILE:
            return self.rows[held_out][index % len(self.rows[held_out])]
        rng, problem = random.Random(f"{self.name} {self.seed} {held_out} {index}"), None
        while problem is None or is_held_out(problem.prompt) != held_out:
            problem = draw_problem(self.name, rng)
        return problem

    def held_out(self, n: int) -> list[Problem]:
        """The first n held-out problems with different prompts; all there are, if they are fewer."""
        found: dict[str, Problem] = {}
        for index in range(len(self.rows[True]) or 50 * n):
            if len(found) < n:
                problem = self.problem(index, held_out=True)
                found.setdefault(problem.prompt, problem)
        return list(found.values())

    def reward(self, problem: Problem, text: str, lenient: bool = False) -> float:
        """1.0 for a right answer, else 0.0. `lenient`: gsm8k by the last number, for evaluation beside the strict."""
        if self.name == "gsm8k":
            return float(final_number(text, lenient) == final_number(problem.answer, lenient=False))
        if self.name == "countdown":
            used = sorted(map(int, re.findall("[0-9]+", text[:100])))
            return float(used == problem.data["numbers"] and expression_value(text) == problem.data["target"])
        return float(text.strip() == problem.answer)


def make_task(name: str, path: str, seed: int) -> Task:
    """The task of this name; gsm8k and jsonl read the JSON lines of `path`, where of equal prompts the first counts.

    Raises UserError: an unknown name, a file missing or not wanted, a row that is no problem, a split without any.
    """
    keys, problems, rows = FROM_FILE.get(name, ()), {}, ([], [])
    if name not in (*GENERATED, *FROM_FILE):
        raise UserError(f"TASK={name!r}: must be one of {', '.join((*GENERATED, *FROM_FILE))}")
    if bool(path) != bool(keys) or path and not Path(path).is_file():
        raise UserError(f"TASK_PATH={path!r}: must be {'a file of JSON lines' if keys else 'empty'} for TASK={name}")
    for number, line in enumerate(Path(path).read_bytes().splitlines() if path else (), 1):
        try:
            prompt, answer = (json.loads(line)[key].strip() for key in keys)
            (prompt + answer).encode()  # JSON can hold half a surrogate pair, UTF-8 cannot
            if not (prompt and answer) or name == "gsm8k" and final_number(answer, lenient=False) is None:
                raise ValueError("blank, or without a number")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise UserError(f"{path}:{number}: must be JSON with texts {keys[0]!r} and {keys[1]!r}, not blank (gsm8k's "
                            "with #### and a number)") from None
        problems.setdefault(prompt, Problem(prompt, answer, {}))
    for problem in random.Random(seed).sample([*problems.values()], len(problems)):
        rows[is_held_out(problem.prompt)].append(problem)
    if path and not all(rows):
        raise UserError(f"{path}: {len(rows[1])} of {len(problems)} problems held out by a hash; must be some, not all")
    return Task(name, seed, rows)


def load_reward(spec: str, task: Task, seconds: float) -> Callable[[list[Problem], list[str]], list[float]]:
    """The function from problems, and a text that answers each, to rewards that REWARD=`spec` names.

    Empty: the task's checker. random, for control runs: a fair coin by a hash of seed, prompt, text and how often the
    call had both before, so that neither batch nor rank nor resume changes it. path.py:function: a user's, called as
    function(prompts, completions, answers) in a daemon thread; one that hangs does not keep the process. UserError: a
    file or function that is none; later, with a sample, if the user's raises, takes over `seconds` (0: no limit) or
    returns anything but a list of numbers below 1e15, one a text.
    """
    def coins(problems: list[Problem], texts: list[str]) -> list[float]:
        pairs = [(problem.prompt, text) for problem, text in zip(problems, texts, strict=True)]
        return [float(random.Random(f"{task.seed} {pair} {pairs[:i].count(pair)}").getrandbits(1))
                for i, pair in enumerate(pairs)]

    def called(problems: list[Problem], texts: list[str]) -> list[float]:
        outcome = []

        def call() -> None:
            try:
                outcome.extend((function([p.prompt for p in problems], texts[:], [p.answer for p in problems]), ""))
            except BaseException as error:  # SystemExit too
                frame = error.__traceback__.tb_next  # None: the call itself failed
                outcome.extend((error, f" in line {frame.tb_lineno}" if frame else ""))

        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        thread.join(seconds or None)
        scores, line = outcome or (TimeoutError(f"over {seconds} seconds"), "")
        listed = isinstance(scores, list | tuple) and len(scores) == len(texts)
        for i, score in enumerate(scores if listed else [scores]):
            if not (listed and isinstance(score, Real) and abs(score) < 1e15):
                raise UserError(f"REWARD={spec!r}: must return a list of {len(texts)} numbers, not {score!r:.99}{line}"
                                f" for prompt {problems[i].prompt!r:.80}, completion {texts[i]!r:.80}")
        return [float(score) for score in scores]

    if spec in ("", "random"):
        return coins if spec else lambda problems, texts: [*map(task.reward, problems, texts)]
    path, _, name = spec.rpartition(":")
    if not (path.endswith(".py") and Path(path).is_file()):
        raise UserError(f"REWARD={spec!r}: must be empty, random, or path.py:function with a file that exists")
    source = importlib.util.spec_from_file_location(f"reward_{Path(path).stem}", path)
    module = sys.modules[source.name] = importlib.util.module_from_spec(source)  # there dataclasses look for it
    try:
        source.loader.exec_module(module)
        function = getattr(module, name).__call__  # or AttributeError
    except (Exception, SystemExit) as error:
        raise UserError(f"REWARD={spec!r}: must be a function that can be imported; {error!r:.200}") from error
    return called
# === end: tasks ===


# === shared: responses ===
def token_logps(network: GPT, batch: SimpleNamespace, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities (B, T) of batch.targets, 0 where these are -1, and the entropies there, without a gradient.

    Logits are made, and in the backward pass made again, for 4,096 tokens at a time: all of them, (B, T, vocabulary),
    would take more memory than the network.
    """
    def some(features: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        logps = (network.logits(features) / temperature).log_softmax(-1)  # (n, V)
        return logps.gather(1, wanted[:, None])[:, 0], torch.special.entr(logps.detach().exp()).sum(-1)

    features, wanted = network.features(batch.ids)[batch.mask], batch.targets[batch.mask]  # (tokens, dim), (tokens,)
    parts = [checkpoint(some, *part, use_reentrant=False)
             for part in zip(features.split(4096), wanted.split(4096), strict=True)]
    return tuple(torch.zeros(batch.mask.shape, device=wanted.device).masked_scatter(batch.mask, torch.cat(each))
                 for each in zip(*parts, strict=True))


def make_batches(rows: list[tuple], device: torch.device, tokens: int) -> list[SimpleNamespace]:
    """Rows (prompt ids, response ids, log-probabilities, advantage) as batches of at most so many tokens, or one row.

    Each is padded on the right to its longest: no padding stands before a token, so none enters a state. ids (B, T);
    targets (B, T), the token after each where that is the response's, else -1; mask, where they are not; sampled.
    """
    rows, found = sorted(rows, key=lambda row: len(row[0]) + len(row[1])), []
    while rows:
        width = len(rows[-1][0]) + len(rows[-1][1]) - 1
        here, rows = rows[-max(1, tokens // width) :], rows[: -max(1, tokens // width)]
        ids, sampled = torch.zeros(len(here), width, dtype=torch.long), torch.zeros(len(here), width)
        targets = torch.full_like(ids, -1)
        for at, (prompt, response, logps, _) in enumerate(here):
            span = slice(len(prompt) - 1, len(prompt) + len(response) - 1)
            ids[at, : span.stop] = torch.tensor([*prompt, *response[:-1]])
            targets[at, span], sampled[at, span] = torch.tensor(response), torch.tensor(logps)
        advantages = torch.tensor([row[3] for row in here])
        parts = {name: x.to(device) for name, x in dict(ids=ids, targets=targets, mask=targets >= 0, sampled=sampled,
                                                        advantages=advantages).items()}
        found.append(SimpleNamespace(**parts, old=None, reference=None))
    return found
# === end: responses ===


# === shared: policy ===
# What sections ask of settings that this script leaves alone: the small policy's shape; Muon.
POLICY = dict(norm="rms", mlp_mult=3.0, attn_window=1 << 20, bio_events="off", bio_threshold=0.3, positions="rope",
              rope_base=10000.0, rope_dims=0, qk_norm=True, qk_gain_init=4.0, residual_mix=True, unet_skips=False,
              bigram_vocab_size=0, bigram_dim=0, tie_embeddings=True, tied_embed_init_std=0.02, logit_softcap=30.0,
              gdn_neg_eigval=False)
MUON = dict(muon_momentum=0.95, muon_momentum_warmup_start=0.95, muon_momentum_warmup_frac=0.0,
            muon_momentum_warmup_steps=0, muon_backend_steps=5, muon_coefficients="quintic", muon_row_normalize=False,
            cautious_wd=False)
START_TEMPERATURES = (0.3, 0.5, 0.7, 1.0)  # sharpening alone must not look like learning
SFT_PROBLEMS, CHOICE_PROBLEMS, EVAL_STEP = 1 << 40, 1 << 41, 1 << 31  # numbers beyond those of problems and steps


def start_policy(settings: Settings, runtime: Runtime) -> tuple[GPT, Tokenizer, str]:
    """Network, on the runtime's device, and tokenizer: those of INIT_FROM, or new; and where they are from, as text."""
    if settings.init_from:
        network, tokenizer, source = load_model("INIT_FROM", settings.init_from, settings.tokenizer_path)
    else:
        torch.manual_seed(settings.seed)
        tokenizer, source = load_tokenizer(settings.tokenizer_path or "bytes"), "new"
        shape = SimpleNamespace(**{**POLICY, **vars(settings)}, num_kv_heads=settings.num_heads)
        network = GPT(model_config(shape, tokenizer.vocab_size, tokenizer.bos_id))
    adapted = any(name.endswith("lora_a") for name, _ in network.named_parameters())
    if adapted and not settings.lora_rank:
        raise UserError(f"LORA_RANK=0: {source} has adapters; must be their rank, to train them on")
    if settings.lora_rank:
        if settings.qat:
            raise UserError("QAT=1: adapters are not quantized; must be 0 with LORA_RANK")
        if not adapted:
            setup_lora_adapter(network, settings.lora_rank, settings.lora_alpha)
        freeze_model(network)
    network.activation_checkpointing = settings.activation_checkpointing
    return network.to(runtime.device), tokenizer, source


def warm_start(network: GPT, tokenizer: Tokenizer, task: Task, settings: Settings, runtime: Runtime) -> float:
    """SFT_STEPS of AdamW on batches of 64 demonstrations, of the answers alone; the last loss, in nats a token."""
    optimizer, size = torch.optim.AdamW(network.parameters(), betas=(0.9, 0.95), weight_decay=0.0), 64
    for step in range(settings.sft_steps):
        rows = []
        for at in range(step * size, (step + 1) * size):
            problem = task.problem(SFT_PROBLEMS + at, False)
            prompt, end = chat_ids(tokenizer, problem.prompt)
            response = [*tokenizer.encode(problem.answer), end]
            rows.append((prompt, response, [0.0] * len(response), 0.0))
        optimizer.param_groups[0]["lr"] = settings.sft_lr * min(1.0, (step + 1) / 10, 2 - 2 * step / settings.sft_steps)
        [batch] = make_batches(rows, runtime.device, 1 << 30)
        loss = -token_logps(network, batch, 1.0)[0].sum() / batch.mask.sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for param in network.parameters() if runtime.distributed else ():
        dist.broadcast(param.detach(), src=0)
    return loss.item()


def solve(trainer, task: Task, problems: list[Problem], count: int, temperature: float) -> Tensor:
    """Whether `count` samples of each problem are right by the task's own checker, (n, count) of 0 and 1, float64.

    trainer: has settings, runtime and `sample`; the ranks share out the problems.
    """
    runtime, right = trainer.runtime, torch.zeros(len(problems), count, dtype=torch.float64)
    own = range(runtime.rank, len(problems), runtime.world_size)
    groups = trainer.sample([problems[at] for at in own], count, temperature,
                            [(trainer.settings.seed, EVAL_STEP, at) for at in own])
    for at, group in zip(own, groups, strict=True):
        right[at] = torch.tensor([float(task.reward(problems[at], text) >= 1) for text in group.texts])
    return runtime.sum(right.to(runtime.device)).cpu()


def mean_interval(values: Tensor) -> list[float]:
    """Mean of (n,) values of different prompts and the ends of its 95% interval, by the normal approximation."""
    mean, half = values.mean().item(), 1.96 * values.std().item() / len(values) ** 0.5
    return [mean, mean - half, mean + half]


def policy_scores(greedy: Tensor, sampled: Tensor) -> dict:
    """For result.json, of held-out problems: greedy (n, 1), sampled (n, k); each share with its 95% interval."""
    found = {"greedy": greedy[:, 0], "pass1": sampled.mean(1), f"pass{sampled.size(1)}": sampled.amax(1)}
    return {"n": len(greedy), **{name: mean_interval(values) for name, values in found.items()}}
# === end: policy ===


# --------------------------------------------------------------------------------------------------------- objective
def group_advantages(rewards: Tensor, scale: str, batch_std: Tensor) -> Tensor:
    """Rewards (P, G) less their group's mean, over its standard deviation (of a sample, + 1e-4), `batch_std`, or 1.

    arXiv 2402.03300, section 4.1.2; "none" is Dr. GRPO's (2503.20783). A group of one reward has advantages of 0.
    """
    centred = rewards - rewards.mean(1, keepdim=True)
    if scale == "none":
        return centred
    return centred / ((rewards.std(1, keepdim=True) if scale == "group" else batch_std) + 1e-4)


def token_weights(mask: Tensor, total: Tensor, settings: Settings, ranks: int) -> Tensor:
    """What each token's loss counts, (B, T), so that losses add up over micro-batches and ranks to the mini-batch's.

    mask (B, T), the tokens of responses; total (3,): samples and tokens of the mini-batch, tokens of this rank's part.
    """
    samples, tokens, own = total
    return mask / {"sequence": samples * mask.sum(1, keepdim=True).clamp(min=1), "dapo": tokens, "bnpo": own * ranks,
                   "dr_grpo": samples * settings.max_new_tokens}[settings.reduction]


def importance(delta: Tensor, mask: Tensor, settings: Settings) -> Tensor:
    """Ratio of probabilities (B, T) by which the clipped surrogate weighs a token; delta (B, T), log p - log p_old."""
    return delta.exp()


def policy_loss(logps: Tensor, batch: SimpleNamespace, settings: Settings) -> tuple[Tensor, Tensor]:
    """Loss of each token (B, T), and of it (5, B, T): clip active, r outside, |log p / p_old|, KL, sampler gap.

    The clipped surrogate (arXiv 1707.06347, equation 7) of r with a band that may be asymmetric (2503.14476), and with
    KL_BETA that times k3 = e^x - x - 1, x = log p_ref - log p. Of `batch`: mask (B, T), advantages (B,), old, reference
    and sampled, log-probabilities (B, T). Active: the clip is what the loss takes, so there is no gradient; outside: r
    is not in the band, whatever the advantage's sign. Sampler gap: |log p_old - what the sampler had|.
    """
    advantages, mask, reference = batch.advantages[:, None], batch.mask, batch.reference
    delta, away = (logps - batch.old) * mask, ((logps.detach() if reference is None else reference) - logps) * mask
    ratio, low, high = importance(delta, mask, settings), 1 - settings.left_clip_range, 1 + settings.right_clip_range
    limited = ratio.clamp(max=settings.ratio_limit) if settings.ratio_limit else ratio
    loss = -torch.minimum(limited * advantages, ratio.clamp(low, high) * advantages)
    below, above, kl = ratio < low, ratio > high, away.exp() - away - 1
    active = below & (advantages < 0) | above & (advantages > 0)
    logged = torch.stack([active, below | above, delta.abs(), kl, (batch.old - batch.sampled).abs()]).detach() * mask
    return loss + settings.kl_beta * kl, logged


GRPOConfig = Settings  # GRPOConfig(learning_rate=1e-4, group_size=16)


class GRPOTrainer:
    """A policy that learns from rewards: `train_step` is a rollout and its updates, `train` many of them.

    model: a GPT; tokenizer: of load_tokenizer; config: Settings, which other trainers call args. train_dataset: prompts
    for `train`, strings or objects with `prompt`. ref_model: a GPT to stay near to by KL_BETA, in place of REFERENCE.
    Raises UserError where the numbers do not fit together.
    """

    def __init__(self, model: GPT, tokenizer: Tokenizer, config: Settings | None = None, *, args: Settings | None = None,
                 ref_model: GPT | None = None, train_dataset: list | None = None, runtime: Runtime | None = None):
        self.settings = s = config or args or Settings()
        self.network, self.tokenizer, self.dataset = model, tokenizer, train_dataset
        self.runtime = runtime or Runtime(0, 1, model.embed.device, False)
        self.unit = s.mini_batches * self.runtime.world_size
        for wrong, said in (
            (s.group_size < 2, f"GROUP_SIZE={s.group_size}: must be at least 2, for a group's rewards are compared"),
            (s.prompts_per_step % self.unit, f"PROMPTS_PER_STEP={s.prompts_per_step}: must be a multiple of MINI_BATCHES "
                                             f"x ranks = {self.unit}"),
            (s.temperature <= 0, f"TEMPERATURE={s.temperature}: must be above 0, or all samples of a group are one"),
        ):
            if wrong:
                raise UserError(said)
        rates = dict.fromkeys(("matrix_lr", "tied_embed_lr", "head_lr", "scalar_lr"), s.learning_rate)
        decay = dict.fromkeys(("muon_wd", "adam_wd"), s.weight_decay)
        self.optimizers = Optimizers(model, SimpleNamespace(**MUON, **vars(s), **rates, **decay), self.runtime)
        free = torch.cuda.mem_get_info()[0] if self.runtime.device.type == "cuda" else 1 << 30
        activations = 100 * model.config.model_dim * len(model.block_of_layer)  # bytes a token, about
        self.micro_tokens = s.micro_batch_tokens or max(4096, free // 2 // activations)
        self.table, self.qat, self.stop = quant_table(s), False, frozenset([chat_ids(tokenizer, "")[1]])
        self.trained, self.reference = [param for param in model.parameters() if param.requires_grad], None
        if s.kl_beta:
            self.reference = reference_policy(model, s.reference == "start")
        if s.kl_beta and ref_model is not None:
            self.reference = functools.partial(swapped, self.trained, [
                dict(ref_model.named_parameters())[name].detach().clone() for name in self.optimizers.names.values()])

    def weights(self) -> contextlib.AbstractContextManager[None]:
        """The weights that sample and are scored: in quantization-aware training, as the artifact gives them back."""
        return quantized(self.network, self.table) if self.qat else contextlib.nullcontext()

    def sample(self, queries: list, count: int, temperature: float, seeds: list[tuple]) -> list[SimpleNamespace]:
        """`count` completions of each query: a group with query, prompt (its ids), samples and texts."""
        prompts = [chat_ids(self.tokenizer, getattr(query, "prompt", query))[0] for query in queries]
        longest = max(map(len, prompts), default=0)
        if longest + self.settings.max_new_tokens > (most := self.network.config.train_seq_len):
            raise UserError(f"MAX_NEW_TOKENS={self.settings.max_new_tokens}: after a prompt of {longest} tokens the model's "
                            f"context of {most} has no room; must be at most {most - longest}")
        with torch.no_grad(), self.weights(), parametrize.cached():
            found = iter(generate(self.network, prompts, count, self.settings.max_new_tokens, temperature, 0, 1.0, seeds,
                                  self.stop))
        groups = []
        for query, prompt in zip(queries, prompts, strict=True):
            samples = list(itertools.islice(found, count))
            texts = [completion(self.tokenizer, prompt, sample.ids) for sample in samples]
            groups.append(SimpleNamespace(query=query, prompt=prompt, samples=samples, texts=texts, rewards=[]))
        return groups

    def groups(self, queries: Callable[[int, int], object], count: int, reward: Callable,
               step: int) -> list[SimpleNamespace]:
        """This rank's groups of `count`, rewarded, in the order of mini-batches; drawn again as DYNAMIC_ROUNDS says."""
        s = self.settings
        ranks = np.arange(count).reshape(s.mini_batches, self.runtime.world_size, -1)
        found = dict.fromkeys(ranks[:, self.runtime.rank].reshape(-1).tolist())  # number -> group
        for draw in range(s.dynamic_rounds + 1):
            wanted = [number for number, group in found.items() if group is None or len(set(group.rewards)) == 1]
            groups = self.sample([queries(number, draw) for number in wanted], s.group_size, s.temperature,
                                 [(s.seed, step, draw, number) for number in wanted])
            asked = [(group.query, text) for group in groups for text in group.texts]
            rewards = list(map(float, reward(*map(list, zip(*asked, strict=True))))) if asked else []
            if len(rewards) != len(asked) or not all(map(math.isfinite, rewards)):
                raise UserError(f"reward: {len(rewards)} numbers for {len(asked)} completions, or one is not finite")
            for at, (number, group) in enumerate(zip(wanted, groups, strict=True)):
                group.rewards, found[number] = rewards[at * s.group_size : (at + 1) * s.group_size], group
        return list(found.values())

    @torch.no_grad()
    def rollout(self, queries: Callable[[int, int], object], count: int, reward: Callable,
                step: int) -> SimpleNamespace:
        """Samples of this rank's share of `count` prompts, as rows of make_batches by mini-batch; metrics of all ranks'.

        queries(number, draw): prompt `number` of a step; another one for each draw, see DYNAMIC_ROUNDS. reward: from
        lists of queries, each GROUP_SIZE times, and of completions to a list of numbers.
        """
        s, begin = self.settings, time.perf_counter()
        groups = self.groups(queries, count, reward, step)
        rewards = torch.tensor([group.rewards for group in groups], dtype=torch.float64)  # (P, G)
        lengths = torch.tensor([[len(sample.ids) for sample in group.samples] for group in groups]).double()
        ended = torch.tensor([[sample.finished for sample in group.samples] for group in groups]).double()
        over = lengths - s.max_new_tokens + s.overlong_buffer  # DAPO's soft punishment, arXiv 2503.14476, equation 13
        shaped = rewards - (over / s.overlong_buffer).clamp(0, 1) if s.overlong_buffer else rewards
        alike = (rewards == rewards[:, :1]).all(1, keepdim=True).expand_as(rewards).double()
        sums = torch.stack([torch.ones_like(shaped), shaped, shaped**2, rewards, rewards**2, lengths, ended, alike])
        total, *means = self.runtime.sum(sums.sum((1, 2)).to(self.runtime.device)).tolist()
        shaped_mean, shaped_square, mean, square, length, finished, zero = (each / total for each in means)
        batch_std = math.sqrt(max(0.0, shaped_square - shaped_mean**2) * total / (total - 1))
        advantages = group_advantages(shaped, s.scale_rewards, batch_std).tolist()
        rows = [[(group.prompt, sample.ids, sample.logps, advantage)
                 for sample, advantage in zip(group.samples, own, strict=True)]
                for group, own in zip(groups, advantages, strict=True)]
        share = len(rows) // s.mini_batches
        rows = [list(itertools.chain(*rows[at : at + share])) for at in range(0, len(rows), share)]
        return SimpleNamespace(rows=rows, metrics={
            "reward": mean, "reward_std": math.sqrt(max(0.0, square - mean**2)), "zero_variance": zero,
            "length": length, "finished": finished, "truncated": 1 - finished,
            "gen_tok_s": total * length / (time.perf_counter() - begin)})

    def update(self, rollout: SimpleNamespace, multiplier: float = 1.0) -> dict:
        """MINI_BATCHES x EPOCHS optimizer steps at `multiplier` times the learning rate; what was measured in them."""
        s, begin, runtime = self.settings, time.perf_counter(), self.runtime
        minis = [make_batches(rows, runtime.device, self.micro_tokens) for rows in rollout.rows]
        with torch.no_grad(), self.weights():  # by the training forward: a sampler's last digits count in a narrow band
            for batch in itertools.chain(*minis):
                batch.old, _ = token_logps(self.network, batch, s.temperature)
        with torch.no_grad(), self.reference() if self.reference else contextlib.nullcontext():
            for batch in itertools.chain(*minis) if self.reference else ():
                batch.reference, _ = token_logps(self.network, batch, s.temperature)
        seen = []
        for batches in minis * s.epochs:
            size = torch.tensor([sum(len(batch.ids) for batch in batches),
                                 sum(int(batch.mask.sum()) for batch in batches)], device=runtime.device)
            total = torch.cat([runtime.sum(size.clone()), size[1:]])
            torch._foreach_zero_([param.grad for param in self.optimizers.params])
            sums = torch.zeros(8, device=runtime.device)  # loss, tokens, entropy, and policy_loss's five
            with self.weights():
                for batch in batches:
                    logps, entropy = token_logps(self.network, batch, s.temperature)
                    losses, logged = policy_loss(logps, batch, s)
                    loss = (losses * token_weights(batch.mask, total, s, runtime.world_size)).sum()
                    loss.backward()
                    sums += torch.stack([loss.detach(), batch.mask.sum(), entropy.sum(), *logged.sum((1, 2))])
            norm, sums = self.optimizers.reduce_gradients(runtime, s.grad_clip_norm, sums)
            bad = ~torch.isfinite(norm)
            self.optimizers.step(multiplier, 0.95, bad)
            seen.append(torch.cat([torch.stack([norm, bad]), sums]))
        norm, bad, loss, tokens, *sums = torch.stack(seen).double().cpu().T  # (updates,) each
        names = "entropy clip_active clip_outside log_ratio kl sampler_gap".split()
        return {"loss": loss.mean().item(), **{name: (each.sum() / tokens.sum()).item() for name, each in zip(names, sums)},
                "grad_norm": norm.mean().item(), "bad": bad.sum().item(),
                "train_tok_s": tokens.sum().item() / (time.perf_counter() - begin),
                "clips": (torch.stack(sums[1:3]) / tokens).T.tolist()}  # of each update: active, outside

    def train_step(self, queries: list, reward_function: Callable, step: int = 0, multiplier: float = 1.0) -> dict:
        """A rollout of `queries`, strings or objects with `prompt`, and its updates; the metrics of both.

        reward_function: from lists of queries, each GROUP_SIZE times, and of completions to a list of numbers.
        """
        if not queries or len(queries) % self.unit:
            raise UserError(f"train_step: {len(queries)} queries; must be a multiple of MINI_BATCHES x ranks = {self.unit}")
        rollout = self.rollout(lambda number, draw: queries[number], len(queries), reward_function, step)
        return {**rollout.metrics, **self.update(rollout, multiplier)}

    def query(self, task: Task | None, step: int, number: int, draw: int) -> object:
        """Prompt `number` of a step, at the `draw`-th time: of the task's training problems, or of train_dataset."""
        at = (step * (self.settings.dynamic_rounds + 1) + draw) * self.settings.prompts_per_step + number
        return task.problem(at, False) if task else self.dataset[at % len(self.dataset)]

    def train(self, reward_function: Callable | None = None) -> list[dict]:
        """ITERATIONS steps over train_dataset, or over TASK with its own reward; the metrics of each."""
        s, task = self.settings, None
        if not s.iterations or self.dataset and not reward_function:
            raise UserError(f"ITERATIONS={s.iterations}: train needs some, and for a train_dataset a reward_function")
        if not self.dataset:
            task = make_task(s.task, s.task_path, s.seed)
        reward, found = reward_function or load_reward(s.reward, task, s.reward_seconds), []
        for step in range(s.iterations):
            rollout = self.rollout(functools.partial(self.query, task, step), s.prompts_per_step, reward, step)
            found.append({**rollout.metrics, **self.update(rollout)})
        return found


# -------------------------------------------------------------------------------------------------------------- main
def main() -> int:
    """One run, from settings to result.json; its exit code. Raises UserError before the first step."""
    begin = time.perf_counter()
    settings = load_settings(Settings, dict(os.environ), stored=lambda given: stored_settings(given, Settings.out_dir))
    plan, runtime = Plan(SimpleNamespace(**MUON, **vars(settings))), start_runtime(settings.device, settings.deterministic)
    task = make_task(settings.task, settings.task_path, settings.seed)
    reward, problems = load_reward(settings.reward, task, settings.reward_seconds), task.held_out(settings.eval_prompts)
    network, tokenizer, source = start_policy(settings, runtime)
    config = network.config
    replay = json.loads((Path(settings.replay) / "progress.json").read_bytes())["progress"] if settings.replay else []
    budget = max(0.0, settings.max_wallclock_seconds - settings.reserve_seconds)
    clock = Clock(settings.iterations, budget, runtime, replay)
    run = Run(settings, runtime, {}, {**vars(config), "tokenizer_sha256": tokenizer.sha256, **{
        name: getattr(settings, name) for name in ("seed", "task", "prompts_per_step", "group_size", "lora_rank")}})
    checkpoint_path, folder, log = run.open(), run.folder, run.log
    watch = Watch(runtime, folder, settings.hang_seconds, log)
    if runtime.rank == 0 and tokenizer.file != "bytes":
        (folder / tokenizer.file).write_bytes(tokenizer.content)
    if source == "new" and not checkpoint_path:
        loss = warm_start(network, tokenizer, task, settings, runtime)
        log(f"policy: new, {settings.sft_steps} supervised steps on demonstrations of {task.name}, outside the clock; "
            f"last loss {loss:.4f}")
    elif source != "new":
        log(f"policy: {source}")
    trainer = GRPOTrainer(network, tokenizer, settings, runtime=runtime)
    memory = {"ema": settings.ema_memory_frac, "swa": None}
    averages = {name: Average(trainer.trained, memory[name]) for name in memory if getattr(settings, name)}
    before, history = {}, {"reward": [], "zero_variance": []}
    kept = dict(enumerate(trainer.reference.args[1] if trainer.reference else []))
    states = {name: SimpleNamespace(state_dict=functools.partial(dict, own), load_state_dict=own.update)
              for name, own in (("before", before), ("history", history), ("reference", kept))}
    run.parts = dict(network=network, optimizers=trainer.optimizers, plan=plan, clock=clock, **averages, **states)
    log("parameters: " + " ".join(f"{name}:{count}" for name, count in count_parameters(network).items())
        + f" trained:{sum(map(Tensor.numel, trainer.trained))} layers: {config.layers}")
    log(plan.describe())
    s, share = settings, settings.prompts_per_step // settings.mini_batches
    log(f"batch: a step is {s.prompts_per_step} prompts x {s.group_size} samples = {s.prompts_per_step * s.group_size}; "
        f"{s.mini_batches} mini-batches x {s.epochs} epochs = {s.mini_batches * s.epochs} updates of {share} x "
        f"{s.group_size} = {share * s.group_size} samples, over {runtime.world_size} ranks")
    log("note: the first mini-batch of a step has a loss of 0 and no clips, for its ratios are 1 and the advantages of a "
        "group add up to 0; its gradient is not 0. Rewards and the held-out scores say whether the policy learns")
    score = functools.partial(solve, trainer, task, problems)
    if checkpoint_path:
        run.load(Path(checkpoint_path))
        for number, value in enumerate(trainer.reference.args[1] if trainer.reference else []):
            value.copy_(kept[number])
        if clock.packet is not None:
            clock.packet[2] = 0.0  # a stop that was asked for then
    else:
        before |= {"greedy": score(1, 0.0), **{str(at): score(s.eval_samples, at) for at in
                                               sorted({*START_TEMPERATURES, s.temperature})}}
        if min(run.every_steps, run.every_seconds) < math.inf:
            run.save(0.0)  # what would keep the run from saving shows before its first step
    start = policy_scores(before["greedy"], before[str(s.temperature)])
    log(f"before: {start}")
    log(f"set-up and first scores: {time.perf_counter() - begin:.1f} s, outside the clock")
    metrics, stop, watch.looping = {}, False, True

    def report(loss: float) -> None:
        if not metrics:
            return  # a step from before the run was resumed
        seconds, done = clock.seconds[-1], run.step
        clips = " ".join(f"{active:.3f}/{outside:.3f}" for active, outside in metrics["clips"])
        line = (f"step:{done}/{s.iterations or '?'} " + " ".join(
            f"{name}:{value:.4g}" for name, value in metrics.items() if name not in ("bad", "clips"))
            + f" clips_by_update:[{clips}] train_time:{1000 * seconds:.0f}ms step_avg:{1000 * seconds / done:.0f}ms")
        if done % s.train_log_every == 0 or done <= 5:
            log(line)
        elif run.clear:
            left = f"{clock.budget - seconds:.0f} s left " if clock.budget < math.inf else ""
            print(run.clear + left + line[:100], end="", flush=True)

    clock.start()
    while True:
        last_step, watch.began = clock.is_last(run.step), math.inf  # no limit for validation and saving
        stop |= watch.signal > 0 and not runtime.distributed
        if s.val_loss_every and run.step and run.step % s.val_loss_every == 0 and not (last_step or stop):
            clock.stop()
            log(f"step:{run.step} held_out {policy_scores(score(1, 0.0), score(s.eval_samples, s.temperature))}")
            clock.start()
        due = run.step % run.every_steps == 0 or clock.seconds[-1] - run.saved >= run.every_seconds
        if stop or last_step or run.step and due:
            clock.stop()
            run.save(clock.seconds[-1])
            runtime.agree("")  # all wait here, where the watch does not count the seconds
            clock.start()
        if last_step or stop:
            break
        watch.step, watch.median, watch.began = run.step, clock.median_step(), time.monotonic()

        data_step = run.step + run.skipped
        queries = functools.partial(trainer.query, task, data_step)
        rollout = trainer.rollout(queries, s.prompts_per_step, reward, data_step)
        previous = clock.receive()  # of the step before
        if previous is not None:
            stop = previous[2]
            watch.agreed |= stop
            if run.judge(*previous[:2]):
                report(previous[0])
            elif s.spike_policy == "rewind":
                continue
        progress = clock.progress(run.step)
        begun = plan.advance(run.step, progress)
        for name in begun:
            log(f"phase: {name} begins at step {plan.phases[name].start_step}, {progress:.1%} of the run")
        multiplier, _ = plan.rates(progress)
        metrics = {**rollout.metrics, **trainer.update(rollout, multiplier), "lr_mul": multiplier, "progress": progress}
        trainer.qat = s.qat and plan.phases["qat"].start_step > 0
        for name, average in averages.items():
            if "qat" in begun:  # an average of weights that never saw the quantizer does not fit it
                average.count = 0
            elif plan.phases[name].start_step:
                average.update(progress)
        for name, values in history.items():
            values.append(metrics[name])
        signals = runtime.sum(torch.tensor(float(watch.signal), device=runtime.device))
        clock.send(torch.tensor(metrics["loss"], device=runtime.device), signals.new_tensor(metrics["bad"]), signals)
        run.step += 1
        if len(history["reward"]) == 10 and min(history["zero_variance"]) == 1:
            run.save(clock.elapsed())
            raise UserError(f"REWARD={s.reward!r}: in the first 10 steps each group has one reward (mean "
                            f"{statistics.mean(history['reward']):.3f}), so nothing can be learned; needs another start "
                            "(INIT_FROM, SFT_STEPS) or TASK")

    clock.stop()
    previous = None if stop else clock.receive()
    if stop or previous and previous[2] or watch.signal and not runtime.distributed:
        number = signal.Signals(watch.signal or signal.SIGTERM)
        log(f"stopped by {number.name} after step {run.step}; RESUME={folder} goes on")
        runtime.leave()
        return 128 + number
    watch.looping = False
    if previous and run.judge(*previous[:2], last=True):
        report(previous[0])
    if runtime.rank == 0:
        used = {"settings": vars(settings), "progress": clock.used, "events": run.events}
        replace_file(folder / "progress.json", json.dumps(used).encode())

    clock.start()
    values = {"raw": [param.detach() for param in trainer.trained],
              **{name: average.values for name, average in averages.items() if average.count}}
    trainer.qat, shares = not s.lora_rank, {}  # adapters are quantized as parts of the weights that they change
    seen = [task.problem(CHOICE_PROBLEMS + at, False) for at in range(256)]
    for name in values if len(values) > 1 else ():
        with swapped(trainer.trained, values[name]):
            shares[name] = solve(trainer, task, seen, 1, s.temperature).mean().item()
        log(f"weights: {name}, pass1 {shares[name]:.4f} on {len(seen)} training problems")
    chosen = max(shares, key=shares.get, default="raw")
    log(f"weights: {chosen} chosen")
    torch._foreach_copy_(values["raw"], values[chosen])
    if s.lora_rank:
        merge_lora(network)
    state = network.state_dict()
    packed, sizes = pack_artifact(state, quantize_all(state, trainer.table), vars(config), tokenizer.sha256,
                                  {"seed": s.seed, "tokenizer": tokenizer.file})
    clock.stop()
    log(plan.describe(ended=True))
    log(f"clock: {clock.elapsed():.1f} s to train and choose, MAX_WALLCLOCK_SECONDS={s.max_wallclock_seconds}")
    if s.replay:
        run.event("replay", of=s.replay)
    elif 0 < s.max_wallclock_seconds < clock.elapsed():
        run.event("over_clock", seconds=clock.elapsed(), hint="choosing wants more RESERVE_SECONDS")

    artifact = folder / "model.upar"
    if runtime.rank == 0:
        replace_file(artifact, packed)
    runtime.agree("")  # rank 0 has written it
    trainer.network, *_ = load_model("ARTIFACT", str(artifact))
    trainer.network.to(runtime.device)
    trainer.qat = False  # from here on the network that the file holds, by that file alone
    greedy, sampled = score(1, 0.0), score(s.eval_samples, s.temperature)
    after = policy_scores(greedy, sampled)
    best = max((name for name in before if name != "greedy"), key=lambda name: before[name].mean())
    log(f"after: {after}")
    was, k = before[str(s.temperature)], s.eval_samples
    gain = {"greedy": greedy[:, 0] - before["greedy"][:, 0], "pass1": sampled.mean(1) - was.mean(1),
            f"pass{k}": sampled.amax(1) - was.amax(1), "pass1_over_best": sampled.mean(1) - before[best].mean(1)}
    gain = {name: mean_interval(values) for name, values in gain.items()}
    log(f"gain: {gain}, paired; best: of the start at temperature {best}")

    code = len(Path(__file__).read_bytes()) + (len(Path(s.config).read_bytes()) if s.config else 0)
    total = code + artifact.stat().st_size
    faults = [f"phase {name} was enabled and never fired" for name, phase in plan.phases.items() if not phase.steps]
    if total > s.artifact_bytes_max:
        faults.append(f"{total} bytes of code and artifact, more than ARTIFACT_BYTES_MAX={s.artifact_bytes_max}")
    if runtime.rank == 0:
        result = {
            "script": Path(__file__).name, "run_id": folder.name, "seed": s.seed, "code_sha256": sha256_file(__file__),
            "tokenizer_sha256": tokenizer.sha256, **describe_machine(runtime), "world_size": runtime.world_size,
            "task": task.name, "init_from": source, "steps": run.step,
            "samples": run.step * s.prompts_per_step * s.group_size, "train_seconds": clock.elapsed(),
            "total_seconds": time.perf_counter() - begin, "params": count_parameters(network), "weights": chosen,
            "optimizer_state_bytes": sum(t.nbytes for own in trainer.optimizers.state_dict().values() for t in own.values()),
            "before": {**start, "pass1_by_temperature": {name: before[name].mean().item() for name in before
                                                         if name != "greedy"}},
            "after": after, "gain": gain, "last": {name: value for name, value in metrics.items() if name != "clips"},
            "artifact": str(artifact), "artifact_sha256": sha256_file(artifact),
            "artifact_bytes": artifact.stat().st_size, "code_bytes": code, "total_bytes": total,
            "bytes_by_class": sizes, "phases": plan.state_dict(), "events": run.events, "settings": asdict(settings),
        }
        replace_file(folder / "result.json", (json.dumps(result, indent=1) + "\n").encode())
        log("---\n" + "\n".join(f"{key}: {value}" for key, value in result.items() if not isinstance(value, dict)))
        for fault in faults:
            log(f"error: {fault}; everything was saved", terminal=False)
            sys.stderr.write(f"error: {fault}; everything was saved\n")
    runtime.leave()
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
