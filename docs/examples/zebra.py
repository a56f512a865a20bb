"""An environment of one turn for ENVIRONMENT=docs/examples/zebra.py:Zebra: a puzzle of three houses.

The prompt has clues on who lives with which pet (and drink) in houses 1 to 3. In
`Ann<dog, Bob~cat, Cid=2`, = means the same house, < left of, > right of, and ~ beside. The clues
leave one solution. The answer goes house by house: `Ann eel, Cid cat, Bob dog`. The reward is 1 for
the solution, else 0.
"""

import itertools
import random

DISTANCES = {"=": (0,), "<": (-2, -1), ">": (1, 2), "~": (-1, 1)}  # of two houses, by a clue's sign


def draw_puzzle(rng):
    """Return clues and their only solution."""
    names = "Ann Bob Cid cat dog eel ale gin tea".split()[: rng.choice((6, 9))]
    words = [*names, *"123"]
    orders = itertools.product(itertools.permutations((1, 2, 3)), repeat=len(names) // 3)
    worlds = [sum(order, ()) + (1, 2, 3) for order in orders]  # the house of each word
    world = rng.choice(worlds)
    clues = []
    while len(worlds) > 1:
        a, b = sorted(rng.sample(range(len(words)), 2))
        sign = rng.choice("=<>~")
        left = [other for other in worlds if other[a] - other[b] in DISTANCES[sign]]
        if world in left and left != worlds:
            worlds = left
            clues.append(words[a] + sign + words[b])
    houses = [[], [], []]
    for name, house in zip(names, world, strict=False):
        houses[house - 1].append(name)
    return ", ".join(sorted(clues)), ", ".join(map(" ".join, houses))


class Zebra:
    """A puzzle; `solution` is its right answer."""

    def reset(self, seed):
        """Draw the puzzle; return the clues."""
        clues, self.solution = draw_puzzle(random.Random(seed))
        return clues

    def step(self, text):
        """Return the reward of an answer, and that it is over."""
        return "", float(text.strip() == self.solution), True
