"""Every optimizer against formulas, groups, steps that are not finite, state, splits."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import train_gpt as T
import train_sft

ALONE = T.Runtime(rank=0, world_size=1, device=torch.device("cpu"), distributed=False)
KINDS = ("muon", "lion", "adamw", "adafactor", "adamw8bit")


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
    """One parameter group, as a step finds it."""
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
        T.Muon(group(param), ALONE, dtype).step()
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
    muon = T.Muon(group(param), ALONE)
    weight, buffer = param.detach().clone(), torch.zeros(shape, dtype=torch.float64)
    for _ in range(50):
        grad = torch.randn(shape, dtype=torch.float64)
        param.grad = grad.clone()
        muon.step()
        buffer = 0.9 * buffer + 0.1 * grad
        update = by_singular_values(0.1 * grad + 0.9 * buffer, 5)
        weight = 0.97 * weight - 0.1 * max(1, shape[0] / shape[1]) ** 0.5 * update
    assert (param - weight).abs().max() < 1e-8


def test_shares_of_muons_ranks_add_up_to_its_step():
    """Three matrices of one shape on two ranks, whose sums are made here."""
    grads = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(0))
    moved = []
    for rank, world_size in ((0, 1), (0, 2), (1, 2)):
        params = [nn.Parameter(torch.zeros(8, 8)) for _ in grads]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        T.Muon(group(*params), T.Runtime(rank, world_size, torch.device("cpu"), False)).step()
        moved.append(torch.stack(params))
    assert torch.allclose(moved[1] + moved[2], moved[0]) and moved[2].any()


def test_adafactor_moves_a_matrix_of_zeros():
    """Its step is a share of the root mean square, taken as 0.02 at least."""
    param = nn.Parameter(torch.zeros(16, 8))
    param.grad = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    T.OPTIMIZERS["adafactor"]([dict(params=[param], lr=0.1)]).step()
    assert param.square().mean().sqrt().item() == pytest.approx(0.1 * 0.02, rel=0.2)


def test_lion_against_the_formula_over_50_steps():
    torch.manual_seed(3)
    param = nn.Parameter(torch.randn(40, 7, dtype=torch.float64))
    lion = T.Lion(group(param))
    weight, m = param.detach().clone(), torch.zeros(40, 7, dtype=torch.float64)
    for _ in range(50):
        grad = torch.randn(40, 7, dtype=torch.float64)
        param.grad = grad.clone()
        lion.step()
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
    eight = T.AdamW8bit(group(param, lr=0.01))
    for grad in grads:
        param.grad = grad.clone()
        eight.step()
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
    one, many = T.Muon(group(whole), ALONE), T.Muon(group(*parts), ALONE)
    for _ in range(3):
        whole.grad = torch.randn(32, 8)
        for part, grad in zip(parts, whole.grad.split([8, 16, 8]), strict=True):
            part.grad = grad.clone()
        one.step()
        many.step()
    assert (whole - torch.cat(parts)).abs().max() < 1e-6


class Bare(nn.Module):
    """One parameter of every class, some at zero."""

    dtype = None  # as a GPT's

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Parameter(torch.randn(256, 32) * 0.005)
        self.ngram_embed = nn.Parameter(torch.randn(64, 32) * 0.005)
        self.head = nn.Parameter(torch.randn(256, 32) * 0.1)
        self.w_qkv = nn.Parameter(torch.randn(64, 32) * 0.1)
        self.w_down = nn.Parameter(torch.zeros(64, 96))
        self.ab = nn.Parameter(torch.randn(16, 32))
        self.norm = nn.Parameter(torch.ones(32))


class Training:
    """A Bare network with the optimizers of train_gpt.py."""

    def __init__(self, kind):
        rates = dict(matrix_lr=0.003, muon_wd=0.5, tied_embed_lr=0.01, scalar_lr=0.02)
        self.network = Bare()
        settings = T.Settings(optimizer=kind, **rates)
        self.optimizers = T.make_optimizers(self.network, settings, 0.008, ALONE)
        self.params = dict(self.network.named_parameters())
        self.part = T.OptimizerState(self.optimizers, self.params)

    def step(self, seed, finite=True, fill=None, multiplier=1.0):
        """Take a step on random gradients, or on ones of `fill`."""
        torch.manual_seed(seed)
        for param in self.params.values():
            param.grad = torch.randn_like(param) if fill is None else torch.full_like(param, fill)
        T.step_optimizers(self.optimizers, multiplier, torch.tensor(finite))

    def weights(self):
        return [param.detach().clone() for param in self.params.values()]

    def states(self):
        """The tensors of all states, in one order."""
        return [value.clone() for one in self.part.state_dict().values() for value in one.values()]


def equal(ones, others):
    pairs = zip(ones, others, strict=True)
    return [torch.equal(a, b) and a.dtype == b.dtype for a, b in pairs]


def owners(optimizers):
    """Parameter -> (class, learning rate, decay) of its group."""
    return {
        param: (type(optimizer), group["lr"], group["weight_decay"])
        for optimizer in optimizers
        for group in optimizer.param_groups
        for param in group["params"]
    }


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_is_in_its_group(kind):
    adamw = torch.optim.AdamW
    named = {
        "muon": T.Muon,
        "lion": T.Lion,
        "adamw": adamw,
        "adafactor": torch.optim.Adafactor,
        "adamw8bit": T.AdamW8bit,
    }[kind]
    tables = adamw if kind == "muon" else named
    training = Training(kind)
    found = owners(training.optimizers)
    assert {name: found[param] for name, param in training.params.items()} == {
        "embed": (tables, 0.01, 0.0),
        "ngram_embed": (tables, 0.01, 0.0),
        "head": (tables, 0.008, 0.0),
        "w_qkv": (named, 0.003, 0.5),
        "w_down": (named, 0.003, 0.5),
        "ab": (adamw, 0.02, 0.0),
        "norm": (adamw, 0.02, 0.0),
    }
    controls = training.optimizers[1].param_groups[-1]
    assert (controls["betas"], controls["eps"], controls["fused"]) == ((0.9, 0.99), 1e-8, True)
    assert {"muon", *T.OPTIMIZERS} == T.OPTIMIZER_PRESETS.keys() == set(KINDS)


def test_a_parameter_in_no_group_or_in_two_is_found():
    training = Training("lion")
    for params in (
        {**training.params, "new": nn.Parameter(torch.ones(3))},
        {**training.params, "again": training.network.embed},
        {"norm": training.network.norm},
    ):
        with pytest.raises(AssertionError):
            T.OptimizerState(training.optimizers, params)


def test_the_models_parameters_are_in_their_groups():
    cfg = T.Settings(model_dim=32, num_heads=2, num_kv_heads=1, layer_pattern="g s1 g s1")
    net = T.GPT(T.model_config(cfg, 64, 1))
    found = owners(T.make_optimizers(net, cfg, 0.004, ALONE))
    for name, param in net.named_parameters():
        last = name.rsplit(".", 1)[-1]
        expected = (T.Muon, 0.02, 0.04) if last.startswith("w_") else (torch.optim.AdamW, 0.02, 0.0)
        assert found[param] == ((torch.optim.AdamW, 0.03, 0.0) if name == "embed" else expected)
    assert net.mixers[0].w_qkvg.splits == (32,) * 4
    assert net.mixers[1].w_qkv.splits == (32, 16, 16)


@pytest.mark.parametrize("kind", KINDS)
def test_fine_tuning_has_one_rate_and_decays_all_but_controls(kind):
    net = Bare()
    settings = train_sft.Settings(optimizer=kind, learning_rate=0.01, weight_decay=0.1)
    params = train_sft.trained_parameters(net)
    found = owners(train_sft.make_optimizers(params, settings, ALONE))
    assert {net.ab, net.norm} == {param for param, (_, _, decay) in found.items() if decay == 0.0}
    assert {lr for _, lr, _ in found.values()} == {0.01}
    assert len(found) == len(params)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fill", [float("nan"), float("inf"), 1.0])
@pytest.mark.parametrize("first", [False, True])
def test_a_step_that_is_not_finite_moves_no_weight_and_leaves_the_state_finite(kind, fill, first):
    training = Training(kind)
    for seed in range(0 if first else 3):
        training.step(seed)
    before = training.weights()
    training.step(3, finite=False, fill=fill)
    assert all(equal(before, training.weights()))
    assert training.states() and all(value.isfinite().all() for value in training.states())
    training.step(4)
    assert not any(equal(before, training.weights()))
    assert all(weight.isfinite().all() for weight in training.weights())


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_after_a_saved_state_are_those_of_a_run_without_a_break(kind, used, tmp_path):
    whole = Training(kind)
    for seed in range(5):
        whole.step(seed)
    parts = {"network": whole.network.state_dict(), "optimizers": whole.part.state_dict()}
    torch.save(parts, tmp_path / "five.pt")
    for seed in range(5, 10):
        whole.step(seed)
    saved = torch.load(tmp_path / "five.pt", weights_only=True)
    assert set(saved["optimizers"]) == set(whole.params)
    resumed = Training(kind)
    if used:  # has weights and a state of its own, which are replaced
        resumed.step(99)
    resumed.network.load_state_dict(saved["network"])
    resumed.part.load_state_dict(saved["optimizers"])
    for seed in range(5, 10):
        resumed.step(seed)
    assert all(equal(whole.weights(), resumed.weights()))
    assert all(equal(whole.states(), resumed.states()))


def test_a_state_without_a_parameter_is_refused():
    training = Training("lion")
    saved = training.part.state_dict()
    del saved["head"]
    with pytest.raises(KeyError, match="head"):
        training.part.load_state_dict(saved)


def test_large_weights_without_the_name_of_a_matrix_are_warned_of():
    network = nn.Module()
    network.proj = nn.Linear(512, 512, bias=False)
    network.w_proj = nn.Parameter(torch.zeros(512, 512))
    lines = []
    T.warn_of_large_controls(network, lines.append)
    assert (
        len(lines) == 1 and "warning: proj.weight has 262144 weights and is a control" in lines[0]
    )


def test_a_parameter_that_the_forward_does_not_use_is_named():
    cfg = T.Settings(model_dim=32, num_heads=2, num_kv_heads=1, layer_pattern="a", train_seq_len=8)
    net = T.GPT(T.model_config(cfg, 64, 1))
    net.blocks[0].w_spare = nn.Parameter(torch.zeros(32, 32))
    ids = torch.ones(1, 8, dtype=torch.long)
    batches = SimpleNamespace(runtime=ALONE, settings=cfg, micro_batches=lambda step: [(ids, ids)])
    with pytest.raises(T.UserError, match="does not use the parameters blocks.0.w_spare: "):
        T.warm_up(net, T.make_optimizers(net, cfg, 0.004, ALONE), batches, cfg)


@pytest.mark.parametrize("kind", KINDS)
def test_the_multiplier_scales_every_rate_and_zero_moves_nothing(kind):
    training = Training(kind)
    before = training.weights()
    training.step(0, multiplier=0.0)
    assert all(equal(before, training.weights()))
    training.step(1, multiplier=0.25)
    rates = {round(lr.item(), 6) for _, lr, _ in owners(training.optimizers).values()}
    assert rates == {0.25 * 0.003, 0.25 * 0.01, 0.25 * 0.008, 0.25 * 0.02}
    assert not any(equal(before, training.weights()))


def test_clipping_bounds_the_global_norm():
    params = list(Bare().parameters())
    for param in params:
        param.grad = torch.randn_like(param)
    expected = torch.cat([param.grad.flatten() for param in params]).norm()
    norm, extra = T.reduce_gradients(params, ALONE, 0.1, torch.tensor([1.5, 0.0, 3.0]))
    assert norm.item() == pytest.approx(expected.item(), rel=1e-5)
    assert extra.tolist() == [1.5, 0.0, 3.0]
    clipped = torch.cat([param.grad.flatten() for param in params]).norm()
    assert clipped.item() == pytest.approx(0.1, rel=1e-4)
