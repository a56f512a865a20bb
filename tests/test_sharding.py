"""SHARD=1: what ranks compute that hold shards of the weights, what they hold, and what they leave."""

import json
import re
import shutil
import signal
import subprocess

import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

import sample as P
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
    refusal,
    run_guide,
    small_network,
    stop_at,
    write_lines,
)

# Layers that share a mixer, and layers that share a block too.
SHARED = "g s1 s1 A2 A2"
# Losses in full precision. At the end each rank writes what it holds, in bytes, and how many
# modules were whole at a time.
RECORD = """
import json, os
T.METRIC_FORMATS.update(loss="{:.9g}", grad_norm="{:.9g}")
T.KEEP_CHECKPOINTS = 99
whole_at_once = []
def watch(trainer):
    def hook(module, inputs):
        modules = [*trainer.network.mixers, *trainer.network.blocks]
        first = [next(module.parameters()) for module in modules]
        whole_at_once.append(sum(not isinstance(param, T.DTensor) for param in first))
    for module in trainer.network.mixers:
        module.register_forward_pre_hook(hook)
def bytes_of(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
def begin_step(self, run, inner=T.Finetuner.begin_step):
    if not whole_at_once:
        watch(self)
    return inner(self, run)
def finish(run, trainer, *rest, inner=T.finish):
    tensors = trainer.network.state_dict().values()
    states = trainer.optimizers[0].state.values()
    states = [value for state in states for value in state.values()]
    held = dict(
        weights=bytes_of(map(T.rows_of, tensors)),
        gradients=bytes_of(param.grad for param in trainer.trained.values()),
        state=bytes_of(states),
        averages=bytes_of(value for one in trainer.averages.values() for value in one.values),
        whole_at_once=max(whole_at_once),
    )
    rank = os.environ.get("RANK", 0)
    with open(f"{run.folder}/held_{rank}.json", "w") as file:
        json.dump(held, file)
    return inner(run, trainer, *rest)
T.Finetuner.begin_step = begin_step
T.finish = finish
"""
TINY = dict(POST, ITERATIONS=8, SAVE_EVERY=2, EVAL_PROMPTS=13, SHARD=1)


def write_rows(path):
    words = [chr(97 + n % 20) + chr(97 + n // 20) for n in range(200)]
    return write_lines(path, [{"prompt": word, "completion": word[::-1]} for word in words])


def write_pairs(path):
    words = [chr(97 + n % 20) + chr(97 + n // 20) for n in range(200)]
    pairs = [{"prompt": word, "chosen": word[::-1], "rejected": word + "."} for word in words]
    return write_lines(path, pairs)


def make_place(folder, script, files, layers=SHARED):
    blank = pack(small_network(layers=layers, model_dim=128), BYTES, folder / "blank")
    tiny = own_settings(script, dict(TINY, TRAIN_FILES=files))
    return Place(folder, None, dict(tiny, INIT_FROM=blank), script)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return a place for runs of train_sft.py, by MICRO_BATCH_TOKENS of one window."""
    folder = tmp_path_factory.mktemp("sharding")
    place = make_place(folder, "train_sft", write_rows(folder / "rows.jsonl"))
    place.tiny["MICRO_BATCH_TOKENS"] = 64
    return place


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Return a place for runs of train_dpo.py."""
    folder = tmp_path_factory.mktemp("sharded_pairs")
    return make_place(folder, "train_dpo", write_pairs(folder / "pairs.jsonl"))


def run_whole(place, out, **changes):
    """Return `out`, a run of one process without shards."""
    place.run(out, RECORD, SHARD=0, **changes)
    return out


@pytest.fixture(scope="module")
def one(place):
    return run_whole(place, "one")


@pytest.fixture(scope="module")
def two(place):
    place.ranks("two", RECORD)
    return "two"


def assert_close(place, out, other, loss_rel=1e-5):
    """Two runs had the same losses and gradient norms, and ended with the same scores."""
    for name, rel in (("loss", loss_rel), ("grad_norm", 1e-4)):
        ours, theirs = ({**place.logged(run, name)} for run in (out, other))
        for run, values in ((out, ours), (other, theirs)):
            values.pop(0, None)  # a held-out loss, as the last one
            values[8] = place.result(run)["last"][name]
        # The line of a step after which a signal stopped the run is missing.
        assert len(ours) >= 5 and theirs.keys() == {*range(1, 9)}
        expected = {step: theirs[step] for step in ours}
        assert ours == pytest.approx(expected, rel=rel, abs=1e-5), name
    ours, theirs = (place.result(run) for run in (out, other))
    for key in ("before", "after"):
        assert ours[key]["loss"] == pytest.approx(theirs[key]["loss"], rel=1e-3, abs=1e-4)
    assert ours["params"] == theirs["params"] and ours["phases"].keys() == theirs["phases"].keys()


def held(place, out, ranks):
    paths = [place.of(out) / f"held_{rank}.json" for rank in range(ranks)]
    return [json.loads(path.read_text()) for path in paths]


def assert_shares(place, out, whole_run, ranks):
    """A rank holds 1 / ranks of everything, and what a shard has more than another is one row."""
    (whole,) = held(place, whole_run, 1)
    shares = held(place, out, ranks)
    network, *_ = S.load_model("INIT_FROM", str(place.of(whole_run)))
    tensors = network.state_dict().values()
    rows = sum(4 * (tensor[0].numel() + 1) for tensor in tensors)
    for name, rows_more in dict(weights=1, gradients=1, state=2, averages=2).items():
        total = sum(share[name] for share in shares)
        counters = 4 * len(tensors) * (ranks - 1)
        assert whole[name] <= total <= whole[name] + counters
        for share in shares:
            assert share[name] <= whole[name] / ranks + rows_more * rows, name
    # While a mixer runs, it and its block alone are whole.
    assert [share["whole_at_once"] for share in shares] == [2] * ranks


def test_two_ranks_learn_what_one_does_and_hold_half(place, one, two):
    assert_close(place, two, one)
    assert_shares(place, two, one, 2)
    assert place.result(two)["world_size"] == 2
    assert (
        place.result(two)["phases"]["qat"]["steps"] == place.result(one)["phases"]["qat"]["steps"]
    )


def test_a_sharded_run_leaves_what_any_run_leaves(place, one, two):
    """Whole checkpoints of the same tensors, and an artifact that sample.py reads."""
    ours, theirs = (place.checkpoint(run, 8) for run in (two, one))
    assert {name: tensor.shape for name, tensor in ours.items()} == {
        name: tensor.shape for name, tensor in theirs.items()
    }
    for name, tensor in ours.items():
        assert type(tensor) is torch.Tensor
        assert torch.allclose(tensor, theirs[name], atol=2e-4), name
    training, expected = (
        torch.load(place.of(run) / "step_000008" / "training.pt", weights_only=True)
        for run in (two, one)
    )
    assert training.keys() == expected.keys()
    for name, state in training["optimizers"].items():
        for key, value in state.items():
            assert torch.allclose(value, expected["optimizers"][name][key], atol=1e-4), (name, key)
    for name in ("ema", "swa"):
        for value, other in zip(training[name]["values"], expected[name]["values"], strict=True):
            assert torch.allclose(value, other, atol=2e-4)
    network, *_ = P.load_model("ARTIFACT", str(place.of(two)))
    reference, *_ = P.load_model("ARTIFACT", str(place.of(one)))
    ids = torch.arange(4, 60)[None]
    with torch.no_grad():
        assert torch.allclose(network(ids), reference(ids), atol=0.05)
    assert [*S.newest_checkpoint(place.of(two))] == [place.of(two) / "step_000008", []]


def test_what_does_not_go_with_shards_is_one_line(place, pairs, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    for module in (S, D):
        for kind in ("muon", "adafactor"):
            line = f"OPTIMIZER='{kind}': must be adamw, lion or adamw8bit with SHARD=1"
            assert refusal(D.UserError, "", D.Settings, shard=True, optimizer=kind) == line
        with pytest.raises(
            module.UserError, match="^SHARD=1: must be 0 with COMPILE=1 or a TEACHER$"
        ):
            module.Settings(shard=True, compile=True)
    with pytest.raises(S.UserError, match="^SHARD=1: must be 0 with COMPILE=1 or a TEACHER$"):
        S.Settings(shard=True, teacher="runs/x")
    monkeypatch.delenv("RANK")
    for module in (S, D):
        with pytest.raises(module.UserError, match="^SHARD=1: must be 0 without torchrun"):
            module.Settings(shard=True)


def test_blocks_of_adamw8bit_are_not_shared(monkeypatch):
    monkeypatch.setattr(S.dist, "get_world_size", lambda: 4)
    fitting = {"w_up": torch.zeros(16, 64), "w_down": torch.zeros(264, 128), "norm": torch.zeros(3)}
    S.check_blocks(fitting)
    for shape in ((16, 32), (18, 256), (18, 512)):
        with pytest.raises(
            S.UserError, match=rf"4 ranks .* matrix {re.escape(str(shape))} equally"
        ):
            S.check_blocks({"w_up": torch.zeros(shape)})


@pytest.fixture
def mesh():
    """Return the mesh of a process group of one rank that believes to be one of four."""
    S.dist.init_process_group("fake", rank=2, world_size=4, store=FakeStore())
    yield S.dist.init_device_mesh("cpu", (4,))
    S.dist.destroy_process_group()


@pytest.mark.parametrize("shape", [(5,), (1, 3), (7, 2), (8, 2), (2, 8, 256)], ids=str)
def test_a_rank_takes_its_rows(mesh, shape):
    whole = torch.arange(torch.tensor(shape).prod()).view(shape)
    dim = 1 if len(shape) == 3 else 0
    chunks = whole.chunk(4, dim)
    nothing = whole.narrow(dim, 0, 0)
    expected = chunks[2] if len(chunks) > 2 else nothing
    assert torch.equal(S.take_rows(whole, mesh).to_local(), expected)
    assert S.take_rows(torch.tensor(3.0), mesh).item() == 3


# ---------------------------------------------------------------------------------------- long tests
@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("optimizer", ["adamw", "lion", "adamw8bit"])
@pytest.mark.parametrize("lora", [0, 8])
def test_every_optimizer(place, optimizer, ranks, lora):
    """With all weights, and with adapters and layers that are computed again."""
    given = dict(OPTIMIZER=optimizer, QAT=0, LORA_RANK=lora)
    if lora:
        given |= dict(ACTIVATION_CHECKPOINTING=1, LEARNING_RATE=0.01)
    whole = f"{optimizer} {lora}"
    if not place.of(whole).exists():
        run_whole(place, whole, **given)
    out = f"{whole} on {ranks}"
    place.ranks(out, RECORD, ranks, **given)
    # Where a gradient is nearly 0, another order of sums turns the sign by which Lion moves.
    assert_close(place, out, whole, 5e-5 if optimizer == "lion" else 1e-5)
    if not lora:
        assert_shares(place, out, whole, ranks)


@pytest.mark.full
@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
def test_a_run_goes_on_with_other_numbers_of_ranks(place, optimizer):
    """2 ranks, then 4, then 1 with shards, then a process without."""
    whole = run_whole(place, f"{optimizer} at once", OPTIMIZER=optimizer)
    out = f"{optimizer} in turns"
    code = 128 + signal.SIGTERM
    place.ranks(out, RECORD + stop_at(1), 2, code, OPTIMIZER=optimizer)
    again = {**place.unset, "RUN_ID": None, "RESUME": "run"}
    place.ranks(out, RECORD + stop_at(3), 4, code, **again)
    place.ranks(out, RECORD + stop_at(5), 1, code, **again)
    shutil.copytree(place.of(out), place.of(f"{out}, whole"))
    place.ranks(out, RECORD, 1, **again)
    assert_close(place, out, whole)
    events = place.result(out)["events"]
    assert [event["ranks"] for event in events] == [4, 1, 1]
    steps = [event["step"] for event in events]
    assert 0 < steps[0] < steps[1] < steps[2] < 8
    place.resume(f"{out}, whole", RECORD, SHARD=0)
    assert_close(place, f"{out}, whole", whole)


@pytest.mark.full
def test_steps_that_are_not_finite_change_nothing(place):
    """One rank alone has a bad loss; both skip the step."""
    bad = """
def forward_backward(self, *rest, inner=T.SFTTrainer.forward_backward):
    sums = inner(self, *rest)
    number = len(calls)
    calls.append(0)
    if number in (2, 3) and os.environ.get("RANK", "1") == "1":
        sums[0] = float("nan")
    return sums
calls = []
T.SFTTrainer.forward_backward = forward_backward
"""
    place.ranks("bad two", RECORD + bad)
    place.run("bad one", RECORD + bad, SHARD=0)
    for out in ("bad one", "bad two"):
        events = [event["event"] for event in place.result(out)["events"]]
        assert events.count("skipped_step") == 2
        before, after = (place.checkpoint(out, step) for step in (2, 4))
        assert all(torch.equal(before[name], after[name]) for name in before)
    two, one = (place.result(out)["after"]["loss"] for out in ("bad two", "bad one"))
    assert two == pytest.approx(one, rel=1e-3)


@pytest.mark.full
def test_pairs_of_two_and_four_ranks(pairs):
    """DPO, and a reward model with adapters, whose value head is trained beside them."""
    objectives = dict(dpo={}, reward=dict(LORA_RANK=4, QAT=0, LEARNING_RATE=0.01))
    for objective, given in objectives.items():
        whole = run_whole(pairs, objective, OBJECTIVE=objective, **given)
        for ranks in (2, 4):
            out = f"{objective} on {ranks}"
            pairs.ranks(out, RECORD, ranks, OBJECTIVE=objective, **given)
            assert_close(pairs, out, whole)
            assert (
                pairs.result(out)["after"]["accuracy"] == pairs.result(whole)["after"]["accuracy"]
            )
    # The reference of whole weights is one file for any number of ranks.
    assert len([*(pairs.folder / "dpo on 2" / "cache").iterdir()]) == 1
    names = [next((pairs.folder / out / "cache").iterdir()).name for out in ("dpo", "dpo on 2")]
    assert names[0] == names[1]


# --------------------------------------------------------------------------------------- the guide
def test_the_slurm_script_is_bash_and_its_settings_are_settings(tmp_path):
    (script,) = blocks("scale.md", "sh")
    (tmp_path / "job.sbatch").write_text(script)
    assert subprocess.run(["bash", "-n", tmp_path / "job.sbatch"]).returncode == 0
    (exported,) = re.findall(r"^export RUN_ID.*$", script, re.M)
    names = re.findall(r"\b([A-Z_]+)=", exported)
    assert "SHARD" in names and {name.lower() for name in names} <= vars(S.Settings).keys()


@pytest.mark.full
def test_every_command_of_the_guide(tmp_path):
    write_rows(tmp_path / "a.jsonl")
    write_pairs(tmp_path / "pairs.jsonl")
    run_guide("scale.md", tmp_path, least=4)
    for name in ("sharded", "pairs", "adapted"):
        result = json.loads((tmp_path / "runs" / name / "result.json").read_text())
        assert result["world_size"] == 2 and result["settings"]["shard"]


def test_the_command_for_two_nodes(monkeypatch):
    """Its settings fit; test_lasting.py runs such a command."""
    monkeypatch.setenv("RANK", "0")
    (command,) = re.findall(r"^RUN_ID=big (.*)$", (ROOT / "docs/scale.md").read_text(), re.M)
    given, _, words = command.partition(" torchrun ")
    settings = dict(word.split("=") for word in given.split())
    assert settings["SHARD"] == "1" and words.endswith(" train_sft.py")
    S.load_settings(S.Settings, settings)
    # The batch fits 16 ranks, too.
    assert int(settings["TRAIN_BATCH_TOKENS"]) % (16 * S.Settings.train_seq_len) == 0
