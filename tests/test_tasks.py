"""Tasks: problems, checkers, the held-out split, files of problems, and rewards, a user's with every fault too."""

from __future__ import annotations

import ast
import itertools
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
import typing
from collections import Counter
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest

import sample as S
import train_grpo as G

ROOT = Path(__file__).resolve().parents[1]
generated = pytest.mark.parametrize("name", G.GENERATED)


def task(name: str, seed: int = 0) -> G.Task:
    return G.make_task(name, "", seed)


def raised(function, *arguments: object) -> str:
    """The one line of the UserError that a call must raise."""
    with pytest.raises(G.UserError) as error:
        function(*arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


# ------------------------------------------------------------------------------------------------ problems and checkers
@generated
def test_the_demonstration_is_right_and_what_is_near_it_is_wrong(name: str) -> None:
    own = task(name)
    for held_out, count in ((False, 500), (True, 100)):
        for index in range(count):
            asked = own.problem(index, held_out)
            assert own.reward(asked, asked.answer) == own.reward(asked, f" {asked.answer}\n") == 1.0
            near = (
                asked.answer[:-1],
                asked.answer + "1",
                asked.answer + "=",
                "",
                asked.prompt + "\n" + asked.answer,
                f"{asked.answer}\n{asked.answer}",
                f"{asked.answer}<|end|>",
            )
            assert [own.reward(asked, text) for text in near] == [0.0] * len(near)


def test_answers_equal_those_of_a_brute_force() -> None:
    for index in range(100):
        asked = task("sort").problem(index, False)
        assert asked.answer == "".join(digit * asked.prompt.count(digit) for digit in "0123456789")
        assert len(asked.prompt) > 6 or asked.answer == "".join(
            min(itertools.permutations(asked.prompt))
        )
        asked = task("reverse").problem(index, False)
        assert all(asked.prompt[i] == asked.answer[-1 - i] for i in range(len(asked.prompt)))
        asked, columns, carry = task("add").problem(index, False), "", 0
        for x, y in zip(*(number[::-1] for number in asked.prompt.split("+")), strict=True):
            carry, digit = divmod(int(x) + int(y) + carry, 10)
            columns = f"{digit}{columns}"
        assert asked.answer == ("1" * carry) + columns


@pytest.mark.parametrize(
    ("name", "prompt", "right", "wrong"),
    [
        (
            "sort",
            "52713",
            ["12357", "\n12357 "],
            ["12537", "1 2 3 5 7", "1235", "123577", "12357.", "１２３５７", ""],
        ),
        ("reverse", "abcde", ["edcba"], ["EDCBA", "abcde", "edcb", "e d c b a"]),
        ("add", "123+456", ["579"], ["579.0", "0579", "+579", "578", "123+456"]),
        (
            "countdown",
            "3 7 20=41",
            ["(3*7)+20", "3*7+20", "20+7*3", " 20 + ((7)*(3))\n", "(((3*7)))+20", "03*7+20"],
            [
                "41",
                "3*7+20=41",
                "20+21",
                "3*7+20+0",
                "3*7+20-3+3",
                "37+4",
                "20+3*7;",
                "-(0-41)",
                "3*7",
                "--41",
                "+20+3*7",
                "20+3(7)",
                "20 3*7+",
                "3*7+2 0",
                "20+3×7",
                "(3*7+20",
                "3*7+20)",
                "20+7*３",
                "3*7+20 3*7+20",
                "3*7+20#3",
                "()",
            ],
        ),
        (
            "countdown",
            "1 15 15=1",
            ["15/15*1", "15/(15/1)", "1*15/15", "15/15/1"],
            ["15/15", "1", "1*1", "15-15+1+15-15"],
        ),
        (
            "countdown",
            "2 3 3=2",
            ["2/3*3", "2/(3/3)", "3*(2/3)"],
            ["3-3+2/1", "2", "3*2/3*3/3"],
        ),  # a third is exact
        (
            "countdown",
            "2 3 5=0",
            ["5-2-3", "5-(2+3)"],
            ["5-(2-3)", "5/(2+3-5)", "2/(3+2-5)", "2*3*5*0", "5/0"],
        ),
    ],
)
def test_answers_by_hand(name: str, prompt: str, right: list[str], wrong: list[str]) -> None:
    values = [int(number) for number in re.findall("[0-9]+", prompt)]
    answer = {
        "sort": "".join(sorted(prompt)),
        "reverse": prompt[::-1],
        "add": str(sum(values)),
    }.get(name, "")
    asked = G.Problem(prompt, answer)
    assert {text: task(name).reward(asked, text) for text in right} == dict.fromkeys(right, 1.0)
    assert {text: task(name).reward(asked, text) for text in wrong} == dict.fromkeys(wrong, 0.0)


# ------------------------------------------------------------------------------------------------------------ countdown
BINARY = {
    ast.Add: lambda x, y: x + y,
    ast.Sub: lambda x, y: x - y,
    ast.Mult: lambda x, y: x * y,
    ast.Div: lambda x, y: x / y,
}


def by_ast(text: str) -> Fraction | None:
    """The value by Python's own parser: four operators between whole numbers, anything else is None."""

    def value(node: ast.expr) -> Fraction:
        if isinstance(node, ast.BinOp) and type(node.op) in BINARY:
            return BINARY[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return Fraction(node.value)
        raise ValueError(ast.dump(node))

    try:
        return value(
            ast.parse(re.sub(r"(?<![0-9])0+(?=[0-9])", "", text.strip()), mode="eval").body
        )
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None


def random_expression(rng: random.Random, depth: int) -> str:
    if depth == 0 or rng.random() < 0.2:
        return str(rng.randint(0, 30))
    text = rng.choice(["", " "]).join(
        (random_expression(rng, depth - 1), rng.choice("+-*/"), random_expression(rng, depth - 1))
    )
    return f"({text})" if rng.random() < 0.5 else text


def test_expressions_have_the_value_that_pythons_parser_gives() -> None:
    rng, whole, none, broken = random.Random(1), 0, 0, 0
    for _ in range(3000):
        text = random_expression(rng, rng.randint(0, 4))
        if len(text) <= 100:
            expected = by_ast(text)
            assert G.expression_value(text) == expected, text
            whole, none = whole + (expected is not None), none + (expected is None)
    for _ in range(
        20000
    ):  # mostly no expressions: what one accepts and the other refuses would show
        text = "".join(
            rng.choices(["1", "2", "30", "(", ")", "+", "-", "*", "/", " "], k=rng.randint(1, 7))
        )
        assert G.expression_value(text) == by_ast(text), text
        broken += by_ast(text) is None
    assert whole > 2000 and none > 50 and 10000 < broken < 19900


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "10**9**9",
        "9**9**9**9",
        "2//1",
        "1e9",
        "1_0",
        "0x10",
        "3.0",
        "1,2",
        "٣+٣",
        "３*７",
        "²",
        "½",
        "Ⅷ",
        "(" * 100,
        "(" * 100000,
        "(" * 49 + "1" + ")" * 49 + "+",
        "(" * 100000 + "1" + ")" * 100000,
        ")" * 50,
        "1+" * 40,
        "1" * 100000,
        "1*" * 100000 + "1",
        "-" * 99 + "1",
        "1\0",
        "lambda: 0",
        "[1][0]",
        "1 if 1 else 2",
        "1 or 2",
        "\ud800",
        "1/0",
        "1/(2-2)",
        "0/0",
        "",
        " ",
        "\n",
        "+",
        "()",
        "1+1\u2003;",
        "1+1\u200b",
        "1\u00a0+1",
        "a",
        "True",
        "nan",
        "inf",
        "Fraction(1)",
        "3*7+20" + " " * 100,
    ],
    ids=lambda text: ascii(text)[:20],
)
def test_hostile_text_is_no_expression_and_takes_no_time(text: str) -> None:
    start = time.perf_counter()
    assert G.expression_value(text) is None
    asked = G.Problem("3 7 20=41", "")
    assert task("countdown").reward(asked, text) == 0.0
    assert time.perf_counter() - start < 0.5


def test_the_longest_and_deepest_expressions_have_a_value() -> None:
    assert G.expression_value("(" * 49 + "12" + ")" * 49) == 12
    assert G.expression_value("9" * 100) == 10**100 - 1 and G.expression_value("9" * 101) is None
    assert G.expression_value("1-" * 49 + "1") == -48
    assert G.expression_value("64/" * 16 + "2") == Fraction(64, 64**15 * 2)


# ---------------------------------------------------------------------------------------------------------------- zebra
KINDS = ("Ann", "Bob", "Cid"), ("cat", "dog", "eel"), ("ale", "gin", "tea")


def solutions(prompt: str) -> list[str]:
    """Every answer that the clues leave, found house by house; clues are read from the prompt alone."""
    clues = [re.fullmatch(r"(\w+)([=<>~])(\w+)", clue).groups() for clue in prompt.split(", ")]
    kinds = KINDS if any(drink in prompt for drink in KINDS[2]) else KINDS[:2]
    found = []
    for columns in itertools.product(*(itertools.permutations(kind) for kind in kinds)):
        houses = list(zip(*columns, strict=True))

        def place(word: str, houses: list = houses) -> int:
            return (
                int(word)
                if word.isdigit()
                else next(i for i, house in enumerate(houses, 1) if word in house)
            )

        if all(
            {
                "=": place(a) == place(b),
                "<": place(a) < place(b),
                ">": place(a) > place(b),
                "~": place(a) in (place(b) - 1, place(b) + 1),
            }[sign]
            for a, sign, b in clues
        ):
            found.append(", ".join(" ".join(house) for house in houses))
    return found


def test_a_zebra_puzzle_has_one_solution_which_is_the_answer() -> None:
    sizes, signs, clues = Counter(), Counter(), Counter()
    for index in range(300):
        asked = task("zebra").problem(index, index % 2 == 1)
        assert solutions(asked.prompt) == [asked.answer], asked.prompt
        assert asked.prompt.split(", ") == sorted(set(asked.prompt.split(", ")))
        sizes[len(asked.answer.split())] += 1
        signs.update(re.findall("[=<>~]", asked.prompt))
        clues[asked.prompt.count(",") + 1] += 1
    assert set(sizes) == {6, 9} and min(sizes.values()) > 100
    assert set(signs) == set("=<>~") and min(signs.values()) > 100
    assert min(clues) >= 2 and max(clues) <= 12
    example = re.search(
        r"`(Ann<dog[^`]*)`.*`(Ann[^`]*)`", G.zebra_problem.__doc__, re.DOTALL
    ).groups()
    assert solutions(example[0]) == [example[1]]


# ---------------------------------------------------------------------------------------------------------------- gsm8k
@pytest.mark.parametrize(
    ("text", "strict", "lenient"),
    [
        ("She pays 5 + 13 = <<5+13=18>>18.\n#### 18", 18, 18),
        ("#### 1,234", 1234, 1234),
        ("#### -3", -3, -3),
        ("#### 18.", 18, 18),
        ("#### 18.,", 18, 18),
        ("#### 18.00", 18, 18),
        ("#### 018", 18, 18),
        ("#### 0.5", 0.5, 0.5),
        ("#### .5", 0.5, 0.5),
        ("#### 18 dollars", 18, 18),
        ("#### 1,234,567.75", 1234567.75, 1234567.75),
        ("#### 7\n#### 8", 7, 8),
        ("#### 7 or 8", 7, 8),
        ("It costs $18.", None, 18),
        ("#### $18", None, 18),
        ("####18", None, 18),
        ("### 18", None, 18),
        ("#### eighteen", None, None),
        ("no answer", None, None),
        ("", None, None),
        ("####", None, None),
        ("#### ", None, None),
        ("#### ,", None, None),
        ("#### -", None, None),
        ("#### ...", None, None),
        ("#### 12345,678", 12345678, 12345678),
        ("#### 1.2.3", None, Decimal("0.3")),
        ("-3", None, -3),
        ("it is -$3", None, -3),
        ("it is $-3", None, -3),
        ("10-3", None, 3),
        ("10 - 3 = 7.", None, 7),
        ("1, 2, 3", None, 3),
        ("1,2,3", None, 3),
        ("$1,234.50!", None, 1234.5),
        ("18%", None, 18),
        ("**18**", None, 18),
        ("#### ١٨", None, None),
        ("１８", None, None),
        ("1e3", None, 3),
        ("#### " + "9" * 9999, Decimal("9" * 9999), Decimal("9" * 9999)),
        ("5\n#### 6\n7", 6, 7),
        ("18\u2009", None, 18),
    ],
)
def test_the_final_number(text: str, strict: float | None, lenient: float | None) -> None:
    for found, expected in (
        (G.final_number(text), strict),
        (G.final_number(S.last_number(text)), lenient),
    ):
        assert found.is_nan() if expected is None else found == expected


def grade_school_grader(text: str) -> str | None:
    """As `extract_answer` of the data set's repository, openai/grade-school-math, dataset.py."""
    match = re.compile(r"#### (\-?[0-9\.\,]+)").search(text)
    return match.group(1).strip().replace(",", "") if match else None


def test_the_strict_number_is_that_of_the_data_sets_grader() -> None:
    rng = random.Random(3)
    for _ in range(5000):
        text = "".join(
            rng.choices(
                ["#### ", "#", " ", "-", "$", ",", ".", "1", "23", "456", "x", "\n"],
                weights=[8, 1, 1, 2, 1, 2, 2, 4, 4, 4, 1, 1],
                k=rng.randint(1, 9),
            )
        )
        own, theirs = G.final_number(text), grade_school_grader(text)
        number = re.fullmatch(
            r"(-?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+))\.?", theirs or ""
        )  # that grader takes `1..` too
        assert own == Decimal(number[1]) if number else own.is_nan(), text


def write(path: Path, rows: list) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_gsm8k_has_a_strict_and_a_lenient_reward(tmp_path: Path) -> None:
    rows = [
        {
            "question": f"What is 1,000 + {i}?",
            "answer": f"It is <<1000+{i}={1000 + i}>>.\n#### {1000 + i:,}",
        }
        for i in range(50)
    ]
    own = G.make_task("gsm8k", write(tmp_path / "a.jsonl", rows), 0)
    for held_out in (False, True):
        for index in range(60):
            asked = own.problem(index, held_out)
            number = 1000 + int(re.search(r"\+ (\d+)\?", asked.prompt)[1])
            assert (
                own.reward(asked, asked.answer)
                == own.reward(asked, S.last_number(asked.answer))
                == 1.0
            )
            for text, strict, lenient in (
                (f"#### {number}.0", 1, 1),
                (f"So ${number:,}.", 0, 1),
                (f"{number}", 0, 1),
                (f"#### {number + 1}", 0, 0),
                (f"#### {number} of 5", 1, 0),
                ("", 0, 0),
            ):
                assert (own.reward(asked, text), own.reward(asked, S.last_number(text))) == (
                    strict,
                    lenient,
                ), text


# ------------------------------------------------------------------------------------------- splits, draws, determinism
DIGEST = """
import hashlib, sys
sys.path.insert(0, sys.argv[1])
import train_grpo as G
for name in G.GENERATED:
    own = G.make_task(name, "", 7)
    drawn = [own.problem(i, side) for side in (False, True) for i in range(40)]
    shown = repr([(problem.prompt, problem.answer) for problem in drawn])
    print(name, hashlib.sha256(shown.encode()).hexdigest()[:12])
"""


def test_problems_are_the_same_in_every_process() -> None:
    shown = [
        subprocess.run(
            [sys.executable, "-c", DIGEST, str(ROOT)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1")
    ]
    assert (
        shown[0]
        == shown[1]
        == (
            "sort 58c25e44b37a\nreverse e5e49276b1a7\nadd 90a06d159122\ncountdown 2dca15e54783\nzebra 85f957ea4757\n"
        )
    )


@generated
def test_a_problem_depends_on_seed_and_index_alone(name: str) -> None:
    forward = [task(name).problem(i, False) for i in range(30)]
    assert [task(name).problem(i, False) for i in reversed(range(30))] == forward[::-1]
    assert len({asked.prompt for asked in forward}) > 25
    assert sum(asked == task(name, 1).problem(i, False) for i, asked in enumerate(forward)) <= 1


@generated
def test_held_out_problems_differ_and_begin_alike(name: str) -> None:
    many = task(name).held_out(150)
    assert (
        len({asked.prompt for asked in many}) == len(many) == 150
        and task(name).held_out(20) == many[:20]
    )
    assert many[0] == task(name).problem(0, True)
    assert {G.is_held_out(asked.prompt) for asked in many} == {True}
    assert not any(G.is_held_out(task(name).problem(index, False).prompt) for index in range(150))


# ------------------------------------------------------------------------------------------------------------ files
def test_a_file_is_split_by_prompt_and_read_in_an_order_of_the_seed(tmp_path: Path) -> None:
    rows = [{"prompt": f" question {i % 40} ", "answer": f" {i}\n", "more": [i]} for i in range(80)]
    path = write(tmp_path / "a.jsonl", rows)
    own = G.make_task("jsonl", path, 0)
    sides = [
        [own.problem(i, held_out) for i in range(len(own.rows[held_out]))]
        for held_out in (False, True)
    ]
    prompts = [[asked.prompt for asked in side] for side in sides]
    assert sorted(prompts[0] + prompts[1]) == sorted(
        f"question {i}" for i in range(40)
    )  # each prompt once
    assert [{G.is_held_out(prompt) for prompt in side} for side in prompts] == [{False}, {True}]
    assert all(
        asked.answer == asked.prompt.split()[1] for side in sides for asked in side
    )  # the first of two answers
    assert own.problem(len(sides[0]) + 3, False) == sides[0][3]
    assert own.held_out(3) == sides[1][:3] and own.held_out(1000) == sides[1]
    again, other = (G.make_task("jsonl", path, seed) for seed in (0, 1))
    assert again == own and other.rows != own.rows
    assert sorted(asked.prompt for asked in other.rows[0]) == sorted(prompts[0])
    assert (
        own.reward(sides[0][0], f"\n{sides[0][0].answer} ") == 1.0
        and own.reward(sides[0][0], "?") == 0.0
    )


GOOD = "".join(json.dumps({"prompt": f"p{i}", "answer": "a"}) + "\n" for i in range(30)).encode()


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"not json",
        b"",
        b"null",
        b"3",
        b'"prompt"',
        b"[1, 2]",
        b"{}",
        b'{"prompt": "x"}',
        b'{"answer": "x"}',
        b'{"prompt": "x", "answer": 3}',
        b'{"prompt": null, "answer": "x"}',
        b'{"prompt": ["x"], "answer": "x"}',
        b'{"prompt": "", "answer": "x"}',
        b'{"prompt": " ", "answer": "x"}',
        b'{"prompt": "x", "answer": " \\n"}',
        b'{"prompt": "\xff", "answer": "x"}',
        b'{"prompt": "x", "answer": "y"} {}',
        b'{"question": "x", "answer": "y"}',
    ],
    ids=lambda line: ascii(line)[:40],
)
def test_a_row_that_is_no_problem_is_named_with_file_and_line(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD + line + b"\n" + GOOD)
    assert raised(G.make_task, "jsonl", str(path), 0) == (
        f"{path}:31: must be JSON with the texts prompt and answer, not blank (gsm8k's with #### and a number)"
    )


def test_a_gsm8k_row_without_its_number_is_refused(tmp_path: Path) -> None:
    for answer in ("18", "#### none", "####18"):
        rows = [{"question": "q", "answer": "#### 1"}, {"question": "r", "answer": answer}]
        said = raised(G.make_task, "gsm8k", write(tmp_path / "a.jsonl", rows), 0)
        assert said.startswith(
            f"{tmp_path}/a.jsonl:2: must be JSON with the texts question and answer, not blank ("
        )


def test_a_task_without_problems_is_refused(tmp_path: Path) -> None:
    empty = write(tmp_path / "empty.jsonl", [])
    said = raised(G.make_task, "jsonl", empty, 0)
    assert said == f"{empty}: 0 of 0 problems held out by a hash; must be some, not all"
    prompts = [f"p{i}" for i in range(50)]
    for side, count in ((True, "{0} of {0}"), (False, "0 of {0}")):
        rows = [
            {"prompt": prompt, "answer": "a"} for prompt in prompts if G.is_held_out(prompt) == side
        ]
        path = write(tmp_path / f"{side}.jsonl", rows)
        assert raised(G.make_task, "jsonl", path, 0).startswith(
            f"{path}: {count.format(len(rows))} problems held out"
        )


def test_a_wrong_name_or_path_is_refused(tmp_path: Path) -> None:
    assert raised(lambda: G.Settings(task="sorting")) == (
        "TASK='sorting': must be one of sort, reverse, add, countdown, zebra, gsm8k, jsonl"
    )
    assert {*G.GENERATED, *G.FROM_FILE} == set(
        typing.get_args(G.Settings.__dataclass_fields__["task"].type)
    )
    missing = str(tmp_path / "none.jsonl")
    for name, path in (
        ("sort", "x"),
        ("gsm8k", ""),
        ("jsonl", ""),
        ("jsonl", missing),
        ("gsm8k", str(tmp_path)),
    ):
        assert raised(G.make_task, name, path, 0) == (
            f"TASK_PATH={path!r}: must be a file of JSON lines for gsm8k and jsonl, else empty"
        )


# -------------------------------------------------------------------------------------------------------------- rewards
def test_the_tasks_own_reward() -> None:
    own = task("sort")
    problems = [own.problem(i, False) for i in range(4)]
    texts = [problems[0].answer, "0", problems[2].answer, problems[2].answer]
    assert G.load_reward("", own)(problems, texts) == [1.0, 0.0, 1.0, 0.0]


def test_the_random_reward_is_a_fair_coin_that_forgets_what_is_right() -> None:
    own = task("sort")
    problems = [own.problem(i, False) for i in range(1000) for _ in range(8)]
    texts = [
        (problem.answer, problem.answer, problem.prompt, "x")[i % 4]
        for i, problem in enumerate(problems)
    ]

    def tossed(seed: int) -> list[float]:
        coin = G.load_reward("random", task("sort", seed))
        return [
            reward
            for i in range(0, 8000, 400)
            for reward in coin(problems[i : i + 400], texts[i : i + 400])
        ]

    rewards = tossed(0)
    assert set(rewards) == {0.0, 1.0}
    for first in range(8):  # whatever the text says, and however often it was asked before
        assert abs(sum(rewards[first::8]) / 1000 - 0.5) < 4 * 0.5 / math.sqrt(1000)
    same = sum(
        a == b for a, b in zip(rewards[0::8], rewards[1::8], strict=True)
    )  # of one prompt and text
    assert abs(same / 1000 - 0.5) < 4 * 0.5 / math.sqrt(1000)
    assert tossed(0) == rewards
    for groups in (slice(80, 120), slice(400, 1200)):  # without the batch around
        assert G.load_reward("random", own)(problems[groups], texts[groups]) == rewards[groups]
    same = sum(a == b for a, b in zip(tossed(1), rewards, strict=True))
    assert abs(same / 8000 - 0.5) < 4 * 0.5 / math.sqrt(8000)


PROMPTS, TEXTS = ["52713", "90" * 60], ["12357", "first\nsecond " + "x" * 200]


def user_reward(folder: Path, source: str, name: str = "score") -> list[float]:
    path = folder / "mine.py"
    path.write_text(source, encoding="utf-8")
    reward = G.load_reward(f"{path}:{name}", task("sort"))
    rewards = reward([G.Problem(prompt, "".join(sorted(prompt))) for prompt in PROMPTS], TEXTS)
    return G.checked_rewards(rewards, PROMPTS, TEXTS).tolist()


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return [float(c == a) for c, a in zip(completions, answers)]", [1.0, 0.0]),
        ("return [c == a for c, a in zip(completions, answers)]", [1.0, 0.0]),
        ("return [len(prompts[0]), -len(completions[1])]", [5.0, -213.0]),
        ("return (0.25, 1)", [0.25, 1.0]),
        ("from fractions import Fraction\n    return [Fraction(1, 4), 0]", [0.25, 0.0]),
        ("import numpy\n    return list(numpy.array([0.5, 2], dtype=numpy.float32))", [0.5, 2.0]),
        ("import numpy\n    return numpy.array([0.5, 2]).tolist()", [0.5, 2.0]),
        ("prompts.clear(), completions.clear(), answers.clear()\n    return [1, 2]", [1.0, 2.0]),
    ],
)
def test_a_users_reward(body: str, expected: list[float], tmp_path: Path) -> None:
    rewards = user_reward(tmp_path, f"def score(prompts, completions, answers):\n    {body}\n")
    assert rewards == expected and [type(reward) for reward in rewards] == [float, float]
    assert PROMPTS[0] == "52713" and len(TEXTS) == 2


@pytest.mark.parametrize(
    ("body", "got"),
    [
        ("return [0.0, None]", "[0.0, None]"),
        ("return [0.0, '1']", "[0.0, '1']"),
        ("return [0.0, [1]]", "[0.0, [1]]"),
        ("return [1j, 0.0]", "[1j, 0.0]"),
        ("return [0.0]", "[0.0]"),
        ("return [0.0, 0.0, 0.0]", "[0.0, 0.0, 0.0]"),
        ("return []", "[]"),
        ("return 1.0", "1.0"),
        ("return None", "None"),
        ("return '10'", "'10'"),
        ("return {0: 1.0, 1: 0.0}", "{0: 1.0, 1: 0.0}"),
        ("return {0.5, 1.0}", "{0.5, 1.0}"),
        ("return (0.0 for _ in prompts)", "<generator object score.<locals>.<genexpr>"),
        ("return ValueError('not raised')", "ValueError('not raised')"),
    ],
)
def test_what_is_no_list_of_rewards_is_refused_in_a_line(
    body: str, got: str, tmp_path: Path
) -> None:
    said = raised(user_reward, tmp_path, f"def score(prompts, completions, answers):\n    {body}\n")
    assert said.startswith(f"reward: must be a list of 2 numbers, not {got}"), said


@pytest.mark.parametrize(
    ("values", "sample"),
    [
        ("[float('nan'), 0.0]", 0),
        ("[0.0, float('inf')]", 1),
        ("[0.0, -float('inf')]", 1),
        ("[0.0, 1e15]", 1),
    ],
)
def test_a_reward_without_bound_is_refused_with_its_sample(
    values: str, sample: int, tmp_path: Path
) -> None:
    said = raised(
        user_reward, tmp_path, f"def score(prompts, completions, answers):\n    return {values}\n"
    )
    assert said == (
        f"reward: must be finite and below 1e15, not {eval(values)[sample]} for prompt "
        f"{repr(PROMPTS[sample])[:80]}, completion {repr(TEXTS[sample])[:80]}"
    )


@pytest.mark.parametrize("error", [ValueError, TimeoutError, SystemExit, KeyboardInterrupt])
def test_what_a_users_reward_raises_has_its_traceback(error: type, tmp_path: Path) -> None:
    source = "def score(prompts, completions, answers):\n    helper()\n\n\ndef helper():\n    raise NAME(7)\n"
    with pytest.raises(error) as raised_error:
        user_reward(tmp_path, source.replace("NAME", error.__name__))
    last = raised_error.traceback[-1]
    assert (last.path, last.lineno + 1) == (tmp_path / "mine.py", 6)


def test_a_users_reward_that_takes_other_arguments(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="positional argument"):
        user_reward(tmp_path, "def score(prompts):\n    return [0.0, 0.0]\n")


HANGS = [
    "import threading\ndef score(p, c, a):\n    threading.Event().wait()\n",
    "def score(p, c, a):\n    while True:\n        pass\n",
    "import time\ndef score(p, c, a):\n    time.sleep(9)\n",
]


@pytest.mark.parametrize("source", HANGS, ids=["waits", "computes", "sleeps"])
def test_a_users_reward_that_hangs_is_given_up(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(G, "REWARD_SECONDS", 0.3)
    said = raised(user_reward, tmp_path, source)
    assert said == f"REWARD='{tmp_path}/mine.py:score': took over 0.3 seconds"
    assert signal.setitimer(signal.ITIMER_REAL, 0) == (0.0, 0.0)  # nothing strikes later
    assert user_reward(tmp_path, "def score(p, c, a):\n    return [1, 2]\n") == [1.0, 2.0]


@pytest.mark.parametrize(
    ("source", "name"), [("x = 1", "score"), ("score = 1", "score"), ("x = 1", "")]
)
def test_a_file_without_the_function_is_refused(source: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(source)
    spec = f"{tmp_path}/mine.py:{name}"
    assert raised(G.load_reward, spec, task("sort")) == (
        f"REWARD={spec!r}: {tmp_path}/mine.py has no function {name!r}"
    )


def test_what_a_file_raises_has_its_traceback(tmp_path: Path) -> None:
    for source, error in (("raise ValueError('early')", ValueError), ("def score(:", SyntaxError)):
        (tmp_path / "mine.py").write_text(source)
        with pytest.raises(error):
            G.load_reward(f"{tmp_path}/mine.py:score", task("sort"))


@pytest.mark.parametrize(
    "spec", ["mine", "mine.py", "none.py:score", "mine.txt:score", ":", "random:", " "]
)
def test_a_reward_that_names_no_file_is_refused(
    spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.txt").write_text("def score(p, c, a): return [0.0] * len(p)")
    assert raised(G.load_reward, spec, task("sort")) == (
        f"REWARD={spec!r}: must be empty, random, or path.py:function with a file that exists"
    )


def test_a_users_file_may_hold_dataclasses_and_is_read_by_load_reward_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom pathlib import Path\n"
        "Path(__file__).with_name('seen').write_text('x')\n@dataclass\nclass Score:\n    value: float = 0.5\n"
        "    def __call__(self, prompts, completions, answers):\n        return [self.value for _ in prompts]\n"
        "score = Score()\n"
    )
    own = task("sort")
    assert not (tmp_path / "seen").exists()
    reward = G.load_reward(f"{tmp_path}/mine.py:score", own)
    assert (tmp_path / "seen").exists() and reward([own.problem(0, False)], ["x"]) == [0.5]
