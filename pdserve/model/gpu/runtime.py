"""Whether Triton kernels can run here, and properties of the device. For this package and the executor factory.

Triton is imported only when a CUDA device needs it; a CPU server never imports it.
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
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def cannot_run(device: torch.device) -> str | None:
    """Return why Triton kernels cannot run on tensors of `device`; None when they can."""
    if not is_installed():
        return "triton is not installed"
    if device.type != "cuda" and not triton_is_interpreted():
        return f"Triton's kernels are for CUDA, and the device is {device.type}"
    return None


@functools.cache
def num_cores(device: torch.device) -> int:
    """Return the number of multiprocessors of `device`; a small number when kernels are interpreted."""
    if device.type != "cuda":
        return _FALLBACK_CORES
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Return shared memory per program in bytes; a small device's value when kernels are interpreted."""
    if device.type != "cuda":
        return _FALLBACK_SHARED
    from triton.runtime import driver

    index = torch.cuda.current_device() if device.index is None else device.index
    return int(driver.active.utils.get_device_properties(index)["max_shared_mem"])


@functools.cache
def chaining(device: torch.device) -> dict[str, Any]:
    """Return launch options for programmatic dependent launch; kernels see `CHAINED`.

    On devices of compute capability 9.0 or higher, a chained kernel starts while the previous kernel still runs. Its
    `gdc_wait` blocks until the previous kernel has ended. Every kernel waits before it lets the next one start. So
    waiting for the previous kernel waits for all earlier kernels, and data from before the previous kernel may be read
    without waiting.
    """
    if device.type != "cuda" or torch.version.cuda is None or torch.cuda.get_device_capability(device) < (9, 0):
        return {"CHAINED": False}
    return {"CHAINED": True, "launch_pdl": True}


def power_of_2(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << max(0, number - 1).bit_length()
