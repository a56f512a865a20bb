"""tools/gains.py: its plan, the rule by which gains hold, means, the control's share and the table, by values."""

from pathlib import Path

import pytest
from conftest import load_tool

ROOT = Path(__file__).resolve().parents[1]
gains = load_tool("gains")


def gain(greedy: float, over: float = 0.1, pass8: float = 0.1, half: float = 0.04) -> dict:
    values = {"greedy": greedy, "pass1": 2 * greedy, "pass1_over_best": over, "pass8": pass8}
    return {name: [value, value - half, value + half] for name, value in values.items()}


def run(*numbers: float) -> dict:
    return {"before": {"greedy": [0.25, 0.2, 0.3]}, "gain": gain(*numbers), "steps": 200, "total_seconds": 171.4}


def test_plan():
    rows = gains.make_plan(["sort", "add"], ["GRPO", "GSPO"], 2, {"model_dim": "32"}, True)
    assert [(row["task"], row["name"], row["reward"]) for row in rows] == [
        (task, name, reward) for task in ("sort", "add") for reward in ("", "random") for name in ("GRPO", "GSPO")]
    one = rows[3]["runs"][1]
    assert (one.name, one.script, one.start) == ("gspo_sort_random_seed_2", "train_gspo.py", "")
    assert one.settings == {"model_dim": "32", "task": "sort", "reward": "random", "seed": 2}
    assert "reward" not in rows[0]["runs"][0].settings
    assert len({each.name for row in rows for each in row["runs"]}) == 16
    assert len(gains.make_plan(["sort"], ["PPO", "GRPO"], 3, {}, False)) == 2


@pytest.mark.parametrize(("numbers", "wanted"), [
    ((0.05,), True), ((0.049,), False), ((0.06, 0.1, 0.1, 0.06), False), ((0.2, 0.0), False), ((0.2, 1e-9), True),
    ((0.2, 0.1, -0.03), True), ((0.2, 0.1, -0.031), False)], ids=str)
def test_what_holds(numbers, wanted):
    assert gains.holds(gain(*numbers)) is wanted


def test_rows_and_table():
    rows = gains.make_plan(["sort"], ["GRPO", "GSPO"], 3, {}, True)
    found = dict(zip([each.name for row in rows for each in row["runs"]],
                     [run(0.1), run(0.2), run(0.3), run(0.3), run(0.01), run(0.2),
                      run(0.06), run(0.0), run(0.03), run(-0.5), run(-0.6), None], strict=True))
    grpo, gspo, coins, failed = gains.fill_rows(rows, found)
    half = 4.303 * 0.1 / 3**0.5
    assert grpo["mean"]["greedy"] == pytest.approx([0.2, 0.2 - half, 0.2 + half])
    assert grpo["holds"] == [True] * 3 and gspo["holds"] == [True, False, True]
    assert coins["share"] == pytest.approx(0.03 / 0.2) and "share" not in grpo
    assert not failed["ended"] and "mean" not in failed
    worse = gains.fill_rows(rows[:3], {**found, **{each.name: run(-0.4) for each in rows[2]["runs"]}})[2]
    assert worse["share"] == 0.0
    table = gains.markdown([grpo, gspo, coins, failed], "`command`\n").splitlines()
    assert table[4] == ("| sort | GRPO | task | 1 | 0.250 | +0.100 [+0.060, +0.140] | +0.200 [+0.160, +0.240] | "
                        "+0.100 [+0.060, +0.140] | +0.100 [+0.060, +0.140] | yes | 200 | 171 |")
    assert table[7].startswith(f"| sort | GRPO | task | mean |  | +0.200 [{0.2 - half:+.3f}, {0.2 + half:+.3f}]")
    assert "| mean | 0.15 of the real gain |" in table[15] and "failed" in table[16] and len(table) == 17
    assert len({line.count("|") for line in table[2:]}) == 1


def test_setting_of_every_run():
    assert gains.parse_set("MODEL_DIM=32") == ("model_dim", "32")
    with pytest.raises(gains.argparse.ArgumentTypeError):
        gains.parse_set("MODEL_DIM")
