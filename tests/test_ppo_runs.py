"""Whole runs of train_ppo.py, tiny: reward models, adapters, what is refused; learning; the guide.

What holds for GRPO, too, is tested in test_rl_runs.py.
"""

import re
import signal
import subprocess
import sys

import pytest
import torch
from test_rl_runs import SHORT, RlPlace

import train_ppo as P
from conftest import (
    BYTES,
    ROOT,
    Place,
    blocks,
    environment,
    pack,
    run_guide,
    small_network,
    start,
    stop_at,
)

GUIDE = "ppo.md"


@pytest.fixture(scope="session")
def place(tmp_path_factory, letters):
    return RlPlace(tmp_path_factory.mktemp("ppo"), letters, "train_ppo")


@pytest.fixture(scope="session")
def judge(place):
    """Return a reward model, of the policy's shape by another seed."""
    network = small_network(seed=5)
    P.add_value_head(network)
    torch.nn.init.normal_(network.w_value)
    return pack(network, BYTES, place.folder / "judge")


def test_a_run_by_a_reward_model(place, judge):
    """Its mean on held-out answers stands beside the checker's scores; KL_BETA is steered; stopped
    and resumed to the same byte.
    """
    given = dict(SHORT, REWARD_MODEL=judge, KL_TARGET=0.5, EPOCHS=2, ITERATIONS=4)
    place.run("judged", **given)
    result = place.result("judged")
    before, after, gain = (result[key]["reward_model"] for key in ("before", "after", "gain"))
    assert gain[0] == pytest.approx(after[0] - before[0], abs=1e-6)
    assert before[1] < before[0] < before[2]
    assert result["last"]["reward"] != 0 and {"greedy", "pass1"} < set(result["after"])
    betas = [step["kl_beta"] for step in place.steps("judged")]
    assert betas[:2] == pytest.approx([0.05, 0.049], rel=1e-3)
    assert len(place.checkpoint("judged", 4)["w_value"]) == 32
    place.run("judged stopped", stop_at(2), 128 + signal.SIGTERM, **given)
    place.resume("judged stopped")
    place.same("judged stopped", "judged")


def test_faults_are_one_line(place, judge, letters):
    for judge_of in ("none", letters / "policy"):  # no file, and a model without a value head
        line = place.refused("fault", **{**SHORT, "REWARD_MODEL": judge_of})
        assert line.startswith(f"error: REWARD_MODEL='{judge_of}': "), line
    place.run("again", stop_at(0), 128 + signal.SIGTERM, **SHORT)
    line = place.run("again", code=2, **{**place.unset, "RESUME": "run", "REWARD_MODEL": judge}).err
    assert re.match("error: REWARD_MODEL=.*must stay '' under RESUME", line), line
    place.resume("again", KL_BETA=0.5)  # the checkpoint has what KL_TARGET steered, 0.05 here
    assert place.steps("again")[-1]["kl_beta"] == 0.5


@pytest.mark.full
def test_ppo_learns_to_sort(tmp_path):
    """From a start that sorts a fifth of its prompts."""
    command = [ROOT / "data" / "tasks.py", "sort", "--problems", 8000, "--out", tmp_path]
    assert start(command, environment()).returncode == 0
    steps = dict(TRAIN_FILES=tmp_path / "sort.jsonl", MAX_WALLCLOCK_SECONDS=0, RESERVE_SECONDS=0)
    place = Place(tmp_path, None, dict(steps, SAVE_EVERY=0))
    place.run("sft", script="train_sft", ITERATIONS=110)
    place.run("ppo", script="train_ppo", INIT_FROM=place.of("sft"), ITERATIONS=60)
    gain = place.result("ppo")["gain"]
    assert gain["pass1"][1] > 0.02, gain


# ---------------------------------------------------------------------------------------- the guide
@pytest.mark.full
def test_every_command_of_the_guide(judge, letters, tmp_path):
    """With a model for each name that it does not train itself."""
    text = "".join(blocks(GUIDE, "bash"))
    for name in set(re.findall(r"runs/(\w+)", text)) - set(re.findall(r"RUN_ID=(\w+)", text)):
        (tmp_path / "runs").mkdir(exist_ok=True)
        is_judge = f"REWARD_MODEL=runs/{name}" in text
        (tmp_path / "runs" / name).symlink_to(judge if is_judge else letters / "policy")
    run_guide(GUIDE, tmp_path, least=5)
    for program in blocks(GUIDE, "python"):
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert re.fullmatch(r"[\d.]+ -?[\d.e-]+ -?[\d.e-]+\n", done.stdout), done.stdout
