"""Generate text, chat and score, with a model from a run, a checkpoint or an artifact.

    ARTIFACT=runs/<RUN_ID> PROMPT="Once upon a time" NUM_SAMPLES=4 python sample.py
    ARTIFACT=runs/<RUN_ID> MODE=chat SYSTEM="Answer briefly." TEMPERATURE=0.7 python sample.py
    ARTIFACT=runs/<RUN_ID> MODE=score SCORE_PATH=book.txt python sample.py
    ARTIFACT=runs/<RUN_ID> MODE=score SCORE=task SCORE_PATH=data/sort.jsonl HELD_OUT=1 python sample.py

ARTIFACT is needed. In a chat, a line is a turn, /reset forgets the conversation, and Ctrl-C ends an
answer. Scores need SCORE_PATH; docs/scoring.md explains them. HELD_OUT=1 keeps the prompts that
training holds out, and REWARD marks the answers. Multiple choice and other benchmarks are left to
lm-evaluation-harness, which docs/scoring.md explains too.

Every setting below is an environment variable or an argument, NAME=value. Sections between
`# === shared:` fences are in other scripts too, byte for byte (tools/sync.py).

Where to change what:
    another layer, or a new one           GatedDeltaNet, Attention, MLP, Block
    another norm                          Norm, NORMS
    another position                      rotation, rotate
    how a token is drawn                  draw, truncation, likeliest; by the text so far: generate
    log-probabilities of given ids        answer_logps
    what a prompt looks like              prompt_ids, system_turns
    a chat                                chat, stream_answer
    a new score                           MEASURES, READ_SETTINGS; its name in Settings
    another reward                        exact_match, weigh; or REWARD=file.py:function
    a new setting                         Settings, READ_SETTINGS; for other scripts OUR_SETTINGS
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
import collections
import contextlib
import copy
import difflib
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
from pathlib import Path
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


# ---------------------------------------------------------------------------------------- settings
@dataclass(frozen=True)
class Settings:
    """Every setting is an environment variable: its name in capitals."""

    # generate: continue PROMPT; chat: answer the lines of standard input; score: measure SCORE
    mode: Literal["generate", "chat", "score"] = "generate"
    artifact: Paths = ""  # the model: a run, a checkpoint or an artifact (model.upar)
    seed: int = bounded(1337, 0, 2**31 - 1)  # decides every random draw
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: CUDA if there is a device
    # torch.compile, or a mode of it; on a CPU it needs a C++ compiler
    compile: Literal[False, True, "reduce-overhead", "max-autotune"] = False
    # generate
    prompt: str = ""  # text to continue; empty: a document's beginning
    # of a prompt; chat: a user's turn, as post-training has it
    layout: Literal["text", "chat"] = "text"
    system: str = ""  # what comes before the prompt; in a chat the first turn
    tools: Paths = ""  # JSON file, a list of tools that the model may call; before SYSTEM
    num_samples: int = bounded(1, 1)  # how many continuations
    max_new_tokens: int = bounded(100, 1)  # length of each, at most
    temperature: float = bounded(
        0.8, 0.0, 100.0
    )  # of the distribution that samples; sample.py takes 0: always the likeliest token
    top_k: int = 50  # draw from this many likeliest tokens; 0: from all
    # draw from the likeliest tokens that hold this share of probability; 1: from all
    top_p: float = bounded(1.0, 1e-09, 1.0)
    # score
    # text: bits per byte; the others are listed in docs/scoring.md
    score: Literal["text", "task", "preference", "win", "quality"] = "text"
    score_path: Paths = ""  # FILE,FILE to score
    score_model: Paths = ""  # second model: the opponent of win, the reference of preference
    score_judge: Paths = ""  # a reward model that decides win; empty: REWARD
    score_file: Paths = ""  # file to write the scores to, as JSON; empty: none
    held_out: bool = False  # of SCORE_PATH, only the prompts that training holds out, by a hash
    reward: Paths = "exact"  # of an answer: exact, or file.py:function, see load_reward_functions
    mark: Paths = ""  # file.py:function that marks held-out answers; empty: the first of REWARD
    reward_seconds: float = 120.0  # the log names a reward function that takes longer
    eval_prompts: int = bounded(512, 1)  # prompts that score the model, at most
    eval_samples: int = bounded(8, 1)  # of each, for pass@1 and pass@EVAL_SAMPLES
    eval_stride: int = 0  # stride of the sliding-window score; 0: leave that score out
    stateful: bool = False  # also score each document in one forward of its length; slow

    def __post_init__(self):
        check_settings(self)


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


# === shared: chat ===
def refuse_unlearned(row):
    """Raise RowError for a row that is not to be learned, or of a form without an answer to learn."""
    if is_unlearned(row):
        raise RowError("weight 0, or train or loss false")
    if "completions" in row and "labels" in row:
        raise RowError("completions with labels (process supervision), which no script reads")


def letters(text):
    """Return a text without white space and the marks of thoughts, which templates rewrite."""
    return re.sub(r"\s|</?think>", "", text)


def check_text(tokenizer, turn, part):
    """Raise RowError if a chat template drops or cuts the text of an answer that is learned, a turn.

    part: what the template writes of it, up to the first end token.
    """
    _, text, *fields = turn
    message = dict(*fields)
    if not message.get("train", True):
        return
    ends = stop_pattern(tokenizer)
    end = ends.search(text)
    if end and ends.sub("", text[end.end() :]).strip():
        raise RowError(f"an answer has text after the end token {end[0]!r}")
    content = ends.sub("", message.get("content", text) or "")
    if letters(content) not in letters(part):
        name = "text before </think>" if "</think>" in content else "text"
        raise RowError(
            f"the chat template drops {name} of an answer; import the model with an edited copy of it"
        )


def check_answer(tokenizer, turns, text):
    """Raise RowError if the template's text of turns lacks calls or thoughts of the last, an answer."""
    *before, answer = turns
    message = dict(*answer[2:])
    if not message.get("train", True):
        return
    parts = []
    calls = message.get("tool_calls", [])
    for number in range(len(calls)):
        rest = {**message, "tool_calls": calls[:number] + calls[number + 1 :]}
        parts.append(("tool_calls", (*answer[:2], rest)))
    thoughts = next((name for name in message if name in THOUGHTS), None)
    if thoughts:
        parts.append((thoughts, without(answer, *THOUGHTS)))
    for name, rest in parts:
        if chat_text(tokenizer, [*before, rest], False) == text:
            raise RowError(
                f"the chat template does not write {name!r} of an answer; must be in its text"
            )


def answered_text(tokenizer, turns):
    """Return the text of turns by an imported model's chat template up to the end of the last answer,
    and where that begins. The last turn is the assistant's. Raises RowError.

    The answer is what the model itself would write: it begins where the prompt ends, and ends with
    the first token that stops an answer.
    """
    prompt = chat_text(tokenizer, turns[:-1], True)
    text = chat_text(tokenizer, turns, False)
    stop = stop_pattern(tokenizer).search(text, len(prompt))
    if not text.startswith(prompt):
        context = chat_text(tokenizer, turns[:-1], False)
        opening = prompt.removeprefix(context)
        if opening == prompt or not text.startswith(context):
            raise RowError("the chat template does not write the answer as the model would")
        raise RowError(
            f"the chat template ends a prompt with {opening!r:.80}, but begins the answer without it; "
            "convert.py import --set NAME=VALUE (such as enable_thinking=true) or an edited copy of "
            "the template may help"
        )
    if stop is None:
        raise RowError(
            "after an answer the chat template writes no end token "
            f"({' '.join(stop_texts(tokenizer)):.80}); import the model again"
        )
    check_answer(tokenizer, turns, text)
    return text[: stop.end()], len(prompt)


# === end: chat ===


# === shared: preferences ===
def spoken_turns(text):
    """Return a text of HH-RLHF, in which Human: and Assistant: begin turns, as messages."""
    parts = re.split(r"\n\n(Human|Assistant):", text)
    pairs = zip(parts[1::2], parts[2::2], strict=True)
    return [{"role": role, "content": said.strip()} for role, said in pairs]


def pair_fields(row):
    """Return a row with the fields `prompt`, `chosen` and `rejected` in place of other forms of pairs.

    These are OpenAI's names, HH-RLHF's texts, and texts without a prompt: as in TRL it is what both
    begin with. Raises RowError.
    """
    if isinstance(row.get("input"), dict) and "preferred_output" in row:
        names = {"preferred_output": "chosen", "non_preferred_output": "rejected"}
        row = {names.get(name, name): value for name, value in row.items()}
        row |= row.pop("input")
    if "chosen" not in row and (kto_flags(row) or "labels" in row):
        raise RowError("answers with labels, which no script reads; must be chosen and rejected")
    texts = [row.get(name) for name in ("chosen", "rejected")]
    has_prompt = not {*QUESTIONS}.isdisjoint(row)
    if has_prompt or not all(isinstance(text, str) for text in texts):
        return row
    if all(text.startswith("\n\nHuman:") for text in texts):
        chosen, rejected = map(spoken_turns, texts)
        return {**row, "chosen": chosen, "rejected": rejected}
    prompt = os.path.commonprefix(texts).removesuffix(" ")
    chosen, rejected = [text.removeprefix(prompt) for text in texts]
    return {**row, "prompt": prompt or None, "chosen": chosen, "rejected": rejected}


def checked_pair(chosen, rejected):
    """Return the turns before two answers, and these. Raises RowError."""
    for turns in (chosen, rejected):
        if not turns or turns[-1][0] != "<|assistant|>":
            raise RowError("chosen or rejected does not end with the assistant's turn")
        if not turns[-1][1].strip():
            raise RowError("empty answer")
        fields = dict(*turns[-1][2:])
        if "refusal" in fields or not fields.get("train", True):
            raise RowError("an answer with weight 0 or a refusal")
    if chosen[:-1] != rejected[:-1]:
        raise RowError("chosen and rejected differ before their last turn")
    if chosen == rejected:
        raise RowError("identical chosen and rejected")
    return chosen[:-1], chosen[-1], rejected[-1]


def whole_conversation(asked, turns, notes):
    """Return the turns before the answers of a pair whose `chosen` and `rejected` have them all.

    asked: the turns of the row's `history` and its question. Those of `history` follow the system's,
    unless the conversation begins with them; the question is named if it is no turn.
    """
    *history, question = asked
    if question[1].strip() not in ["", *(text.strip() for _, text, *_ in turns)]:
        notes.add(("not used", "a question that is no turn of chosen and rejected"))
    first_question = [role for role, *_ in turns].index("<|user|>")
    system = turns[:first_question]
    rest = turns[first_question:]
    if history in (turns[: len(history)], rest[: len(history)]):
        return turns
    return system + history + rest


def row_pair(row, notes):
    """Return the format of a row and (turns before the answers, chosen turn, rejected turn).

    The row has a question, see question_turns, and `chosen` and `rejected`, each a text or messages,
    or it is one of pair_fields. Without a question these are conversations with the same turns
    before the last. Of such conversations the first turns are the question also beside a text: it is
    not read, as in TRL, but the turns of `history` are if they lack them. Raises RowError.
    """
    given = given_fields(row)
    row = pair_fields(given)
    refuse_unlearned(row)
    before = []
    fields = []
    used = ["chosen", "rejected", "margin", "system", "system_prompt", "tools", "functions"]
    if not {*QUESTIONS}.isdisjoint(row):
        before, fields = question_turns(row, notes)
    chosen = field_turns(row, "<|assistant|>", notes, "chosen")
    rejected = field_turns(row, "<|assistant|>", notes, "rejected")
    more, chosen, rejected = checked_pair(chosen, rejected)
    prompt = row[fields[0]] if fields else None
    is_text = isinstance(prompt, str) and fields[0] not in CONVERSATIONS
    first = next((role for role, *_ in more if role != "<|system|>"), "")
    if is_text and first == "<|user|>":
        more = whole_conversation(before, more, notes)
        before = []
    elif [*more, chosen][: len(before)] == before:  # some data sets repeat the prompt
        before = []
    elif is_text and prompt and all(turn[1].startswith(prompt) for turn in (chosen, rejected)):
        # Perhaps the answers repeat it; perhaps these are its next words, as of `1` and `12`.
        notes.add(("not used", "a prompt with which chosen and rejected begin, too"))
    before += more
    if not before:
        raise RowError("missing field 'prompt'")
    note_fields(row, [*used, *fields], "", notes)
    name = "prompt/chosen/rejected" if is_text else "messages"
    if "prompt" in row.keys() - given.keys():
        name = "chosen/rejected that begin with their prompt"
    return name, (leading_turns(row, before), chosen, rejected)


def answer_ids(tokenizer, before, answer):
    """Return the ids of an answer to turns, with the token that ends it. Raises RowError.

    answer: its text, or its turn.
    """
    turn = ("<|assistant|>", answer) if isinstance(answer, str) else answer
    if "template" not in tokenizer.facts:
        return [*tokenizer.encode(turn[1]), tokenizer.roles.get("<|end|>", tokenizer.bos_id)]
    text, begin = answered_text(tokenizer, [*before, turn])
    check_text(tokenizer, turn, text[begin:])
    return tokenizer.encode_marked(text[begin:])


# === end: preferences ===


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


# What each MODE or SCORE reads; another setting that is given is an error.
SAMPLING = "max_new_tokens temperature top_k top_p compile"
ASKING = f"score_path held_out eval_prompts {SAMPLING}"
READ_SETTINGS = {
    "generate": f"prompt layout system tools num_samples {SAMPLING}",
    "chat": f"system tools {SAMPLING}",
    "text": "score_path eval_stride stateful",
    "task": f"reward mark reward_seconds eval_samples {ASKING}",
    "preference": "score_path score_model",
    "win": f"reward reward_seconds score_model score_judge {ASKING}",
    "quality": f"layout num_samples {ASKING}",
}


def check_modes(settings):
    """Raise UserError for a setting that MODE and SCORE do not read, or need and do not have."""
    kind = settings.mode
    read = {"mode", "artifact", "seed", "device"}
    where = f"MODE={kind}"
    if kind == "score":
        kind = settings.score
        read |= {"score", "score_file"}
        where += f" SCORE={kind}"
    read |= {*READ_SETTINGS[kind].split()}
    if kind == "win" and settings.score_judge:
        read -= {"reward", "reward_seconds"}
        where += " and a SCORE_JUDGE"
    for setting in fields(settings):
        value = getattr(settings, setting.name)
        if setting.name not in read and value != setting.default:
            raise UserError(
                f"{setting.name.upper()}={setting_text(value)!r}: not read with {where}; must be "
                f"left at {setting_text(setting.default)!r}"
            )
    if isinstance(settings.compile, str):  # the type is that of the training scripts' setting
        raise UserError(f"COMPILE={settings.compile!r}: must be 0 or 1; a mode is for training")
    if "score_path" in read and not settings.score_path:
        raise UserError(f"SCORE_PATH='': must be given for SCORE={kind}")
    for name in ("prompt", "system"):
        try:
            getattr(settings, name).encode()
        except UnicodeEncodeError:
            raise UserError(
                f"{name.upper()}={getattr(settings, name)!r:.80}: must be UTF-8"
            ) from None
    file = Path(settings.score_file).absolute()
    if settings.score_file and (file.is_dir() or not file.parent.is_dir()):
        raise UserError(
            f"SCORE_FILE={settings.score_file!r}: must be a file, in a folder that exists"
        )
    for path in listed_files("SCORE_PATH", settings.score_path):
        if settings.score_file and file.resolve() == Path(path).resolve():
            raise UserError(f"SCORE_FILE={settings.score_file!r}: must not be a file of SCORE_PATH")


# ------------------------------------------------------------------------------------------ models
@dataclass
class Model:
    """A model and what belongs to it."""

    network: GPT
    tokenizer: Tokenizer
    source: str  # the file that it was read from
    context: int  # tokens


def check_code(name, source):
    """Warn if the run of a checkpoint or artifact was trained by another section `model`.

    A run's log.txt begins with the script that trained it.
    """
    log = Path(source).parent / "log.txt"
    own = Path(__file__).read_bytes().partition(b"shared: model")[2].partition(b"end: model")[0]
    if log.is_file() and own not in log.read_bytes():
        print(
            f"warning: {name}: the script in {log} has another section `model` than "
            f"{Path(__file__).name}. If its network computes something else, what follows is "
            "wrong: make the same change here",
            file=sys.stderr,
        )


def open_model(name, path, runtime):
    """Return the Model of a path, which the setting `name` has, on the device."""
    network, tokenizer, source = load_model(name, path)
    check_code(name, source)
    network = merge_lora(network).to(runtime.device).requires_grad_(False)
    return Model(network, tokenizer, source, network.config.train_seq_len)


def likeliest(chances, top_k, top_p):
    """Return probabilities (B, V), 0 for unlikely tokens.

    top_k likeliest tokens stay, 0: all; of these the likeliest that together have a share of top_p
    (arXiv 1904.09751).
    """
    ordered = chances.sort(descending=True).values[:, : top_k or None]
    beyond = ordered.cumsum(-1) - ordered >= top_p * ordered.sum(-1, keepdim=True)
    least = ordered.masked_fill(beyond, math.inf).amin(-1, keepdim=True)
    chances = chances * (chances >= least)
    return chances / chances.sum(-1, keepdim=True)


def truncation(settings):
    """Return what TOP_K and TOP_P do to probabilities, for `draw`; None if they do nothing."""
    if settings.top_k or settings.top_p < 1:
        return functools.partial(likeliest, top_k=settings.top_k, top_p=settings.top_p)
    return None


def prompt_ids(tokenizer, turns, layout):
    """Return the ids of a prompt, turns (role token, text).

    In layout text the prompt is the bare text, in layout chat what asked_ids returns.
    """
    if layout == "chat":
        return asked_ids(tokenizer, turns)
    text = "\n".join(text for _, text, *_ in turns)
    # An empty text goes on as the next one after BOS does.
    return [*begin_ids(tokenizer), *tokenizer.encode(text)] or [tokenizer.bos_id]


def room_left(model, turns, layout):
    """Return for how many tokens a model's context has room after a prompt."""
    return model.context - len(prompt_ids(model.tokenizer, turns, layout))


def note(line):
    """Print a line on the standard error: it is not part of what is asked for."""
    print(line, file=sys.stderr, flush=True)


def sampled(model, prompts, count, seeds, settings, spoken=None):
    """Return `count` Samples for each prompt by the settings; say how far they are. See `generate`.

    spoken: a SpokenAnswer, the only sample, which itself shows how far it is.
    """
    samples = [spoken] if spoken else [Sample() for _ in range(len(prompts) * count)]
    state = functools.partial(sampling_state, samples)
    with cast_once(model.network), heartbeat(None if spoken else note, state):
        return generate(
            model.network,
            prompts,
            count,
            settings.max_new_tokens,
            settings.temperature,
            seeds,
            stop_ids(model.tokenizer),
            truncation(settings),
            samples,
            settings.compile,
        )


def system_turns(settings):
    """Return the turns that come before all others, those of rows: TOOLS and SYSTEM, if given."""
    turns = [("<|system|>", settings.system)] if settings.system else []
    if not settings.tools:
        return turns
    try:
        tools = parse_line(read_file(settings.tools).removeprefix(b"\xef\xbb\xbf"))
        tools = parsed_list({"tools": tools}, "tools")
        if not tools:
            raise RowError("it has none")
        return [tools_turn(tools), *turns]
    except RowError as error:
        raise UserError(
            f"TOOLS={settings.tools!r}: must be a JSON file with a list of tools; {error}"
        ) from None


# ---------------------------------------------------------------------------------------- generate
def sample(settings):
    """Print NUM_SAMPLES continuations of PROMPT."""
    runtime = start_runtime(settings.device, settings.compile)
    model = open_model("ARTIFACT", settings.artifact, runtime)
    turns = [*system_turns(settings), ("<|user|>", settings.prompt)]
    prompt = prompt_ids(model.tokenizer, turns, settings.layout)
    if settings.layout == "chat" and not settings.prompt.strip():
        raise UserError("PROMPT='': must be given for LAYOUT=chat")
    room = model.context + 1 - len(prompt)  # the last token is not read
    if model.network.config.positions == "learned" and settings.max_new_tokens > room:
        fault = f"MAX_NEW_TOKENS={settings.max_new_tokens}: must be at most {room}"
        if room < 1:
            fault = f"PROMPT={settings.prompt!r:.40}: must be shorter"
        raise UserError(
            f"{fault}; the prompt has {len(prompt)} tokens, the model positions for {model.context}"
        )
    samples = sampled(model, [prompt], settings.num_samples, [(settings.seed,)], settings)
    begin = 0 if settings.layout == "text" else len(prompt)  # a text is printed with its prompt
    for place, one in enumerate(samples):
        if place:
            print("-" * 15)  # between two texts, as in nanoGPT
        ids = prompt + one.ids
        print(completion(model.tokenizer, ids[:begin], ids[begin:]))


# -------------------------------------------------------------------------------------------- chat
@dataclass
class SpokenAnswer(Sample):
    """A Sample that is printed token by token, without the token that ends it."""

    tokenizer: Tokenizer = None
    prompt: list = ()  # ids
    text: str = ""
    length: int = 0  # characters that were printed

    def take(self, token, logp, stop):
        """Go on by a drawn token; return it."""
        super().take(token, logp, stop)
        if token not in stop:
            self.text = completion(self.tokenizer, self.prompt, self.ids)
            if not self.text.endswith("\ufffd"):  # a character of which bytes are to come
                print(self.text[self.length :], end="", flush=True)
                self.length = len(self.text)
        return token


def stream_answer(model, talk, settings, number):
    """Return the answer to turns, printed token by token. Ctrl-C ends it. Its seed is (SEED, number)."""
    prompt = prompt_ids(model.tokenizer, talk, "chat")
    answer = SpokenAnswer(tokenizer=model.tokenizer, prompt=prompt)
    try:
        sampled(model, [prompt], 1, [(settings.seed, number)], settings, answer)
    except KeyboardInterrupt:
        print(" [stopped]", end="", file=sys.stderr, flush=True)
    print(answer.text[answer.length :], flush=True)
    return answer.text


def said_turn(line):
    """Return the turn of a line of a chat: a user's, or of `/tool TEXT` the result of a tool's call."""
    if line.startswith("/tool "):
        return message_turn({"role": "tool", "content": line.removeprefix("/tool ")}, set())
    return "<|user|>", line


def second_question(turns, first):
    """Return the place of the question after the one at place `first`; without one, the turns' end.

    The result of a tool's call is no question: it would mean nothing without the call.
    """
    for place in range(first + 1, len(turns)):
        role, _, *fields = turns[place]
        if role == "<|user|>" and dict(*fields).get("role") != "tool":
            return place
    return len(turns)


def chat(settings):
    """Answer the lines of standard input, a turn each, until it ends or Ctrl-C comes."""
    runtime = start_runtime(settings.device, settings.compile)
    model = open_model("ARTIFACT", settings.artifact, runtime)
    config = model.network.config
    if config.positions != "learned":
        model.context = max(model.context, config.context)
    system = system_turns(settings)
    turns = system
    count = min(settings.max_new_tokens, model.context // 2)  # tokens of an answer
    if count < settings.max_new_tokens:
        note(
            f"[MAX_NEW_TOKENS={settings.max_new_tokens}: an answer has at most {count} tokens, half "
            "the context]"
        )
    settings = replace(settings, max_new_tokens=count)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # invalid UTF-8 does not end the program
    for number in itertools.count():
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except (EOFError, KeyboardInterrupt):
            return
        if line.strip() == "/reset":
            turns = system
            note("[what was said is forgotten]")
        if line.strip() in ("", "/reset"):
            continue
        talk = [*turns, said_turn(line)]
        try:
            # Without room for an answer, the oldest question and its answer give way.
            while talk != system and room_left(model, talk, "chat") < count:
                del talk[len(system) : second_question(talk, len(system))]
        except UserError as error:  # a chat template refuses some conversations
            note(f"[left out: {error}]")
            continue
        if talk == system:
            note(
                f"[left out: with {count} tokens to answer it exceeds the context of "
                f"{model.context}]"
            )
            continue
        if len(talk) <= len(turns):
            note(
                f"[the context is full: the oldest {len(turns) + 1 - len(talk)} turns are forgotten]"
            )
        turns = [*talk, ("<|assistant|>", stream_answer(model, talk, settings, number))]


# ------------------------------------------------------------------------------- log-probabilities
BATCH_ROWS = 32  # in a forward pass; more need more memory and are hardly faster


def numbered_features(model, rows, one_document=True):
    """Yield the number of each row of ids, the longest first, and its features (T, dim).

    Rows are padded at their ends, where nothing of a row sees the padding. A row is one document, or
    several, each of which begins with BOS.
    """
    order = sorted(range(len(rows)), key=lambda number: -len(rows[number]))
    for start in range(0, len(order), BATCH_ROWS):
        numbers = order[start : start + BATCH_ROWS]
        ids = pad_sequence([torch.tensor(rows[number]) for number in numbers], batch_first=True)
        ids = ids.to(model.network.embed.device)
        doc = torch.zeros_like(ids) if one_document else None
        features = model.network.features(ids, doc=doc)
        for number, row in zip(numbers, features, strict=True):
            yield number, row[: len(rows[number])]


@dataclass
class Continuation:
    """A context and an answer in ids, which fit a model's context unless they are a document."""

    context: list
    answer: list
    is_cut: bool = False  # whether the context lost its beginning


@torch.inference_mode()
def answer_logps(model, rows, one_document=True):
    """Return for each Continuation the log-probabilities of its answer's n ids, float64 (n,).

    one_document: see numbered_features.
    """
    logps = [None] * len(rows)
    inputs = [[*row.context, *row.answer[:-1]] for row in rows]
    for number, features in numbered_features(model, inputs, one_document):
        answer = torch.tensor(rows[number].answer, device=features.device)
        # All logits of a book would need too much memory at once.
        features = features[-len(answer) :].split(model.context)
        parts = []
        for part, ids in zip(features, answer.split(model.context), strict=True):
            logits = model.network.logits(part)
            parts.append(logits.log_softmax(-1).gather(1, ids[:, None])[:, 0])
        logps[number] = torch.cat(parts).double().cpu()
    return logps


@torch.inference_mode()
def rewards(model, conversations):
    """Return a reward model's rewards of conversations, which it reads off their last tokens, and how
    many were cut.

    The last turn is the assistant's. A conversation that exceeds its context loses its beginning, but
    not its first token.
    """
    rows = []
    contexts_cut = 0
    for conversation in conversations:
        *before, answer = fitted_turns(model.tokenizer, conversation, set())
        first, *ids = asked_ids(model.tokenizer, before)
        ids += answer_ids(model.tokenizer, before, answer)
        contexts_cut += len(ids) >= model.context
        rows.append([first, *ids[1 - model.context :]])
    values = [0.0] * len(rows)
    for number, features in numbered_features(model, rows):
        values[number] = (features[-1].float() @ model.network.w_value.float()).item()
    return values, contexts_cut


def answer_rows(model, turns, answers):
    """Return a Continuation for each answer to the same turns. Raises RowError if one does not fit.

    An answer includes the token that ends it. A context that is too long loses its beginning, but
    not its BOS.
    """
    rows = []
    for turn in answers:
        *before, last = fitted_turns(model.tokenizer, [*turns, turn], set())
        prompt = asked_ids(model.tokenizer, before)
        answer = answer_ids(model.tokenizer, before, last)
        if len(answer) > model.context:
            raise RowError(f"answer longer than the context of {model.context} tokens")
        excess = max(0, len(prompt) + len(answer) - 1 - model.context)
        rows.append(Continuation([prompt[0], *prompt[1 + excess :]], answer, excess > 0))
    return rows


def interval(values, share=True):
    """Return the mean of independent values and its 95% interval, None for a single value.

    share: the values are within 0 and 1. If they all are 0 or 1 the interval is Wilson's (JASA 22,
    1927), otherwise the normal approximation.
    """
    n = len(values)
    mean = statistics.fmean(values)
    z = 1.959964
    if share and set(values) <= {0, 1}:
        pull = z * z / n  # towards one half
        center = (mean + pull / 2) / (1 + pull)
        half = math.sqrt(pull * mean * (1 - mean) + pull * pull / 4) / (1 + pull)
        return [mean, center - half, center + half]
    if n == 1:
        return [mean, None, None]
    half = z * statistics.stdev(values) / math.sqrt(n)
    if share:
        return [mean, max(0.0, mean - half), min(1.0, mean + half)]
    return [mean, mean - half, mean + half]


# -------------------------------------------------------------------------------------------- rows
# Functions for `read_rows`: each returns the format of a row and what it reads, or raises RowError.
def filled_text(row, *names):
    """Return the text in the first of these fields that a row has, if it is not blank."""
    text = text_of(row, *names)
    if not text.strip():
        raise RowError("empty text")
    return text


def row_text(row, notes):
    """Return the document in a row."""
    note_fields(row, ("text",), "", notes)
    return "text", filled_text(row, "text")


def row_prompt(row, notes):
    """Return the turns before a row's last answer; notes get (kind, name) of fields that are not used.

    The row is one of row_pair, or a problem, which needs no answer: see problem_of.
    """
    if "chosen" in row:
        _, (turns, _, _) = row_pair(row, notes)
        if not turns[-1][1].strip():
            raise RowError("blank prompt")
        return turns
    turns = query_turns(problem_of(row, notes))
    given = given_fields(row)
    _, used = question_turns(given, set())
    used += [*KEYS, *PROMPT_PARTS, "system", "system_prompt", "tools", "functions"]
    used += kto_flags(given)
    note_fields(given, used, "", notes)
    return turns


# ----------------------------------------------------------------------------------------- answers
@dataclass
class Models:
    """The models of a score, and where it reports about rows."""

    scored: Model
    other: Model  # SCORE_MODEL, or None
    judge: Model  # SCORE_JUDGE, or None
    log: Callable
    answers: dict = field(default_factory=dict)  # of each file, for SCORE_FILE


@dataclass
class Question:
    """A prompt that models answer."""

    turns: list
    problem: dict  # the problem that REWARD marks; for another prompt {"answer": None}


@dataclass
class ScoredAnswer:
    """What a model answers to a question."""

    question: Question
    text: str
    ids: list
    finished: bool  # whether the model ended it, and not MAX_NEW_TOKENS
    reward: float = 0.0  # the weighted total
    rewards: dict[str, float] = field(default_factory=dict)  # by function; None: does not apply
    temperature: float = 0.0  # it was drawn at; 0: the likeliest tokens

    def row(self):
        """Return what SCORE_FILE has of the answer."""
        problem = self.question.problem
        return {
            "prompt": problem.get("prompt", "\n".join(text for _, text, *_ in self.question.turns)),
            "completion": self.text,
            "answer": problem["answer"],
            "rewards": self.rewards,
            "reward": self.reward,
            "finished": self.finished,
            "tokens": len(self.ids),
            "temperature": self.temperature,
        }


def check_room(answering, turns, settings):
    """Raise RowError unless the models' contexts have room for a prompt and MAX_NEW_TOKENS."""
    for model in answering:
        room = room_left(model, turns, settings.layout)
        if room < 1:
            raise RowError(f"prompt as long as the context of {model.context} tokens, or longer")
        if room < settings.max_new_tokens:
            raise RowError(
                f"prompt without room for MAX_NEW_TOKENS={settings.max_new_tokens} in the context "
                f"of {model.context} tokens"
            )


def read_questions(answering, path, settings, log):
    """Return EVAL_PROMPTS questions of a file; with HELD_OUT of those that training holds out.

    A row without room for an answer by each of the models is left out, and the log names it. Where
    REWARD marks the answers, the rows are problems, see problem_of.
    """
    is_rewarded = settings.score in ("task", "win") and not settings.score_judge
    wants_answers = needs_answer(f"{settings.reward},{settings.mark}")
    firsts = {}  # prompt -> problem of its first row

    def parse(row, notes):
        problem = {"answer": None}
        if is_rewarded:
            problem = problem_of(row, notes)
            if wants_answers:
                require_answer(problem)
            turns = query_turns(problem)
        else:
            turns = row_prompt(row, notes)
        check_room(answering, turns, settings)
        first = firsts.setdefault(json.dumps(turns), problem)
        if first is not problem:
            fault = "the prompt of an earlier row"
            if first["answer"] != problem["answer"]:
                fault += ", with another answer"
            raise RowError(fault)
        return "problems" if is_rewarded else "prompts", Question(turns, problem)

    questions = read_rows(path, parse, log)
    columns = {}
    for question in questions:
        columns.update(dict.fromkeys(question.problem))
    for question in questions:
        question.problem = {**columns, **question.problem}
    chosen = questions
    if settings.held_out:
        chosen = [one for one in questions if prompt_key(one.turns) % 10 == 0]
    if not chosen:
        raise UserError(f"HELD_OUT=1: no prompt of {path} is held out; must be 0")
    asked = chosen[: settings.eval_prompts]
    if len(asked) < len(questions):
        log(
            f"data: {path}: of {len(questions)} prompts HELD_OUT={settings.held_out:d} leaves out "
            f"{len(questions) - len(chosen)}, EVAL_PROMPTS={settings.eval_prompts} "
            f"{len(chosen) - len(asked)}"
        )
    return asked


def answer_questions(model, questions, settings, count):
    """Return `count` ScoredAnswers to each question, question by question."""
    prompts = [prompt_ids(model.tokenizer, one.turns, settings.layout) for one in questions]
    # The seeds of the RL scripts' evaluation, so that a run's own scores can be repeated.
    seeds = [(settings.seed, 1 << 31, number) for number in range(len(prompts))]
    samples = sampled(model, prompts, count, seeds, settings)
    answers = []
    for number, one in enumerate(samples):
        text = completion(model.tokenizer, prompts[number // count], one.ids)
        answers.append(ScoredAnswer(questions[number // count], text, one.ids, one.finished))
        answers[-1].temperature = settings.temperature
    return answers


# ------------------------------------------------------------------------------------------ scores
def read_documents(path, log):
    """Return the documents of a file: JSON lines with `text` by its name, otherwise the file.

    A .txt file is split at <|endoftext|>, as data/prepare.py splits it.
    """
    if re.search(r"\.(jsonl?(\.zst|\.gz)?|parquet)$", path.lower()):
        return read_rows(path, row_text, log)
    documents = []
    try:
        text = read_file(path).decode("utf-8-sig")
        parts = re.split(r"(?m)<\|endoftext\|>(?:(?=\r?$)|(?<=^<\|endoftext\|>))", text)
        if len(parts) == 1 or not re.search(r"\.txt(\.zst|\.gz)?$", path.lower()):
            return [filled_text({"text": text}, "text")]
        for part in parts:
            document = part.strip("\r\n").removeprefix("<|startoftext|>")
            if document.strip():
                documents.append(document)
        filled_text({"text": "".join(documents)}, "text")
    except (UnicodeDecodeError, RowError) as error:
        raise UserError(f"SCORE_PATH={path!r}: must be UTF-8 text or JSON lines; {error}") from None
    log(f"data: {path}: split at <|endoftext|>: {len(documents)} documents")
    return documents


def window_rows(model, stream, stride):
    """Return Continuations that score all ids of a stream but the first, in windows of the model's context.

    Without a stride, windows stand side by side. With one, a window ends `stride` ids after the one
    before it and scores these ids only, so that they have a longer context.
    """
    last = len(stream) - 1
    rows = []
    first = 0
    for end in [*range(model.context, last, stride or model.context), last]:
        begin = max(0, end - model.context) if stride else first
        rows.append(Continuation(stream[begin : first + 1], stream[first + 1 : end + 1]))
        first = end
    return rows


def document_rows(stream, bos_id):
    """Return Continuations that score the same ids, a document in each: it is seen as a whole, from its BOS on.

    Its last id predicts the BOS of the next document.
    """
    begins = [place for place, token in enumerate(stream) if token == bos_id]
    ends = [*begins[1:], len(stream) - 1]
    spans = zip(begins, ends, strict=True)
    return [
        Continuation([bos_id], stream[begin + 1 : end + 1]) for begin, end in spans if begin < end
    ]


def bos_ends_texts(tokenizer):
    """Return whether a text ends with the BOS of the next one. Those of some imported models do not."""
    return tokenizer.facts.get("text_end", tokenizer.bos_id) == tokenizer.bos_id


def summed_nats(model, rows):
    """Return the nats of the answers of all rows. BOS counts only where it ends texts."""
    nats = 0.0
    for row, logps in zip(rows, answer_logps(model, rows, one_document=False), strict=True):
        if not bos_ends_texts(model.tokenizer):
            logps = logps[torch.tensor(row.answer) != model.tokenizer.bos_id]
        nats -= logps.sum().item()
    return nats


def score_text(models, path, settings):
    """Return bits per byte of texts over windows of the model's context, as val_bpb is defined.

    The bytes are those that the tokens decode to, but never more than the text has: a tokenizer
    without a piece for the space decodes to a third more. If a tokenizer loses bytes of a text, the
    bits per byte of the text itself are returned too.
    """
    model = models.scored
    stride = settings.eval_stride
    if stride >= model.context:
        raise UserError(f"EVAL_STRIDE={stride}: must be less than the context, {model.context}")
    if settings.stateful and model.network.config.positions == "learned":
        raise UserError(
            f"STATEFUL=1: must be 0, for the model's learned positions end at {model.context} tokens"
        )
    documents = read_documents(path, models.log)
    stream = []
    size = 0
    for text in documents:
        ids = model.tokenizer.encode(text)
        stream += [model.tokenizer.bos_id, *ids]
        size += len(decode_bytes(model.tokenizer, ids))
    if not size:
        raise UserError(f"SCORE_PATH={path!r}: {model.tokenizer.file} has no token for any of it")
    source_size = len("".join(documents).encode())
    if size > source_size:
        models.log(
            f"warning: the tokens decode to {size} bytes, more than the text has; bits per byte are "
            f"of its {source_size}"
        )
        size = source_size
    count = len(stream) - 1
    if not bos_ends_texts(model.tokenizer):
        count = len(stream) - len(documents)
    result = {"documents": len(documents), "tokens": count}
    result |= {"bytes": size, "source_bytes": source_size}
    nats_by_way = {"": summed_nats(model, window_rows(model, stream, 0))}
    if stride:
        nats_by_way["_sliding"] = summed_nats(model, window_rows(model, stream, stride))
    if settings.stateful:
        # One by one: beside a long document others would be padded to its length.
        rows = document_rows(stream, model.tokenizer.bos_id)
        nats_by_way["_stateful"] = sum(summed_nats(model, [row]) for row in rows)
    for suffix, nats in nats_by_way.items():
        result[f"bpb{suffix}"] = nats / math.log(2) / size
        result[f"nats{suffix}"] = nats
        if source_size != size:
            result[f"bpb{suffix}_of_source"] = nats / math.log(2) / source_size
    return result


def reward_answers(functions, answers, settings, log):
    """Fill in the rewards of answers. Raises UserError."""
    rows = [{**answer.question.problem, "completion_ids": answer.ids} for answer in answers]
    texts = [answer.text for answer in answers]
    try:
        values = call_reward_functions(functions, rows, texts, log, settings.reward_seconds)
        for place, answer in enumerate(answers):
            answer.rewards = {name: column[place] for name, column in values.items()}
    except RewardFault as fault:
        sys.stderr.write(fault.traceback)
        raise
    weigh(functions, answers)


def count_right(functions, answers, count):
    """Return how many of the `count` answers to each question are right."""
    marks = [is_right(answer, functions) for answer in answers]
    return [marks[start : start + count].count(True) for start in range(0, len(marks), count)]


def reward_scores(functions, answers):
    """Return the mean of each function's rewards over the answers to which it applies."""
    scores = {}
    for function in functions:
        values = [one.rewards[function.name] for one in answers]
        values = [value for value in values if value is not None]
        scores[f"rewards/{function.name}"] = statistics.fmean(values) if values else None
    return scores


def score_task(models, path, settings):
    """Return how often greedy decoding is right, and pass@k: whether one of k samples is.

    pass@k is unbiased (arXiv 2107.03374, equation 1): with c right ones of n samples it is
    1 - C(n - c, k) / C(n, k).
    """
    n = settings.eval_samples
    questions = read_questions([models.scored], path, settings, models.log)
    functions = with_mark(load_reward_functions(settings.reward), settings.mark)
    greedy = answer_questions(models.scored, questions, replace(settings, temperature=0.0), 1)
    reward_answers(functions, greedy, settings, models.log)
    result = {"greedy": interval(count_right(functions, greedy, 1))}
    answers = answer_questions(models.scored, questions, settings, n)
    reward_answers(functions, answers, settings, models.log)
    counts = count_right(functions, answers, n)
    for k in sorted({n, *(1 << power for power in range(n.bit_length()))}):
        result[f"pass{k}"] = interval([1 - math.comb(n - c, k) / math.comb(n, k) for c in counts])
    result |= reward_scores(functions, answers)
    models.answers[path] = [answer.row() for answer in greedy + answers]
    return {**result, "n": len(questions), "samples": n}


def pair_margins(model, pairs):
    """Return the log-probability of the chosen answer less that of the rejected one, for each pair.

    These are summed and per token, float64 (n, 2). Returned with them is how many contexts were cut.
    """
    rows = []
    for turns, *answers in pairs:
        rows += answer_rows(model, turns, answers)
    values = [[logps.sum().item(), logps.mean().item()] for logps in answer_logps(model, rows)]
    values = np.array(values)
    return values[::2] - values[1::2], sum(row.is_cut for row in rows)


def reward_margins(model, pairs):
    """Return by how much reward the chosen answer of each pair leads, and how many contexts were cut."""
    conversations = []
    for turns, *answers in pairs:
        conversations += [[*turns, answer] for answer in answers]
    values, contexts_cut = rewards(model, conversations)
    values = np.array(values)
    return values[::2] - values[1::2], contexts_cut


def score_preference(models, path, settings):
    """Return how often the chosen answer has the higher log-probability, and by how much.

    It is summed and per token, relative to SCORE_MODEL if there is one (DPO's reward), and also the
    reward if the model has a value head. A tie counts as wrong.
    """
    both = [model for model in (models.scored, models.other) if model]

    def parse(row, notes):
        name, (turns, *answers) = row_pair(row, notes)
        for model in both:
            fitted_turns(model.tokenizer, [*turns, answers[0]], notes)
            answer_rows(model, turns, answers)  # or RowError
        return name, (turns, *answers)

    pairs = read_rows(path, parse, models.log)
    margins, contexts_cut = pair_margins(models.scored, pairs)
    if models.other:
        reference, count = pair_margins(models.other, pairs)
        margins -= reference
        contexts_cut += count
    columns = dict(zip(("", "_per_token"), margins.T, strict=True))
    result = {"contexts_cut": contexts_cut}
    if hasattr(models.scored.network, "w_value"):
        columns["_reward"], result["contexts_cut_reward"] = reward_margins(models.scored, pairs)
    for name, values in columns.items():
        result[f"accuracy{name}"] = interval([float(value > 0) for value in values])
        result[f"margin{name}"] = interval(values.tolist(), share=False)
        result[f"ties{name}"] = values.tolist().count(0)
    longer = [
        float(len(one.encode()) > len(two.encode())) for _, (_, one, *_), (_, two, *_) in pairs
    ]
    return {**result, "chosen_longer": interval(longer), "n": len(pairs)}


def score_win(models, path, settings):
    """Return how often the answer to a prompt is better than SCORE_MODEL's, a tie being half a win.

    The reward decides: by SCORE_JUDGE, or the total of REWARD. Intervals are paired by prompt.
    """
    both = [models.scored, models.other]
    questions = read_questions(both, path, settings, models.log)
    functions = [] if models.judge else load_reward_functions(settings.reward)
    models.answers[path] = []
    contexts_cut = 0
    sides = []
    for model in both:
        answers = answer_questions(model, questions, settings, 1)
        if models.judge:
            # They are not learned: the judge's template may drop thoughts.
            talks = []
            for one in answers:
                message = {"content": one.text, "train": False}
                talks.append([*one.question.turns, ("<|assistant|>", one.text, message)])
            values, count = rewards(models.judge, talks)
            contexts_cut += count
            for answer, value in zip(answers, values, strict=True):
                answer.reward = value
        else:
            reward_answers(functions, answers, settings, models.log)
        models.answers[path] += [{**answer.row(), "model": model.source} for answer in answers]
        sides.append(answers)
    leads = []
    for answer, other in zip(*sides, strict=True):
        # Equal answers tie, though the last digits of their rewards may differ between batches.
        leads.append(0.0 if answer.text == other.text else answer.reward - other.reward)
    wins = sum(lead > 0 for lead in leads)
    ties = leads.count(0)
    own, others = sides
    return {
        "win_rate": interval([(lead > 0) + (lead == 0) / 2 for lead in leads]),
        "wins": wins,
        "ties": ties,
        "losses": len(leads) - wins - ties,
        "reward": statistics.fmean(answer.reward for answer in own),
        "reward_of_other": statistics.fmean(answer.reward for answer in others),
        "difference": interval(leads, share=False),
        "contexts_cut": contexts_cut,
        "n": len(leads),
        "judge": models.judge.source if models.judge else f"REWARD={settings.reward}",
    }


def word_groups(text, n):
    """Return each n neighbouring words of a text."""
    words = text.split()
    return [*zip(*(words[start:] for start in range(n)), strict=False)]


def score_quality(models, path, settings):
    """Return how varied NUM_SAMPLES answers to each prompt are.

    distinct: the share of different words, pairs and triples of words (arXiv 1510.03055).
    repetition: the mean share of an answer's groups of four words that it had before (1908.04319).
    """
    questions = read_questions([models.scored], path, settings, models.log)
    answers = answer_questions(models.scored, questions, settings, settings.num_samples)
    models.answers[path] = [answer.row() for answer in answers]
    result = {}
    for n in (1, 2, 3):
        groups = sum((word_groups(answer.text, n) for answer in answers), [])
        result[f"distinct{n}"] = len(set(groups)) / len(groups) if groups else None
    fours = [word_groups(answer.text, 4) for answer in answers]
    repeated = [1 - len(set(groups)) / len(groups) for groups in fours if groups]
    result["repetition"] = statistics.fmean(repeated or [0.0])
    result["words"] = statistics.fmean(len(answer.text.split()) for answer in answers)
    result["tokens"] = statistics.fmean(len(answer.ids) for answer in answers)
    result["finished"] = statistics.fmean(answer.finished for answer in answers)
    return {**result, "n": len(answers), "prompts": len(questions)}


MEASURES = {
    "text": score_text,
    "task": score_task,
    "preference": score_preference,
    "win": score_win,
    "quality": score_quality,
}


def not_finite(scores):
    """Return the names of figures, and of intervals, that are NaN or infinite."""
    names = []
    for name, value in scores.items():
        parts = value if isinstance(value, list) else [value]
        if any(isinstance(part, float) and not math.isfinite(part) for part in parts):
            names.append(name)
    return names


def rounded(value):
    """Return a figure, or a list of figures, to five digits."""
    if isinstance(value, list):
        return [rounded(part) for part in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def score(settings):
    """Print SCORE for each file of SCORE_PATH; return and write all figures."""
    runtime = start_runtime(settings.device, settings.compile)
    if settings.score in ("task", "preference", "win"):
        settings = replace(settings, layout="chat")
    reports = []

    def log(line):
        print(line)
        reports.append(str(line))

    model = open_model("ARTIFACT", settings.artifact, runtime)
    models = Models(model, None, None, log)
    if settings.score_model or settings.score == "win":
        models.other = open_model("SCORE_MODEL", settings.score_model, runtime)
    if settings.score_judge:
        models.judge = open_model("SCORE_JUDGE", settings.score_judge, runtime)
        if not hasattr(models.judge.network, "w_value"):
            raise UserError(
                f"SCORE_JUDGE={settings.score_judge!r}: has no value head; must be a reward model"
            )
    scores = {}
    faults = []
    for path in listed_files("SCORE_PATH", settings.score_path):
        scores[path] = MEASURES[settings.score](models, path, settings)
        figures = [f"{key}:{rounded(value)}" for key, value in scores[path].items()]
        for name in not_finite(scores[path]):
            faults.append(f"{name} of {path}")
            scores[path][name] = None  # JSON has no NaN
        if settings.score_file:  # before the next file or a closed pipe can end the program
            result = {
                "script": Path(__file__).name,
                "model": models.scored.source,
                "score": settings.score,
                "scores": scores,
                "answers": models.answers,
                "rows": reports,
                **describe_machine(runtime),
                "settings": asdict(settings),
            }
            replace_file(settings.score_file, (json.dumps(result, indent=1) + "\n").encode())
        print(f"{settings.score} {path}:", *figures, flush=True)
    if faults:
        raise FloatingPointError(
            f"SCORE={settings.score}: not finite: {', '.join(faults)}; the weights of "
            f"{models.scored.source} are no good"
        )
    return scores


# -------------------------------------------------------------------------------------------- main
def main():
    """Run what MODE says. Return the exit code."""
    settings = load_settings(Settings, os.environ, sys.argv[1:])
    check_modes(settings)
    modes = {"generate": sample, "chat": chat, "score": score}
    modes[settings.mode](settings)
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
