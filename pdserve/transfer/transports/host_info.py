"""Shared by transports over native engines: RDMA NICs, host or GPU memory, and addresses as text.

An address is a prefix that names the transport, and a msgpack struct, where it is more than a host and a port.
"""

from __future__ import annotations

import base64
import binascii
import ctypes
import dataclasses
import logging
import pathlib
from typing import TypeVar

import msgspec

from pdserve.errors import ConfigError, TransferError
from pdserve.transfer.transport import MooncakeProtocol

log = logging.getLogger(__name__)

INFINIBAND = pathlib.Path("/sys/class/infiniband")


def wanted_nics(ib_device: str | None) -> list[str]:
    """Return the names in `--disaggregation-ib-device`."""
    return [name.strip() for name in (ib_device or "").split(",") if name.strip()]


def choose_protocol(
    ib_device: str | None, infiniband: pathlib.Path = INFINIBAND, *, asked: MooncakeProtocol = "auto"
) -> str:
    """Return `asked`; with `auto` `rdma` where a NIC exists, else `tcp`.

    Raises:
        ConfigError: a named NIC does not exist, or `asked` is rdma and there is no NIC.
    """
    nics = sorted(entry.name for entry in infiniband.iterdir()) if infiniband.is_dir() else []
    for name in wanted_nics(ib_device):
        if name not in nics:
            raise ConfigError(
                f"there is no RDMA device {name!r} here; there is {', '.join(nics) or 'none'}",
                field="disaggregation_ib_device",
            )
    if asked == "rdma" and not nics:
        message = f"--mooncake-protocol is rdma, but there is no RDMA device in {infiniband}; use tcp or auto"
        raise ConfigError(message, field="mooncake_protocol")
    if asked != "auto":
        return asked
    return "rdma" if nics else "tcp"


def warn_unused_traffic_class(protocol: str) -> None:
    """Log a warning if the engine transfers by `tcp`, which has no InfiniBand traffic class."""
    if protocol == "tcp":
        log.warning("--disaggregation-ib-traffic-class has no effect: the transfer protocol is tcp")


DRIVERS = (("libcuda.so.1", "cuPointerGetAttribute"), ("libamdhip64.so", "hipPointerGetAttribute"))
_MEMORY_TYPE = 2
_DEVICE_ORDINAL = 9
_ON_DEVICE = 2


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryLocation:
    """Where a region lies. `device` is the GPU number; None: host memory."""

    device: int | None


HOST = MemoryLocation(None)


def place_of(address: int) -> MemoryLocation:
    """Return where an address lies, from the CUDA or HIP driver if one is installed."""
    for library, function in DRIVERS:
        try:
            driver = ctypes.CDLL(library)
        except OSError:
            continue
        if _ask(driver, function, _MEMORY_TYPE, address) == _ON_DEVICE:
            return MemoryLocation(_ask(driver, function, _DEVICE_ORDINAL, address))
    return HOST


def _ask(driver: ctypes.CDLL, function: str, attribute: int, address: int) -> int:
    """Return an attribute of a pointer; 0 where the driver does not know the pointer, as for memory of other
    allocators.
    """
    value = ctypes.c_uint(0)
    code = driver[function](ctypes.byref(value), ctypes.c_int(attribute), ctypes.c_void_p(address))
    return int(value.value) if code == 0 else 0


C = TypeVar("C", bound=msgspec.Struct)


def encode_card(prefix: str, card: msgspec.Struct) -> str:
    """Encode the struct as address text."""
    return prefix + base64.urlsafe_b64encode(msgspec.msgpack.encode(card)).decode()


def decode_card(prefix: str, address: str, kind: type[C]) -> C:
    """Decode the struct in an address. Raises `not_an_address` when the address is malformed."""
    if not address.startswith(prefix):
        raise not_an_address(prefix, address)
    try:
        return msgspec.msgpack.decode(base64.urlsafe_b64decode(address.removeprefix(prefix)), type=kind)
    except (msgspec.MsgspecError, binascii.Error, ValueError):
        raise not_an_address(prefix, address) from None


def not_an_address(prefix: str, address: str) -> TransferError:
    """Return the error for a malformed address: settled, not retryable."""
    text = f"not a {prefix.removesuffix(':')} address: {address[:100]!r}"
    return TransferError(text, code="bad_address", retryable=False)
