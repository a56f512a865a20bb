"""Section artifact: rANS against entropy and a scalar reader, lossless files, damage named in one line."""

import hashlib
import json
import math
import struct
import tracemalloc

import numpy as np
import pytest
import torch
import zstandard

import train_gpt as script
from conftest import ROOT, load_script, load_tool, refusal

TABLE = {"matrix": {"bits": 6, "clip_sigmas": 8.0}, "embedding": {"bits": 8, "clip_sigmas": 6.0}}
UP = "blocks.0.w_up"
REPEATED = "blocks.0.repeated_embed"
NORM = "blocks.0.norm"

record = load_tool("record")


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def with_outliers(w):
    """Return the tensor with weights of 20 and 30 root mean squares, whose codes are escapes."""
    w[3, 5] = -20
    w[-1, -1] = 30
    return w


def small_model(seed=0):
    """Return tensors of every class and coder, some 5 KB packed."""
    return {
        "embed": randn(16, 24, seed=seed),
        UP: randn(30, 40, seed=seed + 1),
        "blocks.0.w_zeros": torch.zeros(32, 32),
        REPEATED: randn(1, 64, seed=seed).repeat(24, 1),
        "blocks.0.ab": randn(16, 40, seed=seed),
        NORM: torch.linspace(0.5, 1.5, 24),
        "blocks.0.A_log": randn(8, seed=seed),
        "blocks.0.conv": randn(24, 1, 4),
        "blocks.0.w_down": randn(40, 5, 6) * 0.01,
        "blocks.0.outlier_embed": with_outliers(randn(33, 31)),
        "gain": torch.tensor(1.25),
        "zero_init_gain": torch.zeros(300),
        "empty": torch.zeros(0, 16),
    }


def sized_model():
    """Return matrices in which rows, columns, both or neither differ in size."""
    w, rows, columns = randn(48, 64), randn(48, 1, seed=8).exp(), randn(64, seed=9).exp()
    found = {"w_both": w * rows * columns, "w_rows": w * rows, "w_columns": w * columns}
    return {**found, "w_alike": w, "head": randn(40, 50) ** 3}


def expected(name, w, table):
    """Return the tensor that a file should give back, in numpy."""
    kind = script.tensor_class(name, w)
    if kind in table:
        codes, scale = script.quantize(w.flatten(1), **table[kind])
        values = codes.numpy().astype(np.float32) * scale.numpy().astype(np.float32)
        return torch.from_numpy(values).reshape(w.shape)
    return w.float() if name.endswith("A_log") else w.half().float()


def pack(tensors, table=TABLE, coded=None, **meta):
    """Return a file as train_gpt.main() makes it."""
    coded = script.quantize_all(tensors, table) if coded is None else coded
    header = dict(settings={"dim": 24, "name": "é"}, tokenizer_sha256="ab" * 32, meta=meta)
    return script.pack_artifact(tensors, coded, **header)


def read(data, folder):
    (folder / "a.upar").write_bytes(data)
    return script.read_artifact(folder / "a.upar")


def refused(data, folder):
    """Return the one line that reading these bytes ends with, without the file's name."""
    line = refusal(script.ArtifactError, "", read, data, folder)
    assert line.startswith(f"{folder / 'a.upar'}: ")
    return line.removeprefix(f"{folder / 'a.upar'}: ")


@pytest.fixture(scope="module")
def small():
    return pack(small_model())


def header_of(data):
    """Return the header and where the streams begin, read without the code under test."""
    magic, version, length = struct.unpack_from("<8sII", data)
    assert (magic, version) == (b"UNDERPAR", 10)
    return json.loads(zstandard.ZstdDecompressor().decompress(data[16 : 16 + length])), 16 + length


def compress(data):
    return zstandard.ZstdCompressor().compress(data)


def signed(text, area=b""):
    """Return a file of a header's text and streams, with the right SHA-256."""
    frame = compress(text)
    body = struct.pack("<8sII", b"UNDERPAR", 10, len(frame)) + frame + area
    return body + hashlib.sha256(body).digest()


def changed(data, name, array=None, **lie):
    """Return the file with another array of a stream and other words in its record, under right sums."""
    header, at = header_of(data)
    streams = header["streams"]
    area = b""
    for other, facts in streams.items():
        payload = data[at : at + facts["length"]]
        at += facts["length"]
        if other == name and array is not None:
            payload = compress(array.tobytes())
            facts["length"] = len(payload)
        area += payload
    streams.setdefault(name, dict(facts)).update(lie)
    return signed(json.dumps(header).encode(), area)


COUNTS = [[], [5], [1, 10**9], [10**9] + [1] * 255, [0] * 200 + [7], list(range(1, 257))]
COUNTS += [[3**k for k in range(30)], [0, 5, 0, 0, 11, 0, 3]]


def test_a_code_is_coded_by_the_sizes_of_its_row_and_column():
    """In quarter octaves of a root mean square, 16 is 1: of rows in codes, of columns in shares of all codes'."""
    codes = torch.tensor([[4, 0, 0, 0], [8, 0, 0, 0], [16, 0, 0, 0]], dtype=torch.int32)
    symbols, pairs, sizes, counts = script.count_symbols(codes)
    assert sizes.tolist() == [20, 24, 28, 20, 0, 0, 0] and torch.equal(symbols.int(), codes)
    tables = torch.tensor([[40, 20, 20, 20], [44, 24, 24, 24], [48, 28, 28, 28]])
    assert torch.equal(pairs, (256 * tables + codes).flatten())
    assert counts[[40, 44, 48], [4, 8, 16]].tolist() == [1, 1, 1] and counts.sum() == 12


@pytest.mark.parametrize("counts", COUNTS)
def test_a_table_is_whole_and_near_the_entropy(counts):
    """Each symbol has a slot of 2**14 and its share of what is left: so many bits it costs at most."""
    counts = np.array(counts + [0] * (256 - len(counts)))
    table = script.rans_table(counts)
    assert table.dtype == np.uint16 and table.sum() == 2**14 and table.max() < 2**14
    assert table[:2].all() and np.array_equal(table[2:] > 0, counts[2:] > 0)
    share = counts[counts > 0] / counts.sum()
    bits = share @ (14 - np.log2(table[counts > 0]))
    most = -math.log2(1 - np.count_nonzero(table) / 2**14)
    assert -1e-9 <= bits + share @ np.log2(share) <= most + 1e-9


def test_a_state_at_its_upper_limit_is_coded():
    """From f << 18 on a state has no room for a symbol of frequency f: a word leaves it first."""
    table = np.zeros((1, 256), np.uint16)
    table[0, 3:5] = 1 << 13
    states = np.array([1 << 13 << 18], np.uint32)
    words = script.rans_encode(np.array([3]), states, table)
    assert len(words) == 1
    decoded = script.RansDecoder(states, table).decode(np.array([0]), words)
    assert decoded.tolist() == [3] and states.tolist() == [1 << 31]
    refusal(script.ArtifactError, "sum", script.RansDecoder, states, table // 2)


# -------------------------------------------------------------------------------------------- files
SHAPES = {
    "w_one_row": randn(1, 16),
    "gain": torch.tensor([0.0, -0.0]),
    "embed": randn(300, 20).bfloat16(),
    "w_transposed": randn(40, 30).T.double(),
    "w_strided": torch.nn.Parameter(randn(64, 64)[:, ::2]),
}


@pytest.mark.parametrize("bits", [2, 8])
def test_shapes_and_types(tmp_path, bits):
    table = {"matrix": {"bits": bits, "clip_sigmas": 4.0}}
    table["embedding"] = {"bits": 10 - bits, "clip_sigmas": 4.0}
    for tensors in ({}, SHAPES, small_model(), sized_model()):
        header, back, coded = read(pack(tensors, table, note="ü", list=[1, 2.5, None]), tmp_path)
        assert header["settings"] == {"dim": 24, "name": "é"}
        assert header["meta"] == {"note": "ü", "list": [1, 2.5, None], "tokenizer": "bytes"}
        assert back.keys() == tensors.keys()
        for name, w in tensors.items():
            right = expected(name, w.detach(), table).contiguous()
            assert back[name].numpy().tobytes() == right.numpy().tobytes()
        for name, part in coded.items():
            rule = table[script.tensor_class(name, tensors[name])]
            assert torch.equal(part.codes, script.quantize(tensors[name].flatten(1), **rule)[0])
            assert part.bits == header["streams"][name]["bits"] == rule["bits"]


@pytest.mark.parametrize(("name", "value"), [("w_bad", 1e9), ("bad", 7e4), ("A_log", math.inf)])
def test_what_does_not_fit_is_refused_by_name(name, value):
    tensors = {"fine": torch.ones(3), f"some.{name}": torch.full((20, 20), value)}
    refusal(script.ArtifactError, rf"^tensor some\.{name}: ", pack, tensors)


def test_a_network_of_nothing_but_zeros_is_read_again(tmp_path, monkeypatch):
    """Its codes take no bytes, so the file is filled up until it may have as many weights."""
    monkeypatch.setattr(script, "FREE_NUMBERS", 1 << 15)
    data = pack({"w_up": torch.zeros(600, 300)})
    assert len(data) == pytest.approx((600 * 300 + 97 * 256 - (1 << 15)) / 64, rel=0.05)
    assert not read(data, tmp_path)[1]["w_up"].any()


@pytest.mark.parametrize(("version", "record"), [(9, "2026-11-25_Hybrid"), (10, "2026-11-28_Rows")])
def test_artifacts_of_records_are_read_bit_for_bit(tmp_path, version, record):
    """By the script of the record and by the present one; packed again one of this version is the same file."""
    folder = ROOT / "records" / "track_cpu_3min" / record
    data = (folder / "seed_1.upar").read_bytes()
    old_header, old, old_coded = load_script(folder / "train_gpt.py").read_artifact(
        folder / "seed_1.upar"
    )
    header, tensors, coded = read(data, tmp_path)
    assert header == old_header and data[8] == version and len(tensors) > 20
    assert list(tensors) == list(old) and all(map(torch.equal, tensors.values(), old.values()))
    for name, part in coded.items():
        assert torch.equal(part.codes, old_coded[name].codes.int())
        assert (part.scale, part.bits) == (old_coded[name].scale, old_coded[name].bits)
    del header["streams"]
    again = script.pack_artifact(tensors, coded, **header)
    assert again == data if version == 10 else len(again) - len(data) < 100
    assert all(map(torch.equal, read(again, tmp_path)[1].values(), old.values()))


# ------------------------------------------------------------------------------------------- damage
TOO_LARGE = "the file is too short for so many numbers"
# What the record of a stream says instead, and how the error begins.
LIES = [
    ("lane_states", dict(shape=[7]), ""),
    ("lane_states", dict(dtype="<u8"), "'lane_states' has a dtype that is none"),
    ("lane_states", dict(dtype="O"), "'lane_states' has a dtype that is none"),
    ("lane_states", dict(dtype="<i4"), "the coder's streams are not u32"),
    ("sizes", dict(dtype="|i1"), "the coder's streams are not u32"),
    ("escapes", dict(dtype="|i1"), ""),
    ("tables", dict(shape=[1 << 40, 256]), f"'tables': {TOO_LARGE}"),
    ("tables", dict(shape=[5, 256]), "'tables' is longer than"),
    (UP, dict(shape=[-30, -40]), f"{UP!r}.shape[0] is -30"),
    (UP, dict(shape=[9] * 100_000), f"{UP!r} has a shape that is none"),
    (UP, dict(shape=[31, 40]), ""),
    (UP, dict(shape=[30, 39]), "rANS words are left over"),
    (UP, dict(shape=[40, 30]), ""),
    (UP, dict(scale=7e4), f"{UP!r} has a scale that is not finite"),
    (REPEATED, dict(shape=[24, 65]), "RuntimeError"),
    (NORM, dict(dtype="|i1"), f"{NORM!r} is longer than"),
    ("more\nlines", dict(length=0, shape=[3]), ""),
]


@pytest.mark.parametrize(("name", "lie", "message"), LIES)
def test_headers_that_lie_are_refused(small, tmp_path, name, lie, message):
    assert read(changed(small, UP), tmp_path)  # the test's own sealing is right
    assert refused(changed(small, name, **lie), tmp_path).startswith(message)


def test_a_word_that_only_the_last_states_tell_is_refused(tmp_path):
    """The last words of the last tensor: as many are read, and the lanes end elsewhere."""
    data = pack(sized_model())
    length = header_of(data)[0]["streams"]["head"]["length"]
    raw = zstandard.ZstdDecompressor().decompress(data[-32 - length : -32])
    words = np.frombuffer(raw, np.uint16).copy()
    words[-2] ^= 1
    assert refused(changed(data, "head", words), tmp_path) == "the lanes do not end at 2**16"


def test_escapes_that_are_missing_or_left_over_are_refused(tmp_path):
    """One number for two escapes, and one too many."""
    data = pack({"w_up": randn(16, 16), "embed": with_outliers(randn(32, 24))})
    assert header_of(data)[0]["streams"]["escapes"]["shape"] == [2]
    for count, message in ((1, "Number of elements of source"), (3, "escapes are left over")):
        numbers = np.full(count, 500, np.int32)
        assert message in refused(changed(data, "escapes", numbers, shape=[count]), tmp_path)


def test_the_tokenizer_of_a_header_is_a_files_name(small, tmp_path):
    """It is looked for beside the model. For any other value, see test_quantize.py."""
    header, start = header_of(small)
    for name in ("../x", "a/b", "a\nb", 5):
        header["meta"]["tokenizer"] = name
        text = json.dumps(header).encode()
        assert "tokenizer" in refused(signed(text, small[start:-32]), tmp_path)


def forged(streams):
    """Return a file of streams: name -> (shape, array, more of its record), under right sums."""
    records = {}
    area = b""
    for name, (shape, array, *more) in streams.items():
        payload = compress(array.tobytes())
        records[name] = {"shape": shape, "dtype": array.dtype.str, "length": len(payload)}
        records[name].update(*more)
        area += payload
    header = {"settings": {}, "meta": {}, "tokenizer_sha256": "", "streams": records}
    return signed(json.dumps(header).encode(), area)


CODED = {"scale": 1.0, "bits": 6}


def bomb_of_codes(side, lanes, tables=97):
    """Return a file of a square matrix of one code, which is certain and takes no words."""
    table = np.zeros((tables, 256), np.uint16)
    table[:, 1] = 16384
    streams = {
        "lane_states": ([lanes], np.full(lanes, 1 << 16, np.uint32)),
        "tables": ([tables, 256], table),
        "sizes": ([2 * side], np.zeros(2 * side, np.uint8)),
    }
    return forged({**streams, "w": ([side, side], np.empty(0, np.uint16), CODED)})


def bomb_of_frequencies():
    """Return a file of tables whose sums are right, and in which -1 would be 2**32 - 1 as u32."""
    table = np.zeros((97, 256), np.int16)
    table[:, :3] = -1, 16383, 2
    streams = {
        "lane_states": ([1], np.full(1, 1 << 16, np.uint32)),
        "tables": ([97, 256], table),
        "sizes": ([2], np.zeros(2, np.uint8)),
    }
    return forged({**streams, "w": ([1, 1], np.empty(0, np.uint16), CODED)})


def many_tensors():
    return forged({f"w{at}": ([1 << 20], np.zeros(9, "i1"), CODED) for at in range(300)})


BOMBS = {
    "codes that take no bytes": (lambda: bomb_of_codes(30_000, 1024), TOO_LARGE),
    "codes in one lane": (lambda: bomb_of_codes(3000, 1), "the lanes are too few"),
    "tables": (lambda: bomb_of_codes(8, 8, 1 << 15), "cannot reshape"),
    "frequencies": (bomb_of_frequencies, "the coder's streams are not u32"),
    "floats": (lambda: forged({"norm": ([1 << 29], np.zeros(1 << 24, "f4"))}), TOO_LARGE),
    "many tensors": (many_tensors, TOO_LARGE),
    "a long header": (lambda: signed(b" " * (1 << 28)), "the header is longer than 1048576 bytes"),
    "a deep header": (lambda: signed(b"[" * 1_000_000), "RecursionError"),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_short_files_that_claim_many_numbers_are_refused(tmp_path, kind):
    """Files of at most 60 kB, which took up to 4 GB."""
    make, message = BOMBS[kind]
    data = make()
    assert len(data) < 60_000
    tracemalloc.start()
    assert message in refused(data, tmp_path)
    record.check_integers(data, record.Faults("a file"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 400 << 20


def test_damage_is_named(small, tmp_path):
    """Of any place, see test_artifact_random.py."""
    whole = "damaged: the SHA-256 is wrong"
    for at, message in ((3, "is no underpar artifact"), (9, "version "), (20, whole), (-1, whole)):
        damaged = bytearray(small)
        damaged[at] ^= 4
        assert refused(bytes(damaged), tmp_path).startswith(message)
