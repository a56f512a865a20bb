"""convert.py: its command line and the files that it copies. Models of transformers are in test_models.py, code that
an export brings in test_remote.py.
"""

import json
import re
import shlex

import pytest
from test_quantize import network, write

import convert as C
import quantize as Q
from conftest import ROOT, refusal

pytest.importorskip("safetensors")
LLAMA = dict(layer_pattern="a", num_layers=3, mlp="swiglu", mlp_mult=2.75, norm="rms_weight")
LLAMA |= dict(qk_gain_init=0.0, logit_softcap=0.0, residual_mix=False)
OTHER_LAYOUTS = [
    (dict(layer_pattern="a s"), "layers='a s a'"),
    (dict(norm="rms"), "norms='rms rms rms'"),
    (dict(mlp="gelu"), "mlp='gelu'"),
    (dict(residual_mix=True), "residual_mix=True"),
    (dict(logit_softcap=30.0), "logit_softcap=30.0"),
    (dict(positions="none"), "positions='none'"),
    (dict(unet_skips=True), "unet_skips=True"),
    (dict(bigram_vocab_size=50), "bigram_vocab_size=50"),
]


@pytest.mark.parametrize(("changes", "fault"), OTHER_LAYOUTS)
def test_a_layout_that_transformers_does_not_have_is_told_by_name(changes, fault):
    shape = network(**{**LLAMA, **changes}).config
    line = refusal(C.UserError, "", C.hf_config, shape)
    assert line == f"transformers' LlamaForCausalLM has no {fault}"


MISTAKES = [
    ("", "the following arguments are required: COMMAND"),
    ("pack {model} {new}", "invalid choice: 'pack'"),
    ("export {model}", "the following arguments are required: OUT"),
    ("export {model} {new} --weights best", "invalid choice: 'best'"),
    ("export {model} {place}", "exists already, or its folder does not"),
    ("export {model} {new}/x", "exists already, or its folder does not"),
    ("export {new} {new}", "no such file; a run's artifact is"),
    ("export {place} {new}", "no whole checkpoint"),
    ("import {place} {new}", "no config.json; must be a folder of Hugging Face's"),
]


def run(monkeypatch, words, script=C):
    """Run a command line; return the exit code."""
    monkeypatch.setattr("sys.argv", ["convert.py", *map(str, words)])
    return script.exit_code(script.main)


@pytest.mark.parametrize("words", ["import a b", "export a 'b c' --like d"])
def test_quantize_names_the_script_that_has_its_old_commands(monkeypatch, capsys, words):
    assert run(monkeypatch, shlex.split(words), Q) == 2
    assert capsys.readouterr().err == f"error: now it is: python convert.py {words}\n"


@pytest.mark.parametrize(("words", "fault"), MISTAKES)
def test_mistakes_are_one_line_and_exit_code_2(monkeypatch, capsys, tmp_path, words, fault):
    write(tmp_path / "m.upar", network())
    names = dict(model=tmp_path / "m.upar", place=tmp_path, new=tmp_path / "new")
    code = run(monkeypatch, words.format(**names).split())
    error = capsys.readouterr().err
    assert code == 2 and fault in error and error.count("\n") == 1
    assert not names["new"].exists()


def test_an_export_has_files_of_the_repository(monkeypatch, capsys, tmp_path):
    """And says so if convert.py was copied without them."""
    write(tmp_path / "m.upar", network())
    assert run(monkeypatch, ["export", tmp_path / "m.upar", tmp_path / "hf"]) == 0
    assert "with trust_remote_code=True" in capsys.readouterr().out
    names = "SHA256SUMS config.json generation_config.json model.safetensors modeling_underpar.py"
    files = sorted(path.name for path in (tmp_path / "hf").iterdir())
    assert files == [*names.split(), "tokenizer.json", "tokenizer_config.json"]
    code = (ROOT / "tools" / "modeling_underpar.py").read_bytes()
    assert (tmp_path / "hf" / "modeling_underpar.py").read_bytes() == code
    config = json.loads((tmp_path / "hf" / "config.json").read_bytes())
    assert config["architectures"] == ["UnderparForCausalLM"]
    monkeypatch.setattr(C, "__file__", str(tmp_path / "convert.py"))
    assert run(monkeypatch, ["export", tmp_path / "m.upar", tmp_path / "again"]) == 2
    error = capsys.readouterr().err
    assert "chat_template.jinja: no such file" in error and error.count("\n") == 1
    assert not (tmp_path / "again").exists()


def test_the_guides_have_commands_that_the_parser_takes():
    commands = []
    for path in [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("configs/*.env")]:
        found = re.findall(r"python convert\.py [^`;#\n]*", path.read_text(encoding="utf-8"))
        commands += [command.strip() for command in found if command.count(" ") > 2]
    assert len(commands) > 10
    for command in commands:
        args = C.make_parser().parse_args(shlex.split(command)[2:])
        assert args.run in (C.import_, C.export), command
