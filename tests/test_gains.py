"""tools/experiments/gains.py: its plan, the rule by which gains hold, means and the table."""

from pathlib import Path

import pytest

from conftest import load_tool

gains = load_tool("experiments/gains")


def gain(*values):
    """Return a gain whose intervals reach 0.04 to both sides."""
    values = [*values, *(0.1, 0.1, 0.1)[len(values) :]]
    ends = [[value, value - 0.04, value + 0.04] for value in values]
    return dict(zip(gains.GAINS, ends, strict=True))


def test_what_holds():
    for numbers, expected in (
        ((0.05,), True),
        ((0.049,), False),
        ((0.2, 0.0), False),
        ((0.2, 0.1, -0.03), True),
        ((0.2, 0.1, -0.031), False),
    ):
        assert gains.holds(gain(*numbers)) is expected


def test_plan_rows_and_table():
    given = {"prompts_per_step": "32"}
    rows = gains.make_plan(["sort"], ["GRPO", "GSPO"], 3, given, True, Path("/o"))
    assert [row.reward for row in rows] == ["task", "task", "random", "random"]
    second = rows[3].runs[1]
    assert (second.name, second.script) == ("gspo_sort_random_seed_2", "train_gspo.py")
    paths = {"train_files": "/o/sort.jsonl", "init_from": "/o/start_sort_seed_2"}
    assert second.settings == {**given, **paths, "reward": gains.CONTROL, "seed": 2}
    greedy = [0.1, 0.2, 0.3, 0.3, 0.01, 0.2, 0.06, 0.0, 0.03, -0.5, -0.6]
    results = {}
    for run in sum((row.runs for row in rows), []):
        figures = {"steps": 200, "total_seconds": 171.4, "before": {"greedy": [0.25, 0.2, 0.3]}}
        results[run.name] = None
        if greedy:
            results[run.name] = {**figures, "gain": gain(greedy[0], 2 * greedy.pop(0))}
    grpo, gspo, coins, failed = gains.fill_rows(rows, results)
    half = 4.303 * 0.1 / 3**0.5
    assert grpo["mean"]["greedy"] == pytest.approx([0.2, 0.2 - half, 0.2 + half], rel=1e-3)
    assert gspo["holds"] == [True, False, True]
    assert coins["share"] == pytest.approx(0.03 / 0.2) and not failed["ended"]
    table = gains.table_rows([grpo, gspo, coins, failed])
    figures = "0.250|+0.100 [+0.060, +0.140]|+0.200 [+0.160, +0.240]"
    assert table[1][:7] == ["sort", "GRPO", "task", 1, *figures.split("|")]
    assert table[12][3:5] == ["mean", "0.15 of the real gain"] and "failed" in table[13]
    assert {len(row) for row in table} == {11}
