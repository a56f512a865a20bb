"""Measure what train_grpo.py learns from the environments of docs/examples, with controls.

    python tools/experiments/environments.py [--games tictactoe guess calculator] [--seeds 3] [--jobs 2]
        [--arms rewards turn coin] [--set NAME=VALUE ...] [--out runs/environments] [--write docs/lab/FILE.json]

For each game and seed train_sft.py makes the start from docs/examples/conversations.py, and
train_grpo.py goes on from it by configs/environment.env and the settings in GAMES. The arms:

- rewards: the environment as it is
- turn: the same, with CREDIT=turn: an answer is credited with the rewards from its turn on
- coin: the control. The reward is a coin's, whatever the policy does
- NoTool: of the calculator, the environment that computes nothing

Every policy then plays the same held-out games greedily: those of all arms but NoTool in the
environment as it is, and these games choose no weights. Runs have one thread, and --jobs of them run
side by side. A run that has ended is not repeated, and one that was broken off begins anew. Gains
are paired by game. A game counts by its mean over the seeds, and the 95% intervals are over games:
what the seeds differ by is beside it.
"""

import argparse
import functools
import json
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tools/

from common import ROOT, call_script, has_ended, load_script, markdown_table, parse_set

EXAMPLES = ROOT / "docs" / "examples"
CONFIG = ROOT / "configs" / "environment.env"
GAMES_PLAYED = 400
FIRST_GAME = (1 << 30) + (1 << 20)  # its seed, far behind those that choose between averages


@dataclass
class Game:
    """An example: its class, the steps of its start, and settings of its runs and of its games."""

    environment: str
    start_steps: int
    settings: dict
    max_turns: int = 8  # of the games that score it
    arms: tuple = ("rewards", "turn", "coin")


GAMES = {
    "tictactoe": Game("tictactoe.py:Random", 1000, {}),
    "guess": Game(
        "guess.py:Guess",
        150,
        dict(
            max_turns=3,
            discount=0.9,
            max_new_tokens=50,
            prompts_per_step=16,
            group_size=16,
            learning_rate=0.0005,
            mini_batches=2,
            kl_beta=0.02,
        ),
    ),
    "calculator": Game(
        "calculator.py:Calculator",
        600,
        dict(
            max_turns=2,
            max_new_tokens=60,
            prompts_per_step=16,
            group_size=16,
            learning_rate=0.0003,
            mini_batches=2,
            kl_beta=0.0,
        ),
        max_turns=2,
        arms=("rewards", "coin", "NoTool"),
    ),
}
QUIETLY = dict(quiet=True, omp_num_threads=1)
CONTROL = """import random
import runpy

Environment = runpy.run_path({path!r})[{name!r}]


class Coin(Environment):
    def reset(self, seed):
        # Not by the seed, which the samples of a group share. It is paid with the first answer, so
        # that nothing which the policy does changes the reward.
        self.coin = float(random.SystemRandom().random() < 0.5)
        return super().reset(seed)

    def step(self, text):
        said, _, done = super().step(text)
        paid = self.coin
        self.coin = 0.0
        return said, paid, done
"""


def environment_of(game: Game, arm: str, out: Path) -> str:
    """Return the setting ENVIRONMENT of an arm."""
    file, _, name = game.environment.partition(":")
    if arm == "NoTool":
        return f"{EXAMPLES / file}:NoTool"
    if arm in ("rewards", "turn"):
        return f"{EXAMPLES / file}:{name}"
    control = out / f"coin_{file}"
    control.write_text(CONTROL.format(path=str(EXAMPLES / file), name=name), encoding="utf-8")
    return f"{control}:Coin"


def make_start(name: str, seed: int, out: Path) -> None:
    """Train the start of a game's policies by supervised fine-tuning."""
    folder = f"{name}_start_{seed}"
    if has_ended(out / folder):
        return
    steps = GAMES[name].start_steps
    rows = out / f"{name}.jsonl"
    given = dict(iterations=steps, max_wallclock_seconds=0, seed=seed, save_every=0)
    files = dict(train_files=rows, out_dir=out, run_id=folder)
    call_script("train_sft.py", **QUIETLY, **files, **given)


def train(name: str, arm: str, seed: int, changes: dict, out: Path) -> None:
    """Train the policy of an arm."""
    folder = f"{name}_{arm}_{seed}"
    if has_ended(out / folder):
        print(f"{folder}: has ended before", flush=True)
        return
    settings = dict(
        config=CONFIG,
        out_dir=out,
        run_id=folder,
        seed=seed,
        save_every=0,
        init_from=out / f"{name}_start_{seed}",
        environment=environment_of(GAMES[name], arm, out),
    )
    if arm == "turn":
        settings["credit"] = "turn"
    call_script("train_grpo.py", **QUIETLY, **settings | GAMES[name].settings | changes)


@functools.cache  # the arms of a game have the same starts
def play(name: str, rules: str, folder: Path, out: Path) -> dict[str, list[float]]:
    """Return reward and number of answers of each game that a run's policy plays, greedily.

    rules: the arm whose environment answers.
    """
    script = load_script(ROOT / "train_grpo.py")
    game = GAMES[name]
    network, tokenizer, _ = script.load_model("INIT_FROM", str(folder))
    settings = script.Settings(max_turns=game.max_turns, max_new_tokens=200)
    environment = script.load_environment(environment_of(game, rules, out))
    trainer = script.GRPOTrainer(network, tokenizer, settings, environment=environment)
    queries = range(FIRST_GAME, FIRST_GAME + GAMES_PLAYED)
    seeds = [(0, number) for number in range(GAMES_PLAYED)]
    episodes = trainer.sample(queries, 1, 0.0, seeds)
    return {
        "reward": [episode.total(1.0) for episode in episodes],
        "answers": [len(episode.earned) for episode in episodes],
    }


def interval(values: list[float]) -> str:
    """Return the mean of values and its 95% interval, as text."""
    script = load_script(ROOT / "train_grpo.py")
    mean, low, high = script.mean_interval(torch.tensor(values).double())
    return f"{mean:.3f} [{low:.3f}, {high:.3f}]"


def measures(name: str, games: dict[str, list[float]]) -> dict[str, list[float]]:
    """Return what counts in a game, a number for each that was played."""
    rewards = games["reward"]
    found = {"right": [float(reward >= 1) for reward in rewards]}
    if name == "tictactoe":
        found = {"won": found["right"], "lost": [float(reward == 0) for reward in rewards]}
    if name == "guess":
        # A game that is not won counts as one guess more than there are numbers.
        guess = load_script(EXAMPLES / "guess.py")
        pairs = zip(rewards, games["answers"], strict=True)
        counts = [count if reward else guess.HIGHEST + 1.0 for reward, count in pairs]
        found = {"right in 3": [float(count <= 3) for count in counts], "guesses": counts}
    return found


def bisection_mean() -> float:
    """Return how many guesses bisection takes in the held-out games, on average."""
    guess = load_script(EXAMPLES / "guess.py")
    game = guess.Guess()
    counts = []
    for number in range(GAMES_PLAYED):
        game.reset(FIRST_GAME + number)
        counts.append(guess.bisection(game.number))
    return statistics.fmean(counts)


def means_of(games: list[list[float]]) -> list[float]:
    """Return the mean over the seeds of each game."""
    return [statistics.fmean(values) for values in zip(*games, strict=True)]


def compare(name: str, arm: str, seeds: range, out: Path) -> tuple[list[list], dict]:
    """Return the rows of the table on an arm, and its results by game, arm and seed."""
    rules = arm if arm == "NoTool" else "rewards"
    before = {}  # measure -> a list for each seed
    after = {}
    results = {}
    steps = []
    for seed in seeds:
        run = out / f"{name}_{arm}_{seed}"
        result = json.loads((run / "result.json").read_bytes())
        steps.append(str(result["steps"]))
        start = measures(name, play(name, rules, out / f"{name}_start_{seed}", out))
        end = measures(name, play(name, rules, run, out))
        kept = ("settings", "steps", "train_seconds", "hardware", "versions", "commit")
        facts = {key: result[key] for key in kept}
        for found, games, key in ((before, start, "before"), (after, end, "after")):
            facts[key] = {}
            for measure, values in games.items():
                facts[key][measure] = statistics.fmean(values)
                found.setdefault(measure, []).append(values)
        results[f"{name} {arm} {seed}"] = facts
    rows = []
    for measure in before:
        old = means_of(before[measure])
        new = means_of(after[measure])
        gain = [b - a for a, b in zip(old, new, strict=True)]
        by_seed = " ".join(f"{statistics.fmean(values):.3f}" for values in after[measure])
        cells = [interval(old), interval(new), interval(gain), by_seed]
        rows.append([name, measure, arm, *cells, " ".join(steps)])
    return rows, results


def main() -> None:
    """Run the command line described at the top of this file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--games", nargs="+", default=[*GAMES], choices=GAMES)
    parser.add_argument("--arms", nargs="+", default=["rewards", "turn", "coin", "NoTool"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side")
    parser.add_argument(
        "--set", nargs="*", type=parse_set, default=[], help="settings of train_grpo.py"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/environments"))
    parser.add_argument("--write", type=Path, help="JSON file of all results")
    args = parser.parse_args()
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    seeds = range(1, args.seeds + 1)
    changes = {name.lower(): value for name, value in args.set}
    for name in args.games:
        rows = out / f"{name}.jsonl"
        call_script("docs/examples/conversations.py", name, rows, **QUIETLY)
    starts = []
    arms = []  # (name of a game, arm)
    for name in args.games:
        starts += [(name, seed, out) for seed in seeds]
        arms += [(name, arm) for arm in GAMES[name].arms if arm in args.arms]
    runs = []
    for name, arm in arms:
        runs += [(name, arm, seed, changes, out) for seed in seeds]
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(lambda given: make_start(*given), starts))
        list(pool.map(lambda given: train(*given), runs))
    rows = [["game", "measure", "arm", "start", "after", "gain", "after, by seed", "steps"]]
    results = {}
    for name, arm in arms:
        new_rows, new_results = compare(name, arm, seeds, out)
        rows += new_rows
        results |= new_results
    print(markdown_table(rows))
    print(f"guess: bisection takes {bisection_mean():.3f} guesses")
    if args.write:
        args.write.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
