"""Measure this machine: operations, generation and a GRPO step, runs of configs, one GPU.

    python tools/bench.py ops
    python tools/bench.py train configs/cpu.env --seconds 20

`ops` and `rl` time our code and other libraries in turn in one process; on a GPU `ops` uses CUDA
events. `train` runs train_gpt.py with settings in its environment and reads its result.json and
log.txt. Exported settings are not passed on; use `--set NAME=VALUE`. Step time is the median over the
run, tokens/s is the batch over that time. Without --data the text is Python's own standard library.
`gpu` runs the parts in tools/gpu.py; tools/arms.py compares choices.
"""

import argparse
import functools
import importlib
import inspect
import lzma
import math
import os
import random
import re
import statistics
import time
import timeit
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
import zstandard
from common import (
    BENCH_DATA,
    ROOT,
    SCRIPT,
    add_run_options,
    load_script,
    publish,
    run_command,
    run_script,
    saved_figures,
    short_run,
)
from endings import run_tool
from torch.utils.flop_counter import FlopCounterMode

# Libraries to compare with, as pip names them. transformers' delta rule became 1.2 to 1.7 times
# faster from 4.57 to this version.
LIBRARIES = {
    "transformers": "transformers==5.23.0",
    "fla": "flash-linear-attention",
    "brotli": "brotli==1.2.1",
    "constriction": "constriction==0.5.0",
}
OPERATIONS = ("gdn", "attention", "muon", "rans")
SHAPES = [(4, 512, 8, 64), (4, 2048, 8, 64), (16, 256, 4, 32)]  # (B, T, H, D)
# Settings of the models whose matrices Muon takes a step with.
MUON_MODELS = {
    "configs/cpu.env": {"CONFIG": str(ROOT / "configs" / "cpu.env")},
    "512 wide, g a g a": {"LAYER_PATTERN": "g a g a"},
}


# ------------------------------------------------------------------------------------------ timing
def load_library(name: str) -> ModuleType | None:
    """Return a library to compare with; None if it is missing, which is printed."""
    try:
        library = importlib.import_module(name)
    except ImportError:
        print(f"{name} is missing and not measured: pip install {LIBRARIES[name]}", flush=True)
        return None
    if name == "transformers":
        library.utils.logging.set_verbosity_error()
    wanted = LIBRARIES[name].partition("==")[2]
    installed = getattr(library, "__version__", "")
    if wanted and installed and installed != wanted:
        print(f"note: {name} is {installed}; the project's figures name {wanted}")
    return library


def mark(cuda: bool) -> float | torch.cuda.Event:
    """Return this moment for `between`: seconds, or on CUDA an event in the stream of work."""
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(first: float | torch.cuda.Event, last: float | torch.cuda.Event) -> float:
    """Return the seconds from one mark to a later one; on CUDA this waits for the later one."""
    if isinstance(first, float):
        return last - first
    last.synchronize()
    return first.elapsed_time(last) / 1000


def in_turn(
    ways: dict[str, Callable], rounds: int, cuda: bool, stretch: float = 0.01
) -> dict[str, list[float]]:
    """Return the seconds of a call of each way by round, all ways taking turns.

    In a round each way is called as often as fills `stretch` seconds, which one call before the
    rounds estimates. What must warm up should have been called before.
    """

    def seconds_per_call(name: str, count: int) -> float:
        begin = mark(cuda)
        for _ in range(count):
            ways[name]()
        return between(begin, mark(cuda)) / count

    counts = {}
    for name in ways:
        counts[name] = max(1, math.ceil(stretch / max(seconds_per_call(name, 1), 1e-7)))
    times = {name: [] for name in ways}
    for _ in range(rounds):
        for name in ways:
            times[name].append(seconds_per_call(name, counts[name]))
    return times


def largest_difference(tensors: list[torch.Tensor], ours: list[torch.Tensor]) -> float:
    """Return the largest difference from our tensors, relative to the largest number of each."""
    differences = [0.0]
    for tensor, own in zip(tensors, ours, strict=True):
        if own.numel():
            scale = own.double().abs().max().clamp(min=1e-30)
            differences.append(((tensor.double() - own.double()).abs().max() / scale).item())
    return max(differences)


def compare(
    operation: str, shape: str, ways: dict[str, Callable], rounds: int, cuda: bool
) -> list[dict]:
    """Return a record of each way, ours first: milliseconds, ratio to ours, difference from ours."""
    results = {}
    for name, way in ways.items():  # this call warms up, too
        results[name] = [torch.as_tensor(x).detach().clone() for x in way()]
    times = in_turn(ways, rounds, cuda)
    ours = next(iter(ways))
    records = []
    for name, seconds in times.items():
        record = {
            "operation": operation,
            "shape": shape,
            "way": name,
            "ms": 1e3 * statistics.median(seconds),
            "least": 1e3 * min(seconds),
            "most": 1e3 * max(seconds),
            "times ours": statistics.median(seconds) / statistics.median(times[ours]),
            "difference": None,
        }
        if name != ours and results[ours]:
            record["difference"] = largest_difference(results[name], results[ours])
        records.append(record)
    return records


# --------------------------------------------------------------------------------------------- ops
def parse_shape(text: str) -> tuple[int, int, int, int]:
    """Return B, T, H, D of text such as 4x512x8x64."""
    if not re.fullmatch(r"0*[1-9]\d*(x0*[1-9]\d*){3}", text):
        raise argparse.ArgumentTypeError(f"shape is {text!r}; it must be BxTxHxD: 4x512x8x64")
    return tuple(map(int, text.split("x")))


def with_gradients(
    name: str, shape: str, rules: dict[str, Callable], inputs: list[torch.Tensor]
) -> Iterator[tuple]:
    """Yield two cases for `compare`: the forward pass, and it with the gradients of all inputs."""
    weight = torch.randn_like(next(iter(rules.values()))(*inputs))
    inputs = [x.detach().requires_grad_() for x in inputs]

    @torch.no_grad()
    def forward(rule: Callable) -> list[torch.Tensor]:
        return [rule(*inputs)]

    def forward_backward(rule: Callable) -> list[torch.Tensor]:
        out = rule(*inputs)
        return [out.detach(), *torch.autograd.grad(out, inputs, weight)]

    for passes, run in (("forward", forward), ("forward+backward", forward_backward)):
        ways = {way: functools.partial(run, rule) for way, rule in rules.items()}
        yield f"{name}, {passes}", shape, ways


def gdn_rules(ops: SimpleNamespace, device: str) -> tuple[dict, dict]:
    """Return (rules over a text, rules for one token) of Gated DeltaNet by name, ours first.

    Both take q, k, v, g, beta; the rules for one token take the state before them. The libraries
    scale q themselves.
    """
    gdn_step = load_script(ROOT / "sample.py").gdn_step

    def chunks(q, k, *rest):
        return ops.script.gdn_chunk(q * k.shape[-1] ** -0.5, k, *rest, chunk=ops.chunk)[0]

    def step(state, q, *rest):
        token = [x[:, 0] for x in (q * q.shape[-1] ** -0.5, *rest)]
        return gdn_step(*token, state)

    text_rules = {f"gdn_chunk({ops.chunk})": chunks}
    token_rules = {"gdn_step": step}
    if library := load_library("transformers"):
        from transformers.models.qwen3_next import modeling_qwen3_next as qwen

        # Unwrapped: if fla is installed, the wrapper calls that.
        chunk_rule = inspect.unwrap(qwen.torch_chunk_gated_delta_rule)
        token_rule = inspect.unwrap(qwen.torch_recurrent_gated_delta_rule)
        name = f"transformers {library.__version__}"
        text_rules[name] = lambda *inputs: chunk_rule(*inputs)[0]
        token_rules[name] = lambda state, *inputs: token_rule(
            *inputs, initial_state=state, output_final_state=True
        )
    if device == "cuda" and (library := load_library("fla")):  # its kernels are Triton's
        from fla.ops import gated_delta_rule as kernels

        name = f"fla {library.__version__}"
        text_rules[name] = lambda q, k, v, g, beta: kernels.chunk_gated_delta_rule(
            q, k, v, g=g, beta=beta
        )[0]
        token_rules[name] = lambda state, q, k, v, g, beta: (
            kernels.fused_recurrent_gated_delta_rule(
                q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True
            )
        )
    return text_rules, token_rules


def gdn_inputs(b: int, t: int, h: int, d: int, device: str) -> list[torch.Tensor]:
    """Return q, k, v, g, beta, with decay and write strength as at initialization."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q = F.normalize(torch.randn(b, t, h, d, device=device), dim=-1).to(dtype)
    k = F.normalize(torch.randn(b, t, h, d, device=device), dim=-1).to(dtype)
    v = torch.randn(b, t, h, d, device=device, dtype=dtype)
    g, beta = torch.rand(2, b, t, h, device=device)
    return [q, k, v, -0.2 * g, beta]


def gdn_cases(ops: SimpleNamespace, device: str) -> Iterator[tuple[str, str, dict]]:
    """Yield cases of Gated DeltaNet: over ops.shapes, and for one token per row as in generation."""
    text_rules, token_rules = gdn_rules(ops, device)
    for b, t, h, d in ops.shapes:
        inputs = gdn_inputs(b, t, h, d, device)
        yield from with_gradients("GDN", f"B{b} T{t} H{h} D{d}", text_rules, inputs)
    for h, d in dict.fromkeys(shape[2:] for shape in ops.shapes):
        state = torch.randn(32, h, d, d, device=device)
        inputs = [state, *gdn_inputs(32, 1, h, d, device)]

        def run(rule: Callable, inputs: list = inputs) -> list[torch.Tensor]:
            return [x.flatten() for x in rule(*inputs)]

        ways = {name: functools.partial(run, rule) for name, rule in token_rules.items()}
        yield "GDN, a token", f"B32 H{h} D{d}", ways


def torch_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None):
    """Return causal attention by torch, within `mask` if there is one."""
    if mask is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    # On CUDA the fast kernels do not take a mask and shared heads together.
    k = k.repeat_interleave(q.size(1) // k.size(1), dim=1)
    v = v.repeat_interleave(q.size(1) // v.size(1), dim=1)
    return F.scaled_dot_product_attention(q, k, v, mask)


def attention_cases(ops: SimpleNamespace, device: str) -> Iterator[tuple[str, str, dict]]:
    """Yield cases of attention, with a window of a quarter of the text and full.

    Two query heads share keys and values.
    """
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    for b, t, h, d in ops.shapes:
        inputs = []
        for heads in (h, max(1, h // 2), max(1, h // 2)):
            inputs.append(torch.randn(b, heads, t, d, device=device, dtype=dtype))
        doc = torch.zeros(b, t, dtype=torch.long, device=device)
        positions = torch.arange(t, device=device)
        distance = positions[:, None] - positions
        for window in (max(1, t // 4), t):
            mask = (distance >= 0) & (distance < window) if window < t else None
            rules = {
                "attend": functools.partial(ops.script.attend, doc=doc, window=window),
                "scaled_dot_product_attention": functools.partial(torch_attention, mask=mask),
            }
            name = f"attention, window {window}"
            yield from with_gradients(name, f"B{b} T{t} H{h} D{d}", rules, inputs)


def muon_cases(ops: SimpleNamespace, device: str) -> Iterator[tuple[str, str, dict]]:
    """Yield a step of Muon from zero weights and noise as gradients: ours, and torch's."""
    script = ops.script
    runtime = script.Runtime(0, 1, torch.device(device), False)
    for name, environ in ops.models.items():
        presets = {"ARCH_MODE": script.ARCH_PRESETS}
        settings = script.load_settings(script.Settings, environ, presets=presets)
        network = script.GPT(script.model_config(settings, 1024, 1)).to(device)
        muon = script.make_optimizers(network, settings, runtime)[0]
        # One of our parameters may hold several matrices; torch's Muon needs them one by one.
        matrices = []
        copies = []
        for param in muon.param_groups[0]["params"]:
            torch.nn.init.zeros_(param)
            param.grad = torch.randn_like(param)
            splits = getattr(param, "splits", (len(param),))
            for grad in param.grad.split(splits):
                copies.append(torch.nn.Parameter(torch.zeros_like(grad)))
                copies[-1].grad = grad.clone()
            matrices += param.detach().split(splits)  # views, which a step changes
        torch_muon = torch.optim.Muon(
            copies,
            lr=settings.matrix_lr,
            momentum=script.MUON_MOMENTUM,
            weight_decay=settings.muon_wd,
            ns_steps=script.NEWTON_SCHULZ_STEPS,
        )

        def step(run: Callable, results: list) -> list[torch.Tensor]:
            run()
            return results

        ways = {
            "Muon": functools.partial(step, muon.step, matrices),
            "torch.optim.Muon, bfloat16": functools.partial(step, torch_muon.step, copies),
        }
        yield "Muon, a step", f"{name}, {len(copies)} matrices", ways


def rans_coder(script: ModuleType, codes: np.ndarray) -> tuple[Callable, Callable]:
    """Return our (encoder, decoder) of codes: the encoder returns table, states and words."""
    symbols = codes.view(np.uint8)
    counts = np.bincount(symbols, minlength=256)

    def encode() -> list[np.ndarray]:
        table = script.rans_table(counts)
        states = np.full(min(1024, max(8, codes.size // 8192)), script.RANS_LOW, np.uint32)
        words = script.rans_encode(symbols, states, table[None])
        return [table, states, words]

    def decode(table: np.ndarray, states: np.ndarray, words: np.ndarray) -> np.ndarray:
        decoder = script.RansDecoder(states.copy(), table[None])
        return decoder.decode(np.zeros(codes.size, np.uint8), words)

    return encode, decode


def constriction_coder(codes: np.ndarray) -> tuple[Callable, Callable]:
    """Return (encoder, decoder) of codes by constriction's ANS coder."""
    from constriction import stream

    low = int(codes.min())
    shifted = codes.astype(np.int32) - low
    shares = np.bincount(shifted) / codes.size
    model = stream.model.Categorical(shares, perfect=False)

    def encode() -> list[np.ndarray]:
        coder = stream.stack.AnsCoder()
        coder.encode_reverse(shifted, model)
        return [coder.get_compressed(), shares.astype(np.float32)]

    def decode(words: np.ndarray, _: np.ndarray) -> np.ndarray:
        return (stream.stack.AnsCoder(words).decode(model, codes.size) + low).astype(np.int8)

    return encode, decode


def coders(script: ModuleType, codes: np.ndarray) -> dict[str, tuple[Callable, Callable]]:
    """Return (encoder, decoder) of int8 codes by name, ours first.

    An encoder returns a list of bytes or arrays, which its decoder takes as arguments.
    """
    raw = codes.tobytes()
    zstd = zstandard.ZstdCompressor(level=22)
    by_name = {
        "rANS": rans_coder(script, codes),
        "zstd 22": (lambda: [zstd.compress(raw)], zstandard.ZstdDecompressor().decompress),
        "lzma 9e": (
            lambda: [lzma.compress(raw, preset=9 | lzma.PRESET_EXTREME)],
            lzma.decompress,
        ),
    }
    if brotli := load_library("brotli"):
        by_name["brotli 11"] = (
            lambda: [brotli.compress(raw, quality=11, lgwin=24)],
            brotli.decompress,
        )
    if load_library("constriction"):
        by_name["constriction"] = constriction_coder(codes)
    return by_name


def int6_codes(ops: SimpleNamespace) -> np.ndarray:
    """Return the int6 codes of the artifact ops.artifact, or ops.codes codes of normal weights."""
    if not ops.artifact:
        torch.manual_seed(0)
        codes, _ = ops.script.quantize(torch.randn(1, ops.codes), 6, 8.0)
        return codes.numpy().reshape(-1).astype(np.int8)  # of normal weights none is an escape
    try:
        coded = ops.script.read_artifact(ops.artifact)[2].values()
    except (OSError, ops.script.ArtifactError) as error:
        raise SystemExit(f"error: --artifact: {error}") from None
    parts = [part.codes.numpy().reshape(-1) for part in coded if part.bits == 6]
    if not parts:
        raise SystemExit(f"error: --artifact {ops.artifact}: none of its tensors has 6 bits")
    return np.concatenate(parts).clip(-127, 127).astype(np.int8)


def coding_records(ops: SimpleNamespace) -> list[dict]:
    """Return records with times and bytes of writing and reading int6 codes."""
    codes = int6_codes(ops)
    ways = coders(ops.script, codes)
    encoded = {name: encode() for name, (encode, _) in ways.items()}

    def write(name: str) -> list:
        ways[name][0]()
        return []

    def read(name: str) -> list[np.ndarray]:
        return [np.frombuffer(ways[name][1](*encoded[name]), np.int8).copy()]

    for name in ways:
        if not np.array_equal(read(name)[0], codes):
            raise SystemExit(f"error: {name}: the codes read differ from the codes written")
    shape = f"{codes.size:,} int6 codes"
    if ops.artifact:
        shape += f" of {ops.artifact}"
    records = []
    for operation, call in (("write", write), ("read", read)):
        calls = {name: functools.partial(call, name) for name in ways}
        records += compare(operation, shape, calls, ops.rounds, False)
    for record in records:
        record["bytes"] = sum(memoryview(part).nbytes for part in encoded[record["way"]])
    return records


def op_records(ops: SimpleNamespace, device: str) -> Iterator[dict]:
    """Yield the records of the operations in ops.only, as each is measured."""
    cases = {"gdn": gdn_cases, "attention": attention_cases, "muon": muon_cases}
    for name in ops.only:
        if name == "rans":
            yield from coding_records(ops)
        else:
            for case in cases[name](ops, device):
                yield from compare(*case, ops.rounds, device == "cuda")


def cell(value: object) -> str:
    """Return a figure as text, with four digits or separated thousands."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    return "" if value is None else str(value)


def check_device(device: str) -> None:
    """Raise SystemExit if the device is not available."""
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            "error: --device cuda: PyTorch sees no CUDA device; --device cpu runs without"
        )


def bench_ops(args: argparse.Namespace) -> list[str]:
    """Time operations of the script and of libraries in turn: a table and JSON."""
    torch.set_num_threads(args.threads or torch.get_num_threads())
    check_device(args.device)
    script = load_script(SCRIPT)
    about = script.describe_machine(script.start_runtime(args.device))
    about["code_sha256"] = script.sha256_file(SCRIPT)
    ops = SimpleNamespace(**vars(args), script=script, models=MUON_MODELS)
    records = []
    for record in op_records(ops, args.device):
        records.append(record)
        shown = [f"{key} {cell(value)}" for key, value in record.items() if value is not None]
        print(", ".join(shown), flush=True)
    head = {}
    for record in records:
        head |= record
    rows = [list(head)]
    for record in records:
        rows.append([cell(record.get(key)) for key in head])
    notes = (
        f"{torch.get_num_threads()} threads, {args.rounds} rounds in turn, medians; times ours: by "
        "the medians; difference: the largest from ours, over the largest number of ours."
    )
    path = "runs/bench/ops_{date}.json"
    return publish(args, path, [("ops", about)], rows, notes, {"records": records})


# ------------------------------------------------------------------------------------------- train
def flops_per_token(network: torch.nn.Module, seq_len: int) -> Counter:
    """Return the FLOPs of training per token by part, as PaLM counts (arXiv 2204.02311, appendix B).

    Products with weights: as torch counts them forward; like all others twice that backward.
    Attention: 12 H D L for q k^T and the sum of values (2 H D L each forward), where L is the mean
    number of keys that a position sees. Gated DeltaNet: 18 H K V for reading at the key, writing,
    and reading at the query (2 K V per head each forward); that is the recurrence, the chunk form
    does more. Convolutions, norms, gates and recomputation are left out.
    """
    ids = torch.zeros(1, seq_len, dtype=torch.long)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        network(ids)
    products = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    parts = Counter({"products with weights": 3 * products / seq_len})
    for _, mixer in network.layers:
        if window := getattr(mixer, "window", 0):
            keys = sum(min(position, window) for position in range(1, seq_len + 1)) / seq_len
            parts["attention"] += 12 * mixer.w_o.size(1) * keys
        else:
            key_width, _, value_width = mixer.splits[:3]  # of all heads
            parts["Gated DeltaNet"] += 18 * key_width * value_width / mixer.key_heads
    return parts


def run_flops(script: ModuleType, run: dict, tokenizer: dict) -> float:
    """Return the FLOPs per token of a run's model. `tokenizer` is that of its manifest."""
    settings = script.Settings(**run["settings"])
    config = script.model_config(settings, tokenizer["vocab_size"], tokenizer["bos_id"])
    return flops_per_token(script.GPT(config), settings.train_seq_len).total()


def matmul_peak(device: str, dtype: torch.dtype | None = None) -> float:
    """Return FLOP/s of the best of 20 square matrix products.

    The default dtype is that of runs: bfloat16 on CUDA, float32 on a CPU.
    """
    size = 8192 if device == "cuda" else 1024
    if dtype is None:
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))

    def product() -> float:
        return (a @ b)[0, 0].item()  # item waits for the device

    return 2 * size**3 / min(timeit.repeat(product, number=1, repeat=20, timer=time.perf_counter))


def train_figures(script: ModuleType, run: dict, tokenizer: dict) -> dict:
    """Return what the JSON file keeps of a run: with FLOPs, the machine's peak and MFU if it ended."""
    if "failed" in run:
        return saved_figures(run)
    device = "cpu" if "CPU" in run["hardware"] else "cuda"
    peak = matmul_peak(device, getattr(torch, run["dtype"]))
    flops = run_flops(script, run, tokenizer)
    mfu = run["tokens_per_second"] * flops / peak
    return saved_figures(run) | {"flops_per_token": flops, "matmul_flops": peak, "mfu": mfu}


def bench_train(args: argparse.Namespace) -> list[str]:
    """Run each config for some seconds: speed, memory, parameters, MFU. Returns failures.

    In a round each config is run once. The table has the run of each config whose step time is the
    median, and the median over rounds of its step time relative to the first config's.
    """
    script = load_script(SCRIPT)
    settings, manifest = short_run(script, args)
    folder = ROOT / args.runs / time.strftime("train_%Y%m%d_%H%M%S")
    runs = []
    figures = {config: [] for config in args.configs}
    for number in range(args.rounds):
        for config in args.configs:
            path = os.path.relpath(config, ROOT)
            run = run_script(script, folder / f"{Path(config).stem}_{number}", path, settings)
            runs.append((config, run))
            figures[config].append(train_figures(script, run, manifest["tokenizer"]))
    head = "config|tokens/s|step, ms|times the first|peak memory, MiB|parameters|MFLOP/token|MFU"
    rows = [head.split("|")]
    for config, rounds in figures.items():
        ended = sorted((run for run in rounds if "failed" not in run), key=itemgetter("step_ms"))
        if not ended:
            continue
        ratios = []
        for run, first in zip(rounds, figures[args.configs[0]], strict=True):
            if "failed" not in run and "failed" not in first:
                ratios.append(run["step_ms"] / first["step_ms"])
        run = ended[len(ended) // 2]
        rows.append(
            [
                config,
                f"{run['tokens_per_second']:,.0f}",
                f"{run['step_ms']:.1f}",
                f"{statistics.median(ratios):.3f}" if ratios else "",
                f"{run['peak_memory_mib']:,.0f}",
                f"{run['parameters']:,}",
                f"{run['flops_per_token'] / 1e6:.2f}",
                f"{run['mfu']:.1%} of {run['matmul_flops'] / 1e9:,.0f} GFLOP/s",
            ]
        )
    notes = (
        f"{args.seconds:g} s a run, {args.rounds} rounds in turn; the run with the median step time "
        "of each config, and the median of the rounds' ratios. MFU is relative to the best of 20 "
        "square matrix products on this machine right after the run, in the run's dtype and with "
        "as many threads."
    )
    path = args.runs + "/train_{date}.json"
    return publish(args, path, runs, rows, notes, {"configs": figures})


# ---------------------------------------------------------------------------------------------- rl
def count_parameters(model: torch.nn.Module) -> int:
    """Return the number of a model's parameters."""
    return sum(param.numel() for param in model.parameters())


def make_generators(
    settings: SimpleNamespace, config: object, batch: int, new: int
) -> dict[str, Callable]:
    """Return functions that sample `new` tokens after each of `batch` prompts of 16 tokens.

    They are ours, plain and compiled, and transformers', with models of one shape. Each returns ids
    (batch, new), drawn from the whole distribution at temperature 1; no token ends a text.
    """
    transformers = load_library("transformers")
    if transformers is None:
        raise SystemExit("error: rl compares with transformers")
    sample = load_script(ROOT / "sample.py")
    network = sample.GPT(config)
    shape = transformers.LlamaConfig(
        vocab_size=settings.vocab_size,
        hidden_size=settings.model_dim,
        num_hidden_layers=settings.num_layers,
        intermediate_size=int(settings.mlp_mult * settings.model_dim),
        num_attention_heads=settings.num_heads,
        num_key_value_heads=config.num_kv_heads,
        max_position_embeddings=settings.train_seq_len,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    other = transformers.LlamaForCausalLM(shape).eval()
    size, other_size = map(count_parameters, (network, other))
    if size != other_size:
        raise SystemExit(f"error: the models differ: {size:,} and {other_size:,} parameters")
    prompts = torch.randint(2, settings.vocab_size, (batch, 16))
    streams = [(row,) for row in range(batch)]

    def ours(compiled: bool) -> torch.Tensor:
        samples = sample.generate(
            network, prompts.tolist(), 1, new, 1.0, streams, frozenset(), compiled=compiled
        )
        return torch.tensor([drawn.ids for drawn in samples])

    def theirs() -> torch.Tensor:
        ids = other.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=new,
            use_cache=True,
        )
        return ids[:, 16:]

    return {
        "ours": functools.partial(ours, False),
        "ours, compiled": functools.partial(ours, True),
        f"transformers {transformers.__version__}": theirs,
    }


def policy_speed(rounds: int) -> dict[str, list[float]]:
    """Return tokens of responses per second of train_grpo.py's default step, by round.

    "rollout" is sampling, "update" is training on the samples. The policy is not trained and the
    learning rate is 0, so that each round has the same work.
    """
    script = load_script(ROOT / "train_grpo.py")
    settings = script.Settings(device="cpu")
    runtime = script.Runtime(0, 1, torch.device("cpu"), False)
    # A new network answers until MAX_NEW_TOKENS: every answer has nearly the same length.
    network, tokenizer, _ = load_script(ROOT / "train_sft.py").small_network(settings)

    def by_text(completions: list[str]) -> list[float]:
        """Return an arbitrary reward of each text: updates leave out groups of equal rewards."""
        return [random.Random(text).random() for text in completions]

    trainer = script.GRPOTrainer(
        network, tokenizer, settings, reward_funcs=by_text, runtime=runtime
    )
    problems = load_script(ROOT / "data" / "tasks.py").make_problems("sort", 1000, settings.seed)
    problems = [{"prompt": prompt, "answer": answer} for prompt, answer in problems]
    speeds = {"rollout": [], "update": []}
    for step in range(1 + rounds):
        count = settings.prompts_per_step
        queries = script.problems_of_step(problems, step, count, settings.seed)
        times = [time.perf_counter()]
        rollout = trainer.rollout(queries, step)
        times.append(time.perf_counter())
        trainer.update(rollout, 0.0)
        times.append(time.perf_counter())
        tokens = 0
        for answers in rollout.groups:
            tokens += sum(answer.length() for answer in answers)
        for values, (begin, end) in zip(speeds.values(), pairwise(times), strict=True):
            values.append(tokens / (end - begin))
    return {name: values[1:] for name, values in speeds.items()}  # the first round warmed up


def generation_speed(
    generators: dict[str, Callable], batch: int, new: int, rounds: int
) -> dict[str, list[float]]:
    """Return tokens per second of each generator by round, all taking turns."""
    speeds = {name: [] for name in generators}
    for _ in range(1 + rounds):
        for name, generate in generators.items():
            begin = time.perf_counter()
            shape = tuple(generate().shape)
            seconds = time.perf_counter() - begin
            if shape != (batch, new):
                raise SystemExit(f"error: {name} made {shape} tokens, not {(batch, new)}")
            speeds[name].append(batch * new / seconds)
    return {name: values[1:] for name, values in speeds.items()}  # the first round warmed up


def bench_rl(args: argparse.Namespace) -> list[str]:
    """Time generation, ours and transformers' in turn, and a GRPO step: tokens/s and ratio."""
    torch.set_num_threads(args.threads or torch.get_num_threads())
    script = load_script(SCRIPT)
    environ = {
        "ARCH_MODE": "llama",
        "VOCAB_SIZE": "1024",
        "TRAIN_SEQ_LEN": "256",
        "NUM_LAYERS": str(args.layers),
        "MODEL_DIM": str(args.dim),
    }
    presets = {"ARCH_MODE": script.ARCH_PRESETS}
    settings = script.load_settings(script.Settings, environ, presets=presets)
    torch.manual_seed(0)
    config = script.model_config(settings, settings.vocab_size, 1)
    generators = make_generators(settings, config, args.batch, args.new)
    speeds = generation_speed(generators, args.batch, args.new, args.rounds)
    *ours, theirs = speeds.values()
    ratios = {
        name: statistics.median(values) / statistics.median(theirs)
        for name, values in zip(speeds, ours, strict=False)
    }
    speeds |= policy_speed(args.rounds)
    about = script.describe_machine(script.Runtime(0, 1, torch.device("cpu"), False))
    scripts = ("sample.py", "train_grpo.py")
    about["code_sha256"] = {name: script.sha256_file(ROOT / name) for name in scripts}
    rows = [["", "tokens/s, median", "least", "most"]]
    for name, values in speeds.items():
        figures = (statistics.median(values), min(values), max(values))
        rows.append([name, *(f"{figure:,.0f}" for figure in figures)])
    listed = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
    notes = (
        f"Generation: {args.new} tokens after each of {args.batch} prompts of 16, {args.layers} "
        f"layers x {args.dim}, {settings.vocab_size} tokens, {args.rounds} rounds in turn. Times "
        f"transformers' speed: {listed}. rollout, update: tokens of responses in train_grpo.py's "
        "default step, rewards included."
    )
    figures = {
        "tokens_per_second": speeds,
        "ratios": ratios,
        "shape": {key: vars(args)[key] for key in ("layers", "dim", "batch", "new")},
    }
    return publish(args, "runs/bench/rl_{date}.json", [("rl", about)], rows, notes, figures)


# -------------------------------------------------------------------------------------------- main
def bench_gpu(args: argparse.Namespace) -> list[str]:
    """Run the parts of tools/gpu.py. Returns failures."""
    import gpu  # here, because gpu.py imports this file

    return gpu.bench_gpu(args)


def main() -> None:
    """Run the command line described at the top of this file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    ops = commands.add_parser("ops", help="GDN, attention, Muon and rANS against libraries")
    ops.add_argument("--only", nargs="+", choices=OPERATIONS, default=OPERATIONS, help="all")
    ops.add_argument("--shapes", nargs="+", type=parse_shape, default=SHAPES, metavar="BxTxHxD")
    ops.add_argument("--rounds", type=int, default=8)
    ops.add_argument(
        "--chunk", type=int, default=32, help="of GDN; a run takes 32 on a CPU and 64 on CUDA"
    )
    ops.add_argument("--codes", type=int, default=1 << 20, help="for rANS, of normal weights")
    ops.add_argument("--artifact", default="", help="a model.upar whose 6-bit codes rANS takes")
    ops.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    ops.set_defaults(run=bench_ops)
    rl = commands.add_parser("rl", help="generation against transformers', and a GRPO step")
    sizes = {"layers": 4, "dim": 128, "batch": 32, "new": 128, "rounds": 5}
    for name, value in sizes.items():
        rl.add_argument(f"--{name}", type=int, default=value, help=f"{value}")
    rl.set_defaults(run=bench_rl)
    for command in (ops, rl):
        command.add_argument("--threads", type=int, default=0, help="0: as PyTorch chooses")
        command.add_argument("--out", default="", help="the JSON file")
    train = commands.add_parser("train", help="short runs of configs: speed, memory, MFU")
    train.add_argument("configs", nargs="*", default=["configs/cpu.env"], metavar="CONFIG")
    train.add_argument("--rounds", type=int, default=1, help="runs of each config, in turn (1)")
    add_run_options(train, 20.0, "runs/bench")
    train.set_defaults(run=bench_train)
    gpu = commands.add_parser("gpu", help="benchmarks one H100 or H200 in under 9 minutes")
    gpu.add_argument(
        "--seconds", type=float, default=540, help="in all; the rest is left out (540)"
    )
    gpu.add_argument("--only", nargs="+", default=(), metavar="PART", help="all")
    gpu.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda", help="cpu: a rehearsal at toy size"
    )
    gpu.add_argument(
        "--data", default="", help=f"of the part train ({BENCH_DATA}, made if missing)"
    )
    gpu.add_argument("--runs", default="runs/bench", help="folder (runs/bench)")
    gpu.add_argument("--out", default="", help="the JSON file")
    gpu.set_defaults(run=bench_gpu, set=[])
    run_command(parser)


if __name__ == "__main__":
    run_tool(main)
