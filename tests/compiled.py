"""The Triton kernels of train_gpt.py, compiled for GPUs that are not there; test_kernels.py starts this.

python tests/compiled.py     prints a JSON object: kernel and target -> registers, stack and shared memory
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import train_gpt as T


def resources(kernel, types, constants, capability, warps):
    """Compile a kernel and return what its code needs, by the cuobjdump that Triton brings."""
    signature = {**types, **dict.fromkeys(constants, "constexpr")}
    names = list(signature)
    aligned = {
        (names.index(n),): [["tt.divisibility", 16]] for n in names if types.get(n, "")[:1] == "*"
    }
    source = triton.compiler.ASTSource(kernel, signature, constants, aligned)
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options={"num_warps": warps})
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(compiled.asm["cubin"])
        command = [tool, "-res-usage", path]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {
        "registers": int(re.search(r"REG:(\d+)", text)[1]),
        "stack": int(re.search(r"STACK:(\d+)", text)[1]),
        "shared": compiled.metadata.shared,
    }


def main():
    os.environ.pop("TRITON_INTERPRET", None)
    found = {}
    for capability in (80, 90):
        numbers = dict.fromkeys(("N", "M"), "i32")
        types = {"F": "*fp32", "T": "*fp32", "START": "*fp32", "S": "*fp32", **numbers}
        for key, value in ((64, 64), (32, 64), (128, 128)):
            for back in (False, True):
                constants = {"K": key, "V": value, "BV": min(value, 2048 // key), "BACK": back}
                name = f"scan {key} x {value}, back {back}, sm_{capability}"
                found[name] = resources(T.scan_kernel(), types, constants, capability, 8)
        for logits in ("*bf16", "*fp32"):
            types = {"X": logits, "Y": "*i64", "LOSS": "*fp32", "LSE": "*fp32", "D": "*fp32"}
            types |= {"DL": "*fp32", "DX": logits, "V": "i32", "CAP": "fp32"}
            for grad in (False, True):
                constants = {"BLOCK": 2048, "GRAD": grad}
                name = f"loss of {logits}, gradient {grad}, sm_{capability}"
                found[name] = resources(T.loss_kernel(), types, constants, capability, 4)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
