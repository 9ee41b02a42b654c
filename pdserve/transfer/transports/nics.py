"""RDMA NICs of this machine. Used by the transports that can use one."""

from __future__ import annotations

import pathlib

from pdserve.errors import ConfigError

INFINIBAND = pathlib.Path("/sys/class/infiniband")


def wanted_nics(ib_device: str | None) -> list[str]:
    """The names in `--disaggregation-ib-device`."""
    return [name.strip() for name in (ib_device or "").split(",") if name.strip()]


def choose_protocol(ib_device: str | None, infiniband: pathlib.Path = INFINIBAND) -> str:
    """`rdma` where a NIC exists, else `tcp`. Raises ConfigError when a NIC is named that does not exist."""
    nics = sorted(entry.name for entry in infiniband.iterdir()) if infiniband.is_dir() else []
    for name in wanted_nics(ib_device):
        if name not in nics:
            raise ConfigError(
                f"there is no RDMA device {name!r} here; there is {', '.join(nics) or 'none'}",
                field="disaggregation_ib_device",
            )
    return "rdma" if nics else "tcp"
