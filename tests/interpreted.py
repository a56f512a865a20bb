"""The Triton kernels of train_gpt.py, interpreted on the CPU; test_kernels.py starts this as a process of its own,
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


def scan_errors(key, value):
    """Return the errors of the states, forward and backward in time, and of all gradients."""
    random = torch.Generator().manual_seed(key)
    factors = torch.randn(6, 3, key, key, generator=random) * key**-0.5
    terms = torch.randn(6, 3, key, value, generator=random)
    state = torch.randn(3, key, value, generator=random)
    weights = torch.randn(7, 3, key, value, generator=random)
    errors = {}
    for reverse in (False, True):
        # The recurrence itself, in float64.
        wanted = [state.double()]
        for n in reversed(range(6)) if reverse else range(6):
            factor = factors[n].mT if reverse else factors[n]
            wanted.append(factor.double() @ wanted[-1] + terms[n].double())
        wanted = torch.stack(wanted[::-1] if reverse else wanted)
        errors[f"scan {key} x {value}, reverse {reverse}"] = error(
            T.triton_scan(factors, terms, state, reverse), wanted
        )
    gradients = {}
    for dtype in (torch.float64, torch.float32):
        leaves = [x.to(dtype).requires_grad_() for x in (factors, terms, state)]
        T.FAST.clear()
        if dtype == torch.float32:
            T.FAST["scan"] = T.triton_scan
        states = T.gdn_scan(*leaves, False)
        gradients[dtype] = torch.autograd.grad((states * weights.to(dtype)).sum(), leaves)
    T.FAST.clear()
    for name, wanted, found in zip(("factors", "terms", "state"), *gradients.values(), strict=True):
        errors[f"scan {key} x {value}, gradient of {name}"] = error(found, wanted)
    return errors


def loss_errors(rows, width, dtype):
    """Return the errors of losses and logsumexps and of the gradients by the logits.

    Some targets are -1. A loss on the logsumexps, such as a z-loss, has a gradient too.
    """
    random = torch.Generator().manual_seed(width)
    logits = (12 * torch.randn(rows, width, generator=random)).to(dtype)
    targets = torch.randint(-1, width, (rows,), generator=random)
    targets[:2] = torch.tensor([-1, width - 1])
    weights = torch.rand(rows, generator=random)
    exact = logits.double().requires_grad_()
    capped = 30 * torch.tanh(exact / 30)
    wanted = F.cross_entropy(capped, targets, ignore_index=-1, reduction="none")
    wanted_lse = capped.logsumexp(1) - 30  # the kernel's logits are less their cap
    z_losses = (wanted_lse.square() * weights).sum()
    (wanted_grad,) = torch.autograd.grad((wanted * weights).sum(), exact, retain_graph=True)
    (wanted_z_grad,) = torch.autograd.grad(z_losses, exact)
    logits.requires_grad_()
    found, found_lse = T.softcap_loss(logits, targets, 30.0)
    z_losses = (found_lse.square() * weights).sum()
    (found_grad,) = torch.autograd.grad((found * weights).sum(), logits, retain_graph=True)
    (found_z_grad,) = torch.autograd.grad(z_losses, logits)
    assert found[0] == 0 and not found_grad[0].any()  # a target of -1
    name = f"loss {rows} x {width}, {dtype}"
    return {
        name: error(found, wanted),
        f"{name}, logsumexp": error(found_lse, wanted_lse),
        f"{name}, gradient": error(found_grad, wanted_grad),
        f"{name}, gradient of a z-loss": error(found_z_grad, wanted_z_grad),
    }


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
    name = f"float16 fla {heads} x {key} x {value}"
    errors = {name: error(found, wanted)}
    for part, found_grad, wanted_grad in zip("qkvgb", grads, wanted_grads, strict=True):
        errors[f"{name}, gradient of {part}"] = error(found_grad, wanted_grad)
    return errors


def main():
    errors = {}
    for sizes in ((2, 64, 64, 150), (1, 32, 64, 128), (1, 128, 128, 100)):
        errors |= fla_errors(*sizes)
    for sizes in ((64, 64), (32, 64), (128, 128), (16, 32)):
        errors |= scan_errors(*sizes)
    for dtype in (torch.float32, torch.float16):
        for width in (1000, 2048, 5000):
            errors |= loss_errors(7, width, dtype)
    torch.manual_seed(0)
    config = T.GPTConfig(1000, 1, "g", "rms", model_dim=128, num_heads=2, num_kv_heads=1)
    network = T.GPT(config)
    network.dtype = torch.float32
    for name, form in (("scan", T.triton_scan), ("loss", T.softcap_loss)):
        fast, plain = T.self_test(name, form, network, torch.device("cpu"))
        errors[f"self-test of {name}"] = fast.item()
        assert plain == 0
    print(json.dumps(errors))


if __name__ == "__main__":
    main()
