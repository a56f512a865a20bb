"""Measurements of speed.

python tools/bench.py ops    the Gated DeltaNet chunk form against transformers' pure-PyTorch rule, in turn, on the CPU
"""

import argparse
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "train_gpt.py"  # the file whose gdn_chunk is measured
TRANSFORMERS = "5.23.0"  # its rule became 1.2 to 1.7 times faster between 4.57 and this version: a ratio names one
SHAPES = [(4, 512, 8, 64), (4, 2048, 8, 64), (16, 256, 4, 32)]  # (B, T, H, D)

Rule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def load_script(path: Path) -> ModuleType:
    """Import a script of this repository by its path."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise SystemExit(f"{path}: no such Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


def transformers_rule() -> tuple[str, Rule] | None:
    """Name and function of transformers' pure-PyTorch chunk rule, or None where transformers is not installed."""
    try:
        import transformers
    except ImportError:
        return None
    transformers.utils.logging.set_verbosity_error()
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    if transformers.__version__ != TRANSFORMERS:
        print(f"note: transformers is {transformers.__version__}; the project's figures name {TRANSFORMERS}")
    return f"transformers {transformers.__version__}", lambda *x: torch_chunk_gated_delta_rule(*x)[0]


def parse_shape(text: str) -> tuple[int, int, int, int]:
    """B, T, H, D from text such as 4x512x8x64."""
    parts = text.split("x")
    if len(parts) != 4 or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"shape is {text!r}; it must be BxTxHxD, such as 4x512x8x64")
    return tuple(map(int, parts))


def random_inputs(b: int, t: int, h: int, d: int) -> list[Tensor]:
    """Leaves q, k (unit length), v, g, beta in float32, with a decay and a write strength as at initialisation."""
    torch.manual_seed(0)
    q, k = (torch.nn.functional.normalize(torch.randn(b, t, h, d), dim=-1) for _ in range(2))
    g, beta = -0.2 * torch.rand(b, t, h), torch.rand(b, t, h)
    return [x.requires_grad_() for x in (q, k, torch.randn(b, t, h, d), g, beta)]


def forward_backward(rule: Rule, inputs: list[Tensor], weight: Tensor) -> tuple[float, float, list[Tensor]]:
    """Milliseconds of the forward pass, of both passes, and [output, gradients of the inputs]."""
    for x in inputs:
        x.grad = None
    start = time.perf_counter()
    out = rule(*inputs)
    middle = time.perf_counter()
    out.backward(weight)
    end = time.perf_counter()
    return 1e3 * (middle - start), 1e3 * (end - start), [out.detach(), *(x.grad for x in inputs)]


def relative_error(a: list[Tensor], b: list[Tensor]) -> float:
    """Largest over the pairs of max|a - b| / max(max|b|, 1e-3)."""
    return max(((x - y).abs().max() / y.abs().max().clamp(min=1e-3)).item() for x, y in zip(a, b, strict=True))


def bench_ops(args: argparse.Namespace) -> None:
    """Time gdn_chunk and the reference in turn, forward and backward, and print one table line for each shape."""
    if args.threads:
        torch.set_num_threads(args.threads)
    script = load_script(SCRIPT)
    reference = transformers_rule()
    if reference is None:
        print(f"transformers is missing: pip install transformers=={TRANSFORMERS}; timed against gdn_recurrent instead")
        reference = "gdn_recurrent", lambda q, k, *x: script.gdn_recurrent(q * k.shape[-1] ** -0.5, k, *x)[0]

    def ours(q: Tensor, k: Tensor, *rest: Tensor) -> Tensor:  # transformers scales q itself
        return script.gdn_chunk(q * k.shape[-1] ** -0.5, k, *rest, chunk=args.chunk)[0]

    rules = {f"gdn_chunk({args.chunk})": ours, reference[0]: reference[1]}
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, float32, {args.rounds} rounds in turn")
    for b, t, h, d in args.shapes:
        inputs, weight = random_inputs(b, t, h, d), torch.randn(b, t, h, d)
        results = {key: forward_backward(f, inputs, weight)[2] for key, f in rules.items()}  # warms up as well
        times: dict[str, list[tuple[float, float]]] = {key: [] for key in rules}
        for _ in range(args.rounds):
            for key, f in rules.items():
                times[key].append(forward_backward(f, inputs, weight)[:2])
        print(f"B{b} T{t} H{h} D{d}")
        for key, pairs in times.items():
            forward, both = zip(*pairs, strict=True)
            print(
                f"  {key:<24} forward+backward min {min(both):8.1f} ms  median {statistics.median(both):8.1f} ms"
                f"   forward min {min(forward):7.1f} ms"
            )
        mine, other = ([both for _, both in pairs] for pairs in times.values())
        ratios = f"min {min(other) / min(mine):.2f}  median {statistics.median(other) / statistics.median(mine):.2f}"
        print(f"  ratio {ratios}  largest relative difference {relative_error(*results.values()):.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    ops = commands.add_parser("ops", help="gdn_chunk against transformers' PyTorch chunk rule, on the CPU")
    ops.add_argument("--shapes", nargs="+", type=parse_shape, default=SHAPES, metavar="BxTxHxD")
    ops.add_argument("--rounds", type=int, default=8)
    ops.add_argument("--chunk", type=int, default=32)
    ops.add_argument("--threads", type=int, default=0, help="0: as PyTorch chooses")
    ops.set_defaults(run=bench_ops)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
