"""Steps that are fitted to a limit: files that just fit, weights that stay; runs resumed."""

import types

import pytest
import torch

import train_gpt as T
from conftest import TINY, Place, stop_at


def text(seed):
    """Return token ids (4, 64) of a text in which a token says much about the next."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, 64, (4, 64), generator=random)
    for at in range(2, 64):
        known = torch.rand(4, generator=random) < 0.85
        ids[:, at] = torch.where(known, 2 + 3 * ids[:, at - 1] % 61, ids[:, at])
    ids[:, 0] = 1
    return ids


def make():
    shape = dict(model_dim=64, num_heads=4, num_kv_heads=2, mlp_mult=2.0, attn_window=16)
    settings = T.Settings(layer_pattern="g g s", train_seq_len=64, **shape)
    return T.GPT(T.model_config(settings, 64, 1))


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
    return net.state_dict()


class Bench:
    """A network with what fit_artifact needs; the limit is a share of its artifact by steps of `widen`."""

    def __init__(self, state, share, widen=1.0):
        self.net = make()
        self.net.load_state_dict(state)
        self.lines = []
        self.header = {"settings": vars(self.net.config), "tokenizer_sha256": "0" * 64, "meta": {}}
        self.size = len(self.pack(widen))
        self.limit = int(share * self.size)
        runtime = T.Runtime(0, 1, torch.device("cpu"), False)
        self.run = types.SimpleNamespace(
            runtime=runtime, log=self.lines.append, settings=T.Settings()
        )

    def coded(self, widen):
        return T.quantize_all(self.net.state_dict(), T.quant_table(T.Settings().matrix_bits, widen))

    def pack(self, widen):
        return T.pack_artifact(self.net.state_dict(), self.coded(widen), **self.header)

    def fit(self, widen, share=1.0, **words):
        return T.fit_artifact(self.net, widen, share * self.limit, self.header, self.run, **words)


@pytest.mark.parametrize(("share", "widen"), [(0.7, 1.5), (0.45, 1.0)])
def test_the_artifact_meets_a_limit_and_uses_it(trained, share, widen):
    bench = Bench(trained, share, widen)
    wider, nothing = bench.fit(widen, 0.99, pack=False)
    assert nothing == b"" and wider > widen
    size = len(bench.pack(wider))
    assert 0.98 * bench.limit <= size <= 0.993 * bench.limit  # the rest is for what is yet to come
    with torch.no_grad():  # training goes on for a while
        for param in bench.net.parameters():
            param.add_(0.02 * param.std().nan_to_num() * torch.randn_like(param))
    before = [w.clone() for w in bench.net.state_dict().values()]
    last, data = bench.fit(wider)
    assert data == bench.pack(last) and 0.97 * bench.limit <= len(data) <= bench.limit
    assert 1 <= last / wider < 1.1
    assert all(map(torch.equal, bench.net.state_dict().values(), before))
    assert len(bench.lines) <= 8  # attempts, of both: each aims below the limit


def test_limits_that_are_met_at_once_or_never(trained):
    bench = Bench(trained, 1.02)
    assert bench.fit(1.0, pack=False) == (1.0, b"")
    assert bench.fit(1.0) == (1.0, bench.pack(1.0)) and len(bench.lines) == 2
    size_line = f"sizes: {bench.size} bytes, at most {bench.limit}, quantization steps times 1"
    assert bench.lines[1] == size_line
    bench = Bench(trained, 0.01)
    widen, data = bench.fit(1.0)
    assert len(data) > bench.limit and len(bench.lines) == T.FIT_ATTEMPTS
    assert widen == 256.0 and data != bench.pack(1.0)  # the factor of an attempt that was not made


def test_a_limit_far_below_the_weights_is_told_before_the_first_step():
    lines = []
    for weights in (60_000_000, 124_000_000):  # of 6 bits, at 16 MB
        T.warn_of_small_limit(T.Settings(), weights, 15_700_000, lambda text, _: lines.append(text))
    assert len(lines) == 1 and " 124000000 weights take about 62000000 bytes." in lines[0]


# --------------------------------------------------------------------------------------- whole runs
@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_data):
    """Return a place with a free run, and runs that may take 3/4 of its artifact's bytes, with QAT or not."""
    tiny = dict(TINY, LAYER_PATTERN="g s1 g s1")
    place = Place(tmp_path_factory.mktemp("export"), tiny_data, tiny)
    place.run("free")
    free = place.result("free")
    place.limit = free["code_bytes"] + int(0.75 * free["artifact_bytes"])
    for qat in (1, 0):
        place.run(f"tight {qat}", ARTIFACT_BYTES_MAX=place.limit, QAT=qat)
    return place


@pytest.mark.parametrize("qat", [1, 0])
def test_a_run_meets_a_limit_and_uses_it(place, qat):
    result = place.result(f"tight {qat}")
    room = place.limit - result["code_bytes"]
    assert 0.95 * room <= result["artifact_bytes"] <= room
    parts = ["\nstep:30/30 train_loss:", " chosen\nsizes: "]
    if qat:
        parts = ["phase: qat begins at step 26", "\nsizes: ", *parts]
    places = [place.log(f"tight {qat}").find(part) for part in parts]
    assert -1 not in places and places == sorted(places)
    if qat:
        bpb = result["before_quantization"]["val_bpb"]
        assert result["val_bpb"] == pytest.approx(bpb, rel=0.05)


def test_a_resume_after_qat_began_keeps_the_widened_steps(place):
    """Steps and artifact are those of the run that was not stopped."""
    place.run("stopped", stop_at(28), 143, ARTIFACT_BYTES_MAX=place.limit)
    place.resume("stopped")
    place.same("stopped", "tight 1")
    [widen] = {
        torch.load(place.of(out) / "step_000030" / "training.pt")["exporter"]["widen"]
        for out in ("stopped", "tight 1")
    }
    assert widen > 1
