"""Section quantization: the quantizer against closed forms and float64; weights under QAT are the
exporter's.
"""

import numpy as np
import pytest
import torch

import train_gpt as script


def rule(bits, clip_sigmas=8.0):
    """An entry of a QuantTable."""
    return {"bits": bits, "clip_sigmas": clip_sigmas}


TABLE = {"matrix": rule(6, 12.85), "embedding": rule(8, 20.0)}


pytestmark = pytest.mark.usefixtures("one_thread")


def random_rows(rows=40, columns=96, seed=0):
    """Rows whose sizes span six decades."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) * torch.logspace(-4, 2, rows).unsqueeze(
        1
    )


def test_steps_by_hand():
    # root mean square 1, 31 steps are 15.5 of it, so a step is 0.5: +-1 is +-2 steps
    codes, scale = script.quantize(torch.tensor([[1.0, -1.0, 1.0, -1.0]]), **rule(6, 15.5))
    assert scale.tolist() == [0.5] and codes.tolist() == [[2, -2, 2, -2]]
    # root mean square 2 (one 4 in four), step 2 / 31: nothing is clipped, so the 4 is 62 steps
    codes, scale = script.quantize(torch.tensor([[4.0, 0.0], [0.0, 0.0]]), **rule(6, 1.0))
    assert scale.item() == np.float16(2 / 31) and codes.tolist() == [[62, 0], [0, 0]]


@pytest.mark.parametrize("clip_sigmas", [0.5, 2.5, 12.85])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_against_float64(bits, clip_sigmas):
    w = random_rows()
    codes, scale = script.quantize(w, bits, clip_sigmas)
    exact = w.double().numpy()
    qmax = 2 ** (bits - 1) - 1
    want = clip_sigmas * np.sqrt((exact**2).mean()) / qmax
    assert codes.dtype == torch.int32 and codes.shape == (40, 96)
    assert scale.dtype == torch.float16 and scale.shape == (1,)
    assert (
        abs(scale.item() - want) <= max(want * 2.0**-11, 2.0**-25) * 1.001
    )  # one rounding to float16, no floor
    steps = exact / scale.item()
    decided = np.abs(np.abs(steps % 1 - 0.5)) > 1e-4  # float32 may break a tie the other way
    assert decided.mean() > 0.99
    expected = np.rint(steps)
    assert np.abs(expected).max() > 5 * qmax / clip_sigmas  # rows of 100 times the mean size
    assert np.array_equal(codes.numpy()[decided], expected[decided])


def test_outliers_come_back():
    """One weight of up to 2,000 root mean squares beside equal or normal ones, at any size."""
    for size in (1e-3, 1.0, 1e3):
        for ordinary in (torch.full((512, 2048), size), size * torch.randn(512, 2048)):
            for factor in (11, 51, 1e4):
                w = ordinary.clone()
                w[3, 5] = -factor * size
                for bits, sigmas in ((6, 8.0), (8, 6.0)):
                    codes, scale = script.quantize(w, **rule(bits, sigmas))
                    error = (script.dequantize(codes, scale) - w).abs()
                    assert error.max() <= 0.51 * scale.item()  # half a step, and float32
                    assert codes[3, 5].abs() == codes.abs().max() < 2**24
    codes, _ = script.quantize(w, **rule(8, 6.0))
    assert codes.min() < -20_000  # beyond 16 bits is not far


def test_tensors_of_zeros_tiny_ones_and_constant_ones():
    for w in (
        torch.zeros(16, 16),
        torch.full((16, 16), 1e-9),
    ):  # the second one's scale is below the smallest float16
        codes, scale = script.quantize(w, **rule(6))
        assert scale.tolist() == [2**-24] and not codes.any()
    w = torch.full((16, 16), 0.3)
    assert torch.allclose(script.dequantize(*script.quantize(w, **rule(6))), w, rtol=0.14)
    w = torch.zeros(4, 16)
    w[3, 0] = 2e-3  # the records' floor of 1/31 would turn this tensor into zeros
    back = script.dequantize(*script.quantize(w, **rule(6, 12.85)))
    assert abs(back[3, 0].item() - 2e-3) < 2e-4 and back.count_nonzero() == 1


def test_qat_and_the_exporter_have_the_same_weights_bit_for_bit():
    """What stands in the network inside `quantized` against numpy's product of the codes that
    quantize_all gives.
    """
    weights = {
        "w_plain": random_rows(),
        "w_deep": random_rows().reshape(40, 4, 24),
        "embed": -torch.ones(16, 16),
        "w_bfloat": random_rows().to(torch.bfloat16),
    }
    net = torch.nn.Module()
    net.params = torch.nn.ParameterDict(weights)
    for table in (TABLE, {"matrix": rule(8, 3.0), "embedding": rule(4, 2.6)}):
        coded = script.quantize_all(net.state_dict(), table)
        with script.quantized(net, table):
            for name, w in weights.items():
                part = coded[f"params.{name}"]
                assert part.bits == table[script.tensor_class(name, w)]["bits"]
                assert part.codes.shape == (len(w), w[0].numel())
                product = part.codes.numpy().astype(np.float32) * part.scale.numpy().astype(
                    np.float32
                )
                fake, expected = (
                    net.params[name],
                    torch.from_numpy(product).reshape(w.shape).to(w.dtype),
                )
                assert fake.dtype == w.dtype and fake.shape == w.shape
                assert (
                    fake.detach().float().numpy().tobytes() == expected.float().numpy().tobytes()
                )  # also -0.0


def test_the_tables_of_the_settings():
    table = script.quant_table(script.Settings(matrix_bits=5))
    assert table == {
        "matrix": {"bits": 5, "clip_sigmas": 8.0},
        "embedding": {"bits": 8, "clip_sigmas": 6.0},
    }


def test_product_of_code_and_scale_is_exact_in_float32():
    # every positive float16, each the scale of a tensor of one code of up to 13 bits
    scales = torch.arange(1, 31744, dtype=torch.int32).to(torch.int16).view(torch.float16)[:, None]
    for code in (-127, 31, 113, 8191):
        codes = torch.full((len(scales), 1, 1), code, dtype=torch.int32)
        back = script.dequantize(codes, scales)
        assert torch.equal(back[..., 0].double(), scales.double() * code)


@pytest.mark.parametrize(
    ("name", "shape", "kind"),
    [
        ("blocks.0.w_q", (512, 512), "matrix"),
        ("w_up", (16, 16), "matrix"),
        ("w_up", (15, 16), "control"),
        ("blocks.0.w_patch", (512, 4, 4), "matrix"),
        ("blocks.0.w_conv", (512, 1, 4), "control"),
        ("w_embed", (64, 64), "matrix"),
        ("blocks.0.conv", (512, 512), "control"),
        ("mixers.0.ab", (16, 512), "embedding"),
        ("mixers.0.ab", (8, 512), "control"),
        ("embed", (1024, 512), "embedding"),
        ("ngram_embed", (1024, 64), "embedding"),
        ("positions_embed", (1024, 8), "control"),
        ("head", (1024, 512), "embedding"),
        ("blocks.0.norm", (512,), "control"),
        ("w_gain", (), "control"),
        ("w_none", (32, 0), "control"),
    ],
)
def test_tensor_class(name, shape, kind):
    assert script.tensor_class(name, torch.zeros(shape)) == kind


def fake(w, name):
    codes, scales = script.quantize(w, **TABLE["embedding" if name == "embed" else "matrix"])
    return script.dequantize(codes, scales).to(w.dtype)


class Net(torch.nn.Module):
    """An embedding tied to the output, two matrices and a gain, with quantized weights as an
    option.
    """

    def __init__(self, explicit=False):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.embed = torch.nn.Parameter(torch.randn(32, 24, generator=generator))
        self.w_up = torch.nn.Parameter(torch.randn(48, 24, generator=generator) * 0.2)
        self.w_down = torch.nn.Parameter(torch.randn(24, 48, generator=generator) * 0.2)
        self.gain = torch.nn.Parameter(torch.rand(24, generator=generator) + 0.5)
        self.explicit = explicit

    def weight(self, name):
        w = getattr(self, name)
        if not self.explicit:
            return w
        return w + (fake(w, name) - w).detach()

    def forward(self, tokens):
        embed = self.weight("embed")
        x = embed[tokens[:-1]] * self.gain
        x = x + torch.relu(x @ self.weight("w_up").T).square() @ self.weight("w_down").T
        return torch.nn.functional.cross_entropy(x @ embed.T, tokens[1:])


def gradients(net):
    return {name: parameter.grad.clone() for name, parameter in net.named_parameters()}


def test_swapping_is_the_straight_through_estimator():
    tokens = torch.randint(32, (65,), generator=torch.Generator().manual_seed(4))
    swapped, explicit, plain = Net().double(), Net(explicit=True).double(), Net().double()
    masters = {name: parameter.detach().clone() for name, parameter in swapped.named_parameters()}
    with script.quantized(swapped, TABLE):
        for name in ("embed", "w_up", "w_down"):
            assert torch.equal(getattr(swapped, name), fake(masters[name], name))
        assert torch.equal(swapped.gain, masters["gain"])
        loss = swapped(tokens)
        loss.backward()
    for name, parameter in swapped.named_parameters():
        assert torch.equal(parameter, masters[name]), name
    explicit_loss, plain_loss = explicit(tokens), plain(tokens)
    explicit_loss.backward()
    plain_loss.backward()
    assert abs(loss - explicit_loss) < 1e-12 < 1e-4 < abs(loss - plain_loss)
    got, want, other = gradients(swapped), gradients(explicit), gradients(plain)
    for name in want:
        size = want[name].abs().max()
        assert (got[name] - want[name]).abs().max() < 1e-12 * size, name
        assert (other[name] - want[name]).abs().max() > 1e-4 * size, name
    for net in (swapped, explicit):  # the optimizer steps the masters
        torch.optim.AdamW(net.parameters(), lr=0.01).step()
    for name, parameter in swapped.named_parameters():
        assert not torch.equal(parameter, masters[name])
        assert torch.allclose(
            parameter, dict(explicit.named_parameters())[name], rtol=0, atol=1e-9
        ), name


def test_masters_return_after_an_exception_and_backward_outside_is_refused():
    net = Net()
    before = [parameter.detach().clone() for parameter in net.parameters()]
    with pytest.raises(ZeroDivisionError), script.quantized(net, TABLE):
        assert not torch.equal(net.w_up, before[1])
        raise ZeroDivisionError
    assert all(
        torch.equal(parameter, old) for parameter, old in zip(net.parameters(), before, strict=True)
    )
    with script.quantized(net, TABLE):
        loss = net(torch.arange(32))
    assert all(
        torch.equal(parameter, old) for parameter, old in zip(net.parameters(), before, strict=True)
    )
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
