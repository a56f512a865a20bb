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
# What ARCH_MODE stands for: values of settings, below the CONFIG file and the environment.
ARCH_PRESETS = {
    "D": {},  # the defaults: GDN, and two layers of sliding-window attention with the same weights
    "gdn": dict(layer_pattern="g", num_layers=10),
    "hybrid": dict(layer_pattern="g g a a a a a a a a g"),  # of openai/parameter-golf PR 1895
    "baseline": dict(layer_pattern="a", num_layers=9, mlp_mult=2.0, qk_gain_init=1.5),
    "llama": dict(
        layer_pattern="a",
        num_layers=12,
        mlp="swiglu",
        mlp_mult=2.75,
        norm="rms_weight",
        qk_gain_init=0.0,
    ),
}
# The fields of GPTConfig that an ARCH_MODE fixes: they are no settings.
ARCH_LAYOUTS = {
    "D": {},
    "gdn": {},
    "hybrid": {},
    "baseline": dict(unet_skips=True),  # as in the first script of Parameter Golf
    "llama": dict(residual_mix=False, logit_softcap=0.0, embed_init_std=0.02),
}
NORMS = ("rms", "rms_weight", "layer")
CONV_TAPS = 4  # tokens that GDN's short convolution sees, the current one included
# GDN's log decay at a document's first token, which cuts off what stands before it: -inf would
# give NaN, and -1e4 would cost digits.
DOCUMENT_DECAY = -60.0
FULL_WINDOW = 1 << 30  # the window of attention that has none
ROPE_BASE = 10000.0  # rotary positions turn at rates from 1 down to 1 / ROPE_BASE
BIO_THRESHOLD = 0.3  # of the bio-MLP's events, on a voltage in (0, 1): WiggleGPT's value
BIGRAM_DIM = 128  # width of the hashed embedding of token pairs, before its projection


@dataclass
class GPTConfig:
    """The shape of a network: with its weights, all that is needed to rebuild it."""

    vocab_size: int
    bos_id: int  # the first token of a document; nothing sees what stands before it
    layers: str  # one word per layer, see model_config
    norms: str  # one of NORMS per layer
    train_seq_len: int = 2048  # tokens in a window; learned positions end there
    model_dim: int = 512  # width of the residual stream
    num_heads: int = 8  # query heads of attention, and heads of GDN
    num_kv_heads: int = 4  # key/value heads of attention
    attn_window: int = 512  # keys a sliding-window query sees, itself included
    mlp: str = "relu2"  # kind of MLP, see MLP.hidden
    mlp_mult: float = 3.0  # hidden width of the MLP over model_dim
    positions: str = "rope"  # rope, learned or none
    rope_dims: int = 0  # dimensions of a head that rotate; 0: all
    qk_gain_init: float = 4.0  # initial gain of normed queries, per head; 0: no norm of q and k
    bigram_vocab_size: int = 0  # rows of a hashed embedding of token pairs; 0: none
    tie_embeddings: bool = True  # the embedding is the output head
    residual_mix: bool = True  # layers mix in the normed embedding, and scale what they add
    unet_skips: bool = False  # the second half of the layers adds the first half's outputs
    logit_softcap: float = 30.0  # logits = c tanh(z / c); 0: as they are
    embed_init_std: float = 0.005  # standard deviation of the embedding at the start


def model_config(settings, vocab_size: int, bos_id: int, **overrides) -> GPTConfig:
    """Returns the shape of the network that `settings` ask for.

    A field's value is taken from `overrides`, else ARCH_LAYOUTS, else `settings`, else GPTConfig's
    default. LAYER_PATTERN is one word per layer, repeated or cut to NUM_LAYERS: g is Gated
    DeltaNet, s sliding-window attention, a full attention. Layers whose words have the same number
    share the mixer's weights (s1 ... s1); in capitals they share all of the layer's weights (A1 A2
    A1 A2: depth recurrence). NORM is repeated in the same way.
    Raises UserError where the numbers do not fit together.
    """
    words = settings.layer_pattern.split()
    norms = getattr(settings, "norm", "rms").split()
    for word in words or [""]:
        if not re.fullmatch("[gsa][0-9]*|[GSA][0-9]+", word):
            wrong = f"{word!r} is not g, s or a with an optional number; capitals need one"
            raise UserError(f"LAYER_PATTERN={settings.layer_pattern!r}: {wrong}")
    if not norms or set(norms) - set(NORMS):
        raise UserError(f"NORM={settings.norm!r}: must be one or more of {', '.join(NORMS)}")
    num_layers = settings.num_layers or len(words)

    names = GPTConfig.__dataclass_fields__
    values = {name: value for name, value in vars(settings).items() if name in names}
    values["vocab_size"] = vocab_size
    values["bos_id"] = bos_id
    values["layers"] = " ".join((words * num_layers)[:num_layers])
    values["norms"] = " ".join((norms * num_layers)[:num_layers])
    values |= ARCH_LAYOUTS[getattr(settings, "arch_mode", "D")]
    config = GPTConfig(**{**values, **overrides})

    dim = config.model_dim
    heads = config.num_heads
    if dim % (2 * heads):
        raise UserError(f"MODEL_DIM={dim}: must be a multiple of 2 x NUM_HEADS = {2 * heads}")
    if heads % config.num_kv_heads:
        right = f"must be a multiple of NUM_KV_HEADS = {config.num_kv_heads}"
        raise UserError(f"NUM_HEADS={heads}: {right}")
    if config.rope_dims % 2 or config.rope_dims > dim // heads:
        right = f"must be even, at most MODEL_DIM / NUM_HEADS = {dim // heads}"
        raise UserError(f"ROPE_DIMS={config.rope_dims}: {right}")
    if config.positions == "learned" and getattr(settings, "eval_stateful", False):
        why = "POSITIONS='learned' ends at TRAIN_SEQ_LEN, documents do not"
        raise UserError(f"EVAL_STATEFUL=1: {why}; it must be 0")
    return config


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Returns x W^T in x's dtype; weights are kept in float32."""
    return F.linear(x, weight.to(x.dtype))


def scaled(x: Tensor, scale: Tensor | None) -> Tensor:
    """Returns x times a learned scale per channel, where there is one."""
    return x if scale is None else x * scale.to(x.dtype)


def matrix(splits: tuple[int, ...], cols: int, std: float = 0.0) -> nn.Parameter:
    """Returns matrices of `splits` rows, one below the other; Muon takes them one by one.

    Entries are normal with deviation `std`; 0 means 0.5 / sqrt(cols), with which normed inputs
    give outputs of deviation 0.5.
    """
    std = std or 0.5 * cols**-0.5
    weight = nn.Parameter(torch.randn(sum(splits), cols) * std)
    weight.splits = splits
    return weight


def rms_norm(x: Tensor) -> Tensor:
    """RMSNorm (arXiv 1910.07467) over the last dimension, without weights."""
    return F.rms_norm(x, x.shape[-1:])


class Norm(nn.Module):
    """One of NORMS: RMSNorm, plain or with weights; LayerNorm with weights and bias."""

    def __init__(self, kind: str, dim: int):
        super().__init__()
        self.weight = None if kind == "rms" else nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim)) if kind == "layer" else None

    def forward(self, x):
        """Returns x (..., dim) normed, in its own dtype."""
        if self.bias is None:
            return scaled(rms_norm(x), self.weight)
        return scaled(F.layer_norm(x, x.shape[-1:]), self.weight) + self.bias.to(x.dtype)


def scan_outputs(w: Tensor, u: Tensor, k: Tensor, decay: Tensor, state: Tensor, *others):
    """Returns room for the outputs of gdn_scan or gdn_scan_adjoint, given their arguments."""
    return state.new_empty(len(w) + 1, *state.shape), torch.empty_like(u)


def gdn_scan(
    w: Tensor, u: Tensor, k: Tensor, decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the states S_0 ... S_N between chunks and what each chunk writes, first to last:

        new_n = U_n - W_n S_n
        S_{n+1} = decay_n S_n + K_n^T new_n

    There are N chunks of C tokens and M = B*H rows: w and k (N, M, C, K), u and new (N, M, C, V),
    decay (N, M, 1, 1), S_0 = state (M, K, V).
    """
    states, new = scan_outputs(w, u, k, decay, state)
    states[0] = state
    for n in range(len(w)):
        torch.baddbmm(u[n], w[n], states[n].to(w.dtype), alpha=-1, out=new[n])
        written = torch.bmm(k[n].mT, new[n]).to(state.dtype)
        torch.addcmul(written, decay[n], states[n], out=states[n + 1])
    return states, new


def gdn_scan_adjoint(
    w: Tensor, d_new: Tensor, k: Tensor, decay: Tensor, d_last: Tensor, d_states: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns R_0 ... R_N, the gradients of gdn_scan's states, and those of u, last to first:

        d_u_n = d_new_n + K_n R_{n+1}
        R_n = d_states_n + decay_n R_{n+1} - W_n^T d_u_n

    d_new (N, M, C, V) and d_states (N, M, K, V) are the gradients of new and S_0 ... S_{N-1} by
    what else depends on them; R_N = d_last (M, K, V).
    """
    r, d_u = scan_outputs(w, d_new, k, decay, d_last)
    r[-1] = d_last
    for n in reversed(range(len(w))):
        torch.baddbmm(d_new[n], k[n], r[n + 1].to(k.dtype), out=d_u[n])
        direct = torch.baddbmm(d_states[n], w[n].mT, d_u[n], alpha=-1).to(r.dtype)
        torch.addcmul(direct, decay[n], r[n + 1], out=r[n])
    return r, d_u


# torch.compile calls a registered operator and does not trace it; it would unroll these loops. The
# first script imported into a process registers them for all: a second registration would free the
# first, and a handle to it would crash.
if not hasattr(torch.ops.underpar, "gdn_scan"):
    for scan in (gdn_scan, gdn_scan_adjoint):
        operator = torch.library.custom_op(f"underpar::{scan.__name__}", scan, mutates_args=())
        operator.register_fake(scan_outputs)  # the compiler learns the shapes from it
gdn_scan = torch.ops.underpar.gdn_scan.default
gdn_scan_adjoint = torch.ops.underpar.gdn_scan_adjoint.default


class GatedDeltaChunks(torch.autograd.Function):
    """Gated DeltaNet in chunks of C tokens with a hand-written backward (arXiv 2412.06464, 3).

    With KB = beta K, VB = beta V, G the running sum of g from the chunk's start, and D_ij =
    exp(G_i - G_j) for i >= j, else 0:

        A = tril(KB K^T * D, -1)     T = (I + A)^-1     U = T VB     W = T (exp(G) KB)
        new, S from the scan over chunks, which writes by K_out = exp(G_C - G) K
        O = exp(G) Q S + P new       P = Q K^T * D

    Shapes: q, k, kb (N, M, C, K); vb (N, M, C, V); g (N, M, C, 1); state (M, K, V), see gdn_scan.
    Matrix products take operands of q's dtype; D, T and S have the dtype of g.
    """

    @staticmethod
    def forward(ctx, q, k, kb, vb, g, state):
        """Returns o (N, M, C, V) and the last state (M, K, V)."""
        dtype = q.dtype
        # float64: after strong decay a difference of float32 sums would have few digits left.
        total = g.double().cumsum(-2)
        grow = total.to(g.dtype).exp()
        shrink = (total[..., -1:, :] - total).to(g.dtype).exp()
        gap = (total - total.mT).to(g.dtype)  # (N, M, C, C)
        # Above the diagonal exp would overflow; on and below it no gap is positive.
        d = gap.clamp_(max=0).exp_().tril_()

        # The solver reads A below its diagonal only. Neumann's product and Newton's iteration
        # would not do: powers of A grow to NaN when keys are correlated.
        a = (kb @ k.mT).to(d.dtype).mul_(d)
        eye = torch.eye(d.size(-1), dtype=d.dtype, device=d.device)
        t = torch.linalg.solve_triangular(a, eye, upper=False, unitriangular=True).to(dtype)
        q_in = (q * grow).to(dtype)
        k_in = (kb * grow).to(dtype)
        k_out = (k * shrink).to(dtype)
        u = t @ vb
        w = t @ k_in
        states, new = gdn_scan(w, u, k_out, grow[..., -1:, :], state)

        s = states[:-1].to(dtype)
        p = (q @ k.mT).mul_(d)
        o = (q_in @ s).add_(p @ new)
        ctx.save_for_backward(q, k, kb, grow, shrink, d, a, p, t, q_in, k_in, k_out, u, w, s, new)
        return o, states[-1].clone()

    @staticmethod
    def backward(ctx, d_o, d_last):
        """Returns the gradients of forward's inputs; d_x is the gradient of x."""
        q, k, kb, grow, shrink, d, a, p, t, q_in, k_in, k_out, u, w, s, new = ctx.saved_tensors
        dtype = q.dtype
        decay = grow[..., -1:, :]
        r, d_u = gdn_scan_adjoint(w, p.mT @ d_o, k_out, decay, d_last, q_in.mT @ d_o)
        r_next = r[1:].to(dtype)
        d_q_in = d_o @ s.mT
        d_k_out = new @ r_next.mT
        d_p = d_o @ new.mT
        # Through U, W and the inverse, whose own gradient is never needed.
        d_vb = t.mT @ d_u
        d_k_in = (t.mT @ (d_u @ s.mT)).neg_()
        d_a = (d_vb @ u.mT).add_(d_k_in @ w.mT).neg_().tril_(-1)

        d_qk = (d_p * d).to(dtype)
        d_kk = (d_a * d).to(dtype)
        d_q = (d_q_in * grow).add_(d_qk @ k)
        d_kb = (d_k_in * grow).add_(d_kk @ k)
        d_k = (d_k_out * shrink).add_(d_qk.mT @ q).add_(d_kk.mT @ kb)

        # G_i enters by exp(G_i - G_j) of pairs of tokens, by exp(G_i) and by exp(G_C - G_i). Terms
        # with i = j and i = C are left out: they are constant, exp(0), and would cancel only up to
        # rounding, which costs the digits of a small gradient.
        pairs = (d_p * p).to(d.dtype).tril_(-1).addcmul_(d_a, a)
        write = (d_k_out * k_out).sum(-1, dtype=d.dtype)
        write[..., -1] = 0
        carried = (r_next * s).sum((-1, -2), dtype=d.dtype)
        d_total = (d_q_in * q_in).add_(d_k_in * k_in).sum(-1, dtype=d.dtype)
        d_total += pairs.sum(-1) - pairs.sum(-2) - write
        d_total[..., -1] += write.sum(-1) + carried * decay[..., 0, 0]
        d_g = d_total.flip(-1).cumsum(-1).flip(-1)[..., None]
        return d_q.to(dtype), d_k.to(dtype), d_kb.to(dtype), d_vb, d_g, r[0].clone()


def gdn_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    chunk: int = 32,
) -> tuple[Tensor, Tensor]:
    """Returns Gated DeltaNet's outputs o and last state, by matrix products over chunks of tokens.

    The same token by token (arXiv 2412.06464, section 3), with a = exp(g) <= 1:

        S' = a S + beta k (v - a S^T k)^T
        o = S'^T q

    q and k (B, T, H, K) are L2-normed, q is scaled by K**-0.5 too; v and o (B, T, H, V) have their
    dtype, which is float64, float32 or bfloat16. g and beta (B, T, H) and the state (B, H, K, V)
    are float32, or float64; no state means zeros. Chunks of 32 are the fastest on a CPU.
    """
    b, t, h, dim_k = q.shape
    if state is None:
        state = g.new_zeros(b, h, dim_k, v.size(-1))
    beta = beta[..., None].to(v.dtype)
    chunks = []
    for x in (q, k, beta * k, beta * v, g[..., None]):
        # A padded token has k = 0, v = 0 and g = 0: it leaves the state as it is.
        x = F.pad(x, (0, 0, 0, 0, 0, -t % chunk))
        x = x.unflatten(1, (-1, chunk)).movedim((1, 3), (0, 2))  # (N, B, H, C, dim)
        chunks.append(x.flatten(1, 2))
    # Autocast would round the inverse and the state to bfloat16.
    with torch.autocast(v.device.type, enabled=False):
        o, last = GatedDeltaChunks.apply(*chunks, state.flatten(0, 1))
    o = o.unflatten(1, (b, h)).movedim((0, 2), (1, 3)).flatten(1, 2)  # (B, N * C, H, V)
    return o[:, :t], last.view_as(state)


def short_conv(x: Tensor, weight: Tensor, doc: Tensor) -> Tensor:
    """Returns SiLU of a causal depthwise convolution, for the last T tokens of x.

    x (B, taps-1 + T, C), weight (C, taps), doc (B, taps-1 + T). Shifted sums beat
    F.conv1d(groups=C) on a CPU, and a tap that would reach into another document can be zero.
    """
    reach = weight.size(1) - 1
    weight = weight.to(x.dtype)
    y = x[:, reach:] * weight[:, reach]
    for back in range(1, reach + 1):
        same_doc = doc[:, reach - back : -back] == doc[:, reach:]
        y = y + x[:, reach - back : -back] * weight[:, reach - back] * same_doc[..., None]
    return F.silu(y)


class GatedDeltaNet(nn.Module):
    """Gated DeltaNet (arXiv 2412.06464): linear attention whose state forgets and corrects."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        dim = config.model_dim
        self.heads = config.num_heads
        self.head_dim = dim // self.heads
        self.w_qkvg = matrix((dim, dim, dim, dim), dim)
        self.w_o = nn.Parameter(torch.zeros(dim, dim))
        self.ab = matrix((2 * self.heads,), dim)  # decay and step size, one number per head each
        # Initialised as PyTorch's depthwise Conv1d, then as flash-linear-attention's GatedDeltaNet.
        conv = torch.empty(3 * dim, CONV_TAPS).uniform_(-1, 1)
        self.conv = nn.Parameter(conv / CONV_TAPS**0.5)
        decay = torch.empty(self.heads).uniform_(0.01, 16.0)  # from 0 it could be 0: a dead head
        self.A_log = nn.Parameter(decay.log())
        log_dt = torch.empty(self.heads).uniform_(math.log(1e-3), math.log(0.1))
        dt = log_dt.exp().clamp_min(1e-4)
        self.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))  # softplus(dt_bias) = dt
        self.norm = nn.Parameter(torch.ones(self.head_dim))

    def inputs(self, x: Tensor, qkv: Tensor, first: Tensor) -> tuple[Tensor, ...]:
        """Returns q, k, v, g and beta for gdn_chunk.

        x (..., dim); qkv (..., 3 dim), convolved; first (...): whether a token begins a document.
        """
        q, k, v = qkv.unflatten(-1, (3, self.heads, self.head_dim)).unbind(-3)  # (..., H, D)
        # In float32, since a key longer than 1 lets the state grow. Without the epsilon a key of
        # zeros would get gradients of 1e12.
        wide = self.ab.dtype
        q = q * torch.rsqrt(q.to(wide).square().sum(-1, keepdim=True) + 1e-6)
        k = k * torch.rsqrt(k.to(wide).square().sum(-1, keepdim=True) + 1e-6)
        a, b = F.linear(x.to(wide), self.ab).split(self.heads, dim=-1)  # (..., H)
        g = -self.A_log.exp() * F.softplus(a + self.dt_bias)
        g = torch.where(first[..., None], DOCUMENT_DECAY, g)
        return q.to(v.dtype) * self.head_dim**-0.5, k.to(v.dtype), v, g, torch.sigmoid(b)

    def gated(self, o: Tensor, gate: Tensor) -> Tensor:
        """Returns what w_o reads (..., dim), of outputs o (..., H, D) and gate (..., dim)."""
        return scaled(rms_norm(o), self.norm).flatten(-2) * F.silu(gate)

    def forward(self, x, doc, cache, positions):
        """Returns (B, T, dim) for x (B, T, dim).

        doc (B, CONV_TAPS-1 + L): the documents of all L tokens so far; the last T of them are x.
        The cache, if there is one, keeps the state and the convolution's last inputs.
        """
        B, T, dim = x.shape
        past = cache or {}
        qkv, gate = linear(x, self.w_qkvg).split([3 * dim, dim], dim=-1)
        tail = past.get("tail", qkv.new_zeros(B, CONV_TAPS - 1, 3 * dim))
        qkv = torch.cat([tail, qkv], dim=1)
        doc = doc[:, -qkv.size(1) :]
        first = doc[:, -T:] != doc[:, -T - 1 : -1]  # (B, T)
        inputs = self.inputs(x, short_conv(qkv, self.conv, doc), first)
        o, state = gdn_chunk(*inputs, past.get("state"), chunk=64 if x.is_cuda else 32)
        if cache is not None:
            cache.update(state=state, tail=qkv[:, 1 - CONV_TAPS :])
        return linear(self.gated(o, gate), self.w_o)


def rotate(x: Tensor, positions: Tensor, dims: int) -> Tensor:
    """Returns x (B, T, H, D) with its first `dims` dimensions rotated by positions (T,).

    Rotary positions (arXiv 2104.09864), paired as in GPT-NeoX.
    """
    half = dims // 2
    exponent = torch.arange(half, device=x.device) / half  # float32
    angle = positions[:, None, None] * ROPE_BASE**-exponent  # (T, 1, half)
    cos = angle.cos().to(x.dtype)
    sin = angle.sin().to(x.dtype)
    left, right, same = x.split([half, half, x.size(-1) - dims], dim=-1)
    return torch.cat([left * cos - right * sin, left * sin + right * cos, same], dim=-1)


def attend(q: Tensor, k: Tensor, v: Tensor, doc: Tensor, window: int) -> Tensor:
    """Returns causal attention inside documents (B, H, T, D).

    q (B, H, T, D), k and v (B, Hkv, L, D), doc (B, L); the queries are the last T of the L
    positions. Query i sees key j if 0 <= i - j < window and both are of one document. Blocks of
    queries skip the keys that none of them sees, which on a CPU is 3 times as fast as one masked
    call at T = 4 windows.
    """
    dtype = q.dtype
    T = q.size(2)
    length = k.size(2)
    past = length - T
    if q.is_cuda:  # there the kernels that take a mask do not take grouped heads
        k, v = (x.repeat_interleave(q.size(1) // k.size(1), dim=1) for x in (k, v))
    else:  # a CPU's backward pass takes 4 times as long in bfloat16
        q, k, v = (x.to(torch.promote_types(dtype, torch.float32)) for x in (q, k, v))
    places = torch.arange(length, device=q.device)
    step = max(64, min(window, T) // 4)
    outputs = []
    for start in range(past, length, step):
        end = min(start + step, length)
        low = max(0, start - window + 1)  # the first key that a query of the block sees
        distance = places[start:end, None] - places[low:end]  # (t, l)
        same_doc = doc[:, start:end, None] == doc[:, None, low:end]  # (B, t, l)
        mask = (distance >= 0) & (distance < window) & same_doc
        block = q[:, :, start - past : end - past], k[:, :, low:end], v[:, :, low:end]
        o = F.scaled_dot_product_attention(*block, mask[:, None], enable_gqa=not q.is_cuda)
        outputs.append(o)
    return torch.cat(outputs, dim=2).to(dtype)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions, and queries and keys that are RMS-normed."""

    def __init__(self, config: GPTConfig, window: int):
        super().__init__()
        dim = config.model_dim
        self.heads = config.num_heads
        self.kv_heads = config.num_kv_heads
        self.head_dim = dim // self.heads
        self.window = window
        self.rope_dims = 0
        if config.positions == "rope":
            self.rope_dims = config.rope_dims or self.head_dim
        kv_dim = self.kv_heads * self.head_dim
        self.w_qkv = matrix((dim, kv_dim, kv_dim), dim)
        self.w_o = nn.Parameter(torch.zeros(dim, dim))
        gain = torch.full((self.heads,), config.qk_gain_init)
        self.q_gain = nn.Parameter(gain) if config.qk_gain_init else None

    def forward(self, x, doc, cache, positions):
        """Returns (B, T, dim) for x (B, T, dim); doc as in GatedDeltaNet; positions (T,).

        The cache, if there is one, keeps the keys and values that later queries may see.
        """
        B, T, dim = x.shape
        qkv = linear(x, self.w_qkv).view(B, T, -1, self.head_dim)
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=2)  # (B, T, H, D)
        if self.q_gain is not None:
            q = scaled(rms_norm(q), self.q_gain[:, None])
            k = rms_norm(k)
        q = rotate(q, positions, self.rope_dims).transpose(1, 2)  # (B, H, T, D)
        k = rotate(k, positions, self.rope_dims).transpose(1, 2)
        v = v.transpose(1, 2)
        if cache is not None:
            k = torch.cat([cache.get("k", k[:, :, :0]), k], dim=2)
            v = torch.cat([cache.get("v", v[:, :, :0]), v], dim=2)
            # The next query sees itself and window - 1 keys before it.
            keep = max(0, k.size(2) - self.window + 1)
            cache.update(k=k[:, :, keep:], v=v[:, :, keep:])
        o = attend(q, k, v, doc[:, -k.size(2) :], self.window)
        return linear(o.transpose(1, 2).reshape(B, T, dim), self.w_o)


def init_wave(units: int) -> nn.Parameter:
    """Returns omega ~ N(1, 0.1), phi ~ N(0, 0.1) and b = 0 for `oscillate`, (3, units)."""
    wave = 0.1 * torch.randn(3, units)
    wave[0] += 1.0
    wave[2] = 0.0
    return nn.Parameter(wave)


def oscillate(x: Tensor, wave: Tensor) -> Tensor:
    """Returns sin(omega x + phi) tanh(x) + b per unit, for x (..., units) and wave (3, units).

    The activation of WiggleGPT (Eden-Eldith/WiggleGPT, model_bio.py).
    """
    omega, phi, b = wave.to(x.dtype)
    return torch.sin(omega * x + phi) * torch.tanh(x) + b


class MLP(nn.Module):
    """Two matrices around an activation. A new kind is a word of the setting `mlp` and a branch.

    ReLU^2 is of arXiv 2109.08668, SwiGLU (with a gate) of 2002.05202, bio of WiggleGPT; bio_soft
    and bio_hard add its SparseEventLayer (model_bio_optimized.py), without biases.
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        dim = config.model_dim
        hidden = int(config.mlp_mult * dim)
        self.kind = config.mlp
        self.w_up = matrix((hidden, hidden) if self.kind == "swiglu" else (hidden,), dim)
        if self.kind in ("bio", "bio_soft", "bio_hard"):
            self.wave = init_wave(hidden)
        if self.kind in ("bio_soft", "bio_hard"):
            self.w_gate = matrix((hidden,), hidden)
            self.w_mix = matrix((hidden,), hidden)
            self.mix_wave = init_wave(hidden)
        self.w_down = nn.Parameter(torch.zeros(dim, hidden))

    def hidden(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns what w_down reads (B, T, hidden), for x (B, T, dim), and the units' events.

        The events are booleans of the same shape, or None where the kind has none.
        """
        h = linear(x, self.w_up)
        if self.kind == "relu2":
            return F.relu(h).square(), None
        if self.kind == "leaky_relu2":
            return F.leaky_relu(h, 0.5).square(), None
        if self.kind == "gelu":
            return F.gelu(h), None
        if self.kind == "swiglu":
            gate, up = h.chunk(2, dim=-1)
            return F.silu(gate) * up, None
        if not self.kind.startswith("bio"):
            raise ValueError(f"no kind of MLP is called {self.kind!r}")
        h = oscillate(h, self.wave)
        if self.kind == "bio":
            return h, None
        voltage = torch.sigmoid(linear(h, self.w_gate))
        events = voltage > BIO_THRESHOLD
        spike = torch.sigmoid(5.0 * (voltage - BIO_THRESHOLD))  # of bio_soft: never zero
        if self.kind == "bio_hard":  # 0 or 1, with the gradient of the soft spike
            spike = events.to(h.dtype) + (spike - spike.detach())
        return oscillate(linear(h * spike, self.w_mix), self.mix_wave), events

    def forward(self, x):
        """Returns (B, T, dim) for x (B, T, dim)."""
        return linear(self.hidden(x)[0], self.w_down)


class Block(nn.Module):
    """A layer without its mixer, which may be shared: norms, MLP, and learned scales."""

    def __init__(self, config: GPTConfig, norm: str):
        super().__init__()
        dim = config.model_dim
        self.mixer_norm = Norm(norm, dim)
        self.mlp_norm = Norm(norm, dim)
        self.mlp = MLP(config)
        self.mix = self.mixer_scale = self.mlp_scale = None
        if config.residual_mix:
            self.mix = nn.Parameter(torch.stack([torch.ones(dim), torch.zeros(dim)]))
            self.mixer_scale = nn.Parameter(torch.ones(dim))
            self.mlp_scale = nn.Parameter(torch.ones(dim))

    def forward(self, x, x0, mixer, *context):
        """Returns the residual stream behind the layer (B, T, dim).

        x is the stream before it, x0 the embedding, context the mixer's further arguments.
        """
        if self.mix is not None:
            x = scaled(x, self.mix[0]) + scaled(x0, self.mix[1])
        x = x + scaled(mixer(self.mixer_norm(x), *context), self.mixer_scale)
        return x + scaled(self.mlp(self.mlp_norm(x)), self.mlp_scale)


class GPT(nn.Module):
    """The language model: embedding, layers, norm, and a head with a soft cap."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        # The dtype of activations; weights are float32. None means bfloat16 on CUDA, and on a CPU
        # that of the weights.
        self.dtype = None
        # Whether a layer's activations are computed again in the backward pass, to save memory.
        self.activation_checkpointing = False
        dim = config.model_dim
        vocab_size = config.vocab_size
        self.embed = matrix((vocab_size,), dim, config.embed_init_std)
        self.head = None if config.tie_embeddings else nn.Parameter(torch.zeros(vocab_size, dim))
        if config.positions == "learned":
            std = 0.1 if config.residual_mix else config.embed_init_std
            self.positions_embed = matrix((config.train_seq_len,), dim, std)
        if config.bigram_vocab_size:
            self.bigram_embed = matrix((config.bigram_vocab_size,), BIGRAM_DIM, 0.1)
            self.w_bigram = nn.Parameter(torch.zeros(dim, BIGRAM_DIM))
        words = config.layers.split()
        norms = config.norms.split()
        if config.unet_skips:
            self.skip = nn.Parameter(torch.ones(len(words) // 2, dim))

        # Layers that share a mixer or a block have one name for it; others go by their place.
        mixers = [word if word[1:] else place for place, word in enumerate(words)]
        blocks = [word if word.isupper() else place for place, word in enumerate(words)]
        self.mixer_of_layer = [list(dict.fromkeys(mixers)).index(name) for name in mixers]
        self.block_of_layer = [list(dict.fromkeys(blocks)).index(name) for name in blocks]
        self.mixers = nn.ModuleList()
        for word, index in zip(words, self.mixer_of_layer, strict=True):
            if index == len(self.mixers):  # the first layer with this mixer
                is_gdn = word[0] in "gG"
                window = config.attn_window if word[0] in "sS" else FULL_WINDOW
                self.mixers.append(GatedDeltaNet(config) if is_gdn else Attention(config, window))
        self.blocks = nn.ModuleList()
        for norm, index in zip(norms, self.block_of_layer, strict=True):
            if index == len(self.blocks):
                self.blocks.append(Block(config, norm))
        self.final_norm = Norm(norms[-1], dim)

    def embedded(self, ids: Tensor, previous: Tensor, positions: Tensor) -> Tensor:
        """Returns what the first layer reads (..., dim), of ids (...) and the ids before them."""
        config = self.config
        x = F.embedding(ids, self.embed)
        x = x.to(self.dtype or (torch.bfloat16 if ids.is_cuda else x.dtype))
        if config.residual_mix:
            x = rms_norm(x)
        if config.positions == "learned":
            x = x + F.embedding(positions, self.positions_embed).to(x.dtype)
        if config.bigram_vocab_size:  # BigramHashEmbedding of Parameter Golf
            # A document's first token has no pair with the token before it.
            previous = previous.masked_fill(ids == config.bos_id, config.bos_id)
            pair = ((36313 * ids) ^ (27191 * previous)) % config.bigram_vocab_size
            x = x + linear(F.embedding(pair, self.bigram_embed).to(x.dtype), self.w_bigram)
        return x

    def features(self, ids: Tensor, cache: dict | None = None) -> Tensor:
        """Returns what the head reads (B, T, dim), for ids (B, T).

        With a cache, at first {}, several calls read one text. It keeps the text so far under
        "ids" and what a mixer needs under the number of its layer, also where weights are shared.
        """
        config = self.config
        T = ids.size(1)
        past = {} if cache is None else cache
        text = torch.cat([past.get("ids", ids[:, :0]), ids], dim=1)  # (B, L)
        length = text.size(1)
        if config.positions == "learned" and length > config.train_seq_len:
            most = f"TRAIN_SEQ_LEN={config.train_seq_len}"
            raise UserError(f"POSITIONS='learned': {length} tokens in a text, {most}")
        past["ids"] = text
        positions = torch.arange(length - T, length, device=ids.device)
        previous = F.pad(text, (1, 0), value=config.bos_id)[:, -T - 1 : -1]
        # The number of each token's document; in front, as many places as the convolution reaches.
        doc = F.pad((text == config.bos_id).cumsum(dim=1), (CONV_TAPS - 1, 0))

        recompute = self.activation_checkpointing and torch.is_grad_enabled()
        half = len(self.block_of_layer) // 2
        skips = []
        x = x0 = self.embedded(ids, previous, positions)
        shared = zip(self.block_of_layer, self.mixer_of_layer, strict=True)
        for layer, (block, mixer) in enumerate(shared):
            if skips and layer >= half:
                x = x + scaled(skips.pop(), self.skip[len(skips)])
            run = self.blocks[block]
            if recompute:
                run = functools.partial(checkpoint, run, use_reentrant=False)
            layer_cache = None if cache is None else cache.setdefault(layer, {})
            x = run(x, x0, self.mixers[mixer], doc, layer_cache, positions)
            if config.unet_skips and layer < half:
                skips.append(x)
        return self.final_norm(x)

    def logits(self, x: Tensor) -> Tensor:
        """Returns logits (..., V), float32 at least, of features x (..., dim)."""
        logits = linear(x, self.embed if self.head is None else self.head)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        cap = self.config.logit_softcap
        return cap * torch.tanh(logits / cap) if cap else logits

    def forward(self, ids, targets=None, cache=None):
        """Returns the nats of targets (B, T) after ids (B, T), 0 for -1; or logits (B, T, V)."""
        logits = self.logits(self.features(ids, cache))
        if targets is None:
            return logits
        logits, flat = logits.flatten(0, 1), targets.flatten()
        losses = F.cross_entropy(logits, flat, ignore_index=-1, reduction="none")
        return losses.view_as(targets)


# === end: model ===


# === shared: quantization ===
FLOAT32_CONTROLS = ("A_log", "dt_bias")  # they pass through exp and softplus into a decay that is taken T times
# Tensor class -> arguments of `quantize`: bits, codes being up to qmax = 2**(bits-1) - 1; clip_sigmas, what qmax stands
# for in root mean squares (Parameter Golf's SDClip; 0: the largest weight; -1: what has the least squared error); step,
# what has a scale of its own: a "row", a row on a "grid" of 16 an octave, or the whole "tensor"; widen, a factor on it.
QuantTable, QUANTIZER = dict[str, dict], ("bits", "clip_sigmas", "step")


def tensor_class(name: str, tensor: Tensor) -> str:
    """How the artifact stores a tensor, by the last part of its dotted name: as "matrix", "embedding" or "control".

    "w_*" is a matrix; "*embed*", "head" and "ab" (GDN's decay and step size) are embeddings; all else is control, few
    weights that scale whole channels, and so is what has, seen as (shape[0], the rest), under 16 rows or columns. Bytes
    are "counts", of n-grams.
    """
    if not tensor.is_floating_point():
        return "counts"
    rows, last = tensor.shape[0] if tensor.ndim > 1 else 0, name.removesuffix(".original").rsplit(".", 1)[-1]
    if rows < 16 or tensor.numel() < 16 * rows:
        return "control"
    if last.startswith("w_"):
        return "matrix"
    return "embedding" if "embed" in last or last in ("head", "ab") else "control"


def round_to(w: Tensor, scales: Tensor, bits: int) -> Tensor:
    """The nearest codes, as floats, of w by scales that broadcast."""
    qmax = 2 ** (bits - 1) - 1
    return (w / torch.where(scales > 0, scales, 1.0)).round_().clamp_(-qmax, qmax)


def quantize(w: Tensor, bits: int, clip_sigmas: float, step: str, widen: float = 1.0) -> tuple[Tensor, Tensor]:
    """Codes int8 (R, C) and scales float16 (R,) or (1,) of w (R, ...), see QuantTable. What is not finite stays so."""
    rows = w.reshape(w.shape[0], -1).float()  # (R, C)
    alike = rows.reshape(1, -1) if step == "tensor" else rows  # those of one scale
    # A clip may lie beyond the largest weight: a wide step makes codes cheap. The root mean square is not about the
    # mean, or a constant row would be lost.
    clip = alike.square().mean(1).sqrt() * clip_sigmas if clip_sigmas > 0 else alike.abs().amax(1)  # (R,) or (1,)
    scales = clip / (2 ** (bits - 1) - 1)
    if clip_sigmas < 0:
        tried = (scales * torch.linspace(0.1, 1.0, 37, device=w.device)[:, None])[..., None]  # (37, R, 1)
        errors = [(round_to(alike, own, bits) * own - alike).square().sum(1) for own in tried]
        scales = tried[..., 0].gather(0, torch.stack(errors).argmin(0, keepdim=True))[0]
    scales = scales * widen
    scales = (((scales.log2() * 16).round() / 16).exp2() if step == "grid" else scales).half()
    return round_to(rows, scales.float()[:, None], bits).to(torch.int8), scales


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """code * scale, float32 (R, C): an 8-bit code times an 11-bit significand is exact, on every machine."""
    return codes.float() * scales.float()[:, None]


def quantize_all(tensors: dict[str, Tensor], table: QuantTable) -> dict[str, tuple]:
    """name -> (codes, scales, bits) of the tensors that the table quantizes, each weight by its nearest code."""
    tables = {name: table[kind] for name, w in tensors.items() if (kind := tensor_class(name, w)) in table}
    return {name: (*quantize(tensors[name], **own), own["bits"]) for name, own in tables.items()}


def quant_table(settings) -> QuantTable:
    """The classes and their quantizers that the settings ask for."""
    return {kind: {"widen": 1.0, **{part: getattr(settings, f"{word}_{part}") for part in QUANTIZER}}
            for kind, word in (("matrix", "matrix"), ("embedding", "embed"))}


@contextlib.contextmanager
def swapped(params: list[Tensor], values: Iterable[Tensor]) -> Iterator[None]:
    """`params` hold `values` inside, and their own values again, bit for bit, after, even after an exception."""
    pairs = [(param.detach(), param.detach().clone()) for param in params]  # the same memory, and its values
    for (param, _), value in zip(pairs, values, strict=True):
        param.copy_(value)
    try:
        yield
    finally:
        for param, own in pairs:
            param.copy_(own)


def decoded(tensors: dict[str, Tensor], coded: dict[str, tuple]) -> contextlib.AbstractContextManager[None]:
    """Inside, tensors hold what their codes stand for."""
    values = (dequantize(codes, scales).view_as(tensors[name]) for name, (codes, scales, _) in coded.items())
    return swapped([tensors[name] for name in coded], values)


def quantized(network: nn.Module, table: QuantTable) -> contextlib.AbstractContextManager[None]:
    """Quantization-aware training: inside, for forward and backward, weights are as the artifact would give them back.

    No flag in the model, so compiled code is not traced again. The gradient at q(w) lands on w as it is: exactly the
    straight-through estimator (Bengio et al., arXiv:1308.3432), w + (q(w) - w).detach(). UserError under an adapter.
    """
    tensors = network.state_dict()
    if any(name.endswith(".lora_a") for name in tensors):
        raise UserError("QAT=1: the artifact holds sums of weight and adapter; merge_lora(network) first, or QAT=0")
    return decoded(tensors, quantize_all(tensors, table))


def count_parameters(network: nn.Module) -> dict[str, int]:
    """Parameters by the class the exporter puts them in, and all of them."""
    counts = collections.Counter(matrix=0, embedding=0, control=0, total=0)
    for name, param in network.named_parameters():
        counts.update({tensor_class(name, param): param.numel(), "total": param.numel()})
    return counts
# === end: quantization ===


# === shared: artifact ===
# One file, little endian: magic, version u32, header length u32, zstd(JSON header), data area, SHA-256 of the rest.
# The data area, without gaps: sections "states", "tables", "numbers"; the words of the tensors of coder rans; section
# "scales", float16, of all tensors in turn; the other tensors. A crc32 is of the unpacked array. Codes are int8; rANS
# takes the one at (r, c) by table `table` plus number r and R + c of its tensor. Lane states begin as in "states", run
# on from tensor to tensor, and end in 2**16 plus two bytes each: the first ones of what follows the words, which stand
# nowhere else. So a lane costs about a byte.
ARTIFACT_PREFIX, ARTIFACT_MAGIC, ARTIFACT_VERSION = struct.Struct("<8sII"), b"UNDERPAR", 4
RANS_BITS = 14  # at 14 bits the rounding of frequencies costs about 20 bytes per million codes, at 12 bits 150
RANS_TOTAL = 1 << RANS_BITS
RANS_LOW = 1 << 16  # every state stays in [2**16, 2**32), so a step moves at most one 16-bit word


class ArtifactError(ValueError):
    """An artifact file is damaged or is none; the message is one line that names what is wrong."""


def require(condition: bool, message: str) -> None:
    """Raise ArtifactError(message) unless the condition holds."""
    if not condition:
        raise ArtifactError(message)


def rans_table(counts: np.ndarray) -> np.ndarray:
    """Frequencies uint16 (256,) that sum to 2**14, at least 1 where counts (256,) are not 0, and in two places."""
    counts = counts.astype(np.float64)
    if np.count_nonzero(counts) < 2:  # one symbol with all of 2**14 would overflow a state
        counts[:2] += 1e-9
    # What rounding leaves goes, one at a time, where it saves the most or costs the fewest bits: the derivative of
    # sum(counts * log2(f)) at the middle of the step is counts / (f +- 1/2).
    table = np.where(counts > 0, np.maximum(1, np.rint(counts * (RANS_TOTAL / counts.sum()))), 0)
    while excess := int(table.sum()) - RANS_TOTAL:
        if excess < 0:
            table[np.argmax(counts / (table + 0.5))] += 1
        else:
            table[np.argmin(np.where(table > 1, counts / (table - 0.5), np.inf))] -= 1
    return table.astype(np.uint16)


def rans_lanes(symbols: int) -> int:
    """Number of interleaved coders: a power of two, 1 per 8,192 symbols (each costs about 1 byte), 8 to 1,024."""
    return min(1024, max(8, 1 << (symbols // 8192).bit_length() >> 1))


def rans_encode(states: np.ndarray, table: np.ndarray, symbols: np.ndarray) -> np.ndarray:
    """Words uint16 (W,), in the order they are read, of symbols uint8 (n,) by their table uint16 (256,).

    Symbol i belongs to lane i % lanes of `states`, uint32 (lanes,), which are moved in place: over all arrays of
    symbols, the last one first, since range ANS (Duda, arXiv:1311.2540) is a stack, to where decoding starts.
    """
    lanes, chunks = len(states), [np.empty(0, np.uint16)]
    frequency = table.astype(np.uint32)[symbols]
    start = (np.cumsum(table, dtype=np.uint32) - table)[symbols]
    for begin in range((len(symbols) - 1) // lanes * lanes, -1, -lanes):
        here = slice(begin, min(begin + lanes, len(symbols)))
        x, f = states[: here.stop - begin], frequency[here]  # x is a view; the last symbols may need only a few lanes
        full = x >= f << (32 - RANS_BITS)  # would overflow if one symbol had all of 2**14
        chunks.append(x[full].astype(np.uint16))
        x >>= full.astype(np.uint32) << 4
        # x becomes (x // f << 14) + x % f + start, where x % f = x - x // f * f
        x += x // f * (RANS_TOTAL - f) + start[here]
    return np.concatenate(chunks[::-1])


def rans_decode(states: np.ndarray, table: np.ndarray, words: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The inverse, in integers only: the next symbols, uint8 (count,), and the words after theirs. ArtifactError."""
    require(int(table.sum(dtype=np.int64)) == RANS_TOTAL, "a frequency table is not whole")
    table = table.astype(np.uint32)
    offset = np.arange(RANS_TOTAL, dtype=np.uint32) - np.repeat(np.cumsum(table, dtype=np.uint32) - table, table)
    both = np.repeat(table, table) << 16 | offset  # (2**14,), by slot: frequency and offset, for one look-up
    slots, position, lanes = np.empty(count, np.intp), 0, len(states)
    for begin in range(0, count, lanes):
        x, slot = states[: count - begin], slots[begin : begin + lanes]  # views; the last may need only a few lanes
        np.bitwise_and(x, RANS_TOTAL - 1, out=slot)
        found = both.take(slot, mode="clip")
        x >>= RANS_BITS
        x *= found >> 16
        x += found & 0xFFFF
        low = np.flatnonzero(x < RANS_LOW)
        end = position + len(low)
        require(end <= len(words), "more rANS words are asked for than stored")
        x[low] = x[low] << 16 | words[position:end]
        position = end
    return np.repeat(np.arange(256, dtype=np.uint8), table)[slots], words[position:]


def entropy_bytes(counts: np.ndarray, pool: np.ndarray) -> float:
    """Bytes of symbols with `counts`, (N, 256) or (N,), coded by the shares of `pool` along the last dimension."""
    return float((counts * np.log2(np.maximum(1, pool.sum(-1, keepdims=True)) / np.maximum(1, pool))).sum() / 8)


def size_numbers(codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of rows (R,) and columns (C,) of codes int8 (R, C), uint8: quarter octaves of their root mean square.

    A row's and a column's number add up to a code's. Trained rows differ in size, and so do columns that read hidden
    units; given both, codes are near to normal (docs/lab.md, 2026-11-21).
    """
    power = np.square(codes, dtype=np.float32)
    sides = power.mean(1), power.mean(0) / max(power.mean(), 1e-9)
    return tuple(np.rint(2 * np.log2(np.clip(side, 2**-8, 2**16)) + 16).astype(np.uint8) for side in sides)


def choose_tables(tensors: list[tuple[str, np.ndarray, int]]) -> tuple[np.ndarray, list[tuple[str, int, tuple] | None]]:
    """Tables uint16 (K, 256) for (class, codes int8 (R, C), bytes without rANS); of each tensor (contexts, first table,
    its numbers), or None where rANS is not shorter.

    Contexts: one table for the "tensor" or its "class" (numbers are 0), or one for all codes of a size by "row" or
    "cell", see size_numbers. Each tensor has what takes the fewest bytes, its part of the tables included.
    """
    offers = []  # of each tensor: contexts -> (key of the tables, counts (N, 256) by table and code, numbers)
    for at, (kind, codes, _) in enumerate(tensors):
        (rows, columns), own = size_numbers(codes), {}
        for contexts, other in (("row", 0 * columns), ("cell", columns)):
            table = np.add.outer(rows, other, dtype=np.int32)
            counts = np.bincount((table << 8 | codes.view(np.uint8)).reshape(-1), minlength=1 << 16).reshape(256, 256)
            own[contexts] = contexts, counts, (rows, other)
        alike = counts.sum(0, keepdims=True), (0 * rows, 0 * columns)
        offers.append({**own, "class": (kind, *alike), "tensor": (str(at), *alike)})

    def pool(picks: list[Iterable[str]]) -> dict[str, tuple[np.ndarray, int]]:  # key -> counts of all, how many
        pools = {}
        for own, names in zip(offers, picks, strict=True):
            for key, counts, _ in map(own.get, names):
                before, members = pools.get(key, (0, 0))
                pools[key] = before + counts, members + 1
        return pools

    def size(key: str, counts: np.ndarray, numbers: tuple[np.ndarray, np.ndarray]) -> float:
        every, members = pools[key]
        kinds = [np.bincount(side, minlength=256) for side in numbers]
        table = 1.6 * np.count_nonzero(every) / members  # about what an entry takes, packed
        return entropy_bytes(counts, every) + entropy_bytes(np.array(kinds), np.array(kinds)) + table

    pools = pool(offers)  # as if each tensor took all of them
    sizes = [{name: size(*offer) for name, offer in own.items()} for own in offers]
    least = [min(own, key=own.get) for own in sizes]
    picks = [[name] if own[name] < most else [] for name, own, (*_, most) in zip(least, sizes, tensors, strict=True)]
    tables, first = [], {}
    for key, (counts, _) in pool(picks).items():
        used = np.flatnonzero(counts.sum(1))
        first[key] = len(tables) - int(used[0])
        tables += map(rans_table, counts[used[0] : used[-1] + 1])
    chosen = [(*names, first[own[names[0]][0]], own[names[0]][2]) if names else None
              for names, own in zip(picks, offers, strict=True)]
    return np.array(tables, np.uint16).reshape(-1, 256), chosen


def code_runs(first: int, rows: np.ndarray, columns: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """(table, places in the flat tensor of the codes that it is for), as rANS takes them."""
    table = np.add.outer(rows, columns, dtype=np.uint16).reshape(-1)
    runs = np.split(np.argsort(table, kind="stable"), np.cumsum(np.bincount(table))[:-1])
    return [(first + number, places) for number, places in enumerate(runs) if len(places)]


def pack_array(record: dict, array: np.ndarray) -> list:
    """[record with shape, coder and crc32, payload], the shortest: the array, a zstd frame of it, or its one value."""
    array = np.asarray(array, array.dtype.newbyteorder("<"), order="C")
    each = array.reshape(-1, 1).view(np.uint8)  # (n, bytes)
    raw = each.T.tobytes()  # by byte planes, in which float16 and tables compress better
    frame = zstandard.ZstdCompressor(level=1 if array.dtype == np.int8 else 19).compress(raw)  # rANS suits codes
    payloads = {"stored": raw, "zstd": frame}
    if array.size and (each == each[0]).all():  # 0.0 is not -0.0
        payloads["constant"] = each[0].tobytes()
    coder = min(payloads, key=lambda name: len(payloads[name]))
    return [{**record, "shape": array.shape, "coder": coder, "crc32": zlib.crc32(array)}, payloads[coder]]


def unpack_array(record: dict, area: io.BytesIO, dtype: str) -> np.ndarray:
    """The flat array of `record`, next in `area`, if it is not of coder rans. Any error if it is damaged."""
    payload, count, width = area.read(record["length"]), math.prod(record["shape"]), np.dtype(dtype).itemsize
    match record["coder"]:
        case "zstd":
            payload = zstandard.ZstdDecompressor().stream_reader(payload).read(count * width)  # not what it declares
        case "constant":
            require(len(payload) == width, f"{len(payload)} bytes for one value")  # or a short file fills memory
            payload = np.repeat(np.frombuffer(payload, np.uint8), count)
        case coder:
            require(coder == "stored", f"coder {coder!r} is unknown")
    array = np.frombuffer(payload, np.uint8).reshape(width, -1).T.copy().view(dtype).reshape(count)
    require(zlib.crc32(array) == record["crc32"], f"CRC-32 of {record['name']!r} is wrong")
    return array.astype(dtype[1:], copy=False)  # native


def pack_artifact(tensors: dict[str, Tensor], coded: dict[str, tuple[Tensor, Tensor, int]], settings: dict,
                  tokenizer_sha256: str, meta: dict) -> tuple[bytes, dict[str, int]]:
    """An artifact file of tensors, those of `coded` as codes int8 (R, C), scales float16 (R,) or (1,), and bits.

    settings: what rebuilds the model; meta: anything else; both JSON. The same bytes for the same input, and how many
    by class and part. Raises ValueError where a tensor is not finite as it would be stored.
    """
    parts, streams, scales = [], [], [np.empty(0, np.float16)]
    for name, tensor in tensors.items():
        dtype = torch.float32 if name.endswith(FLOAT32_CONTROLS) else torch.float16
        dtype = dtype if tensor.is_floating_point() else torch.int8  # bytes of counts
        codes, values, bits = coded.get(name) or (None, tensor.detach().to(dtype), 8 * dtype.itemsize)
        if not (tensor.is_floating_point() or tensor.dtype == torch.int8) or not torch.isfinite(values).all():
            most = f"{tensor.dtype} up to {tensor.abs().max():.3g}"
            raise ValueError(f"tensor {name}: {most}; must be floating, finite as {dtype}, or int8")
        values = values.cpu().numpy()
        array = values if codes is None else codes.cpu().reshape(tensor.shape).numpy()
        parts.append(pack_array({"name": name, "class": tensor_class(name, tensor), "bits": bits,
                                 "scales": 0 if codes is None else len(values)}, array))
        if codes is not None:
            scales.append(values)
            streams += [(parts[-1], array.reshape(len(array), -1))] if array.size else []
    tables, chosen = choose_tables([(part[0]["class"], codes, len(part[1])) for part, codes in streams])
    streams, chosen = [each for each, own in zip(streams, chosen, strict=True) if own], list(filter(None, chosen))
    for (part, _), (contexts, table, _) in zip(streams, chosen, strict=True):
        part[0].update(coder="rans", contexts=contexts, table=table)
    late = [pack_array({"name": "scales"}, np.concatenate(scales)),
            *(part for part in parts if part[0]["coder"] != "rans")]
    tail = b"".join(payload for _, payload in late)
    heads = 2 * rans_lanes(sum(codes.size for _, codes in streams))  # bytes of it that lane states carry
    states = RANS_LOW + np.frombuffer(tail[:heads].ljust(heads, b"\0"), "<u2").astype(np.uint32)
    for (part, codes), (_, table, numbers) in zip(streams[::-1], chosen[::-1], strict=True):
        symbols, runs = codes.view(np.uint8).reshape(-1), code_runs(table, *numbers)
        words = [rans_encode(states, tables[number], symbols[places]) for number, places in reversed(runs)]
        part[1] = np.concatenate(words[::-1]).astype("<u2").tobytes()
    numbers = np.concatenate([np.empty(0, np.uint8), *(own[side] for side in (0, 1) for *_, own in chosen)])
    early = [pack_array({"name": name}, array) for name, array in (
        ("states", states), ("tables", tables.T), ("numbers", numbers))]
    sizes = collections.Counter(states=-min(heads, len(tail)))  # class -> bytes
    area = [*early, *(part for part, _ in streams), *late]
    for record, payload in area:
        record["length"] = len(payload)
        sizes[record.get("class", record["name"])] += len(payload)
    header = {"settings": settings, "tokenizer_sha256": tokenizer_sha256, "meta": meta,
              "tensors": [record for record, _ in parts],
              "sections": {record["name"]: record for record, _ in [*early, late[0]]}}
    text = zstandard.ZstdCompressor(level=19).compress(json.dumps(header, allow_nan=False).encode())
    prefix = ARTIFACT_PREFIX.pack(ARTIFACT_MAGIC, ARTIFACT_VERSION, len(text))
    data = b"".join([prefix, text, *(payload for _, payload in area[: -len(late)]), tail[heads:]])
    data += hashlib.sha256(data).digest()
    return data, {**sizes, "header": len(data) - sizes.total()}


def read_artifact(path: str | Path, max_weights: int = 1 << 30) -> tuple[dict, dict[str, Tensor], dict[str, tuple]]:
    """(header, name -> float32 tensor, name -> `coded` as it was written) of an artifact, bit-exact on every machine.

    Memory is bounded by the file, at most max_weights numbers and float32 weights, and the decoding of one tensor at a
    time. ArtifactError, one line naming the file and the damaged part, if anything is not as it was written.
    """
    data = Path(path).read_bytes()
    whole = len(data) >= ARTIFACT_PREFIX.size + 32 and data[:8] == ARTIFACT_MAGIC
    require(whole, f"{path}: is no underpar artifact, or cut short: {len(data)} bytes that begin with {data[:8]!r}")
    _, version, length = ARTIFACT_PREFIX.unpack_from(data)
    require(version == ARTIFACT_VERSION, f"{path}: version {version}, this code reads {ARTIFACT_VERSION}")
    intact = hashlib.sha256(data[:-32]).digest() == data[-32:]
    area, what = io.BytesIO(data[ARTIFACT_PREFIX.size : -32]), "header"
    try:
        header = json.loads(zstandard.ZstdDecompressor().stream_reader(area.read(length)).read(1 << 24))  # at most
        require({"settings", "tokenizer_sha256", "meta"} <= header.keys(), "settings, tokenizer_sha256 or meta missing")
        records, sections, arrays, tensors, coded = header["tensors"], header["sections"], {}, {}, {}
        # These bound all that is allocated below; a size of 0 counts as 1, or the others would have no bound.
        shapes = [record["shape"] for record in [*sections.values(), *records]]
        require(all(size >= 0 for shape in shapes for size in shape), "a shape is negative")
        weights = sum(math.prod(max(1, size) for size in shape) for shape in shapes)
        require(weights <= max_weights, f"{weights} weights, the limit is {max_weights}")
        what = "sections"
        states, tables, numbers = (unpack_array(sections[name], area, dtype) for name, dtype in (
            ("states", "<u4"), ("tables", "<u2"), ("numbers", "|u1")))
        tables = tables.reshape(256, -1).T.copy()
        streams = [record for record in records if record["coder"] == "rans"]
        sides = [record["shape"][0] for record in streams] + [math.prod(record["shape"][1:]) for record in streams]
        numbers = np.split(numbers, np.cumsum(sides)[:-1])
        for at, record in enumerate(streams):
            what, shape = f"tensor {record['name']!r}", record["shape"]
            words, codes = np.frombuffer(area.read(record["length"]), "<u2"), np.zeros(math.prod(shape), np.int8)
            for number, places in code_runs(record["table"], numbers[at], numbers[at + len(streams)]):
                require(0 <= number < len(tables), f"table {number} of {len(tables)}")
                symbols, words = rans_decode(states, tables[number], words, len(places))
                codes[places] = symbols.view(np.int8)
            require(not len(words), f"{len(words)} rANS words are left over")
            require(zlib.crc32(codes) == record["crc32"], "its CRC-32 is wrong")
            arrays[record["name"]] = codes
        what = "states"
        require((states >> 16 == 1).all(), "lanes do not end where they began")
        area = io.BytesIO(states.astype("<u2").tobytes() + area.read())
        scales = torch.from_numpy(unpack_array(sections["scales"], area, "<f2"))
        for record, own in zip(records, scales.split([record["scales"] for record in records]), strict=True):
            name, shape, bits = record["name"], record["shape"], record["bits"]
            what = f"tensor {name!r}"
            require(len(own) in (0, 1, *shape[:1]), f"{len(own)} scales")
            dtype = "|i1" if len(own) else {8: "|i1", 16: "<f2", 32: "<f4"}[bits]
            values = torch.from_numpy(arrays.pop(name) if name in arrays else unpack_array(record, area, dtype))
            if len(own):
                coded[name] = values.view(shape[0], -1), own, bits
                values = dequantize(*coded[name][:2])
            tensors[name] = (values if values.dtype == torch.int8 else values.float()).reshape(shape)
        what = "digest"
        require(intact, "every part unpacks as it was written")
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError,
            zstandard.ZstdError) as error:
        damage = "" if intact else f"SHA-256 is wrong, damaged or truncated, {len(data)} bytes, first seen in "
        text = (f"{type(error).__name__}: " if not isinstance(error, ArtifactError) else "") + str(error).split("\n")[0]
        raise ArtifactError(f"{path}: {damage}{what}: {text}") from None
    return header, tensors, coded
# === end: artifact ===


# === shared: deltas ===
# One file, little endian: magic, version u32, header length u32, zstd(JSON header); for "deltaquant" rANS lane states
# u32; by tensor, in the order of the base, codes and scales of a matrix, the weights of any other; SHA-256 of the rest.
# Codes of "bitdelta" are signs, 8 in a byte; of "deltaquant" frequencies u16 of all codes from the lowest on, number of
# words u32, words u16. What else a reader needs is in the header's "settings" and in the base, whose SHA-256 is there.
DELTA_MAGIC, DELTA_VERSION = b"UPARDELT", 1
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
        words = rans_encode(states, table, symbols)
        parts[at] = b"".join([table[np.arange(-most, most + 1)].astype("<u2").tobytes(), struct.pack("<I", len(words)),
                              words.astype("<u2").tobytes()])
    text = zstandard.ZstdCompressor(level=19).compress(json.dumps(header, allow_nan=False).encode())
    prefix = ARTIFACT_PREFIX.pack(DELTA_MAGIC, DELTA_VERSION, len(text))
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
    intact = len(data) >= ARTIFACT_PREFIX.size + 32 and hashlib.sha256(data[:-32]).digest() == data[-32:]
    require(intact, f"{path}: SHA-256 is wrong, damaged or truncated, {len(data)} bytes")
    _, version, length = ARTIFACT_PREFIX.unpack_from(data)
    area = io.BytesIO(data[ARTIFACT_PREFIX.size : -32])

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
                symbols, rest = rans_decode(states, table, take("<u2", int(take("<u4", 1)[0])), w.numel())
                require(not len(rest), f"tensor {name!r}: rANS words are left over")
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
QUANT_SETTINGS = tuple(f"{word}_{part}" for word in ("matrix", "embed") for part in QUANTIZER)


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
            return SimpleNamespace(path=folder, tensors=tensors, coded=load("coded.pt"), run={}, table={}, **meta)
        shape = {field.name: meta["identity"][field.name] for field in fields(GPTConfig)}
        run = {**meta["settings"], "steps": meta["step"]}
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
    ema or swa; of an artifact `header` and `coded` (name -> codes, scales, bits); all empty elsewhere. Without
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
    write_folder(out, {"model.pt": source.tensors, "coded.pt": source.coded, "meta.json": meta})


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
        if source.coded and (named := [name.upper() for name in QUANT_SETTINGS if name.upper() in given]):
            raise UserError(f"{named[0]}: the weights of {source.path} are quantized already; give their checkpoint")
        return {name: source.run[name] for name in (*QUANT_SETTINGS, "data_path") if name in source.run}, {}

    return load_settings(Settings, dict(os.environ), stored=stored)


def code_weights(source: SimpleNamespace, settings: Settings) -> dict[str, tuple]:
    """`coded` of a model: what it has, or its weights to the nearest code. A class whose settings are the checkpoint's
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
    return {name: (codes.cpu(), scales.cpu(), bits) for name, (codes, scales, bits) in coded.items()}


def pack_model(source: SimpleNamespace, settings: Settings, coded: dict[str, tuple]) -> tuple[bytes, dict[str, int]]:
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
            network = GPT(GPTConfig(**source.shape))
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
    for name, w in tuned.tensors.items():
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
    for name in [*a.tensors, *b.tensors]:
        one, two = (list(each.tensors[name].shape) if name in each.tensors else "missing" for each in (a, b))
        require(one == two, f"tensor {name!r}: {one} in {a.path}, {two} in {b.path}")


def distances(a: SimpleNamespace, b: SimpleNamespace, base: SimpleNamespace | None = None) -> list[list]:
    """Rows of a table, by tensor class and of all: how far b's weights are from a's, or what both add to a base's.

    ||b - a|| / ||a||, mean (b - a)^2, max |b - a|, a.b / (||a|| ||b||), 10 log10(||a||^2 / ||b - a||^2), in float64.
    ArtifactError where shapes differ.
    """
    match_tensors(a, b)
    sums = {key: np.zeros(6) for key in ("matrix", "embedding", "control", "all")}
    for name, w in progress(a.tensors.items(), "distances"):
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
        (codes, scales, bits), own = source.coded[name], table[kind]
        usual, steps = quantize(w, **own)[1].float(), scales.float()[:, None]
        require((bits, len(scales)) == (own["bits"], len(usual)), f"{what}: {bits} bits, {len(scales)} steps; by the "
                f"settings of {model.path} {own['bits']} bits, {len(usual)} steps")
        nearest = round_to(w.flatten(1), steps, bits)
        error, least = ((w.flatten(1) - each * steps).double().norm().item() for each in (codes, nearest))
        require(error <= 10 * least + 1e-12, f"{what}: {error / max(least, 1e-12):.3g} times the error of the nearest "
                f"codes to the weights of {model.path}")
        ratios = (scales.float() / usual)[usual > 2**-13].tolist()  # below, float16 is coarse
        found[kind].append((w.numel(), (nearest == codes).sum().item(), error**2, least**2, ratios, what))
    for kind, rows in found.items():
        count, same, error, least, ratios = (sum(column, start) for column, start in zip(
            list(zip(*rows, strict=True))[:5], (0, 0, 0.0, 0.0, []), strict=True))
        middle, own = float(np.median(ratios or [math.nan])), table[kind]
        spread = math.inf if own["clip_sigmas"] < 0 else 1.004 * 2 ** (own["step"] == "grid" and 1 / 16)  # by rounding
        for *_, ratios, what in rows:
            wrong = max([middle, *ratios]) / min([middle, *ratios])
            require(not wrong > spread, f"{what}: its steps are not those of {model.path}, by a factor of {wrong:.4g} "
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
    for record in progress(source.header["tensors"], "info"):
        name, w = record["name"], source.tensors[record["name"]]
        tensors[name] = sums = collections.Counter(tensors=1, weights=w.numel(), bytes=record["length"])
        if name in source.coded:
            counts = np.bincount(source.coded[name][0].numpy().view(np.uint8).reshape(-1), minlength=256)
            sums["entropy"] = 8 * entropy_bytes(counts, counts)
        if model:
            own = model.tensors[name].double()
            sums.update(error=(w.double() - own).square().sum().item(), power=own.square().sum().item())
        sums[f"{record['bits']}-bit {' '.join(filter(None, (record['coder'], record.get('contexts'))))}"] = 1
        parts[tensor_class(name, w)].update(sums)
    for name, record in source.header["sections"].items():
        parts[f"({name})"].update({"bytes": record["length"], record["coder"]: 1})
    size, weights = source.path.stat().st_size, sum(w.numel() for w in source.tensors.values())
    _, _, length = ARTIFACT_PREFIX.unpack_from(source.path.read_bytes())
    parts["(header)"] = collections.Counter(bytes=ARTIFACT_PREFIX.size + length + 32)
    # Lane states carry the first bytes of what follows the words, which stand nowhere else.
    parts["(states)"]["bytes"] += size - sum(sums["bytes"] for sums in parts.values())
    sums = {part: sum(own[part] for own in tensors.values()) for part in ("error", "power")}
    parts["total"] = collections.Counter(tensors=len(tensors), weights=weights, bytes=size, **sums)
    rows = [["class", "tensors", "weights", "bytes", "bits/weight", "entropy", "error", "coders"]]
    for name, sums in [*(tensors.items() if args.tensors else ()), *parts.items()]:
        coders = [f"{key}:{count}" for key, count in sums.items() if re.search("rans|zstd|stored", key)]
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
        require(model.shape == source.shape, f"{source.path}: its settings are not those of {model.path}")
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
LLAMA = dict(mlp="swiglu", positions="rope", rope_dims=0, qk_gain_init=0.0, residual_mix=False, unet_skips=False,
             bigram_vocab_size=0, logit_softcap=0.0)
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
        num_attention_heads=shape.num_heads, num_key_value_heads=shape.num_kv_heads, rope_theta=ROPE_BASE,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_BASE},  # transformers 5's name for it
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
