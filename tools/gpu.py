"""The GPU suite, `python tools/bench.py gpu`: its parts, and what starts each in a process of its own.

A part that fails, hangs or is left out costs the others nothing: what ended stands in a file of its own. With --device
cpu the same code goes over toys: a rehearsal, whose figures say nothing of a GPU.
"""

import argparse
import contextlib
import functools
import importlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch

ROOT = Path(__file__).resolve().parents[1]
# The shapes that are measured, as settings, and what makes a toy of each for a rehearsal on the CPU.
RUNS = {"cpu.env": {"CONFIG": str(ROOT / "configs" / "cpu.env")}, "defaults": {}, "baseline": {"ARCH_MODE": "baseline"}}
TOY = {"MODEL_DIM": "32", "NUM_HEADS": "2", "NUM_KV_HEADS": "1", "NUM_LAYERS": "2", "TRAIN_SEQ_LEN": "64",
       "ATTN_WINDOW": "16"}
BATCH = {"cuda": 65536, "cpu": 256}  # tokens of a step, as the part train has: what that compiled is in the cache


def load_bench() -> ModuleType:
    """tools/bench.py, whose measuring functions the parts take."""
    sys.path.insert(0, str(Path(__file__).parent))
    return importlib.import_module("bench")


def make_network(suite: SimpleNamespace, name: str, script: ModuleType) -> tuple:
    """(settings, network of `script`, on the CPU) of a shape of RUNS; weights that would begin at 0 do not."""
    given = {**RUNS[name], **({} if suite.cuda else TOY)}
    settings = suite.script.load_settings(suite.script.Settings, given, presets={"ARCH_MODE": script.ARCH_PRESETS})
    torch.manual_seed(0)
    network = script.GPT(script.model_config(settings, 1024, 1))
    for param in network.parameters():
        if not param.any():
            torch.nn.init.normal_(param, std=0.02)
    return settings, network


def machine_part(suite: SimpleNamespace) -> list[dict]:
    """What the device is, and what it can do."""
    types = {"float32": torch.float32, **({"bfloat16": torch.bfloat16} if suite.cuda else {})}
    peaks = {f"{name} TFLOP/s": suite.bench.matmul_peak(suite.device, dtype) / 1e12 for name, dtype in types.items()}
    source = torch.ones(1 << (28 if suite.cuda else 22), device=suite.device)
    target = source.clone()
    seconds = statistics.median(suite.bench.in_turn({"copy": lambda: target.copy_(source)}, 10, suite.cuda)["copy"])
    records = [{"what": "products of matrices, the best of 20", **peaks},
               {"what": "copy, read and written", "GB/s": 2 * source.nbytes / seconds / 1e9}]
    if suite.cuda:
        card = torch.cuda.get_device_properties(0)
        driver = subprocess.run(["nvidia-smi", "--query-gpu=driver_version,power.limit", "--format=csv,noheader"],
                                capture_output=True, text=True).stdout.strip()
        records.append({"what": f"{card.name}, sm_{card.major}{card.minor}, driver and power limit {driver}",
                        "MiB": card.total_memory / 2**20, "multiprocessors": card.multi_processor_count})
    return records


def steps_part(suite: SimpleNamespace, name: str, compiled: bool) -> list[dict]:
    """Forward, backward and optimizer step of one shape, with tokens/s, MFU (as in `train`) and peak memory."""
    script = suite.script
    settings, network = make_network(suite, name, script)
    flops = suite.bench.flops_per_token(network, settings.train_seq_len).total()
    network.to(suite.device)
    rates, skip = script.pretraining_rates(settings), torch.tensor(False, device=suite.device)
    optimizers = script.Optimizers(network, settings.optimizer, rates, suite.runtime)
    model = torch.compile(network, dynamic=False, fullgraph=True) if compiled else network
    rows = BATCH[suite.device] // settings.train_seq_len
    ids, targets = (torch.randint(2, 1024, (rows, settings.train_seq_len), device=suite.device) for _ in range(2))
    if suite.cuda:
        torch.cuda.reset_peak_memory_stats()
    marks = []
    for _ in range(13):
        marks.append([suite.bench.mark(suite.cuda)])
        loss = model(ids, targets).mean()
        marks[-1].append(suite.bench.mark(suite.cuda))
        loss.backward()
        marks[-1].append(suite.bench.mark(suite.cuda))
        optimizers.step(0.0, script.MUON_MOMENTUM, skip)
        torch._foreach_zero_([param.grad for param in optimizers.params])
        marks[-1].append(suite.bench.mark(suite.cuda))
    forward, backward, step, total = (  # the first three warmed up
        statistics.median(suite.bench.between(each[first], each[last]) for each in marks[3:])
        for first, last in ((0, 1), (1, 2), (2, 3), (0, 3)))
    peak, speed = suite.bench.matmul_peak(suite.device), ids.numel() / total
    return [{"what": f"{name}, {'compiled' if compiled else 'eager'}", "batch": ids.numel(),
             "forward ms": 1e3 * forward, "backward ms": 1e3 * backward, "optimizer ms": 1e3 * step, "tokens/s": speed,
             "MFU %": 100 * speed * flops / peak,
             "peak MiB": script.describe_machine(suite.runtime)["peak_memory_mib"]}]


def eager_part(suite: SimpleNamespace) -> list[dict]:
    return [record for name in RUNS for record in steps_part(suite, name, False)]


@torch.inference_mode()
def logits_part(suite: SimpleNamespace) -> list[dict]:
    """Logits of the decoder, token by token behind a prompt of 16, against those of one forward over the whole text."""
    sample, records = suite.bench.load_script(ROOT / "sample.py"), []
    for name in RUNS:
        settings, network = make_network(suite, name, sample)
        ids = torch.randint(2, 1024, (4, min(768, settings.train_seq_len)), device=suite.device)
        ids[:, ids.size(1) // 2] = 1  # a document's begin
        whole, decoder = network.to(suite.device)(ids)[:, 15:-1], sample.Decoder(network, ids[:, :16].tolist(), 1)
        cached = [decoder.logits.clone(), *(decoder(ids[:, at]).clone() for at in range(16, ids.size(1) - 1))]
        apart = (torch.stack(cached, dim=1) - whole).abs()
        same = (torch.stack(cached, dim=1).argmax(-1) == whole.argmax(-1)).double().mean()
        records.append({"what": f"{name}, decoder against forward, {ids.size(1)} tokens", "largest": apart.max().item(),
                        "mean": apart.mean().item(), "deviation of logits": whole.std().item(),
                        "same likeliest token %": 100 * same.item()})
    return records


@torch.inference_mode()
def generation_part(suite: SimpleNamespace) -> list[dict]:
    """Tokens/s of the decoder, the likeliest token each, with its CUDA graph (on a CPU there is none) and without."""
    sample, new, records = suite.bench.load_script(ROOT / "sample.py"), 64 if suite.cuda else 8, []

    class Plain(sample.Decoder):
        def __call__(self, ids: torch.Tensor) -> torch.Tensor:
            if self.steps == self.room:
                self.grow(512)
            self.steps += 1
            return self.step(ids)

    def advance(decoder: sample.Decoder, ids: torch.Tensor) -> None:
        for _ in range(new):
            ids = decoder(ids).argmax(-1)

    for name in RUNS:
        _, network = make_network(suite, name, sample)
        network.to(suite.device)
        for batch in (1, 64, 1024) if suite.cuda else (1, 4):
            prompts = torch.randint(2, 1024, (batch, 16), device=suite.device)
            ways = {kind.__name__: functools.partial(advance, kind(network, prompts.tolist(), 1), prompts[:, -1])
                    for kind in (sample.Decoder, Plain)}
            for way in ways.values():
                way()
            times = suite.bench.in_turn(ways, 3, suite.cuda, 0)
            graph, plain = (batch * new / statistics.median(seconds) for seconds in times.values())
            records.append({"what": f"{name}, {batch} rows", "tokens/s": graph, "without graph": plain,
                            "ratio": graph / plain})
    return records


def precision_part(suite: SimpleNamespace) -> list[dict]:
    """Losses and gradients in bfloat16 (on the CPU in float32) against float32, timed too, and float64 on the CPU."""
    script, records = suite.script, []

    class Wide(script.GPT):
        def embedded(self, *inputs: torch.Tensor) -> torch.Tensor:
            return super().embedded(*inputs).float()

    for name in RUNS:
        settings, network = make_network(suite, name, script)
        wide = Wide(network.config)
        wide.load_state_dict(network.state_dict())
        small = torch.randint(2, 1024, (1, min(512, settings.train_seq_len)))
        exact = network.double()(small, small).detach()
        network.float().to(suite.device)
        wide.to(suite.device)
        rows = max(1, (16384 if suite.cuda else 128) // settings.train_seq_len)
        ids = torch.randint(2, 1024, (rows, settings.train_seq_len), device=suite.device)

        def run(model: torch.nn.Module, ids: torch.Tensor = ids) -> list[torch.Tensor]:
            losses = model(ids, ids)
            return [losses, *torch.autograd.grad(losses.mean(), list(model.parameters()))]

        for model, how in ((network, "as trained"), (wide, "float32")):
            losses = model(small.to(suite.device), small.to(suite.device)).double().cpu()
            apart = losses - exact
            records.append({"what": f"{name}, losses against float64, {how}", "of means": apart.mean().item(),
                            "largest": apart.abs().max().item()})
        ways = {"as trained": functools.partial(run, network), "float32": functools.partial(run, wide)}
        records += suite.bench.compare("losses and gradients", f"{name}, {ids.numel()} tokens", ways, 5, suite.cuda)
    return records


def train_part(suite: SimpleNamespace) -> list[dict]:
    """A run of train_gpt.py's defaults, scored from the artifact that it wrote."""
    script, given = suite.script, {"HOLDOUT_TOKENS": "65536"}
    if not suite.cuda:
        given = {**TOY, "COMPILE": "0", "HOLDOUT_TOKENS": "4096"}
    args = SimpleNamespace(seconds=60 if suite.cuda else 3, data=suite.data, set=[])
    settings, manifest = suite.bench.short_run(script, args, DEVICE=suite.device,
                                               TRAIN_BATCH_TOKENS=str(BATCH[suite.device]), **given)
    run = suite.bench.run_script(script, suite.folder / "run", "", settings)
    if "failed" in run:
        raise SystemExit(run["failed"])
    return [{"what": f"{args.seconds} s on {manifest['name']}", **{key: run[key] for key in (
        "steps", "tokens", "step_ms", "tokens_per_second", "val_bpb", "artifact_bytes", "peak_memory_mib")},
        "val_bpb before quantization": run["before_quantization"]["val_bpb"]}]


def ops_part(suite: SimpleNamespace, only: str) -> list[dict]:
    """The operations of `ops`; rANS takes the codes of the part train where that wrote its artifact."""
    artifact = suite.folder / "run" / "model.upar"
    shapes = [(8, 2048, 8, 64), (64, 256, 4, 32)] if suite.cuda else [(1, 64, 2, 16)]
    models = suite.bench.MODELS_OF_OPS if suite.cuda else {"toy": TOY}
    ops = SimpleNamespace(script=suite.script, only=only.split(), shapes=shapes, models=models,
                          rounds=5 if suite.cuda else 2, chunk=64 if suite.cuda else 32,
                          codes=1 << (20 if suite.cuda else 14), artifact=str(artifact) if artifact.is_file() else "")
    return list(suite.bench.op_records(ops, suite.device))


# By worth: name -> (what measures it; seconds that must be left: on an H100 or H200, a guess, not yet run there; of a
# toy on the CPU). It is ended after half as many again.
PARTS = {
    "machine": (machine_part, 15, 10), "eager": (eager_part, 40, 15), "logits": (logits_part, 25, 12),
    "train": (train_part, 180, 60), "generation": (generation_part, 30, 12),
    "ops": (functools.partial(ops_part, only="gdn attention muon"), 45, 15),
    **{f"compiled_{name}": (functools.partial(steps_part, name=name, compiled=True), 45, 90)
       for name in ("defaults", "cpu.env", "baseline")},
    "precision": (precision_part, 25, 12), "rans": (functools.partial(ops_part, only="rans"), 20, 10),
}


def run_part(name: str, device: str, folder: str, data: str) -> None:
    """Measure one part in this process, and write its records, seconds and machine into `folder`."""
    begin, bench = time.perf_counter(), load_bench()
    script = bench.load_script(bench.SCRIPT)
    suite = SimpleNamespace(bench=bench, script=script, runtime=script.start_runtime(device), device=device,
                            cuda=device == "cuda", folder=Path(folder), data=data)
    found = {"records": PARTS[name][0](suite), "seconds": time.perf_counter() - begin,
             **script.describe_machine(suite.runtime), "code_sha256": script.sha256_file(bench.SCRIPT)}
    script.replace_file(suite.folder / f"{name}.json", json.dumps(found, indent=1).encode())


def start_part(name: str, device: str, folder: Path, data: str, limit: float) -> dict:
    """A part's records, or {"failed": why}, from a process that ends, with all that it started, after `limit` s."""
    log = folder / f"{name}.log"
    with open(log, "w", encoding="utf-8") as errors:
        child = subprocess.Popen([sys.executable, __file__, name, device, str(folder), data], cwd=ROOT, stderr=errors,
                                 start_new_session=True)
        try:
            code = child.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            return {"failed": f"ended after {limit:.0f} s, the time that it had"}
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # all have ended
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    if code:
        said = [line for line in log.read_text(encoding="utf-8").splitlines() if line.strip()]
        named = [line for line in said if re.match(r"error: |[\w.]*(Error|Exception)\b", line)]
        return {"failed": f"{(named or said or [f'exit code {code}'])[-1]} ({log})"}
    return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))


def bench_gpu(args: argparse.Namespace) -> list[str]:
    """Measure the parts in turn while the time lasts; each is kept when it ended. Returns failures."""
    begin, bench = time.monotonic(), load_bench()
    if strange := sorted(set(args.only) - set(PARTS)):
        raise SystemExit(f"error: --only {strange[0]}: there are {', '.join(PARTS)}")
    bench.check_device(args.device)
    folder, data = ROOT / args.runs / time.strftime("gpu_%Y%m%d_%H%M%S"), str(Path(args.data).resolve())
    folder.mkdir(parents=True)
    parts, left_out = {}, []
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    for name in (name for name in PARTS if name in (args.only or PARTS)):
        left, need = args.seconds - (time.monotonic() - begin), PARTS[name][1 if args.device == "cuda" else 2]
        if left < need or "interrupted" in parts:
            left_out.append(name)
            continue
        try:
            parts[name] = start_part(name, args.device, folder, data if args.data else "", min(left, 1.5 * need))
        except KeyboardInterrupt:
            parts["interrupted"] = {"failed": f"in the part {name}"}
            left_out.append(name)
            continue
        print(f"{name}: {parts[name].get('failed') or bench.cell(parts[name]['seconds']) + ' s'}", flush=True)
    rows = [["part", "what", "figures"]]
    for name, part in parts.items():
        for record in part.get("records") or [{"what": f"failed: {part['failed']}"}]:
            words = ", ".join(value for value in record.values() if isinstance(value, str))
            numbers = (f"{key} {bench.cell(value)}" for key, value in record.items() if isinstance(value, int | float))
            rows.append([name, words, ", ".join(numbers)])
    notes = (f"{time.monotonic() - begin:.0f} s of {args.seconds:g}; left out: {', '.join(left_out) or 'nothing'}."
             + " A rehearsal at toy size." * (args.device == "cpu"))
    return bench.publish(args, args.runs + "/gpu_{date}.json", list(parts.items()), rows, notes, parts=parts,
                         left_out=left_out)


if __name__ == "__main__":
    run_part(*sys.argv[1:])
