"""quantize.py: every command by values, against the exporter; damage, mistakes."""

import dataclasses
import json
import math
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from test_model import config

import quantize as Q
import sample as S
import train_gpt as T
from conftest import ROOT, TINY, add_noise, blocks, environment, start

SETTINGS = T.Settings(
    layer_pattern="g s",
    model_dim=32,
    num_heads=4,
    num_kv_heads=2,
    mlp_mult=2.0,
    attn_window=7,
    train_seq_len=64,
    matrix_bits=5,
    device="cpu",
)
TABLE = T.quant_table(SETTINGS)
BYTES = Q.read_tokenizer("bytes", None)
CLASSES = ("matrix", "embedding", "control")
WEIGHTS = ("raw", "ema", "swa")


def network(seed=0, **changes):
    """Return a network none of whose parameters is at a special value."""
    torch.manual_seed(seed)
    net = T.GPT(config(BYTES.vocab_size, BYTES.bos_id, SETTINGS, **changes))
    add_noise(net, 0.05)
    return net


def save(folder, net, step=20, **parts):
    """Write a checkpoint of a run in `folder`, as train_gpt.py does. Return the run's folder."""
    folder.mkdir(exist_ok=True)
    identity = {**vars(net.config), "manifest_sha256": "x", "seed": 1, "optimizer": "muon"}
    meta = {"settings": dataclasses.asdict(SETTINGS), "step": step, "identity": identity}
    with mock.patch.object(T, "KEEP_CHECKPOINTS", 9):
        T.save_checkpoint(folder, step, {"model": net.state_dict(), "training": parts}, meta)
    return folder


def table(**changes):
    return T.quant_table(dataclasses.replace(SETTINGS, **changes))


def widened(factor):
    return {k: {**q, "clip_sigmas": q["clip_sigmas"] * factor} for k, q in TABLE.items()}


def write(path, net, table=TABLE, coded=None, **settings):
    """Write the artifact that train_gpt.main() writes at its end, with settings changed."""
    tensors = net.state_dict()
    header = {"settings": {**vars(net.config), **settings}, "tokenizer_sha256": BYTES.sha256}
    header["meta"] = {"seed": 1337, "tokenizer": "bytes"}
    coded = T.quantize_all(tensors, table) if coded is None else coded
    path.write_bytes(T.pack_artifact(tensors, coded, **header))


def table_of(output):
    """Return the rows of the table in a command's output, by first column; columns by head."""
    lines = [line.split() for line in output.splitlines()]
    begin = next(i for i, words in enumerate(lines) if words[0] == "class")
    head = [*lines[begin], "coder_counts"]  # `6-bit rans:4`, two words
    return {words[0]: dict(zip(head, words, strict=False)) for words in lines[begin + 1 :]}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return a folder with a run: a checkpoint of `network()`, and its artifact."""
    folder = tmp_path_factory.mktemp("quantize")
    save(folder / "run", network())
    write(folder / "run" / "model.upar", network())
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_data):
    """Return the folder of a whole run of train_gpt.py: 12 steps, EMA, SWA, QAT, 5 bits."""
    folder = tmp_path_factory.mktemp("trained")
    changes = dict(ITERATIONS=12, SAVE_EVERY=6, MATRIX_BITS=5, LR_SCHEDULE="constant", SEED=7)
    paths = dict(DATA_PATH=tiny_data, OUT_DIR=folder, RUN_ID="run")
    done = start([ROOT / "train_gpt.py"], environment(**{**TINY, **changes, **paths}))
    assert done.returncode == 0, done.stderr
    return folder / "run"


# ------------------------------------------------------------------------------- pack and unpack
def test_pack_is_the_exporter_on_a_run_of_train_gpt(call, trained, tmp_path):
    """The run's artifact, byte for byte, of the weights that it chose; the others by its functions."""
    chosen = json.loads((trained / "result.json").read_text())["weights"]
    header, *_ = T.read_artifact(trained / "model.upar")
    last = trained / "step_000012"
    training = torch.load(last / "training.pt", weights_only=True)
    for weights in WEIGHTS:
        out = tmp_path / f"{weights}.upar"
        assert call("pack", trained, out, "--weights", weights)[0] == 0
        tensors = torch.load(last / "model.pt", weights_only=True)
        if weights != "raw":
            assert training[weights]["count"] > 1
            tensors = dict(zip(tensors, training[weights]["values"], strict=True))
        names = ("settings", "tokenizer_sha256")
        meta = {"seed": 7, "tokenizer": "tokenizer.model"}
        fields = {name: header[name] for name in names}
        coded = T.quantize_all(tensors, TABLE)
        expected = T.pack_artifact(tensors, coded, **fields, meta=meta)
        assert out.read_bytes() == expected
        assert (expected == (trained / "model.upar").read_bytes()) == (weights == chosen)
        code, output, error = call("verify", trained, trained, "--weights", weights)
        assert (code == 0) == ("byte for byte" in output) == (weights == chosen)
        if weights != chosen:
            assert f"the {weights} weights of {last} (--weights)" in error
    assert len({(tmp_path / f"{weights}.upar").read_bytes() for weights in WEIGHTS}) == 3


def test_the_weights_are_those_that_the_run_chose(call, trained, tmp_path):
    """Without --weights, as result.json says; of a run without one the raw weights."""
    run = shutil.copytree(trained, tmp_path / "run")
    result = json.loads((run / "result.json").read_text())
    files = {}
    for chosen in (*WEIGHTS, ""):
        (run / "result.json").write_text(json.dumps({**result, "weights": chosen}))
        for i, model in enumerate((run, run / "step_000012")):
            out = tmp_path / f"{i}{chosen}.upar"
            assert call("pack", model, out)[0] == 0
            files[i, chosen] = out.read_bytes()
    assert all(files[0, chosen] == files[1, chosen] for chosen in WEIGHTS)
    assert files[0, ""] == files[0, "raw"] and len(set(files.values())) == 3
    for words in (["verify", trained, trained], ["info", trained, "--checkpoint", trained]):
        code, output, error = call(*words)
        assert code == 0 and ("byte for byte" in output) == (words[0] == "verify"), error


def test_the_tokenizer_is_copied_beside_what_is_written(call, trained, tmp_path):
    """There sample.py finds it; that of another model is not replaced."""
    content = (trained / "tokenizer.model").read_bytes()
    out = tmp_path / "new"
    other = tmp_path / "other"
    for folder in (out, out / "deeper", other):
        folder.mkdir()
    code, output, _ = call("pack", trained, out / "a.upar")
    assert (
        code == 0 and f"{out / 'tokenizer.model'}: the tokenizer that {out / 'a.upar'} ne" in output
    )
    assert (out / "tokenizer.model").read_bytes() == content
    code, output, _ = call("pack", trained, out / "again.upar")  # an equal one is there
    assert code == 0 and "tokenizer.model" not in output
    assert call("unpack", out / "a.upar", out / "deeper" / "folder")[0] == 0
    assert (out / "deeper" / "tokenizer.model").read_bytes() == content
    environ = environment(ARTIFACT=out / "a.upar", PROMPT="a", MAX_NEW_TOKENS=3)
    done = start([ROOT / "sample.py"], environ)
    assert done.returncode == 0, done.stderr
    (other / "tokenizer.model").write_bytes(b"mine")
    for words in (["pack", trained], ["unpack", trained]):
        with mock.patch.object(Q, "quantize_all", side_effect=AssertionError("began to work")):
            code, _, error = call(*words, other / "b")
        assert code == 2 and "tokenizer.model, but that file is of another model; choose" in error
    assert [path.name for path in other.iterdir()] == ["tokenizer.model"]
    (out / "tokenizer.model").unlink()
    code, _, error = call("pack", out / "a.upar", tmp_path / "c.upar")
    assert code == 0 and error.endswith(
        "TOKENIZER_PATH, for no tokenizer.model was found to copy\n"
    )
    changes = dict(TOKENIZER_PATH=trained / "tokenizer.model")
    assert call("pack", trained / "step_000012", tmp_path / "d.upar", **changes)[0] == 0
    assert (tmp_path / "tokenizer.model").read_bytes() == content


def test_pack_takes_given_bits_and_otherwise_the_checkpoints_steps(call, tmp_path):
    wide = widened(1.7)
    run = save(tmp_path / "run", network(), exporter={"widen": 1.7})
    four = table(matrix_bits=4)
    file = tmp_path / "c.env"
    given = dict(MATRIX_BITS=4)
    cases = [("", {}, wide), ("", given, four), ("MATRIX_BITS=4", {}, four)]
    for i, (line, changes, expected) in enumerate([*cases, ("MATRIX_BITS=6", given, four)]):
        file.write_text(line)
        out = tmp_path / f"{i}.upar"
        code, output, _ = call("pack", run, out, CONFIG=file, **changes)
        write(tmp_path / "expected", network(), expected)
        assert code == 0 and out.read_bytes() == (tmp_path / "expected").read_bytes()
        assert output == f"{out}: {out.stat().st_size} bytes\n"


def test_the_folder_final_has_the_weights_that_were_packed(call, tmp_path):
    run = save(tmp_path / "run", network())
    (run / "result.json").write_text('{"weights": "ema"}')
    meta = json.loads((run / "step_000020" / "meta.json").read_text())
    T.write_checkpoint(run / "final", {"model": network(5).state_dict()}, meta)
    out = tmp_path / "out.upar"
    assert call("pack", run / "final", out)[0] == 0
    write(tmp_path / "expected", network(5))
    assert out.read_bytes() == (tmp_path / "expected").read_bytes()
    code, _, error = call("compare", run / "final", out, "--weights", "raw")
    assert code == 2 and "no checkpoint with raw weights: it has the ema weights" in error


@pytest.mark.parametrize("bits", [2, 5, 8])
def test_unpacked_and_packed_again_is_the_same_file(call, tmp_path, bits):
    net = network()
    with torch.no_grad():
        net.blocks[0].mlp.w_down.zero_()  # a scale of 0
    first = tmp_path / "a.upar"
    folder = tmp_path / "folder"
    write(first, net, table(matrix_bits=bits))
    said = f"{folder}: {len(net.state_dict())} tensors\n"
    assert call("unpack", first, folder)[:2] == (0, said)
    tensors = torch.load(folder / "model.pt", weights_only=True)
    _, expected, _ = T.read_artifact(first)
    assert list(tensors) == list(expected)
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    assert call("pack", folder, tmp_path / "b.upar")[0] == 0
    assert (tmp_path / "b.upar").read_bytes() == first.read_bytes()
    code, output, _ = call("verify", first, folder)
    assert code == 0 and table_of(output)["all"]["rel_frobenius"] == "0"
    assert "byte for byte" in output


def test_codes_by_gptq_stay_as_they_are(call, place, tmp_path):
    """They are not what `pack` makes of the checkpoint; verify accepts them."""
    net = network()
    coded = T.quantize_all(net.state_dict(), widened(1.23))
    # As GPTQ does, one code in 20 is not the nearest.
    for part in coded.values():
        moved = torch.rand(part.codes.shape) < 0.05
        part.codes[moved] -= part.codes[moved].sign()
    write(tmp_path / "g.upar", net, coded=coded)
    assert call("unpack", tmp_path / "g.upar", tmp_path / "folder")[0] == 0
    for model in ("g.upar", "folder"):
        again = tmp_path / f"{model}.again"
        assert call("pack", tmp_path / model, again)[0] == 0
        assert again.read_bytes() == (tmp_path / "g.upar").read_bytes()
    code, output, _ = call("verify", tmp_path / "g.upar", place / "run")
    assert code == 0 and "byte for byte" not in output
    assert "by GPTQ or with steps fitted" in output


def test_gptq_lowers_the_loss_and_says_where_its_text_is(call, trained, tiny_data, tmp_path):
    """At 3 bits, by the codes that `gptq` makes of the sums; the other tensors are the nearest's."""
    nets = {}
    for name, words in (("nearest", []), ("gptq", ["--gptq", tiny_data])):
        out = tmp_path / f"{name}.upar"
        code, _, error = call("pack", trained, out, *words, MATRIX_BITS=3)
        assert code == 0, error
        nets[name] = Q.rebuild(Q.read_weights(str(out)))
    source = Q.read_weights(str(trained))
    _, val, size = Q.read_text(source, Q.Settings(data_path=str(tiny_data)))
    nearest, gptq = (Q.validation_bpb(net, 32, val, size) for net in nets.values())
    assert gptq < nearest - 0.001
    assert call("verify", tmp_path / "gptq.upar", trained, MATRIX_BITS=3)[0] == 0
    for model, folder, fault in (
        (tmp_path / "gptq.upar", tiny_data, "--gptq: the weights of "),
        (trained, tmp_path, "data/prepare.py TEXTS --out FOLDER"),
    ):
        code, _, error = call("pack", model, tmp_path / "new.upar", "--gptq", folder)
        assert code == 2 and fault in error, error


# ------------------------------------------------------------------------ info, compare and verify
def distance(a, b, kind):
    """Return the columns of `compare` for a class, by their definitions."""
    names = [name for name in a if kind in ("all", T.tensor_class(name, a[name]))]
    x, y = (np.concatenate([m[name].double().numpy().ravel() for name in names]) for m in (a, b))
    norm = np.linalg.norm
    ratio = norm(y - x) / norm(x)
    mean = np.mean((y - x) ** 2)
    return [ratio, mean, np.abs(y - x).max(), x @ y / norm(x) / norm(y), -20 * np.log10(ratio)]


COLUMNS = ("rel_frobenius", "mse", "max", "cosine", "snr_db")


def test_info_against_numbers_by_hand(call, place, tmp_path):
    """Bytes by the header, entropy by numpy over the quantizer's codes, the table's sums."""
    net = network()
    tensors = net.state_dict()
    path = tmp_path / "m.upar"
    write(path, net)
    code, output, error = call("info", path, "--tensors", "--checkpoint", place / "run")
    rows = table_of(output)
    header, read, coded = T.read_artifact(path)
    assert (code, error) == (0, "") and str(vars(net.config)) in output
    streams = header["streams"]
    coder = {f"({name})" for name in streams.keys() - tensors.keys()}
    assert coder == {"(lane_states)", "(tables)", "(sizes)", "(escapes)"}
    assert set(rows) == {*tensors, *CLASSES, *coder, "(header)", "total"}
    parts = [int(rows[name]["bytes"]) for name in (*CLASSES, *coder, "(header)")]
    assert sum(parts) == int(rows["total"]["bytes"]) == path.stat().st_size
    entropies = dict.fromkeys(CLASSES, 0.0)
    for name, w in tensors.items():
        row = rows[name]
        length = streams[name]["length"]
        assert (row["tensors"], row["weights"]) == ("1", str(w.numel()))
        assert row["bytes"] == str(length)
        assert float(row["bits/weight"]) == pytest.approx(8 * length / w.numel(), rel=1e-4)
        error = ((read[name] - w).norm() / w.norm()).item()
        assert float(row["error"]) == pytest.approx(error, rel=1e-3)
        kind = T.tensor_class(name, w)
        bits = streams[name].get("bits", 8 * np.dtype(streams[name]["dtype"]).itemsize)
        assert row["coders"] == f"{bits}-bit"
        assert row["coder_counts"] == f"{'rans' if streams[name]['dtype'] == '<u2' else 'zstd'}:1"
        if name in coded:
            counts = np.bincount(T.quantize(w, **TABLE[kind])[0].ravel().int() + 128)
            share = counts[counts > 0] / w.numel()
            entropies[kind] -= (share * np.log2(share)).sum() * w.numel()
        assert (row["entropy"] == "-") == (name not in coded)
    for kind in ("matrix", "embedding"):
        entropy = entropies[kind] / int(rows[kind]["weights"])
        assert float(rows[kind]["entropy"]) == pytest.approx(entropy, rel=1e-4)
    error = distance(tensors, read, "all")[0]
    assert float(rows["total"]["error"]) == pytest.approx(error, rel=1e-3)
    short = table_of(call("info", path)[1])
    long = {name: {**row, "error": "-"} for name, row in rows.items() if name not in tensors}
    assert short == long


def test_compare_and_verify_print_distances(call, place, tmp_path):
    write(tmp_path / "b.upar", network(), table(matrix_bits=3))
    artifact = place / "run" / "model.upar"
    compared = call("compare", place / "run", tmp_path / "b.upar")[1]
    code, verified, _ = call("verify", artifact, place / "run")
    lines = verified.splitlines(keepends=True)
    whose = f"the raw weights of {place / 'run' / 'step_000020'}"
    assert code == 0 and lines[-2].endswith(f"what `pack` makes of {whose}, byte for byte\n")
    count = len(network().state_dict())
    assert lines[-1].endswith(f"whole, {count} tensors, SHA-256 {T.sha256_file(artifact)}\n")
    for output, path in ((compared, tmp_path / "b.upar"), ("".join(lines[:-2]), artifact)):
        rows = table_of(output)
        assert list(rows) == [*CLASSES, "all"]
        for kind, row in rows.items():
            expected = distance(network().state_dict(), T.read_artifact(path)[1], kind)
            values = [float(row[column]) for column in COLUMNS]
            assert values == pytest.approx(expected, rel=2e-4)
    same = table_of(call("compare", tmp_path / "b.upar", tmp_path / "b.upar")[1])["all"]
    assert [same[column] for column in COLUMNS] == ["0", "0", "0", "1", "inf"]


def test_compare_of_zeros_and_of_other_shapes(call, tmp_path):
    folders = []
    for level in (0.0, 0.5):
        net = network()
        with torch.no_grad():
            for name, param in net.named_parameters():
                if T.tensor_class(name, param) == "matrix":
                    param.fill_(level)
        folders.append(save(tmp_path / str(level), net))
    rows = [["-", "0", "0", "-", "-"], ["inf", "0.25", "0.5", "-", "-inf"]]
    for other, expected in zip(folders, rows, strict=True):
        row = table_of(call("compare", folders[0], other)[1])["matrix"]
        assert [row[column] for column in COLUMNS] == expected
    wide = save(tmp_path / "wide", network(mlp_mult=3.0))
    norms = save(tmp_path / "norms", network(norm="layer"))
    missing = "tensor 'blocks.0.mixer_norm.weight': missing in "
    for other, fault in ((wide, "tensor 'blocks.0.mlp.w_up': [64, 32] in "), (norms, missing)):
        code, _, error = call("compare", folders[0], other)
        assert code == 2 and fault in error


def test_the_newest_whole_checkpoint_is_taken(call, tmp_path):
    run = save(tmp_path / "run", network(1), 8)
    save(run, network(2), 1000000)
    for step, seed in ((1000000, 2), (8, 1)):
        assert call("pack", run, tmp_path / f"{step}.upar")[0] == 0
        write(tmp_path / "expected", network(seed))
        assert (tmp_path / f"{step}.upar").read_bytes() == (tmp_path / "expected").read_bytes()
        path = run / f"step_{step:06d}" / "model.pt"
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    code, _, error = call("pack", run, tmp_path / "none.upar")
    assert code == 2 and "no whole checkpoint; checkpoint " in error
    assert "step_1000000 is damaged and skipped: model.pt was changed" in error
    assert not (tmp_path / "none.upar").exists()


def test_damaged_artifacts_are_named_in_one_line(call, place, tmp_path):
    data = (place / "run" / "model.upar").read_bytes()
    path = tmp_path / "damaged.upar"
    flipped = []
    for i in (0, 9, 20, len(data) // 2, len(data) - 1):
        flipped.append(data[:i] + bytes([data[i] ^ 4]) + data[i + 1 :])
    for content in (*flipped, data[:100], b"", data + b"\0"):
        path.write_bytes(content)
        code, _, error = call("verify", path)
        assert code == 1 and str(path) in error
    commands = [["info", path], ["compare", path, place / "run"]]
    commands += [[name, path, tmp_path / "out"] for name in ("unpack", "export", "pack")]
    for words in commands:
        code, _, error = call(*words)
        assert code == 2 and "the SHA-256 is wrong" in error
    assert list(tmp_path.iterdir()) == [path]


def forge(path, place, value):
    """Change a field of an artifact's header; all sums are right again."""
    data = path.read_bytes()
    magic, version, length = Q.ARTIFACT_PREFIX.unpack_from(data)
    begin = Q.ARTIFACT_PREFIX.size
    frame = data[begin : begin + length]
    header = json.loads(Q.zstandard.ZstdDecompressor().stream_reader(frame).read())
    part = header
    for key in place[:-1]:
        part = part[key]
    part[place[-1]] = value
    frame = Q.zstandard.ZstdCompressor().compress(json.dumps(header).encode())
    prefix = Q.ARTIFACT_PREFIX.pack(magic, version, len(frame))
    content = prefix + frame + data[begin + length : -32]
    path.write_bytes(content + Q.hashlib.sha256(content).digest())


def test_forged_headers_are_one_line(call, place, tmp_path):
    """Whatever a header claims, commands work or say what is wrong; `call` asserts one line."""
    path = tmp_path / "m.upar"
    for lie in (["settings"], ["meta"], ["tokenizer_sha256"], ["meta", "tokenizer"]):
        shutil.copy(place / "run" / "model.upar", path)
        forge(path, lie, 5)
        code, _, error = call("info", path)
        said = {
            "settings": "the header.settings is 5, must be of type dict",
            "meta": "the header.meta is 5, must be of type dict",
            "tokenizer_sha256": "the header.tokenizer_sha256 is 5, must be of type str",
            "tokenizer": "the header's tokenizer must be a file's name",
        }[lie[-1]]
        assert code == 2 and said in error, error


JUNK = [None, True, -1, 0, 2.5, 10**9, 1 << 70, math.nan, 1e400, "", "rans", "a\ud800"]
JUNK += ["/dev/zero", [], [1 << 40, 0], {"a": 1}, [[]], "g " * 10_000]


@pytest.mark.parametrize("count", [30, pytest.param(200, marks=pytest.mark.full)])
def test_a_value_of_any_type_anywhere_in_the_header_is_one_line(call, place, tmp_path, count):
    """`call` asserts one line; sample.py's load_model raises a UserError or nothing."""
    random = np.random.default_rng(0)
    path = tmp_path / "m.upar"
    good = place / "run" / "model.upar"
    header, *_ = T.read_artifact(good)
    streams = header["streams"]
    places = [["settings", name] for name in header["settings"]]
    places += [["meta", "seed"], ["meta", "tokenizer"], ["tokenizer_sha256"], ["streams"]]
    places += [["streams", name] for name in streams]
    places += [["streams", name, key] for name, record in streams.items() for key in record]
    for _ in range(count):
        shutil.copy(good, path)
        lie = places[random.integers(len(places))]
        forge(path, lie, JUNK[random.integers(len(JUNK))])
        call("info", path, "--tensors")
        call("unpack", path, tmp_path / "folder")
        shutil.rmtree(tmp_path / "folder", ignore_errors=True)
        call("compare", path, good)
        code, output, error = call("verify", path)
        assert code or "whole" in output
        try:
            S.load_model("ARTIFACT", str(path))
        except S.UserError as fault:
            assert "\n" not in str(fault), lie


def test_verify_says_no(call, place, tmp_path):
    artifact = tmp_path / "m.upar"
    net = network()
    settings = [
        (dict(mlp_mult=3.0), "has the tensor 'blocks.0.mlp.w_up' of shape "),
        (dict(mlp="relu3"), "has settings that make no network: ValueError(\"mlp='relu3'"),
        (dict(num_heads=0), "division"),
        (dict(logit_softcap=1e39), "its settings rebuild no model: its logits are not finite"),
    ]
    for changes, fault in settings:
        write(artifact, net, **changes)
        code, _, error = call("verify", artifact)
        assert code == 1 and f"{artifact}" in error and fault in error
    write(artifact, net)
    code, _, error = call("verify", artifact, place / "run", MATRIX_BITS=4)
    assert code and "tensor 'mixers.0.w_qkvg': 5 bits, 4 by the settings of" in error, error
    write(artifact, net, attn_window=9)
    assert "its settings are not those of" in call("verify", artifact, place / "run")[2]
    with mock.patch.object(BYTES, "sha256", "0" * 64):
        write(artifact, net)
    assert "its tokenizer is not " in call("verify", artifact, place / "run")[2]
    changed = [
        ("mixers.1.w_o", lambda w: w * 1.01, "'mixers.1.w_o': its steps are not those of"),
        ("mixers.1.w_o", lambda w: w.flip(0), "times the error of the nearest codes to the raw"),
        ("mixers.0.dt_bias", lambda w: w + 1e-6, "tensor 'mixers.0.dt_bias': is not that of"),
        ("blocks.1.mlp_scale", lambda w: w * 1.001, "'blocks.1.mlp_scale': is not that of"),
    ]
    for name, change, fault in changed:
        net = network()
        with torch.no_grad():
            param = net.get_parameter(name)
            param.copy_(change(param.clone()))
        write(artifact, net)
        code, _, error = call("verify", artifact, place / "run")
        assert code == 1 and fault in error, (name, fault, error)


def test_a_tensor_of_zeros_may_have_a_scale_of_zero(place):
    """Artifacts had one until the smallest scale that float16 has took its place."""
    source = Q.read_weights(str(place / "run" / "model.upar"))
    name = "mixers.1.w_o"
    bits = source.coded[name].bits
    zeros = torch.zeros_like(source.tensors[name])
    source.coded[name] = Q.Coded(zeros.to(torch.int8), torch.zeros(1, dtype=torch.float16), bits)
    model = Q.Weights(place / "run", {name: zeros}, source.shape)
    Q.check_codes(source, model, Q.Settings(matrix_bits=bits))


# ---------------------------------------------------------------------------------------- mistakes
QUANTIZED = "MATRIX_BITS: the weights of {artifact} are quantized"
OTHER = "bytes has 264 tokens; must be the tokenizer of"
MISTAKES = [
    ("", {}, "the following arguments are required: COMMAND"),
    ("inof", {}, "invalid choice: 'inof'"),
    ("info a b", {}, "unrecognized arguments: b; "),
    ("pack {run} {new} --weights best", {}, "invalid choice: 'best'"),
    ("info {early}", {}, "no such file; a run's artifact is runs/<RUN_ID>/model.upar"),
    ("verify {new}", {}, "no such file"),
    ("pack {new} {new}", {}, "no such file"),
    ("pack {run} {artifact}", {}, "exists already, or its folder does not"),
    ("unpack {artifact} {new}/x", {}, "exists already, or its folder"),
    ("pack {run} {new} --weights ema", {}, "no checkpoint with ema weights"),
    ("pack {early} {new} --weights ema", {}, "ema weights: none had been collected when it was"),
    ("pack {place} {new}", {}, "no whole checkpoint"),
    ("pack {run} {new}", {"MATRIX_BITS": 9}, "MATRIX_BITS=9: must be a whole number from 2 to 8"),
    ("info {artifact}", {"MATRIX_BIT": 4}, "no setting of this script; did you mean MATRIX_BITS?"),
    ("pack {artifact} {new}", {"MATRIX_BITS": 4}, QUANTIZED),
    ("pack {artifact} {new}", {"CONFIG": "{config}"}, QUANTIZED),
    ("pack {run} {new}", {"TOKENIZER_PATH": "nowhere.model"}, "tokenizer nowhere.model: [Errno 2]"),
    ("pack {foreign} {new}", {}, f"error: {OTHER}"),
    ("pack {foreign} {new}", {"TOKENIZER_PATH": "bytes"}, f"TOKENIZER_PATH='bytes': {OTHER}"),
    ("pack {broken} {new}", {}, "tensor 'embed': its weights are not finite"),
]


@pytest.mark.parametrize(("words", "changes", "fault"), MISTAKES)
def test_mistakes_are_one_line_and_exit_code_2(call, place, tmp_path, words, changes, fault):
    if "{foreign}" in words:
        save(tmp_path / "foreign", T.GPT(T.model_config(SETTINGS, 300, 1)))
    if "{broken}" in words:
        net = network()
        net.embed.data[5, 5] = math.nan
        save(tmp_path / "broken", net)
    if "{early}" in words:  # what had been collected before QAT is of no use since
        save(tmp_path / "early", network(), ema=dict(values=[*network(5).parameters()], count=0))
    names = {name: tmp_path / name for name in ("new", "foreign", "broken", "early", "config")}
    names |= {"artifact": place / "run" / "model.upar", "run": place / "run", "place": place}
    names["config"] = tmp_path / "c.env"
    names["config"].write_text("MATRIX_BITS=4\n")
    changes = {name: str(value).format(**names) for name, value in changes.items()}
    code, _, error = call(*words.format(**names).split(), **changes)
    assert code == 2 and fault.format(**names) in error
    assert not names["new"].exists()


def test_a_grown_tokenizer_is_packed(call, tmp_path):
    """Post-training adds four tokens for the roles to a tokenizer without them."""
    net = T.GPT(T.model_config(SETTINGS, BYTES.vocab_size + 4, BYTES.bos_id))
    assert call("pack", save(tmp_path / "run", net), tmp_path / "m.upar")[0] == 0


def test_what_cannot_be_written_is_one_line_and_leaves_nothing(place, tmp_path):
    """A disk that is full after 20 kB: no folder is left that would be taken for a model."""
    out = tmp_path / "new"
    words = [sys.executable, ROOT / "quantize.py", "unpack", place / "run" / "model.upar", out]
    command = f"ulimit -f 20 && {shlex.join(map(str, words))}"
    done = subprocess.run(["bash", "-c", command], env=environment(), capture_output=True)
    error = done.stderr.decode()
    assert done.returncode == 1 and not out.exists() and error.count("\n") == 1, error
    assert error.startswith(f"error: {out}: cannot be written: ")


def test_a_folder_is_as_small_as_its_weights_and_may_be_renamed(call, place, tmp_path):
    assert call("unpack", place / "run", f"{tmp_path}/b/")[0] == 0
    # A dot in its name does not make it half-written.
    renamed = (tmp_path / "b").rename(tmp_path / "b.v2")
    assert call("compare", renamed, place / "run")[0] == 0
    # A view would be stored with all that it is a view of.
    weights = sum(param.numel() for param in network().parameters())
    size = (renamed / "model.pt").stat().st_size
    assert 4 * weights < size < 4 * weights + 400 * len(network().state_dict())


# --------------------------------------------------------------------------------------- the guide
GUIDE = "".join(blocks("quantization.md", "bash")).splitlines()


@pytest.fixture
def named(trained, tiny_data, tmp_path, monkeypatch):
    """Change to a folder with what the guide's commands name: data/mine, base, tuned.

    Base is the run of train_gpt.py, tuned the same with noise on its weights.
    """
    (tmp_path / "data").mkdir()
    (tmp_path / "runs").mkdir()
    shutil.copytree(tiny_data, tmp_path / "data" / "mine")
    shutil.copytree(trained, tmp_path / "runs" / "base")
    tuned = shutil.copytree(trained, tmp_path / "runs" / "tuned")
    last = tuned / "step_000012"
    tensors, training = (torch.load(last / f"{name}.pt") for name in ("model", "training"))
    torch.manual_seed(0)
    for w in (*tensors.values(), *training["ema"]["values"], *training["swa"]["values"]):
        w.add_(0.02 * torch.randn_like(w))
    meta = json.loads((last / "meta.json").read_bytes())
    shutil.rmtree(last)
    T.save_checkpoint(tuned, 12, {"model": tensors, "training": training}, meta)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_guides_commands_run(call, named):
    """Every `python quantize.py` of docs/quantization.md, in its order; what it says of some."""
    (named / "runs" / "base" / "model.upar").unlink()
    assert call("pack", "runs/base", "runs/base/model.upar")[0] == 0
    outputs = {}
    for command in GUIDE:
        words = shlex.split(command)
        script = words.index("python") + 1
        if words[script] == "quantize.py":
            changes = dict(word.split("=", 1) for word in words[: script - 1])
            code, output, error = call(*words[script + 1 :], **{**changes, "DISTILL_STEPS": 5})
            assert code == 0 and output, (command, error)
            outputs[words[script + 1], words[-1]] = output
    names = "apply bitdelta compare deltaquant info pack unpack verify"
    assert {command for command, _ in outputs} == set(names.split())
    assert (named / "again.upar").read_bytes() == (named / "int4.upar").read_bytes()
    for name in ("int4.upar", "tuned.upar"):
        assert "4-bit rans:" in call("info", name)[1]
    assert "byte for byte" in outputs["verify", "runs/base"]
    assert "bits per byte of validation: base " in outputs["bitdelta", "--score"]
    sizes = [(named / f"tuned{bits}.delta").stat().st_size for bits in (2, 3)]
    assert (named / "tuned.delta").exists() and sizes[0] < sizes[1]


@pytest.mark.full
def test_the_guides_other_commands_run(named):
    """Those of train_gpt.py; the environment makes them tiny."""
    (named / "bin").mkdir()
    (named / "bin" / "python").symlink_to(sys.executable)
    for name in ("train_gpt.py", "tools", "configs"):
        (named / name).symlink_to(ROOT / name)
    tiny = {name: value for name, value in TINY.items() if "GPTQ" not in name}
    environ = environment(**tiny)
    environ["PATH"] = f"{Path(sys.executable).parent}:{environ['PATH']}"
    commands = [command for command in GUIDE if "quantize.py" not in command]
    for command in commands:
        subprocess.run(["bash", "-euc", command], cwd=named, env=environ, check=True, timeout=300)
    results = {}
    for name in ("small", "coarse", "nearest"):
        results[name] = json.loads((named / "runs" / name / "result.json").read_bytes())
    assert results["small"]["total_bytes"] <= 400000
    assert results["coarse"]["artifact_bytes"] < results["nearest"]["artifact_bytes"]
    assert "qat" not in results["nearest"]["phases"]


def reseal(folder):
    """Write SHA256SUMS of what the folder has now."""
    files = sorted(path for path in folder.iterdir() if path.name != "SHA256SUMS")
    lines = [f"{Q.sha256_file(path)}  {path.name}\n" for path in files]
    (folder / "SHA256SUMS").write_text("".join(lines))


@pytest.mark.parametrize(
    ("file", "change", "fault"),
    [
        ("model.pt", lambda w: None, "no names of tensors"),
        ("model.pt", lambda w: w | {"embed": w["embed"].to("meta")}, "no weights under 'embed'"),
        ("model.pt", lambda w: w | {"embed": w["embed"].to_sparse()}, "no weights under 'embed'"),
        ("coded.pt", lambda c: None, "no attribute 'items'"),
        ("coded.pt", lambda c: {name: [p[0], 1, p[2]] for name, p in c.items()}, "subscriptable"),
        (
            "coded.pt",
            lambda c: {name: [p[0] + 1, *p[1:]] for name, p in c.items()},
            "other weights",
        ),
    ],
)
def test_forged_folders_are_one_line(call, place, tmp_path, file, change, fault):
    folder = tmp_path / "folder"
    assert call("unpack", place / "run" / "model.upar", folder)[0] == 0
    torch.save(change(torch.load(folder / file)), folder / file)
    reseal(folder)
    for words in (["pack", folder, tmp_path / "m.upar"], ["compare", folder, place / "run"]):
        code, _, error = call(*words)
        assert code == 2 and fault in error


@pytest.mark.parametrize("training", [None, [1], "a", {"exporter": None}, {"exporter": [1]}])
def test_forged_training_is_one_line(call, tmp_path, training):
    step = save(tmp_path / "run", network()) / "step_000020"
    torch.save(training, step / "training.pt")
    reseal(step)
    code, _, error = call("compare", tmp_path / "run", tmp_path / "run")
    assert code == 2 and "no checkpoint with raw weights" in error


def test_scaling_of_rope_has_four_numbers():
    for value in ([1.0], [1.0, 2.0, 3.0, "4"]):
        with pytest.raises(Q.UserError, match="rope_scaling=.*must be 4 numbers"):
            Q.checked_config({**vars(network().config), "rope_scaling": value}, "x")
