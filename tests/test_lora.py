"""Section lora: what an adapter computes and what trains it, counts, merging, what is refused."""

import copy

import pytest
import torch
from test_model import config, tokens

import quantize as Q
import sample as S
import train_gpt as T
import train_sft
from conftest import add_noise, refusal

ALONE = T.Runtime(rank=0, world_size=1, device=torch.device("cpu"), distributed=False)


def network(dtype=torch.float64, **changes):
    """Return a network whose zero-initialised projections are not zero, so that every path counts."""
    torch.manual_seed(0)
    net = T.GPT(config(**changes)).to(dtype)
    add_noise(net, 0.05)
    return net


def adapted(net):
    """Return the network with an adapter that is not zero, the adapter alone to be trained."""
    S.setup_lora_adapter(net, rank=4, alpha=6.0)
    for name, param in net.named_parameters():
        param.requires_grad_("lora" in name)
        if name.endswith("lora_b"):
            param.data.normal_(std=0.1)
    return net


def dense(net):
    """Return the state of a plain network with the same function, its sums made in float64."""
    tensors = net.state_dict()
    state = {}
    for name, w in tensors.items():
        if name.endswith(".original"):
            place = name.removesuffix("original") + "0."
            a, b, scale = (tensors[place + part].double() for part in ("lora_a", "lora_b", "scale"))
            name = name.removesuffix(".original").replace("parametrizations.", "")
            state[name] = w.double() + scale * b @ a
        elif "parametrizations" not in name:
            state[name] = w
    return state


def nats(net, ids):
    return net(ids[:, :-1], ids[:, 1:]).mean()


KINDS = {
    "GDN shared": dict(layer_pattern="g1 g1 a", bigram_vocab_size=64),
    "shared layers": dict(layer_pattern="A1 G2 A1 G2"),
    "bio": dict(mlp="bio_soft"),
    "swiglu": dict(mlp="swiglu", tie_embeddings=False),
}


@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS)
def test_an_adapted_network_is_that_of_the_dense_sums(changes):
    """With W' = W + s B A: its logits, and merged."""
    net, ids = network(**changes), tokens(0, 2, 40)
    plain = copy.deepcopy(net)
    before = {name: w.clone() for name, w in net.state_dict().items()}
    own = {id(param) for param in net.parameters()}
    matrices = {name for name in before if ".w_" in name}
    adapted(net)
    plain.load_state_dict(dense(net))
    logits = net(ids)
    assert (logits - plain(ids)).abs().max() < 1e-12
    refusal(S.UserError, "^setup_lora_adapter: the model has adapters", S.setup_lora_adapter, net)

    assert S.merge_lora(net) is net and type(net.mixers[0]) is type(plain.mixers[0])
    state = net.state_dict()
    assert state.keys() == before.keys()
    assert {name for name, w in before.items() if not torch.equal(w, state[name])} == matrices
    assert all((state[name] - w).abs().max() < 1e-15 for name, w in plain.state_dict().items())
    # The same parameters, Muon's splits with them.
    assert {id(param) for param in net.parameters()} == own
    assert (net(ids) - logits).abs().max() < 1e-12
    assert torch.equal(S.setup_lora_adapter(net)(ids), net(ids))  # a fresh adapter changes nothing


def test_scale_rank_first_values_and_counts():
    net = network(torch.float32, model_dim=64)
    before = T.count_parameters(net)["total"]
    S.setup_lora_adapter(net, rank=8, alpha=2.0)
    added = [param for name, param in net.named_parameters() if ".lora_" in name]
    assert T.count_parameters(net)["total"] - before == sum(param.numel() for param in added)
    weight = net.mixers[0].parametrizations.w_qkvg
    a, b = weight[0].lora_a, weight[0].lora_b
    assert a.shape == (8, 64) and b.shape == (256, 8)
    every = torch.cat([w.flatten() * w.size(1) ** 0.5 for w in added[::2]])
    assert abs(every.std() - 1) < 0.05 and abs(every.mean()) < 0.05
    b.data.fill_(1.0)
    assert torch.allclose(net.mixers[0].w_qkvg, weight.original + 0.25 * a.sum(0), atol=1e-6)


# ------------------------------------------------------------------------------------------- frozen weights in bfloat16
@pytest.mark.parametrize(
    "device, dtype, is_half",
    [
        ("cpu", None, False),
        ("cuda", None, True),
        ("cpu", "bfloat16", True),
        ("cuda", "float32", False),
    ],
)
def test_frozen_weights_in_bfloat16_train_and_merge(device, dtype, is_half):
    """On CUDA, or by DTYPE. Sums are made in float32 of the frozen weights, by quantize.py too."""
    settings = train_sft.Settings(lora_rank=4, qat=False, learning_rate=0.02)
    net = network(torch.float32, tie_embeddings=False, model_dim=32)
    ids = tokens(0, 4, 40)
    before = {name: w.clone() for name, w in net.state_dict().items()}
    net.dtype = dtype and getattr(torch, dtype)
    train_sft.adapt(net, settings, torch.device(device))
    for name, param in net.named_parameters():
        is_adapter = ".lora_" in name
        is_frozen = param.ndim > 1 and not is_adapter
        assert param.dtype == (torch.bfloat16 if is_half and is_frozen else torch.float32)
        assert param.requires_grad == is_adapter
    params = train_sft.trained_parameters(net, settings)
    optimizers = train_sft.make_optimizers(params, settings, ALONE)
    losses = []
    for _ in range(9):
        torch._foreach_zero_([param.grad for param in params.values()])
        losses.append(nats(net, ids))
        losses[-1].backward()
        train_sft.step_optimizers(optimizers, 1.0, torch.tensor(True))
    assert losses[-1] < 0.9 * losses[0], losses
    state = {name: w.clone() for name, w in net.state_dict().items()}
    expected = dense(net)
    merged = S.merge_lora(net).state_dict()
    by_quantize = Q.merge_adapters(state)
    assert by_quantize.keys() == merged.keys() == before.keys()
    for name, w in merged.items():
        assert w.dtype == torch.float32 and torch.equal(by_quantize[name], w)
        assert (w - expected[name]).abs().max() <= 2e-7 * w.abs().max()
        if ".w_" not in name:
            half = before[name].bfloat16() if w.ndim > 1 and is_half else before[name]
            assert torch.equal(w, half.float())
