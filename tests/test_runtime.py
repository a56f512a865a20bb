"""Section runtime: which device a run takes, and what it says where it cannot."""

import os
import stat

import pytest
import torch

import train_gpt as T


@pytest.fixture
def listed_gpu(tmp_path, monkeypatch):
    """An nvidia-smi that lists a GPU, which a CPU build of PyTorch does not see."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H100 (UUID: GPU-1)'\n")
    tool.chmod(tool.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_gpus_that_pytorch_does_not_see_are_an_error(listed_gpu):
    with pytest.raises(T.UserError, match="^DEVICE='auto': nvidia-smi lists GPUs but PyTorch sees none; .*DEVICE=cpu$"):
        T.start_runtime("auto")
    assert T.start_runtime("cpu").device == torch.device("cpu")


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_gpus_that_the_user_hides_are_left_alone(listed_gpu, monkeypatch, hidden):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert T.start_runtime("auto") == T.Runtime(0, 1, torch.device("cpu"), False)


def test_cuda_without_a_device_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(T.UserError, match="^DEVICE='cuda': PyTorch sees no CUDA device; DEVICE=cpu runs without one$"):
        T.start_runtime("cuda")


def test_a_stop_signal_is_remembered_until_it_is_restored():
    import signal

    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    try:
        stop_signal = T.StopSignal()
        assert stop_signal.number == 0
        os.kill(os.getpid(), signal.SIGINT)
        assert stop_signal.number == signal.SIGINT
        T.handle_stop_signals(signal.SIG_DFL)
        assert signal.getsignal(signal.SIGTERM) == signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGINT, before[1])
