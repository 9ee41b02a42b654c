#!/usr/bin/env bash
# What to run at once on a machine with one GPU, the most wanted first; twenty minutes at most, eleven as a rule. A
# failure of one step does not stop the next. Arguments choose steps: packages pair hybrid hybrid-timings hybrid-pair
# fence checks timings verify (all when absent). Where a call may take ten minutes: the first four, and the others in a
# second call.
#
#   packages   installs what build/gpu-wheels holds (`python -m benchmarks.gpu.wheels --make`, beforehand) into
#              build/gpu-site, for the steps behind it
#   pair       prefill, decode and router on the one GPU beside a monolith: equal tokens, TTFT, KV from GPU to GPU
#   hybrid     kernels and tiny models with recurrent layers and windows, against torch and the CPU
#   hybrid-timings   these kernels, and decode and prefill of Qwen3.5-0.8B and of 8 layers of Qwen3-Next
#   hybrid-pair      the pair with a tiny Qwen3-Next, and random weights of Qwen3.5-0.8B: KV and states from GPU to GPU
#   fence      no byte lands in the GPU's memory after a fence, whatever the sender does
#   checks     kernels and tiny models against the CPU
#   timings    decode and prefill of published shapes
#   verify     a verify step of 4 tokens beside a decode step: the shape of Qwen3-8B, batch 1 and 16
#
#   OUT=DIR      a folder: it gets summary.txt, the reports, and all else in gpu-next.tar.gz, anew after each step;
#                without it all is in build/gpu only
#   DEVICE=cpu   tries this script out where there is no GPU, with tiny shapes; a minute or two
#   PYTHON=...   which Python (python3)
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

PYTHON=${PYTHON:-python3}
DEVICE=${DEVICE:-cuda}
FILES=$PWD/build/gpu
KEEP=${OUT:-}
SUMMARY=$FILES/summary.txt
STEPS=${*:-packages pair hybrid hybrid-timings hybrid-pair fence checks timings verify}
WORST=0
unset OUT # each step is told where to write
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

# step NAME SECONDS COMMAND...: the output goes into a log, its last lines to the terminal, the status into the summary.
step() {
    local name=$1 limit=$2 began=$SECONDS code
    shift 2
    printf '\n== %s, at most %s s: %s\n' "$name" "$limit" "$*"
    mkdir -p "$FILES/$name"
    OUT=$FILES/$name timeout --kill-after=5 "$limit" "$@" >"$FILES/$name.log" 2>&1
    code=$?
    tail -n 25 "$FILES/$name.log"
    note "$name" "$code" $((SECONDS - began))
}

note() {
    local meaning=failed
    case $2 in
        0) meaning=passed ;;
        3) meaning="no CUDA device" ;;
        124 | 137) meaning="ran into its time limit" ;;
    esac
    [ "$2" -eq 0 ] || WORST=1
    printf '%-14s %6s %8s  %s\n' "$1" "$2" "$3" "$meaning" >>"$SUMMARY"
    save
}

save() {
    [ -n "$KEEP" ] || return 0
    local report
    mkdir -p "$KEEP"
    cp "$SUMMARY" "$KEEP/"
    for report in "$FILES"/*/*.md; do
        [ ! -e "$report" ] || cp "$report" "$KEEP/$(basename "$(dirname "$report")").md"
    done
    tar -czf "$KEEP/gpu-next.tar.gz" -C "$FILES" .
}

install_packages() {
    local began=$SECONDS code lines
    lines=$(timeout 60 "$PYTHON" -m benchmarks.gpu.wheels --install 2>"$FILES/packages.log")
    code=$?
    eval "$lines"
    cat "$FILES/packages.log"
    note packages "$code" $((SECONDS - began))
}

mkdir -p "$FILES"
{
    echo "$(date -u +%FT%TZ), revision $(git rev-parse --short=12 HEAD 2>/dev/null || echo unknown)"
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null || echo "no nvidia-smi"
    printf '%-14s %6s %8s\n' step status seconds
} >"$SUMMARY"

if [ "$DEVICE" = cpu ]; then
    pair=(--device cpu --models tiny-fp32 --prompts 4 --prompt-lens 17 300 --output-len 8)
    fence=(--device cpu --share-mb 16 --rounds 3 --wait 0.5)
    hybrid_pair=(--device cpu --models tiny-hybrid-fp32 --prompts 4 --prompt-lens 17 300 --output-len 8)
    hybrid=(--tiny --hybrid --skip-timings)
    hybrid_timings=(--tiny --hybrid --skip-checks)
    checks=(--tiny --skip-timings)
    timings=(--tiny --skip-checks)
    verify=(--tiny)
else
    pair=(--max-minutes 3)
    fence=(--rounds 9)
    hybrid_pair=(--models tiny-hybrid-fp32 Qwen3.5-0.8B --engines nixl --copies 1 --max-minutes 1.5)
    hybrid=(--hybrid --skip-timings --max-minutes 1.5)
    hybrid_timings=(--hybrid --skip-checks --max-minutes 1.6)
    checks=(--skip-timings --max-minutes 1.7)
    timings=(--skip-checks --models Qwen3-8B Qwen3-0.6B --max-minutes 1.8)
    verify=(--max-minutes 1.5)
fi

for name in $STEPS; do
    case $name in
        packages) install_packages ;;
        pair) step pair 250 "$PYTHON" -m benchmarks.gpu.pair_on_one_gpu "${pair[@]}" ;;
        hybrid) step hybrid 110 "$PYTHON" -m benchmarks.gpu.check_cuda "${hybrid[@]}" ;;
        hybrid-timings) step hybrid-timings 120 "$PYTHON" -m benchmarks.gpu.check_cuda "${hybrid_timings[@]}" ;;
        hybrid-pair) step hybrid-pair 160 "$PYTHON" -m benchmarks.gpu.pair_on_one_gpu "${hybrid_pair[@]}" ;;
        fence) step fence 110 "$PYTHON" -m benchmarks.gpu.fence_check "${fence[@]}" ;;
        checks) step checks 120 "$PYTHON" -m benchmarks.gpu.check_cuda "${checks[@]}" ;;
        timings) step timings 130 "$PYTHON" -m benchmarks.gpu.check_cuda "${timings[@]}" ;;
        verify) step verify 120 "$PYTHON" -m benchmarks.gpu.verify_timings "${verify[@]}" ;;
        *) note "$name?" 2 0 ;;
    esac
done

printf '\n'
cat "$SUMMARY"
echo "reports and logs: ${KEEP:-$FILES}"
exit $WORST
