"""Write conversations on which train_sft.py trains the start of a policy for an environment.

    python docs/examples/conversations.py guess data/guess.jsonl

The names are guess, tictactoe, calculator, countdown and zebra. Guesses and moves are random and
legal. Half of the products have a call of the tool, half of these with wrong numbers; the other half
have the result. The rows of countdown and zebra are problems with a right answer.
"""

import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import calculator
import countdown
import guess
import tictactoe
import zebra

COUNT = 4000
LENGTH = 8  # answers at most


def random_guess(game, rng):
    """Return a number of the range that is left."""
    return str(rng.randint(game.low, game.high))


def random_move(game, rng):
    """Return a free field."""
    return str(rng.choice(list(tictactoe.moves(game.board, "x"))) + 1)


def random_call(game, rng):
    """Return a result, or a call at first and then what the tool said."""
    if game.said:
        return game.said
    if rng.random() < 0.5:
        return str(game.numbers[0] * game.numbers[1])
    numbers = game.numbers
    if rng.random() < 0.5:
        numbers = rng.randint(10, 99), rng.randint(10, 99)
    return "<calc>{}*{}</calc>".format(*numbers)


PLAYERS = {
    "guess": (guess.Guess, random_guess),
    "tictactoe": (tictactoe.Random, random_move),
    "calculator": (calculator.Calculator, random_call),
    "countdown": (countdown.Countdown, lambda game, rng: game.solution),
    "zebra": (zebra.Zebra, lambda game, rng: game.solution),
}


def conversation(name, rng):
    """Return the messages of a conversation with the environment of this name."""
    environment, answer = PLAYERS[name]
    game = environment()
    game.said = ""
    messages = [{"role": "user", "content": game.reset(rng.randrange(1 << 20))}]
    for _ in range(LENGTH):
        text = answer(game, rng)
        messages.append({"role": "assistant", "content": text})
        game.said, _, done = game.step(text)
        if done:
            break
        messages.append({"role": "user", "content": game.said})
    return messages


if __name__ == "__main__":
    _, name, path = sys.argv
    rng = random.Random(1337)
    rows = [json.dumps({"messages": conversation(name, rng)}) for _ in range(COUNT)]
    Path(path).write_text("\n".join(rows) + "\n", encoding="utf-8")
