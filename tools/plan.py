"""The plan of a run, without a step: parameters, bytes, FLOPs, memory, batch, clock, phases, steps at a stated speed.

    DRY_RUN=1 CONFIG=configs/golf_8gpu.env python train_gpt.py         # calls: tools/plan.py train_gpt.py

Settings come from the environment, as those of a run do; mistakes in them, in data and in batches end the plan, too. It
writes nothing and needs neither data nor GPUs: it plans for WORLD_SIZE ranks of DEVICE, here or not, and for VOCAB_SIZE
where there are no data.
"""

import argparse
import importlib.util
import math
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

SCRIPT = Path(__file__).resolve().parents[1] / "train_gpt.py"
TOKENS_PER_SECOND = 1_000_000  # the stated speed
# Bits that a trained weight takes less than a normal one, for rows and columns differ in size (docs/lab.md).
LESS_BITS = {"matrix": 0.1, "embedding": 0.75}
# Optimizer -> bytes of state of a weight of a matrix, of an embedding; AdamW has the rest, 8 each.
STATE_BYTES = {"muon": (4, 8), "lion": (4, 4), "adamw": (8, 8), "adamw8bit": (2, 2), "adafactor": (0, 0)}


def load(path: Path) -> ModuleType:
    """The module in a file: tools/bench.py, which counts FLOPs, or the script that is planned for."""
    spec = importlib.util.spec_from_file_location(f"{path.stem}_of_plan", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # where dataclasses look
    spec.loader.exec_module(module)
    return module


def find_data(script: ModuleType, settings) -> tuple[SimpleNamespace, bool]:
    """What `open_data` gives and True or, where DATA_PATH names nothing that exists, what stands for it and False."""
    if Path(settings.data_path).exists() or ":" in settings.data_path:
        return script.open_data(settings), True
    tokenizer = SimpleNamespace(vocab_size=settings.vocab_size or 1024, bos_id=1)
    return SimpleNamespace(tokenizer=tokenizer, shares=[1.0], streams=[range(1 << 40)]), False


def estimate_bytes(script: ModuleType, settings, network: torch.nn.Module) -> dict[str, float]:
    """Bytes of code and artifact by class, as if the limit did not bind.

    A weight takes the entropy of a normal one, 0.5 log2(2 pi e) - log2(step) with the quantizer's step in root mean
    squares, less LESS_BITS. Where clip_sigmas is 0 or -1, the clip is taken for 4.5 root mean squares.
    """
    counts = script.count_parameters(network)
    sizes = {"code": sum(os.path.getsize(path) for path in (script.__file__, settings.config) if path),
             "control": 2 * counts["control"], "header and tables": 1500 + 30 * len(network.state_dict())}
    for kind, quantizer in script.quant_table(settings).items():
        clip = quantizer["clip_sigmas"] if quantizer["clip_sigmas"] > 0 else 4.5
        step = clip / (2 ** (quantizer["bits"] - 1) - 1)
        bits = 0.5 * math.log2(2 * math.pi * math.e) - math.log2(step) - LESS_BITS[kind]
        sizes[kind] = counts[kind] / 8 * max(0.0, bits)
    return sizes


def estimate_memory(script: ModuleType, settings, network: torch.nn.Module) -> dict[str, float]:
    """Bytes a rank holds beside activations."""
    counts, (matrix, embedding) = script.count_parameters(network), STATE_BYTES[settings.optimizer]
    copies = 2 + settings.ema + settings.swa + settings.qat
    return {"optimizer": matrix * counts["matrix"] + embedding * counts["embedding"] + 8 * counts["control"],
            "weights, gradients, averages, QAT": 4 * counts["total"] * copies}


def listed(parts: dict[str, float]) -> str:
    """As in: 5 = a 2 + b 3."""
    return f"{sum(parts.values()):,.0f} = " + " + ".join(f"{name} {number:,.0f}" for name, number in parts.items())


def plan_lines(script: ModuleType, s) -> list[str]:
    """The plan for settings `s`. Raises UserError."""
    bench = load(Path(__file__).with_name("bench.py"))
    plan, device = script.Plan(s), s.device.replace("auto", "cuda" if torch.cuda.is_available() else "cpu")
    runtime = script.Runtime(0, int(os.environ.get("WORLD_SIZE", 1)), torch.device(device), False)
    data, found = find_data(script, s)
    batches, vocab_size = script.Batches(data, s, runtime), data.tokenizer.vocab_size
    with FakeTensorMode():  # no weight takes memory, no product time; the device meta would do, but autocast refuses it
        network = script.GPT(script.model_config(s, vocab_size, data.tokenizer.bos_id))
        flops = bench.flops_per_token(network, s.train_seq_len)
    counts = {kind: count for kind, count in script.count_parameters(network).items() if kind != "total"}
    sizes = estimate_bytes(script, s, network)

    timed = s.max_wallclock_seconds > 0
    length, unit = (s.max_wallclock_seconds - s.reserve_seconds, "s") if timed else (s.iterations, "steps")
    by_time = TOKENS_PER_SECOND * length if timed else math.inf
    tokens = min(s.iterations * batches.tokens or math.inf, by_time)
    epochs = f", {tokens / sum(map(len, data.streams)):.3f} epochs" if found else ""
    teraflops = TOKENS_PER_SECOND * sum(flops.values()) / 1e12
    return [
        f"data: {s.data_path}, vocabulary {vocab_size:,}" + ("" if found else ", both assumed: there are none"),
        f"parameters: {listed(counts)}",
        f"estimated bytes, at most {s.artifact_bytes_max:,} allowed: {listed(sizes)}",
        f"FLOPs a token, both ways: {listed(flops)}",
        f"memory a rank, bytes, without activations: {listed(estimate_memory(script, s, network))}",
        f"batch: {batches.tokens:,} tokens = {runtime.world_size} ranks x {batches.rows // batches.micro_rows} "
        f"micro-steps x {batches.micro_rows} windows x {batches.seq_len} tokens, on {device}",
        f"clock: {length:,g} {unit} to train, then {s.reserve_seconds:g} s to choose, calibrate and pack",
        *(f"phase: {name} from {phase.planned * length:,.1f} to {phase.end * length:,.1f} {unit}"
          for name, phase in plan.phases.items()),
        f"at {TOKENS_PER_SECOND:,} tokens/s, {teraflops:,.2f} TFLOP/s: {tokens / batches.tokens:,.0f} steps, "
        f"{tokens:,.0f} tokens{epochs}"]


def main(path: Path) -> int:
    """Print the plan of the script in `path` for the settings in the environment, once for all ranks; its exit code."""
    script = load(path)

    def run() -> int:
        presets = {"arch_mode": script.ARCH_PRESETS, "optimizer": script.OPTIMIZER_PRESETS}
        settings = script.load_settings(script.Settings, dict(os.environ), presets,
                                        lambda given: script.stored_settings(given, script.Settings.out_dir))
        lines = plan_lines(script, settings)
        if os.environ.get("RANK", "0") == "0":
            print("\n".join(f"dry run: {line}" for line in lines))
        return 0

    return script.exit_code(run)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", nargs="?", type=Path, default=SCRIPT, help="train_gpt.py, or a script made from it")
    given = parser.parse_args().script.resolve()
    if not given.is_file():
        parser.error(f"{given}: no such file")
    sys.exit(main(given))
