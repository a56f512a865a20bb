"""20 million codes: the file against their entropy, against byte compressors, and against constriction's coder."""

import lzma
import time

import numpy as np
import pytest
import torch
import zstandard

import train_gpt as script


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# name -> (distribution, clip_sigmas, bytes that the file may take over the summed order-0 entropy). The codes of a
# tensor whose rows differ in size take fewer.
KINDS = {
    "gauss": ("gauss", 12.85, 20_000),
    "gauss, fine": ("gauss", 4.5, 20_000),
    "laplace": ("laplace", 8.0, 20_000),
    "gauss x lognormal rows": ("lognormal", 12.85, -380_000),
}


def twenty_million(distribution):
    """10 layers of 512 x 512 (twice), 256 x 512 (twice), 1204 x 512 and 512 x 1204: 60 matrices, 20.2M weights."""
    generator, tensors = torch.Generator().manual_seed(0), {}
    for number, shape in enumerate(
        [(512, 512), (512, 512), (256, 512), (256, 512), (1204, 512), (512, 1204)] * 10
    ):
        w = torch.randn(shape, generator=generator)
        if distribution == "laplace":
            share = torch.rand(shape, generator=generator) - 0.5
            w = -share.sign() * torch.log1p(-2 * share.abs())
        if distribution == "lognormal":
            w *= torch.exp(0.4 * torch.randn(len(w), 1, generator=generator))
        tensors[f"w_{number}"] = w
    return tensors


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=pytest.mark.full if name != "gauss" else ()) for name in KINDS
    ],
)
def kind(request):
    """(name, tensors, coded, the artifact, its bytes by class, seconds to pack and CPU seconds)."""
    distribution, clip_sigmas, _ = KINDS[request.param]
    tensors = twenty_million(distribution)
    table = {"matrix": {"bits": 6, "clip_sigmas": clip_sigmas}}
    coded = script.quantize_all(tensors, table)
    begin, begin_cpu = time.perf_counter(), time.process_time()
    data, sizes = script.pack_artifact(tensors, coded)
    return (
        request.param,
        tensors,
        coded,
        data,
        sizes,
        (time.perf_counter() - begin, time.process_time() - begin_cpu),
    )


def entropy_bytes(codes):
    """Order-0 entropy of an array of codes."""
    share = np.unique(codes, return_counts=True)[1] / codes.size
    return -(share * np.log2(share)).sum() / 8 * codes.size


def codes_of(coded):
    return [part.codes.numpy() for part in coded.values()]


def test_the_file_is_near_the_entropy_of_its_codes(kind, tmp_path):
    """Of 8.4 million bytes and more, header, tables and the coder's end included."""
    name, tensors, coded, data, sizes, (encode, encode_cpu) = kind
    (tmp_path / "a.upar").write_bytes(data)
    begin, begin_cpu = time.perf_counter(), time.process_time()
    _, _, back = script.read_artifact(tmp_path / "a.upar")
    decode, decode_cpu = time.perf_counter() - begin, time.process_time() - begin_cpu
    every = codes_of(coded)
    assert (
        sum(codes.size for codes in every) > 20_000_000
        and max(abs(codes).max() for codes in every) <= 31
    )
    assert all(
        torch.equal(back[key].codes, part.codes) and torch.equal(back[key].scale, part.scale)
        for key, part in coded.items()
    )
    assert len(data) == sum(sizes.values())
    excess = len(data) - sum(map(entropy_bytes, every))
    print(
        f"\n{name}: {len(data)} bytes, {excess:+.0f} over the entropy; pack {encode:.2f} s (CPU {encode_cpu:.2f}), "
        f"read {decode:.2f} s (CPU {decode_cpu:.2f})"
    )
    assert excess <= KINDS[name][2]


def test_part_of_it_is_smaller_than_by_zstd(kind):
    """One of the ten layers, by zstd at its strongest; all of it, and lzma and brotli: see below."""
    _, tensors, coded, *_ = kind
    part = dict(list(coded.items())[:6])
    data, _ = script.pack_artifact({name: tensors[name] for name in part}, part)
    raw = np.concatenate([codes.ravel() for codes in codes_of(part)]).tobytes()
    assert len(data) < 0.996 * len(zstandard.ZstdCompressor(level=22).compress(raw))


@pytest.mark.full
@pytest.mark.parametrize("compressor", ["zstd", "lzma", "brotli"])
def test_the_file_is_smaller_than_by_byte_compressors(kind, compressor):
    name, _, coded, data, *_ = kind
    raw = np.concatenate([codes.ravel() for codes in codes_of(coded)]).tobytes()
    if compressor == "brotli":
        other = len(pytest.importorskip("brotli").compress(raw, quality=11, lgwin=24))
    elif compressor == "zstd":
        other = len(zstandard.ZstdCompressor(level=22).compress(raw))
    else:
        other = len(lzma.compress(raw, preset=9 | lzma.PRESET_EXTREME))
    own = len(data)
    print(f"\n{name}: {own} bytes, {compressor} {other} ({other / own - 1:+.2%})")
    assert own < other


def test_against_constriction(kind):
    """One table a tensor on both sides: sizes within 0.1 %; the ratio of times, both taken here, is printed."""
    constriction = pytest.importorskip("constriction")
    name, _, coded, *_ = kind
    every = [codes.ravel() for codes in codes_of(coded)]
    counts = [np.bincount(codes.view(np.uint8), minlength=256) for codes in every]
    seconds = {}

    begin = time.perf_counter()
    tables = [script.rans_table(each) for each in counts]
    states = np.full(script.rans_lanes(sum(codes.size for codes in every)), 1 << 16, np.uint32)
    words = [
        script.RansCoder(states, table[None]).encode(codes.view(np.uint8))
        for table, codes in zip(tables[::-1], every[::-1], strict=True)
    ][::-1]
    seconds["encode"] = [time.perf_counter() - begin]
    size = (
        sum(each.nbytes for each in words) + states.nbytes // 2
    )  # half of the states is a payload
    begin = time.perf_counter()
    back = [
        script.RansCoder(states, table[None]).decode(np.zeros(codes.size, np.uint8), own)
        for table, own, codes in zip(tables, words, every, strict=True)
    ]
    seconds["decode"] = [time.perf_counter() - begin]
    assert all(
        np.array_equal(one.view(np.int8), codes) for one, codes in zip(back, every, strict=True)
    )
    assert (states == 1 << 16).all()

    shifted = [codes.astype(np.int32) + 31 for codes in every]
    begin = time.perf_counter()
    models = [
        constriction.stream.model.Categorical(
            np.bincount(codes, minlength=63) / codes.size, perfect=False
        )
        for codes in shifted
    ]
    coder = constriction.stream.stack.AnsCoder()
    for codes, model in zip(shifted[::-1], models[::-1], strict=True):
        coder.encode_reverse(codes, model)
    stream = coder.get_compressed()
    seconds["encode"].append(time.perf_counter() - begin)
    begin = time.perf_counter()
    coder = constriction.stream.stack.AnsCoder(stream)
    theirs = [coder.decode(model, codes.size) for codes, model in zip(shifted, models, strict=True)]
    seconds["decode"].append(time.perf_counter() - begin)
    assert all(np.array_equal(one, codes) for one, codes in zip(theirs, shifted, strict=True))
    print(
        f"\n{name}: {size} bytes, constriction {stream.nbytes} ({size / stream.nbytes - 1:+.4%}); "
        + ", ".join(
            f"{what} {ours:.2f} s, constriction {other:.2f} s, {other / ours:.2f} times as long"
            for what, (ours, other) in seconds.items()
        )
    )
    assert abs(size / stream.nbytes - 1) <= 1e-3
