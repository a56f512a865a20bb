"""tools/experiments/trl_race.py: what it reads of a run, and its table."""

import subprocess
import sys

import pytest

from conftest import ROOT, load_tool, read_json

race = load_tool("experiments/trl_race")


def test_figures_of_a_run_are_those_of_its_steps():
    """Sampling is tokens over seconds: 256 answers of 10 tokens in 0.1 s, and of 5 in 0.15 s."""
    rows = [
        {"step": 0, "held_out/greedy": 0.4},
        {
            "length": 10,
            "gen_tok_s": 25600,
            "train_tok_s": 4000,
            "zero_variance": 0.75,
            "reward": 0.2,
        },
        {
            "length": 5,
            "gen_tok_s": 8533.3333,
            "train_tok_s": 2000,
            "zero_variance": 0.25,
            "reward": 0.3,
        },
    ]
    assert race.our_figures(rows) == {
        "steps": 2,
        "sampled_tok_s": pytest.approx(256 * 15 / 0.25),
        "updated_tok_s": 3000,
        "trained": 0.5,
        "rewards": [0.2, 0.3],
    }


def figures(greedy, steps, memory):
    speeds = {"sampled_tok_s": 35000.0, "updated_tok_s": 9000.0, "trained": 0.5}
    rewards = [0.25] * 3 + [0.75] * (steps - 3)
    return {
        "greedy": [greedy, 0, 1],
        "steps": steps,
        "memory_mib": memory,
        "rewards": rewards,
        **speeds,
    }


def test_table_has_each_seed_the_means_and_their_ratio():
    seeds = [
        {
            "seed": seed,
            "before": [0.3, 0.2, 0.4],
            "ours": figures(ours, 12, 600.4),
            "trl": figures(theirs, 4, 500.0),
        }
        for seed, ours, theirs in ((1, 0.96, 0.5), (2, 0.90, 0.7))
    ]
    head, *rows = race.race_table(seeds)
    assert head[:4] == ["", "seed", "greedy before", "greedy after"]
    means = ["0.300", "0.930", "12", "0.375", "35,000", "9,000", "0.50", "600"]
    assert rows[0] == ["train_grpo.py", 1, "0.300", "0.960", *means[2:]]
    assert rows[2] == ["train_grpo.py", "mean", *means]
    assert rows[5][:5] == ["TRL's GRPOTrainer", "mean", "0.300", "0.600", "4"]
    assert rows[6] == [
        "ours / TRL",
        "mean",
        "1.00",
        "1.55",
        "3.00",
        "1.00",
        "1.00",
        "1.00",
        "1.00",
        "1.20",
    ]
    # Differences of 0.46 and 0.20: Student's quantile with one degree of freedom is 12.706.
    assert race.difference(seeds) == f"+0.330 +- {12.7062 * 0.13:.3f}"


@pytest.mark.full
def test_a_short_race(tmp_path):
    """Both trainers take steps from one start, and their models are scored."""
    pytest.importorskip("trl", reason="trl is not installed: requirements-full.txt")
    words = "--seconds 3 --seeds 1 --threads 1".split()
    paths = ["--out", tmp_path / "runs", "--write", tmp_path / "race"]
    subprocess.run(
        [sys.executable, ROOT / "tools/experiments/trl_race.py", *words, *paths], check=True
    )
    [seed] = read_json(tmp_path / "race.json")["seeds"]
    for name in ("ours", "trl"):
        assert seed[name]["steps"] > 0 and 0 <= seed[name]["greedy"][0] <= 1
