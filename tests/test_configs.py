"""configs/*.env: heads that say what to expect, no dead line, settings that fit; a tiny run of
each; run.sh.
"""

import importlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import train_gpt as T
from conftest import ROOT, environment, load_script, read_json, start, write_lines

NAMES = sorted(path.stem for path in ROOT.glob("configs/*.env"))
configs = pytest.mark.parametrize("name", NAMES)
# Tiny runs of every day: one of each kind. ./test.sh full makes those of the other configs.
DAILY = ("cpu", "environment", "wiggle_max_speed")
# A setting (regular expression), and whether the others leave it anything to do.
EFFECTS = (
    ("attn_window", lambda s: "s" in s.layer_pattern.lower()),
    ("num_kv_heads|qk_.*|rope_.*", lambda s: re.search("[as]", s.layer_pattern.lower())),
    ("rope_.*", lambda s: s.positions == "rope"),
    ("warmdown_frac", lambda s: not s.warmdown_iters),
    ("warmdown_.*|lr_floor", lambda s: s.lr_schedule != "constant"),
    ("reserve_seconds", lambda s: s.max_wallclock_seconds),
    ("compile_mode", lambda s: s.compile),
    ("label_smoothing", lambda s: s.objective in ("cdpo", "robust")),
    ("margin|centering", lambda s: s.objective == "reward"),
    ("beta", lambda s: getattr(s, "objective", "dpo") != "reward"),
    ("kd_.*", lambda s: s.teacher),
    ("lora_alpha", lambda s: s.lora_rank),
)


def parts(path):
    """Return the lines of a config's head, and its settings by name, each once."""
    lines = path.read_text(encoding="utf-8").splitlines()
    head = [line for line in lines if line.startswith("#")]
    settings = [re.fullmatch("([A-Z][A-Z0-9_]*)=(.*)", line) for line in lines[len(head) :]]
    assert all(settings), "NAME=value alone"
    named = dict(match.groups() for match in settings)
    assert len(named) == len(settings), "a name occurs twice"
    return head, named


def commands(head):
    """Return (CONFIG, launcher, script) of each command in a head."""
    text = "\n".join(re.sub("^# *", "", line) for line in head).replace("\\\n", " ")
    return re.findall(r"CONFIG=(\S+)(?: +\w+=\S+)* +(python|torchrun [^\n]*?) +(\w+)\.py\b", text)


def load(script, path):
    """A script, and its settings by a config, as its main() loads them."""
    module = importlib.import_module(script)
    presets = {}
    if script == "train_gpt":
        presets = {"ARCH_MODE": module.ARCH_PRESETS, "OPTIMIZER": module.OPTIMIZER_PRESETS}
    return module, module.load_settings(module.Settings, {"CONFIG": str(path)}, presets=presets)


@configs
def test_a_head_says_what_to_run_and_what_to_expect(name):
    path = ROOT / "configs" / f"{name}.env"
    head, _ = parts(path)
    text = " ".join(head)
    assert {config for config, _, _ in commands(head)} == {f"configs/{path.name}"}
    assert re.search(r"\b(GPUs?|CPU)\b", text) and re.search(r"\b\d+ (s|steps|minutes)\b", text)
    files = re.findall(r"\b(?:docs|records|configs)/[\w./-]+", text)
    assert [file for file in files if not (ROOT / file.rstrip(".")).exists()] == []
    if not re.search("not yet run", text, re.I):
        assert re.search(r"\bexpect\b.*\b(docs|records)/", text, re.I) and "record" in text


@configs
def test_no_line_is_dead(name, tmp_path):
    """Without the line the settings differ, and the others leave it something to do."""
    path = ROOT / "configs" / f"{name}.env"
    head, lines = parts(path)
    for _, _, script in commands(head):
        _, settings = load(script, path)
        for line in lines:
            others = [f"{key}={text}\n" for key, text in lines.items() if key != line]
            (tmp_path / "without.env").write_text("".join(others))
            _, without = load(script, tmp_path / "without.env")
            assert replace(settings, config="") != replace(without, config=""), line
            effects = [acts for pattern, acts in EFFECTS if re.fullmatch(pattern, line.lower())]
            assert all(acts(settings) for acts in effects), line


@configs
def test_every_script_that_a_head_names_takes_the_config(name):
    """Types, ranges, and the numbers that must fit together: phases, shape, the batch over the
    command's ranks.
    """
    path = ROOT / "configs" / f"{name}.env"
    head, lines = parts(path)
    for _, launcher, script in commands(head):
        module, settings = load(script, path)
        assert all(module.setting_text(getattr(settings, key.lower())) for key in lines)
        module.Plan(settings)
        if script == "train_gpt":
            config = module.model_config(settings, 1024, 1)
            ranks = int(*re.findall(r"nproc_per_node=(\d+)", launcher) or [1])
            assert settings.train_batch_tokens % (ranks * settings.train_seq_len) == 0
            with torch.device("meta"):
                count = sum(param.numel() for param in module.GPT(config).parameters())
            said = re.findall(r"([\d,]+) parameters", " ".join(head))
            assert said in ([], [f"{count:,}"])


# ------------------------------------------------------------------------------------------- run.sh
def run_sh(*patterns):
    """Return the parts of run.sh that regular expressions match, each once."""
    text = (ROOT / "run.sh").read_text(encoding="utf-8")
    found = ""
    for pattern in patterns:
        (part,) = re.findall(pattern, text, re.M | re.S)
        found += part
    return found


def bash(code, folder=ROOT, **variables):
    """Return what bash prints in a folder."""
    words = ["bash", "-euc", code]
    path = {"PATH": os.environ["PATH"]}
    done = subprocess.run(words, capture_output=True, text=True, cwd=folder, env=path | variables)
    assert done.stderr == ""
    return done.stdout


SETTING, PLANNED = r"^setting\(\) \{.*?^\}\n", r"^planned_shards\(\) \{.*?^\}\n"
STEP_TOKENS = r"^step_tokens\(\) \{.*?^\}\n"


def test_run_sh_picks_a_config_unless_one_or_a_run_is_given():
    code = 'cpu_speed() { echo "$speed"; }; read_config() { :; }; say() { :; }; CONFIG_LINES=\n'
    code += run_sh(SETTING, r'^  if \[ -z "\$\{CONFIG-\}\$.*?^  fi\n') + 'echo "${CONFIG-}"'
    cases = """cpu_small 0 249, cpu 0 250, golf_1gpu 1 9, golf_1gpu 2 9, golf_1gpu 3 9,
        golf_8gpu 4 9, golf_8gpu 5 9, golf_8gpu 6 9, golf_8gpu 7 9, golf_8gpu 8 9"""
    for name, gpus, speed in map(str.split, cases.split(",")):
        given = dict(gpus=gpus, speed=speed)
        picked = bash(code, **given).strip()
        assert picked == f"configs/{name}.env" and (ROOT / picked).is_file()
        # A stored run has its own settings.
        for name, shown in dict(CONFIG="x.env\n", RESUME="\n", REPLAY="\n").items():
            assert bash(code, **{name: "x.env"}, **given) == shown


def test_run_sh_measures_the_speed_of_a_cpu():
    code = f"RUN={sys.executable}\n" + run_sh(r"^cpu_speed\(\) \{.*?^\}\n") + "cpu_speed"
    assert 1 < int(bash(code, OMP_NUM_THREADS="1")) < 1_000_000


@pytest.mark.parametrize(
    ("given", "folder"),
    [
        ({}, "runs/new"),
        (dict(OUT_DIR="/disk"), "/disk/new"),
        (dict(RESUME="old"), "runs/old"),
        (dict(RESUME="old", OUT_DIR="/disk"), "/disk/old"),
        (dict(RESUME="/disk/old", OUT_DIR="else"), "/disk/old"),
    ],
)
def test_run_sh_samples_from_the_run_that_is_resumed(given, folder):
    code = run_sh(r"^run_folder\(\) \{.*?^\}\n", SETTING)
    assert bash(f"CONFIG_LINES=\n{code}run_folder", RUN_ID="new", **given) == folder


def with_config(code, case, folder=ROOT):
    """Return what bash prints for a case: a config, the number of GPUs, settings of the environment."""
    config, gpus, *given = case.split()
    lines = "\n".join(map("=".join, T.read_config(ROOT / f"configs/{config}.env").items()))
    variables = dict(word.split("=") for word in given)
    return bash(code, folder, CONFIG_LINES=lines, gpus=gpus, **variables)


def test_run_sh_takes_as_many_gpus_as_share_a_step_evenly():
    code = run_sh(SETTING, STEP_TOKENS)
    tokens = bash(f"{code}step_tokens", CONFIG_LINES="")
    assert tokens == str(T.Settings.train_batch_tokens)
    code += run_sh(r"^planned_ranks\(\) \{.*?^\}\n") + "planned_ranks $gpus"
    for config, ranks in {"golf_1gpu": "1224", "golf_8gpu": "12344668"}.items():
        for gpus, taken in enumerate(ranks, 1):
            assert with_config(code, f"{config} {gpus}") == taken
    assert with_config(code, "golf_1gpu 3 TRAIN_BATCH_TOKENS=6144 TRAIN_SEQ_LEN=2048") == "3"


def test_run_sh_downloads_as_many_tokens_as_the_run_reads():
    for case, shards in {
        "golf_8gpu 8": "96",  # 600 s at 16 million tokens/s
        "golf_1gpu 1": "12",
        "golf_1gpu 2 MAX_WALLCLOCK_SECONDS=60.5": "3",
        "gdn_hybrid 8": "18",  # 2,200 steps of 786,432 tokens
        "gdn_hybrid 8 ITERATIONS=100": "1",
    }.items():
        code = run_sh(SETTING, STEP_TOKENS, PLANNED)
        assert with_config(code + "planned_shards $gpus", case) == shards


def test_run_sh_takes_a_newer_python_than_that_of_the_system(tmp_path):
    """As on macOS, where python3 is 3.9."""
    code = run_sh(r"^find_python\(\) \{.*?^\}\n") + 'find_python; echo "$PYTHON"'
    (tmp_path / "python3").write_text('#!/bin/sh\ncase "$2" in *exit*) exit 1; esac; echo 3.9')
    (tmp_path / "python3").chmod(0o755)
    (tmp_path / "python3.14").symlink_to(sys.executable)
    assert bash(code, PATH=f"{tmp_path}:{os.environ['PATH']}") == "python3.14\n"


def test_run_sh_finds_out_which_data_to_make(tmp_path):
    shards = tmp_path / "data/datasets/fineweb10B_sp1024"
    shards.mkdir(parents=True)
    (shards / "manifest.json").touch()
    code = run_sh(SETTING, r'^  path="\$\(setting DATA_PATH\)"\n  \[.*?^    fail [^\n]*\n')
    code = f'fail() {{ echo refused; exit; }}\n{code}echo "$data"'
    code = f'DATA="${{DATA-}}" SHARDS="${{SHARDS-}}" data=""\n{code}'
    for case, made in {
        "cpu 0": "embedded",
        "golf_8gpu 8": "fineweb",  # the config's folder is not there
        "golf_1gpu 1": "",  # it is
        "golf_8gpu 8 DATA=embedded": "embedded",
        "golf_8gpu 8 DATA_PATH=data/mine DATA=embedded": "",
        "grpo 1": "fineweb",  # it names no folder
        "golf_1gpu 1 SHARDS=2": "fineweb",  # there may be fewer
        "cpu 0 SHARDS=2": "refused",
        "cpu 0 SHARDS=2 DATA=fineweb": "fineweb",
        "golf_8gpu 8 SHARDS=2 DATA=embedded": "refused",
        "golf_8gpu 8 SHARDS=2 DATA_PATH=data/mine": "refused",
    }.items():
        assert with_config(code, case, tmp_path) == f"{made}\n", case


def test_run_sh_names_two_runs_of_a_second_apart():
    code = run_sh(SETTING, r'^  \[ -n "\$\(setting RESUME\)" \] [^\n]*\n') + 'echo "$RUN_ID"'
    names = [bash(f"date() {{ echo now; }}\nCONFIG_LINES=\n{code}") for _ in range(2)]
    assert names[0] != names[1] and all(name.startswith("run_now_") for name in names)


@pytest.mark.parametrize("link", [False, True])
def test_run_sh_leaves_an_environment_of_others_as_it_is(tmp_path, link):
    """Before 2026-11-27 it emptied any .venv, also behind a link."""
    shutil.copy(ROOT / "run.sh", tmp_path)
    shutil.copy(ROOT / "requirements.txt", tmp_path)
    others = tmp_path / ("theirs" if link else ".venv")
    others.mkdir()
    (others / "package").touch()
    if link:
        (others / "stamp").write_text("of another version")
        (tmp_path / ".venv").symlink_to(others)
    done = subprocess.run([tmp_path / "run.sh", "--setup-only"], capture_output=True, text=True)
    assert done.returncode == 1 and "run.sh did not make this .venv" in done.stderr
    assert (others / "package").is_file()


# ---------------------------------------------------------------------------------------- tiny runs
SHORT = dict(DEVICE="cpu", ITERATIONS=8, MAX_WALLCLOCK_SECONDS=0, SAVE_EVERY=0, EVAL_PROMPTS=8)
ROLLOUT = dict(SHORT, PROMPTS_PER_STEP=4, GROUP_SIZE=4, MINI_BATCHES=2, MAX_NEW_TOKENS=10)
NETWORK = dict(MODEL_DIM=32, NUM_HEADS=2, NUM_KV_HEADS=1, COMPILE=0, EVAL_STRIDE=0)
SIZES = {
    "train_gpt": dict(SHORT, **NETWORK, TRAIN_SEQ_LEN=32, TRAIN_BATCH_TOKENS=256),
    "train_sft": dict(SHORT, TRAIN_SEQ_LEN=64, TRAIN_BATCH_TOKENS=256),
    "train_dpo": dict(SHORT, PAIRS_PER_STEP=8, INIT_FROM="start"),
    **dict.fromkeys(["train_ppo", "train_grpo", "train_gspo"], dict(ROLLOUT, INIT_FROM="start")),
}
del SIZES["train_gpt"]["EVAL_PROMPTS"]
# Of those that a config sets.
SMALLER = dict(WARMDOWN_ITERS=2, BIGRAM_VOCAB_SIZE=64)
# One process: importing torch for each config would take longer than the runs.
EACH = """
import importlib, json, os, sys, traceback
sys.path.insert(0, sys.argv[1])
for name, script, changes in json.loads(sys.argv[2]):
    module = importlib.import_module(script)
    os.environ.clear()
    os.environ.update(changes)
    sys.argv = [f"{script}.py"]  # the script reads its own arguments
    try:
        print("exit", name, module.exit_code(module.main), flush=True)
    except Exception:
        traceback.print_exc()
"""


def tiny_settings(name):
    """Return the script of a config's first command, and the settings that make it tiny."""
    head, lines = parts(ROOT / "configs" / f"{name}.env")
    script = commands(head)[0][2]
    smaller = {key: value for key, value in SMALLER.items() if key in lines}
    return script, SIZES[script] | smaller


def write_files_of_users(data):
    """Write small files under the names that the configs of published models have."""
    (data / "tasks.py").symlink_to(ROOT / "data" / "tasks.py")
    (data / "gsm8k").mkdir()
    tasks = load_script(ROOT / "data" / "tasks.py")
    rows = [{"question": q, "answer": a} for q, a in tasks.make_problems("story", 100, 0)]
    write_lines(data / "gsm8k" / "train.jsonl", rows)
    conversations = []
    pairs = []
    for prompt, answer in tasks.make_problems("sort", 100, 0):
        question = {"role": "user", "content": prompt}
        right, wrong = ({"role": "assistant", "content": text} for text in (answer, prompt + "0"))
        conversations.append({"messages": [question, right]})
        pairs.append({"chosen": [question, right], "rejected": [question, wrong]})
    write_lines(data / "conversations.jsonl", conversations)
    write_lines(data / "hh_rlhf.jsonl", pairs)


def asked(request):
    """Return the configs that a test below needs, among those which pytest is to run."""
    items = [
        item
        for item in request.session.items
        if getattr(item, "originalname", "") == "test_a_tiny_run"
    ]
    return {"cpu"} | {item.callspec.params["name"] for item in items}


@pytest.fixture(scope="session")
def runs(tmp_path_factory, tiny_data, request):
    """Return a folder with 8 steps of every config that is asked for, and what they printed."""
    folder = tmp_path_factory.mktemp("configs")
    (folder / "each.py").write_text(EACH)
    for task in ("sort", "reverse"):
        words = f"{task} --problems 200 --pairs 100 --out {folder}/data".split()
        assert load_script(ROOT / "data" / "tasks.py").main(words) is None
    write_files_of_users(folder / "data")
    (folder / "docs").symlink_to(ROOT / "docs")  # where the examples of environments are
    (folder / "runs").mkdir()
    (folder / "runs" / "qwen").symlink_to(folder / "start")
    own = environment(**SIZES["train_sft"], OUT_DIR=".", RUN_ID="start")
    orders = [("start", "train_sft", own)]
    for name in sorted(asked(request)):
        script, sizes = tiny_settings(name)
        paths = {"CONFIG": ROOT / "configs" / f"{name}.env", "OUT_DIR": ".", "RUN_ID": name}
        if script == "train_gpt":
            paths["DATA_PATH"] = tiny_data
        orders.append((name, script, environment(**sizes, **paths)))
    done = start([folder / "each.py", ROOT, json.dumps(orders)], environment(), folder)
    return folder, done


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in DAILY else pytest.mark.full) for name in NAMES]
)
def test_a_tiny_run(runs, name):
    """It learns, packs and scores, by the settings of the config but for the sizes."""
    place, done = runs
    assert f"exit {name} 0\n" in done.stdout, done.stdout[-1000:] + done.stderr[-3000:]
    path = ROOT / "configs" / f"{name}.env"
    script, sizes = tiny_settings(name)
    module, settings = load(script, path)
    result = read_json(place / name / "result.json")
    assert (result["script"], result["steps"]) == (f"{script}.py", 8)
    expected = {key.lower(): getattr(settings, key.lower()) for key in {*parts(path)[1]} - {*sizes}}
    expected.pop("data_path", None)
    assert result["settings"].items() >= {**expected, "config": str(path)}.items()
    assert all(phase["steps"] for phase in result["phases"].values())
    _, tensors, _ = module.read_artifact(place / name / "model.upar")
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    if script != "train_gpt":
        assert {"before", "after", "gain"} <= set(result)
        return
    lines = (place / name / "metrics.jsonl").read_text().splitlines()
    losses = [row["train_loss"] for row in map(json.loads, lines) if "train_loss" in row]
    assert len(losses) == 8 and losses[-1] < losses[0] == pytest.approx(math.log(400), abs=0.1)
    before = result["before_quantization"]["val_bpb"]
    assert result["val_bpb"] == pytest.approx(before, rel=0.03)


def test_run_sh_reads_a_config_and_behind_it_the_settings_of_a_resumed_run(runs, tmp_path):
    path = tmp_path / "my own.env"
    path.write_text("export OUT_DIR='my runs # 2'  # quoted\r\n# DATA_PATH=x\nCOMPILE = 0\n")
    stopped = Path(shutil.copytree(runs[0] / "cpu", tmp_path / "stopped"))
    (stopped / "result.json").unlink()
    code = run_sh(r"^read_config\(\) \{.*?^\}\n", SETTING)
    code += "read_config; for name in OUT_DIR DATA_PATH COMPILE; do setting $name; echo; done"
    given = dict(RUN=sys.executable, CONFIG=str(path))
    assert bash(code, **given) == "my runs # 2\n\n\n0\n\n"
    data = read_json(runs[0] / "cpu" / "result.json")["settings"]["data_path"]
    assert bash(code, RESUME=str(stopped), **given) == f"my runs # 2\n\n{data}\n\n0\n\n"
