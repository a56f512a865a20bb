"""Settings from the environment and a CONFIG file, the run's folder, the model's shape: what is
taken, what refused.
"""

import ast
import math
import re
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import get_args

import pytest
import torch

import quantize as Q
import sample as S
import train_dpo as D
import train_gpt as T
import train_grpo as R
import train_gspo as R2
import train_ppo as R3
import train_sft as F
from conftest import refusal

NAMES = {field.name.upper() for field in fields(T.Settings)}
ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = (T, S, Q, R, R2, R3, D, F)

# The settings of Parameter Golf's baseline that Settings has too, with the baseline's values. Its
# BETA2=0.95 is an error, because the constant is 0.99.
BASELINE = (
    "DATA_PATH=./data/datasets/fineweb10B_sp1024 TOKENIZER_PATH=./data/fineweb_1024.model "
    "RUN_ID=baseline SEED=1337 VAL_LOSS_EVERY=1000 ITERATIONS=20000 WARMDOWN_ITERS=1200 "
    "TRAIN_BATCH_TOKENS=524288 TRAIN_SEQ_LEN=1024 MAX_WALLCLOCK_SECONDS=600.0 QK_GAIN_INIT=1.5 "
    "VOCAB_SIZE=1024 NUM_LAYERS=9 NUM_KV_HEADS=4 MODEL_DIM=512 NUM_HEADS=8 MLP_MULT=2 "
    "ROPE_BASE=10000.0 LOGIT_SOFTCAP=30.0 TIED_EMBED_LR=0.05 TIED_EMBED_INIT_STD=0.005 "
    "MATRIX_LR=0.04 SCALAR_LR=0.04 MUON_MOMENTUM=0.95 MUON_BACKEND_STEPS=5 "
    "MUON_MOMENTUM_WARMUP_START=0.85 BETA1=0.9 ADAM_EPS=1e-8 GRAD_CLIP_NORM=0.0"
)
SEED = (  # the command of the script that ours grew from
    "ARCH_MODE=D VOCAB_SIZE=1024 DATA_PATH=d TOKENIZER_PATH=t.model VAL_LOSS_EVERY=9999 SEED=42 "
    "ITERATIONS=2200 WARMDOWN_ITERS=400"
)
VALUES = "MATRIX_LR=4e-2 MAX_WALLCLOCK_SECONDS=600 QAT=0 EMA=1 RUN_ID=a=b LR_SCHEDULE=cosine"

# Names that stand in the environment of a shell, torchrun, GitHub Actions, Slurm, a container or a
# notebook.
ORDINARY = """
    PATH HOME LANG LC_ALL LANGUAGE SHELL SHLVL USER USERNAME LOGNAME HOSTNAME HOST HOSTTYPE OSTYPE
    MACHTYPE PWD OLDPWD
    TERM TERM_PROGRAM TERMINFO COLORTERM COLUMNS LINES EDITOR VISUAL PAGER LESS LESSOPEN LS_COLORS
    MAIL TZ UID EUID
    GID _ DISPLAY WAYLAND_DISPLAY XDG_RUNTIME_DIR XDG_SESSION_ID XDG_DATA_DIRS
    DBUS_SESSION_BUS_ADDRESS SSH_AUTH_SOCK
    SSH_CLIENT SSH_CONNECTION SSH_TTY TMUX TMUX_PANE STY TMPDIR TEMP TMP DEBIAN_FRONTEND
    INVOCATION_ID JOURNAL_STREAM
    PS1 IFS PROMPT_COMMAND HISTSIZE HISTFILE HTTP_PROXY HTTPS_PROXY NO_PROXY http_proxy https_proxy
    no_proxy all_proxy
    PYTHONPATH PYTHONHOME PYTHONUNBUFFERED PYTHONDONTWRITEBYTECODE PYTHONHASHSEED PYTHON_VERSION
    VIRTUAL_ENV
    VIRTUAL_ENV_PROMPT CONDA_PREFIX CONDA_DEFAULT_ENV CONDA_EXE PIP_INDEX_URL PIP_CACHE_DIR
    UV_CACHE_DIR PYENV_ROOT
    PYTEST_CURRENT_TEST PYTEST_VERSION JPY_PARENT_PID MPLBACKEND COLAB_GPU WANDB_API_KEY
    WANDB_PROJECT HF_HOME
    HF_TOKEN LD_LIBRARY_PATH LD_PRELOAD LIBRARY_PATH CPATH CC CXX CFLAGS CXXFLAGS LDFLAGS MAKEFLAGS
    PKG_CONFIG_PATH
    OMP_NUM_THREADS MKL_NUM_THREADS OPENBLAS_NUM_THREADS NUMEXPR_NUM_THREADS KMP_AFFINITY
    KMP_BLOCKTIME
    GOMP_CPU_AFFINITY CUDA_VISIBLE_DEVICES CUDA_DEVICE_ORDER CUDA_DEVICE_MAX_CONNECTIONS CUDA_HOME
    CUDA_PATH
    CUDA_VERSION CUDA_LAUNCH_BLOCKING CUDA_MODULE_LOADING NVIDIA_VISIBLE_DEVICES
    NVIDIA_DRIVER_CAPABILITIES
    NVIDIA_REQUIRE_CUDA NCCL_VERSION NCCL_DEBUG NCCL_IB_DISABLE NCCL_SOCKET_IFNAME TRITON_CACHE_DIR
    TORCHINDUCTOR_CACHE_DIR TORCH_HOME TORCH_LOGS TORCH_CUDA_ARCH_LIST TORCH_EXTENSIONS_DIR
    PYTORCH_CUDA_ALLOC_CONF
    PYTORCH_ALLOC_CONF MASTER_ADDR MASTER_PORT RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE
    GROUP_RANK GROUP_WORLD_SIZE
    ROLE_RANK ROLE_NAME ROLE_WORLD_SIZE TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS
    TORCHELASTIC_RUN_ID
    TORCHELASTIC_ERROR_FILE TORCHELASTIC_USE_AGENT_STORE TORCH_NCCL_ASYNC_ERROR_HANDLING CI
    GITHUB_ACTION
    GITHUB_ACTIONS GITHUB_ACTOR GITHUB_ACTOR_ID GITHUB_API_URL GITHUB_BASE_REF GITHUB_ENV
    GITHUB_EVENT_NAME
    GITHUB_EVENT_PATH GITHUB_GRAPHQL_URL GITHUB_HEAD_REF GITHUB_JOB GITHUB_OUTPUT GITHUB_PATH
    GITHUB_REF
    GITHUB_REF_NAME GITHUB_REF_TYPE GITHUB_REPOSITORY GITHUB_REPOSITORY_ID GITHUB_RETENTION_DAYS
    GITHUB_RUN_ATTEMPT
    GITHUB_RUN_ID GITHUB_RUN_NUMBER GITHUB_SERVER_URL GITHUB_SHA GITHUB_STATE GITHUB_STEP_SUMMARY
    GITHUB_TOKEN
    GITHUB_WORKFLOW GITHUB_WORKSPACE RUNNER_ARCH RUNNER_DEBUG RUNNER_ENVIRONMENT RUNNER_NAME
    RUNNER_OS RUNNER_TEMP
    RUNNER_TOOL_CACHE RUNNER_USER RUNNER_WORKSPACE AGENT_TOOLSDIRECTORY ImageOS ImageVersion
    ACCEPT_EULA GITLAB_CI
    CI_JOB_ID CI_PIPELINE_ID BUILD_ID BUILD_NUMBER JOB_NAME JENKINS_URL SLURM_JOB_ID SLURM_JOBID
    SLURM_JOB_NAME
    SLURM_JOB_NODELIST SLURM_JOB_NUM_NODES SLURM_JOB_PARTITION SLURM_NODEID SLURM_NODELIST
    SLURM_NNODES SLURM_NPROCS
    SLURM_NTASKS SLURM_NTASKS_PER_NODE SLURM_PROCID SLURM_LOCALID SLURM_CPUS_ON_NODE
    SLURM_CPUS_PER_TASK SLURM_GPUS
    SLURM_GPUS_ON_NODE SLURM_MEM_PER_NODE SLURM_STEP_ID SLURM_SUBMIT_DIR SLURM_TASKS_PER_NODE
    SLURM_TASK_PID
    SLURM_ARRAY_JOB_ID SLURM_ARRAY_TASK_ID SLURM_CLUSTER_NAME SLURMD_NODENAME
    KUBERNETES_SERVICE_HOST KUBERNETES_PORT
    RUNPOD_POD_ID RUNPOD_GPU_COUNT AWS_REGION AWS_PROFILE GOOGLE_APPLICATION_CREDENTIALS container
""".split()


FIELDS = {field.name: field for field in fields(T.Settings)}


def load(environ):
    return T.load_settings(T.Settings, environ, presets={"ARCH_MODE": T.ARCH_PRESETS})


def refused(module, environ, arguments=()):
    """Return the one line that refuses these settings."""
    given = (module.Settings, environ, arguments)
    return refusal(module.UserError, "", module.load_settings, *given)


def hint(name):
    """The end of the error about a name that is no setting."""
    return f" (--help lists the settings; IGNORE_ENV={name} ignores it in the environment)"


def config(tmp_path, text):
    path = tmp_path / "some.env"
    path.write_text(text, encoding="utf-8")
    return str(path)


scripts = pytest.mark.parametrize("module", SCRIPTS, ids=lambda module: module.__name__)


# What a setting is given, and what the one line of the error says.
BOOL = "must be one of 0, 1"
COUNT = "must be a whole number from 0 to inf"
RATE = "must be a number from 0 to inf"
SHARE = "must be a number from 0.0 to 1.0"
WRONG_TEXTS = [
    ("iterations", "1.0", COUNT),
    ("iterations", "1e3", COUNT),
    ("iterations", "", COUNT),
    ("matrix_lr", "0,02", RATE),
    ("qat", "true", BOOL),
    ("qat", "", BOOL),
    ("qat", "2", BOOL),
    ("qat", " 1", BOOL),
]
WRONG_VALUES = [
    ("iterations", -1, COUNT),
    ("matrix_lr", math.nan, RATE),
    ("matrix_lr", math.inf, RATE),
    ("matrix_lr", -0.1, RATE),
    ("warmdown_frac", 1.01, SHARE),
    ("matrix_bits", 1, "must be a whole number from 2 to 8"),
    ("train_seq_len", 1, "must be a whole number from 2 to inf"),
    ("device", "gpu", "must be one of auto, cpu, cuda"),
    ("compile", "2", "must be one of 0, 1, reduce-overhead, max-autotune"),
    ("arch_mode", "E", "must be one of D, gdn, hybrid, baseline, llama, qwen2, qwen3, qwen3_5"),
]


@pytest.mark.parametrize(("name", "value", "said"), WRONG_TEXTS + WRONG_VALUES)
def test_wrong_values_are_refused(name, value, said):
    """In the environment as in a program."""
    line = f"{name.upper()}={value!r}: {said}"
    assert refused(T, {name.upper(): str(value)}) == line
    assert refusal(T.UserError, "", T.Settings, **{name: value}) == line


@pytest.mark.parametrize(
    ("module", "name", "value"),
    [
        (T, "iterations", 5.5),
        (T, "iterations", True),
        (T, "iterations", "5"),
        (T, "matrix_lr", True),
        (T, "qat", 1),
        (T, "qat", None),
        (T, "compile", 1),
        (T, "run_id", 7),
        (R, "scale_rewards", "batches"),
        (F, "train_on", "user"),
    ],
)
def test_a_wrong_value_in_a_program_is_refused(module, name, value):
    message = f"^{name.upper()}='?{value}'?: must be "
    refusal(module.UserError, message, module.Settings, **{name: value})
    assert T.Settings(matrix_lr=1).matrix_lr == 1  # a whole number is a number


@scripts
def test_defaults_are_values_that_the_environment_may_give(module):
    for field in fields(module.Settings):
        text = module.setting_text(field.default)
        assert module.parse_setting(field, text) == field.default
        choices = get_args(field.type)
        assert (
            field.default in choices
            or choices == ()
            and isinstance(field.default, str if field.type is module.Paths else field.type)
        )


def test_the_environment_wins_over_the_config(tmp_path):
    text = "# a comment\n\nITERATIONS=100  # steps\n MATRIX_LR = 0.5 \n"
    text += "DATA_PATH='a/b'\nRUN_ID=\"x\"\nQAT=0\n"
    path = config(tmp_path, text)
    settings = load({"CONFIG": path, "ITERATIONS": "200", "SEED": "3"})
    expected = {
        "iterations": 200,
        "matrix_lr": 0.5,
        "data_path": "a/b",
        "run_id": "x",
        "qat": False,
        "seed": 3,
    }
    assert settings == replace(T.Settings(), config=path, **expected)


@scripts
def test_every_script_reads_a_config(module, tmp_path):
    """Scripts without the setting CONFIG read the file too."""
    path = config(tmp_path, "DEVICE=cpu\n")
    assert module.load_settings(module.Settings, {"CONFIG": path}).device == "cpu"
    assert module.load_settings(module.Settings, {}, [path]).device == "cpu"


NONE = "no setting of this script"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("SEED=5\nMATRX_LR=1\n", f"MATRX_LR='1': {NONE}; did you mean MATRIX_LR? (--help"),
        ("PROMPT=hello\n", f"PROMPT='hello': {NONE}"),
        ("iterations=5\n", f"iterations='5': {NONE}"),
        ("PATH=/bin\n", f"PATH='/bin': {NONE}"),
        ("CONFIG=other.env\n", ".env, line 1: 'CONFIG=other.env': must be NAME=value, each"),
        ("SEED=1\nITERATIONS 5\n", ".env, line 2: 'ITERATIONS 5': must be NAME=value"),
        ("SEED=1\n=3\n", ".env, line 2: '=3': must be NAME=value"),
    ],
)
def test_wrong_lines_of_a_config_are_refused(tmp_path, text, said):
    assert said in refused(T, {"CONFIG": config(tmp_path, text)})


@scripts
@pytest.mark.parametrize(
    ("line", "value"),
    [
        ('OUT_DIR="Issue #12: fix # signs"  # a comment', "Issue #12: fix # signs"),
        ("OUT_DIR='a # b'", "a # b"),
        ("OUT_DIR=it's", "it's"),
        ("OUT_DIR=the dogs'", "the dogs'"),
        ('OUT_DIR=say "hi"', 'say "hi"'),
        ('OUT_DIR="it\'s"', "it's"),
        ("OUT_DIR='a'\"b c\"", "ab c"),
        ('OUT_DIR="a \\"b\\" \\\\ c"', 'a "b" \\ c'),
        ("OUT_DIR=a#b # c", "a#b"),
        ("OUT_DIR=#b", "#b"),
        ("OUT_DIR=  # empty", ""),
        ("OUT_DIR=", ""),
        ("OUT_DIR=''", ""),
        ('OUT_DIR="  spaces  "', "  spaces  "),
        ("export OUT_DIR=a", "a"),
        ("  OUT_DIR =  a b\t", "a b"),
        ("OUT_DIR=a=b", "a=b"),
        ("OUT_DIR=a\u2028b\x0cc", "a\u2028b\x0cc"),
        ("\ufeffOUT_DIR=größer", "größer"),
        ("# OUT_DIR=b\r\n\r\nOUT_DIR=a\r\n", "a"),
        ("# OUT_DIR=b\r\rOUT_DIR=a\r", "a"),
    ],
)
def test_a_config_is_read_as_a_shell_reads_it(tmp_path, module, line, value):
    path = tmp_path / "some.env"
    path.write_bytes(line.encode() + b"\n")
    assert module.read_config(path) == {"OUT_DIR": value}


def dependencies(path):
    """Return what a script's header tells uv, PEP 723: its Python and its packages."""
    block = re.search(r"(?m)^# /// script\n((?:#.*\n)+?)# ///$", path.read_text(encoding="utf-8"))[
        1
    ]
    text = re.sub(r"(?m)^# ?", "", block)
    python = re.search(r'^requires-python = "(.*)"$', text, re.MULTILINE)[1]
    listed = re.search(r"^dependencies = (\[.*\])$", text, re.MULTILINE | re.DOTALL)[1]
    return python, ast.literal_eval(listed)


def test_uv_installs_what_requirements_txt_has():
    """The scripts of data need no torch."""
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    packages = [line for line in lines if not line.startswith("#")]
    for module in SCRIPTS:
        assert dependencies(Path(module.__file__)) == (">=3.10", packages)
    safetensors = re.findall(
        r"^safetensors==.*",
        (ROOT / "requirements-test.txt").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert dependencies(ROOT / "convert.py") == (">=3.10", [*packages, *safetensors])
    for name in ("prepare", "download"):
        light = [package for package in packages if not package.startswith("torch==")]
        assert dependencies(ROOT / "data" / f"{name}.py") == (">=3.10", light)


@scripts
def test_homes_are_found_in_paths_wherever_they_are_given(tmp_path, monkeypatch, module):
    monkeypatch.setenv("HOME", "/h")
    paths = [field for field in fields(module.Settings) if field.type is module.Paths]
    assert paths and all(
        re.search("PATH|FILE|DIR|ARTI|CON|RE|IN|TEA|ENV|SCORE|TOOLS|MARK", field.name.upper())
        for field in paths
    )
    for name in (field.name for field in paths if field.name != "config"):
        given = {name.upper(): "~/a:0.7,~/b,a~/x"}
        path = config(tmp_path, f"{name.upper()}='~/a:0.7,~/b,a~/x'")
        for environ, arguments in (
            (given, []),
            ({"CONFIG": path}, []),
            ({}, [f"--{name}=~/a:0.7,~/b,a~/x"]),
        ):
            settings = module.load_settings(module.Settings, environ, arguments)
            assert getattr(settings, name) == "/h/a:0.7,/h/b,a~/x"


def test_what_is_no_path_keeps_its_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    config(tmp_path, "RUN_ID=~x\nOUT_DIR=~\n")
    settings = load({"CONFIG": "~/some.env"})
    assert (settings.run_id, settings.out_dir) == ("~x", str(tmp_path))
    assert settings.config == f"{tmp_path}/some.env"
    assert S.load_settings(S.Settings, {"PROMPT": "~/x is home"}).prompt == "~/x is home"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            b"RUN_ID=caf\xe9\n",
            "must be a file of text in UTF-8; 'utf-8' codec can't decode byte 0xe9",
        ),
        ("SEED=5\n".encode("utf-16"), "must be a file of text in UTF-8"),
        (b"SEED=5\nRUN_ID='a b\n", """line 2: "RUN_ID='a b": No closing quotation"""),
        (b'RUN_ID="a" b\n', "has text behind the closing quotation"),
        (
            b"SEED=5\nexport SEED=6\n",
            "line 2: 'export SEED=6': must be NAME=value, each name once",
        ),
        (b"SEED\n", "line 1: 'SEED': must be NAME=value"),
        (b"SEED # =5\n", "line 1: 'SEED # =5': must be NAME=value"),
    ],
)
def test_a_config_that_cannot_be_read_is_one_line(tmp_path, content, said):
    path = tmp_path / "some.env"
    path.write_bytes(content)
    assert said in refused(T, {"CONFIG": str(path)})
    assert refused(T, {}, ["SEED=1", "--seed=2"]) == "'--seed=2': the command line has SEED twice"


@scripts
@pytest.mark.parametrize("word", ["-h", "--help"])
def test_help_is_printed_whatever_the_environment_is(module, word, monkeypatch, capsys):
    for name, value in {"RANK": "x", "ITERATIONS": "ten", "CONFIG": "none", "SED": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.argv", [f"{module.__name__}.py", word])
    with pytest.raises(SystemExit) as caught:
        sys.exit(module.exit_code(module.main))
    assert not caught.value.code
    shown = capsys.readouterr()
    assert module.__doc__.strip() in shown.out and shown.err == ""


# Near misses, and names of nanoGPT, modded-nanogpt, Parameter Golf and TRL, with the setting meant.
MEANT = [
    (T, "NUM_LAYER", "NUM_LAYERS"),
    (T, "DATAPATH", "DATA_PATH"),
    (T, "WARM_DOWN_ITERS", "WARMDOWN_ITERS"),
    (T, "MAX_ITERS", "ITERATIONS"),
    (T, "LR", "MATRIX_LR"),
    (T, "BLOCK_SIZE", "TRAIN_SEQ_LEN"),
    (R, "NUM_GENERATIONS", "GROUP_SIZE"),
    (R, "LR", "LEARNING_RATE"),
    (R, "BETA", "KL_BETA"),
    (D, "MODEL_NAME_OR_PATH", "INIT_FROM"),
    (T, "MAX_SEQ_LEN", "TRAIN_SEQ_LEN"),
    (T, "SEQ_LEN", "TRAIN_SEQ_LEN"),
    (T, "MUON_WEIGHT_DECAY", "MUON_WD"),
]


@pytest.mark.parametrize(("module", "name", "meant"), MEANT)
def test_names_that_are_nearly_right_are_answered_with_ours(module, name, meant):
    message = f"{name}='1': {NONE}; did you mean {meant}?{hint(name)}"
    assert refused(module, {name: "1"}) == message
    ignored = {name: "1", "IGNORE_ENV": name}
    assert module.load_settings(module.Settings, ignored) == module.Settings()


EVERY = {field.name.upper() for module in SCRIPTS for field in fields(module.Settings)}


def test_constants_of_a_script_are_no_settings():
    """Of the environment, too, where a name that nobody knows is ignored."""
    for module, name in ((R3, "VALUE_COEF"), (T, "EMA_MEMORY"), (T, "MATRIX_CLIP_SIGMAS")):
        assert name in vars(module)
        assert refused(module, {name: "1"}).startswith(f"{name}='1': {NONE}")
    assert T.load_settings(T.Settings, {"VALUE_COEF": "1"}) == T.Settings()


def test_names_of_others_lead_to_settings_or_constants():
    assert set(filter(None, T.OTHER_NAMES.values())) <= EVERY | T.OTHER_NAMES.keys() | {
        value for value in T.OTHER_NAMES.values() if not isinstance(value, str)
    }
    assert T.OUR_SETTINGS == EVERY


# Constants of the script that are written otherwise, or that nothing here has.
CONSTANTS = dict(
    BETA1=T.ADAM_BETAS[0],
    BETA2=T.ADAM_BETAS[1],
    LOGIT_SOFTCAP=T.GPTConfig.logit_softcap,
    TIED_EMBED_INIT_STD=T.GPTConfig.embed_init_std,
    MUON_BACKEND_STEPS=T.NEWTON_SCHULZ_STEPS,
    MUON_MOMENTUM_WARMUP_START=T.MUON_MOMENTUM_START,
    ADAM_WD=0.0,
    DROPOUT=0.0,
    TTT_ENABLED=0,
    XSA_LAST_N=0,
    GPTQ_CALIBRATION_BATCHES=0,
)


def test_a_retired_setting_is_accepted_at_the_value_of_its_constant():
    names = {meant: name for name, meant in T.OTHER_NAMES.items()}
    for constant, value in T.OTHER_NAMES.items():
        if isinstance(value, str):
            continue
        assert CONSTANTS.get(constant, vars(T).get(constant)) == value, constant
        name = names.get(constant, constant)
        assert load({name: str(value)}) == load({name: f"{value:g}"}) == T.Settings()
        message = f"{name}='77': {NONE}, in which {constant} is always {value}"
        assert refused(T, {name: "77"}) == message + hint(name)
    assert refused(T, {"BETA1": "high"}).startswith(f"BETA1='high': {NONE}, in which BETA1 is")


def test_settings_of_our_other_scripts_are_refused():
    """A setting meant for another script would otherwise be ignored in silence."""
    for module in SCRIPTS:
        names = {field.name.upper() for field in fields(module.Settings)}
        for name in EVERY - names - {"CONFIG"}:
            assert refused(module, {name: "1"}).startswith(f"{name}='1': {NONE}")
            ignored = {name: "1", "IGNORE_ENV": name}
            assert module.load_settings(module.Settings, ignored) == module.Settings()


def test_arguments_stand_above_the_environment(tmp_path):
    path = config(tmp_path, "MODEL_DIM=32\nSEED=1\nITERATIONS=7\n")
    arguments = [path, "SEED=3", "--model_dim=64"]
    settings = T.load_settings(T.Settings, {"SEED": "2", "ITERATIONS": "8"}, arguments)
    changes = dict(model_dim=64, seed=3, iterations=8, config=path)
    assert settings == replace(T.Settings(), **changes)
    settings = T.load_settings(T.Settings, {"CONFIG": "none.env"}, arguments)
    assert settings.iterations == 7


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model-dim=64"], f"MODEL-DIM='64': {NONE}; did you mean MODEL_DIM? (--help lists"),
        (["--max_iters=5"], f"MAX_ITERS='5': {NONE}; did you mean ITERATIONS? (--help lists"),
        (["model_dim"], "'model_dim': must be a config file (x.env)"),
        (
            ["none.env"],
            "CONFIG='none.env': must be a file of text in UTF-8; [Errno 2] No such file",
        ),
    ],
)
def test_wrong_arguments_are_refused(arguments, said):
    assert refused(T, {}, arguments).startswith(said)


@scripts
def test_help_lists_every_setting(module, capsys):
    with pytest.raises(SystemExit) as exit_:
        module.load_settings(module.Settings, {}, ["--help"])
    assert not exit_.value.code
    listed = capsys.readouterr().out
    assert all(f"\n    {field.name}: " in listed for field in fields(module.Settings))


def test_ignore_env_takes_several_names(tmp_path):
    environ = {"PROMPT": "$ ", "NUM_LAYER": "3", "IGNORE_ENV": "NUM_LAYER, PROMPT"}
    assert load(environ) == T.Settings()
    assert refused(T, {**environ, "IGNORE_ENV": "NUM_LAYER"}).startswith("PROMPT='$ '")
    environ = {"CONFIG": config(tmp_path, "PROMPT=hello\n"), "IGNORE_ENV": "PROMPT"}
    assert refused(T, environ).startswith("PROMPT='hello'")  # no excuse in a config


@scripts
def test_an_ordinary_environment_is_left_alone(module):
    assert len(ORDINARY) == len(set(ORDINARY))
    environ = dict.fromkeys(ORDINARY, "1")
    assert module.load_settings(module.Settings, environ) == module.Settings()


@pytest.mark.parametrize("command", [BASELINE, SEED, VALUES])
def test_values_and_the_settings_of_others_are_accepted(command):
    """Those that are constants here have the baseline's values."""
    given = dict(word.split("=", 1) for word in command.split())
    settings = load(given)
    values = {name: getattr(settings, name.lower()) for name in given if name in NAMES}
    for name, value in values.items():
        kind = type(FIELDS[name.lower()].default)
        assert value == kind(int(given[name]) if kind is bool else given[name])
        assert type(value) is kind
    assert given.keys() - values.keys() <= T.OTHER_NAMES.keys()


def test_the_log_shows_every_setting_and_marks_changes(tmp_path):
    settings = replace(T.Settings(), iterations=5, qat=False, run_id="x", out_dir=str(tmp_path))
    T.Run(settings, T.Runtime(0, 1, torch.device("cpu"), False), None, None, {}).open()
    log = (tmp_path / "x" / "log.txt").read_text().split("\n" + "=" * 120 + "\n")[1].splitlines()
    assert log[0].startswith("command: ") and log[1].startswith("commit:")
    rows = log[2:]
    assert [row[2:].split("=")[0].lower() for row in rows] == list(FIELDS)
    changed = {"* ITERATIONS=5", "* QAT=0", "* RUN_ID=x", f"* OUT_DIR={tmp_path}"}
    assert {row for row in rows if row[:2] != "  "} == changed
    assert "  MAX_WALLCLOCK_SECONDS=600.0" in rows and "  EMA=1" in rows
    assert load(dict(row[2:].split("=", 1) for row in rows)) == settings


def open_run(out_dir, run_id):
    """The folder of a new run."""
    settings = T.Settings(out_dir=str(out_dir), run_id=run_id)
    run = T.Run(settings, T.Runtime(0, 1, torch.device("cpu"), False), None, None, {})
    assert run.open() is None
    return run.folder


def test_a_run_folder_is_made_once(tmp_path):
    runs = tmp_path / "deep" / "runs"
    assert open_run(runs, "first") == runs / "first"
    (runs / "first" / "log.txt").write_text("kept")
    message = "^RUN_ID='first': must be a plain name that no run in .*; RESUME "
    refusal(T.UserError, message, open_run, runs, "first")
    assert (runs / "first" / "log.txt").read_text() == "kept"


def test_runs_without_a_name_are_named_after_the_time(tmp_path):
    """Two of them may start in the same second."""
    folders = {open_run(tmp_path, "") for _ in range(2)}
    assert folders == {*tmp_path.iterdir()} and len(folders) == 2
    assert all(re.fullmatch(r"run_\d{8}_\d{6}_\d{6}", folder.name) for folder in folders)


@pytest.mark.parametrize("run_id", ["..", "a/b", "../a", "/a", "a/"])
def test_a_run_id_is_a_plain_name(tmp_path, run_id):
    (tmp_path / "runs").mkdir()
    refusal(T.UserError, "^RUN_ID=", open_run, tmp_path / "runs", run_id)
    assert [path.name for path in tmp_path.rglob("*")] == ["runs"]


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, "g g g g g s1 g g g g g s1"),
        (dict(num_layers=4), "g g g g"),
        (dict(layer_pattern="g  s12 a", num_layers=5), "g s12 a g s12"),
        (dict(layer_pattern="g s A1", num_layers=4), "g s A1 g"),
        (dict(layer_pattern="a", num_layers=3), "a a a"),
    ],
)
def test_layers_are_resolved(changes, layers):
    config = T.model_config(replace(T.Settings(), norm="rms layer", **changes), 300, 1)
    assert config.layers == layers
    count = len(layers.split())
    assert config.norms.split() == (["rms", "layer"] * count)[:count]


def test_a_preset_of_the_environment_stands_above_the_file(tmp_path):
    """In the file's own order a preset stands below what stands beside it; so CONFIG cannot undo
    ARCH_MODE=llama.
    """

    def values(settings):
        return [getattr(settings, name) for name in ("layer_pattern", "num_layers", "mlp_mult")]

    path = config(tmp_path, "LAYER_PATTERN=g s\nMODEL_DIM=128\nMLP_MULT=3\nARCH_MODE=gdn\n")
    assert values(load({"CONFIG": path})) == ["g s", 10, 3.0]
    above = load({"CONFIG": path, "ARCH_MODE": "llama", "NUM_LAYERS": "2"})
    assert values(above) == ["a", 2, 2.75] and above.model_dim == 128
    path = config(tmp_path, "ARCH_MODE=llama\n")
    above = load({"CONFIG": path, "ARCH_MODE": "gdn"})  # nothing of llama's
    preset = dict(arch_mode="gdn", **T.ARCH_PRESETS["gdn"])
    assert above == replace(T.Settings(), config=path, **preset)
    assert load({"ARCH_MODE": "gdn"}) == replace(T.Settings(), **preset)
    given = load({"ARCH_MODE": "baseline", "MLP_MULT": "3", "NUM_LAYERS": "2"})
    assert values(given) == ["a", 2, 3.0] and given.qk_gain_init == 1.5
    assert get_args(FIELDS["arch_mode"].type) == tuple(T.ARCH_PRESETS)
    assert set(get_args(FIELDS["optimizer"].type)) == set(T.OPTIMIZER_PRESETS)


def test_stored_values_stand_above_presets_and_below_what_is_given():
    def stored(given):
        assert given == {"OPTIMIZER": "lion", "SEED": 3}
        return {"optimizer": "muon", "matrix_lr": 5e-4, "seed": 2}

    presets = {"OPTIMIZER": T.OPTIMIZER_PRESETS}
    given = {"OPTIMIZER": "lion", "SEED": "3"}
    found = T.load_settings(T.Settings, given, (), presets, stored)
    changes = dict(optimizer="lion", matrix_lr=5e-4, tied_embed_lr=0.004, seed=3)
    assert found == replace(T.Settings(), **changes)


def test_model_config_takes_the_shape_from_the_settings():
    settings = replace(
        T.Settings(), model_dim=96, num_heads=6, num_kv_heads=3, layer_pattern="g s1", num_layers=3
    )
    config = T.model_config(settings, 300, 1)
    shape = asdict(config)
    fixed = {"vocab_size": 300, "bos_id": 1, "layers": "g s1 g", "norms": "rms rms rms"}
    assert {name: shape.pop(name) for name in fixed} == fixed
    facts = {
        "context": 0,
        "residual_mix": True,
        "unet_skips": False,
        "logit_softcap": 30.0,
        "embed_init_std": 0.005,
        "head_dim": 0,
        "qkv_bias": False,
        "qk_norm": False,
        "attn_gate": False,
        "gdn_shape": [],
        "mlp_hidden": 0,
        "norm_eps": 0.0,
        "rope_base": 10000.0,
        "rope_scaling": [],
    }
    assert {name: shape.pop(name) for name in facts} == facts
    assert shape == {name: getattr(settings, name) for name in shape}


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 4), (6, 3), (2, 1), (1, 1)])
def test_by_default_two_heads_share_keys_and_values(heads, kv_heads):
    settings = replace(T.Settings(), model_dim=96, num_heads=heads)
    assert T.model_config(settings, 300, 1).num_kv_heads == kv_heads


LAYERS = "each word must be g, s or a"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (dict(model_dim=100), "MODEL_DIM=100: must be a multiple of 2 x NUM_HEADS = 16"),
        (dict(model_dim=72), "MODEL_DIM=72"),  # a multiple of the heads, of an odd width
        (dict(num_kv_heads=3), "NUM_HEADS=8: must be a multiple of NUM_KV_HEADS = 3"),
        (dict(num_heads=3, model_dim=96), "NUM_HEADS=3: must be a multiple of NUM_KV_HEADS = 2"),
        (dict(rope_dims=7), "ROPE_DIMS=7"),
        (dict(rope_dims=66), "ROPE_DIMS=66: must be even, at most MODEL_DIM / NUM_HEADS = 64"),
        (dict(norm=""), "NORM=''"),
        (
            dict(norm="rms bogus"),
            "NORM='rms bogus': must be one or more of rms, rms_weight, rms_offset, layer",
        ),
        *(
            (dict(layer_pattern=word), f"LAYER_PATTERN={word!r}: {LAYERS}")
            for word in ("g x", "s-1", " ", "G")
        ),
    ],
)
def test_shapes_that_do_not_fit_are_refused(changes, said):
    settings = replace(T.Settings(), **changes)
    assert refusal(T.UserError, "", T.model_config, settings, 300, 1).startswith(said)
