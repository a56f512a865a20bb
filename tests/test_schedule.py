"""Clock, plan and averages against a fake clock: every phase fires, the rate lands at its floor,
ranks agree.
"""

import contextlib
import copy
import json
import math
from types import SimpleNamespace

import pytest
import torch

import train_gpt as T
from conftest import Child, environment, rank_environments, refusal, server


class FakeTime:
    """Stands for the module time: a clock that a test moves by hand."""

    seconds = 100.0

    def perf_counter(self):
        return self.seconds


@pytest.fixture(autouse=True)
def now(monkeypatch):
    monkeypatch.setattr(T, "time", FakeTime())
    return T.time


def runtime():
    return T.Runtime(rank=0, world_size=1, device=torch.device("cpu"), distributed=False)


def settings(**changes):
    return T.Settings(**{"max_wallclock_seconds": 110.0, "reserve_seconds": 10.0, **changes})


def send_report(clock, *numbers):
    """Send loss, norm and stop of a step, or some of them."""
    clock.send_report(*map(torch.tensor, (*numbers, *(1.0, 0.5, 0.0)[len(numbers) :])))


def run(cfg, step_seconds, replay=()):
    """The loop of main() without a network: (plan, clock, multipliers, seconds when it stopped)."""
    now = T.time
    now.seconds = start = 100.0
    plan = T.Plan(cfg)
    clock = T.Clock(cfg, runtime(), replay)
    multipliers = []
    step = 0
    clock.start()
    while not clock.is_last(step):
        progress = clock.progress(step)
        plan.begin_phases(step, progress)
        multipliers.append(plan.rates(progress))
        now.seconds += step_seconds(step, now.seconds - start)
        clock.previous_report()
        send_report(clock)
        step += 1
        assert step < 100_000
    return plan, clock, multipliers, now.seconds - start


SPEEDS = {
    "steady": lambda step, at: 0.25,
    "slow first step": lambda step, at: 30.0 if step == 0 else 0.25,
    "stall in the middle": lambda step, at: 20.0 if 50.0 <= at < 50.5 else 0.25,
    "three times slower by the end": lambda step, at: 0.1 * (1 + 2 * at / 100.0),
    "three times faster by the end": lambda step, at: 0.3 / (1 + 2 * at / 100.0),
    "noisy": lambda step, at: 0.25 * (1 + 0.5 * math.sin(7.0 * step)),
    "few steps": lambda step, at: 4.0,
}


def never_fired(plan):
    return [name for name in plan.planned if name not in plan.phases]


@pytest.mark.parametrize("name", SPEEDS)
@pytest.mark.parametrize("shape", ["linear", "flat_cosine", "wsd"])
def test_every_phase_fires_and_the_rate_reaches_its_floor(name, shape):
    plan, clock, multipliers, ended = run(settings(lr_schedule=shape, lr_floor=0.1), SPEEDS[name])
    assert never_fired(plan) == []
    assert set(plan.planned) == set(plan.phases) == {"warmup", "warmdown", "ema", "swa", "qat"}
    assert all(phase["steps"] > 0 for phase in plan.phases.values())
    step = clock.median_step()
    slope = 0.9 / plan.warmdown * (math.pi / 2 if shape == "flat_cosine" else 1.0)  # the steepest
    # The last step has the rate of its begin, and ends up to a step before the clock does.
    assert 0.1 < multipliers[-1] <= 0.1 + slope * (plan.step_share + 1.6 * step / 100.0)
    assert ended <= 100.0 + 2 * step
    assert ended >= 100.0 - 2 * step
    assert clock.used == sorted(clock.used)


def test_steps_are_shares_of_iterations():
    plan = T.Plan(settings(iterations=2200, warmdown_iters=400))
    assert plan.planned["warmdown"] == (pytest.approx(1 - 400 / 2200), 1.0)
    assert T.Plan(settings(iterations=9999, warmdown_iters=3000)).warmdown == pytest.approx(
        0.30003, abs=1e-5
    )


def test_iterations_alone_end_the_run_at_the_floor():
    cfg = settings(iterations=50, max_wallclock_seconds=0.0, reserve_seconds=0.0)
    plan, clock, multipliers, _ = run(cfg, SPEEDS["steady"])
    assert len(multipliers) == 50
    # A trapezoid of steps: the last one begins a fiftieth before the end.
    assert multipliers[-1] == pytest.approx(0.02 / 0.5) and clock.used[-1] == 1.0
    assert multipliers[-2] == pytest.approx(0.04 / 0.5) and min(multipliers) > 0.03
    assert plan.phases["qat"]["steps"] == 51 - plan.phases["qat"]["start_step"]


@pytest.mark.parametrize("count", [0, 60])
@pytest.mark.parametrize("shape", ["linear", "flat_cosine", "wsd"])
@pytest.mark.parametrize(
    "seconds",
    [
        lambda step, at: 8.7,  # 17 steps
        lambda step, at: 40.0 if step == 0 else 5.0,
        lambda step, at: 50.0 if step == 1 else 2.0,
        lambda step, at: 60.0 if 2 <= step <= 3 else 0.5,
        lambda step, at: 100.0 if step == 4 else 4.0,
        lambda step, at: 60.0 if at > 80 else 1.0,  # a stall near the end
        lambda step, at: 70.0,
        lambda step, at: 140.0,
        lambda step, at: 30.0 / (1 + step),
        lambda step, at: 0.02,
    ],
)
def test_no_step_of_a_slow_clock_is_spent_at_a_rate_of_zero(seconds, shape, count):
    """Two of 17 steps were, in the warm-up, and the last one was."""
    cfg = settings(
        max_wallclock_seconds=150.0, reserve_seconds=5.0, lr_schedule=shape, iterations=count
    )
    _, clock, multipliers, _ = run(cfg, seconds)
    assert min(multipliers) > 0
    assert clock.used == sorted(clock.used) and clock.used[0] in (0, 1 / 60)
    assert clock.end_reason(len(multipliers)) == (
        "iterations" if len(multipliers) == 60 else "clock"
    )
    if len(multipliers) > 2 and clock.seconds[1] > 2:
        assert multipliers[1] == 1  # no second step of a warm-up of 1.45 s is wasted


def test_a_warm_up_begins_at_a_tenth():
    plan = T.Plan(settings(warmup_frac=0.1))
    assert [plan.rates(at) for at in (0.0, 0.005, 0.02)] == pytest.approx([0.1, 0.1, 0.2])


def test_why_a_run_has_ended():
    clock = T.Clock(settings(iterations=5), runtime())
    assert [clock.end_reason(step) for step in (4, 5)] == ["clock", "iterations"]
    assert T.Clock(settings(), runtime()).end_reason(9) == "clock"
    assert T.Clock(settings(), runtime(), [0.5, 1.0]).end_reason(2) == "replay"


def test_multiplier_against_closed_forms():
    plan = T.Plan(settings(warmup_frac=0.1, warmdown_frac=0.4, lr_floor=0.2))
    assert plan.rates(0.05) == pytest.approx(0.5)
    assert plan.rates(0.5) == 1.0
    assert plan.rates(0.8) == pytest.approx(0.2 + 0.8 * 0.5)
    assert plan.rates(1.0) == pytest.approx(0.2)
    cosine = T.Plan(
        settings(warmup_frac=0.1, warmdown_frac=0.4, lr_floor=0.2, lr_schedule="flat_cosine")
    )
    assert cosine.rates(0.9) == pytest.approx(0.2 + 0.8 * (1 + math.cos(math.pi * 0.75)) / 2)
    wsd = T.Plan(settings(warmup_frac=0.1, warmdown_frac=0.4, lr_floor=0.2, lr_schedule="wsd"))
    assert [wsd.rates(at) for at in (0.05, 0.1, 0.35, 0.6)] == pytest.approx([0.5, 1.0, 1.0, 1.0])
    assert wsd.rates(0.7) == pytest.approx(
        0.2 + 0.8 * 0.5
    )  # a quarter of the warmdown: 1 - sqrt(1/4)
    assert wsd.rates(0.6 + 0.4 * 0.81) == pytest.approx(0.2 + 0.8 * 0.1)  # 1 - sqrt(0.81)
    assert wsd.rates(1.0) == pytest.approx(0.2)


def test_cosine_falls_from_the_warm_up_on_as_in_nanogpt():
    plan = T.Plan(settings(warmup_frac=0.1, lr_floor=0.2, lr_schedule="cosine"))
    assert plan.planned["warmdown"] == (pytest.approx(0.1), 1.0)
    for at in (0.1, 0.3, 0.55, 0.9, 1.0):  # get_lr of nanoGPT's train.py
        coefficient = 0.5 * (1.0 + math.cos(math.pi * (at - 0.1) / (1.0 - 0.1)))
        assert plan.rates(at) == pytest.approx(0.2 + coefficient * (1 - 0.2))
    for changes in ({"warmdown_frac": 0.3}, {"warmdown_iters": 400, "iterations": 2200}):
        given = settings(lr_schedule="cosine", **changes)
        message = "^WARMDOWN_FRAC=0.[35] WARMDOWN_ITERS=.*: must be left out with .*; flat_cosine"
        refusal(T.UserError, message, T.Plan, given)


def test_constant_has_no_warmdown_whatever_its_length_says():
    for changes in (
        {},
        {"warmdown_frac": 1.0},
        {"warmdown_iters": 400},
    ):  # 400 steps of no ITERATIONS: not read
        plan, _, multipliers, _ = run(
            settings(lr_schedule="constant", warmup_frac=0.1, **changes), SPEEDS["steady"]
        )
        assert set(plan.planned) == {"warmup", "ema", "swa", "qat"} and never_fired(plan) == []
        assert [plan.rates(at) for at in (0.05, 0.1, 0.5, 1.0)] == pytest.approx(
            [0.5, 1.0, 1.0, 1.0]
        )
        assert multipliers[-1] == 1.0 and "warmdown" not in plan.describe()


@pytest.mark.parametrize(
    "changes, said",
    [
        (dict(iterations=0, max_wallclock_seconds=0.0), "never end"),
        (dict(reserve_seconds=110.0), "RESERVE_SECONDS"),
        (
            dict(warmdown_iters=400),
            "a warmdown of 400 .*WARMDOWN_ITERS / ITERATIONS.: must be at most 1 in all$",
        ),
        (
            dict(iterations=100, warmdown_iters=400),
            "WARMUP_FRAC=0.01 and a warmdown of 4 ",
        ),
        (dict(warmup_frac=0.6), "WARMUP_FRAC=0.6 and a warmdown of 0.5 .WARMDOWN_FRAC, .*: must"),
    ],
)
def test_impossible_plans_are_errors(changes, said):
    with pytest.raises(T.UserError, match=said):
        T.Plan(settings(**changes))


@pytest.mark.parametrize("count", [1, 3])
def test_a_run_of_few_steps_has_every_phase(count):
    """So no ITERATIONS is too small: the last step is at 100% of the run, beyond every phase's
    begin.
    """
    plan, *_ = run(settings(iterations=count, max_wallclock_seconds=0.0), SPEEDS["steady"])
    assert never_fired(plan) == []
    assert plan.phases["qat"]["steps"] == max(1, min(2, count))


@pytest.mark.parametrize("budget", [1.6, 2.3, 3.7])
def test_short_runs_by_the_clock_have_steps_of_qat(budget):
    """Steps of 0.25 s: at most 15 of them, the last of which ends up to a step before the clock
    does.
    """
    plan, clock, *_ = run(
        settings(max_wallclock_seconds=budget, reserve_seconds=0.0), SPEEDS["steady"]
    )
    qat = plan.phases["qat"]
    assert never_fired(plan) == [] and qat["steps"] == len(clock.used) + 1 - qat["start_step"]
    assert 1 <= qat["steps"] <= 3


def test_the_step_that_announces_a_phase_has_it():
    plan = T.Plan(settings(max_wallclock_seconds=100.0))
    assert plan.begin_phases(0, 0.1) == ["warmup"] and not plan.is_on(
        "warmup"
    )  # shorter than the step
    assert plan.begin_phases(1, 0.5) == [] and not plan.is_on("ema")
    assert plan.begin_phases(2, 0.51) == ["warmdown"] and plan.is_on("warmdown")
    assert plan.begin_phases(3, 0.86) == [
        "ema",
        "swa",
        "qat",
    ]  # a step as long as this one would end beyond the run
    assert plan.is_on("qat") and plan.phases["qat"]["steps"] == 1
    assert plan.begin_phases(4, 1.0) == [] and plan.phases["qat"] == dict(
        begin=0.85, start_step=4, start_progress=0.86, steps=2
    )
    assert not T.Plan(settings(qat=False)).is_on("qat")


def test_a_resumed_run_goes_on_where_it_was(now, tmp_path):
    """Clock and plan saved before step 7 and loaded into new ones."""
    cfg = settings(iterations=20, max_wallclock_seconds=110.0)
    clock = T.Clock(cfg, runtime())
    plan = T.Plan(cfg)
    clock.start()

    def step(clock, plan, number):
        progress = clock.progress(number)
        begun = plan.begin_phases(number, progress)
        now.seconds += 5.5 + number % 3
        report = clock.previous_report()
        send_report(clock, 1.0 + number)
        return progress, begun, report

    for number in range(7):
        step(clock, plan, number)
    with clock.paused():
        clock.previous_report()  # as in main: a checkpoint has no report on its way
        torch.save({"clock": clock.state_dict(), "plan": plan.state_dict()}, tmp_path / "state.pt")
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    resumed = T.Clock(cfg, runtime())
    resumed_plan = T.Plan(cfg)
    resumed.load_state_dict(saved["clock"])
    resumed_plan.load_state_dict(saved["plan"])
    resumed.start()
    start, number = now.seconds, 7
    while not resumed.is_last(number):
        assert not clock.is_last(number)
        now.seconds = before = start + 6.0 * (number - 7)
        found = step(clock, plan, number)
        now.seconds = before
        assert step(resumed, resumed_plan, number) == found
        number += 1
    assert (
        clock.is_last(number) and resumed_plan.phases == plan.phases and resumed.used == clock.used
    )


def test_a_resumed_plan_has_the_phases_of_the_present_settings():
    old = T.Plan(settings(ema=False))
    for step, progress in enumerate((0.3, 0.6, 0.9)):
        old.begin_phases(step, progress)
    assert old.is_on("qat") and not old.is_on("ema")
    plan = T.Plan(settings(qat=False, warmdown_frac=0.05))
    plan.load_state_dict(old.state_dict())
    assert not plan.is_on("qat") and plan.is_on(
        "warmdown"
    )  # what began stays on, what was switched off does not
    assert plan.begin_phases(3, 0.92) == ["ema"] and plan.is_on("ema")
    assert plan.phases["ema"]["start_step"] == 4
    assert (plan.phases["warmdown"]["steps"], plan.phases["qat"]["steps"]) == (3, 1)
    old, plan = T.Plan(settings()), T.Plan(settings())
    old.begin_phases(0, 0.7)
    plan.load_state_dict(old.state_dict())
    assert (
        plan.begin_phases(1, 0.71) == []
    )  # the length of the last step is known, so 1.0 is not the next one


def test_reports_arrive_one_step_late(now):
    clock = T.Clock(settings(), runtime())
    clock.start()
    assert clock.previous_report() is None
    now.seconds += 2.0
    send_report(clock, 3.5, math.inf, 15.0)
    with clock.paused():
        now.seconds += 50.0  # validation: the clock stands still
    assert clock.previous_report() == T.StepReport(
        loss=3.5, grad_norm=math.inf, stop_requested=True, seconds=2.0
    )
    assert clock.seconds[-1] == 2.0
    assert clock.previous_report() is None
    assert clock.elapsed() == 2.0 and clock.limit == 110.0  # the reserve included
    now.seconds += 1.0
    send_report(clock, 2.5)
    assert clock.previous_report() == T.StepReport(
        loss=2.5, grad_norm=0.5, stop_requested=False, seconds=3.0
    )


def test_progress_counts_the_step_on_its_way_and_the_coming_one(now):
    clock = T.Clock(settings(), runtime())
    clock.start()
    for step in range(4):
        clock.progress(step)
        clock.previous_report()
        now.seconds += 10.0 if step == 0 else 2.0
        send_report(clock)
    assert clock.seconds == [0.0, 10.0, 12.0, 14.0]  # that of the step ending at 16 is on its way
    assert clock.median_step() == 2.0
    assert clock.progress(4) == pytest.approx(0.18)
    clock.previous_report()
    assert clock.progress(5) == pytest.approx(0.18)
    clock.seconds = [*range(20), *range(24, 48, 5)]  # five of the last nine steps take 5 s
    assert clock.median_step() == 5.0


def test_ema_and_swa_closed_forms():
    param = torch.nn.Parameter(torch.zeros(3))
    ema, swa = T.Average([param], 0.1), T.Average([param])
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
    for average, memory in (
        (ema, 0.1),
        (swa, None),
    ):  # one saved and loaded goes on as the other does
        loaded = T.Average([param], memory)
        loaded.load_state_dict(
            {name: copy.deepcopy(value) for name, value in average.state_dict().items()}
        )
        for each in (average, loaded):
            each.update(0.65)
        assert (
            torch.equal(loaded.values[0], average.values[0]) and loaded.count == average.count == 5
        )
    swa.count = 0
    swa.update(0.7)
    assert swa.count == 1 and swa.values[0].tolist() == [8.0] * 3


# A patch: a run without a network; rank 1's own clock would stop it far earlier.
RANKS = """
import json, torch
runtime = T.start_runtime("cpu")
class Time:
    seconds = 100.0
    def perf_counter(self): return self.seconds
T.time, step = Time(), 0
settings = T.Settings(max_wallclock_seconds=22.0, reserve_seconds=2.0)
plan, clock = T.Plan(settings), T.Clock(settings, runtime)
clock.start()
while not clock.is_last(step):
    plan.begin_phases(step, clock.progress(step))
    T.time.seconds += [0.25, 0.9][runtime.rank] * (1 + step % 3)
    clock.previous_report()
    clock.send_report(torch.tensor(1.0), torch.tensor(0.5), torch.tensor(0.0))
    step += 1
print(json.dumps([step, clock.used, plan.phases]))
runtime.leave()
raise SystemExit(0)
"""


def test_all_ranks_use_rank_0s_clock(tmp_path):
    children = []
    for environ in rank_environments(2):
        name = str(environ["RANK"])
        children.append(Child(server(), tmp_path, name, RANKS, environment(**environ)))
    assert [child.wait() for child in children] == [0, 0], [child.err for child in children]
    zero, one = (json.loads(child.out.splitlines()[-1]) for child in children)
    assert zero == one
    assert zero[0] == pytest.approx(20.0 / 0.5, abs=3)
    assert len(zero[2]) == 5 and all(phase["steps"] > 0 for phase in zero[2].values())


@pytest.mark.parametrize(
    ("best", "seconds_left", "chosen"),
    [
        (1.0, 9.0, "raw"),
        (2.0, 9.0, "ema"),
        (3.0, 9.0, "swa"),
        (3.0, 1.9, "raw"),
        (3.0, 2.1, "swa"),
        (1.0, -1.0, "raw"),
    ],
)
def test_the_weights_that_score_best_are_chosen(best, seconds_left, chosen, monkeypatch):
    """A score takes a second here; two must be left for another one."""
    monkeypatch.setattr(T, "quantized", lambda network, table: contextlib.nullcontext())
    network = torch.nn.Linear(1, 1, bias=False)
    weight = network.weight.data.fill_(1.0)
    averages = {
        name: SimpleNamespace(count=count, values=[torch.full((1, 1), value)])
        for name, count, value in (("ema", 3, 2.0), ("swa", 1, 3.0), ("none", 0, best))
    }
    events = []
    clock = SimpleNamespace(now=0.0, limit=seconds_left)
    clock.elapsed = lambda: clock.now
    run = SimpleNamespace(
        settings=settings(),
        clock=clock,
        runtime=T.Runtime(0, 1, torch.device("cpu"), False),
        log=lambda text: None,
        event=lambda name, **facts: events.append((name, facts["weights"])),
    )

    def score():
        clock.now += 1.0
        clock.limit += 1.0  # the seconds that are left stay the same
        return T.Score(abs(weight.item() - best), 1, 1)

    assert T.choose_timed_weights(network, {}, averages, run, score) == chosen
    assert weight.item() == {"raw": 1.0, "ema": 2.0, "swa": 3.0}[chosen]
    late = seconds_left < 2
    assert events == ([("weights_left_out", "ema"), ("weights_left_out", "swa")] if late else [])


def test_weights_are_scored_as_the_artifact_would_give_them_back():
    network = torch.nn.Module()
    network.w_a = torch.nn.Parameter(torch.randn(16, 32))
    average = SimpleNamespace(count=1, values=[torch.randn(16, 32)])
    before = network.w_a.detach().clone()
    clock = SimpleNamespace(elapsed=lambda: 0.0, limit=9.0)
    runtime = T.Runtime(0, 1, torch.device("cpu"), False)
    run = SimpleNamespace(
        settings=T.Settings(), clock=clock, runtime=runtime, log=lambda text: None
    )
    table = {"matrix": dict(bits=3, clip_sigmas=2.0)}
    seen = []

    def score():
        seen.append(len(network.w_a.unique()))
        return T.Score(len(seen), 1, 1)

    assert T.choose_timed_weights(network, table, {"ema": average}, run, score) == "raw"
    levels = [len(T.quantize(w, 3, 2.0)[0].unique()) for w in (before, *average.values)]
    assert seen == levels and max(levels) < 16 and torch.equal(network.w_a, before)
    average.count = 0
    assert T.choose_timed_weights(network, table, {"ema": average}, run, score) == "raw"
    assert len(seen) == 2  # one candidate is not scored
