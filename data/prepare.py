"""Prepares text for training: documents -> tokenizer -> shards and manifest.json.

    python data/prepare.py                                    the embedded default: Python's own standard library
    python data/prepare.py texts/ more.jsonl.zst --out data/mine
    python data/prepare.py train.jsonl --val val.jsonl --tokenizer some.model --out data/mine

Sources are .jsonl and .jsonl.zst files (a document is the field `text` of a line), .txt files (a document each) and
folders of these. The work is done in stages under OUT/.work, so that a killed run goes on where it stopped: spool
(bucket files by a seeded hash, the global shuffle), select (duplicates dropped, val apart), tokenizer, shards.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import itertools
import json
import lzma
import math
import multiprocessing.connection
import os
import re
import shutil
import struct
import sys
import sysconfig
import threading
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import tiktoken
import zstandard
from numpy.lib.format import open_memmap
from tiktoken.load import load_tiktoken_bpe, read_file_cached

try:
    from tqdm import tqdm
except ImportError:
    tqdm = None


class UserError(Exception):
    """A mistake of the user's: printed as one line, exit code 2."""


# === shared: tokenizer ===
ROLE_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")

RANK_FILES = "https://openaipublic.blob.core.windows.net/encodings"


@dataclass
class PublishedEncoding:
    """One of OpenAI's encodings: the hash of its rank file, and what that file does not contain.

    The regular expressions are copied from tiktoken_ext/openai_public.py. They split a text into
    the parts within which bytes are merged.
    """

    sha256: str
    split: str  # regular expression
    end_of_text: int  # id of <|endoftext|>, which begins every document here
    vocab_size: int  # with all special tokens and unused ids


ENCODINGS = {
    "gpt2": PublishedEncoding(
        "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930",
        r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s",
        50256,
        50257,
    ),
    "cl100k_base": PublishedEncoding(
        "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+"
        r"| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s",
        100257,
        100277,
    ),
    "o200k_base": PublishedEncoding(
        "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        199999,
        200019,
    ),
}


@dataclass
class Tokenizer:
    """A tokenizer, from `load_tokenizer`, and the bytes that each token stands for.

    A token counts the UTF-8 bytes that it decodes to. After a boundary (a control, unknown or
    unused token) it counts them without the space that some SentencePiece models put before every
    text. Parameter Golf counts in the same way (build_sentencepiece_luts, eval_val).
    """

    file: str  # name of the file that holds the tokenizer; "bytes" needs none
    content: bytes  # of that file; its SHA-256 tells tokenizers apart
    bos_id: int
    pieces: list  # bytes that each token decodes to, b"" for boundaries
    encode: Callable  # text -> ids without BOS; special tokens in a text are plain text
    roles: dict  # ROLE_TOKENS -> ids; {} if the tokenizer has none
    drops_space: np.ndarray | bool = False  # (V,) bool, loses its first space after a boundary

    def __post_init__(self):
        self.sha256 = hashlib.sha256(self.content).hexdigest()
        self.vocab_size = len(self.pieces)
        self.byte_counts = np.fromiter(map(len, self.pieces), int)  # (V,) int64
        self.boundary = self.byte_counts == 0  # (V,) bool
        self.drops_space = np.broadcast_to(self.drops_space, self.vocab_size)


def load_tokenizer(path):
    """Return the Tokenizer of a SentencePiece file or a rank file NAME.tiktoken, of the published
    encoding NAME, or the built-in one, `bytes`. Raises UserError.
    """
    path = Path(path)
    name = path.name.removesuffix(".tiktoken")
    if name == "bytes":
        return byte_tokenizer()
    try:
        if name in ENCODINGS:
            return tiktoken_tokenizer(path, name)
        return sentencepiece_tokenizer(path)
    except (OSError, ValueError, RuntimeError) as error:  # missing, damaged or without BOS
        raise UserError(
            f"tokenizer {path}: {error}; must be a SentencePiece model with a BOS token, bytes, or "
            f"NAME or NAME.tiktoken of {[*ENCODINGS]}"
        ) from error


def byte_tokenizer():
    """Return the built-in tokenizer: pad, BOS, EOS and unknown, then 256 bytes, then 4 roles."""
    pieces = [b""] * 4 + [bytes([byte]) for byte in range(256)] + [b""] * 4
    return Tokenizer(
        "bytes",
        b"underpar bytes 264",
        1,
        pieces,
        lambda text: [4 + byte for byte in text.encode()],
        {role: 260 + i for i, role in enumerate(ROLE_TOKENS)},
    )


def tiktoken_tokenizer(path, name):
    """Return the encoding NAME, from its rank file NAME.tiktoken or from OpenAI's server."""
    published = ENCODINGS[name]
    source = str(path)
    if not path.suffix:
        source = f"{RANK_FILES}/{name.replace('gpt2', 'r50k_base')}.tiktoken"
    # Both look into tiktoken's cache first and raise ValueError if the hash is another.
    content = read_file_cached(source, published.sha256)
    ranks = load_tiktoken_bpe(source, published.sha256)
    pieces = [b""] * published.vocab_size  # special tokens and unused ids decode to nothing
    for piece, rank in ranks.items():
        pieces[rank] = piece
    # Without special tokens: what looks like one in a text is plain text.
    bpe = tiktoken.Encoding(name, pat_str=published.split, mergeable_ranks=ranks, special_tokens={})
    return Tokenizer(
        f"{name}.tiktoken", content, published.end_of_text, pieces, bpe.encode_ordinary, {}
    )


def sentencepiece_tokenizer(path):
    """Return the tokenizer of a SentencePiece model file."""
    content = path.read_bytes()
    model = sentencepiece.SentencePieceProcessor(model_proto=content)
    if model.bos_id() < 0:
        raise ValueError("empty, or without the BOS token of every document")
    pieces = []
    drops_space = []
    roles = {}
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
        # Only control tokens cannot be written in a text, so that no user can forge a role.
        if model.is_control(i) and name in ROLE_TOKENS:
            roles[name] = i
    return Tokenizer(
        "tokenizer.model", content, model.bos_id(), pieces, model.encode, roles, drops_space
    )


def sha256_file(path):
    """Return the SHA-256 of a file in hexadecimal digits."""
    # Shards and checkpoints are mapped, not read into memory.
    return hashlib.sha256(np.memmap(path, mode="r")).hexdigest()


# === end: tokenizer ===


# === shared: data ===
# llm.c's formats: magic number and version -> type of the tokens, uint32 for vocabularies > 65,536
SHARD_KINDS = {(20240520, 1): "<u2", (20240801, 7): "<u4"}


def token_bytes(tokenizer, prev, ids):
    """Return the bytes of each token of `ids` given the token before it, int64, same shape."""
    return tokenizer.byte_counts[ids] - (tokenizer.drops_space[ids] & tokenizer.boundary[prev])


def read_shard(path):
    """Return the tokens of a shard, a memory map (N,). Raises UserError if missing or damaged."""
    if not os.path.isfile(path):
        raise UserError(f"shard {path}: no such file")
    header = np.fromfile(path, "<i4", 3)  # magic number, version, number of tokens
    kind = SHARD_KINDS.get(tuple(header[:2]))
    if not kind or os.path.getsize(path) != 1024 + np.dtype(kind).itemsize * int(header[-1]):
        raise UserError(f"shard {path}: truncated or damaged, or no shard of llm.c's formats")
    return np.memmap(path, kind, "r", offset=1024)


def load_manifest(data_path):
    """Return `manifest.json` of a data folder, a dict. Raises UserError if there is none."""
    path = Path(data_path) / "manifest.json"
    try:
        manifest = json.loads(path.read_bytes())
        if manifest.get("format") == 1:
            return manifest
    except (OSError, ValueError):
        pass
    raise UserError(
        f"{path}: no manifest of format 1; data/prepare.py makes one, data/download.py "
        "--manifest too"
    )


class TokenStream:
    """Shards read as one circular stream of tokens.

    Raises UserError if a shard changes while in use or has an id that is not below `vocab_size`.
    `hold_out` sets `windows`, the numbers of the windows to train on.
    """

    def __init__(self, paths, vocab_size):
        self.paths = paths
        self.vocab_size = vocab_size
        self.shards = [read_shard(path) for path in paths]
        self.times = [os.path.getmtime(path) for path in paths]
        self.starts = np.cumsum([0, *map(len, self.shards)])  # (shards + 1,)

    def __len__(self):
        return self.starts[-1]

    def read(self, start, count):
        """Return `count` tokens from position `start` on, int64; after the last, the first."""
        parts = []
        while count:
            start %= len(self)
            shard = np.searchsorted(self.starts, start, "right") - 1
            path = self.paths[shard]
            part = self.shards[shard][start - self.starts[shard] :][:count]
            # Reading on in a mapped file that was cut short would kill the process (SIGBUS).
            if os.path.getmtime(path) != self.times[shard] or part.max() >= self.vocab_size:
                raise UserError(f"shard {path}: was changed while in use, or has a wrong token id")
            parts.append(part)
            start += len(part)
            count -= len(part)
        return np.concatenate(parts, dtype=np.int64)


def check_dataset(data_path, tokenizer, manifest):
    """Return the TokenStreams of training and validation.

    Raises UserError unless tokenizer and shards are the manifest's.
    """
    where = Path(data_path) / "manifest.json"
    if tokenizer.sha256 != manifest["tokenizer"]["sha256"]:
        raise UserError(f"{where}: shards of another tokenizer")
    if manifest["overlap_documents"] and not manifest["published"]:
        raise UserError(f"{where}: validation documents also stand in training")
    streams = []
    for split in ("train", "val"):
        shards = manifest[split]["shards"]
        paths = [where.with_name(shard["file"]) for shard in shards]
        stream = TokenStream(paths, tokenizer.vocab_size)
        if len(stream) != manifest[split]["tokens"]:
            raise UserError(f"{where}: has another number of tokens than the shards of {split}")
        streams.append(stream)
    # Training shards are not hashed, because they may be many gigabytes.
    for path, shard in zip(paths, shards, strict=True):
        if sha256_file(path) != shard["sha256"]:
            raise UserError(f"shard {path}: its SHA-256 is not the manifest's")
    return streams


def document_hashes(stream, bos_id):
    """Yield a hash of the tokens of every document, in order.

    Tokens before the first BOS belong to no document: a published shard may begin inside one.
    """
    begins = []
    for shard, start in zip(stream.shards, stream.starts, strict=False):
        begins.extend(start + np.flatnonzero(shard == bos_id))
    for begin, end in itertools.pairwise([*begins, len(stream)]):
        yield hashlib.sha256(stream.read(begin, end - begin)).digest()


# === end: data ===


# === shared: text ===
def with_roles(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer, and where it has no role tokens four more for them; its file and SHA-256 stay."""
    if tokenizer.roles:
        return tokenizer
    pieces, drops = [*tokenizer.pieces, *[b""] * len(ROLE_TOKENS)], np.append(tokenizer.drops_space, [False] * 4)
    roles = {role: tokenizer.vocab_size + i for i, role in enumerate(ROLE_TOKENS)}
    return replace(tokenizer, pieces=pieces, drops_space=drops, roles=roles)


def decode_bytes(tokenizer: Tokenizer, ids: list[int] | np.ndarray) -> bytes:
    """The bytes of a token sequence that starts a document; `token_bytes` counts exactly these."""
    ids = np.asarray(ids, dtype=np.int64)
    drops = tokenizer.drops_space[ids] & tokenizer.boundary[np.append(tokenizer.bos_id, ids)[:-1]]
    return b"".join([tokenizer.pieces[i][drop:] for i, drop in zip(ids.tolist(), drops.tolist(), strict=True)])


def chat_ids(tokenizer: Tokenizer, prompt: str) -> tuple[list[int], int]:
    """The ids of a prompt, a document from its start, and the token that ends the answer to it: a user's turn where the
    tokenizer has role tokens; else a line, and a BOS, which begins another document, ends the answer.
    """
    roles = tokenizer.roles
    if not roles:
        return [tokenizer.bos_id, *tokenizer.encode(prompt + "\n")], tokenizer.bos_id
    turn = roles["<|user|>"], *tokenizer.encode(prompt), roles["<|end|>"], roles["<|assistant|>"]
    return [tokenizer.bos_id, *turn], roles["<|end|>"]


def completion(tokenizer: Tokenizer, prompt: list[int], ids: list[int]) -> str:
    """The text of `ids`, sampled after the ids of a prompt; role tokens and BOS are no text."""
    return decode_bytes(tokenizer, [*prompt, *ids])[len(decode_bytes(tokenizer, prompt)):].decode(errors="replace")
# === end: text ===


# === shared: preparation ===
YARDSTICK_TOKENS = 20_000_000  # training tokens the count models see at most: they take up to 100 bytes a token


def save_tokenizer(tokenizer: Tokenizer, folder: str | Path) -> str:
    """Writes the file that gives the tokenizer back into `folder`; its name, or `bytes`, which needs no file."""
    if tokenizer.file != "bytes":
        (Path(folder) / tokenizer.file).write_bytes(tokenizer.content)
    return tokenizer.file


def write_shard(path: str | Path, tokens: np.ndarray, vocab_size: int = 1 << 16) -> None:
    """Writes `tokens` (N,) as one shard, uint32 for a vocabulary above 65,536. Raises UserError for ids too large."""
    (magic, version), kind = list(SHARD_KINDS.items())[vocab_size > 1 << 16]
    packed = np.asarray(tokens).astype(kind)
    if not np.array_equal(packed, tokens):
        raise UserError(f"{path}: token ids {tokens.min()}..{tokens.max()} do not fit {packed.dtype}")
    header = np.array([magic, version, len(tokens)] + [0] * 253, dtype="<i4")
    np.concatenate([header.view(kind), packed]).tofile(path)


def count_model_nats(train: np.ndarray, val: np.ndarray, vocab_size: int) -> tuple[float, float]:
    """Nats of bigram and trigram count models of `train` on val[1:], Witten-Bell smoothed down to uniform.

    p(t | h) = (c(h t) + n(h) p(t | h')) / (c(h) + n(h)), n(h) the number of different tokens seen after h, h' one
    token shorter (Witten and Bell 1991, method C). The scale to read a score on: no gradient made these.
    """
    base = vocab_size + 1

    def grams(tokens: np.ndarray, order: int) -> np.ndarray:  # keys of the last `order` tokens at positions >= 1
        padded = np.append(vocab_size, tokens)
        return sum(padded[2 - back : len(padded) - back] * base**back for back in range(order))

    def look_up(keys: np.ndarray, counts: np.ndarray, wanted: np.ndarray, missing: int) -> np.ndarray:
        at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        return np.where(keys[at] == wanted, counts[at], missing)

    p, nats = np.full(len(val) - 1, 1.0 / vocab_size), []
    for order in (1, 2, 3):
        keys, counts = np.unique(grams(train, order), return_counts=True)
        histories, first, kinds = np.unique(keys // base, return_index=True, return_counts=True)
        wanted = grams(val, order)
        different = look_up(histories, kinds, wanted // base, 1)  # 1 and no counts after an unseen history: p stays
        seen = look_up(histories, np.add.reduceat(counts, first), wanted // base, 0)
        p = (look_up(keys, counts, wanted, 0) + different * p) / (seen + different)
        nats.append(float(-np.log(p).sum()))
    return nats[1], nats[2]


def yardsticks(train: TokenStream, val: TokenStream, tokenizer: Tokenizer) -> dict[str, float]:
    """Bits per byte of the validation bytes by count models of the training tokens and by general compressors."""
    tokens = val.read(0, len(val))
    print(f"count models and compressors on {len(tokens):,} validation tokens; minutes where they are many", flush=True)
    starts = np.flatnonzero(tokens == tokenizer.bos_id)[::1000]  # whole documents at a time: decoding takes memory
    text = b"".join(decode_bytes(tokenizer, part) for part in np.split(tokens, starts[1:]))
    to_bpb = 1 / math.log(2) / len(text)
    bigram, trigram = count_model_nats(train.read(0, min(len(train), YARDSTICK_TOKENS)), tokens, tokenizer.vocab_size)
    zstd = zstandard.ZstdCompressor(level=22).compress(text)
    return {"bigram_bpb": bigram * to_bpb, "trigram_bpb": trigram * to_bpb,
            "zstd22_bpb": 8 * len(zstd) / len(text), "xz_bpb": 8 * len(lzma.compress(text, preset=9)) / len(text)}
# === end: preparation ===


SUFFIXES = (".jsonl", ".jsonl.zst", ".txt")
GRAM_WORDS = 8  # near duplicates share over half of their sequences of this many words
SHARD_TOKENS = 100_000_000  # as the published FineWeb shards
SAMPLE_BYTES = 10_000_000  # of training text a tokenizer is trained on
BUCKETS = 64  # one of them stands in memory at once while documents are put in order
CHUNK_BYTES = 2_000_000  # of text in one job
VAL_BYTES = 20_000_000  # most validation text that a split makes
EMBEDDED_BYTES, EMBEDDED_VAL_BYTES = 8_000_000, 500_000  # of the standard library: enough text, most validation
NOT_STDLIB, STDLIB_TESTS = {"site-packages", "dist-packages", "__pycache__"}, {"test", "tests", "idle_test"}
LOSSLESS_PROBE = "  two  spaces\n\n\ttab\r\nﬁ é \U0001f600 \ue000 "  # normalising tokenizers change this
MOST_SOURCES = 32  # named apart in the manifest

Document = tuple[bytes, bytes, int]  # (key, text as UTF-8, number of its source); documents are ordered by their keys


@dataclass(frozen=True)
class Request:
    """What is to be prepared; everything here and the sources' contents decide the bytes of the result."""

    sources: dict[Path, str]  # file -> its name in the manifest
    val_sources: dict[Path, str]  # empty: the sources are split by hash
    out: Path
    name: str
    tokenizer: str  # "" to train one
    vocab_size: int
    val_frac: float
    val_max_bytes: int  # 0: no limit
    seed: int

    def identity(self) -> dict:
        """What tells two requests apart, as JSON; reads every source once for its SHA-256."""
        digest = hashlib.sha256()
        for split, sources in (("train", self.sources), ("val", self.val_sources)):
            for path, name in sources.items():
                sha256 = sha256_file(path) if path.stat().st_size else hashlib.sha256().hexdigest()
                digest.update(f"{split} {name} {sha256}\n".encode())
        tokenizer = load_tokenizer(self.tokenizer).sha256 if self.tokenizer else "trained"
        split = {} if self.val_sources else {"val_frac": self.val_frac, "val_max_bytes": self.val_max_bytes}
        return {"format": 1, "name": self.name, "seed": self.seed, "sources_sha256": digest.hexdigest(),
                "tokenizer": tokenizer} | ({} if self.tokenizer else {"vocab_size": self.vocab_size}) | split


def progress(items: Iterable, label: str) -> Iterable:
    """`items` behind a progress bar where tqdm is installed."""
    return items if tqdm is None else tqdm(items, desc=label, leave=False, disable=None)


def write_json(path: Path, content: dict) -> None:
    """Writes a JSON file beside and renames it."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(part, path)


def start_worker(load: Callable[[str | Path], Any], path: str | Path) -> None:
    """A worker's beginning: LOADED is what its jobs share, and it ends with its parent, also a killed one."""

    def leave_with_parent() -> None:
        multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
        os._exit(1)

    global LOADED
    LOADED = load(path)
    if multiprocessing.parent_process():
        threading.Thread(target=leave_with_parent, daemon=True).start()


def run_jobs(workers: int, work: Callable, jobs: Iterable, load: Callable, path: str | Path) -> Iterator:
    """`work(job)` for each job, in order. At most four jobs per worker are under way, which bounds the memory."""
    if workers == 1:
        start_worker(load, path)
        yield from map(work, jobs)
        return
    with ProcessPoolExecutor(workers, initializer=start_worker, initargs=(load, path)) as pool:
        waiting = deque()
        for job in jobs:
            waiting.append(pool.submit(work, job))
            if len(waiting) >= 4 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def find_sources(arguments: list[str]) -> dict[Path, str]:
    """The files that the arguments name, folders searched, in a fixed order, each with its name in the manifest."""
    sources: dict[Path, str] = {}
    for root in map(Path, arguments):
        if not root.exists():
            raise UserError(f"source {root}: no such file or folder")
        paths = [root] if root.is_file() else sorted(path for path in root.rglob("*") if path.is_file())
        found = {p: p.relative_to(root.parent).as_posix() for p in paths if p.name.endswith(SUFFIXES)}
        if not found:
            raise UserError(f"source {root}: no text in it that can be read; {', '.join(SUFFIXES)} files can")
        sources |= found
    return sources


def number_sources(files: dict[Path, str], name: str) -> tuple[list[str], dict[Path, int]]:
    """The sources that validation documents are counted to, and for each file the number of its source. A source is a
    file or the first folder in the folder named on the command line; where that makes more than MOST_SOURCES, its loose
    files together; where it still does, all of it; at last everything, as `name`.
    """
    parts = [re.sub(r"\.(jsonl|jsonl\.zst|txt|py)$", "", file).split("/") for file in files.values()]
    levels = [[part[len(part) > depth] for part in parts] for depth in (1, 2, sys.maxsize)] + [[name] * len(parts)]
    own = next(level for level in levels if len(set(level)) <= MOST_SOURCES)
    names = sorted(set(own))
    return names, {path: names.index(source) for path, source in zip(files, own, strict=True)}


def find_stdlib() -> tuple[dict[Path, str], str]:
    """The standard library's *.py files with their names, tests only up to EMBEDDED_BYTES; a sentence on them."""
    root, total, skipped = Path(sysconfig.get_paths()["stdlib"]), 0, 0
    sources: dict[Path, str] = {}
    parts = {path: set(path.relative_to(root).parts) for path in sorted(root.rglob("*.py"))}
    for path in sorted(parts, key=lambda path: bool(parts[path] & STDLIB_TESTS)):
        if parts[path] & NOT_STDLIB or parts[path] & STDLIB_TESTS and total >= EMBEDDED_BYTES:
            continue
        try:
            total += len(path.read_bytes().decode("utf-8").encode("utf-8"))
            sources[path] = f"stdlib/{path.relative_to(root).as_posix()}"
        except (UnicodeDecodeError, OSError):
            skipped += 1
    if total < 1_000_000:
        raise UserError(f"standard library {root}: only {total} bytes of .py files; name a SOURCE of text instead")
    return sources, (f"the standard library of Python {sys.version.split()[0]}: {len(sources)} files, {total:,} bytes "
                     f"({skipped} files that are not UTF-8 left out)")


def read_documents(path: Path) -> Iterator[str]:
    """The documents of one source file. Raises UserError naming file and line."""
    if path.suffix in (".txt", ".py"):
        try:
            yield path.read_bytes().decode("utf-8")  # bytes, because text mode would change the line ends
        except UnicodeDecodeError as error:
            raise UserError(f"source {path}: not UTF-8 at byte {error.start}; convert it or leave it out") from error
        return
    number = 0
    with open(path, "rb") as lines:
        if path.suffix == ".zst":
            unpacker = zstandard.ZstdDecompressor(max_window_size=1 << 31)
            lines = io.BufferedReader(unpacker.stream_reader(lines, read_across_frames=True), 1 << 20)
        try:
            for number, line in enumerate(lines, 1):
                row = json.loads(line) if line.strip() else {"text": ""}
                if not isinstance(row, dict) or not isinstance(row.get("text"), str):
                    raise UserError(f"source {path}, line {number}: not an object with a field `text` that is a string")
                yield row["text"]
        except zstandard.ZstdError as error:
            raise UserError(f"source {path}: damaged zstd data after line {number} ({error})") from error
        except ValueError as error:
            raise UserError(f"source {path}, line {number}: not JSON ({error})") from error


def packed(key: bytes, text: bytes, source: int) -> bytes:
    """A document as a record: 32 bytes of key, 8 of length, 2 of source, the text."""
    return key + struct.pack("<QH", len(text), source) + text


def read_records(paths: Iterable[Path]) -> Iterator[Document]:
    """The documents of files of records."""
    for path in paths:
        with open(path, "rb") as file:
            while head := file.read(42):
                size, source = struct.unpack("<QH", head[32:])
                yield head[:32], file.read(size), source


def batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """The documents in lists of about CHUNK_BYTES of text."""
    batch, size = [], 0
    for document in documents:
        batch.append(document)
        size += len(document[1])
        if size >= CHUNK_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def spool(request: Request, work: Path) -> None:
    """Stage 1: every document into `spool/NNN.train` or `.val`, the bucket by its key, SHA-256(seed, SHA-256(text)):
    equal texts meet in one bucket, and the order of keys is the global shuffle. The side is the document's own SHA-256
    against the validation fraction, or the option that named its file.
    """
    done, part = work / "spool", work / "spool.part"
    if done.exists():
        return
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    sources = [(path, "val") for path in request.val_sources] + [(path, "train") for path in request.sources]
    _, numbers = number_sources(request.val_sources or request.sources, request.name)
    counts = {"documents": 0, "empty": 0, "not_lossless": 0}
    files = {(b, side): open(part / f"{b:03d}.{side}", "wb") for b in range(BUCKETS) for side in ("train", "val")}
    for path, side in progress(sources, "reading"):
        for text in read_documents(path):
            counts["documents"] += 1
            if not text.strip():
                counts["empty"] += 1
                continue
            try:
                data = text.encode("utf-8")
            except UnicodeEncodeError:  # a lone surrogate from a JSON escape: no bytes to give back
                counts["not_lossless"] += 1
                continue
            digest = hashlib.sha256(data).digest()
            key = hashlib.sha256(b"%d:" % request.seed + digest).digest()
            if not request.val_sources:
                side = "val" if int.from_bytes(digest[:8], "big") < request.val_frac * 2**64 else "train"
            bucket = files[int.from_bytes(key[:4], "big") * BUCKETS >> 32, side]
            bucket.write(packed(key, data, numbers.get(path, 0)))
    for file in files.values():
        file.close()
    write_json(part / "counts.json", counts)
    os.replace(part, done)


def grams(data: bytes) -> np.ndarray:
    """Hashes of the distinct 8-word sequences of a text, sorted uint64; a shorter text is one sequence."""
    text = data.decode("utf-8")
    words = re.findall(r"\w+", text.lower()) or ["".join(text.split())]
    hashes = np.array([zlib.crc32(word.encode("utf-8")) for word in words], dtype=np.uint64)
    total = np.zeros(count := max(1, len(words) - GRAM_WORDS + 1), dtype=np.uint64)
    for i in range(min(GRAM_WORDS, len(words))):
        total = total * np.uint64(0x9E3779B97F4A7C15) + hashes[i : i + count]
        total ^= total >> np.uint64(29)
    return np.unique(total)


def recount_grams(data: bytes) -> np.ndarray:
    """What `grams` does, written a second time for the recount: BLAKE2b of the joined words."""
    text = data.decode("utf-8")
    words = [match.group() for match in re.finditer(r"\w+", text.lower())] or ["".join(text.split())]
    joined = {" ".join(words[i : i + GRAM_WORDS]) for i in range(max(1, len(words) - GRAM_WORDS + 1))}
    hashes = [hashlib.blake2b(gram.encode("utf-8"), digest_size=8).digest() for gram in joined]
    return np.unique(np.frombuffer(b"".join(hashes), dtype="<u8"))


def write_index(path: Path, documents: list[np.ndarray]) -> np.ndarray:
    """Writes the 8-grams of all documents sorted, repeats kept; returns the document's number of each of them."""
    everything = np.concatenate(documents)
    order = np.argsort(everything, kind="stable")
    np.save(path, everything[order])
    return np.repeat(np.arange(len(documents)), [len(own) for own in documents])[order]


def match_index(job: tuple[Callable, list[Document]]) -> list[tuple[int, int, np.ndarray]]:
    """For each document of the job: its number of 8-grams, how many the index holds, and their places there."""
    make, documents = job
    out = []
    for _, text, _ in documents:
        own = make(text)
        first, last = np.searchsorted(LOADED, own), np.searchsorted(LOADED, own, side="right")
        found = first < last
        places = [np.arange(*ends) for ends in zip(first[found], last[found], strict=True)]
        out.append((len(own), len(places), np.concatenate([np.empty(0, dtype=np.int64), *places])))
    return out


def read_spool(spooled: Path, *sides: str) -> Iterator[Document]:
    """The distinct documents of the sides, in the order of keys, a bucket at a time; of equal ones the first source."""
    for bucket in range(BUCKETS):
        found = sorted(set(read_records(spooled / f"{bucket:03d}.{side}" for side in sides)))
        yield from (next(equal) for _, equal in itertools.groupby(found, key=lambda document: document[0]))


def take_validation(request: Request, spooled: Path) -> list[Document]:
    """The validation documents in order: all that a --val source holds, else the split's up to the byte limit."""
    taken, size = [], 0
    for document in read_spool(spooled, "val"):
        size += len(document[1])
        if not request.val_sources and 0 < request.val_max_bytes < size:
            break
        taken.append(document)
    return taken


def select(request: Request, work: Path, workers: int) -> dict:
    """Stage 2: the documents to keep, in order, into `kept/train_NNNNNN` and `kept/val_NNNNNN`; returns the counts.
    A training document is dropped when over half of its 8-grams stand in validation. A validation document over half
    of whose 8-grams stand in the training documents then left is dropped too; with --val, where validation stays as
    given, the training document that would bring it over half is dropped instead.
    """
    done, part, spooled = work / "kept", work / "kept.part", work / "spool"
    if done.exists():
        return json.loads((done / "counts.json").read_text())
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    counts = json.loads((spooled / "counts.json").read_text())
    val = take_validation(request, spooled)
    if not val:
        raise UserError(f"no validation document among {counts['documents']} documents; raise --val-frac "
                        f"{request.val_frac} and --val-max-bytes {request.val_max_bytes}, or give --val")
    val_keys, val_grams = {key for key, _, _ in val}, [grams(text) for _, text, _ in val]
    owners = write_index(part / "index.npy", val_grams)
    sizes = np.array([len(own) for own in val_grams])
    covered = np.zeros(len(val), dtype=np.int64)  # 8-grams of each validation document that stand in training so far
    seen = np.zeros(len(owners), dtype=np.bool_)
    distinct, train_documents = len(val), 0
    # What the byte limit left out of the split's validation side is training text.
    rest = (document for document in read_spool(spooled, "val", "train") if document[0] not in val_keys)
    ahead, behind = itertools.tee(batches(rest))
    results = run_jobs(workers, match_index, ((grams, batch) for batch in ahead), open_memmap, part / "index.npy")
    for number, (batch, matches) in enumerate(zip(behind, progress(results, "selecting"), strict=True)):
        kept = []
        for document, (size, shared, places) in zip(batch, matches, strict=True):
            new = places[~seen[places]]
            after = covered + np.bincount(owners[new], minlength=len(val))
            if 2 * shared <= size and not (request.val_sources and np.any(2 * after > sizes)):
                kept.append(document)
                covered, seen[new] = after, True
        (part / f"train_{number:06d}").write_bytes(b"".join(packed(*document) for document in kept))
        distinct += len(batch)
        train_documents += len(kept)
    kept = [document for document, over in zip(val, 2 * covered > sizes, strict=True) if not over]
    counts["exact_duplicates"] = counts["documents"] - counts["empty"] - counts["not_lossless"] - distinct
    counts["near_duplicates"] = distinct - train_documents - len(kept)
    for number, batch in enumerate(batches(kept)):
        (part / f"val_{number:06d}").write_bytes(b"".join(packed(*document) for document in batch))
    if not train_documents or not kept:
        raise UserError(f"no {'validation' if train_documents else 'training'} document is left of "
                        f"{counts['documents']} ({counts['exact_duplicates']} exact, {counts['near_duplicates']} near "
                        "duplicates); give more text or another --val-frac")
    write_json(part / "counts.json", counts)
    os.replace(part, done)
    return counts


def recount_overlap(work: Path, workers: int) -> int:
    """Validation and training documents kept that share over half of their 8-grams with the other side; to be 0."""
    val = [recount_grams(text) for _, text, _ in read_records(sorted((work / "kept").glob("val_*")))]
    paths, overlap = sorted((work / "kept").glob("train_*")), 0
    owners = write_index(work / "recount.npy", val)
    seen = np.zeros(len(owners), dtype=np.bool_)
    jobs = ((recount_grams, list(read_records([path]))) for path in paths)
    for matches in progress(run_jobs(workers, match_index, jobs, open_memmap, work / "recount.npy"), "recounting"):
        for size, shared, places in matches:
            overlap += shared > size / 2
            seen[places] = True
    covered = Counter(owners[seen].tolist())
    return overlap + sum(covered[number] > len(own) / 2 for number, own in enumerate(val))


def sample_lines(paths: list[Path]) -> Iterator[str]:
    """The lines of the first SAMPLE_BYTES of text, without line ends; the trainer leaves out lines over 4,192 bytes."""
    size = 0
    for _, text, _ in read_records(paths):
        if size >= SAMPLE_BYTES:
            return
        size += len(text)
        for line in text.decode("utf-8").split("\n"):
            yield from (line[start : start + 1000] for start in range(0, len(line), 1000))


def train_tokenizer(work: Path, vocab_size: int) -> Path:
    """Stage 3: a lossless SentencePiece BPE model of a sample of the (shuffled) training text, tokenizer.model."""
    done, model = work / "tokenizer.model", io.BytesIO()
    if done.exists():
        return done
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=sample_lines(sorted((work / "kept").glob("train_*"))), model_writer=model,
            model_type="bpe", vocab_size=vocab_size, byte_fallback=True, normalization_rule_name="identity",
            add_dummy_prefix=False, remove_extra_whitespaces=False, allow_whitespace_only_pieces=True,
            user_defined_symbols=["\n"], control_symbols=list(ROLE_TOKENS), pad_id=0, bos_id=1, eos_id=2, unk_id=3,
            character_coverage=0.999, num_threads=1, minloglevel=2)
    except (RuntimeError, OSError) as error:
        raise UserError(f"--vocab-size {vocab_size}: no such tokenizer from this text; give another, more text, or "
                        f"--tokenizer bytes ({' '.join(str(error).split())[-160:]})") from error
    (work / "tokenizer.part").write_bytes(model.getvalue())
    os.replace(work / "tokenizer.part", done)
    return done


def tokenize(job: tuple[Path, bool]) -> tuple[np.ndarray, list[int], Counter]:
    """Of a file's documents that a lossless tokenizer gives back exactly BOS + tokens and the sources; all counts."""
    path, lossless = job
    tokens, sources, counts = [], [], Counter()
    for _, text, source in read_records([path]):
        ids = LOADED.encode(text.decode("utf-8"))
        decoded = decode_bytes(LOADED, ids)
        if not decoded or lossless and decoded != text:
            counts["not_lossless"] += 1
            continue
        tokens += [LOADED.bos_id, *ids]
        sources.append(source)
        counts.update(documents=1, source_bytes=len(text), decoded_bytes=len(decoded))
    return np.array(tokens, dtype="<u4" if LOADED.vocab_size > 1 << 16 else "<u2"), sources, counts


def write_split(request: Request, work: Path, split: str, tokenizer: Tokenizer, workers: int, lossless: bool) -> dict:
    """Stage 4: `kept/SPLIT_*` as shards of SHARD_TOKENS; a document may run on into the next. The manifest's part."""
    shards, waiting, document_sources, counts = [], np.empty(0, dtype="<u2"), [], Counter()

    def write(tokens: np.ndarray) -> None:
        path = request.out / f"{request.name}_{split}_{len(shards):06d}.bin"
        write_shard(work / "shard.part", tokens, tokenizer.vocab_size)
        os.replace(work / "shard.part", path)
        shards.append({"file": path.name, "tokens": len(tokens), "sha256": sha256_file(path)})

    jobs = [(path, lossless) for path in sorted((work / "kept").glob(f"{split}_*"))]
    results = run_jobs(workers, tokenize, jobs, load_tokenizer, request.out / tokenizer.file)
    for tokens, sources, found in progress(results, f"tokenizing {split}"):
        counts += found
        document_sources += sources
        waiting = np.concatenate([waiting, tokens])
        while len(waiting) >= SHARD_TOKENS:
            write(waiting[:SHARD_TOKENS])
            waiting = waiting[SHARD_TOKENS:]
    if len(waiting):
        write(waiting)
    if not shards:
        raise UserError(f"the tokenizer gives back none of the {counts['not_lossless']} {split} documents exactly; "
                        "use another tokenizer or text")
    return {"shards": shards, "tokens": sum(shard["tokens"] for shard in shards)} | {
        key: counts[key] for key in ("documents", "source_bytes", "decoded_bytes", "not_lossless")
    } | ({"document_sources": document_sources} if split == "val" else {})


def claim_folder(request: Request, identity: dict, work: Path) -> dict | None:
    """The manifest of this request if it is finished, else None, the folder ready; UserError for another request's."""
    remedy, state = f"delete {request.out} or choose another --out", work / "request.json"
    mark = identity | {"records": 2}  # version of the files of documents, which a run goes on with
    if (request.out / "manifest.json").exists():
        manifest = load_manifest(request.out)
        if manifest.get("request") != identity:
            raise UserError(f"{request.out}: holds data of another request (other sources or options); {remedy}")
        check_dataset(request.out, load_tokenizer(request.out / manifest["tokenizer"]["file"]), manifest)
        print(f"{request.out}: already holds exactly this data; nothing to do")
        shutil.rmtree(work, ignore_errors=True)
        return manifest
    if state.exists():
        if json.loads(state.read_text()) != mark:
            raise UserError(f"{request.out}: holds the unfinished data of another request; {remedy}")
        print(f"going on with the unfinished run in {request.out}")
        return None
    if any(request.out.glob("*.bin")):
        raise UserError(f"{request.out}: holds .bin files without a manifest; {remedy}")
    try:
        work.mkdir(parents=True, exist_ok=True)
        write_json(state, mark)
    except OSError as error:
        raise UserError(f"--out {request.out}: cannot be written ({error.strerror})") from error
    return None


def prepare(request: Request, workers: int) -> dict:
    """Does what the request says, or finds it done; returns the manifest."""
    work, identity = request.out / ".work", request.identity()
    if finished := claim_folder(request, identity, work):
        return finished
    spool(request, work)
    counts = select(request, work, workers)
    overlap = recount_overlap(work, workers)
    if overlap:
        raise UserError(f"{request.out}: {overlap} documents stand in training and validation, expected 0; not written")
    tokenizer = load_tokenizer(request.tokenizer or train_tokenizer(work, request.vocab_size))
    save_tokenizer(tokenizer, request.out)
    lossless = decode_bytes(tokenizer, tokenizer.encode(LOSSLESS_PROBE)) == LOSSLESS_PROBE.encode("utf-8")
    splits = {split: write_split(request, work, split, tokenizer, workers, lossless) for split in ("train", "val")}
    counts["not_lossless"] += sum(part.pop("not_lossless") for part in splits.values())
    manifest = {
        "format": 1, "name": request.name, "published": False,
        "tokenizer": {"file": tokenizer.file, "sha256": tokenizer.sha256, "vocab_size": tokenizer.vocab_size,
                      "bos_id": tokenizer.bos_id},
        "lossless": lossless, **splits, "overlap_documents": overlap,
        "dropped": {key: counts[key] for key in ("exact_duplicates", "near_duplicates", "not_lossless", "empty")},
        "seed": request.seed, "sources": number_sources(request.val_sources or request.sources, request.name)[0],
        "source_files": [*request.sources.values(), *request.val_sources.values()],
        "request": identity,
    }
    manifest["yardsticks"] = yardsticks(*check_dataset(request.out, tokenizer, manifest), tokenizer)
    write_json(request.out / "manifest.json", manifest)
    shutil.rmtree(work)
    return manifest


def print_table(out: Path, manifest: dict) -> None:
    """What was made, for people, and the settings that use it."""
    print(f"{'':8}{'documents':>12}{'tokens':>16}{'decoded bytes':>16}{'bytes/token':>14}   BOS not counted")
    for split in ("train", "val"):
        part = manifest[split]
        ratio = part["decoded_bytes"] / (part["tokens"] - part["documents"])
        print(f"{split:8}{part['documents']:12,}{part['tokens']:16,}{part['decoded_bytes']:16,}{ratio:14.4f}")
    print("dropped: " + ", ".join(f"{count:,} {kind}" for kind, count in manifest["dropped"].items()))
    if not manifest["lossless"]:
        print("the tokenizer does not give back its text exactly: scores count decoded bytes, not source bytes")
    measured = ", ".join(f"{name.removesuffix('_bpb')} {bpb:.4f}" for name, bpb in manifest["yardsticks"].items())
    print(f"bits per byte of the validation text by {measured}\nvalidation documents that also stand in training: "
          f"{manifest['overlap_documents']}\nto train on it: DATA_PATH={out}")


def run(arguments: list[str] | None = None) -> None:
    """The command; raises UserError for the user's mistakes."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("sources", nargs="*", metavar="SOURCE", help="files, folders; none: Python's standard library")
    parser.add_argument("--val", nargs="+", default=[], metavar="SOURCE", help="validation text; no split by hash then")
    parser.add_argument("--out", type=Path, help="folder to write (data/NAME beside this script)")
    parser.add_argument("--vocab-size", type=int, default=1024, help="pieces of the tokenizer trained here (1024)")
    parser.add_argument("--tokenizer", default="", help=".model file, tiktoken name or file, or `bytes` (train one)")
    parser.add_argument("--val-frac", type=float, default=0.05, help="share of the documents for validation (0.05)")
    parser.add_argument("--val-max-bytes", type=int, help=f"most validation bytes, 0: no limit ({VAL_BYTES:,})")
    parser.add_argument("--seed", type=int, default=0, help="of the document order (0)")
    parser.add_argument("--name", help="first part of the shards' file names (text; embedded without SOURCE)")
    parser.add_argument("--workers", type=int, default=0, help="processes (0: all cores)")
    args = parser.parse_args(arguments)
    checks = (("--vocab-size", args.vocab_size, 300 <= args.vocab_size <= 1 << 16, "300 to 65,536"),
              ("--val-frac", args.val_frac, 0 < args.val_frac < 1, "a number between 0 and 1"),
              ("--val-max-bytes", args.val_max_bytes, (args.val_max_bytes or 0) >= 0, "0 or more"),
              ("--workers", args.workers, args.workers >= 0, "0 or more"),
              ("--name", args.name, re.fullmatch(r"[A-Za-z0-9.-]+", args.name or "-"), "letters, digits, . and -"),
              ("--val", args.val, args.sources or not args.val, "a SOURCE of training text beside it"),
              ("--val-max-bytes", args.val_max_bytes, not args.val or args.val_max_bytes is None,
               "no --val beside it, whose text is taken whole"))
    for option, value, good, wanted in checks:
        if not good:
            raise UserError(f"{option} {value}: expected {wanted}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if args.sources:
        sources, name, val_max_bytes = find_sources(args.sources), args.name or "text", VAL_BYTES
    else:
        (sources, note), name, val_max_bytes = find_stdlib(), args.name or "embedded", EMBEDDED_VAL_BYTES
        print(f"no SOURCE named: {note}", flush=True)
    out = args.out or Path(os.path.relpath(Path(__file__).resolve().parent / name))
    request = Request(sources, find_sources(args.val), out, name, args.tokenizer, args.vocab_size, args.val_frac,
                      val_max_bytes if args.val_max_bytes is None else args.val_max_bytes, args.seed)
    print_table(out, prepare(request, args.workers or cores))


def main() -> None:
    """Runs the command; a mistake of the user's is one line and exit code 2."""
    try:
        run()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
