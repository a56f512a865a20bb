"""Proximal policy optimization (PPO, arXiv 1707.06347): learn from rewards, with a critic.

    python data/tasks.py sort; RUN_ID=sorted ITERATIONS=100 python train_sft.py
    INIT_FROM=runs/sorted python train_ppo.py
    INIT_FROM=runs/<RUN_ID> TRAIN_FILES=problems.jsonl REWARD=mine.py:score python train_ppo.py
    INIT_FROM=runs/<RUN_ID> torchrun --standalone --nproc_per_node=8 train_ppo.py
    INIT_FROM=runs/<RUN_ID> REWARD_MODEL=runs/<RUN_ID> python train_ppo.py

INIT_FROM is required: a run, a checkpoint or an artifact that answers some problems right. A row of
TRAIN_FILES has the texts `prompt` (or `question`) and `answer`. REWARD is exact, or a function in a
file, as TRL calls it: score(prompts, completions, answer, **columns) returns a number for each
completion.

A step: GROUP_SIZE samples of each of PROMPTS_PER_STEP prompts, their rewards, a value for each
token, advantages (GAE), then MINI_BATCHES x EPOCHS updates of policy and critic. Guide: docs/ppo.md.

Every setting below is an environment variable: its name in capitals. A run writes runs/<RUN_ID>/:
log.txt, metrics.jsonl (a line for each step), samples.jsonl (answers), checkpoints, final/ (the trained
weights), model.upar (the artifact, read back and scored at the end) and result.json.
The file is in this order: Settings; the model; optimizer and schedule; quantization and artifact;
what surrounds a run (settings parser, ranks, errors, checkpoints, log); prompts, sampling, rewards;
at the end, without fences, the objective and `main`, the training loop.
Sections between `# === shared:` fences are in other scripts too, byte for byte (tools/sync.py);
in a copy of your own change them as you like.

Where to change what:
    another loss or clip                  ppo_loss
    another advantage                     advantage_estimates; whitened in PPOTrainer.experience
    the penalty in the rewards            shaped_rewards, divergences
    how answers are sampled               PPOTrainer.sample, generate
    another reward                        exact_match, weigh; or REWARD=file.py:function
    what a step logs of answers           answer_metrics
    what a step logs of tokens            UPDATE_SUMS, ppo_loss; of advantages, PPOTrainer.experience
    what a batch has of an answer         token_row, make_batches
    what a resumed run continues with     Stateful, STATE; run.parts in main
    another layer, or a new one           GatedDeltaNet, Attention, MLP, Block
    another norm                          Norm, NORMS
    another position                      rotation, rotate
    another optimizer                     make_optimizers
    another schedule, another phase       Plan, PHASE_STARTS
    which problems a step reads           problem_of, split_problems, problems_of_step
    a new setting                         Settings; if a resumed run must keep it, IDENTITY
A term of the loss goes into ppo_loss, which scores never call. The old log-probabilities are
computed without gradients: no value in the forward may depend on torch.is_grad_enabled().
"""

# /// script
# requires-python = ">=3.10"
# dependencies = [
#     "torch==2.13.0",
#     'numpy==2.4.6; python_version >= "3.11"',
#     'numpy==2.2.6; python_version < "3.11"',
#     "sentencepiece==0.2.3",
#     "tiktoken==0.14.0",
#     "zstandard==0.25.0",
# ]
# ///

import asyncio
import base64
import calendar
import collections
import contextlib
import copy
import difflib
import faulthandler
import functools
import gzip
import hashlib
import importlib.util
import inspect
import io
import itertools
import json
import math
import os
import random
import re
import reprlib
import resource
import shlex
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import sysconfig
import threading
import time
import traceback
import unicodedata
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, NewType, get_args

import numpy as np
import regex
import sentencepiece
import tiktoken
import torch
import torch.distributed as dist
import torch.nn.functional as F
import zstandard
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import pad_sequence
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint as activation_checkpoint


# === shared: bounds ===
class UserError(Exception):
    """A mistake of the user. It is printed as one line, and the exit code is 2."""


Paths = NewType("Paths", str)  # of a setting: a file, a folder or several; `~` is the home folder


def bounded(default, low, high=math.inf):
    """Return a setting with a lowest and a highest value; other numbers have a lowest of 0."""
    return field(default=default, metadata={"bounds": (low, high)})


# === end: bounds ===


# ---------------------------------------------------------------------------------------------------------- settings
@dataclass(frozen=True)
class Settings:
    """Every setting is an environment variable: its name in capitals."""

    # run
    run_id: str = ""  # name of the run's folder; empty: a name made of the date
    out_dir: Paths = "runs"  # folder in which runs are written
    config: Paths = ""  # file of NAME=value lines; the environment overrides it
    resume: Paths = ""  # run to continue from its newest whole checkpoint: a RUN_ID or a folder
    # finished run to repeat step by step: its stored progress replaces the clock
    replay: Paths = ""
    seed: int = bounded(1337, 0, 2**31 - 1)  # decides every random draw
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: CUDA if there is a device
    # dtype of activations; auto: bfloat16 on a GPU that is fast at it, in train_gpt.py also on a CPU
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    # torch.compile, or a mode of it; on a CPU it needs a C++ compiler
    compile: Literal[False, True, "reduce-overhead", "max-autotune"] = False
    # kernels on CUDA; auto: those that pass a check, fla: an error if fla's do not pass
    kernels: Literal["auto", "plain", "fla"] = "auto"
    activation_checkpointing: bool = False  # recompute layers in the backward pass: less memory
    # problems
    train_files: Paths = "data/sort.jsonl"  # FILE,FILE of rows; for SFT and DPO each maybe :WEIGHT
    val_files: Paths = ""  # FILE,FILE of held-out rows; empty: one prompt in ten, by a hash
    reward: Paths = "exact"  # of an answer: exact, or file.py:function, see load_reward_functions
    mark: Paths = ""  # file.py:function that marks held-out answers; empty: the first of REWARD
    reward_seconds: float = 120.0  # the log names a reward function that takes longer
    # run, checkpoint or artifact with a value head that scores answers in place of REWARD, which
    # then scores held-out answers alone
    reward_model: Paths = ""
    eval_prompts: int = bounded(512, 2)  # prompts that score the model, at most
    # policy at the start
    # a run, a checkpoint or an artifact; empty: a new network, in train_gpt.py and train_sft.py
    init_from: Paths = ""
    lora_rank: int = 0  # of adapters, which alone are trained; 0: all weights are
    lora_alpha: float = 16.0  # adapters count by LORA_ALPHA / LORA_RANK
    # rollout
    prompts_per_step: int = bounded(32, 1)  # over all ranks
    group_size: int = bounded(8, 1)  # samples of a prompt
    max_new_tokens: int = bounded(16, 1)  # length of each, at most
    # of the distribution that samples; sample.py takes 0: always the likeliest token
    temperature: float = bounded(1.0, 0.01, 100.0)
    # objective
    # of advantages: 0 trusts the next value, 1 the rewards alone
    gae_lambda: float = bounded(0.95, 0.0, 1.0)
    left_clip_range: float = 0.2  # below 1, for the ratio of probabilities
    right_clip_range: float = 0.2  # above 1
    kl_beta: float = 0.05  # weight of the divergence from the reference
    entropy_beta: float = 0.0  # weight of the entropy of what samples, which it raises
    # its estimate at a token, which rewards lose: k1 without bias, k3 above 0
    kl_shaping: Literal["k1", "k3"] = "k1"
    kl_target: float = 0.0  # nats an answer by k1, to which KL_BETA is steered; 0: it stays
    mini_batches: int = bounded(4, 1)  # updates by the samples of a step
    epochs: int = bounded(1, 1)  # times that each sample is used
    micro_batch_tokens: int = 0  # per forward and rank; 0: fitted to memory. Same global batch
    # clock
    iterations: int = 0  # steps, in RL of several updates each; 0: no limit in steps
    max_wallclock_seconds: float = 150.0  # training clock; 0: no limit in time
    reserve_seconds: float = 5.0  # end of the clock kept to choose weights, quantize and pack
    # checkpoints and faults
    save_every: int = 100  # steps between checkpoints, outside the clock; 0: only at the end
    # log and validation
    tracker: Literal["none", "tensorboard", "wandb"] = "none"  # where metrics go, beside the log
    val_loss_every: int = 0  # steps between validations, outside the clock; 0: only at the end
    samples_every: int = 10  # steps between answers in samples.jsonl; 0: those of scores alone
    # optimizer
    # muon updates the matrices alone, the others embeddings and head, too; AdamW updates the rest
    optimizer: Literal["muon", "lion", "adamw", "adafactor", "adamw8bit"] = "adamw"
    learning_rate: float = 0.0003  # of all weights
    weight_decay: float = 0.0  # decoupled, of all but scalars
    grad_clip_norm: float = 1.0  # largest global gradient norm; 0: no clipping
    # schedule, in shares of the run (see Clock)
    # shape of the warmdown, see Plan.rates; cosine falls over the whole run, constant not at all
    lr_schedule: Literal["linear", "flat_cosine", "wsd", "cosine", "constant"] = "linear"
    warmup_frac: float = bounded(0.02, 0.0, 1.0)  # share in which the learning rate rises
    warmdown_frac: float = bounded(0.3, 0.0, 1.0)  # last share, in which it falls to the floor
    warmdown_iters: int = 0  # the warmdown in steps of ITERATIONS; 0: use the share
    lr_floor: float = bounded(0.1, 0.0, 1.0)  # last multiplier of the learning rate
    ema: bool = True  # exponential moving average of the weights, a candidate at the end
    swa: bool = True  # plain average of the last weights, a candidate at the end
    qat: bool = True  # late quantization-aware training of all that the artifact quantizes
    # artifact
    # code 2**(bits-1) - 1 stands for 8 root mean squares; 6 bits take some 4 a weight when coded
    matrix_bits: int = bounded(6, 2, 8)
    artifact_bytes_max: int = 16000000  # script + config + artifact, in bytes; 0: no limit

    def __post_init__(self):
        check_settings(self)
        prompts_unit(self, ranks=1)  # for its error
        if self.kl_target and not self.kl_beta:
            raise UserError(f"KL_TARGET={self.kl_target}: needs a KL_BETA above 0 to begin with")


# === shared: model ===
FAST = {}  # kernel -> its faster form on this device, see section kernels
CONV_TAPS = 4  # tokens that GDN's short convolution sees, the current one included
# GDN's log decay at a document's first token, which cuts off what comes before it: -inf would give
# NaN, and -1e4 would dominate the running sums of g and leave few digits for the rest.
DOCUMENT_DECAY = -60.0
FULL_WINDOW = 1 << 30  # the window of attention that has none
ROPE_BASE = 10000.0  # rotary positions turn at rates from 1 down to 1 / ROPE_BASE
BIO_THRESHOLD = 0.3  # of the bio-MLP's events, on a voltage in (0, 1): WiggleGPT's value
BIGRAM_DIM = 64  # width of the hashed embeddings of pairs and triples, before their projection


@dataclass
class GPTConfig:
    """The shape of a network: with its weights, all that is needed to rebuild it."""

    vocab_size: int
    bos_id: int  # the first token of a document; nothing sees what comes before it
    layers: str  # one word per layer: g, s or a, see make_mixer and GPT
    norms: str  # one word per layer, see Norm
    train_seq_len: int = 2048  # tokens in a window; learned positions end there
    context: int = 0  # tokens that an imported model takes elsewhere; 0: train_seq_len
    model_dim: int = 512  # width of the residual stream
    num_heads: int = 8  # query heads of attention, and heads of GDN
    num_kv_heads: int = 4  # key/value heads of attention
    head_dim: int = 0  # width of a head of attention; 0: model_dim / num_heads
    qkv_bias: bool = False  # whether queries, keys and values have biases
    qk_norm: bool = False  # whether queries and keys have norms with weights
    attn_gate: bool = False  # whether each head of attention has an output gate
    # key heads, value heads, widths of a key and of a value; empty: by num_heads
    gdn_shape: list = field(default_factory=list)
    gdn_light: bool = False  # GDN with keys of half the size and no output gate
    attn_window: int = 512  # keys a sliding-window query sees, itself included
    mlp: str = "relu2"  # kind of MLP, see MLP.forward
    mlp_mult: float = 3.0  # hidden width of the MLP over model_dim
    mlp_hidden: int = 0  # hidden width of the MLP; 0: by mlp_mult
    norm_eps: float = 0.0  # added to mean squares in RMSNorm; 0: 1.2e-7, float32's machine epsilon
    positions: str = "rope"  # rope, learned or none
    rope_dims: int = 0  # dimensions of a head that rotate; 0: all
    rope_base: float = ROPE_BASE
    rope_scaling: list = field(default_factory=list)  # see rotation
    qk_gain_init: float = 4.0  # initial gain of normed queries, per head; 0: no norm of q and k
    bigram_vocab_size: int = 0  # rows of hashed embeddings, of pairs and of triples; 0: none
    tie_embeddings: bool = True  # the embedding is the output head
    residual_mix: bool = True  # layers mix in the normed embedding, and scale what they add
    unet_skips: bool = False  # the second half of the layers adds the first half's outputs
    logit_softcap: float = 30.0  # logits = c tanh(z / c); 0: as they are
    embed_init_std: float = 0.005  # standard deviation of the embedding at the start

    @property
    def attention_width(self):
        """Return the width of a head of attention."""
        return self.head_dim or self.model_dim // self.num_heads

    @property
    def gdn_sizes(self):
        """Return GDN's key heads, value heads, and widths of a key and of a value."""
        width = self.model_dim // self.num_heads
        key_width = width // 2 if self.gdn_light else width
        return self.gdn_shape or (self.num_heads, self.num_heads, key_width, width)


def widened(x):
    """Return x in float32, or in float64 if it is that."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def linear(x, weight):
    """Return x W^T in x's dtype; weights are kept in float32."""
    return F.linear(x, weight.to(x.dtype))


def scaled(x, scale):
    """Return x times a learned scale per channel, or x if the scale is None."""
    return x if scale is None else x * scale.to(x.dtype)


def matrix(splits, cols, std=0.0):
    """Return a parameter of matrices with `splits` rows, one below the other.

    Muon takes the matrices one by one, by the attribute `splits` of the parameter (fill_network
    copies it). Entries are normal with deviation `std`; 0 means 0.5 / sqrt(cols), with which normed
    inputs give outputs of deviation 0.5.
    """
    weight = nn.Parameter(torch.randn(sum(splits), cols) * (std or 0.5 * cols**-0.5))
    weight.splits = splits
    return weight


def rms_norm(x, eps=0.0):
    """RMSNorm (arXiv 1910.07467) over the last dimension, without weights."""
    return F.rms_norm(x, x.shape[-1:], eps=eps or None)


def l2_norm(x):
    """Return x over its length in the last dimension, at least in float32.

    A key longer than 1 lets GDN's state grow. Without the epsilon a key of zeros would get
    gradients of 1e12.
    """
    return x * torch.rsqrt(widened(x).square().sum(-1, True) + 1e-6)


# Kinds of norms and MLPs. A network of another kind is of a changed copy of this section.
NORMS = ("rms", "rms_weight", "rms_offset", "layer")
MLPS = ("relu2", "leaky_relu2", "gelu", "swiglu", "bio", "bio_soft")


class Norm(nn.Module):
    """One of NORMS: RMSNorm, plain, with weights, or with weights less 1; LayerNorm with a bias."""

    def __init__(self, kind, dim, eps=0.0):
        super().__init__()
        if kind not in NORMS:
            raise ValueError(f"norm={kind!r}: no such kind")
        self.eps = eps
        self.offset = float(kind == "rms_offset")
        self.weight = None if kind == "rms" else nn.Parameter(torch.full((dim,), 1 - self.offset))
        self.bias = nn.Parameter(torch.zeros(dim)) if kind == "layer" else None

    def forward(self, x):
        """Return x (..., dim) normed, in its own dtype."""
        if self.bias is not None:
            return scaled(F.layer_norm(x, x.shape[-1:]), self.weight) + self.bias.to(x.dtype)
        scale = None if self.weight is None else self.weight + self.offset
        return scaled(rms_norm(x, self.eps), scale)


def split_chunks(x, chunk):
    """Return x (B, T, H, D) in chunks of tokens, (N, B * H, chunk, D); zeros fill the last one.

    A padded token has k = 0, v = 0 and g = 0: it leaves the state as it is.
    """
    x = F.pad(x, (0, 0, 0, 0, 0, -x.size(1) % chunk))
    return x.unflatten(1, (-1, chunk)).movedim((1, 3), (0, 2)).flatten(1, 2)


def refuse_second_derivative(grad):
    """Raise NotImplementedError if a second derivative is asked for. It is a hook of a tensor."""
    if torch.is_grad_enabled():  # inside backward: whether it was called with create_graph
        raise NotImplementedError("Gated DeltaNet over chunks has no second derivative")


def unit_inverse(a, eye):
    """Return the inverse of lower triangular matrices a (..., C, C) with ones on the diagonal.

    Neumann's product instead of a solver would not do: powers of a matrix grow to NaN when keys
    are correlated. eye (C, C) is the unit matrix.
    """
    with torch.no_grad():
        inverse = torch.linalg.solve_triangular(a, eye, upper=False, unitriangular=True)
    # A Newton step from the inverse leaves it as it is. It is there for its gradient: with `inverse`
    # constant that is d(A^-1) = -A^-1 dA A^-1, two products where a solver's would take another
    # solver. Second derivatives would be wrong; compiled code has none anyway.
    inverse = 2 * inverse - inverse @ a @ inverse
    if inverse.requires_grad and not torch.compiler.is_compiling():
        inverse.register_hook(refuse_second_derivative)
    return inverse


def gdn_scan(factors, terms, state):
    """Return the states S_0 ... S_N (N + 1, M, K, V) before, between and behind N chunks:

        S_0 = state     S_{n+1} = F_n S_n + t_n

    There are M = B * H rows; factors F (N, M, K, K), terms t (N, M, K, V), state (M, K, V).
    """
    states = [state]
    for factor, term in zip(factors, terms, strict=True):
        states.append(torch.baddbmm(term, factor, states[-1]))
    return torch.stack(states)


def gdn_chunk(q, k, v, g, beta, state=None, chunk=32):
    """Return Gated DeltaNet's outputs o and last state, by matrix products over chunks of tokens.

    The same token by token (arXiv 2412.06464, section 3), with a = exp(g) <= 1:

        S' = a S + beta k (v - a S^T k)^T
        o = S'^T q

    q and k (B, T, H, K) are L2-normed, q is scaled by K**-0.5 too; v and o (B, T, H, V) have their
    dtype, which is float64, float32 or bfloat16. g and beta (B, T, H) and the state (B, H, K, V)
    are float32, or float64; no state means zeros. Chunks of 32 are the fastest on a CPU.

    In chunks of C tokens, with KB = beta K, VB = beta V, G the running sum of g from the chunk's
    start, and D_ij = exp(G_i - G_j) for i >= j, else 0:

        A = I + tril(KB K^T * D, -1)     U = A^-1 VB     W = A^-1 (exp(G) KB)
        S_{n+1} = (exp(G_C) I - K_out^T W) S_n + K_out^T U       K_out = exp(G_C - G) K
        O = exp(G) Q S + P (U - W S)     P = Q K^T * D
    """
    b, t, h, dim_k = q.shape
    dtype = v.dtype
    if state is None:
        state = g.new_zeros(b, h, dim_k, v.size(-1))
    beta = beta.to(dtype)[..., None]
    q, k, v, g, beta = (split_chunks(x, chunk) for x in (q, k, v, g[..., None], beta))
    # float64: after strong decay a difference of float32 sums would have few digits left.
    total = g.double().cumsum(-2)  # G
    decay = total.to(g.dtype).exp()  # exp(G): what is left of the state before the chunk
    # Above the diagonal exp would overflow; below it no gap is positive. On it D is constant:
    # a gradient through exp(G_i - G_i) would cancel only up to rounding.
    eye = torch.eye(chunk, dtype=g.dtype, device=g.device)
    gap = (total - total.mT).clamp(max=0)  # (N, M, C, C)
    below = gap.to(g.dtype).exp().tril(-1)  # D without its diagonal
    kb = beta * k
    inverse = unit_inverse(eye + kb @ k.mT * below, eye).to(dtype)
    p = (q @ k.mT * (below + eye)).to(dtype)
    u = inverse @ (beta * v)
    w = inverse @ (kb * decay).to(dtype)
    k_out = (k * (total[..., -1:, :] - total).to(g.dtype).exp()).to(dtype)
    eye_k = torch.eye(dim_k, dtype=g.dtype, device=g.device)
    factors = decay[..., -1:, :] * eye_k - k_out.mT @ w
    terms = (k_out.mT @ u).to(g.dtype)
    states = gdn_scan(factors, terms, state.flatten(0, 1))
    before = states[:-1].to(dtype)
    o = (q * decay).to(dtype) @ before + p @ (u - w @ before)
    o = o.unflatten(1, (b, h)).movedim((0, 2), (1, 3)).flatten(1, 2)  # (B, N * C, H, V)
    return o[:, :t], states[-1].view_as(state)


def shifted(x, back):
    """Return what x (B, CONV_TAPS-1 + T, ...) has `back` places before each of its last T tokens."""
    return x[:, CONV_TAPS - 1 - back : x.size(1) - back]


def short_conv(x, weight, doc, heads):
    """Return SiLU of a causal depthwise convolution, for the last T tokens of x.

    x (B, CONV_TAPS-1 + T, C), weight (CONV_TAPS, C), doc (B, CONV_TAPS-1 + T); the result is
    (B, T, heads, C / heads). Shifted sums beat F.conv1d(groups=C) on a CPU, and a tap that would
    reach into another document can be zero.
    """
    weight = weight.to(x.dtype)
    y = shifted(x, 0) * weight[-1]
    for back in range(1, CONV_TAPS):
        same_doc = shifted(doc, back) == shifted(doc, 0)
        y = y + shifted(x, back) * weight[-1 - back] * same_doc[..., None]
    return F.silu(y).unflatten(-1, (heads, -1))


class GatedDeltaNet(nn.Module):
    """Gated DeltaNet (arXiv 2412.06464): linear attention whose state forgets and corrects.

    The light form has keys of half the size and no output gate. At 128 wide it learned as much per
    step as the full form, in 0.7 of the time (docs/lab/2026-11.md, 2026-11-25).
    """

    def __init__(self, config):
        super().__init__()
        dim = config.model_dim
        self.eps = config.norm_eps
        self.key_heads, self.heads, key_width, value_width = config.gdn_sizes
        key_dim = self.key_heads * key_width
        value_dim = self.heads * value_width
        # Widths of queries, keys and values of all heads, and of the output gate.
        self.splits = (key_dim, key_dim, value_dim, value_dim)[: 3 if config.gdn_light else 4]
        self.w_qkvg = matrix(self.splits, dim)
        self.w_o = nn.Parameter(torch.zeros(dim, value_dim))
        self.ab = matrix((2 * self.heads,), dim)  # decay and step size, one number per head each
        # Initialised as PyTorch's depthwise Conv1d, then as flash-linear-attention's GatedDeltaNet.
        # Taps first: with channels first the compiler reads single numbers, not vectors.
        conv = torch.empty(2 * key_dim + value_dim, CONV_TAPS).uniform_(-1, 1)
        self.conv = nn.Parameter(conv.mT.contiguous() / CONV_TAPS**0.5)
        # A starts above 0: at A = 0 log A is -inf, and no gradient moves it.
        self.A_log = nn.Parameter(torch.empty(self.heads).uniform_(0.01, 16.0).log())
        log_dt = torch.empty(self.heads).uniform_(math.log(1e-3), math.log(0.1))
        self.dt_bias = nn.Parameter(log_dt.exp().expm1().log())  # softplus(dt_bias) = dt
        self.norm = nn.Parameter(torch.ones(value_width))

    def forward(self, x, context):
        """Return (B, T, dim) for x (B, T, dim), see Context."""
        qkvg = context.project(x, self.w_qkvg)
        # Split once, so that the gradients are written once; and three convolutions, so that the
        # compiler joins each with the norm that reads it.
        q, k, v, *gate = qkvg.split(self.splits, dim=-1)
        q_taps, k_taps, v_taps = self.conv.split(self.splits[:3], dim=1)
        q = l2_norm(short_conv(q, q_taps, context.doc, self.key_heads))  # (B, T, H, K)
        k = l2_norm(short_conv(k, k_taps, context.doc, self.key_heads))
        v = short_conv(v, v_taps, context.doc, self.heads)
        q = q.to(v.dtype) * q.size(-1) ** -0.5
        if self.key_heads < self.heads:
            q, k = (x.repeat_interleave(self.heads // self.key_heads, 2) for x in (q, k))
        a, b = linear(widened(x), self.ab).split(self.heads, dim=-1)  # (B, T, H)
        g = -self.A_log.exp() * F.softplus(a + self.dt_bias)
        begins_document = shifted(context.doc, 0) != shifted(context.doc, 1)
        g = torch.where(begins_document[..., None], DOCUMENT_DECAY, g)
        o = context.recur(q, k.to(v.dtype), v, g, torch.sigmoid(b))
        o = scaled(rms_norm(o, self.eps), self.norm).flatten(-2)
        if gate:
            o = o * F.silu(shifted(gate[0], 0))
        return linear(o, self.w_o)


def register(name, form, shapes, backward=None, keep=None):
    """Return a form as an operator, which torch.compile calls and does not trace.

    The form needs type annotations, of which PyTorch makes the operator's schema. shapes: returns
    empty outputs, from which the compiler learns their shapes. The first script imported into a
    process registers it for all: a second registration would free the first, and a handle to it
    would crash. Raises ImportError for a PyTorch that does not know these annotations.
    """
    if torch.__version__ < "2.7.0a0":
        raise ImportError(f"PyTorch {torch.__version__} is too old: it must be 2.7 or newer")
    if not hasattr(torch.ops.underpar, name):
        registered = torch.library.custom_op(f"underpar::{name}", form, mutates_args=())
        registered.register_fake(shapes)
        if backward:
            registered.register_autograd(backward, setup_context=keep)
    return getattr(torch.ops.underpar, name).default


def rotary_factors(rates, scaling):
    """Return what Llama 3's scaling multiplies the rates (dims / 2,) of rotary positions by.

    scaling: factor, low and high frequency factors, and length before it. Rates that turn less
    often than `low` in that length are divided by the factor, those that turn more often than
    `high` are not.
    """
    factor, low, high, length = scaling
    turns = length * rates / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep + (1 - keep) / factor


def rotation(
    positions: Tensor, dims: int, base: float, scaling: list[float], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines (T, 1, dims / 2), or (B, T, 1, dims / 2), for `rotate`.

    positions (T,) or (B, T). Rotary positions (arXiv 2104.09864). scaling: see rotary_factors; may
    be empty.
    """
    rates = base ** -(torch.arange(0, dims, 2, device=positions.device) / dims)  # float32
    if scaling:
        rates = rates * rotary_factors(rates, scaling)
    angle = positions[..., None, None] * rates
    return angle.cos().to(dtype), angle.sin().to(dtype)


# An operator, or the compiler would compute the cosines of a token again for each of its heads.
rotation = register("rotation", rotation, rotation)


def rotate(x, cos, sin):
    """Return x (B, T, H, D) with its first dimensions rotated, paired as in GPT-NeoX."""
    half = cos.size(-1)
    left, right, same = x.split([half, half, x.size(-1) - 2 * half], dim=-1)
    return torch.cat([left * cos - right * sin, left * sin + right * cos, same], dim=-1)


def masked_attention(q, k, v, mask):
    """Return softmax(q k^T / sqrt(D)) v, (B, H, T, D), over the keys that each query sees.

    q (B, H, T, D), k and v (B, Hkv, S, D), mask (B, T, S). Heads that share keys become queries of
    one head, because CUDA's kernels that take a mask do not take grouped heads.
    """
    rows = q.reshape(*k.shape[:2], -1, q.size(3))  # (B, Hkv, groups * T, D)
    mask = mask.repeat(1, q.size(1) // k.size(1), 1)[:, None]
    if q.is_cuda:
        o = F.scaled_dot_product_attention(rows, k, v, mask)
    else:  # plain products, compiled, take 0.7 of the time of PyTorch's kernel
        scores = widened(rows * q.size(3) ** -0.5 @ k.mT)
        # Compiled code stores a boolean mask 30 times as slowly as numbers.
        scores = scores + torch.where(mask, 0.0, -math.inf)
        o = scores.softmax(-1).to(v.dtype) @ v
    return o.reshape(q.shape)


def attend(q, k, v, doc, window):
    """Return causal attention inside documents (B, H, T, D).

    q (B, H, T, D), k and v (B, Hkv, T, D), doc (B, T). Query i sees key j if 0 <= i - j < window
    and both are of one document. Blocks of queries skip the keys that none of them sees, which on a
    CPU is 3 times as fast as one masked call at T = 4 windows.
    """
    T = q.size(2)
    places = torch.arange(T, device=q.device)
    step = max(64, min(window, T, 4096) // 4)  # a mask of longer blocks would need much memory
    outputs = []
    for start in range(0, T, step):
        queries = slice(start, start + step)
        keys = slice(max(0, start - window + 1), start + step)  # those that a query may see
        distance = places[queries, None] - places[keys]
        same_doc = doc[:, queries, None] == doc[:, None, keys]
        mask = (distance >= 0) & (distance < window) & same_doc
        outputs.append(masked_attention(q[:, :, queries], k[:, :, keys], v[:, :, keys], mask))
    return torch.cat(outputs, 2)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions, and queries and keys that are RMS-normed."""

    def __init__(self, config, window):
        super().__init__()
        dim = config.model_dim
        heads = config.num_heads
        kv_heads = config.num_kv_heads
        width = config.attention_width
        self.head_dim = width
        self.window = window
        self.gated = config.attn_gate  # a head's gate comes after its query
        self.parts = [heads * (1 + self.gated), kv_heads, kv_heads]
        self.w_qkv = matrix(tuple(count * width for count in self.parts), dim)
        self.bias = nn.Parameter(torch.zeros(len(self.w_qkv))) if config.qkv_bias else None
        self.w_o = nn.Parameter(torch.zeros(dim, heads * width))
        # Queries and keys can be normed in two ways: ours, plain with a gain for each head
        # (qk_gain_init), and Qwen3's, with weights (qk_norm).
        gain = torch.full((heads,), config.qk_gain_init)
        self.q_gain = nn.Parameter(gain) if config.qk_gain_init else None
        self.q_norm = self.k_norm = nn.Identity()
        if config.qk_norm:
            kind = config.norms.split()[-1]
            self.q_norm = Norm(kind, width, config.norm_eps)
            self.k_norm = Norm(kind, width, config.norm_eps)

    def forward(self, x, context):
        """Return (B, T, dim) for x (B, T, dim), see Context."""
        qkv = linear(x, self.w_qkv)
        if self.bias is not None:
            qkv = qkv + self.bias.to(x.dtype)
        q, k, v = qkv.unflatten(-1, (-1, self.head_dim)).split(self.parts, dim=2)  # (B, T, H, D)
        if self.gated:
            gate = q[:, :, 1::2]
            q = q[:, :, ::2]
        q = self.q_norm(q)
        k = self.k_norm(k)
        if self.q_gain is not None:
            q = scaled(rms_norm(q), self.q_gain[:, None])
            k = rms_norm(k)
        if context.angles:
            q = rotate(q, *context.angles)
            k = rotate(k, *context.angles)
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))  # (B, H, T, D)
        o = context.attend(q, k, v, self.window).transpose(1, 2)
        if self.gated:
            o = o * torch.sigmoid(gate)
        return linear(o.flatten(2), self.w_o)


@dataclass
class Context:
    """Documents and positions of the tokens ids (B, T).

    Layers mix tokens through its methods alone, so that the scripts that generate text (Decoder in
    sample.py) can replace them by ones with a cache of earlier tokens.
    """

    recent: Tensor  # (B, CONV_TAPS-1 + T) the ids; in front, the places that a convolution reaches
    doc: Tensor  # of the same shape: the number of each token's document
    positions: Tensor  # (T,), or (B, T)
    borders: Tensor | None = None  # documents as FlashAttention takes them, see document_borders
    angles: tuple = ()  # cosines and sines of `rotation`; none without rotary positions

    def of_layer(self, place):
        """Return the context of a layer, given its place; where there is no cache, of all layers."""
        return self

    def project(self, x, weight):
        """Return x W^T (B, CONV_TAPS-1 + T, C) for x (B, T, dim), with zeros in front."""
        # x is padded and not the product: a GPU moves a tenth fewer bytes in a step
        # (docs/lab/2026-11.md, 2026-11-26).
        return linear(F.pad(x, (0, 0, CONV_TAPS - 1, 0)), weight)

    def recur(self, *inputs):
        """Return Gated DeltaNet's outputs for the inputs of gdn_chunk."""
        if "gdn" in FAST:
            o, *_ = FAST["gdn"](*inputs)
        else:
            o, _ = gdn_chunk(*inputs, chunk=64 if self.doc.is_cuda else 32)
        return o

    def attend(self, q, k, v, window):
        """Return attention (B, H, T, D); shapes as in `attend`."""
        if self.borders is not None:
            return FAST["attention"](q, k, v, self.borders, window)
        return attend(q, k, v, shifted(self.doc, 0), window)


def init_wave(units):
    """Return omega ~ N(1, 0.1), phi ~ N(0, 0.1) and b = 0 for `oscillate`, (3, units)."""
    wave = 0.1 * torch.randn(3, units)
    wave[0] += 1.0
    wave[2] = 0.0
    return nn.Parameter(wave)


def oscillate(x, wave):
    """Return sin(omega x + phi) tanh(x) + b per unit, for x (..., units) and wave (3, units).

    The activation of WiggleGPT (Eden-Eldith/WiggleGPT, model_bio.py).
    """
    omega, phi, b = wave.to(x.dtype)
    return torch.sin(omega * x + phi) * torch.tanh(x) + b


class MLP(nn.Module):
    """Two matrices around an activation.

    A new kind is a word in MLPS and in the choices of the setting `mlp`, and a branch in `forward`.
    Matrices of its own are named w_*, which the optimizer and the artifact go by (tensor_class).

    ReLU^2 is of arXiv 2109.08668, SwiGLU (with a gate) of 2002.05202, bio of WiggleGPT; bio_soft
    adds its SparseEventLayer (model_bio_optimized.py) with soft events, without biases.
    """

    def __init__(self, config):
        super().__init__()
        dim = config.model_dim
        hidden = config.mlp_hidden or int(config.mlp_mult * dim)
        self.kind = config.mlp
        if self.kind not in MLPS:
            raise ValueError(f"mlp={self.kind!r}: no such kind")
        self.w_up = matrix((hidden, hidden) if self.kind == "swiglu" else (hidden,), dim)
        if self.kind.startswith("bio"):
            self.wave = init_wave(hidden)
        if self.kind == "bio_soft":
            self.w_gate = matrix((hidden,), hidden)
            self.w_mix = matrix((hidden,), hidden)
            self.mix_wave = init_wave(hidden)
        # Zeros: the MLP adds nothing in the first step. A change of it shows from the second on, or from
        # the third, where the head begins at zero, too (TIE_EMBEDDINGS=0).
        self.w_down = nn.Parameter(torch.zeros(dim, hidden))

    def forward(self, x):
        """Return (B, T, dim) for x (B, T, dim)."""
        h = linear(x, self.w_up)
        if self.kind == "relu2":
            h = F.relu(h).square()
        elif self.kind == "leaky_relu2":
            h = F.leaky_relu(h, 0.5).square()
        elif self.kind == "gelu":
            h = F.gelu(h)
        elif self.kind == "swiglu":
            gate, up = h.chunk(2, dim=-1)
            h = F.silu(gate) * up
        elif self.kind == "bio":
            h = oscillate(h, self.wave)
        elif self.kind == "bio_soft":
            h = self.sparse_events(oscillate(h, self.wave))
        return linear(h, self.w_down)

    def voltage(self, h):
        """Return the voltages (B, T, hidden), in (0, 1), of hidden units.

        A voltage above BIO_THRESHOLD is an event.
        """
        return torch.sigmoid(linear(h, self.w_gate))

    def sparse_events(self, h):
        """Return hidden units (B, T, hidden) mixed by those of h whose voltage is high."""
        spike = torch.sigmoid(5.0 * (self.voltage(h) - BIO_THRESHOLD))
        return oscillate(linear(h * spike, self.w_mix), self.mix_wave)


class Block(nn.Module):
    """All of a layer but its mixer: norms, MLP, and learned scales.

    Layers may share blocks, mixers or both.

    `mix` (2, dim) weighs the stream and the embedding, whose sum is what the layer works on.
    """

    def __init__(self, config, norm):
        super().__init__()
        dim = config.model_dim
        self.mixer_norm = Norm(norm, dim, config.norm_eps)
        self.mlp_norm = Norm(norm, dim, config.norm_eps)
        self.mlp = MLP(config)
        self.mix = self.mixer_scale = self.mlp_scale = None
        if config.residual_mix:
            self.mix = nn.Parameter(torch.stack([torch.ones(dim), torch.zeros(dim)]))
            self.mixer_scale = nn.Parameter(torch.ones(dim))
            self.mlp_scale = nn.Parameter(torch.ones(dim))

    def forward(self, x, x0, mixer, context):
        """Return the residual stream behind the layer (B, T, dim).

        x is the stream before it, x0 the embedding, context what the mixer reads.
        """
        if self.mix is not None:
            x = scaled(x, self.mix[0]) + scaled(x0, self.mix[1])
        x = x + scaled(mixer(self.mixer_norm(x), context), self.mixer_scale)
        return x + scaled(self.mlp(self.mlp_norm(x)), self.mlp_scale)


def softcap(logits, cap):
    """Return cap * tanh(logits / cap), at least in float32; with a cap of 0 the logits."""
    logits = widened(logits)
    if not cap:
        return logits
    return 2 * cap * torch.sigmoid(2 / cap * logits) - cap  # tanh itself takes a CPU twice as long


def make_mixer(config, word):
    """Return what mixes the tokens in a layer, given the layer's word in GPTConfig.layers."""
    kind = word[0].lower()
    if kind == "g":
        return GatedDeltaNet(config)
    if kind == "s":
        return Attention(config, config.attn_window)
    if kind == "a":
        return Attention(config, FULL_WINDOW)
    raise ValueError(f"layers: {word!r} is no kind of layer")


class GPT(nn.Module):
    """The language model: embedding, layers, norm, and a head with a soft cap."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        # The dtype of activations; weights are float32. None means bfloat16 on CUDA, and on a CPU
        # that of the weights.
        self.dtype = None
        # Whether a layer's activations are computed again in the backward pass, to save memory.
        self.activation_checkpointing = False
        if config.positions not in ("rope", "learned", "none"):
            raise ValueError(f"positions={config.positions!r}: no such kind")
        dim = config.model_dim
        self.embed = matrix((config.vocab_size,), dim, config.embed_init_std)
        self.head = None
        if not config.tie_embeddings:
            self.head = nn.Parameter(torch.zeros_like(self.embed))
        if config.positions == "learned":
            self.positions_embed = matrix(
                (config.train_seq_len,), dim, 0.1 if config.residual_mix else config.embed_init_std
            )
        if config.bigram_vocab_size:
            # Zeros: a row that training never used changes nothing, and costs no bytes.
            self.ngram_embed = nn.Parameter(torch.zeros(2 * config.bigram_vocab_size, BIGRAM_DIM))
            self.w_ngram = matrix((dim,), 2 * BIGRAM_DIM)
        words = config.layers.split()
        norms = config.norms.split()
        if config.unet_skips and len(words) > 1:
            self.skip = nn.Parameter(torch.ones(len(words) // 2, dim))

        # Layers that share a mixer or a block have one name for it; others go by their place.
        mixers = {}
        blocks = {}
        self.layers = []  # a block and a mixer per layer
        for place, (word, norm) in enumerate(zip(words, norms, strict=True)):
            mixer_name = word if word[1:] else place
            block_name = word if word.isupper() else place
            if mixer_name not in mixers:
                mixers[mixer_name] = make_mixer(config, word)
            if block_name not in blocks:
                blocks[block_name] = Block(config, norm)
            self.layers.append((blocks[block_name], mixers[mixer_name]))
        self.mixers = nn.ModuleList(mixers.values())
        self.blocks = nn.ModuleList(blocks.values())
        self.final_norm = Norm(norms[-1], dim, config.norm_eps)

    def context(self, ids, doc=None, borders=None):
        """Return the Context of ids (B, T) at the beginning of texts.

        doc (B, T): the number of each token's document; None: each BOS begins one. borders: the
        same for FlashAttention, see document_borders.
        """
        if doc is None:
            doc = (ids == self.config.bos_id).cumsum(dim=1)
        reach = (CONV_TAPS - 1, 0)
        recent = F.pad(ids, reach, value=self.config.bos_id)
        positions = torch.arange(ids.size(1), device=ids.device)
        return Context(recent, F.pad(doc, reach), positions, borders)

    def ngrams(self, context, sparse=False):
        """Return the hashed embeddings of each token with the one and the two tokens before it.

        (B, T, 2 * BIGRAM_DIM). Other documents count as BOS. sparse: the gradient of the tables will
        be a sparse tensor, which torch.compile cannot make. This is BigramHashEmbedding of Parameter
        Golf, with triples.
        """
        rows = self.config.bigram_vocab_size
        key = 36313 * shifted(context.recent, 0)
        places = []
        for back, factor in ((1, 27191), (2, 51647)):
            same_doc = shifted(context.doc, back) == shifted(context.doc, 0)
            before = shifted(context.recent, back).where(same_doc, self.config.bos_id)
            key = key ^ (factor * before)
            places.append(key % rows + (back - 1) * rows)
        places = torch.stack(places, -1)
        return F.embedding(places, self.ngram_embed, sparse=sparse).flatten(-2)

    def features(self, ids, doc=None, borders=None, context=None, ngrams=None):
        """Return what the head reads (B, T, dim), for ids (B, T).

        doc and borders: see `context`. Texts that are generated bring a context of their own (Decoder
        in sample.py), and the steps of train_gpt.py bring what `ngrams` returns.
        """
        config = self.config
        context = context or self.context(ids, doc, borders)
        positions = context.positions
        x = F.embedding(ids, self.embed)
        x = x.to(self.dtype or (torch.bfloat16 if ids.is_cuda else x.dtype))
        if config.positions == "rope":
            dims = config.rope_dims or config.attention_width
            scaling = config.rope_scaling
            context.angles = rotation(positions, dims, config.rope_base, scaling, x.dtype)
        if config.residual_mix:
            x = rms_norm(x)
        if config.positions == "learned":
            x = x + F.embedding(positions, self.positions_embed).to(x.dtype)
        if config.bigram_vocab_size:
            if ngrams is None:
                ngrams = self.ngrams(context)
            x = x + linear(ngrams.to(x.dtype), self.w_ngram)

        recompute = self.activation_checkpointing and torch.is_grad_enabled()
        half = len(self.layers) // 2
        skips = []
        x0 = x
        for place, (block, mixer) in enumerate(self.layers):
            # U-Net: from the middle on a layer adds what its mirror image in the first half gave.
            if skips and place >= half:
                skip = skips.pop()
                x = x + scaled(skip, self.skip[len(skips)])
            layer = block
            if recompute:
                layer = functools.partial(activation_checkpoint, block, use_reentrant=False)
            x = layer(x, x0, mixer, context.of_layer(place))
            if config.unet_skips and place < half:
                skips.append(x)
        return self.final_norm(x)

    def logits(self, x):
        """Return logits (..., V), float32 at least, of features x (..., dim)."""
        logits = linear(x, self.embed if self.head is None else self.head)
        return softcap(logits, self.config.logit_softcap)

    def forward(self, ids, targets=None, borders=None, ngrams=None):
        """Return the nats of targets (B, T) after ids (B, T), 0 for -1; or logits (B, T, V)."""
        logits = self.logits(self.features(ids, borders=borders, ngrams=ngrams))
        if targets is None:
            return logits
        logits = logits.flatten(0, 1)
        losses = F.cross_entropy(logits, targets.flatten(), ignore_index=-1, reduction="none")
        return losses.view_as(targets)


# === end: model ===


# === shared: kernels ===
# Faster forms on CUDA. A run begins with choose_kernels, which keeps those in FAST that agree with
# the plain forms of section model on this device.


def document_borders(ids, bos_id, device):
    """Return a list of the places in ids (B, T) at which rows and documents begin, and B * T.

    They are int32 (D + 1,); the list is empty if no kernel takes them. ids: on the host, which then
    knows the number D of documents without waiting for a GPU.
    """
    if "attention" not in FAST:
        return []
    begins = ids == bos_id
    begins[:, 0] = True
    places = begins.flatten().nonzero().flatten()
    borders = F.pad(places, (0, 1), value=ids.numel()).int()
    if device.type == "cuda":
        borders = borders.pin_memory()  # a copy from other memory would wait for the GPU
    borders = borders.to(device, non_blocking=True)
    torch._dynamo.mark_dynamic(borders, 0)  # another number of documents compiles nothing again
    return [borders]


# How varlen_attn is told that heads share keys. PyTorch 2.11 sees it by itself.
SHARED_KEYS = dict(enable_gqa=True) if torch.__version__ >= "2.12" else {}


def varlen_attend(q, k, v, borders, window):
    """Return what `attend` returns, by FlashAttention and without masks."""
    from torch.nn.attention.varlen import varlen_attn

    T = q.size(2)
    left = window - 1 if window < T else -1
    rows = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))  # (B * T, heads, D)
    o = varlen_attn(*rows, borders, borders, T, T, window_size=(left, 0), **SHARED_KEYS)
    return o.unflatten(0, (-1, T)).transpose(1, 2)


def fla_outputs(q, k, v, g, beta):
    """Return room for the outputs of fla_gdn, which takes chunks of 64 tokens."""
    return torch.empty_like(v), torch.empty_like(g), k.new_empty(*k.shape[:3], 64)


def fla_gdn(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gdn_chunk's outputs by flash-linear-attention; running sums of g / ln 2, and inverses.

    1.0 is the scale of q; no state is given or wanted.
    """
    from fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule_fwd

    inputs = (x.contiguous() for x in (q, k, v, g, beta))
    total, o, inverse, *_ = chunk_gated_delta_rule_fwd(*inputs, 1.0, None, False)
    return o, total, inverse


def fla_grad(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, inverse: Tensor, d: Tensor
) -> list[Tensor]:
    """Return the gradients of fla_gdn's inputs; g has the running sums, d is by the outputs."""
    from fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule_bwd

    inputs = [x.contiguous() for x in (q, k, v, g, beta)]
    dq, dk, dv, d_beta, dg, *_ = chunk_gated_delta_rule_bwd(
        *inputs, inverse, 1.0, None, d.contiguous(), None
    )
    return [x.to(y.dtype) for x, y in zip((dq, dk, dv, dg, d_beta), inputs, strict=True)]


fla_grad = register("fla_grad", fla_grad, lambda *x: list(map(torch.empty_like, x[:5])))


def keep_gdn(ctx, inputs, output):
    """Keep what fla_backward needs."""
    q, k, v, _, beta = inputs
    _, total, inverse = output
    ctx.save_for_backward(q, k, v, total, beta, inverse)


def fla_backward(ctx, d, *_):
    """Return the gradients of fla_gdn's inputs."""
    return tuple(fla_grad(*ctx.saved_tensors, d))


fla_gdn = register("fla_gdn", fla_gdn, fla_outputs, fla_backward, keep_gdn)


def output_and_gradients(form, inputs, dtype):
    """Return the output of a form and the gradients of its inputs; 4-d inputs are in `dtype`."""
    leaves = [x.to(dtype) if x.ndim == 4 else x.clone() for x in inputs]
    for leaf in leaves:
        leaf.requires_grad_()
    output = form(*leaves)
    weights = torch.arange(output.numel(), device=output.device).sin().view_as(output)
    return [output, *torch.autograd.grad(output, leaves, weights.to(output.dtype))]


def form_errors(fast, plain, inputs, dtype):
    """Return the errors of a faster form and of the plain one in `dtype`: two 0-d tensors.

    An error is the largest distance of the output or a gradient from those of the plain form in
    float32, relative to their norm. A NaN stays a NaN.
    """
    references = output_and_gradients(plain, inputs, torch.float32)
    errors = []
    for form in (fast, plain):
        pairs = zip(output_and_gradients(form, inputs, dtype), references, strict=True)
        errors.append(torch.stack([(x - y).norm() / y.norm() for x, y in pairs]).max())
    return errors


def check_attention(config, ids, dtype, device):
    """Return the form_errors of varlen_attend with and without a window, for documents of ids (B, T)."""
    (borders,) = document_borders(ids, 0, device)
    doc = (ids == 0).cumsum(1).to(device)
    windows = (config.attn_window, FULL_WINDOW)
    batch, length = ids.shape
    inputs = [
        torch.randn(batch, heads, length, config.attention_width, device=device)
        for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    ]
    return form_errors(
        lambda *qkv: torch.cat([FAST["attention"](*qkv, borders, window) for window in windows]),
        lambda *qkv: torch.cat([attend(*qkv, doc, window) for window in windows]),
        inputs,
        dtype,
    )


def check_gdn(config, ids, dtype, device):
    """Return the form_errors of fla_gdn, for documents of ids (B, T)."""
    _, heads, key_width, value_width = config.gdn_sizes
    shape = (*ids.shape, heads)
    q, k = F.normalize(torch.randn(2, *shape, key_width, device=device), dim=-1)
    v = torch.randn(*shape, value_width, device=device)
    g, beta = torch.rand(2, *shape, device=device)
    g = torch.where(ids[..., None].to(device) == 0, DOCUMENT_DECAY, -g)
    return form_errors(
        lambda *inputs: FAST["gdn"](*inputs)[0],
        lambda *inputs: gdn_chunk(*inputs, chunk=64)[0],
        [q, k, v, g, beta],
        dtype,
    )


def choose_kernels(choice, network, runtime, log):
    """Fill FAST with the forms that the layers can use and that agree with the plain ones; log why.

    choice: as the setting KERNELS. Two windows of the run, with random documents, are the check. A
    form may be at most twice as far from float32 as the plain form, and 0.001 more, since in float32
    the plain form has no error. Raises UserError if fla is asked for and left out, or on a CPU.
    """
    FAST.clear()
    if choice == "fla" and runtime.device.type == "cpu":
        raise UserError("KERNELS='fla': must be auto or plain on a CPU; fla's kernels need CUDA")
    is_emulated = torch.backends.cpu.get_cpu_capability() == "AVX2"
    if runtime.device.type == "cpu" and network.dtype == torch.bfloat16 and is_emulated:
        log("note: DTYPE=bfloat16: this CPU has no AVX-512; float32 is up to 100 times as fast")
    config = network.config
    kinds = {word[0].lower() for word in config.layers.split()}  # G1, g1 and g are Gated DeltaNet
    if choice != "plain" and runtime.device.type == "cuda":
        # fla takes a minute to compile, so nothing is checked that no layer uses.
        if kinds - {"g"}:
            FAST["attention"] = varlen_attend
        if "g" in kinds:
            FAST["gdn"] = fla_gdn
    checks = {"attention": check_attention, "gdn": check_gdn}
    dtype = network.dtype or torch.bfloat16
    ids = torch.randint(100, (2, min(config.train_seq_len, 2048)))  # the plain form needs memory
    for name in list(FAST):
        good = False
        try:
            error, plain_error = checks[name](config, ids, dtype, runtime.device)
            good = error < 2 * plain_error + 0.001
            reason = f"error {error:.1e}, of the plain form {plain_error:.1e}"
        except Exception as fault:  # whatever a compiler or a package raises, it is not used
            reason = repr(fault)
        failures = runtime.sum(network.embed.new_tensor(float(not good)))  # ranks must not differ
        if failures and good:
            reason = f"{failures:g} other ranks refuse it, and say why on their standard error"
        elif failures and runtime.rank:
            report_error(f"kernels: {name}: {reason}")  # the log is rank 0's
        log(f"kernels: {name} {'left out' if failures else 'taken'}: {reason}")
        if failures:
            del FAST[name]
    if choice == "fla" and "g" in kinds and "gdn" not in FAST:
        raise UserError("KERNELS='fla': did not pass; pip install -r requirements-gpu.txt")


# === end: kernels ===


# === shared: optimizer ===
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # coefficients of s, s^3 and s^5 by Keller Jordan
NEWTON_SCHULZ_STEPS = 5  # bring singular values above 0.002 to between 0.68 and 1.21
MUON_MOMENTUM = 0.95  # of modded-nanogpt and Parameter Golf
# Few tokens of a small batch touch a row of an embedding, so its second moment needs a long memory:
# 0.95, as for GPT-3, lost 0.005 to 0.01 bits per byte (docs/lab/2026-11.md, 2026-11-25).
ADAM_BETAS = (0.9, 0.99)
ADAM_EPS = 1e-8  # torch's default
LION_BETAS = (0.9, 0.99)  # the Lion paper's


def gpu_dtype():
    """Return the dtype of products on this GPU: bfloat16 if it has units for it, as since Ampere."""
    has_units = torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if has_units else torch.float32


def orthogonalize(G):
    """Return G (N, R, C) with all singular values of each matrix pushed to about 1.

    Newton-Schulz: each step applies the odd polynomial a s + b s^3 + c s^5 to every singular value
    s, by products of matrices alone (kellerjordan.github.io/posts/muon). The products are taken in
    gpu_dtype on CUDA, and in G's dtype on a CPU.
    """
    if G.size(1) > G.size(2):
        return orthogonalize(G.mT).mT  # X X^T is then the smaller of the two products
    a, b, c = NEWTON_SCHULZ
    X = G.to(gpu_dtype()) if G.is_cuda else G
    X = X / (X.norm(dim=(1, 2), keepdim=True) + 1e-7)  # now no singular value is above 1
    for _ in range(NEWTON_SCHULZ_STEPS):
        A = X @ X.mT
        B = torch.baddbmm(A, A, A, beta=b, alpha=c)  # b A + c A A
        X = torch.baddbmm(X, B, X, beta=a)  # a X + B X
    return X.to(G.dtype)


class Muon(torch.optim.Optimizer):
    """Nesterov momentum whose update is orthogonalized, for matrices.

    A matrix (R, C) moves by lr * sqrt(max(1, R / C)) in spectral norm. A parameter may hold several
    matrices one below the other, such as q, k and v: its attribute `splits` has their numbers of
    rows, and each is orthogonalized by itself. dtype: of the products on a CPU; None: the weights'.
    """

    def __init__(self, groups, runtime, dtype=None):
        super().__init__(groups, dict(momentum=MUON_MOMENTUM))
        self.runtime = runtime
        self.dtype = dtype

    @torch.no_grad()
    def step(self):
        """Update momentum and weights."""
        for group in self.param_groups:
            by_shape = collections.defaultdict(list)  # (R, C) -> matrices, gradients, buffers
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(param)
                # The rows of each matrix, or of the only one. The parts are views, through which
                # step_batch writes into the parameter and its buffer.
                splits = getattr(param, "splits", len(param))
                parts = (x.split(splits) for x in (param, param.grad, state["momentum_buffer"]))
                for triple in zip(*parts, strict=True):
                    by_shape[triple[0].shape].append(triple)
            # Matrices of one shape are one batch: many small operations keep a GPU waiting.
            for triples in by_shape.values():
                self.step_batch(group, *zip(*triples, strict=True))

    def step_batch(self, group, matrices, grads, buffers):
        """Update `matrices`, N of shape (R, C), and their momentum, `buffers`, in place."""
        torch._foreach_lerp_(buffers, grads, 1 - group["momentum"])
        # Nesterov: (N, R, C)
        update = torch.stack(grads).lerp(torch.stack(buffers), group["momentum"])
        # Each rank orthogonalizes its share of a batch, as in Parameter Golf. The rest of `result` is
        # zero, so the sum over ranks gathers the shares. Every rank has all momentum, so a run can
        # be resumed on another number of ranks.
        share = slice(self.runtime.rank, None, self.runtime.world_size)
        result = torch.zeros_like(update)
        result[share] = orthogonalize(update[share].to(self.dtype))
        rows, cols = matrices[0].shape
        scale = group["lr"] * max(1.0, rows / cols) ** 0.5
        torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_sub_(matrices, (scale * self.runtime.sum(result)).unbind())


class DecoupledOptimizer(torch.optim.Optimizer):
    """Base of optimizers that update each parameter by itself, with decoupled weight decay.

    A subclass has `update(grad, state)`: it returns what the weights lose times lr, and changes the
    state, a dict of tensors that is empty before the first step.
    """

    def __init__(self, groups):
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self):
        """Update state and weights."""
        for group in self.param_groups:
            for param in group["params"]:
                update = self.update(param.grad, self.state[param])
                param.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * update)


class Lion(DecoupledOptimizer):
    """The sign of an interpolated momentum: every weight moves by lr (arXiv 2302.06675)."""

    def update(self, grad, state):
        """Return the update, see DecoupledOptimizer."""
        if not state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        beta1, beta2 = LION_BETAS
        update = state["momentum_buffer"].lerp(grad, 1 - beta1).sign()
        state["momentum_buffer"].lerp_(grad, 1 - beta2)
        return update


class AdamW8bit(DecoupledOptimizer):
    """AdamW (arXiv 1711.05101) with two bytes of state per weight (arXiv 2110.02861).

    The moments m and v are kept in blocks of 256 weights. One byte has the level n of r = sqrt(v):
    r = r_max 2**(-n / 16), where r_max is the block's largest. The other has m / r, linear in the
    block. After 300 steps the loss was 0.16% above AdamW's; with linear codes of r, 0.9%.
    """

    def update(self, grad, state):
        """Return the update, see DecoupledOptimizer."""
        beta1, beta2 = ADAM_BETAS
        g = F.pad(grad.flatten(), (0, -grad.numel() % 256)).view(-1, 256)  # (blocks, 256)
        if not state:
            state["updates"] = g.new_zeros(())
            state["scales"] = g.new_zeros(2, len(g), 1)
            state["codes"] = g.new_zeros(2, len(g), 256, dtype=torch.int8)

        # Decode the moments and update them.
        ratio, level = state["codes"].to(g.dtype)
        ratio_scale, r_max = state["scales"]  # (blocks, 1)
        r = r_max * torch.exp2((level + 128) / -16)
        m = (r * ratio * ratio_scale).lerp(g, 1 - beta1)
        r = r.square().lerp(g.square(), 1 - beta2).sqrt()
        state["updates"] += 1
        unbiased_m = m / (1 - beta1 ** state["updates"])
        unbiased_r = r / (1 - beta2 ** state["updates"]).sqrt()
        update = unbiased_m / (unbiased_r + ADAM_EPS)

        # Encode them again. A block that never had a gradient has 0 / 0 here, and codes of 0.
        ratio = torch.where(r > 0, m / r, 0.0)
        ratio_scale = ratio.abs().amax(1, keepdim=True) / 127
        r_max = r.amax(1, keepdim=True)
        level = (16 * torch.log2(r_max / r)).clamp(max=255) - 128
        codes = torch.stack([ratio / ratio_scale, level]).nan_to_num(0.0).round()
        state["codes"] = codes.to(torch.int8)
        state["scales"] = torch.stack([ratio_scale, r_max])
        return update.flatten()[: grad.numel()].view_as(grad)


# What OPTIMIZER names, beside Muon. Each of them trains matrices, embeddings and head. A new one is a
# line here and a word in the setting's choices; in train_gpt.py it also has rates in
# OPTIMIZER_PRESETS. One for matrices alone needs a branch in make_optimizers, as Muon has it.
OPTIMIZERS = {
    "adamw": functools.partial(torch.optim.AdamW, betas=ADAM_BETAS, eps=ADAM_EPS, fused=True),
    "adamw8bit": AdamW8bit,
    # A step is a share of a tensor's root mean square, taken as 0.02 at least: with torch's 0.001
    # matrices that begin at zero stay there (docs/lab/2026-11.md, 2026-11-21). The host waits for the device.
    "adafactor": functools.partial(torch.optim.Adafactor, eps=(None, 0.02)),
    "lion": Lion,
}
# Last part of a parameter's name -> its class for the optimizers, where it differs from tensor_class.
# The artifact always goes by tensor_class.
PARAMETER_CLASSES = {
    "lora_a": "adapter",  # in the scripts that fine-tune
    "lora_b": "adapter",
    "head": "head",
    "ab": "control",  # stored like an embedding, but it makes GDN's decay and step size
}


def parameters_by_class(params):
    """Return class -> its parameters, see PARAMETER_CLASSES and tensor_class.

    params: name -> parameter.
    """
    classes = collections.defaultdict(list)
    for name, param in params.items():
        last = name.rsplit(".", 1)[-1]
        classes[PARAMETER_CLASSES.get(last) or tensor_class(name, param)].append(param)
    return classes


def reduce_gradients(grads, runtime, clip, extra):
    """Sum gradients and `extra` (n,) over ranks, then clip the global norm of the gradients.

    Each rank's gradients are its part of a mean over the global batch. They change in place.
    Return the norm before clipping, 0-d, and the sums of `extra`. clip 0: no clipping.
    """
    if runtime.distributed:
        # One all-reduce for everything: most tensors are too small to have their own.
        tensors = [*grads, extra]
        total = runtime.sum(nn.utils.parameters_to_vector(tensors))
        nn.utils.vector_to_parameters(total, tensors)  # in place: they are views of `total` now
        extra = extra.clone()  # the log keeps it, and would keep all gradients of a step
    norm = nn.utils.get_total_norm(grads)
    if clip:
        torch._foreach_mul_(grads, (clip / (norm + 1e-6)).clamp(max=1.0))
    return norm, extra


def step_optimizers(optimizers, multiplier, finite):
    """Take a step at `multiplier` times the learning rates; if not `finite`, no weight moves.

    finite: 0-d bool on the device, whether loss and gradients are finite. The host never waits for
    it: where it is false, gradients and learning rates become 0, so any optimizer of PyTorch fits.
    Momentum and moments then decay by a step.
    """
    wrong = ~finite
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            initial_lr = group.setdefault("initial_lr", group["lr"])
            group["lr"] = finite * (initial_lr * multiplier)  # 0-d, on the device
            for param in group["params"]:
                if finite.is_cuda:
                    param.grad.masked_fill_(wrong, 0.0)
                elif not finite:  # on a CPU it costs nothing to read it
                    param.grad.zero_()
        optimizer.step()


class OptimizerState:
    """The state of optimizers by the names of parameters, as a checkpoint has it.

    params: name -> parameter. One in no group would never train, one in two groups twice.
    """

    def __init__(self, optimizers, params):
        self.params = params
        self.state = collections.defaultdict(dict)  # parameter -> its state, of all optimizers
        grouped = []
        for optimizer in optimizers:
            optimizer.state = self.state  # one dict for all: a state is found by its parameter
            for group in optimizer.param_groups:
                grouped += group["params"]
        assert len(grouped) == len(params) and set(grouped) == set(params.values())

    def state_dict(self):
        """Return the tensors of each parameter's state, by its name."""
        return {name: self.state[param] for name, param in self.params.items()}

    def load_state_dict(self, saved):
        """Replace the state by a saved one. Raises KeyError if it lacks a parameter."""
        for name, param in self.params.items():
            self.state[param] = saved[name]


# === end: optimizer ===


# === shared: schedule ===
class Stateful:
    """Base of objects whose state in a checkpoint is the attributes that STATE names."""

    def state_dict(self):
        """Return the state for a checkpoint."""
        return {name: getattr(self, name) for name in self.STATE}

    def load_state_dict(self, saved):
        """Replace the state by a saved one. Raises KeyError for that of another class."""
        for name in self.STATE:
            setattr(self, name, saved[name])


@dataclass
class StepReport:
    """What rank 0 knows about a step. It arrives one step late, so that no step waits for it."""

    loss: float  # mean over the global batch, in nats
    grad_norm: float  # before clipping; if it or the loss is not finite, the update was masked
    stop_requested: bool  # whether any rank got a signal
    seconds: float  # training clock of rank 0 when it had queued the whole step


class Clock(Stateful):
    """Training time: rank 0's for all ranks, without validation and saving.

    The run ends after ITERATIONS steps, or RESERVE_SECONDS before MAX_WALLCLOCK_SECONDS. replay:
    the progress that each step of another run used; it replaces both limits, and the run ends with
    it.
    """

    STATE = ("before", "seconds", "used")

    def __init__(self, settings, runtime, replay=()):
        self.iterations = len(replay) or settings.iterations or math.inf
        self.limit = math.inf if replay else settings.max_wallclock_seconds or math.inf
        self.budget = self.limit - settings.reserve_seconds  # for steps; the reserve is for the end
        self.runtime = runtime
        self.replay = replay
        self.before = 0.0  # seconds that had passed when the clock was last stopped
        self.started = None  # perf_counter when it was last started; None while it stands still
        self.seconds = [0.0]  # rank 0's clock at the start, and at the end of each reported step
        self.used = []  # what `progress` has returned for each step; a replay reads it
        self.packet = None  # report on its way: loss, norm, stop, seconds
        self.arrived = None  # CUDA event: the packet is on the host

    def elapsed(self):
        """Return this rank's training seconds so far."""
        if self.started is None:
            return self.before
        return self.before + time.perf_counter() - self.started

    def start(self):
        """Let the clock run, on every rank from when the last one is ready.

        NCCL lets rank 0 send without waiting for the others; the first step would wait for them.
        """
        self.runtime.sum(torch.zeros((), device=self.runtime.device)).item()
        self.started = time.perf_counter()

    def stop(self):
        """Stop the clock, after the device has done all work given to it."""
        if self.runtime.device.type == "cuda":
            torch.cuda.synchronize()
        self.before = self.elapsed()
        self.started = None

    @contextlib.contextmanager
    def paused(self):
        """Return a context in which the clock stands still: for validation and saving."""
        self.stop()
        yield
        self.start()

    def send_report(self, loss, norm, stop):
        """Start to send rank 0's report of the step that ends here; stop: above 0 is yes."""
        seconds = torch.full_like(loss, self.elapsed(), dtype=torch.float64)
        packet = torch.stack([loss, norm, stop, seconds])
        if self.runtime.distributed:
            dist.broadcast(packet, src=0)
        self.packet = packet.to("cpu", non_blocking=True)
        if packet.is_cuda:
            self.arrived = torch.cuda.current_stream().record_event()

    def arrived_packet(self):
        """Return the numbers of the packet on its way, when it has arrived."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.packet.tolist()

    def previous_report(self):
        """Return the StepReport of the step before; None before the first step and if it was read.

        Call it after this step's forward and backward are queued: it blocks until the report of the
        step before has arrived, and meanwhile the device works on this step.
        """
        if self.packet is None:
            return None
        loss, norm, stop, seconds = self.arrived_packet()
        self.packet = None
        self.seconds.append(seconds)
        return StepReport(loss, norm, stop > 0, seconds)

    def median_step(self):
        """Return the median seconds of the last nine steps: a stall does not move it, a drift does.

        It is the lower median: the first step is often slow, and of two steps the shorter one
        counts. It is 0 until two steps are known.
        """
        steps = np.diff(self.seconds[-10:]).tolist()
        return statistics.median_low(steps) if len(steps) > 1 else 0.0

    def next_end(self):
        """Return the seconds at the end of the coming step, predicted from the reports so far.

        report of the step before     what is predicted
        there is no step before       0
        that of step 1, on its way    the end of step 1: this report alone is waited for. Without it
                                      nothing is known of the run's length, and a run of a few slow
                                      steps would waste the second one
        on its way                    the last known end and two steps
        known                         the last known end and one step
        """
        if self.packet is not None and len(self.seconds) == 1:
            return self.arrived_packet()[3]
        unknown_steps = 1 if self.packet is None else 2
        return self.seconds[-1] + unknown_steps * self.median_step()

    def planned_share(self, step):
        """Return the share of ITERATIONS or of the budget that `step` completes.

        It is above 1 if there are not so many steps, or if there is no time for another one.
        """
        by_steps = (step + 1) / self.iterations
        by_time = self.next_end() / self.budget
        return max(by_steps, by_time)

    def progress(self, step):
        """Return the share of the run that is done when `step` ends: near 1 at the last step.

        Call it once a step, before the forward. It is the same on all ranks, at most 1, and never
        less than for the step before. Without ITERATIONS it is 0 for the first step.
        """
        progress = min(1.0, self.planned_share(step))
        if step:
            progress = max(progress, self.used[step - 1])
        if self.replay:  # what the other run used, whatever this clock says
            progress = self.replay[step]
        self.used[step:] = [progress]  # a resumed run replaces what came after its step
        return progress

    def is_last(self, step):
        """Return whether the run is over after `step` steps: one more would pass ITERATIONS or the
        budget.
        """
        return self.planned_share(step) > 1

    def end_reason(self, step):
        """Return what has ended a run after so many steps: "iterations", "clock" or "replay"."""
        if step < self.iterations:
            return "clock"
        return "replay" if self.replay else "iterations"


QAT_START = 0.85  # rounding makes steps slower, and the last steps suffice to adapt the weights
# Phases that settings switch on begin at these shares of the run.
PHASE_STARTS = {
    "ema": QAT_START,  # weights from before QAT have not seen the quantizer
    "swa": 0.9,  # a plain average forgets nothing: it begins when the learning rate is low
    "qat": QAT_START,
}
EMA_MEMORY = 0.02  # share of the run after which weights count 1 / e in the average
# The warm-up begins here: the length of the first step is unknown, and at 0 it would be wasted.
WARMUP_START = 0.1


# Settings that a shape of LR_SCHEDULE has no use for: cosine falls from the warm-up on, flat_cosine
# in the warmdown alone.
UNUSED_BY_SCHEDULE = {
    "cosine": ("warmdown_frac", "warmdown_iters"),
    "constant": ("warmdown_frac", "warmdown_iters", "lr_floor"),
}


def warmdown_share(settings):
    """Return the share of the run, at its end, in which the learning rate falls to LR_FLOOR.

    Raises UserError if it does not fit behind the warm-up, and for settings of no use.
    """
    schedule = settings.lr_schedule
    for name in UNUSED_BY_SCHEDULE.get(schedule, ()):
        value = getattr(settings, name)
        default = getattr(Settings, name)
        asks_for_none = schedule == "constant" and not value  # it has no warmdown anyway
        if value != default and not asks_for_none:
            raise UserError(
                f"{name.upper()}={value}: must be {default} with LR_SCHEDULE={schedule}"
            )
    warmup = settings.warmup_frac
    if schedule == "constant":
        return 0.0
    if schedule == "cosine":
        return 1 - warmup  # as in nanoGPT
    share = settings.warmdown_frac
    if settings.warmdown_iters:
        if not settings.iterations:
            raise UserError(
                f"WARMDOWN_ITERS={settings.warmdown_iters}: must be 0 without ITERATIONS; "
                "WARMDOWN_FRAC is a share of any run"
            )
        share = settings.warmdown_iters / settings.iterations
    if warmup + share > 1:
        raise UserError(
            f"WARMUP_FRAC={warmup} and a warmdown of {share:g} (WARMDOWN_FRAC, or WARMDOWN_ITERS / "
            "ITERATIONS): must be at most 1 in all"
        )
    return share


class Plan(Stateful):
    """The phases of a run and its learning rate. Raises UserError for an impossible plan."""

    STATE = ("progress", "phases")

    def __init__(self, settings):
        seconds = settings.max_wallclock_seconds
        if not settings.iterations and not seconds:
            raise UserError("ITERATIONS=0 and MAX_WALLCLOCK_SECONDS=0: set one, or it never ends")
        if 0 < seconds <= settings.reserve_seconds:
            raise UserError(
                f"RESERVE_SECONDS={settings.reserve_seconds}: must be below "
                f"MAX_WALLCLOCK_SECONDS={seconds}"
            )
        self.settings = settings
        self.warmdown = warmdown_share(settings)
        self.planned = {}  # name of a phase -> begin and end, in shares of the run
        if settings.warmup_frac:
            self.planned["warmup"] = (0.0, settings.warmup_frac)
        if self.warmdown:
            self.planned["warmdown"] = (1 - self.warmdown, 1.0)
        for name, begin in PHASE_STARTS.items():
            if getattr(settings, name):
                self.planned[name] = (begin, 1.0)
        self.progress = 0.0  # share of the run that the present step has reached
        self.step_share = 0.0  # mean share of the run of each step so far
        self.phases = {}  # name of each phase that has begun -> its record in result.json

    def rates(self, progress):
        """Return one number, which multiplies all learning rates: it rises to 1 in the warm-up, and
        falls to LR_FLOOR in the warmdown.

        No step is spent at 0: a step of the warm-up has the rate of its end, but a tenth at least,
        and one of the warmdown that of its start.
        """
        settings = self.settings
        if progress < settings.warmup_frac:
            return max(WARMUP_START, progress / settings.warmup_frac)
        if not self.warmdown:
            return 1.0
        left = 1 - progress + self.step_share  # share of the run from the start of this step on
        multiplier = min(1.0, left / self.warmdown)  # linear: from 1 to 0 in the warmdown
        if settings.lr_schedule in ("cosine", "flat_cosine"):
            multiplier = 0.5 - 0.5 * math.cos(math.pi * multiplier)
        elif settings.lr_schedule == "wsd":
            # The decay of arXiv 2405.18392. linear and flat_cosine are flat until the warmdown, too.
            multiplier = 1 - math.sqrt(1 - multiplier)
        return settings.lr_floor + (1 - settings.lr_floor) * multiplier

    def begin_phases(self, step, progress):
        """Begin the phases that are due, and count the step in those that are on; return the new names.

        Call it once a step, before the forward; `is_on` answers for the same step. Progress alone
        decides, so that a replay repeats it.
        """
        # A phase also begins if another step as long as this one would reach the end: the run may
        # stop before it, and a phase that never began is an error (result_errors).
        next_progress = progress + (progress - self.progress)
        is_last_chance = next_progress > 1 - 1e-9
        self.progress = progress
        self.step_share = progress / (step + 1)
        begun = []
        for name, (begin, _) in self.planned.items():
            # By the clock the first step is at 0: what begins at 0 begins there.
            is_due = progress > begin or begin == 0 or is_last_chance
            if self.is_on(name):
                self.phases[name]["steps"] += 1
            elif name not in self.phases and is_due:
                self.phases[name] = {
                    "begin": begin,
                    "start_step": step + 1,  # counted from 1, as in the log
                    "start_progress": progress,
                    "steps": 1,  # number of steps in this phase so far
                }
                begun.append(name)
        return begun

    def is_on(self, name):
        """Return whether a phase has begun and is on in the present step."""
        # A resumed run may have begun a phase that its settings no longer plan.
        has_begun = name in self.planned and name in self.phases
        return has_begun and self.progress <= self.planned[name][1]

    def describe(self):
        """Return the plan and what became of it so far, a line for each phase."""
        lines = []
        for name, (begin, end) in self.planned.items():
            result = "not yet begun"
            if name in self.phases:
                result = "begun at step {start_step}, on for {steps} steps".format(
                    **self.phases[name]
                )
            lines.append(f"plan: {name} from {begin:.1%} to {end:.1%} of the run, {result}")
        return "\n".join(lines)


class Average(Stateful):
    """A float32 average of parameters: exponential with `memory`, a share of the run, or plain."""

    STATE = ("values", "progress", "count")

    def __init__(self, params, memory=None):
        self.params = params
        self.memory = memory
        self.values = []
        self.progress = 0.0  # at the last update
        self.count = 0  # updates so far; 0 begins a new average

    @torch.no_grad()
    def update(self, progress):
        """Take in the parameters as they are."""
        if not self.count:
            self.values = [param.float().clone() for param in self.params]
        weight = 1 / (self.count + 1)
        if self.memory:
            weight = 1 - math.exp((self.progress - progress) / self.memory)
        torch._foreach_lerp_(self.values, self.params, weight)
        self.progress = progress
        self.count += 1


# === end: schedule ===


# === shared: quantization ===
# The artifact stores matrices and embeddings as whole-number codes with one scale per tensor, and
# all other tensors as floats. The entropy coder makes rare codes cheap, so the scale alone decides
# the size. One scale per tensor took 7 to 10% fewer bytes at equal loss than one per row, because
# the coder knows the sizes of rows and columns (docs/lab/2026-11.md, 2026-11-21).
#
# 2**(bits - 1) - 1 steps are this many root mean squares (Parameter Golf's SDClip). With the
# default of 6 bits, 8 sigma give a step of 0.26 sigma, about 4 bits per weight. Unlike SDClip,
# nothing is clipped: codes run as far as the weights do. Published weights have outliers at 50
# root mean squares, and SmolLM2 clipped at 8 had 2.1 instead of 1.1 bits per byte.
MATRIX_CLIP_SIGMAS = 8.0
# At the same step an embedding's weight costs 40 times as much loss as a matrix's (docs/lab.md).
# So embeddings have a finer step, 0.047 sigma.
EMBED_CLIP_SIGMAS = 6.0
EMBED_BITS = 8


def tensor_class(name, tensor):
    """Return "matrix", "embedding" or "control", by the last part of the tensor's dotted name.

    "w_*" is a matrix; "*embed*", "head" and "ab" (GDN's decay and step size) are embeddings. All
    other tensors are controls: few weights that scale whole channels. So is every tensor with fewer
    than 16 rows or columns, seen as (shape[0], the other dimensions).
    """
    if tensor.ndim < 2 or min(tensor.flatten(1).shape) < 16:
        return "control"
    # Under a LoRA adapter PyTorch calls the weight itself NAME.original.
    last = name.removesuffix(".original").rsplit(".", 1)[-1]
    if last.startswith("w_"):
        return "matrix"
    return "embedding" if "embed" in last or last in ("head", "ab") else "control"


def quantize(w, bits, clip_sigmas):
    """Return codes int32 (..., R, C) and scales float16 (..., 1) of tensors w (..., R, C).

    The codes are the nearest to w / scale. `clip_sigmas` root mean squares of a tensor have the
    code 2**(bits - 1) - 1, and larger weights have larger codes. They are below 2**24, because no
    weight is larger than the root mean square times the root of the number of weights. The root
    mean square is not about the mean, so a constant tensor does not vanish. If a tensor is not
    finite, neither is its scale.
    """
    w = w.float()
    sigma = w.square().mean((-2, -1)).sqrt()[..., None]
    # A tensor of zeros has the smallest scale that float16 has.
    scale = (sigma * clip_sigmas / (2 ** (bits - 1) - 1)).clamp(min=2**-24).half()
    return (w / scale[..., None]).round_().to(torch.int32), scale


def quant_table(matrix_bits, widen=1.0):
    """Return the quantizers of a run: tensor class -> arguments of `quantize`.

    widen: factor by which all steps are larger than the bits say, to meet a limit of bytes.
    """
    return {
        "matrix": {"bits": matrix_bits, "clip_sigmas": MATRIX_CLIP_SIGMAS * widen},
        "embedding": {"bits": EMBED_BITS, "clip_sigmas": EMBED_CLIP_SIGMAS * widen},
    }


def quantize_all(tensors, table):
    """Return name -> Coded, with the nearest codes, of those tensors whose class the table has.

    Tensors of one shape are quantized together, because many small operations keep a GPU waiting.
    """
    groups = collections.defaultdict(list)
    for name, w in tensors.items():
        kind = tensor_class(name, w)
        if kind in table:
            groups[kind, w.flatten(1).shape].append(name)
    coded = {}
    for (kind, _), names in groups.items():
        w = torch.stack([tensors[name].flatten(1) for name in names])
        codes, scales = quantize(w, **table[kind])
        for name, *parts in zip(names, codes, scales, strict=True):
            coded[name] = Coded(*parts, table[kind]["bits"])
    return {name: coded[name] for name in tensors if name in coded}


# === end: quantization ===


# === shared: qat ===
@contextlib.contextmanager
def swapped(params, values):
    """Inside, `params` hold `values`; afterwards, also after an exception, their old values."""
    params = [param.detach() for param in params]  # the same memory, which may be written in place
    originals = torch._foreach_mul(params, 1)  # copies, by few operations
    try:
        torch._foreach_copy_(params, list(values))
        yield
    finally:
        torch._foreach_copy_(params, originals)


def quantized(network, table):
    """Return a context in which weights are what the artifact would give back, for training.

    This holds for forward and backward. No flag in the model changes, so compiled code is not
    traced again. The gradient at the quantized weight q(w) is applied to w: this is the straight-
    through estimator (Bengio et al., arXiv:1308.3432), w + (q(w) - w).detach().
    """
    tensors = network.state_dict()
    coded = quantize_all(tensors, table)
    params = [tensors[name] for name in coded]
    weights = [dequantize(part.codes, part.scale) for part in coded.values()]
    return swapped(params, map(Tensor.view_as, weights, params))


def count_parameters(network):
    """Return the number of parameters of each tensor class, and in total."""
    counts = collections.Counter()
    for name, param in network.named_parameters():
        counts[tensor_class(name, param)] += param.numel()
    counts["total"] = counts.total()
    return counts


# === end: qat ===


# === shared: artifact ===
# An artifact is one file:
#
#   magic, version u32, length of the header u32     little endian
#   header                                           JSON in a zstd frame
#   streams, without gaps                            each is a zstd frame of an array
#   SHA-256 of all before it
#
# The header lists the streams in their order, with name, shape, dtype (as numpy writes it) and
# length. The first four belong to the coder, the others are the tensors:
#
#   lane_states u32 (lanes,)    states of the coder at which decoding begins
#   tables u16 (97, 256)        frequencies of the symbols, symbol & 255
#   sizes u8                    of each tensor in words: a size per row, then a size per column
#   escapes i32                 the codes beyond +-127 of all tensors, in order
#   a control                   float16, or float32
#   a quantized tensor          with "scale" and "bits": symbols int8, or words u16
#
# A symbol is the code itself from -127 to 127, and otherwise -128, an escape: the next number of
# `escapes` is the code. Version 9, of the records of 2026-11-25, had no such codes, and no stream
# `escapes`.
#
# Words are of range ANS (Duda, arXiv:1311.2540) in interleaved lanes: code i of a tensor is in lane
# i % lanes. The states run on from tensor to tensor, and end at 2**16. In trained matrices rows
# differ in size, and so do columns that read hidden units; given both sizes, codes are nearly
# normal. So the code at row r and column c is coded by table sizes[r] + sizes[c], which saves 5% of
# the bytes (docs/lab/2026-11.md, 2026-11-21).
#
# A reader compares all sizes with the length of the file before it allocates. A file may have
# FREE_NUMBERS numbers, and NUMBERS_PER_BYTE more for each of its bytes. Where nearly all weights
# are 0 they take fewer bytes than that; then zeros follow the last stream.
ARTIFACT_PREFIX = struct.Struct("<8sII")
ARTIFACT_MAGIC = b"UNDERPAR"
ARTIFACT_VERSION = 10
READABLE_VERSIONS = (9, ARTIFACT_VERSION)
HEADER_LIMIT = 1 << 20  # bytes of its JSON
FREE_NUMBERS = 1 << 24
NUMBERS_PER_BYTE = 64
CODES_PER_LANE = 1 << 14  # at most, unless there are 1,024 lanes: one lane would take minutes
ESCAPE = -128  # the symbol of a code beyond +-127
RANS_BITS = 14  # rounding frequencies costs 20 bytes per million codes; at 12 bits 150
RANS_TOTAL = 1 << RANS_BITS
RANS_LOW = 1 << 16  # states stay in [2**16, 2**32), so a step moves at most one 16-bit word


class ArtifactError(UserError):
    """A file of a model is damaged, or none; one line that names the file and the damaged part."""


def require(condition, message):
    """Raise ArtifactError(message) unless the condition holds."""
    if not condition:
        raise ArtifactError(message)


@contextlib.contextmanager
def one_line(source):
    """Turn any exception raised inside into an ArtifactError, one line that names the source.

    A file with a right SHA-256 and wrong contents may raise anything.
    """
    try:
        yield
    except Exception as error:
        reason = str(error) if isinstance(error, UserError) else repr(error)
        raise ArtifactError(f"{source}: {' '.join(reason.split()):.400}") from None


@dataclass
class Coded:
    """A quantized tensor: weight = code * scale."""

    codes: Tensor  # int32 (R, C)
    scale: Tensor  # float16 (1,)
    bits: int  # of the rule that chose the scale, see quantize


def dequantize(codes, scale):
    """Return code * scale, float32 (..., R, C): rounded once, so equal on every machine."""
    return codes.float() * scale[..., None]


class RansDecoder:
    """Decodes symbols by tables, in integers only; `states` uint32 (lanes,) move on in place."""

    def __init__(self, states, tables):
        """tables uint16 (K, 256), made by rans_table. Raises ArtifactError if one is not whole."""
        require((tables.sum(1, dtype=np.int64) == RANS_TOTAL).all(), "a table's sum is not 2**14")
        self.states = states
        # The low 14 bits of a state are a slot. A symbol has as many slots as its frequency says.
        # Slots are numbered through all tables, and `first` is a symbol's first one.
        frequency = tables.astype(np.uint32).reshape(-1)
        first = np.cumsum(frequency, dtype=np.uint32) - frequency
        # `owners` has table << 8 | symbol of each slot. `steps` has the frequency of a slot's symbol
        # in the upper 16 bits and the slot's place among those of the symbol in the lower: one
        # look-up is 1.5 times as fast as two.
        owners = np.repeat(np.arange(len(frequency)), frequency)
        places = np.arange(len(owners), dtype=np.uint32) - first[owners]
        self.steps = frequency[owners] << 16 | places
        self.symbols = owners.astype(np.uint8)

    def decode(self, tables, words):
        """Return the symbols uint8 (n,) that `tables` (n,) code in `words`.

        May raise any exception if they are damaged.
        """
        lanes = len(self.states)
        symbols = np.empty(len(tables), np.uint8)
        for begin in range(0, len(tables), lanes):
            slot = tables[begin : begin + lanes].astype(np.int64) << RANS_BITS
            x = self.states[: len(slot)]
            slot += x & (RANS_TOTAL - 1)
            step = self.steps.take(slot, mode="clip")
            x >>= RANS_BITS
            x *= step >> 16
            x += step & 0xFFFF
            low = np.flatnonzero(x < RANS_LOW)
            # Where words are missing, these two lengths differ, which numpy refuses.
            x[low] = x[low] << 16 | words[: len(low)]
            words = words[len(low) :]
            symbols[begin : begin + lanes] = self.symbols.take(slot)
        require(len(words) == 0, "rANS words are left over")
        return symbols


def check_header(header):
    """Raise ArtifactError unless a header is an object that names the model's tokenizer."""
    check_json(header, {"meta": dict, "tokenizer_sha256": str}, "the header")
    tokenizer = header["meta"].setdefault("tokenizer", "bytes")
    # It is looked for beside the model.
    is_name = isinstance(tokenizer, str) and Path(tokenizer).name == tokenizer
    require(is_name and tokenizer.isprintable(), "the header's tokenizer must be a file's name")


def unzip(frame, limit, source):
    """Return the content of a zstd frame. Raises ArtifactError if it has more than `limit` bytes."""
    raw = zstandard.ZstdDecompressor().stream_reader(frame).read(limit + 1)
    require(len(raw) <= limit, f"{source} is longer than {limit} bytes")
    return raw


def read_artifact_header(data):
    """Return the header of an artifact and a file at its streams.

    May raise any exception if it is damaged.
    """
    require(
        data.startswith(ARTIFACT_MAGIC),
        "is no underpar artifact; a model is a run, a checkpoint or an artifact",
    )
    _, version, length = ARTIFACT_PREFIX.unpack_from(data)
    require(version in READABLE_VERSIONS, f"version {version}, this code reads 9 and 10")
    is_whole = hashlib.sha256(memoryview(data)[:-32]).digest() == data[-32:]
    require(is_whole, "damaged: the SHA-256 is wrong")
    file = io.BytesIO(data)
    file.seek(ARTIFACT_PREFIX.size)
    header = json.loads(unzip(file.read(length), HEADER_LIMIT, "the header"))
    check_header(header)
    check_json(header, {"streams": dict, "settings": dict}, "the header")
    return header, file


def read_streams(data):
    """Return header and arrays (name -> flat) of an artifact.

    May raise any exception if it is damaged.
    """
    header, file = read_artifact_header(data)
    numbers = FREE_NUMBERS + NUMBERS_PER_BYTE * len(data)  # that the streams may still have
    arrays = {}
    for name, record in header["streams"].items():
        kinds = {"shape": [int], "dtype": str, "length": int, "scale?": float, "bits?": int}
        check_json(record, kinds, repr(name))
        shape = record["shape"]
        require(len(shape) <= 8, f"{name!r} has a shape that is none")
        dtype = np.dtype(record["dtype"])
        require(dtype.itemsize <= 4, f"{name!r} has a dtype that is none")
        count = math.prod(shape)
        numbers -= count
        require(numbers >= 0, f"{name!r}: the file is too short for so many numbers")
        # A code takes one word at most, so words are not more than the shape says.
        raw = unzip(file.read(record["length"]), count * dtype.itemsize, repr(name))
        arrays[name] = np.frombuffer(raw, dtype).copy()
    return header, arrays


def decode_artifact(data):
    """Return what read_artifact does, of the bytes of an artifact.

    May raise any exception if it is damaged.
    """
    header, arrays = read_streams(data)
    states, tables, sizes = [arrays.pop(name) for name in ("lane_states", "tables", "sizes")]
    escapes = torch.from_numpy(arrays.pop("escapes", np.empty(0, np.int32)))
    dtypes = [states.dtype, tables.dtype, sizes.dtype]
    require(dtypes == ["<u4", "<u2", "|u1"], "the coder's streams are not u32, u16 and u8")
    decoder = RansDecoder(states, tables.reshape(97, 256))
    codes_in_words = 0
    tensors = {}
    coded = {}
    for name, array in arrays.items():
        record = header["streams"][name]
        shape = record["shape"]
        if array.dtype == np.uint16:
            height, *width = shape
            codes_in_words += math.prod(shape)
            least = min(1024, codes_in_words // CODES_PER_LANE)
            require(len(states) >= least, f"{name!r}: the lanes are too few for so many codes")
            ends = [height, height + math.prod(width)]
            rows, columns, sizes = np.split(sizes, ends)
            contexts = np.add.outer(rows, columns).reshape(-1)
            array = decoder.decode(contexts, array).view(np.int8)
        values = torch.from_numpy(array).view(shape)
        if array.dtype == np.int8:
            scale = torch.tensor([record["scale"]], dtype=torch.float16)
            require(scale.isfinite(), f"{name!r} has a scale that is not finite")
            is_escape = values == ESCAPE
            codes = values.int().masked_scatter_(is_escape, escapes)
            escapes = escapes[is_escape.sum() :]
            coded[name] = Coded(codes.flatten(1), scale, record["bits"])
            values = dequantize(codes, scale)
        tensors[name] = values.float()
    require(len(escapes) == 0, "escapes are left over")
    require((states == RANS_LOW).all(), "the lanes do not end at 2**16")
    return header, tensors, coded


def read_artifact(path):
    """Return the header, the tensors by name in float32, and `coded` as it was written.

    Bit-exact on every machine. Memory is bounded by the file: some 10 bytes for each number that it
    may have, see above. Raises ArtifactError, one line that names the file, if anything is not as
    it was written. The header's meta has the name of the tokenizer's file, as `tokenizer`.
    """
    data = Path(path).read_bytes()
    with one_line(path):
        return decode_artifact(data)


# === end: artifact ===


# === shared: packing ===
# These stay float32: they pass through exp and softplus into a decay that every token applies. So do
# the scales of a delta that has 32 bits for them.
FLOAT32_CONTROLS = ("A_log", "dt_bias", "scales32")
# Level 6 takes up to 0.5% fewer bytes than 3; from 12 on it is slow.
ARTIFACT_ZSTD = zstandard.ZstdCompressor(level=6)


def rans_table(counts):
    """Return frequencies uint16 (256,), of sum 2**14, for symbols that occur counts (256,) times.

    Each symbol that occurs has 1 and its share of what is left. The first two symbols count as if
    they occurred, because a single symbol with all of 2**14 would overflow a state.
    """
    counts = counts.astype(np.float64)
    counts[:2] += 1e-9
    present = counts > 0
    ends = np.cumsum(counts) / counts.sum() * (RANS_TOTAL - present.sum())
    # Rounded ends of the symbols' ranges add up, which rounded shares would not.
    return (present + np.diff(np.rint(ends), prepend=0)).astype(np.uint16)


def rans_encode(pairs, states, tables):
    """Return words uint16, in the order of decoding, of pairs (n,): table << 8 | symbol.

    tables uint16 (K, 256), made by rans_table; `states` uint32 (lanes,) move on in place. Range ANS
    is a stack: what is to be decoded first is encoded last.
    """
    frequency = tables.astype(np.uint32).take(pairs)
    start = (tables.cumsum(1, dtype=np.uint32) - tables).take(pairs)
    lanes = len(states)
    chunks = [np.empty(0, np.uint16)]
    for begin in reversed(range(0, len(pairs), lanes)):
        f = frequency[begin : begin + lanes]
        x = states[: len(f)]  # a view; the last symbols may need only some of the lanes
        full = x >= f << (32 - RANS_BITS)
        chunks.append(x[full].astype(np.uint16))
        x[full] >>= 16
        # x becomes (x // f << 14) + x % f + start, where x % f is x - x // f * f
        x += x // f * (RANS_TOTAL - f) + start[begin : begin + lanes]
    return np.concatenate(chunks[::-1])


def size_numbers(mean_squares):
    """Return sizes uint8, from 0 to 48, of mean squares: quarter octaves of their roots."""
    octaves = mean_squares.clamp(2**-8, 2**16).log2()
    return (2 * octaves + 16).round().to(torch.uint8)


def count_symbols(codes):
    """Return what the coder needs of codes int32 (R, C), on their device.

    symbols int8 (R, C), see section artifact; pairs int16 (R * C,): table << 8 | symbol; sizes
    uint8 (R + C,) of rows and columns; counts int64 (97, 256) by table and symbol.
    """
    symbols = codes.clamp(ESCAPE, -ESCAPE).to(torch.int8)  # 128 becomes -128, too
    power = symbols.float().square_()
    rows = size_numbers(power.mean(1))
    columns = size_numbers(power.mean(0) / power.mean().clamp(min=1e-9))
    tables = rows.short()[:, None] + columns
    pairs = (tables << 8 | symbols.view(torch.uint8)).flatten()
    counts = torch.bincount(pairs, minlength=97 * 256).view(97, 256)
    return symbols, pairs, torch.cat([rows, columns]), counts


def entropy_bytes(counts):
    """Return the bytes that codes of these counts (97, 256) take, if their tables are exact."""
    totals = counts.sum(1, keepdim=True).clamp(min=1)
    return (counts * (totals / counts.clamp(min=1)).log2()).sum().item() / 8


def model_codes(coded):
    """Return what precedes coding of `coded`, name -> Coded: arrays, pairs, counts.

    arrays: what is stored, by name: first the coder's own, then the symbols of each tensor. pairs
    (name -> int16) and counts (97, 256) are those of count_symbols, of the tensors whose symbols
    rANS words are to replace.
    """
    symbols = {}
    pairs = {}
    sizes = [torch.empty(0, dtype=torch.uint8)]
    escapes = [torch.empty(0, dtype=torch.int32)]
    counts = torch.zeros(97, 256, dtype=torch.int64)
    for name, part in coded.items():
        codes, tensor_pairs, ends, count = count_symbols(part.codes)
        symbols[name] = codes.cpu().numpy()
        escapes.append(part.codes[codes == ESCAPE].cpu())
        if tensor_class(name, codes) == "embedding":
            # Rows of tokens that rarely occur are alike, and zstd finds them: without it artifacts
            # of the records take up to 2.7% more bytes (docs/lab/2026-11.md, 2026-11-27).
            if len(ARTIFACT_ZSTD.compress(symbols[name].tobytes())) <= entropy_bytes(count):
                continue
        pairs[name] = tensor_pairs
        sizes.append(ends.cpu())
        counts += count.cpu()
    # Lanes move side by side, so many are fast; each of them costs 2 bytes.
    lanes = min(4096, max(8, int(counts.sum()) // 8192))
    coder_arrays = {
        "lane_states": np.full(lanes, RANS_LOW, np.uint32),
        "tables": np.stack([rans_table(count) for count in counts.numpy()]),
        "sizes": torch.cat(sizes).numpy(),
        "escapes": torch.cat(escapes).numpy(),
    }
    return coder_arrays | symbols, pairs, counts


def pack_artifact(tensors, coded, **header):
    """Return the artifact of `tensors`, those of `coded` as codes.

    header: settings, which rebuild the model, tokenizer_sha256 and meta, which is anything; JSON.
    The same input gives the same bytes. Raises ArtifactError if a tensor is not finite as stored.
    """
    arrays, pairs, _ = model_codes(coded)
    for name in reversed(pairs):  # what is to be decoded first is encoded last
        codes = pairs[name].cpu().numpy()
        arrays[name] = rans_encode(codes, arrays["lane_states"], arrays["tables"])
    for name, tensor in tensors.items():
        if name not in coded:
            dtype = torch.float32 if name.endswith(FLOAT32_CONTROLS) else torch.float16
            arrays[name] = tensor.detach().to(dtype).cpu().numpy()

    payloads = []
    records = {}
    for name, array in arrays.items():
        payload = ARTIFACT_ZSTD.compress(array.tobytes())
        shape = tensors.get(name, array).shape
        record = {"shape": shape, "dtype": array.dtype.str, "length": len(payload)}
        if name in coded:
            record |= {"bits": coded[name].bits, "scale": coded[name].scale.item()}
        is_finite = np.isfinite(record.get("scale", array)).all()
        require(is_finite, f"tensor {name}: must be finite as it is stored")
        records[name] = record
        payloads.append(payload)
    text = json.dumps({**header, "streams": records}).encode()
    require(len(text) <= HEADER_LIMIT, f"the header has {len(text)} bytes, at most {HEADER_LIMIT}")
    frame = ARTIFACT_ZSTD.compress(text)
    prefix = ARTIFACT_PREFIX.pack(ARTIFACT_MAGIC, ARTIFACT_VERSION, len(frame))
    data = b"".join([prefix, frame, *payloads])
    numbers = sum(math.prod(record["shape"]) for record in records.values())
    data += bytes(max(0, (numbers - FREE_NUMBERS) // NUMBERS_PER_BYTE - len(data)))
    return data + hashlib.sha256(data).digest()


# === end: packing ===


# === shared: rebuild ===
# What a changed copy of a script has written is another network: dropping the part that this script
# does not know would load wrong weights without a word.
CHANGED_COPY = (
    "a changed copy of a script wrote it: use that copy, or copy section `model` from it into this "
    "script"
)


MAX_LAYERS = 1024  # bounds the time that a forged file can take


def checked_config(shape):
    """Return the GPTConfig of a stored shape; fields that an older model lacks have their defaults.

    May raise any exception if a field is unknown or has a wrong value.
    """
    kinds = {one.name: one.type for one in fields(GPTConfig)} | {"rope_scaling": [float]}
    require(
        shape,
        "has no settings of its network; a version before 2026-11-27 wrote it: use the script in the "
        "log of its run",
    )
    check_json(shape, dict, "its settings")
    for name, value in shape.items():
        require(
            name in kinds,
            f"has the field {name!r:.80} that this script does not know; {CHANGED_COPY}",
        )
        check_json(value, kinds[name], f"its settings.{name}")
        is_small = type(value) is not int or value < 1 << 31
        require(is_small, f"has {name}={value!r:.30}: must be below 2**31")
    with one_line("lacks a field of its network's settings"):
        config = GPTConfig(**shape)
    scaling = config.rope_scaling
    require(len(scaling) in (0, 4), f"has rope_scaling={scaling!r:.80}: must be 4 numbers")
    require(
        len(config.layers.split()) <= MAX_LAYERS, f"its network has more than {MAX_LAYERS} layers"
    )
    return config


def empty_network(config):
    """Return a network without memory (device meta). ArtifactError if the config has no network."""
    with one_line("has settings that make no network"), torch.device("meta"):
        return GPT(config)


def check_weights(tensors):
    """Raise any error unless these are name -> tensor of finite floats, which the file has in full."""
    for name, tensor in tensors.items():
        with one_line(f"tensor {name!r:.80}"):
            # PyTorch has few operations for floats of 8 bits.
            is_float = tensor.is_floating_point() and tensor.element_size() > 1
            require(is_float, f"is no tensor of weights, but of {tensor.dtype}")
            # An expanded tensor of a forged file has few bytes and any number of weights.
            size = tensor.numel() * tensor.element_size()
            require(size <= tensor.untyped_storage().nbytes(), "has fewer weights than its shape")
            # A float64 may be beyond float32's range, in which the network is.
            low_and_high = torch.stack(tensor.aminmax()).float()
            require(
                low_and_high.isfinite().all(),
                "has NaN or infinite weights; take a model or a checkpoint from before they arose",
            )


def shape_of(tensors, name):
    """Return the shape of a tensor, or "missing"."""
    return list(tensors[name].shape) if name in tensors else "missing"


def check_tensors(network, tensors):
    """Raise ArtifactError unless the tensors are those of the network by name and shape."""
    expected = network.state_dict()
    for name in {**tensors, **expected}:
        shape = shape_of(tensors, name)
        wanted = shape_of(expected, name)
        require(
            shape == wanted,
            f"the tensor {name!r:.80} is {shape}, and {wanted} in this script's network; "
            f"{CHANGED_COPY}",
        )


def fill_network(network, tensors):
    """Give a network without memory these tensors as its weights, and return it. ArtifactError."""
    check_tensors(network, tensors)
    empty = dict(network.named_parameters())
    network.load_state_dict(tensors, assign=True)
    for name, param in network.named_parameters():
        vars(param).update(vars(empty[name]))  # Muon's splits
    return network


# === end: rebuild ===


# === shared: files ===
def sha256_file(path):
    """Return the SHA-256 of a file in hexadecimal digits."""
    # Shards and checkpoints are mapped, not read into memory. An empty file cannot be mapped.
    data = np.memmap(path, mode="r") if os.path.getsize(path) else b""
    return hashlib.sha256(data).hexdigest()


def check_json(value, kind, path):
    """Raise UserError unless a value read from JSON has the kind: a type, [kind of all elements] or
    {key: kind}.

    A key that ends in "?" may be missing or null, and other keys than these are not looked at. An
    int is 0 or more, and may stand for a float. path: what the error calls the value.
    """
    expected = kind if isinstance(kind, type) else type(kind)
    is_right = type(value) is expected or (type(value), expected) == (int, float)
    if not is_right or (expected is int and value < 0):
        allowed = "int, 0 or more" if expected is int else expected.__name__
        shown = "missing" if value is None else repr(value)
        raise UserError(f"{path} is {shown:.60}, must be of type {allowed}")
    if isinstance(kind, list):
        for i, part in enumerate(value):
            check_json(part, kind[0], f"{path}[{i}]")
    if isinstance(kind, dict):
        for key, part in kind.items():
            name = key.rstrip("?")
            if key == name or value.get(name) is not None:
                check_json(value.get(name), part, f"{path}.{name}")


# === end: files ===


# === shared: tokenizer ===
@dataclass
class Tokenizer:
    """A tokenizer, from `read_tokenizer`, and the bytes that each token decodes to.

    After a boundary (a control, unknown or unused token) they are without the space that some
    SentencePiece models put before every text.
    """

    file: str  # name of the file that holds the tokenizer; "bytes" needs none
    content: bytes  # of that file; its SHA-256 tells tokenizers apart
    bos_id: int
    pieces: list  # bytes that each token decodes to, b"" for boundaries
    # Of ENCODINGS: sha256, bos_id, vocab_size, split. Every SentencePiece file: stop. An imported model's
    # file (see convert.py) also: ranks or sentencepiece; bos, added, flags, nfc, normalized,
    # begins_with_bos, which encode texts; stop, the ids that end an answer; text_end, that of a text;
    # template, tool_template, names, which render conversations; unused_templates, template_end.
    facts: dict
    drops_space: np.ndarray | bool = False  # (V,) bool, loses its first space after a boundary
    proto: bytes = b""  # the SentencePiece model, if the file has one
    encode: Callable = None  # see set_encoders; this and what follows are of add_encoder
    encode_marked: Callable = None
    roles: dict = None

    def __post_init__(self):
        self.sha256 = hashlib.sha256(self.content).hexdigest()
        self.vocab_size = len(self.pieces)
        self.boundary = np.array([piece == b"" for piece in self.pieces])  # (V,)
        self.drops_space = np.broadcast_to(self.drops_space, self.vocab_size)


def read_tokenizer(path, facts):
    """Return the Tokenizer of a SentencePiece file or a rank file NAME.tiktoken, or the built-in
    one, `bytes`.

    facts: bos_id and vocab_size, which a rank file does not contain. Raises UserError.
    """
    path = Path(path)
    if path.name == "bytes":  # pad, BOS, EOS and unknown, then 256 bytes, then 4 roles
        pieces = [b""] * 4 + [bytes([byte]) for byte in range(256)] + [b""] * 4
        return Tokenizer("bytes", b"underpar bytes 264", 1, pieces, {})
    try:
        content = path.read_bytes()
        if path.suffix == ".tiktoken":
            return rank_tokenizer(path.name, content, facts)
        return sentencepiece_tokenizer("tokenizer.model", content, content, {})
    except (OSError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(
            f"tokenizer {path}: {error}; must be a SentencePiece model with a BOS token, the rank "
            "file NAME.tiktoken of an imported model or of a published encoding (gpt2, cl100k_base, "
            "o200k_base), or bytes"
        ) from error


def rank_tokenizer(file, content, facts):
    """Return the tokenizer of a rank file: a line per piece, in base64, and its id.

    facts: of ENCODINGS. The file of an imported model is JSON with facts of its own: such lines are
    `ranks`, or a SentencePiece model is `sentencepiece`.
    """
    ranks = content
    if content.startswith(b"{"):
        facts = json.loads(content)
        if "sentencepiece" in facts:
            proto = base64.b64decode(facts["sentencepiece"])
            return sentencepiece_tokenizer(file, content, proto, facts)
        ranks = facts["ranks"]
    if not facts:
        raise ValueError("another name than those of published encodings")
    pieces = [b""] * facts["vocab_size"]  # special tokens and unused ids stay b""
    for line in ranks.splitlines():
        piece, rank = line.split()
        pieces[int(rank)] = base64.b64decode(piece)
    return Tokenizer(file, content, facts["bos_id"], pieces, facts)


def sentencepiece_tokenizer(file, content, proto, facts):
    """Return the tokenizer of a file that has a SentencePiece model, whose bytes are `proto`."""
    model = sentencepiece.SentencePieceProcessor(model_proto=proto)
    if model.bos_id() < 0:
        raise ValueError("empty, or without the BOS token of every document")
    pieces = []
    drops_space = []
    for i in range(model.vocab_size()):
        name = model.id_to_piece(i)
        piece = name.replace("\u2581", " ").encode()  # SentencePiece's mark of a space
        if model.is_byte(i):
            piece = bytes.fromhex(name[3:5])  # a byte's name is "<0x41>"
        elif model.is_control(i) or model.is_unknown(i):
            piece = b""
        pieces.append(piece)
        # A space that the model's own decoder leaves out, the dummy prefix, is not in the text.
        drops_space.append(piece == b" " + model.decode([i]).encode())
    return Tokenizer(file, content, model.bos_id(), pieces, facts, drops_space, proto)


# === end: tokenizer ===


# === shared: settings ===
# What records of nanoGPT and Parameter Golf have and these scripts have not: it is accepted at 0.
ABSENT_FEATURES = (
    "ADAM_WD",
    "CASEOPS_ENABLED",
    "DROPOUT",
    "GATED_ATTN_ENABLED",
    "GPTQ_CALIBRATION_BATCHES",
    "LN_SCALE",
    "LORA_DROPOUT",
    "MTP_NUM_HEADS",
    "NEFTUNE_NOISE_ALPHA",
    "NUM_LOOPS",
    "PARALLEL_START_LAYER",
    "PHASED_TTT_ENABLED",
    "RECUR_LAYERS",
    "RECUR_START_STEP",
    "SMEAR_GATE_ENABLED",
    "SPARSE_ATTN_GATE_ENABLED",
    "VE_ENABLED",
    "XSA_LAST_N",
)

# Names that nanoGPT, modded-nanogpt, Parameter Golf, TRL and older versions of these scripts use.
# In the environment they are errors, not ignored in silence. A text is the setting, here or in
# another script, that does the same job. A number is the value of a constant: the name is accepted
# with this value, so that pasted commands run.
OTHER_NAMES = {
    "ADAM_EPS": 1e-8,
    "BATCH_SIZE": "TRAIN_BATCH_TOKENS",
    "BETA": "KL_BETA",
    "BETA1": 0.9,
    "BETA2": 0.99,
    "BIGRAM_DIM": 64,
    "BLOCK_SIZE": "TRAIN_SEQ_LEN",
    "CLIPRANGE": "LEFT_CLIP_RANGE",
    "CLIPRANGE_VALUE": 0.2,
    "DATASET": "DATA_PATH",
    "EMA_DECAY": "EMA",
    "EMA_ENABLED": "EMA",
    "EMBED_BITS": 8,
    "EMBED_LR": "TIED_EMBED_LR",
    "ENTROPY_COEFF": "ENTROPY_BETA",
    "ENT_COEF": "ENTROPY_BETA",
    "EPSILON": "LEFT_CLIP_RANGE",
    "EPSILON_HIGH": "RIGHT_CLIP_RANGE",
    "EVAL_SEQ_LEN": "TRAIN_SEQ_LEN",
    "EVAL_STEPS": "VAL_LOSS_EVERY",
    "GPTQ_RESERVE_SECONDS": "RESERVE_SECONDS",
    "GRADIENT_ACCUMULATION_STEPS": "MICRO_BATCH_TOKENS",
    "GRADIENT_CHECKPOINTING": "ACTIVATION_CHECKPOINTING",
    "GRAD_CLIP": "GRAD_CLIP_NORM",
    "HOLDOUT_TOKENS": 131072,
    "KL_COEF": "KL_BETA",
    "KL_ESTIMATOR": "KL_SHAPING",
    "LAM": "GAE_LAMBDA",
    "LATE_QAT": "QAT",
    "LATE_QAT_THRESHOLD": "QAT",
    "LEARNING_RATE": "MATRIX_LR",
    "LOGIT_SOFTCAP": 30.0,
    "LOG_SECONDS": 10.0,
    "LORA_R": "LORA_RANK",
    "LOSS_TYPE": "REDUCTION",
    "LR": "LEARNING_RATE",
    "LR_SCHEDULER_TYPE": "LR_SCHEDULE",
    "MAX_COMPLETION_LENGTH": "MAX_NEW_TOKENS",
    "MAX_GRAD_NORM": "GRAD_CLIP_NORM",
    "MAX_ITERS": "ITERATIONS",
    "MAX_LENGTH": "TRAIN_SEQ_LEN",
    "MAX_SEQ_LEN": "TRAIN_SEQ_LEN",
    "MAX_STEPS": "ITERATIONS",
    "MIN_LR": "LR_FLOOR",
    "MODEL_NAME_OR_PATH": "INIT_FROM",
    "MUON_BACKEND_STEPS": 5,
    "MUON_MOMENTUM": 0.95,
    "MUON_MOMENTUM_WARMUP_START": 0.85,
    "MUON_MOMENTUM_WARMUP_STEPS": "MUON_WARMUP_FRAC",
    "MUON_WARMUP_FRAC": 0.05,
    "MUON_WEIGHT_DECAY": "MUON_WD",
    "NUM_GENERATIONS": "GROUP_SIZE",
    "NUM_ITERATIONS": "EPOCHS",
    "NUM_MINI_BATCHES": "MINI_BATCHES",
    "NUM_PPO_EPOCHS": "EPOCHS",
    "NUM_TRAIN_EPOCHS": "ITERATIONS",
    "N_EMBD": "MODEL_DIM",
    "N_HEAD": "NUM_HEADS",
    "N_LAYER": "NUM_LAYERS",
    "OUTPUT_DIR": "OUT_DIR",
    "PER_DEVICE_TRAIN_BATCH_SIZE": "MICRO_BATCH_TOKENS",
    "QAT_ENABLED": "QAT",
    "QK_NORM": "QK_GAIN_INIT",
    "REPORT_TO": "TRACKER",
    "RESPONSE_LENGTH": "MAX_NEW_TOKENS",
    "ROPE_BASE": 10000.0,
    "SAVE_STEPS": "SAVE_EVERY",
    "SEQ_LEN": "TRAIN_SEQ_LEN",
    "SWA_ENABLED": "SWA",
    "SWA_EVERY": "SWA",
    "TIED_EMBED_INIT_STD": 0.005,
    "TTT_ENABLED": "TTT_LORA_RANK",
    "TTT_LORA_RANK": 0,
    "USE_PEFT": "LORA_RANK",
    "VF_COEF": 0.1,
    "WARMDOWN_FRACTION": "WARMDOWN_FRAC",
    "WARMUP_ITERS": "WARMUP_FRAC",
    "WARMUP_RATIO": "WARMUP_FRAC",
    "WARMUP_STEPS": 2,
    "WEIGHT_DECAY": "MUON_WD",
    **dict.fromkeys(ABSENT_FEATURES, 0),
}

# Other programs that do what these scripts leave out, or what the name means elsewhere.
OTHER_PROGRAMS = {
    "GPTQ_CALIBRATION_BATCHES": "; python quantize.py pack RUN OUT --gptq DATA does it",
    "WARMUP_STEPS": ", which are untimed; the rate rises in the share WARMUP_FRAC of the run",
    "TTT_LORA_RANK": "; python tools/adapt.py RUN scores a finished run with test-time training",
}

# Names of other projects for what changes no result, so that pasted commands run: how often a line is
# logged (LOG_SECONDS), the tokens of a batch of validation, and details of test-time training, which
# tools/adapt.py does.
HARMLESS_NAMES = (
    "LOGGING_STEPS",
    "LOG_INTERVAL",
    "PER_DEVICE_EVAL_BATCH_SIZE",
    "TRAIN_LOG_EVERY",
    "TTT_CHUNK_SIZE",
    "TTT_EPOCHS",
    "TTT_LORA_LR",
    "TTT_LR",
    "VAL_BATCH_SIZE",
)

# The settings of all scripts that the table above does not name: a setting that is meant for another
# script is an error. The settings of this script are known without the table.
OUR_SETTINGS = {
    "ARCH_MODE",
    "ARTIFACT",
    "ARTIFACT_BYTES_MAX",
    "ATTN_WINDOW",
    "BIGRAM_VOCAB_SIZE",
    "CENTERING",
    "COMPILE",
    "CONFIG",
    "CREDIT",
    "DEVICE",
    "DISCOUNT",
    "DTYPE",
    "ENVIRONMENT",
    "EVAL_PROMPTS",
    "EVAL_SAMPLES",
    "EVAL_STATEFUL",
    "EVAL_STRIDE",
    "GDN_LIGHT",
    "HEAD_LR",
    "HELD_OUT",
    "IMPORTANCE",
    "KD_ALPHA",
    "KD_BETA",
    "KD_LOSS",
    "KD_TEMPERATURE",
    "KD_TOP_K",
    "KERNELS",
    "KL_TARGET",
    "LABEL_SMOOTHING",
    "LAYER_PATTERN",
    "LAYOUT",
    "LORA_ALPHA",
    "LOSS",
    "MARGIN",
    "MARK",
    "MATRIX_BITS",
    "MAX_TURNS",
    "MAX_WALLCLOCK_SECONDS",
    "MEMORY_SNAPSHOT",
    "MLP",
    "MLP_MULT",
    "MODE",
    "NORM",
    "NUM_KV_HEADS",
    "NUM_SAMPLES",
    "OBJECTIVE",
    "OPTIMIZER",
    "PAIRS_PER_STEP",
    "POSITIONS",
    "PROMPT",
    "PROMPTS_PER_STEP",
    "RATIO_LIMIT",
    "REPLAY",
    "RESAMPLE_ROUNDS",
    "RESUME",
    "REWARD",
    "REWARD_MODEL",
    "REWARD_SECONDS",
    "ROPE_DIMS",
    "RUN_ID",
    "SAMPLES_EVERY",
    "SCALAR_LR",
    "SCALE_REWARDS",
    "SCORE",
    "SCORE_FILE",
    "SCORE_JUDGE",
    "SCORE_MODEL",
    "SCORE_PATH",
    "SEED",
    "SHARD",
    "STATEFUL",
    "SYSTEM",
    "TARGET_VAL_LOSS",
    "TEACHER",
    "TEMPERATURE",
    "TIE_EMBEDDINGS",
    "TOKENIZER_PATH",
    "TOKEN_NOISE",
    "TOOLS",
    "TOP_K",
    "TOP_P",
    "TRAIN_FILES",
    "TRAIN_ON",
    "VAL_FILES",
    "VOCAB_SIZE",
    "WARMDOWN_ITERS",
}


def setting_text(value):
    """Return the value of a setting as the environment has it."""
    return str(int(value)) if isinstance(value, bool) else str(value)


def parse_setting(setting, text):
    """Return the value of a setting that is written as text. Raises UserError: what is allowed."""
    kind = setting.type
    value = text
    if kind is str:
        return text
    if kind is Paths:
        # A shell replaces `~` in OUT_DIR=~/x, but not in a config, in quotes or in --out_dir=~/x.
        return ",".join(map(os.path.expanduser, text.split(",")))
    if kind in (int, float):
        low, high = setting.metadata.get("bounds", (0, math.inf))
        allowed = f"a {'whole ' * (kind is int)}number of at least {low}"
        if high < math.inf:
            allowed += f" and at most {high}"
        with contextlib.suppress(ValueError):
            value = kind(text)
            if low <= value <= high and value < math.inf:  # a NaN is in no range
                return value
    else:
        choices = {setting_text(choice): choice for choice in get_args(kind) or (False, True)}
        allowed = f"one of {', '.join(choices)}"
        if text in choices:
            return choices[text]
    raise UserError(f"{setting.name.upper()}={value!r}: must be {allowed}")


def check_settings(settings):
    """Check all fields of a settings dataclass, which a program may have built. Raises UserError."""
    for setting in fields(settings):
        value = getattr(settings, setting.name)
        kind = type(parse_setting(setting, setting_text(value)))
        # An int may stand for a float, but no number for a bool and no bool for a number.
        if type(value) is not kind and (type(value), kind) != (int, float):
            raise UserError(f"{setting.name.upper()}={value!r}: must be of type {kind.__name__}")


def check_name(name, text, names):
    """Raise UserError for a name that is no setting, with the one that was probably meant.

    A name for a constant is accepted with the constant's value, and a harmless one with any.
    """
    if name in HARMLESS_NAMES:
        print(f"note: {name}={text!r} is not used: it changes no result", file=sys.stderr)
        return
    meant = name
    while meant not in names and isinstance(OTHER_NAMES.get(meant), str):
        meant = OTHER_NAMES[meant]
    message = f"{name}={text!r}: no setting of this script"
    close_names = difflib.get_close_matches(meant, names, 1)
    if meant != name and meant not in names:
        close_names = []  # another script has it
    if meant not in names and meant in OTHER_NAMES:
        with contextlib.suppress(ValueError):
            if float(text) == OTHER_NAMES[meant]:
                return
        message += f", in which {meant} is always {OTHER_NAMES[meant]}"
        message += OTHER_PROGRAMS.get(meant, "")
    elif close_names:
        message += f"; did you mean {close_names[0]}?"
    raise UserError(
        f"{message} (--help lists the settings; IGNORE_ENV={name} ignores it in the environment)"
    )


def read_environment(environ, names):
    """Return the environment variables that are settings, and those that look meant as settings but
    are none here: near misses, names in the tables above, numbers that this script has as constants.
    """
    constants = [name for name, value in globals().items() if type(value) in (int, float)]
    known = {
        *names,
        *constants,
        *OUR_SETTINGS,
        *HARMLESS_NAMES,
        *OTHER_NAMES,
        *OTHER_NAMES.values(),
    }
    ignored = re.findall(r"[^,\s]+", environ.get("IGNORE_ENV", ""))
    if environ.get("ENVIRONMENT") == "BATCH":  # Slurm and Grid Engine set it in every batch job
        ignored.append("ENVIRONMENT")
    return {
        name: environ[name]
        for name in sorted(environ.keys() - ignored)
        if name in known or difflib.get_close_matches(name, names, 1, 0.85)
    }


def read_value(text):
    """Return the value behind NAME= in a config file, as a shell reads it, except that a value
    without quotes may have spaces, and that nothing in it is replaced. Raises ValueError.
    """
    if not re.match(r"\s*['\"]", text):
        return re.split(r"\s#", text)[0].strip()  # it's and a#b are text
    words = shlex.split(text, comments=True)
    if len(words) > 1:
        raise ValueError("has text behind the closing quotation")
    return words[0]


def read_config(path):
    """Return the lines NAME=value of a config file. Raises UserError, which names file and line."""
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")  # Windows writes a mark
    except (OSError, ValueError) as error:
        raise UserError(f"CONFIG={path!r}: must be a file of text in UTF-8; {error}") from None
    given = {}
    for number, line in enumerate(lines, 1):
        if re.match(r"\s*(#|$)", line):
            continue
        match = re.fullmatch(r"\s*(?:export\s+)?([^#=\s]+)\s*=(.*)", line)
        try:
            if match is None or match[1] in ("CONFIG", *given):
                raise ValueError("must be NAME=value, each name once, and not CONFIG")
            given[match[1]] = read_value(match[2])
        except ValueError as error:
            raise UserError(f"{path}, line {number}: {line!r}: {error}") from None
    return given


def read_arguments(arguments):
    """Return the settings of a command line: configs/x.env, NAME=value or --name=value."""
    given = {}
    for argument in arguments:
        name, equals, text = argument.removeprefix("--").partition("=")
        if not equals and argument.endswith(".env"):
            name = "CONFIG"
            text = argument
        elif not equals:
            raise UserError(f"{argument!r}: must be a config file (x.env), NAME=value or --help")
        if name.upper() in given:
            raise UserError(f"{argument!r}: the command line has {name.upper()} twice")
        given[name.upper()] = text
    return given


def load_settings(cls, environ, arguments=(), presets=(), stored=None):
    """Return the settings of dataclass `cls`: defaults < presets < stored < CONFIG file <
    environment < arguments.

    presets: NAME of a setting -> choice -> values of other settings. One that is chosen above the
    CONFIG file replaces the file's values, too. stored: function of the given values (NAME ->
    value) that returns those of a run or a network that they name.
    Raises UserError: a wrong value, or a name that is no setting (see check_name).
    """
    if "--help" in arguments or "-h" in arguments:
        print(__doc__)
        print(inspect.getsource(cls))
        sys.exit()
    settings = {setting.name.upper(): setting for setting in fields(cls)}
    above = {**read_environment(environ, settings), **read_arguments(arguments)}
    path = os.path.expanduser(above.get("CONFIG", ""))
    config = read_config(path) if path else {}
    values = {}
    for name in presets:
        chosen = above.get(name, config.get(name))
        preset = presets[name].get(chosen, {})
        values.update(preset)
        if name in above:
            for replaced in preset:
                config.pop(replaced.upper(), None)
    given = {}
    for name, text in {**config, **above}.items():
        if name in settings:
            given[name] = parse_setting(settings[name], text)
        elif name != "CONFIG":  # a script without this setting reads the file, too
            check_name(name, text, settings)
    if stored:
        values.update(stored(given))
    values.update({name.lower(): value for name, value in given.items()})
    # A preset of ARCH_MODE has more fields of the network's shape than there are settings.
    return cls(**{name: values[name] for name in values.keys() & cls.__dataclass_fields__})


# === end: settings ===


# === shared: streams ===
def open_streams():
    """Make print safe: characters that a terminal cannot show are escaped, and a closed stream is
    replaced by the null device, or the next file opened would get its number, and with it what
    libraries print.
    """
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))
        elif name != "stdin":
            stream.reconfigure(errors="backslashreplace")


def drop_stream(stream):
    """Let a standard stream lead nowhere: no later output fails, Python's own at exit included."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


def write_stream(stream, text):
    """Write text to a standard stream; return the OSError if nobody takes it, else None.

    From then on the stream leads nowhere.
    """
    try:
        print(text, end="", file=stream, flush=True)
    except OSError as error:
        drop_stream(stream)
        return error
    return None


# === end: streams ===


# === shared: device ===
def hidden_gpus():
    """Return whether nvidia-smi lists GPUs, for the case that PyTorch sees none of them."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    return subprocess.getoutput("nvidia-smi -L").startswith("GPU")


def choose_device(choice, local_rank=0):
    """Return the device of a process, with PyTorch set up for it. Raises UserError.

    choice: of the setting DEVICE. local_rank: number of the process on its machine.
    """
    if choice != "cpu" and torch.cuda.is_available():
        gpus = torch.cuda.device_count()
        if local_rank >= gpus:
            raise UserError(
                f"LOCAL_RANK={local_rank}: PyTorch sees {gpus} GPUs; must be below that (torchrun "
                "--nproc_per_node), or unset"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    elif choice == "cuda" or (choice == "auto" and hidden_gpus()):
        raise UserError(
            f"DEVICE={choice!r}: PyTorch sees no GPU of this machine; install its CUDA build or a "
            "newer driver, or set DEVICE=cpu"
        )
    else:
        device = torch.device("cpu")
    set_up_device(device)
    return device


def set_up_device(device):
    """Set PyTorch up for this device; in a program the trainer does it, too."""
    if device.type == "cuda":
        # cuDNN plans attention anew for every shape, up to a second each, and with some masks its
        # gradients are NaN (pytorch issue 196678).
        torch.backends.cuda.enable_cudnn_sdp(False)
    else:
        # GDN's decays reach denormal numbers, on which a CPU is 10 times slower. Threads take the
        # mode over when the first parallel operation starts them, so it should come before that.
        torch.set_flush_denormal(True)
        # A container may have the time of fewer CPUs (`docker run --cpus`) than there are cores, which
        # PyTorch counts. Threads wait for each other: more of them than CPUs are many times slower.
        if "OMP_NUM_THREADS" not in os.environ:
            with contextlib.suppress(OSError, ValueError):  # there is no limit
                quota, period = map(int, Path("/sys/fs/cgroup/cpu.max").read_text().split())
                torch.set_num_threads(min(quota // period or 1, torch.get_num_threads()))


# === end: device ===


# === shared: runtime ===
# The variables by which torchrun tells a process who it is.
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass
class Runtime:
    """Who this process is among the ranks, and the device of its tensors."""

    rank: int
    world_size: int
    device: torch.device
    distributed: bool

    def sum(self, tensor):
        """Sum a tensor over all ranks, in place, and return it."""
        if self.distributed:
            dist.all_reduce(tensor)
        return tensor

    def agree(self, value):
        """Return rank 0's value on every rank; it may be of any type that pickle takes.

        Every rank waits for rank 0: agree(None) lets none go on before rank 0 has come so far.
        """
        values = [value]
        if self.distributed:
            dist.broadcast_object_list(values, src=0, device=self.device)
        return values[0]

    def leave(self):
        """Leave the process group, all ranks together: a rank that left early aborted in gloo."""
        if self.distributed:
            dist.barrier()
            dist.destroy_process_group()


def join_group(device):
    """Join the process group that the environment describes, if it does, as torchrun (NCCL or gloo).

    Raises UserError for variables that describe none in full.
    """
    given = {name: os.environ[name] for name in RANK_VARIABLES if name in os.environ}
    if not {"RANK", "WORLD_SIZE"} & given.keys():
        return
    pairs = " ".join(f"{name}={value!r}" for name, value in given.items())
    hint = "torchrun sets all of them; unset RANK and WORLD_SIZE for a single process"
    try:
        world_size = int(given.get("WORLD_SIZE", 0))  # PyTorch names others that are missing
        has_rank = 0 <= int(given.get("RANK", -1)) < world_size < 1 << 31
        if not has_rank or given.get("MASTER_PORT") == "0":
            raise ValueError("must have a RANK below WORLD_SIZE, and a port")
        if world_size > 1 and "TORCHELASTIC_RUN_ID" not in os.environ:
            # Left over from another job, they name ranks that never come. The wait is half an hour.
            write_stream(sys.stderr, f"{pairs}: waiting for the other ranks; {hint}\n")
        if device.type == "cuda":
            dist.init_process_group("nccl", device_id=device)
        else:
            dist.init_process_group("gloo")
    except (ValueError, dist.DistError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{pairs}: the ranks do not meet: {reason:.500}; {hint}") from None


def present_runtime(device):
    """Return the Runtime of this process: of a rank, if it has joined a group, or of it alone."""
    if dist.is_initialized():
        return Runtime(dist.get_rank(), dist.get_world_size(), device, True)
    return Runtime(0, 1, device, False)


def check_compiler(choice, device):
    """Raise UserError if COMPILE is on, on a CPU, and a C++ compiler or Python's header is missing.

    choice: of the setting COMPILE.
    """
    if not choice or device.type != "cpu":
        return
    compiler = os.environ.get("CXX", "g++")  # as PyTorch chooses it
    if not shutil.which(compiler):
        missing = f"the C++ compiler {compiler}"
    elif not Path(sysconfig.get_path("include", "posix_prefix"), "Python.h").exists():
        missing = "Python.h (package python3-dev or python3-devel)"
    else:
        return
    raise UserError(
        f"COMPILE={setting_text(choice)}: must be 0, or install {missing}, which was not found"
    )


def start_runtime(choice, compiles=False):
    """Return the Runtime: of a rank of the group that torchrun describes, or of a single process.

    choice: of the setting DEVICE. compiles: of the setting COMPILE, see check_compiler.
    """
    local_rank = os.environ.get("LOCAL_RANK", "0")
    if not local_rank.isdecimal():
        raise UserError(f"LOCAL_RANK={local_rank!r}: must be a whole number from 0, or unset")
    device = choose_device(choice, int(local_rank))
    check_compiler(compiles, device)
    join_group(device)
    return present_runtime(device)


# === end: runtime ===


# === shared: errors ===
ERROR_LOGS = []  # log.txt of an open run, which gets an error that ends it, too


def report_error(text):
    """Write an error to ERROR_LOGS and to stderr."""
    for log in ERROR_LOGS:
        log.write(text)
    write_stream(sys.stdout, "")
    write_stream(sys.stderr, f"{text}\n")


def is_out_of_memory(error):
    """Return whether an error says that memory was short."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    # PyTorch on a CPU, cuBLAS and cuDNN have no class of their own for it.
    words = "out of memory|allocate memory|ALLOC_FAILED"
    return isinstance(error, RuntimeError) and bool(re.search(words, str(error)))


def report_in_a_line(error, rank):
    """Print the first line of an error. If rank 0 has the same one, then only rank 0 prints it."""
    if rank != "0":
        time.sleep(5)  # torchrun ends this rank meanwhile
    message, *_ = (str(error) or type(error).__name__).split("\n")
    if is_out_of_memory(error):
        message += (
            "; in training, a smaller MICRO_BATCH_TOKENS or ACTIVATION_CHECKPOINTING=1 takes "
            "less memory (docs/runs.md has more)"
        )
    report_error(f"error: {message}")


def exit_code(main):
    """Run `main` and return its exit code: 2 for a UserError, 1 for other faults.

    If the reader of the output is gone, as behind `| head`, it is 141, as of programs in C. After
    Ctrl-C it is 130; a training run handles the signal itself once it has a folder.
    """
    rank = os.environ.get("RANK", "0")
    open_streams()
    try:
        try:
            code = main()
        except SystemExit as end:  # of --help
            code = end.code
        if error := write_stream(sys.stdout, ""):
            raise type(error)(error.errno, error.strerror, "standard output")
        return code
    except BrokenPipeError:
        drop_stream(sys.stdout)
        return 141  # 128 and SIGPIPE
    except KeyboardInterrupt:
        report_error("stopped by SIGINT: nothing was saved")
        return 130  # 128 and SIGINT
    except UserError as error:
        report_in_a_line(error, rank)
        return 2
    except Exception as error:
        if isinstance(error, (FloatingPointError, OSError)) or is_out_of_memory(error):
            report_in_a_line(error, rank)
        elif isinstance(error, dist.DistError) or "gloo" in str(error):
            report_error(f"error: rank {rank} lost another rank; RESUME continues")
            os._exit(1)  # an ordinary exit would wait for the lost rank
        else:
            report_error(traceback.format_exc())
        return 1


# === end: errors ===


# === shared: folders ===
def replace_file(path, data):
    """Write a file beside `path` and rename it: `path` always holds the old or the new bytes."""
    part = f"{path}.part"
    with open(part, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def list_checkpoints(run):
    """Return the checkpoints in a run's folder, whole or not, the newest first."""
    folders = [path for path in run.glob("step_*") if re.fullmatch(r"step_\d+", path.name)]
    return sorted(folders, key=lambda path: int(path.name[5:]), reverse=True)


def checkpoint_fault(folder):
    """Return what is wrong with a checkpoint, or "" if it is whole.

    It is whole if SHA256SUMS is, to the byte, the sums of what must be there: meta.json, model.pt,
    in a run's folder step_<step> training.pt (not in the step 0 of an imported model), and every
    other .pt file that is there, except those that macOS adds in archives (._model.pt).
    """
    names = {"meta.json", "model.pt", *(path.name for path in folder.glob("[!.]*.pt"))}
    if folder.name.startswith("step_") and folder.name != "step_000000":
        names.add("training.pt")
    try:
        listed = (folder / "SHA256SUMS").read_bytes().decode().splitlines(keepends=True)
        for name in sorted(names):
            if f"{sha256_file(folder / name)}  {name}\n" not in listed:
                return f"{name} was changed, or SHA256SUMS does not name it"
    except (OSError, ValueError) as error:
        return str(error)
    return "SHA256SUMS has other or repeated lines" if len(listed) > len(names) else ""


def newest_checkpoint(folder):
    """Return the newest whole checkpoint of a run, or None, and a line on each damaged one.

    The folder of a checkpoint stands for itself.
    """
    candidates = list_checkpoints(folder)
    if not candidates and not (folder / "model.pt").exists():
        fault = "has no checkpoint and no model"
        if (folder / "log.txt").is_file():
            fault = "ended before its first checkpoint; it may be deleted and started anew"
        elif any(folder.glob("*config.json")):  # of transformers or PEFT
            fault = f"is no run: first python convert.py import {folder} runs/imported"
        return None, [f"{folder} {fault}"]
    faults = []
    for candidate in candidates or [folder]:
        fault = checkpoint_fault(candidate)
        if not fault:
            return candidate, faults
        faults.append(f"checkpoint {candidate} is damaged and skipped: {fault}")
    return None, faults


# === end: folders ===


# === shared: machine ===
def describe_machine(runtime):
    """Return commit (`+`: with changes), hardware, versions and peak memory, for the result."""
    folder = shlex.quote(str(Path(__file__).parent))
    # Run by a shell, so that a missing git is no error.
    status, commit = subprocess.getstatusoutput(
        f"git -C {folder} describe --always --abbrev=40 --exclude='*' --dirty=+"
    )
    if runtime.device.type == "cuda":
        hardware = torch.cuda.get_device_name()
        peak_bytes = torch.cuda.max_memory_allocated()
    else:
        hardware = f"{os.uname().machine} CPU, {torch.get_num_threads()} threads"
        unit = 1 if sys.platform == "darwin" else 1024
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {
        "commit": "unknown" if status else commit,
        "hardware": f"{runtime.world_size} x {hardware}",
        "versions": {
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            # Such as AVX2 or AVX512: in the same time a run of configs/cpu.env takes a fifth of the
            # steps with AVX2 (float32) that it takes with AVX512-BF16 (docs/lab/2026-11.md).
            "cpu": torch.backends.cpu.get_cpu_capability(),
        },
        "peak_memory_mib": peak_bytes / 2**20,
    }


# === end: machine ===


# === shared: stored ===
@dataclass
class Stored:
    """A network that a file has, and the tokenizer beside it. Its weights are yet to be read."""

    source: str  # the setting that named it and the file, for an error
    file: Path  # an artifact, or the folder of a checkpoint
    config: GPTConfig
    tokenizer: Path  # file of the tokenizer; "bytes" is built in
    sha256: str | None  # of the tokenizer; None: not known
    faults: list  # lines about newer checkpoints, which are damaged and skipped

    def read_tensors(self):
        """Return the weights by name. May raise any exception if they are damaged."""
        for fault in self.faults:
            print(fault, file=sys.stderr)
        if self.file.is_file():
            _, tensors, _ = read_artifact(self.file)
        else:
            # The file's own pages are the weights: they are read once, and copied where they change.
            path = self.file / "model.pt"
            tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        check_weights(tensors)
        return tensors


def read_stored(name, path):
    """Return the Stored of an artifact, a checkpoint or a run: its artifact, or else its newest
    whole checkpoint.

    name: the setting that a UserError blames.
    """
    source = f"{name}={path!r}"
    file = Path(path)
    if not path or not file.exists():
        raise UserError(f"{source}: no such file; must be a run, a checkpoint or an artifact")
    faults = []
    if (file / "model.upar").is_file():
        file = file / "model.upar"
    elif file.is_dir():
        file, faults = newest_checkpoint(file)
        if file is None:
            reasons = "; ".join(faults)
            raise UserError(f"{source}: neither model.upar nor a whole checkpoint; {reasons}")
    source = f"{source}: {file}"
    with one_line(source):
        if file.is_file():
            header, _ = read_artifact_header(file.read_bytes())
            shape = header["settings"]
            sha256 = header["tokenizer_sha256"]
            tokenizer = file.parent / header["meta"]["tokenizer"]
        else:
            meta = json.loads((file / "meta.json").read_bytes())
            shape = meta.get("shape")
            sha256 = meta.get("identity", {}).get("tokenizer_sha256")
            # The run's folder has the tokenizer's file under the name that the data have for it.
            run = file.parent
            tokenizer = [*run.glob("*.model"), *run.glob("*.tiktoken"), Path("bytes")][0]
        return Stored(source, file, checked_config(shape), tokenizer, sha256, faults)


# === end: stored ===


# === shared: weights ===
def load_model(name, path):
    """Return a network, on the CPU, its tokenizer and the file that they are from.

    path: an artifact, a checkpoint, or a run: its artifact, or the newest whole checkpoint while it
    has none. The tokenizer's file is beside it. name: the setting that a UserError blames.
    """
    return load_stored(read_stored(name, path))


def load_stored(stored):
    """Return what load_model does, of what read_stored has found. Raises UserError."""
    config = stored.config
    tokenizer = load_tokenizer(stored.tokenizer)
    if "template" in tokenizer.facts:
        compile_template(tokenizer.facts["template"])  # or a UserError, now and not in mid-run
    if config.vocab_size == tokenizer.vocab_size + len(ROLE_TOKENS):
        tokenizer = with_roles(tokenizer)  # post-training has added them
    if stored.sha256 not in (None, tokenizer.sha256) or tokenizer.vocab_size != config.vocab_size:
        raise UserError(
            f"{stored.source} has {config.vocab_size} tokens, and the tokenizer beside it, "
            f"{tokenizer.file} with {tokenizer.vocab_size}, is another one than it was trained with"
        )
    with one_line(stored.source):
        network = assemble(config, stored.read_tensors())
    return network, tokenizer, str(stored.file)


def assemble(config, tensors):
    """Return the network whose weights are these tensors, with adapters and value head if any.

    Any error if they are not the network's.
    """
    network = empty_network(config)
    ranks = [len(tensor) for name, tensor in tensors.items() if name.endswith(".lora_a")]
    with torch.device("meta"):  # takes no memory: the tensors become the weights
        if ranks:
            setup_lora_adapter(network, ranks[0])
        if "w_value" in tensors:
            add_value_head(network)
    return fill_network(network, tensors)


def add_value_head(network):
    """Give the network `w_value` (dim,), zeros. Times the features it is a reward or a value."""
    network.w_value = nn.Parameter(torch.zeros_like(widened(network.embed[0])))


# === end: weights ===


# === shared: starts ===
@functools.cache
def find_start(path, name="INIT_FROM"):
    """Return the Stored of a path; of a run that of its folder `final`, the unrounded weights.

    The network decides defaults of settings, long before its weights are read. name: the setting that
    a UserError blames.
    """
    final = Path(path) / "final"
    return read_stored(name, str(final) if path and final.is_dir() else path)


def imported_values(start, defaults):
    """Return the settings that a start has in place of the defaults if it was imported, otherwise {}.

    start: a Stored, also of a run that began with an imported model. defaults: those that are not
    by the size of the network.
    """
    # Imports before 2026-11-27 are known by their tokenizer alone.
    if not start.config.context and start.tokenizer.name != "imported.tiktoken":
        return {}
    with one_line(start.source):
        network = empty_network(start.config)
    weights = sum(param.numel() for param in network.parameters())
    # One core packs 8 million weights in a second: 16 s for the 135 million of SmolLM2 (docs/lab.md).
    # The clock is longer by as much, or nothing would be left of it to train a large model.
    packing = round(weights / 6e6)
    return {
        **defaults,
        "reserve_seconds": 5.0 + packing,
        "max_wallclock_seconds": Settings.max_wallclock_seconds + packing,
    }


def describe_start(settings, defaults):
    """Return the lines of the log that say from which file INIT_FROM took the weights.

    defaults: see imported_values.
    """
    start = find_start(settings.init_from)
    text = f"start: {start.file}"
    if Path(settings.init_from).is_dir() and start.file.name == "model.upar":
        text += ", rounded weights: the run is of an older version and has no folder `final`"
    values = imported_values(start, defaults)
    if values:
        text += f"\nstart: the model was imported; its defaults are {name_values(values)}"
    return text


# === end: starts ===


# === shared: checkpoint ===
KEEP_CHECKPOINTS = 2  # the newest, and one before it in case the newest is damaged


def write_summed(path, data):
    """Write a file of a checkpoint; return its line of SHA256SUMS. Raises OSError."""
    replace_file(path, data)
    return f"{hashlib.sha256(data).hexdigest()}  {path.name}\n"


def write_checkpoint(folder, states, meta):
    """Write a folder of meta.json, <name>.pt and SHA256SUMS under another name, and rename it.

    states: name -> what torch.save takes; meta: JSON. Raises OSError, leaving nothing behind.
    """
    unfinished = folder.parent / "unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed
    try:
        unfinished.mkdir()
        lines = [write_summed(unfinished / "meta.json", json.dumps(meta).encode())]
        for name, state in states.items():
            buffer = io.BytesIO()  # torch.save into a file raises no OSError on a full disk
            torch.save(state, buffer)
            lines.append(write_summed(unfinished / f"{name}.pt", buffer.getbuffer()))
        replace_file(unfinished / "SHA256SUMS", "".join(lines).encode())
        shutil.rmtree(folder, ignore_errors=True)  # a damaged one of the same step
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def save_checkpoint(folder, step, states, meta):
    """Write folder/step_<step>, see write_checkpoint, then delete all but the newest checkpoints."""
    final = folder / f"step_{step:06d}"
    write_checkpoint(final, states, meta)
    folders = list_checkpoints(folder)
    newest = folders.index(final)
    # The list begins with the newest. Any newer one must be damaged, or the run would have resumed
    # from it.
    for old in folders[:newest] + folders[newest + KEEP_CHECKPOINTS :]:
        shutil.rmtree(old, ignore_errors=True)


def saved_state(folder):
    """Return what the folder of a run that was stopped has, and what RESUME does with it."""
    if (folder / "result.json").exists():
        return "everything was saved"
    checkpoints = list_checkpoints(folder)
    if not checkpoints:
        return f"nothing was saved; {folder} may be deleted"
    return f"RESUME={folder} continues from {checkpoints[0].name}"


def find_run(setting, name, out_dir):
    """Return the folder of the run that RESUME or REPLAY names, by its path or its RUN_ID in out_dir.

    Raises UserError, with the names of some runs, if there is none.
    """
    folder = Path(name) if os.sep in name else Path(out_dir, name)
    if not folder.is_dir():
        names = sorted(path.parent.name for path in folder.parent.glob("*/log.txt"))
        runs = ", ".join(names[-10:]) or "none"
        raise UserError(f"{setting}={str(folder)!r}: no such run; {folder.parent} has {runs}")
    return folder


@functools.cache  # the settings and the log ask, and each would hash all files of a checkpoint
def checkpoint_to_resume(folder):
    """Return the newest whole checkpoint of an unfinished run, and a line on each damaged one.

    Raises UserError.
    """
    prefix = f"RESUME={str(folder)!r}:"
    if re.fullmatch(r"step_\d+", folder.name):
        raise UserError(
            f"{prefix} is a checkpoint; must be its run, RESUME={folder.parent}, which continues "
            "from the newest whole one"
        )
    if (folder / "result.json").exists():
        raise UserError(
            f"{prefix} the run has ended, for it has a result.json; REPLAY={folder} repeats it, and "
            f"INIT_FROM={folder} trains its weights further"
        )
    newest, damaged = newest_checkpoint(folder)
    if newest is None:
        raise UserError(f"{prefix} has no whole checkpoint step_<step>; {'; '.join(damaged)}")
    if not (newest / "training.pt").is_file():
        raise UserError(
            f"{prefix} is a model that quantize.py or convert.py wrote, not a run: {newest} has no training.pt; "
            "INIT_FROM starts from it"
        )
    return newest, damaged


def read_record(setting, path):
    """Return what a JSON file of a run holds, with exactly the settings of this script.

    setting: RESUME or REPLAY, which a UserError blames. Older versions had other settings.
    """
    try:
        record = json.loads(path.read_bytes())
        check_json(record, {"settings": {}, "events?": [{}]}, "it")
    except (OSError, ValueError, RecursionError, UserError) as error:
        raise UserError(f"{setting}: {path} cannot be read: {error}") from None
    different = record["settings"].keys() ^ Settings.__dataclass_fields__.keys()
    if different:
        names = ", ".join(sorted(different)).upper()
        raise UserError(
            f"{setting}: only one of {path} and this script has {names}; must be of a run of this "
            "script, in this version: the run's log.txt begins with the script that it needs"
        )
    return record


def read_progress(name, out_dir):
    """Return progress.json of the run that REPLAY names. Raises UserError if it cannot be repeated."""
    folder = find_run("REPLAY", name, out_dir)
    prefix = f"REPLAY={str(folder)!r}"
    path = folder / "progress.json"
    if not path.is_file():
        raise UserError(f"{prefix}: no {path}; must be a run that trained to its end")
    record = read_record(prefix, path)
    for event in record["events"]:
        if event.get("changed"):
            raise UserError(f"{prefix}: was resumed with changed {event['changed']}")
    return record


def replayed_progress(settings):
    """Return the progress that each step of the run that REPLAY names used; [] without one."""
    if not settings.replay:
        return []
    return read_progress(settings.replay, settings.out_dir)["progress"]


def stored_settings(given):
    """Return the settings of the run that RESUME or REPLAY names, or {} if neither is given.

    given: name of a setting -> value. Raises UserError if the run cannot be continued or repeated.
    """
    out_dir = given.get("OUT_DIR", Settings.out_dir)
    if given.get("RESUME"):
        folder = find_run("RESUME", given["RESUME"], out_dir)
        if given.get("RUN_ID", folder.name) != folder.name:
            raise UserError(f"RUN_ID={given['RUN_ID']!r}: must be that of RESUME, {folder.name!r}")
        checkpoint, _ = checkpoint_to_resume(folder)
        meta = read_record("RESUME", checkpoint / "meta.json")
        date = meta.get("identity", {}).get("date")  # no setting, see start_settings
        # out_dir: where it is now, if it was moved.
        return {**meta["settings"], "out_dir": str(folder.parent), "date": date}
    if given.get("REPLAY"):
        stored = read_progress(given["REPLAY"], out_dir)["settings"]
        for name in ("ITERATIONS", "MAX_WALLCLOCK_SECONDS", "RESERVE_SECONDS"):
            value = stored[name.lower()]
            if given.get(name, value) != value:
                raise UserError(
                    f"{name}={given[name]}: must be {value}, as in the run whose steps REPLAY repeats"
                )
        # A replay is a new run: where the other one was written says nothing about this one.
        return {**stored, "run_id": "", "resume": "", "out_dir": out_dir}
    return {}


# === end: checkpoint ===


# === shared: log ===
LOG_SECONDS = 10.0  # at least one line in this time says what the run is doing
METRIC_FORMATS = {"train_time": "{:.0f}ms", "step_avg": "{:.2f}ms", "tok_s": "{:.0f}"}
CLEAR_LINE = "\r\033[K"  # wipes the line on a terminal


def name_values(values):
    """Return a dict as `name:value` words of the log."""
    return " ".join(f"{name}:{value}" for name, value in values.items())


def make_tracker(settings, folder, checkpoint):
    """Return track(values, step), which feeds TensorBoard or W&B; None if TRACKER is none.

    values: numbers or texts by name, and what else W&B takes. checkpoint: to resume from, or None.
    Raises UserError if it cannot begin, as without its package or a login.
    """
    try:
        if settings.tracker == "wandb":
            import wandb

            # A resumed run goes on with its id. W&B keeps the first values of steps that it repeats.
            id_file = folder / "wandb_id.txt"
            run_id = id_file.read_text() if id_file.exists() else os.urandom(8).hex()
            wandb.init(
                project="underpar",
                name=folder.name,
                id=run_id,
                resume="allow",
                dir=str(folder),
                config=asdict(settings),
            )
            replace_file(id_file, run_id.encode())
            return wandb.log
        if settings.tracker == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter

            # It hides what it was given of steps after the checkpoint.
            first_step = int(checkpoint.name[5:]) + 1 if checkpoint else None
            writer = SummaryWriter(folder, purge_step=first_step)

            def track(metrics, step):
                for name, value in metrics.items():
                    add = writer.add_text if isinstance(value, str) else writer.add_scalar
                    add(name, value, step)
                writer.flush()  # the values stay, however the run ends

            return track
    except Exception as error:  # each package has errors of its own
        name = settings.tracker
        reason = " ".join(str(error).split())
        hint = "wandb needs a login or WANDB_MODE=offline"
        if isinstance(error, ImportError):
            hint = f"must be installed (pip install {name})"
        raise UserError(f"TRACKER={name!r}: cannot begin: {reason:.300}; {hint}") from None
    return None


class LineFile:
    """A file to which whole lines are appended, each of which stays if the process is killed.

    It stays open: on a network's file system each opening and closing would take a round trip.
    """

    def __init__(self, path):
        self.path = path
        self.file = None  # until the first line

    def write(self, text):
        """Append text and a newline; an OSError is a warning: a full disk may have room again."""
        data = text.encode(errors="backslashreplace") + b"\n"
        try:
            if self.file is None:
                self.file = open(self.path, "ab", buffering=0)
            end = self.file.seek(0, os.SEEK_END)
            try:
                while data:
                    data = data[self.file.write(data) :]
            except OSError:
                self.file.truncate(end)  # a full disk has taken a part of the line
                raise
        except OSError as error:
            self.file = None  # it may be stale on a network: the next line opens it anew
            write_stream(sys.stderr, f"{self.path.name}: {error}\n")


def remove_repeated(folder, step):
    """Remove from the .jsonl files of a run the rows that it writes again when resumed after `step`.

    Scores of `step` are made again, but not those of the start.
    """
    for path in filter(Path.exists, (folder / "metrics.jsonl", folder / "samples.jsonl")):
        kept = []
        for line in path.read_bytes().splitlines(keepends=True):
            with contextlib.suppress(ValueError):  # a line that was cut when the process was killed
                row = json.loads(line)
                # Rows of trained steps have a train_time, samples of training the phase "train".
                is_score = "train_time" not in row and row.get("phase") != "train"
                is_made_again = is_score and row["step"] == step > 0
                if row["step"] <= step and not is_made_again:
                    kept.append(line)
        replace_file(path, b"".join(kept))


class Log:
    """log.txt, metrics.jsonl, the terminal and the tracker.

    Only rank 0 opens it; on other ranks it is mute. What happens to the terminal does not reach the
    files.
    """

    def __init__(self, iterations):
        self.iterations = iterations
        self.file = None  # log.txt
        self.metrics_file = None
        self.tracker = None
        self.last_line = time.monotonic()
        self.last_step_line = self.last_line

    def open(self, folder, source, tracker):
        """Begin to write in a run's folder. log.txt has the script first. Raises OSError.

        source: bytes of the script; they may be there from before RESUME. tracker: see make_tracker.
        """
        self.file = LineFile(folder / "log.txt")
        self.metrics_file = LineFile(folder / "metrics.jsonl")
        self.tracker = tracker
        text = source + b"\n" + b"=" * 120 + b"\n"
        with open(folder / "log.txt", "ab+") as file:
            file.seek(0)
            if text not in file.read():
                file.write(text)
        ERROR_LOGS[:] = [self.file]

    def __call__(self, text, stream=None):
        """Write text to log.txt and to a stream, sys.stdout if it is None."""
        if self.file is None:
            return
        self.last_line = time.monotonic()
        self.file.write(text)
        self.show(f"{text}\n", stream)

    def show(self, text, stream=None):
        """Write text to a stream alone. On a terminal it replaces the line of progress."""
        clear = CLEAR_LINE * sys.stdout.isatty()
        error = write_stream(stream or sys.stdout, clear + text)
        if error:
            self.file.write(f"note: the output has ended ({error}); the run and this log go on")

    def track(self, values, step):
        """Give values to the tracker, if there is one; a fault of it, as of a full disk, is its end."""
        try:
            if self.tracker:
                self.tracker(values, step)
        except Exception as error:
            self.tracker = None
            self(f"warning: TRACKER gets nothing from step {step} on: {error!r:.300}", sys.stderr)

    def metrics(self, step, metrics, seconds_left=None):
        """Write the metrics (name -> number) of a step to metrics.jsonl, tracker and log.

        seconds_left: of the run, if the step was trained. Then log.txt has it if it is one of the
        first five or the last, or log.txt got no step for LOG_SECONDS; on a terminal the others
        overwrite one line. A number that is not finite is null in metrics.jsonl: JSON has none.
        """
        if self.file is None:
            return
        metrics = {name: float(value) for name, value in metrics.items()}
        row = {"step": step}
        line = f"step:{step}/{self.iterations or '?'}"
        for name, value in metrics.items():
            row[name] = value if math.isfinite(value) else None
            line += f" {name}:{METRIC_FORMATS.get(name, '{:.6g}').format(value)}"
        self.metrics_file.write(json.dumps(row))
        self.track(metrics, step)
        # Other lines do not count: those of samples would keep all steps out of the log of a slow run.
        now = time.monotonic()
        is_due = now - self.last_step_line >= LOG_SECONDS
        if seconds_left is None or step <= 5 or step == self.iterations or is_due:
            self(line)
            self.last_step_line = now
        elif sys.stdout.isatty():
            self.show(f"{seconds_left:.0f} s left {line}")


# === end: log ===


# === shared: run ===
PACKING_NATS = 0.05  # more nats per token lost by packing than this are reported loudly
FOLDER_SECONDS = 60  # after which each node must see the run's folder
MAX_SKIPPED_STEPS = 10  # in a row; one bad batch passes, a diverged run never recovers


def handle_stop_signals(handler):
    """Let SIGTERM, SIGINT and SIGHUP call `handler` from here on.

    A SIGHUP that is ignored stays so: nohup has done it.
    """
    signal.signal(signal.SIGTERM, handler)
    signal.signal(signal.SIGINT, handler)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, handler)


class StopSignal:
    """Remembers SIGTERM, SIGINT or SIGHUP, so that the loop saves and stops.

    A second Ctrl-C ends the process at once. A second SIGTERM does not: Slurm sends one at its time
    limit, and there may still be time to save.
    """

    def __init__(self, run):
        self.run = run
        self.number = 0  # of the signal; 0: there was none
        self.received = 0.0
        handle_stop_signals(self.receive)

    def receive(self, number, frame):
        """Handle a signal."""
        if self.number:
            # torchrun repeats the Ctrl-C of a terminal, so a signal within a second is the same one.
            if number == signal.SIGINT and time.monotonic() - self.received > 1:
                self.run.end_at_once(number, frame)
            return
        self.received = time.monotonic()
        self.number = number
        if self.run.runtime.rank == 0:
            name = signal.Signals(number).name
            text = f"{name}: the run stops after this step; a second Ctrl-C ends it at once\n"
            with contextlib.suppress(OSError):  # nobody reads it
                # Not by print, which this signal may have interrupted.
                os.write(sys.stderr.fileno(), text.encode())

    def on_any_rank(self, runtime):
        """Return whether any rank has got a signal; every rank must call it."""
        return runtime.sum(torch.tensor(self.number, device=runtime.device)).item() > 0


@dataclass
class Run(Stateful):
    """A run: its folder, log, events and checkpoints, and how far it is.

    parts: name -> object with state_dict and load_state_dict, which checkpoints store. The script
    adds the "network" and all else that steps change.
    """

    STATE = ("step", "loss", "skipped_steps", "skipped_in_a_row", "events")

    settings: Settings
    runtime: Runtime
    plan: Plan
    clock: Clock
    identity: dict  # values that must not change when a run is resumed
    shape: dict  # of the network, see GPTConfig

    def __post_init__(self):
        settings = self.settings
        # Microseconds: two runs may start in the same second.
        run_id = settings.run_id or f"run_{datetime.now():%Y%m%d_%H%M%S_%f}"
        self.folder = Path(settings.out_dir, self.runtime.agree(run_id))
        if settings.resume:
            self.folder = find_run("RESUME", settings.resume, settings.out_dir)
        self.log = Log(settings.iterations)
        self.parts = {"run": self, "plan": self.plan, "clock": self.clock}
        self.events = []
        self.changed = {}  # settings that are others than before RESUME, and the script if it is
        self.step = 0
        self.loss = math.nan  # of the last step that was logged
        self.skipped_steps = 0
        self.skipped_in_a_row = 0
        self.saved_step = -1  # the last one at which `save` was called
        # Why training has ended: "iterations", "clock", "replay", "signal" or a word of the script.
        self.ended = ""
        # Read now, because the script and the commit may change while the run trains.
        self.source = Path(__file__).read_bytes()
        self.code_sha256 = hashlib.sha256(self.source).hexdigest()
        self.machine = describe_machine(self.runtime)
        self.code_bytes = count_code(settings, self.source)

    def open(self):
        """Make or find the folder and begin the log; return the checkpoint to load, or None.

        Raises UserError, with nothing made but perhaps an empty folder, also if a resumed run would
        become another one.
        """
        checkpoint = None
        damaged = []
        hashes = {name: value for name, value in self.identity.items() if name.endswith("sha256")}
        compare_ranks(self.runtime, hashes)  # of data and tokenizer
        if self.settings.resume:
            checkpoint, damaged = checkpoint_to_resume(self.folder)
            meta = json.loads((checkpoint / "meta.json").read_bytes())
            check_identity(self.identity, meta["identity"])  # on all ranks
            self.changed = changed_settings(self.settings, meta["settings"])
            if meta.get("code_sha256", self.code_sha256) != self.code_sha256:
                self.changed["code_sha256"] = self.code_sha256  # the script is another one
        if self.runtime.rank == 0:
            # A new run wants an empty folder right in OUT_DIR; an empty RUN_ID stands for the date.
            run_id = self.settings.run_id
            if checkpoint is None and (any(self.folder.glob("*")) or Path(run_id).name != run_id):
                raise UserError(
                    f"RUN_ID={run_id!r}: must be a plain name that no run in OUT_DIR has; RESUME "
                    "continues a run, and one that has saved nothing may be deleted"
                )
            self.folder.mkdir(parents=True, exist_ok=True)
            tracker = make_tracker(self.settings, self.folder, checkpoint)
            if checkpoint is None:  # of two jobs that begin one RUN_ID at once, one fails here
                (self.folder / "log.txt").touch(exist_ok=False)
            self.log.open(self.folder, self.source, tracker)
            write_header(self)
            for line in damaged:
                self.log(line)
        checkpoint = self.runtime.agree(checkpoint)
        if self.runtime.distributed:
            await_folder(self)
        return checkpoint

    def end_at_once(self, number, frame):
        """Handle a signal before the first step or after the last one: end the process."""
        try:
            if self.runtime.rank == 0:
                report_error(
                    f"stopped by {signal.Signals(number).name}: {saved_state(self.folder)}"
                )
        finally:  # whatever becomes of the text
            os._exit(128 + number)

    def event(self, name, **values):
        """Log an event that result.json reports too."""
        self.events.append({"event": name, **values})
        self.log(f"event: {name} {name_values(values)}")

    def write_file(self, name, data):
        """Write a file of the folder, on rank 0 while the others wait; return its path."""
        path = self.folder / name
        if self.runtime.rank == 0:
            replace_file(path, data)
        self.runtime.agree(None)  # a barrier
        return path

    def meta(self):
        """Return what a checkpoint says about itself."""
        return {
            "step": self.step,
            "code_sha256": self.code_sha256,
            "settings": asdict(self.settings),
            "identity": self.identity,
            "shape": self.shape,
        }

    def save(self):
        """Write a checkpoint, on rank 0 while the others wait, when the last step was logged.

        A failure is an event if there is an older checkpoint, else an OSError.
        """
        assert self.clock.packet is None, (
            "call log_step first: a checkpoint has no report on its way"
        )
        if self.saved_step == self.step:
            return
        # On all ranks, because those of a sharded run have to join their tensors.
        training = {name: part.state_dict() for name, part in self.parts.items()}
        if self.runtime.rank == 0:
            states = {"model": training.pop("network"), "training": training}
            try:
                save_checkpoint(self.folder, self.step, states, self.meta())
                self.saved_step = self.step
                self.log(f"step:{self.step} saved")
            except OSError as error:
                if not list_checkpoints(self.folder):
                    raise
                self.event("save_failed", step=self.step, error=str(error))
        self.saved_step = self.runtime.agree(self.saved_step)

    def load(self, folder, optional=(), device=None):
        """Restore a checkpoint. Raises UserError if it is damaged.

        optional: names of parts that it may lack. device: where its tensors are read, that of the
        run if it is None.
        """
        load_parts(self.parts, folder, optional, device or self.runtime.device)
        self.saved_step = self.step
        if self.runtime.rank == 0:
            remove_repeated(self.folder, self.step)
        self.event("resume", step=self.step, ranks=self.runtime.world_size, changed=self.changed)
        note_longer_plan(self)


def count_code(settings, source):
    """Return the bytes of the script and of CONFIG, which count like the artifact's. UserError."""
    count = len(source)
    if settings.config:
        if not os.path.isfile(settings.config):
            raise UserError(
                f"CONFIG={settings.config!r}: no such file; must be where it is now, because its bytes "
                "count"
            )
        count += os.path.getsize(settings.config)
    if 0 < settings.artifact_bytes_max <= count:
        raise UserError(
            f"ARTIFACT_BYTES_MAX={settings.artifact_bytes_max}: must be above {count}, the bytes of the "
            "script and of CONFIG, which count"
        )
    return count


def compare_ranks(runtime, facts):
    """Raise UserError, on all ranks, if one has another value than rank 0 in a dict of facts."""
    if not runtime.distributed:
        return
    of_ranks = [None] * runtime.world_size
    dist.all_gather_object(of_ranks, facts)
    for rank, others in enumerate(of_ranks):
        for name, value in others.items():
            first = of_ranks[0].get(name)
            if value != first:
                setting = SETTING_NAMES.get(name, name.upper())
                raise UserError(
                    f"{setting}: rank {rank} has {value!r}, rank 0 has {first!r}; must be the same"
                )


def check_ranks(settings, runtime):
    """Raise UserError, on all ranks, if one has another script or other settings than rank 0.

    On several nodes each has its own copy of the files and its own environment.
    """
    facts = {"code_sha256": hashlib.sha256(Path(__file__).read_bytes()).hexdigest()}
    for setting in fields(settings):
        value = getattr(settings, setting.name)
        if setting.type is Paths:
            value = "a path" if value else ""  # it may differ from node to node
        if setting.name not in ("run_id", "tracker"):  # which rank 0 alone uses
            facts[setting.name] = value
    compare_ranks(runtime, facts)


def await_folder(run):
    """Raise UserError if this rank's node does not see the folder; NFS shows it after a while."""
    for _ in range(FOLDER_SECONDS):
        if (run.folder / "log.txt").exists():
            return
        time.sleep(1)
    raise UserError(
        f"OUT_DIR={run.settings.out_dir!r}: rank {run.runtime.rank} does not see the run's folder "
        f"{run.folder}; must be on a file system that all nodes share"
    )


def note_longer_plan(run):
    """Log that a resumed run is less far in the plan that is given now than it was in its own."""
    progress = run.plan.progress
    share = run.clock.planned_share(run.step)
    if share < 0.9 * progress and not run.settings.replay:
        run.log(
            f"note: the run was at {progress:.0%} of its plan, and is at {share:.0%} of the one that "
            f"is given now; rates, phases and averages stand still until it is at {progress:.0%} "
            "again. INIT_FROM begins a plan anew"
        )


# The settings behind those values of a run's identity and of GPTConfig that have another name.
SETTING_NAMES = {
    "code_sha256": "SHA-256 of the script",
    "layers": "LAYER_PATTERN (NUM_LAYERS words)",
    "norms": "NORM (a word for each layer)",
    "manifest_sha256": "DATA_PATH (SHA-256 of manifest.json)",
    "data_shares": "DATA_PATH (shares of the folders)",
    "data_sha256": "TRAIN_FILES or VAL_FILES, or EMA and SWA (SHA-256 of the rows)",
    "problems_sha256": "TRAIN_FILES, or EMA and SWA (SHA-256 of the prompts)",
    "date": "SOURCE_DATE_EPOCH",
    "held_out_sha256": "TRAIN_FILES, VAL_FILES or ENVIRONMENT (SHA-256 of held-out prompts or seeds)",
    "tokenizer_sha256": "TOKENIZER_PATH (SHA-256 of the file)",
}


def check_identity(identity, before):
    """Raise UserError if a value that must not change is another one than in the checkpoint."""
    for name, value in before.items():
        given = identity.get(name)
        if given != value:
            setting = SETTING_NAMES.get(name, name.upper())
            raise UserError(f"{setting}={given!r}: must stay {value!r} under RESUME")


def changed_settings(settings, before):
    """Return the settings of a resumed run that differ from those before, but for its name."""
    return {
        name: value
        for name, value in asdict(settings).items()
        if value != before[name] and name not in ("resume", "run_id", "out_dir")
    }


def load_parts(parts, folder, optional, device):
    """Give the parts of a run their states in a checkpoint; see Run.load. Raises UserError."""
    read = functools.partial(torch.load, map_location=device, weights_only=True, mmap=True)
    try:
        states = {**read(folder / "training.pt"), "network": read(folder / "model.pt")}
        for name, part in parts.items():
            if name in states or name not in optional:
                part.load_state_dict(states[name])
    except Exception as error:  # each part has errors of its own for a state that does not fit
        if is_out_of_memory(error):
            raise
        raise UserError(
            f"RESUME: {folder} is no checkpoint of this run: {error!r:.300}; must be of this version of "
            "the script, and log.txt begins with the one that it needs"
        ) from None


def write_header(run):
    """Log the command, the machine and all settings; * marks those that are not the default."""
    run.log(f"command: {' '.join(sys.argv)}")
    run.log(name_values(run.machine))
    for name, value in asdict(run.settings).items():
        mark = " " if value == getattr(Settings, name) else "*"
        run.log(f"{mark} {name.upper()}={setting_text(value)}")


def count_skipped(run, report):
    """Count a step whose loss or gradient was not finite: its update was masked.

    Raises FloatingPointError for MAX_SKIPPED_STEPS of them in a row, and for a weight that is not
    finite, which no later step can mend.
    """
    if math.isfinite(report.loss + report.grad_norm):
        run.skipped_in_a_row = 0
        return
    run.skipped_steps += 1
    run.skipped_in_a_row += 1
    run.event("skipped_step", step=run.step, loss=str(report.loss))
    state = run.parts["network"].state_dict()
    bad = run.runtime.agree([name for name in state if not state[name].isfinite().all()])
    if bad:
        error = f"the weights {bad[0]} are not finite"
    elif run.skipped_in_a_row >= MAX_SKIPPED_STEPS:
        error = f"{run.skipped_in_a_row} steps in a row had a loss or gradient that is not finite"
    else:
        return
    if run.skipped_steps == run.step:  # every step so far
        error += (
            f", from the first step on: INIT_FROM={run.settings.init_from!r} or the data are bad"
        )
    elif not bad:
        error += f"; the last checkpoint of {run.folder} is good"
    raise FloatingPointError(error)


def log_step(run, metrics, loss_name="loss"):
    """Log the last finished step, unless that was done. A signal on any rank sets run.ended.

    metrics: name -> number or 0-d tensor, of that step.
    """
    report = run.clock.previous_report()
    if report is None:
        return
    run.loss = report.loss
    count_skipped(run, report)
    if report.stop_requested:
        run.ended = "signal"
    step_seconds = report.seconds / run.step  # the number of the reported step
    steps_left = run.clock.iterations - run.step
    seconds_left = min(run.clock.budget - report.seconds, steps_left * step_seconds)
    values = {
        loss_name: report.loss,
        "grad_norm": report.grad_norm,
        **metrics,
        "train_time": 1000 * report.seconds,
        "step_avg": 1000 * step_seconds,
    }
    run.log.metrics(run.step, values, seconds_left)


def leave_stopped(run, stop_signal):
    """Log that a signal stopped the run, and where RESUME continues it; return the exit code."""
    number = signal.Signals(stop_signal.number or signal.SIGTERM)  # 0: another rank got it
    run.log(f"stopped by {number.name} after step {run.step}: {saved_state(run.folder)}")
    run.runtime.leave()
    return 128 + number


def write_record(run, name, values):
    """Write values, events and settings into a JSON file of a run's folder; return them all.

    A number that is not finite is null in the file: JSON has none.
    """
    record = {**values, "events": run.events, "settings": asdict(run.settings)}
    finite = json.loads(json.dumps(record), parse_constant=lambda name: None)
    run.write_file(name, (json.dumps(finite, indent=1) + "\n").encode())
    return record


def end_training(run):
    """Log why training has ended, and write progress.json, which a replay needs."""
    settings = run.settings
    run.ended = run.ended or run.clock.end_reason(run.step)
    reasons = {
        "iterations": "all steps are done",
        "replay": f"the run that REPLAY={settings.replay} repeats ended here",
        "clock": f"MAX_WALLCLOCK_SECONDS={settings.max_wallclock_seconds:g} less "
        f"RESERVE_SECONDS={settings.reserve_seconds:g} leave no time for another one",
    }
    iterations = run.log.iterations
    steps = f"step {run.step} of {iterations}" if iterations else f"step {run.step}"
    text = f"training has ended after {steps}: {reasons.get(run.ended, run.ended)}"
    is_early = run.ended == "clock" and iterations
    run.log(text, sys.stderr if is_early else None)
    if is_early:
        run.event("ended_by_clock", step=run.step, iterations=iterations)
    run.log(run.plan.describe())
    write_record(run, "progress.json", {"progress": run.clock.used})


def write_final(run, tensors):
    """Write the folder `final`, in the form of a checkpoint: the weights that were packed, before
    they were rounded.

    INIT_FROM takes them from there: the artifact does not have a change of a weight that is
    smaller than its step.
    """
    if run.runtime.rank == 0:
        write_checkpoint(run.folder / "final", {"model": tensors}, run.meta())
    run.runtime.agree(None)  # a barrier


def report_packing(run, nats):
    """Log the nats per token that packing has cost; many of them are an event and a warning."""
    run.log(f"packing: {nats:+.4f} nats per token against the trained weights")
    if not nats <= PACKING_NATS:
        run.event("packing_lost", nats=nats)
        # 8 bits are the most, and the default of imported models, whose runs are too short for QAT.
        can_lose_less = run.settings.matrix_bits < 8
        hint = ". QAT=1 or a higher MATRIX_BITS loses less" if can_lose_less else ""
        run.log(
            f"warning: PACKING HAS COST {nats:.3f} NATS PER TOKEN: the artifact is a worse model "
            f"than the one that was trained, which is in {run.folder / 'final'}; INIT_FROM "
            f"takes that one{hint}",
            sys.stderr,
        )


def result_errors(run, result):
    """Return the errors of a finished run: what it has done otherwise than its settings ask for."""
    missed = run.plan.planned.keys() - run.plan.phases
    errors = [f"phase {name} was enabled and never fired" for name in missed]
    if missed and run.ended == "clock":
        errors[-1] += (
            f": the clock ended the run after {run.step} long steps; a longer MAX_WALLCLOCK_SECONDS, or "
            "ITERATIONS that fit into it, let it begin"
        )
    if 0 < run.settings.artifact_bytes_max < result["total_bytes"]:
        errors.append("code and artifact exceed ARTIFACT_BYTES_MAX")
    scores = {name: result[name] for name in result if name.startswith(("val_loss", "val_bpb"))}
    for group in ("before", "after", "packed"):
        for name, value in result.get(group, {}).items():
            # Of scripts that fine-tune: a mean, or a list of a mean and its interval.
            scores[f"{group} {name}"] = np.ravel(value)[0]
    bad = [name for name, score in scores.items() if not math.isfinite(score)]
    return errors + [f"the score {name} is not finite" for name in bad]


def write_result(run, values, content):
    """Write result.json, and log it; return the exit code of the run: 1 if it has errors.

    values: what the script reports beside that of every run. content: of the artifact.
    """
    seconds = run.clock.elapsed()
    if run.clock.limit < seconds:
        run.event("over_clock", seconds=seconds)
    result = {
        "script": Path(__file__).name,
        "run_id": run.folder.name,
        "seed": run.settings.seed,
        "code_sha256": run.code_sha256,
        **describe_machine(run.runtime),
        "commit": run.machine["commit"],
        "world_size": run.runtime.world_size,
        "steps": run.step,
        "ended": run.ended,
        "skipped_steps": run.skipped_steps,
        "train_seconds": seconds,
        **values,
        "artifact": str(run.folder / "model.upar"),
        "artifact_sha256": hashlib.sha256(content).hexdigest(),
        "artifact_bytes": len(content),
        "code_bytes": run.code_bytes,
        "total_bytes": run.code_bytes + len(content),
        "phases": run.plan.phases,
    }
    result = write_record(run, "result.json", result)
    run.log("---")
    for key, value in result.items():
        if not isinstance(value, dict):
            run.log(f"{key}: {value}")
    errors = result_errors(run, result)
    for error in errors:
        run.log(f"error: {error}; everything was saved", sys.stderr)
    return 1 if errors else 0


# === end: run ===


# === shared: lora ===
class Lora(nn.Module):
    """W + alpha / rank B A in place of a matrix W (out, in): LoRA, arXiv 2106.09685.

    It is a parametrization, which keeps W as `original`. A (rank, in) is normal with the standard
    deviation in**-0.5, and B (out, rank) is 0: a new adapter changes nothing, bit for bit.
    """

    def __init__(self, weight, rank, alpha):
        super().__init__()
        rows, columns = weight.shape
        self.lora_a = nn.Parameter((torch.randn(rank, columns) * columns**-0.5).to(weight))
        self.lora_b = nn.Parameter(weight.new_zeros(rows, rank))
        self.register_buffer("scale", weight.new_tensor(alpha / rank))

    def forward(self, weight):
        """Return the sum, made in the adapter's dtype, in that of the weight, which may be frozen."""
        total = torch.addmm(weight.to(self.lora_a), self.scale * self.lora_b, self.lora_a)
        return total.to(weight)


def setup_lora_adapter(model, rank=8, alpha=16.0):
    """Put an adapter on every matrix of mixers and MLPs, and return the model.

    Mixers or MLPs that layers share have one adapter. Every forward computes the sums again:
    generate under torch.no_grad() and parametrize.cached(). Raises UserError if the model has
    adapters already.
    """
    matrices = [
        name
        for name, _ in model.named_parameters()
        if re.fullmatch(r"(mixers|blocks)\.[\w.]*\bw_\w+", name)
    ]
    if not matrices:
        raise UserError("setup_lora_adapter: the model has adapters; merge_lora(model) first")
    for name in matrices:
        path, _, last = name.rpartition(".")
        module = model.get_submodule(path)
        adapter = Lora(getattr(module, last), rank, alpha)
        parametrize.register_parametrization(module, last, adapter)
    return model


@torch.no_grad()
def merge_lora(model):
    """Add the adapters to the weights, as QAT and export need it, and return the plain model.

    All weights are float32 afterwards, those that were frozen in bfloat16 too, and so are the sums.
    """
    for param in model.parameters():
        param.data = widened(param.data)
    for module in list(model.modules()):
        if parametrize.is_parametrized(module):
            adapted = module.parametrizations
            # torch's own removal changes the class, which copies of the module share.
            module.__class__ = type(module).__base__
            del module.parametrizations
            for name, part in adapted.items():
                setattr(module, name, part.original.copy_(part()))
    return model


# === end: lora ===


# === shared: encoding ===
ROLE_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
# Published encodings: the hash of their rank file and what that file does not contain. Every
# document begins with <|endoftext|>. The regular expressions are copied from
# tiktoken_ext/openai_public.py. They split a text into the parts within which bytes are merged.
ENCODINGS = {
    "gpt2": dict(
        sha256="306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930",
        bos_id=50256,
        vocab_size=50257,  # with all special tokens and unused ids
        split=r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s",
    ),
    "cl100k_base": dict(
        sha256="223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
        bos_id=100257,
        vocab_size=100277,  # with all special tokens and unused ids
        split=(
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+"
            r"| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
        ),
    ),
    "o200k_base": dict(
        sha256="446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
        bos_id=199999,
        vocab_size=200019,  # with all special tokens and unused ids
        split=(
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
            r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
            r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
    ),
}


# From a run of 999,940 spaces on, the stack of tiktoken's regular expressions overflows.
LONG_SPACE = re.compile(r"(?<!\s)\s{500000}")


class BytePairEncoder:
    """Byte-level BPE of a rank file, with the ids that the package tokenizers has."""

    def __init__(self, tokenizer, facts):
        """facts: those of ENCODINGS, or of an imported model (see convert.py)."""
        ranks = {piece: rank for rank, piece in enumerate(tokenizer.pieces) if piece}
        # Added tokens, of which some are shown as text: no merge makes them.
        for text in facts.get("added", []):
            ranks.pop(text.encode(), None)
        # Bytes that the vocabulary lacks: tokenizers drops them, tiktoken panics. They get ids
        # beyond the vocabulary, by which they are found.
        self.lacking = bytes([byte for byte in range(256) if bytes([byte]) not in ranks])
        self.vocab_size = tokenizer.vocab_size
        for byte in self.lacking:
            ranks[bytes([byte])] = self.vocab_size + byte
        self.bpe = tiktoken.Encoding(
            tokenizer.file, pat_str=facts["split"], mergeable_ranks=ranks, special_tokens={}
        )
        self.split = regex.compile(facts["split"])

    def encode(self, text):
        """Return the ids of a text without added tokens."""
        if len(text) < 500_000 or not LONG_SPACE.search(text):
            ids = self.bpe.encode_ordinary(text)
            if not self.lacking or max(ids, default=0) < self.vocab_size:
                return ids
        ids = []
        for match in self.split.finditer(text):
            # What is on both sides of a dropped byte may merge.
            piece = match[0].encode().translate(None, self.lacking)
            if piece:
                ids += self.bpe._encode_single_piece(piece)
        return ids


SPACES = re.compile(r"\s*")
WORD_CHARACTER = r"[\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\p{Join_Control}]"


class AddedTokens:
    """Added tokens of an imported model, which are found in a text as tokenizers finds them."""

    def __init__(self, ids, facts):
        """ids: the text of a token -> its id. facts: maybe `flags`, text of a token -> what it is:
        single_word, no part of a word; lstrip, rstrip: it takes the spaces before it, behind it.
        """
        self.ids = ids
        self.flags = facts.get("flags", {})
        longest_first = sorted(ids, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def encode(self, text, encode_part):
        """Return the ids of a text; encode_part: text without added tokens -> ids."""
        ids = []
        end = 0  # of the token before
        for match in self.pattern.finditer(text):
            flags = self.flags.get(match[0], [])
            start, stop = match.span()
            neighbours = text[start - 1 : start] + text[stop : stop + 1]
            if "single_word" in flags and regex.search(WORD_CHARACTER, neighbours):
                continue
            before = text[end:start]
            if "lstrip" in flags:
                before = before.rstrip()
            ids += encode_part(before)
            ids.append(self.ids[match[0]])
            end = stop
            if "rstrip" in flags:
                end = SPACES.match(text, stop).end()
        return ids + encode_part(text[end:])


def check_unicode(text):
    """Return a text that has no half of a surrogate pair. Raises UserError."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"text {text[error.start :]!r:.20} at character {error.start}: half a surrogate pair, "
            "which is no Unicode"
        ) from None
    return text


def load_tokenizer(path):
    """Return the Tokenizer of a file, see read_tokenizer, with its encoder. Raises UserError."""
    return add_encoder(read_tokenizer(path, ENCODINGS.get(Path(path).stem, {})))


def add_encoder(tokenizer):
    """Give a Tokenizer its attributes from `encode` on, and return it.

    roles: the ids of ROLE_TOKENS, {} if it has none. For the others see set_encoders. Raises
    UserError.
    """
    facts = tokenizer.facts
    if facts.get("sha256", tokenizer.sha256) != tokenizer.sha256:
        raise UserError(f"tokenizer {tokenizer.file}: is not the published rank file")
    tokenizer.roles = {}
    if tokenizer.file == "bytes":
        set_encoders(tokenizer, lambda text: [4 + byte for byte in text.encode()])
        tokenizer.roles = {role: 260 + i for i, role in enumerate(ROLE_TOKENS)}
    elif "split" in facts:
        set_encoders(tokenizer, BytePairEncoder(tokenizer, facts).encode)
    else:
        model = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.proto)
        tokenizer.facts = {"stop": [model.bos_id(), model.eos_id()]} | facts
        set_encoders(tokenizer, model.encode)
        for role in ROLE_TOKENS:
            i = model.piece_to_id(role)
            # Only control tokens cannot be written in a text, so that no user can forge a role.
            if model.is_control(i):
                tokenizer.roles[role] = i
    return tokenizer


def set_encoders(tokenizer, encode_part):
    """Give a Tokenizer `encode` and `encode_marked`, from a text to ids without BOS.

    Special tokens in a text are plain text for `encode`. For `encode_marked` the added tokens of an
    imported model are what they stand for. Both raise UserError for half a surrogate pair.
    encode_part: a text in normal form and without added tokens -> ids.
    """
    facts = tokenizer.facts

    def normalize(text):
        """Return a text in the form in which accents are part of their letters, if it is asked for."""
        return unicodedata.normalize("NFC", text) if facts.get("nfc") else text

    # tokenizers looks for most added tokens before it normalizes a text, for `normalized` ones after.
    added = facts.get("added", {})
    normalized = facts.get("normalized", [])
    early = {text: i for text, i in added.items() if text not in normalized}
    late = {normalize(text): added[text] for text in normalized}
    early_tokens = AddedTokens(early, facts)
    late_tokens = AddedTokens(late, facts)

    def encode(text):
        return encode_part(normalize(check_unicode(text)))

    def encode_late(text):
        return late_tokens.encode(normalize(text), encode_part)

    def encode_marked(text):
        return early_tokens.encode(check_unicode(text), encode_late)

    tokenizer.encode = encode
    tokenizer.encode_marked = encode_marked


# === end: encoding ===


# === shared: roles ===
def begin_ids(tokenizer):
    """Return what a text begins with: BOS, or nothing where an imported model has it so."""
    return [tokenizer.bos_id] if tokenizer.facts.get("begins_with_bos", True) else []


def with_roles(tokenizer):
    """Return the tokenizer with tokens for the roles, four more if it has none. Its file stays.

    An imported model with a chat template needs none.
    """
    if tokenizer.roles or "template" in tokenizer.facts:
        return tokenizer
    count = len(ROLE_TOKENS)
    return replace(
        tokenizer,
        pieces=tokenizer.pieces + [b""] * count,
        drops_space=np.append(tokenizer.drops_space, [False] * count),
        roles={role: tokenizer.vocab_size + i for i, role in enumerate(ROLE_TOKENS)},
    )


# === end: roles ===


# === shared: template ===
def render_templates():
    """Answer requests, lines of JSON, until there are no more: [template, its values] -> its text.

    This is the program of a process of its own, see TemplateProcess. Templates are rendered as
    transformers does. Without values a template is only compiled. A reply is {"text"} or {"fault"}.
    """
    import datetime
    import functools
    import json
    import os
    import re
    import resource
    import signal
    import sys

    import jinja2
    import jinja2.ext
    import jinja2.sandbox

    # Slurm sends SIGTERM to every process of a job. The run finishes its step, and then closes stdin.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def refuse(message):
        raise jinja2.TemplateError(message)

    def render(source, values):
        # {% generation %} marks answers for other programs. It writes what is in it, as `with` does.
        template = compiled(re.sub(r"(\{%[-+]?\s*(?:end)?)generation\b", r"\1with", source))
        parts = []
        room = 1 << 24  # letters
        for part in [] if values is None else template.generate(**values):
            parts.append(part)
            room -= len(part)
            if room < 0:
                raise jinja2.TemplateError("writes more than 16 million letters")
        return "".join(parts)

    # Only the arguments that transformers' filter has: others of json.dumps call functions.
    def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        words = dict(indent=indent, separators=separators, sort_keys=sort_keys)
        return json.dumps(value, ensure_ascii=ensure_ascii, **words)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    # This variable holds the date for programs whose output must be reproducible.
    if seconds := os.environ.get("SOURCE_DATE_EPOCH"):
        today = datetime.datetime.fromtimestamp(float(seconds), datetime.timezone.utc)
        environment.globals["strftime_now"] = today.strftime
    compiled = functools.cache(environment.from_string)
    if sys.platform != "darwin":  # macOS refuses it: what it maps into every process is more
        resource.setrlimit(resource.RLIMIT_AS, (1 << 29, 1 << 29))
    for line in sys.stdin:
        # After so many seconds of a CPU the system ends the process, in an operation of C, too.
        signal.setitimer(signal.ITIMER_PROF, 3)
        try:
            reply = {"text": render(*json.loads(line))}
        except jinja2.TemplateError as error:
            reply = {"fault": str(error)}
        except Exception as error:  # whatever a template does is the template's fault
            reply = {"fault": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), flush=True)


class TemplateProcess:
    """Renders chat templates in a process of its own.

    A template is a program that comes with a model. It may loop for ever or ask for any amount of
    memory, in one operation of C too, and then only its process can be ended.
    """

    def __init__(self):
        # The source is read once: the script may be edited while it runs.
        self.code = inspect.getsource(render_templates) + "render_templates()\n"
        self.lock = threading.Lock()
        self.owner = 0
        self.process = None
        self.endings = 0

    def ask(self, source, values):
        """Return the text of a template. Raises UserError."""
        with self.lock:
            if self.endings > 2:  # each took seconds, and there may be thousands of rows
                raise UserError("chat template: took too much time or memory too often")
            reply = self.exchange(json.dumps([source, values]))
        if "fault" in reply:
            fault, *_ = reply["fault"].split("\n")
            raise UserError(f"chat template: {fault:.300}")
        return reply["text"]

    def exchange(self, line):
        """Return the reply to a request, from a process of this process's own (it may have forked)."""
        if self.owner != os.getpid():
            self.process = subprocess.Popen(
                [sys.executable, "-c", self.code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env={**os.environ, "PYTHONSAFEPATH": "1"},
                start_new_session=True,  # a terminal's Ctrl-C does not reach it
            )
            self.owner = os.getpid()
        with contextlib.suppress(BrokenPipeError):
            print(line, file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if answer:
            return json.loads(answer)
        self.owner = 0
        self.endings += 1
        code = self.process.wait()
        reason = f"ended its process (exit code {code})"
        if code == -signal.SIGPROF:
            reason = "took more than 3 seconds"
        return {"fault": reason}


@functools.cache
def template_process():
    """Return the TemplateProcess. Raises UserError if jinja2 is not installed."""
    if importlib.util.find_spec("jinja2") is None:
        raise UserError("the model's chat template needs jinja2: pip install jinja2")
    return TemplateProcess()


def compile_template(source):
    """Raise UserError for a chat template that is not one of jinja2."""
    template_process().ask(source, None)


def chat_text(tokenizer, turns, ask):
    """Return the text of turns by the chat template of an imported model, as transformers has it.

    A turn is (role token, text), or (role token, text, fields). `fields` is a dict of the message's own
    fields, `content` among them; for the template they override the role and the text. Code takes a
    turn apart as role, text, *fields; dict(*fields) is that dict, or {}. The first message may have the
    role `tools`; its content is a list of tools. ask: whether the text ends where an answer of the assistant begins.
    Raises UserError.
    """
    messages = [
        {"role": role.strip("<|>"), "content": text} | dict(*fields)
        for role, text, *fields in turns
    ]
    tools = None
    if messages and messages[0]["role"] == "tools":
        tools = messages.pop(0)["content"]
    values = {
        "messages": messages,
        "add_generation_prompt": ask,
        "tools": tools,
        "documents": None,
    }
    facts = tokenizer.facts
    source = facts.get("tool_template", facts["template"]) if tools else facts["template"]
    text = template_process().ask(source, values | facts["names"])
    if not text.strip():
        raise UserError("chat template: writes nothing for this conversation")
    return text


# === end: template ===


# === shared: stops ===
def stop_texts(tokenizer):
    """Return the texts of the tokens that end an answer in an imported model's template."""
    facts = tokenizer.facts
    return [text for text, i in facts["added"].items() if i in facts["stop"]]


def stop_pattern(tokenizer):
    """Return the regular expression of the texts that end an answer in an imported model's template."""
    stops = map(re.escape, stop_texts(tokenizer))
    return re.compile("|".join(stops))


# === end: stops ===


# === shared: reader ===
UNPACKED_BYTES = 1 << 26  # and 200 times a file's size: so much a packed file may unpack to


class RowError(UserError):
    """What is wrong with a row of data, in the same few words for all rows with this fault."""


@dataclass
class RowReport:
    """What became of the rows of a file: what the log and result.json have of it."""

    path: str
    used: collections.Counter = field(default_factory=collections.Counter)  # by format
    left_out: dict = field(default_factory=dict)  # fault -> numbers of the rows that have it
    notes: dict = field(default_factory=dict)  # what is not used of these: kind -> name -> rows
    twice: list = field(default_factory=list)  # numbers of rows that are equal to an earlier one
    fields: str = ""  # names of the first row's

    def facts(self):
        """Return what result.json has: reason -> number of rows."""
        left_out = {fault: len(numbers) for fault, numbers in self.left_out.items()}
        return {"used": self.used, "left_out": left_out, "twice": len(self.twice), **self.notes}

    def __str__(self):
        """Return the log's line."""
        count = self.used.total() + sum(map(len, self.left_out.values()))
        used = ", ".join(f"{number} {name}" for name, number in self.used.items()) or "none"
        left_out = [f"{fault}: {len(rows)} {places(rows)}" for fault, rows in self.left_out.items()]
        parts = [f"{self.path}: {count} rows, used {used}"]
        parts.append(f"left out {'; '.join(left_out) or 'none'}")
        for kind, counts in self.notes.items():
            parts.append(f"{kind}: {', '.join(f'{name} {n}' for name, n in counts.items())}")
        if self.twice:
            parts.append(f"{len(self.twice)} occur twice {places(self.twice)}")
        return "data: " + "; ".join(parts)


def places(numbers):
    """Return the numbers of rows as text: the first three."""
    if len(numbers) == 1:
        return f"(the first is row {numbers[0]})"
    return f"(the first are rows {', '.join(map(str, numbers[:3]))})"


def weighted_files(name, text):
    """Return file -> weight of a setting's FILE,FILE:WEIGHT; without a weight 1. Raises UserError."""
    files = {}
    for part in filter(None, map(str.strip, text.split(","))):
        path, weight = re.fullmatch(r"(.*?)(?::(\d*\.?\d+))?", part).groups()
        path = os.path.expanduser(path)
        weight = float(weight or 1)
        if path in files or not weight:
            raise UserError(f"{name}={text!r}: must be FILE or FILE:WEIGHT, each once, above 0")
        files[path] = weight
    return files


def listed_files(name, text):
    """Return the files of a setting's FILE,FILE. Raises UserError if one has a weight."""
    files = weighted_files(name, text)
    if {*files.values()} - {1.0}:
        raise UserError(f"{name}={text!r}: has weights, which are not read here; must be FILE,FILE")
    return [*files]


def zstd_parts(file):
    """Yield the unpacked bytes of a zstd file, in parts. Raises EOFError if it ends too early."""
    decompressor = zstandard.ZstdDecompressor()
    frame = None
    # Each read unpacks to at most 32,768 times its size.
    while packed := file.read(4096):
        while packed:
            frame = frame or decompressor.decompressobj()
            yield frame.decompress(packed)
            packed = frame.unused_data
            if frame.eof:
                frame = None
    if frame:
        raise EOFError("the file ends before its zstd frame does")


def read_file(path):
    """Return the bytes of a file, decompressed if its name ends in .zst or .gz. Raises UserError."""
    name = path.lower()
    content = bytearray()
    try:
        with open(path, "rb") as file:
            most = UNPACKED_BYTES + 200 * os.fstat(file.fileno()).st_size
            if name.endswith(".zst"):
                parts = zstd_parts(file)
            elif name.endswith(".gz"):
                stream = gzip.GzipFile(fileobj=file)
                parts = iter(functools.partial(stream.read, 1 << 20), b"")
            else:
                return file.read()
            for part in parts:
                content += part
                if len(content) > most:
                    raise UserError(
                        f"{path}: unpacks to more than {most} bytes; must be less, or not packed"
                    )
    except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
        raise UserError(f"{path}: cannot be read; {error!s:.200}") from None
    return bytes(content)


def parsed_json(value):
    """Return what a text says as JSON; a value that is no text, or no JSON, stays as it is."""
    if isinstance(value, str | bytes):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def parse_line(line):
    """Return what a line of JSON says. Raises RowError."""
    try:
        return json.loads(line.decode())
    except UnicodeDecodeError:
        raise RowError("invalid UTF-8") from None
    except (ValueError, RecursionError):
        raise RowError("no JSON") from None


def without_nulls(value):
    """Return a value of a table without null fields: a struct there has the fields of all of them.

    Dates and the like are texts. So is binary; if it is no UTF-8, the text is no Unicode, and a row
    that needs it is left out, see checked_text.
    """
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    if isinstance(value, bytes):
        return value.decode(errors="surrogateescape")
    return value if isinstance(value, int | float | str | None) else str(value)


def table_rows(path):
    """Return the rows of a Parquet file. Raises UserError."""
    if importlib.util.find_spec("pyarrow") is None:
        raise UserError(f"{path}: Parquet needs pyarrow: pip install pyarrow")
    import pyarrow.parquet

    try:
        return without_nulls(pyarrow.parquet.read_table(path).to_pylist())
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{path}: cannot be read; {error!s:.200}") from None


def file_rows(path):
    """Return the rows of a file: the lines of JSON lines, the items of one JSON list, one object, or
    the rows of .parquet. .gz and .zst are unpacked. Raises UserError.
    """
    if not Path(path).exists():
        raise UserError(
            f"{path}: no such file; data/tasks.py writes files of small tasks, and `hf download NAME "
            "--repo-type dataset` gets those of the hub"
        )
    if Path(path).is_dir():
        raise UserError(f"{path}: a folder; must be a file, or FILE,FILE")
    if path.lower().endswith((".csv", ".tsv", ".xlsx", ".arrow")):
        raise UserError(
            f"{path}: must be .jsonl, .json or .parquet, perhaps packed as .gz or .zst; "
            "pandas.read_csv(FILE).to_json(FILE, orient='records', lines=True) makes .jsonl of .csv"
        )
    if path.lower().endswith(".parquet"):
        return table_rows(path)
    # Some editors write a byte order mark, of three bytes, before UTF-8.
    content = read_file(path).removeprefix(b"\xef\xbb\xbf")
    value = parsed_json(content)
    if isinstance(value, bytes):  # JSON lines are no JSON after the first
        return content.rstrip().splitlines()
    return value if isinstance(value, list) else [value]


def read_rows(path, parse, log):
    """Return what `parse` makes of the rows of a file; log their RowReport.

    Blank lines are skipped. parse(row, notes) returns a format and an item, and adds (kind, name) of
    what it does not use to the set `notes`. Rows for which it raises RowError are left out, and the
    report counts them by fault. Raises UserError if no row is left.
    """
    report = RowReport(path)
    items = []
    known = set()  # hashes of rows
    for number, row in enumerate(file_rows(path), 1):
        if isinstance(row, bytes) and not row.strip():
            continue
        notes = set()
        try:
            if isinstance(row, bytes):
                row = parse_line(row)
            if not isinstance(row, dict):
                raise RowError("no JSON object")
            report.fields = report.fields or ", ".join(row)
            name, item = parse(row, notes)
        except UserError as error:  # a chat template refuses some conversations
            report.left_out.setdefault(str(error), []).append(number)
            continue
        items.append(item)
        report.used[name] += 1
        digest = hash(repr(row))
        if digest in known:
            report.twice.append(number)
        known.add(digest)
        for kind, name in sorted(notes):
            report.notes.setdefault(kind, collections.Counter())[name] += 1
    if not items:
        raise UserError(
            f"{str(report).removeprefix('data: ')}; must hold one usable row at least ('Your rows' in "
            f"docs/sft.md lists the forms); fields of the first row: {report.fields!r:.300}"
        )
    log(report)
    return items


# === end: reader ===


# === shared: turns ===
# What data sets call the roles. Without a template a model reads what a tool says like a user's turn.
TOOL_ROLES = "tool function observation ipython tool_response function_response".split()
CALL_ROLES = ("function_call", "tool_call")
ROLES = {
    **dict.fromkeys(("system", "developer"), "<|system|>"),
    **dict.fromkeys(("user", "human", "prompter", *TOOL_ROLES), "<|user|>"),
    **dict.fromkeys("assistant gpt chatgpt model bot chatbot ai".split(), "<|assistant|>"),
    **dict.fromkeys(CALL_ROLES, "<|assistant|>"),
}
THOUGHTS = ("reasoning_content", "reasoning", "thinking", "thought")  # names of one field
CONTENTS = ("content", "value", "tool_calls")  # a message has one of these fields at least
MESSAGE_FIELDS = ("role", "from", *CONTENTS, "function_call", "weight", "train", "loss")
MEDIA = "image images image_url audio audios video videos".split()
# Fields of rows and messages that say something about the answer. Others (id, source) are columns.
ANSWER_FIELDS = (
    "name tool_call_id tools functions refusal weight label rating ratings score scores margin "
    "score_chosen score_rejected chosen_score rejected_score chosen_rating rejected_rating "
    "system system_prompt history context documents chat_template_kwargs choices options passage "
    "starter_code"
).split()
CONVERSATIONS = {"messages": "messages", "conversations": "ShareGPT", "conversation": "ShareGPT"}
# Names of the field that asks, in this order.
QUESTIONS = ("prompt", "question", "problem", "instruction", "query", *CONVERSATIONS)
QUESTIONS += ("input", "context", "inputs")


def checked_text(text):
    """Return a text, which is Unicode. Raises RowError."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RowError("no Unicode: half a surrogate pair, or bytes that are no UTF-8") from None
    return text


def is_blank(value):
    """Return whether a field's value is white space, or an empty list."""
    return value == [] or (isinstance(value, str) and not value.strip())


def message_role(value):
    """Return the role token of a JSON value that is a message, in OpenAI's form or ShareGPT's, or None."""
    if not isinstance(value, dict) or {*value}.isdisjoint(CONTENTS):
        return None
    name = value.get("role") or value.get("from")
    return ROLES.get(str(name).strip().lower())


def given_fields(row):
    """Return the fields of a row that are not null, messages in those of TRL parsed if they are JSON text.

    All messages of such a text have known roles. Those of an answer end with the assistant's: other
    JSON is what the answer says.
    """
    given = {name: value for name, value in row.items() if value is not None}
    for name in given.keys() & {"prompt", "completion", "chosen", "rejected"}:
        messages = parsed_json(given[name])
        roles = [*map(message_role, messages)] if isinstance(messages, list) else []
        if roles and all(roles) and (name == "prompt" or roles[-1] == "<|assistant|>"):
            given[name] = messages
    return given


def text_of(row, *names):
    """Return the text in the first of these fields that a row has and that is not null.

    A number is read as text. Raises RowError.
    """
    name = next((name for name in names if row.get(name) is not None), None)
    if name is None:
        raise RowError(f"missing field {' or '.join(map(repr, names))}")
    value = row[name]
    if type(value) in (int, float) and abs(value) < math.inf:
        value = json.dumps(value)
    if not isinstance(value, str):
        raise RowError(f"field {name!r} is no text")
    return checked_text(value)


def parsed_list(row, name):
    """Return the objects in a field: a list, one alone, or none; some data sets write JSON text.

    Raises RowError.
    """
    value = parsed_json(row.get(name) or [])
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise RowError(f"field {name!r} is no list of objects")
    return value


def json_text(value):
    """Return a value as JSON text, for own layouts. Raises RowError."""
    return checked_text(json.dumps(value, ensure_ascii=False))


FLAGS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}


def flags_of(fields, *names):
    """Return those of these fields of a row or message that say yes or no: name -> True or False."""
    flags = {name: FLAGS.get(str(fields[name]).lower()) for name in names if name in fields}
    return {name: flag for name, flag in flags.items() if flag is not None}


def kto_flags(row):
    """Return the fields of a row that say whether its answer is good, as in KTO: name -> True or False.

    A `label` that is a number or a text says so beside `completion` alone, as TRL has it. Elsewhere
    it may be a class.
    """
    if "completion" in row or isinstance(row.get("label"), bool):
        return flags_of(row, "label", "kto_tag")
    return flags_of(row, "kto_tag")


def is_unlearned(fields):
    """Return whether `weight`, `train` or `loss` of a message or row says that it is not learned.

    Of a row, `loss` may be a number that somebody measured.
    """
    return fields.get("loss") is False or False in flags_of(fields, "weight", "train").values()


def note_fields(fields, known, prefix, notes):
    """Add to notes, (kind, name), the fields of a row or message that are not used."""
    for name, value in fields.items():
        if name in known or value in (None, "", [], {}):
            continue
        if name in ("weight", "train", "loss") and value in (0, 1):
            continue  # is_unlearned heeds them
        kind = "not used" if name in ANSWER_FIELDS else "columns not read"
        notes.add((kind, prefix + str(name)))


def refuse_media(fields):
    """Raise RowError if a row, a message or a part of one has an image, a sound or a film."""
    for name in MEDIA:
        if fields.get(name):
            raise RowError(f"field {name!r}: the model reads text only")


def joined_parts(parts):
    """Return the text of a message's content that is a list of parts, and its thoughts.

    Texts are joined as they are. Raises RowError for other parts.
    """
    texts = {"text": "", "thinking": ""}
    for part in parts:
        if isinstance(part, str):
            part = {"text": part}
        if not isinstance(part, dict):
            raise RowError("a part of a content is no text")
        # OpenAI's Responses have the prefixes.
        kind = str(part.get("type", "text")).removeprefix("input_").removeprefix("output_")
        if kind not in texts:
            raise RowError(f"part of type {kind!r:.30}, which is not written")
        texts[kind] += text_of(part, kind)
    return texts["text"], texts["thinking"]


def tool_calls(message):
    """Return the calls of a message as transformers has them, arguments parsed. Raises RowError."""
    calls = []
    for call in parsed_list(message, "function_call") + parsed_list(message, "tool_calls"):
        if "function" not in call:
            call = {"type": "function", "function": call}
        function = call["function"]
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RowError("a tool call without a name")
        arguments = parsed_json(function.get("arguments") or {})
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return calls


def own_text(content, thoughts, calls):
    """Return a message as one text, the form of models without a chat template."""
    lines = [content] if content else []
    for call in calls:
        function = call["function"]
        said = {"name": function["name"], "arguments": function["arguments"]}
        lines.append(f"<tool_call>{json_text(said)}</tool_call>")
    text = "\n".join(lines)
    return f"<think>\n{thoughts}\n</think>\n\n{text}" if thoughts else text


def message_turn(message, notes):
    """Return the turn of a message, (role token, text) and maybe the fields of chat_text.

    The message has `role` and `content`, or `from` and `value`; null is as good as absent. Field
    `train` is False if it is not learned. Raises RowError.
    """
    given = {name: value for name, value in message.items() if value not in (None, [], {})}
    name = text_of(given, "role", "from").strip().lower()
    if name not in ROLES:
        raise RowError(f"unknown role {name!r:.30}")
    refuse_media(given)
    content = message.get("content", message.get("value"))
    if name in CALL_ROLES:  # of ShareGPT: the text is a call
        with contextlib.suppress(RowError):
            given["tool_calls"] = parsed_list({"tool_calls": content}, "tool_calls")
            content = None
    calls = tool_calls(given)
    thoughts = next((text_of(given, name) for name in THOUGHTS if given.get(name)), "")
    if isinstance(content, list):
        content, more_thoughts = joined_parts(content)
        thoughts += more_thoughts
    elif content is not None or not (calls or thoughts):
        content = text_of(given, "content", "value")
    fields = {name: value for name, value in given.items() if name not in MESSAGE_FIELDS}
    if thoughts:  # which name a template knows them by differs
        fields |= dict.fromkeys(THOUGHTS, thoughts)
    if calls:
        fields["tool_calls"] = calls
    if name in TOOL_ROLES:
        fields["role"] = "tool"
    if is_unlearned(given):
        fields["train"] = False
    elif given.get("weight", 1) != 1:
        notes.add(("not used", "weight"))
    text = own_text(content, thoughts, calls)
    return (ROLES[name], text, {"content": content, **fields}) if fields else (ROLES[name], text)


def listed_turns(row, name, notes):
    """Return the turns in a field of messages. Raises RowError."""
    return [message_turn(message, notes) for message in parsed_list(row, name)]


def field_turns(row, role, notes, name, *more):
    """Return the turns in a field: messages, or a text, which is a turn of `role`.

    The texts in `more` fields belong to that text.
    """
    value = row.get(name)
    is_message = isinstance(value, dict) and not {"role", "from"}.isdisjoint(value)
    if is_message or isinstance(value, list) or name in CONVERSATIONS:
        return listed_turns(row, name, notes)
    texts = [text_of(row, part) for part in (name, *more)]
    return [(role, "\n\n".join(filter(None, texts)))]


def tools_turn(tools):
    """Return the turn that lists tools; without a chat template it is one of the system."""
    text = "\n".join(json_text(tool) for tool in tools)
    return "<|system|>", f"<tools>\n{text}\n</tools>", {"role": "tools", "content": tools}


def leading_turns(row, turns):
    """Return the turns of a row behind those of its fields `tools` and `system`. Raises RowError."""
    refuse_media(row)
    for name in ("system", "system_prompt"):
        if row.get(name):
            turn = ("<|system|>", text_of(row, name))
            turns = turns if turns[:1] == [turn] else [turn, *turns]
            break
    tools = parsed_list(row, "tools")
    if not tools:
        functions = parsed_list(row, "functions")
        tools = [{"type": "function", "function": function} for function in functions]
    return [tools_turn(tools), *turns] if tools else turns


def history_turns(row, notes):
    """Return the turns of `history`: pairs of a question and an answer, or messages. Raises RowError."""
    history = row.get("history") or []
    if not isinstance(history, list):
        raise RowError("field 'history' is no list")
    messages = []
    for item in history:
        if isinstance(item, list) and len(item) == 2:
            messages.append({"role": "user", "content": item[0]})
            messages.append({"role": "assistant", "content": item[1]})
        else:
            messages.append(item)
    return listed_turns({"history": messages}, "history", notes)


def question_turns(row, notes):
    """Return the turns of a row up to its question, and the fields that they are in. Raises RowError.

    The question is messages, or a text. To that of `instruction` (Alpaca, Dolly) or `question` (SQuAD)
    belong the texts of `input` and `context`; a `prompt` is whole. A blank field is no question where
    another one is filled.
    """
    names = [name for name in QUESTIONS if name in row]
    filled = [name for name in names if not is_blank(row[name])]
    # The first that is filled, or else the first blank one; without any the error names `prompt`.
    question = [*filled, *names, "prompt"][0]
    used = [question]
    is_part = question in ("instruction", "question", "input")
    if is_part and not isinstance(row[question], list | dict):
        used += [name for name in ("input", "context") if row.get(name) and name != question]
    turns = field_turns(row, "<|user|>", notes, *used)
    if str(row[question]).rstrip().endswith("Assistant:"):  # as of HH-RLHF's questions
        notes.add(("already has roles, should be messages", question))
    return [*history_turns(row, notes), *turns], [*used, "history"]


# === end: turns ===


# === shared: forms ===
def without(turn, *names):
    """Return a turn without these fields of its message."""
    message = dict(*turn[2:])
    if not message:
        return turn
    return *turn[:2], {name: value for name, value in message.items() if name not in names}


def turn_form(turn, null, is_text, tool_role):
    """Return a turn as some templates want it.

    null: the content of a message that has none. is_text: whether arguments are JSON text.
    tool_role: the role of a tool's result.
    """
    role, text, *fields = copy.deepcopy(turn)
    for message in fields:
        if message["content"] is None:
            message["content"] = null
        if message.get("role") == "tool":
            message["role"] = tool_role
        for call in message.get("tool_calls", []):
            function = call["function"]
            if is_text and not isinstance(function["arguments"], str):
                function["arguments"] = json_text(function["arguments"])
    return role, text, *fields


def writes(text, content):
    """Return whether a template's text has a content, trimmed, or as JSON."""
    return content.strip() in text or json.dumps(content, ensure_ascii=False)[1:-1] in text


def is_rendered(text, turns):
    """Return whether a template's text has all calls, none as Python writes it, and all their results."""
    for _, content, *more in turns:
        message = dict(*more)
        if message.get("role") == "tool" and not writes(text, content):
            return False
        for call in message.get("tool_calls", []):
            arguments = call["function"]["arguments"]
            if arguments and not isinstance(arguments, str) and str(arguments) in text:
                return False
            if call["function"]["name"] not in text:
                return False
    return True


def templated_turns(tokenizer, turns):
    """Return turns in the form that the chat template of an imported model writes.

    Templates want a message without text, the arguments of a call, and the role of a tool's result in
    different forms. The first form counts in which the template writes every call and result; if there
    is none, the first that it does not refuse. If it refuses all, the turns stay as they are.
    """
    if not any(fields for _, _, *fields in turns):
        return turns
    first = None  # of the forms that the template does not refuse
    for form in itertools.product(("", None), (False, True), ("tool", "user")):
        formed = [turn_form(turn, *form) for turn in turns]
        with contextlib.suppress(UserError):
            if is_rendered(chat_text(tokenizer, formed, False), turns):
                return formed
            first = first or formed
    return first or turns


def note_rendered(tokenizer, turns, notes):
    """Add to notes texts and questions that a chat template has written already: they have its tokens.

    Those that end an answer tell: they end questions, too, or begin the whole text.
    """
    pattern = stop_pattern(tokenizer)
    for role, text, *_ in turns:
        if role == "<|assistant|>" or not pattern.search(text):
            continue
        name = f"a turn of the {role.strip('<|>')} (rendered again)"
        if not role:
            name = "text (read as plain characters)"
        notes.add(("already has chat tokens, should be messages", name))


def is_written(tokenizer, turns, text):
    """Return whether a template writes what these turns lack: without it the text is another one, or
    the template refuses them, as Mistral's does a tool's result without its id.
    """
    try:
        return chat_text(tokenizer, turns, False) != text
    except UserError:
        return True


def fitted_turns(tokenizer, turns, notes):
    """Return turns in the form that the tokenizer's layout has; notes get the fields that it lacks.

    Raises UserError where a chat template refuses the conversation.
    """
    has_template = "template" in tokenizer.facts
    if has_template:
        note_rendered(tokenizer, turns, notes)
    fields = {}
    for _, _, *more in turns:
        fields |= dict(*more)
    written = ["role", "content", "train", "tool_calls", *THOUGHTS]
    if not has_template or not turns[0][0]:  # no role: a plain text, which no template renders
        note_fields(fields, written, "message.", notes)
        return turns
    turns = templated_turns(tokenizer, turns)
    text = chat_text(tokenizer, turns, False)
    for name in fields.keys() - {*written}:
        if is_written(tokenizer, [without(turn, name) for turn in turns], text):
            written.append(name)
    note_fields(fields, written, "message.", notes)
    for role, content, *more in turns:
        name = dict(*more).get("role", role.strip("<|>"))
        if name == "tools":  # the first turn, see leading_turns
            if not is_written(tokenizer, turns[1:], text):
                notes.add(("not written", "tools"))
        elif role != "<|assistant|>" and not writes(text, content):
            notes.add(("not written", f"a turn of the {name}"))
    return turns


# === end: forms ===


# === shared: prompt ===
def asked_ids(tokenizer, turns):
    """Return the ids of turns (see chat_text) up to where an answer of the assistant begins.

    Without role tokens and chat template the turns are lines.
    """
    if "template" in tokenizer.facts:
        return tokenizer.encode_marked(
            chat_text(tokenizer, templated_turns(tokenizer, turns), True)
        )
    ids = begin_ids(tokenizer)
    if not tokenizer.roles:
        return ids + tokenizer.encode("".join(f"{text}\n" for _, text, *_ in turns))
    for role, text, *_ in turns:
        ids += [tokenizer.roles[role], *tokenizer.encode(text), tokenizer.roles["<|end|>"]]
    return [*ids, tokenizer.roles["<|assistant|>"]]


# === end: prompt ===


# === shared: ends ===
def stop_ids(tokenizer):
    """Return the tokens that end an answer: an imported model's, or BOS of the next text; <|end|>."""
    stop = {*tokenizer.facts.get("stop", [tokenizer.bos_id])}
    if tokenizer.roles:
        stop.add(tokenizer.roles["<|end|>"])
    return frozenset(stop)


# === end: ends ===


# === shared: text ===
def decode_bytes(tokenizer, ids):
    """Return the bytes of tokens that begin a document; data/prepare.py counts exactly these."""
    ids = np.asarray(ids, dtype=np.int64)
    previous = np.append(tokenizer.bos_id, ids)[:-1]
    drops = tokenizer.drops_space[ids] & tokenizer.boundary[previous]
    pairs = zip(ids.tolist(), drops.tolist(), strict=True)
    return b"".join([tokenizer.pieces[token][drop:] for token, drop in pairs])


def completion(tokenizer, prompt, ids):
    """Return the text of `ids`, sampled after the ids of a prompt. BOS and roles are no text."""
    length = len(decode_bytes(tokenizer, prompt))
    return decode_bytes(tokenizer, [*prompt, *ids])[length:].decode(errors="replace")


# === end: text ===


# === shared: questions ===
REFERENCES = ("answer", "expected_answer", "final_answer", "solution", "ground_truth")
REFERENCES += ("reference_answer",)
KEYS = (*REFERENCES, "completion", "response", "output", "continuation")
# Columns that may be meant for the prompt; others are for the reward functions alone.
PROMPT_PARTS = (
    "input context documents chat_template_kwargs choices options passage starter_code".split()
)


def problem_of(row, notes):
    """Return a problem: all columns of a row, with its `prompt`, a text or messages, and its `answer`,
    a text or what the column has, or None.

    The prompt is that of question_turns; of messages the last one may be the answer. Fields `system`
    and `tools` stay columns, see query_turns. notes get (kind, name) of what is not used. Raises
    RowError.
    """
    given = given_fields(row)
    if isinstance(given.get("reward_model"), dict):  # of verl: it has `ground_truth`
        given = {**given["reward_model"], **given}
    is_wrong = False in kto_flags(given).values()
    key = next((name for name in KEYS if name in given), None)
    answer = key and answer_of(given, key, notes)
    turns, used = question_turns(given, notes)
    for name in PROMPT_PARTS:
        if given.get(name) and name not in used:
            notes.add(("not in the prompt", name))
    if turns and turns[-1][0] == "<|assistant|>" and used[0] in CONVERSATIONS:
        *turns, (_, text, *_) = turns
        if not answer:
            answer = text
            key = used[0]
    if is_wrong and answer and key not in REFERENCES:
        notes.add(("not used", "an answer with label or kto_tag false"))
        answer = None
    if not turns or turns[-1][0] != "<|user|>":
        raise RowError(f"field {used[0]!r} does not end with a user's message")
    if not turns[-1][1].strip():
        raise RowError("blank prompt")
    prompt = turns[0][1]  # one turn stays a text, unless the row has it as a message
    if len(turns) > 1 or isinstance(given[used[0]], list):
        prompt = [turn_message(turn) for turn in turns]
    problem = {**row, "prompt": prompt, "answer": answer}
    query_turns(problem)  # for its error: of `system` and `tools`
    return problem


def answer_of(row, name, notes):
    """Return the answer in a field: a text, that of a message, or else what the field has.

    Raises RowError.
    """
    value = row[name]
    if isinstance(value, str):
        return checked_text(value)
    with contextlib.suppress(RowError):
        turns = field_turns(row, "<|assistant|>", notes, name)
        return turns[0][1] if len(turns) == 1 else value
    return value


def needs_answer(rewards):
    """Return whether one of the functions FUNCTION,FUNCTION is `exact`, which compares with answers."""
    return "exact" in [part.partition(":")[0].strip() for part in rewards.split(",")]


def is_answered(problem):
    """Return whether a problem has an answer that is not blank."""
    return problem["answer"] is not None and bool(str(problem["answer"]).strip())


def require_answer(problem):
    """Raise RowError for a problem without an answer that is a text."""
    if not is_answered(problem):
        raise RowError("no answer, and REWARD or MARK is `exact`, which needs one")
    if not isinstance(problem["answer"], str):
        raise RowError("the answer is no text")


def turn_message(turn):
    """Return a turn as a message of OpenAI's form."""
    role, text, *fields = turn
    message = {"role": role.strip("<|>"), "content": text} | dict(*fields)
    return {name: value for name, value in message.items() if name not in (*THOUGHTS[1:], "train")}


def query_turns(query):
    """Return the turns of a query: a text, or a dict with `prompt`, a text or messages, and perhaps
    `system` and `tools`. Raises RowError."""
    row = query if isinstance(query, dict) else {"prompt": query}
    return leading_turns(row, field_turns(row, "<|user|>", set(), "prompt"))


# === end: questions ===


# === shared: decoder ===
ROOM = 64  # tokens for which a Decoder makes room at a time; a quarter of it on a CPU


def gdn_step(q, k, v, g, beta, state):
    """Return Gated DeltaNet's output o and the next state for one token: the formula of gdn_chunk.

    q and k (B, H, K), v and o (B, H, V), g and beta (B, H), state (B, H, K, V).
    """
    k = k.to(state.dtype)[..., None]  # (B, H, K, 1)
    state = g.exp()[..., None, None] * state
    delta = beta[..., None, None] * (v[..., None, :] - k.mT @ state)  # (B, H, 1, V)
    state = state + k * delta
    o = q.to(state.dtype)[..., None, :] @ state
    return o[..., 0, :].to(v.dtype), state


@dataclass(kw_only=True)
class TextContext(Context):
    """The Context of tokens that go on with texts. It keeps what layers need of the tokens so far.

    Tensors are written in place, because a CUDA graph reads and writes the same memory at each
    replay.
    """

    layers: list  # a dict for each layer: name -> tensor, with a row for each text
    slots: Tensor  # (T,), where the tokens are in the texts
    distance: Tensor  # (T, room), how far before a token each slot is
    is_seen: Tensor  # (B, T, room), whether a token sees it

    def of_layer(self, place):
        """Return the context of a layer, given its place."""
        self.kept = self.layers[place]
        return self

    def keep(self, name, value):
        """Keep a tensor under a name."""
        self.kept.setdefault(name, torch.empty_like(value)).copy_(value)

    def project(self, x, weight):
        """Return x W^T (B, CONV_TAPS-1 + T, C), with the products of earlier tokens in front."""
        x = F.pad(linear(x, weight), (0, 0, CONV_TAPS - 1, 0))
        if "tail" in self.kept:
            x[:, : CONV_TAPS - 1] = self.kept["tail"]
        self.keep("tail", x[:, 1 - CONV_TAPS :])
        return x

    def recur(self, *inputs):
        """Return the outputs of gdn_chunk, whose state goes on from call to call."""
        state = self.kept.get("state")
        if state is None or inputs[0].size(1) > 1:
            o, state = gdn_chunk(*inputs, state)
        else:
            o, state = gdn_step(*inputs, state[:, None])
            state = state[:, 0]
        self.keep("state", state)
        return o

    def attend(self, q, k, v, window):
        """Return attention (B, H, T, D) over all keys so far; shapes as in `attend`."""
        if not self.kept:
            shape = *k.shape[:2], self.distance.size(1), k.size(3)
            self.kept.update(keys=k.new_zeros(shape), values=k.new_zeros(shape))
        keys = self.kept["keys"].index_copy_(2, self.slots, k)
        values = self.kept["values"].index_copy_(2, self.slots, v)
        return masked_attention(q, keys, values, self.is_seen & (self.distance < window))


class PackedLinear(TorchFunctionMode):
    """F.linear by copies of the weights of one dtype in oneDNN's layout, made when they are first met.

    Without a copy every product lays its weight out anew. On a CPU a product of 1 to 16 rows then
    takes twice as long, and one of 64 rows 1.4 times (docs/lab/2026-11.md, 2026-11-27). The copies
    take as much memory as the weights. Sums with adapters must be cached, see setup_lora_adapter.
    """

    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype
        self.copies = {}  # id of a weight -> the weight, so that the id stays its own, and its copy

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Return what func returns."""
        if func is not F.linear or args[1].dtype != self.dtype:
            return func(*args, **(kwargs or {}))
        x, weight = args
        if id(weight) not in self.copies:
            copy = torch.ops.mkldnn._reorder_linear_weight(weight)
            self.copies[id(weight)] = weight, copy
        _, copy = self.copies[id(weight)]
        return torch.ops.mkldnn._linear_pointwise(x, copy, None, "none", [], "")


class Decoder:
    """Texts that go on token by token: the network's own modules with a cache for each layer.

    `logits` (R, V) say what comes next. Prompts of different lengths are padded in front. Padding
    and text are different documents, so no text sees its padding. compiled: whether a step is; on
    CUDA it is recorded as a graph and replayed.
    """

    def __init__(self, network, prompts, compiled=False):
        """Read the prompts, lists of at least one id."""
        self.network = network
        self.layers = [{} for _ in network.layers]  # what a TextContext keeps
        self.graph = None
        is_fixed = compiled or network.embed.is_cuda
        # Attention reads the empty slots, too; but each new size is compiled or recorded anew.
        self.room = ROOM if is_fixed else ROOM // 4
        dtype = network.embed.dtype
        # Weights that are cast for each product would have a new copy each time.
        is_cast = network.dtype not in (None, dtype)
        has_layout = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled
        if has_layout and dtype == torch.bfloat16:  # a CPU with AVX2 alone has no such layout
            has_layout = torch.ops.mkldnn._is_mkldnn_bf16_supported()
        is_packed = has_layout and dtype != torch.float64 and not (is_fixed or is_cast)
        self.linear = PackedLinear(dtype) if is_packed else contextlib.nullcontext()
        # A function: a bound method would refer back to the Decoder, whose caches would then stay
        # until Python looks for cycles.
        self.step = Decoder.read
        if compiled:
            # Only sizes are dynamic: constants such as the soft cap would be traced twice (6 s).
            torch._dynamo.config.specialize_float = True
            self.step = torch.compile(Decoder.read, dynamic=True)
        bos = max(network.config.bos_id, 0)  # some imported models have none
        ids = [torch.tensor(prompt) for prompt in prompts]
        ids = pad_sequence(ids, True, bos, "left").to(network.embed.device)
        before = CONV_TAPS - 1  # padding of all rows, which the first token's convolution reaches
        padding = [[before + ids.size(1) - len(prompt)] for prompt in prompts]
        self.used = ids.new_tensor(before)  # slots that hold a token
        self.kept = {
            "ids": F.pad(ids, (before, self.room), value=bos),
            "padding": ids.new_tensor(padding),
        }
        self.logits = self.read(ids)

    def take(self, rows):
        """Go on with these rows (n,) alone, in this order; a row may come several times."""
        self.graph = None
        self.logits = self.logits[rows]
        for kept in (self.kept, *self.layers):
            for name, value in kept.items():
                kept[name] = value[rows]

    def grow(self):
        """Make room for more tokens."""
        self.graph = None
        self.kept["ids"] = F.pad(self.kept["ids"], (0, self.room))
        for kept in self.layers:
            for name in kept.keys() & {"keys", "values"}:
                kept[name] = F.pad(kept[name], (0, 0, 0, self.room))

    def context(self, ids):
        """Return the TextContext of ids (B, T), the next tokens of the texts.

        A text is one document, whatever its tokens are, and its padding another.
        """
        reach = self.used + torch.arange(1 - CONV_TAPS, ids.size(1), device=ids.device)
        slots = reach[CONV_TAPS - 1 :]
        self.used += ids.size(1)
        texts = self.kept["ids"].index_copy_(1, slots, ids)  # (B, room)
        padding = self.kept["padding"]
        places = torch.arange(texts.size(1), device=ids.device)
        docs = places >= padding
        distance = slots[:, None] - places
        return TextContext(
            recent=texts[:, reach],
            doc=docs[:, reach],
            positions=(slots - padding).clamp(0),
            layers=self.layers,
            slots=slots,
            distance=distance,
            is_seen=(distance >= 0) & (docs[:, slots, None] == docs[:, None]),
        )

    def read(self, ids):
        """Return the logits (R, V) of what comes after ids (R, T)."""
        with self.linear:
            features = self.network.features(ids, context=self.context(ids))
            return self.network.logits(features[:, -1])

    def __call__(self, ids):
        """Go on with ids (R,), a token in each row, or (R, T)."""
        ids = ids.view(len(ids), -1)
        while self.used + ids.size(1) > self.kept["ids"].size(1):
            self.grow()
        if ids.size(1) > 1:
            self.logits = self.read(ids)
            return
        if self.graph:
            self.ids.copy_(ids)
            self.graph.replay()
            self.logits = self.next_logits
            return
        self.logits = self.step(self, ids)
        if ids.is_cuda:  # that step warmed up; the next ones are recorded here, and replayed
            self.ids = ids.clone()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.next_logits = self.step(self, self.ids)


# === end: decoder ===


# === shared: generation ===
SAY_SECONDS = 8.0  # a block of generation or updates that takes longer says how far it is
LEAST_TEMPERATURE = 1e-30  # logits over a smaller one overflow; the likeliest token is as sure here


@dataclass
class Sample:
    """What followed a prompt.

    A subclass may have a method `reply`, which is called when a stop token ends an answer. It
    returns ids with which the text goes on before the next answer; with none the sample ends.
    Without the method the first answer ends it.
    """

    reply = None  # without an annotation it is no field
    ids: list[int] = field(default_factory=list)  # stop tokens included
    # of the ids where they were drawn: 0 for greedy ones, None for ids of a reply
    logps: list[float] = field(default_factory=list)
    finished: bool = False  # whether a stop token ended it
    given: list[int] = field(default_factory=list)  # ids of a reply that are to come

    def take(self, token, logp, stop):
        """Go on by a drawn token, or by the next one of a reply; return it.

        Raises FloatingPointError if the network's logits are not finite.
        """
        if not math.isfinite(logp):
            raise FloatingPointError("the network gives logits that are not finite")
        if self.given:
            return self.listen(1)[0]
        self.ids.append(token)
        self.logps.append(logp)
        if token in stop:
            self.given = self.reply() if self.reply else []
            self.finished = not self.given
        return token

    def listen(self, count):
        """Go on by the next `count` ids of a reply; return them."""
        heard = self.given[:count]
        self.given = self.given[count:]
        self.ids += heard
        self.logps += [None] * len(heard)
        return heard


def draw(logits, temperature, uniform, truncate=None):
    """Return tokens (B,) and their log-probabilities, drawn from logits (B, V).

    uniform (B,) in [0, 1) decides: the inverse of the cumulative distribution. temperature 0: the
    likeliest token. truncate: from probabilities (B, V) to those to draw from. Where logits are not
    finite, so is the log-probability.
    """
    if temperature < LEAST_TEMPERATURE:
        best, picks = logits.max(-1)
        return picks, 0.0 * best  # NaN where the logit is not finite: generate raises then
    chances = (logits / temperature).softmax(-1)
    if truncate:
        chances = truncate(chances)
    # A CPU itself adds float32 in float64. On CUDA the sum of a block could be a digit above that of
    # the block before, and a token that has no chance be drawn.
    total = chances.cumsum(-1, dtype=torch.float64 if chances.is_cuda else None)
    # Rounded to float32 a number may be the whole total; the last token that has a chance is below.
    below = total[:, -1:].nextafter(total.new_zeros(()))
    level = torch.minimum((uniform[:, None] * total[:, -1:]).to(total.dtype), below)
    picks = torch.searchsorted(total, level, right=True)
    picks = picks.clamp(max=logits.size(1) - 1)  # NaN is above all totals
    return picks[:, 0], chances.gather(1, picks)[:, 0].log()


def uniform_numbers(seeds):
    """Yield random numbers in [0, 1), a tensor (rows,) for each step; seeds: one for each row."""
    streams = [np.random.default_rng(seed) for seed in seeds]
    while True:
        block = np.stack([stream.random(ROOM) for stream in streams])
        yield from torch.from_numpy(block).T


@contextlib.contextmanager
def heartbeat(say, describe):
    """A block that calls say(describe() and its seconds) every SAY_SECONDS; say may be None."""
    begin = time.monotonic()
    ended = threading.Event()

    def beat():
        while not ended.wait(SAY_SECONDS):
            say(f"{describe()}, {time.monotonic() - begin:.0f} s")

    thread = threading.Thread(target=beat, daemon=True)
    if say:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if say:
            thread.join()


def sampling_state(samples):
    """Return how far samples are, for `heartbeat`."""
    finished = sum(sample.finished for sample in samples)
    tokens = sum(len(sample.ids) for sample in samples)
    return f"sampling: {finished} of {len(samples)} answers have ended, {tokens} tokens so far"


def compute_dtype(network):
    """Return the dtype of a network's activations."""
    automatic = torch.bfloat16 if network.embed.is_cuda else network.embed.dtype
    return network.dtype or automatic


@contextlib.contextmanager
def cast_once(network):
    """A block in which the matrices have the dtype of activations, to which each product casts them.

    Every token reads all of them: with a cast for each token a GPU moves 8 bytes a weight for
    float32 weights (reads 4, writes 2, reads 2), and 2 without it.
    """
    dtype = compute_dtype(network)
    originals = {}
    for name, param in network.named_parameters():
        # Adapters are not among them: they are summed in their own dtype.
        if re.search(r"\b(w_\w+|\w*embed|head)$", name):
            originals[param] = param.data
            param.data = param.data.to(dtype)
    try:
        yield
    finally:
        for param, data in originals.items():
            param.data = data


def texts_at_once(network, prompt, tokens, count):
    """Return how many texts of up to so many tokens are generated at a time, `count` of a prompt.

    prompt: tokens of the longest one. The keys and values of the texts take as much memory as the
    weights, which every step reads too, but 256 MiB to 1 GiB; on CUDA a third of what training
    leaves. So does what it takes to read the prompts. The logits in float32 take 1 GiB at most.
    """
    config = network.config
    embed = network.embed
    weights = sum(param.nbytes for param in network.parameters())
    memory = min(max(weights, 1 << 28), 1 << 30)
    if embed.is_cuda:
        total = torch.cuda.get_device_properties(embed.device).total_memory
        numbers = sum(param.numel() for param in network.parameters())
        memory = max(memory, (total - 20 * numbers) // 3)  # weights, gradients, moments, reference
    size = compute_dtype(network).itemsize
    width = config.num_kv_heads * config.attention_width
    cache = 2 * size * width * len(network.layers) * (tokens + ROOM)  # keys and values
    logits = 4 * config.vocab_size
    texts = int(min(4096, min(memory, 1 << 30) // logits, memory // cache))
    # A prompt is read in one piece: its scores of attention and the hidden units of an MLP are whole.
    hidden = config.mlp_hidden or config.mlp_mult * config.model_dim
    reading = prompt * 4 * (config.num_heads * tokens + size * hidden)
    texts = min(texts, count * max(1, int(memory // reading)))
    if texts > count:
        texts -= texts % count  # whole groups
    return max(1, texts)


@torch.inference_mode()  # a tenth faster on a CPU than no_grad
def generate(
    network,
    prompts,
    count,
    max_new_tokens,
    temperature,
    seeds,
    stop,
    truncate=None,
    samples=None,
    compiled=False,
):
    """Return `count` Samples for each prompt (a list of at least one id), prompt by prompt.

    Sample i of prompt p depends on (seeds[p], i) alone, up to the last digits of the batch's matrix
    products. stop: ids that end an answer. samples: those to fill, of a subclass. See `draw`,
    and Decoder for `compiled`. Raises FloatingPointError if the network's logits are not finite.
    """
    samples = samples or [Sample() for _ in range(len(prompts) * count)]
    longest = max(map(len, prompts), default=1)
    texts = texts_at_once(network, longest, longest + max_new_tokens, count)
    for start in range(0, len(samples), texts):
        live = samples[start : start + texts]  # those of the decoder's rows; ended ones leave both
        rows = range(start, start + len(live))
        first = start // count  # number of the first row's prompt
        places = torch.arange(len(rows))  # of the live ones among `rows`
        uniform = uniform_numbers([[*seeds[row // count], row % count] for row in rows])
        # Each prompt is read once; then its cache is copied for each of its samples.
        decoder = Decoder(network, prompts[first : rows[-1] // count + 1], compiled)
        decoder.take([row // count - first for row in rows])
        picks = None
        step = 0  # tokens behind the prompt so far, drawn or told
        while step < max_new_tokens:
            if step:  # the prompts have given the first logits
                decoder(picks)
            numbers = next(uniform)[places].to(decoder.logits.device)
            picks, logps = draw(decoder.logits, temperature, numbers, truncate)
            step += 1
            tokens = picks.tolist()
            for row, logp in enumerate(logps.tolist()):
                if not live[row].finished:
                    tokens[row] = live[row].take(tokens[row], logp, stop)
            running = [row for row, sample in enumerate(live) if not sample.finished]
            if not running:
                break
            if live[0].reply:
                # What all texts are told is read at once, not token by token.
                told = [len(live[row].given) for row in running]
                told = min(*told, max_new_tokens - step)
                step += told
                for _ in range(told):
                    next(uniform)  # row and step decide a number
                pairs = zip(tokens, live, strict=True)
                heard = [torch.tensor([token, *sample.listen(told)]) for token, sample in pairs]
                picks = pad_sequence(heard, True).to(picks.device)  # finished texts hear nothing
            # Ended texts leave together, because a GPU then records its graph anew. A single text
            # stays beside an ended one: a step of one row would be compiled anew.
            share = 0.5 if decoder.logits.is_cuda else 0.8
            if 1 < len(running) < share * len(live):
                live = [live[row] for row in running]
                places = places[running]
                decoder.take(running)
                picks = picks[running]
    return samples


# === end: generation ===


# === shared: split ===
def prompt_key(turns):
    """Return a hash of the turns, (role token, text, …), before the first answer to a user.

    It is the same for a conversation and for one that goes on from it. Otherwise the model would
    already have seen the earlier answers of held-out conversations.
    """
    prompt = []
    for role, text, *_ in turns:
        if role == "<|assistant|>" and "<|user|>" in dict(prompt):
            break
        prompt.append((role, text))
    return int(hashlib.blake2b(json.dumps(prompt).encode(), digest_size=8).hexdigest(), 16)


# === end: split ===


# === shared: rewards ===
USER_FOLDERS = []  # of the files that import_file has imported; sys.path begins with them


class RewardFault(UserError):
    """A fault of a user's file."""

    traceback = ""  # frames of the user's code


@dataclass
class RewardFunction:
    """A reward function with TRL's signature: its name in the log, and its weight in the total."""

    name: str
    call: Callable = None
    weight: float = 1.0


def exact_match(prompts, completions, answer):
    """Return 1.0 for each completion that is the answer, else 0.0; None where there is no answer."""
    marks = []
    for text, right in zip(completions, answer, strict=True):
        if isinstance(text, list):  # of a prompt in messages
            text = text[0]["content"]
        marks.append(float(text.strip() == right.strip()) if isinstance(right, str) else None)
    return marks


def file_fault(prefix, error):
    """Return the RewardFault of an exception that a user's code raised; raise a Ctrl-C again."""
    if is_interrupt(error):
        raise error
    frames = error.__traceback__
    while frames and frames.tb_frame.f_globals is globals():
        frames = frames.tb_next
    name, *_ = traceback.format_exception_only(error)[-1].strip().split("\n")
    place = ""
    for frame, line in traceback.walk_tb(frames):
        if frame.f_globals is not globals():
            place = f" ({frame.f_code.co_filename}, line {line})"
    # The last frames and characters: recursion has 1000 frames, and a message may be of any length.
    lines = traceback.format_exception(type(error), error, frames, limit=-20)
    text = "".join(f"{line.rstrip():.2000}\n" for line in lines)
    fault = RewardFault(f"{prefix} raised {name:.300}{place}")
    fault.traceback = text[-10000:]
    return fault


def is_interrupt(error):
    """Return whether an exception is the Ctrl-C of a user, which nothing may catch.

    Once a StopSignal handles Ctrl-C, a KeyboardInterrupt is one that code itself has raised.
    """
    handler = signal.getsignal(signal.SIGINT)
    return isinstance(error, KeyboardInterrupt) and handler is signal.default_int_handler


@contextlib.contextmanager
def first_on_path(folder):
    """A block in which `import` finds the files of a folder before all others, as it does for the
    file that Python runs. Afterwards the folder comes after those of earlier blocks.
    """
    others = {}  # modules that have a name of a file in this folder
    for path in folder.glob("*.py"):
        file = getattr(sys.modules.get(path.stem), "__file__", None)
        if file and Path(file).resolve() != path:
            others[path.stem] = sys.modules.pop(path.stem)
    folder = str(folder)
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.modules.update(others)
        sys.path.remove(folder)
        if folder not in USER_FOLDERS:
            sys.path.insert(len(USER_FOLDERS), folder)
            USER_FOLDERS.append(folder)


def import_file(path):
    """Return the module that a Python file is, as `import` makes it: with the files beside it, and
    with a name by which processes of a pool find its functions.

    If another module has the file's name, this one is folder.name. Raises ImportError.
    """
    path = Path(path).resolve()
    name = path.stem
    if name in sys.modules:
        if Path(getattr(sys.modules[name], "__file__", None) or "").resolve() == path:
            return sys.modules[name]
        name = f"{path.parent.name}.{name}"
        if str(path.parent.parent) not in sys.path:
            sys.path.append(str(path.parent.parent))
    with first_on_path(path.parent):
        module = importlib.import_module(name)
    if Path(module.__file__).resolve() != path:
        raise ImportError(f"{module.__file__} has the name {name}, too; rename {path}")
    return module


def from_file(setting, spec, kind):
    """Return what path.py:name names. Raises UserError; `kind` says what it must be."""
    path, _, name = spec.rpartition(":")
    must = f"must be {kind}"
    if not (path.endswith(".py") and name):
        raise UserError(f"{setting}={spec!r}: {must}")
    if not Path(path).is_file():
        raise UserError(f"{setting}={spec!r}: {must}; there is no file {path!r}")
    try:
        module = import_file(path)
    except BaseException as error:  # sys.exit in a file must not end the run in silence
        fault = file_fault(f"{setting}={spec!r}: {path}", error)
        sys.stderr.write(fault.traceback)
        raise fault from None
    if not hasattr(module, name):
        raise UserError(f"{setting}={spec!r}: {must}; {path} has no {name!r}")
    return getattr(module, name)


def load_reward_functions(spec, setting="REWARD"):
    """Return the RewardFunctions that a setting names: parts `exact` or path.py:function, each maybe with
    :WEIGHT, between commas. Raises UserError.
    """
    kind = "exact, or path.py:function with such a function; FUNCTION:WEIGHT,FUNCTION:WEIGHT"
    functions = []
    for part in spec.split(","):
        name = part.strip()
        weight = "1"
        with_weight = re.fullmatch(r"(exact|.+\.py:[^:]+):([^:]*)", name)
        if with_weight:
            name, weight = with_weight.groups()
        if not re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d{1,2})?", weight):
            raise UserError(
                f"{setting}={spec!r}: the weight of {name} must be a number, not {weight!r}"
            )
        call = exact_match
        if name != "exact":
            call = from_file(setting, name, kind)
        if not callable(call):
            raise UserError(f"{setting}={spec!r}: must be {kind}; {name} is {call!r:.80}")
        functions.append(RewardFunction(name.rpartition(":")[2], call, float(weight)))
    return distinct_names(functions)


def with_mark(functions, spec):
    """Return the RewardFunctions of held-out answers, of which the first marks these: see is_right.

    spec: MARK, which names a function that has no weight in the total; empty: REWARD's first one
    marks. Raises UserError.
    """
    if not spec:
        return functions
    mark, *others = load_reward_functions(spec, "MARK")
    if others or mark.weight != 1:
        raise UserError(f"MARK={spec!r}: must be one function, and has no weight")
    # If MARK is also in REWARD, it goes to the front with its weight; the others stay in order.
    if mark.call in [function.call for function in functions]:
        return sorted(functions, key=lambda function: function.call is not mark.call)
    mark.weight = 0.0
    return distinct_names([mark, *functions])


def distinct_names(functions):
    """Return RewardFunctions with distinct names: of equal ones the second gets the suffix _2."""
    taken = set()
    for function in functions:
        name = function.name
        number = 1
        while function.name in taken:
            number += 1
            function.name = f"{name}_{number}"
        taken.add(function.name)
    return functions


def taken_columns(function, columns):
    """Return the columns that a reward function takes, by its signature. Raises RewardFault."""
    try:
        parameters = inspect.signature(function.call).parameters.values()
    except (TypeError, ValueError):  # a few functions that are written in C have no signature
        return columns
    taken = {}
    for parameter in parameters:
        if parameter.kind is parameter.VAR_KEYWORD:
            # TRL's functions get the prompts under one name.
            taken |= {name: columns[name] for name in columns if name != "prompt"}
        elif parameter.name in columns:
            taken[parameter.name] = columns[parameter.name]
        elif parameter.default is parameter.empty and parameter.kind != parameter.VAR_POSITIONAL:
            raise RewardFault(
                f"reward {function.name}: needs the column {parameter.name!r}; there are "
                f"{', '.join(columns)}"
            )
    return taken


def reward_values(name, returned, count):
    """Return what a reward function returned, as `count` floats; None where it does not apply.

    Raises RewardFault.
    """
    if isinstance(returned, Tensor):
        returned = returned.tolist()
    items = []
    if hasattr(returned, "__iter__") and not isinstance(returned, (str, bytes, dict, set)):
        items = [*itertools.islice(returned, count + 1)]  # a generator may have no end
    values = []
    for item in items:
        try:
            if isinstance(item, (str, bytes)):
                raise TypeError
            values.append(item if item is None else float(item))
        except (TypeError, ValueError, OverflowError):
            values = []
            break
    if len(values) != count:
        raise RewardFault(
            f"reward {name}: must return a list of {count} numbers (None: does not apply), not "
            f"{' '.join(reprlib.repr(returned).split())}"
        )
    return values


@functools.cache
def background_loop():
    """Return the event loop of a thread of its own, in which the async functions of users run.

    There is one for the whole run, because what a file keeps between steps, such as a session or a
    semaphore, belongs to a loop. The main thread of a notebook has a loop that runs already.
    """
    loop = asyncio.new_event_loop()

    def run():
        while True:
            with contextlib.suppress(BaseException):  # sys.exit in a task stops the loop; go on
                loop.run_forever()

    threading.Thread(target=run, daemon=True).start()
    return loop


def awaited(value):
    """Return a value, or what it gives if it is what an async function returned."""
    if not inspect.isawaitable(value):
        return value

    async def outcome():
        return await value

    future = asyncio.run_coroutine_threadsafe(outcome(), background_loop())
    try:
        return future.result()
    finally:
        future.cancel()  # after a time-out


@contextlib.contextmanager
def reward_call(function, count, log, seconds):
    """A block that calls a reward function for `count` answers: what it raises becomes a RewardFault
    with the function's name, and the log names one that takes more than `seconds`."""
    what = f"reward {function.name}"
    begin = time.perf_counter()
    try:
        with heartbeat(log, lambda: f"{what}: called for {count} answers"):
            yield
    except RewardFault:
        raise
    except BaseException as error:  # sys.exit in a function must not end the run in silence
        raise file_fault(what, error) from None
    passed = time.perf_counter() - begin
    if passed > seconds:
        log(f"{what}: {passed:.1f} s for {count} answers, more than REWARD_SECONDS={seconds:g}")


def own_copy(value):
    """Return a copy of a list or dict; any other value, which a program may have given, is itself."""
    return copy.deepcopy(value) if isinstance(value, (dict, list)) else value


def reward_columns(rows, texts):
    """Return the arguments of reward functions, lists of a value for each completion.

    Each has its own, so that a function which changes a prompt in messages, or a list, changes no
    problem and no other completion's.
    """
    columns = {"prompts": [own_copy(row["prompt"]) for row in rows], "completions": []}
    for row, text in zip(rows, texts, strict=True):
        if isinstance(row["prompt"], list):
            text = [{"role": "assistant", "content": text}]
        columns["completions"].append(text)
    for name in rows[0]:
        if name not in columns:
            columns[name] = [own_copy(row[name]) for row in rows]
    return columns


def call_reward_functions(functions, rows, texts, log, seconds):
    """Return what reward functions give completions, by name: numbers, None where one does not apply.

    rows: the columns of each completion's problem, with all columns in each. texts: the
    completions; of a prompt in messages a function gets a list with a message, as in TRL. Async
    functions are awaited together. seconds: see reward_call. Raises RewardFault.
    """
    values = {function.name: None for function in functions}
    pending = []  # async functions

    async def finish(function, returned):
        with reward_call(function, len(texts), log, seconds):
            values[function.name] = reward_values(function.name, await returned, len(texts))

    async def finish_all():
        await asyncio.gather(*pending)

    for function in functions:
        with reward_call(function, len(texts), log, seconds):
            columns = reward_columns(rows, texts)  # each function has lists of its own
            returned = function.call(**taken_columns(function, columns))
            if inspect.isawaitable(returned):
                pending.append(finish(function, returned))
            else:
                values[function.name] = reward_values(function.name, returned, len(texts))
    if pending:
        awaited(finish_all())
    for name, column in values.items():
        for value, row, text in zip(column, rows, texts, strict=True):
            if value is not None and not abs(value) < 1e15:
                raise RewardFault(
                    f"reward {name}: must be finite and below 1e15, or None, not {value} for the "
                    f"prompt {reprlib.repr(row['prompt'])}, completion {text!r:.80}"
                )
    return values


def weigh(functions, answers):
    """Set each answer's `reward`, the weighted sum of its `rewards` that apply (0 if none does)."""
    for answer in answers:
        answer.reward = 0.0
        for function in functions:
            answer.reward += function.weight * (answer.rewards[function.name] or 0.0)


def is_right(answer, functions):
    """Return whether an answer is right: the reward of the first function is 1 or more.

    Their sum does not decide: parts that are no proof of a right answer could add up to 1. In a
    conversation, which has no functions, the sum of the environment's rewards does.
    """
    value = answer.rewards[functions[0].name] if functions else answer.reward
    return value is not None and value >= 1


# === end: rewards ===


# === shared: problems ===
CHOICE_PROBLEMS = 256  # that choose between raw and averaged weights, at most
LETTERS = 512  # of a token, at most; texts that must have more tokens than fit are not tokenized


def read_problems(name, text, reward, check, log):
    """Return key -> problem of a setting's files, see problem_of; of equal prompts the first row counts.

    reward: names of the functions; with `exact` a row without an answer is left out. check: gets a
    problem and a set of notes, see read_rows; raises RowError for a prompt that cannot be used.
    """
    wants_answers = needs_answer(reward)
    problems = {}

    def parse(row, notes):
        problem = problem_of(row, notes)
        check(problem, notes)
        if wants_answers:
            require_answer(problem)
        first = problems.setdefault(json.dumps(query_turns(problem)), problem)
        if first is not problem:
            same = "the same" if first["answer"] == problem["answer"] else "another"
            raise RowError(f"the prompt of an earlier row, with {same} answer")
        return "problems", problem

    for path in listed_files(name, text):
        used = read_rows(path, parse, log)
        unanswered = sum(not is_answered(problem) for problem in used)
        if unanswered:
            log(f"data: {path}: {unanswered} of {len(used)} problems have no answer")
    return problems


def room_check(settings, tokenizer, context):
    """Return a function that raises RowError for a prompt that leaves no room for an answer."""
    room = context - settings.max_new_tokens
    if room < 1:
        raise UserError(
            f"MAX_NEW_TOKENS={settings.max_new_tokens}: must be below the model's context, {context}"
        )

    def check(problem, notes):
        turns = query_turns(problem)
        is_long = sum(len(text) for _, text, *_ in turns) > LETTERS * room
        if is_long or len(asked_ids(tokenizer, fitted_turns(tokenizer, turns, notes))) > room:
            raise RowError(
                f"a prompt of more than {room} tokens, with MAX_NEW_TOKENS="
                f"{settings.max_new_tokens} and the model's context of {context}"
            )

    return check


def unchecked(problem, notes):
    """Take any problem."""


def split_problems(settings, check=unchecked, log=print):
    """Return the problems of TRAIN_FILES to train on and to choose between averages, and held-out ones.

    These are of VAL_FILES, whose prompts are left out of training, or else one prompt in ten, the
    same ones as in train_sft.py. All have the same columns. check: see read_problems. log: function
    of a line or of a RowReport. Raises UserError.
    """
    reward = f"{settings.reward},{settings.mark}"
    only_teacher = getattr(settings, "teacher", "") and settings.kd_alpha == 1
    if only_teacher or getattr(settings, "reward_model", ""):
        reward = ""  # it marks answers, and nothing is learned from it: rows without one train, too
    held_out = read_problems("VAL_FILES", settings.val_files, reward, check, log)
    problems = read_problems("TRAIN_FILES", settings.train_files, reward, check, log)
    train = {}
    both = 0
    for key, problem in problems.items():
        number = prompt_key(query_turns(problem))
        if not settings.val_files and number % 10 == 0:
            held_out[key] = problem
        elif key in held_out:
            both += 1
        else:
            train[key] = problem
    if both:
        log(f"data: {both} prompts of TRAIN_FILES are held out, in VAL_FILES")
    if not train or len(held_out) < 2:
        raise UserError(
            f"TRAIN_FILES={settings.train_files!r}: {len(train)} problems to train on, "
            f"{len(held_out)} held out; must be 1 and 2 at least: add rows, or name others by VAL_FILES"
        )
    columns = {}
    for problem in itertools.chain(train.values(), held_out.values()):
        columns.update(dict.fromkeys(problem))
    for name in columns.keys() & {"prompts", "completions"}:
        log(f"data: column {name!r} does not reach REWARD, whose own argument has the name")
    train = [{**columns, **problem} for problem in train.values()]
    held_out = [{**columns, **problem} for problem in held_out.values()]
    random.Random(settings.seed).shuffle(train)
    choice = []  # without averages there is nothing to choose, and every problem trains
    if settings.ema or settings.swa:
        count = min(CHOICE_PROBLEMS, len(train) // 10)
        choice = train[:count] or train  # of fewer than 10 all choose, and all train
        train = train[count:]
    if len(held_out) > settings.eval_prompts:
        log(f"data: of {len(held_out)} held-out problems the first {settings.eval_prompts} score")
    return train, choice, held_out[: settings.eval_prompts]


@functools.lru_cache(2)
def pass_order(count, seed, epoch):
    """Return the order of `count` problems in a pass over all; the first pass has them as they are."""
    if epoch == 0:
        return range(count)
    return np.random.default_rng([seed, epoch]).permutation(count).tolist()


def problems_of_step(problems, step, count, seed):
    """Return the `count` problems of a step: each pass has all of them, in an order of its own."""
    chosen = []
    for number in range(step * count, (step + 1) * count):
        epoch, place = divmod(number, len(problems))
        chosen.append(problems[pass_order(len(problems), seed, epoch)[place]])
    return chosen


# === end: problems ===


# === shared: responses ===
def row_features(network, batch):
    """Return the features of rows (B, T, dim) for batch.ids and batch.doc (B, T), padded on the right.

    On CUDA rows are padded to a multiple of 256 tokens, or to the model's context: each new length
    would take up to a second, to be compiled or planned.
    """
    length = batch.ids.size(1)
    room = max(0, network.config.train_seq_len - length)
    more = min(-length % 256, room) if batch.ids.is_cuda else 0
    ids, doc = (F.pad(x, (0, more)) for x in (batch.ids, batch.doc))
    return network.features(ids, doc=doc)[:, :length]


def token_logps(network, batch, temperature=1.0):
    """Return log-probabilities (B, T) of batch.targets, 0 where batch.mask is false.

    See token_scores.
    """
    logps, _ = token_scores(network, batch, temperature, with_entropies=False)
    return logps


def token_scores(network, batch, temperature, with_entropies=True, entropy_grad=False):
    """Return log-probabilities (B, T) of batch.targets, and the entropies of their distributions.

    Both are 0 where batch.mask is false. Logits are made for some tokens at a time and made again
    in the backward pass: all of them, (B, T, vocabulary), would take more memory than the network.
    with_entropies: otherwise they are 0, because they take two more passes over the logits.
    entropy_grad: whether the entropies have a gradient; otherwise no graph is kept for them.
    """
    # Several tensors of these logits live at a time, of up to 1 GiB in float32.
    count = min(4096, 2**28 // network.config.vocab_size)

    def chunk_logps(features, targets):
        logits = network.logits(features)  # (tokens, vocabulary)
        if temperature != 1:
            logits = logits / temperature
        logps = logits.log_softmax(-1)
        picked = logps.gather(1, targets[:, None])[:, 0]
        if not with_entropies:
            return picked, torch.zeros_like(picked)
        # Not by special.entr, whose gradient is a NaN where a probability is 0.
        with torch.set_grad_enabled(entropy_grad):
            entropies = -(logps.exp() * logps).sum(-1)
        return picked, entropies

    features = row_features(network, batch)[batch.mask].split(count)  # (tokens, dim) each
    targets = batch.targets[batch.mask].split(count)
    chunks = [
        activation_checkpoint(chunk_logps, *chunk, use_reentrant=False)
        for chunk in zip(features, targets, strict=True)
    ]
    logps, entropies = map(torch.cat, zip(*chunks, strict=True))
    zeros = logps.new_zeros(batch.mask.shape)
    return zeros.masked_scatter(batch.mask, logps), zeros.masked_scatter(batch.mask, entropies)


def held_out_metrics(scores):
    """Return held-out scores for the log and the tracker: of a score with an interval, the mean."""
    return {f"held_out/{name}": np.ravel(value)[0] for name, value in scores.items()}


def score_table(columns, names):
    """Return scores as a table for the log. columns: title -> name of a score -> its value.

    A value is a number, or a mean and the ends of its interval. names: of the scores to show.
    """
    lines = ["".join(f"  {title:>30s}" for title in ["", *columns])]
    for name in names:
        line = f"  {name:>30s}"
        for scores in columns.values():
            value = scores.get(name, "")
            if isinstance(value, list):
                value = "{:.4f} [{:.4f}, {:.4f}]".format(*value)
            line += f"  {value:>30}"
        lines.append(line)
    return "\n".join(lines)


# === end: responses ===


# === shared: start ===
# A step that takes longer than this and than 20 median steps prints the stacks of all threads.
HANG_SECONDS = 300.0


def imported_defaults(lora_rank, objective=""):
    """Return the settings that an imported start has in place of the defaults; see imported_values.

    Its weights are a good model already: high rates ruin it in a few steps. So do averages with
    weights of long ago, in a run of few steps. Packing takes all the bytes that it needs: 8 bits
    lost less than 0.01 bits per byte of SmolLM2 (docs/lab.md). Its texts are longer, too.
    """
    rate, lora_rate = IMPORTED_RATES.get(objective, IMPORTED_RATES[""])
    return {
        "learning_rate": lora_rate if lora_rank else rate,
        "qat": False,
        "ema": False,
        "swa": False,
        "matrix_bits": 8,
        "artifact_bytes_max": 0,
        **IMPORTED_DEFAULTS,
    }


def start_settings(given):
    """Return values in place of the defaults: those of a run that goes on, or for an imported start.

    given: name of a setting -> value. Raises UserError.
    """
    values = stored_settings(given)
    # A chat template may write the date (Llama 3.2). In all its days a run has that of the first.
    asked = os.environ.get("SOURCE_DATE_EPOCH")
    date = values.pop("date", None) or asked or calendar.timegm(time.localtime())
    if asked and asked != date:
        print(f"note: SOURCE_DATE_EPOCH={asked} is not used: the run has {date}", file=sys.stderr)
    try:
        os.environ["SOURCE_DATE_EPOCH"] = str(int(date))
    except ValueError:
        raise UserError(
            f"SOURCE_DATE_EPOCH={date!r}: must be seconds since 1970, or unset"
        ) from None
    if values or not given.get("INIT_FROM"):
        return values
    defaults = imported_defaults(given.get("LORA_RANK", 0) != 0, given.get("OBJECTIVE", ""))
    return imported_values(find_start(given["INIT_FROM"]), defaults)


class Notes(list):
    """What was found in files and rows, which waits for the log; an error that comes first prints it."""

    def __init__(self):
        ERROR_LOGS[:] = [self]  # until Log.open

    def write(self, error):
        """Print the notes, because `error` ends the script."""
        write_stream(sys.stdout, "".join(f"{note}\n" for note in self))


def load_start(settings):
    """Return the network of INIT_FROM, on the CPU, its tokenizer, and their file.

    Of a run it has the unrounded weights, if they are there. Raises UserError.
    """
    if settings.lora_rank and settings.qat:
        raise UserError("QAT=1: adapters are not quantized; must be 0 with LORA_RANK")
    network, tokenizer, source = load_stored(find_start(settings.init_from))
    merge_lora(network)  # a checkpoint may have adapters; the run makes its own
    network.activation_checkpointing = settings.activation_checkpointing
    return set_dtype(network, settings), tokenizer, source


def note_limits(settings, config, tokenizer, log):
    """Log what an imported model may not do as it should: end its answers, or see all of its text."""
    facts = tokenizer.facts
    if settings.lora_rank and "template_end" in facts:
        names = {i: name for name, i in facts["added"].items()}
        log(
            f"note: LORA_RANK={settings.lora_rank}: only the chat template ends answers with "
            f"{names[facts['template_end']]!r}, which a base model may never have learned to write, "
            "and adapters do not train its embedding: if answers do not end, train with LORA_RANK=0 first"
        )
    longest = getattr(settings, "train_seq_len", 0) or settings.max_new_tokens
    if 0 < config.context < longest:
        log(
            f"note: texts may have {longest} tokens, but the imported model was made for "
            f"{config.context}: it has never seen what comes after them"
        )


def set_dtype(network, settings):
    """Let a network compute in DTYPE; return it. With `auto` it keeps what it has, but computes in
    float32 if there is a GPU without units for bfloat16.
    """
    if settings.dtype != "auto":
        network.dtype = getattr(torch, settings.dtype)
    elif torch.cuda.is_available() and gpu_dtype() == torch.float32:
        network.dtype = torch.float32
    return network


def freeze_model(model, trainable_layers=("lora",)):
    """Train only the parameters whose names contain one of these words, and return the model.

    One word may be a string. Raises UserError if no parameter does.
    """
    if isinstance(trainable_layers, str):
        trainable_layers = [trainable_layers]
    for name, param in model.named_parameters():
        param.requires_grad_(any(word in name for word in trainable_layers))
    if not any(param.requires_grad for param in model.parameters()):
        raise UserError(
            f"freeze_model: no parameter has one of {list(trainable_layers)} in its name"
        )
    return model


def adapt(network, settings, device):
    """With LORA_RANK, put adapters on the network, and train these alone.

    If it computes in bfloat16, its frozen matrices are kept in it. Vectors are not: they are small,
    and some pass through exp and softplus.
    """
    if settings.lora_rank:
        set_dtype(network, settings)
        with torch.random.fork_rng(devices=[]):  # a program's own random draws go on
            torch.default_generator.manual_seed(settings.seed)
            setup_lora_adapter(network, settings.lora_rank, settings.lora_alpha)
        freeze_model(network)
        automatic = torch.bfloat16 if device.type == "cuda" else None
        is_half = (network.dtype or automatic) == torch.bfloat16
        for param in network.parameters():
            if is_half and not param.requires_grad and param.ndim > 1:
                param.data = param.data.bfloat16()


def trained_parameters(network, settings):
    """Return name -> parameter of those that are trained, each with a gradient of zeros.

    Raises UserError for a network without the adapters that LORA_RANK asks for.
    """
    has_adapters = any(name.endswith(".lora_a") for name, _ in network.named_parameters())
    if settings.lora_rank and not has_adapters:
        raise UserError(
            f"LORA_RANK={settings.lora_rank}: the network has no adapters; call "
            "adapt(network, settings, device) before the trainer is made"
        )
    params = {}
    for name, param in network.named_parameters():
        if param.requires_grad:
            param.grad = torch.zeros_like(param)
            params[name] = param
    return params


def fitting_tokens(network):
    """Return the tokens whose activations take about half of the free memory; of 1 GiB on a CPU."""
    free = 1 << 30
    if network.embed.is_cuda:
        free, _ = torch.cuda.mem_get_info()
    # By tools/experiments/memory.py a token takes 75 to 107 bytes per channel and layer of Llama and
    # Qwen3, and 247 of Qwen3.5, whose Gated DeltaNet is wider.
    return max(1024, free // 2 // (250 * network.config.model_dim * len(network.layers)))


# === end: start ===


# === shared: choice ===
def choose_weights(params, averages, score):
    """Give the parameters the raw or averaged values with the highest score(name); return their name.

    averages: name -> Average. Nothing is scored where none of them has values.
    """
    params = [param.detach() for param in params]
    candidates = {"raw": params}
    for name, average in averages.items():
        if average.count:
            candidates[name] = average.values
    if len(candidates) == 1:
        return "raw"
    scores = {}
    for name, values in candidates.items():
        with swapped(params, values):
            scores[name] = score(name)
    chosen = max(scores, key=scores.get)
    torch._foreach_copy_(params, candidates[chosen])
    return chosen


# === end: choice ===


# === shared: recorded ===
RECORDED_PROMPTS = 4  # whose answers are recorded at a step or a scoring
SHOWN_CHARACTERS = 400  # of a text in the log and in errors, at most


def shown_text(text, limit=SHOWN_CHARACTERS):
    """Return a text in quotes on one line: newlines as \\n, other control characters escaped.

    Of a long text its middle is left out, with the count of its characters: rewards are hacked at
    both ends.
    """
    if len(text) <= limit:
        return repr(text)
    end = limit // 4
    begin = limit - end
    middle = f"[{len(text) - limit} characters left out]"
    return f"{text[:begin]!r} {middle} {text[-end:]!r}"


def record_rows(run, phase, step, rows, lines):
    """Append rows of a step, dicts with the same names, to samples.jsonl of a run; rank 0 does.

    The tracker gets them, too: W&B as a table, TensorBoard as lines of text.
    """
    if run.runtime.rank or not rows:
        return
    rows = [{"step": step, "phase": phase, **row} for row in rows]
    lines_of_rows = [json.dumps(row, ensure_ascii=False) for row in rows]
    LineFile(run.folder / "samples.jsonl").write("\n".join(lines_of_rows))
    # Markdown takes lines that begin with four spaces as they are.
    shown = "\n".join(f"    {line}" for line in lines)
    if run.settings.tracker == "wandb":
        import wandb

        shown = wandb.Table(columns=[*rows[0]], allow_mixed_types=True)
        for row in rows:  # rewards by function are a dict
            shown.add_data(*(str(x) if isinstance(x, dict) else x for x in row.values()))
    run.log.track({f"samples/{phase}": shown}, step)


# === end: recorded ===


# === shared: intervals ===
def mean_interval(values):
    """Return the mean of (n,) values of different prompts, and the ends of its 95% interval.

    The interval is the normal approximation.
    """
    mean = values.mean().item()
    half = 1.96 * values.std().item() / len(values) ** 0.5
    return [mean, mean - half, mean + half]


# === end: intervals ===


# === shared: samples ===
def shown_answer(answer, limit=SHOWN_CHARACTERS):
    """Return the reward, its parts and the text of an Answer on one line."""
    parts = ""
    if len(answer.rewards) > 1:
        values = {name: "none" if x is None else f"{x:.4g}" for name, x in answer.rewards.items()}
        parts = f" ({name_values(values)})"
    cut = "" if answer.finished else ", cut at MAX_NEW_TOKENS"
    return f"{answer.reward:.4g}{parts} {shown_text(answer.text, limit)}{cut}"


def shown_prompt(answer):
    """Return the prompt of an Answer, and the answer that its row wants, if it has one, on one line."""
    row = answer.row()
    wanted = f", wanted {shown_text(str(row['answer']))}" if row["answer"] else ""
    return f"prompt {shown_text(row['prompt'])}{wanted}"


def shown_groups(groups):
    """Return lines that show the prompts and answers of groups: each a prompt's Answers."""
    lines = []
    for group in groups:
        lines.append(shown_prompt(group[0]))
        lines += [f"    {shown_answer(answer)}" for answer in group]
    return lines


def widest(groups):
    """Return the group, among the first ones, whose rewards differ most."""

    def spread(group):
        rewards = [answer.reward for answer in group]
        return max(rewards) - min(rewards)

    return max(groups[:RECORDED_PROMPTS], key=spread)


class Samples:
    """samples.jsonl of a run: some prompts, all their completions and what these are rewarded with.

    It has a JSON object a line, for steps that are multiples of SAMPLES_EVERY, for the first one,
    and for each scoring. The log has a prompt's best and worst answer at the start, at each tenth of
    the run and at the end. All of them are rank 0's: other ranks record nothing.
    """

    def __init__(self, run, has_advantages=True):
        self.run = run
        self.has_advantages = has_advantages  # of answers; PPO's are of tokens
        self.tenth = 0  # of the run, whose answers the log has

    def record(self, phase, step, groups):
        """Record the groups of a step; groups: each a prompt's Answers."""
        groups = groups[:RECORDED_PROMPTS]
        rows = [answer.row() for answer in itertools.chain(*groups)]
        if phase == "held_out" or not self.has_advantages:
            rows = [{**row, "advantage": None} for row in rows]
        record_rows(self.run, phase, step, rows, shown_groups(groups))

    def show(self, title, group):
        """Log the prompt of a group, the mean of its rewards, and its best and worst answer."""
        group = sorted(group, key=lambda answer: answer.reward)
        mean = statistics.fmean(answer.reward for answer in group)
        log = self.run.log
        log(f"sample: {title}, {shown_prompt(group[0])}, mean reward of {len(group)}: {mean:.4g}")
        log(f"sample:   best  {shown_answer(group[-1])}")
        log(f"sample:   worst {shown_answer(group[0])}")

    def scored(self, title, exam):
        """Record the answers of a scoring. Log those to the first prompt, the same at each scoring: the
        greedy one, the best and the worst sample.
        """
        step = self.run.step
        if exam.answers:
            self.record("held_out", step, exam.answers)
            greedy, *samples = exam.answers[0]
            self.show(f"{title}, held out", samples or [greedy])
            self.run.log(f"sample:   greedy {shown_answer(greedy)}")

    def trained(self, rollout, progress):
        """Record the answers of the step that begins, if it is due; log two at each tenth."""
        run = self.run
        every = run.settings.samples_every
        step = run.step + 1
        if every and (step == 1 or step % every == 0):
            self.record("train", step, rollout.groups)
        tenth = min(9, int(10 * progress))  # the last one is the end's
        if tenth > self.tenth:
            self.show(f"step {step}, {progress:.0%} of the run", widest(rollout.groups))
        self.tenth = tenth


def dead_start(run, rollout, reason):
    """Log three answers of a run whose first steps teach nothing; return the error to raise.

    They are to three prompts, if a step has so many.
    """
    firsts = zip(*rollout.groups, strict=True)  # the first answer to each prompt, then the second
    answers = [*itertools.chain(*firsts)][:3]
    for answer in answers:
        run.log(f"sample: {shown_prompt(answer)}")
        run.log(f"sample:   {shown_answer(answer)}")
    texts = "; ".join(shown_answer(answer, 60) for answer in answers)
    return UserError(
        f"INIT_FROM={run.settings.init_from!r}: {reason}, so nothing can be learned; must be another "
        "start, or problems or rewards that some answers get and others do not. Rewards and texts "
        f"of three answers: {texts}"
    )


# === end: samples ===


# === shared: answers ===
@dataclass
class Answer(Sample):
    """A sampled answer to a query."""

    query: object = None  # a string, a dict with `prompt`, or the seed of a conversation
    prompt: list[int] = ()
    text: str = ""  # of a conversation all of it, what the environment says, too
    advantage: float = 0.0  # for PPO the reward, from which it estimates those of the tokens
    reward: float = 0.0  # the weighted sum of `rewards`
    # by the function's name; None: it does not apply
    rewards: dict[str, float | None] = field(default_factory=dict)
    temperature: float = 0.0  # it was drawn at; 0: the likeliest tokens

    def length(self):
        """Return the number of tokens that the policy drew."""
        return len(self.ids) - self.logps.count(None)

    def advantages(self):
        """Return the advantage in a list: it holds for all tokens."""
        return [self.advantage]

    def prompt_text(self):
        """Return the text of the prompt."""
        return "\n".join(text for _, text, *_ in query_turns(self.query))

    def row(self):
        """Return what samples.jsonl has of the answer."""
        return {
            "prompt": self.prompt_text(),
            "completion": self.text,
            "rewards": self.rewards,
            "reward": self.reward,
            "advantage": self.advantage,
            "finished": self.finished,
            "answer": self.query.get("answer") if isinstance(self.query, dict) else None,
            "temperature": self.temperature,
        }


@dataclass
class Rollout:
    """The answers of a step, which are learned from."""

    groups: list[list[Answer]]  # of this rank, by prompt
    metrics: dict[str, float]  # of all ranks

    def mini_batches(self, count):
        """Return the answers in `count` parts of one size, which have answers to all prompts if they can.

        Of many groups nothing is learned, because their answers have one reward. In parts of whole
        groups some updates had few answers to learn from, and a step taught less (docs/lab/2026-11.md,
        2026-11-27).
        """
        # The first answers to all prompts, then the second ones, and so on.
        answers = [*itertools.chain(*zip(*self.groups, strict=True))]
        return groups_of(answers, len(answers) // count)


def deal(costs, ranks, size):
    """Return for each rank the numbers of the queries that it answers.

    costs: of each query. Each `size` queries in a row are split evenly: they go out in order of
    falling cost, one to each rank, and the costliest of them to the rank that has the least so far.
    So the mini-batches of any number of ranks have the same answers.
    """
    shares = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for start in range(0, len(costs), size):
        order = sorted(range(start, start + size), key=lambda number: -costs[number])
        for first in range(0, size, ranks):
            lightest = sorted(range(ranks), key=loads.__getitem__)
            for rank, number in zip(lightest, order[first : first + ranks], strict=True):
                shares[rank].append(number)
                loads[rank] += costs[number]
    return [sorted(share) for share in shares]


def rank_share(queries, settings, runtime):
    """Return the numbers of the queries of a step that this rank answers."""
    costs = []  # characters to read and to write; how long a conversation will be is not known
    for query in queries:
        if isinstance(query, dict):
            query = query.get("prompt"), query.get("answer")
        costs.append(len(str(query)))
    size = len(queries) // settings.mini_batches
    return deal(costs, runtime.world_size, size)[runtime.rank]


def groups_of(answers, size):
    """Return answers, which are in order, in lists of `size`."""
    return [answers[start : start + size] for start in range(0, len(answers), size)]


def token_row(answer):
    """Return an Answer's row of a batch, by name, see make_batches.

    Place i reads token i and predicts token i + 1, so the last token has no place. `advantages` has a
    number for each place, or one for all. What else a loss needs of an answer can stand beside it.
    """
    before = len(answer.prompt) - 1  # places that predict a token of the prompt: no loss there
    pairs = zip(answer.ids, answer.logps, strict=True)
    drawn = [-1 if logp is None else token for token, logp in pairs]
    return {
        "ids": [*answer.prompt, *answer.ids[:-1]],
        "targets": [*[-1] * before, *drawn],
        "sampled": [*[0.0] * before, *(logp or 0.0 for logp in answer.logps)],
        "advantages": answer.advantages(),
    }


def make_batches(answers, device, tokens):
    """Return Answers as padded batches, a row for each.

    Ids of an answer whose log-probability is None are context alone: the policy did not draw them.
    A batch has at most `tokens` tokens, or one row. Rows are padded on the right, so no padding
    enters a state. ids (B, T); doc (B, T), zeros, because a row is one document; targets (B, T),
    the token after each if it is the answer's, else -1; mask, where it is; sampled (B, T), the
    log-probabilities; advantages (B, 1), or (B, T) where tokens have their own; numbers, the places
    of the rows' answers in `answers`.
    """
    lengths = [len(answer.prompt) + len(answer.ids) for answer in answers]
    order = sorted(range(len(answers)), key=lengths.__getitem__)
    batches = []
    while order:
        count = max(1, tokens // (lengths[order[-1]] - 1))
        numbers = order[-count:]
        del order[-count:]
        rows = [token_row(answers[number]) for number in numbers]
        padded = {}
        for name in rows[0]:
            values = [torch.tensor(row[name]) for row in rows]
            padding = -1 if name == "targets" else 0
            padded[name] = pad_sequence(values, True, padding).to(device)
        doc = torch.zeros_like(padded["ids"])
        mask = padded["targets"] >= 0
        batches.append(
            SimpleNamespace(**padded, doc=doc, mask=mask, numbers=numbers, reference=None)
        )
    return batches


# === end: answers ===


# === shared: policy ===
def prompts_unit(settings, ranks):
    """Return MINI_BATCHES x ranks, which must divide the prompts of a step. Raises UserError."""
    unit = settings.mini_batches * ranks
    if settings.prompts_per_step % unit:
        raise UserError(
            f"PROMPTS_PER_STEP={settings.prompts_per_step}: must be a multiple of MINI_BATCHES x "
            f"ranks = {unit}"
        )
    return unit


def check_queries(name, queries):
    """Raise UserError unless queries can be counted and taken by their number, as those of a list."""
    if isinstance(queries, (str, dict, set)) or not hasattr(queries, "__len__"):
        raise UserError(
            f"{name}: must be a list of prompts or rows, or one split of a Dataset, not a "
            f"{type(queries).__name__}"
        )


def named_functions(functions, weights=None):
    """Return the RewardFunctions of functions (or one), with a weight for each. Raises UserError."""
    functions = [functions] if callable(functions) else [*functions]
    if not functions:
        raise UserError("reward_funcs: none; must be one at least")
    if isinstance(functions[0], RewardFunction):
        return functions
    weights = [1.0] * len(functions) if weights is None else [*weights]
    if len(weights) != len(functions):
        raise UserError(f"reward_weights={weights!r}: must be {len(functions)} numbers")
    named = []
    for function, weight in zip(functions, weights, strict=True):
        name = getattr(function, "__name__", type(function).__name__)
        named.append(RewardFunction(name, function, weight))
    return distinct_names(named)


def by_name(function):
    """Return a reward function that is called with names of arguments, as TRL does it.

    One that takes neither prompts nor completions by name gets these by position.
    """
    for name in ("prompts", "completions"):
        # It does not take the name, or is written in C and has no signature.
        with contextlib.suppress(TypeError, ValueError):
            inspect.signature(function).bind_partial(**{name: ()})
            return function

    def call(prompts, completions):
        return function(prompts, completions)

    return call


def require_part(settings, name, part):
    """Raise UserError if a setting names a part that a trainer was not given."""
    value = getattr(settings, name)
    if value and part is None:
        raise UserError(f"{name.upper()}={value!r}: pass `{name}` to the trainer, too")


def first_of_ranks(value, runtime):
    """Return on all ranks the value of the first rank that has one; value: None, or of any type."""
    if not runtime.sum(torch.tensor(float(value is not None), device=runtime.device)):
        return None
    values = [value] * runtime.world_size
    if runtime.distributed:
        dist.all_gather_object(values, value)
    return next(value for value in values if value is not None)


def raise_first(fault, runtime, log):
    """Raise the RewardFault of the first rank that has one, on all ranks, after its traceback.

    fault: of this rank, or None. Otherwise the other ranks would wait, and nothing could be saved.
    """
    first = first_of_ranks(fault, runtime)
    if first is None:
        return
    if first.traceback:
        log(first.traceback.rstrip(), sys.stderr)
    raise first


def moments(values, runtime):
    """Return mean and variance (of a sample, n - 1) over all ranks of values (..., n), float64."""
    values = values.to(runtime.device, torch.float64)
    count = runtime.sum(values.new_tensor(values.size(-1)))
    mean = runtime.sum(values.sum(-1)) / count
    squares = runtime.sum((values - mean[..., None]).square().sum(-1))
    return mean, squares / (count - 1).clamp(min=1)


def answer_metrics(answers, rewards, seconds, runtime):
    """Return what the log has of all ranks' answers.

    rewards: of this rank's answers, as they train: (n,), or by group. seconds: that it took to sample
    them. idle is the share of the time in which ranks waited.
    """
    lengths = torch.tensor([answer.length() for answer in answers])
    finished = torch.tensor([answer.finished for answer in answers])
    mean, variance = moments(torch.stack([rewards.flatten(), lengths, finished]), runtime)
    times = torch.zeros(runtime.world_size, device=runtime.device)
    times[runtime.rank] = seconds
    times = runtime.sum(times)
    metrics = {
        "reward": mean[0],
        "reward_std": variance[0].sqrt(),
        "length": mean[1],
        "finished": mean[2],
        "gen_tok_s": len(answers) * runtime.world_size * mean[1] / times.max(),
        "idle": 1 - times.mean() / times.max(),
    }
    return {name: value.item() for name, value in metrics.items()}


def reward_means(answers, runtime):
    """Return for the log the means of the rewards by name over all ranks' answers to which they
    apply; a name that applies to none is left out."""
    metrics = {}
    for name in answers[0].rewards:
        values = [one.rewards[name] for one in answers if one.rewards[name] is not None]
        sums = torch.tensor([sum(values), len(values)], dtype=torch.float64, device=runtime.device)
        total, count = runtime.sum(sums).tolist()
        if count:
            metrics[f"rewards/{name}"] = total / count
    return metrics


def update_metrics(updates, seconds):
    """Return the metrics of a step from those of its updates: a dict of 0-d tensors for each.

    loss and grad_norm become means over updates, all others means over tokens. The latter are missing
    where no token was learned, because no answer has an advantage.
    """
    rows = [torch.stack([*update.values()]).double() for update in updates]
    columns = torch.stack(rows).cpu().T  # (names, updates): all of them reach the host at once
    values = dict(zip(updates[0], columns, strict=True))
    loss = values.pop("loss")
    norm = values.pop("grad_norm")
    tokens = values.pop("tokens").sum()
    metrics = {"loss": loss.mean().item(), "grad_norm": norm.mean().item()}
    metrics["bad"] = (norm + loss).isfinite().logical_not().sum().item()  # were skipped
    metrics["train_tok_s"] = tokens.item() / seconds
    if tokens:  # a mean over none would be logged as an entropy of 0
        metrics |= {name: (value.sum() / tokens).item() for name, value in values.items()}
    return metrics


class PolicyTrainer:
    """A policy that learns from rewards: `train_step` is a rollout and its updates, `train` many.

    model: a GPT. tokenizer: of load_tokenizer. train_dataset: queries for `train`: strings, or
    dicts with `prompt`. reward_funcs: a function or a list of functions with TRL's signature, see
    call_reward_functions; reward_weights: a number for each of them, 1 if not given. ref_model: a GPT that
    KL_BETA keeps the policy near, in place of the policy as it is now. runtime: of this process, as
    present_runtime has it if not given. log: function of a line. A subclass has `sample`, `rollout`
    and `update`. Raises UserError.
    """

    def __init__(
        self,
        model,
        tokenizer,
        args=None,
        *,
        ref_model=None,
        train_dataset=(),
        reward_funcs=(),
        reward_weights=None,
        runtime=None,
        log=None,
    ):
        self.settings = settings = args or Settings()
        self.runtime = runtime or present_runtime(model.embed.device)
        set_up_device(self.runtime.device)
        self.network = set_dtype(model, settings).to(self.runtime.device)
        self.network.activation_checkpointing |= settings.activation_checkpointing
        self.tokenizer = tokenizer
        check_queries("train_dataset", train_dataset)
        self.dataset = train_dataset
        self.unit = prompts_unit(settings, self.runtime.world_size)
        self.reward_funcs = reward_funcs
        self.reward_weights = reward_weights
        self.columns = {"prompt": None}  # of all queries: an absent one is None
        self.add_columns(train_dataset)
        self.say = log  # for lines on how far sampling is; in a program there are none
        self.log = log or (lambda text, stream=None: sys.stderr.write(f"{text}\n"))
        self.is_unmarked = False  # whether the log says that to an answer no function applied
        self.ref_model = None
        if settings.kl_beta:
            # The copy shares the tensors that are not trained: with LoRA it holds adapters alone.
            frozen = {id(param): param for param in model.parameters() if not param.requires_grad}
            self.ref_model = copy.deepcopy(ref_model or model, frozen).to(self.runtime.device)
            set_dtype(self.ref_model, settings)
        self.trained = trained_parameters(model, settings)  # name -> parameter
        self.optimizers = make_optimizers(self.trained, settings, self.runtime)
        self.optimizer_state = OptimizerState(self.optimizers, self.trained)
        self.micro_tokens = settings.micro_batch_tokens or fitting_tokens(model)
        self.table = quant_table(settings.matrix_bits)
        self.stop = stop_ids(tokenizer)
        self.compiled = settings.compile  # whether steps of sampling are
        self.steps = 0  # of train_step and train so far
        # False from choose_policy on: a fault of an environment then no longer ends the run.
        self.is_training = True

    def add_columns(self, queries):
        """Take note of the columns of queries, so that a function gets all of them on each rank."""
        for query in queries:
            if isinstance(query, dict):
                self.columns.update(dict.fromkeys(query))

    def weights(self, qat):
        """Return the context of the weights that sample and learn: under QAT the rounded ones."""
        return quantized(self.network, self.table) if qat else contextlib.nullcontext()

    def prompt_ids(self, query):
        """Return the ids of a query's prompt. Raises UserError if there is no room for an answer."""
        prompt = asked_ids(self.tokenizer, query_turns(query))
        length = self.settings.max_new_tokens
        context = self.network.config.train_seq_len
        if len(prompt) + length > context:
            raise UserError(
                f"MAX_NEW_TOKENS={length}: must be less, or the prompts shorter: one has "
                f"{len(prompt)} tokens, and the model's context is {context}"
            )
        return prompt

    def score(self, answers, functions):
        """Fill in `rewards` of answers by RewardFunctions, and `reward`, their sum; return the sums (n,),
        float64.

        All ranks call it together, perhaps without an answer. Raises UserError on all ranks.
        """
        rows = []
        for answer in answers:
            query = answer.query
            row = query if isinstance(query, dict) else {"prompt": query}
            rows.append({**self.columns, **row, "completion_ids": answer.ids})
        texts = [answer.text for answer in answers]
        fault = None
        try:
            values = {}
            if answers:
                values = call_reward_functions(
                    functions, rows, texts, self.log, self.settings.reward_seconds
                )
            for place, answer in enumerate(answers):
                answer.rewards = {name: column[place] for name, column in values.items()}
        except RewardFault as error:
            fault = error
        raise_first(fault, self.runtime, self.log)
        weigh(functions, answers)
        unmarked = [{*answer.rewards.values()} == {None} for answer in answers].count(True)
        count = self.runtime.sum(torch.tensor(float(unmarked), device=self.runtime.device))
        if count and not self.is_unmarked:
            self.is_unmarked = True
            self.log(f"reward: {count:.0f} answers got None from each function; they count 0")
        return torch.tensor([answer.reward for answer in answers], dtype=torch.float64)

    def step_weights(self, sums, multiplier, skip_zero=False):
        """Take an optimizer step by the gradients of all ranks, at `multiplier` times the learning rates.

        sums: what this rank has added up for the log, by name, 0-d each; the loss is the first. Return
        their sums over all ranks, and the norm of the gradients before clipping. skip_zero: whether
        nothing moves where nothing has a gradient; else momentum alone may move the weights.
        """
        totals = torch.stack([*sums.values()])
        grads = [param.grad for param in self.trained.values()]
        norm, totals = reduce_gradients(grads, self.runtime, self.settings.grad_clip_norm, totals)
        finite = torch.isfinite(norm + totals[0])  # the gradient and the loss
        if not skip_zero or norm != 0:
            step_optimizers(self.optimizers, multiplier, finite)
        return {"grad_norm": norm, **dict(zip(sums, totals, strict=True))}

    def train_step(self, queries, reward_function=None):
        """Return the metrics of a rollout of `queries`, see train_dataset, and of its updates.

        reward_function: replaces reward_funcs, and is called as these are, or see by_name. It may be a
        list, to whose functions reward_weights apply.
        """
        if reward_function:
            self.reward_funcs = named_functions(reward_function, self.reward_weights)
            for function in self.reward_funcs:
                function.call = by_name(function.call)
        check_queries("train_step", queries)
        if not queries or len(queries) % self.unit:
            raise UserError(
                f"train_step: {len(queries)} queries; not a multiple of MINI_BATCHES x ranks = "
                f"{self.unit}"
            )
        rollout = self.rollout(queries, self.steps)
        self.steps += 1
        return {**rollout.metrics, **self.update(rollout)}

    def train(self, reward_function=None):
        """Take ITERATIONS steps over train_dataset; return the metrics of each, see train_step.

        All steps have LEARNING_RATE: schedule, averages, QAT and clock are main's.
        """
        settings = self.settings
        if not (settings.iterations and self.dataset):
            raise UserError(
                f"ITERATIONS={settings.iterations}: must be above 0, and there must be a "
                "train_dataset"
            )
        metrics = []
        for _ in range(settings.iterations):
            queries = problems_of_step(
                self.dataset, self.steps, settings.prompts_per_step, settings.seed
            )
            metrics.append(self.train_step(queries, reward_function))
        return metrics


# === end: policy ===


# === shared: exam ===
EVAL_SAMPLES = 8  # of each held-out problem
EVAL_STEP = 1 << 31  # the step in the seeds of scored samples, which no training step reaches
KEPT_PROMPTS = 32  # held-out problems of a rank whose answers are kept after a scoring


class Exam(Stateful):
    """The held-out problems, and the policy's scores before training.

    functions: RewardFunctions, see with_mark and is_right.
    """

    STATE = ("before",)

    def __init__(self, problems, functions):
        self.problems = problems
        self.functions = functions
        self.before = {}  # as of scores()
        self.answers = []  # of this rank at the last scoring, by problem: the greedy one, then samples

    def graded(self, trainer, problems, count, temperature, qat):
        """Answer each problem `count` times; return this rank's share of the Answers, and tables of all
        ranks' answers by name, (n, count) each, float64.

        The tables: `right`; of several rewards `reward`, their weighted sum, which trains; and each
        reward, NaN where it does not apply.
        """
        runtime = trainer.runtime
        share = slice(runtime.rank, None, runtime.world_size)
        seeds = [(trainer.settings.seed, EVAL_STEP, number) for number in range(len(problems))]
        answers = trainer.sample(problems[share], count, temperature, seeds[share], qat)
        trainer.score(answers, self.functions)
        rows = {"right": [is_right(answer, self.functions) for answer in answers]}
        if len(self.functions) > 1:
            rows["reward"] = [answer.reward for answer in answers]
        for function in self.functions:
            rows[f"rewards/{function.name}"] = [answer.rewards[function.name] for answer in answers]
        table = torch.tensor(np.array([*rows.values()], dtype=float))  # None becomes NaN
        tables = self.gather(trainer, table, (len(problems), count))
        return answers, dict(zip(rows, tables, strict=True))

    def gather(self, trainer, values, shape):
        """Return values (..., answers) of the ranks' shares as (..., *shape), float64. shape: the number
        of problems, and of answers to each.
        """
        runtime = trainer.runtime
        shape = *values.shape[:-1], *shape
        table = torch.zeros(shape, dtype=torch.float64, device=runtime.device)
        share = table[..., runtime.rank :: runtime.world_size, :]
        share.copy_(values.view(share.shape))
        return runtime.sum(table)

    def scores(self, trainer, qat=False):
        """Return scores by problem, (n,) each, and keep answers in `answers`, for samples.jsonl.

        Scores: greedy; mean and best of EVAL_SAMPLES samples; the samples' mean of each reward, NaN
        where it applies to none, and of several rewards that of their weighted sum.
        """
        temperature = trainer.settings.temperature
        likeliest, greedy = self.graded(trainer, self.problems, 1, 0.0, qat)
        answers, tables = self.graded(trainer, self.problems, EVAL_SAMPLES, temperature, qat)
        sampled = tables.pop("right")
        groups = zip(likeliest, groups_of(answers, EVAL_SAMPLES), strict=True)
        self.answers = [[one, *samples] for one, samples in groups][:KEPT_PROMPTS]
        scores = {
            "greedy": greedy["right"][:, 0],
            "pass1": sampled.mean(1),
            f"pass{EVAL_SAMPLES}": sampled.amax(1),
        }
        scores |= {name: table.nanmean(1) for name, table in tables.items()}
        return scores | self.more_scores(trainer, answers)

    def more_scores(self, trainer, answers):
        """Return scores of the sampled answers that a subclass has beside those of the rewards."""
        return {}

    def gain(self, after):
        """Return gains with 95% intervals, paired by problem, of the scores that the start has, too.

        A run that was resumed may have other rewards than at its start.
        """
        names = [name for name in after if name in self.before]
        return known_intervals({name: after[name] - self.before[name] for name in names})


def known_intervals(scores):
    """Return mean_interval of each score (n,) over the problems that have it, if two have."""
    intervals = {}
    for name, values in scores.items():
        known = values[~values.isnan()]
        if len(known) > 1:
            intervals[name] = mean_interval(known)
    return intervals


def score_intervals(scores):
    """Return the mean of each score (n,) with its 95% interval; of shares it ends at 0 and 1."""
    intervals = known_intervals(scores)
    for name in intervals:
        if name.startswith(("greedy", "pass")):
            intervals[name] = np.clip(intervals[name], 0, 1).tolist()
    return {"n": len(scores["greedy"]), **intervals}


@torch.no_grad()
def nats_per_token(trainer, answers):
    """Return the mean loss of the policy on answers, in nats per token, of all ranks' answers."""
    sums = torch.zeros(2, dtype=torch.float64, device=trainer.runtime.device)
    for batch in make_batches(answers, trainer.runtime.device, trainer.micro_tokens):
        logps = token_logps(trainer.network, batch)
        sums += torch.stack([-logps.sum(), batch.mask.sum()])
    nats, tokens = trainer.runtime.sum(sums).tolist()
    return nats / max(1.0, tokens)


# === end: exam ===


# === shared: policy_run ===
# What must stay when a run is resumed, beside the model's shape and the tokenizer.
IDENTITY = (
    "seed",
    "optimizer",
    "train_files",
    "val_files",
    "eval_prompts",
    "prompts_per_step",
    "group_size",
    "lora_rank",
    "lora_alpha",
    "reward_model",
    "environment",
    "teacher",
)
FIRST_STEPS = 10  # a run whose first steps teach nothing ends: a dead start
MIN_CHANGED_SHARE = 1e-3  # of the artifact's codes; fewer than this are reported


def prompts_sha256(problems):
    """Return the SHA-256 of the prompts of problems, in their order. Their answers may be mended."""
    digest = hashlib.sha256()
    for problem in problems:
        if isinstance(problem, dict):
            problem = query_turns(problem)
        digest.update(json.dumps(problem).encode())
    return digest.hexdigest()


def run_identity(settings, network, tokenizer, problems, exam):
    """Return what must stay under RESUME.

    Of the exam that is the function that marks the answers, too: `gain` would compare other marks.
    """
    return {
        **{name: getattr(settings, name, None) for name in IDENTITY},
        **asdict(network.config),
        "tokenizer_sha256": tokenizer.sha256,
        "date": os.environ.get("SOURCE_DATE_EPOCH"),  # which a chat template may write
        "problems_sha256": prompts_sha256(problems),
        "held_out_sha256": prompts_sha256(exam.problems),
        "mark": exam.functions[0].name if exam.functions else "",
    }


@contextlib.contextmanager
def saved_at_faults(run):
    """A block of the loop: its RewardFault, which all ranks raise, comes after a checkpoint.

    So does another UserError of a single process. One rank of several cannot save alone.
    """
    try:
        yield
    except UserError as error:
        if isinstance(error, RewardFault) or not run.runtime.distributed:
            run.save()
        raise


def begin_run(run, trainer, exam, samples, checkpoint):
    """Load the checkpoint, or score the start; log what is trained and where it begins."""
    settings = run.settings
    network = trainer.network
    run.parts.update(network=network, optimizers=trainer.optimizer_state, exam=exam)
    if trainer.ref_model is not None:
        run.parts["reference"] = trainer.ref_model
    run.log(f"parameters: {name_values(count_parameters(network))}")
    run.log(run.plan.describe())
    weighted = [f"{function.weight:g} x {function.name}" for function in exam.functions]
    if weighted:
        run.log(f"reward: {' + '.join(weighted)}; right: {exam.functions[0].name} is 1 or more")
    run.log(
        f"batch: a step is {settings.prompts_per_step} prompts x {settings.group_size} samples, "
        f"{settings.mini_batches} mini-batches x {settings.epochs} epochs"
    )
    run.log(
        "note: the ratios of a step's first mini-batch are 1: nothing is clipped, and the policy's "
        "loss is about 0, but its gradient is not; look at the rewards"
    )
    if checkpoint:
        # These may be missing: the checkpoint may be of a run without EMA, SWA or KL_BETA.
        run.load(checkpoint, ("ema", "swa", "reference"))
        if settings.compile:  # the first sampling compiles: now, outside the clock, not in a step
            exam.scores(trainer)
    else:
        run.log(
            f"first scores: answers to {len(exam.problems)} held-out prompts, greedily and "
            f"{EVAL_SAMPLES} samples of each"
        )
        exam.before = exam.scores(trainer)
    start = score_intervals(exam.before)
    if not checkpoint:
        run.log.metrics(0, held_out_metrics(start))
        samples.scored("start", exam)
    run.log(score_table({"before": start}, start))


def choose_policy(trainer, averages, exam, problems, log):
    """Give the policy those of raw and averaged weights that answer problems best; return a name."""
    trainer.is_training = False
    # Adapters are quantized as parts of the weights that they change.
    qat = not trainer.settings.lora_rank

    def share_of_right(name):
        _, tables = exam.graded(trainer, problems, 1, trainer.settings.temperature, qat)
        share = tables["right"].mean().item()
        log(f"weights: {name}, pass1 {share:.4f} on {len(problems)} problems")
        return share

    return choose_weights(trainer.trained.values(), averages, share_of_right)


def changed_share(source, coded, table):
    """Return the share of an artifact's codes that differ from those of the start in file `source`.

    A start that was read from an artifact lies on the quantizer's steps, and a weight that moves by
    less than half a step is rounded back. Training may then show a gain that the artifact does not
    have. Raises UserError if the file is no longer there.
    """
    start, _, _ = load_model("INIT_FROM", source)
    before = quantize_all(merge_lora(start).state_dict(), table)
    changed = 0
    count = 0
    for name, part in coded.items():
        changed += (part.codes.cpu() != before[name].codes).sum().item()
        count += part.codes.numel()
    return changed / count


def pack_policy(run, trainer, source):
    """Write model.upar, the policy alone, and its unrounded weights; return the artifact's bytes.

    source: file of the start.
    """
    network = trainer.network
    merge_lora(network)
    tensors = network.state_dict()
    tensors.pop("w_value", None)  # a critic's
    tokenizer = trainer.tokenizer
    coded = quantize_all(tensors, trainer.table)
    content = pack_artifact(
        tensors,
        coded,
        settings=asdict(network.config),
        tokenizer_sha256=tokenizer.sha256,
        meta={"seed": run.settings.seed, "tokenizer": tokenizer.file},
    )
    run.clock.stop()
    run.write_file("model.upar", content)
    write_final(run, tensors)
    if run.runtime.rank == 0:
        try:
            share = changed_share(source, coded, trainer.table)
        except UserError as error:  # another run may have deleted a checkpoint of its own
            run.log(f"packing: changed codes are not counted; {error}")
            return content
        run.log(f"packing: {share:.2%} of the codes differ from those of the start")
        if share < MIN_CHANGED_SHARE:
            run.event("few_codes_changed", share=share)
    return content


def take_file(trainer, path):
    """Give the trainer the network of an artifact, or of a checkpoint's folder."""
    network, _, _ = load_model("artifact", str(path))
    trainer.network = set_dtype(network, trainer.settings).to(trainer.runtime.device)
    trainer.compiled = False  # for a few batches it would take longer


def score_end(run, trainer, exam, samples):
    """Score the trained weights, and the policy that the artifact file alone gives back; return all
    scores for result.json.

    What packing has cost is the loss of answers that the trained policy gives to held-out problems:
    shares of right answers have intervals too wide for it.
    """
    take_file(trainer, run.folder / "final")
    after = exam.scores(trainer)
    samples.scored("end", exam)
    # One sampled answer to each problem, or up to EVAL_SAMPLES to few problems.
    count = math.ceil(KEPT_PROMPTS / max(1, len(exam.answers)))
    answers = [*itertools.chain(*(group[1 : 1 + count] for group in exam.answers))]
    nats = nats_per_token(trainer, answers)
    take_file(trainer, run.folder / "model.upar")
    scores = {
        "before": score_intervals(exam.before),
        "after": score_intervals(after),
        "gain": exam.gain(after),
        "packed": score_intervals(exam.scores(trainer)),
    }
    report_packing(run, nats_per_token(trainer, answers) - nats)
    run.log.metrics(run.step, held_out_metrics(scores["after"]))
    run.log(score_table(scores, [name for name in scores["after"] if name != "n"]))
    return scores


# === end: policy_run ===


# === shared: judge ===
def load_judge(settings, tokenizer, runtime):
    """Return the network of REWARD_MODEL on the runtime's device, or None. Raises UserError."""
    if not settings.reward_model:
        return None
    network, own_tokenizer, source = load_model("REWARD_MODEL", settings.reward_model)
    prefix = f"REWARD_MODEL={settings.reward_model!r}: {source}"
    if not hasattr(network, "w_value"):
        raise UserError(
            f"{prefix} has no value head; must be a reward model, of train_dpo.py with "
            "OBJECTIVE=reward"
        )
    if own_tokenizer.pieces != tokenizer.pieces:
        raise UserError(
            f"{prefix} has tokenizer {own_tokenizer.file}, the policy {tokenizer.file}; must be "
            "the same"
        )
    return set_dtype(merge_lora(network), settings).to(runtime.device)


def answer_end(tokenizer):
    """Return the token that ends an answer: <|end|>, or the one that an imported model's template writes."""
    if tokenizer.roles:
        return tokenizer.roles["<|end|>"]
    facts = tokenizer.facts
    turns = [("<|user|>", "Question"), ("<|assistant|>", "Answer")]
    with contextlib.suppress(UserError):  # a template may refuse these turns
        text = chat_text(tokenizer, turns, False)
        end = stop_pattern(tokenizer).search(text, max(0, text.rfind("Answer")))
        if end:
            return facts["added"][end[0]]
    return facts["stop"][-1]  # BOS, if it is one of several, comes first


@torch.no_grad()
def answer_values(network, tokenizer, answers, tokens):
    """Return the scores (n,), on the CPU, of Answers by a reward model.

    A score is w_value times the features of the answer's last token, which reads the whole. The model
    was trained on answers that end: one that was cut is scored as if it ended there, or a policy would
    gain by never ending. At most `tokens` tokens are in a batch.
    """
    end = answer_end(tokenizer)
    texts = []
    for answer in answers:
        # One target after the whole text: the mask is where its last token is.
        text = [*answer.prompt, *answer.ids]
        if not answer.finished:
            text.append(end)
        texts.append(Answer(prompt=text, ids=[0], logps=[0.0]))
    values = torch.zeros(len(answers))
    for batch in make_batches(texts, network.embed.device, tokens):
        last = row_features(network, batch)[batch.mask]  # (answers, dim)
        scores = last.to(network.w_value.dtype) @ network.w_value
        values[batch.numbers] = scores.to(values)
    return values


def judged(trainer, answers):
    """Fill in what the reward model gives answers, whose very tokens it reads; return it (n,)."""
    values = answer_values(
        trainer.reward_model, trainer.tokenizer, answers, trainer.micro_tokens
    ).double()
    fault = None
    if not torch.isfinite(values).all():
        fault = RewardFault("REWARD_MODEL: gives a score that is not finite")
    raise_first(fault, trainer.runtime, trainer.log)
    for answer, value in zip(answers, values.tolist(), strict=True):
        answer.rewards["reward_model"] = value
    return values


class JudgedExam(Exam):
    """An exam whose sampled answers a reward model scores, too, if there is one."""

    def more_scores(self, trainer, answers):
        """Return reward_model, the mean of a problem's sampled answers."""
        if trainer.reward_model is None:
            return {}
        values = self.gather(trainer, judged(trainer, answers), (len(self.problems), EVAL_SAMPLES))
        return {"reward_model": values.mean(1)}


# === end: judge ===


# ---------------------------------------------------------------------------------------- optimizer
# The value head begins at zeros, where the rate of an imported model would leave it: AdamW moves a
# weight by about its rate in a step.
LEAST_HEAD_RATE = 1e-4


def make_optimizers(params, settings, runtime):
    """Return the optimizers of `params`, name -> parameter: all at LEARNING_RATE, the value head at
    LEAST_HEAD_RATE at least.
    """
    trunk = dict(params)
    head = trunk.pop("w_value", None)  # a policy of DPO has none
    classes = parameters_by_class(trunk)
    rates = dict(lr=settings.learning_rate, weight_decay=settings.weight_decay)
    matrices = dict(params=classes["matrix"], **rates)
    others = [dict(params=classes[name], **rates) for name in ("adapter", "embedding", "head")]
    # Gains, mixes, and GDN's decay and step size: AdamW trains them under every OPTIMIZER.
    controls = dict(params=classes["control"], lr=settings.learning_rate, weight_decay=0.0)
    head_rate = max(LEAST_HEAD_RATE, settings.learning_rate)
    heads = [] if head is None else [head]
    value_head = dict(params=heads, lr=head_rate, weight_decay=0.0)
    adamw = OPTIMIZERS["adamw"]
    if settings.optimizer == "muon":  # orthogonalizes matrices, and nothing else
        return [Muon([matrices], runtime), adamw([*others, controls, value_head])]
    return [OPTIMIZERS[settings.optimizer]([matrices, *others]), adamw([controls, value_head])]


# --------------------------------------------------------------------------------------- objective
VALUE_COEF = 0.1  # weight of the value loss; 1 and 5 gained less with a head
GAMMA = 1.0  # discount: what an answer earns does not depend on its length
VALUE_CLIP_RANGE = 0.2  # of a value, around the rollout's


def divergences(logps, reference, mask):
    """Return two estimates (B, T) of the divergence from the reference, for tokens drawn with logps.

    With x = log p - log p_ref they are k1 = x, and k3 = e^-x - 1 + x, of the same mean and never
    below 0 (joschu.net/blog/kl-approx.html). Both are 0 outside the mask.
    """
    x = (logps - reference) * mask
    return x, torch.expm1(-x) + x


def shaped_rewards(scores, divergence, mask, beta):
    """Return the rewards of tokens (B, T): -beta times the divergence (B, T) and, for the last token
    of a response, its score (B, 1) too."""
    last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
    return last * scores - beta * divergence * mask


def advantage_estimates(rewards, values, mask, gamma, gae_lambda):
    """Return GAE advantages (B, T) of rewards and values (B, T) (arXiv 1506.02438, equation 16).

    A = d + gamma lambda A' with d = r + gamma V' - V, where A' and V' are those of the next token of
    the mask. After the last they are 0, whether the response ended or was cut off: it is scored as
    it stands, and nothing can follow.
    """
    advantages = torch.zeros_like(values)
    advantage = next_value = values.new_zeros(len(values))
    for t in reversed(range(values.size(1))):
        inside = mask[:, t]
        error = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = torch.where(inside, error + gamma * gae_lambda * advantage, advantage)
        next_value = torch.where(inside, values[:, t], next_value)
        advantages[:, t] = advantage
    return advantages * mask


def steered(beta, divergence, target):
    """Return the next KL_BETA (arXiv 1909.08593, section 2.2), at most 2% more or less.

    divergence and target are in nats per answer; target 0 leaves beta as it is.
    """
    if not target:
        return beta
    return beta * (1 + 0.1 * min(0.2, max(-0.2, divergence / target - 1)))


# What an update adds up for the log: its loss and tokens, and of each token its entropy and the parts
# that ppo_loss returns. They have names here because a rank takes part in the sum over ranks even
# if it has no answer to learn from.
UPDATE_SUMS = (
    "loss tokens entropy policy_loss value_loss clip_active clip_outside value_clip approx_kl sampler_gap"
).split()


def ppo_loss(logps, values, batch, settings):
    """Return the loss of each token (B, T), and for the log its parts by name, (B, T) each: policy
    loss, value loss, whether the clip is active, whether the ratio is outside the band, whether the
    value is clipped, k2 = log(p / p_old)^2 / 2, and the sampler gap |log p_old - what the sampler
    computed|.

    The loss is the clipped surrogate (arXiv 1707.06347, equation 7) plus VALUE_COEF times half the
    larger squared error of the value, and of the value clipped to VALUE_CLIP_RANGE around the
    rollout's. An active clip leaves no gradient. All is 0 outside the mask.
    """
    low = 1 - settings.left_clip_range
    high = 1 + settings.right_clip_range
    delta = (logps - batch.old) * batch.mask
    ratio = delta.exp()
    policy = -torch.minimum(ratio * batch.advantages, ratio.clamp(low, high) * batch.advantages)

    # Not from the values themselves: inside the band both errors are then the same, bit for bit.
    moved = (values - batch.values) * batch.mask
    error = (batch.values + moved - batch.returns).square()
    clipped = (
        batch.values + moved.clamp(-VALUE_CLIP_RANGE, VALUE_CLIP_RANGE) - batch.returns
    ).square()
    value = 0.5 * torch.maximum(error, clipped)

    below = ratio < low
    above = ratio > high
    active = torch.where(batch.advantages < 0, below, above & (batch.advantages > 0))
    parts = {
        "policy_loss": policy,
        "value_loss": value,
        "clip_active": active,
        "clip_outside": below | above,
        "value_clip": clipped > error,
        "approx_kl": 0.5 * delta**2,
        "sampler_gap": (batch.old - batch.sampled).abs(),
    }
    parts = {name: part.detach() * batch.mask for name, part in parts.items()}
    return (policy + VALUE_COEF * value) * batch.mask, parts


PPOConfig = Settings  # PPOConfig(learning_rate=1e-4, group_size=16)


class PPOTrainer(PolicyTrainer, Stateful):
    """Proximal policy optimization; arguments and use as of PolicyTrainer.

    reward_model: a GPT with a value head that scores in place of reward functions. The critic is a
    value head on the model: a network of its own makes a step 1.6 times as long, and gained less in
    the same seconds (docs/lab/2026-11.md, 2026-11-23).
    """

    STATE = ("kl_beta",)

    def __init__(self, model, tokenizer, args=None, *, reward_model=None, **options):
        if not hasattr(model, "w_value"):
            add_value_head(model)
        model.w_value.requires_grad_(True)  # with adapters, too
        super().__init__(model, tokenizer, args, **options)
        self.reward_model = reward_model
        require_part(self.settings, "reward_model", reward_model)
        self.kl_beta = self.settings.kl_beta  # KL_TARGET steers it

    def sample(self, queries, count, temperature, seeds, qat=False):
        """Return `count` Answers to each query, query by query; seeds: a tuple of numbers for each.

        qat: whether the rounded weights answer, which the artifact will have.
        """
        answers = []
        for query in queries:
            prompt = self.prompt_ids(query)
            answers += [Answer(query=query, prompt=prompt) for _ in range(count)]
        prompts = [answer.prompt for answer in answers[::count]]
        state = functools.partial(sampling_state, answers)
        with (
            torch.no_grad(),
            self.weights(qat),
            cast_once(self.network),
            parametrize.cached(),
            heartbeat(self.say, state),
        ):
            generate(
                self.network,
                prompts,
                count,
                self.settings.max_new_tokens,
                temperature,
                seeds,
                self.stop,
                samples=answers,
                compiled=self.compiled,
            )
        for answer in answers:
            answer.temperature = temperature
            answer.text = completion(self.tokenizer, answer.prompt, answer.ids)
        return answers

    @torch.no_grad()
    def rollout(self, queries, step, qat=False):
        """Return the Rollout of this rank's share of a step's queries, with answers' rewards.

        What is added to the rewards here trains, and marks nothing.
        """
        settings = self.settings
        self.add_columns(queries)
        share = rank_share(queries, settings, self.runtime)
        seeds = [(settings.seed, step, number) for number in share]
        queries = [queries[number] for number in share]
        begin = time.perf_counter()
        answers = self.sample(queries, settings.group_size, settings.temperature, seeds, qat)
        seconds = time.perf_counter() - begin
        if self.reward_model is None:
            functions = named_functions(self.reward_funcs, self.reward_weights)
            rewards = self.score(answers, functions)
        else:
            rewards = judged(self, answers)
        for answer, reward in zip(answers, rewards.tolist(), strict=True):
            answer.reward = answer.advantage = reward  # `experience` makes advantages of it
        metrics = answer_metrics(answers, rewards, seconds, self.runtime)
        metrics |= reward_means(answers, self.runtime)
        if settings.group_size > 1:
            rewards = rewards.view(len(queries), -1)
            has_one_reward = (rewards == rewards[:, :1]).all(1)
            metrics["zero_variance"] = moments(has_one_reward, self.runtime)[0].item()
        return Rollout(groups_of(answers, settings.group_size), metrics)

    def forward(self, batch):
        """Return log-probabilities, values and entropies (B, T), of the state in which a token of an
        answer is drawn; elsewhere 0."""
        network = self.network
        features = row_features(network, batch)
        # token_scores gets a network whose features are there already: values need them, too.
        computed = SimpleNamespace(
            features=lambda ids, doc: features, logits=network.logits, config=network.config
        )
        settings = self.settings
        logps, entropy = token_scores(
            computed, batch, settings.temperature, entropy_grad=settings.entropy_beta > 0
        )
        values = features.to(network.w_value.dtype) @ network.w_value
        return logps, torch.where(batch.mask, values, 0.0), entropy

    @torch.no_grad()
    def experience(self, rollout, qat=False):
        """Return the rollout's mini-batches, as ppo_loss takes them, and metrics of all ranks' tokens.

        KL_TARGET then steers KL_BETA.
        """
        settings = self.settings
        mini_batches = []
        tokens = []  # of each batch (4, n): k1, k3, advantage and return of the answers' tokens
        with self.weights(qat):
            for answers in rollout.mini_batches(settings.mini_batches):
                mini_batches.append([])
                for batch in make_batches(answers, self.runtime.device, self.micro_tokens):
                    old, values, _ = self.forward(batch)
                    reference = old
                    if self.ref_model is not None:
                        reference = token_logps(self.ref_model, batch, settings.temperature)
                    k1, k3 = divergences(old, reference, batch.mask)
                    divergence = k1 if settings.kl_shaping == "k1" else k3
                    scores = batch.advantages  # so far the answers' rewards (B, 1), see rollout
                    rewards = shaped_rewards(scores, divergence, batch.mask, self.kl_beta)
                    batch.old = old
                    batch.values = values
                    batch.advantages = advantage_estimates(
                        rewards, values, batch.mask, GAMMA, settings.gae_lambda
                    )
                    batch.returns = batch.advantages + values
                    mini_batches[-1].append(batch)
                    tokens.append(
                        torch.stack([k1, k3, batch.advantages, batch.returns])[:, batch.mask]
                    )

        means, variances = moments(torch.cat(tokens, dim=1), self.runtime)
        k1, k3, mean, _ = means
        _, _, variance, spread = variances
        # Whitens the advantages; the returns stay as they are.
        for batch in itertools.chain(*mini_batches):
            white = (batch.advantages - mean) * (variance + 1e-8).rsqrt() * batch.mask
            batch.advantages = white.to(batch.values)
        metrics = {"explained_variance": (1 - variance / spread).item() if spread > 0 else 0.0}
        if self.ref_model is not None:
            metrics |= {"kl": k1.item(), "kl_k3": k3.item(), "kl_beta": self.kl_beta}
            answer_kl = metrics["kl"] * rollout.metrics["length"]
            self.kl_beta = steered(self.kl_beta, answer_kl, settings.kl_target)
        return mini_batches, metrics

    def update(self, rollout, multiplier=1.0, qat=False):
        """Take MINI_BATCHES x EPOCHS optimizer steps at `multiplier` times the learning rates.

        Return what was measured in them. qat: whether the loss is that of the rounded weights.
        """
        begin = time.perf_counter()
        settings = self.settings
        runtime = self.runtime
        mini_batches, metrics = self.experience(rollout, qat)
        updates = []
        for batches in mini_batches * settings.epochs:
            tokens = runtime.sum(sum(batch.mask.sum() for batch in batches))
            torch._foreach_zero_([param.grad for param in self.trained.values()])
            sums = {name: torch.zeros((), device=runtime.device) for name in UPDATE_SUMS}
            with self.weights(qat):
                for batch in batches:
                    logps, values, entropy = self.forward(batch)
                    losses, parts = ppo_loss(logps, values, batch, settings)
                    loss = (losses - settings.entropy_beta * entropy).sum() / tokens
                    loss.backward()
                    sums["loss"] += loss.detach()
                    sums["tokens"] += batch.mask.sum()
                    sums["entropy"] += entropy.sum()
                    for name, part in parts.items():
                        sums[name] += part.sum()
            updates.append(self.step_weights(sums, multiplier))
        return metrics | update_metrics(updates, time.perf_counter() - begin)


# -------------------------------------------------------------------------------------------- main
# Of an imported start, see imported_values: LEARNING_RATE of all weights, and of adapters.
IMPORTED_RATES = {"": (1e-6, 2e-5)}
# With GAE_LAMBDA below 1 an untrained critic gives a long answer's first tokens no advantage
# (arXiv 2503.01491).
IMPORTED_DEFAULTS = {"max_new_tokens": 256, "gae_lambda": 1.0}


def main():
    """Train, pack and score one policy; return the exit code.

    Raises UserError: of settings and files before step 1; later of rewards, and of a start that
    learns nothing.
    """
    begin = time.perf_counter()
    settings = load_settings(Settings, os.environ, sys.argv[1:], stored=start_settings)
    runtime = start_runtime(settings.device, settings.compile)
    check_ranks(settings, runtime)
    prompts_unit(settings, runtime.world_size)  # for its error, before anything is loaded
    functions = load_reward_functions(settings.reward)
    network, tokenizer, source = load_start(settings)
    judge = load_judge(settings, tokenizer, runtime)
    contexts = [one.config.train_seq_len for one in (network, judge) if one is not None]
    check = room_check(settings, tokenizer, min(contexts))
    reports = Notes()
    problems, choice, held_out = split_problems(settings, check, reports.append)
    exam = JudgedExam(held_out, with_mark(functions, settings.mark))

    # run folder and log, policy, trainer, averages
    clock = Clock(settings, runtime, replayed_progress(settings))
    plan = Plan(settings)
    identity = run_identity(settings, network, tokenizer, problems, exam)
    run = Run(settings, runtime, plan, clock, identity, asdict(network.config))
    handle_stop_signals(run.end_at_once)
    checkpoint = run.open()
    if tokenizer.file != "bytes":
        run.write_file(tokenizer.file, tokenizer.content)
    choose_kernels(settings.kernels, network, runtime, run.log)
    run.log(describe_start(settings, imported_defaults(settings.lora_rank)))
    note_limits(settings, network.config, tokenizer, run.log)
    run.log("\n".join(map(str, reports)))
    run.log(
        f"policy: {source}\nproblems: {len(problems)} to train on, "
        f"{len(choice)} to choose between averages, {len(held_out)} held out"
    )
    adapt(network, settings, runtime.device)
    trainer = PPOTrainer(
        network,
        tokenizer,
        settings,
        reward_funcs=functions,
        reward_model=judge,
        runtime=runtime,
        log=run.log,
    )
    averages = {}
    for name, memory in (("ema", EMA_MEMORY), ("swa", None)):
        if getattr(settings, name):
            averages[name] = Average(list(trainer.trained.values()), memory)
    run.parts.update(averages, trainer=trainer)
    samples = Samples(run, has_advantages=False)
    begin_run(run, trainer, exam, samples, checkpoint)
    if not settings.kl_target:
        trainer.kl_beta = settings.kl_beta  # RESUME may change it
    run.log(f"set-up and first scores: {time.perf_counter() - begin:.1f} s, outside the clock")

    metrics = {}
    learns_nothing = not checkpoint  # whether all answers of each step so far had one reward
    stop_signal = StopSignal(run)
    clock.start()
    while True:
        if stop_signal.number and not runtime.distributed:
            run.ended = "signal"  # a single process need not ask other ranks
        last_step = bool(run.ended) or clock.is_last(run.step)  # run.step steps are finished
        faulthandler.cancel_dump_traceback_later()

        # 1. Validate and save; the clock stands still.
        val_is_due = settings.val_loss_every and run.step % settings.val_loss_every == 0
        if val_is_due and run.step and not last_step:
            with clock.paused(), saved_at_faults(run):
                scores = score_intervals(exam.scores(trainer, plan.is_on("qat")))
            run.log.metrics(run.step, held_out_metrics(scores))
            samples.scored(f"step {run.step}", exam)
        # Also before step 1: a full disk is found before training, and a run killed early can resume.
        save_is_due = settings.save_every and run.step % settings.save_every == 0
        if last_step or save_is_due:
            with clock.paused():
                run.save()
        if last_step:
            break
        faulthandler.dump_traceback_later(max(HANG_SECONDS, 20 * clock.median_step()))

        # 2. The phases and learning rates of this step.
        progress = clock.progress(run.step)
        for name in plan.begin_phases(run.step, progress):
            run.log(f"phase: {name} begins at step {run.step + 1}, {progress:.1%} of the run")
        multiplier = plan.rates(progress)

        # 3. Sample answers to new prompts, and reward them.
        queries = problems_of_step(problems, run.step, settings.prompts_per_step, settings.seed)
        with saved_at_faults(run):
            rollout = trainer.rollout(queries, run.step, plan.is_on("qat"))
        samples.trained(rollout, progress)

        # 4. Update the weights and their averages.
        with heartbeat(run.log, lambda: f"step {run.step + 1}: updating the weights"):
            updates = trainer.update(rollout, multiplier, plan.is_on("qat"))
        for name, average in averages.items():
            if plan.is_on(name):
                average.update(progress)
        metrics = {**rollout.metrics, **updates, "lr_mul": multiplier, "progress": progress}
        report = [updates["loss"], updates["grad_norm"], stop_signal.number]
        loss, norm, stop = torch.tensor(report, device=runtime.device)
        clock.send_report(loss, norm, runtime.sum(stop))
        run.step += 1

        # 5. Log the step: its numbers are on the host already, so nothing is waited for.
        log_step(run, metrics)
        learns_nothing = learns_nothing and metrics["reward_std"] <= 1e-6 * abs(metrics["reward"])
        if learns_nothing and run.step == FIRST_STEPS:
            run.save()
            reason = (
                f"in each of the first {FIRST_STEPS} steps all samples have one reward "
                f"(mean {metrics['reward']:.3f})"
            )
            raise dead_start(run, rollout, reason)

    clock.stop()
    if stop_signal.on_any_rank(runtime):  # also during the last save
        return leave_stopped(run, stop_signal)
    handle_stop_signals(run.end_at_once)
    end_training(run)

    # Choosing the weights and packing them are on the clock, too.
    clock.start()
    chosen = choose_policy(trainer, averages, exam, choice, run.log)
    content = pack_policy(run, trainer, source)
    facts = {
        "tokenizer_sha256": tokenizer.sha256,
        "init_from": source,
        "row_files": {one.path: one.facts() for one in reports if isinstance(one, RowReport)},
        "params": count_parameters(network),
        "weights": chosen,
        **score_end(run, trainer, exam, samples),
        "last": metrics,
        "total_seconds": time.perf_counter() - begin,
    }
    exit_status = write_result(run, facts, content)
    runtime.leave()
    return exit_status


if __name__ == "__main__":
    sys.exit(exit_code(main))
