"""Print the plan of a run of train_gpt.py: parameters, bytes, FLOPs, memory, batch, clock, phases and steps.

    python tools/plan.py configs/golf_8gpu.env
    WORLD_SIZE=8 python tools/plan.py configs/golf_8gpu.env DEVICE=cuda --num_layers=12

The arguments are those of train_gpt.py (`python train_gpt.py --help` lists the settings); settings in the environment
count too. A mistake in them stops the plan with the error of the run. INIT_FROM is an error: the plan is that of a new
network, so give the settings of its shape. The tool takes no step, writes nothing and needs neither data nor GPUs. It
plans for WORLD_SIZE processes (an environment variable, 1 if it is not set) on DEVICE, which need not exist here. If
DATA_PATH does not exist, it assumes VOCAB_SIZE tokens (1,024 if that is 0).
"""

import math
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
from bench import flops_per_token
from common import SCRIPT, load_script
from endings import run_tool
from torch._subclasses.fake_tensor import FakeTensorMode

TOKENS_PER_SECOND = 1_000_000  # the stated speed
# Bits that a trained weight takes less than a normal one, because rows and columns differ in size
# (docs/lab/2026-11.md, 2026-11-22).
LESS_BITS = {"matrix": 0.1, "embedding": 0.75}
# Optimizer -> bytes of state per weight of a matrix, per weight of an embedding. All other weights take AdamW's 8. A
# row of the hashed tables under muon takes 4 (RowRMSprop).
STATE_BYTES = {
    "muon": (4, 8),
    "lion": (4, 4),
    "adamw": (8, 8),
    "adafactor": (0, 0),  # a number a row and a column
    "adamw8bit": (2, 2),
}


def find_data(script: ModuleType, settings) -> tuple[SimpleNamespace, bool]:
    """Return the data of DATA_PATH and True; if DATA_PATH does not exist, a stand-in and False."""
    if Path(settings.data_path).exists() or ":" in settings.data_path:
        return script.open_data(settings), True
    tokenizer = SimpleNamespace(vocab_size=settings.vocab_size or 1024, bos_id=1)
    return SimpleNamespace(tokenizer=tokenizer, shares=[1.0], windows=[range(1 << 40)]), False


def estimate_bytes(script: ModuleType, settings, network: torch.nn.Module) -> dict[str, float]:
    """Return the bytes of code and artifact by class, as if there were no limit.

    A weight takes the entropy of a normal variable, 0.5 log2(2 pi e) - log2(step) bits, less LESS_BITS. The step is the
    quantizer's, in root mean squares of the tensor.
    """
    counts = script.count_parameters(network)
    files = [path for path in (script.__file__, settings.config) if path]
    sizes = {
        "code": sum(os.path.getsize(path) for path in files),
        "control": 2 * counts["control"],
        "header and tables": 1500 + 30 * len(network.state_dict()),
    }
    for kind, quantizer in script.quant_table(settings.matrix_bits).items():
        step = quantizer["clip_sigmas"] / (2 ** (quantizer["bits"] - 1) - 1)
        bits = 0.5 * math.log2(2 * math.pi * math.e) - math.log2(step) - LESS_BITS[kind]
        sizes[kind] = counts[kind] / 8 * max(0.0, bits)
    return sizes


def estimate_memory(script: ModuleType, settings, network: torch.nn.Module) -> dict[str, float]:
    """Return the bytes that a rank holds beside activations."""
    counts = script.count_parameters(network)
    matrix, embedding = STATE_BYTES[settings.optimizer]
    if settings.optimizer == "muon" and settings.bigram_vocab_size:
        rows = 2 * settings.bigram_vocab_size
        counts["embedding"] -= rows * script.BIGRAM_DIM
        counts["control"] += rows / 2  # 4 bytes of the 8
    copies = 2 + settings.ema + settings.swa + settings.qat  # 2: weights and gradients
    return {
        "optimizer": matrix * counts["matrix"]
        + embedding * counts["embedding"]
        + 8 * counts["control"],
        "weights, gradients, averages, QAT": 4 * counts["total"] * copies,
    }


def listed(parts: dict[str, float]) -> str:
    """Return a sum and its parts as text, for example `5 = a 2 + b 3`."""
    return f"{sum(parts.values()):,.0f} = " + " + ".join(
        f"{name} {number:,.0f}" for name, number in parts.items()
    )


def plan_lines(script: ModuleType, settings) -> list[str]:
    """Return the lines of the plan. Raises UserError."""
    plan = script.Plan(settings)
    device = settings.device.replace("auto", "cuda" if torch.cuda.is_available() else "cpu")
    world_size = os.environ.get("WORLD_SIZE", "1")
    if not world_size.isdecimal() or int(world_size) < 1:
        raise script.UserError(f"WORLD_SIZE={world_size!r}: must be a whole number from 1")
    if settings.init_from:
        raise script.UserError(
            f"INIT_FROM={settings.init_from!r}: must be empty here; give the settings of its shape instead"
        )
    world_size = int(world_size)
    runtime = script.Runtime(0, world_size, torch.device(device), False)
    data, has_data = find_data(script, settings)
    batches = script.Batches(data, settings, runtime)
    vocab_size = data.tokenizer.vocab_size
    # Fake tensors take no memory and no time. The device meta would, too, but autocast refuses it.
    with FakeTensorMode():
        config = script.model_config(settings, vocab_size, data.tokenizer.bos_id)
        network = script.GPT(config)
        flops = flops_per_token(network, settings.train_seq_len)
    counts = script.count_parameters(network)
    counts.pop("total")
    sizes = estimate_bytes(script, settings, network)
    memory = estimate_memory(script, settings, network)

    length = settings.iterations
    unit = "steps"
    tokens = settings.iterations * settings.train_batch_tokens
    if settings.max_wallclock_seconds > 0:
        length = settings.max_wallclock_seconds - settings.reserve_seconds
        unit = "s"
        tokens = min(tokens or math.inf, TOKENS_PER_SECOND * length)
    assumed = "" if has_data else ", both assumed: there are no data"
    epochs = ""
    if has_data:
        windows = sum(map(len, data.windows))
        epochs = f", {tokens / (windows * settings.train_seq_len):.3f} epochs"
    teraflops = TOKENS_PER_SECOND * sum(flops.values()) / 1e12
    return [
        f"data: {settings.data_path}, vocabulary {vocab_size:,}{assumed}",
        f"parameters: {listed(counts)}",
        f"estimated bytes, at most {settings.artifact_bytes_max:,} allowed: {listed(sizes)}",
        f"FLOPs a token, both ways: {listed(flops)}",
        f"memory a rank, bytes, without activations: {listed(memory)}",
        f"batch: {settings.train_batch_tokens:,} tokens = {world_size} ranks x "
        f"{batches.rank_batch_size // batches.micro_batch_size} micro-steps x {batches.micro_batch_size} windows x "
        f"{settings.train_seq_len} tokens, on {device}",
        f"clock: {length:,g} {unit} to train, then {settings.reserve_seconds:g} s to choose "
        "weights, quantize and pack",
        *(
            f"phase: {name} from {begin * length:,.1f} to {end * length:,.1f} {unit}"
            for name, (begin, end) in plan.planned.items()
        ),
        f"at {TOKENS_PER_SECOND:,} tokens/s, {teraflops:,.2f} TFLOP/s: "
        f"{tokens / settings.train_batch_tokens:,.0f} steps, {tokens:,.0f} tokens{epochs}",
    ]


def main(arguments: list[str]) -> int:
    """Print the plan for the settings of the arguments and the environment; return the exit code."""
    if "-h" in arguments or "--help" in arguments:
        print(__doc__)
        return 0
    script = load_script(SCRIPT)

    def run() -> int:
        presets = {"ARCH_MODE": script.ARCH_PRESETS, "OPTIMIZER": script.OPTIMIZER_PRESETS}
        settings = script.load_settings(
            script.Settings, os.environ, arguments, presets, script.stored_settings
        )
        print("\n".join(plan_lines(script, settings)))
        return 0

    return script.exit_code(run)


if __name__ == "__main__":
    run_tool(main, sys.argv[1:])
