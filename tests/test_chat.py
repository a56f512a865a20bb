"""Rows to turns and pairs, malformed rows, ids of turns, grown vocabularies; sample.py's chat."""

import contextlib
import functools
import gzip
import io
import json
import random
import re
import signal
import sys
import time
import tracemalloc
from dataclasses import replace
from datetime import date
from unittest import mock

import pytest
import torch
import zstandard
from test_data import HARD_TEXTS, train_model
from test_weights import network

import sample as S
import train_dpo as D
import train_sft as F
from conftest import BYTES, ODD, Child, environment, mutated, pack, refusal, server

SYSTEM, USER, ASSISTANT, END = S.ROLE_TOKENS


# ------------------------------------------------------------------------------------ rows to turns
def said(text, role="assistant"):
    return {"role": role, "content": text}


def written(turns):
    """Return turns as one text: of each the first letter of its role, and what it says."""
    return "|".join(role[2:3] + text for role, text, *_ in turns)


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {"name": "weather", "arguments": '{"city": "Rome"}'}
TOOL_TALK = [
    said("u", "user"),
    {**said(None), "tool_calls": [{"id": "c", "function": CALL}], "refusal": None},
    {**said("sunny", "tool"), "tool_call_id": "c"},
    said("b"),
]
TOOLS_TEXT = f"s<tools>\n{json.dumps(TOOL)}\n</tools>"
CALL_TEXT = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
LEGACY_TALK = [said("u", "user"), {**said("a"), "function_call": CALL}]
SHARED = ("human", "u"), ("function_call", json.dumps(CALL)), ("observation", "o"), ("gpt", "a")
SHARED_TALK = [{"from": role, "value": text} for role, text in SHARED]
FLIGHTS = '[{"from": "Paris", "to": "Rome", "value": "x"}]'
ASKED = json.dumps([said("u", "user")])
ANSWERED = json.dumps([said("u", "user"), said("a")])
ROWS = [  # a row of a file; its turns in our layout, see `written`; what the log says of it
    (
        json.dumps({"tools": [TOOL], "messages": TOOL_TALK}),
        f"{TOOLS_TEXT}|uu|a{CALL_TEXT}|usunny|ab",
        "not used: message.tool_call_id",
    ),
    (
        json.dumps({"functions": [TOOL["function"]], "messages": LEGACY_TALK}),
        f"{TOOLS_TEXT}|uu|aa\n{CALL_TEXT}",
        "",
    ),
    (
        json.dumps({"tools": json.dumps([TOOL]), "prompt": "u", "completion": "a"}),
        f"{TOOLS_TEXT}|uu|aa",
        "",
    ),
    (json.dumps({"conversations": SHARED_TALK}), f"uu|a{CALL_TEXT}|uo|aa", ""),
    (
        '{"messages": [{"role": "user", "content": "u"}, '
        '{"role": "assistant", "content": "a", "thinking": "t"}]}',
        "uu|a<think>\nt\n</think>\n\na",
        "",
    ),
    (
        '{"system": "s", "conversations": [{"role": "user", "content": "u"}, '
        '{"role": "assistant", "content": "a"}]}',
        "ss|uu|aa",
        "",
    ),
    (
        '{"system": "s", "messages": [{"role": "system", "content": "s"}, '
        '{"role": "Human", "content": "u"}, {"role": "assistant", "content": "a"}]}',
        "ss|uu|aa",
        "",
    ),
    (
        '{"messages": [{"role": "developer", "content": "s"}, {"role": "user", "content": '
        '[{"type": "text", "text": "u"}, {"type": "input_text", "text": "v"}]}, '
        '{"role": "assistant", "content": "a"}], "weight": 0.5}',
        "ss|uuv|aa",
        "not used: weight",
    ),
    (
        r'{"messages": "[{\"role\": \"assistant\", \"content\": \"a\"}]"}',
        "aa",
        "not learned: no turn before the first answer",
    ),
    (
        '{"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}, '
        '{"role": "user", "content": "v"}]}',
        "uu|aa|uv",
        "not learned: turns after the last answer",
    ),
    (
        '{"prompt": [{"role": "user", "content": "u"}], "input": "x", '
        '"completion": [{"role": "assistant", "content": "a"}]}',
        "uu|aa",
        "columns not read: input",
    ),
    ('{"instruction": "u", "output": "a", "history": [["x", "y"]]}', "ux|ay|uu|aa", ""),
    ('{"instruction": "u", "context": "c", "response": " a "}', "uu\n\nc|a a ", ""),
    ('{"prompt": "u", "input": "x", "output": "a"}', "uu|aa", "columns not read: input"),
    ('{"question": "u", "context": "c", "answer": "a"}', "uu\n\nc|aa", ""),
    (
        '{"instruction": "", "input": "u", "output": "a", "text": "x"}',
        "uu|aa",
        "columns not read: text",
    ),
    ('{"messages": null, "text": null, "prompt": "u", "completion": "a"}', "uu|aa", ""),
    ('{"prompt": "u", "completion": "a", "label": true, "weight": 1}', "uu|aa", ""),
    ('{"question": 1, "answer": 2.5}', "u1|a2.5", ""),
    ('{"problem": "u", "solution": "a", "answer": 3}', "uu|aa", "columns not read: answer"),
    ('{"context": "u", "continuation": "a"}', "uu|aa", ""),
    ('{"text": "u", "label": 0}', "u", "not used: label"),
    ('{"prompt": "u", "completion": "a", "label": ["a/b"]}', "uu|aa", "not used: label"),
    ('{"instruction": "u", "output": "a", "label": 0}', "uu|aa", "not used: label"),
    ('{"instruction": "u", "output": "a", "kto_tag": "True"}', "uu|aa", ""),
    ('{"instruction": "u", "output": "a", "kto_tag": 1}', "uu|aa", ""),
    (
        '{"messages": [{"role": "assistant", "content": "a"}, {"role": "user", "content": "u"}, '
        '{"role": "assistant", "content": "b"}], "label": true, "tools": "[]"}',
        "aa|uu|ab",
        "not learned: no turn before the first answer",
    ),
    (
        '{"prompt": " ", "instruction": "u", "input": "x", "output": "a"}',
        "uu\n\nx|aa",
        "columns not read: prompt",
    ),
    ('{"prompt": "", "query": "u", "context": "", "output": "a"}', "uu|aa", ""),
    (
        json.dumps(
            {
                "prompt": json.dumps([said("s", "system"), said("u", "user")]),
                "completion": f" {json.dumps([said('a')])}",
            }
        ),
        "ss|uu|aa",
        "",
    ),
    (
        r'{"prompt": "[1, {}]", "output": "[{\"from\": \"x\", \"to\": \"y\"}]"}',
        r'u[1, {}]|a[{"from": "x", "to": "y"}]',
        "",
    ),
    # JSON that is no chat, or a text of the question or the answer.
    (json.dumps({"prompt": FLIGHTS, "completion": FLIGHTS}), f"u{FLIGHTS}|a{FLIGHTS}", ""),
    (json.dumps({"prompt": "u", "completion": ASKED}), f"uu|a{ASKED}", ""),
    (
        json.dumps({"system": ASKED, "instruction": "u", "input": ANSWERED, "output": ANSWERED}),
        f"s{ASKED}|uu\n\n{ANSWERED}|a{ANSWERED}",
        "",
    ),
    # A question in messages whose answer is in another field (dolphin-r1); a prompt with the whole
    # text (python_code_instructions_18k_alpaca); choices (MMLU); roles in a prompt (full-hh-rlhf).
    (
        json.dumps({"messages": [said("u", "user"), said("a"), said("v", "user")], "answer": "b"}),
        "uu|aa|uv|ab",
        "",
    ),
    (
        json.dumps({"messages": [said("a"), said("v", "user")], "answer": " ", "text": None}),
        "aa|uv",
        "columns not read: answer 1; not learned: no turn before the first answer 1, turns after the "
        "last answer",
    ),
    (
        r'{"prompt": "### u\n### x\n### a", "instruction": "u", "input": "x", "output": "a"}',
        "uu\n\nx|aa",
        "columns not read: prompt",
    ),
    (
        '{"prompt": "p", "instruction": "u", "output": "a"}',
        "up|aa",
        "columns not read: instruction",
    ),
    ('{"question": "u", "choices": ["x", "y"], "answer": 1}', "uu|a1", "not used: choices"),
    ('{"kind": "NLI", "input": "u", "target": "a"}', "uu|aa", "columns not read: kind"),
    ('{"inputs": "u", "targets": "a"}', "uu|aa", ""),
    (
        r'{"prompt": "\n\nHuman: u\n\nAssistant: ", "response": "a"}',
        "u\n\nHuman: u\n\nAssistant: |aa",
        "already has roles, should be messages: prompt",
    ),
    # Classes.
    ('{"question": "u", "answer": "a", "label": "false"}', "uu|aa", "not used: label"),
    ('{"text": "u", "label": false}', "u", "not used: label"),
    ('{"text": "u", "label": true}', "u", "not used: label"),
    (
        '{"instruction": "u", "output": "a", "text": "x", "label": true}',
        "uu|aa",
        "columns not read: text",
    ),
    # Blank conversations.
    ('{"messages": [], "prompt": "u", "completion": "a"}', "uu|aa", ""),
    ('{"conversations": [], "text": "u"}', "u", ""),
    (
        '{"messages": " ", "conversations": [{"from": "gpt", "value": "a"}]}',
        "aa",
        "columns not read: messages 1; not learned: no turn before the first answer",
    ),
]


def rows_read(module, rows, parse):
    """Return the items of rows, and their RowReport, as of a file that has these rows."""
    log = []
    with mock.patch.object(module, "file_rows", lambda path: rows):
        items = module.read_rows("x", parse, log.append)
    return items, log[0]


def parse_fitted(row, notes):
    """Return the format and turns of a row, as train_sft.py reads them."""
    name, turns = F.row_turns(row, notes)
    return name, F.fitted_turns(BYTES, turns, notes)


@pytest.mark.parametrize(("line", "text", "note"), ROWS)
def test_what_a_row_has_is_written_or_named(line, text, note):
    """Nothing is dropped in silence; fields that are null are none."""
    [turns], report = rows_read(F, [line.encode()], parse_fitted)
    assert written(turns) == text
    assert str(report).partition("; left out none")[2] == (note and f"; {note} 1")


def text_of(ids):
    """Return the text of those ids that are bytes."""
    return bytes(token - 4 for token in ids.tolist() if 4 <= token < 260).decode()


@pytest.mark.parametrize("flag", [{"weight": 0.0}, {"train": False}, {"loss": False}])
def test_a_message_of_weight_0_is_context(flag):
    talk = [
        said("u", "user"),
        {**said("BAD"), **flag},
        said("v", "user"),
        {**said("good"), "weight": 1},
    ]
    for train_on, learned in (("assistant", "good"), ("all", "uvgood")):
        s = F.Settings(train_on=train_on)
        _, row = F.parse_row({"messages": talk}, set(), BYTES, s)
        assert (text_of(row.targets), text_of(row.ids)) == (learned, "uBADvgood")


def test_answers_in_a_prompt_are_context():
    """As in TRL; those of `history` are learned, as in LLaMA-Factory."""
    prompt = [said("u", "user"), said("BAD"), said("v", "user")]
    settings = F.Settings(train_on="assistant")
    rows = [
        ({"prompt": prompt, "completion": [said("good")]}, "good"),
        ({"prompt": "v", "history": [["u", "BAD"]], "completion": "good"}, "BADgood"),
        ({"messages": [*prompt, said("good")]}, "BADgood"),
    ]
    for row, learned in rows:
        _, row = F.parse_row(row, set(), BYTES, settings)
        assert (text_of(row.targets), text_of(row.ids)) == (learned, "uBADvgood")


PREFERENCES = [  # a row of a file; its turns before the answers
    ('{"prompt": "u", "chosen": "c", "rejected": "r"}', "uu"),
    ('{"question": "u", "chosen": [{"role": "assistant", "content": "c"}], "rejected": "r"}', "uu"),
    (
        '{"prompt": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}, '
        '{"role": "user", "content": "v"}], "chosen": "c", "rejected": "r"}',
        "uu|aa|uv",
    ),
    (  # whole conversations; the prompt again, as UltraFeedback has it
        '{"prompt": "u", "chosen": [{"role": "user", "content": "u"}, '
        '{"role": "assistant", "content": "c"}], "rejected": [{"role": "user", "content": "u"}, '
        '{"role": "assistant", "content": "r"}]}',
        "uu",
    ),
    (
        '{"conversations": [{"from": "human", "value": "u"}], '
        '"chosen": {"from": "gpt", "value": "c"}, "rejected": {"from": "gpt", "value": "r"}}',
        "uu",
    ),
    (  # OpenAI's
        '{"input": {"messages": [{"role": "user", "content": "u"}]}, '
        '"preferred_output": [{"role": "assistant", "content": "c"}], '
        '"non_preferred_output": [{"role": "assistant", "content": "r"}]}',
        "uu",
    ),
    (  # HH-RLHF's
        r'{"chosen": "\n\nHuman: u\n\nAssistant: a\n\nHuman: v\n\nAssistant: c", '
        r'"rejected": "\n\nHuman: u\n\nAssistant: a\n\nHuman: v\n\nAssistant: r"}',
        "uu|aa|uv",
    ),
    ('{"chosen": "u c", "rejected": "u r"}', "uu"),
]


@pytest.mark.parametrize(("line", "before"), PREFERENCES)
def test_rows_become_pairs(line, before):
    _, (turns, chosen, rejected) = S.row_pair(json.loads(line), set())
    assert written(turns) == before
    assert [chosen[1].strip(), rejected[1].strip()] == ["c", "r"]


BESIDE = [  # a text beside turns before both answers; the turns of the pair; whether the text is named
    ("u", [said("s", "system"), said("u", "user")], "ss|uu", False),
    ("v", [said("u", "user"), said("a"), said("v", "user")], "uu|aa|uv", False),
    ("u \n", [said("u", "user")], "uu", False),
    ("", [said("u", "user")], "uu", False),
    ("other", [said("u", "user")], "uu", True),
    ("u", [said("a"), said("v", "user")], "uu|aa|uv", False),  # what follows the text
]


@pytest.mark.parametrize(("text", "turns", "before", "is_named"), BESIDE)
def test_whole_conversations_have_their_question(text, turns, before, is_named):
    """A text beside them adds no turn, as in TRL; the log names it if they lack it."""
    chosen = json.dumps([*turns, said("c")])
    notes = set()
    row = {"prompt": text, "chosen": chosen, "rejected": [*turns, said("r")]}
    _, (asked, *answers) = D.row_pair(row, notes)
    assert written(asked) == before and [text for _, text, *_ in answers] == ["c", "r"]
    name = "a question that is no turn of chosen and rejected"
    assert notes == ({("not used", name)} if is_named else set())


@pytest.mark.parametrize(
    ("turns", "before"),
    [
        ([said("v", "user")], "ux|ay|uv"),
        ([said("s", "system"), said("v", "user")], "ss|ux|ay|uv"),
        ([said("s", "system"), said("x", "user"), said("y"), said("v", "user")], "ss|ux|ay|uv"),
    ],
)
def test_a_history_stands_before_whole_conversations_once(turns, before):
    notes = set()
    row = {"prompt": "v", "history": [["x", "y"]]}
    row |= {"chosen": [*turns, said("c")], "rejected": [*turns, said("r")]}
    _, (asked, *answers) = D.row_pair(row, notes)
    assert written(asked) == before and notes == set()
    assert [text for _, text, *_ in answers] == ["c", "r"]


def test_a_prompt_that_is_taken_from_the_answers_is_named():
    """It may be a chance: here the question is in another column."""
    row = {"user": "u", "chosen": "It is 4.", "rejected": "It is 5."}
    name, (asked, *_) = D.row_pair(row, set())
    assert (name, asked) == ("chosen/rejected that begin with their prompt", [(USER, "It is")])


def test_answers_of_pairs_may_be_json():
    """The list of an assistant's message is one; other JSON is the text."""
    row = {"prompt": ASKED, "chosen": FLIGHTS, "rejected": ANSWERED}
    row["rejected"] = json.dumps([said("r")])
    _, (asked, chosen, rejected) = D.row_pair(row, set())
    assert (asked, chosen, rejected) == ([(USER, "u")], (ASSISTANT, FLIGHTS), (ASSISTANT, "r"))
    _, (asked, chosen, _) = D.row_pair({**row, "chosen": ASKED}, set())
    assert (asked, chosen) == ([(USER, "u")], (ASSISTANT, ASKED))


CHATML = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FACTS = {"template": CHATML, "names": {}, "added": {"<|im_end|>": 261}, "stop": [261]}
TEMPLATED = replace(BYTES, facts=FACTS, encode_marked=BYTES.encode, roles={})
RENDERED = "<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("calls", ["[]", False, []])
def test_calls_that_are_none(calls):
    talk = [said("u", "user"), {**said("a"), "tool_calls": calls}]
    notes = set()
    _, row = F.parse_row({"messages": talk}, notes, TEMPLATED, F.Settings())
    assert text_of(row.ids) == f"{RENDERED}a<|im_end|>" and notes == set()


def test_rows_that_a_template_has_written_already_are_named():
    """Not an answer with the token that ends it, nor a text with another added token."""
    notes = set()
    F.parse_row({"text": RENDERED}, notes, TEMPLATED, F.Settings())
    D.parse_pair(
        {"prompt": RENDERED, "chosen": "c", "rejected": "r"},
        notes,
        TEMPLATED,
        D.Settings(init_from="x", train_seq_len=256),
    )
    names = "text (read as plain characters)", "a turn of the user (rendered again)"
    assert notes == {("already has chat tokens, should be messages", name) for name in names}
    notes = set()
    for row in ({"prompt": "<think>", "completion": "a<|im_end|>"}, {"text": "<|im_start|>"}):
        F.parse_row(row, notes, TEMPLATED, F.Settings())
    assert notes == set()


def test_an_answer_without_an_end_is_refused_by_the_ends_that_there_are():
    facts = {**FACTS, "added": {"<|end|>": 1, "<|im_end|>": 2}, "stop": [1]}
    tokenizer = replace(TEMPLATED, facts=facts)
    turns = [("<|user|>", "u"), ("<|assistant|>", "a")]
    said_so = r"^after an answer the chat template writes no end token \(<\|end\|>\); import"
    refusal(F.RowError, said_so, F.answered_text, tokenizer, turns)


# As published ones: both cut an answer at </think>, and Qwen3's writes the last one's thoughts anew.
R1 = (
    "{% for m in messages %}{% if m.role == 'user' %}<U>{{ m.content }}{% else %}"
    "<A>{{ m.content.split('</think>')[-1] }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<A>{% endif %}"
)
QWEN3 = R1.replace(
    "<A>{{ m",
    "<A>{% if loop.last %}<think>\n{{ m.content.split('</think>')[0].split('<think>')[-1] | trim }}"
    "\n</think>\n\n{% endif %}{{ m",
).replace("[-1] }}", "[-1] | trim }}")
THOUGHT = "<think>so</think> a"
DROPPED = (
    "the chat template drops text before </think> of an answer; import the model with an edited "
    "copy of it"
)
AFTER_END = "an answer has text after the end token '<|im_end|>'"


def learned(template, *answers, **names):
    """Return the format of a conversation with these answers, and what is learned of it, or why nothing is."""
    tokenizer = replace(TEMPLATED, facts={**FACTS, "template": template, "names": names})
    messages = []
    for answer in answers:
        message = said(answer) if isinstance(answer, str) else {"role": "assistant", **answer}
        messages += [said("u", "user"), message]
    try:
        name, row = F.parse_row({"messages": messages}, set(), tokenizer, F.Settings())
    except F.RowError as error:
        return str(error)
    return name, text_of(row.targets)


def chosen(template, answer):
    """Return what is learned of the better answer of a pair, or why nothing is."""
    tokenizer = replace(TEMPLATED, facts={**FACTS, "template": template})
    row = {"prompt": "u", "chosen": answer, "rejected": "r"}
    settings = D.Settings(init_from="x", train_seq_len=256)
    try:
        return text_of(D.parse_pair(row, set(), tokenizer, settings)[1].chosen)
    except D.RowError as error:
        return str(error)


def test_an_answer_whose_text_a_template_drops_is_left_out():
    assert learned(R1, "a </b>") == ("messages", "a </b><|im_end|>")
    for answer in (THOUGHT, "so\n</think>\n\na", "<think>\nso\n</think>\n\na"):
        assert learned(R1, answer) == learned(R1, answer, "b") == chosen(R1, answer) == DROPPED
        assert chosen(CHATML, answer) == answer + "<|im_end|>"
    none = R1.replace("m.content.split('</think>')[-1]", "''")
    assert learned(none, "a") == DROPPED.replace("text before </think>", "text")


def test_text_that_a_template_rewrites_or_drops_where_nothing_is_learned():
    """Qwen3 loses only white space of the last answer; what is context may lose its thoughts."""
    whole = "<think>\nso\n</think>\n\na<|im_end|>"
    assert learned(QWEN3, THOUGHT) == ("messages", whole) and chosen(QWEN3, THOUGHT) == whole
    assert learned(QWEN3, THOUGHT, THOUGHT) == ("messages (of 2 answers 1 learned)", whole)
    assert learned(QWEN3, "first <think>so</think> a") == DROPPED
    context = {"content": THOUGHT, "weight": 0}
    assert learned(R1, context, "b") == ("messages", "b<|im_end|>")
    judged = (ASSISTANT, THOUGHT, {"content": THOUGHT, "train": False})  # as SCORE_JUDGE reads it
    tokenizer = replace(TEMPLATED, facts={**FACTS, "template": R1})
    assert S.answer_ids(tokenizer, [(USER, "u")], judged) == BYTES.encode(" a<|im_end|>")


def test_an_answer_with_text_after_an_end_token_is_left_out():
    for answer in ("a <|im_end|> b", "<|im_end|>a<|im_end|>"):
        assert learned(CHATML, answer) == learned(CHATML, answer, "b") == AFTER_END
        assert chosen(CHATML, answer) == AFTER_END
    thinking = CHATML.replace("{{ m.content", "{{ m.thinking }}{{ m.content")
    assert learned(thinking, {"content": "a", "thinking": "<|im_end|>"}) == AFTER_END
    for answer in ("a<|im_end|>", "a<|im_end|>\n<|im_end|>"):
        assert learned(CHATML, answer) == ("messages", "a<|im_end|>")
        assert chosen(CHATML, answer) == "a<|im_end|>"


def test_an_answer_that_does_not_begin_as_the_prompt_ends_is_left_out():
    """As R1-Distill's present template, and that of small Qwen3.5, whose prompt closes the thoughts."""
    fault = (
        "the chat template ends a prompt with {!r}, but begins the answer without it; convert.py import "
        "--set NAME=VALUE (such as enable_thinking=true) or an edited copy of the template may help"
    )
    opened = R1.replace("prompt %}<A>", "prompt %}<A><think>\n")
    for answer in ("a", "<b>", THOUGHT):
        assert learned(opened, answer) == chosen(opened, answer) == fault.format("<A><think>\n")
    closing = r"{% if not enable_thinking %}{{ '\n</think>\n\n' }}{% endif %}"
    closed = QWEN3.replace("prompt %}<A>", "prompt %}<A><think>\n" + closing)
    assert learned(closed, THOUGHT) == fault.format("<A><think>\n\n</think>\n\n")
    whole = "so\n</think>\n\na<|im_end|>"
    assert learned(closed, THOUGHT, enable_thinking=True) == ("messages", whole)
    # An answer before another answer is written without thoughts: a fault of these turns.
    turns = [(USER, "u"), (ASSISTANT, "a"), (ASSISTANT, "b")]
    tokenizer = replace(TEMPLATED, facts={**FACTS, "template": QWEN3})
    refusal(F.RowError, "as the model would", F.answered_text, tokenizer, turns)


def leaves(value, name=""):
    """Yield the innermost fields' names and texts of a row."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, key)
    elif isinstance(value, list):
        for item in value:
            yield from leaves(item, name)
    elif isinstance(value, str):
        is_parsed = name in ("prompt", "completion", "chosen", "rejected")
        if is_parsed and value.lstrip().startswith('[{"role"'):
            with contextlib.suppress(ValueError):
                value = json.loads(value)
                yield from leaves(value)
                return
        yield name, value


def test_mutated_rows_are_read_whole_or_left_out():
    """Each text of a row that is used stands in its ids, or the log names its field. A template ends no run."""
    names = "tools system history images weight train label loss tool_calls thinking content name"
    unwritten = {*"role from type id tools messages arguments conversations label kto_tag".split()}
    used = 0
    for seed in range(1000):
        rng = random.Random(seed)
        line, *_ = rng.choice(ROWS + PREFERENCES[:6])
        row = json.loads(line)
        messages = row.get("messages")
        places = [row, *messages] if isinstance(messages, list) else [row]
        rng.choice(places)[rng.choice(names.split())] = rng.choice([*ODD, False, "[]"])
        row = mutated(row, rng)
        if not isinstance(row, dict):
            continue
        module, parse, changes = F, F.parse_row, dict(train_batch_tokens=2048)
        if "chosen" in row:
            module, parse, changes = D, D.parse_pair, dict(init_from="x")
        settings = module.Settings(train_seq_len=2048, **changes)
        line = json.dumps(row).encode()
        templated = functools.partial(parse, tokenizer=TEMPLATED, settings=settings)
        with contextlib.suppress(module.UserError):
            rows_read(module, [line], templated)
        parse = functools.partial(parse, tokenizer=BYTES, settings=settings)
        try:
            [item], report = rows_read(module, [line], parse)
        except module.UserError as error:
            assert "left out" in str(error) and "row 1" in str(error), line
            continue
        used += 1
        ids = [value.flatten() for value in vars(item).values() if torch.is_tensor(value)]
        text = text_of(torch.cat(ids))
        named = {*re.findall(r"\w+", str(report))}
        for name, value in leaves({key: row[key] for key in row.keys() - named}):
            is_call = value.startswith("{")
            assert name in unwritten | named or is_call or value in text, (line, name, named)
    assert used > 20


# ---------------------------------------------------------------------------------------- malformed
BAD_TURNS = {  # what the log calls it; lines of a file
    "missing field " + " or ".join(map(repr, F.ANSWERS)): [
        b'{"instruction": "x", "input": "y"}',
        b'{"prompt": "x", "completion": null}',
    ],
    "chosen and rejected, which train_dpo.py reads": [b'{"chosen": "y", "rejected": "z"}'],
    "completions with labels (process supervision), which no script reads": [
        b'{"prompt": "x", "completions": ["y", "z"], "labels": [true, false]}'
    ],
    "label false: an answer that is not to be learned": [
        b'{"prompt": "x", "completion": "y", "label": 0}',
        b'{"messages": [{"role": "assistant", "content": "x"}], "label": false}',
        b'{"question": "x", "answer": "y", "label": false}',
    ],
    "kto_tag false: an answer that is not to be learned": [
        b'{"instruction": "x", "output": "y", "kto_tag": false}',
        b'{"instruction": "x", "output": "y", "kto_tag": 0}',
    ],
    "weight 0, or train or loss false": [b'{"prompt": "x", "completion": "y", "train": false}'],
    "no answer is to be learned": [
        b'{"messages": [{"role": "assistant", "content": "a", "weight": 0}]}'
    ],
    "field 'images': the model reads text only": [b'{"images": ["a.png"], "messages": []}'],
    "part of type 'image_url', which is not written": [
        b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}'
    ],
    "a tool call without a name": [
        b'{"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}'
    ],
    "missing field 'content' or 'value'": [
        b'{"messages": [{"role": "user"}]}',
        b'{"messages": [{"role": "assistant", "content": null, "refusal": "no"}]}',
    ],
    "missing field 'role' or 'from'": [b'{"messages": [{"content": "x"}]}'],
    "empty answer": [
        b'{"prompt": "x", "completion": " \\n"}',
        b'{"text": ""}',
        b'{"conversations": [{"from": "gpt", "value": " "}, {"from": "gpt", "value": "x"}]}',
    ],
    "unknown role 'narrator'": [b'{"messages": [{"role": "narrator", "content": "x"}]}'],
    "no turn of the assistant": [
        b'{"messages": [{"role": "user", "content": "u"}]}',
        b'{"conversations": []}',
    ],
    "field 'messages' is no list of objects": [
        b'{"messages": "x"}',
        b'{"messages": [["user", "x"]]}',
    ],
    "field 'completion' is no text": [
        b'{"prompt": "x", "completion": true}',
        b'{"prompt": "x", "completion": NaN}',
    ],
    "field 'prompt' is no text": [b'{"prompt": {}, "completion": "x"}'],
    "no known format, fields 'a, b'": [b'{"b": 1, "a": 2}'],
    "one message of a conversation, which must be a row of 'messages'": [
        b'{"message_id": "1", "parent_id": null, "text": "x", "role": "prompter"}'
    ],
    "field 'history' is no list of objects": [
        b'{"prompt": "x", "completion": "y", "history": ["a"]}'
    ],
    "invalid UTF-8": [b'{"text": "caf\xe9"}', b"\xff\xfe"],
    "no Unicode: half a surrogate pair, or bytes that are no UTF-8": [b'{"text": "x \\ud83d y"}'],
    "no JSON object": [b'["text"]', b"3", b"null"],
    "no JSON": [b'{"text": "x",}', b"[" * 100_000, b"9" * 5000],
}
BAD_PAIRS = {
    "missing field 'chosen'": [b'{"prompt": "x", "rejected": "y"}'],
    "answers with labels, which no script reads; must be chosen and rejected": [
        b'{"prompt": "x", "completion": "y", "label": true}',
        b'{"prompt": "x", "completions": ["y"], "labels": [true]}',
        b'{"instruction": "x", "output": "y", "kto_tag": false}',
    ],
    "missing field 'prompt'": [b'{"chosen": "x", "rejected": "y"}'],
    "empty answer": [
        b'{"prompt": "x", "chosen": "", "rejected": "y"}',
        b'{"prompt": "x", "chosen": "y", "rejected": [{"role": "assistant", "content": " "}]}',
    ],
    "an answer with weight 0 or a refusal": [
        b'{"prompt": "x", "chosen": "y", "rejected": '
        b'[{"role": "assistant", "content": "z", "weight": 0}]}'
    ],
    "identical chosen and rejected": [b'{"prompt": "x", "chosen": "y", "rejected": "y"}'],
    "chosen and rejected differ before their last turn": [
        b'{"chosen": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "y"}], '
        b'"rejected": [{"role": "assistant", "content": "z"}]}'
    ],
    "chosen or rejected does not end with the assistant's turn": [
        b'{"prompt": "x", "chosen": [{"role": "user", "content": "u"}], '
        b'"rejected": [{"role": "user", "content": "u"}]}',
        b'{"prompt": "x", "chosen": [], "rejected": []}',
    ],
}


@pytest.mark.parametrize(
    ("module", "parse", "bad", "good"),
    [
        (F, F.row_turns, BAD_TURNS, b'{"text": "good"}'),
        (S, S.row_pair, BAD_PAIRS, b'{"prompt": "x", "chosen": "good", "rejected": "bad"}'),
    ],
    ids=["turns", "pairs"],
)
def test_each_malformed_kind_is_counted_named_and_survived(module, parse, bad, good, tmp_path):
    """Blank lines are counted as lines, not as rows."""
    rows = [b" ", good]
    left_out = {}
    for fault, lines in bad.items():
        left_out[fault] = [*range(len(rows) + 1, len(rows) + 1 + len(lines))]
        rows += lines
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\r\n".join([*rows, good, good, b"  "]))
    reports = []
    items = module.read_rows(str(path), parse, reports.append)
    [report] = reports
    last = len(rows) + 2
    assert report.left_out == left_out and report.twice == [last - 1, last]
    assert len(items) == 3 and len({str(item) for item in items}) == 1
    path.write_bytes(lines[-1])  # alone
    message = f"^{path}: 1 rows, used none; left out {fault}: 1 "
    refusal(module.UserError, message, module.read_rows, str(path), parse, print)


def test_a_file_without_usable_rows_is_refused_by_its_fields(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"kind": "NLI", "target": "a"}\n{"other": 1}\n')
    message = "'Your rows' .* fields of the first row: 'kind, target'$"
    refusal(F.UserError, message, F.read_rows, str(path), F.row_turns, print)


def test_files_of_every_kind_give_the_same_rows(tmp_path):
    rows = [{"prompt": f"p{i}", "completion": "größer 日本"} for i in range(5)]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    mark = b"\xef\xbb\xbf"
    kinds = {
        "a.jsonl": mark + lines,
        "b.json": b" \n" + json.dumps(rows, indent=1).encode(),
        "c.jsonl.zst": zstandard.compress(lines[:100]) + zstandard.compress(lines[100:]),
        "d.jsonl.gz": gzip.compress(mark + lines.replace(b"\n", b"\r\n")),
        "E.JSONL.GZ": gzip.compress(lines),
        "F.JSONL.ZST": zstandard.compress(lines),
        "one.json": json.dumps(rows[0], indent=1).encode(),  # is one row, as in datasets
    }
    for name, content in kinds.items():
        path = tmp_path / name
        path.write_bytes(content)
        found = S.read_rows(str(path), lambda row, notes: ("row", row), [].append)
        assert found == rows[: 1 if name == "one.json" else 5]
    (tmp_path / "G.JSONL").write_text('{"text": "one"}\n{"text": "two"}\n')
    assert S.read_documents(str(tmp_path / "G.JSONL"), [].append) == ["one", "two"]


def test_a_table_is_read_without_nulls(tmp_path, monkeypatch):
    """In a column of structs each has the fields of all of them: arguments of other calls."""
    pyarrow = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    path = str(tmp_path / "a.parquet")
    rows = [{"call": {"x": 1}}, {"call": {"y": [None, 2]}, "day": date(2026, 1, 2)}]
    pq.write_table(pyarrow.Table.from_pylist([{"day": None, **row} for row in rows]), path)
    assert S.file_rows(path) == [rows[0], {**rows[1], "day": "2026-01-02"}]
    monkeypatch.setattr(S.importlib.util, "find_spec", lambda name: None)
    refusal(S.UserError, "a.parquet: .* pip install pyarrow", S.file_rows, path)


def test_binary_of_a_table_is_text():
    """Where it is no UTF-8, a row that needs it is left out; a column that nothing reads does no harm."""
    rows = [{"text": text, "id": b"\xff"} for text in ("größer".encode(), b"a\xff")]
    items, report = rows_read(F, F.without_nulls(rows), F.row_turns)
    assert items == [[("", "größer")]]
    assert report.left_out == {"no Unicode: half a surrogate pair, or bytes that are no UTF-8": [2]}


FILES = {"none.jsonl": None, "empty": b"", "a.zst": b"no frame", "a.parquet": b"PAR1"}
FILES["cut.gz"] = gzip.compress(b"x" * 9999)[:20]
FILES["cut.zst"] = zstandard.compress(b"x" * 9999)[:20]
MANY = b"".join(b'{"text": "%d"}\n' % number**5 for number in range(20_000))
FILES["most.jsonl.zst"] = zstandard.compress(MANY)[:-9]  # the lines up to there can be read


def test_files_without_rows_are_refused(tmp_path):
    for name, content in FILES.items():
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        refusal(F.UserError, f"^{path}:", F.read_rows, str(path), F.row_turns, print)
    refusal(S.UserError, f"^{tmp_path}:", S.file_rows, str(tmp_path))


@pytest.mark.parametrize("name", ["a.gz", "a.zst"])
def test_what_a_file_unpacks_to_is_bounded(name, tmp_path, monkeypatch):
    """By its size; a small one takes little memory."""
    packed = gzip.compress(b"{}") if name == "a.gz" else zstandard.compress(b"{}")
    path = tmp_path / name
    path.write_bytes(packed)
    tracemalloc.start()
    assert S.read_file(str(path)) == b"{}"
    assert tracemalloc.get_traced_memory()[1] < 1 << 24
    tracemalloc.stop()
    monkeypatch.setattr(S, "UNPACKED_BYTES", 1 - 200 * len(packed))
    refusal(S.UserError, f"^{path}: unpacks to more than 1 bytes", S.read_file, str(path))


# ---------------------------------------------------------------------------------------------- ids
@pytest.mark.parametrize("changes", [{}, dict(add_dummy_prefix=True, control_symbols=[])])
def test_ids_of_turns_part_by_part(changes, tmp_path):
    """By a tokenizer with role tokens of its own, and by one without, which puts a space before texts."""
    bare = S.load_tokenizer(train_model(tmp_path / "tokenizer.model", **changes))
    tokenizer = S.with_roles(bare)
    roles = [*tokenizer.roles.values()]
    system, user, assistant, end = roles
    assert S.with_roles(tokenizer) is tokenizer and [*tokenizer.roles] == list(S.ROLE_TOKENS)
    for text in HARD_TEXTS:
        body = tokenizer.encode(text)
        assert not {1, *roles} & {*body}  # what looks like a role token is text
        turns = [(SYSTEM, text), (USER, text), (ASSISTANT, text)]
        ids = [1, system, *body, end, user, *body, end]
        assert S.prompt_ids(tokenizer, turns[:2], "chat") == [*ids, assistant]
        found = F.turn_ids(tokenizer, turns)
        assert found[0] == [*ids, assistant, *body, end]
        assert found[1] == [False] * (len(ids) + 1) + [True] * (len(body) + 1)
    assert S.stop_ids(tokenizer) == {end, 1, 2}
    if changes:
        assert roles == [*range(bare.vocab_size, bare.vocab_size + 4)]
        assert tokenizer.boundary[-4:].all() and not tokenizer.drops_space[-4:].any()
        # Without roles the turns are lines.
        turns = [(USER, "the cat"), (ASSISTANT, "sat"), (USER, "on")]
        assert S.prompt_ids(bare, turns, "chat") == [1, *bare.encode("the cat\nsat\non\n")]
        assert S.answer_ids(bare, turns, "it") == [*bare.encode("it"), 1]


@pytest.mark.parametrize("tied", [True, False])
def test_a_network_grows_by_role_tokens(tied, tmp_path):
    """The new rows are the mean of the others, whose logits stay."""
    bare = S.load_tokenizer(train_model(tmp_path / "bare.model", control_symbols=[]))
    net = network(0, bare, tie_embeddings=tied)
    ids = torch.tensor([[1, 7, 9, 11]])
    before = net(ids)
    embed = net.embed.detach().clone()
    grown = F.grow_roles(net, bare)
    assert grown.vocab_size == net.config.vocab_size == bare.vocab_size + 4
    torch.testing.assert_close(net.embed, torch.cat([embed, embed.mean(0).expand(4, -1)]))
    torch.testing.assert_close(net(ids)[..., :-4], before, rtol=0, atol=1e-6)
    assert tied or len(net.head) == grown.vocab_size
    assert F.grow_roles(net, grown) is grown and len(net.embed) == grown.vocab_size


# --------------------------------------------------------------------------------------------- chat
class Scripted:
    """In Decoder's place: it says the given answers, token by token, and keeps the prompts.

    The token "^C" is the user's.
    """

    prompts = []

    def __init__(self, network, prompts, compiled=False):
        self.prompts.append(prompts[0])
        self.left = [*self.answers.pop(0)]
        self(None)

    def __call__(self, ids):
        token = self.left.pop(0) if self.left else 263
        if token == "^C":
            raise KeyboardInterrupt
        self.logits = torch.eye(264)[[token]] * 100

    def take(self, rows):
        assert rows == [0]


def prompt_of(*turns):
    return S.prompt_ids(BYTES, [*turns], "chat")


@pytest.fixture
def talk(monkeypatch, capsys, tmp_path):
    """Return a function: what chat writes to both streams, and the prompts of a scripted model."""
    net = network(0, tie_embeddings=False)  # tied, it would repeat what it reads
    net.head.data.mul_(10)
    pack(net, BYTES, tmp_path)

    def run(lines, answers=None, **changes):
        if answers is not None:
            Scripted.prompts = []
            Scripted.answers = answers
            monkeypatch.setattr(S, "Decoder", Scripted)
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(line + "\n" for line in lines)))
        given = {"artifact": str(tmp_path), "device": "cpu", **changes}
        S.chat(S.Settings(mode="chat", **given))
        return *capsys.readouterr(), Scripted.prompts

    return run


def test_a_chat_with_tools_has_the_turns_of_a_row(talk, tmp_path):
    """The model calls a tool in text, and /tool is its result: ids are those that train_sft.py learns."""
    path = tmp_path / "tools.json"
    path.write_text("\ufeff" + json.dumps([TOOL]), encoding="utf-8")  # as some editors write it
    row = {"tools": [TOOL], "messages": [said("s", "system"), *TOOL_TALK]}
    ids, _ = F.turn_ids(BYTES, F.row_turns(row, set())[1])
    artifact = str(pack(network(0, train_seq_len=1024), BYTES, tmp_path / "long"))
    given = dict(tools=str(path), system="s", max_new_tokens=200, artifact=artifact)
    answers = [BYTES.encode(CALL_TEXT), BYTES.encode("b")]
    _, _, prompts = talk(["u", "/tool sunny"], answers, **given)
    assert [*prompts[1], *BYTES.encode("b"), BYTES.roles[END]] == ids
    for text in ("3", "[]", "null"):
        path.write_text(text)
        refusal(S.UserError, "^TOOLS=.*: must be a JSON file", talk, ["u"], ["a"], tools=str(path))


def test_a_chat_keeps_its_history_until_it_is_reset(talk, monkeypatch):
    """Ctrl-C ends an answer, of which what was said stays; between two answers it ends the program."""
    answers = [[*BYTES.encode("one"), "^C"], BYTES.encode("zwölf"), BYTES.encode("3")]
    lines = ["a", "", "b", "/reset", "c"]
    out, err, prompts = talk(lines, answers, system="S", max_new_tokens=32)
    assert (out, err) == ("one\nzwölf\n3\n", " [stopped][what was said is forgotten]\n")
    turns = [(SYSTEM, "S"), (USER, "a"), (ASSISTANT, "one"), (USER, "b")]
    third = prompt_of((SYSTEM, "S"), (USER, "c"))
    assert prompts == [prompt_of(*turns[:2]), prompt_of(*turns), third]
    assert prompts[0] == [1, 260, 87, 263, 261, 101, 263, 262]

    def interrupted(prompt):
        raise KeyboardInterrupt

    monkeypatch.setattr(S, "input", interrupted, raising=False)
    assert talk(["a"], [], max_new_tokens=32)[:2] == ("", "")


def test_a_character_is_written_when_it_is_whole(talk, monkeypatch):
    texts = []
    monkeypatch.setattr(S, "print", lambda text, **_: texts.append(text), raising=False)
    answers = [BYTES.encode("é\U0001f600x"), BYTES.encode("\U0001f600")[:3]]
    talk(["a", "b"], answers, max_new_tokens=20)
    assert texts == ["é", "\U0001f600", "x", "", "\ufffd"]


def test_the_oldest_turns_give_way_when_the_context_is_full(talk):
    """A context of 64 tokens, 8 for the answer; turns of 12, answers of 5, BOS, the system's 3."""
    lines = ["0123456789"] * 4 + ["x" * 60, "y"]
    answers = [BYTES.encode("abc")] * 6
    out, err, prompts = talk(lines, answers, system="S", max_new_tokens=8)
    assert out == "abc\n" * 5
    pair = [(USER, "0123456789"), (ASSISTANT, "abc")]
    expected = [prompt_of((SYSTEM, "S"), *pair * count, pair[0]) for count in (0, 1, 2, 2)]
    assert [len(ids) for ids in expected] == [17, 34, 51, 51]
    assert prompts == [*expected, prompt_of((SYSTEM, "S"), *pair, *pair, (USER, "y"))]
    assert re.findall(r"\[(\w+ \w+)", err) == ["the context", "left out", "the context"]


def test_an_answer_has_at_most_half_the_context(talk):
    _, err, _ = talk(["a", "b"], [BYTES.encode("x" * 40)] * 2, max_new_tokens=33)
    assert err.count("MAX_NEW_TOKENS=33: an answer has at most 32 tokens") == 1


@pytest.mark.parametrize(("positions", "kept"), [("rope", 4), ("learned", 2)])
def test_a_chat_has_the_context_of_an_imported_model(talk, tmp_path, positions, kept):
    """It is longer than the windows of training, except where learned positions end."""
    net = network(0, train_seq_len=64, context=128, positions=positions)
    artifact = str(pack(net, BYTES, tmp_path / positions))
    answers = [BYTES.encode("abc")] * 5
    _, _, prompts = talk(["0123456789"] * 5, answers, artifact=artifact, max_new_tokens=8)
    pair = [(USER, "0123456789"), (ASSISTANT, "abc")]
    assert prompts[-1] == prompt_of(*pair * kept, pair[0])


def test_the_result_of_a_tool_leaves_with_its_call(talk):
    """Without the first question and the call alone there would be room."""
    lines = ["0123456789", "/tool 0123456789", "9876543210", "0123456789"]
    _, err, prompts = talk(lines, [BYTES.encode("abc")] * 4, max_new_tokens=8)
    last = [(USER, "9876543210"), (ASSISTANT, "abc"), (USER, "0123456789")]
    assert prompts[-1] == prompt_of(*last) and "oldest 4 turns" in err
    assert prompts[2] == prompt_of(*turns_of_tool(), last[0])


def turns_of_tool():
    """Return the turns of a question, a call and its result, and an answer."""
    question = [(USER, "0123456789"), (ASSISTANT, "abc")]
    return [*question, S.said_turn("/tool 0123456789"), question[1]]


def test_a_line_that_a_chat_template_refuses_is_left_out(talk, monkeypatch):
    asked_ids = S.asked_ids

    def refuse(tokenizer, turns):
        if turns[-1][1] == "bad":
            raise S.UserError("the template says no")
        return asked_ids(tokenizer, turns)

    monkeypatch.setattr(S, "asked_ids", refuse)
    answers = [BYTES.encode("one"), BYTES.encode("two")]
    out, err, prompts = talk(["a", "bad", "b"], answers, max_new_tokens=8)
    assert (out, err) == ("one\ntwo\n", "[left out: the template says no]\n")
    assert prompts[1] == prompt_of((USER, "a"), (ASSISTANT, "one"), (USER, "b"))


def test_an_answer_is_what_generate_draws(talk, tmp_path, capsys):
    """By a real network: token by token the same text as all at once, for two turns."""
    lines = ["hello", "again"]
    given = dict(seed=5, max_new_tokens=6, temperature=1.0)
    out, err, _ = talk(lines, **given)
    net, *_ = S.load_model("ARTIFACT", str(tmp_path))
    truncate = S.truncation(S.Settings())
    turns = []
    for number, line in enumerate(lines):
        turns.append((USER, line))
        prompt = prompt_of(*turns)
        [one] = S.generate(net, [prompt], 1, 6, 1.0, [(5, number)], S.stop_ids(BYTES), truncate)
        ids = one.ids[:-1] if one.finished else one.ids
        turns.append((ASSISTANT, S.completion(BYTES, prompt, ids)))
    assert (out, err) == (f"{turns[1][1]}\n{turns[3][1]}\n", "") and len(out) > 4
    # MODE=generate answers a user's turn, too.
    given |= dict(artifact=str(tmp_path), device="cpu", system="s", temperature=0.0)
    S.sample(S.Settings(prompt="hello", layout="chat", **given))
    assert capsys.readouterr().out == talk(lines[:1], **given)[0]
    # Several texts are told apart.
    S.sample(S.Settings(prompt="hello", layout="chat", num_samples=3, **given))
    out = capsys.readouterr().out
    assert out == f"{'-' * 15}\n".join([talk(lines[:1], **given)[0]] * 3)


def test_a_whole_process_with_a_signal(tmp_path):
    """Input has bytes that are no UTF-8; SIGINT ends the first, endless answer alone."""
    net = network(0, tie_embeddings=False, train_seq_len=1 << 17)
    # Of two letters, whose logits have opposite signs, one is always the likeliest.
    with torch.no_grad():
        net.head.zero_()
        net.head[BYTES.encode("xy")] = torch.randn(32) * torch.tensor([[1.0], [-1.0]])
    artifact = pack(net, BYTES, tmp_path)
    environ = environment(ARTIFACT=artifact, MODE="chat", MAX_NEW_TOKENS=1 << 16, TEMPERATURE=0)
    given = tmp_path / "given"
    given.write_bytes(b"go \xff on\n/reset\n")
    # What runs in the background ignores SIGINT.
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    child = Child(server(), tmp_path, "chat", heard, environ, script="sample", given=str(given))
    while child.out == "" and child.poll() is None:
        time.sleep(0.02)
    child.send(signal.SIGINT)
    assert child.wait() == 0
    assert child.err == " [stopped][what was said is forgotten]\n" and {*child.out} <= {*"xy\n"}
