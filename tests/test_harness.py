"""lm-evaluation-harness on an exported model: the commands of docs/scoring.md, with local rows in place
of downloads, and its figures against those of our network.
"""

import json
import math
import shlex
import statistics
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from test_models import make, train_tokenizer

import sample as S
from conftest import ROOT, blocks, environment, write_lines

pytestmark = [
    pytest.mark.full,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not find_spec("lm_eval"), reason="lm_eval: no requirements-eval.txt"),
]
CONTEXT = 96  # of the model, tokens
WORDS = (
    "the a of network größer 日本 layer naïve token state value 12345 returns if else with".split()
)


def phrase(rng, least, most):
    return " ".join(rng.choice(WORDS, rng.integers(least, most)))


@pytest.fixture(scope="module")
def harness(tmp_path_factory):
    """Return (folder, network, tokenizer) after the guide's commands before lm_eval.

    The folder has the exported model; network and tokenizer are those that sample.py loads.
    """
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("harness")
    special = dict(bos_token="<|endoftext|>", eos_token="<|endoftext|>")
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=train_tokenizer("gpt2"), **special
    )
    theirs.save_pretrained(folder / "models/base")
    sizes = dict(vocab_size=len(theirs), max_position_embeddings=CONTEXT)
    make(transformers, "llama", **sizes).save_pretrained(folder / "models/base")
    (folder / "runs").mkdir()
    for command in guide_commands()[1:-2]:
        run(command, folder)
    network, tokenizer, _ = S.load_model("ARTIFACT", str(folder / "runs/base"))
    return folder, network, tokenizer


def guide_commands():
    """Return the guide's commands for the harness: install, import, export, cp, and lm_eval twice."""
    text = "".join(block for block in blocks("scoring.md", "bash") if "lm_eval" in block)
    commands = text.splitlines()
    assert [command.split()[0] for command in commands[:4]] == ["pip", "python", "python", "cp"]
    assert len(commands) == 6
    return commands


def run(command, folder):
    """Run a command of the guide in a folder, offline."""
    python = shlex.quote(sys.executable)
    command = command.replace("python convert.py", f"{python} {ROOT / 'convert.py'}")
    command = command.replace("lm_eval --model", f"{python} -m lm_eval --model")
    environ = environment(HF_HOME=folder / "cache", HF_HUB_OFFLINE=1, HF_DATASETS_OFFLINE=1)
    options = dict(cwd=folder, env=environ, capture_output=True, text=True, timeout=500)
    done = subprocess.run(["bash", "-c", command], **options)
    assert done.returncode == 0, f"{command}: {done.stdout[-500:]} {done.stderr[-2500:]}"


def read_results(folder, task):
    """Return the figures of a task and its rows, which the harness wrote, in the order of the rows."""
    [samples] = folder.glob(f"harness/**/samples_{task}_*.jsonl")
    results = samples.with_name(samples.name.replace(f"samples_{task}", "results"))
    figures = json.loads(results.with_suffix(".json").read_text())["results"][task]
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    return figures, sorted(rows, key=lambda row: row["doc_id"])


def ids_of(tokenizer, context, answer):
    """Return the ids of a context, BOS first, and of what follows it, which is encoded with it."""
    before = tokenizer.encode(context)
    return [tokenizer.bos_id, *before], tokenizer.encode(context + answer)[len(before) :]


@torch.no_grad()
def our_score(network, tokenizer, context, answer):
    """Return the log-probability of an answer, and whether greedy decoding gives it."""
    prompt, target = ids_of(tokenizer, context, answer)
    ids = [*prompt, *target][-CONTEXT - 1 :]
    logps = network(torch.tensor([ids[:-1]]))[0].double().log_softmax(-1)[-len(target) :]
    total = math.fsum(logps[place, token].item() for place, token in enumerate(target))
    return total, logps.argmax(-1).tolist() == target


def check_scores(row, scores):
    """Check the harness's log-probabilities of a row, and greedy answers."""
    logps, hits = zip(*scores, strict=True)
    their_logps, their_hits = zip(*(answer for [answer] in row["resps"]), strict=True)
    assert [*map(float, their_logps)] == pytest.approx([*logps], abs=2e-4)
    assert [*their_hits] == [*map(str, hits)]


def check_choices(harness, task, questions):
    """Check a task's log-probabilities and accuracies; questions: (context, choices, number of the right one)."""
    folder, network, tokenizer = harness
    figures, rows = read_results(folder, task)
    right = {"acc": [], "acc_norm": [], "acc_bytes": []}
    for row, (context, choices, gold) in zip(rows, questions, strict=True):
        scores = [our_score(network, tokenizer, context, " " + choice) for choice in choices]
        check_scores(row, scores)
        sums = np.array([logp for logp, _ in scores])
        lengths = {
            "acc": [1] * len(choices),
            "acc_norm": [len(choice) for choice in choices],
            "acc_bytes": [len(choice.encode()) for choice in choices],
        }
        for name, length in lengths.items():
            right[name].append(int((sums / length).argmax() == gold))
    names = [name for name in right if f"{name},none" in figures]
    for name in names:
        assert figures[f"{name},none"] == pytest.approx(statistics.fmean(right[name]))
        assert 0 < sum(right[name]) < len(rows)
    assert len({tuple(right[name]) for name in names}) == len(names)  # each is a figure of its own
    return names


def test_own_questions_by_a_task_file(harness):
    """The context of one of them is longer than the model's."""
    folder, *_ = harness
    rng = np.random.default_rng(0)
    questions = []
    for number in range(60):
        count = 2 + number % 3
        choices = [phrase(rng, 1, 7) for _ in range(count)]
        questions.append((phrase(rng, 1, 9), choices, int(rng.integers(count))))
    questions[7] = (" ".join(WORDS * 3), *questions[7][1:])
    (folder / "tasks").mkdir()
    rows = [{"query": query, "choices": c, "gold": gold} for query, c, gold in questions]
    write_lines(folder / "tasks/capitals.jsonl", rows)
    [task] = blocks("scoring.md", "yaml")
    (folder / "tasks/capitals.yaml").write_text(task)
    run(guide_commands()[-1], folder)
    assert check_choices(harness, "capitals", questions) == ["acc", "acc_norm", "acc_bytes"]


def test_published_tasks(harness):
    """HellaSwag, PIQA and LAMBADA as the harness describes them, with local rows in place of downloads."""
    folder, network, tokenizer = harness
    rng = np.random.default_rng(1)
    hellaswag = []
    piqa = []
    for number in range(50):
        endings = [phrase(rng, 2, 8) for _ in range(4)]
        row = dict(activity_label="Cooking", ctx_a=phrase(rng, 3, 9), ctx_b="she", endings=endings)
        hellaswag.append(row | {"label": str(number % 4)})
        row = dict(goal=phrase(rng, 2, 8), sol1=phrase(rng, 1, 6), sol2=phrase(rng, 1, 6))
        piqa.append(row | {"label": number % 2})
    texts = [phrase(rng, 3, 9) for _ in range(20)]
    lambada = [{"text": text} for text in texts]
    for name, rows in (
        ("Rowan/hellaswag/train", hellaswag[:1]),
        ("Rowan/hellaswag/validation", hellaswag),
        ("baber/piqa/train", piqa[:1]),
        ("baber/piqa/validation", piqa),
        ("EleutherAI/lambada_openai/test", lambada),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_lines(folder / f"{name}.jsonl", rows)
    run(guide_commands()[-2], folder)
    questions = []
    for row in hellaswag:
        questions.append((f"Cooking: {row['ctx_a']} She", row["endings"], int(row["label"])))
    assert check_choices(harness, "hellaswag", questions) == ["acc", "acc_norm"]
    questions = []
    for row in piqa:
        query = f"Question: {row['goal']}\nAnswer:"
        questions.append((query, [row["sol1"], row["sol2"]], row["label"]))
    assert check_choices(harness, "piqa", questions) == ["acc", "acc_norm"]
    figures, rows = read_results(folder, "lambada_openai")
    scores = []
    for row, text in zip(rows, texts, strict=True):
        context, space, word = text.rpartition(" ")
        scores.append(our_score(network, tokenizer, context, space + word))
        check_scores(row, scores[-1:])
    assert figures["acc,none"] == pytest.approx(statistics.fmean(hit for _, hit in scores))
    nats = -statistics.fmean(logp for logp, _ in scores)
    assert figures["perplexity,none"] == pytest.approx(math.exp(nats), rel=1e-3)
