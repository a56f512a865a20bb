"""train_sft.py: rows, masks and packing, each distillation loss against a second form, and what a step's loss is.

Everything here is float64 with an independent reference.
"""

from __future__ import annotations

import collections
import json
import math
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

import train_sft as S

CPU = torch.device("cpu")
BYTES = S.load_tokenizer("bytes")
SYSTEM, USER, ASSISTANT, END = 260, 261, 262, 263
BOS = 1
pytestmark = pytest.mark.usefixtures("one_thread", "float64")


@pytest.fixture
def float64():
    """All in float64, the angles of rotary positions too: in float32 a place costs a row its last digits."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def b(text: str) -> list[int]:
    """Ids of the byte tokenizer: 4 + byte."""
    return [4 + byte for byte in text.encode()]


def turns_of(ids: list[int]) -> list[tuple[str, str]]:
    """The turns of a conversation's ids, of bytes and role tokens."""
    turns = []
    for token in ids[1:]:
        if token in (SYSTEM, USER, ASSISTANT):
            turns.append((S.ROLE_TOKENS[token - SYSTEM], ""))
        elif token != END:
            turns[-1] = (turns[-1][0], turns[-1][1] + chr(token - 4))
    return turns


def network(seed: int = 0, pattern: str = "g a", dim: int = 16, **changes) -> S.GPT:
    """A tiny network, all of whose weights are at work."""
    torch.manual_seed(seed)
    settings = S.Settings(layer_pattern=pattern, model_dim=dim, num_heads=2, train_seq_len=64)
    shape = {"num_kv_heads": 2, "attn_window": 1 << 20, "embed_init_std": 0.02, **changes}
    made = S.GPT(S.model_config(settings, BYTES.vocab_size, BYTES.bos_id, **shape))
    with torch.no_grad():
        for param in made.parameters():
            param.add_(0.1 * torch.randn_like(param))
    return made


def row_of(*turns: tuple[str, str], room: int = 64, train_on: str = "assistant", tokenizer=BYTES) -> S.Row:
    return S.make_row(list(turns), tokenizer, S.Settings(train_seq_len=room, train_on=train_on))


def some_rows(count: int = 9, seed: int = 0, longest: int = 16, train_on: str = "assistant") -> list[S.Row]:
    rng, rows = random.Random(seed), []
    for _ in range(count):
        words = ["".join(rng.choices("abcdef", k=rng.randint(1, longest))) for _ in range(2)]
        rows.append(row_of(("<|user|>", words[0]), ("<|assistant|>", words[1]), train_on=train_on))
    return rows


def windows_of(rows: list[S.Row], room: int = 64) -> list[list[int]]:
    return S.best_fit([len(row.ids) - 1 for row in rows], room)


def one_batch(rows: list[S.Row], windows: list[list[int]] | None = None, wanted: str = "learned") -> SimpleNamespace:
    batch, = S.make_windows(rows, windows or windows_of(rows), CPU, 1 << 30, wanted)
    return batch


# -------------------------------------------------------------------------------------------------- formats and masks
MULTI = [("system", "S"), ("user", "u"), ("assistant", "ab"), ("user", "v"), ("assistant", "c")]
MULTI_IDS = [BOS, SYSTEM, *b("S"), END, USER, *b("u"), END, ASSISTANT, *b("ab"), END, USER, *b("v"), END, ASSISTANT,
             *b("c"), END]
PAIR_IDS = [BOS, USER, *b("hi"), END, ASSISTANT, *b("yo"), END]
NOT = -1
PAIR_TARGETS = [NOT] * 5 + [*b("yo"), END]
MULTI_TARGETS = [NOT] * 7 + [*b("ab"), END] + [NOT] * 4 + [*b("c"), END]
SHAREGPT = {"system": "system", "user": "human", "assistant": "gpt"}
FORMATS = {
    "Alpaca": ("Alpaca", {"instruction": "hi", "input": "", "output": "yo"}, PAIR_IDS, PAIR_TARGETS),
    "Alpaca with input": ("Alpaca", {"instruction": "h", "input": "i", "output": "yo"},
                          [BOS, USER, *b("h\n\ni"), END, ASSISTANT, *b("yo"), END], [NOT] * 7 + [*b("yo"), END]),
    "ShareGPT": ("ShareGPT", {"conversations": [{"from": SHAREGPT[role], "value": text} for role, text in MULTI]},
                 MULTI_IDS, MULTI_TARGETS),
    "messages": ("messages", {"messages": [{"role": role, "content": text} for role, text in MULTI]}, MULTI_IDS,
                 MULTI_TARGETS),
    "prompt/completion": ("prompt/completion", {"prompt": "hi", "completion": "yo"}, PAIR_IDS, PAIR_TARGETS),
    "prompt/response": ("prompt/completion", {"prompt": "hi", "response": "yo"}, PAIR_IDS, PAIR_TARGETS),
    "question/answer": ("question/answer", {"question": "hi", "answer": "yo"}, PAIR_IDS, PAIR_TARGETS),
    "text": ("text", {"text": "hey"}, [BOS, *b("hey"), BOS], [*b("hey"), BOS]),  # its end is the next BOS
    "tool": ("messages", {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "call"},
                                       {"role": "tool", "content": "42"}, {"role": "assistant", "content": "ok"}]},
             [BOS, USER, *b("q"), END, ASSISTANT, *b("call"), END, USER, *b("42"), END, ASSISTANT, *b("ok"), END],
             [NOT] * 4 + [*b("call"), END] + [NOT] * 5 + [*b("ok"), END]),
    "ends with the user": ("messages", {"messages": [{"role": "assistant", "content": "a"},
                                                     {"role": "user", "content": "b"}]},
                           [BOS, ASSISTANT, *b("a"), END, USER, *b("b"), END], [NOT, *b("a"), END] + [NOT] * 3),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("train_on", ["assistant", "all"])
def test_ids_and_targets_by_hand(name, train_on):
    said, given_row, ids, targets = FORMATS[name]
    found, turns = S.row_turns(given_row)
    row = row_of(*turns, train_on=train_on)
    assert found == said and row.ids.tolist() == ids
    for wanted, expected in (("said", targets), ("learned", targets if train_on == "assistant" else ids[1:])):
        batch = one_batch([row], wanted=wanted)
        assert batch.ids.tolist() == [ids[:-1]] and batch.targets.tolist() == [expected]
        assert batch.mask.tolist() == [[target >= 0 for target in expected]]
        assert set(batch.row[0].tolist()) == {0} and batch.numbers.tolist() == [0]


def test_rows_in_a_window_never_predict_one_another():
    """Two rows and padding, by hand; a text's closing BOS is learned, a conversation's next BOS is no target."""
    rows = [row_of(("<|user|>", "hi"), ("<|assistant|>", "yo")), row_of(("", "hey")), row_of(("", "x"))]
    batch = one_batch(rows, [[0, 1], [2]])
    assert batch.ids.tolist() == [[BOS, *b("x"), *[0] * 10], [*PAIR_IDS[:-1], BOS, *b("hey")]]
    assert batch.targets.tolist() == [[*b("x"), BOS, *[NOT] * 10], [*PAIR_TARGETS, *b("hey"), BOS]]
    assert batch.row.tolist() == [[0, 0, *[-1] * 10], [1] * 8 + [2] * 4] and batch.numbers.tolist() == [2, 0, 1]


def test_a_prompt_is_laid_out_as_for_the_rl_scripts():
    """So that train_grpo.py goes on with what is learned here."""
    prompt, end = S.chat_ids(BYTES, "312")
    row = row_of(("<|user|>", "312"), ("<|assistant|>", "123"))
    assert row.ids.tolist() == [*prompt, *b("123"), end]


# ------------------------------------------------------------------------------------------------- files and their rows
def write(path: Path, rows: list) -> Path:
    path.write_bytes(b"".join(row if isinstance(row, bytes) else json.dumps(row).encode() + b"\n" for row in rows))
    return path


def good(number: int, answer: str = "yes") -> dict:
    return {"prompt": f"prompt {number}", "completion": answer}


def read(tmp_path: Path, **changes) -> tuple[SimpleNamespace, list[str]]:
    said = []
    return S.read_data(S.Settings(train_seq_len=64, **changes), BYTES, said.append), said


MALFORMED = [
    ("no known format, fields 'answers, ask'", {"ask": "a", "answers": "b"}),
    ("missing field 'output'", {"instruction": "a"}), ("missing field 'completion' or 'response' or 'answer'",
                                                       {"prompt": "a"}),
    ("field 'output' is no text", {"instruction": "a", "output": 5}),
    ("field 'messages' is no list of messages", {"messages": ["a"]}),
    ("empty answer", {"prompt": "a", "completion": " \n"}), ("empty answer", {"text": ""}),
    ("empty answer", {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]}),
    ("unknown role 'wizard'", {"messages": [{"role": "wizard", "content": "a"}]}),
    ("no turn of the assistant", {"messages": [{"role": "user", "content": "a"}]}),
    ("answer longer than the context, TRAIN_SEQ_LEN=64", {"prompt": "a", "completion": "b" * 59}),
    ("invalid UTF-8", b'{"prompt": "a", "completion": "\xff"}\n'),
    ("half a surrogate pair, which is no Unicode", b'{"prompt": "a", "completion": "\\ud800"}\n'),
    ("no JSON", b"{nothing\n"), ("no JSON object", [1, 2]),
]


def test_every_malformed_row_is_counted_and_named(tmp_path):
    rows = [good(at) for at in range(40)] + [row for _, row in MALFORMED]
    path = write(tmp_path / "a.jsonl", rows)
    data, said = read(tmp_path, train_files=str(path))
    assert len(data.rows) + len(data.held_out) == 40
    faults = collections.Counter(kind for kind, _ in MALFORMED)
    first = {kind: 41 + [name for name, _ in MALFORMED].index(kind) for kind in faults}
    left = "; ".join(f"{kind}: {count} (the first is row {first[kind]})" for kind, count in faults.items())
    assert said[0] == f"data: {path}: 55 rows, used 40 prompt/completion; left out {left}"


def test_a_row_of_exactly_the_context_is_used():
    assert len(row_of(("<|user|>", "a"), ("<|assistant|>", "b" * 58)).ids) == 64
    with pytest.raises(S.RowError, match="^answer longer than the context, TRAIN_SEQ_LEN=64$"):
        row_of(("<|user|>", "a"), ("<|assistant|>", "b" * 59))


@pytest.mark.parametrize(("rows", "said"), [
    ([row for _, row in MALFORMED], r"15 rows, used none; left out .*; must hold one usable row at least"),
    ([], r"0 rows, used none; left out none; must hold one usable row at least"),
    ([good(0)] * 3, r"(0|3) rows to train on, and (3|0) held out of all; must be 1 and 2 at least; VAL_FILES names"),
])
def test_a_file_without_rows_is_an_error(tmp_path, rows, said):
    with pytest.raises(S.UserError, match=said) as error:
        read(tmp_path, train_files=str(write(tmp_path / "a.jsonl", rows)))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["a.jsonl:0", "a.jsonl,a.jsonl", "a.jsonl:2, a.jsonl:3"])
def test_wrong_weights(text, tmp_path):
    with pytest.raises(S.UserError, match="^TRAIN_FILES='.*': must be FILE or FILE:WEIGHT with commas between, each "):
        read(tmp_path, train_files=text)
    assert S.weighted_files("X", " a.jsonl:2,\n b.jsonl.zst:.5, c:d ") == {"a.jsonl": 2, "b.jsonl.zst": 0.5, "c:d": 1}


def test_equal_prompts_stand_on_one_side(tmp_path):
    """Of 3,000 prompts, each with two answers in two files, one in ten; the last answer alone is not its prompt."""
    first = write(tmp_path / "a.jsonl", [good(at) for at in range(3000)])
    second = tmp_path / "b.jsonl.zst"
    second.write_bytes(zstandard.compress(write(tmp_path / "b", [good(at, "no") for at in range(3000)]).read_bytes()))
    data, _ = read(tmp_path, train_files=f"{first},{second}", eval_prompts=10000)
    keys = [{row.key for row in rows} for rows in (data.rows, data.held_out)]
    assert not keys[0] & keys[1] and len(keys[0] | keys[1]) == 3000
    assert len(data.rows) == 2 * len(keys[0]) and len(data.held_out) == 2 * len(keys[1])
    assert abs(len(keys[1]) - 300) < 4 * 270**0.5
    assert [len(numbers) for numbers, _ in data.parts] == [len(keys[0])] * 2
    again, _ = read(tmp_path, train_files=f"{second},{first}", eval_prompts=10000)
    assert {row.key for row in again.held_out} == keys[1]
    fewer, _ = read(tmp_path, train_files=f"{first},{second}", eval_prompts=7)
    assert len(fewer.held_out) == 7 and {row.key for row in fewer.held_out} <= keys[1]
    assert len(fewer.rows) == len(data.rows)  # what is held out is not trained on, scored or not


def test_the_key_is_of_all_turns_before_the_first_answer():
    """So that no answer of a held-out conversation is learned from one that goes on longer, or ends before."""
    def key(*turns):
        return row_of(*turns).key

    turns = [("<|system|>", "S"), ("<|user|>", "u"), ("<|assistant|>", "a"), ("<|user|>", "v"), ("<|assistant|>", "b")]
    assert key(*turns) == key(*turns[:3]) == key(*turns[:2], ("<|assistant|>", "other")) == key(*turns, turns[1])
    greeted = [turns[2], *turns[1:]]  # greetings are no answers: other users go on otherwise
    assert key(*greeted) == key(*greeted[:3]) != key(turns[2], *turns[3:])
    assert len({key(*turns), key(*turns[1:]), key(*greeted), key(turns[0], ("<|user|>", "w"), turns[-1]), key(turns[2]),
                key(turns[-1]), key(("", "x")), key(("", "y"))}) == 8


def test_no_answer_of_a_held_out_conversation_is_learned(tmp_path):
    """Each conversation stands there as often as it has answers, up to each of them, as dialogue data often has it."""
    turns = [[{"role": role, "content": f"{role} {at} {number}"} for at in range(3) for role in ("user", "assistant")]
             for number in range(60)]
    path = write(tmp_path / "a.jsonl", [{"messages": own[:end]} for own in turns for end in (2, 4, 6)])
    settings = dict(train_files=str(path), eval_prompts=10000)
    data = S.read_data(S.Settings(train_seq_len=256, **settings), BYTES, [].append)
    answers = [{text for row in rows for role, text in turns_of(row.ids.tolist()) if role == "<|assistant|>"}
               for rows in (data.rows, data.held_out)]
    assert not answers[0] & answers[1] and len(answers[0] | answers[1]) == 180 and len(data.held_out) >= 3


def test_val_files_are_held_out_with_their_prompts(tmp_path):
    train = write(tmp_path / "a.jsonl", [good(at) for at in range(100)])
    val = write(tmp_path / "v.jsonl", [good(at, "maybe") for at in range(90, 120)])
    data, said = read(tmp_path, train_files=str(train), val_files=str(val))
    assert len(data.rows) == 90 and len(data.held_out) == 30 and "90 rows to train on" in said[-1]
    data, _ = read(tmp_path, task="sort", demonstrations=50, val_files=str(val))  # of a task, too
    assert len(data.rows) == 50 and len(data.held_out) == 30
    assert {turns_of(row.ids.tolist())[-1][1] for row in data.held_out} == {"maybe"}


def test_demonstrations_of_a_task(tmp_path):
    data, said = read(tmp_path, task="sort", demonstrations=50, eval_prompts=20)
    assert len(data.rows) == 50 and len(data.held_out) == 20 and said[0].startswith("data: TASK=sort, 50 rows")
    for row, held_out in [*((row, False) for row in data.rows), *((row, True) for row in data.held_out)]:
        (_, prompt), (_, answer) = turns_of(row.ids.tolist())
        assert answer == "".join(sorted(prompt)) and S.is_held_out(prompt) == held_out
    path = write(tmp_path / "t.jsonl", [{"prompt": str(at), "answer": "x"} for at in range(60)])
    data, _ = read(tmp_path, task="jsonl", task_path=str(path))
    assert len({row.key for row in data.rows}) == len(data.rows) == 60 - len(data.held_out)
    long = write(tmp_path / "l.jsonl", [{"prompt": str(at), "answer": "x" * 80} for at in range(60)])
    with pytest.raises(S.UserError, match="^TASK='jsonl': a demonstration is an answer longer than the context, "):
        read(tmp_path, task="jsonl", task_path=str(long))


# ------------------------------------------------------------------------------------------------------------- packing
def first_come(lengths: list[int], room: int) -> int:
    """Windows that take rows as they come, and are closed by the first that has no room."""
    count, left = 0, 0
    for length in lengths:
        if length > left:
            count, left = count + 1, room
        left -= length
    return count


def test_best_fit_on_an_example():
    """3 8 5 2 7 5 in windows of 10: 8+2, 7+3 and 5+5 waste nothing; as they come they take five."""
    lengths = [3, 8, 5, 2, 7, 5]
    assert S.best_fit(lengths, 10) == [[1, 3], [4, 0], [2, 5]]
    assert first_come(lengths, 10) == 5
    assert S.best_fit([], 10) == [] and S.best_fit([10, 10], 10) == [[0], [1]]


@given(st.lists(st.integers(1, 40), max_size=60))
@settings(deadline=None, max_examples=200)
def test_windows_are_never_too_full_and_as_full_as_best_fit_makes_them(lengths):
    windows = S.best_fit(lengths, 40)
    assert sorted(at for window in windows for at in window) == list(range(len(lengths)))
    full = [sum(lengths[at] for at in window) for window in windows]
    assert max(full, default=0) <= 40 and sum(2 * each <= 40 for each in full) <= 1
    slow: list[list[int]] = []  # a second form: look at every window
    for length in sorted(lengths, reverse=True):
        fits = [own for own in slow if sum(own) + length <= 40]
        if fits:
            max(fits, key=sum).append(length)
        else:
            slow.append([length])
    assert sorted(full) == sorted(map(sum, slow))


@pytest.mark.parametrize(("pattern", "changes"), [
    ("g", {}), ("a", {}), ("s", dict(attn_window=5)), ("g1 g1", {}), ("g s1 g a s1", dict(attn_window=4)),
    ("a g", dict(bigram_vocab_size=32)), ("g a", dict(positions="none", unet_skips=True)),
])
def test_packed_rows_are_as_they_are_alone(pattern, changes):
    """Log-probabilities of each row's targets, and the gradient of all, to 1e-9."""
    made, rows = network(1, pattern, **changes), some_rows(14, longest=20)
    packed = one_batch(rows)
    assert packed.ids.size(0) < 9 and packed.ids.size(1) <= 64
    logps, _ = S.token_logps(made, packed, 1.0)
    logps.sum().backward()
    gradients = [param.grad.clone() for param in made.parameters()]
    made.zero_grad()
    for place, number in enumerate(packed.numbers.tolist()):
        alone = one_batch([rows[number]])
        own, _ = S.token_logps(made, alone, 1.0)
        own.sum().backward()
        together = logps[packed.row == place]
        assert together.shape == own[0].shape and (together - own[0]).abs().max() < 1e-9
        assert own[alone.mask].max() < 0
    for param, expected in zip(made.parameters(), gradients, strict=True):
        assert (param.grad - expected).abs().max() < 1e-9 * max(1, expected.abs().max())


def test_without_the_bos_packed_rows_would_differ():
    """The test above can fail: the first row's BOS of a window replaced, the second row sees it."""
    made, rows = network(1, "g a"), some_rows(4)
    batch = one_batch(rows, [[0, 1, 2, 3]])
    with torch.no_grad():
        right = made.features(batch.ids)
        batch.ids[(batch.ids == BOS) & (batch.row > 0)] = 2
        assert (made.features(batch.ids) - right)[batch.row == 3].abs().max() > 1e-3


# ---------------------------------------------------------------------------------------------------- what a step reads
def epochs_of(weights: list[float], sizes: list[int], **changes) -> S.Epochs:
    rows, ends = some_rows(sum(sizes)), np.cumsum([0, *sizes]).tolist()
    parts = [(range(*pair), weight) for *pair, weight in zip(ends[:-1], ends[1:], weights, strict=True)]
    s = S.Settings(**{"train_seq_len": 64, "train_batch_tokens": 256, **changes})
    return S.Epochs(SimpleNamespace(rows=rows, parts=parts), s, True)


def test_an_epoch_holds_each_row_weight_times():
    epochs = epochs_of([1.0, 2.0, 0.25, 1.5], [10, 7, 8, 6])
    total = collections.Counter()
    for epoch in range(4):
        read = collections.Counter(at for window in epochs.windows(epoch) for at in window)
        assert all(read[at] == 1 for at in range(10)) and all(read[at] == 2 for at in range(10, 17))
        assert sum(read[at] for at in range(17, 25)) == 2 and max(read[at] for at in range(17, 25)) == 1
        assert sum(read[at] for at in range(25, 31)) == 9 and {read[at] for at in range(25, 31)} == {1, 2}
        total += read
    assert all(total[at] == 1 for at in range(17, 25)) and all(total[at] == 6 for at in range(25, 31))


def test_steps_read_an_epoch_once_and_go_on_from_anywhere():
    epochs, other = epochs_of([1.0], [40]), epochs_of([1.0], [40])
    assert epochs.steps == -(-len(epochs.windows(0)) // 4) > 1
    for epoch in range(3):
        steps = [epochs.step(epoch * epochs.steps + at) for at in range(epochs.steps)]
        assert sorted(at for step in steps for window in step for at in window) == list(range(40))
        assert max(map(len, steps)) <= 4 and max(map(len, steps)) - min(map(len, steps)) <= 1
        assert steps == [other.step(epoch * epochs.steps + at) for at in range(epochs.steps)]
    last = 3 * epochs.steps - 1
    assert epochs_of([1.0], [40]).step(last) == epochs.step(last)  # a fresh one, as after a resume
    assert epochs.windows(0) != epochs.windows(1) and epochs.windows(0) != epochs_of([1.0], [40], seed=1).windows(0)


def test_learned_positions_are_not_packed():
    s = S.Settings(train_seq_len=64)
    made = network(0, positions="learned")
    assert not S.SFTTrainer(made, s).packed and S.SFTTrainer(network(), s).packed
    assert not S.SFTTrainer(network(), s, made).packed
    rows = some_rows(6)
    trainer = S.SFTTrainer(made, s)
    found = trainer.score(rows)
    for row, (nats, tokens, right) in zip(rows, found.tolist(), strict=True):
        logits, wanted = made(torch.from_numpy(row.ids[None, :-1]))[0], torch.from_numpy(row.ids[1:])
        said = torch.from_numpy(row.said[1:])
        assert nats == pytest.approx(F.cross_entropy(logits[said], wanted[said], reduction="sum").item(), rel=1e-9)
        assert (tokens, right) == (said.sum().item(), (logits.argmax(-1) == wanted)[said].sum().item())


# ------------------------------------------------------------------------------------------------------ a step's loss
def gradients_of(made: S.GPT, rows: list[S.Row], teacher: S.GPT | None = None, **changes) -> tuple:
    """(loss, nats, KD) and the gradients of a step of all rows."""
    trainer = S.SFTTrainer(made, S.Settings(train_seq_len=64, **changes), teacher)
    total = sum(int(row.learned.sum()) for row in rows)
    sums = trainer.forward_backward(trainer.batches(rows, windows_of(rows), "learned"), total)
    return sums, [param.grad.clone() for param in (*made.parameters(), *trainer.projections)]


def test_the_loss_is_the_mean_over_all_targets():
    made, rows = network(), some_rows()
    sums, gradients = gradients_of(made, rows)
    nats, count = 0.0, 0
    for row in rows:
        logits, wanted = made(torch.from_numpy(row.ids[None, :-1]))[0], torch.from_numpy(row.ids[1:])
        said = torch.from_numpy(row.said[1:])
        nats, count = nats + F.cross_entropy(logits[said], wanted[said], reduction="sum"), count + int(said.sum())
    made.zero_grad()
    (nats / count).backward()
    assert sums.tolist() == pytest.approx([nats.item() / count] * 2 + [0.0], rel=1e-10)
    for param, found in zip(made.parameters(), gradients, strict=True):
        assert (param.grad - found).abs().max() < 1e-10


@pytest.mark.parametrize("kind", ["", "forward", "jsd", "attention", "pool", "projection"])
def test_micro_batches_and_recomputed_layers_change_nothing(kind):
    """From one batch to a window each; with activation checkpointing too."""
    rows, teacher = some_rows(12), network(5, "a g a g", 24) if kind else None
    changes = dict(kd_loss=kind, kd_layers="all", kd_alpha=0.7) if kind else {}
    expected = gradients_of(network(), rows, teacher, micro_batch_tokens=1 << 20, **changes)
    for tokens, recompute in ((64, False), (1, False), (128, True)):
        made = network()
        made.activation_checkpointing = recompute
        found = gradients_of(made, rows, teacher, micro_batch_tokens=tokens, **changes)
        for x, y in zip([expected[0], *expected[1]], [found[0], *found[1]], strict=True):
            assert (x - y).abs().max() < 1e-10
    assert teacher is None or all(param.grad is None for param in teacher.parameters())


@pytest.mark.parametrize("kind", ["", "forward", "reverse", "jsd", "attention", "pool", "projection"])
def test_a_micro_batch_without_targets_adds_0_and_keeps_the_graph(kind):
    made, rows = network(), some_rows(3)
    masked = [S.Row(row.key, row.ids, row.said & False, row.learned & False) for row in rows]
    trainer = S.SFTTrainer(made, S.Settings(train_seq_len=64, kd_loss=kind or "forward", kd_layers="all"),
                           network(1, "a a", 24) if kind else None)
    batch = one_batch(masked)
    nats = S.token_logps(made, batch, 1.0)[0] if not kind else sum(
        S.distilled_losses(made, trainer.teacher, trainer.projections, batch, trainer.settings))
    assert nats.sum().item() == 0 and nats.requires_grad
    nats.sum().backward()
    sums = trainer.forward_backward([batch], 5)
    assert sums.tolist() == [0, 0, 0] and all(not param.grad.any() for param in trainer.optimizers.params)
    both = trainer.forward_backward([batch, one_batch(rows)], 20)
    assert torch.equal(both, trainer.forward_backward([one_batch(rows)], 20)) and both[0] > 0


def test_scores_are_of_answers_alone_and_by_row():
    """With TRAIN_ON=all too; nats, tokens and right tokens of each row, by a forward of its own."""
    made, rows = network(), some_rows(8, train_on="all")
    found = S.SFTTrainer(made, S.Settings(train_seq_len=64, train_on="all")).score(rows)
    for row, (nats, tokens, right) in zip(rows, found.tolist(), strict=True):
        logits, wanted = made(torch.from_numpy(row.ids[None, :-1]))[0], torch.from_numpy(row.ids[1:])
        said = torch.from_numpy(row.said[1:])
        assert nats == pytest.approx(F.cross_entropy(logits[said], wanted[said], reduction="sum").item(), rel=1e-9)
        assert (tokens, right) == (said.sum().item(), (logits.argmax(-1) == wanted)[said].sum().item())


def test_intervals_of_ratios():
    """By hand: 6 over 4 of rows (2, 1) (1, 2) (3, 1): residuals 0.5, -2, 1.5; and 95 in 100 hold the truth."""
    mean, low, high = S.ratio_interval(torch.tensor([2.0, 1, 3]), torch.tensor([1.0, 2, 1]))
    assert mean == 1.5 and high - mean == pytest.approx(1.96 * math.sqrt(6.5 / 2) * math.sqrt(3) / 4)
    assert mean - low == pytest.approx(high - mean)
    torch.manual_seed(0)
    counts = torch.randint(1, 9, (2000, 100)).double()
    held = [low <= 2 <= high for _, low, high in (
        S.ratio_interval((2 + torch.randn(100)) * each, each) for each in counts)]
    assert 0.92 < sum(held) / 2000 < 0.97


# ------------------------------------------------------------------------------------------ divergences: a second form
def softmax(values: list[float], temperature: float) -> list[float]:
    parts = [math.exp(value / temperature) for value in values]
    return [part / sum(parts) for part in parts]


def written_out(student: list[float], teacher: list[float], kind: str, temperature: float, beta: float,
                top_k: int) -> float:
    """One token's divergence, in loops over Python's floats."""
    if top_k:
        best = sorted(range(len(teacher)), key=lambda at: -teacher[at])[:top_k]
        student, teacher = ([values[at] for at in best] for values in (student, teacher))
    p, t = softmax(student, temperature), softmax(teacher, temperature)
    beta = {"forward": 0.0, "reverse": 1.0}.get(kind, beta)
    m = [beta * x + (1 - beta) * y for x, y in zip(t, p, strict=True)]

    def kl(x: list[float], y: list[float]) -> float:
        return sum(a * math.log(a / c) for a, c in zip(x, y, strict=True))

    return temperature**2 * (kl(t, p) if beta == 0 else kl(p, t) if beta == 1 else beta * kl(t, m) + (1 - beta)
                             * kl(p, m))


def logits_of(seed: int = 0, n: int = 6, size: int = 11) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    return 2 * torch.randn(n, size), 2 * torch.randn(n, size)


@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd"])
@pytest.mark.parametrize("temperature", [1.0, 2.5, 0.5])
@pytest.mark.parametrize("top_k", [0, 2, 5])
@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_divergences_by_loops_and_finite_differences(kind, temperature, top_k, beta):
    student, teacher = logits_of()
    s = S.Settings(kd_loss=kind, kd_temperature=temperature, kd_top_k=top_k, kd_beta=beta)
    found = S.divergence(student, teacher, s)
    expected = [written_out(x, y, kind, temperature, beta, top_k)
                for x, y in zip(student.tolist(), teacher.tolist(), strict=True)]
    assert found.tolist() == pytest.approx(expected, rel=1e-11) and (found > 0).all()
    assert torch.autograd.gradcheck(lambda x: S.divergence(x, teacher, s), student.requires_grad_())
    assert S.divergence(teacher, teacher, s).abs().max() < 1e-13
    same = S.divergence(student + 3, teacher - 2, s)
    assert torch.allclose(same, found, rtol=1e-11)


def test_the_ends_of_jsd():
    """At 0 and 1 it is a KL to the bit; near them, over what goes to 0, it goes to the same; at 1/2 it has no sides."""
    student, teacher = logits_of(1)

    def jsd(beta: float, x=student, y=teacher) -> torch.Tensor:
        return S.divergence(x, y, S.Settings(kd_loss="jsd", kd_beta=beta))

    forward, reverse = (S.divergence(student, teacher, S.Settings(kd_loss=kind)) for kind in ("forward", "reverse"))
    assert torch.equal(jsd(0.0), forward) and torch.equal(jsd(1.0), reverse)
    assert torch.allclose(jsd(1e-6) / 1e-6, forward, rtol=1e-3) and torch.allclose(jsd(1 - 1e-6) / 1e-6, reverse,
                                                                                  rtol=1e-3)
    assert torch.allclose(jsd(0.5), jsd(0.5, teacher, student), rtol=1e-12) and (jsd(0.5) < math.log(2)).all()
    assert torch.allclose(forward, F.kl_div(student.log_softmax(-1), teacher.softmax(-1), reduction="none").sum(-1))


def test_the_square_of_the_temperature_keeps_the_gradient():
    """arXiv 1503.02531, section 2.1: at high temperatures the gradient goes to the centred difference over V."""
    student, teacher = (x - x.mean(1, keepdim=True) for x in logits_of(2))
    student.requires_grad_()
    for temperature in (1.0, 10.0, 1000.0):
        found = S.divergence(student, teacher, S.Settings(kd_temperature=temperature))
        at_one = S.divergence(student / temperature, teacher / temperature, S.Settings())
        assert torch.allclose(found, temperature**2 * at_one)
        gradient, = torch.autograd.grad(found.sum(), student)
    assert torch.allclose(gradient, (student - teacher) / 11, atol=2e-3)


def test_top_k_reads_the_teachers_likeliest_alone():
    student, teacher = logits_of(3)
    s = S.Settings(kd_top_k=4)
    kept = teacher.topk(4).indices
    moved = student + torch.randn_like(student).scatter(1, kept, 0.0)
    assert torch.equal(S.divergence(moved, teacher, s), S.divergence(student, teacher, s))
    assert torch.allclose(S.divergence(student, teacher, S.Settings(kd_top_k=99)),
                          S.divergence(student, teacher, S.Settings()))


# ---------------------------------------------------------------------------------------- features, layers, projections
def test_attention_transfer_by_loops():
    torch.manual_seed(0)
    rows = some_rows(5)
    batch = one_batch(rows)
    student, teacher = torch.randn(*batch.ids.shape, 6), torch.randn(*batch.ids.shape, 10)
    found = S.attention_distance(student, teacher, batch)
    expected = torch.zeros(batch.ids.shape)
    for place in range(len(batch.numbers)):
        maps = []
        for x in (student, teacher):
            energy = [sum(value**2 for value in token) for token in x[batch.row == place].tolist()]
            norm = math.sqrt(sum(value**2 for value in energy) + 1e-6)
            maps.append([value / norm for value in energy])
        distance = sum((x - y) ** 2 for x, y in zip(*maps, strict=True))
        cosine = sum(x * y for x, y in zip(*maps, strict=True))
        assert distance == pytest.approx(2 - 2 * cosine, abs=1e-6)
        expected[batch.row == place] = distance
    assert torch.allclose(found, expected[batch.mask], rtol=1e-12)
    assert torch.autograd.gradcheck(lambda x: S.attention_distance(x, teacher, batch), student.requires_grad_())
    zeros = torch.zeros_like(student).requires_grad_()
    S.attention_distance(zeros, teacher, batch).sum().backward()
    assert not zeros.grad.any()  # and no NaN: a new mixer puts out zeros


@pytest.mark.parametrize("dims", [(6, 6), (4, 8), (5, 12), (9, 4)])
def test_pooled_distance_by_loops(dims):
    torch.manual_seed(0)
    student, teacher = (torch.randn(7, dim) for dim in dims)
    width = min(dims)

    def pooled(values: list[float]) -> list[float]:
        edges = [(at * len(values) // width, -(-(at + 1) * len(values) // width)) for at in range(width)]
        return [sum(values[low:high]) / (high - low) for low, high in edges]

    expected = []
    for x, y in zip(map(pooled, student.tolist()), map(pooled, teacher.tolist()), strict=True):
        dot, sizes = sum(p * q for p, q in zip(x, y, strict=True)), [math.sqrt(sum(v * v for v in z)) for z in (x, y)]
        expected.append(1 - dot / sizes[0] / sizes[1])
    assert S.pooled_distance(student, teacher).tolist() == pytest.approx(expected, rel=1e-11)
    assert torch.autograd.gradcheck(lambda x: S.pooled_distance(x, teacher), student.requires_grad_())


def test_layers_are_matched_by_depth():
    assert S.matched_layers(3, 6, "all") == [(0, 1), (1, 3), (2, 5)]
    assert S.matched_layers(2, 3, "all") == [(0, 1), (1, 2)]
    assert S.matched_layers(4, 2, "all") == [(0, 0), (1, 0), (2, 1), (3, 1)]
    assert S.matched_layers(4, 9, "last") == [(3, 8)]


def captured(made: S.GPT, ids: torch.Tensor, attention: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """What the head reads, and each layer's output or its mixer's, by a forward written out for layers g and a."""
    found, wanted, x = [], "mixer" if attention else "block", None
    doc = F.pad((ids == BOS).cumsum(1), (S.CONV_TAPS - 1, 0))
    positions = torch.arange(ids.size(1))
    x = x0 = S.rms_norm(F.embedding(ids, made.embed))
    for block, mixer in zip(made.blocks, made.mixers, strict=True):
        x = block.mix[0] * x + block.mix[1] * x0
        y = mixer(block.mixer_norm(x), doc, positions, None)
        x = x + y * block.mixer_scale
        x = x + block.mlp(block.mlp_norm(x)) * block.mlp_scale
        found.append(y if wanted == "mixer" else x)
    return made.final_norm(x), found


@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd", "attention", "pool", "projection"])
@pytest.mark.parametrize("layers", ["last", "all"])
def test_distilled_losses_row_by_row(kind, layers):
    """A student of half the depth and width in packed windows, against forwards of each row alone, written out."""
    student, teacher, rows = network(1, "g a", 16), network(2, "g a g a g", 32), some_rows(7)
    s = S.Settings(train_seq_len=64, kd_loss=kind, kd_layers=layers, kd_temperature=2.0, kd_top_k=9)
    trainer = S.SFTTrainer(student, s, teacher)
    batch = one_batch(rows)
    nats, apart = S.distilled_losses(student, teacher, trainer.projections, batch, s)
    assert len(trainer.projections) == (0 if kind != "projection" else 2 if layers == "all" else 1)
    pairs = [(0, 2), (1, 4)] if layers == "all" else [(1, 4)]
    for place, number in enumerate(batch.numbers.tolist()):
        alone = one_batch([rows[number]])
        attention = kind == "attention"
        (x, own), (y, others) = (captured(each, alone.ids, attention) for each in (student, teacher))
        here = batch.row[batch.mask] == place
        logits = student.logits(x)[alone.mask]
        expected = F.cross_entropy(logits, alone.targets[alone.mask], reduction="none")
        assert torch.allclose(nats[here], expected, rtol=1e-9)
        if kind in S.DIVERGENCES:
            expected = S.divergence(logits, teacher.logits(y)[alone.mask], s)
        elif attention:
            expected = sum(S.attention_distance(own[i], others[j], alone) for i, j in pairs) / len(pairs)
        else:
            hidden = [(own[i], others[j]) for i, j in pairs] if layers == "all" else [(x, y)]
            each = [S.pooled_distance(p[alone.mask], q[alone.mask]) if kind == "pool" else
                    ((p[alone.mask] @ trainer.projections[at].T - q[alone.mask]) ** 2).sum(1) / 32
                    for at, (p, q) in enumerate(hidden)]
            expected = sum(each) / len(each)
        assert torch.allclose(apart[here], expected, rtol=1e-8, atol=1e-12)
    apart.sum().backward()
    assert all(param.grad is None for param in teacher.parameters())
    assert all(param.grad.abs().sum() > 0 for param in trainer.projections)


@pytest.mark.parametrize("kind", ["forward", "pool"])
def test_logits_in_chunks_change_nothing(kind):
    """5,000 targets: two chunks, made again in the backward pass."""
    rows = [row_of(("", "abcdefgh" * 62), room=512)] * 10
    s = S.Settings(train_seq_len=512, kd_loss=kind)
    batch = one_batch(rows, [[at] for at in range(10)])
    assert batch.mask.sum() == 4970
    student, teacher = network(1, "g", 16), network(2, "g", 16)
    nats, apart = S.distilled_losses(student, teacher, (), batch, s)
    (nats + apart).sum().backward()
    found = [param.grad.clone() for param in student.parameters()]
    student.zero_grad()
    x, y = student.features(batch.ids), teacher.features(batch.ids).detach()
    logits = student.logits(x)
    whole = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="sum") + (
        S.divergence(logits.flatten(0, 1), teacher.logits(y).detach().flatten(0, 1), s) if kind == "forward" else
        S.pooled_distance(x.flatten(0, 1), y.flatten(0, 1))).sum()
    whole.backward()
    assert (nats + apart).sum().item() == pytest.approx(whole.item(), rel=1e-10)
    for param, gradient in zip(student.parameters(), found, strict=True):
        assert (param.grad - gradient).abs().max() < 1e-8 * max(1, gradient.abs().max())


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_alpha_weighs_the_two_losses(alpha):
    student, teacher, rows = network(1), network(2), some_rows(4)
    parts = [gradients_of(student, rows, teacher, kd_alpha=each) for each in (0.0, 1.0, alpha)]
    for plain, kd, mixed in zip(*(each[1] for each in parts), strict=True):
        assert (mixed - (1 - alpha) * plain - alpha * kd).abs().max() < 1e-12
    loss, nats, apart = parts[2][0].tolist()
    assert loss == pytest.approx((1 - alpha) * nats + alpha * apart) and apart > 0
    assert all(torch.equal(x, y) for x, y in zip(parts[0][1], gradients_of(student, rows)[1], strict=True)) or (
        max((x - y).abs().max() for x, y in zip(parts[0][1], gradients_of(student, rows)[1], strict=True)) < 1e-12)


def test_the_whole_gradient_by_finite_differences():
    """Of the student's and a projection's weights, in random directions."""
    student, teacher, rows = network(1), network(2, "a g a", 24), some_rows(4)
    for kind in ("jsd", "attention", "pool", "projection"):
        trainer = S.SFTTrainer(student, S.Settings(train_seq_len=64, kd_loss=kind, kd_layers="all"), teacher)
        batches = trainer.batches(rows, windows_of(rows), "learned")
        params = trainer.optimizers.params

        def loss(trainer=trainer, batches=batches) -> float:
            return trainer.forward_backward(batches, 50)[0].item()

        loss()
        torch.manual_seed(3)
        directions = [torch.randn_like(param) for param in params]
        slope = sum((param.grad * way).sum().item() for param, way in zip(params, directions, strict=True))
        ends = []
        for sign in (1, -1):
            with torch.no_grad():
                for param, way in zip(params, directions, strict=True):
                    param.add_(sign * 1e-6 * way)
            ends.append(loss())
            with torch.no_grad():
                for param, way in zip(params, directions, strict=True):
                    param.sub_(sign * 1e-6 * way)
        assert (ends[0] - ends[1]) / 2e-6 == pytest.approx(slope, rel=1e-5)
        assert all(param.grad is None for param in teacher.parameters())


def test_the_interval_of_an_accuracy_ends_at_1():
    found = S.row_scores(torch.tensor([[0.1, 5.0, 5.0]] * 9 + [[0.1, 5.0, 4.0]]))
    share, low, high = found["accuracy"]
    assert share == pytest.approx(0.98) and 0.93 < low < 0.95 and high == 1 and found["rows"] == 10
