"""Count the bytes that PPO, GRPO, GSPO and LoRA hold between steps.

    python tools/experiments/critic.py [--config FILE] [--set NAME=VALUE] [--rank 8] [--out FILE]

They are weights, gradients, optimizer state and reference policy. Nothing is computed by a formula:
the networks and optimizers of train_ppo.py are built on the CPU and take a step, and the bytes of
their tensors are added up. GRPO and GSPO hold the same tensors. Left out are activations, logits,
caches of generation and, as the tasks have checkers, a reward model.
"""

import argparse
import copy
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tools/

from common import ROOT, load_script, parse_set, setting_names

VOCABULARY = 1024  # if VOCAB_SIZE is 0: the tokenizer of the published shards sp1024
PARTS = ("weights", "gradients", "optimizer", "reference")
OPTIMIZERS = ["adamw", "muon", "lion"]


@dataclass
class Method:
    """A method of training."""

    has_critic: bool  # a network of its own, as PPO has it elsewhere; here it is a value head
    has_reference: bool
    has_adapters: bool = False  # policy and critic train these alone


METHODS = {
    "PPO, reference": Method(True, True),
    "PPO": Method(True, False),
    "GRPO or GSPO, reference": Method(False, True),
    "GRPO or GSPO": Method(False, False),
    "LoRA PPO, reference": Method(True, True, True),
    "LoRA PPO": Method(True, False, True),
    "LoRA GRPO or GSPO, reference": Method(False, True, True),
    "LoRA GRPO or GSPO": Method(False, False, True),
}


def nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of tensors."""
    return sum(tensor.nbytes for tensor in tensors)


def step_bytes(network: nn.Module, settings, script: ModuleType) -> dict[str, int]:
    """Return the bytes by part of what one network holds after a step."""
    runtime = script.Runtime(0, 1, torch.device("cpu"), False)
    trained = script.trained_parameters(network, settings)
    optimizers = script.make_optimizers(trained, settings, runtime)
    state = script.OptimizerState(optimizers, trained)
    script.step_optimizers(optimizers, 0.0, torch.tensor(True))
    params = [*network.parameters()]
    states = [nbytes(tensors.values()) for tensors in state.state_dict().values()]
    return {
        "weights": nbytes(params) + nbytes(network.buffers()),
        "gradients": nbytes(param.grad for param in params if param.grad is not None),
        "optimizer": sum(states),
    }


def add_critic(script: ModuleType, network, settings):
    """Return a critic of its own layers, as PPO has it elsewhere: a copy with a value head alone."""
    critic = copy.deepcopy(network)
    for param, original in zip(critic.parameters(), network.parameters(), strict=True):
        if hasattr(original, "splits"):
            param.splits = original.splits  # for Muon; a copy has lost them
    critic.head = None
    script.adapt(script.merge_lora(critic), settings, torch.device("cpu"))
    script.add_value_head(critic)
    critic.w_value.requires_grad_(True)
    return critic


def count_bytes(method: Method, config, settings, script: ModuleType) -> dict[str, int]:
    """Return the bytes of a method by part. script: train_ppo.py. Raises UserError."""
    network = script.GPT(config)
    script.adapt(network, settings, torch.device("cpu"))
    frozen = {id(param): param for param in network.parameters() if not param.requires_grad}
    shared = nbytes(frozen.values())
    networks = [network]
    if method.has_critic:
        networks.append(add_critic(script, network, settings))
    row = {"reference": 0}
    if method.has_reference:
        row["reference"] = nbytes(copy.deepcopy(network, frozen).parameters()) - shared
    for part in PARTS[:3]:
        row[part] = 0
    for trained in networks:
        for part, size in step_bytes(trained, settings, script).items():
            row[part] += size
    return row


def measure(settings, optimizers: list[str], rank: int = 8) -> list[dict]:
    """Return a row of bytes for each optimizer and method.

    The total is also given as a share of PPO's, with a reference and the same weights trained.
    settings: of train_gpt.py, for the shape.
    """
    script = load_script(ROOT / "train_ppo.py")
    vocab_size = settings.vocab_size or VOCABULARY
    config = load_script(ROOT / "train_gpt.py").model_config(settings, vocab_size, 1)
    rows = []
    for optimizer in optimizers:
        totals = {}
        for name, method in METHODS.items():
            given = {"optimizer": optimizer, "lora_rank": rank if method.has_adapters else 0}
            parts = count_bytes(method, config, script.Settings(**given), script)
            total = sum(parts.values())
            of_ppo = total / totals.setdefault(method.has_adapters, total)
            rows.append(
                {"method": name, "with": optimizer, **parts, "total": total, "of_ppo": of_ppo}
            )
    return rows


def describe(rows: list[dict]) -> str:
    """Return the tables, and what is true of the claim that GRPO saves 40-60% of PPO's memory."""
    lines = []
    savings = []
    heads = "".join(f"{part:>15}" for part in (*PARTS, "total"))
    for optimizer in dict.fromkeys(row["with"] for row in rows):
        lines.append(f"\n{optimizer + ', bytes':32}{heads}  of PPO's, with a reference")
        saved = {}
        for row in rows:
            if row["with"] == optimizer:
                cells = "".join(f"{row[part]:15,}" for part in (*PARTS, "total"))
                lines.append(f"{row['method']:32}{cells}{row['of_ppo']:27.1%}")
                saved[row["method"]] = f"{1 - row['of_ppo']:.1%}"
        savings.append(
            f"{optimizer}: {saved['GRPO or GSPO, reference']} with a reference and "
            f"{saved['GRPO or GSPO']} without, if PPO has a reference; "
            f"{saved['LoRA GRPO or GSPO, reference']} if all train adapters alone"
        )
    claim = (
        "\nThe claim: without a value network GRPO and GSPO save 40-60% of PPO's memory. Counted "
        "here:"
    )
    return "\n".join([*lines, claim, *savings])


def main() -> int:
    """Run the command line described at the top of this file."""
    trainer = load_script(ROOT / "train_gpt.py")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="", help="CONFIG file of train_gpt.py")
    parser.add_argument(
        "--set", type=parse_set, nargs="+", action="extend", default=[], metavar="NAME=VALUE"
    )
    parser.add_argument(
        "--optimizers", nargs="+", default=OPTIMIZERS[:2], choices=OPTIMIZERS, metavar="NAME"
    )
    parser.add_argument("--rank", type=int, default=8, help="of the adapters (8)")
    parser.add_argument("--out", type=Path, help="a file for the rows, as JSON")
    args = parser.parse_args()
    environ = dict(args.set)
    unknown = sorted(set(environ) - setting_names(trainer))
    if unknown:
        raise trainer.UserError(f"--set {unknown[0]}: no setting of train_gpt.py")
    if args.config:
        environ["CONFIG"] = args.config
    presets = {"ARCH_MODE": trainer.ARCH_PRESETS}
    settings = trainer.load_settings(trainer.Settings, environ, presets=presets)
    rows = measure(settings, args.optimizers, args.rank)
    policy = next(row for row in rows if row["method"] == "GRPO or GSPO")
    parameters = policy["weights"] // 4
    print(
        f"{parameters:,} parameters, {settings.vocab_size or VOCABULARY} tokens, float32 "
        f"everywhere, LoRA rank {args.rank}\n{describe(rows)}"
    )
    if args.out:
        found = {"command": sys.argv[1:], "parameters": parameters, "rank": args.rank, "rows": rows}
        args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(load_script(ROOT / "train_gpt.py").exit_code(main))
