"""The artifact file: pack, unpack, look inside, verify, compare, export; deltas, which make one model into another.

    python quantize.py info runs/<RUN_ID>/model.upar --tensors           # what its bytes are spent on
    python quantize.py verify runs/<RUN_ID>/model.upar runs/<RUN_ID> --weights ema
    MATRIX_BITS=4 python quantize.py pack runs/<RUN_ID> small.upar       # the same with 4 bits, to nearest
    python quantize.py bitdelta runs/<BASE> runs/<TUNED> tuned.delta     # 1 bit a weight; deltaquant: 1 to 8
    python quantize.py apply runs/<BASE> tuned.delta tuned               # a folder, of which `pack` makes an artifact

MODEL, BASE, TUNED, A, B and CHECKPOINT are an artifact, a checkpoint's folder, a run's folder (its newest whole
checkpoint), or what `unpack` or `apply` wrote. Settings below are environment variables, in capitals; DATA_PATH and
quantization's default to the checkpoint's. Sections between `# === shared:` fences: tools/sync.py.
"""

import argparse
import base64
import collections
import concurrent.futures
import contextlib
import difflib
import functools
import hashlib
import io
import json
import math
import os
import pickle
import re
import resource
import shutil
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Literal, get_args

import numpy as np
import sentencepiece
import tiktoken
import tiktoken_ext.openai_public
import torch
import torch.distributed as dist
import torch.nn.functional as F
import zstandard
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

try:  # optional: progress bars
    from tqdm import tqdm
except ImportError:
    tqdm = None


# ---------------------------------------------------------------------------------------------------------- settings
@dataclass(frozen=True)
class Settings:
    tokenizer_path: str = ""  # .model file, tiktoken name, .tiktoken file or "bytes"; empty: that of data or artifact
    data_path: str = ""  # folder of shards and manifest.json; or several with weights: a:0.7,b:0.3
    seed: int = 1337  # of every random draw
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: CUDA where there is a device
    matrix_bits: int = 6  # matrices of the layers: codes up to 2**(bits-1) - 1
    matrix_clip_sigmas: float = 8.0  # the largest code, in root mean squares; 0: the largest weight; -1: least error
    matrix_step: Literal["tensor", "row", "grid"] = "tensor"  # what has its own; grid: a row, a power of 2**(1/16)
    embed_bits: int = 8  # the same for embeddings and head
    embed_clip_sigmas: float = 6.0  # the same
    embed_step: Literal["tensor", "row", "grid"] = "tensor"  # the same
    delta_group: int = 128  # weights of a matrix that share a delta's scale; -1: a row, 0: the matrix
    delta_scale_bits: int = 32  # of a scale of bitdelta: 32 or 16
    delta_keep_bits: int = 16  # of what a delta holds whole, all but matrices: 16 or 32 (as they are)
    delta_bits: int = 4  # of a code of deltaquant, 1 to 8
    delta_step: Literal["tensor", "row", "group"] = "row"  # what has its own in deltaquant; group: DELTA_GROUP weights
    distill_steps: int = 100  # of bitdelta's scales against the tuned model's logits; 0: none
    distill_lr: float = 0.1  # AdamW, on scales in units of their matrix's mean, to 0 by a cosine
    distill_batch_tokens: int = 0  # a step; 0: four windows of the model's TRAIN_SEQ_LEN


# === shared: settings ===
class UserError(Exception):
    """A mistake of the user's: printed as one line, exit code 2."""


# What another script of ours, Parameter Golf or nanoGPT reads (regular expressions): an error for one that does not.
FOREIGN_NAMES = tuple("""
    ACTIVATION_CHECKPOINTING ADAM_.* ALWAYS_SAVE_CHECKPOINT ARCH_MODE ARTIFACT ARTIFACT_BYTES_MAX ATTN_.* BACKEND
    BATCH_SIZE BETA BETA1 BETA2 BIAS BIGRAM_.* BIO_.* BLOCK_SIZE CAUTIOUS_WD CENTERING COMPILE COMPILE_MODE COMPRESSOR
    CRITIC CRITIC_LR DATASET DATA_DIR DATA_PATH DECAY_LR DELTA_.* DEMONSTRATIONS DETERMINISTIC DEVICE DISTILL_.* DROPOUT
    DRY_RUN DTYPE DYNAMIC_ROUNDS EMA EMA_.* EMBED_.* ENABLE_LOOPING_AT EPOCHS EVAL_.* GAE_LAMBDA GAMMA GATED_.*
    GDN_NEG_EIGVAL GPTQ_.* GRADIENT_ACCUMULATION_STEPS GRAD_.* GROUP_SIZE HANG_SECONDS HEAD_LR HOLDOUT_TOKENS IMPORTANCE
    INIT_FROM ITERATIONS KD_.* KEEP KL_.* LABEL_SMOOTHING LATE_QAT LATE_QAT_.* LAYER_PATTERN LAYOUT LEARNING_RATE
    LEFT_CLIP_RANGE LN_SCALE LOGIT_SOFTCAP LOG_INTERVAL LOOP_.* LORA_.* LR_.* MARGIN MATRIX_.* MAX_ITERS MAX_NEW_TOKENS
    MAX_WALLCLOCK_SECONDS MICRO_BATCH_TOKENS MINI_BATCHES MIN_LR MLP MLP_.* MODE MODEL_DIM MTP_NUM_HEADS MUON_.*
    NGRAM_.* NORM NUM_HEADS NUM_KV_HEADS NUM_LAYERS NUM_LOOPS NUM_SAMPLES N_EMBD N_HEAD N_LAYER OBJECTIVE OPTIMIZER
    OUT_DIR OVERLONG_BUFFER PAIRS_PER_STEP PARALLEL_RESIDUAL POSITIONS PROFILE PROMPT PROMPTS_PER_STEP QAT QAT_.* QK_.*
    RATIO_LIMIT REDUCTION REFERENCE REPLAY RESERVE_SECONDS RESIDUAL_MIX RESUME REWARD REWARD_.* RIGHT_CLIP_RANGE ROPE_.*
    RUN_ID SAVE_EVERY SCALAR_LR SCALE_REWARDS SCORE.* SEED SFT_.* SLIDING_WINDOW_ENABLED SMEAR_.* SPIKE_.* SWA SWA_.*
    SYSTEM TASK TASK_PATH TEACHER TEMPERATURE TIED_.* TIE_EMBEDDINGS TOKENIZER_PATH TOP_[KP] TRACKER TRAIN_.* TTT_.*
    UNET_SKIPS VALUE_.* VAL_.* VE_ENABLED VOCAB_SIZE WARMDOWN_.* WARMUP_.* WEIGHT_DECAY XSA_LAST_N
""".split())

# (regular expression of field names, smallest, largest), the first match counts; where none matches: >= 0.
RANGES = (
    ("ema_memory_frac", 1e-6, 1.0), (".*_frac|lr_floor|bio_threshold|gamma|gae_lambda|kd_alpha|kd_beta", 0.0, 1.0),
    ("adam_eps", 1e-20, 1.0), ("ngram_order", 0, 63), ("label_smoothing", 0.0, 0.499), ("kd_temperature", 0.01, 1000.0),
    ("beta.|muon_momentum|muon_momentum_warmup_start", 0.0, 0.9999), ("tied_embed_init_std", 1e-6, 10.0),
    ("muon_backend_steps", 1, 20), ("delta_bits", 1, 8), ("delta_group", -1, 1 << 20), ("delta_.*_bits", 16, 32),
    (".*_bits", 2, 8), ("model_dim", 16, 65536), ("num_layers", 0, 512), ("num_heads|num_kv_heads", 1, 1024),
    ("mlp_mult", 0.25, 16.0), ("rope_base", 1.0, 1e9), ("bigram_dim|num_samples", 1, 1 << 16),
    ("bigram_vocab_size", 0, 1 << 24), ("vocab_size", 0, 1 << 20), (".*_clip_sigmas", -1.0, 1e6),
    ("pairs_per_step|train_pairs|demonstrations", 1, 1 << 24), ("top_p", 1e-9, 1.0), ("temperature", 0.0, 100.0),
    ("keep|attn_window|max_new_tokens|prompts_per_step|group_size|mini_batches|epochs|eval_.*s", 1, 1 << 20),
    ("ngram_min_count|train_log_every", 1, 1 << 31), ("train_seq_len", 2, 1 << 20), ("train_batch_tokens", 2, 1 << 31),
    ("artifact_bytes_max", 1, 1 << 40),
)


def parse_setting(name: str, text: str, kind: type) -> int | float | bool | str:
    """The value of setting `name` (a field name) written as `text`. Raises UserError for a wrong type or range."""
    what, choices = f"{name.upper()}={text!r}: must be", get_args(kind)
    try:
        value = {"0": False, "1": True}[text] if kind is bool else text if choices else kind(text)
    except (KeyError, ValueError):
        right = {bool: "0 or 1", int: "a whole number", float: "a number"}[kind]
        raise UserError(f"{what} {right}") from None
    low, high = next(((low, high) for names, low, high in RANGES if re.fullmatch(names, name)), (0, math.inf))
    if kind in (int, float) and not (low <= value <= high and math.isfinite(value)):
        raise UserError(f"{what} from {low} to {high}")
    if choices and value not in choices:
        raise UserError(f"{what} one of {', '.join(choices)}")
    return value


def load_settings(cls: type, environ: dict[str, str], presets: dict[str, dict[str, dict]] | None = None,
                  stored: Callable[[dict[str, str]], tuple[dict, dict]] = lambda given: ({}, {})):
    """Settings of dataclass `cls` from the NAME=value lines of the file CONFIG names and from `environ`, which wins.

    `presets`: setting -> its value -> values of other settings, below those that stand beside it, so that a preset
    chosen in the environment is above the file. `stored`: what stands below and above both, given both. Raises
    UserError: a wrong value, a name unknown in the file, a near miss in the environment or another script's name there.
    """
    kinds, config, path = {field.name.upper(): field.type for field in fields(cls)}, {}, environ.get("CONFIG", "")
    if path and not Path(path).is_file():
        raise UserError(f"CONFIG={path!r}: no such file")
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines() if path else [], 1):
        name, equals, value = (part.strip() for part in line.split("#", 1)[0].partition("="))
        if name and not equals:
            raise UserError(f"{path}:{number}: {name!r} is not NAME=value")
        if equals:
            config[name] = value.strip("'\"")
    ignored = {name.strip() for name in environ.get("IGNORE_ENV", "").split(",")} | {"CONFIG", "IGNORE_ENV"}
    strange = [name for name in config if name not in kinds or name == "CONFIG"]
    for name in strange + sorted(set(environ) - set(kinds) - ignored):
        sure = name in strange or re.fullmatch("|".join(FOREIGN_NAMES), name)
        near = difflib.get_close_matches(name, kinds, 1, 0.6 if sure else 0.85)
        hint = f"did you mean {near[0]}?" if near else "settings stand at the script's top."
        if name in strange:
            raise UserError(f"{path}: unknown setting {name}; {hint}")
        if near or sure:
            raise UserError(f"{name}={environ[name]!r}: no setting of this script; {hint} IGNORE_ENV={name} lets it be")
    file, env = ({name.lower(): parse_setting(name.lower(), given[name], kind) for name, kind in kinds.items()
                  if name in given} for given in (config, environ))
    values, last = stored({**config, **environ})
    for own, above in ((file, env), (env, {})):
        for name, choices in (presets or {}).items():
            values |= choices[own[name]] if name in own and name not in above else {}
        values |= own
    return cls(**{name: value for name, value in {**values, **last}.items() if name.upper() in kinds})
# === end: settings ===


# === shared: runtime ===
@dataclass
class Runtime:
    """Who this process is among the ranks, and where tensors live."""

    rank: int
    world_size: int
    device: torch.device
    distributed: bool

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        if self.distributed:
            dist.all_reduce(tensor)
        return tensor

    def agree(self, value):
        """Rank 0's value, of any type that pickle takes, on every rank."""
        values = [value]
        if self.distributed:
            dist.broadcast_object_list(values, src=0, device=self.device)
        return values[0]

    def leave(self) -> None:
        """End of the process: all ranks together, for one that left early aborted in gloo's threads (1 run in 10)."""
        if self.distributed:
            dist.barrier()
            dist.destroy_process_group()


def start_runtime(device: str, deterministic: bool = False) -> Runtime:
    """Join the process group that torchrun describes (NCCL on CUDA, gloo on CPU), or be a single process."""
    cuda = device == "cuda" or device == "auto" and torch.cuda.is_available()
    if cuda and not torch.cuda.is_available():
        raise UserError("DEVICE='cuda': PyTorch sees no CUDA device; DEVICE=cpu runs without")
    place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    torch.set_flush_denormal(not cuda)  # GDN's decays reach denormals, and a CPU is 10 times slower on them
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or cuBLAS may sum in another order
        torch.use_deterministic_algorithms(True, warn_only=True)  # cumsum, of GDN, has none on CUDA
    if cuda:
        torch.cuda.set_device(place)
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if cuda else "gloo", device_id=place if cuda else None)
    return Runtime(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)), place, "RANK" in os.environ)


def exit_code(main: Callable[[], int]) -> int:
    """Run `main` for its exit code; 2 for a UserError, 1 for other faults that one line on stderr can name."""
    rank, hint = int(os.environ.get("RANK", 0)), ""
    try:
        return main()
    except (UserError, FloatingPointError, OSError, torch.OutOfMemoryError) as error:
        time.sleep(5 if rank else 0)  # torchrun ends this rank first if rank 0 says the same
        hint = "set MICRO_BATCH_TOKENS to less: " if isinstance(error, torch.OutOfMemoryError) else ""
        sys.stderr.write(f"error: {hint}{str(error).splitlines()[0]}\n")
        return 2 if isinstance(error, UserError) else 1
    except RuntimeError as error:
        if not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise
        sys.stderr.write(f"error: rank {rank} lost another rank ({str(error).strip()[-90:]}); RESUME goes on from the "
                         "newest checkpoint\n")
        os._exit(1)  # without what waits for the lost rank


def replace_file(path: str | Path, data: bytes) -> None:
    """Write a file beside and rename it, so that `path` holds the old or the new bytes, whole, whatever happens."""
    beside = Path(path).with_name(Path(path).name + ".part")
    with open(beside, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def describe_machine(runtime: Runtime) -> dict:
    """For log and result.json: commit (`+`: changed since), hardware, versions, most memory held so far."""
    git, where = "git describe --always --abbrev=40 --exclude='*' --dirty=+", Path(__file__).resolve().parent
    commit = subprocess.run(git, cwd=where, shell=True, capture_output=True, text=True).stdout.strip() or "unknown"
    cuda = runtime.device.type == "cuda"
    hardware = torch.cuda.get_device_name() if cuda else f"{os.uname().machine} CPU, {torch.get_num_threads()} threads"
    versions = {"python": sys.version.split()[0], "torch": torch.__version__, "numpy": np.__version__,
                "cuda": torch.version.cuda if cuda else None}
    process = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    peak = torch.cuda.max_memory_allocated() if cuda else process  # bytes, of the allocator or the process
    return {"commit": commit, "hardware": f"{runtime.world_size} x {hardware}", "versions": versions,
            "peak_memory_mib": peak / 2**20}


def checkpoints(run: Path) -> list[Path]:
    """The checkpoints in a run's folder, whole or not, newest first."""
    found = {path: re.fullmatch(r"step_(\d+)(\.part)?", path.name) for path in run.glob("step_*")}
    return sorted(filter(found.get, found), key=lambda path: (int(found[path][1]), path.name), reverse=True)


def first_whole(folders: list[Path], files=("meta.json", "model.pt", "training.pt")) -> tuple[Path | None, list[str]]:
    """The first checkpoint that has these files, as its SHA256SUMS say, or None; a line on each one before it."""
    faults = []
    for folder in folders:
        try:
            sums = dict(line.split("  ")[::-1] for line in (folder / "SHA256SUMS").read_text().splitlines())
            wrong = [name for name in dict.fromkeys([*files, *sums]) if sums.get(name) != sha256_file(folder / name)]
            fault = "half-written" if folder.suffix == ".part" else ", ".join(wrong)
        except (OSError, ValueError) as error:
            fault = str(error)
        if not fault:
            return folder, faults
        faults.append(f"checkpoint {folder} is damaged and skipped: {fault}")
    return None, faults
# === end: runtime ===


# === shared: tokenizer ===
ROLE_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
ENCODINGS = ("gpt2", "r50k_base", "p50k_base", "cl100k_base", "o200k_base")  # of tiktoken


@dataclass
class Tokenizer:
    """From `load_tokenizer`. A token counts the UTF-8 bytes it decodes to; after a boundary (a control, unknown or
    unused token) without the space put before every text. So does Parameter Golf, build_sentencepiece_luts, eval_val.
    """

    file: str  # name of a file that gives it back; "bytes" needs none
    content: bytes  # of that file; its SHA-256 tells tokenizers apart
    bos_id: int
    pieces: list[bytes]  # what each token decodes to, b"" for boundaries
    encode: Callable[[str], list[int]]  # ids without BOS; special tokens in the text are ordinary characters
    drops_space: np.ndarray | bool = False  # (V,) bool, loses its space after a boundary
    roles: dict[str, int] | None = None  # ids of ROLE_TOKENS; None or {}: it has none

    def __post_init__(self) -> None:
        self.sha256, self.vocab_size = hashlib.sha256(self.content).hexdigest(), len(self.pieces)
        self.byte_counts = np.array([len(piece) for piece in self.pieces])  # (V,) int64
        self.boundary = self.byte_counts == 0  # (V,) bool
        self.drops_space, self.roles = np.broadcast_to(self.drops_space, self.vocab_size), self.roles or {}


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Of a SentencePiece file, tiktoken's encoding NAME or its file NAME.tiktoken, or `bytes`. Raises UserError."""
    path = Path(path)
    if path.name == "bytes":
        pieces = [b""] * 4 + [bytes([byte]) for byte in range(256)] + [b""] * 4  # pad, BOS, EOS, unknown; bytes; roles
        return Tokenizer("bytes", b"underpar bytes 264", 1, pieces, lambda text: [4 + b for b in text.encode()],
                         roles=dict(zip(ROLE_TOKENS, range(260, 264), strict=True)))
    if str(path) in ENCODINGS or path.suffix == ".tiktoken":
        public, name, scope = tiktoken_ext.openai_public, path.name.removesuffix(".tiktoken"), {}
        maker = "r50k_base" if path.name == "gpt2.tiktoken" else name  # the same ranks, pattern and special token
        if path.suffix:  # tiktoken's own function, with a loader that reads and checks the file given
            scope["load_tiktoken_bpe"] = lambda url, expected_hash: public.load_tiktoken_bpe(str(path), expected_hash)
        try:
            encoding = tiktoken.Encoding(**FunctionType(getattr(public, maker).__code__, vars(public) | scope)())
        except (AttributeError, OSError, ValueError, AssertionError) as error:
            raise UserError(f"tokenizer {path}: tiktoken cannot load it ({' '.join(str(error).split())[:160]}); give "
                            f"one of {ENCODINGS}, which it downloads, or one's rank file NAME.tiktoken") from error
        tokens = {rank: token for token, rank in encoding._mergeable_ranks.items()}
        pieces = [tokens.get(rank, b"") for rank in range(encoding.n_vocab)]
        content = b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in sorted(tokens.items()))
        return Tokenizer(f"{name}.tiktoken", content, encoding.eot_token, pieces, encoding.encode_ordinary)
    try:
        content = path.read_bytes()
        model = sentencepiece.SentencePieceProcessor(model_proto=content)
    except (OSError, RuntimeError) as error:
        raise UserError(f"tokenizer {path}: no SentencePiece model, .tiktoken file, bytes or {ENCODINGS}") from error
    if model.bos_id() < 0:
        raise UserError(f"tokenizer {path}: empty, or without the BOS token with which every document must begin")
    ids = list(range(model.vocab_size()))
    names, control = model.id_to_piece(ids), np.array(model.is_control(ids))
    boundary = control | model.is_unknown(ids) | model.is_unused(ids)
    pieces = [name.replace("\u2581", " ").encode("utf-8") for name in names]  # its mark of a space
    for i in np.flatnonzero(boundary | model.is_byte(ids)):
        pieces[i] = b"" if boundary[i] else bytes.fromhex(names[i][3:5])  # a byte's name is "<0x41>"
    # A leading space that the model's own decoder leaves out is the dummy prefix, no part of the text.
    drops = np.array([name.startswith("\u2581") and len(model.decode([i]).encode("utf-8")) < len(pieces[i])
                      for i, name in enumerate(names)])
    roles = {role: names.index(role) for role in ROLE_TOKENS if role in names and control[names.index(role)]}
    return Tokenizer("tokenizer.model", content, model.bos_id(), pieces, model.encode, drops, roles)


def sha256_file(path: str | Path) -> str:
    """SHA-256 of a file as hex digits; the file is mapped, not read into memory."""
    return hashlib.sha256(np.memmap(path, mode="r") if os.path.getsize(path) else b"").hexdigest()
# === end: tokenizer ===


# === shared: data ===
SHARD_KINDS = {(20240520, 1): np.dtype("<u2"), (20240801, 7): np.dtype("<u4")}  # llm.c: (magic, version) -> tokens
SHARD_HEADER_BYTES = 256 * 4  # 256 int32, then the tokens: uint32 for vocabularies above 65,536, else uint16


def token_bytes(tokenizer: Tokenizer, prev: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Bytes of each token of `ids` given the token before it, int64, same shape."""
    return tokenizer.byte_counts[ids] - (tokenizer.drops_space[ids] & tokenizer.boundary[prev])


def read_shard(path: str | Path) -> np.ndarray:
    """The tokens of a shard, a memory map (N,). Raises UserError naming file, found and expected."""
    if not Path(path).is_file():
        raise UserError(f"shard {path}: no such file")
    size = Path(path).stat().st_size
    magic, version, count, *_ = [*np.fromfile(path, dtype="<i4", count=3).tolist(), 0, 0, 0]
    kind = SHARD_KINDS.get((magic, version))
    if kind is None:
        raise UserError(f"shard {path}: {size} bytes, magic number and version {magic, version}, not {[*SHARD_KINDS]}")
    expected = SHARD_HEADER_BYTES + kind.itemsize * count
    if count <= 0 or size != expected:
        raise UserError(f"shard {path}: truncated or damaged: {size} bytes, its {count} tokens would take {expected}")
    return np.memmap(path, dtype=kind, mode="r", offset=SHARD_HEADER_BYTES, shape=(count,))


def load_manifest(data_path: str | Path) -> dict:
    """`manifest.json` of a data folder. Raises UserError naming the command that writes one."""
    path = Path(data_path) / "manifest.json"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        manifest = None
    if not isinstance(manifest, dict) or manifest.get("format") != 1:
        raise UserError(f"{path}: no manifest of format 1; data/prepare.py makes one, data/download.py --manifest too")
    return manifest


def check_dataset(data_path: str | Path, tokenizer: Tokenizer, manifest: dict, hash_train: bool = False) -> list:
    """The TokenStreams of training and validation; UserError unless tokenizer and shards are those of the manifest."""
    where, sha256, streams = Path(data_path) / "manifest.json", manifest["tokenizer"]["sha256"], []
    if tokenizer.sha256 != sha256:
        raise UserError(f"{where}: shards of another tokenizer, SHA-256 {sha256[:12]}…, not {tokenizer.sha256[:12]}…")
    if manifest["overlap_documents"] and not manifest["published"]:
        raise UserError(f"{where}: {manifest['overlap_documents']} validation documents also stand in training, not 0")
    for split in ("train", "val"):
        shards, tokens = manifest[split]["shards"], manifest[split]["tokens"]
        stream = TokenStream([Path(data_path) / shard["file"] for shard in shards], tokenizer.vocab_size)
        for path, found, shard in zip(stream.paths, stream.shards, shards, strict=True):
            if len(found) != shard["tokens"]:
                raise UserError(f"shard {path}: {len(found)} tokens, {where} says {shard['tokens']}")
            if (split == "val" or hash_train) and sha256_file(path) != shard["sha256"]:
                raise UserError(f"shard {path}: its SHA-256 is not the {shard['sha256'][:12]}… of {where}")
        if len(stream) != tokens:
            raise UserError(f"{where}: {split} has {tokens} tokens, its shards {len(stream)}")
        streams.append(stream)
    return streams


class TokenStream:
    """Shards as one circular stream of tokens. UserError if a token is not below `vocab_size` or a shard changes."""

    def __init__(self, paths: list[Path], vocab_size: int = 1 << 32) -> None:
        self.paths, self.vocab_size, self.marks = paths, vocab_size, [self.mark(path) for path in paths]
        self.shards = [read_shard(path) for path in paths]
        self.starts = np.cumsum([0] + [len(shard) for shard in self.shards])  # (shards + 1,)
        self.length = self.run = int(self.starts[-1])
        self.gap = 0  # tokens that are left out after every `run`

    def __len__(self) -> int:
        return self.length

    def mark(self, path: Path) -> tuple[int, ...]:
        """What tells a changed file: size, time of change, inode. To read on in one cut short kills the process."""
        found = os.stat(path) if path.exists() else None
        return (found.st_size, found.st_mtime_ns, found.st_ino) if found else ()

    def read(self, start: int, count: int) -> np.ndarray:
        """`count` tokens from position `start` on, int64 (count,), going on at 0 after the last one."""
        out, done = np.empty(count, dtype=np.int64), 0
        while done < count:
            position = (start + done) % self.length
            place = position + position // self.run * self.gap
            index = int(np.searchsorted(self.starts, place, side="right")) - 1
            if self.mark(self.paths[index]) != self.marks[index]:
                raise UserError(f"shard {self.paths[index]}: was changed or removed while in use")
            part = self.shards[index][place - self.starts[index] :][: min(count - done, self.run - position % self.run)]
            if part.max() >= self.vocab_size:
                raise UserError(f"shard {self.paths[index]}: token {part.max()}, expected ids below {self.vocab_size}")
            out[done : done + len(part)] = part
            done += len(part)
        return out


def document_hashes(stream: TokenStream, bos_id: int, block: int = 1 << 22) -> Iterator[bytes]:
    """A hash of the tokens of every document, in order; what stands before the first BOS belongs to none."""
    rest = np.empty(0, dtype=np.int64)
    for at in range(0, len(stream), block):
        tokens = np.append(rest, stream.read(at, min(block, len(stream) - at)))
        *whole, rest = np.split(tokens, np.flatnonzero(tokens == bos_id))
        yield from (hashlib.blake2b(one, digest_size=16).digest() for one in whole if one.size and one[0] == bos_id)
    if rest[0] == bos_id:
        yield hashlib.blake2b(rest, digest_size=16).digest()
# === end: data ===


# === shared: batches ===
def open_data(settings: Settings) -> SimpleNamespace:
    """The parts of DATA_PATH, a folder or `a:0.7,b:0.3`, less their shares of HOLDOUT_TOKENS, checked. UserError."""
    path, shares = settings.data_path, {settings.data_path: 1.0}
    if {":", ","} & set(path) and not Path(path).exists():
        parts = [re.fullmatch(r"\s*(.+?)/?:(\d+\.?\d*|\.\d+)\s*", part) for part in path.split(",")]
        weights = {part[1]: float(part[2]) for part in parts if part}
        if len(weights) < len(parts) or not all(weights.values()):
            raise UserError(f"DATA_PATH={path!r}: neither a folder nor FOLDER:WEIGHT,… of new folders and more than 0")
        shares = {folder: weight / sum(weights.values()) for folder, weight in weights.items()}
    manifests = {folder: load_manifest(folder) for folder in shares}
    folder, manifest = next(iter(manifests.items()))
    tokenizer = load_tokenizer(settings.tokenizer_path or Path(folder) / manifest["tokenizer"]["file"])
    if settings.vocab_size not in (0, tokenizer.vocab_size):
        raise UserError(f"VOCAB_SIZE={settings.vocab_size}: {tokenizer.file} has {tokenizer.vocab_size} tokens")
    train, val = zip(*(check_dataset(folder, tokenizer, manifests[folder]) for folder in shares), strict=True)
    # No document of a part's validation may stand, token for token, in another part's training.
    hashes = [set(document_hashes(stream, tokenizer.bos_id)) for stream in val] if len(val) > 1 else []
    for part, stream in enumerate(train[: len(hashes)]):
        others = set().union(*hashes[:part], *hashes[part + 1 :])
        if found := others.intersection(document_hashes(stream, tokenizer.bos_id)):
            raise UserError(f"{stream.paths[0].parent}: {len(found)} training documents are in another's validation")
    tokens = np.concatenate([stream.read(0, len(stream)) for stream in val])
    if min(settings.holdout_tokens, len(tokens) - 1) < settings.train_seq_len:
        limit = f"HOLDOUT_TOKENS={settings.holdout_tokens} and validation's {len(tokens)} tokens"
        raise UserError(f"TRAIN_SEQ_LEN={settings.train_seq_len}: must be at most {limit}")
    val_bytes = sum(manifest["val"]["decoded_bytes"] for manifest in manifests.values())
    if (found := int(token_bytes(tokenizer, tokens[:-1], tokens[1:]).sum())) != val_bytes:
        raise UserError(f"validation bytes: the tokenizer's table counts {found}, manifest.json says {val_bytes}")
    sources, names = [], []  # of the validation documents
    for folder, manifest in manifests.items():
        numbers = manifest["val"].get("document_sources")  # published shards have none
        sources += [len(names) + number for number in numbers or [0] * manifest["val"]["documents"]]
        own = manifest["sources"] if numbers else [manifest["name"]]
        names += own if len(shares) == 1 else [f"{folder}/{name}" for name in own]
    documents = np.cumsum(tokens == tokenizer.bos_id)
    if len(sources) != documents[-1] or documents[0] != 1:
        raise UserError(f"DATA_PATH: {documents[-1]} validation documents, in manifest.json {len(sources)}")
    held_out = []
    for folder, stream in zip(shares, train, strict=True):
        if (count := round(shares[folder] * settings.holdout_tokens)) >= len(stream):
            raise UserError(f"{folder}: {len(stream)} tokens, more than the held-out {count} are needed")
        # From all over, for its end may be of one source; what does not divide, a few tokens, is left out.
        pieces = max(1, min(16, count // settings.train_seq_len, len(stream) - count))
        run, gap = (len(stream) - count) // pieces, count // pieces
        held_out += [np.append(tokenizer.bos_id, stream.read(n * (run + gap) + run, gap)) for n in range(pieces)]
        stream.run, stream.gap, stream.length = run, gap, pieces * run
    return SimpleNamespace(
        tokenizer=tokenizer, manifests=list(manifests.values()),
        manifest_sha256=" + ".join(sha256_file(Path(folder) / "manifest.json") for folder in shares),
        yardsticks=manifest.get("yardsticks", {}) if len(shares) == 1 else {},
        streams=train, shares=list(shares.values()),  # by part: TokenStream without what is held out, share of rows
        held_out=np.concatenate(held_out),  # int64, pieces of all training streams, each behind a BOS
        val=tokens, val_bytes=val_bytes,  # (N,) int64, of all parts; what tokens 1 to N decode to
        val_sources=(np.array(sources)[documents - 1], names))  # (N,) into the names


class Batches:
    """The training streams as micro-batches. Step s reads the same tokens whatever the ranks and micro-batches: each
    stream's share of the rows by systematic sampling (row j stands at (j + shift) / rows of the summed shares; shifts
    are multiples of the golden ratio modulo 1, so that shares are exact over steps, Weyl 1916). A stream's rows go
    round its lanes, evenly spaced, by one window a round. A thread reads one step ahead, no more.
    """

    def __init__(self, data: SimpleNamespace, settings: Settings, runtime: Runtime):
        self.data, self.runtime, self.seed = data, runtime, settings.seed
        self.seq_len, self.tokens = settings.train_seq_len, settings.train_batch_tokens
        self.all_rows, unit = self.tokens // self.seq_len, self.seq_len * runtime.world_size
        if self.tokens % unit:
            raise UserError(f"TRAIN_BATCH_TOKENS={self.tokens}: must be a multiple of TRAIN_SEQ_LEN x ranks = {unit}")
        self.lanes = [max(1, round(share * self.all_rows)) for share in data.shares]
        for stream, lanes in zip(data.streams, self.lanes, strict=True):
            if len(stream) <= (own := lanes * self.seq_len):
                where = f"{len(stream)} training tokens of {stream.paths[0].parent}"
                raise UserError(f"TRAIN_BATCH_TOKENS={self.tokens}: takes {own} of the {where}; must be fewer")
        self.rows = self.all_rows // runtime.world_size  # of this rank, a step
        self.fitted, self.cuda = settings.micro_batch_tokens == 0, runtime.device.type == "cuda"
        most = settings.micro_batch_tokens or max(self.seq_len, 131072 if self.cuda else 4096)
        if most < self.seq_len:
            raise UserError(f"MICRO_BATCH_TOKENS={most}: must be at least TRAIN_SEQ_LEN={self.seq_len}")
        self.limit_rows(most // self.seq_len)
        start = (torch.cuda.set_device, (runtime.device,)) if self.cuda else ()  # else the thread pins on device 0
        self.reader = concurrent.futures.ThreadPoolExecutor(1, "reader", *start)
        self.ahead, self.waited = {}, 0.0  # step -> Future of its tokens; seconds that the loop stood waiting for them

    def limit_rows(self, most: int) -> None:
        """Take the largest micro-batch of at most `most` windows that divides this rank's share of a step."""
        self.micro_rows = max(rows for rows in range(1, min(most, self.rows) + 1) if self.rows % rows == 0)

    def read(self, step: int) -> Tensor:
        """This rank's windows of step `step`, each with its last target, (rows, seq_len + 1)."""
        shifts = (self.seed + 0.5 + np.arange(step + 1)) * (5**0.5 - 1) / 2 % 1.0
        ends = np.append(np.cumsum(self.data.shares)[:-1], 1.0) * self.all_rows
        counts = np.diff(np.ceil(ends[:, None] - shifts), axis=0, prepend=0).astype(int)  # (streams, step + 1) rows
        starts = [(stream, row % lanes * len(stream) // lanes + row // lanes * self.seq_len)  # of the rows of all ranks
                  for stream, lanes, rows in zip(self.data.streams, self.lanes, counts, strict=True)
                  for row in range(rows[:-1].sum(), rows.sum())]
        own = starts[self.runtime.rank * self.rows :][: self.rows]
        tokens = torch.from_numpy(np.stack([stream.read(start, self.seq_len + 1) for stream, start in own]))
        return tokens.pin_memory() if self.cuda else tokens

    def micro_batches(self, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """(ids, targets) of this rank's share of step `step`, each (micro_rows, seq_len)."""
        begin = time.perf_counter()
        tokens = (self.ahead.pop(step, None) or self.reader.submit(self.read, step)).result()
        self.waited += time.perf_counter() - begin
        self.ahead = {step + 1: self.reader.submit(self.read, step + 1)}
        for part in tokens.split(self.micro_rows):
            part = part.to(self.runtime.device, non_blocking=True)
            yield part[:, :-1].contiguous(), part[:, 1:].contiguous()  # as in evaluation: one compiled graph
# === end: batches ===


# === shared: model ===
# What ARCH_MODE stands for: values of settings, below CONFIG and environment.
ARCH_PRESETS = {
    "D": {},  # the defaults: the seed's GDN-hybrid, with one attention's weights in two layers
    "gdn": dict(layer_pattern="g", num_layers=10),
    "gdn_kv": dict(layer_pattern="g k", num_layers=10, model_dim=544),  # neighbours share keys and values: wider
    "hybrid": dict(layer_pattern="g g a a a a a a a a g"),  # of openai/parameter-golf PR 1895
    "baseline": dict(layer_pattern="a", num_layers=9, mlp_mult=2.0, unet_skips=True, qk_gain_init=1.5),
    "llama": dict(layer_pattern="a", num_layers=12, mlp="swiglu", mlp_mult=2.75, norm="rms_weight", logit_softcap=0.0,
                  qk_norm=False, residual_mix=False, tied_embed_init_std=0.02),
}
CONV_TAPS = 4  # of GDN's short convolution, the current token included
DOCUMENT_DECAY = -60.0  # log decay at a document's first token: cuts it off (-inf would give NaN, -1e4 costs digits)
NORMS = ("rms", "rms_weight", "layer")
# The settings that shape the network: they rebuild it from an artifact, with vocab_size, bos_id, layers and norms.
MODEL_SETTINGS = tuple("""
    train_seq_len model_dim num_heads num_kv_heads attn_window mlp mlp_mult bio_events bio_threshold positions rope_base
    rope_dims qk_norm qk_gain_init residual_mix unet_skips bigram_vocab_size bigram_dim ngram_order tie_embeddings
    tied_embed_init_std logit_softcap gdn_neg_eigval
""".split())


def model_config(settings, vocab_size: int, bos_id: int) -> SimpleNamespace:
    """Checked shape of the model that `settings` ask for. Raises UserError where the numbers do not fit together.

    LAYER_PATTERN is one word a layer, repeated or cut to NUM_LAYERS: g GDN, k GDN with keys and values of the GDN
    before it, s sliding window, a full attention. Words with the same number share the mixer's weights (s1 ... s1), in
    capitals the whole layer's (A1 A2 A1 A2: depth recurrence). NORM likewise. Nothing sees beyond a bos_id.
    """
    dim, heads, kv_heads, rope_dims = settings.model_dim, settings.num_heads, settings.num_kv_heads, settings.rope_dims
    width, words, norms = dim // heads, settings.layer_pattern.split(), settings.norm.split()
    pattern = f"LAYER_PATTERN={settings.layer_pattern!r}"
    odd = ", ".join(repr(word) for word in words or [""] if not re.fullmatch("[gksa][0-9]*|[GKSA][0-9]+", word))
    for wrong, said in (
        (dim % (2 * heads), f"MODEL_DIM={dim}: must be a multiple of 2 x NUM_HEADS = {2 * heads}"),
        (heads % kv_heads, f"NUM_HEADS={heads}: must be a multiple of NUM_KV_HEADS = {kv_heads}"),
        (rope_dims % 2 or rope_dims > width,
         f"ROPE_DIMS={rope_dims}: must be even, at most MODEL_DIM / NUM_HEADS = {width}"),
        (not norms or set(norms) - set(NORMS), f"NORM={settings.norm!r}: must be one or more of {', '.join(NORMS)}"),
        (odd, f"{pattern}: {odd} is not g, k, s or a with an optional number; capitals need one"),
        ("k" in settings.layer_pattern.lower().split("g")[0], f"{pattern}: no g before 'k' whose keys it could take"),
        (settings.bio_events != "off" and settings.mlp != "bio", f"BIO_EVENTS={settings.bio_events!r}: needs MLP=bio"),
        (settings.ngram_order == 1 or vocab_size**settings.ngram_order >= 1 << 63,
         f"NGRAM_ORDER={settings.ngram_order}: must be 0 or from 2 to {int(63 / math.log2(vocab_size + 1))}"),
        (getattr(settings, "eval_stateful", 0) and settings.positions == "learned",
         "EVAL_STATEFUL=1: POSITIONS='learned' ends at TRAIN_SEQ_LEN, documents do not; it must be 0"),
    ):
        if wrong:
            raise UserError(said)
    count = settings.num_layers or len(words)
    layers, norms = (" ".join((each * count)[:count]) for each in (words, norms))
    return SimpleNamespace(vocab_size=vocab_size, bos_id=bos_id, layers=layers, norms=norms, ngram_bytes=0,
                           **{name: getattr(settings, name) for name in MODEL_SETTINGS})


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T in x's dtype; weights are kept in float32."""
    return F.linear(x, weight.to(x.dtype))


def scaled(x: Tensor, scale: Tensor | None) -> Tensor:
    """x times a learned scale per channel, where there is one."""
    return x if scale is None else x * scale.to(x.dtype)


def matrix(splits: tuple[int, ...], cols: int, std: float) -> nn.Parameter:
    """Matrices of `splits` rows, one below the other (Muon takes them one by one); normal with deviation `std`."""
    weight = nn.Parameter(torch.randn(sum(splits), cols) * std)
    weight.splits = splits
    return weight


class Norm(nn.Module):
    """One of NORMS: RMSNorm (arXiv 1910.07467), plain or with a weight per channel; LayerNorm with weight and bias."""

    def __init__(self, kind: str, dim: int):
        super().__init__()
        self.weight = None if kind == "rms" else nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim)) if kind == "layer" else None

    def forward(self, x: Tensor) -> Tensor:
        dim, weight = x.shape[-1:], None if self.weight is None else self.weight.to(x.dtype)
        return F.rms_norm(x, dim, weight) if self.bias is None else F.layer_norm(x, dim, weight, self.bias.to(x.dtype))


def add_product(total: Tensor, a: Tensor, b: Tensor, alpha: float = 1.0) -> Tensor:
    """total += alpha * a @ b, in place (batched); the product has the operands' dtype, the sum has that of total."""
    return total.baddbmm_(a, b, alpha=alpha) if total.dtype == a.dtype else total.add_(torch.bmm(a, b), alpha=alpha)


def gdn_scan(w: Tensor, u: Tensor, k: Tensor, decay: Tensor, state: Tensor,
             extra: Tensor | None) -> tuple[Tensor, Tensor]:
    """The sequential part: per chunk n, new_n = U_n - W_n S_n and S_{n+1} = decay_n S_n + K_n^T new_n.

    Given `extra`, its adjoint, from the last chunk to the first, which is the same with W and K in each other's place:
    new_n = U_n + W_n R_{n+1} and R_n = extra_n + decay_n R_{n+1} - K_n^T new_n, where R is dL/dS, U and extra what the
    outputs contribute to dL/dnew and dL/dS. w, k (N*M, C, K); u (N*M, C, V); decay (N*M,); state, S_0 or R_N,
    (M, K, V); extra (N*M, K, V), with M = B*H rows and N chunks, chunk-major. Returns all N + 1 states and new.
    """
    way = 1 if extra is None else -1
    states, new = state.new_empty(len(w) + len(state), *state.shape[1:]), torch.empty_like(u)
    s, *after = states.split(len(state))[::way]
    s.copy_(state)
    parts = [x.split(len(state))[::way] for x in (w, u, k.mT, decay[:, None, None], new)]
    extras = [None] * len(after) if extra is None else extra.split(len(state))[::way]
    for w_n, u_n, k_n, decay_n, new_n, extra_n, s_next in zip(*parts, extras, after, strict=True):
        torch.baddbmm(u_n, w_n, s.to(w.dtype), alpha=-way, out=new_n)
        torch.mul(s, decay_n, out=s_next) if extra_n is None else torch.addcmul(extra_n, s, decay_n, out=s_next)
        add_product(s_next, k_n, new_n, alpha=way)
        s = s_next
    return states, new


# An op, into which torch.compile does not trace: its loop would unroll. The first script imported into a process
# registers it for all: registered again it would be freed, and old handles crash.
if not hasattr(torch.ops.underpar, "gdn_scan"):
    torch.library.custom_op("underpar::gdn_scan", gdn_scan, mutates_args=()).register_fake(
        lambda w, u, k, decay, s, extra: (s.new_empty(len(w) + len(s), *s.shape[1:]), torch.empty_like(u)))
gdn_scan = torch.ops.underpar.gdn_scan.default


class GatedDeltaChunks(torch.autograd.Function):
    """Chunk form with a hand-written backward (arXiv:2412.06464, section 3).

    Per chunk of C tokens, with G the running sum of g from the chunk's start and D_ij = exp(G_i - G_j) for i >= j:
    A = tril(beta KK^T D, -1), T = (I + A)^-1, U = T beta V, W = T beta exp(G) K, P = QK^T D; after the scan over
    chunks O = exp(G) Q S + P new. Inputs are chunk-major: q, k (N*M, C, K); v (N*M, C, V); g, beta (N*M, C);
    state (M, K, V). Matrix products take operands of v's dtype; D, T and S have the dtype of g.
    """

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        dtype, m = v.dtype, state.shape[0]
        # float64: a long run of strong decay, or a reset, would leave few digits in the differences of a float32 sum.
        total = g.double().cumsum(-1)
        grow, shrink = total.to(g.dtype).exp(), (total[:, -1:] - total).to(g.dtype).exp()  # (N*M, C)
        # Clamped, since exp would overflow above the diagonal; below it nothing is positive.
        d = (total[..., None] - total[..., None, :]).to(g.dtype).clamp_(max=0).exp_().tril_()  # (N*M, C, C)
        kk = torch.bmm(k, k.mT).to(d.dtype).mul_(d)
        p = torch.bmm(q, k.mT).mul_(d)
        # Neumann's product and Newton's iteration would not do: powers of A grow to NaN when keys are correlated.
        eye = torch.eye(d.shape[-1], dtype=d.dtype, device=d.device)
        t = torch.linalg.solve_triangular(beta[..., None] * kk, eye, upper=False, unitriangular=True)
        u = torch.bmm((t * beta[..., None, :]).to(dtype), v)
        w = torch.bmm((t * (beta * grow)[..., None, :]).to(dtype), k)
        k_end = (k * shrink[..., None]).to(dtype)
        states, new = gdn_scan(w, u, k_end, grow[..., -1], state, None)
        t, s = t.to(dtype), states[:-m].to(dtype)
        o = torch.baddbmm(torch.bmm(p, new), (q * grow[..., None]).to(dtype), s)
        ctx.save_for_backward(q, k, v, grow, shrink, beta, d, kk, p, t, u, w, k_end, s, new)
        return o, states[-m:].clone()

    @staticmethod
    def backward(ctx, d_o: Tensor, d_last: Tensor) -> tuple[Tensor, ...]:
        q, k, v, grow, shrink, beta, d, kk, p, t, u, w, k_end, s, new = ctx.saved_tensors
        dtype, m = v.dtype, d_last.shape[0]
        decay, d_o, q_grow = grow[:, -1].contiguous(), d_o.contiguous(), (q * grow[..., None]).to(dtype)
        r, d_new = gdn_scan(k_end, torch.bmm(p.mT, d_o), w, decay, d_last, torch.bmm(q_grow.mT, d_o))
        r_next = r[m:].to(dtype)
        d_bv = torch.bmm(t.mT, d_new)  # gradient of beta V
        d_bk = torch.bmm(t.mT, torch.bmm(d_new, s.mT)).neg_()  # gradient of beta exp(G) K
        d_a = torch.baddbmm(torch.bmm(d_bv, u.mT), d_bk, w.mT, beta=-1, alpha=-1).to(d.dtype).tril(-1)
        d_p = torch.bmm(d_o, new.mT)
        a_kk, p_qk, read = d_a * kk, d_p * p, (d_bk * k).sum(-1, dtype=d.dtype) * grow
        d_beta = a_kk.sum(-1) + (d_bv * v).sum(-1, dtype=d.dtype) + read
        d_q = torch.bmm(d_o, s.mT) * grow[..., None]
        d_k = torch.bmm(new, r_next.mT) * shrink[..., None]
        # G_i enters by exp(G_i - G_j) of earlier tokens j, exp(G_i) and exp(G_C - G_i). The terms with i = j and
        # i = C are exp(0): left out, since they would only cancel, at the cost of the digits of g's gradient.
        pairs, write = p_qk.tril(-1) + a_kk * beta[..., None], (k * d_k).sum(-1)
        write[:, -1] = 0
        d_total = (q * d_q).sum(-1) + beta * read - write + pairs.sum(-1) - pairs.sum(-2)
        d_total[:, -1] += write.sum(-1) + decay * (r_next * s).sum((-1, -2), dtype=d.dtype)
        d_qk, d_kk = d_p.mul_(d), d_a.mul_(d).mul_(beta[..., None])
        d_q, d_k = add_product(d_q, d_qk, k), add_product(d_k, d_qk.mT, q)
        d_k = add_product(d_k, (d_kk + d_kk.mT).to(dtype), k).addcmul_(d_bk, (beta * grow)[..., None])
        d_g = d_total.flip(-1).cumsum(-1).flip(-1)
        return d_q.to(dtype), d_k.to(dtype), (d_bv * beta[..., None]).to(dtype), d_g, d_beta, r[:m].clone()


def gdn_chunk(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None = None,
              chunk: int = 32) -> tuple[Tensor, Tensor]:
    """Gated DeltaNet (arXiv 2412.06464, section 3), in matrix products over chunks of tokens (32 is fastest on CPU).

    By token S' = a S + b k (v - a S^T k)^T and o = S'^T q, where a = exp(g) <= 1; q, k L2-normed, q times K**-0.5 too.
    q, k (B, T, H, K), v, o (B, T, H, V): float64, float32 or bfloat16; g, beta (B, T, H); S (B, H, K, V), None: zeros.
    """
    (b, t, h, dim_k), dim_v, dtype = q.shape, v.shape[-1], torch.promote_types(v.dtype, torch.float32)
    if pad := -t % chunk:  # a padded token has k = 0, beta = 0 and g = 0, and leaves the state as it is
        q, k, v, g, beta = (F.pad(x, (0, 0) * (x.ndim - 2) + (0, pad)) for x in (q, k, v, g, beta))
    parts = [x.unflatten(1, (-1, chunk)).movedim((1, 3), (0, 2)).flatten(0, 2)  # (B, T, H, ...) -> (N*B*H, C, ...)
             for x in (q, k, v, g.to(dtype), beta.to(dtype))]
    state = v.new_zeros(b, h, dim_k, dim_v, dtype=dtype) if state is None else state.to(dtype)
    with torch.autocast(v.device.type, enabled=False):  # autocast would round the inverse and the state to bfloat16
        o, last = GatedDeltaChunks.apply(*parts, state.flatten(0, 1))
    return o.view(-1, b, h, chunk, dim_v).movedim((0, 2), (1, 3)).flatten(1, 2)[:, :t], last.view(b, h, dim_k, dim_v)


def short_conv(x: Tensor, weight: Tensor, doc: Tensor) -> Tensor:
    """Causal depthwise convolution and SiLU of the last T tokens: x (B, taps-1 + T, C), weight (C, taps), doc as x.

    Shifted sums beat F.conv1d(groups=C) on the CPU, and let a tap that would reach into another document be zero.
    """
    reach, weight = weight.size(1) - 1, weight.to(x.dtype)
    y = x[:, reach:] * weight[:, -1]
    for at in range(1, reach + 1):
        same = (doc[:, reach - at : -at] == doc[:, reach:]).unsqueeze(-1)
        y = y + x[:, reach - at : -at] * weight[:, reach - at] * same
    return F.silu(y)


class GatedDeltaNet(nn.Module):
    """Gated DeltaNet mixer (arXiv 2412.06464) with expand_v = 1: linear attention whose state forgets and corrects.

    With an `owner` it projects and convolves queries and gates only; keys and values are made by the owner's weights.
    """

    def __init__(self, config: SimpleNamespace, owner: "GatedDeltaNet | None" = None):
        super().__init__()
        dim, heads = config.model_dim, config.num_heads
        self.heads, self.head_dim, self.beta_scale = heads, dim // heads, 2.0 if config.gdn_neg_eigval else 1.0
        self.owner = (owner,)  # in a tuple: its weights are counted and stored once, with the owner
        self.w_qkvg = matrix((dim,) * (2 if owner else 4), dim, 0.5 * dim**-0.5)
        self.w_o = nn.Parameter(torch.zeros(dim, dim))
        self.ab = matrix((2 * heads,), dim, 0.5 * dim**-0.5)  # decay and step size, one number a head each
        # Initialised as PyTorch's depthwise Conv1d, then as fla's. 0.01 keeps A_log finite: -inf is a dead head.
        self.conv = nn.Parameter(torch.empty((1 if owner else 3) * dim, CONV_TAPS).uniform_(-1, 1) / CONV_TAPS**0.5)
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(0.01, 16.0).log())
        dt = torch.exp(torch.empty(heads).uniform_(math.log(1e-3), math.log(0.1))).clamp_min(1e-4)
        self.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))  # softplus(dt_bias) = dt
        self.norm = nn.Parameter(torch.ones(self.head_dim))

    def weights(self) -> tuple[Tensor, Tensor]:
        """w_qkvg (4 dim, dim) and conv (3 dim, taps), the owner's rows among them."""
        (owner,), dim = self.owner, self.w_o.size(0)
        if owner is None:
            return self.w_qkvg, self.conv
        w_q, w_gate = self.w_qkvg.split(dim)
        return torch.cat([w_q, owner.w_qkvg[dim : 3 * dim], w_gate]), torch.cat([self.conv, owner.conv[dim:]])

    def inputs(self, x: Tensor, qkv: Tensor, first: Tensor) -> tuple[Tensor, ...]:
        """Of gdn_chunk: x (..., dim); qkv (..., 3 dim), convolved; first (...): whether a token begins a document."""
        q, k, v = qkv.unflatten(-1, (3, self.heads, self.head_dim)).unbind(-3)  # (..., H, D)
        wide = self.ab.dtype  # float32: a key longer than 1 lets the state grow; eps: else zeros get gradients of 1e12
        q, k = ((t * torch.rsqrt(t.to(wide).square().sum(-1, keepdim=True) + 1e-6)).to(t.dtype) for t in (q, k))
        a, b = F.linear(x.to(wide), self.ab).split(self.heads, dim=-1)  # (..., H), float32
        g = torch.where(first.unsqueeze(-1), DOCUMENT_DECAY, -self.A_log.exp() * F.softplus(a + self.dt_bias))
        return q * self.head_dim**-0.5, k, v, g, self.beta_scale * torch.sigmoid(b)

    def gated(self, o: Tensor, gate: Tensor) -> Tensor:
        """What w_o reads (..., dim) of outputs (..., H, D) and gate (..., dim)."""
        o = F.rms_norm(o, (self.head_dim,), self.norm.to(o.dtype)) * F.silu(gate.view(o.shape))
        return o.reshape(gate.shape)

    def forward(self, x: Tensor, doc: Tensor, cache: dict | None, *positions: Tensor) -> Tensor:
        """x (B, T, dim); doc, the documents of all tokens so far, see GPT.features; cache is updated."""
        (B, _, dim), (w_qkvg, conv), kept = x.shape, self.weights(), cache or {}
        qkv, gate = linear(x, w_qkvg).split([3 * dim, dim], dim=-1)
        qkv = torch.cat([kept.get("tail", qkv.new_zeros(B, CONV_TAPS - 1, 3 * dim)), qkv], dim=1)
        doc = doc[:, -qkv.size(1) :]
        first = doc[:, CONV_TAPS - 1 :] != doc[:, CONV_TAPS - 2 : -1]  # (B, T)
        inputs = self.inputs(x, short_conv(qkv, conv, doc), first)
        o, state = gdn_chunk(*inputs, kept.get("state"), chunk=64 if x.is_cuda else 32)
        if cache is not None:
            cache.update(state=state, tail=qkv[:, 1 - CONV_TAPS :])
        return linear(self.gated(o, gate), self.w_o)


def turns(positions: Tensor, base: float, dims: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines (..., T, 1, dims/2) of rotary positions (..., T) (arXiv 2104.09864), as in GPT-NeoX."""
    half = dims // 2
    frequency = base ** (-torch.arange(half, device=positions.device, dtype=torch.float32) / half)
    angle = (positions.float()[..., None] * frequency).unsqueeze(-2)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (B, T, H, D) with its first dimensions, twice as many as there are `turns`, rotated by these."""
    half, cos, sin = cos.size(-1), cos.to(x.dtype), sin.to(x.dtype)
    left, right, rest = x.split([half, half, x.size(-1) - 2 * half], dim=-1)
    return torch.cat([left * cos - right * sin, left * sin + right * cos, rest], dim=-1)


def attend(q: Tensor, k: Tensor, v: Tensor, doc: Tensor, window: int) -> Tensor:
    """Causal attention inside a document: query i sees key j if 0 <= i - j < window and both are of one document.

    q (B, H, T, D), k and v (B, Hkv, L, D), the queries being the last T of the L positions; doc (B, L).
    Blocks of queries skip the keys that none of them sees: 3x faster on the CPU than one masked call at T = 4 windows.
    """
    T, past, length, dtype = q.size(2), k.size(2) - q.size(2), k.size(2), q.dtype
    if q.is_cuda:  # the kernels that take a mask do not take grouped heads there
        k, v = (t.repeat_interleave(q.size(1) // k.size(1), dim=1) for t in (k, v))
    else:  # a CPU's backward pass takes 4 times as long in bfloat16
        q, k, v = (t.to(torch.promote_types(dtype, torch.float32)) for t in (q, k, v))
    out, block, at = [], max(64, min(window, T) // 4), torch.arange(length, device=q.device)
    for start in range(past, length, block):  # queries start..end, keys low..end
        end, low = min(start + block, length), max(0, start - window + 1)
        gap = at[start:end, None] - at[low:end]  # (t, l)
        mask = (gap >= 0) & (gap < window) & (doc[:, start:end, None] == doc[:, None, low:end])  # (B, t, l)
        parts = q[:, :, start - past : end - past], k[:, :, low:end], v[:, :, low:end]
        out.append(F.scaled_dot_product_attention(*parts, mask[:, None], enable_gqa=not q.is_cuda))
    return torch.cat(out, dim=2).to(dtype)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; `qk_norm`: queries and keys RMS-normed, a gain per head."""

    def __init__(self, config: SimpleNamespace, window: int):
        super().__init__()
        dim, self.heads, self.kv_heads = config.model_dim, config.num_heads, config.num_kv_heads
        self.head_dim, self.window = dim // config.num_heads, window
        rows = self.kv_heads * self.head_dim
        self.w_qkv = matrix((dim, rows, rows), dim, 0.5 * dim**-0.5)
        self.w_o = nn.Parameter(torch.zeros(dim, dim))
        self.q_gain = nn.Parameter(torch.full((self.heads,), config.qk_gain_init)) if config.qk_norm else None

    def forward(self, x: Tensor, doc: Tensor, cache: dict | None, cos: Tensor, sin: Tensor) -> Tensor:
        """x (B, T, dim); doc, the documents of all tokens so far, see GPT.features; cos and sin of `turns`."""
        (B, T, dim), H, Hkv, D = x.shape, self.heads, self.kv_heads, self.head_dim
        q, k, v = linear(x, self.w_qkv).view(B, T, H + 2 * Hkv, D).split([H, Hkv, Hkv], dim=2)  # (B, T, H, D)
        if self.q_gain is not None:
            q, k = F.rms_norm(q, (D,)) * self.q_gain.to(x.dtype)[:, None], F.rms_norm(k, (D,))
        if cos.size(-1):
            q, k = rotate(torch.cat([q, k], dim=2), cos, sin).split([H, Hkv], dim=2)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if cache is not None:
            k, v = (torch.cat([cache.get(name, t[:, :, :0]), t], dim=2) for name, t in (("k", k), ("v", v)))
            keep = max(0, k.size(2) - self.window + 1)  # the next query sees itself and window - 1 keys before it
            cache.update(k=k[:, :, keep:], v=v[:, :, keep:])
        o = attend(q, k, v, doc[:, -k.size(2) :], self.window)
        return linear(o.transpose(1, 2).reshape(B, T, dim), self.w_o)


def oscillate(x: Tensor, wave: Tensor) -> Tensor:
    """sin(omega x + phi) tanh(x) + b per unit (WiggleGPT, Eden-Eldith/WiggleGPT). x (..., U), wave (3, U)."""
    omega, phi, level = wave.to(x.dtype)
    return torch.sin(omega * x + phi) * torch.tanh(x) + level


ACTIVATIONS = {"relu2": lambda h: F.relu(h).square(), "leaky_relu2": lambda h: F.leaky_relu(h, 0.5).square(),
               "gelu": F.gelu, "swiglu": lambda h: F.silu(h.chunk(2, dim=-1)[0]) * h.chunk(2, dim=-1)[1]}


class MLP(nn.Module):
    """Two matrices around an activation: ReLU^2 (arXiv 2109.08668), SwiGLU (2002.05202, with a gate), or the bio-MLP's.

    Its events are WiggleGPT's SparseEventLayer (model_bio_optimized.py, without biases): soft, no spike ever zero, or
    hard, a spike of 1 where volt > threshold, else 0, with the gradient of the soft one (straight through).
    """

    def __init__(self, config: SimpleNamespace):
        super().__init__()
        dim, hidden = config.model_dim, int(config.mlp_mult * config.model_dim)
        self.kind, self.events, self.threshold = config.mlp, config.bio_events, config.bio_threshold
        self.w_up = matrix((hidden,) * (2 if self.kind == "swiglu" else 1), dim, 0.5 * dim**-0.5)
        start, spread = torch.tensor([[1.0], [0.0], [0.0]]), torch.tensor([[0.1], [0.1], [0.0]])  # omega, phi, b
        if self.kind == "bio":
            self.wave = nn.Parameter(start + spread * torch.randn(3, hidden))
        if self.events != "off":
            self.w_gate, self.w_mix = (matrix((hidden,), hidden, 0.5 * hidden**-0.5) for _ in range(2))
            self.mix_wave = nn.Parameter(start + spread * torch.randn(3, hidden))
        self.w_down = nn.Parameter(torch.zeros(dim, hidden))

    def hidden(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """What w_down reads (B, T, hidden) of x (B, T, dim), and which units had an event (None: the kind has none)."""
        h = linear(x, self.w_up)
        h = oscillate(h, self.wave) if self.kind == "bio" else ACTIVATIONS[self.kind](h)
        if self.events == "off":
            return h, None
        volt = torch.sigmoid(linear(h, self.w_gate))
        spike, fired = torch.sigmoid(5.0 * (volt - self.threshold)), volt > self.threshold
        if self.events == "hard":
            spike = fired.to(h.dtype) + (spike - spike.detach())
        return oscillate(linear(h * spike, self.w_mix), self.mix_wave), fired

    def forward(self, x: Tensor) -> Tensor:
        return linear(self.hidden(x)[0], self.w_down)


class Block(nn.Module):
    """Residual layer: mix with the embedding, a mixer, an MLP."""

    def __init__(self, config: SimpleNamespace, norm: str):
        super().__init__()
        dim = config.model_dim
        self.mixer_norm, self.mlp_norm, self.mlp = Norm(norm, dim), Norm(norm, dim), MLP(config)
        self.mix = self.mixer_scale = self.mlp_scale = None
        if config.residual_mix:
            self.mix = nn.Parameter(torch.stack([torch.ones(dim), torch.zeros(dim)]))
            self.mixer_scale, self.mlp_scale = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor, x0: Tensor, mixer: nn.Module, *context) -> Tensor:
        """x and x0 (the embedding) (B, T, dim); context: the mixer's further arguments."""
        if self.mix is not None:
            x = scaled(x, self.mix[0]) + scaled(x0, self.mix[1])
        x = x + scaled(mixer(self.mixer_norm(x), *context), self.mixer_scale)
        return x + scaled(self.mlp(self.mlp_norm(x)), self.mlp_scale)


class GPT(nn.Module):
    """The language model: embedding, layers by pattern, head with a soft cap; by counts=NGrams, those of its config."""

    def __init__(self, config: SimpleNamespace, counts: Callable | None = None):
        super().__init__()
        self.activation_checkpointing = False  # compute each layer again in the backward pass, to save memory
        self.dtype = None  # of activations, weights are float32; None: bfloat16 on CUDA, on a CPU the weights' own
        self.config, dim, std = config, config.model_dim, config.tied_embed_init_std
        self.embed = matrix((config.vocab_size,), dim, std)
        self.head = None if config.tie_embeddings else nn.Parameter(torch.zeros(config.vocab_size, dim))
        words, norms = config.layers.split(), config.norms.split()
        if config.positions == "learned":
            self.positions_embed = matrix((config.train_seq_len,), dim, 0.1 if config.residual_mix else std)
        if config.bigram_vocab_size:
            self.bigram_embed = matrix((config.bigram_vocab_size,), config.bigram_dim, 0.1)
            self.w_bigram = nn.Parameter(torch.zeros(dim, config.bigram_dim))
        self.ngrams = counts(config) if counts and config.ngram_order else None
        if config.unet_skips:
            self.skip = nn.Parameter(torch.ones(len(words) // 2, dim))
        # layers that share a mixer, or a block, have one name; caches are per layer, never shared
        mixers = [word if word[1:] else at for at, word in enumerate(words)]
        blocks = [word if word[0].isupper() else at for at, word in enumerate(words)]
        self.mixer_of_layer = [list(dict.fromkeys(mixers)).index(name) for name in mixers]
        self.block_of_layer = [list(dict.fromkeys(blocks)).index(name) for name in blocks]
        self.mixers, owner = nn.ModuleList(), None
        for word, at in zip(words, self.mixer_of_layer, strict=True):
            if at == len(self.mixers):  # its first layer
                self.mixers.append(Attention(config, config.attn_window if word[0] in "sS" else 1 << 30)
                                   if word[0] in "sSaA" else GatedDeltaNet(config, owner if word[0] in "kK" else None))
            owner = self.mixers[at] if word[0] in "gG" else owner
        self.blocks = nn.ModuleList(Block(config, norms[blocks.index(name)]) for name in dict.fromkeys(blocks))
        self.final_norm = Norm(norms[-1], dim)
        self.rope_dims = (config.rope_dims or dim // config.num_heads) if config.positions == "rope" else 0
        windows = [mixer.window for mixer in self.mixers if isinstance(mixer, Attention)]
        self.reach = max(windows, default=0) + CONV_TAPS - 1  # tokens back whose documents attention, convolution ask

    def embedded(self, ids: Tensor, before: Tensor, positions: Tensor) -> Tensor:
        """What the first layer reads (..., dim) of ids (...), the ids before them, and their positions."""
        config, x = self.config, F.embedding(ids, self.embed)
        x = x.to(self.dtype or (torch.bfloat16 if ids.is_cuda else x.dtype))
        x = F.rms_norm(x, x.shape[-1:]) if config.residual_mix else x
        if config.positions == "learned":
            x = x + F.embedding(positions, self.positions_embed).to(x.dtype)
        if config.bigram_vocab_size:  # Parameter Golf's BigramHashEmbedding; a pair is of one document
            before = before.masked_fill(ids == config.bos_id, config.bos_id)
            pair = ((36313 * ids) ^ (27191 * before)) % config.bigram_vocab_size
            x = x + linear(F.embedding(pair, self.bigram_embed).to(x.dtype), self.w_bigram)
        return x

    def features(self, ids: Tensor, cache: dict | None = None) -> Tensor:
        """ids (B, T) to what the head reads (B, T, dim) and, behind it, what n-grams say (B, T, V), in float32.
        By a cache, at first {}, calls go on."""
        config, half, kept = self.config, len(self.mixer_of_layer) // 2, {} if cache is None else cache
        # Documents of all L tokens so far, numbered, behind as many BOS as the convolution reaches back.
        before = kept.get("doc", torch.arange(1, CONV_TAPS, device=ids.device).expand(len(ids), -1))
        doc = torch.cat([before, before[:, -1:] + (ids == config.bos_id).cumsum(dim=1)], dim=1)  # (B, CONV_TAPS-1 + L)
        end = kept.get("end", 0) + ids.size(1)
        positions = torch.arange(end - ids.size(1), end, device=ids.device)
        if config.positions == "learned" and end > config.train_seq_len:
            raise UserError(f"POSITIONS='learned': {end} tokens in a text, TRAIN_SEQ_LEN={config.train_seq_len}")
        known = torch.cat([kept.get("last", ids[:, :0]), ids], dim=1)
        x = self.embedded(ids, F.pad(known, (1, 0), value=config.bos_id)[:, -1 - ids.size(1) : -1], positions)
        cos, sin = turns(positions, config.rope_base, self.rope_dims)
        x0, skips, recompute = x, [], self.activation_checkpointing and torch.is_grad_enabled()
        for layer, (block, mixer) in enumerate(zip(self.block_of_layer, self.mixer_of_layer, strict=True)):
            if layer >= half and skips:
                x = x + scaled(skips.pop(), self.skip[len(skips)])
            own = None if cache is None else cache.setdefault(layer, {})
            run = self.blocks[block], x, x0, self.mixers[mixer], doc, own, cos, sin
            x = checkpoint(*run, use_reentrant=False) if recompute else run[0](*run[1:])
            if config.unet_skips and layer < half:
                skips.append(x)
        kept.update(doc=doc[:, -self.reach :], end=end, last=known[:, -max(1, config.ngram_order - 1) :])
        x = self.final_norm(x)
        return x if self.ngrams is None else torch.cat([x, self.ngrams(known)[:, -ids.size(1) :]], dim=-1)

    def logits(self, x: Tensor) -> Tensor:
        """Of features (..., dim): (..., V), float32 at least; with n-grams those of the mixture."""
        x, counted = x.tensor_split([self.config.model_dim], dim=-1)
        logits, cap = linear(x, self.embed if self.head is None else self.head), self.config.logit_softcap
        logits = logits.float() if logits.dtype == torch.bfloat16 else logits
        logits = cap * torch.tanh(logits / cap) if cap else logits
        return logits if self.ngrams is None else self.ngrams.mixed(logits, counted)

    def forward(self, ids: Tensor, targets: Tensor | None = None, cache: dict | None = None) -> Tensor:
        """ids (B, T) to nats of targets (B, T), 0 for -1, or logits (B, T, V); with a cache see `features`."""
        logits = self.logits(self.features(ids, cache))
        if targets is None:
            return logits
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="none")
        return losses.view_as(targets)
# === end: model ===


# === shared: ngrams ===
def longer_contexts(contexts: Tensor, ids: Tensor, vocab_size: int, bos_id: int) -> Tensor:
    """The n tokens up to each position, packed (..., T), made n + 1; -1 if they are not of one row and document."""
    before = F.pad(contexts[..., :-1], (1, 0), value=-1)
    return torch.where((ids == bos_id) | (before < 0), -1, before * vocab_size + ids)


class NGrams(nn.Module):
    """Counts of the training text's n-grams as a language model: interpolated Kneser-Ney with three discounts a length
    (Chen and Goodman 1998, section 3): p_n(w | c) = (count - D) / total + left(c) p_(n-1)(w | c less its first token).

    `packed` is a zstd frame of byte planes, int32, length by length: of each context how many continuations are kept
    and how often the others were seen; of each kept one its token and its count; discounts of 1, 2 and more in 1e-6. A
    token stands as its place among those kept after the context less its first token, less that of the one before.
    """

    def __init__(self, config: SimpleNamespace):
        super().__init__()
        self.order, self.vocab_size, self.bos_id = config.ngram_order, config.vocab_size, config.bos_id
        self.register_buffer("packed", torch.zeros(config.ngram_bytes, dtype=torch.int8))
        self.register_buffer("mix", torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]))  # at first the network alone
        self.version = -1  # that of `packed` which the tables go by

    def unpack(self) -> None:
        """The tables of each length: sorted contexts and, for any other, 2**62 (L + 1,); of these the first
        continuation's place, their number, what is left for shorter contexts; the continuations' tokens, weights."""
        frame = zstandard.ZstdDecompressor().stream_reader(self.packed.cpu().numpy().tobytes())
        planes = np.frombuffer(frame.read(1 << 31), np.uint8).reshape(4, -1)  # at most, whatever the frame declares
        counts = torch.from_numpy(np.ascontiguousarray(planes.T).view("<i4")[:, 0])
        counts, self.tables, self.version = counts.to(self.packed.device).long(), [], self.packed._version
        contexts = shorter = first = counts.new_zeros(1)
        tokens = torch.arange(self.vocab_size, device=counts.device)
        for length in range(self.order):
            children, lost, counts = counts.split([len(contexts), len(contexts), len(counts) - 2 * len(contexts)])
            kept = int(children.sum())
            steps, count, discounts, counts = counts.split([kept, kept, 3, len(counts) - 2 * kept - 3])
            parent, ends = torch.repeat_interleave(children), steps.cumsum(0)
            place = first[torch.searchsorted(shorter, contexts[parent] % self.vocab_size ** max(0, length - 1))]
            first = children.cumsum(0) - children
            tokens = tokens[place + ends - (ends - steps)[first[parent]]]
            less, total = discounts[count.clamp(max=3) - 1], 1_000_000 * lost.index_add(0, parent, count)
            weights = (1_000_000 * count - less) / total[parent]
            left = (1_000_000 * lost).index_add(0, parent, less) / total  # as 1 - sum of weights it would lose digits
            left = F.pad(left.masked_fill(children == 0, 1.0), (0, 1), value=1.0)
            columns = F.pad(contexts, (0, 1), value=1 << 62), F.pad(first, (0, 1)), F.pad(children, (0, 1))
            self.tables.append((*columns, left, tokens, weights))
            contexts, shorter = contexts[parent] * self.vocab_size + tokens, contexts

    @torch.no_grad()
    def forward(self, ids: Tensor) -> Tensor:
        """Of ids (B, T), those of unknown text -1: log p (B, T, V) of what follows, float32."""
        if self.version != self.packed._version:
            self.unpack()
        ((*_, left, tokens, weights), *longer), size, context = self.tables, self.vocab_size, ids.contiguous()
        p = (left[0] / size).repeat(size).index_add_(0, tokens, weights).repeat(*ids.shape, 1)  # (B, T, V)
        for contexts, first, number, left, tokens, weights in longer:
            at = torch.searchsorted(contexts, context)
            node = torch.where(contexts[at] == context, at, len(contexts) - 1).flatten()  # (B * T,)
            count = number[node]
            row = torch.repeat_interleave(count)
            at = torch.arange(len(row), device=ids.device)
            at += (first[node] - count.cumsum(0) + count).index_select(0, row)  # half the time of [row]
            p.mul_(left[node].view(*ids.shape, 1)).view(-1).index_add_(
                0, tokens.index_select(0, at).add_(row, alpha=size), weights.index_select(0, at))
            context = longer_contexts(context, ids, size, self.bos_id)
        return p.clamp_(min=1e-37).log_()  # before it underflows: a factor of 0 would be final

    @staticmethod
    def sides(logits: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities of network and counts (..., 2, V); 1 and the entropy of each (..., 3)."""
        both = torch.stack([logits.log_softmax(-1), counted.to(logits.dtype)], dim=-2)
        return both, F.pad(torch.special.entr(both.exp()).sum(-1), (1, 0), value=1.0)

    def mixed(self, logits: Tensor, counted: Tensor) -> Tensor:
        """Logits (..., V): each side times what `mix` makes of 1 and entropies (Klakow 1998, log-linear mixtures)."""
        both, measures = self.sides(logits, counted)
        return ((measures @ self.mix.mT.to(both.dtype)).unsqueeze(-2) @ both).squeeze(-2)

    @torch.no_grad()
    def fit(self, network: nn.Module, tokens: np.ndarray, seq_len: int) -> None:
        """Set `mix` to what makes tokens (N,) likeliest beside a network without counts, by Newton's method, since this
        is a logistic regression: windows from all over, of 2**24 log-probabilities at most but for the first one."""
        windows = torch.from_numpy(tokens).to(self.mix.device).unfold(0, seq_len + 1, seq_len)
        step = -(-len(windows) // max(1, (1 << 24) // (seq_len * self.vocab_size)))
        ids, targets = windows[step // 2 :: step, :-1], windows[step // 2 :: step, 1:, None, None]
        both, measures = self.sides(network(ids), self(ids))
        ridge, mix = 1e-5 * targets.numel() * torch.eye(6).to(both), torch.tensor([0.5, 0, 0, 0.5, 0, 0]).to(both)
        for _ in range(6):  # the ridge keeps it finite where one side is always right
            p = ((measures @ mix.view(2, 3).mT).unsqueeze(-2) @ both).softmax(-1)  # (B, T, 1, V)
            rest = both - (p * both).sum(-1, keepdim=True)
            slope = torch.einsum("btak,bti->ai", rest.take_along_dim(targets, dim=-1), measures).flatten()
            curve = torch.einsum("btac,bti,btj->aicj", (p * rest) @ rest.mT, measures, measures).reshape(6, 6)
            mix += torch.linalg.solve(curve + ridge, slope - ridge @ mix)
        self.mix.copy_(mix.view(2, 3))
# === end: ngrams ===


# === shared: quantization ===
# The artifact stores matrices and embeddings as whole-number codes with one scale per tensor, and
# all other tensors as floats. The entropy coder makes rare codes cheap, so the scale alone decides
# the size. One scale per tensor took 7 to 10% fewer bytes at equal loss than one per row, because
# the coder knows the sizes of rows and columns (docs/lab.md, 2026-11-21).
#
# The largest code stands for this many root mean squares (Parameter Golf's SDClip). With the
# default of 6 bits, 8 sigma give a step of 0.26 sigma, about 4 bits per weight.
MATRIX_CLIP_SIGMAS = 8.0
# At the same step an embedding's weight costs 40 times as much loss as a matrix's (docs/lab.md).
# So embeddings have a finer step, 0.047 sigma.
EMBED_CLIP_SIGMAS = 6.0
EMBED_BITS = 8
# These stay float32: they pass through exp and softplus into a decay that every token applies.
FLOAT32_CONTROLS = ("A_log", "dt_bias")

# Tensor class -> keyword arguments of `quantize`. Plain dicts, because checkpoints hold them.
QuantTable = dict[str, dict]


@dataclass
class Coded:
    """A quantized tensor: weight = code * scale."""

    codes: Tensor  # int8 (R, C), of size 2**(bits - 1) - 1 at most
    scale: Tensor  # float16 (1,)
    bits: int


def tensor_class(name: str, tensor: Tensor) -> str:
    """Returns "matrix", "embedding" or "control", by the last part of the tensor's dotted name.

    "w_*" is a matrix; "*embed*", "head" and "ab" (GDN's decay and step size) are embeddings. All
    other tensors are controls: few weights that scale whole channels. So is every tensor with fewer
    than 16 rows or columns, seen as (shape[0], the other dimensions).
    """
    rows = tensor.shape[0] if tensor.ndim > 1 else 0
    if rows < 16 or tensor.numel() < 16 * rows:
        return "control"
    # Under a LoRA adapter PyTorch calls the weight itself NAME.original.
    last = name.removesuffix(".original").rsplit(".", 1)[-1]
    if last.startswith("w_"):
        return "matrix"
    return "embedding" if "embed" in last or last in ("head", "ab") else "control"


def round_to(w: Tensor, scale: Tensor, bits: int) -> Tensor:
    """Returns the codes nearest to w / scale, as floats; a scale of 0 gives codes of 0."""
    qmax = 2 ** (bits - 1) - 1
    return (w / torch.where(scale > 0, scale, 1.0)).round_().clamp_(-qmax, qmax)


def quantize(w: Tensor, bits: int, clip_sigmas: float, widen: float = 1.0) -> tuple[Tensor, Tensor]:
    """Returns codes int8 (R, C) and the scale float16 (1,) of w (R, ...).

    The largest code stands for `clip_sigmas` root mean squares of w, times `widen`: the factor by
    which the exporter widens all steps if the artifact would exceed its limit. The root mean square
    is not about the mean, so a constant tensor keeps its value. If w is not finite, neither is the
    scale.
    """
    rows = w.reshape(w.shape[0], -1).float()
    sigma = rows.reshape(1, -1).square().mean(1).sqrt()
    scale = (sigma * clip_sigmas / (2 ** (bits - 1) - 1) * widen).half()
    return round_to(rows, scale, bits).to(torch.int8), scale


def dequantize(codes: Tensor, scale: Tensor) -> Tensor:
    """Returns code * scale, float32 (R, C): 8 by 11 bits, so exact on every machine."""
    return codes.float() * scale


def quantize_all(tensors: dict[str, Tensor], table: QuantTable) -> dict[str, Coded]:
    """Returns those tensors whose class the table has, with each weight at its nearest code."""
    coded = {}
    for name, w in tensors.items():
        quantizer = table.get(tensor_class(name, w))
        if quantizer:
            coded[name] = Coded(*quantize(w, **quantizer), quantizer["bits"])
    return coded


def quant_table(settings) -> QuantTable:
    """Returns the quantizers that a run begins with."""
    return {
        "matrix": {"bits": settings.matrix_bits, "clip_sigmas": MATRIX_CLIP_SIGMAS, "widen": 1.0},
        "embedding": {"bits": EMBED_BITS, "clip_sigmas": EMBED_CLIP_SIGMAS, "widen": 1.0},
    }


@contextlib.contextmanager
def swapped(params: list[Tensor], values: Iterable[Tensor]) -> Iterator[None]:
    """Inside, `params` hold `values`; afterwards, also after an exception, their old values."""
    params = [param.detach() for param in params]  # the same memory, which may be written in place
    originals = [param.clone() for param in params]
    for param, value in zip(params, values, strict=True):
        param.copy_(value)
    try:
        yield
    finally:
        for param, original in zip(params, originals, strict=True):
            param.copy_(original)


def decoded(
    tensors: dict[str, Tensor], coded: dict[str, Coded]
) -> contextlib.AbstractContextManager:
    """Inside, the coded tensors hold the weights that their codes stand for."""
    values = (dequantize(c.codes, c.scale).view_as(tensors[name]) for name, c in coded.items())
    return swapped([tensors[name] for name in coded], values)


def quantized(network: nn.Module, table: QuantTable) -> contextlib.AbstractContextManager:
    """Quantization-aware training: inside, weights are what the artifact would give back.

    This holds for forward and backward. No flag in the model changes, so compiled code is not
    traced again. The gradient at the quantized weight q(w) is applied to w: this is the straight-
    through estimator (Bengio et al., arXiv:1308.3432), w + (q(w) - w).detach().
    """
    tensors = network.state_dict()
    return decoded(tensors, quantize_all(tensors, table))


def count_parameters(network: nn.Module) -> dict[str, int]:
    """Returns the number of parameters of each tensor class, and in total."""
    counts = collections.Counter()
    for name, param in network.named_parameters():
        counts[tensor_class(name, param)] += param.numel()
    counts["total"] = counts.total()
    return counts
# === end: quantization ===


# === shared: artifact ===
# An artifact is one file, little endian: magic, version u32, length u32 and CRC-32 of the header,
# the header (JSON in a zstd frame), the streams without gaps, and the SHA-256 of all before it.
#
# The header lists the streams in the order of the file: three arrays of class "coder", then the
# tensors. An entry has name, class, shape, dtype, coder, and the stream's length and CRC-32. A
# tensor with "scale" and "bits" is stored as codes. Coder "zstd" is a zstd frame of the array.
#
# Coder "rans" is for codes: range ANS (Duda, arXiv:1311.2540) in interleaved lanes. In trained
# matrices rows differ in size, and so do columns that read hidden units; given both sizes, codes
# are nearly normal. So the code at row r and column c is coded by table sizes[r] + sizes[c], which
# saves 5% of the bytes (docs/lab.md, 2026-11-21). The coder's arrays are the lane states u32 at
# which decoding begins; the tables u16 (97, 256) of frequencies, by code & 255; and the sizes u8:
# of each "rans" tensor in turn, those of its rows, then those of its columns. Code i of a tensor is
# in lane i % lanes. The states run on from tensor to tensor, and end at 2**16.
ARTIFACT_PREFIX = struct.Struct("<8sIII")
ARTIFACT_MAGIC = b"UNDERPAR"
ARTIFACT_VERSION = 5
RANS_BITS = 14  # rounding frequencies costs 20 bytes per million codes; at 12 bits 150
RANS_TOTAL = 1 << RANS_BITS
RANS_LOW = 1 << 16  # states stay in [2**16, 2**32), so a step moves at most one 16-bit word


class ArtifactError(ValueError):
    """The artifact is damaged, or the file is none; one line that names the damaged part."""


def require(condition: bool, message: str) -> None:
    """Raises ArtifactError(message) unless the condition holds."""
    if not condition:
        raise ArtifactError(message)


def rans_table(counts: np.ndarray) -> np.ndarray:
    """Returns frequencies uint16 (256,), of sum 2**14, for symbols that occur counts (256,) times.

    Each symbol that occurs has 1 and its share of what is left. So have the first two symbols,
    because a single one with all of 2**14 would overflow a state.
    """
    counts = counts.astype(np.float64)
    counts[:2] += 1e-9
    present = counts > 0
    ends = np.cumsum(counts) / counts.sum() * (RANS_TOTAL - present.sum())
    # Rounded ends of the symbols' ranges add up, which rounded shares would not.
    return (present + np.diff(np.rint(ends), prepend=0)).astype(np.uint16)


def rans_lanes(symbols: int) -> int:
    """Returns the number of lanes: a power of two from 8 to 1,024, about one per 8,192 symbols.

    Lanes move side by side, so many are fast; each of them costs 2 bytes.
    """
    return min(1024, max(8, 1 << (symbols // 8192).bit_length() >> 1))


class RansCoder:
    """Codes symbols by tables, in integers only; `states` uint32 (lanes,) move on in place.

    Range ANS is a stack: what is to be decoded first is encoded last.
    """

    def __init__(self, states: np.ndarray, tables: np.ndarray):
        """tables uint16 (K, 256), made by rans_table. Raises ArtifactError if one is not whole."""
        require((tables.sum(1, dtype=np.int64) == RANS_TOTAL).all(), "a table's sum is not 2**14")
        self.states = states
        # The low 14 bits of a state are a slot. A symbol has as many slots as its frequency says.
        # Slots are numbered through all tables, and `first` is a symbol's first one.
        self.frequency = tables.astype(np.uint32).reshape(-1)
        self.first = np.cumsum(self.frequency, dtype=np.uint32) - self.frequency
        # A slot's step is the frequency of its symbol << 16 | its place among the symbol's slots:
        # one look-up for both makes decoding 1.5 times as fast as two.
        slots = np.arange(self.frequency.sum(), dtype=np.uint32)
        places = slots - np.repeat(self.first, self.frequency)
        self.steps = np.repeat(self.frequency << 16, self.frequency) | places
        symbols = np.arange(len(self.frequency)).astype(np.uint8)
        self.symbols = np.repeat(symbols, self.frequency)

    def encode(self, pairs: np.ndarray) -> np.ndarray:
        """Returns words uint16, in the order of decoding, of pairs (n,): table << 8 | symbol."""
        frequency = self.frequency.take(pairs)
        start = self.first.take(pairs) % RANS_TOTAL
        lanes = len(self.states)
        chunks = [np.empty(0, np.uint16)]
        for begin in reversed(range(0, len(pairs), lanes)):
            f = frequency[begin : begin + lanes]
            x = self.states[: len(f)]  # a view; the last symbols may need only some of the lanes
            full = x >= f << (32 - RANS_BITS)
            chunks.append(x[full].astype(np.uint16))
            x >>= full.astype(np.uint32) << 4  # by 16 bits where a word was moved out
            # x becomes (x // f << 14) + x % f + start, where x % f is x - x // f * f
            x += x // f * (RANS_TOTAL - f) + start[begin : begin + lanes]
        return np.concatenate(chunks[::-1])

    def decode(self, tables: np.ndarray, words: np.ndarray) -> np.ndarray:
        """Returns the symbols uint8 (n,) that `tables` (n,) code in `words`, or ArtifactError."""
        slots = tables.astype(np.int64) << RANS_BITS
        lanes = len(self.states)
        position = 0
        for begin in range(0, len(slots), lanes):
            slot = slots[begin : begin + lanes]
            x = self.states[: len(slot)]
            slot += x & (RANS_TOTAL - 1)
            step = self.steps.take(slot, mode="clip")
            x >>= RANS_BITS
            x *= step >> 16
            x += step & 0xFFFF
            low = np.flatnonzero(x < RANS_LOW)
            end = position + len(low)
            require(end <= len(words), "more rANS words are asked for than stored")
            x[low] = x[low] << 16 | words[position:end]
            position = end
        require(position == len(words), "rANS words are left over")
        return self.symbols.take(slots)


def size_numbers(codes: np.ndarray) -> np.ndarray:
    """Returns sizes uint8 (R + C,) of the rows and the columns of codes int8 (R, C), from 0 to 48.

    They count quarter octaves of the root mean square, a column's relative to that of all codes.
    """
    power = np.square(codes, dtype=np.float32)
    columns = power.mean(0) / max(power.mean(), 1e-9)
    octaves = np.log2(np.clip(np.concatenate([power.mean(1), columns]), 2**-8, 2**16))
    return np.rint(2 * octaves + 16).astype(np.uint8)


def entropy_bytes(counts: np.ndarray) -> float:
    """Returns the bytes of symbols that occur counts (..., 256) times, by a table for each row."""
    total = np.maximum(1, counts.sum(-1, keepdims=True))
    return (counts * np.log2(total / np.maximum(1, counts))).sum() / 8


class Stream:
    """A part of an artifact that is being packed; at first its payload is a zstd frame."""

    def __init__(self, record: dict, array: np.ndarray):
        """record: its entry in the header, which is completed here."""
        self.array = array.astype(array.dtype.newbyteorder("<"))
        dtype = self.array.dtype.str
        self.record = {"shape": array.shape, "dtype": dtype, "coder": "zstd", **record}
        self.payload = zstandard.ZstdCompressor().compress(self.array.tobytes())


def unpack_array(record: dict, payload: bytes) -> np.ndarray:
    """Returns the array of a zstd frame, in the byte order of this machine."""
    dtype = np.dtype(record["dtype"])
    require(record["coder"] == "zstd" and dtype.itemsize <= 4, "an unknown coder or dtype")
    # Only one byte more is unpacked than the shape says, so that a longer frame is an error.
    size = math.prod(record["shape"]) * dtype.itemsize
    raw = zstandard.ZstdDecompressor().stream_reader(payload).read(size + 1)
    return np.frombuffer(raw, dtype).astype(dtype.newbyteorder("=")).reshape(record["shape"])


def code_by_rans(streams: list[Stream]) -> list[Stream]:
    """Codes streams of codes by rANS where that is shorter; returns the coder's arrays."""
    chosen = []
    sizes = [np.empty(0, np.uint8)]
    counts = np.zeros((97, 256), np.int64)  # by table and symbol, of all tensors
    for stream in streams:
        rows = len(stream.array)
        numbers = size_numbers(stream.array)
        tables = np.add.outer(numbers[:rows], numbers[rows:])
        pairs = (tables.astype(np.int32) << 8 | stream.array.view(np.uint8)).reshape(-1)
        count = np.bincount(pairs, minlength=counts.size).reshape(counts.shape)
        # zstd is shorter where rows repeat, as an embedding's of tokens that never occurred.
        if entropy_bytes(count) < len(stream.payload):
            chosen.append((stream, pairs))
            sizes.append(numbers)
            counts += count

    states = np.full(rans_lanes(int(counts.sum())), RANS_LOW, np.uint32)
    tables = np.stack([rans_table(count) for count in counts])
    coder = RansCoder(states, tables)
    for stream, pairs in reversed(chosen):
        stream.payload = coder.encode(pairs).astype("<u2").tobytes()
        stream.record["coder"] = "rans"
    arrays = {"lane_states": states, "tables": tables, "sizes": np.concatenate(sizes)}
    return [Stream({"name": name, "class": "coder"}, array) for name, array in arrays.items()]


def pack_artifact(
    tensors: dict[str, Tensor],
    coded: dict[str, Coded],
    settings: dict,
    tokenizer_sha256: str,
    meta: dict,
) -> tuple[bytes, dict[str, int]]:
    """Returns the artifact of `tensors`, those of `coded` as codes, and its bytes by tensor class.

    settings: what rebuilds the model; meta: anything else; both JSON. The same input gives the same
    bytes. Raises ArtifactError if a tensor is not finite as it would be stored.
    """
    streams = []
    for name, tensor in tensors.items():
        record = {"name": name, "class": tensor_class(name, tensor), "shape": tensor.shape}
        if name in coded:
            values = coded[name].scale
            record |= {"bits": coded[name].bits, "scale": values.item()}
            stream = Stream(record, coded[name].codes.cpu().numpy())
        else:
            dtype = torch.float32 if name.endswith(FLOAT32_CONTROLS) else torch.float16
            values = tensor.detach().to(dtype)
            stream = Stream(record, values.cpu().numpy())
        finite = bool(torch.isfinite(values).all())
        require(finite, f"tensor {name}: must be finite as {values.dtype}")
        streams.append(stream)
    streams = code_by_rans([s for s in streams if "scale" in s.record]) + streams

    sizes = collections.Counter()
    for stream in streams:
        length = len(stream.payload)
        stream.record |= {"length": length, "crc32": zlib.crc32(stream.payload)}
        sizes[stream.record["class"]] += length
    header = {"settings": settings, "tokenizer_sha256": tokenizer_sha256, "meta": meta}
    header["streams"] = [stream.record for stream in streams]
    text = json.dumps(header, allow_nan=False).encode()
    frame = zstandard.ZstdCompressor(level=19).compress(text)
    prefix = ARTIFACT_PREFIX.pack(ARTIFACT_MAGIC, ARTIFACT_VERSION, len(frame), zlib.crc32(frame))
    data = prefix + frame + b"".join(stream.payload for stream in streams)
    data += hashlib.sha256(data).digest()
    sizes["header"] = len(data) - sizes.total()
    return data, sizes


def read_streams(data: bytes, max_weights: int) -> tuple[dict, list[bytes]]:
    """Returns the header and the streams of an artifact. Raises ArtifactError if it is damaged."""
    require(data.startswith(ARTIFACT_MAGIC), f"is no underpar artifact, begins with {data[:8]!r}")
    _, version, length, crc32 = ARTIFACT_PREFIX.unpack_from(data)
    require(version == ARTIFACT_VERSION, f"version {version}, this code reads {ARTIFACT_VERSION}")
    file = io.BytesIO(data[ARTIFACT_PREFIX.size : -32])
    frame = file.read(length)
    require(zlib.crc32(frame) == crc32, "the header is damaged")
    header = json.loads(zstandard.ZstdDecompressor().stream_reader(frame).read(1 << 24))
    payloads = []
    weights = 0
    for record in header["streams"]:
        payload = file.read(record["length"])
        name = f"{record['class']} {record['name']!r}"
        require(zlib.crc32(payload) == record["crc32"], f"{name} is damaged")
        payloads.append(payload)
        # The shapes bound all that is allocated. A size of 0 counts as 1, or it would hide others.
        require(min(record["shape"], default=0) >= 0, f"{name} has a negative shape")
        weights += math.prod(max(1, size) for size in record["shape"])
    require(hashlib.sha256(data[:-32]).digest() == data[-32:], "the SHA-256 is wrong")
    require(weights <= max_weights, f"{weights} weights, the limit is {max_weights}")
    return header, payloads


def read_artifact(
    path: str | Path, max_weights: int = 1 << 30
) -> tuple[dict, dict[str, Tensor], dict[str, Coded]]:
    """Returns the header, the tensors by name in float32, and `coded` as it was written.

    Bit-exact on every machine. Memory is bounded by the file, at most max_weights numbers and
    weights, and the decoding of one tensor. Raises ArtifactError, one line that names the file and
    the damaged part, if anything is not as it was written.
    """
    data = Path(path).read_bytes()
    tensors = {}
    coded = {}
    try:
        header, payloads = read_streams(data, max_weights)
        states, tables, sizes = map(unpack_array, header["streams"][:3], payloads)
        coder = RansCoder(states, tables)
        for record, payload in zip(header["streams"][3:], payloads[3:], strict=True):
            name = record["name"]
            if record["coder"] == "rans":
                rows = record["shape"][0]
                columns = math.prod(record["shape"][1:])
                numbers, sizes = np.split(sizes, [rows + columns])
                tables = np.add.outer(numbers[:rows], numbers[rows:]).reshape(-1)
                array = coder.decode(tables, np.frombuffer(payload, "<u2")).view(np.int8)
            else:
                array = unpack_array(record, payload)
            values = torch.from_numpy(array).reshape(record["shape"])
            if "scale" in record:
                scale = torch.tensor([record["scale"]], dtype=torch.float16)
                coded[name] = Coded(values.flatten(1), scale, record["bits"])
                values = dequantize(values, scale)
            tensors[name] = values.float()
        require((states == RANS_LOW).all(), "the lanes do not end at 2**16")
    except Exception as error:  # a file that only claims to be an artifact may raise anything
        reason = str(error) if isinstance(error, ArtifactError) else repr(error)
        raise ArtifactError(f"{path}: {reason} ({len(data)} bytes)") from None
    return header, tensors, coded
# === end: artifact ===


# === shared: deltas ===
# One file, little endian: magic, version u32, header length u32, zstd(JSON header); for "deltaquant" rANS lane states
# u32; by tensor, in the order of the base, codes and scales of a matrix, the weights of any other; SHA-256 of the rest.
# Codes of "bitdelta" are signs, 8 in a byte; of "deltaquant" frequencies u16 of all codes from the lowest on, number of
# words u32, words u16. What else a reader needs is in the header's "settings" and in the base, whose SHA-256 is there.
DELTA_PREFIX, DELTA_MAGIC, DELTA_VERSION = struct.Struct("<8sII"), b"UPARDELT", 1
DELTA_FLOATS = {16: "<f2", 32: "<f4"}


def group_size(shape: tuple[int, ...], group: int) -> int:
    """Weights that share a scale: `group` of the flattened ones (the last may be fewer), a row's (-1), all (0)."""
    row = math.prod(shape[1:] if len(shape) > 1 else shape)
    return row if group < 0 else min(group or math.inf, math.prod(shape))


def unpack_signs(signs: Tensor, count: int) -> Tensor:
    """int8 (count,), -1 or 1, of bits uint8 (ceil(count / 8),), lowest first."""
    return 2 * torch.from_numpy(np.unpackbits(signs.cpu().numpy(), count=count, bitorder="little")).to(torch.int8) - 1


def add_delta(base: Tensor, codes: Tensor, scales: Tensor, group: int) -> Tensor:
    """base + code * scale, float32; codes (n,), scales float32 (groups,), in which it is differentiable."""
    spread = scales.to(base.device).repeat_interleave(group_size(base.shape, group))[: codes.numel()]
    return base.float() + (codes.to(base.device) * spread).view(base.shape)


class BitDeltaQuantizer:
    """A sign a weight and a scale a group (BitDelta, arXiv 2402.10193): a fine-tuned weight is base + scale * sign.

    group_size: see group_size(). The scale is mean |delta|, which has the least squared error.
    """

    def __init__(self, group_size: int = 128):
        self.group = group_size

    def quantize(self, weight: Tensor, base_weight: Tensor) -> tuple[Tensor, Tensor]:
        """Signs, a bit a weight (1: delta >= 0), see unpack_signs; scales float32 (groups,)."""
        delta = (weight.float() - base_weight.float()).flatten()
        *whole, last = delta.abs().split(group_size(weight.shape, self.group))
        parts = [torch.stack(whole), last] if whole else [last]
        scales = torch.cat([part.mean(-1, dtype=torch.float64).view(-1) for part in parts]).float()
        return torch.from_numpy(np.packbits((delta >= 0).cpu().numpy(), bitorder="little")), scales

    def dequantize(self, base_weight: Tensor, signs: Tensor, scales: Tensor) -> Tensor:
        """base + scale * sign, float32 in the shape of the base."""
        return add_delta(base_weight, unpack_signs(signs, base_weight.numel()), scales.float(), self.group)


def largest_code(bits: int) -> int:
    """Up to 3 bits codes are odd (mid-rise; 1 bit is a sign), above all whole numbers (mid-tread), up to this one."""
    return 2**bits - 1 if bits < 4 else 2 ** (bits - 1) - 1


def quantize_delta(delta: Tensor, size: int, bits: int) -> tuple[Tensor, Tensor]:
    """Codes int8 (n,) and scales float16 (groups of `size`,) of delta float32 (n,), by scales of least squared error.

    Scales are tried 8 an octave, from the largest |delta| down. Those of one bit fewer are among them, and its codes
    among the codes, so that a further bit never adds to the error.
    """
    if (rest := len(delta) % size) and len(delta) > size:
        parts = [quantize_delta(part, size, bits) for part in (delta[:-rest], delta[-rest:])]
        return tuple(torch.cat(both) for both in zip(*parts, strict=True))
    rows, most = delta.view(-1, min(size, len(delta))), largest_code(bits)
    mean, largest = rows.abs().mean(1).half(), rows.abs().amax(1)
    count = 40 + round(8 * math.log2(most)) if bits > 1 else 0  # to where 31/32 of the range is cut off
    tried = [mean, *((largest * 2 ** (-step / 8)).half() for step in range(count))]
    least = torch.full_like(mean, math.inf, dtype=torch.float64)
    codes, scales = torch.zeros_like(rows, dtype=torch.int8), torch.zeros_like(mean)
    for own in tried:
        step = own.float()[:, None]
        new = rows / torch.where(step > 0, step, 1.0)
        new = (new.div_(2).floor_().mul_(2).add_(1) if bits < 4 else new.round_()).clamp_(-most, most)
        error = (new * step).sub_(rows).square_().sum(1, dtype=torch.float64)
        better = error < least
        least, scales = error.minimum(least), torch.where(better, own, scales)
        codes[better] = new[better].to(torch.int8)
    return codes.flatten(), scales


def hash_weights(tensors: dict[str, Tensor]) -> str:
    """SHA-256 of float32 weights with their names and shapes, in order."""
    digest = hashlib.sha256()
    for name, w in tensors.items():
        digest.update(f"{name} {list(w.shape)} ".encode() + w.float().contiguous().numpy().astype("<f4").tobytes())
    return digest.hexdigest()


def delta_dtype(name: str, keep_bits: int) -> str:
    """What a tensor without codes is held in."""
    return DELTA_FLOATS[32 if name.endswith(FLOAT32_CONTROLS) else keep_bits]


def pack_delta(base: dict[str, Tensor], tuned: dict[str, Tensor], header: dict, scales: dict[str, Tensor],
               bar: Callable[[Iterable], Iterable] = iter) -> bytes:
    """A delta file. The header has tokenizer_sha256, meta, and settings: base (hash_weights), shape (what rebuilds the
    tuned network), method, bits, group, scale_bits, keep_bits, and scale, a power of two near the largest delta, in
    which scales are. `scales` of bitdelta: name -> better ones. ArtifactError by name: too large for the bits.
    """
    own, parts, streams = header["settings"], [], []

    def floats(name: str, values: Tensor, dtype: str) -> bytes:
        array = values.detach().float().numpy()
        with np.errstate(over="ignore"):
            stored = array.astype(dtype)
        most = np.abs(array).max(initial=0)
        require(bool(np.isfinite(stored).all()), f"tensor {name!r}: {most:.3g} is too large for {stored.dtype}")
        return stored.tobytes()

    for name, before in bar(base.items()):
        w = tuned[name]
        if tensor_class(name, w) != "matrix":
            parts.append(floats(name, w, delta_dtype(name, own["keep_bits"])))
            continue
        if own["method"] == "bitdelta":
            signs, found = BitDeltaQuantizer(own["group"]).quantize(w, before)
            parts.append(signs.numpy().tobytes())
            found = scales.get(name, found) / own["scale"]
        else:
            delta = (w.float() - before.float()).flatten() / own["scale"]
            codes, found = quantize_delta(delta, group_size(w.shape, own["group"]), own["bits"])
            streams.append((len(parts), codes.numpy().view(np.uint8)))
            parts.append(b"")
        parts.append(floats(name, found, DELTA_FLOATS[own["scale_bits"]]))
    states = np.full(rans_lanes(sum(len(symbols) for _, symbols in streams)) if streams else 0, RANS_LOW, np.uint32)
    for at, symbols in reversed(streams):  # lanes run on from tensor to tensor, so that many cost little
        table, most = rans_table(np.bincount(symbols, minlength=256)), largest_code(own["bits"])
        words = RansCoder(states, table[None]).encode(symbols)
        parts[at] = b"".join([table[np.arange(-most, most + 1)].astype("<u2").tobytes(), struct.pack("<I", len(words)),
                              words.astype("<u2").tobytes()])
    text = zstandard.ZstdCompressor(level=19).compress(json.dumps(header, allow_nan=False).encode())
    prefix = DELTA_PREFIX.pack(DELTA_MAGIC, DELTA_VERSION, len(text))
    data = b"".join([prefix, text, states.astype("<u4").tobytes(), *parts])
    return data + hashlib.sha256(data).digest()


def read_delta(path: str | Path, base: dict[str, Tensor],
               bar: Callable[[Iterable], Iterable] = iter) -> tuple[dict, dict[str, Tensor], int]:
    """(header, name -> float32 weights of the tuned model, bytes of what is held whole) of a delta of `base`.

    Memory is bounded by file and base, whose shapes all lengths follow from. ArtifactError, one line naming the file,
    if anything is not as it was written, or the base is another.
    """
    require(Path(path).is_file(), f"{path}: no such file")
    data, tensors, kept = Path(path).read_bytes(), {}, 0
    require(data[:8] == DELTA_MAGIC, f"{path}: is no delta: {len(data)} bytes that begin with {data[:8]!r}")
    intact = len(data) >= DELTA_PREFIX.size + 32 and hashlib.sha256(data[:-32]).digest() == data[-32:]
    require(intact, f"{path}: SHA-256 is wrong, damaged or truncated, {len(data)} bytes")
    _, version, length = DELTA_PREFIX.unpack_from(data)
    area = io.BytesIO(data[DELTA_PREFIX.size : -32])

    def take(dtype: str, count: int) -> np.ndarray:
        array = np.frombuffer(area.read(count * np.dtype(dtype).itemsize), dtype)
        require(len(array) == count, f"{count} numbers are {len(array)}")
        return array.astype(dtype[1:])  # native

    try:
        require(version == DELTA_VERSION, f"version {version}, this code reads {DELTA_VERSION}")
        header = json.loads(zstandard.ZstdDecompressor().stream_reader(area.read(length)).read(1 << 20))  # at most
        own, digest = header["settings"], hash_weights(base)
        require({"tokenizer_sha256", "meta"} <= header.keys() and "shape" in own, "tokenizer, meta or shape missing")
        require(own["base"] == digest, f"of another base, SHA-256 {own['base'][:12]}, this one's is {digest[:12]}")
        require(own["bits"] in range(1, 9) and math.isfinite(own["scale"]), "its settings are out of range")
        coded = sum(w.numel() for name, w in base.items() if tensor_class(name, w) == "matrix")
        states = take("<u4", rans_lanes(coded) if coded and own["method"] != "bitdelta" else 0)
        for name, w in bar(base.items()):
            if tensor_class(name, w) != "matrix":
                array = take(delta_dtype(name, own["keep_bits"]), w.numel())
                tensors[name], kept = torch.from_numpy(array).to(w.dtype).view(w.shape), kept + array.nbytes
                continue
            if own["method"] == "bitdelta":
                codes = unpack_signs(torch.from_numpy(take("|u1", -(-w.numel() // 8))), w.numel())
            else:
                order, table = np.arange(-(most := largest_code(own["bits"])), most + 1), np.zeros(256, np.uint16)
                table[order] = take("<u2", len(order))
                words = take("<u2", int(take("<u4", 1)[0]))
                symbols = RansCoder(states, table[None]).decode(np.zeros(w.numel(), np.uint8), words)
                codes = torch.from_numpy(symbols.view(np.int8))
            scales = take(DELTA_FLOATS[own["scale_bits"]], -(-w.numel() // group_size(w.shape, own["group"])))
            scales = torch.from_numpy(scales).float() * own["scale"]
            tensors[name] = add_delta(w, codes, scales, own["group"])
        require(not area.read(1) and (states == RANS_LOW).all(), "bytes are left over, or lanes end wrong")
        bad = [name for name, w in tensors.items() if not w.isfinite().all()]
        require(not bad, f"tensors {bad[:1]} are not finite")
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError,
            zstandard.ZstdError) as error:
        text = str(error) if isinstance(error, ArtifactError) else f"{type(error).__name__}: {error}"
        raise ArtifactError(f"{path}: {text}") from None
    return header, tensors, kept
# === end: deltas ===


# === shared: evaluation ===
@dataclass
class Score:
    """A model's score on a token sequence: `loss` in nats per token, `bpb` in bits per byte, over all of them."""

    nats: float
    tokens: int
    bytes: int
    sources: dict[str, "Score"]  # its parts; no source without bytes

    def __post_init__(self) -> None:
        self.loss, self.bpb = self.nats / self.tokens, self.nats / math.log(2) / self.bytes

    def result(self) -> dict:
        """Its keys in result.json."""
        parts = {"val_bpb_sources": {name: part.bpb for name, part in self.sources.items()}} if self.sources else {}
        return {"val_loss": self.loss, "val_bpb": self.bpb, "val_nats": self.nats, "val_tokens": self.tokens,
                "val_bytes": self.bytes, "bytes_per_token": self.bytes / self.tokens, **parts}

    def __str__(self) -> str:
        return (f"loss:{self.loss:.4f} bpb:{self.bpb:.4f} nats:{self.nats:.1f} tokens:{self.tokens} bytes:{self.bytes} "
                f"bytes_per_token:{self.bytes / self.tokens:.4f}")


@torch.no_grad()
def score_tokens(model: Callable, tokens: np.ndarray, tokenizer: Tokenizer, runtime: Runtime, seq_len: int,
                 stride: int | None, batch: int, sources: tuple[np.ndarray, list[str]] | None = None) -> Score:
    """Score tokens[1:], each once, given what its row shows before it: tokens (N,) int64, BOS first; `batch` rows each.

    Rows: plain windows (stride = seq_len); sliding ones, each but the first scoring its last `stride` positions; or
    documents and the BOS after (no stride), fed in pieces of seq_len with the cache of a GPT that is not compiled.
    sources: (index into the names (N,), names); a prediction counts for the source of the token that it predicts.
    """
    source_of, names = sources or (np.broadcast_to(0, len(tokens)), [])
    cuts = np.arange(seq_len, len(tokens) - 1, stride) if stride else np.flatnonzero(tokens == tokenizer.bos_id)
    edges = np.unique(np.concatenate([[0], cuts, [len(tokens) - 1]]))
    first, end = edges[:-1], edges[1:]
    begin = np.maximum(0, end - seq_len) if stride and stride < seq_len else first
    rows = np.stack([begin, first, end], axis=1)[np.argsort(begin - end, kind="stable")]  # longest first
    rows = rows[runtime.rank :: runtime.world_size]
    groups = np.pad(rows, ((0, -len(rows) % batch), (0, 0))).reshape(-1, batch, 3)  # rows of nothing fill the last one
    sums = torch.zeros(len(names) or 1, 3, dtype=torch.float64, device=runtime.device)  # nats, tokens, bytes
    for group in groups:
        begin, first, end = np.hsplit(group, 3)  # (batch, 1) each
        longest, cache = int((end - begin).max()), {} if stride else {"cache": {}}
        for start in range(0, longest, seq_len):
            at = begin + start + np.arange(seq_len if stride else min(seq_len, longest - start))  # (batch, T)
            scored, at = (first <= at) & (at < end), np.where(at < end, at, 0)  # BOS fills up what a row leaves
            arrays = (tokens[at], np.where(scored, tokens[at + 1], -1), source_of[at + 1].astype(np.int64),
                      token_bytes(tokenizer, tokens[at], tokens[at + 1]) * scored)
            ids, targets, source, size = (torch.from_numpy(array).to(runtime.device) for array in arrays)
            columns = model(ids, targets, **cache), targets >= 0, size  # (batch, T) each
            member = source.flatten() == torch.arange(len(sums), device=runtime.device)[:, None]  # (sources, batch * T)
            sums += member.double() @ torch.stack([column.flatten().double() for column in columns], dim=1)
    nats, count, size = runtime.sum(sums).sum(0).tolist()
    assert int(count) == len(tokens) - 1, f"scored {count:.0f} of {len(tokens) - 1} predictions"
    parts = zip(names, sums.tolist(), strict=False)
    return Score(nats, int(count), int(size), {name: Score(a, int(b), int(c), {}) for name, (a, b, c) in parts if c})
# === end: evaluation ===


# ----------------------------------------------------------------------------------------------------------- weights
SHAPE = ("vocab_size", "bos_id", "layers", "norms", "ngram_bytes", *MODEL_SETTINGS)  # what rebuilds a network
BARE = {"ngram_order": 0, "ngram_bytes": 0}  # a network without counts, as in checkpoints and deltas


def progress(items: Iterable, label: str) -> Iterable:
    """`items` behind a progress bar where tqdm is installed, on a terminal."""
    return items if tqdm is None else tqdm(items, desc=label, leave=False, disable=None)


def read_checkpoint(folder: Path, average: str) -> SimpleNamespace:
    """See read_weights; of a folder whose SHA-256 sums are right. Raises UserError."""
    def load(name: str) -> dict:
        return torch.load(folder / name, map_location="cpu", weights_only=True, mmap=True)

    try:
        meta, tensors = json.loads((folder / "meta.json").read_bytes()), load("model.pt")
        if "header" in meta:  # of `unpack` or `apply`
            coded = {name: Coded(*parts) for name, parts in load("coded.pt").items()}
            return SimpleNamespace(path=folder, tensors=tensors, coded=coded, run={}, table={}, **meta)
        shape, run = {name: meta["identity"][name] for name in SHAPE}, {**meta["settings"], "steps": meta["step"]}
        training = load("training.pt")
        if average != "raw":  # a network's state is its parameters, in their order
            require(training[average]["count"] > 0, "none had been collected when it was saved")
            tensors = dict(zip(tensors, training[average]["values"], strict=True))
        table = {kind: {**own} for kind, own in training.get("table", {}).items()}
    except (LookupError, RuntimeError, TypeError, ValueError, pickle.UnpicklingError) as error:
        raise UserError(f"{folder}: no checkpoint with {average} weights: {str(error).splitlines()[0]}") from None
    return SimpleNamespace(path=folder, tensors=tensors, coded={}, run=run, shape=shape, table=table, header={})


def read_weights(path: str, average: str = "") -> SimpleNamespace:
    """A MODEL: path, tensors (name -> float32, on the CPU), shape (the settings that rebuild the network);

    of a checkpoint `run`, its settings and steps, and `table` (QuantTable, as training left it), the weights being raw,
    ema or swa; of an artifact `header` and `coded` (name -> Coded); all empty elsewhere. Without
    `average` it is an artifact. Raises UserError; ArtifactError where an artifact is not as it was written.
    """
    if average and Path(path).is_dir():  # a checkpoint, or a run, of which it is the newest whole one
        found, faults = first_whole(checkpoints(Path(path)) or [Path(path)], ("meta.json", "model.pt"))
        if found is None:
            raise UserError(f"{path}: no whole checkpoint; {'; '.join(faults)}")
        sys.stderr.write("".join(f"{each}\n" for each in faults))
        return read_checkpoint(found, average)
    if not Path(path).is_file():
        raise UserError(f"{path}: no such file; a run's artifact is runs/<RUN_ID>/model.upar")
    header, tensors, coded = read_artifact(path)
    return SimpleNamespace(path=Path(path), tensors=tensors, coded=coded, run={}, shape=header["settings"], table={},
                           header=header)


def write_folder(out: Path, files: dict[str, object]) -> None:
    """A new folder of files, bytes or what torch.save takes, and their SHA-256 sums. OSError: then there is none."""
    out.mkdir()
    try:
        for name, content in files.items():
            replace_file(out / name, content) if isinstance(content, bytes) else torch.save(content, out / name)
        sums = [f"{sha256_file(out / name)}  {name}\n" for name in sorted(files)]
        replace_file(out / "SHA256SUMS", "".join(sums).encode())  # the last: without it the folder is none
    except (OSError, RuntimeError) as error:  # torch.save's, of a full disk
        shutil.rmtree(out, ignore_errors=True)
        raise OSError(f"{out}: cannot be written: {str(error).splitlines()[0]}") from None


def write_model(out: Path, source: SimpleNamespace) -> None:
    """A MODEL as a folder: float32 weights, the codes that they are if any, what rebuilds the network."""
    header = {name: source.header[name] for name in ("tokenizer_sha256", "meta")}
    meta = json.dumps(dict(shape=source.shape, header=header)).encode()
    coded = {name: (part.codes, part.scale, part.bits) for name, part in source.coded.items()}  # for torch.load
    write_folder(out, {"model.pt": source.tensors, "coded.pt": coded, "meta.json": meta})


def read_header(source: SimpleNamespace, tokenizer_path: str) -> dict:
    """tokenizer_sha256 and meta for an artifact; of a checkpoint by its tokenizer, which lies beside. UserError."""
    if source.header:
        return source.header
    beside = [path for name in ("tokenizer.model", "*.tiktoken") for path in source.path.parent.glob(name)]
    tokenizer = load_tokenizer(tokenizer_path or (beside or ["bytes"])[0])  # bytes: a run leaves no file
    if (tokenizer.vocab_size, tokenizer.bos_id) != (source.shape["vocab_size"], source.shape["bos_id"]):
        none = "" if tokenizer_path or beside else f", for none lies in {source.path.parent}"
        raise UserError(f"TOKENIZER_PATH={tokenizer_path!r}: {tokenizer.file} has {tokenizer.vocab_size} tokens{none}; "
                        f"must be the tokenizer of {source.path}, with {source.shape['vocab_size']}")
    return {"tokenizer_sha256": tokenizer.sha256, "meta": {"seed": source.run["seed"], "tokenizer": tokenizer.file}}


def own_settings(source: SimpleNamespace) -> Settings:
    """The settings; quantizer and data are the checkpoint's unless given. UserError: given for what has codes."""
    def stored(given: dict[str, str]) -> tuple[dict, dict]:
        if source.coded and "MATRIX_BITS" in given:
            raise UserError(f"MATRIX_BITS: the weights of {source.path} are quantized already; give their checkpoint")
        return {name: source.run[name] for name in ("matrix_bits", "data_path") if name in source.run}, {}

    return load_settings(Settings, dict(os.environ), stored=stored)


def code_weights(source: SimpleNamespace, settings: Settings) -> dict[str, Coded]:
    """`coded` of a model: what it has, or its weights to the nearest code. A class whose quantizer is the checkpoint's
    has its steps too, as they were widened when quantization-aware training began.
    """
    if source.coded:
        return source.coded
    table, device = quant_table(settings), start_runtime(settings.device).device
    for kind, own in table.items():
        if {**own, "widen": 0} == {**source.table.get(kind, {}), "widen": 0}:
            own["widen"] = source.table[kind]["widen"]
    coded = {}
    for name, w in progress(source.tensors.items(), "quantize"):
        coded |= quantize_all({name: w.to(device)}, table)
    return {name: Coded(part.codes.cpu(), part.scale.cpu(), part.bits) for name, part in coded.items()}


def pack_model(source: SimpleNamespace, settings: Settings, coded: dict[str, Coded]) -> tuple[bytes, dict[str, int]]:
    """See pack_artifact. Raises UserError."""
    header = read_header(source, settings.tokenizer_path)
    try:
        return pack_artifact(source.tensors, coded, source.shape, header["tokenizer_sha256"], header["meta"])
    except ValueError as error:
        raise UserError(f"{source.path}: {error}") from None


def rebuild(source: SimpleNamespace) -> GPT:
    """The network that these settings and weights are. ArtifactError where they do not fit, or it gives no logits."""
    try:
        with torch.device("meta"):  # takes no memory
            network = GPT(SimpleNamespace(**BARE | source.shape), NGrams)  # older files do not say
        network.load_state_dict(source.tensors, assign=True)
        with torch.no_grad():
            require(network(torch.tensor([[network.config.bos_id]])).isfinite().all(), "its logits are not finite")
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ArtifactError(f"{source.path}: its settings rebuild no model: {' '.join(str(error).split())}") from None
    return network


def read_data(tuned: SimpleNamespace, settings: Settings) -> SimpleNamespace:
    """What open_data reads, for a model, and `options` for Batches. UserError: no DATA_PATH, another tokenizer."""
    if not settings.data_path:
        raise UserError("DATA_PATH='': distillation and --score read shards; DISTILL_STEPS=0 is without distillation")
    length = tuned.shape["train_seq_len"]
    options = SimpleNamespace(
        data_path=settings.data_path, tokenizer_path=settings.tokenizer_path, vocab_size=tuned.shape["vocab_size"],
        holdout_tokens=length, train_seq_len=length, seed=settings.seed, micro_batch_tokens=max(length, 4096),
        train_batch_tokens=settings.distill_batch_tokens or 4 * length)
    data = open_data(options)
    if data.tokenizer.sha256 != read_header(tuned, settings.tokenizer_path)["tokenizer_sha256"]:
        raise UserError(f"DATA_PATH={settings.data_path!r}: has another tokenizer than {tuned.path}")
    data.options = options
    return data


def distill(base: SimpleNamespace, tuned: SimpleNamespace, settings: Settings) -> dict[str, Tensor]:
    """Scales by which the logits of base + delta come near to the tuned model's, in mean squares (arXiv 2402.10193).

    They are learned in units of their matrix's mean, so that DISTILL_LR suits large deltas and small ones. None, if
    the logits of the first batch are not nearer in the end.
    """
    data, runtime, group = read_data(tuned, settings), start_runtime(settings.device), settings.delta_group
    try:
        batches = Batches(data, data.options, runtime)
    except UserError as error:  # it says what training's setting is called
        raise UserError(str(error).replace("TRAIN_BATCH_TOKENS", "DISTILL_BATCH_TOKENS")) from None
    device, teacher = runtime.device, rebuild(tuned).to(runtime.device)
    held, codes, units, ratios = {}, {}, {}, {}
    for name, w in ((name, w) for name, w in tuned.tensors.items() if w.is_floating_point()):  # counts: the teacher's
        if tensor_class(name, w) == "matrix":
            signs, own = BitDeltaQuantizer(group).quantize(w, base.tensors[name])
            codes[name], units[name] = unpack_signs(signs, w.numel()).to(device), own.mean().to(device)
            ratios[name] = (own.to(device) / units[name].clamp(min=1e-30)).requires_grad_()
        stored = w.numpy().astype(delta_dtype(name, settings.delta_keep_bits)).astype("f4")
        held[name] = (base.tensors[name].float() if name in codes else torch.from_numpy(stored)).to(device)
    optimizer = torch.optim.AdamW(ratios.values(), lr=settings.distill_lr, weight_decay=0.0)

    def losses(step: int) -> Iterator[Tensor]:  # a batch's mean, in parts
        for ids, _ in batches.micro_batches(step):
            weights = {name: add_delta(held[name], codes[name], own * units[name], group)
                       for name, own in ratios.items()}
            with torch.no_grad():
                right = teacher(ids)
            found = torch.func.functional_call(teacher, {**held, **weights}, (ids,))
            yield (found - right).square().mean() * (len(ids) / batches.rows)

    def first_loss() -> float:
        with torch.no_grad():
            return sum(part.item() for part in losses(0))

    begin = first_loss()
    for step in progress(range(settings.distill_steps), "distill"):
        cosine = (1 + math.cos(math.pi * step / settings.distill_steps)) / 2
        optimizer.param_groups[0]["lr"] = settings.distill_lr * cosine
        optimizer.zero_grad()
        for part in losses(step):
            part.backward()
        optimizer.step()
    end = first_loss()
    print(f"distillation: {settings.distill_steps} steps, mean squared error of logits on the first batch {begin:.6g} "
          f"before, {end:.6g} after" + ("" if end < begin else "; scales stay as they were, another DISTILL_LR?"))
    return {name: (own.detach() * units[name]).cpu() for name, own in ratios.items()} if end < begin else {}


def read_tuned(path: str, base: SimpleNamespace) -> SimpleNamespace:
    """The MODEL that a delta file makes of its base; `kept`: bytes of the file for tensors that it holds whole."""
    header, tensors, kept = read_delta(path, base.tensors, functools.partial(progress, label="delta"))
    return SimpleNamespace(path=Path(path), tensors=tensors, coded={}, run={}, table={}, header=header, kept=kept,
                           shape=header["settings"]["shape"])


# ---------------------------------------------------------------------------------------------------------- commands
def show(rows: list[list]) -> None:
    """Print rows as a table; floats with five digits, NaN as a dash."""
    texts = [["-" if x != x else f"{x:.5g}" if isinstance(x, float) else str(x) for x in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    for row in texts:
        print("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip())


def match_tensors(a: SimpleNamespace, b: SimpleNamespace) -> None:
    """Raise ArtifactError, which names the first tensor that one has and the other has not, or in another shape."""
    for name in (name for name in [*a.tensors, *b.tensors] if not name.startswith("ngrams.")):
        one, two = (list(each.tensors[name].shape) if name in each.tensors else "missing" for each in (a, b))
        require(one == two, f"tensor {name!r}: {one} in {a.path}, {two} in {b.path}")


def distances(a: SimpleNamespace, b: SimpleNamespace, base: SimpleNamespace | None = None) -> list[list]:
    """Rows of a table, by tensor class and of all: how far b's weights are from a's, or what both add to a base's.

    ||b - a|| / ||a||, mean (b - a)^2, max |b - a|, a.b / (||a|| ||b||), 10 log10(||a||^2 / ||b - a||^2), in float64.
    ArtifactError where shapes differ.
    """
    match_tensors(a, b)
    sums = {key: np.zeros(6) for key in ("matrix", "embedding", "control", "all")}
    for name, w in progress([each for each in a.tensors.items() if not each[0].startswith("ngrams.")], "distances"):
        zero = base.tensors[name].double() if base else 0.0
        x, y = ((each.double() - zero).flatten().numpy() for each in (w, b.tensors[name]))
        error, most = y - x, np.abs(y - x).max(initial=0)
        for total in (sums[tensor_class(name, w)], sums["all"]):
            total[:] = [*total[:5] + [w.numel(), error @ error, x @ x, y @ y, x @ y], max(total[5], most)]
    rows = [["class", "weights", "rel_frobenius", "mse", "max", "cosine", "snr_db"]]
    with np.errstate(divide="ignore", invalid="ignore"):  # equal: an SNR of inf; all zero: nan
        for key, (count, error, x, y, product, most) in sums.items():
            found = np.sqrt(error / x), error / count, most, product / np.sqrt(x * y), 10 * np.log10(x / error)
            rows += [[key, int(count), *map(float, found)]] if count else []
    return rows


def judge_codes(source: SimpleNamespace, model: SimpleNamespace, settings: Settings) -> dict[str, list[float]]:
    """Class -> [steps of an artifact over those of the settings, share of codes that are the nearest to the model's
    weights, error over that of the nearest]. ArtifactError, naming a tensor, where it cannot be of these weights.

    The exporter widens all steps of a class by one factor, so that they say whose they are. GPTQ trades error in
    weights for error in outputs: up to 2.8 times that of the nearest codes was measured.
    """
    table, found, judged = quant_table(settings), collections.defaultdict(list), {}
    for name, w in progress(model.tensors.items(), "verify"):
        what, kind, stored = f"{source.path}: tensor {name!r}", tensor_class(name, w), source.tensors[name]
        require((kind in table) == (name in source.coded), f"{what}: its coding is not that of class {kind}")
        if kind not in table:
            dtype = torch.float32 if name.endswith(FLOAT32_CONTROLS) else torch.float16
            require(torch.equal(w.to(dtype).to(w.dtype), stored), f"{what}: is not that of {model.path} as {dtype}")
            continue
        part, own = source.coded[name], table[kind]
        require(part.bits == own["bits"], f"{what}: {part.bits} bits, {own['bits']} by the settings of {model.path}")
        usual, step = quantize(w, **own)[1].float(), part.scale.float()
        nearest = round_to(w.flatten(1), step, part.bits)
        error, least = ((w.flatten(1) - each * step).double().norm().item() for each in (part.codes, nearest))
        require(error <= 4 * least + 1e-12, f"{what}: {error / max(least, 1e-12):.3g} times the error of the nearest "
                f"codes to the weights of {model.path}")
        ratios = (step / usual)[usual > 2**-13].tolist()  # below, float16 is coarse
        found[kind].append((w.numel(), (nearest == part.codes).sum().item(), error**2, least**2, ratios, what))
    for kind, rows in found.items():
        count, same, error, least, ratios = (sum(column, start) for column, start in zip(
            list(zip(*rows, strict=True))[:5], (0, 0, 0.0, 0.0, []), strict=True))
        middle = float(np.median(ratios or [math.nan]))
        for *_, ratios, what in rows:
            wrong = max([middle, *ratios]) / min([middle, *ratios])
            require(not wrong > 1.004, f"{what}: its steps are not those of {model.path}, by a factor of {wrong:.4g} "
                    "when the class's are equal")
        judged[kind] = [middle, same / count, math.sqrt(error / least) if least else 1.0]
    return judged


def info(args: argparse.Namespace) -> None:
    """What an artifact's bytes are spent on; entropy: of the codes, order 0, by tensor, in bits a weight.

    With --checkpoint, error: ||artifact - checkpoint|| / ||checkpoint||.
    """
    source, tensors, parts = read_weights(args.artifact), {}, collections.defaultdict(collections.Counter)
    model = read_weights(args.checkpoint, args.weights) if args.checkpoint else None
    if model:
        match_tensors(model, source)
    for record in progress(source.header["streams"], "info"):
        if record["class"] == "coder":
            parts[f"({record['name']})"].update({"bytes": record["length"], record["coder"]: 1})
            continue
        name, w = record["name"], source.tensors[record["name"]]
        tensors[name] = sums = collections.Counter(tensors=1, weights=w.numel(), bytes=record["length"])
        if name in source.coded:
            counts = np.bincount(source.coded[name].codes.numpy().view(np.uint8).reshape(-1), minlength=256)
            sums["entropy"] = 8 * entropy_bytes(counts)
        if model:
            own = model.tensors[name].double()
            sums.update(error=(w.double() - own).square().sum().item(), power=own.square().sum().item())
        bits = record.get("bits", 8 * np.dtype(record["dtype"]).itemsize)
        sums[f"{bits}-bit {record['coder']}"] = 1
        parts[tensor_class(name, w)].update(sums)
    size, weights = source.path.stat().st_size, sum(w.numel() for w in source.tensors.values())
    parts["(header)"] = collections.Counter(bytes=size - sum(sums["bytes"] for sums in parts.values()))
    sums = {part: sum(own[part] for own in tensors.values()) for part in ("error", "power")}
    parts["total"] = collections.Counter(tensors=len(tensors), weights=weights, bytes=size, **sums)
    rows = [["class", "tensors", "weights", "bytes", "bits/weight", "entropy", "error", "coders"]]
    for name, sums in [*(tensors.items() if args.tensors else ()), *parts.items()]:
        coders = [f"{key}:{count}" for key, count in sums.items() if re.search("rans|zstd", key)]
        weights, power = sums["weights"] or math.nan, sums["power"] or math.nan
        rows.append([name, sums["tensors"], sums["weights"], sums["bytes"], 8 * sums["bytes"] / weights,
                     sums.get("entropy", math.nan) / weights, math.sqrt(sums["error"] / power), ", ".join(coders)])
    print(f"{source.path}: settings {source.shape} meta {source.header['meta']}")
    show(rows)


def unpack(args: argparse.Namespace) -> None:
    """An artifact's weights in a folder, in float32 and as codes, of which `pack` makes the same file."""
    source = read_weights(args.artifact)
    write_model(args.out, source)
    print(f"{args.out}: {len(source.tensors)} tensors")


def pack(args: argparse.Namespace) -> None:
    """A checkpoint's artifact, every weight at the nearest code."""
    source = read_weights(args.model, args.weights)
    settings = own_settings(source)
    data, sizes = pack_model(source, settings, code_weights(source, settings))
    replace_file(args.out, data)
    print(f"{args.out}: {len(data)} bytes; " + " ".join(f"{name}:{size}" for name, size in sizes.items()))


def verify(args: argparse.Namespace) -> None:
    """Is an artifact whole, and is it of a checkpoint? Exit code 1 where it is not."""
    source = read_weights(args.artifact)
    rebuild(source)
    if args.checkpoint:
        model = read_weights(args.checkpoint, args.weights)
        rows, settings = distances(model, source), own_settings(model)
        require(model.shape | BARE == source.shape | BARE, f"{source.path}: its settings are not those of {model.path}")
        tokenizer = read_header(model, settings.tokenizer_path)["tokenizer_sha256"]
        require(tokenizer == source.header["tokenizer_sha256"], f"{source.path}: its tokenizer is not {model.path}'s")
        try:
            judged = {} if model.coded else judge_codes(source, model, settings)
        except ArtifactError as error:
            raise ArtifactError(f"{error}; compared are its {args.weights} weights, the log says which were chosen "
                                "(--weights)") from None
        wrong = [name for name, w in model.tensors.items() if model.coded and not torch.equal(w, source.tensors[name])]
        require(not wrong, f"{source.path}: tensor {wrong[:1]} is not that of {model.path}")
        rows[0] += ["steps", "nearest", "over_nearest"]
        show([rows[0], *(row + judged.get(row[0], [math.nan] * 3) for row in rows[1:])])
        packed = pack_model(model, settings, code_weights(model, settings))[0]
        what = f"what `pack` makes of the {args.weights} weights of {model.path}, byte for byte"
        other = f"of the {args.weights} weights of {model.path}, by GPTQ or with steps fitted, or on another machine"
        print(f"{source.path}: {what if packed == source.path.read_bytes() else other}")
    print(f"{source.path}: whole, {len(source.tensors)} tensors, SHA-256 {sha256_file(source.path)}")


def compare(args: argparse.Namespace) -> None:
    """How far the weights of model B are from those of A."""
    show(distances(read_weights(args.a, args.weights), read_weights(args.b, args.weights)))


def report_delta(path: str, base: SimpleNamespace, tuned: SimpleNamespace, variants: dict[str, int]) -> SimpleNamespace:
    """Print what a delta's file takes, against files of the same weights, and what it loses; the model read from it."""
    model, every = read_tuned(path, base), sum(w.numel() for w in base.tensors.values())
    coded = sum(w.numel() for name, w in base.tensors.items() if tensor_class(name, w) == "matrix")
    rows = [["file", "bytes", "x_fp32", "x_bf16", "of_matrices", "their_x_fp32", "their_x_bf16"],
            *([f"weights in {name}", width * every, 4 / width, 2 / width, width * coded, 4 / width, 2 / width]
              for name, width in (("fp32", 4), ("bf16", 2)))]
    for name, size in {path: Path(path).stat().st_size, **variants}.items():
        pairs = (size, every), (size - model.kept, coded)  # without what is held whole, and all of the matrices
        rows.append([name, *(each for own, count in pairs for each in (own, 4 * count / own, 2 * count / own))])
    show(rows)
    print("\nof what the tuned model's weights are beyond the base's:")
    show(distances(tuned, model, base))
    return model


def make_delta(args: argparse.Namespace, method: str) -> None:
    """Write the delta of two models by settings of the environment, and report on it."""
    base, tuned = read_weights(args.base, args.weights), read_weights(args.tuned, args.weights)
    settings, most = own_settings(tuned), 0.0
    group, bits, scale_bits = settings.delta_group, 1, settings.delta_scale_bits
    if method == "deltaquant":
        group, bits, scale_bits = {"row": -1, "tensor": 0, "group": group}[settings.delta_step], settings.delta_bits, 16
    for name in ("delta_scale_bits", "delta_keep_bits"):
        if getattr(settings, name) not in DELTA_FLOATS:
            raise UserError(f"{name.upper()}={getattr(settings, name)}: must be 16 or 32")
    match_tensors(base, tuned)
    for name, w in progress(base.tensors.items(), "compare"):
        for model, own in ((base, w), (tuned, tuned.tensors[name])):
            require(bool(own.isfinite().all()), f"{model.path}: tensor {name!r}: its weights are not finite")
        if tensor_class(name, w) == "matrix":
            most = max(most, (tuned.tensors[name].double() - w.double()).abs().max().item())
    header = {key: read_header(tuned, settings.tokenizer_path)[key] for key in ("tokenizer_sha256", "meta")}
    header["settings"] = dict(
        method=method, base=hash_weights(base.tensors), bits=bits, group=group, scale_bits=scale_bits,
        keep_bits=settings.delta_keep_bits, scale=2.0 ** math.frexp(most)[1], shape=tuned.shape)
    scales = distill(base, tuned, settings) if method == "bitdelta" and settings.distill_steps and most else {}

    def packed(**changes: int) -> bytes:
        own = {**header, "settings": {**header["settings"], **changes}}
        return pack_delta(base.tensors, tuned.tensors, own, {} if changes else scales,
                          functools.partial(progress, label=method))

    replace_file(args.out, packed())
    variants = {"16-bit scales": dict(scale_bits=16), "a 32-bit scale a matrix": dict(scale_bits=32, group=0)}
    sizes = {f"with {name}": len(packed(**own)) for name, own in variants.items() if method == "bitdelta"}
    model = report_delta(args.out, base, tuned, sizes)
    if args.score:
        data, runtime = read_data(tuned, settings), start_runtime(settings.device)
        length = tuned.shape["train_seq_len"]
        before, best, own = (
            score_tokens(rebuild(each).to(runtime.device), data.val, data.tokenizer, runtime, length, length,
                         max(1, 4096 // length)).bpb for each in progress((base, tuned, model), "score"))
        share = f"{(before - own) / (before - best):.2%} of the gain" if best < before else "there is no gain"
        print(f"\nbits per byte of validation: base {before:.4f}, tuned {best:.4f}, base + delta {own:.4f}, {share}")


def bitdelta(args: argparse.Namespace) -> None:
    """What makes BASE into TUNED, one bit a weight of the matrices."""
    make_delta(args, "bitdelta")


def deltaquant(args: argparse.Namespace) -> None:
    """What makes BASE into TUNED, 1 to 8 bits a weight of the matrices, entropy coded."""
    make_delta(args, "deltaquant")


def apply(args: argparse.Namespace) -> None:
    """The tuned model that a delta makes of BASE: a folder as `unpack` writes it, in float32."""
    model = read_tuned(args.delta, read_weights(args.base, args.weights))
    write_model(args.out, model)
    print(f"{args.out}: {len(model.tensors)} tensors")


# What LlamaForCausalLM of transformers is, and its names of a layer's tensors in the order of `export`.
LLAMA = dict(mlp="swiglu", positions="rope", rope_dims=0, qk_norm=False, residual_mix=False, unet_skips=False,
             bigram_vocab_size=0, ngram_order=0, logit_softcap=0.0)
LLAMA_LAYER = ("self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj mlp.gate_proj mlp.up_proj "
               "mlp.down_proj input_layernorm post_attention_layernorm").split()


def export(args: argparse.Namespace) -> None:
    """model.safetensors and config.json, which transformers loads as LlamaForCausalLM; other layouts are refused."""
    source = read_weights(args.model, args.weights)
    shape = (net := rebuild(source)).config
    count, kv_rows = len(shape.layers.split()), shape.num_kv_heads * shape.model_dim // shape.num_heads
    right = {"layers": " ".join("a" * count), "norms": " ".join(["rms_weight"] * count), **LLAMA}
    if odd := [f"{name}={own!r}" for name, value in right.items() if (own := getattr(shape, name)) != value]:
        raise UserError(f"{source.path}: transformers' LlamaForCausalLM has no {', '.join(odd)}")
    try:
        from safetensors.torch import save
    except ImportError:
        raise UserError("export needs safetensors: pip install safetensors") from None
    state = {"model.embed_tokens.weight": net.embed, "model.norm.weight": net.final_norm.weight}
    state |= {} if net.head is None else {"lm_head.weight": net.head}
    for at, (block, mixer) in enumerate(zip(net.blocks, net.mixers, strict=True)):
        values = [*mixer.w_qkv.split([shape.model_dim, kv_rows, kv_rows]), mixer.w_o, *block.mlp.w_up.chunk(2),
                  block.mlp.w_down, block.mixer_norm.weight, block.mlp_norm.weight]
        state |= {f"model.layers.{at}.{name}.weight": w for name, w in zip(LLAMA_LAYER, values, strict=True)}
    config = dict(
        architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=shape.vocab_size,
        hidden_size=shape.model_dim, intermediate_size=int(shape.mlp_mult * shape.model_dim), num_hidden_layers=count,
        num_attention_heads=shape.num_heads, num_key_value_heads=shape.num_kv_heads, rope_theta=shape.rope_base,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_base},  # transformers 5's name for it
        max_position_embeddings=shape.train_seq_len, rms_norm_eps=torch.finfo(torch.float32).eps,
        tie_word_embeddings=shape.tie_embeddings, bos_token_id=shape.bos_id, eos_token_id=shape.bos_id)
    data = save({name: w.detach().clone() for name, w in state.items()}, {"format": "pt"})
    write_folder(args.out, {"model.safetensors": data, "config.json": (json.dumps(config, indent=1) + "\n").encode()})
    print(f"{args.out}: {len(state)} tensors; transformers loads them as LlamaForCausalLM, a text begins with BOS")


# -------------------------------------------------------------------------------------------------------------- main
COMMANDS = {info: "artifact --tensors --checkpoint --weights", unpack: "artifact out", pack: "model out --weights",
            verify: "artifact checkpoint --weights", compare: "a b --weights", export: "model out --weights",
            bitdelta: "base tuned out --weights --score", deltaquant: "base tuned out --weights --score",
            apply: "base delta out --weights"}
WORDS = {"--tensors": dict(action="store_true", help="a line for each tensor too"), "checkpoint": dict(nargs="?"),
         "--weights": dict(choices=("raw", "ema", "swa"), default="raw", help="which weights of a checkpoint"),
         "out": dict(type=Path), "--score": dict(action="store_true", help="bits per byte on DATA_PATH's validation"),
         "--checkpoint": dict(help="of the same weights, for the error")}


class Parser(argparse.ArgumentParser):
    """argparse, with mistakes as UserError: one line."""

    def error(self, message: str) -> None:
        raise UserError(f"{message}; {self.prog} --help says more")


def main() -> int:
    """One command; its exit code: 1 where `verify` says no, 2 for a mistake."""
    parser = Parser(prog="quantize.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for run, words in COMMANDS.items():
        command = commands.add_parser(run.__name__, help=run.__doc__, description=run.__doc__)
        command.set_defaults(run=run)
        for word in words.split():
            command.add_argument(word, **({} if word[0] == "-" else {"metavar": word.upper()}), **WORDS.get(word, {}))
    args = parser.parse_args()
    load_settings(Settings, dict(os.environ))  # a wrong name is an error of every command
    if "out" in args and (args.out.exists() or not args.out.absolute().parent.is_dir()):
        raise UserError(f"OUT {str(args.out)!r}: exists already, or the folder that it would be in does not")
    try:
        args.run(args)
    except ArtifactError as error:
        if args.run is not verify:
            raise UserError(str(error)) from None
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
