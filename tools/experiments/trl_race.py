"""Race train_grpo.py against TRL's GRPOTrainer: one start, one problem, equal seconds, in turn.

    PYTHONPATH=/path/to/trl python tools/experiments/trl_race.py [--seconds 150] [--seeds 3] [--write docs/lab/trl_race]

It needs trl beside what `./test.sh full` needs. A network in Llama's layout is made by transformers,
imported, trained on `sort` by train_sft.py for a fixed number of steps, and exported again: one
start, which both trainers read. Both then train it for the same seconds on the same problems in the
same order, with the same samples per prompt, updates, loss, clip, rate, temperature, reward and
threads; SETTINGS has the values. sample.py scores the start and both results on the same held-out
prompts. Runs are subprocesses, one after the other; who is first alternates by seed.

What is compared: TRL generates by transformers' plain `generate`, without vLLM, which has no use on
a CPU. train_grpo.py leaves answers without an advantage out of its updates, and TRL does not; so
`trained` is the share of tokens that updates are made of. A step is PROMPTS_PER_STEP prompts with
their answers and all updates by them. Peak memory is the process's, libraries included; train_grpo.py's
also has its scores before and after. A run that has ended is not repeated.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tools/

from common import (
    ROOT,
    available_cores,
    half_width,
    inherited_environment,
    load_script,
    markdown_table,
)

TASK = "sort"
# Of both trainers; a new network's weights change fast, so there are neither averages nor QAT.
SETTINGS = {
    "prompts_per_step": 32,
    "group_size": 8,
    "mini_batches": 4,
    "epochs": 1,
    "max_new_tokens": 16,
    "temperature": 1.0,
    "reduction": "dapo",
    "left_clip_range": 0.2,
    "right_clip_range": 0.28,
    "learning_rate": 3e-4,
    "grad_clip_norm": 1.0,
}
OURS_ALONE = {
    "reserve_seconds": 0,
    "lr_schedule": "constant",
    "warmup_frac": 0,
    "warmdown_frac": 0,
    "ema": 0,
    "swa": 0,
    "qat": 0,
}
NAMES = {"ours": "train_grpo.py", "trl": "TRL's GRPOTrainer"}


@dataclass
class Race:
    """What all runs of a race share."""

    out: Path  # folder of the runs
    seconds: float  # of training
    threads: int
    dim: int  # of the network
    start_steps: int  # of train_sft.py

    def environment(self, **settings) -> dict[str, str]:
        """Return the environment of a script with these settings."""
        environ = inherited_environment() | {"OMP_NUM_THREADS": str(self.threads)}
        return environ | {name.upper(): str(value) for name, value in settings.items()}


def run_measured(words: list, environ: dict[str, str], log: Path) -> float:
    """Run a Python script; return its peak memory in MiB. Raises SystemExit if it fails."""
    print(*words, flush=True)
    with open(log, "wb") as file:
        command = [sys.executable, *map(str, words)]
        process = subprocess.Popen(command, env=environ, cwd=ROOT, stdout=file, stderr=file)
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        lines = log.read_text(errors="replace").strip().splitlines() or ["nothing was printed"]
        raise SystemExit(f"error: {words[0]}: exit code {process.returncode}; {lines[-1]}; {log}")
    return usage.ru_maxrss / 1024


# -------------------------------------------------------------------------------------------- runs
def make_start(race: Race, seed: int) -> Path:
    """Return the folder of a seed's start, in transformers' form; beside it is the run."""
    run = race.out / f"start_{seed}"
    exported = race.out / f"start_{seed}_hf"
    if exported.exists():
        return exported
    import torch
    import transformers

    tokenizer = load_script(ROOT / "train_sft.py").load_tokenizer("bytes")
    torch.manual_seed(seed)
    shape = transformers.LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        bos_token_id=tokenizer.bos_id,
        hidden_size=race.dim,
        intermediate_size=int(2.75 * race.dim),
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        rms_norm_eps=1e-6,
    )
    new = race.out / f"new_{seed}"
    transformers.LlamaForCausalLM(shape).save_pretrained(new)
    convert(race, "import", new, race.out / f"imported_{seed}")
    given = {
        "out_dir": race.out,
        "run_id": run.name,
        "device": "cpu",
        "init_from": race.out / f"imported_{seed}",
        "train_files": race.out / f"{TASK}.jsonl",
        "seed": seed,
        "iterations": race.start_steps,
        "max_wallclock_seconds": 0,
        "learning_rate": 0.003,  # of a new network; an imported one has another default
    }
    run_measured(["train_sft.py"], race.environment(**given), race.out / f"{run.name}.txt")
    convert(race, "export", run / "final", exported)
    return exported


def convert(race: Race, *words) -> None:
    """Import or export a model, see convert.py."""
    environ = race.environment(tokenizer_path="bytes")
    run_measured(["convert.py", *words], environ, race.out / "convert.txt")


def score(race: Race, model: Path) -> list[float]:
    """Return the share of held-out prompts that a model answers rightly, greedily, with its interval."""
    path = race.out / f"{model.parent.name}_{model.name}.json"
    given = {
        "artifact": model,
        "mode": "score",
        "score": "task",
        "score_path": race.out / f"{TASK}.jsonl",
        "score_file": path,
        "device": "cpu",
        "held_out": 1,
        "max_new_tokens": SETTINGS["max_new_tokens"],
    }
    run_measured(["sample.py"], race.environment(**given), path.with_suffix(".txt"))
    [scores] = json.loads(path.read_bytes())["scores"].values()
    return scores["greedy"]


def run_ours(race: Race, start: Path, seed: int, folder: Path) -> dict:
    """Train by train_grpo.py; return its figures."""
    given = SETTINGS | OURS_ALONE
    given |= {
        "out_dir": race.out,
        "run_id": folder.name,
        "device": "cpu",
        "init_from": race.out / f"start_{seed}" / "final",
        "train_files": race.out / f"{TASK}.jsonl",
        "seed": seed,
        "max_wallclock_seconds": race.seconds,
    }
    log = race.out / f"{folder.name}.txt"
    memory = run_measured(["train_grpo.py"], race.environment(**given), log)
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return our_figures([json.loads(line) for line in lines]) | {
        "memory_mib": memory,
        "greedy": score(race, folder / "final"),
    }


def our_figures(rows: list[dict]) -> dict:
    """Return steps, tokens a second and the share of trained tokens, of rows of metrics.jsonl."""
    rows = [row for row in rows if "gen_tok_s" in row]
    answers = SETTINGS["prompts_per_step"] * SETTINGS["group_size"]
    tokens = [answers * row["length"] for row in rows]
    sampling = sum(count / row["gen_tok_s"] for count, row in zip(tokens, rows, strict=True))
    return {
        "steps": len(rows),
        "sampled_tok_s": sum(tokens) / sampling,
        "updated_tok_s": statistics.fmean(row["train_tok_s"] for row in rows),
        "trained": statistics.fmean(1 - row["zero_variance"] for row in rows),
        "rewards": [row["reward"] for row in rows],
    }


def run_trl(race: Race, start: Path, seed: int, folder: Path) -> dict:
    """Train by TRL, in a process of its own; return its figures."""
    folder.mkdir(exist_ok=True)
    order = {"seconds": race.seconds, "seed": seed, "threads": race.threads}
    order |= {
        "start": str(start),
        "folder": str(folder),
        "problems": str(race.out / f"{TASK}.jsonl"),
    }
    (folder / "order.json").write_text(json.dumps(order))
    words = [Path(__file__).resolve(), "--trl", folder / "order.json"]
    log = race.out / f"{folder.name}.txt"
    memory = run_measured(words, race.environment(), log)
    convert(race, "import", folder / "hf", folder / "imported")
    figures = json.loads((folder / "figures.json").read_bytes())
    return figures | {"memory_mib": memory, "greedy": score(race, folder / "imported")}


# --------------------------------------------------------------------------------------------- TRL
def trl_config(order: dict, script: ModuleType):
    """Return GRPOConfig with the values of SETTINGS, and those of train_grpo.py's optimizer."""
    import trl

    samples = SETTINGS["prompts_per_step"] * SETTINGS["group_size"]
    return trl.GRPOConfig(
        output_dir=order["folder"],
        seed=order["seed"],
        shuffle_dataset=False,  # split_problems has shuffled them
        per_device_train_batch_size=samples // SETTINGS["mini_batches"],
        steps_per_generation=SETTINGS["mini_batches"],
        num_iterations=SETTINGS["epochs"],
        num_generations=SETTINGS["group_size"],
        max_completion_length=SETTINGS["max_new_tokens"],
        temperature=SETTINGS["temperature"],
        loss_type=SETTINGS["reduction"],
        epsilon=SETTINGS["left_clip_range"],
        epsilon_high=SETTINGS["right_clip_range"],
        learning_rate=SETTINGS["learning_rate"],
        max_grad_norm=SETTINGS["grad_clip_norm"],
        adam_beta1=script.ADAM_BETAS[0],
        adam_beta2=script.ADAM_BETAS[1],
        adam_epsilon=script.ADAM_EPS,
        lr_scheduler_type="constant",
        max_steps=10**6,  # the clock ends it
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,  # TRL's default recomputes activations, which takes longer
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
    )


def timed_trainer(seconds: float) -> type:
    """Return GRPOTrainer with a clock, which ends it behind a whole step when the time is over.

    `spent` has the seconds of generation and of rewards, `sampled` the tokens and `rewards` the
    mean reward of each step.
    """
    import transformers
    import trl

    updates = SETTINGS["mini_batches"] * SETTINGS["epochs"]  # of a step

    class Trainer(trl.GRPOTrainer):
        def __init__(self, **options):
            super().__init__(**options, callbacks=[stop])
            self.spent = {"generation": 0.0, "rewards": 0.0}
            self.sampled = []
            self.rewards = []

        def _generate(self, prompts):
            begin = time.perf_counter()
            generated = super()._generate(prompts)
            self.spent["generation"] += time.perf_counter() - begin
            self.sampled.append(sum(map(len, generated[1])))
            return generated

        def _calculate_rewards(self, *args):
            begin = time.perf_counter()
            rewards = super()._calculate_rewards(*args)
            self.spent["rewards"] += time.perf_counter() - begin
            self.rewards.append(rewards.mean().item())
            return rewards

        def figures(self):
            trained = stop.elapsed - sum(self.spent.values())
            return {
                "version": f"TRL {trl.__version__}, transformers {transformers.__version__}",
                "steps": self.state.global_step // updates,
                "sampled_tok_s": sum(self.sampled) / self.spent["generation"],
                "updated_tok_s": sum(self.sampled) * SETTINGS["epochs"] / trained,
                "trained": 1.0,
                "rewards": self.rewards,
            }

    class Stop(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, **others):
            self.begin = time.perf_counter()

        def on_step_end(self, args, state, control, **others):
            self.elapsed = time.perf_counter() - self.begin
            is_whole = state.global_step % updates == 0
            control.should_training_stop = is_whole and self.elapsed > seconds

    stop = Stop()
    return Trainer


def train_trl(order: dict) -> None:
    """Train by TRL in this process, see run_trl; write the weights to `hf`, and figures.json."""
    import datasets
    import torch
    import transformers

    torch.set_num_threads(order["threads"])
    folder = Path(order["folder"])
    script = load_script(ROOT / "train_grpo.py")
    given = dict(train_files=order["problems"], seed=order["seed"], ema=False, swa=False)
    problems, _, _ = script.split_problems(script.Settings(**given))
    rows = [
        {"prompt": [{"role": "user", "content": problem["prompt"]}], "answer": problem["answer"]}
        for problem in problems
    ]

    def exact(completions, answer, **columns):
        return script.exact_match([], completions, answer)

    tokenizer = transformers.AutoTokenizer.from_pretrained(order["start"], trust_remote_code=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(order["start"])
    trainer = timed_trainer(order["seconds"])(
        model=model,
        args=trl_config(order, script),
        reward_funcs=exact,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    trainer.train()
    model.save_pretrained(folder / "hf")
    (folder / "figures.json").write_text(json.dumps(trainer.figures()))


# ------------------------------------------------------------------------------------------- table
COLUMNS = {
    "greedy before": "{:.3f}",
    "greedy after": "{:.3f}",
    "steps": "{:,.0f}",
    "reward, equal steps": "{:.3f}",
    "sampled tokens/s": "{:,.0f}",
    "updated tokens/s": "{:,.0f}",
    "trained": "{:.2f}",
    "peak memory, MiB": "{:,.0f}",
}


def table_row(seed: dict, name: str) -> list[float]:
    """Return the numbers of a run, in the order of COLUMNS.

    The reward is the mean of training over the steps that both runs of the seed took.
    """
    figures = seed[name]
    steps = min(seed["ours"]["steps"], seed["trl"]["steps"])
    reward = statistics.fmean(figures["rewards"][:steps])
    names = ("sampled_tok_s", "updated_tok_s", "trained", "memory_mib")
    measured = (figures[name] for name in names)
    return [seed["before"][0], figures["greedy"][0], figures["steps"], reward, *measured]


def race_table(seeds: list[dict]) -> list[list]:
    """Return the rows of the table: both trainers by seed, their means, and how often ours has TRL's.

    seeds: of each seed `before`, a score, and the figures of `ours` and `trl`.
    """
    lines = [["", "seed", *COLUMNS]]
    means = {}
    for name, title in NAMES.items():
        rows = [table_row(seed, name) for seed in seeds]
        for seed, row in zip(seeds, rows, strict=True):
            lines.append([title, seed["seed"], *formatted(row)])
        means[name] = [statistics.fmean(column) for column in zip(*rows, strict=True)]
        lines.append([title, "mean", *formatted(means[name])])
    ratios = []
    for ours, theirs in zip(means["ours"], means["trl"], strict=True):
        ratios.append(f"{ours / theirs:.2f}" if theirs else "")
    return [*lines, ["ours / TRL", "mean", *ratios]]


def formatted(row: list[float]) -> list[str]:
    """Return the numbers of a row as COLUMNS shows them."""
    return [form.format(value) for form, value in zip(COLUMNS.values(), row, strict=True)]


def difference(seeds: list[dict]) -> str:
    """Return the difference of the scores after training, ours less TRL's, with its interval."""
    values = [seed["ours"]["greedy"][0] - seed["trl"]["greedy"][0] for seed in seeds]
    return f"{statistics.fmean(values):+.3f} +- {half_width(values):.3f}"


# -------------------------------------------------------------------------------------------- main
RUNNERS = {"ours": run_ours, "trl": run_trl}


def run_seed(race: Race, seed: int) -> dict:
    """Return the score of a seed's start, and the figures of both trainers; run what has not ended."""
    path = race.out / f"seed_{seed}.json"
    figures = {"seed": seed}
    if path.exists():
        figures = json.loads(path.read_bytes())
    start = make_start(race, seed)
    if "before" not in figures:
        figures["before"] = score(race, race.out / f"start_{seed}" / "final")
    order = [*RUNNERS] if seed % 2 else [*reversed(RUNNERS)]
    for name in order:
        if name not in figures:
            folder = race.out / f"{name}_{seed}"
            figures[name] = RUNNERS[name](race, start, seed, folder)
            path.write_text(json.dumps(figures))
            print(f"{folder.name}: {figures[name]}", flush=True)
    return figures


def main() -> None:
    """Run the race; print and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=150.0, help="of training, each run (150)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(available_cores()))
    parser.add_argument("--dim", type=int, default=64, help="width of the network (64)")
    parser.add_argument(
        "--start-steps", type=int, default=110, help="of train_sft.py: right now and then (110)"
    )
    parser.add_argument("--out", type=Path, default=Path("runs", "trl_race"), help="of the runs")
    parser.add_argument("--write", type=Path, help="file names without suffix; else OUT/race")
    parser.add_argument("--trl", type=Path, help=argparse.SUPPRESS)  # see run_trl
    args = parser.parse_args()
    if args.trl:
        train_trl(json.loads(args.trl.read_bytes()))
        return
    race = Race(args.out.resolve(), args.seconds, args.threads, args.dim, args.start_steps)
    race.out.mkdir(parents=True, exist_ok=True)
    words = ["data/tasks.py", TASK, "--pairs", "0", "--out", race.out]
    run_measured(words, race.environment(), race.out / "problems.txt")
    seeds = [run_seed(race, seed) for seed in range(1, args.seeds + 1)]
    text = markdown_table(race_table(seeds)) + (
        f"\n\n`{TASK}`, {args.seconds:g} s of training each, {args.threads} threads, width {args.dim}; "
        f"{seeds[0]['trl']['version']}. Greedy after, ours less TRL's: {difference(seeds)} (95%, "
        f"over {len(seeds)} seeds).\n"
    )
    print(text)
    path = args.write or race.out / "race"
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    content = {"settings": SETTINGS, "ours_alone": OURS_ALONE, "seeds": seeds}
    content |= {name: getattr(race, name) for name in ("seconds", "threads", "dim", "start_steps")}
    path.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")
    print(f"written: {path.with_suffix('.md')} and .json")


if __name__ == "__main__":
    main()
