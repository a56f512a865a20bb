"""The branches for CUDA, on the CPU: a copy of a script in which every tensor says that it is on a GPU. A run on eight
ranks, from plan to score.
"""

import contextlib
import functools
import re
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import train_gpt as T
from conftest import ROOT, TINY, Place, add_noise, load_tool

gpu_bytes = load_tool("experiments/gpu_bytes")
pytestmark = pytest.mark.usefixtures("one_thread")


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


def make(script, settings=None, dtype=None):
    """Return a network with weights that are not zero, the same for every script."""
    config = T.model_config(settings or T.Settings(**SHAPE), 300, 1)
    torch.manual_seed(0)
    network = script.GPT(script.GPTConfig(**vars(config)))
    add_noise(network, 0.05)
    network.dtype = dtype
    return network


def batch(rows=3, length=200):
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(2, 300, (rows, length + 1), generator=random)
    ids[torch.rand(ids.shape, generator=random) < 0.02] = 1
    return ids[:, :-1], ids[:, 1:]


def gradients(network):
    losses = network(*batch())
    return [losses.detach(), *torch.autograd.grad(losses.mean(), list(network.parameters()))]


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


def test_losses_and_gradients_in_bfloat16_are_those_in_float32():
    """The forced copy takes chunks of 64 and PyTorch's attention with a mask; activations are bfloat16."""
    wide = make(T, dtype=torch.float32)
    state = wide.state_dict()
    expected = gradients(wide)
    network = make(forced("train_gpt"))
    network.load_state_dict(state)
    assert network(batch()[0]).dtype == torch.float32
    for want, found in zip(expected, gradients(network), strict=True):
        # Of scales of few channels, rounding errors are as large as what is left of a sum.
        limit = 0.06 if want.ndim == 2 and min(want.shape) > 16 else 0.3
        assert 0 < (found - want).norm() < limit * want.norm()


def test_fake_quantization_and_muon():
    """A step of Muon with products in bfloat16, under fake quantization, is near that in float32."""
    moved = []
    for script, dtype in ((T, torch.float32), (forced("train_gpt"), torch.bfloat16)):
        settings = script.Settings(**SHAPE)
        network = make(script, settings, dtype)
        before = {name: param.detach().clone() for name, param in network.named_parameters()}
        runtime = script.Runtime(0, 1, torch.device("cpu"), False)
        optimizers = script.make_optimizers(network, settings, script.HEAD_LR, runtime)
        with script.quantized(network, script.quant_table(settings)):
            network(*batch()).mean().backward()
        norm, _ = script.reduce_gradients(network.parameters(), runtime, 0.3, torch.zeros(1))
        script.step_optimizers(optimizers, 1.0, norm.isfinite())
        moved.append({name: param - before[name] for name, param in network.named_parameters()})
    for name, want in moved[0].items():
        if name.split(".")[-1].startswith("w_"):
            cosine = F.cosine_similarity(want.flatten(), moved[1][name].flatten(), 0)
            assert cosine > 0.95, name


def test_the_artifact(tmp_path):
    script = forced("train_gpt")
    settings = script.Settings(**SHAPE)
    network = make(script, settings)
    header = {"settings": vars(network.config), "tokenizer_sha256": "0" * 64, "meta": {}}
    runtime = script.Runtime(0, 1, torch.device("cpu"), False)
    run = SimpleNamespace(runtime=runtime, settings=settings, log=print)
    _, data = script.fit_artifact(network, 1.0, 10**6, header, run)
    (tmp_path / "a.upar").write_bytes(data)
    header, tensors, _ = script.read_artifact(tmp_path / "a.upar")
    rebuilt = script.GPT(script.GPTConfig(**header["settings"]))
    rebuilt.load_state_dict(tensors)
    with torch.no_grad():
        before, after = (each(*batch()).mean() for each in (network, rebuilt))
    assert abs(after - before) < 0.02 * before


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
        targets = ids.roll(-1)
        mask = torch.zeros_like(ids, dtype=torch.bool)
        mask[:, len(prompt) - 1 : -1] = True
        whole = SimpleNamespace(ids=ids, doc=torch.zeros_like(ids), targets=targets, mask=mask)
        logps, _ = script.token_logps(network, whole, 1.0)
        step_logps = found[row, :-1].gather(1, tokens[row][:, None])[:, 0]
        assert (logps[0, len(prompt) - 1 : -1] - step_logps).abs().max() < 0.05
    assert lengths == [256, 256]


def test_padded_rows_stay_inside_the_context():
    """A longer row, of a judge with a shorter context, is read as it is."""
    script = forced("train_grpo")
    config = SimpleNamespace()
    seen = []
    network = SimpleNamespace(config=config, features=lambda ids, doc: seen.append(ids) or ids)
    for context, length, padded in (
        (100, 90, 100),
        (100, 100, 100),
        (2048, 90, 256),
        (2048, 256, 256),
        (2048, 257, 512),
        (100, 257, 257),
    ):
        config.train_seq_len = context
        ids = torch.arange(length).repeat(2, 1)
        batch = SimpleNamespace(ids=ids, doc=torch.zeros_like(ids))
        assert torch.equal(script.row_features(network, batch), ids)
        assert seen[-1].shape == (2, padded) and torch.equal(seen[-1][:, :length], ids)


# ---------------------------------------------------------------------------------------- eight ranks
@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_data):
    return Place(tmp_path_factory.mktemp("ranks"), tiny_data, dict(TINY, QAT=0, SAVE_EVERY=0))


@pytest.mark.full
@pytest.mark.parametrize("qat", [0, 1])
def test_eight_ranks_from_plan_to_score(place, qat):
    """QAT=0: averages. QAT=1: its switch. The score is one process's."""
    score = {}
    for ranks in (1, 8):
        out = f"{ranks} ranks, qat {qat}"
        if ranks == 1:
            place.run(out, QAT=qat)
        else:
            place.ranks(out, ranks=8, QAT=qat)
        result = place.result(out)
        score[ranks] = result["val_bpb"]
        assert result["world_size"] == ranks and result["steps"] == 30
        assert set(result["phases"]) == {"warmup", "warmdown", "ema", "swa", *["qat"] * qat}
        log = place.log(out)
        assert re.search(r"^weights: \w+ chosen$", log, re.M)
        # By the estimate when QAT begins, and at the end.
        assert len(re.findall(r"^sizes: \d+ bytes, at most", log, re.M)) == 1 + qat
    assert score[8] == pytest.approx(score[1], rel=2e-3)
