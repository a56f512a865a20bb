"""Section quantization: the quantizer, GPTQ and the steps' search against closed forms and float64 references; QAT."""

import numpy as np
import pytest
import torch

import train_gpt as script


def rule(bits, clip_sigmas=0.0, step="row", widen=1.0):
    """An entry of a QuantTable."""
    return {"bits": bits, "clip_sigmas": clip_sigmas, "step": step, "widen": widen}


TABLE = {"matrix": rule(6, 12.85), "embedding": rule(8, 20.0, "tensor")}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random_rows(rows=40, columns=96, seed=0):
    """Rows whose sizes span six decades."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) * torch.logspace(-4, 2, rows).unsqueeze(1)


def test_grid_points_are_their_own_codes():
    codes = torch.stack([torch.arange(-31, 32), torch.arange(31, -32, -1)])
    scales = torch.tensor([0.125, 0.003173828125])  # both float16 numbers
    got_codes, got_scales = script.quantize(codes * scales.unsqueeze(1), **rule(6))
    assert got_codes.dtype == torch.int8 and got_scales.dtype == torch.float16
    assert torch.equal(got_codes, codes.to(torch.int8))
    assert torch.equal(got_scales.float(), scales)


def test_sdclip_by_hand():
    # root mean square 1, clip 15.5, step 15.5 / 31 = 0.5: +-1 is +-2 steps
    codes, scales = script.quantize(torch.tensor([[1.0, -1.0, 1.0, -1.0]]), **rule(6, 15.5))
    assert scales.tolist() == [0.5] and codes.tolist() == [[2, -2, 2, -2]]
    # root mean square 2 (one 4 in four), clip 2, step 2 / 31: the 4 is clipped to 31 steps
    codes, scales = script.quantize(torch.tensor([[4.0, 0.0, 0.0, 0.0]]), **rule(6, 1.0))
    assert scales.item() == np.float16(2 / 31) and codes.tolist() == [[31, 0, 0, 0]]


@pytest.mark.parametrize("widen", [1.0, 1.7])
@pytest.mark.parametrize("step", ["row", "tensor"])
@pytest.mark.parametrize("clip_sigmas", [0.0, 2.5, 12.85])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_against_float64(bits, clip_sigmas, step, widen):
    w = random_rows()
    codes, scales = script.quantize(w, bits, clip_sigmas, step, widen)
    exact, qmax = w.double().numpy(), 2 ** (bits - 1) - 1
    alike = exact.reshape(1, -1) if step == "tensor" else exact
    clip = clip_sigmas * np.sqrt((alike**2).mean(1)) if clip_sigmas else np.abs(alike).max(1)
    want = clip * widen / qmax
    assert codes.dtype == torch.int8 and scales.dtype == torch.float16
    assert codes.shape == (40, 96) and scales.shape == want.shape == ((1,) if step == "tensor" else (40,))
    error = np.abs(scales.double().numpy() - want)
    assert (error <= np.maximum(want * 2.0**-11, 2.0**-25) * 1.001).all()  # one rounding to float16, no floor
    steps = exact / scales.double().numpy()[:, None]
    decided = np.abs(np.abs(steps % 1 - 0.5)) > 1e-4  # float32 may break a tie the other way
    assert decided.mean() > 0.99
    expected = np.clip(np.rint(steps), -qmax, qmax)
    assert np.array_equal(codes.numpy()[decided], expected[decided])


@pytest.mark.parametrize("clip_sigmas", [0.0, -1.0, 6.0])
def test_grid_steps_are_sixteenths_of_octaves(clip_sigmas):
    w = random_rows()
    codes, scales = script.quantize(w, 6, clip_sigmas, "grid")
    _, free = script.quantize(w, 6, clip_sigmas, "row")
    normal = free.double() > 2.0**-14  # below, float16 has fewer than 11 bits
    sixteenths = torch.round(16 * scales.double().log2())
    assert torch.equal((sixteenths / 16).exp2()[normal].half(), scales[normal])
    assert ((scales.double() / free.double()).log2()[normal].abs() <= 1 / 32 + 2e-3).all()  # the nearest of the grid
    assert torch.equal(codes, script.round_to(w, scales.float()[:, None], 6).to(torch.int8))
    assert len(set(scales.tolist())) > 20


@pytest.mark.parametrize("step", ["row", "grid", "tensor"])
def test_widen_is_a_factor_on_the_steps(step):
    w = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    for clip_sigmas in (0.0, 12.85, -1.0):
        scales = script.quantize(w, 6, clip_sigmas, step)[1]
        for octaves in (-1, 1, 3):  # powers of 2, which rounding to float16 and the grid leave as they are
            codes, wide = script.quantize(w, 6, clip_sigmas, step, 2.0**octaves)
            assert torch.equal(wide.float(), scales.float() * 2.0**octaves)
            assert torch.equal(codes, script.round_to(w, wide.float()[:, None], 6).to(torch.int8))


@pytest.mark.parametrize("step", ["row", "tensor"])
@pytest.mark.parametrize("bits", [2, 3, 4, 6])
def test_the_searched_clip_has_the_least_squared_error(bits, step):
    """Student's t with 3 degrees of freedom: against the largest weight, and against float64 over the same 37 clips."""
    random = np.random.default_rng(0)
    w = torch.from_numpy(random.standard_t(3, (24, 200)) * np.exp(random.normal(size=(24, 1)))).float()
    qmax, rows = 2 ** (bits - 1) - 1, w.double().reshape(1, -1) if step == "tensor" else w.double()

    def errors(clip_sigmas):
        back = script.dequantize(*script.quantize(w, bits, clip_sigmas, step)).double()
        return (back - w).square().reshape(rows.shape).sum(1)

    best = torch.full((len(rows),), float("inf"), dtype=torch.float64)
    for share in torch.linspace(0.1, 1.0, 37, dtype=torch.float64):
        scale = rows.abs().amax(1, keepdim=True) * share / qmax
        best = torch.minimum(best, ((rows / scale).round().clamp(-qmax, qmax) * scale - rows).square().sum(1))
    searched, largest = errors(-1.0), errors(0.0)
    assert (searched <= best * 1.005).all()  # steps are float16
    assert (searched <= largest * 1.001).all() and searched.sum() < (0.9 if bits < 6 else 0.999) * largest.sum()


@pytest.mark.parametrize("clip_sigmas", [0.0, 2.0, 12.85])
def test_error_is_at_most_half_a_step_inside_the_clip(clip_sigmas):
    w = random_rows(seed=1)
    codes, scales = script.quantize(w, **rule(6, clip_sigmas))
    step = scales.double().unsqueeze(1)
    back = script.dequantize(codes, scales).double()
    inside = w.double().abs() <= 31.5 * step
    assert ((back - w.double()).abs() <= step * (0.5 + 1e-5))[inside].all()
    assert torch.equal(back.abs()[~inside], (31 * step).expand_as(back)[~inside])
    assert (~inside).any() == (clip_sigmas == 2.0)


def test_rows_of_zeros_tiny_rows_and_constant_rows():
    w = torch.zeros(4, 16)
    w[1] = 1e-9  # its scale is below the smallest float16
    w[2] = 0.3
    w[3, 0] = 2e-3  # the records' floor of 1/31 would turn this row into zeros
    for clip_sigmas in (0.0, 12.85):
        codes, scales = script.quantize(w, **rule(6, clip_sigmas))
        assert scales[:2].tolist() == [0, 0] and not codes[:2].any()
        back = script.dequantize(codes, scales)
        assert torch.allclose(back[2], w[2], rtol=0.21)
        assert abs(back[3, 0].item() - 2e-3) < 2e-4 and not back[3, 1:].any()


def test_qat_and_the_exporter_have_the_same_weights_bit_for_bit():
    """What stands in the network inside `quantized` against numpy's product of the codes that quantize_all gives."""
    weights = {"w_plain": random_rows(), "w_deep": random_rows().reshape(40, 4, 24), "embed": -torch.ones(16, 16),
               "w_bfloat": random_rows().to(torch.bfloat16)}
    net = torch.nn.Module()
    net.params = torch.nn.ParameterDict(weights)
    for table in (TABLE, {"matrix": rule(8, -1.0, "grid"), "embedding": rule(4, 0.0, "row", 1.3)}):
        coded = script.quantize_all(net.state_dict(), table)
        with script.quantized(net, table):
            for name, w in weights.items():
                codes, scales, bits = coded[f"params.{name}"]
                assert bits == table[script.tensor_class(name, w)]["bits"] and codes.shape == (len(w), w[0].numel())
                product = codes.numpy().astype(np.float32) * scales.numpy().astype(np.float32)[:, None]
                fake, expected = net.params[name], torch.from_numpy(product).reshape(w.shape).to(w.dtype)
                assert fake.dtype == w.dtype and fake.shape == w.shape
                assert fake.detach().float().numpy().tobytes() == expected.float().numpy().tobytes()  # also -0.0


def test_product_of_code_and_scale_is_exact_in_float32():
    scales = torch.arange(1, 31744, dtype=torch.int32).to(torch.int16).view(torch.float16)  # every positive float16
    for code in (-127, 31, 113):
        codes = torch.full((len(scales), 1), code, dtype=torch.int8)
        back = script.dequantize(codes, scales)
        assert torch.equal(back.double()[:, 0], scales.double() * code)


def pack(tensors, table):
    return script.pack_artifact(tensors, script.quantize_all(tensors, table), {}, "", {})[0]


@pytest.mark.parametrize("step", ["row", "grid", "tensor"])
def test_what_is_not_finite_stays_not_finite_and_the_exporter_names_it(step):
    for bad in (float("nan"), float("inf"), -float("inf"), 3e7):
        w = torch.ones(16, 16)
        w[3, 5] = bad
        for clip_sigmas in (0.0, 12.85, -1.0):
            table = {"matrix": rule(6, clip_sigmas, step)}
            assert not torch.isfinite(script.dequantize(*script.quantize(w, **table["matrix"]))[3]).all()
            with pytest.raises(ValueError, match=r"^tensor blocks\.0\.w_up: [^\n]*$"):
                pack({"blocks.0.w_up": w}, table)


@pytest.mark.parametrize(
    ("name", "shape", "kind"),
    [
        ("blocks.0.w_q", (512, 512), "matrix"),
        ("w_up", (16, 16), "matrix"),
        ("w_up", (15, 16), "control"),
        ("w_up", (16, 15), "control"),
        ("blocks.0.w_patch", (512, 4, 4), "matrix"),
        ("blocks.0.w_conv", (512, 1, 4), "control"),
        ("w_embed", (64, 64), "matrix"),
        ("w_blocks.0.up", (64, 64), "control"),
        ("blocks.0.conv", (512, 512), "control"),
        ("mixers.0.ab", (16, 512), "embedding"),
        ("mixers.0.ab", (8, 512), "control"),
        ("mixers.0.lab", (16, 512), "control"),
        ("blocks.0.mix", (2, 512), "control"),
        ("embed", (1024, 512), "embedding"),
        ("bigram_embed", (1024, 64), "embedding"),
        ("positions_embed", (1024, 8), "control"),
        ("embed.weight", (1024, 512), "control"),
        ("head", (1024, 512), "embedding"),
        ("head.norm", (1024, 512), "control"),
        ("blocks.0.norm", (512,), "control"),
        ("blocks.0.A_log", (8,), "control"),
        ("w_gain", (), "control"),
        ("w_none", (0, 32), "control"),
        ("w_none", (32, 0), "control"),
        ("w_one_row", (1, 16), "control"),
    ],
)
def test_tensor_class(name, shape, kind):
    assert script.tensor_class(name, torch.zeros(shape)) == kind


@pytest.mark.parametrize(("name", "bits"), [
    ("blocks.3.gdn.A_log", 32), ("dt_bias", 32), ("blocks.3.A_log.weight", 16), ("norm", 16)])
def test_bits_of_control_tensors(tmp_path, name, bits):
    (tmp_path / "a.bin").write_bytes(pack({name: torch.ones(8)}, TABLE))
    header, *_ = script.read_artifact(tmp_path / "a.bin")
    assert [record["bits"] for record in header["tensors"]] == [bits]


@pytest.mark.parametrize(("name", "value"), [
    ("matrix_bits", "1"), ("embed_bits", "9"), ("matrix_clip_sigmas", "-1.5"), ("matrix_clip_sigmas", "nan"),
    ("matrix_bits", "3000")])
def test_wrong_tables_are_refused_as_settings(name, value):
    kind = int if name.endswith("bits") else float
    with pytest.raises(script.UserError, match=f"^{name.upper()}='{value}': must be from "):
        script.parse_setting(name, value, kind)


def fake(w, name):
    codes, scales = script.quantize(w, **TABLE["embedding" if name == "embed" else "matrix"])
    return script.dequantize(codes, scales).to(w.dtype)


class Net(torch.nn.Module):
    """An embedding tied to the output, two matrices and a gain, with quantized weights as an option."""

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
        assert torch.allclose(parameter, dict(explicit.named_parameters())[name], rtol=0, atol=1e-9), name


def test_masters_return_after_an_exception_and_backward_outside_is_refused():
    net = Net()
    before = [parameter.detach().clone() for parameter in net.parameters()]
    with pytest.raises(ZeroDivisionError), script.quantized(net, TABLE):
        assert not torch.equal(net.w_up, before[1])
        raise ZeroDivisionError
    assert all(torch.equal(parameter, old) for parameter, old in zip(net.parameters(), before, strict=True))
    with script.quantized(net, TABLE):
        loss = net(torch.arange(32))
    assert all(torch.equal(parameter, old) for parameter, old in zip(net.parameters(), before, strict=True))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with script.quantized(net, {}):  # no class, no change
        assert all(torch.equal(parameter, old) for parameter, old in zip(net.parameters(), before, strict=True))


def test_compiled_code_is_not_traced_again_when_weights_are_swapped():
    net, tokens = Net(), torch.arange(32)
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    plain = compiled(tokens).item()
    torch.compiler.set_stance("fail_on_recompile")
    try:
        with script.quantized(net, TABLE):
            quantized, eager = compiled(tokens).item(), net(tokens).item()
        again = compiled(tokens).item()
    finally:
        torch.compiler.set_stance("default")
    assert quantized == eager and abs(quantized - plain) > 1e-4 and again == plain
