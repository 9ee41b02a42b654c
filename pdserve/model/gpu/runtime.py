"""Whether Triton's kernels can run here, and what they ask of the device. For this package and the factory.

Nothing here imports Triton before it is asked for: a server on a CPU never does.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch

from pdserve.base.env import triton_is_interpreted

_FALLBACK_CORES = 4
_FALLBACK_SHARED = 99 << 10


@functools.cache
def is_installed() -> bool:
    """Whether there is a Triton to import."""
    return importlib.util.find_spec("triton") is not None


def cannot_run(device: torch.device) -> str | None:
    """Why Triton's kernels cannot run on tensors of `device`; None when they can."""
    if not is_installed():
        return "triton is not installed"
    if device.type != "cuda" and not triton_is_interpreted():
        return f"Triton's kernels are for CUDA, and the device is {device.type}"
    return None


@functools.cache
def num_cores(device: torch.device) -> int:
    """Multiprocessors of `device`; a small number where kernels are interpreted."""
    if device.type != "cuda":
        return _FALLBACK_CORES
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that a program may have; a small device's where kernels are interpreted."""
    if device.type != "cuda":
        return _FALLBACK_SHARED
    from triton.runtime import driver

    index = torch.cuda.current_device() if device.index is None else device.index
    return int(driver.active.utils.get_device_properties(index)["max_shared_mem"])


@functools.cache
def chaining(device: torch.device) -> dict[str, Any]:
    """What a launch is given besides its arguments, of which kernels see `CHAINED`.

    On devices that can (compute capability 9.0), a chained kernel comes up while the one before it still runs
    (programmatic dependent launch). Its `gdc_wait` waits until all kernels before it are done. Every kernel has one and
    lets none up before it: so whoever waits for the last waits for all, and what was there before the last one may be
    read without waiting.
    """
    if device.type != "cuda" or torch.version.cuda is None or torch.cuda.get_device_capability(device) < (9, 0):
        return {"CHAINED": False}
    return {"CHAINED": True, "launch_pdl": True}


def power_of_2(number: int) -> int:
    """The smallest power of two that is not below `number`."""
    return 1 << max(0, number - 1).bit_length()
