"""tools/bench.py, tools/arms.py: figures by closed forms, runs with a stand-in for train_gpt.py, tables and files."""

import json
import math
import os
import re
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import load_tool

import train_gpt as T

ROOT = Path(__file__).resolve().parents[1]


bench, arms = load_tool("bench"), load_tool("arms")


# -------------------------------------------------------------------------------------------------------------- ops
@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """The seconds that bench's perf_counter tells, in a list of one."""
    now = [100.0]
    monkeypatch.setattr(bench, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


def test_ways_run_in_turn_for_as_many_calls_as_fill_a_stretch(clock):
    called = []

    def way(name: str, seconds: float):
        def run() -> None:
            called.append(name)
            clock[0] += seconds
        return run

    times = bench.in_turn({"a": way("a", 0.004), "b": way("b", 0.02)}, 2, False)
    assert "".join(called) == "ab" + "aaab" * 2  # 3 x 4 ms are the first to fill 10 ms
    assert times == {"a": pytest.approx([0.004] * 2), "b": pytest.approx([0.02] * 2)}


def test_records_tell_medians_ratio_and_difference(clock):
    seconds = {"mine": iter([0, 0.02, 0.02, 0.01, 0.03]), "other": iter([0, 0.05, 0.04, 0.06, 0.08])}

    def way(name: str, last: float):
        def run() -> list[torch.Tensor]:
            clock[0] += next(seconds[name])
            return [torch.tensor([2.0, last]), torch.empty(0)]
        return run

    mine, other = bench.compare("sum", "B1", {"mine": way("mine", -4.0), "other": way("other", -3.0)}, 3, False)
    assert mine == {"operation": "sum", "shape": "B1", "way": "mine", "ms": pytest.approx(20), "times ours": 1.0,
                    "least": pytest.approx(10), "most": pytest.approx(30), "difference": None}
    assert (other["ms"], other["times ours"], other["difference"]) == (pytest.approx(60), pytest.approx(3.0), 0.25)


def test_what_is_missing_is_said_with_how_to_install_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "brotli", None)
    assert bench.load_library("brotli") is None
    assert capsys.readouterr().out == "brotli is missing and not measured: pip install brotli==1.2.1\n"
    monkeypatch.setitem(sys.modules, "constriction", SimpleNamespace(__version__="0.4.0"))
    assert bench.load_library("constriction").__version__ == "0.4.0"
    assert capsys.readouterr().out == "note: constriction is 0.4.0; the project's figures name 0.5.0\n"
    names = [line.split("==")[0] for line in bench.LIBRARIES.values()]
    required = (ROOT / "requirements-test.txt").read_text()
    assert all(line.split(";")[0] in required for line in bench.LIBRARIES.values() if "==" in line) and len(names) == 4


def op_records(only: str, **changes: object) -> list[dict]:
    ops = {"shapes": [(1, 40, 2, 8)], "chunk": 32, "rounds": 1, "codes": 20000, "artifact": "",
           "models": {"tiny": {"MODEL_DIM": "32", "NUM_HEADS": "2", "NUM_KV_HEADS": "1", "LAYER_PATTERN": "g a"}}}
    return list(bench.op_records(SimpleNamespace(script=T, only=[only], **{**ops, **changes}), "cpu"))


def test_gdn_equals_the_rules_of_transformers(one_thread):
    pytest.importorskip("transformers", reason="transformers is not installed")
    records = op_records("gdn")
    assert [(each["operation"], each["way"].split()[0]) for each in records] == [
        (what, way) for what in ("GDN, forward", "GDN, forward+backward", "GDN, a token")
        for way in ("gdn_step" if "token" in what else "gdn_chunk(32)", "transformers")]
    assert [each["shape"] for each in records[::2]] == ["B1 T40 H2 D8", "B1 T40 H2 D8", "B32 H2 D8"]
    assert all(0 < each["difference"] < 1e-5 and each["ms"] > 0 for each in records[1::2])


def test_attention_equals_that_of_torch(one_thread):
    records = op_records("attention")
    assert [each["operation"] for each in records[::2]] == [
        f"attention, window {window}, {how}" for window in (10, 40) for how in ("forward", "forward+backward")]
    assert all(each["difference"] < 1e-5 for each in records[1::2])


def test_muon_makes_the_step_of_torch(one_thread):
    """From zero weights; torch's products are bfloat16, of 8 bits. Matrices: GDN 4 + 1, attention 3 + 1, MLPs 4."""
    mine, other = op_records("muon")
    assert mine["shape"] == "tiny, 13 matrices" and 1e-4 < other["difference"] < 0.1


def test_coders_give_the_codes_back_in_the_bytes_that_they_need(one_thread):
    records = op_records("rans")
    torch.manual_seed(0)
    codes = T.quantize(torch.randn(1, 20000), 6, 8.0)[0].numpy()
    counts = np.unique(codes, return_counts=True)[1]
    entropy = -(counts * np.log2(counts / 20000)).sum() / 8
    sizes = {each["way"]: each["bytes"] for each in records}
    assert [each["operation"] for each in records] == ["write"] * len(sizes) + ["read"] * len(sizes)
    assert entropy + 512 <= sizes["rANS"] < 1.001 * entropy + 512 + 8 * 8  # its table, and lanes that end somewhere
    assert all(entropy < size < 1.2 * entropy for size in sizes.values())
    assert all(each["difference"] == 0 for each in records if each["operation"] == "read" and each["way"] != "rANS")


def test_a_coder_that_reads_something_else_is_an_error(monkeypatch):
    monkeypatch.setattr(bench, "coders", lambda script, codes: {
        "rANS": (lambda: [codes.tobytes()], lambda data: data[:-1] + b"\x07")})
    with pytest.raises(SystemExit, match="error: rANS: codes are read back otherwise than they were written"):
        op_records("rans")


def test_rans_takes_the_six_bit_codes_of_an_artifact(tmp_path, monkeypatch, one_thread):
    coded = {"w_a": T.Coded(*T.quantize(torch.randn(32, 32), 6, 8.0), 6),
             "embed": T.Coded(*T.quantize(torch.randn(32, 32), 8, 6.0), 8)}
    packed, _ = T.pack_artifact({name: torch.zeros(32, 32) for name in coded}, coded)
    (tmp_path / "a.upar").write_bytes(packed)
    seen = []
    monkeypatch.setattr(bench, "coders", lambda script, codes: seen.append(codes) or {
        "rANS": (lambda: [codes.tobytes()], lambda data: data)})
    records = op_records("rans", artifact=str(tmp_path / "a.upar"))
    assert records[0]["shape"] == f"1,024 int6 codes of {tmp_path}/a.upar" and records[0]["bytes"] == 1024
    assert np.array_equal(seen[0], coded["w_a"].codes.numpy().reshape(-1))
    with pytest.raises(SystemExit, match="error: --artifact: .*No such file or directory: 'no.upar'"):
        op_records("rans", artifact="no.upar")


def test_cells():
    assert [bench.cell(value) for value in (0.012344, 12.0, 1234.5, -9876.0, 12345, None, "a", 0)] == [
        "0.01234", "12", "1,234", "-9,876", "12,345", "", "a", "0"]


def test_ops_writes_table_and_json(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "op_records", lambda ops, device: iter([
        {"operation": "a", "ms": 2.0, "difference": None}, {"operation": "b", "ms": 4.5, "bytes": 1000}]))
    monkeypatch.setattr(sys, "argv", ["bench.py", "ops", "--only", "muon", "--out", str(tmp_path / "o.json")])
    with pytest.raises(SystemExit) as ended:
        bench.main()
    out = capsys.readouterr().out
    assert ended.value.code == 0 and "operation a, ms 2\noperation b, ms 4.5, bytes 1,000\n| operation | ms |" in out
    assert "| a | 2 |  |  |\n| b | 4.5 |  | 1,000 |\n" in out
    saved = json.loads((tmp_path / "o.json").read_text())
    assert saved["records"][1] == {"operation": "b", "ms": 4.5, "bytes": 1000} and "torch" in saved["versions"]


# ---------------------------------------------------------------------------------------------------------- figures
def log_of(times: list[int], first_step: int = 1) -> str:
    lines = [f"step:{at}/? train_loss:3.0 lr_mul:1 progress:0.1 train_time:{ms}ms step_avg:1ms tok_s:1"
             for at, ms in enumerate(times, first_step)]
    return "source\n" + "\n".join(lines) + "\nfrom the artifact: val_loss:1\n"


@pytest.mark.parametrize(("times", "expected"), [
    ([300 * at for at in range(1, 9)], 300.0),  # a stretch is a step
    ([90 * at + (1000 if at > 15 else 0) for at in range(1, 31)], 90.0),  # three steps a stretch; a pause is outvoted
    ([int(12.5 * at) for at in range(1, 200)], 12.5),  # finer than the log's whole milliseconds
    ([10, 30, 50], 20.0),  # shorter than a stretch: all of it
])
def test_step_time_is_the_median(times, expected):
    assert bench.step_ms(log_of(times)) == pytest.approx(expected, rel=0.01)


def test_each_step_counts_where_few_are_logged():
    """Four slow steps at the start have a line each, the 150 steps after them two lines: the median is of the many."""
    text = "".join(f"step:{step}/? train_loss:3.0 train_time:{ms}ms\n" for step, ms in (
        (1, 900), (2, 1800), (3, 2700), (4, 3600), (5, 4500), (80, 12000), (155, 19500)))
    assert bench.step_ms(text) == 100.0


def test_too_few_steps_have_no_time():
    assert math.isnan(bench.step_ms(log_of([10, 20])))


def network_of(**changes: object) -> T.GPT:
    shape = {"model_dim": 32, "num_heads": 2, "num_kv_heads": 1, "train_seq_len": 64, "attn_window": 16, **changes}
    torch.manual_seed(0)
    return T.GPT(T.model_config(T.Settings(**shape), 48, 1))


def test_flops_of_attention_by_hand():
    """2 layers of dim 32: qkv 32 x (32 + 16 + 16), out 32 x 32, MLP 2 x 96 x 32; head 48 x 32; keys 32.5 and 14.125."""
    weights = 2 * (32 * 64 + 32 * 32 + 2 * 96 * 32) + 48 * 32
    full, sliding = 65 / 2, (16 * 17 / 2 + 48 * 16) / 64
    expected = 6 * weights + 12 * 32 * (full + sliding)
    assert bench.flops_per_token(network_of(layer_pattern="a s", mlp_mult=3.0), 64).total() == pytest.approx(expected)


@pytest.mark.parametrize("changes", [
    {"layer_pattern": "g g s1 s1"}, {"layer_pattern": "A1 A2 A1 A2"}, {"layer_pattern": "g a", "mlp": "swiglu"},
    {"layer_pattern": "a", "mlp": "bio_hard", "tie_embeddings": False},
    {"layer_pattern": "g g", "bigram_vocab_size": 64, "positions": "learned"},
], ids=str)
def test_flops_of_weights_are_those_that_torch_counts(changes):
    """6 for each weight of a product that a token meets, shared ones at each use, beside attention and GDN terms."""
    network = network_of(**changes)

    def weights(module: torch.nn.Module) -> int:
        named = module.named_parameters()
        return sum(param.numel() for name, param in named if name.split(".")[-1].startswith(("w_", "ab")))

    own = (param.numel() for name, param in network.named_parameters(recurse=False) if name.startswith("w_"))
    used = network.embed.numel() + sum(own) + sum(weights(network.blocks[at]) for at in network.block_of_layer)
    used += sum(weights(network.mixers[at]) for at in network.mixer_of_layer)
    state = 0.0
    for word in network.config.layers.lower().split():
        keys = 65 / 2 if word[0] == "a" else (16 * 17 / 2 + 48 * 16) / 64
        state += 12 * 32 * keys if word[0] in "as" else 18 * 2 * 16**2
    assert bench.flops_per_token(network, 64).total() - state == pytest.approx(6 * used, rel=1e-12)


def test_the_peak_is_of_a_product(monkeypatch):
    ticks = iter(range(100))
    monkeypatch.setattr(time, "perf_counter", lambda: 0.25 * next(ticks))
    assert bench.matmul_peak("cpu") == 2 * 1024**3 / 0.25


def student_tail(t: float, freedom: int) -> float:
    """P(T <= t) by Simpson's rule over the density from 0 to t."""
    scale = math.gamma((freedom + 1) / 2) / math.gamma(freedom / 2) / math.sqrt(freedom * math.pi)
    count = 2000
    heights = [scale * (1 + (t * at / count) ** 2 / freedom) ** (-(freedom + 1) / 2) for at in range(count + 1)]
    inner = 4 * sum(heights[1:-1:2]) + 2 * sum(heights[2:-1:2])
    return 0.5 + (heights[0] + inner + heights[-1]) * t / count / 3


def test_quantiles_of_student():
    assert [student_tail(t, freedom) for freedom, t in enumerate(arms.T_QUANTILES, 1)] == pytest.approx(
        [0.975] * 10, abs=3e-6)


def test_interval():
    assert arms.interval([1.0, 3.0]) == pytest.approx((2.0, 12.7062))
    assert arms.interval([1.0, 2.0, 3.0]) == pytest.approx((2.0, 4.3027 / 3**0.5))
    assert arms.interval([2.5]) == (2.5, math.inf)
    many = [float(at % 2) for at in range(20)]
    assert arms.interval(many)[1] == pytest.approx(2.2281 * statistics.stdev(many) / 20**0.5)


def arm_runs(*scores: float | str) -> dict[int, dict]:
    return {seed: {"failed": score} if isinstance(score, str) else
            {"val_bpb": score, "tokens": 1000 * seed, "steps": 10, "parameters": 7, "tokens_per_second": 4e3,
             "peak_memory_mib": 511.6} for seed, score in enumerate(scores, 1)}


def test_an_arm_is_compared_seed_by_seed():
    first = arm_runs(2.0, 2.2, 2.4)
    own = arms.summarize(first, first)
    assert own == {"tokens": 2000, "steps": 10, "parameters": 7, "tokens_per_second": 4000, "peak_memory_mib": 512,
                   "val_bpb": pytest.approx(2.2), "half_width": pytest.approx(4.3027 * 0.2 / 3**0.5)}
    better = arms.summarize(arm_runs(1.9, 2.11, 2.29), first)  # the seeds differ more than the arms
    assert better["difference"] == pytest.approx(-0.1)
    assert better["difference_half_width"] == pytest.approx(4.3027 * 0.01 / 3**0.5)
    assert better["verdict"] == "wins" and better["share"] == pytest.approx(-0.1 / 2.2)
    assert arms.summarize(arm_runs(2.1, 2.31, 2.49), first)["verdict"] == "loses"
    assert arms.summarize(arm_runs(2.1, 2.1, 2.4), first)["verdict"] == "tie"
    part = arms.summarize(arm_runs(1.9, "killed", 2.29), first)
    assert (part["val_bpb"], part["difference"]) == (pytest.approx(2.095), pytest.approx(-0.105))
    assert arms.summarize(arm_runs("x", "y", "z"), first) == {}
    speed = ["7", "2,000", "10", "4,000", "25.0%", "512"]
    assert arms.arm_row("b", {**better, "mfu": 0.25}) == [
        "b", *speed, "2.1000 ± 0.4849", "-0.1000 ± 0.0248 (-4.5%)", "wins"]
    assert arms.arm_row("a", {**own, "mfu": 0.25}) == ["a", *speed, "2.2000 ± 0.4968", "", ""]
    assert arms.arm_row("c", {}) == ["c", *[""] * 8, "failed"]


def test_compare_tells_the_medians_and_every_repeat():
    assert arms.compare([100, 110], [120, 121], "slower", "faster") == "14.8% faster (+20.0, +10.0)"
    assert arms.compare([200], [50], "less", "more") == "75.0% less (-75.0)"


def option_run(speed: float, memory: float, **more: float) -> dict:
    return {"tokens_per_second": speed, "step_ms": 1e5 / speed, "peak_memory_mib": memory, **more}


def test_option_rows():
    a = "kept", [option_run(1000, 900), option_run(1000, 1000)]
    b = "again", [option_run(500, 600), option_run(800, 700)]
    row = arms.option_row(a, b, "memory", "40-60% less", 400)
    assert row == ["kept → again", "1,000 → 650 (×0.65)", "100 → 162 (×1.62)", "950 → 650 (×0.68)",
                   "not reported", "not reported", "40-60% less",
                   "31.6% less memory (-33.3, -30.0); without the libraries 54.5% less memory (-60.0, -50.0)"]
    a = "AdamW", [option_run(1000, 900, optimizer_state_bytes=800, state_bytes_per_parameter=8.0)]
    b = "Lion", [option_run(1000, 900, optimizer_state_bytes=400, state_bytes_per_parameter=4.0)]
    assert arms.option_row(a, b, "state", "half", 0)[4:] == [
        "800 → 400 (×0.50)", "8.00 → 4.00 (×0.50)", "half", "50.0% less state (-50.0)"]
    failed = arms.option_row(a, ("Lion", [{"failed": "error: x"}]), "state", "half", 0)
    assert failed == ["AdamW → Lion", "", "", "", "", "", "half", "failed: error: x"]


def test_the_text_between_two_marks_is_replaced():
    text = "a\n<!-- t -->\nold\n<!-- /t -->\nb\n"
    assert bench.replace_between(text, "t", "new") == "a\n<!-- t -->\nnew\n<!-- /t -->\nb\n"
    for wrong in ("a", "<!-- /t --><!-- t -->", "<!-- t -->" * 2 + "<!-- /t -->"):
        with pytest.raises(SystemExit, match="the page must have <!-- t -->"):
            bench.replace_between(wrong, "t", "new")
    assert bench.replace_between((ROOT / "docs" / "choices.md").read_text(), "options", "x").count("\nx\n") == 1


# ------------------------------------------------------------------------------------------------------------- runs
@dataclass
class FakeSettings:
    seed: int = 1
    fail: str = ""
    width: int = 0
    out_dir: str = ""
    run_id: str = ""


FAKE = SimpleNamespace(Settings=FakeSettings, sha256_file=T.sha256_file)
# A stand-in for train_gpt.py: counts its calls, writes what it was given, fails when told to.
STAND_IN = '''
import json, os, sys
from pathlib import Path
place = Path(os.environ["OUT_DIR"]) / os.environ["RUN_ID"]
place.mkdir(parents=True)
with open(place.parent / "calls", "a") as file:
    file.write(place.name + "\\n")
names = ("SEED", "FAIL", "WIDTH", "PROMPT", "CONFIG", "OMP_NUM_THREADS", "PATH", "RANK")
seen = {name: os.environ.get(name) for name in names}
result = {"seen": seen, "tokens": 3000, "steps": 3, "params": {"total": 10}, "optimizer_state_bytes": 80}
(place / "result.json").write_text(json.dumps(result))
times = (100, 350, 600) if os.environ.get("WIDTH") != "1" else (1,)
(place / "log.txt").write_text("".join(f"step:{i}/3 train_loss:1 train_time:{ms}ms\\n" for i, ms in enumerate(times)))
if os.environ.get("FAIL"):
    sys.stderr.write("first line\\n" + os.environ["FAIL"] + "\\n")
    sys.exit(1)
'''


@pytest.fixture
def stand_in(tmp_path, monkeypatch) -> Path:
    """bench with a repository of its own in `tmp_path`, whose train_gpt.py is the stand-in."""
    (tmp_path / "train_gpt.py").write_text(STAND_IN)
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    monkeypatch.setattr(bench, "SCRIPT", tmp_path / "train_gpt.py")
    return tmp_path


def calls(place: Path) -> list[str]:
    return (place / "calls").read_text().split()


def test_a_run_sees_its_settings_and_no_exported_ones(stand_in, monkeypatch):
    for name, value in {"WIDTH": "9", "PROMPT": "x", "RANK": "3", "CONFIG": "other.env"}.items():
        monkeypatch.setenv(name, value)
    (stand_in / "c.env").write_text("A=1\n")
    result = bench.run_script(FAKE, stand_in / "runs" / "one", "c.env", {"SEED": "5"}, threads=3)
    assert result["seen"] == {"SEED": "5", "FAIL": None, "WIDTH": None, "PROMPT": None, "CONFIG": "c.env",
                              "OMP_NUM_THREADS": "3", "PATH": os.environ["PATH"], "RANK": None}
    assert (result["step_ms"], result["tokens_per_second"]) == (250.0, 4000.0)
    assert (result["parameters"], result["state_bytes_per_parameter"]) == (10, 8.0)


def test_a_finished_run_is_not_made_again(stand_in):
    place = stand_in / "runs" / "one"
    first = bench.run_script(FAKE, place, "", {"SEED": "5"})
    assert bench.run_script(FAKE, place, "", {"SEED": "5"}) == first
    assert calls(place.parent) == ["one"]
    with pytest.raises(SystemExit, match="made with other settings"):
        bench.run_script(FAKE, place, "", {"SEED": "6"})
    (stand_in / "train_gpt.py").write_text(STAND_IN + "# another\n")
    with pytest.raises(SystemExit, match="made with other code"):
        bench.run_script(FAKE, place, "", {"SEED": "5"})


def test_a_failed_or_broken_run_is_told_and_made_again(stand_in):
    place = stand_in / "runs" / "one"
    assert bench.run_script(FAKE, place, "", {"FAIL": "error: no"}) == {"failed": "error: no"}
    assert (place / "result.json").is_file()  # it wrote a result, but is none
    assert "failed" not in bench.run_script(FAKE, place, "", {"SEED": "5"})
    assert calls(place.parent) == ["one", "one"]
    (place / "bench.json").unlink()  # as after a kill
    (place / "junk").touch()
    assert "failed" not in bench.run_script(FAKE, place, "", {"SEED": "5"})
    assert not (place / "junk").exists()
    assert bench.run_script(FAKE, stand_in / "runs" / "two", "", {"WIDTH": "1"}) == {
        "failed": "3 steps are too few to time; use more --seconds"}


def test_an_unknown_setting_or_config_is_not_run(stand_in):
    assert bench.run_script(FAKE, stand_in / "runs" / "one", "", {"NORM": "layer", "SEED": "1"}) == {
        "failed": "NORM: no setting of train_gpt.py"}
    assert bench.run_script(FAKE, stand_in / "runs" / "one", "no.env", {}) == {
        "failed": "CONFIG='no.env': no such file"}
    assert not (stand_in / "runs").exists()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not pin processes")
def test_jobs_are_pinned_to_cores_of_their_own():
    here = sorted(os.sched_getaffinity(0))
    jobs = min(2, len(here))

    def make(run: tuple) -> tuple:
        time.sleep(0.05)
        return run, tuple(os.sched_getaffinity(0))

    found = arms.run_pinned(make, [(at,) for at in range(6)], jobs, 1)
    assert [run for run, _ in found] == [(at,) for at in range(6)]
    assert {cores for _, cores in found} == {(core,) for core in here[:jobs]}
    assert sorted(os.sched_getaffinity(0)) == here
    with pytest.raises(SystemExit, match="more than the"):
        arms.run_pinned(make, [], len(here) + 1, 1)


# ------------------------------------------------------------------------------------------------------------- cost
CALLS = [  # (name, begin, end, bytes): steps begin at 0, 10, 20 and 40, the loop ends at 50
    ("save", -9.0, -5.0, 500),
    ("median_step", 0.1, 0.2, 0), ("is_last", 0.0, 0.4, 0), ("save", 0.5, 0.5, 0),
    ("previous_report", 5.0, 5.6, 0),
    ("median_step", 6.1, 6.4, 0), ("progress", 6.0, 6.5, 0),
    ("is_last", 10.0, 10.1, 0), ("is_last", 20.0, 20.2, 0), ("save", 21.0, 26.0, 700),
    ("previous_report", 30.0, 30.3, 0),
    ("is_last", 40.0, 40.4, 0), ("is_last", 50.0, 50.5, 0), ("save", 51.0, 55.0, 900),
    ("previous_report", 60.0, 69.0, 0),
]


def test_costs_of_known_calls():
    found = bench.costs(CALLS, overhead=0.01, waits=False)
    assert (found["steps"], found["wall_seconds"]) == (4, 50.0)
    assert found["saves"] == [{"seconds": 5.0, "bytes": 700, "next_step_seconds": 15.0}]
    assert (found["median_step_seconds"], found["median_other_seconds"]) == (10.0, 10.0)  # of 10, 10, 15, 10
    by_function = {"is_last": 1.1 / 4, "previous_report": 0.9 / 4, "progress": 0.5 / 4}  # others called median_step
    assert found["seconds_by_function"] == pytest.approx(by_function)
    assert {what: total["share"] for what, total in found["totals"].items()} == pytest.approx(
        {"saving": 0.1, "bookkeeping": 2.5 / 50, "waiting for the device": 0.0, "timing": 11 * 0.01 / 50})
    assert found["totals"]["bookkeeping"]["seconds_per_step"] == pytest.approx(2.5 / 4)


def test_costs_on_cuda_leave_out_the_wait():
    found = bench.costs(CALLS, overhead=0.0, waits=True)
    assert found["totals"]["bookkeeping"]["share"] == pytest.approx(1.6 / 50)
    assert found["totals"]["waiting for the device"]["seconds_per_step"] == pytest.approx(0.9 / 4)
    assert "previous_report" not in found["seconds_by_function"]


# A train_gpt.py whose loop has five steps of 50 ms, 30 of them bookkeeping, and one save of 0.2 s.
LOOP = '''
import json, os, time
from pathlib import Path
from types import SimpleNamespace
def nap(seconds):
    return lambda self, *rest: time.sleep(seconds)
class Clock:
    median_step, previous_report, send_report = nap(0.005), nap(0), nap(0.005)
    def is_last(self, step):
        return self.median_step() or step == 5
    def progress(self, step):
        self.median_step()
        time.sleep(0.005)
class Plan:
    begin_phases, rates = nap(0), nap(0.005)
class Run:
    count_skipped = nap(0)
    def __init__(self):
        self.folder, self.step, self.saved_step = Path(os.environ["OUT_DIR"]) / os.environ["RUN_ID"], 0, -1
    def save(self, seconds):
        if self.saved_step != self.step:
            self.saved_step = self.step
            time.sleep(0.2)
            (self.folder / f"step_{self.step:06d}").mkdir(parents=True)
            (self.folder / f"step_{self.step:06d}" / "model.pt").write_bytes(bytes(1234))
def main():
    if os.environ["SEED"] == "9":
        raise SystemExit("error: no seed")
    run, clock, plan = Run(), Clock(), Plan()
    run.save(0)
    while not clock.is_last(run.step):
        if run.step in (0, int(os.environ["SEED"])):
            run.save(0)
        clock.median_step(), run.count_skipped(0), clock.previous_report(), clock.progress(run.step)
        plan.begin_phases(), plan.rates(), clock.send_report(), time.sleep(0.02)
        run.step += 1
    run.save(0)
    run.count_skipped(0)
    result = {"tokens": 5, "steps": 5, "params": {"total": 1}, "optimizer_state_bytes": 8, "hardware": "1 x CPU"}
    (run.folder / "result.json").write_text(json.dumps(result))
    lines = [f"step:{i}/5 train_loss:1 train_time:{50 * i}ms\\n" for i in range(1, 6)]
    (run.folder / "log.txt").write_text("".join(lines))
    return 0
def exit_code(main):
    return main()
'''


@pytest.mark.full
def test_cost_measures_a_run_of_known_times(tmp_path, monkeypatch, capsys):
    (tmp_path / "train_gpt.py").write_text(LOOP)
    (tmp_path / "c.env").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    monkeypatch.setattr(bench, "SCRIPT", tmp_path / "train_gpt.py")
    monkeypatch.setattr(bench, "load_script", lambda path: T)
    monkeypatch.setattr(bench, "open_data", lambda script, path: ("data/x", {}))

    def call(seed: int) -> tuple[int, str, str]:
        words = ["cost", "c.env", "--set", f"SEED={seed}", "--out", "c.json", "--runs", f"runs/{seed}"]
        monkeypatch.setattr(sys, "argv", ["bench.py", *words])
        with pytest.raises(SystemExit) as ended:
            bench.main()
        return ended.value.code, *capsys.readouterr()

    code, out, err = call(3)
    assert (code, err) == (0, "")
    found = json.loads((tmp_path / "c.json").read_text())
    save, = found["saves"]
    assert 0.2 <= save["seconds"] < 0.4 and save["bytes"] == 1234 and found["steps"] == 5
    assert 0.05 <= found["median_step_seconds"] < 0.1 and 0.05 <= save["next_step_seconds"] < 0.15
    assert 0.03 <= found["totals"]["bookkeeping"]["seconds_per_step"] < 0.08
    wall = found["wall_seconds"]
    assert 0.45 <= wall < 1 and found["totals"]["saving"]["share"] == pytest.approx(save["seconds"] / wall, rel=0.01)
    assert 0 < found["totals"]["timing"]["seconds_per_step"] < 1e-3
    assert f"| saving | {1e6 * found['totals']['saving']['seconds_per_step']:,.1f} | " in out
    assert "SAVE_EVERY=30s: 5 steps" in out and " ms for 1,234 bytes." in out and "waiting" not in out
    assert call(7)[::2] == (1, "failed: c.env: no checkpoint was saved in the loop; use more --seconds, or --set "
                               "SAVE_EVERY=5s\n")
    assert call(9)[::2] == (1, "failed: c.env: error: no seed\n")


# --------------------------------------------------------------------------------------------------------------- rl
def test_both_generators_sample_as_many_tokens_by_models_of_one_size():
    pytest.importorskip("transformers", reason="transformers is not installed")
    config = {"ARCH_MODE": "llama", "VOCAB_SIZE": "64", "TRAIN_SEQ_LEN": "64", "NUM_LAYERS": "2", "MODEL_DIM": "32"}
    settings = T.load_settings(T.Settings, config, presets={"ARCH_MODE": T.ARCH_PRESETS})
    torch.manual_seed(0)
    makes = bench.make_generators(settings, 3, 40)
    for make in makes.values():  # at the start the distribution is nearly even: 120 draws of 64 tokens
        ids = make()
        assert ids.shape == (3, 40) and 0 <= ids.min() and ids.max() < 64 and len(ids.unique()) > 35
    assert list(makes)[0] == "ours" and list(makes)[1].startswith("transformers ")


def test_rl_times_in_turn_and_tells_the_ratio(tmp_path, monkeypatch, capsys):
    made, short = [], False

    def generator(name: str, seconds: float):
        def make() -> torch.Tensor:
            made.append(name)
            time.sleep(seconds if len(made) > 2 else 0.2)  # the first of each warms up
            return torch.zeros(4, 9 if short else 10)
        return make

    monkeypatch.setattr(bench, "ROOT", tmp_path)
    monkeypatch.setattr(bench, "load_script", lambda path: T)
    monkeypatch.setattr(bench, "make_generators", lambda settings, batch, new: {
        "ours": generator("ours", 0.02), "theirs": generator("theirs", 0.08)})
    monkeypatch.setattr(bench, "policy_speed", lambda rounds: {"rollout": [5.0] * rounds, "update": [7.0] * rounds})
    for name in ("sample.py", "train_grpo.py"):
        (tmp_path / name).touch()
    words = "rl --rounds 3 --batch 4 --new 10 --threads 1 --out o.json"
    monkeypatch.setattr(sys, "argv", ["bench.py", *words.split()])
    with pytest.raises(SystemExit) as ended:
        bench.main()
    out = capsys.readouterr().out
    assert ended.value.code == 0 and made == ["ours", "theirs"] * 4
    saved = json.loads((tmp_path / "o.json").read_text())
    speeds = saved["tokens_per_second"]
    assert [len(values) for values in speeds.values()] == [3] * 4 and speeds["update"] == [7.0] * 3
    assert 1000 < statistics.median(speeds["ours"]) <= 2000 and 300 < statistics.median(speeds["theirs"]) <= 500
    assert saved["ratio"] == statistics.median(speeds["ours"]) / statistics.median(speeds["theirs"])
    assert f"ours / transformers' = {saved['ratio']:.2f} (rounds: " in out and "| update | 7 | 7 | 7 |" in out
    assert saved["command"] == f"python tools/bench.py {words}" and "seconds" not in saved
    short = True
    with pytest.raises(SystemExit, match=r"error: ours made \(4, 9\) tokens, not \(4, 10\)"):
        bench.main()


def test_a_step_of_the_policy_is_timed_after_one_that_warms_up(monkeypatch):
    import train_grpo
    ticks, seen, tokens = iter(range(100)), [], []

    def update(trainer, rollout, multiplier):
        seen.append(multiplier)
        tokens.append(sum(len(row[1]) for rows in rollout.rows for row in rows))

    monkeypatch.setattr(train_grpo.GRPOTrainer, "update", update)
    monkeypatch.setattr(bench, "time", SimpleNamespace(perf_counter=lambda: 0.5 * next(ticks)))
    speeds = bench.policy_speed(2)
    assert seen == [0.0] * 3 and all(3000 < count <= 32 * 8 * 16 for count in tokens)
    assert speeds == {"rollout": [2.0 * count for count in tokens[1:]], "update": [2.0 * count for count in tokens[1:]]}


# ---------------------------------------------------------------------------------------------------- arms and options
TOKENIZER = {"vocab_size": 1024, "bos_id": 1}


def test_the_arms_have_equal_parameters(capsys):
    found = arms.read_arms([])
    arms.check_arms(T, "configs/cpu.env", found, TOKENIZER)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "arm hybrid: 793,688 parameters, +0.0%"  # docs/lab.md
    assert len(lines) == len(found) >= 10


@pytest.mark.parametrize(("settings", "message"), [
    ({"MODEL_DIM": "160"}, "arm b: .* parameters are more than 5% from 793,688"),
    ({"NUM_LAYER": "4"}, "arm b: NUM_LAYER='4': no setting"),
    ({"FROBNICATE": "4"}, "arm b: FROBNICATE: not all are settings"),
    ({"LAYER_PATTERN": "x"}, "arm b: LAYER_PATTERN='x'"),
])
def test_an_arm_that_is_wrong_or_unequal_is_refused(settings, message, tmp_path):
    (tmp_path / "arms.json").write_text(json.dumps({"a": {}, "b": settings}))
    found = arms.read_arms([str(tmp_path / "arms.json")])
    with pytest.raises(SystemExit, match=message):
        arms.check_arms(T, "configs/cpu.env", found, TOKENIZER)


def test_arms_by_name():
    assert list(arms.read_arms(["swiglu", "hybrid"])) == ["swiglu", "hybrid"]
    with pytest.raises(SystemExit, match="'x' is no arm; there are hybrid, "):
        arms.read_arms(["x"])


def test_options_name_settings_and_a_claim_for_every_arm():
    options = json.loads(arms.OPTIONS.read_text())
    names = set(options["model"])
    for choice in options["choices"].values():
        assert len(choice["claims"]) == len(choice["arms"]) - 1
        assert choice["compare"] in arms.COMPARED
        names |= {name for settings in choice["arms"].values() for name in settings}
    assert names - bench.setting_names(T) <= {"OPTIMIZER"}


# ------------------------------------------------------------------------------------------------------- whole commands
@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Calls a tool with words of a command line and a stub in place of runs: (exit code, out, err, its calls)."""
    manifest = {"name": "text", "tokenizer": TOKENIZER}
    for tool in (bench, arms):
        monkeypatch.setattr(tool, "ROOT", tmp_path)
        monkeypatch.setattr(tool, "load_script", lambda path: bench if path.stem == "bench" else T)
        monkeypatch.setattr(tool, "open_data", lambda script, path: ("data/x", manifest))
    monkeypatch.setattr(arms, "library_memory", lambda: 300.0)
    monkeypatch.setattr(bench, "matmul_peak", lambda device, dtype=None: 1e11)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "choices.md").write_text("top\n<!-- options -->\n<!-- /options -->\nend\n")
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "cpu.env").write_text((ROOT / "configs" / "cpu.env").read_text())
    monkeypatch.chdir(tmp_path)

    def call(words: list[str], stub) -> tuple[int, str, str, list[tuple[str, dict]]]:
        made = []

        def run(script, place, config, settings, threads=0):
            made.append((place.name, {"CONFIG": config, **settings}))
            found = stub(place.name, settings)
            about = {"hardware": "1 x CPU", "versions": {"torch": "2"}, "commit": "c", "code_sha256": "s",
                     "dtype": "float32", "manifest_sha256": "m", "events": []}
            return found if "failed" in found else {**about, **found}

        tool = bench if words[0] == "train" else arms
        monkeypatch.setattr(tool, "run_script", run)
        monkeypatch.setattr(sys, "argv", ["x.py", *words])
        with pytest.raises(SystemExit) as ended:
            tool.main()
        said = capsys.readouterr()
        return ended.value.code, said.out, said.err, made

    return call


def test_options_runs_in_turn_and_writes_table_and_json(command, tmp_path):
    def stub(name: str, settings: dict) -> dict:
        if settings["COMPILE"] == "1" and name.endswith("_2"):
            return option_run(1300, 900, parameters=10)
        return option_run(1000, 800, parameters=10)

    code, out, err, made = command(["options", "--only", "compile", "--write-docs", "--out", "o.json", "--seconds",
                                    "3", "--set", "MODEL_DIM=64"], stub)
    assert (code, err) == (0, "")
    assert [name for name, _ in made] == ["compile_eager_1", "compile_compiled_1", "compile_eager_2",
                                          "compile_compiled_2"]
    assert [settings["COMPILE"] for _, settings in made] == ["0", "1", "0", "1"]
    assert {(settings["MODEL_DIM"], settings["MAX_WALLCLOCK_SECONDS"]) for _, settings in made} == {("64", "4")}
    page = (tmp_path / "docs" / "choices.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith("| eager"))
    assert row.startswith("| eager → compiled | 1,000 → 1,150 (×1.15) | ")
    assert row.endswith("| 20-30% faster | 15.0% faster (+0.0, +30.0) |")
    assert "`python tools/arms.py options --only compile --write-docs" in page and "64 wide" in page
    assert page.startswith("top\n<!-- options -->\n| choice |") and page.endswith("<!-- /options -->\nend\n")
    assert row in out
    saved = json.loads((tmp_path / "o.json").read_text())
    assert [run["tokens_per_second"] for run in saved["runs"]] == [1000, 1000, 1000, 1300]
    assert [run["arm"] for run in saved["runs"]] == ["eager", "compiled", "eager", "compiled"]
    assert saved["libraries_mib"] == 300.0 and saved["model"]["MODEL_DIM"] == "64" and saved["hardware"] == "1 x CPU"
    assert saved["date"] == time.strftime("%Y-%m-%d") and "DATA_PATH" not in saved["model"]


def test_a_failed_option_is_in_the_table_and_the_exit_code(command):
    def stub(name: str, settings: dict) -> dict:
        return {"failed": "error: no compiler"} if settings["COMPILE"] == "1" else option_run(1000, 800)

    code, out, err, _ = command(["options", "--only", "compile", "--out", "o.json", "--repeats", "1"], stub)
    assert code == 1
    assert "| 20-30% faster | failed: error: no compiler |" in out
    assert err.splitlines()[-1] == "failed: compile, compiled: error: no compiler"
    code, *_ = command(["options", "--only", "nothing"], stub)
    assert code.startswith("error: --only nothing: there are norm, ")


def arm_run(score: float) -> dict:
    """A run of configs/cpu.env."""
    settings = T.load_settings(T.Settings, {"CONFIG": str(ROOT / "configs" / "cpu.env")})
    return option_run(4000, 512, val_bpb=score, tokens=5000, steps=5, parameters=793688, settings=vars(settings))


def test_arms_go_by_seed_and_are_judged(command, tmp_path):
    (tmp_path / "arms.json").write_text(json.dumps({"a": {}, "b": {"MLP": "gelu"}, "c": {"SCALAR_LR": 0.01}}))
    scores = {"a": (2.0, 2.2), "b": (1.9, 2.1), "c": (2.1, "killed")}

    def stub(name: str, settings: dict) -> dict:
        arm, seed = name.split("_s")
        score = scores[arm][int(seed) - 1]
        return {"failed": score} if isinstance(score, str) else arm_run(score)

    code, out, err, made = command(["arms", "--arms", "arms.json", "--seeds", "2", "--out", "a.json", "--seconds", "7"],
                                   stub)
    assert [name for name, _ in made] == ["a_s1", "b_s1", "c_s1", "a_s2", "b_s2", "c_s2"]
    assert made[1][1] == {"CONFIG": "configs/cpu.env", "DATA_PATH": "data/x", "MAX_WALLCLOCK_SECONDS": "7",
                          "EVAL_STRIDE": "0", "VAL_LOSS_EVERY": "0", "MLP": "gelu", "SEED": "1"}
    assert made[2][1]["SCALAR_LR"] == "0.01"
    rows = [line for line in out.splitlines() if line.startswith("| ")]
    mfu = 4000 * bench.run_flops(T, arm_run(2.0), TOKENIZER) / 1e11
    speed = f"793,688 | 5,000 | 5 | 4,000 | {mfu:.1%} | 512"
    assert rows[2:] == [
        f"| a | {speed} | 2.1000 ± 1.2706 |  |  |",
        f"| b | {speed} | 2.0000 ± 1.2706 | -0.1000 ± 0.0000 (-4.8%) | wins |",
        f"| c | {speed} | 2.1000 ± inf | +0.1000 ± inf (+5.0%) | tie |"]
    assert code == 1 and err.splitlines()[-1] == "failed: c, seed 2: killed"
    saved = json.loads((tmp_path / "a.json").read_text())
    assert saved["arms"]["b"]["verdict"] == "wins" and saved["arms"]["b"]["settings"] == {"MLP": "gelu"}
    assert saved["arms"]["c"]["runs"]["2"] == {"failed": "killed"}
    assert saved["arms"]["c"]["half_width"] is None  # JSON has no infinity
    assert saved["arms"]["a"]["runs"]["2"]["val_bpb"] == 2.2


def test_configs_are_arms_of_any_size(command, tmp_path):
    """Each run has all its settings by a file, but paths and the seed: so it can be a record's."""
    (tmp_path / "configs" / "big.env").write_text("MODEL_DIM=256\nMAX_WALLCLOCK_SECONDS=600")
    words = ["arms", "--arms", "configs/cpu.env", "configs/big.env", "--seeds", "2", "--seconds", "7",
             "--out", "a.json", "--runs", "race", "--set", "TRAIN_BATCH_TOKENS=4096"]
    code, out, err, made = command(words, lambda name, settings: arm_run(2.0 if name.startswith("cpu") else 1.9))
    assert (code, err) == (0, "")
    assert made == [(f"{name}_s{seed}", {"CONFIG": f"race/{name}.env", "DATA_PATH": "data/x", "SEED": f"{seed}"})
                    for seed in (1, 2) for name in ("cpu", "big")]
    assert (tmp_path / "race" / "big.env").read_text() == (
        "MODEL_DIM=256\nMAX_WALLCLOCK_SECONDS=600\nMAX_WALLCLOCK_SECONDS=7\nEVAL_STRIDE=0\nVAL_LOSS_EVERY=0\n"
        "TRAIN_BATCH_TOKENS=4096\n")
    settings = T.load_settings(T.Settings, {"CONFIG": str(tmp_path / "race" / "big.env")})
    assert (settings.model_dim, settings.max_wallclock_seconds, settings.train_batch_tokens) == (256, 7.0, 4096)
    assert re.search(r"^arm big: [\d,]+ parameters, \+\d{3,}\.\d%$", out, re.MULTILINE)
    assert "| -0.1000 ± 0.0000 (-5.0%) | wins |" in out
    assert json.loads((tmp_path / "a.json").read_text())["arms"]["big"]["settings"] == {"CONFIG": "configs/big.env"}
    assert command(["arms", "--arms", "configs/no.env"], arm_run)[0].startswith("error: arm no: CONFIG=")


def test_train_states_the_share_of_the_peak(command, tmp_path):
    settings = T.load_settings(T.Settings, {"CONFIG": str(ROOT / "configs" / "cpu.env")})

    def stub(name: str, given: dict) -> dict:
        if name == "bad":
            return {"failed": "error: bad"}
        return {**option_run(4000, 512, parameters=793688), "settings": vars(settings)}

    code, out, err, made = command(["train", "configs/cpu.env", "bad.env", "--seconds", "2", "--out", "t.json", "--set",
                                    "COMPILE=0"], stub)
    assert made[0][1]["COMPILE"] == "0" and made[0][1]["MAX_WALLCLOCK_SECONDS"] == "7"
    # weights: 2 GDN of 4 x 128^2 + 8 x 128 + 128^2, 2 attentions of 128 x 256 + 128^2, 4 MLPs of 6 x 128^2, a head
    weights = 2 * (5 * 128**2 + 8 * 128) + 2 * 3 * 128**2 + 4 * 6 * 128**2 + 1024 * 128
    flops = 6 * weights + 2 * 18 * 4 * 32**2 + 2 * 12 * 128 * 257 / 2
    saved = json.loads((tmp_path / "t.json").read_text())["configs"]
    assert saved["configs/cpu.env"]["flops_per_token"] == flops
    assert saved["configs/cpu.env"]["mfu"] == pytest.approx(4000 * flops / 1e11)
    assert f"| configs/cpu.env | 4,000 | 25.0 | 512 | 793,688 | {flops / 1e6:.2f} | " in out
    assert f"{4000 * flops / 1e11:.1%} of 100 GFLOP/s |" in out
    assert (code, err.splitlines()[-1]) == (1, "failed: bad.env: error: bad")
