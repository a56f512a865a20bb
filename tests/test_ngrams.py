"""NGRAM_ORDER: counts against Kneser-Ney in plain Python, tables, caches, artifacts, mistakes."""

import dataclasses
import math
import os
import random
from collections import Counter, defaultdict
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import zstandard
from conftest import environment, load_tool

import sample as S
import train_gpt as T

BOS, VOCAB = 1, 12
SETTINGS = T.Settings(layer_pattern="g s a", model_dim=32, num_heads=4, num_kv_heads=2, mlp_mult=2.0, attn_window=5,
                      rope_base=100.0, tied_embed_init_std=0.5, train_seq_len=64)

pytestmark = pytest.mark.usefixtures("one_thread")

# --------------------------------------------------------------------------------------------------------- a reference
class KneserNey:
    """Interpolated Kneser-Ney with three discounts a length, by dicts of tuples (Chen and Goodman 1998)."""

    def __init__(self, tokens: list[int], order: int, least: int, vocab: int):
        self.order, self.vocab, self.kept, self.totals, self.taken = order, vocab, [], [], []
        times, before = [Counter() for _ in range(order + 2)], [defaultdict(set) for _ in range(order + 1)]
        for length, end in product(range(1, order + 1), range(len(tokens) + 1)):
            gram = tuple(tokens[max(0, end - length) : end])
            if len(gram) == length and BOS not in gram[1:-1]:  # a BOS may be what is predicted, and where it begins
                times[length][gram] += 1
                if length > 1:
                    before[length - 1][gram[1:]].add(gram[0])
        for length in range(1, order + 1):
            found = {gram: len(before[length].get(gram, ())) or seen for gram, seen in times[length].items()}
            kinds = [max(1, sum(count == kind for count in found.values())) for kind in (1, 2, 3, 4)]
            share = kinds[0] / (kinds[0] + 2 * kinds[1])
            exact = [i - (i + 1) * share * kinds[i] / kinds[i - 1] for i in (1, 2, 3)]
            discounts = [round(1e6 * min(i, max(0.1, own))) / 1e6 for i, own in enumerate(exact, 1)]
            kept, totals, taken = defaultdict(dict), Counter(), Counter()
            for gram, count in found.items():
                context, token = gram[:-1], gram[-1]
                parent = length <= 2 or context[-1] in self.kept[-1].get(context[:-1], {})
                totals[context] += count
                if parent and (length <= 2 or times[length][gram] >= least):
                    kept[context][token] = count - discounts[min(count, 3) - 1]
                    taken[context] += discounts[min(count, 3) - 1]
                else:
                    taken[context] += count  # its mass goes to shorter contexts
            self.kept, self.totals, self.taken = [*self.kept, kept], [*self.totals, totals], [*self.taken, taken]

    def p(self, context: tuple[int, ...]) -> list[float]:
        """Of every token after a context of one document."""
        shorter = self.p(context[1:]) if context else [1 / self.vocab] * self.vocab
        kept = self.kept[len(context)].get(context)
        if not kept:
            return shorter
        total, left = self.totals[len(context)][context], self.taken[len(context)][context]
        return [(kept.get(token, 0.0) + left * low) / total for token, low in enumerate(shorter)]

    def __call__(self, row: list[int]) -> list[list[float]]:
        """Of each place in a row, log p of what follows."""
        found = []
        for end in range(1, len(row) + 1):
            begin = max([0, end - self.order + 1, *(at for at in range(end) if row[at] == BOS)])
            found.append([math.log(p) for p in self.p(tuple(row[begin:end]))])
        return found


def corpus(seed: int, vocab: int, length: int = 300) -> list[int]:
    """Documents of a few phrases and some noise, in which the last token of the vocabulary does not occur."""
    rng = random.Random(seed)
    draw = lambda most: rng.choices([0, *range(2, vocab - 1)], k=rng.randint(1, most))  # noqa: E731
    phrases, tokens = [draw(6) for _ in range(4)], []
    while len(tokens) < length:
        tokens.append(BOS)
        for _ in range(rng.choice((0, 1, 3, 9))):
            tokens += rng.choices(phrases, (8, 4, 2, 1))[0] if rng.random() < 0.9 else draw(3)
    return tokens[rng.randrange(3) :]  # some begin in the middle of a document


class Stream(list):
    """Tokens as TokenStream gives them."""

    def read(self, start: int, count: int) -> np.ndarray:
        return np.array(self[start : start + count], np.int64)


def ngrams(tokens: list[int], order: int, least: int = 1, vocab: int = VOCAB, module=T, room: int = 0):
    """NGrams that holds the counts of tokens packed, as a file gives it, in `room` bytes at least."""
    packed = pack(counts_of(tokens, order, least, vocab), room)
    net = module.NGrams(SimpleNamespace(ngram_order=order, ngram_bytes=len(packed), vocab_size=vocab, bos_id=BOS))
    net.packed.copy_(packed)
    return net


def pack(counts: np.ndarray, room: int = 0) -> torch.Tensor:
    """The zstd frame of byte planes, at least `room` bytes: behind a frame nothing is read."""
    planes = b"".join(((counts >> 8 * plane) & 255).astype(np.uint8).tobytes() for plane in range(4))
    return torch.frombuffer(bytearray(zstandard.compress(planes).ljust(room, b"\0")), dtype=torch.int8)


def counts_of(tokens: list[int], order: int, least: int = 1, vocab: int = VOCAB) -> np.ndarray:
    settings = SimpleNamespace(ngram_order=order, ngram_min_count=least, artifact_bytes_max=1 << 24)
    packed = T.count_ngrams([Stream(tokens)], settings, SimpleNamespace(vocab_size=vocab, bos_id=BOS))
    planes = np.frombuffer(zstandard.decompress(packed), np.uint8).reshape(4, -1)
    return sum(plane.astype(np.int64) << 8 * at for at, plane in enumerate(planes)).astype(np.int32)


def rows(seed: int, tokens: list[int], vocab: int, length: int = 40) -> torch.Tensor:
    """Text that was counted, from its beginning and from elsewhere; phrases with changes; noise with every token."""
    rng = random.Random(seed)
    at = rng.randrange(len(tokens) - length)
    changed = [rng.randrange(vocab) if rng.random() < 0.2 else token for token in tokens[-length:]]
    noise = [rng.randrange(vocab) for _ in range(length - 2)] + [vocab - 1, BOS]
    return torch.tensor([tokens[:length], tokens[at : at + length], changed, noise])


@pytest.mark.parametrize(("order", "least"), [*product(range(2, 6), (1, 2, 3))])
def test_log_probabilities_are_kneser_neys(order, least):
    """Every token after every place; for contexts that were not seen, in texts that begin in the middle of another."""
    for seed in range(4):
        tokens = corpus(seed, vocab := 5 + seed % 8, (30, 120, 400)[seed % 3])
        ids = rows(seed, tokens, vocab, min(40, len(tokens) - 1))
        found = ngrams(tokens, order, least, vocab)(ids)
        assert found.dtype == torch.float32 and found.shape == (*ids.shape, vocab)
        reference = KneserNey(tokens, order, least, vocab)
        wanted = torch.tensor(list(map(reference, ids.tolist())))
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5, msg=lambda said, seed=seed: f"seed {seed}: {said}")
        assert (found.exp().sum(-1) - 1).abs().max() < 1e-5


def test_the_reference_by_hand():
    """BOS 2 3 2 3 2 2: after 2 two tokens, after 3 one. Pairs are not pruned: 3 after 2 seen twice, 2 after 2 once."""
    tokens = [BOS, 2, 3, 2, 3, 2, 2]
    reference = KneserNey(tokens, 2, 3, 5)
    # Tokens: BOS and 3 have a count of 1, 2 of 3. Pairs: BOS 2 and 2 2 of 1, 2 3 and 3 2 of 2. For a 0 stands 1.
    one, two = 2 / (2 + 2 * 1), 2 / (2 + 2 * 2)
    discount, third, first = 1 - 2 * one * 1 / 2, 3 - 4 * one * 1 / 1, 1 - 2 * two * 2 / 2
    left = (2 * discount + third) / 5
    alone, second, p = (1 - discount + left) / 5, 2 - 3 * two * 1 / 2, reference.p((2,))
    for token, own, low in ((BOS, 0, alone), (2, 1 - first, (3 - third + left) / 5), (3, 2 - second, alone),
                            (4, 0, left / 5)):
        assert p[token] == pytest.approx((own + (first + second) * low) / 3, abs=2e-6)


def test_what_is_packed_by_hand():
    """The same text. Seen were BOS, 2 and 3, so 2 has place 1 among them; after 2 stand 2 and 3, which is one on."""
    one, two = 2 / (2 + 2 * 1), 2 / (2 + 2 * 2)
    discounts = [[1 - 2 * one / 2, 2 - 3 * one, 3 - 4 * one], [1 - 2 * two, 2 - 3 * two / 2, 3 - 4 * two]]
    first, second = ([round(1e6 * min(i, max(0.1, own))) for i, own in enumerate(each, 1)] for each in discounts)
    assert counts_of([BOS, 2, 3, 2, 3, 2, 2], 2, 3, 5).tolist() == [
        3, 0, 1, 1, 1, 1, 3, 1, *first,  # kept after nothing, left out; tokens, by steps; counts; discounts
        1, 2, 1, 0, 0, 0, 1, 1, 1, 1, 1, 1, 2, 2, *second]  # the same of the contexts BOS, 2, 3


def test_where_bytes_are_short_counts_take_fewer():
    """The same counts, packed harder once they are more than half of the limit."""
    tokens, tokenizer = Stream(corpus(3, 12, 6000)), SimpleNamespace(vocab_size=12, bos_id=BOS)
    settings = SimpleNamespace(ngram_order=5, ngram_min_count=1)
    size = len(T.count_ngrams([tokens], SimpleNamespace(**vars(settings), artifact_bytes_max=1 << 24), tokenizer))
    wide, short = (T.count_ngrams([tokens], SimpleNamespace(**vars(settings), artifact_bytes_max=most), tokenizer)
                   for most in (2 * size, 2 * size - 1))
    assert len(short) < 0.98 * len(wide) and len(wide) == size
    assert zstandard.decompress(short) == zstandard.decompress(wide)


# -------------------------------------------------------------------------------------------------------------- tables
def test_counts_that_are_loaded_later_are_noticed():
    first, second = (corpus(seed, VOCAB) for seed in (1, 2))
    one, two, ids = ngrams(first, 4, room=4000), ngrams(second, 4, room=4000), rows(5, first, VOCAB)
    of_one, of_two = one(ids), two(ids)
    assert not torch.equal(of_one, of_two) and not list(one.parameters())
    two.load_state_dict(one.state_dict())  # its tables were made already
    assert torch.equal(two(ids), of_one)


def test_the_mixture_goes_by_both_entropies():
    """A head that changes nothing, so that features are logits; the formula in float64."""
    net, ids = ngrams(corpus(2, VOCAB), 4), rows(5, corpus(2, VOCAB), VOCAB)
    net.mix.copy_(torch.tensor([[0.5, -0.25, 0.125], [0.75, 0.0625, -0.5]]))
    counted, logits = net(ids), 3 * torch.randn(*ids.shape, VOCAB)
    sides = logits.double().softmax(-1), counted.double().exp()
    one, other = (-(p * p.log()).sum(-1, keepdim=True) for p in sides)
    powers = 0.5 - 0.25 * one + 0.125 * other, 0.75 + 0.0625 * one - 0.5 * other
    wanted = sides[0] ** powers[0] * sides[1] ** powers[1]
    config = SimpleNamespace(model_dim=VOCAB, logit_softcap=0)
    of = SimpleNamespace(config=config, head=None, embed=torch.eye(VOCAB), ngrams=net)
    found = T.GPT.logits(of, torch.cat([logits, counted], -1)).softmax(-1)
    torch.testing.assert_close(found.double(), wanted / wanted.sum(-1, keepdim=True), rtol=1e-5, atol=1e-7)


def test_until_it_is_fitted_the_mixture_is_the_network():
    net, ids = ngrams(corpus(2, VOCAB), 4), rows(5, corpus(2, VOCAB), VOCAB)
    logits = torch.randn(*ids.shape, VOCAB)
    assert torch.equal(net.mixed(logits, net(ids)), logits.log_softmax(-1))


def test_the_mixture_makes_tokens_likeliest():
    """Against a search: no step of any of the six makes the held-out tokens likelier."""
    net, tokens = ngrams(corpus(2, VOCAB), 4), torch.tensor(corpus(2, VOCAB, 2000)[300:1901])
    own = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0)) * torch.linspace(0.2, 4, VOCAB)[:, None]
    network = lambda ids: own[ids]  # noqa: E731 - logits by the last token, of some surer than of others
    ids, targets = tokens[:-1].view(-1, 16), tokens[1:].view(-1, 16)

    def nats(mix: torch.Tensor) -> float:
        net.mix.copy_(mix)
        found = net.mixed(network(ids), net(ids))
        return F.cross_entropy(found.double().flatten(0, 1), targets.flatten()).item()

    alone = nats(net.mix.clone())
    net.fit(network, tokens.numpy(), 16)
    best = net.mix.clone()
    least = nats(best)
    assert least < alone - 0.1
    for at, step in product(product(range(2), range(3)), (-0.05, 0.05)):
        mix = best.clone()
        mix[at] += step
        assert nats(mix) > least, (best, at, step)


def test_large_vocabularies_are_fitted_on_fewer_windows_from_all_over():
    net, tokens, given = ngrams(corpus(2, VOCAB), 2), torch.tensor(corpus(2, VOCAB, 2000)[300:1053]), []
    ids, net.vocab_size = tokens[:-1].view(-1, 16), 1 << 18  # 47 windows, of which 4 have 2**24 log-probabilities
    net.forward = lambda ids: torch.randn(*ids.shape, VOCAB).log_softmax(-1)
    network = lambda ids: given.append(ids) or torch.randn(*ids.shape, VOCAB)  # noqa: E731
    net.fit(network, tokens.numpy(), 16)
    net.vocab_size = 1 << 30
    net.fit(network, tokens.numpy(), 16)
    assert torch.equal(given[0], ids[6::12]) and torch.equal(given[1], ids[23:24])


def test_a_network_that_is_always_right_leaves_finite_weights():
    """From weights by which the counts alone are heard; without what keeps them finite they would go on to grow."""
    net, tokens = ngrams(corpus(2, VOCAB), 4), torch.tensor(corpus(2, VOCAB, 2000)[300:557])
    right = 30 * F.one_hot(tokens[1:].view(-1, 16), VOCAB).float()  # of all 16 windows
    net.mix.copy_(torch.tensor([[0.01, 0.0, 0.0], [1.0, 0.0, 0.0]]))
    net.fit(lambda ids: right, tokens.numpy(), 16)
    ids, targets = tokens[:-1].view(-1, 16), tokens[1:].view(-1, 16, 1)
    assert net.mix.abs().max() < 10
    assert net.mixed(right, net(ids)).softmax(-1).gather(-1, targets).min() > 0.999


@pytest.mark.parametrize(("tokens", "least"), [([BOS, 2, 3], 9), ([BOS], 1), ([], 1), ([BOS, 2] * 50, 1)])
def test_next_to_nothing_was_seen(tokens, least):
    """Lengths of which nothing is kept, and no text at all: everything has a probability, and they sum to 1."""
    ids = torch.tensor([[0, BOS, 2, 3, 4, BOS, 2, BOS, BOS]])
    found = ngrams(tokens, 5, least, 5)(ids)
    wanted = torch.tensor(KneserNey(tokens, 5, least, 5)(ids[0].tolist()))
    torch.testing.assert_close(found[0], wanted, rtol=0, atol=1e-5)


def test_much_text_of_one_kind_leaves_a_probability_to_the_rest():
    """What is left after 3 2 is 6e-9: a difference from float32's 1 would be 0. By hand: of 1 << 28 a
    discount of 5 / 3; of 2 one of 0.5, of pairs (3 follows 2 behind two tokens); of 4 three of 0.5, of tokens."""
    net = ngrams([BOS, *[2, 3] * 40], 3, 1, 5, room=1000)
    counts = counts_of([BOS, *[2, 3] * 40], 3, 1, 5)
    counts[counts == 39] = 1 << 28  # 3 after 3 2, and 2 after 2 3
    net.packed.copy_(pack(counts, 1000))
    found = net(torch.tensor([[BOS, 2, 3, 2, 3, 2]]))
    assert torch.isfinite(found).all() and (found.exp().sum(-1) - 1).abs().max() < 1e-5
    wanted = math.log(5 / 3 / (1 << 28) * 0.5 / 2 * 1.5 / 4 / 5)
    assert found[0, [3, 5], 4].tolist() == pytest.approx([wanted] * 2, abs=1e-5)


@pytest.mark.parametrize("order", range(2, 6))
def test_rows_see_neither_each_other_nor_what_follows_nor_another_document(order):
    net, ids = ngrams(corpus(4, VOCAB), order), rows(6, corpus(4, VOCAB), VOCAB)
    ids[:, 20] = BOS
    base = net(ids)
    for row, one in enumerate(ids):
        assert torch.equal(net(one[None])[0], base[row])
    later = torch.cat([ids[:, :30], ids[:, 30:].flip(0)], 1)
    assert torch.equal(net(later)[:, :30], base[:, :30]) and not torch.equal(net(later), base)
    assert torch.equal(net(ids[:, :30]), base[:, :30])
    assert torch.equal(net(ids[:, 20:]), base[:, 20:])  # behind a BOS
    unknown = net(torch.cat([torch.full((len(ids), 3), -1), ids], 1))
    assert torch.equal(unknown[:, 3:], base) and (unknown.exp().sum(-1) - 1).abs().max() < 1e-5


# ------------------------------------------------------------------------------------------------------- in the network
def network(order: int, dtype: torch.dtype = torch.float64, **changes: object) -> S.GPT:
    """A network none of whose parameters is at a special value, with the counts of a text."""
    counts, seeded = ngrams(corpus(7, VOCAB), order, module=S).packed, torch.manual_seed(1)
    config = S.model_config(dataclasses.replace(SETTINGS, ngram_order=order, **changes), VOCAB, BOS)
    config.ngram_bytes = len(counts)
    net = S.GPT(config, S.NGrams).to(dtype)
    net.ngrams.packed.copy_(counts)
    net.ngrams.mix.copy_(torch.tensor([[0.5, -0.0625, 0.125], [0.75, 0.0625, -0.125]]))
    with torch.no_grad():
        for param in net.parameters():
            param.add_(0.1 * torch.randn(param.shape, generator=seeded, dtype=dtype))
    return net.requires_grad_(False)


@pytest.mark.parametrize(("order", "bigrams"), [*product(range(2, 6), (0,)), (3, 50)])
def test_pieces_by_a_cache_are_the_whole_pass(order, bigrams):
    net, ids = network(order, bigram_vocab_size=bigrams, bigram_dim=8), rows(8, corpus(7, VOCAB), VOCAB)
    full = net(ids).log_softmax(-1)
    assert full.dtype == torch.float64
    for sizes in ([1] * 40, [2, 1, 37], [7] * 5 + [5], [39, 1]):
        cache, parts = {}, ids.split(sizes, 1)
        found = torch.cat([net(part, cache=cache) for part in parts], 1).log_softmax(-1)
        torch.testing.assert_close(found, full, rtol=0, atol=1e-9)
    net.ngrams.packed.copy_(pack(counts_of([], order), len(net.ngrams.packed))[: len(net.ngrams.packed)])
    assert (net(ids).log_softmax(-1) - full).abs().max() > 0.5  # the counts do count


@pytest.mark.parametrize(("order", "bigrams"), [*product(range(2, 6), (0,)), (4, 50)])
def test_texts_of_different_lengths_go_on_as_each_alone(order, bigrams):
    """Prompts of 1 to 12 tokens, BOS inside, at their end and among what follows; rows change places and leave."""
    net, text = network(order, bigram_vocab_size=bigrams, bigram_dim=8), corpus(7, VOCAB)
    zero = text.index(0)  # a token as any other, also where it is not known what came before
    prompts = [[BOS], text[zero + 1 : zero + 2], text[:3], text[40:47], [*text[60:71], BOS]]
    more = rows(9, text, VOCAB)[torch.tensor([0, 1, 2, 3, 1])][:, :16]
    more[0, 5], more[4, 9], more[1] = BOS, BOS, torch.tensor(text[zero + 2 : zero + 18])
    alone = torch.stack([net(torch.tensor([[*prompt, *row.tolist()]]))[0, -17:]
                         for prompt, row in zip(prompts, more, strict=True)]).log_softmax(-1)
    with torch.inference_mode():  # as `generate`
        decoder, order = S.Decoder(net, prompts, 1), torch.arange(5)
        torch.testing.assert_close(decoder.logits.log_softmax(-1), alone[:, 0], rtol=0, atol=1e-9)
        for step in range(16):
            if step == 6:
                order = torch.tensor([4, 1, 3, 0])
                decoder.keep(order)
            found = decoder(more[order, step]).log_softmax(-1)
            torch.testing.assert_close(found, alone[order, step + 1], rtol=0, atol=1e-9)


# ------------------------------------------------------------------------------------------------------------ artifacts
def test_an_artifact_gives_the_counts_back(tmp_path):
    net, ids = network(4, torch.float32), rows(8, corpus(7, VOCAB), VOCAB)
    table = {kind: dict(bits=8, clip_sigmas=0.0, step="row", widen=1.0) for kind in ("matrix", "embedding")}
    coded = S.quantize_all(net.state_dict(), table)
    data, sizes = S.pack_artifact(net.state_dict(), coded, vars(net.config), "ab" * 32, {})
    assert 0 < sizes["counts"] <= len(net.ngrams.packed) and "ngrams.packed" not in coded
    (tmp_path / "model.upar").write_bytes(data)
    header, tensors, again = S.read_artifact(tmp_path / "model.upar")
    own = S.GPT(SimpleNamespace(**header["settings"]), S.NGrams)
    own.load_state_dict(tensors)
    assert tensors["ngrams.packed"].dtype == torch.int8 and torch.equal(own.ngrams.packed, net.ngrams.packed)
    with S.decoded(net.state_dict(), coded):
        net.load_state_dict(tensors)  # what is not coded is rounded to 16 bits
        assert torch.equal(own(ids), net(ids))
    assert S.pack_artifact(tensors, again, header["settings"], "ab" * 32, {})[0] == data


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
def test_an_artifact_takes_no_other_integers(dtype):
    with pytest.raises(ValueError, match=f"tensor counts: {dtype} up to 1; must be floating, finite as .*, or int8"):
        S.pack_artifact({"counts": torch.ones(40, dtype=dtype)}, {}, {}, "ab" * 32, {})


# ------------------------------------------------------------------------------------------------------------- mistakes
@pytest.mark.parametrize(("changes", "said"), [
    (dict(NGRAM_ORDER=1), "NGRAM_ORDER=1: must be 0 or from 2 to 6"),
    (dict(NGRAM_ORDER=7), "NGRAM_ORDER=7: must be 0 or from 2 to 6"),
    (dict(NGRAM_ORDER=10**9), "NGRAM_ORDER='1000000000': must be from 0 to 63"),
    (dict(NGRAM_ORDER=3, NGRAM_MIN_COUNT=0), "NGRAM_MIN_COUNT='0': must be from 1 to"),
], ids=str)
def test_mistakes_are_one_line(changes, said, tmp_path, monkeypatch, capsys):
    """Here the plan's, which takes 1,024 pieces where there are no data."""
    monkeypatch.chdir(tmp_path)
    with mock.patch.dict(os.environ, environment(**changes), clear=True):
        assert load_tool("plan").main(Path(T.__file__)) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"error: {said}") and err.count("\n") == 1


def test_the_longest_n_grams_of_a_vocabulary_fit_into_64_bits():
    for vocab, longest in ((1024, 6), (264, 7), (16384, 4), (500, 7), (512, 6)):
        T.model_config(dataclasses.replace(SETTINGS, ngram_order=longest), vocab, BOS)
        with pytest.raises(T.UserError, match=f"NGRAM_ORDER={longest + 1}: must be 0 or from 2 to {longest}$"):
            T.model_config(dataclasses.replace(SETTINGS, ngram_order=longest + 1), vocab, BOS)
    tokens = [BOS, *range(490, 500), 499, 498] * 3
    found = ngrams(tokens, 7, 1, 500)(torch.tensor([tokens[:20]]))
    wanted = torch.tensor(KneserNey(tokens, 7, 1, 500)(tokens[:20]))
    torch.testing.assert_close(found[0], wanted, rtol=0, atol=2e-5)
