#!/usr/bin/env bash
# One prefill server, one decode server and a router on this machine, each as its own process, started by hand.
#
#   configs/local_1p1d.sh [MODEL]          MODEL: a directory with HF safetensors, a .gguf file, or smollm2 (default)
#
# `python -m pdserve.launch_local --model-path MODEL` does the same in one command. This file shows the single
# commands, for use in a unit file or a container. Ctrl-C ends all three. Run scripts/setup.sh once before.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

MODEL=${1:-smollm2}
PYTHON=${PYTHON:-.venv/bin/python}
HOST=127.0.0.1
PREFILL_PORT=30001
DECODE_PORT=30002
BOOTSTRAP_PORT=8998     # decode looks up the prefill server's control port here
ROUTER_PORT=8000

# The secret that seals messages between the servers. On several hosts: the same value on all. Without an API key the
# servers accept only requests of a router that has it, too.
export PDSERVE_CONTROL_TOKEN=${PDSERVE_CONTROL_TOKEN:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}

# Two servers that both use all cores slow each other down several times: each gets half of the cores.
THREADS=$(( $(nproc) / 2 > 0 ? $(nproc) / 2 : 1 ))
export OMP_NUM_THREADS=$THREADS

# Must be equal on both sides; the handshake refuses a difference and names the field.
SHARED=(--model-path "$MODEL" --dtype auto --host "$HOST" --cpu-threads "$THREADS")

# Prefill holds prompts for a short time: a small pool suffices. --chunked-prefill-size: tokens of a prompt in a step.
"$PYTHON" -m pdserve.launch_server "${SHARED[@]}" --disaggregation-mode prefill --port "$PREFILL_PORT" \
    --disaggregation-bootstrap-port "$BOOTSTRAP_PORT" --max-total-tokens 16384 --chunked-prefill-size 2048 &
# Decode holds every running conversation to its end: give it most of the memory.
"$PYTHON" -m pdserve.launch_server "${SHARED[@]}" --disaggregation-mode decode --port "$DECODE_PORT" \
    --max-total-tokens 65536 --max-running-requests 64 &
# The router may start first: it returns 503 until a pair is healthy.
"$PYTHON" -m pdserve.launch_router --pd-disaggregation --policy least_loaded --host "$HOST" --port "$ROUTER_PORT" \
    --prefill "http://$HOST:$PREFILL_PORT" "$BOOTSTRAP_PORT" --decode "http://$HOST:$DECODE_PORT" &

stop() { trap - INT TERM EXIT; kill -TERM $(jobs -p) 2>/dev/null || true; wait; }
trap 'stop; exit 0' INT TERM
trap stop EXIT
wait -n         # the first process that ends stops the other two
