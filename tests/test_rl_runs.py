"""Whole runs of train_grpo.py, train_gspo.py and train_ppo.py, tiny: what they leave, resume,
repeat and refuse; the guide of the first two.
"""

import collections
import json
import re
import signal
import subprocess
import sys

import pytest
import torch
from test_data import train_model

import sample as P
import train_grpo as G
from conftest import (
    POST,
    ROOT,
    Place,
    blocks,
    check_adapters,
    check_early_stop,
    check_notes,
    check_result,
    environment,
    own_settings,
    pack,
    phases_of,
    run_guide,
    small_network,
    steps_kept,
    stop_at,
    write_lines,
)

SHORT = dict(ITERATIONS=2, EMA=0, SWA=0, QAT=0, SAVE_EVERY=1)
SCRIPTS = ("train_grpo", "train_gspo", "train_ppo")
GUIDE = "grpo_gspo.md"
FEW = "T.EVAL_SAMPLES = 2\n"  # patch: samples of each held-out problem
REWARDS = """
import sys
calls = 0

def score(prompts, completions, answer):
    return [0.5 * (text.count("x") + text.count("y")) for text in completions]

def nothing(prompts, completions, answer):
    return [0.0] * len(prompts)

def third(wrong):
    def reward(prompts, completions, answer):
        global calls
        calls += len(prompts) == 16  # of a step
        wrongly = calls == 3 and len(prompts) == 16
        return wrong() if wrongly else score(prompts, completions, answer)
    return reward

raises = third(lambda: {}["no such key"])
nan = third(lambda: [float("nan")] * 16)
"""


class RlPlace(Place):
    """Runs from a policy that knows a little of the letters' task, with 2 samples a problem."""

    def __init__(self, folder, letters, script):
        tiny = dict(TRAIN_FILES=letters / "problems.jsonl", INIT_FROM=letters / "policy")
        super().__init__(folder, None, {**own_settings(script, POST), **tiny}, script)
        (folder / "rewards.py").write_text(REWARDS)

    def begin(self, out, patch="", script="", **changes):
        if script == "train_gspo":
            changes = {"RESAMPLE_ROUNDS": 2, **changes}
        return super().begin(out, FEW + patch, script, **changes)

    def rows(self, out, name):
        """Return the rows of samples.jsonl or metrics.jsonl."""
        return [*map(json.loads, (self.of(out) / f"{name}.jsonl").open(encoding="utf-8"))]


@pytest.fixture(scope="session")
def place(tmp_path_factory, letters):
    return RlPlace(tmp_path_factory.mktemp("rl"), letters, "train_grpo")


@pytest.fixture(scope="session", params=SCRIPTS)
def straight(request, place):
    """Return a run without faults that others are compared with: the name of script and folder."""
    if not place.of(request.param).exists():
        assert place.run(request.param, script=request.param).err == ""
    return request.param


@pytest.fixture(scope="session")
def grpo(place):
    """Return the folder of a run of train_grpo.py to start others from."""
    if not place.of("train_grpo").exists():
        place.run("train_grpo")
    return place.of("train_grpo")


# ------------------------------------------------------------------------------------ one whole run
def test_the_result_is_complete_and_agrees_with_the_log(place, straight):
    """Scores are of 16 problems, with 2 samples each; ends by the normal approximation, from 0 to 1,
    and the gain by pairs.
    """
    check_result(place, straight, straight)
    result = place.result(straight)
    log = place.log(straight)
    assert result["steps"] == len(place.steps(straight)) == 10
    [facts] = result["row_files"].values()
    assert [*facts["used"]] == ["problems"] and facts["left_out"] == {}
    columns = [result[key] for key in ("before", "after", "gain", "packed")]
    for name in ("greedy", "pass1", "pass2"):
        row = " +".join(r"{:.4f} \[{:.4f}, {:.4f}\]".format(*scores[name]) for scores in columns)
        assert re.search(rf"^ +{name} +{row}$", log, re.M), row
    phases = dict(warmup=(1, 1), warmdown=(8, 3), ema=(9, 2), qat=(9, 2), swa=(9, 2))
    assert phases_of(place, straight) == phases and "NEVER FIRED" not in log
    before, after, gains, _ = columns
    for scores in (before, after):
        assert scores["n"] == 16 and 0 < scores["pass1"][0] <= scores["pass2"][0]
        for name in ("greedy", "pass2"):
            mean, low, high = scores[name]
            assert mean * 16 == pytest.approx(round(mean * 16), abs=1e-9)
            half = 1.96 * (mean * (1 - mean) / 15) ** 0.5
            ends = [max(0, mean - half), min(1, mean + half)]
            assert [low, high] == pytest.approx(ends, abs=1e-12)
    for name in ("greedy", "pass1", "pass2"):
        mean, low, high = gains[name]
        difference = after[name][0] - before[name][0]
        assert mean == pytest.approx(difference, abs=1e-12) and low <= mean <= high


def test_the_file_alone_gives_the_greedy_score(place, straight, letters):
    """sample.py's load_model and, token by token, whole forwards without a cache."""
    network, tokenizer, _ = P.load_model("ARTIFACT", str(place.of(straight)))
    assert "w_value" not in network.state_dict()
    settings = G.Settings(train_files=str(letters / "problems.jsonl"), eval_prompts=16)
    stop = P.stop_ids(tokenizer)
    right = []
    for problem in G.split_problems(settings)[2]:
        prompt = P.asked_ids(tokenizer, [("<|user|>", problem["prompt"])])
        found = []
        with torch.no_grad():
            while len(found) < 3 and not stop.intersection(found):
                found.append(int(network(torch.tensor([[*prompt, *found]]))[0, -1].argmax()))
        right.append(P.completion(tokenizer, prompt, found) == problem["answer"])
    assert sum(right) / 16 == place.result(straight)["packed"]["greedy"][0]


def test_answers_are_recorded_with_their_rewards(place, straight):
    """Of the first step, every third one and both scorings: four prompts with all completions. The
    log has the best and the worst answer to one of them at each tenth.
    """
    rows = place.rows(straight, "samples")
    counts = collections.Counter((row["phase"], row["step"]) for row in rows)
    train = {("train", step): 16 for step in (1, 3, 6, 9)}  # 4 samples of each prompt
    assert counts == {("held_out", 0): 12, **train, ("held_out", 10): 12}  # one greedy, two samples
    keys = "step phase prompt completion rewards reward advantage finished answer temperature"
    for row in rows:
        assert list(row) == keys.split()
        assert row["answer"] == "xy"[row["prompt"] >= "k"]
        assert row["reward"] == float(row["completion"] == row["answer"])
        assert set(row["rewards"].values()) == {row["reward"]} and len(row["completion"]) <= 3
        assert row["finished"] or len(row["completion"]) == 3
    held_out = [row for row in rows if row["phase"] == "held_out"]
    assert [row["temperature"] for row in held_out] == [0, 1, 1] * 8
    assert {row["advantage"] for row in held_out} == {None}
    groups = [row for row in rows if row["phase"] == "train"]
    for group in (groups[start : start + 4] for start in range(0, len(groups), 4)):
        assert len({row["prompt"] for row in group}) == 1
        rewards = torch.tensor([row["reward"] for row in group])
        expected = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        expected = [None] * 4 if straight == "train_ppo" else expected.tolist()
        assert [row["advantage"] for row in group] == pytest.approx(expected, abs=1e-5)
    log = place.log(straight)
    shown = re.findall(
        r"^sample: (.*), prompt '(..)', wanted '[xy]', mean reward of (.):", log, re.M
    )
    titles = [title for title, _, _ in shown]
    tenths = [f"step {step}, {step}0% of the run" for step in range(1, 10)]
    assert titles == ["start, held out", *tenths, "end, held out"]
    assert [int(count) for _, _, count in shown] == [2, *[4] * 9, 2]
    # Both scorings show the answers to one prompt, the greedy one too.
    assert shown[0][1] == shown[-1][1] == held_out[0]["prompt"]
    greedy = re.findall(r"^sample:   greedy [01] '(.*?)'", log, re.M)
    assert greedy == [held_out[number]["completion"] for number in (0, 12)]


# --------------------------------------------------------------------------- stopped, and once more
@pytest.mark.parametrize("script", SCRIPTS)
def test_an_early_end_says_what_there_is(place, script):
    check_early_stop(place, script)
    check_notes(place, script)


def test_stopped_by_sigterm_and_resumed_to_the_same_byte(place, straight):
    """Other problems would have no scores from before training, another optimizer no state."""
    out = f"{straight} stopped"
    at = {"train_grpo": 5, "train_gspo": 8, "train_ppo": 8}[straight]  # the tenth step is in QAT
    child = place.run(out, stop_at(at), 128 + signal.SIGTERM, script=straight)
    said = rf"stopped by SIGTERM after step {at + 1}: RESUME=\S+ ?\S+ continues from step_"
    assert child.err.count("\n") == 1 and re.search(said, child.out)
    assert not (place.of(out) / "result.json").exists()
    resumed = place.resumed
    for name, value in (("EVAL_PROMPTS", 7), ("OPTIMIZER", "adafactor")):
        line = place.refused(out, script=straight, **{**resumed, name: value})
        assert re.match(rf"error: {name}=\S+ must stay \S+ under RESUME$", line), line
    place.resume(out, script=straight)
    place.same(out, straight)
    assert place.rows(out, "samples") == place.rows(straight, "samples")
    assert [event["event"] for event in place.result(out)["events"]] == ["resume"]
    last = []
    for name in (straight, out):
        steps = {row["step"]: row for row in place.rows(name, "metrics") if "reward" in row}
        assert [*steps] == [*range(1, 11)]
        last.append(
            {key: x for key, x in steps[10].items() if not re.search("tok_s|time|avg", key)}
        )
    assert last[0] == last[1]


def test_replayed_to_the_same_byte(place, grpo):
    place.run("replayed", **{**place.unset, "REPLAY": grpo, "SAVE_EVERY": 0})
    place.same("replayed", "train_grpo")


def test_two_ranks_draw_the_same_samples_and_learn_the_same(place, straight, grpo):
    """As one process, but for the order of sums."""
    out = f"{straight} on 2"
    place.ranks(out, script=straight, **{**SHORT, "ITERATIONS": 3, "EMA": 1})
    one, two = (
        next(row for row in place.rows(name, "metrics") if "reward" in row)
        for name in (straight, out)
    )
    for name in ("reward", "reward_std", "zero_variance", "length", "finished"):
        assert one[name] == two[name], name
    assert two["loss"] == pytest.approx(one["loss"], abs=1e-4)
    assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=0.02)
    results = [place.result(name) for name in (straight, out)]
    assert results[1]["world_size"] == 2 and results[0]["before"] == results[1]["before"]
    assert results[0]["before"] == place.result("train_grpo")["before"]  # one start for all scripts


FEWER = [  # script, ranks, problems to train on, held out; 9 of 10 are trained on, 1 chooses
    ("train_ppo", 3, 1, 2),
    ("train_gspo", 4, 2, 3),
    ("train_grpo", 4, 10, 2),
]


@pytest.mark.full
@pytest.mark.parametrize(("script", "ranks", "train", "held_out"), FEWER)
def test_fewer_problems_than_ranks(place, script, ranks, train, held_out, tmp_path):
    """To train on, to choose from or held out; the same when the run goes on from its last step."""
    out = f"few {script}"
    rows = [
        {"prompt": text, "answer": text[:1]} for text in "ab cd ef gh ij kl mn op qr st".split()
    ]
    held = [{**row, "prompt": row["prompt"] * 2} for row in rows[:held_out]]
    given = {
        **SHORT,
        "TRAIN_FILES": write_lines(tmp_path / "train.jsonl", rows[:train]),
        "VAL_FILES": write_lines(tmp_path / "held_out.jsonl", held),
        "PROMPTS_PER_STEP": 2 * ranks,
        "VAL_LOSS_EVERY": 1,
    }
    place.ranks(out, script=script, ranks=ranks, **given)
    result = place.result(out)
    assert result["world_size"] == ranks and result["after"]["n"] == held_out
    (place.of(out) / "result.json").unlink()
    place.ranks(out, script=script, ranks=ranks, **place.resumed)
    assert place.result(out)["after"] == result["after"]


# -------------------------------------------------------------------------------- where they start
def test_a_run_goes_on_from_a_run_a_checkpoint_or_an_artifact(place, grpo):
    """GSPO from what GRPO left. The trained policy and the artifact's are scored as at the run's end;
    that of the checkpoint has its weights.
    """
    found = {}
    for file in ("", "model.upar", "step_000010"):
        out = f"from {file}"
        place.run(out, script="train_gspo", **{**SHORT, "INIT_FROM": grpo / file, "ITERATIONS": 1})
        found[file] = place.result(out)
        assert found[file]["init_from"] == str(grpo / (file or "final"))
    result = place.result("train_grpo")
    assert found[""]["before"] == result["after"]
    assert found["model.upar"]["before"] == result["packed"]
    start = place.checkpoint("train_grpo", 10)
    first = place.checkpoint("from step_000010", 0)
    assert start.keys() == first.keys()
    assert all(torch.equal(start[key], first[key]) for key in start)


def test_adapters_alone_are_trained_and_the_artifact_has_none(place, grpo):
    """Stopped and resumed too, with a reference that is in the checkpoint; another run merges the
    adapters of a checkpoint, and makes its own.
    """
    given = dict(INIT_FROM=grpo, LORA_RANK=4, QAT=0, KL_BETA=0.05, ITERATIONS=8)
    place.run("lora", "T.KEEP_CHECKPOINTS = 9\n", **given)
    check_adapters(place, "lora", 8)
    kl = [step["kl"] for step in place.steps("lora")]
    assert kl[0] < kl[-1] < 1 and kl[-1] > 0

    place.run("lora stopped", stop_at(4), 128 + signal.SIGTERM, **given)
    place.resume("lora stopped")
    place.same("lora stopped", "lora")

    stored = place.of("lora") / "step_000008"
    start = dict(INIT_FROM=stored, LORA_RANK=2, **SHORT)
    place.run("lora merged", script="train_gspo", **start)
    found = place.checkpoint("lora merged", 2)
    assert {len(found[name]) for name in found if name.endswith(".lora_a")} == {2}
    network, *_ = G.load_model("INIT_FROM", str(stored))
    for name, merged in G.merge_lora(network).state_dict().items():
        path, _, last = name.rpartition(".")
        adapted = f"{path}.parametrizations.{last}.original"
        assert torch.equal(found[adapted if adapted in found else name], merged), name


def test_a_run_learns_from_a_teacher(place, grpo, tmp_path):
    """Beside rewards: its log, its answers, a stop; teachers that do not fit."""
    given = {**SHORT, "TEACHER": grpo, "KD_ALPHA": 0.5, "EVAL_PROMPTS": 4}
    place.run("taught", **given)
    assert f"\nteacher: {grpo}, weight 0.5; of rewards 0.5\n" in place.log("taught")
    assert len(place.logged("taught", "teacher_kl")) == 2
    rows = [row for row in place.rows("taught", "samples") if row["phase"] == "train"]
    assert rows and {row["advantage"] for row in rows} == {None}

    place.run("taught stopped", stop_at(1), 128 + signal.SIGTERM, **given)
    resumed = {**place.resumed, "TEACHER": "x"}
    assert "TEACHER" in place.refused("taught stopped", **resumed)
    place.resume("taught stopped")
    place.same("taught stopped", "taught")

    tokenizer = G.load_tokenizer(train_model(tmp_path / "tokenizer.model", control_symbols=[]))
    pack(small_network(tokenizer=tokenizer), tokenizer, tmp_path)
    line = place.refused("another tokenizer", **{**given, "TEACHER": tmp_path})
    hashes = re.findall(r"\(sha256 (\w{12})\)", line)
    assert hashes == [tokenizer.sha256[:12], G.load_tokenizer("bytes").sha256[:12]], line
    line = place.refused("no teacher", **{**given, "TEACHER": ""})
    assert "KD_ALPHA=0.5" in line and "TEACHER" in line


def test_a_tokenizer_without_role_tokens(place, tmp_path):
    """A prompt is a line and BOS ends the answer; the tokenizer's file stands in the run and goes
    with its artifact.
    """
    tokenizer = G.load_tokenizer(train_model(tmp_path / "tokenizer.model", control_symbols=[]))
    pack(small_network(tokenizer=tokenizer), tokenizer, tmp_path)
    reward = f"{ROOT / 'data' / 'tasks.py'}:coin"
    place.run("words", INIT_FROM=tmp_path, REWARD=reward, **SHORT)
    network, found, _ = P.load_model("ARTIFACT", str(place.of("words")))
    assert found.content == tokenizer.content and found.vocab_size == network.config.vocab_size
    assert place.result("words")["steps"] == 2


# ------------------------------------------------------------------------------------------- faults
def test_a_reward_that_fails_is_one_line_and_the_run_can_go_on(place):
    """In the third step: the checkpoint of the second stands, and with a mended function the run
    ends as it would.
    """
    given = {**SHORT, "ITERATIONS": 3, "EVAL_PROMPTS": 4, "RESAMPLE_ROUNDS": 0}
    rewards = place.folder / "rewards.py"
    line = place.refused("wrong", script="train_gspo", REWARD=f"{rewards}:nan", **given)
    assert re.match(r"error: reward nan: .* not nan for the prompt '\w\w', completion '", line), (
        line
    )
    assert steps_kept(place.of("wrong"))[-1] == 2
    mended = place.folder / "mended.py"
    mended.write_text("from rewards import score as nan\n")
    place.resume("wrong", script="train_gspo", REWARD=f"{mended}:nan", RESAMPLE_ROUNDS=None)
    place.run("right", script="train_gspo", REWARD=f"{mended}:nan", **given)
    place.same("wrong", "right")


def test_what_a_reward_raises_has_its_traceback(place):
    """MARK's function marks, and takes no part in training."""
    rewards = place.folder / "rewards.py"
    given = {**SHORT, "ITERATIONS": 4, "EVAL_PROMPTS": 4, "REWARD": f"exact:0,{rewards}:raises"}
    child = place.begin("raises", script="train_ppo", MARK=f"{rewards}:nothing", **given)
    assert child.wait() == 2 and steps_kept(place.of("raises"))[-1] == 2
    shown, _, line = child.err.rstrip().rpartition("\n")
    assert re.search(r"rewards\.py\", line \d+, in \S+\n", shown) and "train_ppo.py" not in shown
    assert re.match(r"error: reward raises raised KeyError: .*rewards\.py, line \d+\)$", line), line
    log = place.log("raises")
    assert shown in log and re.search(r"^ +greedy +0\.0000 \[", log, re.M)
    for row in place.rows("raises", "samples"):
        assert ("nothing" in row["rewards"]) is (row["phase"] == "held_out")


@pytest.mark.parametrize("script", ["train_grpo", "train_ppo"])
def test_ten_steps_without_any_reward_end_the_run(place, script):
    out = f"nothing {script}"
    given = {**SHORT, "ITERATIONS": 12, "EVAL_PROMPTS": 2, "SAVE_EVERY": 0}
    reward = f"{place.folder / 'rewards.py'}:nothing"
    line = place.refused(out, script=script, REWARD=reward, **given)
    # Three answers, of different prompts, in the line and in the log.
    assert re.match(r"error: INIT_FROM=.* first 10 steps .*: 0 '.*'.*; 0 '.*'.*; 0 '", line), line
    assert steps_kept(place.of(out)) == [10]
    assert len(re.findall(r"^sample:   0 '", place.log(out), re.M)) == 3
    if script == "train_grpo":
        assert {step["grad_norm"] for step in place.steps(out)} == {0.0}


def share_of_changes(log):
    return float(re.search(r"^packing: ([\d.]+)% of the codes differ", log, re.M)[1]) / 100


def test_codes_that_training_has_changed_are_counted(place, grpo):
    """From an artifact, whose weights lie on the quantizer's steps. The codes are those that the
    artifacts store. Few changes are an event.
    """
    few = {**SHORT, "ITERATIONS": 1, "LEARNING_RATE": 1e-7, "EVAL_PROMPTS": 2}
    place.run("rounded away", **few)
    assert share_of_changes(place.log("rounded away")) == 0
    events = place.result("rounded away")["events"]
    assert events[-1] == {"event": "few_codes_changed", "share": 0}
    files = [place.tiny["INIT_FROM"] / "model.upar", grpo / "model.upar"]
    start, end = (G.read_artifact(file)[2] for file in files)
    changes = [(start[name].codes != end[name].codes).flatten() for name in end]
    share = torch.cat(changes).double().mean().item()
    assert share_of_changes(place.log("train_grpo")) == pytest.approx(share, abs=6e-5)
    assert share > 0.01 and place.result("train_grpo")["events"] == []


LONG = [{"prompt": letter * 2050, "answer": "x"} for letter in "uvwxyz"]
FAULTS = [  # rows, settings, and what the line says
    (LONG, {}, "left out a prompt of more than 2045 tokens, .* of 2048: 6 .*rows 1, 2, 3"),
    ([], {}, "TRAIN_FILES|0 rows"),
    (None, {"MAX_NEW_TOKENS": 2048}, "MAX_NEW_TOKENS=2048: .*2048"),
    (None, {"INIT_FROM": ""}, "INIT_FROM=''"),
    (None, {"ITERATIONS": 0}, "ITERATIONS"),
]


@pytest.mark.parametrize(("rows", "changes", "said"), FAULTS)
def test_a_fault_is_one_line(place, rows, changes, said, tmp_path):
    if rows is not None:
        changes = {"TRAIN_FILES": write_lines(tmp_path / "task.jsonl", rows)}
    line = place.refused(f"fault {said[:9]}", **{**SHORT, "EVAL_PROMPTS": 4, **changes})
    assert re.search(said, line), line


# ----------------------------------------------------------------------- in a program, and the guide
# Around the guide's program: what importing the script and training by it may not touch.
BEFORE = """
import os, signal, sys, threading
import torch
sys.path.insert(0, sys.argv[1])
def world():
    environ = {name: value for name, value in os.environ.items() if "INDUCTOR" not in name}
    return (sorted(os.listdir()), environ, signal.getsignal(signal.SIGTERM),
            threading.active_count(), torch.get_default_dtype(), torch.get_num_threads(),
            torch.cuda.is_initialized(), torch.initial_seed(), torch.is_grad_enabled())
before = world()
import train_gspo
assert world() == before, (world(), before)
"""
AFTER = """
assert world() == before, (world(), before)
"""


def test_the_guides_programs_in_a_fresh_interpreter(grpo, tmp_path):
    """From another folder, without a GPU: importing changes nothing, training writes and prints
    nothing itself.
    """
    (tmp_path / "runs").mkdir()
    programs = [text for text in blocks(GUIDE, "python") if "load_model(" in text]
    text = BEFORE + AFTER.join([*programs, ""])
    for name in set(re.findall(r'"runs/(\w+)"', text)):
        (tmp_path / "runs" / name).symlink_to(grpo)
    folders = sorted(path.name for path in tmp_path.iterdir())
    (tmp_path / "program.py").write_text(text)
    environ = environment(CUDA_VISIBLE_DEVICES="", PYTHONDONTWRITEBYTECODE=1)
    command = [sys.executable, "program.py", ROOT]
    pipes = dict(capture_output=True, text=True)
    done = subprocess.run(command, cwd=tmp_path, env=environ, **pipes)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr[-2000:]
    assert re.fullmatch(r"([-\d.e, \[\]]+\n)+", done.stdout), done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*folders, "program.py"])


def test_the_guides_reward_function(tmp_path):
    """Its values, by hand."""
    [text] = [text for text in blocks(GUIDE, "python") if text.startswith("def score")]
    (tmp_path / "mine.py").write_text(text)
    [reward] = G.load_reward_functions(f"{tmp_path / 'mine.py'}:score")
    found = reward.call(["312"] * 4, ["123", "124", "12", "xyz"], ["123"] * 4)
    assert found == pytest.approx([1.0, 0.1 * 2 / 3, 0.1 * 2 / 3, 0.0])


@pytest.mark.full
def test_every_command_of_the_guide(tmp_path):
    (tmp_path / "rewards.py").write_text(blocks(GUIDE, "python")[0])
    rows = [{"prompt": str(n), "answer": str(n)[::-1]} for n in range(100, 200)]
    write_lines(tmp_path / "problems.jsonl", rows)
    run_guide(GUIDE, tmp_path, least=6)
