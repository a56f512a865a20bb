"""The size solver and GPTQ at a run's end: files that just fit, weights that stay; runs resumed and loaded."""

import json
import math
import re
import time
import types
from dataclasses import dataclass

import pytest
import torch
from conftest import TINY, Place

import train_gpt as T

TABLE = {
    "matrix": {"bits": 6, "clip_sigmas": 8.0, "widen": 1.0},
    "embedding": {"bits": 8, "clip_sigmas": 20.0, "widen": 1.0},
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

    __call__ = note = list.append


@dataclass
class Loss:
    nats: float

    def __str__(self):
        return f"nats:{self.nats:.1f}"


class Bench:
    """An exporter with what it needs; `lines` is its log, `size` the artifact's by the table as it is."""

    def __init__(self, state, share, worth=1.0, clip_sigmas=8.0):
        self.net = make(state)
        self.lines = Lines()
        self.events = []
        self.table = {kind: dict(quantizer) for kind, quantizer in TABLE.items()}
        self.table["matrix"]["clip_sigmas"] = clip_sigmas
        self.header = {
            "settings": vars(self.net.config),
            "tokenizer_sha256": "0" * 64,
            "meta": {"seed": 1},
        }
        self.size = len(self.pack(self.nearest()))
        self.limit = int(share * self.size)
        runtime = T.Runtime(0, 1, torch.device("cpu"), False)
        self.worth, self.held_out = worth, text(10**6, 16)
        run = types.SimpleNamespace(runtime=runtime, log=self.lines, event=self.event)
        self.exporter = T.Exporter(self.net, self.table, self.limit, self.score, run, self.header)

    def event(self, name, **values):
        self.events.append(name)

    @torch.no_grad()
    def score(self):
        losses = self.net(self.held_out[:, :-1], self.held_out[:, 1:])
        return Loss(self.worth * losses.double().sum().item())

    def pack(self, coded):
        return T.pack_artifact(self.net.state_dict(), coded, **self.header)[0]

    def nearest(self):
        return T.quantize_all(self.net.state_dict(), self.table)

    def by_gptq(self, batches):
        """The nearest codes, but by GPTQ where these batches of token ids give a Hessian."""
        with T.Hessians(self.net) as taps, torch.no_grad():
            for ids in batches:
                self.net(ids)
        coded, state = self.nearest(), self.net.state_dict()
        for name, part in coded.items():
            if name in taps.sums:
                part.codes = T.gptq(state[name], part.scale, part.bits, taps.sums[name])
        return coded

    def loss(self, coded):
        """By a network of its own."""
        values = dict(self.net.state_dict())
        for name, part in coded.items():
            values[name] = T.dequantize(part.codes, part.scale).view_as(values[name])
        with torch.no_grad():
            return make(values)(self.held_out[:, :-1], self.held_out[:, 1:]).double().sum().item()


def calibration(batches=4):
    return [text(2 * 10**6 + at, 8) for at in range(batches)]


def same(one, other):
    """Whether two models have the same codes and scales."""
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
    bench = Bench(trained, share, clip_sigmas=clip_sigmas)
    bench.exporter.fit_table()
    table = json.loads(json.dumps(bench.exporter.table))
    assert table["matrix"]["widen"] == table["embedding"]["widen"] > 1  # all steps alike
    size = len(bench.pack(T.quantize_all(bench.net.state_dict(), table)))
    assert 0.98 * bench.limit <= size <= 0.99 * bench.limit  # the rest is for what is yet to come
    with torch.no_grad():  # training goes on for a while
        for param in bench.net.parameters():
            param.add_(0.02 * param.std().nan_to_num() * torch.randn_like(param))
    before = {name: w.clone() for name, w in bench.net.state_dict().items()}
    chosen = bench.exporter.pack(calibration() if gptq else [], math.inf)
    assert bench.exporter.table == table and not bench.events  # what fake quantization used stays
    coded, packed = chosen.coded, chosen.data
    assert packed == bench.pack(coded) and len(packed) == chosen.size == sum(chosen.sizes.values())
    assert 0.97 * bench.limit <= len(packed) <= bench.limit
    nearest = T.quantize_all(before, table)
    changes = {
        round(part.scale.item() / nearest[name].scale.item(), 2) for name, part in coded.items()
    }
    assert max(changes) - min(changes) < 0.02 and 0.99 <= min(changes)
    assert max(changes) <= 1.12  # GPTQ's codes take more bytes
    assert chosen.widen == pytest.approx(max(changes), abs=0.02)
    assert all(torch.equal(w, before[name]) for name, w in bench.net.state_dict().items())
    size = rf"bytes, at most {bench.limit}; steps wider by \+\d+\.\d\d%"
    assert re.fullmatch(rf"sizes: nearest \d+ {size}", bench.lines[0])
    assert any(
        re.fullmatch(rf"sizes: {chosen.name} {len(packed)} {size}", line)
        for line in bench.lines[1:]
    )
    (tmp_path / "a.upar").write_bytes(packed)
    _, tensors, back = T.read_artifact(tmp_path / "a.upar")
    assert same(back, coded)
    for name, part in coded.items():
        assert torch.equal(
            T.dequantize(part.codes, part.scale).view_as(tensors[name]), tensors[name]
        )


def test_a_limit_that_the_settings_meet_changes_nothing(trained):
    bench = Bench(trained, 1.02)
    bench.exporter.fit_table()
    assert bench.exporter.table == TABLE
    coded = bench.exporter.pack([], math.inf).coded
    assert same(coded, T.quantize_all(bench.net.state_dict(), TABLE))
    size = f"sizes: nearest {bench.size} bytes, at most {bench.limit}; steps wider by +0.00%"
    loss = f"codes: nearest, on held-out training tokens nats:{bench.loss(coded):.1f}"
    assert bench.lines == [size, size, loss, "codes: calibration of GPTQ", "codes: nearest chosen"]


def test_a_limit_that_nothing_meets_is_told_and_ends(trained):
    bench = Bench(trained, 0.01)
    bench.exporter.fit_table()
    assert all(quantizer["widen"] <= 256 for quantizer in bench.exporter.table.values())
    chosen = bench.exporter.pack([], math.inf)
    assert len(bench.pack(chosen.coded)) == chosen.size > bench.limit
    size = f"sizes: {chosen.name} {chosen.size} bytes, at most {bench.limit}; "
    assert any(line.startswith(size) for line in bench.lines)


@pytest.mark.parametrize(("share", "worth"), [(0.985, 1.0), (2.0, 1.0), (2.0, -1.0)])
def test_gptq_is_taken_where_its_held_out_loss_is_lower(trained, share, worth):
    """With losses turned round the other way is taken; also where steps change to meet the limit."""
    bench = Bench(trained, 1.0, worth, clip_sigmas=60.0)
    state = bench.net.state_dict()
    nearest, by_gptq = bench.nearest(), bench.by_gptq(calibration())
    losses = [bench.loss(nearest), bench.loss(by_gptq)]
    assert losses[1] < losses[0] - 5  # it is of use here
    expected = by_gptq if worth > 0 else nearest
    bench.exporter.limit = int(share * len(bench.pack(expected)))
    coded = bench.exporter.pack(calibration(), math.inf).coded
    said = re.findall(
        r"^codes: (nearest|gptq), on held-out training tokens nats:(\S+)$",
        "\n".join(bench.lines),
        re.M,
    )
    assert [name for name, _ in said] == ["nearest", "gptq"]
    assert bench.lines[-1] == f"codes: {'gptq' if worth > 0 else 'nearest'} chosen"
    logged = [float(nats) for _, nats in said]
    if share > 1:
        assert logged == pytest.approx([worth * loss for loss in losses], abs=0.051)
    assert len(bench.pack(coded)) <= bench.exporter.limit
    name = "blocks.0.mlp.w_up"
    part = coded[name]
    is_nearest = torch.equal(part.codes, T.round_to(state[name], part.scale, part.bits).char())
    assert is_nearest == (worth < 0)
    assert same(coded, expected) == (share == 2.0)


def test_gptq_meets_a_limit_that_only_the_nearest_codes_meet_as_they_are(trained):
    """Wide steps: GPTQ moves weights to codes other than 0, which costs bytes, so its steps are the wider ones."""
    bench = Bench(trained, 1.0, clip_sigmas=80.0)
    nearest, by_gptq = bench.nearest(), bench.by_gptq(calibration())
    sizes = [len(bench.pack(nearest)), len(bench.pack(by_gptq))]
    assert bench.loss(by_gptq) < bench.loss(nearest) and sizes[0] < 0.9 * sizes[1]
    bench.exporter.limit = sizes[0] - 20
    chosen = bench.exporter.pack(calibration(), math.inf)
    assert len(bench.pack(chosen.coded)) <= sizes[0] - 20
    tried = {
        name: (int(size), float(change))
        for name, size, change in re.findall(
            r"^sizes: (\S+) (\d+) bytes, .* by \+(\S+)%$", "\n".join(bench.lines), re.M
        )
    }
    assert (
        all(size <= sizes[0] - 20 for size, _ in tried.values())
        and 5 < tried["gptq"][1] > tried["nearest"][1]
    )
    losses = {
        name: float(nats)
        for name, nats in re.findall(r"^codes: (\S+), .* nats:(\S+)$", "\n".join(bench.lines), re.M)
    }
    assert chosen.name == min(losses, key=losses.get) and chosen.nats == pytest.approx(
        losses[chosen.name], abs=0.051
    )


@pytest.mark.parametrize("asked", [0, 4, 9, 100])
def test_gptq_goes_on_as_long_as_the_clock_allows(trained, asked):
    """The clock is out after so many questions: batches first, then tensors; what is left keeps the nearest codes."""
    bench = Bench(trained, 2.0)
    nearest, by_gptq = bench.nearest(), bench.by_gptq(calibration())
    questions = []
    agree = bench.exporter.run.runtime.agree

    def asking(value):
        if isinstance(value, bool):  # whether it is late; the other agreement is on a size
            questions.append(value)
            value = len(questions) > asked
        return agree(value)

    summed = []
    bench.exporter.run.runtime = types.SimpleNamespace(
        agree=asking, sum=lambda tensor: summed.append(tensor) or tensor
    )
    coded = bench.exporter.pack(calibration(), math.inf).coded
    assert [id(tensor) for tensor in summed] == [
        id(tensor) for tensor in bench.exporter.hessians.values()
    ]
    assert bool(summed) == (asked > 0) and bench.exporter.hessians.keys() <= coded.keys()
    assert not any(questions)
    assert bench.events == (["gptq_out_of_time"] if asked < 100 else [])
    if asked <= 4:  # not all four batches, or not one tensor
        assert same(coded, nearest)
    done = [name for name in coded if not torch.equal(coded[name].codes, nearest[name].codes)]
    if asked == 9 and not same(coded, nearest):
        assert 0 < len(done) <= 5 and all(
            torch.equal(coded[name].codes, by_gptq[name].codes) for name in done
        )
    if asked == 100 and not same(coded, nearest):
        assert same(coded, by_gptq)
    assert bench.lines[2] == "codes: calibration of GPTQ"
    rounded = [
        line.removeprefix("codes: GPTQ of ")
        for line in bench.lines
        if line.startswith("codes: GPTQ of ")
    ]
    every = [name for name in nearest if not torch.equal(nearest[name].codes, by_gptq[name].codes)]
    assert len(rounded) == max(0, min(asked - 3, len(every))) and set(rounded) <= set(every)


def test_what_must_follow_gptq_is_kept_free(trained):
    """A clock with less left than another score and pack take has no time for GPTQ."""
    bench = Bench(trained, 2.0)
    score = bench.exporter.score

    def slow():
        time.sleep(0.3)
        return score()

    bench.exporter.score = slow
    coded = bench.exporter.pack(
        calibration(), 1.0
    ).coded  # what must follow is taken to need twice 0.3 s and more
    assert same(coded, bench.nearest()) and bench.events == ["gptq_out_of_time"]
    assert not any(line.startswith("codes: GPTQ of ") for line in bench.lines)


# ---------------------------------------------------------------------------------------- whole runs
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
    assert re.search(r"^sizes: nearest .*; steps wider by \+0.00%$", place.log("free"), re.M)
    return result["code_bytes"] + int(0.75 * result["artifact_bytes"])


@pytest.fixture(scope="module")
def tight(place, limit):
    place.run("tight", ARTIFACT_BYTES_MAX=limit)
    return place.result("tight")


def test_a_run_meets_a_limit_and_uses_it(place, tight, limit):
    room = limit - tight["code_bytes"]
    assert 0.97 * room <= tight["artifact_bytes"] <= room and tight["total_bytes"] <= limit
    log = place.log("tight")
    parts = ["phase: qat begins at step 26", "\nsizes: nearest ", "step:30/30 train_loss:"]
    parts += ["weights: raw", "\ncodes: nearest, on held-out training tokens loss:"]
    parts += ["\ncodes: gptq, on held-out", " chosen\nphase: "]
    places = [log.find(part) for part in parts]
    assert -1 not in places and places == sorted(places)
    changes = re.findall(r"^sizes: .*; steps wider by ([+-]\d+\.\d\d)%$", log, re.M)
    widened, *rest = map(float, changes)
    assert len(rest) == 2 and widened >= 1 and 0 <= min(rest) <= max(rest) <= 5
    bpb = tight["before_quantization"]["val_bpb"]
    assert tight["val_bpb"] == pytest.approx(bpb, rel=0.05)


def test_without_qat_a_run_meets_the_limit_too(place, limit):
    place.run("no qat", ARTIFACT_BYTES_MAX=limit, QAT=0)
    result = place.result("no qat")
    room = limit - result["code_bytes"]
    assert 0.97 * room <= result["artifact_bytes"] <= room
    log = place.log("no qat")
    assert log.find("\nweights: ") < log.find("\nsizes: ") < log.find("\ncodes: ")
    assert "qat begins" not in log


def table_of(folder):
    """Return the table of the newest checkpoint."""
    newest = max(folder.glob("step_*"))
    return torch.load(newest / "training.pt", weights_only=True)["exporter"]["table"]


def test_a_resume_after_qat_began_keeps_the_widened_table(place, tight, limit):
    """Table and artifact are those of the run that was not stopped."""
    place.run("stopped", STOP, 143, ARTIFACT_BYTES_MAX=limit)
    table = table_of(place.of("stopped"))
    assert all(quantizer["widen"] > 1 for quantizer in table.values())
    assert table == table_of(place.of("tight"))
    place.resume("stopped")
    assert table_of(place.of("stopped")) == table
    assert place.log("stopped").count("\nsizes: ") == 3  # it is not fitted again
    assert place.artifact("stopped") == place.artifact("tight")
    assert place.result("stopped")["val_nats"] == tight["val_nats"]
