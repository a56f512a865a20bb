"""Muon and AdamW against formulas, groups, masked steps, splits; ranks."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import train_gpt as T

ROOT = Path(__file__).resolve().parent.parent
ALONE = T.Runtime(rank=0, world_size=1, device=torch.device("cpu"), distributed=False)
GOOD, BAD = torch.tensor(False), torch.tensor(True)


def newton_schulz(G: torch.Tensor, steps: int) -> torch.Tensor:
    """The published iteration on one matrix, in float64."""
    X = G.double() / (G.double().norm() + 1e-7)
    X = X.T if G.size(0) > G.size(1) else X
    for _ in range(steps):
        A = X @ X.T
        X = 3.4445 * X + (-4.7750 * A + 2.0315 * A @ A) @ X
    return X.T if G.size(0) > G.size(1) else X


@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 48, 16), (2, 16, 48)])
def test_orthogonalize_against_the_iteration_and_the_polar_factor(shape):
    torch.manual_seed(0)
    G = torch.randn(shape)
    found = T.orthogonalize(G, 5)
    for at in range(shape[0]):
        assert (found[at].double() - newton_schulz(G[at], 5)).abs().max() < 1e-5
        U, _, V = torch.linalg.svd(G[at].double(), full_matrices=False)
        singular = torch.linalg.svdvals(found[at])
        assert 0.3 < singular.min() and singular.max() < 1.3
        assert torch.nn.functional.cosine_similarity(found[at].double().flatten(), (U @ V).flatten(), dim=0) > 0.95


def test_muon_against_the_formula_over_steps():
    torch.manual_seed(1)
    param = torch.nn.Parameter(torch.randn(24, 8))
    muon = T.Muon([param], 0.1, 0.9, 0.3, 5, ALONE)
    weight, buffer = param.detach().double().clone(), torch.zeros(24, 8, dtype=torch.float64)
    for _ in range(20):
        grad = torch.randn(24, 8)
        param.grad = grad.clone()
        muon.step(GOOD)
        buffer = 0.9 * buffer + 0.1 * grad.double()
        update = newton_schulz(0.1 * grad.double() + 0.9 * buffer, 5)
        weight = (1 - 0.1 * 0.3) * weight - 0.1 * 3**0.5 * update
    assert (param.double() - weight).abs().max() < 1e-4
    assert (param.double() - weight).abs().max() < 1e-4 * weight.abs().max()


def test_splits_are_orthogonalized_by_themselves():
    torch.manual_seed(2)
    whole = torch.nn.Parameter(torch.randn(32, 8))
    whole.splits = (8, 16, 8)
    parts = [torch.nn.Parameter(part.detach().clone()) for part in whole.split([8, 16, 8])]
    one, many = T.Muon([whole], 0.1, 0.9, 0.0, 5, ALONE), T.Muon(parts, 0.1, 0.9, 0.0, 5, ALONE)
    for _ in range(3):
        whole.grad = torch.randn(32, 8)
        for part, grad in zip(parts, whole.grad.split([8, 16, 8]), strict=True):
            part.grad = grad.clone()
        one.step(GOOD)
        many.step(GOOD)
    assert (whole - torch.cat(parts)).abs().max() < 1e-6


def tiny() -> tuple[T.GPT, T.Optimizers]:
    torch.manual_seed(3)
    cfg = T.Settings(model_dim=32, num_heads=2, num_kv_heads=1, layer_pattern="g s1 g s1", muon_wd=0.5, adam_wd=0.5)
    net = T.GPT(T.model_config(cfg, 64, 1))
    return net, T.Optimizers(net, cfg, ALONE)


def test_every_parameter_is_in_its_group():
    net, optimizers = tiny()
    names = {id(param): name for name, param in net.named_parameters()}
    muon = {names[id(param)] for param in optimizers.muon.param_groups[0]["params"]}
    embedding, scalars = ({names[id(param)] for param in group["params"]} for group in optimizers.adam.param_groups)
    assert muon == {name for name in names.values() if ".w_" in name}
    assert embedding == {"embed"}
    assert {f"mixers.0.{name}" for name in ("A_log", "dt_bias", "conv", "ab", "norm")} <= scalars
    assert {"mixers.1.q_gain", "blocks.0.mix"} <= scalars
    assert muon | embedding | scalars == set(names.values())
    assert optimizers.adam.param_groups[1]["weight_decay"] == 0.0
    assert net.mixers[0].w_qkvg.splits == (32,) * 4
    assert net.mixers[1].w_qkv.splits == (32, 16, 16)
    assert sum(net.mixers[1].w_qkv.splits) == net.mixers[1].w_qkv.size(0)


def test_a_bad_step_changes_nothing_and_a_good_one_everything():
    net, optimizers = tiny()
    ids = torch.randint(2, 64, (2, 16))
    for _ in range(2):
        net(ids, ids).sum().backward()
        optimizers.step(1.0, 0.9, GOOD)
        optimizers.zero_grad()
    before = [param.detach().clone() for param in optimizers.params]
    moments = [value.clone() for opt in optimizers.all for state in opt.state.values() for value in state.values()]
    net(ids, ids).sum().backward()
    for param in optimizers.params:
        param.grad.fill_(float("nan"))
    norm = optimizers.reduce_gradients(ALONE, 1.0, torch.tensor(1.0))[0]
    assert not torch.isfinite(norm)
    optimizers.step(1.0, 0.9, ~torch.isfinite(norm))
    assert all(torch.equal(a, b) for a, b in zip(before, optimizers.params, strict=True))
    after = [value for opt in optimizers.all for state in opt.state.values() for value in state.values()]
    assert all(torch.equal(a, b) for a, b in zip(moments, after, strict=True))
    optimizers.zero_grad()
    net(ids, ids).sum().backward()
    optimizers.step(1.0, 0.9, GOOD)
    assert all(not torch.equal(a, b) for a, b in zip(before, optimizers.params, strict=True))


def test_the_multiplier_scales_every_rate_and_zero_moves_nothing():
    net, optimizers = tiny()
    before = [param.detach().clone() for param in optimizers.params]
    ids = torch.randint(2, 64, (2, 16))
    net(ids, ids).sum().backward()
    optimizers.step(0.0, 0.9, GOOD)
    assert all(torch.equal(a, b) for a, b in zip(before, optimizers.params, strict=True))
    optimizers.step(0.25, 0.9, GOOD)
    assert [float(group["lr"]) for opt in optimizers.all for group in opt.param_groups] == pytest.approx(
        [0.25 * 0.02, 0.25 * 0.03, 0.25 * 0.02])


def test_clipping_bounds_the_global_norm():
    net, optimizers = tiny()
    ids = torch.randint(2, 64, (2, 16))
    net(ids, ids).sum().backward()
    expected = torch.cat([param.grad.flatten() for param in optimizers.params]).norm()
    norm, loss = optimizers.reduce_gradients(ALONE, 0.1, torch.tensor(1.5))
    assert (norm.item(), loss.item()) == (pytest.approx(expected.item(), rel=1e-5), 1.5)
    clipped = torch.cat([param.grad.flatten() for param in optimizers.params]).norm()
    assert clipped.item() == pytest.approx(0.1, rel=1e-4)


def test_adamw_is_torchs_in_float64_over_50_steps():
    torch.manual_seed(4)
    net, optimizers = tiny()
    param = net.embed
    weight, m, v = param.detach().double().clone(), 0.0, 0.0
    for step in range(1, 51):
        for other in optimizers.params:
            other.grad = torch.zeros_like(other)
        param.grad = torch.randn_like(param)
        grad = param.grad.double().clone()
        optimizers.step(1.0, 0.9, GOOD)
        m, v = 0.9 * m + 0.1 * grad, 0.95 * v + 0.05 * grad**2
        weight = weight * (1 - 0.03 * 0.5) - 0.03 * (m / (1 - 0.9**step)) / ((v / (1 - 0.95**step)).sqrt() + 1e-8)
    assert (param.double() - weight).abs().max() < 1e-5


RANKS = """
import sys, torch, torch.distributed as dist
sys.path.insert(0, {root!r})
import train_gpt as T
torch.set_num_threads(1)
runtime = T.start_runtime("cpu")
torch.manual_seed(5)
cfg = T.Settings(model_dim=32, num_heads=2, num_kv_heads=1, layer_pattern="g s g")
net = T.GPT(T.model_config(cfg, 64, 1))
optimizers = T.Optimizers(net, cfg, runtime)
for step in range(4):
    for at, param in enumerate(optimizers.params):
        full = torch.randn(2, *param.shape, generator=torch.Generator().manual_seed(100 * step + at))
        param.grad = full[runtime.rank] if runtime.world_size == 2 else full.sum(0)
    optimizers.reduce_gradients(runtime, 0.0, torch.tensor(1.0))
    optimizers.step(1.0, 0.9, torch.tensor(False))
own = torch.cat([param.detach().flatten() for param in optimizers.params])
if runtime.world_size == 2:
    both = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(both, own)
    assert torch.equal(both[0], both[1]), "ranks differ"
if runtime.rank == 0:
    torch.save(own, sys.argv[1])
runtime.leave()
"""


def test_two_ranks_step_as_one(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(RANKS.format(root=str(ROOT)))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    subprocess.run([sys.executable, script, tmp_path / "one.pt"], check=True)
    subprocess.run([*launch, script, tmp_path / "two.pt"], check=True, capture_output=True)
    one, two = torch.load(tmp_path / "one.pt"), torch.load(tmp_path / "two.pt")
    assert (one - two).abs().max() < 1e-5
