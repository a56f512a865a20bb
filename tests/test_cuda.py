"""The branches for CUDA, on the CPU: a copy of a script in which every tensor says that it is on a GPU. A run on eight
ranks, from plan to score.
"""

import contextlib
import functools
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import train_gpt as T
from conftest import ROOT, TINY, Place, add_noise, load_tool

gpu_bytes = load_tool("experiments/gpu_bytes")


@functools.cache
def forced(name):
    return gpu_bytes.forced_module(ROOT / f"{name}.py")


SHAPE = dict(
    layer_pattern="g s a",
    model_dim=128,
    num_heads=2,
    num_kv_heads=1,
    attn_window=64,
    mlp="bio_soft",
    bigram_vocab_size=64,
)


def make(script, dtype=None):
    """Return a network with weights that are not zero, the same for every script."""
    config = T.model_config(T.Settings(**SHAPE), 300, 1)
    torch.manual_seed(0)
    network = script.GPT(script.GPTConfig(**vars(config)))
    add_noise(network, 0.05)
    network.dtype = dtype
    return network


@functools.cache
def batch():
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(2, 300, (3, 201), generator=random)
    ids[torch.rand(ids.shape, generator=random) < 0.02] = 1
    return ids[:, :-1], ids[:, 1:]


def test_attention_with_the_strides_of_a_gpu(monkeypatch):
    """There PyTorch returns (B, H, T, D) with T before H in memory. The first run on a GPU failed by that."""
    attention = F.scaled_dot_product_attention

    def transposed(*inputs):
        return attention(*inputs).transpose(1, 2).contiguous().transpose(1, 2)

    monkeypatch.setattr(F, "scaled_dot_product_attention", transposed)
    q, k, v = (torch.randn(2, heads, 70, 8) for heads in (4, 2, 2))
    mask = torch.ones(2, 70, 70, dtype=torch.bool).tril()
    found = forced("train_gpt").masked_attention(q, k, v, mask)
    torch.testing.assert_close(found, T.masked_attention(q, k, v, mask))


def test_gradients_and_a_step_of_muon_in_bfloat16_are_near_those_in_float32():
    """The forced copy takes chunks of 64 and PyTorch's attention with a mask; activations are bfloat16."""
    gradients, moves = [], []
    for script, dtype in ((T, torch.float32), (forced("train_gpt"), None)):
        settings = script.Settings(**SHAPE)
        network = make(script, dtype)
        assert network(batch()[0]).dtype == torch.float32
        before = [param.detach().clone() for param in network.parameters()]
        network(*batch()).mean().backward()
        gradients.append([param.grad.clone() for param in network.parameters()])
        network.zero_grad()
        network.dtype = dtype or torch.bfloat16
        runtime = script.Runtime(0, 1, torch.device("cpu"), False)
        optimizers = script.make_optimizers(network, settings, runtime)
        with script.quantized(network, script.quant_table(settings.matrix_bits)):
            network(*batch()).mean().backward()
        norm, _ = script.reduce_gradients(
            [param.grad for param in network.parameters()], runtime, 0.3, torch.zeros(1)
        )
        script.step_optimizers(optimizers, 1.0, norm.isfinite())
        moves.append(
            [w.detach() - old for w, old in zip(network.parameters(), before, strict=True)]
        )
    for want, found in zip(*gradients, strict=True):
        # Of scales of few channels, rounding errors are as large as what is left of a sum.
        limit = 0.06 if want.ndim == 2 and min(want.shape) > 16 else 0.3
        assert 0 < (found - want).norm() < limit * want.norm()
    for (name, _), want, found in zip(network.named_parameters(), *moves, strict=True):
        if name.split(".")[-1].startswith("w_"):
            assert F.cosine_similarity(want.flatten(), found.flatten(), 0) > 0.95, name


def test_generation_and_padded_rows():
    """Log-probabilities of generated tokens are those of the text as a whole, padded to 256 tokens."""
    script = forced("train_grpo")
    network = make(script)
    # A CUDA graph is recorded on a GPU alone.
    recorded = contextlib.nullcontext()
    graph = SimpleNamespace(replay=None)
    script.torch = SimpleNamespace(**vars(torch))
    script.torch.cuda = SimpleNamespace(CUDAGraph=lambda: graph, graph=lambda graph: recorded)
    prompts = [[1, 5, 9, 200], [1, 7]]
    decoder = script.Decoder(network, prompts)
    graph.replay = lambda: setattr(decoder, "next_logits", decoder.read(decoder.ids))
    steps = [decoder.logits]
    tokens = torch.randint(2, 300, (2, 12))
    with torch.no_grad():
        for token in tokens.T:
            if decoder.graph is None:
                # Recording reads the token once more; a graph would not run it.
                logits = decoder.read(token[:, None])
                decoder.logits = logits
            steps.append(decoder.logits)
    found = torch.stack(steps, 1).log_softmax(-1)
    lengths = []
    features = network.features
    network.features = lambda ids, doc: lengths.append(ids.size(1)) or features(ids, doc=doc)
    for row, prompt in enumerate(prompts):
        ids = torch.tensor([[*prompt, *tokens[row].tolist()]])
        mask = torch.zeros_like(ids, dtype=torch.bool)
        mask[:, len(prompt) - 1 : -1] = True
        doc = torch.zeros_like(ids)
        whole = SimpleNamespace(ids=ids, doc=doc, targets=ids.roll(-1), mask=mask)
        logps = script.token_logps(network, whole, 1.0)
        step_logps = found[row, :-1].gather(1, tokens[row][:, None])[:, 0]
        assert (logps[0, len(prompt) - 1 : -1] - step_logps).abs().max() < 0.05
    assert lengths == [256, 256]


# Context, length of a row, and that to which it is padded.
LENGTHS = [(100, 90, 100), (2048, 90, 256), (2048, 256, 256), (2048, 257, 512), (100, 257, 257)]


@pytest.mark.parametrize(("context", "length", "padded"), LENGTHS)
def test_padded_rows_stay_inside_the_context(context, length, padded):
    """A longer row, of a judge with a shorter context, is read as it is."""
    seen = []
    network = SimpleNamespace(config=SimpleNamespace(train_seq_len=context))
    network.features = lambda ids, doc: seen.append(ids.shape) or ids
    ids = torch.arange(length).repeat(2, 1)
    batch = SimpleNamespace(ids=ids, doc=torch.zeros_like(ids))
    assert torch.equal(forced("train_grpo").row_features(network, batch), ids)
    assert seen == [(2, padded)]


# ---------------------------------------------------------------------------------------- eight ranks
@pytest.mark.full
@pytest.mark.parametrize("qat", [0, 1])
def test_eight_ranks_from_plan_to_score(tmp_path, tiny_data, qat):
    """QAT=0: averages. QAT=1: its switch. The score is one process's."""
    place = Place(tmp_path, tiny_data, dict(TINY, QAT=qat, SAVE_EVERY=0))
    place.run("1")
    place.ranks("8", ranks=8)
    for ranks in (1, 8):
        result = place.result(str(ranks))
        assert result["world_size"] == ranks and result["steps"] == 30
        assert set(result["phases"]) == {"warmup", "warmdown", "ema", "swa", *["qat"] * qat}
        # By the estimate when QAT begins, and at the end.
        assert place.log(str(ranks)).count("\nsizes: ") == 1 + qat
    assert result["val_bpb"] == pytest.approx(place.result("1")["val_bpb"], rel=2e-3)
