"""Whole runs of train_grpo.py and train_gspo.py, tiny: what they leave, resume, repeat and refuse; the guide."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import sentencepiece
import torch

import sample as P
import train_grpo as G
from conftest import KEPT, Child

ROOT = Path(__file__).resolve().parents[1]
TINY = {
    "DEVICE": "cpu",
    "LAYER_PATTERN": "g a",
    "MODEL_DIM": "32",
    "NUM_HEADS": "2",
    "SFT_STEPS": "20",
    "TEMPERATURE": "1",
    "TASK": "jsonl",
    "PROMPTS_PER_STEP": "4",
    "GROUP_SIZE": "4",
    "MINI_BATCHES": "2",
    "MAX_NEW_TOKENS": "3",
    "EVAL_PROMPTS": "16",
    "ITERATIONS": "10",
    "MAX_WALLCLOCK_SECONDS": "0",
    "RESERVE_SECONDS": "0",
    "SAVE_EVERY": "4",
    "LEARNING_RATE": "0.003",
}
SHORT = {"ITERATIONS": "2", "EMA": "0", "SWA": "0", "QAT": "0", "SAVE_EVERY": "1"}
UNSET = dict.fromkeys(
    [*TINY, "TASK_PATH", "RUN_ID"]
)  # what a run takes from the one it resumes or repeats
SCRIPTS = ("grpo", "gspo")

# Forks a process for each line of its input, as test_lasting's does: to import torch takes longer than a run.
SERVER = """
import json, os, sys, traceback
sys.path.insert(0, sys.argv[1])
import numpy, torch
import torch._dynamo
import train_grpo, train_gspo, train_ppo, train_sft

for line in sys.stdin:
    order = json.loads(line)
    if "poll" in order:
        done, status = os.waitpid(order["poll"], os.WNOHANG)
        print(json.dumps(os.waitstatus_to_exitcode(status) if done else None), flush=True)
        continue
    child = os.fork()
    if child:
        print(child, flush=True)
        continue
    os.setsid()
    for number, path in ((1, order["out"]), (2, order["err"])):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    name = order["env"].pop("SCRIPT")
    T = sys.modules[f"train_{name}"]
    T.SFT_LR = 0.4  # a warm start that gets a fifth right
    os.environ.clear()
    os.environ.update(order["env"])
    sys.argv = [T.__file__]
    T.SFT_LR = 0.4  # so that 20 steps of the warm start suffice
    T.EVAL_SAMPLES = 2
    T.REWARD_SECONDS = 1
    torch.seed()  # a fresh process has a seed of its own
    try:
        exec(order["patch"], {"T": T, "Trainer": getattr(T, f"{name.upper()}Trainer")})
        code = T.exit_code(T.main)
    except BaseException:
        traceback.print_exc()
        code = 99
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
"""
# Sends SIGTERM in the middle of a step, between its rollout and its updates.
STOPPED = """
import os, signal, time
update, calls = Trainer.update, []
def stopped(self, rollout, multiplier):
    calls.append(0)
    if len(calls) == 6:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.3)
    return update(self, rollout, multiplier)
Trainer.update = stopped
"""
# Writes the exact metrics of each step to METRICS.<rank>.
RECORDED = """
import json, os
update = Trainer.update
def recorded(self, rollout, multiplier):
    found = update(self, rollout, multiplier)
    with open(f"{METRICS}.{os.environ.get('RANK', 0)}", "a") as file:
        print(json.dumps({**rollout.metrics, **found}), file=file)
    return found
Trainer.update = recorded
"""
REWARDS = """
import time
calls = 0

def score(prompts, completions, answers):
    return [0.5 * (text.count("x") + text.count("y")) for text in completions]

def nothing(prompts, completions, answers):
    return [0.0] * len(prompts)

def third(wrong):
    def reward(prompts, completions, answers):
        global calls
        calls += 1
        return wrong() if calls == 3 else score(prompts, completions, answers)
    return reward

raises = third(lambda: {}["no such key"])
hangs = third(lambda: time.sleep(60))
nan = third(lambda: [float("nan")] * 16)
few = third(lambda: [0.0] * 15)
"""


class Place:
    """A folder with a task, rewards, and the runs of the tests, each in <out>/run of it."""

    tiny, rows = (
        TINY,
        ("TASK_PATH", "task.jsonl"),
    )  # settings of all runs, and which of them names a file, and it

    def __init__(self, folder: Path):
        self.folder, self.count = folder, 0
        words = [sys.executable, "-c", SERVER, str(ROOT)]
        self.server = subprocess.Popen(
            words, env=self.environment(), text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def environment(self, **changes: object) -> dict[str, str]:
        """`tiny` and `changes`; None leaves a setting out."""
        kept = {name: os.environ[name] for name in KEPT if name in os.environ}
        name, file = self.rows
        settings = {
            **self.tiny,
            name: str(self.folder / file),
            **{k: str(v) for k, v in changes.items()},
        }
        return {
            **kept,
            "OMP_NUM_THREADS": "1",
            **{name: text for name, text in settings.items() if text != "None"},
        }

    def begin(self, script: str, out: str, patch: str = "", **changes: object) -> Child:
        self.count += 1
        environ = self.environment(**{"OUT_DIR": self.folder / out, "RUN_ID": "run", **changes})
        return Child(
            self.server, self.folder, f"{out}_{self.count}", patch, {**environ, "SCRIPT": script}
        )

    def run(
        self, script: str, out: str, patch: str = "", code: int = 0, **changes: object
    ) -> Child:
        """A run from beginning to end, which must have this exit code."""
        child = self.begin(script, out, patch, **changes)
        assert child.wait() == code, child.out[-800:] + child.err[-2000:]
        assert "Traceback" not in child.err, child.err
        return child

    def refused(self, script: str, out: str, code: int = 2, **changes: object) -> str:
        """The one line on stderr of a run that ends so."""
        err = self.run(script, out, "", code, **changes).err
        assert re.fullmatch(r"error: .+\n", err), err
        return err

    def ranks(self, script: str, out: str, patch: str, ranks: int, **changes: object) -> None:
        """A run on gloo ranks."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        shared = {"WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        children = [
            self.begin(script, out, patch, **shared, RANK=rank, LOCAL_RANK=rank, **changes)
            for rank in range(ranks)
        ]
        assert [child.wait() for child in children] == [0] * ranks, (
            children[0].err[-2000:] + children[-1].err[-2000:]
        )

    def of(self, out: str) -> Path:
        return self.folder / out / "run"

    def log(self, out: str) -> str:
        """Behind the script's source."""
        return (
            (self.of(out) / "log.txt").read_text(encoding="utf-8").rpartition("=" * 120 + "\n")[2]
        )

    def result(self, out: str) -> dict:
        return json.loads((self.of(out) / "result.json").read_text())

    def artifact(self, out: str) -> bytes:
        return (self.of(out) / "model.upar").read_bytes()

    def same(self, out: str, other: str) -> None:
        """Asserts that two runs ended in the same policy, to the byte, with the same scores and phases."""
        assert self.artifact(out) == self.artifact(other)
        for key in ("before", "after", "gain", "steps", "weights", "phases"):
            assert self.result(out)[key] == self.result(other)[key], key

    def checkpoint(self, out: str) -> tuple[str, dict]:
        """The newest whole checkpoint of a run: name, tensors."""
        found, faults = G.newest_checkpoint(self.of(out))
        assert found and not faults, faults
        return found.name, torch.load(found / "model.pt", weights_only=True)


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """The task: of two letters, whether the first is before k (x) or not (y); a tiny policy gets it right at times."""
    folder, letters = tmp_path_factory.mktemp("rl"), "abcdefghijklmnopqrst"
    rows = [{"prompt": a + b, "answer": "x" if a < "k" else "y"} for a in letters for b in letters]
    (folder / "task.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(REWARDS)
    made = Place(folder)
    yield made
    made.server.stdin.close()
    made.server.wait(10)


@pytest.fixture(scope="session", params=SCRIPTS)
def straight(request, place: Place) -> str:
    """A run without faults, which others are compared with; the name of script and folder."""
    child = place.run(request.param, request.param)
    assert child.err == ""
    return request.param


@pytest.fixture(scope="session")
def grpo(place: Place) -> Path:
    """The folder of a run of train_grpo.py to start others from."""
    place.run("grpo", "first")
    return place.of("first")


def steps_of(log: str) -> list[dict]:
    """The numbers of each step's line."""
    lines = re.findall(r"^step:\d+/\d+ (reward:.*?) train_time", log, re.MULTILINE)
    return [
        {key: float(value) for key, value in (pair.split(":") for pair in line.split())}
        for line in lines
    ]


# ------------------------------------------------------------------------------------------------------- one whole run
def test_the_result_is_complete_and_agrees_with_the_log(place, straight):
    result, log, run = place.result(straight), place.log(straight), place.of(straight)
    expected = set(
        """
        script run_id seed commit code_sha256 tokenizer_sha256 settings hardware versions world_size steps train_seconds
        total_seconds peak_memory_mib params artifact artifact_sha256 artifact_bytes code_bytes total_bytes phases
        events before after gain weights
    """.split()
    )
    assert expected - set(result) == set()
    artifact, script = place.artifact(straight), (ROOT / f"train_{straight}.py").read_bytes()
    exact = {
        "script": f"train_{straight}.py",
        "run_id": "run",
        "steps": 10,
        "samples": 160,
        "events": [],
        "seed": 1337,
        "code_sha256": hashlib.sha256(script).hexdigest(),
        "code_bytes": len(script),
        "task": "jsonl",
        "artifact": str(run / "model.upar"),
        "artifact_sha256": hashlib.sha256(artifact).hexdigest(),
        "artifact_bytes": len(artifact),
        "total_bytes": len(artifact) + len(script),
        "world_size": 1,
    }
    assert {key: result[key] for key in exact} == exact
    assert {
        name.upper(): value for name, value in result["settings"].items() if name.upper() in TINY
    } == {name: type(result["settings"][name.lower()])(value) for name, value in TINY.items()}
    ends = log.split("\n---\n")[1].splitlines()
    assert ends == [
        f"{key}: {value}" for key, value in result.items() if not isinstance(value, dict)
    ]
    columns = [result[key] for key in ("before", "after", "gain")]
    for name in ("greedy", "pass1", "pass2"):
        row = " +".join(r"{:.3f} \[{:.3f}, {:.3f}\]".format(*scores[name]) for scores in columns)
        assert re.search(rf"^ +{name} +{row}$", log, re.MULTILINE), row
    steps = steps_of(log)
    assert len(steps) == 10
    logged = {name: value for name, value in steps[-1].items() if not re.search(r"_\d+$", name)}
    assert {name: result["last"][name] for name in logged} == pytest.approx(
        logged, rel=1e-3, abs=1e-9
    )


def test_all_phases_fired_where_the_plan_says(place, straight):
    phases = place.result(straight)["phases"]
    assert {name: (phase["start_step"], phase["steps"]) for name, phase in phases.items()} == {
        "warmup": (1, 1),
        "warmdown": (8, 3),
        "ema": (9, 2),
        "qat": (9, 2),
        "swa": (9, 2),
    }
    assert all(phase["start_progress"] >= phase["begin"] for phase in phases.values())
    assert "NEVER FIRED" not in place.log(straight)


def test_scores_are_shares_with_their_intervals(place, straight):
    """Of 16 problems, with 2 samples each; the ends by the normal approximation, from 0 to 1, the gain by pairs."""
    result = place.result(straight)
    for scores in (result["before"], result["after"]):
        assert (
            scores["n"] == 16
            and 0 < scores["pass1"][0] < 1
            and scores["pass2"][0] >= scores["pass1"][0]
        )
        for name, unit in (("greedy", 16), ("pass1", 32), ("pass2", 16)):
            mean, low, high = scores[name]
            assert mean * unit == pytest.approx(round(mean * unit), abs=1e-9)
            half = (
                1.96 * (mean * (1 - mean) / 15) ** 0.5
                if unit == 16
                else max(high - mean, mean - low)
            )
            assert [low, high] == pytest.approx(
                [max(0, mean - half), min(1, mean + half)], abs=1e-12
            )
    for name in ("greedy", "pass1", "pass2"):
        mean, low, high = result["gain"][name]
        assert mean == pytest.approx(
            result["after"][name][0] - result["before"][name][0], abs=1e-12
        )
        assert low <= mean <= high
    assert result["gain"]["pass1_over_best"][0] <= result["gain"]["pass1"][0]


def test_the_file_alone_gives_the_greedy_score(place, straight):
    """sample.py's load_model and, token by token, whole forwards without a cache: another way to the same answers."""
    network, tokenizer, _ = P.load_model("ARTIFACT", str(place.of(straight)))
    task, right = G.make_task("jsonl", str(place.folder / "task.jsonl"), 1337), []
    for problem in task.held_out(16):
        ids, end = P.chat_ids(tokenizer, problem.prompt)
        prompt, found = ids, []
        with torch.no_grad():
            while len(found) < 3 and end not in found:
                found.append(int(network(torch.tensor([[*prompt, *found]]))[0, -1].argmax()))
        right.append(P.completion(tokenizer, prompt, found) == problem.answer)
        (one,) = P.generate(network, [prompt], 1, 3, 0.0, 0, 1.0, [(0,)], frozenset([end]))
        assert one.ids == found
    assert sum(right) / 16 == place.result(straight)["after"]["greedy"][0]


def test_metrics_are_within_their_bounds_and_the_note_is_true(place, straight):
    """Of each step the first mini-batch has no clips; a policy that is trained moves."""
    log = place.log(straight)
    assert "note: the ratios of a step's first mini-batch are 1" in log
    assert len(steps_of(log)) == 10
    for step in steps_of(log):
        assert step["clip_active_1"] == step["clip_outside_1"] == 0
        assert 0 <= step["clip_active_2"] <= step["clip_outside_2"] <= 1
        assert step["clip_active"] <= step["clip_outside"] <= 1 and "clip_active_3" not in step
        assert step["finished"] + step["truncated"] == pytest.approx(1) and 1 <= step["length"] <= 3
        assert 0 <= step["zero_variance"] <= 1 and step["sampler_gap"] < 1e-4
        assert step["reward_std"] == pytest.approx(
            (step["reward"] * (1 - step["reward"])) ** 0.5, abs=1e-3
        )
        assert step["grad_norm"] > 0 or step["zero_variance"] == 1
    outside = sum(step["clip_outside"] for step in steps_of(log))
    assert outside > 1 if straight == "gspo" else outside < 2  # its band is that narrow
    assert steps_of(log)[0]["log_ratio"] > 0


# ---------------------------------------------------------------------------------------------- stopped, and once more
def test_stopped_by_sigterm_and_resumed_to_the_same_byte(place, straight):
    out = f"{straight} stopped"
    at = {"grpo": 6, "gspo": 9}[straight]  # the tenth step is quantization-aware
    child = place.run(straight, out, STOPPED.replace("== 6", f"== {at}"), 128 + signal.SIGTERM)
    said = rf"stopped by SIGTERM after step ({at}|{at + 1}); RESUME=\S+ ?\S+ goes on"
    assert child.err == "" and re.search(said, child.out)
    assert not (place.of(out) / "result.json").exists()
    place.run(straight, out, **{**UNSET, "RESUME": "run"})
    place.same(out, straight)
    assert [event["event"] for event in place.result(out)["events"]] == ["resume"]
    numbers = [
        re.sub(r"gen_tok_s\S+|train_tok_s\S+|train_time.*", "", line)
        for line in re.findall(r"^step:\d+/10 reward.*", place.log(straight), re.MULTILINE)
    ]
    resumed = [
        re.sub(r"gen_tok_s\S+|train_tok_s\S+|train_time.*", "", line)
        for line in re.findall(r"^step:\d+/10 reward.*", place.log(out), re.MULTILINE)
    ]
    assert set(resumed) <= set(numbers) and resumed[-1] == numbers[-1]


def test_replayed_to_the_same_byte(place, straight):
    out = f"{straight} replayed"
    place.run(
        straight, out, **{**UNSET, "REPLAY": place.of(straight), "RUN_ID": "run", "SAVE_EVERY": 0}
    )
    place.same(out, straight)


@pytest.mark.full
def test_a_run_by_the_clock_is_replayed_to_the_same_byte(place):
    clock = {"ITERATIONS": 0, "MAX_WALLCLOCK_SECONDS": 4, "RESERVE_SECONDS": 1}
    place.run("gspo", "clock", **clock)
    place.run("gspo", "clock replayed", **{**UNSET, "REPLAY": place.of("clock"), "RUN_ID": "run"})
    place.same("clock replayed", "clock")
    assert place.result("clock")["train_seconds"] < 4 + 2 and place.result("clock")["steps"] > 10


@pytest.mark.parametrize("script", SCRIPTS)
def test_two_ranks_draw_the_same_samples_and_learn_the_same(place, script):
    metrics = {}
    for ranks in (1, 2):
        out = f"{script} on {ranks}"
        patch, changes = (
            f"METRICS = {str(place.folder / out)!r}\n{RECORDED}",
            {**SHORT, "ITERATIONS": 4},
        )
        if ranks == 1:
            place.run(script, out, patch, **changes)
        else:
            place.ranks(script, out, patch, ranks, **changes)
        metrics[ranks] = [
            json.loads(line) for line in Path(f"{place.folder / out}.0").read_text().splitlines()
        ]
    one, two = metrics[1], metrics[2]
    assert len(one) == len(two) == 4
    for name in ("reward", "reward_std", "zero_variance", "length", "finished"):
        assert one[0][name] == two[0][name], name
    for step in range(3):
        assert two[step]["loss"] == pytest.approx(one[step]["loss"], abs=1e-4)
        assert two[step]["reward"] == pytest.approx(one[step]["reward"], abs=0.2)
        assert two[step]["grad_norm"] == pytest.approx(one[step]["grad_norm"], rel=0.02)
    assert place.result(f"{script} on 2")["world_size"] == 2
    assert place.result(f"{script} on 2")["before"] == place.result(f"{script} on 1")["before"]


# ---------------------------------------------------------------------------------------------------- where they start
def test_a_run_goes_on_from_a_run_a_checkpoint_or_an_artifact(place, grpo):
    """GSPO from what GRPO left. The artifact's policy is scored as at its run's end; the checkpoint's is another."""
    found = {}
    for kind, path in {
        "run": grpo,
        "artifact": grpo / "model.upar",
        "checkpoint": grpo / "step_000010",
    }.items():
        out = f"from {kind}"
        place.run("gspo", out, INIT_FROM=path, **SHORT)
        found[kind] = place.result(out)
        file = path if kind != "run" else path / "model.upar"
        assert found[kind]["init_from"] == str(file) and f"\npolicy: {file}\n" in place.log(out)
        assert "supervised steps" not in place.log(out)
    after, keys = (
        json.loads((grpo / "result.json").read_text())["after"],
        ("greedy", "pass1", "pass2"),
    )
    assert [found["run"]["before"][key] for key in keys] == [after[key] for key in keys]
    assert found["run"]["before"] == found["artifact"]["before"]
    name, tensors = place.checkpoint("from checkpoint")
    start, at_first = (
        torch.load(folder / "model.pt", weights_only=True)
        for folder in (grpo / "step_000010", place.of("from checkpoint") / "step_000001")
    )
    assert name == "step_000002" and start.keys() == tensors.keys()
    assert any(not torch.equal(start[key], at_first[key]) for key in start)


def test_adapters_alone_are_trained_and_the_artifact_has_none(place, grpo):
    changes = dict(INIT_FROM=grpo, LORA_RANK=4, QAT=0, KL_BETA=0.05)
    place.run("grpo", "lora", "T.KEEP_CHECKPOINTS = 9", **changes)
    before, after = (
        torch.load(place.of("lora") / f"step_{step:06d}" / "model.pt", weights_only=True)
        for step in (0, 10)
    )
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved and all(name.endswith((".lora_a", ".lora_b")) for name in moved)
    log, result = place.log("lora"), place.result("lora")
    trained = int(re.search(r"^parameters: .* trained:(\d+)", log, re.MULTILINE)[1])
    assert trained == sum(
        after[name].numel() for name in after if name.endswith((".lora_a", ".lora_b"))
    )
    assert set(result["phases"]) == {"warmup", "warmdown", "ema", "swa"}
    header, tensors, _ = G.read_artifact(place.of("lora") / "model.upar")
    assert not any("lora" in name or "parametrizations" in name for name in tensors)
    kl = [step["kl"] for step in steps_of(log)]
    assert kl[0] < kl[-1] and kl[-1] > 0  # from a fresh adapter the base is the start
    for rank in (0, 8):
        changes = {**SHORT, "INIT_FROM": place.of("lora") / "step_000010", "LORA_RANK": rank}
        line = place.refused("gspo", f"lora of rank {rank}", **changes)
        assert (
            line.startswith(f"error: LORA_RANK={rank}, LORA_ALPHA=16.0: ")
            and "has adapters of rank 4" in line
        )


def test_stopped_and_resumed_with_adapters_and_a_reference(place, grpo):
    """The reference, a copy of the start, is in the checkpoint: after that KL is measured from there."""
    changes = {"LORA_RANK": 4, "QAT": 0, "KL_BETA": 0.05, "INIT_FROM": grpo}
    place.run("gspo", "adapters", **changes)
    place.run("gspo", "adapters stopped", STOPPED, 128 + signal.SIGTERM, **changes)
    place.run("gspo", "adapters stopped", **{**UNSET, "RESUME": "run"})
    place.same("adapters stopped", "adapters")
    kl = [step["kl"] for step in steps_of(place.log("adapters"))]
    assert kl[-1] > 0 and max(kl) < 1


def test_a_new_policy_without_a_warm_up(place):
    """A coin gives rewards even to a policy that knows nothing."""
    place.run("gspo", "cold", SFT_STEPS=0, REWARD="random", **SHORT)
    result = place.result("cold")
    assert result["before"]["greedy"] == [0.0, 0.0, 0.0] and result["steps"] == 2


def words_model(folder: Path) -> Path:
    """A SentencePiece model of the task's letters, without role tokens."""
    lines = [" ".join(random.Random(i).choices("abcdefghijklmnopqrstxy", k=8)) for i in range(200)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_prefix=str(folder / "words"),
        vocab_size=60,
        hard_vocab_limit=False,
        byte_fallback=False,
        model_type="bpe",
        minloglevel=2,
        user_defined_symbols=["\n"],
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
    )
    return folder / "words.model"


def test_a_tokenizer_without_role_tokens(place, tmp_path):
    """A prompt is a line and BOS ends the answer; the tokenizer's file stands in the run and goes with its artifact."""
    model = words_model(tmp_path)
    place.run("grpo", "words", TOKENIZER_PATH=model, SFT_STEPS=60, **SHORT)
    assert (place.of("words") / "tokenizer.model").read_bytes() == model.read_bytes()
    network, tokenizer, _ = P.load_model("ARTIFACT", str(place.of("words")))
    assert (
        tokenizer.vocab_size == network.config.vocab_size
        and tokenizer.content == model.read_bytes()
    )
    assert place.result("words")["after"]["pass1"][0] > 0


# -------------------------------------------------------------------------------------------------------------- faults
BAD_REWARDS = {
    "hangs": r"REWARD='\S+:hangs': took over 1 seconds",
    "nan": r"reward: must be finite and below 1e15, not nan for prompt '\w\w', completion '.*",
    "few": r"reward: must be a list of 16 numbers, not \[0.0.*",
}


@pytest.mark.parametrize("name", BAD_REWARDS)
def test_a_reward_that_fails_is_one_line_and_the_run_can_go_on(place, name):
    """In the third step: the checkpoint of the second stands, and with a mended function the run ends as it would."""
    rewards, out, changes = (
        place.folder / "rewards.py",
        f"reward {name}",
        {**SHORT, "ITERATIONS": 3, "SFT_STEPS": 10},
    )
    line = place.refused("gspo", out, REWARD=f"{rewards}:{name}", **changes)
    assert re.fullmatch(rf"error: {BAD_REWARDS[name]}\n", line), line
    assert (
        place.checkpoint(out)[0] == "step_000002" and not (place.of(out) / "result.json").exists()
    )
    if name == "nan":
        place.run("gspo", out, **{**UNSET, "RESUME": "run", "REWARD": f"{rewards}:score"})
        place.run("gspo", "reward right", REWARD=f"{rewards}:score", **changes)
        place.same(out, "reward right")


def test_ten_steps_without_any_reward_end_the_run(place):
    line = place.refused(
        "grpo",
        "nothing",
        REWARD=f"{place.folder / 'rewards.py'}:nothing",
        SFT_STEPS=2,
        **{**SHORT, "ITERATIONS": 12, "EVAL_PROMPTS": 2},
    )
    assert (
        line.startswith("error: REWARD='")
        and "in the first 10 steps" in line
        and "mean 0.000" in line
    )
    assert place.checkpoint("nothing")[0] == "step_000010"
    assert {step["grad_norm"] for step in steps_of(place.log("nothing"))} == {0.0}


FAULTS = {
    "one long prompt": (
        [{"prompt": f"{i}" + "z" * 2050 * (i == 77), "answer": "x"} for i in range(90)],
        {},
        "MAX_NEW_TOKENS=3: a prompt has 205[0-9] tokens, the model's context 2048; must be",
    ),
    "no interval": (
        None,
        {"EVAL_PROMPTS": 1},
        "EVAL_PROMPTS=1: 1 held out; an interval needs at least 2",
    ),
    "empty task": ([], {}, r"task.jsonl: 0 of 0 problems"),
    "row without an answer": (
        [{"prompt": "ab"}],
        {},
        r"task.jsonl:1: must be JSON with the texts prompt and answer",
    ),
    "group of one": (None, {"GROUP_SIZE": 1}, "GROUP_SIZE=1: must be a whole number from 2"),
    "uneven step": (
        None,
        {"PROMPTS_PER_STEP": 3},
        "PROMPTS_PER_STEP=3: must be a multiple of .* = 2",
    ),
    "temperature 0": (None, {"TEMPERATURE": 0}, "TEMPERATURE=0.0: must be a number from 0.01"),
    "misspelt setting": (
        None,
        {"GRUOP_SIZE": 8},
        "GRUOP_SIZE='8': no setting .*did you mean GROUP_SIZE",
    ),
    "setting of the other script": (
        None,
        {"IMPORTANCE": "token"},
        "IMPORTANCE='token': no setting of this script",
    ),
    "unknown task": (None, {"TASK": "sorting"}, "TASK='sorting': must be one of sort, "),
    "no such start": (
        None,
        {"INIT_FROM": "none"},
        "INIT_FROM='none': must be a run, a checkpoint or an artifact",
    ),
    "adapters and QAT": (
        None,
        {"LORA_RANK": 4, "QAT": 1, "ITERATIONS": 10},
        "QAT=1: adapters are not quantized",
    ),
    "endless run": (None, {"ITERATIONS": 0}, "or it never ends"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_one_line(place, name, tmp_path):
    rows, changes, said = FAULTS[name]
    task = {} if rows is None else {"TASK_PATH": tmp_path / "task.jsonl"}
    (tmp_path / "task.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows or ()))
    line = place.refused(
        "grpo", f"fault {name}", **{**SHORT, "SFT_STEPS": 1, "EVAL_PROMPTS": 4, **task, **changes}
    )
    assert re.search(said, line), line
    assert not (place.of(f"fault {name}") / "result.json").exists()


def test_an_existing_run_is_not_overwritten(place, straight):
    before = {path: path.read_bytes() for path in place.of(straight).rglob("*") if path.is_file()}
    line = place.refused(straight, straight)
    assert line.startswith("error: RUN_ID='run': ") and "a new run in" in line
    assert {
        path: path.read_bytes() for path in place.of(straight).rglob("*") if path.is_file()
    } == before


# ------------------------------------------------------------------------------------------ in a program, and the guide
GUIDE = ROOT / "docs" / "grpo_gspo.md"


def blocks(language: str, guide: Path = GUIDE) -> list[str]:
    text = guide.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def run_guide(guide: Path, folder: Path) -> None:
    """Run its commands as they stand there, one after the other in one folder, by bash.

    Settings from the environment make them tiny.
    """
    (folder / "bin").mkdir()
    for name, module in (("python", ""), ("torchrun", "-m torch.distributed.run")):
        path = folder / "bin" / name
        path.write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
        path.chmod(0o755)
    for path in [*ROOT.glob("*.py"), ROOT / "tools"]:
        (folder / path.name).symlink_to(path)
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    kept |= {"OMP_NUM_THREADS": "1", "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    tiny = {name: text for name, text in TINY.items() if name not in ("TASK", "LEARNING_RATE")}
    # 8 steps: a tiny policy never sorts, and after 10 steps without any reward a run ends
    tiny |= {"ITERATIONS": "8", "SFT_STEPS": "5", "EVAL_PROMPTS": "8", "SAVE_EVERY": "0"}
    tiny["MAX_NEW_TOKENS"] = "10"
    commands = "".join(blocks("bash", guide)).replace("\\\n", " ").splitlines()
    assert len(commands) >= 6
    for command in commands:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=folder,
            env={**kept, **tiny} if "train_" in command else kept,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, f"{command}: {done.stdout[-500:]} {done.stderr[-1500:]}"
    results = [json.loads(path.read_text()) for path in folder.glob("runs/*/result.json")]
    assert len(results) == sum("train_" in command for command in commands)
    assert all(phase["steps"] for result in results for phase in result["phases"].values())


# Around the guide's program: what importing the script and training by it may not touch.
BEFORE = """
import os, signal, sys, threading
import torch
sys.path.insert(0, sys.argv[1])
def world():
    environ = {name: value for name, value in os.environ.items() if "INDUCTOR" not in name}  # PyTorch sets one
    return (sorted(os.listdir()), environ, signal.getsignal(signal.SIGTERM), threading.active_count(),
            torch.get_default_dtype(), torch.get_num_threads(), torch.cuda.is_initialized(), torch.initial_seed(),
            torch.is_grad_enabled())
before = world()
import train_gspo
assert world() == before, (world(), before)
"""
AFTER = """
assert world() == before, (world(), before)
assert metrics["reward"] >= 0 and metrics["loss"] == metrics["loss"] and "clip_active_2" in metrics, metrics
assert len(trainer.train(score)) == 3
"""


def test_the_guides_program_in_a_fresh_interpreter(place, grpo, tmp_path):
    """From another folder, without a GPU: importing changes nothing, training writes and prints nothing itself."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "first").symlink_to(grpo)
    _, program, trl = blocks("python")
    (tmp_path / "program.py").write_text(BEFORE + program + AFTER + trl)
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    environ = {
        **kept,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    done = subprocess.run(
        [sys.executable, "program.py", str(ROOT)],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert re.fullmatch(r"[\d.]+ [\d.]+ [\d.]+\n\[(-?[\d.]+(, )?){3}\]\n", done.stdout), done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["program.py", "runs"]


def test_the_guides_reward_function(tmp_path):
    """Its values, by hand."""
    (tmp_path / "mine.py").write_text(blocks("python")[0])
    reward = G.load_reward(f"{tmp_path / 'mine.py'}:score", G.make_task("sort", "", 0))
    problems = [G.Problem("312", "123")] * 4
    assert reward(problems, ["123", "124", "12", "xyz"]) == pytest.approx(
        [1.0, 0.1 * 2 / 3, 0.1 * 2 / 3, 0.0]
    )


@pytest.mark.full
def test_every_command_of_the_guide(tmp_path):
    (tmp_path / "mine.py").write_text(blocks("python")[0])
    rows = [{"prompt": str(number), "answer": str(number)[::-1]} for number in range(100, 200)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_guide(GUIDE, tmp_path)
