"""Import and export models of transformers and llama.cpp: Llama, Qwen2, Qwen3, Qwen3.5; LoRA adapters for PEFT.

    python convert.py import models/Qwen3.5-0.8B runs/qwen               # from Hugging Face's files
    python convert.py import models/SmolLM2.gguf runs/smollm2            # from a GGUF file
    python convert.py export runs/qwen out --like models/Qwen3.5-0.8B    # back, in the form of the original
    python convert.py export runs/base out                               # any network, in float32
    python convert.py export runs/tuned adapters --adapters              # LoRA adapters alone
    python convert.py export runs/smollm2 tuned.gguf                     # for llama.cpp

FOLDER has config.json, safetensors files and a tokenizer, or is a GGUF file. MODEL is an artifact, a checkpoint's
folder, or a run's folder (its newest whole checkpoint). The environment variable TOKENIZER_PATH names
another SentencePiece model, or `bytes`. docs/models.md says what works.

Sections between `# === shared:` fences are in other scripts too, byte for byte (tools/sync.py);
in a copy of your own change them as you like.
The rest is this script's: layouts (names that begin with hf_: config.json and safetensors in and
out), tokenizers (tokenizer.json and chat templates), commands, GGUF, and main.

Where to change what:
    an architecture of transformers       HF_ARCHITECTURES, hf_known, hf_architecture
    the names of its tensors              hf_views, hf_attention_views, hf_delta_views
    its config.json, in and out           hf_shape, hf_config
    what is refused by name               HF_REFUSED, hf_rope, hf_layers
    another kind of tokenizer.json        tokenizer_facts, hf_split, rank_lines
    what a tokenizer must be              check_bpe, check_ids, check_added
    chat templates and stop tokens        hf_chat, hf_templates
    what the folder of an export has      own_files, like_files, adapter_files, tokenizer_files
    the classes that an export brings     REMOTE_CLASSES; they are in tools/modeling_underpar.py
    GGUF: layouts, names, splits          GGUF_ARCHITECTURES, GGUF_CONFIG, GGUF_PARTS, GGUF_SPLITS
    a new command                         main, make_parser
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
#     "safetensors==0.8.0",
# ]
# ///

import argparse
import base64
import collections
import contextlib
import functools
import hashlib
import importlib.util
import inspect
import io
import itertools
import json
import math
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import unicodedata
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import numpy as np
import regex
import sentencepiece
import tiktoken
import torch
import torch.distributed as dist
import torch.nn.functional as F
import zstandard
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as activation_checkpoint


class UserError(Exception):
    """A mistake of the user. It is printed as one line, and the exit code is 2."""


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


# === shared: models ===
AVERAGES = ("raw", "ema", "swa")  # weights that a checkpoint has


@dataclass
class Weights:
    """A MODEL: its weights, and what its file or folder says about them."""

    path: Path
    tensors: dict[str, Tensor]  # float32, on the CPU
    shape: dict  # the settings that rebuild the network
    header: dict = field(default_factory=dict)  # of an artifact or a delta: tokenizer_sha256, meta
    coded: dict[str, Coded] = field(default_factory=dict)  # of an artifact
    run: dict = field(default_factory=dict)  # of a checkpoint: settings, steps, tokenizer_sha256
    exporter: dict = field(default_factory=dict)  # of a checkpoint: about its quantizers
    average: str = ""  # of a checkpoint: raw, ema or swa
    unmerged: dict = field(default_factory=dict)  # of a checkpoint: tensors, adapters by themselves


def read_json(path):
    """Return what a JSON file of an object has; {} if there is no such file. Raises UserError."""
    if not path.is_file():
        return {}
    with one_line(f"{path}: is no JSON"):
        value = json.loads(path.read_bytes())
    if not isinstance(value, dict):
        raise UserError(f"{path}: must be a JSON object, and is {value!r:.50}")
    return value


def chosen_weights(folder):
    """Return which weights of a run were packed, by its result.json; `raw` without one."""
    for run in (folder, folder.parent):
        chosen = read_json(run / "result.json").get("weights")
        if chosen in AVERAGES:
            return chosen
    return "raw"


def merge_adapters(tensors):
    """Return a checkpoint's tensors, to which LoRA's (section lora of train_sft.py) are added.

    All are float32: those that were frozen beside adapters may be bfloat16.
    """
    merged = {}
    for name, w in tensors.items():
        w = w.float()
        module, adapted, last = name.partition(".parametrizations.")
        if not adapted:
            merged[name] = w
        elif last.endswith(".original"):
            matrix = last.removesuffix(".original")
            a, b, scale = (
                tensors[f"{module}{adapted}{matrix}.0.{part}"]
                for part in ("lora_a", "lora_b", "scale")
            )
            merged[f"{module}.{matrix}"] = torch.addmm(w, scale * b, a)
    return merged


def require_codes(coded, tensors):
    """Raise ArtifactError unless the codes are those of the weights beside them."""
    for name, part in coded.items():
        is_right = name in tensors and type(part.bits) is int
        if is_right:
            values = dequantize(part.codes, part.scale).view_as(tensors[name])
            is_right = torch.equal(values, tensors[name])
        require(is_right, f"coded.pt has codes of other weights under {name!r:.80}")


def trained_names(tensors, settings):
    """Return the names of the tensors that a run trained, in its order.

    With adapters they are trained alone, and beside them the value head of a reward model or of PPO.
    """
    if not any(".lora_" in name for name in tensors):
        return list(tensors)
    has_head = settings.get("objective") == "reward" or "gae_lambda" in settings
    return [name for name in tensors if ".lora_" in name or (has_head and name == "w_value")]


def read_checkpoint(folder, average):
    """Return a whole checkpoint's weights, or a folder's of `unpack` or `apply`. UserError.

    Adapters are added to their matrices.
    """
    load = functools.partial(torch.load, map_location="cpu", weights_only=True, mmap=True)
    with one_line(f"{folder}: no checkpoint with {average} weights"):
        meta = json.loads((folder / "meta.json").read_bytes())
        tensors = load(folder / "model.pt")
        check_weights(tensors)
        if "header" in meta:  # of `unpack` or `apply`
            check_header(meta["header"])
            coded = {name: Coded(*parts) for name, parts in load(folder / "coded.pt").items()}
            require_codes(coded, tensors)
            return Weights(folder, tensors, meta["shape"], meta["header"], coded)
        shape = meta.get("shape")
        training = {}
        if (folder / "training.pt").is_file():
            training = load(folder / "training.pt")
            if average != "raw":
                collected = training.get(average, {}).get("count", 0)
                require(collected > 0, "none had been collected when it was saved")
                trained = trained_names(tensors, meta["settings"])
                tensors |= dict(zip(trained, training[average]["values"], strict=True))
                check_weights(tensors)
        else:  # the folder `final` of a run
            packed = chosen_weights(folder)
            require(average == packed, f"it has the {packed} weights, which were packed, alone")
        sha256 = meta.get("identity", {}).get("tokenizer_sha256")  # older checkpoints have none
        return Weights(
            folder,
            merge_adapters(tensors),
            shape,
            run={**meta["settings"], "steps": meta["step"], "tokenizer_sha256": sha256},
            exporter=dict(training.get("exporter", {})),
            average=average,
            unmerged=tensors,
        )


def read_weights(path, average=""):
    """Return a MODEL: an artifact's weights, or those of a folder's newest whole checkpoint.

    average: which weights of a checkpoint; "": those that its run chose. Raises UserError, or
    ArtifactError if an artifact is not as it was written.
    """
    folder = Path(path)
    if folder.is_dir():
        checkpoint, faults = newest_checkpoint(folder)
        if checkpoint is None:
            raise UserError(f"{path}: no whole checkpoint; {'; '.join(faults)}")
        for fault in faults:
            print(fault, file=sys.stderr)
        weights = read_checkpoint(checkpoint, average or chosen_weights(folder))
    elif folder.is_file():
        header, tensors, coded = read_artifact(path)
        weights = Weights(folder, tensors, header["settings"], header, coded)
    else:
        raise UserError(f"{path}: no such file; a run's artifact is runs/<RUN_ID>/model.upar")
    known_network(weights)  # or an error
    return weights


def check_average(average, *models):
    """Raise UserError if --weights is given and none of the models has several weights."""
    if average and not any(model.average for model in models):
        raise UserError(
            f"--weights {average}: must be with a run's checkpoint; an artifact, an unpacked folder "
            "and an imported model have one set of weights"
        )


def network_tensors(weights):
    """Return a MODEL's tensors without the value head of a reward model, which no network here has."""
    return {name: w for name, w in weights.tensors.items() if name != "w_value"}


def known_network(source):
    """Return the network of a MODEL. Raises ArtifactError if this script does not know it, or if a
    weight is not finite."""
    with one_line(source.path):
        check_weights(source.tensors)
        return fill_network(empty_network(checked_config(source.shape)), network_tensors(source))


def rebuild(source):
    """Return the network of a MODEL. Raises ArtifactError if it is none, or gives no logits."""
    network = known_network(source)
    with one_line(f"{source.path}: its settings rebuild no model"), torch.no_grad():
        require(network(torch.tensor([[0]])).isfinite().all(), "its logits are not finite")
    return network


def given_tokenizer():
    """Return the tokenizer's file that the environment names, or ""."""
    return os.path.expanduser(os.environ.get("TOKENIZER_PATH", ""))


def find_tokenizer(source, read):
    """Return read(path) of a MODEL's tokenizer: TOKENIZER_PATH, or the one beside it. UserError."""
    folder = source.path.parent
    beside = [*folder.glob("*.model"), *folder.glob("*.tiktoken"), "bytes"]
    if source.header:
        beside = [folder / source.header["meta"]["tokenizer"]]
    tokenizer_path = given_tokenizer()
    path = tokenizer_path or beside[0]
    with one_line(f"{path}: no tokenizer of these scripts; set TOKENIZER_PATH"):
        tokenizer = read(path)
    # Post-training adds four tokens for the roles to a tokenizer that has none.
    is_right = source.shape["vocab_size"] - tokenizer.vocab_size in (0, 4)
    is_right = is_right and tokenizer.bos_id == source.shape["bos_id"]
    sha256 = (source.header or source.run).get("tokenizer_sha256")
    if not is_right or sha256 not in (None, tokenizer.sha256):
        prefix = f"TOKENIZER_PATH={tokenizer_path!r}: " * bool(tokenizer_path)
        raise UserError(
            f"{prefix}{tokenizer.file} has {tokenizer.vocab_size} tokens; "
            f"must be the tokenizer of {source.path}, with {source.shape['vocab_size']}; set "
            "TOKENIZER_PATH"
        )
    return tokenizer


def write_folder(out, files):
    """Write a new folder of files and their SHA-256 sums.

    files: name -> bytes, or a function that writes a file of this path. A name may have a folder.
    Raises OSError. After an error or Ctrl-C there is no folder.
    """
    out.mkdir()
    try:
        for name, content in files.items():
            (out / name).parent.mkdir(exist_ok=True)
            if isinstance(content, bytes):
                replace_file(out / name, content)
            else:
                content(out / name)
        sums = [f"{sha256_file(out / name)}  {name}\n" for name in sorted(files)]
        # The sums come last: without them the folder is no checkpoint.
        replace_file(out / "SHA256SUMS", "".join(sums).encode())
    except Exception as error:  # each package has its own for a full disk
        reason = str(error) or type(error).__name__
        raise OSError(f"{out}: cannot be written: {reason}") from None
    finally:
        if not (out / "SHA256SUMS").exists():
            shutil.rmtree(out, ignore_errors=True)


# === end: models ===


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


# === shared: ends ===
def stop_ids(tokenizer):
    """Return the tokens that end an answer: an imported model's, or BOS of the next text; <|end|>."""
    stop = {*tokenizer.facts.get("stop", [tokenizer.bos_id])}
    if tokenizer.roles:
        stop.add(tokenizer.roles["<|end|>"])
    return frozenset(stop)


# === end: ends ===


# ----------------------------------------------------------------------------------------- layouts
# What all models of transformers that can be read and written have, in fields of GPTConfig.
HF_SHAPE = {
    "mlp": "swiglu",
    "positions": "rope",
    "qk_gain_init": 0.0,
    "residual_mix": False,
    "unet_skips": False,
    "bigram_vocab_size": 0,
    "logit_softcap": 0.0,
    "gdn_light": False,
}
# And what each architecture has.
HF_ARCHITECTURES = {
    "LlamaForCausalLM": {"qkv_bias": False, "qk_norm": False, "attn_gate": False},
    "Qwen2ForCausalLM": {"qkv_bias": True, "qk_norm": False, "attn_gate": False},
    "Qwen3ForCausalLM": {"qkv_bias": False, "qk_norm": True, "attn_gate": False},
    "Qwen3_5ForCausalLM": {"qkv_bias": False, "qk_norm": True, "attn_gate": True},
}
HF_LAYERS = {"full_attention": "a", "linear_attention": "g"}
# The network has no part for these. The values are those that it computes.
HF_REFUSED = {
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "is_causal": True,
    "hidden_act": "silu",
    "linear_conv_kernel_dim": CONV_TAPS,
    "quantization_config": None,
}
# The fields of config.json that gdn_shape has, in its order.
HF_GDN_SHAPE = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
)
# Llama 3's scaling of rotary positions: the fields of config.json that rope_scaling has, in its order.
HF_SCALING = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
)
# Parts of a model that are not its text model: images, and predictors of several tokens.
HF_SKIPPED = re.compile(r"(model\.)?(visual|mtp)\.|.*rotary_emb\.inv_freq$")
# Files that `export --like` does not copy: weights in any format, their index, and our sums.
HF_WEIGHTS = re.compile(r".*\.(safetensors|bin|pth?|gguf|h5|msgpack|index\.json)|SHA256SUMS")
# Chat templates beside chat_template.jinja, each under its name.
TEMPLATE_FILES = "additional_chat_templates/*.jinja"
# The chat templates that are used, by their names in transformers, and the facts that have them.
TEMPLATE_FACTS = {"default": "template", "tool_use": "tool_template"}
# Where transformers finds classes that it does not have, in an export's own code.
REMOTE_CLASSES = {
    "auto_map": {
        "AutoConfig": "modeling_underpar.UnderparConfig",
        "AutoModel": "modeling_underpar.UnderparModel",
        "AutoModelForCausalLM": "modeling_underpar.UnderparForCausalLM",
    },
}


# How an answer in the roles of these scripts is read: transformers' parse_response and its server.
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
    },
}


def load_safetensors():
    """Return the module safetensors. Raises UserError if it is not installed."""
    try:
        import safetensors.torch
    except ImportError:
        raise UserError("needs safetensors: pip install safetensors") from None
    return safetensors


def hf_views(network):
    """Return the tensors of a model of transformers, by name, as views of a network's weights."""
    views = {
        "model.embed_tokens.weight": network.embed,
        "model.norm.weight": network.final_norm.weight,
    }
    if network.head is not None:
        views["lm_head.weight"] = network.head
    words = network.config.layers.split()
    for i, (block, mixer) in enumerate(network.layers):
        gate, up = block.mlp.w_up.chunk(2)
        layer = {
            "input_layernorm.weight": block.mixer_norm.weight,
            "post_attention_layernorm.weight": block.mlp_norm.weight,
            "mlp.gate_proj.weight": gate,
            "mlp.up_proj.weight": up,
            "mlp.down_proj.weight": block.mlp.w_down,
        }
        if words[i] == "g":
            layer |= hf_delta_views(mixer)
        else:
            layer |= hf_attention_views(mixer)
        views |= {f"model.layers.{i}.{name}": view for name, view in layer.items()}
    return views


def hf_attention_views(mixer):
    """Return hf_views of a layer's attention."""
    views = {"self_attn.o_proj.weight": mixer.w_o}
    splits = [count * mixer.head_dim for count in mixer.parts]
    for name, view in zip("qkv", mixer.w_qkv.split(splits), strict=True):
        views[f"self_attn.{name}_proj.weight"] = view
    if mixer.bias is not None:
        for name, view in zip("qkv", mixer.bias.split(splits), strict=True):
            views[f"self_attn.{name}_proj.bias"] = view
    if hasattr(mixer.q_norm, "weight"):
        views["self_attn.q_norm.weight"] = mixer.q_norm.weight
        views["self_attn.k_norm.weight"] = mixer.k_norm.weight
    return views


def hf_delta_views(mixer):
    """Return hf_views of a layer's Gated DeltaNet."""
    qkv, z = mixer.w_qkvg.tensor_split([mixer.conv.size(1)])
    decay, step_size = mixer.ab.chunk(2)
    return {
        "linear_attn.in_proj_qkv.weight": qkv,
        "linear_attn.in_proj_z.weight": z,
        "linear_attn.in_proj_a.weight": decay,
        "linear_attn.in_proj_b.weight": step_size,
        "linear_attn.conv1d.weight": mixer.conv.mT[:, None],
        "linear_attn.A_log": mixer.A_log,
        "linear_attn.dt_bias": mixer.dt_bias,
        "linear_attn.norm.weight": mixer.norm,
        "linear_attn.out_proj.weight": mixer.w_o,
    }


def hf_number(config, name, high=1 << 24, default=None):
    """Return a whole number of a config.json; null is as missing. Raises UserError."""
    value = config.get(name)
    if value is None:
        value = default
    if type(value) is not int or not 1 <= value <= high:
        raise UserError(
            f"config.json: {name}={value!r:.50}: must be a whole number from 1 to {high}"
        )
    return value


def hf_real(config, name, default=None):
    """Return a number above 0 of a config.json. Raises UserError."""
    value = config.get(name, default)
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise UserError(f"config.json: {name}={value!r:.50}: must be a number above 0")
    return float(value)


def hf_rope(config, head_dim, default_share):
    """Return the fields of GPTConfig about rotary positions, of a config.json. Raises UserError.

    default_share: of a head's dimensions, those that rotate if the config does not say it.
    """
    # transformers 5 writes rope_parameters, and goes by rope_scaling if there are both.
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise UserError(
            f"config.json: rotary positions {rope!r:.90}: must be one kind for all layers"
        )
    share = default_share
    for place in (config, rope):
        if place.get("partial_rotary_factor") is not None:
            share = hf_real(place, "partial_rotary_factor")
    if share > 1 or (default_share == 1 and share < 1):
        raise UserError(f"config.json: partial_rotary_factor={share}: must be 1")
    kind = rope.get("rope_type", rope.get("type", "default"))
    scaling = []
    if kind == "llama3":
        length = HF_SCALING[-1]
        rope = {length: config["max_position_embeddings"]} | rope
        if length in config:  # as transformers has it
            rope = rope | {length: config[length]}
        scaling = [hf_real(rope, name) for name in HF_SCALING]
    elif kind != "default":
        raise UserError(f"config.json: rope_type={kind!r}: must be default or llama3")
    elif rope.get("factor"):
        print(
            f"config.json: not used: factor={rope['factor']!r:.50} of rotary positions with rope_type "
            "default or none; transformers does not use it either"
        )
    return {
        "rope_base": hf_real(rope, "rope_theta", config.get("rope_theta", ROPE_BASE)),
        "rope_dims": int(head_dim * share),
        "rope_scaling": scaling,
    }


def hf_norms(gated, count):
    """Return the field `norms` of GPTConfig: Qwen3.5, whose attention is gated, has its own kind."""
    return " ".join(["rms_offset" if gated else "rms_weight"] * count)


def hf_known(config):
    """Return what the network has of a config.json's architecture. Raises UserError without any."""
    architectures = config.get("architectures")
    architecture = str(architectures)
    if isinstance(architectures, list) and len(architectures) == 1:
        architecture = str(architectures[0])
    known = HF_ARCHITECTURES.get(architecture.replace("ConditionalGeneration", "CausalLM"))
    if known is None:
        names = ", ".join(HF_ARCHITECTURES)
        raise UserError(f"config.json: architectures={architecture!r:.90}: must be one of {names}")
    # AutoModel of transformers chooses its class by model_type, not by architectures.
    kind = config.get("model_type")
    if kind and str(kind).removesuffix("_text") != re.split("For[CM]", architecture)[0].lower():
        raise UserError(f"config.json: model_type={kind!r:.50}: must be that of {architecture}")
    for name, value in HF_REFUSED.items():
        if config.get(name) not in (None, value):
            raise UserError(f"config.json: {name}={config[name]!r:.90}: must be {value!r}")
    return known


def hf_layers(config, known):
    """Return the kinds of the layers of a config.json. Raises UserError."""
    count = hf_number(config, "num_hidden_layers", 4096)
    every = hf_number(config, "full_attention_interval", 4096, 4 if known["attn_gate"] else 1)
    kinds = ["linear_attention"] * (every - 1) + ["full_attention"]
    kinds = config.get("layer_types") or (kinds * count)[:count]
    allowed = [*HF_LAYERS] if known["attn_gate"] else ["full_attention"]
    if not isinstance(kinds, list) or not all(kind in allowed for kind in kinds):
        raise UserError(
            f"config.json: layer_types={kinds!r:.90}: must be among {', '.join(allowed)}"
        )
    if len(kinds) != count:
        raise UserError(
            f"config.json: layer_types: has {len(kinds)} layers, num_hidden_layers {count}"
        )
    return kinds


def hf_shape(config):
    """Return the fields of GPTConfig for a config.json. Raises UserError for what has no part."""
    # Transformers takes this from the top level if it is there.
    text = config.get("text_config") or {}
    if not isinstance(text, dict):
        raise UserError(f"config.json: text_config={text!r:.50}: must be an object")
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    if not isinstance(tied, bool | None):
        raise UserError(f"config.json: tie_word_embeddings={tied!r:.50}: must be true or false")
    outer = {name: config.get(name) for name in ("architectures", "model_type")}
    config = config | text | outer
    known = hf_known(config)
    kinds = hf_layers(config, known)
    width = hf_number(config, "hidden_size")
    heads = hf_number(config, "num_attention_heads")
    head_dim = hf_number(config, "head_dim", default=width // heads)
    context = hf_number(config, "max_position_embeddings", 1 << 40)
    shape = {
        "vocab_size": hf_number(config, "vocab_size"),
        "bos_id": -1,  # the tokenizer's; config.json often has none
        "layers": " ".join(HF_LAYERS[kind] for kind in kinds),
        "norms": hf_norms(known["attn_gate"], len(kinds)),
        # Scores have windows of this length, which must fit into memory.
        "train_seq_len": min(context, 4096),
        "context": context,
        "model_dim": width,
        "num_heads": heads,
        "num_kv_heads": hf_number(config, "num_key_value_heads", default=heads),
        "head_dim": head_dim,
        "mlp_hidden": hf_number(config, "intermediate_size"),
        "norm_eps": hf_real(config, "rms_norm_eps"),
        "tie_embeddings": bool(tied),
    }
    if heads % shape["num_kv_heads"]:
        raise UserError(
            f"config.json: num_key_value_heads={shape['num_kv_heads']}: must divide "
            f"num_attention_heads={heads}"
        )
    if "linear_attention" in kinds:
        shape["gdn_shape"] = [hf_number(config, name) for name in HF_GDN_SHAPE]
    return HF_SHAPE | known | shape | hf_rope(config, head_dim, 0.25 if known["attn_gate"] else 1.0)


def hf_architecture(shape):
    """Return transformers' name for the architecture of a network. Raises UserError without one."""
    fitting = [
        name for name, known in HF_ARCHITECTURES.items() if known.items() <= vars(shape).items()
    ]
    if not fitting:
        raise UserError(f"transformers has no model with the biases, norms and gates of {shape}")
    architecture = fitting[0]
    words = shape.layers.split()
    wanted = HF_SHAPE | {"norms": hf_norms(shape.attn_gate, len(words))}
    kinds = HF_LAYERS.values() if shape.attn_gate else ["a"]
    wanted["layers"] = " ".join(word if word in kinds else "a" for word in words)
    if not shape.attn_gate:
        wanted["rope_dims"] = shape.attention_width if shape.rope_dims else 0  # all of a head
    for name, value in wanted.items():
        actual = getattr(shape, name)
        if actual != value:
            raise UserError(f"transformers' {architecture} has no {name}={actual!r}")
    return architecture


def hf_config(shape):
    """Return the config.json of a network. Raises UserError if transformers has no such model."""
    architecture = hf_architecture(shape)
    words = shape.layers.split()
    head_dim = shape.attention_width
    rope = {"rope_type": "default"}
    if shape.attn_gate:
        rope["partial_rotary_factor"] = (shape.rope_dims or head_dim) / head_dim
    if shape.rope_scaling:
        *factors, length = shape.rope_scaling
        scaling = zip(HF_SCALING, [*factors, int(length)], strict=True)
        rope |= {"rope_type": "llama3"} | dict(scaling)
    config = {
        "architectures": [architecture],
        # llama, qwen2, qwen3, or qwen3_5_text, which has another model beside for images
        "model_type": architecture.removesuffix("ForCausalLM").lower() + "_text" * shape.attn_gate,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.model_dim,
        "head_dim": head_dim,
        "intermediate_size": shape.mlp_hidden or int(shape.mlp_mult * shape.model_dim),
        "num_hidden_layers": len(words),
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "rope_parameters": rope | {"rope_theta": shape.rope_base},  # of transformers 5
        "rope_scaling": rope if shape.rope_scaling else None,  # of transformers 4 and others
        "rope_theta": shape.rope_base,
        "max_position_embeddings": shape.context or shape.train_seq_len,
        "rms_norm_eps": shape.norm_eps or torch.finfo(torch.float32).eps,
        "tie_word_embeddings": shape.tie_embeddings,
    }
    if shape.attn_gate:
        names = {word: kind for kind, word in HF_LAYERS.items()}
        config["layer_types"] = [names[word] for word in words]
        config |= zip(HF_GDN_SHAPE, shape.gdn_sizes, strict=True)
        config["linear_conv_kernel_dim"] = CONV_TAPS
    return config


@dataclass
class HfTensor:
    """A tensor in a safetensors file, of which only the header has been read."""

    path: Path
    key: str
    name: str  # in hf_views
    dtype: str
    shape: list

    def read(self):
        """Return the tensor. Raises UserError."""
        with (
            one_line(f"{self.path}: {self.key}: cannot be read"),
            load_safetensors().safe_open(self.path, framework="pt") as file,
        ):
            return file.get_tensor(self.key)


def hf_files(folder):
    """Return the paths of the safetensors files of a folder's model. Raises UserError."""
    path = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if path.is_file() and not (folder / names[0]).is_file():  # in the order of transformers
        placed = read_json(path).get("weight_map")
        values = [*placed.values()] if isinstance(placed, dict) else [None]
        for value in values:
            if not isinstance(value, str) or not re.fullmatch(r"[\w.-]+\.safetensors", value):
                raise UserError(f"{path}: weight_map: {value!r:.90}: must name files beside it")
        names = sorted(set(values))
    for name in names:
        if not (folder / name).is_file():
            raise UserError(
                f"{folder / name}: no such file; the weights must be in model.safetensors, or in files "
                f"that {path.name} lists"
            )
    return [folder / name for name in names]


LFS = b"version https://git-lfs"  # begins what stands for a large file in a clone without Git LFS


def check_pointer(path):
    """Raise UserError if a file is a pointer of Git LFS to what it should be."""
    if path.is_file():
        with open(path, "rb") as file:
            if file.read(len(LFS)) == LFS:
                raise UserError(f"{path}: must be the file, not a pointer of Git LFS: git lfs pull")


def hf_headers(folder):
    """Return the HfTensors of a folder's model. Raises UserError."""
    safetensors = load_safetensors()
    tensors = []
    for path in hf_files(folder):
        check_pointer(path)
        with (
            one_line(f"{path}: no whole safetensors file"),
            safetensors.safe_open(path, framework="pt") as file,
        ):
            for key in file.keys():
                part = file.get_slice(key)
                name = key.replace("model.language_model.", "model.")
                tensors.append(HfTensor(path, key, name, part.get_dtype(), part.get_shape()))
    for name, count in collections.Counter(tensor.name for tensor in tensors).items():
        if count > 1:
            raise UserError(f"{folder}: {name}: is in several files, or twice in one")
    return tensors


def read_hf_headers(folder, tensors=()):
    """Return hf_shape of a folder, and `tensors`, or without any hf_headers. Raises UserError.

    A head in the files that is not the embedding counts, also where config.json says that the two
    are tied. So it is in transformers 5.
    """
    path = folder / "config.json"
    if (folder / "adapter_config.json").is_file():  # transformers takes the weights of its base
        raise UserError(
            f"{folder}: has adapters of PEFT; must be a whole model: merge them into their base model "
            "first (merge_and_unload)"
        )
    if not path.is_file():
        raise UserError(
            f"{folder}: no config.json; must be a folder of Hugging Face's (hf download NAME --local-dir "
            "FOLDER) or a file x.gguf"
        )
    shape = hf_shape(read_json(path))
    tensors = tensors or hf_headers(folder)
    named = {tensor.name: tensor for tensor in tensors}
    head = named.get("lm_head.weight")
    embed = named.get("model.embed_tokens.weight")
    if shape["tie_embeddings"] and head and embed:
        if not torch.equal(head.read().float(), embed.read().float()):
            shape["tie_embeddings"] = False
            print(
                f"{path}: says tie_word_embeddings, but the files have another head, which counts"
            )
    return shape, tensors


def check_hf_headers(folder, shape, tensors):
    """Raise UserError if a folder's HfTensors are not those of a network of this shape.

    Nothing of the network's size is allocated: a config.json may ask for any.
    """
    with one_line(f"{folder}/config.json"):
        views = hf_views(empty_network(GPTConfig(**shape)))
    for tensor in tensors:
        is_tied_head = tensor.name == "lm_head.weight" and shape["tie_embeddings"]
        if HF_SKIPPED.match(tensor.name) or is_tied_head:
            continue
        where = f"{folder}: {tensor.key} {tensor.shape}"
        view = views.pop(tensor.name, None)
        if view is None:
            raise UserError(f"{where}: expected no such tensor")
        if list(view.shape) != tensor.shape:
            raise UserError(f"{where}: expected {list(view.shape)}")
        if not re.fullmatch(r"F(64|32|16|8_E\w+)|BF16", tensor.dtype):
            raise UserError(f"{where}: has dtype {tensor.dtype}; must be of floating-point numbers")
    if views:
        raise UserError(f"{folder}: its safetensors files lack {next(iter(views))}")


def read_hf_tensors(folder, network, tensors):
    """Copy a folder's HfTensors, which were checked, into a network.

    One is in memory at a time. Rows beyond the network's vocabulary, which belong to no token, are
    left out. Raises UserError for NaN and infinite weights.
    """
    views = hf_views(network)
    for tensor in tensors:
        view = views.get(tensor.name)
        if view is None:
            continue
        w = tensor.read().float()
        if not w.isfinite().all():
            raise UserError(f"{folder}: {tensor.key}: has weights that are NaN or infinite")
        with torch.no_grad():
            # Embedding and head may have more rows than the network.
            view.copy_(w[: len(view)])


# ----------------------------------------------------------------------------- tokenizers, imported
# GPT-2's split of a text into parts within which bytes are merged; "ByteLevel" alone means it.
GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# The same where each digit is split off first, as SmolLM2 has it: a digit ends a run of spaces.
DIGITS_SPLIT = GPT2_SPLIT.replace(r" ?\p{N}+", r"\p{N}").replace(r"(?!\S)", r"(?![^\s\p{N}])")

QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN3_5_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Classes of transformers 5 that split texts by an expression of their own and use the normal form
# NFC or not, whatever tokenizer.json says; and models that have such a class, whatever class
# tokenizer_config.json names.
HF_CLASSES = {
    "GPT2Tokenizer": (GPT2_SPLIT, False),
    "Qwen2Tokenizer": (QWEN2_SPLIT, True),
    "Qwen3_5Tokenizer": (QWEN3_5_SPLIT, True),
}
HF_MODEL_CLASSES = {"qwen2": "Qwen2Tokenizer", "qwen3_5": "Qwen3_5Tokenizer"}
# Fields of generation_config.json that say how to sample.
HF_SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")
# The part of a tokenizer.json that makes letters of bytes, and bytes of letters.
BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "use_regex": False,
    "trim_offsets": True,
}
# What an added token of tokenizer.json may be, see AddedTokens.
TOKEN_FLAGS = ("single_word", "lstrip", "rstrip")


def byte_of_letters():
    """Return the byte that each letter stands for in a byte-level vocabulary.

    The 188 printable characters of Latin-1 stand for themselves, and the letters from U+0100 on for
    the other bytes in their order (GPT-2's bytes_to_unicode).
    """
    printable = [byte for byte in range(33, 256) if chr(byte).isprintable()]
    others = sorted(set(range(256)) - set(printable))
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + place): byte for place, byte in enumerate(others)}


def steps_of(tokenizer, name, plural):
    """Return the steps of a part of a tokenizer.json, which may be one, a Sequence of some, or null."""
    described = tokenizer.get(name)
    return (described or {plural: []}).get(plural, [described])


def hf_split(tokenizer):
    """Return the regular expression that splits texts, of a tokenizer.json. Raises UserError."""
    steps = steps_of(tokenizer, "pre_tokenizer", "pretokenizers")
    kinds = [step["type"] for step in steps]
    split = None
    if kinds == ["ByteLevel"]:
        split = GPT2_SPLIT
    elif kinds == ["Digits", "ByteLevel"] and steps[0]["individual_digits"]:
        split = DIGITS_SPLIT
    elif kinds == ["Split", "ByteLevel"] and steps[0]["behavior"] == "Isolated":
        split = None if steps[0].get("invert") else steps[0]["pattern"].get("Regex")
    if split:
        last = steps[-1]
        # ByteLevel itself splits as GPT-2 does, unless use_regex is false, as it must be behind Split.
        splits_once = last.get("use_regex", True) == (kinds[0] != "Split")
        if splits_once and not last.get("add_prefix_space"):
            return split
    raise UserError(
        f"tokenizer.json: pre_tokenizer {' '.join(map(str, kinds))}: must be ByteLevel without a "
        "prefix space, or an isolated Split by Regex or individual Digits before it"
    )


def hf_tokenizer(folder, size):
    """Return the Tokenizer of a folder's tokenizer.json. Its file is JSON, see rank_tokenizer.

    size: the model's number of tokens, which the tokenizer's is not above. Raises UserError for
    what would not be reproduced.
    """
    with one_line(f"{folder}: its tokenizer cannot be used"):
        facts = tokenizer_facts(folder, read_json(folder / "tokenizer.json"), size)
        probe_split(facts["split"])
        return imported_tokenizer(facts)


def imported_tokenizer(facts):
    """Return the Tokenizer of an imported model, whose file has these facts.

    Raises UserError if a chat template is not one of jinja2.
    """
    tokenizer = add_encoder(rank_tokenizer("imported.tiktoken", json.dumps(facts).encode(), {}))
    for fact in TEMPLATE_FACTS.values():
        if fact in facts:
            compile_template(facts[fact])
    return tokenizer


def with_values(tokenizer, assignments):
    """Return an imported tokenizer whose chat template has these variables, NAME=VALUE in JSON.

    Who renders the template may still give others. Raises UserError.
    """
    facts = tokenizer.facts
    if "template" not in facts:
        raise UserError("--set: the model has no chat template")
    given = ""
    for assignment in assignments:
        name, _, value = assignment.partition("=")
        try:
            value = json.dumps(json.loads(value))
        except ValueError:
            value = ""
        if not name.isidentifier() or not value:
            raise UserError(f"--set {assignment!r:.90}: must be NAME=VALUE, the value in JSON")
        given += f"{{% if {name} is not defined %}}{{% set {name} = {value} %}}{{% endif %}}"
    used = facts.keys() & TEMPLATE_FACTS.values()
    return imported_tokenizer(facts | {fact: given + facts[fact] for fact in used})


def with_template_end(tokenizer):
    """Return an imported tokenizer that also ends answers where its chat template does.

    Base models such as Qwen2.5's have the template of their chat models, which ends an answer with
    <|im_end|>, while their files call another token EOS. A template that refuses this conversation
    changes nothing, nor does one that has a known end behind its other marks, as
    `</answer></s>`. The fact `template_end` is the token that was added.
    """
    facts = tokenizer.facts
    if "template" not in facts:
        return tokenizer
    turns = [("<|user|>", "Question"), ("<|assistant|>", "Answer")]
    try:
        text = chat_text(tokenizer, turns, False)
    except UserError:
        return tokenizer
    rest = text.rpartition("Answer")[2].lstrip()
    ends = []
    while names := [name for name in facts["added"] if rest.startswith(name)]:
        name = max(names, key=len)
        ends.append(facts["added"][name])
        rest = rest.removeprefix(name).lstrip()
    if not ends or {*ends} & {*facts["stop"]}:
        return tokenizer
    stop = sorted([*facts["stop"], ends[0]])
    return imported_tokenizer(facts | {"template_end": ends[0], "stop": stop})


def is_misread(name, facts):
    """Return whether a class of transformers 5 splits or normalizes texts otherwise than facts say."""
    form = (facts.get("split"), facts.get("nfc", False))
    return HF_CLASSES.get(name, form) != form


def misreading_class(folder, facts):
    """Return the class by which transformers 5 reads a folder's tokenizer not as its file says, or ""."""
    config = read_json(folder / "tokenizer_config.json")
    name = str(config.get("tokenizer_class")).removesuffix("Fast")
    kind = str(read_json(folder / "config.json").get("model_type"))
    name = HF_MODEL_CLASSES.get(kind, name)
    # Where SentencePiece puts a space before a text, this class may not.
    is_other = name == "LlamaTokenizer" and "sentencepiece" in facts
    return name if is_other or is_misread(name, facts) else ""


def import_notes(folder, tokenizer):
    """Yield what is particular about an imported model's tokenizer."""
    stop = stop_ids(with_roles(tokenizer))
    named = eos_ids(folder / "config.json") | eos_ids(folder / "generation_config.json")
    if unused := named - stop:
        yield (
            f"not used: eos_token_id {sorted(unused)}; answers end at {sorted(stop)} of the tokenizer "
            f"{tokenizer.file}"
        )
    for name in ("config.json", "tokenizer_config.json"):
        if "auto_map" in read_json(folder / name):
            yield f"not used: auto_map of {name}; the code that it names may compute something else"
    generation = read_json(folder / "generation_config.json")
    if unused := [name for name in HF_SAMPLING if name in generation]:
        yield f"not used: {', '.join(unused)} of generation_config.json; export --like has them"
    if tokenizer.file != "imported.tiktoken":
        return
    facts = tokenizer.facts
    names = {i: name for name, i in facts["added"].items()}
    if pieces := sorted({*facts["stop"]} - names.keys()):
        yield (
            f"answers end at {pieces}, which are no added tokens: an ordinary text may contain those "
            f"below {tokenizer.vocab_size}"
        )
    if end := facts.get("template_end"):
        yield (
            f"no file calls {names[end]!r} an EOS, but the chat template ends answers with it; they "
            "end there, too"
        )
    if name := misreading_class(folder, facts):
        yield (
            f"transformers 5 reads the tokenizer as {name}, which gives other ids than the file that "
            "the model was trained with; the ids are that file's here, and in transformers by "
            "PreTrainedTokenizerFast.from_pretrained"
        )
    bos = repr(facts["bos"])
    text_end = facts["text_end"]
    if text_end != tokenizer.bos_id:
        yield f"no file names BOS, {bos}, as an EOS, so texts end with {names[text_end]!r}"
    begin = bos if begin_ids(tokenizer) else "nothing"
    yield f"{tokenizer.vocab_size} tokens; {begin} is put before a text"
    lacking = sorted({bytes([byte]) for byte in range(256)} - set(tokenizer.pieces))
    if lacking and "ranks" in facts:
        yield (
            f"its vocabulary lacks {len(lacking)} bytes ({' '.join(byte.hex() for byte in lacking)}); "
            "they are dropped from texts, as transformers does"
        )
    if unused := facts["unused_templates"]:
        yield f"not used: chat templates {', '.join(unused)}"
    if "template" in facts:
        try:
            chat_text(tokenizer, [("<|user|>", "Hello")], True)
        except UserError as error:
            yield f"a conversation of one question is refused: {error}"


def tokenizer_facts(folder, tokenizer, size):
    """Return the facts of a tokenizer.json, a dict, and its ranks, see rank_tokenizer.

    Byte-level BPE alone. tiktoken merges the pair of the lowest rank first, so ids must be in the
    order of merges, and takes a whole part of a text if it is a piece. So pieces that no merge
    reaches are left out, unless the tokenizer does the same (ignore_merges): then their merges must
    be all that tiktoken would do. Added tokens are apart from these; those that are not special, as
    <think>, are shown as text. BOS is the tokenizer's, or <|endoftext|>. Raises UserError.
    """
    model = tokenizer["model"]
    check_bpe(tokenizer, model)
    added = {}
    shown = {}
    late = []
    flags = {}
    for token in tokenizer["added_tokens"]:
        text = token["content"]
        if named := [flag for flag in TOKEN_FLAGS if token.get(flag)]:
            flags[text] = named
        if not text or added.setdefault(text, token["id"]) != token["id"]:
            raise UserError(f"tokenizer.json: added token {text!r}: is empty, or has two ids")
        if not token["special"]:
            shown[text] = token["id"]
        if token.get("normalized"):
            late.append(text)
    check_ids(model["vocab"], added, size)
    check_added(folder, added)
    ids = {piece: i for piece, i in model["vocab"].items() if piece not in added}
    merges = {}
    for place, merge in enumerate(model["merges"]):
        merges[tuple(merge.split(" ") if isinstance(merge, str) else merge)] = place
    order = [ids["".join(pair)] for pair in merges]
    if order != sorted(order):
        raise UserError("tokenizer.json: merges: must be in the order of the ids that they make")
    if set(itertools.chain(*merges)) - model["vocab"].keys():
        raise UserError("tokenizer.json: merges: must be of pieces of the vocabulary")
    lines = rank_lines(ids, merges, model.get("ignore_merges"))
    lines += [rank_line(text.encode(), i) for text, i in shown.items()]
    facts = hf_chat(folder, added, model["vocab"])
    return facts | {
        "vocab_size": 1 + max([*ids.values(), *added.values()]),
        "split": hf_split(tokenizer),
        "nfc": bool(steps_of(tokenizer, "normalizer", "normalizers")),
        "added": added,
        "normalized": late,
        "flags": flags,
        "ranks": "\n".join(lines),
        "begins_with_bos": begins_with(tokenizer, facts["bos"]),
    }


def check_bpe(tokenizer, model):
    """Raise UserError for a tokenizer.json that is not byte-level BPE as tiktoken does it."""
    if model["type"] != "BPE" or model.get("byte_fallback") or model.get("dropout"):
        raise UserError(f"tokenizer.json: model {model['type']}: must be byte-level BPE")
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            raise UserError(f"tokenizer.json: {name}={model[name]!r:.50}: must be none")
    steps = [step["type"] for step in steps_of(tokenizer, "normalizer", "normalizers")]
    if steps not in ([], ["NFC"]):
        raise UserError(f"tokenizer.json: normalizer {' '.join(steps)}: must be NFC or none")
    lacking = byte_of_letters().keys() - model["vocab"].keys()
    if lacking and model.get("unk_token") is not None:
        raise UserError(
            f"tokenizer.json: unk_token={model['unk_token']!r:.50}: must be none, because the "
            f"vocabulary lacks {len(lacking)} bytes"
        )


def check_ids(vocab, added, size):
    """Raise UserError unless every token has an id of its own below `size`."""
    tokens = vocab | added
    for text, i in tokens.items():
        if type(i) is not int or i < 0:
            raise UserError(f"tokenizer.json: {text!r:.50} has the id {i!r:.50}: must be a number")
    count = 1 + max(tokens.values())
    if count > size:
        raise UserError(f"tokenizer.json: the tokenizer has {count} tokens, the model {size}")
    if len(set(tokens.values())) < len(tokens) or any(
        vocab.get(a, i) != i for a, i in added.items()
    ):
        raise UserError("tokenizer.json: two tokens have one id, or one has two")
    # The package tokenizers numbers added tokens that the vocabulary lacks itself, from its number
    # of pieces on. Where it has a hole, these are not the ids in the file.
    lacking = [text for text in added if text not in vocab]
    for i, text in enumerate(lacking, len(vocab)):
        if added[text] != i:
            raise UserError(
                f"tokenizer.json: added token {text!r:.50} has the id {added[text]}: must be {i}, "
                "as the package tokenizers numbers it, or be in the vocabulary"
            )


def tokenizer_config(folder):
    """Return tokenizer_config.json, completed by special_tokens_map.json where transformers does it."""
    config = read_json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" in config:
        return config
    return config | read_json(folder / "special_tokens_map.json")


def check_added(folder, added):
    """Raise UserError if a folder's files have added tokens that its tokenizer does not."""
    config = tokenizer_config(folder)
    decoder = config.get("added_tokens_decoder")
    listed = [*(decoder or {}).values()] or [*read_json(folder / "added_tokens.json")]
    listed += read_json(folder / "tokenizer.json").get("added_tokens") or []
    for name in ("additional_special_tokens", "extra_special_tokens"):
        tokens = config.get(name) or []
        listed += tokens.values() if isinstance(tokens, dict) else tokens
    for token in listed:
        text = token["content"] if isinstance(token, dict) else token
        if text not in added:
            raise UserError(f"{folder}: added token {text!r:.50}: must be one of the tokenizer's")


def begins_with(tokenizer, bos):
    """Return whether a tokenizer.json puts BOS before a text. Raises UserError for other tokens."""
    begins_with_bos = False
    for step in steps_of(tokenizer, "post_processor", "processors"):
        if step["type"] == "ByteLevel":  # has to do with places in the text alone
            continue
        texts = []
        if step["type"] == "TemplateProcessing":
            parts = itertools.chain(*(part.values() for part in step["single"]))
            texts = [part["id"] for part in parts]
        if texts not in (["A"], [bos, "A"]):
            raise UserError(
                f"tokenizer.json: post_processor {step['type']} {texts}: must put nothing but BOS, "
                f"{bos!r}, before a text, and nothing behind it"
            )
        if len(texts) == 2:
            begins_with_bos = True
    return begins_with_bos


def rank_line(content, i):
    """Return the line of a rank file for a piece, bytes, and its id."""
    return f"{base64.b64encode(content).decode()} {i}"


def rank_lines(ids, merges, ignore_merges):
    """Return the lines of a rank file, of the pieces that tiktoken may have. See hf_tokenizer."""
    letters = byte_of_letters()
    lines = []
    known = {*ids, *letters}  # tiktoken has all bytes, see BytePairEncoder
    for piece, i in ids.items():
        if len(piece) > 1024 or not piece or set(piece) - letters.keys():
            raise UserError(f"tokenizer.json: piece {piece!r:.50}: must be of 1 to 1024 bytes")
        if merge_letters(piece, merges) != [piece]:
            if not ignore_merges:
                continue
            pairs = {pair for pair in splits_of(piece) if known.issuperset(pair)}
            if pairs - merges.keys():
                raise UserError(f"tokenizer.json: merges: must have every split of {piece!r}")
        lines.append(rank_line(bytes(letters[letter] for letter in piece), i))
    return lines


def splits_of(piece):
    """Return the pairs of parts that make a piece."""
    return [(piece[:at], piece[at:]) for at in range(1, len(piece))]


def merge_letters(text, merges):
    """Return the parts of a text after byte-pair merges; merges: pair of parts -> place in order."""
    parts = list(text)
    while len(parts) > 1:
        pairs = list(itertools.pairwise(parts))
        first = min(pairs, key=lambda pair: merges.get(pair, math.inf))
        if first not in merges:
            break
        place = pairs.index(first)
        parts[place : place + 2] = ["".join(first)]
    return parts


def probe_split(split):
    """Raise UserError if the split of a tokenizer.json loses text: tiktoken drops what it leaves."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    bpe = tiktoken.Encoding("probe", pat_str=split, mergeable_ranks=ranks, special_tokens={})
    probe = "".join(map(chr, range(1, 0x500)))
    probe += " a  b\n\n c\t\r\n d \u3000\u65e5\u672c \U0001f642 e\u0301  "
    if bytes(bpe.encode_ordinary(probe)) != probe.encode():
        raise UserError("tokenizer.json: pre_tokenizer: its Regex must match every part of a text")


def eos_ids(path):
    """Return the ids that end an answer by a JSON file. Raises UserError."""
    ids = read_json(path).get("eos_token_id")
    ids = [ids] if ids is None or isinstance(ids, int) else ids
    if not isinstance(ids, list) or not all(type(i) in (int, type(None)) for i in ids):
        raise UserError(f"{path}: eos_token_id={ids!r:.50}: must be an id or a list of them")
    return {*ids} - {None}


def hf_ends(folder):
    """Return the ids that end an answer by a folder's files. Raises UserError.

    As in transformers, generation_config.json counts before config.json, which may name an ordinary
    piece. If it names no id, transformers ends nowhere; here those of config.json count.
    """
    return eos_ids(folder / "generation_config.json") or eos_ids(folder / "config.json")


def hf_chat(folder, added, pieces, own_bos=None):
    """Return the facts of a folder about texts and conversations. Raises UserError.

    added: the text of an added token -> its id. pieces: the names of the vocabulary. own_bos: BOS of a
    SentencePiece model, which counts if the files name none; without a chat template also if they name
    one that is no token. Returned are BOS, the ids that end an answer, the id that ends a text, the
    names in chat templates, and templates if there are some. A text ends with BOS, as in pretraining,
    only if a file calls BOS an EOS: in a chat model BOS may be the mark before a message.
    """
    path = folder / "tokenizer_config.json"
    config = tokenizer_config(folder)
    names = {}
    for kind in ("bos", "eos", "pad", "unk", "sep", "cls", "mask"):
        token = config.get(f"{kind}_token")
        token = token.get("content") if isinstance(token, dict) else token
        if token is not None:
            names[f"{kind}_token"] = token
            if not isinstance(token, str):
                raise UserError(f"{path}: {kind}_token={token!r:.50}: must be a text")
    templates = hf_templates(folder, config)
    bos = names.get("bos_token", own_bos or "<|endoftext|>")
    if bos not in added and own_bos and "template" not in templates:
        print(f"{path}: not used: bos_token {bos!r:.50}, which is no token; BOS is {own_bos!r}")
        names["bos_token"] = bos = own_bos
    if bos not in added:
        raise UserError(
            f"{path}: bos_token {bos!r:.50}: must be one of tokenizer.json's added_tokens"
        )
    eos = names.get("eos_token")
    if eos in pieces and eos not in added:
        # Transformers makes it one, so that its text is one id.
        raise UserError(
            f"{path}: eos_token {eos!r:.50}: must be an added or control token, not an ordinary piece"
        )
    if eos is not None and eos not in added:
        print(f"{path}: not used: eos_token {eos!r:.50}, which is no token")
    bos_id = added[bos]
    eos_id = added.get(eos, bos_id)
    ends = hf_ends(folder)
    facts = {"bos": bos, "bos_id": bos_id, "names": names, "stop": sorted({bos_id, eos_id, *ends})}
    facts["text_end"] = bos_id if bos_id in ends else eos_id
    return facts | templates


def named_templates(config):
    """Return the chat templates of a tokenizer_config.json by name; a single one is `default`."""
    templates = config.get("chat_template") or {}
    if isinstance(templates, list):
        listed = map(dict, templates)
        return {str(entry.get("name")): entry.get("template") for entry in listed}
    return {"default": templates} if templates else {}


def hf_templates(folder, config):
    """Return the facts of a folder about chat templates. Raises UserError for one without use.

    As in transformers, chat_template.jinja counts before the tokenizer_config.json, and of several
    by name the one called tool_use is for conversations with tools.
    """
    path = folder / "chat_template.jinja"
    templates = named_templates(config)
    if path.is_file():
        templates = {"default": path.read_text(encoding="utf-8")}
        for more in sorted(folder.glob(TEMPLATE_FILES)):
            templates[more.stem] = more.read_text(encoding="utf-8")
    facts = {"unused_templates": sorted(templates.keys() - TEMPLATE_FACTS.keys())}
    if not templates:
        return facts
    if not all(isinstance(text, str) for text in templates.values()) or "default" not in templates:
        raise UserError(
            f"{folder}: chat_template: must be a text, or several with one named default"
        )
    for name, fact in TEMPLATE_FACTS.items():
        if name in templates:
            facts[fact] = templates[name]
    return facts


def read_hf_tokenizer(folder, path, vocab_size):
    """Return the Tokenizer of TOKENIZER_PATH, else of tokenizer.model, else of tokenizer.json."""
    own = folder / "tokenizer.model"
    # A SentencePiece model begins with a piece, field 1. Llama 3's file of this name has ranks.
    is_sentencepiece = own.is_file() and own.read_bytes().startswith(b"\n")
    if not path and not is_sentencepiece and (folder / "tokenizer.json").is_file():
        if own.is_file():
            print(f"{own}: not used: is no SentencePiece model; tokenizer.json counts")
        return hf_tokenizer(folder, vocab_size)
    if not path and not own.is_file():
        raise UserError(f"{folder}: no tokenizer.model and no tokenizer.json; set TOKENIZER_PATH")
    path = path or str(own)
    if path != "bytes" and not (Path(path).is_file() and path.endswith(".model")):
        raise UserError(f"TOKENIZER_PATH={path!r}: must be a SentencePiece .model file, or bytes")
    tokenizer = add_encoder(read_tokenizer(path, {}))
    spare = vocab_size - tokenizer.vocab_size
    if spare < 0 or (spare not in (0, 4) and path != str(own)):  # with or without roles
        raise UserError(
            f"tokenizer {path}: has {tokenizer.vocab_size} tokens; must have the model's {vocab_size}"
        )
    if path != str(own):
        return tokenizer
    if spare:
        # Four rows more are those of the roles, not of tokens that somebody else added.
        names = read_sentencepiece(tokenizer.proto).names
        check_added(folder, {*names, *ROLE_TOKENS})
    return tokenizer if spare == 4 else with_chat_facts(folder, tokenizer)


def with_chat_facts(folder, tokenizer):
    """Return the SentencePiece tokenizer of a folder, with the folder's chat template, if it has one,
    the ids that end an answer, if they are more than BOS and EOS, and whether a text begins with BOS.

    Its file is JSON then, see rank_tokenizer. One with tokens for the roles of these scripts stays,
    and one for which a folder says nothing else. The model's own EOS ends an answer if no file has
    one. Raises UserError.
    """
    if tokenizer.roles:
        return tokenizer
    model = read_sentencepiece(tokenizer.content)
    bos_id, eos_id = tokenizer.facts["stop"]
    added = model.marks
    facts = hf_chat(folder, added, model.names, model.names[bos_id]) | {"added": added}
    has_template = "template" in facts
    facts["begins_with_bos"] = sentencepiece_begins(folder, facts["bos"], has_template)
    ends = hf_ends(folder)
    more_ends = ends - {bos_id, eos_id}
    if facts["begins_with_bos"] and not has_template and not more_ends:
        return tokenizer
    if has_template:
        check_added(folder, added)
        check_spaces(folder)
    if not ends and "eos_token" not in facts["names"] and eos_id >= 0:  # -1: the model has none
        facts["stop"] = sorted({*facts["stop"], eos_id})
        facts["text_end"] = eos_id
    content = tokenizer.content
    if model.kinds[facts["bos_id"]] == 3 and facts["bos_id"] != bos_id:
        content = with_bos(content, facts["bos"])
    facts["sentencepiece"] = base64.b64encode(content).decode()
    return imported_tokenizer(facts)


def with_bos(content, bos):
    """Return a SentencePiece model with another of its control tokens as BOS."""
    fields = []
    for number, value in proto_fields(content):
        if number == 2:  # trainer_spec, of which the last bos_piece counts
            value += proto_field(46, bos.encode())
        fields.append(proto_field(number, value))
    return b"".join(fields)


def sentencepiece_begins(folder, bos, has_template):
    """Return whether the files beside a SentencePiece model put BOS before a text. Raises UserError.

    tokenizer.json counts more, as in transformers 5. Without a chat template one that does something
    else is not used, because it also adds nothing to a conversation.
    """
    begins_with_bos = bool(read_json(folder / "tokenizer_config.json").get("add_bos_token", True))
    described = read_json(folder / "tokenizer.json")
    if not described:
        return begins_with_bos
    try:
        return begins_with(described, bos)
    except UserError as error:
        if has_template:
            raise
        print(f"{folder}: not used: {error}; add_bos_token={begins_with_bos} counts")
        return begins_with_bos


def check_spaces(folder):
    """Raise UserError if a tokenizer.json puts a space only where a conversation begins.

    Here one is before each part between added tokens, as in files without this pre_tokenizer. Texts
    outside of conversations have the same ids.
    """
    described = read_json(folder / "tokenizer.json")
    for step in steps_of(described, "pre_tokenizer", "pretokenizers"):
        if step.get("prepend_scheme") == "first":  # written for legacy=false
            raise UserError(
                f"{folder / 'tokenizer.json'}: pre_tokenizer prepend_scheme='first': must be always "
                "with a chat template; for plain text alone remove chat_template from "
                "tokenizer_config.json, and chat_template.jinja"
            )


# ----------------------------------------------------------------------------- tokenizers, exported
def proto_fields(data):
    """Yield the fields of a protobuf message: number, and value, an int or bytes."""
    file = io.BytesIO(data)

    def varint():
        value = 0
        for shift in itertools.count(0, 7):
            (byte,) = file.read(1)
            value |= (byte & 127) << shift
            if byte < 128:
                return value

    while file.tell() < len(data):
        number, kind = divmod(varint(), 8)
        if kind == 0:
            yield number, varint()
        else:
            yield number, file.read(varint() if kind == 2 else {1: 8, 5: 4}[kind])


def bpe_json(vocab, order, **others):
    """Return the model of a tokenizer.json that merges the pair which makes the first piece in order.

    vocab: piece -> id; order: the pieces that merges make, and of which they make them. All splits
    of a piece are merges, as in tiktoken and SentencePiece.
    """
    merges = []
    known = set(order)
    for piece in order:
        # Texts, because tokenizers before 0.20 reads no lists. No piece has a space.
        merges += [" ".join(pair) for pair in splits_of(piece) if known.issuperset(pair)]
    return {"type": "BPE", "dropout": None, "vocab": vocab, "merges": merges} | others


def split_json(split):
    """Return the pre_tokenizer of a tokenizer.json for byte-level pieces. split: maybe a Regex."""
    steps = [BYTE_LEVEL]
    if split:
        # A possessive count of tiktoken's is a repeated group for tokenizers.
        pattern = {"Regex": split.replace("{1,3}+", "{1,3}")}
        first = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
        steps.insert(0, first)
    return {"type": "Sequence", "pretokenizers": steps}


def bos_json(bos, bos_id):
    """Return the post_processor of a tokenizer.json that puts BOS before a text."""
    first = {"SpecialToken": {"id": bos, "type_id": 0}}
    parts = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    return {
        "type": "TemplateProcessing",
        "single": [first, parts[0]],
        "pair": [first, *parts],
        "special_tokens": {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}},
    }


def byte_level_json(tokenizer):
    """Return the parts of a tokenizer.json for a rank file, or for `bytes`."""
    letters = {byte: letter for letter, byte in byte_of_letters().items()}
    facts = tokenizer.facts
    added = [text.encode() for text in facts.get("added", {})]  # some are shown as text
    vocab = {}
    for i, piece in enumerate(tokenizer.pieces):
        if piece and piece not in added:
            vocab["".join(letters[byte] for byte in piece)] = i
    return {
        "normalizer": {"type": "NFC"} if facts.get("nfc") else None,
        "pre_tokenizer": split_json(facts.get("split")),
        "decoder": BYTE_LEVEL,
        # tiktoken takes a part of a text that is a piece, whatever its merges are.
        "model": bpe_json(vocab, list(vocab), ignore_merges="split" in facts),
    }


def space_json(model):
    """Return the normalizers and decoders of a tokenizer.json for a SentencePieceModel."""
    steps = []
    if model.charsmap:
        charsmap = base64.b64encode(model.charsmap).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": charsmap})
    if model.drops_spaces:
        for pattern, content in (("^ +| +$", ""), (" {2,}", " ")):
            steps.append({"type": "Replace", "pattern": {"Regex": pattern}, "content": content})
    if model.has_prefix:
        steps.append({"type": "Prepend", "prepend": "\u2581"})
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"})
    decoders = [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if model.has_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return steps, decoders


@dataclass
class SentencePieceModel:
    """What a SentencePiece model says, of which its package tells only a part."""

    names: list  # of the pieces
    kinds: list  # of the pieces: 1 normal, 2 unknown, 3 control, 4 user's, 5 unused, 6 byte
    scores: list  # of the pieces
    algorithm: int  # model_type: 1 Unigram, 2 BPE
    charsmap: bytes  # precompiled_charsmap
    has_prefix: bool  # add_dummy_prefix
    drops_spaces: bool  # remove_extra_whitespaces

    @property
    def marks(self):
        """Return the control tokens and the unknown one, name -> id: no text has them."""
        return {name: i for i, name in enumerate(self.names) if self.kinds[i] in (2, 3)}


def read_sentencepiece(content):
    """Return a SentencePieceModel. The numbers of fields are those in sentencepiece_model.proto."""
    proto = list(proto_fields(content))
    pieces = [dict(proto_fields(value)) for number, value in proto if number == 1]
    trainer, normalizer = [dict(proto_fields(dict(proto)[number])) for number in (2, 3)]
    return SentencePieceModel(
        names=[piece[1].decode() for piece in pieces],
        kinds=[piece.get(3, 1) for piece in pieces],
        scores=[struct.unpack("<f", piece.get(2, bytes(4)))[0] for piece in pieces],
        algorithm=trainer.get(3, 1),
        charsmap=normalizer.get(2, b""),
        has_prefix=bool(normalizer.get(3, 1)),
        drops_spaces=bool(normalizer.get(4, 1)),
    )


def sentencepiece_json(content):
    """Return the parts of a tokenizer.json for a SentencePiece model, and its added tokens.

    Raises UserError.
    """
    model = read_sentencepiece(content)
    names = model.names
    kinds = model.kinds
    symbols = {name: i for i, name in enumerate(names) if kinds[i] == 4 and len(name) > 1}
    if symbols and model.has_prefix:
        name = next(iter(symbols))
        raise UserError(f"tokenizer.model: user_defined_symbols {name!r:.50}: must be one letter")
    steps, decoders = space_json(model)
    vocab = {name: i for i, name in enumerate(names)}
    unknown = kinds.index(2)
    if model.algorithm == 1:
        pairs = list(zip(names, model.scores, strict=True))
        described = {"type": "Unigram", "unk_id": unknown, "vocab": pairs}
    elif model.algorithm == 2:
        order = [i for i, kind in enumerate(kinds) if kind == 1]
        order.sort(key=lambda i: -model.scores[i])
        order = [names[i] for i in order]
        described = bpe_json(vocab, order, unk_token=names[unknown], fuse_unk=True)
    else:
        raise UserError("tokenizer.model: model_type: must be unigram or bpe")
    return model.marks | symbols, {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": described | {"byte_fallback": 6 in kinds},
    }


def listed_templates(facts):
    """Return the chat template of an imported model, None without one, as tokenizer_config.json has it."""
    if "tool_template" not in facts:
        return facts.get("template")
    return [{"name": name, "template": facts[fact]} for name, fact in TEMPLATE_FACTS.items()]


def response_template(tokenizer, added, pad):
    """Return RESPONSE_TEMPLATE with the tokens that end an answer, or fill its row of a batch.

    added: text -> id of the added tokens; pad: the text of the one that fills rows.
    """
    ends = {*stop_ids(tokenizer), added.get(pad)}
    content = {"close": [text for text, i in added.items() if i in ends], "content": "text"}
    return RESPONSE_TEMPLATE | {"fields": RESPONSE_TEMPLATE["fields"] | {"content": content}}


def padding_id(tokenizer):
    """Return the token that fills the rows of a batch that have ended: the imported model's, or BOS.

    It is no text of an answer, as an end might be.
    """
    pad = tokenizer.facts.get("names", {}).get("pad_token")
    return tokenizer.facts.get("added", {}).get(pad, tokenizer.bos_id)


def tokenizer_files(tokenizer):
    """Return the files that a tokenizer of these scripts has in transformers, by name.

    The chat template is the imported model's, or one that writes conversations as these scripts do.
    A tokenizer without roles and template has none.
    """
    facts = tokenizer.facts
    flags = facts.get("flags", {})
    bos_id = tokenizer.bos_id
    if tokenizer.proto:
        added, parts = sentencepiece_json(tokenizer.proto)
    else:
        parts = byte_level_json(tokenizer)
        added = facts.get("added", {"<|endoftext|>": bos_id})
    added = added | tokenizer.roles
    if parts["model"]["type"] == "BPE":
        parts["model"]["vocab"] |= added  # otherwise tokenizers numbers them itself
    texts = {i: text for text, i in added.items()}
    bos = texts[bos_id]
    pad = texts[padding_id(tokenizer)]
    processor = bos_json(bos, bos_id) if begin_ids(tokenizer) else None
    tokens = []
    for text, i in sorted(added.items(), key=lambda item: item[1]):
        token = {flag: flag in flags.get(text, []) for flag in TOKEN_FLAGS}
        token["normalized"] = text in facts.get("normalized", [])
        tokens.append({"id": i, "content": text, "special": not tokenizer.pieces[i]} | token)
    names = {"bos_token": bos, "eos_token": bos} | facts.get("names", {}) | {"pad_token": pad}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {name: text for name, text in names.items() if text}
    config["padding_side"] = "left"  # as generate needs it
    template = listed_templates(facts)
    if tokenizer.roles:
        template = read_tool("chat_template.jinja").decode()  # the layout of asked_ids
        if not begin_ids(tokenizer):
            template = template.replace("{{- bos_token }}\n", "")
        config["response_template"] = response_template(tokenizer, added, pad)
    if template:
        config["chat_template"] = template
    files = {"tokenizer_config.json": json_bytes(config)}
    parts |= {"version": "1.0", "added_tokens": tokens, "post_processor": processor}
    files["tokenizer.json"] = json_bytes(parts)
    if tokenizer.proto:
        files["tokenizer.model"] = tokenizer.proto
    return files


# ---------------------------------------------------------------------------------------- commands
def import_(args):
    """Read a model of transformers, or of llama.cpp, into a run folder."""
    if args.folder.suffix != ".gguf":
        for path in sorted(args.folder.glob("*.json")):
            check_pointer(path)
        import_folder(args.folder, args)
        return
    check_pointer(args.folder)
    with tempfile.TemporaryDirectory() as folder:
        try:
            tensors = unpack_gguf(args.folder, Path(folder))
            import_folder(Path(folder), args, tensors)
        except UserError as error:
            # What is in the folder came from the file.
            message = str(error).replace(f"{folder}/", "").replace(f"{folder}: ", "")
            raise UserError(f"{args.folder}: {message}") from None


def import_folder(folder, args, tensors=()):
    """Read a folder of transformers into a run folder: config.json, safetensors, tokenizer.

    tensors: the weights, if they are not in safetensors.
    """
    shape, tensors = read_hf_headers(folder, tensors)
    check_hf_headers(folder, shape, tensors)
    tokenizer = read_hf_tokenizer(folder, given_tokenizer(), shape["vocab_size"])
    if args.set:
        tokenizer = with_values(tokenizer, args.set)
    tokenizer = with_template_end(tokenizer)
    shape["bos_id"] = tokenizer.bos_id
    rows = with_roles(tokenizer).vocab_size
    if tokenizer.file == "imported.tiktoken" or shape["vocab_size"] != rows:
        # Models have some more rows than tokens. An id without a token must not be drawn.
        shape["vocab_size"] = tokenizer.vocab_size
    network = GPT(GPTConfig(**shape))
    read_hf_tensors(folder, network, tensors)
    names = [tensor.name for tensor in tensors if HF_SKIPPED.match(tensor.name)]
    skipped = [name for name in names if not name.endswith("inv_freq")]  # which are constants
    if skipped:
        print(
            f"{args.folder}: not used: {len(skipped)} tensors of images or of multi-token prediction, "
            f"{skipped[0]} for one; export --like has them"
        )
    header = {"tokenizer_sha256": tokenizer.sha256, "meta": {"tokenizer": tokenizer.file}}
    state = network.state_dict()
    files = {
        "model.pt": functools.partial(torch.save, state),
        "coded.pt": functools.partial(torch.save, {}),  # no tensor has codes
        "meta.json": json.dumps({"shape": asdict(network.config), "header": header}).encode(),
    }
    args.out.mkdir()
    try:
        if tokenizer.file != "bytes":
            replace_file(args.out / tokenizer.file, tokenizer.content)
        write_folder(args.out / "step_000000", files)
    finally:
        if not (args.out / "step_000000").exists():
            shutil.rmtree(args.out, ignore_errors=True)  # or the same command would be refused
    print(f"{args.out}: {len(state)} tensors")
    for note in import_notes(args.folder, tokenizer):
        print(f"{args.folder}: {note}")


def export(args):
    """Write a folder for transformers: a model, or with --adapters its LoRA adapters, for PEFT.

    With --like FOLDER the model has the form of that, from which it was imported. If OUT ends in
    .gguf, it is a file for llama.cpp.
    """
    is_gguf = args.out.suffix == ".gguf"
    if is_gguf and (args.like or args.adapters):
        raise UserError("--like, --adapters: they are for folders; OUT must not end in .gguf")
    if args.type and not is_gguf:
        raise UserError(f"--type {args.type}: is for a GGUF file; OUT must end in .gguf")
    load = load_gguf if is_gguf else load_safetensors
    load()  # or a UserError, before anything is read
    source = read_weights(args.model, args.weights)
    check_average(args.weights, source)
    network = rebuild(source)
    if "w_value" in source.tensors:
        print(f"{source.path}: the value head, w_value, is not written")
    if is_gguf:
        write_gguf(args, source, network)
        return
    if args.adapters:
        if args.like:
            raise UserError("--adapters: they are for INIT_FROM; must be without --like")
        files = adapter_files(source, network)
    elif args.like:
        files = like_files(args.like, source, network)
    else:
        files = own_files(source, network)
    write_folder(args.out, files)
    print(f"{args.out}: {len(files)} files")


def json_bytes(value):
    """Return the content of a JSON file."""
    return json.dumps(value, indent=2).encode()


def save_safetensors(state):
    """Return a function that writes tensors to a safetensors file."""

    def write(path):
        load_safetensors().torch.save_file(state, path, {"format": "pt"})
        # safetensors 0.8 makes files that only their owner may read; a server may be another user.
        path.chmod(path.parent.stat().st_mode & 0o666)

    return write


def model_tokenizer(source):
    """Return the tokenizer of a MODEL, with role tokens if it has learned them. Raises UserError."""
    tokenizer = find_tokenizer(source, load_tokenizer)
    if source.shape["vocab_size"] > tokenizer.vocab_size:
        return with_roles(tokenizer)
    return tokenizer


def own_files(source, network):
    """Return the files of a model in float32, by name.

    A network that transformers has no class for comes with its code. An answer ends where those of
    sample.py end: at the stop tokens of an imported model, or at the BOS of the next document and
    at <|end|>.
    """
    tokenizer = model_tokenizer(source)
    files = tokenizer_files(tokenizer)
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": sorted(stop_ids(tokenizer))}
    try:
        config = hf_config(network.config)
        # Copies, because safetensors takes no views.
        state = {name: view.contiguous().clone() for name, view in hf_views(network).items()}
    except UserError as error:
        print(f"{error}; it loads this model with trust_remote_code=True")
        config = REMOTE_CLASSES | {
            # `transformers serve` looks for this name in its own package. It has the class that
            # goes by auto_map.
            "architectures": ["AutoModelForCausalLM"],
            "model_type": "underpar",
            "shape": source.shape,
        }
        state = remote_names(network_tensors(source))
        files["modeling_underpar.py"] = read_tool("modeling_underpar.py")
    name = HF_MODEL_CLASSES.get(config["model_type"])
    if is_misread(name, tokenizer.facts):
        print(
            f"transformers 5 reads the tokenizer of every {config['model_type']} as {name}: "
            "PreTrainedTokenizerFast.from_pretrained has the ids of this one, AutoTokenizer has not"
        )
    return files | {
        "model.safetensors": save_safetensors(state),
        "config.json": json_bytes(config | ids | {"dtype": "float32"}),
        "generation_config.json": json_bytes(ids | {"pad_token_id": padding_id(tokenizer)}),
    }


def remote_names(tensors):
    """Return the tensors of a network by the names that they have in modeling_underpar.py."""
    names = {"embed": "model.embed_tokens.weight", "head": "lm_head.weight"}
    return {names.get(name, f"model.network.{name}"): w for name, w in tensors.items()}


def read_tool(name):
    """Return the content of a file of the folder tools, which an export copies. Raises UserError."""
    path = Path(__file__).parent / "tools" / name
    if not path.is_file():
        raise UserError(
            f"{path}: no such file; an export has a copy of it, so take the folder tools from the "
            "repository along with this script"
        )
    return path.read_bytes()


def like_files(folder, source, network):
    """Return the files of a model in the form of the folder that it was imported from, by name.

    Names and dtypes of tensors, those that the network does not have, rows without a token, and
    all files but the weights are the folder's. Raises UserError if it is another model's.
    """
    path = folder / "config.json"
    shape, tensors = read_hf_headers(folder)
    config = read_json(path)
    for name, value in shape.items():
        actual = source.shape.get(name)
        # Training and the tokenizer may change some fields.
        if actual != value and name not in ("vocab_size", "bos_id", "train_seq_len", "context"):
            raise UserError(f"{path}: has {name}={value!r}, {source.path} {actual!r}")
    check_hf_headers(folder, shape, tensors)
    files = {
        file.relative_to(folder).as_posix(): file.read_bytes()
        for file in [*folder.iterdir(), *folder.glob(TEMPLATE_FILES)]
        if file.is_file() and not HF_WEIGHTS.fullmatch(file.name)
    }
    views = hf_views(network)
    state = {}
    changed = 0
    remaining = 0
    for tensor in tensors:
        w = tensor.read()
        view = views.get(tensor.name)
        if tensor.name == "lm_head.weight" and network.head is None:
            view = network.embed
        if view is not None:
            original = w[: len(view)].float()
            rounded = view.to(w.dtype)
            differs = view[: len(original)] != original
            changed += differs.sum().item()
            remaining += (differs & (rounded[: len(original)].float() != original)).sum().item()
            # After the network's rows come those of ids without a token.
            w = torch.cat([rounded, w[len(view) :]])
        state[tensor.key] = w
    if remaining < changed:
        print(
            f"{changed} weights differ from those of {folder}; after rounding to its dtype "
            f"{remaining / changed:.1%} of them still do; an export without --like is in float32"
        )
    text = config.get("text_config") or config
    count = len(network.embed)
    if count > text["vocab_size"]:
        text["vocab_size"] = count
        files["config.json"] = json_bytes(config)
    tokenizer = find_tokenizer(source, load_tokenizer)
    has_more_ends = "template_end" in tokenizer.facts
    if tokenizer.file == "imported.tiktoken":
        files |= mended_tokenizer_files(folder, tokenizer.facts)
    if count > tokenizer.vocab_size:
        # The folder's tokenizer lacks the role tokens, and its answers end without <|end|>.
        tokenizer = with_roles(tokenizer)
        files |= tokenizer_files(tokenizer)
        has_more_ends = True
    if has_more_ends:
        ends = {"eos_token_id": sorted(stop_ids(tokenizer))}
        generation = read_json(folder / "generation_config.json") | ends
        files["generation_config.json"] = json_bytes(generation)
    return files | {"model.safetensors": save_safetensors(state)}


def mended_tokenizer_files(folder, facts):
    """Return those of a folder's files that must differ so that transformers has a tokenizer's ids and
    chat template."""
    files = {}
    config = read_json(folder / "tokenizer_config.json")
    changes = {}
    if misreading_class(folder, facts):
        changes["tokenizer_class"] = "PreTrainedTokenizerFast"
    if facts.get("template") != hf_templates(folder, config).get("template"):  # by --set
        changes["chat_template"] = listed_templates(facts)
        files["chat_template.jinja"] = facts["template"].encode()
        if "tool_template" in facts:
            files[TEMPLATE_FILES.replace("*", "tool_use")] = facts["tool_template"].encode()
    if changes:
        files["tokenizer_config.json"] = json_bytes(config | changes)
    return files


def adapter_files(source, network):
    """Return PEFT's files of a run's LoRA adapters, by name, for the model that it began with.

    Raises UserError if there are none, if transformers has no class for the network, or if the run
    changed another tensor than their matrices.
    """
    if not any(".lora_" in name for name in source.unmerged):
        raise UserError(f"{source.path}: has no adapters; LORA_RANK trains them")
    try:
        hf_config(network.config)
    except UserError as error:
        raise UserError(f"{error}; export without --adapters writes the sums") from None
    state = adapter_tensors(source, network)
    base = start_weights(Path(source.run["init_from"]))
    check_frozen(source, base)
    option = f" --weights {base.average}" * bool(base.average)
    print(f"adapters for the model of: python convert.py export {base.path} OUT{option}")
    if network.config.attn_gate:
        print(
            "they fit AutoModelForCausalLM; in Qwen3_5ForConditionalGeneration, which vLLM serves, "
            "none is active: for it export --like the original, without --adapters"
        )
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": source.run["lora_rank"],
        "lora_alpha": source.run["lora_alpha"],
        "target_modules": sorted({name.split(".")[-3] for name in state}),
    }
    return {
        "adapter_model.safetensors": save_safetensors(state),
        "adapter_config.json": json_bytes(config),
    }


def adapter_tensors(source, network):
    """Return PEFT's tensors of a run's LoRA adapters, by name.

    The projections of transformers are rows of our matrices, one behind the other. Each has the A of
    its matrix, and its rows of B.
    """
    views = hf_views(network)
    state = {}
    for matrix, param in network.named_parameters():
        module, _, last = matrix.rpartition(".")
        adapter = f"{module}.parametrizations.{last}.0.lora_"
        if f"{adapter}a" not in source.unmerged:
            continue
        # The projections that are rows of the matrix, or all of it.
        names = [name for name, view in views.items() if view is param or view._base is param]
        rows = [len(views[name]) for name in names]
        parts = source.unmerged[f"{adapter}b"].split(rows)
        for name, b in zip(names, parts, strict=True):
            prefix = f"base_model.model.{name.removesuffix('.weight')}.lora_"
            state[f"{prefix}A.weight"] = source.unmerged[f"{adapter}a"].clone()
            state[f"{prefix}B.weight"] = b.clone()
    return state


def start_weights(path):
    """Return the MODEL that a run took of INIT_FROM, see find_start of the training scripts."""
    if (path / "final").is_dir():
        path = path / "final"
    elif (path / "model.upar").is_file():
        path = path / "model.upar"
    # Of a checkpoint the raw weights are taken. The folder `final` has one kind of weights alone.
    return read_weights(path, "" if path.name == "final" else "raw")


def check_frozen(source, base):
    """Raise UserError if a run with adapters has other weights beside them than those of its base."""
    frozen = {
        re.sub(r"parametrizations\.(\w+)\.original$", r"\1", name): w
        for name, w in source.unmerged.items()
    }
    for name, w in network_tensors(base).items():
        # On a GPU they are bfloat16.
        if name not in frozen or not torch.equal(w.to(frozen[name]), frozen[name]):
            raise UserError(
                f"{source.path}: {name} is not that of {base.path}: it has changed or grown, which "
                "adapters cannot hold; export without --adapters writes the sums"
            )


# -------------------------------------------------------------------------------------------- gguf
# A GGUF file (docs/gguf.md of ggml) has metadata, key -> value, and tensors. An import writes what
# the metadata says into a folder of transformers, and goes on from there.
GGUF_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# The fields of config.json by their keys, before which the architecture is written.
GGUF_CONFIG = {
    "vocab_size": "vocab_size",
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.dimension_count": "head_dim",
    "rope.freq_base": "rope_theta",
}
# Parts of the names of tensors, and what they are in hf_views.
GGUF_PARTS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# llama.cpp's names of the regular expressions that split a text (tokenizer.ggml.pre).
GGUF_SPLITS = {
    "gpt-2": GPT2_SPLIT,
    "smollm": DIGITS_SPLIT,
    "llama-bpe": QWEN2_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|"),
    "qwen2": QWEN2_SPLIT,
}
# Special tokens, by their names in tokenizer_config.json.
GGUF_TOKENS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
# Types of matrices, and the types of whole files.
GGUF_TYPES = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}
GGUF_NORMAL, GGUF_UNKNOWN, GGUF_CONTROL, GGUF_USERS, GGUF_UNUSED = range(1, 6)  # kinds of tokens
GGUF_NO_MERGE = "ÿ ÿ"  # llama.cpp wants some merges; no text has these bytes, ff and ff
# Kinds of values, and numpy's types of those that are numbers.
U8 = 0
U32 = 4
F32 = 6
TEXT = 8
LIST = 9
U64 = 10
GGUF_NUMBERS = {U8: "u1", 1: "i1", 2: "<u2", 3: "<i2", U32: "<u4", 5: "<i4", F32: "<f4", 7: "?"}
GGUF_NUMBERS |= {U64: "<u8", 11: "<i8", 12: "<f8"}


def load_gguf():
    """Return the module gguf. Raises UserError if it is not installed."""
    try:
        import gguf
    except ImportError:
        raise UserError("needs gguf: pip install gguf") from None
    return gguf


class GgufReader:
    """Reads a GGUF file from front to back. Raises UserError where it ends too early.

    The package's own reader goes on for hours where a damaged file says that a list is long.
    """

    def __init__(self, path):
        self.data = np.memmap(path, mode="r").view(np.ndarray)
        self.place = 0

    def numbers(self, kind, count):
        """Return an array of numbers."""
        dtype = GGUF_NUMBERS[kind]
        start = self.place
        self.place += count * np.dtype(dtype).itemsize
        if self.place > len(self.data):
            raise UserError(f"it has {len(self.data)} bytes, needs {self.place}")
        return self.data[start : self.place].view(dtype)

    def value(self, kind):
        """Return a number, a text or a list. A float32 is what it was written as, 1e-05 or 0.1."""
        if kind == TEXT:
            return self.numbers(U8, self.value(U64)).tobytes().decode()
        if kind == LIST:
            kind = self.value(U32)
            count = self.value(U64)
            if kind in GGUF_NUMBERS:
                return self.numbers(kind, count).tolist()
            return [self.value(kind) for _ in range(count)]
        (number,) = self.numbers(kind, 1)
        return float(str(number)) if kind == F32 else number.item()

    def header(self):
        """Return the number of tensors, and the metadata by key."""
        if self.numbers(U8, 4).tobytes() != b"GGUF":
            raise UserError("it does not begin with GGUF")
        version = self.value(U32)
        if version not in (2, 3):
            raise UserError(f"version {version}: must be 2 or 3")
        count = self.value(U64)
        metadata = {}
        for _ in range(self.value(U64)):
            key = self.value(TEXT)
            metadata[key] = self.value(self.value(U32))
        return count, metadata

    def tensor(self):
        """Return name, shape, type and place of a tensor."""
        name = self.value(TEXT)
        sizes = self.numbers(U64, self.value(U32)).tolist()
        if not all(sizes):
            raise UserError(f"{name!r:.50} has no numbers")
        kind = load_gguf().GGMLQuantizationType(self.value(U32))
        return name, sizes[::-1], kind, self.value(U64)


@dataclass
class GgufTensor(HfTensor):
    """A tensor in a GGUF file."""

    kind: int  # its type, of GGMLQuantizationType
    content: np.ndarray  # (..., bytes of a row), mapped
    head_dim: int = 0  # of queries and keys whose rows llama.cpp has in another order; else 0

    def read(self):
        """Return the tensor in float32. Raises UserError."""
        with one_line(f"{self.path}: {self.key}: cannot be read"):
            w = torch.tensor(load_gguf().dequantize(self.content, self.kind))
        if self.head_dim:
            # llama.cpp rotates neighbours, transformers the two halves of a head.
            w = w.view(-1, self.head_dim // 2, 2, w.size(1)).transpose(1, 2).reshape(w.shape)
        return w


def open_gguf(path):
    """Return the metadata of a GGUF file by key, and its GgufTensors by name. Raises UserError."""
    gguf = load_gguf()
    if not path.is_file():
        raise UserError("no such file")
    with one_line("no whole GGUF file"):
        reader = GgufReader(path)
        count, metadata = reader.header()
        listed = [reader.tensor() for _ in range(count)]
        alignment = metadata.get("general.alignment", 32)
        start = -(-reader.place // alignment) * alignment
        tensors = {}
        for key, shape, kind, place in listed:
            sizes = gguf.quants.quant_shape_to_byte_shape(shape, kind)
            reader.place = start + place
            content = reader.numbers(U8, math.prod(sizes)).reshape(sizes)
            block, part, end = re.fullmatch(r"(blk\.\d+\.)?(.*?)(\.\w+)?", key).groups("")
            name = block.replace("blk", "model.layers") + GGUF_PARTS.get(part, part) + end
            # A type without a float of its own is not one of weights.
            dtype = kind.name if re.fullmatch(r"I\d+", kind.name) else "F32"
            tensors[key] = GgufTensor(path, key, name, dtype, shape, kind, content)
    return metadata, tensors


def unpack_gguf(path, folder):
    """Write what a GGUF file says, without its weights, into a folder of transformers.

    Return the weights as GgufTensors, see hf_headers. Raises UserError.
    """
    metadata, tensors = open_gguf(path)
    config = gguf_config(metadata, tensors)
    files = {"config.json": json_bytes(config)}
    with one_line("its tokenizer cannot be used"):
        files |= gguf_tokenizer(metadata)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    tensors.pop("rope_freqs.weight", None)
    if metadata["general.architecture"] == "llama":
        head_dim = hf_shape(config)["head_dim"]
        for key, tensor in tensors.items():
            if re.search(r"attn_[qk]\.weight$", key):
                tensor.head_dim = head_dim
    return [*tensors.values()]


def gguf_config(metadata, tensors):
    """Return the config.json that a GGUF file stands for. Raises UserError for what it cannot have."""
    architecture = str(metadata.get("general.architecture"))
    if architecture not in GGUF_ARCHITECTURES:
        names = ", ".join(GGUF_ARCHITECTURES)
        raise UserError(f"general.architecture={architecture!r:.50}: must be one of {names}")
    if metadata.get("split.count", 1) != 1:
        raise UserError(
            f"split.count={metadata['split.count']}: must be one whole file (llama-gguf-split --merge)"
        )
    config = {
        "architectures": [GGUF_ARCHITECTURES[architecture]],
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    if "token_embd.weight" in tensors:
        config["vocab_size"] = tensors["token_embd.weight"].shape[0]
    for key, value in metadata.items():
        prefix, _, name = key.partition(".")
        # Meta's files and Hugging Face's have one order of rows here, whatever this says.
        if prefix != architecture or name == "tensor_data_layout":
            continue
        if name not in GGUF_CONFIG:
            raise UserError(f"{key}={value!r:.50}: is not known; it may change what is computed")
        field_name = GGUF_CONFIG[name]
        if config.setdefault(field_name, value) != value:
            raise UserError(f"{key}={value!r:.50}: must be {config[field_name]!r:.50}")
    if "rope_freqs.weight" in tensors:
        base = hf_real(config, "rope_theta", ROPE_BASE)
        config["rope_scaling"] = gguf_rope(base, tensors["rope_freqs.weight"].read())
    return config


def llama3_divisors(dims, base, scaling):
    """Return what llama.cpp divides the rates of rotary positions by (dims / 2,), see rotary_factors."""
    rates = base ** -(torch.arange(0, dims, 2) / dims)
    return 1 / rotary_factors(rates, scaling)


def gguf_rope(base, divisors):
    """Return rope_scaling of a config.json for divisors of the rates. Raises UserError without one.

    A file has no factors beside them. Llama 3.1 to 3.3 have 1 and 4.
    """
    for length in (2**power for power in range(4, 24)):
        scaling = [divisors.max().item(), 1.0, 4.0, length]
        expected = llama3_divisors(2 * len(divisors), base, scaling)
        if torch.allclose(expected, divisors, rtol=1e-5):
            return {"rope_type": "llama3"} | dict(zip(HF_SCALING, scaling, strict=True))
    raise UserError("rope_freqs.weight: must be Llama 3's, with factors 1 and 4")


def gguf_tokenizer(metadata):
    """Return the files of a tokenizer in a folder of transformers, by name. Raises UserError."""
    values = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in metadata.items()
        if key.startswith("tokenizer.ggml.")
    }
    kind = values.get("model")
    if kind not in ("gpt2", "llama"):
        raise UserError(f"tokenizer.ggml.model={kind!r:.50}: must be gpt2 or llama")
    if values.get("add_eos_token"):
        raise UserError("tokenizer.ggml.add_eos_token: must be false; no text ends with a token")
    tokens = values["tokens"]
    config = {"add_bos_token": values.get("add_bos_token", True)}
    for name, long_name in GGUF_TOKENS.items():
        if f"{long_name}_token_id" in values:
            config[f"{name}_token"] = tokens[values[f"{long_name}_token_id"]]
    pattern = re.compile(r"tokenizer\.chat_template(?:\.(\w+))?")
    templates = [
        {"name": match[1] or "default", "template": metadata[match[0]]}
        for match in map(pattern.fullmatch, metadata)
        if match
    ]
    if templates:
        config["chat_template"] = templates
    ends = [values.get(f"{name}_token_id") for name in ("eos", "eot", "eom")]
    files = {
        "tokenizer_config.json": json_bytes(config),
        "generation_config.json": json_bytes({"eos_token_id": ends}),
    }
    if kind == "gpt2":
        return files | {"tokenizer.json": json_bytes(gguf_byte_level(values, config))}
    return files | {"tokenizer.model": sentencepiece_content(values)}


def gguf_byte_level(values, config):
    """Return the tokenizer.json of byte-level BPE. Raises UserError for an unknown split.

    values: those of tokenizer.ggml; config: the tokenizer_config.json.
    """
    split = values.get("pre")
    if split not in GGUF_SPLITS:
        names = ", ".join(GGUF_SPLITS)
        raise UserError(f"tokenizer.ggml.pre={split!r:.50}: must be one of {names}")
    vocab = {}
    added = []
    for i, (text, kind) in enumerate(zip(values["tokens"], values["token_type"], strict=True)):
        if kind == GGUF_UNUSED:
            continue
        if text in vocab:
            raise UserError(f"tokenizer.ggml.tokens: {text!r:.50} is at {vocab[text]} and {i}")
        vocab[text] = i
        if kind != GGUF_NORMAL:
            added.append({"id": i, "content": text, "special": kind != GGUF_USERS})
    is_llama = split == "llama-bpe"
    processor = None
    if values.get("add_bos_token", is_llama):
        bos = config["bos_token"]
        processor = bos_json(bos, vocab[bos])
    merges = [merge for merge in values["merges"] if merge != GGUF_NO_MERGE]
    return {
        "model": {"type": "BPE", "vocab": vocab, "merges": merges, "ignore_merges": is_llama},
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if split == "qwen2" else None,
        "pre_tokenizer": split_json(GGUF_SPLITS[split]),
        "post_processor": processor,
    }


def proto_field(number, value):
    """Return a field of a protobuf message: a number from 0 on, a float, or bytes."""

    def varint(rest):
        data = bytearray()
        while rest > 127:
            data.append(rest & 127 | 128)
            rest >>= 7
        return bytes(data + bytes([rest]))

    if isinstance(value, float):
        return varint(8 * number + 5) + struct.pack("<f", value)
    if isinstance(value, bytes):
        return varint(8 * number + 2) + varint(len(value)) + value
    return varint(8 * number) + varint(value)


def sentencepiece_content(values):
    """Return the SentencePiece model that a GGUF file stands for, see SentencePieceModel.

    values: those of tokenizer.ggml.
    """
    kinds = values["token_type"]
    pieces = []
    for text, score, kind in zip(values["tokens"], values["scores"], kinds, strict=True):
        piece = proto_field(1, text.encode()) + proto_field(2, float(score))
        pieces.append(proto_field(1, piece + proto_field(3, kind)))
    trainer = proto_field(3, 2) + proto_field(35, int(6 in kinds))  # BPE; whether it has bytes
    for place, name in enumerate(("unknown", "bos", "eos", "padding")):
        i = values.get(f"{name}_token_id")
        if i is not None:
            trainer += proto_field(40 + place, i)
            trainer += proto_field(45 + place, values["tokens"][i].encode())
    has_prefix = int(values.get("add_space_prefix", True))
    normalizer = proto_field(1, b"identity") + proto_field(3, has_prefix) + proto_field(4, 0)
    return b"".join(pieces) + proto_field(2, trainer) + proto_field(3, normalizer)


def write_gguf(args, source, network):
    """Write a model as a GGUF file. Raises UserError for what llama.cpp does not have.

    Norms and biases are float32, matrices of --type: float16 is what all builds of llama.cpp
    compute fast, and has three more binary digits than bfloat16.
    """
    gguf = load_gguf()
    config = hf_config(network.config)
    (layout,) = config["architectures"]
    names = {name: short for short, name in GGUF_ARCHITECTURES.items()}
    if layout not in names:
        raise UserError(f"{args.out}: the layout {layout}: must be one of {', '.join(names)}")
    architecture = names[layout]
    wanted = args.type or "f16"
    metadata = {
        "general.name": args.out.stem,
        "general.file_type": int(gguf.LlamaFileType[GGUF_TYPES[wanted]]),
        "general.quantization_version": gguf.GGML_QUANT_VERSION,
    }
    metadata |= {f"{architecture}.{key}": config[name] for key, name in GGUF_CONFIG.items()}
    metadata |= gguf_vocabulary(model_tokenizer(source), config["vocab_size"])

    part = args.out.with_name(f"{args.out.name}.part")
    writer = gguf.GGUFWriter(part, architecture)
    adders = {str: writer.add_string, list: writer.add_array, bool: writer.add_bool}
    adders |= {int: writer.add_uint32, float: writer.add_float32}
    for key, value in metadata.items():
        adders[type(value)](key, value)
    for key, w in gguf_tensors(architecture, network).items():
        kind = wanted if w.ndim > 1 else "f32"
        check_gguf_type(kind, key, w)
        kind = gguf.GGMLQuantizationType[kind.upper()]
        writer.add_tensor(key, gguf.quantize(w, kind), raw_dtype=kind)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        os.replace(part, args.out)
    finally:
        part.unlink(missing_ok=True)
    print(f"{args.out}: {architecture}, {len(metadata)} values of metadata, matrices in {wanted}")


def check_gguf_type(kind, key, w):
    """Raise UserError for a type that a tensor, a float32 array, cannot have."""
    largest = np.abs(w).max()
    if kind == "f16" and largest > np.finfo(np.float16).max:
        raise UserError(f"--type f16: {key} has a weight of {largest:.3g}; must be f32 or bf16")
    if kind == "q8_0" and w.shape[-1] % 32:
        raise UserError(f"--type q8_0: {key} has {w.shape[-1]} columns; must be a multiple of 32")


def gguf_tensors(architecture, network):
    """Return the tensors of a GGUF file, float32 arrays, by name. Raises UserError."""
    config = network.config
    width = config.attention_width
    names = {part: name for name, part in GGUF_PARTS.items()}
    tensors = {}
    for name, w in hf_views(network).items():
        block, part, end = re.fullmatch(r"(model\.layers\.\d+\.)?(.*)(\.\w+)", name).groups("")
        if architecture == "llama" and part in ("self_attn.q_proj", "self_attn.k_proj"):
            # See GgufTensor.
            w = w.view(-1, 2, width // 2, w.size(1)).transpose(1, 2).reshape(w.shape)
        key = block.replace("model.layers", "blk") + names[part] + end
        tensors[key] = w.detach().contiguous().numpy()
    if config.rope_scaling:
        if architecture != "llama":
            raise UserError(f"rope_scaling={config.rope_scaling}: llama.cpp has it in Llama alone")
        divisors = llama3_divisors(width, config.rope_base, config.rope_scaling)
        tensors["rope_freqs.weight"] = divisors.numpy()
    return tensors


def gguf_vocabulary(tokenizer, count):
    """Return the metadata of a tokenizer by key. Raises UserError for one that llama.cpp does not have.

    count: rows of the embedding; those without a token are unused.
    """
    files = tokenizer_files(tokenizer)
    config = json.loads(files["tokenizer_config.json"])
    described = json.loads(files["tokenizer.json"])
    added = {
        token["id"]: (token["content"], GGUF_CONTROL if token["special"] else GGUF_USERS)
        for token in described["added_tokens"]
    }
    if "tokenizer.model" in files:
        pieces, values = gguf_sentencepiece(files["tokenizer.model"], count)
        pieces = added | pieces
    else:
        pieces = {i: (text, GGUF_NORMAL) for text, i in described["model"]["vocab"].items()} | added
        values = gguf_merges(tokenizer, described["model"]["merges"])
    listed = [pieces.get(i, (f"[PAD{i}]", GGUF_UNUSED)) for i in range(count)]
    values["tokens"] = [text for text, _ in listed]
    values["token_type"] = [kind for _, kind in listed]
    ids = {text: i for i, (text, _) in added.items()}
    for name, long_name in GGUF_TOKENS.items():
        if config.get(f"{name}_token") in ids:
            values[f"{long_name}_token_id"] = ids[config[f"{name}_token"]]
    values.setdefault("eos_token_id", tokenizer.bos_id)  # as imports have it, see hf_chat
    # The end of a turn, the largest id of ours, is llama.cpp's EOT. It takes three ends at most.
    ends = sorted(stop_ids(tokenizer) - {values["eos_token_id"], tokenizer.bos_id}, reverse=True)
    values |= {f"{name}_token_id": i for name, i in zip(("eot", "eom"), ends, strict=False)}
    if ends[2:]:
        print(f"llama.cpp does not end answers at the tokens {ends[2:]}")
    values["add_bos_token"] = bool(begin_ids(tokenizer))
    if tokenizer.facts.get("flags"):
        print(f"llama.cpp does not know what added tokens are: {tokenizer.facts['flags']}")
    metadata = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    for name, template in named_templates(config).items():
        metadata[f"tokenizer.chat_template.{name}".removesuffix(".default")] = template
    return metadata


def gguf_merges(tokenizer, merges):
    """Return what is particular about byte-level BPE in metadata. UserError for an unknown split."""
    split = tokenizer.facts.get("split", GPT2_SPLIT)
    if split == ENCODINGS["gpt2"]["split"]:  # the same parts
        split = GPT2_SPLIT
    names = [name for name, known in GGUF_SPLITS.items() if known == split]
    if not names:
        raise UserError(f"{tokenizer.file}: llama.cpp has no name for its split {split!r:.90}")
    return {"model": "gpt2", "pre": names[0], "merges": merges or [GGUF_NO_MERGE]}


def gguf_sentencepiece(content, count):
    """Return text and kind of a SentencePiece model's pieces by id, and what is particular about it.

    Raises UserError for what llama.cpp does not compute.
    """
    model = read_sentencepiece(content)
    faults = {
        "model_type must be bpe": model.algorithm != 2,
        "byte_fallback must be true": 6 not in model.kinds,
        "normalization_rule_name must be identity": model.charsmap,
        "remove_extra_whitespaces must be false": model.drops_spaces,
    }
    for fault, is_there in faults.items():
        if is_there:
            raise UserError(f"tokenizer.model: {fault} for llama.cpp")
    pieces = {}
    for i, (text, kind) in enumerate(zip(model.names, model.kinds, strict=True)):
        # No piece but itself has a symbol of one letter, and llama.cpp would begin a text behind it.
        pieces[i] = (text, GGUF_NORMAL if kind == GGUF_USERS and len(text) == 1 else kind)
    return pieces, {
        "model": "llama",
        "scores": model.scores + [0.0] * (count - len(pieces)),
        "unknown_token_id": model.kinds.index(GGUF_UNKNOWN),
        "add_space_prefix": model.has_prefix,
    }


# -------------------------------------------------------------------------------------------- main
def fail_usage(message):
    """Raise a mistake in the command line, which argparse would print in several lines."""
    raise UserError(f"{message}; convert.py --help says more")


def home_path(text):
    """Return a path; a shell does not replace the `~` of --like=~/x, nor one in quotes."""
    return Path(os.path.expanduser(text))


def make_parser():
    """Return the parser of the command line. What it returns has the command's function as `run`."""
    parser = argparse.ArgumentParser(
        prog="convert.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.error = fail_usage
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for run, source in ((import_, "folder"), (export, "model")):
        name = run.__name__.rstrip("_")  # import is a word of Python
        command = commands.add_parser(
            name, help=run.__doc__, description=run.__doc__, allow_abbrev=False
        )
        command.error = fail_usage
        command.set_defaults(run=run)
        command.add_argument(source, metavar=source.upper(), type=home_path)
        command.add_argument("out", metavar="OUT", type=home_path)
    add_option = commands.choices["import"].add_argument
    set_help = "variable of the chat template, as enable_thinking=false"
    add_option("--set", action="append", metavar="NAME=JSON", help=set_help)
    add_option = commands.choices["export"].add_argument
    add_option("--type", choices=GGUF_TYPES, help="of a GGUF file's matrices (f16)")
    add_option("--like", type=home_path, help="folder of transformers, whose form it gets")
    add_option("--adapters", action="store_true", help="LoRA adapters alone, for PEFT")
    add_option("--weights", choices=AVERAGES, help="of a checkpoint (those that its run chose)")
    return parser


def main():
    """Run one command and return the exit code."""
    args = make_parser().parse_args()
    if args.run is import_:  # often the first run of a clone
        args.out.absolute().parent.mkdir(parents=True, exist_ok=True)
    if args.out.exists():
        raise UserError(f"OUT {str(args.out)!r}: exists already; must be a new name")
    if not args.out.absolute().parent.is_dir():
        raise UserError(f"OUT {str(args.out)!r}: must be in a folder that exists")
    args.run(args)
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
