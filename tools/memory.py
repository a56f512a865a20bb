"""Bytes that PPO, GRPO, GSPO and LoRA hold between steps: weights, gradients, optimizer state and reference policy.

    python tools/memory.py [--config FILE] [--set NAME=VALUE] [--rank 8] [--out FILE]

Nothing is computed by a formula: the scripts' networks and optimizers are built and take a step, on PyTorch's fake
tensors, which have shapes and no content, and their bytes are added up. GRPO and GSPO hold the same tensors. Left out:
activations, logits, generation's caches and, the tasks having checkers, a reward model.
"""

import argparse
import importlib
import json
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import torch
from torch import nn
from torch._subclasses import FakeTensorMode

ROOT = Path(__file__).resolve().parents[1]
VOCABULARY = 1024  # where VOCAB_SIZE is 0: the tokenizer of the published shards sp1024
PARTS = ("weights", "gradients", "optimizer", "reference")
# method -> networks that are trained, what the reference is, and the PPO with a value head to compare with
METHODS = {
    "PPO, own critic, reference": (("policy", "critic"), "copy", "PPO, value head, reference"),
    "PPO, value head, reference": (("policy with value head",), "copy", "PPO, value head, reference"),
    "PPO, own critic": (("policy", "critic"), "", "PPO, value head"),
    "PPO, value head": (("policy with value head",), "", "PPO, value head"),
    "GRPO or GSPO, reference": (("policy",), "copy", "PPO, value head, reference"),
    "GRPO or GSPO": (("policy",), "", "PPO, value head"),
    "LoRA PPO, value head, base": (("adapter with value head",), "base", "LoRA PPO, value head, base"),
    "LoRA GRPO or GSPO, frozen copy": (("adapter",), "frozen", "LoRA PPO, value head, base"),
    "LoRA GRPO or GSPO, base": (("adapter",), "base", "LoRA PPO, value head, base"),
}


class Valued(nn.Module):
    """A network with PPO's value head, one row that reads the last layer; `alone`, a critic without an output head."""

    def __init__(self, network: nn.Module, alone: bool):
        super().__init__()
        network.head = None if alone else network.head
        self.network, self.value = network, nn.Parameter(torch.zeros(1, network.config.model_dim))


def nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def count(kind: str, settings, rank: int, script: ModuleType, trainer: ModuleType) -> dict[str, int]:
    """Bytes of one trained network, after a step of settings.optimizer: weights, gradients, optimizer, and of what its
    reference may be: copy (of the network), frozen (copy of the adapter), base (the adapter off). Raises UserError.
    """
    network = script.GPT(script.model_config(settings, settings.vocab_size or VOCABULARY, 1))
    found = {"": 0, "copy": nbytes(network.parameters())}
    if "adapter" in kind:
        script.freeze_model(script.setup_lora_adapter(network, rank))
        found |= {name: nbytes(script.reference_policy(network, frozen).args[1]) for name, frozen in
                  (("frozen", True), ("base", False))}
    model = network if kind in ("policy", "adapter") else Valued(network, alone=kind == "critic")
    rates, runtime = trainer.pretraining_rates(settings), script.Runtime(0, 1, torch.device("cpu"), False)
    optimizer = trainer.Optimizers(model, settings.optimizer, rates, runtime)
    optimizer.step(0.0, trainer.MUON_MOMENTUM, torch.tensor(False))
    return found | {
        "weights": nbytes(model.parameters()) + nbytes(model.buffers()),
        "gradients": nbytes(param.grad for param in model.parameters() if param.grad is not None),
        "optimizer": nbytes(t for own in optimizer.state_dict().values() for t in own.values()),
    }


def measure(settings, optimizers: list[str], rank: int = 8) -> list[dict]:
    """A row for each optimizer and method, with its total as a share of PPO's with a reference and a critic of its own
    (`of_own_critic`), and of PPO's with a value head on the policy and the same reference (`of_value_head`).
    """
    script, trainer, rows = *map(importlib.import_module, ("sample", "train_gpt")), []  # adapters, and optimizers
    for optimizer in optimizers:
        own = replace(settings, optimizer=optimizer)
        with FakeTensorMode():
            kinds = dict.fromkeys(kind for trained, *_ in METHODS.values() for kind in trained)
            counts = {kind: count(kind, own, rank, script, trainer) for kind in kinds}
        found, totals = {}, {}
        for method, (trained, reference, _) in METHODS.items():
            found[method] = {part: sum(counts[kind][part] for kind in trained) for part in PARTS[:3]}
            found[method]["reference"] = counts[trained[0]][reference]
            totals[method] = sum(found[method].values())
        for method, (*_, value_head) in METHODS.items():
            rows.append({"method": method, "with": optimizer, **found[method], "total": totals[method],
                         "of_own_critic": totals[method] / totals["PPO, own critic, reference"],
                         "of_value_head": totals[method] / totals[value_head]})
    return rows


def describe(rows: list[dict]) -> str:
    """The table, and what is true of the claim that GRPO saves 40-60% of PPO's memory."""
    lines, said = [], []
    for optimizer in dict.fromkeys(row["with"] for row in rows):
        own = {row["method"]: row for row in rows if row["with"] == optimizer}
        heads = "".join(f"{part:>15}" for part in (*PARTS, "total"))
        lines.append(f"\n{optimizer + ', bytes':32}{heads}  of PPO's, own critic  of PPO's, value head")
        for method, row in own.items():
            cells = "".join(f"{row[part]:15,}" for part in (*PARTS, "total"))
            lines.append(f"{method:32}{cells}{row['of_own_critic']:22.1%}{row['of_value_head']:22.1%}")
        saved = {(key, method): f"{1 - row[key]:.1%}" for key in ("of_own_critic", "of_value_head")
                 for method, row in own.items()}
        with_reference, without, adapters = "GRPO or GSPO, reference", "GRPO or GSPO", "LoRA GRPO or GSPO, base"
        said.append(f"{optimizer}: {saved['of_own_critic', with_reference]} with a reference and "
                    f"{saved['of_own_critic', without]} without, if PPO has a reference and a critic of its own; "
                    f"{saved['of_value_head', with_reference]} if PPO's critic is a value head on the policy, "
                    f"{saved['of_value_head', adapters]} if both train adapters alone")
    claim = "\nThe claim: without a value network GRPO and GSPO save 40-60% of PPO's memory. Counted here:"
    return "\n".join([*lines, claim, *said])


def main() -> int:
    """Run the command line described at the top of this file."""
    script, trainer = importlib.import_module("sample"), importlib.import_module("train_gpt")
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", default="", help="CONFIG file of train_gpt.py")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="NAME=VALUE", help="its settings")
    parser.add_argument("--optimizers", nargs="+", default=["adamw", "adamw8bit", "muon"], metavar="NAME",
                        choices=["adamw", "adamw8bit", "muon", "lion"], help="adamw adamw8bit muon")
    parser.add_argument("--rank", type=int, default=8, help="of the adapters (8)")
    parser.add_argument("--out", type=Path, help="a file for the rows, as JSON")
    args = parser.parse_args()
    given = dict(pair.partition("=")[::2] for pair in args.set) | ({"CONFIG": args.config} if args.config else {})
    if unknown := [name for name in given if name.lower() not in trainer.Settings.__dataclass_fields__]:
        raise script.UserError(f"--set {unknown[0]}: no setting of train_gpt.py")
    try:
        settings = trainer.load_settings(trainer.Settings, given, presets={"ARCH_MODE": trainer.ARCH_PRESETS})
    except trainer.UserError as error:
        raise script.UserError(str(error)) from None
    rows = measure(settings, args.optimizers, args.rank)
    parameters = rows[5]["weights"] // 4  # of the policy alone, GRPO
    print(f"{parameters:,} parameters, {settings.vocab_size or VOCABULARY} tokens, float32 everywhere, LoRA rank "
          f"{args.rank}\n{describe(rows)}")
    if args.out:
        found = {"command": sys.argv[1:], "parameters": parameters, "rank": args.rank, "rows": rows}
        script.replace_file(args.out, (json.dumps(found, indent=1) + "\n").encode())
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(importlib.import_module("sample").exit_code(main))
