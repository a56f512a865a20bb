"""Prepares text for training: documents -> tokenizer -> shards and manifest.json.

    python data/prepare.py                                    the embedded default: Python's own standard library
    python data/prepare.py texts/ more.jsonl.zst --out data/mine
    python data/prepare.py train.jsonl --val val.jsonl --tokenizer some.model --out data/mine
    python data/prepare.py --manifest DIR --tokenizer some.model       describes shards that are already there

Sources are .jsonl and .jsonl.zst files (a document is the field `text` of a line), .txt files (a document each) and
folders of these. The work is done in stages under OUT/.work, each written beside and renamed, so a killed run goes on
where it stopped: spool (documents into bucket files by a seeded hash, which is also the global shuffle), select
(exact and near duplicates dropped, train and val separated), tokenizer, tokens, shards.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import multiprocessing
import multiprocessing.connection
import os
import re
import shutil
import struct
import sys
import sysconfig
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import sentencepiece
import zstandard

try:
    from tqdm import tqdm
except ImportError:
    tqdm = None


class UserError(Exception):
    """A mistake of the user's: printed as one line, exit code 2."""


# === shared: data ===
SHARD_MAGIC, SHARD_VERSION = 20240520, 1  # llm.c and Parameter Golf: 256 int32 header, then uint16 tokens
SHARD_HEADER_BYTES = 256 * 4
ROLE_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
SPACE_MARK = "\u2581"  # SentencePiece writes a space as this character


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer and the bytes its tokens stand for; made by `load_tokenizer`.

    A token counts the UTF-8 bytes it decodes to, its leading space included. Where the model puts a space before
    every text (add_dummy_prefix), that space is no part of the text: the first token after a boundary (a control,
    unknown or unused token, itself 0 bytes) gives it back. This equals Parameter Golf's accounting
    (openai/parameter-golf, train_gpt.py, build_sentencepiece_luts and eval_val), which leaves the space out of the
    table and adds it where the token before is no boundary.
    """

    name: str
    sha256: str
    vocab_size: int
    bos_id: int
    special_ids: dict[str, int]  # role token -> id; empty where the tokenizer has none
    pieces: tuple[bytes, ...]  # what each token decodes to, b"" for boundaries
    byte_counts: np.ndarray  # (V,) int64, len of pieces
    drops_space: np.ndarray  # (V,) bool, loses its space after a boundary
    boundary: np.ndarray  # (V,) bool
    processor: sentencepiece.SentencePieceProcessor | None = None  # None: the byte tokenizer

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without BOS. Role tokens written out in the text are ordinary characters."""
        if self.processor is None:
            return [byte + 4 for byte in text.encode("utf-8")]
        return self.processor.encode(text)

    def decode_bytes(self, ids: list[int] | np.ndarray) -> bytes:
        """The bytes of a token sequence that starts a document; `token_bytes` counts exactly these."""
        ids = np.asarray(ids, dtype=np.int64)
        parts = [self.pieces[token] for token in ids.tolist()]
        previous = np.concatenate([[self.bos_id], ids])[:-1]
        for i in np.flatnonzero(self.drops_space[ids] & self.boundary[previous]):
            parts[i] = parts[i][1:]
        return b"".join(parts)

    def decode(self, ids: list[int] | np.ndarray) -> str:
        """`decode_bytes` as text; bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")


def load_tokenizer(path: str | Path) -> Tokenizer:
    """A SentencePiece `.model` file, or `bytes`: 0 pad, 1 bos, 2 eos, 3 unk, 4..259 the bytes, then the role tokens.

    Raises UserError for a missing or unreadable file and for a model without a BOS token.
    """
    path, processor = Path(path), None
    marked: list[int] = []  # pieces that begin with a space
    if str(path) == "bytes":
        sha256, bos_id = hashlib.sha256(b"underpar bytes 264").hexdigest(), 1
        pieces = [b""] * 4 + [bytes([byte]) for byte in range(256)] + [b""] * 4
        special_ids = {role: 260 + i for i, role in enumerate(ROLE_TOKENS)}
    else:
        processor = load_sentencepiece(path)
        sha256, bos_id, pieces = sha256_file(path), processor.bos_id(), []
        for token in range(processor.vocab_size()):
            piece = processor.id_to_piece(token)
            if processor.is_control(token) or processor.is_unknown(token) or processor.is_unused(token):
                pieces.append(b"")
            elif processor.is_byte(token):  # "<0x41>", one byte
                pieces.append(bytes([int(piece[1:-1], 16)]))
            else:
                pieces.append(piece.replace(SPACE_MARK, " ").encode("utf-8"))
                marked += [token] * piece.startswith(SPACE_MARK)
        special_ids = {role: processor.piece_to_id(role) for role in ROLE_TOKENS}
        special_ids = {role: token for role, token in special_ids.items() if processor.is_control(token)}
    byte_counts = np.array([len(piece) for piece in pieces], dtype=np.int64)
    drops_space = np.zeros(len(pieces), dtype=np.bool_)
    # The model's own decoder shows whether a leading space is the dummy prefix or text.
    if marked and not processor.decode([marked[-1]]).startswith(" "):
        drops_space[marked] = True
    return Tokenizer(path.stem, sha256, len(pieces), bos_id, special_ids, tuple(pieces), byte_counts, drops_space,
                     byte_counts == 0, processor)


def load_sentencepiece(path: Path) -> sentencepiece.SentencePieceProcessor:
    """A SentencePiece model that has a BOS token, else UserError."""
    if not path.is_file():
        raise UserError(f"tokenizer {path}: no such file; name a SentencePiece .model file or `bytes`")
    try:
        processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    except (RuntimeError, OSError) as error:
        raise UserError(f"tokenizer {path}: not a SentencePiece model ({path.stat().st_size} bytes)") from error
    if processor.bos_id() < 0:
        raise UserError(f"tokenizer {path}: has no BOS token; every document must begin with one")
    return processor


def token_bytes(tokenizer: Tokenizer, prev: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Bytes of each token of `ids` given the token before it, int64, same shape."""
    return tokenizer.byte_counts[ids] - (tokenizer.drops_space[ids] & tokenizer.boundary[prev])


def write_shard(path: str | Path, tokens: np.ndarray) -> None:
    """Writes `tokens` (N,) as one shard. Raises UserError for ids outside uint16."""
    if len(tokens) and not (0 <= int(tokens.min()) and int(tokens.max()) < 1 << 16):
        raise UserError(f"{path}: token ids {tokens.min()}..{tokens.max()} do not fit uint16; 0..65535 do")
    header = np.zeros(256, dtype="<i4")
    header[:3] = SHARD_MAGIC, SHARD_VERSION, len(tokens)
    with open(path, "wb") as file:
        file.write(header.tobytes())
        file.write(np.asarray(tokens).astype("<u2").tobytes())


def read_shard(path: str | Path) -> np.ndarray:
    """The tokens of a shard, a uint16 memory map (N,). Raises UserError naming file, found and expected."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"shard {path}: no such file")
    size = path.stat().st_size
    if size < SHARD_HEADER_BYTES:
        raise UserError(f"shard {path}: truncated: {size} bytes, the header alone has {SHARD_HEADER_BYTES}")
    header = np.fromfile(path, dtype="<i4", count=256)
    if header[0] != SHARD_MAGIC:
        raise UserError(f"shard {path}: not a token shard: magic number {header[0]}, expected {SHARD_MAGIC}")
    if header[1] != SHARD_VERSION:
        raise UserError(f"shard {path}: version {header[1]}, expected {SHARD_VERSION}")
    expected = SHARD_HEADER_BYTES + 2 * int(header[2])
    if header[2] <= 0 or size != expected:
        fault = "truncated" if size < expected else "wrong size"
        raise UserError(f"shard {path}: {fault}: {size} bytes, its header of {header[2]} tokens means {expected}")
    return np.memmap(path, dtype="<u2", mode="r", offset=SHARD_HEADER_BYTES, shape=(int(header[2]),))


def sha256_file(path: str | Path) -> str:
    """SHA-256 of a file as hex digits, read in pieces."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def load_manifest(data_path: str | Path) -> dict:
    """`manifest.json` of a data folder. Raises UserError naming the command that writes one."""
    path = Path(data_path) / "manifest.json"
    if not path.is_file():
        raise UserError(f"{path}: no such file; `python data/prepare.py SOURCE --out {data_path}` makes shards and "
                        f"manifest, `python data/prepare.py --manifest {data_path} --tokenizer PATH` describes shards")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error}); write it again with data/prepare.py") from error
    if not isinstance(manifest, dict) or manifest.get("format") != 1:
        raise UserError(f"{path}: not a data manifest of format 1; write it again with data/prepare.py")
    return manifest


def shard_paths(data_path: str | Path, manifest: dict, split: str) -> list[Path]:
    """The shard files of `split` ("train" or "val") in the manifest's order."""
    return [Path(data_path) / shard["file"] for shard in manifest[split]["shards"]]


def check_dataset(data_path: str | Path, tokenizer: Tokenizer, manifest: dict, hash_train: bool = False) -> None:
    """Raises UserError unless shards and tokenizer are those of the manifest.

    Sizes and token counts of all shards, SHA-256 of the validation shards (with `hash_train` of the training shards
    too), the tokenizer's SHA-256, and no validation document among the training documents of shards made here.
    """
    where, recorded = Path(data_path) / "manifest.json", manifest["tokenizer"]
    if tokenizer.sha256 != recorded["sha256"]:
        raise UserError(f"{data_path}: shards were written with another tokenizer: {recorded['file']} of SHA-256 "
                        f"{recorded['sha256'][:12]}…, given {tokenizer.name} of {tokenizer.sha256[:12]}…")
    if manifest["overlap_documents"] and not manifest["published"]:
        raise UserError(f"{where}: {manifest['overlap_documents']} validation documents also stand in training, "
                        "expected 0; prepare the data again")
    for split in ("train", "val"):
        total = 0
        for shard in manifest[split]["shards"]:
            path = Path(data_path) / shard["file"]
            count = len(read_shard(path))
            total += count
            if count != shard["tokens"]:
                raise UserError(f"shard {path}: {count} tokens, {where} says {shard['tokens']}")
            if (split == "val" or hash_train) and sha256_file(path) != shard["sha256"]:
                raise UserError(f"shard {path}: its SHA-256 is not the {shard['sha256'][:12]}… of {where}")
        if not total or total != manifest[split]["tokens"]:
            raise UserError(f"{where}: {split} has {manifest[split]['tokens']} tokens, its shards {total}")


class TokenStream:
    """Shards as one circular stream of tokens; the last `skip_tail` of them are kept out and read by `tail`.

    Raises UserError for shards too short for the tail, and when a token read is not below `vocab_size`.
    """

    def __init__(self, paths: list[Path], skip_tail: int = 0, vocab_size: int = 1 << 16) -> None:
        self.paths, self.vocab_size, self.skip_tail = list(paths), vocab_size, skip_tail
        self.shards = [read_shard(path) for path in self.paths]
        self.starts = np.cumsum([0] + [len(shard) for shard in self.shards])  # (shards + 1,)
        if len(self) <= 0:
            raise UserError(f"{len(self.paths)} shards of {self.starts[-1]} tokens: more than the held-out "
                            f"{skip_tail} are needed")

    def __len__(self) -> int:
        return int(self.starts[-1]) - self.skip_tail

    def read(self, start: int, count: int) -> np.ndarray:
        """`count` tokens from position `start` on, int64 (count,), going on at 0 after the last one."""
        out, done = np.empty(count, dtype=np.int64), 0
        while done < count:
            position = (start + done) % len(self)
            size = min(count - done, len(self) - position)
            out[done : done + size] = self._slice(position, size)
            done += size
        return out

    def tail(self) -> np.ndarray:
        """The held-out last `skip_tail` tokens, int64."""
        return self._slice(len(self), self.skip_tail)

    def _slice(self, start: int, count: int) -> np.ndarray:
        """Tokens start..start+count of the whole stream, tail included, without wrap-around."""
        parts, end = [np.empty(0, dtype=np.int64)], start + count
        first = int(np.searchsorted(self.starts, start, side="right")) - 1
        for index in range(first, len(self.shards)):
            low, high = max(start - self.starts[index], 0), min(end - self.starts[index], len(self.shards[index]))
            if low >= high:
                break
            part = self.shards[index][low:high].astype(np.int64)
            if part.max() >= self.vocab_size:
                at = int(low + np.argmax(part >= self.vocab_size))
                raise UserError(f"shard {self.paths[index]}: token {part[at - low]} at position {at}, "
                                f"expected ids below {self.vocab_size}; another tokenizer wrote it")
            parts.append(part)
        return np.concatenate(parts)
# === end: data ===


SUFFIXES = (".jsonl", ".jsonl.zst", ".txt")
GRAM_WORDS = 8  # near duplicates share over half of their sequences of this many words
SHARD_TOKENS = 100_000_000  # as the published FineWeb shards
SAMPLE_BYTES = 10_000_000  # of training text a tokenizer is trained on
BUCKET_BYTES = 64_000_000  # of text that stands in memory at once while documents are put in order
CHUNK_BYTES = 2_000_000  # of text in one job
READ_TOKENS = 4_000_000  # of a shard that stand in memory at once as int64
EMBEDDED_MIN_BYTES, EMBEDDED_MAX_BYTES, EMBEDDED_VAL_BYTES = 8_000_000, 25_000_000, 500_000
LOSSLESS_PROBE = "  two  spaces\n\n\ttab\r\nﬁ é \U0001f600 \ue000 "  # normalising tokenizers change this


@dataclass(frozen=True)
class Request:
    """What is to be prepared; everything here and the sources' contents decide the bytes of the result."""

    sources: list[Path]
    val_sources: list[Path]
    names: dict[str, str]  # source -> the name the manifest gives it
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
        for split, paths in (("train", self.sources), ("val", self.val_sources)):
            for path in paths:
                digest.update(f"{split} {self.names[str(path)]} {sha256_file(path)}\n".encode())
        trained = {"vocab_size": self.vocab_size} if not self.tokenizer else {}
        split = {} if self.val_sources else {"val_frac": self.val_frac, "val_max_bytes": self.val_max_bytes}
        return {"format": 1, "name": self.name, "seed": self.seed, "sources_sha256": digest.hexdigest(),
                "tokenizer": load_tokenizer(self.tokenizer).sha256 if self.tokenizer else "trained"} | trained | split


def progress(items: Iterable, total: int | None, label: str) -> Iterator:
    """`items` behind a progress bar where tqdm is installed."""
    return iter(items) if tqdm is None else iter(tqdm(items, total=total, desc=label, leave=False, disable=None))


def start_worker(setup: Callable, argument: str) -> None:
    """A worker's beginning: it ends with its parent, which a killed pool's workers else do not, and runs `setup`."""

    def leave_with_parent() -> None:
        multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
        os._exit(1)

    threading.Thread(target=leave_with_parent, daemon=True).start()
    setup(argument)


def run_jobs(workers: int, work: Callable, jobs: Iterable, setup: Callable, argument: str) -> Iterator:
    """`work(job)` for each job, in order. At most four jobs per worker are under way, which bounds the memory."""
    if workers == 1:
        setup(argument)
        yield from map(work, jobs)
        return
    with ProcessPoolExecutor(workers, initializer=start_worker, initargs=(setup, argument)) as pool:
        waiting = deque()
        for job in jobs:
            waiting.append(pool.submit(work, job))
            if len(waiting) >= 4 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def find_sources(arguments: list[str]) -> tuple[list[Path], dict[str, str]]:
    """The files that the arguments name, folders searched, in a fixed order, and each file's name in the manifest."""
    paths, names = [], {}
    for root in map(Path, arguments):
        found = [root] if root.is_file() else sorted(path for path in root.rglob("*") if path.is_file())
        found = [path for path in found if path.name.endswith(SUFFIXES)]
        if not root.exists():
            raise UserError(f"source {root}: no such file or folder")
        if not found:
            raise UserError(f"source {root}: no text in it that can be read; {', '.join(SUFFIXES)} files can")
        names |= {str(path): path.relative_to(root.parent).as_posix() for path in found}
        paths += found
    return paths, names


def find_stdlib() -> tuple[list[Path], dict[str, str], str]:
    """The standard library's *.py files, their names, and a sentence on what was chosen.

    Packages of tests are left out where enough text remains without them; files that are not UTF-8 are left out.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    plain, tests, skipped = [], [], 0
    for path in sorted(root.rglob("*.py")):
        parts = set(path.relative_to(root).parts)
        if parts & {"site-packages", "dist-packages", "__pycache__"} or not path.is_file():
            continue
        try:
            size = len(path.read_bytes().decode("utf-8").encode())
            (tests if parts & {"test", "tests", "idle_test"} else plain).append((path, size))
        except (UnicodeDecodeError, PermissionError):
            skipped += 1
    total, chosen = sum(size for _, size in plain), list(plain)
    for path, size in tests:
        if total < EMBEDDED_MIN_BYTES and total + size <= EMBEDDED_MAX_BYTES:
            chosen.append((path, size))
            total += size
    if total < 1_000_000:
        raise UserError(f"standard library {root}: only {total} bytes of .py files; name a SOURCE of text instead")
    note = (f"the standard library of Python {sys.version.split()[0]}: {len(chosen)} files, {total:,} bytes "
            f"({len(chosen) - len(plain)} of its {len(tests)} test files among them; {skipped} files are not UTF-8)")
    return [path for path, _ in chosen], {str(p): f"stdlib/{p.relative_to(root).as_posix()}" for p, _ in chosen}, note


def read_documents(path: Path) -> Iterator[str]:
    """The documents of one source file. Raises UserError naming file and line."""
    if path.suffix == ".txt" or path.suffix == ".py":
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


def write_record(file: io.BufferedIOBase, key: bytes, data: bytes) -> None:
    """One document: 32 bytes of key, 8 of length, the text as UTF-8."""
    file.write(key + struct.pack("<Q", len(data)) + data)


def read_records(path: Path) -> Iterator[tuple[bytes, bytes]]:
    """The (key, UTF-8 text) pairs of a file of records."""
    with open(path, "rb") as file:
        while head := file.read(40):
            yield head[:32], file.read(struct.unpack("<Q", head[32:])[0])


def batches(documents: Iterable[tuple[bytes, bytes]]) -> Iterator[list[tuple[bytes, bytes]]]:
    """The documents in lists of about CHUNK_BYTES of text."""
    batch, size = [], 0
    for key, text in documents:
        batch.append((key, text))
        size += len(text)
        if size >= CHUNK_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def spool(request: Request, work: Path) -> None:
    """Stage 1: every document into `spool/NNN.train` or `.val`, the bucket by its key.

    The key is SHA-256(seed, SHA-256(text)): equal texts meet in one bucket, and the order of keys is the global
    shuffle. The side is the document's own SHA-256 against the validation fraction, or its source.
    """
    done, part = work / "spool", work / "spool.part"
    if done.exists():
        return
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    sources = [(path, "val") for path in request.val_sources] + [(path, "train") for path in request.sources]
    # Text packs to about a sixth; a wrong guess only makes buckets larger, the result does not depend on them.
    guess = sum(path.stat().st_size * (6 if path.suffix == ".zst" else 1) for path, _ in sources)
    buckets = min(200, guess // BUCKET_BYTES + 1)
    counts = {"documents": 0, "empty": 0, "not_lossless": 0, "buckets": buckets}
    files = {(b, side): open(part / f"{b:03d}.{side}", "wb") for b in range(buckets) for side in ("train", "val")}
    for path, side in progress(sources, len(sources), "reading"):
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
            write_record(files[int.from_bytes(key[:4], "big") * buckets >> 32, side], key, data)
    for file in files.values():
        file.close()
    (part / "counts.json").write_text(json.dumps(counts))
    os.replace(part, done)


def grams(data: bytes) -> np.ndarray:
    """Hashes of the distinct 8-word sequences of a text, sorted uint64; a shorter text is one sequence."""
    text = data.decode("utf-8")
    words = re.findall(r"\w+", text.lower()) or ["".join(text.split())]
    hashes = np.array([zlib.crc32(word.encode("utf-8")) for word in words], dtype=np.uint64)
    count = max(1, len(words) - GRAM_WORDS + 1)
    total = np.zeros(count, dtype=np.uint64)
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


def load_val_grams(path: str) -> None:
    """A worker's set-up: the sorted 8-grams of the validation documents, shared through the file cache."""
    global VAL_GRAMS
    VAL_GRAMS = np.load(path, mmap_mode="r")


def match_grams(job: tuple[Callable, list[bytes]]) -> list[tuple[int, np.ndarray]]:
    """For each text of the job its number of 8-grams, and the places in VAL_GRAMS of those found there."""
    make, texts = job
    out = []
    for own in map(make, texts):
        at = np.minimum(np.searchsorted(VAL_GRAMS, own), len(VAL_GRAMS) - 1)
        out.append((len(own), at[VAL_GRAMS[at] == own]))
    return out


def read_bucket(spooled: Path, bucket: int, sides: tuple[str, ...]) -> tuple[dict[bytes, bytes], int]:
    """The distinct documents of a bucket (key -> text, in the order of keys), and how many repeats were left out."""
    records = [record for side in sides for record in read_records(spooled / f"{bucket:03d}.{side}")]
    distinct = dict(sorted(records))
    return distinct, len(records) - len(distinct)


class Cover:
    """How much of each validation document's 8-grams stands in the training documents taken so far."""

    def __init__(self, documents: list[np.ndarray]) -> None:
        flat = np.concatenate(documents)
        self.all, places = np.unique(flat, return_inverse=True)
        order = np.argsort(places, kind="stable")
        self.owners = np.repeat(np.arange(len(documents)), [len(own) for own in documents])[order]
        self.starts = np.searchsorted(places[order], np.arange(len(self.all) + 1))
        self.seen = np.zeros(len(self.all), dtype=np.bool_)
        self.sizes = np.array([len(own) for own in documents])
        self.counts = np.zeros(len(documents), dtype=np.int64)

    def add(self, hits: np.ndarray, refuse: bool) -> bool:
        """Adds a training document's hits. With `refuse` not when a validation document would be over half covered."""
        new = hits[~self.seen[hits]]
        added = np.zeros_like(self.counts)
        for place in new:
            added[self.owners[self.starts[place] : self.starts[place + 1]]] += 1
        if refuse and np.any((added > 0) & (2 * (self.counts + added) > self.sizes)):
            return False
        self.seen[new] = True
        self.counts += added
        return True


def take_validation(request: Request, spooled: Path, buckets: int) -> list[tuple[bytes, bytes]]:
    """The validation documents in order: all that a --val source holds, else the split's up to the byte limit."""
    taken, size = [], 0
    for bucket in range(buckets):
        for key, text in read_bucket(spooled, bucket, ("val",))[0].items():
            size += len(text)
            if not request.val_sources and 0 < request.val_max_bytes < size:
                return taken
            taken.append((key, text))
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
    counts = json.loads((spooled / "counts.json").read_text()) | {"exact_duplicates": 0, "near_duplicates": 0}
    val = take_validation(request, spooled, counts["buckets"])
    if not val:
        raise UserError(f"no validation document among {counts['documents']} documents with --val-frac "
                        f"{request.val_frac} and --val-max-bytes {request.val_max_bytes}; raise them or give --val")
    val_keys, pending = {key for key, _ in val}, deque()
    cover = Cover([grams(text) for _, text in val])
    np.save(part / "val_grams.npy", cover.all)

    def jobs() -> Iterator[tuple[Callable, list[bytes]]]:
        for bucket in range(counts["buckets"]):
            documents, repeats = read_bucket(spooled, bucket, ("val", "train"))
            counts["exact_duplicates"] += repeats
            # What the byte limit left out of the split's validation side is training text.
            for batch in batches(item for item in documents.items() if item[0] not in val_keys):
                pending.append(batch)
                yield grams, [text for _, text in batch]

    def keep(split: str, number: int, documents: list[tuple[bytes, bytes]]) -> None:
        with open(part / f"{split}_{number:06d}", "wb") as file:
            for key, text in documents:
                write_record(file, key, text)

    results = run_jobs(workers, match_grams, jobs(), load_val_grams, str(part / "val_grams.npy"))
    train_documents = 0
    for number, found in enumerate(progress(results, None, "selecting")):
        batch = pending.popleft()
        kept = [document for document, (size, hits) in zip(batch, found, strict=True)
                if 2 * len(hits) <= size and cover.add(hits, refuse=bool(request.val_sources))]
        keep("train", number, kept)
        train_documents += len(kept)
        counts["near_duplicates"] += len(batch) - len(kept)
    kept = [document for document, half in zip(val, 2 * cover.counts > cover.sizes, strict=True) if not half]
    counts["near_duplicates"] += len(val) - len(kept)
    for number, batch in enumerate(batches(kept)):
        keep("val", number, batch)
    if not train_documents or not kept:
        raise UserError(f"no {'validation' if train_documents else 'training'} document is left of "
                        f"{counts['documents']} ({counts['exact_duplicates']} exact and {counts['near_duplicates']} "
                        "near duplicates dropped); give more text or another --val-frac")
    (part / "counts.json").write_text(json.dumps(counts))
    os.replace(part, done)
    return counts


def recount_overlap(work: Path, workers: int) -> int:
    """Validation and training documents kept that share over half of their 8-grams with the other side; to be 0."""
    val = [recount_grams(text) for path in sorted((work / "kept").glob("val_??????")) for _, text in read_records(path)]
    everything = np.unique(np.concatenate(val))
    np.save(work / "recount.npy", everything)
    seen, overlap = np.zeros(len(everything), dtype=np.bool_), 0
    paths = sorted((work / "kept").glob("train_*"))
    jobs = ((recount_grams, [text for _, text in read_records(path)]) for path in paths)
    results = run_jobs(workers, match_grams, jobs, load_val_grams, str(work / "recount.npy"))
    for size, hits in (pair for found in progress(results, len(paths), "recounting") for pair in found):
        overlap += int(len(hits) > size / 2)
        seen[hits] = True
    return overlap + sum(int(seen[np.searchsorted(everything, own)].mean() > 0.5) for own in val)


def train_tokenizer(work: Path, vocab_size: int) -> Path:
    """Stage 3: a SentencePiece BPE model of the first SAMPLE_BYTES of (shuffled) training text, into tokenizer.model.

    Lossless: no normalisation, no dummy prefix, white space kept, bytes for what has no piece.
    """
    done, model, size = work / "tokenizer.model", io.BytesIO(), 0

    def lines() -> Iterator[str]:
        nonlocal size
        for _, text in (record for path in sorted((work / "kept").glob("train_*")) for record in read_records(path)):
            if size >= SAMPLE_BYTES:
                return
            size += len(text)
            for line in text.decode("utf-8").split("\n"):  # newline is a symbol of its own
                for start in range(0, len(line), 1000):  # the trainer leaves out sentences over 4,192 bytes
                    yield line[start : start + 1000]

    if done.exists():
        return done
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines(), model_writer=model, model_type="bpe", vocab_size=vocab_size, byte_fallback=True,
            normalization_rule_name="identity", add_dummy_prefix=False, remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True, user_defined_symbols=["\n"], control_symbols=list(ROLE_TOKENS),
            pad_id=0, bos_id=1, eos_id=2, unk_id=3, character_coverage=0.999, num_threads=1, minloglevel=2)
    except (RuntimeError, OSError) as error:
        raise UserError(f"--vocab-size {vocab_size}: no such tokenizer from {size:,} bytes of training text "
                        f"({' '.join(str(error).split())[-160:]}); give another size, more text, or --tokenizer bytes"
                        ) from error
    (work / "tokenizer.part").write_bytes(model.getvalue())
    os.replace(work / "tokenizer.part", done)
    return done


def load_worker_tokenizer(path: str) -> None:
    """A worker's set-up: its own tokenizer."""
    global TOKENIZER
    TOKENIZER = load_tokenizer(path)


def tokenize_chunk(job: tuple[Path, Path, bool]) -> None:
    """Writes a chunk's documents as BOS + tokens (raw uint16) and their counts, the counts last."""
    source, target, lossless = job
    counts = {"documents": 0, "tokens": 0, "source_bytes": 0, "decoded_bytes": 0, "not_lossless": 0}
    parts = [np.empty(0, dtype="<u2")]
    for _, text in read_records(source):
        ids = TOKENIZER.encode(text.decode("utf-8"))
        decoded = TOKENIZER.decode_bytes(ids)
        if not decoded or lossless and decoded != text:
            counts["not_lossless"] += 1
            continue
        parts.append(np.array([TOKENIZER.bos_id, *ids], dtype="<u2"))
        counts["documents"] += 1
        counts["tokens"] += len(ids) + 1
        counts["source_bytes"] += len(text)
        counts["decoded_bytes"] += len(decoded)
    np.concatenate(parts).tofile(target)
    target.with_suffix(".part").write_text(json.dumps(counts))
    os.replace(target.with_suffix(".part"), target.with_suffix(".json"))


def tokenize(work: Path, tokenizer_path: str, workers: int, lossless: bool) -> dict[str, dict]:
    """Stage 4: `kept/*` into `tokens/*.bin`; returns the counts of each split.

    With a lossless tokenizer a document that does not come back exactly is dropped.
    """
    (work / "tokens").mkdir(exist_ok=True)
    kept = sorted((work / "kept").glob("*_??????"))
    jobs = [(path, work / "tokens" / f"{path.name}.bin", lossless) for path in kept]
    left = [job for job in jobs if not job[1].with_suffix(".json").exists()]
    results = run_jobs(workers, tokenize_chunk, left, load_worker_tokenizer, tokenizer_path)
    deque(progress(results, len(left), "tokenizing"), maxlen=0)
    totals: dict[str, dict] = {"train": {}, "val": {}}
    for _, target, _ in jobs:
        total = totals[target.name.split("_")[0]]
        for key, value in json.loads(target.with_suffix(".json").read_text()).items():
            total[key] = total.get(key, 0) + value
    for split, total in totals.items():
        if not total["documents"]:
            raise UserError(f"the tokenizer gives back none of the {total['not_lossless']} {split} documents exactly; "
                            "use another tokenizer or text")
    return totals


def assemble(request: Request, work: Path, split: str) -> list[Path]:
    """Stage 5: a split's tokens as shards of SHARD_TOKENS; documents may run on into the next shard."""
    paths, waiting = [], np.empty(0, dtype="<u2")
    chunks = sorted((work / "tokens").glob(f"{split}_*.bin"))
    for chunk in chunks:
        waiting = np.concatenate([waiting, np.fromfile(chunk, dtype="<u2")])
        while len(waiting) >= SHARD_TOKENS or chunk == chunks[-1] and len(waiting):
            paths.append(request.out / f"{request.name}_{split}_{len(paths):06d}.bin")
            write_shard(work / "shard.part", waiting[:SHARD_TOKENS])
            os.replace(work / "shard.part", paths[-1])
            waiting = waiting[SHARD_TOKENS:]
    return paths


def until_bos(paths: list[Path], index: int) -> np.ndarray:
    """The tokens from the beginning of shard `index` up to the first BOS there or in a later shard."""
    if index == len(paths):
        return np.empty(0, dtype="<u2")
    tokens = read_shard(paths[index])
    stops = np.flatnonzero(tokens == TOKENIZER.bos_id)
    return tokens[: stops[0]] if len(stops) else np.concatenate([tokens, until_bos(paths, index + 1)])


def describe_shard(job: tuple[list[Path], int]) -> tuple[dict, int, int, np.ndarray]:
    """(manifest entry, documents begun, bytes decoded, document hashes) of shard `index` of a split.

    A document belongs to the shard in which its BOS stands and is followed into the next. Its hash is the first 8
    bytes of BLAKE2b of its token ids, uint64.
    """
    paths, index = job
    tokens = read_shard(paths[index])
    if int(tokens.max()) >= TOKENIZER.vocab_size:
        raise UserError(f"shard {paths[index]}: token {tokens.max()}, expected ids below {TOKENIZER.vocab_size}; "
                        "another tokenizer wrote it")
    if index == 0 and tokens[0] != TOKENIZER.bos_id:
        raise UserError(f"shard {paths[index]}: begins with token {tokens[0]}, expected BOS ({TOKENIZER.bos_id}); "
                        "name the tokenizer that wrote these shards")
    before = read_shard(paths[index - 1])[-1] if index else TOKENIZER.bos_id
    decoded = 0
    for start in range(0, len(tokens), READ_TOKENS):
        ids = tokens[start : start + READ_TOKENS].astype(np.int64)
        decoded += int(token_bytes(TOKENIZER, np.concatenate([[before], ids[:-1]]), ids).sum())
        before = ids[-1]
    begins = np.flatnonzero(tokens == TOKENIZER.bos_id)
    hashes = [hashlib.blake2b(tokens[first:last].tobytes(), digest_size=8)
              for first, last in zip(begins, [*begins, len(tokens)][1:], strict=True)]
    if hashes:
        hashes[-1].update(until_bos(paths, index + 1).tobytes())
    entry = {"file": paths[index].name, "tokens": len(tokens), "sha256": sha256_file(paths[index])}
    return entry, len(begins), decoded, np.frombuffer(b"".join(one.digest() for one in hashes), dtype="<u8")


def describe(paths: dict[str, list[Path]], tokenizer_path: str, workers: int) -> tuple[dict[str, dict], int]:
    """Both splits' part of the manifest from their shards, and the validation documents that stand in training."""
    out, val_hashes, overlapping = {}, np.empty(0, dtype="<u8"), np.empty(0, dtype="<u8")
    for split in ("val", "train"):
        jobs = [(paths[split], index) for index in range(len(paths[split]))]
        total = {"shards": [], "tokens": 0, "documents": 0, "source_bytes": None, "decoded_bytes": 0}
        results = run_jobs(min(workers, len(jobs)), describe_shard, jobs, load_worker_tokenizer, tokenizer_path)
        for entry, documents, decoded, hashes in progress(results, len(jobs), f"checking {split}"):
            total["shards"].append(entry)
            for key, value in (("tokens", entry["tokens"]), ("documents", documents), ("decoded_bytes", decoded)):
                total[key] += value
            if split == "val":
                val_hashes = np.concatenate([val_hashes, hashes])
            overlapping = np.union1d(overlapping, hashes[np.isin(hashes, val_hashes) & (split == "train")])
        out[split] = total
    return out, int(np.isin(val_hashes, overlapping).sum())


def write_manifest(out: Path, manifest: dict, tokenizer: Tokenizer, file: str) -> dict:
    """Adds what tells the tokenizer apart and writes manifest.json, beside and renamed; returns it."""
    entry = {"file": file, "sha256": tokenizer.sha256, "vocab_size": tokenizer.vocab_size, "bos_id": tokenizer.bos_id}
    manifest = {"format": 1, "tokenizer": entry} | manifest
    (out / "manifest.json.part").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    os.replace(out / "manifest.json.part", out / "manifest.json")
    return manifest


def describe_published(folder: Path, tokenizer_path: str, workers: int) -> dict:
    """Writes the manifest of shards that are already in `folder`, made elsewhere with the given tokenizer."""
    if not tokenizer_path:
        raise UserError("--manifest needs --tokenizer: the model that the shards were written with")
    tokenizer, file = load_tokenizer(tokenizer_path), Path(tokenizer_path).name
    paths = {split: sorted(folder.glob(f"*_{split}_*.bin")) for split in ("train", "val")}
    for split, found in paths.items():
        if not found:
            raise UserError(f"--manifest {folder}: no *_{split}_*.bin shard there")
    names = sorted({path.name.split(f"_{split}_")[0] for split, found in paths.items() for path in found})
    if len(names) > 1:
        raise UserError(f"--manifest {folder}: shards of several data sets ({', '.join(names)}); keep one per folder")
    splits, overlap = describe(paths, tokenizer_path, workers)
    if tokenizer_path != "bytes" and Path(tokenizer_path).resolve().parent != folder.resolve():
        file = "tokenizer.model"
        shutil.copyfile(tokenizer_path, folder / file)
    manifest = {"name": names[0], "published": True, "lossless": False} | splits
    manifest |= {"overlap_documents": overlap, "dropped": None, "seed": None, "sources": None}
    return write_manifest(folder, manifest, tokenizer, file)


def claim_folder(request: Request, identity: dict, work: Path) -> dict | None:
    """The manifest of this very request if it is finished, else None with the folder ready for work.

    Raises UserError when the folder holds anything of another request.
    """
    remedy = f"delete {request.out} or choose another --out"
    if (request.out / "manifest.json").exists():
        manifest = load_manifest(request.out)
        if manifest.get("request") != identity:
            raise UserError(f"{request.out}: holds data of another request (other sources or options); {remedy}")
        for shard in manifest["train"]["shards"] + manifest["val"]["shards"]:
            if len(read_shard(request.out / shard["file"])) != shard["tokens"]:
                raise UserError(f"{request.out / shard['file']}: not the shard of manifest.json; {remedy}")
        return manifest
    state = work / "request.json"
    if state.exists() and json.loads(state.read_text()) != identity:
        raise UserError(f"{request.out}: holds the unfinished data of another request; {remedy}")
    if state.exists():
        print(f"going on with the unfinished run in {request.out}")
        return None
    if any(request.out.glob("*.bin")):
        raise UserError(f"{request.out}: holds .bin files without a manifest; {remedy}")
    try:
        work.mkdir(parents=True, exist_ok=True)
        (work / "request.part").write_text(json.dumps(identity))
        os.replace(work / "request.part", state)
    except OSError as error:
        raise UserError(f"--out {request.out}: cannot be written ({error.strerror})") from error
    return None


def prepare(request: Request, workers: int) -> dict:
    """Does what the request says, or finds it done; returns the manifest."""
    work, identity = request.out / ".work", request.identity()
    finished = claim_folder(request, identity, work)
    if finished is not None:
        print(f"{request.out}: already holds exactly this data; nothing to do")
        shutil.rmtree(work, ignore_errors=True)
        return finished
    spool(request, work)
    counts = select(request, work, workers)
    source = request.tokenizer or str(train_tokenizer(work, request.vocab_size))
    tokenizer = load_tokenizer(source)
    if tokenizer.vocab_size > 1 << 16:
        raise UserError(f"--tokenizer {source}: {tokenizer.vocab_size} pieces; shards of uint16 hold 65,536")
    lossless = tokenizer.decode_bytes(tokenizer.encode(LOSSLESS_PROBE)) == LOSSLESS_PROBE.encode("utf-8")
    totals = tokenize(work, source, workers, lossless)
    splits, overlap = describe({split: assemble(request, work, split) for split in totals}, source, workers)
    overlap += recount_overlap(work, workers)
    if overlap:
        raise UserError(f"{request.out}: {overlap} documents stand in training and validation, expected 0; not written")
    for split, total in totals.items():
        for key in ("documents", "tokens", "decoded_bytes"):
            if splits[split][key] != total[key]:
                raise RuntimeError(f"{split}: {key} {splits[split][key]} in the shards, {total[key]} when written")
        splits[split]["source_bytes"] = total["source_bytes"]
        counts["not_lossless"] += total["not_lossless"]
    file = "bytes" if source == "bytes" else "tokenizer.model"
    if source != "bytes":
        shutil.copyfile(source, request.out / file)
    manifest = {"name": request.name, "published": False, "lossless": lossless} | splits
    manifest |= {"overlap_documents": overlap, "seed": request.seed, "request": identity}
    manifest["dropped"] = {k: counts[k] for k in ("exact_duplicates", "near_duplicates", "not_lossless", "empty")}
    manifest["sources"] = [request.names[str(path)] for path in request.sources + request.val_sources]
    manifest = write_manifest(request.out, manifest, tokenizer, file)
    shutil.rmtree(work)
    return manifest


def print_table(out: Path, manifest: dict) -> None:
    """What was made, for people, and the settings that use it."""
    print(f"{'':8}{'documents':>12}{'tokens':>16}{'bytes':>16}{'bytes/token':>14}{'shards':>8}")
    for split in ("train", "val"):
        part = manifest[split]
        ratio = part["decoded_bytes"] / (part["tokens"] - part["documents"])
        print(f"{split:8}{part['documents']:12,}{part['tokens']:16,}{part['decoded_bytes']:16,}{ratio:14.4f}"
              f"{len(part['shards']):8}")
    print("bytes: what the tokens decode to; bytes per token: BOS not counted")
    for kind, count in (manifest["dropped"] or {}).items():
        print(f"dropped, {kind.replace('_', ' ')}: {count:,}")
    if not manifest["lossless"]:
        print("the tokenizer does not give back its text exactly: scores count decoded bytes, not source bytes")
    print(f"validation documents that also stand in training: {manifest['overlap_documents']}")
    file = manifest["tokenizer"]["file"]
    print(f"DATA_PATH={out} TOKENIZER_PATH={file if file == 'bytes' else out / file} "
          f"VOCAB_SIZE={manifest['tokenizer']['vocab_size']}")


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The command line, ranges checked."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("sources", nargs="*", metavar="SOURCE", help=".jsonl, .jsonl.zst, .txt or a folder of these; "
                        "none: the standard library of this Python")
    parser.add_argument("--val", nargs="+", default=[], metavar="SOURCE", help="validation text; no split by hash then")
    parser.add_argument("--out", type=Path, help="folder to write (data/NAME beside this script)")
    parser.add_argument("--vocab-size", type=int, default=1024, help="pieces of the tokenizer trained here (1024)")
    parser.add_argument("--tokenizer", default="", help="an existing .model file, or `bytes` (train one)")
    parser.add_argument("--val-frac", type=float, default=0.05, help="share of the documents for validation (0.05)")
    parser.add_argument("--val-max-bytes", type=int, help="most bytes of validation text from the split; 0: no limit "
                        f"(20,000,000; {EMBEDDED_VAL_BYTES:,} without SOURCE)")
    parser.add_argument("--seed", type=int, default=0, help="of the document order (0)")
    parser.add_argument("--name", help="first part of the shards' file names (text; embedded without SOURCE)")
    parser.add_argument("--workers", type=int, default=0, help="processes (0: all cores)")
    parser.add_argument("--manifest", type=Path, metavar="DIR", help="only describe the shards in DIR")
    args = parser.parse_args(arguments)
    checks = (("--vocab-size", args.vocab_size, 300 <= args.vocab_size <= 1 << 16, "300 to 65,536"),
              ("--val-frac", args.val_frac, 0 < args.val_frac < 1, "a number between 0 and 1"),
              ("--val-max-bytes", args.val_max_bytes, (args.val_max_bytes or 0) >= 0, "0 or more"),
              ("--workers", args.workers, args.workers >= 0, "0 or more"),
              ("--name", args.name, re.fullmatch(r"[A-Za-z0-9.-]+", args.name or "-"), "letters, digits, . and -"),
              ("--val", args.val, args.sources or not args.val, "a SOURCE of training text beside it"),
              ("--val-max-bytes", args.val_max_bytes, not args.val or args.val_max_bytes is None,
               "no --val beside it, whose text is taken whole"),
              ("--manifest", args.manifest, not (args.manifest and (args.sources or args.out)), "no SOURCE, no --out"))
    for option, value, good, wanted in checks:
        if not good:
            raise UserError(f"{option} {value}: expected {wanted}")
    return args


def run(arguments: list[str] | None = None) -> None:
    """The command; raises UserError for the user's mistakes."""
    args = parse_arguments(arguments)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = args.workers or cores
    if tqdm is None:
        print("no progress bars: tqdm is not installed (pip install tqdm)")
    if args.manifest:
        print_table(args.manifest, describe_published(args.manifest, args.tokenizer, workers))
        return
    if args.sources:
        (sources, names), name, val_max_bytes = find_sources(args.sources), args.name or "text", 20_000_000
    else:
        sources, names, note = find_stdlib()
        name, val_max_bytes = args.name or "embedded", EMBEDDED_VAL_BYTES
        print(f"no SOURCE named: {note}", flush=True)
    val_max_bytes = val_max_bytes if args.val_max_bytes is None else args.val_max_bytes
    val_sources, val_names = find_sources(args.val)
    out = args.out or Path(os.path.relpath(Path(__file__).resolve().parent / name))
    request = Request(sources, val_sources, names | val_names, out, name, args.tokenizer, args.vocab_size,
                      args.val_frac, val_max_bytes, args.seed)
    print_table(out, prepare(request, workers))


def main() -> None:
    """Runs the command; a mistake of the user's is one line and exit code 2."""
    try:
        run()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
