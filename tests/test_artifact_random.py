"""Section artifact, by chance: any codes come back, no damage loads; bytes against entropies by row and column."""

import time
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_artifact import pack, read, refused, small_model

import train_gpt as script

# The data of a test are the same in every run of it; a failure prints how to repeat it.
few = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
counts = pytest.mark.parametrize("count", [40, pytest.param(2000, marks=pytest.mark.full)])


@st.composite
def tensors_and_codes(draw):
    """Draw up to four tensors of codes, of any sizes and any distribution, and what they stand for."""
    tensors, coded = {}, {}
    for at in range(draw(st.integers(0, 4))):
        random = np.random.default_rng(draw(st.integers(0, 2**32)))
        shape = random.integers(16, 60, 2)
        name = draw(st.sampled_from(["w_up", "embed"]))
        ends = [np.exp(draw(st.floats(0, 2)) * random.normal(size=side)) for side in shape]
        codes = 2.0 ** draw(st.floats(-4, 8)) * np.outer(*ends) * random.normal(size=shape)
        if draw(st.booleans()):  # escapes, alone or by rows
            codes *= 1 + 1000 * (random.random((shape[0], 1)) < 0.05)
            codes[3, 5] = random.integers(-(2**23), 2**23)
        codes = torch.from_numpy(codes).clamp(-(2**23), 2**23).round().int()
        scale = torch.tensor([draw(st.sampled_from([0.0, 2**-24, 0.1, 1.0]))]).half()
        coded[f"{at}.{name}"] = script.Coded(codes, scale, draw(st.integers(2, 8)))
        tensors[f"{at}.{name}"] = script.dequantize(codes, scale)
    return tensors, coded


@counts
def test_any_codes_come_back(tmp_path, count):
    @settings(few, max_examples=count)
    @given(drawn=tensors_and_codes())
    def check(drawn):
        tensors, coded = drawn
        data = pack(tensors, coded=coded)
        _, back, again = read(data, tmp_path)
        assert back.keys() == tensors.keys() and list(again) == list(coded)
        for name, w in tensors.items():
            assert back[name].numpy().tobytes() == w.numpy().tobytes()
        for name, part in coded.items():
            assert torch.equal(again[name].codes, part.codes)
            assert torch.equal(again[name].scale, part.scale) and again[name].bits == part.bits
        assert pack(back, coded=again) == data

    check()


# ------------------------------------------------------------------------------------------- damage
@st.composite
def damaged(draw, files):
    """Draw one of the files in which a part, perhaps nothing, gave way to something else."""
    own, other = (draw(st.sampled_from(files)) for _ in range(2))
    begin, end = sorted(draw(st.integers(0, len(own))) for _ in range(2))
    start = draw(st.integers(0, len(other)))
    noise = draw(st.binary(min_size=1, max_size=9))
    pieces = [b"", noise, bytes(end - begin), other[begin:end], other[start : start + 200]]
    piece = draw(st.sampled_from([*pieces, other[start:]]))
    end = draw(st.sampled_from([begin, begin + len(piece), end, len(own)]))
    return own[:begin] + piece + own[end:]


@counts
def test_no_damage_loads(tmp_path, count):
    """One line says so, in a second and 64 MB."""
    files = [pack(small_model(seed), seed=seed) for seed in (0, 100)]

    @settings(few, max_examples=count)
    @given(data=damaged(files))
    def check(data):
        if data in files:
            return
        begin = time.process_time()
        tracemalloc.start()
        try:
            refused(data, tmp_path)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert time.process_time() - begin < 1 and peak < 64 << 20

    check()


# --------------------------------------------------------------------------------- rows and columns
def entropy(symbols):
    """Return the order-0 entropy in bytes."""
    share = np.unique(symbols, return_counts=True)[1] / max(1, symbols.size)
    return -(share * np.log2(share)).sum() * symbols.size / 8


def by_size(codes):
    """Return the entropy given the sum of the sizes of row and column, in quarter octaves."""
    square = codes.astype(np.float64) ** 2
    rows = np.rint(2 * np.log2(np.clip(square.mean(1), 2.0**-8, None)))
    columns = np.rint(2 * np.log2(np.clip(square.mean(0) / square.mean(), 2.0**-8, None)))
    sums = np.add.outer(rows, columns)
    return sum(entropy(codes[sums == one]) for one in np.unique(sums))


def streams_of(folder, name, codes):
    """Pack codes; return the bytes of the whole file and the records of its streams."""
    part = script.Coded(torch.from_numpy(codes).int(), torch.ones(1).half(), 8)
    data = pack({name: part.codes.float()}, coded={name: part})
    header, _, back = read(data, folder)
    assert np.array_equal(back[name].codes, codes)
    return data, header["streams"]


@pytest.mark.parametrize(
    ("what", "side", "octaves"), [("alike", 100, 3), ("rows", 200, 2), ("both", 400, 3)]
)
def test_bytes_are_the_entropy_by_row_and_column(tmp_path, what, side, octaves):
    """Of normal codes whose rows, or rows and columns, differ in size, in no order."""
    random = np.random.default_rng(0)
    sizes = 2.0 ** np.linspace(-octaves / 2, octaves / 2, side)
    codes = random.normal(size=(side, side)) * 4
    codes *= random.permutation(sizes)[:, None] if what != "alike" else 1
    codes *= random.permutation(sizes) if what == "both" else 1
    codes = np.clip(np.rint(codes), -31, 31).astype(np.int8)
    _, streams = streams_of(tmp_path, "w_up", codes)
    ideal = by_size(codes)
    lanes = max(8, side**2 // 8192)
    assert streams["lane_states"]["shape"] == [lanes]
    length = streams["w_up"]["length"]
    assert ideal <= length + 2 * lanes and length <= 1.0015 * ideal + 2 * lanes
    # besides lanes: some 25 tables of at most 63 codes, and a byte at most for each row and column
    spent = sum(facts["length"] for facts in streams.values())
    assert spent - length <= 4 * lanes + 2 * side + 1500
    assert spent < {"alike": 1.01, "rows": 1.0, "both": 0.99}[what] * entropy(codes) + 600
