"""configs/*.env: heads that say what to expect, no dead line, settings that fit; a tiny run of each; run.sh."""

import importlib
import json
import math
import re
import subprocess
from pathlib import Path

import pytest
import torch
from conftest import environment
from test_smoke import VOCAB, asked, place, start  # noqa: F401 (a fixture)

ROOT = Path(__file__).resolve().parents[1]
NAMES = sorted(path.stem for path in ROOT.glob("configs/*.env"))
configs = pytest.mark.parametrize("name", NAMES)
# Their tiny runs are made by ./test.sh full alone; others of their kind are made every day.
LONG = "gdn_pure golf_1gpu reward wiggle_balanced wiggle_best_loss wiggle_low_memory".split()
LINES = 15
# A setting (regular expression), and whether the others leave it anything to do.
EFFECTS = (
    ("attn_window", lambda s: "s" in s.layer_pattern.lower()),
    ("num_kv_heads|qk_.*|rope_.*", lambda s: re.search("[as]", s.layer_pattern.lower())),
    ("rope_.*", lambda s: s.positions == "rope"),
    ("warmdown_frac", lambda s: not s.warmdown_iters),
    ("warmdown_.*|lr_floor", lambda s: s.lr_schedule != "constant"),
    ("reserve_seconds", lambda s: s.max_wallclock_seconds),
    ("compile_mode", lambda s: s.compile),
    ("critic_lr", lambda s: s.critic == "separate"),
    ("label_smoothing", lambda s: s.objective in ("cdpo", "robust")),
    ("margin|centering", lambda s: s.objective == "reward"),
    ("beta|reference", lambda s: getattr(s, "objective", "dpo") != "reward"),
    ("kd_.*", lambda s: s.teacher),
    ("lora_alpha", lambda s: s.lora_rank),
)


def parts(path):
    """The lines of a config's head and its settings by name. AssertionError: a comment below the head, a name twice."""
    lines = path.read_text(encoding="utf-8").splitlines()
    head = lines[
        : next((at for at, line in enumerate(lines) if not line.startswith("#")), len(lines))
    ]
    pairs = [line.split("=", 1) for line in lines[len(head) :]]
    assert all(re.fullmatch("[A-Z][A-Z0-9_]*", name) and len(rest) == 1 for name, *rest in pairs), (
        "NAME=value alone"
    )
    assert len(dict(pairs)) == len(pairs), "a name stands twice"
    return head, dict(pairs)


def commands(head):
    """(CONFIG, launcher, script) of each command in a head; a command may go on behind a backslash."""
    text = "\n".join(re.sub("^# *", "", line) for line in head).replace("\\\n", " ")
    return re.findall(r"CONFIG=(\S+)(?: +\w+=\S+)* +(python|torchrun [^\n]*?) +(\w+)\.py\b", text)


def load(script, path):
    """A script, and its settings by a config, as its main() loads them."""
    module = importlib.import_module(script)
    presets = (
        {"ARCH_MODE": module.ARCH_PRESETS, "OPTIMIZER": module.OPTIMIZER_PRESETS}
        if script == "train_gpt"
        else {}
    )
    return module, module.load_settings(module.Settings, {"CONFIG": str(path)}, presets=presets)


def value_of(text, kind):
    """The value that a line of a config stands for."""
    return text == "1" if kind is bool else kind(text)


def head_faults(path):
    """What a head should say and does not."""
    head, _ = parts(path)
    text, found = " ".join(head), commands(head)
    files = [
        ROOT / name.rstrip(".") for name in re.findall(r"\b(?:docs|records|configs)/[\w./-]+", text)
    ]
    own = f"configs/{path.name}"
    expected = re.search("not yet run", text, re.I) or (
        re.search(r"\bexpect\b", text, re.I)
        and re.search(r"\b(docs|records)/", text)
        and "record" in text
    )
    return [
        said
        for wrong, said in (
            (
                len(path.read_text(encoding="utf-8").splitlines()) > LINES,
                f"more than {LINES} lines",
            ),
            (not found, "no command"),
            ([each for each in found if each[0] != own], "a command names another config"),
            ([each for each in found if not (ROOT / f"{each[2]}.py").is_file()], "no such script"),
            (not re.search(r"\b(GPUs?|CPU)\b", text), "no hardware"),
            (not re.search(r"\b\d+ (s|steps|minutes)\b", text), "no time"),
            (not expected, "neither an expected score and its source nor 'not yet run'"),
            (
                [file for file in files if not file.exists() and file.name != path.name],
                "a file that is not there",
            ),
        )
        if wrong
    ]


def dead_lines(path, script, folder):
    """Settings that change nothing: without the line all are the same, or others leave it nothing to do."""
    head, lines = parts(path)
    _, settings = load(script, path)
    found = []
    for name in lines:
        (folder / "without.env").write_text(
            "".join(f"{key}={text}\n" for key, text in lines.items() if key != name)
        )
        _, without = load(script, folder / "without.env")
        idle = [
            pattern
            for pattern, acts in EFFECTS
            if re.fullmatch(pattern, name.lower()) and not acts(settings)
        ]
        if idle or {**vars(settings), "config": ""} == {**vars(without), "config": ""}:
            found.append(name)
    return found


@configs
def test_a_head_says_what_to_run_and_what_to_expect(name):
    assert head_faults(ROOT / "configs" / f"{name}.env") == []


@configs
def test_no_line_is_dead(name, tmp_path):
    path = ROOT / "configs" / f"{name}.env"
    for _, _, script in commands(parts(path)[0]):
        assert dead_lines(path, script, tmp_path) == []


@configs
def test_every_script_that_a_head_names_takes_the_config(name):
    """Types, ranges, and the numbers that must fit together: phases, shape, the batch over the command's ranks."""
    path = ROOT / "configs" / f"{name}.env"
    head, lines = parts(path)
    for _, launcher, script in commands(head):
        module, settings = load(script, path)
        for key, text in lines.items():
            value = getattr(settings, key.lower())
            assert value == value_of(text, type(value))
        module.Plan(settings)
        if script != "train_gpt":
            continue
        config = module.model_config(settings, 1024, 1)
        ranks = int(next(iter(re.findall(r"nproc_per_node=(\d+)", launcher)), 1))
        assert settings.train_batch_tokens % (ranks * settings.train_seq_len) == 0
        with torch.device("meta"):
            count = sum(param.numel() for param in module.GPT(config).parameters())
        said = re.findall(r"([\d,]+) parameters", " ".join(head))
        assert [int(each.replace(",", "")) for each in said] in ([], [count])


GOOD = "# One GPU, 8 s; not yet run:\n#   CONFIG=configs/x.env python train_gpt.py\nMODEL_DIM=128\n"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("", "", []),
        ("GPU", "machine", ["no hardware"]),
        ("8 s", "a while", ["no time"]),
        ("not yet run", "good", ["neither an expected score and its source nor 'not yet run'"]),
        ("not yet run", "expect 1.2 (docs/lab.md), no record yet", []),
        (
            "not yet run",
            "expect 1.2 (docs/nowhere.md), no record yet",
            ["a file that is not there"],
        ),
        (
            "x.env python",
            "y.env python",
            ["a command names another config", "a file that is not there"],
        ),
        (
            "python train_gpt.py",
            "DATA_PATH=data/x \\\n#  torchrun --standalone --nproc_per_node=8 train_gpt.py",
            [],
        ),
        ("train_gpt.py", "train_it.py", ["no such script"]),
        ("python", "", ["no command"]),
        ("MODEL_DIM=128\n", "".join(f"S{at}=1\n" for at in range(14)), ["more than 15 lines"]),
    ],
)
def test_faults_of_a_head_are_found(tmp_path, old, new, said):
    (tmp_path / "x.env").write_text(GOOD.replace(old, new))
    assert head_faults(tmp_path / "x.env") == said


@pytest.mark.parametrize(
    ("lines", "dead"),
    [
        ("ARCH_MODE=gdn\nMODEL_DIM=128", []),
        ("ARCH_MODE=D\nMODEL_DIM=128", ["ARCH_MODE"]),
        ("MODEL_DIM=512", ["MODEL_DIM"]),
        ("ARCH_MODE=gdn\nQK_GAIN_INIT=5", ["QK_GAIN_INIT"]),
        ("ARCH_MODE=llama\nMLP_MULT=2.75", ["MLP_MULT"]),
        ("ARCH_MODE=llama\nMLP_MULT=3", []),
        ("OPTIMIZER=lion\nMATRIX_LR=0.001\nMUON_WD=0.1", ["MATRIX_LR"]),
        ("LAYER_PATTERN=a\nPOSITIONS=learned\nROPE_DIMS=16", ["ROPE_DIMS"]),
        ("LAYER_PATTERN=a\nATTN_WINDOW=128\nNUM_KV_HEADS=8", ["ATTN_WINDOW"]),
        ("ITERATIONS=100\nWARMDOWN_ITERS=10\nWARMDOWN_FRAC=0.2", ["WARMDOWN_FRAC"]),
    ],
)
def test_dead_lines_are_found(tmp_path, lines, dead):
    (tmp_path / "x.env").write_text(f"# x\n{lines}\n")
    assert dead_lines(tmp_path / "x.env", "train_gpt", tmp_path) == dead


def test_run_sh_names_configs_that_exist():
    text = (ROOT / "run.sh").read_text(encoding="utf-8")
    named = set(re.findall(r"configs/\w+\.env", text))
    assert {"configs/cpu.env", "configs/golf_1gpu.env", "configs/golf_8gpu.env"} <= named
    assert {name for name in named if not (ROOT / name).is_file()} == set()


@pytest.mark.parametrize(
    ("gpus", "given", "config"),
    [
        (0, "", "configs/cpu.env"),
        (1, "", "configs/golf_1gpu.env"),
        (3, "", "configs/golf_1gpu.env"),
        (4, "", "configs/golf_8gpu.env"),
        (8, "", "configs/golf_8gpu.env"),
        (16, "", "configs/golf_8gpu.env"),
        (0, "x.env", "x.env"),
        (1, "x.env", "x.env"),
        (8, "x.env", "x.env"),
    ],
)
def test_run_sh_picks_by_gpus_unless_config_is_given(gpus, given, config):
    text, given = (ROOT / "run.sh").read_text(encoding="utf-8"), {"CONFIG": given} if given else {}
    (choice,) = re.findall(r'^  case "\$gpus" in\n.*?^  esac\n', text, re.M | re.S)
    done = subprocess.run(
        ["bash", "-euc", f'gpus={gpus}\n{choice}echo "$CONFIG"'],
        env=given,
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.stderr) == (f"{config}\n", "")


# ----------------------------------------------------------------------------------------------------------- tiny runs
SHAPE = dict(
    DEVICE="cpu", MODEL_DIM=32, NUM_HEADS=2, ITERATIONS=8, MAX_WALLCLOCK_SECONDS=0, SAVE_EVERY=0
)
SCORES = dict(EVAL_PROMPTS=8, SFT_STEPS=4, LAYER_PATTERN="g a")
ROLLOUT = dict(
    **SHAPE,
    **SCORES,
    PROMPTS_PER_STEP=4,
    GROUP_SIZE=4,
    MINI_BATCHES=2,
    MAX_NEW_TOKENS=10,
    EVAL_SAMPLES=2,
)
SIZES = {
    "train_gpt": dict(
        **SHAPE,
        COMPILE=0,
        NUM_KV_HEADS=1,
        TRAIN_SEQ_LEN=32,
        TRAIN_BATCH_TOKENS=256,
        HOLDOUT_TOKENS=1024,
        EVAL_STRIDE=0,
        GPTQ_CALIBRATION_BATCHES=2,
    ),
    "train_sft": dict(
        **SHAPE, LAYER_PATTERN="g a", TRAIN_SEQ_LEN=64, TRAIN_BATCH_TOKENS=256, EVAL_PROMPTS=8
    ),
    "train_dpo": dict(**SHAPE, **SCORES, TRAIN_PAIRS=64, PAIRS_PER_STEP=8),
    "train_ppo": ROLLOUT,
    "train_grpo": ROLLOUT,
    "train_gspo": ROLLOUT,
}
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
    """The script of a config's first command, and the settings that make it tiny."""
    head, lines = parts(ROOT / "configs" / f"{name}.env")
    script = commands(head)[0][2]
    return script, {
        **SIZES[script],
        **{key: value for key, value in SMALLER.items() if key in lines},
    }


@pytest.fixture(scope="session")
def runs(place, request):  # noqa: F811
    """8 steps of every config that is asked for, each in a folder of its name under place/configs."""
    rows = [{"prompt": str(number), "completion": str(number)[::-1]} for number in range(100, 260)]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / "each_config.py").write_text(EACH)
    orders = []
    for name in sorted(asked(request, "test_a_tiny_run", "name")):
        script, sizes = tiny_settings(name)
        data = {
            "train_gpt": {"DATA_PATH": place / "data"},
            "train_sft": {"TRAIN_FILES": place / "rows.jsonl"},
        }
        orders.append(
            (
                name,
                script,
                environment(
                    **sizes,
                    **data.get(script, {}),
                    CONFIG=ROOT / "configs" / f"{name}.env",
                    OUT_DIR=place / "configs",
                    RUN_ID=name,
                ),
            )
        )
    return start([place / "each_config.py", ROOT, json.dumps(orders)], environment())


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if name in LONG else ()) for name in NAMES]
)
def test_a_tiny_run(place, runs, name):  # noqa: F811
    """It learns, packs and scores; the settings that it ran by are the config's, but for the sizes."""
    assert f"exit {name} 0\n" in runs.stdout, runs.stdout[-1000:] + runs.stderr[-3000:]
    path, folder = ROOT / "configs" / f"{name}.env", place / "configs" / name
    script, sizes = tiny_settings(name)
    module, settings = load(script, path)
    result = json.loads((folder / "result.json").read_text())
    assert (result["script"], result["steps"], result["settings"]["config"]) == (
        f"{script}.py",
        8,
        str(path),
    )
    left = {
        key.lower(): value_of(text, type(getattr(settings, key.lower())))
        for key, text in parts(path)[1].items()
        if key not in sizes
    }
    assert left and {key: result["settings"][key] for key in left} == left
    assert all(phase["steps"] for phase in result["phases"].values())
    header, tensors, _ = module.read_artifact(folder / "model.upar")
    assert header["settings"]["model_dim"] == 32 and all(
        w.isfinite().all() for w in tensors.values()
    )
    if script == "train_gpt":
        log = (folder / "log.txt").read_text()
        losses = [float(loss) for loss in re.findall(r"^step:\d+/8 train_loss:(\S+)", log, re.M)]
        # the first five steps have a line each, later ones every ten seconds
        assert (
            len(losses) >= 5
            and losses[0] == pytest.approx(math.log(VOCAB), abs=0.1)
            and losses[-1] < losses[0]
        )
        assert result["val_bpb"] == pytest.approx(
            result["before_quantization"]["val_bpb"], rel=0.03
        )
    else:
        assert {"before", "after", "gain"} <= set(result)
