"""Generation: steps with a cache against whole forward passes, ragged batches, the sampler."""

import dataclasses
import gc
import math
import weakref
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import sample as S
import train_gpt as T

BOS, VOCAB, LAST_UNIFORM = 1, 48, 1 - 2**-53
BASE = T.Settings(
    layer_pattern="g s a",
    model_dim=32,
    num_heads=4,
    num_kv_heads=2,
    mlp_mult=2.0,
    attn_window=5,
    qk_gain_init=1.5,
    train_seq_len=96,
)
CHOICES = {
    "g": dict(layer_pattern="g"),
    "s": dict(layer_pattern="s"),
    "a": dict(layer_pattern="a"),
    "whole layers shared": dict(layer_pattern="A1 A1"),
    "mixer shared": dict(layer_pattern="s1 g s1"),
    "GDN shared": dict(layer_pattern="G1 G1 a"),
    "learned": dict(layer_pattern="g s a", positions="learned"),
    "bigram": dict(layer_pattern="s", bigram_vocab_size=50),
    "bio": dict(layer_pattern="g a", mlp="bio_soft"),
    "part of a head turned": dict(layer_pattern="a", rope_dims=4),
    "layer norm": dict(layer_pattern="s", norm="layer"),
    "light gdn": dict(layer_pattern="g", gdn_light=True),
}
TINY = dict(model_dim=32, num_heads=4, num_kv_heads=2, attn_window=5, train_seq_len=96)
MIXED = dict(layer_pattern="g s a g", bigram_vocab_size=50)


def settings_of(choice):
    if choice not in T.ARCH_PRESETS:
        return dataclasses.replace(BASE, **CHOICES[choice])
    preset = T.ARCH_PRESETS[choice].items()
    preset = {name: value for name, value in preset if hasattr(T.Settings, name)}
    words = preset.get("layer_pattern", T.Settings.layer_pattern).split()
    # Each kind once; those that share weights meet themselves again.
    layers = [*dict.fromkeys(words), *(word for word in words[-1:] if word[1:])]
    more = {"arch_mode": choice, "layer_pattern": " ".join(layers), "num_layers": 5}
    return dataclasses.replace(T.Settings(), **{**preset, **TINY, **more})


def network(settings, dtype=torch.float64, vocab=VOCAB):
    """A network none of whose parameters is at a special value, so that every path counts."""
    torch.manual_seed(1)
    net = S.GPT(T.model_config(settings, vocab, BOS, embed_init_std=0.1)).to(dtype)
    with torch.no_grad():
        for param in net.parameters():
            param.add_((0.15 if param.ndim == 2 else 0.05) * torch.randn_like(param))
    return net.requires_grad_(False)


def mixed(dtype=torch.float64, **changes):
    return network(dataclasses.replace(BASE, **{**MIXED, **changes}), dtype)


def texts(seed, rows, length):
    """ids (rows, length), BOS at the beginning and, at places of each row's own, inside."""
    rng = np.random.default_rng(seed)
    ids = torch.from_numpy(rng.integers(2, VOCAB, (rows, length)))
    ids[torch.from_numpy(rng.random((rows, length)) < 0.04)] = BOS
    ids[:, 0] = BOS
    return ids


def prompts_of(seed, *lengths):
    return [texts(seed + at, 1, length)[0].tolist() for at, length in enumerate(lengths)]


def generate(net, prompts, count=3, most=12, way=(1.0, 0, 1.0), seeds=None, stop=()):
    """S.generate; a prompt's seed is (7, its ids' sum, its length) without `seeds`."""
    seeds = seeds or [(7, sum(prompt), len(prompt)) for prompt in prompts]
    temperature, top_k, top_p = way
    truncate = S.truncation(SimpleNamespace(top_k=top_k, top_p=top_p))
    return S.generate(net, prompts, count, most, temperature, seeds, frozenset(stop), truncate)


def same(found, wanted):
    """Tokens and ends are equal, log-probabilities up to the last digits of float32."""
    assert [one.ids for one in found] == [one.ids for one in wanted]
    assert [one.finished for one in found] == [one.finished for one in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert one.logps == pytest.approx(other.logps, abs=1e-6)


# ------------------------------------------------------------------------------------------- caches
def logits_of(net, texts):
    """Return the logits of texts, each of which is one document, whatever its tokens are."""
    ids = torch.tensor(texts)
    return net.logits(net.features(ids, doc=torch.zeros_like(ids)))


def logits_alone(net, prompts, more):
    """Return logits (R, T, V) of whole forward passes, from the prompts' last tokens on."""
    texts = [[*prompt, *row.tolist()] for prompt, row in zip(prompts, more, strict=True)]
    return torch.cat([logits_of(net, [ids])[:, -more.size(1) - 1 :] for ids in texts])


def check_steps(net, prompts, more, moves, tolerance, compiled=False):
    """Check each step's logits against those of whole passes; moves: step -> rows that stay."""
    alone = logits_alone(net, prompts, more)
    assert alone.std(-1).min() > 0.1  # not a network that says the same of everything
    decoder = S.Decoder(net, prompts, compiled)
    order = torch.arange(len(prompts))
    torch.testing.assert_close(decoder.logits, alone[:, 0], rtol=0, atol=tolerance)
    for step in range(more.size(1)):
        if step in moves:
            keep = torch.tensor(moves[step])
            decoder.take(keep)
            order = order[keep]
        decoder(more[order, step])
        torch.testing.assert_close(decoder.logits, alone[order, step + 1], rtol=0, atol=tolerance)
    return decoder


@pytest.mark.parametrize("choice", [*CHOICES, *T.ARCH_PRESETS])
def test_rows_of_different_lengths_go_on_as_each_alone(choice):
    """Texts of 1 to 29 tokens go on for 24: as the whole forward pass.

    Windows of 5 end before the longest's begin. BOS stands inside them and comes later, and begins
    no document there; two texts are begun by none. Rows change places and leave on the way.
    """
    prompts = prompts_of(3, 1, 3, 9, 17, 29)
    prompts[3][8] = prompts[4][20] = prompts[4][28] = BOS
    prompts[2][0] = prompts[1][0] = 7
    more = texts(9, len(prompts), 24)
    more[:, 0], more[0, 15] = 5, BOS
    moves = {8: [4, 1, 3, 0, 2], 17: [3, 0, 1]}
    check_steps(network(settings_of(choice)), prompts, more, moves, 1e-9)


def test_room_grows_with_the_text():
    """Beyond the first room, with a window of 5 and one of 80, which ends only later."""
    for window in (5, 80):
        net = mixed(attn_window=window, train_seq_len=256)
        decoder = check_steps(net, [[1, 9, 4]] * 2, texts(5, 2, 150), {}, 1e-9)
        sizes = {kept["keys"].size(2) for kept in decoder.layers if "keys" in kept}
        assert sizes == {6 + 10 * S.ROOM // 4}


@pytest.mark.full  # compiling takes 45 s
def test_compiled_steps_are_the_plain_ones():
    """Also when rows leave and the room grows, without another compilation."""
    net = mixed(torch.float32)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    moves = {20: [0, 2, 3, 4], 50: [1, 2]}
    with torch.no_grad():
        check_steps(net, prompts_of(4, 3, 9, 17, 5, 8), texts(9, 5, 70), moves, 1e-4, compiled=True)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_weights_are_the_weights(dtype, monkeypatch):
    """Each matrix is packed once and multiplies as it does; in float64, or cast, none is packed.

    Nor in bfloat16 on a CPU with AVX2 alone, where packing is an error.
    """
    net = mixed(dtype)
    moves = {3: [2, 0]}
    tolerance = 1e-4 if dtype == torch.float32 else 0.5
    steps = net, prompts_of(4, 3, 9, 17), texts(9, 3, 8), moves, tolerance
    if dtype == torch.bfloat16:
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
        assert not hasattr(check_steps(*steps).linear, "copies")
        monkeypatch.undo()
        if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            pytest.skip("this CPU packs no bfloat16")
    decoder = check_steps(*steps)
    packed = [weight for weight, _ in decoder.linear.copies.values()]
    names = {name for name, param in net.named_parameters() if any(param is w for w in packed)}
    assert {"embed", "w_ngram", "blocks.0.mlp.w_up", "mixers.0.w_o"} <= names
    assert len(names) == len(packed) <= sum(param.ndim == 2 for param in net.parameters())
    net.dtype = torch.float64
    for other in (net, mixed()):
        assert not hasattr(S.Decoder(other, [[BOS]]).linear, "copies")


@pytest.mark.parametrize("choice", ["g", "bigram", "learned", "bio", "qwen3_5"])
def test_weights_are_cast_once_and_come_back(choice):
    """Inside, a forward in bfloat16 has the same bits and casts no matrix; a fault changes nothing."""
    net = network(settings_of(choice), torch.float32).requires_grad_()
    net.dtype = torch.bfloat16
    ids = texts(3, 2, 20)
    before = {name: param.clone() for name, param in net.named_parameters()}
    expected = net(ids)
    expected.sum().backward()
    pointers = [param.data_ptr() for param in net.parameters()]
    cast = {name for name in before if name.rsplit(".", 1)[-1].startswith("w_") or "embed" in name}
    with pytest.raises(ZeroDivisionError), S.cast_once(net):
        halves = {name for name, param in net.named_parameters() if param.dtype == torch.bfloat16}
        assert halves == cast | ({"head"} & before.keys())
        assert torch.equal(net(ids), expected)
        raise ZeroDivisionError
    assert pointers == [param.data_ptr() for param in net.parameters()]
    assert all(torch.equal(param, before[name]) for name, param in net.named_parameters())
    assert all(param.grad.dtype == torch.float32 for param in net.parameters())


def test_a_weight_that_has_changed_is_packed_anew():
    net = mixed(torch.float32)
    generate(net, [[BOS, 5]], most=2)
    net.blocks[0].mlp.w_up.mul_(1.5)
    found = generate(net, [[BOS, 5]], way=(0.0, 0, 1.0))
    wanted = generate(net.double(), [[BOS, 5]], way=(0.0, 0, 1.0))
    assert [one.ids for one in found] == [one.ids for one in wanted]


# ------------------------------------------------------------------------------------------ batches
PROMPTS = prompts_of(10, 6, 1, 19, 6, 3, 19, 30)
PROMPTS[2][11] = PROMPTS[6][9] = BOS


def test_seeds_make_the_samples():
    net = mixed()
    twice = [PROMPTS[2]] * 2
    found = generate(net, twice, seeds=[(1, 2), (1, 3)])
    same(found[:3], generate(net, twice[:1], seeds=[(1, 2)]))
    assert len({tuple(one.ids) for one in found}) == 6
    assert generate(net, []) == []


# --------------------------------------------------------------------------------------------- ends
def test_a_stop_token_is_kept_and_ends_the_sample():
    net = mixed()
    stop = {BOS, 5, 9}
    ended = generate(net, PROMPTS, 3, 20, stop=stop)
    for whole, one in zip(generate(net, PROMPTS, 3, 20), ended, strict=True):
        length = next((at + 1 for at, token in enumerate(whole.ids) if token in stop), 20)
        assert len(whole.ids) == 20 and not whole.finished
        assert one.ids == whole.ids[:length] and one.finished == (one.ids[-1] in stop)
        assert one.logps == pytest.approx(whole.logps[:length], abs=1e-6)
    assert len({one.finished for one in ended}) == 2


def test_finished_rows_leave_the_batch(monkeypatch):
    """A step's batch is at most a fourth larger than what is left to make.

    What the others draw is theirs (the test above).
    """
    seen = []
    step = S.Decoder.__call__

    def counted(decoder, ids):
        seen.append(len(ids))
        step(decoder, ids)

    monkeypatch.setattr(S.Decoder, "__call__", counted)
    samples = generate(mixed(), [PROMPTS[0]], 64, 30, stop=range(1, VOCAB, 4))
    lengths = [len(one.ids) for one in samples]
    assert len(seen) == max(lengths) - 1
    for step, rows in enumerate(seen, 1):
        left = sum(length > step for length in lengths)
        assert left <= rows <= max(2, left / 0.8)
    assert seen[-1] < 10 < 30 < seen[0]


def test_greedy_is_the_likeliest_token_of_the_whole_forward_pass():
    net = mixed()
    for prompt, one in zip(PROMPTS, generate(net, PROMPTS, 1, 6, (0.0, 3, 0.5)), strict=True):
        logits = logits_of(net, [[*prompt, *one.ids]])[0, len(prompt) - 1 : -1]
        assert one.ids == logits.argmax(1).tolist() and one.logps == [0.0] * 6


# ------------------------------------------------------------------------------------------ sampler
def draw(logits, way, uniform):
    """Return draws with temperature, top_k and top_p."""
    temperature, top_k, top_p = way
    truncate = S.truncation(SimpleNamespace(top_k=top_k, top_p=top_p))
    return S.draw(logits, temperature, uniform, truncate)


def kept_log_probabilities(logits, temperature, top_k, top_p):
    """Return those of one row (V,), float64, -inf outside the kept set.

    Plainly, token by token from the likeliest on.
    """
    scores = logits / temperature
    order = np.argsort(-scores, kind="stable")[: top_k or None].tolist()
    weights = {token: math.exp(scores[token] - scores[order[0]]) for token in order}
    total = math.fsum(weights.values())
    kept = {}
    for token in order:
        if weights[token] > 0 and math.fsum(kept.values()) / total < top_p:
            kept[token] = weights[token]
    logps = np.full(len(scores), -math.inf)
    for token, weight in kept.items():
        logps[token] = math.log(weight / math.fsum(kept.values()))
    return logps


WAYS = [
    (0.6, 0, 1.0),
    (1.7, 5, 1.0),
    (1.3, 9, 0.6),
    (1.0, 0, 1e-9),
    (1.0, 100, 0.95),
]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_the_drawn_tokens_are_those_of_a_plain_sampler(way):
    """Kept set, log-probability and inverse CDF of 102 draws from each of 40 distributions, by the
    smallest and the largest uniform number, too: what has no probability is never drawn, at the
    vocabulary's ends and inside it.
    """
    rng = np.random.default_rng(11)
    for low in [-math.inf, -4000.0] * 20:
        logits = 2.5 * rng.standard_normal(17)
        logits[[0, 5, 6, -1]] = low
        uniform = np.array([0, LAST_UNIFORM, *rng.random(100)])
        logps = kept_log_probabilities(logits, *way)
        rows = torch.from_numpy(logits).expand(102, -1)
        picks, drawn = draw(rows, way, torch.from_numpy(uniform))
        total = np.cumsum(np.exp(logps))
        assert picks.tolist() == np.searchsorted(total / total[-1], uniform, side="right").tolist()
        np.testing.assert_allclose(drawn, logps[picks], rtol=0, atol=1e-12)
        ends, _ = draw(rows[:2].float(), way, torch.from_numpy(uniform[:2]))
        assert torch.equal(ends, picks[:2])


def test_pairs_of_tokens_have_the_frequencies_of_the_model():
    """3,000 samples of two tokens from a vocabulary of 6, by the products of probabilities.

    Draws that repeat over steps or samples would not give these.
    """
    net = network(dataclasses.replace(BASE, layer_pattern="g a"), vocab=6)
    pairs = [*product(range(6), repeat=2)]
    logps = logits_of(net, [[1, *pair] for pair in pairs]).log_softmax(-1)[:, :2]
    logps = logps.gather(2, torch.tensor(pairs)[..., None]).sum((1, 2)).numpy()  # (36,)
    samples = generate(net, [[1]], 3000, 2)
    drawn = [6 * one.ids[0] + one.ids[1] for one in samples]
    assert [sum(one.logps) for one in samples[:99]] == pytest.approx(logps[drawn[:99]], abs=1e-6)
    counts = np.bincount(drawn, minlength=36)
    expected = 3000 * np.exp(logps)
    assert expected.sum() == pytest.approx(3000) and expected.max() < 1800
    assert ((counts - expected) ** 2 / expected).sum() < 35 + 4.75 * math.sqrt(70) + 15


# ----------------------------------------------------------------------------------------- extremes
@pytest.mark.parametrize("temperature", [1e-45, 1e-31, 1e-9])
def test_a_temperature_near_0_draws_the_likeliest_token(temperature):
    """Logits over such a number are infinite in float32."""
    logits = 20 * torch.randn(40, VOCAB, generator=torch.Generator().manual_seed(3))
    uniform = torch.linspace(0, LAST_UNIFORM, 40, dtype=torch.float64)
    picks, logps = draw(logits, (temperature, 10**9, 0.5), uniform)
    assert torch.equal(picks, logits.argmax(-1)) and not logps.any()


def test_the_largest_number_draws_a_token_that_has_a_chance():
    """In float32 it is 1, and so the whole total."""
    logits = torch.tensor([[0.0, 0.3, -math.inf, -math.inf]])
    picks, logps = draw(logits, (1.0, 0, 1.0), torch.tensor([LAST_UNIFORM]).double())
    assert picks == 1 and logps.item() == pytest.approx(-math.log1p(math.exp(-0.3)))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_network_that_is_not_finite_is_a_line(temperature):
    net = mixed()
    net.embed.data[7] = math.nan
    with pytest.raises(FloatingPointError, match="logits that are not finite"):
        generate(net, [[BOS, 5], [BOS, 7]], 2, 4, (temperature, 0, 1.0))


def test_any_number_of_samples_is_made_in_batches_that_fit(monkeypatch):
    """A prompt's samples too, if they are many; each is what it is alone."""
    net = mixed()
    expected = generate(net, PROMPTS, 7, 5)
    rows = []
    take = S.Decoder.take

    def counted(self, numbers):
        rows.append(len(numbers))
        take(self, numbers)

    monkeypatch.setattr(S.Decoder, "take", counted)
    for most, sizes in ((20, {14, 7}), (7, {7}), (3, {3, 1, 2})):
        rows.clear()
        whole = most - most % 7 if most > 7 else most
        monkeypatch.setattr(S, "texts_at_once", lambda *sizes, whole=whole: whole)
        same(generate(net, PROMPTS, 7, 5), expected)
        assert set(rows) <= sizes and sum(rows) == 7 * len(PROMPTS)


def stand_in(weights, **changes):
    """Return what texts_at_once reads of SmolLM2-135M's shape: 30 layers, keys of 192 numbers."""
    shape = dict(vocab_size=49152, num_kv_heads=3, attention_width=64, num_heads=9)
    shape |= dict(mlp_hidden=1536) | changes
    params = [torch.empty(weights, device="meta")]  # in float32
    return SimpleNamespace(
        config=SimpleNamespace(**shape),
        layers=range(30),
        dtype=None,
        embed=torch.zeros(1),
        parameters=lambda: params,
    )


def test_caches_of_a_batch_take_as_much_memory_as_the_weights():
    """On a CPU: but 256 MiB to 1 GiB; their logits, too."""
    text = 30 * 2 * 192 * 4 * 200  # bytes of 136 tokens and room for 64 more
    for weights, limit in ((10, 2**28), (10**8, 4 * 10**8), (10**10, 2**30)):
        assert S.texts_at_once(stand_in(weights), 1, 136, 1) == limit // text
    assert S.texts_at_once(stand_in(10), 1, 10**9, 1) == 1
    assert S.texts_at_once(stand_in(10, num_kv_heads=0.001), 1, 8, 1) == 2**28 // (4 * 49152)
    # In bfloat16 twice as many; whole groups of 16.
    half = stand_in(10**8)
    half.dtype = torch.bfloat16
    assert S.texts_at_once(half, 1, 136, 16) == 2 * 4 * 10**8 // text // 16 * 16


def test_long_prompts_are_read_by_few():
    """Scores of attention of 9 heads and 1,536 hidden units take 4 bytes a number, all places at once."""
    prompt = 1000 * 4 * (9 * 1100 + 4 * 1536)  # bytes
    count = 10**10 // 10  # of weights: 1 GiB is the limit
    assert 2**30 // prompt == 16
    assert S.texts_at_once(stand_in(count, num_kv_heads=0.01), 1000, 1100, 4) == 16 * 4
    assert S.texts_at_once(stand_in(count, num_kv_heads=0.01), 10**5, 10**5, 4) == 4


def test_a_decoder_leaves_its_memory_at_once():
    """Its caches must not wait until Python looks for cycles: a scoring makes many Decoders."""
    S.Decoder(mixed(), PROMPTS)  # PyTorch keeps the frames of an operator's first call
    gc.disable()
    try:
        decoder = S.Decoder(mixed(), PROMPTS)
        reference = weakref.ref(decoder)
        del decoder
        assert reference() is None
    finally:
        gc.enable()


def test_a_length_without_end_takes_no_memory():
    """Random numbers are drawn as they are needed; they are those of one call."""
    stop = range(0, VOCAB, 3)
    long = generate(mixed(), PROMPTS, 2, 10**12, stop=stop)
    same(long, generate(mixed(), PROMPTS, 2, 300, stop=stop))
    assert all(sample.finished for sample in long)


def test_a_block_says_how_far_it_is(monkeypatch):
    monkeypatch.setattr(S, "SAY_SECONDS", 0.05)
    lines = []
    samples = [S.Sample(ids=[5, 6], finished=True), S.Sample(ids=[5])]
    with pytest.raises(KeyError), S.heartbeat(lines.append, lambda: S.sampling_state(samples)):
        while not lines:
            pass
        raise KeyError
    assert lines[0] == "sampling: 1 of 2 answers have ended, 3 tokens so far, 0 s"
    with S.heartbeat(None, str):
        pass
