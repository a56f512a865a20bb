"""Training batches: the same tokens whatever the ranks and micro-batches; micro-batches fitted to memory."""

import math
import subprocess
import sys
import threading
import time
import types
from fractions import Fraction
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from test_data import write_shard

import train_gpt as T


def make_stream(folder, name: str, *shards: np.ndarray, tail: int = 31) -> T.TokenStream:
    for at, tokens in enumerate(shards):
        write_shard(folder / f"{name}_train_{at:06d}.bin", tokens)
    stream = T.TokenStream(sorted(folder.glob(f"{name}_train_*.bin")), 64)
    stream.length -= tail
    return stream


@pytest.fixture
def stream(tmp_path):
    return make_stream(tmp_path, "a", np.arange(700) % 60, np.arange(331) % 59)


def data_of(streams: list[T.TokenStream], shares: list[float]) -> types.SimpleNamespace:
    return types.SimpleNamespace(streams=streams, shares=shares)


def batches(stream, rank=0, world=1, **changes) -> T.Batches:
    runtime = T.Runtime(rank, world, torch.device("cpu"), False)
    data = stream if isinstance(stream, types.SimpleNamespace) else data_of([stream], [1.0])
    return T.Batches(data, T.Settings(**{"train_seq_len": 8, "train_batch_tokens": 64, **changes}), runtime)


def rows(of: T.Batches, step: int) -> torch.Tensor:
    """All windows of a step with their last target, (rows, seq_len + 1)."""
    return torch.cat([torch.cat([ids, targets[:, -1:]], dim=1) for ids, targets in of.micro_batches(step)])


def test_every_row_goes_on_where_it_stopped(stream):
    one = batches(stream)
    whole = stream.read(0, 1000)
    assert len(whole) == len(stream) == 1000
    for step in (0, 1, 7, 200):
        found = rows(one, step)
        for row in range(8):
            at = row * 125 + step * 8
            assert found[row].tolist() == [whole[(at + offset) % 1000] for offset in range(9)]
    assert all(torch.equal(targets[:, :-1], ids[:, 1:]) for ids, targets in one.micro_batches(3))


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("micro", [0, 8, 16, 24])
def test_ranks_and_micro_batches_share_one_global_batch(stream, world, micro):
    for step in (0, 5):
        parts = [rows(batches(stream, rank, world, micro_batch_tokens=micro), step) for rank in range(world)]
        assert torch.equal(torch.cat(parts), rows(batches(stream), step))


def test_micro_batches_shrink_until_they_fit_and_gradients_are_of_one_step(stream, monkeypatch):
    tried = []
    compilers = []
    monkeypatch.setattr(T.torch.compiler, "reset", lambda: compilers.append(len(tried)))

    class Scarce(torch.nn.Linear):
        def forward(self, ids, targets):
            tried.append(len(ids))
            if len(ids) > 2:
                raise torch.OutOfMemoryError("pretend")
            return super().forward(ids.float()) * targets

    model = Scarce(8, 8)
    for param in model.parameters():
        param.grad = torch.full_like(param, 7.0)
    taken = []
    optimizers = types.SimpleNamespace(
        params=list(model.parameters()), load_state_dict=taken.append,
        reduce_gradients=lambda *given: taken.append(model.bias.grad.clone()), step=lambda *given: None)

    def warm_up(of: T.Batches) -> None:
        T.warm_up(model, model, {}, optimizers, of, T.Settings(warmup_steps=2))

    of = batches(stream)
    warm_up(of)
    assert tried == [8, 4] + [2] * 9 and of.micro_rows == 2  # 2 steps of 4, evaluation
    means = [sum(targets.sum(0) for _, targets in of.micro_batches(step)) / 64 for step in range(2)]  # of a step alone
    assert compilers == [1, 2] and taken[2:] == [{}]
    assert [grad.tolist() for grad in taken[:2]] == [pytest.approx(mean.tolist()) for mean in means]
    with pytest.raises(T.UserError, match="out of memory with 8 windows a step; set MICRO_BATCH_TOKENS lower"):
        warm_up(batches(stream, micro_batch_tokens=64))


@pytest.mark.parametrize("changes, said", [
    (dict(train_batch_tokens=60), "TRAIN_BATCH_TOKENS=60"),
    (dict(train_batch_tokens=1000), "TRAIN_BATCH_TOKENS=1000: takes 1000 of the 1000 training tokens"),
    (dict(micro_batch_tokens=4), "MICRO_BATCH_TOKENS=4"),
])
def test_batches_that_do_not_fit_are_errors(stream, changes, said):
    with pytest.raises(T.UserError, match=said):
        batches(stream, **changes)


@pytest.mark.full
def test_after_the_warm_up_neither_training_nor_evaluation_compiles(stream):
    """What compiles late would do so on the clock: choosing among the averages is the first evaluation of a run."""
    cfg = T.Settings(model_dim=32, num_heads=2, num_kv_heads=1, layer_pattern="s", train_seq_len=8,
                     train_batch_tokens=64, warmup_steps=1)
    of, tokenizer = batches(stream), T.load_tokenizer("bytes")
    net = T.GPT(T.model_config(cfg, tokenizer.vocab_size, tokenizer.bos_id))
    model = torch.compile(net, dynamic=False, fullgraph=True)
    optimizers = T.Optimizers(net, cfg, of.runtime)
    table = {"matrix": {"bits": 6, "clip_sigmas": 12.85, "widen": 1.0}}
    before = [param.detach().clone() for param in net.parameters()]
    T.warm_up(model, net, table, optimizers, of, cfg)
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    assert all(not optimizer.state for optimizer in optimizers.all)
    tokens = np.concatenate([[tokenizer.bos_id], np.arange(100) % 50 + 4])
    with torch.compiler.set_stance("fail_on_recompile"):
        score = T.score_tokens(model, tokens, tokenizer, of.runtime, 8, 8, of.micro_rows)
        with T.quantized(net, table):
            T.forward_backward(model, of, 3)
    assert score.tokens == 100 and score.bytes == 100


@pytest.fixture
def mixed(tmp_path):
    """Three streams that are told apart by their tokens: 0..19, 20..39, 40..59."""
    return [make_stream(tmp_path, name, 20 * at + np.arange(size) % 20, tail=0)
            for at, (name, size) in enumerate((("a", 4000), ("b", 900), ("c", 700)))]


def parts_of(windows: torch.Tensor) -> list[int]:
    """Rows of each of the three streams; no window mixes two."""
    part = windows // 20
    assert torch.equal(part, part[:, :1].expand_as(part))
    return torch.bincount(part[:, 0], minlength=3).tolist()


@pytest.mark.parametrize("shares", [[0.7, 0.2, 0.1], [0.5, 0.25, 0.25], [0.97, 0.02, 0.01], [1 / 3, 1 / 3, 1 / 3]])
@pytest.mark.parametrize("seed", [0, 1337])
def test_every_step_of_a_mixture_has_the_shares_rounded(mixed, shares, seed):
    of, total = batches(data_of(mixed, shares), train_batch_tokens=80, seed=seed), np.zeros(3)
    for step in range(200):
        counts = parts_of(rows(of, step))
        total += counts
        for share, count in zip(shares, counts, strict=True):
            exact = Fraction(share).limit_denominator(1000) * 10
            assert math.floor(exact) <= count <= math.ceil(exact), (step, counts)
    assert np.abs(total - 2000 * np.array(shares)).max() <= 3  # over 200 steps within three rows


def starts(of: T.Batches, step: int) -> list[tuple[T.TokenStream, int]]:
    """Where each row of a step reads: (stream, position)."""
    found, own = [], threading.get_ident()

    def read(stream: T.TokenStream, start: int, count: int) -> np.ndarray:
        if threading.get_ident() == own:  # else of other batches, that a thread of theirs reads ahead
            found.append((stream, start))
        return np.zeros(count, dtype=np.int64)

    with mock.patch.object(T.TokenStream, "read", read):
        of.read(step)
    return found


def test_a_mixture_reads_every_window_of_a_stream_once_an_epoch(mixed, monkeypatch):
    of = batches(data_of(mixed, [0.7, 0.2, 0.1]), train_batch_tokens=80)
    for stream, share, lanes in zip(mixed, (0.7, 0.2, 0.1), (7, 2, 1), strict=True):
        windows = len(stream) // lanes // 8 * lanes  # whole windows of the lanes in one epoch
        found = [start for step in range(int(windows / share / 10) + 3) for each, start in starts(of, step)
                 if each is stream]
        lane_starts = [lane * len(stream) // lanes for lane in range(lanes)]
        assert found[:windows] == [lane_starts[i % lanes] + i // lanes * 8 for i in range(windows)]
        assert len(set(found[:windows])) == windows


def test_the_seed_moves_the_shares_and_nothing_else(mixed):
    first, second = (batches(data_of(mixed, [0.55, 0.25, 0.2]), seed=seed) for seed in (1, 2))
    assert [parts_of(rows(first, s)) for s in range(9)] != [parts_of(rows(second, s)) for s in range(9)]
    one = [starts(batches(mixed[0], seed=seed), 5) for seed in (1, 2)]
    assert one[0] == one[1]


@pytest.mark.parametrize("world, micro", [(2, 0), (4, 8), (8, 16)])
def test_ranks_share_one_batch_of_a_mixture(mixed, world, micro):
    data = data_of(mixed, [0.55, 0.25, 0.2])
    for step in (0, 3, 11):
        parts = [rows(batches(data, rank, world, micro_batch_tokens=micro), step) for rank in range(world)]
        assert torch.equal(torch.cat(parts), rows(batches(data), step))


def test_a_part_too_short_for_its_share_is_an_error(mixed):
    with pytest.raises(T.UserError, match=r"takes 760 of the 700 training tokens"):
        batches(data_of(mixed, [0.04, 0.01, 0.95]), train_batch_tokens=800)


class Watched:
    """A stream that counts its reads, can be held up and can fail from a position on."""

    def __init__(self, stream, fails_at=None):
        self.stream, self.fails_at, self.reads, self.threads = stream, fails_at, [], set()
        self.paths, self.gate = stream.paths, threading.Event()
        self.gate.set()

    def __len__(self):
        return len(self.stream)

    def read(self, start, count):
        self.gate.wait(10)
        self.reads.append(start)
        self.threads.add(threading.get_ident())
        if self.fails_at is not None and start >= self.fails_at:
            raise T.UserError(f"token at {start}")
        return self.stream.read(start, count)


def test_the_next_step_is_read_while_one_runs_and_no_more(stream):
    watched = Watched(stream)
    of = batches(watched, micro_batch_tokens=8)
    begun = of.micro_batches(0)
    next(begun)
    of.reader.submit(int).result()  # the reader does one thing after the other: now all it was given is done
    assert len(watched.reads) == 16  # 8 windows of step 0 and of step 1, none of step 2
    assert threading.get_ident() not in watched.threads and len(watched.threads) == 1
    list(begun)
    assert torch.equal(rows(of, 1), rows(batches(stream), 1))
    of.reader.submit(int).result()
    assert len(watched.reads) == 24 and list(of.ahead) == [2]
    assert torch.equal(rows(of, 7), rows(batches(stream), 7))  # a resumed or repeated step is read all the same
    assert torch.equal(rows(of, 7), rows(batches(stream), 7))


def test_waiting_is_counted_and_reading_ahead_is_not(stream):
    watched = Watched(stream)
    of = batches(watched)
    watched.gate.clear()
    threading.Timer(0.2, watched.gate.set).start()
    rows(of, 0)
    assert 0.15 < of.waited < 2
    of.reader.submit(int).result()
    before = of.waited
    rows(of, 1)
    assert of.waited - before < 0.05


def test_an_error_of_the_reader_is_raised_where_its_step_is_asked_for(stream):
    of = batches(Watched(stream, fails_at=875 + 8 * 2))  # the last row's window of step 2
    rows(of, 0)
    rows(of, 1)
    for _ in range(2):
        with pytest.raises(T.UserError, match="^token at 891$"):
            rows(of, 2)
    assert len(rows(of, 1)) == 8


def test_the_reader_does_not_outlive_the_program(tmp_path):
    """Leaving by exit and by an exception, each with a step being read."""
    code = (f"import sys; sys.path[:0] = [{str(Path(T.__file__).parent)!r}, {str(Path(__file__).parent)!r}]\n"
            "import test_batches as B, numpy as np, pathlib\n"
            f"stream = B.make_stream(pathlib.Path({str(tmp_path)!r}), 'a', np.arange(9000) % 60)\n"
            "of = B.batches(stream, train_batch_tokens=4096)\n"
            "next(of.micro_batches(0))\n")
    for end, rc, error in (("sys.exit(3)", 3, ""), ("1 / 0", 1, "ZeroDivisionError: division by zero\n")):
        begin = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code + end], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout) == (rc, "") and done.stderr.endswith(error)
        assert done.stderr.count("Error") == (1 if error else 0) and time.perf_counter() - begin < 30
