"""The data section: byte accounting, shards, manifest checks, the token stream."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import zstandard

import train_gpt as data

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
needs_shared = pytest.mark.skipif(not (SHARED / "tokenizers").is_dir(), reason="needs ../shared/data")

HARD_TEXTS = [
    "plain words, one line",
    " leads with a space", "  leads with two", "ends with spaces  ",
    "runs   of    spaces     inside\n\n\n    indented\n\t\ttabs\tand\ttabs \t mixed",
    "windows\r\nline\r\nends\r\rand\rbare returns\r\n",
    "ümläuts, Привет, 日本語のテキスト, العربية, ไทย, é as e\u0301",
    "emoji \U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 and flags \U0001f1e9\U0001f1ea",
    "private use \ue000\uf8ff\U000f0000, zero width \u200b\ufeff, nbsp\u00a0, ideographic\u3000space",
    "ligature ﬁ, fullwidth ＡＢ, superscript ², control \x01\x7f, line sep \u2028",
    "role text <|user|> hello <|end|> is plain text here",
    "<0x41> written out, <s> and </s> and <unk> too",
    "\n", "\t", " ", "x",
]


def train_model(path: Path, **changes: object) -> Path:
    """A small SentencePiece model; the defaults are those of data/prepare.py."""
    options = {"model_type": "bpe", "vocab_size": 400, "byte_fallback": True, "normalization_rule_name": "identity",
               "add_dummy_prefix": False, "remove_extra_whitespaces": False, "allow_whitespace_only_pieces": True,
               "user_defined_symbols": ["\n"], "control_symbols": list(data.ROLE_TOKENS), "pad_id": 0, "bos_id": 1,
               "eos_id": 2, "unk_id": 3, "minloglevel": 2, "num_threads": 1}
    model = io.BytesIO()
    lines = [line for text in HARD_TEXTS for line in text.split("\n")] * 3 + ["the cat sat on the mat  and  the hat"]
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=model, **(options | changes))
    path.write_bytes(model.getvalue())
    return path


@pytest.fixture(scope="module")
def lossless_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_model(tmp_path_factory.mktemp("model") / "own.model")


@pytest.fixture(scope="module")
def prefix_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As the published FineWeb models: dummy prefix, NFKC, white space collapsed."""
    return train_model(tmp_path_factory.mktemp("model") / "prefix.model", normalization_rule_name="nmt_nfkc",
                       add_dummy_prefix=True, remove_extra_whitespaces=True, allow_whitespace_only_pieces=False,
                       user_defined_symbols=[], control_symbols=[])


def counted(tokenizer: object, ids: list[int]) -> int:
    """The byte table's sum for one document after BOS."""
    ids = np.array(ids, dtype=np.int64)
    return int(data.token_bytes(tokenizer, np.concatenate([[tokenizer.bos_id], ids])[:-1], ids).sum())


def canonical_bytes(processor: sentencepiece.SentencePieceProcessor, prev: list[int], ids: list[int]) -> int:
    """Parameter Golf's rule, written out: marker stripped, byte tokens 1, one more unless a boundary stands before."""
    total = 0
    for before, token in zip(prev, ids, strict=True):
        def is_boundary(t: int) -> bool:
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
def test_own_tokenizers_count_the_utf8_bytes_of_every_document(kind: str, lossless_model: Path) -> None:
    tokenizer = data.load_tokenizer("bytes" if kind == "bytes" else lossless_model)
    for text in HARD_TEXTS:
        ids = tokenizer.encode(text)
        assert tokenizer.decode_bytes(ids) == text.encode("utf-8"), text
        assert tokenizer.decode(ids) == text
        assert counted(tokenizer, ids) == len(text.encode("utf-8")), text


def test_byte_table_equals_sentencepieces_own_decoding(lossless_model: Path, prefix_model: Path) -> None:
    for path in (lossless_model, prefix_model):
        tokenizer = data.load_tokenizer(path)
        processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
        for text in HARD_TEXTS:
            ids = processor.encode(text)
            assert counted(tokenizer, ids) == len(processor.decode(ids).encode("utf-8")), (path.name, text)
    text = "the cat \u2581 sat"  # the one character no SentencePiece model gives back
    tokenizer = data.load_tokenizer(lossless_model)
    assert tokenizer.decode(tokenizer.encode(text)) == "the cat   sat"


def test_table_flags_of_a_dummy_prefix_model(prefix_model: Path, lossless_model: Path) -> None:
    tokenizer, processor = data.load_tokenizer(prefix_model), sentencepiece.SentencePieceProcessor(str(prefix_model))
    starts = [processor.id_to_piece(i).startswith("\u2581") for i in range(400)]
    assert tokenizer.drops_space.tolist() == starts and sum(starts) > 5
    assert np.flatnonzero(tokenizer.boundary).tolist() == [0, 1, 2, 3]
    assert tokenizer.special_ids == {} and tokenizer.bos_id == 1 and tokenizer.vocab_size == 400
    byte_ids = [i for i in range(400) if processor.is_byte(i)]
    assert len(byte_ids) == 256 and (tokenizer.byte_counts[byte_ids] == 1).all()
    ids = tokenizer.encode("the cat sat on the mat")
    assert counted(tokenizer, ids) == len("the cat sat on the mat")
    # The same tokens after a token that is no boundary keep their first space.
    after = np.array(ids)
    assert int(data.token_bytes(tokenizer, np.concatenate([[ids[0]], after[:-1]]), after).sum()) == 23
    own = data.load_tokenizer(lossless_model)
    assert not own.drops_space.any()
    assert own.special_ids == {role: 4 + i for i, role in enumerate(data.ROLE_TOKENS)}
    assert np.flatnonzero(own.boundary).tolist() == list(range(8))


def test_byte_tokenizer_layout() -> None:
    tokenizer = data.load_tokenizer("bytes")
    assert tokenizer.vocab_size == 264 and tokenizer.bos_id == 1
    assert tokenizer.encode("A\xff") == [69, 199, 195]
    assert tokenizer.special_ids == {"<|system|>": 260, "<|user|>": 261, "<|assistant|>": 262, "<|end|>": 263}
    assert tokenizer.byte_counts.tolist() == [0] * 4 + [1] * 256 + [0] * 4
    assert tokenizer.decode([199]) == "\ufffd" and tokenizer.decode_bytes([199, 1, 69]) == b"\xc3A"


@needs_shared
@pytest.mark.parametrize(("size", "expected"), [(1024, 2.3985), (4096, 3.2802), (8192, 3.6921)])
def test_bytes_per_token_of_the_published_models(size: int, expected: float) -> None:
    path = SHARED / "tokenizers" / f"fineweb_{size}_bpe.model"
    tokenizer, processor = data.load_tokenizer(path), sentencepiece.SentencePieceProcessor(model_file=str(path))
    raw = zstandard.ZstdDecompressor().decompress((SHARED / "val" / "fineweb-first300.jsonl.zst").read_bytes())
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


def test_tokenizer_errors(tmp_path: Path) -> None:
    with pytest.raises(data.UserError, match=r"none\.model: no such file; name a SentencePiece"):
        data.load_tokenizer(tmp_path / "none.model")
    (tmp_path / "bad.model").write_bytes(b"no model at all")
    with pytest.raises(data.UserError, match=r"bad\.model: not a SentencePiece model \(15 bytes\)"):
        data.load_tokenizer(tmp_path / "bad.model")
    with pytest.raises(data.UserError, match="has no BOS token"):
        data.load_tokenizer(train_model(tmp_path / "nobos.model", bos_id=-1))


def test_shard_bytes_and_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    data.write_shard(path, np.array([1, 2, 65535]))
    raw = path.read_bytes()
    assert len(raw) == 1024 + 6
    assert np.frombuffer(raw[:1024], "<i4")[:4].tolist() == [20240520, 1, 3, 0]
    assert raw[1024:] == b"\x01\x00\x02\x00\xff\xff"
    tokens = data.read_shard(path)
    assert isinstance(tokens, np.memmap) and tokens.dtype == np.uint16 and tokens.tolist() == [1, 2, 65535]
    for bad in ([-1], [65536]):
        with pytest.raises(data.UserError, match="do not fit uint16"):
            data.write_shard(path, np.array(bad))


def test_shard_errors_name_file_found_and_expected(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    data.write_shard(path, np.arange(10))
    raw = path.read_bytes()
    magic, version, empty = (np.frombuffer(raw[:1024], "<i4").copy() for _ in range(3))
    magic[0], version[1], empty[2] = 7, 2, 0
    cases = [(raw[:-1], r"a\.bin: truncated: 1043 bytes, its header of 10 tokens means 1044"),
             (raw + b"x", r"wrong size: 1045 bytes, .* means 1044"),
             (b"", r"truncated: 0 bytes, its header alone has 1024"),
             (magic.tobytes() + raw[1024:], "magic number 7 and version 1, expected 20240520 and 1"),
             (version.tobytes() + raw[1024:], "magic number 20240520 and version 2, expected"),
             (empty.tobytes(), "header of 0 tokens")]
    for content, message in cases:
        path.write_bytes(content)
        with pytest.raises(data.UserError, match=message):
            data.read_shard(path)
    with pytest.raises(data.UserError, match=r"none\.bin: no such file"):
        data.read_shard(tmp_path / "none.bin")


def make_dataset(folder: Path) -> dict:
    """A whole small data folder of the byte tokenizer with its manifest."""
    tokenizer = data.load_tokenizer("bytes")
    manifest = {"format": 1, "name": "x", "published": False, "overlap_documents": 0, "lossless": True,
                "tokenizer": {"file": "bytes", "sha256": tokenizer.sha256, "vocab_size": 264, "bos_id": 1}}
    for split in ("train", "val"):
        file = f"x_{split}_000000.bin"
        data.write_shard(folder / file, np.array([1, *tokenizer.encode(f"the {split} text")]))
        count = len(f"the {split} text") + 1
        sha256 = hashlib.sha256((folder / file).read_bytes()).hexdigest()
        manifest[split] = {"shards": [{"file": file, "tokens": count, "sha256": sha256}], "tokens": count}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return manifest


def test_check_dataset(tmp_path: Path) -> None:
    make_dataset(tmp_path)
    tokenizer, manifest = data.load_tokenizer("bytes"), data.load_manifest(tmp_path)
    data.check_dataset(tmp_path, tokenizer, manifest, hash_train=True)
    assert data.shard_paths(tmp_path, manifest, "val") == [tmp_path / "x_val_000000.bin"]

    def refuses(message: str, hash_train: bool = False, **changes: object) -> None:
        with pytest.raises(data.UserError, match=message):
            data.check_dataset(tmp_path, tokenizer, manifest | changes, hash_train)

    refuses("shards were written with another tokenizer", tokenizer=manifest["tokenizer"] | {"sha256": "0" * 64})
    refuses("3 validation documents also stand in training", overlap_documents=3)
    data.check_dataset(tmp_path, tokenizer, manifest | {"overlap_documents": 3, "published": True})
    refuses("train has 14 tokens, its shards 15", train=manifest["train"] | {"tokens": 14})
    for wrong in (14, 16):
        entry = manifest["train"]["shards"][0] | {"tokens": wrong}
        refuses(f"train_000000.bin: 15 tokens, .* says {wrong}", train={"shards": [entry], "tokens": wrong})
    val, train = tmp_path / "x_val_000000.bin", tmp_path / "x_train_000000.bin"
    for path in (val, train):  # one token changed, sizes as they were
        raw = path.read_bytes()
        path.write_bytes(raw[:-2] + b"\x05\x00")
        refuses(f"{path.name}: its SHA-256 is not the", hash_train=path is train)
        if path is train:
            data.check_dataset(tmp_path, tokenizer, manifest)
        data.write_shard(path, data.read_shard(path)[:-1].copy())
        refuses(r"tokens, .*manifest.json says", hash_train=True)
        path.write_bytes(raw[:-2])
        refuses(f"{path.name}: truncated")
        path.unlink()
        refuses(f"{path.name}: no such file")
        path.write_bytes(raw)


def test_manifest_errors(tmp_path: Path) -> None:
    with pytest.raises(data.UserError, match=r"python data/download.py --manifest .* --tokenizer PATH"):
        data.load_manifest(tmp_path)
    for content in ("{", "[]", '{"format": 2}'):
        (tmp_path / "manifest.json").write_text(content)
        with pytest.raises(data.UserError, match=r"manifest.json: not a data manifest \(JSON, format 1\)"):
            data.load_manifest(tmp_path)


def test_token_stream_is_the_concatenation_read_round(tmp_path: Path) -> None:
    rng, paths, flat = np.random.default_rng(0), [], []
    for i, size in enumerate((5, 1, 12, 7)):
        paths.append(tmp_path / f"{i}.bin")
        flat.append(rng.integers(0, 300, size))
        data.write_shard(paths[-1], flat[-1])
    flat = np.concatenate(flat)
    for skip_tail in (0, 3, 9):
        stream = data.TokenStream(paths, skip_tail)
        kept = flat[: 25 - skip_tail]
        assert len(stream) == len(kept)
        assert stream.tail().tolist() == flat[25 - skip_tail :].tolist()
        for start in range(40):
            for count in (0, 1, 4, 13, 60):
                out = stream.read(start, count)
                assert out.dtype == np.int64
                assert out.tolist() == [kept[(start + i) % len(kept)] for i in range(count)]
    with pytest.raises(data.UserError, match="4 shards of 25 tokens: more than the held-out 25 are needed"):
        data.TokenStream(paths, 25)


def test_token_stream_names_shard_and_position_of_a_foreign_token(tmp_path: Path) -> None:
    for name, tokens in (("a", [1, 2, 3]), ("b", [4, 5, 264, 6])):
        data.write_shard(tmp_path / f"{name}.bin", np.array(tokens))
    stream = data.TokenStream([tmp_path / "a.bin", tmp_path / "b.bin"], vocab_size=264)
    assert stream.read(0, 5).tolist() == [1, 2, 3, 4, 5]
    with pytest.raises(data.UserError, match=r"b\.bin: token 264 at position 2, expected ids below 264"):
        stream.read(4, 3)
