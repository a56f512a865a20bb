"""The data section: byte accounting, shards, manifest checks, the token stream."""

import base64
import hashlib
import io
import json
import math
import random
import resource

import numpy as np
import pytest
import sentencepiece
import tiktoken_ext.openai_public
import torch

import train_gpt as data
from conftest import ROOT, load_script, mutated, refusal, write_json

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


# The options of data/prepare.py.
OPTIONS = """model_type=bpe vocab_size=400 byte_fallback=true normalization_rule_name=identity
    add_dummy_prefix=false remove_extra_whitespaces=false allow_whitespace_only_pieces=true
    pad_id=0 bos_id=1 eos_id=2 unk_id=3 minloglevel=2 num_threads=1"""


def train_model(path, lines=(), **changes):
    """Write a small SentencePiece model; the defaults are those of data/prepare.py."""
    options = dict(pair.split("=") for pair in OPTIONS.split())
    options |= {"user_defined_symbols": ["\n"], "control_symbols": list(prepare.ROLE_TOKENS)}
    texts = list(lines) or [*HARD_TEXTS * 3, "the cat sat on the mat  and  the hat"]
    model = io.BytesIO()
    given = dict(sentence_iterator=iter("\n".join(texts).split("\n")), model_writer=model)
    sentencepiece.SentencePieceTrainer.train(**given, **(options | changes))
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


def test_byte_tokenizer_layout():
    tokenizer = prepare.load_tokenizer("bytes")
    assert tokenizer.encode("A\xff") == [69, 199, 195]
    assert list(tokenizer.roles.values()) == [260, 261, 262, 263]
    assert prepare.byte_table(tokenizer).tolist() == [[0] * 4 + [1] * 256 + [0] * 4] * 2
    assert tokenizer.sha256 == hashlib.sha256(b"underpar bytes 264").hexdigest()


def test_role_tokens_that_a_text_can_write_are_no_roles(tmp_path):
    symbols = ["\n", *prepare.ROLE_TOKENS]
    model = train_model(tmp_path / "m", control_symbols=[], user_defined_symbols=symbols)
    tokenizer = prepare.load_tokenizer(model)
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


def test_any_encoding_comes_from_its_rank_file(tmp_path, monkeypatch):
    path = fake_encoding(monkeypatch, prepare, tmp_path)
    tokenizer = prepare.load_tokenizer(path)
    sha256 = hashlib.sha256(FAKE_RANKS).hexdigest()
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.sha256) == (303, 300, sha256)
    boundaries = np.flatnonzero(tokenizer.boundary)  # gaps and specials: no bytes
    assert boundaries.tolist() == list(range(258, 303))
    assert tokenizer.encode("the<|endoftext|>") == [257, *b"<|endoftext|>"]
    assert prepare.save_tokenizer(tokenizer, tmp_path)["file"] == path.name
    assert path.read_bytes() == FAKE_RANKS


def test_an_encoding_by_its_name_comes_from_tiktokens_cache_or_server(tmp_path, monkeypatch):
    """The server is not there; the cache is tiktoken's own, by the SHA-1 of the address."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(prepare, "RANK_FILES", "http://127.0.0.1:9")
    fake_encoding(monkeypatch, prepare, tmp_path)
    refusal(prepare.UserError, "cl100k_base: .*127.0.0.1", prepare.open_tokenizer, "cl100k_base")
    # gpt2 has the ranks of r50k_base
    monkeypatch.setitem(prepare.ENCODINGS, "gpt2", prepare.ENCODINGS["cl100k_base"])
    for name, file in (("cl100k_base", "cl100k_base"), ("gpt2", "r50k_base")):
        address = f"http://127.0.0.1:9/{file}.tiktoken"
        (tmp_path / hashlib.sha1(address.encode()).hexdigest()).write_bytes(FAKE_RANKS)
        tokenizer = prepare.open_tokenizer(name)
        assert (tokenizer.content, tokenizer.file) == (FAKE_RANKS, f"{name}.tiktoken")


def test_files_that_are_no_tokenizers_are_named(tmp_path):
    (tmp_path / "folder").mkdir()
    train_model(tmp_path / "nobos.model", bos_id=-1)
    wrong = {"bad.model": b"no model at all", "empty.model": b"", "p50k.tiktoken": FAKE_RANKS}
    wrong["cl100k_base.tiktoken"] = FAKE_RANKS  # not those that are published
    for name, content in wrong.items():
        (tmp_path / name).write_bytes(content)
    for name in [*wrong, "nobos.model", "none.model", "none.tiktoken", "folder"]:
        message = rf"(?i){name.removesuffix('.tiktoken')}\b"
        refusal(prepare.UserError, message, prepare.load_tokenizer, tmp_path / name)


# ------------------------------------------------------------------------------------------- shards
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
    for bad in (-1, 256**found.itemsize):
        with pytest.raises(prepare.UserError):
            write_shard(path, np.array([bad]), vocab_size)
    damaged = [raw[:-1], raw[:-2], raw + b"x", raw[:1024], raw[:12], raw[:7], b""]
    wrong = ((0, 7), (1, 2), (2, 0), (2, -1), (2, 2**31 - 1))  # magic, version, number of tokens
    for place, value in wrong:
        header = np.frombuffer(raw[:1024], "<i4").copy()
        header[place] = value
        damaged.append(header.tobytes() + raw[1024:])
    header[2] = 0
    damaged.append(header.tobytes())
    for content in damaged:
        path.write_bytes(content)
        refusal(data.UserError, r"shard .*a\.bin: truncated", data.read_shard, path)
    path.unlink()
    refusal(data.UserError, r"shard .*a\.bin: no such file", data.read_shard, path)
    path.mkdir()
    refusal(data.UserError, r"shard .*a\.bin: no such file", data.read_shard, path)


def write_shards(folder, tokens, count):
    """Write tokens as so many shards of about equal length; return their paths."""
    paths = [folder / f"{i}.bin" for i in range(count)]
    for path, part in zip(paths, np.array_split(tokens, count), strict=True):
        write_shard(path, part)
    return paths


def test_token_stream_is_the_concatenation_read_round(tmp_path):
    flat = np.random.default_rng(0).integers(0, 300, 25)
    paths = write_shards(tmp_path, flat, 4)
    stream = data.TokenStream(paths, 301)
    assert len(stream) == 25 and stream.read(0, 1).dtype == np.int64
    for start in range(40):
        for count in (1, 4, 13, 60):
            expected = [flat[(start + i) % 25] for i in range(count)]
            assert stream.read(start, count).tolist() == expected
    stream = data.TokenStream(paths, int(flat.max()))
    refusal(data.UserError, r"\.bin: has ids beyond", stream.read, 0, 25)


def test_document_hashes_across_shards(tmp_path):
    """A stream that begins inside a document has one less: its head belongs to none."""
    rng = np.random.default_rng(0)
    sizes = (0, 3, 0, 50, 7, 1, 120, 0, 4)
    documents = [np.append(1, rng.integers(2, 300, size)) for size in sizes]
    documents += [documents[3], np.array([1, 0]), np.array([1])]
    hashes = [hashlib.sha256(ids.astype("<i8").tobytes()).digest() for ids in documents]
    tokens = np.concatenate(documents)
    for start, lost in ((0, 0), (1, 1), (2, 2), (5, 2), (6, 3)):
        stream = data.TokenStream(write_shards(tmp_path, tokens[start:], 3), 300)
        assert list(data.document_hashes(stream, 1)) == hashes[lost:]


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


@pytest.fixture
def part(tmp_path):
    return make_part(tmp_path / "p", ["the train text"] * 9, ["the val text"] * 3)


def change_manifest(folder, manifest):
    write_json(folder / "manifest.json", manifest)


def test_check_dataset(part):
    manifest = data.load_manifest(part)
    streams = data.check_dataset(part, manifest)
    for split, stream in zip(("train", "val"), streams, strict=True):
        assert stream.read(0, len(stream)).tolist() == tokens_of(part, split)

    def refuses(message, **changes):
        refusal(data.UserError, message, data.check_dataset, part, manifest | changes)

    refuses("manifest.json: validation documents", overlap_documents=3)
    data.check_dataset(part, manifest | {"overlap_documents": 3, "published": True})
    count = len(streams[0])
    for wrong in (count - 1, count + 1):
        refuses("of tokens .* train", train=manifest["train"] | {"tokens": wrong})
    for split in ("train", "val"):  # one token changed, sizes as they were
        path = part / f"x_{split}_000000.bin"
        path.write_bytes(path.read_bytes()[:-2] + b"\x05\x00")
        if split == "train":  # shards of training may be many gigabytes
            data.check_dataset(part, manifest)
    refuses(f"{path.name}: its SHA-256")


def test_more_shards_than_files_that_may_be_open(tmp_path):
    """At first: 100 mapped shards have 100 open files."""
    part = make_part(tmp_path / "part", ["text"], ["other"])
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, most))
    stream = data.TokenStream([part / "x_train_000000.bin"] * 100, 300)
    assert len(stream) == 100 * 5 and stream.read(499, 2).tolist() == tokens_of(part, "train")[::-4]
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, most)


# -------------------------------------------------------------------------------- folders, mixtures
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


def test_mixtures_are_parsed_and_normalised():
    for text, expected in {
        "data/x": {"data/x": 1.0},
        "a:3, b:1": {"a": 0.75, "b": 0.25},
        "only:2": {"only": 1.0},
        "c:d:1,e:1": {"c:d": 0.5, "e": 0.5},
        "a/:1,b/:.5": {"a/": 2 / 3, "b/": 1 / 3},
    }.items():
        folders, shares = data.parse_mixture(text)
        assert dict(zip(folders, shares, strict=True)) == pytest.approx(expected)
    for text in (
        "",
        "a:x",
        "a:0.5,b",
        "a,b",
        "a:0",
        "a:-1,b:2",
        ":1",
        "a:1,",
        "a:nan",
        "a:inf,b:1",
    ):
        refusal(data.UserError, "^DATA_PATH=", data.parse_mixture, text)


def test_a_wrong_count_of_validation_bytes_is_refused(tmp_path):
    a, b = (
        make_part(tmp_path / name, [f"text of {name}"] * 9, [f"five {name}", "two"])
        for name in "ab"
    )
    both = f"{a}:1,{b}:1"
    assert [len(opened(path).val.tokens) for path in (a, both)] == [11, 22]  # 9 and 18 bytes
    stored = data.load_manifest(a)
    for count in (8, 10, 0):
        stored["val"]["decoded_bytes"] = count
        change_manifest(a, stored)
        refuses(f"^validation: 9 bytes, manifest.json says {count};", a)
        refuses(f"^validation: 18 bytes, manifest.json says {count + 9};", both)
    # Nothing scores the first token of a text that begins inside a document.
    stored["val"] = {"decoded_bytes": 9, **write_split(a, "val", tokens_of(a, "val")[1:])}
    change_manifest(a, stored)
    refuses("^validation: begins with token 106", a)


def test_a_score_divides_by_no_more_bytes_than_the_source_has(tmp_path, spaceless_model):
    """A tokenizer without a space piece decodes to more; without source_bytes nobody knows."""
    texts = ["the cat sat on the mat", "a hat"]
    source = sum(map(len, texts))
    decoded = source + 2 * 6  # six spaces, in three bytes each
    part = make_part(tmp_path / "p", ["the cat sat"] * 20, texts, spaceless_model)
    stored = data.load_manifest(part)
    for source_bytes, size in ((None, decoded), (99, decoded), (source, source)):
        stored["val"] |= {"source_bytes": source_bytes, "decoded_bytes": decoded}
        change_manifest(part, stored)
        found = opened(part)
        assert found.val.bytes == size
    held_out = found.tokenizer.count_bytes(found.held_out.tokens)
    assert found.held_out.bytes == round(held_out * source / decoded) < held_out
    model = torch.nn.Module()
    model.forward = lambda ids, targets, *borders: (targets >= 0).float()
    runtime = data.Runtime(0, 1, torch.device("cpu"), False)
    scorer = data.Scorer(found.tokenizer.bos_id, runtime, 8, 2)
    nats = len(found.val.tokens) - 1
    for score in (scorer.score(model, found.val), data.score_documents(scorer, model, found.val)):
        assert score.bpb == pytest.approx(nats / math.log(2) / source)


def test_bytes_of_tokens_are_those_of_the_manifest(part):
    raw = (part / data.TOKEN_BYTES).read_bytes()
    stored = data.load_manifest(part)
    old = {**stored, "tokenizer": {**stored["tokenizer"], "token_bytes_sha256": None}}
    for content, manifest in ((raw, old), (b"", stored), (b"\1" + raw[1:], stored)):
        (part / data.TOKEN_BYTES).write_bytes(content)
        change_manifest(part, manifest)
        refuses(f"^{part}/token_bytes.bin: .* --token-bytes {part}$", part)
        assert prepare.add_token_bytes(part) == stored
        assert opened(part).val.bytes == 36


def tokens_of(part, split):
    return np.fromfile(part / f"x_{split}_000000.bin", "<u2", offset=1024).tolist()


def test_open_data_of_one_folder(tmp_path, hold_out):
    figures = dict.fromkeys(data.YARDSTICKS, 2.5)
    texts = ["one", "twö", "three"]
    part = make_part(tmp_path / "p", ["training text"] * 20, texts, yardsticks=figures)
    found = opened(part)
    assert found.val.tokens.tolist() == tokens_of(part, "val")
    assert (found.manifests, found.yardsticks) == ([data.load_manifest(part)], figures)
    assert found.manifest_sha256 == data.sha256_file(part / "manifest.json")
    change_manifest(part, data.load_manifest(part) | {"yardsticks": None})  # nobody measured them
    assert opened(part).yardsticks == {}
    # 70 windows of four; ten tokens take three of them, and a twentieth are three.
    whole = np.reshape(tokens_of(part, "train"), (70, 4)).tolist()
    held_out = sorted(set(range(70)) - set(found.windows[0].tolist()))
    assert len(held_out) == 3 and len(found.windows[0]) == 67
    windows = sorted(found.held_out.tokens.reshape(3, 4).tolist())
    assert windows == sorted(whole[window] for window in held_out)
    for count, expected in ((1, 4), (8, 8), (10**9, 12)):
        hold_out(count)
        assert len(opened(part).held_out.tokens) == expected
    assert len(opened(part, ema=False).held_out.tokens) == 12
    unused = dict(ema=False, swa=False)  # nothing is chosen, so all tokens train
    assert sorted(opened(part, **unused).windows[0]) == list(range(70))
    for length, changes in ((280, unused), (14, {})):
        assert opened(part, train_seq_len=length, **changes)
        message = f"^TRAIN_SEQ_LEN={length + 1}: .* {length}\\b"
        refuses(message, part, train_seq_len=length + 1, **changes)


def test_another_tokenizer_than_the_datas_is_refused(part, tmp_path):
    refuses("^VOCAB_SIZE=7: .* 264", part, vocab_size=7)
    (tmp_path / "other.model").write_bytes(b"another tokenizer")
    refuses("other.model", part, tokenizer_path=str(tmp_path / "other.model"))
    foreign = data.load_manifest(make_part(tmp_path / "c", ["x" * 30], ["y"]))
    foreign["tokenizer"]["sha256"] = "0" * 64
    change_manifest(tmp_path / "c", foreign)
    refuses("^DATA_PATH=.* tokenizers.*/p/bytes$", f"{part}:1,{tmp_path}/c:1")


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
    hashes = [data.sha256_file(part / "manifest.json") for part in (a, b)]
    assert found.manifest_sha256 == " + ".join(hashes)
    held_out = found.held_out.tokens.reshape(11, 4).tolist()
    for part, windows in ((a, held_out[:8]), (b, held_out[8:])):
        whole = tokens_of(part, "train")
        every = [whole[i : i + 4] for i in range(0, len(whole), 4)]
        assert all(window in every for window in windows)


def test_validation_of_one_part_in_the_training_of_another_is_refused(tmp_path, capsys):
    val = ["kept apart", "in the other", "kept too", "in the other", "at the end"]
    a = make_part(tmp_path / "a", ["training text"] * 9, val)
    train = ["other text"] * 9 + ["in the other", "kept apart, nearly", "at the end"]
    b = make_part(tmp_path / "b", train, ["five"], published=True)
    c = make_part(tmp_path / "c", ["yet another text", "kept apar", "tkept apart"] * 5, ["a val"])
    message = f"^{b}/x_train_000000.bin: a document is in another folder's validation"
    for parts in (f"{a}:1,{b}:2", f"{b}:1,{c}:1,{a}:1"):
        refuses(message, parts)
    # Rank 0 reads for all, and says so before there is a log.
    assert capsys.readouterr().err.count("DATA_PATH: reading all documents") == 2
    both = data.Settings(data_path=f"{a}:1,{b}:2", train_seq_len=4)
    assert len(data.open_data(both, rank=1).streams) == 2
    assert len(opened(f"{a}:1,{b}:2", resume="x").streams) == 2  # its first start has read them
    assert not capsys.readouterr().err
    assert len(opened(f"{a}:1,{c}:1").val.tokens) == sum(len(text) + 1 for text in val) + 6
    assert len(opened(b).val.tokens) == 5  # one part alone: its own manifest counts


# ---------------------------------------------------------------------------------- wrong manifests
def test_mutated_manifests_are_taken_or_refused_in_one_line(part):
    stored = data.load_manifest(part)
    stored["val"]["source_bytes"] = 36
    stored["yardsticks"] = dict.fromkeys(data.YARDSTICKS, 2.5)
    rng = random.Random(0)
    taken = 0
    for number in range(80):
        text = json.dumps(mutated(stored, rng) if number % 4 else stored)
        if number % 4 == 0:  # one of its bytes is changed
            place = rng.randrange(len(text))
            text = text[:place] + chr(rng.randrange(128)) + text[place + 1 :]
        (part / "manifest.json").write_text(text)
        try:
            found = opened(part, ema=False, swa=False)
            assert found.val.tokens.tolist() == tokens_of(part, "val")
            assert 0 < found.val.bytes <= 36 and found.tokenizer.bos_id == 1
            data.log_data(found, 0, str)
            taken += 1
        except data.UserError as error:
            assert "\n" not in str(error) and len(str(error)) < 500
    assert 0 < taken < 30


TOKENIZER = {"file": "a", "sha256": "", "vocab_size": 9, "bos_id": 1}
MANIFEST_FAULTS = [
    ("train", None, "train is missing"),
    ("val", {"shards": [{"file": "a", "sha256": "b"}, 7]}, r"val.shards\[1\] is 7"),
    ("overlap_documents", -1, "overlap_documents is -1"),
    ("overlap_documents", True, "overlap_documents is True"),
    ("name", ["x" * 900], r"name is \['x{58},"),
    ("yardsticks", {"bigram_bpb": "2"}, "yardsticks.bigram_bpb is '2'"),
    ("tokenizer", {**TOKENIZER, "bos_id": 9}, "bos_id"),
    ("tokenizer", {**TOKENIZER, "file": "../x"}, "'../x'"),
    ("format", 2, "format must be 1"),
]


def test_what_is_wrong_with_a_manifest_is_named(part):
    stored = data.load_manifest(part)
    for name, value, message in MANIFEST_FAULTS:
        change_manifest(part, stored | {name: value})
        refuses(f"^{part}/manifest.json: .*{message}", part)
    for content in ("{", "[1]", "[" * 200000):
        (part / "manifest.json").write_text(content)
        refuses(f"^{part}/manifest.json: .*DATA_PATH", part)
    (part / "manifest.json").unlink()
    refuses(f"^{part}/manifest.json: .*DATA_PATH", part)
