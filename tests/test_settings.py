"""Settings from the environment and a CONFIG file, the run's folder, the model's shape: what is
taken, what refused.
"""

import math
import re
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import get_args

import pytest
import torch

import sample as S
import train_dpo as D
import train_gpt as T
import train_grpo as R
import train_gspo as R2
import train_ppo as R3
import train_sft as F
from conftest import ROOT, refusal

SCRIPTS = (T, S, R, R2, R3, D, F)
FIELDS = {field.name: field for field in fields(T.Settings)}

# The settings of Parameter Golf's baseline that Settings has too, with the baseline's values. Its
# BETA2=0.95 is an error, because the constant is 0.99.
BASELINE = (
    "DATA_PATH=./data/datasets/fineweb10B_sp1024 TOKENIZER_PATH=./data/fineweb_1024.model "
    "RUN_ID=baseline SEED=1337 VAL_LOSS_EVERY=1000 ITERATIONS=20000 WARMDOWN_ITERS=1200 "
    "TRAIN_BATCH_TOKENS=524288 TRAIN_SEQ_LEN=1024 MAX_WALLCLOCK_SECONDS=600.0 QK_GAIN_INIT=1.5 "
    "VOCAB_SIZE=1024 NUM_LAYERS=9 NUM_KV_HEADS=4 MODEL_DIM=512 NUM_HEADS=8 MLP_MULT=2 "
    "ROPE_BASE=10000.0 LOGIT_SOFTCAP=30.0 TIED_EMBED_LR=0.05 TIED_EMBED_INIT_STD=0.005 "
    "MATRIX_LR=0.04 SCALAR_LR=0.04 MUON_MOMENTUM=0.95 MUON_BACKEND_STEPS=5 "
    "MUON_MOMENTUM_WARMUP_START=0.85 BETA1=0.9 ADAM_EPS=1e-8 GRAD_CLIP_NORM=0.0 "
    "TRAIN_LOG_EVERY=50 VAL_BATCH_SIZE=524288"
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
    SLURM_ARRAY_JOB_ID SLURM_ARRAY_TASK_ID SLURM_CLUSTER_NAME SLURMD_NODENAME SLURM_RESTART_COUNT
    SLURM_JOB_USER SLURM_JOB_GPUS SLURM_STEP_NUM_TASKS SLURM_SRUN_COMM_HOST SLURM_MPI_TYPE
    SRUN_CPUS_PER_TASK ROCR_VISIBLE_DEVICES GPU_DEVICE_ORDINAL SCRATCH NSLOTS QUEUE ARC PBS_JOBID
    KUBERNETES_SERVICE_HOST KUBERNETES_PORT
    RUNPOD_POD_ID RUNPOD_GPU_COUNT AWS_REGION AWS_PROFILE GOOGLE_APPLICATION_CREDENTIALS container TTT
""".split()


scripts = pytest.mark.parametrize("module", SCRIPTS, ids=lambda module: module.__name__)


def load(environ, arguments=()):
    return T.load_settings(T.Settings, environ, arguments, {"ARCH_MODE": T.ARCH_PRESETS})


def refused(module, environ, arguments=()):
    """Return the one line that refuses these settings."""
    given = (module.Settings, environ, arguments)
    return refusal(module.UserError, "", module.load_settings, *given)


def config(tmp_path, text):
    path = tmp_path / "some.env"
    path.write_bytes(text.encode())
    return str(path)


# ------------------------------------------------------------------------------------------- values
def test_wrong_values_are_refused():
    """Of the environment and of a program, up to the ends of a range."""
    texts = {
        "iterations": ["1.0", "1e3", ""],
        "matrix_lr": ["0,02"],
        "qat": ["true", "", "2", " 1"],
    }
    values = {
        "iterations": [-1],
        "matrix_lr": [math.nan, math.inf, -0.1],
        "warmdown_frac": [1.01, -0.01],
        "matrix_bits": [1, 9],
        "train_seq_len": [1],
        "device": ["gpu"],
        "compile": ["2"],
        "arch_mode": ["E"],
    }
    for wrong in (texts, values):
        for name in wrong:
            for value in wrong[name]:
                line = refused(T, {name.upper(): str(value)})
                assert line.startswith(f"{name.upper()}={value!r}: must be ")
                assert refusal(T.UserError, "", T.Settings, **{name: value}) == line
    good = dict(warmdown_frac=1.0, matrix_bits=8, train_seq_len=2, iterations=0, matrix_lr=0.0)
    assert asdict(T.Settings(**good)).items() >= good.items()
    assert T.Settings(matrix_bits=2, matrix_lr=1).matrix_lr == 1  # a whole number is a number


def test_a_value_of_another_type_in_a_program_is_refused():
    wrong = [(T, "iterations", value) for value in (5.5, True, "5")]
    wrong += [(T, "qat", 1), (T, "qat", None), (T, "compile", 1), (T, "run_id", 7)]
    wrong += [(T, "matrix_lr", True), (R, "scale_rewards", "batches"), (F, "train_on", "user")]
    for module, name, value in wrong:
        refusal(module.UserError, f"^{name.upper()}=", module.Settings, **{name: value})


@scripts
def test_defaults_are_values_that_the_environment_may_give(module):
    given = {field.name.upper(): field.default for field in fields(module.Settings)}
    environ = {name: module.setting_text(value) for name, value in given.items()}
    assert module.load_settings(module.Settings, environ) == module.Settings()


@pytest.mark.parametrize("command", [BASELINE, SEED, VALUES])
def test_values_and_the_settings_of_others_are_accepted(command):
    """Those that are constants here have the baseline's values."""
    given = dict(word.split("=", 1) for word in command.split())
    settings = load(given)
    for name, text in given.items():
        if name.lower() in FIELDS:
            value = getattr(settings, name.lower())
            kind = type(FIELDS[name.lower()].default)
            assert type(value) is kind
            assert value == kind(int(text) if kind is bool else text)
        else:
            assert name in {*T.OTHER_NAMES, *T.HARMLESS_NAMES}


def test_names_that_change_no_result_are_said_to_be_unused(capsys):
    assert load({"LOG_INTERVAL": "1"}) == T.Settings()
    note = "note: LOG_INTERVAL='1' is not used: it changes no result\n"
    assert capsys.readouterr() == ("", note)


def test_a_seed_is_one_that_every_generator_takes():
    assert load({"SEED": "2147483647"}).seed == 2**31 - 1
    assert "must be a whole number of at least 0 and at most 2147483647" in refused(
        T, {"SEED": str(2**31)}
    )


# ------------------------------------------------------------------------------------------ configs
def test_the_environment_stands_above_the_config_and_arguments_above_both(tmp_path):
    text = "# a comment\n\nITERATIONS=100  # steps\n MATRIX_LR = 0.5 \nQAT=0\nMODEL_DIM=32\n"
    path = config(tmp_path, text)
    expected = dict(config=path, iterations=200, matrix_lr=0.5, qat=False, seed=3, model_dim=32)
    environ = {"CONFIG": path, "ITERATIONS": "200", "SEED": "3"}
    assert load(environ) == replace(T.Settings(), **expected)
    expected |= dict(seed=4, model_dim=64)
    arguments = [path, "SEED=4", "--model_dim=64"]
    assert load({**environ, "CONFIG": "none.env"}, arguments) == replace(T.Settings(), **expected)


LINES = {
    'OUT_DIR="Issue #12: fix # signs"  # a comment': "Issue #12: fix # signs",
    "OUT_DIR=it's": "it's",
    'OUT_DIR=say "hi"': 'say "hi"',
    "OUT_DIR='a'\"b c\"": "ab c",
    'OUT_DIR="a \\"b\\" \\\\ c"': 'a "b" \\ c',
    "OUT_DIR=a#b # c": "a#b",
    "OUT_DIR=#b": "#b",
    "OUT_DIR=  # empty": "",
    "OUT_DIR=": "",
    'OUT_DIR="  spaces  "': "  spaces  ",
    "export OUT_DIR=a": "a",
    "  OUT_DIR =  a b\t": "a b",
    "OUT_DIR = 'a # b'": "a # b",
    "OUT_DIR=a=b": "a=b",
    "OUT_DIR=a\u2028b\x0cc": "a\u2028b\x0cc",
    "\ufeffOUT_DIR=größer": "größer",
    "# OUT_DIR=b\r\n\r\nOUT_DIR=a\r\n": "a",
    "# OUT_DIR=b\r\rOUT_DIR=a\r": "a",
}


def test_a_config_is_read_as_a_shell_reads_it(tmp_path):
    for line, value in LINES.items():
        assert T.read_config(config(tmp_path, line)) == {"OUT_DIR": value}


def test_wrong_lines_of_a_config_are_refused(tmp_path):
    """By the name of the setting or the number of the line."""
    for text, said in {
        "SEED=5\nMATRX_LR=1\n": "^MATRX_LR='1': .* MATRIX_LR",
        "PROMPT=hello\n": "^PROMPT='hello'",
        "iterations=5\n": "^iterations='5'",
        "CONFIG=other.env\n": "env, line 1",
        "SEED=1\nITERATIONS 5\n": "env, line 2",
        "SEED=1\n=3\n": "env, line 2",
        "SEED=5\nRUN_ID='a b\n": "env, line 2",
        'RUN_ID="a" b\n': "env, line 1",
        "SEED=5\nexport SEED=6\n": "env, line 2",
        "SEED # =5\n": "env, line 1",
    }.items():
        assert re.search(said, refused(T, {"CONFIG": config(tmp_path, text)})), text
    for content in (b"RUN_ID=caf\xe9\n", "SEED=5\n".encode("utf-16")):
        (tmp_path / "some.env").write_bytes(content)
        assert refused(T, {}, [f"{tmp_path}/some.env"]).startswith("CONFIG=")


def test_wrong_arguments_are_refused():
    assert re.match("MODEL-DIM='64'.*MODEL_DIM", refused(T, {}, ["--model-dim=64"]))
    assert re.match("MAX_ITERS='5'.*ITERATIONS", refused(T, {}, ["--max_iters=5"]))
    assert refused(T, {}, ["model_dim"]).startswith("'model_dim': must be ")
    assert refused(T, {}, ["none.env"]).startswith("CONFIG='none.env'")
    assert refused(T, {}, ["SEED=1", "--seed=2"]) == "'--seed=2': the command line has SEED twice"


@scripts
def test_homes_are_found_in_paths_wherever_they_are_given(tmp_path, monkeypatch, module):
    monkeypatch.setenv("HOME", "/h")
    names = [
        f.name for f in fields(module.Settings) if f.type is module.Paths and f.name != "config"
    ]
    assert names
    for name in names:
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
    path = config(tmp_path, "RUN_ID=~x\nOUT_DIR=~\n")
    expected = dict(run_id="~x", out_dir=str(tmp_path), config=path)
    assert load({"CONFIG": "~/some.env"}) == replace(T.Settings(), **expected)
    assert S.load_settings(S.Settings, {"PROMPT": "~/x is home"}).prompt == "~/x is home"


@scripts
def test_help_lists_every_setting_whatever_the_environment_is(module, monkeypatch, capsys):
    for name, value in {"RANK": "x", "ITERATIONS": "ten", "CONFIG": "none", "SED": "1"}.items():
        monkeypatch.setenv(name, value)
    for word in ("-h", "--help"):
        monkeypatch.setattr("sys.argv", [f"{module.__name__}.py", word])
        with pytest.raises(SystemExit) as caught:
            sys.exit(module.exit_code(module.main))
        shown = capsys.readouterr()
        assert not caught.value.code and shown.err == ""
        assert module.__doc__.strip() in shown.out
        assert all(f"\n    {field.name}: " in shown.out for field in fields(module.Settings))


# -------------------------------------------------------------------------------------------- names
# Near misses, and names of nanoGPT, modded-nanogpt, Parameter Golf and TRL, with the setting meant.
MEANT = {
    T: "NUM_LAYER=NUM_LAYERS DATAPATH=DATA_PATH WARM_DOWN_ITERS=WARMDOWN_ITERS MAX_ITERS=ITERATIONS "
    "LR=MATRIX_LR BLOCK_SIZE=TRAIN_SEQ_LEN MAX_SEQ_LEN=TRAIN_SEQ_LEN MUON_WEIGHT_DECAY=MUON_WD",
    R: "NUM_GENERATIONS=GROUP_SIZE LR=LEARNING_RATE BETA=KL_BETA",
    D: "MODEL_NAME_OR_PATH=INIT_FROM",
}
EVERY = {field.name.upper() for module in SCRIPTS for field in fields(module.Settings)}


@pytest.mark.parametrize("module", MEANT, ids=lambda module: module.__name__)
def test_names_that_are_nearly_right_are_answered_with_ours(module):
    for pair in MEANT[module].split():
        name, _, meant = pair.partition("=")
        assert re.match(f"{name}='1': .* {meant}\\?", refused(module, {name: "1"}))
        ignored = {name: "1", "IGNORE_ENV": name}
        assert module.load_settings(module.Settings, ignored) == module.Settings()


def test_constants_of_a_script_are_no_settings():
    """Of the environment, too, where a name that nobody knows is ignored."""
    for module, name in ((R3, "VALUE_COEF"), (T, "EMA_MEMORY"), (T, "MATRIX_CLIP_SIGMAS")):
        assert refused(module, {name: "1"}).startswith(f"{name}='1'")
    assert load({"VALUE_COEF": "1"}) == T.Settings()


def test_names_of_others_lead_to_settings_or_constants():
    texts = {value for value in T.OTHER_NAMES.values() if isinstance(value, str)}
    assert texts <= EVERY | T.OTHER_NAMES.keys()
    # A setting stands in one of both tables.
    assert T.OUR_SETTINGS == EVERY - texts - T.OTHER_NAMES.keys()


# Constants of the script that are written otherwise.
CONSTANTS = dict(
    BETA1=T.ADAM_BETAS[0],
    BETA2=T.ADAM_BETAS[1],
    CLIPRANGE_VALUE=R3.VALUE_CLIP_RANGE,
    VF_COEF=R3.VALUE_COEF,
    LOGIT_SOFTCAP=T.GPTConfig.logit_softcap,
    TIED_EMBED_INIT_STD=T.GPTConfig.embed_init_std,
    MUON_BACKEND_STEPS=T.NEWTON_SCHULZ_STEPS,
    MUON_MOMENTUM_WARMUP_START=T.MUON_MOMENTUM_START,
)
# Nothing here has them.
CONSTANTS |= dict.fromkeys(
    "ADAM_WD CASEOPS_ENABLED DROPOUT GATED_ATTN_ENABLED GPTQ_CALIBRATION_BATCHES LN_SCALE LORA_DROPOUT "
    "MTP_NUM_HEADS NEFTUNE_NOISE_ALPHA NUM_LOOPS PARALLEL_START_LAYER PHASED_TTT_ENABLED RECUR_LAYERS "
    "RECUR_START_STEP SMEAR_GATE_ENABLED SPARSE_ATTN_GATE_ENABLED TTT_LORA_RANK VE_ENABLED XSA_LAST_N".split(),
    0,
)


def test_a_retired_setting_is_accepted_at_the_value_of_its_constant():
    assert CONSTANTS.keys() <= T.OTHER_NAMES.keys()
    names = {meant: name for name, meant in T.OTHER_NAMES.items()}
    for constant, value in T.OTHER_NAMES.items():
        if isinstance(value, str):
            continue
        assert CONSTANTS.get(constant, vars(T).get(constant)) == value, constant
        name = names.get(constant, constant)
        assert load({name: str(value)}) == load({name: f"{value:g}"}) == T.Settings()
        for text in ("77", "high"):
            assert re.match(f"{name}='{text}'.* {constant} .*{value}", refused(T, {name: text}))


def test_settings_of_our_other_scripts_are_refused():
    """A setting meant for another script would otherwise be ignored in silence."""
    for module in SCRIPTS:
        names = {field.name.upper() for field in fields(module.Settings)}
        for name in EVERY - names - {"CONFIG"}:
            assert refused(module, {name: "1"}).startswith(f"{name}='1'")


def test_ignore_env_takes_several_names(tmp_path):
    environ = {"PROMPT": "$ ", "NUM_LAYER": "3", "IGNORE_ENV": "NUM_LAYER, PROMPT"}
    assert load(environ) == T.Settings()
    assert refused(T, {**environ, "IGNORE_ENV": "NUM_LAYER"}).startswith("PROMPT='$ '")
    environ = {"CONFIG": config(tmp_path, "PROMPT=hello\n"), "IGNORE_ENV": "PROMPT"}
    assert refused(T, environ).startswith("PROMPT='hello'")  # no excuse in a config


@scripts
def test_batch_jobs_have_an_environment(module):
    """Slurm and Grid Engine set it to BATCH."""
    environ = {"ENVIRONMENT": "BATCH"}
    assert module.load_settings(module.Settings, environ) == module.Settings()
    if module is T:
        assert refused(T, {"ENVIRONMENT": "x.py:Game"}).startswith("ENVIRONMENT='x.py:Game'")


@scripts
def test_an_ordinary_environment_is_left_alone(module):
    environ = dict.fromkeys(ORDINARY, "1")
    assert module.load_settings(module.Settings, environ) == module.Settings()


# ------------------------------------------------------------------------------------------ presets
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
    preset = dict(arch_mode="gdn", **T.ARCH_PRESETS["gdn"])
    above = load({"CONFIG": path, "ARCH_MODE": "gdn"})  # nothing of llama's
    assert above == replace(T.Settings(), config=path, **preset)
    above = load({"CONFIG": str(ROOT / "configs" / "cpu.env"), "ARCH_MODE": "D"})
    assert T.layer_words(above)[0] == T.Settings.layer_pattern
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
    changes = dict(optimizer="lion", matrix_lr=5e-4, tied_embed_lr=0.004, head_lr=0.002, seed=3)
    assert found == replace(T.Settings(), **changes)


# ------------------------------------------------------------------------------------ folder, header
def open_run(**changes):
    settings = replace(T.Settings(), **changes)
    run = T.Run(settings, T.Runtime(0, 1, torch.device("cpu"), False), None, None, {}, {})
    assert run.open() is None
    return run.folder


def test_a_node_that_does_not_see_the_folder_ends_the_run_before_it_trains(tmp_path, monkeypatch):
    """Otherwise its ranks would find no artifact to score, when all has been trained."""
    monkeypatch.setattr(T, "FOLDER_SECONDS", 1)
    settings = replace(T.Settings(), run_id="x", out_dir=str(tmp_path))
    monkeypatch.setattr(T.Runtime, "agree", lambda self, value: value)
    monkeypatch.setattr(
        T, "compare_ranks", lambda runtime, facts: None
    )  # test_smoke.py has a test of it
    run = T.Run(settings, T.Runtime(1, 2, torch.device("cpu"), True), None, None, {}, {})
    refusal(T.UserError, "OUT_DIR=.*rank 1 does not see .* all nodes share", run.open)
    open_run(run_id="x", out_dir=str(tmp_path))
    assert run.open() is None


def test_the_log_shows_every_setting_and_marks_changes(tmp_path):
    changes = dict(iterations=5, qat=False, run_id="x", out_dir=str(tmp_path))
    text = (open_run(**changes) / "log.txt").read_text()
    rows = text.split("\n" + "=" * 120 + "\n")[1].splitlines()[2:]  # below the command, the machine
    assert [row[2:].split("=")[0].lower() for row in rows] == list(FIELDS)
    changed = {"* ITERATIONS=5", "* QAT=0", "* RUN_ID=x", f"* OUT_DIR={tmp_path}"}
    assert {row for row in rows if row[:2] != "  "} == changed
    assert load(dict(row[2:].split("=", 1) for row in rows)) == replace(T.Settings(), **changes)


def test_a_run_has_a_new_folder_of_a_plain_name(tmp_path):
    """Runs without a name are named after the time; two may start in the same second."""
    out_dir = str(tmp_path / "deep" / "runs")
    assert open_run(out_dir=out_dir, run_id="first") == Path(out_dir, "first")
    for run_id in ("first", "..", "a/b", "../a", "/a", "a/"):
        refusal(T.UserError, "^RUN_ID=", open_run, out_dir=out_dir, run_id=run_id)
    folders = {open_run(out_dir=out_dir) for _ in range(2)}
    assert {*Path(out_dir).iterdir()} == {Path(out_dir, "first"), *folders} and len(folders) == 2
    assert all(re.fullmatch(r"run_\d{8}_\d{6}_\d{6}", folder.name) for folder in folders)


# -------------------------------------------------------------------------------------------- shape
@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, "g g g g g s1 g g g g g s1"),
        (dict(layer_pattern="g  s12 a", num_layers=5), "g s12 a g s12"),
        (dict(layer_pattern="g s A1", num_layers=2), "g s"),
    ],
)
def test_layers_are_resolved(changes, layers):
    found = T.model_config(replace(T.Settings(), norm="rms layer", **changes), 300, 1)
    count = len(layers.split())
    assert (found.layers, found.norms.split()) == (layers, (["rms", "layer"] * count)[:count])


def test_model_config_takes_the_shape_from_the_settings():
    """What no setting says keeps its default; two heads share keys and values."""
    shape = dict(model_dim=96, num_heads=6, layer_pattern="g s1", num_layers=3, rope_dims=4)
    settings = replace(T.Settings(), **shape)
    found = T.model_config(settings, 300, 1)
    defaults = T.GPTConfig(300, 1, "g s1 g", "rms rms rms")
    same = {name: getattr(settings, name) for name in asdict(found) if name in FIELDS}
    assert found == replace(defaults, **{**same, "num_kv_heads": 3, "vocab_size": 300})
    assert T.model_config(replace(settings, num_heads=1), 9, 1).num_kv_heads == 1


def test_shapes_that_do_not_fit_are_refused():
    for name, changes in {
        "MODEL_DIM=100": dict(model_dim=100),
        "MODEL_DIM=72": dict(model_dim=72),  # a multiple of the heads, of an odd width
        "NUM_HEADS=8": dict(num_kv_heads=3),
        "ROPE_DIMS=7": dict(rope_dims=7),
        "ROPE_DIMS=66": dict(rope_dims=66),
        "NORM=''": dict(norm=""),
        "NORM='rms bogus'": dict(norm="rms bogus"),
        "LAYER_PATTERN='g x'": dict(layer_pattern="g x"),
        "LAYER_PATTERN='s-1'": dict(layer_pattern="s-1"),
        "LAYER_PATTERN=' '": dict(layer_pattern=" "),
    }.items():
        refusal(T.UserError, f"^{name}", T.model_config, replace(T.Settings(), **changes), 300, 1)


# ----------------------------------------------------------------------------------------- packages
def test_uv_installs_what_requirements_txt_has():
    """By the headers of the scripts, PEP 723. Those of data need no torch."""
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    packages = [line for line in lines if not line.startswith("#")]
    light = [package for package in packages if not package.startswith("torch==")]
    text = (ROOT / "requirements-test.txt").read_text(encoding="utf-8")
    expected = {module.__name__: packages for module in SCRIPTS}
    expected["convert"] = [*packages, *re.findall("(?m)^safetensors==.*", text)]
    expected |= {"data/prepare": light, "data/download": light}
    for name, listed in expected.items():
        script = (ROOT / f"{name}.py").read_text(encoding="utf-8")
        header = re.search(r"(?ms)^# dependencies = \[\n(.*?)^# \]\n# ///$", script)[1]
        assert [line.strip("# ,")[1:-1] for line in header.splitlines()] == listed, name
        assert '\n# requires-python = ">=3.10"\n' in script
