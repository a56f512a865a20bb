"""Deltas: quantizers against closed forms and float64, files by their sizes, damage, and the three commands."""

import dataclasses
import hashlib
import json
import math
import random

import numpy as np
import pytest
import test_quantize
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_quantize import COLUMNS, distance

import quantize as Q
import train_gpt as T
from conftest import BYTES, ROOT, environment, start

SHORT = dict(attn_window=16, train_seq_len=32)
SETTINGS = dataclasses.replace(test_quantize.SETTINGS, **SHORT)
DISTRIBUTIONS = {
    "gaussian": lambda rng, shape: rng.standard_normal(shape),
    "student_t": lambda rng, shape: rng.standard_t(5, shape),
    "lognormal": lambda rng, shape: (
        rng.standard_normal(shape) * np.exp(0.4 * rng.standard_normal((shape[0], 1)))
    ),
}


def draw(kind, shape, seed=0, size=0.01):
    return torch.from_numpy(DISTRIBUTIONS[kind](np.random.default_rng(seed), shape) * size).float()


def header(base, method="bitdelta", **changes):
    own = dict(
        method=method,
        base=Q.hash_weights(base),
        bits=1,
        group=128,
        scale_bits=32,
        keep_bits=16,
        scale=0.125,
        shape={},
    )
    return {"tokenizer_sha256": "t", "meta": {"tokenizer": "bytes"}, "settings": {**own, **changes}}


def pair(shapes, kind="gaussian"):
    """Base and tuned weights by name."""
    base = {
        name: draw("gaussian", shape, at, 0.05) for at, (name, shape) in enumerate(shapes.items())
    }
    return base, {
        name: w + draw(kind, w.shape, 100 + at) for at, (name, w) in enumerate(base.items())
    }


# -------------------------------------------------------------------------------------- quantizers
def errors_by_bits(delta, size):
    """Return the norms of what 1 to 8 bits miss of a difference (n,), in groups of this size."""
    errors = []
    for bits in range(1, 9):
        codes, scales = Q.quantize_delta(delta, size, bits)
        made = Q.add_delta(0 * delta, codes, scales.float(), size)
        errors.append((made - delta).double().norm().item())
    return errors


@pytest.mark.parametrize("count", [1, 127, 128, 129, 1000])
@pytest.mark.parametrize("group", [128, -1, 0, 7])
def test_bitdelta_against_numpy(count, group):
    """Signs, that of 0 being 1; mean |delta| over the real values of each group; base + scale * sign, exactly."""
    weight, base = draw("student_t", (5, count), 1), draw("gaussian", (5, count), 2)
    weight[0, 0] = base[0, 0]
    size = {-1: count, 0: 5 * count}.get(group, group)
    signs, scales = Q.quantize_delta((weight - base).flatten(), size, 1)
    delta = (weight - base).numpy().ravel()
    parts = [delta[at : at + size] for at in range(0, 5 * count, size)]
    expected = [np.abs(part.astype(np.float64)).mean() for part in parts]
    assert scales.dtype == torch.float32 and signs.dtype == torch.int8 and signs[0] == 1
    np.testing.assert_allclose(scales.numpy(), expected, rtol=1e-7, atol=0)
    assert signs.tolist() == np.where(delta >= 0, 1, -1).tolist()
    spread = np.repeat(scales.numpy(), size)[: 5 * count] * signs.numpy()
    made = base.numpy() + spread.reshape(5, count)
    assert np.array_equal(Q.add_delta(base, signs, scales, group).numpy(), made)
    error, *others = (np.square(delta - spread * by).sum() for by in (1, 0.99, 1.01))
    assert error <= min(others)  # the least error


def test_no_difference_gives_the_base():
    base = draw("gaussian", (16, 129))
    for bits in range(1, 9):
        codes, scales = Q.quantize_delta(torch.zeros(16 * 129), 128, bits)
        assert torch.equal(Q.add_delta(base, codes, scales, 128), base) and not scales.any()


@pytest.mark.parametrize("kind", DISTRIBUTIONS)
@pytest.mark.parametrize("bits", range(2, 9))
def test_no_group_is_worse_than_by_absmax(kind, bits):
    """Plain absmax: the largest weight of a group has the largest code. At 8 bits it was better in 1 of 4 groups."""
    delta = draw(kind, (64, 512), bits).flatten()
    codes, scales = Q.quantize_delta(delta, 128, bits)
    rows, most = delta.view(-1, 128), Q.largest_code(bits)
    step = (rows.abs().amax(1, keepdim=True) / most).half().float()
    absmax = 2 * (rows / step / 2).floor() + 1 if bits < 4 else (rows / step).round()
    ways = [(codes.view(-1, 128), scales.float()[:, None]), (absmax.clamp(-most, most), step)]
    ours, plain = ((way * step - rows).square().double().sum(1) for way, step in ways)
    assert (ours <= plain * (1 + 1e-6)).all()


@pytest.mark.parametrize("bits", range(1, 9))
def test_codes_of_deltaquant(bits):
    """Up to 3 bits odd, above all whole numbers; every one the nearest to its weight by its scale."""
    delta = draw("gaussian", (40, 100), bits).flatten()
    codes, scales = Q.quantize_delta(delta, 128, bits)
    most = {1: 1, 2: 3, 3: 7}.get(bits, 2 ** (bits - 1) - 1)
    allowed = np.arange(-most, most + 1, 2 if bits < 4 else 1)
    assert codes.shape == (4000,) and scales.shape == (32,)
    assert set(codes.tolist()) <= set(allowed.tolist()) and codes.abs().max() == most
    step = scales.double().repeat_interleave(128)[:4000].numpy()
    away = np.abs(delta.double().numpy()[:, None] - step[:, None] * allowed)
    chosen = np.abs(delta.double().numpy() - step * codes.numpy())
    assert (chosen <= away.min(1) * (1 + 1e-5) + 1e-9).all()
    assert bits == 1 or torch.equal(scales, scales.half().float())


@pytest.mark.parametrize("kind", DISTRIBUTIONS)
@pytest.mark.parametrize("size", [128, 512, 64 * 512])
def test_the_error_falls_with_every_bit(kind, size):
    delta = draw(kind, (64, 512), 3).flatten()
    errors = np.array(errors_by_bits(delta, size)) / delta.double().norm().item()
    assert (errors[1:] < 0.9 * errors[:-1]).all(), errors
    if (kind, size) == ("gaussian", 512):
        # 1 bit: sqrt(1 - 2 / pi); the others: the best uniform quantizers.
        expected = [0.6028, 0.3449, 0.1929, 0.1116, 0.0585, 0.0298, 0.0149, 0.0075]
        assert errors == pytest.approx(expected, rel=0.08)
        assert errors[0] == pytest.approx(math.sqrt(1 - 2 / math.pi), rel=0.005)


# ------------------------------------------------------------------------------------------------------------ files
@pytest.fixture(scope="module")
def large():
    """11.4 million weights in 32 matrices, as a model of five layers has them, some not a multiple of 128."""
    shapes = {}
    for layer in range(5):
        shapes |= {
            f"{layer}.w_qkv": (1024, 512),
            f"{layer}.w_g": (512, 511),
            f"{layer}.w_o": (512, 512),
            f"{layer}.w_a": (256, 512),
            f"{layer}.w_up": (1024, 512),
            f"{layer}.w_down": (511, 700),
        }
    shapes |= {"w_x": (512, 1030), "w_y": (1030, 512)}
    return pair(shapes)


@pytest.mark.parametrize(
    ("changes", "ratio"),
    [
        ({}, 25.6),
        ({"scale_bits": 16}, 32 / 1.125),
        ({"group": 0}, 32.0),
        ({"group": 0, "scale_bits": 16}, 32.0),
    ],
)
def test_the_file_of_bitdelta_is_as_small_as_promised(large, changes, ratio, tmp_path):
    base, tuned = large
    (tmp_path / "d").write_bytes(Q.pack_delta(base, tuned, header(base, **changes), {}))
    weights, size = sum(w.numel() for w in base.values()), (tmp_path / "d").stat().st_size
    assert weights > 11_000_000 and len(base) == 32
    assert 4 * weights / size == pytest.approx(ratio, rel=1e-3)
    if not changes:
        bound = sum(
            math.ceil(w.numel() / 8) + 4 * math.ceil(w.numel() / 128) for w in base.values()
        )
        assert bound <= size <= bound + 1024


def test_the_file_of_deltaquant_is_near_the_entropy_of_its_codes(large, tmp_path):
    base, tuned = ({name: w for name, w in each.items() if name[0] == "0"} for each in large)
    for bits in (1, 4):
        data = Q.pack_delta(
            base, tuned, header(base, "deltaquant", bits=bits, group=-1, scale_bits=16), {}
        )
        least = 0.0
        for name, w in base.items():
            codes, _ = Q.quantize_delta((tuned[name] - w).flatten() / 0.125, w.shape[1], bits)
            share = np.unique(codes.numpy(), return_counts=True)[1] / w.numel()
            least += -(share * np.log2(share)).sum() * w.numel() / 8 + 2 * len(w)
        assert least < len(data) < 1.002 * least + 2048


SHAPES = {
    "embed": (40, 32),
    "w_one": (17, 16),
    "w_two": (16, 129),
    "a.w_three": (64, 65),
    "norm": (7,),
    "gdn.A_log": (4,),
    "w_small": (8, 300),
}
WAYS = [
    ("bitdelta", dict(group=128)),
    ("bitdelta", dict(group=-1, scale_bits=16)),
    ("bitdelta", dict(group=0)),
    *(
        ("deltaquant", dict(bits=bits, group=group, scale_bits=16))
        for bits in (1, 2, 5, 8)
        for group in (64, -1, 0)
    ),
]


@pytest.mark.parametrize(("method", "changes"), WAYS)
def test_a_file_gives_back_what_was_quantized(tmp_path, method, changes):
    base, tuned = pair(SHAPES)
    own = header(base, method, **changes)
    (tmp_path / "d").write_bytes(Q.pack_delta(base, tuned, own, {}))
    found, tensors = Q.read_delta(tmp_path / "d", base)
    assert found == own and list(tensors) == list(SHAPES)
    assert Q.pack_delta(base, tuned, own, {}) == (tmp_path / "d").read_bytes()
    for name, w in base.items():
        if name not in ("w_one", "w_two", "a.w_three"):
            full = name == "gdn.A_log"
            assert torch.equal(tensors[name], tuned[name] if full else tuned[name].half().float())
            continue
        size, delta = Q.group_size(w, changes["group"]), (tuned[name] - w).flatten()
        codes, scales = Q.quantize_delta(delta * 8, size, changes.get("bits", 1))
        scales = (scales.half().float() if "scale_bits" in changes else scales) / 8
        expected = w + (codes * scales.repeat_interleave(size)[: w.numel()]).view(w.shape)
        assert tensors[name].dtype == torch.float32 and torch.equal(tensors[name], expected)


def read(data, base, path):
    """The one line that read_delta refuses these bytes with, or "" where it reads them."""
    path.write_bytes(data)
    try:
        _, tensors = Q.read_delta(path, base)
    except Q.ArtifactError as error:
        assert str(error).startswith(f"{path}: ") and "\n" not in str(error)
        return str(error)
    assert all(w.isfinite().all() for w in tensors.values())
    return ""


def change(data, draw):
    """One byte changed, the end or a part cut off or put in twice, or zeros or noise written over a part."""
    at, other = sorted(draw(st.tuples(*[st.integers(0, len(data) - 1)] * 2)))
    part = data[at : other + 1]
    noise = random.Random(at).randbytes(len(part))
    middles = bytes([data[at] ^ draw(st.integers(1, 255))]), b"", 2 * part, bytes(len(part)), noise
    way = draw(st.integers(0, 7))
    if way < 5:
        return data[:at] + middles[way] + data[at + 1 if way == 0 else other + 1 :]
    return (data[:at], data[other:], data + part)[way - 5]


def corruptions(files, base, path, count, sealed):
    @settings(
        max_examples=count, deadline=None, suppress_health_check=list(HealthCheck), database=None
    )
    @given(st.data())
    def run(data):
        file = files[data.draw(st.integers(0, len(files) - 1))]
        damaged = change(file[: -32 if sealed else None], data.draw)
        if sealed:  # as one who means harm would: the sum is right, the rest is not
            read(damaged + hashlib.sha256(damaged).digest(), base, path)
        elif damaged != file:
            assert read(damaged, base, path)

    run()


@pytest.mark.parametrize("sealed", [False, True], ids=["damaged", "forged"])
@pytest.mark.parametrize("count", [150, pytest.param(2000, marks=pytest.mark.full)])
def test_damaged_files_are_refused_in_one_line(tmp_path, sealed, count):
    """Damage always; what is forged is refused too, or gives finite weights, and no other exception."""
    base, tuned = pair(SHAPES)
    ways = WAYS[:3] + WAYS[9:15]
    files = [
        Q.pack_delta(base, tuned, header(base, method, **changes), {}) for method, changes in ways
    ]
    assert not any(read(file, base, tmp_path / "d") for file in files)
    corruptions(files, base, tmp_path / "d", count, sealed)


def test_forged_headers_are_refused(tmp_path):
    base, tuned = pair(SHAPES)
    lies = [dict(bits=60), dict(bits=0), dict(bits=-3), dict(group=1 << 62), dict(group=0.5)]
    lies += [dict(group="a"), dict(scale=1e300), dict(scale="x"), dict(scale_bits=8)]
    lies += [dict(bits=10**12), dict(shape=5)]  # 2**bits would be a number of 125 GB
    for changes in [*lies, dict(method=[]), dict(base=5), dict(base=None)]:
        own = header(base, "deltaquant", bits=3, group=-1, scale_bits=16)
        data = Q.pack_delta(base, tuned, own, {})
        length = Q.DELTA_PREFIX.unpack_from(data)[2]
        text = json.dumps({**own, "settings": {**own["settings"], **changes}}).encode()
        text = Q.zstandard.ZstdCompressor().compress(text)
        forged = Q.DELTA_PREFIX.pack(Q.DELTA_MAGIC, 1, len(text)) + text + data[16 + length : -32]
        said = read(forged + hashlib.sha256(forged).digest(), base, tmp_path / "d")
        assert said, changes


# --------------------------------------------------------------------------------------------------------- commands
def save(folder, net, data):
    """A checkpoint of a run in `folder`, as train_gpt.py writes it; the run's folder."""
    folder.mkdir()
    meta = {
        "script": "train_gpt.py",
        "settings": {**dataclasses.asdict(SETTINGS), "data_path": str(data)},
        "step": 9,
        "identity": vars(net.config),
    }
    T.save_checkpoint(folder, 9, {"model": net.state_dict(), "training": {}}, meta)
    return folder


def network(seed=0, **changes):
    return test_quantize.network(seed, **{**SHORT, "embed_init_std": 0.1, **changes})


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder: data, shards of bytes; base, a network; tuned, the same after 40 steps on the shards."""
    folder, rng = tmp_path_factory.mktemp("delta"), random.Random(0)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 6))) for _ in range(40)]
    texts = [" ".join(rng.choices(words, k=80)) for _ in range(150)]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    options = f"--out {folder}/data --tokenizer bytes --workers 1".split()
    command = [ROOT / "data/prepare.py", folder / "text.jsonl", *options]
    done = start(command, environment())
    assert done.returncode == 0, done.stderr
    net = network()
    save(folder / "base", net, folder / "data")
    batches = batches_of(folder / "data")
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    for step in range(40):
        for ids, targets in batches.micro_batches(step):
            net(ids, targets).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    save(folder / "tuned", net, folder / "data")
    return folder


def batches_of(data):
    """Batches of four windows of the model's length."""
    options = dataclasses.replace(
        SETTINGS, data_path=str(data), ema=False, swa=False, train_batch_tokens=128
    )
    return T.Batches(T.open_data(options), options, T.start_runtime("cpu"))


def weights(folder):
    return torch.load(folder / "step_000009" / "model.pt", weights_only=True)


def rebuilt(tensors):
    net = network()
    net.load_state_dict(tensors)
    return net


def tables_of(output):
    """The tables in a command's output: rows by first column (of two words or more its last), columns by head."""
    tables = []
    for line in output.splitlines():
        words = line.split("  ")
        words = [word.strip() for word in words if word.strip()]
        if words and words[0] in ("file", "class"):
            head = words
            tables.append({})
        elif tables and len(words) == len(head):
            tables[-1][words[0]] = dict(zip(head, words, strict=True))
    return tables


def bits_per_byte(tensors, data):
    own = T.open_data(dataclasses.replace(SETTINGS, data_path=str(data)))
    scorer = T.Scorer(own.tokenizer.bos_id, T.start_runtime("cpu"), 32, 16)
    return scorer.score(rebuilt(tensors), own.val).bpb


@pytest.mark.parametrize(
    ("command", "changes"),
    [
        ("bitdelta", dict(DISTILL_STEPS=0)),
        ("deltaquant", dict(DELTA_BITS=2, DELTA_STEP="group", DELTA_GROUP=32)),
        *(
            pytest.param(*each, marks=pytest.mark.full)
            for each in (
                ("bitdelta", dict(DISTILL_STEPS=0, DELTA_GROUP=-1, DELTA_SCALE_BITS=16)),
                ("deltaquant", {}),
            )
        ),
    ],
)
def test_what_the_commands_print_and_write(call, place, tmp_path, command, changes):
    """Sizes are of the file, errors by their definitions, bits per byte by evaluation; `apply` gives the tensors of
    memory, bit for bit, of which `pack` and `compare` read the folder.
    """
    base, tuned, out = weights(place / "base"), weights(place / "tuned"), tmp_path / "d"
    code, output, error = call(command, place / "base", place / "tuned", out, "--score", **changes)
    assert code == 0, error
    found, tensors = Q.read_delta(out, base)
    own = found["settings"]
    expected = {"keep_bits": 16, "bits": 4, "group": -1, "scale_bits": 16}
    if command == "bitdelta":
        expected |= dict(bits=1, group=128, scale_bits=32)
    given = {name.removeprefix("DELTA_").lower(): value for name, value in changes.items()}
    expected |= {name: value for name, value in given.items() if name in own}
    assert {name: own[name] for name in expected} == expected
    assert own["base"] == Q.hash_weights(base)
    assert own["shape"] == vars(network().config) and found["tokenizer_sha256"] == BYTES.sha256
    matrices = [name for name, w in base.items() if T.tensor_class(name, w) == "matrix"]
    largest = max((tuned[name] - base[name]).abs().max().item() for name in matrices)
    assert 1 <= own["scale"] / largest <= 2 and math.frexp(own["scale"])[0] == 0.5

    sizes, errors = tables_of(output)
    every, coded = (sum(base[name].numel() for name in names) for names in (base, matrices))
    whole = sum(
        w.numel() * (4 if name.endswith(("A_log", "dt_bias")) else 2)
        for name, w in base.items()
        if name not in matrices
    )
    used = out.stat().st_size
    for name, size, count in ((str(out), used, every), ("its matrices", used - whole, coded)):
        assert int(sizes[name]["bytes"]) == size
        assert [float(sizes[name][key]) for key in ("x_fp32", "x_bf16")] == pytest.approx(
            [4 * count / size, 2 * count / size], rel=1e-4
        )
    deltas = [
        {name: each[name].double() - w for name, w in base.items()} for each in (tuned, tensors)
    ]
    for kind, row in errors.items():
        values = [float(row[column]) for column in COLUMNS]
        assert values == pytest.approx(distance(*deltas, kind), rel=2e-4)
    before, best, after = (bits_per_byte(each, place / "data") for each in (base, tuned, tensors))
    assert best < before - 0.5 and (before - after) / (before - best) > 0.5
    assert output.splitlines()[-1] == (
        f"bits per byte of validation: base {before:.4f}, tuned {best:.4f}, base + delta {after:.4f}, "
        f"{(before - after) / (before - best):.2%} of the gain"
    )

    assert call("apply", place / "base", out, tmp_path / "m")[0] == 0
    again = torch.load(tmp_path / "m" / "model.pt", weights_only=True)
    assert list(again) == list(base)
    assert all(torch.equal(again[name], tensors[name]) for name in base)
    assert call("pack", tmp_path / "m", tmp_path / "m.upar")[0] == 0
    assert call("verify", tmp_path / "m.upar")[0] == 0
    same = tables_of(call("compare", tmp_path / "m", place / "tuned")[1])[0]["matrix"]
    assert 0 < float(same["rel_frobenius"]) < 0.5


def test_distillation(call, place, tmp_path):
    """The scales bring the logits of the first batch nearer, by as much as is printed; signs and the rest stay."""
    base, tuned = weights(place / "base"), weights(place / "tuned")
    words, lines, read = ("bitdelta", place / "base", place / "tuned"), {}, {}
    for steps in (0, 60):
        code, output, error = call(
            *words, tmp_path / str(steps), DISTILL_STEPS=steps, DISTILL_LR=0.01
        )
        assert code == 0, error
        lines[steps], read[steps] = (
            output.splitlines()[0],
            Q.read_delta(tmp_path / str(steps), base)[1],
        )
    assert lines[0].startswith("file") and lines[60].startswith(
        "distillation: 60 steps, mean squared error of logits"
    )
    train, _ = Q.check_dataset(place / "data", Q.load_manifest(place / "data"))
    ids = torch.cat(Q.training_batch(train, 32, Q.Settings().seed, 0))
    with torch.no_grad():
        right = rebuilt(tuned)(ids)
        losses = [(rebuilt(each)(ids) - right).square().mean().item() for each in read.values()]
    said = lines[60].split()
    assert ids.shape == (4, 32) and losses[1] < 0.8 * losses[0]
    assert [float(said[said.index(word) - 1]) for word in ("before,", "after")] == pytest.approx(
        losses, rel=1e-3
    )
    for name, w in base.items():
        one, two = (each[name] - w for each in read.values())
        coded = T.tensor_class(name, w) == "matrix"
        assert torch.equal(one > 0, two > 0) and torch.equal(one, two) != coded
    code, output, _ = call(*words, tmp_path / "wild", DISTILL_LR=10, DISTILL_STEPS=2)
    assert code == 0 and "scales stay as they were" in output
    assert torch.equal(
        Q.read_delta(tmp_path / "wild", base)[1]["mixers.0.w_o"], read[0]["mixers.0.w_o"]
    )


QUANTIZE = "deltaquant {base} {tuned} {new}"
BITDELTA = "bitdelta {base} {tuned} {new}"
MISTAKES = [
    ("apply {tuned} {delta} {new}", {}, "{delta}: of another base, not of SHA-256 "),
    ("apply {base} {artifact} {new}", {}, "{artifact}: is no delta"),
    ("apply {delta} {delta} {new}", {}, "{delta}: is no underpar artifact"),
    ("apply {base} {damaged} {new}", {}, "{damaged}: damaged: the SHA-256 is wrong"),
    ("apply {base} {missing} {new}", {}, "{missing}: no such file"),
    ("bitdelta {base} {wide} {new}", {}, "tensor 'blocks.0.mlp.w_up': [64, 32] in "),
    ("deltaquant {base} {nan} {new}", {}, "tensor 'mixers.1.w_o': its weights are not finite"),
    ("bitdelta {nan} {tuned} {new}", {}, "tensor 'mixers.1.w_o': its weights are not finite"),
    ("deltaquant {base} {loud} {new}", {}, "tensor 'embed': too large for float16"),
    (QUANTIZE, dict(DELTA_BITS=9), "DELTA_BITS=9: must be a whole number from 1"),
    (QUANTIZE, dict(DELTA_STEP="grid"), "must be one of tensor, row, group"),
    (BITDELTA, dict(DELTA_SCALE_BITS=24), "='24': must be one of 16, 32"),
    (BITDELTA, dict(DELTA_GROUP=-2), "DELTA_GROUP=-2: must be a whole number from -1"),
    (BITDELTA, dict(DATA_PATH=""), "DATA_PATH='': distillation and --score"),
    (BITDELTA, dict(DATA_PATH="nowhere"), "nowhere"),
    ("bitdelta {base} {tuned} {delta}", {}, "exists already"),
]


@pytest.mark.parametrize(("words", "changes", "said"), MISTAKES)
def test_mistakes_are_one_line_and_exit_code_2(call, place, tmp_path, words, changes, said):
    names = {name: place / name for name in ("base", "tuned")}
    names |= {name: tmp_path / name for name in ("new", "delta", "damaged", "missing", "artifact")}
    base, tuned = (weights(place / name) for name in ("base", "tuned"))
    names["delta"].write_bytes(Q.pack_delta(base, tuned, header(base), {}))
    names["damaged"].write_bytes(names["delta"].read_bytes()[:-40])
    names["artifact"].write_bytes(T.pack_artifact(base, {}))
    for name in ("wide", "nan", "loud"):
        names[name] = tmp_path / name
        net = network(mlp_mult=3.0 if name == "wide" else 2.0)
        with torch.no_grad():
            if name == "nan":
                net.mixers[1].w_o[2, 2] = math.nan
            if name == "loud":
                net.embed[2, 2] = 1e6
        if "{" + name + "}" in words:
            save(names[name], net, place / "data")
    code, output, error = call(*words.format(**names).split(), **{"DISTILL_STEPS": 1, **changes})
    assert code == 2 and said.format(**names) in error and not output, error
    assert not names["new"].exists()


def test_quantizers_of_a_program():
    """More bits are nearer; what does not fit is one line."""
    random = torch.Generator().manual_seed(0)
    base = torch.randn(8, 256, generator=random)
    weight = base + 0.1 * torch.randn(8, 256, generator=random)
    errors = []
    for bits in (1, 2, 4, 8):
        quantizer = Q.DeltaQuantizer(bits, group_size=-1)
        codes, scales = quantizer.quantize(weight, base)
        assert codes.shape == weight.shape and scales.shape == (8,)
        errors.append((quantizer.dequantize(base, codes, scales) - weight).norm())
    assert errors == sorted(errors, reverse=True) and errors[-1] < 0.02 * errors[0]
    for call in (
        lambda: Q.DeltaQuantizer(9),
        lambda: Q.BitDeltaQuantizer(-2),
        lambda: quantizer.quantize(weight, base[:4]),
    ):
        with pytest.raises(Q.UserError, match="must be"):
            call()
