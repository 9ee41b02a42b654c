#!/usr/bin/env bash
# Makes the reports of docs/benchmarking.md: a monolith and a pair of SmolLM2 on this machine, less than six minutes. Each
# has a sweep of rates up to the knee, in rounds, and a search for its highest rate within the limits: one command of
# `pdserve bench` for each. Run it from the checkout's root with the environment active, on quiet cores.
#
#   benchmarks/make_reports.sh [FOLDER]       reports go to FOLDER/docs, results to FOLDER/benchmarks; default: here
#
# RATES, ROUNDS and PROMPTS (of a run) change the sweep, FIRST the rate at which the search begins.
set -euo pipefail
ROOT="$PWD" OUT="${1:-$PWD}"
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
PORT="${PORT:-18300}"
RATES="${RATES:-2 4 8 12 16}" ROUNDS="${ROUNDS:-3}" PROMPTS="${PROMPTS:-32}" FIRST="${FIRST:-8}"
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

run() { # run LABEL NAME FLAGS...: one command, its files are called NAME
    local label="$1" name="$2"
    shift 2
    timeout 300 python -m pdserve bench --base-url "http://127.0.0.1:$PORT" --ready-check-timeout-sec 180 \
        --label "$label" --random-input-len 256 --random-output-len 32 --ignore-eos --num-prompts "$PROMPTS" \
        --goodput ttft:1000 tpot:100 "$@" --output-html "docs/reports/$name.html" \
        --output-json "benchmarks/results/$(date +%F)-$name.json" || { tail -n 20 "$LOGS/$label.log" >&2; exit 1; }
}

bench() { # bench LABEL: the sweep, with a picture of its charts, then the search
    # shellcheck disable=SC2086 # RATES are several words
    run "$1" "bench-$1" --request-rate $RATES --num-rounds "$ROUNDS" --output-png "docs/images/bench-$1.png"
    run "$1" "bench-$1-search" --request-rate "$FIRST" --search-goodput
}

python -m pdserve serve smollm2 --port "$PORT" --device cpu --cpu-threads 2 >"$LOGS/monolith.log" 2>&1 &
SERVER=$!
bench monolith
stop
python -m pdserve pair smollm2 --router-port "$PORT" --device cpu --cpu-threads 1 >"$LOGS/pair.log" 2>&1 &
SERVER=$!
bench pair
stop
