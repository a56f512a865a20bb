"""Prepare text for training: documents -> tokenizer -> shards and manifest.json.

    python data/prepare.py                              the default: Python's own standard library
    python data/prepare.py input.txt --out data/mine    one document: its tail is the validation
    python data/prepare.py texts/ more.jsonl.zst --out data/mine
    python data/prepare.py train.jsonl --val val.jsonl --tokenizer some.model --out data/mine
    python data/prepare.py --token-bytes data/mine      for shards of an older version; writes token_bytes.bin

A source is a file or a folder. A row is a document: the field `text` (or --field) of a line of .jsonl,
or of .parquet (needs pyarrow). A .json file, or one without extension, has rows if its first line is a
JSON object. A .txt, .md or .py file is one document, and so is another file without extension; but a
.txt file is split where a line begins or ends with <|endoftext|>. All but .parquet may be compressed,
as .gz or .zst. Links are followed. Other files of a folder are passed over and named with the reason:
another kind, not UTF-8, hidden, a broken link, not readable. A file that you name may have any
ending, if it is text.

Exact duplicates are dropped, and near duplicates of the other side: a document of which more than
half is also there. Documents are shuffled over all sources by a seed. OUT gets its files at the end,
so that an interrupted or refused run leaves nothing that counts.
"""

# /// script
# requires-python = ">=3.10"
# dependencies = [
#     'numpy==2.4.6; python_version >= "3.11"',
#     'numpy==2.2.6; python_version < "3.11"',
#     "sentencepiece==0.2.3",
#     "tiktoken==0.14.0",
#     "zstandard==0.25.0",
# ]
# ///

from __future__ import annotations

import argparse
import base64
import codecs
import contextlib
import functools
import gzip
import hashlib
import importlib.util
import io
import itertools
import json
import lzma
import math
import os
import re
import resource
import shutil
import signal
import struct
import sys
import sysconfig
import unicodedata
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import regex
import sentencepiece
import tiktoken
import zstandard
from tiktoken.load import read_file_cached


class UserError(Exception):
    """A mistake of the user's: printed as one line, exit code 2."""


# === shared: files ===
def sha256_file(path):
    """Return the SHA-256 of a file in hexadecimal digits."""
    # Shards and checkpoints are mapped, not read into memory. An empty file cannot be mapped.
    data = np.memmap(path, mode="r") if os.path.getsize(path) else b""
    return hashlib.sha256(data).hexdigest()


def check_json(value, kind, path):
    """Raise UserError unless a value read from JSON has the kind: a type, [kind of all elements] or
    {key: kind}.

    A key that ends in "?" may be missing or null, and other keys than these are not looked at. An
    int is 0 or more, and may stand for a float. path: what the error calls the value.
    """
    expected = kind if isinstance(kind, type) else type(kind)
    is_right = type(value) is expected or (type(value), expected) == (int, float)
    if not is_right or (expected is int and value < 0):
        allowed = "int, 0 or more" if expected is int else expected.__name__
        shown = "missing" if value is None else repr(value)
        raise UserError(f"{path} is {shown:.60}, must be of type {allowed}")
    if isinstance(kind, list):
        for i, part in enumerate(value):
            check_json(part, kind[0], f"{path}[{i}]")
    if isinstance(kind, dict):
        for key, part in kind.items():
            name = key.rstrip("?")
            if key == name or value.get(name) is not None:
                check_json(value.get(name), part, f"{path}.{name}")


# === end: files ===


# === shared: tokenizer ===
@dataclass
class Tokenizer:
    """A tokenizer, from `read_tokenizer`, and the bytes that each token decodes to.

    After a boundary (a control, unknown or unused token) they are without the space that some
    SentencePiece models put before every text.
    """

    file: str  # name of the file that holds the tokenizer; "bytes" needs none
    content: bytes  # of that file; its SHA-256 tells tokenizers apart
    bos_id: int
    pieces: list  # bytes that each token decodes to, b"" for boundaries
    # Of ENCODINGS: sha256, bos_id, vocab_size, split. Every SentencePiece file: stop. An imported model's
    # file (see convert.py) also: ranks or sentencepiece; bos, added, flags, nfc, normalized,
    # begins_with_bos, which encode texts; stop, the ids that end an answer; text_end, that of a text;
    # template, tool_template, names, which render conversations; unused_templates, template_end.
    facts: dict
    drops_space: np.ndarray | bool = False  # (V,) bool, loses its first space after a boundary
    proto: bytes = b""  # the SentencePiece model, if the file has one
    encode: Callable = None  # see set_encoders; this and what follows are of add_encoder
    encode_marked: Callable = None
    roles: dict = None

    def __post_init__(self):
        self.sha256 = hashlib.sha256(self.content).hexdigest()
        self.vocab_size = len(self.pieces)
        self.boundary = np.array([piece == b"" for piece in self.pieces])  # (V,)
        self.drops_space = np.broadcast_to(self.drops_space, self.vocab_size)


def read_tokenizer(path, facts):
    """Return the Tokenizer of a SentencePiece file or a rank file NAME.tiktoken, or the built-in
    one, `bytes`.

    facts: bos_id and vocab_size, which a rank file does not contain. Raises UserError.
    """
    path = Path(path)
    if path.name == "bytes":  # pad, BOS, EOS and unknown, then 256 bytes, then 4 roles
        pieces = [b""] * 4 + [bytes([byte]) for byte in range(256)] + [b""] * 4
        return Tokenizer("bytes", b"underpar bytes 264", 1, pieces, {})
    try:
        content = path.read_bytes()
        if path.suffix == ".tiktoken":
            return rank_tokenizer(path.name, content, facts)
        return sentencepiece_tokenizer("tokenizer.model", content, content, {})
    except (OSError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(
            f"tokenizer {path}: {error}; must be a SentencePiece model with a BOS token, the rank "
            "file NAME.tiktoken of an imported model or of a published encoding (gpt2, cl100k_base, "
            "o200k_base), or bytes"
        ) from error


def rank_tokenizer(file, content, facts):
    """Return the tokenizer of a rank file: a line per piece, in base64, and its id.

    facts: of ENCODINGS. The file of an imported model is JSON with facts of its own: such lines are
    `ranks`, or a SentencePiece model is `sentencepiece`.
    """
    ranks = content
    if content.startswith(b"{"):
        facts = json.loads(content)
        if "sentencepiece" in facts:
            proto = base64.b64decode(facts["sentencepiece"])
            return sentencepiece_tokenizer(file, content, proto, facts)
        ranks = facts["ranks"]
    if not facts:
        raise ValueError("another name than those of published encodings")
    pieces = [b""] * facts["vocab_size"]  # special tokens and unused ids stay b""
    for line in ranks.splitlines():
        piece, rank = line.split()
        pieces[int(rank)] = base64.b64decode(piece)
    return Tokenizer(file, content, facts["bos_id"], pieces, facts)


def sentencepiece_tokenizer(file, content, proto, facts):
    """Return the tokenizer of a file that has a SentencePiece model, whose bytes are `proto`."""
    model = sentencepiece.SentencePieceProcessor(model_proto=proto)
    if model.bos_id() < 0:
        raise ValueError("empty, or without the BOS token of every document")
    pieces = []
    drops_space = []
    for i in range(model.vocab_size()):
        name = model.id_to_piece(i)
        piece = name.replace("\u2581", " ").encode()  # SentencePiece's mark of a space
        if model.is_byte(i):
            piece = bytes.fromhex(name[3:5])  # a byte's name is "<0x41>"
        elif model.is_control(i) or model.is_unknown(i):
            piece = b""
        pieces.append(piece)
        # A space that the model's own decoder leaves out, the dummy prefix, is not in the text.
        drops_space.append(piece == b" " + model.decode([i]).encode())
    return Tokenizer(file, content, model.bos_id(), pieces, facts, drops_space, proto)


# === end: tokenizer ===


# === shared: data ===
# llm.c's formats: magic number and version -> type of the tokens, uint32 for vocabularies > 65,536
SHARD_KINDS = {(20240520, 1): "<u2", (20240801, 7): "<u4"}


def read_shard(path):
    """Return the tokens of a shard, a memory map (N,). Raises UserError if missing or damaged."""
    if not os.path.isfile(path):
        raise UserError(f"shard {path}: no such file")
    header = np.fromfile(path, "<i4", 3)  # magic number, version, number of tokens
    kind = SHARD_KINDS.get(tuple(header[:2]))
    size = os.path.getsize(path) - 1024
    if not kind or header[-1] < 1 or size != np.dtype(kind).itemsize * int(header[-1]):
        raise UserError(f"shard {path}: truncated, damaged or empty, or not in llm.c's formats")
    return np.memmap(path, kind, "r", offset=1024)


# What the scripts read of a manifest, see check_json.
SPLIT_KINDS = {
    "shards": [{"file": str, "sha256": str}],
    "tokens": int,
    "decoded_bytes": int,
    "source_bytes?": int,  # nobody knows those of FineWeb
}
YARDSTICKS = ("bigram_bpb", "trigram_bpb", "zstd22_bpb", "xz_bpb")
MANIFEST_KINDS = {
    "format": int,
    "name": str,
    "published": bool,
    "tokenizer": {"file": str, "sha256": str, "vocab_size": int, "bos_id": int},
    "train": SPLIT_KINDS,
    "val": SPLIT_KINDS,
    "overlap_documents": int,
    "yardsticks?": dict.fromkeys(YARDSTICKS, float),
}


def load_manifest(data_path):
    """Return `manifest.json` of a data folder, a dict. Raises UserError if there is none, or if it
    has not what the scripts read of it.
    """
    path = Path(data_path) / "manifest.json"
    try:
        manifest = json.loads(path.read_bytes())
        check_json(manifest, MANIFEST_KINDS, "the manifest")
        tokenizer = manifest["tokenizer"]
        if manifest["format"] != 1 or tokenizer["bos_id"] >= tokenizer["vocab_size"]:
            raise UserError(
                "format must be 1, and the tokenizer's bos_id an id below its vocab_size"
            )
        for file in (tokenizer, *manifest["train"]["shards"], *manifest["val"]["shards"]):
            if "/" in file["file"] or not file["file"].isprintable():
                raise UserError(f"{file['file']!r:.60} must be the name of a file beside it")
    except (OSError, ValueError, RecursionError, UserError) as error:
        raise UserError(
            f"{path}: {error}; the folder of data (DATA_PATH) must be one that data/prepare.py TEXTS "
            "--out FOLDER made, or one of shards, for which data/download.py --manifest writes it"
        ) from None
    return manifest


def counted_bytes(part):
    """Return the bytes by which a score of a manifest's split divides.

    They are those that the tokens decode to, but never more than the source has: the text that a
    tokenizer without a piece for the space decodes to has a third more bytes than its source.
    """
    return min(part["decoded_bytes"], part.get("source_bytes") or math.inf)


class TokenStream:
    """Shards read as one circular stream of tokens.

    Raises UserError if a shard has an id that is not below `vocab_size`.
    """

    def __init__(self, paths, vocab_size):
        self.paths = paths
        self.vocab_size = vocab_size
        # A mapped shard keeps its file open, and often a process may at first have 1,024 open ones.
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.suppress(OSError, ValueError):  # macOS names a limit that it does not take
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self.shards = [read_shard(path) for path in paths]
        self.starts = np.cumsum([0, *map(len, self.shards)])  # (shards + 1,)

    def __len__(self):
        return self.starts[-1]

    def read(self, start, count):
        """Return `count` tokens from position `start` on, int64; after the last, the first."""
        parts = []
        while count:
            start %= len(self)
            shard = np.searchsorted(self.starts, start, "right") - 1
            part = self.shards[shard][start - self.starts[shard] :][:count]
            if part.max() >= self.vocab_size:
                raise UserError(f"shard {self.paths[shard]}: has ids beyond the tokenizer's")
            parts.append(part)
            start += len(part)
            count -= len(part)
        return np.concatenate(parts, dtype=np.int64)


def check_dataset(data_path, manifest):
    """Return the TokenStreams of training and validation.

    Raises UserError unless the shards are the manifest's.
    """
    if manifest["overlap_documents"] and not manifest["published"]:
        raise UserError(f"{data_path}/manifest.json: validation documents are also in training")
    streams = []
    for split in ("train", "val"):
        shards = manifest[split]["shards"]
        paths = [Path(data_path, shard["file"]) for shard in shards]
        stream = TokenStream(paths, manifest["tokenizer"]["vocab_size"])
        if len(stream) != manifest[split]["tokens"] or not shards:
            raise UserError(
                f"{data_path}/manifest.json: has another number of tokens than the shards of {split}"
            )
        if split == "val":  # training shards may be many gigabytes
            for path, shard in zip(paths, shards, strict=True):
                if sha256_file(path) != shard["sha256"]:
                    raise UserError(f"shard {path}: its SHA-256 is not the manifest's")
        streams.append(stream)
    return streams


# === end: data ===


# === shared: documents ===
# The file beside the shards with the bytes of each token: uint32 (2, V), see token_bytes.
TOKEN_BYTES = "token_bytes.bin"


def token_bytes(table, prev, ids):
    """Return the bytes of each token of `ids` given the token before it, int64, same shape.

    table: (2, V), the bytes that a token decodes to. table[0]: after ordinary text. table[1]: after a
    token without bytes such as BOS, where SentencePiece's leading space is not part of the text.
    Parameter Golf counts in the same way (build_sentencepiece_luts, eval_val).
    """
    is_boundary = table[0, prev] == 0
    return table[is_boundary.astype(int), ids]


def document_hashes(stream, bos_id):
    """Yield a hash of the tokens of every document, in order.

    Tokens before the first BOS belong to no document: a published shard may begin inside one.
    """
    begins = []
    for shard, start in zip(stream.shards, stream.starts, strict=False):
        begins.extend(start + np.flatnonzero(shard == bos_id))
    for begin, end in itertools.pairwise([*begins, len(stream)]):
        yield hashlib.sha256(stream.read(begin, end - begin)).digest()


# === end: documents ===


# === shared: streams ===
def open_streams():
    """Make print safe: characters that a terminal cannot show are escaped, and a closed stream is
    replaced by the null device, or the next file opened would get its number, and with it what
    libraries print.
    """
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))
        elif name != "stdin":
            stream.reconfigure(errors="backslashreplace")


def drop_stream(stream):
    """Let a standard stream lead nowhere: no later output fails, Python's own at exit included."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


def write_stream(stream, text):
    """Write text to a standard stream; return the OSError if nobody takes it, else None.

    From then on the stream leads nowhere.
    """
    try:
        print(text, end="", file=stream, flush=True)
    except OSError as error:
        drop_stream(stream)
        return error
    return None


# === end: streams ===


# === shared: encoding ===
ROLE_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
# Published encodings: the hash of their rank file and what that file does not contain. Every
# document begins with <|endoftext|>. The regular expressions are copied from
# tiktoken_ext/openai_public.py. They split a text into the parts within which bytes are merged.
ENCODINGS = {
    "gpt2": dict(
        sha256="306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930",
        bos_id=50256,
        vocab_size=50257,  # with all special tokens and unused ids
        split=r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s",
    ),
    "cl100k_base": dict(
        sha256="223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
        bos_id=100257,
        vocab_size=100277,  # with all special tokens and unused ids
        split=(
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+"
            r"| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
        ),
    ),
    "o200k_base": dict(
        sha256="446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
        bos_id=199999,
        vocab_size=200019,  # with all special tokens and unused ids
        split=(
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
            r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
            r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
    ),
}


# From a run of 999,940 spaces on, the stack of tiktoken's regular expressions overflows.
LONG_SPACE = re.compile(r"(?<!\s)\s{500000}")


class BytePairEncoder:
    """Byte-level BPE of a rank file, with the ids that the package tokenizers has."""

    def __init__(self, tokenizer, facts):
        """facts: those of ENCODINGS, or of an imported model (see convert.py)."""
        ranks = {piece: rank for rank, piece in enumerate(tokenizer.pieces) if piece}
        # Added tokens, of which some are shown as text: no merge makes them.
        for text in facts.get("added", []):
            ranks.pop(text.encode(), None)
        # Bytes that the vocabulary lacks: tokenizers drops them, tiktoken panics. They get ids
        # beyond the vocabulary, by which they are found.
        self.lacking = bytes([byte for byte in range(256) if bytes([byte]) not in ranks])
        self.vocab_size = tokenizer.vocab_size
        for byte in self.lacking:
            ranks[bytes([byte])] = self.vocab_size + byte
        self.bpe = tiktoken.Encoding(
            tokenizer.file, pat_str=facts["split"], mergeable_ranks=ranks, special_tokens={}
        )
        self.split = regex.compile(facts["split"])

    def encode(self, text):
        """Return the ids of a text without added tokens."""
        if len(text) < 500_000 or not LONG_SPACE.search(text):
            ids = self.bpe.encode_ordinary(text)
            if not self.lacking or max(ids, default=0) < self.vocab_size:
                return ids
        ids = []
        for match in self.split.finditer(text):
            # What is on both sides of a dropped byte may merge.
            piece = match[0].encode().translate(None, self.lacking)
            if piece:
                ids += self.bpe._encode_single_piece(piece)
        return ids


SPACES = re.compile(r"\s*")
WORD_CHARACTER = r"[\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\p{Join_Control}]"


class AddedTokens:
    """Added tokens of an imported model, which are found in a text as tokenizers finds them."""

    def __init__(self, ids, facts):
        """ids: the text of a token -> its id. facts: maybe `flags`, text of a token -> what it is:
        single_word, no part of a word; lstrip, rstrip: it takes the spaces before it, behind it.
        """
        self.ids = ids
        self.flags = facts.get("flags", {})
        longest_first = sorted(ids, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def encode(self, text, encode_part):
        """Return the ids of a text; encode_part: text without added tokens -> ids."""
        ids = []
        end = 0  # of the token before
        for match in self.pattern.finditer(text):
            flags = self.flags.get(match[0], [])
            start, stop = match.span()
            neighbours = text[start - 1 : start] + text[stop : stop + 1]
            if "single_word" in flags and regex.search(WORD_CHARACTER, neighbours):
                continue
            before = text[end:start]
            if "lstrip" in flags:
                before = before.rstrip()
            ids += encode_part(before)
            ids.append(self.ids[match[0]])
            end = stop
            if "rstrip" in flags:
                end = SPACES.match(text, stop).end()
        return ids + encode_part(text[end:])


def check_unicode(text):
    """Return a text that has no half of a surrogate pair. Raises UserError."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"text {text[error.start :]!r:.20} at character {error.start}: half a surrogate pair, "
            "which is no Unicode"
        ) from None
    return text


def load_tokenizer(path):
    """Return the Tokenizer of a file, see read_tokenizer, with its encoder. Raises UserError."""
    return add_encoder(read_tokenizer(path, ENCODINGS.get(Path(path).stem, {})))


def add_encoder(tokenizer):
    """Give a Tokenizer its attributes from `encode` on, and return it.

    roles: the ids of ROLE_TOKENS, {} if it has none. For the others see set_encoders. Raises
    UserError.
    """
    facts = tokenizer.facts
    if facts.get("sha256", tokenizer.sha256) != tokenizer.sha256:
        raise UserError(f"tokenizer {tokenizer.file}: is not the published rank file")
    tokenizer.roles = {}
    if tokenizer.file == "bytes":
        set_encoders(tokenizer, lambda text: [4 + byte for byte in text.encode()])
        tokenizer.roles = {role: 260 + i for i, role in enumerate(ROLE_TOKENS)}
    elif "split" in facts:
        set_encoders(tokenizer, BytePairEncoder(tokenizer, facts).encode)
    else:
        model = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.proto)
        tokenizer.facts = {"stop": [model.bos_id(), model.eos_id()]} | facts
        set_encoders(tokenizer, model.encode)
        for role in ROLE_TOKENS:
            i = model.piece_to_id(role)
            # Only control tokens cannot be written in a text, so that no user can forge a role.
            if model.is_control(i):
                tokenizer.roles[role] = i
    return tokenizer


def set_encoders(tokenizer, encode_part):
    """Give a Tokenizer `encode` and `encode_marked`, from a text to ids without BOS.

    Special tokens in a text are plain text for `encode`. For `encode_marked` the added tokens of an
    imported model are what they stand for. Both raise UserError for half a surrogate pair.
    encode_part: a text in normal form and without added tokens -> ids.
    """
    facts = tokenizer.facts

    def normalize(text):
        """Return a text in the form in which accents are part of their letters, if it is asked for."""
        return unicodedata.normalize("NFC", text) if facts.get("nfc") else text

    # tokenizers looks for most added tokens before it normalizes a text, for `normalized` ones after.
    added = facts.get("added", {})
    normalized = facts.get("normalized", [])
    early = {text: i for text, i in added.items() if text not in normalized}
    late = {normalize(text): added[text] for text in normalized}
    early_tokens = AddedTokens(early, facts)
    late_tokens = AddedTokens(late, facts)

    def encode(text):
        return encode_part(normalize(check_unicode(text)))

    def encode_late(text):
        return late_tokens.encode(normalize(text), encode_part)

    def encode_marked(text):
        return early_tokens.encode(check_unicode(text), encode_late)

    tokenizer.encode = encode
    tokenizer.encode_marked = encode_marked


# === end: encoding ===


# === shared: preparation ===
RANK_FILES = "https://openaipublic.blob.core.windows.net/encodings"
YARDSTICK_TOKENS = 20_000_000  # of training text: the count models take up to 100 bytes per token


def decode_bytes(tokenizer, ids):
    """Return the bytes of tokens that begin a document; `token_bytes` counts exactly these."""
    ids = np.asarray(ids, dtype=np.int64)
    previous = np.append(tokenizer.bos_id, ids)[:-1]
    drops = tokenizer.drops_space[ids] & tokenizer.boundary[previous]
    pairs = zip(ids.tolist(), drops.tolist(), strict=True)
    return b"".join([tokenizer.pieces[token][drop:] for token, drop in pairs])


def open_tokenizer(path):
    """Return load_tokenizer of a file, or the Tokenizer of the published encoding of this name.

    Its rank file is read from tiktoken's cache or from OpenAI's server. Raises UserError.
    """
    name = str(path)
    facts = ENCODINGS.get(name)
    if not facts:
        return load_tokenizer(path)
    url = f"{RANK_FILES}/{name.replace('gpt2', 'r50k_base')}.tiktoken"
    try:
        content = read_file_cached(url, facts["sha256"])
    except (OSError, ValueError) as error:
        raise UserError(f"tokenizer {name}: {error}") from error
    return add_encoder(rank_tokenizer(f"{name}.tiktoken", content, facts))


def byte_table(tokenizer):
    """Return the bytes of each token after text, and after a boundary, (2, V), see token_bytes."""
    sizes = np.array([len(piece) for piece in tokenizer.pieces])
    return np.stack([sizes, sizes - tokenizer.drops_space])


def replace_file(path, content):
    """Write a file beside and rename it, so that it is whole or as it was."""
    part = path.with_name(f"{path.name}.new")  # download.py continues a file NAME.part
    part.write_bytes(content)
    os.replace(part, path)


def save_tokenizer(tokenizer, folder):
    """Write a tokenizer's file (`bytes` needs none) and the bytes of its tokens into `folder`.

    Return the manifest's part on it.
    """
    if tokenizer.file != "bytes":
        replace_file(folder / tokenizer.file, tokenizer.content)
    replace_file(folder / TOKEN_BYTES, byte_table(tokenizer).astype("<u4").tobytes())
    return {
        "file": tokenizer.file,
        "sha256": tokenizer.sha256,
        "vocab_size": tokenizer.vocab_size,
        "bos_id": tokenizer.bos_id,
        "token_bytes_sha256": sha256_file(folder / TOKEN_BYTES),
    }


def write_manifest(folder, manifest):
    """Write manifest.json."""
    text = json.dumps(manifest, indent=1) + "\n"
    replace_file(folder / "manifest.json", text.encode())


def print_summary(folder, manifest):
    """Print what a manifest says, and how to train on the data."""
    for split in ("train", "val"):
        part = manifest[split]
        size = counted_bytes(part)
        ratio = size / max(1, part["tokens"] - part["documents"])
        print(
            f"{split}: {part['documents']:,} documents, {part['tokens']:,} tokens, "
            f"{size:,} bytes, {ratio:.4f} bytes per token (BOS not counted)"
        )
    for name, bpb in manifest["yardsticks"].items():
        print(f"{name.removesuffix('_bpb')}: {bpb:.4f} bits per validation byte")
    print(f"validation documents that are also in training: {manifest['overlap_documents']}")
    print(f"to train on it: DATA_PATH={folder}")


def count_overlap(train, val, bos_id):
    """Return how many documents of one TokenStream are also in another, token for token."""
    hashes = list(document_hashes(val, bos_id))
    repeated = set(hashes).intersection(document_hashes(train, bos_id))
    return sum(digest in repeated for digest in hashes)


def gram_keys(tokens, order, base):
    """Return a number (N - 1,) for the last `order` tokens at each position but the first.

    At position 1 the trigram begins before the tokens, where the key has the digit base - 1.
    """
    padded = np.append(base - 1, tokens)
    return sum(padded[2 - back : len(padded) - back] * base**back for back in range(order))


def look_up(keys, values, wanted, default):
    """Return values[i] where keys[i] is the wanted key, and `default` for keys that are missing."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], default)


def count_model_nats(train, val, vocab_size):
    """Return the nats of val[1:] under a bigram and a trigram count model of `train`.

    p(t | h) = (c(h t) + n(h) p(t | h')) / (c(h) + n(h)), where n(h) is the number of different
    tokens seen after h, and h' is one token shorter (Witten and Bell 1991, method C). The last
    backoff is to a uniform distribution.
    """
    base = vocab_size + 1
    p = np.full(len(val) - 1, 1.0 / vocab_size)
    nats = []
    for order in (1, 2, 3):
        keys, counts = np.unique(gram_keys(train, order, base), return_counts=True)
        histories, first, kinds = np.unique(keys // base, return_index=True, return_counts=True)
        wanted = gram_keys(val, order, base)
        # After an unseen history n is 1 and all counts are 0, so p stays.
        n = look_up(histories, kinds, wanted // base, 1)
        total = look_up(histories, np.add.reduceat(counts, first), wanted // base, 0)
        p = (look_up(keys, counts, wanted, 0) + n * p) / (total + n)
        nats.append(float(-np.log(p).sum()))
    return nats[1:]


def yardsticks(train, val, tokenizer, val_bytes):
    """Return bits per validation byte by count models and compressors, to read a score beside.

    val_bytes: what a score of the validation divides by, see counted_bytes.
    """
    tokens = val.read(0, len(val))
    print(f"count models and compressors on {len(tokens):,} validation tokens", flush=True)
    # A thousand documents at a time, because decoding takes memory.
    borders = np.flatnonzero(tokens == tokenizer.bos_id)[1000::1000]
    text = b"".join(decode_bytes(tokenizer, part) for part in np.split(tokens, borders))
    trained_on = train.read(0, min(len(train), YARDSTICK_TOKENS))
    bigram, trigram = count_model_nats(trained_on, tokens, tokenizer.vocab_size)
    to_bpb = 1 / math.log(2) / val_bytes
    zstd = zstandard.ZstdCompressor(level=22).compress(text)
    return {
        "bigram_bpb": bigram * to_bpb,
        "trigram_bpb": trigram * to_bpb,
        "zstd22_bpb": 8 * len(zstd) / val_bytes,
        "xz_bpb": 8 * len(lzma.compress(text, preset=9)) / val_bytes,
    }


# === end: preparation ===


# === shared: command ===
class Output:
    """Standard output of a command that prints its progress: without a reader the work goes on."""

    def __init__(self, stream):
        self.stream = stream

    def write(self, text):
        """Write text to the stream, or nowhere if nobody takes it."""
        write_stream(self.stream, text)

    def flush(self):
        """Do nothing: every write is flushed."""


def run_command(run):
    """Run a command and return its exit code: 2 after a mistake of the user, 130 after Ctrl-C.

    Either is one line.
    """
    open_streams()
    try:
        with contextlib.redirect_stdout(Output(sys.stdout)):
            run()
    except UserError as error:
        write_stream(sys.stderr, f"error: {error}\n")
        return 2
    except KeyboardInterrupt:
        write_stream(sys.stderr, "stopped by SIGINT; the same command does the rest\n")
        return 130  # 128 and SIGINT
    return 0


# === end: command ===


def container_limit(name):
    """Return the numbers of a limit of the container that this process is in, [] if it has none."""
    with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
        return [int(word) for word in Path(CGROUP, name).read_text().split()]
    return []


CGROUP = "/sys/fs/cgroup"  # of Linux
TABLE = ".parquet"
ROWS = (".jsonl", ".ndjson", TABLE)  # files of many documents
JSON = ".json"  # has many, too, if it has a JSON object in each line, as C4 and Dolma
# What a folder is searched for, beside files without ending.
ENDINGS = (*ROWS, JSON, ".txt", ".md", ".py")
PACKED = (".gz", ".zst")  # compressions that each of these may have
OTHER_KIND = "of another kind"
NOT_UTF8 = "not UTF-8 (iconv -f LATIN1 -t UTF-8 FILE > NEW converts Latin-1)"
UTF16 = "UTF-16 (iconv -f UTF-16 -t UTF-8 FILE > NEW converts it)"
UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
LFS = b"version https://git-lfs.github.com/spec/"  # begins what stands for a file of Git LFS
LFS_POINTER = "a pointer of Git LFS and not the file (git lfs pull fetches it)"
# Endings of files that are no text -> how to get text of them; the first that fits counts.
BY_PANDAS = "pandas.read_{}.to_json(NEW, orient='records', lines=True) writes .jsonl"
CONVERSIONS = {
    (".csv",): BY_PANDAS.format("csv(FILE)"),
    (".tsv",): BY_PANDAS.format(r"csv(FILE, sep='\t')"),
    (JSON,): f"a .json has an object in each line; of a list {BY_PANDAS.format('json(FILE)')}",
    (".arrow",): "datasets.load_from_disk(FOLDER).to_json(NEW) writes .jsonl",
    (".xml", ".xml.bz2"): "wikiextractor --json FILE makes rows of a dump of Wikipedia",
    (".warc", ".wet"): "warcio reads the records of Common Crawl; write them as .jsonl",
    (".zip",): "unzip FILE unpacks it",
    (".tar", ".tgz", ".tar.xz", ".tar.bz2"): "tar xf FILE unpacks it",
    (".xz", ".bz2", ".7z"): "unpack it first: xz -d, bzip2 -d or 7z x FILE; then maybe tar xf",
    # Tokens: of llm.c, nanoGPT and build-nanogpt
    (".bin", ".npy"): "data/download.py --manifest FOLDER --tokenizer NAME takes shards of llm.c; "
    "for other tokens prepare their text, by the same --tokenizer",
    (".ipynb",): "jupyter nbconvert --to markdown FILE writes .md",
    (".pdf",): "pdftotext FILE writes .txt",
    (".docx", ".epub", ".html"): "pandoc -t plain FILE -o NEW.txt writes text",
}
# In the name of a published file: it is not of the training split.
HELD_OUT = re.compile(r"(?i)(?:^|[/._-])(?:val|valid|validation|holdout|test)(?=[/.-]|_?\d|$)")
NAMED = 20  # files or rows passed over that are named for each reason; the others are counted
TABLE_ROWS = 100  # of a table that are in memory at a time
# Memory that each byte of a document takes at least. 20 MB took 1.5 GB with a SentencePiece model of
# 1,024 pieces; 10 MB took 1.1 GB with `bytes`.
MEMORY_PER_BYTE = 70
PAGES = os.sysconf("SC_PHYS_PAGES")
MEMORY = min([PAGES * os.sysconf("SC_PAGE_SIZE"), *container_limit("memory.max")])
DOCUMENT_BYTES = MEMORY // MEMORY_PER_BYTE  # a longer document, or line of .jsonl, is an error
READ_BYTES = 16_000_000  # of a text file at a time
SEPARATOR = b"<|endoftext|>"  # between documents of a .txt file, as in TinyStories
# At the beginning or the end of a line: inside of one it is text, of somebody who writes about it.
BORDER = re.compile(rb"(?m)<\|endoftext\|>(?:(?=\r?$)|(?<=^<\|endoftext\|>))")
START = "<|startoftext|>"  # before each of them in files for gpt-2-simple
# A compressed file of more is an error: text takes a tenth of its size, a forged file a thousandth.
UNPACKED_BYTES = 256_000_000
UNPACKED_RATIO = 200
NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__"}
STDLIB_TESTS = {"test", "tests", "idle_test"}
EMBEDDED_BYTES = 8_000_000  # of the standard library; its tests are taken only up to here
VOCAB_SIZE = 1024  # pieces of a tokenizer trained here
VAL_FRAC = 0.05  # share of the text that a split makes validation
VAL_BYTES = 20_000_000  # most validation text that a split makes
EMBEDDED_VAL_BYTES = 500_000  # the same for the standard library
BUCKETS = 64  # files of documents in process; a worker takes about 8 times the size of one
MOST_BUCKETS = 256  # the same where the sources are larger than this:
LARGE_BYTES = 2_000_000_000
GRAM_WORDS = 8  # near duplicates share over half of their sequences of this many words
SAMPLE_BYTES = 10_000_000  # of training text, which the tokenizer is trained on
SHARD_TOKENS = 100_000_000  # as the published FineWeb shards
LOSSLESS_PROBE = (
    "  two  spaces\n\n\ttab\r\nﬁ é \U0001f600 \ue000 "  # tokenizers that normalize change it
)


@dataclass(frozen=True)
class Request:
    """What is to be prepared. These fields and the contents of the sources decide the result."""

    sources: dict  # file -> its name in the manifest
    val_sources: dict  # empty: the sources are split
    name: str
    tokenizer: str  # "" to train one
    vocab_size: int
    val_frac: float
    val_max_bytes: int  # 0: no limit
    seed: int
    field: str  # of a row, which holds the text

    def identity(self):
        """Return what tells two requests apart, for the manifest. Every source is read once."""
        digest = hashlib.sha256()
        for split, sources in (("train", self.sources), ("val", self.val_sources)):
            for path, name in sources.items():
                digest.update(f"{split} {name} {sha256_file(path)}\n".encode())
        identity = {"format": 1, "name": self.name, "seed": self.seed}
        identity["sources_sha256"] = digest.hexdigest()
        if self.field != "text":
            identity["field"] = self.field
        if self.separated:  # an older version took such a file for one document
            identity["separator"] = SEPARATOR.decode()
        if self.tokenizer:
            identity["tokenizer"] = open_tokenizer(self.tokenizer).sha256
        else:
            identity |= {"tokenizer": "trained", "vocab_size": self.vocab_size}
        if not self.val_sources:
            identity |= {"val_frac": self.val_frac, "val_max_bytes": self.val_max_bytes}
        return identity

    def all_sources(self):
        """Return the files of training and validation."""
        return {*self.sources, *self.val_sources}

    @functools.cached_property
    def buckets(self):
        """The number of files that hold the documents in process."""
        size = sum(path.stat().st_size for path in self.all_sources())
        return MOST_BUCKETS if size > LARGE_BYTES else BUCKETS

    @functools.cached_property
    def separated(self):
        """The set of files that are split at SEPARATOR."""
        return {path for path in self.all_sources() if is_separated(path)}

    @functools.cached_property
    def has_one_document(self):
        """Whether the sources are a single document, which is split by its tail."""
        if self.val_sources or len(self.sources) > 1 or any(map(has_rows, self.sources)):
            return False
        (path,) = self.sources
        return len([*itertools.islice(text_documents(path), 2)]) == 1


def unpacked_name(path):
    """Return a file's name in small letters, without the ending of a compression."""
    name = path.name.lower()
    return name.removesuffix(path.suffix.lower()) if name.endswith(PACKED) else name


def has_rows(path):
    """Return whether a file has many documents, rows with a field each."""
    name = unpacked_name(path)
    if not name.endswith(JSON) and "." in name:
        return name.endswith(ROWS)
    try:
        with open_source(path) as file:
            line = file.readline(DOCUMENT_BYTES).removeprefix(codecs.BOM_UTF8)
        return line.startswith(b"{") and isinstance(json.loads(line), dict)
    except (OSError, ValueError, RecursionError):
        return False


def unpack_zstd(file):
    """Yield the unpacked bytes of a zstd file, in parts. Raises EOFError if it ends too early."""
    unpacker = zstandard.ZstdDecompressor(max_window_size=1 << 31)  # of zstd --long=31
    frame = None
    # Each read unpacks to at most 32,768 times its size.
    while data := file.read(4096):
        while data:
            frame = frame or unpacker.decompressobj()
            yield frame.decompress(data)
            data = frame.unused_data
            if frame.eof:
                frame = None
    if frame:
        raise EOFError


def unpack(path):
    """Yield the unpacked bytes of a .gz or .zst file, in parts. Raises UserError."""
    limit = UNPACKED_BYTES + UNPACKED_RATIO * path.stat().st_size
    kind = "zstd" if path.suffix.lower() == ".zst" else "gzip"
    total = 0
    try:
        with open(path, "rb") as file:
            if kind == "zstd":
                parts = unpack_zstd(file)
            else:
                parts = iter(functools.partial(gzip.GzipFile(fileobj=file).read, 1 << 20), b"")
            for part in parts:
                total += len(part)
                if total > limit:
                    raise UserError(
                        f"source {path}: unpacks to over {UNPACKED_RATIO} times its size; unpack it "
                        "first if that is right"
                    )
                yield part
    except (EOFError, zlib.error, zstandard.ZstdError, gzip.BadGzipFile) as error:
        raise UserError(
            f"source {path}: damaged {kind} data ({str(error) or 'it ends early'})"
        ) from None


class PartReader(io.RawIOBase):
    """A file to read, made of parts of bytes."""

    def __init__(self, parts):
        self.parts = parts
        self.rest = memoryview(b"")

    def readable(self):
        return True

    def readinto(self, buffer):
        """Fill a part of the buffer; return the number of bytes, 0 at the end."""
        while not self.rest:
            part = next(self.parts, None)
            if part is None:
                return 0
            self.rest = memoryview(part)
        count = min(len(buffer), len(self.rest))
        buffer[:count] = self.rest[:count]
        self.rest = self.rest[count:]
        return count


def open_source(path):
    """Return a source file for reading, as bytes, unpacked."""
    if path.suffix.lower() in PACKED:
        return io.BufferedReader(PartReader(unpack(path)), 1 << 20)
    return open(path, "rb")


def split_text(path):
    """Yield a text file as bytes: a .txt file in the parts between separators, others whole.

    Raises UserError for a part that is too long.
    """
    document = bytearray()
    with open_source(path) as file:
        while block := file.read(READ_BYTES):
            block += file.readline(DOCUMENT_BYTES)  # borders are inside of lines
            parts = BORDER.split(block) if may_split(path) else [block]
            for number, part in enumerate(parts):
                if number:
                    yield document
                    document = bytearray()
                document += part
                check_size(path, document)
    yield document


def check_size(path, document):
    """Raise UserError for a document that is too long, UnicodeDecodeError if that is no text."""
    if len(document) <= DOCUMENT_BYTES:
        return
    codecs.getincrementaldecoder("utf-8")().decode(document)  # a letter may be cut at the end
    raise UserError(
        f"source {path}: a document of over {DOCUMENT_BYTES:,} bytes, which takes more memory than "
        f"the {MEMORY / 1e9:.3g} GB of this machine; must be .jsonl with a document in each line, or "
        f".txt with the line {SEPARATOR.decode()} between documents; split -C 10MB "
        "--additional-suffix=.txt FILE FOLDER/ cuts a text at line ends"
    )


def may_split(path):
    """Return whether a file is split at SEPARATOR if it has one."""
    return unpacked_name(path).endswith(".txt")


def is_separated(path):
    """Return whether a file is split at SEPARATOR."""
    return may_split(path) and len([*itertools.islice(split_text(path), 2)]) == 2


def text_documents(path):
    """Yield the documents of a text file. Raises UnicodeDecodeError, and UserError for a long one.

    The only one is as the file has it, but without the mark (BOM) that some editors put before it.
    Documents between separators are without the line ends around them.
    """
    parts = split_text(path)
    first = next(parts)
    second = next(parts, None)
    if second is None:
        yield first.decode("utf-8-sig")
        return
    for part in itertools.chain([first, second], parts):
        text = part.decode("utf-8-sig").strip("\r\n").removeprefix(START)
        if text.strip():
            yield text


def text_fault(path):
    """Return why a text file cannot be read, or "". Files of many documents are only opened here.

    Raises UserError for a damaged one.
    """
    try:
        with open(path, "rb") as file:
            begin = file.read(len(LFS))
        if begin == LFS:
            return LFS_POINTER
        if path.name.lower().endswith(TABLE):
            open_table(path).close()
        elif has_rows(path):
            return ""
        # A list, because all of them must be UTF-8.
        elif not any([bool(text.strip()) for text in text_documents(path)]):
            return "empty"
    except UnicodeDecodeError:
        return UTF16 if begin.startswith(UTF16_MARKS) else NOT_UTF8
    except OSError:
        return "not readable"
    return ""


def walk(root, passed_over):
    """Return the files in a folder, links followed; add the names of the others by reason."""
    files = []
    searched = set()

    def pass_over(reason, path):
        passed_over[reason].append(Path(os.path.relpath(path, root.parent)).as_posix())

    def fail(error):
        pass_over("not readable", error.filename)

    for folder, folders, names in os.walk(root, onerror=fail, followlinks=True):
        place = os.path.realpath(folder)
        if place in searched:
            pass_over("links to a folder that is searched already", folder)
            folders.clear()
            continue
        searched.add(place)
        folders.sort()
        # A cache of the Hugging Face hub: its snapshots are links to its blobs, with their names.
        cached = {"blobs", "refs"} if {"blobs", "snapshots"} <= {*folders} else set()
        for name in [*folders, *names]:
            path = Path(folder, name)
            if name.startswith("."):
                pass_over("hidden", path)
            elif name in cached:
                pass_over("of a cache, whose snapshots are read", path)
            elif name in names and path.is_file():
                files.append(path)
            elif name in names:
                pass_over("broken links" if path.is_symlink() else "no regular files", path)
        folders[:] = [name for name in folders if name[0] != "." and name not in cached]
    return sorted(files)


def conversion(path):
    """Return how to get text of a file that is no text, by its name; "" for another name."""
    names = (unpacked_name(path), path.name.lower())
    for endings, hint in CONVERSIONS.items():
        if any(name.endswith(endings) for name in names):
            return hint
    return ""


def find_sources(arguments, only):
    """Return file -> name in the manifest, in a fixed order, and reason -> names of files that are
    passed over.

    only: the endings of file names that are taken from folders; none: the usual ones.
    """
    sources = {}
    passed_over = defaultdict(list)
    for root in map(Path, arguments):
        if not root.exists():
            raise UserError(f"source {root}: no such file or folder")
        if not (root.is_file() or root.is_dir()):
            raise UserError(
                f"source {root}: must be a file or a folder; a pipe can be read only once"
            )
        endings = tuple(ending.lower() for ending in only) if root.is_dir() else ()
        reasons = defaultdict(list)
        found = {}
        for path in walk(root, reasons) if root.is_dir() else [root]:
            name = Path(os.path.relpath(path, root.parent)).as_posix()
            has_kind = path.name.lower().endswith(endings or ENDINGS)
            has_kind = has_kind or unpacked_name(path).endswith(endings or ENDINGS)
            if not endings and unpacked_name(path).endswith(JSON):
                has_kind = has_rows(path)
            elif not endings and "." not in unpacked_name(path):
                has_kind = True
            elif path == root and not conversion(path):
                has_kind = True
            fault = text_fault(path) if has_kind else OTHER_KIND
            if fault:
                reasons[fault].append(name)
            else:
                found[path] = name
        if not found:
            why = ", ".join(f"{len(names)} {reason}" for reason, names in reasons.items())
            hints = [conversion(Path(name)) for name in reasons[OTHER_KIND]]
            raise UserError(
                f"source {root}: no text in it ({why or 'no file'}); read are UTF-8 files "
                f"{', '.join(endings or ENDINGS)}, also as .gz or .zst, and of a folder those that "
                f"--only ENDING names; {next(filter(None, hints), 'make .jsonl of other kinds')}"
            )
        sources |= found
        for reason, names in reasons.items():
            passed_over[reason] += names
    return sources, passed_over


def print_passed_over(reason, names, count):
    """Print what is not used: the first of `count` names of files or rows."""
    text = ", ".join(names[:NAMED]) + ", …" * (count > NAMED)
    print(f"passed over, {reason}: {count} ({text})", flush=True)


def print_held_out(names):
    """Warn of sources that their publisher holds out, if their names say so beside `train`."""
    held_out = [*filter(HELD_OUT.search, names)]
    if 0 < len(held_out) < len(names) and "train" in " ".join(names).lower():
        print(
            f"warning: {len(held_out)} sources are named as validation or test, the first is "
            f"{held_out[0]}; they are split like the others, unless you give them by --val",
            flush=True,
        )


def find_stdlib():
    """Return file -> name in the manifest of the standard library's *.py files, its tests last."""
    root = Path(sysconfig.get_paths()["stdlib"])
    parts = {path: path.relative_to(root).parts for path in sorted(root.rglob("*.py"))}
    sources = {}
    total = 0
    for path in sorted(parts, key=lambda path: not STDLIB_TESTS.isdisjoint(parts[path])):
        is_test = not STDLIB_TESTS.isdisjoint(parts[path])
        if not NOT_STDLIB.isdisjoint(parts[path]) or (is_test and total >= EMBEDDED_BYTES):
            continue
        if not text_fault(path):
            sources[path] = "/".join(["stdlib", *parts[path]])
            total += path.stat().st_size
    if total < 1_000_000:
        raise UserError(f"standard library {root}: only {total} bytes of .py files; name a SOURCE")
    python = sys.version.split()[0]
    print(
        f"no SOURCE: the standard library of Python {python}, {len(sources)} files, {total:,} bytes"
    )
    return sources


def open_table(path):
    """Return a Parquet file, open. Raises UserError."""
    if importlib.util.find_spec("pyarrow") is None:
        raise UserError(f"source {path}: Parquet needs pyarrow: pip install pyarrow")
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"source {path}: damaged Parquet ({error!s:.200})") from None


def table_rows(path, field):
    """Yield the rows of a Parquet file: only their field, if there is one. Raises UserError."""
    with open_table(path) as table:
        columns = [field] if field in table.schema_arrow.names else None
        batches = table.iter_batches(TABLE_ROWS, columns=columns)
        try:
            for batch in batches:
                yield from batch.to_pylist()
        except (OSError, ValueError) as error:  # pages; strings that are not UTF-8
            raise UserError(f"source {path}: damaged Parquet ({error!s:.200})") from None


def json_rows(path, field):
    """Yield the rows of JSON lines; a blank line is an empty text. Raises UserError."""
    with open_source(path) as file:
        lines = iter(functools.partial(file.readline, DOCUMENT_BYTES), b"")
        for number, line in enumerate(lines, 1):
            where = f"source {path}, line {number}"
            if len(line) == DOCUMENT_BYTES:
                raise UserError(
                    f"{where}: longer than {DOCUMENT_BYTES:,} bytes, which takes more memory than "
                    f"the {MEMORY / 1e9:.3g} GB of this machine"
                )
            try:
                row = json.loads(line) if line.strip() else {field: ""}
            except (ValueError, RecursionError) as error:
                raise UserError(f"{where}: not JSON ({error})") from error
            if not isinstance(row, dict):
                raise UserError(f"{where}: no object; a line is an object with a text in `{field}`")
            yield row


def read_documents(path, field):
    """Yield the documents of a source file, and (number, row) for a row that has no text.

    Raises UserError that names the file, and a line of JSON.
    """
    if not has_rows(path):
        yield from text_documents(path)
        return
    rows = table_rows if path.name.lower().endswith(TABLE) else json_rows
    for number, row in enumerate(rows(path, field), 1):
        text = row.get(field)
        yield text if isinstance(text, str) else (number, row)


def split_tail(data, request):
    """Return a single document in two: what trains, and the tail that validates.

    The tail begins with a line, or with a word if that part of the document has no line end.
    """
    size = int(request.val_frac * len(data))
    if request.val_max_bytes:
        size = min(size, request.val_max_bytes)
    for separator in (b"\n", b" "):
        cut = data.find(separator, len(data) - size) + 1
        if 0 < cut < len(data):
            return {"train": data[:cut], "val": data[cut:]}
    # The last line or word of the document that is not all of it.
    begin = max(data.rfind(separator, 0, len(data) - 1) for separator in (b"\n", b" ")) + 1
    hint = "give --val"
    if begin and not 0 < request.val_max_bytes < len(data) - begin + 1:
        share = math.ceil(1000 * (len(data) - begin + 1) / len(data)) / 1000
        hint = f"give --val-frac {min(share, 0.999)} or --val" if share < 1 else hint
    if not request.tokenizer and len(data) < 2000:
        hint += f"; so short a text also needs --tokenizer bytes, as --vocab-size {request.vocab_size} is too large"
    raise UserError(
        f"one document, whose end of {size} bytes for validation has no line or word of its own; {hint}"
    )


def hash_share(data):
    """Return a number from 0 to 1 that a document's SHA-256 decides."""
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "big") / 2**64


def split_document(data, path, request):
    """Return split -> text: a document is of one side, unless it is the only one.

    Its SHA-256 decides which side, unless --val says so.
    """
    if request.has_one_document:
        parts = split_tail(data, request)
        print(f"one document: its last {len(parts['val']):,} bytes are the validation", flush=True)
        return parts
    is_val = path in request.val_sources
    if not request.val_sources:
        is_val = hash_share(data) < request.val_frac
    return {"val" if is_val else "train": data}


# A record is a document in process: key (32 bytes), length (8 bytes), text in UTF-8. The key is
# SHA-256(seed, SHA-256(text)). The order of the keys is the global shuffle, and equal texts have
# equal keys.
def write_record(file, key, data):
    """Append a document to a file of records."""
    file.write(key + struct.pack("<Q", len(data)) + data)


def read_records(paths):
    """Return the distinct documents of files of records, (key, text) in the order of the keys."""
    records = set()
    for path in paths:
        with open(path, "rb") as file:
            while key := file.read(32):
                (size,) = struct.unpack("<Q", file.read(8))
                records.add((key, file.read(size)))
    return sorted(records)


def spooled(work, bucket):
    """Return the files of a bucket."""
    return [work / f"spool/{split}_{bucket:03d}" for split in ("train", "val")]


def spool_file(path, request, files, counts):
    """Write the documents of a source file to `files`, of spool; yield its rows without a text."""
    for text in read_documents(path, request.field):
        counts["documents"] += 1
        if isinstance(text, tuple):
            counts["no_text"] += 1
            yield text
            continue
        try:
            data = text.encode()
        except UnicodeEncodeError:  # a lone surrogate from a JSON escape has no bytes
            counts["not_lossless"] += 1
            continue
        if not text.strip():
            counts["empty"] += 1
            continue
        counts["with_separator"] += SEPARATOR in data
        for split, part in split_document(data, path, request).items():
            digest = hashlib.sha256(part).digest()
            key = hashlib.sha256(b"%d:" % request.seed + digest).digest()
            write_record(files[f"{split}_{key[0] * request.buckets >> 8:03d}"], key, part)


def spool(request, work):
    """Write every document to spool/SIDE_NNN, the bucket by its key. Return the counts."""
    (work / "spool").mkdir()
    files = {}
    for split, bucket in itertools.product(("train", "val"), range(request.buckets)):
        name = f"{split}_{bucket:03d}"
        files[name] = open(work / "spool" / name, "wb")
    counts = Counter(documents=0, empty=0, not_lossless=0, no_text=0)
    without = f"no text in `{request.field}`"
    separated_names = []
    separated_documents = 0
    rows = []  # the first without a text
    text_lengths = Counter()  # of their fields
    for path, name in (request.val_sources | request.sources).items():
        begin = counts["documents"]
        for number, row in spool_file(path, request, files, counts):
            if len(rows) < NAMED:
                rows.append(f"{name} line {number}")
                texts = {key: len(value) for key, value in row.items() if isinstance(value, str)}
                text_lengths.update(texts)
        if path in request.separated:
            separated_names.append(name)
            separated_documents += counts["documents"] - begin
    for file in files.values():
        file.close()
    if rows and counts["no_text"] == counts["documents"] - counts["empty"]:
        options = " or ".join(f"--field {name}" for name, _ in text_lengths.most_common(3))
        raise UserError(
            f"source {rows[0]}: {without}, as in all {counts['no_text']} rows; "
            f"must be {options or '--field NAME of a field that holds text'}"
        )
    if rows:
        print_passed_over(f"rows with {without}", rows, counts["no_text"])
    if counts["documents"] == counts["empty"] + counts["not_lossless"]:
        raise UserError(
            f"no text in {counts['documents']} documents of the sources; give other text"
        )
    if separated_names:
        print(
            f"split at {SEPARATOR.decode()}: {len(separated_names)} .txt files, the first is "
            f"{separated_names[0]}, {separated_documents:,} documents; where it is text, write .jsonl",
            flush=True,
        )
    if counts["with_separator"]:
        print(
            f"warning: {SEPARATOR.decode()} stays text in {counts['with_separator']:,} documents; "
            "only a .txt file is split at it, and there not inside a line",
            flush=True,
        )
    # The two parts of a single document count as two.
    counts["documents"] += request.has_one_document
    return counts


def grams(data):
    """Return hashes of the distinct 8-word sequences of a text, sorted uint64 (N,).

    A shorter text is one sequence.
    """
    text = data.decode()
    words = re.findall(r"\w+", text.lower()) or ["".join(text.split())]
    hashes = np.array([zlib.crc32(word.encode()) for word in words], dtype=np.uint64)
    count = max(1, len(words) - GRAM_WORDS + 1)
    total = np.zeros(count, dtype=np.uint64)
    for i in range(min(GRAM_WORDS, len(words))):
        total = total * np.uint64(0x9E3779B97F4A7C15) + hashes[i : i + count]
        total ^= total >> np.uint64(29)
    return np.unique(total)


class Coverage:
    """Which 8-grams of the validation documents are in the training documents kept so far."""

    def __init__(self, documents, path):
        """Write the 8-grams of all documents to `path`, sorted, repeats kept."""
        parts = [grams(text) for _, text in documents]
        everything = np.concatenate(parts)
        order = np.argsort(everything, kind="stable")
        np.save(path, everything[order])
        self.sizes = np.array([len(part) for part in parts])  # (documents,)
        self.owners = np.repeat(np.arange(len(parts)), self.sizes)[order]  # document of each place
        self.seen = np.zeros(len(order), dtype=bool)
        self.covered = np.zeros(len(parts), dtype=np.int64)  # (documents,) places that are seen

    def admit(self, places, protect):
        """Count `places` as seen. Return False, and count nothing, if validation is to be protected
        and a document of it would be covered by over half.
        """
        new = places[~self.seen[places]]
        owners, counts = np.unique(self.owners[new], return_counts=True)
        covered = self.covered[owners] + counts
        if protect and np.any(2 * covered > self.sizes[owners]):
            return False
        self.covered[owners] = covered
        self.seen[new] = True
        return True


def match_bucket(work, bucket):
    """Return for each document of a bucket: its number of 8-grams, how many of them validation has,
    and their places in index.npy.
    """
    index = np.load(work / "index.npy", mmap_mode="r")
    matches = []
    for _, text in read_records(spooled(work, bucket)):
        own = grams(text)
        first = np.searchsorted(index, own)
        last = np.searchsorted(index, own, side="right")
        found = np.flatnonzero(first < last)
        places = [np.arange(first[i], last[i]) for i in found]
        matches.append((len(own), len(found), np.concatenate([np.empty(0, np.int64), *places])))
    return matches


def run_jobs(workers, work, jobs):
    """Yield work(job) for each job, in order, from that many processes.

    Raises UserError if one of them is killed. After Ctrl-C they end the jobs that have begun: if one
    ended in the middle of an answer, the pool would wait for the rest forever.
    """
    if workers == 1:
        yield from map(work, jobs)
        return
    try:
        with ProcessPoolExecutor(workers) as pool:
            # The processes start in `map`. They ignore Ctrl-C for good, and this one meanwhile: it
            # would leave a process behind that it has not yet noted.
            handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
            results = pool.map(work, jobs)
            signal.signal(signal.SIGINT, handler)
            yield from results
    except BrokenProcessPool:
        raise UserError(
            f"--workers {workers}: a process was killed, probably for its memory; "
            "fewer take less, and so do shorter documents: .jsonl has one in each line"
        ) from None


def take_validation(request, work):
    """Return the documents of the validation side, up to the byte limit of a split."""
    limit = 0 if request.val_sources else request.val_max_bytes
    documents = []
    size = 0
    for bucket in range(request.buckets):
        for document in read_records([work / f"spool/val_{bucket:03d}"]):
            size += len(document[1])
            if 0 < limit < size:
                return documents
            documents.append(document)
    return documents


def first_validation(request, work):
    """Return the options by which the fewest documents validate, or what else gives validation."""
    shares = []
    for bucket in range(request.buckets):
        documents = read_records(spooled(work, bucket))
        shares += [(hash_share(data), len(data)) for _, data in documents]
    if len(shares) < 2:
        return "give --val, or the only document as .txt, whose end is the validation"
    share, size = min(shares)
    share = math.ceil(share * 1e4 + 1e-6) / 1e4
    return f"must be --val-frac {share} --val-max-bytes {size}, or give --val"


def select(request, work, counts, workers):
    """Write the documents to keep, in order, to kept/train_NNN and kept/val_000; complete the counts.

    A training document is dropped if over half of its 8-grams are in validation. A validation
    document is dropped if over half of its 8-grams are in the training documents that are left.
    With --val validation stays as it is given: the training document that would bring one of its
    documents above half is dropped.
    """
    val = take_validation(request, work)
    if not val and request.val_sources:
        raise UserError(
            f"--val: no text in its documents ({counts['empty']} empty); give other text"
        )
    if not val:
        raise UserError(
            f"no validation document among {counts['documents']} documents with --val-frac "
            f"{request.val_frac} and --val-max-bytes {request.val_max_bytes}; "
            f"{first_validation(request, work)}"
        )
    coverage = Coverage(val, work / "index.npy")
    val_keys = {key for key, _ in val}
    (work / "kept").mkdir()
    distinct = len(val)
    train_documents = 0
    jobs = run_jobs(workers, functools.partial(match_bucket, work), range(request.buckets))
    for bucket, matches in enumerate(jobs):
        documents = read_records(spooled(work, bucket))
        with open(work / f"kept/train_{bucket:03d}", "wb") as file:
            for (key, text), (size, shared, places) in zip(documents, matches, strict=True):
                if key in val_keys:
                    continue
                # What the byte limit left out of the validation side trains.
                distinct += 1
                if 2 * shared <= size and coverage.admit(places, bool(request.val_sources)):
                    write_record(file, key, text)
                    train_documents += 1
    is_kept = 2 * coverage.covered <= coverage.sizes
    with open(work / "kept/val_000", "wb") as file:
        for i in np.flatnonzero(is_kept):
            write_record(file, *val[i])

    counts["exact_duplicates"] = counts["documents"] - distinct
    counts["exact_duplicates"] -= counts["empty"] + counts["not_lossless"] + counts["no_text"]
    counts["near_duplicates"] = distinct - train_documents - int(is_kept.sum())
    ways_out = "more text" if request.val_sources else "more text or another --val-frac"
    for split, count in (("training", train_documents), ("validation", is_kept.sum())):
        if not count:
            raise UserError(
                f"no {split} document is left of {counts['documents']} "
                f"({counts['exact_duplicates']} exact, {counts['near_duplicates']} near "
                f"duplicates, {counts['empty']} empty); give {ways_out}"
            )


def sample_lines(paths):
    """Yield the lines of the first SAMPLE_BYTES of text, in parts, without line ends."""
    size = 0
    for path in paths:
        for _, text in read_records([path]):
            if size >= SAMPLE_BYTES:
                return
            size += len(text)
            for line in text.decode().split("\n"):
                # SentencePiece's trainer leaves out lines of over 4,192 bytes.
                yield from (line[start : start + 1000] for start in range(0, len(line), 1000))


def train_tokenizer(work, vocab_size):
    """Return the path of a lossless SentencePiece BPE model, trained on the training text."""
    model = io.BytesIO()
    # A list, because SentencePiece takes Ctrl-C inside a generator for a fault of the text.
    lines = list(sample_lines(sorted(work.glob("kept/train_*"))))
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            user_defined_symbols=["\n"],
            control_symbols=list(ROLE_TOKENS),
            pad_id=0,
            bos_id=1,
            eos_id=2,
            unk_id=3,
            character_coverage=0.999,
            num_threads=1,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        # SentencePiece says "Vocabulary size too high (9). Please set it to a value <= 7." or
        # "Vocabulary size is smaller than required_chars. 7 vs 9."
        reason = "no such tokenizer from this text"
        for pattern, limit in ((r"value <= (\d+)", "most"), (r"\d+ vs (\d+)", "least")):
            for number in re.findall(pattern, str(error)):
                reason = f"must be at {limit} {number} for this text"
        raise UserError(
            f"--vocab-size {vocab_size}: {reason}; or give more text, or --tokenizer bytes"
        ) from error
    path = work / "tokenizer.model"
    path.write_bytes(model.getvalue())
    return path


@functools.lru_cache(1)  # a process tokenizes many files
def worker_tokenizer(path, sha256):
    """Return the tokenizer of a file, whose SHA-256 tells files of one path apart."""
    return open_tokenizer(path)


def tokenize(tokenizer_file, lossless, path):
    """Return the tokens of a file of records, a BOS before each document, and the counts.

    If the tokenizer is lossless, only documents that it gives back exactly are taken.
    """
    tokenizer = worker_tokenizer(*tokenizer_file)
    tokens = [np.empty(0, dtype="<u2")]
    counts = Counter()
    for _, text in read_records([path]):
        ids = tokenizer.encode(text.decode())
        decoded = decode_bytes(tokenizer, ids)
        if not decoded or (lossless and decoded != text):
            counts["not_lossless"] += 1
            continue
        counts["changed"] += decoded != text
        tokens.append(np.array([tokenizer.bos_id, *ids], dtype="<u4"))
        counts.update(documents=1, source_bytes=len(text), decoded_bytes=len(decoded))
    return np.concatenate(tokens), counts


def write_shard(path, tokens, vocab_size=1 << 16):
    """Write tokens (N,) as one shard, uint32 if the vocabulary is above 65,536. Raises UserError."""
    (magic, version), kind = list(SHARD_KINDS.items())[vocab_size > 1 << 16]
    packed = np.asarray(tokens).astype(kind)
    if not np.array_equal(packed, tokens):
        raise UserError(f"{path}: ids {tokens.min()} to {tokens.max()} do not fit {packed.dtype}")
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, version, len(packed)
    np.concatenate([header.view(kind), packed]).tofile(path)


def write_split(stem, parts, vocab_size):
    """Write tokens as shards STEM_NNNNNN.bin of SHARD_TOKENS; return the manifest's part on them.

    A document may go on in the next shard. `parts` yields what `tokenize` returns.
    """
    shards = []
    counts = Counter(documents=0, source_bytes=0, decoded_bytes=0, not_lossless=0, changed=0)
    waiting = np.empty(0, dtype="<u2")

    def write(tokens):
        path = Path(f"{stem}_{len(shards):06d}.bin")
        write_shard(path, tokens, vocab_size)
        shards.append({"file": path.name, "tokens": len(tokens), "sha256": sha256_file(path)})

    for tokens, found in parts:
        counts.update(found)
        waiting = np.concatenate([waiting, tokens])
        while len(waiting) >= SHARD_TOKENS:
            write(waiting[:SHARD_TOKENS])
            waiting = waiting[SHARD_TOKENS:]
    if len(waiting):
        write(waiting)
    if not shards:
        raise UserError(
            f"the tokenizer gives back none of {counts['not_lossless']} documents of {stem.name} "
            "exactly; use another tokenizer or text"
        )
    return {"shards": shards, "tokens": sum(shard["tokens"] for shard in shards), **counts}


def print_changes(split, part):
    """Warn that a tokenizer does not give its text back, and say by which bytes scores divide."""
    source, decoded = (f"{part[name]:,}" for name in ("source_bytes", "decoded_bytes"))
    print(
        f"warning: the tokenizer changes the text of {split}: {source} bytes become {decoded}; "
        f"scores divide by the smaller number, and answers come in changed text",
        flush=True,
    )


def build(request, work, workers):
    """Write shards and tokenizer into work/result. Return the manifest."""
    paths = [*request.sources, *request.val_sources]
    endings = Counter(Path(unpacked_name(path)).suffix for path in paths)
    kinds = [f"{n:,} {ending or 'without ending'}" for ending, n in endings.most_common()]
    print(f"reading the sources: {', '.join(kinds)}", flush=True)
    counts = spool(request, work)
    parts = "its two parts" if request.has_one_document else f"{counts['documents']:,} documents"
    print(f"looking for duplicates among {parts}", flush=True)
    select(request, work, counts, workers)
    shutil.rmtree(work / "spool")  # as large as the text
    result = work / "result"
    result.mkdir()
    path = request.tokenizer or train_tokenizer(work, request.vocab_size)
    tokenizer = open_tokenizer(path)
    probe = decode_bytes(tokenizer, tokenizer.encode(LOSSLESS_PROBE))
    manifest = {
        "format": 1,
        "name": request.name,
        "published": False,
        "tokenizer": save_tokenizer(tokenizer, result),
        "lossless": probe == LOSSLESS_PROBE.encode(),
    }
    print("tokenizing", flush=True)
    job = functools.partial(tokenize, (path, tokenizer.sha256), manifest["lossless"])
    for split in ("train", "val"):
        parts = run_jobs(workers, job, sorted(work.glob(f"kept/{split}_*")))
        part = write_split(result / f"{request.name}_{split}", parts, tokenizer.vocab_size)
        counts["not_lossless"] += part.pop("not_lossless")
        if part.pop("changed"):
            print_changes(split, part)
        manifest[split] = part
    if request.has_one_document:
        manifest["split"] = "tail"  # of the only document; a split by hash has no such line
    kinds = ["exact_duplicates", "near_duplicates", "not_lossless", "empty"]
    if counts["no_text"]:
        kinds.append("no_text")
    manifest |= {
        "overlap_documents": 0,
        "dropped": {kind: counts[kind] for kind in kinds},
        "seed": request.seed,
        "source_files": [*request.sources.values(), *request.val_sources.values()],
    }
    train, val = check_dataset(result, manifest)
    overlap = count_overlap(train, val, tokenizer.bos_id)
    if overlap:
        raise UserError(f"{overlap} validation documents are in training, expected 0")
    manifest["yardsticks"] = yardsticks(train, val, tokenizer, counted_bytes(manifest["val"]))
    return manifest


def tokenizer_of(folder, manifest):
    """Return the tokenizer of a data folder. Raises UserError if its file is not the manifest's."""
    tokenizer = load_tokenizer(folder / manifest["tokenizer"]["file"])
    if tokenizer.sha256 != manifest["tokenizer"]["sha256"]:
        raise UserError(f"{folder}: {tokenizer.file} is not the tokenizer of these shards")
    return tokenizer


def add_token_bytes(folder):
    """Write the bytes of each token for shards of an older version, into their manifest, too.

    Return the manifest. Raises UserError.
    """
    manifest = load_manifest(folder)
    tokenizer = tokenizer_of(folder, manifest)
    try:
        manifest["tokenizer"] = save_tokenizer(tokenizer, folder)
        write_manifest(folder, manifest)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error})") from error
    print(f"{folder}: {TOKEN_BYTES} is written")
    return manifest


def prepare(request, out, workers):
    """Make what the request says in folder `out`, or find it made. Return the manifest."""
    identity = request.identity()
    if (out / "manifest.json").exists():
        manifest = load_manifest(out)
        if manifest.get("request") != identity:
            raise UserError(
                f"{out}: holds data of another request (other sources or options); delete {out} or "
                "choose another --out"
            )
        tokenizer_of(out, manifest)
        check_dataset(out, manifest)
        print(f"{out}: already holds exactly this data; nothing to do")
        return manifest if (out / TOKEN_BYTES).exists() else add_token_bytes(out)
    work = out / ".work"
    shutil.rmtree(work, ignore_errors=True)  # of a run that was killed
    try:
        work.mkdir(parents=True)
        manifest = build(request, work, workers)
        manifest["request"] = identity
        for path in (work / "result").iterdir():
            os.replace(path, out / path.name)
        write_manifest(out, manifest)
    except OSError as error:
        if Path(error.filename or "") in request.all_sources():
            raise UserError(f"source {error.filename}: cannot be read ({error})") from error
        raise UserError(f"--out {out}: cannot be written ({error})") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
        with contextlib.suppress(OSError):
            out.rmdir()  # if it is empty, because the run was refused
    return manifest


def parse_arguments(arguments):
    """Return the parsed command line. Raises UserError for a value out of range."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    option = parser.add_argument
    names = "files, folders; none: standard library"
    option("sources", nargs="*", default=[], metavar="SOURCE", help=names)
    option("--val", nargs="+", default=[], metavar="SOURCE", help="validation text; no split then")
    option("--only", nargs="+", default=[], metavar="ENDING", help="of folders, e.g. .txt alone")
    option(
        "--token-bytes", type=Path, metavar="DIR", help=f"only write {TOKEN_BYTES} of old shards"
    )
    option("--out", type=Path, help="folder to write (data/NAME beside this script)")
    option("--vocab-size", type=int, help=f"pieces of a tokenizer trained here ({VOCAB_SIZE})")
    option("--tokenizer", default="", help=".model file, tiktoken name or file, or `bytes`")
    option("--val-frac", type=float, help=f"share of text for validation ({VAL_FRAC})")
    option("--val-max-bytes", type=int, help=f"most validation bytes, 0: no limit ({VAL_BYTES:,})")
    option("--field", default="text", help="of a row, which holds the document (text)")
    option("--seed", type=int, default=0, help="of the document order (0)")
    option("--name", help="first part of the shards' names (text; embedded without SOURCE)")
    option("--workers", type=int, help="processes (all cores)")
    args = parser.parse_args(arguments)
    given = [name for name, value in vars(args).items() if value != parser.get_default(name)]
    alone = f"nothing beside it, found {', '.join(given).replace('_', '-')}"
    share = args.val_frac
    size = args.vocab_size
    limit = args.val_max_bytes
    name_is_right = re.fullmatch(r"[A-Za-z0-9.-]+", args.name or "-")
    share_is_right = share is None or (0 < share < 1 and not args.val)
    size_is_right = size is None or (size > 0 and not args.tokenizer)
    limit_is_right = limit is None or (limit >= 0 and not args.val)
    for name, value, is_right, expected in (
        ("--token-bytes", args.token_bytes, not args.token_bytes or len(given) == 1, alone),
        ("--val-frac", share, share_is_right, "a number between 0 and 1, and no --val beside it"),
        ("--vocab-size", size, size_is_right, "1 or more, and no --tokenizer beside it"),
        ("--workers", args.workers, args.workers is None or args.workers > 0, "1 or more"),
        ("--val-max-bytes", limit, limit_is_right, "0 or more, and no --val beside it"),
        ("--name", args.name, name_is_right, "letters, digits, . and -"),
        ("--val", args.val, args.sources or not args.val, "a SOURCE of training text beside it"),
    ):
        if not is_right:
            raise UserError(f"{name} {value}: expected {expected}")
    return args


def run(arguments=None):
    """Run the command. Raises UserError for mistakes of the user."""
    args = parse_arguments(arguments)
    if args.token_bytes:
        add_token_bytes(args.token_bytes)
        return
    if args.sources:
        sources, passed_over = find_sources(args.sources, args.only)
        if not args.val:
            print_held_out(list(sources.values()))
        name = args.name or "text"
        limit = VAL_BYTES
    else:
        sources = find_stdlib()
        passed_over = {}
        name = args.name or "embedded"
        limit = EMBEDDED_VAL_BYTES
    val_sources, val_passed_over = find_sources(args.val, args.only)
    for reason, names in [*passed_over.items(), *val_passed_over.items()]:
        print_passed_over(reason, names, len(names))
    if args.only and not any(map(os.path.isdir, [*args.sources, *args.val])):
        raise UserError(f"--only {' '.join(args.only)}: expected a folder among the sources")
    if args.field != "text" and not any(map(has_rows, [*sources, *val_sources])):
        raise UserError(
            f"--field {args.field}: expected a source of .jsonl or .parquet, whose rows have fields"
        )
    if args.val_max_bytes is not None:
        limit = args.val_max_bytes
    request = Request(
        sources=sources,
        val_sources=val_sources,
        name=name,
        tokenizer=args.tokenizer,
        vocab_size=args.vocab_size or VOCAB_SIZE,
        val_frac=args.val_frac or VAL_FRAC,
        val_max_bytes=limit,
        seed=args.seed,
        field=args.field,
    )
    out = args.out or Path(os.path.relpath(Path(__file__).resolve().parent / name))
    manifest = prepare(request, out, args.workers or available_cores())
    print("dropped: " + ", ".join(f"{n:,} {kind}" for kind, n in manifest["dropped"].items()))
    print_summary(out, manifest)


def available_cores():
    """Return how many cores this process may use; a container may have fewer than the machine, or a
    share of their time.
    """
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # Linux
        cores = len(os.sched_getaffinity(0))
    if limit := container_limit("cpu.max"):  # microseconds of CPU time, and of time
        cores = min(cores, max(1, limit[0] // limit[1]))
    return cores


def main():
    """Run the command. A mistake of the user is one line, and the exit code is 2."""
    code = run_command(run)
    if code:
        sys.exit(code)


if __name__ == "__main__":
    main()
