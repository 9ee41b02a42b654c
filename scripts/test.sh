#!/usr/bin/env bash
# Sets up, then runs every check. Further arguments go to pytest (`-n 0`: one process).
#
#   --all        also runs the slow tests
#   --share F    also runs a fraction F of the slow tests, which the commit chooses, and prints which
#
#   PDSERVE_TEST_WORKERS=N   test files that run at the same time (default: one per core, 8 at most)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh
export PATH="$PWD/.venv/bin:$PATH" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
unset PYTHONDONTWRITEBYTECODE # the tests start hundreds of processes, and each would compile the package again

which=(-m "not slow")
if [ "${1:-}" = --all ]; then
    which=()
    shift
elif [ "${1:-}" = --share ]; then
    which=(--slow-share "$2" --slow-seed "$(git rev-parse HEAD 2>/dev/null || echo none)")
    shift 2
fi
cores=$(env -u OMP_NUM_THREADS nproc) # nproc would return that variable's value
workers=${PDSERVE_TEST_WORKERS:-$((cores < 8 ? cores : 8))}

ruff check
ruff format --check
mypy
lint-imports --no-logo
python -m pytest "${which[@]}" -n "$workers" --dist loadfile --no-loadscope-reorder "$@"
