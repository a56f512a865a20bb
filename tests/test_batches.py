"""Training batches: a pseudo-random order of windows, the same tokens whatever the ranks and micro-
batches.
"""

import types

import numpy as np
import pytest
import torch
from test_data import write_shard

import train_gpt as T
from conftest import BYTES


def make_stream(folder, name, *shards, vocab_size=64):
    for at, tokens in enumerate(shards):
        write_shard(folder / f"{name}_train_{at:06d}.bin", tokens)
    return T.TokenStream(sorted(folder.glob(f"{name}_train_*.bin")), vocab_size)


@pytest.fixture
def stream(tmp_path):
    return make_stream(tmp_path, "a", np.arange(700) % 60, np.arange(300) % 59)


def data_of(streams, shares, windows=None):
    """The parts of a Dataset that batches need; by default nothing is held out."""
    windows = windows or [np.arange(len(stream) // 8) for stream in streams]
    tokenizer = types.SimpleNamespace(bos_id=1)
    return types.SimpleNamespace(
        streams=streams, windows=windows, shares=shares, tokenizer=tokenizer
    )


def batches(stream, rank=0, world=1, **changes):
    runtime = T.Runtime(rank, world, torch.device("cpu"), False)
    data = stream if isinstance(stream, types.SimpleNamespace) else data_of([stream], [1.0])
    return T.Batches(
        data, T.Settings(**{"train_seq_len": 8, "train_batch_tokens": 64, **changes}), runtime
    )


def rows(of, step):
    """All windows of a step with their last target, (rows, seq_len + 1)."""
    return torch.cat(
        [torch.cat([ids, targets[:, -1:]], dim=1) for ids, targets in of.micro_batches(step)]
    )


def order(rows, windows, seed=1337):
    """Which of so many windows each training row reads."""
    return [int(T.shuffle(windows, seed, row // windows)[row % windows]) for row in rows]


def read_row(stream, row):
    """The window of a row, as `order` has it, with its last target."""
    return stream.read(order([row], len(stream) // 8)[0] * 8, 9).tolist()


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = {
        tuple(order(range(epoch * 100, (epoch + 1) * 100), 100, seed))
        for epoch in range(5)
        for seed in range(5)
    }
    assert len(orders) == 25


def test_a_row_is_its_window_and_the_last_target(stream):
    one = batches(stream)
    for step in (0, 1, 7, 200):
        found = rows(one, step)
        for row in range(8):
            assert found[row].tolist() == read_row(stream, step * 8 + row)
    assert all(torch.equal(targets[:, :-1], ids[:, 1:]) for ids, targets in one.micro_batches(3))


def test_an_epoch_of_steps_reads_every_window_once(tmp_path):
    """125 windows of 8 in 1003 tokens: three are left over."""
    of = batches(
        make_stream(tmp_path, "a", np.arange(1003), vocab_size=1 << 16), train_batch_tokens=200
    )
    orders = set()
    for epoch in range(4):
        found = torch.cat(
            [rows(of, epoch * 5 + step) for step in range(5)]
        )  # 5 steps of 25 windows
        assert sorted(found[:, :-1].flatten().tolist()) == list(range(1000))
        orders.add(tuple(found[:, 0].tolist()))
    assert len(orders) == 4


def test_held_out_windows_are_from_all_over_and_never_read(tmp_path, monkeypatch):
    stream = make_stream(tmp_path, "a", np.arange(5003), vocab_size=1 << 16)
    settings = T.Settings(train_seq_len=8)
    monkeypatch.setattr(T, "HOLDOUT_TOKENS", 477)
    windows, held_out = T.split_windows(stream, 0.5, settings)
    assert len(held_out) == 30 and len(windows) == 595
    assert sorted([*windows, *held_out]) == list(range(625))
    fifths = np.bincount([window // 125 for window in held_out], minlength=5)
    assert fifths.min() >= 1 and fifths.max() <= 14  # 6 on average
    of = batches(data_of([stream], [1.0], [windows]), train_batch_tokens=200)
    read = {token // 8 for step in range(23) for token in rows(of, step)[:, 0].tolist()}
    assert not read & {*held_out} and len(read) == 23 * 25
    for count in (5000, 10**9):  # at most a twentieth
        monkeypatch.setattr(T, "HOLDOUT_TOKENS", count)
        assert len(T.split_windows(stream, 1.0, settings)[1]) == 625 // 20


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("micro", [0, 8, 16, 24])
def test_ranks_and_micro_batches_share_one_global_batch(stream, world, micro):
    for step in (0, 5):
        parts = [
            rows(batches(stream, rank, world, micro_batch_tokens=micro), step)
            for rank in range(world)
        ]
        assert torch.equal(torch.cat(parts), rows(batches(stream), step))


NO_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
]


@pytest.mark.parametrize("error", NO_MEMORY, ids=["torch", "cublas", "cudnn"])
def test_micro_batches_shrink_until_they_fit_and_gradients_are_of_one_step(
    stream, monkeypatch, error
):
    tried = []
    compilers = []
    monkeypatch.setattr(T.torch.compiler, "reset", lambda: compilers.append(len(tried)))

    class Scarce(torch.nn.Linear):
        def forward(self, ids, targets):
            tried.append(len(ids))
            if len(ids) > 2:
                raise error
            return super().forward(ids.float()) * targets

    model = Scarce(8, 8)
    for param in model.parameters():
        param.grad = torch.full_like(param, 7.0)
    taken = []

    class Optimizer(torch.optim.SGD):
        def step(self):
            taken.append(model.bias.grad.clone())

    optimizers = [Optimizer(model.parameters())]
    of = batches(stream)
    T.warm_up(model, optimizers, of, T.Settings(grad_clip_norm=0.0))
    assert tried == [8, 4] + [2] * 9 and of.micro_batch_size == 2  # 2 steps of 4, evaluation
    means = [
        sum(targets.sum(0) for _, targets in of.micro_batches(step)) / 64 for step in range(2)
    ]  # of a step alone
    assert compilers == [1, 2] and len(taken) == 2
    assert [grad.tolist() for grad in taken] == [pytest.approx(mean.tolist()) for mean in means]
    with pytest.raises(
        T.UserError,
        match="^MICRO_BATCH_TOKENS=64: out of memory with 8 windows; must be less, or 0",
    ):
        T.warm_up(
            model,
            optimizers,
            batches(stream, micro_batch_tokens=64),
            T.Settings(micro_batch_tokens=64),
        )


def test_other_errors_of_the_warm_up_are_raised(stream):
    def model(ids, targets):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    model.zero_grad = lambda: None
    model.parameters = lambda: []
    with pytest.raises(RuntimeError, match="illegal memory access"):
        T.warm_up(model, [], batches(stream), T.Settings())


@pytest.mark.parametrize(
    "tokens, windows", [(1, 1), (7, 1), (8, 1), (15, 1), (16, 2), (24, 2), (32, 4), (1 << 40, 8)]
)
def test_a_micro_batch_is_a_window_at_least_and_divides_the_step(stream, tokens, windows):
    assert batches(stream, micro_batch_tokens=tokens).micro_batch_size == windows


def test_a_step_may_read_more_than_an_epoch_of_a_small_part(mixed):
    data = data_of(mixed[::2], [0.02, 0.98])  # 500 and 87 windows
    found = rows(batches(data, train_batch_tokens=960), 0)  # two and 118 windows
    small = mixed[2]
    assert found[2:].tolist() == [read_row(small, row) for row in range(118)]


@pytest.mark.full
def test_after_the_warm_up_neither_training_nor_evaluation_compiles(stream):
    """What compiles late would do so on the clock: choosing among the averages is the first
    evaluation of a run.
    """
    cfg = T.Settings(
        model_dim=32,
        num_heads=2,
        num_kv_heads=1,
        layer_pattern="s",
        train_seq_len=8,
        train_batch_tokens=64,
    )
    of, tokenizer = batches(stream), BYTES
    net = T.GPT(T.model_config(cfg, tokenizer.vocab_size, tokenizer.bos_id))
    model = torch.compile(net, dynamic=False, fullgraph=True)
    optimizers = T.make_optimizers(net, cfg, T.HEAD_LR, of.runtime)
    table = {"matrix": {"bits": 6, "clip_sigmas": 12.85}}
    before = [param.detach().clone() for param in net.parameters()]
    T.warm_up(model, optimizers, of, cfg)
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    assert not any(optimizer.state for optimizer in optimizers)
    tokens = np.concatenate([[tokenizer.bos_id], np.arange(100) % 50 + 4])
    with torch.compiler.set_stance("fail_on_recompile"):
        scorer = T.Scorer(tokenizer.bos_id, of.runtime, 8, of.micro_batch_size)
        score = scorer.score(model, T.EvalText(tokens, 100))
        with T.quantized(net, table):
            T.forward_backward(model, of, 3)
    assert score.tokens == 100 and score.bytes == 100


@pytest.fixture
def mixed(tmp_path):
    """Three streams that are told apart by their tokens: 0..19, 20..39, 40..59."""
    return [
        make_stream(tmp_path, name, 20 * at + np.arange(size) % 20)
        for at, (name, size) in enumerate((("a", 4000), ("b", 900), ("c", 700)))
    ]


def parts_of(windows):
    """Rows of each of the three streams; no window mixes two."""
    part = windows // 20
    assert torch.equal(part, part[:, :1].expand_as(part))
    return torch.bincount(part[:, 0], minlength=3).tolist()


@pytest.mark.parametrize(
    "shares", [[0.7, 0.2, 0.1], [0.5, 0.25, 0.25], [0.97, 0.02, 0.01], [1 / 3, 1 / 3, 1 / 3]]
)
def test_a_mixture_has_its_shares_after_every_step(mixed, shares):
    of = batches(data_of(mixed, shares), train_batch_tokens=80)
    total = np.zeros(3)
    for step in range(200):
        counts = parts_of(rows(of, step))
        total += counts
        assert sum(counts) == 10 and np.abs(counts - 10 * np.array(shares)).max() < 2
        assert np.abs(total - 10 * (step + 1) * np.array(shares)).max() <= 1


def test_ranges_of_rows_follow_one_another_and_the_shares():
    rng = np.random.default_rng(0)
    for _ in range(300):
        shares = rng.dirichlet(np.full(rng.integers(1, 8), 0.7)).tolist()
        borders = np.unique(rng.integers(0, 10**9, 20))
        borders = np.union1d(borders, borders + 1).tolist()  # single rows, too
        last = list(T.split_rows(0, borders[0], shares))
        assert [rows.start for rows in last] == [0] * len(shares)
        for first, end in zip(borders, borders[1:], strict=False):
            ranges = list(T.split_rows(first, end, shares))
            assert [rows.start for rows in ranges] == [rows.stop for rows in last]
            assert (
                all(rows.start <= rows.stop for rows in ranges)
                and sum(map(len, ranges)) == end - first
            )
            exact = [share * end for share in shares]
            assert np.abs(np.subtract([rows.stop for rows in ranges], exact)).max() <= max(
                1.0, len(shares) / 2
            )
            last = ranges


def test_a_mixture_reads_every_window_of_a_stream_once_an_epoch(mixed):
    of = batches(data_of(mixed, [0.7, 0.2, 0.1]), train_batch_tokens=80)
    for stream, share, number in zip(mixed, (0.7, 0.2, 0.1), range(3), strict=True):
        windows = len(stream) // 8
        found = torch.cat([rows(of, step) for step in range(int(windows / share / 10) + 2)])
        found = found[found[:, 0] // 20 == number]
        assert found[:windows].tolist() == [read_row(stream, row) for row in range(windows)]


def test_the_seed_moves_the_windows_and_not_the_shares(mixed):
    first, second = (batches(data_of(mixed, [0.55, 0.25, 0.2]), seed=seed) for seed in (1, 2))
    for step in range(9):
        one, other = rows(first, step), rows(second, step)
        assert parts_of(one) == parts_of(other) and not torch.equal(one, other)


@pytest.mark.parametrize("world, micro", [(2, 0), (4, 8), (8, 16)])
def test_ranks_share_one_batch_of_a_mixture(mixed, world, micro):
    data = data_of(mixed, [0.55, 0.25, 0.2])
    for step in (0, 3, 11):
        parts = [
            rows(batches(data, rank, world, micro_batch_tokens=micro), step)
            for rank in range(world)
        ]
        # Each rank reads its rows folder by folder, so that only the order in the batch depends on
        # the ranks.
        assert sorted(torch.cat(parts).tolist()) == sorted(rows(batches(data), step).tolist())
