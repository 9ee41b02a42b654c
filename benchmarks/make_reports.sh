#!/usr/bin/env bash
# Makes the reports of docs/benchmarking.md: a monolith and a pair of SmolLM2 on this machine, three minutes, each with
# one command of `pdserve bench`. Run it from the checkout's root with the environment active, on quiet cores.
#
#   benchmarks/make_reports.sh [FOLDER]       reports go to FOLDER/docs, results to FOLDER/benchmarks; default: here
set -euo pipefail
ROOT="$PWD" OUT="${1:-$PWD}"
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
PORT="${PORT:-18300}"
SERVER=""
LOGS="$(mktemp -d)"
mkdir -p "$OUT/docs/reports" "$OUT/docs/images" "$OUT/benchmarks/results"
cd "$OUT"
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"

stop() {
    [ -z "$SERVER" ] || { kill -TERM "$SERVER" 2>/dev/null && wait "$SERVER" || true; }
    SERVER=""
}
trap 'stop; rm -rf "$LOGS"' EXIT

bench() { # bench LABEL: one command, three files
    timeout 300 python -m pdserve bench --base-url "http://127.0.0.1:$PORT" --ready-check-timeout-sec 180 --label "$1" \
        --random-input-len 256 --random-output-len 32 --ignore-eos --num-prompts 24 --request-rate 1 2 4 \
        --goodput ttft:1000 tpot:100 \
        --output-html "docs/reports/bench-$1.html" --output-png "docs/images/bench-$1.png" \
        --output-json "benchmarks/results/$(date +%F)-bench-$1.json" || { tail -n 20 "$LOGS/$1.log" >&2; exit 1; }
}

python -m pdserve serve smollm2 --port "$PORT" --device cpu --cpu-threads 2 >"$LOGS/monolith.log" 2>&1 &
SERVER=$!
bench monolith
stop
python -m pdserve pair smollm2 --router-port "$PORT" --device cpu --cpu-threads 1 >"$LOGS/pair.log" 2>&1 &
SERVER=$!
bench pair
stop
