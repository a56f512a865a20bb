"""Scores: every prediction once and in its context, bytes of the text, count models against a slow implementation."""

from __future__ import annotations

import lzma
import math
import random
import threading
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
import zstandard
from test_data import HARD_TEXTS, train_model

import train_gpt as T

BYTES = T.load_tokenizer("bytes")
BOS = BYTES.bos_id


def runtime(rank: int = 0, world_size: int = 1) -> T.Runtime:
    return T.Runtime(rank, world_size, torch.device("cpu"), False)


def random_tokens(count: int, seed: int = 0) -> np.ndarray:
    """A validation stream of `count` tokens: BOS first, later documents at random places."""
    tokens = np.random.default_rng(seed).integers(4, 260, count)
    tokens[0] = BOS
    tokens[5::17] = BOS
    return tokens


def loss_of(context: list[int], target: int) -> float:
    """The table model's loss: any change of the context's length, content, order or of the target changes it."""
    mixed = sum((at + 1) * (token + 3) for at, token in enumerate(context))
    return 1.0 + (mixed * 31 + context[-1] * 7 + target * 101) % 9973 / 9973


class TableModel:
    """`loss_of` for batches, (ids, targets) -> losses (B, T), 0 where the target is -1; float64. Counts its calls."""

    def __init__(self):
        self.shapes: list[tuple[int, int]] = []

    def __call__(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.shapes.append(tuple(ids.shape))
        at = torch.arange(1, ids.size(1) + 1)
        mixed = (at * (ids + 3)).cumsum(1)
        losses = 1.0 + ((mixed * 31 + ids * 7 + targets * 101) % 9973).double() / 9973
        return torch.where(targets >= 0, losses, 0.0)


def slow_nats(tokens: list[int], seq_len: int, stride: int) -> float:
    """Each prediction by itself, its window worked out from its own index."""
    count, losses = len(tokens) - 1, []
    for i in range(count):
        if stride == seq_len:
            begin = i // seq_len * seq_len
        elif i < seq_len:
            begin = 0
        else:
            end = min(count, seq_len + ((i - seq_len) // stride + 1) * stride)
            begin = end - seq_len
        losses.append(loss_of(tokens[begin : i + 1], tokens[i + 1]))
    return math.fsum(losses)


@pytest.mark.parametrize("seq_len", [1, 2, 5, 8])
def test_windows_score_each_prediction_once_in_context(seq_len):
    for stride in range(1, seq_len + 1):
        for count in range(30):
            found = T.windows(count, seq_len, stride)
            assert [at for _, first, end in found for at in range(first, end)] == list(range(count))
            for number, (begin, first, end) in enumerate(found):
                assert 0 <= begin <= first < end <= count and end - begin <= seq_len
                if stride == seq_len:
                    assert begin == first == number * seq_len  # plain: nothing is seen that is not scored
                elif number:
                    assert end - begin == seq_len and end - first <= stride  # full context before
                else:
                    assert (begin, first, end) == (0, 0, min(count, seq_len))
            if stride < seq_len:
                assert len(found) == (0 if not count else 1 + max(0, -(-(count - seq_len) // stride)))


def test_windows_by_hand():
    assert T.windows(10, 4, 4) == [(0, 0, 4), (4, 4, 8), (8, 8, 10)]
    assert T.windows(10, 4, 3) == [(0, 0, 4), (3, 4, 7), (6, 7, 10)]
    assert T.windows(9, 4, 3) == [(0, 0, 4), (3, 4, 7), (5, 7, 9)]
    assert T.windows(0, 4, 4) == []


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("stride", [16, 15, 7, 1])
def test_score_is_that_of_a_slow_loop(stride, batch):
    for count in (17, 32, 33, 48, 49, 64, 100):  # 16, 31 ... predictions: whole windows and tails of every kind
        tokens, model = random_tokens(count), TableModel()
        score = T.score_tokens(model, tokens, BYTES, runtime(), 16, stride, batch)
        assert score.nats == pytest.approx(slow_nats(tokens.tolist(), 16, stride), rel=1e-12)
        assert score.tokens == count - 1
        assert score.bytes == int((tokens[1:] >= 4).sum())
        assert set(model.shapes) == {(batch, 16)}
        assert len(model.shapes) == -(-len(T.windows(count - 1, 16, stride)) // batch)


def test_the_score_depends_on_the_mode():
    """Else the comparison above could not tell plain windows from sliding ones."""
    tokens, model = random_tokens(100), TableModel()
    scores = [T.score_tokens(model, tokens, BYTES, runtime(), 16, stride, 4) for stride in (16, 15, 7, 1)]
    assert len({round(score.nats, 6) for score in scores}) == 4


@pytest.mark.parametrize("shift", [-1, 0, 1])
def test_targets_are_the_next_tokens(shift):
    """The loss is 1 where the target is not the successor that the map names; an offset by one misses them all."""
    successor = {BOS: 10, **{token: 10 + (token - 10) * 5 % 89 + 1 for token in range(10, 100)}}
    tokens = [BOS]
    while len(tokens) < 90:
        tokens.append(successor[tokens[-1]])
    table = torch.zeros(264, dtype=torch.long)
    table[list(successor)] = torch.tensor(list(successor.values()))

    def model(ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return ((table[ids] + shift != targets) & (targets >= 0)).double()

    for stride in (16, 5):
        score = T.score_tokens(model, np.array(tokens), BYTES, runtime(), 16, stride, 4)
        assert score.nats == (89.0 if shift else 0.0)


class RanksInThreads(T.Runtime):
    """A rank of several that are threads of this process; `sum` waits for all of them."""

    def __init__(self, rank: int, barrier: threading.Barrier, parts: list):
        super().__init__(rank, barrier.parties, torch.device("cpu"), True)
        self.barrier, self.parts = barrier, parts

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        self.parts.append(tensor.clone())
        self.barrier.wait(timeout=30)
        return tensor.copy_(torch.stack(self.parts).sum(0))


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_ranks_share_out_the_windows(world_size):
    tokens, barrier, parts = random_tokens(100), threading.Barrier(world_size), []
    scores: dict[int, T.Score] = {}

    def work(rank: int) -> None:
        mine = RanksInThreads(rank, barrier, parts)
        scores[rank] = T.score_tokens(TableModel(), tokens, BYTES, mine, 16, 16, 2)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert set(scores) == set(range(world_size))
    alone = T.score_tokens(TableModel(), tokens, BYTES, runtime(), 16, 16, 2)
    for score in scores.values():
        assert (score.tokens, score.bytes) == (alone.tokens, alone.bytes)
        assert score.nats == pytest.approx(alone.nats, rel=1e-13)
    assert [int(part[1]) > 0 for part in parts].count(True) == min(world_size, 7)


def test_score_bytes_are_those_of_the_text(tmp_path: Path):
    trained = T.load_tokenizer(train_model(tmp_path / "own.model"))
    for tokenizer in (BYTES, trained):
        tokens = [token for text in HARD_TEXTS for token in (tokenizer.bos_id, *tokenizer.encode(text))]
        score = T.score_tokens(TableModel(), np.array(tokens), tokenizer, runtime(), 16, 16, 4)
        assert score.bytes == sum(len(text.encode()) for text in HARD_TEXTS)


def test_sums_are_float64():
    """2**24 + 1 is no float32: summed in single precision, small losses beside large ones would be lost."""
    def model(ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        losses = torch.where(torch.arange(targets.size(1)) == 0, 2.0**24, 1.0)
        return torch.where(targets >= 0, losses, 0.0).float()

    score = T.score_tokens(model, random_tokens(65), BYTES, runtime(), 16, 16, 1)
    assert score.nats == 4 * (2.0**24 + 15)


def test_a_stream_that_begins_inside_a_document_is_refused():
    with pytest.raises(T.UserError, match=r"validation does not begin with .*\(BOS\), but with token 77"):
        T.score_tokens(TableModel(), np.array([77] * 40), BYTES, runtime(), 16, 16, 2)


@pytest.mark.parametrize("stride", [16, 4])
def test_less_than_a_window_is_refused(stride):
    assert T.score_tokens(TableModel(), random_tokens(17), BYTES, runtime(), 16, stride, 2).tokens == 16
    for count in (16, 2, 1):  # one more than the predictions
        with pytest.raises(T.UserError, match=rf"\b{count} tokens.* one window .*16"):
            T.score_tokens(TableModel(), random_tokens(count), BYTES, runtime(), 16, stride, 2)


def test_a_wrong_byte_count_is_refused():
    manifest = {"val": {"decoded_bytes": 1000}}
    T.check_bytes(1000, manifest)
    for count in (999, 1001, 0):
        with pytest.raises(T.UserError, match=f"{count}.*1000"):
            T.check_bytes(count, manifest)


def test_score_closed_forms():
    score = T.Score(nats=12 * math.log(2), tokens=4, bytes=6)
    assert score.loss == pytest.approx(3 * math.log(2), rel=1e-15)
    assert score.bpb == pytest.approx(2.0, rel=1e-15)
    assert str(score) == "loss:2.0794 bpb:2.0000 nats:8.3 tokens:4 bytes:6 bytes_per_token:1.5000"
    uniform = T.Score(nats=1000 * math.log(256), tokens=1000, bytes=1000)  # bytes, each as likely: 8 bits
    assert uniform.bpb == pytest.approx(8.0, rel=1e-15)


def slow_count_nats(train: list[int], val: list[int], vocab_size: int) -> list[float]:
    """Witten-Bell (method C) with dictionaries: nats of val[1:] under the unigram, bigram and trigram model."""
    followers: dict[tuple, Counter] = defaultdict(Counter)
    for i in range(1, len(train)):
        before = (train[i - 2] if i > 1 else None, train[i - 1])
        for history in ((), before[1:], before):
            followers[history][train[i]] += 1

    def p(token: int, history: tuple | None) -> float:
        if history is None:
            return 1 / vocab_size
        lower = p(token, history[1:] if history else None)
        counts = followers.get(history)
        return lower if counts is None else (counts[token] + len(counts) * lower) / (counts.total() + len(counts))

    nats = [0.0, 0.0, 0.0]
    for i in range(1, len(val)):
        before = (val[i - 2] if i > 1 else None, val[i - 1])
        for order, history in enumerate(((), before[1:], before)):
            nats[order] -= math.log(p(val[i], history))
    return nats


@pytest.mark.parametrize(("vocab_size", "train_count", "val_count"), [
    (2, 30, 20), (7, 200, 90), (60, 500, 300), (300, 90, 80)])
def test_count_models_are_those_of_a_slow_implementation(vocab_size, train_count, val_count):
    for seed in range(4):
        rng = random.Random(seed)
        weights = [1 / (1 + rank) for rank in range(vocab_size)]
        train, val = (rng.choices(range(vocab_size), weights, k=count) for count in (train_count, val_count))
        expected = slow_count_nats(train, val, vocab_size)
        found = T.count_model_nats(np.array(train, dtype=np.uint16), np.array(val, dtype=np.int64), vocab_size)
        assert found == pytest.approx(expected[1:], rel=1e-12, abs=1e-9)


def test_count_models_by_hand():
    """0 1 1: the unigram knows 1 twice, so p(1) = (2 + 1/2) / 3 = 5/6, and after 0 came 1 once."""
    bigram, trigram = T.count_model_nats(np.array([0, 1, 1]), np.array([0, 1]), 2)
    assert math.exp(-bigram) == pytest.approx((1 + 5 / 6) / 2, rel=1e-14)
    assert math.exp(-trigram) == pytest.approx((1 + 11 / 12) / 2, rel=1e-14)


def test_count_models_are_distributions():
    train = np.array(random.Random(1).choices(range(12), k=80))
    for history in (int(train[0]), int(train[40]), 12):  # at the beginning of the training stream, inside it, unseen
        nats = np.array([T.count_model_nats(train, np.array([history, token]), 13) for token in range(13)])  # (V, 2)
        assert np.exp(-nats).sum(0) == pytest.approx([1.0, 1.0], rel=1e-12)


def test_yardsticks_are_those_of_the_text():
    rng = random.Random(0)
    vocabulary = ["".join(rng.choices("abcdefgh", k=rng.randint(2, 6))) for _ in range(40)] + ["größer", "日本", "🙂"]
    texts = [" ".join(rng.choices(vocabulary, k=50)) for _ in range(30)]
    train, val = ([token for text in half for token in (BOS, *BYTES.encode(text))] for half in (texts[:24], texts[24:]))
    found = T.yardsticks(np.array(train), np.array(val), BYTES)
    text = "".join(texts[24:]).encode()
    _, bigram, trigram = slow_count_nats(train, val, BYTES.vocab_size)
    assert found == pytest.approx({
        "bigram_bpb": bigram / math.log(2) / len(text), "trigram_bpb": trigram / math.log(2) / len(text),
        "zstd22_bpb": 8 * len(zstandard.ZstdCompressor(level=22).compress(text)) / len(text),
        "xz_bpb": 8 * len(lzma.compress(text, preset=9)) / len(text)}, rel=1e-12)
    assert 1.0 < found["trigram_bpb"] < found["bigram_bpb"] < 5.0
