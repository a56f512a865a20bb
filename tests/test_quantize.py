"""quantize.py: every command by values, against the exporter, numpy and transformers; damage and mistakes."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import test_smoke as smoke
import torch
from conftest import environment
from test_model import config

import quantize as Q
import train_gpt as T

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = T.Settings(layer_pattern="g s", model_dim=32, num_heads=4, num_kv_heads=2, mlp_mult=2.0, attn_window=7,
                      train_seq_len=64, matrix_bits=5, device="cpu")
LLAMA = dict(layer_pattern="a", num_layers=3, mlp="swiglu", mlp_mult=2.75, norm="rms_weight", qk_gain_init=0.0,
             logit_softcap=0.0, residual_mix=False)
OWN = T.quant_table(SETTINGS)
BYTES = T.load_tokenizer("bytes")
CLASSES = ("matrix", "embedding", "control")


def network(seed: int = 0, **changes) -> T.GPT:
    """A network none of whose parameters is at a special value."""
    torch.manual_seed(seed)
    net = T.GPT(config(BYTES.vocab_size, BYTES.bos_id, SETTINGS, **changes))
    with torch.no_grad():
        for param in net.parameters():
            param.add_(0.05 * torch.randn_like(param))
    return net


def save(folder: Path, net: T.GPT, step: int = 20, **parts: dict) -> Path:
    """A checkpoint of a run in `folder`, as train_gpt.py writes it; the run's folder."""
    folder.mkdir(exist_ok=True)
    meta = {"script": "train_gpt.py", "settings": dataclasses.asdict(SETTINGS), "step": step,
            "identity": {**vars(net.config), "manifest_sha256": "x", "seed": 1, "optimizer": "muon"}}
    with mock.patch.object(T, "KEEP_CHECKPOINTS", 9):
        T.save_checkpoint(folder, step, {"model": net.state_dict(), "training": parts}, meta)
    return folder


def table(**changes) -> T.QuantTable:
    """The table of SETTINGS with changes of the kind matrix_bits=3."""
    return T.quant_table(dataclasses.replace(SETTINGS, **changes))


def write(path: Path, net: T.GPT, own: T.QuantTable = OWN, coded: dict | None = None, **settings) -> dict:
    """What train_gpt.main() does at its end; pack_artifact's bytes by class."""
    tensors = net.state_dict()
    data, sizes = T.pack_artifact(tensors, T.quantize_all(tensors, own) if coded is None else coded,
                                  settings={**vars(net.config), **settings}, tokenizer_sha256=BYTES.sha256,
                                  meta={"seed": 1337, "tokenizer": "bytes"})
    path.write_bytes(data)
    return sizes


def table_of(output: str) -> dict[str, dict[str, str]]:
    """Rows of the table in a command's output, by first column; columns by head."""
    lines = [line.split() for line in output.splitlines()]
    begin = next(at for at, words in enumerate(lines) if words[0] == "class")
    head = [*lines[begin], "coder_counts"]  # `6-bit rans:4`, two words
    return {words[0]: dict(zip(head, words, strict=False)) for words in lines[begin + 1 :]}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A run's folder with a checkpoint of `network()`, and its artifact beside."""
    folder = tmp_path_factory.mktemp("quantize")
    save(folder / "run", network())
    write(folder / "run" / "model.upar", network())
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """The folder of a whole run of train_gpt.py: 12 steps, a checkpoint each 6, EMA, SWA, QAT, 5 bits."""
    folder, rng = tmp_path_factory.mktemp("trained"), random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 8))) for _ in range(120)]
    lines = [" ".join(rng.choices(words, k=rng.randint(4, 12))) for _ in range(2500)]
    texts = ["\n".join(lines[at : at + 10]) for at in range(0, len(lines), 10)]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    settings = environment(
        DATA_PATH=folder / "data", OUT_DIR=folder, RUN_ID="run", COMPILE=0, LAYER_PATTERN="g s1 g s1", MODEL_DIM=32,
        NUM_HEADS=2, NUM_KV_HEADS=1, ATTN_WINDOW=16, TRAIN_SEQ_LEN=32, TRAIN_BATCH_TOKENS=256, HOLDOUT_TOKENS=2048,
        EVAL_STRIDE=0, ITERATIONS=12, MAX_WALLCLOCK_SECONDS=0, RESERVE_SECONDS=0, SAVE_EVERY=6,
        MATRIX_BITS=5, LR_SCHEDULE="constant", SEED=7, GPTQ_CALIBRATION_BATCHES=0)
    prepare = [ROOT / "data/prepare.py", folder / "text.jsonl", "--out", folder / "data", "--vocab-size", "300",
               "--workers", "1"]
    for command, environ in ((prepare, environment()), ([ROOT / "train_gpt.py"], settings)):
        done = smoke.start(command, environ)
        assert done.returncode == 0, done.stderr
    return folder / "run"


def test_pack_is_the_exporter_on_a_run_of_train_gpt(call, trained, tmp_path):
    """The run's own artifact, byte for byte, of the weights that it chose; the others by its functions."""
    chosen = json.loads((trained / "result.json").read_text())["weights"]
    header, *_ = T.read_artifact(trained / "model.upar")
    training = torch.load(trained / "step_000012" / "training.pt", weights_only=True)
    files = set()
    for weights in ("raw", "ema", "swa"):
        out = tmp_path / f"{weights}.upar"
        assert call("pack", trained, out, "--weights", weights)[0] == 0
        tensors = torch.load(trained / "step_000012" / "model.pt", weights_only=True)
        if weights != "raw":
            assert training[weights]["count"] > 1
            tensors = dict(zip(tensors, training[weights]["values"], strict=True))
        coded = T.quantize_all(tensors, OWN)
        expected = T.pack_artifact(tensors, coded, settings=header["settings"],
                                   tokenizer_sha256=header["tokenizer_sha256"],
                                   meta={"seed": 7, "tokenizer": "tokenizer.model"})[0]
        assert out.read_bytes() == expected
        assert (expected == (trained / "model.upar").read_bytes()) == (weights == chosen)
        code, output, error = call("verify", trained / "model.upar", trained, "--weights", weights)
        assert code == (0 if weights == chosen else 1)
        assert ("byte for byte" in output) == (weights == chosen)
        if weights != chosen:
            assert "is not that of" in error or "times the error" in error or "its steps are not those of" in error
            assert f"the {weights} weights of {trained / 'step_000012'} (--weights)" in error
        files.add(expected)
    assert len(files) == 3


def test_the_weights_are_those_that_the_run_chose(call, trained, tmp_path):
    """Without --weights, as result.json says; of a run without one the raw weights."""
    run = shutil.copytree(trained, tmp_path / "run")
    result = json.loads((run / "result.json").read_text())
    files = {}
    for chosen in ("ema", "swa", "raw", ""):
        (run / "result.json").write_text(json.dumps({**result, "weights": chosen}))
        for at, model in enumerate((run, run / "step_000012")):
            out = tmp_path / f"{at}{chosen}.upar"
            assert call("pack", model, out)[0] == 0
            files.setdefault(chosen, set()).add(out.read_bytes())
    assert files[""] == files["raw"] and [len(found) for found in files.values()] == [1] * 4
    assert len(set.union(*files.values())) == 3
    shutil.copy(trained / "result.json", run)
    assert files[result["weights"]] == {(trained / "model.upar").read_bytes()}
    for words in (["verify", trained, trained], ["info", trained, "--checkpoint", trained]):
        code, output, error = call(*words)
        assert code == 0 and ("byte for byte" in output) == (words[0] == "verify"), error


def test_the_tokenizer_is_copied_beside_what_is_written(call, trained, tmp_path):
    """sample.py finds it there; that of another model in the way is not replaced."""
    tokenizer = (trained / "tokenizer.model").read_bytes()
    out = tmp_path / "new"
    for folder in ("new", "new/deeper", "other"):
        (tmp_path / folder).mkdir()
    assert call("pack", trained, out / "a.upar")[0] == 0
    assert (out / "tokenizer.model").read_bytes() == tokenizer
    assert call("unpack", out / "a.upar", out / "deeper" / "folder")[0] == 0
    assert (out / "deeper" / "tokenizer.model").read_bytes() == tokenizer
    command = [sys.executable, str(ROOT / "sample.py")]
    environ = environment(ARTIFACT=out / "a.upar", PROMPT="a", MAX_NEW_TOKENS=3)
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (tmp_path / "other" / "tokenizer.model").write_bytes(b"mine")
    for words in (["pack", trained], ["unpack", trained]):
        code, _, error = call(*words, tmp_path / "other" / "b")
        assert code == 2 and "tokenizer.model is of another model; choose another folder" in error
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["tokenizer.model"]
    (out / "tokenizer.model").unlink()
    (out / "deeper" / "tokenizer.model").unlink()
    code, _, error = call("pack", out / "a.upar", tmp_path / "c.upar")
    assert code == 0 and error.endswith("sample.py needs TOKENIZER_PATH, for no tokenizer.model was found to copy\n")
    words = "pack", trained / "step_000012", tmp_path / "d.upar"
    assert call(*words, TOKENIZER_PATH=trained / "tokenizer.model")[0] == 0
    assert (tmp_path / "tokenizer.model").read_bytes() == tokenizer


def test_forged_headers_are_one_line(call, tmp_path):
    """Whatever a header claims, with all sums right: each command works or says what is wrong."""
    path = tmp_path / "m.upar"
    write(path, network())
    data = path.read_bytes()
    magic, version, length, _ = Q.ARTIFACT_PREFIX.unpack_from(data)
    frame = data[Q.ARTIFACT_PREFIX.size :][:length]
    rest = data[Q.ARTIFACT_PREFIX.size + length : -32]

    def forge(*place: object, value: object) -> str:
        header = json.loads(Q.zstandard.ZstdDecompressor().stream_reader(frame).read())
        part = header
        for key in place[:-1]:
            part = part[key]
        part[place[-1]] = value
        text = Q.zstandard.ZstdCompressor().compress(json.dumps(header).encode())
        forged = Q.ARTIFACT_PREFIX.pack(magic, version, len(text), Q.zlib.crc32(text)) + text + rest
        path.write_bytes(forged + Q.hashlib.sha256(forged).digest())
        code, _, error = call("info", path)
        return error if code else ""

    for key in ("settings", "meta", "tokenizer_sha256"):
        assert f"the header's {key} is none" in forge(key, value=5)
    for key in ("class", "shape", "dtype", "length", "crc32", "bits", "scale"):
        for value in (5, "x", [], {}, None, -1.5):
            for name in ("tables", "embed", "blocks.0.mix"):
                forge("streams", name, key, value=value)  # `call` asserts one line


def test_pack_takes_settings_above_the_checkpoints_and_else_its_widened_steps(call, tmp_path):
    wide = {kind: {**own, "widen": widen} for (kind, own), widen in zip(OWN.items(), (1.7, 1.3), strict=True)}
    run = save(tmp_path / "run", network(), exporter={"table": wide})
    config_file, other = tmp_path / "c.env", tmp_path / "e"
    four = {**wide, "matrix": table(matrix_bits=4)["matrix"]}
    for at, (line, changes, expected) in enumerate((
            ("", {}, wide), ("", dict(MATRIX_BITS=4), four), ("MATRIX_BITS=4", {}, four),
            ("MATRIX_BITS=6", dict(MATRIX_BITS=4), four))):
        config_file.write_text(line)
        out = tmp_path / f"{at}.upar"
        code, output, _ = call("pack", run, out, CONFIG=config_file, **changes)
        sizes = write(other, network(), expected)
        assert code == 0 and out.read_bytes() == other.read_bytes()
        said = f"{sum(sizes.values())} bytes; " + " ".join(f"{name}:{size}" for name, size in sizes.items())
        assert output == f"{out}: {said}\n"


@pytest.mark.parametrize("bits", [2, 5, 8])
def test_unpacked_and_packed_again_is_the_same_file(call, tmp_path, bits):
    net = network()
    with torch.no_grad():
        net.blocks[0].mlp.w_down.zero_()  # a scale of 0
    first, second, folder = tmp_path / "a.upar", tmp_path / "b.upar", tmp_path / "folder"
    write(first, net, table(matrix_bits=bits))
    assert call("unpack", first, folder)[:2] == (0, f"{folder}: {len(net.state_dict())} tensors\n")
    held = torch.load(folder / "model.pt", weights_only=True)
    _, expected, _ = T.read_artifact(first)
    assert list(held) == list(expected) and all(torch.equal(held[name], expected[name]) for name in expected)
    net.load_state_dict(held)
    assert call("pack", folder, second)[0] == 0
    assert second.read_bytes() == first.read_bytes()
    code, output, _ = call("verify", second, folder)
    assert code == 0 and table_of(output)["all"]["rel_frobenius"] == "0" and "byte for byte" in output


def hessians(net: T.GPT) -> dict[str, torch.Tensor]:
    ids = torch.randint(2, 260, (16, 64), generator=torch.Generator().manual_seed(5))
    with torch.no_grad(), T.Hessians(net) as taps:
        net(ids)
    return taps.sums


def test_codes_by_gptq_stay_as_they_are(call, place, tmp_path):
    """They are not what `pack` makes of the checkpoint; the artifact hands them on, verify knows them."""
    net, tensors = network(), network().state_dict()
    wide = {kind: {**own, "widen": 1.23} for kind, own in OWN.items()}
    coded = T.quantize_all(tensors, wide)
    for name, hessian in hessians(net).items():
        if name in coded:
            coded[name].codes = T.gptq(tensors[name], coded[name].scale, coded[name].bits, hessian)
    write(tmp_path / "g.upar", net, coded=coded)
    for model in ("g.upar", "folder"):
        if model == "folder":
            assert call("unpack", tmp_path / "g.upar", tmp_path / model)[0] == 0
        assert call("pack", tmp_path / model, tmp_path / f"{model}.again")[0] == 0
        assert (tmp_path / f"{model}.again").read_bytes() == (tmp_path / "g.upar").read_bytes()
    code, output, _ = call("verify", tmp_path / "g.upar", place / "run")
    assert code == 0 and "byte for byte" not in output and "by GPTQ or with steps fitted" in output
    codes = {name: part.codes for name, part in coded.items()}
    assert any((part.codes != codes[name]).any() for name, part in T.quantize_all(tensors, wide).items())


def test_info_against_numbers_by_hand(call, place, tmp_path):
    """Bytes by write_artifact's own count, entropy by numpy over the quantizer's codes, the table's sums."""
    net, path = network(), tmp_path / "m.upar"
    sizes = write(path, net)
    code, output, error = call("info", path, "--tensors", "--checkpoint", place / "run")
    rows, (header, read, coded) = table_of(output), T.read_artifact(path)
    assert (code, error) == (0, "") and str(vars(net.config)) in output
    records = {name: record for name, record in header["streams"].items() if record["class"] != "coder"}
    coder = {f"({name})" for name in header["streams"].keys() - records.keys()}
    assert coder == {"(lane_states)", "(tables)", "(sizes)"}
    assert set(rows) == {*records, *CLASSES, *coder, "(header)", "total"}
    found = {name.strip("()"): int(rows[name]["bytes"]) for name in (*CLASSES, "(header)")}
    assert {**found, "coder": sum(int(rows[name]["bytes"]) for name in coder)} == sizes
    entropies = dict.fromkeys(CLASSES, 0.0)
    for name, record in records.items():
        row, w = rows[name], net.state_dict()[name]
        assert (row["tensors"], row["weights"], row["bytes"]) == ("1", str(w.numel()), str(record["length"]))
        assert float(row["bits/weight"]) == pytest.approx(8 * record["length"] / w.numel(), rel=1e-4)
        assert float(row["error"]) == pytest.approx(((read[name] - w).norm() / w.norm()).item(), rel=1e-3)
        bits = record.get("bits", 8 * np.dtype(record["dtype"]).itemsize)
        assert row["coders"] == f"{bits}-bit" and row["coder_counts"] == "rans:1" if name in coded else "zstd:1"
        if name in coded:
            counts = np.bincount(T.quantize(w, **OWN[record["class"]])[0].ravel().int() + 128)
            share = counts[counts > 0] / w.numel()
            entropies[record["class"]] -= (share * np.log2(share)).sum() * w.numel()
        assert (row["entropy"] == "-") == (name not in coded)
    for kind in ("matrix", "embedding"):
        assert float(rows[kind]["entropy"]) == pytest.approx(entropies[kind] / int(rows[kind]["weights"]), rel=1e-4)
    for kind in (*CLASSES, "total"):
        names = [name for name, record in records.items() if kind in ("total", record["class"])]
        assert int(rows[kind]["weights"]) == sum(read[name].numel() for name in names)
        error = distance(net.state_dict(), read, kind.replace("total", "all"))[0]
        assert float(rows[kind]["error"]) == pytest.approx(error, rel=1e-3)
    assert int(rows["total"]["bytes"]) == path.stat().st_size == sum(sizes.values())
    short = table_of(call("info", path)[1])
    assert short == {name: {**row, "error": "-"} for name, row in rows.items() if name not in records}


def distance(a: dict, b: dict, kind: str) -> list[float]:
    """Relative Frobenius norm, MSE, max, cosine, SNR of a class, from the definitions."""
    names = [name for name in a if kind in ("all", T.tensor_class(name, a[name]))]
    x, y = (np.concatenate([each[name].double().numpy().ravel() for name in names]) for each in (a, b))
    norm = np.linalg.norm
    return [norm(y - x) / norm(x), np.mean((y - x) ** 2), np.abs(y - x).max(), x @ y / norm(x) / norm(y),
            20 * np.log10(norm(x) / norm(y - x))]


COLUMNS = ("rel_frobenius", "mse", "max", "cosine", "snr_db")


def test_compare_and_verify_print_distances(call, place, tmp_path):
    write(tmp_path / "b.upar", network(), table(matrix_bits=3))
    first, (_, second, _) = network().state_dict(), T.read_artifact(tmp_path / "b.upar")
    _, packed, _ = T.read_artifact(place / "run" / "model.upar")
    compared = call("compare", place / "run", tmp_path / "b.upar")[1]
    code, verified, _ = call("verify", place / "run" / "model.upar", place / "run")
    lines = verified.splitlines(keepends=True)
    whose = f"the raw weights of {place / 'run' / 'step_000020'}"
    assert code == 0 and lines[-2].endswith(f"what `pack` makes of {whose}, byte for byte\n")
    assert lines[-1].endswith(f"whole, {len(first)} tensors, SHA-256 {T.sha256_file(place / 'run/model.upar')}\n")
    for output, other in ((compared, second), ("".join(lines[:-2]), packed)):
        rows = table_of(output)
        assert list(rows) == [*CLASSES, "all"]
        for kind, row in rows.items():
            assert [float(row[column]) for column in COLUMNS] == pytest.approx(distance(first, other, kind), rel=2e-4)
    same = table_of(call("compare", tmp_path / "b.upar", tmp_path / "b.upar")[1])
    assert all([row[column] for column in COLUMNS] == ["0", "0", "0", "1", "inf"] for row in same.values())


def test_compare_of_zeros_and_of_other_shapes(call, tmp_path):
    folders = []
    for name, level in (("zero", 0.0), ("half", 0.5)):
        net = network()
        with torch.no_grad():
            for param in (param for key, param in net.named_parameters() if T.tensor_class(key, param) == "matrix"):
                param.fill_(level)
        folders.append(save(tmp_path / name, net))
    for other, expected in ((folders[1], ["inf", "0.25", "0.5", "-", "-inf"]), (folders[0], ["-", "0", "0", "-", "-"])):
        row = table_of(call("compare", folders[0], other)[1])["matrix"]
        assert [row[column] for column in COLUMNS] == expected
    for changes, said in ((dict(mlp_mult=3.0), "tensor 'blocks.0.mlp.w_up': [64, 32] in "),
                          (dict(norm="layer"), "tensor 'blocks.0.mixer_norm.weight': missing in ")):
        code, _, error = call("compare", folders[0], save(tmp_path / said[8:14], network(**changes)))
        assert code == 2 and said in error


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
    assert "step_1000000 is damaged and skipped: model.pt; " in error and not (tmp_path / "none.upar").exists()


def test_damaged_artifacts_are_named_in_one_line(call, place, tmp_path):
    data, path = (place / "run" / "model.upar").read_bytes(), tmp_path / "damaged.upar"
    places = [0, 9, 20, 35, len(data) // 3, len(data) // 2, len(data) - 1]
    for each in [*(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :] for at in places), data[:100], b"", data + b"\0"]:
        path.write_bytes(each)
        code, _, error = call("verify", path)
        assert code == 1 and str(path) in error
    for command in (["info", path], ["unpack", path, tmp_path / "u"], ["compare", path, place / "run"],
                    ["export", path, tmp_path / "e"], ["pack", path, tmp_path / "p"]):
        code, _, error = call(*command)
        assert code == 2 and "the SHA-256 is wrong" in error
    assert list(tmp_path.iterdir()) == [path]


def test_verify_says_no(call, place, tmp_path):
    artifact, net = tmp_path / "m.upar", network()
    for settings, said in (
            (dict(mlp_mult=3.0), "size mismatch"), (dict(layers="g s g", norms="rms rms rms"), "Missing key"),
            (dict(num_heads=0), "division"), (dict(mlp="relu3"), "'wave'"), (dict(logit_softcap=1e39), "not finite")):
        write(artifact, net, **settings)
        code, _, error = call("verify", artifact)
        assert code == 1 and f"{artifact}: its settings rebuild no model: " in error and said in error
    write(artifact, net)
    assert call("verify", artifact)[1].startswith(f"{artifact}: whole, {len(net.state_dict())} tensors, SHA-256 ")
    code, _, error = call("verify", artifact, place / "run", MATRIX_BITS=4)
    assert code and "tensor 'mixers.0.w_qkvg': 5 bits, 4 by the settings of" in error, error
    write(artifact, net, attn_window=9)
    assert "its settings are not those of" in call("verify", artifact, place / "run")[2]
    with mock.patch.object(BYTES, "sha256", "0" * 64):
        write(artifact, net)
    assert "its tokenizer is not " in call("verify", artifact, place / "run")[2]
    for name, change, said in (
            ("mixers.1.w_o", lambda w: w * 1.01, "tensor 'mixers.1.w_o': its steps are not those of"),
            ("mixers.1.w_o", lambda w: w.flip(0), "times the error of the nearest codes to the raw weights of"),
            ("embed", lambda w: w.roll(1, 0), "times the error of the nearest codes"),
            ("mixers.0.dt_bias", lambda w: w + 1e-6, "tensor 'mixers.0.dt_bias': is not that of"),
            ("blocks.1.mlp_scale", lambda w: w * 1.001, "tensor 'blocks.1.mlp_scale': is not that of")):
        net = network()
        with torch.no_grad():
            (param := net.get_parameter(name)).copy_(change(param.clone()))
        write(artifact, net)
        code, _, error = call("verify", artifact, place / "run")
        assert code == 1 and said in error, (name, said, error)
    write(artifact, network(mlp_mult=3.0))
    code, _, error = call("verify", artifact, place / "run")
    assert code == 1 and "tensor 'blocks.0.mlp.w_up': [64, 32]" in error


@pytest.mark.parametrize(("words", "changes", "said"), [
    ([], {}, "the following arguments are required: COMMAND"), (["inof"], {}, "invalid choice: 'inof'"),
    (["info"], {}, "arguments are required: ARTIFACT"), (["info", "a", "b"], {}, "unrecognized arguments: b; "),
    (["compare", "{artifact}", "{run}", "--tensors"], {}, "unrecognized arguments: --tensors"),
    (["pack", "{run}", "{new}", "--weights", "best"], {}, "invalid choice: 'best'"),
    (["info", "{early}"], {}, "no such file; a run's artifact is runs/<RUN_ID>/model.upar"),
    (["info", "{new}"], {}, "no such file"), (["verify", "{new}"], {}, "no such file"),
    (["pack", "{new}", "{new}"], {}, "no such file"),
    (["pack", "{run}", "{artifact}"], {}, "exists already, or its folder does not"),
    (["unpack", "{artifact}", "{new}/x"], {}, "exists already, or its folder"),
    (["pack", "{run}", "{new}", "--weights", "ema"], {}, "no checkpoint with ema weights"),
    (["pack", "{early}", "{new}", "--weights", "ema"], {}, "with ema weights: none had been collected when it was"),
    (["compare", "{run}", "{early}", "--weights", "swa"], {}, "no checkpoint with swa weights"),
    (["pack", "{place}", "{new}"], {}, "no whole checkpoint"),
    (["pack", "{run}", "{new}"], {"MATRIX_BITS": 9}, "MATRIX_BITS=9: must be a whole number from 2 to 8"),
    (["info", "{artifact}"], {"MATRIX_BIT": 4}, "no setting of this script; did you mean MATRIX_BITS?"),
    (["info", "{artifact}"], {"MODEL_DIM": 4}, "MODEL_DIM='4': no setting of this script"),
    (["pack", "{artifact}", "{new}"], {"MATRIX_BITS": 4}, "MATRIX_BITS: the weights of {artifact} are quantized"),
    (["pack", "{artifact}", "{new}"], {"CONFIG": "{config}"}, "MATRIX_BITS: the weights of {artifact} are quantized"),
    (["pack", "{run}", "{new}"], {"TOKENIZER_PATH": "nowhere.model"}, "tokenizer nowhere.model: [Errno 2] "),
    (["pack", "{foreign}", "{new}"], {}, "TOKENIZER_PATH='': bytes has 264 tokens; must be the token"),
    (["pack", "{foreign}", "{new}"], {"TOKENIZER_PATH": "bytes"}, "'bytes': bytes has 264 tokens; must be the token"),
    (["pack", "{broken}", "{new}"], {}, "tensor embed: must be finite as it is stored"),
])
def test_mistakes_are_one_line_and_exit_code_2(call, place, tmp_path, words, changes, said):
    for name, net in (("foreign", T.GPT(T.model_config(SETTINGS, 300, 1))), ("broken", network())):
        if "{" + name + "}" in words:
            with torch.no_grad():
                net.embed[5, 5] = math.nan
            save(tmp_path / name, net)
    before_qat = dict(values=[*network(5).parameters()], count=0)  # what had been collected is of no use since
    save(tmp_path / "early", network(), ema=before_qat, swa=dict(values=[], count=0))
    names = {"artifact": place / "run" / "model.upar", "run": place / "run", "place": place, "new": tmp_path / "new",
             "foreign": tmp_path / "foreign", "broken": tmp_path / "broken", "early": tmp_path / "early"}
    names["config"] = tmp_path / "c.env"
    names["config"].write_text("MATRIX_BITS=4\n")
    changes = {name: str(value).format(**names) for name, value in changes.items()}
    code, _, error = call(*(word.format(**names) for word in words), **changes)
    assert code == 2 and said.format(**names) in error
    assert not (tmp_path / "new").exists()


def test_without_safetensors(place, tmp_path):
    (tmp_path / "safetensors.py").write_text("raise ImportError\n")
    save(tmp_path / "llama", network(**LLAMA))
    command = [sys.executable, ROOT / "quantize.py", "export", tmp_path / "llama", tmp_path / "x"]
    done = subprocess.run(command, env={**environment(), "PYTHONPATH": str(tmp_path)}, text=True, capture_output=True)
    assert done.returncode == 2 and done.stderr == "error: export needs safetensors: pip install safetensors\n"


def test_what_cannot_be_written_is_one_line_and_leaves_nothing(place, tmp_path):
    """A disk that is full after 20 kB: no folder that would be taken for a model, and none that is in the way."""
    save(tmp_path / "llama", network(**LLAMA))
    out, artifact = tmp_path / "new", place / "run" / "model.upar"
    for words, blocks in ((["unpack", artifact, out], 20), (["export", tmp_path / "llama", out], 20),
                          (["unpack", artifact, out], 100)):
        if words[0] == "export":
            pytest.importorskip("safetensors")
        command = [sys.executable, str(ROOT / "quantize.py"), *map(str, words)]
        done = subprocess.run(["bash", "-c", f'ulimit -f {blocks} && "$@"', "bash", *command], env=environment(),
                              capture_output=True, text=True)
        assert done.returncode == 1 and not out.exists() and done.stderr.count("\n") == 1, done.stderr
        assert done.stderr.startswith(f"error: {out}: cannot be written: "), done.stderr


def test_a_folder_is_as_small_as_its_weights_and_may_be_renamed(call, place, tmp_path):
    for words in (["pack", place / "run", f"{tmp_path}/a.upar/"], ["unpack", tmp_path / "a.upar", f"{tmp_path}/b/"]):
        assert call(*words)[0] == 0
    (tmp_path / "b").rename(tmp_path / "b.v2")  # a dot in its name does not make it half-written
    assert call("compare", tmp_path / "b.v2", tmp_path / "a.upar")[0] == 0
    # a view would be stored with all that it is a view of
    weights, tensors = sum(param.numel() for param in network().parameters()), len(network().state_dict())
    assert 4 * weights < (tmp_path / "b.v2" / "model.pt").stat().st_size < 4 * weights + 400 * tensors


def test_help_names_every_command_and_says_what_it_does(capsys):
    with mock.patch.object(sys, "argv", ["quantize.py", "--help"]), pytest.raises(SystemExit) as exit:
        Q.main()
    output = capsys.readouterr().out
    commands = "info unpack pack verify compare export bitdelta deltaquant apply".split()
    assert exit.value.code == 0 and [run.__name__ for run in Q.COMMANDS] == commands
    words = " ".join(output.split())
    assert all(f"{run.__name__} {' '.join(run.__doc__.split())[:60]}" in words for run in Q.COMMANDS)


@pytest.mark.parametrize("changes", [{}, dict(tie_embeddings=False, num_kv_heads=4), dict(num_kv_heads=1)])
@pytest.mark.parametrize("kind", ["checkpoint", "artifact"])
def test_transformers_computes_the_same_logits_from_an_export(call, tmp_path, changes, kind):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    net, model = network(**{**LLAMA, **changes}), tmp_path / "m.upar"
    if kind == "artifact":
        write(model, net)
        net.load_state_dict(T.read_artifact(model)[1])
    else:
        save(model, net)
    code, output, error = call("export", model, tmp_path / "hf")
    assert code == 0 and "transformers loads them as LlamaForCausalLM" in output, error
    theirs, loading = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32,
                                                                        output_loading_info=True)
    assert type(theirs) is transformers.LlamaForCausalLM
    assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), loading
    assert sum(param.numel() for param in theirs.parameters()) == sum(param.numel() for param in net.parameters())
    ids = torch.randint(2, 260, (2, 50), generator=torch.Generator().manual_seed(3))
    ids[:, 0] = BYTES.bos_id
    with torch.no_grad():
        ours = net(ids)
        assert (ours - theirs(ids).logits).abs().max() < 1e-4 < ours.std() / 100
    assert theirs.generation_config.eos_token_id == BYTES.bos_id


@pytest.mark.parametrize(("changes", "said"), [
    (dict(layer_pattern="a s"), "layers='a s a'"), (dict(layer_pattern="g"), "layers='g g g'"),
    (dict(layer_pattern="A1"), "layers='A1 A1 A1'"), (dict(norm="rms"), "norms='rms rms rms'"),
    (dict(mlp="gelu"), "mlp='gelu'"),
    (dict(qk_gain_init=2.0), "qk_gain_init=2.0"), (dict(residual_mix=True), "residual_mix=True"),
    (dict(logit_softcap=30.0), "logit_softcap=30.0"), (dict(positions="none"), "positions='none'"),
    (dict(rope_dims=4), "rope_dims=4"), (dict(unet_skips=True), "unet_skips=True"),
    (dict(bigram_vocab_size=50), "bigram_vocab_size=50"),
])
def test_other_layouts_are_refused_by_name(call, tmp_path, changes, said):
    write(tmp_path / "m.upar", network(**{**LLAMA, **changes}))
    code, _, error = call("export", tmp_path / "m.upar", tmp_path / "hf")
    assert code == 2 and error.endswith(f"transformers' LlamaForCausalLM has no {said}\n")
    assert not (tmp_path / "hf").exists()


# ------------------------------------------------------------------------------------------------------------ the guide
def guide() -> list[str]:
    """The command lines of docs/quantization.md."""
    text = (ROOT / "docs" / "quantization.md").read_text(encoding="utf-8")
    return [line for block in re.findall(r"^```bash\n(.*?)^```", text, re.M | re.S) for line in block.splitlines()]


@pytest.fixture
def named(trained, tmp_path, monkeypatch) -> Path:
    """The present folder, with what the guide's commands name: data/mine, runs/base, runs/tuned and runs/llama.

    Base is the run of train_gpt.py, tuned the same with noise on its weights, both packed from their EMA.
    """
    (tmp_path / "data").mkdir()
    (tmp_path / "runs").mkdir()
    shutil.copytree(trained.parent / "data", tmp_path / "data" / "mine")
    base, tuned = (shutil.copytree(trained, tmp_path / "runs" / name) for name in ("base", "tuned"))
    last = base / "step_000012"
    tensors, training = (torch.load(last / name, weights_only=True) for name in ("model.pt", "training.pt"))
    torch.manual_seed(0)
    for each in (*tensors.values(), *training["ema"]["values"], *training["swa"]["values"]):
        each.add_(0.02 * torch.randn_like(each))
    shutil.rmtree(tuned / last.name)
    meta = json.loads((last / "meta.json").read_bytes())
    T.save_checkpoint(tuned, 12, {"model": tensors, "training": training}, meta)
    save(tmp_path / "runs" / "llama", network(**LLAMA))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_guides_commands_run(call, named):
    """Every `python quantize.py` of docs/quantization.md, in its order; what the guide says of some of them."""
    pytest.importorskip("safetensors")
    (named / "runs" / "base" / "model.upar").unlink()
    assert call("pack", "runs/base", "runs/base/model.upar", "--weights", "ema")[0] == 0
    said = {}
    for command in guide():
        words = shlex.split(command)
        script = words.index("python") + 1
        if words[script] == "quantize.py":
            changes = dict(word.split("=", 1) for word in words[: script - 1])
            code, output, error = call(*words[script + 1 :], **{**changes, "DISTILL_STEPS": 5})
            assert code == 0 and output, (command, error)
            said[words[script + 1], words[-1]] = output
    assert len(said) == 13 and {command for command, _ in said} == {run.__name__ for run in Q.COMMANDS}
    assert (named / "again.upar").read_bytes() == (named / "int4.upar").read_bytes()
    assert "4-bit rans:" in call("info", "int4.upar")[1] and "4-bit rans:" in call("info", "tuned.upar")[1]
    assert "byte for byte" in said["verify", "ema"]
    assert "bits per byte of validation: base " in said["bitdelta", "--score"]
    assert sorted(path.name for path in (named / "huggingface").iterdir()) == [
        "SHA256SUMS", "config.json", "model.safetensors"]
    sizes = [(named / f"tuned{each}.delta").stat().st_size for each in ("2", "3")]
    assert (named / "tuned.delta").exists() and sizes[0] < sizes[1]


@pytest.mark.full
def test_the_guides_other_commands_run(trained, named):
    """Those of train_gpt.py, as they stand there, by bash; the environment makes them tiny."""
    (named / "bin").mkdir()
    (named / "bin" / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (named / "bin" / "python").chmod(0o755)
    for name in ("train_gpt.py", "tools", "configs"):
        (named / name).symlink_to(ROOT / name)
    sizes = {name: json.loads((trained / "result.json").read_bytes())["settings"][name.lower()] for name in """
        LAYER_PATTERN MODEL_DIM NUM_HEADS NUM_KV_HEADS ATTN_WINDOW TRAIN_SEQ_LEN TRAIN_BATCH_TOKENS HOLDOUT_TOKENS
        EVAL_STRIDE ITERATIONS MAX_WALLCLOCK_SECONDS RESERVE_SECONDS""".split()}
    environ = environment(**sizes, COMPILE=0)
    environ["PATH"] = f"{named / 'bin'}:{environ['PATH']}"
    others = [command for command in guide() if "quantize.py" not in command]
    for command in others:
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", command], cwd=named, env=environ, capture_output=True,
                              text=True, timeout=300)
        assert done.returncode == 0, f"{command}: {done.stdout[-500:]} {done.stderr[-1500:]}"
    small, coarse, nearest = (json.loads((named / "runs" / name / "result.json").read_bytes())
                              for name in ("small", "coarse", "nearest"))
    assert small["total_bytes"] <= 400000 and small["settings"]["artifact_bytes_max"] == 400000
    assert coarse["artifact_bytes"] < nearest["artifact_bytes"] and "qat" not in nearest["phases"]
    assert len(others) == 3


def test_the_guide_names_settings_and_constants_that_exist():
    text = (ROOT / "docs" / "quantization.md").read_text(encoding="utf-8")
    names = set(re.findall(r"(?:`|\b)([A-Z][A-Z_]{2,}[A-Z])(?:`|=)", text))
    known = {name.upper() for module in (Q, T) for name in module.Settings.__dataclass_fields__}
    known |= {name for name in names if hasattr(T, name)}
    others = names & (set(T.sibling_settings()) - known)
    assert len(names) > 10 and names - known - others == set() and others == {"ARTIFACT", "LORA_RANK", "MODE"}


def test_bits_of_a_normal_tensor_are_those_of_the_guide():
    """Entropy of a normal variable in steps of d sigmas: log2(2 pi e) / 2 - log2(d)."""
    defaults, normal = T.quant_table(T.Settings()), torch.randn(512, 1024, generator=torch.Generator().manual_seed(0))
    for kind, step, bits in (("matrix", 0.258, 4.0), ("embedding", 0.047, 6.5)):
        codes, scales = T.quantize(normal, **defaults[kind])
        share = np.bincount(codes.numpy().ravel().astype(int) + 128) / normal.numel()
        entropy = -(share[share > 0] * np.log2(share[share > 0])).sum()
        assert scales.item() == pytest.approx(step, rel=0.01) and entropy == pytest.approx(bits, abs=0.06)
        assert entropy == pytest.approx(2.05 - math.log2(scales.item()), abs=0.01)
