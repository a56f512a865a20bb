"""train_sft.py: rows, masks and packing, each distillation loss against a second form, and what a step's loss is.

Everything here is float64 with an independent reference.
"""

import collections
import functools
import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import sample as P
import train_grpo as G
import train_sft as S
from conftest import BYTES, small_network, spelt, write_lines

CPU = torch.device("cpu")
BOS = 1
KINDS = ["", "forward", "jsd", "attention", "pool", "projection"]
pytestmark = pytest.mark.usefixtures("one_thread", "default_dtype")


def network(seed=0, layers="g a", dim=16, **changes):
    """A tiny network, all of whose weights are at work."""
    shape = dict(model_dim=dim, attn_window=1 << 20, train_seq_len=64)
    return small_network(seed, layers, **{**shape, **changes})


def row_of(*turns, room=64):
    """Return the Row of turns (role, text), or of a text, a turn with the role ""."""
    row = messages_of(*turns) if turns[0][0] else {"text": turns[0][1]}
    return S.parse_row(row, set(), BYTES, S.Settings(train_seq_len=room))[1]


def some_rows(count=9, seed=0, longest=16):
    rng, rows = random.Random(seed), []
    for _ in range(count):
        words = ["".join(rng.choices("abcdef", k=rng.randint(1, longest))) for _ in range(2)]
        rows.append(row_of(("user", words[0]), ("assistant", words[1])))
    return rows


def windows_of(rows, room=64):
    return S.best_fit(rows, range(len(rows)), room)


def one_batch(rows, windows=None):
    [batch] = S.row_batches(rows, windows or windows_of(rows), 1 << 30, CPU)
    return batch


def losses_alone(made, row):
    """The summed cross-entropy of a row's targets by a forward of its own, and how many are the likeliest."""
    logits, learned = made(row.ids[None])[0], row.targets >= 0
    nats = F.cross_entropy(logits[learned], row.targets[learned], reduction="sum")
    return nats, (logits.argmax(-1) == row.targets)[learned].sum().item()


# -------------------------------------------------------------------------------------------------- formats and masks


def messages_of(*turns):
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


MULTI = [("system", "s"), ("user", "u"), ("assistant", "ab"), ("user", "v"), ("assistant", "c")]
SPELT = "^Ss.Uu.Aab.Uv.Ac.", "-------ab.----c."
SHAREGPT = {"system": "system", "user": "human", "assistant": "gpt"}
SHARED = {"conversations": [{"from": SHAREGPT[role], "value": text} for role, text in MULTI]}
TOOL = [("user", "q"), ("assistant", "call"), ("tool", "42"), ("assistant", "ok")]
TWO = {"instruction": "h", "input": "i", "output": "yo"}
QUESTION = {"question": "hi", "answer": "yo"}
FORMATS = {
    "Alpaca with input": ("Alpaca", TWO, "^Uh\n\ni.Ayo.", "-------yo."),
    "ShareGPT": ("ShareGPT", SHARED, *SPELT),
    "messages": ("messages", messages_of(*MULTI), *SPELT),
    "question/answer": ("prompt/completion", QUESTION, "^Uhi.Ayo.", "-----yo."),
    "text": ("text", {"text": "hey"}, "^hey^", "hey^"),  # its end is the next BOS
    "tool": ("messages", messages_of(*TOOL), "^Uq.Acall.U42.Aok.", "----call.-----ok."),
    "ends with the user": (
        "messages",
        messages_of(("assistant", "a"), ("user", "b")),
        "^Aa.Ub.",
        "-a.---",
    ),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("train_on", ["assistant", "all"])
def test_ids_and_targets_by_hand(name, train_on):
    said, given_row, ids, targets = FORMATS[name]
    ids = spelt(ids)
    expected = spelt(targets) if train_on == "assistant" else ids[1:]
    found, row = S.parse_row(given_row, set(), BYTES, S.Settings(train_on=train_on))
    assert found == said and row.ids.tolist() == ids[:-1] and row.targets.tolist() == expected
    batch = one_batch([row])
    assert batch.ids.tolist() == [ids[:-1]] and batch.targets.tolist() == [expected]
    assert batch.mask.tolist() == [[target >= 0 for target in expected]]
    assert set(batch.doc[0].tolist()) == {0} and batch.numbers.tolist() == [0]


def test_rows_in_a_window_never_predict_one_another():
    """Two rows and padding, by hand; a text's closing BOS is learned, a conversation's next BOS is
    no target.
    """
    rows = [row_of(("user", "hi"), ("assistant", "yo")), row_of(("", "hey")), row_of(("", "x"))]
    batch = one_batch(rows, [[2], [0, 1]])
    assert batch.ids.tolist() == [[*spelt("^x"), *[0] * 10], spelt("^Uhi.Ayo^hey")]
    assert batch.targets.tolist() == [spelt("x^----------"), spelt("-----yo.hey^")]
    assert batch.doc.tolist() == [[0, 0, *[-1] * 10], [1] * 8 + [2] * 4]
    assert batch.numbers.tolist() == [2, 0, 1]


def test_prompts_are_laid_out_and_held_out_as_in_the_rl_scripts(tmp_path):
    """So that train_grpo.py goes on with what is learned here."""
    path = write_lines(tmp_path / "a.jsonl", [{"prompt": str(n), "answer": "x"} for n in range(99)])
    held_out = G.split_problems(G.Settings(train_files=str(path)))[2]
    keys = [S.prompt_key([("<|user|>", problem["prompt"])]) for problem in held_out]
    assert sorted(keys) == [row.key for row in read(path)[0].held_out] and len(keys) > 4
    prompt = P.asked_ids(BYTES, [("<|user|>", "312")])
    row = row_of(("user", "312"), ("assistant", "123"))
    assert [*row.ids.tolist(), row.targets[-1].item()] == [*prompt, *spelt("123.")]


# ------------------------------------------------------------------------------------------------- files and their rows
def good(number, answer="yes"):
    return {"prompt": f"prompt {number}", "completion": answer}


def read(path, **changes):
    """Return the Examples of files, and what the log says of them."""
    said = []
    s = S.Settings(**{"train_seq_len": 64, "train_files": str(path), **changes})
    parse = functools.partial(S.parse_row, tokenizer=BYTES, settings=s)
    data = S.read_examples(s, parse, said.append)
    return data, [*map(str, said)]


MALFORMED = [
    ("empty answer", {"prompt": "a", "completion": " \n"}),
    ("empty answer", {"text": ""}),
    ("empty answer", messages_of(("user", "a"), ("assistant", ""))),
    ("more than TRAIN_SEQ_LEN=64 tokens", {"prompt": "a", "completion": "b" * 59}),
    ("invalid UTF-8", b'{"prompt": "a", "completion": "\xff"}'),
]


def test_every_malformed_row_is_counted_and_named(tmp_path):
    rows = [good(at) for at in range(40)] + [row for _, row in MALFORMED]
    path = write_lines(tmp_path / "a.jsonl", rows)
    data, said = read(path)
    assert len({*data.train, *data.choice, *data.held_out}) == 40
    faults = collections.Counter(kind for kind, _ in MALFORMED)
    names = [name for name, _ in MALFORMED]
    left = "; ".join(
        f"{kind}: {count} {S.places([*range(41 + names.index(kind), 41 + names.index(kind) + count)])}"
        for kind, count in faults.items()
    )
    assert said[0] == f"data: {path}: 45 rows, used 40 prompt/completion; left out {left}"


def test_a_row_of_exactly_the_context_is_used():
    assert len(row_of(("user", "a"), ("assistant", "b" * 58)).ids) == 63


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (
            [row for _, row in MALFORMED],
            r"5 rows, used none; left out .*; must hold one usable row at least",
        ),
        ([], r"0 rows, used none; left out none; must hold one usable row at least"),
        (
            [good(0)] * 3,
            r"(0|3) rows held out, (3|0) of other prompts to train on; must be 2 and 1 at least",
        ),
    ],
)
def test_a_file_without_rows_is_an_error(tmp_path, rows, said):
    with pytest.raises(S.UserError, match=said) as error:
        read(write_lines(tmp_path / "a.jsonl", rows))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["a.jsonl:0", "a.jsonl,a.jsonl", "a.jsonl:2, a.jsonl:3"])
def test_wrong_weights(text):
    with pytest.raises(
        S.UserError, match="^TRAIN_FILES='.*': must be FILE or FILE:WEIGHT, each once, above 0"
    ):
        read(text)
    assert S.weighted_files("X", " a.jsonl:2,\n b.jsonl.zst:.5, c:d ") == {
        "a.jsonl": 2,
        "b.jsonl.zst": 0.5,
        "c:d": 1,
    }


def test_equal_prompts_stand_on_one_side(tmp_path):
    """Of 3,000 prompts, each with two answers in two files, one in ten is held out, one in fifty
    chooses averages.
    """
    first = write_lines(tmp_path / "a.jsonl", [good(at) for at in range(3000)])
    other = write_lines(tmp_path / "b", [good(at, "no") for at in range(3000)])
    second = tmp_path / "b.jsonl.zst"
    second.write_bytes(zstandard.compress(other.read_bytes()))
    data, _ = read(f"{first},{second}:0.5", eval_prompts=10000)
    sides = (data.train, data.choice, data.held_out)
    keys = [{row.key for row in rows} for rows in sides]
    assert sum(map(len, keys)) == len(set().union(*keys)) == 3000
    assert [len(rows) for rows in sides] == [2 * len(own) for own in keys]
    assert abs(len(keys[2]) - 300) < 4 * 270**0.5 and abs(len(keys[1]) - 60) < 4 * 59**0.5
    parts = [(len(numbers), weight) for numbers, weight in data.parts]
    assert parts == [(len(keys[0]), 1.0), (len(keys[0]), 0.5)]
    again, _ = read(f"{second},{first}", eval_prompts=10000, seed=5)
    assert {row.key for row in again.held_out} == keys[2] and again.sha256 != data.sha256
    fewer, reports = read(f"{first},{second}", eval_prompts=7)
    assert any("held-out rows 7 score" in line for line in reports)
    assert len(fewer.held_out) == 7 and {row.key for row in fewer.held_out} <= keys[2]
    assert len(fewer.train) == len(data.train)  # what is held out is not trained on, scored or not
    plain, _ = read(f"{first},{second}", eval_prompts=10000, ema=False, swa=False)
    assert not plain.choice  # nothing is chosen, so every row that is not held out trains
    assert len(plain.train) == len(data.train) + len(data.choice)


def test_the_key_is_of_all_turns_before_the_first_answer():
    """So that no answer of a held-out conversation is learned from one that goes on longer, or ends before."""

    def key(*turns):
        return row_of(*turns).key

    turns = [("system", "S"), ("user", "u"), ("assistant", "a"), ("user", "v"), ("assistant", "b")]
    assert (
        key(*turns)
        == key(*turns[:3])
        == key(*turns[:2], ("assistant", "other"))
        == key(*turns, turns[1])
    )
    greeted = [turns[2], *turns[1:]]  # greetings are no answers: other users go on otherwise
    assert key(*greeted) == key(*greeted[:3]) != key(turns[2], *turns[3:])
    assert (
        len(
            {
                key(*turns),
                key(*turns[1:]),
                key(*greeted),
                key(turns[0], ("user", "w"), turns[-1]),
                key(turns[2]),
                key(turns[-1]),
                key(("", "x")),
                key(("", "y")),
            }
        )
        == 8
    )


def test_val_files_are_held_out_with_their_prompts(tmp_path):
    train = write_lines(tmp_path / "a.jsonl", [good(at) for at in range(100)])
    val = write_lines(tmp_path / "v.jsonl", [good(at, "maybe") for at in range(90, 120)])
    data, _ = read(train, val_files=str(val))
    assert len(data.train) + len(data.choice) == 90 and len(data.held_out) == 30


# ------------------------------------------------------------------------------------------------------------- packing
def rows_of_lengths(lengths):
    return [SimpleNamespace(ids=range(length)) for length in lengths]


def test_best_fit_on_an_example():
    """3 8 5 2 7 5 in windows of 10: 8+2, 7+3 and 5+5 waste nothing; without room each row has its own window."""
    rows = rows_of_lengths([3, 8, 5, 2, 7, 5])
    assert S.best_fit(rows, range(6), 10) == [[1, 3], [4, 0], [2, 5]]
    assert S.best_fit(rows, range(6), 0) == [[1], [4], [2], [5], [0], [3]]
    assert S.best_fit(rows, [1, 3, 3], 12) == [[1, 3, 3]] and S.best_fit([], [], 10) == []


@given(st.lists(st.integers(1, 40), max_size=60))
@settings(deadline=None, max_examples=200)
def test_windows_are_never_too_full_and_as_full_as_best_fit_makes_them(lengths):
    windows = S.best_fit(rows_of_lengths(lengths), range(len(lengths)), 40)
    assert sorted(at for window in windows for at in window) == list(range(len(lengths)))
    full = [sum(lengths[at] for at in window) for window in windows]
    assert max(full, default=0) <= 40 and sum(2 * size <= 40 for size in full) <= 1
    slow = []  # a second form: look at every window
    for length in sorted(lengths, reverse=True):
        fits = [own for own in slow if sum(own) + length <= 40]
        if fits:
            max(fits, key=sum).append(length)
        else:
            slow.append([length])
    assert sorted(full) == sorted(map(sum, slow))


@pytest.mark.parametrize(
    ("pattern", "changes"),
    [
        ("g", {}),
        ("a", {}),
        ("s", dict(attn_window=5)),
        ("g1 g1", {}),
        ("g s1 g a s1", dict(attn_window=4)),
        ("a g", dict(bigram_vocab_size=32)),
        ("g a", dict(positions="none", unet_skips=True)),
    ],
)
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
        together = logps[packed.doc == place]
        assert together.shape == own[0].shape and (together - own[0]).abs().max() < 1e-9
        assert own[alone.mask].max() < 0
    for param, expected in zip(made.parameters(), gradients, strict=True):
        assert (param.grad - expected).abs().max() < 1e-9 * max(1, expected.abs().max())


# ---------------------------------------------------------------------------------------------------- what a step reads
def parts_of(weights, sizes):
    ends = np.cumsum([0, *sizes])
    return [
        (np.arange(*pair), weight)
        for *pair, weight in zip(ends[:-1], ends[1:], weights, strict=True)
    ]


def test_an_epoch_holds_each_row_weight_times():
    parts = parts_of([1.0, 2.0, 0.25, 1.5], [10, 7, 8, 6])
    total = collections.Counter()
    for epoch in range(4):
        read = collections.Counter(S.epoch_numbers(parts, 7, epoch).tolist())
        assert all(read[at] == 1 for at in range(10)) and all(read[at] == 2 for at in range(10, 17))
        assert sorted(read[at] for at in range(17, 25)) == [0] * 6 + [1] * 2
        assert sorted(read[at] for at in range(25, 31)) == [1] * 3 + [2] * 3
        total += read
    assert all(total[at] == 1 for at in range(17, 25)) and all(
        total[at] == 6 for at in range(25, 31)
    )


def test_an_epochs_windows_are_a_function_of_seed_and_epoch():
    data = SimpleNamespace(train=some_rows(40), parts=parts_of([1.0], [40]))
    first = S.epoch_windows(data, 1, 64, 0)
    assert sorted(at for window in first for at in window) == list(range(40)) and len(first) < 25
    assert first == S.epoch_windows(data, 1, 64, 0)
    assert first not in (S.epoch_windows(data, 1, 64, 1), S.epoch_windows(data, 2, 64, 0))


# ------------------------------------------------------------------------------------------------------ a step's loss
def targets_of(rows):
    return sum(int((row.targets >= 0).sum()) for row in rows)


def gradients_of(made, rows, teacher=None, **changes):
    """(loss, nats, KD) and the gradients of a step of all rows."""
    trainer = S.SFTTrainer(made, S.Settings(train_seq_len=64, **changes), teacher)
    sums = trainer.forward_backward(rows, windows_of(rows), targets_of(rows))
    return sums, [param.grad.clone() for param in (*made.parameters(), *trainer.projection)]


def test_the_loss_is_the_mean_over_all_targets():
    made, rows = network(), some_rows()
    sums, gradients = gradients_of(made, rows)
    nats = sum(losses_alone(made, row)[0] for row in rows)
    made.zero_grad()
    (nats / targets_of(rows)).backward()
    assert sums.tolist() == pytest.approx([nats.item() / targets_of(rows)] * 2 + [0.0], rel=1e-10)
    for param, found in zip(made.parameters(), gradients, strict=True):
        assert (param.grad - found).abs().max() < 1e-10


@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches_and_recomputed_layers_change_nothing(kind):
    """From one batch to a window each; with activation checkpointing too."""
    rows, teacher = some_rows(12), network(5, "a g a g", 24) if kind else None
    changes = dict(kd_loss=kind, kd_alpha=0.7) if kind else {}
    expected = gradients_of(network(), rows, teacher, micro_batch_tokens=1 << 20, **changes)
    for tokens, recompute in ((64, False), (1, False), (128, True)):
        made = network()
        made.activation_checkpointing = recompute
        found = gradients_of(made, rows, teacher, micro_batch_tokens=tokens, **changes)
        for x, y in zip([expected[0], *expected[1]], [found[0], *found[1]], strict=True):
            assert (x - y).abs().max() < 1e-10
    assert teacher is None or all(param.grad is None for param in teacher.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_a_micro_batch_without_targets_adds_0_and_keeps_the_graph(kind):
    made, rows = network(), some_rows(3)
    masked = [S.Row(row.key, row.ids, torch.full_like(row.targets, -1)) for row in rows]
    s = S.Settings(train_seq_len=64, kd_loss=kind or "forward", micro_batch_tokens=1)
    trainer = S.SFTTrainer(made, s, network(1, "a a", 24) if kind else None)
    batch = one_batch(masked)
    nats = S.token_logps(made, batch, 1.0)[0]
    if kind:
        nats = sum(S.distilled_losses(made, trainer.teacher, trainer.projection, batch, s))
    assert nats.sum().item() == 0 and nats.requires_grad
    nats.sum().backward()
    assert trainer.forward_backward(masked, [[0, 1, 2]], 5).tolist() == [0, 0, 0]
    assert not any(param.grad.any() for param in trainer.trained.values())
    both = trainer.forward_backward(masked + rows, [[0, 1, 2], [3, 4, 5]], 20)
    assert torch.equal(both, trainer.forward_backward(rows, [[0, 1, 2]], 20)) and both[0] > 0


@pytest.mark.parametrize("positions", ["rope", "learned"])
def test_scores_are_by_row(positions):
    """Nats, tokens and right tokens of each row, by a forward of its own; learned positions of
    student or teacher are not packed.
    """
    made, rows = network(positions=positions), some_rows(8)
    s = S.Settings(train_seq_len=64)
    trainer = S.SFTTrainer(made, s)
    room = 64 * (positions == "rope")
    assert trainer.room == S.SFTTrainer(network(), s, made).room == room
    for row, (nats, tokens, right) in zip(rows, trainer.score(rows).tolist(), strict=True):
        expected, likeliest = losses_alone(made, row)
        assert nats == pytest.approx(expected.item(), rel=1e-9)
        assert (tokens, right) == ((row.targets >= 0).sum().item(), likeliest)


def test_intervals_of_ratios():
    """By hand: 6 over 4 of rows (2, 1) (1, 2) (3, 1): residuals 0.5, -2, 1.5; and 95 in 100 hold the truth."""
    mean, low, high = S.ratio_interval(torch.tensor([2.0, 1, 3]), torch.tensor([1.0, 2, 1]))
    assert mean == 1.5 and high - mean == pytest.approx(
        1.96 * math.sqrt(6.5 / 2) * math.sqrt(3) / 4
    )
    assert mean - low == pytest.approx(high - mean)
    torch.manual_seed(0)
    counts = torch.randint(1, 9, (2000, 100)).double()
    held = [
        low <= 2 <= high
        for _, low, high in (
            S.ratio_interval((2 + torch.randn(100)) * each, each) for each in counts
        )
    ]
    assert 0.92 < sum(held) / 2000 < 0.97


# ------------------------------------------------------------------------------------------ divergences: a second form
def softmax(values, temperature):
    parts = [math.exp(value / temperature) for value in values]
    return [part / sum(parts) for part in parts]


def written_out(
    student,
    teacher,
    kind,
    temperature,
    beta,
    top_k,
):
    """One token's divergence, in loops over Python's floats."""
    if top_k:
        best = sorted(range(len(teacher)), key=lambda at: -teacher[at])[:top_k]
        student, teacher = ([values[at] for at in best] for values in (student, teacher))
    p, t = softmax(student, temperature), softmax(teacher, temperature)
    beta = {"forward": 0.0, "reverse": 1.0}.get(kind, beta)
    m = [beta * x + (1 - beta) * y for x, y in zip(t, p, strict=True)]

    def kl(x, y):
        return sum(a * math.log(a / c) for a, c in zip(x, y, strict=True))

    return temperature**2 * (
        kl(t, p)
        if beta == 0
        else kl(p, t)
        if beta == 1
        else beta * kl(t, m) + (1 - beta) * kl(p, m)
    )


def logits_of(seed=0, n=6, size=11):
    torch.manual_seed(seed)
    return 2 * torch.randn(n, size), 2 * torch.randn(n, size)


@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd"])
@pytest.mark.parametrize("temperature", [1.0, 2.5, 0.5])
@pytest.mark.parametrize("top_k", [0, 2, 5, 99])
@pytest.mark.parametrize("beta", [0.0, 0.001, 0.5, 0.9, 1.0])
def test_divergences_by_loops_and_finite_differences(kind, temperature, top_k, beta):
    student, teacher = logits_of()
    s = S.Settings(kd_loss=kind, kd_temperature=temperature, kd_top_k=top_k, kd_beta=beta)
    found = S.divergence(student, teacher, s)
    expected = [
        written_out(x, y, kind, temperature, beta, top_k)
        for x, y in zip(student.tolist(), teacher.tolist(), strict=True)
    ]
    assert found.tolist() == pytest.approx(expected, rel=1e-11) and (found > 0).all()
    assert torch.autograd.gradcheck(lambda x: S.divergence(x, teacher, s), student.requires_grad_())
    assert S.divergence(teacher, teacher, s).abs().max() < 1e-13
    same = S.divergence(student + 3, teacher - 2, s)
    assert torch.allclose(same, found, rtol=1e-11)


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
            energy = [sum(value**2 for value in token) for token in x[batch.doc == place].tolist()]
            norm = math.sqrt(sum(value**2 for value in energy) + 1e-6)
            maps.append([value / norm for value in energy])
        distance = sum((x - y) ** 2 for x, y in zip(*maps, strict=True))
        expected[batch.doc == place] = distance
    assert torch.allclose(found, expected[batch.mask], rtol=1e-12)
    assert torch.autograd.gradcheck(
        lambda x: S.attention_distance(x, teacher, batch), student.requires_grad_()
    )
    zeros = torch.zeros_like(student).requires_grad_()
    S.attention_distance(zeros, teacher, batch).sum().backward()
    assert not zeros.grad.any()  # and no NaN: a new mixer puts out zeros


@pytest.mark.parametrize("dims", [(6, 6), (4, 8), (5, 12), (9, 4)])
def test_pooled_distance_by_loops(dims):
    torch.manual_seed(0)
    student, teacher = (torch.randn(7, dim) for dim in dims)
    width = min(dims)

    def pooled(values):
        edges = [
            (at * len(values) // width, -(-(at + 1) * len(values) // width)) for at in range(width)
        ]
        return [sum(values[low:high]) / (high - low) for low, high in edges]

    expected = []
    for x, y in zip(map(pooled, student.tolist()), map(pooled, teacher.tolist()), strict=True):
        dot, sizes = (
            sum(p * q for p, q in zip(x, y, strict=True)),
            [math.sqrt(sum(v * v for v in z)) for z in (x, y)],
        )
        expected.append(1 - dot / sizes[0] / sizes[1])
    assert S.pooled_distance(student, teacher).tolist() == pytest.approx(expected, rel=1e-11)
    assert torch.autograd.gradcheck(
        lambda x: S.pooled_distance(x, teacher), student.requires_grad_()
    )


def captured(made, ids):
    """What the head reads and the last mixer's output, by a forward written out for layers g and a."""
    context = made.context(ids)
    x = x0 = S.rms_norm(F.embedding(ids, made.embed))
    for block, mixer in zip(made.blocks, made.mixers, strict=True):
        x = block.mix[0] * x + block.mix[1] * x0
        width = getattr(mixer, "head_dim", 0)
        context.angles = S.rotation(context.positions, width, 1e4, [], x.dtype)
        y = mixer(block.mixer_norm(x), context)
        x = x + y * block.mixer_scale
        x = x + block.mlp(block.mlp_norm(x)) * block.mlp_scale
    return made.final_norm(x), y


@pytest.mark.parametrize("kind", ["reverse", *KINDS[1:]])
def test_distilled_losses_row_by_row(kind):
    """A student of half the depth and width in packed windows, against forwards of each row alone, written out."""
    student, teacher, rows = network(1, "g a", 16), network(2, "g a g a g", 32), some_rows(7)
    s = S.Settings(train_seq_len=64, kd_loss=kind, kd_temperature=2.0, kd_top_k=9)
    trainer = S.SFTTrainer(student, s, teacher)
    batch = one_batch(rows)
    nats, apart = S.distilled_losses(student, teacher, trainer.projection, batch, s)
    assert [tuple(x.shape) for x in trainer.projection] == (
        [(32, 16)] if kind == "projection" else []
    )
    for place, number in enumerate(batch.numbers.tolist()):
        alone = one_batch([rows[number]])
        (x, own), (y, other) = (captured(each, alone.ids) for each in (student, teacher))
        p, q = x[alone.mask], y[alone.mask]
        expected = F.cross_entropy(student.logits(p), alone.targets[alone.mask], reduction="none")
        here = batch.doc[batch.mask] == place
        assert torch.allclose(nats[here], expected, rtol=1e-9)
        if kind == "attention":
            expected = S.attention_distance(own, other, alone)
        elif kind == "pool":
            expected = S.pooled_distance(p, q)
        elif kind == "projection":
            expected = ((p @ trainer.projection[0].T - q) ** 2).sum(1) / 32
        else:
            expected = S.divergence(student.logits(p), teacher.logits(q), s)
        assert torch.allclose(apart[here], expected, rtol=1e-8, atol=1e-12)
    apart.sum().backward()
    assert all(param.grad is None for param in teacher.parameters())
    assert all(param.grad.abs().sum() > 0 for param in trainer.projection)


def test_alpha_weighs_the_two_losses():
    student, teacher, rows = network(1), network(2), some_rows(4)
    parts = [gradients_of(student, rows, teacher, kd_alpha=each) for each in (0.0, 1.0, 0.3)]
    alone = gradients_of(student, rows)[1]
    for plain, kd, mixed, one in zip(*(each[1] for each in parts), alone, strict=True):
        assert (mixed - 0.7 * plain - 0.3 * kd).abs().max() < 1e-12
        assert (plain - one).abs().max() < 1e-12
    loss, nats, apart = parts[2][0].tolist()
    assert loss == pytest.approx(0.7 * nats + 0.3 * apart) and apart > 0


def test_the_whole_gradient_by_finite_differences():
    """Of the student's and a projection's weights, in random directions."""
    student, teacher, rows = network(1), network(2, "a g a", 24), some_rows(4)
    for kind in ("jsd", "attention", "pool", "projection"):
        trainer = S.SFTTrainer(student, S.Settings(train_seq_len=64, kd_loss=kind), teacher)
        params = trainer.trained.values()

        def loss(trainer=trainer):
            return trainer.forward_backward(rows, windows_of(rows), 50)[0].item()

        loss()
        torch.manual_seed(3)
        point = parameters_to_vector(params).detach().clone()
        way = torch.randn_like(point)
        slope = way @ parameters_to_vector(param.grad for param in params)
        ends = []
        for size in (1e-6, -1e-6):
            vector_to_parameters(point + size * way, params)
            ends.append(loss())
        assert (ends[0] - ends[1]) / 2e-6 == pytest.approx(slope.item(), rel=1e-5)
        assert all(param.grad is None for param in teacher.parameters())


def test_the_interval_of_an_accuracy_ends_at_1():
    found = S.row_summary(torch.tensor([[0.1, 5.0, 5.0]] * 9 + [[0.1, 5.0, 4.0]]))
    share, low, high = found["accuracy"]
    assert share == pytest.approx(0.98) and 0.93 < low < 0.95 and high == 1 and found["rows"] == 10


def test_a_compiled_forward_changes_nothing(monkeypatch):
    """With adapters, which are traced; without inductor, which takes minutes."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    given = dict(train_seq_len=64, lora_rank=2, qat=False, micro_batch_tokens=128)
    found = []
    for compiled in (False, True):
        made = network(0, "a")
        s = S.Settings(compile=compiled, **given)
        S.adapt(made, s, torch.device("cpu"))
        trainer = S.SFTTrainer(made, s)
        found.append([])
        for step in range(3):
            rows = some_rows(14, step)
            sums = trainer.forward_backward(rows, windows_of(rows), targets_of(rows))
            S.step_optimizers(trainer.optimizers, 1.0, torch.tensor(True))
            found[-1] += [sums[0].item(), trainer.score(rows)[:, 0].sum().item()]
        assert ("features" in vars(made)) == compiled
    assert found[0] == pytest.approx(found[1], rel=1e-9) and found[0][0] != found[0][2]
