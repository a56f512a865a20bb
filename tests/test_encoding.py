"""Texts are encoded as the package tokenizers does it, whatever stands in them; half a surrogate pair is an error."""

import json

import pytest
import sentencepiece

import convert as C
import train_sft as S
from conftest import refusal

LETTERS = {byte: letter for letter, byte in C.byte_of_letters().items()}
HALF = "a\ud800b"


def write_tokenizer(folder, lacking=b"", nfc=False, added=(), **model):
    """Write a tokenizer.json with a few merges, whose vocabulary lacks some bytes; return the tokenizer that it is."""
    tokenizers = pytest.importorskip("tokenizers")
    vocab = {}
    for byte in set(range(256)) - set(lacking):
        vocab[LETTERS[byte]] = len(vocab)
    merges = [("t", "h"), ("th", "e"), ("!", "!"), ("!!", "!"), ("Ġ", "the"), ("Ġ", "Ġ")]
    for pair in merges:
        vocab["".join(pair)] = len(vocab)
    tokens = [("<|endoftext|>", False), *added]
    described = {
        "version": "1.0",
        "added_tokens": [
            dict(id=len(vocab) + place, content=text, normalized=late, special=True)
            | dict(single_word=False, lstrip=False, rstrip=False)
            for place, (text, late) in enumerate(tokens)
        ],
        "normalizer": {"type": "NFC"} if nfc else None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
        | {"trim_offsets": True},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "BPE",
            "vocab": vocab,
            "merges": [list(pair) for pair in merges],
            **model,
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(described))
    (folder / "imported.tiktoken").write_bytes(C.hf_tokenizer(folder, 300).content)
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def same(ours, theirs, text):
    assert ours.encode_marked(text) == theirs.encode(text).ids, text
    theirs.encode_special_tokens = True
    assert ours.encode(text) == theirs.encode(text).ids, text
    theirs.encode_special_tokens = False


@pytest.mark.parametrize("ignore_merges", [False, True])
def test_bytes_that_a_vocabulary_lacks_are_dropped(tmp_path, ignore_merges):
    """Their neighbours in a part of the text merge. Nothing but the byte is lost."""
    lacking = b"\x04\x06t\xe6\xff?"
    if ignore_merges:  # where a piece has such a byte, it would be one token only as a whole part
        lacking = lacking.replace(b"t", b"")
    else:
        with pytest.raises(C.UserError, match="merges: must be of pieces of the vocabulary"):
            write_tokenizer(tmp_path, lacking)
        lacking = lacking.replace(b"t", b"")
    theirs = write_tokenizer(tmp_path, lacking, ignore_merges=ignore_merges)
    ours = S.load_tokenizer(tmp_path / "imported.tiktoken")
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


def test_a_run_of_a_million_spaces(tmp_path):
    """The stack of tiktoken's regular expressions would overflow. The last space is the word's."""
    write_tokenizer(tmp_path)
    ours = S.load_tokenizer(tmp_path / "imported.tiktoken")
    ids = ours.encode(" " * 1_000_001 + "the")
    assert ids == ours.encode("  ") * 500_000 + ours.encode(" the") and len(ids) == 500_001


def test_half_a_surrogate_pair_is_an_error(tmp_path):
    write_tokenizer(tmp_path)
    tokenizers = [S.load_tokenizer(path) for path in ("bytes", tmp_path / "imported.tiktoken")]
    with open(tmp_path / "tokenizer.model", "wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["the cat", "a hat"] * 9),
            model_writer=file,
            vocab_size=20,
            hard_vocab_limit=False,
            minloglevel=2,
        )
    tokenizers.append(S.load_tokenizer(tmp_path / "tokenizer.model"))
    said = r"text '\\ud800b' at character 1: half a surrogate pair, which is no Unicode"
    for tokenizer in tokenizers:
        refusal(S.UserError, said, tokenizer.encode, HALF)
    refusal(S.UserError, said, tokenizers[1].encode_marked, HALF)
    assert S.load_tokenizer("bytes").encode("\U0001f642") == [4 + byte for byte in "🙂".encode()]
