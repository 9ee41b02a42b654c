#!/usr/bin/env bash
# Runs the `tc netem` tests on a machine whose kernel has no sch_netem: under User Mode Linux, Debian's kernel as an
# ordinary program, on this machine's files. Needs scripts/setup.sh, Debian, 9 GiB of memory and three minutes. Further
# arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

(cd "$work" && apt-get download -qq user-mode-linux 2>/dev/null && dpkg -x ./*.deb .)
modules=$(echo "$work"/usr/lib/uml/modules/*/kernel)

cat >"$work/load.py" <<'PYTHON'
"""Load a kernel module without insmod."""
import ctypes, os, sys
FINIT_MODULE = 313
libc = ctypes.CDLL(None, use_errno=True)
if libc.syscall(FINIT_MODULE, os.open(sys.argv[1], os.O_RDONLY), b"", 0):
    raise OSError(ctypes.get_errno(), f"{sys.argv[1]}: {os.strerror(ctypes.get_errno())}")
PYTHON
cat >"$work/init" <<SHELL
#!/bin/bash
mkdir -p /dev/shm $work/tmp
mount -t proc proc /proc
mount -t sysfs sysfs /sys
for place in /dev/shm /run $work/tmp; do mount -t tmpfs tmpfs \$place; done
export PATH=$root/.venv/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=$work/tmp TMPDIR=$work/tmp OMP_NUM_THREADS=1
for module in lib/crc-ccitt net/llc/llc net/802/stp net/ipv6/ipv6 net/bridge/bridge drivers/net/veth net/sched/sch_netem; do
    python $work/load.py $modules/\$module.ko
done
ip link set lo up
cd $root
uname -sr
python -m pytest -p no:cacheprovider -p no:xdist --timeout 1500 -rs tests/e2e/test_namespaces.py -k netem $*
echo \$? >$work/status
/usr/sbin/halt -f
SHELL
chmod +x "$work/init"
timeout 1800 "$work/usr/bin/linux.uml" mem=8G rootfstype=hostfs rootflags=/ rw quiet \
    init="$work/init" con0=fd:0,fd:1 con=null </dev/null | sed -n '/^Linux/,$p' | tee "$work/log"
if grep -q '[1-9][0-9]* skipped' "$work/log"; then
    echo "test_netem.sh: the kernel has netem, so no test may be skipped" >&2
    exit 1
fi
exit "$(cat "$work/status")"
