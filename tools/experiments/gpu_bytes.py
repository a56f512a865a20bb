"""Count the bytes that a training step moves and keeps for each token on a GPU, without one.

    python tools/experiments/gpu_bytes.py --config configs/golf_8gpu.env [--forms attention gdn]
    python tools/experiments/gpu_bytes.py --config FILE --script OLD_TRAIN_GPT.py     an older script

The branches for CUDA of a copy of train_gpt.py are compiled on the CPU, in bfloat16. PyTorch's
compiler then says how many bytes the kernels of forward and backward pass read and write; each
launch of a matrix product, of attention or of a kernel of ours counts its tensors once. The launches
inside of flash-linear-attention are counted in Triton's interpreter (requirements-full.txt). What is
kept from the forward for the backward pass is counted by a hook. Two batches are counted, and the
difference is that of a token: weights, which a large batch reads once, are left out, and so is the
optimizer.
"""

import argparse
import json
import multiprocessing
import os
import re
import sys
import types
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
import torch.nn.attention.varlen  # registers its operators

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tools/

from common import ROOT, load_script
from torch._inductor import metrics


def forced_module(path):
    """Return a script as a module whose branches for CUDA tensors are taken on a CPU, too, as on a GPU
    with bfloat16 units.
    """
    source = re.sub(r"\b[\w.]+\.is_cuda\b", "True", Path(path).read_text(encoding="utf-8"))
    module = types.ModuleType("forced")
    module.__file__ = str(path)
    sys.modules["forced"] = module  # dataclasses look their module up
    exec(compile(source, str(path), "exec"), module.__dict__)
    module.gpu_dtype = lambda: torch.bfloat16
    return module


def zeros_like_outputs(shapes):
    """Return a kernel that gives zeros of the shapes that the compiler is told."""

    def kernel(*arguments):
        outputs = shapes(*arguments)
        return torch.utils._pytree.tree_map(lambda x: x.zero_(), outputs)

    return kernel


def use_forms(script, names):
    """Put forms into FAST, with stand-ins for what only a GPU can run."""
    forms = dict(attention=script.varlen_attend, gdn=script.fla_gdn)
    for name in names:
        script.FAST[name] = forms[name]
    register = torch.library.register_kernel
    register("underpar::fla_gdn", "cpu", zeros_like_outputs(script.fla_outputs))
    register("underpar::fla_grad", "cpu", lambda *x: [torch.zeros_like(y) for y in x[:5]])

    def attention(q, k, v, *_):
        random_state = torch.zeros(2, dtype=torch.uint64)
        return torch.zeros_like(q), torch.zeros(q.size(1), q.size(0)), random_state

    register("torch_attn::_varlen_attn", "cpu", attention)
    register(
        "torch_attn::_varlen_attn_backward",
        "cpu",
        lambda d, q, k, v, *_: tuple(torch.zeros_like(x) for x in (q, k, v)),
    )


def nbytes(tensors):
    """Return the bytes of all tensors among some values."""
    return sum(x.numel() * x.element_size() for x in tensors if torch.is_tensor(x))


def fla_bytes(path, tokens, heads, key, value):
    """Return the bytes that fla's launches read and write in a layer, without those of the arguments
    and outputs of its two operators, which the compiler counts.

    Call it in a process of its own: it puts stand-ins for a GPU into PyTorch.
    """
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    import gpu_stand_in
    from triton.runtime.interpreter import GridExecutor

    gpu_stand_in.install()
    script = load_script(path)
    counted = []
    GridExecutor.__call__ = lambda self, *values, **named: counted.append(
        nbytes([*values, *named.values()])
    )
    shapes = ((1, tokens, heads, key), (1, tokens, heads, key), (1, tokens, heads, value))
    q, k, v = (torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes)
    g, beta = torch.zeros(2, 1, tokens, heads)
    inputs = [q, k, v, g, beta]
    outputs = script.fla_gdn(*inputs)
    o, total, inverse = outputs
    saved = [q, k, v, total, beta, inverse]
    gradients = script.fla_grad(*saved, o)
    return sum(counted) - nbytes([*inputs, *outputs, *saved, o, *gradients])


def load_network(script, config, vocab_size):
    """Return the settings of a config and its network, for this script or an older one."""
    presets = {"ARCH_MODE": script.ARCH_PRESETS}
    settings = script.load_settings(script.Settings, {"CONFIG": str(config)}, presets=presets)
    network = script.GPT(script.model_config(settings, vocab_size, 1))
    network.dtype = torch.bfloat16
    return settings, network


def count(args, script, rows):
    """Return the bytes that forward and backward move, and keep between them, and the tokens."""
    settings, network = load_network(script, args.config, args.vocab_size)
    config = network.config
    tokens = rows * settings.train_seq_len
    inside_fla = 0
    if "gdn" in args.forms:
        value = config.model_dim // config.num_heads
        key = value // 2 if config.gdn_light else value
        layers = sum(word[0] in "gG" for word in config.layers.split())
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            arguments = args.script, tokens, config.num_heads, key, value
            inside_fla = layers * pool.submit(fla_bytes, *arguments).result()
    torch.manual_seed(0)
    ids = torch.randint(2, args.vocab_size, (rows, settings.train_seq_len))
    ids[torch.rand(ids.shape) < 1 / args.document] = 1
    extra = []
    if args.forms:
        extra = script.document_borders(ids, 1, torch.device("cpu"))
    weights = {param.data_ptr() for param in network.parameters()}
    saved = {}

    def keep(tensor):
        if tensor.data_ptr() not in weights:
            saved[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    torch._logging.set_logs(inductor_metrics=True)  # counts bytes, in graphs that are compiled
    torch._inductor.config.fx_graph_cache = False
    metrics.reset()
    torch.compiler.reset()
    model = torch.compile(network, dynamic=False, fullgraph=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        losses = model(ids, ids, *extra)
        kept = sum(saved.values())
        losses.sum().backward()
    return metrics.num_bytes_accessed + inside_fla, kept, tokens


def main():
    """Print the counts as one line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--script", type=Path, default=ROOT / "train_gpt.py")
    parser.add_argument("--forms", nargs="*", default=[], choices=["attention", "gdn"])
    parser.add_argument("--vocab-size", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=2, help="windows in the smaller batch")
    parser.add_argument("--document", type=int, default=700, help="mean tokens of a document")
    args = parser.parse_args()
    script = forced_module(args.script)
    if args.forms:
        use_forms(script, args.forms)
    less = count(args, script, args.rows)
    more = count(args, script, 2 * args.rows)
    moved, kept, tokens = (large - small for large, small in zip(more, less, strict=True))
    facts = {"config": str(args.config), "script": str(args.script), "forms": args.forms}
    facts |= {"tokens": more[2], "moved a token": moved / tokens, "kept a token": kept / tokens}
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
