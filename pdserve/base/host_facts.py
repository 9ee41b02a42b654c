"""Facts of this host that `/get_server_info` reports as `host_facts`: clock, memory, shared memory, RDMA devices.

`pdserve doctor` compares them over all servers; `pdserve env` prints some. A fact that cannot be read is None.
"""

from __future__ import annotations

import dataclasses
import platform
import shutil
import socket
import time
from pathlib import Path

from pdserve.base.host_memory import available_bytes, total_bytes

INFINIBAND = Path("/sys/class/infiniband")
SHARED_MEMORY = Path("/dev/shm")
CPU_INFO = Path("/proc/cpuinfo")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostFacts:
    """Facts of one host at one moment.

    `time_s`: seconds since 1970 by this host's clock. Both memory sizes are bounded by the container's limits.
    `shm_free_bytes`: free space of `/dev/shm`. `rdma_devices`: names of the kernel's RDMA devices, such as `mlx5_0`.
    `rdma_ports`: state of each port by device and number, such as `{"mlx5_0:1": "ACTIVE"}`.
    """

    name: str
    time_s: float
    memory_available_bytes: int | None
    memory_total_bytes: int | None
    shm_free_bytes: int | None
    rdma_devices: tuple[str, ...]
    rdma_ports: dict[str, str]


def host_facts() -> HostFacts:
    """Read the facts. Takes less than a millisecond; raises nothing."""
    try:
        available, total = available_bytes(), total_bytes()
    except (OSError, ValueError):
        available, total = None, None
    try:
        shm_free = shutil.disk_usage(SHARED_MEMORY).free
    except OSError:
        shm_free = None
    return HostFacts(
        name=socket.gethostname(),
        time_s=time.time(),
        memory_available_bytes=available,
        memory_total_bytes=total,
        shm_free_bytes=shm_free,
        rdma_devices=rdma_devices(),
        rdma_ports=rdma_ports(),
    )


def rdma_devices(folder: Path = INFINIBAND) -> tuple[str, ...]:
    """Return the names of the RDMA devices in `folder`, sorted; empty without any."""
    try:
        return tuple(sorted(entry.name for entry in folder.iterdir()))
    except OSError:
        return ()


def rdma_ports(folder: Path = INFINIBAND) -> dict[str, str]:
    """Return the state of each port of the RDMA devices in `folder`, by `DEVICE:PORT`; without those of no file.

    A port that can move data is `ACTIVE`; others are `DOWN`, `INIT`, `ARMED` or `ACTIVE_DEFER`.
    """
    found = {}
    for device in rdma_devices(folder):
        try:
            for port in sorted((folder / device / "ports").iterdir()):
                state = (port / "state").read_text()  # such as `4: ACTIVE`
                found[f"{device}:{port.name}"] = state.rpartition(":")[2].strip()
        except OSError:
            continue
    return found


def cpu_model(info: Path = CPU_INFO) -> str:
    """Return the processor's name with its family and model: machines on different processors may have one name."""
    try:
        lines = info.read_text().splitlines()
    except OSError:
        lines = []
    facts: dict[str, str] = {}
    for line in lines:
        key, _, value = line.partition(":")
        facts.setdefault(key.strip(), value.strip())
    if "model name" not in facts:
        return platform.processor() or platform.machine()
    if "cpu family" not in facts or "model" not in facts:
        return facts["model name"]
    return f"{facts['model name']} (family {facts['cpu family']}, model {facts['model']})"
