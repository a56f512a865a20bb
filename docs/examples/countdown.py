"""An environment of one turn for ENVIRONMENT=docs/examples/countdown.py:Countdown.

The prompt has three numbers up to 20 and a target below 100 to reach: `3 7 20=41`. An answer is an
expression of + - * / and parentheses that uses each number once: `(3*7)+20`. The reward is 1 if its
exact value is the target, else 0.
"""

import random
import re
from fractions import Fraction


def expression_value(text):
    """Return the exact value of an expression of whole numbers, + - * / and parentheses, else None.

    A division by 0 has no value, nor has a text of more than 100 characters.
    """
    text = " ".join(text.split()) if re.fullmatch(r"[0-9+*/()\s-]{1,100}", text, re.ASCII) else "("
    # Without an operand there could be signs, powers, floor divisions and (), and without an operator
    # calls. If none is missing, eval computes sums and products of at most 50 numbers.
    if re.search(r"(^|[-+*/(]) ?[-+*/)]|[0-9)] ?\(", text):
        return None
    try:
        return eval(re.sub("[0-9]+", r"Fraction('\g<0>')", text), {"Fraction": Fraction})
    except (SyntaxError, ZeroDivisionError):
        return None


def draw_problem(rng):
    """Return a prompt and one of its right answers; is_right accepts the others too."""
    target = None
    while target not in range(1, 100):
        numbers = sorted(
            rng.randint(1, 20) for _ in range(3)
        )  # sorted, so that a problem has one prompt
        a, b, c = rng.sample(numbers, 3)
        p, q = rng.choices("+-*/", k=2)
        answer = rng.choice((f"({a}{p}{b}){q}{c}", f"{a}{p}({b}{q}{c})"))
        target = expression_value(answer)
    return "{} {} {}={}".format(*numbers, target), answer


def is_right(prompt, text):
    """Return whether an expression reaches the prompt's target with each of its numbers once."""
    *numbers, target = re.findall("[0-9]+", prompt)
    uses_each_once = sorted(re.findall("[0-9]+", text[:100])) == sorted(numbers)
    return uses_each_once and expression_value(text) == int(target)


class Countdown:
    """A problem; `solution` is a right answer of it."""

    def reset(self, seed):
        """Draw the problem; return the prompt."""
        self.prompt, self.solution = draw_problem(random.Random(seed))
        return self.prompt

    def step(self, text):
        """Return the reward of an expression, and that the conversation is over."""
        return "", float(is_right(self.prompt, text)), True
