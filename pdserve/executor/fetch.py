"""Brings what a step sampled to the host without waiting for the device. Called by `LocalExecutor`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pdserve.executor.sampler import Sampled


def fetch(sampled: Sampled | None, device: torch.device) -> Callable[[], Sampled | None]:
    """Begin the copy; the function returned waits until everything enqueued so far is done, and gives host tensors.

    None, when nothing was sampled, is waited for as well: the step's KV is written then.
    """
    if device.type != "cuda":
        return lambda: sampled
    copy = None if sampled is None else _pinned_copy(sampled)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()

    def wait() -> Sampled | None:
        done.synchronize()
        return copy

    return wait


def _pinned_copy(sampled: Sampled) -> Sampled:
    """Host tensors that the current stream will fill."""
    return Sampled(
        _pinned(sampled.token_ids),
        None if sampled.logprobs is None else _pinned(sampled.logprobs),
        None if sampled.top_ids is None else _pinned(sampled.top_ids),
        None if sampled.top_logprobs is None else _pinned(sampled.top_logprobs),
    )


def _pinned(tensor: Tensor) -> Tensor:
    """A pinned host tensor that the current stream will fill."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
