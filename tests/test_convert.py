"""convert.py: its command line. Models of transformers are in test_models.py, code that an export brings in
test_remote.py.
"""

import re
import shlex

import pytest
import torch
from test_quantize import network, write

import convert as C
import train_dpo as D
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
    (dict(rope_dims=4), "rope_dims=4"),
    (dict(unet_skips=True), "unet_skips=True"),
    (dict(bigram_vocab_size=50), "bigram_vocab_size=50"),
]


@pytest.mark.parametrize("changes, fault", OTHER_LAYOUTS)
def test_a_layout_that_transformers_does_not_have_is_told_by_name(changes, fault):
    shape = network(**{**LLAMA, **changes}).config
    line = refusal(C.UserError, "", C.hf_config, shape)
    assert line == f"transformers' LlamaForCausalLM has no {fault}"


def test_a_layer_that_qwen_does_not_have_is_told_by_name():
    qwen = C.HF_SHAPE | C.HF_ARCHITECTURES["Qwen3_5ForCausalLM"]
    shape = C.GPTConfig(264, 1, layers="g s", norms="rms_offset rms_offset", **qwen)
    refusal(C.UserError, "Qwen3_5ForCausalLM has no layers='g s'", C.hf_config, shape)


MISTAKES = [
    ("import", "the following arguments are required: FOLDER, OUT"),
    ("export {model} {new} --weights best", "invalid choice: 'best'"),
    ("export {model} {place}", "exists already; must be a new name"),
    ("export {model} {new}/x", "must be in a folder that exists"),
    ("export {model} {new} --weights ema", "--weights ema: must be with a run's checkpoint"),
    ("export {new} {new}", "no such file; a run's artifact is"),
    ("export {place} {new}", "no whole checkpoint"),
    ("import {place} {new}", "pointer.json: must be the file, not a pointer of Git LFS"),
    ("import {place}/empty {new}", "no config.json; must be a folder of Hugging Face's"),
    ("import {place}/adapters {new}", "has adapters of PEFT; must be a whole model: merge them"),
    ("import {place}/beside {new}", "has adapters of PEFT; must be a whole model: merge them"),
    (
        "import {place}/pointer.gguf {new}",
        "pointer.gguf: must be the file, not a pointer of Git LFS",
    ),
]


@pytest.mark.parametrize("words, fault", MISTAKES)
def test_mistakes_are_one_line_and_exit_code_2(call, tmp_path, words, fault):
    write(tmp_path / "m.upar", network())
    (tmp_path / "empty").mkdir()
    for name in ("adapters", "beside"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text("{}")
    for name in ("pointer.gguf", "pointer.json"):
        (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\n")
    (tmp_path / "beside" / "config.json").write_text("{}")  # of the base, as some trainers write it
    names = dict(model=tmp_path / "m.upar", place=tmp_path, new=tmp_path / "new")
    code, _, error = call(*words.format(**names).split())
    assert code == 2 and fault in error and not names["new"].exists()


def test_a_tilde_is_the_home_folder(call, tmp_path):
    write(tmp_path / "m.upar", network())
    code, _, error = call("export", "~/m.upar", "~/out", HOME=tmp_path)
    assert code == 0 and (tmp_path / "out" / "config.json").is_file(), error
    code, _, error = call("export", "~/m.upar", "~/out2", "--like=~/none", HOME=tmp_path)
    assert code == 2 and f"{tmp_path}/none: no config.json" in error


def test_an_artifact_names_its_tokenizer(tmp_path):
    """Another model's, which is beside it, is not taken."""
    write(tmp_path / "m.upar", network())
    (tmp_path / "a.model").write_bytes(b"another")
    source = C.read_weights(tmp_path / "m.upar")
    assert C.find_tokenizer(source, C.load_tokenizer).file == "bytes"
    source.header["meta"]["tokenizer"] = "a.tiktoken"
    refusal(C.UserError, "a.tiktoken: .*TOKENIZER_PATH", C.model_tokenizer, source)


def test_a_reward_model_goes_out_without_its_value_head(call, tmp_path):
    from safetensors.torch import load_file

    for number in range(2):
        net = network()
        if number:
            D.add_value_head(net)
        write(tmp_path / f"{number}.upar", net)
        code, output, error = call("export", tmp_path / f"{number}.upar", tmp_path / f"{number}")
        assert code == 0 and ("w_value, is not written" in output) == bool(number), error
    plain, reward = (load_file(tmp_path / name / "model.safetensors") for name in "01")
    assert plain.keys() == reward.keys()
    assert all(torch.equal(w, reward[name]) for name, w in plain.items())


def test_the_guides_have_commands_that_the_parser_takes():
    commands = []
    for path in [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("configs/*.env")]:
        found = re.findall(r"python convert\.py [^`;#\n]*", path.read_text(encoding="utf-8"))
        commands += [command.strip() for command in found if command.count(" ") > 2]
    assert len(commands) > 10
    for command in commands:
        args = C.make_parser().parse_args(shlex.split(command)[2:])
        assert args.run in (C.import_, C.export), command
