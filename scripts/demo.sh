#!/usr/bin/env bash
# Installs what serving needs on a fresh machine, serves SmolLM2 on one prefill and one decode server, and sends it a
# question. Arguments go to scripts/demo.py; `--once` ends after one answer.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh --serve
exec .venv/bin/python scripts/demo.py "$@"
