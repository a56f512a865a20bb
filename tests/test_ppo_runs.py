"""Whole runs of train_ppo.py, tiny: what they leave, resume, repeat and refuse; the guide."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_objective import ALONE
from test_rl_runs import SHORT, STOPPED, TINY, UNSET, Place, blocks, run_guide, steps_of

import sample
import train_grpo as G
import train_ppo as P

ROOT = Path(__file__).resolve().parents[1]
GUIDE = ROOT / "docs" / "ppo.md"


# ---------------------------------------------------------------------------------------------------------- whole runs
@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """As in test_rl_runs: of two letters, whether the first is before k (x) or not (y)."""
    folder, letters = tmp_path_factory.mktemp("ppo"), "abcdefghijklmnopqrst"
    rows = [{"prompt": a + b, "answer": "x" if a < "k" else "y"} for a in letters for b in letters]
    (folder / "task.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(
        "calls = 0\ndef raises(prompts, completions, answers):\n    global calls\n    calls += 1\n"
        "    return {}['no such key'] if calls == 3 else [float(len(text)) for text in completions]\n"
    )
    made = Place(folder)
    yield made
    made.server.stdin.close()
    made.server.wait(10)


RUNS = {"head": {}, "separate": {"CRITIC": "separate", "KL_TARGET": "0.5", "EPOCHS": "2"}}


@pytest.fixture(scope="session", params=RUNS)
def straight(request, place: Place) -> str:
    """A run without faults, which others are compared with; the name of its critic and folder."""
    assert place.run("ppo", request.param, **RUNS[request.param]).err == ""
    return request.param


@pytest.fixture(scope="session")
def judge(place: Place) -> Path:
    """A reward model: the artifact of a network of TINY's shape with a value head, by another seed."""
    settings = P.Settings(layer_pattern="a g", model_dim=48, num_heads=2, seed=5)
    network, tokenizer, _ = P.start_policy(settings, ALONE)
    P.add_value_head(network)
    torch.nn.init.normal_(network.w_value)
    tensors = network.state_dict()
    coded = P.quantize_all(tensors, P.quant_table(settings))
    packed = P.pack_artifact(
        tensors,
        coded,
        settings=vars(network.config),
        tokenizer_sha256=tokenizer.sha256,
        meta={"tokenizer": "bytes"},
    )
    (place.folder / "judge.upar").write_bytes(packed)
    return place.folder / "judge.upar"


def test_the_result_is_complete_and_agrees_with_the_log(place, straight):
    result, log = place.result(straight), place.log(straight)
    artifact, script = place.artifact(straight), (ROOT / "train_ppo.py").read_bytes()
    exact = {
        "script": "train_ppo.py",
        "steps": 10,
        "samples": 160,
        "events": [],
        "seed": 1337,
        "task": "jsonl",
        "code_sha256": hashlib.sha256(script).hexdigest(),
        "code_bytes": len(script),
        "world_size": 1,
        "artifact_sha256": hashlib.sha256(artifact).hexdigest(),
        "artifact_bytes": len(artifact),
        "total_bytes": len(artifact) + len(script),
    }
    assert {key: result[key] for key in exact} == exact
    assert {
        name: (phase["start_step"], phase["steps"]) for name, phase in result["phases"].items()
    } == {"warmup": (1, 1), "warmdown": (8, 3), "ema": (9, 2), "qat": (9, 2), "swa": (9, 2)}
    for name in ("greedy", "pass1", "pass2"):
        mean, low, high = result["gain"][name]
        assert mean == pytest.approx(
            result["after"][name][0] - result["before"][name][0], abs=1e-12
        )
        assert low <= mean <= high
    steps = steps_of(log)
    assert len(steps) == 10
    logged = {name: value for name, value in steps[-1].items() if not re.search(r"_\d+$", name)}
    assert {name: result["last"][name] for name in logged} == pytest.approx(
        logged, rel=1e-3, abs=1e-9
    )
    assert {step["clip_outside_1"] for step in steps} == {0.0}  # of each step's first update
    for step in steps:
        assert (
            0 <= step["clip_active"] <= step["clip_outside"] <= 1 and 0 <= step["value_clip"] <= 1
        )
        assert step["kl_k3"] >= 0 and step["finished"] + step["truncated"] == pytest.approx(1)
        assert (
            step["sampler_gap"] < 1e-4 and step["explained_variance"] <= 1 and step["grad_norm"] > 0
        )
    assert steps[0]["kl"] == steps[0]["explained_variance"] == 0 and steps[-1]["kl_k3"] > 0
    betas = [step["kl_beta"] for step in steps]
    assert (
        betas[1] == pytest.approx(0.049, rel=1e-3)
        if straight == "separate"
        else set(betas) == {0.05}
    )


def test_the_artifact_is_the_policy_alone_and_others_take_it(place, straight):
    """Without the value head; sample.py's loader and GRPO read it and give the same scores."""
    network, *_ = sample.load_model("ARTIFACT", str(place.of(straight)))
    assert "w_value" not in network.state_dict()
    _, tensors = place.checkpoint(straight)
    assert ("w_value" in tensors) == (straight == "head")
    place.run("grpo", f"grpo from {straight}", INIT_FROM=place.of(straight), **SHORT)
    before, after = place.result(f"grpo from {straight}")["before"], place.result(straight)["after"]
    assert before == after


def test_the_start_is_that_of_grpo(place, straight):
    place.run("grpo", f"grpo beside {straight}", **{**SHORT, "ITERATIONS": 1})
    assert place.result(f"grpo beside {straight}")["before"] == place.result(straight)["before"]


def test_stopped_by_sigterm_and_resumed_to_the_same_byte(place, straight):
    out = f"{straight} stopped"
    at = {"head": 6, "separate": 9}[straight]  # the tenth step is quantization-aware
    place.run(
        "ppo", out, STOPPED.replace("== 6", f"== {at}"), 128 + signal.SIGTERM, **RUNS[straight]
    )
    assert not (place.of(out) / "result.json").exists()
    place.run("ppo", out, **{**UNSET, "RESUME": "run"})
    place.same(out, straight)
    assert [event["event"] for event in place.result(out)["events"]] == ["resume"]


def test_replayed_to_the_same_byte(place, straight):
    out = f"{straight} replayed"
    place.run(
        "ppo", out, **{**UNSET, "REPLAY": place.of(straight), "RUN_ID": "run", "SAVE_EVERY": 0}
    )
    place.same(out, straight)


def test_a_run_by_a_reward_model(place, judge):
    """Its mean on held-out answers stands beside the checker's scores; a separate critic begins as its copy."""
    place.run("ppo", "judged", REWARD_MODEL=judge, CRITIC="separate", **{**SHORT, "ITERATIONS": 4})
    result = place.result("judged")
    before, after, gain = (result[key]["reward_model"] for key in ("before", "after", "gain"))
    assert (
        gain[0] == pytest.approx(after[0] - before[0], abs=1e-6)
        and before[1] < before[0] < before[2]
    )
    assert result["last"]["reward"] != 0 and {"greedy", "pass1"} < set(result["after"])
    tensors = torch.load(place.of("judged") / "step_000004" / "training.pt", weights_only=True)[
        "critic"
    ]
    assert len(tensors["w_value"]) == 48
    place.run(
        "ppo",
        "judged stopped",
        STOPPED.replace("== 6", "== 3"),
        128 + signal.SIGTERM,
        REWARD_MODEL=judge,
        CRITIC="separate",
        **{**SHORT, "ITERATIONS": 4},
    )
    place.run("ppo", "judged stopped", **{**UNSET, "RESUME": "run"})
    place.same("judged stopped", "judged")


def test_adapters_and_a_random_reward(place, straight):
    """REWARD=random: coins, so about half of the samples are rewarded whatever they say."""
    changes = dict(RUNS[straight], LORA_RANK=4, QAT=0, REWARD="random", ITERATIONS=6, EMA=0, SWA=0)
    place.run("ppo", f"{straight} adapted", INIT_FROM=place.of(straight), **changes)
    rewards = [step["reward"] for step in steps_of(place.log(f"{straight} adapted"))]
    assert abs(sum(rewards) / 6 - 0.5) < 4 * 0.5 / 96**0.5
    _, tensors, _ = P.read_artifact(place.of(f"{straight} adapted") / "model.upar")
    assert not any("lora" in name or name == "w_value" for name in tensors)


def test_what_a_reward_raises_has_its_traceback_and_the_checkpoint_stands(place):
    child = place.begin(
        "ppo", "raises", REWARD=f"{place.folder / 'rewards.py'}:raises", **SHORT | {"ITERATIONS": 4}
    )
    assert child.wait() == 99, child.err  # an exception, with its traceback
    assert re.search(r"rewards\.py\", line \d+, in ", child.err)
    assert child.err.endswith("KeyError: 'no such key'\n")
    assert place.checkpoint("raises")[0] == "step_000002"


FAULTS = {
    "uneven step": ({"PROMPTS_PER_STEP": 3}, "PROMPTS_PER_STEP=3: must be a multiple of .* = 2"),
    "setting of another script": ({"RATIO_LIMIT": 2}, "RATIO_LIMIT='2': no setting of this script"),
    "unknown critic": ({"CRITIC": "shared"}, "CRITIC='shared': must be one of head, separate"),
    "no such reward model": ({"REWARD_MODEL": "none"}, "REWARD_MODEL='none': must be a run"),
    "target without a price": (
        {"KL_BETA": 0, "KL_TARGET": 6},
        "KL_TARGET=6.0: needs a KL_BETA above 0",
    ),
    "no reward at all": (
        {"SFT_STEPS": 0, "ITERATIONS": 12, "SAVE_EVERY": 0},
        "first 10 steps all samples have one reward .mean 0.000",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_one_line(place, name):
    changes, said = FAULTS[name]
    line = place.refused(
        "ppo", f"fault {name}", **{**SHORT, "SFT_STEPS": 1, "EVAL_PROMPTS": 4, **changes}
    )
    assert re.search(said, line), line
    assert not (place.of(f"fault {name}") / "result.json").exists()


def test_a_reward_model_that_is_none_is_one_line(place, judge, straight):
    line = place.refused("ppo", f"none {straight}", REWARD_MODEL=place.of(straight), **SHORT)
    assert re.match(
        r"error: REWARD_MODEL='\S+': \S+model.upar has no value head; must be a reward model", line
    ), line
    place.run(
        "ppo", f"again {straight}", STOPPED.replace("== 6", "== 1"), 128 + signal.SIGTERM, **SHORT
    )
    line = place.refused(
        "ppo", f"again {straight}", **{**UNSET, "RESUME": "run", "REWARD_MODEL": judge}
    )
    assert "REWARD_MODEL=" in line and "must stay ''" in line


@pytest.mark.full
@pytest.mark.parametrize("critic", ["head", "separate"])
def test_ppo_learns_to_sort_from_the_warm_start(place, critic):
    place.run(
        "ppo",
        f"sorts {critic}",
        **{
            **dict.fromkeys(TINY),
            "TASK": "sort",
            "TASK_PATH": None,
            "DEVICE": "cpu",
            "CRITIC": critic,
            "MAX_WALLCLOCK_SECONDS": 75,
            "EVAL_PROMPTS": 256,
        },
    )
    gain = place.result(f"sorts {critic}")["gain"]
    assert gain["pass1"][1] > 0.02, gain


# ------------------------------------------------------------------------------------------------------------ the guide
@pytest.mark.full
def test_every_command_of_the_guide(place, judge, tmp_path):
    (tmp_path / "runs" / "judge").mkdir(
        parents=True
    )  # as train_dpo.py with OBJECTIVE=reward leaves
    (tmp_path / "runs" / "judge" / "model.upar").write_bytes(judge.read_bytes())
    run_guide(GUIDE, tmp_path)
    program = ["-c", "\n".join(blocks("python", GUIDE))]
    done = subprocess.run([sys.executable, *program], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"[\d.]+ -?[\d.e-]+ -?[\d.e-]+\n", done.stdout), done.stdout


def test_the_guide_names_settings_that_exist():
    names = set(re.findall(r"\b([A-Z][A-Z_]{3,})=", GUIDE.read_text(encoding="utf-8")))
    known = {name.upper() for module in (P, G) for name in module.Settings.__dataclass_fields__}
    assert names and names - known - {"OBJECTIVE", "PROMPT"} == set()
    assert all(itertools.chain(blocks("bash", GUIDE), blocks("python", GUIDE)))
