"""Whose memory an address is: the host's or a GPU's. Used by the transports whose engines want to be told."""

from __future__ import annotations

import ctypes
import dataclasses
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


DRIVERS = (("libcuda.so.1", "cuPointerGetAttribute"), ("libamdhip64.so", "hipPointerGetAttribute"))
_MEMORY_TYPE = 2
_DEVICE_ORDINAL = 9
_ON_DEVICE = 2


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryLocation:
    """Where a region lies. `device` is the GPU's number, None for host memory."""

    device: int | None


HOST = MemoryLocation(None)


def place_of(address: int) -> MemoryLocation:
    """Asks the driver of CUDA or of HIP, where there is one."""
    for library, function in DRIVERS:
        try:
            driver = ctypes.CDLL(library)
        except OSError:
            continue
        if _ask(driver, function, _MEMORY_TYPE, address) == _ON_DEVICE:
            return MemoryLocation(_ask(driver, function, _DEVICE_ORDINAL, address))
    return HOST


def _ask(driver: ctypes.CDLL, function: str, attribute: int, address: int) -> int:
    """An attribute of a pointer; 0 where the driver does not know it, as with memory that it did not allocate."""
    value = ctypes.c_uint(0)
    code = driver[function](ctypes.byref(value), ctypes.c_int(attribute), ctypes.c_void_p(address))
    return int(value.value) if code == 0 else 0
