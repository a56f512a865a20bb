"""Scores: every prediction once and in its context, bytes of the text, ranks and stateful evaluation."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import train_gpt as T
from conftest import BYTES, pack, small_network

BOS = 1
ALONE = T.Runtime(0, 1, torch.device("cpu"), False)


def scorer(seq_len, rows, runtime=ALONE):
    return T.Scorer(BOS, runtime, seq_len, rows)


def text(tokens, size=1):
    return T.EvalText(np.asarray(tokens), size)


def documents_of(lengths):
    """Return a stream of documents of these lengths, BOS included."""
    rng = np.random.default_rng(0)
    return np.concatenate([[BOS, *rng.integers(4, 260, length - 1)] for length in lengths])


LENGTHS = [30, 1, 64, 65, 2, 150, 7, 1, 17, 40]  # with ones of BOS alone


def loss_of(context, target):
    """Return the table model's loss: context's length, content and order, and the target change it."""
    mixed = sum((at + 1) * (token + 3) for at, token in enumerate(context))
    return 1.0 + (mixed * 31 + context[-1] * 7 + target * 101) % 9973 / 9973


class TableModel:
    """`loss_of` for batches, (ids, targets) -> float64 losses (B, T), 0 where the target is -1."""

    def __init__(self):
        self.shapes = []  # of its calls

    def __call__(self, ids, targets):
        self.shapes.append(tuple(ids.shape))
        mixed = (torch.arange(1, ids.size(1) + 1) * (ids + 3)).cumsum(1)
        losses = 1.0 + ((mixed * 31 + ids * 7 + targets * 101) % 9973).double() / 9973
        return torch.where(targets >= 0, losses, 0.0)


def slow_nats(tokens, begins):
    """Return the nats of each prediction i by itself, whose context begins at begins[i]."""
    losses = [loss_of(tokens[at : i + 1], tokens[i + 1]) for i, at in enumerate(begins)]
    return math.fsum(losses)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("seq_len", [1, 2, 5, 16])
def test_score_is_that_of_a_slow_loop(seq_len, batch):
    """Windows side by side, and by every stride; whole windows and tails of every kind."""
    for stride in range(seq_len):
        for count in (*range(1, 12), 15, 16, 17, 31, 32, 47, 64, 100):
            tokens, model = documents_of([5, 17, 100])[: count + 1], TableModel()
            begins = []
            for i in range(count):
                if stride and i >= seq_len:
                    end = seq_len + ((i - seq_len) // stride + 1) * stride
                    begins.append(min(count, end) - seq_len)
                else:
                    begins.append(i // seq_len * seq_len)
            score = scorer(seq_len, batch).score(model, text(tokens, 7), stride)
            assert score.nats == pytest.approx(slow_nats(tokens.tolist(), begins), rel=1e-12)
            assert (score.tokens, score.bytes) == (count, 7)
            windows = 1 + max(0, -(-(count - seq_len) // (stride or seq_len)))
            assert model.shapes == [(batch, seq_len)] * -(-windows // batch)


def test_stateful_score_is_that_of_a_slow_loop_over_documents():
    """Every prediction once, after all of its document; the BOS after a document is predicted by its last token."""
    tokens, model = documents_of(LENGTHS), TableModel()
    begins = np.repeat(np.cumsum([0, *LENGTHS[:-1]]), LENGTHS)[:-1]
    score = T.score_documents(scorer(16, 3), model, text(tokens))
    assert score.nats == pytest.approx(slow_nats(tokens.tolist(), begins), rel=1e-12)
    assert score.tokens == sum(LENGTHS) - 1
    # The last token has no successor.
    assert [width for _, width in model.shapes] == [*LENGTHS[:-1], LENGTHS[-1] - 1]


@pytest.mark.parametrize("world_size", [3, 12])
@pytest.mark.parametrize("name", ["score", "score_documents"])
def test_ranks_share_out_windows_and_documents(name, world_size, monkeypatch):
    def score(runtime):
        one = scorer(64, 2, runtime)
        if name == "score":
            return one.score(TableModel(), text(documents_of(LENGTHS)))
        return T.score_documents(one, TableModel(), text(documents_of(LENGTHS)))

    alone = score(ALONE)
    total = torch.tensor([alone.nats, alone.tokens], dtype=torch.float64)
    parts = []  # nats and predictions of each rank

    def add(self, tensor):
        parts.append(tensor.tolist())
        return total

    monkeypatch.setattr(T.Runtime, "sum", add)
    for rank in range(world_size):
        assert score(T.Runtime(rank, world_size, torch.device("cpu"), True)) == alone
    assert np.sum(parts, axis=0) == pytest.approx(total.numpy(), rel=1e-13)
    rows = 6 if name == "score" else len(LENGTHS)
    assert sum(count > 0 for _, count in parts) == min(world_size, rows)


def test_a_token_that_is_not_scored_once_is_no_score():
    """A plan of windows that leaves tokens out, or has some twice, must not become a number."""
    tokens = text(documents_of([33]))
    for spans, scored in (([[0, 0, 16]], 16), ([[0, 0, 16], [16, 16, 32], [16, 30, 32]], 34)):
        with pytest.raises(AssertionError, match=f"scored {scored} of 32 predictions"):
            scorer(16, 2).score_spans(TableModel(), tokens, np.array(spans), 2, 16)


WAYS = [(0, False, "bfloat16"), (8, True, "float32"), (16, False, "float32")]


@pytest.mark.parametrize(("stride", "stateful", "dtype"), WAYS)
def test_an_artifact_is_scored_in_the_ways_asked_for(tmp_path, stride, stateful, dtype):
    """From the file alone, on a CPU in float32. A stride of a window would be the plain score."""
    ways = dict(eval_stride=stride, eval_stateful=stateful, dtype=dtype)
    settings = T.Settings(compile=False, train_seq_len=16, **ways)
    network = small_network(layers="g s a", tokenizer=BYTES)
    pack(network, BYTES, tmp_path)
    _, tensors, _ = T.read_artifact(tmp_path / "model.upar")
    network.load_state_dict(tensors)
    data = SimpleNamespace(val=text(documents_of(LENGTHS), 99))
    lines = []
    run = SimpleNamespace(settings=settings, log=lines.append)
    own = scorer(16, 4)
    found = T.score_artifact(tmp_path / "model.upar", own, data, run)
    expected = own.score(network, data.val).result()
    if stride == 8:
        expected["val_bpb_sliding"] = own.score(network, data.val, 8).bpb
    if stateful:
        expected["val_bpb_stateful"] = T.score_documents(own, network, data.val).bpb
    assert found == expected
    assert ["EVAL_STRIDE=16" in line for line in lines[1:]] == {0: [], 8: [0, 0], 16: [1]}[stride]
