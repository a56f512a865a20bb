"""convert.py: GGUF files, out and in again; read by gguf, transformers and, marked full, llama.cpp."""

import json
import sys
import unicodedata
import urllib.request
from random import Random

import numpy as np
import pytest
import torch
from test_data import PREFIX, train_model
from test_models import CHATML, hard_texts, make, train_tokenizer

import convert as C
import sample
import train_sft as S
from conftest import exit_code, pack, small_network

gguf = pytest.importorskip("gguf", reason="gguf is not installed: pip install gguf")
pytest.importorskip("safetensors")
LLAMA = dict(layers="a a", norms="rms_weight rms_weight", mlp="swiglu", qk_gain_init=0.0)
LLAMA |= dict(residual_mix=False, logit_softcap=0.0, norm_eps=1e-5)
# A model of test_models.py, its tokenizer, and what a file says of them.
MODELS = [
    ("llama3", "llama3", {"general.architecture": "llama", "tokenizer.ggml.pre": "llama-bpe"}),
    ("llama_tied_mqa", "smollm2", {"tokenizer.ggml.pre": "smollm", "llama.context_length": 128}),
    ("qwen2", "qwen2", {"tokenizer.ggml.pre": "qwen2", "qwen2.rope.freq_base": 10000.0}),
    ("qwen3", "gpt2", {"tokenizer.ggml.pre": "gpt-2", "qwen3.attention.key_length": 128}),
]


@pytest.fixture
def convert(capsys):
    """convert(words): run a command; return its error, the last line that it printed, or ""."""

    def run(*words, **environ):
        capsys.readouterr()
        code = exit_code(C, *words, **environ)
        error = capsys.readouterr().err
        assert code == (2 if error else 0) and error.count("\n") == bool(error), error
        return error

    return run


@pytest.fixture
def imported(transformers, convert, tmp_path):
    """imported(name, kind): the run folder of a random model of transformers with a tokenizer."""

    def make_run(name, kind, **changes):
        folder = tmp_path / "model"
        make(transformers, name, vocab_size=640, **changes).save_pretrained(folder)
        words = dict(bos_token="<|endoftext|>", eos_token="<|im_end|>", chat_template=CHATML)
        words["pad_token"] = words["bos_token"]
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=train_tokenizer(kind), **words
        )
        tokenizer.save_pretrained(folder)
        assert convert("import", folder, tmp_path / "run") == ""
        return tmp_path / "run"

    return make_run


def load(run):
    """Return network and tokenizer of a run."""
    network, tokenizer, _ = S.load_model("INIT_FROM", str(run))
    return network.eval(), tokenizer


def assert_same(run, other, names):
    """Two runs have the same tensors, shapes, pieces, ids of texts, and facts of these names."""
    (network, tokenizer), (network_too, tokenizer_too) = load(run), load(other)
    assert C.hf_config(network.config) == C.hf_config(network_too.config)
    state = network_too.state_dict()
    assert all(torch.equal(w, state[name]) for name, w in network.state_dict().items())
    assert tokenizer.pieces == tokenizer_too.pieces and tokenizer.roles == tokenizer_too.roles
    for text in hard_texts()[:300]:
        assert tokenizer.encode(text) == tokenizer_too.encode(text), text
    for name in names:
        assert tokenizer.facts[name] == tokenizer_too.facts[name], name


FACTS = "added begins_with_bos bos_id names nfc ranks split stop template vocab_size".split()


@pytest.mark.parametrize(("name", "kind", "said"), MODELS)
def test_a_file_comes_back_as_it_went_out(
    imported, transformers, convert, tmp_path, name, kind, said
):
    """In float32, every tensor and fact; transformers reads its own tensors from the file."""
    # transformers does not read the width of a head of Qwen3.
    changes = {"head_dim": 128} if name == "qwen3" else {}
    run = imported(name, kind, **changes)
    path = tmp_path / "model.gguf"
    assert convert("export", run, path, "--type", "f32") == ""
    assert convert("import", path, tmp_path / "again") == ""
    assert_same(run, tmp_path / "again", FACTS)
    found = metadata_of(path)
    assert found.items() >= said.items()
    assert found["tokenizer.chat_template"] == CHATML and not found["tokenizer.ggml.add_bos_token"]
    assert [found["tokenizer.ggml.token_type"][i] for i in (5, 600, 602, 604)] == [1, 3, 3, 4]
    assert [found[f"tokenizer.ggml.{end}_token_id"] for end in ("bos", "eos")] == [600, 602]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name)
    expected = make(transformers, name, vocab_size=640, **changes).state_dict()
    for key, w in model.state_dict().items():
        assert torch.equal(w, expected[key][: len(w)]), key


def metadata_of(path):
    """Return what the package reads from a file."""
    return {key: field.contents() for key, field in gguf.GGUFReader(path).fields.items()}


def save(folder, file, **changes):
    """Write a run of a small Llama with the tokenizer of a file; return it."""
    tokenizer = S.load_tokenizer(file)
    pack(small_network(tokenizer=tokenizer, **LLAMA | changes), tokenizer, folder)
    if file != "bytes":
        (folder / "tokenizer.model").write_bytes(file.read_bytes())
    return folder / "model.upar"


@pytest.mark.parametrize("prefix", [False, True])
def test_a_sentencepiece_model_comes_back(convert, tmp_path, prefix):
    """With and without a dummy prefix; roles, what ends an answer, and the template of these scripts."""
    train_model(tmp_path / "a.model", add_dummy_prefix=prefix)
    run = save(tmp_path / "run", tmp_path / "a.model")
    path = tmp_path / "model.gguf"
    assert convert("export", run, path, "--type", "f32") == ""
    assert convert("import", path, tmp_path / "again") == ""
    assert_same(run, tmp_path / "again", ())
    found = metadata_of(path)
    roles = load(run)[1].roles
    assert {role: found["tokenizer.ggml.tokens"].index(role) for role in roles} == roles
    ids = {name: found[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos", "eot", "eom")}
    assert ids == {"bos": 1, "eos": 1, "eot": roles["<|end|>"], "eom": 2}
    assert found["tokenizer.ggml.add_bos_token"] and "assistant" in found["tokenizer.chat_template"]


def test_what_a_file_says_of_ends_and_bos(imported, convert, monkeypatch, tmp_path):
    """An answer also ends where the template ends it, as in Llama 3 Instruct's files whose EOS is another
    token. A SentencePiece model may put no BOS before a text.
    """
    train_model(tmp_path / "a.model", control_symbols=[])
    runs = [imported("llama3", "llama3"), save(tmp_path / "spm", tmp_path / "a.model")]
    changes = {"tokenizer.ggml.eos_token_id": 600}, {"tokenizer.ggml.add_bos_token": False}
    tokenizers = []
    for run, changed in zip(runs, changes, strict=True):
        path = tmp_path / f"{run.name}.gguf"
        assert convert("export", run, path) == ""
        monkeypatch.setattr(C.GgufReader, "header", header_with(changed))
        assert convert("import", path, tmp_path / f"{run.name} again") == ""
        tokenizers.append(load(tmp_path / f"{run.name} again")[1])
    assert tokenizers[0].facts["names"]["eos_token"] == "<|endoftext|>"
    assert sample.stop_ids(tokenizers[0]) == {2, 600, 602}  # 2 is that of config.json
    assert sample.begin_ids(tokenizers[1]) == []


def test_bytes_and_types_of_matrices(convert, tmp_path):
    """A tokenizer without merges. float16 is the default, and refused for weights that it lacks."""
    run = save(tmp_path / "run", "bytes")
    expected = C.gguf_tensors("llama", load(run)[0])
    for name, error in (("f16", 2**-11), ("bf16", 2**-8), ("q8_0", 0.006)):
        path = tmp_path / f"{name}.gguf"
        assert convert("export", run, path, *["--type", name] * (name != "f16")) == ""
        assert convert("import", path, tmp_path / name) == ""
        network, tokenizer = load(tmp_path / name)
        for key, w in C.gguf_tensors("llama", network).items():
            difference = np.abs(w - expected[key]).max()
            assert difference <= error * np.abs(expected[key]).max() * (w.ndim > 1), key
        text = "na\u00efve\n\U0001f642"
        assert tokenizer.encode(text) == [4 + byte for byte in text.encode()]
        assert tokenizer.encode_marked("<|user|>") == [261] and tokenizer.bos_id == 1
    types = {tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}
    assert types == {"F32", "Q8_0"}
    with pytest.raises(C.UserError, match="f16: x has a weight of 7e.04; must be f32 or bf16"):
        C.check_gguf_type("f16", "x", np.float32([1, 7e4]))
    with pytest.raises(C.UserError, match="q8_0: x has 33 columns; must be a multiple of 32"):
        C.check_gguf_type("q8_0", "x", np.zeros((2, 33)))


REFUSED = [
    ({"general.architecture": "gemma3"}, "'gemma3': must be one of llama, qwen2, qwen3"),
    ({"split.count": 3}, "split.count=3: must be one whole file"),
    ({"llama.expert_count": 8}, "llama.expert_count=8: is not known"),
    ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type='yarn': is not known"),
    ({"llama.attention.value_length": 5}, "value_length=5: must be 24"),
    ({"llama.attention.head_count": [4, 2, 4]}, "num_attention_heads=[4, 2, 4]: must be"),
    ({"llama.block_count": 4}, "files lack model.layers.3"),
    ({"llama.rope.freq_base": 7.0}, "rope_freqs.weight: must be Llama 3's"),
    ({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model='t5': must be gpt2 or llama"),
    ({"tokenizer.ggml.pre": "tekken"}, "pre='tekken': must be one of gpt-2, smollm"),
    ({"tokenizer.ggml.add_eos_token": True}, "add_eos_token: must be false"),
    ({"tokenizer.ggml.bos_token_id": 9999}, "its tokenizer cannot be used: IndexError"),
    ({"tokenizer.ggml.merges": ["a b"]}, "its tokenizer cannot be used: KeyError('ab')"),
]


def header_with(changes, header=C.GgufReader.header):
    """Return a GgufReader.header that finds changed metadata."""

    def changed_header(reader):
        count, metadata = header(reader)
        return count, metadata | changes

    return changed_header


def test_files_that_are_refused(imported, convert, monkeypatch, tmp_path):
    """For what they say, or as damaged; and every file without the package."""
    run = imported("llama3", "llama3")
    path = tmp_path / "model.gguf"
    convert("export", run, path)
    for changes, fault in REFUSED:
        monkeypatch.setattr(C.GgufReader, "header", header_with(changes))
        error = convert("import", path, tmp_path / "new")
        assert error.startswith(f"error: {path}: ") and fault in error, error
    monkeypatch.undo()
    content = path.read_bytes()
    refused = 0
    for number in range(60):
        random = Random(number)
        damaged = bytearray(content[: random.randrange(len(content))] if number % 2 else content)
        damaged[random.randrange(len(damaged) // 8)] = random.randrange(256)
        path.write_bytes(damaged)
        refused += convert("import", path, tmp_path / f"new{number}") != ""
    assert 30 <= refused < 60
    assert "no such file" in convert("import", tmp_path / "no.gguf", tmp_path / "new")
    monkeypatch.setitem(sys.modules, "gguf", None)
    for words in (["import", path, tmp_path / "new"], ["export", run, tmp_path / "new.gguf"]):
        assert "needs gguf: pip install gguf\n" in convert(*words)


def test_what_llama_cpp_does_not_have(imported, convert, tmp_path):
    new = tmp_path / "new.gguf"
    for kind in ("bpe", "unigram"):
        words = dict(PREFIX, model_type=kind, hard_vocab_limit=False)
        train_model(tmp_path / f"{kind}.model", **words)
    for file, changes, fault in (
        ("bytes", {"layers": "g a"}, "LlamaForCausalLM has no layers='g a'"),
        ("bytes", {"mlp": "bio"}, "LlamaForCausalLM has no mlp='bio'"),
        (tmp_path / "bpe.model", {}, "normalization_rule_name must be identity"),
        (tmp_path / "unigram.model", {}, "model_type must be bpe"),
    ):
        run = save(tmp_path / f"run{len(fault)}", file, **changes)
        assert fault in convert("export", run, new)
    run = imported("qwen3_5_1_to_2", "qwen2")
    assert "the layout Qwen3_5ForCausalLM: must be one of Llama" in convert("export", run, new)
    assert "OUT must not end in .gguf" in convert("export", run, new, "--adapters")
    assert "is for a GGUF file" in convert("export", run, tmp_path / "a", "--type", "f32")
    assert not new.exists() and not list(tmp_path.glob("*.part"))


# --------------------------------------------------------------------------------------- llama.cpp
def agree(run, path, texts):
    """Assert that llama.cpp, with an export in float32, has our ids of texts, and our greedy answers.

    Return a function that asks its server, which lives as long. Its cache is float16 by default.
    """
    package = pytest.importorskip("xllamacpp", reason="xllamacpp is not installed")
    assert exit_code(C, "export", run, path, "--type", "f32") == 0
    params = package.CommonParams()
    params.model.path = str(path)
    params.n_ctx = 1024
    params.n_parallel = params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = package.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = package.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = package.Server(params)

    def ask(route, **body):
        headers = {"Content-Type": "application/json"}
        address = f"{server.listening_address}/{route}"
        request = urllib.request.Request(address, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=100) as answer:
            return json.load(answer)

    network, tokenizer = load(run)
    known = set(
        tokenizer.pieces
    )  # llama.cpp does not merge what stands around a byte that it lacks
    for text in texts:
        is_known = all(bytes([byte]) in known for byte in text.encode())
        if is_known and text == unicodedata.normalize("NFC", text):
            ids = ask("tokenize", content=text, parse_special=False)["tokens"]
            assert ids == tokenizer.encode(text), text
    body = dict(n_predict=20, temperature=0, return_tokens=True)
    ends = sample.stop_ids(tokenizer) - {tokenizer.bos_id}
    for text in texts[:20]:
        prompt = [tokenizer.bos_id, *tokenizer.encode(text)]
        (answer,) = sample.generate(network, [prompt], 1, 20, 0.0, [(0,)], ends)
        assert ask("completion", prompt=prompt, **body)["tokens"] == answer.ids, text
    return ask


@pytest.mark.full
@pytest.mark.parametrize(("name", "kind", "said"), MODELS)
def test_llama_cpp_computes_the_same(imported, tmp_path, name, kind, said):
    agree(imported(name, kind), tmp_path / "model.gguf", hard_texts()[:200])


@pytest.mark.full
@pytest.mark.parametrize("prefix", [False, True])
def test_llama_cpp_has_our_roles(tmp_path, prefix):
    train_model(tmp_path / "a.model", add_dummy_prefix=prefix)
    run = save(tmp_path / "run", tmp_path / "a.model")
    ask = agree(run, tmp_path / "model.gguf", hard_texts()[:200])
    messages = [{"role": role, "content": f"the {role}"} for role in ("system", "user")]
    text = ask("apply-template", messages=messages)["prompt"]
    ids = ask("tokenize", content=text, add_special=True, parse_special=True)["tokens"]
    turns = [(f"<|{message['role']}|>", message["content"]) for message in messages]
    assert ids == sample.asked_ids(load(run)[1], turns)
