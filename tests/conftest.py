"""Fixtures of several test files."""

import os
import sys
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch

import quantize as Q

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from common import ROOT, load_script

KEPT = ("PATH", "HOME", "TMPDIR", "LANG", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV")


def environment(**changes: object) -> dict[str, str]:
    """What a command line of a test finds in its environment."""
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    return {**kept, "OMP_NUM_THREADS": "1", "DEVICE": "cpu", **{name: str(text) for name, text in changes.items()}}


def load_tool(name: str) -> ModuleType:
    """tools/NAME.py."""
    return load_script(ROOT / "tools" / f"{name}.py")


@pytest.fixture(autouse=True)
def denormals():
    yield
    torch.set_flush_denormal(False)  # start_runtime sets it, as in training


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def call(capsys):
    """Function: run a command line of quantize.py in this process; its exit code, output and what stands on stderr."""

    def run(*words: object, **changes: object) -> tuple[int, str, str]:
        with (mock.patch.dict(os.environ, environment(**changes), clear=True),
              mock.patch.object(sys, "argv", ["quantize.py", *map(str, words)])):
            code = Q.exit_code(Q.main)
        out, err = capsys.readouterr()
        assert code == 0 or out == "" and err.count("\n") == 1 and err.startswith("error: "), err
        return code, out, err

    return run
