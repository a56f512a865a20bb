"""SHARD=1: what ranks compute that hold shards of the weights, what they hold, and what they leave."""

import os
import re
import shutil
import signal
import subprocess

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore

import train_dpo as D
import train_sft as S
from conftest import (
    BYTES,
    POST,
    ROOT,
    Place,
    blocks,
    own_settings,
    pack,
    read_json,
    refusal,
    run_guide,
    small_network,
    stop_at,
    write_lines,
)

# Losses in full precision. At the end each rank writes what it holds, in bytes.
RECORD = """
import json, os
T.METRIC_FORMATS.update(loss="{:.9g}", grad_norm="{:.9g}")
T.KEEP_CHECKPOINTS = 99
def bytes_of(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
def finish(run, trainer, *rest, inner=T.finish):
    states = trainer.optimizers[0].state.values()
    held = dict(
        weights=bytes_of(map(T.rows_of, trainer.network.state_dict().values())),
        gradients=bytes_of(param.grad for param in trainer.trained.values()),
        state=bytes_of(value for state in states for value in state.values()),
        averages=bytes_of(value for one in trainer.averages.values() for value in one.values),
    )
    with open(f"{run.folder}/held_{os.environ.get('RANK', 0)}.json", "w") as file:
        json.dump(held, file)
    return inner(run, trainer, *rest)
T.finish = finish
"""
WORDS = [chr(97 + n % 20) + chr(97 + n // 20) for n in range(200)]
ROWS = [{"prompt": word, "completion": word[::-1]} for word in WORDS]
PAIRS = [{"prompt": word, "chosen": word[::-1], "rejected": word + "."} for word in WORDS]
STOPPED = 128 + signal.SIGTERM


def make_place(folder, script, rows, **changes):
    """Return a place for runs of a network whose layers share a mixer, and a block too."""
    net = small_network(layers="g s1 s1 A2 A2", model_dim=128)
    tiny = dict(POST, ITERATIONS=8, SAVE_EVERY=2, EVAL_PROMPTS=13, SHARD=1, **changes)
    tiny |= dict(TRAIN_FILES=write_lines(folder / "rows.jsonl", rows))
    tiny |= dict(INIT_FROM=pack(net, BYTES, folder / "blank"))
    return Place(folder, None, own_settings(script, tiny), script)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return a place for runs of train_sft.py, by micro-batches of one window."""
    return make_place(tmp_path_factory.mktemp("shards"), "train_sft", ROWS, MICRO_BATCH_TOKENS=64)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Return a place for runs of train_dpo.py."""
    return make_place(tmp_path_factory.mktemp("sharded_pairs"), "train_dpo", PAIRS)


@pytest.fixture(scope="module")
def one(place):
    """Return a run of one process without shards."""
    place.run("one", RECORD, SHARD=0)
    return "one"


@pytest.fixture(scope="module")
def two(place):
    place.ranks("two", RECORD)
    return "two"


def assert_close(place, out, other):
    """Two runs had the same losses and gradient norms, and ended with the same scores.

    Float32 sums differ in their order: by step 7 the losses are up to 1.1e-4 apart with AVX2.
    """
    ours, theirs = (place.result(run) for run in (out, other))
    for name in ("loss", "grad_norm"):
        values, expected = (place.logged(run, name) for run in (out, other))
        for step in (0, 8):  # held-out losses, too
            values.pop(step, None)
            expected.pop(step, None)
        # The line of a step after which a signal stopped the run is missing.
        assert len(values) >= 4 and [*expected] == [*range(1, 8)]
        assert values == pytest.approx(
            {step: expected[step] for step in values}, rel=5e-4, abs=1e-5
        )
        assert ours["last"][name] == pytest.approx(theirs["last"][name], rel=5e-4, abs=1e-5)
    for key in ("before", "after"):
        assert ours[key]["loss"] == pytest.approx(theirs[key]["loss"], rel=1e-3, abs=1e-4)
    assert ours["params"] == theirs["params"] and ours["phases"].keys() == theirs["phases"].keys()


def held(place, out, rank):
    return read_json(place.of(out) / f"held_{rank}.json")


def assert_shares(place, out, whole_run, ranks):
    """A rank holds 1 / ranks of everything, and what a shard has more than another is one row."""
    whole = held(place, whole_run, 0)
    shares = [held(place, out, rank) for rank in range(ranks)]
    tensors = place.checkpoint(whole_run, 8).values()
    rows = sum(4 * (tensor[0].numel() + 1) for tensor in tensors)
    for name, rows_more in dict(weights=1, gradients=1, state=2, averages=2).items():
        counters = 4 * len(tensors) * (ranks - 1)
        assert whole[name] <= sum(share[name] for share in shares) <= whole[name] + counters
        for share in shares:
            assert share[name] <= whole[name] / ranks + rows_more * rows, name


def test_two_ranks_learn_what_one_does_and_hold_half(place, one, two):
    assert_close(place, two, one)
    assert_shares(place, two, one, 2)
    results = [place.result(run) for run in (two, one)]
    assert [result["world_size"] for result in results] == [2, 1]
    assert results[0]["phases"]["qat"]["steps"] == results[1]["phases"]["qat"]["steps"]


def test_a_sharded_run_leaves_whole_checkpoints(place, one, two):
    found = []
    for run in (two, one):
        file = place.of(run) / "step_000008" / "training.pt"
        training = torch.load(file, weights_only=True)
        tensors = place.checkpoint(run, 8)
        for name, state in training["optimizers"].items():
            tensors |= {f"{name} {key}": value for key, value in state.items()}
        for name in ("ema", "swa"):
            tensors |= {f"{name} {at}": w for at, w in enumerate(training[name]["values"])}
        found.append(tensors)
    ours, theirs = found
    assert ours.keys() == theirs.keys() and len(ours) > 60
    for name, value in ours.items():
        assert type(value) is torch.Tensor and torch.allclose(value, theirs[name], atol=2e-4), name


@pytest.mark.parametrize("module", [S, D])
def test_what_does_not_go_with_shards_is_one_line(module, monkeypatch):
    refusal(module.UserError, "^SHARD=1: must be 0 without torchrun", module.Settings, shard=True)
    monkeypatch.setenv("RANK", "0")
    wrong = [("OPTIMIZER='muon'", dict(optimizer="muon")), ("SHARD=1", dict(compile=True))]
    if module is S:
        wrong.append(("SHARD=1", dict(teacher="runs/x")))
    for name, given in wrong:
        refusal(module.UserError, f"^{name}: must be ", module.Settings, shard=True, **given)


def test_blocks_of_adamw8bit_are_not_shared(monkeypatch):
    monkeypatch.setattr(S.dist, "get_world_size", lambda: 4)
    fitting = {"w_up": torch.zeros(16, 64), "w_down": torch.zeros(264, 128), "norm": torch.zeros(3)}
    S.check_blocks(fitting)
    for shape in ((16, 32), (18, 256), (18, 512)):
        message = rf"4 ranks .* matrix {re.escape(str(shape))} equally"
        refusal(S.UserError, message, S.check_blocks, {"w_up": torch.zeros(shape)})


@pytest.fixture
def mesh():
    """Return the mesh of a process group of one rank that believes to be one of four."""
    S.dist.init_process_group("fake", rank=2, world_size=4, store=FakeStore())
    yield S.dist.init_device_mesh("cpu", (4,))
    S.dist.destroy_process_group()


def test_a_rank_takes_its_rows_and_each_layer_is_sharded_by_itself(mesh):
    net = small_network(layers="g s1 s1 A2 A2")
    S.shard_network(net, torch.device("cpu"))
    # While a mixer runs, it and its block alone are whole.
    assert all(isinstance(module, FSDPModule) for module in [*net.mixers, *net.blocks, net])
    assert S.take_rows(torch.tensor(3.0), mesh).item() == 3
    for shape in ((5,), (1, 3), (7, 2), (8, 2), (2, 8, 256)):
        whole = torch.arange(torch.tensor(shape).prod()).view(shape)
        dim = len(shape) // 3
        chunks = [*whole.chunk(4, dim), *[whole.narrow(dim, 0, 0)] * 4]
        assert torch.equal(S.take_rows(whole, mesh).to_local(), chunks[2])


# ---------------------------------------------------------------------------------------- long tests
@pytest.mark.full
@pytest.mark.parametrize(
    ("optimizer", "ranks", "lora"),
    [("adamw", 4, 0), ("lion", 2, 0), ("adamw8bit", 4, 0), ("adamw", 2, 8), ("adamw8bit", 2, 8)],
)
def test_every_optimizer(place, optimizer, ranks, lora):
    """With all weights, and with adapters and layers that are computed again."""
    given = dict(OPTIMIZER=optimizer, QAT=0, LORA_RANK=lora)
    if lora:
        given |= dict(ACTIVATION_CHECKPOINTING=1, LEARNING_RATE=0.01)
    whole = f"{optimizer} {lora}"
    out = f"{whole} on {ranks}"
    place.run(whole, RECORD, SHARD=0, **given)
    place.ranks(out, RECORD, ranks, **given)
    # Where a gradient is nearly 0, another order of sums turns the sign by which Lion moves.
    assert_close(place, out, whole)
    if not lora:
        assert_shares(place, out, whole, ranks)


@pytest.mark.full
def test_a_run_goes_on_with_other_numbers_of_ranks(place):
    """2 ranks, then 4, then 1 with shards, then a process without."""
    place.run("at once", RECORD, SHARD=0, OPTIMIZER="adamw8bit")
    place.ranks("in turns", RECORD + stop_at(1), 2, STOPPED, OPTIMIZER="adamw8bit")
    again = place.resumed
    place.ranks("in turns", RECORD + stop_at(3), 4, STOPPED, **again)
    place.ranks("in turns", RECORD + stop_at(5), 1, STOPPED, **again)
    shutil.copytree(place.of("in turns"), place.of("then whole"))
    place.ranks("in turns", RECORD, 1, **again)
    place.resume("then whole", RECORD, SHARD=0)
    for out in ("in turns", "then whole"):
        assert_close(place, out, "at once")
    events = place.result("in turns")["events"]
    assert [event["ranks"] for event in events] == [4, 1, 1]


@pytest.mark.full
def test_steps_that_are_not_finite_change_nothing(place):
    """One rank alone has a bad loss; both skip the step."""
    bad = """
def forward_backward(self, *rest, inner=T.SFTTrainer.forward_backward):
    sums = inner(self, *rest)
    calls.append(0)
    if len(calls) in (3, 4) and os.environ.get("RANK") == "1":
        sums[0] = float("nan")
    return sums
calls = []
T.SFTTrainer.forward_backward = forward_backward
"""
    place.ranks("bad", RECORD + bad)
    events = [event["event"] for event in place.result("bad")["events"]]
    assert events.count("skipped_step") == 2
    before, after = (place.checkpoint("bad", step) for step in (2, 4))
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.full
def test_pairs_of_four_ranks(pairs):
    """A reward model with adapters, whose value head is trained beside them; and the reference of DPO
    is one file for any number of ranks.
    """
    reward = dict(OBJECTIVE="reward", LORA_RANK=4, QAT=0, LEARNING_RATE=0.01)
    for whole, given in (("dpo", {}), ("reward", reward)):
        pairs.run(whole, RECORD, SHARD=0, **given)
        pairs.ranks(f"{whole} on 4", RECORD, 4, **given)
        assert_close(pairs, f"{whole} on 4", whole)
    names = [[*(pairs.folder / out / "cache").iterdir()] for out in ("dpo", "dpo on 4")]
    assert [path.name for path in names[0]] == [path.name for path in names[1]]


# --------------------------------------------------------------------------------------- the guide
SLURM = {
    "srun": 'echo "$RUN_ID/$RESUME $*"; mkdir -p runs/big/$MADE; echo "$SAID" >runs/big/log.txt\n'
    'eval "${@: -1}"',
    "scontrol": '[ $1 = show ] && echo node1 || echo "$*"',
    "python": "echo $RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR $*",
}


def test_the_jobs_of_the_guide_begin_requeue_and_resume(tmp_path):
    """By stand-ins for Slurm: requeued in set-up, then by an error, then a start without torchrun."""
    job, ranks = blocks("scale.md", "sh")
    for name, text in SLURM.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)

    def output(script, **given):
        path = f"{tmp_path}:{os.environ['PATH']}"
        facts = dict(PATH=path, SLURM_CPUS_PER_TASK="32", SLURM_JOB_ID="7", SLURM_PROCID="9")
        facts |= dict(SLURM_LOCALID="1", SLURM_NTASKS="16", SLURM_NNODES="2", HOST="node1")
        command = ["bash", "-c", script.replace("train_sft.py", ":")]
        done = subprocess.run(command, cwd=tmp_path, env=facts | given, stdout=subprocess.PIPE)
        return done.stdout.decode().splitlines()

    first, requeued = output(job, MADE="", SAID="stopped by SIGTERM: nothing was saved")
    assert first.startswith("big/ --cpus-per-task=32 torchrun --nnodes=2 ")
    assert first.endswith(" --rdzv-id=7 --rdzv-endpoint=node1:29400 :") and requeued == "requeue 7"
    (again,) = output(job, MADE="step_000000", SAID="error: x", SLURM_RESTART_COUNT="1")
    assert again.startswith("big/ ") and (tmp_path / "runs/big.1/log.txt").exists()
    assert output(job, SLURM_RESTART_COUNT="2")[0].startswith("/big ")
    assert output(ranks)[1] == "9 1 16 node1 :"


def test_the_command_of_the_guide_fits_two_nodes(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    text = (ROOT / "docs/scale.md").read_text()
    (given,) = re.findall(r"^RUN_ID=big (.*) torchrun ", text, re.M)
    found = S.load_settings(S.Settings, dict(word.split("=") for word in given.split()))
    assert found.shard and found.train_batch_tokens % (16 * found.train_seq_len) == 0


@pytest.mark.full
@pytest.mark.parametrize("script", ["train_sft", "train_dpo"])
def test_fewer_rows_than_ranks(tmp_path, script):
    place = make_place(tmp_path, script, PAIRS if script == "train_dpo" else ROWS)
    lines = place.tiny["TRAIN_FILES"].read_bytes().splitlines()[:3]
    given = dict(ITERATIONS=2, EMA=0, SWA=0, QAT=0, SAVE_EVERY=0, SHARD=0)
    given |= own_settings(script, dict(TRAIN_BATCH_TOKENS=384, PAIRS_PER_STEP=3))
    given |= dict(TRAIN_FILES=write_lines(tmp_path / "one.jsonl", lines[:1]))
    given |= dict(VAL_FILES=write_lines(tmp_path / "two.jsonl", lines[1:]))
    place.ranks("few", ranks=3, **given)
    place.run("few alone", **given)
    few, alone = (place.result(name)["after"]["loss"] for name in ("few", "few alone"))
    assert few == pytest.approx(alone, rel=1e-3)


@pytest.mark.full
def test_every_command_of_the_guide(tmp_path):
    write_lines(tmp_path / "a.jsonl", ROWS)
    write_lines(tmp_path / "pairs.jsonl", PAIRS)
    run_guide("scale.md", tmp_path, least=4)
    for name in ("sharded", "pairs", "adapted"):
        result = read_json(tmp_path / "runs" / name / "result.json")
        assert result["world_size"] == 2 and result["settings"]["shard"]
