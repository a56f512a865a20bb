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
import inspect
import io
import itertools
import json
import math
import os
import random
import re
import resource
import shlex
import statistics
import string
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, get_args

import numpy as np
import sentencepiece
import tiktoken
import torch
import torch.distributed as dist
import torch.nn.functional as F
import zstandard
from tiktoken.load import read_file_cached
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint


# === shared: bounds ===
def bounded(default, low, high=math.inf):
    """Return a setting with a lowest and a highest value; other numbers have a lowest of 0."""
    return field(default=default, metadata={"bounds": (low, high)})


# === end: bounds ===


# ---------------------------------------------------------------------------------------------------------- settings
@dataclass(frozen=True)
class Settings:
    """Every setting is an environment variable: its name in capitals."""

    # go on from PROMPT; chat: by lines; score: measure SCORE
    mode: Literal["generate", "chat", "score"] = "generate"
    artifact: str = ""  # the model: a run, a checkpoint or an artifact (model.upar)
    tokenizer_path: str = ""  # .model or .tiktoken file, encoding or "bytes"; empty: the data's
    prompt: str = ""  # text to go on from; empty: a document's beginning
    # of a prompt; chat: a user's turn, as post-training has it
    layout: Literal["text", "chat"] = "text"
    system: str = ""  # first turn of a chat: what the model is to be; empty: none
    num_samples: int = bounded(1, 1, 1 << 16)  # how many continuations
    max_new_tokens: int = bounded(100, 1, 1 << 20)  # length of each, at most
    # of the distribution; 0: always the likeliest token
    temperature: float = bounded(0.8, 0.0, 100.0)
    top_k: int = 50  # draw from this many likeliest tokens; 0: from all
    # draw from the likeliest tokens that hold this share of probability; 1: from all
    top_p: float = bounded(1.0, 1e-09, 1.0)
    seed: int = 1337  # of every random draw
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: CUDA if there is a device
    # score
    # text: bits per byte
    score: Literal["text", "choices", "lambada", "task", "preference", "win", "quality"] = "text"
    # files to score, with commas between them; of task, win and quality in TASK_PATH's place
    score_path: str = ""
    # another model: win's opponent, the reference of preference, the reader of quality
    score_model: str = ""
    score_judge: str = ""  # a reward model that decides win; empty: TASK's checker
    score_delimiter: str = " "  # between a context and what may follow it, of choices and lambada
    score_file: str = ""  # file to write the scores to, as JSON; empty: none
    # gsm8k and jsonl read TASK_PATH; jsonl: lines with prompt and answer
    task: Literal["sort", "reverse", "add", "countdown", "zebra", "gsm8k", "jsonl"] = "sort"
    task_path: str = ""  # file of gsm8k or jsonl
    eval_prompts: int = bounded(512, 1, 1 << 20)  # held-out prompts that score the policy
    eval_samples: int = bounded(8, 1, 1 << 20)  # of each, for pass@1 and pass@EVAL_SAMPLES
    eval_stride: int = 0  # stride of the sliding-window score; 0: leave that score out
    micro_batch_tokens: int = 0  # per forward and rank; 0: fitted to memory. Same global batch

    def __post_init__(self) -> None:
        check_settings(self)


# === shared: settings ===
class UserError(Exception):
    """A mistake of the user. It is printed as one line, and the exit code is 2."""


# Settings of other projects that have no counterpart here. In the environment they are errors, not
# ignored in silence.
ABSENT_SETTINGS = (
    "ADAM_WD",
    "DROPOUT",
    "LOG_INTERVAL",
    "MUON_MOMENTUM_WARMUP_STEPS",
    "QK_NORM",
    "TTT_ENABLED",
    "XSA_LAST_N",
)

# Names that nanoGPT, modded-nanogpt, Parameter Golf and TRL use, and the settings or constants that
# do the same job here.
ALIASES = {
    "BATCH_SIZE": "TRAIN_BATCH_TOKENS",
    "BETA": "KL_BETA",
    "BETA1": "ADAM_BETAS[0]",
    "BETA2": "ADAM_BETAS[1]",
    "BLOCK_SIZE": "TRAIN_SEQ_LEN",
    "DATASET": "DATA_PATH",
    "DECAY_LR": "LR_SCHEDULE",
    "EMA_DECAY": "EMA",
    "EMA_ENABLED": "EMA",
    "EMBED_LR": "TIED_EMBED_LR",
    "EVAL_INTERVAL": "VAL_LOSS_EVERY",
    "EVAL_SEQ_LEN": "TRAIN_SEQ_LEN",
    "GRADIENT_ACCUMULATION_STEPS": "MICRO_BATCH_TOKENS",
    "GRAD_CLIP": "GRAD_CLIP_NORM",
    "LATE_QAT": "QAT",
    "LEARNING_RATE": "MATRIX_LR",
    "LORA_R": "LORA_RANK",
    "LOSS_TYPE": "REDUCTION",
    "LR": "LEARNING_RATE",
    "LR_DECAY_ITERS": "WARMDOWN_ITERS",
    "MAX_COMPLETION_LENGTH": "MAX_NEW_TOKENS",
    "MAX_GRAD_NORM": "GRAD_CLIP_NORM",
    "MAX_ITERS": "ITERATIONS",
    "MAX_SEQ_LEN": "TRAIN_SEQ_LEN",
    "MAX_STEPS": "ITERATIONS",
    "MIN_LR": "LR_FLOOR",
    "MODEL_NAME_OR_PATH": "INIT_FROM",
    "MUON_BACKEND_STEPS": "NEWTON_SCHULZ_STEPS",
    "MUON_MOMENTUM_WARMUP_START": "MUON_MOMENTUM_START",
    "MUON_WEIGHT_DECAY": "MUON_WD",
    "NUM_GENERATIONS": "GROUP_SIZE",
    "NUM_ITERATIONS": "ITERATIONS",
    "N_EMBD": "MODEL_DIM",
    "N_HEAD": "NUM_HEADS",
    "N_LAYER": "NUM_LAYERS",
    "OUTPUT_DIR": "OUT_DIR",
    "QAT_ENABLED": "QAT",
    "SEQ_LEN": "TRAIN_SEQ_LEN",
    "SWA_ENABLED": "SWA",
    "TIED_EMBED_INIT_STD": "EMBED_INIT_STD",
    "TRAIN_LOG_EVERY": "LOG_SECONDS",
    "VAL_BATCH_SIZE": "MICRO_BATCH_TOKENS",
    "WARMUP_ITERS": "WARMUP_FRAC",
    "WEIGHT_DECAY": "MUON_WD",
}

# Constants of this script that are settings elsewhere. Their values are accepted, so that pasted
# commands run.
RETIRED_SETTINGS = {
    "ADAM_BETAS[0]": 0.9,
    "ADAM_BETAS[1]": 0.95,
    "ADAM_EPS": 1e-8,
    "BIGRAM_DIM": 128,
    "EMBED_BITS": 8,
    "EMBED_INIT_STD": 0.005,
    "HEAD_LR": 0.008,
    "LOGIT_SOFTCAP": 30.0,
    "LOG_SECONDS": 10.0,
    "MUON_MOMENTUM": 0.95,
    "MUON_MOMENTUM_START": 0.85,
    "NEWTON_SCHULZ_STEPS": 5,
    "ROPE_BASE": 10000.0,
    "WARMUP_STEPS": 2,
}


NUMBER_NAMES = {int: "a whole number", float: "a number"}


def parse_setting(setting, text):
    """Return the value of a setting written as text; text of a wrong type, for check_settings."""
    if setting.type is bool and text in ("0", "1"):
        return text == "1"
    if setting.type in NUMBER_NAMES:
        with contextlib.suppress(ValueError):
            return setting.type(text)
    return text


def check_settings(settings):
    """Check type, choice and range of every field of a settings dataclass. Raises UserError."""
    for setting in fields(settings):
        value = getattr(settings, setting.name)
        kind = setting.type
        choices = get_args(kind)
        if choices:
            is_allowed = value in choices
            allowed = f"one of {', '.join(choices)}"
        elif kind is bool:
            is_allowed = isinstance(value, bool)
            allowed = "0 or 1 (in a program a bool)"
        elif kind is str:
            is_allowed = isinstance(value, str)
            allowed = "a string"
        else:
            low, high = setting.metadata.get("bounds", (0, math.inf))
            # An int may stand for a float, but True for no number; a NaN is in no range.
            is_allowed = type(value) in (int, kind) and low <= value <= high and value < math.inf
            allowed = f"{NUMBER_NAMES[kind]} from {low} to {high}"
        if not is_allowed:
            raise UserError(f"{setting.name.upper()}={value!r}: must be {allowed}")


def sibling_settings():
    """Return the names of all settings of the scripts in this script's folder."""
    names = []
    for path in Path(__file__).parent.glob("*.py"):
        _, _, rest = path.read_text(encoding="utf-8").partition("\nclass Settings:\n")
        names += re.findall(r"\n    (\w+): ", rest.partition("\n\n\n")[0].upper())
    return names


def check_name(name, text, names):
    """Raise UserError for a name that is no setting, with the setting that was probably meant.

    A retired setting with the value of its constant is accepted.
    """
    message = f"{name}={text!r}: no setting of this script"
    meant = name
    while meant in ALIASES and meant not in names:
        meant = ALIASES[meant]
    close_names = difflib.get_close_matches(meant, names, 1)
    if meant in RETIRED_SETTINGS:
        value = RETIRED_SETTINGS[meant]
        with contextlib.suppress(ValueError):
            if float(text) == value:
                return
        message += f", which has the constant {meant} = {value}"
    elif close_names:
        message += f"; did you mean {close_names[0]}?"
    raise UserError(
        f"{message} (--help lists the settings; IGNORE_ENV={name} ignores it in the environment)"
    )


def read_environment(environ, names):
    """Return the environment variables that are settings, and those that look meant as settings but
    are none here: near misses, names that other projects use, settings of the scripts beside this.
    """
    known = {*names, *ALIASES, *ABSENT_SETTINGS, *RETIRED_SETTINGS, *sibling_settings(), "CONFIG"}
    ignored = environ.get("IGNORE_ENV", "").replace(",", " ").split()
    return {
        name: environ[name]
        for name in environ.keys() - ignored
        if name in known or difflib.get_close_matches(name, names, 1, 0.85)
    }


def read_config(path):
    """Return the NAME=value lines of a config file; `#` begins a comment. Raises UserError."""
    if not Path(path).is_file():
        raise UserError(f"CONFIG={path!r}: no such file")
    given = {}
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        name, equals, value = line.partition("#")[0].partition("=")
        if equals:
            given[name.strip()] = value.strip().strip("'\"")
        elif name.strip():
            raise UserError(f"{path}: {line!r} is not NAME=value")
    if "CONFIG" in given:
        raise UserError(f"{path}: CONFIG cannot stand in a config file")
    return given


def read_arguments(arguments):
    """Return the settings of a command line: configs/x.env, NAME=value or --name=value."""
    given = {}
    for argument in arguments:
        name, equals, value = argument.removeprefix("--").partition("=")
        if equals:
            given[name.upper()] = value
        elif argument.endswith(".env"):
            given["CONFIG"] = argument
        else:
            raise UserError(f"{argument!r}: must be a config file (x.env), NAME=value or --help")
    return given


def load_settings(cls, environ, arguments=(), presets=(), stored=None):
    """Return the settings of dataclass `cls`: defaults < CONFIG file < environment < arguments.

    presets: NAME of a setting -> choice -> values of other settings. Values given in the same place
    override them, so a preset chosen in the environment overrides the file. stored: function of the
    given texts (NAME -> text) that returns the values of another run, which replace the defaults.
    Raises UserError: a wrong value, or a name that is no setting (see check_name).
    """
    if "--help" in arguments:
        print(inspect.getmodule(cls).__doc__)
        print(inspect.getsource(cls))
        sys.exit()
    settings = {setting.name.upper(): setting for setting in fields(cls)}
    above = {**read_environment(environ, settings), **read_arguments(arguments)}
    path = above.get("CONFIG")
    config = read_config(path) if path else {}
    given = {**config, **above}
    for name in sorted(given.keys() - {*settings, "CONFIG"}):
        check_name(name, given[name], settings)

    values = stored(given) if stored else {}
    for texts in (config, above):
        for name in presets:
            if name in texts:
                # A choice in the file has no effect if the environment or an argument has another.
                values.update(presets[name].get(given[name], {}))
        for name, setting in settings.items():
            if name in texts:
                values[setting.name] = parse_setting(setting, texts[name])
    return cls(**{name: values[name] for name in values if name.upper() in settings})


# === end: settings ===


# === shared: runtime ===
@dataclass
class Runtime:
    """Who this process is among the ranks, and the device of its tensors."""

    rank: int
    world_size: int
    device: torch.device
    distributed: bool

    def sum(self, tensor):
        """Sum a tensor over all ranks, in place, and return it."""
        if self.distributed:
            dist.all_reduce(tensor)
        return tensor

    def agree(self, value):
        """Return rank 0's value on every rank; it may be of any type that pickle takes."""
        values = [value]
        if self.distributed:
            dist.broadcast_object_list(values, src=0, device=self.device)
        return values[0]

    def leave(self):
        """Leave the process group, all ranks together: a rank that left early aborted in gloo."""
        if self.distributed:
            dist.barrier()
            dist.destroy_process_group()


def hidden_gpus():
    """Return whether nvidia-smi lists GPUs, for the case that PyTorch sees none of them."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    return subprocess.getoutput("nvidia-smi -L").startswith("GPU")


def start_runtime(device):
    """Join the process group that torchrun describes (NCCL or gloo), or be a single process."""
    use_cuda = device != "cpu" and torch.cuda.is_available()
    if not use_cuda and (device == "cuda" or (device == "auto" and hidden_gpus())):
        raise UserError(
            f"DEVICE={device!r}: PyTorch sees no GPU of this machine; install its CUDA build or a "
            "newer driver, or set DEVICE=cpu"
        )
    place = torch.device("cpu")
    if use_cuda:
        place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(place)
    else:
        # GDN's decays reach denormal numbers, on which a CPU is 10 times slower.
        torch.set_flush_denormal(True)
    if "RANK" not in os.environ:
        return Runtime(0, 1, place, False)
    backend = "nccl" if use_cuda else "gloo"
    dist.init_process_group(backend, device_id=place if use_cuda else None)
    return Runtime(dist.get_rank(), dist.get_world_size(), place, True)


def exit_code(main):
    """Run `main` and return its exit code: 2 for a UserError, 1 for other faults of one line."""
    rank = int(os.environ.get("RANK", 0))
    try:
        return main()
    except (UserError, FloatingPointError, OSError, torch.OutOfMemoryError) as error:
        if rank:
            time.sleep(5)  # torchrun ends this rank first if rank 0 reports the same error
        message, *_ = str(error).split("\n")
        sys.stderr.write(f"error: {message}\n")
        return 2 if isinstance(error, UserError) else 1
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        sys.stderr.write(f"error: rank {rank} lost another rank; RESUME continues\n")
        os._exit(1)  # an ordinary exit would wait for the lost rank


def replace_file(path, data):
    """Write a file beside `path` and rename it: `path` always holds the old or the new bytes."""
    part = f"{path}.part"
    with open(part, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def describe_machine(runtime):
    """Return commit (`+`: with changes), hardware, versions and peak memory, for the result."""
    folder = shlex.quote(str(Path(__file__).parent))
    # Run by a shell, so that a missing git is no error.
    status, commit = subprocess.getstatusoutput(
        f"git -C {folder} describe --always --abbrev=40 --exclude='*' --dirty=+"
    )
    if runtime.device.type == "cuda":
        hardware = torch.cuda.get_device_name()
        peak_bytes = torch.cuda.max_memory_allocated()
    else:
        hardware = f"{os.uname().machine} CPU, {torch.get_num_threads()} threads"
        unit = 1 if sys.platform == "darwin" else 1024
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {
        "commit": "unknown" if status else commit,
        "hardware": f"{runtime.world_size} x {hardware}",
        "versions": {"python": sys.version.split()[0], "torch": torch.__version__},
        "peak_memory_mib": peak_bytes / 2**20,
    }


def list_checkpoints(run):
    """Return the checkpoints in a run's folder, whole or not, the newest first."""
    folders = [path for path in run.glob("step_*") if re.fullmatch(r"step_\d+", path.name)]
    return sorted(folders, key=lambda path: int(path.name[5:]), reverse=True)


def checkpoint_fault(folder):
    """Return what is wrong with a checkpoint, or "" if it is whole."""
    try:
        for line in (folder / "SHA256SUMS").read_text().splitlines():
            digest, _, name = line.partition("  ")
            if sha256_file(folder / name) != digest:
                return f"{name} was changed"
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def newest_checkpoint(folder):
    """Return the newest whole checkpoint of a run, or None, and a line on each damaged one.

    The folder of a checkpoint stands for itself.
    """
    faults = []
    for candidate in list_checkpoints(folder) or [folder]:
        fault = checkpoint_fault(candidate)
        if not fault:
            return candidate, faults
        faults.append(f"checkpoint {candidate} is damaged and skipped: {fault}")
    return None, faults


# === end: runtime ===


# === shared: tokenizer ===
@dataclass
class Tokenizer:
    """A tokenizer, from `read_tokenizer`, and the bytes that each token stands for.

    A token counts the UTF-8 bytes that it decodes to. After a boundary (a control, unknown or
    unused token) it counts them without the space that some SentencePiece models put before every
    text. Parameter Golf counts in the same way (build_sentencepiece_luts, eval_val).
    """

    file: str  # name of the file that holds the tokenizer; "bytes" needs none
    content: bytes  # of that file; its SHA-256 tells tokenizers apart
    bos_id: int
    pieces: list  # bytes that each token decodes to, b"" for boundaries
    drops_space: np.ndarray | bool = False  # (V,) bool, loses its first space after a boundary
    encode: Callable = None  # text -> ids; this and roles are of load_tokenizer in section encoding
    roles: dict = None

    def __post_init__(self):
        self.sha256 = hashlib.sha256(self.content).hexdigest()
        self.vocab_size = len(self.pieces)
        self.byte_counts = np.fromiter(map(len, self.pieces), int)  # (V,) int64
        self.boundary = self.byte_counts == 0  # (V,) bool
        self.drops_space = np.broadcast_to(self.drops_space, self.vocab_size)


def read_tokenizer(path, facts):
    """Return the Tokenizer of a SentencePiece file or a rank file NAME.tiktoken, or the built-in
    one, `bytes`.

    facts: bos_id and vocab_size, which a rank file does not contain. Raises UserError.
    """
    path = Path(path)
    if path.name == "bytes":  # pad, BOS, EOS and unknown, then 256 bytes, then 4 roles
        pieces = [b""] * 4 + [bytes([byte]) for byte in range(256)] + [b""] * 4
        return Tokenizer("bytes", b"underpar bytes 264", 1, pieces)
    try:
        content = path.read_bytes()
        if path.suffix == ".tiktoken":
            return rank_tokenizer(path.name, content, facts)
        return sentencepiece_tokenizer(content)
    except (OSError, LookupError, ValueError, RuntimeError) as error:
        raise UserError(
            f"tokenizer {path}: {error}; must be a SentencePiece model with a BOS token, the rank "
            "file NAME.tiktoken of the data, or bytes"
        ) from error


def rank_tokenizer(file, content, facts):
    """Return the tokenizer of a rank file: a line per piece, in base64, and its id."""
    pieces = [b""] * facts["vocab_size"]  # special tokens and unused ids stay b""
    for line in content.splitlines():
        piece, rank = line.split()
        pieces[int(rank)] = base64.b64decode(piece)
    return Tokenizer(file, content, facts["bos_id"], pieces)


def sentencepiece_tokenizer(content):
    """Return the tokenizer of a SentencePiece model, the bytes of its file."""
    model = sentencepiece.SentencePieceProcessor(model_proto=content)
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
    return Tokenizer("tokenizer.model", content, model.bos_id(), pieces, drops_space)


def sha256_file(path):
    """Return the SHA-256 of a file in hexadecimal digits."""
    # Shards and checkpoints are mapped, not read into memory.
    return hashlib.sha256(np.memmap(path, mode="r")).hexdigest()


# === end: tokenizer ===


# === shared: encoding ===
ROLE_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
RANK_FILES = "https://openaipublic.blob.core.windows.net/encodings"
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


def load_tokenizer(path):
    """Return the Tokenizer of `path`, see read_tokenizer, or of the published encoding NAME.

    It has two attributes more: `encode`, from a text to ids without BOS, where special tokens are
    plain text; and `roles`, the ids of ROLE_TOKENS, {} if it has none. Raises UserError.
    """
    path = Path(path)
    name = path.name.removesuffix(".tiktoken")
    facts = ENCODINGS.get(name)
    if path.suffix == ".tiktoken" and not facts:
        raise UserError(f"tokenizer {path}: must be one of {[*ENCODINGS]}")
    if facts and not path.suffix:
        tokenizer = rank_tokenizer(f"{name}.tiktoken", published_ranks(name, facts), facts)
    else:
        tokenizer = read_tokenizer(path, facts)
    tokenizer.roles = {}
    if name == "bytes":
        tokenizer.encode = lambda text: [4 + byte for byte in text.encode()]
        tokenizer.roles = {role: 260 + i for i, role in enumerate(ROLE_TOKENS)}
    elif facts:
        if tokenizer.sha256 != facts["sha256"]:
            raise UserError(f"tokenizer {path}: is not the published rank file of {name}")
        ranks = {piece: rank for rank, piece in enumerate(tokenizer.pieces) if piece}
        bpe = tiktoken.Encoding(
            name, pat_str=facts["split"], mergeable_ranks=ranks, special_tokens={}
        )
        tokenizer.encode = bpe.encode_ordinary
    else:
        model = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.content)
        tokenizer.encode = model.encode
        for role in ROLE_TOKENS:
            i = model.piece_to_id(role)
            # Only control tokens cannot be written in a text, so that no user can forge a role.
            if model.is_control(i):
                tokenizer.roles[role] = i
    return tokenizer


def published_ranks(name, facts):
    """Return the rank file of an encoding, from tiktoken's cache or OpenAI's server."""
    url = f"{RANK_FILES}/{name.replace('gpt2', 'r50k_base')}.tiktoken"
    try:
        return read_file_cached(url, facts["sha256"])
    except (OSError, ValueError) as error:
        raise UserError(f"tokenizer {name}: {error}") from error


# === end: encoding ===


# === shared: text ===
def decode_bytes(tokenizer, ids):
    """Return the bytes of tokens that begin a document; `byte_counts` counts exactly these."""
    ids = np.asarray(ids, dtype=np.int64)
    previous = np.append(tokenizer.bos_id, ids)[:-1]
    drops = tokenizer.drops_space[ids] & tokenizer.boundary[previous]
    pairs = zip(ids.tolist(), drops.tolist(), strict=True)
    return b"".join([tokenizer.pieces[token][drop:] for token, drop in pairs])


def chat_ids(tokenizer, prompt):
    """Return the ids of a prompt, as a document begins, and the token that ends the answer to it.

    With role tokens the prompt is a user's turn. Without, it is a line, and the BOS of the next
    document ends the answer.
    """
    roles = tokenizer.roles
    if not roles:
        return [tokenizer.bos_id, *tokenizer.encode(prompt + "\n")], tokenizer.bos_id
    turn = [roles["<|user|>"], *tokenizer.encode(prompt), roles["<|end|>"]]
    return [tokenizer.bos_id, *turn, roles["<|assistant|>"]], roles["<|end|>"]


def completion(tokenizer, prompt, ids):
    """Return the text of `ids`, sampled after the ids of a prompt. BOS and roles are no text."""
    length = len(decode_bytes(tokenizer, prompt))
    return decode_bytes(tokenizer, [*prompt, *ids])[length:].decode(errors="replace")


# === end: text ===


# === shared: chat ===
ROLES = {  # what data sets call the roles; a model reads what a tool says like a user's turn
    "system": "<|system|>",
    "user": "<|user|>",
    "human": "<|user|>",
    "tool": "<|user|>",
    "function": "<|user|>",
    "observation": "<|user|>",
    "assistant": "<|assistant|>",
    "gpt": "<|assistant|>",
    "model": "<|assistant|>",
    "bot": "<|assistant|>",
    "function_call": "<|assistant|>",
}


class RowError(Exception):
    """What is wrong with a row of data, in the same few words for all rows with this fault."""


def text_of(row, *names):
    """Return the text in the first of these fields that a row has. Raises RowError."""
    name = next((name for name in names if name in row), None)
    if name is None:
        raise RowError(f"missing field {' or '.join(map(repr, names))}")
    if not isinstance(row[name], str):
        raise RowError(f"field {name!r} is no text")
    try:
        row[name].encode()
    except UnicodeEncodeError:
        raise RowError("half a surrogate pair, which is no Unicode") from None
    return row[name]


def listed_turns(row, name):
    """Return the turns in a field: a list of {"role", "content"} or {"from", "value"}.

    A turn is (role token, text). Raises RowError.
    """
    turns = []
    messages = row[name] if isinstance(row[name], list) else [None]
    for message in messages:
        if not isinstance(message, dict):
            raise RowError(f"field {name!r} is no list of messages")
        role = text_of(message, "role", "from")
        if role not in ROLES:
            raise RowError(f"unknown role {role!r:.30}")
        turns.append((ROLES[role], text_of(message, "content", "value")))
    return turns


def turn_ids(tokenizer, turns):
    """Return the ids of a conversation, and for each whether the assistant says it.

    The ids are BOS, then for each turn its role token, its text and <|end|>; the assistant says its
    text and the <|end|>. Plain text, a turn with the role "", is all to be learned but its BOS, and
    ends with the BOS of the next document, as in pretraining. Needs role tokens (`with_roles`).
    """
    ids = [tokenizer.bos_id]
    said = [False]
    for role, text in turns:
        body = tokenizer.encode(text)
        if role:
            ids += [tokenizer.roles[role], *body, tokenizer.roles["<|end|>"]]
            said += [False] + [role == "<|assistant|>"] * (len(body) + 1)
        else:
            ids += [*body, tokenizer.bos_id]
            said += [True] * (len(body) + 1)
    return ids, said


def read_file(path):
    """Return the bytes of a file, decompressed if its name ends in .zst. Raises UserError."""
    try:
        with open(path, "rb") as file:
            if path.endswith(".zst"):
                decompressor = zstandard.ZstdDecompressor()
                return decompressor.stream_reader(file, read_across_frames=True).read()
            return file.read()
    except (OSError, zstandard.ZstdError) as error:
        raise UserError(f"{path}: cannot be read; {error!s:.200}") from None


def parse_line(line):
    """Return what a line of JSON says. Raises RowError."""
    try:
        return json.loads(line.decode())
    except UnicodeDecodeError:
        raise RowError("invalid UTF-8") from None
    except (ValueError, RecursionError):
        raise RowError("no JSON") from None


def read_rows(path, parse, log):
    """Return what `parse` makes of the rows of a file: JSON lines, or one JSON list, maybe .zst.

    parse: function from a row to its format and an item; it raises RowError. Malformed rows are
    left out, and the log counts them by fault. Raises UserError: no such file, or no usable row.
    """
    # Some editors put a mark, of three bytes, before UTF-8.
    content = read_file(path).removeprefix(b"\xef\xbb\xbf")
    rows = content.splitlines()
    if content.lstrip().startswith(b"["):
        with contextlib.suppress(RowError):  # otherwise these are lines, each of which is a list
            rows = parse_line(content)
    items = []
    formats = collections.Counter()
    faults = {}  # fault -> numbers of the rows that have it
    for number, row in enumerate(rows, 1):
        try:
            if isinstance(row, bytes):
                if not row.strip():
                    continue
                row = parse_line(row)
            if not isinstance(row, dict):
                raise RowError("no JSON object")
            name, item = parse(row)
        except RowError as error:
            faults.setdefault(str(error), []).append(number)
            continue
        formats[name] += 1
        items.append(item)
    used = ", ".join(f"{count} {name}" for name, count in formats.items()) or "none"
    left_out = [
        f"{fault}: {len(numbers)} (the first is row {numbers[0]})"
        for fault, numbers in faults.items()
    ]
    count = len(items) + sum(map(len, faults.values()))  # without blank lines
    report = f"{path}: {count} rows, used {used}; left out {'; '.join(left_out) or 'none'}"
    if not items:
        raise UserError(f"{report}; must hold one usable row at least")
    log(f"data: {report}")
    return items


# === end: chat ===


# === shared: conversations ===
def row_turns(row):
    """Return the format of a row and its turns, (role token, text); plain text is a turn without role.

    The assistant has a turn, and none of its turns is empty. Raises RowError.
    """
    if "messages" in row:
        name = "messages"
        turns = listed_turns(row, "messages")
    elif "conversations" in row:
        name = "ShareGPT"
        turns = listed_turns(row, "conversations")
    elif "instruction" in row:
        name = "Alpaca"
        parts = [text_of(row, field) for field in ("instruction", "input") if row.get(field)]
        turns = [("<|user|>", "\n\n".join(parts)), ("<|assistant|>", text_of(row, "output"))]
    elif "question" in row:
        name = "question/answer"
        turns = [("<|user|>", text_of(row, "question")), ("<|assistant|>", text_of(row, "answer"))]
    elif "prompt" in row:
        name = "prompt/completion"
        answer = text_of(row, "completion", "response", "answer")
        turns = [("<|user|>", text_of(row, "prompt")), ("<|assistant|>", answer)]
    elif "text" in row:
        name = "text"
        turns = [("", text_of(row, "text"))]
    else:
        raise RowError(f"no known format, fields {', '.join(sorted(map(str, row)))!r:.80}")
    answers = [text for role, text in turns if role in ("<|assistant|>", "")]
    if not answers:
        raise RowError("no turn of the assistant")
    if not all(answer.strip() for answer in answers):
        raise RowError("empty answer")
    return name, turns


# === end: conversations ===


# === shared: preferences ===
def field_turns(row, name, role):
    """Return the turns in a field: a list of messages, or a text, a turn of `role`."""
    if isinstance(row.get(name), list):
        return listed_turns(row, name)
    return [(role, text_of(row, name))]


def row_pair(row):
    """Return the format of a row and (turns before the answers, chosen text, rejected text).

    The row has `prompt`, `chosen` and `rejected`, each a text or a list of messages; without
    `prompt`, two conversations with the same turns before the last. Raises RowError.
    """
    before = field_turns(row, "prompt", "<|user|>") if "prompt" in row else []
    chosen = field_turns(row, "chosen", "<|assistant|>")
    rejected = field_turns(row, "rejected", "<|assistant|>")
    for turns in (chosen, rejected):
        if not turns or turns[-1][0] != "<|assistant|>":
            raise RowError("chosen or rejected does not end with the assistant's turn")
        if not turns[-1][1].strip():
            raise RowError("empty answer")
    if chosen[:-1] != rejected[:-1]:
        raise RowError("chosen and rejected differ before their last turn")
    if chosen == rejected:
        raise RowError("identical chosen and rejected")
    if chosen[: len(before)] == before:  # some data sets repeat the prompt
        before = []
    before += chosen[:-1]
    if not before:
        raise RowError("missing field 'prompt'")
    is_text = isinstance(row.get("prompt"), str)
    name = "prompt/chosen/rejected" if is_text else "messages"
    return name, (before, chosen[-1][1], rejected[-1][1])


# === end: preferences ===


# === shared: model ===
# What ARCH_MODE stands for. load_settings takes the values of settings from here, where the user
# gave no others; model_config takes the fields of GPTConfig that are no settings.
ARCH_PRESETS = {
    "D": {},  # the defaults: GDN, and two layers of sliding-window attention with the same weights
    "gdn": dict(layer_pattern="g", num_layers=10),
    "hybrid": dict(layer_pattern="g g a a a a a a a a g"),  # of openai/parameter-golf PR 1895
    "baseline": dict(  # the first script of Parameter Golf
        layer_pattern="a", num_layers=9, mlp_mult=2.0, qk_gain_init=1.5, unet_skips=True
    ),
    "llama": dict(
        layer_pattern="a",
        num_layers=12,
        mlp="swiglu",
        mlp_mult=2.75,
        norm="rms_weight",
        qk_gain_init=0.0,
        residual_mix=False,
        logit_softcap=0.0,
        embed_init_std=0.02,
    ),
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
    mlp: str = "relu2"  # kind of MLP, see MLP.forward
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


def model_config(settings, vocab_size, bos_id, **overrides):
    """Return the GPTConfig of the network that `settings` ask for.

    A field's value is taken from `overrides`, else `settings`, else ARCH_PRESETS, else GPTConfig's
    default. LAYER_PATTERN is one word per layer, repeated or cut to NUM_LAYERS: g is Gated
    DeltaNet, s sliding-window attention, a full attention. Layers whose words have the same number
    share the mixer's weights (s1 ... s1); in capitals they share all of the layer's weights (A1 A2
    A1 A2: depth recurrence). NORM is repeated in the same way: a shared layer has the norms of its
    first place, and the last word is also the norm before the head.
    Raises UserError where the numbers do not fit together.
    """
    words = settings.layer_pattern.split()
    norms = getattr(settings, "norm", "rms").split()
    if not words or not all(re.fullmatch("[gsa][0-9]*|[GSA][0-9]+", word) for word in words):
        raise UserError(
            f"LAYER_PATTERN={settings.layer_pattern!r}: each word must be g, s or a, maybe with a "
            "number; capitals need one"
        )
    if not norms or set(norms) - set(NORMS):
        raise UserError(f"NORM={settings.norm!r}: must be one or more of {', '.join(NORMS)}")
    num_layers = settings.num_layers or len(words)

    names = GPTConfig.__dataclass_fields__
    given = {**ARCH_PRESETS[getattr(settings, "arch_mode", "D")], **vars(settings), **overrides}
    values = {name: value for name, value in given.items() if name in names}
    values |= dict(vocab_size=vocab_size, bos_id=bos_id)
    values["layers"] = " ".join((words * num_layers)[:num_layers])
    values["norms"] = " ".join((norms * num_layers)[:num_layers])
    config = GPTConfig(**values)

    dim = config.model_dim
    heads = config.num_heads
    if dim % (2 * heads):
        raise UserError(f"MODEL_DIM={dim}: must be a multiple of 2 x NUM_HEADS = {2 * heads}")
    if heads % config.num_kv_heads:
        raise UserError(
            f"NUM_HEADS={heads}: must be a multiple of NUM_KV_HEADS = {config.num_kv_heads}"
        )
    if config.rope_dims % 2 or config.rope_dims > dim // heads:
        raise UserError(
            f"ROPE_DIMS={config.rope_dims}: must be even, at most MODEL_DIM / NUM_HEADS = "
            f"{dim // heads}"
        )
    if config.positions == "learned" and getattr(settings, "eval_stateful", False):
        raise UserError("EVAL_STATEFUL=1: must be 0, for POSITIONS='learned' ends at TRAIN_SEQ_LEN")
    return config


def linear(x, weight):
    """Return x W^T in x's dtype; weights are kept in float32."""
    if hasattr(weight, "hessian"):  # section export calibrates GPTQ
        rows = x.flatten(0, -2).float()
        weight.hessian += rows.mT @ rows
    return F.linear(x, weight.to(x.dtype))


def scaled(x, scale):
    """Return x times a learned scale per channel, or x if the scale is None."""
    return x if scale is None else x * scale.to(x.dtype)


def matrix(splits, cols, std=0.0):
    """Return a parameter of matrices with `splits` rows, one below the other.

    Muon takes the matrices one by one. Entries are normal with deviation `std`; 0 means
    0.5 / sqrt(cols), with which normed inputs give outputs of deviation 0.5.
    """
    weight = nn.Parameter(torch.randn(sum(splits), cols) * (std or 0.5 * cols**-0.5))
    weight.splits = splits
    return weight


def rms_norm(x):
    """RMSNorm (arXiv 1910.07467) over the last dimension, without weights."""
    return F.rms_norm(x, x.shape[-1:])


class Norm(nn.Module):
    """One of NORMS: RMSNorm, plain or with weights; LayerNorm with weights and bias."""

    def __init__(self, kind, dim):
        super().__init__()
        self.weight = None if kind == "rms" else nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim)) if kind == "layer" else None

    def forward(self, x):
        """Return x (..., dim) normed, in its own dtype."""
        if self.bias is None:
            return scaled(rms_norm(x), self.weight)
        return scaled(F.layer_norm(x, x.shape[-1:]), self.weight) + self.bias.to(x.dtype)


def scan_outputs(w, u, k, decay, state, *others):
    """Return room for the outputs of gdn_scan or gdn_scan_adjoint, given their arguments."""
    return state.new_empty(len(w) + 1, *state.shape), torch.empty_like(u)


def gdn_scan(
    w: Tensor, u: Tensor, k: Tensor, decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the states S_0 ... S_N between chunks and what each chunk writes, first to last:

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
    """Return R_0 ... R_N, the gradients of gdn_scan's states, and those of u, last to first:

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


def keep_scan(ctx, inputs, output):
    """Keep what gdn_scan_backward needs."""
    w, _, k, decay, _ = inputs
    ctx.save_for_backward(w, k, decay, *output)


def gdn_scan_backward(ctx, d_states, d_new):
    """Return the gradients of gdn_scan's inputs; d_x is the gradient of x."""
    w, k, decay, states, new = ctx.saved_tensors
    direct = d_states[:-1].to(k.dtype)
    r, d_u = gdn_scan_adjoint(w, d_new.contiguous(), k, decay, d_states[-1], direct)
    d_w = (d_u @ states[:-1].to(k.dtype).mT).neg_()
    d_k = new @ r[1:].to(k.dtype).mT
    d_decay = (r[1:] * states[:-1]).sum((-1, -2), keepdim=True)
    return d_w, d_u, d_k, d_decay, r[0].clone()


# torch.compile calls a registered operator and does not trace it; it would unroll these loops. The
# first script imported into a process registers them for all: a second registration would free the
# first, and a handle to it would crash.
if not hasattr(torch.ops.underpar, "gdn_scan"):
    for scan in (gdn_scan, gdn_scan_adjoint):
        registered = torch.library.custom_op(f"underpar::{scan.__name__}", scan, mutates_args=())
        registered.register_fake(scan_outputs)  # the compiler learns the shapes from it
    torch.library.register_autograd(
        "underpar::gdn_scan", gdn_scan_backward, setup_context=keep_scan
    )
gdn_scan = torch.ops.underpar.gdn_scan.default
gdn_scan_adjoint = torch.ops.underpar.gdn_scan_adjoint.default


def split_chunks(x, chunk):
    """Return x (B, T, H, D) in chunks of tokens, (N, B * H, chunk, D); zeros fill the last one.

    A padded token has k = 0, v = 0 and g = 0: it leaves the state as it is.
    """
    x = F.pad(x, (0, 0, 0, 0, 0, -x.size(1) % chunk))
    return x.unflatten(1, (-1, chunk)).movedim((1, 3), (0, 2)).flatten(1, 2)


def gdn_chunk(q, k, v, g, beta, state=None, chunk=32):
    """Return Gated DeltaNet's outputs o and last state, by matrix products over chunks of tokens.

    The same token by token (arXiv 2412.06464, section 3), with a = exp(g) <= 1:

        S' = a S + beta k (v - a S^T k)^T
        o = S'^T q

    q and k (B, T, H, K) are L2-normed, q is scaled by K**-0.5 too; v and o (B, T, H, V) have their
    dtype, which is float64, float32 or bfloat16. g and beta (B, T, H) and the state (B, H, K, V)
    are float32, or float64; no state means zeros. Chunks of 32 are the fastest on a CPU.

    In chunks of C tokens, with KB = beta K, VB = beta V, G the running sum of g from the chunk's
    start, and D_ij = exp(G_i - G_j) for i >= j, else 0:

        A = tril(KB K^T * D, -1)     T = (I + A)^-1     U = T VB     W = T (exp(G) KB)
        new, S from the scan over chunks, which writes by K_out = exp(G_C - G) K
        O = exp(G) Q S + P new       P = Q K^T * D
    """
    b, t, h, dim_k = q.shape
    dtype = v.dtype
    if state is None:
        state = g.new_zeros(b, h, dim_k, v.size(-1))
    inputs = (q, k, v, g[..., None], beta[..., None].to(dtype))
    q, k, v, g, beta = (split_chunks(x, chunk) for x in inputs)
    # Autocast would round the inverse and the state to bfloat16.
    with torch.autocast(v.device.type, enabled=False):
        # float64: after strong decay a difference of float32 sums would have few digits left.
        total = g.double().cumsum(-2)
        grow = total.to(g.dtype).exp()
        shrink = (total[..., -1:, :] - total).to(g.dtype).exp()
        gap = (total - total.mT).to(g.dtype)  # (N, M, C, C)
        # Above the diagonal exp would overflow; below it no gap is positive. On it D is constant:
        # a gradient through exp(G_i - G_i) would cancel only up to rounding.
        eye = torch.eye(chunk, dtype=g.dtype, device=g.device)
        d = gap.clamp(max=0).exp().tril(-1) + eye
        # The solver reads A below its diagonal only. Neumann's product and Newton's iteration
        # would not do: powers of A grow to NaN when keys are correlated.
        kb = beta * k
        a = (kb @ k.mT).to(g.dtype) * d
        inverse = torch.linalg.solve_triangular(a, eye, upper=False, unitriangular=True).to(dtype)
        u = inverse @ (beta * v)
        w = inverse @ (kb * grow).to(dtype)
        k_out = (k * shrink).to(dtype)
        states, new = gdn_scan(w, u, k_out, grow[..., -1:, :], state.flatten(0, 1))
        p = ((q @ k.mT) * d).to(dtype)
        o = (q * grow).to(dtype) @ states[:-1].to(dtype) + p @ new
    o = o.unflatten(1, (b, h)).movedim((0, 2), (1, 3)).flatten(1, 2)  # (B, N * C, H, V)
    return o[:, :t], states[-1].view_as(state)


def short_conv(x, weight, doc):
    """Return SiLU of a causal depthwise convolution, for the last T tokens of x.

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

    def __init__(self, config):
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
        dt = log_dt.exp()
        self.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))  # softplus(dt_bias) = dt
        self.norm = nn.Parameter(torch.ones(self.head_dim))

    def forward(self, x, doc, positions, cache):
        """Return (B, T, dim) for x (B, T, dim); doc (B, taps-1 + T), positions: see GPT.context."""
        T, dim = x.shape[1:]
        qkv, gate = linear(x, self.w_qkvg).split([3 * dim, dim], dim=-1)
        # In front stand the tokens that the convolution reaches; before a text there are none.
        qkv = cache.extend(qkv) if cache else F.pad(qkv, (0, 0, CONV_TAPS - 1, 0))
        qkv = short_conv(qkv, self.conv, doc)
        q, k, v = qkv.unflatten(-1, (3, self.heads, self.head_dim)).unbind(-3)  # (B, T, H, D)
        # In float32, since a key longer than 1 lets the state grow. Without the epsilon a key of
        # zeros would get gradients of 1e12.
        wide = self.ab.dtype
        q = q * torch.rsqrt(q.to(wide).square().sum(-1, keepdim=True) + 1e-6)
        k = k * torch.rsqrt(k.to(wide).square().sum(-1, keepdim=True) + 1e-6)
        q = q.to(v.dtype) * self.head_dim**-0.5
        a, b = linear(x.to(wide), self.ab).split(self.heads, dim=-1)  # (B, T, H)
        g = -self.A_log.exp() * F.softplus(a + self.dt_bias)
        begins_document = doc[:, -T:] != doc[:, -T - 1 : -1]
        g = torch.where(begins_document[..., None], DOCUMENT_DECAY, g)
        inputs = q, k.to(v.dtype), v, g, torch.sigmoid(b)
        if cache:
            o = cache.recur(*inputs)
        else:
            o, _ = gdn_chunk(*inputs, chunk=64 if x.is_cuda else 32)
        o = scaled(rms_norm(o), self.norm).flatten(-2) * F.silu(gate)
        return linear(o, self.w_o)


def rotate(x, positions, dims):
    """Return x (B, T, H, D) with its first `dims` dimensions rotated by positions (T,) or (B, T).

    Rotary positions (arXiv 2104.09864), paired as in GPT-NeoX.
    """
    half = dims // 2
    exponent = torch.arange(half, device=x.device) / half  # float32
    angle = positions[..., None, None] * ROPE_BASE**-exponent  # (T, 1, half)
    cos = angle.cos().to(x.dtype)
    sin = angle.sin().to(x.dtype)
    left, right, same = x.split([half, half, x.size(-1) - dims], dim=-1)
    return torch.cat([left * cos - right * sin, left * sin + right * cos, same], dim=-1)


def attend(q, k, v, doc, window):
    """Return causal attention inside documents (B, H, T, D).

    q (B, H, T, D), k and v (B, Hkv, T, D), doc (B, T). Query i sees key j if 0 <= i - j < window
    and both are of one document. Blocks of queries skip the keys that none of them sees, which on a
    CPU is 3 times as fast as one masked call at T = 4 windows.
    """
    dtype = q.dtype
    T = q.size(2)
    if q.is_cuda:  # there the kernels that take a mask do not take grouped heads
        k, v = (x.repeat_interleave(q.size(1) // k.size(1), dim=1) for x in (k, v))
    else:  # a CPU's backward pass takes 4 times as long in bfloat16
        q, k, v = (x.to(torch.promote_types(dtype, torch.float32)) for x in (q, k, v))
    places = torch.arange(T, device=q.device)
    step = max(64, min(window, T, 4096) // 4)  # a mask of longer blocks would need much memory
    outputs = []
    for start in range(0, T, step):
        queries = slice(start, start + step)
        keys = slice(max(0, start - window + 1), start + step)  # those that a query may see
        distance = places[queries, None] - places[keys]
        same_doc = doc[:, queries, None] == doc[:, None, keys]
        mask = ((distance >= 0) & (distance < window) & same_doc)[:, None]
        block = q[:, :, queries], k[:, :, keys], v[:, :, keys]
        outputs.append(F.scaled_dot_product_attention(*block, mask, enable_gqa=not q.is_cuda))
    return torch.cat(outputs, dim=2).to(dtype)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions, and queries and keys that are RMS-normed."""

    def __init__(self, config, window):
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

    def forward(self, x, doc, positions, cache):
        """Return (B, T, dim) for x (B, T, dim); the other arguments as in GatedDeltaNet."""
        T = x.size(1)
        qkv = linear(x, self.w_qkv).unflatten(-1, (-1, self.head_dim))
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=2)  # (B, T, H, D)
        if self.q_gain is not None:
            q = scaled(rms_norm(q), self.q_gain[:, None])
            k = rms_norm(k)
        q = rotate(q, positions, self.rope_dims)
        k = rotate(k, positions, self.rope_dims)
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))  # (B, H, T, D)
        if cache:
            o = cache.attend(q, k, v, self.window)
        else:
            o = attend(q, k, v, doc[:, -T:], self.window)
        return linear(o.transpose(1, 2).flatten(2), self.w_o)


def init_wave(units):
    """Return omega ~ N(1, 0.1), phi ~ N(0, 0.1) and b = 0 for `oscillate`, (3, units)."""
    wave = 0.1 * torch.randn(3, units)
    wave[0] += 1.0
    wave[2] = 0.0
    return nn.Parameter(wave)


def oscillate(x, wave):
    """Return sin(omega x + phi) tanh(x) + b per unit, for x (..., units) and wave (3, units).

    The activation of WiggleGPT (Eden-Eldith/WiggleGPT, model_bio.py).
    """
    omega, phi, b = wave.to(x.dtype)
    return torch.sin(omega * x + phi) * torch.tanh(x) + b


class MLP(nn.Module):
    """Two matrices around an activation.

    A new kind is a word in the choices of the setting `mlp` and a branch in `forward`. Matrices of
    its own are named w_*, which the optimizer and the artifact go by (tensor_class).

    ReLU^2 is of arXiv 2109.08668, SwiGLU (with a gate) of 2002.05202, bio of WiggleGPT; bio_soft
    adds its SparseEventLayer (model_bio_optimized.py) with soft events, without biases.
    """

    def __init__(self, config):
        super().__init__()
        dim = config.model_dim
        hidden = int(config.mlp_mult * dim)
        self.kind = config.mlp
        self.w_up = matrix((hidden, hidden) if self.kind == "swiglu" else (hidden,), dim)
        if self.kind.startswith("bio"):
            self.wave = init_wave(hidden)
        if self.kind == "bio_soft":
            self.w_gate = matrix((hidden,), hidden)
            self.w_mix = matrix((hidden,), hidden)
            self.mix_wave = init_wave(hidden)
        self.w_down = nn.Parameter(torch.zeros(dim, hidden))

    def forward(self, x):
        """Return (B, T, dim) for x (B, T, dim)."""
        h = linear(x, self.w_up)
        if self.kind == "relu2":
            h = F.relu(h).square()
        elif self.kind == "leaky_relu2":
            h = F.leaky_relu(h, 0.5).square()
        elif self.kind == "gelu":
            h = F.gelu(h)
        elif self.kind == "swiglu":
            gate, up = h.chunk(2, dim=-1)
            h = F.silu(gate) * up
        elif self.kind == "bio":
            h = oscillate(h, self.wave)
        elif self.kind == "bio_soft":
            h = self.sparse_events(oscillate(h, self.wave))
        else:
            raise ValueError(f"mlp={self.kind!r}: no such kind")
        return linear(h, self.w_down)

    def sparse_events(self, h):
        """Return hidden units (B, T, hidden) mixed by those of h whose voltage is high."""
        voltage = torch.sigmoid(linear(h, self.w_gate))
        spike = torch.sigmoid(5.0 * (voltage - BIO_THRESHOLD))
        return oscillate(linear(h * spike, self.w_mix), self.mix_wave)


class Block(nn.Module):
    """A layer without its mixer, which may be shared: norms, MLP, and learned scales."""

    def __init__(self, config, norm):
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
        """Return the residual stream behind the layer (B, T, dim).

        x is the stream before it, x0 the embedding, context the mixer's further arguments.
        """
        if self.mix is not None:
            x = scaled(x, self.mix[0]) + scaled(x0, self.mix[1])
        x = x + scaled(mixer(self.mixer_norm(x), *context), self.mixer_scale)
        return x + scaled(self.mlp(self.mlp_norm(x)), self.mlp_scale)


class GPT(nn.Module):
    """The language model: embedding, layers, norm, and a head with a soft cap."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        # The dtype of activations; weights are float32. None means bfloat16 on CUDA, and on a CPU
        # that of the weights.
        self.dtype = None
        # Whether a layer's activations are computed again in the backward pass, to save memory.
        self.activation_checkpointing = False
        self.compiled = False  # whether a Decoder compiles its steps
        dim = config.model_dim
        self.embed = matrix((config.vocab_size,), dim, config.embed_init_std)
        self.head = None
        if not config.tie_embeddings:
            self.head = nn.Parameter(torch.zeros_like(self.embed))
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
        mixers = {}
        blocks = {}
        self.layers = []  # a block and a mixer per layer
        for place, (word, norm) in enumerate(zip(words, norms, strict=True)):
            mixer_name = word if word[1:] else place
            block_name = word if word.isupper() else place
            if mixer_name not in mixers:
                window = config.attn_window if word[0] in "sS" else FULL_WINDOW
                is_gdn = word[0] in "gG"
                mixers[mixer_name] = GatedDeltaNet(config) if is_gdn else Attention(config, window)
            if block_name not in blocks:
                blocks[block_name] = Block(config, norm)
            self.layers.append((blocks[block_name], mixers[mixer_name]))
        self.mixers = nn.ModuleList(mixers.values())
        self.blocks = nn.ModuleList(blocks.values())
        self.final_norm = Norm(norms[-1], dim)

    def context(self, ids):
        """Return doc, previous and positions for ids (B, T) at the beginning of texts.

        doc (B, CONV_TAPS-1 + T): the number of each token's document; in front stand the places
        that the convolution of the first token reaches. previous (B, T): the id before each id.
        positions (T,): 0, 1, 2 ...
        """
        doc = F.pad((ids == self.config.bos_id).cumsum(dim=1), (CONV_TAPS - 1, 0))
        previous = F.pad(ids, (1, 0), value=self.config.bos_id)[:, :-1]
        return doc, previous, torch.arange(ids.size(1), device=ids.device)

    def features(self, ids, cache=None):
        """Return what the head reads (B, T, dim), for ids (B, T).

        With a cache, ids go on with the texts that it holds (see Decoder in section generation).
        """
        config = self.config
        if config.positions == "learned" and ids.size(1) > config.train_seq_len:
            raise UserError(
                f"POSITIONS='learned': {ids.size(1)} tokens in a text, at most TRAIN_SEQ_LEN="
                f"{config.train_seq_len}"
            )
        doc, previous, positions = (cache or self).context(ids)
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

        recompute = self.activation_checkpointing and torch.is_grad_enabled()
        half = len(self.layers) // 2
        skips = []
        x0 = x
        for place, (block, mixer) in enumerate(self.layers):
            if skips and place >= half:
                skip = skips.pop()
                x = x + scaled(skip, self.skip[len(skips)])
            run = functools.partial(checkpoint, block, use_reentrant=False) if recompute else block
            x = run(x, x0, mixer, doc, positions, cache.layers[place] if cache else None)
            if config.unet_skips and place < half:
                skips.append(x)
        return self.final_norm(x)

    def logits(self, x):
        """Return logits (..., V), float32 at least, of features x (..., dim)."""
        logits = linear(x, self.embed if self.head is None else self.head)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        cap = self.config.logit_softcap
        return cap * torch.tanh(logits / cap) if cap else logits

    def forward(self, ids, targets=None):
        """Return the nats of targets (B, T) after ids (B, T), 0 for -1; or logits (B, T, V)."""
        logits = self.logits(self.features(ids))
        if targets is None:
            return logits
        losses = F.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="none"
        )
        return losses.view_as(targets)


# === end: model ===


# === shared: lora ===
class Lora(nn.Module):
    """W + alpha / rank B A in place of a matrix W (out, in): LoRA, arXiv 2106.09685.

    It is a parametrization, which keeps W as `original`. A (rank, in) is normal with the standard
    deviation in**-0.5, and B (out, rank) is 0: a new adapter changes nothing, bit for bit.
    """

    def __init__(self, weight, rank, alpha):
        super().__init__()
        rows, columns = weight.shape
        self.lora_a = nn.Parameter((torch.randn(rank, columns) * columns**-0.5).to(weight))
        self.lora_b = nn.Parameter(weight.new_zeros(rows, rank))
        self.register_buffer("scale", weight.new_tensor(alpha / rank))

    def forward(self, weight):
        return torch.addmm(weight, self.scale * self.lora_b, self.lora_a)


def setup_lora_adapter(model, rank=8, alpha=16.0):
    """Put an adapter on every matrix of mixers and MLPs, and return the model.

    Mixers or MLPs that layers share have one adapter. Every forward computes the sums again:
    generate under torch.no_grad() and parametrize.cached(). Raises UserError if the model has
    adapters already.
    """
    matrices = [
        name
        for name, _ in model.named_parameters()
        if re.fullmatch(r"(mixers|blocks)\.[\w.]*\bw_\w+", name)
    ]
    if not matrices:
        raise UserError("setup_lora_adapter: the model has adapters; merge_lora(model) first")
    for name in matrices:
        path, _, last = name.rpartition(".")
        module = model.get_submodule(path)
        adapter = Lora(getattr(module, last), rank, alpha)
        parametrize.register_parametrization(module, last, adapter)
    return model


@torch.no_grad()
def merge_lora(model):
    """Add the adapters to the weights, as QAT and export need it, and return the plain model."""
    for module in list(model.modules()):
        if not parametrize.is_parametrized(module):
            continue
        weights = {name: part.original for name, part in module.parametrizations.items()}
        merged = {name: getattr(module, name).clone() for name in weights}
        # torch's own removal changes the class, which copies of the module share.
        module.__class__ = type(module).__base__
        del module.parametrizations
        for name, weight in weights.items():
            weight.copy_(merged[name])
            setattr(module, name, weight)
    return model


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


@dataclass
class Coded:
    """A quantized tensor: weight = code * scale."""

    codes: Tensor  # int8 (R, C), of size 2**(bits - 1) - 1 at most
    scale: Tensor  # float16 (1,)
    bits: int


def tensor_class(name, tensor):
    """Return "matrix", "embedding" or "control", by the last part of the tensor's dotted name.

    "w_*" is a matrix; "*embed*", "head" and "ab" (GDN's decay and step size) are embeddings. All
    other tensors are controls: few weights that scale whole channels. So is every tensor with fewer
    than 16 rows or columns, seen as (shape[0], the other dimensions).
    """
    if tensor.ndim < 2 or min(tensor.flatten(1).shape) < 16:
        return "control"
    # Under a LoRA adapter PyTorch calls the weight itself NAME.original.
    last = name.removesuffix(".original").rsplit(".", 1)[-1]
    if last.startswith("w_"):
        return "matrix"
    return "embedding" if "embed" in last or last in ("head", "ab") else "control"


def round_to(w, scale, bits):
    """Return the codes nearest to w / scale, as floats; a scale of 0 gives codes of 0."""
    qmax = 2 ** (bits - 1) - 1
    return (w / torch.where(scale > 0, scale, 1.0)).round_().clamp_(-qmax, qmax)


def quantize(w, bits, clip_sigmas):
    """Return codes int8 (R, C) and the scale float16 (1,) of w (R, ...).

    The largest code stands for `clip_sigmas` root mean squares of w. The root mean square is not
    about the mean, so a constant tensor does not vanish. If w is not finite, neither is the scale.
    """
    rows = w.flatten(1).float()
    sigma = rows.square().mean().sqrt().view(1)
    scale = (sigma * clip_sigmas / (2 ** (bits - 1) - 1)).half()
    return round_to(rows, scale, bits).to(torch.int8), scale


def dequantize(codes, scale):
    """Return code * scale, float32 (R, C): 8 by 11 bits, so exact on every machine."""
    return codes.float() * scale


def quant_table(settings):
    """Return the quantizers that a run begins with: tensor class -> arguments of `quantize`."""
    return {
        "matrix": {"bits": settings.matrix_bits, "clip_sigmas": MATRIX_CLIP_SIGMAS},
        "embedding": {"bits": EMBED_BITS, "clip_sigmas": EMBED_CLIP_SIGMAS},
    }


def quantize_all(tensors, table):
    """Return name -> Coded of those tensors whose class the table has: nearest codes."""
    coded = {}
    for name, w in tensors.items():
        quantizer = table.get(tensor_class(name, w))
        if quantizer:
            coded[name] = Coded(*quantize(w, **quantizer), quantizer["bits"])
    return coded


@contextlib.contextmanager
def swapped(params, values):
    """Inside, `params` hold `values`; afterwards, also after an exception, their old values."""
    params = [param.detach() for param in params]  # the same memory, which may be written in place
    originals = [param.clone() for param in params]
    try:
        for param, value in zip(params, values, strict=True):
            param.copy_(value)
        yield
    finally:
        for param, original in zip(params, originals, strict=True):
            param.copy_(original)


def decoded(tensors, coded):
    """Return a context in which the coded tensors hold the weights that their codes stand for."""
    values = (dequantize(c.codes, c.scale).view_as(tensors[name]) for name, c in coded.items())
    return swapped([tensors[name] for name in coded], values)


def quantized(network, table):
    """Return a context in which weights are what the artifact would give back, for training.

    This holds for forward and backward. No flag in the model changes, so compiled code is not
    traced again. The gradient at the quantized weight q(w) is applied to w: this is the straight-
    through estimator (Bengio et al., arXiv:1308.3432), w + (q(w) - w).detach().
    """
    tensors = network.state_dict()
    return decoded(tensors, quantize_all(tensors, table))


def count_parameters(network):
    """Return the number of parameters of each tensor class, and in total."""
    counts = collections.Counter()
    for name, param in network.named_parameters():
        counts[tensor_class(name, param)] += param.numel()
    counts["total"] = counts.total()
    return counts


# === end: quantization ===


# === shared: artifact ===
# An artifact is one file:
#
#   magic, version u32, length of the header u32     little endian
#   header                                           JSON in a zstd frame
#   streams, without gaps                            each is a zstd frame of an array
#   SHA-256 of all before it
#
# The header lists the streams in their order, with name, shape, dtype (as numpy writes it) and
# length. The first three belong to the coder, the others are the tensors:
#
#   lane_states u32 (lanes,)    states of the coder at which decoding begins
#   tables u16 (97, 256)        frequencies of the symbols, code & 255
#   sizes u8                    of each tensor in words: a size per row, then a size per column
#   a control                   float16, or float32
#   a quantized tensor          with "scale" and "bits": codes int8, or words u16
#
# Words are of range ANS (Duda, arXiv:1311.2540) in interleaved lanes: code i of a tensor is in lane
# i % lanes. The states run on from tensor to tensor, and end at 2**16. In trained matrices rows
# differ in size, and so do columns that read hidden units; given both sizes, codes are nearly
# normal. So the code at row r and column c is coded by table sizes[r] + sizes[c], which saves 5% of
# the bytes (docs/lab.md, 2026-11-21).
ARTIFACT_PREFIX = struct.Struct("<8sII")
ARTIFACT_MAGIC = b"UNDERPAR"
ARTIFACT_VERSION = 7
# Level 6 takes up to 0.5% fewer bytes than 3; from 12 on it is slow.
ARTIFACT_ZSTD = zstandard.ZstdCompressor(level=6)
RANS_BITS = 14  # rounding frequencies costs 20 bytes per million codes; at 12 bits 150
RANS_TOTAL = 1 << RANS_BITS
RANS_LOW = 1 << 16  # states stay in [2**16, 2**32), so a step moves at most one 16-bit word


class ArtifactError(ValueError):
    """The artifact is damaged, or the file is none; one line that names the damaged part."""


def require(condition, message):
    """Raise ArtifactError(message) unless the condition holds."""
    if not condition:
        raise ArtifactError(message)


def rans_table(counts):
    """Return frequencies uint16 (256,), of sum 2**14, for symbols that occur counts (256,) times.

    Each symbol that occurs has 1 and its share of what is left. The first two symbols count as if
    they occurred, because a single symbol with all of 2**14 would overflow a state.
    """
    counts = counts.astype(np.float64)
    counts[:2] += 1e-9
    present = counts > 0
    ends = np.cumsum(counts) / counts.sum() * (RANS_TOTAL - present.sum())
    # Rounded ends of the symbols' ranges add up, which rounded shares would not.
    return (present + np.diff(np.rint(ends), prepend=0)).astype(np.uint16)


class RansCoder:
    """Codes symbols by tables, in integers only; `states` uint32 (lanes,) move on in place.

    Range ANS is a stack: what is to be decoded first is encoded last.
    """

    def __init__(self, states, tables):
        """tables uint16 (K, 256), made by rans_table. Raises ArtifactError if one is not whole."""
        require((tables.sum(1, dtype=np.int64) == RANS_TOTAL).all(), "a table's sum is not 2**14")
        self.states = states
        # The low 14 bits of a state are a slot. A symbol has as many slots as its frequency says.
        # Slots are numbered through all tables, and `first` is a symbol's first one.
        self.frequency = tables.astype(np.uint32).reshape(-1)
        self.first = np.cumsum(self.frequency, dtype=np.uint32) - self.frequency
        # Of each slot, `steps` has the frequency of its symbol in the upper 16 bits and the slot's
        # place among those of the symbol in the lower: one look-up is 1.5 times as fast as two.
        slots = np.arange(self.frequency.sum(), dtype=np.uint32)
        places = slots - np.repeat(self.first, self.frequency)
        self.steps = np.repeat(self.frequency << 16, self.frequency) | places
        symbols = np.arange(len(self.frequency)).astype(np.uint8)
        self.symbols = np.repeat(symbols, self.frequency)

    def encode(self, pairs):
        """Return words uint16, in the order of decoding, of pairs (n,): table << 8 | symbol."""
        frequency = self.frequency.take(pairs)
        start = self.first.take(pairs) % RANS_TOTAL
        lanes = len(self.states)
        chunks = [np.empty(0, np.uint16)]
        for begin in reversed(range(0, len(pairs), lanes)):
            f = frequency[begin : begin + lanes]
            x = self.states[: len(f)]  # a view; the last symbols may need only some of the lanes
            full = x >= f << (32 - RANS_BITS)
            chunks.append(x[full].astype(np.uint16))
            x[full] >>= 16
            # x becomes (x // f << 14) + x % f + start, where x % f is x - x // f * f
            x += x // f * (RANS_TOTAL - f) + start[begin : begin + lanes]
        return np.concatenate(chunks[::-1])

    def decode(self, tables, words):
        """Return the symbols uint8 (n,) that `tables` (n,) code in `words`, or ArtifactError."""
        slots = tables.astype(np.int64) << RANS_BITS
        lanes = len(self.states)
        for begin in range(0, len(slots), lanes):
            slot = slots[begin : begin + lanes]
            x = self.states[: len(slot)]
            slot += x & (RANS_TOTAL - 1)
            step = self.steps.take(slot, mode="clip")
            x >>= RANS_BITS
            x *= step >> 16
            x += step & 0xFFFF
            low = np.flatnonzero(x < RANS_LOW)
            x[low] = x[low] << 16 | words[: len(low)]
            words = words[len(low) :]
        require(len(words) == 0, "rANS words are left over")
        return self.symbols.take(slots)


def size_numbers(mean_squares):
    """Return sizes uint8, from 0 to 48, of mean squares: quarter octaves of their roots."""
    octaves = np.log2(np.clip(mean_squares, 2**-8, 2**16))
    return np.rint(2 * octaves + 16).astype(np.uint8)


def code_by_rans(codes):
    """Return the arrays that codes (name -> int8 (R, C)) are stored as, by name.

    First come the coder's own arrays, then for each tensor its rANS words, or else its codes.
    """
    pairs = {}
    sizes = [np.empty(0, np.uint8)]
    counts = np.zeros((97, 256), np.int64)  # by table and symbol, of all tensors
    for name, array in codes.items():
        power = np.square(array, dtype=np.float32)
        rows = size_numbers(power.mean(1))
        columns = size_numbers(power.mean(0) / max(power.mean(), 1e-9))
        tables = np.add.outer(rows, columns).astype(np.int32)
        symbols = (tables << 8 | array.view(np.uint8)).reshape(-1)
        count = np.bincount(symbols, minlength=counts.size).reshape(counts.shape)
        total = np.maximum(1, count.sum(1, keepdims=True))
        entropy = (count * np.log2(total / np.maximum(1, count))).sum() / 8  # in bytes
        # zstd is shorter where rows are alike, as an embedding's of tokens that rarely occur.
        if entropy < len(ARTIFACT_ZSTD.compress(array.tobytes())):
            pairs[name] = symbols
            sizes += [rows, columns]
            counts += count
    # Lanes move side by side, so many are fast; each of them costs 2 bytes.
    lanes = min(1024, max(8, int(counts.sum()) // 8192))
    states = np.full(lanes, RANS_LOW, np.uint32)
    tables = np.stack([rans_table(count) for count in counts])
    coder = RansCoder(states, tables)
    words = {name: coder.encode(pairs[name]) for name in reversed(pairs)}
    arrays = {"lane_states": states, "tables": tables, "sizes": np.concatenate(sizes)}
    return {**arrays, **codes, **words}


def pack_artifact(tensors, coded, **header):
    """Return the artifact of `tensors`, those of `coded` as codes.

    header: settings, which rebuild the model, tokenizer_sha256 and meta, which is anything; JSON.
    The same input gives the same bytes. Raises ArtifactError if a tensor is not finite as stored.
    """
    arrays = code_by_rans({name: part.codes.cpu().numpy() for name, part in coded.items()})
    for name, tensor in tensors.items():
        if name not in coded:
            dtype = torch.float32 if name.endswith(FLOAT32_CONTROLS) else torch.float16
            arrays[name] = tensor.detach().to(dtype).cpu().numpy()

    payloads = b""
    records = {}
    for name, array in arrays.items():
        payload = ARTIFACT_ZSTD.compress(array.tobytes())
        shape = tensors[name].shape if name in tensors else array.shape
        record = {"shape": shape, "dtype": array.dtype.str, "length": len(payload)}
        if name in coded:
            record |= {"bits": coded[name].bits, "scale": coded[name].scale.item()}
        is_finite = np.isfinite(record.get("scale", array)).all()
        require(is_finite, f"tensor {name}: must be finite as it is stored")
        records[name] = record
        payloads += payload
    text = json.dumps({**header, "streams": records})
    frame = ARTIFACT_ZSTD.compress(text.encode())
    prefix = ARTIFACT_PREFIX.pack(ARTIFACT_MAGIC, ARTIFACT_VERSION, len(frame))
    data = prefix + frame + payloads
    return data + hashlib.sha256(data).digest()


def read_streams(data, max_weights):
    """Return header and arrays (name -> flat) of an artifact. Raises ArtifactError if damaged."""
    require(data.startswith(ARTIFACT_MAGIC), "is no underpar artifact")
    _, version, length = ARTIFACT_PREFIX.unpack_from(data)
    require(version == ARTIFACT_VERSION, f"version {version}, this code reads {ARTIFACT_VERSION}")
    require(hashlib.sha256(data[:-32]).digest() == data[-32:], "damaged: the SHA-256 is wrong")
    file = io.BytesIO(data[ARTIFACT_PREFIX.size : -32])
    frame = file.read(length)
    header = json.loads(zstandard.ZstdDecompressor().stream_reader(frame).read(1 << 24))
    arrays = {}
    for name, record in header["streams"].items():
        payload = file.read(record["length"])
        # The shapes bound all that is allocated. A size of 0 counts as 1, or it would hide others.
        weights = math.prod(max(1, size) for size in record["shape"])
        max_weights -= weights
        fits = min([max_weights, *record["shape"]]) >= 0
        require(fits, f"{name!r} has a negative size, or exceeds the limit of weights")
        raw = zstandard.ZstdDecompressor().stream_reader(payload).read(4 * weights + 1)
        arrays[name] = np.frombuffer(raw, record["dtype"]).copy()
    return header, arrays


def read_artifact(path, max_weights=1 << 30):
    """Return the header, the tensors by name in float32, and `coded` as it was written.

    Bit-exact on every machine. Memory is bounded by the file, at most max_weights numbers and
    weights, and the decoding of one tensor. Raises ArtifactError, one line that names the file, if
    anything is not as it was written.
    """
    data = Path(path).read_bytes()
    tensors = {}
    coded = {}
    try:
        header, arrays = read_streams(data, max_weights)
        states, tables, sizes = [arrays.pop(name) for name in ("lane_states", "tables", "sizes")]
        coder = RansCoder(states, tables.reshape(-1, 256))
        for name, array in arrays.items():
            record = header["streams"][name]
            shape = record["shape"]
            if array.dtype == np.uint16:
                height, *width = shape
                ends = [height, height + math.prod(width)]
                rows, columns, sizes = np.split(sizes, ends)
                contexts = np.add.outer(rows, columns).reshape(-1)
                array = coder.decode(contexts, array).view(np.int8)
            values = torch.from_numpy(array).view(shape)
            if "scale" in record:
                scale = torch.tensor([record["scale"]], dtype=torch.float16)
                coded[name] = Coded(values.flatten(1), scale, record["bits"])
                values = dequantize(values, scale)
            tensors[name] = values.float()
        require((states == RANS_LOW).all(), "the lanes do not end at 2**16")
    except Exception as error:  # a file that only claims to be an artifact may raise anything
        reason = str(error) if isinstance(error, ArtifactError) else repr(error)
        raise ArtifactError(f"{path}: {reason}") from None
    return header, tensors, coded


# === end: artifact ===


# === shared: weights ===
def with_roles(tokenizer):
    """Return the tokenizer with tokens for the roles, four more if it has none. Its file stays."""
    if tokenizer.roles:
        return tokenizer
    count = len(ROLE_TOKENS)
    return replace(
        tokenizer,
        pieces=tokenizer.pieces + [b""] * count,
        drops_space=np.append(tokenizer.drops_space, [False] * count),
        roles={role: tokenizer.vocab_size + i for i, role in enumerate(ROLE_TOKENS)},
    )


def load_model(name, path, tokenizer_path=""):
    """Return a network, on the CPU, its tokenizer and the file that they are from.

    path: an artifact, a checkpoint, or a run: its artifact, or the newest whole checkpoint while it
    has none. name: the setting that a UserError blames.
    """
    file = Path(path)
    if path and (file / "model.upar").is_file():
        file = file / "model.upar"
    if path and file.is_dir():
        candidates = list_checkpoints(file) or [file]
        file, faults = newest_checkpoint(candidates, ("meta.json", "model.pt"))
        if file is None:
            raise UserError(
                f"{name}={path!r}: neither model.upar nor a whole checkpoint; {'; '.join(faults)}"
            )
        meta = json.loads((file / "meta.json").read_bytes())
        shape = meta.get("identity") or meta["shape"]  # of a run, or of what quantize.py unpacked
        tensors = torch.load(file / "model.pt", map_location="cpu", weights_only=True)
        beside = [*file.parent.glob("tokenizer.model"), *file.parent.glob("*.tiktoken")]
        sha256 = sha256_file(beside[0]) if beside else None
    else:
        try:
            header, tensors, _ = read_artifact(file)
        except (ArtifactError, OSError) as error:
            raise UserError(
                f"{name}={path!r}: must be a run, a checkpoint or an artifact; {error}"
            ) from None
        shape = header["settings"]
        beside = [file.parent / header["meta"]["tokenizer"]]
        sha256 = header["tokenizer_sha256"]

    tokenizer = load_tokenizer(tokenizer_path or (beside or ["bytes"])[0])
    vocab_size = shape["vocab_size"]
    if vocab_size == tokenizer.vocab_size + len(ROLE_TOKENS):
        tokenizer = with_roles(tokenizer)  # post-training has added them
    if sha256 not in (None, tokenizer.sha256) or tokenizer.vocab_size != vocab_size:
        raise UserError(
            f"TOKENIZER_PATH={tokenizer_path!r}: {tokenizer.file} with {tokenizer.vocab_size} "
            f"tokens is not the one of {file}, which has {vocab_size}"
        )
    network = GPT(GPTConfig(**{field: shape[field] for field in GPTConfig.__dataclass_fields__}))
    ranks = [len(tensor) for key, tensor in tensors.items() if key.endswith(".lora_a")]
    if ranks:
        setup_lora_adapter(network, ranks[0])
    if "w_value" in tensors:
        add_value_head(network)
    network.load_state_dict(tensors)
    return network, tokenizer, str(file)


def add_value_head(network):
    """Give the network `w_value` (dim,), zeros. Times the features it is a reward or a value."""
    network.w_value = nn.Parameter(torch.zeros_like(network.embed[0]))


# === end: weights ===


# === shared: generation ===
ROOM = 64  # tokens for which a Decoder makes room at a time


@dataclass
class Sample:
    """What followed a prompt. Greedy tokens have a log-probability of 0."""

    ids: list[int]  # a stop token included
    logps: list[float]  # log-probabilities of the ids where they were drawn
    finished: bool  # whether a stop token ended it


def gdn_step(q, k, v, g, beta, state):
    """Return Gated DeltaNet's output o and the next state for one token: the formula of gdn_chunk.

    q and k (B, H, K), v and o (B, H, V), g and beta (B, H), state (B, H, K, V). With S the state
    and a = exp(g), o = a S^T q + (q . k) delta, so that the state is read once for q and k.
    """
    dtype = v.dtype
    q, k, v = (x.to(state.dtype) for x in (q, k, v))
    decay = g.exp()[..., None, None]
    read = decay * (torch.stack([k, q], dim=-2) @ state)  # (B, H, 2, V)
    delta = beta[..., None] * (v - read[..., 0, :])
    o = read[..., 1, :] + (q * k).sum(-1, keepdim=True) * delta
    return o.to(dtype), torch.addcmul(state * decay, k[..., None], delta[..., None, :])


class LayerCache:
    """What a layer keeps of the texts so far: tensors by name, a row for each text.

    They are written in place, because a CUDA graph reads and writes the same memory at each replay.
    """

    def __init__(self, decoder):
        self.decoder = decoder
        self.kept = {}

    def keep(self, name, value):
        """Keep a tensor under a name."""
        if name in self.kept:
            self.kept[name].copy_(value)
        else:
            self.kept[name] = value.clone()

    def extend(self, qkv):
        """Return qkv (B, T, C) with the CONV_TAPS - 1 tokens before it in front."""
        tail = self.kept.get("tail", qkv.new_zeros(len(qkv), CONV_TAPS - 1, qkv.size(2)))
        qkv = torch.cat([tail, qkv], dim=1)
        self.keep("tail", qkv[:, 1 - CONV_TAPS :])
        return qkv

    def recur(self, q, k, v, g, beta):
        """Return the outputs of gdn_chunk, whose state goes on from call to call."""
        inputs = (q, k, v, g, beta)
        if q.size(1) == 1 and "state" in self.kept:
            o, state = gdn_step(*(x[:, 0] for x in inputs), self.kept["state"])
            o = o[:, None]
        else:
            o, state = gdn_chunk(*inputs, self.kept.get("state"))
        self.keep("state", state)
        return o

    def attend(self, q, k, v, window):
        """Return attention (B, H, T, D) over all keys so far; shapes as in `attend`."""
        if not self.kept:
            shape = (*k.shape[:2], self.decoder.room, k.size(3))
            self.kept = {"keys": k.new_zeros(shape), "values": v.new_zeros(shape)}
        keys = self.kept["keys"].index_copy_(2, self.decoder.slots, k)
        values = self.kept["values"].index_copy_(2, self.decoder.slots, v)
        # Heads that share keys become queries of one head: the kernels that take a mask do not take
        # grouped heads.
        groups = q.size(1) // k.size(1)
        q = q.unflatten(1, (-1, groups)).flatten(2, 3)  # (B, Hkv, groups * T, D)
        mask = self.decoder.masks[window].repeat(1, 1, groups, 1)
        o = F.scaled_dot_product_attention(q, keys, values, mask)
        return o.unflatten(2, (groups, -1)).flatten(1, 2)


class Decoder:
    """Texts that go on token by token: the network's own modules with a cache for each layer.

    `logits` (R, V) say what comes next. Prompts of different lengths are padded in front. Padding
    and text are different documents, so no text sees its padding. With network.compiled a step is
    compiled; on CUDA it is recorded as a graph and replayed.
    """

    def __init__(self, network, prompts):
        """Read the prompts, lists of at least one id."""
        self.network = network
        self.layers = [LayerCache(self) for _ in network.layers]
        self.windows = {mixer.window for mixer in network.mixers if hasattr(mixer, "window")}
        device = network.embed.device
        bos = network.config.bos_id
        rows = len(prompts)
        self.length = max(len(prompt) for prompt in prompts)
        self.room = self.length + ROOM
        self.graph = None
        self.compiled_step = torch.compile(self.step, dynamic=True)
        padded = [[bos] * (self.length - len(prompt)) + prompt for prompt in prompts]
        padding = [[self.length - len(prompt)] for prompt in prompts]
        self.used = torch.zeros((), dtype=torch.int64, device=device)  # slots that hold a token
        self.kept = {
            "padding": torch.tensor(padding, device=device),
            "last": torch.full((rows, 1), bos, device=device),
            "doc": torch.zeros(rows, self.room, dtype=torch.int64, device=device),
            "tail_doc": torch.zeros(rows, CONV_TAPS - 1, dtype=torch.int64, device=device),
        }
        features = network.features(torch.tensor(padded, device=device), self)
        self.logits = network.logits(features[:, -1])

    def take(self, rows):
        """Go on with these rows (n,) alone, in this order; a row may come several times."""
        self.graph = None
        self.logits = self.logits[rows]
        for cache in (self, *self.layers):
            cache.kept = {name: value[rows] for name, value in cache.kept.items()}

    def grow(self):
        """Make room for more tokens."""
        self.graph = None
        self.room += ROOM
        self.kept["doc"] = F.pad(self.kept["doc"], (0, ROOM))
        for layer in self.layers:
            for name in layer.kept.keys() & {"keys", "values"}:
                layer.kept[name] = F.pad(layer.kept[name], (0, 0, 0, ROOM))

    def context(self, ids):
        """Return documents, previous ids and positions (B, T) of ids (B, T), see GPT.context."""
        kept = self.kept
        self.slots = self.used + torch.arange(ids.size(1), device=ids.device)
        positions = self.slots - kept["padding"]  # below 0 in the padding
        begins_document = (ids == self.network.config.bos_id) | (positions == 0)
        doc = kept["tail_doc"][:, -1:] + begins_document.cumsum(dim=1)
        kept["doc"].index_copy_(1, self.slots, doc)
        distance = self.slots[:, None] - torch.arange(self.room, device=ids.device)
        seen = (distance >= 0) & (doc[:, :, None] == kept["doc"][:, None])
        self.masks = {window: (seen & (distance < window))[:, None] for window in self.windows}
        previous = torch.cat([kept["last"], ids], dim=1)
        doc = torch.cat([kept["tail_doc"], doc], dim=1)
        kept["last"].copy_(previous[:, -1:])
        kept["tail_doc"].copy_(doc[:, 1 - CONV_TAPS :])
        self.used += ids.size(1)
        return doc, previous[:, :-1], positions.clamp(min=0)

    def step(self, ids):
        """Return the logits (R, V) of what comes after ids (R,)."""
        return self.network.logits(self.network.features(ids[:, None], self)[:, 0])

    def __call__(self, ids):
        """Go on with ids (R,), a token in each row."""
        if self.length == self.room:
            self.grow()
        self.length += 1
        # One row would be compiled anew.
        step = self.compiled_step if self.network.compiled and len(ids) > 1 else self.step
        if self.graph is not None:
            self.ids.copy_(ids)
            self.graph.replay()
            self.logits = self.next_logits
            return
        self.logits = step(ids)
        if ids.is_cuda:  # that step warmed up; the next ones are recorded here, and replayed
            self.ids = ids.clone()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.next_logits = step(self.ids)


def draw(logits, temperature, top_k, top_p, uniform):
    """Return tokens (B,) and their log-probabilities, drawn from logits (B, V).

    uniform (B,) in [0, 1) decides: the inverse of the cumulative distribution. temperature 0: the
    likeliest token; top_k: that many tokens, 0: all; top_p: the likeliest tokens that together have
    this probability (arXiv 1904.09751).
    """
    if temperature == 0:
        return logits.argmax(-1), logits.new_zeros(len(logits))
    logits = logits / temperature
    if top_k:
        least = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
        logits = logits.masked_fill(logits < least, -math.inf)
    if top_p < 1:
        ordered, order = logits.softmax(-1).sort(descending=True)
        beyond = ordered.cumsum(-1) - ordered >= top_p
        beyond = torch.zeros_like(beyond).scatter(1, order, beyond)
        logits = logits.masked_fill(beyond, -math.inf)
    chances = logits.softmax(-1)
    total = chances.cumsum(-1, dtype=torch.float64)
    picks = torch.searchsorted(total, uniform[:, None] * total[:, -1:], right=True)
    picks.clamp_(max=logits.size(-1) - 1)
    return picks[:, 0], chances.gather(1, picks)[:, 0].log()


def continue_texts(decoder, draws, sampling, stop):
    """Return a Sample for each row of a Decoder; draws (R, steps) are uniform numbers in [0, 1).

    sampling: temperature, top_k and top_p of `draw`. Rows that reached a stop token leave the batch.
    """
    rows, steps = draws.shape
    device = draws.device
    ids = torch.zeros(rows, steps, dtype=torch.int64, device=device)
    logps = torch.zeros(rows, steps, device=device)
    lengths = torch.zeros(rows, dtype=torch.int64, device=device)
    ends = torch.tensor(sorted(stop), dtype=torch.int64, device=device)
    live = torch.arange(rows, device=device)  # rows that the decoder has
    running = torch.ones(rows, dtype=torch.bool, device=device)  # those of them without a stop token
    for step in range(steps):
        picks, pick_logps = draw(decoder.logits, *sampling, draws[live, step])
        ids[live, step] = picks
        logps[live, step] = pick_logps.float()
        lengths[live] += running
        running &= ~torch.isin(picks, ends)
        left = int(running.sum())
        if left == 0 or step == steps - 1:
            break
        if 1 < left < 0.8 * len(live):
            keep = running.nonzero()[:, 0]
            decoder.take(keep)
            live = live[keep]
            picks = picks[keep]
            running = running[keep]
        decoder(picks)
    samples = []
    for row, length in enumerate(lengths.tolist()):
        row_ids = ids[row, :length].tolist()
        samples.append(Sample(row_ids, logps[row, :length].tolist(), row_ids[-1] in stop))
    return samples


@torch.inference_mode()  # a tenth faster on a CPU than no_grad
def generate(
    network, prompts, count, max_new_tokens, temperature, top_k, top_p, seeds, stop, rows=4096
):
    """Return `count` Samples for each prompt (a list of at least one id), prompt by prompt.

    Sample i of prompt p depends on (seeds[p], i) alone, up to the last digits of the batch's matrix
    products. stop: ids that end a sample. At most `rows` texts are in a batch. See `draw`.
    """
    samples = []
    texts = list(itertools.product(range(len(prompts)), range(count)))
    for start in range(0, len(texts), rows):
        batch = texts[start : start + rows]
        numbers = [number for number, _ in batch]  # of their prompts, which rise
        draws = [
            np.random.default_rng([*seeds[number], sample]).random(max_new_tokens)
            for number, sample in batch
        ]
        draws = torch.from_numpy(np.stack(draws)).to(network.embed.device)
        decoder = Decoder(network, prompts[numbers[0] : numbers[-1] + 1])
        decoder.take(torch.tensor(numbers, device=draws.device) - numbers[0])
        samples += continue_texts(decoder, draws, (temperature, top_k, top_p), stop)
    return samples


# === end: generation ===


# === shared: tasks ===
FROM_FILE = {"gsm8k": ("question", "answer"), "jsonl": ("prompt", "answer")}  # keys of a line


@dataclass(frozen=True)
class Problem:
    """A question and a right answer, which is the only one for most tasks."""

    prompt: str
    answer: str


def is_held_out(prompt):
    """Return whether a prompt is kept from training: one in five, by a hash, whatever the seed."""
    return int(hashlib.blake2b(prompt.encode(), digest_size=8).hexdigest(), 16) % 5 == 0


def expression_value(text):
    """Return the exact value of whole numbers, + - * / and parentheses; None of any other text.

    A division by 0 has no value, nor has a text of more than 100 characters.
    """
    if not re.fullmatch(r"[0-9+*/()\s-]{1,100}", text, re.ASCII):
        return None
    text = " ".join(text.split())
    # An operand that is missing would allow signs, powers, floor divisions and (), and an operator
    # that is missing calls. Without these, eval computes sums and products of at most 50 numbers.
    if re.search(r"(^|[-+*/(]) ?[-+*/)]|[0-9)] ?\(", text):
        return None
    try:
        return eval(re.sub("[0-9]+", r"Fraction('\g<0>')", text), {"Fraction": Fraction})
    except (SyntaxError, ZeroDivisionError):
        return None


def sort_problem(rng):
    """Return 5 to 9 digits to sort: `52713`, `12357`."""
    digits = "".join(rng.choices(string.digits, k=rng.randint(5, 9)))
    return Problem(digits, "".join(sorted(digits)))


def reverse_problem(rng):
    """Return 5 to 9 letters to reverse: `abcde`, `edcba`."""
    letters = "".join(rng.choices(string.ascii_lowercase, k=rng.randint(5, 9)))
    return Problem(letters, letters[::-1])


def add_problem(rng):
    """Return two numbers of 3 digits to add: `123+456`, `579`."""
    a = rng.randint(100, 999)
    b = rng.randint(100, 999)
    return Problem(f"{a}+{b}", str(a + b))


def countdown_problem(rng):
    """Return three numbers up to 20 and a target below 100 to reach: `3 7 20=41`, `(3*7)+20`.

    An answer uses each number once.
    """
    target = None
    while target not in range(1, 100):
        # Sorted, because otherwise one problem could stand on both sides of the split.
        numbers = sorted(rng.randint(1, 20) for _ in range(3))
        a, b, c = rng.sample(numbers, 3)
        p, q = rng.choices("+-*/", k=2)
        answer = rng.choice((f"({a}{p}{b}){q}{c}", f"{a}{p}({b}{q}{c})"))
        target = expression_value(answer)
    return Problem("{} {} {}={}".format(*numbers, target), answer)


def zebra_problem(rng):
    """Return clues on who lives with which pet (and drink) in houses 1 to 3, and the only solution.

    `Ann<dog, Bob~cat, Cid=2`: = same house, < left of, > right of, ~ beside. The answer goes house
    by house: `Ann eel, Cid cat, Bob dog`.
    """
    distances = {"=": (0,), "<": (-2, -1), ">": (1, 2), "~": (-1, 1)}  # between two houses
    names = "Ann Bob Cid cat dog eel ale gin tea".split()[: rng.choice((6, 9))]
    words = [*names, "1", "2", "3"]
    orders = itertools.product(itertools.permutations((1, 2, 3)), repeat=len(names) // 3)
    worlds = [(*itertools.chain(*order), 1, 2, 3) for order in orders]  # the house of each word
    world = rng.choice(worlds)
    clues = []
    while len(worlds) > 1:
        a, b = sorted(rng.sample(range(len(words)), 2))
        sign = rng.choice("=<>~")
        left = [other for other in worlds if other[a] - other[b] in distances[sign]]
        if world in left and len(left) < len(worlds):
            worlds = left
            clues.append(f"{words[a]}{sign}{words[b]}")
    houses = []
    for house in (1, 2, 3):
        kinds = range(0, len(names), 3)
        houses.append(" ".join(names[world.index(house, kind)] for kind in kinds))
    return Problem(", ".join(sorted(clues)), ", ".join(houses))


GENERATED = {
    "sort": sort_problem,
    "reverse": reverse_problem,
    "add": add_problem,
    "countdown": countdown_problem,
    "zebra": zebra_problem,
}


def final_number(text):
    """Return the number after the first `#### `, as GSM8K's own grader reads it, or NaN."""
    found = re.search(r"#### (-?[0-9.,]+)", text)
    digits = found[1].replace(",", "").removesuffix(".") if found else ""
    is_number = re.fullmatch(r"-?([0-9]+(\.[0-9]+)?|\.[0-9]+)", digits)
    return Decimal(digits if is_number else "NaN")


@dataclass(frozen=True)
class Task:
    """Problems of one kind, split by is_held_out. Problem i depends on task, seed and i alone."""

    name: str
    seed: int
    rows: tuple[list[Problem], list[Problem]]  # of a file: to train on, held out

    def problem(self, index, held_out):
        """Return problem `index` of a split, new or of the file, which begins again at its end."""
        if self.name in FROM_FILE:
            rows = self.rows[held_out]
            return rows[index % len(rows)]
        rng = random.Random(f"{self.name} {self.seed} {held_out} {index}")
        while True:
            problem = GENERATED[self.name](rng)
            if is_held_out(problem.prompt) == held_out:
                return problem

    def held_out(self, n):
        """Return the first n held-out problems with different prompts, or all if there are fewer."""
        problems = {}
        for index in range(len(self.rows[True]) or 50 * n):
            if len(problems) < n:
                problem = self.problem(index, held_out=True)
                problems.setdefault(problem.prompt, problem)
        return list(problems.values())

    def reward(self, problem, text):
        """Return 1.0 for a right answer, else 0.0."""
        if self.name == "gsm8k":
            return float(final_number(text) == final_number(problem.answer))  # NaN equals nothing
        if self.name == "countdown":
            *numbers, target = map(int, re.findall("[0-9]+", problem.prompt))
            used = sorted(map(int, re.findall("[0-9]+", text[:100])))
            return float(used == numbers and expression_value(text) == target)
        return float(text.strip() == problem.answer)


def make_task(name, path, seed):
    """Return the task of this name. gsm8k and jsonl read the JSON lines of `path`.

    Of equal prompts the first line counts. Raises UserError: a wrong path, a line that is no
    problem, a split without any.
    """
    task = Task(name, seed, ([], []))
    if name in GENERATED and not path:
        return task
    if name in GENERATED or not Path(path).is_file():
        raise UserError(
            f"TASK_PATH={path!r}: must be a file of JSON lines for gsm8k and jsonl, else empty"
        )
    problems = {}
    for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
        try:
            row = json.loads(line)
            problem = Problem(*(row[key].strip() for key in FROM_FILE[name]))
            is_right = task.reward(problem, problem.answer)
        except (ValueError, LookupError, TypeError, AttributeError):
            is_right = False
        if not (is_right and problem.prompt and problem.answer):
            raise UserError(
                f"{path}:{number}: must be JSON with the texts {' and '.join(FROM_FILE[name])}, "
                "not blank (gsm8k's with #### and a number)"
            )
        problems.setdefault(problem.prompt, problem)
    for problem in random.Random(seed).sample(list(problems.values()), len(problems)):
        task.rows[is_held_out(problem.prompt)].append(problem)
    if not all(task.rows):
        raise UserError(
            f"{path}: {len(task.rows[True])} of {len(problems)} problems held out by a hash; must "
            "be some, not all"
        )
    return task


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


def check_modes(settings: Settings) -> None:
    """Raises UserError for a setting that MODE and SCORE do not read, or one that they need and that is empty."""
    s, scores = settings, settings.mode == "score"
    kind, what = (s.score, f"SCORE={s.score}") if scores else (s.mode, f"MODE={s.mode}")
    used = f"{ALWAYS} {SCORING if scores else ''} {USES[kind]}".split()
    if "layout" in used:
        what += f" with LAYOUT={s.layout}"
        used = [name for name in used if name != {"text": "system", "chat": "score_delimiter"}[s.layout]]
    for setting in fields(s):
        value = getattr(s, setting.name)
        if setting.name not in used and value != setting.default:
            raise UserError(f"{setting.name.upper()}={value!r}: {what} does not read it; must be left at "
                            f"{setting.default!r}")
    if kind in NEEDS and not getattr(s, NEEDS[kind]):
        raise UserError(f"{NEEDS[kind].upper()}='': must be given for {what}")
    if s.score_path and (s.task_path or s.task not in FROM_FILE and (
            s.task != Settings.task or kind in ("task", "win") and not s.score_judge)):
        raise UserError(f"SCORE_PATH={s.score_path!r}: with it TASK_PATH must be empty, and TASK gsm8k or jsonl, whose "
                        "rows a checker knows; or TASK unset, for SCORE=win with SCORE_JUDGE")


def open_model(name: str, settings: Settings, runtime: Runtime) -> SimpleNamespace:
    """The model that setting `name` says: its network, tokenizer, file, and how many tokens a batch of it may have."""
    own = settings.tokenizer_path if name == "artifact" else ""
    network, tokenizer, source = load_model(name.upper(), getattr(settings, name), own)
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
    if not (prompt and answer) or name == "gsm8k" and final_number(answer).is_nan():
        raise RowError("empty prompt or answer, or none with #### and a number")
    return name, Problem(prompt, answer)


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


def last_number(text):
    """Return the last number of a text as GSM8K marks an answer, `#### 18`, or "" without one."""
    # A minus after a digit is a subtraction.
    number = r"(?:(?<![0-9])-)?\$?(?:[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?|\.[0-9]+)"
    found = re.findall(number, text)
    return "#### " + found[-1].replace("$", "") if found else ""


def score_task(models: SimpleNamespace, path: str, settings: Settings) -> dict:
    """Shares of right answers by the task's checker: greedy, and pass@k, whether one of k samples is right, without
    bias from n samples of which c are: 1 - C(n - c, k) / C(n, k) (arXiv 2107.03374, equation 1).
    """
    s, n = settings, settings.eval_samples
    task, asking, left = questions([models.artifact], path, s, "chat")

    def right(count: int, temperature: float, *ways: Callable) -> list[list[int]]:
        answers = answer(models.artifact, asking, s, count, temperature, "chat")
        return [[sum(task.reward(one.problem, read(sample.text)) >= 1 for sample in samples)
                 for one, samples in zip(asking, answers, strict=True)] for read in ways]

    greedy, lenient = right(1, 0.0, str, last_number)
    [counts] = right(n, s.temperature, str)
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
        decoder = Decoder(model.network, [prompt])
        for step in range(most):
            token, _ = draw(decoder.logits, s.temperature, s.top_k, s.top_p, uniform[step : step + 1])
            if int(token) in stop:
                break
            before = len(decode_bytes(model.tokenizer, [last]))
            piece = characters.decode(decode_bytes(model.tokenizer, [last, int(token)])[before:])
            text, last = text + piece, int(token)
            print(piece, end="", flush=True)
            decoder(token)
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
    settings = load_settings(Settings, os.environ, sys.argv[1:])
    check_modes(settings)
    if settings.mode == "chat":
        chat(settings)
    elif settings.mode == "score":
        score(settings)
    else:
        sample(settings)
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
