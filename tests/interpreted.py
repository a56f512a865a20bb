"""flash-linear-attention's kernels, interpreted on the CPU; test_kernels.py starts this as a process of its own,
because Triton reads TRITON_INTERPRET when it is imported.

    TRITON_INTERPRET=1 python tests/interpreted.py     prints a JSON object: name -> largest relative error
"""

import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

import gpu_stand_in

import train_gpt as T

gpu_stand_in.install()  # before fla is imported


def fla_errors(heads, key, value, length):
    """Return the relative errors of flash-linear-attention's output and gradients in float16."""
    random = torch.Generator().manual_seed(key)
    shape = (2, length, heads)
    q, k, v = (torch.randn(*shape, width, generator=random) for width in (key, key, value))
    q, k = F.normalize(q, dim=-1) * key**-0.5, F.normalize(k, dim=-1)
    g, beta = -torch.rand(shape, generator=random), torch.rand(shape, generator=random)
    g[:, 70] = T.DOCUMENT_DECAY
    weights = torch.randn(*shape, value, generator=random)
    exact = [x.double().requires_grad_() for x in (q, k, v, g, beta)]
    wanted, _ = T.gdn_chunk(*exact)
    leaves = [x.half().requires_grad_() for x in (q, k, v)]
    leaves += [x.clone().requires_grad_() for x in (g, beta)]
    outputs = T.fla_gdn(*leaves)
    for output, room in zip(outputs, T.fla_outputs(*leaves), strict=True):
        assert (output.shape, output.dtype) == (room.shape, room.dtype)  # as the compiler is told
    grads = torch.autograd.grad((outputs[0] * weights.half()).sum(), leaves)
    wanted_grads = torch.autograd.grad((wanted * weights).sum(), exact)
    pairs = zip("oqkvgb", (outputs[0], *grads), (wanted, *wanted_grads), strict=True)
    return {
        f"{part}, {heads} x {key} x {value}": ((x.double() - y).norm() / y.norm()).item()
        for part, x, y in pairs
    }


def main():
    errors = {}
    for sizes in ((2, 64, 64, 150), (1, 32, 64, 128), (1, 128, 128, 100)):
        errors |= fla_errors(*sizes)
    print(json.dumps(errors))


if __name__ == "__main__":
    main()
