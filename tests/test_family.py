"""Every choice of the model by values: references, caches, documents, checkpointing, QAT, artifact,
one graph.
"""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from test_model import config

import train_gpt as T
from conftest import add_noise

SETTINGS = T.Settings(
    layer_pattern="g s",
    model_dim=32,
    num_heads=4,
    num_kv_heads=2,
    mlp_mult=2.0,
    attn_window=7,
    qk_gain_init=1.5,
    train_seq_len=64,
)
CHOICES = {
    "plain": {},
    "leaky_relu2": dict(mlp="leaky_relu2"),
    "gelu": dict(mlp="gelu"),
    "swiglu": dict(mlp="swiglu"),
    "bio": dict(mlp="bio"),
    "bio soft": dict(mlp="bio_soft"),
    "rms_weight": dict(norm="rms_weight"),
    "layer": dict(norm="layer"),
    "norms by layer": dict(norm="layer rms", num_layers=3),
    "learned": dict(positions="learned"),
    "none": dict(positions="none"),
    "rope_dims": dict(rope_dims=4),
    "untied": dict(tie_embeddings=False),
    "no qk norm": dict(qk_gain_init=0.0),
    "no mix": dict(residual_mix=False),
    "u-net": dict(unet_skips=True, num_layers=5),
    "bigram": dict(bigram_vocab_size=50),
    "no softcap": dict(logit_softcap=0.0),
    "full": dict(layer_pattern="a"),
    "shared layers": dict(layer_pattern="g S1 g S1 s1"),
    "light gdn": dict(gdn_light=True),
}
EVERYTHING = dict(
    layer_pattern="g g1 A1 s A1",
    unet_skips=True,
    mlp="swiglu",
    bigram_vocab_size=50,
    norm="layer rms_weight",
    positions="learned",
    tie_embeddings=False,
)
by_choice = pytest.mark.parametrize("choice", [*CHOICES, "everything"])
# Compiled every day: together they take every branch of the network but the MLPs of one line; each
# choice by itself is compiled by `full`.
GRAPHS = {
    "lean": dict(
        mlp="bio", residual_mix=False, qk_gain_init=0.0, logit_softcap=0.0, positions="none"
    ),
    "bio soft, rope_dims": dict(mlp="bio_soft", rope_dims=4, layer_pattern="a"),
}
by_graph = pytest.mark.parametrize(
    ("choice", "recompute"),
    [
        ("plain", False),
        ("everything", True),
        *((graph, False) for graph in GRAPHS),
        pytest.param("plain", True, marks=pytest.mark.full),
        *(
            pytest.param(choice, False, marks=pytest.mark.full)
            for choice in [*CHOICES, "everything"]
            if choice != "plain"
        ),
    ],
)


@pytest.fixture(autouse=True)
def half_of_the_events(monkeypatch):
    """The bio-MLP's voltage starts near 0.5: about half of the units have an event."""
    monkeypatch.setattr(T, "BIO_THRESHOLD", 0.5)


def network(choice="plain", dtype=torch.float64, **changes):
    """A network none of whose parameters is at a special value, so that every path counts."""
    torch.manual_seed(1)
    picked = {**CHOICES, **GRAPHS, "everything": EVERYTHING}[choice]
    net = T.GPT(config(settings=SETTINGS, **{**picked, **changes})).to(dtype)
    add_noise(net, 0.05)
    return net


def quantizer(bits, clip_sigmas):
    """An entry of a QuantTable."""
    return {"bits": bits, "clip_sigmas": clip_sigmas}


def tokens(seed=0, batch=2, length=40):
    torch.manual_seed(seed)
    ids = torch.randint(2, 64, (batch, length))
    ids[:, 0] = ids[0, length // 3] = ids[-1, length // 2] = 1
    return ids


def gradients(net, ids):
    net.zero_grad()
    net(ids, ids.roll(-1, 1)).sum().backward()
    return {name: param.grad.clone() for name, param in net.named_parameters()}


@by_choice
def test_nothing_passes_a_documents_start(choice):
    """Other tokens before it change nothing behind it, neither do later ones change what stands
    before them.
    """
    net, ids = network(choice), tokens()
    logits = net(ids)
    before, after = ids.clone(), ids.clone()
    before[-1, 1:20] = torch.randint(2, 64, (19,))
    after[-1, 20 + 1 :] = torch.randint(2, 64, (19,))
    assert (net(before)[-1, 20:] - logits[-1, 20:]).abs().max() < 1e-9
    assert (net(before)[-1, 1:20] - logits[-1, 1:20]).abs().max() > 1e-3
    assert (net(after)[-1, :21] - logits[-1, :21]).abs().max() < 1e-12


@by_choice
def test_checkpointing_gives_the_same_gradients(choice):
    net, ids = network(choice), tokens()
    expected = gradients(net, ids)
    assert all(grad.abs().max() > 0 for grad in expected.values())
    net.activation_checkpointing = True
    for name, grad in gradients(net, ids).items():
        assert torch.equal(grad, expected[name]), name


@by_choice
def test_gradients_are_finite_differences(choice):
    """Along one random direction of all parameters; the hard events' gradient is straight through,
    so not theirs.
    """
    net, ids = network(choice), tokens()
    grads = gradients(net, ids)
    params = dict(net.named_parameters())
    torch.manual_seed(2)
    direction = {name: torch.randn_like(param) for name, param in params.items()}
    expected, losses = sum((grads[name] * direction[name]).sum() for name in params), []
    with torch.no_grad():
        for sign in (1, -1):
            for name, param in params.items():
                param.add_(sign * 1e-6 * direction[name])
            losses.append(net(ids, ids.roll(-1, 1)).sum())
            for name, param in params.items():
                param.sub_(sign * 1e-6 * direction[name])
    assert (losses[0] - losses[1]).item() / 2e-6 == pytest.approx(
        expected.item(), rel=2e-4, abs=2e-3
    )


@by_choice
def test_the_artifact_gives_back_the_network_that_qat_trained(choice, tmp_path):
    """QAT's forward pass, the rebuilt network's forward pass, and the quantizer applied to each
    tensor by hand.
    """
    net, ids = network(choice, torch.float32), tokens()
    table = {"matrix": quantizer(4, 4.0), "embedding": quantizer(6, 5.0)}
    with torch.no_grad():
        for name, param in net.named_parameters():  # control tensors as the file will hold them
            if T.tensor_class(name, param) == "control":
                param.copy_(param.float() if name.endswith(T.FLOAT32_CONTROLS) else param.half())
    with T.quantized(net, table), torch.no_grad():
        trained = net(ids)
        values = {name: param.clone() for name, param in net.named_parameters()}
    coded = T.quantize_all(net.state_dict(), table)
    (tmp_path / "m.upar").write_bytes(
        T.pack_artifact(
            net.state_dict(), coded, settings=vars(net.config), tokenizer_sha256="", meta={}
        )
    )
    header, tensors, _ = T.read_artifact(tmp_path / "m.upar")
    packed = T.GPT(T.GPTConfig(**header["settings"]))
    packed.load_state_dict(tensors)
    assert {name for name, _ in packed.named_parameters()} == set(values)
    for name, param in packed.named_parameters():
        assert torch.equal(param, values[name]), name
    with torch.no_grad():
        assert torch.equal(packed(ids), trained)
        assert (net(ids) - trained).abs().max() > 1e-3  # 4 bits are not for nothing


@pytest.mark.parametrize("kind", ["relu2", "leaky_relu2", "gelu", "swiglu"])
def test_mlps_against_formulas(kind):
    torch.manual_seed(4)
    mlp = T.MLP(config(settings=SETTINGS, mlp=kind)).double()
    mlp.w_down.data.normal_()
    x = torch.randn(3, 5, 32, dtype=torch.float64)
    h = x @ mlp.w_up.T
    expected = {
        "relu2": lambda: h.clamp(min=0) ** 2,
        "leaky_relu2": lambda: torch.where(h > 0, h, h / 2) ** 2,
        "gelu": lambda: h / 2 * (1 + torch.erf(h / math.sqrt(2))),
        "swiglu": lambda: h[..., :64] / (1 + torch.exp(-h[..., :64])) * h[..., 64:],
    }[kind]() @ mlp.w_down.T
    assert (mlp(x) - expected).abs().max() < 1e-12
    assert mlp.w_up.splits == ((64, 64) if kind == "swiglu" else (64,))


@pytest.mark.parametrize("kind", ["bio", "bio_soft"])
def test_the_bio_mlp_against_the_seeds_formulas(kind, monkeypatch):
    """The voltage starts near 0.5: a threshold of 0.45 has units on both sides."""
    torch.manual_seed(5)
    monkeypatch.setattr(T, "BIO_THRESHOLD", 0.45)
    mlp = T.MLP(config(settings=SETTINGS, mlp=kind)).double()
    mlp.w_down = torch.nn.Parameter(
        torch.eye(len(mlp.wave[0]), dtype=torch.float64)
    )  # hidden units come out
    x = torch.randn(3, 5, 32, dtype=torch.float64)

    def osc(value, wave):
        return (wave[0] * value + wave[1]).sin() * value.tanh() + wave[2]

    h = osc(x @ mlp.w_up.T, mlp.wave)
    if kind == "bio":
        assert not hasattr(mlp, "w_gate") and (mlp(x) - h).abs().max() < 1e-12
        return
    volt = 1 / (1 + torch.exp(-(h @ mlp.w_gate.T)))
    strength = 1 / (1 + torch.exp(-5 * (volt - 0.45)))
    assert (mlp(x) - osc((h * strength) @ mlp.w_mix.T, mlp.mix_wave)).abs().max() < 1e-12


def wave_of(units):
    """omega, phi and b of some units as the bio-MLP draws them: (3, units)."""
    return T.init_wave(units).detach()


def test_oscillation_and_its_gradients_in_closed_form():
    torch.manual_seed(6)
    x, wave = torch.randn(50, 3, dtype=torch.float64, requires_grad=True), wave_of(3).double()
    wave.requires_grad_()
    T.oscillate(x, wave).sum().backward()
    angle = wave[0] * x + wave[1]
    assert (
        x.grad - (wave[0] * angle.cos() * x.tanh() + angle.sin() * (1 - x.tanh() ** 2))
    ).abs().max() < 1e-12
    by_phi = x.tanh() * angle.cos()
    expected = torch.stack([(x * by_phi).sum(0), by_phi.sum(0), torch.full((3,), 50.0)])
    assert (wave.grad - expected).abs().max() < 1e-11


def test_the_baseline_preset_is_parameter_golfs():
    """Its 17,059,912 parameters, and its forward pass written out from openai/parameter-golf's
    train_gpt.py.
    """
    settings = T.load_settings(
        T.Settings, {"ARCH_MODE": "baseline"}, presets={"ARCH_MODE": T.ARCH_PRESETS}
    )
    torch.manual_seed(8)
    net = T.GPT(T.model_config(settings, 1024, 1)).double()
    assert sum(param.numel() for param in net.parameters()) == 17_059_912
    shallow = T.GPT(T.model_config(dataclasses.replace(settings, num_layers=1), 1024, 1))
    assert all(param.numel() for param in shallow.parameters())  # one layer has no skip
    ids = torch.randint(2, 1024, (1, 1000))
    uniform = (
        math.log(1024) + 512 * 0.005**2 / 2
    )  # logits of deviation 0.005 sqrt(512); its logs say 6.9357
    assert net(ids, ids.roll(-1, 1)).mean().item() == pytest.approx(uniform, abs=0.01)
    ids = ids[:, :24]
    add_noise(net, 0.02)

    def norm(x):
        return x / (x.square().mean(-1, keepdim=True) + torch.finfo(torch.float64).eps).sqrt()

    def rotated(x):
        frequency = 1 / 10000.0 ** (torch.arange(0, 64, 2, dtype=torch.float32) / 64)
        angle = torch.outer(torch.arange(24, dtype=torch.float32), frequency).double()[None, None]
        one, two = x[..., :32], x[..., 32:]
        return torch.cat(
            (one * angle.cos() - two * angle.sin(), one * angle.sin() + two * angle.cos()), -1
        )

    x = x0 = norm(net.embed[ids])
    skips = []
    for at in range(9):
        block, mixer = net.blocks[at], net.mixers[at]
        if at >= 4 and skips:
            x = x + net.skip[len(skips) - 1] * skips.pop()
        x = block.mix[0] * x + block.mix[1] * x0
        y = norm(x)
        q, k, v = (y @ part.T for part in mixer.w_qkv.split([512, 256, 256]))
        q, k, v = (
            q.view(1, 24, 8, 64).mT.mT.transpose(1, 2),
            k.view(1, 24, 4, 64).transpose(1, 2),
            v.view(1, 24, 4, 64).transpose(1, 2),
        )
        q, k = rotated(norm(q)) * mixer.q_gain[None, :, None, None], rotated(norm(k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + block.mixer_scale * (y.transpose(1, 2).reshape(1, 24, 512) @ mixer.w_o.T)
        x = x + block.mlp_scale * (
            torch.relu(norm(x) @ block.mlp.w_up.T).square() @ block.mlp.w_down.T
        )
        if at < 4:
            skips.append(x)
    assert (
        net(ids) - 30 * torch.tanh(norm(x) @ net.embed.T / 30)
    ).abs().max() < 1e-5  # angles are float32


def test_overrides_stand_above_the_layout_and_the_settings():
    settings = dataclasses.replace(SETTINGS, arch_mode="llama")
    changed = T.model_config(settings, 64, 1, residual_mix=True, attn_window=9)
    assert (changed.residual_mix, changed.attn_window, changed.logit_softcap) == (True, 9, 0.0)
    with pytest.raises(TypeError, match="atn_window"):
        T.model_config(settings, 64, 1, atn_window=9)


@by_graph
def test_one_graph_without_breaks(choice, recompute):
    """Traced whole, with its backward pass, and called again without tracing; equal to eager."""
    net, ids = network(choice, torch.float32), tokens(length=20)
    expected = gradients(net, ids)
    torch.compiler.reset()
    net.activation_checkpointing = recompute
    model = torch.compile(net, backend="aot_eager", dynamic=False, fullgraph=True)
    for at in range(2):
        net.zero_grad()
        with torch.compiler.set_stance("fail_on_recompile" if at else "default"):
            model(ids, ids.roll(-1, 1)).sum().backward()
        for name, param in net.named_parameters():
            scale = expected[name].abs().max()
            assert (param.grad - expected[name]).abs().max() < 1e-4 * scale + 1e-6, name
