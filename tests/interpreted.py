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


def error(found, wanted):
    """Return the distance from a float64 reference, relative to its norm."""
    return ((found.double() - wanted).norm() / wanted.norm()).item()


def fla_errors(heads, key, value, length):
    """Return the errors of flash-linear-attention's outputs and gradients in float16."""
    random = torch.Generator().manual_seed(key)
    shapes = ((2, length, heads, key), (2, length, heads, key), (2, length, heads, value))
    q, k, v = (torch.randn(shape, generator=random) for shape in shapes)
    q, k = F.normalize(q, dim=-1) * key**-0.5, F.normalize(k, dim=-1)
    g = -torch.rand(2, length, heads, generator=random)
    g[:, 70] = T.DOCUMENT_DECAY
    beta = torch.rand(2, length, heads, generator=random)
    weights = torch.randn(shapes[2], generator=random)
    exact = [x.double().requires_grad_() for x in (q, k, v, g, beta)]
    wanted, _ = T.gdn_chunk(*exact)
    wanted_grads = torch.autograd.grad((wanted * weights).sum(), exact)
    leaves = [x.half().requires_grad_() for x in (q, k, v)]
    leaves += [x.clone().requires_grad_() for x in (g, beta)]
    outputs = T.fla_gdn(*leaves)
    for output, room in zip(outputs, T.fla_outputs(*leaves), strict=True):
        assert (output.shape, output.dtype) == (room.shape, room.dtype)  # as the compiler is told
    found, *_ = outputs
    grads = torch.autograd.grad((found * weights.half()).sum(), leaves)
    name = f"{heads} x {key} x {value}"
    errors = {name: error(found, wanted)}
    for part, found_grad, wanted_grad in zip("qkvgb", grads, wanted_grads, strict=True):
        errors[f"{name}, gradient of {part}"] = error(found_grad, wanted_grad)
    return errors


def main():
    errors = {}
    for sizes in ((2, 64, 64, 150), (1, 32, 64, 128), (1, 128, 128, 100)):
        errors |= fla_errors(*sizes)
    print(json.dumps(errors))


if __name__ == "__main__":
    main()
