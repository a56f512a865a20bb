"""The scores of sample.py against second computations on tiny models; rows, settings, errors."""

import io
import itertools
import math
import re
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
from test_weights import network

import sample as S
import train_gpt as T
import train_grpo as G
from conftest import BYTES, ROOT, blocks, exit_code, pack, read_json, refusal, write_lines

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
        net = lively(seed, train_seq_len=60 if name == "other" else CONTEXT)
        if name == "judge":
            S.add_value_head(net)
            net.w_value.data.normal_()
        pack(net, BYTES, folder / name)
    return folder


def loaded(place, name):
    return S.load_model("ARTIFACT", str(place / name))[0]


def model_of(net, tokenizer=BYTES):
    return S.Model(net, tokenizer, "file", CONTEXT)


def settings(place, score, artifact="main", **changes):
    artifact = str(place / artifact)
    made = S.Settings(mode="score", score=score, artifact=artifact, device="cpu", **changes)
    S.check_modes(made)
    return made


def scored(place, score, path, **changes):
    """Return the scores of one file."""
    [scores] = S.score(settings(place, score, score_path=str(path), **changes)).values()
    return scores


def write(folder, name, *rows):
    rows = [row.encode() if isinstance(row, str) else row for row in rows]
    return str(write_lines(folder / name, rows))


@torch.no_grad()
def plain_logps(net, context, answer):
    """Return the log-probabilities of one row alone, by the whole forward pass."""
    logps = net(torch.tensor([[*context, *answer]]))[0].double().log_softmax(-1)
    return [logps[len(context) - 1 + i, token].item() for i, token in enumerate(answer)]


def ids_of(text):
    return [byte + 4 for byte in text.encode()]


def bits_per_byte(nats, size):
    return pytest.approx(nats / math.log(2) / size, rel=1e-6)


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
STREAM = list(itertools.chain(*([BOS, *ids_of(text)] for text in DOCUMENTS)))


def test_a_txt_file_is_split_as_in_preparation(tmp_path):
    text = "one\n<|endoftext|>\n<|startoftext|>the <|endoftext|> two<|endoftext|>\n"
    for name, documents in (("a.txt", ["one", "the <|endoftext|> two"]), ("a.md", [text])):
        (tmp_path / name).write_text("\ufeff" + text, encoding="utf-8")
        log = []
        assert S.read_documents(str(tmp_path / name), log.append) == documents
        path = tmp_path / name
        assert log == [f"data: {path}: split at <|endoftext|>: 2 documents"] * (name == "a.txt")
    path = tmp_path / "blank.txt"
    path.write_text("<|endoftext|>\n\n<|endoftext|>\n")
    refusal(
        S.UserError, "^SCORE_PATH=.*blank.txt.*; empty text", S.read_documents, str(path), print
    )


def test_texts_have_the_scores_of_training(place, tmp_path):
    """In windows side by side, in sliding ones, and over whole documents: longer than the context, one
    without ids, the end. In float64, as train_gpt.py has them.
    """
    net = loaded(place, "main").double()
    rows = [{"text": text} for text in DOCUMENTS]
    path = write(tmp_path, "text.jsonl", rows[0], "", "{no json", rows[1], {"text": " "}, rows[2])
    asked = settings(place, "text", score_path=path, stateful=True, eval_stride=20)
    models = S.Models(model_of(net), None, None, print)
    scores = S.score_text(models, path, asked)
    size = sum(len(text.encode()) for text in DOCUMENTS)
    assert (scores["documents"], scores["tokens"]) == (3, len(STREAM) - 1)
    assert scores["bytes"] == scores["source_bytes"] == size and "bpb_of_source" not in scores
    scorer = T.Scorer(BOS, T.Runtime(0, 1, torch.device("cpu"), False), CONTEXT, 1)
    text = T.EvalText(np.array(STREAM), size)
    for name, expected in (
        ("", scorer.score(net, text)),
        ("_sliding", scorer.score(net, text, 20)),
        ("_stateful", T.score_documents(scorer, net, text)),
    ):
        assert scores[f"nats{name}"] == pytest.approx(expected.nats, rel=1e-12)
        assert scores[f"bpb{name}"] == pytest.approx(expected.bpb, rel=1e-12)
    assert [len(row.answer) for row in S.document_rows([BOS, 7, BOS, BOS, 8, 9], BOS)] == [2, 1, 2]
    net.config.positions = "learned"
    refusal(S.UserError, "^STATEFUL=1: must be 0", S.score_text, models, path, asked)


def test_plain_texts_and_the_bytes_that_a_tokenizer_loses_and_adds(tmp_path, capsys):
    """A file is a document, with its line ends; each has its own score. Bits are of the tokens' bytes,
    and of the text's: a tokenizer may drop spaces, or decode a space to three bytes.
    """
    text = "the  cat\r\n\nsat   on"
    (tmp_path / "a.txt").write_bytes(text.encode())
    (tmp_path / "b.txt.zst").write_bytes(zstandard.compress(text.encode()))
    path = f"{tmp_path}/a.txt,{tmp_path}/b.txt.zst"
    words = ["thecat", "sat", "onthe", "matandhat"] * 9
    for kind, size in ((PREFIX, len("the cat sat on")), (dict(NO_SPACE, lines=words), len(text))):
        tokenizer = S.load_tokenizer(train_model(tmp_path / "some.model", **kind))
        pack(lively(0, tokenizer), tokenizer, tmp_path / "main")
        scores, second = S.score(settings(tmp_path, "text", score_path=path)).values()
        assert scores == second
        assert (scores["bytes"], scores["source_bytes"]) == (size, len(text))
        nats = -math.fsum(plain_logps(loaded(tmp_path, "main"), [BOS], tokenizer.encode(text)))
        assert scores["bpb"] == bits_per_byte(nats, size)
        if size < len(text):
            assert scores["bpb_of_source"] == bits_per_byte(nats, len(text))
        out = capsys.readouterr().out
        assert ("more than the text has" in out) == (size == len(text))
        assert f"text {tmp_path}/a.txt:" in out


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
    """Return a file of problems, of which some are held out."""
    rows = [{"prompt": f"p{i}", "answer": f"a{i}"} for i in range(count)]
    return write(folder, "problems.jsonl", *rows)


def test_pass_at_k_by_enumeration(place, tmp_path, monkeypatch):
    path = problem_file(tmp_path, 9)
    right = [0, 1, 3, 5, 6]
    greedy = [["no"], ["a1"], ["no"], ["a3"], ["no"]]
    drawn = [[f" a{i}\n"] * count + ["no"] * (6 - count) for i, count in enumerate(right)]
    scripted(monkeypatch, greedy, drawn)
    scores = scored(place, "task", path, eval_prompts=5, eval_samples=6, max_new_tokens=12)
    assert scores["greedy"] == S.interval([0.0, 1.0, 0.0, 1.0, 0.0])
    for k in (1, 2, 4, 6):
        subsets = [*itertools.combinations(range(6), k)]
        chances = [statistics.fmean(min(subset) < count for subset in subsets) for count in right]
        assert scores[f"pass{k}"] == pytest.approx(S.interval(chances), abs=1e-12)
    assert [name for name in scores if "pass" in name] == ["pass1", "pass2", "pass4", "pass6"]
    assert (scores["n"], scores["samples"]) == (5, 6)


def test_answers_are_those_of_generate_as_in_training(place, tmp_path):
    """Problems, prompts and seeds as the RL scripts have them, so that scores can be repeated."""
    path = problem_file(tmp_path, 99)
    changes = dict(eval_prompts=7, max_new_tokens=9, temperature=1.0, top_k=0, seed=3)
    made = settings(place, "task", score_path=path, held_out=True, **changes)
    made = replace(made, layout="chat")
    model = model_of(loaded(place, "main"))
    questions = S.read_questions([model], path, made, print)
    problems = G.split_problems(G.Settings(train_files=path, eval_prompts=7))[2]
    assert [question.problem for question in questions] == problems and len(problems) == 7
    prompts = [S.asked_ids(BYTES, [(USER, problem["prompt"])]) for problem in problems]
    seeds = [(3, 1 << 31, i) for i in range(7)]
    samples = S.generate(model.network, prompts, 2, 9, 1.0, seeds, S.stop_ids(BYTES))
    answers = S.answer_questions(model, questions, made, 2)
    for i, (answer, one) in enumerate(zip(answers, samples, strict=True)):
        text = S.completion(BYTES, prompts[i // 2], one.ids)
        assert (answer.question, answer.text) == (questions[i // 2], text)
        assert (answer.ids, answer.finished) == (one.ids, one.finished)


def test_prompts_without_room_are_named_by_row(place, tmp_path, capsys):
    rows = [{"prompt": "p" * size} for size in (3, 50, 51, 70)]
    path = write(tmp_path, "rows.jsonl", "", *rows)
    scores = scored(place, "quality", path, layout="chat", max_new_tokens=10)
    assert scores["prompts"] == 2  # BOS, role, 50, end, role and 10 are 64
    out = capsys.readouterr().out
    assert "MAX_NEW_TOKENS=10 in the context of 64 tokens: 1 (the first is row 4); prompt as" in out


# ------------------------------------------------------------------------------------- preferences
TALK = [(USER, "u"), (ASSISTANT, "v"), (USER, "w")]
MESSAGES = [{"role": role.strip("<|>"), "content": text} for role, text in TALK]
PAIRS = [
    {"prompt": "a question", "chosen": "good answer", "rejected": "bad"},
    {"prompt": MESSAGES, "chosen": "x", "rejected": "a longer y"},
    {"prompt": "1", "chosen": "2", "rejected": "3"},
    {"prompt": "4", "chosen": "größer", "rejected": "klein"},
]


def plain_answer(net, turns, text):
    """Return the log-probabilities of an answer, <|end|> too, after turns."""
    ids = [BOS]
    for role, words in turns:
        ids += [BYTES.roles[role], *ids_of(words), 263]
    return plain_logps(net, [*ids, 262], [*ids_of(text), 263])


@torch.no_grad()
def plain_reward(net, turns, text):
    ids = [*S.asked_ids(BYTES, turns), *ids_of(text), 263]
    return float(net.features(torch.tensor([ids]))[0, -1] @ net.w_value)


def test_preferences_by_hand(place, tmp_path, monkeypatch):
    """By log-probabilities over a reference's, and by the rewards of a value head. An answer must fit the
    contexts of both models. Rows of other lengths stand beside each.
    """
    monkeypatch.setattr(S, "BATCH_ROWS", 3)
    path = write(tmp_path, "pairs.jsonl", *PAIRS, {**PAIRS[0], "rejected": "z" * 61})
    other = str(place / "other")
    scores = scored(place, "preference", path, artifact="judge", score_model=other)
    judge, reference = (loaded(place, name) for name in ("judge", "other"))
    margins = np.zeros((len(PAIRS), 3))
    for margin, row in zip(margins, PAIRS, strict=True):
        turns, *answers = S.row_pair(row, set())[1]
        for sign, (_, text) in zip((1, -1), answers, strict=True):
            logps, before = (plain_answer(net, turns, text) for net in (judge, reference))
            margin[0] += sign * (sum(logps) - sum(before))
            margin[1] += sign * (np.mean(logps) - np.mean(before))
            margin[2] += sign * plain_reward(judge, turns, text)
    for kind, values in zip(("", "_per_token", "_reward"), margins.T, strict=True):
        assert scores[f"accuracy{kind}"] == S.interval([float(value > 0) for value in values])
        assert scores[f"margin{kind}"] == normal_interval(values)
    assert (scores["n"], scores["ties"]) == (4, 0)
    assert scores["chosen_longer"] == S.interval([1.0, 0.0, 0.0, 1.0])


def test_long_contexts_are_cut_and_long_answers_left_out(place):
    """An answer may fill the context, with the token that ends it; then nothing but BOS stands before."""
    model = model_of(loaded(place, "main"))
    for count, text, kept in (
        (10, "yes", [261, *ids_of("q" * 10), 263, 262]),
        (80, "yes", [*ids_of("q" * 58), 263, 262]),  # with "yes" and its end, which is not read, 64
        (80, "no", [*ids_of("q" * 59), 263, 262]),
        (1, "a" * 63, []),
    ):
        [row] = S.answer_rows(model, [(USER, "q" * count)], [(ASSISTANT, text)])
        assert row == S.Continuation([BOS, *kept], [*ids_of(text), 263], is_cut=count != 10)
    fault = "^answer longer than the context of 64 tokens$"
    refusal(S.RowError, fault, S.answer_rows, model, [(USER, "q")], [(ASSISTANT, "a" * 64)])


# --------------------------------------------------------------------------------------------- win
@pytest.mark.parametrize("judge", ["", "judge"])
def test_win_rate_by_a_checker_or_a_reward_model(place, tmp_path, monkeypatch, judge):
    path = problem_file(tmp_path, 6)
    sides = (["a0", "a1", "a2", "", "b", "c"], ["", "no", "a2", "a3", "b", "d"])
    scripted(monkeypatch, *([[text] for text in side] for side in sides))
    changes = dict(score_model=str(place / "other"), max_new_tokens=12)
    if judge:
        changes |= dict(score_judge=str(place / judge))
    scores = scored(place, "win", path, **changes)
    marks = []
    for side in sides:
        rewards = [float(text == f"a{i}") for i, text in enumerate(side)]
        if judge:
            net = loaded(place, judge)
            rewards = [plain_reward(net, [(USER, f"p{i}")], text) for i, text in enumerate(side)]
        marks.append(rewards)
    leads = np.where(np.equal(*sides), 0, np.subtract(*marks))
    counts = [(leads > 0).sum(), (leads == 0).sum(), (leads < 0).sum()]
    assert [scores[name] for name in ("wins", "ties", "losses")] == counts and all(counts)
    means = scores["reward"], scores["reward_of_other"]
    assert means == pytest.approx(np.mean(marks, 1), abs=1e-4)
    assert scores["win_rate"] == normal_interval((1 + np.sign(leads)) / 2)
    assert scores["difference"] == normal_interval(leads)


def test_graded_rewards_decide_wins_by_their_weights(place, tmp_path, monkeypatch):
    """None is 1, so none would count as right; the weighted totals stand in SCORE_FILE, too."""
    path = problem_file(tmp_path, 4)
    (tmp_path / "graded.py").write_text(
        "def size(completions):\n    return [len(text) / 16 for text in completions]\n"
        "def vowels(completions):\n    return [text.count('a') / 16 for text in completions]\n"
    )
    sides = (["xxx", "aax", "x", "xa"], ["x", "xxx", "xx", "ax"])
    scripted(monkeypatch, *([[text] for text in side] for side in sides))
    reward = f"{tmp_path}/graded.py:size:2,{tmp_path}/graded.py:vowels:-1"
    file = tmp_path / "scores.json"
    given = dict(score_model=str(place / "other"), reward=reward, score_file=str(file))
    scores = scored(place, "win", path, max_new_tokens=12, **given)
    totals = [[2 * len(text) / 16 - text.count("a") / 16 for text in side] for side in sides]
    assert [scores[name] for name in ("wins", "ties", "losses")] == [1, 1, 2]
    assert (scores["reward"], scores["reward_of_other"]) == (*map(statistics.fmean, totals),)
    assert scores["difference"] == normal_interval(np.subtract(*totals))
    answers = read_json(file)["answers"][path]
    assert [answer["reward"] for answer in answers] == sum(totals, [])
    assert answers[0]["rewards"] == {"size": 3 / 16, "vowels": 0}


def test_contexts_that_a_reward_model_does_not_see_are_counted(place, tmp_path, monkeypatch):
    """A conversation of 64 tokens fits the judge's context of 64; here the last is of 65."""
    model = model_of(loaded(place, "judge"))
    talks = [
        [(USER, "q"), (ASSISTANT, "a" * count)] for count in (5, 58, 59)
    ]  # and 6 of the layout
    assert len(S.asked_ids(BYTES, talks[0][:1])) + 5 + 1 == 5 + 6
    values, contexts_cut = S.rewards(model, talks)
    assert contexts_cut == 1
    assert values[1] == pytest.approx(plain_reward(model.network, talks[1][:1], "a" * 58), abs=1e-4)
    path = problem_file(tmp_path, 2)
    scripted(monkeypatch, [["a" * 70], ["b"]], [["a" * 80], ["a" * 90]])
    given = dict(score_model=str(place / "other"), score_judge=str(place / "judge"))
    assert scored(place, "win", path, max_new_tokens=12, **given)["contexts_cut"] == 3
    pairs = write(tmp_path, "pairs.jsonl", PAIRS[0], {**PAIRS[0], "prompt": "q" * 70})
    scores = scored(place, "preference", pairs, artifact="judge")
    assert scores["contexts_cut"] == scores["contexts_cut_reward"] == 2


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
@pytest.mark.parametrize(("right", "n"), [(0, 5), (5, 5), (1, 1), (240, 1000)])
def test_wilson_ends_are_where_the_score_test_turns(right, n):
    """Both ends p solve (mean - p)^2 = z^2 p (1 - p) / n; they stay within 0 and 1."""
    mean, low, high = S.interval([1.0] * right + [0.0] * (n - right))
    pull = 1.959964**2 / n
    roots = np.roots([1 + pull, -(2 * mean + pull), mean * mean]).real
    assert mean == right / n and [low, high] == pytest.approx(sorted(roots), abs=1e-7)


def test_other_means_have_normal_intervals():
    assert S.interval([0.0, 1.0, 1.0], share=False) == normal_interval([0.0, 1.0, 1.0])
    assert S.interval([0.3]) == [0.3, None, None]
    low, high = S.interval([1.0, 1.0, 0.75, 1.0])[1:]  # a share of shares
    assert 0.8 < low < 0.82 and high == 1 and S.interval([0.0, 0.25, 0.0, 0.0])[1] == 0


# ------------------------------------------------------------------------------- rows and settings
LAST = [{"role": "assistant", "content": "b"}, {"role": "user", "content": "x"}]
PROMPTS = [  # a row, and the turns that a model answers
    ({"messages": MESSAGES + LAST[:1]}, TALK),
    ({"messages": MESSAGES + LAST}, [*TALK, (ASSISTANT, "b"), (USER, "x")]),
    ({"prompt": MESSAGES, "completion": LAST[:1]}, TALK),
    ({"prompt": MESSAGES}, TALK),
    ({"prompt": " q", "answer": "a"}, [(USER, " q")]),
    ({"question": "q", "system": "s"}, [(SYSTEM, "s"), (USER, "q")]),
    ({"prompt": None, "instruction": "q", "input": "x", "output": "a"}, [(USER, "q\n\nx")]),
    ({"prompt": "w", "history": [["u", "v"]]}, TALK),
    (PAIRS[1], TALK),
    ({**PAIRS[1], "system": "s"}, [(SYSTEM, "s"), *TALK]),
]


@pytest.mark.parametrize(("row", "turns"), PROMPTS)
def test_prompts_are_the_turns_before_the_last_answer(row, turns):
    notes = set()
    assert (S.row_prompt(row, notes), notes) == (turns, set())


def test_what_is_no_prompt_is_refused_and_what_is_not_read_noted():
    for row in ({"prompt": " "}, {"prompt": "", "chosen": "a", "rejected": "b"}):
        refusal(S.RowError, "^blank prompt$", S.row_prompt, row, set())
    refusal(S.RowError, "^missing field 'prompt'$", S.row_prompt, {"text": "x"}, set())
    notes = set()
    row = {"prompt": "q", "documents": ["d"], "id": 3, "answer": "a"}
    assert S.row_prompt(row, notes) == [(USER, "q")]
    assert notes == {("not in the prompt", "documents"), ("columns not read", "id")}
    notes = set()
    row = {"question": "q", "response": "yes", "label": False}
    assert S.row_prompt(row, notes) == [(USER, "q")]
    assert notes == {("not used", "an answer with label or kto_tag false")}


def test_prompts_are_those_that_training_holds_out(place, tmp_path, capsys):
    """With all fields of a prompt, without repeated prompts, and without an answer where it is not read."""
    rows = []
    for i in range(60):
        rows.append({"question": f"q{i}", "answer": f"a{i}", "system": "s", "input": f"{i % 3}"})
    rows += [rows[0], {**rows[1], "answer": "b"}, {"question": "q"}]
    path = write(tmp_path, "rows.jsonl", *rows)
    problems = G.split_problems(G.Settings(train_files=path, eval_prompts=2))[2]
    assert len(problems) == 2
    given = dict(score_path=path, held_out=True, eval_prompts=2, max_new_tokens=4)
    model = model_of(loaded(place, "main"))
    for score in ("task", "quality"):
        capsys.readouterr()
        questions = S.read_questions([model], path, settings(place, score, **given), print)
        assert [one.turns for one in questions] == [*map(S.query_turns, problems)]
        counted, named = capsys.readouterr().out.splitlines()
        count = 60 + (score == "quality")
        held_out, beyond = map(
            int, re.findall(r"=1 leaves out (\d+), EVAL_PROMPTS=2 (\d+)", named)[0]
        )
        assert f"of {count} prompts" in named and held_out + beyond + 2 == count
        if score == "task":
            assert "an earlier row: 1 (the first is row 61)" in counted
            assert "an earlier row, with another answer: 1 (the first is row 62)" in counted
            assert "1 (the first is row 63)" in counted
        else:
            assert "left out the prompt of an earlier row: 2" in counted
    assert held_out > 40 and beyond


MISTAKES = [
    ("SCORE=win", "SCORE='win': not read with MODE=generate"),
    ("KERNELS=auto", "KERNELS='auto': no setting of this script"),
    ("COMPILE=max-autotune", "COMPILE='max-autotune': must be 0 or 1"),
    ("SCORE_PATH=x COMPILE=1", "COMPILE='1': not read with MODE=score SCORE=text;"),
    ("SCORE_PATH=x SCORE=preference COMPILE=1", "COMPILE='1': not read with MODE=score SCORE=pre"),
    (
        "SCORE_PATH=x SCORE=win SCORE_MODEL=main SCORE_JUDGE=judge REWARD=x.py:f",
        "REWARD='x.py:f': not read with MODE=score SCORE=win and a SCORE_JUDGE",
    ),
    ("MODE=chat PROMPT=x", "PROMPT='x': not read with MODE=chat"),
    ("SCORE_PATH=x TOP_K=3", "TOP_K='3': not read with MODE=score SCORE=text"),
    ("SCORE_PATH=x SCORE=preference LAYOUT=chat", "LAYOUT='chat': not read with MODE=score"),
    ("SCORE_PATH=", "SCORE_PATH='': must be given for SCORE=text"),
    ("SCORE_PATH=latin.txt", "SCORE_PATH='latin.txt': must be UTF-8 text"),
    ("SCORE_PATH=blank.txt", "SCORE_PATH='blank.txt': must be UTF-8 text or JSON line"),
    ("SCORE_PATH=none.txt", "none.txt: cannot be read; [Errno 2]"),
    ("SCORE_PATH=good.txt EVAL_STRIDE=64", "EVAL_STRIDE=64: must be less than the con"),
    ("SCORE_PATH=x SCORE=win", "SCORE_MODEL='': no such file"),
    ("SCORE_PATH=x SCORE=win SCORE_MODEL=main SCORE_JUDGE=other", "SCORE_JUDGE='other': has no v"),
    ("SCORE_PATH=good.txt SCORE_FILE=no/x", "SCORE_FILE='no/x': must be a file, in a folder "),
    ("SCORE_PATH=x,good.txt SCORE_FILE=./good.txt", "SCORE_FILE='./good.txt': must not be a file"),
    ("LAYOUT=chat", "PROMPT='': must be given for LAYOUT=chat"),
    (
        "ARTIFACT=good.txt",
        "ARTIFACT='good.txt': good.txt: is no underpar artifact; a model is a run, a checkpoint or an",
    ),
    ("ARTIFACT=learned MAX_NEW_TOKENS=60 PROMPT=hello", "MAX_NEW_TOKENS=60: must be at most 59; "),
    (f"ARTIFACT=learned PROMPT={'x' * 64}", "PROMPT='xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx: mu"),
]


def test_mistakes_are_one_line(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    Path("latin.txt").write_bytes("größer".encode("latin-1"))
    Path("blank.txt").write_text(" \n")
    Path("good.txt").write_text("good")
    pack(lively(0, positions="learned"), BYTES, place / "learned")
    for command, message in MISTAKES:
        given = {"ARTIFACT": "main", "MODE": "score" if "SCORE_PATH" in command else "generate"}
        given |= dict(word.split("=", 1) for word in command.split())
        assert exit_code(S, **given) == 2
        out, error = capsys.readouterr()
        assert error.startswith(f"error: {message}") and error.count("\n") == 1, error
        assert out == ""


def test_a_network_by_other_code_is_warned_of(place, capsys):
    """A run's log.txt begins with the script that trained it."""
    source = str(place / "main" / "model.upar")
    log = place / "main" / "log.txt"
    own = (ROOT / "train_gpt.py").read_text()
    for text in (own, own.replace("F.relu(h).square()", "F.relu(h)")):
        log.write_text(text)
        S.check_code("ARTIFACT", source)
        line = capsys.readouterr().err
        assert line.startswith("warning: ARTIFACT: ") == (text is not own) == bool(line)
    log.unlink()


# -------------------------------------------------------------------------------------- score files
def test_a_file_holds_scores_and_all_answers(place, tmp_path, capsys):
    """Of a task: the greedy one and the samples of each problem, with their rewards."""
    rows = [{"prompt": prompt, "answer": "R"} for prompt in ("abc", "de", "fgh")]
    path = write(tmp_path, "rows.jsonl", *rows, {})
    (tmp_path / "mine.py").write_text(
        "def size(completions, **columns):\n    return [len(text) / 4 for text in completions]\n"
        "def none(prompts, **columns):\n    return [None] * len(prompts)\n"
    )
    file = tmp_path / "scores.json"
    given = dict(eval_samples=2, max_new_tokens=6, temperature=1.0, score_file=str(file))
    reward = f"{tmp_path}/mine.py:size,{tmp_path}/mine.py:none:2"
    scores = scored(place, "task", path, reward=reward, **given)
    written = read_json(file)
    assert (written["scores"], written["score"]) == ({path: scores}, "task")
    assert written["settings"]["score_path"] == path
    assert written["model"] == str(place / "main" / "model.upar")
    assert written["rows"] == capsys.readouterr().out.splitlines()[:1]
    answers = written["answers"][path]
    assert [one["prompt"] for one in answers] == "abc de fgh abc abc de de fgh fgh".split()
    assert [one["temperature"] for one in answers] == [0] * 3 + [1.0] * 6
    for one in answers:
        assert one["rewards"] == {"size": len(one["completion"]) / 4, "none": None}
        assert one["reward"] == one["rewards"]["size"] and 1 <= one["tokens"] <= 6


def test_finished_scores_are_kept(place, tmp_path, monkeypatch):
    """Where the second file is unusable, and where nobody reads what is printed."""
    file = tmp_path / "scores.json"
    (tmp_path / "good").write_text("abc")
    monkeypatch.chdir(tmp_path)
    given = settings(place, "text", score_path="good,missing", score_file=str(file))
    refusal(S.UserError, "^missing: ", S.score, given)
    kept = read_json(file)["scores"]
    assert [*kept] == ["good"] and kept["good"]["nats"] > 0
    file.unlink()

    def close(*words, **_):
        raise BrokenPipeError

    monkeypatch.setattr(S, "print", close, raising=False)
    with pytest.raises(BrokenPipeError):
        S.score(replace(given, score_path="good"))
    assert read_json(file)["scores"] == kept


def test_a_score_that_is_not_finite_is_an_error(place, tmp_path, monkeypatch):
    """All files are scored before; SCORE_FILE has null."""
    file = tmp_path / "scores.json"
    for name in ("bad", "good"):
        (tmp_path / name).write_text("abc")
    monkeypatch.chdir(tmp_path)
    nats = iter([math.nan, 3.0])
    monkeypatch.setattr(S, "summed_nats", lambda *_: next(nats))
    given = settings(place, "text", score_path="bad,good", score_file=str(file))
    refusal(FloatingPointError, "not finite: bpb of bad, nats of bad;", S.score, given)
    scores = read_json(file)["scores"]
    assert scores["bad"]["bpb"] is None and scores["good"]["nats"] == 3


# ------------------------------------------------------------------------------ generate and guide


def test_the_guides_commands_run(tmp_path, monkeypatch, capsys):
    """Every command of docs/scoring.md, by tiny models and files of the names that stand there.

    Those of lm-evaluation-harness are run by test_harness.py, those of test-time training by
    test_smoke.py.
    """
    ours = [block for block in blocks("scoring.md", "bash") if "lm_eval" not in block]
    lines = "".join(ours).splitlines()
    commands = [line for line in lines if not re.search(r"train_gpt\.py|adapt\.py", line)]
    for name in ("runs", "data"):
        (tmp_path / name).mkdir()
    for seed, name in enumerate(("first", "start")):
        pack(lively(seed, train_seq_len=256), BYTES, tmp_path / "runs" / name)
    (tmp_path / "book.txt").write_text(DOCUMENTS[0])
    (tmp_path / "val.jsonl.zst").write_bytes(zstandard.compress(b'{"text": "abc"}'))
    write(tmp_path, "pairs.jsonl", *PAIRS)
    write(tmp_path, "data/sort.jsonl", *({"prompt": f"p{i}", "answer": "a"} for i in range(30)))
    monkeypatch.chdir(tmp_path)
    for command in commands:
        *changes, python, script = shlex.split(command)
        assert (python, script) == ("python", "sample.py")
        monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
        given = dict(change.split("=", 1) for change in changes)
        assert exit_code(S, **given) == 0, (command, capsys.readouterr().err)
        assert capsys.readouterr().out.strip()
    assert len(commands) == 6
