"""Models of transformers, read by convert.py import and written by export: logits, gradients, generation, and every
tensor byte for byte.
"""

import functools
import itertools
import json
import logging
import re
import shutil
import unicodedata
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from random import Random

import pytest
import torch
from test_weights import save

import convert as C
import sample
import train_gpt as T
import train_grpo
import train_sft as S
from conftest import BYTES as BYTE_TOKENIZER
from conftest import (
    ROOT,
    add_noise,
    exit_code,
    mutated,
    pack,
    read_json,
    refusal,
    small_network,
    write_json,
    write_lines,
)

VOCAB = 264  # of the tokenizer "bytes"
BYTES = dict(TOKENIZER_PATH="bytes")
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=500000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
HYBRID = dict(head_dim=32, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1)
# name -> architecture, and what its config has beside SIZES.
MODELS = {
    "llama": ("Llama", dict(rms_norm_eps=1e-5)),
    "llama_tied_mqa": ("Llama", dict(tie_word_embeddings=True, num_key_value_heads=1)),
    "llama3": ("Llama", dict(head_dim=24, rope_parameters=LLAMA3)),
    "qwen2": ("Qwen2", {}),
    "qwen2_tied": ("Qwen2", dict(tie_word_embeddings=True, num_key_value_heads=4)),
    "qwen3": ("Qwen3", dict(head_dim=24)),
    "qwen3_5": ("Qwen3_5", HYBRID | dict(heads=(2, 2, 16, 16), tie_word_embeddings=True)),
    "qwen3_5_1_to_2": ("Qwen3_5", HYBRID | dict(heads=(2, 4, 16, 24))),
    "qwen3_5_1_to_4": ("Qwen3_5", HYBRID | dict(heads=(1, 4, 32, 16))),
}
SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=100,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
)


def make(transformers, name, **changes):
    """Return a model of transformers with random weights, whose logits are of order 10."""
    family, extra = MODELS[name]
    extra = {**extra, **changes}
    heads = extra.pop("heads", None)
    if heads:
        names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
        extra |= {f"linear_{key}": size for key, size in zip(names, heads, strict=True)}
    config_name = f"{family}TextConfig" if family == "Qwen3_5" else f"{family}Config"
    config = getattr(transformers, config_name)(**{**SIZES, **extra})
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    for key, param in model.named_parameters():
        noise = torch.randn_like(param)
        if "A_log" in key or "dt_bias" in key:
            param.data += 0.1 * noise
        elif param.ndim == 1:
            param.data += 0.2 * noise
        elif "conv1d" in key:
            param.data = 0.2 * noise
            param.data[..., -1] += 1.0
        else:
            param.data = noise * param.shape[-1] ** -0.5
        if "in_proj_qkv" in key:
            # Queries near their keys: an output near 0 would be normed, and so would its errors.
            width = config.linear_num_key_heads * config.linear_key_head_dim
            param.data[:width] = param.data[width : 2 * width] + 0.3 * param.data[:width]
    head = model.get_output_embeddings().weight
    head.data *= 3
    return model


def convert(*words, **environ):
    assert exit_code(C, *words, **environ) == 0


@pytest.fixture(scope="module")
def imported(transformers, tmp_path_factory):
    """imported(name): (model of transformers, its folder, the run folder that import made of it).

    The folder is in bfloat16, the model has its weights in float32. They are made once: a test that
    changes a folder takes a copy.
    """

    @functools.cache
    def save_and_import(name):
        folder = tmp_path_factory.mktemp("models") / name
        out = folder.with_name("run")
        make(transformers, name).bfloat16().save_pretrained(folder)
        convert("import", folder, out, **BYTES)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return model, folder, out

    return save_and_import


@pytest.fixture
def copied(imported, tmp_path):
    """copied(name): a copy of a model's folder, which a test may change."""
    return lambda name: Path(shutil.copytree(imported(name)[1], tmp_path / "copy"))


@pytest.fixture
def refuses(call, capsys, tmp_path):
    """refuses(fault, command, source): it ends with one line, which has the fault, and leaves nothing."""

    def check(fault, command, source, *options, **environ):
        capsys.readouterr()  # transformers shows its progress
        code, _, error = call(command, source, tmp_path / "refused", *options, **environ)
        assert code == 2 and re.search(fault, error), error
        assert not (tmp_path / "refused").exists()

    return check


def load(out):
    return S.load_model("INIT_FROM", str(out))[0]


def texts(rows=3, length=70):
    """Return ids of bytes: those below 4 have a meaning for the tokenizer."""
    return torch.randint(4, 260, (rows, length), generator=torch.Generator().manual_seed(5))


def edit(path, **changes):
    """Change a JSON file."""
    write_json(path, read_json(path) | changes)


def tensors_of(folder):
    """Return the tensors of all safetensors files of a model in a folder."""
    from safetensors.torch import load_file

    files = sorted(folder.glob("model*.safetensors"))
    return {key: tensor for path in files for key, tensor in load_file(path).items()}


def rewrite(folder, **changes):
    """Write a folder's weights again with other tensors; None leaves one out."""
    from safetensors.torch import save_file

    state = {key: w for key, w in (tensors_of(folder) | changes).items() if w is not None}
    save_file(state, folder / "model.safetensors", {"format": "pt"})


def assert_same_tensors(folder, other):
    before = tensors_of(folder)
    after = tensors_of(other)
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        bits = [one.view(torch.uint8) if one.ndim else one for one in (tensor, after[key])]
        assert tensor.dtype == after[key].dtype and torch.equal(*bits), key


@torch.no_grad()
def check_import(transformers, folder, out):
    """The network that import makes of a folder has the logits of transformers; return it."""
    convert("import", folder, out, **BYTES)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    network = load(out)
    assert (network(texts()) - model(texts()).logits).abs().max() < 1e-4
    return network


# --------------------------------------------------------------------------------- in and out again
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_are_those_of_transformers(imported, name):
    model, _, out = imported(name)
    network = load(out)
    ids = texts()
    expected = model(ids, labels=ids)
    assert 2 < expected.logits.abs().max() < 40
    assert (network(ids) - expected.logits).abs().max() < 1e-4
    targets = torch.cat([ids[:, 1:], torch.full((3, 1), -1)], 1)
    loss = network(ids, targets).sum() / (targets >= 0).sum()
    assert loss.item() == pytest.approx(expected.loss.item(), abs=1e-5)
    loss.backward()
    expected.loss.backward()
    gradients = {key: param.grad for key, param in model.named_parameters()}
    for param in network.parameters():
        param.data = param.grad  # so that the views are of gradients
    for key, found in C.hf_views(network).items():
        want = gradients[key]
        assert (found - want).norm() < 1e-3 * want.norm() + 1e-6, key


@pytest.mark.parametrize("name", MODELS)
def test_exports_are_the_model(transformers, imported, copied, tmp_path, name):
    """In the form of the original byte for byte, with all other files; by itself in float32."""
    model, _, out = imported(name)
    folder = copied(name)
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 128}')
    (folder / "empty.json").write_bytes(b"")
    (folder / "pytorch_model.bin").write_bytes(b"weights of another format")
    convert("export", out, tmp_path / "like", "--like", folder)
    convert("export", out, tmp_path / "own")
    assert_same_tensors(folder, tmp_path / "like")
    for path in folder.glob("*.json"):
        assert (tmp_path / "like" / path.name).read_bytes() == path.read_bytes()
    assert not (tmp_path / "like" / "pytorch_model.bin").exists()
    for kind, dtype in (("like", torch.bfloat16), ("own", torch.float32)):
        again, loading = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / kind, dtype="auto", output_loading_info=True
        )
        assert type(again) is type(model) and again.dtype == dtype and not any(loading.values())
    assert again.config.eos_token_id == [1, 263]
    assert torch.equal(again(texts()).logits, model(texts()).logits)
    # What transformers 4 reads: it has the base of the positions beside it.
    scaling = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    written = read_json(tmp_path / "own" / "config.json")
    assert written["rope_scaling"] == (scaling if name == "llama3" else None)
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"]


@pytest.mark.parametrize(
    ("preset", "tied"), [("llama", "1"), ("qwen2", "0"), ("qwen3", "1"), ("qwen3_5", "0")]
)
@torch.no_grad()
def test_presets_are_models_of_transformers(
    transformers, tmp_path, monkeypatch, caplog, preset, tied
):
    """A network that train_gpt.py makes is exported, loads as the preset's class, and has its logits.

    Nothing is warned of. Saved by transformers it is the same model. Greedy texts behind prompts with
    padding are those of sample.py.
    """
    environ = dict(ARCH_MODE=preset, MODEL_DIM="64", NUM_HEADS="4", NUM_LAYERS="4")
    environ["TIE_EMBEDDINGS"] = tied
    settings = T.load_settings(T.Settings, environ, presets={"ARCH_MODE": T.ARCH_PRESETS})
    torch.manual_seed(0)
    network = T.GPT(T.model_config(settings, VOCAB, 1))
    add_noise(network, 0.1)
    convert("export", save(tmp_path / "run", 1, network).parent, tmp_path / "exported")
    assert network.config.layers == ("g g g a" if preset == "qwen3_5" else "a a a a")
    ids = texts(2, 40)
    wanted = network(ids)
    prompts = [ids[0].tolist(), ids[1, 33:].tolist()]
    samples = sample.generate(network, prompts, 1, 12, 0.0, [(0,), (1,)], frozenset())
    ends = [samples[0].ids[4], samples[1].ids[7]]
    samples = sample.generate(network, prompts, 1, 12, 0.0, [(0,), (1,)], frozenset(ends))
    mask = torch.ones_like(ids)
    mask[1, :33] = 0
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    caplog.set_level("WARNING", "transformers")
    for name in ("exported", "again"):
        model, loading = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / name, output_loading_info=True
        )
        assert type(model).__name__.lower() == preset + "forcausallm" and not any(loading.values())
        assert model.generation_config.eos_token_id == [1, 263]
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == (tied == "1")
        logits = model(ids).logits
        assert logits.std() > 0.3 and (logits - wanted).abs().max() < 1e-4
        model.generation_config.eos_token_id = ends
        found = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
        for row, expected in zip(found[:, 40:].tolist(), samples, strict=True):
            count = len(expected.ids)
            assert row[:count] == expected.ids and set(row[count:]) <= {1}
        model.generation_config.eos_token_id = [1, 263]
        model.save_pretrained(tmp_path / "again")
    # Of packages that are not installed alone.
    assert {entry.name for entry in caplog.records} <= {"transformers.integrations.hub_kernels"}


def test_a_folder_of_several_files_with_images(imported, tmp_path, capsys):
    """Qwen3_5ForConditionalGeneration has its text model under another name, and other parts beside,
    which an export has too. A tied head may stand in the files.
    """
    from safetensors.torch import save_file

    _, folder, _ = imported("qwen3_5")
    text = "model.language_model."
    state = {key.replace("model.", text): w for key, w in tensors_of(folder).items()}
    state |= {"model.visual.patch.weight": torch.randn(3), "mtp.fc.weight": torch.ones(2).half()}
    state["lm_head.weight"] = state[f"{text}embed_tokens.weight"].clone()
    other = tmp_path / "images"
    other.mkdir()
    placed = {key: f"model-{i % 2}.safetensors" for i, key in enumerate(sorted(state))}
    for file in set(placed.values()):
        save_file({key: w for key, w in state.items() if placed[key] == file}, other / file)
    write_json(other / "model.safetensors.index.json", {"weight_map": placed})
    config = read_json(folder / "config.json")
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": config | {"tie_word_embeddings": False},
        "tie_word_embeddings": True,  # which transformers goes by
        "vision_config": {"depth": 2},
    }
    write_json(other / "config.json", config)
    convert("import", other, tmp_path / "run", **BYTES)
    assert "not used: 2 tensors of images or of multi-token prediction" in capsys.readouterr().out
    convert("export", tmp_path / "run", tmp_path / "back", "--like", other)
    assert_same_tensors(other, tmp_path / "back")
    assert read_json(tmp_path / "back" / "config.json") == config


def test_links_and_null_in_a_folder(copied, tmp_path):
    """In a cache of Hugging Face's all files are links. That to a GGUF file beside safetensors is no
    sign of an import of it. "text_config": null is as none.
    """
    folder = copied("llama")
    (tmp_path / "blob").write_bytes(b"no GGUF")
    (folder / "model.gguf").symlink_to(tmp_path / "blob")
    edit(folder / "config.json", text_config=None)
    convert("import", folder, tmp_path / "run", **BYTES)
    convert("export", tmp_path / "run", tmp_path / "back", "--like", folder)
    assert_same_tensors(folder, tmp_path / "back")
    assert not (tmp_path / "back" / "model.gguf").exists()


def test_chat_templates_in_a_folder_of_their_own(transformers, tmp_path):
    """`--like` copies them, or writes that for tools with what --set gives."""
    folder = tmp_path / "model"
    tokenizer = train_tokenizer("gpt2")
    make(transformers, "llama", vocab_size=tokenizer.get_vocab_size()).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "additional_chat_templates").mkdir()
    names = ["chat_template.jinja", "additional_chat_templates/tool_use.jinja"]
    for name in names:
        (folder / name).write_text(f"{name} {{{{ date }}}}")
    for out, options in (("plain", []), ("set", ["--set", 'date="1 May"'])):
        convert("import", folder, tmp_path / out, *options)
        convert("export", tmp_path / out, tmp_path / f"{out} back", "--like", folder)
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / f"{out} back")
        date = "1 May" if options else "today"
        given = {} if options else {"date": date}
        for kind, name in zip(("default", "tool_use"), names, strict=True):
            words = dict(chat_template=theirs.chat_template[kind], tokenize=False, **given)
            text = theirs.apply_chat_template([{"role": "user", "content": ""}], **words)
            assert text == f"{name} {date}"


@pytest.mark.parametrize("spare", [38, 0])
@torch.no_grad()
def test_role_tokens_in_an_export_like_the_original(transformers, refuses, tmp_path, capsys, spare):
    """They take the rows of ids without a token; if there are fewer, the vocabulary grows.

    The tokenizer has them too, with a chat template, and `generate` ends at <|end|>.
    """
    tokenizer = train_tokenizer("gpt2")
    size = tokenizer.get_vocab_size()
    folder = tmp_path / "model"
    name = "llama" if spare else "llama_tied_mqa"
    model = make(transformers, name, vocab_size=size + spare).bfloat16()
    model.save_pretrained(folder)
    rewrite(folder, **{"lm_head.weight": model.lm_head.weight.clone()})  # also if it is tied
    tokenizer.save(str(folder / "tokenizer.json"))
    convert("import", folder, tmp_path / "base")
    network, found, _ = S.load_model("INIT_FROM", str(tmp_path / "base"))
    assert network.config.bos_id == found.bos_id
    S.grow_roles(network, found)
    for param in network.parameters():
        param.data = param.data.bfloat16().float() * 2
    tuned = save(tmp_path / "tuned", 1, network, found).parent
    convert("export", tuned, tmp_path / "back", "--like", folder)
    (tuned / found.file).write_bytes(found.content + b" ")
    refuses("must be the tokenizer of", "export", tuned)  # which is known by its hash
    given = dict(TOKENIZER_PATH=tmp_path / "base" / found.file)
    convert("export", tuned, tmp_path / "given", "--like", folder, **given)
    files = [tmp_path / name / "tokenizer.json" for name in ("back", "given")]
    assert files[0].read_bytes() == files[1].read_bytes()
    config = read_json(tmp_path / "back" / "config.json")
    rows = max(size + 4, size + spare)
    assert config == read_json(folder / "config.json") | {"vocab_size": rows}
    before, after = (tensors_of(path) for path in (folder, tmp_path / "back"))
    for key, w in before.items():
        assert torch.equal(after[key][size + 4 :], w[size + 4 :]), key
    views = C.hf_views(network)
    for key, w in after.items():
        assert torch.equal(w[: size + 4], views.get(key, network.embed).bfloat16()), key
    capsys.readouterr()
    settings = dict(prompt="the 12 words", max_new_tokens=1, device="cpu")
    sample.sample(sample.Settings(artifact=str(tmp_path / "base"), **settings))
    assert capsys.readouterr().out.startswith("the 12 words")  # without BOS nothing is cut off
    again, talker = (
        getattr(transformers, kind).from_pretrained(tmp_path / "back")
        for kind in ("AutoModelForCausalLM", "AutoTokenizer")
    )
    question = [{"role": "user", "content": "the cat"}]
    prompt = talker.apply_chat_template(question, add_generation_prompt=True)["input_ids"]
    ours = sample.with_roles(found)
    assert prompt == sample.asked_ids(ours, [("<|user|>", "the cat")])
    assert set(again.generation_config.eos_token_id) == sample.stop_ids(ours)
    ids = torch.randint(0, size + 4, (2, 50))
    ids[ids == found.bos_id] = size  # behind BOS our network begins a document
    logits = again.float()(ids).logits[..., : size + 4]
    assert (logits - network(ids)).abs().max() < 1e-5 * logits.abs().max()


def test_an_imported_start_has_defaults_of_its_own(imported):
    """Whatever its tokenizer, and under every OPTIMIZER: the rates of presets are those of new networks."""
    start_from = {"INIT_FROM": str(imported("llama")[2])}
    for script in (S, train_grpo):
        values = script.start_settings(start_from)
        assert not values["qat"] and values["artifact_bytes_max"] == 0
        lora = script.start_settings({**start_from, "LORA_RANK": "4"})
        assert (values["learning_rate"], lora["learning_rate"]) == script.IMPORTED_RATES[""]
    given = {**start_from, "OPTIMIZER": "lion", "SCALAR_LR": "0.5"}
    presets = {"OPTIMIZER": T.OPTIMIZER_PRESETS}
    found = T.load_settings(T.Settings, given, (), presets, T.shape_settings)
    rates = (found.optimizer, found.matrix_lr, found.tied_embed_lr, found.head_lr, found.scalar_lr)
    assert rates == ("lion", 1e-5, 1e-5, 1e-5, 0.5) and found.matrix_bits == 8


# ----------------------------------------------------------------------- what is refused, what counts
REFUSED = (
    (dict(architectures=["MistralForCausalLM"]), "architectures='MistralForCausalLM': must be one"),
    (dict(model_type="mistral"), "model_type='mistral': must be that of LlamaForCausalLM"),
    (dict(attention_bias=True), "attention_bias=True: must be False"),
    (dict(use_sliding_window=True), "use_sliding_window=True: must be False"),
    (dict(is_causal=False), "is_causal=False: must be True"),
    (dict(quantization_config={}), "quantization_config={}: must be None"),
    (dict(layer_types=["sliding_attention"] * 3), "layer_types=.*: must be among full_attention"),
    (dict(layer_types=["full_attention"]), "layer_types: has 1 layers, num_hidden_layers 3"),
    (dict(rope_scaling=dict(type="linear", factor=2.0)), "rope_type='linear': must be default"),
    (dict(rope_parameters=dict(rope_theta=-1)), "rope_theta=-1: must be a number above 0"),
    (dict(partial_rotary_factor=0.5), "partial_rotary_factor=0.5: must be 1"),
    (dict(rms_norm_eps=float("nan")), "rms_norm_eps=nan: must be a number above 0"),
    (dict(hidden_size=64.0), "hidden_size=64.0: must be a whole number from 1"),
    (dict(num_hidden_layers=10**9), "num_hidden_layers=1000000000: must be a whole number from 1"),
    (dict(num_key_value_heads=3), "num_key_value_heads=3: must divide num_attention_heads=4"),
    (dict(tie_word_embeddings="yes"), "tie_word_embeddings='yes': must be true or false"),
    (dict(intermediate_size=1 << 24), "mlp.down_proj.weight .*: expected .64, 16777216."),
    (dict(num_hidden_layers=4), "lack model.layers.3"),
)


def test_what_the_network_does_not_compute_is_refused_by_name(imported, copied, refuses):
    """At import, and at an export in the form of another model. A key that is null is one that is missing."""
    folder = copied("llama")
    path = folder / "config.json"
    good = path.read_bytes()
    for changes, fault in REFUSED:
        edit(path, **changes)
        refuses(fault, "import", folder, **BYTES)
        path.write_bytes(good)
    out = imported("llama")[2]
    edit(path, num_key_value_heads=4)
    fault = "config.json: has num_kv_heads=4, .*step_000000 2"
    refuses(fault, "export", out, "--like", folder)
    path.write_bytes(good)
    nulls = ("attention_bias", "mlp_bias", "rope_scaling", "quantization_config", "head_dim")
    edit(path, **dict.fromkeys(nulls))
    convert("import", folder, folder.parent / "run", **BYTES)
    assert torch.equal(load(out)(texts()), load(folder.parent / "run")(texts()))
    path.write_text("{")
    refuses("config.json: is no JSON", "import", folder)


def test_ctrl_c_leaves_no_folder(imported, tmp_path, monkeypatch, capsys):
    """Else the same command would be refused. An import writes with torch.save, an export with safetensors."""
    _, folder, run = imported("llama")

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(C.torch, "save", interrupt)
    monkeypatch.setattr(C.load_safetensors().torch, "save_file", interrupt)
    for words in (["import", folder], ["export", run]):
        assert exit_code(C, *words, tmp_path / "new", **BYTES) == 130
        assert capsys.readouterr().err.endswith("stopped by SIGINT: nothing was saved\n")
        assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_of_its_own_in_a_tied_model(transformers, copied, tmp_path, tied):
    """It counts, as in transformers, and is given back; a head that is the embedding is tied."""
    folder = copied("llama")
    edit(folder / "config.json", tie_word_embeddings=True)
    embed = tensors_of(folder)["model.embed_tokens.weight"]
    rewrite(folder, **{"lm_head.weight": embed.clone() if tied else -embed})
    network = check_import(transformers, folder, tmp_path / "run")
    assert network.config.tie_embeddings == tied
    convert("export", tmp_path / "run", tmp_path / "back", "--like", folder)
    assert_same_tensors(folder, tmp_path / "back")


OLDER = (
    (torch.float16, dict(rope_theta=500.0)),
    (
        torch.float64,
        dict(rope_parameters=dict(rope_type="default", rope_theta=700), rope_theta=5.0),
    ),
    (torch.float8_e4m3fn, dict(rope_theta=500.0, rope_scaling=dict(type="default"))),
    (
        torch.float32,
        dict(rope_parameters=dict(rope_theta=7), rope_scaling={**LLAMA3, "rope_theta": 900.0}),
    ),
    (torch.bfloat16, dict(rope_parameters={k: v for k, v in LLAMA3.items() if k[:4] != "orig"})),
)


def test_other_dtypes_and_rotary_positions_of_older_configs(transformers, copied, tmp_path):
    folder = copied("llama")
    state = tensors_of(folder)
    for number, (dtype, changes) in enumerate(OLDER):
        edit(folder / "config.json", **{"rope_scaling": None, "rope_parameters": None, **changes})
        rewrite(folder, **{key: w.to(dtype) for key, w in state.items()})
        check_import(transformers, folder, tmp_path / f"run{number}")


def test_a_config_that_is_only_partly_used_says_so(transformers, copied, tmp_path, capsys):
    """transformers also ignores a factor without a type; a model's own code it runs only if it is told to."""
    folder = copied("llama")
    check_import(transformers, folder, tmp_path / "plain")
    assert not re.search("not used: (factor|auto)", capsys.readouterr().out)
    edit(folder / "config.json", rope_scaling=dict(factor=4.0), is_causal=True)
    check_import(transformers, folder, tmp_path / "factor")
    assert "not used: factor=4.0 of rotary positions" in capsys.readouterr().out
    edit(folder / "config.json", auto_map={"AutoModel": "modeling.Model"})
    convert("import", folder, tmp_path / "code", **BYTES)
    assert "not used: auto_map of config.json; the code" in capsys.readouterr().out


def test_an_export_says_what_its_dtype_rounds_away(imported, tmp_path, capsys):
    """Of four changed weights two are far enough from the original's for bfloat16."""
    _, folder, out = imported("qwen2")
    network = load(out)
    weights = network.layers[0][0].mlp.w_down
    near = weights.detach().clone()
    near[0, :4] *= torch.tensor([1.001, 1.0001, 1.1, 2.0])
    assert (near != weights).sum() == 4
    source = C.read_weights(out)
    capsys.readouterr()
    for expected, changed in (("", weights.detach().clone()), ("50.0%", near)):
        weights.data.copy_(changed)
        C.like_files(folder, source, network)
        printed = capsys.readouterr().out
        assert printed.count("\n") == bool(expected)
        assert not expected or (
            f"4 weights differ from those of {folder}; after rounding to its dtype 50.0% of them "
            "still do; an export without --like is in float32" in printed
        )


def test_weights_and_files_that_are_refused(copied, refuses):
    """NaN and infinite weights, integers, tensors that are missing, too many or of another shape; an index."""
    folder = copied("llama")
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    key = "model.layers.1.mlp.up_proj.weight"
    good = tensors_of(folder)[key].float()
    odd = good.clone()
    odd[3, 5] = float("nan")
    for changes, fault in (
        ({key: odd}, f"{key}.*has weights that are NaN or infinite"),
        ({key: good.double() * 1e300}, f"{key}.*has weights that are NaN or infinite"),
        ({key: good.int()}, f"{key}.*has dtype I32; must be of floating-point numbers"),
        ({key: good[:-1].clone()}, f"{key}.*expected .100, 64."),
        ({"model.x": good}, "model.x .*: expected no such tensor"),
        ({key: None}, f"lack {key}"),
    ):
        rewrite(folder, **changes)
        refuses(fault, "import", folder, **BYTES)
        path.write_bytes(whole)
    path.write_bytes(whole[:-9])
    refuses("model.safetensors: no whole safetensors file", "import", folder, **BYTES)
    path.rename(folder / "x.safetensors")
    listed = "must be in model.safetensors, or in files that model.safetensors.index.json lists"
    refuses(f"model.safetensors: no such file; the weights {listed}", "import", folder)
    index = folder / "model.safetensors.index.json"
    beside = "index.json: weight_map: .*: must name files beside it"
    for content, fault in (
        ({"weight_map": {"a": "../x.safetensors"}}, beside),
        ({"weight_map": []}, "weight_map: None"),
        ({"weight_map": {"a": "y.safetensors"}}, "y.safetensors: no such file"),
    ):
        write_json(index, content)
        refuses(fault, "import", folder)


# ------------------------------------------------------------------------------------------ adapters
def adapt(start_from, run):
    """Return a network with random adapters on a model, saved as a run that began with it.

    Their averages are twice as large.
    """
    network, *_ = S.load_stored(S.find_start(str(start_from)))
    S.setup_lora_adapter(network, 4, 12.0)
    trained = [param for name, param in network.named_parameters() if ".lora_" in name]
    for param in trained:
        param.data = 0.03 * torch.randn_like(param)
    averages = {"count": 1, "values": [2 * param.data for param in trained]}
    settings = dict(init_from=str(start_from), lora_rank=4, lora_alpha=12)
    meta = dict(settings=settings, step=9, shape=vars(network.config))
    states = {"model": network.state_dict(), "training": {"ema": averages}}
    run.mkdir()
    S.write_checkpoint(run / "step_000009", states, meta)
    return network


@pytest.mark.parametrize("name", ["llama_tied_mqa", "qwen2", "qwen3", "qwen3_5_1_to_2"])
@torch.no_grad()
def test_adapters_go_out_merged_or_alone(transformers, imported, tmp_path, capsys, name):
    """Raw weights are the sum of base and adapters. Logits are those of the network, with averages too, and of PEFT."""
    from safetensors.torch import load_file

    _, folder, out = imported(name)
    run = tmp_path / "run"
    network = adapt(out, run)
    ids = texts()
    expected = network(ids)
    for kind, options in (("raw", ()), ("ema", ("--weights", "ema")), ("peft", ("--adapters",))):
        convert("export", run, tmp_path / kind, *options)
    warning = "in Qwen3_5ForConditionalGeneration, which vLLM serves, none is active"
    assert (warning in capsys.readouterr().out) == name.startswith("qwen3_5")
    config = read_json(tmp_path / "peft" / "adapter_config.json")
    adapters = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    modes = {path.stat().st_mode for path in (tmp_path / "peft").iterdir()}
    assert len(modes) == 1  # who may read one file may read all: safetensors 0.8 forbids it
    merged = tensors_of(tmp_path / "raw")
    for key, base in tensors_of(folder).items():
        module = f"base_model.model.{key.removesuffix('.weight')}"
        base = base.float()
        if f"{module}.lora_A.weight" in adapters:
            assert key.split(".")[-2] in config["target_modules"]
            a, b = (adapters.pop(f"{module}.lora_{part}.weight") for part in "AB")
            base = base + config["lora_alpha"] / config["r"] * b @ a
        assert (base - merged[key]).abs().max() < 1e-6, key
    assert not adapters and {"q_proj", "up_proj", "down_proj"} < {*config["target_modules"]}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert (model(ids).logits - expected).abs().max() > 1e-2
    if find_spec("peft"):
        from peft import PeftModel

        adapted = PeftModel.from_pretrained(model, tmp_path / "peft")
        for one in (adapted, adapted.merge_and_unload()):
            assert (one(ids).logits - expected).abs().max() < 1e-3
    for key, param in network.named_parameters():
        param.data *= 2 if ".lora_" in key else 1
    averaged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ema")
    assert (averaged(ids).logits - network(ids)).abs().max() < 1e-3


def test_adapters_that_cannot_go_out(imported, refuses, tmp_path):
    _, folder, out = imported("llama")
    with pytest.raises(S.UserError, match=r"first python convert\.py import"):
        S.load_model("INIT_FROM", str(folder))
    run = tmp_path / "run"
    adapt(out, run)
    source = C.read_weights(run, "raw")
    network = C.rebuild(source)
    embed = source.unmerged["embed"]
    matrix = "blocks.1.mlp.parametrizations.w_up.original"
    for name, changed, said in (
        ("embed", embed + 1, "embed"),
        ("embed", torch.cat([embed, embed[:4]]), "embed"),
        (matrix, source.unmerged[matrix] * 2, "blocks.1.mlp.w_up"),
    ):
        wrong = replace(source, unmerged=source.unmerged | {name: changed})
        fault = f": {said} is not that of {out}/step_000000: it has changed or grown"
        refusal(C.UserError, fault, C.adapter_files, wrong, network)
    other = tmp_path / "other"
    adapt(pack(small_network(), BYTE_TOKENIZER, tmp_path / "hybrid"), other)
    refuses("has no mlp='relu2'; export without --adapters", "export", other, "--adapters")
    refuses("has no adapters; LORA_RANK trains them", "export", out, "--adapters")
    refuses("must be without --like", "export", run, "--adapters", "--like", folder)


@pytest.mark.parametrize("start_from", ["base", "base/final", "base/step_000009"])
@torch.no_grad()
def test_adapters_on_an_ordinary_run(transformers, tmp_path, capsys, start_from):
    """They are for its unrounded weights, or the raw ones of a checkpoint. The export that the command
    names has these weights, whatever the run packed: with the adapters it is the tuned model.
    """
    from safetensors.torch import load_file

    llama = C.HF_SHAPE | C.HF_ARCHITECTURES["LlamaForCausalLM"]
    llama |= dict(layers="a a", norms="rms_weight rms_weight", norm_eps=1e-5)
    raw, chosen = (small_network(seed, **llama) for seed in range(2))
    base = pack(chosen, BYTE_TOKENIZER, tmp_path / "base")  # rounded
    meta = dict(settings={}, step=9, shape=vars(raw.config))
    averages = {"count": 1, "values": [param.data for param in chosen.parameters()]}
    states = {"model": raw.state_dict(), "training": {"ema": averages}}
    S.write_checkpoint(base / "step_000009", states, meta)
    S.write_checkpoint(base / "final", {"model": chosen.state_dict()}, meta)
    write_json(base / "result.json", {"weights": "ema"})
    expected = adapt(tmp_path / start_from, tmp_path / "run")(texts())
    convert("export", tmp_path / "run", tmp_path / "adapters", "--adapters")
    words = re.search(r"python convert\.py (export .*)", capsys.readouterr().out)[1]
    convert(*words.replace("OUT", str(tmp_path / "model")).split())
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert (model(texts()).logits - expected).abs().max() > 1e-2
    adapters = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    assert len(adapters) == 2 * 2 * 7
    for name, param in model.named_parameters():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{module}.lora_A.weight" in adapters:
            a, b = (adapters[f"{module}.lora_{part}.weight"] for part in "AB")
            param += 3 * b @ a  # alpha / rank
    assert (model(texts()).logits - expected).abs().max() < 1e-4


# --------------------------------------------------------------------------------------- tokenizers
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA_SPLIT = QWEN_SPLIT.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)


@functools.cache
def hard_texts():
    """Return 2,000 short texts: code, prose, emoji, CJK, combining accents, numbers, runs of spaces."""
    words = "def f(x): return | I'll | DON'T | naïve | e\u0301te\u0301 | 日本語の文 | 한국어 | 👩‍👩‍👧 | 🙂 | 12345"
    words += " | 3.14159 | !?... | ß | \u00a0 | x_1 | the | of"
    words = [*words.split(" | "), "  ", "    ", "\n\n", "\t", "\r\n"]
    random = Random(1)
    return [
        random.choice(("", " ")).join(random.choices(words, k=random.randint(1, 8)))
        for _ in range(2000)
    ]


def train_tokenizer(kind, size=600):
    """Return a tokenizer as the files of a published model describe it, trained on a few texts."""
    tokenizers = pytest.importorskip("tokenizers")
    before = tokenizers.pre_tokenizers
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(ignore_merges=kind == "llama3"))
    steps = [before.ByteLevel(add_prefix_space=False, use_regex=kind in ("gpt2", "smollm2"))]
    if kind == "smollm2":
        steps.insert(0, before.Digits(individual_digits=True))
    elif kind != "gpt2":
        pattern = tokenizers.Regex(LLAMA_SPLIT if kind == "llama3" else QWEN_SPLIT)
        steps.insert(0, before.Split(pattern, "isolated"))
    tokenizer.pre_tokenizer = before.Sequence(steps) if len(steps) > 1 else steps[0]
    if kind == "qwen2":
        tokenizer.normalizer = tokenizers.normalizers.NFC()
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=before.ByteLevel.alphabet(), show_progress=False
    )
    # Texts that stay as they are: another tokenizer would be another test.
    license_text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    tokenizer.train_from_iterator([license_text, *hard_texts()], trainer)
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens(["<think>", "</think>"])
    return tokenizer


def read(folder, described=None):
    """Return the tokenizer that import makes of a folder's tokenizer.json, as the scripts load it."""
    if described is not None:
        write_json(folder / "tokenizer.json", described)
    path = folder / "imported.tiktoken"
    path.write_bytes(C.hf_tokenizer(folder, 640).content)
    return S.load_tokenizer(path)


@pytest.mark.parametrize("kind", ["gpt2", "qwen2", "llama3", "smollm2"])
def test_a_tokenizer_json_encodes_as_it_does(tmp_path, kind):
    """2,000 texts. Decoded ids are the text, or its normal form. BOS is <|endoftext|>, or what
    tokenizer_config.json says.
    """
    tokenizer = train_tokenizer(kind)
    bos = "<|im_start|>" if kind == "llama3" else "<|endoftext|>"
    if kind == "llama3":
        config = {"bos_token": {"content": bos}}
        write_json(tmp_path / "tokenizer_config.json", config)
    found = read(tmp_path, json.loads(tokenizer.to_str()))
    assert found.bos_id == tokenizer.token_to_id(bos)
    assert found.vocab_size == tokenizer.get_vocab_size() == 605
    different = 0
    for text in hard_texts():
        ids = found.encode(text)
        assert ids == tokenizer.encode(text, add_special_tokens=False).ids, text
        decoded = b"".join(found.pieces[i] for i in ids).decode()
        assert decoded == (unicodedata.normalize("NFC", text) if kind == "qwen2" else text)
        different += decoded != text
    assert (different > 0) == (kind == "qwen2")
    assert found.bos_id not in found.encode("<|endoftext|><|im_start|>")  # plain text


@pytest.mark.parametrize("ignore_merges", [False, True])
def test_a_piece_that_no_merge_reaches(tmp_path, ignore_merges):
    """tiktoken takes a whole part of a text if it is a piece, transformers only with ignore_merges."""
    tokenizers = pytest.importorskip("tokenizers")
    described = json.loads(train_tokenizer("llama3" if ignore_merges else "gpt2", 256).to_str())
    model = described["model"]
    model["vocab"] |= {"ab": 256, "bc": 257, "abc": 258, "xyz": 259}
    for token in described["added_tokens"]:
        token["id"] += 4
    model["merges"] = [["a", "b"], ["b", "c"], ["a", "bc"]]
    if ignore_merges:
        fault = "merges: must have every split of 'abc'"
        refusal(C.UserError, fault, read, tmp_path, described)
        model["merges"].append(["ab", "c"])
    found = read(tmp_path, described)
    theirs = tokenizers.Tokenizer.from_str(json.dumps(described))
    for text in ("abc", "xyz", "ab bc abc xyz", "xabc", "aabcc", " xyz"):
        assert found.encode(text) == theirs.encode(text).ids, text
    assert found.encode("abc") == ([258] if ignore_merges else [256, model["vocab"]["c"]])


ODD_TOKENIZERS = (  # a place in a good tokenizer.json, what stands there instead, and what is said
    ("normalizer", {"type": "Lowercase"}, "normalizer Lowercase: must be NFC or none"),
    ("pre_tokenizer", {"type": "Digits"}, "pre_tokenizer Digits: must be ByteLevel without a"),
    (
        "pre_tokenizer pretokenizers 0 pattern",
        {"Regex": "("},
        "its tokenizer cannot be used: ValueError",
    ),
    (
        "pre_tokenizer pretokenizers 0 pattern",
        {"Regex": r"\p{L}+| "},
        "its Regex must match every part of a text",
    ),
    ("added_tokens", [], r"bos_token .* must be one of tokenizer.json's added_tokens"),
    ("added_tokens 0 id", 7, "two tokens have one id, or one has two"),
    ("added_tokens 0 id", 639, "'<.endoftext.>' has the id 639: must be 600, as"),
    ("added_tokens 0 content", "", "added token '': is empty, or has two ids"),
    ("model", [], "its tokenizer cannot be used: TypeError"),
    ("model byte_fallback", True, "model BPE: must be byte-level BPE"),
    ("model end_of_word_suffix", "</w>", "end_of_word_suffix='</w>': must be none"),
    ("model merges 0", ["z", "\u0120the"], "its tokenizer cannot be used: KeyError"),
    ("model vocab zz", 10**12, "has 1000000000001 tokens, the model 640"),
    ("model vocab zz", 7, "two tokens have one id, or one has two"),
)
ODD_CONFIGS = (
    ([], "tokenizer_config.json: must be a JSON object, and is .."),
    ({"bos_token": 7}, "bos_token=7: must be a text"),
    ({"extra_special_tokens": ["<x>"]}, "added token '<x>': must be one of the tokenizer's"),
    ({"added_tokens_decoder": {"9": {"content": "<x>"}}}, "token '<x>': must be one of"),
    ({"chat_template": 7}, "chat_template: must be a text, or several with one named default"),
    ({"chat_template": "{% unknown %}"}, "chat template: Encountered unknown tag 'unknown'"),
)


def test_what_a_tokenizer_json_must_be(tmp_path):
    content = train_tokenizer("qwen2").to_str()
    for place, value, fault in ODD_TOKENIZERS:
        described = json.loads(content)
        *outer, last = [int(key) if key.isdigit() else key for key in place.split(" ")]
        functools.reduce(lambda part, key: part[key], outer, described)[last] = value
        refusal(C.UserError, fault, read, tmp_path, described)
    described = json.loads(content)
    described["model"]["merges"].reverse()
    fault = "merges: must be in the order of the ids"
    refusal(C.UserError, fault, read, tmp_path, described)
    described["model"]["unk_token"] = "<unk>"
    del described["model"]["vocab"]["!"]
    fault = "unk_token='<unk>': must be none, because the vocabulary lacks 1 bytes"
    refusal(C.UserError, fault, read, tmp_path, described)
    for config, fault in ODD_CONFIGS:
        write_json(tmp_path / "tokenizer_config.json", config)
        refusal(C.UserError, fault, read, tmp_path, json.loads(content))


# ------------------------------------------------------------------------------------ conversations
# Templates with what published ones do: a default system turn; BOS and trimmed texts; thoughts that
# earlier answers lose, while the last has some; a prompt that begins the thoughts.
CHATML = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HEADERS = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'system' and not loop.first %}{{ raise_exception('system first') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n\n{{ message.content | trim }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}"
)
THOUGHTS = (
    "{% set place = namespace(last=0) %}"
    "{% for message in messages %}{% if message.role == 'user' %}{% set place.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
    "{% for message in messages %}{% set text = message.content %}"
    "{% if message.role == 'assistant' %}{% set text = text.split('</think>')[-1].lstrip('\n') %}"
    "{% if loop.index0 > place.last %}{% set text = '<think>\n\n</think>\n\n' + text %}{% endif %}"
    "{% endif %}<|im_start|>{{ message.role }}\n{{ text }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING = THOUGHTS.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
# name -> template, and what follows the token that ends an answer, up to where the next one begins
TEMPLATES = {
    "chatml": (CHATML, "\n<|im_start|>user\n{0}<|im_end|>\n<|im_start|>assistant\n"),
    "headers": (HEADERS, "<|im_start|>user\n\n{1}<|im_end|><|im_start|>assistant\n\n"),
    "thoughts": (THOUGHTS, "\n<|im_start|>user\n{0}<|im_end|>\n<|im_start|>assistant\n"),
    "thinking": (THINKING, "\n<|im_start|>user\n{0}<|im_end|>\n<|im_start|>assistant\n<think>\n"),
}
TALK = [("<|system|>", "Be brief."), ("<|user|>", " What is 7 x 6?\n"), ("<|assistant|>", "42")]
TALKS = {
    "one answer": TALK,
    "two answers": [*TALK, ("<|user|>", "und 日本 é?"), ("<|assistant|>", "Nippon\n\n1")],
    "no system": [*TALK[1:], ("<|user|>", "<think>"), ("<|assistant|>", "I </think> so")],
    "ends with a question": [*TALK, ("<|user|>", "why?")],
}


@pytest.fixture(scope="module")
def chats(transformers, tmp_path_factory):
    """chats(template): the tokenizer of transformers, and ours, of one folder."""

    @functools.cache
    def make_tokenizers(name):
        folder = tmp_path_factory.mktemp("chats")
        tokenizer = train_tokenizer("qwen2")
        if name == "headers":  # as Llama 3 has it
            import tokenizers

            tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
                single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 600)]
            )
        theirs = transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            bos_token="<|endoftext|>",
            eos_token="<|im_end|>",
            chat_template=TEMPLATES[name][0],
        )
        theirs.save_pretrained(folder)
        (folder / "generation_config.json").write_text('{"eos_token_id": [601]}')
        return theirs, read(folder)

    return make_tokenizers


def messages(turns):
    return [{"role": role.strip("<|>"), "content": text} for role, text in turns]


@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_rendered_conversations_have_the_ids_of_transformers(chats, name, talk):
    """Prompts, and whole conversations; of these the answers that the model itself would write are learned, with the
    token that ends them.
    """
    theirs, ours = chats(name)
    turns = TALKS[talk]
    for count in range(1, len(turns) + 1):
        if turns[count - 1][0] == "<|user|>":
            asked = theirs.apply_chat_template(
                messages(turns[:count]), add_generation_prompt=True, return_dict=False
            )
            assert sample.asked_ids(ours, turns[:count]) == asked
    whole = theirs.apply_chat_template(messages(turns), return_dict=False)
    keeps_earlier = name in ("chatml", "headers")
    if talk == "ends with a question" and not keeps_earlier:
        with pytest.raises(S.RowError, match="writes no answer as the model would"):
            S.turn_ids(ours, turns)
        return
    if talk == "no system" and not keeps_earlier:
        with pytest.raises(S.RowError, match="drops text before </think> of an answer"):
            S.turn_ids(ours, turns)
        return
    ids, said = S.turn_ids(ours, turns)
    assert ids == whole or name == "thinking"
    assert theirs.decode(ids) == theirs.decode(whole)
    answers = [text for role, text in turns if role == "<|assistant|>"]
    expected = [text + "<|im_end|>" for text in answers]
    if not keeps_earlier:
        # The prompt of the last two templates begins the thoughts, or does not.
        begin = "\n</think>\n\n" if name == "thinking" else "<think>\n\n</think>\n\n"
        expected = [begin + answers[-1] + "<|im_end|>"]
    groups = itertools.groupby(zip(ids, said, strict=True), key=lambda pair: pair[1])
    learned = [[token for token, _ in group] for is_said, group in groups if is_said]
    assert [theirs.decode(part) for part in learned] == expected
    if talk == "one answer":
        assert sample.answer_ids(ours, turns[:2], turns[2][1]) == learned[0]
        assert ids.count(ours.bos_id) == (name == "headers")
        begin = sample.begin_ids(ours)
        assert [*begin, *ours.encode("abc")] == theirs.encode("abc")
    kind, _ = S.parse_row(dict(messages=messages(turns)), set(), ours, S.Settings())
    assert ("1 learned" in kind) == (len(answers) > len(expected))


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_an_environment_says_is_a_turn_of_the_template(chats, name):
    """Also a text that stands in the prompt of the next answer, in another turn, or is none."""
    theirs, ours = chats(name)
    for text in ("x.o......", " 4 to 7\n", "s", "start", "an", "<think>", "user", ".", ""):
        ids = train_grpo.observation_ids(ours, text)
        assert theirs.decode(ids) == TEMPLATES[name][1].format(text, text.strip()), text


def test_tokens_of_a_conversation(chats):
    """What ends an answer is what the folder says. Text begins without BOS. Thoughts are shown, marks are not."""
    theirs, ours = chats("chatml")
    end, bos = theirs.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert sample.stop_ids(ours) == {end, bos, 601} == {602, 600, 601} and ours.roles == {}
    assert sample.begin_ids(ours) == [] and ours.bos_id == bos
    assert sample.prompt_ids(ours, [("<|user|>", "abc")], "text") == ours.encode("abc")
    assert sample.prompt_ids(ours, [("<|user|>", "")], "text") == [bos]
    ids = ours.encode_marked("<think>so</think> yes<|im_end|>")
    assert sample.completion(ours, [bos], ids) == "<think>so</think> yes"
    assert ours.encode("<think>") != ours.encode_marked("<think>") == [ids[0]]
    assert S.turn_ids(ours, [("", "ab")])[0] == [*ours.encode("ab"), end]


def test_a_conversation_that_the_template_refuses_is_left_out(chats, tmp_path):
    _, ours = chats("headers")
    rows = [dict(messages=messages(turns)) for turns in (TALK, [TALK[1], TALK[0], TALK[2]])]
    parse = functools.partial(S.parse_row, tokenizer=ours, settings=S.Settings())
    notes = []
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    assert len(S.read_rows(str(path), parse, notes.append)) == 1
    assert "left out chat template: system first: 1 (the first is row 2)" in str(notes[0])


def test_answers_end_where_the_template_ends_them(transformers, tmp_path, capsys):
    """As in base models of Qwen2.5: EOS is <|endoftext|>, and the template of the chat models."""
    folder = tmp_path / "base"
    make(transformers, "qwen2", vocab_size=640, num_hidden_layers=1).save_pretrained(folder)
    train_tokenizer("qwen2", 600).save(str(folder / "tokenizer.json"))
    write_json(folder / "generation_config.json", {"eos_token_id": 600, "top_k": 20})
    row = dict(messages=[dict(role="user", content="a"), dict(role="assistant", content="b")])
    # A template that has no token after an answer, and one that refuses the conversation.
    plain = CHATML.replace("<|im_end|>", "")
    refused = CHATML + "{{ raise_exception('no') }}"
    before_eos = CHATML.replace("<|im_end|>", "<|im_end|> <|endoftext|>")
    for name, template, ends in (
        ("a", CHATML, [600, 602]),
        ("b", plain, [600]),
        ("c", refused, [600]),
        ("d", before_eos, [600]),
    ):
        config = dict(eos_token="<|endoftext|>", chat_template=template)
        write_json(folder / "tokenizer_config.json", config)
        out = tmp_path / name
        convert("import", folder, out)
        printed = capsys.readouterr().out
        assert ("calls '<|im_end|>' an EOS" in printed) == (name == "a")
        assert ": not used: top_k of generation_config.json; export --like has them" in printed
        tokenizer = S.load_tokenizer(out / "imported.tiktoken")
        assert S.stop_ids(tokenizer) == {*ends}
        convert("export", out, tmp_path / f"{name}_like", "--like", folder)
        generation = C.read_json(tmp_path / f"{name}_like" / "generation_config.json")
        assert generation["eos_token_id"] == (ends if name == "a" else 600)
        assert generation["top_k"] == 20
        if name == "a":
            ids, said = S.turn_ids(tokenizer, S.row_turns(row, set())[1])
            learned = [token for token, is_said in zip(ids, said, strict=True) if is_said]
            assert learned == [*tokenizer.encode("b"), 602]


ENDS = (  # config.json, generation_config.json (None: no file), EOS of the tokenizer, ends, end of a text
    (2, [602, 600], "<|im_end|>", [600, 602], 600),
    (2, 602, "<|im_end|>", [600, 602], 602),
    (2, None, "<|im_end|>", [2, 600, 602], 602),
    (600, {}, "<|im_end|>", [600, 602], 600),
    (None, {}, "<|im_end|>", [600, 602], 602),
    (602, 602, "<unknown>", [600, 602], 600),
)


@pytest.mark.parametrize(("own", "generation", "eos", "ends", "text_end"), ENDS)
def test_the_files_of_a_model_say_where_answers_and_texts_end(
    transformers, tmp_path, capsys, own, generation, eos, ends, text_end
):
    """Piece 2 is '#'. BOS is 600; it ends texts only where a file calls it an EOS, or none is known."""
    folder = tmp_path / "base"
    make(transformers, "qwen2", vocab_size=640, num_hidden_layers=1).save_pretrained(folder)
    train_tokenizer("qwen2", 600).save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", dict(eos_token=eos))
    edit(folder / "config.json", eos_token_id=own)
    (folder / "generation_config.json").unlink()
    if generation is not None:
        written = generation or None
        write_json(folder / "generation_config.json", {"eos_token_id": written})
    convert("import", folder, tmp_path / "run")
    printed = capsys.readouterr().out
    tokenizer = S.load_tokenizer(tmp_path / "run" / "imported.tiktoken")
    assert S.stop_ids(tokenizer) == {*ends}
    assert ("no added tokens" in printed) == (2 in ends)
    assert ("not used: eos_token '<unknown>', which is no token" in printed) == ("un" in eos)
    assert ("not used: eos_token_id [2]" in printed) == (own == 2 and 2 not in ends)
    assert ("no file names BOS, '<|endoftext|>', as an EOS" in printed) == (text_end == 602)
    if generation:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        assert model.generation_config.eos_token_id == generation
    ids, said = S.turn_ids(S.with_roles(tokenizer), [("", "a text")])
    assert ids == [*tokenizer.encode("a text"), text_end] and all(said)
    # A score counts the BOS between two texts only where it ends texts.
    count = len(tokenizer.encode("a text")) * 2
    write_lines(tmp_path / "rows.jsonl", [{"text": "a text"}] * 2)
    asked = sample.Settings(artifact=str(tmp_path / "run"), mode="score", device="cpu")
    network, _, _ = sample.load_model("ARTIFACT", asked.artifact)
    model = sample.Model(network, tokenizer, "file", 64)
    models = sample.Models(model, None, None, print)
    scores = sample.score_text(models, str(tmp_path / "rows.jsonl"), asked)
    assert scores["tokens"] == count + (text_end == 600)
    stream = torch.tensor([600, *tokenizer.encode("a text")] * 2)
    logps = network.double()(stream[None, :-1]).log_softmax(-1)[0]
    logps = logps.gather(1, stream[1:, None])[:, 0]
    counted = (stream[1:] != 600) | (text_end == 600)
    assert scores["nats"] == pytest.approx(-logps[counted].sum().item(), rel=1e-5)


def test_an_end_that_is_an_ordinary_piece_is_refused(tmp_path):
    """transformers makes an added token of it."""
    train_tokenizer("qwen2", 600).save(str(tmp_path / "tokenizer.json"))
    write_json(tmp_path / "tokenizer_config.json", dict(eos_token="#"))
    fault = "eos_token '#': must be an added or control token, not an ordinary piece"
    refusal(C.UserError, fault, C.hf_tokenizer, tmp_path, 640)


# ------------------------------------------------------------------------------------ damaged folders
def damaged(content, random):
    """Return JSON, or a safetensors file, with an odd value, or without one."""
    if content[:1] == b"{":
        return json.dumps(mutated(json.loads(content), random)).encode()
    end = 8 + int.from_bytes(content[:8], "little")
    header = damaged(content[8:end], random)
    return len(header).to_bytes(8, "little") + header + content[end:]


@pytest.mark.parametrize("first, count", [(0, 40), pytest.param(40, 360, marks=pytest.mark.full)])
def test_damaged_folders(transformers, tmp_path, capsys, first, count):
    """A folder with one odd value is refused in one line, or makes a model that works."""
    folder = tmp_path / "good"
    make(transformers, "llama3", vocab_size=640, num_hidden_layers=1).save_pretrained(folder)
    train_tokenizer("qwen2", 300).save(str(folder / "tokenizer.json"))
    config = dict(eos_token="<|im_end|>", chat_template=CHATML)
    write_json(folder / "tokenizer_config.json", config)
    placed = {tensor.key: "a.safetensors" for tensor in C.hf_headers(folder)}
    write_json(folder / "model.safetensors.index.json", {"weight_map": placed})
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    files = sorted(folder.iterdir())
    refused = 0
    for number in range(first, first + count):
        random = Random(number)
        path = random.choice(files)
        content = path.read_bytes()
        path.write_bytes(damaged(content, random))
        out = tmp_path / f"run{number}"
        capsys.readouterr()
        code = exit_code(C, "import", folder, out)
        error = capsys.readouterr().err
        path.write_bytes(content)
        assert code in (0, 2) and error.count("\n") == (code == 2), (number, path, error)
        if code == 0:
            network, found, _ = S.load_model("INIT_FROM", str(out))
            assert network(torch.tensor([found.encode("the 12 words")])).isfinite().all()
        refused += code == 2
        assert code == 0 or not out.exists()
    assert 0.3 * count < refused < count
