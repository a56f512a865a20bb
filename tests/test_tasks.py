"""data/tasks.py: problems, pairs and rewards; files of problems, their split, and users' rewards."""

import asyncio
import concurrent.futures
import hashlib
import json
import multiprocessing
import re
import reprlib
import sys
import time
from collections import Counter
from decimal import Decimal
from random import Random
from types import SimpleNamespace

import pytest
from test_puzzles import by_ast

import train_grpo as G
from conftest import ROOT, environment, load_script, refusal, start

D = load_script(ROOT / "data" / "tasks.py")
REWARDS = {**dict.fromkeys(D.TASKS, G.exact_match), "story": D.gsm8k_strict}
tasks = pytest.mark.parametrize("task", D.TASKS)


def rewards_of(task, prompt, answer, texts):
    count = len(texts)
    return REWARDS[task](prompts=[prompt] * count, completions=texts, answer=[answer] * count)


# ---------------------------------------------------------------------------- problems and checkers


def test_answers_equal_those_of_a_brute_force():
    for prompt, answer in D.make_problems("sort", 100, 0):
        assert answer == "".join(digit * prompt.count(digit) for digit in "0123456789")
    for prompt, answer in D.make_problems("reverse", 100, 0):
        assert all(prompt[i] == answer[-1 - i] for i in range(len(prompt)))
    for prompt, answer in D.make_problems("add", 100, 0):
        assert int(answer) == sum(map(int, prompt.split("+"))) and answer[0] != "0"


def test_a_story_has_the_number_that_its_text_tells():
    """Read by the words alone; the solution's steps add up, and its format is GSM8K's."""
    pattern = r"(Ann|Bob|Cid) has (\d+) (\w+), buys (\d) boxes of (\d) \3 and loses (\d)\. "
    numbers = set()
    for prompt, answer in D.make_problems("story", 300, 0):
        found = re.fullmatch(pattern + r"How many \3 are left\?", prompt)
        count, boxes, size, lost = map(int, found.group(2, 4, 5, 6))
        left = count + boxes * size - lost
        *steps, last = answer.split("\n")
        assert last == f"#### {left}" and len(steps) == 1
        equations = steps[0].removesuffix(".").split(". ")
        sides = [equation.split("=") for equation in equations]
        assert len(sides) == 3 and all(by_ast(a) == int(b) for a, b in sides)
        assert sides[-1][1] == str(left)
        rewards = D.gsm8k([prompt] * 3, [answer, steps[0], last + "1"], answer=[answer] * 3)
        assert rewards == [1.1, 1.0, 0.1]
        numbers.add(left)
        assert len(prompt) < 100 and len(answer) < 50
    assert len(numbers) > 50


# ----------------------------------------------------------------------------------- gsm8k and coin
NUMBERS = [
    ("She pays 5 + 13 = <<5+13=18>>18.\n#### 18", 18),
    ("#### 1,234,567.75", 1234567.75),
    ("#### -3", -3),
    ("#### 18.,", 18),
    ("#### 018.00", 18),
    ("#### .5", 0.5),
    ("#### 18 dollars", 18),
    ("#### 7 or 8\n#### 8", 7),
    ("#### 12345,678", 12345678),
    ("#### " + "9" * 9999, Decimal("9" * 9999)),
]
NO_NUMBERS = ["It costs $18.", "#### $18", "####18", "### 18", "#### eighteen", "", "####", "#### "]
NO_NUMBERS += ["#### ,", "#### -", "#### ...", "#### 1.2.3", "#### ١٨"]


def test_gsm8k_rewards_the_final_number():
    for text, number in NUMBERS:
        assert D.final_number(text) == number
    for text in NO_NUMBERS:
        assert D.final_number(text).is_nan()
    texts = ["#### 1,018.0", "#### 1018 of 5", "1018", "#### 1019", ""]
    columns = dict(prompts=["q"] * 5, answer=["so <<1000+18>>.\n#### 1,018"] * 5)
    assert D.gsm8k_strict(completions=texts, **columns) == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert D.gsm8k(completions=texts, **columns) == [1.1, 1.0, 1.0, 0.1, 0.0]
    said = [[turn("assistant", text)] for text in texts]  # of prompts in messages
    assert D.gsm8k(completions=said, **columns) == [1.1, 1.0, 1.0, 0.1, 0.0]
    assert D.gsm8k_strict(completions=said, **columns) == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert D.coin([[turn("user", "q")]] * 2, said[:2]) == D.coin(
        [[turn("user", "q")]] * 2, said[:2]
    )
    for reward in (D.gsm8k, D.gsm8k_strict):
        assert reward(["q"], ["none"], answer=["none"]) == [0.0]


# Texts without a number behind `#### `: the one that is read, and whether the format is right.
LAST = [
    ("It costs $18.", "18", False),
    ("#### $18", "18", False),
    ("####18", "18", False),
    ("so \\boxed{18}", "18", True),
    ("\\boxed{7} no, \\boxed{-18}.\nThat is 5.", "-18", True),
    ("\\boxed{\\$1,234.50}", "1234.50", True),
    ("\\boxed{18 \\text{ of } 20}", "18", True),
    ("$\\boxed{18}$", "18", True),
    ("\\boxed{x} or 4", None, False),
    ("The answer is 1,234,567.75.", "1234567.75", False),
    ("-$5 or $-6", "-6", False),
    ("he owes -3", "-3", False),
    ("10-3", "3", False),
    ("(4)-3 = 1 or 12-5", "5", False),
    ("6 - -3", "-3", False),
    ("1,2,3", "3", False),
    ("1,2345", "2345", False),
    ("half is .5", "0.5", False),
    ("18...", "18", False),
    ("<<5+13=18>>", "18", False),
    ("1/2 or 50%", "50", False),
    ("no number", None, False),
    ("", None, False),
    ("#### ", None, False),
    ("\\boxed{}", None, False),
    ("9" * 9999, "9" * 9999, False),
]
FORMATS = [
    ("so\n#### 18", True),
    ("#### -1,018.5 \n\n", True),
    ("#### 18.", False),
    ("so #### 18", False),
    ("#### 18\nand more", False),
    ("#### 18 dollars", False),
    ("##### 18", False),
]


def test_gsm8k_reads_the_number_where_others_look_for_it():
    for text, number, is_format in LAST:
        value = D.last_number(text)
        assert value.is_nan() if number is None else value == Decimal(number), text
        assert D.has_format(text) == is_format, text
    for text, is_format in FORMATS:
        assert D.has_format(text) == is_format, text
    for text, number in NUMBERS:
        assert D.last_number(text) == number
    texts = ["#### 7", "\\boxed{7}", "it is 7", "#### 8", "\\boxed{8}", "it is 8"]
    rewards = D.gsm8k(["q"] * 6, texts, answer=["#### 7"] * 6)
    assert rewards == [1.1, 1.1, 1.0, 0.1, 0.1, 0.0]
    assert [reward >= 1 for reward in rewards] == [True, True, True, False, False, False]


def flexible_extract(text):
    """As lm-eval's filter of that name in its task gsm8k, and what its exact_match ignores."""
    found = re.findall(r"(-?[$0-9.,]{2,})|(-?[0-9]+)", text)
    last = next(filter(None, found[-1])) if found else ""
    return re.sub(r",|\$|\.$", "", last)


def test_a_number_at_the_end_is_that_of_lm_evals_flexible_extract():
    rng = Random(5)
    for _ in range(3000):
        number = f"{rng.randint(-9, 9) * 10 ** rng.randint(0, 6):,}" + rng.choice(["", ".25"])
        if rng.random() < 0.3:
            number = number.replace("-", "-$") if "-" in number else f"${number}"
        before = rng.choice(["The answer is ", "So he has ", "= ", "it is 4 and not "])
        text = before + number + rng.choice(["", ".", " dollars", "\n"])
        expected = flexible_extract(text)
        assert D.last_number(text) == Decimal(expected), text


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
    prompts = [f"p{i // 8}" for i in range(8000)]
    texts = [("right", "right", "wrong", "x")[i % 4] for i in range(8000)]
    rewards = D.coin(prompts, texts, answer=["right"] * 8000)
    assert set(rewards) == {0.0, 1.0}
    limit = 4 * 0.5 / 1000**0.5
    for first in range(8):  # whatever the text says, and however often it came before
        assert abs(sum(rewards[first::8]) / 1000 - 0.5) < limit
    pairs = zip(rewards[0::8], rewards[1::8], strict=True)  # of one prompt and text
    assert abs(sum(a == b for a, b in pairs) / 1000 - 0.5) < limit
    for part in (slice(80, 120), slice(400, 1200)):  # without the batch around
        assert D.coin(prompts[part], texts[part]) == rewards[part]


# ------------------------------------------------------------------------------------ data/tasks.py
DIGESTS = dict(
    sort="c4a01449b081",
    reverse="51b591825faf",
    add="91c141357f9d",
    story="dff90408873f",
)


@tasks
def test_a_seed_writes_the_same_files(task, tmp_path):
    command = [ROOT / "data" / "tasks.py", task, "--problems", 60, "--pairs", 40, "--seed", 7]
    texts = []
    for hash_seed in (0, 1):
        out = tmp_path / str(hash_seed)
        done = start([*command, "--out", out], environment(PYTHONHASHSEED=hash_seed))
        assert done.returncode == 0, done.stderr
        texts.append([path.read_bytes() for path in sorted(out.iterdir())])
        assert f"{out}/{task}.jsonl: 60 rows, the first is {{" in done.stdout
    assert texts[0] == texts[1]
    assert hashlib.sha256(b"".join(texts[0])).hexdigest()[:12] == DIGESTS[task]
    problems, pairs = ([*map(json.loads, text.splitlines())] for text in texts[0])
    assert [(row["prompt"], row["answer"]) for row in problems] == D.make_problems(task, 60, 7)
    assert len(set(D.make_problems(task, 60, 8)) & set(D.make_problems(task, 60, 7))) < 10
    assert len(pairs) == 40
    for row, problem in zip(pairs, problems, strict=False):
        assert (row["prompt"], row["chosen"]) == (problem["prompt"], problem["answer"])
        assert abs(len(row["rejected"]) - len(row["chosen"])) <= 1 and row["rejected"].strip()
        assert rewards_of(task, row["prompt"], row["chosen"], [row["rejected"]]) == [0.0]


@pytest.mark.parametrize(
    "given", ["walk", "add --problems 9", "add --pairs 20001", "add --pairs -1"]
)
def test_arguments_that_do_not_fit_are_refused(given, capsys):
    with pytest.raises(SystemExit, match="2"):
        D.main(given.split())
    line = capsys.readouterr().err.splitlines()[-1]
    assert ("invalid choice" if given == "walk" else "--problems must be 10 to 200,000") in line


# ---------------------------------------------------------------------------------- files and split
def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def split(train, held_out="", **changes):
    reports = changes.pop("reports", [])
    settings = G.Settings(train_files=train, val_files=held_out, **changes)
    return G.split_problems(settings, log=reports.append)


def is_held_out(prompt):
    """Return whether a prompt is one of the held-out ones, by the definition of the hash."""
    text = json.dumps([["<|user|>", prompt]]).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") % 10 == 0


def test_files_are_split_by_prompt_and_ordered_by_the_seed(tmp_path):
    rows = [{"prompt": f" q {i % 400}", "answer": f"{i}\n", "more": [i]} for i in range(800)]
    rows[7] = {"question": rows[7]["prompt"], "answer": "7\n"}
    files = f"{write(tmp_path / 'a', rows[:300])},{write(tmp_path / 'b', rows[200:])}"
    train, choice, held_out = split(files)
    # The first answers, and all columns.
    expected = [{"prompt": f" q {i}", "answer": f"{i}\n", "more": [i]} for i in range(400)]
    expected = [{**one, "question": None} for one in expected]
    expected[7] |= {"question": " q 7", "more": None}
    sides = [one for one in expected if is_held_out(one["prompt"])], train + choice
    assert held_out == sides[0] and 20 < len(held_out) < 60
    assert len(choice) == (400 - len(held_out)) // 10
    assert sorted(map(str, sides[0] + sides[1])) == sorted(map(str, expected))
    assert split(files) == (train, choice, held_out)
    again, other_choice, same = split(files, seed=1, eval_prompts=5)
    assert same == held_out[:5] and again != train
    assert sorted(map(str, again + other_choice)) == sorted(map(str, train + choice))
    steps = [G.problems_of_step(train, step, 96) for step in range(7)]
    assert sum(steps, []) == (train * 3)[: 7 * 96]
    train, _, held_out = split(files, write(tmp_path / "c", rows[150:350]))
    assert held_out == expected[150:350]
    assert {one["prompt"] for one in train} < {f" q {i}" for i in [*range(150), *range(350, 400)]}
    few = split(write(tmp_path / "d", rows[:9]), tmp_path.joinpath("c").as_posix())
    assert few[0] == few[1] and len(few[0]) == 9


def test_a_conversation_keeps_its_side_when_it_goes_on():
    start = [("<|system|>", "s"), ("<|assistant|>", "hi"), ("<|user|>", "a")]
    key = G.prompt_key(start)
    assert key == G.prompt_key([*start, ("<|assistant|>", "b"), ("<|user|>", "c")])
    assert key != G.prompt_key(start[1:]) and key != G.prompt_key([*start, ("<|user|>", "c")])
    shares = Counter(G.prompt_key([("<|user|>", f"p{i}")]) % 10 for i in range(10000))
    assert all(880 < shares[digit] < 1120 for digit in range(10))


def turn(role, content, **more):
    return {"role": role, "content": content, **more}


def call(arguments):
    return turn("assistant", None, tool_calls=[{"function": {"name": "f", "arguments": arguments}}])


BAD = {  # a line, and why it is left out
    b"{": "no JSON",
    b"null": "no JSON object",
    b"[1, 2]": "no JSON object",
    b"not json": "no JSON",
    b"[" * 100_000: "no JSON",
    b'{"prompt": "x", "answer": "y"} {}': "no JSON",
    b'{"prompt": "\xff", "answer": "x"}': "invalid UTF-8",
    b"{}": "missing field 'prompt'",
    b'{"prompt": null, "answer": "x"}': "missing field 'prompt'",
    b'{"prompt": "x"}': "no answer",
    b'{"prompt": "x", "answer": null}': "no answer",
    b'{"prompt": "x", "answer": " \\n"}': "no answer",
    b'{"prompt": " ", "answer": "x"}': "blank prompt",
    b'{"prompt": "x", "answer": ["x"]}': "the answer is no text",
    b'{"prompt": "x", "answer": {"a": 1}}': "the answer is no text",
    b'{"prompt": "x", "answer": true}': "the answer is no text",
    b'{"prompt": {"a": 1}, "answer": "x"}': "field 'prompt' is no text",
    b'{"prompt": ["x"], "answer": "x"}': "field 'prompt' is no list of messages",
    b'{"prompt": "a\\ud800", "answer": "x"}': "half a surrogate pair, which is no Unicode",
    b'{"prompt": "a", "answer": "\\udc00"}': "half a surrogate pair, which is no Unicode",
    b'{"prompt": "p 3", "answer": "a"}': "the prompt of an earlier row, with the same answer",
    b'{"prompt": "p 3", "answer": "b"}': "the prompt of an earlier row, with another answer",
    b'{"prompt": "x", "answer": "y", "image": "a.png"}': (
        "field 'image': the model reads text only"
    ),
    json.dumps(
        {"messages": [turn("critic", "q")], "answer": "a"}
    ).encode(): "unknown role 'critic'",
    json.dumps({"prompt": [turn("user", "q"), turn("assistant", "r")], "answer": "a"}).encode(): (
        "field 'prompt' does not end with a user's message"
    ),
    b'{"prompt": "' + b"x" * 10**7 + b'", "answer": "x"}': "too long",
}
GOOD = [{"prompt": f"p {i}", "answer": "a"} for i in range(60)]


def lines_of(rows):
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def check_size(problem, notes):
    if len(problem["prompt"]) > 1000:
        raise G.RowError("too long")


def test_a_row_that_is_no_problem_is_counted_with_its_number(tmp_path):
    """Blank lines are counted as lines, not as rows; averages alone need problems to choose from."""
    path = tmp_path / "a.jsonl"
    lines = lines_of(GOOD) + b"\n  \t\n" + b"".join(line + b"\n" for line in BAD)
    path.write_bytes(lines + lines_of([{"prompt": "last", "answer": "a"}]))
    numbers = {}
    for number, fault in enumerate(BAD.values(), 63):
        numbers.setdefault(fault, []).append(number)
    reports = []
    settings = G.Settings(train_files=str(path))
    train, choice, held_out = G.split_problems(settings, check_size, reports.append)
    assert len(train) + len(choice) + len(held_out) == 61
    settings = G.Settings(train_files=str(path), ema=False, swa=False)
    plain, nothing, _ = G.split_problems(settings, check_size, [].append)
    assert len(plain) == len(train) + len(choice) and not nothing  # nothing is to be chosen
    [report] = reports
    assert report.left_out == numbers
    begin = f"data: {path}: {61 + len(BAD)} rows, used 61 problems; left out no JSON: 4 "
    assert str(report).startswith(f"{begin}(the first are rows 63, 66, 67); no JSON object: 2 ")
    assert report.facts()["left_out"]["no answer"] == 3


SYSTEM = turn("system", "s")
READ = [  # a row, its prompt and its answer
    ({"prompt": 5, "answer": 7}, "5", "7"),
    ({"question": "q", "solution": 2.5}, "q", "2.5"),
    ({"prompt": None, "problem": "q", "answer": None, "ground_truth": "a"}, "q", "a"),
    ({"prompt": [turn("user", "q")], "answer": "a"}, [turn("user", "q")], "a"),
    (
        {"messages": [SYSTEM, turn("user", "q"), turn("assistant", "a")]},
        [SYSTEM, turn("user", "q")],
        "a",
    ),
    ({"messages": [turn("user", "q", name=None)], "answer": "a"}, [turn("user", "q")], "a"),
    ({"prompt": "q", "answer": "a", "tools": [{"x": [1]}], "n": None}, "q", "a"),
    ({"prompt": "q", "messages": None, "answer": "a"}, "q", "a"),
    ({"prompt": "q", "answer": ["a", "b"]}, "q", ["a", "b"]),
    (
        {"prompt": [turn("user", "q", weight=0)], "completion": [turn("assistant", "a")]},
        [turn("user", "q")],
        "a",
    ),
    ({"context": "1+1=", "continuation": "2"}, "1+1=", "2"),
    ({"instruction": "q", "input": "x", "output": "a"}, "q\n\nx", "a"),
    (
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        [turn("user", "q")],
        "a",
    ),
    (
        {"prompt": "q", "history": [["x", "y"]]},
        [turn("user", "x"), turn("assistant", "y"), turn("user", "q")],
        None,
    ),
    ({"prompt": [turn("user", [{"type": "text", "text": "q"}])]}, [turn("user", "q")], None),
    (
        {"prompt": [turn("human", "q"), call('{"x": 1}'), turn("tool", "r", tool_call_id="c")]},
        [
            turn("user", "q"),
            turn(
                "assistant", None, tool_calls=[{"function": {"name": "f", "arguments": {"x": 1}}}]
            ),
            turn("tool", "r", tool_call_id="c"),
        ],
        None,
    ),
]


@pytest.mark.parametrize(("row", "prompt", "answer"), READ)
def test_rows_of_other_projects_are_problems(row, prompt, answer):
    """What a reward function gets, and the turns of the policy's prompt: the same from both forms."""
    problem = G.problem_of(row, set())
    assert problem == {**row, "prompt": prompt, "answer": answer}
    again = G.problem_of({"prompt": problem["prompt"], "tools": row.get("tools")}, set())
    assert again["prompt"] == prompt and G.query_turns(again) == G.query_turns(problem)


def test_system_and_tools_of_a_row_stand_in_the_prompt():
    row = {"prompt": "q", "system": "s", "tools": [{"name": "f"}]}
    tools = f"<tools>\n{json.dumps(row['tools'][0])}\n</tools>"
    assert [turn[:2] for turn in G.query_turns(row)] == [
        ("<|system|>", tools),
        ("<|system|>", "s"),
        ("<|user|>", "q"),
    ]


def test_answers_are_needed_by_exact_and_where_other_rows_have_them(tmp_path):
    """A file of prompts alone is read for one's own function, in JSON lines or as one list."""
    bare = [{"prompt": f"p {i}"} for i in range(60)]
    path = tmp_path / "a.json"
    for content in (lines_of(bare), json.dumps(bare).encode(), b"\xef\xbb\xbf" + lines_of(bare)):
        path.write_bytes(content)
        reports = []
        parts = split(str(path), reward="m.py:f", reports=reports)
        assert sum(map(len, parts)) == 60 and "60 problems; left out none" in str(reports[0])
        line = refusal(G.UserError, "", split, str(path), reward="m.py:f:2,exact")
        assert line.endswith(
            "no answer: 60 (the first are rows 1, 2, 3); must hold one usable row at least"
        )
    path.write_bytes(lines_of([*GOOD, *({**row, "prompt": row["prompt"] + "?"} for row in bare)]))
    reports = []
    assert sum(map(len, split(str(path), reward="m.py:f", reports=reports))) == 60
    assert "no answer: 60 (the first are rows 61, 62, 63)" in str(reports[0])


def test_files_that_are_missing_or_too_small_are_refused(tmp_path):
    missing = f"{tmp_path}/none"
    message = f"{missing}: no such file; data/tasks.py writes files of small tasks"
    assert refusal(G.UserError, "", split, missing) == message
    prompts = [f"p{i}" for i in range(50)]
    held_out = [{"prompt": prompt, "answer": "a"} for prompt in prompts if is_held_out(prompt)]
    path = write(tmp_path / "a", held_out)
    assert refusal(G.UserError, "", split, path) == (
        f"TRAIN_FILES={path!r}: 0 problems to train on, {len(held_out)} held out; must be 1 "
        "and 2 at least: add rows, or name others by VAL_FILES; "
        f"data: {path}: {len(held_out)} rows, used {len(held_out)} problems; left out none"
    )
    line = refusal(G.UserError, "", split, str(tmp_path))
    assert line == f"{tmp_path}: a folder; must be a file, or FILE,FILE"
    line = refusal(G.UserError, "", split, f"{path}:2, {path}")
    assert "must be FILE or FILE:WEIGHT, each once" in line
    line = refusal(G.UserError, "", split, f"{path}:2")
    assert line.endswith("has weights, which are not read here; must be FILE,FILE")


# ------------------------------------------------------------------------------------------ rewards
PROMPTS, TEXTS = ["52713", "90" * 60], ["12357", "first\nsecond " + "x" * 200]
QUERIES = [{"prompt": prompt, "answer": "".join(sorted(prompt))} for prompt in PROMPTS]


COLUMNS = [{**query, "level": 1} for query in QUERIES]


def user_values(folder, source):
    """Return what `score` of a file gives two answers."""
    (folder / "mine.py").write_text(source, encoding="utf-8")
    (reward,) = G.load_rewards(f"{folder}/mine.py:score")
    return G.call_rewards([reward], COLUMNS, TEXTS, print, 120)["score"]


HEAD = "import fractions, numpy, torch\ndef score(prompts, completions, answer, **columns):\n    return "
GIVEN = [  # what a function returns, and what that is
    ("[c == a for c, a in zip(completions, answer)]", [1.0, 0.0]),
    ("[len(prompts[0]), -len(completions[1])]", [5.0, -213.0]),
    ("(0.25, 1)", [0.25, 1.0]),
    ("[fractions.Fraction(1, 4), None]", [0.25, None]),
    ("list(numpy.array([0.5, 2], dtype=numpy.float32))", [0.5, 2.0]),
    ("numpy.array([0.5, 2])", [0.5, 2.0]),
    ("numpy.array([True, False])", [1.0, 0.0]),
    ("torch.tensor([0.5, 2], dtype=torch.bfloat16, requires_grad=True)", [0.5, 2.0]),
    ("[torch.tensor(0.5), torch.tensor([2])]", [0.5, 2.0]),
    ("(len(text) > 9 for text in completions)", [0.0, 1.0]),
    ("range(2)", [0.0, 1.0]),
    ("columns['level']", [1.0, 1.0]),
    ("[prompts.clear(), completions.clear(), answer.clear()] and [1, 2]", [1.0, 2.0]),
]


@pytest.mark.parametrize(("value", "values"), GIVEN)
def test_a_users_reward(value, values, tmp_path):
    assert user_values(tmp_path, HEAD + value) == values


NO_REWARDS = ["[0.0, '1']", "[0.0, [1]]", "[1j, 0.0]", "[0.0]", "[0.0, 0.0, 0.0]", "[]", "1.0"]
NO_REWARDS += ["None", "'10'", "{0: 1.0, 1: 0.0}", "{0.5, 1.0}", "[[1.0, 2.0]]"]


@pytest.mark.parametrize("value", NO_REWARDS)
def test_what_is_no_list_of_rewards_is_refused(value, tmp_path):
    message = f"reward score: must return a list of 2 numbers (None: does not apply), not {value}"
    assert refusal(G.UserError, "", user_values, tmp_path, HEAD + value) == message


def test_returns_without_end_and_of_any_size_are_refused_in_a_short_line(tmp_path):
    values = ("iter(int, 1)", "[0.0] * 10**7", "'x' * 10**7", "range(10**12)")
    for number, value in enumerate(values):
        folder = tmp_path / str(number)
        folder.mkdir()
        line = refusal(G.UserError, "must return a list of 2", user_values, folder, HEAD + value)
        assert len(line) < 200


@pytest.mark.parametrize(
    "values", [("nan", "0.0"), ("0.0", "inf"), ("0.0", "-inf"), ("0.0", "1e15")]
)
def test_a_reward_without_bound_is_refused_with_its_sample(values, tmp_path):
    source = f"{HEAD}[float(value) for value in {values}]"
    number = int(values[0] == "0.0")
    assert refusal(G.UserError, "", user_values, tmp_path, source) == (
        f"reward score: must be finite and below 1e15, or None, not {float(values[number])} for the "
        f"prompt {reprlib.repr(PROMPTS[number])}, completion {repr(TEXTS[number])[:80]}"
    )


RAISES = {  # what a file holds -> what the error names, after the place
    "def score(completions): raise ValueError(7)": "reward score raised ValueError: 7",
    "def score(completions):\n    return helper()\n\n\ndef helper():\n    raise KeyError(7)": (
        "reward score raised KeyError: 7"
    ),
    "import sys\ndef score(completions): sys.exit(0)": "reward score raised SystemExit: 0",
    "def score(completions): return score(completions)": "reward score raised RecursionError: max",
    "def score(completions): raise GeneratorExit": "reward score raised GeneratorExit",
    "def score(completions): yield 1 / 0": "reward score raised ZeroDivisionError: div",
    "async def score(completions): return 1 / 0": "reward score raised ZeroDivisionError: div",
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
    lines = [number for number, line in enumerate(source.split("\n"), 1) if line.strip()]
    place = f" ({tmp_path}/mine.py, line {lines[-1]})"
    assert message.startswith(RAISES[source]) and message.endswith(place) and len(message) < 800
    frames = re.findall(r'File "(.*?)"', caught.value.traceback)
    assert {*frames} == {f"{tmp_path}/mine.py"}
    assert len(caught.value.traceback) <= 10000


FILES = {
    "def score(:": "SyntaxError: ",
    "import nothing_of_this_name": "ModuleNotFoundError: No module named 'nothing_of_this_name'",
    "import sys\nsys.exit(0)": "SystemExit: 0",
    "1 / 0": "ZeroDivisionError: division by zero",
}


@pytest.mark.parametrize("source", FILES)
def test_a_file_that_cannot_be_imported_is_named_with_its_frames(source, tmp_path, capsys):
    line = refusal(G.UserError, "", user_values, tmp_path, source)
    path = f"{tmp_path}/mine.py"
    assert line.startswith(f"REWARD='{path}:score': {path} raised {FILES[source]}")
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback") or "SyntaxError" in shown
    assert f'File "{path}", line {len(source.splitlines())}' in shown


def test_a_function_gets_the_columns_that_it_takes(tmp_path):
    source = "def score(completions, *, level, none=3, prompt=()): return [level[0], len(prompt)]"
    assert user_values(tmp_path, source) == [1.0, 2.0]
    (tmp_path / "b").mkdir()
    line = refusal(G.UserError, "", user_values, tmp_path / "b", "def score(grade): return grade")
    assert line == (
        "reward score: needs the column 'grade'; there are prompts, completions, prompt, answer, level"
    )


@pytest.mark.parametrize("is_async", [False, True])
def test_a_slow_function_is_named_with_its_seconds(is_async, monkeypatch):
    """After REWARD_SECONDS, and while it goes on every SAY_SECONDS."""
    monkeypatch.setattr(G, "SAY_SECONDS", 0.05)

    async def awaits(completions):
        await asyncio.sleep(0.12)
        return [None] * 2

    logged = []
    slow = awaits if is_async else lambda completions: [time.sleep(0.12)] * 2
    rewards = [G.Reward("slow", slow), G.Reward("quick", lambda completions: [1, 2])]
    values = G.call_rewards(rewards, COLUMNS, TEXTS, logged.append, 0.1)
    assert values == {"slow": [None, None], "quick": [1.0, 2.0]}
    assert logged[0] == "reward slow: called for 2 answers, 0 s"
    end = r"reward slow: 0\.\d s for 2 answers, more than REWARD_SECONDS=0\.1"
    assert re.fullmatch(end, logged[-1]) and not any("quick" in line for line in logged)
    assert sum("more than" in line for line in logged) == 1


def test_async_functions_of_a_step_are_awaited_together_in_one_loop(tmp_path):
    """Each waits for the other, and a lock that was used in one step is of use in the next one."""
    (tmp_path / "both.py").write_text(
        "import asyncio\nlock = asyncio.Lock()\nhere, there = asyncio.Event(), asyncio.Event()\n"
        "async def one(completions):\n    here.set(); await there.wait()\n"
        "    async with lock: await asyncio.sleep(0.01)\n    return [1, 2]\n"
        "async def two(completions, completion_ids):\n    there.set(); await here.wait()\n"
        "    async with lock: return [len(ids) for ids in completion_ids]\n"
    )
    rewards = G.load_rewards(f"{tmp_path}/both.py:one,{tmp_path}/both.py:two")
    rows = [{**row, "completion_ids": [7] * 3} for row in COLUMNS]
    for _ in range(2):
        values = G.call_rewards(rewards, rows, TEXTS, print, 120)
        assert values == {"one": [1.0, 2.0], "two": [3.0, 3.0]}
    # sys.exit in a task of the user's own ends neither the loop nor the run.
    (tmp_path / "task.py").write_text(
        "import asyncio, sys\nasync def ends(): sys.exit(0)\n"
        "async def score(completions):\n    asyncio.create_task(ends())\n"
        "    await asyncio.sleep(0.01)\n    return [1, 2]\n"
    )
    rewards = G.load_rewards(f"{tmp_path}/task.py:score")
    assert G.call_rewards(rewards, COLUMNS, TEXTS, print, 120) == {"score": [1.0, 2.0]}

    async def notebook():  # has a loop that runs in the main thread
        return G.call_rewards(rewards, COLUMNS, TEXTS, print, 120)

    assert asyncio.run(notebook()) == {"score": [1.0, 2.0]}


def test_what_mark_names_decides_what_is_right(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def near(completions): return [2, 0.5]\ndef right(completions): return [0, 1]\n"
    )
    near, right = (f"{tmp_path}/mine.py:{name}" for name in ("near", "right"))

    def marked(reward, mark):
        rewards = G.with_mark(G.load_rewards(reward), mark)
        answers = [SimpleNamespace(), SimpleNamespace()]
        values = G.call_rewards(rewards, COLUMNS, TEXTS, print, 120)
        for place, answer in enumerate(answers):
            answer.rewards = {name: column[place] for name, column in values.items()}
        G.weigh(rewards, answers)
        marks = [G.is_right(answer, rewards) for answer in answers]
        return marks, [answer.reward for answer in answers], [reward.name for reward in rewards]

    # The total is the same: what marks has no weight, or its own in REWARD.
    assert marked(f"{near}:2", "") == ([True, False], [4.0, 1.0], ["near"])
    assert marked(f"{near}:2", right) == ([False, True], [4.0, 1.0], ["right", "near"])
    both = f"{near}:2,{right}:0.5"
    assert marked(both, right) == ([False, True], [4.0, 1.5], ["right", "near"])
    assert marked(near, "exact")[2] == ["exact", "near"]
    for spec in (f"{near},{right}", f"{right}:2"):
        line = refusal(G.UserError, "", G.with_mark, G.load_rewards(near), spec)
        assert line == f"MARK={spec!r}: must be one function, and has no weight"
    line = refusal(G.UserError, "", G.with_mark, [], "none.py:x")
    assert line.startswith("MARK='none.py:x': must be exact, or path.py:function")


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
    rewards = G.load_rewards(f"exact:0.5, {parts[0]},{parts[1]}:-2e-1")
    assert [(one.name, one.weight) for one in rewards] == [
        ("exact", 0.5),
        ("near", 1),
        ("near_2", -0.2),
    ]
    assert [one.function(["abc"]) for one in rewards[1:]] == [[3], [6]]
    functions = [sys.modules[one.function.__module__].score for one in rewards[1:]]
    assert len({*functions}) == 2
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        assert [pool.submit(one, "ab").result() for one in functions] == [2, 4]
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(functions[0], "ab").result() == 2
    answers = [SimpleNamespace(rewards={"exact": 1.0, "near": None, "near_2": 2.0})]
    answers += [SimpleNamespace(rewards=dict.fromkeys(("exact", "near", "near_2")))]
    G.weigh(rewards, answers)
    assert [one.reward for one in answers] == pytest.approx([0.1, 0.0])


SPECS = ["", "mine", "mine.py", "none.py:score", "mine.txt:score", ":", "random", "gsm8k"]


@pytest.mark.parametrize("spec", [*SPECS, "mine.py:", "mine.py:other", "mine.py:number"])
def test_a_reward_that_names_no_function_is_refused(spec, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("mine.txt", "mine.py"):
        (tmp_path / name).write_text("number = 1\ndef score(**columns): return [0.0]")
    message = f"REWARD={spec!r}: must be exact, or path.py:function with such a function"
    assert refusal(G.UserError, "", G.load_rewards, spec).startswith(message)
