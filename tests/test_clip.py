"""tools/clip.py: its plan, a log's numbers, the rule of stability, means and intervals by values; runs of a stub."""

import importlib.util
import json
import re
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import load_tool

ROOT = Path(__file__).resolve().parents[1]
clip = load_tool("clip")

# As a run writes it: the script's own source, which has such lines too, then settings, scores and steps.
LOG = '''    line = (f"step:{done}/{s.iterations or '?'} " + " ".join(
        log(f"before: {start}")
========================================================================================================================
* ITERATIONS=4
step:0 saved in 30ms
before: {'n': 8, 'greedy': [0.5, 0.4, 0.6], 'pass1': [0.25, 0.2, 0.3], 'pass8': [0.75, 0.7, 0.8]}
set-up and first scores: 13.2 s, outside the clock
''' + "".join(
    f"step:{step}/4 reward:0.{step} reward_std:0.37 zero_variance:0.375 length:8.176 finished:0.98 truncated:0.015 "
    f"gen_tok_s:6296 loss:-1.5e-05 entropy:{entropy} clip_active:{active} clip_outside:{outside} log_ratio:1.2e-05 "
    f"kl:0 sampler_gap:2.463e-07 grad_norm:{norm} train_tok_s:3875 lr_mul:1 progress:0.25 "
    f"clip_active_1:0 clip_outside_1:0 clip_active_2:{2 * active:.3f} clip_outside_2:{2 * outside:.3f} "
    f"train_time:873ms step_avg:873.00ms\n{after}"
    for step, entropy, active, outside, norm, after in (
        (1, 0.8, 0.1, 0.4, 1.0, ""),
        (2, 0.6, 0.2, 0.3, 2.0, "step:2/4 held_out/n:8 held_out/greedy:0.5 held_out/pass1:0.5 held_out/pass8:1\n"
                                "event: skipped_step step:3 loss:nan\n"),
        (4, 0.2, 0.4, 0.5, 6.0, "")))
AFTER = {"n": 8, "greedy": [0.6, 0.5, 0.7], "pass1": [0.4, 0.3, 0.5], "pass8": [0.9, 0.8, 1.0]}
MADE = {"code_sha256": "c", "commit": "d", "hardware": "e", "versions": {}, "total_seconds": 9.0}
RESULT = {"steps": 4, "after": AFTER, "settings": {"val_loss_every": 2}, **MADE}


def test_a_log_is_read():
    found = clip.read_log(LOG)
    assert [step["step"] for step in found.steps] == [1, 2, 4] and found.bad == 1
    assert found.steps[1] == {"step": 2, "reward": 0.2, "entropy": 0.6, "clip_active": 0.2, "clip_outside": 0.3,
                              "log_ratio": 1.2e-05, "grad_norm": 2.0, "zero_variance": 0.375, "length": 8.176,
                              "clips": [[0.0, 0.0], [0.4, 0.6]]}
    assert [step for step, _ in found.curve] == [0, 2]
    assert found.curve[1][1] == {"greedy": [0.5], "pass1": [0.5], "pass8": [1.0]}


def test_a_run_in_numbers():
    found = clip.summarize(LOG, RESULT)
    assert found["means"]["entropy"] == pytest.approx(1.6 / 3) and found["means"]["grad_norm"] == 3.0
    assert found["means"]["clip_active"] == pytest.approx(0.7 / 3) and found["bad"] == 1 and found["made"] == MADE
    assert found["curves"]["entropy"] == [[2, pytest.approx(0.7)], [4, 0.2]]  # steps 1 and 2, then 3 (skipped) and 4
    assert found["curves"]["active_by_mini_batch"] == [[1, 0.0], [2, pytest.approx(1.4 / 3)]]
    assert found["curves"]["outside_by_mini_batch"] == [[1, 0.0], [2, pytest.approx(0.8)]]
    assert found["curves"]["pass1"] == [[0, 0.25], [2, 0.5], [4, 0.4]]
    assert found["curves"]["pass8"] == [[0, 0.75], [2, 1.0], [4, 0.9]]
    assert found["end"] == {"greedy": [0.6, 0.5, 0.7], "pass1": [0.4, 0.3, 0.5], "pass8": [0.9, 0.8, 1.0]}


@pytest.mark.parametrize(("ways", "half", "bad", "stable"), [
    ((0.2, 0.5, 0.5), 0.01, 0, True),
    ((0.2, 0.6, 0.5), 0.0981, 0, True),  # 2 standard errors are 2 x 0.0981 / 1.96 = 0.1001
    ((0.2, 0.6, 0.5), 0.0979, 0, False),  # 0.0999
    ((0.6, 0.2, 0.5), 0.0979, 0, False),  # the start counts too
    ((0.2, 0.3, 0.5), 0.01, 1, False),  # a step that was not finite
    ((0.2, 0.1, 0.0), 0.0, 0, False),  # collapsed: no interval is left
    ((1.0, 1.0, 1.0), 0.0, 0, True),
])
def test_stability(ways, half, bad, stable):
    curve = [[step, {"pass1": [mean, mean - half, mean + half]}] for step, mean in enumerate(ways)]
    assert clip.is_stable(curve, bad) is stable


def test_intervals_and_means():
    assert clip.interval([0.7]) == [0.7]
    half = 4.303 * 0.1 / 3**0.5
    assert clip.interval([0.4, 0.5, 0.6]) == pytest.approx([0.5, 0.5 - half, 0.5 + half])
    many = [0.1 * at for at in range(12)]
    assert clip.interval(many)[2] == pytest.approx(0.55 + 1.96 * statistics.stdev(many) / 12**0.5)
    assert clip.mean_of([{"a": [[1, 2.0]], "b": 0}, {"a": [[1, 4.0]], "b": 1}]) == {"a": [[1, 3.0]], "b": 0.5}
    with pytest.raises(ValueError):
        clip.mean_of([[1.0], [1.0, 2.0]])


def summary(pass1: float, active: float, stable: bool = True) -> dict:
    means = {**dict.fromkeys(clip.MEASURED, 0.5), "clip_active": active}
    curves = {**{name: [[2, 0.5], [4, 0.5]] for name in clip.MEASURED}, "pass1": [[0, 0.1], [2, pass1 / 2], [4, pass1]],
              "active_by_mini_batch": [[1, 0.0], [2, active]], "outside_by_mini_batch": [[1, 0.0], [2, 2 * active]]}
    return {"means": means, "curves": curves, "bad": 0, "stable": stable,
            "end": {"greedy": [0.9, 0.8, 1.0], "pass1": [pass1, pass1 - 0.02, pass1 + 0.02]}}


def rows_of(specs: list[tuple]) -> tuple[list[dict], dict]:
    """Rows of (varied, value, arm, summaries), as make_plan gives them, and what has been found."""
    rows, found = [], {}
    for varied, value, arm, runs in specs:
        names = [f"{arm} {varied} {value} {at}" for at in range(len(runs))]
        runs_of = [SimpleNamespace(name=name) for name in names]
        rows.append({"varied": varied, "arm": arm, "value": value, "runs": runs_of})
        found |= dict(zip(names, runs, strict=True))
    return rows, found


GRPO, GSPO, NARROW, NONE = clip.ARMS
SPECS = [
    ("", "", GRPO, [summary(0.70, 0.01), summary(0.80, 0.02), summary(0.60, 0.03)]),
    ("", "", GSPO, [summary(0.71, 0.3), summary(0.83, 0.4), summary(0.62, 0.5, stable=False)]),
    ("", "", NARROW, [summary(0.7, 0.3), None, summary(0.6, 0.3)]),
    ("group_size", 2, GRPO, [None]), ("group_size", 2, GSPO, [summary(0.5, 0.1)]),
    ("mini_batches", 2, GRPO, [summary(0.4, 0.1)]), ("mini_batches", 2, GSPO, [summary(0.5, 0.1)]),
]


def test_rows_are_means_over_seeds_and_differences_pairs():
    rows = clip.fill_rows(*rows_of(SPECS))
    half = 4.303 * 0.1 / 3**0.5
    assert rows[0]["end"]["pass1"] == pytest.approx([0.7, 0.7 - half, 0.7 + half]) and "less_grpo" not in rows[0]
    assert rows[0]["means"]["clip_active"] == pytest.approx(0.02) and rows[0]["ends"] == [0.70, 0.80, 0.60]
    assert rows[0]["curves"]["pass1"] == [[0, pytest.approx(0.1)], [2, pytest.approx(0.35)], [4, pytest.approx(0.7)]]
    assert rows[1]["curves"]["outside_by_mini_batch"] == [[1, 0], [2, pytest.approx(0.8)]]
    assert rows[1]["stable"] == [True, True, False]
    half = 4.303 * 0.01 / 3**0.5  # of 0.01, 0.03, 0.02
    assert rows[1]["less_grpo"] == pytest.approx([0.02, 0.02 - half, 0.02 + half])
    assert rows[2]["stable"] == [True, False, True] and "end" not in rows[2]  # one of its runs has failed
    assert rows[4]["end"]["pass1"] == [0.5, 0.48, 0.52]  # of one seed: over problems
    assert "less_grpo" not in rows[4]  # GRPO's run of that group size failed, and mini-batches are another thing
    assert rows[6]["less_grpo"] == pytest.approx([0.1])
    json.dumps(rows)


def test_the_tables():
    text = clip.markdown(clip.fill_rows(*rows_of(SPECS)), "`command`\n")
    tables = [[[cell.strip() for cell in line.split(" | ")] for line in part.strip("\n").split("\n")]
              for part in text.split("\n\n")]
    assert [len(table) for table in tables] == [1, 5, 4, 4]
    assert {len(line) for table in tables[1:] for line in table} == {15}
    columns, line = [cell.strip("| ") for cell in tables[1][0]], dict(zip(tables[1][0], tables[1][3], strict=True))
    assert columns[:5] == ["arm", "stable", "steps not finite", "active", "outside"]
    assert tables[1][3][:5] == [f"| {GSPO}", "2 of 3", "0", "0.400", "0.500"]
    assert line["outside by mini-batch"] == "0.000 0.800" and line["active by mini-batch"] == "0.000 0.400"
    assert line["greedy at the end"] == "0.900 [0.900, 0.900]" and line["pass1 at the end"] == "0.720 [0.458, 0.982]"
    assert line["pass1 less GRPO's"] == "+0.020 [-0.005, +0.045]"
    assert tables[1][3][-1] == "0.100 0.360 0.720 |"
    assert tables[1][4][:4] == [f"| {NARROW}", "2 of 3", "failed", "failed"]
    assert tables[3][3][0] == f"| {GSPO}, MINI_BATCHES=2" and "+0.100" in tables[3][3]


def test_the_plan_differs_in_nothing_else():
    starts, rows = clip.make_plan(3, 256, {})
    assert [run.name for run in starts] == ["start_seed_1", "start_seed_2", "start_seed_3"]
    assert [row["arm"] for row in rows[:4]] == list(clip.ARMS)
    assert all([(run.settings["seed"], run.start) for run in row["runs"]] ==
               [(seed, f"start_seed_{seed}") for seed in (1, 2, 3)] for row in rows[:4])
    assert [run.start for run in starts] == [""] * 3
    runs = {run.name: run for row in rows for run in row["runs"]}
    assert len(runs) == 12 + 2 * (2 + 3 + 3) and len(rows) == 4 + 2 * (3 + 4 + 4)
    assert all(re.fullmatch(r"[a-z0-9._]+", name) for name in runs)
    first = runs["grpo_.2_.28_seed_1"]
    assert first.script == "train_grpo.py" and first.settings["prompts_per_step"] == 32
    for row in rows:
        for run in row["runs"]:
            changed = {key for key in run.settings if run.settings[key] != first.settings[key]} - {"seed"}
            assert changed <= {"left_clip_range", "right_clip_range", row["varied"]} | (
                {"prompts_per_step"} if row["varied"] == "group_size" else set())
            assert run.settings["prompts_per_step"] * run.settings["group_size"] == 256
            assert run.settings["prompts_per_step"] % run.settings["mini_batches"] == 0
            assert not row["varied"] or run.settings[row["varied"]] == row["value"]
    base = [row["runs"][0].name for row in rows if row["value"] == clip.BASE.get(row["varied"])]
    assert base == ["grpo_.2_.28_seed_1", "gspo_3e_4_4e_4_seed_1"] * 3  # not made again


STUB = '''
import hashlib, json, os, pathlib, sys
env = dict(os.environ)
folder = pathlib.Path(env["OUT_DIR"], env["RUN_ID"])
folder.mkdir()  # fails where what was broken off is left
if env["LEARNING_RATE"] == "0.5":
    sys.exit("error: LEARNING_RATE='0.5': too much")
(folder / "log.txt").write_text(LOG)
settings = {"learning_rate": float(env["LEARNING_RATE"]), "seed": int(env["SEED"]), "qat": env["QAT"] == "1",
            "save_every": env["SAVE_EVERY"], "val_loss_every": 2}
code = hashlib.sha256(pathlib.Path(__file__).read_bytes()).hexdigest()
(folder / "env.json").write_text(json.dumps(env))
(folder / "result.json").write_text(json.dumps({**RESULT, "settings": settings, "code_sha256": code}))
main, exit_code = None, print  # which gives None: all is well
'''


def test_runs_go_on_where_they_stopped(tmp_path, monkeypatch, capsys):
    """A stub in place of the scripts: what it is given, which runs are made again, and what is refused."""
    monkeypatch.setattr(clip, "ROOT", tmp_path)
    monkeypatch.setenv("MODEL_DIM", "7")  # a user's settings do not reach the runs
    (tmp_path / "stub.py").write_text(STUB.replace("LOG)", f"{LOG!r})").replace("RESULT", repr(RESULT)))

    def run(name: str, rate: float) -> SimpleNamespace:
        settings = {"learning_rate": rate, "qat": 0, "save_every": 0, "seed": 2}
        start = "" if name == "start_seed_2" else "start_seed_2"
        return SimpleNamespace(name=name, script="stub.py", settings=settings, start=start)

    out = tmp_path / "out"
    (out / "b").mkdir(parents=True)  # broken off: no result
    runs = [run("start_seed_2", 0.0), run("a", 3e-4), run("b", 1e-3), run("c", 0.5)]
    found = clip.run_all(runs, out, 2, clip.summarize, clip.tell)
    assert {name: each and each["end"]["pass1"][0] for name, each in found.items()} == {
        "start_seed_2": 0.4, "a": 0.4, "b": 0.4, "c": None}
    said = capsys.readouterr().out
    assert "c: FAILED, exit code 1: error: LEARNING_RATE='0.5': too much;" in said and said.count("[") == 4
    assert "b: pass1 0.250 -> 0.400, clipped: active 0.233, outside 0.400;" in said
    given = json.loads((out / "a" / "env.json").read_text())
    assert given["INIT_FROM"] == str(out / "start_seed_2" / "step_000000") and given["OMP_NUM_THREADS"] == "1"
    assert given["LEARNING_RATE"] == "0.0003" and given["QAT"] == "0" and "MODEL_DIM" not in given
    assert "INIT_FROM" not in json.loads((out / "start_seed_2" / "env.json").read_text())

    times = {name: (out / name / "result.json").stat().st_mtime_ns for name in "ab"}
    again = clip.run_all(runs[:3], out, 2, clip.summarize, clip.tell)
    assert again == {name: found[name] for name in ("start_seed_2", "a", "b")}
    assert {name: (out / name / "result.json").stat().st_mtime_ns for name in "ab"} == times
    assert capsys.readouterr().out == ""
    with pytest.raises(SystemExit, match="a: made with another learning_rate; remove it, or name another --out"):
        clip.run_all([run("a", 2e-4)], out, 1, clip.summarize, clip.tell)
    (tmp_path / "stub.py").write_text("")
    with pytest.raises(SystemExit, match="made with another code"):
        clip.run_all([run("a", 3e-4)], out, 1, clip.summarize, clip.tell)


def test_an_interruption_leaves_no_process(tmp_path, monkeypatch):
    monkeypatch.setattr(clip, "ROOT", tmp_path)
    (tmp_path / "stub.py").write_text("import time\ntime.sleep(60)\n")
    started, start = [], clip.start_run
    monkeypatch.setattr(clip, "start_run", lambda *args: started.append(start(*args)) or started[-1])

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(clip.time, "sleep", interrupt)
    runs = [SimpleNamespace(name=name, script="stub.py", settings={"seed": 1}, start="") for name in "abc"]
    with pytest.raises(KeyboardInterrupt):
        clip.run_all(runs, tmp_path, 2, clip.summarize, clip.tell)
    assert [process.returncode for process in started] == [-9, -9]


def test_the_plot_or_how_to_have_it(tmp_path, monkeypatch):
    rows = clip.fill_rows(*rows_of(SPECS))
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were missing
    assert "pip install matplotlib" in clip.plot(rows, tmp_path / "a.png") and not list(tmp_path.iterdir())
    monkeypatch.undo()
    if importlib.util.find_spec("matplotlib"):
        assert clip.plot(rows, tmp_path / "a.png") == f"plot: {tmp_path / 'a.png'}"
        assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.full
def test_real_runs_of_a_seed_have_one_start(tmp_path):
    """Two arms by the scripts themselves: what they write is read, and they score the same before their first step."""
    tiny = dict(iterations=2, val_loss_every=1, eval_prompts=16, sft_steps=12, group_size=2, mini_batches=2)
    starts, rows = clip.make_plan(1, 8, tiny)
    assert all(clip.run_all(starts, tmp_path, 1, clip.summarize, clip.tell).values())
    found = clip.run_all([row["runs"][0] for row in rows[:2]], tmp_path, 2, clip.summarize, clip.tell)
    assert len(found) == 2 and all(found.values())
    for name, run in found.items():
        assert f"policy: {tmp_path / 'start_seed_1' / 'step_000000'}\n" in (tmp_path / name / "log.txt").read_text()
        assert [step for step, _ in run["curves"]["pass8"]] == [0, 1, 2] and run["bad"] == 0
        assert [step for step, _ in run["curves"]["entropy"]] == [1, 2] and 1 < run["means"]["entropy"] < 6
        assert run["curves"]["outside_by_mini_batch"][0] == [1, 0.0] and len(run["curves"]["active_by_mini_batch"]) == 2
    first = [[run["curves"][name][0] for name in ("length", "reward", "greedy", "pass8")] for run in found.values()]
    assert first[0] == first[1] and first[0][0][1] > 1  # the same samples
