"""Scores: every prediction once and in its context, bytes of the text, ranks and stateful
evaluation.
"""

import math
import threading
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import train_gpt as T
from conftest import add_noise

BOS = 1


def runtime(rank=0, world_size=1):
    return T.Runtime(rank, world_size, torch.device("cpu"), False)


def scorer(seq_len, rows, runtime_=None):
    return T.Scorer(BOS, runtime_ or runtime(), seq_len, rows)


def text(tokens, size=1):
    return T.EvalText(np.asarray(tokens), size)


def random_tokens(count, seed=0):
    """A validation stream of `count` tokens: BOS first, later documents at random places."""
    tokens = np.random.default_rng(seed).integers(4, 260, count)
    tokens[0] = BOS
    tokens[5::17] = BOS
    return tokens


def loss_of(context, target):
    """The table model's loss: any change of the context's length, content, order or of the target
    changes it.
    """
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


def slow_nats(tokens, seq_len, stride):
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


def windows(count, seq_len, stride):
    """The rows (begin, first scored, end) of `count` predictions; where documents begin is nothing
    to them.
    """
    rows = []

    def model(ids, targets):
        begin, at = ids[0, 0].item() - 4, (targets[0] >= 0).nonzero()[:, 0]  # token n is n + 4
        assert ids.tolist() == [[begin + 4 + min(i, count - 1 - begin) for i in range(seq_len)]]
        rows.append((begin, begin + at[0].item(), begin + at[-1].item() + 1))
        return torch.zeros(targets.shape)

    scorer(seq_len, 1).score(model, text(range(4, count + 5)), 0 if stride == seq_len else stride)
    return rows


@pytest.mark.parametrize("seq_len", [1, 2, 5, 8])
def test_windows_score_each_prediction_once_in_context(seq_len):
    for stride in range(1, seq_len + 1):
        for count in range(1, 30):
            found = windows(count, seq_len, stride)
            assert [at for _, first, end in found for at in range(first, end)] == list(range(count))
            for number, (begin, first, end) in enumerate(found):
                assert 0 <= begin <= first < end <= count and end - begin <= seq_len
                if stride == seq_len:
                    assert (
                        begin == first == number * seq_len
                    )  # plain: nothing is seen that is not scored
                elif number:
                    assert end - begin == seq_len and end - first <= stride  # full context before
                else:
                    assert (begin, first, end) == (0, 0, min(count, seq_len))
            if stride < seq_len:
                assert len(found) == 1 + max(0, -(-(count - seq_len) // stride))


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("stride", [16, 15, 7, 1])
def test_score_is_that_of_a_slow_loop(stride, batch):
    for count in (
        17,
        32,
        33,
        48,
        49,
        64,
        100,
    ):  # 16, 31 ... predictions: whole windows and tails of every kind
        tokens, model = random_tokens(count), TableModel()
        score = scorer(16, batch).score(model, text(tokens, 7), 0 if stride == 16 else stride)
        assert score.nats == pytest.approx(slow_nats(tokens.tolist(), 16, stride), rel=1e-12)
        assert (score.tokens, score.bytes) == (count - 1, 7)
        assert set(model.shapes) == {(batch, 16)}
        assert len(model.shapes) == -(-len(windows(count - 1, 16, stride)) // batch)


@pytest.mark.parametrize("shift", [-1, 0, 1])
def test_targets_are_the_next_tokens(shift):
    """The loss is 1 where the target is not the successor that the map names; an offset by one
    misses them all.
    """
    successor = {BOS: 10, **{token: 10 + (token - 10) * 5 % 89 + 1 for token in range(10, 100)}}
    tokens = [BOS]
    while len(tokens) < 90:
        tokens.append(successor[tokens[-1]])
    table = torch.zeros(264, dtype=torch.long)
    table[list(successor)] = torch.tensor(list(successor.values()))

    def model(ids, targets):
        return ((table[ids] + shift != targets) & (targets >= 0)).double()

    for stride in (0, 5):
        score = scorer(16, 4).score(model, text(tokens), stride)
        assert score.nats == (89.0 if shift else 0.0)


class RanksInThreads(T.Runtime):
    """A rank of several that are threads of this process; `sum` waits for all of them."""

    def __init__(self, rank, barrier, parts):
        super().__init__(rank, barrier.parties, torch.device("cpu"), True)
        self.barrier, self.parts = barrier, parts

    def sum(self, tensor):
        self.parts.append(tensor.clone())
        self.barrier.wait(timeout=30)
        total = sum(self.parts)
        self.barrier.wait(timeout=30)
        return tensor.copy_(total)


def on_ranks(world_size, score):
    """What `score` returns on each rank, and what each put into the sum."""
    barrier, parts, scores = threading.Barrier(world_size), [], {}

    def work(rank):
        scores[rank] = score(RanksInThreads(rank, barrier, parts))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert set(scores) == set(range(world_size))
    return list(scores.values()), parts


def documents_of(lengths, seed=0):
    """A stream of documents of these lengths, BOS included."""
    rng = np.random.default_rng(seed)
    return np.concatenate([[BOS, *rng.integers(4, 260, length - 1)] for length in lengths])


LENGTHS = [
    30,
    1,
    64,
    65,
    2,
    150,
    7,
    1,
    17,
    40,
]  # with pieces of 16 and 64 one of a single token; BOS alone


def test_stateful_score_is_that_of_a_slow_loop_over_documents():
    """Every prediction once, after all of its document; the BOS after a document is predicted by
    its last token.
    """
    tokens, model = documents_of(LENGTHS), TableModel()
    score = T.score_documents(scorer(16, 3), model, text(tokens))
    starts = [0]
    expected = []
    for i in range(len(tokens) - 1):
        starts += [i] if tokens[i] == BOS and i else []
        expected.append(loss_of(tokens[starts[-1] : i + 1].tolist(), int(tokens[i + 1])))
    assert score.nats == pytest.approx(math.fsum(expected), rel=1e-12)
    assert score.tokens == sum(LENGTHS) - 1
    # The last token has no successor.
    assert [width for _, width in model.shapes] == [*LENGTHS[:-1], LENGTHS[-1] - 1]


@pytest.mark.parametrize("world_size", [2, 3, 12])
@pytest.mark.parametrize("name", ["score", "score_documents"])
def test_ranks_share_out_windows_and_documents(name, world_size):
    tokens = documents_of(LENGTHS)

    def score(*rank):
        one = scorer(64, 2, *rank)
        if name == "score":
            return one.score(TableModel(), text(tokens))
        return T.score_documents(one, TableModel(), text(tokens))

    scores, parts = on_ranks(world_size, score)
    alone = score()
    for found in scores:
        assert found.tokens == alone.tokens
        assert found.nats == pytest.approx(alone.nats, rel=1e-13)
    predictions = [int(count) for _, count in parts]  # how many each rank has scored
    rows = 6 if name == "score" else len(LENGTHS)
    assert sum(count > 0 for count in predictions) == min(world_size, rows)
    assert sum(predictions) == len(tokens) - 1


def tiny_network():
    """GDN, sliding window and full attention in float64; no weight is zero, so that every layer
    matters.
    """
    settings = T.Settings(
        layer_pattern="g s a",
        model_dim=32,
        num_heads=2,
        num_kv_heads=1,
        attn_window=24,
        bigram_vocab_size=50,
    )
    torch.manual_seed(1)
    network = T.GPT(T.model_config(settings, 264, BOS)).double()
    add_noise(network, 0.1)
    return network


def test_stateful_score_is_the_plain_score_of_one_window():
    """Whatever the pieces, the rows and the ranks: every token sees its document from its first
    token on.
    """
    tokens, network = documents_of(LENGTHS), tiny_network()
    edges = [*np.flatnonzero(tokens == BOS), len(tokens) - 1]
    with torch.no_grad():
        nats = [
            network(torch.tensor(tokens[None, a:b]), torch.tensor(tokens[None, a + 1 : b + 1]))
            .sum()
            .item()
            for a, b in zip(edges[:-1], edges[1:], strict=True)
        ]  # document by document, no cache
    for seq_len, batch in ((7, 4), (16, 3), (64, 1), (64, 16), (150, 4)):
        score = T.score_documents(scorer(seq_len, batch), network, text(tokens))
        assert score.nats == pytest.approx(math.fsum(nats), rel=1e-11)
        assert score.tokens == sum(LENGTHS) - 1

    def on_rank(rank):
        return T.score_documents(scorer(16, 3, rank), network, text(tokens))

    for score in on_ranks(2, on_rank)[0]:
        assert score.nats == pytest.approx(math.fsum(nats), rel=1e-11)
    window = len(tokens) - 1  # one window over the stream; angles of rotary positions are float32
    assert scorer(window, 1).score(network, text(tokens)).nats == pytest.approx(
        math.fsum(nats), rel=1e-6
    )
    short = scorer(4, 4).score(network, text(tokens)).nats  # less context is another score
    assert abs(short / math.fsum(nats) - 1) > 1e-3


def test_a_token_that_is_not_scored_once_is_no_score():
    """A plan of windows that leaves tokens out, or has some twice, must not become a number."""
    tokens = random_tokens(33)
    for spans, scored in (([[0, 0, 16]], 16), ([[0, 0, 16], [16, 16, 32], [16, 30, 32]], 34)):
        with pytest.raises(AssertionError, match=f"scored {scored} of 32 predictions"):
            scorer(16, 2).score_spans(TableModel(), text(tokens), np.array(spans), 2, 16)


def packed_run(folder, **changes):
    """An open run with these settings, and the artifact of `tiny_network` with its codes."""
    settings = T.Settings(
        out_dir=str(folder),
        run_id="a",
        compile=False,
        device="cpu",
        train_seq_len=16,
        **changes,
    )
    run = T.Run(settings, runtime(), None, None, {})
    run.open()
    network = tiny_network().float()
    coded = T.quantize_all(network.state_dict(), T.quant_table(settings))
    header = dict(settings=asdict(network.config), tokenizer_sha256="", meta={"tokenizer": "bytes"})
    content = T.pack_artifact(network.state_dict(), coded, **header)
    (run.folder / "model.upar").write_bytes(content)
    return run, run.folder / "model.upar"


WAYS = [(0, False, "bfloat16"), (8, True, "float32"), (16, False, "float32")]


@pytest.mark.parametrize(("stride", "stateful", "dtype"), WAYS)
def test_an_artifact_is_scored_in_the_ways_asked_for(tmp_path, stride, stateful, dtype):
    """From the file alone, on a CPU in float32. A stride of a window would be the plain score."""
    tokens = text(documents_of(LENGTHS), 99)
    run, path = packed_run(tmp_path, eval_stride=stride, eval_stateful=stateful, dtype=dtype)
    found = T.score_artifact(path, scorer(16, 4), SimpleNamespace(val=tokens), run)

    header, tensors, _ = T.read_artifact(path)
    network = T.GPT(T.GPTConfig(**header["settings"]))
    network.load_state_dict(tensors)
    plain = scorer(16, 4).score(network, tokens)
    expected = plain.result()
    lines = [f"from the artifact: val_{plain}"]
    if stride == 8:
        sliding = scorer(16, 4).score(network, tokens, stride)
        expected["val_bpb_sliding"] = sliding.bpb
        lines.append(f"from the artifact: sliding val_{sliding}")
    if stride == 16:
        lines.append("no sliding score: EVAL_STRIDE=16 is not below TRAIN_SEQ_LEN")
    if stateful:
        whole = T.score_documents(scorer(16, 4), network, tokens)
        expected["val_bpb_stateful"] = whole.bpb
        lines.append(f"from the artifact: stateful val_{whole}")
    assert found == expected
    assert run.folder.joinpath("log.txt").read_text().splitlines()[-len(lines) :] == lines


def test_whole_documents_want_positions_without_an_end():
    with pytest.raises(
        T.UserError, match="EVAL_STATEFUL=1: must be 0, for POSITIONS='learned' ends"
    ):
        T.model_config(T.Settings(eval_stateful=True, positions="learned"), 300, 1)


def test_sums_are_float64():
    """2**24 + 1 is no float32: summed in single precision, small losses beside large ones would be
    lost.
    """

    def model(ids, targets):
        losses = torch.where(torch.arange(targets.size(1)) == 0, 2.0**24, 1.0)
        return torch.where(targets >= 0, losses, 0.0).float()

    score = scorer(16, 1).score(model, text(random_tokens(65)))
    assert score.nats == 4 * (2.0**24 + 15)


def test_score_closed_forms():
    score = T.Score(nats=12 * math.log(2), tokens=4, bytes=6)
    assert score.loss == pytest.approx(3 * math.log(2), rel=1e-15)
    assert score.bpb == pytest.approx(2.0, rel=1e-15)
    assert str(score) == "loss:2.0794 bpb:2.0000 nats:8.3 tokens:4 bytes:6"
    uniform = T.Score(1000 * math.log(256), 1000, 1000)  # bytes, each as likely: 8 bits
    assert uniform.bpb == pytest.approx(8.0, rel=1e-15)
