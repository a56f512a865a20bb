"""Training batches: a pseudo-random order of windows, the same tokens whatever the ranks and micro-batches."""

import types

import numpy as np
import pytest
import torch
from test_data import write_shard

import train_gpt as T
from conftest import refusal


def make_stream(folder, name, tokens):
    """Return a stream of two shards."""
    for at, part in enumerate(np.array_split(tokens, [500])):
        write_shard(folder / f"{name}_train_{at:06d}.bin", part)
    return T.TokenStream(sorted(folder.glob(f"{name}_train_*.bin")), 1 << 16)


@pytest.fixture
def stream(tmp_path):
    """Return 125 windows of 8 in 1003 tokens: three are left over."""
    return make_stream(tmp_path, "a", np.arange(1003))


def data_of(streams, shares, windows=None):
    """Return the parts of a Dataset that batches need; by default nothing is held out."""
    windows = windows or [np.arange(len(stream) // 8) for stream in streams]
    tokenizer = types.SimpleNamespace(bos_id=1)
    return types.SimpleNamespace(
        streams=streams, windows=windows, shares=shares, tokenizer=tokenizer
    )


def batches(data, rank=0, world=1, **changes):
    runtime = T.Runtime(rank, world, torch.device("cpu"), False)
    data = data if isinstance(data, types.SimpleNamespace) else data_of([data], [1.0])
    changes = {"train_seq_len": 8, "train_batch_tokens": 64, **changes}
    return T.Batches(data, T.Settings(**changes), runtime)


def rows(of, step):
    """Return all windows of a step with their last target, (rows, seq_len + 1)."""
    parts = []
    for ids, targets in of.micro_batches(step):
        assert torch.equal(targets[:, :-1], ids[:, 1:])
        parts.append(torch.cat([ids, targets[:, -1:]], dim=1))
    return torch.cat(parts)


def read_row(stream, row, seed=1337):
    """Return the window of a training row, with its last target."""
    epoch, index = divmod(row, len(stream) // 8)
    number = np.random.default_rng((seed, epoch)).permutation(len(stream) // 8)[index]
    return stream.read(int(number) * 8, 9).tolist()


def test_an_epoch_of_steps_reads_every_window_once(stream):
    of = batches(stream, train_batch_tokens=200)
    orders = set()
    for epoch in range(4):  # 5 steps of 25 windows each
        found = torch.cat([rows(of, epoch * 5 + step) for step in range(5)])
        assert sorted(found[:, :-1].flatten().tolist()) == list(range(1000))
        orders.add(tuple(found[:, 0].tolist()))
    assert len(orders) == 4


def test_held_out_windows_are_from_all_over_and_never_read(tmp_path, monkeypatch):
    stream = make_stream(tmp_path, "a", np.arange(5003))
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
    monkeypatch.setattr(T, "HOLDOUT_TOKENS", 5000)  # at most a twentieth
    assert len(T.split_windows(stream, 1.0, settings)[1]) == 625 // 20


NO_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
]


@pytest.mark.parametrize("error", NO_MEMORY, ids=["torch", "cublas", "cudnn"])
def test_micro_batches_shrink_until_they_fit_and_gradients_are_of_one_step(
    stream, error, monkeypatch
):
    compilers = []
    monkeypatch.setattr(T.torch.compiler, "reset", lambda: compilers.append(len(tried)))
    tried = []
    taken = []

    class Scarce(torch.nn.Linear):
        def forward(self, ids, targets):
            tried.append(len(ids))
            if len(ids) > 2:
                raise error
            return super().forward(ids.float()) * targets

    class Optimizer(torch.optim.SGD):
        def step(self):
            taken.append(model.bias.grad.tolist())

    model = Scarce(8, 8)
    for param in model.parameters():
        param.grad = torch.full_like(param, 7.0)
    optimizers = [Optimizer(model.parameters())]
    of = batches(stream)
    T.warm_up(model, optimizers, of, T.Settings(grad_clip_norm=0.0))
    assert tried == [8, 4] + [2] * 9 and of.micro_batch_size == 2  # 2 steps of 4, evaluation
    assert compilers == [1, 2]
    means = [rows(of, step)[:, 1:].sum(0) / 64 for step in range(2)]  # of a step alone
    assert taken == [pytest.approx(mean.tolist()) for mean in means]
    of = batches(stream, micro_batch_tokens=64)
    line = "^MICRO_BATCH_TOKENS=64: out of memory with 8 windows"
    refusal(T.UserError, line, T.warm_up, model, optimizers, of, of.settings)


def test_other_errors_of_the_warm_up_are_raised(stream):
    class Faulty(torch.nn.Linear):
        def forward(self, ids, targets):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        T.warm_up(Faulty(1, 1), [], batches(stream), T.Settings())


SIZES = [(1, 1), (15, 1), (16, 2), (24, 2), (32, 4), (1 << 40, 8)]


@pytest.mark.parametrize(("tokens", "windows"), SIZES)
def test_a_micro_batch_is_a_window_at_least_and_divides_the_step(stream, tokens, windows):
    assert batches(stream, micro_batch_tokens=tokens).micro_batch_size == windows


@pytest.mark.full
def test_after_the_warm_up_neither_training_nor_evaluation_compiles(tmp_path):
    """What compiles late would do so on the clock: choosing among averages is a run's first evaluation."""
    shape = dict(model_dim=32, num_heads=2, num_kv_heads=1, layer_pattern="s", train_seq_len=8)
    cfg = T.Settings(**shape, train_batch_tokens=64)
    tokens = 1 + np.arange(1003) % 60
    of = batches(make_stream(tmp_path, "a", tokens))
    net = T.GPT(T.model_config(cfg, 64, 1))
    model = torch.compile(net, dynamic=False, fullgraph=True)
    optimizers = T.make_optimizers(net, cfg, of.runtime)
    before = [param.detach().clone() for param in net.parameters()]
    T.warm_up(model, optimizers, of, cfg)
    assert all(map(torch.equal, before, net.parameters()))
    assert not any(optimizer.state for optimizer in optimizers)
    with torch.compiler.set_stance("fail_on_recompile"):
        scorer = T.Scorer(1, of.runtime, 8, of.micro_batch_size)
        scorer.score(model, T.EvalText(tokens[:100], 100))
        with T.quantized(net, {"matrix": {"bits": 6, "clip_sigmas": 12.85}}):
            T.forward_backward(model, of, 3)


# ---------------------------------------------------------------------------------------- mixtures
@pytest.fixture
def mixed(tmp_path):
    """Return three streams that are told apart by their tokens: 0..19, 20..39, 40..59."""
    sizes = {"a": 4000, "b": 900, "c": 700}
    return [
        make_stream(tmp_path, name, 20 * at + np.arange(size) % 20)
        for at, (name, size) in enumerate(sizes.items())
    ]


def parts_of(windows):
    """Return the numbers of rows of the three streams; no window mixes two."""
    part = windows // 20
    assert torch.equal(part, part[:, :1].expand_as(part))
    return torch.bincount(part[:, 0], minlength=3).tolist()


SHARES = [[0.7, 0.2, 0.1], [0.97, 0.02, 0.01], [1 / 3, 1 / 3, 1 / 3]]


@pytest.mark.parametrize("shares", SHARES)
def test_a_mixture_has_its_shares_after_every_step_and_reads_every_window_once(mixed, shares):
    """Whatever the seed, which moves the windows alone."""
    data = data_of(mixed, shares)
    total = np.zeros(3)
    found = []
    for step in range(200):
        found.append(rows(batches(data, train_batch_tokens=80), step))
        counts = parts_of(found[-1])
        other = rows(batches(data, train_batch_tokens=80, seed=1), step)
        assert parts_of(other) == counts and not torch.equal(found[-1], other)
        total += counts
        assert sum(counts) == 10 and np.abs(counts - 10 * np.array(shares)).max() < 2
        assert np.abs(total - 10 * (step + 1) * np.array(shares)).max() <= 1
    found = torch.cat(found)
    for number, stream in enumerate(mixed):
        own = found[found[:, 0] // 20 == number][:600].tolist()
        assert own == [read_row(stream, row) for row in range(len(own))]


@pytest.mark.parametrize(("world", "micro"), [(2, 0), (4, 8), (8, 16)])
def test_ranks_and_micro_batches_share_one_batch(mixed, world, micro):
    """Each rank reads its rows folder by folder, so that only the order in the batch depends on the ranks."""
    for data, ordered in ((data_of(mixed, [0.55, 0.25, 0.2]), sorted), (mixed[0], list)):
        for step in (0, 3, 11):
            ranks = [batches(data, rank, world, micro_batch_tokens=micro) for rank in range(world)]
            found = torch.cat([rows(of, step) for of in ranks]).tolist()
            assert ordered(found) == ordered(rows(batches(data), step).tolist())
