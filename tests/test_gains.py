"""tools/experiments/gains.py: its plan, the rule by which gains hold, means and the table."""

import pytest

from conftest import load_tool

gains = load_tool("experiments/gains")


def gain(greedy: float, over: float = 0.1, pass8: float = 0.1) -> dict:
    """A gain whose intervals reach 0.04 to both sides."""
    values = {"greedy": greedy, "pass1": 2 * greedy, "pass1_over_best": over, "pass8": pass8}
    return {name: [value, value - 0.04, value + 0.04] for name, value in values.items()}


def run(greedy: float) -> dict:
    figures = {"steps": 200, "total_seconds": 171.4, "before": {"greedy": [0.25, 0.2, 0.3]}}
    return {**figures, "gain": gain(greedy)}


@pytest.mark.parametrize(
    ("numbers", "wanted"),
    [
        ((0.05,), True),
        ((0.049,), False),
        ((0.2, 0.0), False),
        ((0.2, 0.1, -0.03), True),
        ((0.2, 0.1, -0.031), False),
    ],
    ids=str,
)
def test_what_holds(numbers, wanted):
    assert gains.holds(gain(*numbers)) is wanted


def test_plan_rows_and_table():
    rows = gains.make_plan(["sort"], ["GRPO", "GSPO"], 3, {"model_dim": "32"}, True)
    assert [(row.script, row.reward) for row in rows] == [
        ("GRPO", ""),
        ("GSPO", ""),
        ("GRPO", "random"),
        ("GSPO", "random"),
    ]
    second = rows[3].runs[1]
    assert (second.name, second.script) == ("gspo_sort_random_seed_2", "train_gspo.py")
    settings = {"model_dim": "32", "task": "sort", "reward": "random", "seed": 2}
    assert second.settings == settings
    greedy = [0.1, 0.2, 0.3, 0.3, 0.01, 0.2, 0.06, 0.0, 0.03, -0.5, -0.6]
    results = {}
    for row in rows:
        for planned in row.runs:
            results[planned.name] = run(greedy.pop(0)) if greedy else None
    grpo, gspo, coins, failed = gains.fill_rows(rows, results)
    half = 4.303 * 0.1 / 3**0.5
    assert grpo["mean"]["greedy"] == pytest.approx([0.2, 0.2 - half, 0.2 + half], rel=1e-3)
    assert gspo["holds"] == [True, False, True]
    assert coins["share"] == pytest.approx(0.03 / 0.2) and not failed["ended"]
    table = gains.table_rows([grpo, gspo, coins, failed])
    figures = "0.250|+0.100 [+0.060, +0.140]|+0.200 [+0.160, +0.240]"
    assert table[1][:7] == ["sort", "GRPO", "task", 1, *figures.split("|")]
    assert table[12][3:5] == ["mean", "0.15 of the real gain"] and "failed" in table[13]
    assert {len(row) for row in table} == {12}
