"""Clock, plan and averages against a fake clock: every phase fires, the rate lands at its floor, ranks agree."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch

import train_gpt as T
from conftest import refusal

ALONE = T.Runtime(rank=0, world_size=1, device=torch.device("cpu"), distributed=False)


class FakeTime:
    """Stands for the module time: a clock that a test moves by hand."""

    seconds = 100.0

    def perf_counter(self):
        return self.seconds


@pytest.fixture(autouse=True)
def now(monkeypatch):
    monkeypatch.setattr(T, "time", FakeTime())
    return T.time


def settings(**changes):
    return T.Settings(**{"max_wallclock_seconds": 110.0, "reserve_seconds": 10.0, **changes})


def send_report(clock, loss=1.0, norm=0.5, stop=0.0):
    clock.send_report(*map(torch.tensor, (loss, norm, stop)))


def run(step_seconds, **changes):
    """Run the loop of main() without a network: (plan, clock, multipliers, seconds when it stopped)."""
    now = T.time
    start = now.seconds
    plan = T.Plan(settings(**changes))
    clock = T.Clock(plan.settings, ALONE)
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
    return plan, clock, multipliers, now.seconds - start


def steady(step, at):
    return 0.25


SPEEDS = {
    "steady": steady,
    "slow first step": lambda step, at: 30.0 if step == 0 else 0.25,
    "slow second step": lambda step, at: 50.0 if step == 1 else 2.0,
    "stall in the middle": lambda step, at: 20.0 if 50.0 <= at < 50.5 else 0.25,
    "three times slower by the end": lambda step, at: 0.1 * (1 + 2 * at / 100.0),
    "noisy": lambda step, at: 0.25 * (1 + 0.5 * math.sin(7.0 * step)),
    "stall near the end": lambda step, at: 60.0 if at > 80 else 1.0,
    "17 steps": lambda step, at: 8.7,
    "longer than the run": lambda step, at: 140.0,
    "faster and faster": lambda step, at: 30.0 / (1 + step),
}
shapes = pytest.mark.parametrize("shape", ["linear", "flat_cosine", "wsd"])


@pytest.mark.parametrize("name", [*SPEEDS][:-4])
@shapes
def test_every_phase_fires_and_the_rate_reaches_its_floor(name, shape):
    plan, clock, multipliers, ended = run(SPEEDS[name], lr_schedule=shape, lr_floor=0.1)
    assert set(plan.phases) == {"warmup", "warmdown", "ema", "swa", "qat"}
    assert all(phase["steps"] > 0 for phase in plan.phases.values())
    warmup = plan.phases["warmup"]
    in_warmup = sum(progress <= plan.settings.warmup_frac for progress in clock.used)
    assert (warmup["start_step"], warmup["steps"]) == (1, in_warmup)
    step = clock.median_step()
    slope = 0.9 / plan.warmdown * (math.pi / 2 if shape == "flat_cosine" else 1.0)  # the steepest
    # The last step has the rate of its begin, and ends up to a step before the clock does.
    assert 0.1 < multipliers[-1] <= 0.1 + slope * (plan.step_share + 1.6 * step / 100.0)
    assert abs(ended - 100.0) <= 2 * step
    assert clock.used == sorted(clock.used)


def test_iterations_alone_end_the_run_at_the_floor():
    """A trapezoid of steps: the last one begins a fiftieth before the end."""
    by_steps = dict(max_wallclock_seconds=0.0, reserve_seconds=0.0)
    plan, clock, multipliers, _ = run(steady, iterations=50, **by_steps)
    assert len(multipliers) == 50 and clock.used[-1] == 1.0
    assert multipliers[-2:] == pytest.approx([0.04 / 0.5, 0.02 / 0.5])
    assert plan.phases["qat"]["steps"] == 51 - plan.phases["qat"]["start_step"]
    for count in (1, 3):  # no ITERATIONS is too small: the last step is at 100% of the run
        plan, *_ = run(steady, iterations=count, **by_steps)
        assert plan.planned.keys() == plan.phases.keys()
        assert plan.phases["qat"]["steps"] == max(1, min(2, count))


@pytest.mark.parametrize("count", [0, 60])
@pytest.mark.parametrize("name", SPEEDS)
def test_no_step_of_a_slow_clock_is_spent_at_a_rate_of_zero(name, count):
    """Two of 17 steps were, in the warm-up, and the last one was."""
    limits = dict(max_wallclock_seconds=150.0, reserve_seconds=5.0, iterations=count)
    _, clock, multipliers, _ = run(SPEEDS[name], **limits)
    assert min(multipliers) > 0
    assert clock.used == sorted(clock.used) and clock.used[0] in (0, 1 / 60)
    reason = "iterations" if len(multipliers) == 60 else "clock"
    assert clock.end_reason(len(multipliers)) == reason
    if len(multipliers) > 2 and clock.seconds[1] > 2:
        assert multipliers[1] == 1  # no second step of a warm-up of 1.45 s is wasted


def test_a_replay_ends_with_the_run_that_it_repeats():
    clock = T.Clock(settings(), ALONE, [0.5, 1.0])
    assert [clock.progress(step) for step in range(2)] == [0.5, 1.0]
    assert clock.end_reason(2) == "replay" and clock.is_last(2)


# Changes of settings, and multipliers by progress.
RATES = [
    (dict(), {0.0: 0.1, 0.005: 0.1, 0.02: 0.2, 0.05: 0.5, 0.5: 1.0, 0.8: 0.6, 1.0: 0.2}),
    (
        dict(lr_schedule="flat_cosine"),
        {0.5: 1.0, 0.9: 0.2 + 0.4 * (1 + math.cos(math.pi * 0.75)), 1.0: 0.2},
    ),
    # 1 - sqrt(share of the warmdown)
    (dict(lr_schedule="wsd"), {0.35: 1.0, 0.6: 1.0, 0.7: 0.6, 0.924: 0.28, 1.0: 0.2}),
    # get_lr of nanoGPT's train.py
    (
        dict(lr_schedule="cosine", warmdown_frac=T.Settings.warmdown_frac),
        {at: 0.2 + 0.4 * (1 + math.cos(math.pi * (at - 0.1) / 0.9)) for at in (0.1, 0.3, 0.9, 1.0)},
    ),
    (
        dict(lr_schedule="constant", warmdown_frac=T.Settings.warmdown_frac, lr_floor=0.0),
        {0.05: 0.5, 0.1: 1.0, 0.5: 1.0, 1.0: 1.0},
    ),
    (dict(lr_schedule="constant", warmdown_frac=0.0, lr_floor=0.0), {0.05: 0.5, 1.0: 1.0}),
]


@pytest.mark.parametrize(("changes", "expected"), RATES)
def test_multiplier_against_closed_forms(changes, expected):
    plan = T.Plan(settings(**dict(warmup_frac=0.1, warmdown_frac=0.4, lr_floor=0.2) | changes))
    assert {at: plan.rates(at) for at in expected} == pytest.approx(expected)
    assert ("warmdown" in plan.planned) == (changes.get("lr_schedule") != "constant")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (dict(iterations=0, max_wallclock_seconds=0.0), "ITERATIONS=0"),
        (dict(reserve_seconds=110.0), "RESERVE_SECONDS=110.0"),
        (dict(warmdown_iters=400), "^WARMDOWN_ITERS=400: .* ITERATIONS"),
        (dict(iterations=100, warmdown_iters=400), "a warmdown of 4 "),
        (dict(warmup_frac=0.6), "WARMUP_FRAC=0.6"),
        (dict(lr_schedule="cosine", warmdown_frac=0.3), "WARMDOWN_FRAC=0.3"),
        (dict(lr_schedule="cosine", warmdown_iters=4, iterations=9), "WARMDOWN_ITERS=4"),
        (dict(lr_schedule="constant", warmdown_frac=0.3), "WARMDOWN_FRAC=0.3: .*=constant"),
        (dict(lr_schedule="constant", warmdown_iters=4, iterations=9), "WARMDOWN_ITERS=4"),
        (dict(lr_schedule="constant", lr_floor=0.1), "LR_FLOOR=0.1: .*=constant"),
    ],
)
def test_impossible_plans_are_errors(changes, said):
    refusal(T.UserError, said, T.Plan, settings(**changes))


def test_a_resumed_run_goes_on_where_it_was(now):
    """Clock and plan saved before step 7 and loaded into new ones."""
    cfg = settings(iterations=20)

    def step(clock, plan, number):
        progress = clock.progress(number)
        begun = plan.begin_phases(number, progress)
        now.seconds += 5.5 + number % 3
        report = clock.previous_report()
        send_report(clock, 1.0 + number)
        return progress, begun, report

    pairs = [(T.Clock(cfg, ALONE), T.Plan(cfg)) for _ in range(2)]
    (clock, plan), (resumed, resumed_plan) = pairs
    clock.start()
    for number in range(7):
        step(clock, plan, number)
    with clock.paused():
        clock.previous_report()  # as in main: a checkpoint has no report on its way
    resumed.load_state_dict(copy.deepcopy(clock.state_dict()))
    resumed_plan.load_state_dict(copy.deepcopy(plan.state_dict()))
    resumed.start()
    start, number = now.seconds, 7
    while not resumed.is_last(number):
        assert not clock.is_last(number)
        found = []
        for pair in pairs:
            now.seconds = start + 6.0 * (number - 7)
            found.append(step(*pair, number))
        assert found[0] == found[1]
        number += 1
    assert clock.is_last(number) and resumed.used == clock.used
    assert resumed_plan.phases == plan.phases


def test_a_resumed_plan_has_the_phases_of_the_present_settings():
    """What began stays on, what was switched off does not."""
    old = T.Plan(settings(ema=False))
    for step, progress in enumerate((0.3, 0.6, 0.9)):
        old.begin_phases(step, progress)
    assert old.is_on("qat") and not old.is_on("ema")
    plan = T.Plan(settings(qat=False, warmdown_frac=0.05))
    plan.load_state_dict(old.state_dict())
    assert not plan.is_on("qat") and plan.is_on("warmdown")
    # The length of the last step is known, so 1.0 is not the next one.
    assert plan.begin_phases(3, 0.92) == ["ema"] and plan.is_on("ema")
    assert plan.phases["ema"]["start_step"] == 4
    assert (plan.phases["warmdown"]["steps"], plan.phases["qat"]["steps"]) == (3, 1)


def test_reports_arrive_one_step_late(now):
    clock = T.Clock(settings(), ALONE)
    clock.start()
    assert clock.previous_report() is None
    now.seconds += 2.0
    send_report(clock, 3.5, math.inf, 15.0)
    with clock.paused():
        now.seconds += 50.0  # validation: the clock stands still
    assert clock.previous_report() == T.StepReport(3.5, math.inf, True, 2.0)
    assert clock.previous_report() is None
    assert clock.elapsed() == 2.0 and clock.limit == 110.0  # the reserve included


def test_progress_counts_the_step_on_its_way_and_the_coming_one(now):
    clock = T.Clock(settings(), ALONE)
    clock.used = [0.1] * 4
    clock.seconds = [0.0, 10.0, 12.0, 14.0]
    send_report(clock)  # of the step ending at 16, which is on its way
    assert clock.median_step() == 2.0 and clock.progress(4) == pytest.approx(0.18)
    clock.packet = None
    clock.seconds.append(16.0)
    assert clock.progress(5) == pytest.approx(0.18)
    clock.seconds = [*range(20), *range(24, 48, 5)]  # five of the last nine steps take 5 s
    assert clock.median_step() == 5.0


def test_ema_and_swa_closed_forms():
    """One that is saved and loaded goes on as it was; a count of 0 begins a new average."""
    param = torch.nn.Parameter(torch.zeros(3))
    averages = {0.1: T.Average([param], 0.1), None: T.Average([param])}
    expected = before = None
    for value, share in ((1.0, 0.50), (4.0, 0.52), (2.0, 0.60), (8.0, 0.61)):
        param.data.fill_(value)
        for memory, average in averages.items():
            average.update(share)
            averages[memory] = T.Average([param], memory)
            averages[memory].load_state_dict(copy.deepcopy(average.state_dict()))
        keep = math.exp(-(share - before) / 0.1) if before else 0.0
        expected = keep * expected + (1 - keep) * value if before else value
        before = share
    ema, swa = averages.values()
    assert ema.values[0].tolist() == pytest.approx([expected] * 3, rel=1e-6)
    with T.swapped([param], swa.values):
        assert param.tolist() == pytest.approx([3.75] * 3)
    assert param.tolist() == [8.0] * 3 and swa.count == 4
    swa.count = 0
    swa.update(0.7)
    assert swa.count == 1 and swa.values[0].tolist() == [8.0] * 3


def test_all_ranks_use_rank_0s_clock(now, monkeypatch):
    """Rank 1's own clock would end the run far earlier."""
    packets = {}

    def broadcast(packet, src):
        packet.copy_(packets.setdefault(step, packet.clone()))  # the first to send is rank 0

    waits = []
    monkeypatch.setattr(T.dist, "broadcast", broadcast)
    monkeypatch.setattr(T.dist, "all_reduce", waits.append)
    ranks = []
    for rank in range(2):
        clock = T.Clock(settings(), T.Runtime(rank, 2, torch.device("cpu"), True))
        clock.start()
        ranks.append((clock, T.Plan(settings())))
    assert len(waits) == 2  # each clock begins when all ranks are ready
    step = 0
    while not ranks[0][0].is_last(step):
        for rank, (clock, plan) in enumerate(ranks):
            assert not clock.is_last(step)
            plan.begin_phases(step, clock.progress(step))
            now.seconds = 100.0 + (step + 1) * (1 + 2 * rank)
            clock.previous_report()
            send_report(clock)
        step += 1
    assert 97 <= step <= 101 and ranks[0][0].used == ranks[1][0].used
    assert ranks[0][1].phases == ranks[1][1].phases and len(ranks[0][1].phases) == 5


@pytest.mark.parametrize(
    ("best", "seconds_left", "chosen"),
    [(1.0, 9.0, "raw"), (2.0, 9.0, "ema"), (3.0, 9.0, "swa"), (3.0, 1.9, "raw"), (3.0, 2.1, "swa")],
)
def test_the_weights_that_score_best_are_chosen(best, seconds_left, chosen):
    """As the artifact gives them back. A score takes a second here; two must be left for another one."""
    levels = {"raw": 1.0, "ema": 2.0, "swa": 3.0}
    values = {name: level + 0.1 * torch.randn(16, 32) for name, level in levels.items()}
    network = torch.nn.Module()
    network.w_a = torch.nn.Parameter(values["raw"].clone())
    averages = {"none": SimpleNamespace(count=0, values=[])}
    clock = SimpleNamespace(now=0.0, limit=seconds_left, elapsed=lambda: clock.now)
    left_out = []
    run = SimpleNamespace(settings=settings(), clock=clock, runtime=ALONE, log=str)
    run.event = lambda name, weights: left_out.append(weights)
    table = {"matrix": dict(bits=3, clip_sigmas=2.0)}
    scored = []

    def score():
        clock.now += 1.0
        clock.limit += 1.0  # the seconds that are left stay the same
        scored.append(network.w_a.detach().clone())
        return T.Score(abs(network.w_a.mean().item() - best), 1, 1)

    assert T.choose_timed_weights(network, table, averages, run, score) == "raw"
    assert scored == []  # one candidate is not scored
    for name in ("ema", "swa"):
        averages[name] = SimpleNamespace(count=1, values=[values[name]])
    assert T.choose_timed_weights(network, table, averages, run, score) == chosen
    assert torch.equal(network.w_a, values[chosen])
    assert left_out == (["ema", "swa"] if seconds_left < 2 else [])
    for found, w in zip(scored, values.values(), strict=len(left_out) == 0):
        assert torch.equal(found, T.dequantize(*T.quantize(w, 3, 2.0)))
