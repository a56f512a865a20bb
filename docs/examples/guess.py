"""An environment for ENVIRONMENT=docs/examples/guess.py:Guess: guess a number by hints.

The prompt says the number of the game and the range. An answer is a number; the environment says
`+` (higher) or `-` (lower). The reward is 1 for the right number, so with DISCOUNT=0.9 few guesses are better.
An answer that is no number of the range ends the game.
"""

import random

HIGHEST = 9


class Guess:
    """A game: a number from 1 to HIGHEST."""

    def reset(self, seed):
        """Draw the number; return the prompt."""
        self.number = random.Random(seed).randint(1, HIGHEST)
        return f"{seed % 1000}: 1-{HIGHEST}"

    def step(self, text):
        """Return what is said to a guess, its reward, and whether the game is over."""
        text = text.strip()
        if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= HIGHEST:
            return "", 0.0, True
        guess = int(text)
        if guess == self.number:
            return "", 1.0, True
        return "+" if guess < self.number else "-", 0.0, False


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
