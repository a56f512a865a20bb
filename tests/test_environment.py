"""Section environment: conversations with an environment, tokens, rewards and faults; the guide's examples."""

import asyncio
import contextlib
import itertools
import math
import random
import signal
import statistics
import threading
import time
from dataclasses import replace
from decimal import Decimal
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from policies import CPU, TRAINERS, G, S, policy

from conftest import BYTES, ROOT, blocks, environment, load_tool, read_json, refusal, start

BY_TURN = {G: dict(credit="turn"), S: dict(credit="turn", importance="token")}
both = pytest.mark.parametrize("M", [G, S], ids=["grpo", "gspo"])


class Counting:
    """Says `<n>` to answer n, rewards it with n, and ends after four answers."""

    def reset(self, seed):
        self.said = []
        return f"q{seed}"

    def step(self, text):
        self.said.append(text)
        count = len(self.said)
        return f"<{count}>", count, count == 4


class Async(Counting):
    async def reset(self, seed):
        await asyncio.sleep(0)
        return super().reset(seed)

    async def step(self, text):
        await asyncio.sleep(0)
        return super().step(text)


class Varied(Counting):
    """Rewards an answer with its length; some end the game."""

    def step(self, text):
        observation, _, done = super().step(text)
        return observation, len(text), done or len(text) % 3 == 2


def trainer(M, environment, **changes):
    """Return a trainer of a small random network, whose answers are short: many tokens end one."""
    changes = dict(max_new_tokens=100, group_size=4, temperature=1.0, max_turns=8) | changes
    settings = M.Settings(mini_batches=1, prompts_per_step=4, **changes)
    own = TRAINERS[M](policy(), BYTES, settings, environment=environment)
    own.stop = frozenset(range(0, 264, 6))
    return own


def first_answers(own, queries):
    """Return the answers of the first step to queries, before they are rewarded."""
    settings = own.settings
    seeds = [(settings.seed, 0, number) for number in range(len(queries))]
    return own.sample(queries, settings.group_size, settings.temperature, seeds)


def episode_of(environment, M=G, **changes):
    """Return an Episode of a trainer without a policy."""
    network = SimpleNamespace(config=SimpleNamespace(train_seq_len=10**6))
    parts = dict(environment=environment, tokenizer=BYTES, network=network, hung_calls=0.0)
    return M.Episode(SimpleNamespace(settings=M.Settings(**changes), **parts), 3)


def replied(environment, texts, **changes):
    """Return an Episode to which the policy has given these answers, and what it said to them."""
    episode = episode_of(environment, **changes)
    heard = []
    for text in texts:
        episode.ids = [*range(episode.starts[-1]), *BYTES.encode(text), 263]
        heard.append(episode.reply())
    return episode, heard


@both
@pytest.mark.parametrize(("game", "every"), [(Counting, 6), (Async, 1)])
def test_tokens_of_the_environment_are_context_and_log_probabilities_are_exact(
    M, game, every, monkeypatch
):
    """Of each token that the policy drew, by a whole forward pass without a cache, over all turns.

    If each token ends an answer (every=1), all texts hear the environment at once.
    """
    own = trainer(M, game)
    own.stop = frozenset(range(0, 264, every))
    read = M.Decoder.read
    lengths = []

    def counted(decoder, ids):
        lengths.append(ids.size(1))
        return read(decoder, ids)

    monkeypatch.setattr(M.Decoder, "read", counted)
    answers = first_answers(own, range(3))
    if every == 1:
        # The prompt, then an answer of one token and what is said to it: three times, then the end.
        assert lengths[1:] == [1 + len(M.observation_ids(BYTES, "<1>"))] * 3
    assert len(answers) == 12 and max(len(answer.earned) for answer in answers) == 4
    for answer in answers:
        ids = torch.tensor([[*answer.prompt, *answer.ids]])
        logits = own.network.logits(own.network.features(ids, doc=torch.zeros_like(ids)))
        logps = logits[0, len(answer.prompt) - 1 :].log_softmax(-1)
        # The text, turn by turn: answers end with a stop token, and then comes what is said.
        texts = [[]]
        expected = []
        for place, (token, logp) in enumerate(zip(answer.ids, answer.logps, strict=True)):
            if logp is None:
                expected.append(token)
                continue
            if answer.logps[place - 1 : place] == [None]:
                texts.append([])
            texts[-1].append(token)
            assert logp == pytest.approx(logps[place, token].item(), abs=1e-5)
        said = sum([M.observation_ids(BYTES, f"<{n}>") for n in range(1, 5)], [])
        assert expected == said[: len(expected)]
        heard = [M.completion(BYTES, [1], text) for text in texts]
        assert answer.environment.said == heard[: len(answer.earned)]


def test_rewards_are_discounted_by_turn_and_turns_have_a_limit():
    episode, heard = replied(Counting, "abc", max_turns=3)
    assert episode.prompt == G.asked_ids(BYTES, [("<|user|>", "q3")])
    assert heard == [*(G.observation_ids(BYTES, f"<{n}>") for n in (1, 2)), []]
    assert episode.environment.said == ["a", "b", "c"] and not episode.done
    assert episode.total(0.5) == 1 + 2 * 0.5 + 3 * 0.25 and episode.total(1.0) == 6
    metrics = trainer(G, Counting, max_turns=1).train_step(range(4))
    assert metrics["turns"] <= 1 and metrics["dropped"] == 0
    assert metrics["cut"] == 1  # one answer does not end the game of four


@both
def test_credit_by_turn(M):
    """Advantages of a two-turn game by hand, and at each token that the policy drew."""
    # Half of a reward counts one turn earlier. One conversation is over after a turn, the second
    # answer of another is cut and earns nothing, and one has a fault.
    episodes = []
    for earned, starts in (([0, 1], [0, 5]), ([1], [0]), ([0], [0, 5]), ([1], [0])):
        episode = episode_of(Counting, M)
        episode.earned = earned
        episode.starts = starts
        episode.ids = [9] * (2 + starts[-1])
        episodes.append(episode)
    episodes[3].fault = "x"
    assert [one.returns(0.5) for one in episodes] == [[0.5, 1], [1], [0, 0], []]
    group = 0.5 + 1e-4, math.sqrt(0.5) + 1e-4  # by turn
    batch = (statistics.stdev([0.5, 1, 1, 0, 0]) + 1e-4,) * 2
    for scale, (first, second) in (("group", group), ("batch", batch), ("none", (1.0, 1.0))):
        own = trainer(M, Counting, discount=0.5, scale_rewards=scale, **BY_TURN[M])
        M.credit_turns(own, [episodes])
        first, second = 0.5 / first, 0.5 / second
        found = [*itertools.chain(*(one.turn_advantages for one in episodes))]
        assert found == pytest.approx([0, second, first, -first, -second], abs=1e-12)
    assert M.turn_advantages([[1.0, 5.0], [0.0]], "group", None)[0][1] == 0  # alone at its turn
    before = [0.0] * (len(episodes[0].prompt) - 1)
    assert episodes[2].advantages() == [*before, *[-0.5] * 7]
    assert episodes[0].advantages() == [*before, *[0.0] * 5, *[0.5] * 2]

    # Of a rollout: what the loss multiplies the tokens of the first answer with.
    own = trainer(M, Varied, **BY_TURN[M])
    rollout = own.rollout(range(4), 0)
    answers = [*itertools.chain(*rollout.groups)]
    lengths = [len(answer.ids) - answer.logps.count(None) for answer in answers]
    assert rollout.metrics["length"] == pytest.approx(statistics.fmean(lengths))
    assert own.update(rollout)["sampler_gap"] < 1e-5
    for answer in answers:
        assert len(answer.turn_advantages) == len(answer.returns(1.0))
        first = pytest.approx(answer.turn_advantages[0], abs=1e-6)
        [batch] = M.make_batches([answer], CPU, 10_000)
        assert answer.advantage == first == batch.advantages[batch.mask][0]  # of all: the first's
    assert len({len(answer.turn_advantages) for answer in answers}) > 1


class Once(Counting):
    """Rewards the first answer or the second, as the length of the first one says: always 1 in all."""

    def step(self, text):
        observation, count, _ = super().step(text)
        is_first = len(self.said[0]) % 2
        return observation, is_first == (count == 1), count == 2


@both
@pytest.mark.parametrize("credit", ["conversation", "turn"])
def test_what_is_sampled_again_is_what_has_no_advantage(M, credit):
    """With CREDIT=turn conversations of one total teach, if it was earned at different turns."""
    changes = BY_TURN[M] | dict(credit=credit, group_size=6, resample_rounds=2)
    metrics = trainer(M, Once, **changes).rollout(range(4), 0).metrics
    assert metrics["reward"] == 1 and metrics["reward_std"] == 0
    expected = (0, 0) if credit == "turn" else (1, 2)
    assert (metrics["zero_variance"], metrics["resampled"]) == expected


def returns(value):
    """Return a method that returns a value."""
    return lambda game, given: value


def raises(error):
    def method(game, given):
        raise error

    return method


def naps(seconds):
    time.sleep(seconds)


def swallows(game, text):
    with contextlib.suppress(BaseException):
        time.sleep(20)
    return "", 1.0, True


def never_ends(game, text):
    while True:
        with contextlib.suppress(BaseException):
            time.sleep(20)


async def hangs(game, text):
    while True:
        with contextlib.suppress(BaseException):
            await asyncio.sleep(20)


def calls_itself(game, text):
    return calls_itself(game, text)


FAULTS = [  # a method of an environment, its name, and the fault
    ("step", returns(("", math.nan, False)), "step returned the reward nan"),
    ("step", returns(("", 10**400, False)), "step returned the reward 1000"),
    ("step", returns(("", None, True)), "step returned the reward None"),
    ("step", returns(("", 1.0, True, False, {})), "must be a text, a reward, and"),  # Gymnasium
    ("step", returns((None, 1.0, False)), "step returned None, which is no text"),
    ("step", returns(("\ud800", 0.0, False)), "half a surrogate pair"),
    ("step", raises(KeyboardInterrupt), "KeyboardInterrupt"),
    ("step", raises(RuntimeError("\ud800")), "RuntimeError: \ud800"),
    ("step", raises(SystemExit(0)), "SystemExit: 0"),
    ("step", calls_itself, "RecursionError"),
    ("step", swallows, "took more than 0.3 s"),
    ("step", never_ends, "took more than 0.3 s"),
    ("step", hangs, "took more than 0.3 s"),
    ("reset", returns(7), "reset returned 7, which is no text"),
    ("reset", returns("ab" * 10**7), "reset returned 20000000 characters"),
    ("reset", lambda game, seed: str(random.random()), "another prompt for the same seed"),
]


@pytest.mark.parametrize(("name", "method", "fault"), FAULTS)
def test_an_environment_with_a_fault_does_not_end_a_run(name, method, fault, monkeypatch):
    """The episode is over and has no reward of it; other episodes go on."""
    monkeypatch.setattr(G, "STEP_SECONDS", 0.3)
    monkeypatch.setattr(G, "is_interrupt", lambda error: False)  # as under a StopSignal
    faulty = type("Faulty", (Counting,), {name: method})
    own = trainer(G, faulty, group_size=2)
    first, second = G.new_episodes(own, 16, 2)
    assert first.prompt == second.prompt
    for episode in (first, second):
        episode.ids = [9, 263]
        assert episode.fault or episode.reply() == []
    assert fault in second.fault and not any(second.earned)


class Unlucky(Counting):
    """Raises an error with every 16th seed, or with all of them."""

    every = 16

    def reset(self, seed):
        self.is_bad = seed % self.every == 0
        return super().reset(seed)

    def step(self, text):
        assert not self.is_bad
        return super().step(text)


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("fault", [G.UserError, G.RewardFault])
def test_a_fault_is_saved_by_all_ranks_or_by_none(fault, distributed):
    """A rank that has a fault alone would wait for the others in the save; they wait elsewhere."""
    saved = []
    runtime = SimpleNamespace(distributed=distributed)
    run = SimpleNamespace(save=lambda: saved.append(1), runtime=runtime)
    with pytest.raises(fault), G.saved_at_faults(run):
        raise fault("x")
    assert len(saved) == (fault is G.RewardFault or not distributed)


def test_nothing_is_learned_from_a_dropped_episode(monkeypatch):
    """It has the mean of its group. If a tenth are dropped, the run ends."""
    own = trainer(G, Unlucky)
    logged = []
    own.log = logged.append
    rollout = own.rollout([*range(1, 17)], 0)
    answers = [*itertools.chain(*rollout.groups)]
    [line] = logged
    bad = [answer for answer in answers if answer.fault]
    begin = f"environment: {len(bad)} of 64 episodes have a fault; the first, seed 16: "
    assert 0 < len(bad) <= 4 and line == begin + bad[0].fault
    # The metrics count the tokens that it drew, the update reads none of them.
    lengths = [len(answer.ids) - answer.logps.count(None) for answer in answers]
    assert rollout.metrics["length"] == pytest.approx(statistics.fmean(lengths)) and min(lengths)
    own.settings = replace(own.settings, kl_beta=1e-9)
    rows = sum(len(batch.ids) for batch in own.batches_of(answers))
    assert rows == len(answers) - len(bad)
    assert math.isfinite(own.update(rollout)["grad_norm"])
    monkeypatch.setattr(Unlucky, "every", 1)
    refusal(G.RewardFault, "of the episodes have a fault, at most 10% may", own.rollout, [1, 2], 0)

    answers = []
    for value in (1.0, 2.0, None, 6.0, None, None, None, None):
        total = value or 0.0
        fault = "" if value else "x"
        answer = SimpleNamespace(fault=fault, query=1, ids=[], total=lambda _, total=total: total)
        answers.append(answer)
    found = G.episode_rewards(own, answers)
    assert found.tolist() == [1.0, 2.0, 3.0, 6.0, 0.0, 0.0, 0.0, 0.0]
    assert G.score_episodes(own, answers).tolist() == [1, 2, 0, 6, 0, 0, 0, 0]


@both
def test_held_out_scores_are_not_of_faults(M):
    """As in training, a tenth of the conversations may have one. A rank may have no conversation."""
    own = trainer(M, Unlucky)
    good, bad = (own.sample([seed], 20, 1.0, [(0, 0, 0)]) for seed in (1, 16))
    assert bad[0].fault and len(own.score([*good, bad[0]], ())) == 21
    refusal(M.RewardFault, "^ENVIRONMENT=.*: 20% of the", own.score, [*good[:8], *bad[:2]], ())
    assert own.score([], ()).tolist() == []


def test_calls_have_a_limit_in_the_main_thread_alone():
    """Elsewhere no signal comes. A program's own timer goes on after a call."""
    found = []
    thread = threading.Thread(target=lambda: found.append(G.call_within(5.0, int, "7")))
    thread.start()
    thread.join()
    assert found == [7]
    signal.setitimer(signal.ITIMER_REAL, 1000.0)
    try:
        assert G.call_within(5.0, int, "7") == 7
        assert 900 < signal.getitimer(signal.ITIMER_REAL)[0] <= 1000
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def test_numbers_of_other_kinds_are_rewards_and_long_texts_are_cut():
    for value in (True, Decimal("0.5"), torch.tensor(0.5)):
        game = type("Game", (Counting,), {"step": returns(["", value, torch.tensor(True)])})
        episode, _ = replied(game, "a")
        assert not episode.fault and episode.earned == [float(value)] and episode.done is True
    game = type("Game", (Counting,), {"step": returns(["ab" * 10**7, 1.0, False])})
    answers = [*itertools.chain(*trainer(G, game).rollout(range(4), 0).groups)]
    assert {answer.fault for answer in answers} == {""}
    assert max(len(answer.ids) for answer in answers) == 100


def test_an_environment_that_always_hangs_is_no_longer_called(monkeypatch):
    """After ten calls, so that first scores of thousands of answers end soon."""
    monkeypatch.setattr(G, "STEP_SECONDS", 0.05)
    episode, _ = replied(Counting, "")
    for _ in range(12):
        episode.fault = ""
        episode.call(naps, 9)
    assert episode.fault == "it took more than 0.05 s too often to be called"
    # One in twenty is not too often. Another trainer has a count of its own.
    episode, _ = replied(Counting, "")
    for number in range(100):
        episode.fault = ""
        episode.call(naps, 0.08 if number % 20 == 0 else 0)
        assert "too often" not in episode.fault and episode.trainer.hung_calls < 2


class OneTurn:
    def reset(self, seed):
        return f"q{seed}"

    def step(self, text):
        return "", len(text) % 3, True


@both
def test_an_environment_of_one_turn_is_a_reward_function(M):
    """The same prompts, samples, rewards and update, with either CREDIT."""
    results = []
    for game, credit in ((OneTurn, "turn"), (OneTurn, "conversation"), (None, "conversation")):
        own = trainer(M, game, **BY_TURN[M] | dict(credit=credit))
        own.reward_funcs = [lambda completions: [len(text) % 3 for text in completions]]
        metrics = own.train_step(range(4) if game else ["q0", "q1", "q2", "q3"])
        metrics = [metrics[name] for name in ("reward", "reward_std", "length", "finished")]
        results.append((metrics, torch.cat([x.flatten() for x in own.network.parameters()])))
    (one, weights), *others = results
    # An answer that does not end within MAX_NEW_TOKENS has no reward of an environment.
    assert one[3] == 1 and one[1] > 0
    for metrics, other_weights in others:
        assert metrics == one and torch.equal(weights, other_weights)


@both
def test_what_environment_must_be(M, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "class Half:\n    def reset(self, seed): return ''\n"
        "class Whole(Half):\n    def step(self, text): return '', 0, True\nwhole = Whole()\n"
    )
    assert M.load_environment(f"{path}:Whole")().step("") == ("", 0, True)
    for spec in ("x", f"{path}:Half", f"{path}:Other", f"{tmp_path}/no.py:Half", f"{path}:whole"):
        refusal(M.UserError, "^ENVIRONMENT=", M.load_environment, spec)
    settings = M.Settings(environment=f"{path}:Half", reward="x.py:f")
    refusal(M.UserError, "^REWARD=", M.find_problems, settings)
    refusal(M.UserError, "^CREDIT=", M.find_problems, M.Settings(**BY_TURN[M]))
    for seed in (0, 1337, 2**31 - 1):
        settings = M.Settings(environment="x", eval_prompts=7, seed=seed)
        train, choice, held_out = M.find_problems(settings)
        assert len(train) == 65536 and len(held_out) == 7
        assert not {*train} & {*choice, *held_out} and not {*choice} & {*held_out}
        assert 0 <= train[0] and max(train[-1], choice[-1], held_out[-1]) < 2**31
        np.random.RandomState(held_out[-1])  # takes 32 bits


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
    assert game.step("x") == game.step("8") == ("", 0.0, True)
    assert game.step(" 2 ") == ("3-7", 0.0, False)
    assert game.step("2") == ("", 0.0, True)  # it is out of the range that is left
    assert game.step("5") == ("3-4", 0.0, False)
    assert game.step("3") == ("", 1.0, True)
    counts = [guess.bisection(number) for number in range(1, 8)]
    assert sorted(counts) == [1] + 2 * [2] + 4 * [3]


def test_tic_tac_toe():
    """The perfect player never loses against random moves; an illegal move loses; rewards by hand."""
    game = example("tictactoe")
    rng = random.Random(0)
    results = {"Random": [], "Perfect": []}
    for name, rewards in results.items():
        for seed in range(100):
            one = getattr(game, name)()
            one.reset(seed)
            done = False
            while not done:
                move = rng.choice([*game.moves(one.board, "x")]) + 1
                _, reward, done = one.step(str(move))
            rewards.append(reward)
    assert max(results["Perfect"]) == 0.5 and {*results["Random"]} == {0.0, 0.5, 1.0}
    one = game.Random()
    assert one.reset(3) == "3: ........."
    shown, _, _ = one.step("5")
    assert shown[4] == "x" and shown.count("o") == 1
    assert one.step("5") == ("", 0.0, True)
    one.board = "xx.oo...."
    assert one.step("3") == ("xxxoo....", 1.0, True)
    perfect = game.Perfect()
    perfect.reset(0)
    perfect.board = "x..oo...x"
    assert perfect.step("2") == ("xx.ooo..x", 0.0, True)


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


def test_conversations_of_a_start():
    """They alternate and end with an answer, or after 8 of them; those of one turn are right."""
    conversations = example("conversations")
    for name, (kind, _) in conversations.PLAYERS.items():
        rng = random.Random(1)
        seeds = random.Random(1)
        for _ in range(50):
            messages = conversations.conversation(name, rng)
            roles = [message["role"] for message in messages]
            assert roles == (["user", "assistant"] * 9)[: len(roles)]
            assert len(roles) % 2 == 0 or len(roles) == 17
            if name in ("countdown", "zebra"):
                game = kind()
                assert game.reset(seeds.randrange(1 << 20)) == messages[0]["content"]
                assert game.step(messages[1]["content"]) == ("", 1.0, True)


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
    result = read_json(tmp_path / "runs" / "games" / "result.json")
    assert result["settings"]["environment"] == "docs/examples/tictactoe.py:Random"
    assert result["after"]["n"] == 200
