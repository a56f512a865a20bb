"""The size solver and GPTQ at a run's end: files that just fit, weights that stay; runs resumed and
loaded.
"""

import json
import math
import re
import types

import pytest
import torch
from reference import CountLaunches
from test_gptq import hessians_of

import train_gpt as T
from conftest import TINY, Place

TABLE = {
    "matrix": {"bits": 6, "clip_sigmas": 8.0},
    "embedding": {"bits": 8, "clip_sigmas": 20.0},
}

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


class Lines(list):
    """A log; it is as if a line were always due."""

    __call__ = list.append

    def is_due(self):
        return True


class Clock:
    """A clock that stands still until `questions` were asked; then no time is left."""

    def __init__(self, questions=math.inf):
        self.questions = questions

    def elapsed(self):
        return 0.0

    @property
    def limit(self):
        self.questions -= 1
        return 1.0 if self.questions >= 0 else -1.0


class Bench:
    """An exporter with what it needs; `lines` is its log, `size` the artifact's by the table."""

    def __init__(self, state, share, clip_sigmas=8.0, clock=None):
        self.net = make(state)
        self.lines = Lines()
        self.events = []
        self.table = {kind: dict(quantizer) for kind, quantizer in TABLE.items()}
        self.table["matrix"]["clip_sigmas"] = clip_sigmas
        self.header = {"settings": vars(self.net.config), "tokenizer_sha256": "0" * 64, "meta": {}}
        self.size = len(self.pack(self.nearest()))
        self.limit = int(share * self.size)
        runtime = T.Runtime(0, 1, torch.device("cpu"), False)
        run = types.SimpleNamespace(runtime=runtime, log=self.lines, event=self.events.append)
        run.clock = clock or Clock()
        self.exporter = T.Exporter(self.net, self.table, self.limit, run, self.header)

    def pack(self, coded):
        return T.pack_artifact(self.net.state_dict(), coded, **self.header)

    def nearest(self):
        return T.quantize_all(self.net.state_dict(), self.table)

    def by_gptq(self, batches):
        """Return the codes of GPTQ by the table as it is."""
        with torch.no_grad():
            sums, _ = hessians_of(self.net, [ids for (ids,) in batches])
        coded, state = self.nearest(), self.net.state_dict()
        for name, part in coded.items():
            batch = state[name][None], part.scale[None], sums[name][None]
            (part.codes,) = T.gptq(*batch)
        return coded

    def loss(self, coded):
        """Return the held-out loss, by a network of its own."""
        values = dict(self.net.state_dict())
        for name, part in coded.items():
            values[name] = T.dequantize(part.codes, part.scale).view_as(values[name])
        ids = text(10**6, 16)
        with torch.no_grad():
            return make(values)(ids[:, :-1], ids[:, 1:]).double().sum().item()


def calibration(batches=4):
    return [(text(2 * 10**6 + at, 8),) for at in range(batches)]


def read(data, tmp_path):
    """Return the codes of an artifact."""
    (tmp_path / "a.upar").write_bytes(data)
    return T.read_artifact(tmp_path / "a.upar")[2]


def same(one, other):
    """Return whether two models have the same codes and scales."""
    parts = [(one[name], other[name]) for name in one]
    return list(one) == list(other) and all(
        torch.equal(a.codes, b.codes) and torch.equal(a.scale, b.scale) and a.bits == b.bits
        for a, b in parts
    )


@pytest.mark.parametrize(
    ("share", "clip_sigmas", "gptq"),
    [
        (0.7, 12.0, True),
        (0.45, 8.0, False),
        pytest.param(0.9, 8.0, True, marks=pytest.mark.full),
        pytest.param(0.3, 8.0, True, marks=pytest.mark.full),
        pytest.param(0.7, 4.0, True, marks=pytest.mark.full),
    ],
)
def test_the_artifact_meets_a_limit_and_uses_it(trained, tmp_path, share, clip_sigmas, gptq):
    bench = Bench(trained, share, clip_sigmas)
    bench.exporter.fit_table()
    table = json.loads(json.dumps(bench.exporter.table))
    wider = [table[kind]["clip_sigmas"] / bench.table[kind]["clip_sigmas"] for kind in table]
    assert wider[0] == pytest.approx(wider[1]) and wider[0] > 1  # all steps alike
    size = len(bench.pack(T.quantize_all(bench.net.state_dict(), table)))
    assert 0.98 * bench.limit <= size <= 0.991 * bench.limit  # the rest is for what is yet to come
    with torch.no_grad():  # training goes on for a while
        for param in bench.net.parameters():
            param.add_(0.02 * param.std().nan_to_num() * torch.randn_like(param))
    before = {name: w.clone() for name, w in bench.net.state_dict().items()}
    data = bench.exporter.pack(calibration() if gptq else [])
    assert bench.exporter.table == table and not bench.events  # what fake quantization used stays
    coded = read(data, tmp_path)
    assert data == bench.pack(coded) and 0.97 * bench.limit <= len(data) <= bench.limit
    nearest = T.quantize_all(before, table)
    changes = [part.scale.item() / nearest[name].scale.item() for name, part in coded.items()]
    assert max(changes) - min(changes) < 0.02 and 0.99 <= min(changes)
    assert max(changes) <= 1.1  # GPTQ's codes take more bytes
    assert all(torch.equal(w, before[name]) for name, w in bench.net.state_dict().items())
    line = rf"sizes: {len(data)} bytes, at most {bench.limit}; steps wider by \+\d+\.\d\d%"
    assert any(re.fullmatch(line, text) for text in bench.lines)


def test_a_limit_that_the_settings_meet_changes_nothing(trained, tmp_path):
    bench = Bench(trained, 1.02)
    bench.exporter.fit_table()
    assert bench.exporter.table == TABLE
    assert same(read(bench.exporter.pack([]), tmp_path), bench.nearest())
    line = r"sizes: \d+ bytes, at most \d+; steps wider by \+0.00%"
    assert len(bench.lines) == 2 and all(re.fullmatch(line, text) for text in bench.lines)
    assert bench.lines[-1].startswith(f"sizes: {bench.size} bytes, ")


@pytest.mark.parametrize("clip_sigmas", [4.0, 8.0, 60.0])
def test_sizes_are_estimated_without_packing(trained, clip_sigmas, monkeypatch):
    """By counts of codes, to 0.2%; a tensor's operations are few, because each is a launch on a GPU."""
    bench = Bench(trained, 2.0, clip_sigmas)
    coded = bench.nearest()
    assert bench.exporter.estimate(coded) == pytest.approx(bench.size, rel=0.002)
    packed = []
    monkeypatch.setattr(T, "pack_artifact", lambda tensors, coded, **_: packed.append(coded) or b"")
    bench.exporter.fit_table()
    assert packed == [{}]  # the controls alone, once
    with CountLaunches() as launches:
        symbols, _ = T.split_escapes(coded["embed"].codes)
        T.count_symbols(symbols)
    assert launches.number <= 30


def test_a_limit_that_nothing_meets_is_told_and_ends(trained):
    bench = Bench(trained, 0.01)
    data = bench.exporter.pack([])
    assert len(data) > bench.limit
    assert bench.lines[-1].startswith(f"sizes: {len(data)} bytes, at most {bench.limit}; ")


def test_gptq_lowers_the_loss(trained, tmp_path):
    bench = Bench(trained, 2.0, clip_sigmas=100.0)  # so coarse that the nearest codes lose 20%
    coded = read(bench.exporter.pack(calibration()), tmp_path)
    assert same(coded, bench.by_gptq(calibration()))
    assert bench.loss(coded) < bench.loss(bench.nearest()) - 100


@pytest.mark.parametrize("asked", [0, 2, 4, 7, 100])
def test_gptq_goes_on_as_long_as_the_clock_allows(trained, tmp_path, asked):
    """Batches first, then tensors of one shape after the other; the rest keeps the nearest codes."""
    bench = Bench(trained, 2.0, clock=Clock(asked))
    coded = read(bench.exporter.pack(calibration()), tmp_path)
    nearest, by_gptq = bench.nearest(), bench.by_gptq(calibration())
    assert bench.events == (["gptq_out_of_time"] if asked < 100 else [])
    done = [name for name in coded if not torch.equal(coded[name].codes, nearest[name].codes)]
    assert all(torch.equal(coded[name].codes, by_gptq[name].codes) for name in done)
    if asked <= 4:  # not all four batches, or not one tensor
        assert not done
    if asked == 7:
        shapes = {bench.net.state_dict()[name].shape for name in done}
        assert (
            1 <= len(shapes) <= 3 < len({w.shape for w in map(bench.net.state_dict().get, coded)})
        )
    if asked == 100:
        assert same(coded, by_gptq)
    # The layers' inputs are no longer summed up.
    assert not any(hasattr(param, "hessian") for param in bench.exporter.network.parameters())


@pytest.mark.parametrize(("seconds_left", "events"), [(5.0, ["gptq_out_of_time"]), (7.0, [])])
def test_gptq_leaves_the_time_to_pack_twice(trained, seconds_left, events):
    """Packing takes 3 s here."""
    times = iter([0.0, 3.0])
    clock = types.SimpleNamespace(limit=seconds_left, elapsed=lambda: next(times, 0.0))
    bench = Bench(trained, 2.0, clock=clock)
    bench.exporter.pack(calibration())
    assert bench.events == events


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
    parts += ["weights: raw", " chosen\nsizes: ", "\nplan: warmup"]
    places = [log.find(part) for part in parts]
    places[-1] = log.rfind(parts[-1])
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


def table_of(folder):
    """Return the table of the newest checkpoint."""
    newest = max(folder.glob("step_*"))
    return torch.load(newest / "training.pt", weights_only=True)["exporter"]["table"]


def test_a_resume_after_qat_began_keeps_the_widened_table(place, tight, limit):
    """Table and artifact are those of the run that was not stopped."""
    place.run("stopped", STOP, 143, ARTIFACT_BYTES_MAX=limit)
    table = table_of(place.of("stopped"))
    assert table["matrix"]["clip_sigmas"] > 8 and table["embedding"]["clip_sigmas"] > 6
    assert table == table_of(place.of("tight"))
    place.resume("stopped")
    assert table_of(place.of("stopped")) == table
    assert place.artifact("stopped") == place.artifact("tight")
    assert place.result("stopped")["val_nats"] == tight["val_nats"]
