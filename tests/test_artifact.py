"""Section artifact: rANS against order-0 entropy and a scalar decoder, lossless files, damage named in one line."""

import hashlib
import heapq
import json
import math
import os
import re
import struct
import time
import tracemalloc
import zlib

import numpy as np
import pytest
import torch
import zstandard

import train_gpt as script

TABLE = {"matrix": (6, 60.0), "embedding": (8, 0.0)}  # few small codes, so that rANS pays in small tensors too


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
        return script.fake_quant(w.float(), *table[kind])
    return w.float() if name.endswith("A_log") else w.half().float()


def write(path, tensors, table=TABLE, meta=None):
    return script.write_artifact(path, tensors, table, {"dim": 24, "name": "é"}, "ab" * 32, meta or {"steps": 3})


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    path = tmp_path_factory.mktemp("artifact") / "small.bin"
    write(path, small_model())
    return path.read_bytes()


def header_of(data):
    """The header and the data area's start, read without the code under test."""
    magic, version, length = struct.unpack_from("<8sII", data)
    assert magic == b"UNDERPAR" and version == 2
    return json.loads(zstandard.ZstdDecompressor().decompress(data[16 : 16 + length])), 16 + length


def sealed(data, change=None, area=None):
    """The artifact with its header changed and, where given, another data area, under a right length and SHA-256."""
    header, start = header_of(data)
    if change:
        header = change(header) or header
    area = data[start:-32] if area is None else area
    return signed(zstandard.ZstdCompressor().compress(json.dumps(header).encode()), area)


def signed(packed, area=b""):
    body = struct.pack("<8sII", b"UNDERPAR", 2, len(packed)) + packed + area
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
    tables = [script.rans_table(np.bincount(np.append(symbols, [7, 200]), minlength=256)) for symbols in tensors]
    states, words = np.full(lanes, 1 << 16, np.uint32), []
    for symbols, table in zip(reversed(tensors), reversed(tables), strict=True):
        words.insert(0, script.rans_encode(states, table, symbols))
    for symbols, table, own in zip(tensors, tables, words, strict=True):
        decoded = script.rans_decode(states, table, own, len(symbols))
        assert decoded.dtype == np.uint8 and np.array_equal(symbols, decoded)
    assert (states == 1 << 16).all()
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


def scalar_rans(states, words, table, count):
    """rANS once more, by the book: one symbol, one state and one search at a time. Returns symbols; moves states."""
    symbols, words = [], iter(words)
    for i in range(count):
        state = states[i % len(states)]
        slot, start, symbol = state % 16384, 0, 0
        while start + table[symbol] <= slot:
            start += table[symbol]
            symbol += 1
        state = table[symbol] * (state // 16384) + slot - start
        if state < 65536:
            state = state * 65536 + next(words)
        states[i % len(states)] = state
        symbols.append(symbol)
    assert next(words, None) is None
    return symbols


def test_a_scalar_decoder_reads_the_same_codes_from_the_file(small):
    header, start = header_of(small)

    def section(name, size):
        record = header["sections"][name]
        raw = small[start + record["offset"] : start + record["offset"] + record["length"]]
        if record["coder"] == "zstd":
            raw = zstandard.ZstdDecompressor().decompress(raw)
        assert zlib.crc32(bytes(raw[plane * (len(raw) // size) + i] for i in range(len(raw) // size)
                                for plane in range(size))) == record["crc32"]  # fmt: skip
        count = len(raw) // size
        return [sum(raw[plane * count + i] << 8 * plane for plane in range(size)) for i in range(count)]

    streamed = [record for record in header["tensors"] if record["coder"] == "rans"]
    assert len(streamed) >= 2
    states, tables = section("states", 4), section("tables", 2)
    model = small_model()
    for k, record in enumerate(streamed):
        table = tables[k :: len(streamed)]
        raw = small[start + record["offset"] : start + record["offset"] + record["length"]]
        words = struct.unpack(f"<{len(raw) // 2}H", raw)
        symbols = scalar_rans(states, words, table, math.prod(record["shape"]))
        codes, _ = script.quantize_rows(model[record["name"]], *TABLE[record["class"]])
        assert [symbol - 256 * (symbol > 127) for symbol in symbols] == codes.reshape(-1).tolist()
        assert zlib.crc32(bytes(symbols)) == record["crc32"]
    assert set(states) == {65536}


def test_file_gives_back_every_tensor_and_the_header(tmp_path):
    model = small_model()
    sizes = write(tmp_path / "a.bin", model, meta={"note": "ü", "list": [1, 2.5, None]})["bytes"]
    header, tensors = script.read_artifact(tmp_path / "a.bin")
    assert list(tensors) == list(model)
    for name, w in model.items():
        assert tensors[name].dtype == torch.float32 and tensors[name].shape == w.shape
        assert tensors[name].numpy().tobytes() == expected(name, w, TABLE).numpy().tobytes(), name
    assert header["settings"] == {"dim": 24, "name": "é"} and header["tokenizer_sha256"] == "ab" * 32
    assert header["meta"] == {"note": "ü", "list": [1, 2.5, None]}
    coders = {record["name"]: record["coder"] for record in header["tensors"]}
    assert coders["blocks.0.w_zeros"] == "zstd" and coders["blocks.0.w_repeated"] == "zstd"
    assert coders["blocks.0.w_up"] == "rans" and coders["gain"] == "stored" and coders["zero_init_gain"] == "zstd"
    bits = {record["name"]: record["bits"] for record in header["tensors"]}
    assert bits["blocks.0.w_up"] == 6 and bits["embed"] == bits["blocks.0.ab"] == 8
    assert bits["blocks.0.A_log"] == 32 and bits["blocks.0.norm"] == bits["blocks.0.conv"] == 16
    size = (tmp_path / "a.bin").stat().st_size
    assert size == sum(sizes.values())
    for kind in ("matrix", "embedding", "control"):
        own = [record["length"] for record in header["tensors"] if record["class"] == kind]
        assert sizes[kind] == sum(own) > 0
    assert os.listdir(tmp_path) == ["a.bin"]


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
@pytest.mark.parametrize("table", [TABLE, {"matrix": (8, 0.0), "embedding": (2, 3.0)}, {}], ids=["6+8", "8+2", "16"])
def test_shapes_and_types(tmp_path, tensors, table):
    write(tmp_path / "a.bin", tensors, table)
    _, back = script.read_artifact(tmp_path / "a.bin")
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
    write(tmp_path / "a.bin", {"w_all": w}, {"matrix": (8, 0.0)})
    assert torch.equal(script.read_artifact(tmp_path / "a.bin")[1]["w_all"], w)


def test_same_input_same_bytes_and_an_old_file_is_replaced(tmp_path, small):
    (tmp_path / "a.bin").write_bytes(b"old")
    write(tmp_path / "a.bin", small_model())
    assert (tmp_path / "a.bin").read_bytes() == small


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
def test_what_does_not_fit_is_refused_by_name_and_nothing_is_written(tmp_path, name, tensor, message):
    with pytest.raises(ValueError, match=rf"^tensor some\.{name}: [^\n]*{message}[^\n]*$"):
        write(tmp_path / "a.bin", {"fine": torch.ones(3), f"some.{name}": tensor})
    assert os.listdir(tmp_path) == []


def twenty_million(kind):
    """10 layers of 512 x 512 (twice), 256 x 512 (twice), 1204 x 512 and 512 x 1204: 60 matrices, 20.2M weights."""
    generator, tensors = torch.Generator().manual_seed(0), {}
    for number, shape in enumerate([(512, 512), (512, 512), (256, 512), (256, 512), (1204, 512), (512, 1204)] * 10):
        w = torch.randn(shape, generator=generator)
        if kind == "laplace":
            share = torch.rand(shape, generator=generator) - 0.5
            w = -share.sign() * torch.log1p(-2 * share.abs())
        tensors[f"w_{number}"] = w
    return tensors


def entropy_bytes(codes):
    """Order-0 entropy of an array of codes."""
    share = np.unique(codes, return_counts=True)[1] / codes.size
    return -(share * np.log2(share)).sum() / 8 * codes.size


@pytest.mark.parametrize(("kind", "clip_sigmas"), [("gauss", 12.85), ("gauss", 0.0), ("laplace", 0.0)])
def test_twenty_million_codes_pack_within_9000_bytes_of_their_entropy(tmp_path, kind, clip_sigmas):
    tensors, path = twenty_million(kind), tmp_path / "a.bin"
    begin, begin_cpu = time.perf_counter(), time.process_time()
    sizes = write(path, tensors, {"matrix": (6, clip_sigmas)})["bytes"]
    middle, middle_cpu = time.perf_counter(), time.process_time()
    _, back = script.read_artifact(path)
    end, end_cpu = time.perf_counter(), time.process_time()
    quantized = [script.quantize_rows(w, 6, clip_sigmas)[0].numpy().reshape(-1) for w in tensors.values()]
    excess = path.stat().st_size - sizes["scales"] - sum(entropy_bytes(codes) for codes in quantized)
    print(
        f"{kind} clip {clip_sigmas}: {path.stat().st_size} bytes, "
        f"{excess:.0f} bytes over the entropy (header, tables, flush included; scales "
        f"{sizes['scales']} apart); quantize and write {middle - begin:.2f} s "
        f"(CPU {middle_cpu - begin_cpu:.2f}), read {end - middle:.2f} s (CPU {end_cpu - middle_cpu:.2f})"
    )
    assert excess <= 9000
    assert end_cpu - middle_cpu < 3  # CPU seconds: a busy machine stretches the others
    codes = np.concatenate(quantized)
    assert abs(codes).max() <= 31 and codes.size > 20_000_000
    for name in list(tensors)[::7]:
        assert torch.equal(back[name], script.fake_quant(tensors[name], 6, clip_sigmas))
    sample = codes[:1_000_000]  # and the byte compressors lose: zstd at its strongest, on part of it
    if kind == "laplace":
        assert len(zstandard.ZstdCompressor(level=22).compress(sample.tobytes())) > 1.005 * entropy_bytes(sample)


SEEN = re.compile(r"SHA-256 is wrong, damaged or truncated, (\d+) bytes, first seen in ([^:]+): .+")


def test_every_flipped_byte_is_an_error_that_names_the_damaged_part(small, damage_message):
    assert 2000 < len(small) < 4000
    header, start = header_of(small)
    order = [record["name"] for record in header["tensors"]]
    parts = {record["name"]: record for record in header["tensors"]} | header["sections"]
    checked, silent = set(), []
    for position in range(len(small)):
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
            at = position - start
            owner = next(name for name, part in parts.items() if 0 <= at - part["offset"] < part["length"])
            checked.add(owner)
            if seen == "digest":  # some bits of a zstd frame, and the last words, do not change what is unpacked
                silent.append((owner, at - parts[owner]["offset"]))
                assert parts[owner]["coder"] == "zstd" or owner == "blocks.0.w_down", (owner, message)
            elif owner in header["sections"]:
                assert seen == "sections" and ("CRC-32" not in message or f"CRC-32 of {owner!r} is wrong" in message)
            elif parts[owner]["coder"] == "rans":  # a word near the end shows in the next tensor of the stream
                later = [f"tensor '{name}'" for name in order[order.index(owner) :] if parts[name]["coder"] == "rans"]
                assert seen in later, (owner, message)
            else:
                assert seen == f"tensor '{owner}'", (owner, message)
    assert len(silent) <= 20, silent
    assert checked == {name for name, part in parts.items() if part["length"]}


def test_every_truncation_and_appended_bytes_are_errors(small, damage_message):
    for length in range(len(small)):
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
        assert damage_message(sealed(small, area=area)).startswith(("sections", "tensor"))


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
        (lambda header: header["sections"]["scales"].update(offset=-5), "sections"),
        (lambda header: header["sections"]["states"].update(coder="rans"), "sections: TypeError"),
        (lambda header: header["tensors"].append(7), "header: TypeError"),
        (lambda header: first(header).pop("crc32") and None, "tensor 'blocks.0.w_up': KeyError: 'crc32'"),
        (lambda header: first(header).update(crc32=1), "tensor 'blocks.0.w_up': CRC-32 of 'blocks.0.w_up' is wrong"),
        (lambda header: first(header).update(shape=[1 << 20, 1 << 20]), "header: 1099"),
        (lambda header: first(header).update(shape=[1 << 40, 0]), "header: 1099"),
        (lambda header: first(header).update(shape=[0, 1200]), "sections"),
        (lambda header: first(header).update(shape=[-30, -40]), "header: a tensor's shape is negative"),
        (lambda header: first(header).update(shape=[1, -1]), "header: a tensor's shape is negative"),
        (lambda header: first(header).update(shape=[30.0, 40]), "sections: AttributeError"),
        (lambda header: first(header).update(shape=["30", 40]), "header: TypeError"),
        (lambda header: first(header).update(shape=[]), "header: IndexError"),
        (lambda header: first(header).update(shape=[31, 40]), "sections: ValueError"),
        (lambda header: first(header).update(shape=[30, 41]), "tensor 'blocks.0.w_up': more rANS words"),
        (lambda header: first(header).update(shape=[30, 39]), "tensor 'blocks.0.w_up': "),
        (lambda header: first(header).update(length=first(header)["length"] - 2), "tensor 'blocks.0.w_up': more rANS"),
        (lambda header: first(header).update(length=first(header)["length"] - 1), "tensor 'blocks.0.w_up': ValueError"),
        (lambda header: first(header).update(length=first(header)["length"] + 2), "tensor 'blocks.0.w_up': 1 rANS"),
        (lambda header: first(header).update(quantizer="magic"), "sections: CRC-32 of 'scales'"),
        (lambda header: first(header).update(coder="stored"), "sections: "),
        (lambda header: header["tensors"][2].update(coder="lzma"), "tensor 'blocks.0.w_zeros': coder 'lzma' is"),
        (lambda header: header["tensors"][1].update(coder="zstd"), "sections: "),
        (lambda header: header["tensors"][3].update(shape=[24, 63]), "tensor 'blocks.0.w_repeated': CRC-32"),
        (lambda header: header["tensors"][3].update(shape=[24, 65]), "tensor 'blocks.0.w_repeated': ValueError"),
        (lambda header: header["tensors"][3].update(name="a\nb", crc32=0), r"tensor 'a\nb': CRC-32"),
        (lambda header: header["tensors"][5].update(bits=64), "tensor 'blocks.0.norm': "),
        (lambda header: header["tensors"][5].update(bits=32), "tensor 'blocks.0.norm': "),
        (lambda header: header["tensors"][5].update(coder="rans"), "sections: "),
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
    write(path, {"w_rans": randn(32, 24).clamp(-0.1, 0.1), "norm": randn(5), "w_zstd": torch.zeros(16, 16)})
    data = path.read_bytes()
    header, start = header_of(data)
    assert [record["coder"] for record in header["tensors"]] == ["rans", "stored", "zstd"]
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
                read += len(script.read_artifact(path, 1100)[1]) > 0
            except script.ArtifactError as error:
                assert "\n" not in str(error)
    assert 100 < read < 500  # settings, meta, class, offsets that say the same are not the reader's to judge


def test_nothing_is_allocated_from_a_length_that_was_not_checked(small, tmp_path, damage_message):
    zeros = zstandard.ZstdCompressor(level=19).compress(bytes(1 << 28))

    def bomb(header):  # a frame that declares and holds 256 MB where 24 values belong
        header["tensors"][5].update(coder="zstd", offset=len(small) - header_of(small)[1] - 32, length=len(zeros))

    frame = zstandard.ZstdCompressor(level=19).compress(b" " * (1 << 28))
    deep = zstandard.ZstdCompressor().compress(b"[" * 1_000_000)
    tracemalloc.start()
    message = damage_message(sealed(small, bomb, small[header_of(small)[1] : -32] + zeros))
    assert message == "tensor 'blocks.0.norm': CRC-32 of 'blocks.0.norm' is wrong"
    assert damage_message(signed(frame)).startswith("header: JSONDecodeError")
    assert damage_message(signed(deep)).startswith("header: RecursionError")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100 << 20
    weights = sum(w.numel() for w in small_model().values()) + 16  # `empty` (0, 16) counts as 16
    (tmp_path / "a.bin").write_bytes(small)
    assert script.read_artifact(tmp_path / "a.bin", max_weights=weights)
    assert damage_message(small, weights - 1) == f"header: {weights} weights, the limit is {weights - 1}"
    with pytest.raises(FileNotFoundError):
        script.read_artifact(tmp_path / "none.bin")
