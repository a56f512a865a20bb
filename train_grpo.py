"""Group RL with GRPO. So far its tasks alone: the rest of this script comes with the trainer."""

import contextlib
import difflib
import hashlib
import importlib.util
import itertools
import json
import math
import numbers
import operator
import random
import re
import string
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, fields
from decimal import Decimal
from fractions import Fraction
from pathlib import Path


# === shared: settings ===
# === end: settings ===


# === shared: tasks ===
GENERATED = ("sort", "reverse", "add", "countdown", "zebra")
FROM_FILE = {"gsm8k": ("question", "answer"), "jsonl": ("prompt", "answer")}  # keys of a line


@dataclass(frozen=True)
class Problem:
    """A question, a right answer (a warm start's demonstration; of most tasks the only one), and a checker's data."""

    prompt: str
    answer: str
    data: dict


def is_held_out(prompt: str) -> bool:
    """Whether a prompt is kept from training: one in five, by a hash, whatever task, seed and index it came from."""
    return int.from_bytes(hashlib.blake2b(prompt.encode(), digest_size=8).digest(), "big") % 5 == 0


def expression_value(text: str) -> Fraction | None:
    """Exact value of whole numbers, + - * / and parentheses; None if text is no such expression or divides by 0.

    A sign before a number is none. At most 100 characters bound time and depth, whatever a model writes.
    """
    operators = {"+": (1, operator.add), "-": (1, operator.sub), "*": (2, operator.mul), "/": (2, operator.truediv)}
    tokens = ["", *re.findall(r"[0-9]+|\S", text)[::-1]]  # the next one stands last

    def value_from(least: int) -> Fraction:  # an operand, and what follows by operators that bind at least so strongly
        token = tokens.pop()
        value = value_from(1) if token == "(" else Fraction(token)  # ValueError where it is no number
        if token == "(" and tokens.pop() != ")":
            raise ValueError("a parenthesis stays open")
        while operators.get(tokens[-1], (0,))[0] >= least:
            strength, apply = operators[tokens.pop()]
            value = apply(value, value_from(strength + 1))
        return value

    with contextlib.suppress(ValueError, ZeroDivisionError):
        value = value_from(1) if len(text) <= 100 and text.isascii() else None
        return value if tokens == [""] else None


def zebra_problem(rng: random.Random) -> Problem:
    """Who lives in houses 1 to 3, with which pet (and drink): `Ann<dog, Bob~cat, Cid=2`, clues that leave one world.

    = same house, < left of, > right of, ~ beside. The answer, house by house: `Ann eel, Cid cat, Bob dog`.
    """
    relations = {"=": operator.eq, "<": operator.lt, ">": operator.gt, "~": lambda x, y: abs(x - y) == 1}
    names = "Ann Bob Cid cat dog eel ale gin tea".split()[:rng.choice((6, 9))] + ["1", "2", "3"]
    orders = itertools.product(itertools.permutations((1, 2, 3)), repeat=len(names) // 3 - 1)
    worlds = [dict(zip(names, itertools.chain(*order, (1, 2, 3)), strict=True)) for order in orders]  # name -> house
    world, clues = rng.choice(worlds), []
    while len(worlds) > 1:
        (a, b), relation = sorted(rng.sample(names, 2), key=names.index), rng.choice("=<>~")
        left = [other for other in worlds if relations[relation](other[a], other[b])]
        if world in left and len(left) < len(worlds):
            worlds = left
            clues.append(f"{a}{relation}{b}")
    answer = ", ".join(" ".join(name for name in names[:-3] if world[name] == house) for house in (1, 2, 3))
    return Problem(", ".join(sorted(clues)), answer, {})


def draw_problem(name: str, rng: random.Random) -> Problem | None:
    """A problem of a generated task, as `prompt` and `answer` below or in `zebra_problem`; None: draw again.

    sort, 5 to 9 digits: `52713`, `12357`. reverse, 5 to 9 letters: `abcde`, `edcba`. add, 3 digits: `123+456`, `579`.
    countdown, three numbers up to 20 and a target below 100: `3 7 20=41`, `(3*7)+20` or what else uses each one once.
    """
    if name == "zebra":
        return zebra_problem(rng)
    if name == "add":
        a, b = rng.randint(100, 999), rng.randint(100, 999)
        return Problem(f"{a}+{b}", str(a + b), {})
    if name in ("sort", "reverse"):
        letters = rng.choices(string.digits if name == "sort" else string.ascii_lowercase, k=rng.randint(5, 9))
        return Problem("".join(letters), "".join(sorted(letters) if name == "sort" else letters[::-1]), {})
    (a, b, c), (p, q) = [rng.randint(1, 20) for _ in range(3)], rng.choices("+-*/", k=2)
    expression = rng.choice((f"({a}{p}{b}){q}{c}", f"{a}{p}({b}{q}{c})"))  # every tree of three leaves
    a, b, c = sorted((a, b, c))  # or one problem in two orders could stand on both sides of the split
    target = expression_value(expression)
    data = {"numbers": sorted(map(str, (a, b, c))), "target": target}
    return Problem(f"{a} {b} {c}={target}", expression, data) if target in range(1, 100) else None


def final_number(text: str, lenient: bool) -> Decimal | None:
    """The number that a GSM8K answer ends with, None without one. Strict: after the first `#### `, as the data set's
    own grader reads it. Lenient: the last number of the text, `It costs $18.` -> 18."""
    number = r"(?:(?<![0-9])-)?\$?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)" if lenient else r"#### (-?[0-9.,]+)"
    found = re.findall(number, text) or [""]  # leniently, a minus after a digit is a subtraction
    digits = re.sub(r"[,$]|\.$", "", found[-1 if lenient else 0])
    return Decimal(digits) if re.fullmatch(r"-?([0-9]+(\.[0-9]+)?|\.[0-9]+)", digits) else None


@dataclass(frozen=True)
class Task:
    """Problems of one kind, split by `is_held_out`; problem i depends on name, file, seed and i alone."""

    name: str
    seed: int
    rows: tuple[list[Problem], list[Problem]]  # of a file: to train on, held out

    def problem(self, index: int, held_out: bool) -> Problem:
        """Problem `index` of a split: a draw of its own, or a row of the file, which begins again at its end."""
        if self.name in FROM_FILE:
            return self.rows[held_out][index % len(self.rows[held_out])]
        rng, problem = random.Random(f"{self.name} {self.seed} {held_out} {index}"), None
        while problem is None or is_held_out(problem.prompt) != held_out:
            problem = draw_problem(self.name, rng)
        return problem

    def held_out(self, n: int) -> list[Problem]:
        """The first n held-out problems with different prompts; all there are, if they are fewer."""
        found: dict[str, Problem] = {}
        for index in range(len(self.rows[True]) or 50 * n):
            if len(found) < n:
                problem = self.problem(index, held_out=True)
                found.setdefault(problem.prompt, problem)
        return list(found.values())

    def reward(self, problem: Problem, text: str, lenient: bool = False) -> float:
        """1.0 for a right answer, else 0.0. `lenient`: gsm8k by the last number, for evaluation beside the strict."""
        if self.name == "gsm8k":
            return float(final_number(text, lenient) == final_number(problem.answer, lenient=False))
        if self.name == "countdown":
            used = sorted(re.findall("[0-9]+", text))
            return float(used == problem.data["numbers"] and expression_value(text) == problem.data["target"])
        return float(text.strip() == problem.answer)


def make_task(name: str, path: str, seed: int) -> Task:
    """The task of this name; gsm8k and jsonl read the JSON lines of `path`, where of equal prompts the first counts.

    Raises UserError: an unknown name, a file missing or not wanted, a row that is no problem, a split without any.
    """
    keys, problems, rows = FROM_FILE.get(name, ()), {}, ([], [])
    if name not in (*GENERATED, *FROM_FILE):
        raise UserError(f"TASK={name!r}: must be one of {', '.join((*GENERATED, *FROM_FILE))}")
    if bool(path) != bool(keys) or path and not Path(path).is_file():
        raise UserError(f"TASK_PATH={path!r}: must be {'a file of JSON lines' if keys else 'empty'} for TASK={name}")
    for number, line in enumerate(Path(path).read_bytes().splitlines() if path else (), 1):
        try:
            prompt, answer = (json.loads(line)[key].strip() for key in keys)
            (prompt + answer).encode()  # JSON can hold half a surrogate pair, UTF-8 cannot
            if not (prompt and answer) or name == "gsm8k" and final_number(answer, lenient=False) is None:
                raise ValueError("blank, or without a number")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            right = f"{keys[0]!r} and {keys[1]!r}, not blank" + " and with #### and a number" * (name == "gsm8k")
            raise UserError(f"{path}:{number}: must be JSON, in UTF-8, with texts {right}") from None
        problems.setdefault(prompt, Problem(prompt, answer, {}))
    for problem in random.Random(seed).sample([*problems.values()], len(problems)):
        rows[is_held_out(problem.prompt)].append(problem)
    if path and not all(rows):
        raise UserError(f"{path}: {len(rows[0])} problems to train on and {len(rows[1])} held out (one in five, by a "
                        "hash of the prompt); must be 1 each at least")
    return Task(name, seed, rows)


def load_reward(spec: str, task: Task, seconds: float) -> Callable[[list[Problem], list[str]], list[float]]:
    """The function from problems, and a text that answers each, to rewards that REWARD=`spec` names.

    Empty: the task's checker. random, for control runs: a fair coin by a hash of seed, prompt, text and how often the
    call had both before, so that neither batch nor rank nor resume changes it. path.py:function: a user's, called as
    function(prompts, completions, answers), in a daemon thread, so that one that hangs does not keep the process.
    Raises UserError: a file or function that is none; later, with a sample, if the user's raises, takes over `seconds`
    (0: no limit) or returns anything but a list of numbers below 1e15, one a text.
    """

    def coins(problems: list[Problem], texts: list[str]) -> list[float]:
        pairs = [(problem.prompt, text) for problem, text in zip(problems, texts, strict=True)]
        draws = [random.Random(f"{task.seed} {pair} {pairs[:i].count(pair)}") for i, pair in enumerate(pairs)]
        return [float(draw.random() < 0.5) for draw in draws]

    def called(problems: list[Problem], texts: list[str]) -> list[float]:
        outcome = []

        def call() -> None:
            try:
                outcome.extend((function([p.prompt for p in problems], texts[:], [p.answer for p in problems]), ""))
            except BaseException as error:  # SystemExit too
                frame = error.__traceback__.tb_next  # None: the call itself failed
                outcome.extend((error, f" in line {frame.tb_lineno}" if frame else ""))

        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        thread.join(seconds or None)
        scores, line = outcome or (TimeoutError(f"over {seconds} seconds"), "")
        listed = isinstance(scores, list | tuple) and len(scores) == len(texts)
        for i, score in enumerate(scores if listed else [scores]):
            if not (listed and isinstance(score, numbers.Real) and abs(score) < 1e15):
                raise UserError(f"REWARD={spec!r}: must return a list of {len(texts)} numbers, gave {score!r:.100}{line}; "
                                f"for prompt {problems[i].prompt!r:.80}, completion {texts[i]!r:.80}")
        return [float(score) for score in scores]

    if spec in ("", "random"):
        return coins if spec else lambda problems, texts: [*map(task.reward, problems, texts)]
    path, _, name = spec.rpartition(":")
    if not (path.endswith(".py") and Path(path).is_file()):
        raise UserError(f"REWARD={spec!r}: must be empty, random, or path.py:function with a file that exists")
    source = importlib.util.spec_from_file_location(f"reward_{Path(path).stem}", path)
    module = sys.modules[source.name] = importlib.util.module_from_spec(source)  # there dataclasses look for it
    try:
        source.loader.exec_module(module)
        function = getattr(module, name).__call__  # or AttributeError
    except (Exception, SystemExit) as error:
        raise UserError(f"REWARD={spec!r}: must be a function that can be imported; {error!r:.200}") from error
    return called
# === end: tasks ===
