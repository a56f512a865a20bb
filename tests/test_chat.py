"""Rows to turns and pairs, malformed rows, ids of turns, grown vocabularies; sample.py's chat."""

import functools
import gzip
import io
import json
import os
import random
import re
import signal
import subprocess
import sys
from datetime import date

import numpy as np
import pytest
import torch
import zstandard
from test_data import HARD_TEXTS, fake_encoding, train_model
from test_weights import network, pack, save

import sample as S
import train_dpo as D
import train_sft as F
from conftest import ROOT, environment, refusal

SYSTEM, USER, ASSISTANT, END = S.ROLE_TOKENS
BYTES = S.load_tokenizer("bytes")  # a byte b is token b + 4, BOS is 1, role tokens are 260 to 263


# ------------------------------------------------------------------------------------ rows to turns
def said(text, role="assistant"):
    return {"role": role, "content": text}


PAIRED = [  # rows of a question and an answer
    (dict(instruction="Add.", input="1 2", output="3"), "Alpaca", "Add.\n\n1 2", "3"),
    (dict(instruction="Add 1 2.", input="", output="3"), "Alpaca", "Add 1 2.", "3"),
    (dict(instruction="", input="1 2", output="3"), "Alpaca", "1 2", "3"),
    (dict(instruction="Hi", input=None, output="3"), "Alpaca", "Hi", "3"),
    (dict(instruction="Hi", output=" Ho ", id=7), "Alpaca", "Hi", " Ho "),
    (dict(question="1+1?", answer="2 #### 2"), "prompt/completion", "1+1?", "2 #### 2"),
    (dict(prompt="a", completion="b"), "prompt/completion", "a", "b"),
    (dict(prompt="a", response="b"), "prompt/completion", "a", "b"),
    (dict(prompt="a", answer="b"), "prompt/completion", "a", "b"),
]
MESSAGES = [("system", "s"), ("user", "u"), ("assistant", "a"), ("user", ""), ("assistant", "b")]
SHARED = [("system", "s"), ("human", "h"), ("function_call", "f()"), ("observation", "1")]
SHARED += [("tool", "2"), ("gpt", "g")]
ROLES = {"human": "user", "function_call": "assistant", "observation": "user", "tool": "user"}
ROLES["gpt"] = "assistant"


def test_rows_become_turns():
    for row, kind, prompt, answer in PAIRED:
        assert S.row_turns(row, set()) == (kind, [(USER, prompt), (ASSISTANT, answer)])
    row = {"messages": [said(text, role) for role, text in MESSAGES]}
    assert S.row_turns(row, set()) == (
        "messages",
        [(f"<|{role}|>", text) for role, text in MESSAGES],
    )
    row = {"conversations": [{"from": role, "value": text} for role, text in SHARED]}
    turns = [(f"<|{ROLES.get(role, role)}|>", text) for role, text in SHARED]
    for place in (3, 4):  # a chat template knows a tool's results by their own role
        turns[place] += ({"content": turns[place][1], "role": "tool"},)
    assert S.row_turns(row, set()) == ("ShareGPT", turns)
    assert S.row_turns({"text": "Once.\n"}, set()) == ("text", [("", "Once.\n")])


U, A = said("u", "user"), said("a")
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = {
    "id": "c",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
}
CALLS = {
    "tools": TOOLS,
    "messages": [
        said("u", "user"),
        {**said(None), "tool_calls": [CALL], "refusal": None},
        {**said("sunny", "tool"), "tool_call_id": "c"},
        said("b"),
    ],
}
TOOLS_TEXT = f"<tools>\n{json.dumps(TOOLS[0])}\n</tools>"
CALL_TEXT = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
ONE = [("user", "u"), ("assistant", "a")]
RICH = [  # a row; texts of its turns by roles in our layout; what the log says of it
    (
        CALLS,
        ["s" + TOOLS_TEXT, "uu", "a" + CALL_TEXT, "usunny", "ab"],
        "not used: message.tool_call_id",
    ),
    (
        {
            "functions": [TOOLS[0]["function"]],
            "messages": [U, {**A, "function_call": CALL["function"]}],
        },
        ["s" + TOOLS_TEXT, "uu", "aa\n" + CALL_TEXT],
        "",
    ),
    (
        {"tools": json.dumps(TOOLS), "prompt": "u", "completion": "a"},
        ["s" + TOOLS_TEXT, "uu", "aa"],
        "",
    ),
    ({"messages": [U, {**A, "reasoning_content": "t"}]}, ["uu", "a<think>\nt\n</think>\n\na"], ""),
    ({"messages": [U, {**A, "thinking": "t"}]}, ["uu", "a<think>\nt\n</think>\n\na"], ""),
    ({"system": "s", "conversations": [U, A]}, ["ss", "uu", "aa"], ""),
    ({"system": "s", "messages": [said("s", "system"), U, A]}, ["ss", "uu", "aa"], ""),
    ({"system": "s", "instruction": "u", "output": "a"}, ["ss", "uu", "aa"], ""),
    ({"instruction": "u", "output": "a", "history": [["x", "y"]]}, ["ux", "ay", "uu", "aa"], ""),
    ({"instruction": "u", "context": "c", "response": "a"}, ["uu\n\nc", "aa"], ""),
    ({"messages": None, "text": None, "prompt": "u", "completion": "a"}, ["uu", "aa"], ""),
    ({"prompt": [U], "completion": [A]}, ["uu", "aa"], ""),
    ({"prompt": [U], "completion": "a", "input": "x"}, ["uu", "aa"], "columns not read: input"),
    ({"question": 1, "answer": 2.5}, ["u1", "a2.5"], ""),
    (
        {
            "messages": [
                said([{"type": "text", "text": "u"}, {"type": "text", "text": "v"}], "user"),
                A,
            ]
        },
        ["uuv", "aa"],
        "",
    ),
    ({"messages": json.dumps([U, A]), "id": 3}, ["uu", "aa"], "columns not read: id"),
    ({"prompt": "u", "completion": "a", "rating": 4}, ["uu", "aa"], "not used: rating"),
    ({"text": "u", "label": 0}, ["u"], "not used: label"),
    ({"messages": [U, A], "weight": 0.5}, ["uu", "aa"], "not used: weight"),
    ({"prompt": "u", "completion": "a", "label": True, "weight": 1}, ["uu", "aa"], ""),
    ({"problem": "u", "solution": "a", "answer": 3}, ["uu", "aa"], "columns not read: answer"),
    ({"context": "u", "continuation": "a"}, ["uu", "aa"], ""),
    (
        {
            "conversations": [
                {"from": "human", "value": "u"},
                {"from": "function_call", "value": json.dumps(CALL["function"])},
                {"from": "observation", "value": "o"},
                {"from": "gpt", "value": "a"},
            ]
        },
        ["uu", "a" + CALL_TEXT, "uo", "aa"],
        "",
    ),
    ({"messages": [said([{"type": "input_text", "text": "u"}], "user"), A]}, ["uu", "aa"], ""),
    ({"messages": [U, A, U]}, ["uu", "aa", "uu"], "not learned: turns after the last answer"),
    ({"messages": [A]}, ["aa"], "not learned: no turn before the first answer"),
    ({"messages": [said("s", "developer"), said("u", "Human"), A]}, ["ss", "uu", "aa"], ""),
    (
        {"instruction": "u", "input": "", "output": "a", "text": "uua"},
        ["uu", "aa"],
        "columns not read: text",
    ),
]
LOST = [  # rows that lose a part if they are read
    ({"images": ["a.png"], "messages": [U, A]}, "field 'images': the model reads text only"),
    (
        {"messages": [said([{"type": "image_url", "image_url": {}}], "user"), A]},
        "part of type 'image_url', which is not written",
    ),
    ({"messages": [U, {**said(None), "refusal": "no"}]}, "missing field 'content' or 'value'"),
    ({"messages": [U, {**A, "weight": 0}]}, "no answer is to be learned"),
    (
        {"prompt": "u", "completion": "a", "label": False},
        "label false: an answer that is not to be learned",
    ),
    (
        {"prompt": "u", "completion": "a", "label": 0},
        "label false: an answer that is not to be learned",
    ),
    ({"prompt": "u", "completion": "a", "train": False}, "weight 0, or train or loss false"),
    ({"messages": [U, {**A, "tool_calls": [{"function": {}}]}]}, "a tool call without a name"),
    ({"prompt": "u", "completion": float("nan")}, "field 'completion' is no text"),
]


@pytest.mark.parametrize(("row", "turns", "note"), RICH)
def test_what_a_row_has_is_written_or_named(row, turns, note):
    """Nothing is dropped in silence; fields that are null are none."""
    letters = {SYSTEM: "s", USER: "u", ASSISTANT: "a", "": ""}
    log = []
    parts = S.parse_rows("x", [{"weight": None, **row}], parse_fitted)
    [found] = S.finish_rows(*parts, log.append)
    assert [letters[role] + text for role, text, *_ in found] == turns
    assert str(log[0]).partition("; left out none")[2] == (note and f"; {note} 1")


def parse_fitted(row, notes):
    """Return the format and turns of a row, as train_sft.py reads them."""
    name, turns = S.row_turns(row, notes)
    return name, S.fitted_turns(BYTES, turns, notes)


@pytest.mark.parametrize(("row", "fault"), LOST)
def test_a_row_whose_answer_would_lose_a_part_is_left_out(row, fault):
    with pytest.raises(S.RowError, match="^" + re.escape(fault)):
        S.row_turns(row, set())


@pytest.mark.parametrize(
    "flag", [{"weight": 0}, {"train": False}, {"loss": False}, {"weight": 0.0}]
)
@pytest.mark.parametrize("train_on", ["assistant", "all"])
def test_a_message_of_weight_0_is_context(flag, train_on):
    row = {
        "messages": [U, {**said("BAD"), **flag}, said("v", "user"), {**said("good"), "weight": 1}]
    }
    s = F.Settings(train_on=train_on)
    name, item = F.parse_row(row, set(), BYTES, s)
    learned = bytes(token - 4 for token in item.targets.tolist() if 4 <= token < 260)
    assert learned == (b"good" if train_on == "assistant" else b"uvgood")
    assert bytes(token - 4 for token in item.ids.tolist() if 4 <= token < 260) == b"uBADvgood"


def leaves(value):
    """Yield the innermost fields' names and texts of a row."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for name, item in pairs:
        if isinstance(item, dict | list):
            yield from (
                (inner if isinstance(inner, str) else name, text) for inner, text in leaves(item)
            )
        else:
            yield name, item


ODD = [
    None,
    "",
    [],
    {},
    0,
    -1,
    1.5,
    True,
    False,
    "\ud800",
    [None],
    [[]],
    {"a": 1},
    "[]",
    "{",
    10**30,
]
ODD += [[["a"]], [{"type": []}], {"function": 3}, [{"function": {"name": "f", "arguments": [1]}}]]
NAMES = "tools system history images weight train label input loss tool_calls thinking content role name"


def mutated(rng, value):
    """Return a row, one field of which was changed, taken out or put in somewhere."""
    if not isinstance(value, dict | list) or not value:
        return rng.choice(ODD)
    name = rng.choice([*value] if isinstance(value, dict) else range(len(value)))
    kind = rng.random()
    if kind < 0.15:
        value.pop(name)
    elif kind < 0.3 and isinstance(value, dict):
        value[rng.choice(NAMES.split())] = rng.choice(ODD)
    elif kind < 0.45:
        value[name] = rng.choice(ODD)
    else:
        value[name] = mutated(rng, value[name])
    return value


def test_mutated_rows_are_read_whole_or_left_out():
    """Each text of a row that is used stands in its ids, or the log names its field."""
    pairs = [dict(BOTH, prompt="u0"), dict(prompt="p0", chosen="c", rejected="r", system="s0")]
    for seed in range(100):
        rng = random.Random(seed)
        row = rng.choice([row for row, *_ in RICH] + pairs)
        row = json.loads(json.dumps(row))
        for _ in range(rng.randint(1, 2)):
            row = mutated(rng, row)
        parse, settings = F.parse_row, F.Settings(train_seq_len=1024, train_batch_tokens=1024)
        if not isinstance(row, dict):
            continue
        if "chosen" in row:
            parse, settings = D.parse_pair, D.Settings(train_seq_len=1024, init_from="x")
        log = []
        parse = functools.partial(parse, tokenizer=BYTES, settings=settings)
        line = json.dumps(row).encode()
        module = D if "chosen" in row else F
        try:
            [item] = module.finish_rows(*module.parse_rows("x", [line], parse), log.append)
        except module.UserError as error:
            assert "left out" in str(error) and "row 1" in str(error), line
            continue
        ids = torch.cat(
            [value.flatten() for value in vars(item).values() if torch.is_tensor(value)]
        )
        text = bytes(token - 4 for token in ids.tolist() if 4 <= token < 260).decode()
        named = {*re.findall(r"\w+", str(log[0]))}
        row = {name: value for name, value in row.items() if name not in named}
        for name, value in leaves(row):
            skipped = {*"role from type id tools messages arguments".split(), *named}
            if name not in skipped and isinstance(value, str):
                assert value in text, (line, name, str(log[0]))


BOTH = {name: [U, said(name[0])] for name in ("chosen", "rejected")}
LONG = [(USER, "u"), (ASSISTANT, "a"), (USER, "u")]
PREFERENCES = [
    (dict(prompt="u", chosen="c", rejected="r"), "prompt/chosen/rejected", LONG[:1]),
    (
        dict(prompt="u", chosen=[said("c")], rejected=[said("r")]),
        "prompt/chosen/rejected",
        LONG[:1],
    ),
    (dict(prompt=[U, A, U], chosen="c", rejected="r"), "messages", LONG),
    (dict(prompt=[U], chosen=[said("c")], rejected="r"), "messages", LONG[:1]),
    (BOTH, "messages", LONG[:1]),
    (dict(question="u", chosen="c", rejected="r"), "prompt/chosen/rejected", LONG[:1]),
    (
        {
            "conversations": [{"from": "human", "value": "u"}],
            "chosen": {"from": "gpt", "value": "c"},
            "rejected": {"from": "gpt", "value": "r"},
        },
        "messages",
        LONG[:1],
    ),
    (
        {
            "input": {"messages": [U], "parallel_tool_calls": True},
            "preferred_output": [said("c")],
            "non_preferred_output": [said("r")],
        },
        "messages",
        LONG[:1],
    ),
    (
        {
            name: f"\n\nHuman: u\n\nAssistant: a\n\nHuman: u\n\nAssistant: {name[0]}"
            for name in ("chosen", "rejected")
        },
        "messages",
        LONG,
    ),
    (dict(chosen="u c", rejected="u r"), "prompt/chosen/rejected", LONG[:1]),
    # The prompt again, as UltraFeedback has it; and what goes on from it.
    (dict(BOTH, prompt="u"), "prompt/chosen/rejected", LONG[:1]),
    (dict(BOTH, prompt=[U, A]), "messages", LONG),
]


@pytest.mark.parametrize(("row", "kind", "before"), PREFERENCES)
def test_rows_become_pairs(row, kind, before):
    name, (turns, chosen, rejected) = S.row_pair(row, set())
    assert (name, turns) == (kind, before)
    assert [chosen[1].strip(), rejected[1].strip()] == ["c", "r"]


# ---------------------------------------------------------------------------------------- malformed
BAD_TURNS = {
    "missing field " + " or ".join(map(repr, S.ANSWERS)): [
        b'{"instruction": "x"}',
        b'{"instruction": "x", "input": "y"}',
        b'{"prompt": "x"}',
        b'{"prompt": "x", "completion": null}',
    ],
    "chosen and rejected, which train_dpo.py reads": [
        b'{"prompt": "x", "chosen": "y", "rejected": "z"}',
        b'{"chosen": "y", "rejected": "z"}',
    ],
    "completions with labels (process supervision), which no script reads": [
        b'{"prompt": "x", "completions": ["y", "z"], "labels": [true, false]}'
    ],
    "missing field 'content' or 'value'": [b'{"messages": [{"role": "user"}]}'],
    "missing field 'role' or 'from'": [b'{"messages": [{"content": "x"}]}'],
    "empty answer": [
        b'{"prompt": "x", "completion": " \\n"}',
        b'{"text": ""}',
        b'{"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": ""}]}',
        b'{"conversations": [{"from": "gpt", "value": " "}, {"from": "gpt", "value": "x"}]}',
    ],
    "unknown role 'narrator'": [b'{"messages": [{"role": "narrator", "content": "x"}]}'],
    "no turn of the assistant": [
        b'{"messages": [{"role": "user", "content": "u"}]}',
        b'{"conversations": []}',
    ],
    "field 'messages' is no list of messages": [
        b'{"messages": "x"}',
        b'{"messages": [["user", "x"]]}',
    ],
    "field 'completion' is no text": [b'{"prompt": "x", "completion": true}'],
    "field 'prompt' is no text": [b'{"prompt": {}, "completion": "x"}'],
    "no known format, fields 'a, b'": [b'{"b": 1, "a": 2}'],
    "invalid UTF-8": [b'{"text": "caf\xe9"}', b"\xff\xfe"],
    "half a surrogate pair, which is no Unicode": [
        b'{"text": "x \\ud83d y"}',
        b'{"prompt": "\\udc00", "completion": "y"}',
    ],
    "no JSON object": [b'["text"]', b'"text"', b"3", b"null"],
    "no JSON": [b"{", b"text", b'{"text": "x",}', b"[" * 100_000, b"9" * 5000],
}
BAD_PAIRS = {
    "missing field 'chosen'": [b'{"prompt": "x", "rejected": "y"}'],
    "answers with labels, which no script reads; must be chosen and rejected": [
        b'{"prompt": "x", "completion": "y", "label": true}',
        b'{"prompt": "x", "completions": ["y"], "labels": [true]}',
    ],
    "missing field 'rejected'": [b'{"prompt": "x", "chosen": "y"}'],
    "missing field 'prompt'": [b'{"chosen": "x", "rejected": "y"}'],
    "field 'prompt' is no text": [b'{"prompt": {"a": 3}, "chosen": "x", "rejected": "y"}'],
    "empty answer": [
        b'{"prompt": "x", "chosen": "", "rejected": "y"}',
        b'{"prompt": "x", "chosen": "y", "rejected": [{"role": "assistant", "content": " "}]}',
    ],
    "identical chosen and rejected": [
        b'{"prompt": "x", "chosen": "y", "rejected": "y"}',
        b'{"chosen": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "y"}], '
        b'"rejected": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "y"}]}',
    ],
    "chosen and rejected differ before their last turn": [
        b'{"chosen": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "y"}], '
        b'"rejected": [{"role": "assistant", "content": "z"}]}'
    ],
    "chosen or rejected does not end with the assistant's turn": [
        b'{"prompt": "x", "chosen": [{"role": "user", "content": "u"}], '
        b'"rejected": [{"role": "user", "content": "u"}]}',
        b'{"prompt": "x", "chosen": [], "rejected": []}',
    ],
    "unknown role 'bard'": [
        b'{"prompt": [{"role": "bard", "content": "x"}], "chosen": "x", "rejected": "y"}'
    ],
}


KINDS = [
    (S.row_turns, BAD_TURNS, b'{"text": "good"}'),
    (S.row_pair, BAD_PAIRS, b'{"prompt": "x", "chosen": "good", "rejected": "bad"}'),
]


@pytest.mark.parametrize(("parse", "bad", "good"), KINDS, ids=["turns", "pairs"])
def test_each_malformed_kind_is_counted_named_and_survived(parse, bad, good, tmp_path):
    """Blank lines are counted as lines, not as rows."""
    rows = [b" ", good]
    expected = []
    again = []  # numbers of the lines that are equal to the first
    for fault, lines in bad.items():
        numbers = range(len(rows) + 1, len(rows) + 1 + len(lines))
        expected.append(f"{fault}: {len(lines)} {S.places([*numbers])}")
        rows += [*lines, good]
        again.append(len(rows))
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\r\n".join([*rows, b"", b"  "]))
    log = []
    kind, item = parse(json.loads(good), set())
    count = len(bad) + 1
    assert S.read_rows(str(path), parse, log.append) == [item] * count
    counts = f"{len(rows) - 1} rows, used {count} {kind}; left out {'; '.join(expected)}"
    counts += f"; {len(again)} stand twice (the first are rows {str(again[:3])[1:-1]})"
    assert [*map(str, log)] == [f"data: {path}: {counts}"]
    for fault, lines in bad.items():  # each alone
        for line in lines:
            path.write_bytes(line)
            if line.startswith(b'["'):  # a file that is one JSON list
                fault = "no JSON object"
            assert refusal(S.UserError, "", S.read_rows, str(path), parse, log.append) == (
                f"{path}: 1 rows, used none; left out {fault}: 1 (the first is row 1); must "
                "hold one usable row at least"
            )
    assert len(log) == 1


def test_files_of_every_kind_give_the_same_rows(tmp_path):
    rows = [{"prompt": f"p{i}", "completion": "größer 日本"} for i in range(5)]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    listed = json.dumps(rows).encode()
    mark = b"\xef\xbb\xbf"
    kinds = {
        "a.jsonl": lines,
        "b.json": json.dumps(rows, indent=1).encode(),
        "c.json": b" \n" + listed,
        "d.jsonl.zst": zstandard.compress(lines),
        "e.json.zst": zstandard.compress(listed),
        "f.jsonl.zst": zstandard.compress(lines[:100]) + zstandard.compress(lines[100:]),
        "h.jsonl": mark + lines,
        "i.json": mark + listed,
        "j.jsonl.gz": gzip.compress(mark + lines.replace(b"\n", b"\r\n")),
    }
    turns = [[(USER, f"p{i}"), (ASSISTANT, "größer 日本")] for i in range(5)]
    for name, content in kinds.items():
        path = tmp_path / name
        path.write_bytes(content)
        log = []
        assert S.read_rows(str(path), S.row_turns, log.append) == turns
        [line] = map(str, log)
        assert line == f"data: {path}: 5 rows, used 5 prompt/completion; left out none"
    mixed = [rows[0], {"text": "t"}, 3, {"question": "q", "answer": "a"}, {"text": "u"}]
    path = tmp_path / "g.json"
    path.write_text(json.dumps(mixed))
    log = []
    assert len(S.read_rows(str(path), S.row_turns, log.append)) == 4
    counts = "used 2 prompt/completion, 2 text; left out no JSON object: 1 (the first is row 3)"
    assert str(log[0]) == f"data: {path}: 5 rows, {counts}"
    path.write_text(json.dumps(rows[0], indent=1))  # one object is one row, as in datasets
    assert S.read_rows(str(path), S.row_turns, log.append) == turns[:1]


def test_a_table_is_read_without_nulls(tmp_path):
    """In a column of structs each has the fields of all of them: arguments of other calls."""
    pq = pytest.importorskip("pyarrow.parquet")
    path = str(tmp_path / "a.parquet")
    calls = [{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {"y": [None, 2]}}]
    rows = [{"prompt": [{**said(None), "tool_calls": [call]}]} for call in calls]
    rows[0]["day"] = None
    rows[1]["day"] = date(2026, 1, 2)
    pq.write_table(pytest.importorskip("pyarrow").Table.from_pylist(rows), path)
    prompts = [[{"role": "assistant", "tool_calls": [call]}] for call in calls]
    assert S.file_rows(path) == [
        {"prompt": prompts[0]},
        {"prompt": prompts[1], "day": "2026-01-02"},
    ]


def test_a_table_needs_pyarrow(tmp_path, monkeypatch):
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1")
    monkeypatch.setattr(S.importlib.util, "find_spec", lambda name: None)
    line = refusal(S.UserError, "", S.file_rows, str(path))
    assert line == f"{path}: Parquet needs pyarrow: pip install pyarrow"


FILES = {"none.jsonl": None, "a.zst": b"not compressed at all", "empty": b""}
FILES |= {"a.gz": b"not compressed at all", "cut.gz": gzip.compress(b"x" * 9999)[:20]}
FILES |= {"a.parquet": b"PAR1", "folder": None}
FILES["cut.zst"] = zstandard.compress(b"x" * 9999)[:20]


@pytest.mark.parametrize("name", FILES)
def test_files_without_rows_are_refused(name, tmp_path):
    path = str(tmp_path / name)
    if FILES[name] is not None:
        (tmp_path / name).write_bytes(FILES[name])
    elif name == "folder":
        path = str(tmp_path)
    assert refusal(S.UserError, "", S.read_rows, path, S.row_turns, print).startswith(f"{path}:")


# ---------------------------------------------------------------------------------------------- ids
TALK = [(SYSTEM, "s"), (USER, "hi é"), (ASSISTANT, "ho"), (USER, ""), (ASSISTANT, "<|end|>")]


@pytest.fixture(params=["bytes", "own", "prefix", "tiktoken"])
def tokenizer(request, tmp_path, monkeypatch):
    """Return one with role tokens: of its own, or four more."""
    if request.param == "bytes":
        return BYTES
    if request.param == "own":  # as data/prepare.py trains them
        return S.load_tokenizer(train_model(tmp_path / "own.model"))
    if request.param == "prefix":  # puts a space before every text
        changes = dict(add_dummy_prefix=True, control_symbols=[])
        return S.with_roles(S.load_tokenizer(train_model(tmp_path / "prefix.model", **changes)))
    return S.with_roles(S.load_tokenizer(fake_encoding(monkeypatch, S, tmp_path)))


def test_ids_of_turns_part_by_part(tokenizer):
    roles = tokenizer.roles
    special = {*roles.values(), tokenizer.bos_id}
    assert [*roles] == list(S.ROLE_TOKENS) and len(special) == 5
    talks = [TALK, [("", "the cat")]]
    for text in HARD_TEXTS:
        if not tokenizer.file.endswith("tiktoken") or not {"\n", "\r"} & {*text}:
            talks.append([(USER, text), (ASSISTANT, text), (USER, "then")])
    for turns in talks:
        expected, mask = [tokenizer.bos_id], [False]
        for role, text in turns:
            body = tokenizer.encode(text)
            assert not special & {*body}  # what looks like a role token is text
            expected += [roles[role], *body, roles[END]] if role else [*body, tokenizer.bos_id]
            mask += [False] * bool(role) + [role in ("", ASSISTANT)] * (len(body) + 1)
        assert F.turn_ids(tokenizer, turns) == (expected, mask)
    ids, _ = F.turn_ids(tokenizer, [(USER, "the cat")])
    prompt = [*ids, roles[ASSISTANT]]
    assert S.stop_ids(tokenizer) >= {roles[END], tokenizer.bos_id}
    assert S.asked_ids(tokenizer, [("<|user|>", "the cat")]) == prompt
    assert S.prompt_ids(tokenizer, [(USER, "the cat")], "chat") == prompt


def test_roles_are_added_once(tokenizer):
    assert S.with_roles(tokenizer) is tokenizer
    size = tokenizer.vocab_size - 4
    if tokenizer.roles[SYSTEM] == size and tokenizer.file != "bytes":
        assert [*tokenizer.roles.values()] == [*range(size, size + 4)]
        assert tokenizer.boundary[-4:].all() and not tokenizer.drops_space[-4:].any()


# ------------------------------------------------------------------------------- grown vocabularies
@pytest.mark.parametrize("tied", [True, False])
def test_a_network_grows_by_role_tokens_and_is_found_again(tied, tmp_path):
    bare = S.load_tokenizer(train_model(tmp_path / "bare.model", control_symbols=[]))
    net = network(0, bare, tie_embeddings=tied)
    ids = torch.tensor([[1, 7, 9, 11]])
    before = net(ids)
    embed = net.embed.detach().clone()
    grown = F.grow_roles(net, bare)
    assert grown.vocab_size == net.config.vocab_size == bare.vocab_size + 4 == len(net.embed)
    assert np.array_equal(grown.drops_space[:-4], bare.drops_space)
    assert torch.equal(net.embed[:-4], embed)
    torch.testing.assert_close(net.embed[-4:], embed.mean(0).expand(4, -1))
    torch.testing.assert_close(net(ids)[..., :-4], before, rtol=0, atol=1e-6)
    assert (net.head is None) == tied and (tied or len(net.head) == grown.vocab_size)
    assert F.grow_roles(net, grown) is grown and len(net.embed) == grown.vocab_size
    place = save(tmp_path / "run", 5, net, grown)
    artifact, values = pack(tmp_path / "packed", net, grown)
    for path in (place, artifact, place.parent, artifact.parent):
        loaded, tokenizer, _ = S.load_model("ARTIFACT", str(path))
        assert (tokenizer.pieces, tokenizer.roles) == (grown.pieces, grown.roles)
        assert tokenizer.sha256 == bare.sha256 and not hasattr(loaded, "w_value")
        is_packed = path in (artifact, artifact.parent)
        assert torch.equal(loaded.embed, values["embed"] if is_packed else net.embed)


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


def as_bytes(text):
    return [byte + 4 for byte in text.encode()]


def prompt_of(*turns):
    return S.prompt_ids(BYTES, [*turns], "chat")


@pytest.fixture
def talk(monkeypatch, capsys, tmp_path):
    """Return a function: what chat writes to both streams, and the prompts of a scripted model."""
    net = network(0, tie_embeddings=False)  # tied, it would repeat what it reads
    net.head.data.mul_(10)
    artifact, _ = pack(tmp_path, net)

    def run(lines, answers=None, **changes):
        if answers is not None:
            Scripted.answers, Scripted.prompts = answers, []
            monkeypatch.setattr(S, "Decoder", Scripted)
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(line + "\n" for line in lines)))
        given = {"artifact": str(artifact), "device": "cpu", **changes}
        S.chat(S.Settings(mode="chat", **given))
        return *capsys.readouterr(), Scripted.prompts

    return run


def test_a_chat_with_tools_has_the_turns_of_a_row(talk, tmp_path):
    """The model calls a tool in text, and /tool is its result: ids are those that train_sft.py learns."""
    path = tmp_path / "tools.json"
    path.write_text(json.dumps(TOOLS))
    row = json.loads(json.dumps(CALLS))
    row["messages"].insert(0, said("s", "system"))
    ids, _ = F.turn_ids(BYTES, S.row_turns(row, set())[1])
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    artifact, _ = pack(tmp_path / "long", network(0, train_seq_len=1024))
    given = dict(tools=str(path), system="s", max_new_tokens=200, artifact=str(artifact))
    answers = [BYTES.encode(text) for text in (call, "b")]
    _, _, prompts = talk(["u", "/tool sunny"], answers, **given)
    assert len(prompts) == 2 and prompts[1] == ids[: len(prompts[1])]
    assert ids[len(prompts[1]) :] == [*BYTES.encode("b"), BYTES.roles[END]]
    for text, fault in (("{", "no JSON"), ("3", "field 'tools' is no list of tools")):
        path.write_text(text)
        message = refusal(S.UserError, "", talk, ["u"], ["a"], tools=str(path))
        assert message.startswith(f"TOOLS={str(path)!r}: must be") and fault in message


def test_a_chat_keeps_its_history_until_it_is_reset(talk):
    answers = [as_bytes("one"), as_bytes("zwölf"), as_bytes("3")]
    out, err, prompts = talk(["a", "", "b", "/reset", "c"], answers, system="S")
    assert (out, err) == ("one\nzwölf\n3\n", "[what was said is forgotten]\n")
    turns = [(SYSTEM, "S"), (USER, "a"), (ASSISTANT, "one"), (USER, "b")]
    third = prompt_of((SYSTEM, "S"), (USER, "c"))
    assert prompts == [prompt_of(*turns[:2]), prompt_of(*turns), third]
    assert prompts[0] == [1, 260, 87, 263, 261, 101, 263, 262]


def test_a_character_is_written_when_it_is_whole(talk, monkeypatch):
    written = []
    monkeypatch.setattr(S, "print", lambda text, **_: written.append(text), raising=False)
    answers = [as_bytes("é\U0001f600x"), as_bytes("\U0001f600")[:3]]
    talk(["a", "b"], answers, max_new_tokens=20)
    assert written == ["é", "\U0001f600", "x", "", "\ufffd"]


def test_ctrl_c_ends_the_answer_and_what_was_said_stays(talk, monkeypatch):
    out, err, prompts = talk(["a", "b"], [[*as_bytes("yes"), "^C"], as_bytes("no")])
    assert (out, err) == ("yes\nno\n", " [stopped]")
    assert prompts[1] == prompt_of((USER, "a"), (ASSISTANT, "yes"), (USER, "b"))

    def interrupted(prompt):
        raise KeyboardInterrupt

    monkeypatch.setattr(S, "input", interrupted, raising=False)
    assert talk(["a"], [])[:2] == ("", "")  # between two answers it ends the program


def test_the_oldest_turns_give_way_when_the_context_is_full(talk):
    """A context of 64 tokens, 8 for the answer; turns of 12, answers of 5, BOS, the system's 3."""
    lines = ["0123456789"] * 4 + ["x" * 60, "y"]
    out, err, prompts = talk(lines, [as_bytes("abc")] * 6, system="S", max_new_tokens=8)
    assert out == "abc\n" * 5
    pair = [(USER, "0123456789"), (ASSISTANT, "abc")]
    counts = (0, 1, 2, 2)
    expected = [prompt_of((SYSTEM, "S"), *pair * count, pair[0]) for count in counts]
    assert prompts[:4] == expected and [len(ids) for ids in expected] == [17, 34, 51, 51]
    assert prompts[4:] == [prompt_of((SYSTEM, "S"), *pair, *pair, (USER, "y"))]
    assert err == (
        "[the context is full: the oldest 2 turns are forgotten]\n"
        "[left out: with 8 tokens to answer it exceeds the context of 64]\n"
        "[the context is full: the oldest 2 turns are forgotten]\n"
    )


def test_an_answer_is_what_generate_draws(talk, tmp_path):
    """By a real network: token by token the same text as all at once, for two turns."""
    lines = ["hello", "again"]
    out, err, _ = talk(lines, seed=5, max_new_tokens=6, temperature=1.0)
    net, *_ = S.load_model("ARTIFACT", str(tmp_path / "model.upar"))
    turns = []
    for number, line in enumerate(lines):
        turns.append((USER, line))
        prompt = prompt_of(*turns)
        stop = frozenset([263, 1])
        truncate = S.truncation(S.Settings())
        [one] = S.generate(net, [prompt], 1, 6, 1.0, [(5, number)], stop, truncate)
        ids = one.ids[:-1] if one.finished else one.ids
        turns.append((ASSISTANT, S.completion(BYTES, prompt, ids)))
    assert (out, err) == (f"{turns[1][1]}\n{turns[3][1]}\n", "") and len(out) > 4


def test_a_tokenizer_without_roles_has_lines(tmp_path):
    bare = S.load_tokenizer(train_model(tmp_path / "bare.model", control_symbols=[]))
    turns = [(USER, "the cat"), (ASSISTANT, "sat"), (USER, "on")]
    assert S.prompt_ids(bare, turns, "chat") == [1, *bare.encode("the cat\nsat\non\n")]
    assert S.stop_ids(bare) == {1, 2}
    assert S.answer_ids(bare, turns, "it") == [*bare.encode("it"), 1]


def test_a_whole_process_with_a_signal(tmp_path):
    """Input has bytes that are no UTF-8; SIGINT ends the first, endless answer alone."""
    net = network(0, tie_embeddings=False, train_seq_len=1 << 17)
    # Of two letters, whose logits have opposite signs, one is always the likeliest.
    with torch.no_grad():
        net.head.zero_()
        net.head[as_bytes("xy")] = torch.randn(32) * torch.tensor([[1.0], [-1.0]])
    artifact, _ = pack(tmp_path, net)
    environ = environment(ARTIFACT=artifact, MODE="chat", MAX_NEW_TOKENS=1 << 16, TEMPERATURE=0)
    # What runs in the background ignores SIGINT.
    heard = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    command = [sys.executable, ROOT / "sample.py"]
    child = subprocess.Popen(command, env=environ, preexec_fn=heard, **pipes)
    try:
        child.stdin.write(b"go \xff on\n")
        child.stdin.flush()
        assert os.read(child.stdout.fileno(), 1) in b"xy"
        child.send_signal(signal.SIGINT)
        assert os.read(child.stderr.fileno(), 100).startswith(b" [stopped]")
        _, err = child.communicate(b"/reset\n", timeout=60)
        assert (child.returncode, err) == (0, b"[what was said is forgotten]\n")
    finally:
        child.kill()
        child.wait()
