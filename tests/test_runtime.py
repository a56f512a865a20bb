"""Section runtime: which device a run takes, and what it says where it cannot."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import train_gpt as T
import train_grpo as G
from conftest import ROOT, refusal


@pytest.fixture
def gpus(monkeypatch):
    """Function: let PyTorch see so many GPUs. Returns the list of those that are chosen."""
    for name in ("RANK", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", chosen.append)

    def see(count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        return chosen

    return see


@pytest.mark.parametrize(
    ("limit", "given", "taken"),
    [
        ("250000 100000", {}, 2),
        ("9 10", {}, 1),
        ("max 10", {}, 8),
        ("1 1", {"OMP_NUM_THREADS": "8"}, 8),
    ],
)
def test_no_more_threads_than_cpus_of_the_container(limit, given, taken, monkeypatch):
    """Unless the user has said how many."""
    threads = [8]
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name, text in given.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(T.Path, "read_text", lambda path: limit)
    T.set_up_device(torch.device("cpu"))
    assert threads[-1] == taken


def test_gpus_that_pytorch_does_not_see_are_an_error(gpus, tmp_path, monkeypatch):
    """By an nvidia-smi that lists one; those that the user hides are left alone."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H100 (UUID: GPU-1)'\n")
    tool.chmod(0o755)
    gpus(0)
    refusal(T.UserError, "^DEVICE='cuda'.*DEVICE=cpu", T.start_runtime, "cuda")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    refusal(T.UserError, "^DEVICE='auto'.*DEVICE=cpu", T.start_runtime, "auto")
    assert T.start_runtime("cpu").device == torch.device("cpu")
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert T.start_runtime("auto") == T.Runtime(0, 1, torch.device("cpu"), False)


def test_a_visible_gpu_is_taken_unless_the_cpu_is_asked_for(gpus, monkeypatch):
    """Attention is not left to cuDNN there: it takes up to a second to plan for each shape, and its
    gradients may be NaN.
    """
    chosen = gpus(2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert T.start_runtime("cpu").device == torch.device("cpu") and chosen == []
    second = torch.device("cuda", 1)
    assert T.start_runtime("auto").device == T.start_runtime("cuda").device == second
    assert chosen == [second, False] * 2
    monkeypatch.setenv("LOCAL_RANK", "2")
    refusal(T.UserError, "^LOCAL_RANK=2: .* 2 GPUs", T.start_runtime, "cuda")


# What is left over from torchrun, of RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT.
LEFT_OVER = [
    "RANK=0",
    "WORLD_SIZE=8",
    "RANK=0 WORLD_SIZE=1",
    "LOCAL_RANK=x",
    "RANK=x WORLD_SIZE=1 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=29599",
    "RANK= WORLD_SIZE=1 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=29599",
    "RANK=0 WORLD_SIZE=0 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=29599",
    "RANK=0 WORLD_SIZE=999999999999999999999 MASTER_ADDR=127.0.0.1 MASTER_PORT=29599",
    "RANK=1 WORLD_SIZE=1 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=29599",
    "RANK=-1 WORLD_SIZE=1 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=29599",
    "RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=99999",
    "RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=0",
    "RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=x",
]


def leave_over(monkeypatch, left):
    for name in T.RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for pair in left.split():
        monkeypatch.setenv(*pair.split("="))


@pytest.mark.parametrize("left", LEFT_OVER)
def test_variables_left_over_from_torchrun_are_one_line(monkeypatch, left):
    leave_over(monkeypatch, left)
    first, value = left.split()[0].split("=")
    said = "" if " " in left or "LOCAL" in left else "RANK below WORLD_SIZE.*"
    refusal(T.UserError, f"^{first}='{value}'.*{said} unset", T.start_runtime, "cpu")


def test_a_port_in_use_is_one_line(monkeypatch, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        address = f"MASTER_ADDR=127.0.0.1 MASTER_PORT={port}"
        leave_over(monkeypatch, f"RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 {address}")
        refusal(T.UserError, f" MASTER_PORT='{port}': ", T.start_runtime, "cpu")
    # Whoever left the variables behind sees for what the process would have waited.
    assert f"MASTER_PORT='{port}': waiting" in capsys.readouterr().err


def test_the_machine_is_described(monkeypatch, tmp_path):
    def describe():
        return T.describe_machine(T.Runtime(0, 2, torch.device("cpu"), False))

    monkeypatch.setattr(T, "__file__", str(tmp_path / "script.py"))
    assert describe()["commit"] == "unknown"
    (tmp_path / "script.py").write_text("one")
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@x"]
    for words in ("init -q", "add .", "commit -qm one", "tag -am tag v1"):
        subprocess.run([*git, *words.split()], cwd=tmp_path, check=True)
    about = describe()
    assert re.fullmatch("[0-9a-f]{40}", about["commit"])
    (tmp_path / "script.py").write_text("two")
    assert describe()["commit"] == about["commit"] + "+"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert describe()["commit"] == "unknown"
    assert about["hardware"] == f"2 x {os.uname().machine} CPU, {torch.get_num_threads()} threads"
    assert about["versions"]["torch"] == torch.__version__
    assert 50 < about["peak_memory_mib"] < 50_000


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stop_signal_is_remembered_and_said_by_rank_0(rank, capfd):
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    ended = []
    runtime = T.Runtime(rank, 2, torch.device("cpu"), False)
    run = SimpleNamespace(runtime=runtime, end_at_once=lambda number, frame: ended.append(number))
    try:
        stop_signal = T.StopSignal(run)
        assert stop_signal.number == 0
        with contextlib.redirect_stderr(sys.__stderr__):
            for _ in range(2):  # within a second
                os.kill(os.getpid(), signal.SIGINT)
        assert stop_signal.number == signal.SIGINT and ended == []
        stop_signal.received -= 2
        for number in numbers:
            os.kill(os.getpid(), number)
        assert ended == [signal.SIGINT]  # the SIGTERM of Slurm's time limit lets the run save
        err = capfd.readouterr().err
        assert err.count("SIGINT: ") == err.count("\n") == (rank == 0)
        T.handle_stop_signals(signal.SIG_DFL)
        assert [signal.getsignal(number) for number in numbers] == [signal.SIG_DFL] * 2
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def test_memory_that_tensors_give_back_is_used_again():
    """Without keep_memory each of these tensors gets 4,096 new pages from the system."""
    code = """if True:
        import resource, torch, train_gpt
        train_gpt.keep_memory()
        torch.ones(1 << 22)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(100):
            torch.ones(1 << 22)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
        """
    pages = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT)
    assert int(pages) < 20 * 4096


@pytest.mark.parametrize("has_units", [True, False])
def test_activations_are_bfloat16_where_the_processor_multiplies_it(monkeypatch, has_units):
    """A V100 emulates it, slowly."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_units)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_units)
    for device in map(torch.device, ("cpu", "cuda")):
        fast = torch.bfloat16 if has_units else torch.float32
        assert T.activation_dtype("auto", device) == fast
        for name in ("float32", "bfloat16"):
            assert T.activation_dtype(name, device) == getattr(torch, name)
    # Post-training leaves it to the network, which takes bfloat16 on any GPU.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("auto", "bfloat16"):
        network = G.set_dtype(SimpleNamespace(dtype=None), G.Settings(dtype=name))
        automatic = None if has_units else torch.float32
        assert network.dtype == (automatic if name == "auto" else torch.bfloat16)
