"""Write small tasks whose answers a program can check: problems for SFT and RL, pairs for DPO.

    python data/tasks.py sort                       writes data/sort.jsonl and data/sort_pairs.jsonl
    python data/tasks.py add --problems 5000 --seed 2 --out data/small

The tasks are sort, reverse, add, sums and story (see the functions below). A line of a problem file
is {"prompt", "answer"}, a line of a pair file {"prompt", "chosen", "rejected"}, where the rejected
answer has a small mistake. All prompts of a file are different. The same seed writes the same file.
No other file or package is needed.

The file also holds reward functions for REWARD=data/tasks.py:NAME: `gsm8k` and `gsm8k_strict`,
checkers of sums, of story and of GSM8K's own files; and `coin`, which rewards at random, for control
runs.
"""

import argparse
import json
import random
import re
import string
import sys
from collections import Counter
from decimal import Decimal
from pathlib import Path


def random_text(rng, characters):
    """Return 5 to 9 of these characters."""
    return "".join(rng.choices(characters, k=rng.randint(5, 9)))


def sort_problem(rng):
    """Return digits to sort: `52713`, `12357`."""
    digits = random_text(rng, string.digits)
    return digits, "".join(sorted(digits))


def reverse_problem(rng):
    """Return letters to reverse: `abcde`, `edcba`."""
    letters = random_text(rng, string.ascii_lowercase)
    return letters, letters[::-1]


def add_problem(rng):
    """Return two numbers of 3 digits to add: `123+456`, `579`."""
    a = rng.randint(100, 999)
    b = rng.randint(100, 999)
    return f"{a}+{b}", str(a + b)


def sums_problem(rng):
    """Return two numbers up to 30 to add, as a published model is asked, and GSM8K's last line."""
    a = rng.randint(1, 30)
    b = rng.randint(1, 30)
    return f"What is {a} + {b}? Answer with the number alone.", f"#### {a + b}"


def story_problem(rng):
    """Return a word problem and its solution, in the format of GSM8K: the last line is `#### 14`."""
    name = rng.choice(("Ann", "Bob", "Cid"))
    thing = rng.choice(("pens", "cups", "figs"))
    count = rng.randint(2, 30)
    boxes = rng.randint(2, 9)
    size = rng.randint(2, 9)
    bought = boxes * size
    total = count + bought
    lost = rng.randint(1, 9)
    question = (
        f"{name} has {count} {thing}, buys {boxes} boxes of {size} {thing} and loses {lost}. "
        f"How many {thing} are left?"
    )
    steps = f"{boxes}*{size}={bought}. {count}+{bought}={total}. {total}-{lost}={total - lost}."
    return question, f"{steps}\n#### {total - lost}"


TASKS = {
    "sort": sort_problem,
    "reverse": reverse_problem,
    "add": add_problem,
    "sums": sums_problem,
    "story": story_problem,
}


def final_number(text):
    """Return the number after the first `#### `, as GSM8K's own grader reads it, or NaN."""
    texts = re.findall("#### (-?[0-9.,]+)", text) or [""]
    number = re.fullmatch(r"(-?([0-9]+(\.[0-9]+)?|\.[0-9]+))\.?", texts[0].replace(",", ""))
    return Decimal(number[1] if number else "NaN")


# A number in a text: a sign that is no minus between two numbers, a dollar sign, commas between
# thousands. What it reads is in the last group.
NUMBER = r"((?:(?<![\w)])-)?)\\?\$?((?:[0-9]+(?:,[0-9]{3}(?![0-9]))*(?:\.[0-9]+)?|\.[0-9]+))"


# What LaTeX writes between thousands: 9{,}500, 9\,500 or 9,\!500.
LATEX_COMMA = r"(?<=[0-9])(?:\{,\}|,?\\[,!])(?=[0-9]{3}(?![0-9]))"
UNIT_POWER = r"(?<=[A-Za-z}])\s*\^\{?[0-9]+\}?"  # the 2 of m^2 is no number of its own
NUMBERED_HEADING = r"#### [0-9]+\.[ \t]+[^\W\d].*"  # `#### 1. Add the costs`


def boxed_text(text):
    """Return what the last `\\boxed{...}` of a text has up to the brace that closes it, or None."""
    _, opening, rest = text.rpartition("\\boxed{")
    if not opening:
        return None
    depth = 1
    for place, letter in enumerate(rest):
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return rest[:place]
    return rest


def numbers_of(text):
    """Return the numbers of a text."""
    pairs = re.findall(NUMBER, re.sub(LATEX_COMMA, "", text))
    return [Decimal(sign + digits.replace(",", "")) for sign, digits in pairs]


def only_number(text):
    """Return the number of a text, behind its last `=`; NaN if there is none, or another one beside it.

    Of 1/2 or 3:30 neither number is the answer.
    """
    text = re.sub(UNIT_POWER, "", text)
    numbers = numbers_of(text.rpartition("=")[2]) or numbers_of(text)
    return numbers[0] if len(numbers) == 1 else Decimal("NaN")


def boxed_number(text):
    """Return the only_number in the last `\\boxed{...}`; None without a box."""
    boxed = boxed_text(text)
    return None if boxed is None else only_number(boxed)


def last_number(text):
    """Return the number behind `####`, else in the last `\\boxed{...}`, else the last one; or NaN.

    These are the places where TRL's examples and lm-eval's flexible-extract look for an answer. A
    numbered heading, as in `#### 1. Add the costs`, is passed over if the text has one of the first
    two, too.
    """
    number = final_number(re.sub(NUMBERED_HEADING, "", text))
    if not number.is_nan():
        return number
    boxed = boxed_number(text)
    if boxed is not None:
        return boxed
    number = final_number(text)
    if not number.is_nan():
        return number
    return [Decimal("NaN"), *numbers_of(text)][-1]


def has_format(text):
    """Return whether a text ends with a line `#### N`, or has one number in its `\\boxed{...}`."""
    is_last_line = re.search(r"(^|\n)#### -?[0-9.,]*[0-9]\s*$", text)
    boxed = boxed_number(text)
    return bool(is_last_line or (boxed is not None and not boxed.is_nan()))


def plain(completion):
    """Return the text of a completion, which is a list with a message where the prompt is messages."""
    return completion if isinstance(completion, str) else completion[0]["content"]


def answer_number(answer):
    """Return the number of a row's answer, a text or a number; None if it has none.

    It stands behind `####`, in a box, or is the only one.
    """
    answer = str(answer)
    number = final_number(answer)
    if number.is_nan():
        number = boxed_number(answer)
    if number is None:
        number = only_number(answer)
    return None if number.is_nan() else number


def gsm8k(prompts, completions, answer, **columns):
    """Return 1.0 for each completion with its answer's number, and 0.1 more for the right format.

    A completion counts as right from 1 on, so a right number without the format does, and the
    format alone does not. See last_number, answer_number and has_format. Where the answer has no
    number, or there is none, the function does not apply: None.
    """
    rewards = []
    for text, right in zip(map(plain, completions), map(answer_number, answer), strict=True):
        is_right = last_number(text) == right  # NaN equals nothing
        rewards.append(None if right is None else is_right + 0.1 * has_format(text))
    return rewards


def gsm8k_strict(prompts, completions, answer, **columns):
    """Return 1.0 for each completion whose final_number is the answer's number, else 0.0.

    This is GSM8K's own grader, and lm-eval's strict-match. None as in gsm8k.
    """
    rewards = []
    for text, right in zip(map(plain, completions), map(answer_number, answer), strict=True):
        is_right = final_number(text) == right  # NaN equals nothing
        rewards.append(None if right is None else float(is_right))
    return rewards


def coin(prompts, completions, **columns):
    """Return 0.0 or 1.0 for each text, a hash of prompt, text and how often the call had both."""
    seen = Counter()
    rewards = []
    for prompt, completion in zip(prompts, completions, strict=True):
        pair = str((prompt, completion))
        rewards.append(float(random.Random(f"{pair} {seen[pair]}").getrandbits(1)))
        seen[pair] += 1
    return rewards


def make_problems(task, count, seed):
    """Return problems (prompt, answer) with different prompts: `count`, or as many as are found."""
    rng = random.Random(f"{task} {seed}")
    problems = {}
    for _ in range(2 * count):
        prompt, answer = TASKS[task](rng)
        problems.setdefault(prompt, answer)
        if len(problems) == count:
            break
    return [*problems.items()]


def slip(task, answer, rng):
    """Return a wrong answer that is close to a right one.

    Two characters are swapped, or one is changed into another of its kind, dropped or doubled, so
    that the length tells little.
    """
    while True:
        place = rng.randrange(len(answer))
        char = answer[place]
        rest = answer[place + 1 :]
        kinds = (string.digits, "+-*/()")
        kind = next((kind for kind in kinds if char in kind), string.ascii_lowercase)
        other = rng.choice(kind.replace(char, ""))
        changed = (rest[:1] + char + rest[1:], other + rest, rest, char + char + rest)
        wrong = answer[:place] + rng.choice(changed)
        is_right = wrong.strip() == answer
        if "####" in answer:
            is_right = final_number(wrong) == final_number(answer)
        if wrong.strip() and not is_right:
            return wrong


def write_lines(path, rows):
    """Write rows as JSON lines, and say so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{path}: {len(rows)} rows, the first is {json.dumps(rows[0])}")


def main(arguments=None):
    """Write the files of one task."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("task", choices=[*TASKS])
    parser.add_argument("--problems", type=int, default=20_000, help="rows of the problem file")
    parser.add_argument(
        "--pairs", type=int, help="rows of the pair file; 0: none (--problems, at most 5,000)"
    )
    parser.add_argument("--seed", type=int, default=1337)
    parser.add_argument("--out", default="data", help="folder of the files")
    args = parser.parse_args(arguments)
    count = min(5_000, args.problems) if args.pairs is None else args.pairs
    if not 10 <= args.problems <= 200_000 or not 0 <= count <= args.problems:
        parser.error("--problems must be 10 to 200,000, and --pairs at most as many")

    problems = make_problems(args.task, args.problems, args.seed)
    rows = [{"prompt": prompt, "answer": answer} for prompt, answer in problems]
    rng = random.Random(f"{args.task} slips {args.seed}")
    pairs = [
        {"prompt": prompt, "chosen": answer, "rejected": slip(args.task, answer, rng)}
        for prompt, answer in problems[:count]
    ]
    try:
        write_lines(Path(args.out, f"{args.task}.jsonl"), rows)
        if pairs:
            write_lines(Path(args.out, f"{args.task}_pairs.jsonl"), pairs)
    except OSError as error:
        parser.exit(2, f"error: --out {args.out}: cannot be written ({error})\n")


if __name__ == "__main__":
    sys.exit(main())
