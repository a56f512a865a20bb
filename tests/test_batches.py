"""Training batches: the same tokens whatever the ranks and micro-batches; micro-batches fitted to memory."""

import types

import numpy as np
import pytest
import torch

import train_gpt as T


@pytest.fixture
def stream(tmp_path):
    T.write_shard(tmp_path / "a_train_000000.bin", np.arange(700) % 60)
    T.write_shard(tmp_path / "a_train_000001.bin", np.arange(331) % 59)
    return T.TokenStream([tmp_path / f"a_train_00000{at}.bin" for at in range(2)], 31, 64)


def batches(stream, rank=0, world=1, **changes) -> T.Batches:
    runtime = T.Runtime(rank, world, torch.device("cpu"), False)
    return T.Batches(stream, T.Settings(**{"train_seq_len": 8, "train_batch_tokens": 64, **changes}), runtime)


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


def test_micro_batches_shrink_until_they_fit_and_leave_no_gradient(stream):
    tried = []

    class Scarce(torch.nn.Linear):
        def forward(self, ids, targets):
            tried.append(len(ids))
            if len(ids) > 2:
                raise torch.OutOfMemoryError("pretend")
            return super().forward(ids.float()) * targets

    model = Scarce(8, 8)
    of = batches(stream)
    optimizers = types.SimpleNamespace(zero_grad=model.zero_grad, params=list(model.parameters()))
    T.fit_micro_batch(model, optimizers, of)
    assert tried == [8, 4, 2] and of.micro_rows == 2 and model.weight.grad is None
    with pytest.raises(T.UserError, match="MICRO_BATCH_TOKENS"):
        T.fit_micro_batch(model, optimizers, batches(stream, micro_batch_tokens=64))


@pytest.mark.parametrize("changes, said", [
    (dict(train_batch_tokens=60), "TRAIN_BATCH_TOKENS=60"),
    (dict(train_batch_tokens=1000), "1000 training tokens"),
    (dict(micro_batch_tokens=4), "MICRO_BATCH_TOKENS=4"),
])
def test_batches_that_do_not_fit_are_errors(stream, changes, said):
    with pytest.raises(T.UserError, match=said):
        batches(stream, **changes)


def test_after_the_warm_up_neither_training_nor_evaluation_compiles(stream):
    """What compiles late would do so on the clock: choosing among the averages is the first evaluation of a run."""
    cfg = T.Settings(model_dim=32, num_heads=2, num_kv_heads=1, layer_pattern="s", train_seq_len=8,
                     train_batch_tokens=64, warmup_steps=1)
    of, tokenizer = batches(stream), T.load_tokenizer("bytes")
    net = T.GPT(T.model_config(cfg, tokenizer.vocab_size, tokenizer.bos_id))
    model = torch.compile(net, dynamic=False, fullgraph=True)
    optimizers = T.Optimizers(net, cfg, of.runtime)
    weights = T.QuantizedWeights(net.named_parameters(), {"matrix": (6, 12.85)})
    before = [param.detach().clone() for param in net.parameters()]
    T.fit_micro_batch(model, optimizers, of)
    T.warm_up(model, net, optimizers, weights, of, cfg)
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    assert all(not optimizer.state for optimizer in optimizers.all)
    tokens = np.concatenate([[tokenizer.bos_id], np.arange(100) % 50 + 4])
    with torch.compiler.set_stance("fail_on_recompile"):
        score = T.score_tokens(model, tokens, tokenizer, of.runtime, 8, 8, of.micro_rows)
        with weights.quantized():
            T.forward_backward(model, of, 3)
    assert score.tokens == 100 and score.bytes == 100
