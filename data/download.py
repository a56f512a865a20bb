"""Downloads published FineWeb shards with their tokenizer and describes them in manifest.json.

    python data/download.py                        validation and 10 training shards (1 billion tokens, 2 GB)
    python data/download.py --train-shards 80      what the challenge trains on
    python data/download.py --variant sp8192       another tokenizer: sp1024, sp4096, sp8192 or gpt2
    python data/download.py --manifest DIR --tokenizer PATH        only describes shards that are already there

An interrupted download goes on where it stopped when the command is given again. Sizes are checked against the
server's, SHA-256 where the server names one, shard headers always. Where the data is and how it is laid out:
openai/parameter-golf, data/cached_challenge_fineweb.py (sp1024; sp4096 and sp8192 with the MATCHED_FINEWEB_REPO_ID of
the records that use them) and KellerJordan/modded-nanogpt, data/cached_fineweb10B.py (gpt2).
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import http.client
import itertools
import json
import lzma
import math
import os
import re
import shutil
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import tiktoken
import zstandard
from tiktoken.load import read_file_cached

try:
    from tqdm import tqdm
except ImportError:
    tqdm = None


class UserError(Exception):
    """A mistake of the user's: printed as one line, exit code 2."""


# === shared: tokenizer ===
ROLE_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")

# OpenAI's encodings split a text by one of these regular expressions and merge bytes within the
# parts only. They are copied from tiktoken_ext/openai_public.py: a rank file does not have them.
R50K_SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
CL100K_SPLIT = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
O200K_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
RANK_FILES = "https://openaipublic.blob.core.windows.net/encodings"


@dataclass(frozen=True)
class PublishedEncoding:
    """One of OpenAI's encodings: the hash of its rank file, and what that file does not contain."""

    sha256: str
    split: str  # regular expression, see above
    end_of_text: int  # id of <|endoftext|>, which begins every document here
    vocab_size: int  # with all special tokens and unused ids


R50K_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
P50K_SHA256 = "94b5ca7dff4d00767bc256fdd1b27e5b17361d7b8a5f968547f9f23eb70d2069"
CL100K_SHA256 = "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7"
O200K_SHA256 = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"
ENCODINGS = {
    "gpt2": PublishedEncoding(R50K_SHA256, R50K_SPLIT, 50256, 50257),  # the ranks of r50k_base
    "r50k_base": PublishedEncoding(R50K_SHA256, R50K_SPLIT, 50256, 50257),
    "p50k_base": PublishedEncoding(P50K_SHA256, R50K_SPLIT, 50256, 50281),
    "cl100k_base": PublishedEncoding(CL100K_SHA256, CL100K_SPLIT, 100257, 100277),
    "o200k_base": PublishedEncoding(O200K_SHA256, O200K_SPLIT, 199999, 200019),
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
    pieces: list[bytes]  # what each token decodes to, b"" for boundaries
    encode: Callable[[str], list[int]]  # ids without BOS; special tokens in a text are plain text
    roles: dict[str, int]  # ids of ROLE_TOKENS; {} if the tokenizer has none
    drops_space: np.ndarray | bool = False  # (V,) bool, loses its first space after a boundary

    def __post_init__(self) -> None:
        self.sha256 = hashlib.sha256(self.content).hexdigest()
        self.vocab_size = len(self.pieces)
        self.byte_counts = np.array([len(piece) for piece in self.pieces])  # (V,) int64
        self.boundary = self.byte_counts == 0  # (V,) bool
        self.drops_space = np.broadcast_to(self.drops_space, self.vocab_size)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a SentencePiece file or NAME.tiktoken, a NAME in ENCODINGS, or `bytes`.

    Raises UserError.
    """
    path = Path(path)
    if path.name == "bytes":
        return byte_tokenizer()
    if path.suffix == ".tiktoken" or str(path) in ENCODINGS:
        return tiktoken_tokenizer(path)
    return sentencepiece_tokenizer(path)


def byte_tokenizer() -> Tokenizer:
    """The built-in tokenizer: pad, BOS, EOS and unknown, then the 256 bytes, then the roles."""
    pieces = [b""] * 4 + [bytes([byte]) for byte in range(256)] + [b""] * 4
    roles = dict(zip(ROLE_TOKENS, range(260, 264), strict=True))
    return Tokenizer(
        "bytes",
        b"underpar bytes 264",
        1,
        pieces,
        lambda text: [4 + b for b in text.encode()],
        roles,
    )


def tiktoken_tokenizer(path: Path) -> Tokenizer:
    """One of OpenAI's encodings, from its rank file NAME.tiktoken or by its NAME alone.

    A line of a rank file is a token in base64, a space, its rank. A name alone means tiktoken's
    cache or OpenAI's server. Raises UserError for an unknown name and for a damaged file.
    """
    name = path.name.removesuffix(".tiktoken")
    if name not in ENCODINGS:
        raise UserError(f"tokenizer {path}: unknown encoding; must be one of {[*ENCODINGS]}")
    published = ENCODINGS[name]
    try:
        if path.suffix:
            content = path.read_bytes()
        else:
            rank_file = name.replace("gpt2", "r50k_base")  # the same ranks
            content = read_file_cached(f"{RANK_FILES}/{rank_file}.tiktoken", published.sha256)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:160]
        raise UserError(f"tokenizer {path}: {reason}; {name}.tiktoken may be given") from error
    if hashlib.sha256(content).hexdigest() != published.sha256:
        raise UserError(f"tokenizer {path}: damaged, its SHA-256 must be {published.sha256[:12]}…")

    ranks = {}
    pieces = [b""] * published.vocab_size  # special tokens and unused ids decode to nothing
    for line in content.splitlines():
        token, rank = line.split()
        pieces[int(rank)] = base64.b64decode(token)
        ranks[pieces[int(rank)]] = int(rank)
    special = {"<|endoftext|>": published.end_of_text}
    bpe = tiktoken.Encoding(
        name, pat_str=published.split, mergeable_ranks=ranks, special_tokens=special
    )
    file = f"{name}.tiktoken"
    return Tokenizer(file, content, published.end_of_text, pieces, bpe.encode_ordinary, {})


def sentencepiece_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a SentencePiece model file. Raises UserError if it has no BOS token."""
    try:
        content = path.read_bytes()
        model = sentencepiece.SentencePieceProcessor(model_proto=content)
    except (OSError, RuntimeError) as error:
        kinds = f"SentencePiece model, NAME.tiktoken, bytes or one of {[*ENCODINGS]}"
        raise UserError(f"tokenizer {path}: no {kinds}") from error
    if model.bos_id() < 0:
        raise UserError(f"tokenizer {path}: empty, or without the BOS token of every document")
    pieces = []
    drops_space = []
    for i in range(model.vocab_size()):
        name = model.id_to_piece(i)
        if model.is_control(i) or model.is_unknown(i) or model.is_unused(i):
            piece = b""
        elif model.is_byte(i):
            piece = bytes.fromhex(name[3:5])  # a byte's name is "<0x41>"
        else:
            piece = name.replace("\u2581", " ").encode("utf-8")  # SentencePiece's mark of a space
        pieces.append(piece)
        # A space that the model's own decoder leaves out, the dummy prefix, is not in the text.
        decoded = model.decode([i]).encode("utf-8")
        drops_space.append(piece[:1] == b" " and len(decoded) < len(piece))
    # Only control tokens cannot be written in a text, so that no user can forge a role.
    roles = {role: model.piece_to_id(role) for role in ROLE_TOKENS}
    roles = {role: i for role, i in roles.items() if model.is_control(i)}
    file = "tokenizer.model"
    return Tokenizer(file, content, model.bos_id(), pieces, model.encode, roles, drops_space)


def sha256_file(path: str | Path) -> str:
    """SHA-256 of a file in hexadecimal digits."""
    # Shards and checkpoints are mapped, not read into memory. An empty file cannot be mapped.
    content = np.memmap(path, mode="r") if os.path.getsize(path) else b""
    return hashlib.sha256(content).hexdigest()


# === end: tokenizer ===


# === shared: data ===
# llm.c's formats: magic number and version -> type of the tokens, uint32 for vocabularies > 65,536
SHARD_KINDS = {(20240520, 1): np.dtype("<u2"), (20240801, 7): np.dtype("<u4")}
SHARD_HEADER_BYTES = 256 * 4  # 256 int32: magic number, version, number of tokens, zeros


def token_bytes(tokenizer: Tokenizer, prev: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Bytes of each token of `ids` given the token before it, int64, same shape."""
    return tokenizer.byte_counts[ids] - (tokenizer.drops_space[ids] & tokenizer.boundary[prev])


def read_shard(path: str | Path) -> np.ndarray:
    """The tokens of a shard, a memory map (N,). Raises UserError if it is missing or damaged."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"shard {path}: no such file")
    size = path.stat().st_size
    header = np.fromfile(path, dtype="<i4", count=3)
    # A file that was cut short may end inside its header.
    magic, version, count = np.pad(header, (0, 3 - len(header))).tolist()
    if (magic, version) not in SHARD_KINDS:
        fault = f"{size} bytes, magic number and version {magic, version}, not {[*SHARD_KINDS]}"
        raise UserError(f"shard {path}: {fault}")
    kind = SHARD_KINDS[magic, version]
    expected = SHARD_HEADER_BYTES + kind.itemsize * count
    if count <= 0 or size != expected:
        fault = f"truncated or damaged: {size} bytes, its {count} tokens would take {expected}"
        raise UserError(f"shard {path}: {fault}")
    return np.memmap(path, dtype=kind, mode="r", offset=SHARD_HEADER_BYTES, shape=(count,))


def load_manifest(data_path: str | Path) -> dict:
    """`manifest.json` of a data folder. Raises UserError naming the commands that write one."""
    path = Path(data_path) / "manifest.json"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        manifest = None
    if not isinstance(manifest, dict) or manifest.get("format") != 1:
        commands = "data/prepare.py makes one, data/download.py --manifest too"
        raise UserError(f"{path}: no manifest of format 1; {commands}")
    return manifest


def file_state(path: Path) -> tuple[int, ...]:
    """Size, time of change and inode of a file, by which a change shows. OSError if it is gone."""
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns, status.st_ino


class TokenStream:
    """Shards read as one circular stream of tokens, of which `hold_out` may leave out pieces.

    Raises UserError if a token is not below `vocab_size`, or if a shard changes while in use.
    """

    def __init__(self, paths: list[Path], vocab_size: int = 1 << 32) -> None:
        self.paths = paths
        self.vocab_size = vocab_size
        self.shards = [read_shard(path) for path in paths]
        self.states = [file_state(path) for path in paths]
        self.starts = np.cumsum([0] + [len(shard) for shard in self.shards])  # (shards + 1,)
        self.length = int(self.starts[-1])
        self.run = self.length  # after every `run` tokens,
        self.gap = 0  # `gap` tokens are left out

    def __len__(self) -> int:
        return self.length

    def read(self, start: int, count: int) -> np.ndarray:
        """`count` tokens from position `start` on, int64 (count,); after the last, the first."""
        out = np.empty(count, dtype=np.int64)
        done = 0
        while done < count:
            position = (start + done) % self.length
            place = position + position // self.run * self.gap  # with what is left out
            shard = int(np.searchsorted(self.starts, place, side="right")) - 1
            path = self.paths[shard]
            # Reading on in a mapped file that was cut short would kill the process (SIGBUS).
            if file_state(path) != self.states[shard]:
                raise UserError(f"shard {path}: was changed while in use")
            longest = min(count - done, self.run - position % self.run)  # up to the next gap
            part = self.shards[shard][place - self.starts[shard] :][:longest]
            if part.max() >= self.vocab_size:
                fault = f"token {part.max()}, expected ids below {self.vocab_size}"
                raise UserError(f"shard {path}: {fault}")
            out[done : done + len(part)] = part
            done += len(part)
        return out


def check_dataset(
    data_path: str | Path, tokenizer: Tokenizer, manifest: dict, hash_train: bool = False
) -> list[TokenStream]:
    """The streams of training and validation.

    Raises UserError unless tokenizer and shards are the manifest's. Training shards are hashed only
    on request, because they may be many gigabytes.
    """
    where = Path(data_path) / "manifest.json"
    sha256 = manifest["tokenizer"]["sha256"]
    if tokenizer.sha256 != sha256:
        fault = f"shards of another tokenizer, SHA-256 {sha256[:12]}…, not {tokenizer.sha256[:12]}…"
        raise UserError(f"{where}: {fault}")
    overlap = manifest["overlap_documents"]
    if overlap and not manifest["published"]:
        raise UserError(f"{where}: {overlap} validation documents also stand in training, not 0")
    streams = []
    for split in ("train", "val"):
        shards = manifest[split]["shards"]
        paths = [where.with_name(shard["file"]) for shard in shards]
        stream = TokenStream(paths, tokenizer.vocab_size)
        for path, tokens, shard in zip(paths, stream.shards, shards, strict=True):
            if len(tokens) != shard["tokens"]:
                raise UserError(
                    f"shard {path}: {len(tokens)} tokens, {where} says {shard['tokens']}"
                )
            sha256 = shard["sha256"]
            hashed = hash_train or split == "val"
            if hashed and sha256_file(path) != sha256:
                raise UserError(f"shard {path}: its SHA-256 is not the {sha256[:12]}… of {where}")
        expected = manifest[split]["tokens"]
        if len(stream) != expected:
            raise UserError(f"{where}: {split} has {expected} tokens, its shards {len(stream)}")
        streams.append(stream)
    return streams


def document_hashes(stream: TokenStream, bos_id: int, block: int = 1 << 22) -> Iterator[bytes]:
    """A hash of the tokens of every document, in order.

    Tokens before the first BOS belong to no document: a published shard may begin inside one.
    """
    starts = []
    for at in range(0, len(stream), block):
        tokens = stream.read(at, min(block, len(stream) - at))
        starts += (at + np.flatnonzero(tokens == bos_id)).tolist()
    for start, end in itertools.pairwise([*starts, len(stream)]):
        yield hashlib.blake2b(stream.read(start, end - start), digest_size=16).digest()


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


HUB = "https://huggingface.co/datasets"
VARIANTS = {"sp1024": f"{HUB}/willdepueoai/parameter-golf/resolve/main/datasets",
            "sp4096": f"{HUB}/kevclark/parameter-golf/resolve/main/datasets",
            "sp8192": f"{HUB}/kevclark/parameter-golf/resolve/main/datasets",
            "gpt2": f"{HUB}/kjj0/fineweb10B-gpt2/resolve/main"}
GPT2_SHARDS = 103  # for training, numbered from 1; shard 0 is validation
TRIES = 6  # without a new byte, before giving up
FIRST_TRIES = 3  # of the first request: a machine without a network is told so within seconds
RETRY_SECONDS = 1.0  # doubled with each try
TIMEOUT_SECONDS = 30
READ_TOKENS = 4_000_000  # of a shard that stand in memory at once as int64
NETWORK_ERRORS = (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError)


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """Leaves a redirect as the answer: the hub's redirects carry size and SHA-256 of the file behind them."""

    def redirect_request(self, *args: object) -> None:
        """Follows nothing."""


@dataclass(frozen=True)
class Remote:
    """A file to fetch."""

    url: str
    path: Path
    size: int
    sha256: str | None  # None: the server names none


def unreachable(url: str, error: Exception) -> UserError:
    """The one line for a server that does not answer."""
    reason = getattr(error, "reason", None) or error or type(error).__name__
    return UserError(f"cannot reach {urllib.parse.urlsplit(url).netloc} ({reason}); check the network or --base-url, "
                     "then give the same command again: what has arrived is kept")


def missing(url: str, error: urllib.error.HTTPError) -> UserError:
    """The one line for an answer that no retry will change."""
    return UserError(f"{url}: the server answers {error.code} {error.reason}; check --base-url and --variant")


def retried(url: str, action: Callable, progress: Callable[[], int] = lambda: 0, most: int = TRIES) -> Any:
    """`action()`, again after a network error. Tries count from the last time that `progress()` had grown."""
    tries, before = 0, progress()
    while True:
        try:
            return action()
        except NETWORK_ERRORS as error:
            if isinstance(error, urllib.error.HTTPError) and error.code < 500 and error.code not in (408, 429):
                raise missing(url, error) from error
            tries = 1 if progress() > before else tries + 1
            before = progress()
            if tries >= most:
                raise unreachable(url, error) from error
            time.sleep(RETRY_SECONDS * 2 ** (tries - 1))


def probe(url: str, path: Path, tries: int = TRIES) -> Remote:
    """Size and, where the server names it, SHA-256 of the file at `url`, by a HEAD request.

    For a large file the hub answers with a redirect whose X-Linked-Size and X-Linked-ETag are size and SHA-256.
    """

    def head() -> Remote:
        request = urllib.request.Request(url, method="HEAD")
        try:
            with urllib.request.build_opener(NoRedirect).open(request, timeout=TIMEOUT_SECONDS) as answer:
                headers = answer.headers
        except urllib.error.HTTPError as error:
            if not 300 <= error.code < 400:
                raise
            headers = error.headers
            if "X-Linked-Size" not in headers:
                with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
                    headers = answer.headers
        size = headers.get("X-Linked-Size") or headers.get("Content-Length")
        if size is None:
            raise UserError(f"{url}: the server names no size; use another --base-url")
        etag = (headers.get("X-Linked-ETag") or "").strip('"')
        return Remote(url, path, int(size), etag if re.fullmatch(r"[0-9a-f]{64}", etag) else None)

    return retried(url, head, most=tries)


def fault(remote: Remote, path: Path) -> str | None:
    """What is wrong with the file at `path` as a copy of `remote`, or None."""
    size = path.stat().st_size
    if remote.size == 0:
        return "0 bytes at the server"
    if size != remote.size:
        return f"{size} bytes, the server has {remote.size}"
    if remote.sha256 and (digest := sha256_file(path)) != remote.sha256:
        return f"SHA-256 {digest[:12]}…, the server says {remote.sha256[:12]}…"
    if remote.path.suffix == ".bin":
        try:
            read_shard(path)
        except UserError as error:
            return str(error)
    return None


def fetch(remote: Remote, bar: Any = None) -> None:
    """Brings one file, going on with PATH.part. Raises UserError when it cannot be had whole and right."""
    part = remote.path.with_name(remote.path.name + ".part")

    def have() -> int:
        return part.stat().st_size if part.exists() else 0

    def transfer() -> None:
        start = have()
        if start > remote.size:
            part.unlink()
            start = 0
        if start == remote.size and part.exists():
            return
        request = urllib.request.Request(remote.url, headers={"Range": f"bytes={start}-"} if start else {})
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
            resumed = answer.status == 206 and f"bytes {start}-" in answer.headers.get("Content-Range", "")
            if answer.status == 206 and not resumed:
                raise http.client.HTTPException("the server sent another range than asked for")
            with open(part, "ab" if resumed else "wb") as file:
                while block := answer.read(1 << 20):
                    file.write(block)
                    if bar is not None:
                        bar.update(len(block))
        if have() < remote.size:
            raise http.client.HTTPException(f"the connection ended at byte {have()} of {remote.size}")

    remote.path.parent.mkdir(parents=True, exist_ok=True)
    for last in (False, True):  # a damaged rest of an earlier run is fetched once more from the start
        retried(remote.url, transfer, have)
        wrong = fault(remote, part)
        if wrong is None:
            os.replace(part, remote.path)
            return
        part.unlink()
        if last:
            raise UserError(f"{remote.url}: arrived damaged twice: {wrong}; try again later or another --base-url")


def read_json(url: str) -> dict:
    """A JSON file of the server."""

    def get() -> bytes:
        with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as answer:
            return answer.read()

    try:
        return json.loads(retried(url, get, most=FIRST_TRIES))
    except ValueError as error:
        raise UserError(f"{url}: not JSON ({error}); check --base-url") from error


def plan(base_url: str, variant: str, train_shards: int, out: Path) -> list[Remote]:
    """The files of a variant: tokenizer, all validation shards, N training shards, as the published manifest.json says.

    gpt2 has no manifest and no tokenizer file there.
    """
    if variant == "gpt2":
        if train_shards > GPT2_SHARDS:
            raise UserError(f"--train-shards {train_shards}: gpt2 has {GPT2_SHARDS}")
        names = ["fineweb_val_000000.bin"] + [f"fineweb_train_{i:06d}.bin" for i in range(1, train_shards + 1)]
        return [probe(f"{base_url}/{name}", out / name, FIRST_TRIES) for name in names]
    url, name = f"{base_url}/manifest.json", f"fineweb10B_{variant}"
    published = read_json(url)
    data = next((d for d in published.get("datasets", []) if d.get("name") == name), None)
    if data is None:
        raise UserError(f"{url}: no data set {name}; check --base-url and --variant")
    tokenizer = next((t for t in published.get("tokenizers", []) if t.get("name") == data.get("tokenizer_name")), {})
    stats, model = data.get("stats", {}), tokenizer.get("model_path")
    if not model or not stats.get("files_val") or not stats.get("files_train"):
        raise UserError(f"{url}: {name} names no tokenizer model or no numbers of shards; check --base-url")
    if train_shards > stats["files_train"]:
        raise UserError(f"--train-shards {train_shards}: {variant} has {stats['files_train']}")
    names = [f"fineweb_val_{i:06d}.bin" for i in range(stats["files_val"])]
    names += [f"fineweb_train_{i:06d}.bin" for i in range(train_shards)]
    files = [(f"{base_url}/{model}", out / "tokenizer.model")]
    files += [(f"{base_url}/datasets/{name}/{file}", out / file) for file in names]
    return [probe(*file) for file in files]


def download(base_url: str, variant: str, train_shards: int, out: Path) -> None:
    """Fetches what is missing in `out`."""
    remotes = plan(base_url, variant, train_shards, out)
    wanted = [remote for remote in remotes if not remote.path.exists() or fault(remote, remote.path)]
    parts = [remote.path.with_name(remote.path.name + ".part") for remote in wanted]
    left = sum(remote.size for remote in wanted) - sum(part.stat().st_size for part in parts if part.exists())
    left = max(left, 0)
    print(f"{len(remotes)} files, {sum(remote.size for remote in remotes):,} bytes, into {out}; still to fetch "
          f"{left:,} bytes: about {left / 1.25e7:,.0f} s at 100 Mbit/s, {left / 1.25e8:,.0f} s at 1 Gbit/s", flush=True)
    out.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(out).free
    if left > free:
        raise UserError(f"--out {out}: {free:,} bytes free, {left:,} needed; fewer --train-shards or another --out")
    if tqdm is None:
        print("no progress bar: tqdm is not installed (pip install tqdm)")
    bar = None if tqdm is None else tqdm(total=left, unit="B", unit_scale=True, disable=None)
    for remote in wanted:
        fetch(remote, bar)
        if bar is None or bar.disable:
            print(f"fetched {remote.path.name} ({remote.size:,} bytes)", flush=True)
    if bar is not None:
        bar.close()


def describe_split(paths: list[Path], tokenizer: Tokenizer, split: str) -> dict:
    """The manifest's part on these shards. Raises UserError for shards that another tokenizer wrote.

    Validation begins with a document; training may begin inside one (llm.c cuts one stream into shards, the first of
    which is the validation's).
    """
    part = {"shards": [], "tokens": 0, "documents": 0, "source_bytes": None, "decoded_bytes": 0}
    before = bos = tokenizer.bos_id
    for path in paths if tqdm is None else tqdm(paths, desc="counting bytes", unit="shard", leave=False, disable=None):
        tokens = read_shard(path)
        if split == "val" and not part["shards"] and tokens[0] != bos:
            raise UserError(f"shard {path}: begins with token {tokens[0]}, expected BOS ({bos}); "
                            "name the tokenizer that wrote these shards")
        for start in range(0, len(tokens), READ_TOKENS):
            ids = tokens[start : start + READ_TOKENS].astype(np.int64)
            if ids.max() >= tokenizer.vocab_size:
                raise UserError(f"shard {path}: token {ids.max()}, expected ids below {tokenizer.vocab_size}; "
                                "another tokenizer wrote it")
            part["decoded_bytes"] += int(token_bytes(tokenizer, np.append(before, ids)[:-1], ids).sum())
            part["documents"] += int((ids == bos).sum())
            before = ids[-1]
        part["tokens"] += len(tokens)
        part["shards"].append({"file": path.name, "tokens": len(tokens), "sha256": sha256_file(path)})
    return part


def describe(folder: Path, tokenizer_path: str) -> None:
    """Writes and prints the manifest of shards in `folder` that were made elsewhere with the given tokenizer.

    Raises UserError when they are not one data set's, or not this tokenizer's.
    """
    tokenizer = load_tokenizer(tokenizer_path)
    paths = {split: sorted(folder.glob(f"*_{split}_*.bin")) for split in ("train", "val")}
    for split, found in paths.items():
        if not found:
            raise UserError(f"{folder}: no *_{split}_*.bin shard there")
    names = sorted({path.name.split(f"_{split}_")[0] for split, found in paths.items() for path in found})
    if len(names) > 1:
        raise UserError(f"{folder}: shards of several data sets ({', '.join(names)}); keep one per folder")
    splits = {split: describe_split(found, tokenizer, split) for split, found in paths.items()}
    streams = {split: TokenStream(found) for split, found in paths.items()}
    val = list(document_hashes(streams["val"], tokenizer.bos_id))
    repeated = set(val).intersection(document_hashes(streams["train"], tokenizer.bos_id))
    overlap = sum(digest in repeated for digest in val)
    manifest = {
        "format": 1, "name": names[0], "published": True,
        "tokenizer": {"file": save_tokenizer(tokenizer, folder), "sha256": tokenizer.sha256,
                      "vocab_size": tokenizer.vocab_size, "bos_id": tokenizer.bos_id},
        "lossless": False, **splits, "overlap_documents": overlap, "dropped": None, "seed": None, "sources": None,
        "yardsticks": yardsticks(streams["train"], streams["val"], tokenizer),
    }
    (folder / "manifest.part").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    os.replace(folder / "manifest.part", folder / "manifest.json")
    for split, part in splits.items():
        ratio = part["decoded_bytes"] / max(1, part["tokens"] - part["documents"])
        print(f"{split}: {part['documents']:,} documents, {part['tokens']:,} tokens, {part['decoded_bytes']:,} bytes, "
              f"{ratio:.4f} bytes per token (BOS not counted)")
    print(f"validation documents that also stand in training: {overlap}\nto train on it: DATA_PATH={folder}")


def run(arguments: list[str] | None = None) -> None:
    """The command; raises UserError for the user's mistakes and for a network that fails."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--variant", default="sp1024", help=f"one of {', '.join(VARIANTS)}")
    parser.add_argument("--train-shards", type=int, default=10, help="training shards of 100 million tokens (10)")
    parser.add_argument("--out", type=Path, help="folder (data/datasets/fineweb10B_VARIANT beside this script)")
    parser.add_argument("--base-url", help="where the variant's manifest.json is, or gpt2's shards (the hub)")
    parser.add_argument("--manifest", type=Path, metavar="DIR", help="download nothing, describe the shards in DIR")
    parser.add_argument("--tokenizer", metavar="PATH", help="what wrote the shards in DIR: a .model file, a "
                        "tiktoken name or .tiktoken file, or `bytes`; for --variant gpt2 a file that has its ranks")
    args = parser.parse_args(arguments)
    if args.variant not in VARIANTS:
        raise UserError(f"--variant {args.variant}: expected one of {', '.join(VARIANTS)}")
    if args.train_shards < 1:
        raise UserError(f"--train-shards {args.train_shards}: expected 1 or more")
    if bool(args.manifest) != bool(args.tokenizer) and args.variant != "gpt2":
        raise UserError("--manifest DIR and --tokenizer PATH (the model that wrote the shards) go together")
    usual = Path(__file__).resolve().parent / "datasets" / f"fineweb10B_{args.variant}"
    out = args.manifest or args.out or Path(os.path.relpath(usual))
    try:
        tokenizer = args.tokenizer or ("gpt2" if args.variant == "gpt2" else str(out / "tokenizer.model"))
        if not args.manifest:
            if args.variant == "gpt2":
                load_tokenizer(tokenizer)  # before the gigabytes: tiktoken fetches its ranks from another server
            download((args.base_url or VARIANTS[args.variant]).rstrip("/"), args.variant, args.train_shards, out)
        describe(out, tokenizer)
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror or error})") from error


def main() -> None:
    """Runs the command; a mistake of the user's is one line and exit code 2."""
    try:
        run()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
