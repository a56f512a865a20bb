"""Every optimizer against formulas and torch's own, groups, masked steps, state, splits; ranks."""

from pathlib import Path

import pytest
import torch
from common import pretraining_rates
from torch import nn

import train_gpt as G
import train_sft as T  # which has the section adamw8bit, too

ROOT = Path(__file__).resolve().parent.parent
ALONE = T.Runtime(rank=0, world_size=1, device=torch.device("cpu"), distributed=False)
GOOD, BAD = torch.tensor(False), torch.tensor(True)
KINDS = ("muon", "lion", "adamw", "adamw8bit")
MUON = dict(runtime=ALONE, dtype=None)  # options of its group


def by_singular_values(G, steps):
    """One matrix in float64 whose singular values went through the polynomial a s + b s^3 + c s^5,
    one by one.
    """
    U, S, V = torch.linalg.svd(G.double(), full_matrices=False)
    S = S / (S.square().sum().sqrt() + 1e-7)
    for _ in range(steps):
        S = 3.4445 * S - 4.7750 * S**3 + 2.0315 * S**5
    return (U * S) @ V


@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 48, 16), (2, 16, 48)])
@pytest.mark.parametrize("steps", [5, 2, 7])
def test_orthogonalize_against_polynomials_of_the_singular_values(shape, steps, monkeypatch):
    monkeypatch.setattr(T, "NEWTON_SCHULZ_STEPS", steps)
    torch.manual_seed(0)
    G = torch.randn(shape, dtype=torch.float64)
    found = T.orthogonalize(G)
    single = T.orthogonalize(G.float())
    for at in range(shape[0]):
        assert (found[at] - by_singular_values(G[at], steps)).abs().max() < 1e-8
        assert (single[at] - found[at]).abs().max() < 1e-4


def test_five_steps_are_nearly_orthogonal():
    G = torch.randn(1, 64, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert (torch.linalg.svdvals(T.orthogonalize(G)) - 1).abs().mean() < 0.2


def group(*params, lr=0.1, weight_decay=0.3, **more):
    """One parameter group, as Optimizers makes them."""
    return [
        dict(
            params=list(params),
            lr=torch.tensor(lr, dtype=params[0].dtype),
            weight_decay=weight_decay,
            **{"momentum": 0.9, **more},
        )
    ]


def test_muons_products_are_in_the_dtype_of_its_group():
    """The weights, the momentum and the step itself stay in float32."""
    torch.manual_seed(3)
    grad = torch.randn(16, 8)
    found = {}
    for dtype in (None, torch.bfloat16):
        param = nn.Parameter(torch.zeros(16, 8))
        param.grad = grad.clone()
        T.Muon(group(param), {**MUON, "dtype": dtype}).step(GOOD)
        found[dtype] = param.detach()
        update = 0.19 * grad  # Nesterov from a buffer of zeros: 0.1 g + 0.9 * 0.1 g
        update = T.orthogonalize(update[None].to(dtype or torch.float32))[0].float()
        expected = -torch.tensor(0.1) * 2**0.5 * update
        assert (param - expected).abs().max() < 1e-6
    assert 1e-5 < (found[None] - found[torch.bfloat16]).abs().max() < 0.01


@pytest.mark.parametrize("shape", [(24, 8), (8, 24)])
def test_muon_against_the_formula_over_50_steps(shape):
    torch.manual_seed(1)
    param = nn.Parameter(torch.randn(shape, dtype=torch.float64))
    muon = T.Muon(group(param), MUON)
    weight, buffer = param.detach().clone(), torch.zeros(shape, dtype=torch.float64)
    for _ in range(50):
        grad = torch.randn(shape, dtype=torch.float64)
        param.grad = grad.clone()
        muon.step(GOOD)
        buffer = 0.9 * buffer + 0.1 * grad
        update = by_singular_values(0.1 * grad + 0.9 * buffer, 5)
        weight = 0.97 * weight - 0.1 * max(1, shape[0] / shape[1]) ** 0.5 * update
    assert (param - weight).abs().max() < 1e-8


def test_lion_against_the_formula_over_50_steps():
    torch.manual_seed(3)
    param = nn.Parameter(torch.randn(40, 7, dtype=torch.float64))
    lion = T.Lion(group(param), {})
    weight, m = param.detach().clone(), torch.zeros(40, 7, dtype=torch.float64)
    for _ in range(50):
        grad = torch.randn(40, 7, dtype=torch.float64)
        param.grad = grad.clone()
        lion.step(GOOD)
        weight = 0.97 * weight - 0.1 * torch.sign(0.9 * m + (1 - 0.9) * grad)
        m = 0.99 * m + (1 - 0.99) * grad
    assert (param - weight).abs().max() < 1e-12


def adamw(weight, grads, lr, decay, betas=(0.9, 0.99)):
    """AdamW written out, in float64."""
    weight, m, v = weight.detach().double().clone(), 0.0, 0.0
    for step, grad in enumerate(grads, 1):
        m, v = (
            betas[0] * m + (1 - betas[0]) * grad.double(),
            betas[1] * v + (1 - betas[1]) * grad.double() ** 2,
        )
        update = (m / (1 - betas[0] ** step)) / ((v / (1 - betas[1] ** step)).sqrt() + 1e-8)
        weight = weight - lr * decay * weight - lr * update
    return weight


def uneven(count, *shape):
    """Gradients whose columns differ in size by up to 1e4, some of them mostly zero."""
    sizes = torch.logspace(-6, -2, shape[-1])
    masks = torch.rand(count, *shape) < torch.linspace(0.05, 1, shape[-1])
    return [torch.randn(shape) * sizes * mask for mask in masks]


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999)])
def test_8_bit_adamw_stays_beside_adamw(betas, monkeypatch):
    monkeypatch.setattr(T, "ADAM_BETAS", betas)
    torch.manual_seed(4)
    start = torch.randn(70, 90)  # 6,300 weights: the last block is not whole
    param = nn.Parameter(start.clone())
    grads = uneven(50, 70, 90)
    eight = T.AdamW8bit(group(param, lr=0.01), {})
    for grad in grads:
        param.grad = grad.clone()
        eight.step(GOOD)
    exact = adamw(start, grads, 0.01, 0.3, betas)
    assert (param - exact).norm() < 0.05 * (exact - start).norm()
    ratio, _ = eight.state[param]["codes"].float() * eight.state[param]["scales"]
    bound = (
        (1 - betas[0]) / (1 - betas[1]) ** 0.5 / (1 - betas[0] ** 2 / betas[1]) ** 0.5
    )  # Cauchy-Schwarz
    assert ratio.abs().max() < bound


def test_splits_are_orthogonalized_by_themselves():
    torch.manual_seed(2)
    whole = nn.Parameter(torch.randn(32, 8))
    whole.splits = (8, 16, 8)
    parts = [nn.Parameter(part.detach().clone()) for part in whole.split([8, 16, 8])]
    one, many = T.Muon(group(whole), MUON), T.Muon(group(*parts), MUON)
    for _ in range(3):
        whole.grad = torch.randn(32, 8)
        for part, grad in zip(parts, whole.grad.split([8, 16, 8]), strict=True):
            part.grad = grad.clone()
        one.step(GOOD)
        many.step(GOOD)
    assert (whole - torch.cat(parts)).abs().max() < 1e-6


class Bare(nn.Module):
    """One parameter of every group, in float64, some at zero."""

    def __init__(self):
        super().__init__()
        self.dtype = None  # as a GPT's
        torch.manual_seed(5)
        self.embed = nn.Parameter(torch.randn(256, 32).double() * 0.005)
        self.ngram_embed = nn.Parameter(torch.randn(64, 32).double() * 0.005)
        self.head = nn.Parameter(torch.randn(256, 32).double() * 0.1)
        self.w_qkv = nn.Parameter(torch.randn(64, 32).double() * 0.1)
        self.w_down = nn.Parameter(torch.zeros(64, 96).double())
        self.ab = nn.Parameter(torch.randn(16, 32).double())
        self.norm = nn.Parameter(torch.ones(32).double())


RATES = {
    "matrix": (0.003, 0.5),
    "embedding": (0.01, 0.25),
    "head": (0.008, 0.25),
    "control": (0.02, 0.0),
}
GROUPS = (
    (("w_qkv", "w_down"), 0.003, 0.5),
    (("embed", "ngram_embed"), 0.01, 0.25),
    (("head",), 0.008, 0.25),
    (("ab", "norm"), 0.02, 0.0),
)


def owner_of(optimizers, param):
    """(class, learning rate, decay) of the one group that holds `param`."""
    found = [
        (type(opt), round(float(g["lr"]), 6), g["weight_decay"])
        for opt in optimizers.all
        for g in opt.param_groups
        if any(p is param for p in g["params"])
    ]
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_is_in_its_group(kind):
    named = {
        "muon": T.Muon,
        "lion": T.Lion,
        "adamw8bit": T.AdamW8bit,
        "adamw": torch.optim.AdamW,
    }[kind]
    net = Bare()
    optimizers = T.Optimizers(net, kind, RATES, ALONE)
    for names, lr, decay in GROUPS:
        for name in names:
            other = "ab" in names or (kind == "muon" and "w_qkv" not in names)
            expected = (torch.optim.AdamW if other else named, lr, decay)
            assert owner_of(optimizers, getattr(net, name)) == expected, name
    assert optimizers.params == {param: name for name, param in net.named_parameters()}
    assert optimizers.all[-1].param_groups[0]["betas"] == (0.9, 0.99)


def test_the_models_parameters_are_in_their_groups():
    cfg = G.Settings(model_dim=32, num_heads=2, num_kv_heads=1, layer_pattern="g s1 g s1")
    net = T.GPT(T.GPTConfig(**vars(G.model_config(cfg, 64, 1))))
    optimizers = T.Optimizers(net, "muon", pretraining_rates(cfg), ALONE)
    for name, param in net.named_parameters():
        last = name.rsplit(".", 1)[-1]
        expected = (T.Muon, 0.02, 0.04) if last.startswith("w_") else (torch.optim.AdamW, 0.02, 0.0)
        assert owner_of(optimizers, param) == (
            (torch.optim.AdamW, 0.03, 0.0) if name == "embed" else expected
        ), name
    assert net.mixers[0].w_qkvg.splits == (32,) * 4
    assert net.mixers[1].w_qkv.splits == (32, 16, 16)


def follow(kind, references):
    """Largest difference after 50 steps between Optimizers and `references`: names -> optimizer of
    a second network.
    """
    ours, theirs = Bare(), Bare()
    optimizers = T.Optimizers(ours, kind, RATES, ALONE)
    made = [
        make([getattr(theirs, name) for name in names], torch.tensor(lr).item(), decay)
        for names, lr, decay in GROUPS
        for make in [references.get(names, references.get("all"))]
    ]
    for _ in range(50):
        for param, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            param.grad = torch.randn_like(param) * 1e-3
            other.grad = param.grad.clone()
        optimizers.step(1.0, GOOD, 0.9)
        for optimizer in made:
            optimizer.step()
    return max(
        (a - b).abs().max().item()
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True)
    )


def torch_adamw(params, lr, decay):
    return torch.optim.AdamW(
        params, lr=lr, weight_decay=decay, betas=(0.9, 0.99), eps=1e-8, foreach=False
    )


def test_adamw_is_torchs_over_50_steps():
    assert follow("adamw", {"all": torch_adamw}) < 1e-12


def random_step(optimizers, seed, bad=GOOD, fill=None):
    torch.manual_seed(seed)
    for param in optimizers.params:
        param.grad = torch.randn_like(param) if fill is None else torch.full_like(param, fill)
    optimizers.step(1.0, bad, 0.9)


def everything(optimizers):
    """All parameters and the tensors of their states, in one order."""
    states = [optimizers.state.get(param, {}) for param in optimizers.params]
    return [*optimizers.params, *(value for state in states for value in state.values())]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fill", [float("nan"), 1.0])
def test_a_bad_step_changes_nothing_and_a_good_one_everything(kind, fill):
    net = Bare().float()
    optimizers = T.Optimizers(net, kind, RATES, ALONE)
    for seed in range(3):
        random_step(optimizers, seed)
    before = [value.clone() for value in everything(optimizers)]
    random_step(optimizers, 3, BAD, fill)
    after = everything(optimizers)
    assert len(before) == len(after) > len(optimizers.params)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(before, after, strict=True))
    random_step(optimizers, 4)
    assert all(not torch.equal(a, b) for a, b in zip(before, everything(optimizers), strict=True))


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_after_a_saved_state_are_those_of_a_run_without_a_break(kind, used, tmp_path):
    net = Bare().float()
    whole = T.Optimizers(net, kind, RATES, ALONE)
    for seed in range(5):
        random_step(whole, seed)
    torch.save(
        {"network": net.state_dict(), "optimizers": whole.state_dict()}, tmp_path / "five.pt"
    )
    for seed in range(5, 10):
        random_step(whole, seed)
    saved = torch.load(tmp_path / "five.pt", weights_only=True)
    assert set(saved["optimizers"]) == {name for name, _ in net.named_parameters()}
    fresh = Bare().float()
    resumed = T.Optimizers(fresh, kind, RATES, ALONE)
    if used:  # has weights and a state of its own, which are replaced
        random_step(resumed, 99)
    fresh.load_state_dict(saved["network"])
    resumed.load_state_dict(saved["optimizers"])
    for seed in range(5, 10):
        random_step(resumed, seed)
    for one, two in zip(everything(whole), everything(resumed), strict=True):
        assert one.dtype == two.dtype and torch.equal(one, two)
    assert state_bytes(whole) == state_bytes(resumed) > 0


def state_bytes(optimizers):
    return sum(value.nbytes for own in optimizers.state_dict().values() for value in own.values())


@pytest.mark.parametrize("kind", KINDS)
def test_the_multiplier_scales_every_rate_and_zero_moves_nothing(kind):
    optimizers = T.Optimizers(Bare().float(), kind, RATES, ALONE)
    for param in optimizers.params:
        param.grad = torch.randn_like(param)
    before = [param.detach().clone() for param in optimizers.params]
    optimizers.step(0.0, GOOD, 0.9)
    assert all(torch.equal(a, b) for a, b in zip(before, optimizers.params, strict=True))
    optimizers.step(0.25, GOOD, 0.9)
    rates = {round(float(group["lr"]), 6) for opt in optimizers.all for group in opt.param_groups}
    assert rates == {0.25 * 0.003, 0.25 * 0.01, 0.25 * 0.008, 0.25 * 0.02}
    assert all(not torch.equal(a, b) for a, b in zip(before, optimizers.params, strict=True))


def test_the_momentum_of_the_schedule_is_muons():
    optimizers = T.Optimizers(Bare().float(), "muon", RATES, ALONE)
    for param in optimizers.params:
        param.grad = torch.ones_like(param)
    optimizers.step(1.0, GOOD, 0.875)
    buffers = [
        state["momentum_buffer"]
        for state in optimizers.state.values()
        if "momentum_buffer" in state
    ]
    assert len(buffers) == 2 and all((buffer == 0.125).all() for buffer in buffers)


def test_clipping_bounds_the_global_norm():
    optimizers = T.Optimizers(Bare().float(), "muon", RATES, ALONE)
    for param in optimizers.params:
        param.grad = torch.randn_like(param)
    expected = torch.cat([param.grad.flatten() for param in optimizers.params]).norm()
    norm, extra = optimizers.reduce_gradients(ALONE, 0.1, torch.tensor([1.5, 0.0, 3.0]))
    assert (norm.item(), extra.tolist()) == (
        pytest.approx(expected.item(), rel=1e-5),
        [1.5, 0.0, 3.0],
    )
    clipped = torch.cat([param.grad.flatten() for param in optimizers.params]).norm()
    assert clipped.item() == pytest.approx(0.1, rel=1e-4)
