"""Test-time training: no score sees what comes after it, and each document adapts by itself."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.func import functional_call

import train_gpt as T
from conftest import BYTES, load_tool, small_network

tool = load_tool("adapt")
SEQ_LEN = 64
BOS = BYTES.bos_id
ALONE = T.Runtime(0, 1, torch.device("cpu"), False)
LENGTHS = [230, 1, 64, 65, 2, 150, 7, 1, 33, 96]


@pytest.fixture(autouse=True)
def chunks(monkeypatch):
    monkeypatch.setattr(tool, "CHUNK_SIZE", 32)


def documents_of(lengths):
    """Return a stream of documents of these lengths, BOS included."""
    rng = np.random.default_rng(0)
    return np.concatenate([[BOS, *rng.integers(4, 260, length - 1)] for length in lengths])


def network_of(layers="g s1 s1", **changes):
    return small_network(layers=layers, attn_window=24, **changes)


def adapted_losses(network, tokens, rows=4, rank=3):
    """Return the two Scores and the adapted loss of every prediction, by its place in `tokens`."""
    losses = {}
    windows = []  # ids of a window, and the adapters' losses of it

    def note(_, inputs, output):
        if torch.is_grad_enabled():
            windows.append((inputs[1], output.detach()))

    begin, end = T.document_spans(T.EvalText(tokens, 1), BOS)
    order = np.argsort(begin - end, kind="stable")
    hook = network.register_forward_hook(note)
    scorer = T.Scorer(BOS, ALONE, SEQ_LEN, rows)
    scores = tool.score_adapted(T, scorer, network, T.EvalText(tokens, 7), rank)
    hook.remove()
    for at in range(0, len(order), rows):
        batch = order[at : at + rows]
        longest = (end - begin)[batch].max()
        for stop in range(32, longest + 32, 32):
            _, found = windows.pop(0)
            for row, document in enumerate(batch):
                for column in range(32):
                    place = begin[document] + stop - 32 + column
                    if place < end[document]:
                        assert place not in losses
                        losses[place] = found[row, column - 32].item()
    assert not windows and sorted(losses) == list(range(len(tokens) - 1))
    return scores, np.array([losses[place] for place in sorted(losses)])


def test_a_later_token_changes_no_earlier_score():
    """Bit for bit, and an earlier one reaches further than a window: through the adapters alone."""
    tokens = documents_of(LENGTHS)
    _, losses = adapted_losses(network_of(), tokens)
    for place in (1, 31, 32, 33, 63, 100, 229):
        changed = tokens.copy()
        changed[place] = 4 + (tokens[place] - 3) % 256
        _, others = adapted_losses(network_of(), changed)
        assert (others[: place - 1] == losses[: place - 1]).all()
        assert others[place - 1] != losses[place - 1]
        first = LENGTHS[0]
        behind = slice(place + SEQ_LEN, first)
        assert (others[behind] != losses[behind]).all()
        assert (others[first:] == losses[first:]).all()  # other documents are adapted by themselves


def test_without_a_rate_the_scores_are_those_of_the_windows(monkeypatch):
    tokens = documents_of(LENGTHS)
    (adapted, plain), losses = adapted_losses(network_of(), tokens)
    assert adapted.nats != plain.nats
    monkeypatch.setattr(tool, "LORA_LR", 0.0)
    (frozen, again), _ = adapted_losses(network_of(), tokens)
    assert frozen == again == plain
    assert (plain.tokens, plain.bytes) == (sum(LENGTHS) - 1, 7)
    assert adapted.nats == pytest.approx(losses.astype(float).sum(), rel=1e-12)
    # The windows of `plain` are these spans: documents' chunks with what stands before them.
    spans = []
    for begin, end in zip(*T.document_spans(T.EvalText(tokens, 1), BOS), strict=True):
        for first in range(begin, end, 32):
            spans.append([max(begin, first + 32 - SEQ_LEN), first, min(first + 32, end)])
    scorer = T.Scorer(BOS, ALONE, SEQ_LEN, 4)
    other = scorer.score_spans(network_of(), T.EvalText(tokens, 7), np.array(spans), 4, SEQ_LEN)
    assert plain.nats == pytest.approx(other.nats, rel=1e-6)


def reference_losses(network, document, rank):
    """Return the losses of one document (N + 1,) by merged weights and AdamW written out."""
    names = [name for name in dict(network.named_parameters()) if "w_" in name] + ["head"]
    generator = torch.Generator().manual_seed(0)
    weights = {name: network.get_parameter(name).detach() for name in names}
    params = []
    for weight in weights.values():
        rows, cols = weight.shape
        a = torch.randn(cols, rank, generator=generator).double() * cols**-0.5
        params += [a, torch.zeros(rank, rows, dtype=torch.float64)]
    moments = [[torch.zeros_like(param), torch.zeros_like(param)] for param in params]
    losses = []
    steps = range(0, len(document) - 1, 32)
    for step, first in enumerate(steps, 1):
        stop = min(first + 32, len(document) - 1)
        begin = max(0, first + 32 - SEQ_LEN)
        ids = torch.from_numpy(document[begin:stop])[None]
        targets = torch.from_numpy(document[begin + 1 : stop + 1])[None]
        params = [param.requires_grad_() for param in params]
        merged = {}
        for (name, weight), a, b in zip(weights.items(), params[::2], params[1::2], strict=True):
            merged[name] = weight + (a @ b).T
        (found,) = functional_call(network, merged, (ids, targets))
        losses += found[first - begin :].tolist()
        grads = torch.autograd.grad(found.sum(), params)
        updated = []
        for param, grad, moment in zip(params, grads, moments, strict=True):
            moment[0] = 0.9 * moment[0] + 0.1 * grad
            moment[1] = 0.99 * moment[1] + 0.01 * grad**2
            mean = moment[0] / (1 - 0.9**step)
            deviation = (moment[1] / (1 - 0.99**step)).sqrt()
            updated.append((param - tool.LORA_LR * mean / (deviation + 1e-8)).detach())
        params = updated
    return losses


@pytest.mark.parametrize("tied", [True, False])
def test_each_document_is_adapted_as_by_hand(tied):
    """In float64, one document at a time. A tied head has adapters, and the embedding has none."""
    tokens = documents_of(LENGTHS)
    network = network_of(tie_embeddings=tied, bigram_vocab_size=64).double()
    weights = {name: weight.clone() for name, weight in network.state_dict().items()}
    twin = network_of(tie_embeddings=False, bigram_vocab_size=64).double()
    twin.load_state_dict({"head": weights["embed"], **weights})
    _, losses = adapted_losses(network, tokens)
    expected = []
    for begin, end in zip(*T.document_spans(T.EvalText(tokens, 1), BOS), strict=True):
        expected += reference_losses(twin, tokens[begin : end + 1], 3)
    assert losses == pytest.approx(np.array(expected), rel=1e-7)
    # What the artifact gave back stays as it is.
    for name, weight in network.state_dict().items():
        assert torch.equal(weight, weights[name]) and weight.grad is None


def test_activations_of_bfloat16_reach_the_adapters():
    """Weights that a product would cast are cast before; the scores without adapters stay the same."""
    tokens = documents_of([150, 40])
    network = network_of()
    network.dtype = torch.bfloat16
    text = T.EvalText(tokens, 1)
    windows = list(
        tool.chunk_windows(tokens, *(x[:, None] for x in T.document_spans(text, BOS)), 64)
    )
    with torch.no_grad():
        before = sum(network(*window)[:, -32:].double().sum().item() for window in windows)
    (adapted, plain), _ = adapted_losses(network, tokens)
    assert plain.nats == before and adapted.nats != before
    assert math.isclose(adapted.nats, before, rel_tol=0.1)


def test_ranks_share_out_the_documents(monkeypatch):
    text = T.EvalText(documents_of(LENGTHS), 7)
    scores = tool.score_adapted(T, T.Scorer(BOS, ALONE, SEQ_LEN, 2), network_of(), text, 3)
    total = torch.tensor([*(score.nats for score in scores), scores[0].tokens], dtype=float)
    parts = []

    def add(self, tensor):
        parts.append(tensor.tolist())
        return total

    monkeypatch.setattr(T.Runtime, "sum", add)
    for rank in range(3):
        scorer = T.Scorer(BOS, T.Runtime(rank, 3, ALONE.device, True), SEQ_LEN, 2)
        assert tool.score_adapted(T, scorer, network_of(), text, 3) == scores
    assert np.sum(parts, axis=0) == pytest.approx(total.numpy(), rel=1e-6)
    assert all(count > 0 for *_, count in parts)


def test_the_first_documents_have_their_share_of_the_bytes():
    """And the BOS behind the last of them, which its last token predicts; 0 or many are all."""
    val = T.EvalText(documents_of(LENGTHS), 330)
    data = SimpleNamespace(val=val, tokenizer=SimpleNamespace(bos_id=BOS, count_bytes=len))
    part = tool.first_documents(T, data, 3)
    assert (part.tokens == val.tokens[:296]).all() and len(part.tokens) == 296
    assert part.bytes == round(296 * 330 / sum(LENGTHS))
    for count in (0, len(LENGTHS), 99):
        assert tool.first_documents(T, data, count) is val
