"""Whole runs of train_sft.py, tiny: what they leave, learn, resume, repeat and refuse; distillation; the guides."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import signal
import string
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_data import train_model
from test_rl_runs import KEPT, SHORT, Place

import sample as P
import train_grpo as G
import train_sft as S

ROOT = Path(__file__).resolve().parents[1]
TINY = {
    "DEVICE": "cpu",
    "LAYER_PATTERN": "g a",
    "MODEL_DIM": "32",
    "NUM_HEADS": "2",
    "TRAIN_SEQ_LEN": "64",
    "TRAIN_BATCH_TOKENS": "512",
    "ITERATIONS": "20",
    "MAX_WALLCLOCK_SECONDS": "0",
    "RESERVE_SECONDS": "0",
    "SAVE_EVERY": "8",
    "LEARNING_RATE": "0.01",
}
UNSET = dict.fromkeys(
    [*TINY, "TRAIN_FILES", "RUN_ID"]
)  # what a run takes from the one it resumes or repeats

# Sends SIGTERM in the middle of a step.
STOPPED = """
import os, signal, time
forward_backward, calls = Trainer.forward_backward, []
def stopped(self, rows, windows, total):
    calls.append(0)
    if len(calls) == 13:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.3)
    return forward_backward(self, rows, windows, total)
Trainer.forward_backward = stopped
"""


class SftPlace(Place):
    """A folder with rows and the runs of the tests, each in <out>/run of it."""

    tiny, rows = TINY, ("TRAIN_FILES", "rows.jsonl")

    def refused(self, script: str, out: str, code: int = 2, **changes: object) -> str:
        err = super().refused(script, out, code, **changes)
        assert not (self.of(out) / "result.json").exists()
        return err

    def same(self, out: str, other: str) -> None:
        super().same(out, other)
        assert self.result(out)["tokens"] == self.result(other)["tokens"]

    def steps(self, out: str) -> list[dict]:
        """The numbers of each step's line."""
        lines = re.findall(r"^step:\d+/\d+ (loss:.*)$", self.log(out), re.MULTILINE)
        return [
            {
                key: float(value.removesuffix("ms"))
                for key, value in (pair.split(":") for pair in line.split())
            }
            for line in lines
        ]


def rows_of(count: int) -> list[dict]:
    """A word of three letters, and it in capitals."""
    words = [
        "".join(chr(97 + 11 * number // 26**place % 26) for place in range(3))
        for number in range(count)
    ]
    return [{"instruction": word, "output": word.upper()} for word in words]


def read(tokenizer: S.Tokenizer, **changes) -> S.Examples:
    settings = S.Settings(train_seq_len=64, **changes)
    parse = functools.partial(S.parse_row, tokenizer=tokenizer, settings=settings)
    return S.read_examples(settings, parse, S.demonstration, settings.demonstrations, [].append)


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> SftPlace:
    folder = tmp_path_factory.mktemp("sft")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_of(300)))
    made = SftPlace(folder)
    yield made
    made.server.stdin.close()
    made.server.wait(10)


@pytest.fixture(scope="session")
def straight(place: SftPlace) -> str:
    """A run without faults, which others are compared with; its folder's name."""
    assert place.run("sft", "straight").err == ""
    return "straight"


# ------------------------------------------------------------------------------------------------------- one whole run
def test_the_result_is_complete_and_agrees_with_the_log(place, straight):
    result, log, run = place.result(straight), place.log(straight), place.of(straight)
    artifact, script = (run / "model.upar").read_bytes(), (ROOT / "train_sft.py").read_bytes()
    exact = {
        "script": "train_sft.py",
        "run_id": "run",
        "steps": 20,
        "events": [],
        "seed": 1337,
        "code_sha256": hashlib.sha256(script).hexdigest(),
        "code_bytes": len(script),
        "init_from": "new",
        "artifact": str(run / "model.upar"),
        "artifact_sha256": hashlib.sha256(artifact).hexdigest(),
        "artifact_bytes": len(artifact),
        "total_bytes": len(artifact) + len(script),
        "world_size": 1,
    }
    assert {key: result[key] for key in exact} == exact
    assert set(
        "commit tokenizer_sha256 hardware versions train_seconds total_seconds peak_memory_mib params weights "
        "optimizer_state_bytes settings phases".split()
    ) < set(result)
    assert log.split("\n---\n")[1].splitlines() == [
        f"{key}: {value}" for key, value in result.items() if not isinstance(value, dict)
    ]
    for name in ("loss", "accuracy"):
        cells = [
            "{:.4g} [{:.4g}, {:.4g}]".format(*result[key][name])
            for key in ("before", "after", "gain")
        ]
        assert re.search(
            rf"^ +{name} +" + " *".join(map(re.escape, cells)) + "$", log, re.MULTILINE
        )
    steps = place.steps(straight)
    assert len(steps) == 20 and 0 < sum(step["targets"] for step in steps) < result["tokens"]
    assert {name: result["last"][name] for name in result["last"]} == pytest.approx(
        {name: steps[-1][name] for name in result["last"]}, rel=1e-3, abs=1e-9
    )
    rows = result["rows"] + result["before"]["rows"]
    assert (
        285 < rows < 300 and "data: " in log and "300 rows, used 300 Alpaca; left out none\n" in log
    )


def test_it_learns_and_all_phases_fire(place, straight):
    result, steps = place.result(straight), place.steps(straight)
    assert result["gain"]["loss"][1] > 1 and steps[-1]["loss"] < steps[0]["loss"] - 1
    assert result["gain"]["accuracy"][1] > 0.05
    assert {
        name: (phase["start_step"], phase["steps"]) for name, phase in result["phases"].items()
    } == {"warmup": (1, 1), "warmdown": (11, 10), "ema": (18, 3), "qat": (18, 3), "swa": (19, 2)}
    for step in steps:
        assert step["loss"] == step["nats"] and step["kd"] == 0 and step["grad_norm"] > 0


def test_the_file_alone_gives_the_score(place, straight):
    """sample.py's load_model and a forward of each held-out row by itself: loss, accuracy, intervals and gain."""
    result = place.result(straight)
    network, tokenizer, _ = P.load_model("ARTIFACT", str(place.of(straight)))
    data = read(tokenizer, train_files=str(place.folder / "rows.jsonl"))
    found = []
    for row in data.held_out:
        with torch.no_grad():
            logits, said = network(row.ids[None])[0], row.targets >= 0
        assert said.sum() == 4  # three letters and the end
        found.append(
            [
                F.cross_entropy(logits[said], row.targets[said], reduction="sum").item(),
                4.0,
                (logits.argmax(-1) == row.targets)[said].sum().item(),
            ]
        )
    nats, tokens, right = np.array(found).T
    assert result["after"]["rows"] == len(found) and result["after"]["tokens"] == 4 * len(found)
    for name, each in (
        ("loss", nats / 4),
        ("accuracy", right / 4),
    ):  # rows alike long: a plain mean
        mean, low, high = result["after"][name]
        assert mean == pytest.approx(each.mean(), rel=1e-4)
        assert high - mean == pytest.approx(1.96 * each.std(ddof=1) / len(each) ** 0.5, rel=1e-3)
        sign = -1 if name == "loss" else 1
        gain, change = result["gain"][name][0], result["after"][name][0] - result["before"][name][0]
        assert gain == pytest.approx(sign * change) and high - mean == pytest.approx(mean - low)


def test_grpo_goes_on_from_here(place, straight):
    """Its prompts are laid out as they were learned: what the policy samples are capitals, and ends."""
    network, tokenizer, _ = G.load_model("INIT_FROM", str(place.of(straight)))
    prompt, end = G.chat_ids(tokenizer, "cat")
    samples = G.generate(network, [prompt], 50, 8, 1.0, 0, 1.0, [(0,)], frozenset([end]))
    text = "".join(G.completion(tokenizer, prompt, sample.ids) for sample in samples)
    assert sum(letter in string.ascii_uppercase for letter in text) > 0.7 * len(text) > 40
    assert sum(sample.finished for sample in samples) > 30


# ---------------------------------------------------------------------------------------------- stopped, and once more
def test_stopped_by_sigterm_and_resumed_to_the_same_byte(place, straight):
    child = place.run("sft", "stopped", STOPPED, 128 + signal.SIGTERM)
    assert child.err == "" and re.search(
        r"stopped by SIGTERM after step 1[34]; RESUME=\S+ continues it", child.out
    )
    assert not (place.of("stopped") / "result.json").exists()
    place.run("sft", "stopped", **{**UNSET, "OUT_DIR": place.folder / "stopped", "RESUME": "run"})
    place.same("stopped", straight)
    assert [event["event"] for event in place.result("stopped")["events"]] == ["resume"]


def test_replayed_to_the_same_byte(place, straight):
    place.run(
        "sft",
        "replayed",
        **{**UNSET, "REPLAY": place.of(straight), "RUN_ID": "run", "SAVE_EVERY": 0},
    )
    place.same("replayed", straight)


def test_resumed_with_other_rows_is_an_error(place, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in rows_of(100)))
    place.run("sft", "other rows", STOPPED, 128 + signal.SIGTERM, TRAIN_FILES=rows)
    rows.write_text("".join(json.dumps(row) + "\n" for row in rows_of(101)))
    out = {"OUT_DIR": place.folder / "other rows", "RESUME": "run"}
    assert ": DATA_SHA256='" in place.refused("sft", "other rows", **{**UNSET, **out})


def test_two_ranks_learn_the_same(place):
    found = []
    for ranks in (1, 2):
        changes = {"TEACHER": "", "ITERATIONS": 4, **{name: 0 for name in ("EMA", "SWA", "QAT")}}
        if ranks == 1:
            place.run("sft", "on 1", **changes)
        else:
            place.ranks("sft", "on 2", "", 2, **changes)
        found.append((place.steps(f"on {ranks}"), place.result(f"on {ranks}")))
    for one, two in zip(found[0][0], found[1][0], strict=True):
        assert two["targets"] == one["targets"] and two["loss"] == pytest.approx(
            one["loss"], rel=1e-3
        )
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-2)
    for key in ("before", "after"):
        assert found[0][1][key]["loss"] == pytest.approx(found[1][1][key]["loss"], rel=1e-2)
    assert found[1][1]["world_size"] == 2 and found[0][1]["tokens"] == found[1][1]["tokens"]


def test_epochs_set_the_steps_where_iterations_do_not(place):
    """A task's demonstrations, with a clock that does not end the run; AdamW in 8 bits, layers computed twice."""
    place.run(
        "sft",
        "epochs",
        TRAIN_FILES=None,
        TASK="reverse",
        DEMONSTRATIONS=90,
        EPOCHS=3,
        ITERATIONS=0,
        EVAL_PROMPTS=30,
        MAX_WALLCLOCK_SECONDS=60,
        OPTIMIZER="adamw8bit",
        ACTIVATION_CHECKPOINTING=1,
        VAL_LOSS_EVERY=3,
    )
    result, log = place.result("epochs"), place.log("epochs")
    steps = int(re.search(r"an epoch is \d+ windows in (\d+) steps", log)[1])
    data = read(S.load_tokenizer("bytes"), task="reverse", demonstrations=90)
    assert (
        result["steps"] == 3 * steps
        and result["rows"] == len(data.train)
        and result["before"]["rows"] == 30
    )
    assert result["tokens"] == 3 * sum(len(row.ids) for row in data.train)
    targets = sum(int((row.targets >= 0).sum()) for row in data.train)
    assert sum(step["targets"] for step in place.steps("epochs")) <= 3 * targets
    said = re.findall(
        r"^step:(\d+)/\d+ held_out/rows:30 held_out/tokens:\d+ held_out/loss:\S+ held_out/accuracy:",
        log,
        re.MULTILINE,
    )
    assert list(map(int, said)) == list(range(0, 3 * steps + 1, 3))


# ---------------------------------------------------------------------------------------------- where a run starts from
def test_adapters_alone_are_trained_and_the_artifact_has_none(place, straight):
    place.run(
        "sft", "lora", "T.KEEP_CHECKPOINTS = 9", INIT_FROM=place.of(straight), LORA_RANK=4, QAT=0
    )
    before, after = (
        torch.load(place.of("lora") / f"step_{step:06d}" / "model.pt", weights_only=True)
        for step in (0, 20)
    )
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved and all(name.endswith((".lora_a", ".lora_b")) for name in moved)
    _, tensors, _ = S.read_artifact(place.of("lora") / "model.upar")
    assert not any("lora" in name or "parametrizations" in name for name in tensors)
    result = place.result("lora")
    assert result["gain"]["loss"][0] > 0 and result["init_from"] == str(
        place.of(straight) / "model.upar"
    )
    assert result["before"] == place.result(straight)["after"]


def test_a_vocabulary_grows_by_role_tokens(place, tmp_path):
    model = train_model(tmp_path / "plain.model", control_symbols=[])
    place.run("sft", "grown", TOKENIZER_PATH=model)
    result, tokenizer = place.result("grown"), S.load_tokenizer(model)
    _, tensors, _ = S.read_artifact(place.of("grown") / "model.upar")
    assert len(tensors["embed"]) == tokenizer.vocab_size + 4 and result["gain"]["loss"][1] > 0.5
    rows = tensors["embed"][-4:]
    assert (rows[1] - rows[2]).abs().max() > 0.01  # they began alike
    place.run("sft", "grown further", INIT_FROM=place.of("grown"), **SHORT)
    assert place.result("grown further")["before"] == result["after"]
    line = place.refused("sft", "grown lora", TOKENIZER_PATH=model, LORA_RANK=2, QAT=0)
    assert "has no role tokens, and adapters would not learn" in line


# -------------------------------------------------------------------------------------------------------- distillation
HALF = {"LAYER_PATTERN": "g", "MODEL_DIM": "16"}


@pytest.mark.parametrize("kind", ["jsd", "projection"])
def test_a_half_size_student_learns_from_a_teacher(place, straight, kind):
    """Stopped, resumed to the same byte, with a projection that is kept and not exported."""
    changes = {**HALF, "TEACHER": place.of(straight), "KD_LOSS": kind, "KD_TEMPERATURE": 2}
    place.run("sft", kind, **changes)
    result, steps = place.result(kind), place.steps(kind)
    assert result["gain"]["loss"][1] > 0.3 and steps[-1]["kd"] < steps[0]["kd"]
    for step in steps:
        assert step["loss"] == pytest.approx(0.5 * step["nats"] + 0.5 * step["kd"], rel=1e-3)
    teacher = place.result(straight)["after"]
    assert {name: result["teacher"][name] for name in teacher} == teacher
    assert re.search(r"^ +before +teacher$", place.log(kind), re.MULTILINE)
    later = STOPPED.replace("== 13", "== 18")  # what goes on is quantization-aware
    place.run("sft", f"{kind} stopped", later, 128 + signal.SIGTERM, **changes)
    training = torch.load(
        S.newest_checkpoint(place.of(f"{kind} stopped"))[0] / "training.pt", weights_only=True
    )
    assert [list(w.shape) for w in training["projection"].values()] == (
        [[32, 16]] if kind == "projection" else []
    )
    place.run(
        "sft",
        f"{kind} stopped",
        **{**UNSET, "OUT_DIR": place.folder / f"{kind} stopped", "RESUME": "run"},
    )
    place.same(f"{kind} stopped", kind)
    _, tensors, _ = S.read_artifact(place.of(kind) / "model.upar")
    network, *_ = P.load_model("ARTIFACT", str(place.of(kind)))
    assert tensors.keys() == network.state_dict().keys() and network.config.model_dim == 16


FAULTS = {
    "teacher of another tokenizer": (
        {"TOKENIZER_PATH": "MODEL", "TEACHER": "STRAIGHT"},
        r"TEACHER='.*': .*model.upar has the tokenizer bytes; must be the student's, "
        r"tokenizer.model, with role tokens",
    ),
    "no such teacher": (
        {"TEACHER": "none"},
        "TEACHER='none': must be a run, a checkpoint or an artifact",
    ),
    "nothing to distil from": ({"KD_ALPHA": 0.9}, "KD_ALPHA=0.9: needs a TEACHER"),
    "nothing trains the head": (
        {"TEACHER": "STRAIGHT", "KD_LOSS": "pool", "KD_ALPHA": 1},
        "KD_ALPHA=1: must be less, or KD_LOSS=pool trains no head",
    ),
    "top one": ({"TEACHER": "STRAIGHT", "KD_TOP_K": 1}, "KD_TOP_K=1: must be 0 or at least 2"),
    "no such loss": (
        {"KD_LOSS": "hinton"},
        "KD_LOSS='hinton': must be one of forward, reverse, jsd, attention, ",
    ),
    "alpha": ({"KD_ALPHA": 1.5}, "KD_ALPHA=1.5: must be a number from 0.0 to 1.0"),
    "temperature": ({"KD_TEMPERATURE": 0}, "KD_TEMPERATURE=0.0: must be a number from 0.01"),
    "setting of quantize.py": (
        {"DISTILL_STEPS": 5},
        "DISTILL_STEPS='5': no setting of this script",
    ),
    "windows": (
        {"TRAIN_BATCH_TOKENS": 100},
        "TRAIN_BATCH_TOKENS=100: must be a multiple of TRAIN_SEQ_LEN x ranks",
    ),
    "no such file": ({"TRAIN_FILES": "none.jsonl"}, "none.jsonl: cannot be read"),
    "what to train on": ({"TRAIN_ON": "user"}, "TRAIN_ON='user': must be one of assistant, all"),
    "adapters and QAT": ({"LORA_RANK": 4}, "QAT=1: adapters are not quantized"),
    "rows too long": (
        {"TRAIN_SEQ_LEN": 8, "TRAIN_BATCH_TOKENS": 8},
        r"used none; left out more than TRAIN_SEQ_LEN=8 tokens: 300 .*must hold one",
    ),
    "compiled with a teacher": (
        {"TEACHER": "STRAIGHT", "COMPILE": 1},
        "COMPILE=1: must be 0 with a TEACHER",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_one_line(place, straight, name, tmp_path):
    changes, said = FAULTS[name]
    words = {"STRAIGHT": place.of(straight), "MODEL": tmp_path / "own.model"}
    if "MODEL" in changes.values():
        train_model(tmp_path / "own.model")
    line = place.refused(
        "sft",
        f"fault {name}",
        **{
            **SHORT,
            "QAT": int("QAT" in name or name == "adapters and QAT"),
            **{key: words.get(value, value) for key, value in changes.items()},
        },
    )
    assert re.search(said, line), line


# ----------------------------------------------------------------------------------------------------------- the guides
def commands(guide: str) -> list[str]:
    text = (ROOT / "docs" / guide).read_text(encoding="utf-8")
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]


@pytest.mark.full
@pytest.mark.parametrize(("guide", "least"), [("sft.md", 7), ("distillation.md", 6)])
def test_every_command_of_the_guides(tmp_path, guide, least):
    """As they stand there, one after the other in one folder, by bash; settings from the environment make them tiny."""
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    for name, module in (("python", ""), ("torchrun", "-m torch.distributed.run")):
        (bin_ / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
        (bin_ / name).chmod(0o755)
    for name in ("train_sft.py", "train_grpo.py", "sample.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    rows = rows_of(200)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "b.jsonl").write_text(
        "".join(
            json.dumps(
                {
                    "messages": [
                        {"role": "user", "content": row["output"]},
                        {"role": "assistant", "content": row["instruction"]},
                    ]
                }
            )
            + "\n"
            for row in rows
        )
    )
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    grpo = {
        "SFT_STEPS": "5",
        "PROMPTS_PER_STEP": "4",
        "GROUP_SIZE": "4",
        "MINI_BATCHES": "2",
        "MAX_NEW_TOKENS": "10",
        "EVAL_PROMPTS": "8",
    }
    tiny = {
        name: value
        for name, value in TINY.items()
        if name not in ("LEARNING_RATE", "LAYER_PATTERN", "MODEL_DIM", "NUM_HEADS")
    } | {"ITERATIONS": "8"}
    plain = {**kept, "OMP_NUM_THREADS": "1", "PATH": f"{bin_}:{os.environ['PATH']}"}
    found = commands(guide)
    assert len(found) >= least
    for command in found:
        own = plain
        if "train_sft" in command:
            own = {**plain, **tiny, "DEMONSTRATIONS": "200", "EVAL_PROMPTS": "16"}
        elif "train_grpo" in command:
            own = {
                **plain,
                **{name: tiny[name] for name in tiny if name != "TRAIN_BATCH_TOKENS"},
                **grpo,
            }
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=tmp_path,
            env=own,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, f"{command}: {done.stdout[-500:]} {done.stderr[-1500:]}"
    ended = list((tmp_path / "runs").glob("*/result.json"))
    assert len(ended) == sum("train_" in command for command in found)
