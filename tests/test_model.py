"""The network against independent references: attention, GDN, positions, hashed n-grams, compilation."""

import contextlib
import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from reference import gdn_recurrent

import train_gpt as T
from conftest import add_noise

SETTINGS = T.Settings(
    layer_pattern="g s1 g a s1",
    model_dim=32,
    num_heads=4,
    num_kv_heads=2,
    mlp_mult=2.0,
    attn_window=7,
    qk_gain_init=1.5,
    train_seq_len=64,
)


def config(vocab_size=64, bos_id=1, settings=SETTINGS, **changes):
    """Return the shape of the test network, with settings or fields of GPTConfig changed."""
    layout = {name: value for name, value in changes.items() if not hasattr(settings, name)}
    picked = {name: value for name, value in changes.items() if hasattr(settings, name)}
    return T.model_config(
        dataclasses.replace(settings, **picked),
        vocab_size,
        bos_id,
        **{"embed_init_std": 0.5, **layout},
    )


def network(seed=0, **changes):
    """Return a float64 network without zero projections, so that every path counts."""
    torch.manual_seed(seed)
    net = T.GPT(config(**changes)).double()
    add_noise(net, 0.05)
    return net


def tokens(seed, batch, length):
    torch.manual_seed(seed)
    ids = torch.randint(2, 64, (batch, length))
    ids[:, 0] = ids[0, length // 3] = ids[-1, length // 2] = ids[-1, length // 2 + 1] = 1
    return ids


WINDOWS = [(1, 9), (16, 200), (100, 300), (1 << 30, 300)]


@pytest.mark.parametrize(("window", "length"), WINDOWS)
def test_attention_in_blocks_is_attention_in_one(window, length):
    torch.manual_seed(2)
    q, k, v = (torch.randn(2, heads, length, 8, dtype=torch.float64) for heads in (4, 2, 2))
    doc = (torch.rand(2, length) < 0.02).cumsum(1)
    distance = torch.arange(length)[:, None] - torch.arange(length)
    mask = (distance >= 0) & (distance < window) & (doc[:, :, None] == doc[:, None])
    logits = torch.einsum("bhid,bhjd->bhij", q, k.repeat_interleave(2, 1)) / 8**0.5
    expected = logits.masked_fill(~mask[:, None], -math.inf).softmax(-1) @ v.repeat_interleave(2, 1)
    assert (T.attend(q, k, v, doc, window) - expected).abs().max() < 1e-12


def test_attention_of_bfloat16_on_a_cpu_has_a_softmax_in_float32():
    """Only what enters and leaves the two products is rounded."""
    torch.manual_seed(2)
    qkv = [torch.randn(2, heads, 40, 8).bfloat16() for heads in (4, 2, 2)]
    doc = torch.zeros(2, 40)
    found, wide = T.attend(*qkv, doc, 9), T.attend(*(x.float() for x in qkv), doc, 9)
    assert found.dtype == torch.bfloat16 and (found - wide).abs().max() < 2**-7 * wide.abs().max()


def test_rotary_positions_are_relative_and_keep_norms():
    """Of 8 dimensions 6 rotate, along time and not along heads; angles are float32."""
    torch.manual_seed(3)
    q, k = torch.randn(2, 1, 6, 1, 8, dtype=torch.float64)
    products = [torch.einsum("bihd,bjhd->ij", q, k)]
    for shift in (0, 11):
        turn = T.rotation(torch.arange(6) + shift, 6, 1e4, [], q.dtype)
        at, key_at = T.rotate(q, *turn), T.rotate(k, *turn)
        assert (at.norm(dim=-1) - q.norm(dim=-1)).abs().max() < 1e-6
        assert torch.equal(at[..., 6:], q[..., 6:])
        products.append(torch.einsum("bihd,bjhd->ij", at, key_at))
    plain, first, later = products
    assert (first - later).abs().max() < 1e-5 and (first - plain).abs().max() > 0.1


def test_hashed_pairs_and_triples_by_hand():
    """Rows of the table by Python's integers; nothing is seen across the start of a document."""
    net = network(5, bigram_vocab_size=50)
    ids = tokens(5, 2, 40)
    context = net.context(ids)
    found = net.ngrams(context)
    for row, text in enumerate(ids.tolist()):
        for place, token in enumerate(text):
            start = max(at for at in range(place + 1) if text[at] == 1)
            before = [text[place - back] if place - back >= start else 1 for back in (1, 2)]
            pair = (36313 * token) ^ (27191 * before[0])
            triple = pair ^ (51647 * before[1])
            expected = [net.ngram_embed[pair % 50], net.ngram_embed[50 + triple % 50]]
            assert torch.equal(found[row, place], torch.cat(expected))


@pytest.mark.parametrize("light", [False, True])
def test_gdn_layer_against_the_recurrence(light):
    """The whole mixer, written out a second time on top of gdn_recurrent."""
    net = network(5, gdn_light=light)
    layer, ids = net.mixers[0], tokens(5, 2, 40)
    sizes = (16, 16, 32) if light else (32, 32, 32, 32)
    first = ids == 1
    doc = first.cumsum(1)
    x = torch.randn(2, 40, 32, dtype=torch.float64)
    q, k, v, *gate = (x @ layer.w_qkvg.T).split(sizes, dim=-1)
    parts = []
    for stream, weight in zip((q, k, v), layer.conv.split(sizes[:3], dim=1), strict=True):
        y = torch.zeros_like(stream)
        for t in range(40):
            for source in range(max(0, t - 3), t + 1):
                seen = (doc[:, source] == doc[:, t])[:, None]
                y[:, t] += seen * weight[3 - t + source] * stream[:, source]
        parts.append((y * torch.sigmoid(y)).view(2, 40, 4, -1))
    q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in parts[:2])
    a, b = (x @ layer.ab.T).chunk(2, dim=-1)
    g = -layer.A_log.exp() * torch.log1p(torch.exp(a + layer.dt_bias))
    g = torch.where(first[..., None], -60.0, g)
    o, _ = gdn_recurrent(q / q.size(-1) ** 0.5, k, parts[2], g, torch.sigmoid(b))
    o = o / (o.square().mean(-1, keepdim=True) + torch.finfo(torch.float64).eps).sqrt() * layer.norm
    o = o.flatten(2)
    if not light:
        o = o * gate[0] * torch.sigmoid(gate[0])
    assert (layer(x, net.context(ids)) - o @ layer.w_o.T).abs().max() < 1e-9


def test_gdn_initialisation_is_flas():
    torch.manual_seed(6)
    layer = T.GatedDeltaNet(dataclasses.replace(config(), model_dim=1024, num_heads=1024))
    decay, step = layer.A_log.exp(), F.softplus(layer.dt_bias)
    assert decay.max() <= 16.0 and 0.00099 < step.min() and step.max() < 0.101
    alpha = torch.exp(-decay * step).sort().values
    quantiles = [alpha[int(share * len(alpha))].item() for share in (0.05, 0.5, 0.95)]
    assert quantiles == pytest.approx([0.475, 0.940, 0.996], abs=0.04)  # of 2,048 draws


def test_the_seeds_hybrid_has_its_layers_and_its_size():
    cfg = T.model_config(T.Settings(), 1024, 1)
    assert cfg.layers.split() == ["g"] * 5 + ["s1"] + ["g"] * 5 + ["s1"]
    net = T.GPT(cfg)
    parts = (net.mixers[0], net.mixers[5], net.blocks[0])
    counts = [sum(param.numel() for param in part.parameters()) for part in parts]
    # fla's GatedDeltaNet; 8 query heads, 4 key/value heads and a gain a head; an MLP and scales
    assert counts == [1_325_136, 786_432 + 8, 2 * 512 * 1536 + 4 * 512]
    assert len(net.mixers) == 11 and net.mixers[0].w_qkvg.splits == (512,) * 4
    assert net.mixers[5].w_qkv.splits == (512, 256, 256)


def train_through_the_switch(backend):
    """Return losses of seven steps; from the fifth on the weights are quantized to 3 bits."""
    torch.manual_seed(16)
    net = T.GPT(config(layer_pattern="s", num_layers=1))
    add_noise(net, 0.05)
    model = net if backend == "eager" else torch.compile(net, backend=backend, dynamic=False)
    table = {"matrix": {"bits": 3, "clip_sigmas": 4.0}}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.001)
    losses = []
    for at in range(7):
        steady = torch.compiler.set_stance("fail_on_recompile" if at else "default")
        with steady, T.quantized(net, table) if at >= 4 else contextlib.nullcontext():
            loss = model(tokens(17, 2, 32), tokens(18, 2, 32)).mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_compiled_training_equals_eager_through_the_qat_switch_without_recompiling(backend):
    """Quantization by swapping weights: the loss changes at the switch, and no graph is new."""
    eager, compiled = train_through_the_switch("eager"), train_through_the_switch(backend)
    assert compiled == pytest.approx(eager, rel=2e-5)
    assert abs(eager[4] - eager[3]) > 2 * abs(eager[3] - eager[2])
