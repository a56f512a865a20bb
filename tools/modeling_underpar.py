"""A model of these scripts for transformers, with trust_remote_code=True.

`convert.py export` copies this file into a folder whose network transformers has no class for. It
is whole by itself: sections between `# === shared:` fences are those of sample.py, byte for byte
(tools/sync.py), and the classes behind them fit these to transformers.
"""

import contextlib
import functools
import math
from dataclasses import asdict, dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint as activation_checkpoint
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils.versions import require_version

# Older ones load tied weights otherwise, and their `generate` passes more arguments.
require_version("transformers>=5.4")

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


class UnderparConfig(PretrainedConfig):
    """The content of config.json: `shape` has the fields of GPTConfig.

    transformers may change vocab_size and tie_word_embeddings; they count, not those in `shape`.
    """

    model_type = "underpar"
    keys_to_ignore_at_inference = ("past_key_values",)

    def __init__(self, shape=None, vocab_size=None, tie_word_embeddings=None, **others):
        smallest = {"vocab_size": 264, "bos_id": 1, "layers": "a", "norms": "rms"}
        shape = GPTConfig(**(smallest | (shape or {})))
        self.shape = asdict(shape)
        self.vocab_size = vocab_size or shape.vocab_size
        if tie_word_embeddings is None:
            tie_word_embeddings = shape.tie_embeddings
        self.max_position_embeddings = shape.context or shape.train_seq_len
        self.hidden_size = shape.model_dim
        self.num_hidden_layers = len(shape.layers.split())
        self.num_attention_heads = shape.num_heads
        self.num_key_value_heads = shape.num_kv_heads
        # A document ends where the next one begins.
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            others.setdefault(name, shape.bos_id)
        super().__init__(tie_word_embeddings=tie_word_embeddings, **others)

    def to_dict(self):
        """Return the content of config.json.

        `transformers serve` looks for a name of architectures in its own package, and has the class
        that goes by auto_map. save_pretrained writes the class's own name.
        """
        content = super().to_dict()
        if content["architectures"] == ["UnderparForCausalLM"]:
            content["architectures"] = ["AutoModelForCausalLM"]
        return content


def check_positions(position_ids, expected, mask):
    """Raise ValueError for other positions than expected (B, T) of tokens where mask (B, T) is True."""
    if position_ids is not None and ((position_ids != expected) & mask).any():
        raise ValueError("position_ids: must be 0, 1, 2 … from the first token of each text")


class TextCache(Decoder):
    """A Decoder as a cache of transformers. It returns features, of which the model makes logits."""

    is_compileable = False

    def __init__(self, network, mask):
        """mask (B, T): False where the first texts have padding, in front."""
        before = CONV_TAPS - 1  # padding of all rows, which the first token's convolution reaches
        padding = before + mask.logical_not().sum(1, keepdim=True)
        ids = padding.new_full((len(mask), before), max(network.config.bos_id, 0))
        self.used = ids.new_tensor(before)
        self.kept = {"ids": ids, "padding": padding}
        self.layers = [{} for _ in network.layers]
        self.graph = None
        self.room = ROOM

    def get_seq_length(self, layer_idx=0):
        """Return the number of tokens that the texts have, padding included."""
        return int(self.used) - (CONV_TAPS - 1)

    def read(self, network, ids, mask=None, position_ids=None):
        """Go on with ids (B, T) and return their features (B, T, dim).

        mask (B, all tokens so far and T), position_ids (B, T). Raises ValueError if these are not
        those of the texts.
        """
        length = self.get_seq_length()
        padding = self.kept["padding"] - (CONV_TAPS - 1)
        places = torch.arange(length + ids.size(1), device=ids.device)
        if mask is not None and not torch.equal(mask, places >= padding):
            raise ValueError(
                "attention_mask: with use_cache it must have all tokens so far, and be 0 only where "
                "the first ones have padding on the left"
            )
        is_text = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask[:, length:]
        check_positions(position_ids, places[length:] - padding, is_text)
        while self.used + ids.size(1) > self.kept["ids"].size(1):
            self.grow()
        features = network.features(ids, context=self.context(ids))
        self.logits = features[:, -1]  # of which `take` selects rows
        return features

    def reorder_cache(self, rows):
        """Go on with these rows, as beam search asks."""
        self.take(rows)


class UnderparPreTrainedModel(PreTrainedModel):
    """What both models have: their configuration, and weights that no file had."""

    config_class = UnderparConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    # Weights are read past the `forward` of their modules, so they must be on one device.
    _no_split_modules = ("UnderparModel",)
    _is_stateful = True  # a state of Gated DeltaNet cannot go back to fewer tokens

    def _init_weights(self, module):
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.shape["embed_init_std"])
        elif isinstance(module, nn.Linear):
            nn.init.zeros_(module.weight)  # as the network's own head

    @torch.no_grad()
    def initialize_weights(self):
        """Fill what no file had, as a new network is filled."""
        super().initialize_weights()
        fresh = None
        for name, param in self.base_model.network.named_parameters():
            if not getattr(param, "_is_hf_initialized", False):
                fresh = fresh or GPT(GPTConfig(**self.config.shape))
                param.copy_(fresh.get_parameter(name))


@contextlib.contextmanager
def inputs_of(modules):
    """A block in which each call of these modules puts its first argument into the list it gives."""
    inputs = []
    hooks = [
        module.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
        for module in modules
    ]
    try:
        yield inputs
    finally:
        for hook in hooks:
            hook.remove()


class UnderparModel(UnderparPreTrainedModel):
    """The network without its head."""

    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.network = GPT(GPTConfig(**config.shape))
        blocks = list(self.network.blocks)
        mixers = list(self.network.mixers)
        layers = self.network.layers
        self.places = [(blocks.index(block), mixers.index(mixer)) for block, mixer in layers]
        # Embedding and head are modules of these classes, which transformers resizes and ties.
        del self.network.embed
        self.network.head = None
        self.gradient_checkpointing = False
        self.post_init()

    def prepared(self, table):
        """Return the network, with a table of embeddings (rows, dim) that its ids are rows of."""
        network = self.network
        network.dtype = self.dtype
        network.activation_checkpointing = self.gradient_checkpointing and self.training
        # Past nn.Module, for which these would be parameters and modules under a second name. Layers
        # are looked up each time, because PEFT replaces modules.
        layers = [(network.blocks[block], network.mixers[mixer]) for block, mixer in self.places]
        vars(network).update(embed=table, layers=layers)
        return network

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        use_cache=False,
        output_attentions=None,
        output_hidden_states=None,
        return_dict=None,
    ):
        """Return features (B, T, dim) of input_ids (B, T), or of inputs_embeds (B, T, dim).

        Texts may be padded on either side, where attention_mask is 0; with use_cache on the left.
        With past_key_values, which such a call returns, texts go on by all of input_ids. Raises
        ValueError for what the network cannot do.
        """
        if output_attentions or self.config.output_attentions:
            raise ValueError("output_attentions: must be False; the network keeps no attentions")
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("input_ids, inputs_embeds: must be one of them")
        table = self.embed_tokens.weight
        given = input_ids if inputs_embeds is None else inputs_embeds
        if table.is_meta and not given.is_meta:
            raise ValueError("device_map: must offload no weights; one device must hold them all")
        if inputs_embeds is not None:
            if self.config.shape["bigram_vocab_size"]:
                raise ValueError(
                    "inputs_embeds: pairs of tokens have embeddings too: give input_ids"
                )
            # Each token is a row of its own.
            table = inputs_embeds.flatten(0, 1)
            input_ids = torch.arange(len(table), device=table.device)
            input_ids = input_ids.view(inputs_embeds.shape[:2])
        if attention_mask is not None:
            if attention_mask.dim() != 2:
                raise ValueError("attention_mask: must have two dimensions, texts and tokens")
            attention_mask = attention_mask.bool()
        network = self.prepared(table)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        with inputs_of(network.blocks if output_hidden_states else ()) as states:
            if past_key_values is None and not use_cache:
                context = self.context(input_ids, attention_mask, position_ids)
                features = network.features(input_ids, context=context)
            else:
                if past_key_values is None:
                    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
                    past_key_values = TextCache(network, mask)
                features = past_key_values.read(network, input_ids, attention_mask, position_ids)
        output = BaseModelOutputWithPast(
            last_hidden_state=features,
            past_key_values=past_key_values,
            hidden_states=(*states, features) if output_hidden_states else None,
        )
        if return_dict is None:
            return_dict = self.config.return_dict
        return output if return_dict else output.to_tuple()

    def context(self, ids, mask, position_ids):
        """Return the Context of texts ids (B, T), where mask (B, T) is True. Raises ValueError.

        A text is one document, as in a Decoder, and padding on either side another.
        """
        if mask is None:
            mask = torch.ones_like(ids, dtype=torch.bool)
        elif (
            mask.shape != ids.shape
            or (mask[:, 1:] > mask[:, :-1]).sum(1).add(mask[:, 0]).gt(1).any()
        ):
            raise ValueError(
                "attention_mask: must have a place for each token, and no gap in a text"
            )
        positions = (mask.cumsum(1) - 1).clamp(0)
        check_positions(position_ids, positions, mask)
        doc = (mask[:, 1:] != mask[:, :-1]).cumsum(1)
        recent = F.pad(ids, (CONV_TAPS - 1, 0), value=self.config.shape["bos_id"])
        return Context(recent, F.pad(doc, (CONV_TAPS, 0)), positions)


class UnderparForCausalLM(UnderparPreTrainedModel, GenerationMixin):
    """The network, with the interface of transformers' language models."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config):
        super().__init__(config)
        self.model = UnderparModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @classmethod
    def _supports_default_dynamic_cache(cls):
        return False  # `forward` makes the cache

    def prepare_inputs_for_generation(
        self,
        input_ids,
        next_sequence_length=None,
        past_key_values=None,
        inputs_embeds=None,
        position_ids=None,
        is_first_iteration=False,
        **kwargs,
    ):
        """Return the arguments of `forward`: behind a cache the tokens that it does not have."""
        begin = -(next_sequence_length or 0)
        if inputs_embeds is not None and is_first_iteration:
            input_ids = None  # transformers generates with a cache then
            inputs_embeds = inputs_embeds[:, begin:]
        else:
            input_ids = input_ids[:, begin:]
            inputs_embeds = None
        if position_ids is not None:
            count = (input_ids if inputs_embeds is None else inputs_embeds).size(1)
            position_ids = position_ids[:, -count:]
        for name in ("labels", "tokenizer", "assistant_tokenizer"):
            kwargs.pop(name, None)
        return {
            **kwargs,
            "input_ids": input_ids,
            "past_key_values": past_key_values,
            "inputs_embeds": inputs_embeds,
            "position_ids": position_ids,
        }

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        labels=None,
        use_cache=False,
        output_attentions=None,
        output_hidden_states=None,
        return_dict=None,
        logits_to_keep=0,
        **loss_options,
    ):
        """Return logits (B, T, V) of texts, see UnderparModel, and the loss if there are labels.

        labels (B, T): ids, or -100, of which the loss is the mean of those that follow the first.
        logits_to_keep: of so many tokens at the end alone, or a tensor of their places.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=True,
        )
        keep = logits_to_keep
        if isinstance(keep, int):
            keep = slice(-keep, None)
        logits = self.lm_head(outputs.last_hidden_state[:, keep])
        logits = softcap(logits, self.config.shape["logit_softcap"])
        unknown = loss_options.keys() - {"num_items_in_batch", "shift_labels"}
        if unknown:
            raise TypeError(f"{min(unknown)}: no such argument of this model")
        loss = None
        if labels is not None or "shift_labels" in loss_options:
            loss = self.loss_function(logits, labels, self.config.vocab_size, **loss_options)
        output = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
        )
        if return_dict is None:
            return_dict = self.config.return_dict
        return output if return_dict else output.to_tuple()
