#!/usr/bin/env bash
# Sets up .venv-clients: clients of other projects for tests against a pair (lm-eval, litellm, SGLang's bench_serving).
# They have a separate environment, because they need other package versions and no torch. It may run again. Called by
# the slow tests in tests/e2e/test_real_clients.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=.venv-clients
PINS=tests/e2e/clients-constraints.txt
want="$(cat "$PINS" scripts/setup_clients.sh | sha256sum | cut -d' ' -f1)"
[ "$(cat "$VENV/.pdserve-setup" 2>/dev/null)" != "$want" ] || exit 0

"${PYTHON:-python3}" -m venv "$VENV"
pip="$VENV/bin/python -m pip --disable-pip-version-check -q"
$pip install -c "$PINS" "lm-eval[api]" transformers litellm pybase64 pillow
# Only one file of it is run, benchmark and client, which needs no part of the engine.
$pip install -c "$PINS" --no-deps sglang
echo "$want" >"$VENV/.pdserve-setup"
