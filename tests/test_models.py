"""Models of transformers, read by convert.py import and written by export: logits, gradients, generation, and every
tensor byte for byte.
"""

import functools
import json
import re
import sys
import unicodedata
from pathlib import Path
from random import Random

import pytest
import torch
from test_weights import save

import convert as C
import quantize as Q
import sample
import train_gpt as T
import train_grpo
import train_sft as S
from conftest import ROOT, add_noise, environment, exit_code, mutated, start

pytestmark = pytest.mark.usefixtures("one_thread")
VOCAB = 264  # of the tokenizer "bytes"
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


@pytest.fixture(scope="module")
def transformers():
    """Return the package, with its own form of the delta rule: fla's would need a GPU."""
    before = sys.modules.get("fla")
    sys.modules["fla"] = None
    package = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("safetensors")
    package.utils.logging.set_verbosity_error()
    yield package
    del sys.modules["fla"]
    if before is not None:
        sys.modules["fla"] = before


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


@pytest.fixture
def imported(transformers, call, tmp_path):
    """imported(name): (model of transformers, its folder, the run folder that import made of it)."""

    def save_and_import(name, dtype=torch.float32, **changes):
        model = make(transformers, name, **changes).to(dtype)
        folder, out = tmp_path / name, tmp_path / "runs" / name
        model.save_pretrained(folder)
        run("import", folder, out, TOKENIZER_PATH="bytes")
        return model, folder, out

    def run(*words, **environ):
        code, _, error = call(*words, **environ)
        assert code == 0, error

    save_and_import.run = run
    return save_and_import


@pytest.fixture
def refuses(call, capsys, tmp_path):
    """refuses(fault, folder): import of the folder ends with one line, which has the fault, and leaves nothing."""

    def check(fault, folder, **environ):
        capsys.readouterr()  # transformers shows its progress
        code, _, error = call("import", folder, tmp_path / "refused", **environ)
        assert code == 2 and re.search(fault, error), error
        assert not (tmp_path / "refused").exists()

    return check


def load(out):
    return S.load_model("INIT_FROM", str(out))[0]


def texts(rows=3, length=70):
    """Return ids of bytes: those below 4 have a meaning for the tokenizer."""
    return torch.randint(4, 260, (rows, length), generator=torch.Generator().manual_seed(5))


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


@pytest.mark.parametrize("name", ["llama3", "qwen2", "qwen3", "qwen3_5_1_to_2"])
def test_token_by_token_and_padded_rows(imported, name):
    """Greedy texts after prompts of different lengths are those of transformers, row by row."""
    model, _, out = imported(name)
    network = load(out)
    prompts = [row.tolist() for row in texts(2, 40)]
    prompts[1] = prompts[1][:7]
    samples = sample.generate(network, prompts, 1, 12, 0.0, [(0,), (1,)], frozenset())
    for prompt, found in zip(prompts, samples, strict=True):
        ids = torch.tensor([prompt])
        want = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None)
        assert found.ids == want[0, len(prompt) :].tolist()


def check_logits(transformers, folder, out):
    """The network that import made of a folder has the logits of transformers; return it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    network = load(out)
    assert (network(texts()) - model(texts()).logits).abs().max() < 1e-4
    return network


def tensors_of(folder):
    """Return the tensors of all safetensors files of a model in a folder."""
    from safetensors.torch import load_file

    files = sorted(folder.glob("model*.safetensors"))
    return {key: tensor for path in files for key, tensor in load_file(path).items()}


def assert_same_tensors(folder, other):
    before = tensors_of(folder)
    after = tensors_of(other)
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        bits = [one.view(torch.uint8) if one.ndim else one for one in (tensor, after[key])]
        assert tensor.dtype == after[key].dtype and torch.equal(*bits), key


@pytest.mark.parametrize("name", MODELS)
def test_export_gives_every_tensor_back(transformers, imported, tmp_path, name):
    """Byte for byte, in its own dtype, and all other files; transformers loads the same class."""
    model, folder, out = imported(name, torch.bfloat16)
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 128}')
    (folder / "pytorch_model.bin").write_bytes(b"weights of another format")
    imported.run("export", out, tmp_path / "back", "--like", folder)
    assert_same_tensors(folder, tmp_path / "back")
    for path in {*folder.iterdir()} - {folder / "pytorch_model.bin", folder / "model.safetensors"}:
        assert (tmp_path / "back" / path.name).read_bytes() == path.read_bytes()
    assert not (tmp_path / "back" / "pytorch_model.bin").exists()
    again, loading = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "back", dtype="auto", output_loading_info=True
    )
    assert type(again) is type(model) and again.dtype == torch.bfloat16
    keys = ("missing_keys", "unexpected_keys", "mismatched_keys")
    assert not any(loading[key] for key in keys), loading


def test_export_without_the_folder(transformers, imported, tmp_path):
    """A config of our own, in float32, with the same logits."""
    _, folder, out = imported("qwen3", torch.bfloat16)
    imported.run("export", out, tmp_path / "own")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "own")
    assert again.dtype == torch.float32 and again.config.eos_token_id == [1, 263]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert torch.equal(again(texts()).logits, model(texts()).logits)


@pytest.mark.parametrize("preset", ["llama", "qwen2", "qwen3", "qwen3_5"])
def test_presets_are_models_of_transformers(transformers, imported, tmp_path, preset):
    """A network that train_gpt.py makes is exported, loads as the preset's class, and has its logits."""
    environ = dict(ARCH_MODE=preset, MODEL_DIM="64", NUM_HEADS="4", NUM_LAYERS="4")
    settings = T.load_settings(T.Settings, environ, presets={"ARCH_MODE": T.ARCH_PRESETS})
    torch.manual_seed(0)
    network = T.GPT(T.model_config(settings, VOCAB, 1))
    add_noise(network, 0.1)
    imported.run("export", save(tmp_path / "run", 1, network).parent, tmp_path / "exported")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    family = {"llama": "Llama", "qwen3_5": "Qwen3_5"}.get(preset, preset.title())
    assert type(model).__name__ == f"{family}ForCausalLM"
    ids = texts()
    expected = model(ids).logits
    assert expected.std() > 0.3 and (network(ids) - expected).abs().max() < 1e-4
    if preset == "qwen3_5":
        assert network.config.layers == "g g g a" and model.model.layers[3].self_attn.q_proj


def test_a_folder_of_several_files_with_images(imported, tmp_path):
    """Qwen3_5ForConditionalGeneration has its text model under another name, and other parts beside,
    which an export has too. A tied head may stand in the files.
    """
    from safetensors.torch import save_file

    _, folder, out = imported("qwen3_5", torch.bfloat16)
    state = tensors_of(folder)
    renamed = {key.replace("model.", "model.language_model."): w for key, w in state.items()}
    renamed |= {"model.visual.patch.weight": torch.randn(3), "mtp.fc.weight": torch.ones(2).half()}
    renamed["lm_head.weight"] = renamed["model.language_model.embed_tokens.weight"].clone()
    names = sorted(renamed)
    other = tmp_path / "images"
    other.mkdir()
    for number, half in enumerate((names[::2], names[1::2])):
        save_file({key: renamed[key] for key in half}, other / f"model-{number}.safetensors")
    config = json.loads((folder / "config.json").read_bytes())
    weight_map = {
        key: f"model-{number}.safetensors" for number in (0, 1) for key in names[number::2]
    }
    (other / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    save_file({"lora_a": torch.ones(2)}, other / "adapter_model.safetensors")  # is not the model's
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": config | {"tie_word_embeddings": False},
        "tie_word_embeddings": True,  # which transformers goes by
        "vision_config": {"depth": 2},
    }
    (other / "config.json").write_text(json.dumps(config))
    run = tmp_path / "runs" / "images"
    imported.run("import", other, run, TOKENIZER_PATH="bytes")
    for one, two in zip(*(load(path).parameters() for path in (out, run)), strict=True):
        assert torch.equal(one, two)
    imported.run("export", run, tmp_path / "back", "--like", other)
    assert_same_tensors(other, tmp_path / "back")
    files = sorted(path.name for path in (tmp_path / "back").iterdir())
    assert files == ["SHA256SUMS", "config.json", "model.safetensors"]
    assert json.loads((tmp_path / "back" / "config.json").read_bytes()) == config


def save_trained(run, network, out):
    """Write a network as a run whose tokenizer is that of an imported one."""
    source = Q.read_weights(run)
    trained = Q.Weights(run, network.state_dict(), vars(network.config), source.header)
    out.mkdir()
    for path in run.glob("*.tiktoken"):
        (out / path.name).write_bytes(path.read_bytes())
    Q.write_model(out / "step_000000", trained, run / "step_000000")


@pytest.mark.parametrize("spare", [38, 0])
def test_role_tokens_in_an_export_like_the_original(transformers, imported, call, tmp_path, spare):
    """They take the rows of ids without a token; if there are fewer, the vocabulary grows.

    The tokenizer has them too, with a chat template, and `generate` ends at <|end|>.
    """
    from safetensors.torch import save_file

    tokenizer = train_tokenizer("gpt2")
    size = tokenizer.get_vocab_size()
    folder = tmp_path / "model"
    name = "llama" if spare else "llama_tied_mqa"
    model = make(transformers, name, vocab_size=size + spare).to(torch.bfloat16)
    model.save_pretrained(folder)
    # A tied head may stand in the files.
    state = tensors_of(folder) | {"lm_head.weight": model.lm_head.weight.detach().clone()}
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"))
    imported.run("import", folder, tmp_path / "runs" / "base")
    network, found, _ = S.load_model("INIT_FROM", str(tmp_path / "runs" / "base"))
    S.grow_roles(network, found)
    for param in network.parameters():
        param.data = param.data.bfloat16().float() * 2
    save_trained(tmp_path / "runs" / "base", network, tmp_path / "runs" / "tuned")
    code, output, error = call(
        "export", tmp_path / "runs" / "tuned", tmp_path / "back", "--like", folder
    )
    assert code == 0, error
    config = json.loads((tmp_path / "back" / "config.json").read_bytes())
    rows = max(size + 4, size + spare)
    assert config == json.loads((folder / "config.json").read_bytes()) | {"vocab_size": rows}
    before, after = (tensors_of(path) for path in (folder, tmp_path / "back"))
    for key in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(after[key][:size], 2 * before[key][:size])
        assert torch.equal(after[key][size + 4 :], before[key][size + 4 :])
    assert torch.equal(after["model.embed_tokens.weight"][: size + 4], network.embed.bfloat16())
    head = network.embed if network.head is None else network.head
    assert torch.equal(after["lm_head.weight"][: size + 4], head.bfloat16())
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "back", dtype=torch.float32
    )
    ids = torch.randint(0, size + 4, (2, 50))
    ids[ids == found.bos_id] = size  # behind BOS our network begins a document
    talker = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    question = [{"role": "user", "content": "the cat"}]
    prompt = talker.apply_chat_template(question, add_generation_prompt=True)["input_ids"]
    assert prompt == sample.asked_ids(sample.with_roles(found), [("<|user|>", "the cat")])
    assert set(again.generation_config.eos_token_id) == sample.stop_ids(sample.with_roles(found))
    with torch.no_grad():
        logits = again(ids).logits[..., : size + 4]
        assert (logits - network(ids)).abs().max() < 1e-5 * logits.abs().max()


UNLIKE = [
    (dict(num_key_value_heads=4), r"config.json: has num_kv_heads=4, .*step_000000 2"),
    (dict(rope_parameters=dict(rope_theta=5e5)), r"has rope_base=500000.0, .* 10000.0"),
    (dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3"), r"has qk_norm=True, .* False"),
    (dict(num_hidden_layers="3"), "num_hidden_layers='3': must be a whole number from 1 to 4096"),
]


@pytest.mark.parametrize("script", [S, train_grpo])
def test_an_imported_start_is_known_whatever_its_tokenizer(imported, script):
    """It has rates of its own, also if its tokenizer is a SentencePiece model or bytes."""
    _, _, out = imported("llama")
    rate, lora_rate = script.IMPORTED_RATES
    values = script.start_settings({"INIT_FROM": str(out)})
    assert (values["learning_rate"], values["qat"], values["artifact_bytes_max"]) == (
        rate,
        False,
        0,
    )
    assert (
        script.start_settings({"INIT_FROM": str(out), "LORA_RANK": "4"})["learning_rate"]
        == lora_rate
    )


def test_an_imported_start_has_its_rates_under_every_optimizer(imported):
    """The rates of OPTIMIZER_PRESETS are those of new networks, 300 times as high."""
    _, _, out = imported("llama")
    given = {"INIT_FROM": str(out), "OPTIMIZER": "lion", "SCALAR_LR": "0.5"}
    presets = {"OPTIMIZER": T.OPTIMIZER_PRESETS}
    found = T.load_settings(T.Settings, given, (), presets, T.shape_settings)
    assert (found.optimizer, found.matrix_lr, found.tied_embed_lr) == ("lion", 1e-5, 1e-5)
    assert found.scalar_lr == 0.5 and found.matrix_bits == 8


def test_export_like_another_model_is_an_error(imported, call, tmp_path):
    """One line names what differs, or the tensor that a folder lacks. Nothing is left behind."""
    from safetensors.torch import save_file

    _, folder, out = imported("llama")
    path = folder / "config.json"
    config = json.loads(path.read_bytes())

    def refuses(fault):
        code, _, error = call("export", out, tmp_path / "back", "--like", folder)
        assert code == 2 and re.search(fault, error), error
        assert not (tmp_path / "back").exists()

    for changes, fault in UNLIKE:
        path.write_text(json.dumps(config | changes))
        refuses(fault)
    path.write_text("{")
    refuses("config.json: is no JSON")
    path.write_text(json.dumps(config))
    state = tensors_of(folder)
    del state["model.layers.1.mlp.up_proj.weight"]
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    refuses("its safetensors files lack model.layers.1.mlp.up_proj.weight")


REFUSED = [
    (dict(architectures=["MistralForCausalLM"]), "architectures='MistralForCausalLM': must be one"),
    (dict(attention_bias=True), "attention_bias=True: must be False"),
    (dict(mlp_bias=True), "mlp_bias=True: must be False"),
    (dict(use_sliding_window=True), "use_sliding_window=True: must be False"),
    (dict(hidden_act="gelu"), "hidden_act='gelu': must be 'silu'"),
    (dict(quantization_config={}), "quantization_config={}: must be None"),
    (dict(rope_parameters=dict(rope_type="yarn")), "rope_type='yarn': must be default or llama3"),
    (dict(partial_rotary_factor=0.5), "partial_rotary_factor=0.5: must be 1"),
    (dict(layer_types=["sliding_attention"] * 3), "layer_types=.*: must be among full_attention"),
    (dict(hidden_size=None), "hidden_size=None: must be a whole number from 1"),
    (dict(hidden_size=64.0), "hidden_size=64.0: must be a whole number from 1"),
    (dict(num_hidden_layers=10**9), "num_hidden_layers=1000000000: must be a whole number from 1"),
    (dict(intermediate_size=1 << 24), "mlp.down_proj.weight .*: expected .64, 16777216."),
    (dict(num_key_value_heads=3), "num_key_value_heads=3: must divide num_attention_heads=4"),
    (dict(model_type="mistral"), "model_type='mistral': must be that of LlamaForCausalLM"),
    (dict(architectures=[1]), "architectures='1': must be one of"),
    (dict(architectures=[]), "architectures='..': must be one of"),
    (dict(rms_norm_eps=float("nan")), "rms_norm_eps=nan: must be a number above 0"),
    (dict(rope_parameters=dict(full_attention={})), "must be one kind for all layers"),
    (dict(rope_scaling=dict(type="linear", factor=2.0)), "rope_type='linear': must be default"),
    (dict(rope_parameters=dict(rope_theta=-1)), "rope_theta=-1: must be a number above 0"),
    (dict(layer_types=["full_attention"]), "layer_types: has 1 layers, num_hidden_layers 3"),
    (dict(tie_word_embeddings="yes"), "tie_word_embeddings='yes': must be true or false"),
    (dict(text_config=[1]), "text_config=.1.: must be an object"),
    (dict(intermediate_size=96), "mlp.down_proj.weight .*: expected .64, 96."),
    (dict(num_hidden_layers=4), "lack model.layers.3"),
    (dict(num_hidden_layers=2), "model.layers.2.* expected no such tensor"),
    (dict(vocab_size=300), "weight .264, 64.: expected .300, 64."),
]


def rewrite(folder, change):
    """Write a folder's weights again as `change`, of their dict, left them."""
    from safetensors.torch import save_file

    state = tensors_of(folder)
    change(state)
    for path in folder.glob("model*"):
        path.unlink()
    save_file(state, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("name", ["llama", "llama_tied_mqa"])
def test_a_head_of_its_own_in_a_tied_model(transformers, imported, tmp_path, name):
    """It counts, as in transformers, and is given back; a head that is the embedding is tied."""
    _, folder, _ = imported(name)
    config = json.loads((folder / "config.json").read_bytes()) | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    for number, scale in enumerate((1.0, -1.0)):
        rewrite(
            folder,
            lambda state, scale=scale: state.update(
                {"lm_head.weight": scale * state["model.embed_tokens.weight"]}
            ),
        )
        out = tmp_path / "runs" / f"head{number}"
        imported.run("import", folder, out, TOKENIZER_PATH="bytes")
        network = check_logits(transformers, folder, out)
        assert network.config.tie_embeddings == (scale == 1.0)
        imported.run("export", out, tmp_path / f"back{number}", "--like", folder)
        assert_same_tensors(folder, tmp_path / f"back{number}")


def test_weights_that_are_refused(imported, refuses, transformers):
    """NaN and infinite weights, integers, tensors that are missing, too many or of another shape."""
    _, folder, _ = imported("llama")
    bytes_of_texts = dict(TOKENIZER_PATH="bytes")
    key = "model.layers.1.mlp.up_proj.weight"
    good = tensors_of(folder)[key]
    odd = good.clone()
    odd[3, 5] = float("nan")
    for w, fault in (
        (odd, "has weights that are NaN or infinite"),
        (odd.nan_to_num(float("-inf")), "has weights that are NaN or infinite"),
        (good.double() * 1e300, "has weights that are NaN or infinite"),
        (good.int(), "has dtype I32; must be of floating-point numbers"),
        (good[:-1].clone(), "expected .100, 64."),
        (good[None].clone(), "expected .100, 64."),
    ):
        rewrite(folder, lambda state, w=w: state.update({key: w}))
        refuses(f"{key}.*{fault}", folder, **bytes_of_texts)
    rewrite(folder, lambda state: state.update({key: good, "model.x": good + 1}))
    refuses("model.x .*: expected no such tensor", folder, **bytes_of_texts)
    rewrite(folder, lambda state: [state.pop(name) for name in (key, "model.x")])
    refuses(f"lack {key}", folder, **bytes_of_texts)


@pytest.mark.parametrize("dtype", ["float16", "float64", "float8_e4m3fn"])
def test_weights_of_other_dtypes(transformers, imported, tmp_path, dtype):
    _, folder, _ = imported("llama")
    rewrite(
        folder,
        lambda state: state.update({key: w.to(getattr(torch, dtype)) for key, w in state.items()}),
    )
    imported.run("import", folder, tmp_path / "runs" / "other", TOKENIZER_PATH="bytes")
    check_logits(transformers, folder, tmp_path / "runs" / "other")


ROPES = (
    dict(rope_parameters=None, rope_theta=500.0),
    dict(rope_parameters=dict(rope_type="default", rope_theta=700), rope_theta=500.0),
    dict(rope_parameters=dict(rope_theta=700), rope_scaling={**LLAMA3, "rope_theta": 900.0}),
    dict(rope_parameters=None, rope_theta=500.0, rope_scaling=dict(type="default")),
    dict(rope_parameters={k: v for k, v in LLAMA3.items() if k[:4] != "orig"}),
)


@pytest.mark.parametrize("changes", ROPES)
def test_rotary_positions_of_older_configs(transformers, imported, tmp_path, changes):
    _, folder, _ = imported("llama")
    config = json.loads((folder / "config.json").read_bytes()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    imported.run("import", folder, tmp_path / "runs" / "rope", TOKENIZER_PATH="bytes")
    check_logits(transformers, folder, tmp_path / "runs" / "rope")


def test_an_index_names_files_beside_it(imported, refuses):
    _, folder, _ = imported("llama")
    (folder / "model.safetensors").rename(folder / "x.safetensors")
    path = folder / "model.safetensors.index.json"
    for placed in ("../x.safetensors", "/x.safetensors", 7, "config.json", ""):
        path.write_text(json.dumps({"weight_map": {"a": placed}}))
        refuses("index.json: weight_map: .*: must name files beside it", folder)
    for text, fault in (
        ('{"weight_map": []}', "weight_map: None"),
        ("[1]", "must be a JSON object"),
    ):
        path.write_text(text)
        refuses(fault, folder)
    path.write_text(json.dumps({"weight_map": {"a": "y.safetensors"}}))
    refuses("y.safetensors: no such file", folder)
    path.unlink()
    refuses("model.safetensors: no such file", folder)


def test_nulls_and_damaged_files(imported, refuses, tmp_path):
    """A key that is null is one that is missing. A file that is cut off is named."""
    _, folder, out = imported("llama")
    path = folder / "config.json"
    config = json.loads(path.read_bytes())
    nulls = ("attention_bias", "mlp_bias", "rope_scaling", "quantization_config", "head_dim")
    path.write_text(json.dumps(config | dict.fromkeys(nulls)))
    imported.run("import", folder, tmp_path / "runs" / "nulls", TOKENIZER_PATH="bytes")
    assert torch.equal(load(out)(texts()), load(tmp_path / "runs" / "nulls")(texts()))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    refuses("model.safetensors: no whole safetensors file", folder, TOKENIZER_PATH="bytes")


@pytest.mark.parametrize("family", ["Llama", "Qwen3_5"])
def test_a_part_of_a_head_that_rotates_is_told_or_refused(transformers, family):
    """transformers' default is a quarter for Qwen3.5; the other models have no such part."""
    config = transformers.Qwen3_5TextConfig() if family == "Qwen3_5" else transformers.LlamaConfig()
    shape = C.hf_shape(
        json.loads(config.to_json_string()) | {"architectures": [f"{family}ForCausalLM"]}
    )
    assert shape["rope_dims"] == (64 if family == "Qwen3_5" else 128)
    for dims in (0, 16):
        network_config = C.GPTConfig(**{**shape, "rope_dims": dims})
        if family == "Llama" and dims:
            with pytest.raises(C.UserError, match="LlamaForCausalLM has no rope_dims=16"):
                C.hf_config(network_config)
            continue
        written = C.hf_config(network_config)["rope_parameters"]
        assert written.get("partial_rotary_factor", 1.0) == (dims / 256 if dims else 1.0)


def test_what_the_network_does_not_compute_is_refused_by_name(imported, refuses):
    _, folder, _ = imported("llama")
    path = folder / "config.json"
    config = json.loads(path.read_bytes())
    for changes, fault in REFUSED:
        path.write_text(json.dumps(config | changes))
        refuses(fault, folder, TOKENIZER_PATH="bytes")


def train_adapters(folder, out):
    """Return a run of train_sft.py that trained LoRA adapters on an imported model."""
    rows = folder.parent / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps(dict(prompt=str(i), answer=str(i))) + "\n" for i in range(99))
    )
    settings = dict(INIT_FROM=out, TRAIN_FILES=rows, ITERATIONS=9, COMPILE=0, RUN_ID="tuned")
    settings |= dict(MAX_WALLCLOCK_SECONDS=0, OUT_DIR=folder.parent, TRAIN_SEQ_LEN=64, QAT=0)
    settings |= dict(LORA_RANK=4, LORA_ALPHA=12, EMA=1, LEARNING_RATE=0.003)
    done = start([ROOT / "train_sft.py"], environment(**settings), Path(folder.parent))
    assert done.returncode == 0, done.stderr
    return folder.parent / "tuned"


def test_an_imported_model_is_trained_and_exported(transformers, imported, call):
    """INIT_FROM of a folder that was not imported is an error; of one that was, it trains, by LoRA. What is exported
    has the logits of the trained network.
    """
    _, folder, out = imported("qwen3_5_1_to_2")
    with pytest.raises(S.UserError, match=r"first python convert\.py import"):
        S.load_model("INIT_FROM", str(folder))
    run = train_adapters(folder, out)
    check_adapters(imported, call, folder, run)
    for average in ("raw", "ema"):
        exported = folder.parent / average
        imported.run("export", run, exported, "--weights", average)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
        (checkpoint,) = run.glob("step_000009")
        network = load(checkpoint)
        if average == "ema":
            trained = [param for name, param in network.named_parameters() if ".lora_" in name]
            values = torch.load(checkpoint / "training.pt")["ema"]["values"]
            for param, value in zip(trained, values, strict=True):
                param.data = value
        with torch.no_grad():
            ids = texts()
            assert (network(ids) - theirs(ids).logits).abs().max() < 1e-4
            assert (network(ids) - load(out)(ids)).abs().max() > 1e-2


def check_adapters(imported, call, folder, run):
    """The base's weights and the adapters that `export` writes make the weights that it writes without --adapters."""
    imported.run("export", run, folder.parent / "peft", "--adapters", "--weights", "raw")
    imported.run("export", run, folder.parent / "merged", "--weights", "raw")
    from safetensors.torch import load_file

    config = json.loads((folder.parent / "peft" / "adapter_config.json").read_bytes())
    assert (config["r"], config["lora_alpha"]) == (4, 12)
    adapters = load_file(folder.parent / "peft" / "adapter_model.safetensors")
    expected = tensors_of(folder.parent / "merged")
    adapted = set()
    for key, base in tensors_of(folder).items():
        module = f"base_model.model.{key.removesuffix('.weight')}"
        if f"{module}.lora_A.weight" in adapters:
            adapted.add(key.split(".")[-2])
            a, b = (adapters.pop(f"{module}.lora_{part}.weight") for part in "AB")
            assert b.abs().max() > 0
            base = base + 12 / 4 * b @ a
        assert (base - expected[key]).abs().max() < 1e-6, key
    assert not adapters and adapted == set(config["target_modules"])
    assert {"q_proj", "k_proj", "in_proj_qkv", "in_proj_z", "gate_proj", "down_proj"} < adapted
    source = C.read_weights(run, "raw")
    embed = source.unmerged["embed"]
    for changed in (embed + 1, torch.cat([embed, embed[:4]])):
        source.unmerged["embed"] = changed
        with pytest.raises(C.UserError, match="embed has changed or grown; adapters cannot"):
            C.adapter_files(source, C.rebuild(source))
    code, _, error = call("export", folder.parent / "runs" / folder.name, run / "x", "--adapters")
    assert code == 2 and "has no adapters; LORA_RANK trains them" in error
    code, _, error = call("export", run, run / "x", "--adapters", "--like", folder)
    assert code == 2 and "must be without --like" in error


@pytest.mark.full
@pytest.mark.parametrize("name", ["llama_tied_mqa", "qwen2", "qwen3", "qwen3_5_1_to_2"])
def test_peft_loads_adapters_onto_the_original(transformers, imported, tmp_path, name):
    """Its logits are those of the network with adapters, and so are those of the model that it merges."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model, folder, out = imported(name)
    run = train_adapters(folder, out)
    imported.run("export", run, tmp_path / "peft", "--adapters", "--weights", "raw")
    network = load(next(run.glob("step_000009")))
    ids = texts()
    with torch.no_grad():
        expected = network(ids)
        assert (model(ids).logits - expected).abs().max() > 1e-2
        adapted = peft.PeftModel.from_pretrained(model, tmp_path / "peft")
        assert (adapted(ids).logits - expected).abs().max() < 1e-4
        assert (adapted.merge_and_unload()(ids).logits - expected).abs().max() < 1e-4


# --------------------------------------------------------------------------------------- tokenizers
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA_SPLIT = QWEN_SPLIT.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)


def train_tokenizer(kind, size=600):
    """Return a tokenizer as the files of a published model describe it, trained on a few texts."""
    tokenizers = pytest.importorskip("tokenizers")
    before = tokenizers.pre_tokenizers
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(ignore_merges=kind == "llama3"))
    if kind == "gpt2":
        tokenizer.pre_tokenizer = before.ByteLevel(add_prefix_space=False)
    elif kind == "smollm2":
        steps = [before.Digits(individual_digits=True), before.ByteLevel(add_prefix_space=False)]
        tokenizer.pre_tokenizer = before.Sequence(steps)
    else:
        pattern = tokenizers.Regex(LLAMA_SPLIT if kind == "llama3" else QWEN_SPLIT)
        steps = [before.Split(pattern, "isolated")]
        steps += [before.ByteLevel(add_prefix_space=False, use_regex=False)]
        tokenizer.pre_tokenizer = before.Sequence(steps)
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


def hard_texts():
    """Return 2,000 short texts: code, prose, emoji, CJK, combining accents, numbers, runs of spaces."""
    words = "def f(x): return | I'll | DON'T | naïve | e\u0301te\u0301 | 日本語の文 | 한국어 | 👩‍👩‍👧 | 🙂 | 12345"
    words = [
        *words.split(" | "),
        "3.14159",
        "  ",
        "    ",
        "\n\n",
        "\t",
        "\r\n",
        "!?...",
        "ß",
        "\u00a0",
        "x_1",
        "the",
        "of",
    ]
    random = torch.Generator().manual_seed(1)
    texts = []
    for _ in range(2000):
        count = int(torch.randint(1, 9, (1,), generator=random))
        picks = torch.randint(len(words), (count,), generator=random).tolist()
        space = " " if int(torch.randint(2, (1,), generator=random)) else ""
        texts.append(space.join(words[pick] for pick in picks))
    return texts


@pytest.mark.parametrize("kind", ["gpt2", "qwen2", "llama3", "smollm2"])
def test_a_tokenizer_json_encodes_as_it_does(transformers, imported, tmp_path, kind):
    """2,000 texts. The model has more rows than the tokenizer has tokens, which export gives back. BOS is
    <|endoftext|>, or what tokenizer_config.json says. Decoded ids are the text, or its normal form.
    """
    tokenizer = train_tokenizer(kind)
    folder = tmp_path / "model"
    make(transformers, "llama", vocab_size=640).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    if kind == "llama3":
        config = {"bos_token": {"content": "<|im_start|>"}}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    out = tmp_path / "runs" / "read"
    imported.run("import", folder, out)
    network, found, _ = S.load_model("INIT_FROM", str(out))
    bos = "<|im_start|>" if kind == "llama3" else "<|endoftext|>"
    assert found.bos_id == network.config.bos_id == tokenizer.token_to_id(bos)
    assert found.vocab_size == network.config.vocab_size == tokenizer.get_vocab_size() < 640
    imported.run("export", out, tmp_path / "back", "--like", folder)
    assert_same_tensors(folder, tmp_path / "back")
    for name in ("config.json", "tokenizer.json"):
        assert (tmp_path / "back" / name).read_bytes() == (folder / name).read_bytes()
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
    tokenizer = train_tokenizer("llama3" if ignore_merges else "gpt2", 256)
    described = json.loads(tokenizer.to_str())
    model = described["model"]
    model["vocab"] |= {"ab": 300, "bc": 301, "abc": 302, "xyz": 303}
    model["merges"] = [["a", "b"], ["b", "c"], ["a", "bc"]]
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    if ignore_merges:
        with pytest.raises(C.UserError, match="merges: must have every split of 'abc'"):
            C.hf_tokenizer(tmp_path, 900)
        model["merges"].append(["ab", "c"])
        (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    again = tokenizers.Tokenizer.from_str(json.dumps(described))
    (tmp_path / "imported.tiktoken").write_bytes(C.hf_tokenizer(tmp_path, 900).content)
    found = S.load_tokenizer(tmp_path / "imported.tiktoken")
    for text in ("abc", "xyz", "ab bc abc xyz", "xabc", "aabcc", " xyz"):
        assert found.encode(text) == again.encode(text).ids, text
    assert found.encode("abc") == ([302] if ignore_merges else [300, model["vocab"]["c"]])


def changed(described, **changes):
    return json.dumps({**described, **changes})


ODD_TOKENIZERS = (  # what has changed in a good tokenizer.json, and what is said
    (
        lambda t: t["model"].update(end_of_word_suffix="</w>"),
        "end_of_word_suffix='</w>': must be none",
    ),
    (
        lambda t: t["model"]["vocab"].update({"zz": 10**12}),
        "has 1000000000001 tokens, the model 640",
    ),
    (lambda t: t["model"]["vocab"].update({"zz": "7"}), "'zz' has the id '7': must be a number"),
    (lambda t: t["model"]["vocab"].update({"zz": 7}), "two tokens have one id, or one has two"),
    (lambda t: t["added_tokens"][0].update(id=7), "two tokens have one id, or one has two"),
    (lambda t: t["added_tokens"][0].update(content=""), "added token '': is empty, or has two ids"),
    (
        lambda t: t["model"]["vocab"].update({"\u2581z": 630}),
        "piece '\u2581z': must be of 1 to 1024 bytes",
    ),
    (
        lambda t: t.update(post_processor={"type": "BertProcessing"}),
        "post_processor BertProcessing",
    ),
    (lambda t: t.update(model=[]), "tokenizer.json: is not understood: TypeError"),
    (lambda t: t.update(added_tokens=7), "tokenizer.json: is not understood: TypeError"),
    (
        lambda t: t["pre_tokenizer"]["pretokenizers"][0].update(pattern={"Regex": "("}),
        "tokenizer.json: is not understood: ",
    ),
    (
        lambda t: (t["model"].update(unk_token="<unk>"), t["model"]["vocab"].pop("!")),
        "unk_token='<unk>': must be none, because the vocabulary lacks 1 bytes",
    ),
)
ODD_CONFIGS = (
    ([], "tokenizer_config.json: must be a JSON object, and is .."),
    ({"bos_token": 7}, "bos_token=7: must be a text"),
    (
        {"additional_special_tokens": ["<x>"]},
        "token '<x>': must be one of tokenizer.json's added_tokens",
    ),
    ({"added_tokens_decoder": {"9": {"content": "<x>"}}}, "token '<x>': must be one of"),
    ({"chat_template": 7}, "chat_template: must be a text, or several with one named default"),
    ({"chat_template": [{"name": "rag", "template": "x"}]}, "several with one named default"),
    ({"chat_template": "{% for %}"}, "chat template: "),
    ({"chat_template": "{% unknown %}"}, "chat template: Encountered unknown tag 'unknown'"),
)


def test_what_a_tokenizer_json_must_be(transformers, refuses, tmp_path):
    folder = tmp_path / "model"
    make(transformers, "llama", vocab_size=640).save_pretrained(folder)
    path = folder / "tokenizer.json"
    refuses("no tokenizer.model and no tokenizer.json; set TOKENIZER_PATH", folder)
    train_tokenizer("smollm2").save(str(path))
    described = json.loads(path.read_bytes())
    described["pre_tokenizer"]["pretokenizers"][0]["individual_digits"] = False
    path.write_text(json.dumps(described))
    refuses("pre_tokenizer Digits ByteLevel: must be ByteLevel without a prefix space", folder)
    train_tokenizer("qwen2").save(str(path))
    good = json.loads(path.read_bytes())
    path.write_text(changed(good, normalizer={"type": "Lowercase"}))
    refuses("normalizer Lowercase: must be NFC or none", folder)
    model = good["model"]
    stripped = [{**token, "lstrip": True} for token in good["added_tokens"]]
    path.write_text(changed(good, added_tokens=stripped))
    refuses(r"added token '<\|endoftext\|>': must strip nothing", folder)
    path.write_text(changed(good, model={**model, "byte_fallback": True}))
    refuses("model BPE: must be byte-level BPE", folder)
    merges = model["merges"]
    path.write_text(changed(good, model={**model, "merges": [*merges[1:], merges[0]]}))
    refuses("merges: must be in the order of the ids", folder)
    path.write_text(changed(good, model={**model, "vocab": {**model["vocab"], "zzz": 900}}))
    refuses("the tokenizer has 901 tokens, the model 640", folder)
    steps = good["pre_tokenizer"]["pretokenizers"]
    narrow = {**steps[0], "pattern": {"Regex": r"\p{L}+| "}}
    path.write_text(
        changed(good, pre_tokenizer={"type": "Sequence", "pretokenizers": [narrow, steps[1]]})
    )
    refuses("its Regex must match every part of a text", folder)
    path.write_text(changed(good, added_tokens=[]))
    refuses("is not understood|bos_token", folder)
    path.write_text("{")
    refuses("tokenizer.json: is no JSON", folder)
    for change, fault in ODD_TOKENIZERS:
        again = json.loads(json.dumps(good))
        change(again)
        path.write_text(json.dumps(again))
        refuses(fault, folder)
    path.write_text(json.dumps(good))
    for config, fault in ODD_CONFIGS:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        refuses(fault, folder)


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
TEMPLATES = {"chatml": CHATML, "headers": HEADERS, "thoughts": THOUGHTS, "thinking": THINKING}
TALK = [("<|system|>", "Be brief."), ("<|user|>", " What is 7 x 6?\n"), ("<|assistant|>", "42")]
TALKS = {
    "one answer": TALK,
    "two answers": [*TALK, ("<|user|>", "und 日本 é?"), ("<|assistant|>", "Nippon\n\n1")],
    "no system": [*TALK[1:], ("<|user|>", "<think>"), ("<|assistant|>", "I </think> so")],
    "ends with a question": [*TALK, ("<|user|>", "why?")],
}


@pytest.fixture
def chats(transformers, imported, tmp_path):
    """chats(template): the tokenizer of transformers, ours, and the network, of one folder."""

    def make_folder(template, kind="qwen2", **config):
        folder, out = tmp_path / "chats", tmp_path / "runs" / "chats"
        model = make(transformers, "qwen3_5_1_to_2", vocab_size=640)
        model.generation_config.eos_token_id = [602, 600]
        model.save_pretrained(folder)
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=train_tokenizer(kind),
            bos_token="<|endoftext|>",
            eos_token="<|im_end|>",
            chat_template=template,
            **config,
        )
        tokenizer.save_pretrained(folder)
        imported.run("import", folder, out)
        network, found, _ = S.load_model("INIT_FROM", str(out))
        return tokenizer, found, network

    return make_folder


def messages(turns):
    return [{"role": role.strip("<|>"), "content": text} for role, text in turns]


@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_rendered_conversations_have_the_ids_of_transformers(chats, name, talk):
    """Prompts, and whole conversations; of these the answers that the model itself would write are learned, with the
    token that ends them.
    """
    theirs, ours, _ = chats(TEMPLATES[name])
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
    ids, said = S.turn_ids(ours, turns)
    if name != "thinking":
        assert ids == whole
    assert theirs.decode(ids) == theirs.decode(whole)
    answers = [text for role, text in turns if role == "<|assistant|>"]
    expected = [text + "<|im_end|>" for text in answers]
    if not keeps_earlier:
        # The prompt of the last two templates begins the thoughts, or does not.
        begin = "\n</think>\n\n" if name == "thinking" else "<think>\n\n</think>\n\n"
        text = answers[-1].split("</think>")[-1]
        expected = [begin + text + "<|im_end|>"]
    learned = []
    for token, is_said, before in zip(ids, said, [False, *said], strict=False):
        if is_said and not before:
            learned.append([])
        if is_said:
            learned[-1].append(token)
    assert [theirs.decode(part) for part in learned] == expected
    answer = sample.answer_ids(ours, turns[:2], turns[2][1]) if talk == "one answer" else None
    assert answer is None or answer == learned[0]
    row = dict(messages=messages(turns))
    said_name, _ = S.parse_row(row, set(), ours, S.Settings())
    some = len(answers) > len(expected)
    assert said_name == ("messages (of 2 answers 1 learned)" if some else "messages")


AFTER_ANSWER = {  # what follows the token that ends an answer, up to where the next one begins
    "chatml": "\n<|im_start|>user\n{0}<|im_end|>\n<|im_start|>assistant\n",
    "headers": "<|im_start|>user\n\n{1}<|im_end|><|im_start|>assistant\n\n",
    "thoughts": "\n<|im_start|>user\n{0}<|im_end|>\n<|im_start|>assistant\n",
    "thinking": "\n<|im_start|>user\n{0}<|im_end|>\n<|im_start|>assistant\n<think>\n",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_an_environment_says_is_a_turn_of_the_template(chats, name):
    """Also a text that stands in the prompt of the next answer, in another turn, or is none."""
    theirs, ours, _ = chats(TEMPLATES[name])
    for text in ("x.o......", " 4 to 7\n", "s", "start", "an", "<think>", "user", ".", ""):
        ids = train_grpo.observation_ids(ours, text)
        assert theirs.decode(ids) == AFTER_ANSWER[name].format(text, text.strip()), text


def test_tokens_of_a_conversation(chats):
    """What ends an answer is what the folder says. Text begins without BOS. Thoughts are shown, marks are not."""
    theirs, ours, network = chats(CHATML)
    end, bos = theirs.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert sample.stop_ids(ours) == {end, bos} == {602, 600} and ours.roles == {}
    assert sample.begin_ids(ours) == [] and ours.bos_id == network.config.bos_id == bos
    assert sample.prompt_ids(ours, [("<|user|>", "abc")], "text") == ours.encode("abc")
    assert sample.prompt_ids(ours, [("<|user|>", "")], "text") == [bos]
    ids = ours.encode_marked("<think>so</think> yes<|im_end|>")
    assert sample.completion(ours, [bos], ids) == "<think>so</think> yes"
    assert ours.encode("<think>") != ours.encode_marked("<think>") == [ids[0]]
    assert S.with_roles(ours) is ours
    ids, said = S.turn_ids(ours, [("", "abc")])
    assert (ids, said) == ([*ours.encode("abc"), bos], [True] * len(ids))


def test_a_text_is_printed_with_all_of_its_prompt(chats, tmp_path, capsys):
    """It begins without BOS, so nothing may be cut off."""
    chats(CHATML)
    run = str(tmp_path / "runs" / "chats")
    capsys.readouterr()
    sample.sample(
        sample.Settings(artifact=run, prompt="the 12 words", max_new_tokens=1, device="cpu")
    )
    assert capsys.readouterr().out.startswith("the 12 words")


def test_bos_that_a_tokenizer_puts_before_texts(chats, monkeypatch):
    """As Llama 3 has it, by its post-processor."""
    tokenizers = pytest.importorskip("tokenizers")
    plain = train_tokenizer

    def with_bos(kind):
        tokenizer = plain(kind)
        bos = tokenizer.token_to_id("<|endoftext|>")
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", bos)]
        )
        return tokenizer

    monkeypatch.setitem(globals(), "train_tokenizer", with_bos)
    theirs, ours, _ = chats(HEADERS, "llama3")
    assert [*sample.begin_ids(ours), *ours.encode("abc")] == theirs.encode("abc")
    ids, _ = S.turn_ids(ours, TALK)
    assert ids == theirs.apply_chat_template(messages(TALK), return_dict=False)
    assert ids.count(ours.bos_id) == 1


def test_what_a_chat_template_must_be(chats):
    """A template may refuse a conversation, which is then left out. Faults are one line."""
    _, ours, _ = chats(HEADERS)
    late = [TALK[1], TALK[0], TALK[2]]
    notes = []
    rows = [dict(messages=messages(turns)) for turns in (TALK, late)]
    parse = functools.partial(S.parse_row, tokenizer=ours, settings=S.Settings())
    assert len(S.finish_rows(*S.parse_rows("x.jsonl", rows, parse), notes.append)) == 1
    assert "used 1 messages; left out chat template: system first: 1 (the first is row 2)" in str(
        notes[0]
    )
    for source, fault in (
        ("{% if %}", "chat template: .*"),
        ("{{ none.x.y }}", "chat template: .*"),
    ):
        ours.facts["template"] = source
        with pytest.raises(S.UserError, match=fault):
            S.chat_text(ours, TALK, True)


@pytest.mark.parametrize("name", ["llama3", "qwen2", "qwen3", "qwen3_5_1_to_2"])
def test_packed_rows_without_bos_are_as_transformers_has_them_alone(imported, name):
    """Documents are told, not found by a token: one that looks like BOS is text."""
    model, _, out = imported(name)
    network = load(out)
    rows = []
    for number, length in enumerate((30, 9, 21, 12)):
        ids = texts(1, length + 1)[0] + number % 3
        ids[4] = network.config.bos_id
        rows.append(S.Row(number, ids[:-1], ids[1:]))
    (batch,) = S.row_batches(rows, [[0, 1], [2, 3]], 2, torch.device("cpu"))
    assert batch.ids.shape == (2, 39)
    logits = network.logits(S.row_features(network, batch))
    for place, row in enumerate(rows):
        alone = model(row.ids[None]).logits[0]
        assert (logits[batch.doc == place] - alone).abs().max() < 1e-4


# ------------------------------------------------------------------------------------ damaged folders


def damage(content, random):
    """Return JSON, as bytes, in which a value is another one, is missing, or is cut off or a wrong byte."""
    kind = random.random()
    if kind < 0.1:
        return content[: random.randrange(len(content))]
    if kind < 0.2:
        at = random.randrange(len(content))
        return content[:at] + bytes([random.randrange(256)]) + content[at + 1 :]
    return json.dumps(mutated(json.loads(content), random)).encode()


def damage_header(content, random):
    """Return a safetensors file with a damaged header."""
    end = 8 + int.from_bytes(content[:8], "little")
    header = damage(content[8:end], random)
    size = random.choice([len(header), len(header), len(header), 1 << 40])
    return size.to_bytes(8, "little") + header + content[end:]


@pytest.mark.parametrize(
    ("first", "count"), [(0, 40), pytest.param(40, 360, marks=pytest.mark.full)]
)
def test_damaged_folders(transformers, imported, tmp_path, capsys, first, count):
    """A folder with one odd value is refused in one line, or makes a model that works."""
    folder = tmp_path / "good"
    make(transformers, "llama3", vocab_size=640, num_hidden_layers=1).save_pretrained(folder)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=train_tokenizer("qwen2", 300),
        eos_token="<|im_end|>",
        chat_template=CHATML,
    )
    tokenizer.save_pretrained(folder)
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    config = json.loads((folder / "tokenizer_config.json").read_bytes())
    config["chat_template"] = [{"name": "default", "template": template}]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    placed = {"weight_map": {key: "a.safetensors" for key in tensors_of_file(folder)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(placed))
    files = sorted(path for path in folder.iterdir())
    refused = 0
    for number in range(first, first + count):
        random = Random(number)
        path = random.choice(files)
        content = path.read_bytes()
        change = damage_header if path.suffix == ".safetensors" else damage
        path.write_bytes(change(content, random))
        out = tmp_path / f"run{number}"
        capsys.readouterr()
        code = exit_code(C, "import", folder, out)
        error = capsys.readouterr().err
        path.write_bytes(content)
        assert code in (0, 2) and error.count("\n") == (code == 2), (number, path, error)
        if code == 0:
            network, found, _ = S.load_model("INIT_FROM", str(out))
            assert network(torch.tensor([found.encode("the 12 words")])).isfinite().all()
        else:
            refused += 1
            assert not out.exists()
    assert 0.3 * count < refused < count


def tensors_of_file(folder):
    from safetensors.torch import load_file

    return load_file(folder / "a.safetensors")
