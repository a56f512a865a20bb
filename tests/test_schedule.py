"""Clock, plan and averages against a fake clock: every phase fires, the rate lands at its floor, ranks agree."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import train_gpt as T


class FakeTime:
    """A clock that a test moves by hand."""

    def __init__(self):
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def runtime() -> T.Runtime:
    return T.Runtime(rank=0, world_size=1, device=torch.device("cpu"), distributed=False)


def settings(**changes) -> T.Settings:
    return T.Settings(**{"max_wallclock_seconds": 110.0, "reserve_seconds": 10.0, **changes})


def run(cfg: T.Settings, step_seconds, rank_clocks: int = 1):
    """The loop of train() without a network: (plan, clock, multipliers, seconds when it stopped)."""
    now, plan = FakeTime(), T.Plan(cfg)
    clock = T.Clock(cfg.iterations, max(0.0, cfg.max_wallclock_seconds - cfg.reserve_seconds), runtime(), now=now)
    multipliers, step = [], 0
    clock.start()
    while not clock.is_last(step):
        clock.receive()
        progress = clock.progress(step)
        plan.advance(step, progress)
        multipliers.append(plan.rates(progress)[0])
        now.seconds += step_seconds(step, now.seconds - 100.0)
        clock.send(torch.tensor(1.0), torch.tensor(False), torch.tensor(0.0))
        step += 1
        assert step < 100_000
    return plan, clock, multipliers, now.seconds - 100.0


SPEEDS = {
    "steady": lambda step, at: 0.25,
    "slow first step": lambda step, at: 30.0 if step == 0 else 0.25,
    "stall in the middle": lambda step, at: 20.0 if 50.0 <= at < 50.5 else 0.25,
    "three times slower by the end": lambda step, at: 0.1 * (1 + 2 * at / 100.0),
    "three times faster by the end": lambda step, at: 0.3 / (1 + 2 * at / 100.0),
    "noisy": lambda step, at: 0.25 * (1 + 0.5 * math.sin(7.0 * step)),
    "few steps": lambda step, at: 4.0,
}


def never_fired(plan: T.Plan) -> list[str]:
    return [name for name, phase in plan.phases.items() if not phase.steps]


@pytest.mark.parametrize("name", SPEEDS)
@pytest.mark.parametrize("shape", ["linear", "cosine", "wsd"])
def test_every_phase_fires_and_the_rate_reaches_its_floor(name, shape):
    plan, clock, multipliers, ended = run(settings(lr_schedule=shape, lr_floor=0.1), SPEEDS[name])
    assert never_fired(plan) == []
    assert {phase for phase in plan.phases} == {"warmup", "warmdown", "ema", "swa", "qat"}
    step = clock.median_step()
    decrement = 0.9 * step / 100.0 / plan.warmdown * (math.pi / 2 if shape == "cosine" else 1.0)  # steepest slope
    assert 0.1 <= multipliers[-1] <= 0.1 + decrement * 1.6
    assert ended <= 100.0 + 2 * step
    assert ended >= 100.0 - 2 * step
    assert clock.used == sorted(clock.used)


def test_linear_rate_lands_within_one_decrement_of_the_floor():
    for name in ("steady", "slow first step", "stall in the middle", "three times slower by the end"):
        _, clock, multipliers, _ = run(settings(lr_floor=0.0), SPEEDS[name])
        decrement = clock.median_step() / 100.0 / 0.5
        assert multipliers[-1] <= decrement * 1.02, name


def test_a_run_cut_to_a_tenth_fires_the_same_phases_at_the_same_shares():
    full, *_ = run(settings(), SPEEDS["steady"])
    short, *_ = run(settings(max_wallclock_seconds=11.0, reserve_seconds=1.0), SPEEDS["steady"])
    assert never_fired(short) == []
    for name, phase in short.phases.items():
        assert abs(phase.start_progress - full.phases[name].start_progress) < 2 * 0.25 / 10.0


def test_steps_are_shares_of_iterations():
    plan = T.Plan(settings(iterations=2200, warmdown_iters=400))
    assert plan.phases["warmdown"].planned == pytest.approx(1 - 400 / 2200)
    assert T.Plan(settings(iterations=9999, warmdown_iters=3000)).warmdown == pytest.approx(0.30003, abs=1e-5)


def test_the_predecessors_faulty_command_fires_everything():
    """ITERATIONS=9999 WARMDOWN_ITERS=3000 and a clock that allows 400 steps: in the field nothing fired."""
    plan, clock, multipliers, _ = run(settings(iterations=9999, warmdown_iters=3000), SPEEDS["steady"])
    assert len(multipliers) == pytest.approx(400, abs=2)
    assert never_fired(plan) == []
    assert plan.phases["warmdown"].start_progress == pytest.approx(0.7, abs=0.01)
    assert multipliers[-1] < 0.01


def test_iterations_alone_end_the_run_at_the_floor():
    cfg = settings(iterations=50, max_wallclock_seconds=0.0, reserve_seconds=0.0)
    plan, clock, multipliers, _ = run(cfg, SPEEDS["steady"])
    assert len(multipliers) == 50
    assert multipliers[-1] == 0.0 and clock.used[-1] == 1.0
    assert plan.phases["qat"].steps == 51 - plan.phases["qat"].start_step


def test_multiplier_against_closed_forms():
    plan = T.Plan(settings(warmup_frac=0.1, warmdown_frac=0.4, lr_floor=0.2))
    assert plan.rates(0.05)[0] == pytest.approx(0.5)
    assert plan.rates(0.5)[0] == 1.0
    assert plan.rates(0.8)[0] == pytest.approx(0.2 + 0.8 * 0.5)
    assert plan.rates(1.0)[0] == pytest.approx(0.2)
    cosine = T.Plan(settings(warmup_frac=0.1, warmdown_frac=0.4, lr_floor=0.2, lr_schedule="cosine"))
    assert cosine.rates(0.9)[0] == pytest.approx(0.2 + 0.8 * (1 + math.cos(math.pi * 0.75)) / 2)
    wsd = T.Plan(settings(warmup_frac=0.1, warmdown_frac=0.4, lr_floor=0.2, lr_schedule="wsd"))
    assert [wsd.rates(at)[0] for at in (0.05, 0.1, 0.35, 0.6)] == pytest.approx([0.5, 1.0, 1.0, 1.0])
    assert wsd.rates(0.7)[0] == pytest.approx(0.2 + 0.8 * 0.5)  # a quarter of the warmdown: 1 - sqrt(1/4)
    assert wsd.rates(0.6 + 0.4 * 0.81)[0] == pytest.approx(0.2 + 0.8 * 0.1)  # 1 - sqrt(0.81)
    assert wsd.rates(1.0)[0] == pytest.approx(0.2)
    assert plan.rates(0.025)[1] == pytest.approx(0.90)
    assert plan.rates(0.5)[1] == pytest.approx(0.95)


def test_constant_has_no_warmdown_whatever_its_length_says():
    for changes in ({}, {"warmdown_frac": 1.0}, {"warmdown_iters": 400}):  # 400 steps of no ITERATIONS: not read
        plan, _, multipliers, _ = run(settings(lr_schedule="constant", warmup_frac=0.1, **changes), SPEEDS["steady"])
        assert set(plan.phases) == {"warmup", "ema", "swa", "qat"} and never_fired(plan) == []
        assert [plan.rates(at)[0] for at in (0.05, 0.1, 0.5, 1.0)] == pytest.approx([0.5, 1.0, 1.0, 1.0])
        assert multipliers[-1] == 1.0 and "warmdown" not in plan.describe() + plan.describe(ended=True)


def test_table_and_summary_say_what_happened():
    cfg = settings(iterations=10, max_wallclock_seconds=0.0, warmup_frac=0.2, swa=False, ema=False, qat_start_frac=0.8)
    plan, *_ = run(cfg, SPEEDS["steady"])
    assert plan.describe().splitlines() == [
        "plan: warmup from 0.0% to 20.0% of the run", "plan: warmdown from 50.0% to 100.0% of the run",
        "plan: qat from 80.0% to 100.0% of the run"]
    assert {name: vars(phase) for name, phase in plan.phases.items()} == {
        "warmup": dict(planned=0.0, end=0.2, start_step=1, start_progress=0.1, steps=2),
        "warmdown": dict(planned=0.5, end=1.0, start_step=6, start_progress=0.6, steps=5),
        "qat": dict(planned=0.8, end=1.0, start_step=10, start_progress=0.9, steps=1)}
    assert plan.describe(ended=True).splitlines() == [
        "phase: warmup   planned   0.0%, began at step 1 (10.0%), on for 2 steps",
        "phase: warmdown planned  50.0%, began at step 6 (60.0%), on for 5 steps",
        "phase: qat      planned  80.0%, began at step 10 (90.0%), on for 1 steps"]


@pytest.mark.parametrize("changes, said", [
    (dict(iterations=0, max_wallclock_seconds=0.0), "never end"),
    (dict(reserve_seconds=110.0), "RESERVE_SECONDS"),
    (dict(warmdown_iters=400), "WARMDOWN_ITERS=400"),
    (dict(muon_momentum_warmup_steps=500), "MUON_MOMENTUM_WARMUP_STEPS=500"),
    (dict(iterations=100, warmdown_iters=400), "WARMDOWN_ITERS=400"),
    (dict(qat_start_frac=1.0), "QAT_START_FRAC"),
    (dict(swa_start_frac=1.0), "SWA_START_FRAC"),
    (dict(ema_start_frac=1.0), "EMA_START_FRAC"),
    (dict(iterations=5, qat_start_frac=0.9), "QAT_START_FRAC"),
    (dict(warmup_frac=0.6), "WARMUP_FRAC"),
])
def test_impossible_plans_are_errors(changes, said):
    with pytest.raises(T.UserError, match=said):
        T.Plan(settings(**changes))


def test_a_phase_that_never_fired_is_named():
    plan, *_ = run(settings(), lambda step, at: 60.0)  # two steps: 60 s, 120 s
    assert "qat" in never_fired(plan)
    assert "NEVER FIRED" in plan.describe(ended=True)


def test_bad_steps_and_losses_arrive_one_step_late():
    now = FakeTime()
    clock = T.Clock(0, 100.0, runtime(), now=now)
    clock.start()
    assert clock.receive() is None
    now.seconds += 2.0
    clock.send(torch.tensor(3.5), torch.tensor(True), torch.tensor(15.0))
    clock.stop()
    now.seconds += 50.0  # validation: the clock stands still
    clock.start()
    assert clock.receive() == (3.5, True, True)
    assert clock.seconds[-1] == 2.0
    assert clock.receive() is None
    assert clock.elapsed() == 2.0


def test_ema_and_swa_closed_forms():
    param = torch.nn.Parameter(torch.zeros(3))
    ema, swa = T.Average([param], 0.1), T.Average([param], None)
    values, shares, expected = [1.0, 4.0, 2.0, 8.0], [0.50, 0.52, 0.60, 0.61], None
    for value, share, before in zip(values, shares, [None, *shares[:-1]], strict=True):
        param.data.fill_(value)
        ema.update(share)
        swa.update(share)
        keep = math.exp(-(share - before) / 0.1) if before else 0.0
        expected = value if expected is None else keep * expected + (1 - keep) * value
    assert ema.values[0].tolist() == pytest.approx([expected] * 3, rel=1e-6)
    assert swa.values[0].tolist() == pytest.approx([3.75] * 3, rel=1e-6)
    assert ema.values[0].dtype == torch.float32
    with T.swapped([param], swa.values):
        assert param.tolist() == pytest.approx([3.75] * 3)
    assert param.tolist() == [8.0] * 3
    swa.count = 0
    swa.update(0.7)
    assert swa.count == 1 and swa.values[0].tolist() == [8.0] * 3


RANKS = """
import json, os, sys, torch
sys.path.insert(0, {root!r})
import train_gpt as T
runtime = T.start_runtime("cpu")
class Time:
    seconds = 100.0
    def __call__(self): return self.seconds
now, plan = Time(), T.Plan(T.Settings(max_wallclock_seconds=22.0, reserve_seconds=2.0))
clock, step = T.Clock(0, 20.0, runtime, now=now), 0
clock.start()
while not clock.is_last(step):
    clock.receive()
    plan.advance(step, clock.progress(step))
    now.seconds += [0.25, 0.9][runtime.rank] * (1 + step % 3)  # rank 1's own clock would stop far earlier
    clock.send(torch.tensor(1.0), torch.tensor(False), torch.tensor(0.0))
    step += 1
with open(os.path.join(sys.argv[1], str(runtime.rank)), "w") as file:
    json.dump([step, clock.used, {{name: vars(phase) for name, phase in plan.phases.items()}}], file)
runtime.leave()
"""


def test_all_ranks_use_rank_0s_clock(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(RANKS.format(root=str(Path(__file__).resolve().parents[1])))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    subprocess.run([*launch, script, tmp_path], check=True, capture_output=True)
    zero, one = (json.loads((tmp_path / rank).read_text()) for rank in "01")
    assert zero == one
    assert zero[0] == pytest.approx(20.0 / 0.5, abs=3)
    assert all(phase["steps"] > 0 for phase in zero[2].values())
