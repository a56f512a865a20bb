#!/usr/bin/env bash
# A fresh machine to a trained, packed and scored model: .venv -> data -> training -> a sample from the artifact.
#
#   ./run.sh                              all GPUs here, with configs/golf_1gpu.env (four or more: golf_8gpu.env);
#                                         without a GPU one CPU process, with configs/cpu.env (a slow CPU:
#                                         configs/cpu_small.env)
#   CONFIG=configs/gdn_pure.env ./run.sh  another config
#   MAX_WALLCLOCK_SECONDS=60 ./run.sh     train_gpt.py's settings pass through
#   DATA=embedded ./run.sh                no download: Python's own standard library (the default without a GPU)
#   DATA=fineweb SHARDS=2 ./run.sh        two published FineWeb training shards (the default with a GPU: as many as
#                                         the run is planned to read)
#   DATA_PATH=data/mine ./run.sh          shards that are already there: no data step
#   ./run.sh --setup-only                 the .venv, nothing else
#
# Relative paths in settings are relative to this folder, wherever it is called from.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

say() { printf '[%4ss] %s\n' "$SECONDS" "$*"; }
fail() { printf 'error: %s\n' "$*" >&2; exit 1; }

# Sets PYTHON to the first interpreter that is new enough and can build a .venv.
find_python() {
  local candidate version too_old="" without_venv=""
  for candidate in python3 python3.14 python3.13 python3.12 python3.11 python3.10; do
    version="$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" || continue
    if ! "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
      too_old="${too_old:-$candidate is $version}"
    elif ! "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
      without_venv="${without_venv:-$version}"
    else
      PYTHON="$candidate"
      return
    fi
  done
  [ -z "$without_venv" ] ||
    fail "Python $without_venv has no venv module; on Debian or Ubuntu: apt install python3-venv"
  fail "Python 3.10 or newer is needed (${too_old:-none found}); on Debian or Ubuntu: apt install python3 python3-venv"
}

# Builds .venv, unless its stamp says that it was built from these requirements for this device.
setup() {
  local stamp
  stamp="$BUILD"$'\n'"$(cat requirements.txt)"
  if [ "$(cat .venv/stamp 2>/dev/null)" = "$stamp" ] && .venv/bin/python -c '' 2>/dev/null; then
    say "Set-up: .venv is up to date ($BUILD)"
    return
  fi
  if [ -L .venv ] || { [ -e .venv ] && [ ! -e .venv/stamp ]; }; then
    fail "run.sh did not make this .venv and would empty it: move it away, or go on without run.sh (README.md)"
  fi
  find_python
  say "Set-up: .venv with $("$PYTHON" --version)"
  "$PYTHON" -m venv --clear .venv
  echo unfinished >.venv/stamp
  if [ "$BUILD" = cpu ]; then
    say "Set-up: PyTorch, the CPU build"
    # PyTorch's own index first: elsewhere a Linux wheel brings gigabytes of CUDA.
    $PIP --timeout 5 --retries 0 --index-url https://download.pytorch.org/whl/cpu \
      "$(grep '^torch==' requirements.txt)" 2>.venv/pip.log ||
      say "Set-up: nothing from PyTorch's CPU index (why: .venv/pip.log), so from the default index"
  fi
  say "Set-up: requirements.txt"
  $PIP -r requirements.txt || fail "pip could not install requirements.txt (its message is above)"
  $PIP "$(grep '^tqdm==' requirements-test.txt)" || say "Set-up: no tqdm (optional: progress bars)"
  printf '%s\n' "$stamp" >.venv/stamp
  say "Set-up: done"
}

# Sets CONFIG_LINES to the lines NAME=value of the CONFIG file, as train_gpt.py reads them (`~` is the home folder), and
# behind them the settings of the run that RESUME or REPLAY names.
read_config() {
  CONFIG_LINES="$($RUN -c 'import os; import train_gpt as T
def show():
    given = {name: text for name, text in os.environ.items() if text}
    config = T.read_config(os.path.expanduser(given["CONFIG"])) if "CONFIG" in given else {}
    config = {name: os.path.expanduser(text) for name, text in config.items()}
    for name, text in config.items():
        print(name, text, sep="=")
    for name, value in T.stored_settings({**config, **given}).items():
        print(name.upper(), T.setting_text(value), sep="=")
raise SystemExit(T.exit_code(show))')" || exit $?
}

# Prints setting $1: from the environment, else from the CONFIG file, else from the stored run, else nothing.
setting() {
  if [ -n "${!1-}" ]; then
    printf '%s' "${!1}"
  else
    printf '%s\n' "$CONFIG_LINES" | sed -n "/^$1=/{s///p;q;}"
  fi
}

# Prints the tokens of a step: the setting, or the default of train_gpt.py.
step_tokens() {
  local batch
  batch="$(setting TRAIN_BATCH_TOKENS)"
  printf '%s' "${batch:-524288}"
}

# Prints how many shards of 100 million tokens the run is planned to read on $1 GPUs: by ITERATIONS, or else by the
# clock at 2 million tokens/s a GPU: configs/transformer_baseline.env reached 1.88 million on an H200.
planned_shards() {
  local steps seconds tokens
  steps="$(setting ITERATIONS)" seconds="$(setting MAX_WALLCLOCK_SECONDS)"
  seconds="${seconds:-600}"
  tokens=$((${seconds%.*} * $1 * 2000000))
  [ "${steps:-0}" = 0 ] || tokens=$((steps * $(step_tokens)))
  printf '%s' $(((tokens + 99999999) / 100000000))
}

# Prints how many of $1 GPUs can share the windows of a step evenly.
planned_ranks() {
  local ranks="$1" length windows
  length="$(setting TRAIN_SEQ_LEN)"
  windows=$(($(step_tokens) / ${length:-2048}))
  while [ "$ranks" -gt 1 ] && [ $((windows % ranks)) != 0 ]; do ranks=$((ranks - 1)); done
  printf '%s' "$ranks"
}

# Makes the data that $1 names and points DATA_PATH at it. $2: DATA_PATH until now, $3: number of GPUs.
prepare_data() {
  local variant
  case "$1" in
    embedded)
      export DATA_PATH=data/embedded
      say "Data: the embedded text -> $DATA_PATH"
      $RUN data/prepare.py --out "$DATA_PATH" || fail "the embedded text could not be prepared (see above)"
      ;;
    fineweb)
      case "$2" in *fineweb10B_*) export DATA_PATH="$2" ;; *) export DATA_PATH="$WEB" ;; esac
      variant="${DATA_PATH##*fineweb10B_}"  # names the tokenizer
      SHARDS="${SHARDS:-$(planned_shards "$3")}"
      say "Data: $SHARDS published FineWeb training shards of $variant, ${SHARDS}00 million tokens -> $DATA_PATH"
      $RUN data/download.py --variant "$variant" --train-shards "$SHARDS" --out "$DATA_PATH" ||
        fail "no FineWeb shards (see above); to train without a download: DATA=embedded ./run.sh"
      ;;
    *) fail "DATA=$1 is unknown; DATA is embedded or fineweb" ;;
  esac
}

# torch.compile calls a compiler (Triton does so on a GPU) and includes Python.h; without them it runs uncompiled.
check_compiler() {
  local compiler headers
  [ "$(setting COMPILE)" != 0 ] || return 0
  compiler="${CXX:-$([ "$(uname)" = Darwin ] && echo clang++ || echo g++)}"
  headers="$($RUN -c 'import sysconfig; print(sysconfig.get_path("include"))')"
  if ! command -v "$compiler" >/dev/null; then
    say "Training: COMPILE=0, for there is no C++ compiler ($compiler); on Debian or Ubuntu: apt install g++"
  elif [ ! -f "$headers/Python.h" ]; then
    say "Training: COMPILE=0, for Python.h is missing; on Debian or Ubuntu: apt install python3-dev"
  else
    return 0
  fi
  export COMPILE=0
}

# Prints how many GFLOP/s the CPU does in products of matrices, in the dtype and with the threads of a run.
cpu_speed() {
  $RUN -c 'import time, torch, train_gpt as T
side = 1024
w = torch.randn(side, side, dtype=T.activation_dtype("auto", torch.device("cpu")))
def seconds():
    begin = time.perf_counter()
    w @ w
    return time.perf_counter() - begin
print(round(2 * side**3 / 1e9 / min(seconds() for _ in range(10))))'
}

# The folder of the run; one that is resumed keeps its own.
run_folder() {
  local name out
  name="$(setting RESUME)"
  name="${name:-$RUN_ID}"
  out="$(setting OUT_DIR)"
  case "$name" in */*) printf '%s' "$name" ;; *) printf '%s' "${out:-runs}/$name" ;; esac
}

train() {
  local gpus=0 ranks speed data="" path source
  read_config
  if [ "$BUILD" = cuda ] && [ "$(setting DEVICE)" != cpu ]; then
    gpus="$($RUN -c 'import torch; print(torch.cuda.device_count())')"
  fi
  if [ "$BUILD" = cuda ] && [ "$gpus" = 0 ] && [ "$(setting DEVICE)" != cpu ]; then
    say "Training: PyTorch sees no GPU (driver too old, or CUDA_VISIBLE_DEVICES empty), so on the CPU"
    export DEVICE=cpu  # DEVICE=auto is an error if nvidia-smi lists GPUs that PyTorch does not see
  fi
  if [ -z "${CONFIG-}$(setting RESUME)$(setting REPLAY)" ]; then
    case "$gpus" in
      0)
        speed="$(cpu_speed)" || fail "this CPU could not multiply two matrices (see above)"
        # docs/choices.md has what both configs scored on two kinds of CPU.
        [ "$speed" -lt 250 ] && CONFIG=configs/cpu_small.env || CONFIG=configs/cpu.env
        say "Training: this CPU multiplies matrices at $speed GFLOP/s, so $CONFIG (from 250 on: configs/cpu.env)"
        ;;
      [1-3]) CONFIG=configs/golf_1gpu.env ;;
      *) CONFIG=configs/golf_8gpu.env ;;
    esac
    export CONFIG
    read_config
  fi
  ranks="$(planned_ranks "$gpus")"
  [ "$ranks" = "$gpus" ] ||
    say "Training: on $ranks of $gpus GPUs, for TRAIN_BATCH_TOKENS must be a multiple of TRAIN_SEQ_LEN x GPUs"
  gpus="$ranks"
  # DATA_PATH of the environment stands above DATA, and DATA above DATA_PATH of the config.
  path="$(setting DATA_PATH)"
  [ -n "${DATA_PATH-}" ] || data="$DATA"
  if [ -z "$data" ] && [ -z "$path" ]; then
    data="$([ "$gpus" = 0 ] && echo embedded || echo fineweb)"
  elif [ -z "$data" ] && { [ -n "$SHARDS" ] || [ ! -f "$path/manifest.json" ]; }; then
    case "$path" in *fineweb10B_*) data=fineweb ;; esac
  fi
  [ -z "$SHARDS" ] || [ "$data" = fineweb ] ||
    fail "SHARDS=$SHARDS is only for DATA=fineweb, and the data of this run are ${data:-$path}"
  if [ -z "$data" ] && [ -f "$path/manifest.json" ] && [ ! -f "$path/token_bytes.bin" ]; then
    $RUN data/prepare.py --token-bytes "$path" || exit $?  # an older version did not write it
  fi
  [ -z "$data" ] || prepare_data "$data" "$path" "$gpus"
  [ -n "$(setting RESUME)" ] || export RUN_ID="${RUN_ID:-run_$(date +%Y%m%d_%H%M%S)_$$}"
  check_compiler
  source="${CONFIG:-the settings of the stored run}"
  if [ "$gpus" = 0 ]; then
    say "Training: one CPU process with $source -> $(run_folder)"
    $RUN train_gpt.py
  else
    say "Training: $gpus GPUs with $source -> $(run_folder)"
    .venv/bin/torchrun --standalone --nproc_per_node="$gpus" train_gpt.py
  fi
}

# sample.py refuses settings that only train_gpt.py reads, so those are taken out of its environment. DEVICE stays.
sample() {
  local artifact names prompt="$PROMPT" device="${DEVICE:-auto}"
  artifact="$(run_folder)/model.upar"
  if [ -z "$prompt" ]; then
    case "$(setting DATA_PATH)" in data/embedded) prompt="def" ;; *) prompt="The" ;; esac
  fi
  say "Sample: from $artifact, PROMPT=\"$prompt\""
  names="$($RUN -c 'import train_gpt; print(*(name.upper() for name in train_gpt.Settings.__dataclass_fields__))')"
  # shellcheck disable=SC2086
  (unset CONFIG $names; DEVICE="$device" ARTIFACT="$artifact" PROMPT="$prompt" $RUN sample.py)
  cat <<TEXT

Next:
  ARTIFACT=$artifact PROMPT="class" $RUN sample.py
  $RUN data/prepare.py my_texts/ --out data/mine && DATA_PATH=data/mine ./run.sh
  $RUN data/download.py && DATA_PATH=$WEB .venv/bin/torchrun --standalone --nproc_per_node=8 train_gpt.py
TEXT
}

RUN=.venv/bin/python
WEB=data/datasets/fineweb10B_sp1024
PIP="$RUN -m pip install --quiet --quiet --disable-pip-version-check"
BUILD=cpu
if nvidia-smi -L >/dev/null 2>&1; then BUILD=cuda; fi
# run.sh's own settings, kept from train_gpt.py, which refuses names that it does not know.
DATA="${DATA-}" SHARDS="${SHARDS-}" PROMPT="${PROMPT-}"
export -n DATA SHARDS PROMPT

case "${1-}" in
  "") setup; train; sample; say "Done" ;;
  --setup-only) setup ;;
  *) fail "unknown argument $1; usage: [SETTING=value …] ./run.sh [--setup-only]" ;;
esac
