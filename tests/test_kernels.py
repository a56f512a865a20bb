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
import test_batches
import torch
import torch.nn.functional as F

import train_gpt as T
from conftest import ROOT, refusal


@pytest.fixture(autouse=True)
def plain_forms():
    T.FAST.clear()
    yield
    T.FAST.clear()


# ------------------------------------------------------------------------------ choice and check
def network(dtype=torch.bfloat16, layers="g s"):
    shape = dict(model_dim=128, num_heads=2, num_kv_heads=1, attn_window=16)
    config = T.GPTConfig(500, 1, layers, "rms rms", 160, **shape)
    return SimpleNamespace(config=config, dtype=dtype, embed=torch.zeros(1))


def runtime(device):
    return T.Runtime(0, 1, SimpleNamespace(type=device), False)


def right_gdn(*inputs):
    return T.gdn_chunk(*inputs)


def choose(monkeypatch, attention=None, gdn=right_gdn, choice="auto", dtype=torch.bfloat16):
    """Return the log of choose_kernels on a CPU that says it is a GPU, with other faster forms."""
    monkeypatch.setattr(T, "varlen_attend", attention or varlen_by_loop)
    monkeypatch.setattr(T, "fla_gdn", gdn)
    for name in ("check_attention", "check_gdn"):
        monkeypatch.setattr(T, name, on_cpu(getattr(T, name)))
    lines = []
    torch.manual_seed(0)
    T.choose_kernels(choice, network(dtype), runtime("cuda"), lines.append)
    return lines


def on_cpu(check):
    return lambda config, ids, dtype, device: check(config, ids, dtype, torch.device("cpu"))


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
    return (math.nan * T.gdn_chunk(*inputs)[0],)


def missing_gdn(*inputs):
    raise ImportError("No module named 'fla'")


def short_attend(q, k, v, borders, window):
    """Attend in windows that are one token too short."""
    return varlen_by_loop(q, k, v, borders, min(window, q.size(2)) - 1)


WRONG = [("gdn", wrong_gdn), ("gdn", nan_gdn), ("gdn", missing_gdn), ("attention", short_attend)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forms_that_are_wrong_are_named_and_left_out(monkeypatch, dtype):
    for line in choose(monkeypatch, choice="fla", dtype=dtype):
        assert re.fullmatch(r"kernels: \w+ taken: error \S+, of the plain form \S+", line)
    assert T.FAST == {"attention": varlen_by_loop, "gdn": right_gdn}
    for name, form in WRONG:
        with monkeypatch.context() as patch:
            lines = choose(patch, dtype=dtype, **{name: form})
        assert T.FAST.keys() == {"attention", "gdn"} - {name}
        (line,) = (line for line in lines if "left out" in line)
        assert line.startswith(f"kernels: {name} left out: ")


def test_what_is_checked_and_who_decides(monkeypatch, capfd):
    """No form that no layer uses; none that is not asked for; and none that a rank refuses."""
    for capability, dtype, notes in (
        ("AVX2", torch.bfloat16, 1),  # which such a CPU emulates
        ("AVX2", None, 0),
        ("AVX512", torch.bfloat16, 0),
    ):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda one=capability: one)
        for choice, device in (("plain", "cuda"), ("auto", "cpu")):
            lines = []
            T.choose_kernels(choice, network(dtype), runtime(device), lines.append)
            assert len(lines) == notes * (device == "cpu") and T.FAST == {}
    monkeypatch.setattr(T, "fla_gdn", missing_gdn)
    for device, said in (("cpu", "on a CPU"), ("cuda", "pip install")):
        for layers in ("g s", "g1 s g1", "G1 s G1"):
            call = (T.choose_kernels, "fla", network(layers=layers), runtime(device), str)
            assert said in refusal(T.UserError, "^KERNELS='fla': ", *call)
    for name in ("check_attention", "check_gdn"):
        monkeypatch.setattr(T, name, lambda *_: torch.tensor([0.1, 0.1]))
    kept_by_layers = {"g g": ["gdn"], "a s": ["attention"], "g1 G2 g1": ["gdn"]}
    kept_by_layers |= {"A1 A1": ["attention"], "g1 s1": ["attention", "gdn"]}
    for layers, kept in kept_by_layers.items():
        T.choose_kernels("auto", network(layers=layers), runtime("cuda"), str)
        assert list(T.FAST) == kept
    lines = []
    monkeypatch.setattr(T.Runtime, "sum", lambda self, failures: failures + 2)
    T.choose_kernels("auto", network(), runtime("cuda"), lines.append)
    assert T.FAST == {}
    assert lines[0].startswith("kernels: attention left out: 2 other ranks refuse it")
    # The rank that refuses says why, for rank 0's log cannot.
    monkeypatch.setattr(T, "check_attention", missing_gdn)
    capfd.readouterr()
    T.choose_kernels(
        "auto", network(layers="a a"), T.replace(runtime("cuda"), rank=1), lines.append
    )
    assert re.match(r"kernels: attention: \w+\(", capfd.readouterr().err)


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


def test_borders_of_documents(varlen, tmp_path):
    """By hand, and those that batches have."""
    ids = torch.tensor([[7, 7, 1, 7], [1, 7, 7, 7], [7, 7, 7, 1]])
    (borders,) = T.document_borders(ids, 1, torch.device("cpu"))
    assert borders.dtype == torch.int32 and borders.tolist() == [0, 2, 4, 8, 11, 12]
    data = test_batches.make_stream(tmp_path, "a", np.arange(1003) % 9)
    for ids, _, borders in test_batches.batches(data).micro_batches(0):
        assert torch.equal(borders, *T.document_borders(ids, 1, torch.device("cpu")))
    T.FAST.clear()
    assert T.document_borders(ids, 1, torch.device("cpu")) == []


@pytest.mark.parametrize("window", [1, 16, 40, T.FULL_WINDOW])
def test_attention_by_documents_is_that_by_masks(varlen, window):
    torch.manual_seed(0)
    ids = torch.randint(12, (3, 40))
    doc = (ids == 1).cumsum(1)
    qkv = [torch.randn(3, heads, 40, 8).double().requires_grad_() for heads in (4, 2, 2)]
    weights = torch.randn(3, 4, 40, 8)
    (borders,) = T.document_borders(ids, 1, torch.device("cpu"))
    found = []
    for o in (T.attend(*qkv, doc, window), varlen_by_loop(*qkv, borders, window)):
        found.append([o, *torch.autograd.grad((o * weights).sum(), qkv)])
    for masked, varied in zip(*found, strict=True):
        assert (masked - varied).abs().max() < 1e-12


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
    kinds = [word[0].lower() for word in network.config.layers.split()]
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
    assert sum("_varlen_attn" in call for call in calls) == len(kinds) - kinds.count("g")
    assert sum("fla_gdn" in call for call in calls) == kinds.count("g")
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


# -------------------------------------------------------------------------- Triton, without a GPU
@pytest.mark.full
def test_interpreted_kernels_of_fla_are_the_plain_form():
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "interpreted.py"],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )
    if "No module named 'fla'" in done.stderr:
        pytest.skip("flash-linear-attention is not installed")
    assert done.returncode == 0, done.stderr[-2000:]
    for name, error in json.loads(done.stdout).items():
        assert error < 1e-3, (name, error)
