"""Whether a model is computed by the CPU kernels in C++ or by torch. Called by `factory`, once a model is known."""

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
    """The instruction-set level to compute at; None: with torch. What was not asked for is said in the log.

    Raises:
        ConfigError: the kernels are asked for, by name or by `--quantization`, and cannot run this model here.
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
        _LOG.info("the model is computed with torch: %s", reason)
    return None


def make_native(
    model: Decoder,
    config: ModelConfig,
    level: str,
    packing: Callable[[], AbstractContextManager[object]],
) -> NativeDecoder:
    """`model`, taken over by the kernels with as many threads as torch has. `packing` surrounds what packs weights.

    Where these take all the cores that this process may use, all but the calling thread get one of their own: there is
    nowhere better to move to, and two of them on one core would wait for each other.
    """
    count = torch.get_num_threads()
    cores = sorted(os.sched_getaffinity(0))
    threads = Threads(count, cores[1:] if len(cores) == count else None)
    ops.use(threads, level)
    native = NativeDecoder(model, threads, level, "bf16" if config.quantization is None else "int8", packing)
    _LOG.info("the model is computed by native kernels: %s, %d threads", level, count)
    return native
