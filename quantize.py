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
import collections
import concurrent.futures
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
import pickle
import re
import resource
import shutil
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import Field, dataclass, field, fields
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
from tiktoken.load import load_tiktoken_bpe, read_file_cached
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

try:  # optional: progress bars
    from tqdm import tqdm
except ImportError:
    tqdm = None


# === shared: bounds ===
def bounded(default: float, low: float, high: float):
    """Return a setting with a lowest and a highest value. A setting without has a lowest of 0."""
    return field(default=default, metadata={"low": low, "high": high})


# === end: bounds ===


# ---------------------------------------------------------------------------------------------------------- settings
@dataclass(frozen=True)
class Settings:
    """Every setting is an environment variable: its name in capitals."""

    tokenizer_path: str = ""  # .model or .tiktoken file, encoding or "bytes"; empty: the data's
    data_path: str = ""  # folder of shards and manifest.json, or a mixture a:0.7,b:0.3
    seed: int = 1337  # of every random draw
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: CUDA if there is a device
    matrix_bits: int = bounded(6, 2, 8)  # bits of a matrix code, up to 2**(bits-1) - 1
    # weights of a matrix that share a delta's scale; -1: a row, 0: the matrix
    delta_group: int = bounded(128, -1, 1 << 20)
    delta_scale_bits: int = bounded(32, 16, 32)  # of a scale of bitdelta: 32 or 16
    # of what a delta holds whole, all but matrices: 16 or 32 (as they are)
    delta_keep_bits: int = bounded(16, 16, 32)
    delta_bits: int = bounded(4, 1, 8)  # of a code of deltaquant, 1 to 8
    # what has its own in deltaquant; group: DELTA_GROUP weights
    delta_step: Literal["tensor", "row", "group"] = "row"
    distill_steps: int = 100  # of bitdelta's scales against the tuned model's logits; 0: none
    distill_lr: float = 0.1  # AdamW, on scales in units of their matrix's mean, to 0 by a cosine
    distill_batch_tokens: int = 0  # a step; 0: four windows of the model's TRAIN_SEQ_LEN

    def __post_init__(self) -> None:
        check_settings(self)


# === shared: settings ===
class UserError(Exception):
    """A mistake of the user. It is printed as one line, and the exit code is 2."""


# Settings of older versions. In the environment they are errors, not ignored in silence.
REMOVED_SETTINGS = (
    "ADAM_WD",
    "BIO_EVENTS",
    "BIO_THRESHOLD",
    "DETERMINISTIC",
    "DRY_RUN",
    "EMA_MEMORY_FRAC",
    "EMA_START_FRAC",
    "EMBED_CLIP_SIGMAS",
    "EMBED_STEP",
    "GDN_NEG_EIGVAL",
    "HANG_SECONDS",
    "KEEP",
    "MATRIX_CLIP_SIGMAS",
    "MATRIX_STEP",
    "MUON_MOMENTUM_WARMUP_FRAC",
    "NGRAM_MIN_COUNT",
    "NGRAM_ORDER",
    "QAT_START_FRAC",
    "QK_NORM",
    "RESIDUAL_MIX",
    "SPIKE_NATS",
    "SPIKE_POLICY",
    "SWA_START_FRAC",
    "UNET_SKIPS",
)

# Names that nanoGPT, modded-nanogpt, Parameter Golf and TRL use, and the settings that do the
# same job here; "" means that this project has no such feature.
ALIASES = {
    "BATCH_SIZE": "TRAIN_BATCH_TOKENS",
    "BETA": "KL_BETA",
    "BLOCK_SIZE": "TRAIN_SEQ_LEN",
    "DATASET": "DATA_PATH",
    "DECAY_LR": "LR_SCHEDULE",
    "DROPOUT": "",
    "EMA_DECAY": "EMA",
    "EMA_ENABLED": "EMA",
    "EMBED_LR": "TIED_EMBED_LR",
    "EVAL_INTERVAL": "VAL_LOSS_EVERY",
    "EVAL_SEQ_LEN": "TRAIN_SEQ_LEN",
    "GRADIENT_ACCUMULATION_STEPS": "MICRO_BATCH_TOKENS",
    "GRAD_CLIP": "GRAD_CLIP_NORM",
    "LATE_QAT": "QAT",
    "LEARNING_RATE": "MATRIX_LR",
    "LOG_INTERVAL": "",
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
    "TTT_ENABLED": "",
    "VAL_BATCH_SIZE": "MICRO_BATCH_TOKENS",
    "WARMUP_ITERS": "WARMUP_FRAC",
    "WEIGHT_DECAY": "MUON_WD",
    "XSA_LAST_N": "",
}

# Settings of Parameter Golf that are constants here: (constant, its value). That value is accepted,
# so that pasted commands run.
RETIRED_SETTINGS = {
    "ADAM_EPS": ("ADAM_EPS", 1e-8),
    "BETA1": ("ADAM_BETAS[0]", 0.9),
    "BETA2": ("ADAM_BETAS[1]", 0.95),
    "BIGRAM_DIM": ("BIGRAM_DIM", 128),
    "EMBED_BITS": ("EMBED_BITS", 8),
    "HEAD_LR": ("HEAD_LR", 0.008),
    "LOGIT_SOFTCAP": ("logit_softcap", 30.0),
    "MUON_BACKEND_STEPS": ("NEWTON_SCHULZ_STEPS", 5),
    "MUON_MOMENTUM": ("MUON_MOMENTUM", 0.95),
    "MUON_MOMENTUM_WARMUP_START": ("MUON_MOMENTUM_START", 0.85),
    "MUON_MOMENTUM_WARMUP_STEPS": ("MUON_WARMUP_FRAC", 0.05),
    "ROPE_BASE": ("ROPE_BASE", 10000.0),
    "TIED_EMBED_INIT_STD": ("embed_init_std", 0.005),
    "TRAIN_LOG_EVERY": ("LOG_SECONDS", 10.0),
    "WARMUP_STEPS": ("WARMUP_STEPS", 2),
}


def parse_setting(setting: Field, text: str) -> int | float | bool | str:
    """Return the value of a setting written as text. Raises UserError if the type is wrong."""
    name = setting.name.upper()
    if setting.type is bool:
        if text not in ("0", "1"):
            raise UserError(f"{name}={text!r}: must be 0 or 1")
        return text == "1"
    if setting.type is int or setting.type is float:
        try:
            return setting.type(text)
        except ValueError:
            kind = "a whole number" if setting.type is int else "a number"
            raise UserError(f"{name}={text!r}: must be {kind}") from None
    return text


def check_settings(settings) -> None:
    """Check type, choice and range of every field of a settings dataclass. Raises UserError."""
    for setting in fields(settings):
        value = getattr(settings, setting.name)
        prefix = f"{setting.name.upper()}={value!r}: must be"
        choices = get_args(setting.type)
        if choices:
            if value not in choices:
                raise UserError(f"{prefix} one of {', '.join(choices)}")
        elif setting.type is int or setting.type is float:
            is_number = isinstance(value, int | setting.type) and not isinstance(value, bool)
            if not is_number:
                raise UserError(f"{prefix} of type {setting.type.__name__}")
            low = setting.metadata.get("low", 0)
            high = setting.metadata.get("high", math.inf)
            if not (low <= value <= high and math.isfinite(value)):
                raise UserError(f"{prefix} from {low} to {high}")
        elif not isinstance(value, setting.type):
            raise UserError(f"{prefix} of type {setting.type.__name__}")


def sibling_settings() -> set[str]:
    """Return the names of all settings of the scripts in this script's folder."""
    names = set()
    for path in Path(__file__).resolve().parent.glob("*.py"):
        _, _, rest = path.read_text(encoding="utf-8").partition("\nclass Settings:\n")
        names.update(re.findall(r"^    ([a-z]\w*): ", rest.partition("\n\n\n")[0], re.MULTILINE))
    return {name.upper() for name in names}


def check_unknown_name(name: str, text: str, names: Iterable[str], hint: str) -> None:
    """Raise UserError for a name that is no setting, with the setting that was probably meant.

    A retired setting with the value of its constant is accepted. `hint` ends the message.
    """
    message = f"{name}={text!r}: no setting of this script"
    if name in RETIRED_SETTINGS:
        constant, value = RETIRED_SETTINGS[name]
        with contextlib.suppress(ValueError):
            if float(text) == value:
                return
        raise UserError(f"{message}, which has the constant {constant} = {value}; {hint}")
    meant = name
    while meant in ALIASES and meant not in names:
        meant = ALIASES[meant]
    if meant != name and meant in names:
        raise UserError(f"{message}, which calls it {meant}; {hint}")
    close_names = difflib.get_close_matches(name, names, 1)
    if close_names:
        raise UserError(f"{message}; did you mean {close_names[0]}? {hint}")
    raise UserError(f"{message}; {hint}")


def check_environment(environ: dict[str, str], names: Iterable[str]) -> None:
    """Raise UserError for an environment variable that looks meant as a setting but is none here:
    a near miss, a name that other projects use, or a setting of another script in this folder.
    """
    ignored = environ.get("IGNORE_ENV", "").replace(" ", "").split(",")
    known = {*ALIASES, *RETIRED_SETTINGS, *REMOVED_SETTINGS, *sibling_settings()}
    for name in sorted(set(environ) - set(names) - {*ignored, "CONFIG", "IGNORE_ENV"}):
        if name in known or difflib.get_close_matches(name, names, 1, 0.85):
            check_unknown_name(name, environ[name], names, f"IGNORE_ENV={name} ignores it")


def read_config(path: str) -> dict[str, str]:
    """Return the NAME=value lines of a config file; `#` begins a comment. Raises UserError."""
    if not Path(path).is_file():
        raise UserError(f"CONFIG={path!r}: no such file")
    config = {}
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        line = line.split("#", 1)[0].strip()
        name, equals, value = line.partition("=")
        if line and not equals:
            raise UserError(f"{path}:{number}: {line!r} is not NAME=value")
        if line:
            config[name.strip()] = value.strip().strip("'\"")
    return config


def read_arguments(arguments: Sequence[str]) -> dict[str, str]:
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


def print_help(cls: type) -> None:
    """Print the script's docstring, its arguments and its settings, as they stand in the source."""
    _, _, body = inspect.getsource(cls).partition('"""\n\n')
    lines = body.partition("\n    def ")[0]
    print(sys.modules[cls.__module__].__doc__)
    print("Arguments: a config file (configs/x.env), NAME=value or --name=value.\n\nSettings:")
    print(lines)


def load_settings(
    cls: type,
    environ: dict[str, str],
    arguments: Sequence[str] = (),
    presets: dict | None = None,
    stored: Callable[[dict[str, str]], tuple[dict, dict]] | None = None,
):
    """Return the settings of dataclass `cls`: defaults < CONFIG file < environment < arguments.

    presets: NAME of a setting -> choice -> values of other settings. Values given in the same place
    override them, so a preset chosen in the environment overrides the file. stored: function of the
    given texts that returns defaults and overrides, two dicts (see stored_settings).
    Raises UserError: a wrong value, or a name that is no setting (see check_unknown_name).
    """
    if "--help" in arguments or "-h" in arguments:
        print_help(cls)
        sys.exit(0)
    settings = {setting.name.upper(): setting for setting in fields(cls)}
    typed = read_arguments(arguments)
    path = typed.get("CONFIG", environ.get("CONFIG", ""))
    config = read_config(path) if path else {}
    if "CONFIG" in config:
        raise UserError(f"{path}: CONFIG cannot stand in a config file")
    check_environment(environ, settings)
    for name, text in {**config, **typed}.items():
        if name not in settings:
            check_unknown_name(name, text, settings, "--help lists the settings")

    values, overrides = stored({**config, **environ, **typed}) if stored else ({}, {})
    top = {**environ, **typed}
    for texts in (config, top):
        for name, choices in (presets or {}).items():
            # A preset in the file has no effect if the environment or an argument sets another.
            if name in texts and (texts is top or name not in top):
                values = {**values, **choices.get(texts[name], {})}
        for name, setting in settings.items():
            if name in texts:
                values[setting.name] = parse_setting(setting, texts[name])
    values = {**values, **overrides}
    return cls(**{name: value for name, value in values.items() if name.upper() in settings})


# === end: settings ===


# === shared: runtime ===
@dataclass
class Runtime:
    """Who this process is among the ranks, and the device of its tensors."""

    rank: int
    world_size: int
    device: torch.device
    distributed: bool

    def sum(self, tensor: Tensor) -> Tensor:
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


def hidden_gpus() -> bool:
    """Return whether nvidia-smi lists GPUs, for the case that PyTorch sees none of them."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") or not shutil.which("nvidia-smi"):
        return False
    return subprocess.run(["nvidia-smi", "-L"], capture_output=True).stdout.startswith(b"GPU")


def start_runtime(device: str) -> Runtime:
    """Join the process group that torchrun describes (NCCL or gloo), or be a single process."""
    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise UserError("DEVICE='cuda': PyTorch sees no CUDA device; DEVICE=cpu runs without one")
    if device == "auto" and not has_cuda and hidden_gpus():
        raise UserError(
            "DEVICE='auto': nvidia-smi lists GPUs but PyTorch sees none; install PyTorch's CUDA "
            "build or a newer driver, or set DEVICE=cpu"
        )
    use_cuda = has_cuda and device != "cpu"
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


def exit_code(main: Callable[[], int]) -> int:
    """Run `main` and return its exit code: 2 for a UserError, 1 for other faults of one line."""
    rank = int(os.environ.get("RANK", 0))
    try:
        return main()
    except (UserError, FloatingPointError, OSError, torch.OutOfMemoryError) as error:
        if rank:
            time.sleep(5)  # torchrun ends this rank first if rank 0 reports the same error
        message = str(error).splitlines()[0]
        if isinstance(error, torch.OutOfMemoryError):
            message = f"set MICRO_BATCH_TOKENS lower: {message}"
        sys.stderr.write(f"error: {message}\n")
        return 2 if isinstance(error, UserError) else 1
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        reason = str(error).strip()[-90:]
        sys.stderr.write(f"error: rank {rank} lost another rank ({reason}); RESUME continues\n")
        os._exit(1)  # an ordinary exit would wait for the lost rank


def replace_file(path: str | Path, data: bytes):
    """Write a file beside `path` and rename it: `path` always holds the old or the new bytes."""
    part = Path(path).with_name(Path(path).name + ".part")
    with open(part, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def describe_machine(runtime: Runtime) -> dict:
    """Return commit (`+`: with changes), hardware, versions and peak memory, for the result."""
    command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"]
    folder = Path(__file__).resolve().parent
    commit = "unknown"
    if shutil.which("git"):
        git = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        commit = git.stdout.strip() or commit
    if runtime.device.type == "cuda":
        hardware = torch.cuda.get_device_name()
        peak_bytes = torch.cuda.max_memory_allocated()
    else:
        hardware = f"{os.uname().machine} CPU, {torch.get_num_threads()} threads"
        unit = 1 if sys.platform == "darwin" else 1024
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {
        "commit": commit,
        "hardware": f"{runtime.world_size} x {hardware}",
        "versions": {"python": sys.version.split()[0], "torch": torch.__version__},
        "peak_memory_mib": peak_bytes / 2**20,
    }


def list_checkpoints(run: Path) -> list[Path]:
    """Return the checkpoints in a run's folder, whole or not, the newest first."""
    folders = [path for path in run.glob("step_*") if re.fullmatch(r"step_\d+(\.part)?", path.name)]
    return sorted(folders, key=lambda path: (int(path.stem[5:]), path.name), reverse=True)


def checkpoint_fault(folder: Path, files: Sequence[str]) -> str:
    """Return what is wrong with a checkpoint that must have `files`, or "" if it is whole."""
    if folder.suffix == ".part":
        return "half-written"
    try:
        lines = (folder / "SHA256SUMS").read_text().splitlines()
        sums = {}
        for line in lines:
            digest, name = line.split("  ")
            sums[name] = digest
        names = {*files, *sums}
        wrong = [name for name in sorted(names) if sums.get(name) != sha256_file(folder / name)]
    except (OSError, ValueError) as error:
        return str(error)
    return ", ".join(wrong)


def newest_checkpoint(
    folders: Sequence[Path], files: Sequence[str] = ("meta.json", "model.pt", "training.pt")
) -> tuple[Path | None, list[str]]:
    """Return the first whole checkpoint of `folders`, or None, and a line on each damaged one."""
    faults = []
    for folder in folders:
        fault = checkpoint_fault(folder, files)
        if not fault:
            return folder, faults
        faults.append(f"checkpoint {folder} is damaged and skipped: {fault}")
    return None, faults


# === end: runtime ===


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


GPT2 = PublishedEncoding(
    "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930", R50K_SPLIT, 50256, 50257
)
ENCODINGS = {
    "gpt2": GPT2,
    "r50k_base": GPT2,
    "p50k_base": PublishedEncoding(
        "94b5ca7dff4d00767bc256fdd1b27e5b17361d7b8a5f968547f9f23eb70d2069", R50K_SPLIT, 50256, 50281
    ),
    "cl100k_base": PublishedEncoding(
        "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
        CL100K_SPLIT,
        100257,
        100277,
    ),
    "o200k_base": PublishedEncoding(
        "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
        O200K_SPLIT,
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
        self.byte_counts = np.array(list(map(len, self.pieces)))  # (V,) int64
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
    if name in ENCODINGS:
        return tiktoken_tokenizer(path, name)
    return sentencepiece_tokenizer(path)


def byte_tokenizer():
    """Return the built-in tokenizer: pad, BOS, EOS and unknown, then 256 bytes, then 4 roles."""
    pieces = [b""] * 4 + [bytes([byte]) for byte in range(256)] + [b""] * 4
    roles = {role: 260 + i for i, role in enumerate(ROLE_TOKENS)}
    return Tokenizer(
        "bytes",
        b"underpar bytes 264",
        1,
        pieces,
        lambda text: [4 + byte for byte in text.encode()],
        roles,
    )


def tiktoken_tokenizer(path, name):
    """Return the encoding NAME, from its rank file NAME.tiktoken or from OpenAI's server.

    Raises UserError if the file is missing or damaged.
    """
    published = ENCODINGS[name]
    source = str(path)
    if not path.suffix:
        source = f"{RANK_FILES}/{name.replace('gpt2', 'r50k_base')}.tiktoken"
    try:
        # Both look into tiktoken's cache first and compare the hash.
        content = read_file_cached(source, published.sha256)
        ranks = load_tiktoken_bpe(source, published.sha256)
    except (OSError, ValueError) as error:
        raise UserError(f"tokenizer {path}: {error}; {name}.tiktoken may be given") from error

    pieces = [b""] * published.vocab_size  # special tokens and unused ids decode to nothing
    for piece, rank in ranks.items():
        pieces[rank] = piece
    # Without special tokens: what looks like one in a text is plain text.
    bpe = tiktoken.Encoding(name, pat_str=published.split, mergeable_ranks=ranks, special_tokens={})
    return Tokenizer(
        f"{name}.tiktoken", content, published.end_of_text, pieces, bpe.encode_ordinary, {}
    )


def sentencepiece_tokenizer(path):
    """Return the tokenizer of a SentencePiece model file. Raises UserError."""
    try:
        content = path.read_bytes()
        model = sentencepiece.SentencePieceProcessor(model_proto=content)
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"tokenizer {path}: no SentencePiece model, NAME.tiktoken, bytes or one of "
            f"{[*ENCODINGS]}"
        ) from error
    if model.bos_id() < 0:
        raise UserError(f"tokenizer {path}: empty, or without the BOS token of every document")
    pieces = []
    drops_space = []
    roles = {}
    for i in range(model.vocab_size()):
        name = model.id_to_piece(i)
        piece = name.replace("\u2581", " ").encode()  # SentencePiece's mark of a space
        if model.is_byte(i):
            piece = bytes.fromhex(name[3:5])  # a byte's name is "<0x41>"
        elif model.is_control(i) or model.is_unknown(i) or model.is_unused(i):
            piece = b""
        pieces.append(piece)
        # A space that the model's own decoder leaves out, the dummy prefix, is not in the text.
        drops_space.append(piece == b" " + model.decode([i]).encode())
        # Only control tokens cannot be written in a text, so that no user can forge a role.
        if model.is_control(i) and name in ROLE_TOKENS:
            roles[name] = i
    file = "tokenizer.model"
    return Tokenizer(file, content, model.bos_id(), pieces, model.encode, roles, drops_space)


def sha256_file(path):
    """Return the SHA-256 of a file in hexadecimal digits."""
    # Shards and checkpoints are mapped, not read into memory. An empty file cannot be mapped.
    content = np.memmap(path, mode="r") if os.path.getsize(path) else b""
    return hashlib.sha256(content).hexdigest()


# === end: tokenizer ===


# === shared: data ===
# llm.c's formats: magic number and version -> type of the tokens, uint32 for vocabularies > 65,536
SHARD_KINDS = {(20240520, 1): np.dtype("<u2"), (20240801, 7): np.dtype("<u4")}


def token_bytes(tokenizer, prev, ids):
    """Return the bytes of each token of `ids` given the token before it, int64, same shape."""
    return tokenizer.byte_counts[ids] - (tokenizer.drops_space[ids] & tokenizer.boundary[prev])


def read_shard(path):
    """Return the tokens of a shard, a memory map (N,). Raises UserError if missing or damaged."""
    if not os.path.isfile(path):
        raise UserError(f"shard {path}: no such file")
    size = os.path.getsize(path)
    header = np.fromfile(path, "<i4", 256)  # magic number, version, number of tokens, zeros
    kind = SHARD_KINDS.get(tuple(header[:2]))
    if kind is None or len(header) < 256:
        raise UserError(f"shard {path}: no shard; must begin with one of {[*SHARD_KINDS]}")
    count = int(header[2])
    expected = header.nbytes + kind.itemsize * count
    if count <= 0 or size != expected:
        raise UserError(
            f"shard {path}: truncated or damaged: {size} bytes, must be {expected} for its "
            f"{count} tokens"
        )
    return np.memmap(path, kind, "r", offset=header.nbytes)


def load_manifest(data_path: str | Path) -> dict:
    """Return `manifest.json` of a data folder. Raises UserError if there is none."""
    path = Path(data_path) / "manifest.json"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if manifest["format"] == 1:
            return manifest
    except (OSError, ValueError, LookupError, TypeError):
        pass
    raise UserError(
        f"{path}: no manifest of format 1; data/prepare.py makes one, data/download.py "
        "--manifest too"
    )


class TokenStream:
    """Shards read as one circular stream of tokens.

    Raises UserError if a token is not below `vocab_size`, or if a shard changes while in use.
    """

    def __init__(self, paths, vocab_size=1 << 32):
        self.paths = paths
        self.vocab_size = vocab_size
        self.shards = [read_shard(path) for path in paths]
        self.times = [os.path.getmtime(path) for path in paths]
        self.starts = np.cumsum([0] + [len(shard) for shard in self.shards])  # (shards + 1,)
        self.windows = None  # those to train on, see hold_out

    def __len__(self):
        return int(self.starts[-1])

    def read(self, start, count):
        """Return `count` tokens from position `start` on, int64; after the last, the first."""
        out = np.empty(count, dtype=np.int64)
        done = 0
        while done < count:
            position = (start + done) % len(self)
            shard = np.searchsorted(self.starts, position, side="right") - 1
            path = self.paths[shard]
            # Reading on in a mapped file that was cut short would kill the process (SIGBUS).
            if not path.exists() or os.path.getmtime(path) != self.times[shard]:
                raise UserError(f"shard {path}: was changed or removed while in use")
            part = self.shards[shard][position - self.starts[shard] :][: count - done]
            if part.max() >= self.vocab_size:
                raise UserError(
                    f"shard {path}: token {part.max()}, expected ids below {self.vocab_size}"
                )
            out[done : done + len(part)] = part
            done += len(part)
        return out


def check_dataset(data_path, tokenizer, manifest):
    """Return the TokenStreams of training and validation.

    Raises UserError unless tokenizer and shards are the manifest's.
    """
    where = Path(data_path) / "manifest.json"
    if tokenizer.sha256 != manifest["tokenizer"]["sha256"]:
        raise UserError(f"{where}: shards of another tokenizer, not of {tokenizer.file}")
    overlap = manifest["overlap_documents"]
    if overlap and not manifest["published"]:
        raise UserError(f"{where}: {overlap} validation documents also stand in training, not 0")
    streams = []
    for split in ("train", "val"):
        shards = manifest[split]["shards"]
        paths = [where.with_name(shard["file"]) for shard in shards]
        stream = TokenStream(paths, tokenizer.vocab_size)
        expected = manifest[split]["tokens"]
        if len(stream) != expected:
            raise UserError(f"{where}: {split} has {expected} tokens, its shards {len(stream)}")
        streams.append(stream)
    # Training shards are not hashed, because they may be many gigabytes.
    for path, shard in zip(paths, shards, strict=True):
        if sha256_file(path) != shard["sha256"]:
            raise UserError(f"shard {path}: its SHA-256 is not that of {where}")
    return streams


def document_hashes(stream, bos_id):
    """Yield a hash of the tokens of every document, in order.

    Tokens before the first BOS belong to no document: a published shard may begin inside one.
    """
    borders = []
    for shard, start in zip(stream.shards, stream.starts, strict=False):
        borders += (start + np.flatnonzero(shard == bos_id)).tolist()
    borders.append(len(stream))
    for start, end in itertools.pairwise(borders):
        yield hashlib.blake2b(stream.read(start, end - start), digest_size=16).digest()


# === end: data ===


# === shared: batches ===
@dataclass
class Dataset:
    """What DATA_PATH holds, checked; lists have one entry per folder."""

    tokenizer: Tokenizer
    manifests: list
    manifest_sha256: str
    yardsticks: dict  # scores of count models and compressors; {} for a mixture
    shares: list  # of the training windows
    streams: list  # TokenStream of training
    held_out: np.ndarray  # (N,) int64, windows of all streams that are not trained on
    val: np.ndarray  # (N,) int64, a BOS first


def parse_mixture(data_path):
    """Return the folders of DATA_PATH, one folder or `a:0.7,b:0.3`, and their shares."""
    if ":" not in data_path:
        data_path += ":1"
    part = r"\s*([^,]+):((?=[\d.]*[1-9])\d*\.?\d*)"  # a weight has a digit above 0
    if not re.fullmatch(f"{part}(,{part})*", data_path):
        raise UserError(f"DATA_PATH={data_path!r}: must be a folder or FOLDER:WEIGHT,…")
    pairs = re.findall(part, data_path)
    folders = [folder for folder, _ in pairs]
    weights = [float(weight) for _, weight in pairs]
    return folders, [weight / sum(weights) for weight in weights]


def check_overlap(streams, bos_id):
    """Raise UserError if a validation document of a folder is also in another's training."""
    for (train, _), (_, val) in itertools.permutations(streams, 2):
        hashes = set(document_hashes(val, bos_id))
        if not hashes.isdisjoint(document_hashes(train, bos_id)):
            raise UserError(
                f"{train.paths[0].parent}: a training document is in another folder's validation"
            )


@functools.lru_cache(64)  # a step reads one or two epochs of each folder
def shuffle(count, *seed):
    """Return a pseudo-random order of range(count), (count,) int64, which the seed alone decides.

    Any rank and any resumed run has the same. Ten million windows take 80 MB and a second.
    """
    return np.random.default_rng(seed).permutation(count)


def hold_out(stream, share, settings):
    """Return some windows from all over a stream; set `stream.windows` to the numbers of the others.

    The end of a stream would not do: it may be of one source. The first token of a held-out window
    may be the last target of a training window. Raises UserError.
    """
    seq_len = settings.train_seq_len
    count = math.ceil(share * settings.holdout_tokens / seq_len)
    windows = shuffle(len(stream) // seq_len, 0)
    if len(windows) <= count:
        raise UserError(
            f"HOLDOUT_TOKENS={settings.holdout_tokens}: must leave a window of TRAIN_SEQ_LEN of the "
            f"{len(stream)} training tokens"
        )
    stream.windows = windows[count:]
    return [stream.read(window * seq_len, seq_len) for window in windows[:count]]


def open_data(settings):
    """Return the Dataset of DATA_PATH, checked against its manifests. Raises UserError."""
    folders, shares = parse_mixture(settings.data_path)
    manifests = [load_manifest(folder) for folder in folders]
    beside = Path(folders[0]) / manifests[0]["tokenizer"]["file"]
    tokenizer = load_tokenizer(settings.tokenizer_path or beside)
    if settings.vocab_size not in (0, tokenizer.vocab_size):
        raise UserError(
            f"VOCAB_SIZE={settings.vocab_size}: must be 0 or {tokenizer.vocab_size}, the tokenizer's"
        )
    pairs = [  # streams of training and validation
        check_dataset(folder, tokenizer, manifest)
        for folder, manifest in zip(folders, manifests, strict=True)
    ]
    check_overlap(pairs, tokenizer.bos_id)
    streams, val_streams = zip(*pairs, strict=True)

    val = np.concatenate([stream.read(0, len(stream)) for stream in val_streams])
    byte_count = token_bytes(tokenizer, val[:-1], val[1:]).sum()
    expected = sum(manifest["val"]["decoded_bytes"] for manifest in manifests)
    if byte_count != expected:
        raise UserError(f"validation: {byte_count} bytes, manifest.json says {expected}")
    held_out = []
    for stream, share in zip(streams, shares, strict=True):
        held_out += hold_out(stream, share, settings)
    return Dataset(
        tokenizer=tokenizer,
        manifests=manifests,
        manifest_sha256=" + ".join(sha256_file(f"{folder}/manifest.json") for folder in folders),
        yardsticks=manifests[0].get("yardsticks", {}) if len(folders) == 1 else {},
        shares=shares,
        streams=streams,
        held_out=np.concatenate(held_out),
        val=val,
    )


def split_rows(first, last, shares):
    """Return for each folder the range of its training rows among all rows `first` to `last`.

    Of the rows before a row, a folder has its share of what the folders before it have left,
    rounded. So the counts add up, never shrink from row to row, and follow the shares exactly.
    """
    ranges = []
    share_left = 1.0
    for share in shares:
        begin = round(first * share / share_left)
        end = round(last * share / share_left)
        ranges.append(range(begin, end))
        first -= begin
        last -= end
        share_left -= share
    return ranges


class Batches:
    """The training streams as micro-batches; a thread reads one step ahead.

    A step reads the same windows whatever the ranks and the micro-batches, resumed or not.
    """

    def __init__(self, data, settings, runtime):
        self.data = data
        self.runtime = runtime
        self.seed = settings.seed
        self.seq_len = settings.train_seq_len
        self.tokens = settings.train_batch_tokens
        unit = self.seq_len * runtime.world_size
        if self.tokens % unit:
            raise UserError(
                f"TRAIN_BATCH_TOKENS={self.tokens}: must be a multiple of TRAIN_SEQ_LEN x ranks = "
                f"{unit}"
            )
        self.rows = self.tokens // unit  # of this rank, per step
        # Enough to keep a GPU busy; little enough for a CPU's caches. A window is the least.
        default = 131072 if runtime.device.type == "cuda" else 4096
        micro_tokens = settings.micro_batch_tokens or max(default, self.seq_len)
        if micro_tokens < self.seq_len:
            raise UserError(
                f"MICRO_BATCH_TOKENS={micro_tokens}: must be at least TRAIN_SEQ_LEN={self.seq_len}"
            )
        self.limit_rows(micro_tokens // self.seq_len)
        self.reader = concurrent.futures.ThreadPoolExecutor(1)
        self.ahead = {}  # step -> Future of its windows

    def limit_rows(self, most):
        """Take the largest micro-batch of at most `most` windows that divides this rank's rows."""
        self.micro_rows = min(most, self.rows)
        while self.rows % self.micro_rows:
            self.micro_rows -= 1

    def read(self, step):
        """Return this rank's windows of step `step` with their last targets, (rows, seq_len + 1).

        Every epoch of a stream has a pseudo-random order. If windows came in turn, small batches
        would see the same few documents for dozens of steps: on web text, with 16 windows of 256 a
        step, that cost 0.091 bits per byte.
        """
        first = (step * self.runtime.world_size + self.runtime.rank) * self.rows
        ranges = split_rows(first, first + self.rows, self.data.shares)
        windows = []
        for stream, rows in zip(self.data.streams, ranges, strict=True):
            count = len(stream.windows)
            for row in rows:
                epoch, place = divmod(row, count)
                order = shuffle(count, self.seed, epoch)
                start = stream.windows[order[place]] * self.seq_len
                windows.append(stream.read(start, self.seq_len + 1))
        return torch.from_numpy(np.stack(windows))

    def micro_batches(self, step):
        """Yield (ids, targets) of this rank's share of step `step`, each (micro_rows, seq_len)."""
        # The first step, or another one than was read ahead, is read now.
        future = self.ahead.pop(step, None) or self.reader.submit(self.read, step)
        windows = future.result()
        self.ahead = {step + 1: self.reader.submit(self.read, step + 1)}
        if self.runtime.device.type == "cuda":
            windows = windows.pin_memory()  # a copy from other memory would wait for the GPU
        for part in windows.split(self.micro_rows):
            part = part.to(self.runtime.device, non_blocking=True)
            # Contiguous, as in evaluation: both run the same compiled graph.
            yield part[:, :-1].contiguous(), part[:, 1:].contiguous()


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
        registered = torch.library.custom_op(f"underpar::{scan.__name__}", scan, mutates_args=())
        registered.register_fake(scan_outputs)  # the compiler learns the shapes from it
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
        d_o = d_o.contiguous()
        r, d_u = gdn_scan_adjoint(w, p.mT @ d_o, k_out, decay, d_last, q_in.mT @ d_o)
        r_next = r[1:].to(dtype)
        d_q_in = d_o @ s.mT
        d_k_out = new @ r_next.mT
        d_p = d_o @ new.mT
        # Through U, W and the inverse, whose own gradient is never needed.
        d_vb = t.mT @ d_u
        d_k_in = (t.mT @ (d_u @ s.mT)).neg_()
        d_a = (d_vb @ u.mT).add_(d_k_in @ w.mT).neg_().tril_(-1)

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

        d_qk = d_p.mul_(d)
        d_kk = d_a.mul_(d)
        d_q = (d_q_in * grow).add_(d_qk @ k)
        d_kb = (d_k_in * grow).add_(d_kk @ k)
        d_k = (d_k_out * shrink).add_(d_qk.mT @ q).add_(d_kk.mT @ kb)
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
    chunks = []
    for x in (q, k, v, g[..., None], beta[..., None].to(v.dtype)):
        if t % chunk:  # a padded token has k = 0, v = 0 and g = 0: it leaves the state as it is
            x = F.pad(x, (0, 0, 0, 0, 0, -t % chunk))
        x = x.unflatten(1, (-1, chunk)).movedim((1, 3), (0, 2))  # (N, B, H, C, dim)
        chunks.append(x.flatten(1, 2))
    q, k, v, g, beta = chunks
    # Autocast would round the inverse and the state to bfloat16.
    with torch.autocast(v.device.type, enabled=False):
        o, last = GatedDeltaChunks.apply(q, k, beta * k, beta * v, g, state.flatten(0, 1))
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
        if self.kind.startswith("bio"):
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
        losses = F.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="none"
        )
        return losses.view_as(targets)


# === end: model ===


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


def quantize(w, bits, clip_sigmas, widen=1.0):
    """Return codes int8 (R, C) and the scale float16 (1,) of w (R, ...).

    The largest code stands for `clip_sigmas` root mean squares of w, times `widen`: the factor by
    which the exporter widens all steps if the artifact would exceed its limit. The root mean square
    is not about the mean, so a constant tensor keeps its value. If w is not finite, neither is the
    scale.
    """
    rows = w.flatten(1).float()
    sigma = rows.square().mean().sqrt().view(1)
    scale = (sigma * clip_sigmas / (2 ** (bits - 1) - 1) * widen).half()
    return round_to(rows, scale, bits).to(torch.int8), scale


def dequantize(codes, scale):
    """Return code * scale, float32 (R, C): 8 by 11 bits, so exact on every machine."""
    return codes.float() * scale


def quant_table(settings):
    """Return the quantizers that a run begins with: tensor class -> arguments of `quantize`."""
    return {
        "matrix": {"bits": settings.matrix_bits, "clip_sigmas": MATRIX_CLIP_SIGMAS, "widen": 1.0},
        "embedding": {"bits": EMBED_BITS, "clip_sigmas": EMBED_CLIP_SIGMAS, "widen": 1.0},
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
        torch._foreach_copy_(params, list(values))
        yield
    finally:
        torch._foreach_copy_(params, originals)


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
# An artifact is one file: magic, version u32, length u32 and CRC-32 of the header, all little
# endian; the header (JSON in a zstd frame); the streams without gaps; the SHA-256 of all before it.
#
# Every stream is a zstd frame of an array. The header lists them in the order of the file: three
# arrays of class "coder", then the tensors. An entry has name, class, shape, dtype (as numpy writes
# it) and the stream's length and CRC-32. A tensor with "scale" and "bits" is stored as codes.
#
# Codes are int8, or uint16 words of range ANS (Duda, arXiv:1311.2540) in interleaved lanes. In
# trained matrices rows differ in size, and so do columns that read hidden units; given both sizes,
# codes are nearly normal. So the code at row r and column c is coded by table sizes[r] + sizes[c],
# which saves 5% of the bytes (docs/lab.md, 2026-11-21). The coder's arrays are the lane states u32
# at which decoding begins; the tables u16 (97, 256) of frequencies, by code & 255; and the sizes
# u8: of each tensor in words, in turn, those of its rows, then those of its columns. Code i of a
# tensor is in lane i % lanes. The states run on from tensor to tensor, and end at 2**16.
ARTIFACT_PREFIX = struct.Struct("<8sIII")
ARTIFACT_MAGIC = b"UNDERPAR"
ARTIFACT_VERSION = 6
ARTIFACT_ZSTD = zstandard.ZstdCompressor(level=6)  # up to 0.5% fewer bytes than 3; from 12 on it is slow
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

    Each symbol that occurs has 1 and its share of what is left. So have the first two symbols,
    because a single one with all of 2**14 would overflow a state.
    """
    counts = counts.astype(np.float64)
    counts[:2] += 1e-9
    present = counts > 0
    ends = np.cumsum(counts) / counts.sum() * (RANS_TOTAL - present.sum())
    # Rounded ends of the symbols' ranges add up, which rounded shares would not.
    return (present + np.diff(np.rint(ends), prepend=0)).astype(np.uint16)


def rans_lanes(symbols):
    """Return the number of lanes: a power of two from 8 to 1,024, about one per 8,192 symbols.

    Lanes move side by side, so many are fast; each of them costs 2 bytes.
    """
    return min(1024, max(8, 1 << (symbols // 8192).bit_length() >> 1))


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
        # A slot's step is the frequency of its symbol << 16 | its place among the symbol's slots:
        # one look-up for both makes decoding 1.5 times as fast as two.
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


def entropy_bytes(counts):
    """Return the bytes of symbols that occur counts (..., 256) times, by a table for each row."""
    total = np.maximum(1, counts.sum(-1, keepdims=True))
    return (counts * np.log2(total / np.maximum(1, counts))).sum() / 8


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
        # zstd is shorter where rows are alike, as an embedding's of tokens that never occurred.
        if entropy_bytes(count) < len(ARTIFACT_ZSTD.compress(array.tobytes())):
            pairs[name] = symbols
            sizes += [rows, columns]
            counts += count
    states = np.full(rans_lanes(int(counts.sum())), RANS_LOW, np.uint32)
    tables = np.stack([rans_table(count) for count in counts])
    coder = RansCoder(states, tables)
    words = {name: coder.encode(pairs[name]) for name in reversed(pairs)}
    return {
        "lane_states": states,
        "tables": tables,
        "sizes": np.concatenate(sizes),
        **codes,
        **words,
    }


def pack_artifact(tensors, coded, **header):
    """Return the artifact of `tensors`, those of `coded` as codes, and its bytes by tensor class.

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
    sizes = collections.Counter()
    for name, array in arrays.items():
        payload = ARTIFACT_ZSTD.compress(array.tobytes())
        record = {"class": "coder", "shape": array.shape, "dtype": array.dtype.str}
        record |= {"length": len(payload), "crc32": zlib.crc32(payload)}
        if name in tensors:
            tensor = tensors[name]
            record |= {"class": tensor_class(name, tensor), "shape": tensor.shape}
        if name in coded:
            record |= {"bits": coded[name].bits, "scale": coded[name].scale.item()}
        is_finite = np.isfinite(record.get("scale", array)).all()
        require(is_finite, f"tensor {name}: must be finite as it is stored")
        records[name] = record
        sizes[record["class"]] += len(payload)
        payloads += payload
    text = json.dumps({**header, "streams": records})
    frame = ARTIFACT_ZSTD.compress(text.encode())
    prefix = ARTIFACT_PREFIX.pack(ARTIFACT_MAGIC, ARTIFACT_VERSION, len(frame), zlib.crc32(frame))
    data = prefix + frame + payloads
    data += hashlib.sha256(data).digest()
    sizes["header"] = len(data) - sizes.total()
    return data, sizes


def read_streams(data, max_weights):
    """Return header and arrays (name -> flat) of an artifact. Raises ArtifactError if damaged."""
    require(data.startswith(ARTIFACT_MAGIC), f"is no underpar artifact, begins with {data[:8]!r}")
    _, version, length, crc32 = ARTIFACT_PREFIX.unpack_from(data)
    require(version == ARTIFACT_VERSION, f"version {version}, this code reads {ARTIFACT_VERSION}")
    file = io.BytesIO(data[ARTIFACT_PREFIX.size : -32])
    frame = file.read(length)
    require(zlib.crc32(frame) == crc32, "the header is damaged")
    header = json.loads(zstandard.ZstdDecompressor().stream_reader(frame).read(1 << 24))
    arrays = {}
    for name, record in header["streams"].items():
        payload = file.read(record["length"])
        is_whole = zlib.crc32(payload) == record["crc32"]
        require(is_whole, f"{record['class']} {name!r} is damaged")
        # The shapes bound all that is allocated. A size of 0 counts as 1, or it would hide others.
        weights = math.prod(max(1, size) for size in record["shape"])
        max_weights -= weights
        fits = min([max_weights, *record["shape"]]) >= 0
        require(fits, f"{name!r} has a negative size, or exceeds the limit of weights")
        raw = zstandard.ZstdDecompressor().stream_reader(payload).read(4 * weights + 1)
        arrays[name] = np.frombuffer(raw, record["dtype"]).copy()
    require(hashlib.sha256(data[:-32]).digest() == data[-32:], "the SHA-256 is wrong")
    return header, arrays


def read_artifact(path, max_weights=1 << 30):
    """Return the header, the tensors by name in float32, and `coded` as it was written.

    Bit-exact on every machine. Memory is bounded by the file, at most max_weights numbers and
    weights, and the decoding of one tensor. Raises ArtifactError, one line that names the file and
    the damaged part, if anything is not as it was written.
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
            if array.dtype == np.uint16:
                height, *width = record["shape"]
                ends = [height, height + math.prod(width)]
                rows, columns, sizes = np.split(sizes, ends)
                contexts = np.add.outer(rows, columns).reshape(-1)
                array = coder.decode(contexts, array).view(np.int8)
            values = torch.from_numpy(array).reshape(record["shape"])
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
    """A model's score on tokens: `loss` in nats per token, `bpb` in bits per byte."""

    nats: float
    tokens: int
    bytes: int

    def __post_init__(self):
        self.loss = self.nats / self.tokens
        self.bpb = self.nats / math.log(2) / self.bytes

    def result(self) -> dict:
        """Return the score's keys in result.json."""
        return {
            "val_loss": self.loss,
            "val_bpb": self.bpb,
            "val_nats": self.nats,
            "val_tokens": self.tokens,
            "val_bytes": self.bytes,
            "bytes_per_token": self.bytes / self.tokens,
        }

    def __str__(self):
        return (
            f"loss:{self.loss:.4f} bpb:{self.bpb:.4f} nats:{self.nats:.1f} tokens:{self.tokens} "
            f"bytes:{self.bytes} bytes_per_token:{self.bytes / self.tokens:.4f}"
        )


@dataclass
class Scorer:
    """Scores models on tokens (N,) int64 that begin with a BOS; each token after it counts once."""

    tokenizer: Tokenizer
    runtime: Runtime  # its ranks share out the windows
    seq_len: int  # tokens in a window
    rows: int  # windows in a forward
    note: Callable = lambda progress: None  # is called with a text before each forward

    def score(self, model: Callable, tokens: np.ndarray, stride: int = 0) -> Score:
        """Return the score of model(ids, targets) -> losses (B, T), in windows of seq_len tokens.

        Without a stride, windows stand side by side. With one, a window ends `stride` tokens after
        the one before it and scores these tokens only, so that they have a longer context.
        """
        last = len(tokens) - 1
        end = np.append(np.arange(self.seq_len, last, stride or self.seq_len), last)
        first = np.append(0, end[:-1])
        begin = np.maximum(0, end - self.seq_len) if stride else first
        return self.score_spans(model, tokens, np.stack([begin, first, end], axis=1))

    def score_documents(self, model: Callable, tokens: np.ndarray) -> Score:
        """Return the score of model(ids, targets, cache=...), which sees documents from their BOS.

        A document is fed in pieces of seq_len tokens; the cache carries the state between them.
        """
        begin = np.flatnonzero(tokens[:-1] == self.tokenizer.bos_id)
        end = np.append(begin[1:], len(tokens) - 1)
        longest_first = np.argsort(begin - end, kind="stable")  # similar lengths in a forward
        spans = np.stack([begin, begin, end], axis=1)[longest_first]
        return self.score_spans(model, tokens, spans, stateful=True)

    @torch.no_grad()
    def score_spans(self, model, tokens, spans, stateful=False) -> Score:
        """Return the score of spans (S, 3): a row sees tokens begin..end and scores first..end."""
        device = self.runtime.device
        sums = torch.zeros(3, dtype=torch.float64, device=device)  # nats, tokens, bytes
        spans = spans[self.runtime.rank :: self.runtime.world_size]
        windows = len(spans)
        spans = np.pad(spans, ((0, -len(spans) % self.rows), (0, 0)))  # empty rows fill a forward
        for at in range(0, len(spans), self.rows):
            self.note(f"scored {at:,} of {windows:,} windows")
            begin, first, end = np.hsplit(spans[at : at + self.rows], 3)  # (rows, 1) each
            # Windows have one shape, for one compiled graph. Documents are as long as the longest.
            longest = int((end - begin).max()) if stateful else self.seq_len
            cache = {"cache": {}} if stateful else {}
            for start in range(0, longest, self.seq_len):
                places = begin + np.arange(start, min(start + self.seq_len, longest))
                scored = (first <= places) & (places < end)
                places = np.where(places < end, places, 0)  # BOS fills what a row leaves
                ids = tokens[places]
                targets = tokens[places + 1]
                byte_count = (token_bytes(self.tokenizer, ids, targets) * scored).sum()
                targets = np.where(scored, targets, -1)  # the model's loss of -1 is 0
                ids, targets = (torch.from_numpy(array).to(device) for array in (ids, targets))
                sums[0] += model(ids, targets, **cache).double().sum()
                sums[1] += scored.sum()
                sums[2] += byte_count
        nats, count, byte_count = self.runtime.sum(sums).tolist()
        assert count == len(tokens) - 1, f"scored {count:.0f} of {len(tokens) - 1} predictions"
        return Score(nats, int(count), int(byte_count))


# === end: evaluation ===


# ----------------------------------------------------------------------------------------------------------- weights


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
        shape = {field.name: meta["identity"][field.name] for field in fields(GPTConfig)}
        run = {**meta["settings"], "steps": meta["step"]}
        training = load("training.pt")
        if average != "raw":  # a network's state is its parameters, in their order
            require(training[average]["count"] > 0, "none had been collected when it was saved")
            tensors = dict(zip(tensors, training[average]["values"], strict=True))
        table = {kind: {**own} for kind, own in training.get("exporter", {}).get("table", {}).items()}
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
        found, faults = newest_checkpoint(list_checkpoints(Path(path)) or [Path(path)], ("meta.json", "model.pt"))
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
        return pack_artifact(source.tensors, coded, settings=source.shape,
                             tokenizer_sha256=header["tokenizer_sha256"], meta=header["meta"])
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


def read_data(tuned: SimpleNamespace, settings: Settings) -> tuple[Dataset, SimpleNamespace]:
    """What open_data reads, for a model, and settings for Batches. UserError: no DATA_PATH, another tokenizer."""
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
    return data, options


def distill(base: SimpleNamespace, tuned: SimpleNamespace, settings: Settings) -> dict[str, Tensor]:
    """Scales by which the logits of base + delta come near to the tuned model's, in mean squares (arXiv 2402.10193).

    They are learned in units of their matrix's mean, so that DISTILL_LR suits large deltas and small ones. None, if
    the logits of the first batch are not nearer in the end.
    """
    (data, options), runtime, group = read_data(tuned, settings), start_runtime(settings.device), settings.delta_group
    try:
        batches = Batches(data, options, runtime)
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
    weights for error in outputs: up to 2.8 times that of the nearest codes was measured. Other weights of the same
    size give 9 times that at 5 bits, so that an artifact with more than 4 times it is refused.
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
    for name, record in progress(source.header["streams"].items(), "info"):
        if record["class"] == "coder":
            parts[f"({name})"].update(bytes=record["length"], zstd=1)
            continue
        w, coder = source.tensors[name], "rans" if record["dtype"] == "<u2" else "zstd"
        tensors[name] = sums = collections.Counter(tensors=1, weights=w.numel(), bytes=record["length"])
        if name in source.coded:
            counts = np.bincount(source.coded[name].codes.numpy().view(np.uint8).reshape(-1), minlength=256)
            sums["entropy"] = 8 * entropy_bytes(counts)
        if model:
            own = model.tensors[name].double()
            sums.update(error=(w.double() - own).square().sum().item(), power=own.square().sum().item())
        bits = record.get("bits", 8 * np.dtype(record["dtype"]).itemsize)
        sums[f"{bits}-bit {coder}"] = 1
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
        (data, _), runtime = read_data(tuned, settings), start_runtime(settings.device)
        length = tuned.shape["train_seq_len"]
        scorer = Scorer(data.tokenizer, runtime, length, max(1, 4096 // length))
        before, best, own = (scorer.score(rebuild(each).to(runtime.device), data.val).bpb
                             for each in progress((base, tuned, model), "score"))
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
