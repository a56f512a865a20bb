"""Pretrain a GDN-hybrid language model against a clock and a byte budget.

    CONFIG=configs/cpu.env python train_gpt.py              # one CPU process, about 3 minutes
    torchrun --standalone --nproc_per_node=8 train_gpt.py configs/golf_8gpu.env
    RESUME=<RUN_ID> python train_gpt.py                     # continues from its newest checkpoint
    python train_gpt.py --help                              # lists all settings

A run trains the network, packs it into one artifact file and scores the network that is rebuilt
from that file. It writes runs/<RUN_ID>/: log.txt, metrics.jsonl (a line for each step), checkpoints,
final/ (the trained weights), model.upar (the artifact) and result.json. Every setting below is an
environment variable or an argument, NAME=value.

The file is in this order: Settings; the model, its shape by settings, kernels; optimizers and
schedule; quantization and artifact; data and scores; what surrounds a run (settings parser, ranks,
errors, checkpoints, log); at the end, without fences, the choice of network and device, a training
step, what a run does at its end, and `main` with the training loop.

Sections between `# === shared:` fences are in other scripts too, byte for byte: after a change
`python tools/sync.py train_gpt.py` copies them. Outside the repository just edit them.

Where to change what:
    another loss, a term of it            GPT.forward
    another layer, or a new one           GatedDeltaNet, Attention, MLP, Block, make_mixer, layer_words
    a new weight                          tensor_class; its name decides, see below
    another norm                          Norm, NORMS; of queries, keys and GDN's outputs: rms_norm
    another position                      rotation, rotate
    another optimizer, other rates        OPTIMIZERS, make_optimizers, OPTIMIZER_PRESETS
    another schedule, another phase       Plan.rates, PHASE_STARTS
    which windows train, in which order   split_windows, Batches.read_rows
    what a step logs                      main; the dict `metrics`
    a value of the network in the log     forward_backward; it travels in `extra` in main
    what validation measures              Scorer, score_artifact
    how weights are rounded and packed    quantize, fit_artifact
    a new setting of the model            Settings, GPTConfig; a field of one name in both, layers read it
    another new setting                   Settings; if a resumed run must keep it, `identity` in main

What a change should know:
- Validation calls GPT.forward, too. A term of the loss that is for training alone goes behind
  `if torch.is_grad_enabled()`, or it becomes part of val_bpb. The train_loss of the log has the term.
- In training no target is -1. In scores some are: a term that they have, too, must be 0 there.
- The last matrix of an MLP and an untied head begin at zero, so a change of the network may show from
  the third step on only.
- A change that adds or drops no weight needs a field of GPTConfig that switches it. Without one the
  other scripts would load its artifact as the old network, without an error.
- The name of a weight decides its optimizer and how it is packed (tensor_class). w_* is a matrix
  (MATRIX_LR, MATRIX_BITS). *embed*, head and ab are embeddings. All others, and tensors with fewer
  than 16 rows or columns, are controls: AdamW at SCALAR_LR, float16 or float32 in the artifact. The
  optimizer takes ab for a control, and head has HEAD_LR (PARAMETER_CLASSES).
- In the log's header a setting that differs from its default has a `*`.
- In the repository a new setting also enters OUR_SETTINGS, so that the other scripts refuse it. Your
  own copy needs no entry. A run that began without the setting cannot be resumed.
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

import collections
import contextlib
import ctypes
import difflib
import faulthandler
import functools
import hashlib
import inspect
import io
import itertools
import json
import math
import os
import re
import resource
import shlex
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Literal, NewType, get_args

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import zstandard
from torch import Tensor, nn
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
    compile: Literal[False, True, "reduce-overhead", "max-autotune"] = True
    # kernels on CUDA; auto: those that pass a check, fla: an error if fla's do not pass
    kernels: Literal["auto", "plain", "fla"] = "auto"
    activation_checkpointing: bool = False  # recompute layers in the backward pass: less memory
    memory_snapshot: bool = False  # CUDA: write memory_snapshot.pickle, for pytorch.org/memory_viz
    # data
    # folder of shards and manifest.json, or a mixture a:0.7,b:0.3
    data_path: Paths = "data/embedded"
    tokenizer_path: Paths = ""  # .model or .tiktoken file, or "bytes"; empty: the data's
    vocab_size: int = 0  # checked against the tokenizer; 0: not checked
    # clock
    iterations: int = 0  # steps, in RL of several updates each; 0: no limit in steps
    max_wallclock_seconds: float = 600.0  # training clock; 0: no limit in time
    reserve_seconds: float = 12.0  # end of the clock kept to choose weights, quantize and pack
    # batch
    train_batch_tokens: int = bounded(524288, 2)  # per optimizer step, over all ranks
    train_seq_len: int = bounded(2048, 2)  # tokens in a window, training and evaluation
    token_noise: float = bounded(0.0, 0.0, 0.9)  # share of a step's input tokens that are random
    micro_batch_tokens: int = 0  # per forward and rank; 0: fitted to memory. Same global batch
    # checkpoints
    save_every: int = 500  # steps between checkpoints, outside the clock; 0: only at the end
    # log and validation
    tracker: Literal["none", "tensorboard", "wandb"] = "none"  # where metrics go, beside the log
    val_loss_every: int = 1000  # steps between validations, outside the clock; 0: only at the end
    target_val_loss: float = 0.0  # the run ends at the first validation at or under it; 0: none
    eval_stride: int = 512  # stride of the sliding-window score; 0: leave that score out
    eval_stateful: bool = False  # also score each document in one forward of its length; slow
    # model
    # a run, a checkpoint or an artifact; empty: a new network, in train_gpt.py and train_sft.py
    init_from: Paths = ""
    # see ARCH_PRESETS
    arch_mode: Literal["D", "gdn", "hybrid", "baseline", "llama", "qwen2", "qwen3", "qwen3_5"] = "D"
    layer_pattern: str = "g g g g g s1 g g g g g s1"  # g GDN, s sliding window, a full attention
    num_layers: int = 0  # repeat or cut the pattern to this; 0: as long as it is
    model_dim: int = bounded(512, 16)  # width of the residual stream
    num_heads: int = bounded(8, 1)  # query heads of attention, and heads of GDN
    num_kv_heads: int = 0  # key and value heads of attention; 0: half of NUM_HEADS
    gdn_light: bool = False  # GDN with keys of half the size and no output gate
    # kind of MLP; bio_soft is the bio-MLP with sparse events
    mlp: Literal["relu2", "leaky_relu2", "gelu", "swiglu", "bio", "bio_soft"] = "relu2"
    mlp_mult: float = bounded(3.0, 0.25, 16.0)  # hidden width of the MLP divided by model_dim
    norm: str = "rms"  # rms, rms_weight, rms_offset or layer; or one such word per layer
    positions: Literal["rope", "learned", "none"] = "rope"  # how attention knows positions
    rope_dims: int = 0  # dimensions of a head that rotate; 0: all
    attn_window: int = bounded(512, 1)  # keys that a query of a sliding window sees
    qk_gain_init: float = 4.0  # initial gain of normed queries; 0: no norm of queries and keys
    bigram_vocab_size: int = 0  # rows of hashed embeddings, of pairs and of triples; 0: none
    tie_embeddings: bool = True  # the embedding is the output head
    # Optimizer and learning rates. OPTIMIZER_PRESETS has the defaults of the rates by optimizer. Under
    # muon RowRMSprop trains the hashed tables, at TABLE_LR_SHARE of TIED_EMBED_LR.

    # muon updates the matrices alone, the others embeddings and head, too; AdamW updates the rest
    optimizer: Literal["muon", "lion", "adamw", "adafactor", "adamw8bit"] = "muon"
    matrix_lr: float = 0.02  # learning rate of the layers' matrices
    tied_embed_lr: float = 0.03  # learning rate of embeddings, and of the head if it is tied
    head_lr: float = 0.008  # learning rate of an output head that is not tied
    scalar_lr: float = 0.02  # learning rate of gains, mixes, convolutions, GDN's decay and step
    muon_wd: float = 0.04  # decoupled weight decay of matrices, under every optimizer
    grad_clip_norm: float = 0.0  # largest global gradient norm; 0: no clipping
    # schedule, in shares of the run
    # shape of the warmdown, see Plan.rates; cosine falls over the whole run, constant not at all
    lr_schedule: Literal["linear", "flat_cosine", "wsd", "cosine", "constant"] = "linear"
    warmup_frac: float = bounded(0.01, 0.0, 1.0)  # share in which the learning rate rises
    warmdown_frac: float = bounded(0.5, 0.0, 1.0)  # last share, in which it falls to the floor
    warmdown_iters: int = 0  # the warmdown in steps of ITERATIONS; 0: use the share
    lr_floor: float = bounded(0.0, 0.0, 1.0)  # last multiplier of the learning rate
    ema: bool = True  # exponential moving average of the weights, a candidate at the end
    swa: bool = True  # plain average of the last weights, a candidate at the end
    qat: bool = True  # late quantization-aware training of all that the artifact quantizes
    # artifact
    # code 2**(bits-1) - 1 stands for 8 root mean squares; 6 bits take some 4 a weight when coded
    matrix_bits: int = bounded(6, 2, 8)
    artifact_bytes_max: int = 16000000  # script + config + artifact, in bytes; 0: no limit

    def __post_init__(self):
        check_settings(self)
        if self.target_val_loss and not self.val_loss_every:
            raise UserError(
                f"TARGET_VAL_LOSS={self.target_val_loss}: VAL_LOSS_EVERY must be above 0, or no "
                "validation sees it"
            )
        if self.eval_stateful and self.positions == "learned":
            raise UserError(
                "EVAL_STATEFUL=1: must be 0, because learned positions end at TRAIN_SEQ_LEN"
            )


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


# ------------------------------------------------------------------------------------------- shape
# What ARCH_MODE stands for. load_settings takes the values of settings from here, where the user
# gave no others; model_config takes the fields of GPTConfig that are no settings.
LLAMA = dict(
    layer_pattern="a",
    num_layers=12,
    mlp="swiglu",
    mlp_mult=2.75,
    norm="rms_weight",
    qk_gain_init=0.0,
    residual_mix=False,
    logit_softcap=0.0,
    embed_init_std=0.02,
)
ARCH_PRESETS = {
    # The defaults: GDN, and two layers of sliding-window attention with the same weights.
    "D": dict(layer_pattern=Settings.layer_pattern, num_layers=0),
    "gdn": dict(layer_pattern="g", num_layers=10),
    "hybrid": dict(layer_pattern="g g a a a a a a a a g"),  # of openai/parameter-golf PR 1895
    "baseline": dict(  # the first script of Parameter Golf
        layer_pattern="a", num_layers=9, mlp_mult=2.0, qk_gain_init=1.5, unet_skips=True
    ),
    # Layouts that other software loads, see convert.py export.
    "llama": LLAMA,
    "qwen2": LLAMA | dict(qkv_bias=True),
    "qwen3": LLAMA | dict(qk_norm=True),
    "qwen3_5": LLAMA
    | dict(layer_pattern="g g g a", norm="rms_offset", qk_norm=True, attn_gate=True),
}


def layer_words(settings):
    """Return the words of all layers and those of their norms. Raises UserError.

    LAYER_PATTERN is one word per layer, repeated or cut to NUM_LAYERS: g is Gated DeltaNet, s
    sliding-window attention, a full attention. Layers whose words have the same number share the
    mixer's weights (s1 ... s1); in capitals they share all of the layer's weights (A1 A2 A1 A2: depth
    recurrence). NORM is repeated in the same way: a shared layer has the norms of its first place,
    and the last word is also the norm before the head.
    """
    words = settings.layer_pattern.split()
    norms = settings.norm.split()
    if not words or not all(re.fullmatch("[gsa][0-9]*|[GSA][0-9]+", word) for word in words):
        raise UserError(
            f"LAYER_PATTERN={settings.layer_pattern!r}: each word must be g, s or a, maybe with a "
            "number; capitals need one"
        )
    if not norms or set(norms) - set(NORMS):
        raise UserError(f"NORM={settings.norm!r}: must be one or more of {', '.join(NORMS)}")
    num_layers = settings.num_layers or len(words)
    layers = " ".join((words * num_layers)[:num_layers])
    return layers, " ".join((norms * num_layers)[:num_layers])


def asked_shape(settings):
    """Return the fields of GPTConfig that `settings` ask for: name -> value. Raises UserError.

    A value is taken from `settings`, else from ARCH_PRESETS.
    """
    given = {**ARCH_PRESETS[settings.arch_mode], **vars(settings)}
    given["num_kv_heads"] = settings.num_kv_heads or (settings.num_heads + 1) // 2
    given["layers"], given["norms"] = layer_words(settings)
    return {name: given[name] for name in given.keys() & GPTConfig.__dataclass_fields__}


def model_config(settings, vocab_size, bos_id, **overrides):
    """Return the GPTConfig of the network that `settings` ask for, with `overrides` of its fields.

    Raises UserError where the numbers do not fit together.
    """
    tokens = dict(vocab_size=vocab_size, bos_id=bos_id)
    config = GPTConfig(**{**asked_shape(settings), **tokens, **overrides})

    dim = config.model_dim
    heads = config.num_heads
    if dim % (2 * heads):
        raise UserError(f"MODEL_DIM={dim}: must be a multiple of 2 x NUM_HEADS = {2 * heads}")
    if heads % config.num_kv_heads:
        raise UserError(
            f"NUM_HEADS={heads}: must be a multiple of NUM_KV_HEADS = {config.num_kv_heads}"
        )
    if config.rope_dims % 2 or config.rope_dims > dim // heads:
        raise UserError(
            f"ROPE_DIMS={config.rope_dims}: must be even, at most MODEL_DIM / NUM_HEADS = "
            f"{dim // heads}"
        )
    return config


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


# --------------------------------------------------------------------------------------- optimizers
# Learning rates of matrices, embeddings and an untied head, by optimizer. They were the best of a few
# in 60 to 300 steps of a small network on web text (docs/lab/2026-11.md). Values that are given
# override them. A wide head needs less: at 256 wide and with tables under AdamW 0.004 was better than
# 0.008; at 128 wide 0.008 is. torch.optim.Adafactor takes min(rate, 1 / sqrt(step)): its 0.1 counts
# for the first 100 steps, and in the warmdown only below 1 / sqrt(step).
OPTIMIZER_PRESETS = {
    "muon": {"matrix_lr": 0.02, "tied_embed_lr": 0.03, "head_lr": 0.008},
    "lion": {"matrix_lr": 0.001, "tied_embed_lr": 0.004, "head_lr": 0.002},
    "adamw": {"matrix_lr": 0.003, "tied_embed_lr": 0.01, "head_lr": 0.004},
    "adafactor": {"matrix_lr": 0.1, "tied_embed_lr": 0.4, "head_lr": 0.1},
    "adamw8bit": {"matrix_lr": 0.003, "tied_embed_lr": 0.02, "head_lr": 0.004},
}
MUON_MOMENTUM_START = 0.85  # early gradients change quickly, and a long memory of them misleads
MUON_WARMUP_FRAC = 0.05  # share of the run until it is MUON_MOMENTUM
# Rate of RowRMSprop over TIED_EMBED_LR. At 1 the tables learned a text by heart that is read twice:
# 0.035 bits per byte more than at 0.3 (docs/lab/2026-11.md, 2026-11-27).
TABLE_LR_SHARE = 0.3
# Least share of that rate, in the warm-up and in the warmdown: otherwise a rare row that is read near
# the end would hardly learn.
TABLE_LR_FLOOR = 0.6


class RowRMSprop(torch.optim.Optimizer):
    """RMSprop with one mean square for each row, without momentum or decay: for rarely read rows.

    A row that is read once takes a step of 1 / sqrt(1 - beta2) times the rate, and waits for its next
    reading. AdamW, with moments of each weight, learned less (docs/lab/2026-11.md, 2026-11-27). Of a
    sparse gradient, which must be coalesced, only the rows that it has are read and written. A rate
    above 0 is `lr_floor` at least.
    """

    def __init__(self, groups):
        super().__init__(groups, dict(lr_floor=0.0))

    @torch.no_grad()
    def step(self):
        """Update state and weights."""
        _, beta2 = ADAM_BETAS
        for group in self.param_groups:
            lr = torch.as_tensor(group["lr"])
            lr = lr.clamp(min=group["lr_floor"]) * (lr > 0)  # in a masked step it stays 0
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["updates"] = param.new_zeros(())
                    state["mean_square"] = param.new_zeros(len(param), 1)
                rows = slice(None)
                grad = param.grad
                if grad.is_sparse:
                    rows = grad.indices()[0]
                    grad = grad.values()
                norm = torch.linalg.vector_norm(grad, dim=1, keepdim=True)
                mean_square = state["mean_square"].mul_(beta2)
                mean_square[rows] += (1 - beta2) / param.size(1) * norm.square()
                state["updates"] += 1
                unbiased = mean_square[rows] / (1 - beta2 ** state["updates"])
                param[rows] -= grad * (lr / (unbiased.sqrt() + ADAM_EPS))


def make_optimizers(network, settings, runtime):
    """Return the optimizers of a network."""
    params = dict(network.named_parameters())
    hashed = params.pop("ngram_embed", None)
    classes = parameters_by_class(params)
    matrices = dict(params=classes["matrix"], lr=settings.matrix_lr, weight_decay=settings.muon_wd)
    embeddings = dict(
        params=classes["embedding"],  # a tied one is the output head, too
        lr=settings.tied_embed_lr,
        weight_decay=0.0,
    )
    tables = {**embeddings, "params": [] if hashed is None else [hashed]}
    head = dict(params=classes["head"], lr=settings.head_lr, weight_decay=0.0)
    # Gains, mixes, and GDN's decay and step size: AdamW trains them under every OPTIMIZER.
    controls = dict(params=classes["control"], lr=settings.scalar_lr, weight_decay=0.0)
    adamw = OPTIMIZERS["adamw"]
    if settings.optimizer == "muon":  # orthogonalizes matrices, and nothing else
        muon = Muon([matrices], runtime, network.dtype)
        tables["lr"] *= TABLE_LR_SHARE
        tables["lr_floor"] = TABLE_LR_FLOOR * tables["lr"]
        return [muon, adamw([embeddings, head, controls]), RowRMSprop([tables])]
    return [OPTIMIZERS[settings.optimizer]([matrices, embeddings, tables, head]), adamw([controls])]


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


# === shared: export ===
FIT_ATTEMPTS = 12  # coarse steps save less than is computed, so the limit is approached


@dataclass
class Exporter(Stateful):
    """One number, which checkpoints keep: it is set when QAT begins, and packing starts from it."""

    STATE = ("widen",)

    widen: float = 1.0  # factor on all steps, see quant_table


def fit_artifact(network, widen, limit, header, run, pack=True):
    """Widen the quantization steps until the artifact of a network has at most `limit` bytes; return
    the factor on all steps, and the artifact (b"" without `pack`: its length is only estimated).

    The first try has the factor `widen`. If the artifact exceeds the limit, all steps are scaled up
    by the same factor, and it is packed again. If no attempt fits, the last artifact is returned,
    and the factor that the next attempt would have had. header: see pack_artifact.
    """
    tensors = network.state_dict()
    data = b""
    for _ in range(FIT_ATTEMPTS):
        coded = quantize_all(tensors, quant_table(run.settings.matrix_bits, widen))
        if pack:
            # Rank 0's artifact is the one that is written; others may differ in a last digit.
            data = run.runtime.agree(pack_artifact(tensors, coded, **header))
            size = len(data)
        else:
            size = run.runtime.agree(estimate_bytes(tensors, coded, header))
        run.log(f"sizes: {size} bytes, at most {limit:.0f}, quantization steps times {widen:.4g}")
        if size <= limit:
            break
        # Steps twice as wide save one bit per weight. The aim is a little below the limit.
        weights = sum(part.codes.numel() for part in coded.values())
        excess_bits = 8 * (size - 0.998 * limit) / weights  # per weight
        widen = min(256.0, widen * 2**excess_bits)
    return widen, data


def estimate_bytes(tensors, coded, header):
    """Return the length of an artifact to about 0.2%, by the entropy of its codes.

    It takes a fraction of the time that coding takes, and the clock of training runs.
    """
    arrays, pairs, counts = model_codes(coded)
    controls = {name: w for name, w in tensors.items() if name not in coded}
    size = len(pack_artifact(controls, {}, **header)) + entropy_bytes(counts)
    for name in arrays.keys() - pairs.keys():
        size += len(ARTIFACT_ZSTD.compress(arrays[name].tobytes()))
    return round(size) + 26 * len(coded)  # of records in the header, and of the ends of streams


# === end: export ===


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


# === shared: documents ===
# The file beside the shards with the bytes of each token: uint32 (2, V), see token_bytes.
TOKEN_BYTES = "token_bytes.bin"


def token_bytes(table, prev, ids):
    """Return the bytes of each token of `ids` given the token before it, int64, same shape.

    table: (2, V), the bytes that a token decodes to. table[0]: after ordinary text. table[1]: after a
    token without bytes such as BOS, where SentencePiece's leading space is not part of the text.
    Parameter Golf counts in the same way (build_sentencepiece_luts, eval_val).
    """
    is_boundary = table[0, prev] == 0
    return table[is_boundary.astype(int), ids]


def document_hashes(stream, bos_id):
    """Yield a hash of the tokens of every document, in order.

    Tokens before the first BOS belong to no document: a published shard may begin inside one.
    """
    begins = []
    for shard, start in zip(stream.shards, stream.starts, strict=False):
        begins.extend(start + np.flatnonzero(shard == bos_id))
    for begin, end in itertools.pairwise([*begins, len(stream)]):
        yield hashlib.sha256(stream.read(begin, end - begin)).digest()


# === end: documents ===


# === shared: batches ===
# Training tokens on which raw, EMA and SWA weights are compared; at most a twentieth of all.
HOLDOUT_TOKENS = 131072


def read_checked(path, sha256, hint):
    """Return the bytes of a file; the tokenizer `bytes` has none. Raises UserError, with a hint, if
    they are not those of the SHA-256.
    """
    path = Path(path)
    content = b"underpar bytes 264" if path.name == "bytes" else b""
    if path.is_file():
        content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != sha256:
        raise UserError(f"{path}: missing, or its SHA-256 is not the one of the data; {hint}")
    return content


class DataTokenizer:
    """What training knows of the tokenizer of its data: its file, and the bytes of its tokens."""

    def __init__(self, folder, facts, path):
        """facts: of the folder's manifest. path: where its file is; "" for the folder. Raises
        UserError.
        """
        self.file = facts["file"]  # its name; "bytes" has none
        self.sha256 = facts["sha256"]
        self.bos_id = facts["bos_id"]
        # sample.py needs the file beside an artifact.
        hint = f"must be the tokenizer of {folder}"
        self.content = read_checked(path or Path(folder, self.file), self.sha256, hint)
        hint = f"for shards of an older version: python data/prepare.py --token-bytes {folder}"
        table = read_checked(Path(folder, TOKEN_BYTES), facts.get("token_bytes_sha256"), hint)
        # (2, V), see token_bytes
        self.byte_table = np.frombuffer(table, "<u4").astype(np.int64).reshape(2, -1)
        self.vocab_size = self.byte_table.shape[1]

    def count_bytes(self, tokens):
        """Return the bytes of all tokens (N,) but the first."""
        return int(token_bytes(self.byte_table, tokens[:-1], tokens[1:]).sum())


@dataclass
class EvalText:
    """Tokens that models are scored on, and the bytes by which their score divides."""

    tokens: np.ndarray  # (N,) int64; the first is context and has no score
    bytes: int


@dataclass
class Dataset:
    """What DATA_PATH holds, checked; lists have one entry per folder."""

    tokenizer: DataTokenizer
    manifests: list
    manifest_sha256: str
    yardsticks: dict  # scores of count models and compressors; {} for a mixture
    shares: list  # of the training windows
    streams: list  # TokenStream of training
    windows: list  # the numbers of the windows of each stream that train
    held_out: EvalText  # windows of all streams that do not train, to choose weights on
    val: EvalText


def parse_mixture(data_path):
    """Return the folders of DATA_PATH, one folder or `a:0.7,b:0.3`, and their shares."""
    text = data_path if ":" in data_path else f"{data_path}:1"
    folders = []
    weights = []
    for part in text.split(","):
        folder, _, weight = part.strip().rpartition(":")
        # A weight has a digit above 0.
        if not folder or not re.fullmatch(r"(?=.*[1-9])\d{0,9}\.?\d{0,99}", weight):
            raise UserError(
                f"DATA_PATH={data_path!r}: must be a folder or FOLDER:WEIGHT,… such as a:0.7,b:0.3"
            )
        folders.append(folder)
        weights.append(float(weight))
    return folders, [weight / sum(weights) for weight in weights]


@functools.lru_cache(64)  # a step reads one or two epochs of each folder
def shuffle(count, *seed):
    """Return a pseudo-random order of range(count), (count,) int64, which the seed alone decides.

    Any rank and any resumed run has the same. Ten million windows take 80 MB and a second.
    """
    return np.random.default_rng(seed).permutation(count)


def split_windows(stream, share, settings):
    """Return the numbers of a stream's windows that train, and of those that are held out.

    Without EMA and SWA there is nothing to choose, and nothing is held out; with them at most a
    twentieth, from all over the stream: its end may be of one source. The first token of a
    held-out window may be the last target of a training window. They are scored side by side, so
    the last target of each is the first token of an unrelated one, for all weights alike.

    A data filter goes below, over `train`. The inputs of window `number` are
    stream.read(number * seq_len, seq_len). A choice by them and by settings alone is the same on
    every rank, and in a resumed run if `identity` in main has these settings; a number written here
    is not compared. The order of all windows depends on how many are left, so a filter changes every
    batch, not only those that had what it drops. It takes a call for each window at every start.
    Raise UserError if it leaves no window of a folder.
    """
    seq_len = settings.train_seq_len
    windows = shuffle(len(stream) // seq_len, 0)
    count = 0
    if settings.ema or settings.swa:
        wanted = math.ceil(share * HOLDOUT_TOKENS / seq_len)
        count = min(wanted, len(windows) // 20)
    train = windows[count:]
    return train, windows[:count]


def check_mixture(pairs, bos_id):
    """Raise UserError if a validation document of one folder is in the training of another.

    pairs: streams of training and validation. A manifest counts those of its own folder only.
    """
    write_stream(sys.stderr, "DATA_PATH: reading all documents, for validation in training\n")
    val_hashes = [set(document_hashes(val, bos_id)) for _, val in pairs]
    for i, (train, _) in enumerate(pairs):
        others = set().union(*val_hashes[:i], *val_hashes[i + 1 :])
        if not others.isdisjoint(document_hashes(train, bos_id)):
            raise UserError(f"{train.paths[0]}: a document is in another folder's validation")


def validation_text(streams, manifests, tokenizer):
    """Return the EvalText of all folders' validation, checked by their manifests. Raises UserError."""
    tokens = np.concatenate([stream.read(0, len(stream)) for stream in streams])
    if tokens[0] != tokenizer.bos_id:
        raise UserError(f"validation: begins with token {tokens[0]}, manifest.json has another BOS")
    decoded = tokenizer.count_bytes(tokens)
    expected = sum(manifest["val"]["decoded_bytes"] for manifest in manifests)
    if decoded != expected or not decoded:
        raise UserError(
            f"validation: {decoded} bytes, manifest.json says {expected}; must be equal, above 0"
        )
    return EvalText(tokens, sum(counted_bytes(manifest["val"]) for manifest in manifests))


def open_data(settings, rank=0):
    """Return the Dataset of DATA_PATH, checked against its manifests. Raises UserError.

    rank: of this process; rank 0 checks for all what takes long.
    """
    folders, shares = parse_mixture(settings.data_path)
    manifests = [load_manifest(folder) for folder in folders]
    tokenizer = DataTokenizer(folders[0], manifests[0]["tokenizer"], settings.tokenizer_path)
    if settings.vocab_size not in (0, tokenizer.vocab_size):
        raise UserError(
            f"VOCAB_SIZE={settings.vocab_size}: must be 0 or the tokenizer's {tokenizer.vocab_size}"
        )
    if any(manifest["tokenizer"]["sha256"] != tokenizer.sha256 for manifest in manifests):
        raise UserError(
            f"DATA_PATH={settings.data_path!r}: shards of several tokenizers; prepare all folders with "
            f"one: data/prepare.py --tokenizer {folders[0]}/{tokenizer.file}"
        )
    pairs = list(map(check_dataset, folders, manifests))
    # A resumed run has the manifests of its first start, or check_identity refuses it.
    if len(pairs) > 1 and rank == 0 and not settings.resume:
        check_mixture(pairs, tokenizer.bos_id)
    streams, val_streams = zip(*pairs, strict=True)
    val = validation_text(val_streams, manifests, tokenizer)

    seq_len = settings.train_seq_len
    shortest = min(streams, key=len)
    if seq_len > len(shortest):
        raise UserError(
            f"TRAIN_SEQ_LEN={seq_len}: must be at most {len(shortest)}, the training tokens of "
            f"{Path(shortest.paths[0]).parent}"
        )
    twentieth = max(map(len, streams)) // 20
    if (settings.ema or settings.swa) and seq_len > twentieth:
        raise UserError(
            f"TRAIN_SEQ_LEN={seq_len}: no such window is in a twentieth of the training tokens, to "
            f"choose among raw, EMA and SWA weights on; must be at most {twentieth}, or EMA=0 SWA=0"
        )
    windows = []
    held_out = []
    for stream, share in zip(streams, shares, strict=True):
        train, others = split_windows(stream, share, settings)
        windows.append(train)
        held_out += [stream.read(number * seq_len, seq_len) for number in others]
    held_out = np.array(held_out, np.int64).ravel()
    decoded = sum(manifest["val"]["decoded_bytes"] for manifest in manifests)
    counted_share = val.bytes / decoded  # see counted_bytes; mostly 1
    held_out_bytes = round(tokenizer.count_bytes(held_out) * counted_share)
    yardsticks = {}
    if len(folders) == 1:
        yardsticks = manifests[0].get("yardsticks") or {}
    return Dataset(
        tokenizer=tokenizer,
        manifests=manifests,
        manifest_sha256=" + ".join(sha256_file(f"{folder}/manifest.json") for folder in folders),
        yardsticks=yardsticks,
        shares=shares,
        streams=streams,
        windows=windows,
        held_out=EvalText(held_out, held_out_bytes),
        val=val,
    )


def split_rows(first, last, shares):
    """Yield for each folder the range of its training rows among all rows `first` to `last`.

    Of the first r rows the first folder gets round(share * r), the second its part of the rows that
    are left, rounded, and so on. So the counts add up, never shrink from row to row, and follow the
    shares exactly.
    """
    share_left = 1.0
    for share in shares:
        begin = round(first * share / share_left)
        end = round(last * share / share_left)
        yield range(begin, end)
        first -= begin
        last -= end
        share_left -= share


class Batches:
    """The training streams as micro-batches.

    A step reads the same windows whatever the ranks and the micro-batches, resumed or not.
    """

    def __init__(self, data, settings, runtime):
        self.data = data
        self.settings = settings
        self.runtime = runtime
        unit = settings.train_seq_len * runtime.world_size
        if settings.train_batch_tokens % unit:
            raise UserError(
                f"TRAIN_BATCH_TOKENS={settings.train_batch_tokens}: must be a multiple of "
                f"TRAIN_SEQ_LEN x ranks = {unit}"
            )
        self.rank_batch_size = settings.train_batch_tokens // unit  # windows per step
        # Enough to keep a GPU busy; little enough for a CPU's caches.
        default = 131072 if runtime.device.type == "cuda" else 4096
        micro_batch_tokens = settings.micro_batch_tokens or default
        self.limit_micro_batch(micro_batch_tokens // settings.train_seq_len or 1)

    def limit_micro_batch(self, most):
        """Take the largest micro-batch of at most `most` windows that divides this rank's batch."""
        self.micro_batch_size = min(most, self.rank_batch_size)
        while self.rank_batch_size % self.micro_batch_size:
            self.micro_batch_size -= 1

    def read_rows(self, step):
        """Return this rank's windows of a step, with their last targets, (rows, seq_len + 1).

        Every epoch of a stream has a pseudo-random order. If windows came in turn, small batches
        would see the same few documents for dozens of steps: on web text, with 16 windows of 256 a
        step, that cost 0.091 bits per byte.
        """
        seq_len = self.settings.train_seq_len
        first = (step * self.runtime.world_size + self.runtime.rank) * self.rank_batch_size
        ranges = split_rows(first, first + self.rank_batch_size, self.data.shares)
        windows = []
        for stream, numbers, rows in zip(self.data.streams, self.data.windows, ranges, strict=True):
            for row in rows:
                epoch, index = divmod(row, len(numbers))
                number = numbers[shuffle(len(numbers), self.settings.seed, epoch)[index]]
                windows.append(stream.read(number * seq_len, seq_len + 1))
        return torch.from_numpy(np.stack(windows))

    def micro_batches(self, step):
        """Yield ids and targets of this rank's share of a step, each (micro_batch_size, seq_len), and
        where a kernel takes them, document_borders.
        """
        device = self.runtime.device
        windows = self.read_rows(step)  # a GPU still has the step before queued meanwhile
        if device.type == "cuda":
            windows = windows.pin_memory()  # a copy from other memory would wait for the GPU
        for part in windows.split(self.micro_batch_size):
            borders = document_borders(part[:, :-1], self.data.tokenizer.bos_id, device)
            part = part.to(device, non_blocking=True)
            # Contiguous, as in evaluation: both run the same compiled graph.
            yield part[:, :-1].contiguous(), part[:, 1:].contiguous(), *borders


# === end: batches ===


# === shared: evaluation ===
@dataclass
class Score:
    """A model's score on tokens: `loss` in nats per token, `bpb` in bits per byte."""

    nats: float
    tokens: int
    bytes: int

    def __post_init__(self):
        self.loss = self.nats / self.tokens
        self.bpb = self.nats / math.log(2) / self.bytes

    def result(self):
        """Return the score's keys in result.json."""
        result = {f"val_{name}": value for name, value in vars(self).items()}
        return {**result, "bytes_per_token": self.bytes / self.tokens}

    def __str__(self):
        return (
            f"loss:{self.loss:.4f} bpb:{self.bpb:.4f} nats:{self.nats:.1f} tokens:{self.tokens} "
            f"bytes:{self.bytes}"
        )


@dataclass
class Scorer:
    """Scores models on an EvalText; each of its tokens but the first counts once."""

    bos_id: int
    runtime: "Runtime"  # its ranks share out the windows
    seq_len: int  # tokens in a window
    rows: int  # windows in a forward
    log: Callable = None  # a Log, which tells how far scoring is

    def score(self, model, text, stride=0):
        """Return the Score of model(ids, targets) -> losses (B, T), in windows of seq_len tokens.

        Without a stride, windows stand side by side. With one, a window ends `stride` tokens after
        the one before it and scores these tokens only, so that they have a longer context.
        """
        last = len(text.tokens) - 1
        end = np.append(np.arange(self.seq_len, last, stride or self.seq_len), last)
        first = np.append(0, end[:-1])
        begin = np.maximum(0, end - self.seq_len) if stride else first
        spans = np.stack([begin, first, end], axis=1)
        return self.score_spans(model, text, spans, self.rows, self.seq_len)

    @torch.no_grad()
    def score_spans(self, model, text, spans, rows, length):
        """Return the Score of spans (S, 3): a row sees tokens begin..end and scores first..end.

        A forward has `rows` rows of `length` tokens; 0: of as many as the longest of them has.
        """
        tokens = text.tokens
        device = self.runtime.device
        sums = torch.zeros(2, dtype=torch.float64, device=device)  # nats, tokens
        spans = spans[self.runtime.rank :: self.runtime.world_size]
        # Empty rows fill the last forward: windows have one shape, for one compiled graph.
        padded = np.pad(spans, ((0, -len(spans) % rows), (0, 0)))
        for at in range(0, len(padded), rows):
            if self.log and time.monotonic() - self.log.last_line >= LOG_SECONDS:
                self.log(f"scored {at:,} of {len(spans):,} windows")
            begin, first, end = np.hsplit(padded[at : at + rows], 3)  # (rows, 1) each
            positions = begin + np.arange(length or (end - begin).max())
            is_scored = (first <= positions) & (positions < end)
            positions = np.minimum(positions, len(tokens) - 2)  # what fills a short row
            ids = torch.from_numpy(tokens[positions])
            # The model's loss of the target -1 is 0.
            targets = torch.from_numpy(np.where(is_scored, tokens[positions + 1], -1)).to(device)
            borders = document_borders(ids, self.bos_id, device)
            losses = model(ids.to(device), targets, *borders)
            sums += torch.stack([losses.double().sum(), (targets >= 0).sum()])
        nats, count = self.runtime.sum(sums).tolist()
        assert count == len(tokens) - 1, f"scored {count:.0f} of {len(tokens) - 1} predictions"
        return Score(nats, int(count), text.bytes)


# === end: evaluation ===


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


# ------------------------------------------------------------------------------------------ network
# A start that was imported keeps what it knows at a low rate. Packing takes all the bytes it needs:
# 8 bits lost less than 0.01 bits per byte of SmolLM2 (docs/lab.md).
IMPORTED_DEFAULTS = {
    "optimizer": "adamw",
    "matrix_lr": 1e-5,
    "tied_embed_lr": 1e-5,
    "head_lr": 1e-5,
    "scalar_lr": 1e-5,
    "muon_wd": 0.0,
    "ema": False,
    "swa": False,
    "qat": False,
    "matrix_bits": 8,
    "artifact_bytes_max": 0,
}


def shape_settings(given):
    """Return what replaces the defaults of settings: under RESUME and REPLAY all of that run's, under
    INIT_FROM the shape of its network.

    given: name of a setting -> value. An ARCH_MODE that is given overrides INIT_FROM's shape, so
    that start_config refuses what differs.
    """
    stored_values = stored_settings(given)
    if stored_values or not given.get("INIT_FROM"):
        return stored_values
    start = find_start(given["INIT_FROM"])
    config = start.config
    imported = imported_values(start, IMPORTED_DEFAULTS)
    shape = {**asdict(config), "layer_pattern": config.layers, "norm": config.norms}
    values = {name: shape[name] for name in shape.keys() & Settings.__dataclass_fields__}
    # VOCAB_SIZE is checked against the data's tokenizer, and a long context need not be trained.
    del values["vocab_size"]
    values["train_seq_len"] = min(config.train_seq_len, Settings.train_seq_len)
    return {**values, **imported, **ARCH_PRESETS.get(given.get("ARCH_MODE"), {})}


def start_config(settings, config):
    """Return the GPTConfig of INIT_FROM's network, with room for TRAIN_SEQ_LEN.

    Raises UserError if the settings of the shape ask for another network.
    """
    # VOCAB_SIZE is checked against the data, TRAIN_SEQ_LEN below, and embed_init_std is of new weights.
    free = {"vocab_size", "train_seq_len", "embed_init_std"}
    shape = asked_shape(settings)
    for name in sorted(shape.keys() - free):
        value = getattr(config, name)
        if shape[name] != value:
            setting = SETTING_NAMES.get(name, name.upper())
            raise UserError(
                f"{setting}={shape[name]!r}: must be {value!r}, as "
                f"INIT_FROM={settings.init_from!r} has it; leave out ARCH_MODE and the settings of "
                "the shape"
            )
    length = settings.train_seq_len
    if config.positions == "learned" and length > config.train_seq_len:
        raise UserError(
            f"TRAIN_SEQ_LEN={length}: must be at most {config.train_seq_len}, because "
            f"INIT_FROM={settings.init_from!r} has learned positions"
        )
    return replace(config, train_seq_len=max(config.train_seq_len, length))


def read_network(stored):
    """Return the network of a Stored, on the CPU. Raises ArtifactError."""
    with one_line(stored.source):
        return fill_network(empty_network(stored.config), stored.read_tensors())


def make_network(settings, tokenizer):
    """Return a new network on the CPU, or INIT_FROM's, and its Stored or None. Raises UserError."""
    if not settings.init_from:
        config = model_config(settings, tokenizer.vocab_size, tokenizer.bos_id)
        torch.manual_seed(settings.seed)
        return GPT(config), None
    if settings.resume:  # INIT_FROM may be gone by now; the run's checkpoints have its shape
        folder = find_run("RESUME", settings.resume, settings.out_dir)
        start = read_stored("RESUME", str(folder))
    else:
        start = find_start(settings.init_from)
    hint = (
        f"to train INIT_FROM={settings.init_from!r}, prepare the texts with its tokenizer: python "
        f"data/prepare.py TEXTS --tokenizer {start.tokenizer} --out FOLDER"
    )
    read_checked(start.tokenizer, tokenizer.sha256, hint)
    network = read_network(start)
    network.config = start_config(settings, start.config)  # differs in train_seq_len alone
    return network, start


# ------------------------------------------------------------------------------------------- device
def keep_memory():
    """Let glibc keep the memory that tensors give back, for the next ones.

    By default each large tensor gets new pages from the system, which took a seventh of a step on a
    CPU. On CUDA it does no harm, and was not measured.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(-4, 0)  # M_MMAP_MAX: no block has pages of its own
        libc.mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD, in bytes


def record_memory(device):
    """Let PyTorch remember what allocates and frees memory, with stacks. Raises UserError on a CPU."""
    if device.type != "cuda":
        raise UserError("MEMORY_SNAPSHOT=1: must be 0 on a CPU; it records the memory of CUDA")
    torch.cuda.memory._record_memory_history()


def write_memory_snapshot(run):
    """Write rank 0's memory_snapshot.pickle, which pytorch.org/memory_viz shows, and record no more.

    It has the network, the optimizer and the untimed steps, which are like all others.
    """
    path = run.folder / "memory_snapshot.pickle"
    if run.runtime.rank == 0:
        torch.cuda.memory._dump_snapshot(str(path))
        run.log(f"memory: {path}")
    torch.cuda.memory._record_memory_history(enabled=None)


def activation_dtype(name, device):
    """Return the dtype of activations; "auto" is bfloat16 if the device has units for it."""
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cuda":
        return gpu_dtype()
    return torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32


def compile_model(network, settings):
    """Return the network compiled into one graph or, with COMPILE=0, the network itself."""
    if not settings.compile:
        return network
    mode = "default" if settings.compile is True else settings.compile
    return torch.compile(network, dynamic=False, fullgraph=True, mode=mode)


# ------------------------------------------------------------------------------------ training step
def table_dropout(passes, tokens_per_row):
    """Return the share of look-ups in the hashed tables that a step replaces by zeros, to a hundredth.

    The pair and the triple of a token are drawn each by itself; what is kept is scaled up (dropout).
    The windows of a step are from all over the text. So a row has soon learned what its document says
    behind its pair or triple, in a second pass even the very token that follows, and the network comes
    to trust rows more than it can on new text: web text read 1.4 times lost 0.08 bits per byte. The
    share is a curve through the best ones of those tried: 0.15 to 0.2 for one pass, 0.35 for 1.2, 0.45
    for 1.4 and 0.7 for 3.1 (docs/lab/2026-11.md, 2026-11-28).

    passes: how often the run reads its training text in all. tokens_per_row: those of the text for
    each row of a table, 77 where this was tried; rows of many thousands learn nothing by heart.
    """
    share = 0.75 * passes**4 / (passes**4 + 3.2)
    return round(share * min(1.0, 2000 / tokens_per_row), 2)


def planned_passes(settings, plan, step, text_tokens):
    """Return how often the run will have read its training text, as its steps go so far.

    0 in the first three steps of a run by the clock: its length is known when the reports of two
    steps have arrived, see Clock.next_end.
    """
    if step < 3 and not settings.iterations:
        return 0.0
    return settings.train_batch_tokens / plan.step_share / text_tokens


def with_noise(ids, share, bos_id):
    """Return ids (B, T) with a share of the tokens replaced by others of the same windows.

    A network whose contexts have errors cannot learn a small text by heart (Xie et al. 2017, "Data
    Noising as Smoothing in Neural Network Language Models"). BOS stays where it is, and comes nowhere
    else.
    """
    others = ids.flatten()[torch.randperm(ids.numel(), device=ids.device)].view_as(ids)
    replaced = torch.rand(ids.shape, device=ids.device) < share
    replaced &= (ids != bos_id) & (others != bos_id)
    return torch.where(replaced, others, ids)


def forward_backward(model, batches, step, dropout=0.0):
    """Compute this rank's gradients of the mean loss over the global batch.

    Return this rank's part of that mean, in nats per token. On a CPU the hashed tables have a sparse
    gradient: a dense one of millions of rows, of which a step reads thousands, took an eighth of a
    step. Ranks sum dense ones. dropout: the share of look-ups that become zeros, see table_dropout.
    """
    runtime = batches.runtime
    settings = batches.settings
    noise = settings.token_noise
    hashed = getattr(model, "ngram_embed", None)
    is_sparse = (
        hashed is not None
        and settings.optimizer == "muon"
        and runtime.device.type == "cpu"
        and not runtime.distributed
    )
    if dropout or noise:
        # A resumed run draws the same, and each rank its own: ranks are a million steps apart.
        torch.manual_seed(settings.seed + step + 1_000_000 * runtime.rank)
    model.zero_grad()
    loss = torch.zeros((), device=runtime.device)
    for number, (ids, targets, *borders) in enumerate(batches.micro_batches(step)):
        ngrams = {}
        if noise:
            ids = with_noise(ids, noise, model.config.bos_id)
        if hashed is not None:
            # Outside the compiled graph, which can neither make a sparse gradient nor change its
            # dropout without being compiled anew.
            rows = model.ngrams(model.context(ids), sparse=is_sparse)
            if dropout:
                rows = F.dropout1d(rows.view(-1, 2, BIGRAM_DIM), dropout).view_as(rows)
            ngrams["ngrams"] = rows
        losses = model(ids, targets, *borders, **ngrams)
        part = losses.sum() / settings.train_batch_tokens
        part.backward()
        loss += part.detach()
        if number == 0 and isinstance(settings.compile, str):
            # Under CUDA graphs the first gradients are memory of the graph, which the next micro-batch
            # uses again. Copies stay, and what follows is added to them in place.
            for param in model.parameters():
                if param.grad is not None:
                    param.grad = param.grad.clone()
    if is_sparse:
        hashed.grad = hashed.grad.coalesce()  # each row once
    return loss


def gradients(model):
    """Return the gradients of a model; of a sparse one the values, which share its memory."""
    grads = [param.grad for param in model.parameters()]
    return [grad.values() if grad.is_sparse else grad for grad in grads]


# ------------------------------------------------------------------------------------------ warm-up
WARMUP_STEPS = 2  # untimed steps: the first compiles, the second shows that nothing compiles again


def halve_micro_batch(batches, settings):
    """Halve the micro-batch, which did not fit into memory. Raises UserError if it cannot be."""
    rows = batches.micro_batch_size
    if rows == 1:
        raise UserError(
            f"TRAIN_SEQ_LEN={settings.train_seq_len}: out of memory with a single window; "
            "must be less, or the network smaller, or ACTIVATION_CHECKPOINTING=1"
        )
    if settings.micro_batch_tokens:
        raise UserError(
            f"MICRO_BATCH_TOKENS={settings.micro_batch_tokens}: out of memory with {rows} "
            "windows; must be less, or 0"
        )
    batches.limit_micro_batch(rows // 2)
    torch.compiler.reset()  # each size is another graph, and dynamo makes only so many


def fits_memory(model, batches, step):
    """Compute a step's gradients; return whether there was memory enough for them on every rank."""
    failed = torch.zeros((), device=batches.runtime.device)
    reserve = []
    try:
        # Room for what comes later: two moments, two averages, a sum of all gradients, and two
        # copies for a moment, in the optimizer's step and under QAT.
        for param in model.parameters():
            reserve.append(param.new_empty(7, *param.shape))
        forward_backward(model, batches, step)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        failed += 1
    reserve.clear()
    if failed:
        torch.cuda.empty_cache()  # NCCL takes memory of its own
    return not batches.runtime.sum(failed)


def warm_up(model, optimizers, batches, settings):
    """Compile and allocate everything in untimed steps that change no weight.

    If memory is short on any rank, the micro-batch is halved. Raises UserError if it cannot be, and
    for a parameter without a gradient.
    """
    for step in range(WARMUP_STEPS):
        while not fits_memory(model, batches, step):
            halve_micro_batch(batches, settings)
        unused = [name for name, param in model.named_parameters() if param.grad is None]
        if unused:
            raise UserError(
                f"the forward does not use the parameters {', '.join(unused)}: they have no gradient "
                "and would never be trained; use them, or do not make them"
            )
        nothing = torch.zeros(1, device=batches.runtime.device)
        norm, _ = reduce_gradients(
            gradients(model), batches.runtime, settings.grad_clip_norm, nothing
        )
        step_optimizers(optimizers, 0.0, torch.isfinite(norm))
    with torch.no_grad():  # compiles the graph of validation
        model(*next(batches.micro_batches(0)))
    # A rate of 0 moved no weight, but it changed the optimizers' moments and counts of steps.
    for optimizer in optimizers:
        optimizer.state.clear()


# ---------------------------------------------------------------------------------------------- log
def log_data(data, text_tokens, log):
    """Log what the data is, how many of its tokens train, choose weights and validate, and by which
    bytes scores divide.

    text_tokens: those that train.
    """
    for manifest in data.manifests:
        log(
            "data: {name}, train {train[tokens]} tokens, val {val[tokens]} tokens, "
            "{val[decoded_bytes]} bytes, overlap {overlap_documents} documents".format(**manifest)
        )
    log(
        f"tokens: {text_tokens} train, {len(data.held_out.tokens)} are held out (to choose raw, EMA or "
        f"SWA weights, if there is a choice: {HOLDOUT_TOKENS}, or a twentieth if that is less), "
        f"{len(data.val.tokens)} validate"
    )
    decoded = sum(manifest["val"]["decoded_bytes"] for manifest in data.manifests)
    if data.val.bytes < decoded:
        log(
            f"warning: the validation tokens decode to {decoded} bytes, more than their source has; "
            f"scores divide by the {data.val.bytes} of the source"
        )


def warn_of_small_limit(settings, weights, limit, log):
    """Log a warning if an artifact of at most `limit` bytes cannot hold so many weights well.

    A weight takes about MATRIX_BITS - 2 bits (docs/quantization.md). Up to twice the limit nothing is said.
    """
    size = weights * (settings.matrix_bits - 2) / 8
    if size > 2 * limit:
        log(
            f"warning: ARTIFACT_BYTES_MAX={settings.artifact_bytes_max}: {weights} weights take about "
            f"{size:.0f} bytes. To fit, they are rounded much more coarsely from QAT on, or at the end, "
            "which makes a worse model. ARTIFACT_BYTES_MAX=0 is no limit",
            sys.stderr,
        )


def warn_of_large_controls(network, log):
    """Log a warning for each large weight whose name makes it a control, see tensor_class."""
    for name, param in network.named_parameters():
        if tensor_class(name, param) == "control" and param.numel() > 65536:
            log(
                f"warning: {name} has {param.numel()} weights and is a control by its name: AdamW at "
                "SCALAR_LR trains it, and the artifact has it in float16; a matrix is named w_*"
            )


@torch.no_grad()
def log_gate_shares(network, tokens, log):
    """Log and return the share of hidden units whose event gate opens, a number for each layer.

    The bio-MLP's events are counted in one text of tokens (N,). They are returned as a key of
    result.json; {} without the bio-MLP's gate.
    """
    shares = []

    def count(mlp, inputs, output):
        h = oscillate(linear(*inputs, mlp.w_up), mlp.wave)
        shares.append((mlp.voltage(h) > BIO_THRESHOLD).float().mean().item())

    hooks = [
        block.mlp.register_forward_hook(count)
        for block in network.blocks
        if block.mlp.kind == "bio_soft"
    ]
    if not hooks:
        return {}
    network.features(torch.from_numpy(tokens).to(network.embed.device)[None])
    for hook in hooks:
        hook.remove()
    log(f"events: share of units by layer {' '.join(f'{share:.4f}' for share in shares)}")
    return {"event_shares": shares}


# ------------------------------------------------------------------------------------- end of a run
def choose_timed_weights(network, table, averages, run, score):
    """Give the network the raw or averaged weights that score best, quantized, on held-out tokens.

    score: () -> Score of the network as it is. An average is left out, with an event, if the clock
    has no time to score it; a replay leaves out what the other run did. Without averages nothing is
    scored. Return a name.
    """
    params = [param.detach() for param in network.parameters()]
    begun = {name: average.values for name, average in averages.items() if average.count}
    if not begun:
        return "raw"
    candidates = {"raw": params, **begun}
    scores = {}
    scoring_seconds = 0.0
    omissions = []
    if run.settings.replay:
        events = read_progress(run.settings.replay, run.settings.out_dir)["events"]
        omissions = [event.get("weights") for event in events]  # only those left out have the key
    for name, values in candidates.items():
        begin = run.clock.elapsed()
        # As much time as scoring takes is kept to pack the weights chosen. The raw ones come first, and
        # are always scored.
        is_late = run.runtime.agree(run.clock.limit - begin < 2 * scoring_seconds)
        if (scores and is_late) or name in omissions:
            run.event("weights_left_out", weights=name)
            continue
        with swapped(params, values), quantized(network, table):
            scores[name] = score()
        scoring_seconds = run.clock.elapsed() - begin
        run.log(f"weights: {name}, quantized, on held-out training tokens {scores[name]}")
    chosen = min(scores, key=lambda name: scores[name].nats)
    run.log(f"weights: {chosen} chosen")
    torch._foreach_copy_(params, candidates[chosen])
    return chosen


def document_spans(text, bos_id):
    """Return where each document's predictions begin and end, two arrays (documents,).

    A document's first prediction follows its BOS, and its last is of the BOS behind it.
    """
    begin = np.flatnonzero(text.tokens[:-1] == bos_id)
    return begin, np.append(begin[1:], len(text.tokens) - 1)


def score_documents(scorer, network, text):
    """Return the Score of a network that sees every document as a whole, from its BOS on."""
    begin, end = document_spans(text, scorer.bos_id)
    return scorer.score_spans(network, text, np.stack([begin, begin, end], axis=1), 1, 0)


OVERFIT_NATS = 1.0  # more nats per token between training and validation are reported


def report_overfit(run, train_loss, val_loss):
    """A validation loss far above that of the last step is an event and a warning: see docs/data.md."""
    if val_loss > train_loss + OVERFIT_NATS:
        run.event("learned_by_heart", train_loss=train_loss, val_loss=val_loss)
        run.log(
            f"warning: THE TEXT WAS LEARNED BY HEART: the last training loss is {train_loss:.2f} nats "
            f"per token, that of validation {val_loss:.2f}. More text, a shorter run or TOKEN_NOISE=0.1 "
            "may help (docs/data.md)",
            sys.stderr,
        )


def score_artifact(path, scorer, data, run):
    """Rebuild the network from the artifact file alone; return its scores for result.json."""
    settings = run.settings
    device = scorer.runtime.device
    network = read_network(read_stored("artifact", str(path))).to(device)
    # On a CPU it stays in float32, which gives the same score on every machine.
    if device.type == "cuda":
        network.dtype = activation_dtype(settings.dtype, device)
    model = compile_model(network, settings)
    score = scorer.score(model, data.val)
    run.log(f"from the artifact: val_{score}")
    result = score.result()
    if 0 < settings.eval_stride < settings.train_seq_len:
        sliding = scorer.score(model, data.val, settings.eval_stride)
        run.log(f"from the artifact: sliding val_{sliding}")
        result["val_bpb_sliding"] = sliding.bpb
    elif settings.eval_stride:
        run.log(f"no sliding score: EVAL_STRIDE={settings.eval_stride} is not below TRAIN_SEQ_LEN")
    if settings.eval_stateful:
        stateful = score_documents(scorer, network, data.val)
        run.log(f"from the artifact: stateful val_{stateful}")
        result["val_bpb_stateful"] = stateful.bpb
    return result


# --------------------------------------------------------------------------------------------- main
# A step that takes longer than this and than 20 median steps prints the stacks of all threads.
HANG_SECONDS = 300.0


def main():
    """Train, pack and score one model; return the exit code.

    Any UserError comes before step 1, except for a shard with ids beyond the vocabulary.
    """
    begin = time.perf_counter()
    presets = {"ARCH_MODE": ARCH_PRESETS, "OPTIMIZER": OPTIMIZER_PRESETS}
    settings = load_settings(Settings, os.environ, sys.argv[1:], presets, shape_settings)
    plan = Plan(settings)
    runtime = start_runtime(settings.device, settings.compile)
    check_ranks(settings, runtime)
    device = runtime.device
    if settings.memory_snapshot:
        record_memory(device)
    keep_memory()
    clock = Clock(settings, runtime, replayed_progress(settings))
    data = open_data(settings, runtime.rank)
    tokenizer = data.tokenizer
    network, start = make_network(settings, tokenizer)
    config = network.config
    batches = Batches(data, settings, runtime)

    # model, optimizers, averages
    network.to(device)
    network.activation_checkpointing = settings.activation_checkpointing
    network.dtype = activation_dtype(settings.dtype, device)
    model = compile_model(network, settings)
    optimizers = make_optimizers(network, settings, runtime)
    optimizer_state = OptimizerState(optimizers, dict(network.named_parameters()))
    averages = {}
    if settings.ema:
        averages["ema"] = Average(list(network.parameters()), EMA_MEMORY)
    if settings.swa:
        averages["swa"] = Average(list(network.parameters()), None)

    # run folder and log
    identity = {  # RESUME refuses another value of any of these: it would be another run
        **asdict(config),
        "seed": settings.seed,
        "train_batch_tokens": settings.train_batch_tokens,
        "ema": settings.ema,
        "swa": settings.swa,
        "optimizer": settings.optimizer,
        "matrix_bits": settings.matrix_bits,
        "manifest_sha256": data.manifest_sha256,
        "tokenizer_sha256": tokenizer.sha256,
        "data_shares": data.shares,
        "init_from": settings.init_from or None,
        "holdout_tokens": HOLDOUT_TOKENS,  # a constant; older checkpoints have it
    }
    run = Run(settings, runtime, plan, clock, identity, asdict(config))
    handle_stop_signals(run.end_at_once)
    checkpoint = run.open()
    log = run.log
    if tokenizer.file != "bytes":
        run.write_file(tokenizer.file, tokenizer.content)
    counts = count_parameters(network)
    log(f"parameters: {name_values(counts)} layers: {config.layers}")
    warn_of_large_controls(network, log)
    if start and not checkpoint:
        log(describe_start(settings, IMPORTED_DEFAULTS))
    text_tokens = settings.train_seq_len * sum(map(len, data.windows))
    log_data(data, text_tokens, log)
    log(plan.describe())
    choose_kernels(settings.kernels, network, runtime, log)
    log("warm-up: compiling and allocating, outside the clock")
    if device.type == "cpu" and not settings.config:
        log(
            "a step of the default settings takes minutes on a CPU; configs/cpu.env is made for CPUs"
        )
    try:
        warm_up(model, optimizers, batches, settings)
    finally:  # also if memory is short
        if settings.memory_snapshot:
            write_memory_snapshot(run)
    micro_steps = batches.rank_batch_size // batches.micro_batch_size
    log(f"batch: {micro_steps} micro-steps of {batches.micro_batch_size} windows on each rank")
    scorer = Scorer(
        tokenizer.bos_id, runtime, settings.train_seq_len, batches.micro_batch_size, log
    )
    exporter = Exporter()
    limit = (settings.artifact_bytes_max or math.inf) - run.code_bytes
    warn_of_small_limit(settings, counts["total"], limit, log)
    header = {
        "settings": asdict(config),
        "tokenizer_sha256": tokenizer.sha256,
        "meta": {"seed": settings.seed, "tokenizer": tokenizer.file},
    }
    # What score_artifact does after training: the network is built from the header alone. A changed
    # model that GPTConfig does not describe fails now, not at the end; a fault of GPT() itself shows
    # its traceback.
    with one_line("this script: its network is not the one of its GPTConfig"):
        described = checked_config(header["settings"])
    with torch.device("meta"):
        rebuilt = GPT(described)
    with one_line("this script: its network is not the one of its GPTConfig"):
        check_tensors(rebuilt, network.state_dict())
    run.parts.update(network=network, optimizers=optimizer_state, exporter=exporter, **averages)
    if checkpoint:
        run.load(checkpoint)
    elif start:
        score = scorer.score(model, data.val)
        log.metrics(0, {"val_loss": score.loss, "val_bpb": score.bpb})
        log(f"before training: val_{score}")

    metrics = {}  # of the step before; log_step writes them when its report has come
    target = {}  # steps and seconds until TARGET_VAL_LOSS was reached
    stop_signal = StopSignal(run)
    clock.start()
    while True:
        if stop_signal.number and not runtime.distributed:
            run.ended = "signal"  # a single process need not ask other ranks
        last_step = bool(run.ended) or clock.is_last(run.step)  # run.step steps are done
        faulthandler.cancel_dump_traceback_later()  # only steps are watched for hangs

        # 1. Validate and save; the clock stands still. When the run is over the artifact is scored
        # below, and nothing is validated here, except for TARGET_VAL_LOSS: a replay ends by its number
        # of steps, and only a validation tells that the target was the reason.
        val_is_due = settings.val_loss_every and run.step % settings.val_loss_every == 0
        is_of_use = not last_step or (settings.target_val_loss and not run.ended)
        if val_is_due and run.step and is_of_use:
            with clock.paused():
                log_step(run, metrics, "train_loss")
                score = scorer.score(model, data.val)
                log_gate_shares(network, data.val.tokens[: settings.train_seq_len], log)
            log.metrics(run.step, {"val_loss": score.loss, "val_bpb": score.bpb})
            if score.loss <= settings.target_val_loss:
                target = {"target_steps": run.step, "target_seconds": clock.elapsed()}
                run.ended = "target"
                # The phases that have not begun are no longer awaited.
                plan.planned = {name: plan.planned[name] for name in plan.phases}
                last_step = True
        # Unless SAVE_EVERY is 0, also before step 1: a full disk is found before training, and a run that
        # is killed early can be resumed.
        save_is_due = settings.save_every and run.step % settings.save_every == 0
        if last_step or save_is_due:
            with clock.paused():
                log_step(run, metrics, "train_loss")
                run.save()
        if last_step:
            break
        faulthandler.dump_traceback_later(max(HANG_SECONDS, 20 * clock.median_step()))

        # 2. The phases and learning rates of this step.
        progress = clock.progress(run.step)
        for name in plan.begin_phases(run.step, progress):
            log(f"phase: {name} begins at step {run.step + 1}, {progress:.1%} of the run")
            if name == "qat":
                # Training goes on with the steps of the artifact. 1% is left for what it changes.
                exporter.widen, _ = fit_artifact(
                    network, exporter.widen, 0.99 * limit, header, run, pack=False
                )
        multiplier = plan.rates(progress)
        passes = planned_passes(settings, plan, run.step, text_tokens)
        dropout = table_dropout(passes, text_tokens / max(1, config.bigram_vocab_size))

        # 3. Forward and backward. Under QAT the weights inside this block are rounded as in the
        # artifact, and the gradient is applied to the unrounded weights (straight through).
        rounding = contextlib.nullcontext()
        if plan.is_on("qat"):
            rounding = quantized(network, quant_table(settings.matrix_bits, exporter.widen))
        with rounding:
            loss = forward_backward(model, batches, run.step, dropout)
        # Loss and signal travel with the gradients. After reduce_gradients `loss` is the mean over the
        # global batch, and `stop` is above 0 if any rank got a signal.
        extra = torch.stack([loss, torch.full_like(loss, stop_signal.number)])
        clip = settings.grad_clip_norm
        norm, (loss, stop) = reduce_gradients(gradients(network), runtime, clip, extra)
        finite = torch.isfinite(norm) & torch.isfinite(loss)

        # 4. Read and log the report of the step before, now that the device has work queued.
        log_step(run, metrics, "train_loss")

        # 5. Update the weights and their averages.
        if settings.optimizer == "muon":  # optimizers[0], see make_optimizers
            # Its momentum rises in the first MUON_WARMUP_FRAC of the run.
            warm = min(1.0, progress / MUON_WARMUP_FRAC)
            momentum = MUON_MOMENTUM_START + warm * (MUON_MOMENTUM - MUON_MOMENTUM_START)
            optimizers[0].param_groups[0]["momentum"] = momentum
        step_optimizers(optimizers, multiplier, finite)
        for name, average in averages.items():
            if plan.is_on(name):
                average.update(progress)
        clock.send_report(loss, norm, stop)
        run.step += 1
        metrics = {
            "lr_mul": multiplier,
            "progress": progress,
            "passes": passes,
            "tok_s": run.step * settings.train_batch_tokens / clock.elapsed(),
        }

    clock.stop()
    if stop_signal.on_any_rank(runtime):  # also during the last save
        return leave_stopped(run, stop_signal)
    handle_stop_signals(run.end_at_once)
    end_training(run)

    # Choose the weights, quantize and pack them; this is on the clock, too.
    clock.start()
    score_held_out = functools.partial(scorer.score, model, data.held_out)
    table = quant_table(settings.matrix_bits, exporter.widen)
    chosen = choose_timed_weights(network, table, averages, run, score_held_out)
    # Once more, because a replay repeats which averages were left out: that is in the events.
    write_record(run, "progress.json", {"progress": clock.used})
    _, content = fit_artifact(network, exporter.widen, limit, header, run)
    clock.stop()
    artifact = run.write_file("model.upar", content)
    write_final(run, network.state_dict())

    # Score the weights before quantization, then what the artifact file alone gives back.
    before = scorer.score(model, data.val)
    log(f"before quantization: val_{before}")
    packed = score_artifact(artifact, scorer, data, run)
    log.metrics(run.step, {"val_loss": packed["val_loss"], "val_bpb": packed["val_bpb"]})
    dtype = str(network.dtype).removeprefix("torch.")
    if device.type == "cpu" and dtype != "float32":
        log(f"packing: the artifact was scored in float32, the trained weights in {dtype}")
    report_packing(run, packed["val_loss"] - before.loss)
    report_overfit(run, run.loss, before.loss)
    facts = {
        "manifest_sha256": data.manifest_sha256,
        "tokenizer_sha256": tokenizer.sha256,
        "tokens": run.step * settings.train_batch_tokens,
        "params": counts,
        "dtype": dtype,
        "weights": chosen,
        "init_from": settings.init_from,
        **target,
        **packed,
        **log_gate_shares(network, data.val.tokens[: settings.train_seq_len], log),
        "before_quantization": before.result(),
        **data.yardsticks,
        "total_seconds": time.perf_counter() - begin,
    }
    exit_status = write_result(run, facts, content)
    runtime.leave()
    return exit_status


if __name__ == "__main__":
    sys.exit(exit_code(main))
