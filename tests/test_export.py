"""Steps that are fitted to a limit: files that just fit, weights that stay; runs resumed."""

import re
import types

import pytest
import torch
from reference import CountLaunches

import train_gpt as T
from conftest import TINY, Place

pytestmark = pytest.mark.usefixtures("one_thread")


def text(seed, batch=4, length=64):
    """Return token ids (B, T) of a text in which a token says much about the next."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, 64, (batch, length), generator=random)
    for at in range(2, length):
        known = torch.rand(batch, generator=random) < 0.85
        ids[:, at] = torch.where(known, 2 + 3 * ids[:, at - 1] % 61, ids[:, at])
    ids[:, 0] = 1
    return ids


def make(state=None):
    settings = T.Settings(
        layer_pattern="g g s",
        model_dim=64,
        num_heads=4,
        num_kv_heads=2,
        mlp_mult=2.0,
        attn_window=16,
        train_seq_len=64,
    )
    net = T.GPT(T.model_config(settings, 64, 1))
    if state:
        net.load_state_dict(state)
    return net


@pytest.fixture(scope="module")
def trained():
    """Return the state of a network of every kind of layer that has learned something."""
    torch.manual_seed(0)
    net = make()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for step in range(60):
        ids = text(step)
        loss = net(ids[:, :-1], ids[:, 1:]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss < 2  # 4.1 would be nothing
    return {name: w.clone() for name, w in net.state_dict().items()}


class Bench:
    """A network with what fit_artifact needs; `size` is that of its artifact by steps of `widen`."""

    def __init__(self, state, share, widen=1.0):
        self.net = make(state)
        self.lines = []
        self.widen = widen
        self.header = {"settings": vars(self.net.config), "tokenizer_sha256": "0" * 64, "meta": {}}
        self.size = len(self.pack(widen))
        self.limit = int(share * self.size)
        runtime = T.Runtime(0, 1, torch.device("cpu"), False)
        self.run = types.SimpleNamespace(
            runtime=runtime, log=self.lines.append, settings=T.Settings()
        )

    def coded(self, widen):
        return T.quantize_all(self.net.state_dict(), T.quant_table(T.Settings(), widen))

    def pack(self, widen):
        return T.pack_artifact(self.net.state_dict(), self.coded(widen), **self.header)

    def fit(self, widen, share=1.0, **words):
        return T.fit_artifact(self.net, widen, share * self.limit, self.header, self.run, **words)


LINE = r"sizes: {} bytes, at most {}; steps wider by [+-]\d+\.\d\d%"


@pytest.mark.parametrize(
    ("share", "widen"),
    [(0.7, 1.5), (0.45, 1.0), *(pytest.param(x, 1.0, marks=pytest.mark.full) for x in (0.9, 0.3))],
)
def test_the_artifact_meets_a_limit_and_uses_it(trained, share, widen):
    bench = Bench(trained, share, widen)
    wider, nothing = bench.fit(widen, 0.99, pack=False)
    assert nothing == b"" and wider > widen
    size = len(bench.pack(wider))
    assert 0.98 * bench.limit <= size <= 0.993 * bench.limit  # the rest is for what is yet to come
    with torch.no_grad():  # training goes on for a while
        for param in bench.net.parameters():
            param.add_(0.02 * param.std().nan_to_num() * torch.randn_like(param))
    before = {name: w.clone() for name, w in bench.net.state_dict().items()}
    last, data = bench.fit(wider)
    assert data == bench.pack(last) and 0.97 * bench.limit <= len(data) <= bench.limit
    assert 1 <= last / wider < 1.1
    assert all(torch.equal(w, before[name]) for name, w in bench.net.state_dict().items())
    assert re.fullmatch(LINE.format(len(data), bench.limit), bench.lines[-1])
    assert len(bench.lines) <= 8  # attempts, of both: each aims below the limit


def test_a_limit_that_the_settings_meet_changes_nothing(trained):
    bench = Bench(trained, 1.02)
    assert bench.fit(1.0, pack=False) == (1.0, b"")
    assert bench.fit(1.0) == (1.0, bench.pack(1.0))
    assert len(bench.lines) == 2 and all("steps wider by +0.00%" in line for line in bench.lines)
    assert bench.lines[-1].startswith(f"sizes: {bench.size} bytes, ")


@pytest.mark.parametrize("widen", [0.5, 1.0, 8.0])
def test_sizes_are_estimated_without_coding(trained, widen, monkeypatch):
    """By counts of codes, to 0.2%; a tensor's operations are few, because each is a launch on a GPU."""
    bench = Bench(trained, 2.0, widen)
    coded = bench.coded(widen)
    monkeypatch.setattr(T.RansCoder, "encode", None)
    size = T.estimate_bytes(bench.net.state_dict(), coded, bench.header)
    assert size == pytest.approx(bench.size, rel=0.002)
    with CountLaunches() as launches:
        T.count_symbols(coded["embed"].codes)
    assert launches.number <= 30


def test_a_limit_that_nothing_meets_is_told_and_ends(trained):
    bench = Bench(trained, 0.01)
    _, data = bench.fit(1.0)
    assert len(data) > bench.limit and len(bench.lines) == T.FIT_ATTEMPTS
    assert bench.lines[-1].startswith(f"sizes: {len(data)} bytes, at most {bench.limit}; ")


def test_older_checkpoints_have_the_widened_quantizers():
    exporter = T.Exporter()
    exporter.load_state_dict({"table": T.quant_table(T.Settings(matrix_bits=4), 1.7)})
    assert exporter.widen == pytest.approx(1.7, rel=1e-12)
    exporter.load_state_dict({"widen": 1.3})
    assert exporter.state_dict() == {"widen": 1.3}


# --------------------------------------------------------------------------------------- whole runs
# A patch: the process gets SIGTERM in step 29 of 30, with QAT since step 26.
STOP = """
import os, signal
inner = T.forward_backward
def stopping(model, batches, step):
    if step == 28:
        os.kill(os.getpid(), signal.SIGTERM)
    return inner(model, batches, step)
T.forward_backward = stopping
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_data):
    tiny = dict(TINY, LAYER_PATTERN="g s1 g s1")
    return Place(tmp_path_factory.mktemp("export"), tiny_data, tiny)


@pytest.fixture(scope="module")
def limit(place):
    """Return ARTIFACT_BYTES_MAX with three quarters of what the artifact of a free run takes."""
    place.run("free")
    result = place.result("free")
    assert re.search(r"^sizes: .*; steps wider by \+0.00%$", place.log("free"), re.M)
    return result["code_bytes"] + int(0.75 * result["artifact_bytes"])


@pytest.fixture(scope="module")
def tight(place, limit):
    place.run("tight", ARTIFACT_BYTES_MAX=limit)
    return place.result("tight")


def test_a_run_meets_a_limit_and_uses_it(place, tight, limit):
    room = limit - tight["code_bytes"]
    assert 0.95 * room <= tight["artifact_bytes"] <= room and tight["total_bytes"] <= limit
    log = place.log("tight")
    parts = ["phase: qat begins at step 26", "\nsizes: ", "step:30/30 train_loss:"]
    parts += ["weights: raw", " chosen\nsizes: "]
    places = [log.find(part) for part in parts]
    assert -1 not in places and places == sorted(places)
    bpb = tight["before_quantization"]["val_bpb"]
    assert tight["val_bpb"] == pytest.approx(bpb, rel=0.05)


def test_without_qat_a_run_meets_the_limit_too(place, limit):
    place.run("no qat", ARTIFACT_BYTES_MAX=limit, QAT=0)
    result = place.result("no qat")
    room = limit - result["code_bytes"]
    assert 0.95 * room <= result["artifact_bytes"] <= room
    log = place.log("no qat")
    assert log.find("\nweights: ") < log.find("\nsizes: ")
    assert "qat begins" not in log


def widen_of(folder):
    """Return the factor on quantization steps of the newest checkpoint."""
    newest = max(folder.glob("step_*"))
    return torch.load(newest / "training.pt", weights_only=True)["exporter"]["widen"]


def test_a_resume_after_qat_began_keeps_the_widened_steps(place, tight, limit):
    """Steps and artifact are those of the run that was not stopped."""
    place.run("stopped", STOP, 143, ARTIFACT_BYTES_MAX=limit)
    widen = widen_of(place.of("stopped"))
    assert 1 < widen == widen_of(place.of("tight"))
    place.resume("stopped")
    assert widen_of(place.of("stopped")) == widen
    assert place.artifact("stopped") == place.artifact("tight")
    assert place.result("stopped")["val_nats"] == tight["val_nats"]
