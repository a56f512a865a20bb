"""Environments of one turn, docs/examples/countdown.py and zebra.py: problems, answers and rewards."""

import ast
import hashlib
import itertools
import json
import re
import time
from collections import Counter
from fractions import Fraction
from random import Random

import pytest

from conftest import ROOT, load_script

EXAMPLES = ROOT / "docs" / "examples"
C = load_script(EXAMPLES / "countdown.py")
Z = load_script(EXAMPLES / "zebra.py")
GAMES = {"countdown": C.Countdown, "zebra": Z.Zebra}
names = pytest.mark.parametrize("name", GAMES)


def problems(name):
    """Return prompt and solution of the first 300 seeds."""
    game = GAMES[name]()
    return [(game.reset(seed), game.solution) for seed in range(300)]


def rewards_of(game, texts):
    """Return the rewards of texts; each ends its conversation and is told nothing."""
    steps = [game.step(text) for text in texts]
    assert {(said, type(reward), done) for said, reward, done in steps} == {("", float, True)}
    return [reward for _, reward, _ in steps]


def countdown_of(prompt):
    """Return an environment with this problem."""
    game = C.Countdown()
    game.prompt = prompt
    return game


# --------------------------------------------------------------------------------------------- both
# Of the first 300 problems: a seed draws the same one always, whatever the machine.
DIGESTS = {"countdown": "73453da47f23", "zebra": "dce1a6fa79cf"}
LENGTHS = {"countdown": 10, "zebra": 37}  # of the longest solutions, in characters


@names
def test_a_seed_draws_the_same_problem(name):
    drawn = problems(name)
    assert hashlib.sha256(json.dumps(drawn).encode()).hexdigest()[:12] == DIGESTS[name]
    assert drawn == problems(name) and len({prompt for prompt, _ in drawn}) > 290
    assert max(len(solution) for _, solution in drawn) == LENGTHS[name]


@names
def test_answers_are_right_and_what_is_near_them_is_wrong(name):
    game = GAMES[name]()
    for seed in range(100):
        prompt = game.reset(seed)
        answer = game.solution
        near = [answer[:-1], answer + "1", answer + "=", "", f"{prompt}\n{answer}"]
        near += [f"{answer}\n{answer}", f"{answer}<|end|>"]
        texts = [answer, f" {answer}\n", *near]
        assert rewards_of(game, texts) == [1.0, 1.0] + [0.0] * len(near)


# ---------------------------------------------------------------------------------------- countdown
COUNTDOWN = [  # a prompt, right answers and wrong ones
    (
        "3 7 20=41",
        ["(3*7)+20", "20+7*3", " 20 + ((7)*(3))\n"],
        ["41", "3*7+20=41", "20+21", "3*7+20+0", "37+4", "-(0-41)", "+20+3*7", "20+3(7)", "3*7+2 0"]
        + ["(3*7+20", "3*7", "20+7*３", "3*7+20 3*7+20", "03*7+20", "()", "3*7+20" + " " * 100],
    ),
    ("1 15 15=1", ["15/15*1", "15/(15/1)"], ["15/15", "1", "1*1", "15-15+1+15-15"]),
    ("2 3 3=2", ["2/3*3", "2/(3/3)"], ["3-3+2/1", "2", "3*2/3*3/3"]),  # exact thirds
    ("2 3 5=0", ["5-2-3", "5-(2+3)"], ["5-(2-3)", "5/(2+3-5)", "2*3*5*0", "5/0"]),
]


@pytest.mark.parametrize(("prompt", "right", "wrong"), COUNTDOWN)
def test_countdown_by_hand(prompt, right, wrong):
    rewards = rewards_of(countdown_of(prompt), right + wrong)
    assert rewards == [1.0] * len(right) + [0.0] * len(wrong)


BINARY = {
    ast.Add: Fraction.__add__,
    ast.Sub: Fraction.__sub__,
    ast.Mult: Fraction.__mul__,
    ast.Div: Fraction.__truediv__,
}


def by_ast(text):
    """Return the value by Python's own parser: of four operators between whole numbers, or None."""

    def value(node):
        if isinstance(node, ast.BinOp) and type(node.op) in BINARY:
            return BINARY[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return Fraction(node.value)
        raise ValueError

    text = re.sub(r"(?<![0-9])0+(?=[0-9])", "", text.strip())
    try:
        return value(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None


def random_expression(rng, depth):
    if depth == 0 or rng.random() < 0.2:
        return str(rng.randint(0, 30))
    left, right = (random_expression(rng, depth - 1) for _ in range(2))
    text = rng.choice(["", " "]).join((left, rng.choice("+-*/"), right))
    return f"({text})" if rng.random() < 0.5 else text


def test_expressions_have_the_value_that_pythons_parser_gives():
    rng = Random(1)
    texts = [random_expression(rng, rng.randint(0, 4)) for _ in range(3000)]
    texts = [text for text in texts if len(text) <= 100]
    whole = len(texts)
    parts = ["30", *"12()+-*/ "]  # mostly no expressions
    texts += ["".join(rng.choices(parts, k=rng.randint(1, 7))) for _ in range(20000)]
    values = [by_ast(text) for text in texts]
    for text, value in zip(texts, values, strict=True):
        assert C.expression_value(text) == value, text
    assert 50 < values[:whole].count(None) < whole - 2000
    assert 10000 < values[whole:].count(None) < 19900


HOSTILE = ["__import__('os')", "10**9**9", "2//1", "1e9", "1_0", "0x10", "3.0", "٣+٣", "½"]
HOSTILE += [
    "(" * 10**5,
    "(" * 10**5 + "1" + ")" * 10**5,
    "1+" * 40,
    "1" * 10**5,
    "1*" * 10**5 + "1",
]
HOSTILE += ["-" * 99 + "1", "1\0", "\ud800", "", "1/(2-2)", "1+1\u200b", "nan", "9" * 101]


def test_hostile_text_is_no_expression_and_takes_no_time():
    for text in HOSTILE:
        begin = time.perf_counter()
        assert C.expression_value(text) is None, text
        assert rewards_of(countdown_of("3 7 20=41"), [text]) == [0.0]
        assert time.perf_counter() - begin < 0.5


def test_the_longest_and_deepest_expressions_have_a_value():
    assert C.expression_value("(" * 49 + "12" + ")" * 49) == 12
    assert C.expression_value("64/" * 16 + "2") == Fraction(64, 64**15 * 2)


# -------------------------------------------------------------------------------------------- zebra
KINDS = ("Ann", "Bob", "Cid"), ("cat", "dog", "eel"), ("ale", "gin", "tea")


def solutions(prompt):
    """Return every answer that the clues leave, found house by house from the prompt alone."""
    clues = [re.fullmatch(r"(\w+)([=<>~])(\w+)", clue).groups() for clue in prompt.split(", ")]
    kinds = KINDS if any(drink in prompt for drink in KINDS[2]) else KINDS[:2]
    answers = []
    for columns in itertools.product(*map(itertools.permutations, kinds)):
        places = {str(house): house for house in (1, 2, 3)}
        for column in columns:
            places |= zip(column, (1, 2, 3), strict=True)
        steps = [(places[b] - places[a], sign) for a, sign, b in clues]
        fits = {"=": (0,), "<": (1, 2), ">": (-1, -2), "~": (-1, 1)}
        if all(step in fits[sign] for step, sign in steps):
            answers.append(", ".join(map(" ".join, zip(*columns, strict=True))))
    return answers


def test_a_zebra_puzzle_has_one_solution_which_is_the_answer():
    sizes, signs = Counter(), Counter()
    for prompt, answer in problems("zebra"):
        assert solutions(prompt) == [answer], prompt
        clues = prompt.split(", ")
        assert clues == sorted(set(clues)) and 2 <= len(clues) <= 12
        sizes[len(answer.split())] += 1
        signs.update(re.findall("[=<>~]", prompt))
    assert set(sizes) == {6, 9} and min(sizes.values()) > 100
    assert set(signs) == set("=<>~") and min(signs.values()) > 100
    prompt, answer = re.findall(r"`(Ann[^`]*)`", Z.__doc__)
    assert solutions(prompt) == [answer]
