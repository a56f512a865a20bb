"""Rows to turns and pairs, malformed rows, ids of turns, grown vocabularies (sections chat, conversations, preferences,
finetuning); sample.py's chat."""

from __future__ import annotations

import functools
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import zstandard
from test_data import HARD_TEXTS, fake_encoding, train_model
from test_weights import network, pack, save

import sample as S
import train_sft as F
from conftest import environment

ROOT = Path(__file__).resolve().parents[1]
SYSTEM, USER, ASSISTANT, END = S.ROLE_TOKENS
BYTES = S.load_tokenizer("bytes")
IDS = dict(
    zip(S.ROLE_TOKENS, range(260, 264), strict=True)
)  # of BYTES; a byte b is token b + 4, BOS is 1


# ----------------------------------------------------------------------------------------------------- rows to turns
@pytest.mark.parametrize(
    ("row", "kind", "turns"),
    [
        (
            {"instruction": "Add.", "input": "1 2", "output": "3"},
            "Alpaca",
            [(USER, "Add.\n\n1 2"), (ASSISTANT, "3")],
        ),
        (
            {"instruction": "Add 1 2.", "input": "", "output": "3"},
            "Alpaca",
            [(USER, "Add 1 2."), (ASSISTANT, "3")],
        ),
        (
            {"instruction": "", "input": "1 2", "output": "3"},
            "Alpaca",
            [(USER, "1 2"), (ASSISTANT, "3")],
        ),
        (
            {"instruction": "Hi", "input": None, "output": "3"},
            "Alpaca",
            [(USER, "Hi"), (ASSISTANT, "3")],
        ),
        (
            {"instruction": "Hi", "output": " Ho ", "id": 7},
            "Alpaca",
            [(USER, "Hi"), (ASSISTANT, " Ho ")],
        ),
        (
            {"question": "1+1?", "answer": "2 #### 2"},
            "prompt/completion",
            [(USER, "1+1?"), (ASSISTANT, "2 #### 2")],
        ),
        ({"prompt": "a", "completion": "b"}, "prompt/completion", [(USER, "a"), (ASSISTANT, "b")]),
        ({"prompt": "a", "response": "b"}, "prompt/completion", [(USER, "a"), (ASSISTANT, "b")]),
        ({"prompt": "a", "answer": "b"}, "prompt/completion", [(USER, "a"), (ASSISTANT, "b")]),
        (
            {
                "messages": [
                    {"role": "system", "content": "s"},
                    {"role": "user", "content": "u"},
                    {"role": "assistant", "content": "a"},
                    {"role": "user", "content": ""},
                    {"role": "assistant", "content": "b"},
                ]
            },
            "messages",
            [(SYSTEM, "s"), (USER, "u"), (ASSISTANT, "a"), (USER, ""), (ASSISTANT, "b")],
        ),
        (
            {
                "conversations": [
                    {"from": "system", "value": "s"},
                    {"from": "human", "value": "h"},
                    {"from": "function_call", "value": "f()"},
                    {"from": "observation", "value": "1"},
                    {"from": "tool", "value": "2"},
                    {"from": "gpt", "value": "g"},
                ]
            },
            "ShareGPT",
            [
                (SYSTEM, "s"),
                (USER, "h"),
                (ASSISTANT, "f()"),
                (USER, "1"),
                (USER, "2"),
                (ASSISTANT, "g"),
            ],
        ),
        ({"text": "Once.\n"}, "text", [("", "Once.\n")]),
    ],
)
def test_rows_become_turns(row, kind, turns):
    assert S.row_turns(row) == (kind, turns)


U, A = {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}


def said(text: str) -> dict:
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    ("row", "kind", "before"),
    [
        ({"prompt": "u", "chosen": "c", "rejected": "r"}, "prompt/chosen/rejected", [(USER, "u")]),
        (
            {"prompt": "u", "chosen": [said("c")], "rejected": [said("r")]},
            "prompt/chosen/rejected",
            [(USER, "u")],
        ),
        (
            {"prompt": [U, A, U], "chosen": "c", "rejected": "r"},
            "messages",
            [(USER, "u"), (ASSISTANT, "a"), (USER, "u")],
        ),
        ({"prompt": [U], "chosen": [said("c")], "rejected": "r"}, "messages", [(USER, "u")]),
        ({"chosen": [U, said("c")], "rejected": [U, said("r")]}, "messages", [(USER, "u")]),
        (
            {
                "prompt": "u",
                "chosen": [U, said("c")],
                "rejected": [U, said("r")],
            },  # the prompt again, as UltraFeedback has it
            "prompt/chosen/rejected",
            [(USER, "u")],
        ),
        (
            {
                "prompt": [U, A],
                "chosen": [U, said("c")],
                "rejected": [U, said("r")],
            },  # what goes on from it
            "messages",
            [(USER, "u"), (ASSISTANT, "a"), (USER, "u")],
        ),
    ],
)
def test_rows_become_pairs(row, kind, before):
    assert S.row_pair(row) == (kind, (before, "c", "r"))


# --------------------------------------------------------------------------------------------------------- malformed
def line(**row: object) -> bytes:
    return json.dumps(row).encode()


BAD_TURNS = {
    "missing field 'output'": [line(instruction="x"), line(instruction="x", input="y")],
    "missing field 'completion' or 'response' or 'answer'": [line(prompt="x")],
    "missing field 'content' or 'value'": [line(messages=[{"role": "user"}])],
    "missing field 'role' or 'from'": [line(messages=[{"content": "x"}])],
    "empty answer": [
        line(prompt="x", completion=" \n"),
        line(text=""),
        line(messages=[U, said("")]),
        line(conversations=[{"from": "gpt", "value": " "}, {"from": "gpt", "value": "x"}]),
    ],
    "unknown role 'narrator'": [line(messages=[{"role": "narrator", "content": "x"}])],
    "no turn of the assistant": [line(messages=[U]), line(conversations=[])],
    "field 'messages' is no list of messages": [line(messages="x"), line(messages=[["user", "x"]])],
    "field 'completion' is no text": [
        line(prompt="x", completion=3),
        line(prompt="x", completion=None),
    ],
    "field 'prompt' is no text": [
        line(prompt=None, completion="x"),
        line(prompt=[], completion="x"),
    ],
    "no known format, fields 'a, b'": [line(b=1, a=2)],
    "invalid UTF-8": [b'{"text": "caf\xe9"}', b"\xff\xfe"],
    "half a surrogate pair, which is no Unicode": [
        b'{"text": "x \\ud83d y"}',
        line(prompt="\udc00", completion="y"),
    ],
    "no JSON object": [b'["text"]', b'"text"', b"3", b"null"],
    "no JSON": [b"{", b"text", b'{"text": "x",}', b"[" * 100_000, b"9" * 5000],
}
BAD_PAIRS = {
    "missing field 'chosen'": [line(prompt="x", rejected="y")],
    "missing field 'rejected'": [line(prompt="x", chosen="y")],
    "missing field 'prompt'": [line(chosen="x", rejected="y")],
    "field 'prompt' is no text": [line(prompt=3, chosen="x", rejected="y")],
    "empty answer": [
        line(prompt="x", chosen="", rejected="y"),
        line(prompt="x", chosen="y", rejected=[said(" ")]),
    ],
    "identical chosen and rejected": [
        line(prompt="x", chosen="y", rejected="y"),
        line(chosen=[U, said("y")], rejected=[U, said("y")]),
    ],
    "chosen and rejected differ before their last turn": [
        line(chosen=[U, said("y")], rejected=[said("z")])
    ],
    "chosen or rejected does not end with the assistant's turn": [
        line(prompt="x", chosen=[U], rejected=[U]),
        line(prompt="x", chosen=[], rejected=[]),
    ],
    "unknown role 'bard'": [
        line(prompt=[{"role": "bard", "content": "x"}], chosen="x", rejected="y")
    ],
}


@pytest.mark.parametrize(
    ("parse", "bad", "good"),
    [
        (S.row_turns, BAD_TURNS, line(text="good \U0001f600")),
        (S.row_pair, BAD_PAIRS, line(prompt="x", chosen="good", rejected="bad")),
    ],
    ids=["turns", "pairs"],
)
def test_each_malformed_kind_is_counted_named_and_survived(parse, bad, good, tmp_path):
    rows, expected, number = [good], [], 1
    for kind, lines in bad.items():
        expected.append(f"{kind}: {len(lines)} (the first is row {len(rows) + 1})")
        rows += [*lines, good]
    path, log = tmp_path / "rows.jsonl", []
    path.write_bytes(b"\r\n".join([*rows, b"", b"  "]))
    found = S.read_rows(str(path), parse, log.append)
    kind, item = parse(json.loads(good))
    assert found == [item] * (len(bad) + number)
    assert log == [
        f"data: {path}: {len(rows)} rows, used {len(bad) + 1} {kind}; left out {'; '.join(expected)}"
    ]
    for kind, lines in bad.items():  # each alone
        for one in lines:
            path.write_bytes(one)
            with pytest.raises(S.UserError) as error:
                S.read_rows(str(path), parse, log.append)
            if one.startswith(b'["'):  # a file that is one JSON list
                kind = "no JSON object"
            assert str(error.value) == (
                f"{path}: 1 rows, used none; left out {kind}: 1 (the first is row 1); must "
                "hold one usable row at least"
            )
    assert len(log) == 1


def test_files_of_every_kind_give_the_same_rows(tmp_path):
    rows, log = [{"prompt": f"p{at}", "completion": "größer 日本"} for at in range(5)], []
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    kinds = {
        "a.jsonl": lines,
        "b.json": json.dumps(rows, indent=1).encode(),
        "c.json": b" \n" + json.dumps(rows).encode(),
        "d.jsonl.zst": zstandard.compress(lines),
        "e.json.zst": zstandard.compress(json.dumps(rows).encode()),
        "f.jsonl.zst": zstandard.compress(lines[:100]) + zstandard.compress(lines[100:]),
        "h.jsonl": b"\xef\xbb\xbf" + lines,
        "i.json": b"\xef\xbb\xbf" + json.dumps(rows).encode(),
    }
    for name, content in kinds.items():
        (tmp_path / name).write_bytes(content)
        found = S.read_rows(str(tmp_path / name), S.row_turns, log.append)
        assert found == [[(USER, row["prompt"]), (ASSISTANT, "größer 日本")] for row in rows]
        assert (
            log.pop() == f"data: {tmp_path / name}: 5 rows, used 5 prompt/completion; left out none"
        )
    mixed = [rows[0], {"text": "t"}, 3, {"question": "q", "answer": "a"}, {"text": "u"}]
    (tmp_path / "g.json").write_text(json.dumps(mixed))
    assert len(S.read_rows(str(tmp_path / "g.json"), S.row_turns, log.append)) == 4
    assert log.pop() == (
        f"data: {tmp_path / 'g.json'}: 5 rows, used 2 prompt/completion, 2 text; "
        "left out no JSON object: 1 (the first is row 3)"
    )


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("none.jsonl", None),
        ("a.zst", b"not compressed at all"),
        ("cut.zst", zstandard.compress(b"x" * 9999)[:20]),
        ("empty", b""),
    ],
)
def test_files_without_rows_are_refused(name, content, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(S.UserError) as error:
        S.read_rows(str(tmp_path / name), S.row_turns, print)
    assert str(error.value).startswith(str(tmp_path / name) + ":") and "\n" not in str(error.value)


# --------------------------------------------------------------------------------------------------------------- ids
TALK = [(SYSTEM, "s"), (USER, "hi é"), (ASSISTANT, "ho"), (USER, ""), (ASSISTANT, "<|end|>")]


def test_ids_of_turns_by_hand():
    ids, said = S.turn_ids(BYTES, TALK[:3])
    assert ids == [
        1,
        260,
        119,
        263,
        261,
        *(b + 4 for b in "hi é".encode()),
        263,
        262,
        108,
        115,
        263,
    ]
    assert said == [False] * (1 + 3 + 7 + 1) + [True] * 3  # "ho" and its end; not the role token
    ids, said = S.turn_ids(BYTES, [("", "ab")])
    assert (ids, said) == ([1, 101, 102, 1], [False, True, True, True])
    ids, said = S.turn_ids(BYTES, [])
    assert (ids, said) == ([1], [False])


@pytest.fixture(params=["bytes", "own", "prefix", "tiktoken"])
def tokenizer(request, tmp_path, monkeypatch) -> S.Tokenizer:
    """With role tokens: of its own, or four more."""
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
    assert [*roles] == list(S.ROLE_TOKENS) and len({*roles.values(), tokenizer.bos_id}) == 5
    texts = [
        text
        for text in HARD_TEXTS
        if not {"\n", "\r"} & {*text} or not tokenizer.file.endswith("tiktoken")
    ]
    talks = [
        TALK,
        *([(USER, text), (ASSISTANT, text), (USER, "then")] for text in texts),
        [("", "the cat")],
    ]
    for turns in talks:
        ids, said = S.turn_ids(tokenizer, turns)
        expected, mask = [tokenizer.bos_id], [False]
        for role, text in turns:
            body = tokenizer.encode(text)
            assert not {*roles.values(), tokenizer.bos_id} & {
                *body
            }  # what looks like a role token is text
            expected += [roles[role], *body, roles[END]] if role else [*body, tokenizer.bos_id]
            mask += (
                [False, *[role == ASSISTANT] * (len(body) + 1)]
                if role
                else [True] * (len(body) + 1)
            )
        assert (ids, said) == (expected, mask)
    prompt, end = S.chat_ids(tokenizer, "the cat")
    assert (prompt, end) == (
        [*S.turn_ids(tokenizer, [(USER, "the cat")])[0], roles[ASSISTANT]],
        roles[END],
    )
    assert S.prompt_ids(tokenizer, [(USER, "the cat")], "chat") == (prompt, end)


def test_roles_are_added_once(tokenizer):
    assert S.with_roles(tokenizer) is tokenizer
    grown = tokenizer.roles[SYSTEM] == tokenizer.vocab_size - 4 and tokenizer.file != "bytes"
    bare = (
        S.load_tokenizer("bytes")
        if not grown
        else S.replace(
            tokenizer,
            pieces=tokenizer.pieces[:-4],
            drops_space=tokenizer.drops_space[:-4],
            roles={},
        )
    )
    if grown:
        assert bare.roles == {} and bare.vocab_size == tokenizer.vocab_size - 4
        assert [*tokenizer.roles.values()] == [*range(bare.vocab_size, bare.vocab_size + 4)]
        assert tokenizer.sha256 == bare.sha256 and tokenizer.boundary[-4:].all()
        assert not tokenizer.drops_space[-4:].any()
        assert np.array_equal(tokenizer.drops_space[:-4], bare.drops_space)


# -------------------------------------------------------------------------------------------------- grown vocabularies
@pytest.mark.parametrize("tied", [True, False])
def test_a_network_grows_by_role_tokens_and_is_found_again(tied, tmp_path):
    bare = S.load_tokenizer(train_model(tmp_path / "bare.model", control_symbols=[]))
    net = network(0, bare, tie_embeddings=tied)
    before, ids = net(torch.tensor([[1, 7, 9, 11]])), torch.tensor([[1, 7, 9, 11]])
    embed = net.embed.detach().clone()
    grown = F.grow_roles(net, bare)
    assert grown.vocab_size == net.config.vocab_size == bare.vocab_size + 4 == len(net.embed)
    assert torch.equal(net.embed[:-4], embed) and torch.allclose(
        net.embed[-4:], embed.mean(0).expand(4, -1)
    )
    torch.testing.assert_close(net(ids)[..., :-4], before, rtol=0, atol=1e-6)
    assert (net.head is None) == tied and (tied or len(net.head) == grown.vocab_size)
    assert F.grow_roles(net, grown) is grown and len(net.embed) == grown.vocab_size
    place = save(tmp_path / "run", 5, net, grown)
    artifact, values = pack(tmp_path / "packed", net, grown)
    for path in (place, artifact, tmp_path / "run", tmp_path / "packed"):
        found, tokenizer, _ = S.load_model("ARTIFACT", str(path))
        assert (
            tokenizer.pieces == grown.pieces and tokenizer.roles and tokenizer.sha256 == bare.sha256
        )
        assert not hasattr(found, "w_value")
        assert torch.equal(
            found.embed, values["embed"] if path in (artifact, tmp_path / "packed") else net.embed
        )
        assert tokenizer.roles == grown.roles


def test_a_tokenizer_with_roles_grows_nothing():
    net = network(0)
    assert F.grow_roles(net, BYTES) is BYTES and len(net.embed) == net.config.vocab_size == 264


def test_a_value_head_goes_through_checkpoint_and_artifact(tmp_path):
    net, ids = network(0), torch.tensor([[1, *range(70, 110)]])
    S.add_value_head(net)
    assert net.w_value.shape == (32,) and not net.w_value.any() and net.w_value.requires_grad
    with torch.no_grad():
        net.w_value.normal_()
    place, (artifact, _) = save(tmp_path / "run", 5, net), pack(tmp_path / "packed", net)
    found, *_ = S.load_model("ARTIFACT", str(place))
    with torch.no_grad():
        assert torch.equal(found.w_value, net.w_value)
        assert torch.equal(found.features(ids) @ found.w_value, net.features(ids) @ net.w_value)
        assert torch.equal(found(ids), net(ids))  # the head changes no logit
    packed, *_ = S.load_model("ARTIFACT", str(artifact))
    torch.testing.assert_close(packed.w_value, net.w_value, rtol=1e-3, atol=1e-6)


# -------------------------------------------------------------------------------------------------------------- chat
class Scripted:
    """In Decoder's place: says the given answers, token by token, and keeps the prompts; "^C" is the user's."""

    answers: list[list] = []
    prompts: list[list[int]] = []

    def __init__(self, network: S.GPT, prompts: list[list[int]]):
        self.prompts.append(prompts[0])
        self.left = [*self.answers.pop(0)]
        self(None)

    def __call__(self, ids: torch.Tensor | None) -> None:
        token = self.left.pop(0) if self.left else IDS[END]
        if token == "^C":
            raise KeyboardInterrupt
        self.logits = torch.eye(264)[[token]] * 100


def as_bytes(text: str) -> list[int]:
    return [byte + 4 for byte in text.encode()]


def talk(
    monkeypatch,
    capsys,
    folder: Path,
    lines: list[str],
    answers: list[list] | None = None,
    **changes: object,
) -> tuple[str, str, list[list[int]]]:
    """What chat writes to both streams for these lines, and the prompts of a scripted model."""
    net = network(0, tie_embeddings=False)  # tied, it would repeat what it reads
    net.head.data.mul_(10)
    artifact, _ = pack(folder, net)
    if answers is not None:
        Scripted.answers, Scripted.prompts = answers, []
        monkeypatch.setattr(S, "Decoder", Scripted)
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(line + "\n" for line in lines)))
    S.chat(S.Settings(mode="chat", artifact=str(artifact), device="cpu", **changes))
    return *capsys.readouterr(), Scripted.prompts


def test_a_chat_keeps_its_history_until_it_is_reset(monkeypatch, capsys, tmp_path):
    answers = [as_bytes("one"), as_bytes("zwölf"), as_bytes("3")]
    out, err, prompts = talk(
        monkeypatch, capsys, tmp_path, ["a", "", "b", "/reset", "c"], answers, system="S"
    )
    assert (out, err) == ("one\nzwölf\n3\n", "[what was said is forgotten]\n")
    turns = [(SYSTEM, "S"), (USER, "a"), (ASSISTANT, "one"), (USER, "b")]
    assert prompts == [
        S.prompt_ids(BYTES, own, "chat")[0]
        for own in (turns[:2], turns, [(SYSTEM, "S"), (USER, "c")])
    ]
    assert prompts[0] == [1, 260, 87, 263, 261, 101, 263, 262]


def test_a_character_is_written_when_it_is_whole(monkeypatch, capsys, tmp_path):
    written = []
    monkeypatch.setattr(S, "print", lambda text, **_: written.append(text), raising=False)
    text = "é\U0001f600x"
    talk(
        monkeypatch,
        capsys,
        tmp_path,
        ["a", "b"],
        [as_bytes(text), as_bytes("\U0001f600")[:3]],
        max_new_tokens=20,
    )
    assert written == ["é", "\U0001f600", "x", "", "\ufffd"]


def test_ctrl_c_ends_the_answer_and_what_was_said_stays(monkeypatch, capsys, tmp_path):
    out, err, prompts = talk(
        monkeypatch, capsys, tmp_path, ["a", "b"], [[*as_bytes("yes"), "^C"], as_bytes("no")]
    )
    assert (out, err) == ("yes\nno\n", " [stopped]")
    assert (
        prompts[1] == S.prompt_ids(BYTES, [(USER, "a"), (ASSISTANT, "yes"), (USER, "b")], "chat")[0]
    )

    def interrupted(prompt: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(S, "input", interrupted, raising=False)
    assert talk(monkeypatch, capsys, tmp_path, ["a"], [])[:2] == (
        "",
        "",
    )  # between two answers it ends the program


def test_the_oldest_turns_give_way_when_the_context_is_full(monkeypatch, capsys, tmp_path):
    """A context of 64 tokens, 8 for the answer: turns of 12 tokens, answers of 5, behind BOS and the system's 3."""
    answers = [as_bytes("abc")] * 6
    out, err, prompts = talk(
        monkeypatch,
        capsys,
        tmp_path,
        ["0123456789"] * 4 + ["x" * 60, "y"],
        answers,
        system="S",
        max_new_tokens=8,
    )
    assert out == "abc\n" * 5
    pair = [(USER, "0123456789"), (ASSISTANT, "abc")]
    histories = [[], pair, pair * 2, pair * 2]
    expected = [
        S.prompt_ids(BYTES, [(SYSTEM, "S"), *before, pair[0]], "chat")[0] for before in histories
    ]
    assert prompts[:4] == expected and [len(ids) for ids in expected] == [17, 34, 51, 51]
    assert prompts[4:] == [
        S.prompt_ids(BYTES, [(SYSTEM, "S"), *pair, *pair, (USER, "y")], "chat")[0]
    ]
    assert err == (
        "[the context is full: the oldest 2 turns are forgotten]\n"
        "[left out: with 8 tokens to answer it exceeds the context of 64]\n"
        "[the context is full: the oldest 2 turns are forgotten]\n"
    )


def test_an_answer_is_what_generate_draws(monkeypatch, capsys, tmp_path):
    """By a real network: token by token the same text as all at once, for two turns."""
    out, err, _ = talk(
        monkeypatch, capsys, tmp_path, ["hello", "again"], seed=5, max_new_tokens=6, temperature=1.0
    )
    net, *_ = S.load_model("ARTIFACT", str(tmp_path / "model.upar"))
    turns = []
    for number, line_ in enumerate(["hello", "again"]):
        prompt, end = S.prompt_ids(BYTES, [*turns, (USER, line_)], "chat")
        [one] = S.generate(net, [prompt], 1, 6, 1.0, 50, 1.0, [(5, number)], frozenset([end, 1]))
        ids = one.ids[:-1] if one.finished else one.ids
        turns += [(USER, line_), (ASSISTANT, S.completion(BYTES, prompt, ids))]
    assert (out, err) == (turns[1][1] + "\n" + turns[3][1] + "\n", "") and len(out) > 4


def test_a_tokenizer_without_roles_has_lines(tmp_path):
    bare = S.load_tokenizer(train_model(tmp_path / "bare.model", control_symbols=[]))
    assert S.prompt_ids(bare, [(USER, "the cat"), (ASSISTANT, "sat"), (USER, "on")], "chat") == (
        [1, *bare.encode("the cat\nsat\non\n")],
        1,
    )


def test_a_whole_process_with_a_signal(tmp_path):
    """Standard input is a pipe, with bytes that are no UTF-8; SIGINT ends the first, endless answer alone."""
    net = network(0, tie_embeddings=False, train_seq_len=1 << 17)
    with (
        torch.no_grad()
    ):  # of two letters, whose logits have opposite signs, one is always the likeliest
        net.head.zero_()
        net.head[as_bytes("xy")] = torch.randn(32) * torch.tensor([[1.0], [-1.0]])
    artifact, _ = pack(tmp_path, net)
    environ = environment(ARTIFACT=artifact, MODE="chat", MAX_NEW_TOKENS=1 << 16, TEMPERATURE=0)
    heard = functools.partial(
        signal.signal, signal.SIGINT, signal.SIG_DFL
    )  # what runs in the background ignores it
    child = subprocess.Popen(
        [sys.executable, ROOT / "sample.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environ,
        preexec_fn=heard,
    )
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
