"""Texts are encoded as the package tokenizers does it, whatever stands in them; half a surrogate pair is an error."""

import json
import random
import re

import pytest
from test_data import NO_SPACE, train_model
from test_models import make

import convert as C
import train_sft as S
from conftest import exit_code, read_json, refusal, write_json

LETTERS = {byte: letter for letter, byte in C.byte_of_letters().items()}
HALF = "a\ud800b"


def write_tokenizer(
    folder, lacking=b"", nfc=False, added=(), split=C.GPT2_SPLIT, bos=False, **model
):
    """Write a tokenizer.json with a few merges, whose vocabulary lacks some bytes; return the tokenizer that it is.

    added: (text, normalized, maybe what it is of TOKEN_FLAGS). bos: whether a processor puts it before texts.
    """
    tokenizers = pytest.importorskip("tokenizers")
    vocab = {}
    for byte in set(range(256)) - set(lacking):
        vocab[LETTERS[byte]] = len(vocab)
    merges = [("t", "h"), ("th", "e"), ("!", "!"), ("!!", "!"), ("Ġ", "the"), ("Ġ", "Ġ")]
    merges.append(("t", LETTERS[0xCC]))  # and half of a combining accent
    for pair in merges:
        vocab["".join(pair)] = len(vocab)
    theirs = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges, **model))
    before = tokenizers.pre_tokenizers
    steps = [before.ByteLevel(add_prefix_space=False, use_regex=split == C.GPT2_SPLIT)]
    if split != C.GPT2_SPLIT:
        steps.insert(0, before.Split(tokenizers.Regex(split), "isolated"))
    theirs.pre_tokenizer = before.Sequence(steps)
    if nfc:
        theirs.normalizer = tokenizers.normalizers.NFC()
    for text, late, *flags in [("<|endoftext|>", False), *added]:
        words = dict.fromkeys(sum(flags, []), True)
        theirs.add_special_tokens([tokenizers.AddedToken(text, normalized=late, **words)])
    if bos:
        marks = dict(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", len(vocab))])
        theirs.post_processor = tokenizers.processors.TemplateProcessing(**marks)
    theirs.save(str(folder / "tokenizer.json"))
    (folder / "imported.tiktoken").write_bytes(C.hf_tokenizer(folder, 300).content)
    return theirs


def same(ours, theirs, text):
    assert ours.encode_marked(text) == theirs.encode(text).ids, text
    theirs.encode_special_tokens = True
    assert ours.encode(text) == theirs.encode(text).ids, text
    theirs.encode_special_tokens = False


@pytest.mark.parametrize("ignore_merges", [False, True])
def test_bytes_that_a_vocabulary_lacks_are_dropped(tmp_path, ignore_merges):
    """Their neighbours in a part of the text merge. Nothing but the byte is lost."""
    theirs = write_tokenizer(tmp_path, b"\x04\x06\xe6\xff?", ignore_merges=ignore_merges)
    ours = S.load_tokenizer(tmp_path / "imported.tiktoken")
    described = read_json(tmp_path / "tokenizer.json")
    described["model"]["vocab"]["unused"] = described["model"]["vocab"].pop("t")
    write_json(tmp_path / "tokenizer.json", described)
    if not ignore_merges:  # else a piece with such a byte is one token only as a whole part
        fault = "merges: must be of pieces of the vocabulary"
        refusal(C.UserError, fault, C.hf_tokenizer, tmp_path, 300)
    texts = [chr(byte) for byte in range(256)] + [f" the!{chr(byte)}!!the" for byte in range(256)]
    texts += [
        "",
        "\x04",
        "\x04\x06",
        "日本",
        "日\x04本 the",
        "!\x04!\x06! th\x04e",
        "<|endoftext|>\x04",
    ]
    for text in texts:
        same(ours, theirs, text)
    assert ours.encode("!\x04!") == ours.encode("!!") and ours.encode("\x04") == []
    assert len(ours.encode("!!")) == 1 and len(ours.encode("日")) == 2


def test_added_tokens_are_found_as_tokenizers_finds_them(tmp_path):
    """The longest one counts, and most are looked for before a text is normalized."""
    added = [("<a", False), ("<a>", False), ("<a>>", False), ("e\u0301x", True), ("<late>", True)]
    theirs = write_tokenizer(tmp_path, b"\x04", True, added)
    ours = S.load_tokenizer(tmp_path / "imported.tiktoken")
    texts = [
        "<a>>x",
        "<a><a",
        "x<a>\u0338",
        "<late>\u0338",
        "e\u0301",
        "é",
        "<a>\x04>",
        "\x04<a",
        "<<late>a>",
    ]
    for text in texts:
        same(ours, theirs, text)
    assert ours.encode_marked("<a>>") == [ours.facts["added"]["<a>>"]]


def test_added_tokens_that_take_spaces_or_are_words(tmp_path):
    """Also beside one another, beside longer ones that are not found, and those found in the normal form."""
    added = [
        ("<l>", False, ["lstrip"]),
        ("<r>", True, ["rstrip"]),
        ("<b>", False, ["lstrip", "rstrip"]),
    ]
    added += [("end", False, ["single_word"]), ("ends", False, ["single_word", "lstrip"])]
    added += [("<l>x", False), ("a b", True, ["single_word"])]
    theirs = write_tokenizer(tmp_path, b"\x04", True, added)
    ours = S.load_tokenizer(tmp_path / "imported.tiktoken")
    draw = random.Random(3)
    parts = [
        "<l>",
        "<r>",
        "<b>",
        "end",
        "ends",
        "x",
        " ",
        "  ",
        "\n",
        "\u3000",
        "a b",
        "the",
        "e\u0301",
        "_",
        "日",
    ]
    for _ in range(2000):
        same(ours, theirs, "".join(draw.choices(parts, k=8)))
    mark = ours.facts["added"]["<l>"]
    assert ours.encode_marked("the  <l> the") == [*ours.encode("the"), mark, *ours.encode(" the")]
    again = json.loads(C.tokenizer_files(ours)["tokenizer.json"])
    described = read_json(tmp_path / "tokenizer.json")
    assert again["added_tokens"] == described["added_tokens"]


def test_a_run_of_a_million_spaces(tmp_path):
    """The stack of tiktoken's regular expressions would overflow. The last space is the word's."""
    write_tokenizer(tmp_path)
    ours = S.load_tokenizer(tmp_path / "imported.tiktoken")
    ids = ours.encode(" " * 1_000_001 + "the")
    assert ids == ours.encode("  ") * 500_000 + ours.encode(" the") and len(ids) == 500_001


def test_half_a_surrogate_pair_is_an_error(tmp_path):
    write_tokenizer(tmp_path)
    tokenizers = [S.load_tokenizer(path) for path in ("bytes", tmp_path / "imported.tiktoken")]
    tokenizers.append(S.load_tokenizer(train_model(tmp_path / "tokenizer.model")))
    said = r"text '\\ud800b' at character 1: half a surrogate pair, which is no Unicode"
    for tokenizer in tokenizers:
        refusal(S.UserError, said, tokenizer.encode, HALF)
    refusal(S.UserError, said, tokenizers[1].encode_marked, HALF)
    assert S.load_tokenizer("bytes").encode("\U0001f642") == [4 + byte for byte in "🙂".encode()]


# ------------------------------------------------------------------- SentencePiece with a template
ZEPHYR = (
    "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@pytest.fixture
def llama2(tmp_path):
    """Return a folder with a SentencePiece model and a chat template, as TinyLlama has them."""
    options = dict(NO_SPACE, add_dummy_prefix=True, allow_whitespace_only_pieces=False)
    lines = ["the cat <|user|> sat", "a hat\t日本", "the  12 cats"] * 9
    train_model(tmp_path / "tokenizer.model", lines, **options, pad_id=-1, unk_id=0)
    config = dict(bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=ZEPHYR)
    config |= dict(tokenizer_class="LlamaTokenizer", add_bos_token=True)
    write_json(tmp_path / "tokenizer_config.json", config)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "eos_token_id": 2}')
    return tmp_path


def test_a_sentencepiece_model_has_its_template(transformers, llama2):
    """Marks are one id each in conversations; before each text between them stands a space, as tokenizer.json has it.
    What is exported is read so by transformers; its own class, with `legacy` or without, reads another tokenizer."""
    tokenizer = C.read_hf_tokenizer(llama2, "", 300)
    (llama2 / "imported.tiktoken").write_bytes(tokenizer.content)
    ours = S.load_tokenizer(llama2 / "imported.tiktoken")
    assert ours.sha256 == tokenizer.sha256 and ours.roles == {} and S.with_roles(ours) is ours
    assert ours.facts["stop"] == [1, 2] and ours.pieces[1] == b""
    for name, content in C.tokenizer_files(ours).items():
        (llama2 / name).write_bytes(content)
    theirs = transformers.AutoTokenizer.from_pretrained(llama2)
    talk = [("<|user|>", " the  cat\n"), ("<|assistant|>", "日本 é"), ("<|user|>", "</s> 12")]
    messages = [dict(role=role.strip("<|>"), content=text) for role, text in talk]
    text = S.chat_text(ours, talk, True)
    ids = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ours.encode_marked(text) == ids
    assert ids.count(2) == 4 and ids.count(1) == 0
    assert S.begin_ids(ours) + ours.encode("the cat") == theirs.encode("the cat")
    assert 2 not in ours.encode("</s>")
    for legacy in (True, False):
        config = read_json(llama2 / "tokenizer_config.json")
        config |= dict(tokenizer_class="LlamaTokenizer", legacy=legacy)
        write_json(llama2 / "tokenizer_config.json", config)
        theirs = transformers.AutoTokenizer.from_pretrained(llama2)
        assert theirs.encode(text, add_special_tokens=False) != ids
        assert C.misreading_class(llama2, ours.facts) == "LlamaTokenizer"


def test_a_sentencepiece_model_keeps_what_ends_an_answer(llama2):
    """By config.json and generation_config.json, also without a template; a tokenizer of its own does not."""
    (llama2 / "tokenizer_config.json").unlink()
    plain = C.read_hf_tokenizer(llama2, "", 300)
    assert all(C.import_notes(llama2, plain))
    write_json(llama2 / "config.json", {"eos_token_id": 3})
    write_json(llama2 / "generation_config.json", {"eos_token_id": [2, 7, 260]})
    tokenizer = C.read_hf_tokenizer(llama2, "", 300)
    assert tokenizer.facts["stop"] == [1, 2, 7, 260] and "template" not in tokenizer.facts
    (llama2 / "imported.tiktoken").write_bytes(tokenizer.content)
    ours = S.load_tokenizer(llama2 / "imported.tiktoken")
    text = "the  cat <|user|> 日本 </s>"
    assert ours.encode(text) == plain.encode(text) and ours.pieces == plain.pieces
    assert S.begin_ids(ours) == [1] and S.stop_ids(S.with_roles(ours)) == {1, 2, 7, 260, 303}
    notes = "\n".join(C.import_notes(llama2, tokenizer))
    assert "not used: eos_token_id [3]; answers end at [1, 2, 7, 260, 303] of" in notes
    assert "answers end at [7, 260], which are no added tokens: an ordinary text may" in notes
    [note] = C.import_notes(llama2, C.read_hf_tokenizer(llama2, "bytes", 264))
    assert re.match(r"not used: eos_token_id \[2, 3, 7, 260\]; .* \[1, 263\]", note)


def test_one_token_fills_rows(llama2):
    """The imported model's if its tokenizer has it, else BOS; an unknown one would be added by transformers."""
    for name, (text, i) in {"<unk>": ("<unk>", 0), "<pad>": ("<s>", 1)}.items():
        config = read_json(llama2 / "tokenizer_config.json") | {"pad_token": name}
        write_json(llama2 / "tokenizer_config.json", config)
        tokenizer = C.read_hf_tokenizer(llama2, "", 300)
        files = C.tokenizer_files(tokenizer)
        assert json.loads(files["tokenizer_config.json"])["pad_token"] == text
        assert C.padding_id(tokenizer) == i


def test_an_unknown_end_is_bos_in_a_gguf_file(llama2):
    """As in an import."""
    for name, i in {"</s>": 2, "<end>": 1}.items():
        config = read_json(llama2 / "tokenizer_config.json") | {"eos_token": name}
        write_json(llama2 / "tokenizer_config.json", config)
        values = C.gguf_vocabulary(C.read_hf_tokenizer(llama2, "", 300), 300)
        assert values["tokenizer.ggml.eos_token_id"] == i


def test_a_sentencepiece_model_without_a_template_stays(llama2):
    (llama2 / "tokenizer_config.json").unlink()
    tokenizer = C.read_hf_tokenizer(llama2, "", 300)
    assert tokenizer.file == "tokenizer.model"
    assert C.read_hf_tokenizer(llama2, "", 304).file == "tokenizer.model"  # the roles beside it
    write_json(llama2 / "tokenizer_config.json", {"extra_special_tokens": ["<|im_end|>"]})
    fault = r"added token '<\|im_end\|>': must be one of the tokenizer's"
    refusal(C.UserError, fault, C.read_hf_tokenizer, llama2, "", 304)
    refusal(C.UserError, "--set: the model has no chat template", C.with_values, tokenizer, ["a=1"])


def test_a_sentencepiece_model_without_bos_before_texts(llama2):
    """Also without a chat template. tokenizer.json counts more than tokenizer_config.json."""
    plain = C.read_hf_tokenizer(llama2, "", 300)
    for described, flag, begin in (
        (None, False, []),
        (processor_of("<s>", "A"), False, [1]),
        ({"post_processor": None}, True, []),
    ):
        write_json(llama2 / "tokenizer_config.json", {"add_bos_token": flag})
        if described:
            write_json(llama2 / "tokenizer.json", described)
        tokenizer = C.read_hf_tokenizer(llama2, "", 300)
        assert S.begin_ids(tokenizer) == begin
        assert tokenizer.file == ("tokenizer.model" if begin else "imported.tiktoken")
        assert tokenizer.encode("the  cat") == plain.encode("the  cat")


def processor_of(*names):
    """Return the post_processor of a tokenizer.json that puts these marks around a text, A."""
    parts = [{"Sequence" if name == "A" else "SpecialToken": {"id": name}} for name in names]
    return {"post_processor": dict(type="TemplateProcessing", single=parts)}


FILES_BESIDE = [  # fields of tokenizer_config.json; marks of tokenizer.json; begin; stop; maybe a note
    (dict(chat_template=ZEPHYR, bos_token="</s>"), "</s> A", [2], [2], ""),
    (dict(chat_template=ZEPHYR), "<s> A", [1], [1, 2], ""),
    (dict(eos_token="</s>"), "<s> A </s>", [1], [1, 2], "not used: tokenizer.json: post_processor"),
    ({}, "A", [], [1, 2], ""),
    (dict(bos_token="<|b|>", add_bos_token=False), "", [], [1, 2], "not used: bos_token '<|b|>'"),
    (dict(bos_token="<|b|>"), "", [1], [1, 2], "BOS is '<s>'"),
]


@pytest.mark.parametrize(("config", "marks", "begin", "stop", "note"), FILES_BESIDE)
def test_marks_of_the_files_beside_a_sentencepiece_model(
    llama2, capsys, config, marks, begin, stop, note
):
    """BOS is that of the files. If no file has an EOS, the model's own ends an answer, too."""
    (llama2 / "config.json").unlink()
    write_json(llama2 / "tokenizer_config.json", config)
    if marks:
        write_json(llama2 / "tokenizer.json", processor_of(*marks.split()))
    tokenizer = C.read_hf_tokenizer(llama2, "", 300)
    is_plain = begin == [1] and "chat_template" not in config
    assert tokenizer.file == ("tokenizer.model" if is_plain else "imported.tiktoken")
    assert S.begin_ids(tokenizer) == begin and S.stop_ids(tokenizer) == {*stop}
    assert note in (printed := capsys.readouterr().out) and bool(printed) == bool(note)


def test_files_beside_a_sentencepiece_model_with_roles_count_nothing(llama2):
    train_model(llama2 / "tokenizer.model")
    write_json(llama2 / "tokenizer.json", processor_of("<s>", "A", "</s>"))
    assert C.read_hf_tokenizer(llama2, "", 400).file == "tokenizer.model"


def test_a_space_at_the_first_part_alone_is_refused(llama2):
    """It differs in conversations, which a folder without a chat template does not have."""
    step = dict(type="Metaspace", prepend_scheme="first")
    write_json(llama2 / "tokenizer.json", dict(pre_tokenizer=step) | processor_of("<s>", "A"))
    fault = "prepend_scheme='first': must be always .*; for plain text alone remove chat_template"
    refusal(C.UserError, fault, C.read_hf_tokenizer, llama2, "", 300)
    (llama2 / "tokenizer_config.json").unlink()
    assert C.read_hf_tokenizer(llama2, "", 300).file == "tokenizer.model"


@pytest.mark.parametrize("file", ["imported.tiktoken", "tokenizer.model"])
def test_rows_without_a_token_beside_a_sentencepiece_model(transformers, llama2, file):
    """They are left out, unless they are of added tokens."""
    if file == "tokenizer.model":
        (llama2 / "tokenizer_config.json").unlink()
    make(transformers, "llama", vocab_size=310).save_pretrained(llama2)
    assert exit_code(C, "import", llama2, llama2 / "run") == 0
    network, tokenizer, _ = S.load_model("INIT_FROM", str(llama2 / "run"))
    assert len(network.embed) == tokenizer.vocab_size == 300 and tokenizer.file == file
    fault = "tokenizer .*tokenizer.model: has 300 tokens; must have the model's 299"
    refusal(C.UserError, fault, C.read_hf_tokenizer, llama2, "", 299)
    write_json(llama2 / "added_tokens.json", {"<pad>": 300})
    fault = "added token '<pad>': must be one of the tokenizer's"
    refusal(C.UserError, fault, C.read_hf_tokenizer, llama2, "", 310)


def test_ranks_in_the_place_of_a_sentencepiece_model(tmp_path, capsys):
    """As in folders with Llama 3's own file."""
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_text("IQ== 0\n")
    tokenizer = C.read_hf_tokenizer(tmp_path, "", 300)
    assert tokenizer.content == (tmp_path / "imported.tiktoken").read_bytes()
    assert "tokenizer.model: not used: is no SentencePiece model" in capsys.readouterr().out
    (tmp_path / "tokenizer.json").unlink()
    fault = "must be a SentencePiece model with a BOS token"
    refusal(C.UserError, fault, C.read_hf_tokenizer, tmp_path, "", 300)


# --------------------------------------------------------------- what transformers' own classes do
CLASSES = ["GPT2Tokenizer", "Qwen2TokenizerFast", "LlamaTokenizerFast", "PreTrainedTokenizerFast"]


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "qwen3_5", "qwen3_5_text"])
@pytest.mark.parametrize("name", CLASSES)
def test_classes_that_read_another_tokenizer_are_known(transformers, tmp_path, name, model_type):
    """For each split of texts that a class of transformers has, and SmolLM2's: where misreading_class names none, ids
    are those of tokenizer.json."""
    texts = ["the  12", "e\u0301!", "t\u0301", "the's  the", "the"]
    write_json(tmp_path / "config.json", {"model_type": model_type})
    config = {"tokenizer_class": name, "bos_token": "<|endoftext|>"}
    write_json(tmp_path / "tokenizer_config.json", config)
    for split in (C.GPT2_SPLIT, C.DIGITS_SPLIT, C.QWEN2_SPLIT, C.QWEN3_5_SPLIT):
        theirs = write_tokenizer(tmp_path, nfc=split != C.GPT2_SPLIT, split=split)
        ours = S.load_tokenizer(tmp_path / "imported.tiktoken")
        for text in texts:
            same(ours, theirs, text)
        auto = transformers.AutoTokenizer.from_pretrained(tmp_path)
        is_same = all(auto.encode(text) == ours.encode(text) for text in texts)
        assert is_same == (C.misreading_class(tmp_path, ours.facts) == ""), split
        fast = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
        assert all(fast.encode(text) == ours.encode(text) for text in texts)


@pytest.mark.parametrize("processor", [False, True])
def test_bos_is_where_transformers_has_it(transformers, tmp_path, processor):
    """tokenizer.json's post_processor says it, not the flags of tokenizer_config.json."""
    config = {"bos_token": "<|endoftext|>", "add_bos_token": not processor, "add_eos_token": True}
    write_json(tmp_path / "tokenizer_config.json", config)
    write_tokenizer(tmp_path, bos=processor)
    ours = S.load_tokenizer(tmp_path / "imported.tiktoken")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert S.begin_ids(ours) + ours.encode("the") == theirs.encode("the")


def test_a_variable_of_the_template(tmp_path):
    """As a switch for thoughts: who renders the template may still give another value."""
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    template = "{% for m in messages %}{{ m.content }}{% if enable_thinking is false %}!{% endif %}{% endfor %}"
    config = {"chat_template": template, "bos_token": "<|endoftext|>"}
    write_json(tmp_path / "tokenizer_config.json", config)
    write_tokenizer(tmp_path)
    plain = S.load_tokenizer(tmp_path / "imported.tiktoken")
    ours = C.with_values(plain, ["enable_thinking=false", 'date="1 May"'])
    talk = [("<|user|>", "the")]
    assert S.chat_text(plain, talk, True) == "the" and S.chat_text(ours, talk, True) == "the!"
    for given, text in (({}, "the!"), (dict(enable_thinking=True), "the")):
        messages = [[dict(role="user", content="the")]]
        (written,), _ = utils.render_jinja_template(
            messages, chat_template=ours.facts["template"], **given
        )
        assert written == text
    files = C.mended_tokenizer_files(tmp_path, ours.facts)
    assert files["chat_template.jinja"].decode() == ours.facts["template"]
    assert C.mended_tokenizer_files(tmp_path, plain.facts) == {}
    for wrong in ("enable_thinking", "enable_thinking=False", "a b=1"):
        refusal(C.UserError, "--set .*must be NAME=VALUE", C.with_values, plain, [wrong])
