"""Section artifact: rANS against entropy and a scalar decoder, lossless files, damage named in one
line.
"""

import hashlib
import heapq
import json
import math
import struct
import tracemalloc

import numpy as np
import pytest
import torch
import zstandard

import train_gpt as script
from conftest import ROOT, load_script, load_tool

TABLE = {"matrix": {"bits": 6, "clip_sigmas": 8.0}, "embedding": {"bits": 8, "clip_sigmas": 6.0}}
CODER = ["lane_states", "tables", "sizes", "escapes"]
LETTERS = {
    "|i1": "b",
    "|u1": "B",
    "<u2": "H",
    "<u4": "I",
    "<i4": "i",
    "<f2": "e",
    "<f4": "f",
}  # dtype -> struct's letter

record = load_tool("record")
META = {"steps": 3, "tokenizer": "a.tiktoken"}

pytestmark = pytest.mark.usefixtures("one_thread")


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def with_outliers(w, size):
    """The tensor with weights of 20 and 30 root mean squares, whose codes are escapes."""
    w = w * size
    w[3, 5] = -20 * size
    w[-1, -1] = 30 * size
    return w


def small_model():
    """Tensors of every class and coder, some 5 KB packed."""
    return {
        "embed": randn(16, 24, seed=2),
        "blocks.0.w_up": randn(30, 40, seed=3),
        "blocks.0.w_zeros": torch.zeros(32, 32),
        "blocks.0.repeated_embed": randn(1, 64, seed=1).repeat(24, 1),
        "blocks.0.ab": randn(16, 40, seed=4),
        "blocks.0.norm": torch.linspace(0.5, 1.5, 24),
        "blocks.0.A_log": randn(8, seed=5),
        "blocks.0.conv": randn(24, 1, 4, seed=6),
        "blocks.0.w_down": randn(40, 5, 6, seed=7) * 0.01,
        "blocks.0.outlier_embed": with_outliers(randn(33, 31, seed=8), 0.5),
        "gain": torch.tensor(1.25),
        "zero_init_gain": torch.zeros(300),
        "empty": torch.zeros(0, 16),
    }


def sized_model():
    """Matrices in which rows, columns, both or neither differ in size."""
    random = torch.Generator().manual_seed(9)
    rows = torch.randn(96, generator=random).exp()
    columns = torch.randn(128, generator=random).exp()
    return {
        "w_both": randn(96, 128, seed=1) * rows[:, None] * columns,
        "w_rows": randn(96, 128, seed=2) * rows[:, None],
        "w_columns": randn(96, 128, seed=3) * columns,
        "w_alike": randn(60, 80, seed=4),
        "head": randn(40, 50, seed=6).sign() * randn(40, 50, seed=7).abs() ** 3,
    }


def expected(name, w, table):
    """The tensor that a file should give back, in numpy."""
    kind = script.tensor_class(name, w)
    if kind in table:
        codes, scale = script.quantize(w.flatten(1), **table[kind])
        values = codes.numpy().astype(np.float32) * scale.numpy().astype(np.float32)
        return torch.from_numpy(values).reshape(w.shape)
    return w.float() if name.endswith("A_log") else w.half().float()


def write(path, tensors, table=TABLE, meta=None, coded=None):
    """Write the file as train_gpt.main() does."""
    coded = coded or script.quantize_all(tensors, table)
    settings = {"dim": 24, "name": "é"}
    data = script.pack_artifact(
        tensors, coded, settings=settings, tokenizer_sha256="ab" * 32, meta=meta or META
    )
    path.write_bytes(data)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    path = tmp_path_factory.mktemp("artifact") / "small.bin"
    write(path, small_model())
    return path.read_bytes()


def header_of(data):
    """The header and where the streams begin, read without the code under test."""
    magic, version, length = struct.unpack_from("<8sII", data)
    assert (magic, version) == (b"UNDERPAR", 10)
    return json.loads(zstandard.ZstdDecompressor().decompress(data[16 : 16 + length])), 16 + length


def signed(frame, area=b"", version=10):
    """A file of a header's frame and streams, with the right SHA-256."""
    body = struct.pack("<8sII", b"UNDERPAR", version, len(frame)) + frame + area
    return body + hashlib.sha256(body).digest()


def sealed(data, change=None, area=None, version=10):
    """The artifact with its header changed and, where given, other streams, under right sums."""
    header, start = header_of(data)
    if change:
        change(header)
    area = data[start:-32] if area is None else area
    frame = zstandard.ZstdCompressor().compress(json.dumps(header).encode())
    return signed(frame, area, version)


@pytest.fixture
def damage_message(tmp_path):
    """Function: the one line that reading these bytes from a file ends with, without the file's
    name.
    """

    def message_of(data):
        path = tmp_path / "damaged.bin"
        path.write_bytes(data)
        with pytest.raises(script.ArtifactError) as caught:
            script.read_artifact(path)
        message = str(caught.value)
        assert message.startswith(f"{path}: ") and "\n" not in message
        return message.removeprefix(f"{path}: ")

    return message_of


# --------------------------------------------------------------------------------------------- rANS
def roundtrip(tensors, lanes):
    """Encode tensors of symbols as one stack, decode them as one queue; return all words."""
    counts = [np.bincount(np.append(symbols, [7, 200]), minlength=256) for symbols in tensors]
    tables = np.stack([script.rans_table(each) for each in [*counts, np.zeros(256)]])
    begin = (1 << 16) + np.random.default_rng(1).integers(0, 1 << 16, lanes).astype(np.uint32)
    states = begin.copy()
    coder = script.RansCoder(states, tables)
    words = []
    for at in reversed(range(len(tensors))):
        words.insert(0, coder.encode(at << 8 | tensors[at].astype(np.int64)))
        assert words[0].dtype == np.uint16
    reader = script.RansCoder(states.copy(), tables)
    for at, symbols in enumerate(tensors):
        decoded = reader.decode(np.full(len(symbols), at, np.uint8), words[at])
        assert decoded.dtype == np.uint8 and np.array_equal(symbols, decoded)
    assert np.array_equal(reader.states, begin)
    return words


@pytest.mark.parametrize("lanes", [1, 64, 1024])
def test_rans_is_lossless(lanes):
    random = np.random.default_rng(0)
    uneven = np.minimum(random.geometric(0.5, 5000), 255).astype(np.uint8)
    tensors = [
        np.empty(0, np.uint8),
        np.array([9], np.uint8),
        np.full(3000, 9, np.uint8),
        np.arange(64, dtype=np.uint8),
        np.arange(256, dtype=np.uint8),
        random.integers(0, 256, 1023).astype(np.uint8),
        random.integers(97, 160, 1024).astype(np.uint8),
        random.integers(97, 160, 1025).astype(np.uint8),
        uneven,
        np.empty(0, np.uint8),
    ]
    words = roundtrip(tensors, lanes)
    assert abs(len(words[8]) - 5000 * 2 / 16) < 30 + lanes  # geometric(1/2): 2 bits a symbol
    for symbols in tensors:
        roundtrip([symbols], lanes)
    roundtrip([], lanes)


@pytest.mark.parametrize(
    "counts",
    [
        [1, 1],
        [1, 10**9],
        [10**9] + [1] * 255,
        [1] * 256,
        list(range(1, 257)),
        [3**k for k in range(30)],
        [0, 5, 0, 0, 11, 0, 3],
        np.rint(1e6 * np.exp(-((np.arange(256) - 128) ** 2) / 200)).astype(int).tolist(),
    ],
)
def test_table_is_whole_and_nearly_as_good_as_the_best(counts):
    counts = np.array(counts + [0] * (256 - len(counts)))
    table = script.rans_table(counts)
    assert table.dtype == np.uint16 and table.sum() == 2**14
    assert (
        (table[counts > 0] > 0).all()
        and (table[2:][counts[2:] == 0] == 0).all()
        and table[:2].all()
    )
    # the best there is: the cost is convex, so 2**14 units go one by one to where each saves most
    kept = counts[counts > 0].tolist()
    best = [1] * len(kept)
    heap = [(-count, k) for k, count in enumerate(kept)]
    heapq.heapify(heap)
    for _ in range(2**14 - len(best)):
        _, k = heap[0]
        best[k] += 1
        heapq.heapreplace(heap, (-kept[k] * math.log2(1 + 1 / best[k]), k))

    def bits(frequencies):
        return sum(count * (14 - math.log2(f)) for count, f in zip(kept, frequencies, strict=True))

    ours = bits(table[counts > 0].tolist())
    assert bits(best) <= ours <= bits(best) * 1.0002 + sum(kept) * 3e-4


def test_a_table_of_one_symbol_or_none_does_not_overflow():
    for counts in (np.zeros(256), np.eye(256)[0] * 5, np.eye(256)[200] * 10**9):
        table = script.rans_table(counts)
        assert table.sum() == 2**14 and table.max() < 2**14 and table[:2].all()
    with pytest.raises(script.ArtifactError, match="sum"):
        script.RansCoder(np.full(8, 1 << 16, np.uint32), np.ones((1, 256), np.uint16))


def test_a_state_at_its_upper_limit_is_coded():
    """From f << 18 on a state has no room for a symbol of frequency f: a word leaves it first."""
    table = np.zeros((1, 256), np.uint16)
    table[0, 3:5] = 1 << 13
    states = np.array([1 << 13 << 18], np.uint32)
    words = script.RansCoder(states, table).encode(np.array([3]))
    assert len(words) == 1
    decoded = script.RansCoder(states, table).decode(np.array([0]), words)
    assert decoded.tolist() == [3] and states.tolist() == [1 << 31]


# -------------------------------------------------------------------------------------------- files
class Book:
    """An artifact read once more by the format's text alone: one symbol, one state and one search
    at a time.
    """

    def __init__(self, data):
        self.header, start = header_of(data)
        self.area = data[start:-32]
        self.codes = {}
        self.tensors = {}
        arrays = {}
        for name, record in self.header["streams"].items():
            payload = self.area[: record["length"]]
            self.area = self.area[record["length"] :]
            assert len(payload) == record["length"]
            raw = zstandard.ZstdDecompressor().decompress(payload)
            letter = LETTERS[record["dtype"]]
            numbers = list(struct.unpack(f"<{len(raw) // struct.calcsize(letter)}{letter}", raw))
            if name in CODER:
                assert math.prod(record["shape"]) == len(numbers)
                arrays[name] = numbers
                continue
            if record["dtype"] == "<u2":
                numbers = self.unrans(arrays, record["shape"], numbers)
            if "scale" in record:
                numbers = [arrays["escapes"].pop(0) if x == -128 else x for x in numbers]
            values = np.array(numbers, np.float32)
            if "scale" in record:
                scale = np.float16(record["scale"])
                self.codes[name] = np.array(numbers), scale, record["bits"]
                values *= np.float32(scale)
            self.tensors[name] = values.reshape(record["shape"])
        assert list(arrays) == CODER and not arrays["sizes"] and not self.area
        assert not arrays["escapes"]
        assert all(state == 65536 for state in arrays["lane_states"])

    def unrans(self, arrays, shape, words):
        """The codes of a stream, flat; takes its sizes and moves the lane states."""
        rows = [arrays["sizes"].pop(0) for _ in range(shape[0])]
        columns = [arrays["sizes"].pop(0) for _ in range(math.prod(shape[1:]))]
        states = arrays["lane_states"]
        codes = []
        for row in rows:
            for column in columns:
                begin = 256 * (row + column)
                table = arrays["tables"][begin : begin + 256]
                lane = len(codes) % len(states)
                slot, start, symbol = states[lane] % 16384, 0, 0
                while start + table[symbol] <= slot:
                    start += table[symbol]
                    symbol += 1
                state = table[symbol] * (states[lane] // 16384) + slot - start
                states[lane] = state if state >= 65536 else state * 65536 + words.pop(0)
                codes.append(symbol - 256 * (symbol > 127))
        assert not words
        return codes


@pytest.mark.parametrize("make", [small_model, sized_model])
def test_a_scalar_reader_by_the_book_finds_the_same_numbers(tmp_path, make):
    path, model = tmp_path / "a.bin", make()
    write(path, model)
    book = Book(path.read_bytes())
    header, tensors, coded = script.read_artifact(path)
    assert (
        header == book.header
        and list(tensors) == list(book.tensors)
        and tensors.keys() == model.keys()
    )
    for name, w in model.items():
        ours = tensors[name].numpy().tobytes()
        assert ours == book.tensors[name].tobytes() == expected(name, w, TABLE).numpy().tobytes(), (
            name
        )
    assert set(coded) == set(book.codes)
    for name, (codes, scale, bits) in book.codes.items():
        kind = script.tensor_class(name, model[name])
        want = script.quantize(model[name].flatten(1), **TABLE[kind])
        assert np.array_equal(codes.reshape(want[0].shape), want[0]) and scale == want[1].item()
        assert torch.equal(coded[name].codes, want[0]) and torch.equal(coded[name].scale, want[1])
        assert coded[name].bits == bits == TABLE[script.tensor_class(name, model[name])]["bits"]
    if make is sized_model:
        assert all(header["streams"][name]["dtype"] == "<u2" for name in model)


def test_the_header_lists_every_stream(tmp_path):
    model = small_model()
    write(tmp_path / "a.bin", model, meta={"note": "ü", "list": [1, 2.5, None]})
    header, tensors, _ = script.read_artifact(tmp_path / "a.bin")
    assert all(tensor.dtype == torch.float32 for tensor in tensors.values())
    assert (
        header["settings"] == {"dim": 24, "name": "é"} and header["tokenizer_sha256"] == "ab" * 32
    )
    assert header["meta"] == {"note": "ü", "list": [1, 2.5, None], "tokenizer": "bytes"}
    records = header["streams"]
    coded = [name for name, w in model.items() if script.tensor_class(name, w) in TABLE]
    assert list(records) == [*CODER, *coded, *(name for name in model if name not in coded)]
    dtypes = dict(w_up="<u2", w_zeros="<u2", repeated_embed="|i1", A_log="<f4", conv="<f2")
    assert dtypes == {name: records[f"blocks.0.{name}"]["dtype"] for name in dtypes}
    assert records["blocks.0.w_zeros"]["length"] < 16
    assert records["blocks.0.w_up"]["bits"] == 6 and records["embed"]["bits"] == 8


SHAPES = {
    "w_one_row": randn(1, 16),
    "gain": torch.tensor([0.0, -0.0]),
    "w_constant": torch.full((64, 64), 0.25),
    "embed": randn(300, 20),
    "embed2": randn(1, 5000),
    "w_large": randn(700, 700),
    "w_bfloat": randn(20, 20).bfloat16(),
    "w_double": randn(20, 20).double(),
    "w_transposed": randn(40, 30).T,
    "w_strided": randn(64, 64)[:, ::2],
    "norm": torch.nn.Parameter(randn(9)),
}


@pytest.mark.parametrize("tensors", [{}, SHAPES], ids=["none", "all"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_shapes_and_types(tmp_path, tensors, bits):
    table = {
        "matrix": {"bits": bits, "clip_sigmas": 4.0},
        "embedding": {"bits": 10 - bits, "clip_sigmas": 4.0},
    }
    write(tmp_path / "a.bin", tensors, table)
    _, back, _ = script.read_artifact(tmp_path / "a.bin")
    assert back.keys() == tensors.keys()
    for name, w in tensors.items():
        right = expected(name, w.detach(), table).contiguous()
        assert back[name].numpy().tobytes() == right.numpy().tobytes()


def test_same_input_same_bytes_and_nothing_else_is_changed(tmp_path, small):
    model = small_model()
    coded = script.quantize_all(model, TABLE)
    copies = {name: (part.codes.clone(), part.scale.clone()) for name, part in coded.items()}
    for _ in range(2):
        write(tmp_path / "a.bin", model, coded=coded)
        assert (tmp_path / "a.bin").read_bytes() == small
    assert all(torch.equal(w, model[name]) for name, w in small_model().items())
    for name, (codes, scale) in copies.items():
        assert torch.equal(codes, coded[name].codes) and torch.equal(scale, coded[name].scale)


@pytest.mark.parametrize(
    ("name", "value"),
    [("w_bad", math.nan), ("w_bad", 1e9), ("bad", math.nan), ("bad", 7e4), ("A_log", math.inf)],
)
def test_what_does_not_fit_is_refused_by_name(tmp_path, name, value):
    tensor = torch.full((20, 20), value)
    with pytest.raises(
        script.ArtifactError, match=rf"^tensor some\.{name}: must be finite as it is stored$"
    ):
        write(tmp_path / "a.bin", {"fine": torch.ones(3), f"some.{name}": tensor})


# ------------------------------------------------------------------------------------------- damage
DAMAGED = "damaged: the SHA-256 is wrong"


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.full)])
def test_every_flipped_byte_is_an_error(small, damage_message, step):
    assert 3000 < len(small) < 7000
    for position in range(0, len(small), step):
        damaged = bytearray(small)
        damaged[position] ^= 1 << position % 8
        message = damage_message(bytes(damaged))
        if position < 8:
            assert message == "is no underpar artifact"
        elif position < 12:
            assert message.startswith("version ") and message.endswith(", this code reads 9 and 10")
        else:
            assert message == DAMAGED


def test_every_truncation_and_appended_bytes_are_errors(small, damage_message):
    lengths = [*range(64), *range(64, len(small) - 64, 9), *range(len(small) - 64, len(small))]
    for length in lengths:
        message = damage_message(small[:length])
        assert length < 16 or message == DAMAGED
    assert damage_message(small + b"\0") == DAMAGED


TOO_LARGE = "the file is too short for so many numbers"
# What the record of a stream says instead, and how the error begins.
UP = "blocks.0.w_up"
LIES = [
    ("lane_states", dict(length=10**15), ""),
    ("lane_states", dict(length=-1), ""),
    ("lane_states", dict(shape=[7]), ""),
    ("lane_states", dict(dtype="<u8"), ""),
    ("lane_states", dict(dtype="O"), "'lane_states' has a dtype that is none"),
    ("lane_states", dict(dtype="V1000000000"), "'lane_states' has a dtype that is none"),
    ("escapes", dict(dtype="|i1"), ""),
    ("tables", dict(shape=[1 << 40, 256]), f"'tables': {TOO_LARGE}"),
    ("tables", dict(shape=[-1 << 70, 256]), "'tables'.shape[0] is -1180591620717411303424, must "),
    ("tables", dict(shape=[5, 256]), "'tables' is longer than"),
    ("sizes", dict(shape=[]), ""),
    ("sizes", dict(dtype="<u2"), ""),
    (UP, dict(shape=[1 << 40, 0]), ""),
    (UP, dict(shape=[-30, -40]), "'blocks.0.w_up'.shape[0] is -30, must be of type int, 0 or"),
    (UP, dict(shape=[9] * 100_000), "'blocks.0.w_up' has a shape that is none"),
    (UP, dict(shape=[0, 1200]), ""),
    (UP, dict(shape=[30.0, 40]), "'blocks.0.w_up'.shape[0] is 30.0, must be of type int"),
    (UP, dict(shape=[]), "'blocks.0.w_up' is longer than"),
    (UP, dict(shape=[31, 40]), ""),
    (UP, dict(shape=[30, 39]), "rANS words are left over"),
    (UP, dict(shape=[40, 30]), ""),
    (UP, dict(length=1 << 70), "OverflowError"),
    (UP, dict(dtype="|i1"), ""),
    (UP, dict(dtype="<f2"), ""),
    (UP, dict(scale="a"), "'blocks.0.w_up'.scale is 'a', must be of type float"),
    (UP, dict(scale=7e4), "'blocks.0.w_up' has a scale that is not finite"),
    (UP, dict(bits="six"), "'blocks.0.w_up'.bits is 'six', must be of type int"),
    ("blocks.0.repeated_embed", dict(shape=[24, 63]), "'blocks.0.repeated_embed' is longer"),
    ("blocks.0.repeated_embed", dict(shape=[24, 65]), "RuntimeError"),
    ("blocks.0.norm", dict(dtype="<f4"), "RuntimeError"),
    ("blocks.0.norm", dict(dtype="<u2"), ""),
    ("blocks.0.norm", dict(dtype="|i1"), "'blocks.0.norm' is longer than"),
    (
        "blocks.0.norm",
        dict(dtype="|i1", shape=[48]),
        "KeyError",
    ),
    ("more\nlines", dict(length=0), ""),
]


@pytest.mark.parametrize(("name", "lie", "message"), LIES)
def test_headers_that_lie_are_refused(small, damage_message, tmp_path, name, lie, message):
    def change(header):
        streams = header["streams"]
        streams.setdefault(name, dict(streams[UP])).update(lie)

    (tmp_path / "a.bin").write_bytes(sealed(small))
    assert script.read_artifact(tmp_path / "a.bin")  # the test's own sealing is right
    assert damage_message(sealed(small, change)).startswith(message)


def test_a_word_that_only_the_last_states_tell_is_refused(tmp_path, damage_message):
    """The last word of the last tensor is changed: as many words are read, and the lanes end
    elsewhere.
    """
    write(tmp_path / "a.bin", sized_model())
    data = (tmp_path / "a.bin").read_bytes()
    header, start = header_of(data)
    payload = data[start:-32][-header["streams"]["head"]["length"] :]
    words = bytearray(zstandard.ZstdDecompressor().decompress(payload))
    words[-4] ^= 1
    changed = zstandard.ZstdCompressor().compress(bytes(words))

    def change(header):
        header["streams"]["head"].update(length=len(changed))

    assert list(header["streams"])[-1] == "head"
    area = data[start : -32 - len(payload)] + changed
    assert damage_message(sealed(data, change, area)) == "the lanes do not end at 2**16"


def places(value):
    """Every (container, key) of a JSON value."""
    found = []
    items = list(enumerate(value)) if isinstance(value, list) else []
    if isinstance(value, dict):
        items = list(value.items())
    for key, inner in items:
        found += [(value, key), *places(inner)]
    return found


def test_nonsense_in_any_place_of_the_header_is_an_artifact_error_or_harmless(tmp_path):
    """Each value of the header is replaced under right sums."""
    path = tmp_path / "a.bin"
    write(path, {"embed": with_outliers(randn(32, 24), 1.0), "norm": randn(5)})
    data = path.read_bytes()
    header, start = header_of(data)
    junk = [
        None,
        True,
        -1,
        0,
        2.5,
        10**6,
        1 << 70,
        math.nan,
        "",
        "rans",
        [],
        [1 << 40, 0],
        {"a": 1},
    ]
    read = 0
    tracemalloc.start()
    for at in range(len(places(header))):
        for value in junk:
            changed = json.loads(json.dumps(header))
            container, key = places(changed)[at]
            container[key] = value
            path.write_bytes(
                signed(
                    zstandard.ZstdCompressor().compress(json.dumps(changed).encode()),
                    data[start:-32],
                )
            )
            try:
                read += len(script.read_artifact(path)[1]) > 0
            except script.ArtifactError as error:
                assert "\n" not in str(error) and "MemoryError" not in str(error)
    assert tracemalloc.get_traced_memory()[1] < 100 << 20
    tracemalloc.stop()
    assert 20 < read < 100  # what settings and meta have is not the reader's to judge, nor a scale


def test_nothing_is_allocated_from_a_length_that_was_not_checked(small, tmp_path, damage_message):
    zeros = zstandard.ZstdCompressor(level=19).compress(bytes(1 << 28))

    def bomb(header):  # a frame that declares and holds 256 MB where 24 values belong
        header["streams"]["empty"].update(shape=[24], length=len(zeros))

    frame = zstandard.ZstdCompressor(level=19).compress(b" " * (1 << 28))
    deep = zstandard.ZstdCompressor().compress(b"[" * 1_000_000)
    area = small[header_of(small)[1] : -32]
    empty = header_of(small)[0]["streams"]["empty"]["length"]
    tracemalloc.start()
    message = damage_message(sealed(small, bomb, area[: len(area) - empty] + zeros))
    assert message == "'empty' is longer than 48 bytes"
    assert damage_message(signed(frame)) == "the header is longer than 1048576 bytes"
    assert damage_message(signed(deep)).startswith("RecursionError")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100 << 20
    with pytest.raises(FileNotFoundError):
        script.read_artifact(tmp_path / "none.bin")


def forged(streams, version=10):
    """A file of streams: name -> (shape, array, more of its record), under right sums."""
    records = {}
    area = b""
    for name, (shape, array, *more) in streams.items():
        payload = zstandard.ZstdCompressor(level=3).compress(array.tobytes())
        records[name] = {"shape": shape, "dtype": array.dtype.str, "length": len(payload)}
        records[name].update(*more)
        area += payload
    header = {"settings": {}, "meta": {}, "tokenizer_sha256": "", "streams": records}
    frame = zstandard.ZstdCompressor().compress(json.dumps(header).encode())
    return signed(frame, area, version)


def coder_streams(lanes, rows, sure=True):
    """The coder's arrays for matrices of `rows` rows or columns, by tables that make 1 certain."""
    tables = np.zeros((97, 256), np.uint16)
    tables[:, :2] = [0, 16384] if sure else [1, 16383]
    return {
        "lane_states": ([lanes], np.full(lanes, 1 << 16, np.uint32)),
        "tables": ([97, 256], tables),
        "sizes": ([rows], np.zeros(rows, np.uint8)),
    }


CODED = {"scale": 1.0, "bits": 6}
NO_WORDS = np.empty(0, np.uint16)


def bomb_of_codes(side, lanes=1024):
    return forged({**coder_streams(lanes, 2 * side), "w": ([side, side], NO_WORDS, CODED)})


BOMBS = {
    "codes that take no bytes": (lambda: bomb_of_codes(30_000), TOO_LARGE),
    "codes in one lane": (lambda: bomb_of_codes(3000, lanes=1), "the lanes are too few"),
    "floats": (lambda: forged({"norm": ([1 << 29], np.zeros(1 << 24, "f4"))}), TOO_LARGE),
    "a stream longer than its shape": (
        lambda: forged({"norm": ([9], np.zeros(1 << 26, "f4"))}),
        "'norm' is longer than 36 bytes",
    ),
    "tables": (
        lambda: forged(
            {**coder_streams(8, 8), "tables": ([1 << 15, 256], np.zeros(1 << 23, "u2"))}
        ),
        "cannot reshape",
    ),
    "many tensors": (
        lambda: forged({f"w{at}": ([1 << 20], np.zeros(9, "i1"), CODED) for at in range(300)}),
        TOO_LARGE,
    ),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_short_files_that_claim_many_numbers_are_refused(damage_message, kind):
    """Files of at most 60 kB, which took up to 4 GB."""
    make, message = BOMBS[kind]
    data = make()
    assert len(data) < 60_000
    tracemalloc.start()
    assert message in damage_message(data)
    faults = record.Faults("a file")
    record.check_integers(data, faults)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 400 << 20


def test_a_network_of_nothing_but_zeros_is_read_again(tmp_path, monkeypatch):
    """Its codes take no bytes, so the file is filled up until it may have as many weights."""
    monkeypatch.setattr(script, "FREE_NUMBERS", 1 << 15)
    tensors = {"w_up": torch.zeros(600, 300)}
    write(tmp_path / "a.bin", tensors)
    size = (tmp_path / "a.bin").stat().st_size
    assert size == pytest.approx((600 * 300 + 97 * 256 - (1 << 15)) / 64, rel=0.05)
    assert torch.equal(script.read_artifact(tmp_path / "a.bin")[1]["w_up"], tensors["w_up"])


def test_escapes_that_are_missing_or_left_over_are_refused(tmp_path, damage_message):
    """One number for two escapes, and one too many."""
    path = tmp_path / "a.bin"
    write(path, {"embed": with_outliers(randn(32, 24), 1.0)})
    data = path.read_bytes()
    header, start = header_of(data)
    lengths = [header["streams"][name]["length"] for name in CODER]
    begin = start + sum(lengths[:3])
    assert header["streams"]["escapes"]["shape"] == [2]
    for count, message in ((1, "Number of elements of source"), (3, "escapes are left over")):
        frame = zstandard.ZstdCompressor().compress(np.full(count, 500, np.int32).tobytes())

        def change(header, count=count, frame=frame):
            header["streams"]["escapes"].update(shape=[count], length=len(frame))

        area = data[start:begin] + frame + data[begin + lengths[3] : -32]
        assert message in damage_message(sealed(data, change, area))


def test_artifacts_of_version_9_are_read_bit_for_bit(tmp_path):
    """One of a frozen record, by its own script and by the present one; and one made here."""
    folder = ROOT / "records" / "track_cpu_3min" / "2026-11-25_Hybrid"
    old = load_script(folder / "train_gpt.py")
    old_header, old_tensors, old_coded = old.read_artifact(folder / "seed_1.upar")
    header, tensors, coded = script.read_artifact(folder / "seed_1.upar")
    assert header == old_header and (folder / "seed_1.upar").read_bytes()[8] == 9
    assert len(tensors) > 20 and list(tensors) == list(old_tensors)
    for name, w in tensors.items():
        assert w.numpy().tobytes() == old_tensors[name].numpy().tobytes()
    for name, part in coded.items():
        assert torch.equal(part.codes, old_coded[name].codes.int())
        assert (part.scale, part.bits) == (old_coded[name].scale, old_coded[name].bits)
    # The same weights by the present packer: the streams are those of version 9, and one more.
    data = script.pack_artifact(
        tensors, coded, **{key: value for key, value in header.items() if key != "streams"}
    )
    assert len(data) - (folder / "seed_1.upar").stat().st_size < 100
    path = tmp_path / "a.upar"
    path.write_bytes(data)
    for name, w in script.read_artifact(path)[1].items():
        assert torch.equal(w, tensors[name])
