"""Section environment: conversations with an environment, tokens, rewards and faults; the guide's examples."""

import asyncio
import contextlib
import fractions
import itertools
import json
import math
import random
import statistics
import sys
import time
from decimal import Decimal
from types import SimpleNamespace

import pytest
import torch
from test_objective import TRAINERS, policy

import train_grpo as G
import train_gspo as P
from conftest import BYTES, ROOT, blocks, environment, load_tool, start

pytestmark = pytest.mark.usefixtures("one_thread")
BY_TURN = {G: dict(credit="turn"), P: dict(credit="turn", importance="token")}
both = pytest.mark.parametrize("M", [G, P], ids=["grpo", "gspo"])


class Counting:
    """Says `<n>` to answer n, rewards it with n, and ends after `last` answers."""

    last = 4

    def reset(self, seed):
        self.said = []
        return f"q{seed}"

    def step(self, text):
        self.said.append(text)
        count = len(self.said)
        return f"<{count}>", count, count == self.last


def trainer(M, environment, network=None, **changes):
    """Return a trainer of a small random network, whose answers are short: many tokens end one.

    environment: None for a trainer of prompts and reward functions.
    """
    changes = dict(max_new_tokens=100, group_size=4, temperature=1.0, max_turns=8) | changes
    settings = M.Settings(mini_batches=1, prompts_per_step=4, **changes)
    made = TRAINERS[M](network or policy(M), BYTES, settings, environment=environment)
    made.stop = frozenset(range(0, 264, 6))
    return made


def first_answers(own, queries):
    """The answers of the first step to queries, before they are rewarded."""
    settings = own.settings
    seeds = [(settings.seed, 0, number) for number in range(len(queries))]
    return own.sample(queries, settings.group_size, settings.temperature, seeds)


@both
@pytest.mark.parametrize("every", [6, 1])
def test_tokens_of_the_environment_are_context_and_log_probabilities_are_exact(
    M, every, monkeypatch
):
    """Of each token that the policy drew, by a whole forward pass without a cache, over all turns.

    If each token ends an answer (every=1), all texts hear the environment at once.
    """
    own = trainer(M, Counting)
    own.stop = frozenset(range(0, 264, every))
    read = M.Decoder.read
    lengths = []
    monkeypatch.setattr(
        M.Decoder, "read", lambda self, ids: lengths.append(ids.size(1)) or read(self, ids)
    )
    answers = first_answers(own, range(3))
    if every == 1:
        # The prompt, then an answer of one token and what is said to it: three times, then the end.
        said = len(M.observation_ids(BYTES, "<1>"))
        assert lengths[1:] == [1 + said] * 3
    assert len(answers) == 12
    counts = set()
    for answer in answers:
        counts.add(len(answer.earned))
        ids = torch.tensor([[*answer.prompt, *answer.ids]])
        logits = own.network.logits(own.network.features(ids, doc=torch.zeros_like(ids)))
        logps = logits[0].log_softmax(-1)
        for place, (token, logp) in enumerate(zip(answer.ids, answer.logps, strict=True)):
            if logp is not None:
                expected = logps[len(answer.prompt) + place - 1, token].item()
                assert logp == pytest.approx(expected, abs=1e-5)
        # The text, turn by turn: answers end with a stop token, and then comes what is said.
        parts = [[]]
        given = iter(range(1, 9))
        place = 0
        while place < len(answer.ids):
            if answer.logps[place] is None:
                said = M.observation_ids(BYTES, f"<{next(given)}>")
                assert answer.ids[place : place + len(said)] == said[: len(answer.ids) - place]
                assert set(answer.logps[place : place + len(said)]) == {None}
                place += len(said)
                parts.append([])
                continue
            parts[-1].append(answer.ids[place])
            place += 1
        texts = [M.completion(BYTES, [1], part) for part in parts]
        assert answer.environment.said == texts[: len(answer.earned)]
    assert max(counts) == 4


@both
def test_what_is_learned_is_what_the_policy_drew(M):
    """The batch has no target elsewhere, and its log-probabilities are those of the sampler."""

    class Varied(Counting):
        def step(self, text):
            observation, _, done = super().step(text)
            return observation, len(text), done

    own = trainer(M, Varied)
    rollout = own.rollout(range(4), 0)
    (answers,) = rollout.answers
    drawn = sum(logp is not None for answer in answers for logp in answer.logps)
    said = sum(logp is None for answer in answers for logp in answer.logps)
    assert said > 50
    batches = M.make_batches(answers, torch.device("cpu"), 10_000)
    assert sum(int(batch.mask.sum()) for batch in batches) == drawn
    for batch in batches:
        logps, _ = M.token_logps(own.network, batch, 1.0)
        assert (logps - batch.sampled).abs().max() < 1e-5
    metrics = own.update(rollout)
    assert metrics["sampler_gap"] < 1e-5 and metrics["grad_norm"] > 0
    lengths = [len(answer.ids) - answer.logps.count(None) for answer in answers]
    assert rollout.metrics["length"] == pytest.approx(statistics.fmean(lengths))


@both
def test_rewards_are_discounted_by_turn_and_turns_have_a_limit(M):
    episode = M.Episode(Counting, 3, BYTES, M.Settings(max_turns=3))
    assert episode.prompt == M.asked_ids(BYTES, [("<|user|>", "q3")])
    for turn, text in enumerate("abc"):
        episode.ids = [*range(episode.starts[-1]), ord(text) + 4, 263]
        given = episode.reply()
        assert given == ([] if turn == 2 else M.observation_ids(BYTES, f"<{turn + 1}>"))
    assert episode.environment.said == ["a", "b", "c"] and not episode.done
    assert episode.total(0.5) == 1 + 2 * 0.5 + 3 * 0.25 and episode.total(1.0) == 6
    own = trainer(M, Counting, max_turns=1, discount=0.5)
    metrics = own.train_step(range(4))
    assert metrics["turns"] <= 1 and metrics["dropped"] == 0
    assert metrics["cut"] == 1  # one answer does not end the game of four


@both
def test_credit_by_turn(M):
    """Advantages of a two-turn game by hand, and at each token that the policy drew."""
    # Half of a reward counts one turn earlier. One conversation is over after a turn, the second
    # answer of another is cut and earns nothing, and one has a fault.
    episodes = []
    for earned, starts in (([0, 1], [0, 5]), ([1], [0]), ([0], [0, 5]), ([1], [0])):
        episode = M.Episode(Counting, 3, BYTES, M.Settings())
        episode.earned = earned
        episode.starts = starts
        episode.ids = [9, 9, 8, 8, 8, 9, 9][: 7 if len(starts) == 2 else 2]
        episode.logps = [-1.0, -1.0, None, None, None, -1.0, -1.0][: len(episode.ids)]
        episodes.append(episode)
    episodes[3].fault = "x"
    assert [one.returns(0.5) for one in episodes] == [[0.5, 1], [1], [0, 0], []]
    own = trainer(M, Counting, discount=0.5, **BY_TURN[M])
    M.credit_turns(own, [episodes])
    first = 0.5 / (0.5 + 1e-4)
    second = 0.5 / (math.sqrt(0.5) + 1e-4)
    by_turn = [[0, second], [first], [-first, -second], []]
    for episode, expected in zip(episodes, by_turn, strict=True):
        assert episode.turn_advantages == pytest.approx(expected, abs=1e-12)
    before = [0.0] * (len(episodes[0].prompt) - 1)
    assert episodes[2].advantages() == [*before, *[-first] * 5, *[-second] * 2]
    # By the returns of all answers of the step, and undivided.
    spread = statistics.stdev([0.5, 1, 1, 0, 0]) + 1e-4
    for scale, divisor in (("batch", spread), ("none", 1.0)):
        own = trainer(M, Counting, discount=0.5, scale_rewards=scale, **BY_TURN[M])
        M.credit_turns(own, [episodes])
        values = [value / divisor for value in (0, 0.5, 0.5, -0.5, -0.5)]
        found = [*itertools.chain(*(one.turn_advantages for one in episodes))]
        assert found == pytest.approx(values, abs=1e-12)

    # Of a rollout: what the loss multiplies each drawn token with.
    class Varied(Counting):
        def step(self, text):
            observation, _, done = super().step(text)
            return observation, len(text), done or len(text) % 3 == 2

    own = trainer(M, Varied, **BY_TURN[M])
    (answers,) = own.rollout(range(4), 0).answers
    for group in M.groups_of(answers, 4):
        for answer in group:
            there = [one.returns(1.0)[0] for one in group]
            mean, std = statistics.fmean(there), statistics.stdev(there)
            value = (answer.returns(1.0)[0] - mean) / (std + 1e-4)
            assert answer.turn_advantages[0] == pytest.approx(value, abs=1e-9)
            assert answer.advantage == pytest.approx(value, abs=1e-9)  # of all: that of the first
            turns = [-1]
            for before, logp in itertools.pairwise([None, *answer.logps]):
                turns.append(turns[-1] + (before is None and logp is not None))
            [batch] = M.make_batches([answer], torch.device("cpu"), 10_000)
            drawn = [
                at for at, logp in zip(turns[1:], answer.logps, strict=True) if logp is not None
            ]
            expected = torch.tensor([answer.turn_advantages[turn] for turn in drawn])
            assert torch.equal(batch.advantages[batch.mask], expected)
            assert len({*drawn}) == len(answer.turn_advantages)
    assert len({len(answer.turn_advantages) for answer in answers}) > 1
    assert own.update(own.rollout(range(4), 1))["grad_norm"] > 0


class Faulty(Counting):
    """Has a fault with every 16th seed, or with all of them."""

    kind = "step raises"
    every = 16

    def reset(self, seed):
        self.bad = seed % self.every == 0
        if self.bad and self.kind == "reset raises":
            raise RuntimeError("no game")
        if self.bad and self.kind == "no text":
            return 7
        if self.bad and self.kind == "huge prompt":
            return "ab" * 10**7
        if self.bad and self.kind == "long prompt":
            return "ab" * 999
        if self.bad and self.kind == "another prompt":
            return super().reset(random.random())
        return super().reset(seed)

    def step(self, text):
        if self.bad and self.kind == "step raises":
            raise RuntimeError("broken")
        if self.bad and self.kind == "sys.exit":
            sys.exit(0)
        if self.bad and self.kind == "recursion":
            return self.step(text)
        if self.bad and self.kind == "half a surrogate":
            return "\ud800", 0.0, False
        if self.bad and self.kind == "KeyboardInterrupt":
            raise KeyboardInterrupt
        if self.bad and self.kind == "surrogate in a message":
            raise RuntimeError("\ud800")
        if self.bad and self.kind == "hangs":
            time.sleep(20)
        if self.bad and self.kind == "time-out swallowed":
            try:
                time.sleep(20)
            except BaseException:
                return "", 1.0, True
        while self.bad and self.kind == "time-out swallowed for ever":
            try:
                time.sleep(20)
            except BaseException:
                pass
        if self.bad and self.kind == "async that hangs":
            return hangs()
        if self.bad and self.kind == "nan":
            return "", math.nan, False
        observation, reward, done = super().step(text)
        return observation, reward, done


async def hangs():
    while True:
        with contextlib.suppress(BaseException):
            await asyncio.sleep(20)


async def leaves():
    sys.exit(0)


KINDS = {
    "nan": "step returned the reward nan; must be below 1e15",
    "KeyboardInterrupt": "KeyboardInterrupt",
    "surrogate in a message": "RuntimeError: \ud800",
    "time-out swallowed": "took more than 0.3 s",
    "time-out swallowed for ever": "took more than 0.3 s",
    "async that hangs": "took more than 0.3 s",
    "reset raises": "no game",
    "no text": "reset returned 7, which is no text",
    "step raises": "broken",
    "hangs": "took more than 0.3 s",
    "sys.exit": "SystemExit: 0",
    "recursion": "RecursionError",
    "half a surrogate": "",
    "huge prompt": "reset returned 20000000 characters",
    "long prompt": "reset returned 1998 characters, but MAX_NEW_TOKENS leaves",
    "another prompt": "reset returned another prompt for the same seed",
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_environment_with_a_fault_does_not_end_a_run(monkeypatch, kind):
    """Its episodes are counted, and nothing of them is learned. If a tenth have one, the run ends."""
    if "0.3 s" in KINDS[kind]:
        monkeypatch.setattr(G, "STEP_SECONDS", 0.3)
    monkeypatch.setattr(G.Episode, "hung", 0.0)
    monkeypatch.setattr(G, "is_interrupt", lambda error: False)  # as under a StopSignal
    monkeypatch.setattr(Faulty, "kind", kind)
    own = trainer(G, Faulty)
    logged = []
    own.log = logged.append
    queries = [*range(1, 17)]
    answers = first_answers(own, queries)
    bad = [answer for answer in answers if answer.fault]
    assert {answer.environment and answer.environment.bad for answer in bad} == {True}
    assert 0 < len(bad) <= 4 and KINDS[kind] in bad[0].fault
    values = G.episode_rewards(own, answers)
    assert torch.isfinite(values).all()
    said = (
        f"environment: {len(bad)} of 64 episodes have a fault; the first, seed 16: {bad[0].fault}"
    )
    assert logged == [said]
    assert all(answer.ids and set(answer.logps) == {None} for answer in bad)
    assert all(None not in answer.logps[:1] for answer in answers if not answer.fault)
    if kind != "step raises":
        return
    metrics = own.update(own.rollout(queries, 0))
    assert math.isfinite(metrics["grad_norm"])
    monkeypatch.setattr(Faulty, "every", 1)
    with pytest.raises(G.UserError, match="of the episodes have a fault, at most 10% may"):
        own.train_step(queries)


def test_what_step_may_not_return():
    """Each is a fault that names it, and the game is over."""
    must = "; must be a text, a reward, and whether it is over"
    reward = "step returned the reward {}; must be below 1e15"
    returned = [
        (("", Decimal("inf"), False), reward.format("Decimal('Infinity')")),
        (("", 10**400, False), "step returned the reward 1000"),
        (("", None, True), reward.format(None)),
        (("", "1.0", True), reward.format("'1.0'")),
        (("", torch.zeros(2), False), "RuntimeError: Boolean value of Tensor"),
        (("", 1.0), f"step returned ('', 1.0){must}"),
        (
            ("", 1.0, True, False, {}),
            f"step returned ('', 1.0, True, False, {{}}){must}",
        ),  # Gymnasium
        (
            {"reward": 1.0, "text": "", "done": 1},
            "step returned {'done': 1, 'reward': 1.0, 'text': ''",
        ),
        ("abc", f"step returned 'abc'{must}"),
        (None, f"step returned None{must}"),
        ((None, 1.0, False), "step returned None, which is no text"),
        ((["a"], 1.0, False), "step returned ['a'], which is no text"),
        (leaves(), "SystemExit: 0"),
    ]
    for value, expected in returned:
        episode = G.Episode(Counting, 3, BYTES, G.Settings())
        episode.environment.step = lambda text, value=value: value
        episode.ids = [9, 263]
        assert episode.reply() == [] and expected in episode.fault and episode.earned == []
    # Numbers of other kinds are rewards.
    for value in (True, Decimal("0.5"), torch.tensor(0.5), fractions.Fraction(1, 2)):
        episode = G.Episode(Counting, 3, BYTES, G.Settings())
        episode.environment.step = lambda text, value=value: ["", value, torch.tensor(True)]
        episode.ids = [9, 263]
        assert episode.reply() == [] and not episode.fault and episode.earned == [float(value)]
        assert episode.done is True


def test_an_environment_that_always_hangs_is_no_longer_called(monkeypatch):
    """After ten calls, so that first scores of thousands of answers end soon."""
    monkeypatch.setattr(G, "STEP_SECONDS", 0.1)
    monkeypatch.setattr(G.Episode, "hung", 0.0)

    class Hangs(Counting):
        def step(self, text):
            Hangs.calls += 1
            time.sleep(9)

    Hangs.calls = 0
    own = trainer(G, Hangs)
    answers = first_answers(own, range(10))
    assert 9 <= Hangs.calls <= 11 and all(answer.fault for answer in answers)
    assert answers[-1].fault == "it took more than 0.1 s too often to be called"
    # One in twenty is not too often.
    G.Episode.hung = 0.0
    episode = G.Episode(Counting, 1, BYTES, G.Settings())
    for number in range(200):
        episode.fault = ""
        episode.call(time.sleep, 0.15 if number % 20 == 0 else 0)
        assert ("too often" in episode.fault) is False and G.Episode.hung < 2


@both
def test_an_async_environment_is_a_plain_one(M):
    class Async(Counting):
        async def reset(self, seed):
            await asyncio.sleep(0)
            return Counting.reset(self, seed)

        async def step(self, text):
            await asyncio.sleep(0)
            return Counting.step(self, text)

    plain, other = [first_answers(trainer(M, kind), range(3)) for kind in (Counting, Async)]
    assert [one.ids for one in plain] == [one.ids for one in other]
    assert [one.earned for one in plain] == [one.earned for one in other] and plain[0].earned


def test_a_dropped_episode_has_the_mean_of_its_group():
    own = trainer(G, Counting)
    values = [1.0, 2.0, None, 6.0, None, None, None, None]
    answers = []
    for value in values:
        total = value or 0.0
        answers.append(
            SimpleNamespace(
                fault="" if value else "x", query=1, ids=[], total=lambda _, total=total: total
            )
        )
    found = G.episode_rewards(own, answers)
    assert found.tolist() == [1.0, 2.0, 3.0, 6.0, 0.0, 0.0, 0.0, 0.0]
    assert own.score(answers, ()).tolist() == [1, 2, 0, 6, 0, 0, 0, 0]


def test_what_an_environment_says_is_cut_before_it_is_tokenized():
    class Loud(Counting):
        def step(self, text):
            _, reward, done = super().step(text)
            return "ab" * 10**7, reward, done

    begin = time.perf_counter()
    (answers,) = trainer(G, Loud).rollout(range(4), 0).answers
    assert time.perf_counter() - begin < 20 and not any(answer.fault for answer in answers)
    assert max(len(answer.ids) for answer in answers) == 100


@both
def test_an_environment_of_one_turn_is_a_reward_function(M):
    """The same prompts, samples, rewards and update, with either CREDIT."""

    class OneTurn:
        def reset(self, seed):
            return f"q{seed}"

        def step(self, text):
            return "", len(text) % 3, True

    first = policy(M).state_dict()
    results = []
    for game, credit in ((OneTurn, "turn"), (OneTurn, "conversation"), (None, "conversation")):
        network = policy(M)
        network.load_state_dict(first)
        own = trainer(M, game, network, **BY_TURN[M] | dict(credit=credit))
        queries = range(4)
        if game is None:
            own.reward_funcs = [lambda prompts, completions, **_: [len(x) % 3 for x in completions]]
            queries = [f"q{number}" for number in range(4)]
        metrics = own.train_step(queries)
        results.append((metrics, [param.clone() for param in network.parameters()]))
    one, weights = results.pop()
    # An answer that does not end within MAX_NEW_TOKENS has no reward of an environment.
    assert one["finished"] == 1 and one["reward_std"] > 0
    for other, other_weights in results:
        assert one["reward"] == other["reward"] and one["length"] == other["length"]
        assert all(map(torch.equal, weights, other_weights))


@both
def test_what_environment_must_be(M, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "class Half:\n    def reset(self, seed): return ''\n"
        "class Whole(Half):\n    def step(self, text): return '', 0, True\nwhole = Whole()\n"
    )
    assert M.load_environment(f"{path}:Whole")().step("") == ("", 0, True)
    for spec in ("x", f"{path}:Half", f"{path}:Other", f"{tmp_path}/no.py:Half", f"{path}:whole"):
        with pytest.raises(
            M.UserError, match="must be file.py:Class of a class with methods reset"
        ):
            M.load_environment(spec)
    with pytest.raises(M.UserError, match="REWARD='x.py:f': not read with ENVIRONMENT"):
        M.find_problems(M.Settings(environment=f"{path}:Half", reward="x.py:f"))
    with pytest.raises(M.UserError, match="CREDIT='turn': not read without ENVIRONMENT"):
        M.find_problems(M.Settings(**BY_TURN[M]))
    train, choice, held_out = M.find_problems(M.Settings(environment="x", eval_prompts=7))
    assert len(train) == 65536 and len(held_out) == 7
    assert not {*train} & {*choice, *held_out} and not {*choice} & {*held_out}


# ---------------------------------------------------------------------------------------- examples
EXAMPLES = ROOT / "docs" / "examples"


def example(name):
    path = EXAMPLES / f"{name}.py"
    assert len(path.read_text(encoding="utf-8").splitlines()) < 80
    return load_tool(f"../docs/examples/{name}")


def test_guess_the_number():
    guess = example("guess")
    game = guess.Guess()
    assert game.reset(1007) == "7: 1-7"
    game.number = 3
    assert game.step("x") == game.step("8") == game.step("") == ("", 0.0, True)
    assert game.step(" 2 ") == ("3-7", 0.0, False)
    assert game.step("2") == ("", 0.0, True)  # it is out of the range that is left
    assert game.step("5") == ("3-4", 0.0, False)
    assert game.step("3") == ("", 1.0, True)
    counts = [guess.bisection(number) for number in range(1, 8)]
    assert sorted(counts) == [1] + 2 * [2] + 4 * [3]
    numbers = {guess.Guess.reset(game, seed) and game.number for seed in range(500)}
    assert numbers == set(range(1, 8))


def test_tic_tac_toe():
    """The perfect player never loses against random moves; an illegal move loses; rewards by hand."""
    game = example("tictactoe")
    rng = random.Random(0)
    results = {"Random": [], "Perfect": []}
    for name, rewards in results.items():
        for seed in range(200):
            one = getattr(game, name)()
            shown = one.reset(seed)
            assert shown == f"{seed}: ........."
            done = False
            while not done:
                shown, reward, done = one.step(
                    str(rng.choice(list(game.moves(one.board, "x"))) + 1)
                )
            rewards.append(reward)
    assert max(results["Perfect"]) == 0.5 and statistics.fmean(results["Random"]) > 0.5
    assert {0.0, 0.5, 1.0} == {*results["Random"]}
    one = game.Random()
    one.reset(3)
    shown, _, _ = one.step("5")
    assert shown[4] == "x" and shown.count("o") == 1
    assert one.step("5") == ("", 0.0, True)
    one.board = "xx.oo...."
    assert one.step("3") == ("xxxoo....", 1.0, True)
    perfect = game.Perfect()
    perfect.reset(0)
    perfect.board = "x..oo...x"
    assert perfect.step("2") == ("xx.ooo..x", 0.0, True)
    assert game.value("." * 9, "x") == 0 and game.value("xx.oo....", "x") == 1


def test_calculator():
    calculator = example("calculator")
    one = calculator.Calculator()
    prompt = one.reset(5)
    a, b = map(int, prompt.split("*"))
    assert one.step(f"well <calc>{prompt}</calc>") == (str(a * b), 0.0, False)
    assert one.step("<calc>2+2</calc>") == ("error", 0.0, False)
    assert one.step(f" {a * b}") == ("", 1.0, True) and one.step("7") == ("", 0.0, True)
    two = calculator.NoTool()
    assert two.reset(5) == prompt and two.step(f"<calc>{prompt}</calc>") == ("no tool", 0.0, False)


@pytest.mark.parametrize("name", ["guess", "tictactoe", "calculator"])
def test_conversations_of_a_start(name):
    """They alternate and end with an answer, or after 8 of them; moves are legal."""
    conversations = example("conversations")
    rng = random.Random(1)
    lengths = set()
    for _ in range(50):
        messages = conversations.conversation(name, rng)
        roles = [message["role"] for message in messages]
        lengths.add(len(roles))
        assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"] * (len(roles) % 2)
        assert len(roles) % 2 == 0 or len(roles) == 17
        if name == "tictactoe":
            moves = [message["content"] for message in messages[1::2]]
            assert len({*moves}) == len(moves) and set(moves) <= {*"123456789"}
    assert len(lengths) > 1


@pytest.mark.parametrize(("name", "kind"), [("countdown", "Countdown"), ("zebra", "Zebra")])
def test_a_start_of_one_turn_has_right_answers(name, kind):
    conversations = example("conversations")
    game = getattr(example(name), kind)()
    rng = random.Random(1)
    seeds = random.Random(1)
    for _ in range(50):
        user, assistant = conversations.conversation(name, rng)
        assert user == {"role": "user", "content": game.reset(seeds.randrange(1 << 20))}
        assert assistant["role"] == "assistant"
        assert game.step(assistant["content"]) == ("", 1.0, True)


@pytest.mark.full
def test_the_guides_commands(tmp_path):
    """With fewer steps; the log has what the guide explains."""
    for name in ("docs", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "data").mkdir()
    few = {"start": dict(ITERATIONS=5), "games": dict(ITERATIONS=3, MAX_WALLCLOCK_SECONDS=0)}
    for line in "".join(blocks("environments.md", "bash")).splitlines():
        given, _, command = line.rpartition("python ")
        settings = dict(word.split("=") for word in given.split())
        run = settings.get("RUN_ID", "")
        settings |= few.get(run.removesuffix("_gspo"), {})
        script, *words = command.split()
        done = start([ROOT / script, *words], environment(**settings), tmp_path)
        assert done.returncode == 0, done.stderr
    log = (tmp_path / "runs" / "games_gspo" / "log.txt").read_text()
    for name in ("turns:", "cut:0", "dropped:0"):
        assert name in log.partition("step:3/")[2].partition("\n")[0]
    result = json.loads((tmp_path / "runs" / "games" / "result.json").read_bytes())
    assert result["settings"]["environment"] == "docs/examples/tictactoe.py:Random"
    assert result["after"]["n"] == 200
