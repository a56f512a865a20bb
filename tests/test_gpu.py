"""tools/gpu.py: what starts the parts, with stand-ins; the parts themselves, as toys on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import load_tool

import train_gpt as T

ROOT = Path(__file__).resolve().parents[1]


bench, gpu = load_tool("bench"), load_tool("gpu")

# A stand-in for a part's process, by its name.
STAND_IN = """
import json, subprocess, sys, time
name, device, folder, data = sys.argv[1:]
if name == "bad":
    raise ValueError("no such kernel\\nmore of it")
if name == "hang":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    open(folder + "/pid", "w").write(str(child.pid))
    time.sleep(60)
json.dump({"records": [{"what": device, "x": 1.5}], "seconds": 2.0, "data": data}, open(f"{folder}/{name}.json", "w"))
"""


# ------------------------------------------------------------------------------------------------------------ processes
def is_running(pid):
    """Whether a process is there and is no zombie."""
    state = subprocess.run(
        ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True
    ).stdout.strip()
    return bool(state) and not state.startswith("Z")


def test_a_part_ends_fails_or_is_ended(tmp_path, monkeypatch):
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    monkeypatch.setattr(gpu, "__file__", str(tmp_path / "stand_in.py"))
    found = gpu.start_part("good", "cpu", tmp_path, "d", 30)
    assert found == {"records": [{"what": "cpu", "x": 1.5}], "seconds": 2.0, "data": "d"}
    failed = {"failed": f"ValueError: no such kernel ({tmp_path}/bad.log)"}
    assert gpu.start_part("bad", "cpu", tmp_path, "", 30) == failed
    assert gpu.start_part("hang", "cpu", tmp_path, "", 1.0) == {
        "failed": "killed after 1 s, the time that was left for it"
    }
    assert not is_running(int((tmp_path / "pid").read_text()))  # what it had started has ended too


@pytest.fixture
def suite_of(tmp_path, monkeypatch, capsys):
    """Calls the suite with parts that take the seconds given, or fail: (exit code, out, err, JSON, limits by part)."""

    def call(words, parts):
        now, limits = [0.0], {}

        def start(name, device, folder, data, limit):
            limits[name] = limit
            if parts[name] == "stop":
                raise KeyboardInterrupt
            if isinstance(parts[name], str):
                return {"failed": parts[name]}
            now[0] += parts[name]
            record = {"what": name, "way": "w", "ms": 2.5, "count": 1000, "none": None}
            return {
                "records": [record],
                "seconds": parts[name],
                "hardware": "a toy",
                "versions": {"torch": "2"},
            }

        clock = SimpleNamespace(
            monotonic=lambda: now[0], strftime=lambda text: f"run{len(list(tmp_path.iterdir()))}"
        )
        monkeypatch.setattr(gpu, "time", clock)
        monkeypatch.setattr(gpu, "start_part", start)
        monkeypatch.setattr(gpu, "PARTS", {name: gpu.Part(None, 100, 10) for name in parts})
        monkeypatch.setattr(gpu.signal, "signal", lambda *_: None)
        words = [
            "gpu",
            "--device",
            "cpu",
            "--runs",
            str(tmp_path),
            "--out",
            str(tmp_path / "o.json"),
            *words.split(),
        ]
        monkeypatch.setattr(sys, "argv", ["bench.py", *words])
        with pytest.raises(SystemExit) as ended:
            bench.main()
        said, file = capsys.readouterr(), tmp_path / "o.json"
        return (
            ended.value.code,
            said.out,
            said.err,
            json.loads(file.read_text()) if file.is_file() else {},
            limits,
        )

    return call


def test_parts_that_do_not_fit_are_left_out_and_named(suite_of):
    """40 s: a leaves 28, of which b may take 1.5 times its 10; that leaves 8 for c, which asks for 10."""
    code, out, err, saved, limits = suite_of("--seconds 40", {"a": 12.0, "b": 20.0, "c": 1.0})
    assert limits == {"a": 15.0, "b": 15.0} and (code, err) == (0, "")
    assert saved["left_out"] == ["c"] and list(saved["parts"]) == ["a", "b"]
    assert saved["versions"] == {"torch": "2"} and "a run on a toy" in out
    assert "a: 12 s\nb: 20 s\n" in out and "| a | a, w | ms 2.5, count 1,000 |" in out
    assert "32 s of 40; left out: c. A rehearsal at toy size." in out
    assert suite_of("--seconds 22", {"a": 9.0, "b": 1.0})[4] == {
        "a": 15.0,
        "b": 13.0,
    }  # never longer than what is left


def test_a_failure_and_an_interrupt_leave_the_rest(suite_of):
    code, out, err, saved, _ = suite_of("", {"a": "Error: x", "b": 3.0, "c": "stop", "d": 1.0})
    assert code == 1 and err == "failed: a: Error: x\nfailed: interrupted: in the part c\n"
    assert saved["parts"]["b"]["seconds"] == 3.0 and saved["left_out"] == ["c", "d"]
    assert "| a | failed: Error: x |  |" in out and "| b | b, w | ms 2.5, count 1,000 |" in out


def test_parts_are_chosen_by_name(suite_of):
    assert list(suite_of("--only c a", {"a": 1.0, "b": 1.0, "c": 1.0})[3]["parts"]) == ["a", "c"]
    assert suite_of("--only x", {"a": 1.0})[0] == "error: --only x: there are a"
    if not torch.cuda.is_available():
        assert suite_of("--device cuda", {"a": 1.0})[0].startswith(
            "error: --device cuda: PyTorch sees no CUDA device"
        )


def test_the_parts_ask_for_less_than_the_time_there_is():
    assert sum(part.gpu_seconds for part in gpu.PARTS.values()) < 540


# ----------------------------------------------------------------------------------------------------------- the parts
@pytest.fixture
def suite(tmp_path, monkeypatch, one_thread):
    monkeypatch.setattr(bench, "matmul_peak", lambda device, dtype=None: 2e11)
    runtime = T.Runtime(0, 1, torch.device("cpu"), False)
    return gpu.Suite(T, runtime, "cpu", tmp_path, "")


def test_steps_add_up(suite):
    for record, name in zip(gpu.eager_part(suite), gpu.SHAPES, strict=True):
        assert record["what"] == f"{name}, eager" and record["batch"] == 256
        milliseconds = sum(record[key] for key in ("forward ms", "backward ms", "optimizer ms"))
        assert 256e3 / milliseconds == pytest.approx(record["tokens/s"], rel=0.5)  # of medians
        _, network = gpu.make_network(suite, name, T)
        flops = bench.flops_per_token(network, 64).total()
        assert record["MFU %"] == pytest.approx(100 * record["tokens/s"] * flops / 2e11)
    machine, copy = gpu.machine_part(suite)
    assert machine["float32 TFLOP/s"] == 0.2 and 0.1 < copy["GB/s"] < 5000


def test_generated_log_probabilities_are_those_of_the_whole_text(suite):
    records = gpu.logits_part(suite)
    assert [record["what"].split(",")[0] for record in records] == list(gpu.SHAPES)
    assert all(0 < record["largest"] < 1e-5 for record in records)


def test_generation_and_precision(suite):
    records = gpu.generation_part(suite)
    assert [record["what"] for record in records] == [
        f"{name}, {rows} rows" for name in gpu.SHAPES for rows in (1, 4)
    ]
    assert all(record["tokens/s"] > 0 for record in records)
    records = gpu.precision_part(suite)
    assert len(records) == 12
    for trained, wide, _, compared in (records[at : at + 4] for at in (0, 4, 8)):
        assert 0 < trained["largest"] == wide["largest"] < 1e-3  # on a CPU both are float32
        assert abs(trained["of means"]) < 1e-4 and compared["difference"] == 0


@pytest.mark.full
def test_a_whole_rehearsal(tmp_path):
    words = [
        "gpu",
        "--device",
        "cpu",
        "--seconds",
        "200",
        "--only",
        "machine",
        "logits",
        "train",
        "rans",
    ]
    done = subprocess.run(
        [
            sys.executable,
            ROOT / "tools" / "bench.py",
            *words,
            "--runs",
            tmp_path,
            "--out",
            tmp_path / "o.json",
        ],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    saved = json.loads((tmp_path / "o.json").read_text())
    assert saved["left_out"] == [] and list(saved["parts"]) == [
        "machine",
        "logits",
        "train",
        "rans",
    ]
    (run,) = saved["parts"]["train"]["records"]
    assert 2 < run["val_bpb"] < 6 and abs(run["val_bpb"] - run["val_bpb before quantization"]) < 0.1
    assert run["steps"] * 256 == run["tokens"] and 20_000 < run["artifact_bytes"] < 60_000
    rans = saved["parts"]["rans"]["records"][0]
    assert (
        rans["shape"].endswith("model.upar") and rans["bytes"] > 1000
    )  # codes of the run before it
