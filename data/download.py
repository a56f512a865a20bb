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
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import tiktoken
import zstandard
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
    streams = {split: TokenStream(found, tokenizer.vocab_size) for split, found in paths.items()}
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
