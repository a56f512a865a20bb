"""Section artifact, by chance: any codes come back, no damage loads; contexts are the cheapest; 20 million codes."""

import hashlib
import struct
import time
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import train_gpt as script

# The data of a test are the same in every run of it, as elsewhere here; a failure prints how to repeat it.
few = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
often = settings(few, max_examples=2000)
SECONDS, BYTES = 1.0, 64 << 20  # that a damaged file of some KB may take to be refused


pytestmark = pytest.mark.usefixtures("one_thread")


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def pack(tensors, coded=None, table=None, meta=None):
    coded = script.quantize_all(tensors, table) if coded is None else coded
    return script.pack_artifact(tensors, coded, {"dim": 24}, "ab" * 32, meta or {})[0]


def read(data, path):
    path.write_bytes(data)
    return script.read_artifact(path)


# --------------------------------------------------------------------------------------------------------- round trips
@st.composite
def tensors_and_codes(draw):
    """Up to five tensors, each of codes, scales and bits, or of float16; of any sizes and any distribution."""
    tensors, coded = {}, {}
    for at in range(draw(st.integers(0, 5))):
        rows, columns = draw(st.integers(16, 60)), draw(st.integers(16, 60))
        name = f"blocks.{at}." + draw(st.sampled_from(["w_up", "embed", "ab", "norm", "conv", "A_log"]))
        bits, random = draw(st.integers(2, 8)), np.random.default_rng(draw(st.integers(0, 2**32)))
        qmax = 2 ** (bits - 1) - 1
        spread = 2.0 ** draw(st.floats(-4, 8)) * np.exp(draw(st.floats(0, 2)) * random.normal(size=(rows, 1)))
        codes = random.normal(size=(rows, columns)) * spread
        if draw(st.booleans()):
            codes *= np.exp(draw(st.floats(0, 2)) * random.normal(size=columns))
        codes = torch.from_numpy(np.clip(np.rint(codes), -qmax, qmax).astype(np.int8))
        count = draw(st.sampled_from([1, rows]))
        scales = torch.from_numpy(random.random(count).astype(np.float16)) * draw(st.integers(0, 1))
        w = script.dequantize(codes, scales)
        if script.tensor_class(name, w) == "control":
            tensors[name] = w.half().float()
        else:
            tensors[name], coded[name] = w, (codes, scales, bits)
    return tensors, coded


def check_round_trip(path, drawn):
    tensors, coded = drawn
    data = pack(tensors, coded)
    header, back, again = read(data, path)
    assert list(back) == list(tensors) and list(again) == list(coded)
    for name, w in tensors.items():
        assert back[name].numpy().tobytes() == w.numpy().tobytes()
    for name, (codes, scales, bits) in coded.items():
        assert torch.equal(again[name][0], codes) and torch.equal(again[name][1], scales) and again[name][2] == bits
    assert pack(back, again) == data


@given(drawn=tensors_and_codes())
@few
def test_any_codes_come_back(tmp_path, drawn):
    check_round_trip(tmp_path / "a.upar", drawn)


@pytest.mark.full
@given(drawn=tensors_and_codes())
@often
def test_any_codes_come_back_2000_times(tmp_path, drawn):
    check_round_trip(tmp_path / "a.upar", drawn)


# -------------------------------------------------------------------------------------------------------------- damage
def two_artifacts():
    """Two files of the same tensors' names and shapes, with every coder, and every context but "class"."""
    found = []
    for seed in (0, 100):
        random = torch.Generator().manual_seed(seed)
        rows, columns = (torch.randn(size, generator=random).exp() for size in (64, 80))
        tensors = {
            "embed": randn(40, 24, seed=seed), "w_cells": randn(64, 80, seed=seed + 1) * rows[:, None] * columns,
            "w_alike": randn(48, 40, seed=seed + 2), "w_zeros": torch.zeros(32, 32), "norm": randn(24, seed=seed + 3),
            "w_small": randn(20, 16, seed=seed + 4), "A_log": randn(8, seed=seed + 5),
        }
        table = {"matrix": {"bits": 6, "clip_sigmas": 8.0, "step": "tensor"},
                 "embedding": {"bits": 8, "clip_sigmas": 0.0, "step": "row"}}
        found.append(pack(tensors, table=table, meta={"seed": seed}))
    return found


ARTIFACTS = two_artifacts()


@st.composite
def damaged(draw):
    """One of the artifacts with one byte changed, cut short at either end or within, or with a piece of the other."""
    at = draw(st.integers(0, 1))
    own, other = ARTIFACTS[at], ARTIFACTS[1 - at]
    kind = draw(st.sampled_from(["byte", "cut", "head", "hole", "splice", "insert", "join"]))
    begin, size = draw(st.integers(0, len(own) - 1)), draw(st.integers(1, 200))
    if kind == "byte":
        return own[:begin] + bytes([own[begin] ^ draw(st.integers(1, 255))]) + own[begin + 1 :]
    if kind == "cut":
        return own[:begin]
    if kind == "head":
        return own[begin + 1 :]
    if kind == "hole":
        return own[:begin] + own[begin + size :]
    start = draw(st.integers(0, len(other) - 1))
    if kind == "splice":  # as long as what it replaces
        piece = other[begin : begin + size]
        return own[:begin] + piece + own[begin + len(piece) :]
    if kind == "insert":
        return own[:begin] + other[start : start + size] + own[begin:]
    return own[:begin] + other[start:]


def refused(path, data):
    """Reading ends in one line that names the file, soon, and without much memory."""
    path.write_bytes(data)
    begin = time.process_time()
    tracemalloc.start()
    try:
        with pytest.raises(script.ArtifactError) as caught:
            script.read_artifact(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert time.process_time() - begin < SECONDS and peak < BYTES
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


def check_damage(path, data):
    if data not in ARTIFACTS:
        refused(path, data)


@given(data=damaged())
@few
def test_no_damage_loads(tmp_path, data):
    check_damage(tmp_path / "a.upar", data)


@pytest.mark.full
@given(data=damaged())
@often
def test_no_damage_loads_2000_times(tmp_path, data):
    check_damage(tmp_path / "a.upar", data)


def check_sealed(path, data, position, value):
    """Damage of the data area under a right SHA-256: what loads all the same has the same numbers in it."""
    start = 16 + struct.unpack_from("<8sII", data)[2]
    at = start + position % (len(data) - 32 - start)
    body = data[:at] + bytes([data[at] ^ value]) + data[at + 1 : -32]
    _, expected, codes = read(data, path)
    try:
        _, tensors, again = read(body + hashlib.sha256(body).digest(), path)
    except script.ArtifactError as error:
        assert "\n" not in str(error)
    else:
        assert all(tensors[name].numpy().tobytes() == w.numpy().tobytes() for name, w in expected.items())
        assert all(torch.equal(again[name][part], codes[name][part]) for name in codes for part in (0, 1))


@given(data=st.sampled_from(ARTIFACTS), position=st.integers(0, 2**20), value=st.integers(1, 255))
@few
def test_damage_under_a_right_digest_never_gives_other_numbers(tmp_path, data, position, value):
    check_sealed(tmp_path / "a.upar", data, position, value)


@pytest.mark.full
@given(data=st.sampled_from(ARTIFACTS), position=st.integers(0, 2**20), value=st.integers(1, 255))
@often
def test_damage_under_a_right_digest_never_gives_other_numbers_2000_times(tmp_path, data, position, value):
    check_sealed(tmp_path / "a.upar", data, position, value)


# ------------------------------------------------------------------------------------------------------------ contexts
def entropy(symbols):
    """Order-0 entropy in bytes."""
    share = np.unique(symbols, return_counts=True)[1] / max(1, symbols.size)
    return -(share * np.log2(share)).sum() * symbols.size / 8


def by_context(codes, contexts):
    """The same, given the context of each code."""
    return sum(entropy(codes[contexts == one]) for one in np.unique(contexts))


def halves_of_octaves(codes):
    """Numbers of rows and columns: twice the log2 of their mean square, against that of all for columns."""
    square = codes.astype(np.float64) ** 2
    numbers = [np.rint(2 * np.log2(np.clip(side, 2.0**-8, 2.0**16))) + 16
               for side in (square.mean(1), square.mean(0) / square.mean())]
    return [side.astype(int) for side in numbers]


def sized(side, octaves, what, seed=0):
    """Normal codes (side, side) whose rows, or rows and columns, differ in size by up to `octaves`, in no order."""
    random = np.random.default_rng(seed)
    sizes = [random.permutation(2.0 ** np.linspace(-octaves / 2, octaves / 2, side)) for _ in range(2)]
    codes = random.normal(size=(side, side)) * 4
    codes *= sizes[0][:, None] if what != "alike" else 1
    codes *= sizes[1] if what == "cell" else 1
    return np.clip(np.rint(codes), -31, 31).astype(np.int8)


def measured(codes, rows, columns):
    """Bytes of codes by tables of the sums of these numbers: entropy, and tables and numbers as they are packed."""
    cells = np.add.outer(rows, columns)
    counts = [np.bincount(codes.view(np.uint8)[cells == one].ravel(), minlength=256)
              for one in range(cells.min(), cells.max() + 1)]
    tables = np.array([script.rans_table(each) for each in counts], np.uint16)
    parts = np.ascontiguousarray(tables.T), np.concatenate([rows, columns]).astype(np.uint8)
    return by_context(codes, cells) + sum(len(script.pack_array({}, part)[1]) for part in parts)


@pytest.mark.parametrize("what", ["alike", "row", "cell"])
@pytest.mark.parametrize(("side", "octaves"), [(100, 2), (100, 3), (200, 2), (400, 3), (1000, 1)])
def test_a_tensor_has_the_contexts_that_take_the_fewest_bytes(tmp_path, side, octaves, what):
    """Against all three, measured; the file's own bytes against entropies computed here."""
    codes = sized(side, octaves, what)
    rows, columns = halves_of_octaves(codes)
    tried = {"tensor": measured(codes, 0 * rows, 0 * columns), "row": measured(codes, rows, 0 * columns),
             "cell": measured(codes, rows, columns)}
    data = pack({"w_up": torch.from_numpy(codes).float()}, {"w_up": (torch.from_numpy(codes), torch.ones(1).half(), 6)})
    header, _, back = read(data, tmp_path / "a.upar")
    assert np.array_equal(back["w_up"][0], codes)
    record, = header["tensors"]
    contexts = record["contexts"].replace("class", "tensor")
    assert tried[contexts] <= 1.01 * min(tried.values()), tried
    ideal = by_context(codes, {"tensor": 0 * np.add.outer(rows, columns), "row": np.add.outer(rows, 0 * columns),
                               "cell": np.add.outer(rows, columns)}[contexts])
    lanes = script.rans_lanes(codes.size)
    assert ideal <= record["length"] + 2 * lanes and record["length"] <= 1.0005 * ideal + 2 * lanes
    spent = sum(header["sections"][part]["length"] for part in ("tables", "numbers"))
    assert record["length"] + spent <= tried[contexts] * 1.0005 + 2 * lanes
    if what == "alike":
        assert header["sections"]["tables"]["shape"] == [256, 1]
    if what != "alike" and side >= 200:
        assert contexts == what and record["length"] + spent < 0.99 * entropy(codes)


@pytest.mark.parametrize("share", [0.1, 0.4, 0.6])
def test_rows_of_zeros_leave_rans_the_shortest(tmp_path, share):
    """Embeddings of tokens that never came: without rows zstd beats the entropy of all codes, with rows it does not."""
    random = np.random.default_rng(0)
    codes = np.clip(np.rint(random.normal(size=(2048, 128)) * 21), -127, 127).astype(np.int8)
    codes[random.random(2048) < share] = 0
    held = torch.from_numpy(codes)
    data = pack({"embed": held.float()}, {"embed": (held, torch.ones(1).half(), 8)})
    header, _, back = read(data, tmp_path / "a.upar")
    zstd = len(script.zstandard.ZstdCompressor(level=1).compress(codes.tobytes()))
    assert np.array_equal(back["embed"][0], codes) and zstd < entropy(codes)
    assert header["tensors"][0]["coder"] == "rans" and len(data) < 0.995 * zstd
    ideal = by_context(codes, np.add.outer((codes != 0).any(1), 0 * codes[0]))
    assert ideal < len(data) < 1.01 * ideal + 1500


def test_tensors_of_a_class_share_a_table_and_others_do_not():
    random, coded, tensors = np.random.default_rng(0), {}, {}
    for name, spread in (("a.w_up", 3), ("b.w_up", 3), ("c.w_up", 3), ("head", 9), ("d.embed", 9)):
        codes = torch.from_numpy(np.clip(np.rint(random.normal(size=(64, 64)) * spread), -31, 31).astype(np.int8))
        tensors[name], coded[name] = codes.float(), (codes, torch.ones(1).half(), 6)
    tables, chosen = script.choose_tables([(script.tensor_class(name, tensors[name]), codes.numpy(), 4096)
                                           for name, (codes, *_) in coded.items()])
    assert [contexts for contexts, *_ in chosen] == ["class"] * 5 and len(tables) == 2
    assert [table for _, table, _ in chosen] == [chosen[0][1]] * 3 + [chosen[3][1]] * 2
    counts = sum(np.bincount(coded[name][0].numpy().view(np.uint8).ravel(), minlength=256) for name in list(coded)[:3])
    assert np.array_equal(tables[0], script.rans_table(counts))
