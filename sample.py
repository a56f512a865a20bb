"""Write text, chat, and score, with a model from a run, a checkpoint or an artifact.

    ARTIFACT=runs/<RUN_ID>/model.upar PROMPT="Once upon a time" python sample.py
    ARTIFACT=runs/<RUN_ID>/model.upar TEMPERATURE=0.7 NUM_SAMPLES=4 MAX_NEW_TOKENS=200 python sample.py
    ARTIFACT=runs/<RUN_ID> MODE=chat SYSTEM="Answer briefly." python sample.py  # /reset forgets; Ctrl-C ends an answer
    ARTIFACT=runs/<RUN_ID> MODE=score SCORE=choices SCORE_PATH=piqa.jsonl,copa.jsonl.zst python sample.py

Settings below are environment variables, in capitals. SCORE: docs/scoring.md. `# === shared:` fences: tools/sync.py.
"""

import base64
import codecs
import collections
import contextlib
import difflib
import functools
import hashlib
import importlib.util
import io
import itertools
import json
import math
import operator
import os
import random
import re
import resource
import statistics
import string
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from decimal import Decimal
from fractions import Fraction
from numbers import Real
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
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint


# ---------------------------------------------------------------------------------------------------------- settings
@dataclass(frozen=True)
class Settings:
    mode: Literal["generate", "chat", "score"] = "generate"  # go on from PROMPT; chat: by lines; score: measure SCORE
    artifact: str = ""  # the model: a run, a checkpoint or an artifact (model.upar)
    tokenizer_path: str = ""  # .model file, tiktoken name, .tiktoken file or "bytes"; empty: that of data or artifact
    prompt: str = ""  # text to go on from; empty: a document's beginning
    layout: Literal["text", "chat"] = "text"  # of a prompt; chat: a user's turn, as post-training has it
    system: str = ""  # first turn of a chat: what the model is to be; empty: none
    num_samples: int = 1  # how many continuations
    max_new_tokens: int = 100  # length of each, at most
    temperature: float = 0.8  # of the distribution; 0: always the likeliest token
    top_k: int = 50  # draw from this many likeliest tokens; 0: from all
    top_p: float = 1.0  # draw from the likeliest tokens that hold this share of probability; 1: from all
    seed: int = 1337  # of every random draw
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: CUDA where there is a device
    # score
    score: Literal["text", "choices", "lambada", "task", "preference", "win", "quality"] = "text"  # text: bits per byte
    score_path: str = ""  # files to score, with commas between them; of task, win and quality in TASK_PATH's place
    score_model: str = ""  # another model: win's opponent, the reference of preference, the reader of quality
    score_judge: str = ""  # a reward model that decides win; empty: TASK's checker
    score_delimiter: str = " "  # between a context and what may follow it, of choices and lambada
    score_file: str = ""  # file to write the scores to, as JSON; empty: none
    task: str = "sort"  # sort, reverse, add, countdown, zebra, gsm8k, or jsonl: lines with prompt and answer
    task_path: str = ""  # file of gsm8k or jsonl
    eval_prompts: int = 512  # held-out prompts that score the policy
    eval_samples: int = 8  # of each, for pass@1 and pass@EVAL_SAMPLES
    eval_stride: int = 0  # of the sliding-window score; 0: leave that score out
    micro_batch_tokens: int = 0  # per forward and rank; 0: fitted to memory. Never changes the global batch


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


# === shared: chat ===
# What data sets call the roles; what a tool says is read like a user's turn.
ROLES = {name: role for role, names in (
    ("<|system|>", "system"), ("<|user|>", "user human tool function observation"),
    ("<|assistant|>", "assistant gpt model bot function_call")) for name in names.split()}
LISTS = {"messages": "messages", "conversations": "ShareGPT"}  # field -> format
# format -> the field that tells it and begins the user's turn, one that may go on with it, those that may answer
FORMATS = {"Alpaca": ("instruction", "input", ("output",)), "question/answer": ("question", "", ("answer",)),
           "prompt/completion": ("prompt", "", ("completion", "response", "answer"))}


class RowError(Exception):
    """What is wrong with a row of data, in the same few words for all rows of the kind."""


def text_of(row: dict, *names: str) -> str:
    """The text that the first of these fields in a row holds. Raises RowError."""
    name = next((name for name in names if name in row), None)
    if name is None:
        raise RowError(f"missing field {' or '.join(map(repr, names))}")
    if not isinstance(row[name], str):
        raise RowError(f"field {name!r} is no text")
    if not row[name].isascii() and row[name].encode(errors="replace").decode() != row[name]:
        raise RowError("half a surrogate pair, which is no Unicode")
    return row[name]


def listed_turns(messages: object, field: str) -> list[tuple[str, str]]:
    """Turns, (role token, text), of a list of {"role", "content"} or {"from", "value"}. Raises RowError."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise RowError(f"field {field!r} is no list of messages")
    turns = []
    for message in messages:
        role = text_of(message, "role", "from")
        if role not in ROLES:
            raise RowError(f"unknown role {role!r:.30}")
        turns.append((ROLES[role], text_of(message, "content", "value")))
    return turns


def row_turns(row: dict) -> tuple[str, list[tuple[str, str]]]:
    """A row's format and its turns, (role token, text), of which one at least is the assistant's and not empty; plain
    text is a single turn without a role. Raises RowError.
    """
    listed = {field: name for field, name in LISTS.items() if field in row}
    if listed:
        field, name = listed.popitem()
        turns = listed_turns(row[field], field)
    elif name := next((name for name, (field, *_) in FORMATS.items() if field in row), ""):
        field, more, answers = FORMATS[name]
        parts = [text_of(row, key) for key in (field, more) if key == field or row.get(key)]
        turns = [("<|user|>", "\n\n".join(filter(None, parts))), ("<|assistant|>", text_of(row, *answers))]
    elif "text" in row:
        name, turns = "text", [("", text_of(row, "text"))]
    else:
        raise RowError(f"no known format, fields {', '.join(sorted(map(str, row)))!r:.80}")
    answers = [text for role, text in turns if role in ("<|assistant|>", "")]
    if not answers:
        raise RowError("no turn of the assistant")
    if not all(answer.strip() for answer in answers):
        raise RowError("empty answer")
    return name, turns


def row_pair(row: dict) -> tuple[str, tuple[list[tuple[str, str]], str, str]]:
    """A row's format and (turns before the answers, chosen, rejected): `prompt`, text or messages, and both answers,
    text or a message each; or two conversations that are one until their last turns. Raises RowError.
    """
    prompt, answers = row.get("prompt", []), []
    before = listed_turns(prompt, "prompt") if isinstance(prompt, list) else [("<|user|>", text_of(row, "prompt"))]
    sides = [listed_turns(row[name], name) if isinstance(row.get(name), list) else
             [("<|assistant|>", text_of(row, name))] for name in ("chosen", "rejected")]
    if len(sides[0]) != len(sides[1]) or sides[0][:-1] != sides[1][:-1]:
        raise RowError("chosen and rejected differ before their last turn")
    for side in sides:
        if not side or side[-1][0] != "<|assistant|>":
            raise RowError("chosen or rejected does not end with the assistant's turn")
        if not side[-1][1].strip():
            raise RowError("empty answer")
        answers.append(side[-1][1])
    shared = sides[0][:-1]  # of some data sets it holds the prompt again
    before = shared if shared[: len(before)] == before else [*before, *shared]
    if not before:
        raise RowError("missing field 'prompt'")
    if answers[0] == answers[1]:
        raise RowError("identical chosen and rejected")
    return "messages" if isinstance(prompt, list) else "prompt/chosen/rejected", (before, *answers)


def turn_ids(tokenizer: Tokenizer, turns: list[tuple[str, str]]) -> tuple[list[int], list[bool]]:
    """Ids of a conversation, and which of them are what an assistant says, the token that ends it included.

    BOS, then of each turn its role token, the text and <|end|>. Plain text is all to be learned but its BOS, and ends
    with the BOS of what would come next, as in pretraining. Needs role tokens (`with_roles`).
    """
    ids, said, roles = [tokenizer.bos_id], [False], tokenizer.roles
    for role, text in turns:
        own = [*([roles[role]] if role else []), *tokenizer.encode(text), roles["<|end|>"] if role else ids[0]]
        ids += own
        said += [role != "<|user|>" and role != "<|system|>"] * len(own)
        if role:
            said[-len(own)] = False  # the role token is given, not said
    return ids, said


def turns_of(tokenizer: Tokenizer, ids: list[int]) -> list[tuple[str, str]]:
    """The turns that `turn_ids` made ids of; the last one may lack its <|end|>."""
    names, turns, role, begin = {i: role for role, i in tokenizer.roles.items()}, [], None, 0
    for at, token in enumerate([*ids, tokenizer.bos_id]):
        if token == tokenizer.bos_id or token in names:
            if role or role == "" and at > begin:
                turns.append((role, completion(tokenizer, ids[:begin], ids[begin:at])))
            role, begin = None if names.get(token) == "<|end|>" else names.get(token, ""), at + 1
    return turns


def read_rows(path: str, parse: Callable[[dict], tuple[str, object]], log: Callable[[str], None]) -> list:
    """What `parse` makes of the rows of a file: JSON lines, or one JSON list, compressed if its name ends in .zst.

    parse: from a row to its format and an item; it raises RowError. Rows that are none are left out, counted and named
    in the log by kind. Raises UserError: no such file, or no usable row.
    """
    try:
        with open(path, "rb") as file:
            reader = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
            content = reader.read() if path.endswith(".zst") else file.read()
        content, whole = content.removeprefix(b"\xef\xbb\xbf"), None  # a mark that some editors put before UTF-8
        with contextlib.suppress(ValueError, RecursionError):  # or lines of which the first is a list, and no row
            whole = json.loads(content) if content.lstrip()[:1] == b"[" else None
    except (OSError, zstandard.ZstdError) as error:
        raise UserError(f"{path}: must be a file of JSON lines, or one JSON list, maybe .zst; {error!s:.200}") from None
    items, formats, faults = [], collections.Counter(), {}
    for number, line in enumerate(content.splitlines() if whole is None else whole, 1):
        try:
            if whole is None and not line.strip():
                continue
            row = json.loads(line.decode()) if whole is None else line
            if not isinstance(row, dict):
                raise RowError("no JSON object")
            kind, item = parse(row)
            formats[kind] += 1
            items.append(item)
        except (UnicodeDecodeError, ValueError, RecursionError, RowError) as error:
            kinds = {UnicodeDecodeError: "invalid UTF-8", RowError: str(error)}
            faults.setdefault(kinds.get(type(error), "no JSON"), []).append(number)
    left = "; ".join(f"{kind}: {len(rows)} (the first is row {rows[0]})" for kind, rows in faults.items())
    used = ", ".join(f"{count} {kind}" for kind, count in formats.items()) or "none"
    said = f"{path}: {sum(map(len, faults.values())) + len(items)} rows, used {used}; left out {left or 'none'}"
    if not items:
        raise UserError(f"{said}; must hold one usable row at least")
    log(f"data: {said}")
    return items


def weighted_files(name: str, text: str) -> dict[str, float]:
    """File -> weight, 1 where none is given, of a setting's `FILE,FILE:WEIGHT`. Raises UserError."""
    parts = [re.fullmatch(r"(.+?)(?::(\d+\.?\d*|\.\d+))?", part.strip()) for part in text.split(",") if text]
    files = {part[1]: float(part[2] or 1) for part in parts if part}
    if len(files) < len(parts) or not all(files.values()):
        raise UserError(f"{name}={text!r}: must be FILE or FILE:WEIGHT with commas between, each once, above 0")
    return files


def grow_roles(network: "GPT", tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer with role tokens; where it had none the embedding, and a head, grow by the mean of their rows."""
    grown = with_roles(tokenizer)
    for name in ("embed", "head") if grown is not tokenizer else ():
        weight = getattr(network, name, None)
        if weight is not None:
            rows = weight.detach().mean(0, keepdim=True).expand(len(ROLE_TOKENS), -1)
            grew = nn.Parameter(torch.cat([weight.detach(), rows]))
            grew.splits = (len(grew),)
            setattr(network, name, grew)
    network.config.vocab_size = grown.vocab_size
    return grown
# === end: chat ===


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


# === shared: lora ===
class Lora(nn.Module):
    """W + alpha / rank B A, for W (out, in): LoRA (arXiv 2106.09685) as a parametrization, which keeps W as `original`.

    A (rank, in) is normal with deviation in**-0.5, B (out, rank) is 0: a fresh adapter changes nothing, bit for bit.
    """

    def __init__(self, weight: Tensor, rank: int, alpha: float):
        super().__init__()
        self.lora_a = nn.Parameter((torch.randn(rank, weight.size(1)) * weight.size(1)**-0.5).to(weight))
        self.lora_b = nn.Parameter(weight.new_zeros(weight.size(0), rank))
        self.register_buffer("scale", weight.new_tensor(alpha / rank))

    def forward(self, weight: Tensor) -> Tensor:
        return torch.addmm(weight, self.scale * self.lora_b, self.lora_a)


def setup_lora_adapter(model: nn.Module, rank: int = 8, alpha: float = 16.0,
                       targets: str = r"^(mixers|blocks)\.") -> nn.Module:
    """Put an adapter on every w_* in whose dotted name the regular expression `targets` is found; returns the model.

    By default all of mixers and MLPs; "w_qkv|mlp" leaves out the mixers' outputs. Matrices in one parameter share A.
    Each forward makes the sums anew: generate under torch.no_grad() and parametrize.cached(). Raises UserError.
    """
    weights = {name: w for name, w in model.named_parameters() if name.rpartition(".")[2].startswith("w_")}
    if any(isinstance(module, Lora) for module in model.modules()):
        raise UserError(f"LORA_RANK={rank}: the model has an adapter already; train it, or merge_lora(model) first")
    try:
        found = {name: w for name, w in weights.items() if re.search(targets, name)}
    except re.error as error:
        raise UserError(f"LORA_TARGETS={targets!r}: must be a regular expression ({error})") from None
    if not found:
        kinds = ", ".join(dict.fromkeys(re.sub(r"\d+", "0", name) for name in weights))
        raise UserError(f"LORA_TARGETS={targets!r}: found in no name of a matrix; must be part of such as {kinds}")
    most, name = min((min(w.shape), name) for name, w in found.items())
    if not 1 <= rank <= most:
        raise UserError(f"LORA_RANK={rank}: must be from 1 to {most}, the smaller side of {name}")
    for name, weight in found.items():
        path, _, last = name.rpartition(".")
        parametrize.register_parametrization(model.get_submodule(path), last, Lora(weight, rank, alpha))
    return model


def freeze_model(model: nn.Module, trainable_layers: Iterable[str] = ("lora",)) -> nn.Module:
    """Let only parameters be trained whose dotted name contains one of these; the model. UserError where none does."""
    parts = (trainable_layers,) if isinstance(trainable_layers, str) else trainable_layers
    for name, param in model.named_parameters():
        param.requires_grad_(any(part in name for part in parts))
    if not count_trainable(model)["trainable"]:
        raise UserError(f"trainable_layers={parts!r}: part of no name; for 'lora', setup_lora_adapter comes first")
    return model


def unfreeze_model(model: nn.Module) -> nn.Module:
    """Let every parameter be trained; the model."""
    return model.requires_grad_(True)


def count_trainable(model: nn.Module) -> dict[str, int]:
    """Parameters that are trained, and all of them, those of adapters included."""
    params = list(model.parameters())
    return {"trainable": sum(p.numel() for p in params if p.requires_grad), "all": sum(p.numel() for p in params)}


@torch.no_grad()
def merge_lora(model: nn.Module) -> nn.Module:
    """Add the adapter to the weights and remove it; the model, plain again, as QAT and export need it."""
    for module in filter(parametrize.is_parametrized, list(model.modules())):
        parts = {name: (part.original, part()) for name, part in module.parametrizations.items()}
        module.__class__ = type(module).__base__  # torch's own removal would break copies, which share this class
        del module.parametrizations
        for name, (weight, merged) in parts.items():
            setattr(module, name, weight)
            weight.copy_(merged)
    return model


def reference_policy(model: nn.Module, frozen: bool) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """reference(): a context in which the model, compiled or not, is the reference policy; not under cached().

    That is, `frozen`, the model as it is now, by a copy of what is trained: a loaded adapter's KL begins at 0. Or its
    base, with the adapter off, which takes no memory, and is the same for a fresh adapter. Raises UserError.
    """
    params = [w for name, w in model.named_parameters() if (w.requires_grad if frozen else name.endswith(".lora_b"))]
    if not params:
        raise UserError("reference_policy: nothing is trained, or no adapter is there to turn off; set one up first")
    return functools.partial(swapped, params, [w.detach().clone() if frozen else w.new_zeros(()) for w in params])
# === end: lora ===


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


# === shared: weights ===
def load_model(name: str, path: str, tokenizer_path: str = "", counts: Callable | None = None) -> tuple:
    """Network (on the CPU), tokenizer and the file taken of `path`: an artifact, a checkpoint (its raw weights), or a
    run, of which it is the artifact or, while it has none, the newest whole checkpoint. UserError naming the setting
    `name`, or the file. Counts of n-grams come along only as `counts`, NGrams: what is trained on other text goes on
    from the network alone, for they would say most of what comes next.
    """
    where = Path(path)
    file = where / "model.upar" if (where / "model.upar").is_file() else where
    if path and file.is_dir():
        found, faults = first_whole(checkpoints(file) or [file], ("meta.json", "model.pt"))
        if found is None:
            raise UserError(f"{name}={path!r}: neither model.upar nor a whole checkpoint; {'; '.join(faults)}")
        file, meta = found, json.loads((found / "meta.json").read_bytes())
        whole = meta.get("identity") or meta["shape"]  # of a run, or of what quantize.py unpacked
        names = "vocab_size", "bos_id", "layers", "norms", "ngram_bytes", *MODEL_SETTINGS
        shape = {key: whole[key] for key in names if key in whole}
        tensors = torch.load(file / "model.pt", map_location="cpu", weights_only=True)
        beside = [one for kind in ("tokenizer.model", "*.tiktoken") for one in file.parent.glob(kind)]
        sha256 = load_tokenizer(beside[0]).sha256 if beside else None
    elif path and file.is_file():
        try:
            header, tensors, _ = read_artifact(file)
        except ArtifactError as error:
            raise UserError(f"{name}={path!r}: {error}") from None
        shape, sha256 = header["settings"], header["tokenizer_sha256"]
        beside = [file.parent / header["meta"]["tokenizer"]]
    else:
        raise UserError(f"{name}={path!r}: no such file; must be a run, a checkpoint or an artifact (model.upar)")
    tokenizer = load_tokenizer(tokenizer_path or (beside or ["bytes"])[0])
    if shape["vocab_size"] == tokenizer.vocab_size + len(ROLE_TOKENS):  # post-training has added them
        tokenizer = with_roles(tokenizer)
    if (sha256 or tokenizer.sha256) != tokenizer.sha256 or tokenizer.vocab_size != shape["vocab_size"]:
        raise UserError(f"TOKENIZER_PATH={tokenizer_path!r}: {tokenizer.file} with {tokenizer.vocab_size} tokens "
                        f"is not the one of {file}, which has {shape['vocab_size']}")
    if counts is None or not shape.get("ngram_order"):  # older files do not say
        shape.update(ngram_order=0, ngram_bytes=0)
        tensors = {key: value for key, value in tensors.items() if not key.startswith("ngrams.")}
    network, adapter = GPT(SimpleNamespace(**shape), counts), [key for key in tensors if key.endswith(".lora_a")]
    if adapter:
        names = [re.escape(key.replace("parametrizations.", "").removesuffix(".0.lora_a")) for key in adapter]
        setup_lora_adapter(network, len(tensors[adapter[0]]), targets="|".join(names))
    if "w_value" in tensors:
        add_value_head(network)
    network.load_state_dict(tensors)
    return network, tokenizer, str(file)


def add_value_head(network: "GPT") -> None:
    """Give the network `w_value` (dim,), zeros: a reward or a value is its product with what the head reads."""
    network.w_value = nn.Parameter(torch.zeros_like(network.embed[0]))
# === end: weights ===


# === shared: generation ===
@dataclass
class Sample:
    """What followed a prompt: ids, a stop token included, their log-probabilities where they were drawn, and whether
    a stop token ended it. Greedy tokens have a log-probability of 0.
    """

    ids: list[int]
    logps: list[float]
    finished: bool


def plain(module: nn.Module) -> SimpleNamespace:
    """What a module's methods read: its settings, and its tensors as they are now, adapters added."""
    names = [*module._parameters, *getattr(module, "parametrizations", ())]
    return SimpleNamespace(**{name: value for name, value in vars(module).items() if name[0] != "_"},
                           **{name: getattr(module, name) for name in names})


def put(room: Tensor, dim: int, slot: int | Tensor, value: Tensor) -> None:
    """Write `value` into room's place `slot` of dimension `dim`; for a graph a tensor (1,) says where."""
    if isinstance(slot, int):
        room.select(dim, slot).copy_(value)
    else:
        place = room.movedim(dim, 0)
        place.index_copy_(0, slot, value.expand(place.shape[1:])[None])


def gdn_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Gated DeltaNet (arXiv 2412.06464, section 3) for one token, by head: o (B, H, V) in v's dtype, and S'.

    S' = a S + b k (v - a S^T k)^T and o = S'^T q, with a = exp(g): q, k (B, H, K), L2-normed, q scaled by K**-0.5 too;
    v (B, H, V); g, beta (B, H), g <= 0; S (B, H, K, V), float32 at least and read once: o = a S^T q + (q . k) delta.
    """
    dtype = torch.promote_types(v.dtype, torch.float32)
    q, k, beta, decay = q.to(dtype), k.to(dtype), beta.to(dtype), g.to(dtype).exp()
    read_k, read_q = (decay[..., None, None] * (torch.stack((k, q), -2) @ state)).unbind(-2)  # (B, H, V) each
    delta = beta[..., None] * (v - read_k)
    o = read_q + (q * k).sum(-1, keepdim=True) * delta
    return o.to(v.dtype), torch.addcmul(state * decay[..., None, None], k[..., None], delta[..., None, :])


class Decoder:
    """`count` texts a prompt that go on token by token: GPT.features and GPT.logits of one token a row.

    A prompt is read once, with the others of its length, so that no padding enters a recurrent state. A small network's
    step is all overhead on a CPU: hence few operations, weights laid out beforehand, caches written in place. A new key
    takes the same slot in all rows; `bias` hides slots from rows. On CUDA a graph of the step is replayed.
    """

    def __init__(self, network: GPT, prompts: list[list[int]], count: int):
        """The rows stand prompt by prompt. What changes in the network later is not seen."""
        device, config, caches, lasts, order = network.embed.device, network.config, [], [], []
        for length in sorted({len(prompt) for prompt in prompts}):
            alike = [number for number, prompt in enumerate(prompts) if len(prompt) == length]
            ids = torch.tensor([prompts[number] for number in alike], device=device)
            caches.append({})
            lasts.append(network.features(ids, caches[-1])[:, -1])  # (n, dim)
            order += alike
        place = torch.tensor(order, device=device).argsort().repeat_interleave(count)  # row of each sample's prompt
        self.network, self.graph, self.room, self.steps, self.end = network, None, 0, 0, length
        self.wide = torch.promote_types(network.embed.dtype, torch.float32)  # of caches and logits
        self.narrow = torch.bfloat16 if ids.is_cuda else self.wide  # of the residual stream and of weights
        self.at = torch.zeros(1, dtype=torch.int64, device=device) if ids.is_cuda else 0  # steps: a graph counts them
        self.logits = network.logits(torch.cat(lasts))[place]  # (R, V), of what comes first
        reach = max(1, config.ngram_order - 1)  # of n-grams and pairs; what is not known is -1
        ends = [F.pad(cache["last"], (reach - cache["last"].size(1), 0), value=-1) for cache in caches]
        self.last = torch.cat(ends)[place]
        self.position = torch.tensor([len(prompts[number]) for number in order], device=device)[place]
        seen = [(cache["doc"] == cache["doc"][:, -1:])[:, -cache["end"] :] for cache in caches]  # by the next token
        seen = torch.cat([F.pad(part, (length + CONV_TAPS - part.size(1), 0)) for part in seen])[place]
        half, width = network.rope_dims // 2, config.model_dim // config.num_heads
        near = torch.arange(width, device=device)  # of a head's dimensions: two that turn together become neighbours
        near = torch.cat([near[: 2 * half].view(2, half).T.flatten(), near[2 * half :]])
        frequency = config.rope_base ** (-torch.arange(half, device=device, dtype=torch.float32) / half)
        self.frequency, self.bias, self.past, self.layers = F.pad(frequency, (0, width // 2 - half)), {}, {}, []
        self.root = torch.tensor((config.model_dim * torch.finfo(self.wide).eps) ** 0.5, dtype=self.wide)
        self.zero = torch.zeros((), dtype=self.wide, device=device)
        self.head = self.laid(network.embed if network.head is None else network.head, norm=network.final_norm)
        for at, (block, mixer) in enumerate(zip(network.block_of_layer, network.mixer_of_layer, strict=True)):
            block, mixer = network.blocks[block], network.mixers[mixer]
            layer = SimpleNamespace(
                block=block, own=plain(mixer), mlp=plain(block.mlp), window=getattr(mixer, "window", 0),
                w_o=self.laid(mixer.w_o, block.mixer_scale), w_down=self.laid(block.mlp.w_down, block.mlp_scale))
            layer.mlp.w_up = self.laid(block.mlp.w_up, norm=block.mlp_norm).mT
            slots = self.past[layer.window] = max(0, min(length, layer.window - 1))
            parts = {name: [cache[at][name] for cache in caches] for name in caches[0][at]}
            if layer.window:
                parts = {name: [F.pad(part, (0, 0, slots - part.size(2), 0)) for part in parts[name]] for name in parts}
            kept = {name: torch.cat(parts[name])[place] for name in parts}
            if layer.window:
                k, v = (kept[name].to(self.wide).flatten(0, 1) for name in ("k", "v"))
                layer.kept = {"k": k[..., near].mT, "v": v}  # (R * Hkv, D, slots), (R * Hkv, slots, D)
                hidden = ~seen[:, None, seen.size(1) - slots :].repeat_interleave(mixer.kv_heads, dim=0)
                self.bias[layer.window] = torch.zeros_like(hidden, dtype=self.wide).masked_fill_(hidden, -math.inf)
                q, k, v = (w.unflatten(0, (mixer.kv_heads, -1, width)) for w in mixer.w_qkv.split(
                    [mixer.heads * width, mixer.kv_heads * width, mixer.kv_heads * width]))
                layer.w_in = torch.cat([q[:, :, near], k[:, :, near], v], dim=1).flatten(0, 2)  # by key's head
                if mixer.q_gain is not None:
                    layer.gain = F.pad(mixer.q_gain.view(mixer.kv_heads, -1, 1), (0, 0, 0, 1), value=1.0)
            else:
                layer.kept = {**kept, "tail": kept["tail"] * seen[:, 1 - CONV_TAPS :, None]}
                layer.w_in, layer.conv = mixer.weights()
                layer.own.ab = self.laid(mixer.ab, norm=block.mixer_norm, dtype=self.wide).mT
            layer.w_in = self.laid(layer.w_in, norm=block.mixer_norm)
            self.layers.append(layer)

    def laid(self, weight: Tensor, scale: Tensor | None = None, norm: Norm | None = None,
             dtype: torch.dtype | None = None) -> Tensor:
        """weight (out, in), transposed in memory, times what its outputs, or the inputs that `normed` gives, lack."""
        weight = weight if scale is None else weight * scale[:, None]
        if norm is not None and norm.bias is None and not weight.is_cuda:
            weight = weight * (weight.size(1) ** 0.5 if norm.weight is None else norm.weight * weight.size(1) ** 0.5)
        return weight.to(dtype or self.narrow).mT.contiguous()

    def normed(self, x: Tensor, norm: Norm) -> Tensor:
        """norm(x), or on a CPU for RMSNorm, whose own operation takes twice the time, what `laid` makes up for."""
        if norm.bias is not None or x.is_cuda:
            return norm(x)
        return x / torch.hypot(torch.linalg.vector_norm(x, dim=1, keepdim=True), self.root)

    def keep(self, rows: Tensor) -> None:
        """Go on with rows (n,) alone."""
        self.graph, count = None, len(self.last)
        self.last, self.position = self.last[rows], self.position[rows]
        for tensors in (self.bias, *(layer.kept for layer in self.layers)):
            tensors.update({name: value.unflatten(0, (count, -1))[rows].flatten(0, 1)
                            for name, value in tensors.items()})

    def grow(self, steps: int) -> None:
        """Make room for `steps` more tokens, where a window does not end before."""
        self.graph, self.room, more = None, self.room + steps, {}
        angle = torch.arange(self.end + self.room, device=self.last.device)[:, None] * self.frequency
        self.turns = torch.complex(angle.cos().to(self.wide), angle.sin().to(self.wide))[:, None, None]
        for window, bias in self.bias.items():
            more[window] = min(window, self.past[window] + self.room) - bias.size(2)
            self.bias[window] = F.pad(bias, (0, more[window]), value=-math.inf)
        for layer in self.layers:
            if layer.window:
                layer.kept = {"k": F.pad(layer.kept["k"], (0, more[layer.window])),
                              "v": F.pad(layer.kept["v"], (0, 0, 0, more[layer.window]))}

    def __call__(self, ids: Tensor) -> Tensor:
        """Logits (R, V) of what comes after ids (R,)."""
        if self.steps == self.room:
            self.grow(64 if isinstance(self.at, int) else 512)
        self.steps += 1
        if not ids.is_cuda or self.network.ngrams is not None:  # how many continuations there are differs
            return self.step(ids)
        if self.graph is None:  # this step warms up; the next ones are recorded here, and replayed
            logits, self.ids, self.graph = self.step(ids), ids.clone(), torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.logits = self.step(self.ids)
            return logits
        self.ids.copy_(ids)
        self.graph.replay()
        return self.logits

    def step(self, ids: Tensor) -> Tensor:
        """The network: in a graph the same operations on the same memory at every call; else of used slots alone."""
        config, whole, skips, self.views = self.network.config, isinstance(self.at, Tensor), [], {}
        first = ids == config.bos_id
        for window, bias in self.bias.items():
            slot, used = (self.past[window] + self.at) % bias.size(2), bias.size(2)
            if whole or first.any():
                bias.view(len(ids), -1, used).masked_fill_(first[:, None, None], -math.inf)
            put(bias, 2, slot, self.zero)
            used = used if whole else min(used, self.past[window] + self.at + 1)
            self.views[window] = slot, used, bias[..., :used]
        turn = self.turns[self.position]  # (R, 1, 1, D / 2)
        known = torch.cat([self.last, ids[:, None]], dim=1)
        x = x0 = self.network.embedded(ids, self.last[:, -1], self.position)
        for at, layer in enumerate(self.layers):
            block, half = layer.block, len(self.layers) // 2
            if at >= half and skips:
                x = x + scaled(skips.pop(), self.network.skip[len(skips)])
            if block.mix is not None:
                x = scaled(x, block.mix[0]) + scaled(x0, block.mix[1])
            y = self.normed(x, block.mixer_norm)
            y = self.attend(layer, y, turn) if layer.window else self.recur(layer, y, first)
            x = torch.addmm(x, y.to(x.dtype), layer.w_o)
            x = torch.addmm(x, MLP.hidden(layer.mlp, self.normed(x, block.mlp_norm))[0], layer.w_down)
            if config.unet_skips and at < half:
                skips.append(x)
        self.last.copy_(known[:, 1:])
        self.position.add_(1)
        self.at += 1
        logits, cap = torch.mm(self.normed(x, self.network.final_norm), self.head).to(self.wide), config.logit_softcap
        logits = cap * torch.tanh(logits / cap) if cap else logits
        counts = self.network.ngrams
        return logits if counts is None else counts.mixed(logits, counts(known)[:, -1])

    def attend(self, layer: SimpleNamespace, x: Tensor, turn: Tensor) -> Tensor:
        """Attention up to what w_o reads (R, dim), of x (R, dim)."""
        width, (slot, used, bias), keys, values = layer.own.head_dim, self.views[layer.window], *layer.kept.values()
        qkv = torch.mm(x, layer.w_in).view(len(x), layer.own.kv_heads, -1, width)  # (R, Hkv, H / Hkv + 2, D)
        if layer.own.q_gain is not None:
            qkv[:, :, :-1] = F.rms_norm(qkv[:, :, :-1], (width,)) * layer.gain.to(x.dtype)
        qkv = qkv.to(self.wide)
        if self.network.rope_dims:
            torch.view_as_complex(qkv.view(*qkv.shape[:3], -1, 2))[:, :, :-1].mul_(turn)
        qkv = qkv.flatten(0, 1)
        put(keys, 2, slot, qkv[:, -2])
        put(values, 1, slot, qkv[:, -1])
        scores = torch.baddbmm(bias, qkv[:, :-2], keys[..., :used], alpha=width**-0.5)
        return torch.bmm(scores.softmax(-1), values[:, :used]).view(len(x), -1)

    def recur(self, layer: SimpleNamespace, x: Tensor, first: Tensor) -> Tensor:
        """GatedDeltaNet up to what w_o reads (R, dim), of x (R, dim)."""
        kept, dim = layer.kept, x.size(1)
        qkv, gate = torch.mm(x, layer.w_in).split([3 * dim, dim], dim=1)
        taps = torch.cat([kept["tail"] * ~first[:, None, None], qkv[:, None]], dim=1)  # (R, taps, 3 dim)
        kept["tail"].copy_(taps[:, 1:])
        inputs = GatedDeltaNet.inputs(layer.own, x, F.silu((taps * layer.conv.T.to(x.dtype)).sum(1)), first)
        o, state = gdn_step(*inputs, kept["state"])
        kept["state"].copy_(state)
        return GatedDeltaNet.gated(layer.own, o, gate)


def draw(logits: Tensor, temperature: float, top_k: int, top_p: float, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens (B,) and their log-probabilities from logits (B, V), by uniform (B,) in [0, 1) each: the inverse CDF."""
    if temperature == 0:
        return logits.argmax(-1), logits.new_zeros(len(logits))
    logits = logits if temperature == 1 else logits / temperature
    if top_k:
        logits = logits.masked_fill(logits < logits.topk(min(top_k, logits.size(-1))).values[:, -1:], -math.inf)
    if top_p < 1:  # the likeliest tokens that together hold at least top_p (arXiv 1904.09751)
        ordered, order = logits.softmax(-1).sort(descending=True)
        beyond = ordered.cumsum(-1) - ordered >= top_p
        logits = logits.masked_fill(torch.zeros_like(beyond).scatter(1, order, beyond), -math.inf)
    chances = logits.softmax(-1)
    total = chances.cumsum(-1, dtype=torch.float64)
    picks = torch.searchsorted(total, uniform[:, None] * total[:, -1:], right=True).clamp_(max=logits.size(-1) - 1)
    return picks[:, 0], chances.gather(1, picks)[:, 0].log()


@torch.inference_mode()  # a tenth faster on a CPU than no_grad
def generate(network: GPT, prompts: list[list[int]], count: int, max_new_tokens: int, temperature: float, top_k: int,
             top_p: float, seeds: list[tuple[int, ...]], stop: frozenset[int], rows: int = 4096,
             first: int = 0) -> list[Sample]:
    """`count` continuations of each prompt, prompt by prompt, at most `rows` at once; a prompt is at least one token.

    Sample i of prompt p depends on (seeds[p], first + i) alone, up to the last digits of the batch's matrix products.
    temperature 0: the likeliest token; top_k 0, top_p 1: all tokens.
    """
    rest = max_new_tokens, temperature, top_k, top_p
    if len(prompts) > 1 and len(prompts) * count > rows:
        share = max(1, rows // count)
        parts = [slice(begin, begin + share) for begin in range(0, len(prompts), share)]
        return [sample for part in parts
                for sample in generate(network, prompts[part], count, *rest, seeds[part], stop, rows, first)]
    if prompts and count > rows:
        parts = [(begin, min(rows, count - begin)) for begin in range(0, count, rows)]
        return [sample for begin, some in parts
                for sample in generate(network, prompts, some, *rest, seeds, stop, rows, first + begin)]
    if not prompts:
        return []
    decoder, device = Decoder(network, prompts, count), network.embed.device
    draws = [np.random.default_rng([*seed, first + sample]).random(max_new_tokens)
             for seed in seeds for sample in range(count)]
    uniforms = torch.from_numpy(np.stack(draws, axis=1)).to(device)
    live, ends = torch.arange(uniforms.size(1), device=device), torch.tensor(sorted(stop), device=device)
    tokens, logps = (torch.zeros(uniforms.shape, dtype=dtype, device=device) for dtype in (torch.int64, torch.float32))
    done, drawn, logits = torch.zeros_like(live, dtype=torch.bool), [], decoder.logits
    for step in range(max_new_tokens):
        drawn.append(draw(logits, temperature, top_k, top_p, uniforms[step]))
        picks = drawn[-1][0]
        done, last = done | (picks[:, None] == ends).any(1) if stop else done, step + 1 == max_new_tokens
        left = int((~done).sum()) if stop else len(live)
        if not left or last or left < 0.8 * len(live):  # finished rows leave
            for into, parts in zip((tokens, logps), zip(*drawn, strict=True), strict=True):
                into[step + 1 - len(drawn) : step + 1, live] = torch.stack(parts).to(into.dtype)
            if not left or last:
                break
            keep, drawn = (~done).nonzero()[:, 0], []
            live, picks, done, uniforms = live[keep], picks[keep], done[keep], uniforms[:, keep]
            decoder.keep(keep)
        logits = decoder(picks)
    found = []
    for ids, own in zip(tokens[: step + 1].T.tolist(), logps[: step + 1].T.tolist(), strict=True):
        length = next((at + 1 for at, token in enumerate(ids) if token in stop), len(ids))
        found.append(Sample(ids[:length], own[:length], ids[length - 1] in stop))
    return found
# === end: generation ===


# === shared: tasks ===
GENERATED = ("sort", "reverse", "add", "countdown", "zebra")
FROM_FILE = {"gsm8k": ("question", "answer"), "jsonl": ("prompt", "answer")}  # keys of a line


@dataclass(frozen=True)
class Problem:
    """A question, a right answer (a warm start's demonstration; of most tasks the only one), and a checker's data."""

    prompt: str
    answer: str
    data: dict


def is_held_out(prompt: str) -> bool:
    """Whether a prompt is kept from training: one in five, by a hash, whatever task, seed and index it came from."""
    return int.from_bytes(hashlib.blake2b(prompt.encode(), digest_size=8).digest(), "big") % 5 == 0


def expression_value(text: str) -> Fraction | None:
    """Exact value of whole numbers, + - * / and parentheses; None of any other text, and where it divides by 0. A sign
    before a number is none. At most 100 characters bound time and depth, whatever a model writes."""
    operators = {"+": (1, operator.add), "-": (1, operator.sub), "*": (2, operator.mul), "/": (2, operator.truediv)}
    tokens = ["", *re.findall(r"[0-9]+|\S", text)[::-1]]  # the next one stands last

    def value_from(least: int) -> Fraction:  # an operand, and what follows by operators that bind at least so strongly
        token = tokens.pop()
        value = value_from(1) if token == "(" else Fraction(token)  # ValueError where it is no number
        if token == "(" and tokens.pop() != ")":
            raise ValueError("a parenthesis stays open")
        while operators.get(tokens[-1], (0,))[0] >= least:
            strength, apply = operators[tokens.pop()]
            value = apply(value, value_from(strength + 1))
        return value

    with contextlib.suppress(ValueError, ZeroDivisionError):
        value = value_from(1) if len(text) <= 100 and text.isascii() else None
        return value if tokens == [""] else None


def zebra_problem(rng: random.Random) -> Problem:
    """Who lives in houses 1 to 3, with which pet (and drink): `Ann<dog, Bob~cat, Cid=2`, clues that leave one world.

    = same house, < left of, > right of, ~ beside. The answer, house by house: `Ann eel, Cid cat, Bob dog`.
    """
    relations = {"=": operator.eq, "<": operator.lt, ">": operator.gt, "~": lambda x, y: abs(x - y) == 1}
    names = "Ann Bob Cid cat dog eel ale gin tea".split()[:rng.choice((6, 9))] + ["1", "2", "3"]
    orders = itertools.product(itertools.permutations((1, 2, 3)), repeat=len(names) // 3 - 1)
    worlds = [dict(zip(names, itertools.chain(*order, (1, 2, 3)), strict=True)) for order in orders]  # name -> house
    world, clues = rng.choice(worlds), []
    while len(worlds) > 1:
        (a, b), relation = sorted(rng.sample(names, 2), key=names.index), rng.choice("=<>~")
        left = [other for other in worlds if relations[relation](other[a], other[b])]
        if world in left and len(left) < len(worlds):
            worlds = left
            clues.append(f"{a}{relation}{b}")
    answer = ", ".join(" ".join(name for name in names[:-3] if world[name] == house) for house in (1, 2, 3))
    return Problem(", ".join(sorted(clues)), answer, {})


def draw_problem(name: str, rng: random.Random) -> Problem | None:
    """A problem of a generated task, as `prompt` and `answer` below or in `zebra_problem`; None: draw again.

    sort, 5 to 9 digits: `52713`, `12357`. reverse, 5 to 9 letters: `abcde`, `edcba`. add, 3 digits: `123+456`, `579`.
    countdown, three numbers up to 20 and a target below 100: `3 7 20=41`, `(3*7)+20` or what else uses each one once.
    """
    if name == "zebra":
        return zebra_problem(rng)
    if name == "add":
        a, b = rng.randint(100, 999), rng.randint(100, 999)
        return Problem(f"{a}+{b}", str(a + b), {})
    if name in ("sort", "reverse"):
        letters = rng.choices(string.digits if name == "sort" else string.ascii_lowercase, k=rng.randint(5, 9))
        return Problem("".join(letters), "".join(sorted(letters) if name == "sort" else letters[::-1]), {})
    given = sorted(rng.randint(1, 20) for _ in range(3))  # or one problem could stand on both sides of the split
    (a, b, c), (p, q) = rng.sample(given, 3), rng.choices("+-*/", k=2)
    answer = rng.choice((f"({a}{p}{b}){q}{c}", f"{a}{p}({b}{q}{c})"))  # every tree of three leaves
    if (target := expression_value(answer)) in range(1, 100):
        return Problem(f"{given[0]} {given[1]} {given[2]}={target}", answer, {"numbers": given, "target": int(target)})


def final_number(text: str, lenient: bool) -> Decimal | None:
    """The number that a GSM8K answer ends with, None without one. Strict: after the first `#### `, as the data set's
    own grader reads it. Lenient: the last number of the text, `It costs $18.` -> 18."""
    number = r"(?:(?<![0-9])-)?\$?(?:[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?|\.[0-9]+)" if lenient else r"#### (-?[0-9.,]+)"
    found = re.findall(number, text) or [""]  # leniently, a minus after a digit is a subtraction
    digits = re.sub("[,$]", "", found[-1 if lenient else 0]).removesuffix(".")
    return Decimal(digits) if re.fullmatch(r"-?([0-9]+(\.[0-9]+)?|\.[0-9]+)", digits) else None


@dataclass(frozen=True)
class Task:
    """Problems of one kind, split by `is_held_out`; problem i depends on name, file, seed and i alone."""

    name: str
    seed: int
    rows: tuple[list[Problem], list[Problem]]  # of a file: to train on, held out

    def problem(self, index: int, held_out: bool) -> Problem:
        """Problem `index` of a split: a draw of its own, or a row of the file, which begins again at its end."""
        if self.name in FROM_FILE:
            return self.rows[held_out][index % len(self.rows[held_out])]
        rng, problem = random.Random(f"{self.name} {self.seed} {held_out} {index}"), None
        while problem is None or is_held_out(problem.prompt) != held_out:
            problem = draw_problem(self.name, rng)
        return problem

    def held_out(self, n: int) -> list[Problem]:
        """The first n held-out problems with different prompts; all there are, if they are fewer."""
        found: dict[str, Problem] = {}
        for index in range(len(self.rows[True]) or 50 * n):
            if len(found) < n:
                problem = self.problem(index, held_out=True)
                found.setdefault(problem.prompt, problem)
        return list(found.values())

    def reward(self, problem: Problem, text: str, lenient: bool = False) -> float:
        """1.0 for a right answer, else 0.0. `lenient`: gsm8k by the last number, for evaluation beside the strict."""
        if self.name == "gsm8k":
            return float(final_number(text, lenient) == final_number(problem.answer, lenient=False))
        if self.name == "countdown":
            used = sorted(map(int, re.findall("[0-9]+", text[:100])))
            return float(used == problem.data["numbers"] and expression_value(text) == problem.data["target"])
        return float(text.strip() == problem.answer)


def make_task(name: str, path: str, seed: int) -> Task:
    """The task of this name; gsm8k and jsonl read the JSON lines of `path`, where of equal prompts the first counts.

    Raises UserError: an unknown name, a file missing or not wanted, a row that is no problem, a split without any.
    """
    keys, problems, rows = FROM_FILE.get(name, ()), {}, ([], [])
    if name not in (*GENERATED, *FROM_FILE):
        raise UserError(f"TASK={name!r}: must be one of {', '.join((*GENERATED, *FROM_FILE))}")
    if bool(path) != bool(keys) or path and not Path(path).is_file():
        raise UserError(f"TASK_PATH={path!r}: must be {'a file of JSON lines' if keys else 'empty'} for TASK={name}")
    for number, line in enumerate(Path(path).read_bytes().splitlines() if path else (), 1):
        try:
            prompt, answer = (json.loads(line)[key].strip() for key in keys)
            (prompt + answer).encode()  # JSON can hold half a surrogate pair, UTF-8 cannot
            if not (prompt and answer) or name == "gsm8k" and final_number(answer, lenient=False) is None:
                raise ValueError("blank, or without a number")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise UserError(f"{path}:{number}: must be JSON with texts {keys[0]!r} and {keys[1]!r}, not blank (gsm8k's "
                            "with #### and a number)") from None
        problems.setdefault(prompt, Problem(prompt, answer, {}))
    for problem in random.Random(seed).sample([*problems.values()], len(problems)):
        rows[is_held_out(problem.prompt)].append(problem)
    if path and not all(rows):
        raise UserError(f"{path}: {len(rows[1])} of {len(problems)} problems held out by a hash; must be some, not all")
    return Task(name, seed, rows)


def load_reward(spec: str, task: Task, seconds: float) -> Callable[[list[Problem], list[str]], list[float]]:
    """The function from problems, and a text that answers each, to rewards that REWARD=`spec` names.

    Empty: the task's checker. random, for control runs: a fair coin by a hash of seed, prompt, text and how often the
    call had both before, so that neither batch nor rank nor resume changes it. path.py:function: a user's, called as
    function(prompts, completions, answers) in a daemon thread; one that hangs does not keep the process. UserError: a
    file or function that is none; later, with a sample, if the user's raises, takes over `seconds` (0: no limit) or
    returns anything but a list of numbers below 1e15, one a text.
    """
    def coins(problems: list[Problem], texts: list[str]) -> list[float]:
        pairs = [(problem.prompt, text) for problem, text in zip(problems, texts, strict=True)]
        return [float(random.Random(f"{task.seed} {pair} {pairs[:i].count(pair)}").getrandbits(1))
                for i, pair in enumerate(pairs)]

    def called(problems: list[Problem], texts: list[str]) -> list[float]:
        outcome = []

        def call() -> None:
            try:
                outcome.extend((function([p.prompt for p in problems], texts[:], [p.answer for p in problems]), ""))
            except BaseException as error:  # SystemExit too
                frame = error.__traceback__.tb_next  # None: the call itself failed
                outcome.extend((error, f" in line {frame.tb_lineno}" if frame else ""))

        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        thread.join(seconds or None)
        scores, line = outcome or (TimeoutError(f"over {seconds} seconds"), "")
        listed = isinstance(scores, list | tuple) and len(scores) == len(texts)
        for i, score in enumerate(scores if listed else [scores]):
            if not (listed and isinstance(score, Real) and abs(score) < 1e15):
                raise UserError(f"REWARD={spec!r}: must return a list of {len(texts)} numbers, not {score!r:.99}{line}"
                                f" for prompt {problems[i].prompt!r:.80}, completion {texts[i]!r:.80}")
        return [float(score) for score in scores]

    if spec in ("", "random"):
        return coins if spec else lambda problems, texts: [*map(task.reward, problems, texts)]
    path, _, name = spec.rpartition(":")
    if not (path.endswith(".py") and Path(path).is_file()):
        raise UserError(f"REWARD={spec!r}: must be empty, random, or path.py:function with a file that exists")
    source = importlib.util.spec_from_file_location(f"reward_{Path(path).stem}", path)
    module = sys.modules[source.name] = importlib.util.module_from_spec(source)  # there dataclasses look for it
    try:
        source.loader.exec_module(module)
        function = getattr(module, name).__call__  # or AttributeError
    except (Exception, SystemExit) as error:
        raise UserError(f"REWARD={spec!r}: must be a function that can be imported; {error!r:.200}") from error
    return called
# === end: tasks ===


# ------------------------------------------------------------------------------------------------------------ models
EVAL_STEP = 1 << 31  # in the seeds of scored samples, as in train_grpo.py: a task's scores are those of its result.json
# What MODE or SCORE reads beside what all of them do, and needs; other settings must be left at their defaults.
DRAWN, ASKED = "max_new_tokens temperature top_k top_p", "score_path task task_path eval_prompts"
USES = {
    "generate": f"prompt layout system num_samples {DRAWN}", "chat": f"system {DRAWN}",
    "text": "score_path eval_stride", "preference": "score_path score_model",
    "choices": "score_path layout score_delimiter", "lambada": "score_path layout score_delimiter",
    "task": f"eval_samples {ASKED} {DRAWN}", "win": f"score_model score_judge {ASKED} {DRAWN}",
    "quality": f"score_model layout num_samples {ASKED} {DRAWN}"}
NEEDS = {"win": "score_model", **dict.fromkeys(("text", "choices", "lambada", "preference"), "score_path")}
ALWAYS, SCORING = "mode artifact tokenizer_path seed device", "score score_file micro_batch_tokens"


def check_settings(settings: Settings) -> None:
    """Raises UserError for a setting that MODE and SCORE do not read, or one that they need and that is empty."""
    s, scores = settings, settings.mode == "score"
    kind, what = (s.score, f"SCORE={s.score}") if scores else (s.mode, f"MODE={s.mode}")
    used = f"{ALWAYS} {SCORING if scores else ''} {USES[kind]}".split()
    if "layout" in used:
        what += f" with LAYOUT={s.layout}"
        used = [name for name in used if name != {"text": "system", "chat": "score_delimiter"}[s.layout]]
    for field in fields(s):
        if field.name not in used and getattr(s, field.name) != field.default:
            raise UserError(f"{field.name.upper()}={getattr(s, field.name)!r}: {what} does not read it; must be left "
                            f"at {field.default!r}")
    if kind in NEEDS and not getattr(s, NEEDS[kind]):
        raise UserError(f"{NEEDS[kind].upper()}='': must be given for {what}")
    if s.score_path and (s.task_path or s.task not in FROM_FILE and (
            s.task != Settings.task or kind in ("task", "win") and not s.score_judge)):
        raise UserError(f"SCORE_PATH={s.score_path!r}: with it TASK_PATH must be empty, and TASK gsm8k or jsonl, whose "
                        "rows a checker knows; or TASK unset, for SCORE=win with SCORE_JUDGE")


def open_model(name: str, settings: Settings, runtime: Runtime) -> SimpleNamespace:
    """The model that setting `name` says: its network, tokenizer, file, and how many tokens a batch of it may have."""
    own = settings.tokenizer_path if name == "artifact" else ""
    network, tokenizer, source = load_model(name.upper(), getattr(settings, name), own, NGrams)
    network = merge_lora(network).to(runtime.device).requires_grad_(False)
    tokens = settings.micro_batch_tokens or (1 << 16 if runtime.device.type == "cuda" else 4096)
    return SimpleNamespace(network=network, tokenizer=tokenizer, source=source, tokens=tokens, device=runtime.device,
                           context=network.config.train_seq_len)


def asked(tokenizer: Tokenizer, turns: list[tuple[str, str]], layout: str) -> tuple[list[int], int]:
    """Ids of a prompt, (role token, text)s, and the token that ends the answer: in layout chat turns, after which the
    assistant's begins (of a tokenizer without role tokens lines, as in `chat_ids`); in layout text their bare text.
    """
    roles, text = tokenizer.roles, "\n".join(text for _, text in turns)
    if layout == "text":
        return [tokenizer.bos_id, *tokenizer.encode(text)], tokenizer.bos_id
    if not roles:
        return chat_ids(tokenizer, text)
    return [*turn_ids(tokenizer, turns)[0], roles["<|assistant|>"]], roles["<|end|>"]


def answered(tokenizer: Tokenizer, turns: list[tuple[str, str]], answers: list[str],
             layout: str) -> list[tuple[list[int], list[int]]]:
    """Ids of a prompt and of each answer to it; in layout chat with the token that ends an answer.

    In layout text context and answer are encoded together, and a token may stand on both sides of where the answer
    begins: what follows the tokens that all of them and the context begin with is scored.
    """
    if layout == "chat":
        prompt, end = asked(tokenizer, turns, layout)
        return [(prompt, [*tokenizer.encode(answer), end]) for answer in answers]
    context = "\n".join(text for _, text in turns)
    wholes = [tokenizer.encode(context + answer) for answer in answers]
    shared = len(os.path.commonprefix([tokenizer.encode(context), *wholes]))
    return [([tokenizer.bos_id, *whole[:shared]], whole[shared:]) for whole in wholes]


# ----------------------------------------------------------------------------------------------------- probabilities
def padded(model: SimpleNamespace, rows: list[list[int]]) -> Iterator[tuple[list[int], Tensor]]:
    """Batches of rows of ids: their numbers, and them (B, T), longest first, at most model.tokens tokens or one row.
    What fills a row up stands behind it, so that nothing of it enters a state."""
    order, begin = sorted(range(len(rows)), key=lambda at: -len(rows[at])), 0
    while begin < len(order):
        width = len(rows[order[begin]])
        here = order[begin : begin + max(1, model.tokens // width)]
        begin += len(here)
        yield here, torch.tensor([rows[at] + [0] * (width - len(rows[at])) for at in here], device=model.device)


@torch.inference_mode()
def token_scores(model: SimpleNamespace, rows: list[tuple[list[int], list[int]]]) -> list[tuple[Tensor, Tensor]]:
    """Of each row, ids of a context (one at least) and the n that follow: their log-probabilities (n,), float64, and
    whether each was the likeliest token (n,).
    """
    found = {}
    for here, ids in padded(model, [[*context, *follows[:-1]] for context, follows in rows]):
        features, sizes = model.network.features(ids), [len(rows[at][1]) for at in here]
        picked = torch.cat([row[len(rows[at][0]) - 1 :][: len(rows[at][1])]
                            for row, at in zip(features, here, strict=True)])
        wanted = torch.tensor([token for at in here for token in rows[at][1]], device=model.device)
        logps, hits = [], []
        for part, tokens in zip(picked.split(1024), wanted.split(1024), strict=True):  # or logits would take all memory
            logits = model.network.logits(part)
            logps.append(logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0].double().cpu())
            hits.append((logits.argmax(-1) == tokens).cpu())
        found |= zip(here, zip(torch.cat(logps).split(sizes), torch.cat(hits).split(sizes), strict=True), strict=True)
    return [found[at] for at in range(len(rows))]


def item_scores(model: SimpleNamespace, items: list[list[tuple[list[int], list[int]]]]) -> tuple[list, dict[str, int]]:
    """`token_scores` of the rows of each item, and how many contexts were cut and items left out: a context that leaves
    no room gives way behind its BOS; an item with an answer that is empty or longer than the model's context is None.
    Raises UserError if all are."""
    rows, fits, cut = [], [], 0
    for item in items:
        fits.append(all(0 < len(follows) <= model.context for _, follows in item))
        for context, follows in item if fits[-1] else ():
            over = max(0, len(context) + len(follows) - 1 - model.context)
            rows.append(([context[0], *context[1 + over :]], follows))
            cut += over > 0
    if not any(fits):
        raise UserError(f"{len(items)} rows with answers that are empty or longer than the context of {model.source}, "
                        f"{model.context} tokens; must be one that fits")
    scores = iter(token_scores(model, rows))
    return ([[*itertools.islice(scores, len(item))] if fit else None for item, fit in zip(items, fits, strict=True)],
            {"contexts_cut": cut, "left_out": fits.count(False)})


@torch.inference_mode()
def rewards(model: SimpleNamespace, talks: list[list[tuple[str, str]]]) -> list[float]:
    """What a reward model gives conversations, by their last token; of one longer than its context the end."""
    rows, found = [turn_ids(model.tokenizer, turns)[0] for turns in talks], {}
    rows = [[ids[0], *ids[1 + max(0, len(ids) - model.context) :]] for ids in rows]
    for here, ids in padded(model, rows):
        last = model.network.features(ids)[range(len(here)), [len(rows[at]) - 1 for at in here]]
        found |= zip(here, (last.float() @ model.network.w_value.float()).tolist(), strict=True)
    return [found[at] for at in range(len(rows))]


def interval(values: list[float], share: bool = True) -> list[float | None]:
    """Mean of values of independent rows and the ends of its 95% interval, None of one value: Wilson's (JASA 22, 1927)
    of a share whose values are all 0 or 1, else the normal approximation, for a share no further than 0 and 1."""
    n, mean, z = len(values), statistics.fmean(values), 1.959964
    if share and set(values) <= {0, 1}:
        centre, half = mean + z * z / (2 * n), z * math.sqrt(mean * (1 - mean) / n + z * z / (4 * n * n))
        return [mean, *(end / (1 + z * z / n) for end in (centre - half, centre + half))]
    half = z * statistics.stdev(values) / math.sqrt(n) if n > 1 else math.nan
    ends = (max(0.0, mean - half), min(1.0, mean + half)) if share else (mean - half, mean + half)
    return [mean, *(ends if n > 1 else (None, None))]


# -------------------------------------------------------------------------------------------------------------- rows
def row_text(row: dict) -> tuple[str, str]:
    """A document. Raises RowError, as do the next ones; `read_rows` counts what they raise."""
    text = text_of(row, "text")
    if not text.strip():
        raise RowError("empty text")
    return "text", text


def row_options(row: dict) -> tuple[str, tuple[list[tuple[str, str]], int]]:
    """Kind, and (context, continuation) of each option, and which is right. Choices: `query` or `ctx`, `choices` or
    `endings`, `gold` or `label`; contexts, for one continuation: `context_options`, `continuation`, `gold`; sentences:
    `sentence_good`, `sentence_bad`.
    """
    gold, lists = row.get("gold", row.get("label")), {"context_options": "contexts", "choices": "choices",
                                                      "endings": "choices"}
    name = next((name for name in lists if name in row), "choices")
    if kind := "sentences" * ("sentence_good" in row):
        gold, options = 0, [("", text_of(row, name)) for name in ("sentence_good", "sentence_bad")]
    elif not isinstance(row.get(name), list) or len(row[name]) < 2:
        raise RowError(f"field {name!r} is no list of two texts or more")
    else:
        kind, texts = lists[name], [text_of({name: text}, name) for text in row[name]]
        options = ([(text, text_of(row, "continuation")) for text in texts] if kind == "contexts" else
                   [(text_of(row, "query", "ctx"), text) for text in texts])
    if not all(text.strip() for _, text in options):
        raise RowError("empty answer")
    if isinstance(gold, bool) or not str(gold).isdecimal() or int(gold) >= len(options):
        raise RowError("gold is not the number of a choice")
    return kind, (options, int(gold))


def row_last(row: dict) -> tuple[str, tuple[str, str]]:
    """A context and what follows it: `context` and `continuation` or `answer`, or a `text` and its last word."""
    if "context" in row:
        kind, context, word = "context", text_of(row, "context"), text_of(row, "continuation", "answer")
    else:
        kind, (context, _, word) = "text", text_of(row, "text").rstrip().rpartition(" ")
    if not (context.strip() and word.strip()):
        raise RowError("empty context or answer")
    return kind, (context.rstrip(), word.strip())


def row_prompt(row: dict) -> tuple[str, list[tuple[str, str]]]:
    """The turns before an assistant's last answer, of any format of `row_turns` and `row_pair`, or of a `prompt`."""
    if "chosen" in row:
        kind, (turns, *_) = row_pair(row)
    elif isinstance(row.get("prompt"), str):
        kind, turns = "prompt", [("<|user|>", text_of(row, "prompt"))]
    else:
        kind, turns = row_turns(row)
        while turns and turns.pop()[0] != "<|assistant|>":
            pass
    if not any(text.strip() for _, text in turns):
        raise RowError("no prompt")
    return kind, turns


def row_problem(name: str, row: dict) -> tuple[str, Problem]:
    """A problem of the task gsm8k or jsonl."""
    prompt, answer = (text_of(row, key).strip() for key in FROM_FILE[name])
    if not (prompt and answer) or name == "gsm8k" and final_number(answer, lenient=False) is None:
        raise RowError("empty prompt or answer, or none with #### and a number")
    return name, Problem(prompt, answer, {})


def read_text(path: str) -> list[str]:
    """The documents of a file: JSON lines with `text` where its name ends in .jsonl or .json, else one; .zst or not."""
    if re.search(r"\.jsonl?(\.zst)?$", path):
        return read_rows(path, row_text, print)
    try:
        content = Path(path).read_bytes()
        if path.endswith(".zst"):
            content = zstandard.ZstdDecompressor().stream_reader(content, read_across_frames=True).read()
        return [row_text({"text": content.decode()})[1]]
    except (OSError, zstandard.ZstdError, UnicodeDecodeError, RowError) as error:
        raise UserError(f"SCORE_PATH={path!r}: must be a file of UTF-8 text or of JSON lines; {error!s:.200}") from None


def questions(models: list[SimpleNamespace], path: str, settings: Settings, layout: str) -> tuple[Task, list, int]:
    """The task, EVAL_PROMPTS prompts at most, of `path` or the task's held-out ones, each with its turns and problem,
    and how many were left out because MAX_NEW_TOKENS more exceed the context of one of the models. UserError if all.
    """
    s, task = settings, None
    if path and s.task not in FROM_FILE:
        turns = read_rows(path, row_prompt, print)[: s.eval_prompts]
        found = [SimpleNamespace(turns=own, problem=None) for own in turns]
    else:
        task = (Task(s.task, s.seed, ([], read_rows(path, functools.partial(row_problem, s.task), print))) if path else
                make_task(s.task, s.task_path, s.seed))
        found = [SimpleNamespace(turns=[("<|user|>", problem.prompt)], problem=problem)
                 for problem in task.held_out(s.eval_prompts)]
    fit = [one for one in found if all(len(asked(model.tokenizer, one.turns, layout)[0]) + s.max_new_tokens
                                       <= model.context for model in models)]
    if not fit:
        raise UserError(f"MAX_NEW_TOKENS={s.max_new_tokens}: exceeds with each of {len(found)} prompts the context of "
                        f"{min(model.context for model in models)} tokens; must be less")
    return task, fit, len(found) - len(fit)


def answer(model: SimpleNamespace, asking: list, settings: Settings, count: int, temperature: float,
           layout: str) -> list[list[SimpleNamespace]]:
    """`count` answers to each of `questions`: their ids, text, and whether the model ended them."""
    s, prompts = settings, [asked(model.tokenizer, one.turns, layout) for one in asking]
    seeds = [(s.seed, EVAL_STEP, at) for at in range(len(prompts))]
    found = iter(generate(model.network, [ids for ids, _ in prompts], count, s.max_new_tokens, temperature, s.top_k,
                          s.top_p, seeds, frozenset([prompts[0][1]])))
    return [[SimpleNamespace(text=completion(model.tokenizer, ids, one.ids), ids=one.ids, finished=one.finished)
             for one in itertools.islice(found, count)] for ids, _ in prompts]


# ------------------------------------------------------------------------------------------------------------ scores
def score_text(models: SimpleNamespace, path: str, settings: Settings) -> dict:
    """Bits per byte of the bytes that the tokens decode to, over windows of the model's context, as train_gpt.py's
    val_bpb; where these are not the text's own bytes, by those too.
    """
    model, stream, size, source = models.artifact, [], 0, 0
    context, stride, documents = model.context, settings.eval_stride, read_text(path)
    if stride >= context:
        raise UserError(f"EVAL_STRIDE={stride}: must be less than the model's context, {context}")
    for text in documents:
        ids = model.tokenizer.encode(text)
        stream += [model.tokenizer.bos_id, *ids]
        size, source = size + len(decode_bytes(model.tokenizer, ids)), source + len(text.encode())
    if not size:
        raise UserError(f"SCORE_PATH={path!r}: {model.tokenizer.file} knows nothing of it; must be other text")
    found = {"documents": len(documents), "tokens": len(stream) - 1, "bytes": size, "source_bytes": source}
    for name, step in {"": context, **({"_sliding": stride} if stride else {})}.items():
        ends = [*range(context, len(stream) - 1, step), len(stream) - 1]
        rows = [(stream[first if step == context else max(0, end - context) : first + 1], stream[first + 1 : end + 1])
                for first, end in zip([0, *ends], ends, strict=False)]
        nats = -sum(logps.sum().item() for logps, _ in token_scores(model, rows))
        found |= {f"bpb{name}": nats / math.log(2) / size, f"nats{name}": nats}
        found |= {f"bpb{name}_of_source": nats / math.log(2) / source} if source != size else {}
    return found


def score_choices(models: SimpleNamespace, path: str, settings: Settings) -> dict:
    """Accuracy of the option with the highest log-probability: its sum, per token scored, and per byte of the option;
    of options level with each other each counts its share.
    """
    rows, items, right = read_rows(path, row_options, print), [], collections.defaultdict(list)
    tokenizer, layout, chance = models.artifact.tokenizer, settings.layout, []
    for options, _ in rows:
        joined = [(context.rstrip(), settings.score_delimiter + text) if context.strip() and layout == "text"
                  else (context, text) for context, text in options]
        groups = [[text for _, text in joined]] if len(dict(joined)) == 1 else [[text] for _, text in joined]
        items.append([row for (context, _), texts in zip(joined, groups, strict=False)
                      for row in answered(tokenizer, [("<|user|>", context)], texts, layout)])
    scores, left = item_scores(models.artifact, items)
    for (options, gold), item in zip(rows, scores, strict=True):
        ways = {"accuracy": [1] * len(options), "accuracy_per_token": [len(logps) for logps, _ in item or ()],
                "accuracy_per_byte": [len(text.encode()) for _, text in options]}
        for name, sizes in ways.items() if item else ():
            values = [logps.sum().item() / size for (logps, _), size in zip(item, sizes, strict=True)]
            right[name].append((values[gold] == max(values)) / values.count(max(values)))
        chance += [1 / len(options)] if item else []
    shares = {name: interval(values) for name, values in right.items()}
    return {**shares, "chance": statistics.fmean(chance), "n": len(chance), **left}


def score_lambada(models: SimpleNamespace, path: str, settings: Settings) -> dict:
    """Share of rows whose answer is the likeliest token by token; perplexity of an answer, exp(mean of its nats)."""
    s, tokenizer = settings, models.artifact.tokenizer
    items = [answered(tokenizer, [("<|user|>", context)], [s.score_delimiter * (s.layout == "text") + word], s.layout)
             for context, word in read_rows(path, row_last, print)]
    scores, left = item_scores(models.artifact, items)
    kept = [item[0] for item in scores if item]
    nats, tokens = [-logps.sum().item() for logps, _ in kept], sum(len(logps) for logps, _ in kept)
    return {"accuracy": interval([float(hits.all()) for _, hits in kept]), "n": len(kept), **left, "tokens": tokens,
            "perplexity": math.exp(min(709, statistics.fmean(nats))), "nats_per_token": sum(nats) / tokens}


def score_task(models: SimpleNamespace, path: str, settings: Settings) -> dict:
    """Shares of right answers by the task's checker: greedy, and pass@k, whether one of k samples is right, without
    bias from n samples of which c are: 1 - C(n - c, k) / C(n, k) (arXiv 2107.03374, equation 1).
    """
    s, n = settings, settings.eval_samples
    task, asking, left = questions([models.artifact], path, s, "chat")

    def right(count: int, temperature: float, *ways: bool) -> list[list[int]]:
        answers = answer(models.artifact, asking, s, count, temperature, "chat")
        return [[sum(task.reward(one.problem, sample.text, lenient) >= 1 for sample in samples)
                 for one, samples in zip(asking, answers, strict=True)] for lenient in ways]

    greedy, lenient = right(1, 0.0, False, True)
    [counts] = right(n, s.temperature, False)
    found = {"greedy": interval(greedy), **({"greedy_lenient": interval(lenient)} if s.task == "gsm8k" else {})}
    for k in sorted({n, *(1 << power for power in range(n.bit_length()))}):
        found[f"pass{k}"] = interval([1 - math.comb(n - c, k) / math.comb(n, k) for c in counts])
    return {**found, "n": len(asking), "samples": n, "left_out": left}


def score_preference(models: SimpleNamespace, path: str, settings: Settings) -> dict:
    """Share of pairs in which the chosen answer has the higher log-probability (with SCORE_MODEL over that model's), as
    a sum and per token, and, of a model with a value head, the higher reward. Level pairs count as wrong."""
    pairs, own, sides, found = read_rows(path, row_pair, print), models.artifact, [], {}
    for model in filter(None, (own, models.score_model)):
        scores, left = item_scores(model, [answered(model.tokenizer, turns, texts, "chat") for turns, *texts in pairs])
        found["contexts_cut"] = found.get("contexts_cut", 0) + left["contexts_cut"]
        sides.append([item and [torch.stack([logps.sum(), logps.mean()]) for logps, _ in item] for item in scores])
    kept = [at for at in range(len(pairs)) if all(side[at] for side in sides)]
    if not kept:
        raise UserError(f"SCORE_PATH={path!r}: no pair fits both {own.source} and {models.score_model.source}")
    margins = torch.stack([sum(sign * (side[at][0] - side[at][1]) for sign, side in zip((1, -1), sides, strict=False))
                           for at in kept]).T.tolist()
    if hasattr(own.network, "w_value"):
        both = rewards(own, [[*pairs[at][0], ("<|assistant|>", text)] for at in kept for text in pairs[at][1:]])
        margins.append([chosen - rejected for chosen, rejected in zip(both[::2], both[1::2], strict=True)])
    for name, values in zip(("", "_per_token", "_reward"), margins, strict=False):
        found |= {f"accuracy{name}": interval([float(value > 0) for value in values]),
                  f"margin{name}": interval(values, share=False), f"ties{name}": values.count(0)}
    longer = [float(len(pairs[at][1].encode()) > len(pairs[at][2].encode())) for at in kept]
    return {**found, "chosen_longer": interval(longer), "n": len(kept), "left_out": len(pairs) - len(kept)}


def score_win(models: SimpleNamespace, path: str, settings: Settings) -> dict:
    """Share of prompts whose one answer is judged better than SCORE_MODEL's, a tie being half a win, and the mean
    difference of the marks: each paired, by prompts.
    """
    s, both, judge = settings, [models.artifact, models.score_model], models.score_judge
    task, asking, left = questions(both, path, s, "chat")
    texts = [[one.text for [one] in answer(model, asking, s, 1, s.temperature, "chat")] for model in both]
    talks = {(at, text): [*asking[at].turns, ("<|assistant|>", text)] for own in texts for at, text in enumerate(own)}
    given = (dict(zip(talks, rewards(judge, [*talks.values()]), strict=True)) if judge else
             {(at, text): task.reward(asking[at].problem, text) for at, text in talks})
    marks = [[given[key] for key in enumerate(own)] for own in texts]  # equal answers have one mark, to the last digit
    apart = [own - other for own, other in zip(*marks, strict=True)]
    wins, ties = sum(margin > 0 for margin in apart), apart.count(0)
    return {"win_rate": interval([(margin > 0) + (margin == 0) / 2 for margin in apart]), "wins": wins, "ties": ties,
            "losses": len(apart) - wins - ties, "mark": statistics.fmean(marks[0]),
            "mark_of_other": statistics.fmean(marks[1]), "difference": interval(apart, share=False),
            "n": len(apart), "judge": judge.source if judge else f"checker of {task.name}", "left_out": left}


def score_quality(models: SimpleNamespace, path: str, settings: Settings) -> dict:
    """Of NUM_SAMPLES answers to each prompt: distinct words, pairs and triples of words among all of them (arXiv
    1510.03055), the mean share of an answer's four words in a row that it has had before (1908.04319), lengths, and
    with SCORE_MODEL that model's perplexity of a token and bits per byte.
    """
    s, reader, found = settings, models.score_model, {}
    _, asking, left = questions([models.artifact], path, s, s.layout)
    answers = answer(models.artifact, asking, s, s.num_samples, s.temperature, s.layout)
    pairs = [(one.turns, sample) for one, samples in zip(asking, answers, strict=True) for sample in samples]
    words = [sample.text.split() for _, sample in pairs]
    runs = {n: [[tuple(own[at : at + n]) for at in range(len(own) - n + 1)] for own in words] for n in (1, 2, 3, 4)}
    for n in (1, 2, 3):
        grams = [gram for own in runs[n] for gram in own]
        found[f"distinct{n}"] = len(set(grams)) / len(grams) if grams else None
    repeated = [1 - len(set(own)) / len(own) for own in runs[4] if own]
    found |= {"repetition": statistics.fmean(repeated or [0.0]), "words": statistics.fmean(map(len, words)),
              "tokens": statistics.fmean(len(sample.ids) for _, sample in pairs),
              "finished": statistics.fmean(sample.finished for _, sample in pairs)}
    if reader:  # of the text alone: the token that ends an answer in layout chat is none
        rows = [answered(reader.tokenizer, turns, [sample.text], s.layout)[0] for turns, sample in pairs]
        rows = [[(prompt, follows[: len(follows) - (s.layout == "chat")])] for prompt, follows in rows]
        scores, cut = item_scores(reader, rows)
        read = [(item[0][0], sample.text) for item, (_, sample) in zip(scores, pairs, strict=True) if item]
        nats = -sum(logps.sum().item() for logps, _ in read)
        found |= {"perplexity": math.exp(nats / sum(len(logps) for logps, _ in read)), "read": len(read),
                  "read_bpb": nats / math.log(2) / sum(len(text.encode()) for _, text in read), **cut}
    return {**found, "n": len(pairs), "prompts": len(asking), "left_out": left}


def score(settings: Settings) -> dict[str, dict]:
    """SCORE of each of SCORE_PATH, or of TASK: printed, and written to SCORE_FILE. Raises UserError."""
    s, runtime, found = settings, start_runtime(settings.device), {}
    models = SimpleNamespace(**{name: open_model(name, s, runtime) if getattr(s, name) or name == "artifact" else None
                                for name in ("artifact", "score_model", "score_judge")})
    if models.score_judge and not hasattr(models.score_judge.network, "w_value"):
        raise UserError(f"SCORE_JUDGE={s.score_judge!r}: has no value head; must be a reward model")
    measure = {"text": score_text, "choices": score_choices, "lambada": score_lambada, "task": score_task,
               "preference": score_preference, "win": score_win, "quality": score_quality}[s.score]
    for path in s.score_path.split(","):
        found[path or s.task] = measure(models, path, s)
        shown = json.loads(json.dumps(found[path or s.task]), parse_float=lambda text: float(f"{float(text):.5g}"))
        print(f"{s.score} {path or s.task}:", *(f"{name}:{value}" for name, value in shown.items()), flush=True)
    if s.score_file:
        result = {"script": Path(__file__).name, "model": models.artifact.source, "score": s.score, "scores": found,
                  **describe_machine(runtime), "settings": asdict(s)}
        replace_file(s.score_file, (json.dumps(result, indent=1) + "\n").encode())
    return found


# -------------------------------------------------------------------------------------------------------------- main
@torch.inference_mode()
def stream(model: SimpleNamespace, prompt: list[int], stop: frozenset[int], settings: Settings, most: int,
           seed: tuple[int, ...]) -> str:
    """An answer of `most` tokens at most, written as it grows: what `generate` draws by the same seed. The bytes of a
    character are held back until it is whole; Ctrl-C ends the answer.
    """
    s, last, text, characters = settings, prompt[-1], "", codecs.getincrementaldecoder("utf-8")("replace")
    uniform = torch.from_numpy(np.random.default_rng([*seed, 0]).random(most)).to(model.device)
    try:
        decoder = Decoder(model.network, [prompt], 1)
        logits = decoder.logits
        for step in range(most):
            token, _ = draw(logits, s.temperature, s.top_k, s.top_p, uniform[step : step + 1])
            if int(token) in stop:
                break
            before = len(decode_bytes(model.tokenizer, [last]))
            piece = characters.decode(decode_bytes(model.tokenizer, [last, int(token)])[before:])
            text, last = text + piece, int(token)
            print(piece, end="", flush=True)
            logits = decoder(token)
    except KeyboardInterrupt:
        print(" [stopped]", end="", file=sys.stderr, flush=True)
    rest = characters.decode(b"", final=True)
    print(rest, flush=True)
    return text + rest


def chat(settings: Settings) -> None:
    """Answer the lines of standard input, each a user's turn, until it ends or Ctrl-C comes between two answers."""
    s, note = settings, functools.partial(print, file=sys.stderr, flush=True)
    model, system = open_model("artifact", s, start_runtime(s.device)), [("<|system|>", s.system)] if s.system else []
    turns, most = system, min(s.max_new_tokens, model.context // 2)
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="replace")  # bytes that are no UTF-8 do not end the program
    for number in itertools.count():
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except (EOFError, KeyboardInterrupt):
            return
        if line.strip() == "/reset":
            turns = system
            note("[what was said is forgotten]")
        if line.strip() in ("", "/reset"):
            continue
        talk = [*turns, ("<|user|>", line)]
        while len((ids := asked(model.tokenizer, talk, "chat"))[0]) + most > model.context and talk != system:
            del talk[len(system) : len(system) + 2]  # the oldest question and its answer
        if talk == system:
            note(f"[left out: with {most} tokens to answer it exceeds the context of {model.context}]")
            continue
        if len(talk) <= len(turns):
            note(f"[the context is full: the oldest {len(turns) + 1 - len(talk)} turns are forgotten]")
        text = stream(model, ids[0], frozenset([ids[1], model.tokenizer.bos_id]), s, most, (s.seed, number))
        turns = [*talk, ("<|assistant|>", text)]


def sample(settings: Settings) -> None:
    """Load, generate, print. Raises UserError for a missing artifact or another tokenizer."""
    s, model = settings, open_model("artifact", settings, start_runtime(settings.device))
    tokenizer, system = model.tokenizer, [("<|system|>", s.system)] if s.system else []
    prompt, end = asked(tokenizer, [*system, ("<|user|>", s.prompt)], s.layout)
    most = model.context + 1 - len(prompt)
    if model.network.config.positions == "learned" and s.max_new_tokens > most:
        raise UserError(f"MAX_NEW_TOKENS={s.max_new_tokens}: must be at most {most} after this prompt, for the "
                        f"model has positions for {model.context} tokens")
    for one in generate(model.network, [prompt], s.num_samples, s.max_new_tokens, s.temperature, s.top_k, s.top_p,
                        [(s.seed,)], frozenset([end, tokenizer.bos_id])):
        print(completion(tokenizer, prompt, one.ids) if s.layout == "chat" else
              decode_bytes(tokenizer, [*prompt, *one.ids]).decode("utf-8", errors="replace"))


def main() -> int:
    """Settings, then what MODE says; the exit code."""
    settings = load_settings(Settings, dict(os.environ))
    check_settings(settings)
    {"generate": sample, "chat": chat, "score": score}[settings.mode](settings)
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
