"""An environment for ENVIRONMENT=docs/examples/guess.py:Guess: guess a number by hints.

The prompt has the number of the game and the range. An answer is a number of the range, to which the
environment says the range that is left, `5-7`. The reward is 1 for the right number. A text that is
no number of the range ends the game. A player that always guesses the middle of the range needs at
most three guesses: MAX_TURNS=3.
"""

import random

HIGHEST = 7


class Guess:
    """A game: a number from 1 to HIGHEST."""

    def reset(self, seed):
        """Draw the number; return the prompt."""
        self.number = random.Random(seed).randint(1, HIGHEST)
        self.low = 1  # the number is from low to high
        self.high = HIGHEST
        return f"{seed % 1000}: {self.low}-{self.high}"

    def step(self, text):
        """Return the range that a guess leaves, its reward, and whether the game is over."""
        text = text.strip()
        if not text.isascii() or not text.isdigit() or not self.low <= int(text) <= self.high:
            return "", 0.0, True
        guess = int(text)
        if guess == self.number:
            return "", 1.0, True
        if guess < self.number:
            self.low = guess + 1
        else:
            self.high = guess - 1
        return f"{self.low}-{self.high}", 0.0, False


def bisection(number):
    """Return how many guesses bisection takes."""
    low = 1
    high = HIGHEST
    guesses = 1
    while (middle := (low + high) // 2) != number:
        if middle < number:
            low = middle + 1
        else:
            high = middle - 1
        guesses += 1
    return guesses
