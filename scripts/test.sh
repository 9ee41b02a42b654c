#!/usr/bin/env bash
# Sets up, then runs every check. `--all` also runs the slow tests; further arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh
export PATH="$PWD/.venv/bin:$PATH" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

which=(-m "not slow")
if [ "${1:-}" = --all ]; then
    which=()
    shift
fi

ruff check
ruff format --check
mypy
lint-imports --no-logo
python -m pytest "${which[@]}" "$@"
