#!/usr/bin/env bash
# The main job, from a fresh machine on: sets up, then serves SmolLM2 with prefill and decode apart and asks it a question.
# Arguments go to scripts/demo.py; `--once` ends after one answer.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh
exec .venv/bin/python scripts/demo.py "$@"
