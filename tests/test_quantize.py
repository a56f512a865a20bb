"""quantize.py: every command by values, against the exporter; damage, mistakes."""

import contextlib
import dataclasses
import json
import math
import random
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import test_model
import torch
from faults import limit
from test_artifact import header_of, signed
from test_lasting import repair

import quantize as Q
import sample as S
import train_dpo as D
import train_gpt as T
from conftest import (
    ROOT,
    TINY,
    add_noise,
    blocks,
    environment,
    mutated,
    read_json,
    start,
    write_json,
)

SETTINGS = dataclasses.replace(
    test_model.SETTINGS, layer_pattern="g s", qk_gain_init=4.0, matrix_bits=5, device="cpu"
)


TABLE = T.quant_table(SETTINGS.matrix_bits)
BYTES = Q.read_tokenizer("bytes", None)
CLASSES = ("matrix", "embedding", "control")
WEIGHTS = ("raw", "ema", "swa")


def network(seed=0, **changes):
    """Return a network none of whose parameters is at a special value."""
    torch.manual_seed(seed)
    net = T.GPT(test_model.config(BYTES.vocab_size, BYTES.bos_id, SETTINGS, **changes))
    add_noise(net, 0.05)
    return net


def save(folder, net, step=20, **parts):
    """Write a checkpoint of a run in `folder`, as train_gpt.py does. Return the run's folder."""
    folder.mkdir(exist_ok=True)
    meta = {"settings": dataclasses.asdict(SETTINGS), "step": step, "shape": vars(net.config)}
    with mock.patch.object(T, "KEEP_CHECKPOINTS", 9):
        T.save_checkpoint(folder, step, {"model": net.state_dict(), "training": parts}, meta)
    return folder


def table(widen=1.0, bits=SETTINGS.matrix_bits):
    return T.quant_table(bits, widen)


def write(path, net, table=TABLE, coded=None, **settings):
    """Write the artifact that train_gpt.main() writes at its end, with settings changed."""
    tensors = net.state_dict()
    header = {"settings": {**vars(net.config), **settings}, "tokenizer_sha256": BYTES.sha256}
    header["meta"] = {"seed": 1337, "tokenizer": "bytes"}
    coded = T.quantize_all(tensors, table) if coded is None else coded
    path.write_bytes(T.pack_artifact(tensors, coded, **header))


def table_of(output):
    """Return the rows of the table in a command's output, by first column; columns by head."""
    lines = [line.split() for line in output.splitlines() if line.strip()]
    begin = next(i for i, words in enumerate(lines) if words[0] == "class")
    head = [*lines[begin], "coder_counts"]  # `6-bit rans:4`, two words
    return {words[0]: dict(zip(head, words, strict=False)) for words in lines[begin + 1 :]}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return a folder with a run, a checkpoint of `network()` and its artifact, and faulty runs."""
    folder = tmp_path_factory.mktemp("quantize")
    save(folder / "run", network())
    write(folder / "run" / "model.upar", network())
    save(folder / "foreign", T.GPT(T.model_config(SETTINGS, 300, 1)))
    broken = network()
    broken.embed.data[5, 5] = math.nan
    save(folder / "broken", broken)
    # What had been collected before QAT is of no use since.
    save(folder / "early", network(), ema=dict(values=[*network(5).parameters()], count=0))
    (folder / "damaged.upar").write_bytes((folder / "run" / "model.upar").read_bytes()[:-1])
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
    """Byte for byte, of the weights that are asked for, or else of those that result.json names."""
    run = shutil.copytree(trained, tmp_path / "run")
    last = run / "step_000012"
    result = read_json(run / "result.json")
    header, *_ = T.read_artifact(run / "model.upar")
    names = ("settings", "tokenizer_sha256")
    header = {name: header[name] for name in names}
    header["meta"] = {"seed": 7, "tokenizer": "tokenizer.model"}
    training = torch.load(last / "training.pt", weights_only=True)
    files = {}
    for weights in WEIGHTS:
        tensors = torch.load(last / "model.pt", weights_only=True)
        if weights != "raw":
            assert training[weights]["count"] > 1
            tensors = dict(zip(tensors, training[weights]["values"], strict=True))
        files[weights] = T.pack_artifact(tensors, T.quantize_all(tensors, TABLE), **header)
        assert call("pack", run, tmp_path / weights, "--weights", weights)[0] == 0
        assert (tmp_path / weights).read_bytes() == files[weights]
        code, output, _ = call("verify", run, run, "--weights", weights)
        assert (code == 0) == ("byte for byte" in output) == (weights == result["weights"])
    assert files[result["weights"]] == (run / "model.upar").read_bytes()
    assert len(set(files.values())) == 3
    for chosen in (*WEIGHTS, ""):
        write_json(run / "result.json", {**result, "weights": chosen})
        for i, model in enumerate((run, last)):
            assert call("pack", model, tmp_path / f"{i}{chosen}.upar")[0] == 0
            assert (tmp_path / f"{i}{chosen}.upar").read_bytes() == files[chosen or "raw"]


def test_the_tokenizer_is_copied_beside_what_is_written(call, trained, tmp_path):
    """There sample.py finds it; that of another model is not replaced."""
    content = (trained / "tokenizer.model").read_bytes()
    new, deeper, other = tmp_path / "new", tmp_path / "new" / "deeper", tmp_path / "other"
    for folder in (new, deeper, other):
        folder.mkdir()
    assert call("pack", trained, new / "a.upar")[0] == 0
    assert call("unpack", new / "a.upar", deeper / "folder")[0] == 0
    assert {(folder / "tokenizer.model").read_bytes() for folder in (new, deeper)} == {content}
    assert (
        "tokenizer.model" not in call("pack", trained, new / "b.upar")[1]
    )  # an equal one is there
    (other / "tokenizer.model").write_bytes(b"mine")
    for command in ("pack", "unpack"):
        code, _, error = call(command, trained, other / "b")
        assert code == 2 and "of another model" in error
    assert [path.read_bytes() for path in other.iterdir()] == [b"mine"]
    (new / "tokenizer.model").unlink()
    code, _, error = call("pack", new / "a.upar", tmp_path / "c.upar")
    assert code == 0 and str(tmp_path / "tokenizer.model") in error
    given = (tmp_path / "given.model", trained / "tokenizer.model")
    given[0].write_bytes(content)
    for path, words in (
        (given[0], ["pack", new / "a.upar"]),
        (given[0], ["unpack", new / "a.upar"]),
        (given[1], ["pack", trained / "step_000012"]),
    ):
        code, _, error = call(*words, tmp_path / "out", TOKENIZER_PATH=path)
        assert code == 0 and not error
        assert (tmp_path / "tokenizer.model").read_bytes() == content
        (tmp_path / "tokenizer.model").unlink()
        (tmp_path / "out").rename(tmp_path / f"old {len(list(tmp_path.iterdir()))}")


def test_pack_takes_given_bits_and_otherwise_the_checkpoints_steps(call, tmp_path):
    run = save(tmp_path / "run", network(), exporter={"widen": 1.7})
    cases = [([], table(1.7)), (["--bits", 4], table(bits=4)), (["--bits", 5], table(1.7))]
    for i, (words, expected) in enumerate(cases):
        assert call("pack", run, tmp_path / f"{i}", *words)[0] == 0
        write(tmp_path / "expected", network(), expected)
        assert (tmp_path / f"{i}").read_bytes() == (tmp_path / "expected").read_bytes()


def test_the_folder_final_has_the_weights_that_were_packed_alone(call, place, tmp_path):
    run = save(tmp_path / "run", network())
    meta = read_json(run / "step_000020" / "meta.json")
    T.write_checkpoint(run / "final", {"model": network(3).state_dict()}, meta)
    (run / "result.json").write_text('{"weights": "ema"}')
    assert call("pack", run / "final", tmp_path / "a.upar")[0] == 0
    write(tmp_path / "expected", network(3))
    assert (tmp_path / "a.upar").read_bytes() == (tmp_path / "expected").read_bytes()
    code, _, error = call("compare", run / "final", run, "--weights", "raw")
    assert code == 2 and "it has the ema weights" in error


@pytest.mark.parametrize("bits", [2, 5, 8])
def test_unpacked_and_packed_again_is_the_same_file(call, tmp_path, bits):
    """At 5 bits of codes as GPTQ's, which `pack` does not make; verify accepts them, and scales of zero."""
    net = network()
    zeros = "mixers.1.w_o"
    net.get_parameter(zeros).data.zero_()
    run = save(tmp_path / "run", net)
    coded = T.quantize_all(net.state_dict(), table(1.23, bits))
    if bits == 5:
        coded[zeros].scale.zero_()  # as in artifacts of 2026-11-25
        for part in coded.values():  # one code in 20 is not the nearest
            moved = torch.rand(part.codes.shape) < 0.05
            part.codes[moved] -= part.codes[moved].sign()
    first = tmp_path / "a.upar"
    write(first, net, coded=coded)
    assert call("unpack", first, tmp_path / "b")[0] == 0
    folder = (tmp_path / "b").rename(tmp_path / "b.v2")  # a dot does not make it half-written
    tensors = torch.load(folder / "model.pt", weights_only=True)
    _, expected, _ = T.read_artifact(first)
    assert list(tensors) == list(expected)
    assert all(map(torch.equal, tensors.values(), expected.values()))
    for i, model in enumerate((first, folder)):
        assert call("pack", model, tmp_path / f"{i}")[0] == 0
        assert (tmp_path / f"{i}").read_bytes() == first.read_bytes()
    assert "byte for byte" in call("verify", first, folder)[1]
    code, output, _ = call("verify", first, run, "--bits", bits)
    assert code == 0 and "by GPTQ" in output


def test_gptq_lowers_the_loss(call, trained, tiny_data, tmp_path):
    """At 3 bits, by the codes that `gptq` makes of the sums; the other tensors are the nearest's."""
    source = Q.read_weights(str(trained))
    _, val, size = Q.read_text(source, str(tiny_data))
    bpb = []
    for name, words in (("nearest", []), ("gptq", ["--gptq", tiny_data])):
        out = tmp_path / name
        code, _, error = call("pack", trained, out, *words, "--bits", 3)
        assert code == 0, error
        bpb.append(Q.validation_bpb(Q.rebuild(Q.read_weights(str(out))), 32, val, size))
    assert bpb[1] < bpb[0] - 0.001
    assert call("verify", out, trained, "--bits", 3)[0] == 0


# ------------------------------------------------------------------------ info, compare and verify
def distance(a, b, kind):
    """Return the columns of `compare` for a class, by their definitions."""
    names = [name for name in a if kind in ("all", T.tensor_class(name, a[name]))]
    x, y = (torch.cat([part[name].double().flatten() for name in names]) for part in (a, b))
    ratio = ((y - x).norm() / x.norm()).item()
    mean, most = (y - x).square().mean().item(), (y - x).abs().max().item()
    return [ratio, mean, most, (x @ y / x.norm() / y.norm()).item(), -20 * math.log10(ratio)]


COLUMNS = ("rel_frobenius", "mse", "max", "cosine", "snr_db")


def test_info_against_numbers_by_hand(call, place):
    """Bytes by the header, entropy by numpy over the quantizer's codes, the table's sums."""
    tensors = network().state_dict()
    path = place / "run" / "model.upar"
    _, output, _ = call("info", path, "--tensors", "--checkpoint", place / "run")
    rows = table_of(output)
    header, read, _ = T.read_artifact(path)
    streams = header["streams"]
    parts = [*CLASSES, "(header)", *(f"({name})" for name in streams.keys() - tensors.keys())]
    assert set(rows) == {*tensors, *parts, "total"} and len(parts) == 8
    assert set(table_of(call("info", path)[1])) == {*parts, "total"}
    size = path.stat().st_size
    assert sum(int(rows[name]["bytes"]) for name in parts) == int(rows["total"]["bytes"]) == size
    for name, w in tensors.items():
        length = streams[name]["length"]
        error = ((read[name] - w).norm() / w.norm()).item()
        facts = [w.numel(), length, 8 * length / w.numel(), error]
        columns = ("weights", "bytes", "bits/weight", "error")
        assert [float(rows[name][key]) for key in columns] == pytest.approx(facts, rel=1e-3)
        if T.tensor_class(name, w) == "matrix":
            counts = np.unique(T.quantize(w, **TABLE["matrix"])[0], return_counts=True)[1]
            entropy = -(counts * np.log2(counts / w.numel())).sum() / w.numel()
            assert float(rows[name]["entropy"]) == pytest.approx(entropy, rel=1e-4)
            assert (rows[name]["coders"], rows[name]["coder_counts"]) == ("5-bit", "rans:1")
    assert float(rows["total"]["error"]) == pytest.approx(
        distance(tensors, read, "all")[0], rel=1e-3
    )


def test_compare_and_verify_print_distances(call, place, tmp_path):
    other = tmp_path / "b.upar"
    write(other, network(), table(bits=3))
    run, artifact = place / "run", place / "run" / "model.upar"
    for words, path in ((["compare", run, other], other), (["verify", artifact, run], artifact)):
        code, output, _ = call(*words)
        assert code == 0
        for kind in (*CLASSES, "all"):
            row = table_of(output)[kind]
            expected = distance(network().state_dict(), T.read_artifact(path)[1], kind)
            values = [float(row[column]) for column in COLUMNS]
            assert values == pytest.approx(expected, rel=2e-4)
    assert "byte for byte" in output and T.sha256_file(artifact) in output
    zeros = network()
    for param in zeros.parameters():
        param.data.zero_()
    zeros = save(tmp_path / "zeros", zeros)
    for words, expected in (
        ([zeros, zeros], ["-", "0", "0", "-", "-"]),
        ([run, run], ["0", "0", "0", "1", "inf"]),
    ):
        row = table_of(call("compare", *words)[1])["all"]
        assert [row[column] for column in COLUMNS] == expected
    wide = save(tmp_path / "wide", network(mlp_mult=3.0))
    code, _, error = call("compare", run, wide)
    assert code == 2 and "'blocks.0.mlp.w_up'" in error


def test_verify_says_no(call, place, tmp_path):
    artifact = tmp_path / "m.upar"

    def said(*words):
        code, _, error = call("verify", artifact, *words)
        assert code == 1 and str(artifact) in error
        return error

    settings = [
        (dict(mlp_mult=3.0), "'blocks.0.mlp.w_up' is "),
        (dict(num_heads=0), "division"),
        (dict(logit_softcap=1e39), "its logits are not finite"),
    ]
    for changes, fault in settings:
        write(artifact, network(), **changes)
        assert fault in said()
    run = place / "run"
    write(artifact, network())
    assert "'mixers.0.w_qkvg': 5 bits, 4 by" in said(run, "--bits", 4)
    write(artifact, network(), attn_window=9)
    assert "its settings are not those of" in said(run)
    with mock.patch.object(BYTES, "sha256", "0" * 64):
        write(artifact, network())
    assert "its tokenizer is not " in said(run)
    changed = [
        ("mixers.1.w_o", lambda w: w * 1.01, "its steps are not those of"),
        ("mixers.1.w_o", lambda w: w.flip(0), "times the error of the nearest codes"),
        ("mixers.0.dt_bias", lambda w: w + 1e-6, "is not that of"),
    ]
    for name, change, fault in changed:
        net = network()
        param = net.get_parameter(name)
        param.data = change(param.data)
        write(artifact, net)
        assert name in said(run) and fault in said(run)


@pytest.mark.parametrize("count", [25, pytest.param(300, marks=pytest.mark.full)])
def test_a_header_with_any_value_anywhere_is_one_line(call, place, tmp_path, count):
    """`call` asserts one line; sample.py's load_model raises a UserError or nothing."""
    good = place / "run" / "model.upar"
    path = tmp_path / "m.upar"
    header, start = header_of(good.read_bytes())
    rng = random.Random(0)
    for _ in range(count):
        text = json.dumps(mutated(header, rng)).encode()
        path.write_bytes(signed(text, good.read_bytes()[start:-32]))
        for words in (["info", path, "--tensors"], ["compare", path, good], ["verify", path]):
            call(*words)
        with contextlib.suppress(S.UserError):
            S.load_model("ARTIFACT", str(path))


# ---------------------------------------------------------------------------------------- mistakes
MISTAKES = [
    ("inof", {}, "inof"),
    ("info a b", {}, "unrecognized arguments: b"),
    ("info {damaged}", {}, "damaged.upar: damaged"),
    ("info {early}", {}, "no such file"),
    ("pack {new} {new}", {}, "no such file"),
    ("pack {run} {artifact}", {}, "exists already"),
    ("pack {run} {new} --weights ema", {}, "no checkpoint with ema weights"),
    ("pack {early} {new} --weights ema", {}, "none had been collected"),
    ("pack {place} {new}", {}, "no whole checkpoint"),
    ("pack {run} {new} --bits 9", {}, "--bits: invalid choice: 9"),
    ("pack {artifact} {new} --bits 4", {}, "--bits: "),
    ("pack {artifact} {new} --gptq {place}", {}, "--gptq: "),
    ("pack {run} {new}", {"MATRIX_BITS": 4}, "MATRIX_BITS='4'"),
    ("verify {artifact} --bits 4", {}, "--bits: "),
    ("pack {run} {new} --gptq {place}", {"DATA_PATH": "x"}, "DATA_PATH='x'"),
    ("pack {artifact} {new} --weights ema", {}, "--weights ema: must"),
    ("pack {run} {new} --gptq a:0.5,b:0.5", {}, "DATA 'a:0.5,b:0.5': is a mixture"),
    ("info {artifact} --weights raw", {}, "--weights raw: must"),
    ("verify {artifact} --weights raw", {}, "--weights raw: must"),
    ("verify {artifact} {artifact} --weights raw", {}, "--weights raw: must"),
    ("compare {artifact} {artifact} --weights raw", {}, "--weights raw: must"),
    ("apply {artifact} {artifact} {new} --weights raw", {}, "--weights raw: must"),
    ("bitdelta {artifact} {artifact} {new} --weights raw", {}, "--weights raw: must"),
    ("pack {foreign} {new}", {}, "bytes has 264 tokens"),
    ("pack {broken} {new}", {}, "'embed'"),
]


@pytest.mark.parametrize(("words", "changes", "fault"), MISTAKES)
def test_mistakes_are_one_line_and_exit_code_2(call, place, tmp_path, words, changes, fault):
    names = {name: place / name for name in ("run", "foreign", "broken", "early")}
    names |= {"artifact": place / "run" / "model.upar"}
    names |= {"place": place, "new": tmp_path / "new", "damaged": place / "damaged.upar"}
    changes = {name: str(value).format(**names) for name, value in changes.items()}
    code, _, error = call(*words.format(**names).split(), **changes)
    assert code == 2 and fault in error
    assert not names["new"].exists()


def test_a_tilde_is_the_home_folder(call, place, tmp_path):
    assert call("pack", place / "run", "~/new.upar", HOME=tmp_path)[0] == 0
    assert call("info", "~/new.upar", HOME=tmp_path)[0] == 0 and (tmp_path / "new.upar").is_file()


def test_weights_of_an_unpacked_folder_are_of_one_kind(call, place, tmp_path):
    artifact = place / "run" / "model.upar"
    assert call("unpack", artifact, tmp_path / "folder")[0] == 0
    code, _, error = call("pack", tmp_path / "folder", tmp_path / "new", "--weights", "raw")
    assert code == 2 and "--weights raw: must" in error
    # Beside a checkpoint, which has several, it may be.
    assert call("compare", place / "run", tmp_path / "folder", "--weights", "raw")[0] == 0


def test_a_reward_model_is_verified_and_has_averages(call, tmp_path):
    """Beside adapters its value head is trained, too."""
    net = network()
    D.add_value_head(net)
    add_noise(net, 0.05)
    write(tmp_path / "m.upar", net)
    assert call("verify", tmp_path / "m.upar", save(tmp_path / "run", net))[0] == 0
    D.setup_lora_adapter(net, 2)
    params = net.named_parameters()
    trained = {name: w.data for name, w in params if ".lora_" in name or name == "w_value"}
    averages = {"count": 1, "values": [w + 1 for w in trained.values()]}
    meta = dict(settings={"objective": "reward"}, step=9, shape=vars(net.config))
    states = {"model": net.state_dict(), "training": {"ema": averages}}
    (tmp_path / "adapted").mkdir()
    T.write_checkpoint(tmp_path / "adapted" / "step_000009", states, meta)
    source = Q.read_weights(tmp_path / "adapted", "ema")
    assert len(trained) == 1 + 2 * 8
    for name, w in trained.items():
        assert torch.equal(source.unmerged[name], w + 1)


def test_a_grown_tokenizer_is_packed(call, tmp_path):
    """Post-training adds four tokens for the roles to a tokenizer without them."""
    net = T.GPT(T.model_config(SETTINGS, BYTES.vocab_size + 4, BYTES.bos_id))
    assert call("pack", save(tmp_path / "run", net), tmp_path / "m.upar")[0] == 0


def test_what_cannot_be_written_is_one_line_and_leaves_nothing(call, place, tmp_path):
    """A disk that is full after 20 kB: no folder is left that would be taken for a model."""
    limit(20_000)
    try:
        code, _, error = call("unpack", place / "run" / "model.upar", tmp_path / "new")
    finally:
        limit(-1)
    assert code == 1 and not (tmp_path / "new").exists() and f"{tmp_path / 'new'}: " in error


FORGED = {
    "model.pt": lambda tensors: tensors | {"embed": tensors["embed"].to("meta")},
    "coded.pt": lambda coded: {name: [p[0] + 1, *p[1:]] for name, p in coded.items()},
}


@pytest.mark.parametrize("file", FORGED)
def test_forged_folders_are_one_line(call, place, tmp_path, file):
    folder = tmp_path / "folder"
    assert call("unpack", place / "run" / "model.upar", folder)[0] == 0
    torch.save(FORGED[file](torch.load(folder / file)), folder / file)
    repair(folder)
    code, _, error = call("compare", folder, place / "run")
    assert code == 2 and "no checkpoint with raw weights" in error


# --------------------------------------------------------------------------------------- the guide
GUIDE = "".join(blocks("quantization.md", "bash")).splitlines()


@pytest.fixture
def named(trained, tiny_data, tmp_path, monkeypatch):
    """Change to a folder with what the guide's commands name: data/mine, base, tuned.

    Base is the run of train_gpt.py, tuned the same with noise on its weights.
    """
    shutil.copytree(tiny_data, tmp_path / "data" / "mine")
    shutil.copytree(trained, tmp_path / "runs" / "base")
    tuned = shutil.copytree(trained, tmp_path / "runs" / "tuned")
    last = tuned / "step_000012"
    tensors, training = (torch.load(last / f"{name}.pt") for name in ("model", "training"))
    torch.manual_seed(0)
    for w in (*tensors.values(), *training["ema"]["values"], *training["swa"]["values"]):
        w.add_(0.02 * torch.randn_like(w))
    meta = read_json(last / "meta.json")
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
            less = ["--distill-steps", 5] if words[script + 1] == "bitdelta" else []
            code, output, error = call(*words[script + 1 :], *less)
            assert code == 0 and output, (command, error)
            outputs[words[script + 1], words[-1]] = output
    names = "apply bitdelta compare deltaquant info pack unpack verify"
    assert {command for command, _ in outputs} == set(names.split())
    assert (named / "again.upar").read_bytes() == (named / "int4.upar").read_bytes()
    assert "4-bit rans:" in call("info", "tuned.upar")[1]
    assert "byte for byte" in outputs["verify", "runs/base"]
    assert "bits per byte of validation: base " in outputs["bitdelta", "--score"]
    sizes = [(named / f"tuned{bits}.delta").stat().st_size for bits in (2, 3)]
    assert (named / "tuned.delta").exists() and sizes[0] < sizes[1]


@pytest.mark.full
def test_the_guides_other_commands_run(named):
    """Those of train_gpt.py; the environment makes them tiny."""
    for name in ("train_gpt.py", "tools", "configs"):
        (named / name).symlink_to(ROOT / name)
    tiny = {name: value for name, value in TINY.items() if "GPTQ" not in name}
    environ = environment(**tiny)
    environ["PATH"] = f"{Path(sys.executable).parent}:{environ['PATH']}"
    for command in [command for command in GUIDE if "quantize.py" not in command]:
        subprocess.run(["bash", "-euc", command], cwd=named, env=environ, check=True, timeout=300)
    small, coarse, nearest = (
        read_json(named / "runs" / name / "result.json") for name in ("small", "coarse", "nearest")
    )
    assert small["total_bytes"] <= 400000
    assert coarse["artifact_bytes"] < nearest["artifact_bytes"]
    assert "qat" not in nearest["phases"]
