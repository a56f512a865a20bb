"""The scores of sample.py against second computations on tiny models; rows, settings, errors."""

import io
import itertools
import json
import math
import shlex
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import zstandard
from test_data import NO_SPACE, PREFIX, train_model
from test_weights import network, pack

import sample as S
import train_gpt as T
import train_grpo as G
from conftest import BYTES, ROOT, blocks, exit_code, refusal, write_lines

SYSTEM, USER, ASSISTANT, END = S.ROLE_TOKENS
BOS = 1
CONTEXT = 64


def lively(seed, tokenizer=BYTES, **changes):
    """Return a network with a head of its own, which does not just repeat what it reads."""
    net = network(seed, tokenizer, tie_embeddings=False, **changes)
    net.head.data.mul_(10)
    return net


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return a folder of artifacts: main, other; judge, with a value head. A token is a byte."""
    folder = tmp_path_factory.mktemp("scores")
    for seed, name in enumerate(("main", "other", "judge")):
        net = lively(seed)
        if name == "judge":
            S.add_value_head(net)
            net.w_value.data.normal_()
        pack(folder / name, net)
    return folder


def loaded(place, name):
    return S.load_model("ARTIFACT", str(place / name))[0]


def model_of(net, tokenizer=BYTES):
    return S.Model(net, tokenizer, "file", CONTEXT)


def settings(place, score, **changes):
    made = S.Settings(
        mode="score", score=score, artifact=str(place / "main"), device="cpu", **changes
    )
    S.check_modes(made)
    return made


def scored(place, score, path="", **changes):
    """Return the scores of one file, or of the task."""
    [scores] = S.score(settings(place, score, score_path=str(path), **changes)).values()
    return scores


def write(folder, name, *rows):
    rows = [row.encode() if isinstance(row, str) else row for row in rows]
    return str(write_lines(folder / name, rows))


def plain_logps(net, context, answer):
    """Return the log-probabilities of one row alone, by the whole forward pass."""
    with torch.no_grad():
        logps = net(torch.tensor([[*context, *answer]]))[0].double().log_softmax(-1)
    return [logps[len(context) - 1 + i, token].item() for i, token in enumerate(answer)]


def ids_of(text):
    return [byte + 4 for byte in text.encode()]


def normal_interval(values):
    half = 1.959964 * np.std(values, ddof=1) / len(values) ** 0.5
    mean = np.mean(values)
    return pytest.approx([mean, mean - half, mean + half], abs=1e-4)


# -------------------------------------------------------------------------------------------- text
DOCUMENTS = [
    "the cat sat on the mat, größer than 日本 and \U0001f600 " * 2,
    "x",
    "a second one\n\twith lines\r\n",
]


def plain_nats(net, stream, stride):
    """Return the nats of each prediction alone: its window follows from its own place."""
    total = 0.0
    count = len(stream) - 1
    for i in range(count):
        if stride == CONTEXT:
            begin = i // CONTEXT * CONTEXT
        elif i < CONTEXT:
            begin = 0
        else:
            begin = min(count, CONTEXT + ((i - CONTEXT) // stride + 1) * stride) - CONTEXT
        total -= plain_logps(net, stream[begin : i + 1], [stream[i + 1]])[0]
    return total


def test_bits_per_byte_by_single_predictions(place, tmp_path):
    net = loaded(place, "main")
    stream = []
    for text in DOCUMENTS:
        stream += [BOS, *ids_of(text)]
    rows = [{"text": text} for text in DOCUMENTS]
    path = write(tmp_path, "text.jsonl", rows[0], "", "{no json", rows[1], {"text": " "}, rows[2])
    scores = scored(place, "text", path, eval_stride=20)
    size = sum(len(text.encode()) for text in DOCUMENTS)
    assert (scores["documents"], scores["tokens"], scores["bytes"]) == (3, len(stream) - 1, size)
    assert scores["source_bytes"] == size and "bpb_of_source" not in scores
    for name, stride in (("", CONTEXT), ("_sliding", 20)):
        nats = plain_nats(net, stream, stride)
        assert scores[f"nats{name}"] == pytest.approx(nats, rel=1e-6)
        assert scores[f"bpb{name}"] == pytest.approx(nats / math.log(2) / size, rel=1e-6)
    assert abs(scores["bpb_sliding"] - scores["bpb"]) > 1e-5


def test_whole_documents_have_the_stateful_score_of_training(place, tmp_path):
    """In float64, as val_bpb_stateful: documents longer than the context, one without ids, the end."""
    net = loaded(place, "main").double()
    rows = [{"text": text} for text in DOCUMENTS]
    path = write(tmp_path, "text.jsonl", *rows)
    asked = settings(place, "text", score_path=path, stateful=True, eval_stride=20)
    models = S.Models(model_of(net), None, None, print)
    scores = S.score_text(models, path, asked)
    stream = []
    for text in DOCUMENTS:
        stream += [BOS, *ids_of(text)]
    scorer = T.Scorer(BOS, T.Runtime(0, 1, torch.device("cpu"), False), CONTEXT, 1)
    expected = T.score_documents(scorer, net, T.EvalText(np.array(stream), scores["bytes"]))
    assert scores["nats_stateful"] == pytest.approx(expected.nats, rel=0, abs=1e-9)
    assert scores["bpb_stateful"] == pytest.approx(expected.bpb, rel=0, abs=1e-9)
    assert abs(scores["bpb_stateful"] - scores["bpb"]) > 1e-5
    assert [len(row.answer) for row in S.document_rows([BOS, 7, BOS, BOS, 8, 9], BOS)] == [2, 1, 2]
    assert S.document_rows([BOS, 7, BOS], BOS) == [S.Continuation([BOS], [7, BOS])]
    net.config.positions = "learned"
    refusal(S.UserError, "^STATEFUL=1: must be 0", S.score_text, models, path, asked)


def test_plain_text_is_one_document(place, tmp_path, capsys):
    """With its line ends; compressed or not; several files, each with its own score."""
    text = "one\r\ntwo\n\n größer"
    (tmp_path / "a.txt").write_bytes(text.encode())
    (tmp_path / "b.txt.zst").write_bytes(zstandard.compress(text.encode()))
    path = f"{tmp_path}/a.txt,{tmp_path}/b.txt.zst"
    first, second = S.score(settings(place, "text", score_path=path)).values()
    nats = -math.fsum(plain_logps(loaded(place, "main"), [BOS], ids_of(text)))
    bpb = nats / math.log(2) / len(text.encode())
    assert first == second and first["bpb"] == pytest.approx(bpb, rel=1e-6)
    lines = capsys.readouterr().out.splitlines()
    names = [line.split(":")[0] for line in lines]
    assert names == [f"text {tmp_path}/a.txt", f"text {tmp_path}/b.txt.zst"]
    assert f" bpb:{float(format(first['bpb'], '.5g'))} " in lines[0]


def test_lost_text_has_two_byte_counts(tmp_path):
    tokenizer = S.load_tokenizer(train_model(tmp_path / "prefix.model", **PREFIX))
    pack(tmp_path / "main", lively(0, tokenizer), tokenizer)
    text = "the  cat\n\nsat   on"
    scores = scored(tmp_path, "text", write(tmp_path, "text.jsonl", {"text": text}))
    assert scores["bytes"] == len("the cat sat on") and scores["source_bytes"] == len(text)
    nats = -math.fsum(plain_logps(loaded(tmp_path, "main"), [BOS], tokenizer.encode(text)))
    assert scores["bpb"] == pytest.approx(nats / math.log(2) / 14, rel=1e-6)
    assert scores["bpb_of_source"] == pytest.approx(nats / math.log(2) / len(text), rel=1e-6)


def test_a_text_has_no_more_bytes_than_it_has(tmp_path, capsys):
    """Tokens of a model without a space piece decode to three bytes a space."""
    words = ["thecat", "sat", "onthe", "matandhat"] * 9
    tokenizer = S.load_tokenizer(train_model(tmp_path / "s.model", lines=words, **NO_SPACE))
    pack(tmp_path / "main", lively(0, tokenizer), tokenizer)
    text = "the cat sat on the mat"
    scores = scored(tmp_path, "text", write(tmp_path, "text.jsonl", {"text": text}))
    assert scores["bytes"] == scores["source_bytes"] == len(text)
    assert scores["bpb"] == pytest.approx(scores["nats"] / math.log(2) / len(text))
    assert f"decode to {len(text) + 10} bytes, more than the text has" in capsys.readouterr().out


# ------------------------------------------------------------------------------- log-probabilities
@pytest.mark.parametrize("rows_of_batch", [1, 5, 32])
def test_log_probabilities_do_not_depend_on_the_batch(place, monkeypatch, rows_of_batch):
    """Rows of all lengths, each as alone: no padding enters a state."""
    monkeypatch.setattr(S, "BATCH_ROWS", rows_of_batch)
    net = loaded(place, "main").double()
    rng = np.random.default_rng(0)
    rows = []
    for i in range(23):
        context = [BOS, *rng.integers(4, 260, i % 7).tolist()]
        rows.append(S.Continuation(context, rng.integers(4, 260, 1 + i % 11).tolist()))
    for row, logps in zip(rows, S.answer_logps(model_of(net), rows), strict=True):
        expected = plain_logps(net, row.context, row.answer)
        assert logps.dtype == torch.float64 and logps.tolist() == pytest.approx(expected, abs=1e-9)


# ------------------------------------------------------------------------------------------- tasks
def scripted(monkeypatch, *calls):
    """Make `answer_questions` give these: for each call, a list of texts for each question."""
    calls = iter(calls)

    def answer_questions(model, questions, settings, count):
        answers = []
        for question, texts in zip(questions, next(calls), strict=True):
            assert len(texts) == count
            answers += [S.ScoredAnswer(question, text, [*text.encode()], True) for text in texts]
        return answers

    monkeypatch.setattr(S, "answer_questions", answer_questions)


def problem_file(folder, count):
    """Return a file of problems, of which some are held out, and its rows."""
    rows = [{"prompt": f"p{i}", "answer": f"a{i}"} for i in range(count)]
    return write(folder, "problems.jsonl", *rows), rows


def test_pass_at_k_by_enumeration(place, tmp_path, monkeypatch):
    path, rows = problem_file(tmp_path, 9)
    right = [0, 1, 3, 5, 6]
    greedy = [[row["answer"] if i % 2 else "no"] for i, row in enumerate(rows[:5])]
    drawn = [
        [f" {row['answer']}\n"] * count + ["no"] * (6 - count)
        for row, count in zip(rows, right, strict=False)
    ]
    scripted(monkeypatch, greedy, drawn)
    scores = scored(place, "task", path, eval_prompts=5, eval_samples=6, max_new_tokens=12)
    assert scores["greedy"] == S.interval([0.0, 1.0, 0.0, 1.0, 0.0])
    for k in (1, 2, 4, 6):
        subsets = [*itertools.combinations(range(6), k)]
        chances = [statistics.fmean(min(subset) < count for subset in subsets) for count in right]
        assert scores[f"pass{k}"] == pytest.approx(S.interval(chances), abs=1e-12)
    assert [*scores] == [
        "greedy",
        "pass1",
        "pass2",
        "pass4",
        "pass6",
        "rewards/exact",
        "n",
        "samples",
    ]
    assert (scores["n"], scores["samples"]) == (5, 6)


def test_a_reward_of_1_or_more_is_right(place, tmp_path, monkeypatch):
    """Of rows as GSM8K has them, and by a function that sees prompts and answers."""
    rows = [{"question": f"how many {i}?", "answer": f"so #### {i}"} for i in range(4)]
    bad = [{"question": "", "answer": "1"}, "{", {"text": "y"}, []]
    path = write(tmp_path, "gsm.jsonl", *rows, *bad)
    texts = [["#### 0"], ["it is 1."], ["2 #### 7"], ["#### 3.0"]]
    source = "def graded(prompts, completions, answer):\n    return [{}]\n"
    value = "len(a) / 7.5 if p == f'how many {c[5:]}?' else 0"
    value += " for p, c, a in zip(prompts, completions, answer)"
    (tmp_path / "mine.py").write_text(source.format(value))
    (tmp_path / "short.py").write_text(source.format("1.0"))
    for file, right in (
        (ROOT / "data/tasks.py:gsm8k", [1, 1, 0, 1]),
        ("mine.py:graded", [1, 0, 0, 0]),
    ):
        scripted(monkeypatch, texts, texts)
        changes = dict(reward=str(tmp_path / file), eval_samples=1, max_new_tokens=9)
        scores = scored(place, "task", path, **changes)
        assert scores["greedy"] == S.interval([*map(float, right)]) == scores["pass1"]
    scripted(monkeypatch, texts)
    with pytest.raises(S.UserError, match="must return a list of 4 numbers"):
        scored(place, "task", path, **{**changes, "reward": f"{tmp_path}/short.py:graded"})


def test_answers_are_those_of_generate_as_in_training(place, tmp_path):
    """Problems, prompts and seeds as the RL scripts have them, so that scores can be repeated."""
    path, _ = problem_file(tmp_path, 99)
    changes = dict(
        eval_prompts=7, max_new_tokens=9, temperature=1.0, top_k=0, seed=3, held_out=True
    )
    made = replace(settings(place, "task", score_path=path, **changes), layout="chat")
    model = model_of(loaded(place, "main"))
    questions = S.read_questions([model], path, made, print)
    train, _, problems = G.split_problems(G.Settings(train_files=path, eval_prompts=7))
    assert [question.problem for question in questions] == problems and len(problems) == 7
    prompts = [S.asked_ids(BYTES, [("<|user|>", problem["prompt"])]) for problem in problems]
    seeds = [(3, 1 << 31, i) for i in range(7)]
    samples = S.generate(model.network, prompts, 2, 9, 1.0, seeds, frozenset([1, 263]))
    answers = S.answer_questions(model, questions, made, 2)
    for i, (answer, one) in enumerate(zip(answers, samples, strict=True)):
        text = S.completion(BYTES, prompts[i // 2], one.ids)
        assert answer == S.ScoredAnswer(
            questions[i // 2], text, one.ids, one.finished, temperature=1.0
        )
    path = write(tmp_path, "train.jsonl", *train)
    message = f"HELD_OUT=1: no prompt of {path} is held out; must be 0"
    refusal(S.UserError, message, scored, place, "quality", path, held_out=True, max_new_tokens=9)


def test_prompts_without_room_are_named_by_row(place, tmp_path, capsys):
    rows = [{"prompt": "p" * size} for size in (3, 50, 51, 70)]
    path = write(tmp_path, "rows.jsonl", "", *rows)
    scores = scored(place, "quality", path, layout="chat", max_new_tokens=10)
    assert scores["prompts"] == 2  # BOS, role, 50, end, role and 10 are 64
    out = capsys.readouterr().out
    fault = "left out prompt without room for MAX_NEW_TOKENS=10 in the context of 64 tokens: 1 (the"
    assert f"{fault} first is row 4); prompt as long as the context of 64 tokens, or lon" in out
    with pytest.raises(S.UserError, match="used none; left out .*MAX_NEW_TOKENS=62 in .*: 3"):
        scored(place, "quality", path, max_new_tokens=62)


# ------------------------------------------------------------------------------------- preferences
TALK = [(USER, "u"), (ASSISTANT, "v"), (USER, "w")]
MESSAGES = [{"role": role.strip("<|>"), "content": text} for role, text in TALK]
PAIRS = [
    {"prompt": "a question", "chosen": "good answer", "rejected": "bad"},
    {"prompt": MESSAGES, "chosen": "x", "rejected": "a longer y"},
    {"prompt": "1", "chosen": "2", "rejected": "3"},
    {"prompt": "4", "chosen": "größer", "rejected": "klein"},
]
BAD_PAIRS = [
    {"prompt": "a", "chosen": "b", "rejected": "b"},
    {"prompt": "a", "chosen": "b"},
    {"prompt": "a", "chosen": "b", "rejected": "z" * 70},
]


def plain_answer(net, turns, text):
    """Return the log-probabilities of an answer, <|end|> too, after turns."""
    ids = [BOS]
    for role, words in turns:
        ids += [BYTES.roles[role], *ids_of(words), 263]
    return plain_logps(net, [*ids, 262], [*ids_of(text), 263])


def plain_reward(net, turns):
    *before, answer = turns
    ids = [*S.asked_ids(BYTES, before), *S.answer_ids(BYTES, before, answer)]
    with torch.no_grad():
        return float(net.features(torch.tensor([ids]))[0, -1] @ net.w_value)


@pytest.mark.parametrize("reference", [False, True])
def test_preferences_by_hand(place, tmp_path, reference):
    path = write(tmp_path, "pairs.jsonl", *PAIRS, *BAD_PAIRS)
    changes = dict(score_model=str(place / "other")) if reference else {}
    scores = scored(place, "preference", path, **changes)
    margins = []
    for row in PAIRS:
        turns, *texts = S.row_pair(row, set())[1]
        margin = np.zeros(2)
        for sign, name in ((1, "main"), (-reference, "other")):
            one, two = [plain_answer(loaded(place, name), turns, text) for _, text in texts]
            margin += sign * np.array([sum(one) - sum(two), np.mean(one) - np.mean(two)])
        margins.append(margin)
    for name, values in zip(("", "_per_token"), np.transpose(margins), strict=True):
        assert scores[f"accuracy{name}"] == S.interval([float(value > 0) for value in values])
        assert scores[f"margin{name}"] == normal_interval(values)
    assert (scores["n"], scores["ties"]) == (4, 0) and "accuracy_reward" not in scores
    assert scores["chosen_longer"] == S.interval([1.0, 0.0, 0.0, 1.0])


def test_long_contexts_are_cut_and_long_answers_left_out(place, tmp_path, capsys):
    """An answer may fill the context, with the token that ends it; then nothing but BOS stands before."""
    rows = [{"prompt": "q", "chosen": "a" * size, "rejected": "b"} for size in (64, 63)]
    cut = {"prompt": "q" * 80, "chosen": "yes", "rejected": "no"}
    path = write(tmp_path, "rows.jsonl", cut, *rows)
    scores = scored(place, "preference", path)
    assert (scores["n"], scores["contexts_cut"]) == (2, 2 + 1)
    fault = "answer longer than the context of 64 tokens: 1 (the first is row 2)"
    assert f"left out {fault}\n" in capsys.readouterr().out
    net = loaded(place, "main")
    turns = [(USER, "q" * 80)]
    kept = [
        BOS,
        *ids_of("q" * 58),
        263,
        262,
    ]  # with "yes" and its end, of which one is not read, 64
    [row] = S.answer_rows(model_of(net), turns, [(ASSISTANT, "yes")])
    assert (row.context, row.answer) == (kept, [*ids_of("yes"), 263]) and row.is_cut
    margins = [
        sum(plain_logps(net, kept, row.answer))
        - sum(plain_logps(net, [BOS, *ids_of("q" * 59), 263, 262], [*ids_of("no"), 263])),
        sum(plain_logps(net, [BOS], [*ids_of("a" * 63), 263]))
        - sum(plain_answer(net, [(USER, "q")], "b")),
    ]
    assert scores["margin"] == normal_interval(margins)
    with pytest.raises(S.UserError, match="used none; left out answer longer than the context of"):
        scored(place, "preference", write(tmp_path, "long.jsonl", rows[0]))


def test_pairs_must_fit_both_models(place, tmp_path):
    tokenizer = S.load_tokenizer(train_model(tmp_path / "a.model"))
    pack(tmp_path / "short", lively(7, tokenizer, train_seq_len=40), tokenizer)
    texts = ["the cat sat on the mat " * 3, "qzxj" * 12]  # 69 bytes of few pieces, 48 of as many
    rows = [{"prompt": "p", "chosen": text, "rejected": text[1:]} for text in texts]
    path = write(tmp_path, "pairs.jsonl", *rows)
    with pytest.raises(S.UserError, match="the context of 64 tokens: 1 .* of 40 tokens: 1 "):
        scored(place, "preference", path, score_model=str(tmp_path / "short"))


def test_a_reward_model_prefers_by_its_value_head(place, tmp_path):
    path = write(tmp_path, "pairs.jsonl", *PAIRS)
    made = settings(place, "preference", score_path=path)
    scores = S.score(replace(made, artifact=str(place / "judge")))[path]
    net = loaded(place, "judge")
    margins = []
    for row in PAIRS:
        turns, *texts = S.row_pair(row, set())[1]
        one, two = [plain_reward(net, [*turns, turn]) for turn in texts]
        margins.append(one - two)
    assert scores["accuracy_reward"] == S.interval([float(value > 0) for value in margins])
    assert scores["margin_reward"] == normal_interval(margins)


# --------------------------------------------------------------------------------------------- win
def test_win_rate_by_a_checker(place, tmp_path, monkeypatch):
    path, rows = problem_file(tmp_path, 6)
    a, b, c, d, *_ = [row["answer"] for row in rows]
    main = [[text] for text in (a, b, c, "", "", "")]
    other = [[text] for text in ("", "", c, d, "", "no")]
    scripted(monkeypatch, main, other)
    changes = dict(score_model=str(place / "other"), max_new_tokens=12)
    scores = scored(place, "win", path, **changes)
    assert [scores[name] for name in ("wins", "ties", "losses", "n")] == [2, 3, 1, 6]
    assert scores["judge"] == "REWARD=exact"
    assert (scores["mark"], scores["mark_of_other"]) == (0.5, 1 / 3)
    assert scores["win_rate"] == normal_interval([1, 1, 0.5, 0, 0.5, 0.5])
    assert scores["difference"] == normal_interval([1, 1, 0, -1, 0, 0])


def test_win_rate_by_a_reward_model(place, tmp_path, monkeypatch):
    rows = [*PAIRS[:2], {"prompt": "only a prompt"}, {"prompt": " "}, {"text": "no prompt"}]
    path = write(tmp_path, "rows.jsonl", *rows)
    texts = [["one", "two", "same"], ["three", "four", "same"]]
    scripted(monkeypatch, *([[text] for text in side] for side in texts))
    changes = dict(score_model=str(place / "other"), score_judge=str(place / "judge"))
    scores = scored(place, "win", path, **changes, max_new_tokens=6)
    prompts = [[(USER, "a question")], TALK, [(USER, "only a prompt")]]
    judge = loaded(place, "judge")
    marks = np.zeros((2, 3))
    for i, side in enumerate(texts):
        for j, text in enumerate(side):
            marks[i, j] = plain_reward(judge, [*prompts[j], (ASSISTANT, text)])
    leads = marks[0] - marks[1]
    assert (scores["wins"], scores["ties"], scores["n"]) == ((leads > 0).sum(), 1, 3)
    assert scores["judge"] == str(place / "judge" / "model.upar")
    assert scores["mark"] == pytest.approx(marks[0].mean(), abs=1e-4)
    assert scores["difference"] == normal_interval(leads)


# ----------------------------------------------------------------------------------------- quality
def test_quality_by_hand(place, tmp_path, monkeypatch):
    texts = ["a b a b a b a", "c  a\nb", ""]
    path = write(tmp_path, "rows.jsonl", *({"prompt": prompt} for prompt in "pqr"))
    scripted(monkeypatch, [[text] for text in texts])
    scores = scored(place, "quality", path, max_new_tokens=9)
    assert scores["distinct1"] == 3 / 10  # a b c, of 7 + 3
    assert scores["distinct2"] == 3 / 8  # ab ba ca, of 6 + 2
    assert scores["distinct3"] == 3 / 6  # aba bab cab, of 5 + 1
    assert scores["repetition"] == 1 - 2 / 4  # abab baba abab baba, of the first alone
    assert scores["words"] == 10 / 3 and scores["tokens"] == (13 + 6) / 3
    assert (scores["finished"], scores["n"], scores["prompts"]) == (1, 3, 3)


# --------------------------------------------------------------------------------------- intervals
@pytest.mark.parametrize(("right", "n"), [(0, 5), (5, 5), (1, 1), (3, 10), (240, 1000)])
def test_wilson_ends_are_where_the_score_test_turns(right, n):
    """Both ends p solve (mean - p)^2 = z^2 p (1 - p) / n; they stay within 0 and 1."""
    mean, low, high = S.interval([1.0] * right + [0.0] * (n - right))
    pull = 1.959964**2 / n
    roots = np.roots([1 + pull, -(2 * mean + pull), mean * mean]).real
    assert mean == right / n and [low, high] == pytest.approx(sorted(roots), abs=1e-7)
    assert -1e-12 <= low <= mean + 1e-12 and mean - 1e-12 <= high <= 1 + 1e-12


def test_other_means_have_normal_intervals():
    for values in ([0.5, 1.0, -2.0, 0.25], [0.0, 1.0, 1.0]):
        assert S.interval(values, share=False) == normal_interval(values)
    assert S.interval([0.3]) == [0.3, None, None] == S.interval([0.3], share=False)
    low, high = S.interval([1.0, 1.0, 0.75, 1.0])[1:]  # a share of shares
    assert 0.8 < low < 0.82 and high == 1 and S.interval([0.0, 0.25, 0.0, 0.0])[1] == 0


# ------------------------------------------------------------------------------- rows and settings
BAD = [
    (S.row_text, "missing field 'text'", ["{}"]),
    (S.row_text, "field 'text' is no text", ['{"text": true}']),
    (S.row_text, "empty text", ['{"text": " \\n"}']),
    (S.row_prompt, "no prompt", ['{"prompt": " "}', '{"text": "x"}']),
    (S.row_prompt, "no prompt", ['{"messages": [{"role": "assistant", "content": "x"}]}']),
    (S.row_prompt, "identical chosen and rejected", [json.dumps(BAD_PAIRS[0])]),
]
GOOD = {S.row_text: {"text": "x"}, S.row_prompt: PAIRS[0]}


@pytest.mark.parametrize(("parse", "fault", "rows"), BAD)
def test_malformed_rows_are_counted_and_named(parse, fault, rows, tmp_path):
    log = []
    path = write(tmp_path, "rows.jsonl", *rows, GOOD[parse])
    assert S.read_rows(path, parse, log.append) == [parse(GOOD[parse], set())[1]]
    assert str(log[0]).endswith(f"left out {fault}: {len(rows)} {S.places([1, 2][: len(rows)])}"), (
        log
    )


def test_prompts_are_the_turns_before_the_last_answer():
    last = [{"role": "assistant", "content": "b"}, {"role": "user", "content": "x"}]
    assert S.row_prompt({"messages": MESSAGES + last}, set()) == ("messages", TALK)
    assert S.row_prompt({"instruction": "i", "output": "o"}, set()) == ("Alpaca", [(USER, "i")])
    assert S.row_prompt(PAIRS[1], set())[1] == TALK
    turns = [("<|system|>", "s", {"role": "tools"}), ("<|user|>", "q")]
    assert S.ScoredAnswer(S.Question(turns, None), "a", [1], True).row()["prompt"] == "s\nq"


def test_a_score_reads_kernels_and_generation_does_not():
    S.check_modes(S.Settings(mode="score", score_path="x", kernels="auto"))
    with pytest.raises(S.UserError, match="KERNELS='auto': not read with MODE=generate"):
        S.check_modes(S.Settings(kernels="auto"))


NO_MODEL = "must be a run, a checkpoint or an artifact"
MISTAKES = [
    ("SCORE=win", "SCORE='win': not read with MODE=generate"),
    ("SCORE_PATH=x SCORE=choices", "SCORE='choices': must be one of text, task, preference, win, "),
    ("MODE=chat PROMPT=x", "PROMPT='x': not read with MODE=chat"),
    (
        "SCORE_PATH=x PROMPT=y",
        "PROMPT='y': not read with MODE=score SCORE=text; must be left at ''",
    ),
    ("SCORE_PATH=x TOP_K=3", "TOP_K=3: not read with MODE=score SCORE=text"),
    (
        "SCORE_PATH=x SCORE=preference LAYOUT=chat",
        "LAYOUT='chat': not read with MODE=score SCORE=pr",
    ),
    ("SCORE_PATH=x SCORE=task NUM_SAMPLES=3", "NUM_SAMPLES=3: not read"),
    ("SCORE_PATH=x HELD_OUT=1", "HELD_OUT=True: not read with MODE=score SCORE=text"),
    ("SCORE_PATH=x SCORE=quality REWARD=x", "REWARD='x': not read"),
    ("SCORE_PATH=", "SCORE_PATH='': must be given for SCORE=text"),
    ("SCORE_PATH= SCORE=win SCORE_MODEL=x", "SCORE_PATH='': must be given for SCORE=win"),
    (
        "SCORE_PATH=latin.txt",
        "SCORE_PATH='latin.txt': must be UTF-8 text or JSON lines; 'utf-8' co",
    ),
    ("SCORE_PATH=blank.txt", "SCORE_PATH='blank.txt': must be UTF-8 text or JSON line"),
    ("SCORE_PATH=none.txt", "none.txt: cannot be read; [Errno 2]"),
    ("SCORE_PATH=good.txt EVAL_STRIDE=64", "EVAL_STRIDE=64: must be less than the con"),
    ("SCORE_PATH=good.txt SCORE=preference", "good.txt: 1 rows, used none; left out"),
    ("SCORE_PATH=x SCORE=win", f"SCORE_MODEL='': no such file; {NO_MODEL}"),
    (
        "SCORE_PATH=x SCORE=win SCORE_MODEL=main SCORE_JUDGE=other",
        "SCORE_JUDGE='other': has no value head; must be a reward model",
    ),
    ("SCORE_PATH=good.txt SCORE_FILE=no/x", "SCORE_FILE='no/x': must be in a folder "),
    ("MODE=scores", "MODE='scores': must be one of generate, chat, score"),
    ("LAYOUT=chat", "PROMPT='': must be given for LAYOUT=chat"),
    ("ARTIFACT=nowhere", f"ARTIFACT='nowhere': no such file; {NO_MODEL}"),
    ("ARTIFACT=good.txt", f"ARTIFACT='good.txt': {NO_MODEL}; good"),
    ("ARTIFACT=learned MAX_NEW_TOKENS=60 PROMPT=hello", "MAX_NEW_TOKENS=60: must be at most 59; "),
    (f"ARTIFACT=learned PROMPT={'x' * 64}", "PROMPT='xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx: mu"),
]


@pytest.mark.parametrize(("command", "message"), MISTAKES)
def test_mistakes_are_one_line(place, monkeypatch, capsys, command, message):
    monkeypatch.chdir(place)
    Path("latin.txt").write_bytes("größer".encode("latin-1"))
    Path("blank.txt").write_text(" \n")
    Path("good.txt").write_text("good")
    if "learned" in command:
        pack(place / "learned", lively(0, positions="learned"))
    given = {"ARTIFACT": "main", "MODE": "score" if "SCORE_PATH" in command else "generate"}
    given |= dict(word.split("=", 1) for word in command.split())
    assert exit_code(S, **given) == 2
    out, error = capsys.readouterr()
    assert error.startswith(f"error: {message}") and error.count("\n") == 1
    assert out == ""


def test_a_file_holds_the_scores(place, tmp_path, capsys):
    path = write(tmp_path, "rows.jsonl", *PAIRS, {})
    file = tmp_path / "scores.json"
    scores = scored(place, "preference", path, score_file=str(file))
    written = json.loads(file.read_text())
    assert written["scores"] == {path: scores} and written["score"] == "preference"
    assert written["settings"]["score_path"] == path and written["script"] == "sample.py"
    assert written["model"] == str(place / "main" / "model.upar")
    rows, line = capsys.readouterr().out.splitlines()
    assert f"{path}: 5 rows, used 3 prompt/chosen/rejected, 1 messages" in rows
    assert rows.endswith("left out missing field 'chosen': 1 (the first is row 5)")
    assert written["rows"] == [rows]
    assert line.startswith(f"preference {path}: contexts_cut:0 accuracy:[") and " n:4" in line


def test_a_network_by_other_code_is_warned_of(place, capsys):
    """A run's log.txt begins with the script that trained it."""
    source = str(place / "main" / "model.upar")
    log = place / "main" / "log.txt"
    own = (ROOT / "train_gpt.py").read_text()
    for text, warned in ((own, False), (own.replace("F.relu(h).square()", "F.relu(h)"), True)):
        log.write_text(text)
        S.check_code("ARTIFACT", source)
        err = capsys.readouterr().err
        assert err.startswith("warning: ARTIFACT: the script in ") == warned and bool(err) == warned
    log.unlink()
    S.check_code("ARTIFACT", source)
    assert not capsys.readouterr().err


# ------------------------------------------------------------------------------ generate and guide
def test_a_prompt_can_be_a_users_turn(place, capsys):
    artifact = str(place / "main")
    changes = dict(prompt="hi", layout="chat", system="s", max_new_tokens=9, device="cpu")
    S.sample(S.Settings(artifact=artifact, **changes))
    net, *_ = S.load_model("ARTIFACT", artifact)
    prompt = [BOS, 260, *ids_of("s"), 263, 261, *ids_of("hi"), 263, 262]
    stop = frozenset([263, BOS])
    [one] = S.generate(net, [prompt], 1, 9, 0.8, [(1337,)], stop, S.truncation(S.Settings()))
    assert capsys.readouterr().out == S.completion(BYTES, prompt, one.ids) + "\n"


def test_the_guides_commands_run(tmp_path, monkeypatch, capsys):
    """Every command of docs/scoring.md, by tiny models and files of the names that stand there.

    Those of lm-evaluation-harness are run by test_harness.py.
    """
    ours = [block for block in blocks("scoring.md", "bash") if "lm_eval" not in block]
    commands = "".join(ours).splitlines()
    (tmp_path / "runs").mkdir()
    for seed, name in enumerate(("first", "start")):
        pack(tmp_path / "runs" / name, lively(seed, train_seq_len=256))
    (tmp_path / "book.txt").write_text(DOCUMENTS[0])
    row = json.dumps({"text": DOCUMENTS[2]}).encode()
    (tmp_path / "val.jsonl.zst").write_bytes(zstandard.compress(row))
    write(tmp_path, "pairs.jsonl", *PAIRS)
    (tmp_path / "data").mkdir()
    write(tmp_path, "data/sort.jsonl", *({"prompt": f"p{i}", "answer": "a"} for i in range(30)))
    monkeypatch.chdir(tmp_path)
    for command in commands:
        *changes, python, script = shlex.split(command)
        assert (python, script) == ("python", "sample.py")
        monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
        given = dict(change.split("=", 1) for change in changes)
        assert exit_code(S, **given) == 0, (command, capsys.readouterr().err)
        assert capsys.readouterr().out.strip()
    scores = json.loads((tmp_path / "task.json").read_text())["scores"]
    assert len(commands) == 6 and [*scores] == ["data/sort.jsonl"]


# ---------------------------------------------------------------------------------- answers, extremes
def test_a_file_holds_all_answers(place, tmp_path, monkeypatch):
    """Of a task: the greedy one and the samples of each problem, with their rewards."""
    rows = [{"prompt": prompt, "answer": "R"} for prompt in ("abc", "de", "fgh")]
    path = write(tmp_path, "rows.jsonl", *rows)
    (tmp_path / "mine.py").write_text(
        "def size(completions, **columns):\n    return [len(text) / 4 for text in completions]\n"
        "def none(prompts, **columns):\n    return [None] * len(prompts)\n"
    )
    file = tmp_path / "scores.json"
    given = dict(eval_samples=2, max_new_tokens=6, temperature=1.0, score_file=str(file))
    scored(
        place, "task", path, reward=f"{tmp_path}/mine.py:size,{tmp_path}/mine.py:none:2", **given
    )
    written = json.loads(file.read_text())
    assert list(written["scores"]) == list(written["answers"]) == [path]
    answers = written["answers"][path]
    assert [one["prompt"] for one in answers] == "abc de fgh abc abc de de fgh fgh".split()
    assert [one["temperature"] for one in answers] == [0] * 3 + [1.0] * 6
    for one in answers:
        assert one["rewards"] == {"size": len(one["completion"]) / 4, "none": None}
        assert one["reward"] == one["rewards"]["size"] and one["answer"] == "R"
        assert one["finished"] in (True, False) and 1 <= one["tokens"] <= 6
    scored(
        place, "win", path, score_model=str(place / "other"), max_new_tokens=4, score_file=str(file)
    )
    answers = json.loads(file.read_text())["answers"][path]
    models = [str(place / name / "model.upar") for name in ("main", "other")]
    assert [one["model"] for one in answers] == [name for name in models for _ in range(3)]


def test_a_score_that_is_not_finite_is_an_error(place, tmp_path, monkeypatch, capsys):
    """All files are scored before; SCORE_FILE has null."""
    good = tmp_path / "good.txt"
    bad = tmp_path / "bad.txt"
    good.write_text("abc")
    bad.write_text("axc")
    file = tmp_path / "scores.json"
    nats = iter([math.nan, 3.0])
    monkeypatch.setattr(S, "summed_nats", lambda *_: next(nats))
    given = settings(place, "text", score_path=f"{bad},{good}", score_file=str(file))
    with pytest.raises(
        FloatingPointError, match=r"^SCORE=text: not finite: bpb of .*bad\.txt, nats"
    ):
        S.score(given)
    scores = json.loads(file.read_text())["scores"]
    assert scores[str(bad)]["bpb"] is None and scores[str(good)]["nats"] == 3
    assert "bpb:nan" in capsys.readouterr().out
    assert S.not_finite({"a": [0.1, None, math.inf], "b": [0.1, None, None], "c": 3}) == ["a"]
