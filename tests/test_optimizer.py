"""Every optimizer against formulas, groups, steps that are not finite, state, splits."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import train_gpt as T
import train_sft
from conftest import refusal

ALONE = T.Runtime(rank=0, world_size=1, device=torch.device("cpu"), distributed=False)
ADAMW = torch.optim.AdamW
KINDS = {
    "muon": T.Muon,
    "lion": T.Lion,
    "adamw": ADAMW,
    "adafactor": torch.optim.Adafactor,
    "adamw8bit": T.AdamW8bit,
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def by_singular_values(G):
    """Return a matrix in float64 whose singular values s went through a s + b s^3 + c s^5."""
    U, S, V = torch.linalg.svd(G.double(), full_matrices=False)
    S = S / (S.square().sum().sqrt() + 1e-7)
    for _ in range(5):
        S = 3.4445 * S - 4.7750 * S**3 + 2.0315 * S**5
    return (U * S) @ V


def group(*params, lr=0.1, weight_decay=0.3, momentum=0.9):
    """Return one parameter group, as a step finds it."""
    lr = torch.tensor(lr, dtype=params[0].dtype)
    return [dict(params=list(params), lr=lr, weight_decay=weight_decay, momentum=momentum)]


def steps(optimizer, params, grads):
    """Take a step for each of `grads`; give each parameter its rows."""
    for grad in grads:
        parts = grad.split([len(param) for param in params])
        for param, part in zip(params, parts, strict=True):
            param.grad = part.clone()
        optimizer.step()
    return torch.cat([param.detach() for param in params])


@pytest.mark.parametrize("shape", [(24, 8), (8, 24)])
def test_muon_and_lion_against_the_formulas_over_50_steps(shape):
    torch.manual_seed(1)
    start = torch.randn(shape, dtype=torch.float64)
    grads = torch.randn(50, *shape, dtype=torch.float64)
    muon, lion = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    steps(T.Muon(group(muon), ALONE), [muon], grads)
    steps(T.Lion(group(lion)), [lion], grads)
    by_muon, by_lion = start, start
    buffer = m = torch.zeros(shape, dtype=torch.float64)
    for grad in grads:
        buffer = 0.9 * buffer + 0.1 * grad
        update = by_singular_values(0.1 * grad + 0.9 * buffer)
        by_muon = 0.97 * by_muon - 0.1 * max(1, shape[0] / shape[1]) ** 0.5 * update
        by_lion = 0.97 * by_lion - 0.1 * torch.sign(0.9 * m + (1 - 0.9) * grad)
        m = 0.99 * m + (1 - 0.99) * grad
    assert (muon - by_muon).abs().max() < 1e-8
    assert (lion - by_lion).abs().max() < 1e-12


def test_shares_of_muons_ranks_add_up_to_its_step():
    """Three matrices of one shape on two ranks, whose sums are made here."""
    grad = torch.randn(24, 8, generator=torch.Generator().manual_seed(0))
    moved = []
    for rank, world_size in ((0, 1), (0, 2), (1, 2)):
        params = [nn.Parameter(torch.zeros(8, 8)) for _ in range(3)]
        runtime = T.Runtime(rank, world_size, torch.device("cpu"), False)
        moved.append(steps(T.Muon(group(*params), runtime), params, [grad]))
    assert torch.allclose(moved[1] + moved[2], moved[0]) and moved[2].any()


def test_splits_are_orthogonalized_by_themselves():
    torch.manual_seed(2)
    whole = nn.Parameter(torch.randn(32, 8))
    whole.splits = (8, 16, 8)
    parts = [nn.Parameter(part.detach().clone()) for part in whole.split([8, 16, 8])]
    grads = torch.randn(3, 32, 8)
    one = steps(T.Muon(group(whole), ALONE), [whole], grads)
    assert (one - steps(T.Muon(group(*parts), ALONE), parts, grads)).abs().max() < 1e-6


def test_adafactor_moves_a_matrix_of_zeros():
    """Its step is a share of the root mean square, taken as 0.02 at least."""
    param = nn.Parameter(torch.zeros(16, 8))
    grad = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    moved = steps(T.OPTIMIZERS["adafactor"]([dict(params=[param], lr=0.1)]), [param], [grad])
    assert moved.square().mean().sqrt().item() == pytest.approx(0.1 * 0.02, rel=0.2)


@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_8_bit_adamw_stays_beside_adamw(beta2, monkeypatch):
    """Of gradients whose columns differ in size by up to 1e4, some of them mostly zero."""
    monkeypatch.setattr(T, "ADAM_BETAS", (0.9, beta2))
    torch.manual_seed(4)
    start = torch.randn(70, 90)  # 6,300 weights: the last block is not whole
    masks = torch.rand(50, 70, 90) < torch.linspace(0.05, 1, 90)
    grads = torch.randn(50, 70, 90) * torch.logspace(-6, -2, 90) * masks
    param, exact = nn.Parameter(start.clone()), nn.Parameter(start.double())
    eight = T.AdamW8bit(group(param, lr=0.01))
    steps(eight, [param], grads)
    steps(ADAMW([exact], 0.01, (0.9, beta2), weight_decay=0.3), [exact], grads.double())
    assert (param - exact).norm() < 0.05 * (exact - start).norm()
    ratio, _ = eight.state[param]["codes"].float() * eight.state[param]["scales"]
    bound = 0.1 / (1 - beta2) ** 0.5 / (1 - 0.9**2 / beta2) ** 0.5  # Cauchy-Schwarz
    assert ratio.abs().max() < bound


def test_row_rmsprop_against_float64():
    """Its rows are read in a tenth of the steps; the last one never."""
    torch.manual_seed(6)
    start = torch.randn(20, 5)
    read = torch.rand(60, 20, 1) < 0.1
    read[:, -1] = False
    grads = torch.randn(60, 20, 5) * torch.logspace(-6, 1, 20)[:, None] * read
    param = nn.Parameter(start.clone())
    steps(T.RowRMSprop(group(param, lr=0.01)), [param], grads)
    sparse = nn.Parameter(start.clone())
    optimizer = T.RowRMSprop(group(sparse, lr=0.01))
    for grad in grads:
        sparse.grad = grad.to_sparse(1)
        optimizer.step()
    torch.testing.assert_close(sparse, param, rtol=1e-6, atol=1e-7)
    exact = start.double()
    mean_square = torch.zeros(20, 1, dtype=torch.float64)
    for count, grad in enumerate(grads.double(), start=1):
        mean_square = 0.99 * mean_square + 0.01 * (grad**2).mean(1, keepdim=True)
        exact -= 0.01 * grad / ((mean_square / (1 - 0.99**count)).sqrt() + 1e-8)
    torch.testing.assert_close(param.double(), exact, rtol=1e-5, atol=1e-6)
    assert torch.equal(param[-1], start[-1]) and not torch.equal(param[0], start[0])


def test_rates_of_rows_have_a_floor():
    """A first step moves by the rate, whatever the gradient; a rate of 0, as in warm_up, moves nothing."""
    param = nn.Parameter(torch.zeros(1, 4))
    for lr, rate in ((0.0, 0.0), (0.001, 0.06), (0.08, 0.08)):
        param.data.zero_()
        group = dict(params=[param], lr=torch.tensor(lr), lr_floor=0.06)
        steps(T.RowRMSprop([group]), [param], torch.ones(1, 1, 4))
        torch.testing.assert_close(param, torch.full((1, 4), -rate), check_dtype=False)


def make():
    """Return a network with parameters of every class, some at zero."""
    torch.manual_seed(5)
    shape = dict(model_dim=32, num_heads=2, num_kv_heads=1, layer_pattern="g s")
    settings = T.Settings(**shape, bigram_vocab_size=32, tie_embeddings=False)
    return T.GPT(T.model_config(settings, 64, 1))


class Training:
    """A network with the optimizers of train_gpt.py."""

    def __init__(self, kind):
        rates = dict(
            matrix_lr=0.003, muon_wd=0.5, tied_embed_lr=0.01, head_lr=0.008, scalar_lr=0.02
        )
        self.kind = kind
        self.network = make()
        settings = T.Settings(optimizer=kind, **rates)
        self.optimizers = T.make_optimizers(self.network, settings, ALONE)
        self.params = dict(self.network.named_parameters())
        self.part = T.OptimizerState(self.optimizers, self.params)

    def step(self, seed, finite=True, fill=None, multiplier=1.0):
        """Take a step on random gradients, or on ones of `fill`."""
        torch.manual_seed(seed)
        for param in self.params.values():
            param.grad = torch.randn_like(param) if fill is None else torch.full_like(param, fill)
        if self.kind == "muon":  # as the forward pass makes them
            table = self.params["ngram_embed"]
            table.grad = table.grad.to_sparse(1)
        T.step_optimizers(self.optimizers, multiplier, torch.tensor(finite))

    def weights(self):
        return [param.detach().clone() for param in self.params.values()]

    def states(self):
        """Return the tensors of all states, in one order."""
        return [value.clone() for one in self.part.state_dict().values() for value in one.values()]


def equal(ones, others):
    pairs = zip(ones, others, strict=True)
    return [torch.equal(a, b) and a.dtype == b.dtype for a, b in pairs]


def owners(optimizers):
    """Return parameter -> (class, learning rate, decay) of its group."""
    return {
        param: (type(optimizer), group["lr"], group["weight_decay"])
        for optimizer in optimizers
        for group in optimizer.param_groups
        for param in group["params"]
    }


@each_kind
def test_every_parameter_is_in_its_group(kind):
    """Fine-tuning has one rate, and decays all but controls."""
    named = KINDS[kind]
    tables = ADAMW if kind == "muon" else named
    training = Training(kind)
    found = owners(training.optimizers)
    settings = train_sft.Settings(optimizer=kind, learning_rate=0.01, weight_decay=0.1)
    trained = train_sft.trained_parameters(training.network, settings)
    tuned = owners(train_sft.make_optimizers(trained, settings, ALONE))
    for name, param in training.params.items():
        expected = (ADAMW, 0.02, 0.0)
        if "w_" in name:
            expected = (named, 0.003, 0.5)
        if "embed" in name:
            expected = (tables, 0.01, 0.0)
        if name == "ngram_embed" and kind == "muon":
            expected = (T.RowRMSprop, 0.3 * 0.01, 0.0)
        if name == "head":
            expected = (tables, 0.008, 0.0)
        assert found[param] == expected
        decays = "w_" in name or "embed" in name or name == "head"
        assert tuned[param][1:] == (0.01, 0.1 if decays else 0.0)
    assert training.optimizers[1].param_groups[-1]["betas"] == (0.9, 0.99)
    # A parameter in no group, and one that is not there.
    for params in ({**training.params, "new": nn.Parameter(torch.ones(3))}, {}):
        with pytest.raises(AssertionError):
            T.OptimizerState(training.optimizers, params)


@pytest.mark.parametrize("fill", [float("nan"), 1.0])
@pytest.mark.parametrize("before", [0, 3])
@each_kind
def test_a_step_that_is_not_finite_moves_no_weight_and_leaves_the_state_finite(kind, fill, before):
    training = Training(kind)
    for seed in range(before):
        training.step(seed)
    weights = training.weights()
    training.step(3, finite=False, fill=fill)
    training.step(4, multiplier=0.0)
    assert all(equal(weights, training.weights()))
    assert training.states() and all(value.isfinite().all() for value in training.states())
    training.step(5, multiplier=0.25)
    assert not any(equal(weights, training.weights()))
    assert all(weight.isfinite().all() for weight in training.weights())
    rates = {round(lr.item(), 6) for _, lr, _ in owners(training.optimizers).values()}
    assert rates == {
        0.25 * 0.003,
        0.25 * 0.01,
        0.25 * 0.008,
        0.25 * 0.02,
    }  # the tables' is the first, too


@each_kind
def test_steps_after_a_saved_state_are_those_of_a_run_without_a_break(kind, tmp_path):
    whole = Training(kind)
    for seed in range(3):
        whole.step(seed)
    parts = {"network": whole.network.state_dict(), "optimizers": whole.part.state_dict()}
    torch.save(parts, tmp_path / "three.pt")
    saved = torch.load(tmp_path / "three.pt", weights_only=True)
    resumed = Training(kind)
    resumed.step(99)  # has weights and a state of its own, which are replaced
    resumed.network.load_state_dict(saved["network"])
    resumed.part.load_state_dict(saved["optimizers"])
    for training in (whole, resumed):
        for seed in range(3, 6):
            training.step(seed)
    assert all(equal(whole.weights(), resumed.weights()))
    assert all(equal(whole.states(), resumed.states()))
    del saved["optimizers"]["head"]
    with pytest.raises(KeyError, match="head"):
        resumed.part.load_state_dict(saved["optimizers"])


def test_large_weights_without_the_name_of_a_matrix_are_warned_of():
    network = nn.Module()
    network.proj = nn.Linear(512, 512, bias=False)
    network.w_proj = nn.Parameter(torch.zeros(512, 512))
    lines = []
    T.warn_of_large_controls(network, lines.append)
    assert len(lines) == 1 and "proj.weight has 262144 weights" in lines[0]


def test_a_parameter_that_the_forward_does_not_use_is_named():
    net = nn.Linear(8, 8)
    net.w_spare = nn.Parameter(torch.zeros(32, 32))
    net.forward = lambda ids, targets: nn.functional.linear(ids, net.weight, net.bias)
    ids = torch.ones(1, 8)
    batches = SimpleNamespace(runtime=ALONE, micro_batches=lambda step: [(ids, ids)])
    batches.settings = T.Settings(train_batch_tokens=8)
    refusal(T.UserError, "parameters w_spare", T.warm_up, net, [], batches, batches.settings)


def test_clipping_bounds_the_global_norm():
    params = list(make().parameters())
    for param in params:
        param.grad = torch.randn_like(param)
    expected = torch.cat([param.grad.flatten() for param in params])
    expected *= 0.1 / expected.norm()
    norm, extra = T.reduce_gradients(
        [param.grad for param in params], ALONE, 0.1, torch.tensor([1.5, 0.0, 3.0])
    )
    assert extra.tolist() == [1.5, 0.0, 3.0] and norm > 100
    clipped = torch.cat([param.grad.flatten() for param in params])
    assert (clipped - expected).abs().max() < 1e-6


def test_what_the_log_keeps_of_a_step_is_not_its_gradients():
    """They are one vector under torchrun, of which all would be kept for a number of it."""
    grads = [torch.ones(1000), torch.ones(10, 10)]
    ranks = SimpleNamespace(distributed=True, sum=lambda total: total.mul_(2))
    norm, extra = T.reduce_gradients(grads, ranks, 0, torch.tensor([1.5, 3.0]))
    assert extra.tolist() == [3.0, 6.0] and norm.item() == pytest.approx(2 * 1100**0.5)
    assert extra.untyped_storage().nbytes() == 8


def gradients_of(network, parts, compile):
    """Return the gradients of micro-batches; the first ones' memory is spoiled before the second."""
    params = [*network.parameters()]
    first = []

    def micro_batches(step):
        yield parts[0]
        if compile != 1:
            for grad in first:
                grad.fill_(math.nan)  # as another run of a CUDA graph may
        yield from parts[1:]

    def keep(param):
        if len(first) < len(params):
            first.append(param.grad)

    settings = T.Settings(train_batch_tokens=180, optimizer="adamw", compile=compile)
    batches = SimpleNamespace(runtime=ALONE, settings=settings, micro_batches=micro_batches)
    hooks = [param.register_post_accumulate_grad_hook(keep) for param in params]
    T.forward_backward(network, batches, 0)
    for hook in hooks:
        hook.remove()
    return torch.cat([param.grad.flatten() for param in params])


def test_gradients_outlive_the_graph_that_made_them():
    """With COMPILE=reduce-overhead the first micro-batch's gradients are memory of a CUDA graph."""
    network = make()
    parts = [(torch.randint(9, (2, 30)), torch.randint(64, (2, 30))) for _ in range(3)]
    found = gradients_of(network, parts, "reduce-overhead")
    assert found.any() and torch.equal(found, gradients_of(network, parts, True))


def test_sparse_gradients_of_tables_are_the_dense_ones():
    """Of a step in two parts, with tokens that several places read; norm and clipping see them, too."""
    torch.manual_seed(7)
    network = make()
    nn.init.normal_(network.ngram_embed)
    nn.init.normal_(network.head)
    parts = [(torch.randint(9, (2, 30)), torch.randint(64, (2, 30))) for _ in range(2)]
    found = {}
    for optimizer in ("muon", "adamw"):
        settings = T.Settings(train_batch_tokens=120, optimizer=optimizer)
        batches = SimpleNamespace(runtime=ALONE, settings=settings)
        batches.micro_batches = lambda step: parts
        loss = T.forward_backward(network, batches, 0)
        is_sparse = network.ngram_embed.grad.is_sparse
        assert is_sparse == (optimizer == "muon")
        norm, _ = T.reduce_gradients(T.gradients(network), ALONE, 0.01, torch.zeros(1))
        table = network.ngram_embed.grad.to_dense()
        assert (table != 0).any(1).sum() < 100
        found[optimizer] = [loss, norm, table, network.w_ngram.grad.clone()]
    torch.testing.assert_close(*found.values())
    assert norm > 0.01


class Recorder:
    """A network that notes which rows of the hashed tables the forward gets."""

    def __init__(self, network):
        self.network = network
        self.found = []

    def __getattr__(self, name):
        return getattr(self.network, name)

    def __call__(self, ids, targets, ngrams):
        self.found.append(ngrams.detach().clone())
        return self.network(ids, targets, ngrams=ngrams)


def test_rows_of_the_tables_are_left_out_of_repeated_text():
    """Whole rows, pairs and triples apart, the others larger; the same ones when a run is resumed."""
    torch.manual_seed(7)
    network = make()
    nn.init.normal_(network.ngram_embed)
    nn.init.normal_(network.head)
    ids, targets = torch.randint(64, (2, 50, 40))
    batches = SimpleNamespace(runtime=ALONE, settings=T.Settings(train_batch_tokens=4000))
    batches.micro_batches = lambda step: [(ids, targets)] * 2
    rows = network.ngrams(network.context(ids)).detach().view(-1, 2, 64)

    def found(step, dropout):
        recorder = Recorder(network)
        T.forward_backward(recorder, batches, step, dropout)
        return [part.view(-1, 2, 64) for part in recorder.found]

    assert all(torch.equal(part, rows) for part in found(3, 0.0))
    share = 0.57
    parts = found(3, share)
    kept = torch.stack([part.abs().amax(-1) > 0 for part in parts])
    for part, is_kept in zip(parts, kept, strict=True):
        torch.testing.assert_close(part, rows * is_kept[..., None] / (1 - share))
    # 8,000 draws: five standard deviations of a share are 0.028, of the product of two 0.025.
    assert kept.float().mean().item() == pytest.approx(1 - share, abs=0.028)
    both = kept.all(-1).float().mean().item()
    assert both == pytest.approx((1 - share) ** 2, abs=0.025)
    assert not torch.equal(*kept)  # the second micro-batch draws others
    assert torch.equal(kept, torch.stack(found(3, share)).abs().amax(-1) > 0)
    assert not torch.equal(kept, torch.stack(found(4, share)).abs().amax(-1) > 0)
    batches.runtime = SimpleNamespace(**{**vars(ALONE), "rank": 1})
    assert not torch.equal(kept, torch.stack(found(3, share)).abs().amax(-1) > 0)


def test_input_tokens_are_replaced_by_others_of_the_windows():
    """BOS neither goes nor comes, and the share is that of places where the other token differs."""
    torch.manual_seed(3)
    ids = torch.randint(5, (40, 500))  # 1 is BOS
    noisy = T.with_noise(ids, 0.3, bos_id=1)
    assert torch.equal(ids == 1, noisy == 1)
    changed = (ids != noisy)[ids != 1].float().mean().item()
    # Four fifths of the others are no BOS, and three fourths of those differ. Five standard deviations.
    assert changed == pytest.approx(0.3 * 0.8 * 0.75, abs=0.016)
    shares = [(noisy == token).float().mean().item() for token in range(5)]
    assert shares == pytest.approx([0.2] * 5, abs=0.02)
    assert torch.equal(T.with_noise(ids, 0.0, bos_id=1), ids)


def test_noise_is_in_the_input_alone_and_the_same_when_a_run_is_resumed():
    """The second micro-batch has other noise; the loss is that of the true targets."""
    network = make()
    nn.init.normal_(network.head)
    ids, targets = torch.randint(2, 64, (2, 5, 40))
    settings = T.Settings(train_batch_tokens=400, token_noise=0.2)
    batches = SimpleNamespace(runtime=ALONE, settings=settings)
    batches.micro_batches = lambda step: [(ids, targets)] * 2
    seen = []

    class Listener(Recorder):
        def __call__(self, ids, targets, ngrams):
            seen.append((ids, targets))
            return super().__call__(ids, targets, ngrams)

    losses = []
    for step in (3, 3, 4):
        losses.append(T.forward_backward(Listener(network), batches, step))
    first, second = seen[:2]
    expected = sum(network(*part).sum() for part in seen[:2]) / 400
    assert losses[0].item() == pytest.approx(expected.item(), rel=1e-5)
    assert all(torch.equal(part[1], targets) for part in seen)
    assert not torch.equal(first[0], second[0])
    assert torch.equal(first[0], seen[2][0]) and torch.equal(second[0], seen[3][0])
    assert not torch.equal(first[0], seen[4][0])
    batches.runtime = SimpleNamespace(**{**vars(ALONE), "rank": 1})
    for step in (3, 4):  # another rank's noise is neither that of rank 0 nor that of its next step
        T.forward_backward(Listener(network), batches, step)
    assert not any(torch.equal(part[0], seen[-4][0]) for part in seen[:6])
    assert not any(torch.equal(part[0], seen[-2][0]) for part in seen[:-2])


def test_passes_over_the_text_are_counted_ahead():
    """40 steps of 512 tokens over 64 windows of 128 are 2.5 passes."""
    settings = T.Settings(train_batch_tokens=512, train_seq_len=128, iterations=40)
    plan = T.Plan(settings)
    for step in range(40):
        plan.begin_phases(step, (step + 1) / 40)
        assert T.planned_passes(settings, plan, step, 64 * 128) == pytest.approx(2.5)


def test_passes_of_a_run_by_the_clock_are_known_from_the_fourth_step_on(monkeypatch):
    """50 steps of 2 s of a clock of 100 s are 3.125 passes; 6.25 and 9.375 were said in steps 2 and 3."""
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(T, "time", SimpleNamespace(perf_counter=lambda: now.seconds))
    limits = dict(max_wallclock_seconds=110.0, reserve_seconds=10.0)
    settings = T.Settings(train_batch_tokens=512, train_seq_len=128, **limits)
    plan = T.Plan(settings)
    clock = T.Clock(settings, ALONE)
    clock.start()
    found = []
    for step in range(50):
        plan.begin_phases(step, clock.progress(step))
        found.append(T.planned_passes(settings, plan, step, 64 * 128))
        now.seconds += 2.0
        clock.previous_report()
        clock.send_report(*torch.zeros(3))
    assert found == pytest.approx([0.0] * 3 + [3.125] * 47)


def test_more_rows_are_left_out_the_more_often_a_text_is_read():
    """Shares near the best that were tried; none where a row stands for very many tokens."""
    shares = {0: 0, 0.4: 0.01, 1.0: 0.18, 1.2: 0.29, 1.43: 0.42, 3.1: 0.72, 1e9: 0.75}
    for passes, share in shares.items():
        assert T.table_dropout(passes, 77) == share
        assert T.table_dropout(passes, 4000) == pytest.approx(share / 2, abs=0.01)
    assert T.table_dropout(0.9, 800_000) == 0  # configs/golf_8gpu.env
