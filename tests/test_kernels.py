"""Section kernels: the faster forms against the plain ones, and how a run chooses among them."""

import json
import math
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from reference import CountLaunches

import train_gpt as T
from conftest import ROOT, add_noise

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def plain_forms():
    T.FAST.clear()
    yield
    T.FAST.clear()


# ------------------------------------------------------------------------------ choice and check
def network(dtype=torch.bfloat16, layers="g s"):
    config = T.GPTConfig(
        500, 1, layers, "rms rms", 160, model_dim=128, num_heads=2, num_kv_heads=1, attn_window=16
    )
    return SimpleNamespace(config=config, dtype=dtype)


def choose(monkeypatch, forms, choice="auto", dtype=torch.bfloat16):
    """Return the log of choose_kernels on a CPU that says it is a GPU, with other faster forms."""
    for name, form in forms.items():
        monkeypatch.setattr(T, {"attention": "varlen_attend", "gdn": "fla_gdn"}[name], form)
    device = SimpleNamespace(type="cuda")
    monkeypatch.setattr(T, "check_attention", on_cpu(T.check_attention))
    monkeypatch.setattr(T, "check_gdn", on_cpu(T.check_gdn))
    lines = []
    torch.manual_seed(0)
    T.choose_kernels(choice, network(dtype), T.Runtime(0, 1, device, False), lines.append)
    return lines


@pytest.mark.parametrize("layers, kept", [("g g", ["gdn"]), ("a s", ["attention"])])
def test_forms_that_no_layer_uses_are_not_checked(monkeypatch, layers, kept):
    for name in ("check_attention", "check_gdn"):
        monkeypatch.setattr(T, name, lambda *_: torch.tensor([0.1, 0.1]))
    runtime = T.Runtime(0, 1, SimpleNamespace(type="cuda"), False)
    T.choose_kernels("fla" if "g" in layers else "auto", network(layers=layers), runtime, str)
    assert list(T.FAST) == kept
    T.FAST.clear()


def on_cpu(check):
    return lambda config, ids, dtype, device: check(config, ids, dtype, torch.device("cpu"))


def right_gdn(*inputs):
    return T.gdn_chunk(*inputs)


class WrongGradient(torch.autograd.Function):
    """The right output, with gradients that are a fifth too large."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, d):
        return 1.2 * d


def wrong_gdn(q, k, v, g, beta):
    return T.gdn_chunk(q, k, WrongGradient.apply(v), g, beta)


def nan_gdn(*inputs):
    o, _ = T.gdn_chunk(*inputs)
    return (torch.where(o == o.max(), math.nan, o),)


def short_attend(q, k, v, borders, window):
    """Windows that are one token too short."""
    return varlen_by_loop(q, k, v, borders, min(window, q.size(2)) - 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_right_forms_are_taken_and_the_log_says_why(monkeypatch, dtype):
    forms = {"attention": varlen_by_loop, "gdn": right_gdn}
    lines = choose(monkeypatch, forms, "fla", dtype)
    assert T.FAST == forms
    for name, line in zip(forms, lines, strict=True):
        assert re.fullmatch(rf"kernels: {name} taken: error \S+, of the plain form \S+", line)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "wrong",
    [{"gdn": wrong_gdn}, {"gdn": nan_gdn}, {"attention": short_attend}],
    ids=["gradient", "nan", "window"],
)
def test_the_form_that_is_wrong_is_named_and_left_out(monkeypatch, dtype, wrong):
    forms = {"attention": varlen_by_loop, "gdn": right_gdn, **wrong}
    lines = choose(monkeypatch, forms, dtype=dtype)
    assert T.FAST.keys() == forms.keys() - wrong.keys()
    (name,) = wrong
    (line,) = (line for line in lines if "left out" in line)
    assert line.startswith(f"kernels: {name} left out: error ")


def test_rank_0_decides_for_all_ranks(monkeypatch):
    monkeypatch.setattr(T.Runtime, "agree", lambda self, good: False)
    choose(monkeypatch, {"attention": varlen_by_loop, "gdn": right_gdn})
    assert T.FAST == {}


def test_plain_forms_are_not_checked():
    for choice, device in (("plain", "cuda"), ("auto", "cpu")):
        runtime = T.Runtime(0, 1, SimpleNamespace(type=device), False)
        T.choose_kernels(choice, network(), runtime, pytest.fail)
        assert T.FAST == {}


def test_fla_that_is_asked_for_and_does_not_run_is_an_error(monkeypatch):
    def missing(*inputs):
        raise ImportError("No module named 'fla'")

    lines = choose(monkeypatch, {"attention": varlen_by_loop, "gdn": missing})
    assert lines[1] == """kernels: gdn left out: ImportError("No module named 'fla'")"""
    with pytest.raises(T.UserError, match=r"^KERNELS='fla': .*requirements-gpu\.txt"):
        choose(monkeypatch, {"attention": varlen_by_loop, "gdn": missing}, "fla")
    with pytest.raises(T.UserError, match="KERNELS='fla'"):
        T.choose_kernels("fla", network(), T.Runtime(0, 1, torch.device("cpu"), False), print)


# ----------------------------------------------------------------------------------------- attention
VARLEN_ATTEND = T.varlen_attend


def varlen_by_loop(*inputs):
    """Return what varlen_attend returns, with a loop over the documents for FlashAttention."""
    import torch.nn.attention.varlen as module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "varlen_attn", varlen_attn)
        return VARLEN_ATTEND(*inputs)


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
def varlen():
    """Attention by documents, with a stand-in for FlashAttention."""
    T.FAST["attention"] = varlen_by_loop


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
    found = []
    for o in (T.attend(q, k, v, doc, window), varlen_by_loop(q, k, v, borders, window)):
        found.append([o, *torch.autograd.grad((o * weights).sum(), (q, k, v))])
    for masked, varied in zip(*found, strict=True):
        assert (masked - varied).abs().max() < 1e-12


def test_batches_and_scores_tell_the_borders(varlen, tiny_data):
    """Losses of training batches and the score of validation are those by masks."""
    settings = T.Settings(
        data_path=str(tiny_data),
        train_batch_tokens=256,
        train_seq_len=64,
        layer_pattern="g s a",
        model_dim=32,
        num_heads=2,
        attn_window=16,
    )
    data = T.open_data(settings)
    tokenizer = data.tokenizer
    network = T.GPT(T.model_config(settings, tokenizer.vocab_size, tokenizer.bos_id))
    add_noise(network, 0.1)
    runtime = T.Runtime(0, 1, torch.device("cpu"), False)
    scorer = T.Scorer(tokenizer.bos_id, runtime, 64, 4)
    found = []
    for forms in ({"attention": varlen_by_loop}, {}):
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
    T.FAST.update(attention=T.varlen_attend, gdn=T.fla_gdn)
    settings = T.Settings(**SMALL)
    if path:
        presets = {"ARCH_MODE": T.ARCH_PRESETS, "OPTIMIZER": T.OPTIMIZER_PRESETS}
        settings = T.load_settings(T.Settings, {"CONFIG": str(path)}, presets=presets)
    network = T.GPT(T.model_config(settings, 300, 1))
    words = network.config.layers.split()
    counts = {
        "_varlen_attn": sum(word[0] in "sSaA" for word in words),
        "fla_gdn": sum(word[0] in "gG" for word in words),
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
    assert not any("scaled_dot_product" in call or "baddbmm" in call for call in calls)


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
    muon, _ = T.make_optimizers(network, settings, T.HEAD_LR, runtime)
    muon.param_groups[0]["lr"] = torch.zeros((), device="meta")
    for param in network.parameters():
        param.grad = torch.zeros_like(param)
    muon.step()  # makes the buffers
    with CountLaunches() as launches:
        muon.step()
    assert launches.number <= 150


# -------------------------------------------------------------------------- Triton, without a GPU
@pytest.mark.full
def test_interpreted_kernels_of_fla_are_the_plain_form():
    pytest.importorskip("fla")
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "interpreted.py"],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for name, error in json.loads(done.stdout).items():
        assert error < 1e-3, (name, error)
