"""tools/figures.py: rows of the README's table from files of bench.py, to the letter; what is no such file."""

import json
import sys

import pytest
from conftest import load_tool

figures = load_tool("figures")
ABOUT = {"date": "2026-01-02", "command": "python tools/bench.py x", "cpu": "A CPU", "cores": 2,
         "versions": {"torch": "2.0"}}


def timed(operation: str, shape: str, way: str, ms: float, ours: float, **more: int) -> dict:
    return {"operation": operation, "shape": shape, "way": way, "ms": ms, "times ours": ours, **more}


OPS = {**ABOUT, "records": [
    timed("GDN, forward", "B1", "gdn", 1.0, 1.0), timed("GDN, forward+backward", "B1", "gdn", 2.345, 1.0),
    timed("GDN, forward+backward", "B1", "lib 5", 9.0, 3.838), timed("GDN, forward+backward", "B2", "gdn", 7.0, 1.0),
    timed("GDN, a token", "B3", "gdn_step", 0.5, 1.0),
    timed("write", "9 codes", "rANS", 8.0, 1.0, bytes=1000), timed("write", "9 codes", "zstd", 1.0, 0.1, bytes=1025),
    timed("read", "9 codes", "rANS", 6.0, 1.0, bytes=1000), timed("read", "9 codes", "zstd", 3.0, 0.5, bytes=1025),
]}
RL = {**ABOUT, "tokens_per_second": {"ours": [9000, 10000, 11000], "lib 5": [4000, 5000, 5500],
                                     "rollout": [700, 800, 900], "update": [1, 2, 3]},
      "ratio": 2.0, "shape": {"layers": 4, "dim": 128, "batch": 32, "new": 128}}
TRAIN = {**ABOUT, "configs": {
    "a.env": {"tokens_per_second": 20000.4, "step_ms": 99.6, "peak_memory_mib": 600.2, "mfu": 0.254,
              "matmul_flops": 1.5e12},
    "b.env": {"failed": "error: x"}}}


def test_rows_are_ours_and_what_stands_beside_them():
    assert figures.of_ops(OPS) == [
        ["GDN, forward+backward, B1", "gdn: 2.35 ms", "lib 5 ×3.84"], ["GDN, a token, B3", "gdn_step: 0.5 ms", ""],
        ["int6 codes to bytes, 9 codes", "rANS: 1,000 bytes, 8 ms", "zstd +2.5% bytes"],
        ["and back, 9 codes", "rANS: 6 ms", "zstd ×0.50"]]
    assert figures.of_rl(RL) == [
        ["generation, 32 rows, 4 layers x 128", "10,000 tokens/s", "lib 5 5,000 (ours ×2.00)"],
        ["GRPO at its defaults", "rollout 800, update 2 tokens/s", ""]]
    assert figures.of_train(TRAIN) == [
        ["training, `a.env`", "20,000 tokens/s, 100 ms a step", "600 MiB, MFU 25% of 1,500 GFLOP/s"]]


def write(monkeypatch, *files: object) -> None:
    monkeypatch.setattr(sys, "argv", ["figures.py", *map(str, files)])
    assert figures.main() == 0


def test_the_readme_is_written_from_files_that_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    (tmp_path / "docs" / "lab").mkdir(parents=True)
    (tmp_path / "README.md").write_text("top\n<!-- bench -->\nold\n<!-- /bench -->\nend\n")
    for name, found in {"t": TRAIN, "r": RL, "x": {}}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(found))
    write(monkeypatch, tmp_path / "t.json")
    write(monkeypatch, tmp_path / "r.json")
    page = (tmp_path / "README.md").read_text()
    assert page == ("top\n<!-- bench -->\n|  | here | beside it |\n| --- | --- | --- |\n"
                    "| generation, 32 rows, 4 layers x 128 | 10,000 tokens/s | lib 5 5,000 (ours ×2.00) |\n"
                    "| GRPO at its defaults | rollout 800, update 2 tokens/s |  |\n"
                    "| training, `a.env` | 20,000 tokens/s, 100 ms a step | 600 MiB, MFU 25% of 1,500 GFLOP/s |\n\n"
                    "×: its time over ours. 2 cores of A CPU, torch 2.0. "
                    "`python tools/bench.py x`, 2026-01-02; `python tools/bench.py x`, "
                    "2026-01-02.\n<!-- /bench -->\nend\n")
    assert sorted(path.name for path in (tmp_path / "docs" / "lab").iterdir()) == ["bench_rl.json", "bench_train.json"]
    write(monkeypatch)
    assert (tmp_path / "README.md").read_text() == page
    with pytest.raises(SystemExit, match="x.json: has none of records, tokens_per_second, configs"):
        write(monkeypatch, tmp_path / "x.json")
    (tmp_path / "README.md").write_text("no marks")
    with pytest.raises(SystemExit, match="must have <!-- bench --> and then"):
        write(monkeypatch)


def test_without_any_file_it_says_what_to_run(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match="no FILE, and none in docs/lab; run bench.py ops, rl or train first"):
        write(monkeypatch)
