"""Gated DeltaNet: the chunk form and the decoding step against the float64 recurrence."""

import pytest
import torch
import torch.nn.functional as F
from reference import gdn_recurrent

import sample as S
import train_gpt as gdn

NAMES = ("o", "last state", "q", "k", "v", "g", "beta", "state")


def make_inputs(kind="random", dtype=torch.float64, b=2, t=100, h=2, dim_k=16, dim_v=24, seed=0):
    """Return q, k, v, g, beta and an initial state of one of the kinds of the numerical notes."""
    rng = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=rng)

    q, k, v, state = (
        randn(b, t, h, dim_k),
        randn(b, t, h, dim_k),
        randn(b, t, h, dim_v),
        randn(b, h, dim_k, dim_v),
    )
    g = -torch.rand(b, t, h, dtype=torch.float64, generator=rng)
    beta = torch.sigmoid(randn(b, t, h))
    if kind.startswith("correlated"):  # keys after SiLU are mostly positive; weak decay
        q, k, g = F.silu(q + 0.5), F.silu(k + 0.5), 0.05 * g
        beta = torch.sigmoid(2 + randn(b, t, h))  # strong writes
    if kind == "correlated beta 2":
        beta = 2 * beta
    if kind == "strong decay":
        g = 30 * g
    if kind == "constant decay":
        g = torch.full_like(g, -30.0)
    if kind == "short documents":  # their decays keep digits after 20 resets before them
        g[:, ::3] = -60.0
    if kind == "identical keys":
        k, g, beta = k[:, :1].expand_as(k), 0 * g, 1.98 + 0.02 * beta
    q, k = F.normalize(q, dim=-1) * dim_k**-0.5, F.normalize(k, dim=-1)
    return [x.to(dtype) for x in (q, k, v, g, beta, state)]


def run(rule, inputs, **options):
    """Return [o, last state, gradients of all inputs] under a fixed weighting of both outputs."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = rule(*leaves, **options)
    rng = torch.Generator().manual_seed(1)
    weights = [torch.randn(y.shape, dtype=torch.float64, generator=rng) for y in outputs]
    sum((y.double() * weight).sum() for y, weight in zip(outputs, weights, strict=True)).backward()
    return [*(y.detach() for y in outputs), *(x.grad for x in leaves)]


def assert_close(got, want, tolerance):
    """max|a - b| / max(max|b|, 1e-3), of each of NAMES; a NaN counts as bad."""
    bad = {}
    for name, a, b in zip(NAMES, got, want, strict=False):
        error = (a.double() - b).abs().max() / b.double().abs().max().clamp(min=1e-3)
        if not error <= tolerance:
            bad[name] = error.item()
    assert not bad, f"relative error above {tolerance:g}: {bad}"


def oracle(inputs):
    return run(gdn_recurrent, [x.double() for x in inputs])


def test_closed_forms_of_the_recurrence():
    """With beta = 1 and g = 0 orthonormal keys are a dictionary; writing under a key again replaces its value."""
    v = torch.arange(24, dtype=torch.float64).sin().view(1, 8, 1, 3)
    k = torch.eye(4, dtype=torch.float64).repeat(2, 1)[None, :, None]  # each key twice
    zero, one = torch.zeros(1, 8, 1, dtype=torch.float64), torch.ones(1, 8, 1, dtype=torch.float64)
    o, last = gdn_recurrent(k, k, v, zero, one)
    torch.testing.assert_close(o, v, rtol=0, atol=1e-14)
    torch.testing.assert_close(last[0, 0], v[0, 4:, 0], rtol=0, atol=1e-14)
    # beta = 0 writes nothing: a state of ones decays by exp(sum g).
    state = torch.ones(1, 1, 4, 3, dtype=torch.float64)
    _, last = gdn_recurrent(k, k, v, zero - 0.25, zero, state)
    torch.testing.assert_close(last, state * zero.sum().sub(2).exp(), rtol=1e-14, atol=0)


KINDS = dict.fromkeys(("random", "correlated", "correlated beta 2", "strong decay"), 1e-5)
KINDS |= {"constant decay": 2e-6, "short documents": 2e-6, "identical keys": 3e-4}


@pytest.mark.parametrize("chunk", [16, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_chunk_against_oracle(kind, chunk):
    """Output, final state and all gradients, with an initial state and a length that is no multiple of the chunk."""
    exact = make_inputs(kind, t=150)
    assert_close(run(gdn.gdn_chunk, exact, chunk=chunk), oracle(exact), 1e-10)
    single = make_inputs(kind, torch.float32, t=150, dim_k=32, dim_v=32)
    assert_close(run(gdn.gdn_chunk, single, chunk=chunk), oracle(single), KINDS[kind])


@pytest.mark.parametrize(
    ("t", "chunk"), [(1, 32), (15, 32), (32, 32), (33, 32), (64, 32), (9, 1), (100, 200)]
)
def test_lengths_and_no_state(t, chunk):
    """Shorter than a chunk, exact multiples, one more; without an initial state."""
    inputs = make_inputs("correlated beta 2", t=t)[:5]
    assert_close(run(gdn.gdn_chunk, inputs, chunk=chunk), oracle(inputs), 1e-10)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_document_resets(dtype, tolerance):
    """g = -60 at a first token equals starting from nothing; nothing reaches what stands before it."""
    starts = [0, 37, 41, 96, 120]
    inputs = make_inputs("correlated", dtype, t=120)
    whole = [x.clone() for x in inputs]
    whole[3][:, starts[:-1]] = -60.0
    got = run(gdn.gdn_chunk, whole)

    def apart(*leaves):
        outputs = []
        for begin, end in zip(starts, starts[1:], strict=False):
            o, last = gdn_recurrent(*(x[:, begin:end] for x in leaves[:5]))
            outputs.append(o)
        return torch.cat(outputs, 1), last

    want = run(apart, [x.double() for x in inputs[:5]])
    want[5][:, starts[:-1]] = 0  # a first token's g does nothing to an empty state
    assert_close(got, want, tolerance)
    assert got[7].abs().max() < 1e-20


def test_a_state_is_carried_over_chunks_and_single_steps():
    """Two calls that hand the state on equal one call, through the gradients too; then token by token."""
    inputs = make_inputs("correlated beta 2", t=83)

    def in_parts(*leaves):
        *tokens, state = leaves
        o_1, state = gdn.gdn_chunk(*(x[:, :45] for x in tokens), state)
        o_2, state = gdn.gdn_chunk(*(x[:, 45:60] for x in tokens), state)
        outs = [o_1, o_2]
        for t in range(60, 83):
            o, state = S.gdn_step(*(x[:, t] for x in tokens), state)
            outs.append(o[:, None])
        return torch.cat(outs, 1), state

    assert_close(run(in_parts, inputs), oracle(inputs), 1e-10)


def test_gradients_are_finite_differences():
    """Of the scan, second ones too; of several chunks, the last of which is not full."""
    torch.manual_seed(0)
    shapes = ((5, 3, 4, 4), (5, 3, 4, 6), (3, 4, 6))
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    factors, terms, state = inputs
    expected = [state]
    for factor, term in zip(factors, terms, strict=True):
        expected.append(factor @ expected[-1] + term)
    torch.testing.assert_close(gdn.gdn_scan(*inputs), torch.stack(expected), rtol=0, atol=1e-11)
    assert torch.autograd.gradgradcheck(gdn.gdn_scan, inputs)
    inputs = [x.requires_grad_() for x in make_inputs(b=1, t=9, h=1, dim_k=3, dim_v=2)]
    assert torch.autograd.gradcheck(lambda *x: gdn.gdn_chunk(*x, chunk=4), inputs)
    # The chunk form has no second derivative: it refuses to give a wrong one.
    output, _ = gdn.gdn_chunk(*inputs, chunk=4)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(output.sum(), inputs, create_graph=True)
