"""Section artifact: rANS against order-0 entropy and a scalar decoder, lossless files, damage named in one line."""

import hashlib
import heapq
import json
import math
import re
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
import torch
import zstandard

import train_gpt as script


def rule(bits, clip_sigmas=0.0, step="row"):
    """An entry of a QuantTable."""
    return {"bits": bits, "clip_sigmas": clip_sigmas, "step": step, "widen": 1.0}


TABLE = {"matrix": rule(6, 60.0), "embedding": rule(8)}  # few small codes, so that rANS pays in small tensors too


pytestmark = pytest.mark.usefixtures("one_thread")


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def small_model():
    """A tensor for every coder and class, some 2.5 KB packed; deterministic."""
    repeated = torch.randint(-31, 32, (1, 64), generator=torch.Generator().manual_seed(1)).float().repeat(24, 1)
    repeated[:, 0] = 31  # the same scale in every row
    return {
        "embed": randn(16, 24, seed=2),
        "blocks.0.w_up": randn(30, 40, seed=3),
        "blocks.0.w_zeros": torch.zeros(32, 32),
        "blocks.0.w_repeated": repeated,
        "blocks.0.ab": randn(16, 40, seed=4),
        "blocks.0.norm": torch.linspace(0.5, 1.5, 24),
        "blocks.0.A_log": randn(8, seed=5),
        "blocks.0.conv": randn(24, 1, 4, seed=6),
        "blocks.0.w_down": randn(40, 30, seed=7) * 0.01,
        "gain": torch.tensor(1.25),
        "zero_init_gain": torch.zeros(300),
        "empty": torch.zeros(0, 16),
    }


def expected(name, w, table):
    kind = script.tensor_class(name, w)
    if kind in table:
        codes, scales = (part.numpy().astype(np.float32) for part in script.quantize(w, **table[kind]))
        return torch.from_numpy(codes * scales[:, None]).reshape(w.shape)
    return w.float() if name.endswith("A_log") else w.half().float()


def write(path, tensors, table=TABLE, meta=None):
    """The file, as train_gpt.main() writes it; bytes by class."""
    coded = script.quantize_all(tensors, table)
    data, sizes = script.pack_artifact(tensors, coded, {"dim": 24, "name": "é"}, "ab" * 32, meta or {"steps": 3})
    path.write_bytes(data)
    return sizes


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    path = tmp_path_factory.mktemp("artifact") / "small.bin"
    write(path, small_model())
    return path.read_bytes()


def header_of(data):
    """The header and the data area's start, read without the code under test."""
    magic, version, length = struct.unpack_from("<8sII", data)
    assert magic == b"UNDERPAR" and version == 4
    return json.loads(zstandard.ZstdDecompressor().decompress(data[16 : 16 + length])), 16 + length


def sealed(data, change=None, area=None):
    """The artifact with its header changed and, where given, another data area, under a right length and SHA-256."""
    header, start = header_of(data)
    if change:
        header = change(header) or header
    area = data[start:-32] if area is None else area
    return signed(zstandard.ZstdCompressor().compress(json.dumps(header).encode()), area)


def signed(packed, area=b""):
    body = struct.pack("<8sII", b"UNDERPAR", 4, len(packed)) + packed + area
    return body + hashlib.sha256(body).digest()


@pytest.fixture
def damage_message(tmp_path):
    """Function: the one line that reading these bytes from a file ends with, without the file's name."""

    def message_of(data, max_weights=1 << 30):
        path = tmp_path / "damaged.bin"
        path.write_bytes(data)
        with pytest.raises(script.ArtifactError) as caught:
            script.read_artifact(path, max_weights)
        message = str(caught.value)
        assert message.startswith(f"{path}: ") and "\n" not in message
        return message.removeprefix(f"{path}: ")

    return message_of


def roundtrip(tensors, lanes):
    """Encoded as one stack, decoded as one queue; the words of each."""
    tables = [script.rans_table(np.bincount(np.append(symbols, [7, 200]), minlength=256)) for symbols in tensors]
    begun = (1 << 16) + np.random.default_rng(1).integers(0, 1 << 16, lanes).astype(np.uint32)
    states, words = begun.copy(), []
    for symbols, table in zip(reversed(tensors), reversed(tables), strict=True):
        words.insert(0, script.rans_encode(states, table, symbols))
        assert words[0].dtype == np.uint16
    left = np.concatenate([*words, np.empty(0, np.uint16)])
    for symbols, table, own in zip(tensors, tables, words, strict=True):
        before = len(left)
        decoded, left = script.rans_decode(states, table, left, len(symbols))
        assert decoded.dtype == np.uint8 and np.array_equal(symbols, decoded) and before - len(left) == len(own)
    assert not len(left) and np.array_equal(states, begun)  # what the heads carry is theirs again
    return words


@pytest.mark.parametrize("lanes", [1, 8, 64, 1024])
def test_rans_is_lossless(lanes):
    random = np.random.default_rng(0)
    uneven = np.minimum(random.geometric(0.5, 5000), 255).astype(np.uint8)
    tensors = [
        np.empty(0, np.uint8),
        np.array([9], np.uint8),
        np.full(3000, 9, np.uint8),  # with 7 and 200 in its table once each
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
    ],
)
def test_table_is_whole_and_as_good_as_the_best(counts):
    counts = np.array(counts + [0] * (256 - len(counts)))
    table = script.rans_table(counts)
    assert table.dtype == np.uint16 and table.sum() == 2**14
    assert np.array_equal(table > 0, counts > 0)
    # the best there is: the cost is convex, so 2**14 units go one by one to where each saves most
    kept, best = counts[counts > 0].tolist(), [1] * int((counts > 0).sum())
    heap = [(-count, k) for k, count in enumerate(kept)]
    heapq.heapify(heap)
    for _ in range(2**14 - len(best)):
        _, k = heap[0]
        best[k] += 1
        heapq.heapreplace(heap, (-kept[k] * math.log2(1 + 1 / best[k]), k))

    def bits(frequencies):
        return sum(count * (14 - math.log2(f)) for count, f in zip(kept, frequencies, strict=True))

    assert bits(best) <= bits(table[table > 0].tolist()) <= bits(best) * 1.0001


def test_lanes_follow_the_number_of_symbols():
    sizes = {0: 8, 1: 8, 100_000: 8, 200_000: 16, 2_000_000: 128, 20_000_000: 1024, 10**9: 1024}
    assert {symbols: script.rans_lanes(symbols) for symbols in sizes} == sizes


class Book:
    """An artifact read once more by the format's text alone: one symbol, one state and one search at a time."""

    def __init__(self, data):
        self.header, start = header_of(data)
        self.area, self.records = data[start:-32], self.header["tensors"]
        states, tables = self.section("states", 4), self.section("tables", 2)
        numbers, self.codes, arrays = self.section("numbers", 1), {}, {}
        streamed = [record for record in self.records if record["coder"] == "rans"]
        sides = [(record["shape"][0], math.prod(record["shape"][1:])) for record in streamed]
        columns = sum(rows for rows, _ in sides)  # all rows' numbers stand before all columns'
        self.all_states, rows, tables_in_all = states, 0, self.header["sections"]["tables"]["shape"][1]
        for record, (high, wide) in zip(streamed, sides, strict=True):
            words = struct.unpack(f"<{record['length'] // 2}H", self.take(record["length"]))
            self.words = iter(words)
            contexts = [numbers[rows + r] + numbers[columns + c] for r in range(high) for c in range(wide)]
            rows, columns, codes = rows + high, columns + wide, [None] * (high * wide)
            for context in sorted(set(contexts)):
                places = [at for at, own in enumerate(contexts) if own == context]
                table = tables[record["table"] + context :: tables_in_all]
                assert len(table) == 256 and sum(table) == 16384
                for lane, at in enumerate(places):
                    codes[at] = self.symbol(lane % len(states), table)
            assert next(self.words, None) is None
            assert zlib.crc32(bytes(codes)) == record["crc32"]
            arrays[record["name"]] = [code - 256 * (code > 127) for code in codes]
        assert columns == len(numbers) and all(state >> 16 == 1 for state in states)
        self.area = b"".join(struct.pack("<H", state & 0xFFFF) for state in states) + self.area
        scales = iter(self.section("scales", 2))
        self.tensors, self.contexts = {}, {record["name"]: record["contexts"] for record in streamed}
        for record in self.records:
            name, bits = record["name"], record["bits"]
            own = [next(scales) for _ in range(record["scales"])]
            if own and name not in arrays:
                arrays[name] = [code - 256 * (code > 127) for code in self.unpack(record, 1)]
            if own:
                own = np.array(own, np.uint16).view(np.float16)
                codes = np.array(arrays[name]).reshape(record["shape"][0], -1)
                self.codes[name] = codes, own
                values = codes.astype(np.float32) * own.astype(np.float32)[:, None]
            else:
                values = np.array(self.unpack(record, bits // 8), f"u{bits // 8}").view(f"f{bits // 8}")
            self.tensors[name] = values.astype(np.float32).reshape(record["shape"])
        assert next(scales, None) is None and not self.area.strip(b"\0")

    def take(self, length):
        part, self.area = self.area[:length], self.area[length:]
        return part

    def symbol(self, lane, table):
        state, start, symbol = self.all_states[lane], 0, 0
        while start + table[symbol] <= state % 16384:
            start += table[symbol]
            symbol += 1
        state = table[symbol] * (state // 16384) + state % 16384 - start
        self.all_states[lane] = state if state >= 65536 else state * 65536 + next(self.words)
        return symbol

    def section(self, name, size):
        return self.unpack(self.header["sections"][name], size)

    def unpack(self, record, size):
        """Numbers of `size` bytes: byte planes, whole, as a zstd frame or, if all are one number, of that."""
        raw = self.take(record["length"])
        if record["coder"] == "zstd":
            raw = zstandard.ZstdDecompressor().decompress(raw)
        elif record["coder"] == "constant":
            raw = b"".join(raw[plane : plane + 1] * math.prod(record["shape"]) for plane in range(size))
        else:
            assert record["coder"] == "stored"
        count = len(raw) // size
        assert count == math.prod(record["shape"])
        flat = bytes(raw[plane * count + at] for at in range(count) for plane in range(size))
        assert zlib.crc32(flat) == record["crc32"], record["name"]
        return [int.from_bytes(flat[at : at + size], "little") for at in range(0, len(flat), size)]


def sized_model():
    """Tensors that take each of the contexts: rows, columns, both, or neither differ in size."""
    random = torch.Generator().manual_seed(9)
    rows, columns = (torch.randn(size, generator=random).exp() for size in (96, 128))
    return {
        "w_cells": randn(96, 128, seed=1) * rows[:, None] * columns,
        "w_rows": randn(96, 128, seed=2) * rows[:, None],
        "w_alike": randn(60, 80, seed=3),
        "w_alike_too": randn(60, 80, seed=4),
        "embed": randn(40, 50, seed=5) * 3,
        "head": randn(40, 50, seed=6).sign() * randn(40, 50, seed=7).abs() ** 3,
        "norm": randn(60, seed=8),
    }


@pytest.mark.parametrize("kind", ["small", "sized", "rows", "none"])
def test_a_scalar_reader_by_the_book_finds_the_same_numbers(small, tmp_path, kind):
    path, model, table = tmp_path / "a.bin", small_model(), TABLE
    contexts = {"blocks.0.w_up": "class", "blocks.0.w_down": "class"}
    if kind != "small":
        table = {"matrix": rule(6, 8.0, "tensor"), "embedding": rule(4, 0.0, "grid")}
        chosen = {"w_cells": "cell", "w_rows": "cell", "w_alike": "tensor", "w_alike_too": "tensor", "embed": "tensor",
                  "head": "tensor"}
        contexts = {"sized": chosen, "rows": {"w_rows": "row"}, "none": {}}[kind]
        model = {name: w for name, w in sized_model().items() if name in contexts or name == "norm"}
    write(path, model, table)
    book = Book(path.read_bytes())
    assert book.contexts == contexts
    header, tensors, coded = script.read_artifact(path)
    assert header == book.header and list(tensors) == list(book.tensors) == list(model)
    for name, w in model.items():
        own = tensors[name].numpy().tobytes()
        assert own == book.tensors[name].tobytes() == expected(name, w, table).numpy().tobytes(), name
    assert set(coded) == set(book.codes)
    for name, (codes, scales) in book.codes.items():
        want_codes, want_scales = script.quantize(model[name], **table[script.tensor_class(name, model[name])])
        assert np.array_equal(codes, want_codes) and scales.tobytes() == want_scales.numpy().tobytes()
        assert torch.equal(coded[name][0], want_codes) and torch.equal(coded[name][1], want_scales)
        assert coded[name][2] == table[script.tensor_class(name, model[name])]["bits"]


def test_file_gives_back_every_tensor_and_the_header(tmp_path):
    model = small_model()
    sizes = write(tmp_path / "a.bin", model, meta={"note": "ü", "list": [1, 2.5, None]})
    header, tensors, _ = script.read_artifact(tmp_path / "a.bin")
    assert list(tensors) == list(model)
    for name, w in model.items():
        assert tensors[name].dtype == torch.float32 and tensors[name].shape == w.shape
        assert tensors[name].numpy().tobytes() == expected(name, w, TABLE).numpy().tobytes(), name
    assert header["settings"] == {"dim": 24, "name": "é"} and header["tokenizer_sha256"] == "ab" * 32
    assert header["meta"] == {"note": "ü", "list": [1, 2.5, None]}
    coders = {record["name"]: record["coder"] for record in header["tensors"]}
    assert coders["blocks.0.w_zeros"] == coders["zero_init_gain"] == "constant"
    assert coders["blocks.0.w_repeated"] == "zstd" and coders["blocks.0.w_up"] == "rans" and coders["gain"] == "stored"
    bits = {record["name"]: record["bits"] for record in header["tensors"]}
    assert bits["blocks.0.w_up"] == 6 and bits["embed"] == bits["blocks.0.ab"] == 8
    assert bits["blocks.0.A_log"] == 32 and bits["blocks.0.norm"] == bits["blocks.0.conv"] == 16
    size = (tmp_path / "a.bin").stat().st_size
    assert size == sum(sizes.values())
    for kind in ("matrix", "embedding", "control"):
        own = [record["length"] for record in header["tensors"] if record["class"] == kind]
        assert sizes[kind] == sum(own) > 0
    assert sizes["states"] == header["sections"]["states"]["length"] - 16  # less what 8 lanes carry
    assert {name: sizes[name] for name in ("tables", "numbers", "scales")} == {
        name: header["sections"][name]["length"] for name in ("tables", "numbers", "scales")}


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {"norm": torch.ones(3)},
        {"w_one_row": randn(1, 16)},
        {"w_matrix": randn(16, 16)},
        {"w_constant": torch.full((64, 64), 0.25)},
        {"embed": randn(300, 20), "w_matrix": randn(33, 31, seed=1), "embed2": randn(1, 5000, seed=2)},
        {"w_large": randn(700, 700), "w_bfloat": randn(20, 20).bfloat16(), "w_double": randn(20, 20).double()},
        {"w_transposed": randn(40, 30).T, "w_strided": randn(64, 64)[:, ::2], "norm": torch.nn.Parameter(randn(9))},
    ],
    ids=lambda tensors: "+".join(tensors) or "none",
)
@pytest.mark.parametrize("table", [
    TABLE, {"matrix": rule(8), "embedding": rule(2, 3.0, "tensor")}, {"matrix": rule(4, -1.0, "grid")}, {}],
    ids=["6+8", "8+2", "4", "16"])
def test_shapes_and_types(tmp_path, tensors, table):
    write(tmp_path / "a.bin", tensors, table)
    _, back, _ = script.read_artifact(tmp_path / "a.bin")
    assert list(back) == list(tensors)
    for name, w in tensors.items():
        assert back[name].numpy().tobytes() == expected(name, w.detach(), table).contiguous().numpy().tobytes()


def test_all_64_values_and_bytes_of_all_256(tmp_path):
    random = np.random.default_rng(0)
    for values in (64, 256):
        symbols = np.concatenate([np.arange(values), random.integers(0, values, 10_000)]).astype(np.uint8)
        roundtrip([symbols, symbols[::-1].copy()], 64)
    w = torch.cat([torch.arange(-127, 128).float().repeat(40), torch.zeros(100)]).reshape(20, -1)
    w[:, 0] = 127
    write(tmp_path / "a.bin", {"w_all": w}, {"matrix": rule(8)})
    assert torch.equal(script.read_artifact(tmp_path / "a.bin")[1]["w_all"], w)


def test_zeros_of_both_signs_come_back(tmp_path):
    zeros = torch.zeros(40)
    zeros[::3] = -0.0
    write(tmp_path / "a.bin", {"gain": zeros})
    assert script.read_artifact(tmp_path / "a.bin")[1]["gain"].numpy().tobytes() == zeros.numpy().tobytes()


def test_same_input_same_bytes_and_nothing_else_is_changed(tmp_path, small):
    model = small_model()
    coded = script.quantize_all(model, TABLE)
    copies = {name: tuple(part.clone() for part in parts[:2]) for name, parts in coded.items()}
    for _ in range(2):
        write(tmp_path / "a.bin", model)
        assert (tmp_path / "a.bin").read_bytes() == small
        packed, _ = script.pack_artifact(model, coded, {"dim": 24, "name": "é"}, "ab" * 32, {"steps": 3})
        assert packed == small
    assert all(torch.equal(w, model[name]) for name, w in small_model().items())
    assert all(torch.equal(old, new) for name in coded for old, new in zip(copies[name], coded[name], strict=False))


def test_what_was_read_packs_to_the_same_bytes(tmp_path, small):
    (tmp_path / "a.bin").write_bytes(small)
    header, tensors, coded = script.read_artifact(tmp_path / "a.bin")
    again, _ = script.pack_artifact(tensors, coded, header["settings"], header["tokenizer_sha256"], header["meta"])
    assert again == small


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("w_bad", torch.full((20, 20), float("nan")), "up to nan; .* finite as torch.float16"),
        ("w_bad", torch.full((20, 20), float("inf")), "up to inf; .* finite as torch.float16"),
        ("w_bad", torch.full((20, 20), 1e9), "up to 1e.09; .* finite as torch.float16"),
        ("bad", torch.full((20,), float("nan")), "up to nan; .* finite as torch.float16"),
        ("bad", torch.full((20,), 7e4), "up to 7e.04; .* finite as torch.float16"),
        ("A_log", torch.full((20,), float("inf")), "up to inf; .* finite as torch.float32"),
        ("bad", torch.zeros(20, dtype=torch.int64), "torch.int64 up to .*; must be floating"),
        ("w_bad", torch.ones(20, 20, dtype=torch.int64), "torch.int64 up to .*; must be floating"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(tmp_path, name, tensor, message):
    with pytest.raises(ValueError, match=rf"^tensor some\.{name}: [^\n]*{message}[^\n]*$"):
        write(tmp_path / "a.bin", {"fine": torch.ones(3), f"some.{name}": tensor})


SEEN = re.compile(r"SHA-256 is wrong, damaged or truncated, (\d+) bytes, first seen in ([^:]+): .+")


def places_of(header):
    """(name of a section or tensor, its length) in the order of the data area, less what lane states carry."""
    sections, records = header["sections"], header["tensors"]
    streamed = [record for record in records if record["coder"] == "rans"]
    late = [sections["scales"], *(record for record in records if record["coder"] != "rans")]
    heads = 2 * script.rans_lanes(sum(math.prod(record["shape"]) for record in streamed))
    area = [(part["name"], part["length"]) for part in (*map(sections.get, ("states", "tables", "numbers")), *streamed)]
    for part in late:
        area.append((part["name"], part["length"] - min(heads, part["length"])))
        heads -= min(heads, part["length"])
    return area, [record["name"] for record in streamed]


@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.full)])
def test_every_flipped_byte_is_an_error_that_names_the_damaged_part(small, damage_message, step):
    assert 2000 < len(small) < 4000
    header, start = header_of(small)
    area, streamed = places_of(header)
    parts = {record["name"]: record for record in header["tensors"]} | header["sections"]
    owners = [name for name, length in area for _ in range(length)]
    assert len(owners) == len(small) - 32 - start
    checked, silent = set(), []
    for position in range(0, len(small), step):
        damaged = bytearray(small)
        damaged[position] ^= 1 << position % 8
        message = damage_message(bytes(damaged))
        if position < 8:
            assert message.startswith(f"is no underpar artifact, or cut short: {len(small)} bytes that begin with b'")
            continue
        if position < 12:
            assert message.startswith("version ")
            continue
        size, seen = SEEN.fullmatch(message).groups()
        assert int(size) == len(small)
        if position < start:  # what the header says is wrong, or it is not readable
            assert position > 15 or seen in ("header", "sections")
        elif position >= len(small) - 32:
            assert seen == "digest"
        else:
            owner = owners[position - start]
            checked.add(owner)
            if seen == "digest":  # some bits of a zstd frame do not change what is unpacked
                silent.append((owner, position))
                # of which the last words carry one's beginning
                assert parts[owner]["coder"] == "zstd" or owner == streamed[-1], (owner, message)
            elif owner in ("states", "tables", "numbers"):
                assert seen == "sections" and ("CRC-32" not in message or f"CRC-32 of {owner!r} is wrong" in message)
            elif owner == "scales":
                assert seen == "states" and ("CRC-32" not in message or "CRC-32 of 'scales' is wrong" in message)
            elif parts[owner]["coder"] == "rans":  # a word near the end shows in what comes later
                later = [f"tensor '{name}'" for name in streamed[streamed.index(owner) :]]
                assert seen in [*later, "states"], (owner, message)
            else:
                assert seen == f"tensor '{owner}'", (owner, message)
    assert len(silent) <= 20, silent
    assert checked == {name for name, length in area if length} or step > 1


def test_every_truncation_and_appended_bytes_are_errors(small, damage_message):
    start = header_of(small)[1]
    for length in [*range(64), *range(64, len(small) - 64, 5), start, start + 1, *range(len(small) - 64, len(small))]:
        message = damage_message(small[:length])
        assert f" {length} bytes" in message and message.startswith("SHA-256" if length >= 48 else "is no underpar")
    assert SEEN.fullmatch(damage_message(small + b"\0")).groups() == (str(len(small) + 1), "digest")


def test_splices_of_two_artifacts_are_errors(tmp_path, small, damage_message):
    other_model = {name: w * 1.0 if w.ndim < 2 else w.flip(0) for name, w in small_model().items()}
    write(tmp_path / "b.bin", other_model)
    other = (tmp_path / "b.bin").read_bytes()
    assert other != small
    (_, start), (_, other_start) = header_of(small), header_of(other)
    for cut in [*range(17, min(len(small), len(other)) - 1, 13), start, len(small) - 32]:
        if small[:cut] != other[:cut] and small[cut:] != other[cut:]:
            assert SEEN.fullmatch(damage_message(small[:cut] + other[cut:]))
            assert SEEN.fullmatch(damage_message(other[:cut] + small[cut:]))
    # a foreign data area under this header, with a right digest: the CRCs must tell
    for area in (other[other_start:-32][: len(small) - start - 32], small[start:-32][::-1]):
        area = area.ljust(len(small) - start - 32, b"\0")
        assert damage_message(sealed(small, area=area)).startswith(("sections", "tensor", "states"))


def first(header):
    return header["tensors"][1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda header: header.pop("tensors") and None, "header: KeyError: 'tensors'"),
        (lambda header: header.pop("meta") and None, "header: settings, tokenizer_sha256 or meta missing"),
        (lambda header: [header], "header: AttributeError"),
        (lambda header: header["sections"].pop("tables") and None, "sections: KeyError: 'tables'"),
        (lambda header: header["sections"]["states"].update(length=10**15), "sections"),
        (lambda header: header["sections"]["states"].update(length=-1), "sections"),
        (lambda header: header["sections"]["scales"].update(length=-1), "tensor 'embed': "),
        (lambda header: header["sections"]["scales"].update(length=3), "states: "),
        (lambda header: header["sections"]["states"].update(coder="rans"), "sections: coder 'rans' is unknown"),
        (lambda header: header["sections"]["tables"].update(shape=[256, 1 << 40]), "header: 2814"),
        (lambda header: header["sections"]["tables"].update(shape=[256, -1 << 70]), "header: a shape is negative"),
        (lambda header: header["sections"]["tables"].update(shape=[256, 2]), "sections: "),
        (lambda header: header["sections"]["tables"].update(shape=[255, 1]), "sections: "),
        (lambda header: header["sections"]["numbers"].update(shape=[139]), "sections: "),
        (lambda header: header["sections"]["numbers"].update(shape=[]), "sections: "),
        (lambda header: header["sections"]["states"].update(shape=[16]), "sections: "),
        (lambda header: header["sections"]["scales"].update(shape=[80]), "states: "),
        (lambda header: first(header).update(table=1), "tensor 'blocks.0.w_up': table 1 of 1"),
        (lambda header: first(header).update(table=-1), "tensor 'blocks.0.w_up': table -1 of 1"),
        (lambda header: first(header).update(table=None), "tensor 'blocks.0.w_up': TypeError"),
        (lambda header: header["tensors"].append(7), "header: TypeError"),
        (lambda header: first(header).pop("crc32") and None, "tensor 'blocks.0.w_up': KeyError: 'crc32'"),
        (lambda header: first(header).update(crc32=1), "tensor 'blocks.0.w_up': its CRC-32 is wrong"),
        (lambda header: first(header).update(shape=[1 << 20, 1 << 20]), "header: 1099"),
        (lambda header: first(header).update(shape=[1 << 40, 0]), "header: 1099"),
        (lambda header: first(header).update(shape=[0, 1200]), "tensor 'blocks.0.w_up': "),
        (lambda header: first(header).update(shape=[-30, -40]), "header: a shape is negative"),
        (lambda header: first(header).update(shape=[1, -1]), "header: a shape is negative"),
        (lambda header: first(header).update(shape=[30.0, 40]), "sections: TypeError"),
        (lambda header: first(header).update(shape=["30", 40]), "header: TypeError"),
        (lambda header: first(header).update(shape=[]), "sections: IndexError"),
        (lambda header: first(header).update(shape=[31, 40]), "tensor 'blocks.0.w_up': "),
        (lambda header: first(header).update(shape=[30, 39]), "tensor 'blocks.0.w_up': "),
        (lambda header: first(header).update(length=1 << 70), "tensor 'blocks.0.w_up': OverflowError"),
        (lambda header: first(header).update(shape=[40, 30]), "tensor 'blocks.0.w_up': "),
        (lambda header: first(header).update(length=first(header)["length"] - 2), "tensor 'blocks.0.w_up': more rANS"),
        (lambda header: first(header).update(length=first(header)["length"] - 1), "tensor 'blocks.0.w_up': ValueError"),
        (lambda header: first(header).update(length=first(header)["length"] + 2), "tensor 'blocks.0.w_up': 1 rANS"),
        (lambda header: first(header).update(length=-1), "tensor 'blocks.0.w_up': "),
        (lambda header: first(header).update(scales=29) or header["tensors"][0].update(scales=17),
         "tensor 'embed': 17 scales"),
        (lambda header: first(header).update(scales=29), "states: RuntimeError"),
        (lambda header: first(header).update(scales=-30), "states: RuntimeError"),
        (lambda header: first(header).update(scales=1 << 50), "states: RuntimeError"),
        (lambda header: first(header).update(scales=1), "states: RuntimeError"),
        (lambda header: first(header).update(coder="stored"), "tensor 'blocks.0.w_down': more rANS"),
        (lambda header: header["tensors"][2].update(coder="lzma"), "tensor 'blocks.0.w_zeros': coder 'lzma' is"),
        (lambda header: header["tensors"][1].update(coder="zstd"), "tensor 'blocks.0.w_down': more rANS"),
        (lambda header: header["tensors"][2].update(length=2), "tensor 'blocks.0.w_zeros': 2 bytes for one value"),
        (lambda header: header["tensors"][3].update(shape=[24, 63]), "tensor 'blocks.0.w_repeated': CRC-32"),
        (lambda header: header["tensors"][3].update(shape=[24, 65]), "tensor 'blocks.0.w_repeated': "),
        (lambda header: header["tensors"][3].update(name="a\nb", crc32=0), r"tensor 'a\nb': CRC-32"),
        (lambda header: header["tensors"][5].update(bits=64), "tensor 'blocks.0.norm': KeyError: 64"),
        (lambda header: header["tensors"][5].update(bits=32), "tensor 'blocks.0.norm': "),
        (lambda header: header["tensors"][5].update(coder="rans"), "tensor 'blocks.0.norm': KeyError: 'table'"),
    ],
)
def test_headers_that_lie_are_refused(small, damage_message, tmp_path, change, message):
    (tmp_path / "a.bin").write_bytes(sealed(small))
    assert script.read_artifact(tmp_path / "a.bin")  # the test's own sealing is right
    assert damage_message(sealed(small, change)).startswith(message)


def places(value):
    """Every (container, key) of a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, inner in items for place in [(value, key), *places(inner)]]


def test_nonsense_in_any_place_of_the_header_is_an_artifact_error_or_harmless(tmp_path):
    """Each value of the header replaced under a right digest: nothing but ArtifactError, and no MemoryError."""
    path = tmp_path / "a.bin"
    write(path, {"w_rans": randn(32, 24).clamp(-0.1, 0.1), "norm": randn(5), "w_zeros": torch.zeros(16, 16)})
    data = path.read_bytes()
    header, start = header_of(data)
    assert [record["coder"] for record in header["tensors"]] == ["rans", "stored", "constant"]
    junk = [None, True, -1, 0, 1, 2.5, 10**6, 1 << 29, 1 << 70, -(1 << 70), math.nan, math.inf, "", "rans", "zstd", [],
            [[]], [1 << 40, 0], {}, {"a": 1}]  # fmt: skip
    read = 0
    for at in range(len(places(header))):
        for value in junk:
            changed = json.loads(json.dumps(header))
            container, key = places(changed)[at]
            container[key] = value
            path.write_bytes(signed(zstandard.ZstdCompressor().compress(json.dumps(changed).encode()), data[start:-32]))
            try:
                read += len(script.read_artifact(path, 3000)[1]) > 0
            except script.ArtifactError as error:
                assert "\n" not in str(error)
    assert 100 < read < 500  # settings, meta, class, offsets that say the same are not the reader's to judge


def test_nothing_is_allocated_from_a_length_that_was_not_checked(small, tmp_path, damage_message):
    zeros = zstandard.ZstdCompressor(level=19).compress(bytes(1 << 28))

    def bomb(header):  # a frame that declares and holds 256 MB where 24 values belong
        header["tensors"][-1].update(coder="zstd", shape=[24], length=len(zeros))

    frame = zstandard.ZstdCompressor(level=19).compress(b" " * (1 << 28))
    deep = zstandard.ZstdCompressor().compress(b"[" * 1_000_000)
    tracemalloc.start()
    message = damage_message(sealed(small, bomb, small[header_of(small)[1] : -32] + zeros))
    assert message == "tensor 'empty': CRC-32 of 'empty' is wrong"
    assert damage_message(signed(frame)).startswith("header: JSONDecodeError")
    assert damage_message(signed(deep)).startswith("header: RecursionError")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100 << 20
    header, _ = header_of(small)
    weights = sum(math.prod(part["shape"]) for part in [*header["sections"].values(), *header["tensors"]])
    weights += 16  # `empty` (0, 16) counts as 16
    (tmp_path / "a.bin").write_bytes(small)
    assert script.read_artifact(tmp_path / "a.bin", max_weights=weights)
    assert damage_message(small, weights - 1) == f"header: {weights} weights, the limit is {weights - 1}"
    with pytest.raises(FileNotFoundError):
        script.read_artifact(tmp_path / "none.bin")
