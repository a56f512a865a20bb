"""GPTQ of quantize.py against a textbook's form, its sums of inputs against hooks."""

import collections

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_family import EVERYTHING, network, tokens

import quantize as script

pytestmark = pytest.mark.usefixtures("one_thread")


def correlated(samples, width, seed=0, rank=None):
    """H = sum x x^T over inputs x (samples, width) float64 that share a few directions, of sizes
    over a decade.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, rank or max(1, width // 3), generator=generator, dtype=torch.float64)
    x = x @ torch.randn(x.shape[1], width, generator=generator, dtype=torch.float64)
    x += 0.3 * torch.randn(samples, width, generator=generator, dtype=torch.float64)
    x *= torch.logspace(-0.5, 0.5, width, dtype=torch.float64)[
        torch.randperm(width, generator=generator)
    ]
    return x.mT @ x


def weights(rows, width, seed=1):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def obq(w, scale, hessian):
    """The textbook's way (Optimal Brain Quantization, arXiv 2208.11580, section 4), in numpy
    float64.

    One column after the other is rounded; the rest are moved to where they make good its error the
    best; then it is
    eliminated from the inverse Hessian. No blocks, no Cholesky factor.
    """
    w, scale, h = w.double().numpy().copy(), scale.item(), hessian.double().numpy()
    inverse = np.linalg.inv(h + (0.1 * np.diag(h).mean() + 1e-9) * np.eye(len(h)))
    codes = np.zeros_like(w)
    for at in range(len(h)):
        codes[:, at] = np.rint(w[:, at] / (scale or 1.0))
        error = (w[:, at] - codes[:, at] * scale) / inverse[at, at]
        w -= np.outer(error, inverse[at])
        inverse -= np.outer(inverse[:, at], inverse[at]) / inverse[at, at]
    return torch.from_numpy(codes).to(torch.int32)


@pytest.mark.parametrize(
    ("rows", "width", "samples", "bits"),
    [
        (1, 40, 100, 4),
        (16, 129, 300, 3),
        (20, 300, 1000, 6),
        (4, 520, 2000, 8),
    ],
)
def test_gptq_is_the_textbook_column_by_column(rows, width, samples, bits):
    w, hessian = weights(rows, width), correlated(samples, width)
    codes, scale = script.quantize(w, bits, 3.0)
    before = w.clone(), scale.clone(), hessian.clone()
    got = script.gptq(w, scale, hessian)
    assert got.dtype == torch.int32 and got.shape == (rows, width)
    assert torch.equal(got, obq(w, scale, hessian))
    assert not torch.equal(got, codes)
    assert all(torch.equal(old, new) for old, new in zip(before, (w, scale, hessian), strict=True))


def test_gptq_of_inputs_that_are_not_correlated_rounds_to_nearest():
    w = weights(30, 200)
    codes, scale = script.quantize(w, 5, 4.0)
    for hessian in (torch.eye(200), torch.zeros(200, 200), torch.diag(torch.rand(200) + 0.1)):
        assert torch.equal(script.gptq(w, scale, hessian), codes)


def test_dead_inputs_are_rounded_to_nearest_and_move_no_other():
    w, hessian, dead = weights(12, 140), correlated(500, 140), [0, 3, 77, 138]
    hessian[dead] = 0
    hessian[:, dead] = 0
    codes, scale = script.quantize(w, 4, 3.0)
    got = script.gptq(w, scale, hessian)
    assert torch.equal(got[:, dead], codes[:, dead]) and torch.equal(got, obq(w, scale, hessian))
    other = w.clone()
    other[:, dead] = 5.0
    live = [at for at in range(140) if at not in dead]
    assert torch.equal(script.gptq(other, scale, hessian)[:, live], got[:, live])


def test_gptq_of_zeros():
    hessian = correlated(100, 24)
    scale = script.quantize(torch.zeros(18, 24), 4, 3.0)[1]
    assert scale.item() == 2**-24 and not script.gptq(torch.zeros(18, 24), scale, hessian).any()


# ----------------------------------------------------------------------------------------- Hessians
def hook_sums(net, batches):
    """name -> sum x x^T, float64, by hooks that know where each weight of the model is used."""
    names, sums = (
        {id(param): name for name, param in net.named_parameters()},
        collections.defaultdict(float),
    )

    def add(weight, x):
        x = x.detach().double().flatten(0, -2)
        sums[names[id(weight)]] = sums[names[id(weight)]] + x.mT @ x

    def mixer(module, args):
        x, rest = args[0], args[1:]
        if hasattr(module, "w_qkv"):
            add(module.w_qkv, x)
        else:
            add(module.w_qkvg, x)
            add(module.ab, x)
        kept = module.w_o.detach().clone()
        module.w_o.data.copy_(torch.eye(len(kept)))  # then the module's output is w_o's input
        add(module.w_o, module.forward(x, *rest))
        module.w_o.data.copy_(kept)

    def mlp(module, args):
        (x,) = args
        add(module.w_up, x)
        kept = module.w_down.detach().clone()
        module.w_down.data = torch.eye(kept.size(1))  # then the module's output is w_down's input
        add(module.w_down, module.forward(x))
        module.w_down.data = kept
        if module.kind == "bio_soft":
            h = script.oscillate(F.linear(x, module.w_up.to(x.dtype)), module.wave)
            volt = torch.sigmoid(F.linear(h, module.w_gate.to(x.dtype)))
            soft = torch.sigmoid(5.0 * (volt - script.BIO_THRESHOLD))
            add(module.w_gate, h)
            add(module.w_mix, h * soft)

    hooks = [each.register_forward_pre_hook(mixer) for each in net.mixers]
    hooks += [block.mlp.register_forward_pre_hook(mlp) for block in net.blocks]
    hooks.append(
        net.final_norm.register_forward_hook(
            lambda module, args, out: add(net.embed if net.head is None else net.head, out)
        )
    )
    for ids in batches:
        net(ids)
        if hasattr(net, "w_ngram"):
            context = net.context(ids)
            add(net.w_ngram, net.ngrams(context.recent, context.doc))
    for hook in hooks:
        hook.remove()
    return sums


NETS = {
    "D's layers": dict(layer_pattern="g s a"),
    "GDN shared": dict(layer_pattern="g1 g1 s"),
    "shared": dict(layer_pattern="g S1 g S1 s1"),
    "untied": dict(tie_embeddings=False),
    **{kind: dict(mlp=kind) for kind in ("leaky_relu2", "gelu", "swiglu", "bio", "bio_soft")},
    "everything": EVERYTHING,
}


@torch.no_grad()
@pytest.mark.parametrize("kind", NETS)
def test_sums_of_inputs_are_those_that_hooks_make(kind):
    net = network("plain", torch.float32, **NETS[kind])
    batches = [tokens(seed) for seed in range(3)]
    plain = [net(ids) for ids in batches]
    inputs = script.InputSums(net)
    with inputs:
        tapped = [net(ids) for ids in batches]
    assert all(torch.equal(one, other) for one, other in zip(plain, tapped, strict=True))
    expected = hook_sums(net, batches)
    assert inputs.sums.keys() - expected.keys() <= {"mixers.0.conv"}
    for name, want in expected.items():
        got = inputs.sums[name].double()
        assert (got - want).abs().max() <= 2e-6 * want.abs().max(), name
    # All that the artifact quantizes has one, but for tables that are looked up.
    coded = {
        name for name, w in net.named_parameters() if script.tensor_class(name, w) != "control"
    }
    looked_up = {"positions_embed", "ngram_embed", *(["embed"] if net.head is not None else [])}
    assert coded - expected.keys() == coded & looked_up
