"""Write text with a model from its artifact.

    ARTIFACT=runs/<RUN_ID>/model.upar PROMPT="Once upon a time" python sample.py
    ARTIFACT=runs/<RUN_ID>/model.upar TEMPERATURE=0.7 NUM_SAMPLES=4 MAX_NEW_TOKENS=200 python sample.py

Every setting below is an environment variable: its name in capitals. The sections between `# === shared:` fences are
those of train_gpt.py (tools/sync.py).
"""

import base64
import collections
import contextlib
import datetime
import difflib
import fnmatch
import hashlib
import json
import math
import os
import platform
import re
import resource
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from types import FunctionType, SimpleNamespace

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


# ---------------------------------------------------------------------------------------------------------- settings
@dataclass(frozen=True)
class Settings:
    artifact: str = ""  # the model: a model.upar file, or a run's folder
    tokenizer_path: str = ""  # .model file, tiktoken name, .tiktoken file or "bytes"; empty: that of data or artifact
    prompt: str = ""  # text to go on from; empty: a document's beginning
    num_samples: int = 1  # how many continuations
    max_new_tokens: int = 100  # length of each, at most
    temperature: float = 0.8  # of the distribution; 0: always the likeliest token
    top_k: int = 50  # draw from this many likeliest tokens; 0: from all
    seed: int = 1337  # of every random draw
    device: str = "auto"  # auto, cpu or cuda


# === shared: settings ===
class UserError(Exception):
    """A mistake of the user's: printed as one line, exit code 2."""


# Names that another script of ours, Parameter Golf or nanoGPT reads. Set for a script that does not read them they
# would be ignored in silence, which is how runs of this field were lost; here they are errors.
FOREIGN_NAMES = tuple("""
    ACTIVATION_CHECKPOINTING ADAM_EPS ADAM_WD ALWAYS_SAVE_CHECKPOINT ARCH_MODE ARTIFACT ARTIFACT_BYTES_MAX
    ATTN_CLIP_SIGMAS ATTN_WINDOW BACKEND BATCH_SIZE BETA1 BETA2 BIAS BIGRAM_DIM BIGRAM_VOCAB_SIZE BIO_EVENTS
    BIO_THRESHOLD BLOCK_SIZE CAUTIOUS_WD COMPILE COMPILE_MODE COMPRESSOR CONFIG DATASET DATA_DIR DATA_PATH DECAY_LR
    DETERMINISTIC DEVICE DROPOUT DTYPE EMA EMA_DECAY EMA_ENABLED EMA_MEMORY_FRAC EMA_START_FRAC EMBED_BITS
    EMBED_CLIP_SIGMAS EMBED_LR EMBED_WD ENABLE_LOOPING_AT EVAL_INTERVAL EVAL_ITERS EVAL_ONLY EVAL_SEQ_LEN EVAL_STATEFUL
    EVAL_STRIDE GATED_ATTN_ENABLED GDN_NEG_EIGVAL GPTQ_CALIBRATION_BATCHES GPTQ_RESERVE_SECONDS
    GRADIENT_ACCUMULATION_STEPS GRAD_ACCUM_STEPS GRAD_CLIP GRAD_CLIP_NORM HANG_SECONDS HEAD_LR HOLDOUT_TOKENS INIT_FROM
    ITERATIONS KEEP LATE_QAT LATE_QAT_THRESHOLD LAYER_PATTERN LEARNING_RATE LN_SCALE LOGIT_SOFTCAP LOG_INTERVAL LOOP_END
    LOOP_START LR_DECAY_ITERS LR_FLOOR LR_SCHEDULE MATRIX_BITS MATRIX_CLIP_SIGMAS MATRIX_LR MAX_ITERS MAX_NEW_TOKENS
    MAX_WALLCLOCK_SECONDS MICRO_BATCH_TOKENS MIN_LR MLP MLP_CLIP_SIGMAS MLP_MULT MODEL_DIM MTP_NUM_HEADS
    MUON_BACKEND_STEPS MUON_BETA2 MUON_COEFFICIENTS MUON_MOMENTUM MUON_MOMENTUM_WARMUP_FRAC MUON_MOMENTUM_WARMUP_START
    MUON_MOMENTUM_WARMUP_STEPS MUON_ROW_NORMALIZE MUON_WD MUON_WEIGHT_DECAY NORM NUM_HEADS NUM_KV_HEADS NUM_LAYERS
    NUM_LOOPS NUM_SAMPLES N_EMBD N_HEAD N_LAYER OPTIMIZER OUT_DIR PARALLEL_RESIDUAL POSITIONS PROFILE PROMPT QAT
    QAT_ENABLED QAT_START_FRAC QK_GAIN_INIT QK_NORM REPLAY RESERVE_SECONDS RESIDUAL_MIX RESUME ROPE_BASE ROPE_DIMS
    RUN_ID SAVE_EVERY SCALAR_LR SEED SLIDING_WINDOW_ENABLED SMEAR_GATE SMEAR_GATE_ENABLED SPIKE_NATS SPIKE_POLICY SWA
    SWA_ENABLED SWA_EVERY SWA_START_FRAC TEMPERATURE TIED_EMBED_INIT_STD TIED_EMBED_LR TIE_EMBEDDINGS TOKENIZER_PATH
    TOP_K TRAIN_BATCH_TOKENS TRAIN_LOG_EVERY TRAIN_SEQ_LEN TTT_ENABLED TTT_LR UNET_SKIPS VAL_BATCH_SIZE VAL_BATCH_TOKENS
    VAL_LOSS_EVERY VE_ENABLED VOCAB_SIZE WARMDOWN_FRAC WARMDOWN_ITERS WARMUP_FRAC WARMUP_ITERS WARMUP_STEPS WEIGHT_DECAY
    XSA_LAST_N
""".split())

# (pattern of a field name, smallest, largest), the first match counts; a field that matches none must be >= 0.
RANGES = (
    ("keep", 1, 1 << 20),
    ("ema_memory_frac", 1e-6, 1.0), ("*_frac", 0.0, 1.0), ("lr_floor", 0.0, 1.0), ("bio_threshold", 0.0, 1.0),
    ("beta?", 0.0, 0.9999), ("muon_momentum", 0.0, 0.9999), ("muon_momentum*_start", 0.0, 0.9999),
    ("adam_eps", 1e-20, 1.0), ("muon_backend_steps", 1, 20), ("*_bits", 2, 8), ("model_dim", 16, 65536),
    ("num_layers", 0, 512), ("num_*heads", 1, 1024), ("mlp_mult", 0.25, 16.0), ("bigram_dim", 1, 65536),
    ("bigram_vocab_size", 0, 1 << 24), ("tied_embed_init_std", 1e-6, 10.0), ("rope_base", 1.0, 1e9),
    ("attn_window", 1, 1 << 20),
    ("vocab_size", 0, 1 << 20), ("train_seq_len", 2, 1 << 20), ("train_batch_tokens", 2, 1 << 31),
    ("train_log_every", 1, 1 << 31), ("artifact_bytes_max", 1, 1 << 40), ("max_new_tokens", 1, 1 << 20),
    ("num_samples", 1, 1 << 16), ("temperature", 0.0, 100.0),
)
CHOICES = {
    "lr_schedule": ("linear", "cosine", "wsd", "constant"), "device": ("auto", "cpu", "cuda"),
    "compile_mode": ("default", "reduce-overhead", "max-autotune"), "positions": ("rope", "learned", "none"),
    "mlp": ("relu2", "leaky_relu2", "gelu", "swiglu", "bio"), "bio_events": ("off", "soft", "hard"),
    "optimizer": ("muon", "lion", "adamw", "adamw8bit", "adafactor"),
    "arch_mode": ("D", "gdn", "gdn_kv", "hybrid", "baseline", "llama"),
    "muon_coefficients": ("quintic", "polar_express"), "spike_policy": ("stop", "skip", "rewind"),
}


def parse_setting(name: str, text: str, kind: type) -> int | float | bool | str:
    """The value of setting `name` (a field name) written as `text`. Raises UserError for a wrong type or range."""
    what = f"{name.upper()}={text!r}"
    try:
        value = {"0": False, "1": True}[text] if kind is bool else kind(text)
    except (KeyError, ValueError):
        right = {bool: "0 or 1", int: "a whole number", float: "a number"}[kind]
        raise UserError(f"{what}: must be {right}") from None
    if kind in (int, float):
        low, high = next(((lo, hi) for glob, lo, hi in RANGES if fnmatch.fnmatch(name, glob)), (0, math.inf))
        if not (low <= value <= high and math.isfinite(value)):
            raise UserError(f"{what}: must be from {low} to {high}")
    if value not in CHOICES.get(name, (value,)):
        raise UserError(f"{what}: must be one of {', '.join(CHOICES[name])}")
    return value


def read_config(path: str) -> dict[str, str]:
    """NAME=value lines of a config file; `#` starts a comment. Raises UserError with the line's number."""
    if not Path(path).is_file():
        raise UserError(f"CONFIG={path!r}: no such file")
    values = {}
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        line = line.split("#", 1)[0].strip()
        if line:
            name, equals, value = line.partition("=")
            if not equals:
                raise UserError(f"{path}:{number}: {line!r} is not NAME=value")
            values[name.strip()] = value.strip().strip("'\"")
    return values


def load_settings(cls: type, environ: dict[str, str], presets: dict[str, dict[str, dict]] | None = None,
                  stored: Callable[[dict[str, str]], tuple[dict, dict]] = lambda given: ({}, {})):
    """Settings of dataclass `cls` from the file CONFIG names and from `environ`, which wins.

    `presets`: setting -> its value -> values of other settings, below those that stand beside it, so that a preset
    chosen in the environment is above the file. `stored`: what stands below and above both, given both. Raises
    UserError for a wrong value, an unknown name in the file, and one in the environment that is a near miss or that
    only other scripts read.
    """
    kinds = {field.name.upper(): field.type for field in fields(cls)}
    config = read_config(environ["CONFIG"]) if environ.get("CONFIG") else {}
    ignored = {name.strip() for name in environ.get("IGNORE_ENV", "").split(",")} | {"CONFIG", "IGNORE_ENV"}

    def guess(name: str, cutoff: float) -> str:
        near = difflib.get_close_matches(name, kinds, 1, cutoff)
        return f"; did you mean {near[0]}?" if near else ""

    for name in config:
        if name not in kinds or name == "CONFIG":
            raise UserError(f"{environ['CONFIG']}: unknown setting {name}{guess(name, 0.6)}")
    for name in sorted(set(environ) - set(kinds) - ignored):
        hint = guess(name, 0.6) or "; its settings stand at its top." if name in FOREIGN_NAMES else guess(name, 0.85)
        if hint:
            raise UserError(f"{name}={environ[name]!r}: no setting of this script{hint} IGNORE_ENV={name} lets it be")
    here = {name: environ[name] for name in kinds if name in environ}
    file, env = ({name.lower(): parse_setting(name.lower(), text, kinds[name]) for name, text in given.items()}
                 for given in (config, here))
    values, last = stored({**config, **environ})
    for own, above in ((file, env), (env, {})):
        for name, choices in (presets or {}).items():
            values |= choices[own[name]] if name in own and name not in above else {}
        values |= own
    return cls(**{name: value for name, value in {**values, **last}.items() if name.upper() in kinds})


def settings_table(settings) -> str:
    """Every resolved setting, one a line; `*` marks those that differ from the default."""
    values = [(field, getattr(settings, field.name)) for field in fields(settings)]
    return "\n".join(f"{'*' if value != field.default else ' '} {field.name.upper()}="
                     f"{int(value) if field.type is bool else value}" for field, value in values)
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

    def agree(self, value: str) -> str:
        """Rank 0's value, on every rank."""
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
        torch.use_deterministic_algorithms(True)
    if cuda:
        torch.cuda.set_device(place)
    if "RANK" in os.environ:
        patience = datetime.timedelta(minutes=60)  # rank 0's compressors and count models at the end take minutes
        dist.init_process_group("nccl" if cuda else "gloo", timeout=patience, device_id=place if cuda else None)
    return Runtime(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)), place, "RANK" in os.environ)


class Log:
    """The run's log: a file, which is gone on with where it stands, and the terminal; written by rank 0 only."""

    def __init__(self, path: Path | None):
        self.file = open(path, "ab", buffering=0) if path else None  # each line is written at once
        self.clear = "\r\033[K" if path and sys.stdout.isatty() else ""  # wipes a terminal's line of progress

    def __call__(self, text: str, terminal: bool = True) -> None:
        if self.file:
            try:
                self.file.write(text.encode() + b"\n")
            except OSError as error:  # a full disk may have room again before the next checkpoint
                sys.stderr.write(f"log.txt: {error.strerror}, lost: {text[:200]}\n")
            if terminal:
                print(self.clear + text, flush=True)

    def progress(self, text: str) -> None:
        """A line that the next one overwrites, on a terminal only."""
        if self.clear:
            print(self.clear + text, end="", flush=True)


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


def make_run_folder(out_dir: str, run_id: str) -> Path:
    """Create out_dir/run_id. Raises UserError if it exists or cannot be written."""
    folder = Path(out_dir) / run_id
    if not run_id or Path(run_id).name != run_id:
        raise UserError(f"RUN_ID={run_id!r}: must be a plain folder name")
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise UserError(f"RUN_ID={run_id!r}: {folder} exists already; RESUME it, or choose another RUN_ID") from None
    except OSError as error:
        raise UserError(f"OUT_DIR={out_dir!r}: cannot write there ({error.strerror})") from None
    return folder


def describe_machine(runtime: Runtime) -> dict:
    """For log and result.json: hardware, versions, most memory held so far (allocator on CUDA, process on a CPU)."""
    cuda = runtime.device.type == "cuda"
    hardware = torch.cuda.get_device_name() if cuda else f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__,
                "cuda": torch.version.cuda if cuda else None}
    process = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    peak = torch.cuda.max_memory_allocated() if cuda else process  # bytes
    return {"hardware": f"{runtime.world_size} x {hardware}", "versions": versions, "peak_memory_mib": peak / 2**20}


def git_commit() -> str:
    """Commit of the folder this script stands in (no tag), `+` if the tree has changes, or "unknown"."""
    folder, words = Path(__file__).resolve().parent, "describe --always --abbrev=40 --exclude=* --dirty=+".split()
    try:
        return subprocess.run(["git", "-C", folder, *words], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
# === end: runtime ===


# === shared: data ===
SHARD_KINDS = {(20240520, 1): np.dtype("<u2"), (20240801, 7): np.dtype("<u4")}  # llm.c: (magic, version) -> tokens
SHARD_HEADER_BYTES = 256 * 4  # 256 int32, then the tokens: uint32 for vocabularies above 65,536, else uint16
ROLE_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
SPACE_MARK = "\u2581"  # SentencePiece writes a space as this character
ENCODINGS = ("gpt2", "r50k_base", "p50k_base", "cl100k_base", "o200k_base")  # of tiktoken


@dataclass
class Tokenizer:
    """A tokenizer and the bytes its tokens stand for, from `load_tokenizer`. A token counts the UTF-8 bytes it decodes
    to; after a boundary (a control, unknown or unused token, itself 0 bytes) without the space that a model puts before
    every text (add_dummy_prefix). Parameter Golf counts the same (train_gpt.py, build_sentencepiece_luts, eval_val).
    """

    name: str
    file: str  # what `save` writes; "bytes": nothing
    content: bytes  # of that file; its SHA-256 tells tokenizers apart
    bos_id: int
    special_ids: dict[str, int]  # role token -> id; empty where the tokenizer has none
    pieces: list[bytes]  # what each token decodes to, b"" for boundaries
    drops_space: np.ndarray  # (V,) bool, loses its space after a boundary
    encode: Callable[[str], list[int]]  # ids without BOS; special tokens in the text are ordinary characters

    def __post_init__(self) -> None:
        self.sha256, self.vocab_size = hashlib.sha256(self.content).hexdigest(), len(self.pieces)
        self.byte_counts = np.array([len(piece) for piece in self.pieces])  # (V,) int64
        self.boundary = self.byte_counts == 0  # (V,) bool

    def save(self, folder: str | Path) -> str:
        """Writes the file that gives the tokenizer back into `folder`; its name, or `bytes`, which needs no file."""
        if self.file != "bytes":
            (Path(folder) / self.file).write_bytes(self.content)
        return self.file

    def decode_bytes(self, ids: list[int] | np.ndarray) -> bytes:
        """The bytes of a token sequence that starts a document; `token_bytes` counts exactly these."""
        ids = np.asarray(ids, dtype=np.int64)
        drops = self.drops_space[ids] & self.boundary[np.append(self.bos_id, ids)[:-1]]
        return b"".join([self.pieces[i][drop:] for i, drop in zip(ids.tolist(), drops.tolist(), strict=True)])

    def decode(self, ids: list[int] | np.ndarray) -> str:
        """`decode_bytes` as text; bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")


def load_tokenizer(path: str | Path) -> Tokenizer:
    """A SentencePiece `.model` file; a tiktoken encoding (`load_encoding`); or `bytes`, in whatever folder: 0 pad,
    1 bos, 2 eos, 3 unk, 4..259 the bytes, then the role tokens. Raises UserError for what gives no tokenizer with BOS.
    """
    path = Path(path)
    if path.name == "bytes":
        special_ids = {role: 260 + i for i, role in enumerate(ROLE_TOKENS)}
        pieces = [b""] * 4 + [bytes([byte]) for byte in range(256)] + [b""] * 4
        return Tokenizer("bytes", "bytes", b"underpar bytes 264", 1, special_ids, pieces, np.zeros(264, dtype=np.bool_),
                         lambda text: [byte + 4 for byte in text.encode("utf-8")])
    if str(path) in ENCODINGS or path.is_dir() or path.suffix == ".tiktoken":
        return load_encoding(path)
    if not path.is_file() or not path.stat().st_size:
        raise UserError(f"tokenizer {path}: no such file, or empty; name a SentencePiece .model file, a tiktoken "
                        f"encoding ({', '.join(ENCODINGS)}) or its .tiktoken file, or `bytes`")
    content = path.read_bytes()
    try:
        model = sentencepiece.SentencePieceProcessor(model_proto=content)
    except RuntimeError as error:
        raise UserError(f"tokenizer {path}: not a SentencePiece model ({len(content)} bytes)") from error
    if model.bos_id() < 0:
        raise UserError(f"tokenizer {path}: has no BOS token; every document must begin with one")
    ids = list(range(model.vocab_size()))
    names, control = model.id_to_piece(ids), np.array(model.is_control(ids))
    boundary = control | model.is_unknown(ids) | model.is_unused(ids)
    pieces = [name.replace(SPACE_MARK, " ").encode("utf-8") for name in names]
    for i in np.flatnonzero(boundary | model.is_byte(ids)):
        pieces[i] = b"" if boundary[i] else bytes.fromhex(names[i][3:5])  # a byte's name is "<0x41>"
    # A leading space that the model's own decoder leaves out is the dummy prefix, no part of the text.
    drops = np.array([name.startswith(SPACE_MARK) and len(model.decode([i]).encode("utf-8")) < len(pieces[i])
                      for i, name in enumerate(names)])
    special_ids = {role: names.index(role) for role in ROLE_TOKENS if model.is_control(model.piece_to_id(role))}
    return Tokenizer(path.stem, "tokenizer.model", content, model.bos_id(), special_ids, pieces, drops, model.encode)


def load_encoding(path: Path) -> Tokenizer:
    """A tiktoken encoding by name (downloaded once), from its rank file `<name>.tiktoken`, or GPT-2's from a folder of
    encoder.json and vocab.bpe: tiktoken's own function, with loaders that read and check the files given.
    """
    public, name = tiktoken_ext.openai_public, "gpt2" if path.is_dir() else path.name.removesuffix(".tiktoken")
    loaders = {"load_tiktoken_bpe": lambda url, expected_hash: public.load_tiktoken_bpe(str(path), expected_hash),
               "data_gym_to_mergeable_bpe_ranks": lambda vocab_bpe_file, encoder_json_file, **hashes: (
                   public.data_gym_to_mergeable_bpe_ranks(f"{path}/vocab.bpe", f"{path}/encoder.json", **hashes))}
    maker = "r50k_base" if path.name == "gpt2.tiktoken" else name  # the same ranks, pattern and special token
    scope = vars(public) | (loaders if path.is_dir() or path.suffix else {})
    try:
        encoding = tiktoken.Encoding(**FunctionType(getattr(public, maker).__code__, scope)())
    except (AttributeError, OSError, ValueError, AssertionError) as error:
        raise UserError(f"tokenizer {path}: tiktoken cannot load it ({' '.join(str(error).split())[:160]}); expected "
                        f"a name ({', '.join(ENCODINGS)}) that it can download, its rank file <name>.tiktoken, or a "
                        "folder of GPT-2's encoder.json and vocab.bpe") from error
    tokens = {rank: token for token, rank in encoding._mergeable_ranks.items()}
    pieces = [tokens.get(rank, b"") for rank in range(encoding.n_vocab)]
    content = b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in sorted(tokens.items()))
    return Tokenizer(name, f"{name}.tiktoken", content, encoding.eot_token, {}, pieces,
                     np.zeros(len(pieces), dtype=np.bool_), encoding.encode_ordinary)


def token_bytes(tokenizer: Tokenizer, prev: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Bytes of each token of `ids` given the token before it, int64, same shape."""
    return tokenizer.byte_counts[ids] - (tokenizer.drops_space[ids] & tokenizer.boundary[prev])


def write_shard(path: str | Path, tokens: np.ndarray, vocab_size: int = 1 << 16) -> None:
    """Writes `tokens` (N,) as one shard, uint32 for a vocabulary above 65,536. Raises UserError for ids too large."""
    (magic, version), kind = list(SHARD_KINDS.items())[vocab_size > 1 << 16]
    packed = np.asarray(tokens).astype(kind)
    if not np.array_equal(packed, tokens):
        raise UserError(f"{path}: token ids {tokens.min()}..{tokens.max()} do not fit {packed.dtype}")
    header = np.array([magic, version, len(tokens)] + [0] * 253, dtype="<i4")
    np.concatenate([header.view(kind), packed]).tofile(path)


def read_shard(path: str | Path) -> np.ndarray:
    """The tokens of a shard, a memory map (N,). Raises UserError naming file, found and expected."""
    if not Path(path).is_file():
        raise UserError(f"shard {path}: no such file")
    size = Path(path).stat().st_size
    magic, version, count, *_ = [*np.fromfile(path, dtype="<i4", count=3).tolist(), 0, 0, 0]
    kind = SHARD_KINDS.get((magic, version))
    if kind is None:
        raise UserError(f"shard {path}: no token shard: {size} bytes, magic number {magic} and version {version}, "
                        "expected " + " or ".join(f"{known} and {its}" for known, its in SHARD_KINDS))
    expected = SHARD_HEADER_BYTES + kind.itemsize * count
    if count <= 0 or size != expected:
        raise UserError(f"shard {path}: truncated or damaged: {size} bytes, its {count} tokens would take {expected}")
    return np.memmap(path, dtype=kind, mode="r", offset=SHARD_HEADER_BYTES, shape=(count,))


def sha256_file(path: str | Path) -> str:
    """SHA-256 of a file as hex digits; the file is mapped, not read into memory."""
    return hashlib.sha256(np.memmap(path, mode="r") if os.path.getsize(path) else b"").hexdigest()


def load_manifest(data_path: str | Path) -> dict:
    """`manifest.json` of a data folder. Raises UserError naming the command that writes one."""
    path = Path(data_path) / "manifest.json"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        manifest = None
    if not isinstance(manifest, dict) or manifest.get("format") != 1:
        raise UserError(f"{path}: no such file, or not of format 1; `python data/prepare.py SOURCE --out {data_path}` "
                        f"makes it, `python data/download.py --manifest {data_path} --tokenizer PATH` does for shards")
    return manifest


def check_dataset(data_path: str | Path, tokenizer: Tokenizer, manifest: dict, hash_train: bool = False) -> list:
    """The TokenStreams of training and validation. Raises UserError unless they and the tokenizer are those of the
    manifest: all token counts, SHA-256 of tokenizer and validation shards (with `hash_train` of training shards too);
    and where validation documents also stand in the training documents of shards made here.
    """
    where, recorded, streams = Path(data_path) / "manifest.json", manifest["tokenizer"], []
    if tokenizer.sha256 != recorded["sha256"]:
        raise UserError(f"{data_path}: shards were written with another tokenizer: {recorded['file']} of SHA-256 "
                        f"{recorded['sha256'][:12]}…, given {tokenizer.name} of {tokenizer.sha256[:12]}…")
    if manifest["overlap_documents"] and not manifest["published"]:
        raise UserError(f"{where}: {manifest['overlap_documents']} validation documents also stand in training, "
                        "expected 0; prepare the data again")
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
        self.paths, self.vocab_size = paths, vocab_size
        self.shards = [read_shard(path) for path in paths]
        self.marks = [self.mark(path) for path in paths]
        self.starts = np.cumsum([0] + [len(shard) for shard in self.shards])  # (shards + 1,)
        self.length = int(self.starts[-1])

    def __len__(self) -> int:
        return self.length

    def mark(self, path: Path) -> tuple[int, ...]:
        """What tells a changed file: size, time of change, inode. To read on in one cut short kills the process."""
        found = os.stat(path) if path.exists() else None
        return (found.st_size, found.st_mtime_ns, found.st_ino) if found else ()

    def hold_out(self, count: int) -> np.ndarray:
        """Cuts the last `count` tokens off the stream and returns them, int64. Raises UserError if none is left."""
        if count >= self.length:
            raise UserError(f"{self.paths[0].parent}: {self.length} tokens, more than the held-out {count} are needed")
        tail, self.length = self.read(self.length - count, count), self.length - count
        return tail

    def read(self, start: int, count: int) -> np.ndarray:
        """`count` tokens from position `start` on, int64 (count,), going on at 0 after the last one."""
        out, done = np.empty(count, dtype=np.int64), 0
        while done < count:
            position = (start + done) % self.length
            index = int(np.searchsorted(self.starts, position, side="right")) - 1
            if self.mark(self.paths[index]) != self.marks[index]:
                raise UserError(f"shard {self.paths[index]}: was changed or removed while in use")
            part = self.shards[index][position - self.starts[index] :][: min(count - done, self.length - position)]
            if part.max() >= self.vocab_size:
                raise UserError(f"shard {self.paths[index]}: token {part.max()}, expected ids below "
                                f"{self.vocab_size}; another tokenizer wrote it")
            out[done : done + len(part)] = part
            done += len(part)
        return out


def document_hashes(stream: TokenStream, bos_id: int, block: int = 1 << 22) -> Iterator[bytes]:
    """A hash of the tokens of every document, in order; what stands before the first BOS belongs to none."""
    rest = np.empty(0, dtype=np.int64)
    for at in range(0, len(stream), block):
        tokens = np.append(rest, stream.read(at, min(block, len(stream) - at)))
        head, *begun = np.split(tokens, np.flatnonzero(tokens == bos_id))
        rest = begun.pop() if begun else head
        yield from (hashlib.blake2b(document, digest_size=16).digest() for document in begun)
    if rest[0] == bos_id:
        yield hashlib.blake2b(rest, digest_size=16).digest()
# === end: data ===


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
# The settings that shape the network. With vocab_size, bos_id (it starts a document: state, convolution and attention
# do not see past it), layers and norms (both resolved, one word a layer) they rebuild it from an artifact.
MODEL_SETTINGS = tuple("""
    train_seq_len model_dim num_heads num_kv_heads attn_window mlp mlp_mult bio_events bio_threshold positions rope_base
    rope_dims qk_norm qk_gain_init residual_mix unet_skips parallel_residual smear_gate bigram_vocab_size bigram_dim
    tie_embeddings tied_embed_init_std logit_softcap gdn_neg_eigval
""".split())


def model_config(settings, vocab_size: int, bos_id: int) -> SimpleNamespace:
    """Checked shape of the model that `settings` ask for. Raises UserError where the numbers do not fit together.

    LAYER_PATTERN is one word a layer, repeated or cut to NUM_LAYERS: g GDN, k GDN with keys and values of the GDN
    before it, s sliding window, a full attention. Words with the same number share the mixer's weights (s1 ... s1), in
    capitals the whole layer's (A1 A2 A1 A2: depth recurrence). NORM likewise.
    """
    dim, heads, kv_heads, rope_dims = settings.model_dim, settings.num_heads, settings.num_kv_heads, settings.rope_dims
    words, norms = settings.layer_pattern.split(), settings.norm.split()
    pattern = f"LAYER_PATTERN={settings.layer_pattern!r}"
    for wrong, said in (
        (dim % (2 * heads), f"MODEL_DIM={dim}: must be a multiple of 2 x NUM_HEADS = {2 * heads}"),
        (heads % kv_heads, f"NUM_HEADS={heads}: must be a multiple of NUM_KV_HEADS = {kv_heads}"),
        (rope_dims % 2 or rope_dims > dim // heads,
         f"ROPE_DIMS={rope_dims}: must be even, at most MODEL_DIM / NUM_HEADS = {dim // heads}"),
        (not words, f"{pattern}: names no layer; ARCH_MODE names presets"),
        (not norms or set(norms) - set(NORMS), f"NORM={settings.norm!r}: must be one or more of {', '.join(NORMS)}"),
    ):
        if wrong:
            raise UserError(said)
    for at, word in enumerate(words):
        if word[0] not in "gksaGKSA" or not (word[1:].isdigit() or len(word) == 1 and word.islower()):
            raise UserError(f"{pattern}: {word!r} is not g, k, s or a, with an optional number; capitals need one")
        if word[0] in "kK" and not any(before[0] in "gG" for before in words[:at]):
            raise UserError(f"{pattern}: no g before {word!r} whose keys it could take")
    count = settings.num_layers or len(words)
    layers, norms = (" ".join((each * count)[:count]) for each in (words, norms))
    return SimpleNamespace(vocab_size=vocab_size, bos_id=bos_id, layers=layers, norms=norms,
                           **{name: getattr(settings, name) for name in MODEL_SETTINGS})


def rms_norm(x: Tensor, weight: Tensor | None = None) -> Tensor:
    """x over its root mean square (arXiv 1910.07467), times a weight per channel where there is one."""
    return F.rms_norm(x, (x.size(-1),), None if weight is None else weight.to(x.dtype))


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
    """One of NORMS, of x (..., dim): RMSNorm without or with a weight per channel, LayerNorm with weight and bias."""

    def __init__(self, kind: str, dim: int):
        super().__init__()
        self.weight = None if kind == "rms" else nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim)) if kind == "layer" else None

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return rms_norm(x, self.weight)
        return F.layer_norm(x, (x.size(-1),), self.weight.to(x.dtype), self.bias.to(x.dtype))


def gdn_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Gated DeltaNet (arXiv 2412.06464, section 3) for one token, by head: the state is float32 at least.

    S' = a S + b k (v - a S^T k)^T and o = S'^T q, with a = exp(g): q, k (B, H, K), L2-normed, q scaled by K**-0.5 too;
    v (B, H, V); g, beta (B, H), g in nats, <= 0; S (B, H, K, V). The old state is read once: with r_k = S^T k and
    r_q = S^T q, delta = b (v - a r_k) and o = a r_q + (q . k) delta. Returns o in v's dtype and S'.
    """
    dtype = torch.promote_types(v.dtype, torch.float32)
    q, k, beta, decay = q.to(dtype), k.to(dtype), beta.to(dtype), g.to(dtype).exp()
    read_k, read_q = (decay[..., None, None] * (torch.stack((k, q), -2) @ state)).unbind(-2)  # (B, H, V) each
    delta = beta[..., None] * (v - read_k)
    o = read_q + (q * k).sum(-1, keepdim=True) * delta
    return o.to(v.dtype), torch.addcmul(state * decay[..., None, None], k[..., None], delta[..., None, :])


def opaque(body: Callable, fake: Callable) -> Callable:
    """The custom op `underpar::<name of body>`, which torch.compile does not trace into; `fake` gives outputs' shapes.

    The first script imported into a process registers it for all: registered again it is freed, and old handles crash.
    """
    if not hasattr(torch.ops.underpar, body.__name__):
        torch.library.custom_op(f"underpar::{body.__name__}", body, mutates_args=()).register_fake(fake)
    return getattr(torch.ops.underpar, body.__name__).default


def add_product(total: Tensor, a: Tensor, b: Tensor, alpha: float = 1.0) -> None:
    """total += alpha * a @ b, in place (batched); the product has the operands' dtype, the sum has that of total."""
    if total.dtype == a.dtype:
        total.baddbmm_(a, b, alpha=alpha)
    else:
        total.add_(torch.bmm(a, b), alpha=alpha)


@lambda body: opaque(body, lambda a: torch.empty_like(a, memory_format=torch.contiguous_format))
def gdn_inverse(a: Tensor) -> Tensor:
    """(I + tril(a, -1))^-1 for a (M, C, C), C a power of two; reads only what lies below the diagonal.

    Diagonal blocks of 1, 2, 4 ... rows: [[X, 0], [Y, Z]]^-1 = [[X^-1, 0], [-Z^-1 Y X^-1, Z^-1]]. Neumann's product and
    Newton's iteration are shorter, but powers of A grow without bound when keys are correlated (1e6 to NaN).
    """
    (m, c, _), size = a.shape, 1
    inverse = a.new_ones(m * c, 1, 1)
    while size < c:
        pairs = a.reshape(m, c // (2 * size), 2 * size, c // (2 * size), 2 * size).diagonal(dim1=1, dim2=3)
        y = pairs[:, size:, :size].movedim(-1, 1).reshape(-1, size, size)
        x_inv, z_inv = inverse[0::2], inverse[1::2]
        inverse = a.new_zeros(y.shape[0], 2 * size, 2 * size)
        inverse[:, :size, :size], inverse[:, size:, size:] = x_inv, z_inv
        torch.neg(torch.bmm(torch.bmm(z_inv, y), x_inv), out=inverse[:, size:, :size])
        size *= 2
    return inverse


@lambda body: opaque(body, lambda w, u, k, decay, state, extra: (
    state.new_empty(w.shape[0] + state.shape[0], *state.shape[1:]), torch.empty_like(u)))
def gdn_scan(w: Tensor, u: Tensor, k: Tensor, decay: Tensor, state: Tensor,
             extra: Tensor | None) -> tuple[Tensor, Tensor]:
    """The sequential part: per chunk n, new_n = U_n - W_n S_n and S_{n+1} = decay_n S_n + K_n^T new_n.

    Given `extra`, its adjoint, from the last chunk to the first, which is the same with W and K in each other's place:
    new_n = U_n + W_n R_{n+1} and R_n = extra_n + decay_n R_{n+1} - K_n^T new_n, where R is dL/dS, U and extra what the
    outputs contribute to dL/dnew and dL/dS. w, k (N*M, C, K); u (N*M, C, V); decay (N*M,); state, S_0 or R_N,
    (M, K, V); extra (N*M, K, V), with M = B*H rows and N chunks, chunk-major. Returns all N + 1 states and new.
    """
    order, sign = (1, 1) if extra is None else (-1, -1)
    states, new = state.new_empty(w.shape[0] + state.shape[0], *state.shape[1:]), torch.empty_like(u)
    s, *after = states.split(len(state))[::order]
    s.copy_(state)
    parts = [x.split(len(state))[::order] for x in (w, u, k.mT, decay[:, None, None], new)]
    extras = [None] * len(after) if extra is None else extra.split(len(state))[::order]
    for w_n, u_n, k_n, decay_n, new_n, extra_n, s_next in zip(*parts, extras, after, strict=True):
        torch.baddbmm(u_n, w_n, s.to(w.dtype), alpha=-sign, out=new_n)
        torch.mul(s, decay_n, out=s_next) if extra_n is None else torch.addcmul(extra_n, s, decay_n, out=s_next)
        add_product(s_next, k_n, new_n, alpha=sign)
        s = s_next
    return states, new


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
        t = gdn_inverse(beta[..., None] * kk)
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
        add_product(d_q, d_qk, k)
        add_product(d_k, d_qk.mT, q)
        add_product(d_k, (d_kk + d_kk.mT).to(dtype), k)
        d_k.addcmul_(d_bk, (beta * grow)[..., None])
        d_g = d_total.flip(-1).cumsum(-1).flip(-1)
        return d_q.to(dtype), d_k.to(dtype), (d_bv * beta[..., None]).to(dtype), d_g, d_beta, r[:m].clone()


def gdn_chunk(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None = None,
              chunk: int = 32) -> tuple[Tensor, Tensor]:
    """`gdn_step` for T tokens, by chunks of them, in matrix products; q, k, v: float64, float32 or bfloat16.

    q, k (B, T, H, K); v (B, T, H, V); g, beta (B, T, H); state (B, H, K, V) or None for zeros. Returns o (B, T, H, V)
    and the last state. ValueError for a chunk that is no power of two >= 16; 32 is the fastest on CPU.
    """
    if chunk < 16 or chunk & (chunk - 1):
        raise ValueError(f"chunk is {chunk}; it must be a power of two >= 16")
    (b, t, h, dim_k), dim_v, dtype = q.shape, v.shape[-1], torch.promote_types(v.dtype, torch.float32)
    pad = -t % chunk  # a padded token has k = 0, beta = 0 and g = 0, and leaves the state as it is

    def split(x: Tensor) -> Tensor:  # (B, T, H, ...) -> (N*B*H, C, ...)
        x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, pad)) if pad else x
        return x.unflatten(1, (-1, chunk)).movedim((1, 3), (0, 2)).flatten(0, 2)

    state = v.new_zeros(b, h, dim_k, dim_v, dtype=dtype) if state is None else state.to(dtype)
    with torch.autocast(v.device.type, enabled=False):  # autocast would round the inverse and the state to bfloat16
        o, last = GatedDeltaChunks.apply(*map(split, (q, k, v, g.to(dtype), beta.to(dtype))), state.flatten(0, 1))
    o = o.view(-1, b, h, chunk, dim_v).movedim((0, 2), (1, 3)).flatten(1, 2)
    return o[:, :t], last.view(b, h, dim_k, dim_v)


def short_conv(x: Tensor, weight: Tensor, doc: Tensor, tail: Tensor, tail_doc: Tensor) -> Tensor:
    """Causal depthwise convolution and SiLU. x (B, T, C), weight (C, taps), doc (B, T); before x tail (B, taps-1, C).

    Shifted sums beat F.conv1d(groups=C) on the CPU, and let a tap that would reach into another document be zero.
    """
    T, weight = x.size(1), weight.to(x.dtype)
    past, past_doc = torch.cat([tail, x], dim=1), torch.cat([tail_doc, doc], dim=1)  # (B, taps - 1 + T, C), without C
    y = x * weight[:, -1]
    for at in reversed(range(weight.size(1) - 1)):
        same = (past_doc[:, at : at + T] == doc).unsqueeze(-1)
        y = y + past[:, at : at + T] * weight[:, at] * same
    return F.silu(y)


class GatedDeltaNet(nn.Module):
    """Gated DeltaNet mixer (arXiv 2412.06464) with expand_v = 1: linear attention whose state forgets and corrects.

    With an `owner` it projects and convolves queries and gates only; keys and values are made by the owner's weights.
    """

    def __init__(self, config: SimpleNamespace, owner: "GatedDeltaNet | None" = None):
        super().__init__()
        dim, heads = config.model_dim, config.num_heads
        self.heads, self.head_dim = heads, dim // heads
        self.owner = (owner,)  # in a tuple: its weights are counted and stored once, with the owner
        self.beta_scale = 2.0 if config.gdn_neg_eigval else 1.0
        self.w_qkvg = matrix((dim,) * (2 if owner else 4), dim, 0.5 * dim**-0.5)
        self.w_o = nn.Parameter(torch.zeros(dim, dim))
        self.ab = matrix((2 * heads,), dim, 0.5 * dim**-0.5)  # decay and step size, one number a head each
        # Initialised as PyTorch's depthwise Conv1d, then as fla's. 0.01 keeps A_log finite: -inf is a dead head.
        self.conv = nn.Parameter(torch.empty((1 if owner else 3) * dim, CONV_TAPS).uniform_(-1, 1) / CONV_TAPS**0.5)
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(0.01, 16.0).log())
        dt = torch.exp(torch.empty(heads).uniform_(math.log(1e-3), math.log(0.1))).clamp_min(1e-4)
        self.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))  # softplus(dt_bias) = dt
        self.norm = nn.Parameter(torch.ones(self.head_dim))

    def forward(self, x: Tensor, doc: Tensor, first: Tensor, cache: dict | None) -> Tensor:
        """x (B, T, dim); doc (B, T) counts documents; first (B, T) marks their first tokens; cache is updated."""
        (B, T, dim), H, D = x.shape, self.heads, self.head_dim
        w_qkvg, conv, (owner,), kept = self.w_qkvg, self.conv, self.owner, cache or {}
        if owner is not None:
            w_q, w_gate = w_qkvg.split(dim)
            w_qkvg, conv = torch.cat([w_q, owner.w_qkvg[dim : 3 * dim], w_gate]), torch.cat([conv, owner.conv[dim:]])
        qkv, gate = linear(x, w_qkvg).split([3 * dim, dim], dim=-1)
        tail = kept.get("tail", qkv.new_zeros(B, CONV_TAPS - 1, 3 * dim))
        tail_doc = kept.get("tail_doc", doc.new_full((B, CONV_TAPS - 1), -1))
        q, k, v = short_conv(qkv, conv, doc, tail, tail_doc).view(B, T, 3, H, D).unbind(2)  # (B, T, H, D)
        wide = self.ab.dtype  # float32: a key longer than 1 would let the state grow
        # eps inside the root: F.normalize has a gradient of 1e12 at zero
        q, k = ((t * torch.rsqrt(t.to(wide).square().sum(-1, keepdim=True) + 1e-6)).to(t.dtype) for t in (q, k))
        a, b = F.linear(x.to(wide), self.ab).split(H, dim=-1)  # (B, T, H), float32
        g = torch.where(first.unsqueeze(-1), DOCUMENT_DECAY, -self.A_log.exp() * F.softplus(a + self.dt_bias))
        beta = self.beta_scale * torch.sigmoid(b)
        q = q * D**-0.5
        if T == 1 and cache:
            o, state = gdn_step(*(t[:, 0] for t in (q, k, v, g, beta)), cache["state"])
            o = o.unsqueeze(1)
        else:
            o, state = gdn_chunk(q, k, v, g, beta, kept.get("state"), chunk=64 if x.is_cuda else 32)
        if cache is not None:
            tail, tail_doc = torch.cat([tail, qkv], dim=1), torch.cat([tail_doc, doc], dim=1)
            cache.update(state=state, tail=tail[:, 1 - CONV_TAPS :], tail_doc=tail_doc[:, 1 - CONV_TAPS :])
        o = rms_norm(o) * self.norm.to(o.dtype) * F.silu(gate.view(B, T, H, D))
        return linear(o.reshape(B, T, dim), self.w_o)


def rotate(x: Tensor, positions: Tensor, base: float, dims: int) -> Tensor:
    """Rotary positions (T,) (arXiv 2104.09864) in the first `dims` dimensions of x (B, T, H, D), as in GPT-NeoX."""
    half = dims // 2
    frequency = base ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = positions.float()[:, None] * frequency  # (T, dims/2)
    cos, sin = angle.cos()[:, None].to(x.dtype), angle.sin()[:, None].to(x.dtype)  # (T, 1, dims/2)
    left, right, rest = x.split([half, half, x.size(-1) - dims], dim=-1)
    return torch.cat([left * cos - right * sin, left * sin + right * cos, rest], dim=-1)


def attend(q: Tensor, k: Tensor, v: Tensor, doc: Tensor, key_doc: Tensor, window: int) -> Tensor:
    """Causal attention inside a document: query i sees key j if 0 <= i - j < window and both are of one document.

    q (B, H, T, D), k and v (B, Hkv, L, D), the queries being the last T of the L positions; doc (B, T), key_doc (B, L).
    Blocks of queries skip the keys that none of them sees: 3x faster on the CPU than one masked call at T = 4 windows.
    """
    T, past = q.size(2), k.size(2) - q.size(2)
    if q.is_cuda:  # the kernels that take a mask do not take grouped heads there
        k, v = (t.repeat_interleave(q.size(1) // k.size(1), dim=1) for t in (k, v))
    out, block, at = [], max(64, min(window, T) // 4), torch.arange(k.size(2), device=q.device)
    for start in range(0, T, block):
        end = min(start + block, T)
        low, high = max(0, past + start - window + 1), past + end
        gap = at[past + start : high, None] - at[low:high]  # (t, l)
        mask = (gap >= 0) & (gap < window) & (doc[:, start:end, None] == key_doc[:, None, low:high])  # (B, t, l)
        out.append(F.scaled_dot_product_attention(
            q[:, :, start:end], k[:, :, low:high], v[:, :, low:high], mask[:, None], enable_gqa=not q.is_cuda))
    return torch.cat(out, dim=2)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; `qk_norm`: queries and keys RMS-normed, a gain per head."""

    def __init__(self, config: SimpleNamespace, window: int):
        super().__init__()
        dim, self.heads, self.kv_heads = config.model_dim, config.num_heads, config.num_kv_heads
        self.head_dim, self.window, self.rope_base = dim // config.num_heads, window, config.rope_base
        self.rope_dims = (config.rope_dims or self.head_dim) if config.positions == "rope" else 0
        rows = self.kv_heads * self.head_dim
        self.w_qkv = matrix((dim, rows, rows), dim, 0.5 * dim**-0.5)
        self.w_o = nn.Parameter(torch.zeros(dim, dim))
        self.q_gain = nn.Parameter(torch.full((self.heads,), config.qk_gain_init)) if config.qk_norm else None

    def forward(self, x: Tensor, doc: Tensor, first: Tensor, cache: dict | None) -> Tensor:
        """x (B, T, dim); doc (B, T) counts documents; `first` is for GDN alone; cache is updated."""
        (B, T, dim), H, Hkv, D = x.shape, self.heads, self.kv_heads, self.head_dim
        q, k, v = linear(x, self.w_qkv).view(B, T, H + 2 * Hkv, D).split([H, Hkv, Hkv], dim=2)  # (B, T, H, D)
        if self.q_gain is not None:
            q, k = rms_norm(q) * self.q_gain.to(x.dtype)[:, None], rms_norm(k)
        seen, key_doc = cache["seen"] if cache else 0, doc
        if self.rope_dims:
            positions = torch.arange(seen, seen + T, device=x.device)
            q, k = (rotate(t, positions, self.rope_base, self.rope_dims) for t in (q, k))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, H, T, D)
        if cache is not None:
            if cache:
                k, v = torch.cat([cache["k"], k], dim=2), torch.cat([cache["v"], v], dim=2)
                key_doc = torch.cat([cache["doc"], doc], dim=1)
            keep = max(0, k.size(2) - self.window + 1)  # the next query sees itself and window - 1 keys before it
            cache.update(k=k[:, :, keep:], v=v[:, :, keep:], doc=key_doc[:, keep:], seen=seen + T)
        o = attend(q, k, v, doc, key_doc, self.window)
        return linear(o.transpose(1, 2).reshape(B, T, dim), self.w_o)


def oscillate(x: Tensor, wave: Tensor) -> Tensor:
    """sin(omega x + phi) tanh(x) + b per unit (WiggleGPT, Eden-Eldith/WiggleGPT). x (..., U), wave (3, U)."""
    omega, phi, level = wave.to(x.dtype)
    return torch.sin(omega * x + phi) * torch.tanh(x) + level


ACTIVATIONS = {
    "relu2": lambda h: F.relu(h).square(),  # arXiv 2109.08668
    "leaky_relu2": lambda h: F.leaky_relu(h, 0.5).square(),
    "gelu": F.gelu,
}


class MLP(nn.Module):
    """Two matrices with an activation between them; SwiGLU (arXiv 2002.05202) has a gate, the bio-MLP sparse events.

    Events are WiggleGPT's SparseEventLayer (model_bio_optimized.py, without biases). The seed's are soft: no spike is
    ever zero. Hard events spike with 1 where volt > threshold, else 0, with the soft ones' gradient (straight through).
    """

    def __init__(self, config: SimpleNamespace):
        super().__init__()
        dim, hidden = config.model_dim, int(config.mlp_mult * config.model_dim)
        self.kind, self.threshold = config.mlp, config.bio_threshold
        self.events = config.bio_events if self.kind == "bio" else "off"
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
        if self.kind == "swiglu":
            gate, h = h.chunk(2, dim=-1)
            return F.silu(gate) * h, None
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
    """Residual layer: mix with the embedding, a mixer, an MLP; `parallel_residual`: both read the same input."""

    def __init__(self, config: SimpleNamespace, norm: str):
        super().__init__()
        dim, self.parallel = config.model_dim, config.parallel_residual
        self.mixer_norm, self.mlp_norm, self.mlp = Norm(norm, dim), Norm(norm, dim), MLP(config)
        self.mix = self.mixer_scale = self.mlp_scale = None
        if config.residual_mix:
            self.mix = nn.Parameter(torch.stack([torch.ones(dim), torch.zeros(dim)]))
            self.mixer_scale, self.mlp_scale = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor, x0: Tensor, mixer: nn.Module, *context) -> Tensor:
        """x and x0 (the embedding) (B, T, dim); context: the mixer's further arguments."""
        if self.mix is not None:
            mix = self.mix.to(x.dtype)
            x = mix[0] * x + mix[1] * x0
        mixed = x + scaled(mixer(self.mixer_norm(x), *context), self.mixer_scale)
        return mixed + scaled(self.mlp(self.mlp_norm(x if self.parallel else mixed)), self.mlp_scale)


class GPT(nn.Module):
    """The language model: embedding, layers by pattern, head with a soft cap."""

    activation_checkpointing = False  # recompute each layer in the backward pass; training's choice, not the shape's

    def __init__(self, config: SimpleNamespace):
        super().__init__()
        self.config, dim, std = config, config.model_dim, config.tied_embed_init_std
        self.embed = matrix((config.vocab_size,), dim, std)
        self.head = None if config.tie_embeddings else nn.Parameter(torch.zeros(config.vocab_size, dim))
        words, norms = config.layers.split(), config.norms.split()
        if config.positions == "learned":
            self.positions_embed = matrix((config.train_seq_len,), dim, 0.1 if config.residual_mix else std)
        if config.smear_gate:
            self.smear = nn.Parameter(torch.zeros(dim))
        if config.bigram_vocab_size:
            self.bigram_embed = matrix((config.bigram_vocab_size,), config.bigram_dim, 0.1)
            self.w_bigram = nn.Parameter(torch.zeros(dim, config.bigram_dim))
        if config.unet_skips:
            self.skip = nn.Parameter(torch.ones(len(words) // 2, dim))
        # a numbered word names one set of weights, whatever layer it stands in; caches are per layer, never shared
        names = [word if word[1:] else f"{word}@{at}" for at, word in enumerate(words)]
        mixers, owner = {}, None
        for name in names:
            if name in mixers:
                pass
            elif name[0] in "gGkK":
                mixers[name] = GatedDeltaNet(config, owner if name[0] in "kK" else None)
            else:
                mixers[name] = Attention(config, config.attn_window if name[0] in "sS" else 1 << 30)
            owner = mixers[name] if name[0] in "gG" else owner
        blocks = [name if name[0].isupper() else at for at, name in enumerate(names)]
        self.mixers = nn.ModuleList(mixers.values())
        self.mixer_of_layer = [list(mixers).index(name) for name in names]
        self.block_of_layer = [list(dict.fromkeys(blocks)).index(name) for name in blocks]
        self.blocks = nn.ModuleList(Block(config, norms[blocks.index(name)]) for name in dict.fromkeys(blocks))
        self.final_norm = Norm(norms[-1], dim)

    def new_cache(self) -> list[dict]:
        """An empty cache, by which calls of `forward` continue each other: one dict a layer, the last for the whole."""
        return [{} for _ in range(len(self.mixer_of_layer) + 1)]

    def embedding(self, ids: Tensor) -> Tensor:
        """Rows of the embedding (B, T, dim), bfloat16 on CUDA; of length 1 per channel where x0 is mixed in later."""
        x = F.embedding(ids, self.embed)
        x = x.bfloat16() if ids.is_cuda else x  # weights stay float32 everywhere
        return rms_norm(x) if self.config.residual_mix else x

    def embed_tokens(self, ids: Tensor, first: Tensor, whole: dict) -> Tensor:
        """What the first layer reads (B, T, dim): token, position, and the token before. `whole`: see `forward`."""
        x, config, seen = self.embedding(ids), self.config, whole.get("seen", 0)
        end, longest = seen + ids.size(1), config.train_seq_len
        if config.positions == "learned":
            if end > longest:
                raise UserError(f"POSITIONS='learned': none for token {longest + 1} of a text; "
                                f"TRAIN_SEQ_LEN={longest} was the longest in training")
            x = x + self.positions_embed[seen:end].to(x.dtype)
        if config.smear_gate or config.bigram_vocab_size:
            last = whole.get("last", torch.full_like(ids[:, :1], config.bos_id))
            before = torch.cat([last, ids[:, :-1]], dim=1).masked_fill(first, config.bos_id)  # never another document's
            if config.smear_gate:  # some of the token before, as in modded-nanogpt, by a weight per channel
                x = x + self.smear.to(x.dtype) * self.embedding(before)
            if config.bigram_vocab_size:  # hash of Parameter Golf's BigramHashEmbedding
                pair = ((36313 * ids) ^ (27191 * before)) % config.bigram_vocab_size
                x = x + linear(F.embedding(pair, self.bigram_embed).to(x.dtype), self.w_bigram)
        whole.update(seen=end, last=ids[:, -1:])
        return x

    def forward(self, ids: Tensor, targets: Tensor | None = None, cache: list[dict] | None = None) -> Tensor:
        """ids (B, T) to nats of each token (B, T), 0 where its target is -1; without targets to logits (B, T, V)."""
        config, half = self.config, len(self.mixer_of_layer) // 2
        caches = [*[None] * len(self.mixer_of_layer), {}] if cache is None else cache
        first = ids == config.bos_id
        doc = first.int().cumsum(dim=1) + caches[-1].get("doc", 0)  # (B, T)
        x = x0 = self.embed_tokens(ids, first, caches[-1])
        caches[-1]["doc"] = doc[:, -1:]
        recompute, skips = self.activation_checkpointing and torch.is_grad_enabled(), []
        for layer, (block, mixer) in enumerate(zip(self.block_of_layer, self.mixer_of_layer, strict=True)):
            if layer >= half and skips:
                x = x + self.skip[len(skips) - 1].to(x.dtype) * skips.pop()
            run = self.blocks[block], x, x0, self.mixers[mixer], doc, first, caches[layer]
            x = checkpoint(*run, use_reentrant=False) if recompute else run[0](*run[1:])
            if config.unet_skips and layer < half:
                skips.append(x)
        logits = linear(self.final_norm(x), self.embed if self.head is None else self.head)
        logits = logits.float() if logits.dtype == torch.bfloat16 else logits
        if config.logit_softcap:
            logits = config.logit_softcap * torch.tanh(logits / config.logit_softcap)
        if targets is None:
            return logits
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="none")
        return losses.view_as(targets)


@torch.no_grad()
def mlp_activity(network: GPT, ids: Tensor) -> dict[str, float]:
    """Shares of MLP units on ids (B, T), over all layers: with an event (without events: not zero), and below 0.05."""
    shares: list[Tensor] = []

    def measure(mlp: MLP, inputs: tuple[Tensor]) -> None:
        hidden, fired = mlp.hidden(inputs[0])
        active = hidden != 0 if fired is None else fired
        shares.append(torch.stack([active.double().mean(), (hidden.abs() < 0.05).double().mean()]))

    hooks = [module.register_forward_pre_hook(measure) for module in network.modules() if isinstance(module, MLP)]
    network(ids)
    for hook in hooks:
        hook.remove()
    active, small = torch.stack(shares).mean(0).tolist()
    return {"mlp_active": active, "mlp_small": small}
# === end: model ===


# === shared: quantization ===
FLOAT32_CONTROLS = ("A_log", "dt_bias")  # they pass through exp and softplus into a decay that is taken T times
MIN_QUANTIZED_DIM = 16
QuantTable = dict[str, tuple[int, float]]  # tensor class -> (bits, clip_sigmas)


def tensor_class(name: str, tensor: Tensor) -> str:
    """How the artifact stores a tensor, by the last part of its dotted name: as "matrix", "embedding" or "control".

    "w_*" is a matrix; "*embed*", "head" and "ab" (GDN's decay and step size) are embeddings; all else is control, few
    weights that scale whole channels, and so is what has, seen as (shape[0], the rest), under 16 rows or columns.
    """
    rows, last = tensor.shape[0] if tensor.ndim > 1 else 0, name.rsplit(".", 1)[-1]
    if rows < MIN_QUANTIZED_DIM or tensor.numel() < MIN_QUANTIZED_DIM * rows:
        return "control"
    if last.startswith("w_"):
        return "matrix"
    return "embedding" if "embed" in last or last in ("head", "ab") else "control"


def control_dtype(name: str) -> torch.dtype:
    """Storage type of a control tensor: float32 for the names in FLOAT32_CONTROLS, float16 for all others."""
    return torch.float32 if name.rsplit(".", 1)[-1] in FLOAT32_CONTROLS else torch.float16


def quantize_rows(w: Tensor, bits: int, clip_sigmas: float) -> tuple[Tensor, Tensor]:
    """Quantize w (R, ...), seen as (R, C), symmetrically: codes int8 (R, C) and scales float16 (R,), one step a row.

    The weight is code * scale, codes are within qmax = 2**(bits-1) - 1. The clip, qmax * scale, is the row's largest
    magnitude if clip_sigmas is 0, else clip_sigmas times its root mean square (SDClip of the Parameter Golf records),
    also where that is more: a wide step makes the codes cheap. The standard deviation would lose a constant row. The
    scale is rounded to float16 before the codes are computed and has no floor: up to 2**-25 it becomes 0, as do they.
    Runs in every QAT step, so it checks nothing (export_tensor does); what is not finite stays not finite.
    """
    rows = w.reshape(w.shape[0], -1).float()  # (R, C)
    if clip_sigmas > 0:
        clip = torch.linalg.vector_norm(rows, dim=1) * (clip_sigmas / math.sqrt(rows.shape[1]))  # (R,)
    else:
        clip = rows.abs().amax(dim=1)
    qmax = 2 ** (bits - 1) - 1
    scales = (clip / qmax).to(torch.float16)
    step = scales.float().unsqueeze(1)
    codes = (rows / torch.where(step > 0, step, 1.0)).round_().clamp_(-qmax, qmax).to(torch.int8)
    return codes, scales


def dequantize_rows(codes: Tensor, scales: Tensor, shape: Iterable[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return code * scale in `shape`. An 8-bit code times an 11-bit significand is exact in float32, everywhere."""
    return (codes.float() * scales.float().unsqueeze(1)).reshape(tuple(shape)).to(dtype)


def fake_quant(w: Tensor, bits: int, clip_sigmas: float) -> Tensor:
    """Return w as the artifact would give it back, in w's shape and dtype: the exporter's own two functions."""
    return dequantize_rows(*quantize_rows(w, bits, clip_sigmas), w.shape, w.dtype)


@contextlib.contextmanager
def swapped(params: list[Tensor], values: Iterable[Tensor]) -> Iterator[None]:
    """`params` hold `values` inside, and their own values again, bit for bit, after, even after an exception."""
    params = [param.detach() for param in params]  # the same memory
    own = [param.clone() for param in params]
    for param, value in zip(params, values, strict=True):
        param.copy_(value)
    try:
        yield
    finally:
        for param, value in zip(params, own, strict=True):
            param.copy_(value)


class QuantizedWeights:
    """Quantization-aware training by swapping weights: no flag in the model, so compiled code is not traced again.

    Inside `with weights.quantized():` parameters of the table's classes hold fake_quant of themselves, for forward and
    backward (autograd refuses a weight changed in between); then the masters return. The gradient at q(w) lands on w
    as it is: exactly the straight-through estimator (Bengio et al., arXiv:1308.3432), w + (q(w) - w).detach().
    """

    def __init__(self, named_parameters: Iterable[tuple[str, Tensor]], table: QuantTable) -> None:
        classes = [(parameter, tensor_class(name, parameter)) for name, parameter in named_parameters]
        self.entries = [(parameter, *table[kind]) for parameter, kind in classes if kind in table]

    def quantized(self) -> contextlib.AbstractContextManager[None]:
        """The quantized values in the parameters' place, one made after the other; the masters return at the end."""
        values = (fake_quant(parameter.detach(), bits, clip_sigmas) for parameter, bits, clip_sigmas in self.entries)
        return swapped([parameter for parameter, _, _ in self.entries], values)


def count_parameters(network: nn.Module) -> dict[str, int]:
    """Parameters by the class the exporter puts them in, and all of them."""
    counts = {"matrix": 0, "embedding": 0, "control": 0}
    for name, param in network.named_parameters():
        counts[tensor_class(name, param)] += param.numel()
    return {**counts, "total": sum(counts.values())}
# === end: quantization ===


# === shared: artifact ===
# One file, little endian: magic, version u32, header length u32, zstd(JSON header), data area, SHA-256 of the rest.
# The header is what `header` is in write_artifact. Offsets count from the data area's start; a crc32 is of the unpacked
# array; codes are int8. The k-th tensor with coder "rans" uses the k-th frequency table of section "tables"; the lane
# states, which section "states" starts, run on from tensor to tensor. Section "scales": float16, of all rows in turn.
ARTIFACT_PREFIX = struct.Struct("<8sII")
ARTIFACT_MAGIC, ARTIFACT_VERSION = b"UNDERPAR", 2
MAX_HEADER_BYTES = 1 << 24
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
    """Scale counts, int64 (256,), with at least two symbols present, to frequencies uint16 (256,) that sum to 2**14.

    Every occurring symbol gets at least 1. What rounding leaves goes, one at a time, where it saves the most or costs
    the fewest bits: the derivative of sum(counts * log2(f)) at the middle of the step is counts / (f +- 1/2).
    """
    table = np.where(counts > 0, np.maximum(1, np.rint(counts * (RANS_TOTAL / counts.sum()))), 0)
    while (excess := int(table.sum()) - RANS_TOTAL) != 0:
        if excess < 0:
            table[np.argmax(counts / (table + 0.5))] += 1
        else:
            table[np.argmin(np.where(table > 1, counts / np.maximum(table - 0.5, 0.5), np.inf))] -= 1
    return table.astype(np.uint16)


def rans_lanes(symbols: int) -> int:
    """Number of interleaved coders: a power of two, 1 per 8,192 symbols (a flush of 3 bytes each), 8 to 1,024."""
    return min(1024, max(8, 1 << (symbols // 8192).bit_length() >> 1))


def rans_encode(states: np.ndarray, table: np.ndarray, symbols: np.ndarray) -> np.ndarray:
    """Code symbols uint8 (n,) by their table uint16 (256,); returns words uint16 (W,) in the order they are read.

    Symbol i belongs to lane i % lanes of `states`, uint32 (lanes,), which are moved in place: from all RANS_LOW over
    every tensor, the last one first, since range ANS (Duda, arXiv:1311.2540) is a stack, to where decoding starts.
    No table may give one symbol all of 2**14: f << 18 would overflow 32 bits.
    """
    lanes, chunks = len(states), [np.empty(0, np.uint16)]
    frequency = table.astype(np.uint32)[symbols]
    start = (np.cumsum(table, dtype=np.uint32) - table)[symbols]
    for begin in range((len(symbols) - 1) // lanes * lanes, -1, -lanes):
        here = slice(begin, min(begin + lanes, len(symbols)))
        x, f = states[: here.stop - begin], frequency[here]  # x is a view; the last symbols may need only a few lanes
        full = x >= f << (32 - RANS_BITS)
        chunks.append(x[full].astype(np.uint16))
        x >>= full.astype(np.uint32) << 4
        # x becomes (x // f << 14) + x % f + start, where x % f = x - x // f * f
        x += x // f * (RANS_TOTAL - f) + start[here]
    return np.concatenate(chunks[::-1])


def rans_decode(states: np.ndarray, table: np.ndarray, words: np.ndarray, count: int) -> np.ndarray:
    """The inverse, in integers only: the next `count` symbols, uint8 (count,). ArtifactError unless `words` fit."""
    table = table.astype(np.uint32)
    frequency = np.repeat(table, table)  # (2**14,), by slot
    offset = np.arange(RANS_TOTAL, dtype=np.uint32) - np.repeat(np.cumsum(table, dtype=np.uint32) - table, table)
    slots, position, lanes = np.empty(count, np.uint16), 0, len(states)
    for begin in range(0, count, lanes):
        x = states[: count - begin]  # a view; the last symbols of a tensor may need only the first lanes
        slot = x & (RANS_TOTAL - 1)
        slots[begin : begin + lanes] = slot
        x[:] = (x >> RANS_BITS) * frequency[slot] + offset[slot]
        low = np.flatnonzero(x < RANS_LOW)
        require(position + len(low) <= len(words), "more rANS words are asked for than stored")
        x[low] = x[low] << 16 | words[position : position + len(low)]
        position += len(low)
    require(position == len(words), f"{len(words) - position} rANS words are left over")
    return np.repeat(np.arange(256, dtype=np.uint8), table)[slots]


def pack_array(record: dict, array: np.ndarray) -> list:
    """[record, payload]: the array as it is or as a zstd frame, the shorter; sets the record's coder and crc32."""
    raw = array.reshape(-1, 1).view(np.uint8).T.tobytes()  # by byte planes, in which float16 and tables compress better
    frame = zstandard.ZstdCompressor(level=19 if array.size < 1 << 16 else 1).compress(raw)
    coder, payload = ("zstd", frame) if len(frame) < len(raw) else ("stored", raw)
    record.update(coder=coder, crc32=zlib.crc32(array))
    return [record, payload]


def unpack_array(record: dict, area: bytes, dtype: str, count: int, rans: tuple = ()) -> np.ndarray:
    """The (count,) array of a little-endian dtype, in native order, that `record` of the header places in `area`.

    rans: lane states, iterator of tables. ArtifactError if the CRC-32 is wrong; any error if the record is nonsense.
    """
    coder, width = record["coder"], np.dtype(dtype).itemsize
    require(coder in ("stored", "zstd", "rans"), f"coder {coder!r} is unknown")
    payload = area[record["offset"] : record["offset"] + record["length"]]
    if coder == "rans":
        payload = rans_decode(rans[0], next(rans[1]), np.frombuffer(payload, "<u2"), count)
    elif coder == "zstd":
        payload = zstandard.ZstdDecompressor().stream_reader(payload).read(count * width)  # not what it declares
    array = np.frombuffer(payload, np.uint8).reshape(width, -1).T.copy().view(dtype).reshape(count)
    require(zlib.crc32(array) == record["crc32"], f"CRC-32 of {record['name']!r} is wrong")
    return array.astype(dtype[1:], copy=False)


def export_tensor(name: str, tensor: Tensor, table: QuantTable) -> tuple[dict, np.ndarray, np.ndarray]:
    """Header record, codes uint8 (n,), row scales float16 (R,); of control tensors values, no scales. ValueError."""
    kind, w = tensor_class(name, tensor), tensor.detach()
    codes, values = quantize_rows(w, *table[kind]) if kind in table else (None, w.to(control_dtype(name)))
    if not (w.is_floating_point() and torch.isfinite(values).all()):
        raise ValueError(f"tensor {name}: is {w.dtype}, up to {w.abs().max():.3g}; must be floating, its values or "
                         f"row scales finite as {values.dtype}")
    record = {"name": name, "shape": list(w.shape), "class": kind, "quantizer": "rows" if kind in table else "none"}
    values = values.cpu().contiguous().numpy().astype(f"<f{values.element_size()}")
    if codes is None:
        return {**record, "bits": 8 * values.itemsize}, values, np.empty(0, "<f2")
    return {**record, "bits": table[kind][0]}, codes.cpu().numpy().reshape(-1).view(np.uint8), values


def write_artifact(path: str | Path, tensors: dict[str, Tensor], table: QuantTable, settings: dict,
                   tokenizer_sha256: str, meta: dict) -> dict:
    """Quantize the tensors by class and pack them into one file, the same bytes for the same input; its statistics.

    settings: what rebuilds the model; meta: anything else; both JSON. A class outside the table is stored as control.
    Statistics: bytes (class or part of the file -> bytes), entropy_bytes (order-0, of the tensors' codes, summed).
    """
    parts, coded, scales, entropy_bytes = [], [], [np.empty(0, "<f2")], 0.0
    for name, tensor in tensors.items():
        record, array, own_scales = export_tensor(name, tensor, table)
        parts.append(pack_array(record, array))
        if record["quantizer"] == "rows":
            counts = np.bincount(array, minlength=256)
            seen = counts[counts > 0]
            own_entropy = float((seen * np.log2(array.size / seen)).sum() / 8)
            if len(seen) > 1 and own_entropy + 2 * len(seen) < len(parts[-1][1]):  # about its words and its table
                record["coder"] = "rans"
                coded.append((parts[-1], array, rans_table(counts)))
            scales.append(own_scales)
            entropy_bytes += own_entropy
    states = np.full(rans_lanes(sum(symbols.size for _, symbols, _ in coded)), RANS_LOW, np.uint32)
    for part, symbols, frequencies in reversed(coded):
        part[1] = rans_encode(states, frequencies, symbols).astype("<u2").tobytes()
    by_symbol = np.array([frequencies for _, _, frequencies in coded], "<u2").reshape(-1, 256).T  # alike ones together
    sections = {"states": states.astype("<u4"), "tables": by_symbol.copy(), "scales": np.concatenate(scales)}
    parts += [pack_array({"name": name, "class": name}, array) for name, array in sections.items()]
    sizes = collections.Counter()  # class -> bytes
    for record, payload in parts:
        record.update(offset=sizes.total(), length=len(payload))
        sizes[record["class"]] += len(payload)
    header = {"settings": settings, "tokenizer_sha256": tokenizer_sha256, "meta": meta,
              "tensors": [record for record, _ in parts[:-3]],
              "sections": {record["name"]: record for record, _ in parts[-3:]}}
    text = zstandard.ZstdCompressor(level=19).compress(json.dumps(header, allow_nan=False).encode())
    prefix = ARTIFACT_PREFIX.pack(ARTIFACT_MAGIC, ARTIFACT_VERSION, len(text))
    data = b"".join([prefix, text, *(payload for _, payload in parts)])
    replace_file(path, data + hashlib.sha256(data).digest())
    return {"bytes": {**sizes, "header": len(data) + 32 - sizes.total()}, "entropy_bytes": entropy_bytes}


def read_artifact(path: str | Path, max_weights: int = 1 << 30) -> tuple[dict, dict[str, Tensor]]:
    """Return (header, name -> float32 tensor) of an artifact file, bit-exact on every machine.

    Memory is bounded by the file, at most max_weights float32 weights, and the decoding of one tensor at a time.
    ArtifactError, one line naming the file and the damaged part, if anything is not as it was written.
    """
    data = Path(path).read_bytes()
    whole = len(data) >= ARTIFACT_PREFIX.size + 32 and data[:8] == ARTIFACT_MAGIC
    require(whole, f"{path}: is no underpar artifact, or cut short: {len(data)} bytes that begin with {data[:8]!r}")
    _, version, length = ARTIFACT_PREFIX.unpack_from(data)
    require(version == ARTIFACT_VERSION, f"{path}: version {version}, this code reads {ARTIFACT_VERSION}")
    intact = hashlib.sha256(data[:-32]).digest() == data[-32:]
    start, what, tensors = ARTIFACT_PREFIX.size + length, "header", {}
    try:
        frame, area = data[ARTIFACT_PREFIX.size : start], data[start:-32]
        header = json.loads(zstandard.ZstdDecompressor().stream_reader(frame).read(MAX_HEADER_BYTES))
        require({"settings", "tokenizer_sha256", "meta"} <= header.keys(), "settings, tokenizer_sha256 or meta missing")
        records, sections = header["tensors"], header["sections"]
        # These two bound all that is allocated below; a size of 0 counts as 1, or the others would have no bound.
        require(all(size >= 0 for record in records for size in record["shape"]), "a tensor's shape is negative")
        weights = sum(math.prod(max(1, size) for size in record["shape"]) for record in records)
        require(weights <= max_weights, f"{weights} weights, the limit is {max_weights}")
        rows = [record["shape"][0] if record["quantizer"] == "rows" else 0 for record in records]
        coded = [math.prod(record["shape"]) for record in records if record["coder"] == "rans"]
        what = "sections"
        states = unpack_array(sections["states"], area, "<u4", rans_lanes(sum(coded)))
        tables = iter(unpack_array(sections["tables"], area, "<u2", 256 * len(coded)).reshape(256, -1).T)
        scales = torch.from_numpy(unpack_array(sections["scales"], area, "<f2", sum(rows))).split(rows)
        for record, own_scales in zip(records, scales, strict=True):
            what, shape = f"tensor {record['name']!r}", record["shape"]
            dtype = {16: "<f2", 32: "<f4"}.get(record["bits"], "|i1")
            values = torch.from_numpy(unpack_array(record, area, dtype, math.prod(shape), (states, tables)))
            if record["quantizer"] == "rows":
                values = dequantize_rows(values.view(len(own_scales), -1), own_scales, shape)
            tensors[record["name"]] = values.float().reshape(shape)
        what = "digest"
        require(intact, "every part unpacks as it was written")
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError, zstandard.ZstdError) as error:
        damage = "" if intact else f"SHA-256 is wrong, damaged or truncated, {len(data)} bytes, first seen in "
        text = str(error) if isinstance(error, ArtifactError) else f"{type(error).__name__}: {error}"
        raise ArtifactError(f"{path}: {damage}{what}: {text}") from None
    return header, tensors
# === end: artifact ===


# === shared: generation ===
def repeat_cache(cache: list[dict], count: int) -> list[dict]:
    """The cache of one sequence, cloned for `count` samples that go on from it."""
    return [{name: value.repeat_interleave(count, dim=0) if isinstance(value, Tensor) else value
             for name, value in layer.items()} for layer in cache]


def draw(logits: Tensor, temperature: float, top_k: int, generators: list[torch.Generator]) -> Tensor:
    """One token a row (B,) from logits (B, V); each row has its own generator, so it does not depend on its batch."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    if top_k:
        lowest = logits.topk(min(top_k, logits.size(-1)), dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < lowest, -math.inf)
    probabilities = (logits.float() / temperature).softmax(dim=-1).cpu()
    picks = [torch.multinomial(row, 1, generator=own) for row, own in zip(probabilities, generators, strict=True)]
    return torch.cat(picks).to(logits.device)


@torch.no_grad()
def generate(network: GPT, prompt: list[int], count: int, max_new_tokens: int, temperature: float, top_k: int,
             seed: int, stop: frozenset[int]) -> list[list[int]]:
    """`count` continuations of `prompt`: token ids up to and without the first of `stop`.

    The prompt is read once; its cache (attention keys and values, GDN state and convolution tail) is cloned for the
    samples. Sample i depends on (seed, i) alone. `prompt` must not be empty: a document begins with BOS.
    """
    device = network.embed.device
    cache = network.new_cache()
    logits = network(torch.tensor([prompt], device=device), cache=cache)[:, -1].expand(count, -1)
    cache = repeat_cache(cache, count)
    seeds = [int(np.random.SeedSequence((seed, row)).generate_state(1)[0]) for row in range(count)]
    generators = [torch.Generator().manual_seed(own) for own in seeds]
    rows: list[list[int]] = [[] for _ in range(count)]
    running = set(range(count))
    for step in range(max_new_tokens):
        ids = draw(logits, temperature, top_k, generators)
        for row, token in enumerate(ids.tolist()):
            if row in running and token in stop:
                running.discard(row)
            elif row in running:
                rows[row].append(token)
        if not running or step + 1 == max_new_tokens:
            break
        logits = network(ids[:, None], cache=cache)[:, -1]
    return rows
# === end: generation ===


# -------------------------------------------------------------------------------------------------------------- main
def sample(settings: Settings) -> None:
    """Load, generate, print. Raises UserError for a missing artifact or another tokenizer."""
    path = Path(settings.artifact)
    path = path / "model.upar" if path.is_dir() else path
    if not settings.artifact or not path.is_file():
        raise UserError(f"ARTIFACT={settings.artifact!r}: no such file; a run writes runs/<RUN_ID>/model.upar")
    runtime = start_runtime(settings.device)
    try:
        header, tensors = read_artifact(path)
    except ArtifactError as error:
        raise UserError(f"ARTIFACT={settings.artifact!r}: {error}") from None
    tokenizer = load_tokenizer(settings.tokenizer_path or path.with_name(header["meta"]["tokenizer"]))
    if tokenizer.sha256 != header["tokenizer_sha256"]:
        raise UserError(f"TOKENIZER_PATH={settings.tokenizer_path!r}: not the tokenizer that {path} was trained with")
    network = GPT(SimpleNamespace(**header["settings"]))
    network.load_state_dict(tensors)
    network.to(runtime.device)
    prompt = [tokenizer.bos_id, *tokenizer.encode(settings.prompt)]
    most = network.config.train_seq_len + 1 - len(prompt)
    if network.config.positions == "learned" and settings.max_new_tokens > most:
        raise UserError(f"MAX_NEW_TOKENS={settings.max_new_tokens}: must be at most {most} after this prompt, for the "
                        f"model has positions for {network.config.train_seq_len} tokens")
    for row in generate(network, prompt, settings.num_samples, settings.max_new_tokens, settings.temperature,
                        settings.top_k, settings.seed, frozenset([tokenizer.bos_id])):
        print(tokenizer.decode([*prompt, *row]))


def main() -> int:
    """Settings, then `sample`; the exit code."""
    sample(load_settings(Settings, dict(os.environ)))
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
