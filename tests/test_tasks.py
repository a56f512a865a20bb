"""data/tasks.py: problems, pairs and rewards; files of problems, their split, and users' rewards."""

import asyncio
import concurrent.futures
import fractions
import hashlib
import json
import math
import multiprocessing
import re
import sys
import time
from decimal import Decimal
from random import Random
from types import SimpleNamespace

import numpy
import pytest
import torch
from test_puzzles import by_ast

import train_grpo as G
import train_ppo as PPO
from conftest import ROOT, load_script, refusal, write_lines

D = load_script(ROOT / "data" / "tasks.py")


# ---------------------------------------------------------------------------- problems and checkers
def test_answers_equal_those_of_a_brute_force():
    for prompt, answer in D.make_problems("sort", 100, 0):
        assert answer == "".join(digit * prompt.count(digit) for digit in "0123456789")
    for prompt, answer in D.make_problems("reverse", 100, 0):
        assert all(prompt[i] == answer[-1 - i] for i in range(len(prompt)))
    for prompt, answer in D.make_problems("add", 100, 0):
        assert int(answer) == sum(map(int, prompt.split("+"))) and answer[0] != "0"
    asked = r"What is (\d+) \+ (\d+)\? Answer with the number alone\."
    for prompt, answer in D.make_problems("sums", 100, 0):
        assert answer == f"#### {sum(map(int, re.fullmatch(asked, prompt).groups()))}"


def test_a_story_has_the_number_that_its_text_tells():
    """Read by the words alone; the solution's steps add up, and its format is GSM8K's."""
    pattern = r"(Ann|Bob|Cid) has (\d+) (\w+), buys (\d) boxes of (\d) \3 and loses (\d)\. "
    for prompt, answer in D.make_problems("story", 300, 0):
        found = re.fullmatch(pattern + r"How many \3 are left\?", prompt)
        count, boxes, size, lost = map(int, found.group(2, 4, 5, 6))
        left = count + boxes * size - lost
        steps, last = answer.split("\n")
        sides = [step.split("=") for step in steps.removesuffix(".").split(". ")]
        assert len(sides) == 3 and all(by_ast(a) == int(b) for a, b in sides)
        assert sides[-1][1] == str(left) and last == f"#### {left}"
        rewards = D.gsm8k([prompt] * 3, [answer, steps, last + "1"], answer=[answer] * 3)
        assert rewards == [1.1, 1.0, 0.1]


# A text, its last number, and whether the format is right.
LAST = [
    ("She pays 5 + 13 = <<5+13=18>>18.\n#### 18", "18", True),
    ("#### 1,234,567.75 \n\n", "1234567.75", True),
    ("#### 7 or 8\n#### 8", "7", True),
    ("so #### 18", "18", False),
    ("#### 18\nand more", "18", False),
    ("#### $18", "18", False),
    ("\\boxed{7} no, \\boxed{-18}.\nThat is 5.", "-18", True),
    ("\\boxed{\\$1,234.50}", "1234.50", True),
    ("\\boxed{x} or 4", None, False),
    ("\\boxed{9{,}500} km, 7", "9500", True),
    ("\\boxed{9\\,500}", "9500", True),
    ("it is $9,\\!500$", "9500", False),
    ("\\boxed{3 + 5 = 8}", "8", True),
    ("\\boxed{\\text{Ann: } 10\\%}", "10", True),
    ("\\boxed{\\frac{1}{2}}", None, False),
    ("\\boxed{1/2}", None, False),
    ("\\boxed{12", "12", True),
    ("#### 1. Add the costs\n3 + 5 = 8\n#### 2. The end\n\\boxed{8}", "8", True),
    ("#### 1. Add\nSo 3 + 5 = 8\n#### 8", "8", True),
    ("#### 18. ", "18", False),
    ("#### 18. Next question: 5 apples", "18", False),
    ("\\boxed{18 \\text{ cm}^2}", "18", True),
    ("\\boxed{18 m^{2}}", "18", True),
    ("\\boxed{18 = x}", "18", True),
    ("(4)-3 = 1 or 12-5", "5", False),
    ("6 - -3", "-3", False),
    ("1,2345", "2345", False),
    ("1/2 or 50%", "50", False),
    ("#### ", None, False),
    ("9" * 9999, "9" * 9999, False),
]


def test_gsm8k_reads_the_number_where_others_look_for_it():
    for text, number, is_format in LAST:
        value = D.last_number(text)
        assert value.is_nan() if number is None else value == Decimal(number), text
        assert D.has_format(text) == is_format, text
    texts = ["#### 1,018.0", "1018", "\\boxed{1018}", "#### 1019", "it is 1019", ""]
    said = [[turn("assistant", text)] for text in texts]  # of prompts in messages
    columns = dict(prompts=["q"] * 6, answer=["so <<1000+18>>.\n#### 1,018"] * 6)
    for completions in (texts, said):
        assert D.gsm8k(completions=completions, **columns) == [1.1, 1.0, 1.1, 0.1, 0.0, 0.0]
        assert D.gsm8k_strict(completions=completions, **columns) == [1.0] + [0.0] * 5
    for reward in (D.gsm8k, D.gsm8k_strict):
        assert reward(["q"] * 3, ["#### 1"] * 3, answer=[None, "#### 2", "none"])[::2] == [None] * 2
        for right in (
            "1,018",
            "1018 m^2",
            1018,
            1018.0,
            "2*509 = \\boxed{1018}",
        ):  # as other tools have it
            assert reward(["q"], ["#### 1018"], answer=[right])[0] >= 1
        for unclear in ("1/2", "3:30", "1e5", 1e16):
            assert reward(["q"], ["#### 2"], answer=[unclear]) == [None]


def flexible_extract(text):
    """As lm-eval's filter of that name in its task gsm8k, and what its exact_match ignores."""
    *_, (number, digits) = re.findall(r"(-?[$0-9.,]{2,})|(-?[0-9]+)", text)
    return re.sub(r",|\$|\.$", "", number or digits)


def test_a_number_at_the_end_is_that_of_lm_evals_flexible_extract():
    rng = Random(5)
    for _ in range(3000):
        number = f"{rng.randint(-9, 9) * 10 ** rng.randint(0, 6):,}" + rng.choice(["", ".25"])
        if rng.random() < 0.3:
            number = number.replace("-", "-$") if "-" in number else f"${number}"
        before = rng.choice(["The answer is ", "So he has ", "= ", "it is 4 and not "])
        text = before + number + rng.choice(["", ".", " dollars", "\n"])
        assert D.last_number(text) == Decimal(flexible_extract(text)), text


def test_hostile_text_takes_no_time():
    for text in ("-" * 10**5, "1," * 10**5, "\\boxed{" * 10**4, "#### " * 10**4, "$" * 10**5):
        begin = time.perf_counter()
        D.gsm8k(["q"], [text], answer=["#### 1"])
        assert time.perf_counter() - begin < 0.5


def grade_school_grader(text):
    """As `extract_answer` of the data set's repository, openai/grade-school-math, dataset.py."""
    match = re.compile(r"#### (\-?[0-9\.\,]+)").search(text)
    return match.group(1).strip().replace(",", "") if match else ""


def test_the_number_is_that_of_the_data_sets_grader():
    rng = Random(3)
    parts = ["#### ", "#", " ", "-", "$", ",", ".", "1", "23", "456", "x", "\n"]
    for _ in range(5000):
        weights = [8, 1, 1, 2, 1, 2, 2, 4, 4, 4, 1, 1]
        text = "".join(rng.choices(parts, weights, k=rng.randint(1, 9)))
        value = D.final_number(text)
        # That grader takes `1..` too.
        number = re.fullmatch(r"(-?([0-9]+(\.[0-9]+)?|\.[0-9]+))\.?", grade_school_grader(text))
        assert value == Decimal(number[1]) if number else value.is_nan(), text


def test_the_coin_is_fair_and_depends_on_the_pair_alone():
    prompts = [f"p{i // 4}" for i in range(8000)]
    texts = [("right", "right", "wrong", "x")[i % 4] for i in range(8000)]
    rewards = D.coin(prompts, texts, answer=["right"] * 8000)
    limit = 4 * 0.5 / 2000**0.5
    for first in range(4):  # whatever the text says, and however often it came before
        assert abs(sum(rewards[first::4]) / 2000 - 0.5) < limit
    assert rewards[0::4] != rewards[1::4]  # of one prompt and text
    assert D.coin(prompts[400:1200], texts[400:1200]) == rewards[400:1200]
    messages = [[turn("user", "q")]], [[turn("assistant", "a")]]
    assert D.coin(*messages) == D.coin(*messages)


# ------------------------------------------------------------------------------------ data/tasks.py
DIGESTS = dict(
    sort="c4a01449b081",
    reverse="51b591825faf",
    add="91c141357f9d",
    sums="2601d3cbb4dc",
    story="dff90408873f",
)


@pytest.mark.parametrize("task", D.TASKS)
def test_a_seed_writes_the_same_files(task, tmp_path, capsys):
    words = [task, *"--problems 60 --pairs 40 --seed 7 --out".split(), str(tmp_path)]
    D.main(words)
    texts = [path.read_bytes() for path in sorted(tmp_path.iterdir())]
    assert f"{tmp_path}/{task}.jsonl: 60 rows, the first is {{" in capsys.readouterr().out
    assert hashlib.sha256(b"".join(texts)).hexdigest()[:12] == DIGESTS[task]
    problems, pairs = ([*map(json.loads, text.splitlines())] for text in texts)
    drawn = D.make_problems(task, 60, 7)
    assert [(row["prompt"], row["answer"]) for row in problems] == drawn
    assert len(set(D.make_problems(task, 60, 8)) & set(drawn)) < 10 and len(pairs) == 40
    reward = D.gsm8k_strict if task in ("sums", "story") else G.exact_match
    for row, (prompt, answer) in zip(pairs, drawn, strict=False):
        assert (row["prompt"], row["chosen"]) == (prompt, answer)
        assert abs(len(row["rejected"]) - len(answer)) <= 1 and row["rejected"].strip()
        assert reward([prompt], [row["rejected"]], answer=[answer]) == [0.0]


@pytest.mark.parametrize("given", ["walk", "add --problems 9", "add --pairs 20001"])
def test_arguments_that_do_not_fit_are_refused(given, capsys):
    with pytest.raises(SystemExit, match="2"):
        D.main(given.split())
    assert "error: " in capsys.readouterr().err


def test_few_problems_have_a_pair_each(tmp_path, capsys):
    words = ["add", "--problems", "20", "--out"]
    D.main([*words, str(tmp_path)])
    assert len((tmp_path / "add_pairs.jsonl").read_text().splitlines()) == 20
    with pytest.raises(SystemExit, match="2"):
        D.main([*words, str(tmp_path / "add.jsonl")])
    assert re.fullmatch("error: --out .*add.jsonl: .*\n", capsys.readouterr().err)


# ---------------------------------------------------------------------------------- files and split
def split(train, held_out="", reports=None, **changes):
    settings = G.Settings(train_files=str(train), val_files=str(held_out), **changes)
    return G.split_problems(settings, log=[].append if reports is None else reports.append)


def is_held_out(prompt):
    """Return whether a prompt is one of the held-out ones, by the definition of the hash."""
    text = json.dumps([["<|user|>", prompt]]).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") % 10 == 0


def test_files_are_split_by_prompt_and_ordered_by_the_seed(tmp_path):
    rows = [{"prompt": f" q {i % 400}", "answer": f"{i}\n", "more": [i]} for i in range(800)]
    rows[7] = {"question": rows[7]["prompt"], "answer": "7\n"}
    first = write_lines(tmp_path / "a", rows[:300])
    files = f"{first},{write_lines(tmp_path / 'b', rows[200:])}"
    train, choice, held_out = split(files)
    # The first answers, and all columns.
    expected = [{"prompt": f" q {i}", "answer": f"{i}\n", "more": [i]} for i in range(400)]
    expected = [{**one, "question": None} for one in expected]
    expected[7] |= {"question": " q 7", "more": None}
    assert held_out == [one for one in expected if is_held_out(one["prompt"])]
    assert 20 < len(held_out) < 60 and len(choice) == (400 - len(held_out)) // 10
    everything = sorted(map(str, train + choice + held_out))
    assert everything == sorted(map(str, expected)) and split(files) == (train, choice, held_out)
    again, other_choice, same = split(files, seed=1, eval_prompts=5)
    assert same == held_out[:5] and again != train
    assert sorted(map(str, again + other_choice)) == sorted(map(str, train + choice))
    count = 2 * len(train)
    steps = [G.problems_of_step(train, step, 8, 1) for step in range(count // 8 + 1)]
    one, two = (sum(steps, [])[begin : begin + len(train)] for begin in (0, len(train)))
    assert one == train and one != two  # each pass has an order of its own
    assert sorted(map(str, one)) == sorted(map(str, two))
    third = write_lines(tmp_path / "c", rows[150:350])
    train, _, held_out = split(files, third)
    assert held_out == expected[150:350]
    assert {one["prompt"] for one in train} < {f" q {i}" for i in [*range(150), *range(350, 400)]}
    few = split(write_lines(tmp_path / "d", rows[:9]), third)
    assert few[0] == few[1] and len(few[0]) == 9  # too few to choose between averages by others
    assert split(first, ema=False, swa=False)[1] == []  # nothing is to be chosen


def turn(role, content, **more):
    return {"role": role, "content": content, **more}


NO_ANSWER = "no answer, and REWARD or MARK is `exact`, which needs one"
BAD = [  # a line, and why it is left out
    (b"{", "no JSON"),
    (b"[" * 100_000, "no JSON"),
    (b'{"prompt": "\xff", "answer": "x"}', "invalid UTF-8"),
    ({}, "missing field 'prompt'"),
    ({"prompt": "x", "answer": " \n"}, NO_ANSWER),
    ({"prompt": " ", "answer": "x"}, "blank prompt"),
    ({"prompt": "x", "answer": ["x"]}, "the answer is no text"),
    ({"prompt": ["x"], "answer": "x"}, "field 'prompt' is no list of objects"),
    (
        {"prompt": "a\ud800", "answer": "x"},
        "no Unicode: half a surrogate pair, or bytes that are no UTF-8",
    ),
    ({"prompt": "p 3", "answer": "a"}, "the prompt of an earlier row, with the same answer"),
    ({"prompt": "p 3", "answer": "b"}, "the prompt of an earlier row, with another answer"),
    (
        {"prompt": "x", "answer": "y", "image": "a.png"},
        "field 'image': the model reads text only",
    ),
    ({"messages": [turn("critic", "q")], "answer": "a"}, "unknown role 'critic'"),
    (
        {"prompt": [turn("user", "q"), turn("assistant", "r")], "answer": "a"},
        "field 'prompt' does not end with a user's message",
    ),
    ({"prompt": "x" * 10**7, "answer": "x"}, "too long"),
]
GOOD = [{"prompt": f"p {i}", "answer": "a"} for i in range(60)]
BARE = [{"prompt": f"q {i}"} for i in range(60)]


def check_size(problem, notes):
    if len(problem["prompt"]) > 1000:
        raise G.RowError("too long")


def test_a_row_that_is_no_problem_is_counted_with_its_number(tmp_path):
    """Blank lines are counted as lines, not as rows."""
    lines = [line for line, _ in BAD]
    path = write_lines(tmp_path / "a", [*GOOD, b"", b"  \t", *lines, {**GOOD[0], "prompt": "z"}])
    numbers = {}
    for number, (_, fault) in enumerate(BAD, 63):
        numbers.setdefault(fault, []).append(number)
    reports = []
    parts = G.split_problems(G.Settings(train_files=str(path)), check_size, reports.append)
    [report] = reports
    assert sum(map(len, parts)) == 61 and report.left_out == numbers
    begin = f"data: {path}: {61 + len(BAD)} rows, used 61 problems; left out no JSON: 2 "
    assert str(report).startswith(f"{begin}(the first are rows 63, 64); invalid UTF-8: 1 ")


USER = [turn("user", "q")]
CALL = [{"function": {"name": "f", "arguments": {"x": 1}}}]
CALL_TEXT = [{"function": {"name": "f", "arguments": '{"x": 1}'}}]
RESULT = turn("tool", "r", tool_call_id="c")
FLIGHTS = '[{"from": "A", "value": 1}]'
READ = [  # a row, its prompt and its answer
    ({"prompt": 5, "answer": 7}, "5", "7"),
    ({"prompt": None, "problem": "q", "answer": None, "ground_truth": "a"}, "q", "a"),
    ({"messages": [turn("system", "s"), *USER, turn("assistant", "a")]}, None, "a"),
    ({"prompt": "q", "answer": "a", "tools": [{"x": [1]}], "n": None}, "q", "a"),
    ({"prompt": "q", "answer": ["a", "b"]}, "q", ["a", "b"]),
    ({"instruction": "q", "input": "x", "output": "a"}, "q\n\nx", "a"),
    ({"prompt": "q", "input": "x", "context": "c", "output": "a", "weight": 0}, "q", "a"),
    ({"prompt": "q", "completion": "a", "label": True}, "q", "a"),
    ({"prompt": "q", "completion": "a", "label": False}, "q", None),
    ({"messages": [*USER, turn("assistant", "a")], "label": False}, USER, None),
    ({"instruction": "q", "output": "a", "kto_tag": "false"}, "q", None),
    ({"question": "q", "answer": "a", "label": "false"}, "q", "a"),
    ({"prompt": json.dumps(USER), "problem": "p", "answer": 3}, USER, "3"),
    ({"prompt": "", "problem": "q", "answer": FLIGHTS}, "q", FLIGHTS),
    (
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        USER,
        "a",
    ),
    ({"prompt": USER, "reward_model": {"ground_truth": "34", "style": "rule"}}, USER, "34"),  # verl
    ({"prompt": "q", "reward_model": "m"}, "q", None),
    ({"problem": "q", "solution": "x = 2", "expected_answer": "2"}, "q", "2"),
    (
        {"prompt": "q", "history": [["x", "y"]]},
        [turn("user", "x"), turn("assistant", "y"), *USER],
        None,
    ),
    (
        {"prompt": [turn("human", "q"), turn("assistant", None, tool_calls=CALL_TEXT), RESULT]},
        [*USER, turn("assistant", None, tool_calls=CALL), RESULT],
        None,
    ),
]


@pytest.mark.parametrize(("row", "prompt", "answer"), READ)
def test_rows_of_other_projects_are_problems(row, prompt, answer):
    """What a reward function gets, and the turns of the policy's prompt: the same from both forms."""
    prompt = prompt or [turn("system", "s"), *USER]
    problem = G.problem_of(row, set())
    assert problem == {**row, "prompt": prompt, "answer": answer}
    again = G.problem_of({"prompt": problem["prompt"], "tools": row.get("tools")}, set())
    assert again["prompt"] == prompt and G.query_turns(again) == G.query_turns(problem)


def test_what_may_be_meant_for_a_prompt_is_named():
    notes = set()
    G.problem_of({"prompt": "q", "input": "x", "context": "", "documents": ["d"], "n": 1}, notes)
    G.problem_of({"question": "q", "context": "c"}, notes)
    G.problem_of({"question": "q", "choices": ["a", "b"], "answer": 1}, notes)  # MMLU
    G.problem_of({"question": "q", "starter_code": "", "options": []}, notes)
    assert notes == {("not in the prompt", name) for name in ("input", "documents", "choices")}


def test_an_answer_that_is_labelled_wrong_is_named():
    """Not one that stands beside the right answer, which is read."""
    for row in (
        {"question": "q", "response": "yes", "label": False},
        {"messages": [*USER, turn("assistant", "a")], "kto_tag": "false"},
    ):
        notes = set()
        assert G.problem_of(row, notes)["answer"] is None
        assert notes == {("not used", "an answer with label or kto_tag false")}
    notes = set()
    row = {"prompt": "q", "completion": "no", "answer": "yes", "label": 0}
    assert (G.problem_of(row, notes)["answer"], notes) == ("yes", set())


def test_answers_are_needed_by_exact_alone(tmp_path):
    """A file of prompts alone is read for one's own function, in JSON lines or as one list."""
    path = write_lines(tmp_path / "a.json", BARE)
    lines = path.read_bytes()
    for content in (lines, json.dumps(BARE).encode(), b"\xef\xbb\xbf" + lines):
        path.write_bytes(content)
        assert sum(map(len, split(path, reward="m.py:f"))) == 60
        assert sum(map(len, split(path, reward="exact_form.py:f"))) == 60
    for reward in ("m.py:f:2,exact", "exact:0.5", " exact"):
        refusal(G.UserError, f"{NO_ANSWER}: 60 ", split, path, reward=reward)
    # A teacher alone, or a reward model: REWARD marks, and nothing is learned from it.
    assert sum(map(len, split(path, teacher="t"))) == 60
    refusal(G.UserError, f"{NO_ANSWER}: 60 ", split, path, teacher="t", kd_alpha=0.5)
    judged = PPO.Settings(train_files=str(path), reward_model="j")
    assert sum(map(len, PPO.split_problems(judged, log=[].append))) == 60
    assert G.exact_match(["q"] * 3, ["a", "a", " a\n"], ["a ", None, "b"]) == [1.0, None, 0.0]
    reports = []
    write_lines(path, [*GOOD, *BARE])
    assert sum(map(len, split(path, reports=reports, reward="m.py:f"))) == 120
    assert f"data: {path}: 60 of 120 problems have no answer" in map(str, reports)


def test_files_that_are_missing_or_too_small_are_refused(tmp_path):
    path = write_lines(tmp_path / "a", [row for row in GOOD if is_held_out(row["prompt"])])
    for files, said in (
        (tmp_path / "none", "no such file; data/tasks.py"),
        (path, "TRAIN_FILES=.* 0 problems to train on, [1-9] held out"),
        (tmp_path, "a folder"),
        (write_lines(tmp_path / "a.CSV", GOOD), "a.CSV: must be .jsonl, .json or .parquet"),
        (f"{path}:2, {path}", "each once"),
        (f"{path}:2", "has weights"),
    ):
        refusal(G.UserError, said, split, files)


# ------------------------------------------------------------------------------------------ rewards
TEXTS = ["12357", "first\nsecond " + "x" * 200]
COLUMNS = [{"prompt": prompt, "answer": "12357", "level": 1} for prompt in ("52713", "90" * 60)]


def called(*rewards):
    """Return what functions give two answers, by name."""
    return G.call_reward_functions([*rewards], COLUMNS, TEXTS, print, 120)


def user_values(folder, source):
    """Return what `score` of a file gives two answers."""
    (folder / "mine.py").write_text(source, encoding="utf-8")
    return called(*G.load_reward_functions(f"{folder}/mine.py:score"))["score"]


def test_what_a_users_reward_may_return():
    half = torch.tensor([0.5, 2], dtype=torch.bfloat16, requires_grad=True)
    for returned, values in (
        ([fractions.Fraction(1, 4), None], [0.25, None]),
        (numpy.array([0.5, 2], dtype=numpy.float32), [0.5, 2.0]),
        (half, [0.5, 2.0]),
        ([torch.tensor(0.5), True], [0.5, 1.0]),
        ((len(text) > 9 for text in TEXTS), [0.0, 1.0]),
        (range(2), [0.0, 1.0]),
    ):
        assert G.reward_values("score", returned, 2) == values
    wrong = [
        [0.0, "1"],
        [0.0, [1]],
        [1j, 0.0],
        [0.0],
        [0.0] * 10**7,
        [],
        1.0,
        None,
        "10",
        "x" * 10**7,
    ]
    for returned in [*wrong, {0: 1.0, 1: 0.0}, {0.5, 1.0}, iter(int, 1), range(10**12)]:
        line = refusal(G.UserError, "^reward score: ", G.reward_values, "score", returned, 2)
        assert len(line) < 200
    for values, text in (((math.nan, 0), "12357"), ((0, 1e15), "first"), ((0, -1e400), "first")):
        reward = G.RewardFunction("score", lambda completions, values=values: values)
        assert text in refusal(G.UserError, "finite and below 1e15", called, reward)


RAISES = {  # what a file holds -> what the error names, after the place
    "def score(completions):\n    return helper()\n\n\ndef helper():\n    raise KeyError(7)": (
        "reward score raised KeyError: 7"
    ),
    "def score(completions): return score(completions)": "reward score raised RecursionError: max",
    "def score(completions): yield 1 / 0": "reward score raised ZeroDivisionError: div",
    "import sys\nasync def score(completions): sys.exit(0)": "reward score raised SystemExit: 0",
    "async def score(completions): raise KeyboardInterrupt": "reward score raised KeyboardInterrupt",
    "def score(completions):\n    raise ValueError('x' * 10**6)": "reward score raised ValueError: x",
}


@pytest.mark.parametrize("source", RAISES)
def test_what_a_users_function_raises_is_named_with_its_frames(source, tmp_path, monkeypatch):
    monkeypatch.setattr(G, "is_interrupt", lambda error: False)  # as under a StopSignal
    with pytest.raises(G.RewardFault) as caught:
        user_values(tmp_path, source)
    message = str(caught.value)
    place = f" ({tmp_path}/mine.py, line {len(source.splitlines())})"
    assert message.startswith(RAISES[source]) and message.endswith(place) and len(message) < 800
    assert {*re.findall(r'File "(.*?)"', caught.value.traceback)} == {f"{tmp_path}/mine.py"}
    assert len(caught.value.traceback) <= 10000


@pytest.mark.parametrize("source", ["def score(:", "import nothing_of_this_name", "exit(0)"])
def test_a_file_that_cannot_be_imported_is_named_with_its_frames(source, tmp_path, capsys):
    path = f"{tmp_path}/mine.py"
    line = refusal(G.UserError, "", user_values, tmp_path, source)
    assert line.startswith(f"REWARD='{path}:score': {path} raised ")
    assert f'File "{path}", line 1' in capsys.readouterr().err


def test_a_function_gets_the_columns_that_it_takes_in_lists_of_its_own(tmp_path):
    def score(completions, *, level, none=3, prompt=()):
        return [level.pop(), len(prompt)]

    def all_of(**columns):
        assert "prompt" not in columns
        return columns["level"]

    rewards = [G.RewardFunction(function.__name__, function) for function in (score, all_of)]
    assert called(*rewards) == {"score": [1.0, 2.0], "all_of": [1.0, 1.0]}
    refusal(G.UserError, "'grade'", called, G.RewardFunction("score", lambda grade: grade))


def test_a_function_that_changes_its_arguments_changes_no_problem():
    """Neither another completion's, whose problem is the same one, nor the next function's."""
    row = {"prompt": [turn("user", "hm")], "answer": "a", "tests": [[1], [2]], "tag": {"a": [1]}}
    rows = [row, row]

    def judge(prompts, completions, tests, tag):
        lengths = []
        for prompt, completion, test, tags in zip(prompts, completions, tests, tag, strict=True):
            prompt += completion
            prompt[0]["content"] += "!"
            lengths.append(len(prompt) + len(test[0]) + len(tags["a"]))
            test[0].clear()
            tags["a"].clear()
        return lengths

    before = json.dumps(row)
    rewards = [G.RewardFunction(name, judge) for name in ("first", "second")]
    values = G.call_reward_functions(rewards, rows, ["x", "y"], print, 120)
    assert values == {"first": [4.0, 4.0], "second": [4.0, 4.0]}
    assert json.dumps(row) == before


@pytest.mark.parametrize("is_async", [False, True])
def test_a_slow_function_is_named_with_its_seconds(is_async, monkeypatch):
    """After REWARD_SECONDS, and while it goes on every SAY_SECONDS."""
    monkeypatch.setattr(G, "SAY_SECONDS", 0.05)

    async def awaits(completions):
        await asyncio.sleep(0.12)
        return [None] * 2

    logged = []
    slow = awaits if is_async else lambda completions: [time.sleep(0.12)] * 2
    rewards = [
        G.RewardFunction("slow", slow),
        G.RewardFunction("quick", lambda completions: [1, 2]),
    ]
    values = G.call_reward_functions(rewards, COLUMNS, TEXTS, logged.append, 0.1)
    assert values == {"slow": [None, None], "quick": [1.0, 2.0]}
    assert logged[0] == "reward slow: called for 2 answers, 0 s"
    end = r"reward slow: 0\.\d s for 2 answers, more than REWARD_SECONDS=0\.1"
    assert re.fullmatch(end, logged[-1]) and not any("quick" in line for line in logged)


def test_async_functions_of_a_step_are_awaited_together_in_one_loop():
    """Each waits for the other; a lock that was used in one step is of use in the next one, also in
    a notebook, whose loop runs in the main thread; sys.exit in a task of the user's own ends
    neither the loop nor the run.
    """
    lock = asyncio.Lock()
    here, there = asyncio.Event(), asyncio.Event()

    async def ends():
        sys.exit(0)

    async def one(completions):
        here.set()
        await there.wait()
        task = asyncio.create_task(ends())
        async with lock:
            await asyncio.sleep(0.01)
        return [1, task.done() + 1]

    async def two(completions, answer):
        there.set()
        await here.wait()
        async with lock:
            return [len(text) for text in answer]

    async def notebook():
        return called(G.RewardFunction("one", one), G.RewardFunction("two", two))

    for _ in range(2):
        assert asyncio.run(notebook()) == {"one": [1.0, 2.0], "two": [5.0, 5.0]}


def test_what_mark_names_decides_what_is_right(tmp_path):
    """The total is the same: what marks has no weight, or its own in REWARD."""
    (tmp_path / "mine.py").write_text(
        "def near(completions): return [2, None]\ndef right(completions): return [0.9, 1]\n"
    )
    near, right = (f"{tmp_path}/mine.py:{name}" for name in ("near", "right"))
    for reward, mark, marks, totals in (
        (f"{near}:2", "", [True, False], [4.0, 0.0]),
        (f"{near}:2", right, [False, True], [4.0, 0.0]),
        (f"{near}:2,{right}:0.5", right, [False, True], [4.45, 0.5]),
        (near, "exact", [True, False], [2.0, 0.0]),
    ):
        rewards = G.with_mark(G.load_reward_functions(reward), mark)
        values = called(*rewards)
        answers = []
        for column in zip(*values.values(), strict=True):
            answers.append(SimpleNamespace(rewards=dict(zip(values, column, strict=True))))
        G.weigh(rewards, answers)
        assert [G.is_right(answer, rewards) for answer in answers] == marks
        assert [answer.reward for answer in answers] == totals
    for spec in (f"{near},{right}", f"{right}:2", "none.py:x"):
        refusal(G.UserError, "^MARK=", G.with_mark, G.load_reward_functions(near), spec)


def test_names_of_rewards_are_distinct():
    rewards = [G.RewardFunction(name, None, 1.0) for name in ("a", "a", "a_2")]
    assert [one.name for one in G.distinct_names(rewards)] == ["a", "a_2", "a_2_2"]


def test_files_of_one_name_with_neighbours_of_one_name_and_process_pools(tmp_path, monkeypatch):
    """Each has its own neighbours, and a pool, by fork and by spawn, finds the functions of both."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    parts = []
    for number, name in enumerate(("one", "two"), 1):
        (tmp_path / name).mkdir()
        (tmp_path / name / "scores_of_h6.py").write_text(
            "from words_of_h6 import size\ndef score(text): return size(text)\n"
            "def near(completions): return list(map(score, completions))\n"
        )
        (tmp_path / name / "words_of_h6.py").write_text(
            f"def size(text): return {number} * len(text)\n"
        )
        parts.append(f"{tmp_path}/{name}/scores_of_h6.py:near")
    rewards = G.load_reward_functions(f"exact:0.5, {parts[0]},{parts[1]}:-2e-1")
    expected = [("exact", 0.5), ("near", 1), ("near_2", -0.2)]
    assert [(one.name, one.weight) for one in rewards] == expected
    assert [one.call(["abc"]) for one in rewards[1:]] == [[3], [6]]
    functions = [sys.modules[one.call.__module__].score for one in rewards[1:]]
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        assert [pool.submit(one, "ab").result() for one in functions] == [2, 4]
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(functions[0], "ab").result() == 2


SPECS = ["", "mine", "none.py:score", "mine.txt:score", "gsm8k", "mine.py:", "mine.py:number"]


@pytest.mark.parametrize("spec", [*SPECS, "mine.py:other", "mine.py:score:x"])
def test_a_reward_that_names_no_function_is_refused(spec, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("mine.txt", "mine.py"):
        (tmp_path / name).write_text("number = 1\ndef score(**columns): return [0.0]")
    refusal(G.UserError, f"^REWARD='{spec}': ", G.load_reward_functions, spec)
