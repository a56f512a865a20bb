"""Pretrain a GDN-hybrid language model against a clock and a byte budget; score what is read back from its artifact.

    CONFIG=configs/cpu.env python train_gpt.py                                  # one CPU process, about 3 minutes
    DATA_PATH=data/datasets/fineweb10B_sp1024 torchrun --standalone --nproc_per_node=8 train_gpt.py
    RESUME=<RUN_ID> python train_gpt.py                                         # from its newest checkpoint

Every setting below is an environment variable: its name in capitals. A run writes runs/<RUN_ID>/: log.txt, checkpoints,
model.upar (the artifact) and result.json. Sections between `# === shared:` fences stand in other scripts too, byte for
byte (tools/sync.py).
"""

import base64
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
    mlp: Literal["relu2", "leaky_relu2", "gelu", "swiglu", "bio"] = "relu2"  # its kind
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


# === shared: export ===
class Hessians(torch.overrides.TorchFunctionMode):
    """Inside, adds up x x^T over all inputs x of F.linear: `sums`, name of the weight -> (C, C)."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.sums = {}
        names = {param: name for name, param in network.named_parameters()}
        self.names = torch.utils.weak.WeakTensorKeyDictionary(names)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        # Layers read their weights in the dtype of the activations: a copy has its weight's name.
        if func is Tensor.to and args[0] in self.names:
            self.names[out] = self.names[args[0]]
        if func is F.linear and args[1] in self.names:
            name = self.names[args[1]]
            x = args[0].detach().flatten(0, -2).float()
            self.sums[name] = self.sums.get(name, 0) + x.mT @ x
        return out


def gptq(w: Tensor, scale: Tensor, bits: int, hessian: Tensor) -> Tensor:
    """Returns codes int8 (R, C) of w (R, ...) that make the squared error of the outputs small.

    GPTQ (arXiv 2210.17323, algorithm 1), in float64: column by column, the rounding error is spread
    over the columns to come, as the hessian (C, C), the sum of x x^T over inputs x, says. Columns
    with large inputs come first. Damping by 0.01 of the mean diagonal, as in the paper, did worse
    than 0.1 (docs/lab.md).
    """
    order = hessian.diagonal().argsort(descending=True)
    h = hessian.double()[order][:, order]
    h.diagonal().add_(0.1 * h.diagonal().mean() + 1e-9)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(h))
    spread = torch.linalg.cholesky(inverse, upper=True)
    w = w.flatten(1).double()[:, order]
    scale = scale.double()
    for at in range(len(h)):
        column = w[:, at : at + 1]
        code = round_to(column, scale, bits)
        w[:, at:].addmm_(column - code * scale, spread[at : at + 1, at:] / spread[at, at], alpha=-1)
        w[:, at : at + 1] = code
    return w[:, order.argsort()].to(torch.int8)


@dataclass
class Candidate:
    """Codes that could be packed."""

    widen: float  # the factor by which their steps are wider than those of the exporter's table
    coded: dict[str, Coded]
    size: int  # bytes of their artifact
    name: str = ""
    nats: float = math.inf  # on held-out training tokens


@dataclass
class Exporter:
    """Turns the weights of a network into codes whose artifact has at most `limit` bytes."""

    network: nn.Module
    table: QuantTable  # fit_table widens its steps in place, for QAT and export alike
    limit: int
    score: Callable  # () -> Score of the network as it is, on held-out training tokens
    runtime: Runtime
    log: Callable
    event: Callable
    header: dict  # the further arguments of pack_artifact

    def __post_init__(self):
        self.tensors = self.network.state_dict()
        self.out_of_time = False

    def try_steps(self, encode: Callable, widen: float) -> Candidate:
        """Returns what `encode` makes of the table with all steps wider by a factor."""
        table = {kind: {**q, "widen": q["widen"] * widen} for kind, q in self.table.items()}
        coded = encode(table)
        data, _ = pack_artifact(self.tensors, coded, **self.header)
        return Candidate(widen, coded, self.runtime.agree(len(data)))

    def fit(self, encode: Callable, target: float, most: float) -> Candidate:
        """Returns codes of at most `target` bytes, or else those with steps wider by `most`."""
        candidate = self.try_steps(encode, 1.0)
        weights = sum(part.codes.numel() for part in candidate.coded.values())
        for _ in range(12):
            if candidate.size <= target or candidate.widen == most:
                break
            # Steps twice as wide save one bit per weight. Coarse steps save less, so the aim is a
            # little below the target, and it may take some attempts.
            excess = candidate.size - 0.998 * target
            widen = candidate.widen * 2 ** (8 * excess / weights)
            candidate = self.try_steps(encode, min(most, widen))
        return candidate

    def encode_nearest(self, table: QuantTable) -> dict[str, Coded]:
        """Returns the nearest codes."""
        return quantize_all(self.tensors, table)

    def fit_table(self) -> None:
        """Widens all steps by one factor if the artifact would be too long."""
        # The weights are yet to change, so 1% is left free.
        candidate = self.fit(self.encode_nearest, 0.99 * self.limit, 256.0)
        for quantizer in self.table.values():
            quantizer["widen"] *= candidate.widen
        size = f"{candidate.size} bytes, at most {self.limit}"
        self.log(f"sizes: {size}; steps wider by {candidate.widen - 1:+.2%}")

    def has_time(self, seconds: float) -> bool:
        """Returns whether the clock has these seconds beside those that must follow GPTQ."""
        has_time = self.runtime.agree(self.seconds_left() > self.needed + seconds)
        self.out_of_time |= not has_time
        return has_time

    def calibrate(self, calibration: Iterable[Tensor]) -> None:
        """Sums up the Hessians over token ids (B, T), as far as time suffices."""
        self.log("codes: calibration of GPTQ")
        with Hessians(self.network) as taps:
            for ids in calibration:
                if not self.has_time(0.0):
                    break
                self.network(ids)
        self.hessians = {name: self.runtime.sum(total) for name, total in taps.sums.items()}

    def encode_by_gptq(self, table: QuantTable) -> dict[str, Coded]:
        """Returns codes by GPTQ where there is a Hessian, or the nearest when time runs out."""
        coded = quantize_all(self.tensors, table)
        names = [name for name in self.hessians if name in coded]
        slowest = 0.0
        for done, name in enumerate(names):
            if done % 16 == 0:
                self.log(f"codes: GPTQ, {done} of {len(names)} tensors done")
            if not self.has_time(slowest):
                break
            begin = time.perf_counter()
            part = coded[name]
            part.codes = gptq(self.tensors[name], part.scale, part.bits, self.hessians[name])
            slowest = max(slowest, time.perf_counter() - begin)
        return coded

    def scored(self, name: str, encode: Callable) -> Candidate:
        """Returns the codes of `encode` that fit the limit, with their loss."""
        self.log(f"codes: packing the {name}")
        candidate = self.fit(encode, self.limit, 1.05)
        self.log(f"codes: scoring the {name}")
        with decoded(self.tensors, candidate.coded):
            candidate.nats = self.score().nats
        candidate.name = name
        return candidate

    @torch.no_grad()
    def codes(self, calibration: Iterable[Tensor], seconds_left: Callable) -> dict[str, Coded]:
        """Returns the codes to pack: the nearest, or those of GPTQ if they score better.

        calibration: token ids (B, T) from which GPTQ learns the inputs of layers. seconds_left: ()
        -> those of the run's clock; tensors that GPTQ has no time for keep the nearest codes.
        """
        begin = time.perf_counter()
        candidates = [self.scored("nearest", self.encode_nearest)]
        # To pack and score GPTQ's codes takes as long again, and the file is packed once more.
        self.needed = 2 * (time.perf_counter() - begin)
        self.seconds_left = seconds_left
        self.calibrate(calibration)
        if self.hessians and not self.out_of_time:
            candidates.append(self.scored("gptq", self.encode_by_gptq))
        if self.out_of_time:
            self.event("gptq_out_of_time", seconds_left=self.seconds_left())
        # Steps wider by 5% may not suffice for GPTQ's codes.
        chosen = min(candidates, key=lambda c: (c.size > self.limit, c.nats))
        scores = " ".join(f"{c.name}:{c.nats:.1f}" for c in candidates)
        self.log(
            f"codes: {chosen.name}, nats on held-out training tokens {scores}; steps wider by "
            f"{chosen.widen - 1:+.2%}, {self.limit - chosen.size} bytes below the limit"
        )
        return chosen.coded
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
def count_ngrams(streams: list[TokenStream], settings: Settings, tokenizer: Tokenizer) -> bytes:
    """What NGrams keeps packed, of all training tokens. UserError if these are very many.

    Kneser-Ney's counts: how often the longest n-grams were seen, and after how many tokens the shorter ones were (where
    a document begins, after none, how often). Discounts by how many n-grams have a count of 1 to 4, as in section 3.4.
    """
    if (total := sum(map(len, streams))) > 1 << 28:
        raise UserError(f"NGRAM_ORDER={settings.ngram_order}: counts {1 << 28} tokens at most, DATA_PATH has {total}")
    tokens, size = np.concatenate([stream.read(0, len(stream)) for stream in streams]), tokenizer.vocab_size
    seen, parts, contexts = [np.unique(tokens, return_counts=True)], [], np.zeros(1, np.int64)
    shorter = places = np.arange(size)  # n-grams less their first token, the place of each; at first a token its own
    context = ids = torch.from_numpy(tokens)
    for _ in range(1, settings.ngram_order):
        known = context[:-1].numpy()
        seen.append(np.unique((known * size + tokens[1:])[known >= 0], return_counts=True))
        context = longer_contexts(context, ids, size, tokenizer.bos_id)
    for length, (grams, times) in enumerate(seen, 1):
        count = times.copy()
        if length < len(seen):
            tails, before = np.unique(seen[length][0] % size**length, return_counts=True)
            count[np.searchsorted(grams, tails)] = before
        kinds, order = np.maximum(1, np.bincount(np.minimum(count, 5), minlength=6)[1:5]), np.arange(1, 4)
        share = kinds[0] / (kinds[0] + 2 * kinds[1])
        discounts = np.clip(order - (order + 1) * share * kinds[1:] / kinds[:3], 0.1, order)  # something is left
        parent = np.minimum(np.searchsorted(contexts, grams // size), len(contexts) - 1)
        own = contexts[parent] == grams // size  # else they continue what was left out
        kept = own & (times >= (settings.ngram_min_count if length > 2 else 1))
        children = np.bincount(parent[kept], minlength=len(contexts))
        lost = np.bincount(parent[own & ~kept], count[own & ~kept], len(contexts)) * (children > 0)
        grams, count, first = grams[kept], count[kept], np.cumsum(children) - children
        rank = places[np.searchsorted(shorter, grams % size ** max(1, length - 1))]
        places = np.arange(len(grams)) - first[parent[kept]]
        parts += [children, lost, np.where(places, np.diff(rank, prepend=0), rank), count, np.rint(1e6 * discounts)]
        contexts = shorter = grams
    planes = np.concatenate(parts).astype("<i4")[:, None].view(np.uint8).T.tobytes()
    frame = zstandard.ZstdCompressor(level=9).compress(planes)
    # Level 16 takes 8 times as long, on the training clock, for a tenth fewer bytes: where counts are most of them.
    many = len(frame) > settings.artifact_bytes_max // 2
    return zstandard.ZstdCompressor(level=16).compress(planes) if many else frame


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
    clock, ngrams = Clock(settings.iterations, budget, runtime, replay), None
    if settings.ngram_order:  # they stand beside the network, also in checkpoints, until it is trained
        clock.start()
        frame = count_ngrams(data.streams, settings, tokenizer)
        clock.stop()
        if (left := settings.artifact_bytes_max - len(frame)) < 1 << 18:
            raise UserError(f"NGRAM_MIN_COUNT={settings.ngram_min_count}: counts leave {left} bytes; must be higher")
        config.ngram_bytes = len(frame)
        ngrams = NGrams(config).to(runtime.device)
        ngrams.packed.copy_(torch.frombuffer(bytearray(frame), dtype=torch.int8))
    whole, config.ngram_order, config.ngram_bytes = SimpleNamespace(**vars(config)), 0, 0
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
        **vars(config), "manifest_sha256": data.manifest_sha256, "data_shares": data.shares,
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
    rest = {"settings": vars(config), "tokenizer_sha256": tokenizer.sha256,
            "meta": {"seed": settings.seed, "tokenizer": tokenizer.file}}
    room = settings.artifact_bytes_max - code - whole.ngram_bytes - 512 * (ngrams is not None)  # for their header
    score_held_out = functools.partial(score, model, tokens=data.held_out)
    exporter = Exporter(network, table, room, score_held_out, runtime, log, run.event, rest)

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
    calibration = (ids for step in steps for ids, _ in batches.micro_batches(step))
    limit = settings.max_wallclock_seconds or math.inf
    coded = exporter.codes(calibration, lambda: limit - clock.elapsed())
    if ngrams is not None:
        with decoded(exporter.tensors, coded):
            ngrams.fit(network, data.held_out, settings.train_seq_len)
        log("n-grams: weights of network and counts, by 1, its entropy and theirs: "
            + " ".join(f"{weight:.4f}" for weight in ngrams.mix.flatten().tolist()))
    clock.stop()
    log(plan.describe(ended=True))
    log(f"clock: {clock.elapsed():.1f} s to train and choose, MAX_WALLCLOCK_SECONDS={settings.max_wallclock_seconds}")
    if settings.replay:
        run.event("replay", of=settings.replay)
    elif 0 < settings.max_wallclock_seconds < clock.elapsed():
        run.event("over_clock", seconds=clock.elapsed(), hint="no record; choosing wants more RESERVE_SECONDS")

    artifact = folder / "model.upar"
    if runtime.rank == 0:
        tensors = {**network.state_dict(), **(ngrams.state_dict(prefix="ngrams.") if ngrams is not None else {})}
        content, sizes = pack_artifact(tensors, coded, **{**rest, "settings": vars(whole)})
        replace_file(artifact, content)
    runtime.agree("")  # rank 0 has written it
    total = code + artifact.stat().st_size
    network.dtype = None  # scores do not depend on which units a CPU has
    before = evaluate(score, model, network, settings, log, "before quantization")  # and without counts
    header, tensors, _ = read_artifact(artifact)  # from here on the network that the file holds, by that file alone
    packed = GPT(SimpleNamespace(**header["settings"]), NGrams).to(runtime.device)
    packed.load_state_dict(tensors)
    run_packed = compiled(packed) if settings.compile and ngrams is None else packed  # counts are not for a compiler
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
