"""train_sft.py: rows, masks and packing, each distillation loss against a second form, and what a step's loss is.

Everything here is float64 with an independent reference.
"""

import collections
import functools
import itertools
import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import train_grpo as G
import train_sft as S
from conftest import BYTES, refusal, small_network, spelt, write_lines

CPU = torch.device("cpu")
KINDS = ["", "forward", "jsd", "attention", "pool", "projection"]
pytestmark = pytest.mark.usefixtures("default_dtype")


def network(seed=0, layers="g a", dim=16, **changes):
    """Return a tiny network, all of whose weights are at work."""
    shape = dict(model_dim=dim, attn_window=1 << 20, train_seq_len=64)
    return small_network(seed, layers, **{**shape, **changes})


def parsed(row, **changes):
    """Return the Row of a row of a file."""
    s = S.Settings(**{"train_seq_len": 64, **changes})
    return S.parse_row(row, set(), BYTES, s)[1]


def talk(*turns):
    """Return a row of turns: each the first letter of its role, and its text."""
    roles = dict(s="system", u="user", a="assistant")
    return {"messages": [{"role": roles[turn[0]], "content": turn[1:]} for turn in turns]}


def some_rows(count=9, seed=0, longest=16):
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        words = ["".join(rng.choices("abcdef", k=rng.randint(1, longest))) for _ in range(2)]
        rows.append(parsed(talk("u" + words[0], "a" + words[1])))
    return rows


def one_batch(rows, windows=None):
    windows = windows or S.best_fit(rows, range(len(rows)), 64)
    [batch] = S.row_batches(rows, windows, 1 << 30, CPU)
    return batch


# ------------------------------------------------------------------------------- masks and packing
FORMATS = [
    (talk("ss", "uu", "aab", "uv", "ac"), "^Ss.Uu.Aab.Uv.Ac.", "-------ab.----c."),
    (talk("aa", "ub"), "^Aa.Ub.", "-a.---"),
    ({"text": "hey"}, "^hey^", "hey^"),  # its end is the next BOS
]


@pytest.mark.parametrize(("row", "ids", "targets"), FORMATS)
@pytest.mark.parametrize("train_on", ["assistant", "all"])
def test_ids_and_targets_by_hand(row, ids, targets, train_on):
    ids = spelt(ids)
    expected = spelt(targets) if train_on == "assistant" else ids[1:]
    found = parsed(row, train_on=train_on)
    assert (found.ids.tolist(), found.targets.tolist()) == (ids[:-1], expected)


def test_rows_in_a_window_never_predict_one_another():
    """Two rows and padding, by hand; a text's closing BOS is learned, a conversation's next BOS is
    no target.
    """
    rows = [parsed(talk("uhi", "ayo")), parsed({"text": "hey"}), parsed({"text": "x"})]
    batch = one_batch(rows, [[2], [0, 1]])
    assert batch.ids.tolist() == [[*spelt("^x"), *[0] * 10], spelt("^Uhi.Ayo^hey")]
    assert batch.targets.tolist() == [spelt("x^----------"), spelt("-----yo.hey^")]
    assert torch.equal(batch.mask, batch.targets >= 0)
    assert batch.doc.tolist() == [[0, 0, *[-1] * 10], [1] * 8 + [2] * 4]
    assert batch.numbers.tolist() == [2, 0, 1]


@given(st.lists(st.integers(1, 40), max_size=60))
@settings(deadline=None, max_examples=100)
def test_windows_are_never_too_full_and_as_full_as_best_fit_makes_them(lengths):
    """Without room each row has its own window."""
    rows = [SimpleNamespace(ids=range(length)) for length in lengths]
    numbers = [*range(len(rows))]
    windows = S.best_fit(rows, numbers, 40)
    assert sorted(sum(windows, [])) == numbers
    assert sorted(S.best_fit(rows, numbers, 0)) == [[number] for number in numbers]
    slow = []  # a second form: look at every window
    for length in sorted(lengths, reverse=True):
        fits = [own for own in slow if sum(own) + length <= 40]
        if fits:
            max(fits, key=sum).append(length)
        else:
            slow.append([length])
    full = [sum(lengths[at] for at in window) for window in windows]
    assert sorted(full) == sorted(map(sum, slow))


@pytest.mark.parametrize(
    ("layers", "changes"),
    [
        ("g1 g1", {}),
        ("g s1 g a s1", dict(attn_window=4)),
        ("a g", dict(bigram_vocab_size=32)),
        ("g a", dict(positions="none", unet_skips=True)),
    ],
)
def test_packed_rows_are_as_they_are_alone(layers, changes):
    """Log-probabilities of each row's targets, and the gradient of all, to 1e-9."""
    net, rows = network(1, layers, **changes), some_rows(14, longest=20)
    packed = one_batch(rows)
    assert packed.ids.size(0) < 9 and packed.ids.size(1) <= 64
    logps = S.token_logps(net, packed, 1.0)
    gradients = torch.autograd.grad(logps.sum(), [*net.parameters()])
    total = 0
    for place, number in enumerate(packed.numbers.tolist()):
        alone = one_batch([rows[number]])
        own = S.token_logps(net, alone, 1.0)
        assert (logps[packed.doc == place] - own[0]).abs().max() < 1e-9
        assert own[alone.mask].max() < 0
        total = total + own.sum()
    expected = torch.autograd.grad(total, [*net.parameters()])
    for found, one in zip(gradients, expected, strict=True):
        assert (found - one).abs().max() < 1e-9 * max(1, one.abs().max())


# ---------------------------------------------------------------------------- files and their rows
def good(number, answer="yes"):
    return {"prompt": f"prompt {number}", "completion": answer}


def read(path, **changes):
    """Return the Examples of files, and what the log says of them."""
    said = []
    s = S.Settings(**{"train_seq_len": 64, "train_files": str(path), **changes})
    parse = functools.partial(S.parse_row, tokenizer=BYTES, settings=s)
    data = S.read_examples(s, parse, said.append)
    return data, [*map(str, said)]


def test_rows_longer_than_the_context_are_left_out(tmp_path):
    rows = [good(at) for at in range(40)] + [talk("ua", "a" + "b" * size) for size in (58, 59)]
    _, said = read(write_lines(tmp_path / "a.jsonl", rows))
    assert "left out more than TRAIN_SEQ_LEN=64 tokens: 1 (the first is row 42)" in said[0]
    path = write_lines(tmp_path / "b.jsonl", [good(0)] * 3)
    refusal(S.UserError, "^VAL_FILES='': .* must be 2 and 1 at least", read, path)


def test_weights_of_files():
    found = S.weighted_files("X", " a.jsonl:2,\n b.jsonl.zst:.5, c:d ")
    assert found == {"a.jsonl": 2, "b.jsonl.zst": 0.5, "c:d": 1}
    for text in ("a.jsonl:0", "a.jsonl:2, a.jsonl:3"):
        refusal(S.UserError, "^X='a.jsonl:.*': must be FILE or", S.weighted_files, "X", text)


def test_equal_prompts_stand_on_one_side(tmp_path):
    """Of 1,000 prompts, each with two answers in two files, one in ten is held out, one in fifty
    chooses averages.
    """
    first = write_lines(tmp_path / "a.jsonl", [good(at) for at in range(1000)])
    second = write_lines(tmp_path / "b.jsonl", [good(at, "no") for at in range(1000)])
    val = write_lines(tmp_path / "v.jsonl", [good(1, "v"), good(-1, "v")])
    data, _ = read(f"{first},{second}:0.5", eval_prompts=10000)
    keys = [{row.key for row in rows} for rows in (data.train, data.choice, data.held_out)]
    train, choice, held_out = map(len, keys)
    assert train + choice + held_out == len(set().union(*keys)) == 1000
    assert abs(held_out - 100) < 4 * 90**0.5 and abs(choice - 20) < 4 * 20**0.5
    assert [(len(numbers), weight) for numbers, weight in data.parts] == [(train, 1), (train, 0.5)]
    again, _ = read(f"{second},{first}", eval_prompts=10000, seed=5)
    assert {row.key for row in again.held_out} == keys[2] and again.sha256 != data.sha256
    fewer, reports = read(f"{first},{second}", eval_prompts=7, ema=False, swa=False)
    assert any("held-out rows 7 score" in line for line in reports)
    assert len(fewer.held_out) == 7 and {row.key for row in fewer.held_out} <= keys[2]
    # What is held out is not trained on, scored or not; where nothing is chosen, other rows train.
    assert not fewer.choice and len(fewer.train) == 2 * (train + choice)
    given, said = read(first, val_files=str(val))
    assert len(given.train) + len(given.choice) == 999 and len(given.held_out) == 2
    assert any(line.startswith(f"data: {first}: 1 rows do not train, for VAL_") for line in said)
    both, said = read(f"{first},{val}:3", val_files=str(val))
    assert len(both.parts) == 1 and f"data: {val}: no row of it trains" in said


def test_prompts_are_held_out_as_in_the_rl_scripts(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"prompt": str(n), "answer": "x"} for n in range(99)])
    held_out = G.split_problems(G.Settings(train_files=str(path)))[2]
    keys = [S.prompt_key([("<|user|>", problem["prompt"])]) for problem in held_out]
    assert sorted(keys) == [row.key for row in read(path)[0].held_out] and len(keys) > 4


def test_the_key_is_of_all_turns_before_the_first_answer():
    """So that no answer of a held-out conversation is learned from one that goes on longer, or ends before."""

    def keys(*talks):
        return {parsed(talk(*turns.split())).key for turns in talks}

    assert len(keys("sS uu aa uv ab", "sS uu aa", "sS uu aother uv ab", "sS uu aa uv ab uu")) == 1
    # Greetings are no answers: other users go on otherwise.
    assert len(keys("aa uu aa uv", "aa uu ab")) == 1
    assert len(keys("sS uu aa", "uu aa", "aa uu aa", "aa uv aa", "sS uw aa", "aa", "ab")) == 7


# ------------------------------------------------------------------------------- what a step reads


def test_an_epoch_holds_each_row_weight_times():
    ends = [0, 10, 17, 25, 31]
    numbers = [np.arange(*pair) for pair in itertools.pairwise(ends)]
    parts = [*zip(numbers, (1.0, 2.0, 0.25, 1.5), strict=True)]
    total = collections.Counter()
    for epoch in range(4):
        counts = collections.Counter(S.epoch_numbers(parts, 7, epoch).tolist())
        found = [sorted(counts[at] for at in own) for own in numbers]
        assert found == [[1] * 10, [2] * 7, [0] * 6 + [1] * 2, [1] * 3 + [2] * 3]
        total += counts
    assert [total[at] for at in range(17, 31)] == [1] * 8 + [6] * 6


def test_an_epochs_windows_are_a_function_of_seed_and_epoch():
    data = SimpleNamespace(train=some_rows(40), parts=[(np.arange(40), 1.0)])
    first = S.epoch_windows(data, 1, 64, 0)
    assert sorted(sum(first, [])) == [*range(40)] and len(first) < 25
    assert first == S.epoch_windows(data, 1, 64, 0)
    assert first not in (S.epoch_windows(data, 1, 64, 1), S.epoch_windows(data, 2, 64, 0))


def test_a_step_of_an_epoch_of_few_windows_reads_some_again():
    """A weight of 0.5 takes two of these rows: both long ones, both short ones, or one of each."""
    rows = [parsed(talk("u" + "a" * length, "ab")) for length in (50, 50, 2, 2)]
    data = SimpleNamespace(train=rows, parts=[(np.arange(4), 0.5)])
    epochs = [S.epoch_windows(data, seed, 64, epoch) for seed in range(20) for epoch in (0, 1)]
    assert {len(windows) for windows in epochs} == {1, 2}
    windows = [[4], [2, 0], [3]]
    steps = [S.step_windows(windows, place, 5) for place in range(5)]
    assert steps == [[[4]], [[2, 0]], [[3]], [[4]], [[2, 0]]]
    assert [S.step_windows(windows, place, 2) for place in (0, 1)] == [[[4], [3]], [[2, 0]]]


# ----------------------------------------------------------------------------------- a step's loss


def targets_of(rows):
    return sum(int((row.targets >= 0).sum()) for row in rows)


def gradients_of(net, rows, teacher=None, total=None, ranks=1, **changes):
    """Return (loss, nats, KD) and the gradients of a step of all rows, summed over ranks."""
    found = []
    for rank in range(ranks):
        runtime = S.Runtime(rank, ranks, CPU, False)
        s = S.Settings(train_seq_len=64, **changes)
        trainer = S.SFTTrainer(net, s, teacher, runtime)
        windows = S.best_fit(rows, range(len(rows)), 64)
        sums = trainer.forward_backward(rows, windows, total or targets_of(rows))
        found.append([sums, *(param.grad.clone() for param in trainer.trained.values())])
    return [sum(parts) for parts in zip(*found, strict=True)]


def assert_close(ours, theirs, most=1e-10):
    for one, other in zip(ours, theirs, strict=True):
        assert (one - other).abs().max() < most


def test_the_loss_is_the_mean_over_all_targets():
    """Each row by a forward of its own; its score is the same."""
    net, rows = network(), some_rows()
    nats = []
    for row in rows:
        logits = net(row.ids[None])[0]
        nats.append(F.cross_entropy(logits, row.targets, ignore_index=-1, reduction="sum"))
    mean = sum(nats) / targets_of(rows)
    expected = torch.autograd.grad(mean, [*net.parameters()])
    assert_close(gradients_of(net, rows), [torch.stack([mean, mean, 0 * mean]), *expected])
    scores = S.SFTTrainer(net, S.Settings(train_seq_len=64)).score(rows)
    assert_close(scores[:, 0], nats)


@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches_ranks_and_recomputed_layers_change_nothing(kind):
    """From one batch to a window each; on two ranks; with activation checkpointing; beside rows without targets."""
    rows, teacher = some_rows(12), network(5, "a g a g", 24) if kind else None
    changes = dict(kd_loss=kind, kd_alpha=0.7) if kind else {}
    expected = gradients_of(network(), rows, teacher, micro_batch_tokens=1 << 20, **changes)
    for tokens, ranks in ((64, 1), (1, 2), (128, 1)):
        net = network()
        net.activation_checkpointing = tokens == 128
        found = gradients_of(net, rows, teacher, None, ranks, micro_batch_tokens=tokens, **changes)
        assert_close(found, expected)
    masked = [S.Row(row.key, row.ids, torch.full_like(row.targets, -1)) for row in rows[:3]]
    changes |= dict(micro_batch_tokens=1)
    assert_close(gradients_of(network(), rows + masked, teacher, **changes), expected)
    nothing = gradients_of(network(), masked, teacher, total=5, **changes)
    assert not any(values.any() for values in nothing)
    assert teacher is None or all(param.grad is None for param in teacher.parameters())


def test_learned_positions_are_not_packed():
    """Those of the student or the teacher."""
    learned, s = network(positions="learned"), S.Settings(train_seq_len=64)
    assert S.SFTTrainer(learned, s).room == S.SFTTrainer(network(), s, learned).room == 0


def test_intervals_of_ratios():
    """By hand: 6 over 4 of rows (2, 1) (1, 2) (3, 1): residuals 0.5, -2, 1.5. That of a share ends at 1."""
    half = 1.96 * math.sqrt(6.5 / 2) * math.sqrt(3) / 4
    found = S.ratio_interval(torch.tensor([2.0, 1, 3]), torch.tensor([1.0, 2, 1]))
    assert found == pytest.approx([1.5, 1.5 - half, 1.5 + half])
    share, _, high = S.row_summary(torch.tensor([[0.1, 5.0, 5.0]] * 9 + [[0.1, 5.0, 4.0]]))[
        "accuracy"
    ]
    assert share == pytest.approx(0.98) and high == 1


# --------------------------------------------------------------------- divergences: a second form


def written_out(student, teacher, beta, settings):
    """Return the divergences (n,) by torch's kl_div; 0 is forward, 1 reverse."""
    best = teacher.argsort(descending=True)[:, : settings.kd_top_k or None]
    logits = (x.gather(1, best) / settings.kd_temperature for x in (student, teacher))
    p, t = (x.log_softmax(1) for x in logits)
    kl = functools.partial(F.kl_div, reduction="none", log_target=True)  # kl(b, a) is KL(a, b)
    if beta in (0, 1):
        total = kl(p, t) if beta == 0 else kl(t, p)
    else:
        m = (beta * t.exp() + (1 - beta) * p.exp()).log()
        total = beta * kl(m, t) + (1 - beta) * kl(m, p)
    return settings.kd_temperature**2 * total.sum(1)


@pytest.mark.parametrize(
    ("kind", "beta"),
    [("forward", 0.5), ("reverse", 0.5), *(("jsd", beta) for beta in (0.0, 0.001, 0.5, 1.0))],
)
def test_divergences_in_a_second_form_and_finite_differences(kind, beta):
    torch.manual_seed(0)
    student, teacher = 2 * torch.randn(6, 11), 2 * torch.randn(6, 11)
    own_beta = {"forward": 0, "reverse": 1}.get(kind, beta)
    for temperature, top_k in ((1.0, 0), (2.5, 5), (0.5, 2), (2.5, 99)):
        s = S.Settings(kd_loss=kind, kd_temperature=temperature, kd_top_k=top_k, kd_beta=beta)
        found = S.divergence(student, teacher, s)
        expected = written_out(student, teacher, own_beta, s)
        assert torch.allclose(found, expected, rtol=1e-11, atol=0) and (found > 0).all()
        assert torch.autograd.gradcheck(S.divergence, (student.requires_grad_(), teacher, s))
        assert S.divergence(teacher, teacher, s).abs().max() < 1e-13


# ---------------------------------------------------------------- features, layers, projections
def attention_map(mixed):
    """Return the share of each token of a row (T, dim) in the squares of what a mixer puts out."""
    energy = mixed.square().sum(1)
    return energy / (energy.square().sum() + 1e-6).sqrt()


def pooled(features, width):
    """Return means (n, width) of neighbouring channels."""
    means = []
    for at in range(width):
        low, high = at * features.size(1) // width, -(-(at + 1) * features.size(1) // width)
        means.append(features[:, low:high].mean(1))
    return torch.stack(means, 1)


def captured(net, row):
    """Return what the head reads and what the last mixer puts out, (T, dim), of a row alone."""
    outputs = []
    hook = net.mixers[-1].register_forward_hook(lambda *given: outputs.append(given[-1]))
    features = net.features(row.ids[None])
    hook.remove()
    return features[0], outputs[0][0]


@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("dims", [(16, 24), (24, 16)])
def test_distilled_losses_row_by_row(kind, dims):
    """A student of half the depth in packed windows, against forwards of each row alone."""
    student, teacher = network(1, "g a", dims[0]), network(2, "g a g a g", dims[1])
    rows = some_rows(7)
    s = S.Settings(train_seq_len=64, kd_loss=kind, kd_temperature=2.0, kd_top_k=9)
    projection = S.SFTTrainer(student, s, teacher).projection
    assert len(projection) == (kind == "projection")
    batch = one_batch(rows)
    nats, distances = S.distilled_losses(student, teacher, projection, batch, s)
    for place, number in enumerate(batch.numbers.tolist()):
        row = rows[number]
        learned = row.targets >= 0
        (x, mixed), (y, teacher_mixed) = (captured(net, row) for net in (student, teacher))
        p, q = x[learned], y[learned]
        expected = F.cross_entropy(student.logits(p), row.targets[learned], reduction="none")
        own = batch.doc[batch.mask] == place
        assert torch.allclose(nats[own], expected, rtol=1e-9)
        if kind == "attention":
            difference = attention_map(mixed) - attention_map(teacher_mixed)
            expected = difference.square().sum().expand(len(p))
        elif kind == "pool":
            p, q = (F.normalize(pooled(z, min(dims))) for z in (p, q))
            expected = 1 - (p * q).sum(1)
        elif kind == "projection":
            expected = (p @ projection[0].T - q).square().mean(1)
        else:
            expected = S.divergence(student.logits(p), teacher.logits(q), s)
        assert torch.allclose(distances[own], expected, rtol=1e-8, atol=1e-12)


def test_the_attention_of_zeros_has_no_gradient():
    """And no NaN: a new mixer puts out zeros."""
    batch = one_batch(some_rows(5))
    zeros = torch.zeros(*batch.ids.shape, 6, requires_grad=True)
    S.attention_distance(zeros, torch.ones(*batch.ids.shape, 6), batch).sum().backward()
    assert not zeros.grad.any()


@pytest.mark.parametrize("kind", KINDS[2:])
def test_the_whole_gradient_by_finite_differences(kind):
    """Of the student's and a projection's weights, in a random direction."""
    student, teacher, rows = network(1), network(2, "a g a", 24), some_rows(4)
    trainer = S.SFTTrainer(student, S.Settings(train_seq_len=64, kd_loss=kind), teacher)
    params = trainer.trained.values()

    def loss():
        return trainer.forward_backward(rows, [[0, 1, 2, 3]], 50)[0].item()

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


def test_a_compiled_forward_changes_nothing(monkeypatch):
    """With adapters, which are traced; without inductor, which takes minutes."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    found = []
    for compiled in (False, True):
        net = network(0, "a")
        given = dict(compile=compiled, lora_rank=2, qat=False)
        S.adapt(net, S.Settings(**given), CPU)
        found.append(gradients_of(net, some_rows(14), **given))
    assert_close(*found)
