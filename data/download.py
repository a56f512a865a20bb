"""Download published FineWeb shards with their tokenizer and describe them in manifest.json.

    python data/download.py                        validation and 10 training shards: 1 billion tokens, 2 GB
    python data/download.py --train-shards 80      what the challenge trains on
    python data/download.py --variant sp8192       another tokenizer: sp1024, sp4096, sp8192 or gpt2
    python data/download.py --manifest DIR --tokenizer PATH        only describes shards that are already there

The same command again continues a download that was interrupted. Sizes and shard headers are checked,
and the SHA-256 where the server names one. The layout is that of openai/parameter-golf,
data/cached_challenge_fineweb.py (sp1024; sp4096 and sp8192 with the MATCHED_FINEWEB_REPO_ID of the
records that use them) and of KellerJordan/modded-nanogpt, data/cached_fineweb10B.py (gpt2).
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
import contextlib
import hashlib
import http.client
import itertools
import json
import lzma
import math
import os
import re
import resource
import shutil
import ssl
import sys
import tempfile
import time
import unicodedata
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
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


HUB = "https://huggingface.co/datasets"
VARIANTS = {
    "sp1024": f"{HUB}/willdepueoai/parameter-golf/resolve/main/datasets",
    "sp4096": f"{HUB}/kevclark/parameter-golf/resolve/main/datasets",
    "sp8192": f"{HUB}/kevclark/parameter-golf/resolve/main/datasets",
    "gpt2": f"{HUB}/kjj0/fineweb10B-gpt2/resolve/main",
}
TRAIN_SHARDS = 10  # that are downloaded by default
GPT2_SHARDS = 103  # for training, numbered from 1; shard 0 is validation
SHARD_BYTES = 200_001_024  # of 100 million tokens
TRIES = 5  # without a new byte; a machine without a network is told so after 8 seconds
RETRY_SECONDS = 0.5  # doubled with each try
TIMEOUT_SECONDS = 30
READ_TOKENS = 4_000_000  # of a shard that are in memory at once as int64
NETWORK_ERRORS = (
    urllib.error.URLError,
    http.client.HTTPException,
    ConnectionError,
    TimeoutError,
    ssl.SSLError,  # while a body is read; in a connection that fails it is a URLError
)


class KeepDigest(urllib.request.HTTPRedirectHandler):
    """Follows redirects and keeps the SHA-256 that the hub names in one, in X-Linked-ETag."""

    sha256 = None

    def redirect_request(self, request, answer, code, message, headers, url):
        """Return the request to follow a redirect with."""
        digest = (headers.get("X-Linked-ETag") or "").strip('"')
        if re.fullmatch(r"[0-9a-f]{64}", digest):
            self.sha256 = digest
        return super().redirect_request(request, answer, code, message, headers, url)


def size_of(path):
    """Return the bytes of a file, 0 if there is none."""
    return path.stat().st_size if path.exists() else 0


def transfer(url, part):
    """Append what the server has beyond the file `part`; return the SHA-256 that it names, or None.

    A server that does not know ranges sends the whole file, which replaces the part.
    """
    start = size_of(part)
    redirects = KeepDigest()
    headers = {"Range": f"bytes={start}-"} if start else {}
    request = urllib.request.Request(url, headers=headers)
    opener = urllib.request.build_opener(redirects)
    with opener.open(request, timeout=TIMEOUT_SECONDS) as answer:
        if answer.status != 206:
            start = 0
        with open(part, "ab" if start else "wb") as file:
            while block := answer.read(1 << 20):
                file.write(block)
        # Of an answer without a length http.client knows itself where it ends.
        missing = start + int(answer.headers.get("Content-Length", 0)) - size_of(part)
        if missing > 0:
            raise http.client.HTTPException(f"the connection ended {missing} bytes too early")
    return redirects.sha256


def transfer_all(url, part):
    """Do what `transfer` does, again after network errors. Raises UserError if they persist."""
    tries = 0
    while True:
        start = size_of(part)
        try:
            return transfer(url, part)
        except NETWORK_ERRORS as error:
            code = getattr(error, "code", 500)
            if code == 416:  # Range Not Satisfiable: the part is not of this file, or all of it
                part.unlink()
            elif code < 500 and code not in (408, 429):
                raise UserError(
                    f"{url}: the server answers {code} {error.reason}; check --base-url and --variant"
                ) from error
            tries = 1 if size_of(part) > start else tries + 1
            if tries == TRIES:
                reason = getattr(error, "reason", None) or error or type(error).__name__
                hint = "check the network or --base-url"
                if "CERTIFICATE" in str(reason):  # python.org's Python on a Mac, a bare container
                    hint = "if it finds no certificates: export SSL_CERT_FILE=$(python -m certifi)"
                raise UserError(
                    f"cannot reach {urllib.parse.urlsplit(url).netloc} ({reason}); {hint}, then give "
                    "the same command again: what has arrived is kept"
                ) from error
            time.sleep(RETRY_SECONDS * 2 ** (tries - 1))


def find_fault(path, sha256):
    """Return what is wrong with a file that has arrived, or ""; sha256: None if it is unknown."""
    if not size_of(path):
        return "0 bytes"
    if sha256 and sha256 != sha256_file(path):
        return f"its SHA-256 is not {sha256[:12]}…, which the server names"
    if ".bin" in path.suffixes:
        try:
            read_shard(path)
        except UserError as error:
            return str(error)
    return ""


def fetch(url, path):
    """Download a file; it has its name only when it is whole. Raises UserError."""
    part = path.with_name(path.name + ".part")
    for _ in range(2):  # a damaged rest of an earlier run is fetched once more from the start
        fault = find_fault(part, transfer_all(url, part))
        if not fault:
            os.replace(part, path)
            return
        part.unlink()
    raise UserError(f"{url}: arrived damaged twice: {fault}; try again later or another --base-url")


def list_files(base_url, variant, train_shards):
    """Return file name -> address, of validation first. Raises UserError."""
    if variant == "gpt2":
        available = GPT2_SHARDS
        numbers = ["val_000000", *(f"train_{i:06d}" for i in range(1, train_shards + 1))]
        files = {}
        folder = base_url
    else:
        url = f"{base_url}/manifest.json"
        name = f"fineweb10B_{variant}"
        with tempfile.TemporaryDirectory() as temporary:
            path = Path(temporary) / "manifest.json"
            fetch(url, path)
            try:
                published = json.loads(path.read_bytes())
                datasets = {one["name"]: one for one in published["datasets"]}
                tokenizers = {one["name"]: one for one in published["tokenizers"]}
                dataset = datasets[name]
                model = tokenizers[dataset["tokenizer_name"]]["model_path"]
                validation = dataset["stats"]["files_val"]
                available = dataset["stats"]["files_train"]
            except (ValueError, LookupError, TypeError) as error:
                raise UserError(
                    f"{url}: does not describe {name} ({error!r}); check --base-url"
                ) from error
        numbers = [f"val_{i:06d}" for i in range(validation)]
        numbers += [f"train_{i:06d}" for i in range(train_shards)]
        files = {"tokenizer.model": f"{base_url}/{model}"}
        folder = f"{base_url}/datasets/{name}"
    if train_shards > available:
        raise UserError(f"--train-shards {train_shards}: {variant} has {available}")
    return files | {f"fineweb_{n}.bin": f"{folder}/fineweb_{n}.bin" for n in numbers}


def check_variant(variant, files, out):
    """Raise UserError if `out` has the tokenizer of another variant: shards have the same names.

    files: those of `variant`, file name -> address.
    """
    model = out / "tokenizer.model"
    is_other = (out / "gpt2.tiktoken").exists()
    if variant == "gpt2":
        is_other = model.exists()
    elif model.exists():
        with tempfile.TemporaryDirectory() as temporary:
            published = Path(temporary) / model.name
            fetch(files[model.name], published)
            is_other = published.read_bytes() != model.read_bytes()
    if is_other:
        raise UserError(
            f"--variant {variant}: {out} has files of another tokenizer; choose another --out"
        )


def download(base_url, variant, train_shards, out):
    """Fetch the files of a variant that `out` does not have."""
    files = list_files(base_url, variant, train_shards)
    out.mkdir(parents=True, exist_ok=True)
    check_variant(variant, files, out)
    wanted = {name: url for name, url in files.items() if find_fault(out / name, None)}
    size = len(wanted) * SHARD_BYTES
    print(f"{len(files)} files into {out}; {len(wanted)} to fetch, {size / 1e9:.1f} GB", flush=True)
    free = shutil.disk_usage(out).free
    if size > free:
        raise UserError(
            f"--out {out}: {free:,} bytes free, up to {size:,} needed; fewer --train-shards"
        )
    for name, url in wanted.items():
        fetch(url, out / name)
        print(f"fetched {name} ({size_of(out / name):,} bytes)", flush=True)


def describe_split(paths, tokenizer):
    """Return the manifest's part on these shards. Raises UserError if the tokenizer is another."""
    part = {"shards": [], "tokens": 0, "documents": 0, "source_bytes": None, "decoded_bytes": 0}
    table = byte_table(tokenizer)
    previous = tokenizer.bos_id
    for path in paths:
        tokens = read_shard(path)
        for start in range(0, len(tokens), READ_TOKENS):
            ids = tokens[start : start + READ_TOKENS].astype(np.int64)
            if ids.max() >= tokenizer.vocab_size:
                raise UserError(
                    f"shard {path}: token {ids.max()}, expected ids below {tokenizer.vocab_size}; "
                    "another tokenizer wrote it"
                )
            sizes = token_bytes(table, np.append(previous, ids)[:-1], ids)
            part["decoded_bytes"] += int(sizes.sum())
            part["documents"] += int((ids == tokenizer.bos_id).sum())
            previous = ids[-1]
        part["tokens"] += len(tokens)
        shard = {"file": path.name, "tokens": len(tokens), "sha256": sha256_file(path)}
        part["shards"].append(shard)
    return part


def describe(folder, tokenizer_path):
    """Write and print the manifest of shards in `folder` that this tokenizer has written.

    Validation begins with a document. Training may begin inside one: llm.c cuts one stream into
    shards, the first of which is the validation's. Raises UserError for other shards.
    """
    tokenizer = open_tokenizer(tokenizer_path)
    names = set()
    splits = {}
    streams = {}
    for split in ("train", "val"):
        # No ._NAME of a Mac's archive.
        files = sorted(path.name for path in folder.glob("[!.]*.bin"))
        matches = [re.fullmatch(rf"(.+)_{split}(_.+)?\.bin", name) for name in files]
        found = [match for match in matches if match]
        if not found:
            raise UserError(
                f"{folder}: no *_{split}_*.bin shard there, of llm.c's formats; nanoGPT's train.bin "
                "and .npy files are of another: data/prepare.py TEXTS --tokenizer NAME makes shards"
            )
        names |= {match[1] for match in found}
        paths = [folder / match[0] for match in found]
        splits[split] = describe_split(paths, tokenizer)
        streams[split] = TokenStream(paths, tokenizer.vocab_size)
    if len(names) > 1:
        raise UserError(f"{folder}: shards of several data sets ({', '.join(sorted(names))})")
    first = streams["val"].read(0, 1)[0]
    if first != tokenizer.bos_id:
        raise UserError(
            f"{folder}: validation begins with token {first}, expected BOS ({tokenizer.bos_id}); "
            "name the tokenizer that wrote these shards"
        )
    manifest = {
        "format": 1,
        "name": names.pop(),
        "published": True,
        "tokenizer": save_tokenizer(tokenizer, folder),
        "lossless": False,
        **splits,
        "overlap_documents": count_overlap(streams["train"], streams["val"], tokenizer.bos_id),
        "dropped": None,
        "seed": None,
        "yardsticks": yardsticks(
            streams["train"], streams["val"], tokenizer, counted_bytes(splits["val"])
        ),
    }
    write_manifest(folder, manifest)
    print_summary(folder, manifest)


def run(arguments=None):
    """Run the command. Raises UserError for mistakes of the user and for a network that fails."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    option = parser.add_argument
    option("--variant", default="sp1024", help=f"one of {', '.join(VARIANTS)}")
    option("--train-shards", type=int, help=f"of 100 million tokens ({TRAIN_SHARDS})")
    option("--out", type=Path, help="folder (data/datasets/fineweb10B_VARIANT beside this script)")
    option("--base-url", help="where the variant's manifest.json is, or gpt2's shards (the hub)")
    option("--manifest", type=Path, metavar="DIR", help="only describe the shards in DIR")
    option("--tokenizer", metavar="PATH", help="what wrote the shards: a file, a name or `bytes`")
    args = parser.parse_args(arguments)
    is_gpt2 = args.variant == "gpt2"
    if args.variant not in VARIANTS:
        raise UserError(f"--variant {args.variant}: expected one of {', '.join(VARIANTS)}")
    if bool(args.manifest) != bool(args.tokenizer) and not is_gpt2:
        raise UserError("--manifest DIR and --tokenizer PATH go together")
    shards = TRAIN_SHARDS if args.train_shards is None else args.train_shards
    if shards < 1:
        raise UserError(f"--train-shards {shards}: expected 1 or more")
    for name in ("train_shards", "out", "base_url"):
        value = getattr(args, name)
        if args.manifest and value is not None:
            option_name = name.replace("_", "-")
            raise UserError(
                f"--{option_name} {value}: expected no --manifest beside it, which downloads nothing"
            )
    folder = Path(__file__).resolve().parent / "datasets" / f"fineweb10B_{args.variant}"
    out = args.manifest or args.out or Path(os.path.relpath(folder))
    beside = "gpt2" if is_gpt2 else out / "tokenizer.model"
    tokenizer = args.tokenizer or beside
    try:
        if not args.manifest:
            if is_gpt2:
                open_tokenizer(tokenizer)  # its ranks are on another server: fail before gigabytes
            base_url = args.base_url or VARIANTS[args.variant]
            download(base_url.rstrip("/"), args.variant, shards, out)
        describe(out, tokenizer)
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error})") from error


def main():
    """Run the command. A mistake of the user is one line, and the exit code is 2."""
    code = run_command(run)
    if code:
        sys.exit(code)


if __name__ == "__main__":
    main()
