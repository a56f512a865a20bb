"""Gated DeltaNet: the chunk form and the decoding step against the float64
recurrence.
"""

import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from reference import gdn_recurrent

import sample as S
import train_gpt as gdn

NAMES = ("o", "last state", "q", "k", "v", "g", "beta", "state")


pytestmark = pytest.mark.usefixtures("one_thread")


def make_inputs(kind, dtype, b=2, t=100, h=2, dim_k=16, dim_v=24, seed=0):
    """q, k, v, g, beta and an initial state of one of the kinds of the numerical notes."""
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
    if kind.startswith(
        "correlated"
    ):  # keys after SiLU are mostly positive; weak decay; strong writes
        q, k, g, beta = (
            F.silu(q + 0.5),
            F.silu(k + 0.5),
            0.05 * g,
            torch.sigmoid(2 + randn(b, t, h)),
        )
    if kind in ("correlated beta 2", "negative eigenvalues"):
        beta = 2 * beta
    if kind == "strong decay":
        g = 30 * g
    if kind == "no decay":
        g = 0 * g
    if kind == "identical keys":
        k, g, beta = k[:, :1].expand_as(k), 0 * g, 1.98 + 0.02 * beta
    q, k = F.normalize(q, dim=-1) * dim_k**-0.5, F.normalize(k, dim=-1)
    return [x.to(dtype) for x in (q, k, v, g, beta, state)]


def run(rule, inputs, **options):
    """[o, last state, gradients of all inputs] under a fixed random weighting of both outputs."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    o, last = rule(*leaves, **options)
    rng = torch.Generator().manual_seed(1)
    loss = sum(
        (y.double() * torch.randn(y.shape, dtype=torch.float64, generator=rng)).sum()
        for y in (o, last)
    )
    loss.backward()
    return [o.detach(), last.detach(), *(x.grad for x in leaves)]


def errors(got, want):
    """max|a - b| / max(max|b|, 1e-3) by name."""
    pairs = zip(NAMES, got, want, strict=False)
    return {
        n: ((a.double() - b).abs().max() / b.double().abs().max().clamp(min=1e-3)).item()
        for n, a, b in pairs
    }


def assert_close(got, want, tolerance):
    bad = {
        name: f"{e:.1e}" for name, e in errors(got, want).items() if not e <= tolerance
    }  # NaN counts as bad
    assert not bad, f"relative error above {tolerance:g}: {bad}"


def oracle(inputs):
    return run(gdn_recurrent, [x.double() for x in inputs])


@pytest.mark.parametrize("form", [gdn_recurrent, gdn.gdn_chunk])
def test_closed_forms(form):
    """With beta = 1 and g = 0 orthonormal keys are a dictionary, and writing under a key again
    replaces its value.
    """
    eye, v = (
        torch.eye(4, dtype=torch.float64),
        torch.arange(24, dtype=torch.float64).sin().view(1, 8, 1, 3),
    )
    k = torch.cat((eye, eye))[None, :, None]  # each key twice: tokens 0-3, then 4-7
    zero, one = torch.zeros(1, 8, 1, dtype=torch.float64), torch.ones(1, 8, 1, dtype=torch.float64)
    o, last = form(k, k, v, zero, one)
    torch.testing.assert_close(o, v, rtol=0, atol=1e-14)
    torch.testing.assert_close(last[0, 0], v[0, 4:, 0], rtol=0, atol=1e-14)
    # beta = 0 writes nothing: a state of ones decays by exp(sum g).
    state = torch.ones(1, 1, 4, 3, dtype=torch.float64)
    _, last = form(k, k, v, zero - 0.25, zero, state)
    torch.testing.assert_close(last, state * np.exp(-2.0), rtol=1e-14, atol=0)


FLOAT32 = [
    ("random", 1e-5),
    ("negative eigenvalues", 1e-5),
    ("correlated", 1e-5),
    ("correlated beta 2", 1e-5),
    ("no decay", 1e-5),
    ("strong decay", 1e-5),
    ("identical keys", 3e-4),
]


@pytest.mark.parametrize("chunk", [16, 64])
@pytest.mark.parametrize("kind,tolerance", FLOAT32)
def test_chunk_against_oracle(kind, tolerance, chunk):
    """Output, final state and all gradients, with an initial state and a length that is no multiple
    of the chunk.
    """
    exact = make_inputs(kind, torch.float64, t=150)
    assert_close(run(gdn.gdn_chunk, exact, chunk=chunk), oracle(exact), 1e-10)
    single = make_inputs(kind, torch.float32, t=150, dim_k=32, dim_v=32)
    assert_close(run(gdn.gdn_chunk, single, chunk=chunk), oracle(single), tolerance)


@pytest.mark.parametrize("t", [1, 15, 32, 33, 64])
def test_lengths_and_no_state(t):
    """Shorter than a chunk, exact multiples, one more; without an initial state, and with only o in
    the loss.
    """
    inputs = make_inputs("random", torch.float64, t=t)
    assert_close(run(gdn.gdn_chunk, inputs), oracle(inputs), 1e-10)
    leaves = [[x.clone().requires_grad_() for x in inputs[:5]] for _ in range(2)]
    for rule, xs in zip((gdn.gdn_chunk, gdn_recurrent), leaves, strict=True):
        rule(*xs)[0].square().sum().backward()
    for a, b in zip(*leaves, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-12)


def test_gradients_against_finite_differences():
    inputs = [
        x.requires_grad_()
        for x in make_inputs("random", torch.float64, b=1, t=19, h=1, dim_k=3, dim_v=2)
    ]
    assert torch.autograd.gradcheck(
        lambda *x: gdn.gdn_chunk(*x, chunk=16), inputs, atol=1e-7, rtol=1e-6
    )


@pytest.mark.parametrize("decay", [-12.0, -30.0])
def test_constant_strong_decay(decay):
    """Differences of up to 30 * 64 nats in a chunk stay finite, and the gradient of g, e^decay of
    the others, is right.

    Terms of that gradient that cancel only up to rounding would be seen here (6e-5 to 6e-4).
    """
    inputs = make_inputs("random", torch.float32, t=64)
    inputs[3] = torch.full_like(inputs[3], decay)
    assert_close(run(gdn.gdn_chunk, inputs, chunk=64), oracle(inputs), 2e-6)


def test_many_resets_in_one_chunk():
    """Documents of 3 tokens: decays inside the last ones keep their digits after 20 resets of -60
    before them.
    """
    inputs = make_inputs("correlated", torch.float32, t=64)
    inputs[3][:, ::3] = -60.0
    assert_close(run(gdn.gdn_chunk, inputs, chunk=64), oracle(inputs), 2e-6)


@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_document_resets(dtype, tolerance):
    """g = -60 at a first token equals starting from nothing: outputs, and gradients that do not
    cross the boundary.
    """
    starts, t = [0, 37, 41, 96], 120
    inputs = make_inputs("correlated", dtype, t=t)
    whole = [x.clone() for x in inputs]
    whole[3][:, starts] = -60.0
    got = run(gdn.gdn_chunk, whole)
    rng = torch.Generator().manual_seed(1)
    weight = torch.randn(2, t, 2, 24, dtype=torch.float64, generator=rng)  # the same as in `run`
    weight_last = torch.randn(2, 2, 16, 24, dtype=torch.float64, generator=rng)
    pieces = []
    for begin, end in zip(starts, [*starts[1:], t], strict=True):
        leaves = [x[:, begin:end].double().requires_grad_() for x in inputs[:5]]
        o, last = gdn_recurrent(*leaves)
        loss = (o * weight[:, begin:end]).sum() + ((last * weight_last).sum() if end == t else 0)
        loss.backward()
        leaves[3].grad[:, 0] = 0  # the first token's g does nothing to an empty state
        pieces.append([o.detach(), *(x.grad for x in leaves)])
    want = [torch.cat(parts, 1) for parts in zip(*pieces, strict=True)]
    assert_close([got[0], last.detach(), *got[2:7]], [want[0], last.detach(), *want[1:]], tolerance)
    assert_close([got[1]], [last.detach()], tolerance)
    assert got[7].abs().max() < 1e-20  # nothing reaches the state before the first token


def test_prefill_then_steps():
    inputs = make_inputs("negative eigenvalues", torch.float64, t=83)
    *tokens, state = inputs
    want, want_last = gdn_recurrent(*inputs)
    o, state = gdn.gdn_chunk(*(x[:, :50] for x in tokens), state)
    outs = [o]
    for t in range(50, 83):
        o, state = S.gdn_step(*(x[:, t] for x in tokens), state)
        outs.append(o[:, None])
    assert_close([torch.cat(outs, 1), state], [want, want_last], 1e-12)


def test_state_carried_over_segments():
    """Two calls that hand the state on equal one call, through the gradients too (float32)."""
    inputs = make_inputs("correlated", torch.float32)

    def in_two(*x):
        *tokens, state = x
        o_1, state = gdn.gdn_chunk(*(y[:, :45] for y in tokens), state)
        o_2, state = gdn.gdn_chunk(*(y[:, 45:] for y in tokens), state)
        return torch.cat((o_1, o_2), 1), state

    assert_close(run(in_two, inputs), oracle(inputs), 1e-5)


@pytest.mark.parametrize("kind,tolerance", [("random", 1.5e-2), ("correlated", 2e-2)])
def test_bfloat16(kind, tolerance):
    """bfloat16 q, k, v with float32 g, beta and state: output bfloat16, state float32."""
    inputs = make_inputs(kind, torch.float32, t=150, dim_k=32, dim_v=32)
    inputs[:3] = [x.bfloat16() for x in inputs[:3]]
    got = run(gdn.gdn_chunk, inputs)
    assert [x.dtype for x in got] == [torch.bfloat16, torch.float32] + [torch.bfloat16] * 3 + [
        torch.float32
    ] * 3
    assert_close(got, oracle(inputs), tolerance)


def test_the_scan_and_its_gradients():
    """Against a loop, and first and second derivatives against finite differences."""
    torch.manual_seed(0)
    shapes = ((5, 3, 4, 4), (5, 3, 4, 6), (3, 4, 6))
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    factors, terms, state = inputs
    expected = [state]
    for factor, term in zip(factors, terms, strict=True):
        expected.append(factor @ expected[-1] + term)
    torch.testing.assert_close(gdn.gdn_scan(*inputs), torch.stack(expected), rtol=0, atol=1e-11)
    assert torch.autograd.gradcheck(gdn.gdn_scan, inputs)
    assert torch.autograd.gradgradcheck(gdn.gdn_scan, inputs)


def test_the_gradient_of_the_chunk_form():
    """Against finite differences; several chunks, of which the last is not full."""
    inputs = make_inputs("random", torch.float64, b=1, t=9, h=1, dim_k=3, dim_v=2)
    for x in inputs:
        x.requires_grad_()
    assert torch.autograd.gradcheck(lambda *x: gdn.gdn_chunk(*x, chunk=4), inputs)
    # The form has no second derivative: it refuses to give a wrong one.
    output, _ = gdn.gdn_chunk(*inputs, chunk=4)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(output.sum(), inputs, create_graph=True)


@pytest.mark.parametrize(
    "backend,dtype",
    [
        ("aot_eager", torch.bfloat16),
        pytest.param("inductor", torch.float32, marks=pytest.mark.full),
    ],
)
def test_compiled_equals_eager(backend, dtype):
    """One graph, values and gradients of the eager form, and no recompilation once it is warm."""
    if backend == "inductor" and not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip("torch.compile needs a C++ compiler on CPU")
    torch._dynamo.reset()
    compiled = torch.compile(gdn.gdn_chunk, fullgraph=True, backend=backend)
    kept = (torch.float32,) * 3  # g, beta, state
    for seed in range(3):
        inputs = make_inputs("correlated", torch.float32, seed=seed)
        inputs = [x.to(d) for x, d in zip(inputs, (dtype,) * 3 + kept, strict=True)]
        with torch.compiler.set_stance("default" if seed == 0 else "fail_on_recompile"):
            got = run(compiled, inputs)
        want = run(gdn.gdn_chunk, inputs)
        assert_close(got, [x.double() for x in want], 1e-6 if backend == "inductor" else 0.0)
    torch._dynamo.reset()


@pytest.mark.parametrize("chunk", [1, 24, 200])
def test_any_chunk(chunk):
    """Of one token, no power of two, longer than the text."""
    inputs = make_inputs("correlated beta 2", torch.float64)
    assert_close(run(gdn.gdn_chunk, inputs, chunk=chunk), oracle(inputs), 1e-10)
