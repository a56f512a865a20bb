"""A stand-in for a GPU's driver: Triton's interpreter can then run flash-linear-attention's kernels on a CPU.

Import it before fla, with TRITON_INTERPRET=1 in the environment. What it cannot show is how fast a kernel is, or
whether a GPU's compiler gets it right: a run tests that on the GPU itself (choose_kernels in the scripts).
"""

import contextlib
import importlib
import sys
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.autotuner import Autotuner

H100 = {
    "name": "NVIDIA H100",
    "major": 9,
    "minor": 0,
    "multi_processor_count": 132,
    "total_memory": 80 << 30,
    "shared_memory_per_multiprocessor": 233_472,
    "shared_memory_per_block_optin": 232_448,
}


class Driver:
    """What Triton asks a driver for, answered as an H100's would."""

    def __init__(self):
        properties = {"max_shared_mem": 232_448, "multiprocessor_count": 132}
        self.utils = SimpleNamespace(get_device_properties=lambda device: properties)

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self):
        return torch.device("cpu")

    def get_device_interface(self):
        return torch.cuda

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=0):
        return 0

    def get_benchmarker(self):
        return None

    def get_empty_cache_for_benchmark(self):
        return None

    def clear_cache(self, cache):
        pass


def run_first_config(tuner, *arguments, **named):
    """Run a kernel with the first of the configurations that would be timed."""
    tuner.nargs = dict(zip(tuner.arg_names, arguments, strict=False))
    return tuner.fn.run(*arguments, **{**named, **tuner.configs[0].all_kwargs()})


class Int(int):
    """A number of a loop, which fla's kernels cast as if it were Triton's."""

    def to(self, dtype):
        return self


def int_range(*ends):
    """Return range(*ends) with numbers that can be cast."""
    return map(Int, range(*ends))


def install():
    """Put the stand-ins into PyTorch, Triton and, where it is installed, fla."""
    card = SimpleNamespace(**H100)
    torch.cuda.get_device_properties = lambda device=None: card
    torch.cuda.get_device_name = lambda device=None: card.name
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda.device = lambda device: contextlib.nullcontext()
    torch.cuda.current_device = lambda: 0
    torch.cuda.device_count = lambda: 1
    triton.runtime.driver.set_active(Driver())
    Autotuner.run = run_first_config
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("fla.ops.gated_delta_rule")
    for name, module in list(sys.modules.items()):
        if name.startswith("fla.ops"):
            module.range = int_range
