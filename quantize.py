"""The artifact file: pack, unpack, verify, compare; and deltas, the changes of a tuned model.

    python quantize.py info runs/<RUN_ID>/model.upar --tensors           # what its bytes are spent on
    python quantize.py verify runs/<RUN_ID>/model.upar runs/<RUN_ID> --weights ema
    python quantize.py pack runs/<RUN_ID> small.upar --bits 4            # with the steps of MATRIX_BITS=4
    python quantize.py bitdelta runs/<BASE> runs/<TUNED> tuned.delta     # 1 bit a weight; deltaquant: 1 to 8
    python quantize.py apply runs/<BASE> tuned.delta tuned               # a folder, of which `pack` makes an artifact

MODEL, BASE, TUNED, A, B and CHECKPOINT are an artifact, a checkpoint's folder, a run's folder (its
newest whole checkpoint), or what `unpack` or `apply` wrote. `python quantize.py COMMAND --help`
lists the options of a command. Two settings are environment variables: TOKENIZER_PATH names a
tokenizer that is not beside its model, and DEVICE is auto, cpu or cuda.

Sections between `# === shared:` fences are in other scripts too, byte for byte (tools/sync.py);
in a copy of your own change them as you like.
The rest is this script's: weights (how a MODEL is packed and written; GPTQ; distillation), commands
(a function for each, of the parsed arguments), and main, which calls the command's function.

Where to change what:
    how weights are rounded               quantize, quant_table
    which are, and which more finely      tensor_class, quantize_all, pack_model, check_codes
    what GPTQ measures and chooses        gptq, improve_codes, InputSums, GPTQ_TOKENS
    what is in the artifact               pack_artifact, decode_artifact
    how codes become bytes                rans_encode, rans_table, count_symbols
    how deltas are rounded and packed     quantize_delta, pack_delta
    how scales of a delta are trained     distill
    what `info` and `compare` print       info, measure_tensor, distances
    what `verify` refuses                 compare_packed, check_codes
    how a MODEL is read and checked       read_weights, read_checkpoint, known_network
    which text it reads                   read_text, training_batch, validation_bpb
    a new command, a new option           make_parser, add_command
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

import argparse
import base64
import collections
import contextlib
import functools
import hashlib
import io
import json
import math
import os
import re
import resource
import shutil
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path

import numpy as np
import sentencepiece
import torch
import torch.distributed as dist
import torch.nn.functional as F
import zstandard
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
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


# === shared: deltas ===
# A delta file holds what makes a base model into a tuned one: DELTA_MAGIC, and then an artifact. Its
# codes are those of the matrices, in units of the scale of their group. A matrix NAME has its scales
# as the tensor NAME.scales16 or NAME.scales32, named by their bits, and all other tensors are the
# tuned model's. What else a reader needs is in the header's settings, see pack_delta.
DELTA_MAGIC = b"UPARDEL2"


def group_size(w, group):
    """Return how many weights share a scale: `group` of them, a row's (-1) or all (0)."""
    count = w.numel()
    if group < 0:
        return count // len(w)
    return min(group or count, count)


def add_delta(base, codes, scales, group):
    """Return base + code * scale, float32, differentiable in the scales float32 (groups,)."""
    spread = scales.to(base.device).repeat_interleave(group_size(base, group))[: base.numel()]
    return base.float() + (codes.to(base.device) * spread).view(base.shape)


def largest_code(bits):
    """Return the largest code. Up to 3 bits codes are odd numbers, above all whole numbers.

    So 1 bit is a sign, and the codes of a number of bits are among those of one bit more.
    """
    return 2**bits - 1 if bits < 4 else 2 ** (bits - 1) - 1


def quantize_delta(delta, size, bits):
    """Return codes int8 (n,) and a scale for each `size` weights of delta float32 (n,).

    With 1 bit this is BitDelta (arXiv:2402.10193): the codes are signs, that of 0 being 1, and the
    scale is mean |delta|, which has the least squared error. With more, scales are float16 numbers:
    the one of least squared error among mean |delta|, the largest |delta| over the largest code of
    each number of bits (absmax), and 8 scales an octave from the largest |delta| down. Those tried
    for one bit fewer are among them, so a further bit never adds to the error. The last group may
    have fewer weights.
    """
    rest = len(delta) % size
    if rest and len(delta) > size:
        parts = delta.split([len(delta) - rest, rest])
        codes, scales = zip(*(quantize_delta(part, size, bits) for part in parts), strict=True)
        return torch.cat(codes), torch.cat(scales)
    rows = delta.view(-1, min(size, len(delta)))
    scales = rows.abs().mean(1, dtype=torch.float64).float()
    if bits == 1:
        return torch.where(delta >= 0, 1, -1).to(torch.int8), scales
    largest = rows.abs().amax(1)
    most = largest_code(bits)
    count = 40 + round(8 * math.log2(most))  # to where 31/32 of the range is cut off
    tried = [largest * 2 ** (-step / 8) for step in range(count)]
    tried += [largest / largest_code(fewer) for fewer in range(1, bits + 1)]
    least = torch.full_like(largest, math.inf, dtype=torch.float64)
    codes = torch.zeros_like(rows)
    for scale in [scales, *tried]:
        step = scale.half().float()[:, None]
        new = rows / torch.where(step > 0, step, 1.0)
        new = new.round_() if bits > 3 else new.div_(2).floor_().mul_(2).add_(1)
        new.clamp_(-most, most)
        error = (new * step).sub_(rows).square_().sum(1, dtype=torch.float64)
        better = error < least
        least[better] = error[better]
        scales[better] = step[better, 0]
        codes[better] = new[better]
    return codes.flatten().to(torch.int8), scales


class DeltaQuantizer:
    """DeltaQuant for programs: codes what a tuned weight has beyond its base, 1 to 8 bits a weight.

    group_size: weights that share a scale; -1: a row, 0: the whole tensor.
    """

    def __init__(self, bits=4, group_size=-1):
        if not 1 <= bits <= 8 or group_size < -1:
            raise UserError(f"bits={bits}, group_size={group_size}: must be 1 to 8, and -1 or more")
        self.bits = bits
        self.group_size = group_size

    def quantize(self, weight, base_weight):
        """Return codes int8 of the weight's shape, and scales float32 (groups,).

        Codes of 1 bit are signs, of 2 and 3 bits odd numbers. base + code * scale is near weight.
        """
        if weight.shape != base_weight.shape:
            raise UserError(f"weight {tuple(weight.shape)}: must be {tuple(base_weight.shape)}")
        delta = (weight.float() - base_weight.float()).flatten()
        codes, scales = quantize_delta(delta, group_size(weight, self.group_size), self.bits)
        return codes.view(weight.shape), scales

    def dequantize(self, base_weight, codes, scales):
        """Return base + code * scale in the dtype of the base."""
        weight = add_delta(base_weight, codes.flatten(), scales, self.group_size)
        return weight.to(base_weight.dtype)


class BitDeltaQuantizer(DeltaQuantizer):
    """BitDelta (arXiv 2402.10193): the sign of each weight's change, and its mean size by group."""

    def __init__(self, group_size=128):
        super().__init__(1, group_size)


def hash_weights(tensors):
    """Return the SHA-256 of float32 weights with their names and shapes, in order."""
    digest = hashlib.sha256()
    for name, w in tensors.items():
        digest.update(f"{name} {list(w.shape)} ".encode())
        digest.update(w.float().numpy().astype("<f4").tobytes())
    return digest.hexdigest()


def pack_delta(base, tuned, header, scales):
    """Return a delta file. `scales`: name -> scales of bitdelta that are better than its own.

    The header has tokenizer_sha256, meta and settings: base (see hash_weights), shape (what
    rebuilds the tuned network), method, bits, group, scale_bits, and scale, a power of two near the
    largest delta, in units of which scales are stored. Raises ArtifactError if a tensor is not
    finite as stored.
    """
    settings = header["settings"]
    bits = settings["bits"]
    tensors = {}
    coded = {}
    for name, w in tuned.items():
        tensors[name] = w
        if tensor_class(name, w) == "matrix":
            delta = (w.float() - base[name].float()).flatten() / settings["scale"]
            codes, steps = quantize_delta(delta, group_size(w, settings["group"]), bits)
            if name in scales:
                steps = scales[name] / settings["scale"]
            coded[name] = Coded(codes.view(w.shape).flatten(1).int(), torch.ones(1), bits)
            tensors[f"{name}.scales{settings['scale_bits']}"] = steps
    return DELTA_MAGIC + pack_artifact(tensors, coded, **header)


def read_delta_file(data, base):
    """Return the header and the weights of a delta file; any error if it is not whole."""
    require(data.startswith(DELTA_MAGIC), "is no delta, or one of a version before 2026-11-29")
    header, tensors, _ = decode_artifact(data[len(DELTA_MAGIC) :])
    settings = header["settings"]
    check_json(settings, {"base": str, "scale": float, "shape": dict}, "the header's settings")
    digest = hash_weights(base)
    require(settings["base"] == digest, f"of another base, not of SHA-256 {digest[:12]}")
    weights = {}
    for name, w in base.items():
        weights[name] = tensors.pop(name).view_as(w)
        if tensor_class(name, w) == "matrix":
            steps = tensors.pop(f"{name}.scales{settings['scale_bits']}") * settings["scale"]
            size = group_size(w, settings["group"])
            steps = steps.view(-(-w.numel() // size))  # or an error: there are more or fewer
            weights[name] = add_delta(w, weights[name].flatten(), steps, settings["group"])
        require(weights[name].isfinite().all(), f"tensor {name!r} is not finite")
    require(not tensors, "tensors are left over")
    return header, weights


def read_delta(path, base):
    """Return the header and name -> float32 weights of the tuned model, of a delta of `base`.

    Memory is bounded by the file and the base. Raises ArtifactError, one line with the file's name,
    if anything is not as it was written or the base is another.
    """
    require(Path(path).is_file(), f"{path}: no such file")
    with one_line(path):
        return read_delta_file(Path(path).read_bytes(), base)


# === end: deltas ===


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


# === shared: data ===
# llm.c's formats: magic number and version -> type of the tokens, uint32 for vocabularies > 65,536
SHARD_KINDS = {(20240520, 1): "<u2", (20240801, 7): "<u4"}


def read_shard(path):
    """Return the tokens of a shard, a memory map (N,). Raises UserError if missing or damaged."""
    if not os.path.isfile(path):
        raise UserError(f"shard {path}: no such file")
    header = np.fromfile(path, "<i4", 3)  # magic number, version, number of tokens
    kind = SHARD_KINDS.get(tuple(header[:2]))
    size = os.path.getsize(path) - 1024
    if not kind or header[-1] < 1 or size != np.dtype(kind).itemsize * int(header[-1]):
        raise UserError(f"shard {path}: truncated, damaged or empty, or not in llm.c's formats")
    return np.memmap(path, kind, "r", offset=1024)


# What the scripts read of a manifest, see check_json.
SPLIT_KINDS = {
    "shards": [{"file": str, "sha256": str}],
    "tokens": int,
    "decoded_bytes": int,
    "source_bytes?": int,  # nobody knows those of FineWeb
}
YARDSTICKS = ("bigram_bpb", "trigram_bpb", "zstd22_bpb", "xz_bpb")
MANIFEST_KINDS = {
    "format": int,
    "name": str,
    "published": bool,
    "tokenizer": {"file": str, "sha256": str, "vocab_size": int, "bos_id": int},
    "train": SPLIT_KINDS,
    "val": SPLIT_KINDS,
    "overlap_documents": int,
    "yardsticks?": dict.fromkeys(YARDSTICKS, float),
}


def load_manifest(data_path):
    """Return `manifest.json` of a data folder, a dict. Raises UserError if there is none, or if it
    has not what the scripts read of it.
    """
    path = Path(data_path) / "manifest.json"
    try:
        manifest = json.loads(path.read_bytes())
        check_json(manifest, MANIFEST_KINDS, "the manifest")
        tokenizer = manifest["tokenizer"]
        if manifest["format"] != 1 or tokenizer["bos_id"] >= tokenizer["vocab_size"]:
            raise UserError(
                "format must be 1, and the tokenizer's bos_id an id below its vocab_size"
            )
        for file in (tokenizer, *manifest["train"]["shards"], *manifest["val"]["shards"]):
            if "/" in file["file"] or not file["file"].isprintable():
                raise UserError(f"{file['file']!r:.60} must be the name of a file beside it")
    except (OSError, ValueError, RecursionError, UserError) as error:
        raise UserError(
            f"{path}: {error}; the folder of data (DATA_PATH) must be one that data/prepare.py TEXTS "
            "--out FOLDER made, or one of shards, for which data/download.py --manifest writes it"
        ) from None
    return manifest


def counted_bytes(part):
    """Return the bytes by which a score of a manifest's split divides.

    They are those that the tokens decode to, but never more than the source has: the text that a
    tokenizer without a piece for the space decodes to has a third more bytes than its source.
    """
    return min(part["decoded_bytes"], part.get("source_bytes") or math.inf)


class TokenStream:
    """Shards read as one circular stream of tokens.

    Raises UserError if a shard has an id that is not below `vocab_size`.
    """

    def __init__(self, paths, vocab_size):
        self.paths = paths
        self.vocab_size = vocab_size
        # A mapped shard keeps its file open, and often a process may at first have 1,024 open ones.
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.suppress(OSError, ValueError):  # macOS names a limit that it does not take
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self.shards = [read_shard(path) for path in paths]
        self.starts = np.cumsum([0, *map(len, self.shards)])  # (shards + 1,)

    def __len__(self):
        return self.starts[-1]

    def read(self, start, count):
        """Return `count` tokens from position `start` on, int64; after the last, the first."""
        parts = []
        while count:
            start %= len(self)
            shard = np.searchsorted(self.starts, start, "right") - 1
            part = self.shards[shard][start - self.starts[shard] :][:count]
            if part.max() >= self.vocab_size:
                raise UserError(f"shard {self.paths[shard]}: has ids beyond the tokenizer's")
            parts.append(part)
            start += len(part)
            count -= len(part)
        return np.concatenate(parts, dtype=np.int64)


def check_dataset(data_path, manifest):
    """Return the TokenStreams of training and validation.

    Raises UserError unless the shards are the manifest's.
    """
    if manifest["overlap_documents"] and not manifest["published"]:
        raise UserError(f"{data_path}/manifest.json: validation documents are also in training")
    streams = []
    for split in ("train", "val"):
        shards = manifest[split]["shards"]
        paths = [Path(data_path, shard["file"]) for shard in shards]
        stream = TokenStream(paths, manifest["tokenizer"]["vocab_size"])
        if len(stream) != manifest[split]["tokens"] or not shards:
            raise UserError(
                f"{data_path}/manifest.json: has another number of tokens than the shards of {split}"
            )
        if split == "val":  # training shards may be many gigabytes
            for path, shard in zip(paths, shards, strict=True):
                if sha256_file(path) != shard["sha256"]:
                    raise UserError(f"shard {path}: its SHA-256 is not the manifest's")
        streams.append(stream)
    return streams


# === end: data ===


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


# ----------------------------------------------------------------------------------------- weights
def stored_widen(source):
    """Return the factor on quantization steps of a checkpoint of train_gpt.py, see quant_table."""
    if not source.exporter:  # of another script
        return 1.0
    with one_line(f"{source.path}: training.pt has no factor on quantization steps"):
        return float(source.exporter["widen"])


def read_packed(path):
    """Return the weights of an artifact, or of a run's."""
    folder = Path(path)
    return read_weights(str(folder / "model.upar") if folder.is_dir() else path)


def given_device():
    """Return the device that the environment names: auto, cpu or cuda. Raises UserError."""
    choice = os.environ.get("DEVICE", "auto")
    if choice not in ("auto", "cpu", "cuda"):
        raise UserError(f"DEVICE={choice!r}: must be auto, cpu or cuda")
    return choice


def copy_tokenizer(header, out, *models):
    """Copy a tokenizer to beside `out`, where sample.py looks: TOKENIZER_PATH, or one beside a model.

    Raises UserError if another tokenizer of that name is there.
    """
    name = header["meta"]["tokenizer"]
    if name == "bytes":  # is built in
        return

    def is_right(path):
        return path.is_file() and sha256_file(path) == header["tokenizer_sha256"]

    target = out.absolute().parent / name
    if is_right(target):
        return
    if target.exists():
        raise UserError(
            f"OUT {str(out)!r}: its tokenizer must be beside it as {target}, but that file is of "
            "another model; choose another folder for OUT, a new one for example"
        )
    for path in [Path(given_tokenizer()), *(model.parent / name for model in models)]:
        if is_right(path):
            replace_file(target, path.read_bytes())
            print(f"{target}: the tokenizer that {out} needs beside it")
            return
    sys.stderr.write(
        f"{out}: its tokenizer was not found; TOKENIZER_PATH names it, or put it there as {target}\n"
    )


def write_model(out, source, *models):
    """Write a MODEL as a folder: float32 weights, its codes if any, what rebuilds the network."""
    header = read_header(source)
    copy_tokenizer(header, out, *models)
    coded = {name: (part.codes, part.scale, part.bits) for name, part in source.coded.items()}
    files = {
        "model.pt": functools.partial(torch.save, source.tensors),
        "coded.pt": functools.partial(torch.save, coded),
        "meta.json": json.dumps({"shape": source.shape, "header": header}).encode(),
    }
    write_folder(out, files)
    print(f"{out}: {len(source.tensors)} tensors")


def read_header(source):
    """Return tokenizer_sha256 and meta for a file; a checkpoint's tokenizer lies beside. UserError."""
    if source.header:
        return {name: source.header[name] for name in ("tokenizer_sha256", "meta")}
    # Its shape has the facts that a rank file lacks.
    read = functools.partial(read_tokenizer, facts=source.shape)
    tokenizer = find_tokenizer(source, read)
    meta = {"seed": source.run["seed"], "tokenizer": tokenizer.file}
    return {"tokenizer_sha256": tokenizer.sha256, "meta": meta}


DEFAULT_BITS = 6  # of a model without a run


def chosen_bits(source, bits):
    """Return the bits of a code of a matrix: `bits`, or if it is None the model's own. UserError."""
    if bits and source.coded:
        raise UserError(
            f"--bits: the weights of {source.path} are quantized already; give their checkpoint"
        )
    return bits or source.run.get("matrix_bits", DEFAULT_BITS)


def pack_model(source, bits=None, data_path=None):
    """Return the artifact of a model: of its codes, or else of the nearest codes to its weights.

    bits: of a code of a matrix, if not the run's own. With the run's own, its quantization steps
    are used too, as they were widened when quantization-aware training began. data_path: a folder
    of shards, for whose text GPTQ chooses the codes. Raises UserError or ArtifactError.
    """
    header = read_header(source)
    coded = source.coded
    bits = chosen_bits(source, bits)
    if not coded:
        is_as_trained = bits == source.run.get("matrix_bits")
        table = quant_table(bits, stored_widen(source) if is_as_trained else 1.0)
        coded = quantize_all(source.tensors, table)
    if data_path:
        improve_codes(coded, source, data_path)
    with one_line(source.path):
        return pack_artifact(source.tensors, coded, settings=source.shape, **header)


# GPTQ and distillation read batches of so many windows of text.
BATCH_WINDOWS = 4
MICRO_BATCH_TOKENS = 4096  # of which so many are in memory at a time, or one window
SEED = 1337  # of the places of its windows


def read_text(model, path):
    """Return the TokenStreams of training and validation for a model, and the bytes of the second.

    path: a folder of shards; None is that of the model's run. Raises UserError if it has another
    tokenizer than the model.
    """
    path = path or model.run.get("data_path")
    if not path:
        raise UserError(
            f"--data: must name a folder of shards, because {model.path} names none; without --score, "
            "and in bitdelta with --distill-steps 0, no data are needed"
        )
    if ":" in path:
        raise UserError(f"DATA {path!r}: is a mixture; must be one of its folders")
    manifest = load_manifest(path)
    train, val = check_dataset(path, manifest)
    if manifest["tokenizer"]["sha256"] != read_header(model)["tokenizer_sha256"]:
        raise UserError(f"DATA {path!r}: has another tokenizer than {model.path}")
    return train, val, counted_bytes(manifest["val"])


def training_batch(train, seq_len, step):
    """Return the micro-batches, ids (B, seq_len), of a step: windows from random places."""
    starts = np.random.default_rng([SEED, step]).integers(len(train), size=BATCH_WINDOWS)
    windows = np.stack([train.read(start, seq_len) for start in starts])
    return torch.from_numpy(windows).split(max(1, MICRO_BATCH_TOKENS // seq_len))


@torch.no_grad()
def validation_bpb(network, seq_len, val, val_bytes):
    """Return bits per byte of all tokens of validation but the first, in windows side by side."""
    tokens = torch.from_numpy(val.read(0, len(val)))
    device = network.embed.device
    size = seq_len * max(1, MICRO_BATCH_TOKENS // seq_len)
    nats = 0.0
    for inputs, targets in zip(tokens[:-1].split(size), tokens[1:].split(size), strict=True):
        padding = (0, -len(inputs) % seq_len)  # of the last window; it has no nats
        ids = F.pad(inputs, padding).view(-1, seq_len).to(device)
        nexts = F.pad(targets, padding, value=-1).view(-1, seq_len).to(device)
        nats += network(ids, nexts).double().sum().item()
    return nats / math.log(2) / val_bytes


# GPTQ's sums are of so many tokens of training text: 8,192 of them lost 0.0021 nats a token instead
# of 0.0017 (docs/lab.md).
GPTQ_TOKENS = 65536
GPTQ_BLOCK = 128  # columns whose errors reach the columns behind them in one product


def gptq(w, scale, hessian):
    """Return codes int32 (R, C) of w (R, C) that make the squared errors of outputs small.

    GPTQ (arXiv 2210.17323, algorithm 1), in float64: column by column, the rounding error is spread
    over the columns to come, as the hessian (C, C), the sum of x x^T over inputs x, says.
    Damping by 0.01 of the mean diagonal, as in the paper, did worse than 0.1 (docs/lab.md).
    scale (1,).
    """
    h = hessian.to(torch.float64, copy=True)
    diagonal = h.diagonal()
    diagonal += 0.1 * diagonal.mean() + 1e-9
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(h))
    spread = torch.linalg.cholesky(inverse, upper=True)
    spread /= spread.diagonal()[:, None].clone()
    scale = scale.double()
    w = w.mT.double().contiguous()  # (C, R): columns become rows, which are read at once
    for begin in range(0, len(w), GPTQ_BLOCK):
        end = min(begin + GPTQ_BLOCK, len(w))
        errors = []
        for at in range(begin, end):
            codes = (w[at] / scale).round_()
            error = torch.addcmul(w[at], codes, scale, value=-1)
            w[at:end].addcmul_(spread[at, at:end, None], error, value=-1)
            errors.append(error)
        w[end:] -= spread[begin:end, end:].mT @ torch.stack(errors)
    return (w / scale).round_().mT.to(torch.int32)


class InputSums(TorchFunctionMode):
    """Inside, F.linear adds x x^T of all its inputs x to `sums` (C, C), by the name of its weight."""

    def __init__(self, network):
        super().__init__()
        self.names = {id(param): name for name, param in network.named_parameters()}
        self.sums = {}

    def __torch_function__(self, function, types, args=(), kwargs=None):
        """Call a function of torch."""
        if function is F.linear and id(args[1]) in self.names:
            rows = args[0].flatten(0, -2)
            name = self.names[id(args[1])]
            self.sums[name] = self.sums.get(name, 0.0) + rows.mT @ rows
        return function(*args, **(kwargs or {}))


@torch.no_grad()
def improve_codes(coded, source, data_path):
    """Replace the codes of what layers multiply by those of GPTQ, on training text. UserError.

    Tables that are only looked up keep the nearest codes.
    """
    train, *_ = read_text(source, data_path)
    device = choose_device(given_device())
    network = rebuild(source).to(device)
    network.dtype = torch.float32  # so that F.linear meets the weights themselves
    inputs = InputSums(network)
    seq_len = source.shape["train_seq_len"]
    for step in range(math.ceil(GPTQ_TOKENS / BATCH_WINDOWS / seq_len)):
        for ids in training_batch(train, seq_len, step):
            with inputs:
                network(ids.to(device))
    for name, part in coded.items():
        if name in inputs.sums:
            w = source.tensors[name].flatten(1).float().to(device)
            scale = part.scale.to(device)
            part.codes = gptq(w, scale, inputs.sums[name]).cpu()
        else:  # every matrix is multiplied
            require(tensor_class(name, source.tensors[name]) != "matrix", f"no input of {name}")


def distill(base, tuned, args):
    """Return scales that bring the logits of base + delta near to the tuned model's.

    args: options of the command `bitdelta`. The loss is the mean squared error of logits
    (arXiv:2402.10193). If those of the first batch are not nearer in the end, there are no scales.
    """
    train, *_ = read_text(tuned, args.data)
    device = choose_device(given_device())
    seq_len = tuned.shape["train_seq_len"]
    teacher = rebuild(tuned).requires_grad_(False).to(device)
    held = {name: w.to(device) for name, w in tuned.tensors.items()}  # but the base's matrices
    signs = {}
    scales = {}
    groups = []
    for name, w in base.tensors.items():
        if tensor_class(name, w) == "matrix":
            delta = (held[name] - w.to(device)).flatten()
            held[name] = w.to(device)
            signs[name], scale = quantize_delta(delta, group_size(w, args.group), 1)
            scales[name] = scale.requires_grad_()
            # In units of a matrix's mean scale, one rate suits large and small deltas.
            groups.append({"params": [scale], "lr": args.distill_lr * scale.mean().item()})
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.distill_steps)

    def batch_loss(step):
        """Return the loss of a batch, and add its gradients."""
        total = 0.0
        for ids in training_batch(train, seq_len, step):
            ids = ids.to(device)
            weights = dict(held)
            for name, scale in scales.items():
                weights[name] = add_delta(held[name], signs[name], scale, args.group)
            logits = torch.func.functional_call(teacher, weights, (ids,))
            loss = (logits - teacher(ids)).square().mean() * (len(ids) / BATCH_WINDOWS)
            loss.backward()
            total += loss.item()
        return total

    losses = []
    for step in range(args.distill_steps):
        optimizer.zero_grad()
        losses.append(batch_loss(step))
        optimizer.step()
        schedule.step()
    before = losses[0]
    after = batch_loss(0)
    print(
        f"distillation: {args.distill_steps} steps, mean squared error of logits on the first "
        f"batch {before:.6g} before, {after:.6g} after"
    )
    if not after < before:  # or a NaN
        print("scales stay as they were; try another --distill-lr")
        return {}
    return {name: scale.detach().cpu() for name, scale in scales.items()}


def read_tuned(path, base):
    """Return the MODEL that a delta file makes of its base."""
    header, tensors = read_delta(path, base.tensors)
    return Weights(Path(path), tensors, header["settings"]["shape"], header)


# ---------------------------------------------------------------------------------------- commands
def show(rows):
    """Print rows as a table; floats with five digits, NaN as a dash."""
    width = max(len(str(row[0])) for row in rows)
    for name, *cells in rows:
        texts = [f"{cell:.5g}" if isinstance(cell, float) else str(cell) for cell in cells]
        texts = ["-".rjust(13) if text == "nan" else text.rjust(13) for text in texts]
        print("  ".join([str(name).ljust(width), *texts]))


def match_tensors(a, b):
    """Raise ArtifactError, which names the first tensor that one lacks or has in another shape."""
    for name in [*a.tensors, *b.tensors]:
        in_a = shape_of(a.tensors, name)
        in_b = shape_of(b.tensors, name)
        require(in_a == in_b, f"tensor {name!r}: {in_a} in {a.path}, {in_b} in {b.path}")


def distances(a, b, base=None):
    """Return the rows of a table, by tensor class and of all: how far b's weights are from a's.

    The columns are ||b - a|| / ||a||, mean (b - a)^2, max |b - a|, a.b / (||a|| ||b||) and
    20 log10(||a|| / ||b - a||), in float64. With a base, a and b are what the models add to it.
    Raises ArtifactError if shapes differ.
    """
    match_tensors(a, b)
    parts = {kind: [] for kind in ("matrix", "embedding", "control", "all")}
    for name, w in a.tensors.items():
        pair = torch.stack([w, b.tensors[name]]).double().flatten(1)
        if base:
            pair -= base.tensors[name].double().flatten()
        parts[tensor_class(name, w)].append(pair)
        parts["all"].append(pair)
    rows = [["class", "weights", "rel_frobenius", "mse", "max", "cosine", "snr_db"]]
    for kind, pairs in parts.items():
        if pairs:
            x, y = torch.cat(pairs, dim=1)
            error = y - x
            relative = error.norm() / x.norm()  # equal: an SNR of inf; all zero: NaN
            cosine = x @ y / (x.norm() * y.norm())
            ratios = [relative, error.square().mean(), error.abs().max(), cosine]
            ratios.append(-20 * relative.log10())
            rows.append([kind, len(x), *(ratio.item() for ratio in ratios)])
    return rows


def check_codes(source, model, bits):
    """Raise ArtifactError, which names a tensor, if an artifact cannot be of a model's weights.

    The exporter widens all steps of a class by one factor, so the steps say whose they are. GPTQ
    trades error in weights for error in outputs: up to 2.8 times the error of the nearest codes
    was measured. Other weights of the same size give 9 times that at 5 bits. So more than 4 times
    the error means other weights.
    """
    table = quant_table(chosen_bits(model, bits))
    steps = collections.defaultdict(list)  # class -> steps over those of the settings
    for name, w in model.tensors.items():
        what = f"{source.path}: tensor {name!r}: "
        whose = f"the {model.average} weights of {model.path} (--weights)"
        kind = tensor_class(name, w)
        require((kind in table) == (name in source.coded), f"{what}its coding is not a {kind}'s")
        if kind not in table:
            dtype = torch.float32 if name.endswith(FLOAT32_CONTROLS) else torch.float16
            is_equal = torch.equal(w.to(dtype).float(), source.tensors[name])
            require(is_equal, f"{what}is not that of {whose} as {dtype}")
            continue
        part = source.coded[name]
        expected = table[kind]["bits"]
        fault = f"{what}{part.bits} bits, {expected} by the settings of {whose}"
        require(part.bits == expected, fault)
        rows = w.flatten(1)
        step = part.scale.float().clamp(min=2**-24)  # older artifacts have scales of 0
        error = (rows - part.codes * step).double().norm()
        least = (rows - (rows / step).round_() * step).double().norm()
        times = error / max(least, 1e-12)
        require(times <= 4, f"{what}{times:.3g} times the error of the nearest codes to {whose}")
        usual = quantize(w, **table[kind])[1].item()
        if usual > 2**-13:  # below, float16 is coarse
            steps[kind].append(step.item() / usual)
            factor = max(steps[kind]) / min(steps[kind])
            require(factor < 1.004, f"{what}its steps are not those of {whose}, by {factor:.4g}")


def measure_tensor(name, source, model):
    """Return sums about a tensor of an artifact: weights, bytes, entropy in bits, squared error, coder."""
    w = source.tensors[name]
    record = source.header["streams"][name]
    sums = collections.Counter(tensors=1, weights=w.numel(), bytes=record["length"])
    if name in source.coded:
        _, counts = np.unique(source.coded[name].codes.numpy(), return_counts=True)
        sums["entropy"] = (counts * np.log2(counts.sum() / counts)).sum()
    dtype = np.dtype(record["dtype"])
    coder = "rans" if dtype == np.uint16 else "zstd"  # an embedding has the one that is shorter
    sums[f"{record.get('bits', 8 * dtype.itemsize)}-bit {coder}"] = 1
    if model:
        before = model.tensors[name].double()
        sums["error"] = (w.double() - before).square().sum().item()
        sums["power"] = before.square().sum().item()
    return sums


def info(args):
    """Print what an artifact's bytes are spent on.

    `entropy` is that of a tensor's codes without context, in bits per weight. With --checkpoint,
    `error` is ||artifact - checkpoint|| / ||checkpoint||.
    """
    source = read_packed(args.artifact)
    model = None
    if args.checkpoint:
        model = read_weights(args.checkpoint, args.weights)
        match_tensors(model, source)
    check_average(args.weights, model or source)
    streams = source.header["streams"]
    size = source.path.stat().st_size
    tensors = {}
    parts = collections.defaultdict(collections.Counter)  # by class, or part of the file
    parts["(header)"]["bytes"] = size - sum(record["length"] for record in streams.values())
    for name, record in streams.items():
        if name in source.tensors:
            tensors[name] = measure_tensor(name, source, model)
            parts[tensor_class(name, source.tensors[name])].update(tensors[name])
        else:
            parts[f"({name})"].update({"bytes": record["length"], "zstd": 1})
    total = sum(tensors.values(), collections.Counter())
    total["bytes"] = size
    rows = [["class", "tensors", "weights", "bytes", "bits/weight", "entropy", "error", "coders"]]
    shown = tensors if args.tensors else {}
    for name, sums in {**shown, **parts, "total": total}.items():
        coders = [f"{key}:{count}" for key, count in sums.items() if re.search("rans|zstd", key)]
        weights = sums["weights"] or math.nan
        entropy = sums["entropy"] or math.nan
        error = math.sqrt(sums["error"] / (sums["power"] or math.nan))
        counts = [sums["tensors"], sums["weights"], sums["bytes"]]
        rates = [8 * sums["bytes"] / weights, entropy / weights, error]
        rows.append([name, *counts, *rates, ", ".join(coders)])
    print(f"{source.path}: settings {source.shape} meta {source.header['meta']}")
    show(rows)


def unpack(args):
    """Write an artifact's weights as a folder, in float32 and as codes; `pack` makes it again."""
    source = read_packed(args.artifact)
    write_model(args.out, source, source.path)


def pack(args):
    """Write a checkpoint's artifact, every weight at the nearest code, and its tokenizer beside it.

    With --gptq DATA the codes are GPTQ's, for the inputs that training text of that folder gives.
    """
    source = read_weights(args.model, args.weights)
    check_average(args.weights, source)
    if args.gptq and source.coded:
        raise UserError(
            f"--gptq: the weights of {source.path} are quantized already; give their checkpoint"
        )
    chosen_bits(source, args.bits)  # for its error, before anything is written
    # First, because packing takes a while: another model's tokenizer may be there.
    copy_tokenizer(read_header(source), args.out, source.path)
    data = pack_model(source, args.bits, args.gptq)
    replace_file(args.out, data)
    print(f"{args.out}: {len(data)} bytes")


def compare_packed(source, model, bits):
    """Print how an artifact differs from a model. Raises ArtifactError if it is not the model's."""
    rows = distances(model, source)
    path = source.path
    require(model.shape == source.shape, f"{path}: its settings are not those of {model.path}")
    sha256 = read_header(model)["tokenizer_sha256"]
    is_equal = sha256 == source.header["tokenizer_sha256"]
    require(is_equal, f"{path}: its tokenizer is not {model.path}'s")
    if model.coded:
        for name, w in model.tensors.items():
            is_equal = torch.equal(w, source.tensors[name])
            require(is_equal, f"{path}: tensor {name!r} is not that of {model.path}")
    else:
        check_codes(source, model, bits)
    show(rows)
    whose = f"{model.average} weights of {model.path}".lstrip()
    if pack_model(model, bits) == path.read_bytes():
        print(f"{path}: what `pack` makes of the {whose}, byte for byte")
    else:
        print(
            f"{path}: was made of the {whose}, but by GPTQ, with steps fitted to a limit, or on "
            "another machine"
        )


def verify(args):
    """Check that an artifact is whole and, if CHECKPOINT is given, made of it; exit with 1 if not."""
    source = read_packed(args.artifact)
    rebuild(source)
    model = None
    if args.checkpoint:
        model = read_weights(args.checkpoint, args.weights)
    check_average(args.weights, model or source)
    if model:
        compare_packed(source, model, args.bits)
    elif args.bits:
        raise UserError("--bits: is not used without a CHECKPOINT")
    print(
        f"{source.path}: whole, {len(source.tensors)} tensors, SHA-256 {sha256_file(source.path)}"
    )


def compare(args):
    """Print how far the weights of model B are from those of A."""
    a = read_weights(args.a, args.weights)
    b = read_weights(args.b, args.weights)
    check_average(args.weights, a, b)
    show(distances(a, b))


def show_sizes(model):
    """Print the size of a delta file and of its matrices against weights in float32 and bfloat16."""
    size = model.path.stat().st_size
    weights = sum(w.numel() for w in model.tensors.values())
    others = {name: w for name, w in model.tensors.items() if tensor_class(name, w) != "matrix"}
    matrix_size = size - sum(model.header["streams"][name]["length"] for name in others)
    matrix_weights = weights - sum(w.numel() for w in others.values())
    rows = [["file", "bytes", "x_fp32", "x_bf16"]]
    rows.append([model.path, size, 4 * weights / size, 2 * weights / size])
    ratio = matrix_weights / matrix_size
    rows.append(["its matrices", matrix_size, 4 * ratio, 2 * ratio])
    show(rows)


def show_scores(models, data_path):
    """Print bits per byte of validation of base, tuned, and base + delta."""
    _, val, val_bytes = read_text(models[1], data_path)
    device = choose_device(given_device())
    scores = []
    for model in models:
        network = rebuild(model).to(device)
        scores.append(validation_bpb(network, model.shape["train_seq_len"], val, val_bytes))
    base, tuned, delta = scores
    kept = "tuned is no better than base on this text, so there is no gain to keep"
    if tuned < base:
        kept = f"{(base - delta) / (base - tuned):.2%} of the gain"
    print(
        f"\nbits per byte of validation: base {base:.4f}, tuned {tuned:.4f}, base + delta "
        f"{delta:.4f}, {kept}"
    )


DISTILL_LR = 0.1  # of scales in units of their matrix's mean


def make_delta(args):
    """Write the delta of two models and report on it."""
    if args.data and not (args.score or args.distill_steps):
        raise UserError(f"--data {args.data!r}: is not used without --score or --distill-steps")
    base = read_weights(args.base, args.weights)
    tuned = read_weights(args.tuned, args.weights)
    check_average(args.weights, base, tuned)
    match_tensors(base, tuned)
    if args.score:
        read_text(tuned, args.data)  # a fault of the data is found before the work
    most = 0.0
    for name, w in base.tensors.items():
        if tensor_class(name, w) == "matrix":
            most = max(most, (tuned.tensors[name] - w).abs().max().item())
    header = read_header(tuned)
    header["settings"] = {
        "method": args.command,
        "base": hash_weights(base.tensors),
        "bits": args.bits,
        "group": args.group,
        "scale_bits": args.scale_bits,
        "scale": 2.0 ** math.frexp(most)[1],
        "shape": tuned.shape,
    }
    scales = distill(base, tuned, args) if args.distill_steps and most else {}
    replace_file(args.out, pack_delta(base.tensors, tuned.tensors, header, scales))
    model = read_tuned(args.out, base)
    show_sizes(model)
    print("\nof what the tuned model's weights are beyond the base's:")
    show(distances(tuned, model, base))
    if args.score:
        show_scores([base, tuned, model], args.data)


def bitdelta(args):
    """Write the difference of TUNED from BASE with one bit for each weight of the matrices."""
    if not args.distill_steps and args.distill_lr != DISTILL_LR:
        raise UserError(f"--distill-lr {args.distill_lr}: is not used with --distill-steps 0")
    make_delta(args)


def deltaquant(args):
    """Write the difference of TUNED from BASE with 1 to 8 bits for each weight of the matrices."""
    make_delta(args)


def apply(args):
    """Write the model that a delta makes of BASE: a folder as `unpack` writes it, in float32."""
    base = read_weights(args.base, args.weights)
    check_average(args.weights, base)
    model = read_tuned(args.delta, base)
    write_model(args.out, model, model.path, base.path)


# -------------------------------------------------------------------------------------------- main
# Settings that an option has replaced. One in the environment is an error: nothing would read it.
FORMER_SETTINGS = {
    "DATA_PATH": "--data or --gptq",
    "DELTA_BITS": "--bits",
    "DELTA_GROUP": "--group",
    "DELTA_SCALE_BITS": "--scale-bits",
    "DELTA_STEP": "--group",
    "DISTILL_LR": "--distill-lr",
    "DISTILL_STEPS": "--distill-steps",
    "MATRIX_BITS": "--bits",
}


def check_environment():
    """Raise UserError for a variable of the environment that an option has replaced."""
    for name, option in FORMER_SETTINGS.items():
        if name in os.environ:
            raise UserError(
                f"{name}={os.environ[name]!r}: quantize.py does not read it; unset it and use {option}"
            )


def filled(text):
    """Return the text of an argument, a path; a shell does not replace the `~` of --data=~/x.

    An empty one, as of an unset variable, is an error.
    """
    if not text:
        raise argparse.ArgumentTypeError("must not be empty")
    return os.path.expanduser(text)


def number_from(low, kind=int):
    """Return a function that reads an option: a finite number of at least `low`."""

    def number(text):
        value = kind(text)
        if not low <= value < math.inf:
            raise argparse.ArgumentTypeError(f"{text} must be {low} or more")
        return value

    return number


def fail_usage(message):
    """Raise UserError for a mistake in the command line; argparse would print several lines."""
    raise UserError(f"{message}; quantize.py COMMAND --help lists a command's arguments")


MODEL_HELP = "an artifact, a run, a checkpoint, or a folder that unpack or apply wrote"
ARGUMENTS = {
    "artifact": "a model.upar, or the folder of a run that has one",
    "delta": "a file that bitdelta or deltaquant wrote",
    "out": "the file or folder that is written; it must not exist",
}


def add_command(commands, run, *names):
    """Add a command that calls `run`, with arguments of these names, and return its parser."""
    command = commands.add_parser(
        run.__name__, help=run.__doc__, description=run.__doc__, allow_abbrev=False
    )
    command.error = fail_usage
    command.set_defaults(run=run)
    for name in names:
        help_text = ARGUMENTS.get(name, MODEL_HELP)
        command.add_argument(name, metavar=name.upper(), type=filled, help=help_text)
    return command


def make_parser():
    """Return the parser of the command line. What it returns has the command's function as `run`."""
    parser = argparse.ArgumentParser(
        prog="quantize.py",
        description=__doc__.partition("Sections between")[0],  # the rest is for readers of the code
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.error = fail_usage
    # After entropy coding a weight takes fewer, see docs/quantization.md.
    bits_help = (
        "MATRIX_BITS of training: one less doubles the step of a matrix (default: the run's)"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    command = add_command(commands, info, "artifact")
    command.add_argument("--tensors", action="store_true", help="also print a line for each tensor")
    command.add_argument(
        "--checkpoint",
        type=filled,
        help="the checkpoint that was packed: print the error of packing, too",
    )
    add_command(commands, unpack, "artifact", "out")
    command = add_command(commands, pack, "model", "out")
    command.add_argument("--bits", type=int, choices=range(2, 9), help=bits_help)
    command.add_argument(
        "--gptq",
        metavar="DATA",
        type=filled,
        help="choose codes by GPTQ on the text of this folder",
    )
    command = add_command(commands, verify, "artifact")
    command.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        nargs="?",
        type=filled,
        help="the checkpoint or run that the artifact must be of",
    )
    command.add_argument("--bits", type=int, choices=range(2, 9), help=bits_help)
    add_command(commands, compare, "a", "b")
    add_delta_commands(commands)
    add_command(commands, apply, "base", "delta", "out")
    for name in commands.choices.keys() - {"unpack"}:
        commands.choices[name].add_argument(
            "--weights",
            choices=AVERAGES,
            help="which weights of a checkpoint (default: those that its run packed)",
        )
    return parser


def add_delta_commands(commands):
    """Add the commands that write deltas, with their options."""
    for run, group in ((bitdelta, 128), (deltaquant, -1)):
        command = add_command(commands, run, "base", "tuned", "out")
        command.add_argument(
            "--score", action="store_true", help="print bits per byte of BASE, TUNED and the result"
        )
        command.add_argument(
            "--data",
            metavar="DATA",
            type=filled,
            help="folder of the text for --score and distillation (default: that of TUNED's run)",
        )
        command.add_argument(
            "--group",
            type=number_from(-1),
            default=group,
            metavar="N",
            help=f"so many neighbouring weights share a scale; -1: a row, 0: the matrix (default: {group})",
        )
    command = commands.choices["deltaquant"]
    command.add_argument(
        "--bits", type=int, choices=range(1, 9), default=4, help="bits of a code (default: 4)"
    )
    command.set_defaults(scale_bits=16, distill_steps=0)
    command = commands.choices["bitdelta"]
    command.set_defaults(bits=1)
    command.add_argument(
        "--scale-bits", type=int, choices=(16, 32), default=32, help="bits of a scale (default: 32)"
    )
    command.add_argument(
        "--distill-steps",
        type=number_from(0),
        default=100,
        metavar="N",
        help="steps that fit the scales to TUNED's logits; 0: a scale is the mean of |delta| "
        "(default: 100)",
    )
    command.add_argument(
        "--distill-lr",
        type=number_from(0, float),
        default=DISTILL_LR,
        metavar="RATE",
        help=f"learning rate of these steps, which falls to 0 by a cosine (default: {DISTILL_LR})",
    )


def main():
    """Run one command. Return its exit code: 1 if `verify` says no, 2 for a mistake."""
    args = make_parser().parse_args()
    check_environment()
    if "out" in args:
        args.out = Path(args.out)
        if args.out.exists():
            raise UserError(f"OUT {str(args.out)!r}: exists already")
        if not args.out.absolute().parent.is_dir():
            raise UserError(f"OUT {str(args.out)!r}: must be in a folder that exists")
    try:
        args.run(args)
    except ArtifactError as error:
        if args.run is not verify:
            raise
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
