"""The data section: byte accounting, shards, manifest checks, the token stream."""

import base64
import contextlib
import hashlib
import io
import json
import math
import random
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import tiktoken_ext.openai_public
import torch

import train_gpt as data
from conftest import ROOT, load_script, mutated, refusal

prepare = load_script(ROOT / "data" / "prepare.py")
write_shard = prepare.write_shard


HARD_TEXTS = [
    "plain words, one line",
    " leads with a space",
    "  leads with two",
    "ends with spaces  ",
    "runs   of    spaces     inside\n\n\n    indented\n\t\ttabs\tand\ttabs \t mixed",
    "windows\r\nline\r\nends\r\rand\rbare returns\r\n",
    "ümläuts, Привет, 日本語のテキスト, العربية, ไทย, é as e\u0301",
    "emoji \U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 and flags \U0001f1e9\U0001f1ea",
    "private use \ue000\uf8ff\U000f0000, zero width \u200b\ufeff",
    "nbsp\u00a0, ideographic\u3000space",
    "ligature ﬁ, fullwidth ＡＢ, superscript ², control \x01\x7f, line sep \u2028",
    "role text <|user|> hello <|end|> is plain text here",
    "<0x41> written out, <s> and </s> and <unk> too",
    "\n",
    "\t",
    " ",
    "x",
]


def train_model(path, lines=(), **changes):
    """A small SentencePiece model; the defaults are those of data/prepare.py."""
    options = {
        "model_type": "bpe",
        "vocab_size": 400,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "add_dummy_prefix": False,
        "remove_extra_whitespaces": False,
        "allow_whitespace_only_pieces": True,
        "user_defined_symbols": ["\n"],
        "control_symbols": list(prepare.ROLE_TOKENS),
        "pad_id": 0,
        "bos_id": 1,
        "eos_id": 2,
        "unk_id": 3,
        "minloglevel": 2,
        "num_threads": 1,
    }
    model = io.BytesIO()
    lines = list(lines) or "\n".join(HARD_TEXTS).split("\n") * 3 + [
        "the cat sat on the mat  and  the hat"
    ]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, **(options | changes)
    )
    path.write_bytes(model.getvalue())
    return path


@pytest.fixture(scope="module")
def lossless_model(tmp_path_factory):
    return train_model(tmp_path_factory.mktemp("model") / "own.model")


# As the published FineWeb models: dummy prefix, NFKC, white space collapsed.
PREFIX = dict(
    normalization_rule_name="nmt_nfkc",
    add_dummy_prefix=True,
    remove_extra_whitespaces=True,
    allow_whitespace_only_pieces=False,
    user_defined_symbols=[],
    control_symbols=[],
)


@pytest.fixture(scope="module")
def prefix_model(tmp_path_factory):
    return train_model(tmp_path_factory.mktemp("model") / "prefix.model", **PREFIX)


# A space is spelt in the three bytes of SentencePiece's mark, and decodes to the mark.
NO_SPACE = dict(user_defined_symbols=[], control_symbols=[], vocab_size=300)


@pytest.fixture(scope="module")
def spaceless_model(tmp_path_factory):
    """A SentencePiece model of a language without spaces."""
    path = tmp_path_factory.mktemp("model") / "spaceless.model"
    return train_model(path, lines=["thecat", "sat", "onthe", "matandhat"] * 9, **NO_SPACE)


def counted(tokenizer, ids):
    """The byte table's sum for one document after BOS."""
    ids = np.array(ids, dtype=np.int64)
    before = np.concatenate([[tokenizer.bos_id], ids[:-1]])
    return int(data.token_bytes(prepare.byte_table(tokenizer), before, ids).sum())


def test_byte_tables_are_the_decoded_bytes(lossless_model, prefix_model):
    """Our own tokenizers give every text back; others decode as SentencePiece does."""
    for kind in ("bytes", lossless_model):
        tokenizer = prepare.load_tokenizer(kind)
        for text in HARD_TEXTS:
            ids = tokenizer.encode(text)
            assert prepare.decode_bytes(tokenizer, ids) == text.encode(), text
            assert counted(tokenizer, ids) == len(text.encode()), text
    for path in (lossless_model, prefix_model):
        tokenizer = prepare.load_tokenizer(path)
        processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
        for text in HARD_TEXTS:
            ids = processor.encode(text)
            decoded = processor.decode(ids)
            assert counted(tokenizer, ids) == len(decoded.encode()), (path.name, text)
    text = "the cat \u2581 sat"  # the one character no SentencePiece model gives back
    tokenizer = prepare.load_tokenizer(lossless_model)
    assert prepare.decode_bytes(tokenizer, tokenizer.encode(text)) == b"the cat   sat"


def test_flags_of_tokenizers(prefix_model, lossless_model):
    tokenizer = prepare.load_tokenizer(prefix_model)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(prefix_model))
    starts = [processor.id_to_piece(i).startswith("\u2581") for i in range(400)]
    assert tokenizer.drops_space.tolist() == starts and sum(starts) > 5
    assert np.flatnonzero(tokenizer.boundary).tolist() == [0, 1, 2, 3]
    assert (tokenizer.roles, tokenizer.bos_id, tokenizer.vocab_size) == ({}, 1, 400)
    ids = tokenizer.encode("the cat sat on the mat")
    assert counted(tokenizer, ids) == len("the cat sat on the mat")
    # The same tokens after a token that is no boundary keep their first space.
    after = np.array(ids)
    before = np.concatenate([[ids[0]], after[:-1]])
    assert int(data.token_bytes(prepare.byte_table(tokenizer), before, after).sum()) == 23
    ours = prepare.load_tokenizer(lossless_model)
    assert not ours.drops_space.any()
    assert ours.roles == {role: 4 + i for i, role in enumerate(prepare.ROLE_TOKENS)}
    assert np.flatnonzero(ours.boundary).tolist() == list(range(8))


def test_byte_tokenizer_layout(tmp_path):
    tokenizer = prepare.load_tokenizer("bytes")
    assert tokenizer.vocab_size == 264 and tokenizer.bos_id == 1
    assert tokenizer.encode("A\xff") == [69, 199, 195]
    assert list(tokenizer.roles.values()) == [260, 261, 262, 263]
    assert prepare.byte_table(tokenizer).tolist() == [[0] * 4 + [1] * 256 + [0] * 4] * 2
    assert prepare.decode_bytes(tokenizer, [199, 1, 69]) == b"\xc3A"
    assert tokenizer.sha256 == hashlib.sha256(b"underpar bytes 264").hexdigest()


def test_role_tokens_that_a_text_can_write_are_no_roles(tmp_path):
    symbols = ["\n", *prepare.ROLE_TOKENS]
    tokenizer = prepare.load_tokenizer(
        train_model(tmp_path / "m", control_symbols=[], user_defined_symbols=symbols)
    )
    assert tokenizer.roles == {} and b"<|user|>" in tokenizer.pieces


FAKE_PIECES = [bytes([byte]) for byte in range(256)] + [b"th", b"the"]
FAKE_RANKS = b"".join(
    base64.b64encode(piece) + b" %d\n" % rank for rank, piece in enumerate(FAKE_PIECES)
)


def fake_encoding(monkeypatch, script, folder, end_of_text=300):
    """A rank file in `folder` that has 258 ranks and is what the script takes for the published
    cl100k_base.
    """
    sha256 = hashlib.sha256(FAKE_RANKS).hexdigest()
    facts = dict(sha256=sha256, bos_id=end_of_text, vocab_size=end_of_text + 3)
    published = script.ENCODINGS["cl100k_base"] | facts
    monkeypatch.setitem(script.ENCODINGS, "cl100k_base", published)
    path = folder / "cl100k_base.tiktoken"
    path.write_bytes(FAKE_RANKS)
    return path


def test_encodings_are_tiktokens(monkeypatch):
    """Split patterns, the end of a text, sizes and hashes, against the installed tiktoken."""
    public = tiktoken_ext.openai_public
    monkeypatch.setattr(
        public, "load_tiktoken_bpe", lambda url, expected_hash: (url, expected_hash)
    )
    monkeypatch.setattr(public, "data_gym_to_mergeable_bpe_ranks", lambda **files: None)
    assert list(prepare.ENCODINGS) == ["gpt2", "cl100k_base", "o200k_base"]
    for name, found in prepare.ENCODINGS.items():
        name = name.replace("gpt2", "r50k_base")  # the same under its later name, with a rank file
        expected = getattr(public, name)()
        special = expected["special_tokens"]
        size = expected.get("explicit_n_vocab", max(special.values()) + 1)
        assert found["split"] == expected["pat_str"]
        assert found["bos_id"] == special["<|endoftext|>"] and found["vocab_size"] == size
        address = f"{prepare.RANK_FILES}/{name}.tiktoken"
        assert expected["mergeable_ranks"] == (address, found["sha256"])


def test_any_encoding_comes_from_its_rank_file_and_no_other(tmp_path, monkeypatch):
    path = fake_encoding(monkeypatch, prepare, tmp_path)
    tokenizer = prepare.load_tokenizer(path)
    sha256 = hashlib.sha256(FAKE_RANKS).hexdigest()
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.sha256) == (303, 300, sha256)
    assert np.flatnonzero(tokenizer.boundary).tolist() == list(
        range(258, 303)
    )  # gaps and specials: no bytes
    assert tokenizer.encode("the<|endoftext|>") == [257, *b"<|endoftext|>"]
    assert prepare.save_tokenizer(tokenizer, tmp_path)["file"] == path.name
    assert path.read_bytes() == FAKE_RANKS
    (tmp_path / "b").mkdir()
    kinds = r"must be a SentencePiece model .* NAME\.tiktoken of the data, or bytes"
    refused = {
        "p50k.tiktoken": r"p50k.tiktoken: must be of an imported model, or one of \['gpt2', 'cl100k",
        "b": rf"b: \[Errno 21\] Is a directory: .*; {kinds}",
        "b/cl100k_base.tiktoken": rf"cl100k_base\.tiktoken: \[Errno 2\] No such file.*; {kinds}",
    }
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / path.name).write_bytes(FAKE_RANKS.replace(b" 1\n", b" 2\n", 1))
    refused[f"c/{path.name}"] = "tokenizer cl100k_base: is not the published rank file$"
    for name, message in refused.items():
        refusal(prepare.UserError, message, prepare.load_tokenizer, tmp_path / name)


def test_an_encoding_by_its_name_comes_from_tiktokens_cache_or_server(tmp_path, monkeypatch):
    """The server is not there; the cache is tiktoken's own, by the SHA-1 of the address."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(prepare, "RANK_FILES", "http://127.0.0.1:9")
    fake_encoding(monkeypatch, prepare, tmp_path)
    message = r"^tokenizer cl100k_base: .*127.0.0.1"
    refusal(prepare.UserError, message, prepare.open_tokenizer, "cl100k_base")
    # gpt2 has the ranks of r50k_base
    monkeypatch.setitem(prepare.ENCODINGS, "gpt2", prepare.ENCODINGS["cl100k_base"])
    for name, file in (("cl100k_base", "cl100k_base"), ("gpt2", "r50k_base")):
        address = f"http://127.0.0.1:9/{file}.tiktoken"
        (tmp_path / hashlib.sha1(address.encode()).hexdigest()).write_bytes(FAKE_RANKS)
        tokenizer = prepare.open_tokenizer(name)
        assert (tokenizer.content, tokenizer.file) == (FAKE_RANKS, f"{name}.tiktoken")


def test_tokenizer_errors(tmp_path):
    (tmp_path / "bad.model").write_bytes(b"no model at all")
    (tmp_path / "empty.model").touch()
    train_model(tmp_path / "nobos.model", bos_id=-1)
    kinds = r".*; must be a SentencePiece model .* NAME\.tiktoken of the data, or bytes"
    faults = {
        "none": f": .*No such file{kinds}",
        "bad": f": .*(?i:internal){kinds}",
        "empty": ": empty, or without the BOS token",
        "nobos": ": empty, or without the BOS token",
    }
    for name, fault in faults.items():
        message = rf"^tokenizer .*{name}\.model{fault}"
        refusal(prepare.UserError, message, prepare.load_tokenizer, tmp_path / f"{name}.model")


@pytest.mark.parametrize(
    ("tokens", "vocab_size", "dtype", "head"),
    [
        ([1, 2, 65535], 65536, "<u2", [20240520, 1, 3, 0]),
        ([1, 65536, 199999], 200019, "<u4", [20240801, 7, 3, 0]),
    ],
)
def test_shards_are_llm_cs(tmp_path, tokens, vocab_size, dtype, head):
    path = tmp_path / "a.bin"
    write_shard(path, np.array(tokens), vocab_size)
    raw = path.read_bytes()
    header = np.frombuffer(raw[:1024], "<i4")
    assert header[:4].tolist() == head and not header[4:].any()
    assert raw[1024:] == np.array(tokens, dtype).tobytes()
    found = data.read_shard(path)
    assert isinstance(found, np.memmap) and found.dtype == dtype and found.tolist() == tokens
    assert data.TokenStream([path], vocab_size).read(1, 3).tolist() == [*tokens[1:], 1]
    for bad in (-1, 256**found.itemsize):
        with pytest.raises(prepare.UserError, match=f"do not fit uint{8 * found.itemsize}"):
            write_shard(path, np.array([bad]), vocab_size)
    damaged = [raw[:-1], raw[:-2], raw + b"x", raw[:1024], raw[:12], raw[:7], b""]
    for place, value in ((0, 7), (1, 2), (2, 0)):  # another magic, version; no tokens
        header = np.frombuffer(raw[:1024], "<i4").copy()
        header[place] = value
        damaged.append(header.tobytes() + raw[1024:])
    message = r"a\.bin: truncated, damaged or empty, or not in llm\.c's formats$"
    for content in damaged:
        path.write_bytes(content)
        refusal(data.UserError, message, data.read_shard, path)
    refusal(data.UserError, r"none\.bin: no such file", data.read_shard, tmp_path / "none.bin")


def test_token_stream_is_the_concatenation_read_round(tmp_path):
    flat = np.random.default_rng(0).integers(0, 300, 25)
    paths = [tmp_path / f"{i}.bin" for i in range(4)]
    for path, part in zip(paths, np.split(flat, (5, 6, 18)), strict=True):
        write_shard(path, part)
    stream = data.TokenStream(paths, 1 << 16)
    assert len(stream) == 25
    for start in range(40):
        for count in (1, 4, 13, 60):
            out = stream.read(start, count)
            assert out.dtype == np.int64
            assert out.tolist() == [flat[(start + i) % 25] for i in range(count)]
    stream = data.TokenStream(paths, int(flat.max()))
    with pytest.raises(data.UserError, match=r"\.bin: has ids beyond the tokenizer"):
        stream.read(0, 25)


def reference_hashes(tokens):
    """Return the SHA-256 of each document's tokens as 64-bit integers. Documents begin with 1."""
    text = " ".join(map(str, tokens))
    documents = re.findall(r"\b1\b(?: (?!1\b)\d+)*", text)
    integers = [np.array(document.split(), dtype="<i8") for document in documents]
    return [hashlib.sha256(document.tobytes()).digest() for document in integers]


def test_document_hashes_across_shards(tmp_path):
    """A stream that begins inside a document has one less: its head belongs to none."""
    rng = np.random.default_rng(0)
    sizes = (0, 3, 0, 50, 7, 1, 120, 0, 4)
    tokens = np.concatenate([np.append(1, rng.integers(2, 300, size)) for size in sizes])
    tokens = np.concatenate([tokens, tokens[:5], [1, 0], [1, 0, 0], [1]])
    expected = reference_hashes(tokens)
    assert len(expected) == 14 and len(set(expected)) == 9  # [1] five times, one more twice
    for i, part in enumerate(np.array_split(tokens, 3)):
        write_shard(tmp_path / f"{i}.bin", part)
    stream = data.TokenStream(sorted(tmp_path.glob("*.bin")), 300)
    assert list(data.document_hashes(stream, 1)) == expected
    for start in (1, 2, 7):
        write_shard(tmp_path / "headless", tokens[start:])
        headless = data.TokenStream([tmp_path / "headless"], 300)
        assert list(data.document_hashes(headless, 1)) == reference_hashes(tokens[start:])


def tokenized(tokenizer, texts):
    return [token for text in texts for token in (tokenizer.bos_id, *tokenizer.encode(text))]


def write_split(folder, split, tokens):
    """Write a shard; return its entry of a manifest."""
    file = folder / f"x_{split}_000000.bin"
    write_shard(file, np.array(tokens))
    shard = {"file": file.name, "tokens": len(tokens), "sha256": data.sha256_file(file)}
    return {"shards": [shard], "tokens": len(tokens)}


def make_part(folder, train, val, tokenizer_file="bytes", **changes):
    """Return a new data folder whose documents are the given texts."""
    folder.mkdir()
    tokenizer = prepare.load_tokenizer(tokenizer_file)
    manifest = {"format": 1, "name": folder.name + "_name", "published": False}
    manifest["overlap_documents"] = 0
    manifest["tokenizer"] = prepare.save_tokenizer(tokenizer, folder)
    for split, texts in (("train", train), ("val", val)):
        size = sum(len(text.encode()) for text in texts)
        manifest[split] = {"documents": len(texts), "decoded_bytes": size}
        manifest[split] |= write_split(folder, split, tokenized(tokenizer, texts))
    change_manifest(folder, manifest | changes)
    return folder


def change_manifest(folder, manifest):
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_check_dataset(tmp_path):
    folder = make_part(tmp_path / "x", ["the train text"], ["the val text"])
    manifest = data.load_manifest(folder)
    streams = data.check_dataset(folder, manifest)
    for split, stream in zip(("train", "val"), streams, strict=True):
        assert stream.paths == [folder / f"x_{split}_000000.bin"] and stream.vocab_size == 264
        assert stream.read(0, 99).tolist()[: len(stream)] == tokens_of(folder, split)

    def refuses(message, **changes):
        found = manifest | changes
        refusal(data.UserError, message, data.check_dataset, folder, found)

    refuses("manifest.json: validation documents also stand in training", overlap_documents=3)
    published = manifest | {"overlap_documents": 3, "published": True}
    data.check_dataset(folder, published)
    for count in (14, 16):
        message = "json: has another number of tokens than the shards of train"
        refuses(message, train=manifest["train"] | {"tokens": count})
    for split in ("val", "train"):  # one token changed, sizes as they were
        path = folder / f"x_{split}_000000.bin"
        raw = path.read_bytes()
        path.write_bytes(raw[:-2] + b"\x05\x00")
        if split == "val":
            refuses(f"{path.name}: its SHA-256 is not the manifest")
        else:
            data.check_dataset(folder, manifest)
        write_shard(path, data.read_shard(path)[:-1].copy())
        refuses(f"manifest.json: has another number of tokens than the shards of {split}")
        path.write_bytes(raw)


def test_manifest_errors(tmp_path):
    for content in ("{", "{}", '{"format": 2}', "[1]", "[" * 200000):
        message = r"^\S+manifest.json: .*; DATA_PATH must be a folder that data/prepare.py"
        refusal(data.UserError, message, data.load_manifest, tmp_path)
        (tmp_path / "manifest.json").write_text(content)


def opened(path, **changes):
    changes = {"train_seq_len": 4, **changes}
    return data.open_data(data.Settings(data_path=str(path), **changes))


@pytest.fixture(autouse=True)
def hold_out(monkeypatch):
    """Hold out ten tokens, or as many as the function is given."""

    def change(count):
        monkeypatch.setattr(data, "HOLDOUT_TOKENS", count)

    change(10)
    return change


def refuses(message, path, **changes):
    return refusal(data.UserError, message, opened, path, **changes)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("data/x", {"data/x": 1.0}),
        ("a:0.7,b:0.3", {"a": 0.7, "b": 0.3}),
        ("a:3, b:1", {"a": 0.75, "b": 0.25}),
        ("only:2", {"only": 1.0}),
        ("c:d:1,e:1", {"c:d": 0.5, "e": 0.5}),
        ("a/:1,b/:.5", {"a": 2 / 3, "b": 1 / 3}),
    ],
)
def test_mixtures_are_parsed_and_normalised(text, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for at, folder in enumerate(expected):
        make_part(tmp_path / folder, [f"text of {folder}"] * 9, [f"five {at}"])
    found = opened(text)
    names = [manifest["name"].removesuffix("_name") for manifest in found.manifests]
    assert names == [Path(folder).name for folder in expected]
    assert found.shares == pytest.approx(list(expected.values()))


WRONG_MIXTURES = ["", "a:x", "a:0.5,b", "a,b", "a:0", "a:1,b:0.0", "a:-1,b:2", "a:1.2.3", ":1"]
WRONG_MIXTURES += ["a:1,", "a:nan", "a:inf,b:1"]


@pytest.mark.parametrize("text", WRONG_MIXTURES)
def test_mixtures_that_are_none_are_one_line(text):
    refuses("^DATA_PATH=.*: must be a folder or FOLDER:WEIGHT", text)


def test_a_wrong_count_of_validation_bytes_is_refused(tmp_path):
    a, b = (
        make_part(tmp_path / name, [f"text of {name}"] * 9, [f"five {name}", "two"])
        for name in "ab"
    )
    assert (
        len(opened(a).val.tokens) == 11 and len(opened(f"{a}:1,{b}:1").val.tokens) == 22
    )  # 9 and 18 bytes
    stored = data.load_manifest(a)
    for count in (8, 10, 0):
        stored["val"]["decoded_bytes"] = count
        change_manifest(a, stored)
        refuses(f"^validation: 9 bytes, manifest.json says {count};", a)
        message = f"^validation: 18 bytes, manifest.json says {count + 9};"
        refuses(message, f"{a}:1,{b}:1")
    # Nothing scores the first token of a text that begins inside a document.
    stored["val"] = {"decoded_bytes": 9, **write_split(a, "val", tokens_of(a, "val")[1:])}
    change_manifest(a, stored)
    refuses("^validation: begins with token 106, manifest.json has another BOS$", a)


def test_validation_bytes_leave_out_the_dummy_prefix_after_a_boundary_only(tmp_path, prefix_model):
    texts = ["the cat", "sat on the mat"]
    part = make_part(tmp_path / "p", ["the cat sat"] * 20, texts, prefix_model)
    assert opened(part).tokenizer.sha256 == data.sha256_file(prefix_model)


def test_a_score_divides_by_no_more_bytes_than_the_source_has(tmp_path, spaceless_model):
    """A tokenizer without a space piece decodes to more; without source_bytes nobody knows."""
    texts = ["the cat sat on the mat", "a hat"]
    source = sum(map(len, texts))
    decoded = source + 2 * 6  # six spaces, in three bytes each
    splits = {}
    tokenizer = prepare.load_tokenizer(spaceless_model)
    for split, size in (("train", 9), ("val", source)):
        splits[split] = {"documents": 2, "source_bytes": size, "decoded_bytes": decoded}
    part = make_part(tmp_path / "p", ["the cat sat"] * 20, texts, spaceless_model)
    stored = data.load_manifest(part)
    stored["val"] |= splits["val"]
    change_manifest(part, stored)
    found = opened(part)
    assert found.val.bytes == source and found.tokenizer.count_bytes(found.val.tokens) == decoded
    held_out = found.tokenizer.count_bytes(found.held_out.tokens)
    assert found.held_out.bytes == round(held_out * source / decoded) < held_out
    model = torch.nn.Module()
    model.forward = lambda ids, targets, *borders: (targets >= 0).float()
    scorer = data.Scorer(tokenizer.bos_id, data.Runtime(0, 1, torch.device("cpu"), False), 8, 2)
    scores = [scorer.score(model, found.val), scorer.score(model, found.val, 3)]
    scores.append(data.score_documents(scorer, model, found.val))
    assert [score.bytes for score in scores] == [source] * 3
    assert scores[0].bpb == pytest.approx((len(found.val.tokens) - 1) / math.log(2) / source)
    # A mixture: one folder with too many bytes, one that loses some.
    lossy = make_part(tmp_path / "q", ["a cat"] * 20, ["mat"], spaceless_model)
    about = data.load_manifest(lossy)
    about["val"] |= {"source_bytes": 5}
    change_manifest(lossy, about)
    assert opened(f"{part}:1,{lossy}:1").val.bytes == source + 3
    stored["val"]["source_bytes"] = None
    change_manifest(part, stored)
    assert opened(part).val.bytes == decoded


def test_bytes_of_tokens_are_those_of_the_manifest(tmp_path):
    part = make_part(tmp_path / "p", ["training text"] * 20, ["one"])
    raw = (part / data.TOKEN_BYTES).read_bytes()
    stored = data.load_manifest(part)
    old = {**stored, "tokenizer": {**stored["tokenizer"], "token_bytes_sha256": None}}
    for content, manifest in ((raw, old), (b"", stored), (b"\1" + raw[1:], stored)):
        (part / data.TOKEN_BYTES).write_bytes(content)
        change_manifest(part, manifest)
        refuses(f"^{part}/token_bytes.bin: missing, or .*: python .* --token-bytes {part}$", part)
        assert prepare.add_token_bytes(part) == stored
        assert opened(part).val.bytes == 3


def tokens_of(part, split):
    return np.fromfile(part / f"x_{split}_000000.bin", "<u2", offset=1024).tolist()


def test_open_data_of_one_folder(tmp_path, hold_out):
    part = make_part(tmp_path / "p", ["training text"] * 20, ["one", "twö", "three"])
    found = opened(part)
    assert (
        found.val.tokens.tolist() == tokens_of(part, "val") and found.val.tokens.dtype == np.int64
    )
    assert (found.manifests, found.yardsticks) == ([data.load_manifest(part)], {})
    assert found.manifest_sha256 == data.sha256_file(part / "manifest.json")
    (stream,) = found.streams
    assert found.shares == [1.0] and len(stream) == 280
    # 70 windows of four; ten tokens take three of them, and a twentieth are three.
    whole = tokens_of(part, "train")
    held_out = sorted(set(range(70)) - set(found.windows[0].tolist()))
    assert len(held_out) == 3 and len(found.windows[0]) == 67
    windows = sorted(found.held_out.tokens.reshape(3, 4).tolist())
    assert windows == sorted(whole[4 * window : 4 * window + 4] for window in held_out)
    for count, expected in ((1, 4), (8, 8), (10**9, 12)):
        hold_out(count)
        assert len(opened(part).held_out.tokens) == expected
    hold_out(10)
    for changes in (dict(ema=False), dict(swa=False)):
        assert len(opened(part, **changes).held_out.tokens) == 12
    unused = dict(ema=False, swa=False)  # nothing is chosen, so all tokens train
    found = opened(part, **unused)
    assert len(found.held_out.tokens) == 0 and sorted(found.windows[0]) == list(range(70))
    assert len(opened(part, train_seq_len=280, **unused).windows[0]) == 1
    message = (
        "^TRAIN_SEQ_LEN=15: no such window is in a twentieth of the training tokens, to choose "
        "among raw, EMA and SWA weights on; must be at most 14, or EMA=0 SWA=0$"
    )
    refuses(message, part, train_seq_len=15)
    assert len(opened(part, train_seq_len=14).held_out.tokens) == 14
    message = "^TRAIN_SEQ_LEN=281: must be at most 280, the training tokens of .*/p$"
    refuses(message, part, train_seq_len=281, **unused)
    refuses(r"^VOCAB_SIZE=7: must be 0 or the tokenizer's 264$", part, vocab_size=7)
    figures = dict.fromkeys(data.YARDSTICKS, 2.5)
    measured = make_part(tmp_path / "m", ["training text"] * 6, ["one"], yardsticks=figures)
    assert opened(measured).yardsticks == figures
    (tmp_path / "other.model").write_bytes(b"another tokenizer")
    refuses("other.model", part, tokenizer_path=str(tmp_path / "other.model"))
    table = bytearray((part / "token_bytes.bin").read_bytes())
    table[-4] ^= 1
    (part / "token_bytes.bin").write_bytes(table)
    refuses("token_bytes.bin", part)


def test_open_data_of_a_mixture(tmp_path, hold_out):
    a = make_part(tmp_path / "a", ["training text"] * 99, ["one", "two"])
    published = dict(overlap_documents=2, published=True)
    b = make_part(tmp_path / "b", ["other text"] * 99, ["four", "fünf"], **published)
    hold_out(40)
    found = opened(f"{a}:3,{b}:1")
    # 346 and 272 windows of four, of which eight and three are held out.
    assert [*map(len, found.windows)] == [346 - 8, 272 - 3]
    assert found.shares == [0.75, 0.25] and found.yardsticks == {}
    assert found.val.tokens.tolist() == tokens_of(a, "val") + tokens_of(b, "val")
    assert found.manifests == [data.load_manifest(part) for part in (a, b)]
    hashes = [data.sha256_file(part / "manifest.json") for part in (a, b)]
    assert found.manifest_sha256 == " + ".join(hashes)
    windows = found.held_out.tokens.reshape(11, 4).tolist()
    for part, held_out in ((a, windows[:8]), (b, windows[8:])):
        whole = tokens_of(part, "train")
        every = [whole[i : i + 4] for i in range(0, len(whole), 4)]
        assert all(window in every for window in held_out)
    other = make_part(tmp_path / "c", ["x" * 30], ["y"])
    foreign = data.load_manifest(other)
    foreign["tokenizer"]["sha256"] = "0" * 64
    change_manifest(other, foreign)
    refuses(
        "^DATA_PATH=.*: shards of several tokenizers; prepare all folders with one: .* .*/a/bytes$",
        f"{a}:1,{other}:1",
    )


def test_validation_of_one_part_in_the_training_of_another_is_refused(tmp_path, capsys):
    val = ["kept apart", "in the other", "kept too", "in the other", "at the end"]
    a = make_part(tmp_path / "a", ["training text"] * 9, val)
    train = ["other text"] * 9 + ["in the other", "kept apart, nearly", "at the end"]
    b = make_part(tmp_path / "b", train, ["five"], published=True)
    c = make_part(tmp_path / "c", ["yet another text", "kept apar", "tkept apart"] * 5, ["a val"])
    message = f"^{b}/x_train_000000.bin: a document is in another folder's validation$"
    for parts in (f"{a}:1,{b}:2", f"{b}:1,{c}:1,{a}:1"):
        refuses(message, parts)
    # Rank 0 reads for all, and says so before there is a log.
    assert capsys.readouterr().err.count("DATA_PATH: reading all documents") == 2
    both = data.Settings(data_path=f"{a}:1,{b}:2", train_seq_len=4)
    assert len(data.open_data(both, rank=1).streams) == 2 and not capsys.readouterr().err
    assert len(opened(f"{a}:1,{c}:1").val.tokens) == sum(len(text) + 1 for text in val) + 6
    assert len(opened(b).val.tokens) == 5  # one part alone: its own manifest counts


def fuzz_manifests(folder, tokenizer_file, count):
    """Open a folder with mutated manifests: each is taken or refused in one line."""
    part = make_part(folder / "p", ["the train text"] * 9, ["the val text"] * 3, tokenizer_file)
    stored = json.loads((part / "manifest.json").read_text())
    stored["val"]["source_bytes"] = 36
    stored["yardsticks"] = dict.fromkeys(data.YARDSTICKS, 2.5)
    rng = random.Random(0)
    refused = Counter()
    for _ in range(count):
        change_manifest(part, mutated(stored, rng))
        try:
            found = opened(part, ema=False, swa=False)
            assert found.val.tokens.tolist() == tokens_of(part, "val")
            assert 0 < found.val.bytes <= 36 and found.tokenizer.bos_id == 1
            data.log_data(found, data.Settings(), refused.__contains__)
            refused["taken"] += 1
        except data.UserError as error:
            line = str(error)
            assert "\n" not in line and len(line) < 500, line
            refused["refused"] += 1
    assert refused["refused"] > 0.8 * count and refused["taken"] > 0
    # Bytes of the file changed at random.
    text = json.dumps(stored).encode()
    for _ in range(count // 4):
        spoilt = bytearray(text)
        for _ in range(rng.randint(1, 3)):
            spoilt[rng.randrange(len(spoilt))] = rng.randrange(256)
        (part / "manifest.json").write_bytes(spoilt[: rng.choice([None, len(spoilt) // 2])])
        with contextlib.suppress(data.UserError):
            opened(part, ema=False, swa=False)


def test_mutated_manifests_are_one_line(tmp_path):
    fuzz_manifests(tmp_path, "bytes", 60)


MANIFEST_FAULTS = [
    ({"train": None}, "the manifest.train is missing, must be of type dict"),
    (
        {"val": {"shards": [{"file": "a", "sha256": "b"}, 7]}},
        r"the manifest.val.shards\[1\] is 7, must be of type dict",
    ),
    ({"overlap_documents": -1}, "the manifest.overlap_documents is -1, must be of type int, 0 or"),
    ({"overlap_documents": True}, "the manifest.overlap_documents is True, must be of type int"),
    ({"name": ["x" * 900]}, r"the manifest.name is \['x{58}, must be of type str"),
    ({"yardsticks": {"bigram_bpb": "2"}}, "the manifest.yardsticks.bigram_bpb is '2', must be of"),
    ({"tokenizer": {"file": "", "sha256": "", "vocab_size": 9, "bos_id": 9}}, "format must be 1, "),
    (
        {"tokenizer": {"file": "../x", "sha256": "", "vocab_size": 9, "bos_id": 1}},
        "'../x' must be the name of a file beside it",
    ),
]


@pytest.mark.parametrize(("changes", "message"), MANIFEST_FAULTS)
def test_what_is_wrong_with_a_manifest_is_named(tmp_path, changes, message):
    part = make_part(tmp_path / "p", ["the train text"] * 9, ["the val text"])
    change_manifest(part, data.load_manifest(part) | changes)
    refuses(f"^{part}/manifest.json: {message}", part)


def test_shards_of_wrong_headers_are_one_line(tmp_path):
    part = make_part(tmp_path / "p", ["the train text"] * 9, ["the val text"])
    path = part / "x_train_000000.bin"
    raw = path.read_bytes()
    header = np.frombuffer(raw[:1024], "<i4")
    for changes in ({0: 1}, {1: 7}, {2: -1}, {2: 0}, {2: 2**31 - 1}, {0: 20240801, 1: 7}):
        wrong = header.copy()
        for place, value in changes.items():
            wrong[place] = value
        path.write_bytes(wrong.tobytes() + raw[1024:])
        refuses(f"^shard {path}: truncated, damaged or empty, or not in llm.c's formats$", part)
    for content in (b"", raw[:4], raw[:1024], raw[:-1], raw + b"\0"):
        path.write_bytes(content)
        refuses(f"^shard {path}: truncated, damaged", part)
    empty = header.copy()
    empty[2] = 0
    path.write_bytes(empty.tobytes())
    refuses(f"^shard {path}: truncated, damaged or empty", part)
    path.write_bytes(raw[:-2] + b"\xff\xff")
    stream = opened(part, ema=False, swa=False).streams[0]
    message = f"^shard {path}: has ids beyond the tokenizer's$"
    refusal(data.UserError, message, stream.read, len(stream) - 2, 2)
    path.unlink()
    path.mkdir()
    refuses(f"^shard {path}: no such file$", part)
