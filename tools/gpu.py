"""The parts of `python tools/bench.py gpu`, each of which runs in a process of its own.

A part that fails, hangs or is left out does not affect the others: each part writes its own file.
With --device cpu the same code runs on toys, as a rehearsal; those figures say nothing of a GPU.
"""

import argparse
import contextlib
import functools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace

import bench
import torch
from common import (
    ROOT,
    SCRIPT,
    load_script,
    publish,
    run_script,
    short_run,
)
from endings import run_tool

# Settings of the measured shapes, and what makes a toy of each for a rehearsal on the CPU.
SHAPES = {
    "cpu.env": {"CONFIG": str(ROOT / "configs" / "cpu.env")},
    "defaults": {},
    "baseline": {"ARCH_MODE": "baseline"},
}
TOY = {
    "MODEL_DIM": "32",
    "NUM_HEADS": "2",
    "NUM_KV_HEADS": "1",
    "NUM_LAYERS": "2",
    "TRAIN_SEQ_LEN": "64",
    "ATTN_WINDOW": "16",
}
# Tokens of a step, the same in every part, so that what one part compiled is in the cache.
BATCH = {"cuda": 65536, "cpu": 256}
PROMPT = 16  # tokens before a generated text


@dataclass
class Suite:
    """What the parts share."""

    script: ModuleType  # train_gpt.py
    runtime: object  # its Runtime
    device: str
    folder: Path  # for the parts' files
    data: str  # data folder of the part train, "" for the default

    @property
    def cuda(self) -> bool:
        """Return whether the device is a GPU."""
        return self.device == "cuda"


def make_network(suite: Suite, name: str, script: ModuleType) -> tuple:
    """Return (settings, network of `script` on the CPU) of a shape, with no weights at zero."""
    environ = SHAPES[name] if suite.cuda else {**SHAPES[name], **TOY}
    presets = {"ARCH_MODE": suite.script.ARCH_PRESETS}
    settings = suite.script.load_settings(suite.script.Settings, environ, presets=presets)
    torch.manual_seed(0)
    network = script.GPT(suite.script.model_config(settings, 1024, 1))
    for param in network.parameters():
        if not param.any():
            torch.nn.init.normal_(param, std=0.02)
    return settings, network


def machine_part(suite: Suite) -> list[dict]:
    """Return records of what the device is: FLOP/s, memory bandwidth, and on CUDA its name."""
    dtypes = [torch.float32, torch.bfloat16] if suite.cuda else [torch.float32]
    peaks = {"what": "matrix products, the best of 20"}
    for dtype in dtypes:
        name = str(dtype).removeprefix("torch.")
        peaks[f"{name} TFLOP/s"] = bench.matmul_peak(suite.device, dtype) / 1e12
    source = torch.ones(1 << (28 if suite.cuda else 22), device=suite.device)
    target = source.clone()
    times = bench.in_turn({"copy": lambda: target.copy_(source)}, 10, suite.cuda)["copy"]
    bandwidth = 2 * source.nbytes / statistics.median(times) / 1e9
    records = [peaks, {"what": "copy, read and written", "GB/s": bandwidth}]
    if suite.cuda:
        card = torch.cuda.get_device_properties(0)
        query = ["nvidia-smi", "--query-gpu=driver_version,power.limit", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True).stdout.strip()
        name = f"{card.name}, sm_{card.major}{card.minor}, driver and power limit {driver}"
        memory = card.total_memory / 2**20
        records.append({"what": name, "MiB": memory, "multiprocessors": card.multi_processor_count})
    return records


def training_step(suite: Suite, model: Callable, optimizers: object, shape: tuple) -> Callable:
    """Return a function that takes a step on random ids (rows, length), and its three marks."""
    ids, targets = (torch.randint(2, 1024, shape, device=suite.device) for _ in range(2))
    borders = suite.script.document_borders(ids.cpu(), 1, torch.device(suite.device))
    finite = torch.tensor(True, device=suite.device)

    def step():
        marks = [bench.mark(suite.cuda)]
        loss = model(ids, targets, *borders).mean()
        marks.append(bench.mark(suite.cuda))
        loss.backward()
        marks.append(bench.mark(suite.cuda))
        suite.script.step_optimizers(optimizers, 0.0, finite)
        model.zero_grad()
        marks.append(bench.mark(suite.cuda))
        return marks

    return step


def median_seconds(step: Callable) -> list[float]:
    """Return the median seconds of forward, backward, optimizer and the whole step."""
    steps = [step() for _ in range(13)][3:]  # 3 warm up
    medians = []
    for first, last in ((0, 1), (1, 2), (2, 3), (0, 3)):
        seconds = [bench.between(marks[first], marks[last]) for marks in steps]
        medians.append(statistics.median(seconds))
    return medians


def kernel_times(step: Callable) -> list[list]:
    """Return [milliseconds, launches, name] of the kernels of a step on a GPU, the longest first."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        torch.cuda.synchronize()
    found = [
        [event.self_device_time_total / 1e3, event.count, event.key]
        for event in profile.key_averages()
        if event.device_type == torch.autograd.DeviceType.CUDA
        and not event.key.startswith("Optimizer.")  # PyTorch marks the whole step of an optimizer
    ]
    return sorted(found, reverse=True)


def steps_part(suite: Suite, name: str, compiled: bool, forms: dict | None = None) -> list[dict]:
    """Return the record of training steps of one shape: times, tokens/s, MFU and peak memory.

    forms: of kernels, by name, as in FAST; none are the plain ones.
    """
    script = suite.script
    script.FAST.clear()  # the operations are counted on the CPU
    settings, network = make_network(suite, name, script)
    flops = bench.flops_per_token(network, settings.train_seq_len).total()
    network.to(suite.device)
    script.FAST.update(forms or {})
    optimizers = script.make_optimizers(network, settings, suite.runtime)
    model = torch.compile(network, dynamic=False, fullgraph=True) if compiled else network
    if suite.cuda:
        torch.cuda.reset_peak_memory_stats()
    rows = BATCH[suite.device] // settings.train_seq_len
    step = training_step(suite, model, optimizers, (rows, settings.train_seq_len))
    seconds = median_seconds(step)
    tokens = rows * settings.train_seq_len
    speed = tokens / seconds[3]
    record = {
        "what": f"{name}, {'compiled' if compiled else 'eager'}",
        "batch": tokens,
        "forward ms": 1e3 * seconds[0],
        "backward ms": 1e3 * seconds[1],
        "optimizer ms": 1e3 * seconds[2],
        "tokens/s": speed,
        "MFU %": 100 * speed * flops / bench.matmul_peak(suite.device),
        "peak MiB": script.describe_machine(suite.runtime)["peak_memory_mib"],
    }
    if suite.cuda:
        # Where the sum is less than a step takes, the GPU waited for the CPU to launch kernels.
        times = kernel_times(step)
        record |= {"kernels ms": sum(ms for ms, *_ in times), "longest": times[:30]}
    return [record]


def kernels_part(suite: Suite) -> list[dict]:
    """Return what the checks of kernels say, and the record of training steps by the forms taken.

    The plain forms are in the part compiled_defaults.
    """
    script = suite.script
    _, network = make_network(suite, "defaults", script)
    reasons = []
    script.choose_kernels("auto", network.to(suite.device), suite.runtime, reasons.append)
    records = [{"what": reason} for reason in reasons]
    taken = dict(script.FAST)
    (record,) = steps_part(suite, "defaults", suite.cuda, taken)
    record["what"] += f", faster forms: {' '.join(taken) or 'none'}"
    records.append(record)
    script.FAST.clear()
    return records


def eager_part(suite: Suite) -> list[dict]:
    """Return the records of training steps of every shape, without a compiler."""
    records = []
    for name in SHAPES:
        records += steps_part(suite, name, False)
    return records


def sample_batch(sample: ModuleType, network: torch.nn.Module, rows: int, new: int) -> tuple:
    """Return (prompts, samples of `new` tokens after each), drawn at temperature 1."""
    prompts = torch.randint(2, 1024, (rows, PROMPT)).tolist()
    seeds = [(row,) for row in range(rows)]
    samples = sample.generate(network, prompts, 1, new, 1.0, seeds, frozenset())
    return prompts, samples


@torch.inference_mode()
def logits_part(suite: Suite) -> list[dict]:
    """Return how far log-probabilities of generation are from those of one forward pass."""
    sample = load_script(ROOT / "sample.py")
    records = []
    for name in SHAPES:
        settings, network = make_network(suite, name, sample)
        network.to(suite.device)
        new = min(768, settings.train_seq_len) - PROMPT
        prompts, samples = sample_batch(sample, network, 4, new)
        texts = [prompt + drawn.ids for prompt, drawn in zip(prompts, samples, strict=True)]
        ids = torch.tensor(texts, device=suite.device)
        features = network.features(
            ids, doc=torch.zeros_like(ids)
        )  # one document, as in generation
        logits = network.logits(features)[:, PROMPT - 1 : -1].float()
        expected = logits.log_softmax(-1).gather(2, ids[:, PROMPT:, None])[..., 0]
        generated = torch.tensor([drawn.logps for drawn in samples], device=suite.device)
        difference = (generated - expected).abs()
        what = f"{name}, generation against forward, {ids.size(1)} tokens"
        mean = difference.mean().item()
        records.append({"what": what, "largest": difference.max().item(), "mean": mean})
    return records


@torch.inference_mode()
def generation_part(suite: Suite) -> list[dict]:
    """Return the tokens/s of generation for several batch sizes."""
    sample = load_script(ROOT / "sample.py")
    new = 64 if suite.cuda else 8
    records = []
    for name in SHAPES:
        _, network = make_network(suite, name, sample)
        network.to(suite.device)
        for rows in (1, 64, 1024) if suite.cuda else (1, 4):
            sample_batch(sample, network, rows, new)  # warms up
            seconds = []
            for _ in range(3):
                begin = time.perf_counter()
                sample_batch(sample, network, rows, new)
                seconds.append(time.perf_counter() - begin)
            speed = rows * new / statistics.median(seconds)
            records.append({"what": f"{name}, {rows} rows", "tokens/s": speed})
    return records


def losses_and_gradients(model: torch.nn.Module, ids: torch.Tensor) -> list[torch.Tensor]:
    """Return the losses of a batch and the gradients of their mean."""
    losses = model(ids, ids)
    return [losses, *torch.autograd.grad(losses.mean(), list(model.parameters()))]


def precision_part(suite: Suite) -> list[dict]:
    """Return records of losses and gradients as trained, in float32, and in float64 on the CPU.

    Training is in bfloat16 on a GPU and in float32 on a CPU.
    """
    script = suite.script

    records = []
    for name in SHAPES:
        settings, network = make_network(suite, name, script)
        wide = script.GPT(network.config)
        wide.load_state_dict(network.state_dict())
        wide.dtype = torch.float32
        ids = torch.randint(2, 1024, (1, min(512, settings.train_seq_len)))
        exact = network.double()(ids, ids).detach()
        network.float().to(suite.device)
        wide.to(suite.device)
        models = {"as trained": network, "float32": wide}
        ids = ids.to(suite.device)
        for kind, model in models.items():
            difference = model(ids, ids).double().cpu() - exact
            record = {
                "what": f"{name}, losses against float64, {kind}",
                "of means": difference.mean().item(),
                "largest": difference.abs().max().item(),
            }
            records.append(record)
        rows = max(1, (16384 if suite.cuda else 128) // settings.train_seq_len)
        batch = torch.randint(2, 1024, (rows, settings.train_seq_len), device=suite.device)
        ways = {
            kind: functools.partial(losses_and_gradients, model, batch)
            for kind, model in models.items()
        }
        shape = f"{name}, {batch.numel()} tokens"
        records += bench.compare("losses and gradients", shape, ways, 5, suite.cuda)
    return records


def train_part(suite: Suite) -> list[dict]:
    """Return the record of a run of train_gpt.py's defaults, scored from its artifact."""
    settings = {"DEVICE": suite.device, "TRAIN_BATCH_TOKENS": str(BATCH[suite.device])}
    length = "60 s"
    if not suite.cuda:
        settings |= {**TOY, "COMPILE": "0"}
        settings |= {"ITERATIONS": "40", "MAX_WALLCLOCK_SECONDS": "0"}
        length = "40 steps"
    args = argparse.Namespace(seconds=60, data=suite.data, set=settings)
    settings, manifest = short_run(suite.script, args)
    run = run_script(suite.script, suite.folder / "run", "", settings)
    if "failed" in run:
        raise SystemExit(run["failed"])
    record = {"what": f"{length} on {manifest['name']}"}
    keys = "steps tokens step_ms tokens_per_second val_bpb artifact_bytes peak_memory_mib"
    for key in keys.split():
        record[key] = run[key]
    record["val_bpb before quantization"] = run["before_quantization"]["val_bpb"]
    return [record]


def ops_part(suite: Suite, only: str) -> list[dict]:
    """Return the records of `bench.py ops`; rANS takes the artifact of the part train, if any."""
    artifact = suite.folder / "run" / "model.upar"
    ops = SimpleNamespace(
        script=suite.script,
        only=only.split(),
        shapes=[(8, 2048, 8, 64), (64, 256, 4, 32)],
        models=bench.MUON_MODELS,
        rounds=5,
        chunk=64,
        codes=1 << 20,
        artifact=str(artifact) if artifact.is_file() else "",
    )
    if not suite.cuda:
        ops.shapes = [(1, 64, 2, 16)]
        ops.models = {"toy": TOY}
        ops.rounds = 2
        ops.chunk = 32
        ops.codes = 1 << 14
    return list(bench.op_records(ops, suite.device))


@dataclass
class Part:
    """A part of the suite. It is killed after 1.5 times the seconds that it needs."""

    measure: Callable[[Suite], list[dict]]
    gpu_seconds: float  # needed on an H100 or H200: estimates, partly from runs there
    toy_seconds: float  # needed for the rehearsal on a CPU


# The most useful parts come first.
PARTS = {
    "machine": Part(machine_part, 15, 10),
    "eager": Part(eager_part, 40, 15),
    "logits": Part(logits_part, 25, 12),
    "train": Part(train_part, 180, 60),
    "kernels": Part(kernels_part, 150, 15),
    "generation": Part(generation_part, 30, 12),
    "ops": Part(functools.partial(ops_part, only="gdn attention muon"), 45, 15),
    **{
        f"compiled_{name}": Part(functools.partial(steps_part, name=name, compiled=True), 45, 90)
        for name in ("defaults", "cpu.env", "baseline")
    },
    "precision": Part(precision_part, 25, 12),
    "rans": Part(functools.partial(ops_part, only="rans"), 20, 10),
}


# --------------------------------------------------------------------------------------- processes
def run_part(name: str, device: str, folder: str, data: str) -> None:
    """Measure one part in this process; write its records, seconds and machine into `folder`."""
    begin = time.perf_counter()
    script = load_script(SCRIPT)
    suite = Suite(script, script.start_runtime(device), device, Path(folder), data)
    records = PARTS[name].measure(suite)
    result = {
        "records": records,
        "seconds": time.perf_counter() - begin,
        **script.describe_machine(suite.runtime),
        "code_sha256": script.sha256_file(SCRIPT),
    }
    script.replace_file(suite.folder / f"{name}.json", json.dumps(result, indent=1).encode())


def start_part(name: str, device: str, folder: Path, data: str, limit: float) -> dict:
    """Return a part's records, or {"failed": reason}, from a process of its own.

    The process and all that it started are killed after `limit` seconds.
    """
    log = folder / f"{name}.log"
    command = [sys.executable, __file__, name, device, str(folder), data]
    with open(log, "w", encoding="utf-8") as errors:
        child = subprocess.Popen(command, cwd=ROOT, stderr=errors, start_new_session=True)
        try:
            code = child.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            return {"failed": f"killed after {limit:.0f} s, the time that was left for it"}
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # all have ended
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    if code == 0:
        return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    lines = [line for line in log.read_text(encoding="utf-8").splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"error: |[\w.]*(Error|Exception)\b", line)]
    reason = (errors or lines or [f"exit code {code}"])[-1]
    return {"failed": f"{reason} ({log})"}


def run_parts(args: argparse.Namespace, folder: Path, begin: float) -> tuple[dict, list[str]]:
    """Return (results of the parts that ran, names of those that were left out)."""
    data = str(Path(args.data).resolve()) if args.data else ""
    results = {}
    left_out = []
    for name, part in PARTS.items():
        if args.only and name not in args.only:
            continue
        left = args.seconds - (time.monotonic() - begin)
        needed = part.gpu_seconds if args.device == "cuda" else part.toy_seconds
        if left < needed or "interrupted" in results:
            left_out.append(name)
            continue
        try:
            result = start_part(name, args.device, folder, data, min(left, 1.5 * needed))
        except KeyboardInterrupt:
            results["interrupted"] = {"failed": f"in the part {name}"}
            left_out.append(name)
            continue
        results[name] = result
        print(f"{name}: {result.get('failed') or bench.cell(result['seconds']) + ' s'}", flush=True)
    return results, left_out


def bench_gpu(args: argparse.Namespace) -> list[str]:
    """Measure the parts in turn while the time lasts. Returns failures."""
    begin = time.monotonic()
    unknown = sorted(set(args.only) - set(PARTS))
    if unknown:
        raise SystemExit(f"error: --only {unknown[0]}: there are {', '.join(PARTS)}")
    bench.check_device(args.device)
    folder = ROOT / args.runs / time.strftime("gpu_%Y%m%d_%H%M%S")
    folder.mkdir(parents=True)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    results, left_out = run_parts(args, folder, begin)
    rows = [["part", "what", "figures"]]
    for name, result in results.items():
        if "failed" in result:
            rows.append([name, f"failed: {result['failed']}", ""])
            continue
        for record in result["records"]:
            words = [value for value in record.values() if isinstance(value, str)]
            figures = [
                f"{key} {bench.cell(value)}"
                for key, value in record.items()
                if isinstance(value, int | float)
            ]
            rows.append([name, ", ".join(words), ", ".join(figures)])
    seconds = time.monotonic() - begin
    notes = f"{seconds:.0f} s of {args.seconds:g}; left out: {', '.join(left_out) or 'nothing'}."
    if args.device == "cpu":
        notes += " A rehearsal at toy size."
    figures = {"parts": results, "left_out": left_out}
    path = args.runs + "/gpu_{date}.json"
    return publish(args, path, list(results.items()), rows, notes, figures)


if __name__ == "__main__":
    run_tool(run_part, *sys.argv[1:])
