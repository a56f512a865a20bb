"""sample.py's scores, each against a plain second computation on tiny models; rows, settings and what is refused."""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import re
import shlex
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import zstandard
from conftest import environment
from test_data import train_model
from test_weights import network, pack

import sample as S

ROOT = Path(__file__).resolve().parents[1]
SYSTEM, USER, ASSISTANT, END = S.ROLE_TOKENS
BYTES = S.load_tokenizer("bytes")
BOS, CONTEXT = 1, 64


def lively(seed: int, tokenizer: S.Tokenizer = BYTES, **changes: object) -> S.GPT:
    """A network with a head of its own, which does not just repeat what it reads, nor is sure of anything."""
    net = network(seed, tokenizer, tie_embeddings=False, **changes)
    net.head.data.mul_(10)
    return net


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Artifacts in folders: own, other; judge, with a value head; own's tokens may be any bytes."""
    folder = tmp_path_factory.mktemp("scores")
    for seed, name in enumerate(("own", "other", "judge")):
        net = lively(seed)
        if name == "judge":
            S.add_value_head(net)
            net.w_value.data.normal_()
        pack(folder / name, net)
    return folder


def loaded(place: Path, name: str) -> S.GPT:
    return S.load_model("ARTIFACT", str(place / name))[0]


def settings(place: Path, score: str, **changes: object) -> S.Settings:
    own = S.Settings(mode="score", score=score, artifact=str(place / "own"), device="cpu", **changes)
    S.check_modes(own)
    return own


def write(folder: Path, name: str, *rows: object) -> str:
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


def plain_logps(net: S.GPT, context: list[int], follows: list[int]) -> list[float]:
    """One row alone, by the whole forward pass."""
    with torch.no_grad():
        logps = net(torch.tensor([[*context, *follows]]))[0].double().log_softmax(-1)
    return [logps[len(context) - 1 + at, token].item() for at, token in enumerate(follows)]


def ids_of(text: str) -> list[int]:
    return [byte + 4 for byte in text.encode()]


# -------------------------------------------------------------------------------------------------------------- text
DOCUMENTS = ["the cat sat on the mat, größer than 日本 and \U0001f600 " * 2, "x", "a second one\n\twith lines\r\n"]


def plain_nats(net: S.GPT, stream: list[int], context: int, stride: int) -> float:
    """Each prediction alone: its window is worked out from its own place."""
    total, count = 0.0, len(stream) - 1
    for at in range(count):
        if stride == context:
            begin = at // context * context
        elif at < context:
            begin = 0
        else:
            begin = min(count, context + ((at - context) // stride + 1) * stride) - context
        total -= plain_logps(net, stream[begin : at + 1], [stream[at + 1]])[0]
    return total


@pytest.mark.parametrize("tokens", [0, 100])
def test_bits_per_byte_by_single_predictions(place, tmp_path, tokens):
    net, stream = loaded(place, "own"), [token for text in DOCUMENTS for token in (BOS, *ids_of(text))]
    path = write(tmp_path, "text.jsonl", {"text": DOCUMENTS[0]}, "", "{no json", {"text": DOCUMENTS[1]}, {"text": " "},
                 {"text": DOCUMENTS[2]})
    found = S.score(settings(place, "text", score_path=path, eval_stride=20, micro_batch_tokens=tokens))[path]
    size = sum(len(text.encode()) for text in DOCUMENTS)
    assert (found["documents"], found["tokens"], found["bytes"]) == (3, len(stream) - 1, size)
    assert found["source_bytes"] == size and "bpb_of_source" not in found
    for name, stride in (("", CONTEXT), ("_sliding", 20)):
        nats = plain_nats(net, stream, CONTEXT, stride)
        assert found[f"nats{name}"] == pytest.approx(nats, rel=1e-6)
        assert found[f"bpb{name}"] == pytest.approx(nats / math.log(2) / size, rel=1e-6)
    assert abs(found["bpb_sliding"] - found["bpb"]) > 1e-5


def test_plain_text_is_one_document(place, tmp_path, capsys):
    """As it stands, line ends and all; compressed or not; several files, each with its own score."""
    text = "one\r\ntwo\n\n größer"
    (tmp_path / "a.txt").write_bytes(text.encode())
    (tmp_path / "b.txt.zst").write_bytes(zstandard.compress(text.encode()))
    path = f"{tmp_path}/a.txt,{tmp_path}/b.txt.zst"
    first, second = S.score(settings(place, "text", score_path=path)).values()
    nats = -math.fsum(plain_logps(loaded(place, "own"), [BOS], ids_of(text)))
    assert first == second and first["bpb"] == pytest.approx(nats / math.log(2) / len(text.encode()), rel=1e-6)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [f"text {tmp_path}/a.txt", f"text {tmp_path}/b.txt.zst"]
    assert f" bpb:{float(format(first['bpb'], '.5g'))} " in lines[0]


def test_both_byte_counts_are_said_where_text_is_lost(tmp_path):
    model = train_model(tmp_path / "prefix.model", normalization_rule_name="nmt_nfkc", add_dummy_prefix=True,
                        remove_extra_whitespaces=True, allow_whitespace_only_pieces=False, user_defined_symbols=[],
                        control_symbols=[])
    tokenizer = S.load_tokenizer(model)
    pack(tmp_path / "own", lively(0, tokenizer), tokenizer)
    text = "the  cat\n\nsat   on"
    path = write(tmp_path, "text.jsonl", {"text": text})
    found = S.score(settings(tmp_path, "text", score_path=path))[path]
    assert found["bytes"] == len("the cat sat on") and found["source_bytes"] == len(text)
    nats = -math.fsum(plain_logps(loaded(tmp_path, "own"), [BOS], tokenizer.encode(text)))
    assert found["bpb"] == pytest.approx(nats / math.log(2) / 14, rel=1e-6)
    assert found["bpb_of_source"] == pytest.approx(nats / math.log(2) / len(text), rel=1e-6)


# ----------------------------------------------------------------------------------------------------------- choices
CHOICES = [
    {"query": "the cat ", "choices": ["sat", "on the mat", "größer"], "gold": 2},
    {"ctx": "a", "endings": ["b", "c c c", "dd", "e"], "label": "1"},
    {"context_options": ["she said", "he said so"], "continuation": "no.", "gold": 0},
    {"sentence_good": "the cat sits", "sentence_bad": "the cat sit"},
    {"query": "q", "choices": ["same", "same", "other words"], "gold": 1},
]


def plain_choice(net: S.GPT, options: list[tuple[list[int], list[int]]], sizes: list[int], gold: int) -> float:
    values = [math.fsum(plain_logps(net, *ids)) / size for ids, size in zip(options, sizes, strict=True)]
    best = [at for at, value in enumerate(values) if math.isclose(value, max(values), rel_tol=1e-12)]
    return (gold in best) / len(best)


@pytest.mark.parametrize(("layout", "delimiter"), [("text", " "), ("text", "\nAnswer: "), ("chat", " ")])
def test_choices_by_hand(place, tmp_path, layout, delimiter):
    """The three kinds and level options; a byte is a token, so what is scored is plain."""
    net, expected = loaded(place, "own"), {"accuracy": [], "accuracy_per_token": [], "accuracy_per_byte": []}
    for row in CHOICES * 3:
        if "sentence_good" in row:
            options, gold = [("", row["sentence_good"]), ("", row["sentence_bad"])], 0
        elif "context_options" in row:
            options, gold = [(text, row["continuation"]) for text in row["context_options"]], row["gold"]
        else:
            context = row.get("query", row.get("ctx"))
            options = [(context, text) for text in row.get("choices", row.get("endings"))]
            gold = int(row.get("gold", row.get("label")))
        ids = []
        for context, text in options:
            if layout == "chat":
                prompt = [BOS, 261, *ids_of(context), 263, 262]
                ids.append((prompt, [*ids_of(text), 263]))
            else:
                joined = delimiter + text if context else text
                ids.append(([BOS, *ids_of(context.rstrip())], ids_of(joined)))
        for name, sizes in (("", [1] * len(ids)), ("_per_token", [len(follows) for _, follows in ids]),
                            ("_per_byte", [len(text.encode()) for _, text in options])):
            expected[f"accuracy{name}"].append(plain_choice(net, ids, sizes, gold))
    path = write(tmp_path, "rows.jsonl", *CHOICES * 3)
    found = S.score(settings(place, "choices", score_path=path, layout=layout,
                             **({"score_delimiter": delimiter} if layout == "text" else {})))[path]
    for name, values in expected.items():
        assert found[name][0] == pytest.approx(statistics.fmean(values), abs=1e-12), name
    assert found["n"] == 15 and found["chance"] == pytest.approx((1 / 3 + 1 / 4 + 1 / 2 + 1 / 2 + 1 / 3) / 5)
    assert found["contexts_cut"] == found["left_out"] == 0


def test_a_token_over_the_border_is_scored_for_every_option(tmp_path):
    """Where "cat" is one token, the context "the c" ends inside it."""
    tokenizer = S.load_tokenizer(train_model(tmp_path / "own.model"))
    context, answers = "the c", ["at", "x", "at sat"]
    found = S.answered(tokenizer, [("", context)], answers, "text")
    wholes = [tokenizer.encode(context + text) for text in answers]
    assert [[*prompt, *follows] for prompt, follows in found] == [[BOS, *whole] for whole in wholes]
    assert len({tuple(prompt) for prompt, _ in found}) == 1
    shared = len(found[0][0]) - 1
    assert all(whole[:shared] == tokenizer.encode(context)[:shared] for whole in wholes)
    assert len({(ids + [0])[shared] for ids in [*wholes, tokenizer.encode(context)]}) > 1  # not shorter than need be
    assert S.answered(tokenizer, [("", "")], ["cat"], "text") == [([BOS], tokenizer.encode("cat"))]


def test_long_contexts_are_cut_and_long_answers_left_out(place, tmp_path):
    net, row = loaded(place, "own").double(), {"query": "q" * 80, "choices": ["yes", "no"], "gold": 0}
    path = write(tmp_path, "rows.jsonl", row, {"query": "q", "choices": ["a" * 64, "b"], "gold": 0},
                 {"query": "q", "choices": ["a" * 63, "b"], "gold": 0})
    found = S.score(settings(place, "choices", score_path=path))[path]
    assert (found["n"], found["contexts_cut"], found["left_out"]) == (2, 2 + 1, 1)
    ids = [([BOS, *ids_of("q" * (63 + 1 - len(text) - 1))], ids_of(" " + text)) for text in row["choices"]]
    assert all(len(context) + len(follows) - 1 == CONTEXT for context, follows in ids)
    model = SimpleNamespace(network=net, context=CONTEXT, tokens=1, device=torch.device("cpu"), source="x")
    [scores], _ = S.item_scores(model, [[([BOS, *ids_of("q" * 80)], follows) for _, follows in ids]])
    for (logps, _), one in zip(scores, ids, strict=True):
        assert logps.tolist() == pytest.approx(plain_logps(net, *one), abs=1e-9)
    path = write(tmp_path, "long.jsonl", {"query": "q", "choices": ["a" * 64, "b"], "gold": 0})
    with pytest.raises(S.UserError, match="^1 rows with answers that are empty or longer than the context of .*, 64 t"):
        S.score(settings(place, "choices", score_path=path))


@pytest.mark.parametrize("tokens", [1, 50, 4096])
def test_token_scores_do_not_depend_on_the_batch(place, tokens):
    """Rows of all lengths, each as alone: nothing that fills a row up enters a state."""
    net, rng = loaded(place, "own").double(), np.random.default_rng(0)
    rows = [([BOS, *rng.integers(4, 260, at % 7).tolist()], rng.integers(4, 260, 1 + at % 11).tolist())
            for at in range(23)]
    model = SimpleNamespace(network=net, tokens=tokens, device=torch.device("cpu"))
    for row, (logps, hits) in zip(rows, S.token_scores(model, rows), strict=True):
        assert logps.dtype == torch.float64 and logps.tolist() == pytest.approx(plain_logps(net, *row), abs=1e-9)
        best = net(torch.tensor([[*row[0], *row[1]]]))[0].argmax(-1).tolist()[len(row[0]) - 1 : -1]
        assert hits.tolist() == [a == b for a, b in zip(best, row[1], strict=True)]
    widths = [ids.shape for _, ids in S.padded(model, [[1] * length for length in (3, 9, 1, 9)])]
    assert widths == {1: [(1, 9), (1, 9), (1, 3), (1, 1)], 50: [(4, 9)], 4096: [(4, 9)]}[tokens]


# ----------------------------------------------------------------------------------------------------------- lambada
def test_lambada_is_greedy_and_its_perplexity_that_of_words(place, tmp_path):
    net, likeliest = loaded(place, "own"), {}
    for word in map(chr, range(97, 123)):  # contexts after which the likeliest byte is a letter or the like
        with torch.no_grad():
            byte = int(net(torch.tensor([[BOS, *ids_of(word)]]))[0, -1].argmax()) - 4
        likeliest |= {word: chr(byte)} if 33 <= byte < 127 else {}
    assert likeliest
    expected = [("some words", "end"), ("größer", "日本"), ("the cat sat", "on"), *likeliest.items()]
    rows = [{"context": context + " \n", "continuation": text} for context, text in expected]
    rows[2] = {"text": "the cat sat on"}
    rows[3]["answer"] = rows[3].pop("continuation")
    path = write(tmp_path, "rows.jsonl", *rows, {"context": "", "continuation": "x"})
    for delimiter in (" ", ""):
        found = S.score(settings(place, "lambada", score_path=path, score_delimiter=delimiter))[path]
        nats, right, tokens = [], [], 0
        for context, text in expected:
            ids, follows = [BOS, *ids_of(context)], ids_of(delimiter + text)
            nats.append(-math.fsum(plain_logps(net, ids, follows)))
            tokens += len(follows)
            for _ in follows:  # what the model says by itself
                with torch.no_grad():
                    ids.append(int(net(torch.tensor([ids]))[0, -1].argmax()))
            right.append(float(ids[-len(follows) :] == follows))
        assert found["accuracy"] == S.interval(right) and (delimiter or sum(right) >= len(likeliest))
        assert found["perplexity"] == pytest.approx(math.exp(statistics.fmean(nats)), rel=1e-5)
        assert found["nats_per_token"] == pytest.approx(math.fsum(nats) / tokens, rel=1e-6)
        assert (found["n"], found["tokens"]) == (len(expected), tokens)


def test_a_perplexity_beyond_floats_is_their_largest(place, tmp_path, monkeypatch):
    scores = [[(torch.tensor([-800.0]), torch.tensor([False]))]]
    monkeypatch.setattr(S, "item_scores", lambda model, items: (scores, {"contexts_cut": 0, "left_out": 0}))
    path = write(tmp_path, "rows.jsonl", {"context": "a", "continuation": "b"})
    assert S.score(settings(place, "lambada", score_path=path))[path]["perplexity"] == math.exp(709)


# ------------------------------------------------------------------------------------------------------------- tasks
def scripted(monkeypatch, *texts: list[list[str]]) -> None:
    """`answer` gives these in turn: a list for each call, of a list of texts for each prompt."""
    calls = iter(texts)
    monkeypatch.setattr(S, "answer", lambda model, asking, *rest: [
        [SimpleNamespace(text=text, ids=ids_of(text), finished=True) for text in own] for own in next(calls)])


def test_pass_at_k_by_enumeration(place, monkeypatch):
    task = S.make_task("reverse", "", 1337)
    problems = task.held_out(5)
    right = [0, 1, 3, 5, 6]
    greedy = [[problem.answer if at % 2 else "no"] for at, problem in enumerate(problems)]
    drawn = [[problem.answer] * count + ["no"] * (6 - count) for problem, count in zip(problems, right, strict=True)]
    scripted(monkeypatch, greedy, drawn)
    own = settings(place, "task", task="reverse", eval_prompts=5, eval_samples=6, max_new_tokens=12)
    found = S.score(own)["reverse"]
    assert found["greedy"] == S.interval([0.0, 1.0, 0.0, 1.0, 0.0])
    for k in (1, 2, 4, 6):
        each = [statistics.fmean(any(at < count for at in chosen) for chosen in itertools.combinations(range(6), k))
                for count in right]
        assert found[f"pass{k}"] == pytest.approx(S.interval(each), abs=1e-12)
    assert {name for name in found if name.startswith("pass")} == {"pass1", "pass2", "pass4", "pass6"}
    assert (found["n"], found["samples"], found["left_out"]) == (5, 6, 0)


def test_gsm8k_rows_of_a_test_set_strict_and_lenient(place, tmp_path, monkeypatch):
    rows = [{"question": f"how many {at}?", "answer": f"so #### {at}"} for at in range(4)]
    path = write(tmp_path, "gsm.jsonl", *rows, {"question": "x", "answer": "none"}, rows[0], "{", {"question": "y"})
    texts = [["#### 0"], ["it is 1."], ["2 #### 7"], ["3, no 4"]]
    scripted(monkeypatch, texts, texts)
    found = S.score(settings(place, "task", task="gsm8k", score_path=path, eval_samples=1, max_new_tokens=9))[path]
    assert found["n"] == 4 and found["greedy"] == S.interval([1.0, 0.0, 0.0, 0.0]) == found["pass1"]
    assert found["greedy_lenient"] == S.interval([1.0, 1.0, 0.0, 0.0])


def test_answers_are_those_of_generate_as_in_training(place):
    """Held-out problems, prompts and seeds as train_grpo.py has them, so that its scores can be repeated."""
    own = settings(place, "task", eval_prompts=7, max_new_tokens=9, temperature=1.0, top_k=0, seed=3)
    model = S.open_model("artifact", own, S.start_runtime("cpu"))
    task, asking, left = S.questions([model], "", own, "chat")
    assert [one.problem for one in asking] == S.make_task("sort", "", 3).held_out(7) and left == 0
    groups = S.answer(model, asking, own, 2, 1.0, "chat")
    prompts = [S.chat_ids(BYTES, one.problem.prompt)[0] for one in asking]
    seeds = [(3, 1 << 31, at) for at in range(7)]
    found = S.generate(model.network, prompts, 2, 9, 1.0, 0, 1.0, seeds, frozenset([263]))
    assert [one.ids for own in groups for one in own] == [one.ids for one in found]
    assert [one.text for own in groups for one in own] == [
        S.completion(BYTES, prompts[at // 2], one.ids) for at, one in enumerate(found)]


def test_prompts_without_room_are_left_out(place, tmp_path):
    rows = [{"prompt": "p" * size, "chosen": "a", "rejected": "b"} for size in (3, 50, 51, 60)]
    path = write(tmp_path, "rows.jsonl", *rows)
    found = S.score(settings(place, "quality", score_path=path, layout="chat", max_new_tokens=10))[path]
    assert (found["prompts"], found["left_out"]) == (2, 2)  # BOS, role, 50, end, role and 10 are 64
    with pytest.raises(S.UserError, match="^MAX_NEW_TOKENS=62: exceeds with each of 4 prompts the context of 64 tok"):
        S.score(settings(place, "quality", score_path=path, max_new_tokens=62))


# ------------------------------------------------------------------------------------------------------- preferences
PAIRS = [
    {"prompt": "a question", "chosen": "good answer", "rejected": "bad"},
    {"prompt": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "v"},
                {"role": "user", "content": "w"}], "chosen": "x", "rejected": "a longer y"},
    {"prompt": "1", "chosen": "2", "rejected": "3"}, {"prompt": "4", "chosen": "größer", "rejected": "klein"},
]
BAD_PAIRS = [{"prompt": "a", "chosen": "b", "rejected": "b"}, {"prompt": "a", "chosen": "b"},
             {"prompt": "a", "chosen": "b", "rejected": "z" * 70}]


def plain_sides(net: S.GPT, turns: list[tuple[str, str]], text: str) -> list[float]:
    roles, ids = BYTES.roles, [BOS]
    for role, words in turns:
        ids += [roles[role], *ids_of(words), 263]
    return plain_logps(net, [*ids, 262], [*ids_of(text), 263])


@pytest.mark.parametrize("reference", [False, True])
def test_preferences_by_hand(place, tmp_path, reference):
    path = write(tmp_path, "pairs.jsonl", *PAIRS, *BAD_PAIRS)
    changes = dict(score_model=str(place / "other")) if reference else {}
    found = S.score(settings(place, "preference", score_path=path, **changes))[path]
    sums, means, nets = [], [], [loaded(place, name) for name in ("own", "other")]
    for row in PAIRS:
        turns, chosen, rejected = S.row_pair(row)[1]
        own, ref = ([plain_sides(net, turns, text) for text in (chosen, rejected)] for net in nets)
        for values, size in ((sums, lambda one: 1), (means, len)):
            values.append(sum(own[0]) / size(own[0]) - sum(own[1]) / size(own[1]) - reference * (
                sum(ref[0]) / size(ref[0]) - sum(ref[1]) / size(ref[1])))
    assert found["accuracy"] == S.interval([float(value > 0) for value in sums])
    assert found["accuracy_per_token"] == S.interval([float(value > 0) for value in means])
    assert found["margin"] == pytest.approx(S.interval(sums, share=False), abs=1e-4)
    assert found["margin_per_token"] == pytest.approx(S.interval(means, share=False), abs=1e-4)
    assert (found["n"], found["left_out"], found["ties"]) == (4, 1, 0) and "accuracy_reward" not in found
    assert found["chosen_longer"] == S.interval([1.0, 0.0, 0.0, 1.0])


def test_pairs_that_fit_one_of_two_models_each_are_one_line(place, tmp_path):
    tokenizer = S.load_tokenizer(train_model(tmp_path / "own.model"))
    pack(tmp_path / "short", lively(7, tokenizer, train_seq_len=40), tokenizer)
    path = write(tmp_path, "pairs.jsonl", *({"prompt": "p", "chosen": text, "rejected": text[1:]} for text in (
        "the cat sat on the mat " * 3, "qzxj" * 12)))  # 69 bytes of few pieces, 48 of as many
    with pytest.raises(S.UserError, match="^SCORE_PATH=.*: no pair fits both .*own.* and .*short"):
        S.score(settings(place, "preference", score_path=path, score_model=str(tmp_path / "short")))


def test_prompts_that_are_cut_are_counted_for_both_models(place, tmp_path):
    pack(tmp_path / "long", lively(8, train_seq_len=128))
    path = write(tmp_path, "pairs.jsonl", {"prompt": "q" * 80, "chosen": "x", "rejected": "y"}, *PAIRS)
    for other, count in ((str(tmp_path / "long"), 2), (str(place / "other"), 4), ("", 2)):
        found = S.score(settings(place, "preference", score_path=path, score_model=other))[path]
        assert found["contexts_cut"] == count


def plain_reward(net: S.GPT, turns: list[tuple[str, str]]) -> float:
    with torch.no_grad():
        ids = S.turn_ids(BYTES, turns)[0]
        return float(net.features(torch.tensor([ids]))[0, -1] @ net.w_value)


def test_a_reward_model_prefers_by_its_value_head(place, tmp_path):
    path = write(tmp_path, "pairs.jsonl", *PAIRS)
    own = S.replace(settings(place, "preference", score_path=path), artifact=str(place / "judge"))
    found, net, margins = S.score(own)[path], loaded(place, "judge"), []
    for row in PAIRS:
        turns, chosen, rejected = S.row_pair(row)[1]
        rewards = [plain_reward(net, [*turns, (ASSISTANT, text)]) for text in (chosen, rejected)]
        margins.append(rewards[0] - rewards[1])
    assert found["accuracy_reward"] == S.interval([float(value > 0) for value in margins])
    assert found["margin_reward"] == pytest.approx(S.interval(margins, share=False), abs=1e-4)


# --------------------------------------------------------------------------------------------------------------- win
def test_win_rate_by_a_checker(place, monkeypatch):
    answers = [problem.answer for problem in S.make_task("sort", "", 1337).held_out(6)]
    own = [[text] for text in (answers[0], answers[1], answers[2], "", "", "")]
    other = [[text] for text in ("", "", answers[2], answers[3], "", "no")]
    scripted(monkeypatch, own, other)
    found = S.score(settings(place, "win", score_model=str(place / "other"), eval_prompts=6, max_new_tokens=12))["sort"]
    assert (found["wins"], found["ties"], found["losses"], found["n"]) == (2, 3, 1, 6)
    assert found["judge"] == "checker of sort" and (found["mark"], found["mark_of_other"]) == (0.5, 1 / 3)
    values = np.array([1, 1, 0.5, 0, 0.5, 0.5])
    half = 1.959964 * values.std(ddof=1) / 6**0.5
    assert found["win_rate"] == pytest.approx([values.mean(), values.mean() - half, values.mean() + half], abs=1e-12)
    apart = np.array([1, 1, 0, -1, 0, 0])
    half = 1.959964 * apart.std(ddof=1) / 6**0.5
    assert found["difference"] == pytest.approx([1 / 6, 1 / 6 - half, 1 / 6 + half], abs=1e-12)


def test_win_rate_by_a_reward_model(place, tmp_path):
    """The same prompts and seeds for both; a model against itself is all ties."""
    path = write(tmp_path, "rows.jsonl", *PAIRS, {"prompt": "only a prompt"}, {"prompt": " "}, {"text": "no prompt"})
    changes = dict(score_path=path, score_judge=str(place / "judge"), max_new_tokens=6)
    own = settings(place, "win", score_model=str(place / "other"), **changes)
    found, runtime, judge, marks = S.score(own)[path], S.start_runtime("cpu"), loaded(place, "judge"), []
    for name in ("artifact", "score_model"):
        model = S.open_model(name, own, runtime)
        _, asking, _ = S.questions([model], path, own, "chat")
        marks.append([plain_reward(judge, [*one.turns, (ASSISTANT, sample.text)])
                      for one, [sample] in zip(asking, S.answer(model, asking, own, 1, 0.8, "chat"), strict=True)])
    assert [one.turns for one in asking] == [*(S.row_pair(row)[1][0] for row in PAIRS), [(USER, "only a prompt")]]
    wins = sum(a > b for a, b in zip(*marks, strict=True))
    assert (found["wins"], found["n"], found["judge"]) == (wins, 5, str(place / "judge" / "model.upar"))
    assert found["mark"] == pytest.approx(statistics.fmean(marks[0]), abs=1e-4)
    assert found["difference"][0] == pytest.approx(statistics.fmean(marks[0]) - statistics.fmean(marks[1]), abs=1e-4)
    found = S.score(settings(place, "win", score_model=str(place / "own"), **changes))[path]
    assert (found["ties"], found["win_rate"]) == (5, [0.5, 0.5, 0.5]) and found["difference"] == [0, 0, 0]


# ----------------------------------------------------------------------------------------------------------- quality
def test_quality_by_hand(place, tmp_path, monkeypatch):
    texts = [["a b a b a b a"], ["c  a\nb"], [""]]
    path = write(tmp_path, "rows.jsonl", {"prompt": "p"}, {"prompt": "q"}, {"prompt": "r"})
    for layout in ("text", "chat"):
        scripted(monkeypatch, texts)
        found = S.score(settings(place, "quality", score_path=path, score_model=str(place / "other"), layout=layout,
                                 max_new_tokens=9))[path]
        assert found["distinct1"] == 3 / 10  # a b c, of 7 + 3
        assert found["distinct2"] == 3 / 8  # ab ba ca, of 6 + 2
        assert found["distinct3"] == 3 / 6  # aba bab cab, of 5 + 1
        assert found["repetition"] == 1 - 2 / 4  # abab baba abab baba, of the first alone
        assert found["words"] == 10 / 3 and found["tokens"] == (13 + 6) / 3 and found["finished"] == 1
        net, nats = loaded(place, "other"), 0.0
        for prompt, [text] in zip("pqr", texts, strict=True):
            context = [BOS, *ids_of(prompt)] if layout == "text" else [BOS, 261, *ids_of(prompt), 263, 262]
            nats -= math.fsum(plain_logps(net, context, ids_of(text)))
        assert found["perplexity"] == pytest.approx(math.exp(nats / 19), rel=1e-5)
        assert found["read_bpb"] == pytest.approx(nats / math.log(2) / 19, rel=1e-5)
        assert (found["read"], found["n"], found["prompts"]) == (2, 3, 3)


# --------------------------------------------------------------------------------------------------------- intervals
@pytest.mark.parametrize(("right", "n"), [(0, 5), (5, 5), (1, 1), (3, 10), (240, 1000)])
def test_wilson_ends_are_where_the_score_test_turns(right, n):
    """Both ends p solve (mean - p)^2 = z^2 p (1 - p) / n; they stay within 0 and 1."""
    mean, low, high = S.interval([1.0] * right + [0.0] * (n - right))
    a, b, c = 1 + 1.959964**2 / n, -(2 * mean + 1.959964**2 / n), mean * mean
    roots = sorted(np.roots([a, b, c]).real)
    assert mean == right / n and [low, high] == pytest.approx(roots, abs=1e-7)
    assert -1e-12 <= low <= mean + 1e-12 and mean - 1e-12 <= high <= 1 + 1e-12


def test_other_means_have_normal_intervals():
    values = [0.5, 1.0, -2.0, 0.25]
    half = 1.959964 * np.std(values, ddof=1) / 2
    assert S.interval(values, share=False) == pytest.approx([-0.0625, -0.0625 - half, -0.0625 + half], abs=1e-12)
    assert S.interval([0.3]) == [0.3, None, None] == S.interval([0.3], share=False)
    half = 1.959964 * np.std([0.0, 1.0, 1.0], ddof=1) / 3**0.5
    assert S.interval([0.0, 1.0, 1.0], share=False) == pytest.approx([2 / 3, 2 / 3 - half, 2 / 3 + half], abs=1e-12)
    low, high = S.interval([1.0, 1.0, 0.75, 1.0])[1:]  # a share of shares
    assert 0.8 < low < 0.82 and high == 1 and S.interval([0.0, 0.25, 0.0, 0.0])[1] == 0


# ------------------------------------------------------------------------------------------------ rows and settings
BAD = {
    S.row_text: {"missing field 'text'": [{}], "empty text": [{"text": " \n"}]},
    S.row_options: {
        "field 'choices' is no list of two texts or more": [{"query": "q", "gold": 0}, {"choices": ["a"], "gold": 0},
                                                            {"choices": "ab", "gold": 0}],
        "field 'choices' is no text": [{"query": "q", "choices": ["a", 3], "gold": 0}],
        "missing field 'query' or 'ctx'": [{"choices": ["a", "b"], "gold": 0}],
        "empty answer": [{"query": "q", "choices": ["a", ""], "gold": 0}, {"sentence_good": "", "sentence_bad": "b"}],
        "gold is not the number of a choice": [{"query": "q", "choices": ["a", "b"], "gold": gold}
                                               for gold in (2, -1, True, 0.5, "A", None)],
    },
    S.row_last: {"missing field 'text'": [{"continuation": "x"}], "missing field 'continuation' or 'answer'": [
        {"context": "x"}], "empty context or answer": [{"text": "word"}, {"context": " ", "answer": "x"},
                                                       {"context": "x", "answer": " "}]},
    S.row_prompt: {"no prompt": [{"prompt": " "}, {"text": "x"}, {"messages": [{"role": "assistant", "content": "x"}]}],
                   "identical chosen and rejected": [{"prompt": "x", "chosen": "y", "rejected": "y"}],
                   "empty answer": [{"instruction": "x", "output": ""}]},
}
GOOD = {S.row_text: {"text": "x"}, S.row_options: CHOICES[0], S.row_last: {"text": "a b"}, S.row_prompt: PAIRS[0]}


@pytest.mark.parametrize("parse", BAD, ids=lambda parse: parse.__name__)
def test_malformed_rows_are_counted_and_named(parse, tmp_path):
    for kind, rows in BAD[parse].items():
        path, log = write(tmp_path, "rows.jsonl", *rows, GOOD[parse]), []
        assert S.read_rows(path, parse, log.append) == [parse(GOOD[parse])[1]]
        assert log[0].endswith(f"left out {kind}: {len(rows)} (the first is row 1)"), (kind, log)
        with pytest.raises(S.UserError, match="used none; left out .*; must hold one usable row at least$"):
            S.read_rows(write(tmp_path, "rows.jsonl", *rows), parse, log.append)


def test_prompts_are_the_turns_before_the_last_answer():
    talk = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"},
            {"role": "user", "content": "v"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "w"}]
    assert S.row_prompt({"messages": talk}) == ("messages", [(SYSTEM, "s"), (USER, "u"), (ASSISTANT, "a"), (USER, "v")])
    assert S.row_prompt({"instruction": "i", "output": "o"}) == ("Alpaca", [(USER, "i")])
    assert S.row_prompt(PAIRS[1])[1] == [(USER, "u"), (ASSISTANT, "v"), (USER, "w")]


@pytest.mark.parametrize(("given", "said"), [
    (dict(score="choices"), "SCORE='choices': MODE=generate with LAYOUT=text does not read it; must be left at 'text'"),
    (dict(score_path="x"), "SCORE_PATH='x': MODE=generate with LAYOUT=text does not"),
    (dict(system="x"), "SYSTEM='x': MODE=generate with LAYOUT=text does not read it; must be left at ''"),
    (dict(mode="score", score="lambada", score_path="x", layout="chat", score_delimiter=""),
     "SCORE_DELIMITER='': SCORE=lambada with LAYOUT=chat does not read it; must be left at ' '"),
    (dict(mode="chat", prompt="x"), "PROMPT='x': MODE=chat does not read it; must be left at ''"),
    (dict(mode="chat", layout="chat"), "LAYOUT='chat': MODE=chat does not read it"),
    (dict(mode="score"), "SCORE_PATH='': must be given for SCORE=text"),
    (dict(mode="score", score_path="x", prompt="y"), "PROMPT='y': SCORE=text does not read it"),
    (dict(mode="score", score_path="x", top_k=3), "TOP_K=3: SCORE=text does not read it; must be left at 50"),
    (dict(mode="score", score_path="x", score_model="y"), "SCORE_MODEL='y': SCORE=text does not read it"),
    (dict(mode="score", score="lambada", score_path="x", eval_stride=3), "EVAL_STRIDE=3: SCORE=lambada with LAY"),
    (dict(mode="score", score="preference"), "SCORE_PATH='': must be given for SCORE=preference"),
    (dict(mode="score", score="win"), "SCORE_MODEL='': must be given for SCORE=win"),
    (dict(mode="score", score="win", score_model="x", score_path="y"), "SCORE_PATH='y': with it TASK_PATH"),
    (dict(mode="score", score="task", score_path="y"), "SCORE_PATH='y': with it TASK_PATH"),
    (dict(mode="score", score="task", task="gsm8k", score_path="y", task_path="z"), "SCORE_PATH='y': with it TASK"),
    (dict(mode="score", score="quality", task="zebra", score_path="y"), "SCORE_PATH='y': with it TASK_PATH"),
    (dict(mode="score", score="task", num_samples=3), "NUM_SAMPLES=3: SCORE=task does not read it; must be left at 1"),
])
def test_settings_that_do_not_fit_are_refused(given, said):
    with pytest.raises(S.UserError) as error:
        S.check_modes(S.Settings(**given))
    assert str(error.value).startswith(said) and "\n" not in str(error.value)


@pytest.mark.parametrize("given", [
    dict(), dict(layout="chat", system="x"), dict(mode="chat", system="x"), dict(mode="score", score_path="x"),
    dict(mode="score", score="task"), dict(mode="score", score="task", task="gsm8k", score_path="x"),
    dict(mode="score", score="task", task="gsm8k", task_path="x"), dict(mode="score", score="win", score_model="x"),
    dict(mode="score", score="win", score_model="x", score_judge="y", score_path="z"),
    dict(mode="score", score="quality"),
    dict(mode="score", score="quality", score_path="x", num_samples=4, layout="chat"),
])
def test_settings_that_fit_are_taken(given):
    S.check_modes(S.Settings(**given))


def test_faults_of_files_and_models_are_one_line(place, tmp_path):
    (tmp_path / "latin.txt").write_bytes("größer".encode("latin-1"))
    (tmp_path / "blank.txt").write_bytes(b" \n")
    (tmp_path / "good.txt").write_bytes(b"good")
    for changes, said in (
            (dict(score_path=f"{tmp_path}/latin.txt"), r"^SCORE_PATH='.*latin.txt': must be a file of UTF-8 text or"),
            (dict(score_path=f"{tmp_path}/blank.txt"), r"^SCORE_PATH='.*blank.txt': .*empty text$"),
            (dict(score_path=f"{tmp_path}/none.txt"), r"^SCORE_PATH='.*none.txt': .*No such file"),
            (dict(score_path=f"{tmp_path}/none.jsonl"), r"none.jsonl: cannot be read; .*No such file"),
            (dict(score_path=f"{tmp_path}/good.txt", eval_stride=64), "^EVAL_STRIDE=64: must be less than the")):
        with pytest.raises(S.UserError, match=said) as error:
            S.score(settings(place, "text", **changes))
        assert "\n" not in str(error.value)
    with pytest.raises(S.UserError, match="^SCORE_JUDGE='.*other': has no value head; must be a reward model$"):
        S.score(settings(place, "win", score_model=str(place / "own"), score_judge=str(place / "other")))


def test_a_file_holds_the_scores(place, tmp_path, capsys):
    path = write(tmp_path, "rows.jsonl", *CHOICES)
    found = S.score(settings(place, "choices", score_path=path, score_file=str(tmp_path / "scores.json")))
    written = json.loads((tmp_path / "scores.json").read_text())
    assert written["scores"] == found and written["score"] == "choices" and written["settings"]["score_path"] == path
    assert written["model"] == str(place / "own" / "model.upar") and written["script"] == "sample.py"
    rows, line = capsys.readouterr().out.splitlines()
    assert rows == (f"data: {path}: 5 rows, used 3 choices, 1 contexts, 1 sentences; left out none")
    assert line.startswith(f"choices {path}: accuracy:[") and " n:5 " in line


# ---------------------------------------------------------------------------------------------------------- generate
def test_a_prompt_can_be_a_users_turn(place, capsys):
    own = S.Settings(artifact=str(place / "own"), device="cpu", prompt="hi", layout="chat", system="s",
                     max_new_tokens=9)
    S.check_modes(own)
    S.sample(own)
    net, *_ = S.load_model("ARTIFACT", own.artifact)
    prompt = [BOS, 260, *ids_of("s"), 263, 261, *ids_of("hi"), 263, 262]
    [one] = S.generate(net, [prompt], 1, 9, 0.8, 50, 1.0, [(1337,)], frozenset([263, BOS]))
    assert capsys.readouterr().out == S.completion(BYTES, prompt, one.ids) + "\n"


# ------------------------------------------------------------------------------------------------------------- guide
def test_the_guides_commands_run(tmp_path, monkeypatch, capsys):
    """Every command of docs/scoring.md, by tiny models and files of the names that stand there."""
    text = (ROOT / "docs" / "scoring.md").read_text(encoding="utf-8")
    commands = [line for block in re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
                for line in block.splitlines()]
    for seed, name in enumerate(("first", "start")):
        (tmp_path / "runs").mkdir(exist_ok=True)
        pack(tmp_path / "runs" / name, lively(seed, train_seq_len=256))
    (tmp_path / "book.txt").write_text(DOCUMENTS[0])
    (tmp_path / "val.jsonl.zst").write_bytes(zstandard.compress(json.dumps({"text": DOCUMENTS[2]}).encode()))
    write(tmp_path, "hellaswag.jsonl", CHOICES[1])
    write(tmp_path, "piqa.jsonl", CHOICES[0])
    write(tmp_path, "gsm8k_test.jsonl", {"question": "1+1?", "answer": "2 #### 2"})
    write(tmp_path, "pairs.jsonl", *PAIRS)
    monkeypatch.chdir(tmp_path)
    for command in commands:
        *changes, python, script = shlex.split(command)
        assert (python, script) == ("python", "sample.py")
        monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
        given = dict(change.split("=", 1) for change in changes)
        given |= {"EVAL_PROMPTS": "8"} if "TASK" in given else {}
        monkeypatch.setattr(sys, "argv", ["sample.py"])
        with mock.patch.dict(os.environ, environment(**given), clear=True):
            assert S.exit_code(S.main) == 0, (command, capsys.readouterr().err)
        assert capsys.readouterr().out.strip()
    assert len(commands) == 7 and json.loads((tmp_path / "choices.json").read_text())["scores"].keys() == {
        "hellaswag.jsonl", "piqa.jsonl"}
