"""Section artifact, by chance: any codes come back, no damage loads; bytes against entropies by row
and column.
"""

import time
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import train_gpt as script

# The data of a test are the same in every run of it, as elsewhere here; a failure prints how to
# repeat it.
few = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
counts = pytest.mark.parametrize("count", [40, pytest.param(2000, marks=pytest.mark.full)])
SECONDS, BYTES = 1.0, 64 << 20  # that a damaged file of some KB may take to be refused


pytestmark = pytest.mark.usefixtures("one_thread")


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def pack(tensors, coded=None, table=None, meta=None):
    coded = script.quantize_all(tensors, table) if coded is None else coded
    return script.pack_artifact(
        tensors, coded, settings={"dim": 24}, tokenizer_sha256="ab" * 32, meta=meta or {}
    )


def read(data, path):
    path.write_bytes(data)
    return script.read_artifact(path)


# -------------------------------------------------------------------------------------- round trips
@st.composite
def tensors_and_codes(draw):
    """Up to five tensors, each of codes, or of float16; of any sizes and any distribution."""
    tensors, coded = {}, {}
    for at in range(draw(st.integers(0, 5))):
        rows, columns = draw(st.integers(16, 60)), draw(st.integers(16, 60))
        name = f"blocks.{at}." + draw(
            st.sampled_from(["w_up", "embed", "ab", "norm", "conv", "A_log"])
        )
        bits, random = draw(st.integers(2, 8)), np.random.default_rng(draw(st.integers(0, 2**32)))
        spread = 2.0 ** draw(st.floats(-4, 8)) * np.exp(
            draw(st.floats(0, 2)) * random.normal(size=(rows, 1))
        )
        codes = random.normal(size=(rows, columns)) * spread
        if draw(st.booleans()):
            codes *= np.exp(draw(st.floats(0, 2)) * random.normal(size=columns))
        if draw(st.booleans()):  # escapes, alone or by rows
            codes *= 1 + 1000 * (random.random((rows, 1)) < 0.05)
            codes[random.integers(rows), random.integers(columns)] = random.integers(
                -(2**23), 2**23
            )
        codes = torch.from_numpy(np.rint(codes).astype(np.int32))
        scale = torch.from_numpy(random.random(1).astype(np.float16)) * draw(st.integers(0, 1))
        w = script.dequantize(codes, scale)
        if script.tensor_class(name, w) == "control":
            tensors[name] = w.clamp(-6e4, 6e4).half().float()
        else:
            tensors[name], coded[name] = w, script.Coded(codes, scale, bits)
    return tensors, coded


def check_round_trip(path, drawn):
    tensors, coded = drawn
    data = pack(tensors, coded)
    header, back, again = read(data, path)
    assert back.keys() == tensors.keys() and list(again) == list(coded)
    for name, w in tensors.items():
        assert back[name].numpy().tobytes() == w.numpy().tobytes()
    for name, part in coded.items():
        assert torch.equal(again[name].codes, part.codes) and torch.equal(
            again[name].scale, part.scale
        )
        assert again[name].bits == part.bits
    assert pack(back, again) == data


@counts
def test_any_codes_come_back(tmp_path, count):
    @settings(few, max_examples=count)
    @given(drawn=tensors_and_codes())
    def check(drawn):
        check_round_trip(tmp_path / "a.upar", drawn)

    check()


# ------------------------------------------------------------------------------------------- damage
def two_artifacts():
    """Two files of the same tensors' names and shapes, with every coder."""
    found = []
    for seed in (0, 100):
        random = torch.Generator().manual_seed(seed)
        rows, columns = (torch.randn(size, generator=random).exp() for size in (64, 80))
        tensors = {
            "embed": randn(40, 24, seed=seed),
            "w_cells": randn(64, 80, seed=seed + 1) * rows[:, None] * columns,
            "w_alike": randn(48, 40, seed=seed + 2),
            "w_zeros": torch.zeros(32, 32),
            "norm": randn(24, seed=seed + 3),
            "w_small": randn(20, 16, seed=seed + 4),
            "A_log": randn(8, seed=seed + 5),
        }
        table = {
            "matrix": {"bits": 6, "clip_sigmas": 8.0},
            "embedding": {"bits": 8, "clip_sigmas": 6.0},
        }
        found.append(pack(tensors, table=table, meta={"seed": seed}))
    return found


ARTIFACTS = two_artifacts()


@st.composite
def damaged(draw):
    """One of the artifacts with one byte changed, cut short at either end or within, or with a
    piece of the other.
    """
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


@counts
def test_no_damage_loads(tmp_path, count):
    @settings(few, max_examples=count)
    @given(data=damaged())
    def check(data):
        if data not in ARTIFACTS:
            refused(tmp_path / "a.upar", data)

    check()


# --------------------------------------------------------------------------------- rows and columns
def entropy(symbols):
    """Order-0 entropy in bytes."""
    share = np.unique(symbols, return_counts=True)[1] / max(1, symbols.size)
    return -(share * np.log2(share)).sum() * symbols.size / 8


def by_size(codes):
    """Entropy given the sum of the sizes of row and column, in quarter octaves."""
    square = codes.astype(np.float64) ** 2
    rows = np.rint(2 * np.log2(np.clip(square.mean(1), 2.0**-8, None)))
    columns = np.rint(2 * np.log2(np.clip(square.mean(0) / square.mean(), 2.0**-8, None)))
    sums = np.add.outer(rows, columns)
    return sum(entropy(codes[sums == one]) for one in np.unique(sums))


def pack_codes(**codes):
    """An artifact of these codes."""
    coded = {
        name: script.Coded(torch.from_numpy(array).int(), torch.ones(1).half(), 8)
        for name, array in codes.items()
    }
    return pack({name: part.codes.float() for name, part in coded.items()}, coded)


def spent(header):
    """Bytes of all streams."""
    return sum(record["length"] for record in header["streams"].values())


def sized(side, octaves, what, seed=0):
    """Normal codes (side, side) whose rows, or rows and columns, differ in size by up to `octaves`,
    in no order.
    """
    random = np.random.default_rng(seed)
    sizes = [
        random.permutation(2.0 ** np.linspace(-octaves / 2, octaves / 2, side)) for _ in range(2)
    ]
    codes = random.normal(size=(side, side)) * 4
    codes *= sizes[0][:, None] if what != "alike" else 1
    codes *= sizes[1] if what == "both" else 1
    return np.clip(np.rint(codes), -31, 31).astype(np.int8)


@pytest.mark.parametrize("what", ["alike", "rows", "both"])
@pytest.mark.parametrize(("side", "octaves"), [(100, 3), (200, 2), (400, 3)])
def test_bytes_are_the_entropy_by_row_and_column(tmp_path, side, octaves, what):
    codes = sized(side, octaves, what)
    header, _, back = read(pack_codes(w_up=codes), tmp_path / "a.upar")
    assert np.array_equal(back["w_up"].codes, codes)
    ideal = by_size(codes)
    lanes = header["streams"]["lane_states"]["shape"][0]
    length = header["streams"]["w_up"]["length"]
    assert header["streams"]["w_up"]["dtype"] == "<u2"
    assert ideal <= length + 2 * lanes and length <= 1.0015 * ideal + 2 * lanes
    # besides lanes: some 25 tables of at most 63 codes, and a byte at most for each row and column
    assert spent(header) - length <= 4 * lanes + 2 * side + 1500
    if what != "alike" and side >= 200:
        assert spent(header) < (0.99 if side >= 400 else 1.0) * entropy(codes)
    if what == "alike":
        assert spent(header) < 1.01 * entropy(codes) + 600


@pytest.mark.parametrize("share", [0.1, 0.6])
def test_rows_of_zeros_leave_rans_the_shortest(tmp_path, share):
    """Embeddings of tokens that never came: without rows zstd beats the entropy of all codes, with
    rows it does not.
    """
    random = np.random.default_rng(0)
    codes = np.clip(np.rint(random.normal(size=(2048, 128)) * 21), -127, 127).astype(np.int8)
    codes[random.random(2048) < share] = 0
    data = pack_codes(embed=codes)
    header, _, back = read(data, tmp_path / "a.upar")
    zstd = len(script.zstandard.ZstdCompressor(level=1).compress(codes.tobytes()))
    assert np.array_equal(back["embed"].codes, codes) and zstd < entropy(codes)
    assert header["streams"]["embed"]["dtype"] == "<u2" and len(data) < 0.995 * zstd
    ideal = sum(entropy(codes[(codes != 0).any(1) == one]) for one in (False, True))
    assert ideal < len(data) < 1.01 * ideal + 1500


# --------------------------------------------------------------------------------- 20 million codes
LAYER = [(512, 512), (512, 512), (256, 512), (256, 512), (1204, 512), (512, 1204)]


def full(*case):
    return pytest.param(*case, marks=pytest.mark.full)


# Bytes that the file may take over the summed order-0 entropy. The codes of a tensor whose rows
# differ in size take fewer.
@pytest.mark.parametrize(
    ("kind", "clip_sigmas", "excess"),
    [
        # The states of the coder's lanes, 4,096 for so many codes, take 8 kB of this.
        ("gauss", 12.85, 20_000),
        full("gauss", 4.5, 20_000),
        full("laplace", 8.0, 26_000),  # each rare code has a slot of every table that it is in
        full("rows", 12.85, -380_000),
    ],
)
def test_the_file_is_near_the_entropy_of_its_codes(tmp_path, kind, clip_sigmas, excess):
    """10 layers, 20.2 million weights. The first matrix takes less than by zstd at its strongest."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for number, shape in enumerate(LAYER * 10):
        w = torch.randn(shape, generator=generator)
        if kind == "laplace":
            share = torch.rand(shape, generator=generator) - 0.5
            w = -share.sign() * torch.log1p(-2 * share.abs())
        if kind == "rows":
            w *= torch.exp(0.4 * torch.randn(len(w), 1, generator=generator))
        tensors[f"w_{number}"] = w
    coded = script.quantize_all(tensors, {"matrix": {"bits": 6, "clip_sigmas": clip_sigmas}})
    data = pack(tensors, coded)
    _, _, back = read(data, tmp_path / "a.upar")
    assert all(torch.equal(back[name].codes, part.codes) for name, part in coded.items())
    assert all(torch.equal(back[name].scale, part.scale) for name, part in coded.items())
    codes = [part.codes.numpy() for part in coded.values()]
    assert len(data) - sum(map(entropy, codes)) <= excess
    data = script.pack_artifact({"w_0": tensors["w_0"]}, {"w_0": coded["w_0"]})
    assert len(data) < 0.996 * len(script.zstandard.ZstdCompressor(level=22).compress(codes[0]))
