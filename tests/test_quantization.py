"""Section quantization: the quantizer against closed forms and float64; weights under QAT are the exporter's."""

import numpy as np
import pytest
import torch

import train_gpt as script


def rule(bits, clip_sigmas=8.0):
    """Return an entry of a QuantTable."""
    return {"bits": bits, "clip_sigmas": clip_sigmas}


TABLE = {"matrix": rule(6, 12.85), "embedding": rule(8, 20.0)}


def random_rows(rows=40, columns=96):
    """Return rows whose sizes span six decades."""
    random = torch.Generator().manual_seed(0)
    return torch.randn(rows, columns, generator=random) * torch.logspace(-4, 2, rows)[:, None]


def test_steps_by_hand():
    # root mean square 1, 31 steps are 15.5 of it, so a step is 0.5: +-1 is +-2 steps
    codes, scale = script.quantize(torch.tensor([[1.0, -1.0, 1.0, -1.0]]), **rule(6, 15.5))
    assert scale.tolist() == [0.5] and codes.tolist() == [[2, -2, 2, -2]]
    # root mean square 2 (one 4 in four), step 2 / 31: nothing is clipped, so the 4 is 62 steps
    codes, scale = script.quantize(torch.tensor([[4.0, 0.0], [0.0, 0.0]]), **rule(6, 1.0))
    assert scale.item() == np.float16(2 / 31) and codes.tolist() == [[62, 0], [0, 0]]
    # an outlier of 900 root mean squares is a code beyond 16 bits
    w = torch.ones(1024, 1024)
    w[3, 5] = -1e4
    codes, scale = script.quantize(w, **rule(8, 6.0))
    assert codes[3, 5] < -20_000 and abs(codes[3, 5] * scale + 1e4) <= 0.51 * scale
    for w in (torch.zeros(16, 16), torch.full((16, 16), 1e-9)):  # below the smallest float16
        codes, scale = script.quantize(w, **rule(6))
        assert scale.tolist() == [2**-24] and not codes.any()
    table = script.quant_table(5, 1.5)
    assert table == {"matrix": rule(5, 12.0), "embedding": rule(8, 9.0)}


@pytest.mark.parametrize("clip_sigmas", [0.5, 12.85])
@pytest.mark.parametrize("bits", [2, 5, 8])
def test_against_float64(bits, clip_sigmas):
    codes, scale = script.quantize(random_rows(), bits, clip_sigmas)
    exact = random_rows().double().numpy()
    want = clip_sigmas * np.sqrt((exact**2).mean()) / (2 ** (bits - 1) - 1)
    assert (codes.dtype, codes.shape) == (torch.int32, (40, 96))
    assert (scale.dtype, scale.shape) == (torch.float16, (1,))
    # one rounding to float16, no floor
    assert abs(scale.item() - want) <= max(want * 2.0**-11, 2.0**-25) * 1.001
    steps = exact / scale.item()
    decided = np.abs(np.abs(steps % 1 - 0.5)) > 1e-4  # float32 may break a tie the other way
    assert decided.mean() > 0.99
    assert np.array_equal(codes.numpy()[decided], np.rint(steps)[decided])


def test_qat_and_the_exporter_have_the_same_weights_bit_for_bit():
    """What stands in the network inside `quantized`, against numpy's product of quantize_all's codes."""
    weights = {
        "w_plain": random_rows(),
        "w_deep": random_rows().reshape(40, 4, 24),
        "embed": -torch.ones(16, 16),
        "w_bfloat": random_rows().to(torch.bfloat16),
    }
    net = torch.nn.Module()
    net.params = torch.nn.ParameterDict(weights)
    coded = script.quantize_all(net.state_dict(), TABLE)
    with script.quantized(net, TABLE):
        for name, w in weights.items():
            part = coded[f"params.{name}"]
            assert part.bits == TABLE[script.tensor_class(name, w)]["bits"]
            assert part.codes.shape == (len(w), w[0].numel())
            product = part.codes.numpy().astype(np.float32) * part.scale.numpy().astype(np.float32)
            expected = torch.from_numpy(product).reshape(w.shape).to(w.dtype)
            found = net.params[name].detach()
            assert found.dtype == w.dtype
            # also -0.0
            assert found.float().numpy().tobytes() == expected.float().numpy().tobytes()


@pytest.mark.parametrize(
    ("name", "shape", "kind"),
    [
        ("w_up", (16, 16), "matrix"),
        ("w_up", (15, 16), "control"),
        ("blocks.0.w_patch", (512, 4, 4), "matrix"),
        ("blocks.0.conv", (512, 512), "control"),
        ("mixers.0.ab", (16, 512), "embedding"),
        ("ngram_embed", (1024, 64), "embedding"),
        ("a.parametrizations.w_up.original", (16, 16), "matrix"),
        ("w_none", (32, 0), "control"),
    ],
)
def test_tensor_class(name, shape, kind):
    assert script.tensor_class(name, torch.zeros(shape)) == kind


def test_gradients_are_straight_through_and_masters_return():
    """The gradient of |w|^2 / 2 at the quantized weight, which is that weight, goes to w, which stays."""
    net = torch.nn.Module()
    net.w_up = torch.nn.Parameter(random_rows())
    net.gain = torch.nn.Parameter(torch.ones(96))
    codes, scale = script.quantize(random_rows(), **TABLE["matrix"])
    with pytest.raises(ZeroDivisionError), script.quantized(net, TABLE):
        half = (net.w_up * net.gain).square().sum() / 2
        half.backward(retain_graph=True)
        raise ZeroDivisionError
    assert torch.equal(net.w_up, random_rows()) and torch.equal(net.gain, torch.ones(96))
    assert torch.equal(net.w_up.grad, script.dequantize(codes, scale))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        half.backward()
