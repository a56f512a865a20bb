"""The network against independent references: attention, convolution, documents, caches, sharing,
compilation.
"""

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
    """Shape of the test network, with settings or fields of GPTConfig changed; its embedding is not
    near zero.
    """
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


def tokens(seed, batch, length, documents=True):
    torch.manual_seed(seed)
    ids = torch.randint(2, 64, (batch, length))
    ids[:, 0] = 1
    if documents:
        ids[0, length // 3] = ids[-1, length // 2] = ids[-1, length // 2 + 1] = 1
    return ids


@pytest.mark.parametrize("window, length", [(1, 9), (8, 9), (16, 200), (100, 300), (1 << 30, 300)])
def test_attention_in_blocks_is_attention_in_one(window, length):
    torch.manual_seed(2)
    q, k, v = (torch.randn(2, heads, length, 8, dtype=torch.float64) for heads in (4, 2, 2))
    doc = torch.randint(0, 2, (2, length)).mul(torch.rand(2, length) < 0.02).cumsum(1)
    i, j = torch.arange(length)[:, None], torch.arange(length)[None]
    mask = (j <= i) & (i - j < window) & (doc[:, :, None] == doc[:, None, :])
    logits = torch.einsum("bhid,bhjd->bhij", q, k.repeat_interleave(2, 1)) / 8**0.5
    expected = logits.masked_fill(~mask[:, None], -math.inf).softmax(-1) @ v.repeat_interleave(2, 1)
    assert (T.attend(q, k, v, doc, window) - expected).abs().max() < 1e-12


def test_attention_of_bfloat16_on_a_cpu_has_a_softmax_in_float32():
    """Only what enters and leaves the two products is rounded."""
    torch.manual_seed(2)
    q, k, v = (torch.randn(2, heads, 40, 8).bfloat16() for heads in (4, 2, 2))
    doc = (tokens(2, 2, 40) == 1).cumsum(1)
    found, wide = T.attend(q, k, v, doc, 9), T.attend(q.float(), k.float(), v.float(), doc, 9)
    assert found.dtype == torch.bfloat16 and (found - wide).abs().max() < 2**-7 * wide.abs().max()
    # A hundred equal scores: each share is 0.01, which float32 sums to 1.
    same = torch.zeros(1, 1, 100, 8, dtype=torch.bfloat16)
    ones = T.attend(same, same, same + 1, torch.zeros(1, 100), T.FULL_WINDOW)
    assert (ones - 1).abs().max() <= 2**-8


@pytest.mark.parametrize("pattern", ["g s1 g a s1", "a"])
def test_activations_in_bfloat16_leave_weights_gradients_and_logits_in_float32(pattern):
    """Near to float32's, and not the same: the dtype reaches what lies between; None is the
    weights' own on a CPU.
    """
    ids, found = tokens(3, 2, 40), {}
    for dtype in (None, torch.float32, torch.bfloat16):
        net = network(layer_pattern=pattern).float()
        net.dtype, seen = dtype, []
        hook = net.blocks[0].register_forward_hook(
            lambda module, inputs, out, seen=seen: seen.append(out.dtype)
        )
        loss = net(ids[:, :-1], ids[:, 1:]).mean()
        hook.remove()
        loss.backward()
        assert seen == [dtype or torch.float32]
        assert {t.dtype for p in net.parameters() for t in (p, p.grad)} | {loss.dtype} == {
            torch.float32
        }
        found[dtype] = torch.cat(
            [loss.detach()[None], *(p.grad.flatten() for p in net.parameters())]
        )
    assert torch.equal(found[None], found[torch.float32])
    off = (found[torch.bfloat16] - found[None]).norm() / found[None].norm()
    assert 1e-5 < off < 0.03


def test_rotary_positions_are_relative_and_keep_norms():
    torch.manual_seed(3)
    q, k = torch.randn(2, 1, 6, 1, 8, dtype=torch.float64)
    positions = torch.arange(6)
    angles = [T.rotation(positions + shift, 8, 1e4, [], q.dtype) for shift in (0, 11)]
    at, later = (T.rotate(q, *turn) for turn in angles)
    key_at, key_later = (T.rotate(k, *turn) for turn in angles)
    products = torch.einsum("bihd,bjhd->ij", at, key_at)
    assert (
        products - torch.einsum("bihd,bjhd->ij", later, key_later)
    ).abs().max() < 1e-5  # angles are float32
    assert (at.norm(dim=-1) - q.norm(dim=-1)).abs().max() < 1e-6
    assert (
        products - torch.einsum("bihd,bjhd->ij", q, k)
    ).abs().max() > 0.1  # along time, not along heads


def test_short_conv_against_conv1d_and_across_documents():
    torch.manual_seed(4)
    x, weight = torch.randn(2, 10, 6, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)
    one = torch.zeros(2, 10, dtype=torch.int64)

    def conv(tokens, doc):  # nothing before the first token
        pad = torch.nn.functional.pad
        return T.short_conv(pad(tokens, (0, 0, 3, 0)), weight, pad(doc, (3, 0), value=-1))

    expected = torch.nn.functional.conv1d(x.mT, weight.mT[:, None], padding=3, groups=6)[
        ..., :10
    ].mT
    assert (conv(x, one) - torch.nn.functional.silu(expected)).abs().max() < 1e-12
    two = torch.tensor([0] * 4 + [1] * 6).expand(2, 10)
    apart = torch.cat([conv(x[:, a:b], two[:, a:b]) for a, b in ((0, 4), (4, 10))], dim=1)
    assert (conv(x, two) - apart).abs().max() == 0


def test_hashed_pairs_and_triples_by_hand():
    """Rows of the table by Python's integers; nothing is seen across the start of a document."""
    net = network(5, bigram_vocab_size=50)
    ids = tokens(5, 2, 40)
    context = net.context(ids)
    found = net.ngrams(context.recent, context.doc)
    for row, text in enumerate(ids.tolist()):
        for place, token in enumerate(text):
            start = max(at for at in range(place + 1) if text[at] == 1)
            before = [text[place - back] if place - back >= start else 1 for back in (1, 2)]
            pair = (36313 * token) ^ (27191 * before[0])
            triple = pair ^ (51647 * before[1])
            expected = [net.ngram_embed[pair % 50], net.ngram_embed[50 + triple % 50]]
            assert torch.equal(found[row, place], torch.cat(expected))


def test_hashed_triples_spread():
    """A random function would leave 36.8% of as many rows as keys empty: 1 / e."""
    net = T.GPT(config(bigram_vocab_size=4096))
    ids = torch.arange(2, 18)
    triples = torch.cartesian_prod(ids, ids, ids)  # neighbouring ids, which a weak hash maps alike
    doc = torch.zeros(4096, 4, dtype=torch.long)
    recent = F.pad(triples, (1, 0), value=1)
    net.ngram_embed.data = torch.arange(8192.0)[:, None].expand(-1, T.BIGRAM_DIM)
    rows = net.ngrams(recent, doc)[:, 0, [0, T.BIGRAM_DIM]]
    assert rows[:, 0].unique().numel() > 240  # of 256 pairs; a random function has 248
    assert rows[:, 1].min() >= 4096 and abs(rows[:, 1].unique().numel() / 4096 - 0.632) < 0.05


@pytest.mark.parametrize("light", [False, True])
def test_gdn_layer_against_the_recurrence(light):
    """The whole mixer, written out a second time on top of gdn_recurrent."""
    net = network(5, gdn_light=light)
    layer, ids = net.mixers[0], tokens(5, 2, 40)
    sizes = (16, 16, 32) if light else (32, 32, 32, 32)
    first = ids == 1
    doc = first.int().cumsum(1)
    x = torch.randn(2, 40, 32, dtype=torch.float64)
    q, k, v, *gate = torch.nn.functional.linear(x, layer.w_qkvg).split(sizes, dim=-1)
    parts = []
    for stream, weight in zip((q, k, v), layer.conv.split(sizes[:3], dim=1), strict=True):
        padded = torch.nn.functional.pad(stream, (0, 0, 3, 0))
        y = torch.zeros_like(stream)
        for t in range(40):
            for tap in range(4):
                source = t - 3 + tap
                if source >= 0:
                    y[:, t] += (
                        (doc[:, source] == doc[:, t])[:, None] * weight[tap] * padded[:, t + tap]
                    )
        parts.append((y * torch.sigmoid(y)).view(2, 40, 4, -1))
    q, k, v = parts
    q, k = (
        q / (q.square().sum(-1, keepdim=True) + 1e-6).sqrt(),
        k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt(),
    )
    a, b = torch.nn.functional.linear(x, layer.ab).chunk(2, dim=-1)
    g = -layer.A_log.exp() * torch.log1p(torch.exp(a + layer.dt_bias))
    g = torch.where(first[..., None], -60.0, g)
    o, _ = gdn_recurrent(q / q.size(-1) ** 0.5, k, v, g, torch.sigmoid(b))
    o = o / (o.square().mean(-1, keepdim=True) + torch.finfo(torch.float64).eps).sqrt() * layer.norm
    o = o.flatten(2)
    if not light:
        o = o * torch.nn.functional.silu(gate[0])
    expected = torch.nn.functional.linear(o, layer.w_o)
    assert (layer(x, net.context(ids)) - expected).abs().max() < 1e-9


def test_gdn_initialisation_is_flas():
    torch.manual_seed(6)
    layer = T.GatedDeltaNet(dataclasses.replace(config(), model_dim=4096, num_heads=2048))
    decay, step = layer.A_log.exp(), torch.nn.functional.softplus(layer.dt_bias)
    assert 0.0099 < decay.min() < 0.2 and 15.8 < decay.max() <= 16.0
    assert 0.00099 < step.min() and step.max() < 0.101
    alpha = torch.exp(-decay * step).sort().values
    quantiles = [alpha[int(share * len(alpha))].item() for share in (0.05, 0.5, 0.95)]
    assert quantiles == pytest.approx([0.475, 0.940, 0.996], abs=0.04)  # of 2,048 draws
    assert torch.isfinite(layer.A_log).all()


def test_the_seeds_hybrid_has_its_layers_and_its_size():
    cfg = T.model_config(T.Settings(), 1024, 1)
    assert cfg.layers.split() == ["g"] * 5 + ["s1"] + ["g"] * 5 + ["s1"]
    net = T.GPT(cfg)
    count = lambda module: sum(param.numel() for param in module.parameters())  # noqa: E731
    assert count(net.mixers[0]) == 1_325_136  # as fla's GatedDeltaNet, gdn-model notes section 1
    assert count(net.mixers[5]) == 786_432 + 8  # 8 query heads, 4 key/value heads, a gain a head
    assert count(net.blocks[0]) == 2 * 512 * 1536 + 4 * 512
    assert len(net.mixers) == 11


def test_losses_are_softcapped_cross_entropy_and_masked_targets_are_zero():
    net, ids = network(10), tokens(10, 2, 12)
    targets = tokens(11, 2, 12)
    targets[1, 5:] = -1
    logits = net(ids)
    assert logits.abs().max() < 30
    losses = net(ids, targets)
    expected = -torch.log_softmax(logits, -1).gather(-1, targets.clamp_min(0)[..., None])[..., 0]
    assert (losses - expected * (targets >= 0)).abs().max() < 1e-12
    assert losses[1, 5:].abs().max() == 0


def test_a_fresh_network_is_uniform():
    torch.manual_seed(12)
    net = T.GPT(config(embed_init_std=0.001))
    losses = net(tokens(12, 2, 20), tokens(13, 2, 20))
    assert losses.mean().item() == pytest.approx(math.log(64), abs=0.02)


def train_through_the_switch(backend):
    """Losses of seven steps; from the fifth on the weights are quantized to 3 bits."""
    torch.manual_seed(16)
    net = T.GPT(config(layer_pattern="g s"))
    add_noise(net, 0.05)
    model = net
    if backend != "eager":
        model = torch.compile(net, backend=backend, dynamic=False, fullgraph=True)
    table = {
        "matrix": {"bits": 3, "clip_sigmas": 4.0},
        "embedding": {"bits": 8, "clip_sigmas": 20.0},
    }
    optimizer = torch.optim.SGD(net.parameters(), lr=0.001)
    losses = []
    for at in range(7):
        steady = (
            torch.compiler.set_stance("fail_on_recompile")
            if backend != "eager" and at
            else contextlib.nullcontext()
        )
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
