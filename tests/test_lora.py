"""Section lora: what an adapter computes and what trains it, counts, merging, what is refused."""

import copy
import dataclasses

import pytest
import torch
from test_model import SETTINGS, config, tokens

import quantize as Q
import sample as S
import train_gpt as T
import train_sft
from conftest import add_noise

ALONE = T.Runtime(rank=0, world_size=1, device=torch.device("cpu"), distributed=False)


def train_only(net, parts=("lora",)):
    """The network, of which only parameters are trained whose names contain one of these."""
    for name, param in net.named_parameters():
        param.requires_grad_(any(part in name for part in parts))
    return net


def sizes(net):
    """Parameters that are trained, and all of them."""
    params = list(net.parameters())
    return sum(param.numel() for param in params if param.requires_grad), sum(
        param.numel() for param in params
    )


def network(dtype=torch.float64, **changes):
    """A network whose zero-initialised projections are not zero, so that every path counts."""
    torch.manual_seed(0)
    net = T.GPT(config(**changes)).to(dtype)
    add_noise(net, 0.05)
    return net


def trained(net, seed=1, size=0.1):
    """The network with an adapter that is not zero, the adapter alone to be trained."""
    torch.manual_seed(seed)
    if not any(name.endswith("lora_b") for name, _ in net.named_parameters()):
        S.setup_lora_adapter(net, rank=4, alpha=6.0)
    for name, param in net.named_parameters():
        if name.endswith("lora_b"):
            param.data.normal_(std=size)
    return train_only(net)


def dense(net):
    """The state of a plain network with the same function, each sum by loops over A's rows, in float64."""
    tensors, state = net.state_dict(), {}
    for name, w in tensors.items():
        if name.endswith(".original"):
            place = name.removesuffix("original") + "0."
            a, b, scale = (tensors[place + part].double() for part in ("lora_a", "lora_b", "scale"))
            w = w.double() + sum(scale * torch.outer(b[:, row], a[row]) for row in range(len(a)))
            state[name.removesuffix(".original").replace("parametrizations.", "")] = w
        elif ".0.lora_" not in name and not name.endswith(".0.scale"):
            state[name] = w
    return state


def plain(state, **changes):
    net = T.GPT(config(**changes)).to(state["embed"].dtype)
    net.load_state_dict(state)
    return net


def nats(net, ids):
    return net(ids[:, :-1], ids[:, 1:]).mean()


KINDS = {
    "hybrid": {},
    "GDN shared": dict(layer_pattern="g1 g1 a"),
    "shared layers": dict(layer_pattern="A1 G2 A1 G2"),
    "bio": dict(mlp="bio_soft"),
    "swiglu": dict(mlp="swiglu", tie_embeddings=False),
}
kinds = pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS)


@kinds
def test_a_fresh_adapter_changes_nothing(changes):
    for dtype in (torch.float32, torch.float64):
        net, ids = network(dtype, **changes), tokens(0, 2, 40)
        expected = net(ids)
        assert S.setup_lora_adapter(net) is net
        assert torch.equal(net(ids), expected)


@kinds
def test_logits_against_dense_sums(changes):
    untouched, net, ids = network(**changes), trained(network(**changes)), tokens(0, 2, 40)
    expected = plain(dense(net), **changes)(ids)
    assert (net(ids) - expected).abs().max() < 1e-12 < 0.1 < (untouched(ids) - expected).abs().max()


def test_scale_rank_and_first_values():
    net = S.setup_lora_adapter(network(torch.float32, model_dim=64), rank=8, alpha=2.0)
    a, b = (net.state_dict()[f"mixers.0.parametrizations.w_qkvg.0.lora_{part}"] for part in "ab")
    assert a.shape == (8, 64) and b.shape == (256, 8) and (b == 0).all()
    every = torch.cat(
        [
            w.flatten() * w.shape[1] ** 0.5
            for name, w in net.named_parameters()
            if name.endswith("lora_a")
        ]
    )
    assert (
        abs(every.std() - 1) < 5 / (2 * len(every)) ** 0.5
        and abs(every.mean()) < 5 / len(every) ** 0.5
    )
    weight = net.mixers[0].parametrizations.w_qkvg
    weight[0].lora_b.data.fill_(1.0)
    assert torch.allclose(net.mixers[0].w_qkvg, weight.original + 0.25 * a.sum(0), atol=1e-6)


def test_matrices_of_mixers_and_mlps_have_adapters():
    net = network(layer_pattern="g1 g1 a", mlp="bio_soft", bigram_vocab_size=64)
    matrices = [name for name, _ in net.named_parameters() if ".w_" in name]
    assert {name.rpartition(".")[2] for name in matrices} >= {
        "w_qkvg",
        "w_qkv",
        "w_o",
        "w_up",
        "w_down",
        "w_gate",
    }
    S.setup_lora_adapter(net, 2)
    found = [name for name, _ in net.named_parameters() if name.endswith("lora_b")]
    found = [name.replace("parametrizations.", "").removesuffix(".0.lora_b") for name in found]
    assert len(found) == len(matrices) and set(found) == set(matrices)


@kinds
def test_gradients_against_those_of_the_dense_sums(changes):
    """With W' = W + s B A: dL/dA = s B^T dL/dW', dL/dB = s dL/dW' A^T; nothing else has one."""
    net, ids = trained(network(**changes)), tokens(1, 2, 24)
    reference = plain(dense(net), **changes)
    nats(net, ids).backward()
    nats(reference, ids).backward()
    tensors, wanted = net.state_dict(), {}
    for name, param in reference.named_parameters():
        path, _, last = name.rpartition(".")
        place = f"{path}.parametrizations.{last}.0."
        if place + "lora_a" in tensors:
            wanted[place + "lora_a"] = 1.5 * tensors[place + "lora_b"].mT @ param.grad
            wanted[place + "lora_b"] = 1.5 * param.grad @ tensors[place + "lora_a"].mT
    found = {name: param.grad for name, param in net.named_parameters() if param.grad is not None}
    assert found.keys() == wanted.keys() and len(found) == 2 * sum(
        name.endswith("original") for name in tensors
    )
    assert all(
        (found[name] - grad).abs().max() < 1e-12 + 1e-9 * grad.abs().max()
        for name, grad in wanted.items()
    )
    assert min(grad.abs().max() for grad in found.values()) > 1e-7


@kinds
def test_merging(changes):
    untouched, net, ids = network(**changes), trained(network(**changes)), tokens(0, 2, 40)
    expected, own = (
        dense(net),
        {id(param) for name, param in net.named_parameters() if "lora" not in name},
    )
    logits = net(ids)
    assert S.merge_lora(net) is net and type(net.mixers[0]) is type(untouched.mixers[0])
    state = net.state_dict()
    assert state.keys() == untouched.state_dict().keys()
    assert all((state[name] - w).abs().max() < 1e-15 for name, w in expected.items())
    moved = {
        name.rpartition(".")[2]
        for name, w in untouched.state_dict().items()
        if not torch.equal(w, state[name])
    }
    assert moved == {name.rpartition(".")[2] for name in state if ".w_" in name}
    assert {
        id(param) for param in net.parameters()
    } == own  # the same parameters, Muon's splits with them
    assert (net(ids) - logits).abs().max() < 1e-12 and (
        plain(state, **changes)(ids) - logits
    ).abs().max() < 1e-12
    assert torch.equal(S.merge_lora(net)(ids), net(ids))  # nothing is left to merge
    assert S.setup_lora_adapter(net, 2) is net  # and there is room again


def test_a_compiled_network_has_its_adapters_in_one_graph():
    """The tracer alone, without code generation: no graph break, and no new graph as adapters learn."""
    torch.compiler.reset()
    net, ids = trained(network(layer_pattern="s1 s1")), tokens(0, 2, 40)
    graphs = []
    compiled = torch.compile(
        net, fullgraph=True, dynamic=False, backend=lambda graph, _: graphs.append(1) or graph
    )
    with torch.no_grad():
        before = net(ids)
        assert (compiled(ids) - before).abs().max() < 1e-12
        trained(net, 5)
        assert (compiled(ids) - net(ids)).abs().max() < 1e-12 < (net(ids) - before).abs().max()
        assert len(graphs) == 1
        with S.parametrize.cached():
            assert (compiled(ids) - net(ids)).abs().max() < 1e-12


def test_cached_generation_makes_each_sum_once(monkeypatch):
    net, made = trained(network(torch.float32)), []
    expected = S.merge_lora(copy.deepcopy(net))
    forward = S.Lora.forward
    monkeypatch.setattr(
        S.Lora, "forward", lambda self, weight: made.append(1) or forward(self, weight)
    )
    rest = ([[1, 5, 9]], 2, 20, 1.0, [(7,)], frozenset())
    with torch.no_grad(), S.parametrize.cached():
        found = S.generate(net, *rest)
    assert len(made) == 18 and net.mixers[0].parametrizations.w_o[0].lora_b.std() > 0.05
    assert found == S.generate(expected, *rest)


# ----------------------------------------------------------------------------------------- optimizer and quantization
@pytest.mark.parametrize(
    ("kind", "owner"),
    [("muon", "AdamW"), ("adamw", "AdamW"), ("adamw8bit", "AdamW8bit"), ("lion", "Lion")],
)
def test_adapters_have_the_rates_of_matrices(kind, owner):
    """Also those of few rows, which are stored like controls; Muon leaves them to AdamW."""
    settings = train_sft.Settings(optimizer=kind, learning_rate=0.011, weight_decay=0.07)
    net = trained(T.GPT(T.model_config(dataclasses.replace(SETTINGS, model_dim=256), 64, 1)))
    train_only(net)
    params = train_sft.trained_parameters(net)
    optimizers = train_sft.make_optimizers(params, settings, ALONE)
    found = {
        param: (type(optimizer).__name__, group["lr"], group["weight_decay"])
        for optimizer in optimizers
        for group in optimizer.param_groups
        for param in group["params"]
    }
    assert len(params) == 36 and all(".lora_" in name for name in params)
    assert {found[param] for param in params.values()} == {(owner, 0.011, 0.07)}
    assert sum(param.grad.numel() for param in found) == sizes(net)[0]


def test_an_adapted_matrix_is_counted_as_one_and_qat_takes_it_merged():
    net = network(torch.float32)
    before, table = T.count_parameters(net), T.quant_table(T.Settings())
    S.setup_lora_adapter(net)
    counts = T.count_parameters(net)
    added = sizes(train_only(net))[0]
    assert counts == {
        **before,
        "control": before["control"] + added,
        "total": before["total"] + added,
    }
    trained(net)
    expected = {
        name: T.dequantize(*T.quantize(w.float(), **table["matrix"]))
        for name, w in dense(net).items()
        if ".w_" in name
    }
    with T.quantized(S.merge_lora(net), table):
        assert all(
            (net.state_dict()[name] - w).abs().max() <= 1.01 * step(w)
            for name, w in expected.items()
        )
        assert (
            sum(torch.equal(net.state_dict()[name], w) for name, w in expected.items())
            > len(expected) / 2
        )


def step(w):
    """The distance of neighbouring values: sums in float32 and in float64 may lie on two sides of a boundary."""
    values = w.unique()
    return values.diff().min().item()


# ------------------------------------------------------------------------------------------- frozen weights in bfloat16
def frozen_dtypes(net):
    """Return (dtype, is trained, number of dimensions) of each parameter, by name."""
    return {
        name: (param.dtype, param.requires_grad, param.ndim)
        for name, param in net.named_parameters()
    }


@pytest.mark.parametrize("tied", [True, False])
def test_frozen_weights_in_bfloat16_train_merge_and_pack(tied):
    settings = train_sft.Settings(lora_rank=4, qat=False, learning_rate=0.02)
    net = network(torch.float32, tie_embeddings=tied, model_dim=32)
    before = {name: w.clone() for name, w in net.state_dict().items()}
    train_sft.adapt(net, settings, torch.device("cuda"))
    for name, (dtype, is_trained, param_ndim) in frozen_dtypes(net).items():
        is_adapter = name.endswith(("lora_a", "lora_b"))
        is_half = param_ndim > 1 and not is_adapter
        assert (dtype, is_trained) == (torch.bfloat16 if is_half else torch.float32, is_adapter)
    state = net.state_dict()
    plain = {
        name.replace("parametrizations.", "").removesuffix(".original"): w
        for name, w in state.items()
    }
    assert plain.keys() > before.keys()
    assert all(torch.equal(plain[name], w.to(plain[name].dtype)) for name, w in before.items())

    params = train_sft.trained_parameters(net)
    optimizers = train_sft.make_optimizers(params, settings, ALONE)
    frozen = {name: w.clone() for name, w in net.state_dict().items() if ".lora_" not in name}
    ids, losses = tokens(0, 4, 40), []
    for _ in range(12):
        torch._foreach_zero_([param.grad for param in params.values()])
        loss = nats(net, ids)
        loss.backward()
        assert all(param.grad.isfinite().all() for param in params.values())
        train_sft.step_optimizers(optimizers, 1.0, torch.tensor(True))
        losses.append(loss.item())
    assert all(param.grad.abs().max() > 0 for param in params.values())
    assert losses[-1] < 0.9 * losses[0], losses
    state = {name: w.clone() for name, w in net.state_dict().items()}
    assert all(torch.equal(state[name], w) for name, w in frozen.items())

    # The sums are made in float32 of the frozen weights, by quantize.py from the checkpoint too.
    expected = dense(net)
    own = {id(param) for name, param in net.named_parameters() if ".lora_" not in name}
    merged = S.merge_lora(net).state_dict()
    assert {id(param) for param in net.parameters()} == own
    for name, w in expected.items():
        assert merged[name].dtype == torch.float32
        assert (merged[name] - w).abs().max() <= 2e-7 * w.abs().max()
    by_quantize = Q.merge_adapters(state)
    assert by_quantize.keys() == merged.keys()
    assert all(torch.equal(by_quantize[name], w) for name, w in merged.items())
    coded = T.quantize_all(merged, T.quant_table(T.Settings()))
    content = T.pack_artifact(merged, coded, settings={}, tokenizer_sha256="", meta={})
    assert len(content) > 1000


def test_on_a_cpu_frozen_weights_stay_as_they_are():
    net = network(torch.float32)
    before = {name: w.clone() for name, w in net.state_dict().items()}
    train_sft.adapt(net, train_sft.Settings(lora_rank=2, qat=False), torch.device("cpu"))
    after = frozen_dtypes(net)
    assert {dtype for dtype, _, _ in after.values()} == {torch.float32}
    assert {name for name, (_, is_trained, _) in after.items() if is_trained} == {
        name for name in after if ".lora_" in name
    }
    merged = S.merge_lora(net).state_dict()
    assert all(torch.equal(merged[name], w) for name, w in before.items())


# ------------------------------------------------------------------------------------------------------------- errors
def test_a_second_adapter_is_refused():
    net = S.setup_lora_adapter(network(), 32)
    with pytest.raises(S.UserError, match=r"^setup_lora_adapter: the model has adapters; merge_"):
        S.setup_lora_adapter(net, 4)
