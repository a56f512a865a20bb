"""tools/gpu.py: what starts the parts, with stand-ins; the parts themselves, as toys on the CPU."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import train_gpt as T
from conftest import ROOT, environment, load_tool, read_json

bench, gpu = load_tool("bench"), load_tool("gpu")

# A stand-in for a part's process, by its name.
STAND_IN = """
import json, subprocess, sys, time
name, device, folder, data = sys.argv[1:]
if name == "bad":
    raise ValueError("no such kernel\\nmore of it")
if name == "hang":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open(folder + "/pid", "w").write(str(child.pid))
    time.sleep(600)
json.dump({"records": [{"what": device}], "data": data}, open(f"{folder}/{name}.json", "w"))
"""


def test_a_part_ends_fails_or_is_ended(tmp_path, monkeypatch):
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    monkeypatch.setattr(gpu, "__file__", str(tmp_path / "stand_in.py"))
    found = gpu.start_part("good", "cpu", tmp_path, "d", 60)
    assert found == {"records": [{"what": "cpu"}], "data": "d"}
    failed = gpu.start_part("bad", "cpu", tmp_path, "", 60)["failed"]
    assert failed == f"ValueError: no such kernel ({tmp_path}/bad.log)"
    ended = gpu.start_part("hang", "cpu", tmp_path, "", 1.5)["failed"]
    assert ended.startswith("killed after ")
    pid = (tmp_path / "pid").read_text()  # what it had started has ended too, or is a zombie
    state = subprocess.run(["ps", "-o", "stat=", "-p", pid], capture_output=True, text=True).stdout
    assert state.strip()[:1] in ("", "Z")


def test_parts_that_do_not_fit_are_left_out_and_named(tmp_path, monkeypatch, capsys):
    """Of 40 s, a leaves 28, of which b may take 15; that leaves 8 for c, which asks for 10."""
    seconds = {"a": 12.0, "b": 20.0, "c": 1.0}
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now, strftime=lambda text: "run")
    limits = {}

    def start(name, device, folder, data, limit):
        limits[name] = limit
        clock.now += seconds[name]
        record = {"what": name, "way": "w", "ms": 2.5, "count": 1000, "none": None}
        about = {"hardware": "a toy", "versions": {"torch": "2"}}
        return {"records": [record], "seconds": seconds[name], **about}

    monkeypatch.setattr(gpu, "time", clock)
    monkeypatch.setattr(gpu, "start_part", start)
    monkeypatch.setattr(gpu, "PARTS", {name: gpu.Part(None, 100, 10) for name in seconds})
    monkeypatch.setattr(gpu.signal, "signal", lambda *_: None)
    words = f"gpu --device cpu --seconds 40 --runs {tmp_path} --out {tmp_path / 'o.json'}"
    monkeypatch.setattr(sys, "argv", ["bench.py", *words.split()])
    with pytest.raises(SystemExit) as ended:
        bench.main()
    out, err = capsys.readouterr()
    assert (ended.value.code, err) == (0, "") and limits == {"a": 15.0, "b": 15.0}
    saved = read_json(tmp_path / "o.json")
    assert saved["left_out"] == ["c"] and list(saved["parts"]) == ["a", "b"]
    assert "a: 12 s\nb: 20 s\n" in out and "| a | a, w | ms 2.5, count 1,000 |" in out
    assert "32 s of 40; left out: c. A rehearsal at toy size." in out


# ---------------------------------------------------------------------------------------- the parts
@pytest.fixture
def suite(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "matmul_peak", lambda device, dtype=None: 2e11)
    runtime = T.Runtime(0, 1, torch.device("cpu"), False)
    return gpu.Suite(T, runtime, "cpu", tmp_path, "")


@pytest.mark.full
def test_share_of_the_peak(suite):
    for record, name in zip(gpu.eager_part(suite), gpu.SHAPES, strict=True):
        assert record["what"] == f"{name}, eager" and record["batch"] == 256
        _, network = gpu.make_network(suite, name, T)
        flops = bench.flops_per_token(network, 64).total()
        assert record["MFU %"] == pytest.approx(100 * record["tokens/s"] * flops / 2e11)


def test_generated_log_probabilities_are_those_of_the_whole_text(suite):
    records = gpu.logits_part(suite)
    assert [record["what"].split(",")[0] for record in records] == list(gpu.SHAPES)
    assert all(0 < record["largest"] < 1e-5 for record in records)


@pytest.mark.full
def test_generation_and_precision(suite):
    assert all(record["tokens/s"] > 0 for record in gpu.generation_part(suite))
    records = gpu.precision_part(suite)
    assert len(records) == 12
    for trained, wide, _, compared in (records[i : i + 4] for i in (0, 4, 8)):
        # On a CPU both are float32. GDN's first outputs may be near zero, and their norm then
        # enlarges the rounding errors of a token or two.
        assert 0 < trained["largest"] == wide["largest"] < 1e-2
        assert abs(trained["of means"]) < 1e-4 and compared["difference"] == 0


@pytest.mark.full
def test_a_whole_rehearsal(tmp_path):
    words = f"gpu --device cpu --seconds 200 --only machine logits train rans --runs {tmp_path}"
    command = [sys.executable, ROOT / "tools" / "bench.py", *words.split()]
    command += ["--out", tmp_path / "o.json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(DEVICE=None))
    assert (done.returncode, done.stderr) == (0, "")
    saved = read_json(tmp_path / "o.json")
    assert list(saved["parts"]) == ["machine", "logits", "train", "rans"] and not saved["left_out"]
    (run,) = saved["parts"]["train"]["records"]
    assert 2 < run["val_bpb"] < 6 and run["steps"] * 256 == run["tokens"]
    assert abs(run["val_bpb"] - run["val_bpb before quantization"]) < 0.1
    rans = saved["parts"]["rans"]["records"][0]
    assert rans["shape"].endswith("model.upar")  # codes of the run before it
