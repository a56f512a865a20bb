"""Section kernels: the faster forms against the plain ones, and how a run chooses among them."""

import functools
import json
import math
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from reference import CountLaunches

import train_gpt as T
from conftest import ROOT

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def plain_forms():
    T.FAST.clear()
    yield
    T.FAST.clear()


# ------------------------------------------------------------------------------ choice and self-test
class Lines(list):
    __call__ = list.append


def choose(monkeypatch, outcomes, choice="auto", device="cuda"):
    """Return the log of choose_kernels, with self-tests that end as `outcomes` say."""

    def self_test(name, form, network, device):
        T.FAST["left"] = form  # a test that fails leaves something behind
        if isinstance(outcomes[name], Exception):
            raise outcomes[name]
        return outcomes[name]

    monkeypatch.setattr(T, "self_test", self_test)
    runtime = T.Runtime(0, 1, SimpleNamespace(type=device), False)
    lines = Lines()
    T.choose_kernels(choice, SimpleNamespace(dtype=torch.bfloat16), runtime, lines)
    return lines


OUTCOMES = {
    "attention": (0.02, 0.02),
    "gdn": ImportError("No module named 'fla'"),
    "scan": (0.5, 0.02),
    "loss": (0.039, 0.02),
}


def test_forms_that_pass_are_taken_and_the_log_says_why(monkeypatch):
    lines = choose(monkeypatch, OUTCOMES)
    assert T.FAST == {"attention": T.varlen_attend, "loss": T.softcap_loss}
    assert lines == [
        "kernels: attention taken: error 2.0e-02, of the plain form 2.0e-02",
        """kernels: gdn left out: ImportError("No module named 'fla'")""",
        "kernels: scan left out: error 5.0e-01, of the plain form 2.0e-02",
        "kernels: loss taken: error 3.9e-02, of the plain form 2.0e-02",
    ]


def test_a_nan_is_left_out(monkeypatch):
    choose(monkeypatch, dict.fromkeys(OUTCOMES, (math.nan, 0.02)))
    assert T.FAST == {}


@pytest.mark.parametrize(("choice", "device"), [("plain", "cuda"), ("auto", "cpu")])
def test_plain_forms_are_not_tested(monkeypatch, choice, device):
    assert choose(monkeypatch, {}, choice, device) == [] and T.FAST == {}


def test_fla_that_is_asked_for_and_does_not_pass_is_an_error(monkeypatch):
    with pytest.raises(T.UserError, match=r"^KERNELS='fla': .*requirements-gpu\.txt"):
        choose(monkeypatch, OUTCOMES, "fla")
    with pytest.raises(T.UserError, match="KERNELS='fla'"):
        choose(monkeypatch, OUTCOMES, "fla", "cpu")


class WrongGradient(torch.autograd.Function):
    """Right losses, with gradients that are a fifth too large."""

    @staticmethod
    def forward(ctx, logits, targets, cap):
        exact = logits.detach().requires_grad_()
        with torch.enable_grad():
            losses = F.cross_entropy(T.softcap(exact, cap), targets, reduction="none")
            (ctx.gradient,) = torch.autograd.grad(losses.sum(), exact)
        return losses.detach(), losses.detach()

    @staticmethod
    def backward(ctx, d, _):
        return 1.2 * ctx.gradient, None, None


def right_loss(logits, targets, cap):
    return (F.cross_entropy(T.softcap(logits, cap), targets, reduction="none"),)


def make_self_test(dtype):
    """Return the self-test for networks of one shape."""
    torch.manual_seed(0)
    config = T.GPTConfig(500, 1, "g", "rms", model_dim=128, num_heads=2, num_kv_heads=1)
    network = T.GPT(config)
    network.dtype = dtype
    return functools.partial(T.self_test, network=network, device=torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_self_test_sees_a_wrong_gradient(dtype):
    test = make_self_test(dtype)
    right, plain = test("loss", right_loss)
    wrong, _ = test("loss", WrongGradient.apply)
    assert right <= 2 * plain + 0.001 < wrong
    assert (plain == 0) == (dtype == torch.float32)


def test_the_self_test_sees_a_nan_anywhere():
    """Also in one of many tensors, whose error `max` would not notice."""
    tensors = [torch.ones(200), torch.full((200,), math.nan), torch.ones(200)]
    assert T.largest_error(tensors, [torch.ones(200)] * 3).isnan()

    def gdn(q, k, v, g, beta):
        o, _ = T.gdn_chunk(q, k, v, g, beta)
        return (torch.where(o == o.max(), math.nan, o),)

    error, plain = make_self_test(torch.bfloat16)("gdn", gdn)
    assert error.isnan() and not error < 2 * plain + 0.001


# ----------------------------------------------------------------------------------------- attention
def varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, *, window_size, enable_gqa=False):
    """What torch.nn.attention.varlen.varlen_attn returns, by a loop over the documents."""
    assert cu_q is cu_k and cu_q.dtype == torch.int32 and max_q == max_k
    assert enable_gqa or torch.__version__ < "2.12"
    left, right = window_size
    assert right == 0
    outputs = []
    for begin, end in zip(cu_q[:-1].tolist(), cu_q[1:].tolist(), strict=True):
        assert 0 < end - begin <= max_q
        parts = (x[begin:end].transpose(0, 1) for x in (q, k, v))  # (heads, tokens, D)
        query, key, value = parts
        key, value = (x.repeat_interleave(len(query) // len(key), 0) for x in (key, value))
        distance = torch.arange(end - begin)[:, None] - torch.arange(end - begin)
        mask = (distance >= 0) & ((distance <= left) | (left < 0))
        o = F.scaled_dot_product_attention(query, key, value, mask)
        outputs.append(o.transpose(0, 1))
    return torch.cat(outputs)


@pytest.fixture
def varlen(monkeypatch):
    """Attention by documents, with a stand-in for FlashAttention."""
    import torch.nn.attention.varlen as module

    monkeypatch.setattr(module, "varlen_attn", varlen_attn)
    T.FAST["attention"] = T.varlen_attend


def test_borders_of_documents():
    T.FAST["attention"] = T.varlen_attend
    ids = torch.tensor([[7, 7, 1, 7], [1, 7, 7, 7], [7, 7, 7, 1]])
    (borders,) = T.document_borders(ids, 1, torch.device("cpu"))
    assert borders.dtype == torch.int32 and borders.tolist() == [0, 2, 4, 8, 11, 12]
    T.FAST.clear()
    assert T.document_borders(ids, 1, torch.device("cpu")) == []


@pytest.mark.parametrize("window", [1, 16, 40, T.FULL_WINDOW])
def test_attention_by_documents_is_that_by_masks(varlen, window):
    torch.manual_seed(0)
    ids = torch.randint(12, (3, 40))
    doc = (ids == 1).cumsum(1)
    shapes = ((3, 4, 40, 8), (3, 2, 40, 8), (3, 2, 40, 8))
    q, k, v = (torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes)
    weights = torch.randn(shapes[0], dtype=torch.float64)
    (borders,) = T.document_borders(ids, 1, torch.device("cpu"))
    found = {}
    for name, extra in (("masks", ()), ("borders", (borders,))):
        o = T.attend(q, k, v, doc, window, *extra)
        found[name] = [o, *torch.autograd.grad((o * weights).sum(), (q, k, v))]
    for masked, varied in zip(found["masks"], found["borders"], strict=True):
        assert (masked - varied).abs().max() < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_self_test_passes_attention_and_sees_a_window_that_is_one_short(varlen, dtype):
    test = make_self_test(dtype)
    error, plain = test("attention", T.varlen_attend)
    assert error <= 2 * plain + 0.001

    def short(q, k, v, borders, window):
        return T.varlen_attend(q, k, v, borders, min(window, q.size(2)) - 1)

    error, plain = test("attention", short)
    assert error > 2 * (2 * plain + 0.001)


def test_batches_and_scores_tell_the_borders(varlen, tiny_data):
    """Losses of training batches and the score of validation are those by masks."""
    settings = T.Settings(
        data_path=str(tiny_data),
        train_batch_tokens=256,
        train_seq_len=64,
        holdout_tokens=64,
        layer_pattern="g s a",
        model_dim=32,
        num_heads=2,
        attn_window=16,
    )
    data = T.open_data(settings)
    tokenizer = data.tokenizer
    network = T.GPT(T.model_config(settings, tokenizer.vocab_size, tokenizer.bos_id))
    for param in network.parameters():
        param.data += 0.1 * torch.randn_like(param)
    runtime = T.Runtime(0, 1, torch.device("cpu"), False)
    scorer = T.Scorer(tokenizer.bos_id, runtime, 64, 4)
    found = []
    for forms in ({"attention": T.varlen_attend}, {}):
        T.FAST.clear()
        T.FAST.update(forms)
        (batch,) = T.Batches(data, settings, runtime).micro_batches(0)
        assert len(batch) == (3 if forms else 2)
        found.append(
            (network(*batch), scorer.score(network, T.EvalText(data.val.tokens[:2000], 1)).nats)
        )
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-6)
    assert (found[0][0] - found[1][0]).abs().max() < 1e-4


SMALL = dict(layer_pattern="g s a", model_dim=64, num_heads=2, attn_window=16)
GPU_CONFIGS = [
    path
    for path in sorted((ROOT / "configs").glob("*.env"))
    if "DATA_PATH=data/datasets" in path.read_text()
]


@pytest.mark.parametrize(
    "path",
    [None, *(pytest.param(path, id=path.stem, marks=pytest.mark.full) for path in GPU_CONFIGS)],
)
def test_the_network_is_one_graph_for_any_number_of_documents(path):
    """All faster forms are single calls in it; another number of documents compiles nothing again."""
    forms = (T.varlen_attend, T.fla_gdn, T.softcap_loss)
    T.FAST.update(zip(("attention", "gdn", "loss"), forms, strict=True))
    settings = T.Settings(**SMALL)
    if path:
        presets = {"ARCH_MODE": T.ARCH_PRESETS, "OPTIMIZER": T.OPTIMIZER_PRESETS}
        settings = T.load_settings(T.Settings, {"CONFIG": str(path)}, presets=presets)
    network = T.GPT(T.model_config(settings, 300, 1))
    words = network.config.layers.split()
    counts = {
        "_varlen_attn": sum(word[0] in "sSaA" for word in words),
        "fla_gdn": sum(word[0] in "gG" for word in words),
        "softcap_loss": network.config.logit_softcap > 0,
    }
    graphs = []
    torch.compiler.reset()

    def backend(graph, inputs):
        graphs.append(graph)
        return lambda *arguments: (torch.zeros(3, 64),)

    model = torch.compile(network, dynamic=False, fullgraph=True, backend=backend)
    for documents in (2, 5, 9):
        ids = torch.full((3, 64), 7)
        ids[0, 3 : 3 + documents] = 1
        borders = T.document_borders(ids, 1, torch.device("cpu"))
        assert borders[0].shape == (3 + documents + 1,)
        with torch.no_grad():
            model(ids, ids, *borders)
    (graph,) = graphs
    calls = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    for name, count in counts.items():
        assert sum(name in call for call in calls) == count, name
    assert not any("scaled_dot_product" in call or "gdn_scan" in call for call in calls)


def test_what_fills_a_forward_has_few_documents(varlen):
    """FlashAttention takes at most 65,535 documents: windows that are missing have those of a window."""
    tokens = np.full(3 * 64 + 1, 7)
    tokens[[0, 50]] = 1
    borders = []

    def model(ids, targets, places):
        borders.append(places.tolist())
        return torch.zeros(ids.shape)

    runtime = T.Runtime(0, 1, torch.device("cpu"), False)
    T.Scorer(1, runtime, 64, 8).score(model, T.EvalText(tokens, 1))
    fill = [part for at in range(192, 512, 64) for part in (at, at + 50)]
    assert borders == [[0, 50, 64, 128, *fill, 512]]


# ------------------------------------------------------------------------------------ launches (GPU)
@pytest.fixture(scope="module")
def golf():
    """Return the settings and the network of golf_8gpu.env, without memory for its weights."""
    given = T.read_config(ROOT / "configs" / "golf_8gpu.env")
    presets = {"ARCH_MODE": T.ARCH_PRESETS}
    settings = T.load_settings(T.Settings, given, (), presets)
    with torch.device("meta"):
        network = T.GPT(T.model_config(settings, 8192, 1))
    network.dtype = torch.bfloat16
    return settings, network


def test_muon_and_fake_quantization_launch_little(golf):
    """A step had 608 and 672 launches. Every launch of 5 us is a thousandth of such a step."""
    settings, network = golf
    with (
        CountLaunches() as launches,
        torch.no_grad(),
        T.quantized(network, T.quant_table(settings)),
    ):
        pass
    assert launches.number <= 150
    runtime = T.Runtime(0, 8, torch.device("meta"), False)
    rates = dict.fromkeys(("matrix", "embedding", "head", "control"), (0.01, 0.01))
    muon, _ = T.Optimizers(network, "muon", rates, runtime).all
    muon.param_groups[0]["momentum"] = 0.9
    skip = torch.zeros((), dtype=torch.bool, device="meta")
    muon.step(skip)  # makes the buffers
    with CountLaunches() as launches:
        muon.step(skip)
    assert launches.number <= 150


# -------------------------------------------------------------------------- Triton, without a GPU
def run_script(name, **environment):
    """Return what a script beside this one prints, from JSON."""
    command = [sys.executable, ROOT / "tests" / name]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.full
def test_interpreted_kernels_are_the_plain_forms():
    pytest.importorskip("fla")
    errors = run_script("interpreted.py", TRITON_INTERPRET="1")
    for name, error in errors.items():
        assert error < (1e-3 if "float16" in name else 1e-5), (name, error)


@pytest.mark.full
def test_kernels_compile_for_gpus_without_spills():
    pytest.importorskip("triton")
    shared_memory = {"sm_80": 163_840, "sm_90": 232_448}  # bytes that a program may have
    for name, needs in run_script("compiled.py").items():
        assert needs["stack"] == 0 and needs["registers"] < 200, name
        assert needs["shared"] <= shared_memory[name[-5:]], name
