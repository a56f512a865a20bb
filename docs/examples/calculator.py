"""Environments for ENVIRONMENT=docs/examples/calculator.py:Calculator, or :NoTool.

The prompt is a product of two numbers of two digits. An answer is the result, or a call of the tool,
`<calc>37*48</calc>`, to which the environment says its result. The reward is 1 for the right result,
else 0. Without the tool the environment says `no tool` to a call.
"""

import random
import re


def computed(text):
    """Return the result of a call in a text, or "error"; None without a call."""
    call = re.search("<calc>(.*?)</calc>", text)
    if not call:
        return None
    numbers = re.fullmatch(r"([0-9]{1,4})\*([0-9]{1,4})", call[1])
    return str(int(numbers[1]) * int(numbers[2])) if numbers else "error"


class Calculator:
    """A product, and a tool."""

    tool = True

    def reset(self, seed):
        """Draw the numbers; return the prompt."""
        rng = random.Random(seed)
        self.numbers = rng.randint(10, 99), rng.randint(10, 99)
        return "{}*{}".format(*self.numbers)

    def step(self, text):
        """Return the result of a call, or the reward of an answer and that it is over."""
        result = computed(text)
        if result is not None:
            return result if self.tool else "no tool", 0.0, False
        right = str(self.numbers[0] * self.numbers[1])
        return "", float(text.strip() == right), True


class NoTool(Calculator):
    """The same without the tool."""

    tool = False
