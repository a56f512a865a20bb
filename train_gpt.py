"""Pretrain a GDN-hybrid language model against a clock and a byte budget; score what is read back from its artifact.

    CONFIG=configs/cpu.env python train_gpt.py                                  # one CPU process, about 3 minutes
    DATA_PATH=data/datasets/fineweb10B_sp1024 torchrun --standalone --nproc_per_node=8 train_gpt.py
    RESUME=<RUN_ID> python train_gpt.py                                         # from its newest checkpoint

Every setting below is an environment variable: its name in capitals. A run writes runs/<RUN_ID>/: log.txt, checkpoints,
model.upar (the artifact) and result.json. Sections between `# === shared:` fences stand in other scripts too, byte for
byte (tools/sync.py).
"""

import base64
import bisect
import collections
import concurrent.futures
import contextlib
import difflib
import faulthandler
import functools
import hashlib
import io
import itertools
import json
import math
import os
import re
import resource
import select
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, fields
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


# ---------------------------------------------------------------------------------------------------------- settings
@dataclass(frozen=True)
class Settings:
    # run
    run_id: str = ""  # name of the run's folder; empty: a name made of the date
    out_dir: str = "runs"  # where runs are written
    config: str = ""  # file of NAME=value lines, below the environment
    resume: str = ""  # a run to go on with from its newest whole checkpoint, with its settings: RUN_ID or folder
    replay: str = ""  # a finished run to repeat step by step, with its settings, by its progress and not by the clock
    dry_run: bool = False  # print the plan (bytes, FLOPs, memory, steps, phases), by tools/plan.py, and end
    seed: int = 1337  # of every random draw
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: CUDA where there is a device
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # of activations; auto: bfloat16 where CUDA or AMX is
    compile: bool = True  # torch.compile; on a CPU it needs a C++ compiler
    compile_mode: Literal["default", "reduce-overhead", "max-autotune"] = "default"  # of torch.compile
    deterministic: bool = False  # PyTorch's deterministic algorithms: slower on CUDA; on a CPU runs repeat without
    activation_checkpointing: bool = False  # keep each layer's input alone and compute the rest again: less memory
    # data
    data_path: str = "data/embedded"  # folder of shards and manifest.json; or several with weights: a:0.7,b:0.3
    tokenizer_path: str = ""  # .model file, tiktoken name, .tiktoken file or "bytes"; empty: that of data or artifact
    vocab_size: int = 0  # checked against the tokenizer; 0: the tokenizer's
    holdout_tokens: int = 131072  # of the training stream, never trained on: they choose among raw, EMA and SWA weights
    # clock
    iterations: int = 0  # steps; 0: no limit in steps
    max_wallclock_seconds: float = 600.0  # training clock; 0: no limit in time
    reserve_seconds: float = 12.0  # end of the clock kept for choosing among the averages and packing
    warmup_steps: int = 2  # untimed steps that compile; weights, optimizer and data are left as they were
    # batch
    train_batch_tokens: int = 524288  # per optimizer step, over all ranks
    train_seq_len: int = 2048  # tokens in a window, in training and in evaluation
    micro_batch_tokens: int = 0  # per forward and rank; 0: fitted to memory. Never changes the global batch
    # checkpoints and faults
    save_every: str = "120s"  # between checkpoints: steps, or seconds of training; 0: only at the end or a signal
    keep: int = 2  # newest checkpoints that stay
    spike_policy: Literal["stop", "skip", "rewind"] = "stop"  # skip: the batch; rewind: to a checkpoint, other data
    spike_nats: float = 0.0  # a loss this far above the median of the last 64 is a spike; 0: only a non-finite one is
    hang_seconds: float = 60.0  # a step that takes longer, and 20 medians: stacks of all ranks; 0: do not watch
    profile: bool = False  # trace three steps, and on CUDA the memory
    # log and validation
    train_log_every: int = 50  # steps between log lines
    tracker: Literal["none", "tensorboard", "wandb"] = "none"  # where the log's numbers go too
    val_loss_every: int = 1000  # steps between validations, outside the clock; 0: only at the end
    eval_stride: int = 512  # of the sliding-window score; 0: leave that score out
    eval_stateful: bool = False  # also score with state carried over whole documents; not compiled, slower
    # model
    arch_mode: Literal["D", "gdn", "gdn_kv", "hybrid", "baseline", "llama"] = "D"  # D: the seed's; see ARCH_PRESETS
    layer_pattern: str = "g g g g g s1 g g g g g s1"  # g GDN, k GDN with another's keys, s sliding, a full attention
    num_layers: int = 0  # the pattern is repeated or cut to this many layers; 0: as long as it is
    model_dim: int = 512  # width
    num_heads: int = 8  # query heads of attention, and heads of GDN
    num_kv_heads: int = 4  # key/value heads of attention
    mlp: Literal["relu2", "leaky_relu2", "gelu", "swiglu", "bio", "bio_soft", "bio_hard"] = "relu2"  # its kind
    mlp_mult: float = 3.0  # hidden width of the MLP over model_dim
    bio_events: Literal["off", "soft", "hard"] = "off"  # sparse events of the bio-MLP; soft: the seed's
    bio_threshold: float = 0.3  # of the events, on a voltage in (0, 1)
    norm: str = "rms"  # rms, rms_weight or layer, or one word per layer
    positions: Literal["rope", "learned", "none"] = "rope"  # how layers tell where a token stands
    rope_base: float = 10000.0  # wavelength base of rotary positions
    rope_dims: int = 0  # dimensions of a head that rotate; 0: all
    attn_window: int = 512  # keys a sliding-window query sees, itself included
    qk_norm: bool = True  # RMS-normed queries and keys, with a gain
    qk_gain_init: float = 4.0  # initial scale of attention logits, per head, learned
    residual_mix: bool = True  # normed embedding mixed into each layer's input; learned scales of mixer and MLP
    unet_skips: bool = False  # the second half of the layers adds the outputs of the first half, last first
    bigram_vocab_size: int = 0  # rows of a hashed embedding of token pairs; 0: none
    bigram_dim: int = 64  # its width
    ngram_order: int = 0  # longest n-grams of the training text whose counts the network is mixed with; 0: none
    ngram_min_count: int = 2  # those of three tokens and more that are seen less often are left out
    tie_embeddings: bool = True  # the embedding is the output head
    logit_softcap: float = 30.0  # logits = c tanh(z / c); 0: as they are
    gdn_neg_eigval: bool = False  # GDN's beta in (0, 2) instead of (0, 1): negative eigenvalues of the state transition
    # optimizer
    optimizer: Literal["muon", "lion", "adamw", "adamw8bit", "adafactor"] = "muon"  # of matrices; not muon: embeddings
    matrix_lr: float = 0.02  # matrices of the layers; this and the next two have presets under other optimizers
    tied_embed_lr: float = 0.03  # embeddings; a tied one is the output head too
    head_lr: float = 0.008  # an untied output head
    scalar_lr: float = 0.02  # AdamW, gains, mixes, GDN's small projections, convolutions, decay and step sizes
    tied_embed_init_std: float = 0.005  # of the embedding
    muon_momentum: float = 0.95  # Nesterov momentum of Muon
    muon_momentum_warmup_start: float = 0.85  # where it starts
    muon_momentum_warmup_frac: float = 0.05  # share of the run until it is reached
    muon_momentum_warmup_steps: int = 0  # the same in steps of ITERATIONS; 0: use the share
    muon_backend_steps: int = 5  # Newton-Schulz steps
    muon_wd: float = 0.04  # decoupled weight decay of matrices, of every optimizer
    beta1: float = 0.9  # AdamW, 8-bit AdamW, Lion
    beta2: float = 0.95  # AdamW, 8-bit AdamW, Lion
    adam_eps: float = 1e-8  # AdamW, 8-bit AdamW
    adam_wd: float = 0.0  # decoupled weight decay of embeddings and head; scalars are never decayed
    grad_clip_norm: float = 0.0  # global gradient norm; 0: no clipping
    # schedule, in shares of the run (see Clock)
    lr_schedule: Literal["linear", "cosine", "wsd", "constant"] = "linear"  # warmdown; wsd: 1 - sqrt; constant: none
    warmup_frac: float = 0.01  # learning rate from 0 to 1
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
    gptq_calibration_batches: int = 16  # training batches by which GPTQ rounds at the end; 0: to the nearest code
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


# === shared: export ===
class Hessians(torch.overrides.TorchFunctionMode):
    """Inside, adds up x x^T over the inputs x of F.linear, by the parameter that meets them: `sums`, name -> (C, C)."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.sums, names = {}, {param: [name] for name, param in network.named_parameters()}
        self.names = torch.utils.weak.WeakTensorKeyDictionary(names)  # what is freed in the network is freed here

    def __torch_function__(self, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None):
        out = func(*args, **(kwargs or {}))
        if func in (Tensor.to, torch.cat):  # a copy of a parameter, or of parts of some, stands for them
            parts = args[0] if func is torch.cat else args[:1]
            whole = [part if part._base is None else part._base for part in parts]
            if names := dict.fromkeys(name for each in whole for name in self.names.get(each, [])):
                self.names[out] = list(names)
        elif func is F.linear:
            x = args[0].detach().flatten(0, -2).float()
            for name in self.names.get(args[1], []):
                self.sums[name] = self.sums.get(name, 0) + x.mT @ x
        return out


def gptq(w: Tensor, scales: Tensor, bits: int, hessian: Tensor) -> Tensor:
    """Codes int8 (R, C) of w (R, ...) by scales (R,) or (1,) that make tr(E H E^T) small, E (R, C) being their error.

    GPTQ (arXiv 2210.17323, algorithm 1), in float64: column by column, an error is spread over the columns to come, as
    H (C, C) = sum x x^T over inputs x says; those of large inputs come first. Damping of 0.01 did worse (docs/lab.md).
    """
    order = hessian.diagonal().argsort(descending=True)
    h, w, steps = hessian.double()[order][:, order], w.flatten(1).double()[:, order], scales.double()[:, None]
    h.diagonal().add_(0.1 * h.diagonal().mean() + 1e-9)
    spread = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(h)), upper=True)
    for at in range(len(h)):
        code = round_to(w[:, at : at + 1], steps, bits)
        w[:, at:].addmm_(w[:, at : at + 1] - code * steps, spread[at : at + 1, at:] / spread[at, at], alpha=-1)
        w[:, at : at + 1] = code  # in the weight's place
    return w[:, order.argsort()].to(torch.int8)


def gptq_all(tensors: dict[str, Tensor], table: QuantTable, hessians: dict[str, Tensor]) -> dict[str, tuple]:
    """As `quantize_all`, with codes by GPTQ for those that have a Hessian."""
    return {name: (gptq(tensors[name], scales, bits, hessians[name]) if name in hessians else codes, scales, bits)
            for name, (codes, scales, bits) in quantize_all(tensors, table).items()}


def fit_steps(tensors: dict[str, Tensor], table: QuantTable, excess: float, least: float, most: float) -> QuantTable:
    """The table with all steps wider, by a factor in least..most, for `excess` bytes fewer."""
    def wider(power: float) -> QuantTable:
        return {kind: {**own, "widen": own["widen"] * min(most, max(least, 2**power))} for kind, own in table.items()}

    def size(table: QuantTable) -> float:  # bytes by order-0 entropy, nearly all that a file holds
        shares = [(torch.bincount(codes.flatten().int() + 128).double() / codes.numel(), codes.numel())
                  for codes, *_ in quantize_all(tensors, table).values()]
        return sum(torch.special.entr(share).sum().item() * count for share, count in shares) / math.log(256)

    target, powers = size(table) - excess, np.linspace(-8, 8, 1 << 14).tolist()
    return wider(powers[bisect.bisect_left(powers[:-1], -target, key=lambda power: -size(wider(power)))])


class Exporter:
    """From a network's weights to the codes of an artifact of at most `limit` bytes; `table` is changed in place.

    score: () -> Score of the network, as it is, on held-out tokens; rest: further arguments of pack_artifact.
    """

    def __init__(self, network: nn.Module, table: QuantTable, limit: int, score: Callable, runtime: Runtime,
                 log: Callable, rest: dict):
        self.network, self.tensors, self.table, self.limit = network, network.state_dict(), table, limit
        self.score, self.runtime, self.log, self.rest = score, runtime, log, rest

    def excess(self, coded: dict[str, tuple]) -> int:
        """Bytes of the artifact with these codes, over the limit."""
        return len(pack_artifact(self.tensors, coded, **self.rest)[0]) - self.limit

    def loss(self, coded: dict[str, tuple]) -> float:
        """Nats on held-out tokens, with the weights that these codes stand for."""
        with decoded(self.tensors, coded):
            return self.score().nats

    def fit(self, hessians: dict[str, Tensor], over: int, margin: int, least: float,
            most: float) -> tuple[int, QuantTable, dict[str, tuple]]:
        """How much an artifact is over the limit, its table and codes; meant to be a `margin` below it, by steps wider
        by a factor in least..most. over: that of the present table."""
        total, found = 0, []
        for _ in range(5):  # a file is not just the entropy of its codes
            total += over + margin
            table = fit_steps(self.tensors, self.table, total, least, most)
            coded = gptq_all(self.tensors, table, hessians)
            found.append((over := self.excess(coded), table, coded))
            if over <= 0 and abs(over + margin) <= self.limit // 400:
                break
        return min(found, key=lambda each: (each[0] > 0, abs(each[0])))

    def fit_table(self) -> None:
        """Steps for fake quantization and export alike: the table's or, if the artifact were too long, wider ones."""
        over = self.runtime.agree(self.excess(quantize_all(self.tensors, self.table)))
        if over > 0:
            _, table, _ = self.fit({}, over, self.limit // 100, 1.0, 256.0)  # the margin is kept for later
            self.table.update(self.runtime.agree(table))
        self.log(f"sizes: {abs(over)} bytes {'above' if over > 0 else 'below'} the limit; steps wider by "
                 f"{self.table['matrix']['widen'] - 1:+.2%}")

    @torch.no_grad()
    def codes(self, calibration: Iterable[Tensor]) -> dict[str, tuple]:
        """See quantize_all: the nearest, or by GPTQ with token ids (B, T) of `calibration` where these score better."""
        begin, widened = time.perf_counter(), any(own["widen"] != 1 for own in self.table.values())
        with Hessians(self.network) as taps:
            for ids in calibration:
                self.network(ids)
        every = {name: self.runtime.sum(own) for name, own in taps.sums.items()}
        ways = {"nearest": {}, **({"gptq": every} if every else {})}
        found = {way: gptq_all(self.tensors, self.table, hessians) for way, hessians in ways.items()}
        nats = {way: self.loss(coded) for way, coded in found.items()}
        for way in sorted(nats, key=nats.get):  # GPTQ's codes may be too long for 5% to make good
            over, table, coded = self.excess(found[way]), self.table, found[way]
            if over > 0 or widened:  # by up to 5% again, so that the artifact just meets the limit
                over, table, coded = self.fit(ways[way], over, self.limit // 1000, 1 / 1.05, 1.05)
            if over <= 0:
                break
        wider = table["matrix"]["widen"] / self.table["matrix"]["widen"] - 1
        held_out = " ".join(f"{name}:{loss:.1f}" for name, loss in nats.items())
        self.log(f"codes: {way}, nats on held-out training tokens {held_out}; steps wider by {wider:+.2%}, "
                 f"{-over} bytes below the limit; {time.perf_counter() - begin:.1f} s")
        return coded
# === end: export ===


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


# -------------------------------------------------------------------------------------------------------------- main
def forward_backward(model: Callable, batches: Batches, step: int) -> Tensor:
    """Gradients of the mean loss over the global batch, this rank's part; returns this rank's part of that mean."""
    # They keep their memory: what a CUDA graph makes itself is overwritten by its next call.
    torch._foreach_zero_([param.grad for param in model.parameters()])
    loss = torch.zeros((), device=batches.runtime.device)
    for ids, targets in batches.micro_batches(step):
        part = model(ids, targets).sum() / batches.tokens
        part.backward()
        loss += part.detach()
    return loss


def profile_steps(folder: Path, log: Callable[[str], None]) -> Iterator[None]:
    """Advanced once a step: traces the fourth to the sixth into `folder`, on CUDA with the memory's history."""
    cuda = torch.cuda.is_available()
    yield from [None] * 3
    if cuda:
        torch.cuda.memory._record_memory_history()
    with torch.profiler.profile() as trace:
        yield from [None] * 3
    trace.export_chrome_trace(str(folder / "trace.json"))
    log(f"profile: {folder}/trace.json opens at https://ui.perfetto.dev")
    if cuda:
        torch.cuda.memory._dump_snapshot(str(folder / "memory.pickle"))
        torch.cuda.memory._record_memory_history(enabled=None)
        log(f"profile: {folder}/memory.pickle opens at https://docs.pytorch.org/memory_viz")
    yield from itertools.repeat(None)


def warm_up(model: Callable, network: GPT, table: QuantTable, optimizers: Optimizers, batches: Batches,
            settings: Settings) -> None:
    """Run untimed steps that compile and allocate everything, and leave weights and optimizer as they were.

    Where memory is short on any rank, with room for momentum, two moments, masters, two averages and a gradient sum to
    come, the micro-batch is halved or, if the user has set its size, UserError.
    """
    runtime, step = batches.runtime, 0
    bad = torch.tensor(True, device=runtime.device)  # of each step, so that no weight moves
    while step < settings.warmup_steps:
        failed, room = torch.zeros(1, device=runtime.device), None
        try:
            room = torch.empty(0 if step else 7 * sum(map(Tensor.numel, optimizers.params)), device=runtime.device)
            with quantized(network, table):
                forward_backward(model, batches, step)
        except torch.OutOfMemoryError:
            failed += 1
        del room
        if runtime.sum(failed):
            if not batches.fitted or batches.micro_rows == 1:
                raise UserError(f"out of memory with {batches.micro_rows} windows a step; set MICRO_BATCH_TOKENS lower")
            batches.limit_rows(batches.micro_rows // 2)
            torch.compiler.reset()  # each size is another graph, and dynamo makes only so many
        else:
            optimizers.reduce_gradients(runtime, settings.grad_clip_norm, failed)
            optimizers.step(0.0, settings.muon_momentum, bad)
            step += 1
    if step:
        with torch.no_grad():
            model(*next(batches.micro_batches(0)))
    optimizers.load_state_dict({})


@torch.no_grad()
def mlp_activity(network: GPT, ids: Tensor) -> dict[str, float]:
    """Shares of MLP units on ids (B, T), over all layers: with an event (without events: not zero), and below 0.05."""
    found = []  # of each MLP that is called, see MLP.hidden
    with nn.modules.module.register_module_forward_pre_hook(
            lambda module, inputs: found.append(module.hidden(*inputs)) if isinstance(module, MLP) else None):
        network(ids)
    active = [(hidden != 0 if fired is None else fired).double().mean() for hidden, fired in found]
    small = [(hidden.abs() < 0.05).double().mean() for hidden, _ in found]
    return {"mlp_active": torch.stack(active).mean().item(), "mlp_small": torch.stack(small).mean().item()}


def evaluate(score: Callable[..., Score], model: Callable, network: GPT, settings: Settings, log: Callable, what: str,
             sources: tuple[np.ndarray, list[str]] | None = None) -> dict:
    """Score validation in plain windows, by source too if given, and in the ways asked for; the keys of result.json."""
    plain, stride, window = score(model, sources=sources), settings.eval_stride, settings.train_seq_len
    found = {"": plain, **{f"source {name} ": part for name, part in plain.sources.items()}}
    result = plain.result()
    if 0 < stride < window:  # else it is the plain score again
        sliding = found["sliding "] = score(model, stride=stride)
        result |= {"val_bpb_sliding": sliding.bpb, "sliding_stride": stride, "sliding_context": window}
    if settings.eval_stateful:
        stateful = found["stateful "] = score(network, stride=None)
        result |= {"val_bpb_stateful": stateful.bpb, "stateful_context": "document"}
    for way, each in found.items():
        log(f"{what}: {way}val_{each}")
    return result


def main() -> int:
    """One run, from settings to result.json; its exit code. Raises UserError before the first step."""
    begin = time.perf_counter()
    settings = load_settings(Settings, dict(os.environ), {"arch_mode": ARCH_PRESETS, "optimizer": OPTIMIZER_PRESETS},
                             lambda given: stored_settings(given, Settings.out_dir))
    if settings.dry_run:
        tool = Path(__file__).resolve().parent / "tools" / "plan.py"
        if not tool.is_file():
            raise UserError(f"DRY_RUN=1: no {tool}; must be run in the repository, whose tool makes the plan")
        os.execv(sys.executable, [sys.executable, "-B", str(tool), __file__])
    plan, runtime = Plan(settings), start_runtime(settings.device, settings.deterministic)
    data = open_data(settings)
    tokenizer = data.tokenizer
    config = model_config(settings, tokenizer.vocab_size, tokenizer.bos_id)
    replay = json.loads((Path(settings.replay) / "progress.json").read_bytes())["progress"] if settings.replay else []
    budget = max(0.0, settings.max_wallclock_seconds - settings.reserve_seconds)
    clock = Clock(settings.iterations, budget, runtime, replay)
    batches = Batches(data, settings, runtime)
    torch.manual_seed(settings.seed)
    network = GPT(config).to(runtime.device)
    network.activation_checkpointing = settings.activation_checkpointing
    narrow = runtime.device.type == "cuda" or torch.cpu._is_amx_tile_supported()  # units that multiply bfloat16
    dtype = settings.dtype if settings.dtype != "auto" else "bfloat16" if narrow else "float32"
    network.dtype = getattr(torch, dtype)
    compiled = functools.partial(torch.compile, dynamic=False, fullgraph=True, mode=settings.compile_mode)
    model = compiled(network) if settings.compile else network
    optimizers = Optimizers(network, settings, runtime, network.dtype)
    table = quant_table(settings)
    memory = {"ema": settings.ema_memory_frac, "swa": None}
    averages = {name: Average(list(network.parameters()), memory[name]) for name in memory if getattr(settings, name)}
    widened = SimpleNamespace(state_dict=lambda: table, load_state_dict=table.update)
    parts = dict(network=network, optimizers=optimizers, plan=plan, clock=clock, table=widened, **averages)
    run = Run(settings, runtime, parts, {
        **asdict(config), "manifest_sha256": data.manifest_sha256, "data_shares": data.shares,
        **{name: getattr(settings, name) for name in ("seed", "train_batch_tokens", "holdout_tokens", "optimizer")}})
    checkpoint, folder, log = run.open(), run.folder, run.log
    code = len(Path(__file__).read_bytes()) + (len(Path(settings.config).read_bytes()) if settings.config else 0)
    watch = Watch(runtime, folder, settings.hang_seconds, log)
    if runtime.rank == 0 and tokenizer.file != "bytes":
        (folder / tokenizer.file).write_bytes(tokenizer.content)
    log("parameters: " + " ".join(f"{name}:{count}" for name, count in count_parameters(network).items())
        + f" arch_mode: {settings.arch_mode} layers: {config.layers} dtype: {dtype}")
    for manifest in data.manifests:
        log("data: {name}, train {train[tokens]} tokens, val {val[tokens]} tokens, {val[decoded_bytes]} bytes, overlap "
            "{overlap_documents} documents".format(**manifest))
    log(plan.describe())
    warm_up(model, network, table, optimizers, batches, settings)
    log(f"batch: {batches.tokens} tokens a step = {runtime.world_size} ranks x {batches.rows // batches.micro_rows} "
        f"micro-steps x {batches.micro_rows} windows x {batches.seq_len} tokens")
    if checkpoint:
        run.load(Path(checkpoint))
        if clock.packet is not None:
            clock.packet[2] = 0.0  # a stop that was asked for then
    elif min(run.every_steps, run.every_seconds) < math.inf:
        run.save(0.0)  # what would keep the run from saving shows before its first step
    log(f"set-up and warm-up: {time.perf_counter() - begin:.1f} s, outside the clock")
    window = torch.from_numpy(data.val[None, : settings.train_seq_len]).to(runtime.device)

    score = functools.partial(score_tokens, tokens=data.val, tokenizer=tokenizer, runtime=runtime,
                              seq_len=settings.train_seq_len, stride=settings.train_seq_len, batch=batches.micro_rows)
    rest = {"settings": asdict(config), "tokenizer_sha256": tokenizer.sha256,
            "meta": {"seed": settings.seed, "tokenizer": tokenizer.file}}
    room = settings.artifact_bytes_max - code
    exporter = Exporter(network, table, room, functools.partial(score, model, tokens=data.held_out), runtime, log, rest)

    def report(loss: float) -> None:
        seconds, done = clock.seconds[-1], run.step
        line = (f"step:{done}/{settings.iterations or '?'} train_loss:{loss:.4f} {state} "
                f"train_time:{1000 * seconds:.0f}ms step_avg:{1000 * seconds / done:.2f}ms "
                f"tok_s:{batches.tokens * done / seconds:.0f}")
        if done % settings.train_log_every == 0 or done <= 5:
            log(line)
        elif run.clear:
            left = f"{clock.budget - seconds:.0f} s left " if clock.budget < math.inf else ""
            print(run.clear + left + line, end="", flush=True)

    trace = profile_steps(folder, log) if settings.profile and runtime.rank == 0 else itertools.repeat(None)
    stop, state, batches.waited, watch.looping = False, "", 0.0, True
    clock.start()
    while True:
        last_step, watch.began = clock.is_last(run.step), math.inf  # no limit for validation and saving
        stop |= watch.signal > 0 and not runtime.distributed
        if settings.val_loss_every and run.step and run.step % settings.val_loss_every == 0 and not (last_step or stop):
            clock.stop()
            activity = " ".join(f"{name}:{share:.4f}" for name, share in mlp_activity(network, window).items())
            log(f"step:{run.step} val_{score(model)} {activity}")
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
        next(trace)

        # Weights are quantized for forward and backward alone; the gradient lands on the masters (straight through).
        qat = settings.qat and plan.phases["qat"].start_step
        with quantized(network, table) if qat else contextlib.nullcontext():
            loss = forward_backward(model, batches, run.step + run.skipped)
        extra = torch.stack([loss, torch.full_like(loss, watch.signal)])
        norm, (loss, stopping) = optimizers.reduce_gradients(runtime, settings.grad_clip_norm, extra)

        previous = clock.receive()  # of the step before; the device has this step's work queued and does not wait
        if previous is not None:
            stop = previous[2]
            watch.agreed |= stop
            if run.judge(*previous[:2]):
                report(previous[0])
            elif settings.spike_policy == "rewind":
                continue
        spike = statistics.median(run.losses) + settings.spike_nats if run.losses and settings.spike_nats else math.inf
        bad = ~(torch.isfinite(norm) & (loss < spike))
        progress = clock.progress(run.step)
        begun = plan.advance(run.step, progress)
        for name in begun:
            log(f"phase: {name} begins at step {plan.phases[name].start_step}, {progress:.1%} of the run")
        if "qat" in begun:
            watch.began = math.inf
            exporter.fit_table()
        multiplier, momentum = plan.rates(progress)
        state = f"lr_mul:{multiplier:.4f} progress:{progress:.4f} data_wait:{batches.waited / clock.elapsed():.2%}"
        optimizers.step(multiplier, momentum, bad)
        for name, average in averages.items():
            if "qat" in begun:  # an average of weights that never saw the quantizer does not fit it
                average.count = 0
            elif plan.phases[name].start_step:
                average.update(progress)
        clock.send(loss, bad, stopping)
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
        report(previous[0])
    if runtime.rank == 0:
        kept = {"settings": vars(settings), "progress": clock.used, "events": run.events}
        replace_file(folder / "progress.json", json.dumps(kept).encode())

    clock.start()
    params, scores = [param.detach() for param in network.parameters()], {}
    values = {"raw": params, **{name: average.values for name, average in averages.items() if average.count}}
    for name in values:
        with swapped(params, values[name]), quantized(network, table):
            scores[name] = score(model, tokens=data.held_out)
        log(f"weights: {name}, quantized, on held-out training tokens {scores[name]}")
    chosen = min(scores, key=lambda name: scores[name].nats)
    log(f"weights: {chosen} chosen")
    torch._foreach_copy_(params, values[chosen])
    if not settings.qat:
        exporter.fit_table()
    steps = range(run.step + run.skipped, run.step + run.skipped + settings.gptq_calibration_batches)
    coded = exporter.codes(ids for step in steps for ids, _ in batches.micro_batches(step))
    clock.stop()
    log(plan.describe(ended=True))
    log(f"clock: {clock.elapsed():.1f} s to train and choose, MAX_WALLCLOCK_SECONDS={settings.max_wallclock_seconds}")
    if settings.replay:
        run.event("replay", of=settings.replay)
    elif 0 < settings.max_wallclock_seconds < clock.elapsed():
        run.event("over_clock", seconds=clock.elapsed(), hint="no record; choosing wants more RESERVE_SECONDS")

    artifact = folder / "model.upar"
    if runtime.rank == 0:
        content, sizes = pack_artifact(network.state_dict(), coded, **rest)
        replace_file(artifact, content)
    runtime.agree("")  # rank 0 has written it
    total = code + artifact.stat().st_size
    network.dtype = None  # scores do not depend on which units a CPU has
    before = evaluate(score, model, network, settings, log, "before quantization")
    header, tensors, _ = read_artifact(artifact)  # from here on the network that the file holds, by that file alone
    packed = GPT(GPTConfig(**header["settings"])).to(runtime.device)
    packed.load_state_dict(tensors)
    run_packed = compiled(packed) if settings.compile else packed
    final = evaluate(score, run_packed, packed, settings, log, "from the artifact", data.val_sources)
    assert final["val_bytes"] == data.val_bytes, f"{final['val_bytes']} validation bytes scored of {data.val_bytes}"

    faults = [f"phase {name} was enabled and never fired" for name, phase in plan.phases.items() if not phase.steps]
    if total > settings.artifact_bytes_max:
        faults.append(f"{total} bytes of code and artifact, more than ARTIFACT_BYTES_MAX={settings.artifact_bytes_max}")
    if settings.profile and not (folder / "trace.json").exists():
        faults.append("PROFILE=1 traced nothing, for it takes seven steps")
    if runtime.rank == 0:
        result = {
            "script": Path(__file__).name, "run_id": folder.name, "seed": settings.seed,
            "code_sha256": sha256_file(__file__), "manifest_sha256": data.manifest_sha256,
            "tokenizer_sha256": tokenizer.sha256, **describe_machine(runtime), "world_size": runtime.world_size,
            "steps": run.step, "tokens": run.step * batches.tokens, "train_seconds": clock.elapsed(),
            "total_seconds": time.perf_counter() - begin, "data_wait_seconds": batches.waited,
            "optimizer_state_bytes": sum(t.nbytes for own in optimizers.state_dict().values() for t in own.values()),
            "params": count_parameters(network), "dtype": dtype, "weights": chosen, **final,
            "before_quantization": before, **mlp_activity(packed, window), **data.yardsticks,
            "artifact": str(artifact), "artifact_sha256": sha256_file(artifact),
            "artifact_bytes": artifact.stat().st_size, "code_bytes": code, "total_bytes": total,
            "bytes_by_class": sizes, "phases": plan.state_dict(),
            "events": run.events, "settings": asdict(settings),
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
