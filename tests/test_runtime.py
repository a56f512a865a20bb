"""Section runtime: which device a run takes, and what it says where it cannot."""

import os
import re
import socket
import stat
import subprocess
import sys

import pytest
import torch

import train_gpt as T
from conftest import ROOT, refusal


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
    with pytest.raises(
        T.UserError, match="^DEVICE='auto': PyTorch sees no GPU of this machine; .*DEVICE=cpu$"
    ):
        T.start_runtime("auto")
    assert T.start_runtime("cpu").device == torch.device("cpu")


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_gpus_that_the_user_hides_are_left_alone(listed_gpu, monkeypatch, hidden):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert T.start_runtime("auto") == T.Runtime(0, 1, torch.device("cpu"), False)


def test_cuda_without_a_device_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        T.UserError, match="^DEVICE='cuda': PyTorch sees no GPU of this machine; .*DEVICE=cpu$"
    ):
        T.start_runtime("cuda")


def test_a_visible_gpu_is_taken_unless_the_cpu_is_asked_for(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert T.start_runtime("cpu").device == torch.device("cpu") and chosen == []
    assert (
        T.start_runtime("auto").device == T.start_runtime("cuda").device == torch.device("cuda", 1)
    )
    assert chosen == [torch.device("cuda", 1)] * 2
    monkeypatch.setenv("LOCAL_RANK", "2")
    refusal(
        T.UserError, "^LOCAL_RANK=2: PyTorch sees 2 GPUs; must be below", T.start_runtime, "cuda"
    )


def test_on_cuda_attention_is_not_left_to_cudnn(monkeypatch):
    """It takes up to a second to plan for each shape, and its gradients may be NaN."""
    switches = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", switches.append)
    monkeypatch.delenv("RANK", raising=False)
    T.start_runtime("cpu")
    assert switches == []
    T.start_runtime("cuda")
    assert switches == [False]


HINT = "torchrun sets all of them; unset RANK and WORLD_SIZE for a single process$"
GROUP = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29599",
}
MUST = "must have a RANK below WORLD_SIZE, and a port"
LEFT_OVER = [
    ({"RANK": "0"}, f"^RANK='0': the ranks do not meet: {MUST}; {HINT}"),
    ({"WORLD_SIZE": "8"}, f"^WORLD_SIZE='8': the ranks do not meet: {MUST}; {HINT}"),
    ({"RANK": "0", "WORLD_SIZE": "1"}, f".* variable MASTER_ADDR expected, but not set; {HINT}"),
    ({"LOCAL_RANK": "x"}, "^LOCAL_RANK='x': must be a whole number from 0, or unset$"),
    ({**GROUP, "RANK": "x"}, f"^RANK='x' .*'x'; {HINT}"),
    ({**GROUP, "RANK": ""}, f"^RANK='' .*''; {HINT}"),
    ({**GROUP, "WORLD_SIZE": "-1"}, MUST),
    ({**GROUP, "WORLD_SIZE": "9" * 30}, MUST),
    ({**GROUP, "WORLD_SIZE": "0"}, f"{MUST}; {HINT}"),
    ({**GROUP, "RANK": "3"}, MUST),
    ({**GROUP, "RANK": "-1"}, MUST),
    ({**GROUP, "MASTER_PORT": "99999"}, f"port must have value .*{HINT}"),
    ({**GROUP, "MASTER_PORT": "0"}, MUST),
    ({**GROUP, "MASTER_PORT": "x"}, HINT),
]


@pytest.mark.parametrize(("left", "message"), LEFT_OVER)
def test_variables_left_over_from_torchrun_are_one_line(monkeypatch, capsys, left, message):
    for name in T.RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in left.items():
        monkeypatch.setenv(name, value)
    refusal(T.UserError, message, T.start_runtime, "cpu")
    monkeypatch.setattr(T.time, "sleep", lambda seconds: None)  # other ranks wait for rank 0
    assert T.exit_code(lambda: T.start_runtime("cpu") and 0) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_a_port_in_use_is_one_line(monkeypatch, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for name, value in {**GROUP, "WORLD_SIZE": "2", "MASTER_PORT": str(port)}.items():
            monkeypatch.setenv(name, value)
        message = f" MASTER_ADDR='127.0.0.1' MASTER_PORT='{port}': the ranks do not meet: "
        refusal(T.UserError, message, T.start_runtime, "cpu")
    # Whoever left the variables behind sees for what the process would have waited.
    assert (
        f"WORLD_SIZE='2' LOCAL_RANK='0' MASTER_ADDR='127.0.0.1' MASTER_PORT='{port}': waiting"
        in (capsys.readouterr().err)
    )


def test_the_machine_is_described(monkeypatch, tmp_path):
    def git(*words):
        subprocess.run(
            ["git", "-c", "user.name=x", "-c", "user.email=x@x", *words], cwd=tmp_path, check=True
        )

    def describe():
        return T.describe_machine(T.Runtime(0, 2, torch.device("cpu"), False))

    monkeypatch.setattr(T, "__file__", str(tmp_path / "script.py"))
    assert describe()["commit"] == "unknown"
    (tmp_path / "script.py").write_text("one")
    for words in (
        ["init", "-q"],
        ["add", "."],
        ["commit", "-qm", "one"],
        ["tag", "-am", "a tag", "v1"],
    ):
        git(*words)
    about = describe()
    assert re.fullmatch("[0-9a-f]{40}", about["commit"])
    (tmp_path / "script.py").write_text("two")
    assert describe()["commit"] == about["commit"] + "+"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert describe()["commit"] == "unknown"
    assert about["hardware"] == f"2 x {os.uname().machine} CPU, {torch.get_num_threads()} threads"
    assert (
        about["versions"]["torch"] == torch.__version__ and 50 < about["peak_memory_mib"] < 50_000
    )


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
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert int(done.stdout) < 20 * 4096


@pytest.mark.parametrize("has_units", [True, False])
def test_activations_are_bfloat16_where_the_processor_multiplies_it(monkeypatch, has_units):
    """A V100 emulates it, slowly."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_units)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_units)
    cpu = torch.device("cpu")
    fast = torch.bfloat16 if has_units else torch.float32
    assert T.activation_dtype("auto", cpu) == fast
    assert T.activation_dtype("auto", torch.device("cuda")) == fast
    assert T.activation_dtype("float32", cpu) == torch.float32
    assert T.activation_dtype("bfloat16", cpu) == torch.bfloat16
