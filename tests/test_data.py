"""The data section: byte accounting, shards, manifest checks, the token stream."""

import base64
import hashlib
import importlib.util
import io
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import tiktoken
import tiktoken_ext.openai_public
import zstandard

import train_gpt as data

spec = importlib.util.spec_from_file_location(
    "prepare", Path(data.__file__).parent / "data" / "prepare.py"
)
prepare = sys.modules["prepare"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(prepare)
write_shard = prepare.write_shard

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
needs_shared = pytest.mark.skipif(
    not (SHARED / "tokenizers").is_dir(), reason="needs ../shared/data"
)

HARD_TEXTS = [
    "plain words, one line",
    " leads with a space",
    "  leads with two",
    "ends with spaces  ",
    "runs   of    spaces     inside\n\n\n    indented\n\t\ttabs\tand\ttabs \t mixed",
    "windows\r\nline\r\nends\r\rand\rbare returns\r\n",
    "ümläuts, Привет, 日本語のテキスト, العربية, ไทย, é as e\u0301",
    "emoji \U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 and flags \U0001f1e9\U0001f1ea",
    "private use \ue000\uf8ff\U000f0000, zero width \u200b\ufeff, nbsp\u00a0, ideographic\u3000space",
    "ligature ﬁ, fullwidth ＡＢ, superscript ², control \x01\x7f, line sep \u2028",
    "role text <|user|> hello <|end|> is plain text here",
    "<0x41> written out, <s> and </s> and <unk> too",
    "\n",
    "\t",
    " ",
    "x",
]


def train_model(path, **changes):
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
    lines = [line for text in HARD_TEXTS for line in text.split("\n")] * 3 + [
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


@pytest.fixture(scope="module")
def prefix_model(tmp_path_factory):
    """As the published FineWeb models: dummy prefix, NFKC, white space collapsed."""
    return train_model(
        tmp_path_factory.mktemp("model") / "prefix.model",
        normalization_rule_name="nmt_nfkc",
        add_dummy_prefix=True,
        remove_extra_whitespaces=True,
        allow_whitespace_only_pieces=False,
        user_defined_symbols=[],
        control_symbols=[],
    )


def counted(tokenizer, ids):
    """The byte table's sum for one document after BOS."""
    ids = np.array(ids, dtype=np.int64)
    return int(
        data.token_bytes(tokenizer, np.concatenate([[tokenizer.bos_id], ids])[:-1], ids).sum()
    )


def canonical_bytes(processor, prev, ids):
    """Parameter Golf's rule, written out: marker stripped, byte tokens 1, one more unless a boundary stands before."""
    total = 0
    for before, token in zip(prev, ids, strict=True):

        def is_boundary(t):
            return processor.is_control(t) or processor.is_unknown(t) or processor.is_unused(t)

        if is_boundary(token):
            continue
        piece = processor.id_to_piece(token)
        if processor.is_byte(token):
            total += 1
        elif piece.startswith("\u2581"):
            total += len(piece[1:].encode()) + (not is_boundary(before))
        else:
            total += len(piece.encode())
    return total


@pytest.mark.parametrize("kind", ["own", "bytes"])
def test_own_tokenizers_count_the_utf8_bytes_of_every_document(kind, lossless_model):
    tokenizer = data.load_tokenizer("bytes" if kind == "bytes" else lossless_model)
    for text in HARD_TEXTS:
        ids = tokenizer.encode(text)
        assert prepare.decode_bytes(tokenizer, ids) == text.encode("utf-8"), text
        assert prepare.decode_bytes(tokenizer, ids).decode() == text
        assert counted(tokenizer, ids) == len(text.encode("utf-8")), text


def test_byte_table_equals_sentencepieces_own_decoding(lossless_model, prefix_model):
    for path in (lossless_model, prefix_model):
        tokenizer = data.load_tokenizer(path)
        processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
        for text in HARD_TEXTS:
            ids = processor.encode(text)
            assert counted(tokenizer, ids) == len(processor.decode(ids).encode("utf-8")), (
                path.name,
                text,
            )
    text = "the cat \u2581 sat"  # the one character no SentencePiece model gives back
    tokenizer = data.load_tokenizer(lossless_model)
    assert prepare.decode_bytes(tokenizer, tokenizer.encode(text)) == b"the cat   sat"


def test_table_flags_of_a_dummy_prefix_model(prefix_model, lossless_model):
    tokenizer, processor = (
        data.load_tokenizer(prefix_model),
        sentencepiece.SentencePieceProcessor(str(prefix_model)),
    )
    starts = [processor.id_to_piece(i).startswith("\u2581") for i in range(400)]
    assert tokenizer.drops_space.tolist() == starts and sum(starts) > 5
    assert np.flatnonzero(tokenizer.boundary).tolist() == [0, 1, 2, 3]
    assert tokenizer.roles == {} and tokenizer.bos_id == 1 and tokenizer.vocab_size == 400
    byte_ids = [i for i in range(400) if processor.is_byte(i)]
    assert len(byte_ids) == 256 and (tokenizer.byte_counts[byte_ids] == 1).all()
    ids = tokenizer.encode("the cat sat on the mat")
    assert counted(tokenizer, ids) == len("the cat sat on the mat")
    # The same tokens after a token that is no boundary keep their first space.
    after = np.array(ids)
    assert (
        int(data.token_bytes(tokenizer, np.concatenate([[ids[0]], after[:-1]]), after).sum()) == 23
    )
    own = data.load_tokenizer(lossless_model)
    assert not own.drops_space.any()
    assert own.roles == {role: 4 + i for i, role in enumerate(prepare.ROLE_TOKENS)}
    assert np.flatnonzero(own.boundary).tolist() == list(range(8))


def test_role_tokens_that_a_text_can_write_are_no_roles(tmp_path):
    symbols = ["\n", *prepare.ROLE_TOKENS]
    tokenizer = data.load_tokenizer(
        train_model(tmp_path / "m", control_symbols=[], user_defined_symbols=symbols)
    )
    assert tokenizer.roles == {} and b"<|user|>" in tokenizer.pieces


GPT2 = SHARED / "tokenizers" / "gpt2"


def gpt2_ranks():
    return tiktoken.load.data_gym_to_mergeable_bpe_ranks(
        str(GPT2 / "vocab.bpe"), str(GPT2 / "encoder.json")
    )


def gpt2_file(folder):
    """GPT-2's rank file, from its encoder.json and vocab.bpe."""
    ranks = sorted(gpt2_ranks().items(), key=lambda item: item[1])
    lines = [base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks]
    (folder / "gpt2.tiktoken").write_bytes(b"".join(lines))
    return folder / "gpt2.tiktoken"


@needs_shared
def test_gpt2_from_its_rank_file_is_tiktokens(tmp_path):
    (tmp_path / "given").mkdir()
    tokenizer = data.load_tokenizer(gpt2_file(tmp_path / "given"))
    again = data.load_tokenizer(tmp_path / prepare.save_tokenizer(tokenizer, tmp_path))
    # The SHA-256 that tiktoken pins for r50k_base.tiktoken: the file written is the published one.
    expected = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
    assert hashlib.sha256((tmp_path / "gpt2.tiktoken").read_bytes()).hexdigest() == expected
    reference = tiktoken.Encoding(
        "gpt2",
        pat_str=tiktoken_ext.openai_public.r50k_pat_str,
        mergeable_ranks=gpt2_ranks(),
        special_tokens={"<|endoftext|>": 50256},
    )
    for one in (tokenizer, again):
        assert (one.sha256, one.vocab_size, one.bos_id, one.roles) == (expected, 50257, 50256, {})
        assert one.pieces[:50256] == [reference.decode_single_token_bytes(i) for i in range(50256)]
        assert np.flatnonzero(one.boundary).tolist() == [50256] and not one.drops_space.any()
        assert one.byte_counts.tolist() == [len(piece) for piece in one.pieces]
        assert one.file == "gpt2.tiktoken"
    for text in [*HARD_TEXTS, "a<|endoftext|>b"]:
        ids = tokenizer.encode(text)
        assert ids == reference.encode(text, disallowed_special=()) and 50256 not in ids
        assert prepare.decode_bytes(tokenizer, ids) == text.encode("utf-8")
        assert counted(tokenizer, ids) == len(text.encode())
    assert tokenizer.encode("hello world") == [31373, 995]


FAKE_PIECES = [bytes([byte]) for byte in range(256)] + [b"th", b"the"]
FAKE_RANKS = b"".join(
    base64.b64encode(piece) + b" %d\n" % rank for rank, piece in enumerate(FAKE_PIECES)
)


def fake_encoding(monkeypatch, script, folder, end_of_text=300):
    """A rank file in `folder` that has 258 ranks and is what the script takes for the published cl100k_base."""
    sha256 = hashlib.sha256(FAKE_RANKS).hexdigest()
    published = script.PublishedEncoding(
        sha256, script.ENCODINGS["cl100k_base"].split, end_of_text, end_of_text + 3
    )
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
    assert list(data.ENCODINGS) == ["gpt2", "cl100k_base", "o200k_base"]
    for name, found in data.ENCODINGS.items():
        name = name.replace("gpt2", "r50k_base")  # the same under its later name, with a rank file
        expected = getattr(public, name)()
        special = expected["special_tokens"]
        size = expected.get("explicit_n_vocab", max(special.values()) + 1)
        assert found.split == expected["pat_str"] and found.end_of_text == special["<|endoftext|>"]
        assert found.vocab_size == size
        assert expected["mergeable_ranks"] == (f"{data.RANK_FILES}/{name}.tiktoken", found.sha256)


def test_any_encoding_comes_from_its_rank_file_and_no_other(tmp_path, monkeypatch):
    path = fake_encoding(monkeypatch, data, tmp_path)
    tokenizer = data.load_tokenizer(path)
    sha256 = hashlib.sha256(FAKE_RANKS).hexdigest()
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.sha256) == (303, 300, sha256)
    assert np.flatnonzero(tokenizer.boundary).tolist() == list(
        range(258, 303)
    )  # gaps and specials: no bytes
    assert tokenizer.encode("the<|endoftext|>") == [257, *b"<|endoftext|>"]
    assert (
        prepare.save_tokenizer(tokenizer, tmp_path) == path.name and path.read_bytes() == FAKE_RANKS
    )
    (tmp_path / "b").mkdir()
    refused = [
        (
            tmp_path / "p50k.tiktoken",
            r"No such file .*, or NAME or NAME\.tiktoken of \['gpt2', 'cl100k",
        ),
        (tmp_path / "b", r"b: \[Errno 21\] Is a directory: .*; must be a SentencePiece model "),
        (
            tmp_path / "b" / "cl100k_base.tiktoken",
            r"cl100k_base\.tiktoken: \[Errno 2\] No such file",
        ),
    ]
    damaged = {
        "longer": FAKE_RANKS + b"eA== 258\n",
        "shorter": FAKE_RANKS[:-9],
        "changed": FAKE_RANKS.replace(b"1", b"2", 1),
    }
    for name, content in damaged.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / path.name).write_bytes(content)
        refused.append((tmp_path / name / path.name, f"Hash mismatch .*expected {sha256}"))
    for wrong, message in refused:
        with pytest.raises(data.UserError, match=message) as caught:
            data.load_tokenizer(wrong)
        assert "\n" not in str(caught.value)


def test_an_encoding_by_its_name_comes_from_tiktokens_cache_or_server(tmp_path, monkeypatch):
    """The server is not there; the cache is tiktoken's own, by the SHA-1 of the address."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(data, "RANK_FILES", "http://127.0.0.1:9")
    fake_encoding(monkeypatch, data, tmp_path)
    with pytest.raises(
        data.UserError,
        match=r"^tokenizer cl100k_base: .*127.0.0.1.*; must be .* NAME\.tiktoken of ",
    ):
        data.load_tokenizer("cl100k_base")
    (tmp_path / hashlib.sha1(b"http://127.0.0.1:9/cl100k_base.tiktoken").hexdigest()).write_bytes(
        FAKE_RANKS
    )
    assert data.load_tokenizer("cl100k_base").content == FAKE_RANKS
    monkeypatch.setitem(
        data.ENCODINGS, "gpt2", data.ENCODINGS["cl100k_base"]
    )  # gpt2 has the ranks of r50k_base
    (tmp_path / hashlib.sha1(b"http://127.0.0.1:9/r50k_base.tiktoken").hexdigest()).write_bytes(
        FAKE_RANKS
    )
    assert data.load_tokenizer("gpt2").file == "gpt2.tiktoken"


def test_saved_tokenizers_come_back_as_they_were(lossless_model, tmp_path):
    one = data.load_tokenizer(lossless_model)
    assert prepare.save_tokenizer(one, tmp_path) == "tokenizer.model"
    assert (tmp_path / "tokenizer.model").read_bytes() == lossless_model.read_bytes()
    assert (
        data.load_tokenizer(tmp_path / "tokenizer.model").sha256
        == one.sha256
        == data.sha256_file(lossless_model)
    )
    assert prepare.save_tokenizer(data.load_tokenizer("bytes"), tmp_path / "nowhere") == "bytes"
    assert (
        data.load_tokenizer(tmp_path / "bytes").sha256
        == hashlib.sha256(b"underpar bytes 264").hexdigest()
    )


def test_byte_tokenizer_layout():
    tokenizer = data.load_tokenizer("bytes")
    assert tokenizer.vocab_size == 264 and tokenizer.bos_id == 1
    assert tokenizer.encode("A\xff") == [69, 199, 195]
    assert tokenizer.roles == {
        "<|system|>": 260,
        "<|user|>": 261,
        "<|assistant|>": 262,
        "<|end|>": 263,
    }
    assert tokenizer.byte_counts.tolist() == [0] * 4 + [1] * 256 + [0] * 4
    assert prepare.decode_bytes(tokenizer, [199, 1, 69]) == b"\xc3A"


@needs_shared
@pytest.mark.parametrize(("size", "expected"), [(1024, 2.3985), (4096, 3.2802), (8192, 3.6921)])
def test_bytes_per_token_of_the_published_models(size, expected):
    path = SHARED / "tokenizers" / f"fineweb_{size}_bpe.model"
    tokenizer, processor = (
        data.load_tokenizer(path),
        sentencepiece.SentencePieceProcessor(model_file=str(path)),
    )
    raw = zstandard.ZstdDecompressor().decompress(
        (SHARED / "val" / "fineweb-first300.jsonl.zst").read_bytes()
    )
    documents = [json.loads(line)["text"] for line in raw.decode("utf-8").split("\n") if line]
    assert len(documents) == 50
    total, tokens, stream = 0, 0, []
    for text in documents:
        ids = tokenizer.encode(text)
        total += counted(tokenizer, ids)
        tokens += len(ids)
        stream += [1, *ids]
        assert counted(tokenizer, ids) == len(processor.decode(ids).encode("utf-8"))
    assert abs(total / tokens - expected) < 0.0005 * expected
    whole = np.array(stream)
    assert int(data.token_bytes(tokenizer, np.concatenate([[1], whole[:-1]]), whole).sum()) == total
    assert canonical_bytes(processor, [1, *stream[:-1]], stream) == total


def test_tokenizer_errors(tmp_path):
    (tmp_path / "bad.model").write_bytes(b"no model at all")
    for name, fault in (("none.model", "No such file"), ("bad.model", "(?i:internal)")):
        message = rf"^tokenizer .*{name}: .*{fault}.*; must be a SentencePiece model .* NAME\.tiktoken of \["
        with pytest.raises(data.UserError, match=message) as caught:
            data.load_tokenizer(tmp_path / name)
        assert "\n" not in str(caught.value)
    (tmp_path / "empty.model").touch()
    for path in (tmp_path / "empty.model", train_model(tmp_path / "nobos.model", bos_id=-1)):
        with pytest.raises(data.UserError, match=rf"{path.name}: empty, or without the BOS token"):
            data.load_tokenizer(path)


def test_shard_bytes_and_round_trip(tmp_path):
    path = tmp_path / "a.bin"
    write_shard(path, np.array([1, 2, 65535]))
    raw = path.read_bytes()
    assert len(raw) == 1024 + 6
    assert np.frombuffer(raw[:1024], "<i4")[:4].tolist() == [20240520, 1, 3, 0]
    assert raw[1024:] == b"\x01\x00\x02\x00\xff\xff"
    tokens = data.read_shard(path)
    assert (
        isinstance(tokens, np.memmap)
        and tokens.dtype == np.uint16
        and tokens.tolist() == [1, 2, 65535]
    )
    for bad in ([-1], [65536]):
        with pytest.raises(prepare.UserError, match="do not fit uint16"):
            write_shard(path, np.array(bad))


def test_large_vocabularies_take_llm_c_uint32_shards(tmp_path):
    path = tmp_path / "a.bin"
    write_shard(path, np.array([1, 65536, 199999]), vocab_size=200019)
    raw = path.read_bytes()
    assert np.frombuffer(raw[:1024], "<i4")[:4].tolist() == [20240801, 7, 3, 0]
    assert raw[1024:] == b"\x01\x00\x00\x00\x00\x00\x01\x00\x3f\x0d\x03\x00"
    tokens = data.read_shard(path)
    assert (
        isinstance(tokens, np.memmap)
        and tokens.dtype == np.uint32
        and tokens.tolist() == [1, 65536, 199999]
    )
    assert data.TokenStream([path], 200019).read(1, 3).tolist() == [65536, 199999, 1]
    path.write_bytes(raw[:-2])
    with pytest.raises(data.UserError, match=r"a\.bin: truncated or damaged, or no shard"):
        data.read_shard(path)
    for bad in ([-1], [1 << 32]):
        with pytest.raises(prepare.UserError, match="do not fit uint32"):
            write_shard(path, np.array(bad), 65537)
    write_shard(path, np.array([65535]), 65536)
    assert path.stat().st_size == 1026  # 65,536 tokens still fit uint16


def test_shard_errors_name_the_file(tmp_path):
    path = tmp_path / "a.bin"
    write_shard(path, np.arange(10))
    raw = path.read_bytes()
    magic, version, empty = (np.frombuffer(raw[:1024], "<i4").copy() for _ in range(3))
    magic[0], version[1], empty[2] = 7, 2, 0
    for content in (
        raw[:-1],
        raw + b"x",
        raw[:1024],
        raw[:12],
        raw[:8],
        raw[:7],
        b"",
        empty.tobytes() + b"xx",
        magic.tobytes() + raw[1024:],
        version.tobytes() + raw[1024:],
    ):
        path.write_bytes(content)
        with pytest.raises(
            data.UserError, match=r"a\.bin: truncated or damaged, or no shard of llm\.c's formats$"
        ):
            data.read_shard(path)
    with pytest.raises(data.UserError, match=r"none\.bin: no such file"):
        data.read_shard(tmp_path / "none.bin")


def make_dataset(folder):
    """A whole small data folder of the byte tokenizer with its manifest."""
    tokenizer = data.load_tokenizer("bytes")
    manifest = {
        "format": 1,
        "name": "x",
        "published": False,
        "overlap_documents": 0,
        "lossless": True,
        "tokenizer": {"file": "bytes", "sha256": tokenizer.sha256, "vocab_size": 264, "bos_id": 1},
    }
    for split in ("train", "val"):
        file = f"x_{split}_000000.bin"
        write_shard(folder / file, np.array([1, *tokenizer.encode(f"the {split} text")]))
        count = len(f"the {split} text") + 1
        sha256 = hashlib.sha256((folder / file).read_bytes()).hexdigest()
        manifest[split] = {
            "shards": [{"file": file, "tokens": count, "sha256": sha256}],
            "tokens": count,
        }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return manifest


def test_check_dataset(tmp_path):
    make_dataset(tmp_path)
    tokenizer, manifest = data.load_tokenizer("bytes"), data.load_manifest(tmp_path)
    for split, stream in zip(
        ("train", "val"), data.check_dataset(tmp_path, tokenizer, manifest), strict=True
    ):
        assert stream.paths == [tmp_path / f"x_{split}_000000.bin"] and stream.vocab_size == 264
        assert (
            prepare.decode_bytes(tokenizer, stream.read(1, len(stream) - 1)).decode()
            == f"the {split} text"
        )

    def refuses(message, **changes):
        with pytest.raises(data.UserError, match=message):
            data.check_dataset(tmp_path, tokenizer, manifest | changes)

    refuses("manifest.json: shards of another tokenizer", tokenizer={"sha256": "0" * 64})
    refuses("manifest.json: validation documents also stand in training", overlap_documents=3)
    data.check_dataset(tmp_path, tokenizer, manifest | {"overlap_documents": 3, "published": True})
    for count in (14, 16):
        refuses(
            "json: has another number of tokens than the shards of train",
            train=manifest["train"] | {"tokens": count},
        )
    for split in ("val", "train"):  # one token changed, sizes as they were
        path = tmp_path / f"x_{split}_000000.bin"
        raw = path.read_bytes()
        path.write_bytes(raw[:-2] + b"\x05\x00")
        if split == "val":
            refuses(f"{path.name}: its SHA-256 is not the manifest")
        else:
            data.check_dataset(tmp_path, tokenizer, manifest)
        write_shard(path, data.read_shard(path)[:-1].copy())
        refuses(f"manifest.json: has another number of tokens than the shards of {split}")
        path.write_bytes(raw[:-2])
        refuses(f"{path.name}: truncated or damaged")
        path.unlink()
        refuses(f"{path.name}: no such file")
        path.write_bytes(raw)


def test_manifest_errors(tmp_path):
    with pytest.raises(
        data.UserError, match=r"data/prepare.py makes one, data/download.py --manifest too"
    ):
        data.load_manifest(tmp_path)
    for content in ("{", "{}", '{"format": 2}'):
        (tmp_path / "manifest.json").write_text(content)
        with pytest.raises(data.UserError, match=r"manifest.json: no manifest of format 1; "):
            data.load_manifest(tmp_path)


def test_token_stream_is_the_concatenation_read_round(tmp_path):
    rng, paths, flat = np.random.default_rng(0), [], []
    for i, size in enumerate((5, 1, 12, 7)):
        paths.append(tmp_path / f"{i}.bin")
        flat.append(rng.integers(0, 300, size))
        write_shard(paths[-1], flat[-1])
    flat = np.concatenate(flat)
    stream = data.TokenStream(paths, 1 << 16)
    assert len(stream) == len(flat) == 25
    for start in range(40):
        for count in (1, 4, 13, 60):
            out = stream.read(start, count)
            assert out.dtype == np.int64
            assert out.tolist() == [flat[(start + i) % 25] for i in range(count)]


def test_token_stream_names_the_shard_of_a_foreign_token(tmp_path):
    for name, tokens in (("a", [1, 2, 263]), ("b", [4, 5, 264, 6])):
        write_shard(tmp_path / f"{name}.bin", np.array(tokens))
    stream = data.TokenStream([tmp_path / "a.bin", tmp_path / "b.bin"], vocab_size=264)
    assert stream.read(0, 5).tolist() == [1, 2, 263, 4, 5]
    with pytest.raises(data.UserError, match=r"b\.bin: .* or has a wrong token id$"):
        stream.read(4, 3)


@pytest.mark.parametrize("change", ["shrunk", "rewritten", "touched", "replaced", "removed"])
def test_token_stream_refuses_a_shard_that_changes(change, tmp_path):
    """What has been mapped is read on from the file as it is now: cut short, it would kill the process (SIGBUS)."""
    paths = [tmp_path / f"{i}.bin" for i in range(2)]
    for path in paths:
        write_shard(path, np.arange(10_000))
        os.utime(path, ns=(1, 1))
    stream, raw = data.TokenStream(paths, 1 << 16), paths[1].read_bytes()
    assert stream.read(9_998, 4).tolist() == [9_998, 9_999, 0, 1]
    if change == "shrunk":
        os.truncate(paths[1], 2000)
    elif change == "rewritten":
        paths[1].write_bytes(raw[:-2] + b"\1\0")
    elif change == "touched":
        os.utime(paths[1], ns=(1, 2))
    elif change == "replaced":
        (tmp_path / "new").write_bytes(raw)
        os.replace(tmp_path / "new", paths[1])
    else:
        paths[1].unlink()
    assert stream.read(0, 10_000).tolist() == list(range(10_000))  # the other shard is whole
    error, message = data.UserError, rf"^shard {paths[1]}: was changed while in use, or "
    if change == "removed":
        error, message = FileNotFoundError, str(paths[1])
    for start, count in ((9_999, 2), (12_000, 1), (19_999, 5)):
        with pytest.raises(error, match=message):
            stream.read(start, count)


def reference_hashes(tokens, bos_id):
    """The SHA-256 of each document's tokens as 64-bit integers."""
    documents = []
    for token in tokens:
        documents += [[]] if token == bos_id else []
        documents[-1].append(token)
    return [
        hashlib.sha256(b"".join(t.to_bytes(8, "little") for t in one)).digest() for one in documents
    ]


def test_document_hashes_across_shards(tmp_path):
    rng = np.random.default_rng(0)
    tokens = np.concatenate(
        [np.append(1, rng.integers(2, 300, size)) for size in (0, 3, 0, 50, 7, 1, 120, 0, 4)]
    )
    tokens = np.concatenate([tokens, tokens[:5], [1, 0], [1, 0, 0], [1]])
    expected = reference_hashes(tokens.tolist(), 1)
    assert len(set(expected)) == len(expected) - 5  # [1] five times, and one more twice
    for i, part in enumerate(np.array_split(tokens, 3)):
        write_shard(tmp_path / f"{i}.bin", part)
    stream = data.TokenStream(sorted(tmp_path.glob("*.bin")), 300)
    assert list(data.document_hashes(stream, 1)) == expected
    for start in (
        1,
        2,
        7,
    ):  # begun inside a document: its head belongs to none, the last document counts
        write_shard(tmp_path / "headless", tokens[start:])
        begun = int(np.flatnonzero(tokens[start:] == 1)[0]) + start
        headless = data.TokenStream([tmp_path / "headless"], 300)
        assert list(data.document_hashes(headless, 1)) == reference_hashes(
            tokens[begun:].tolist(), 1
        )


def make_part(folder, train, val, tail="", **changes):
    """A data folder of the byte tokenizer whose documents are the given texts."""
    folder.mkdir()
    tokenizer = data.load_tokenizer("bytes")
    manifest = {
        "format": 1,
        "name": folder.name + "_name",
        "published": False,
        "overlap_documents": 0,
        "tokenizer": {"file": "bytes", "sha256": tokenizer.sha256},
    }
    for split, texts in (("train", train), ("val", val)):
        file, tokens = (
            folder / f"x_{split}_000000.bin",
            [t for text in texts for t in (1, *tokenizer.encode(text))],
        )
        write_shard(file, np.array(tokens))
        manifest[split] = {
            "shards": [
                {"file": file.name, "tokens": len(tokens), "sha256": data.sha256_file(file)}
            ],
            "tokens": len(tokens),
            "documents": len(texts),
            "decoded_bytes": sum(len(text.encode()) for text in texts),
        }
    (folder / "manifest.json").write_text(json.dumps(manifest | changes))
    return folder


def opened(path, **changes):
    changes = {"train_seq_len": 4, "holdout_tokens": 10, **changes}
    return data.open_data(data.Settings(data_path=str(path), **changes))


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


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a:x",
        "a:0.5,b",
        "a,b",
        "a:0",
        "a:1,b:0.0",
        "a:-1,b:2",
        "a:1.2.3",
        ":1",
        "a:1,",
        "a:nan",
        "a:inf,b:1",
    ],
)
def test_mixtures_that_are_none_are_one_line(text):
    with pytest.raises(data.UserError, match="^DATA_PATH=.*: must be a folder or FOLDER:WEIGHT"):
        opened(text)


def test_a_wrong_count_of_validation_bytes_is_refused(tmp_path):
    a, b = (
        make_part(tmp_path / name, [f"text of {name}"] * 9, [f"five {name}", "two"])
        for name in "ab"
    )
    assert len(opened(a).val) == 11 and len(opened(f"{a}:1,{b}:1").val) == 22  # 9 and 18 bytes
    stored = json.loads((a / "manifest.json").read_text())
    for count in (8, 10, 0):
        stored["val"]["decoded_bytes"] = count
        (a / "manifest.json").write_text(json.dumps(stored))
        for parts, found, expected in ((a, 9, count), (f"{a}:1,{b}:1", 18, count + 9)):
            with pytest.raises(
                data.UserError, match=f"^validation: {found} bytes, manifest.json says {expected}$"
            ):
                opened(parts)


def test_validation_bytes_leave_out_the_dummy_prefix_after_a_boundary_only(tmp_path, prefix_model):
    part, tokenizer = (
        make_part(tmp_path / "p", ["text"] * 9, ["text"]),
        data.load_tokenizer(prefix_model),
    )
    manifest = json.loads((part / "manifest.json").read_text())
    manifest["tokenizer"] = {"file": str(prefix_model), "sha256": tokenizer.sha256}
    for split, texts in (("train", ["the cat sat"] * 9), ("val", ["the cat", "sat on the mat"])):
        file, tokens = (
            part / f"x_{split}_000000.bin",
            [t for text in texts for t in (1, *tokenizer.encode(text))],
        )
        write_shard(file, np.array(tokens))
        manifest[split] |= {"tokens": len(tokens), "decoded_bytes": sum(map(len, texts))}
        manifest[split]["shards"] = [
            {"file": file.name, "tokens": len(tokens), "sha256": data.sha256_file(file)}
        ]
    (part / "manifest.json").write_text(json.dumps(manifest))
    assert opened(part).tokenizer.sha256 == tokenizer.sha256


def test_validation_that_begins_inside_a_document_is_refused(tmp_path):
    """Nothing scores the first token, whose bytes the manifest counts."""
    part = make_part(tmp_path / "a", ["training text"] * 9, ["one two", "three"])
    stored = json.loads((part / "manifest.json").read_text())
    write_shard(part / "x_val_000000.bin", data.read_shard(part / "x_val_000000.bin")[1:].copy())
    stored["val"]["shards"][0] |= {
        "tokens": 13,
        "sha256": data.sha256_file(part / "x_val_000000.bin"),
    }
    (part / "manifest.json").write_text(
        json.dumps(stored | {"val": stored["val"] | {"tokens": 13}})
    )
    with pytest.raises(data.UserError, match=r"^validation: 11 bytes, manifest.json says 12$"):
        opened(part)


def tokens_of(part, split):
    return np.fromfile(part / f"x_{split}_000000.bin", "<u2", offset=1024).tolist()


def test_open_data_of_one_folder(tmp_path):
    part = make_part(tmp_path / "p", ["training text"] * 3, ["one", "twö", "three"])
    found = opened(part)
    tokens = [
        t for text in ("one", "twö", "three") for t in (1, *(byte + 4 for byte in text.encode()))
    ]
    assert found.val.tolist() == tokens == tokens_of(part, "val") and found.val.dtype == np.int64
    assert (
        found.manifests == [json.loads((part / "manifest.json").read_text())]
        and found.yardsticks == {}
    )
    assert (
        found.manifest_sha256 == hashlib.sha256((part / "manifest.json").read_bytes()).hexdigest()
    )
    (stream,) = found.streams
    assert found.shares == [1.0] and len(stream) == 42
    # Ten windows of four; HOLDOUT_TOKENS=10 takes three of them.
    whole = tokens_of(part, "train")
    held_out = sorted(set(range(10)) - set(stream.windows.tolist()))
    assert len(held_out) == 3 and len(stream.windows) == 7
    windows = sorted(found.held_out.reshape(3, 4).tolist())
    assert windows == sorted(whole[4 * window : 4 * window + 4] for window in held_out)
    measured = opened(
        make_part(tmp_path / "m", ["training text"] * 3, ["one", "two"], yardsticks={"xz_bpb": 2.5})
    )
    assert measured.yardsticks == {"xz_bpb": 2.5}
    assert (
        len(opened(part, holdout_tokens=1).held_out) == 4
        and len(opened(part, holdout_tokens=36).held_out) == 36
    )
    for changes in (dict(holdout_tokens=37), dict(train_seq_len=22), dict(train_seq_len=43)):
        with pytest.raises(
            data.UserError,
            match="^HOLDOUT_TOKENS=.*: must leave a window .* the 42 training tokens$",
        ):
            opened(part, **changes)
    with pytest.raises(data.UserError, match=r"^VOCAB_SIZE=7: must be 0 or 264, the tokenizer's$"):
        opened(part, vocab_size=7)


def test_open_data_of_a_mixture(tmp_path):
    a = make_part(tmp_path / "a", ["training text"] * 9, ["one", "two"], yardsticks={"xz_bpb": 2.5})
    b = make_part(
        tmp_path / "b", ["other text"] * 9, ["four", "fünf"], overlap_documents=2, published=True
    )
    found = opened(f"{a}:3,{b}:1", holdout_tokens=40)
    # 31 and 24 windows of four, of which eight and three are held out.
    assert [len(stream.windows) for stream in found.streams] == [
        31 - 8,
        24 - 3,
    ] and found.shares == [0.75, 0.25]
    assert (
        found.val.tolist() == tokens_of(a, "val") + tokens_of(b, "val") and found.yardsticks == {}
    )
    assert found.manifests == [json.loads((part / "manifest.json").read_text()) for part in (a, b)]
    hashes = [hashlib.sha256((part / "manifest.json").read_bytes()).hexdigest() for part in (a, b)]
    assert found.manifest_sha256 == " + ".join(hashes)
    windows = found.held_out.reshape(11, 4).tolist()
    for part, held_out in ((a, windows[:8]), (b, windows[8:])):
        whole = tokens_of(part, "train")
        assert all(
            window in [whole[at : at + 4] for at in range(0, len(whole), 4)] for window in held_out
        )
    other = make_part(
        tmp_path / "c", ["x" * 30], ["y"], tokenizer={"file": "t.model", "sha256": "0" * 64}
    )
    with pytest.raises(data.UserError, match=r"/c/manifest.json: shards of another tokenizer"):
        opened(f"{a}:1,{other}:1")


def test_validation_of_one_part_in_the_training_of_another_is_refused(tmp_path):
    val = ["kept apart", "in the other", "kept too", "in the other", "at the end"]
    a = make_part(tmp_path / "a", ["training text"] * 9, val)
    b = make_part(
        tmp_path / "b",
        ["other text"] * 9 + ["in the other", "kept apart, nearly", "at the end"],
        ["five"],
        published=True,
    )
    c = make_part(tmp_path / "c", ["yet another text", "kept apar", "tkept apart"] * 5, ["a val"])
    for parts in (f"{a}:1,{b}:2", f"{b}:1,{c}:1,{a}:1"):
        message = f"^{b}/x_train_000000.bin: a document is in another folder's validation$"
        with pytest.raises(data.UserError, match=message):
            opened(parts)
    nearly_equal = opened(f"{a}:1,{c}:1")
    assert len(nearly_equal.val) == sum(len(text) + 1 for text in val) + 6
    assert len(opened(b).val) == 5  # one part alone: its own manifest counts
