"""Deltas: quantizers against closed forms and float64, files by their sizes, damage, and the three commands."""

import hashlib
import json
import math
import re
import struct

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from test_artifact_random import counts, damaged, entropy, few
from test_quantize import COLUMNS, distance, table_of

import quantize as Q
import train_gpt as T
from conftest import TINY, Place, read_json, refusal


def draw(*shape, seed=0, size=0.01):
    """Return weights with long tails."""
    numbers = np.random.default_rng(seed).standard_t(5, shape)
    return torch.from_numpy(numbers * size).float()


def header(base, method="bitdelta", **changes):
    own = dict(method=method, base=Q.hash_weights(base), bits=1, group=128, scale_bits=32)
    own |= dict(scale=0.125, shape={}, **changes)
    return {"tokenizer_sha256": "t", "meta": {"tokenizer": "bytes"}, "settings": own}


SHAPES = {
    "embed": (40, 32),
    "w_one": (17, 16),
    "w_two": (16, 129),
    "a.w_three": (64, 65),
    "norm": (7,),
    "gdn.A_log": (4,),
    "w_small": (8, 300),
}


def pair(shapes=SHAPES):
    """Return base and tuned weights by name."""
    base = {name: draw(*shape, size=0.05) for name, shape in shapes.items()}
    return base, {name: w + draw(*w.shape, seed=1) for name, w in base.items()}


# -------------------------------------------------------------------------------------- quantizers
@pytest.mark.parametrize("count", [1, 129, 1000])
@pytest.mark.parametrize("group", [128, -1, 0])
def test_bitdelta_against_numpy(count, group):
    """Signs, that of 0 being 1; mean |delta| over the real values of each group; base + scale * sign, exactly."""
    weight, base = draw(5, count, seed=1), draw(5, count, seed=2)
    weight[0, 0] = base[0, 0]
    signs, scales = Q.BitDeltaQuantizer(group_size=group).quantize(weight, base)
    delta = (weight - base).numpy().ravel()
    size = {-1: count, 0: 5 * count}.get(group, group)
    means = [
        np.abs(delta[at : at + size].astype(float)).mean() for at in range(0, len(delta), size)
    ]
    assert scales.dtype == torch.float32 and signs.dtype == torch.int8
    np.testing.assert_allclose(scales.numpy(), means, rtol=1e-7, atol=0)
    assert np.array_equal(signs.flatten(), np.where(delta >= 0, 1, -1)) and signs[0, 0] == 1
    spread = np.repeat(scales.numpy(), size)[: len(delta)].reshape(5, count)
    made = base.numpy() + spread * signs.numpy()
    assert np.array_equal(Q.BitDeltaQuantizer(group).dequantize(base, signs, scales), made)


@pytest.mark.parametrize("bits", range(1, 9))
def test_codes_of_deltaquant(bits):
    """Up to 3 bits odd, above all whole numbers; every one the nearest to its weight by its scale.

    No row is worse than by absmax, by which the largest weight has the largest code.
    """
    base, delta = draw(40, 128), draw(40, 128, seed=bits).double()
    codes, scales = Q.quantize_delta(delta.float().flatten(), 128, bits)
    most = {1: 1, 2: 3, 3: 7}.get(bits, 2 ** (bits - 1) - 1)
    allowed = torch.arange(-most, most + 1, 2 if bits < 4 else 1)
    assert set(codes.tolist()) <= set(allowed.tolist()) and codes.abs().max() == most
    missed = delta - scales.double()[:, None] * codes.view(40, 128)

    def least(scales):
        return (delta[..., None] - scales.double()[:, None, None] * allowed).abs().amin(-1)

    assert (missed.abs() <= least(scales) * (1 + 1e-5) + 1e-9).all()
    if bits > 1:
        assert torch.equal(scales, scales.half().float())
        absmax = least((delta.abs().amax(1) / most).half())
        assert (missed.square().sum(1) <= absmax.square().sum(1) * (1 + 1e-5)).all()
    codes, scales = Q.quantize_delta(torch.zeros(40 * 128), 128, bits)
    assert torch.equal(Q.add_delta(base, codes, scales, 128), base) and not scales.any()


def test_the_error_falls_with_every_bit():
    """1 bit: sqrt(1 - 2 / pi); the others: the best uniform quantizers of a normal distribution."""
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(3))
    base = torch.zeros(64, 512)
    errors = []
    for bits in range(1, 9):
        quantizer = Q.DeltaQuantizer(bits)
        made = quantizer.dequantize(base, *quantizer.quantize(weight, base))
        errors.append(((made - weight).norm() / weight.norm()).item())
    expected = [0.6028, 0.3449, 0.1929, 0.1116, 0.0585, 0.0298, 0.0149, 0.0075]
    assert errors == pytest.approx(expected, rel=0.08)
    assert errors[0] == pytest.approx(math.sqrt(1 - 2 / math.pi), rel=0.005)


def test_mistakes_of_a_program_are_one_line():
    refusal(Q.UserError, "bits=9", Q.DeltaQuantizer, 9)
    refusal(Q.UserError, "group_size=-2", Q.BitDeltaQuantizer, -2)
    refusal(Q.UserError, "must be", Q.DeltaQuantizer().quantize, draw(8, 256), draw(4, 256))


# ------------------------------------------------------------------------------------------------------------ files
@pytest.mark.parametrize("method", ["bitdelta", "deltaquant"])
def test_files_are_as_small_as_promised(method):
    """A bit a weight, or the entropy of the codes; a 25.6th of float32 by default of bitdelta."""
    base, tuned = pair({"w_a": (512, 511), "w_b": (511, 700)})
    bits, scale_bits = (1, 32) if method == "bitdelta" else (4, 16)
    least = 0
    for name, w in base.items():
        codes, scales = Q.quantize_delta((tuned[name] - w).flatten() * 8, 128, bits)
        least += w.numel() / 8 if bits == 1 else entropy(codes.numpy())
        least += scale_bits // 8 * math.ceil(w.numel() / 128)
        assert len(scales) == math.ceil(w.numel() / 128)
    own = header(base, method, bits=bits, scale_bits=scale_bits)
    # Scales are zstd frames, and rows and columns of different sizes have tables of their own.
    assert 0.95 * least < len(Q.pack_delta(base, tuned, own, {})) < 1.002 * least + 1024


WAYS = [("bitdelta", dict(group=128)), ("bitdelta", dict(group=-1, scale_bits=16))]
WAYS += [
    ("deltaquant", dict(bits=bits, group=group, scale_bits=16))
    for bits, group in ((1, 0), (2, 64), (5, -1), (8, 0))
]


@pytest.mark.parametrize(("method", "changes"), WAYS)
def test_a_file_gives_back_what_was_quantized(tmp_path, method, changes):
    base, tuned = pair()
    own = header(base, method, **changes)
    data = Q.pack_delta(base, tuned, own, {})
    (tmp_path / "d").write_bytes(data)
    found, tensors = Q.read_delta(tmp_path / "d", base)
    assert found.pop("streams") and found == own and list(tensors) == list(SHAPES)
    assert Q.pack_delta(base, tuned, own, {}) == data
    for name, w in base.items():
        expected = tuned[name] if name == "gdn.A_log" else tuned[name].half().float()
        if name in ("w_one", "w_two", "a.w_three"):
            size = Q.group_size(w, changes["group"])
            delta = (tuned[name] - w).flatten() * 8
            codes, scales = Q.quantize_delta(delta, size, changes.get("bits", 1))
            scales = (scales.half().float() if "scale_bits" in changes else scales) / 8
            expected = w + (codes * scales.repeat_interleave(size)[: w.numel()]).view(w.shape)
        assert tensors[name].dtype == torch.float32 and torch.equal(tensors[name], expected)


def fault(data, base, path):
    """Return the one line that read_delta refuses these bytes with, or "" where it reads them."""
    path.write_bytes(data)
    try:
        _, tensors = Q.read_delta(path, base)
    except Q.ArtifactError as error:
        assert str(error).startswith(f"{path}: ") and "\n" not in str(error)
        return str(error)
    assert all(w.isfinite().all() for w in tensors.values())
    return ""


@pytest.mark.parametrize("is_forged", [False, True], ids=["damaged", "forged"])
@counts
def test_damaged_files_are_refused_in_one_line(tmp_path, is_forged, count):
    """Damage always. With a right sum: refused too, or finite weights, and no other exception."""
    base, tuned = pair()
    files = [
        Q.pack_delta(base, tuned, header(base, method, **changes), {}) for method, changes in WAYS
    ]
    assert not any(fault(file, base, tmp_path / "d") for file in files)
    if is_forged:
        # The sum is of the artifact behind the first 8 bytes.
        files = [file[:-32] for file in files]

    @settings(few, max_examples=count)
    @given(data=damaged(files))
    def check(data):
        if is_forged:
            fault(data + hashlib.sha256(data[8:]).digest(), base, tmp_path / "d")
        elif data not in files:
            assert fault(data, base, tmp_path / "d")

    check()


def test_forged_headers_are_refused(tmp_path):
    base, tuned = pair()
    own = header(base, "deltaquant", bits=3, group=-1, scale_bits=16)
    data = Q.pack_delta(base, tuned, own, {})
    assert not fault(data, base, tmp_path / "d")
    written, _ = Q.read_delta(tmp_path / "d", base)
    lies = [dict(group=1 << 62), dict(group=1), dict(group=[]), dict(group="1"), dict(base=None)]
    lies += [dict(scale=1e300), dict(scale=None), dict(scale_bits=8), dict(shape=5)]
    for lie in lies:
        text = json.dumps({**written, "settings": {**own["settings"], **lie}}).encode()
        frame = zstandard.ZstdCompressor().compress(text)
        magic, version, length = struct.unpack_from("<8sII", data, 8)
        body = struct.pack("<8sII", magic, version, len(frame)) + frame + data[24 + length : -32]
        forged = b"UPARDEL2" + body + hashlib.sha256(body).digest()
        assert fault(forged, base, tmp_path / "d"), lie
    tuned["more"] = draw(3)
    more = Q.pack_delta(base, tuned, own, {})
    assert "tensors are left over" in fault(more, base, tmp_path / "d")
    assert "before 2026-11-29" in fault(b"UPARDELT" + data[8:], base, tmp_path / "d")


# --------------------------------------------------------------------------------------------------------- commands
@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_data):
    """Return the folder of a run, with its checkpoints of steps 20 and 40 as base and tuned.

    Beside them are checkpoints with which no delta can be made, a delta and an artifact.
    """
    folder = tmp_path_factory.mktemp("delta")
    tiny = dict(TINY, ITERATIONS=40, SAVE_EVERY=20, QAT=0, EMA=0, SWA=0)
    place = Place(folder, tiny_data, tiny)
    place.run("out")
    run = place.of("out")
    (run / "step_000020").rename(run / "base")
    (run / "step_000040").rename(run / "tuned")
    base, tuned = weights(run / "base"), weights(run / "tuned")
    (run / "delta").write_bytes(Q.pack_delta(base, tuned, header(base), {}))
    (run / "damaged").write_bytes((run / "delta").read_bytes()[:-40])
    meta = read_json(run / "base" / "meta.json")
    for name, param, value in (("nan", "mixers.1.w_o", math.nan), ("loud", "embed", 1e6)):
        tensors = weights(run / "base")
        tensors[param][2, 2] = value
        T.write_checkpoint(run / name, {"model": tensors, "training": {}}, meta)
    return run


def weights(folder):
    return torch.load(folder / "model.pt", weights_only=True)


def network(place, tensors):
    net = T.GPT(T.GPTConfig(**T.read_artifact(place / "model.upar")[0]["settings"]))
    net.load_state_dict(tensors)
    return net


def bits_per_byte(place, data, tensors):
    own = T.open_data(T.Settings(data_path=str(data), train_seq_len=32))
    scorer = T.Scorer(own.tokenizer.bos_id, T.start_runtime("cpu"), 32, 16)
    return scorer.score(network(place, tensors), own.val).bpb


@pytest.mark.parametrize(
    ("command", "options", "coding"),
    [
        ("bitdelta", "--group -1 --scale-bits 16", (1, -1, 16)),
        ("deltaquant", "--bits 2 --group 32", (2, 32, 16)),
        ("deltaquant", "", (4, -1, 16)),
    ],
)
def test_what_the_commands_print_and_write(
    call, place, tiny_data, tmp_path, command, options, coding
):
    """Sizes are of the file, errors by their definitions, bits per byte by evaluation.

    `apply` gives the tensors of memory, bit for bit, in a folder that `pack` reads.
    """
    base, tuned, out = weights(place / "base"), weights(place / "tuned"), tmp_path / "d"
    words = [command, place / "base", place / "tuned", out, "--score", *options.split()]
    if command == "bitdelta":
        words += ["--distill-steps", 0]
    code, output, error = call(*words)
    assert code == 0, error
    found, tensors = Q.read_delta(out, base)
    own = found["settings"]
    assert (own["bits"], own["group"], own["scale_bits"]) == coding and "keep_bits" not in own
    shape = T.read_artifact(place / "model.upar")[0]
    assert own["shape"] == shape["settings"]
    assert found["tokenizer_sha256"] == shape["tokenizer_sha256"]
    deltas = [{name: made[name] - w for name, w in base.items()} for made in (tuned, tensors)]
    matrices = [name for name, w in base.items() if T.tensor_class(name, w) == "matrix"]
    assert math.frexp(own["scale"])[0] == 0.5  # a power of two

    every, coded = (sum(base[name].numel() for name in names) for names in (base, matrices))
    used = out.stat().st_size
    kept = sum(found["streams"][name]["length"] for name in base if name not in matrices)
    assert 0 < kept < 2.1 * (every - coded) + 30 * len(base)  # bytes of what is no matrix
    for name, size, count in ((out, used, every), ("its matrices", used - kept, coded)):
        row = re.search(rf"{name} +(\S+) +(\S+) +(\S+)", output).groups()
        expected = [size, 4 * count / size, 2 * count / size]
        assert [float(number) for number in row] == pytest.approx(expected, rel=1e-4)
    for kind in ("matrix", "control", "all"):
        values = [float(table_of(output)[kind][column]) for column in COLUMNS]
        assert values == pytest.approx(distance(*deltas, kind), rel=1e-3)
    scores = [bits_per_byte(place, tiny_data, made) for made in (base, tuned, tensors)]
    before, best, after = scores
    share = (before - after) / (before - best)
    assert best < before - 0.1 and share > 0.5
    line = f"base {before:.4f}, tuned {best:.4f}, base + delta {after:.4f}, {share:.2%} of the gain"
    assert line in output

    assert call("apply", place / "base", out, tmp_path / "m")[0] == 0
    again = torch.load(tmp_path / "m" / "model.pt", weights_only=True)
    assert list(again) == list(base) and all(map(torch.equal, again.values(), tensors.values()))
    assert call("pack", tmp_path / "m", tmp_path / "m.upar")[0] == 0


def test_distillation(call, place, tiny_data, tmp_path):
    """The scales bring the logits of the first batch nearer, by as much as is printed; signs and the rest stay."""
    base, tuned = weights(place / "base"), weights(place / "tuned")
    made = []
    for name, options in {
        "plain": "--distill-steps 0",
        "lost": "--distill-steps 9 --distill-lr 1e38",
        "distilled": "--distill-steps 60 --distill-lr 0.01",
    }.items():
        out = tmp_path / name
        words = ["bitdelta", place / "base", place / "tuned", out, *options.split()]
        code, output, error = call(*words)
        assert code == 0, error
        made.append(Q.read_delta(out, base)[1])
    plain, _, distilled = made
    # Scales whose loss is a NaN are not taken.
    assert (tmp_path / "lost").read_bytes() == (tmp_path / "plain").read_bytes()
    train, _ = Q.check_dataset(tiny_data, Q.load_manifest(tiny_data))
    ids = torch.cat(Q.training_batch(train, 32, 0))
    with torch.no_grad():
        right, *others = (network(place, tensors)(ids) for tensors in (tuned, plain, distilled))
    losses = [(other - right).square().mean().item() for other in others]
    line = r"distillation: 60 steps, .*? (\S+) before, (\S+) after"
    said = [float(number) for number in re.match(line, output).groups()]
    assert said == pytest.approx(losses, rel=1e-3) and losses[1] < 0.8 * losses[0]
    for name, w in base.items():
        one, two = plain[name] - w, distilled[name] - w
        assert torch.equal(one > 0, two > 0)
        assert torch.equal(one, two) != (T.tensor_class(name, w) == "matrix")


BITDELTA = "bitdelta {base} {tuned} {new} --distill-steps 1 "
PLAIN = "bitdelta {base} {tuned} {new} --distill-steps 0 "
DELTAQUANT = "deltaquant {base} {tuned} {new} "
MISTAKES = [
    ("apply {tuned} {delta} {new}", {}, "{delta}: of another base"),
    ("apply {base} {artifact} {new}", {}, "{artifact}: is no delta"),
    ("apply {delta} {delta} {new}", {}, "{delta}: is no underpar artifact"),
    ("apply {base} {damaged} {new}", {}, "{damaged}: damaged"),
    ("apply {base} {missing} {new}", {}, "{missing}: no such file"),
    ("deltaquant {base} {nan} {new}", {}, "'mixers.1.w_o'"),
    ("deltaquant {base} {loud} {new}", {}, "tensor embed: must be finite"),
    (DELTAQUANT + "--bits 9", {}, "--bits: invalid choice: 9"),
    (BITDELTA + "--group -2", {}, "--group: -2 must be -1 or more"),
    (BITDELTA + "--distill-lr nan", {}, "--distill-lr: nan must be 0 or more"),
    (BITDELTA + "--data nowhere", {}, "nowhere"),
    (BITDELTA + "--data a:0.7,b:0.3", {}, "is a mixture"),
    (BITDELTA + "--bits 2", {}, "--bits 2"),
    (PLAIN + "--distill-lr 0.2", {}, "--distill-lr 0.2"),
    (PLAIN + "--data x", {}, "--data 'x'"),
    (DELTAQUANT + "--scale-bits 16", {}, "--scale-bits 16"),
    (DELTAQUANT, dict(DELTA_BITS=2), "DELTA_BITS='2'"),
    (BITDELTA, dict(DATA_PATH="x"), "DATA_PATH='x'"),
    (BITDELTA, dict(DEVICE="gpu"), "DEVICE='gpu'"),
    ("bitdelta {base} {tuned} {delta}", {}, "exists already"),
]


@pytest.mark.parametrize(("words", "changes", "said"), MISTAKES)
def test_mistakes_are_one_line_and_exit_code_2(call, place, tmp_path, words, changes, said):
    files = "base tuned delta damaged missing nan loud"
    names = {name: place / name for name in files.split()}
    names |= {"artifact": place / "model.upar", "new": tmp_path / "new"}
    code, _, error = call(*words.format(**names).split(), **changes)
    assert code == 2 and said.format(**names) in error, error
    assert not names["new"].exists()
