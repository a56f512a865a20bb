"""Settings from the environment and a CONFIG file, the run's folder, the model's shape: what is taken, what refused."""

import ast
import math
import re
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

NAMES = {field.name.upper() for field in fields(T.Settings)}
ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = (T, S, Q, R, R2, R3, D, F)

# The settings of Parameter Golf's baseline that Settings has too, with the baseline's values.
BASELINE = {
    "DATA_PATH": "./data/datasets/fineweb10B_sp1024",
    "TOKENIZER_PATH": "./data/tokenizers/fineweb_1024_bpe.model",
    "RUN_ID": "baseline",
    "SEED": "1337",
    "VAL_LOSS_EVERY": "1000",
    "ITERATIONS": "20000",
    "WARMDOWN_ITERS": "1200",
    "TRAIN_BATCH_TOKENS": "524288",
    "TRAIN_SEQ_LEN": "1024",
    "MAX_WALLCLOCK_SECONDS": "600.0",
    "QK_GAIN_INIT": "1.5",
    "VOCAB_SIZE": "1024",
    "NUM_LAYERS": "9",
    "NUM_KV_HEADS": "4",
    "MODEL_DIM": "512",
    "NUM_HEADS": "8",
    "MLP_MULT": "2",
    "ROPE_BASE": "10000.0",
    "LOGIT_SOFTCAP": "30.0",
    "TIED_EMBED_LR": "0.05",
    "TIED_EMBED_INIT_STD": "0.005",
    "MATRIX_LR": "0.04",
    "SCALAR_LR": "0.04",
    "MUON_MOMENTUM": "0.95",
    "MUON_BACKEND_STEPS": "5",
    "MUON_MOMENTUM_WARMUP_START": "0.85",
    "BETA1": "0.9",
    "BETA2": "0.95",
    "ADAM_EPS": "1e-8",
    "GRAD_CLIP_NORM": "0.0",
}

# Names that stand in the environment of a shell, torchrun, GitHub Actions, Slurm, a container or a notebook.
ORDINARY = """
    PATH HOME LANG LC_ALL LANGUAGE SHELL SHLVL USER USERNAME LOGNAME HOSTNAME HOST HOSTTYPE OSTYPE MACHTYPE PWD OLDPWD
    TERM TERM_PROGRAM TERMINFO COLORTERM COLUMNS LINES EDITOR VISUAL PAGER LESS LESSOPEN LS_COLORS MAIL TZ UID EUID
    GID _ DISPLAY WAYLAND_DISPLAY XDG_RUNTIME_DIR XDG_SESSION_ID XDG_DATA_DIRS DBUS_SESSION_BUS_ADDRESS SSH_AUTH_SOCK
    SSH_CLIENT SSH_CONNECTION SSH_TTY TMUX TMUX_PANE STY TMPDIR TEMP TMP DEBIAN_FRONTEND INVOCATION_ID JOURNAL_STREAM
    PS1 IFS PROMPT_COMMAND HISTSIZE HISTFILE HTTP_PROXY HTTPS_PROXY NO_PROXY http_proxy https_proxy no_proxy all_proxy
    PYTHONPATH PYTHONHOME PYTHONUNBUFFERED PYTHONDONTWRITEBYTECODE PYTHONHASHSEED PYTHON_VERSION VIRTUAL_ENV
    VIRTUAL_ENV_PROMPT CONDA_PREFIX CONDA_DEFAULT_ENV CONDA_EXE PIP_INDEX_URL PIP_CACHE_DIR UV_CACHE_DIR PYENV_ROOT
    PYTEST_CURRENT_TEST PYTEST_VERSION JPY_PARENT_PID MPLBACKEND COLAB_GPU WANDB_API_KEY WANDB_PROJECT HF_HOME
    HF_TOKEN LD_LIBRARY_PATH LD_PRELOAD LIBRARY_PATH CPATH CC CXX CFLAGS CXXFLAGS LDFLAGS MAKEFLAGS PKG_CONFIG_PATH
    OMP_NUM_THREADS MKL_NUM_THREADS OPENBLAS_NUM_THREADS NUMEXPR_NUM_THREADS KMP_AFFINITY KMP_BLOCKTIME
    GOMP_CPU_AFFINITY CUDA_VISIBLE_DEVICES CUDA_DEVICE_ORDER CUDA_DEVICE_MAX_CONNECTIONS CUDA_HOME CUDA_PATH
    CUDA_VERSION CUDA_LAUNCH_BLOCKING CUDA_MODULE_LOADING NVIDIA_VISIBLE_DEVICES NVIDIA_DRIVER_CAPABILITIES
    NVIDIA_REQUIRE_CUDA NCCL_VERSION NCCL_DEBUG NCCL_IB_DISABLE NCCL_SOCKET_IFNAME TRITON_CACHE_DIR
    TORCHINDUCTOR_CACHE_DIR TORCH_HOME TORCH_LOGS TORCH_CUDA_ARCH_LIST TORCH_EXTENSIONS_DIR PYTORCH_CUDA_ALLOC_CONF
    PYTORCH_ALLOC_CONF MASTER_ADDR MASTER_PORT RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE
    ROLE_RANK ROLE_NAME ROLE_WORLD_SIZE TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_RUN_ID
    TORCHELASTIC_ERROR_FILE TORCHELASTIC_USE_AGENT_STORE TORCH_NCCL_ASYNC_ERROR_HANDLING CI GITHUB_ACTION
    GITHUB_ACTIONS GITHUB_ACTOR GITHUB_ACTOR_ID GITHUB_API_URL GITHUB_BASE_REF GITHUB_ENV GITHUB_EVENT_NAME
    GITHUB_EVENT_PATH GITHUB_GRAPHQL_URL GITHUB_HEAD_REF GITHUB_JOB GITHUB_OUTPUT GITHUB_PATH GITHUB_REF
    GITHUB_REF_NAME GITHUB_REF_TYPE GITHUB_REPOSITORY GITHUB_REPOSITORY_ID GITHUB_RETENTION_DAYS GITHUB_RUN_ATTEMPT
    GITHUB_RUN_ID GITHUB_RUN_NUMBER GITHUB_SERVER_URL GITHUB_SHA GITHUB_STATE GITHUB_STEP_SUMMARY GITHUB_TOKEN
    GITHUB_WORKFLOW GITHUB_WORKSPACE RUNNER_ARCH RUNNER_DEBUG RUNNER_ENVIRONMENT RUNNER_NAME RUNNER_OS RUNNER_TEMP
    RUNNER_TOOL_CACHE RUNNER_USER RUNNER_WORKSPACE AGENT_TOOLSDIRECTORY ImageOS ImageVersion ACCEPT_EULA GITLAB_CI
    CI_JOB_ID CI_PIPELINE_ID BUILD_ID BUILD_NUMBER JOB_NAME JENKINS_URL SLURM_JOB_ID SLURM_JOBID SLURM_JOB_NAME
    SLURM_JOB_NODELIST SLURM_JOB_NUM_NODES SLURM_JOB_PARTITION SLURM_NODEID SLURM_NODELIST SLURM_NNODES SLURM_NPROCS
    SLURM_NTASKS SLURM_NTASKS_PER_NODE SLURM_PROCID SLURM_LOCALID SLURM_CPUS_ON_NODE SLURM_CPUS_PER_TASK SLURM_GPUS
    SLURM_GPUS_ON_NODE SLURM_MEM_PER_NODE SLURM_STEP_ID SLURM_SUBMIT_DIR SLURM_TASKS_PER_NODE SLURM_TASK_PID
    SLURM_ARRAY_JOB_ID SLURM_ARRAY_TASK_ID SLURM_CLUSTER_NAME SLURMD_NODENAME KUBERNETES_SERVICE_HOST KUBERNETES_PORT
    RUNPOD_POD_ID RUNPOD_GPU_COUNT AWS_REGION AWS_PROFILE GOOGLE_APPLICATION_CREDENTIALS container
""".split()


FIELDS = {field.name: field for field in fields(T.Settings)}


def load(environ):
    return T.load_settings(T.Settings, environ, presets={"ARCH_MODE": T.ARCH_PRESETS})


def refusal(module, environ):
    """The one line that refuses `environ`."""
    with pytest.raises(module.UserError) as error:
        module.load_settings(module.Settings, environ)
    assert "\n" not in str(error.value)
    return str(error.value)


def hint(name):
    """The end of the error about a name that is no setting."""
    return f" (--help lists the settings; IGNORE_ENV={name} ignores it in the environment)"


def config(tmp_path, text):
    path = tmp_path / "some.env"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("iterations", "2200", 2200),
        ("iterations", "0", 0),
        ("seed", "7", 7),
        ("matrix_lr", "4e-2", 0.04),
        ("max_wallclock_seconds", "600", 600.0),
        ("lr_floor", "1", 1.0),
        ("qat", "0", False),
        ("qat", "1", True),
        ("data_path", "", ""),
        ("run_id", "a b=c", "a b=c"),
        ("lr_schedule", "cosine", "cosine"),
        ("matrix_bits", "2", 2),
        ("matrix_bits", "8", 8),
        ("vocab_size", "65536", 65536),
    ],
)
def test_values_are_parsed(name, text, value):
    parsed = T.parse_setting(FIELDS[name], text)
    assert parsed == value and type(parsed) is type(value)
    assert getattr(load({name.upper(): text}), name) == value


# What a setting is given, and what the one line of the error says.
BOOL = "must be 0 or 1 (in a program a bool)"
COUNT = "must be a whole number from 0 to inf"
RATE = "must be a number from 0 to inf"
SHARE = "must be a number from 0.0 to 1.0"
WRONG_TEXTS = [
    ("iterations", "ten", COUNT),
    ("iterations", "1.0", COUNT),
    ("iterations", "1e3", COUNT),
    ("iterations", "", COUNT),
    ("matrix_lr", "fast", RATE),
    ("matrix_lr", "0,02", RATE),
    ("qat", "true", BOOL),
    ("qat", "True", BOOL),
    ("qat", "", BOOL),
    ("qat", "2", BOOL),
    ("qat", "yes", BOOL),
    ("qat", " 1", BOOL),
]
WRONG_VALUES = [
    ("iterations", -1, COUNT),
    ("seed", -1, COUNT),
    ("matrix_lr", math.nan, RATE),
    ("matrix_lr", math.inf, RATE),
    ("matrix_lr", -math.inf, RATE),
    ("matrix_lr", -0.1, RATE),
    ("warmdown_frac", 1.01, SHARE),
    ("warmdown_frac", math.nan, SHARE),
    ("lr_floor", 2.0, SHARE),
    ("matrix_bits", 1, "must be a whole number from 2 to 8"),
    ("num_kv_heads", 0, "must be a whole number from 1 to inf"),
    ("train_seq_len", 1, "must be a whole number from 2 to inf"),
    ("vocab_size", -1, COUNT),
    ("device", "gpu", "must be one of auto, cpu, cuda"),
    ("lr_schedule", "Linear", "must be one of linear, cosine, wsd, constant"),
]


@pytest.mark.parametrize(("name", "text", "said"), WRONG_TEXTS)
def test_wrong_texts_are_refused(name, text, said):
    assert refusal(T, {name.upper(): text}) == f"{name.upper()}={text!r}: {said}"


@pytest.mark.parametrize(("name", "value", "said"), WRONG_VALUES)
def test_wrong_values_are_refused(name, value, said):
    """In the environment as in a program."""
    assert refusal(T, {name.upper(): str(value)}) == f"{name.upper()}={value!r}: {said}"
    with pytest.raises(T.UserError) as error:
        T.Settings(**{name: value})
    assert str(error.value) == f"{name.upper()}={value!r}: {said}"


@pytest.mark.parametrize(
    ("module", "name", "value"),
    [
        (T, "iterations", 5.5),
        (T, "iterations", True),
        (T, "matrix_lr", "0.1"),
        (T, "qat", 1),
        (T, "run_id", 7),
        (R, "scale_rewards", False),
        (R, "left_clip_range", -1),
        (R2, "importance", "sequence_token"),
        (R3, "kl_shaping", "K1"),
        (R3, "critic", "seperate"),
        (F, "train_on", "user"),
        (D, "objective", "DPO"),
    ],
)
def test_a_wrong_value_in_a_program_is_refused(module, name, value):
    with pytest.raises(module.UserError) as error:
        module.Settings(**{name: value})
    assert str(error.value).startswith(f"{name.upper()}={value!r}: must be ")


def test_a_whole_number_is_a_number():
    assert T.Settings(matrix_lr=1).matrix_lr == 1


@pytest.mark.parametrize("module", SCRIPTS, ids=lambda module: module.__name__)
def test_defaults_are_values_that_the_environment_may_give(module):
    for field in fields(module.Settings):
        text = str(int(field.default)) if field.type is bool else str(field.default)
        assert module.parse_setting(field, text) == field.default, field.name
        assert type(field.default) is (str if get_args(field.type) else field.type), field.name
        assert field.type in (int, float, bool, str) or all(
            type(word) is str for word in get_args(field.type)
        )


def test_the_environment_wins_over_the_config(tmp_path):
    text = "# a comment\n\nITERATIONS=100  # steps\n MATRIX_LR = 0.5 \nDATA_PATH='a/b'\nRUN_ID=\"x\"\nQAT=0\n"
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


@pytest.mark.parametrize("module", SCRIPTS, ids=lambda module: module.__name__)
def test_every_script_reads_a_config_also_alone_in_its_folder(module, tmp_path, monkeypatch):
    """Scripts without the setting CONFIG read the file too."""
    monkeypatch.setattr(module, "sibling_settings", lambda: [])
    path = config(tmp_path, "DEVICE=cpu\n")
    assert module.load_settings(module.Settings, {"CONFIG": path}).device == "cpu"
    assert module.load_settings(module.Settings, {}, [path]).device == "cpu"


def test_nothing_set_gives_the_defaults():
    assert load({}) == T.Settings()
    assert load({"CONFIG": ""}) == T.Settings()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "ITERATIONS=5\nMATRX_LR=1\n",
            "MATRX_LR='1': no setting of this script; did you mean MATRIX_LR? (--help lists",
        ),
        ("PROMPT=hello\n", "PROMPT='hello': no setting of this script"),
        ("iterations=5\n", "iterations='5': no setting of this script"),
        ("PATH=/bin\n", "PATH='/bin': no setting of this script"),
        ("CONFIG=other.env\n", "CONFIG cannot stand in a"),
        ("SEED=1\nITERATIONS 5\n", ".env: 'ITERATIONS 5' is not NAME=value"),
        ("ITERATIONS=5.5\n", "ITERATIONS='5.5'"),
    ],
)
def test_wrong_lines_of_a_config_are_refused(tmp_path, text, said):
    assert said in refusal(T, {"CONFIG": config(tmp_path, text)})


def test_ignore_env_does_not_excuse_a_config(tmp_path):
    with pytest.raises(T.UserError, match="PROMPT='hello': no setting of this script"):
        load({"CONFIG": config(tmp_path, "PROMPT=hello\n"), "IGNORE_ENV": "PROMPT"})


def test_a_missing_config_is_named(tmp_path):
    with pytest.raises(T.UserError, match="CONFIG='.*none.env': no such file"):
        load({"CONFIG": str(tmp_path / "none.env")})


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("NUM_LAYER", "NUM_LAYERS"),
        ("MATRX_LR", "MATRIX_LR"),
        ("TRAIN_SEQLEN", "TRAIN_SEQ_LEN"),
        ("DATAPATH", "DATA_PATH"),
        ("ITERATION", "ITERATIONS"),
        ("WARMDOWN_ITER", "WARMDOWN_ITERS"),
        ("MAX_WALLCLOCK_SECOND", "MAX_WALLCLOCK_SECONDS"),
        ("TRAIN_BATCH_TOKEN", "TRAIN_BATCH_TOKENS"),
        ("VOCABSIZE", "VOCAB_SIZE"),
        ("WARM_DOWN_ITERS", "WARMDOWN_ITERS"),
    ],
)
def test_near_misses_name_the_setting(name, meant):
    assert (
        refusal(T, {name: "1"})
        == f"{name}='1': no setting of this script; did you mean {meant}?{hint(name)}"
    )
    assert load({name: "1", "IGNORE_ENV": name}) == T.Settings()


# A name of nanoGPT, modded-nanogpt, Parameter Golf or TRL, and the setting of this script that means the same.
MEANT = {
    T: {
        "MAX_ITERS": "ITERATIONS",
        "NUM_ITERATIONS": "ITERATIONS",
        "MAX_STEPS": "ITERATIONS",
        "LR": "MATRIX_LR",
        "SEQ_LEN": "TRAIN_SEQ_LEN",
        "BLOCK_SIZE": "TRAIN_SEQ_LEN",
        "BATCH_SIZE": "TRAIN_BATCH_TOKENS",
        "LEARNING_RATE": "MATRIX_LR",
        "WEIGHT_DECAY": "MUON_WD",
        "N_LAYER": "NUM_LAYERS",
        "N_HEAD": "NUM_HEADS",
        "N_EMBD": "MODEL_DIM",
        "GRAD_CLIP": "GRAD_CLIP_NORM",
        "EVAL_INTERVAL": "VAL_LOSS_EVERY",
        "LATE_QAT": "QAT",
    },
    R: {
        "NUM_GENERATIONS": "GROUP_SIZE",
        "MAX_COMPLETION_LENGTH": "MAX_NEW_TOKENS",
        "LR": "LEARNING_RATE",
        "BETA": "KL_BETA",
        "LOSS_TYPE": "REDUCTION",
        "MAX_STEPS": "ITERATIONS",
        "LORA_R": "LORA_RANK",
    },
    D: {"LR": "LEARNING_RATE", "MODEL_NAME_OR_PATH": "INIT_FROM", "OUTPUT_DIR": "OUT_DIR"},
}


@pytest.mark.parametrize("module", MEANT, ids=lambda module: module.__name__)
def test_names_of_the_field_are_answered_with_ours(module):
    for name, meant in MEANT[module].items():
        message = f"{name}='1': no setting of this script; did you mean {meant}?{hint(name)}"
        assert refusal(module, {name: "1"}) == message


def test_aliases_lead_to_settings_and_stand_in_order():
    every = {field.name.upper() for module in SCRIPTS for field in fields(module.Settings)}
    assert list(T.ALIASES) == sorted(T.ALIASES) and list(T.ABSENT_SETTINGS) == sorted(
        T.ABSENT_SETTINGS
    )
    assert set(T.ALIASES.values()) <= every | set(T.ALIASES)
    for name in T.ABSENT_SETTINGS:
        assert name not in every and refusal(T, {name: "1"}).startswith(
            f"{name}='1': no setting of this script"
        )


def test_a_retired_setting_is_accepted_at_the_value_of_its_constant():
    constants = {
        "ADAM_BETAS[0]": T.ADAM_BETAS[0],
        "ADAM_BETAS[1]": T.ADAM_BETAS[1],
        "logit_softcap": T.GPTConfig.logit_softcap,
        "embed_init_std": T.GPTConfig.embed_init_std,
    }
    for name, (constant, value) in T.RETIRED_SETTINGS.items():
        assert name not in NAMES
        assert constants.get(constant, vars(T).get(constant)) == value, constant
        assert load({name: str(value)}) == load({}) == load({name: f"{value:g}"})
        message = (
            f"{name}='77': no setting of this script, which has the constant {constant} = {value}"
        )
        assert refusal(T, {name: "77"}) == message + hint(name)
    assert load({"ADAM_EPS": "1e-8", "BETA1": ".9", "LOGIT_SOFTCAP": "30"}) == load(
        {}
    )  # the number counts
    assert refusal(T, {"BETA1": "high"}).startswith(
        "BETA1='high': no setting of this script, which has the constant "
    )


def test_settings_of_our_other_scripts_are_refused():
    """A setting meant for another script would otherwise be ignored in silence."""
    for module in SCRIPTS:
        names = {field.name.upper() for field in fields(module.Settings)}
        for name in sorted(
            {field.name.upper() for other in SCRIPTS for field in fields(other.Settings)} - names
        ):
            if name != "CONFIG":
                assert refusal(module, {name: "1"}).startswith(
                    f"{name}='1': no setting of this script"
                )
                assert (
                    module.load_settings(module.Settings, {name: "1", "IGNORE_ENV": name})
                    == module.Settings()
                )


def test_arguments_stand_above_the_environment(tmp_path):
    path = config(tmp_path, "MODEL_DIM=32\nSEED=1\nITERATIONS=7\n")
    arguments = [path, "SEED=3", "--model_dim=64"]
    settings = T.load_settings(T.Settings, {"SEED": "2", "ITERATIONS": "8"}, arguments)
    assert (settings.model_dim, settings.seed, settings.iterations, settings.config) == (
        64,
        3,
        8,
        path,
    )
    settings = T.load_settings(T.Settings, {"CONFIG": "none.env"}, arguments)
    assert settings.iterations == 7


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--model-dim=64"],
            "MODEL-DIM='64': no setting of this script; did you mean MODEL_DIM? (--help lists the settin",
        ),
        (
            ["--max_iters=5"],
            "MAX_ITERS='5': no setting of this script; did you mean ITERATIONS? (--help lists the",
        ),
        (["PATH=x"], "PATH='x': no setting of this script"),
        (["model_dim"], "'model_dim': must be a config file (x.env)"),
        (["none.env"], "CONFIG='none.env': no such file"),
        (["SEED=x"], "SEED='x': must be a whole number"),
    ],
)
def test_wrong_arguments_are_refused(arguments, said):
    with pytest.raises(T.UserError) as error:
        T.load_settings(T.Settings, {}, arguments)
    assert str(error.value).startswith(said)


@pytest.mark.parametrize("module", SCRIPTS, ids=lambda module: module.__name__)
def test_help_lists_every_setting_with_default_and_comment(module, capsys):
    with pytest.raises(SystemExit) as exit_:
        module.load_settings(module.Settings, {}, ["--help"])
    assert not exit_.value.code
    document, _, listed = capsys.readouterr().out.partition("\nSettings:\n")
    assert document.startswith(module.__doc__)
    lines = ["", *listed.splitlines()]  # counted from 1, as in the syntax tree
    shown = {
        node.target.id: node
        for node in ast.parse(listed).body[0].body
        if isinstance(node, ast.AnnAssign)
    }
    assert list(shown) == [field.name for field in fields(module.Settings)]
    for field in fields(module.Settings):
        node = shown[field.name]
        default = (
            node.value.args[0] if isinstance(node.value, ast.Call) else node.value
        )  # bounded(default, low, high)
        assert ast.literal_eval(default) == field.default, field.name
        assert "# " in lines[node.end_lineno] or lines[node.lineno - 1].lstrip().startswith("# "), (
            field.name
        )


def test_ignore_env_takes_several_names():
    environ = {"PROMPT": "$ ", "NUM_LAYER": "3", "IGNORE_ENV": "NUM_LAYER, PROMPT"}
    assert load(environ) == T.Settings()
    assert refusal(T, {**environ, "IGNORE_ENV": "NUM_LAYER"}).startswith("PROMPT='$ '")


@pytest.mark.parametrize("module", SCRIPTS, ids=lambda module: module.__name__)
def test_an_ordinary_environment_is_left_alone(module):
    assert len(ORDINARY) == len(set(ORDINARY))
    environ = dict.fromkeys(ORDINARY, "1")
    assert module.load_settings(module.Settings, environ) == module.Settings()


def test_the_seed_command_is_accepted():
    command = (
        "ARCH_MODE=D VOCAB_SIZE=1024 DATA_PATH=d TOKENIZER_PATH=t.model VAL_LOSS_EVERY=9999 SEED=42 "
        "ITERATIONS=2200 WARMDOWN_ITERS=400"
    )
    given = dict(word.split("=") for word in command.split())
    assert load(given) == replace(
        T.Settings(),
        arch_mode="D",
        vocab_size=1024,
        data_path="d",
        tokenizer_path="t.model",
        val_loss_every=9999,
        seed=42,
        iterations=2200,
        warmdown_iters=400,
    )


def test_the_baselines_settings_are_accepted():
    """Those that are constants here have the baseline's values."""
    settings = load(BASELINE)
    values = {name: getattr(settings, name.lower()) for name in BASELINE if name in NAMES}
    assert values == {name: type(values[name])(BASELINE[name]) for name in values}
    assert set(BASELINE) - set(values) <= set(T.RETIRED_SETTINGS)


def test_the_log_shows_every_setting_and_marks_changes(tmp_path):
    settings = replace(T.Settings(), iterations=5, qat=False, run_id="x", out_dir=str(tmp_path))
    T.Run(settings, T.Runtime(0, 1, torch.device("cpu"), False), None, None, {}).open()
    log = (tmp_path / "x" / "log.txt").read_text().split("\n" + "=" * 120 + "\n")[1].splitlines()
    assert log[0].startswith("command: ") and log[1].startswith("commit:")
    rows = log[2:]
    assert [row[2:].split("=")[0] for row in rows] == [
        field.name.upper() for field in fields(T.Settings)
    ]
    assert {row for row in rows if row[0] == "*"} == {
        "* ITERATIONS=5",
        "* QAT=0",
        "* RUN_ID=x",
        f"* OUT_DIR={tmp_path}",
    }
    assert all(row[:2] in ("* ", "  ") for row in rows)
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
    with pytest.raises(
        T.UserError,
        match="^RUN_ID='first': must be a plain name that does not exist in .*; RESUME ",
    ):
        open_run(runs, "first")
    assert (runs / "first" / "log.txt").read_text() == "kept"


def test_a_run_without_a_name_is_named_after_the_date(tmp_path):
    folder = open_run(tmp_path, "")
    assert re.fullmatch(r"run_\d{8}_\d{6}", folder.name) and [*tmp_path.iterdir()] == [folder]


@pytest.mark.parametrize("run_id", [".", "..", "a/b", "../a", "/a", "a/"])
def test_a_run_id_is_a_plain_name(tmp_path, run_id):
    (tmp_path / "runs").mkdir()
    with pytest.raises(T.UserError, match="^RUN_ID="):
        open_run(tmp_path / "runs", run_id)
    assert [path.name for path in tmp_path.rglob("*")] == ["runs"]


def test_a_file_in_place_of_the_out_dir(tmp_path):
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(NotADirectoryError, match="runs"):  # exit_code makes it one line
        open_run(tmp_path / "runs", "x")


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


@pytest.mark.parametrize("pattern", ["g x", "g,s", "s-1", "1", "  ", "G", "k g"])
def test_wrong_layers_are_refused(pattern):
    with pytest.raises(T.UserError) as error:
        T.model_config(replace(T.Settings(), layer_pattern=pattern), 300, 1)
    right = "g, s or a with an optional number; capitals need one"
    assert str(error.value) == f"LAYER_PATTERN={pattern!r}: each word must be {right}"


def test_a_preset_of_the_environment_stands_above_the_file(tmp_path):
    """In the file's own order a preset stands below what stands beside it; so CONFIG cannot undo ARCH_MODE=llama."""
    path = config(tmp_path, "LAYER_PATTERN=g s\nMODEL_DIM=128\nMLP_MULT=3\nARCH_MODE=gdn\n")
    from_file = load({"CONFIG": path})
    assert (from_file.layer_pattern, from_file.num_layers, from_file.mlp_mult) == ("g s", 10, 3.0)
    above = load({"CONFIG": path, "ARCH_MODE": "llama", "NUM_LAYERS": "2"})
    assert (above.layer_pattern, above.num_layers, above.mlp, above.mlp_mult) == (
        "a",
        2,
        "swiglu",
        2.75,
    )
    assert (above.model_dim, above.arch_mode) == (128, "llama")
    path = config(tmp_path, "ARCH_MODE=gdn\n")
    assert (
        load({"CONFIG": path}).num_layers == 10
        and load({"CONFIG": path, "ARCH_MODE": "baseline"}).num_layers == 9
    )
    path = config(tmp_path, "ARCH_MODE=llama\n")
    above = load({"CONFIG": path, "ARCH_MODE": "gdn"})
    assert above == replace(
        T.Settings(), config=path, arch_mode="gdn", **T.ARCH_PRESETS["gdn"]
    )  # nothing of llama's


def test_a_preset_stands_below_what_is_given():
    assert load({"ARCH_MODE": "gdn"}) == replace(
        T.Settings(), arch_mode="gdn", **T.ARCH_PRESETS["gdn"]
    )
    given = load({"ARCH_MODE": "baseline", "MLP_MULT": "3", "NUM_LAYERS": "2"})
    assert (given.mlp_mult, given.num_layers, given.qk_gain_init, given.layer_pattern) == (
        3.0,
        2,
        1.5,
        "a",
    )
    with pytest.raises(
        T.UserError, match="^ARCH_MODE='E': must be one of D, gdn, hybrid, baseline, llama$"
    ):
        load({"ARCH_MODE": "E"})
    assert get_args(FIELDS["arch_mode"].type) == tuple(T.ARCH_PRESETS)
    assert set(get_args(FIELDS["optimizer"].type)) == set(T.OPTIMIZER_PRESETS)
    for values in T.ARCH_PRESETS.values():
        assert set(values) <= {field.name for field in fields(T.Settings)}


def test_model_config_takes_the_shape_from_the_settings():
    settings = replace(
        T.Settings(), model_dim=96, num_heads=6, num_kv_heads=3, layer_pattern="g s1", num_layers=3
    )
    config = T.model_config(settings, 300, 1)
    shape = asdict(config)
    fixed = {"vocab_size": 300, "bos_id": 1, "layers": "g s1 g", "norms": "rms rms rms"}
    assert {name: shape.pop(name) for name in fixed} == fixed
    facts = {
        "residual_mix": True,
        "unet_skips": False,
        "logit_softcap": 30.0,
        "embed_init_std": 0.005,
    }
    assert {name: shape.pop(name) for name in facts} == facts
    assert shape == {name: getattr(settings, name) for name in shape}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            dict(model_dim=100, num_heads=8),
            "MODEL_DIM=100: must be a multiple of 2 x NUM_HEADS = 16",
        ),
        (
            dict(model_dim=72, num_heads=8),
            "MODEL_DIM=72",
        ),  # a multiple of the heads, but their width would be odd
        (dict(num_heads=8, num_kv_heads=3), "NUM_HEADS=8: must be a multiple of NUM_KV_HEADS = 3"),
        (dict(num_heads=4, num_kv_heads=8), "NUM_HEADS=4: must be a multiple of NUM_KV_HEADS = 8"),
        (dict(layer_pattern="q"), "LAYER_PATTERN='q'"),
        (dict(rope_dims=7), "ROPE_DIMS=7"),
        (dict(rope_dims=66), "ROPE_DIMS=66: must be even, at most MODEL_DIM / NUM_HEADS = 64"),
        (dict(norm=""), "NORM=''"),
        (dict(norm="rms bogus"), "NORM='rms bogus': must be one or more of rms, rms_weight, layer"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(changes, said):
    with pytest.raises(T.UserError) as error:
        T.model_config(replace(T.Settings(), **changes), 300, 1)
    assert str(error.value).startswith(said)
