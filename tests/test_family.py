"""Every choice of the model by values: documents, gradients, QAT and artifact, formulas, one graph."""

import dataclasses
import math

import pytest
import test_model
import torch
import torch.nn.functional as F

import train_gpt as T
from conftest import add_noise

SETTINGS = dataclasses.replace(test_model.SETTINGS, layer_pattern="g s")


EVERYTHING = dict(
    layer_pattern="g g1 A1 s A1",
    unet_skips=True,
    mlp="swiglu",
    bigram_vocab_size=50,
    norm="layer rms_weight",
    positions="learned",
    tie_embeddings=False,
)
CHOICES = {
    "plain": {},
    "leaky_relu2": dict(mlp="leaky_relu2"),
    "gelu": dict(mlp="gelu"),
    "swiglu": dict(mlp="swiglu"),
    "bio": dict(mlp="bio"),
    "bio soft": dict(mlp="bio_soft"),
    "norms by layer": dict(norm="layer rms_weight rms", num_layers=3),
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
    "everything": EVERYTHING,
}
by_choice = pytest.mark.parametrize("choice", CHOICES)
# Compiled every day: together they take every branch of the network but the MLPs of one line; each
# choice by itself is compiled by `full`.
GRAPHS = {
    "lean": dict(
        mlp="bio", residual_mix=False, qk_gain_init=0.0, logit_softcap=0.0, positions="none"
    ),
    "bio soft, rope_dims": dict(mlp="bio_soft", rope_dims=4, layer_pattern="a"),
}


@pytest.fixture(autouse=True)
def half_of_the_events(monkeypatch):
    """The bio-MLP's voltage starts near 0.5: about half of the units have an event."""
    monkeypatch.setattr(T, "BIO_THRESHOLD", 0.5)


def network(choice="plain", dtype=torch.float64, **changes):
    """Return a network none of whose parameters is at a special value, so that every path counts."""
    torch.manual_seed(1)
    net = T.GPT(test_model.config(settings=SETTINGS, **{**CHOICES, **GRAPHS}[choice] | changes)).to(
        dtype
    )
    add_noise(net, 0.05)
    return net


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
    """Other tokens before it change nothing behind it, neither do later ones change earlier ones."""
    net, ids = network(choice), tokens()
    logits = net(ids)
    before, after = ids.clone(), ids.clone()
    before[-1, 1:20] = torch.randint(2, 64, (19,))
    after[-1, 20 + 1 :] = torch.randint(2, 64, (19,))
    assert (net(before)[-1, 20:] - logits[-1, 20:]).abs().max() < 1e-9
    assert (net(before)[-1, 1:20] - logits[-1, 1:20]).abs().max() > 1e-3
    assert (net(after)[-1, :21] - logits[-1, :21]).abs().max() < 1e-12


@by_choice
def test_gradients_are_finite_differences_with_and_without_checkpointing(choice):
    """Along one random direction of all parameters."""
    net, ids = network(choice), tokens()
    grads = gradients(net, ids)
    net.activation_checkpointing = True
    assert all(torch.equal(grad, grads[name]) for name, grad in gradients(net, ids).items())
    assert all(grad.abs().max() > 0 for grad in grads.values())
    torch.manual_seed(2)
    direction = {name: torch.randn_like(grad) for name, grad in grads.items()}
    losses = []
    with torch.no_grad():
        for step in (1e-6, -2e-6):
            for name, param in net.named_parameters():
                param.add_(step * direction[name])
            losses.append(net(ids, ids.roll(-1, 1)).sum().item())
    expected = sum((grads[name] * direction[name]).sum().item() for name in grads)
    assert (losses[0] - losses[1]) / 2e-6 == pytest.approx(expected, rel=2e-4, abs=2e-3)


@by_choice
def test_the_artifact_gives_back_the_network_that_qat_trained(choice, tmp_path):
    """QAT's forward pass and weights are those of the network that is rebuilt from the file."""
    net, ids = network(choice, torch.float32), tokens()
    rule = {"bits": 4, "clip_sigmas": 4.0}
    table = {"matrix": rule, "embedding": rule}
    with torch.no_grad():
        for name, param in net.named_parameters():  # control tensors as the file will hold them
            if T.tensor_class(name, param) == "control" and not name.endswith(T.FLOAT32_CONTROLS):
                param.copy_(param.half())
        with T.quantized(net, table):
            trained = net(ids)
            values = {name: param.clone() for name, param in net.named_parameters()}
        coded = T.quantize_all(net.state_dict(), table)
        facts = dict(settings=vars(net.config), tokenizer_sha256="", meta={})
        (tmp_path / "m.upar").write_bytes(T.pack_artifact(net.state_dict(), coded, **facts))
        header, tensors, _ = T.read_artifact(tmp_path / "m.upar")
        packed = T.GPT(T.GPTConfig(**header["settings"]))
        packed.load_state_dict(tensors)
        for name, param in packed.named_parameters():
            assert torch.equal(param, values[name]), name
        assert torch.equal(packed(ids), trained)
        assert (net(ids) - trained).abs().max() > 1e-3  # 4 bits are not for nothing


def oscillation(x, wave):
    return (wave[0] * x + wave[1]).sin() * x.tanh() + wave[2]


def soft_events(mlp, h):
    h = oscillation(h, mlp.wave)
    voltage = 1 / (1 + torch.exp(-(h @ mlp.w_gate.T)))
    strength = 1 / (1 + torch.exp(-5 * (voltage - 0.5)))
    return oscillation((h * strength) @ mlp.w_mix.T, mlp.mix_wave)


FORMULAS = {
    "relu2": lambda mlp, h: h.clamp(min=0) ** 2,
    "leaky_relu2": lambda mlp, h: torch.where(h > 0, h, h / 2) ** 2,
    "gelu": lambda mlp, h: h / 2 * (1 + torch.erf(h / math.sqrt(2))),
    "swiglu": lambda mlp, h: h[..., :64] / (1 + torch.exp(-h[..., :64])) * h[..., 64:],
    "bio": lambda mlp, h: oscillation(h, mlp.wave),
    "bio_soft": soft_events,
}


@pytest.mark.parametrize("kind", FORMULAS)
def test_mlps_against_formulas(kind):
    torch.manual_seed(4)
    mlp = T.MLP(test_model.config(settings=SETTINGS, mlp=kind)).double()
    mlp.w_down.data.normal_()
    x = torch.randn(3, 5, 32, dtype=torch.float64)
    expected = FORMULAS[kind](mlp, x @ mlp.w_up.T) @ mlp.w_down.T
    assert (mlp(x) - expected).abs().max() < 1e-12
    assert mlp.w_up.splits == ((64, 64) if kind == "swiglu" else (64,))


def norm(x):
    return x / (x.square().mean(-1, keepdim=True) + torch.finfo(torch.float64).eps).sqrt()


def rotated(x):
    """Return heads (H, T, 64) with rotary positions, whose angles are float32."""
    rates = 10000.0 ** -(torch.arange(0, 64, 2) / 64)
    angle = torch.outer(torch.arange(x.size(1)).float(), rates).double()
    one, two = x.split(32, dim=-1)
    parts = (one * angle.cos() - two * angle.sin(), one * angle.sin() + two * angle.cos())
    return torch.cat(parts, -1)


def test_the_baseline_preset_is_parameter_golfs():
    """Its 17,059,912 parameters, and its forward pass written out from openai/parameter-golf's train_gpt.py."""
    presets = {"ARCH_MODE": T.ARCH_PRESETS}
    settings = T.load_settings(T.Settings, {"ARCH_MODE": "baseline"}, presets=presets)
    torch.manual_seed(8)
    net = T.GPT(T.model_config(settings, 1024, 1)).double()
    assert sum(param.numel() for param in net.parameters()) == 17_059_912
    ids = torch.randint(2, 1024, (1, 200))
    # Logits of deviation 0.005 sqrt(512); its logs say 6.9357.
    uniform = math.log(1024) + 512 * 0.005**2 / 2
    assert net(ids, ids.roll(-1, 1)).mean().item() == pytest.approx(uniform, abs=0.03)
    ids = ids[:, :24]
    add_noise(net, 0.02)
    x = x0 = norm(net.embed[ids[0]])
    skips = []
    for at, (block, mixer) in enumerate(zip(net.blocks, net.mixers, strict=True)):
        if at >= 4 and skips:
            x = x + net.skip[len(skips) - 1] * skips.pop()
        x = block.mix[0] * x + block.mix[1] * x0
        qkv = norm(x) @ mixer.w_qkv.T
        q, k, v = (
            part.unflatten(1, (-1, 64)).transpose(0, 1) for part in qkv.split([512, 256, 256], 1)
        )
        q, k = rotated(norm(q)) * mixer.q_gain[:, None, None], rotated(norm(k))
        y = F.scaled_dot_product_attention(
            q[None], k[None], v[None], is_causal=True, enable_gqa=True
        )
        x = x + block.mixer_scale * (y[0].transpose(0, 1).flatten(1) @ mixer.w_o.T)
        h = torch.relu(norm(x) @ block.mlp.w_up.T).square()
        x = x + block.mlp_scale * (h @ block.mlp.w_down.T)
        if at < 4:
            skips.append(x)
    expected = 30 * torch.tanh(norm(x) @ net.embed.T / 30)
    assert (net(ids)[0] - expected).abs().max() < 1e-5


daily = [(choice, False) for choice in ("plain", *GRAPHS)]


@pytest.mark.parametrize(
    ("choice", "recompute"),
    [*daily, *(pytest.param(choice, True, marks=pytest.mark.full) for choice in CHOICES)],
)
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
