"""Supervised fine-tuning, and distillation from a teacher: train a language model on conversations.

    python train_sft.py                                       # demonstrations of TASK=sort, a small new model, on a CPU
    INIT_FROM=runs/<RUN_ID> TRAIN_FILES=a.jsonl,b.jsonl.zst:0.5 torchrun --standalone --nproc_per_node=8 train_sft.py
    TEACHER=runs/<RUN_ID> LAYER_PATTERN="g a" MODEL_DIM=32 NUM_HEADS=2 python train_sft.py      # a student half as wide

Rows are Alpaca, ShareGPT, chat messages, prompt and completion, or text. The loss is of what the assistant says alone.
ITERATIONS=0: EPOCHS sets the number of steps, and the clock may end the run before. Every setting below is an
environment variable: its name in capitals. A run writes runs/<RUN_ID>/: log.txt, checkpoints, model.upar (the artifact,
read back and scored at the end) and result.json. Sections between `# === shared:` fences stand in other scripts too,
byte for byte (tools/sync.py).
"""

import base64
import bisect
import collections
import contextlib
import difflib
import faulthandler
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
import select
import shutil
import signal
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
    # run
    run_id: str = ""  # name of the run's folder; empty: a name made of the date
    out_dir: str = "runs"  # where runs are written
    config: str = ""  # file of NAME=value lines, below the environment
    resume: str = ""  # a run to go on with from its newest whole checkpoint, with its settings: RUN_ID or folder
    replay: str = ""  # a finished run to repeat step by step, with its settings, by its progress and not by the clock
    seed: int = 1337  # of every random draw
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: CUDA where there is a device
    deterministic: bool = False  # PyTorch's deterministic algorithms: slower on CUDA; on a CPU runs repeat without
    activation_checkpointing: bool = False  # keep each layer's input alone and compute the rest again: less memory
    # data
    train_files: str = ""  # files of rows, each maybe :WEIGHT; empty: TASK
    val_files: str = ""  # files of held-out rows; empty: one prompt in ten, by a hash
    train_on: Literal["assistant", "all"] = "assistant"  # whose tokens are learned; assistant: its end too
    task: str = "sort"  # sort, reverse, add, countdown, zebra, gsm8k, or jsonl: lines with prompt and answer
    task_path: str = ""  # file of gsm8k or jsonl
    demonstrations: int = 20000  # of TASK, where there are no TRAIN_FILES
    eval_prompts: int = 512  # held-out prompts that score the policy
    # model at the start
    init_from: str = ""  # a run, a checkpoint or an artifact; empty: a small model, warmed up on demonstrations
    tokenizer_path: str = ""  # .model file, tiktoken name, .tiktoken file or "bytes"; empty: that of data or artifact
    layer_pattern: str = "g a g"  # g GDN, k GDN with another's keys, s sliding, a full attention
    num_layers: int = 0  # the pattern is repeated or cut to this many layers; 0: as long as it is
    model_dim: int = 64  # width
    num_heads: int = 4  # query heads of attention, and heads of GDN
    mlp: Literal["relu2", "leaky_relu2", "gelu", "swiglu", "bio"] = "relu2"  # its kind
    lora_rank: int = 0  # of adapters, which alone are trained; 0: all weights are
    lora_alpha: float = 16.0  # adapters count by LORA_ALPHA / LORA_RANK
    # distillation
    teacher: str = ""  # a run, a checkpoint or an artifact with the same tokenizer; empty: learn from the rows alone
    kd_loss: Literal["forward", "reverse", "jsd", "attention", "pool", "projection"] = "forward"  # from the teacher
    kd_alpha: float = 0.5  # its weight; that of cross-entropy is 1 - KD_ALPHA
    kd_temperature: float = 1.0  # of both distributions; their divergence counts times its square
    kd_beta: float = 0.5  # of jsd: 0 is forward, 1 is reverse
    kd_top_k: int = 0  # compare the teacher's likeliest tokens alone, so many, renormalised; 0: all
    kd_layers: Literal["last", "all"] = "last"  # of attention, pool, projection; all: each with the one at its depth
    # batch
    train_batch_tokens: int = 2048  # per optimizer step, over all ranks
    train_seq_len: int = 256  # tokens in a window, in training and in evaluation
    micro_batch_tokens: int = 0  # per forward and rank; 0: fitted to memory. Never changes the global batch
    epochs: int = 3  # times that each sample is used
    # clock
    iterations: int = 0  # steps; 0: no limit in steps
    max_wallclock_seconds: float = 100.0  # training clock; 0: no limit in time
    reserve_seconds: float = 5.0  # end of the clock kept for choosing among the averages and packing
    # checkpoints and faults
    save_every: str = "120s"  # between checkpoints: steps, or seconds of training; 0: only at the end or a signal
    keep: int = 2  # newest checkpoints that stay
    spike_policy: Literal["stop", "skip", "rewind"] = "stop"  # skip: the batch; rewind: to a checkpoint, other data
    hang_seconds: float = 60.0  # a step that takes longer, and 20 medians: stacks of all ranks; 0: do not watch
    # log and validation
    train_log_every: int = 50  # steps between log lines
    tracker: Literal["none", "tensorboard", "wandb"] = "none"  # where the log's numbers go too
    val_loss_every: int = 0  # steps between validations, outside the clock; 0: only at the end
    # optimizer
    optimizer: Literal["muon", "lion", "adamw", "adamw8bit", "adafactor"] = "adamw"  # of matrices; not muon: embeddings
    learning_rate: float = 0.003  # of all weights
    weight_decay: float = 0.0  # decoupled, of all but scalars
    beta1: float = 0.9  # AdamW, 8-bit AdamW, Lion
    beta2: float = 0.95  # AdamW, 8-bit AdamW, Lion
    adam_eps: float = 1e-8  # AdamW, 8-bit AdamW
    grad_clip_norm: float = 1.0  # global gradient norm; 0: no clipping
    # schedule, in shares of the run (see Clock)
    lr_schedule: Literal["linear", "cosine", "wsd", "constant"] = "linear"  # warmdown; wsd: 1 - sqrt; constant: none
    warmup_frac: float = 0.02  # learning rate from 0 to 1
    warmdown_frac: float = 0.5  # learning rate from 1 to the floor, at the end
    warmdown_iters: int = 0  # the same in steps of ITERATIONS; 0: use the share
    lr_floor: float = 0.0  # last multiplier of the learning rate
    ema: bool = True  # exponential average of the weights
    ema_start_frac: float = 0.5  # when it starts
    ema_memory_frac: float = 0.02  # its memory, as a share of the run
    swa: bool = True  # plain average of the weights
    swa_start_frac: float = 0.9  # when it starts
    qat: bool = True  # late quantization-aware training of every tensor that the exporter quantizes
    qat_start_frac: float = 0.85  # when it starts; EMA and SWA start again then
    # artifact
    matrix_bits: int = 6  # matrices of the layers: codes up to 2**(bits-1) - 1
    matrix_clip_sigmas: float = 8.0  # the largest code, in root mean squares; 0: the largest weight; -1: least error
    matrix_step: Literal["tensor", "row", "grid"] = "tensor"  # what has its own; grid: a row, a power of 2**(1/16)
    embed_bits: int = 8  # the same for embeddings and head
    embed_clip_sigmas: float = 6.0  # the same
    embed_step: Literal["tensor", "row", "grid"] = "tensor"  # the same
    artifact_bytes_max: int = 16000000  # script + config + artifact, decimal bytes: more is an error at the end

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


# === shared: watch ===
class Watch(threading.Thread):
    """Sees signals and hangs from a thread of its own, for a main thread inside a collective runs no Python.

    SIGTERM or SIGINT becomes `signal`: the training loop ends its step, saves and leaves. The process ends at once and
    unsaved on a second one, outside the loop (`looping`), and where the ranks do not agree to stop (`agreed`).
    """

    def __init__(self, runtime: Runtime, folder: Path, hang_seconds: float, log: Callable):
        super().__init__(daemon=True)
        self.rank, self.folder, self.hang_seconds, self.log = runtime.rank, folder, hang_seconds or math.inf, log
        self.stacks = [folder / f"stacks_rank{rank}.txt" for rank in range(runtime.world_size)]
        self.signal, self.heard, self.looping, self.agreed = 0, 0.0, False, not runtime.distributed
        self.step, self.median, self.began, self.told = 0, 0.0, math.inf, -1  # began: inf outside a step
        self.bell, ring = os.pipe()
        os.set_blocking(ring, False)
        signal.set_wakeup_fd(ring)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)  # the byte that comes through the pipe counts
        self.start()

    def run(self) -> None:
        while True:
            ready, now = select.select([self.bell], [], [], 0.2)[0], time.monotonic()
            for number in os.read(self.bell, 64) if ready else b"":
                if not self.looping or self.signal and now - self.heard > 1:  # torchrun repeats a terminal's Ctrl-C
                    self.leave(number, "at once")
                self.signal, self.heard = number, self.heard or now
            if self.signal and not self.agreed and now - max(self.heard, self.began) > 10 + 2 * self.median:
                self.leave(self.signal, "unsaved, for the ranks did not agree to stop within 10 s")
            if now - self.began > max(self.hang_seconds, 20 * self.median) and self.told != self.step:
                self.told = self.step
                with contextlib.suppress(OSError):  # a full disk, a folder that is gone
                    self.report(now - self.began)

    def leave(self, number: int, how: str) -> None:
        """End the process whatever its main thread does."""
        sys.stderr.write(f"rank {self.rank}: {signal.Signals(number).name} ends the run {how}; RESUME={self.folder}\n")
        os._exit(128 + number)

    def report(self, seconds: float) -> None:
        """Write this rank's stacks to stacks_rank<n>.txt; the first rank of those that do says who waits for whom."""
        frame, waits = sys._current_frames()[threading.main_thread().ident], False
        while frame.f_back and frame.f_globals is not globals():
            waits |= "torch/distributed" in frame.f_code.co_filename
            frame = frame.f_back
        waits |= frame.f_code.co_name == "receive"  # on CUDA: for this rank's device, which waits for the others'
        start = f"step {self.step + 1}: "
        with open(self.stacks[self.rank], "w", encoding="utf-8") as file:
            file.write(f"{start}{'waits' if waits else 'is'} in {frame.f_code.co_name}, line {frame.f_lineno}\n")
            file.flush()
            faulthandler.dump_traceback(file)
        time.sleep(3)  # for the other ranks'
        lines = [path.read_text(encoding="utf-8").partition("\n")[0] if path.exists() else "" for path in self.stacks]
        said = {rank: line.removeprefix(start) for rank, line in enumerate(lines) if line.startswith(start)}
        ranks = [f"rank {rank} {said.get(rank, 'says nothing')}" for rank in range(len(lines))]
        if self.rank == min(said):
            text = (f"hang: {start}{seconds:.0f} s so far; {'; '.join(ranks)}; who waits, waits for those who do not; "
                    f"stacks in {self.folder}/stacks_*")
            self.log(text, terminal=False)
            sys.stderr.write(text + "\n")
# === end: watch ===


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


# === shared: optimizer ===
OPTIMIZER_PRESETS: dict[str, dict] = {  # below CONFIG and environment; from 60 to 300 steps of a small network
    "muon": {},
    "lion": dict(matrix_lr=0.001, tied_embed_lr=0.004, head_lr=0.002, beta2=0.99),
    **dict.fromkeys(("adamw", "adamw8bit"), dict(matrix_lr=0.003, tied_embed_lr=0.01)),
    "adafactor": dict(matrix_lr=0.1, tied_embed_lr=0.4, head_lr=0.1),  # shares of a tensor's RMS
}
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # kellerjordan.github.io/posts/muon


def orthogonalize(G: Tensor, steps: int, dtype: torch.dtype | None = None) -> Tensor:
    """Each matrix of G (N, R, C) with its singular values pushed to about 1, by Newton-Schulz steps in `dtype`.

    None: bfloat16 on CUDA, else that of G, which is also what comes back.
    """
    a, b, c = NEWTON_SCHULZ
    tall = G.size(1) > G.size(2)
    X = (G.mT if tall else G).to(dtype or (torch.bfloat16 if G.is_cuda else G.dtype))
    X = X / (X.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        A = X @ X.mT
        B = torch.baddbmm(A, A, A, beta=b, alpha=c)  # b A + c A A
        X = torch.baddbmm(X, B, X, beta=a)  # a X + B X
    return (X.mT if tall else X).to(G.dtype).contiguous()  # NCCL gathers nothing else


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalized: a matrix takes steps of spectral norm about lr sqrt(max(1, rows / cols)).

    A parameter's `splits` are matrices of their own. Ranks share out those of one shape, and each keeps all momentum.
    """

    def __init__(self, groups: list[dict], settings, runtime: Runtime, dtype: torch.dtype | None = None):
        self.runtime, self.settings, self.dtype = runtime, settings, dtype
        super().__init__(groups, {})
        self.batches: dict[tuple, list] = {}  # shape -> [(parameter, its rows)]
        for param in self.param_groups[0]["params"]:
            edges = itertools.accumulate(getattr(param, "splits", (param.size(0),)), initial=0)
            for begin, end in itertools.pairwise(edges):
                self.batches.setdefault((end - begin, param.size(1)), []).append((param, slice(begin, end)))

    @torch.no_grad()
    def step(self, bad: Tensor) -> None:
        """One update; where `bad` (0-d bool, on the device) is true, weights and state stay, in all classes here."""
        group, runtime = self.param_groups[0], self.runtime
        momentum, lr = group["momentum"], torch.where(bad, 0.0, group["lr"])
        for param in group["params"]:
            state = self.state[param]
            buffer = state["momentum_buffer"] if state else torch.zeros_like(param)
            state["momentum_buffer"] = buffer.lerp_(torch.where(bad, buffer, param.grad), 1 - momentum)
        for (rows, cols), pieces in self.batches.items():
            share = -(-len(pieces) // runtime.world_size)
            update = group["params"][0].new_zeros(share, rows, cols)
            for at, (param, span) in enumerate(pieces[runtime.rank * share :][:share]):
                torch.lerp(param.grad[span], self.state[param]["momentum_buffer"][span], momentum, out=update[at])
            update = orthogonalize(torch.where(bad, 0.0, update), self.settings.muon_backend_steps, self.dtype)
            if runtime.distributed:
                own, update = update, update.new_empty(share * runtime.world_size, rows, cols)
                getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(update, own)  # renamed after torch 2.11
            scale = lr * max(1.0, rows / cols) ** 0.5
            for at, (param, span) in enumerate(pieces):
                param[span].mul_(1 - lr * group["weight_decay"]).sub_(scale * update[at])


class Lion(torch.optim.Optimizer):
    """The sign of an interpolated momentum (arXiv 2302.06675, algorithm 2): every weight moves by lr."""

    @torch.no_grad()
    def step(self, bad: Tensor) -> None:
        for group in self.param_groups:
            lr, (beta1, beta2) = torch.where(bad, 0.0, group["lr"]), group["betas"]
            for param in group["params"]:
                state = self.state[param]
                buffer = state["momentum_buffer"] if state else torch.zeros_like(param)
                grad = torch.where(bad, buffer, param.grad)  # leaves the buffer as it is
                param.mul_(1 - lr * group["weight_decay"]).sub_(lr * buffer.lerp(grad, 1 - beta1).sign_())
                state["momentum_buffer"] = buffer.lerp_(grad, 1 - beta2)


class AdamW8bit(torch.optim.Optimizer):
    """AdamW (arXiv 1711.05101) with two bytes of state a weight, in blocks of 256 with two scales each (2110.02861).

    Kept are r = sqrt(v), a level 2**(-n / 16) below the block's largest, and m / r, linear: a linear v would be 0.
    """

    @torch.no_grad()
    def step(self, bad: Tensor) -> None:
        for group in self.param_groups:
            lr, (beta1, beta2) = torch.where(bad, 0.0, group["lr"]), group["betas"]
            for param in group["params"]:
                state, size, zeros = self.state[param], param.numel(), param.new_zeros
                grad = F.pad(param.grad.flatten(), (0, -size % 256)).view(-1, 256)  # (blocks, 256)
                if not state:
                    state.update(updates=zeros(()), scales=zeros(2, len(grad), 1), codes=zeros(2, *grad.shape).char())
                updates = state["updates"] + 1
                ratio, level = state["codes"].to(grad.dtype)  # (blocks, 256) each
                root = state["scales"][1] * torch.exp2((level + 128) / -16)
                m = (root * ratio * state["scales"][0]).lerp(grad, 1 - beta1)
                root = root.square().lerp(grad.square(), 1 - beta2).sqrt()
                update = m / (1 - beta1**updates) / (root / (1 - beta2**updates).sqrt() + group["eps"])
                update = torch.where(bad, 0.0, update).flatten()[:size].view_as(param)
                param.mul_(1 - lr * group["weight_decay"]).sub_(lr * update)
                ratio = torch.where(root > 0, m / root, 0.0)
                scales = torch.stack([ratio.abs().amax(1, keepdim=True) / 127, root.amax(1, keepdim=True)])
                level = (16 * torch.log2(scales[1] / root)).clamp(max=255) - 128
                codes = torch.stack([ratio / scales[0], level]).nan_to_num(0.0).round().char()  # 0 / 0: a zero block
                for key, value in dict(updates=updates, scales=scales, codes=codes).items():
                    state[key] = torch.where(bad, state[key], value)


class Optimizers:
    """The optimizer that settings.optimizer names, for what it owns (`dtype`: see orthogonalize), and fused AdamW."""

    def __init__(self, model: nn.Module, settings, runtime: Runtime, dtype: torch.dtype | None = None):
        self.names = {param: name for name, param in model.named_parameters() if param.requires_grad}
        rates = {"matrix": (settings.matrix_lr, settings.muon_wd), "head": (settings.head_lr, settings.adam_wd),
                 "embedding": (settings.tied_embed_lr, settings.adam_wd), "control": (settings.scalar_lr, 0.0)}
        rates["lora"], kinds = rates["matrix"], {"head": "head", "ab": "control", "lora_a": "lora", "lora_b": "lora"}
        owned = {"muon": ["matrix"], "adamw": []}.get(settings.optimizer, ["matrix", "lora", "head", "embedding"])
        least = 4096 if settings.optimizer == "adamw8bit" else 0  # weights; what has fewer is AdamW's
        own, rest = {}, {}  # kind -> group, of the named optimizer and of AdamW
        for param, name in self.names.items():
            kind = kinds.get(name.rsplit(".", 1)[-1], tensor_class(name, param))
            lr, decay = rates[kind]
            group = dict(params=[], lr=torch.tensor(lr, device=runtime.device), base_lr=lr, weight_decay=decay)
            groups = own if kind in owned and param.numel() >= least else rest
            groups.setdefault(kind, group)["params"].append(param)
        adam = dict(betas=(settings.beta1, settings.beta2), eps=settings.adam_eps)
        # Its step is a share of max(eps[1], RMS(w)): at torch's 1e-3 what begins at 0 crawls. eps[0]**2 is the paper's.
        make = {"muon": lambda groups: Muon(groups, settings, runtime, dtype),
                "lion": lambda groups: Lion(groups, adam), "adamw8bit": lambda groups: AdamW8bit(groups, adam),
                "adafactor": lambda groups: torch.optim.Adafactor(groups, eps=(1e-15, 0.02))}
        self.all = [make[settings.optimizer](own.values())] if own else []
        self.all += [torch.optim.AdamW(rest.values(), **adam, fused=True)] if rest else []
        self.params = [param for optimizer in self.all for group in optimizer.param_groups for param in group["params"]]
        for param in self.params:
            param.grad = torch.zeros_like(param)

    def reduce_gradients(self, runtime: Runtime, clip: float, extra: Tensor) -> tuple[Tensor, Tensor]:
        """Sum gradients and `extra` (n,) over ranks, clip the norm (0: not); the norm before that, sums of extra."""
        grads = [param.grad for param in self.params]
        if runtime.distributed:
            flat = runtime.sum(torch.cat([*(grad.flatten() for grad in grads), extra]))
            *parts, extra = flat.split([*(grad.numel() for grad in grads), len(extra)])
            torch._foreach_copy_(grads, [part.view_as(grad) for grad, part in zip(grads, parts, strict=True)])
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        if clip:
            torch._foreach_mul_(grads, (clip / (norm + 1e-6)).clamp(max=1.0))
        return norm, extra

    def step(self, multiplier: float, momentum: float, bad: Tensor) -> None:
        """One update at `multiplier` times the learning rates. Where `bad` is true nothing changes."""
        for optimizer in self.all:
            for group in optimizer.param_groups:
                group["lr"].fill_(group["base_lr"] * multiplier)
                group["momentum"] = momentum  # of Muon, the others read betas
            if isinstance(optimizer, torch.optim.AdamW):
                optimizer.found_inf = bad.float()  # torch's fused AdamW skips its step on the device where this is 1
            if isinstance(optimizer, Muon | Lion | AdamW8bit):
                optimizer.step(bad)
            elif not (isinstance(optimizer, torch.optim.Adafactor) and bad):  # waits for the device, as Adafactor does
                optimizer.step()

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Moments, scales and counters of each parameter, by its name."""
        return {self.names[param]: dict(own) for each in self.all for param, own in each.state.items()}

    def load_state_dict(self, saved: dict[str, dict[str, Tensor]]) -> None:
        """Take such a state in place of the present one; an empty one is that before the first step."""
        for each in self.all:
            each.state.clear()
            for group in each.param_groups:
                each.state.update((p, saved[self.names[p]]) for p in group["params"] if self.names[p] in saved)
# === end: optimizer ===


# === shared: schedule ===
class Kept:
    """What a checkpoint brings back by the attributes that `kept` names."""

    def state_dict(self) -> dict:
        return {name: getattr(self, name) for name in self.kept}

    def load_state_dict(self, saved: dict) -> None:
        vars(self).update(saved)


class Clock(Kept):
    """Training time, rank 0's for all ranks; no step waits for it. `iterations`, `budget` (seconds): 0 for no limit.

    `replay`: the progress that each step of another run used. It counts in place of both, and the run ends with it.
    """

    kept = ("before", "seconds", "used", "packet")

    def __init__(self, iterations: int, budget: float, runtime: Runtime, replay: Iterable[float] = (),
                 now: Callable[[], float] = time.perf_counter):
        self.iterations, self.budget, self.replay = iterations or math.inf, budget or math.inf, list(replay)
        self.runtime, self.now = runtime, now
        self.before, self.started = 0.0, None  # seconds of finished stretches, start of the running one
        self.seconds, self.used = [0.0], []  # of each step: agreed seconds at its end, progress that it used
        self.packet, self.arrived = None, None  # of the step before: what was sent, on CUDA when it is on the host

    def elapsed(self) -> float:
        """This rank's training seconds so far."""
        return self.before + (self.now() - self.started if self.started is not None else 0.0)

    def start(self) -> None:
        """Let the clock run."""
        self.started = self.now()

    def stop(self) -> None:
        """Stand still, for validation and saving, once the device has done what was asked of it."""
        if self.runtime.device.type == "cuda":
            torch.cuda.synchronize()
        self.before, self.started = self.elapsed(), None

    def send(self, loss: Tensor, bad: Tensor, stop: Tensor) -> None:
        """End of a step: start to spread rank 0's seconds, the loss, whether it is masked, whether to stop."""
        seconds = torch.tensor(self.elapsed(), dtype=torch.float64).to(loss.device, non_blocking=True)
        packet = torch.stack([loss.double(), bad.double(), stop.double(), seconds])
        if self.runtime.distributed:
            dist.broadcast(packet, src=0)
        self.packet = packet.to("cpu", non_blocking=True)
        self.arrived = torch.cuda.current_stream().record_event() if packet.is_cuda else None

    def receive(self) -> tuple[float, bool, bool] | None:
        """(loss, bad, stop) of the step before, or None if there was none; to be called in the middle of a step."""
        if self.packet is None:
            return None
        if self.arrived is not None:
            self.arrived.synchronize()  # bounds the host's lead to a step; the device, with work queued, does not wait
        (loss, bad, stop, seconds), self.packet, self.arrived = self.packet.tolist(), None, None
        self.seconds.append(seconds)
        return loss, bad > 0, stop > 0

    def median_step(self) -> float:
        """Median seconds of the last nine steps, the run's first one aside: a stall does not move it, a drift does."""
        recent = self.seconds[1:][-10:]
        return statistics.median(b - a for a, b in zip(recent, recent[1:], strict=False)) if len(recent) > 1 else 0.0

    def progress(self, step: int) -> float:
        """Where the run stands at the end of `step`, so that the last lands near 1; once a step, after `receive`."""
        by_step, by_time = (step + 1) / self.iterations, (self.seconds[-1] + self.median_step()) / self.budget
        own = min(1.0, max(by_step, by_time, *self.used[-1:]))
        self.used.append(self.replay[len(self.used)] if self.replay else own)
        return self.used[-1]

    def is_last(self, step: int) -> bool:
        """Whether `step` must not run any more: iterations done, or the time left is less than a median step."""
        if self.replay:
            return len(self.used) == len(self.replay)
        flying = 0.0 if self.packet is None else self.median_step()  # the step whose time is not known yet
        return step >= self.iterations or self.budget - self.seconds[-1] - flying < self.median_step()


class Plan:
    """The phases of a run, each from a share of progress on, whatever the step time."""

    def __init__(self, settings):
        self.settings = s = settings
        if not s.iterations and not s.max_wallclock_seconds:
            raise UserError("ITERATIONS=0 and MAX_WALLCLOCK_SECONDS=0: the run would never end; set one of them")
        if s.reserve_seconds >= s.max_wallclock_seconds > 0:
            raise UserError(f"RESERVE_SECONDS={s.reserve_seconds}: must be below MAX_WALLCLOCK_SECONDS="
                            f"{s.max_wallclock_seconds}")

        def share(name: str, steps: int, frac: float) -> float:
            if steps > s.iterations:
                raise UserError(f"{name}={steps}: must be at most ITERATIONS={s.iterations}; or use a share of the run")
            return steps / s.iterations if steps else frac

        constant = s.lr_schedule == "constant"
        self.warmdown = 0.0 if constant else share("WARMDOWN_ITERS", s.warmdown_iters, s.warmdown_frac)
        self.momentum_warmup = share("MUON_MOMENTUM_WARMUP_STEPS", s.muon_momentum_warmup_steps,
                                     s.muon_momentum_warmup_frac)
        if s.warmup_frac + self.warmdown > 1:
            raise UserError(f"WARMUP_FRAC={s.warmup_frac}: must be at most {1 - self.warmdown:.3f} with this warmdown")
        # Enabled, and from where to where, in progress. A phase's start_step counts from 1, as in the log; 0: not yet.
        phases = {"warmup": (s.warmup_frac, 0.0, s.warmup_frac), "warmdown": (self.warmdown, 1 - self.warmdown, 1.0),
                  "ema": (s.ema, s.ema_start_frac, 1.0), "swa": (s.swa, s.swa_start_frac, 1.0),
                  "qat": (s.qat, s.qat_start_frac, 1.0)}
        self.phases = {name: SimpleNamespace(planned=begin, end=end, start_step=0, start_progress=0.0, steps=0)
                       for name, (enabled, begin, end) in phases.items() if enabled}
        for name, phase in self.phases.items():
            last = 1 - 1 / s.iterations if s.iterations and name == "qat" else 1.0  # QAT begins with the step after
            if phase.planned >= last:
                raise UserError(f"{name.upper()}_START_FRAC={phase.planned}: {name} could not fire; must be less than "
                                f"{last:.4f}, or set {name.upper()}=0")

    def rates(self, progress: float) -> tuple[float, float]:
        """Multiplier of the learning rates, up to 1, then down to the floor; Muon's momentum, after its warm-up."""
        s = self.settings
        up = min(1.0, progress / s.warmup_frac) if s.warmup_frac else 1.0
        left = min(1.0, (1 - progress) / self.warmdown) if self.warmdown else 1.0
        shapes = {"cosine": 0.5 - 0.5 * math.cos(math.pi * left), "wsd": 1 - math.sqrt(1 - left)}  # arXiv 2405.18392
        share = min(1.0, progress / self.momentum_warmup) if self.momentum_warmup else 1.0
        momentum = s.muon_momentum_warmup_start + share * (s.muon_momentum - s.muon_momentum_warmup_start)
        return up * (s.lr_floor + (1 - s.lr_floor) * shapes.get(s.lr_schedule, left)), momentum

    def advance(self, step: int, progress: float) -> list[str]:
        """Count `step` for each phase that is on at `progress`; the names of those that begin (QAT: the step after)."""
        begun = []
        for name, phase in self.phases.items():
            later = name == "qat"
            if not phase.start_step and progress > phase.planned:
                phase.start_step, phase.start_progress, phase.steps = step + 1 + later, progress, 0 if later else 1
                begun.append(name)
            elif phase.start_step and progress <= phase.end:
                phase.steps += 1
        return begun

    def state_dict(self) -> dict:
        return {name: vars(phase) for name, phase in self.phases.items()}

    def load_state_dict(self, saved: dict) -> None:
        for name, phase in self.phases.items():  # what is planned may have changed since
            vars(phase).update(saved.get(name, {}) | {"planned": phase.planned, "end": phase.end})

    def describe(self, ended: bool = False) -> str:
        """One line a phase: the plan, or once the run has `ended` when it began, and for how many steps it was on."""
        return "\n".join(
            f"plan: {name} from {phase.planned:.1%} to {phase.end:.1%} of the run" if not ended else
            f"phase: {name:8s} planned {phase.planned:6.1%}, " + (
                f"began at step {phase.start_step} ({phase.start_progress:.1%}), on for {phase.steps} steps"
                if phase.steps else "NEVER FIRED") for name, phase in self.phases.items())


class Average(Kept):
    """A float32 average of the parameters: exponential with a memory in shares of the run, or plain (memory None)."""

    kept = ("values", "count", "progress")

    def __init__(self, params: list[nn.Parameter], memory: float | None):
        self.params, self.memory, self.values, self.count, self.progress = params, memory, [], 0, 0.0

    def update(self, progress: float) -> None:
        """Take in the parameters as they are; with `count` 0, at first or set so to start again, copy them."""
        params = [param.detach() for param in self.params]
        if not self.count:
            self.values = [param.float().clone() for param in params]
        keep = math.exp((self.progress - progress) / self.memory) if self.memory else self.count / (self.count + 1)
        torch._foreach_lerp_(self.values, params, 1 - keep)
        self.count, self.progress = self.count + 1, progress
# === end: schedule ===


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


# === shared: checkpoint ===
def save_checkpoint(folder: Path, step: int, parts: dict[str, dict], meta: dict, keep: int) -> None:
    """Write folder/step_<step>, all of it or, where it raises OSError, nothing; then drop all but the `keep` newest."""
    final = folder / f"step_{step:06d}"
    beside, files = final.with_suffix(".part"), {"meta.json": json.dumps(meta).encode()}
    try:
        for old in folder.glob("step_*.part"):
            shutil.rmtree(old)
        beside.mkdir()
        for name, part in parts.items():
            torch.save(part, buffer := io.BytesIO())  # into a file it would not raise OSError on a full disk
            files[f"{name}.pt"] = buffer.getbuffer()
        sums = "".join(f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in files.items())
        for name, data in {**files, "SHA256SUMS": sums.encode()}.items():
            replace_file(beside / name, data)
        shutil.rmtree(final, ignore_errors=True)  # a damaged one; or the same, of a run that went on from before
        beside.rename(final)
        os.fsync(handle := os.open(folder, os.O_RDONLY))
        os.close(handle)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    found = checkpoints(folder)
    at = found.index(final)  # what is newer was damaged, or the run would have gone on from there
    for old in found[:at] + found[at + keep :]:
        shutil.rmtree(old, ignore_errors=True)


def stored_settings(given: dict[str, str], out_dir: str) -> tuple[dict, dict]:
    """Settings of the run that RESUME or REPLAY names, by RUN_ID or path, and those that say where it is. UserError."""
    out_dir, replay, run_id = given.get("OUT_DIR", out_dir), given.get("REPLAY", ""), given.get("RUN_ID", "")
    # Under torchrun --max-restarts a RUN_ID that exists is resumed; only the node that failed counts restarts.
    again = given.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0" and run_id and (Path(out_dir) / run_id).is_dir()
    resume = run_id if again else given.get("RESUME", "")
    if not (name := resume or replay):
        return {}, {}
    folder = Path(name) if os.sep in name else Path(out_dir) / name
    if not resume:
        path = folder / "progress.json"
        if not path.is_file():
            raise UserError(f"REPLAY={replay!r}: no {path}; must be a run that has trained to its end")
        stored = json.loads(path.read_bytes())
        below, every = stored["settings"], stored["settings"]["save_every"]
        if below["spike_policy"] == "rewind" and given.get("SAVE_EVERY", every) != every:
            raise UserError(f"SAVE_EVERY={given['SAVE_EVERY']!r}: must be {every!r}, for that run could rewind")
        if changed := [event["changed"] for event in stored["events"] if event.get("changed")]:
            raise UserError(f"REPLAY={replay!r}: that run was resumed with other settings on its way, {changed}")
        return below | {"run_id": "", "resume": "", "out_dir": out_dir}, {"replay": str(folder)}
    newest, faults = first_whole(checkpoints(folder))
    for wrong, said in ((not folder.is_dir(), f"no folder {folder}; must be a RUN_ID in OUT_DIR, or a path"),
                        (run_id not in ("", folder.name), f"RUN_ID={run_id!r} is another"),
                        ((folder / "result.json").exists(), f"{folder} is finished, its result.json stands"),
                        (not newest and (not again or any(not path.suffix for path in checkpoints(folder))),
                         f"it has no whole checkpoint; {' '.join(faults[:1])}")):
        if wrong:
            raise UserError(f"RESUME={resume!r}: {said}")
    below = json.loads((newest / "meta.json").read_bytes())["settings"] if newest else {"replay": replay}
    place = {"resume": str(folder), "run_id": folder.name, "out_dir": str(folder.parent)}
    return below, {"replay": below["replay"], **place}


class Run(Kept):
    """A training run: folder, log, events, how far it is; `parts`, with state_dict; `identity`, what may not change."""

    kept = ("step", "saved", "skipped", "losses", "events")

    def __init__(self, settings, runtime: Runtime, parts: dict, identity: dict):
        every = re.fullmatch(r"(\d+)(s?)", settings.save_every)
        if not every or settings.spike_policy == "rewind" and (every[2] or not int(every[1])):
            raise UserError(f"SAVE_EVERY={settings.save_every!r}: must be 500 (steps), 120s, or 0; to rewind, steps")
        shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # pytorch issue 135712: they never meet
        if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0" and (shared or not settings.run_id):
            raise UserError("torchrun --max-restarts: needs RUN_ID, and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1")
        self.settings, self.runtime, self.parts, self.identity = settings, runtime, parts, identity
        self.folder = Path(settings.out_dir) / runtime.agree(settings.run_id or time.strftime("run_%Y%m%d_%H%M%S"))
        often, self.saved, self.stands = int(every[1]) or math.inf, 0.0, -1
        self.every_steps, self.every_seconds = (math.inf, often) if every[2] else (often, math.inf)
        self.step, self.skipped = 0, 0  # step `step` reads the data of step + skipped
        self.losses, self.events, self.file, self.clear, self.tracker = [], [], None, "", None

    def open(self) -> str:
        """Make or find the folder and begin the log; the checkpoint to load, or "". Raises UserError."""
        newest, faults, path, settings = None, [], self.folder / "log.txt", self.settings
        if self.runtime.rank == 0:
            try:  # before there is a folder; a run without needs neither
                if settings.tracker == "wandb":
                    import wandb
                elif settings.tracker == "tensorboard":
                    from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise UserError(f"TRACKER={settings.tracker!r}: missing; pip install {settings.tracker}") from None
            if settings.resume:
                newest, faults = first_whole(checkpoints(self.folder))
            elif os.path.exists(self.folder) or Path(settings.run_id).name != settings.run_id:
                found = f"exists already in {settings.out_dir}, or is no plain name"
                raise UserError(f"RUN_ID={settings.run_id!r}: {found}; RESUME it, or choose another")
            else:
                try:
                    self.folder.mkdir(parents=True)
                except OSError as error:
                    raise UserError(f"OUT_DIR={settings.out_dir!r}: cannot write there ({error.strerror})") from None
            self.file = open(path, "ab", buffering=0)  # each line is written at once
            self.clear = "\r\033[K" if sys.stdout.isatty() else ""  # wipes a terminal's line of progress
            if settings.tracker == "wandb":
                own = dict(project="underpar", name=self.folder.name, dir=str(self.folder), config=asdict(settings))
                self.tracker = wandb.init(**own).log
            elif settings.tracker == "tensorboard":
                writer = SummaryWriter(self.folder)  # what it is told stays, however the run ends
                self.tracker = lambda numbers, step: (
                    [writer.add_scalar(*number, step) for number in numbers.items()], writer.flush())
            source = Path(__file__).read_text(encoding="utf-8") + "\n" + "=" * 120
            if source not in path.read_text(encoding="utf-8"):
                self.log(source, terminal=False)
            self.log(f"command: {' '.join([Path(sys.executable).name, *sys.argv])}", terminal=False)
            machine = " ".join(f"{key}:{value}" for key, value in describe_machine(self.runtime).items())
            values = [(field, getattr(settings, field.name)) for field in fields(settings)]
            table = [f"{'*' if value != field.default else ' '} {field.name.upper()}="  # *: not the default
                     f"{int(value) if field.type is bool else value}" for field, value in values]
            self.log("\n".join([machine, *table, *faults]))
        return self.runtime.agree(str(newest or ""))

    def log(self, text: str, terminal: bool = True) -> None:
        """To log.txt, which is gone on with where it stands, to the terminal and to TRACKER; nothing but on rank 0."""
        if self.file:
            try:
                if terminal:
                    print(self.clear + text, flush=True)
                self.file.write(text.encode() + b"\n")
                self.mirror(text)
            except OSError as error:  # a full disk may have room again before the next checkpoint
                with contextlib.suppress(OSError):
                    sys.stderr.write(f"log.txt: {error.strerror}, lost: {text[:200]}\n")

    def mirror(self, text: str) -> None:
        """To TRACKER the numbers of a step's line, and as held_out/NAME a validation's, of an interval its mean."""
        of = re.match(r"step:(\d+)(/?)|before: |after: |from the artifact: val", text)
        if self.tracker and of:
            found = re.findall(r"(\w+)(?::|': \[?)(-?(?:\d[\d.e+-]*|nan|inf))", text.removeprefix(f"step:{of[1]}"))
            kind = "" if of[2] else "held_out/"
            step = int(of[1] or (0 if text.startswith("before") else self.step))  # a resumed run says `before` again
            self.tracker({kind + name: float(value) for name, value in found}, step)

    def event(self, name: str, **found) -> None:
        """For the log and for result.json."""
        self.events.append({"event": name, **found})
        self.log(f"event: {name} " + " ".join(f"{key}:{value}" for key, value in found.items()))

    def save(self, seconds: float) -> None:
        """Write a checkpoint (rank 0). That it cannot be written is an event if an older one stands, else UserError."""
        begin, self.saved, stands, self.stands = time.perf_counter(), seconds, self.stands, self.step
        if self.runtime.rank or stands == self.step:
            return
        states = {name: part.state_dict() for name, part in self.parts.items()}
        meta = {"script": Path(__file__).name, "code_sha256": sha256_file(__file__), "settings": asdict(self.settings),
                "identity": self.identity, "rng": torch.get_rng_state().tolist(), **self.state_dict()}
        try:
            files = {"model": states.pop("network"), "training": states}
            save_checkpoint(self.folder, self.step, files, meta, self.settings.keep)
        except OSError as error:
            if first_whole(checkpoints(self.folder))[0] is None:
                raise UserError(f"OUT_DIR={self.settings.out_dir!r}: no checkpoint can be written ({error})") from None
            self.event("save_failed", step=self.step, error=str(error))
        else:
            self.log(f"step:{self.step} saved in {1000 * (time.perf_counter() - begin):.0f}ms")

    def load(self, folder: Path, resume: bool = True) -> None:
        """Bring all that back; where it is to rewind and not to resume, clock and events go on. Raises UserError."""
        meta = json.loads((folder / "meta.json").read_bytes())
        for name, value in self.identity.items():
            if (was := meta["identity"].get(name)) != value:
                raise UserError(f"RESUME={self.settings.resume!r}: {name.upper()}={value!r}; must stay {was!r}")
        load = functools.partial(torch.load, map_location=self.runtime.device, weights_only=True)
        states = {"network": load(folder / "model.pt"), **load(folder / "training.pt")}
        for name, part in self.parts.items():
            if name in states and (resume or name != "clock"):
                part.load_state_dict(states[name])
        self.step = self.stands = meta["step"]
        if resume:
            torch.set_rng_state(torch.tensor(meta["rng"], dtype=torch.uint8))
            self.load_state_dict({name: meta[name] for name in self.kept})
            was = meta["settings"] | {name: getattr(self.settings, name) for name in ("resume", "run_id", "out_dir")}
            self.event("resume", step=self.step, ranks=self.runtime.world_size, changed={
                name: value for name, value in vars(self.settings).items() if was.get(name) != value})

    def judge(self, loss: float, bad: bool, last: bool = False) -> bool:
        """Whether a step was good; a `bad` one's update is masked, SPIKE_POLICY does the rest or FloatingPointError."""
        policy = "skip" if last and self.settings.spike_policy == "rewind" else self.settings.spike_policy
        if not bad:
            self.losses = [*self.losses, loss][-64:]
            return True
        fault = f"step {self.step}: its loss {loss} is a spike, or it or a gradient is not finite; weights stay"
        if policy == "stop" or sum(event["event"] == policy for event in self.events) >= 10:
            self.log(f"error: {fault}", terminal=False)
            raise FloatingPointError(f"{fault}; RESUME={self.folder} with SPIKE_POLICY=skip or rewind goes on")
        self.event(policy, step=self.step, loss=str(loss))
        if policy == "rewind":
            ahead = self.step + self.skipped + 1
            self.load(Path(self.runtime.agree(str(first_whole(checkpoints(self.folder))[0]))), resume=False)
            self.skipped = ahead - self.step  # this step's data is left out too
        return False
# === end: checkpoint ===


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


# === shared: rows ===
DEMONSTRATION = 1 << 40  # number of the first one, beyond those of an RL script's problems


@dataclass(frozen=True, eq=False)
class Row:
    """A conversation from its BOS on: ids (n,); what the assistant says of them and what is learned, bool (n,); a hash
    of its prompt."""

    key: int
    ids: np.ndarray
    said: np.ndarray
    learned: np.ndarray


def make_row(turns: list[tuple[str, str]], tokenizer: Tokenizer, s) -> Row:
    """Of turns as in `row_turns`. Its prompt is what comes before the first answer to a user, or else all: the earlier
    answers of a conversation are learned and scored too. Raises RowError."""
    ends = [at for at, (role, _) in enumerate(turns) if role == "<|assistant|>" and "<|user|>" in dict(turns[:at])]
    key = hashlib.blake2b(json.dumps(turns[: ends[0]] if ends else turns).encode(), digest_size=8).digest()
    ids, said = map(np.array, turn_ids(tokenizer, turns))
    if len(ids) > s.train_seq_len:
        raise RowError(f"answer longer than the context, TRAIN_SEQ_LEN={s.train_seq_len}")
    return Row(int.from_bytes(key, "big"), ids, said, said | (s.train_on == "all") & (np.arange(len(ids)) > 0))


def read_data(s, tokenizer: Tokenizer, say: Callable[[str], None]) -> SimpleNamespace:
    """rows to train on, of all files; parts, a file's numbers of rows and its weight; held_out rows. Raises UserError.

    Without VAL_FILES one prompt in ten is held out, with all its rows of all files; with them rows are left out whose
    prompt stands there. s: settings.
    """
    def parse(row: dict) -> tuple[str, Row]:
        name, turns = row_turns(row)
        return name, make_row(turns, tokenizer, s)

    held_out = [row for path in s.val_files.split(",") if path for row in read_rows(path.strip(), parse, say)]
    if s.train_files:
        files = [(path, read_rows(path, parse, say), weight)
                 for path, weight in weighted_files("TRAIN_FILES", s.train_files).items()]
        held_out = held_out or [row for _, rows, _ in files for row in rows if row.key % 10 == 0]
    else:
        task = make_task(s.task, s.task_path, s.seed)
        count = min(s.demonstrations, len(task.rows[False]) or s.demonstrations)
        problems = [task.problem(DEMONSTRATION + at, False) for at in range(count)], task.held_out(s.eval_prompts)
        try:
            rows, own = ([parse({"prompt": problem.prompt, "completion": problem.answer})[1] for problem in some]
                         for some in problems)
        except RowError as error:
            raise UserError(f"TASK={s.task!r}: a demonstration is an {error}; must be longer") from None
        files, held_out = [(f"TASK={s.task}", rows, 1.0)], held_out or own
    keys = {row.key for row in held_out}
    files = [(path, [row for row in rows if row.key not in keys], weight) for path, rows, weight in files]
    for path, rows, weight in files:
        if not rows or len(held_out) < 2:
            raise UserError(f"{path}: {len(rows)} rows to train on, and {len(held_out)} held out of all; must be 1 and "
                            "2 at least; VAL_FILES names others to hold out")
        say(f"data: {path}, {len(rows)} rows to train on with weight {weight:g}, {sum(len(row.ids) for row in rows)} "
            f"tokens, {sum(int(row.learned.sum()) for row in rows)} of them learned; {len(held_out)} held out of all")
    held_out = random.Random(s.seed).sample(held_out, min(s.eval_prompts, len(held_out)))
    ends = [0, *itertools.accumulate(len(rows) for _, rows, _ in files)]
    parts = [(range(*pair), weight) for pair, (_, _, weight) in zip(itertools.pairwise(ends), files, strict=True)]
    return SimpleNamespace(rows=[row for _, rows, _ in files for row in rows], parts=parts, held_out=held_out)


def best_fit(lengths: list[int], room: int) -> list[list[int]]:
    """Numbers of the lengths, each at most `room`, in windows: best-fit decreasing, the longest length first, each into
    the fullest window that has room for it.
    """
    windows, free = [], []  # free: (room left, window), sorted
    for at in sorted(range(len(lengths)), key=lambda at: -lengths[at]):
        place = bisect.bisect_left(free, (lengths[at], -1))
        left, window = free.pop(place) if place < len(free) else (room, len(windows))
        if window == len(windows):
            windows.append([])
        windows[window].append(at)
        bisect.insort(free, (left - lengths[at], window))
    return windows


class Epochs:
    """What each step reads: an epoch's rows, packed into windows of TRAIN_SEQ_LEN and shared out over its steps.

    A function of seed and step alone. The windows of the first epoch say how many `steps` each has.
    """

    def __init__(self, data: SimpleNamespace, s, packed: bool):
        self.lengths, self.parts, self.s, self.packed = [len(row.ids) - 1 for row in data.rows], data.parts, s, packed
        self.kept = 0, self.windows(0)
        self.steps = -(-len(self.kept[1]) // (s.train_batch_tokens // s.train_seq_len))

    def rows(self, epoch: int) -> list[int]:
        """Numbers of an epoch's rows, WEIGHT times those of a file: it goes round and round through its rows in a drawn
        order, so that what an epoch leaves out of a round is where the next begins.
        """
        found = []
        for numbers, weight in self.parts:
            order = np.random.default_rng([self.s.seed, numbers.start]).permutation(numbers)
            count = max(1, round(weight * len(numbers)))
            found.append(order[(epoch * count + np.arange(count)) % len(order)])
        return np.concatenate(found).tolist()

    def windows(self, epoch: int) -> list[list[int]]:
        """An epoch's windows, lists of numbers of rows, in a drawn order; without packing a row has one to itself."""
        draw, rows = np.random.default_rng([self.s.seed, 0, epoch]), self.rows(epoch)
        rows = [rows[at] for at in draw.permutation(len(rows))]
        lengths = [self.lengths[row] for row in rows]
        bins = best_fit(lengths, self.s.train_seq_len) if self.packed else [[at] for at in range(len(rows))]
        return [[rows[at] for at in bins[number]] for number in draw.permutation(len(bins))]

    def step(self, step: int) -> list[list[int]]:
        """The windows of a step, those of all ranks."""
        epoch, part = divmod(step, self.steps)
        if self.kept[0] != epoch:
            self.kept = epoch, self.windows(epoch)
        return self.kept[1][part :: self.steps]


def make_windows(rows: list[Row], windows: list[list[int]], device: torch.device, tokens: int,
                 wanted: str) -> list[SimpleNamespace]:
    """Windows, lists of numbers of rows, as batches of at most so many tokens, or of one window.

    Rows stand one after the other, each from its BOS to its last token but one, so that none predicts another's BOS;
    the padding comes last. ids (B, T); targets (B, T), the token after each where it is `wanted`, said or learned, else
    -1; mask, where they are not; row (B, T), the place of a token's row in numbers (R,), -1 in the padding.
    """
    lengths = [sum(len(rows[at].ids) - 1 for at in window) for window in windows]
    order, found = sorted(range(len(windows)), key=lengths.__getitem__), []
    while order:
        width = lengths[order[-1]]
        share = max(1, tokens // width)
        here, order = order[-share:], order[:-share]
        ids, numbers = torch.zeros(len(here), width, dtype=torch.long), []
        targets, row = torch.full_like(ids, -1), torch.full_like(ids, -1)
        for line, window in enumerate(here):
            begin = 0
            for at in windows[window]:
                own, span = rows[at].ids, slice(begin, begin + len(rows[at].ids) - 1)
                ids[line, span], row[line, span] = torch.from_numpy(own[:-1]), len(numbers)
                targets[line, span] = torch.from_numpy(np.where(getattr(rows[at], wanted)[1:], own[1:], -1))
                begin = span.stop
                numbers.append(at)
        parts = dict(ids=ids, targets=targets, mask=targets >= 0, row=row, numbers=torch.tensor(numbers))
        found.append(SimpleNamespace(**{name: x.to(device) for name, x in parts.items()}))
    return found


def ratio_interval(sums: Tensor, counts: Tensor) -> list[float]:
    """Sum over count of n rows (n,) and the ends of its 95% interval over rows, by the linearized ratio estimator."""
    ratio = sums.sum() / counts.sum()
    half = 1.96 * (sums - ratio * counts).std() * len(counts) ** 0.5 / counts.sum()
    return [ratio.item(), (ratio - half).item(), (ratio + half).item()]
# === end: rows ===


# === shared: responses ===
def token_logps(network: GPT, batch: SimpleNamespace, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities (B, T) of batch.targets, 0 where these are -1, and the entropies there, without a gradient.

    Logits of more than 4,096 tokens are made, and in the backward pass made again, for so many at a time: all of them,
    (B, T, vocabulary), would take more memory than the network.
    """
    def some(features: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        logps = (network.logits(features) / temperature).log_softmax(-1)  # (n, V)
        return logps.gather(1, wanted[:, None])[:, 0], torch.special.entr(logps.detach().exp()).sum(-1)

    features, wanted = network.features(batch.ids)[batch.mask], batch.targets[batch.mask]  # (tokens, dim), (tokens,)
    parts = [checkpoint(some, *part, use_reentrant=False) if len(wanted) > 4096 else some(*part)
             for part in zip(features.split(4096), wanted.split(4096), strict=True)]
    return tuple(torch.zeros(batch.mask.shape, device=wanted.device).masked_scatter(batch.mask, torch.cat(each))
                 for each in zip(*parts, strict=True))


def make_batches(rows: list[tuple], device: torch.device, tokens: int) -> list[SimpleNamespace]:
    """Rows (prompt ids, response ids, log-probabilities, advantage) as batches of at most so many tokens, or one row.

    Each is padded on the right to its longest: no padding stands before a token, so none enters a state. ids (B, T);
    targets (B, T), the token after each where that is the response's, else -1; mask, where they are not; sampled.
    """
    rows, found = sorted(rows, key=lambda row: len(row[0]) + len(row[1])), []
    while rows:
        width = len(rows[-1][0]) + len(rows[-1][1]) - 1
        here, rows = rows[-max(1, tokens // width) :], rows[: -max(1, tokens // width)]
        ids, sampled = torch.zeros(len(here), width, dtype=torch.long), torch.zeros(len(here), width)
        targets = torch.full_like(ids, -1)
        for at, (prompt, response, logps, _) in enumerate(here):
            span = slice(len(prompt) - 1, len(prompt) + len(response) - 1)
            ids[at, : span.stop] = torch.tensor([*prompt, *response[:-1]])
            targets[at, span], sampled[at, span] = torch.tensor(response), torch.tensor(logps)
        advantages = torch.tensor([row[3] for row in here])
        parts = {name: x.to(device) for name, x in dict(ids=ids, targets=targets, mask=targets >= 0, sampled=sampled,
                                                        advantages=advantages).items()}
        found.append(SimpleNamespace(**parts, old=None, reference=None))
    return found


def prompt_of(query: object) -> str:
    """The prompt of a query: a string, or an object or a dict that has `prompt`. Raises UserError."""
    prompt = query.get("prompt") if isinstance(query, dict) else getattr(query, "prompt", query)
    if not isinstance(prompt, str):
        raise UserError(f"prompts: must be strings, or objects or dicts with a string `prompt`, not {query!r:.80}")
    return prompt


def checked_rewards(given: object, asked: list[tuple]) -> list[float]:
    """What a reward function returned for (query, completion)s, a number for each. UserError for anything else."""
    try:
        values = torch.as_tensor(given, dtype=torch.float64).tolist()
    except (TypeError, ValueError, RuntimeError):
        values = given
    values = values if isinstance(values, list) and len(values) == len(asked) else [repr(given)] * len(asked)
    for value, (query, text) in zip(values, asked, strict=True):
        if not (isinstance(value, float) and abs(value) < 1e15):
            sample = f"prompt {prompt_of(query)!r:.80}, completion {text!r:.80}"
            raise UserError(f"reward: must be a list of {len(asked)} numbers, finite and below 1e15; it is, or holds, "
                            f"{value!r:.60}; sample: {sample}")
    return values


def mean_interval(values: Tensor) -> list[float]:
    """Mean of (n,) values of different prompts and the ends of its 95% interval, by the normal approximation."""
    mean, half = values.mean().item(), 1.96 * values.std().item() / len(values) ** 0.5
    return [mean, mean - half, mean + half]
# === end: responses ===


# === shared: start ===
# What sections ask of settings that this script leaves alone: the small policy's shape; Muon.
POLICY = dict(norm="rms", mlp_mult=3.0, attn_window=1 << 20, bio_events="off", bio_threshold=0.3, positions="rope",
              rope_base=10000.0, rope_dims=0, qk_norm=True, qk_gain_init=4.0, residual_mix=True, unet_skips=False,
              bigram_vocab_size=0, bigram_dim=0, ngram_order=0, tie_embeddings=True, tied_embed_init_std=0.02,
              logit_softcap=30.0, gdn_neg_eigval=False)
MUON = dict(muon_momentum=0.95, muon_momentum_warmup_start=0.95, muon_momentum_warmup_frac=0.0,
            muon_momentum_warmup_steps=0, muon_backend_steps=5)


def start_policy(settings: Settings, runtime: Runtime) -> tuple[GPT, Tokenizer, str]:
    """Network, on the runtime's device, and tokenizer: those of INIT_FROM, or "new"; and where they are from."""
    if settings.lora_rank and settings.qat:
        raise UserError("QAT=1: adapters are not quantized; must be 0 with LORA_RANK")
    if settings.init_from:
        network, tokenizer, source = load_model("INIT_FROM", settings.init_from, settings.tokenizer_path)
    else:
        torch.manual_seed(settings.seed)
        tokenizer, source = load_tokenizer(settings.tokenizer_path or "bytes"), "new"
        shape = SimpleNamespace(**{**POLICY, **vars(settings)}, num_kv_heads=settings.num_heads)
        network = GPT(model_config(shape, tokenizer.vocab_size, tokenizer.bos_id))
    ranks = {len(param) for name, param in network.named_parameters() if name.endswith("lora_a")}
    if ranks - {settings.lora_rank}:
        raise UserError(f"LORA_RANK={settings.lora_rank}: {source} has adapters of rank {min(ranks)}; must be that")
    alphas = {module.scale.item() * settings.lora_rank for module in network.modules() if isinstance(module, Lora)}
    if any(not math.isclose(alpha, settings.lora_alpha, rel_tol=1e-6) for alpha in alphas):
        raise UserError(f"LORA_ALPHA={settings.lora_alpha}: {source} has adapters of alpha {min(alphas):g}; must be so")
    network.activation_checkpointing = settings.activation_checkpointing
    return network.to(runtime.device), tokenizer, source


def adapt(network: GPT, settings: Settings) -> None:
    """Put adapters of LORA_RANK, if any, on the network unless INIT_FROM brought some; train these alone."""
    if settings.lora_rank:
        torch.manual_seed(settings.seed)
        if not any(name.endswith("lora_a") for name, _ in network.named_parameters()):
            setup_lora_adapter(network, settings.lora_rank, settings.lora_alpha)
        freeze_model(network)


def policy_optimizers(network: GPT, settings: Settings, runtime: Runtime) -> Optimizers:
    """Of what is trained, all of it at LEARNING_RATE and, but for scalars, WEIGHT_DECAY."""
    rates = dict.fromkeys(("matrix_lr", "tied_embed_lr", "head_lr", "scalar_lr"), settings.learning_rate)
    decay = dict.fromkeys(("muon_wd", "adam_wd"), settings.weight_decay)
    return Optimizers(network, SimpleNamespace(**MUON, **vars(settings), **rates, **decay), runtime)


def checkpointed(own: dict) -> SimpleNamespace:
    """A dict as a part of checkpoints, out of which its tensors come back on the CPU, as scores are."""
    def load(saved: dict) -> None:
        own.update({name: value.cpu() if isinstance(value, Tensor) else value for name, value in saved.items()})

    return SimpleNamespace(state_dict=functools.partial(dict, own), load_state_dict=load)


def fitting_tokens(network: GPT, device: torch.device) -> int:
    """Tokens whose activations, roughly, take half of the memory that is free now; on a CPU of 1 GiB."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 1 << 30
    return max(4096, free // 2 // (100 * network.config.model_dim * len(network.block_of_layer)))
# === end: start ===


# --------------------------------------------------------------------------------------------------------- objective
DIVERGENCES = ("forward", "reverse", "jsd")  # of KD_LOSS, what compares distributions of tokens


def divergence(student: Tensor, teacher: Tensor, s: Settings) -> Tensor:
    """From logits (n, V): KD_LOSS between the distributions T and S of teacher and student, in nats (n,), times the
    square of the KD_TEMPERATURE, by which both are divided, so that the gradient keeps its size (arXiv 1503.02531).

    forward: KL(T, S); reverse: KL(S, T); jsd (2306.13649): KD_BETA KL(T, M) + (1 - KD_BETA) KL(S, M) with
    M = KD_BETA T + (1 - KD_BETA) S, where 0 means forward and 1 reverse. KD_TOP_K: of both, those of the teacher's
    likeliest tokens, renormalised.
    """
    if s.kd_top_k:
        teacher, likeliest = teacher.topk(min(s.kd_top_k, teacher.size(1)))
        student = student.gather(1, likeliest)
    t, p = ((logits / s.kd_temperature).log_softmax(-1) for logits in (teacher, student))
    beta = {"forward": 0.0, "reverse": 1.0}.get(s.kd_loss, s.kd_beta)

    def kl(x: Tensor, y: Tensor) -> Tensor:
        return (x.exp() * (x - y)).sum(-1)

    if beta in (0.0, 1.0):
        found = kl(p, t) if beta else kl(t, p)
    else:
        middle = torch.logaddexp(t + math.log(beta), p + math.log1p(-beta))
        found = beta * kl(t, middle) + (1 - beta) * kl(p, middle)
    return s.kd_temperature**2 * found


def attention_distance(student: Tensor, teacher: Tensor, batch: SimpleNamespace) -> Tensor:
    """Activation-based attention transfer (arXiv 1612.03928, equation 2, squared) of x (B, T, dim), dims may differ.

    A token's attention is the sum of the squares of x there; a row's map, that of its tokens, is divided by its norm,
    with 1e-6 under the root, for a new mixer puts out zeros.
    Returns of each target the squared distance of the maps of its row, (n,).
    """
    real, maps = batch.row >= 0, []
    of, none = batch.row[real], student.new_zeros(len(batch.numbers), dtype=wide(student).dtype)
    for x in (student, teacher):
        energy = wide(x).square().sum(-1)[real]  # (tokens,)
        norms = (none.index_add(0, of, energy.square()) + 1e-6).sqrt()
        maps.append(energy / norms[of])
    return none.index_add(0, of, (maps[0] - maps[1]).square())[batch.row[batch.mask]]


def pooled_distance(student: Tensor, teacher: Tensor) -> Tensor:
    """Cosine distance (n,) of x (n, dim), averaged over neighbouring channels to the smaller dim of the two."""
    dim, parts = min(student.size(1), teacher.size(1)), (wide(x)[:, None] for x in (student, teacher))
    return 1 - F.cosine_similarity(*(F.adaptive_avg_pool1d(x, dim)[:, 0] for x in parts), dim=1)


def wide(x: Tensor) -> Tensor:
    """In float32 at least."""
    return x.float() if x.dtype == torch.bfloat16 else x


def matched_layers(student: int, teacher: int, which: str) -> list[tuple[int, int]]:
    """Pairs of layers, of networks with so many: the last ones, or each of the student's, with those at its depth."""
    pairs = [(at, -(-(at + 1) * teacher // student) - 1) for at in range(student)]
    return pairs[-1:] if which == "last" else pairs


@contextlib.contextmanager
def tapped(modules: Iterable[nn.Module]) -> Iterator[list[Tensor]]:
    """Inside, the list gets what the modules put out, call by call."""
    found = []
    hooks = [module.register_forward_hook(lambda module, inputs, output: found.append(output)) for module in modules]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def distilled_losses(student: GPT, teacher: GPT, projections: nn.ParameterList, batch: SimpleNamespace,
                     s: Settings) -> tuple[Tensor, Tensor]:
    """Of each target of a batch cross-entropy, in nats, and KD_LOSS, (n,) each; the teacher gets no gradient.

    attention takes what mixers put out; pool and projection what the head reads or, with KD_LAYERS=all, what layers put
    out. projection: mean squared error of the student's channels times a learned matrix and the teacher's. As in
    `token_logps`, logits of more than 4,096 tokens are never held at once.
    """
    mask, features, layers = batch.mask, [], []
    for network in (student, teacher):
        frozen = torch.no_grad() if network is teacher else contextlib.nullcontext()
        with frozen, tapped(network.mixers if s.kd_loss == "attention" else network.blocks) as found:
            features.append(network.features(batch.ids))
        layers.append(found if s.kd_loss == "attention" or s.kd_layers == "all" else [features[-1]])

    def some(x: Tensor, y: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        logits = student.logits(x)
        nats = F.cross_entropy(logits, wanted, reduction="none")
        if s.kd_loss not in DIVERGENCES:
            return nats, torch.zeros_like(nats)
        with torch.no_grad():
            right = teacher.logits(y)
        return nats, divergence(logits, right, s)

    parts = [x.split(4096) for x in (features[0][mask], features[1][mask], batch.targets[mask])]
    run = functools.partial(checkpoint, some, use_reentrant=False) if len(parts[0]) > 1 else some
    nats, apart = (torch.cat(each) for each in zip(*map(run, *parts), strict=True))
    if s.kd_loss in DIVERGENCES:
        return nats, apart
    pairs = [(layers[0][own], layers[1][other])
             for own, other in matched_layers(*map(len, layers), s.kd_layers)]
    if s.kd_loss == "attention":
        found = [attention_distance(x, y, batch) for x, y in pairs]
    elif s.kd_loss == "pool":
        found = [pooled_distance(x[mask], y[mask]) for x, y in pairs]
    else:
        found = [(F.linear(wide(x[mask]), weight) - wide(y[mask])).square().mean(1)
                 for (x, y), weight in zip(pairs, projections, strict=True)]
    return nats, torch.stack(found).mean(0)


def row_scores(found: Tensor) -> dict:
    """For result.json, of held-out rows' nats, tokens and likeliest tokens (n, 3); the answers' tokens alone."""
    nats, tokens, right = found.T
    return {"rows": len(found), "tokens": int(tokens.sum()), "loss": ratio_interval(nats, tokens),
            "accuracy": np.clip(ratio_interval(right, tokens), 0, 1).tolist()}


class SFTTrainer:
    """A network that learns rows and, where there is a teacher, to be like it; `projections` go with it to school only.

    model: a GPT whose tokenizer has role tokens; teacher: another with the same.
    """

    def __init__(self, model: GPT, config: Settings, teacher: GPT | None = None, runtime: Runtime | None = None):
        self.settings = s = config
        self.network, self.teacher, self.projections = model, teacher, nn.ParameterList()
        self.runtime = runtime or Runtime(0, 1, model.embed.device, False)
        if teacher is not None and s.kd_loss == "projection":
            torch.manual_seed(s.seed)
            depths, dims = zip(*((len(each.block_of_layer), each.config.model_dim) for each in (model, teacher)),
                               strict=True)
            self.projections.extend(nn.Parameter((torch.randn(dims[::-1]) * dims[0]**-0.5).to(model.embed))
                                    for _ in matched_layers(*depths, s.kd_layers))
        self.optimizers = policy_optimizers(nn.ModuleList([model, self.projections]), s, self.runtime)
        self.micro_tokens = s.micro_batch_tokens or fitting_tokens(model, self.runtime.device)
        self.table, self.qat = quant_table(s), False
        self.trained = [param for param in model.parameters() if param.requires_grad]
        self.packed = "learned" not in {each.config.positions for each in (model, teacher) if each is not None}

    def weights(self) -> contextlib.AbstractContextManager[None]:
        """The weights that are trained and scored: in quantization-aware training, as the artifact gives them back."""
        return quantized(self.network, self.table) if self.qat else contextlib.nullcontext()

    def batches(self, rows: list[Row], windows: list[list[int]], wanted: str) -> list[SimpleNamespace]:
        """This rank's share of windows, as in `make_windows`."""
        own = windows[self.runtime.rank :: self.runtime.world_size]
        return make_windows(rows, own, self.runtime.device, self.micro_tokens, wanted)

    def forward_backward(self, batches: list[SimpleNamespace], total: int) -> Tensor:
        """Gradients of this rank's part of the loss, a mean over `total` targets of all ranks; of that, and of the
        cross-entropy and the teacher's loss in it, this rank's parts (3,)."""
        s, device = self.settings, self.runtime.device
        torch._foreach_zero_([param.grad for param in self.optimizers.params])
        sums = torch.zeros(3, device=device, dtype=self.network.embed.dtype)
        alpha = 0.0 if self.teacher is None else s.kd_alpha
        with self.weights():
            for batch in batches:
                if self.teacher is None:
                    nats = -token_logps(self.network, batch, 1.0)[0]
                    apart = torch.zeros_like(nats)
                else:
                    nats, apart = distilled_losses(self.network, self.teacher, self.projections, batch, s)
                nats, apart = nats.sum() / total, apart.sum() / total
                loss = (1 - alpha) * nats + alpha * apart
                loss.backward()
                sums += torch.stack([loss, nats, apart]).detach()
        return sums

    @torch.no_grad()
    def score(self, rows: list[Row], network: GPT | None = None) -> Tensor:
        """Of each row's answers, by the network or another: nats, tokens, tokens that were the likeliest, (n, 3)."""
        network = network or self.network
        found = torch.zeros(len(rows), 3, dtype=torch.float64, device=self.runtime.device)
        windows = best_fit([len(row.ids) - 1 for row in rows], self.settings.train_seq_len)
        windows = windows if self.packed else [[at] for at in range(len(rows))]
        with self.weights(), parametrize.cached():
            for batch in self.batches(rows, windows, "said"):
                parts = network.features(batch.ids)[batch.mask], batch.targets[batch.mask], batch.row[batch.mask]
                for features, wanted, row in zip(*(x.split(4096) for x in parts), strict=True):
                    logits = network.logits(features)
                    nats = F.cross_entropy(logits, wanted, reduction="none")
                    each = torch.stack([nats, torch.ones_like(nats), logits.argmax(-1) == wanted], dim=1)
                    found.index_add_(0, batch.numbers[row], each.double())
        return self.runtime.sum(found).cpu()


def load_teacher(s: Settings, tokenizer: Tokenizer, runtime: Runtime) -> GPT | None:
    """The network that TEACHER names, adapters merged, or None. Raises UserError where it does not fit."""
    given = [name for name, value in vars(s).items() if name[:3] == "kd_" and value != getattr(Settings, name)]
    if given and not s.teacher:
        raise UserError(f"{given[0].upper()}={getattr(s, given[0])!r}: needs a TEACHER to learn from")
    if not s.teacher:
        return None
    network, own, file = load_model("TEACHER", s.teacher)
    context = network.config.train_seq_len
    for wrong, said in (
        ((own.sha256, own.vocab_size) != (tokenizer.sha256, tokenizer.vocab_size),
         f"{file} has the tokenizer {own.file} with {own.vocab_size} tokens, the student {tokenizer.file} with "
         f"{tokenizer.vocab_size}; must be the same, see TOKENIZER_PATH"),
        (network.config.positions == "learned" and context < s.train_seq_len,
         f"{file} has learned positions for {context} tokens; TRAIN_SEQ_LEN={s.train_seq_len} must be at most that"),
        (s.kd_top_k == 1, "KD_TOP_K=1 leaves nothing to compare; must be 0, or at least 2"),
        (s.kd_alpha == 1 and s.kd_loss not in DIVERGENCES,
         f"KD_ALPHA=1 with KD_LOSS={s.kd_loss} trains no head; must be less"),
    ):
        if wrong:
            raise UserError(f"TEACHER={s.teacher!r}: {said}")
    return merge_lora(network).to(runtime.device).requires_grad_(False)


def prepare_student(s: Settings, runtime: Runtime) -> tuple[GPT, Tokenizer, str, bool]:
    """Network, its tokenizer with role tokens, where they are from, and whether it grew by these. Raises UserError."""
    unit = s.train_seq_len * runtime.world_size
    if s.train_batch_tokens % unit:
        raise UserError(f"TRAIN_BATCH_TOKENS={s.train_batch_tokens}: must be a multiple of TRAIN_SEQ_LEN x ranks = "
                        f"{unit}")
    network, tokenizer, source = start_policy(s, runtime)
    config, known = network.config, tokenizer.vocab_size
    if s.lora_rank and not tokenizer.roles:
        raise UserError(f"LORA_RANK={s.lora_rank}: {source} has no role tokens, and adapters would not learn their "
                        "embeddings; must be 0 here, adapters can come after")
    if config.positions == "learned" and s.train_seq_len > config.train_seq_len:
        raise UserError(f"TRAIN_SEQ_LEN={s.train_seq_len}: must be at most {config.train_seq_len}, for {source} has "
                        "learned positions")
    tokenizer = grow_roles(network, tokenizer)
    config.train_seq_len = max(config.train_seq_len, s.train_seq_len)
    return network, tokenizer, source, tokenizer.vocab_size > known


# -------------------------------------------------------------------------------------------------------------- main
def main() -> int:
    """One run, from settings to result.json; its exit code. Raises UserError before the first step."""
    begin = time.perf_counter()
    settings = load_settings(Settings, dict(os.environ), stored=lambda given: stored_settings(given, Settings.out_dir))
    runtime = start_runtime(settings.device, settings.deterministic)
    network, tokenizer, source, grown = prepare_student(settings, runtime)
    teacher, notes = load_teacher(settings, tokenizer, runtime), []
    data = read_data(settings, tokenizer, notes.append)
    adapt(network, settings)
    trainer = SFTTrainer(network, settings, teacher, runtime)
    epochs = Epochs(data, settings, trainer.packed)
    steps = settings.iterations or settings.epochs * epochs.steps
    plan, config = Plan(SimpleNamespace(**MUON, **{**vars(settings), "iterations": steps})), network.config
    replay = json.loads((Path(settings.replay) / "progress.json").read_bytes())["progress"] if settings.replay else []
    clock = Clock(steps, max(0.0, settings.max_wallclock_seconds - settings.reserve_seconds), runtime, replay)
    content = hashlib.sha256(b"".join(x.tobytes() for row in data.rows + data.held_out for x in (row.ids, row.said)))
    run = Run(settings, runtime, {}, {
        **vars(config), "tokenizer_sha256": tokenizer.sha256, "data_sha256": content.hexdigest(), **{
            name: getattr(settings, name) for name in ("seed", "train_files", "train_on", "train_batch_tokens",
                                                       "lora_rank", "teacher", "kd_loss", "kd_layers")}})
    checkpoint_path, folder, log = run.open(), run.folder, run.log
    watch = Watch(runtime, folder, settings.hang_seconds, log)
    if runtime.rank == 0 and tokenizer.file != "bytes":
        (folder / tokenizer.file).write_bytes(tokenizer.content)
    memory = {"ema": settings.ema_memory_frac, "swa": None}
    averages = {name: Average(trainer.trained, memory[name]) for name in memory if getattr(settings, name)}
    before, counted = {}, {"tokens": 0, "targets": 0}
    states = {name: checkpointed(own) for name, own in (("before", before), ("counted", counted))}
    run.parts = dict(network=network, projections=trainer.projections, optimizers=trainer.optimizers, plan=plan,
                     clock=clock, **averages, **states)
    log("\n".join([f"model: {source}{', its vocabulary grown by the role tokens' * grown}", *notes]))
    log("parameters: " + " ".join(f"{name}:{count}" for name, count in count_parameters(network).items())
        + f" trained:{sum(map(Tensor.numel, trainer.optimizers.params))} layers: {config.layers}")
    s, windows = settings, epochs.windows(0)
    filled = sum(epochs.lengths[at] for window in windows for at in window) / (len(windows) * s.train_seq_len)
    log(f"batch: an epoch is {len(windows)} windows of {s.train_seq_len} tokens, {filled:.1%} full, in {epochs.steps} "
        f"steps of at most {s.train_batch_tokens} tokens over {runtime.world_size} ranks; {steps} steps at most"
        + ", one row to a window, for learned positions cannot be packed" * (not trainer.packed))
    log(plan.describe())
    if checkpoint_path:
        run.load(Path(checkpoint_path))
        if clock.packet is not None:
            clock.packet[2] = 0.0  # a stop that was asked for then
    else:
        before["scores"] = trainer.score(data.held_out)
        if teacher is not None:
            before["teacher"] = trainer.score(data.held_out, teacher)
        if min(run.every_steps, run.every_seconds) < math.inf:
            run.save(0.0)  # what would keep the run from saving shows before its first step
    for name, found in before.items():
        log(f"{'before' if name == 'scores' else name}: {row_scores(found)}")
    log(f"set-up and first scores: {time.perf_counter() - begin:.1f} s, outside the clock")
    metrics, stop, watch.looping = {}, False, True

    def report() -> None:
        if not metrics:
            return  # a step from before the run was resumed
        seconds, done = clock.seconds[-1], run.step
        line = (f"step:{done}/{steps} " + " ".join(f"{name}:{float(value):.4g}" for name, value in metrics.items())
                + f" train_time:{1000 * seconds:.0f}ms step_avg:{1000 * seconds / done:.2f}ms")
        if done % s.train_log_every == 0 or done <= 5:
            log(line)
        elif run.clear:
            left = f"{clock.budget - seconds:.0f} s left " if clock.budget < math.inf else ""
            print(run.clear + left + line[:100], end="", flush=True)

    clock.start()
    while True:
        last_step, watch.began = clock.is_last(run.step), math.inf  # no limit for validation and saving
        trainer.qat = s.qat and plan.phases["qat"].start_step > 0  # of a run that was resumed, too
        stop |= watch.signal > 0 and not runtime.distributed
        if s.val_loss_every and run.step and run.step % s.val_loss_every == 0 and not (last_step or stop):
            clock.stop()
            log(f"step:{run.step} held_out {row_scores(trainer.score(data.held_out))}")
            clock.start()
        due = run.step % run.every_steps == 0 or clock.seconds[-1] - run.saved >= run.every_seconds
        if stop or last_step or run.step and due:
            clock.stop()
            run.save(clock.seconds[-1])
            runtime.agree("")  # all wait here, where the watch does not count the seconds
            clock.start()
        if last_step or stop:
            break
        watch.step, watch.median, watch.began = run.step, clock.median_step(), time.monotonic()

        windows = epochs.step(run.step + run.skipped)
        own = [data.rows[at] for window in windows for at in window]
        tokens, targets = sum(len(row.ids) - 1 for row in own), sum(int(row.learned.sum()) for row in own)
        sums = trainer.forward_backward(trainer.batches(data.rows, windows, "learned"), targets)
        extra = torch.cat([sums, sums.new_tensor([watch.signal])])
        norm, extra = trainer.optimizers.reduce_gradients(runtime, s.grad_clip_norm, extra)
        previous = clock.receive()  # of the step before; the device has this step's work queued and does not wait
        if previous is not None:
            stop = previous[2]
            watch.agreed |= stop
            if run.judge(*previous[:2]):
                report()
            elif s.spike_policy == "rewind":
                continue
        bad = ~torch.isfinite(norm)
        progress = clock.progress(run.step)
        begun = plan.advance(run.step, progress)
        for name in begun:
            log(f"phase: {name} begins at step {plan.phases[name].start_step}, {progress:.1%} of the run")
        multiplier, momentum = plan.rates(progress)
        trainer.optimizers.step(multiplier, momentum, bad)
        for name, average in averages.items():
            if "qat" in begun:  # an average of weights that never saw the quantizer does not fit it
                average.count = 0
            elif plan.phases[name].start_step:
                average.update(progress)
        counted.update(tokens=counted["tokens"] + tokens, targets=counted["targets"] + targets)
        metrics = dict(zip(("loss", "nats", "kd"), extra, strict=False), grad_norm=norm, targets=targets,
                       epoch=(run.step + run.skipped) // epochs.steps + 1, lr_mul=multiplier, progress=progress)
        clock.send(extra[0], bad, extra[3])
        run.step += 1

    clock.stop()
    previous = None if stop else clock.receive()
    if stop or previous and previous[2] or watch.signal and not runtime.distributed:
        number = signal.Signals(watch.signal or signal.SIGTERM)
        log(f"stopped by {number.name} after step {run.step}; RESUME={folder} goes on")
        runtime.leave()
        return 128 + number
    watch.looping = False
    if previous and run.judge(*previous[:2], last=True):
        report()
    if runtime.rank == 0:
        used = {"settings": vars(settings), "progress": clock.used, "events": run.events}
        replace_file(folder / "progress.json", json.dumps(used).encode())

    clock.start()
    values = {"raw": [param.detach() for param in trainer.trained],
              **{name: average.values for name, average in averages.items() if average.count}}
    trainer.qat, losses = not s.lora_rank, {}  # adapters are quantized as parts of the weights that they change
    count = 2 * s.train_batch_tokens * len(data.rows) // sum(epochs.lengths)  # of rows: two batches
    seen = random.Random(s.seed).sample(data.rows, max(1, min(count, len(data.rows))))
    for name in values if len(values) > 1 else ():
        with swapped(trainer.trained, values[name]):
            losses[name] = row_scores(trainer.score(seen))["loss"][0]
        log(f"weights: {name}, loss {losses[name]:.4f} of {len(seen)} rows of training")
    chosen = min(losses, key=losses.get, default="raw")
    log(f"weights: {chosen} chosen")
    torch._foreach_copy_(values["raw"], values[chosen])
    if s.lora_rank:
        merge_lora(network)
    state = network.state_dict()
    packed, sizes = pack_artifact(state, quantize_all(state, trainer.table), vars(config), tokenizer.sha256,
                                  {"seed": s.seed, "tokenizer": tokenizer.file, "grown": grown})
    clock.stop()
    log(plan.describe(ended=True))
    log(f"clock: {clock.elapsed():.1f} s to train and choose, MAX_WALLCLOCK_SECONDS={s.max_wallclock_seconds}")
    if s.replay:
        run.event("replay", of=s.replay)
    elif 0 < s.max_wallclock_seconds < clock.elapsed():
        run.event("over_clock", seconds=clock.elapsed(), hint="choosing wants more RESERVE_SECONDS")

    artifact = folder / "model.upar"
    if runtime.rank == 0:
        replace_file(artifact, packed)
    runtime.agree("")  # rank 0 has written it
    final, *_ = load_model("ARTIFACT", str(artifact))
    trainer.qat = False  # from here on the network that the file holds, by that file alone
    found = trainer.score(data.held_out, final.to(runtime.device))
    after, (was, tokens, right) = row_scores(found), before["scores"].T
    gain = {"loss": ratio_interval(was - found[:, 0], tokens), "accuracy": ratio_interval(found[:, 2] - right, tokens)}
    log(f"after: {after}")
    log(f"gain: {gain}, paired; of the loss, what it is less")

    code = len(Path(__file__).read_bytes()) + (len(Path(s.config).read_bytes()) if s.config else 0)
    total = code + artifact.stat().st_size
    faults = [f"phase {name} was enabled and never fired" for name, phase in plan.phases.items() if not phase.steps]
    if total > s.artifact_bytes_max:
        faults.append(f"{total} bytes of code and artifact, more than ARTIFACT_BYTES_MAX={s.artifact_bytes_max}")
    if runtime.rank == 0:
        result = {
            "script": Path(__file__).name, "run_id": folder.name, "seed": s.seed, "code_sha256": sha256_file(__file__),
            "tokenizer_sha256": tokenizer.sha256, "grown": grown, "data_sha256": content.hexdigest(),
            **describe_machine(runtime), "world_size": runtime.world_size, "init_from": source,
            "steps": run.step, "rows": len(data.rows), **counted, "train_seconds": clock.elapsed(),
            "total_seconds": time.perf_counter() - begin, "params": count_parameters(network), "weights": chosen,
            "optimizer_state_bytes": sum(t.nbytes for own in trainer.optimizers.state_dict().values()
                                         for t in own.values()),
            "before": row_scores(before["scores"]), "after": after, "gain": gain,
            **({"teacher": {"file": s.teacher, **row_scores(before["teacher"])}} if s.teacher else {}),
            "last": {name: float(value) for name, value in metrics.items()},
            "artifact": str(artifact), "artifact_sha256": sha256_file(artifact),
            "artifact_bytes": artifact.stat().st_size, "code_bytes": code, "total_bytes": total,
            "bytes_by_class": sizes, "phases": plan.state_dict(), "events": run.events, "settings": asdict(settings),
        }
        replace_file(folder / "result.json", (json.dumps(result, indent=1) + "\n").encode())
        log("---\n" + "\n".join(f"{key}: {value}" for key, value in result.items() if not isinstance(value, dict)))
        for fault in faults:
            log(f"error: {fault}; everything was saved", terminal=False)
            sys.stderr.write(f"error: {fault}; everything was saved\n")
    runtime.leave()
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
