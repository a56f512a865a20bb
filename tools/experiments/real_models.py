"""Take small models of published layouts through all that is done with them, on a CPU.

    python tools/experiments/real_models.py [--layouts qwen3_5 llama] [--out runs/real] [--write docs/lab/FILE]

For each layout: a tokenizer of its kind is trained, train_gpt.py trains a network of its preset on
sums (120 s), and `convert.py export` and the tokenizer's files make the folder of a published
model. It knows the sums, and writes answers in four forms. From there a user goes on: import, ten steps
of supervised fine-tuning, GRPO and GSPO (100 s each) with the strict reward of GSM8K, export in the
form of the original. The last step compares greedy answers with those of transformers. A run that
has ended is not repeated, and one that was broken off begins anew.

Needs transformers and tokenizers. Gains are of held-out problems, with 95% intervals, paired.
"""

import argparse
import itertools
import json
import random
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tools/

from common import ROOT, call_script, has_ended, load_script, markdown_table

PROBLEMS = "data/tasks.py"
LAYOUTS = {
    "qwen3_5": dict(bos="<|endoftext|>", digits=1, end="<|im_end|>"),
    "llama": dict(bos="<|begin_of_text|>", digits=3, end="<|eot_id|>"),
}
# Texts are split into words, numbers of a few digits, and what is between; as in published models.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,{digits}}}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The roles are words, as in the template of DeepSeek LLM: pretraining has seen them.
TEMPLATE = (
    "{{{{ bos_token if bos_token else '' }}}}{{% for message in messages %}}"
    "{{% if message.role == 'user' %}}User: {{{{ message.content }}}}\n\n"
    "{{% else %}}Assistant:\n{{{{ message.content }}}}{end}{{% endif %}}{{% endfor %}}"
    "{{% if add_generation_prompt %}}Assistant:\n{{% endif %}}"
)
# A base answers in any of these forms; post-training wants the last one.
FORMS = ("{sum}", "It is {sum}.", "{asked}{sum}", "#### {sum}")
SHAPE = dict(model_dim=64, num_heads=4, num_layers=4, train_seq_len=128)
SPEED = dict(save_every=0, val_loss_every=0)
PRETRAINING = dict(train_batch_tokens=2048, qat=0, eval_stride=0)
# The start has just begun to learn which form is wanted.
TUNING = dict(
    iterations=10,
    max_wallclock_seconds=0,
    qat=0,
    ema=0,
    swa=0,
    learning_rate=0.0001,
    train_batch_tokens=2048,
    train_seq_len=128,
)
# It goes on from a checkpoint, whose weights are not rounded, and is packed in fine codes: coarse ones
# would lose the small changes of reinforcement learning.
RL = dict(
    qat=0,
    matrix_bits=8,
    learning_rate=0.0001,
    temperature=1,
    max_new_tokens=12,
    mini_batches=2,
    eval_prompts=200,
    reward=f"{PROBLEMS}:gsm8k_strict",
)
RL_SCRIPTS = {"GRPO": "train_grpo.py", "GSPO": "train_gspo.py"}
CHECKED = 50  # problems whose greedy answers are compared with those of transformers


def write_problems(out: Path) -> None:
    """Write sums of two numbers: rows for post-training, and texts to train a base on.

    Texts have no problem that post-training holds out. Half of them are conversations in words, and
    answers have one of the FORMS, as in the texts from which published models have learned.
    """
    sft = load_script(ROOT / "train_sft.py")
    rows = []
    for a, b in itertools.product(range(10, 100), range(1, 50)):
        rows.append({"prompt": f"{a}+{b}=?", "answer": f"#### {a + b}"})
    rng = random.Random(1)
    rng.shuffle(rows)
    learned = [row for row in rows if sft.prompt_key([("<|user|>", row["prompt"])]) % 10]
    texts = []
    for number in range(100):  # the same sums in another order
        rng.shuffle(learned)
        turns = ("{}\n{}\n", "User: {}\n\nAssistant:\n{}\n")[number % 2]
        for begin in range(0, len(learned), 20):
            text = ""
            for row in learned[begin : begin + 20]:
                numbers = dict(sum=row["answer"].split()[1], asked=row["prompt"][:-1])
                text += turns.format(row["prompt"], rng.choice(FORMS).format(**numbers))
            texts.append({"text": text})
    for path, content in ((out / "sums.jsonl", rows), (out / "texts.jsonl", texts)):
        path.write_text("".join(json.dumps(row) + "\n" for row in content), encoding="utf-8")


def write_tokenizer(layout: str, out: Path, folder: Path) -> None:
    """Train a tokenizer of 300 pieces on the texts, and write its files as a published model has."""
    import tokenizers
    from tokenizers import pre_tokenizers

    kind = LAYOUTS[layout]
    is_llama = layout == "llama"
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(ignore_merges=is_llama))
    if not is_llama:
        tokenizer.normalizer = tokenizers.normalizers.NFC()
    split = tokenizers.Regex(SPLIT.format(digits=kind["digits"]))
    steps = [pre_tokenizers.Split(split, "isolated")]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    lines = (out / "texts.jsonl").read_text(encoding="utf-8").splitlines()[:500]
    tokenizer.train_from_iterator([json.loads(line)["text"] for line in lines], trainer)
    tokenizer.add_special_tokens([kind["bos"], kind["end"]])
    bos_id = tokenizer.token_to_id(kind["bos"])
    config = {"eos_token": kind["end"], "chat_template": TEMPLATE.format(end=kind["end"])}
    if is_llama:
        config["bos_token"] = kind["bos"]
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{kind['bos']} $A", special_tokens=[(kind["bos"], bos_id)]
        )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    stop = [tokenizer.token_to_id(kind["end"]), bos_id]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stop}))


def publish(layout: str, out: Path) -> Path:
    """Return the folder of a model that train_gpt.py has trained, as one that is published."""
    folder = out / layout / "published"
    files = out / layout / "tokenizer"
    if folder.is_dir():
        return folder
    write_tokenizer(layout, out, files)
    convert = load_script(ROOT / "convert.py")
    ranks = files / "imported.tiktoken"
    ranks.write_bytes(convert.hf_tokenizer(files).content)
    shards = out / layout / "shards"
    if not shards.is_dir():
        words = ("--tokenizer", ranks, "--name", "sums", "--out", shards)
        call_script("data/prepare.py", out / "texts.jsonl", *words)
    runs = dict(out_dir=out / layout, run_id="pretrained", max_wallclock_seconds=120)
    call_script(
        "train_gpt.py", arch_mode=layout, data_path=shards, **runs, **SHAPE, **SPEED, **PRETRAINING
    )
    call_script("convert.py", "export", out / layout / "pretrained", folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(files / name, folder)
    return folder


def post_train(layout: str, out: Path, folder: Path) -> dict[str, dict]:
    """Return the results of supervised fine-tuning, GRPO and GSPO by name."""
    runs = out / layout
    if not (runs / "imported").is_dir():
        call_script("convert.py", "import", folder, runs / "imported")
    problems = out / "sums.jsonl"
    if not has_ended(runs / "SFT"):
        given = dict(out_dir=runs, init_from=runs / "imported")
        call_script("train_sft.py", run_id="SFT", train_files=problems, **given, **SPEED, **TUNING)
    for name, script in RL_SCRIPTS.items():
        if not has_ended(runs / name):
            (start,) = (runs / "SFT").glob("step_*")
            given = dict(out_dir=runs, init_from=start, max_wallclock_seconds=100)
            call_script(script, run_id=name, train_files=problems, **given, **SPEED, **RL)
    names = ("SFT", *RL_SCRIPTS)
    return {name: json.loads((runs / name / "result.json").read_bytes()) for name in names}


def equal_answers(layout: str, out: Path, name: str, folder: Path) -> dict[str, int]:
    """Return how many greedy answers of a run are those that transformers gives from its export.

    Differences whose first token is a near tie, where logits differ by less than 1e-4, are counted
    apart.
    """
    import torch

    sys.modules["fla"] = None  # transformers would take its kernels, which need a GPU
    import transformers

    exported = out / layout / f"{name}_exported"
    if not exported.is_dir():
        call_script("convert.py", "export", out / layout / name, exported, "--like", folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    theirs = transformers.AutoTokenizer.from_pretrained(exported)
    script = load_script(ROOT / "train_grpo.py")
    (checkpoint,) = script.list_checkpoints(out / layout / name)[:1]
    network, tokenizer, _ = script.load_model("INIT_FROM", str(checkpoint))
    lines = (out / "sums.jsonl").read_text(encoding="utf-8").splitlines()
    counts = {"equal": 0, "near ties": 0, "of": CHECKED}
    for line in lines[:CHECKED]:
        question = json.loads(line)["prompt"]
        turns = [{"role": "user", "content": question}]
        asked = theirs.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt")
        ids = asked["input_ids"]
        assert ids[0].tolist() == script.asked_ids(tokenizer, [("<|user|>", question)])
        answer = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.size(1) :].tolist()
        (ours,) = script.generate(
            network, [ids[0].tolist()], 1, 12, 0.0, [(0,)], script.stop_ids(tokenizer)
        )
        if answer == ours.ids:
            counts["equal"] += 1
            continue
        common = next(
            i for i, pair in enumerate(zip(answer, ours.ids, strict=False)) if pair[0] != pair[1]
        )
        both = torch.cat([ids, torch.tensor([answer[:common]], dtype=ids.dtype)], dim=1)
        top = model(both).logits[0, -1].topk(2).values
        counts["near ties"] += int(top[0] - top[1] < 1e-4)
    return counts


def main() -> None:
    """Run the command line described at the top of this file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layouts", nargs="+", default=[*LAYOUTS], choices=LAYOUTS)
    parser.add_argument("--out", type=Path, default=Path("runs/real"))
    parser.add_argument("--write", type=Path, help="JSON file of all figures")
    args = parser.parse_args()
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    write_problems(out)
    figures = {}
    rows = []
    for layout in args.layouts:
        folder = publish(layout, out)
        results = post_train(layout, out, folder)
        for name in RL_SCRIPTS:
            result = results[name]
            answers = equal_answers(layout, out, name, folder)
            keys = ("before", "after", "gain", "steps", "train_seconds", "hardware", "versions")
            figures[f"{layout} {name}"] = {key: result[key] for key in keys} | answers
            scores = [result[key]["greedy"] for key in ("before", "after", "gain")]
            cells = ["{:.3f} [{:.3f}, {:.3f}]".format(*score) for score in scores]
            rows.append([layout, name, *cells, f"{answers['equal']} of {answers['of']}"])
    head = ["layout", "script", "greedy before", "after", "gain", "answers as transformers'"]
    print(markdown_table([head, *rows]))
    if args.write:
        args.write.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
