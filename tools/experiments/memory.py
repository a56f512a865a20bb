"""Count the bytes that PPO, GRPO, GSPO and LoRA hold between steps.

    python tools/experiments/memory.py [--config FILE] [--set NAME=VALUE] [--rank 8] [--out FILE]

They are weights, gradients, optimizer state and reference policy. Nothing is computed by a formula:
the scripts' networks and optimizers are built and take a step on PyTorch's fake tensors, which have
shapes and no content, and their bytes are added up. GRPO and GSPO hold the same tensors. Left out
are activations, logits, caches of generation and, as the tasks have checkers, a reward model.
"""

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import torch
from torch import nn
from torch._subclasses import FakeTensorMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tools/

from common import ROOT, load_script, parse_set, pretraining_rates, setting_names

VOCABULARY = 1024  # if VOCAB_SIZE is 0: the tokenizer of the published shards sp1024
PARTS = ("weights", "gradients", "optimizer", "reference")
OPTIMIZERS = ["adamw", "adamw8bit", "muon", "lion"]


@dataclass
class Method:
    """A method of training."""

    networks: tuple[str, ...]  # that are trained
    reference: str  # what the reference policy is: a copy, a frozen adapter, the base, "" for none
    compared: str  # the PPO with a value head to compare with


METHODS = {
    "PPO, own critic, reference": Method(
        ("policy", "critic"), "copy", "PPO, value head, reference"
    ),
    "PPO, value head, reference": Method(
        ("policy with value head",), "copy", "PPO, value head, reference"
    ),
    "PPO, own critic": Method(("policy", "critic"), "", "PPO, value head"),
    "PPO, value head": Method(("policy with value head",), "", "PPO, value head"),
    "GRPO or GSPO, reference": Method(("policy",), "copy", "PPO, value head, reference"),
    "GRPO or GSPO": Method(("policy",), "", "PPO, value head"),
    "LoRA PPO, value head, base": Method(
        ("adapter with value head",), "base", "LoRA PPO, value head, base"
    ),
    "LoRA GRPO or GSPO, frozen copy": Method(("adapter",), "frozen", "LoRA PPO, value head, base"),
    "LoRA GRPO or GSPO, base": Method(("adapter",), "base", "LoRA PPO, value head, base"),
}


class ValueModel(nn.Module):
    """A network with PPO's value head, which reads the last layer.

    is_critic: it is a network of its own, without an output head.
    """

    def __init__(self, network: nn.Module, is_critic: bool):
        super().__init__()
        if is_critic:
            network.head = None
        self.network = network
        self.value = nn.Parameter(torch.zeros(1, network.config.model_dim))


def nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of tensors."""
    return sum(tensor.nbytes for tensor in tensors)


def count_bytes(
    kind: str, settings, rank: int, policies: ModuleType, trainer: ModuleType
) -> dict[str, int]:
    """Return the bytes of one trained network after a step, by part and by kind of reference.

    The references are copy (of the network), frozen (a copy of the adapter), base (the adapter
    off). Raises UserError.
    """
    vocab_size = settings.vocab_size or VOCABULARY
    network = policies.GPT(policies.model_config(settings, vocab_size, 1))
    counts = {"": 0, "copy": nbytes(network.parameters())}
    if "adapter" in kind:
        policies.setup_lora_adapter(network, rank)
        for name, param in network.named_parameters():
            param.requires_grad_(".lora_" in name)
        for name, frozen in (("frozen", True), ("base", False)):
            counts[name] = nbytes(policies.reference_policy(network, frozen).args[1])
    model = network
    if kind == "critic" or "value head" in kind:
        model = ValueModel(network, is_critic=kind == "critic")
    rates = pretraining_rates(settings)
    runtime = policies.Runtime(0, 1, torch.device("cpu"), False)
    optimizer = trainer.Optimizers(model, settings.optimizer, rates, runtime)
    optimizer.step(0.0, trainer.MUON_MOMENTUM, torch.tensor(False))
    counts["weights"] = nbytes(model.parameters()) + nbytes(model.buffers())
    gradients = [param.grad for param in model.parameters() if param.grad is not None]
    counts["gradients"] = nbytes(gradients)
    counts["optimizer"] = 0
    for state in optimizer.state_dict().values():
        counts["optimizer"] += nbytes(state.values())
    return counts


def measure(settings, optimizers: list[str], rank: int = 8) -> list[dict]:
    """Return a row of bytes for each optimizer and method.

    The total is also given as a share: of PPO's with a reference and a critic of its own
    (`of_own_critic`), and of PPO's with a value head and the same reference (`of_value_head`).
    """
    policies = load_script(ROOT / "train_grpo.py")  # has adapters
    trainer = load_script(ROOT / "train_gpt.py")  # has optimizers
    kinds = set()
    for method in METHODS.values():
        kinds.update(method.networks)
    rows = []
    for optimizer in optimizers:
        own = replace(settings, optimizer=optimizer)
        with FakeTensorMode():
            counts = {
                kind: count_bytes(kind, own, rank, policies, trainer) for kind in sorted(kinds)
            }
        by_method = {}
        for name, method in METHODS.items():
            row = {"method": name, "with": optimizer}
            for part in PARTS[:3]:
                row[part] = sum(counts[network][part] for network in method.networks)
            row["reference"] = counts[method.networks[0]][method.reference]
            row["total"] = sum(row[part] for part in PARTS)
            by_method[name] = row
        for name, row in by_method.items():
            compared = by_method[METHODS[name].compared]
            own_critic = by_method["PPO, own critic, reference"]
            row["of_own_critic"] = row["total"] / own_critic["total"]
            row["of_value_head"] = row["total"] / compared["total"]
            rows.append(row)
    return rows


def describe(rows: list[dict]) -> str:
    """Return the tables, and what is true of the claim that GRPO saves 40-60% of PPO's memory."""
    lines = []
    savings = []
    heads = "".join(f"{part:>15}" for part in (*PARTS, "total"))
    for optimizer in dict.fromkeys(row["with"] for row in rows):
        title = f"{optimizer}, bytes"
        lines.append(f"\n{title:32}{heads}  of PPO's, own critic  of PPO's, value head")
        saved = {}
        for row in rows:
            if row["with"] == optimizer:
                cells = "".join(f"{row[part]:15,}" for part in (*PARTS, "total"))
                shares = f"{row['of_own_critic']:22.1%}{row['of_value_head']:22.1%}"
                lines.append(f"{row['method']:32}{cells}{shares}")
                for key in ("of_own_critic", "of_value_head"):
                    saved[key, row["method"]] = f"{1 - row[key]:.1%}"
        savings.append(
            f"{optimizer}: {saved['of_own_critic', 'GRPO or GSPO, reference']} with a reference and "
            f"{saved['of_own_critic', 'GRPO or GSPO']} without, if PPO has a reference and a critic "
            f"of its own; {saved['of_value_head', 'GRPO or GSPO, reference']} if PPO's critic is a "
            f"value head on the policy, {saved['of_value_head', 'LoRA GRPO or GSPO, base']} if both "
            "train adapters alone"
        )
    claim = (
        "\nThe claim: without a value network GRPO and GSPO save 40-60% of PPO's memory. Counted "
        "here:"
    )
    return "\n".join([*lines, claim, *savings])


def main() -> int:
    """Run the command line described at the top of this file."""
    policies = load_script(ROOT / "train_grpo.py")
    trainer = load_script(ROOT / "train_gpt.py")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="", help="CONFIG file of train_gpt.py")
    parser.add_argument(
        "--set", type=parse_set, nargs="+", action="extend", default=[], metavar="NAME=VALUE"
    )
    parser.add_argument(
        "--optimizers", nargs="+", default=OPTIMIZERS[:3], choices=OPTIMIZERS, metavar="NAME"
    )
    parser.add_argument("--rank", type=int, default=8, help="of the adapters (8)")
    parser.add_argument("--out", type=Path, help="a file for the rows, as JSON")
    args = parser.parse_args()
    environ = dict(args.set)
    unknown = sorted(set(environ) - setting_names(trainer))
    if unknown:
        raise policies.UserError(f"--set {unknown[0]}: no setting of train_gpt.py")
    if args.config:
        environ["CONFIG"] = args.config
    presets = {"ARCH_MODE": trainer.ARCH_PRESETS}
    try:
        settings = trainer.load_settings(trainer.Settings, environ, presets=presets)
    except trainer.UserError as error:
        raise policies.UserError(str(error)) from None
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
    sys.exit(load_script(ROOT / "train_grpo.py").exit_code(main))
