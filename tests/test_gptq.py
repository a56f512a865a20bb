"""GPTQ of quantize.py against a textbook's form, its sums of inputs against hooks."""

import collections

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_family import CHOICES, network, tokens

import quantize as script


def correlated(samples, width):
    """Return sum x x^T over inputs x (samples, width) that share a few directions, of sizes over a decade."""
    random = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(shape, generator=random, dtype=torch.float64)

    x = randn(samples, width // 3) @ randn(width // 3, width) + 0.3 * randn(samples, width)
    x *= torch.logspace(-0.5, 0.5, width, dtype=torch.float64)
    return x.mT @ x


def weights(rows, width):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1))


def obq(w, scale, hessian):
    """Return codes the textbook's way (Optimal Brain Quantization, arXiv 2208.11580, section 4), in float64.

    One column after the other is rounded; the rest are moved to where they make good its error the
    best; then it is eliminated from the inverse Hessian. No blocks, no Cholesky factor.
    """
    w, scale, h = w.double().numpy().copy(), scale.item(), hessian.double().numpy()
    inverse = np.linalg.inv(h + (0.1 * np.diag(h).mean() + 1e-9) * np.eye(len(h)))
    codes = np.zeros_like(w)
    for at in range(len(h)):
        codes[:, at] = np.rint(w[:, at] / scale)
        error = (w[:, at] - codes[:, at] * scale) / inverse[at, at]
        w -= np.outer(error, inverse[at])
        inverse -= np.outer(inverse[:, at], inverse[at]) / inverse[at, at]
    return torch.from_numpy(codes).to(torch.int32)


SIZES = [(1, 40, 100, 4), (16, 129, 300, 3), (20, 300, 1000, 8)]


@pytest.mark.parametrize(("rows", "width", "samples", "bits"), SIZES)
def test_gptq_is_the_textbook_column_by_column(rows, width, samples, bits):
    """Inputs that are dead are rounded to nearest, and move no other."""
    w, hessian = weights(rows, width), correlated(samples, width)
    dead = [0, 3, width - 2]
    hessian[dead] = 0
    hessian[:, dead] = 0
    codes, scale = script.quantize(w, bits, 3.0)
    before = w.clone(), hessian.clone()
    got = script.gptq(w, scale, hessian)
    assert torch.equal(w, before[0]) and torch.equal(hessian, before[1])
    assert got.dtype == torch.int32 and torch.equal(got, obq(w, scale, hessian))
    assert torch.equal(got[:, dead], codes[:, dead]) and not torch.equal(got, codes)


# ----------------------------------------------------------------------------------------- Hessians
@torch.no_grad()
@pytest.mark.parametrize("choice", CHOICES)
def test_sums_of_inputs_are_those_of_each_product(choice):
    """What the artifact quantizes has one, but for tables that are looked up."""
    net = network(choice, torch.float32)
    names = {id(param): name for name, param in net.named_parameters()}
    expected = collections.defaultdict(float)
    linear = F.linear

    def counted(x, weight):
        rows = x.double().flatten(0, -2)
        expected[names.get(id(weight))] += rows.mT @ rows
        return linear(x, weight)

    batches = [tokens(seed) for seed in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "linear", counted)
        plain = [net(ids) for ids in batches]
    inputs = script.InputSums(net)
    with inputs:
        assert all(
            torch.equal(net(ids), logits) for ids, logits in zip(batches, plain, strict=True)
        )
    for name, found in inputs.sums.items():
        want = expected[name]
        assert (found - want).abs().max() <= 2e-6 * want.abs().max(), name
    tables = {"positions_embed", "ngram_embed", "embed"}
    tables -= {"embed"} if net.head is None else set()
    coded = {n for n, w in net.named_parameters() if script.tensor_class(n, w) != "control"}
    assert coded - tables <= inputs.sums.keys() and None not in expected
