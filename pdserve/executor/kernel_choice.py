"""Chooses between the native CPU kernels in C++ and torch. `factory` calls it once the model's spec is known."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from pdserve.base.native import Unavailable, best_level
from pdserve.config.groups import KernelConfig, ModelConfig
from pdserve.errors import ConfigError
from pdserve.model.config import ModelSpec
from pdserve.model.families.decoder import Decoder
from pdserve.model.native import ops
from pdserve.model.native.decoder import NativeDecoder, cannot_run
from pdserve.model.native.program import Threads

_LOG = logging.getLogger(__name__)


def choose_level(
    kernels: KernelConfig, model: ModelConfig, spec: ModelSpec, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Return the instruction-set level of the native kernels; None: torch. Logs the reason when `auto` falls back to
    torch.

    Raises:
        ConfigError: `--cpu-kernels native` or `--quantization` needs the kernels, and they cannot run this model
            here.
    """
    if kernels.cpu_kernels == "torch":
        reason: str | None = "cpu_kernels is torch"
    elif kernels.attention_backend != "auto":
        reason = f"attention_backend is {kernels.attention_backend}"
    else:
        reason = cannot_run(spec, dtype, device)
    if reason is None:
        try:
            return best_level()
        except Unavailable as unavailable:
            reason = str(unavailable)
    if model.quantization is not None:
        raise ConfigError(
            f"quantization {model.quantization} needs the native CPU kernels: {reason}", field="quantization"
        )
    if kernels.cpu_kernels == "native":
        raise ConfigError(f"cpu_kernels is native, but {reason}", field="cpu_kernels")
    if device.type == "cpu" and kernels.cpu_kernels == "auto":
        _LOG.info("the model runs with torch: %s", reason)
    return None


def make_native(
    model: Decoder,
    config: ModelConfig,
    level: str,
    packing: Callable[[], AbstractContextManager[object]],
) -> NativeDecoder:
    """Take `model` over into the native kernels, with as many threads as torch has.

    `packing()` is a context around weight packing. Where the threads take all cores of this process, all but the
    calling thread are pinned to a core each: two of them on one core would wait for each other.
    """
    count = torch.get_num_threads()
    cores = sorted(os.sched_getaffinity(0))
    threads = Threads(count, cores[1:] if len(cores) == count else None)
    ops.use(threads, level)
    native = NativeDecoder(model, threads, level, "bf16" if config.quantization is None else "int8", packing)
    _LOG.info("the model runs with native kernels: %s, %d threads", level, count)
    return native
