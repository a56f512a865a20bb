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
from conftest import ROOT, blocks, environment, read_json, write_lines

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not find_spec("lm_eval"), reason="lm_eval: no requirements-eval.txt"),
]
CONTEXT = 96  # of the model, tokens
WORDS = (
    "the a of network größer 日本 layer naïve token state value 12345 returns if else with".split()
)


def phrase(rng, least, most):
    return " ".join(rng.choice(WORDS, rng.integers(least, most)))


@pytest.fixture(scope="module")
def harness(transformers, tmp_path_factory):
    """Return (folder, network, tokenizer) after the guide's commands before lm_eval.

    The folder has the exported model; network and tokenizer are those that sample.py loads.
    """
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
    """Return the guide's commands for the harness: install, import, export, and lm_eval twice."""
    text = "".join(block for block in blocks("scoring.md", "bash") if "lm_eval" in block)
    commands = text.splitlines()
    assert [command.split()[0] for command in commands[:3]] == ["pip", "python", "python"]
    assert len(commands) == 5
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
    figures = read_json(results.with_suffix(".json"))["results"][task]
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    return figures, sorted(rows, key=lambda row: row["doc_id"])


@torch.no_grad()
def our_scores(harness, context, answers):
    """Return the log-probabilities of answers, and whether greedy decoding gives each.

    An answer is encoded with its context, which begins with BOS and may lose its beginning.
    """
    _, network, tokenizer = harness
    before = tokenizer.encode(context)
    scores = []
    for answer in answers:
        target = tokenizer.encode(context + answer)[len(before) :]
        ids = [tokenizer.bos_id, *before, *target][-CONTEXT - 1 :]
        logps = network(torch.tensor([ids[:-1]]))[0].double().log_softmax(-1)[-len(target) :]
        total = math.fsum(logps[place, token].item() for place, token in enumerate(target))
        scores.append((total, logps.argmax(-1).tolist() == target))
    return scores


def check_scores(row, scores):
    """Check the harness's log-probabilities of a row, and greedy answers."""
    for [(logp, hit)], (our_logp, our_hit) in zip(row["resps"], scores, strict=True):
        assert float(logp) == pytest.approx(our_logp, abs=2e-4) and hit == str(our_hit)


def check_choices(harness, task, questions):
    """Check a task's log-probabilities and accuracies; questions: (context, choices, number of the right one)."""
    figures, rows = read_results(harness[0], task)
    right = {"acc": [], "acc_norm": [], "acc_bytes": []}
    for row, (context, choices, gold) in zip(rows, questions, strict=True):
        scores = our_scores(harness, context, [" " + choice for choice in choices])
        check_scores(row, scores)
        logps = np.array([logp for logp, _ in scores])
        letters = [len(choice) for choice in choices]
        sizes = [len(choice.encode()) for choice in choices]
        for name, lengths in (("acc", 1), ("acc_norm", letters), ("acc_bytes", sizes)):
            right[name].append(int(np.argmax(logps / lengths) == gold))
    for name, marks in right.items():
        if f"{name},none" in figures:
            assert figures[f"{name},none"] == pytest.approx(statistics.fmean(marks))
            assert 0 < sum(marks) < len(rows)
    assert len({tuple(marks) for marks in right.values()}) == 3  # each is a figure of its own


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
    check_choices(harness, "capitals", questions)


def test_published_tasks(harness):
    """HellaSwag, PIQA and LAMBADA as the harness describes them, with local rows in place of downloads."""
    folder, *_ = harness
    rng = np.random.default_rng(1)
    files = {"Rowan/hellaswag": [], "baber/piqa": [], "EleutherAI/lambada_openai": []}
    hellaswag, piqa, lambada = files.values()
    questions = {"hellaswag": [], "piqa": []}
    for number in range(50):
        first, *endings = (phrase(rng, 2, 8) for _ in range(5))
        row = dict(activity_label="Cooking", ctx_a=first, ctx_b="she", endings=endings)
        hellaswag.append(row | {"label": str(number % 4)})
        questions["hellaswag"].append((f"Cooking: {first} She", endings, number % 4))
        piqa.append(dict(goal=first, sol1=endings[0], sol2=endings[1], label=number % 2))
        query = f"Question: {first}\nAnswer:"
        questions["piqa"].append((query, endings[:2], number % 2))
        lambada.append({"text": f"{first} {rng.choice(WORDS)}"})
    for name, rows in files.items():
        (folder / name).mkdir(parents=True)
        for split in ("train", "validation", "test"):
            write_lines(folder / name / f"{split}.jsonl", rows)
    run(guide_commands()[-2], folder)
    for task, asked in questions.items():
        check_choices(harness, task, asked)
    figures, rows = read_results(folder, "lambada_openai")
    scores = []
    for row, line in zip(rows, lambada, strict=True):
        context, space, word = line["text"].rpartition(" ")
        scores += our_scores(harness, context, [space + word])
        check_scores(row, scores[-1:])
    logps, hits = np.transpose(scores)
    assert figures["acc,none"] == pytest.approx(hits.mean())
    assert figures["perplexity,none"] == pytest.approx(math.exp(-logps.mean()), rel=1e-3)
