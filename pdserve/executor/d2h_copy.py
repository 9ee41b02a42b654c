"""Copies the results of a step to the host without blocking the launch of the next. Called by `LocalExecutor`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pdserve.executor.prompt_logprobs import PromptLogprobTensors
from pdserve.executor.sampler import Sampled
from pdserve.model.parallel import Arrival

Found = tuple[Sampled | None, PromptLogprobTensors | None]


def fetch_late(
    sampled: Sampled | None, scores: PromptLogprobTensors | None, arrival: Arrival, aside: torch.cuda.Stream | None
) -> Callable[[], Found]:
    """As `fetch`, for tensors that are under way from another rank. Later steps do not wait for them.

    `aside`: the CUDA stream of the copies; None on CPU.
    """
    if aside is None:

        def wait() -> Found:
            arrival.wait()
            return sampled, scores

        return wait
    with torch.cuda.stream(aside):
        arrival.wait()
        tensors = ([] if sampled is None else sampled.tensors()) + ([] if scores is None else list(scores.tensors()))
        for tensor in tensors:
            tensor.record_stream(aside)
        return fetch(sampled, scores, aside.device)


def fetch(sampled: Sampled | None, scores: PromptLogprobTensors | None, device: torch.device) -> Callable[[], Found]:
    """Begin the copy; returns a function that waits for all work enqueued so far and returns the host tensors.

    It waits also where nothing was sampled (None): the step's KV is written then.
    """
    if device.type != "cuda":
        return lambda: (sampled, scores)
    copies = (None if sampled is None else _copy_sampled(sampled), None if scores is None else _copy_scores(scores))
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()

    def wait() -> Found:
        done.synchronize()
        return copies

    return wait


def _copy_sampled(sampled: Sampled) -> Sampled:
    """Return host tensors that the current stream fills."""
    return Sampled(
        _pinned(sampled.token_ids),
        None if sampled.logprobs is None else _pinned(sampled.logprobs),
        None if sampled.top_ids is None else _pinned(sampled.top_ids),
        None if sampled.top_logprobs is None else _pinned(sampled.top_logprobs),
        None if sampled.picked is None else _pinned(sampled.picked),
        None if sampled.failed is None else _pinned(sampled.failed),
    )


def _copy_scores(scores: PromptLogprobTensors) -> PromptLogprobTensors:
    """Return host tensors that the current stream fills."""
    return PromptLogprobTensors(*map(_pinned, scores.tensors()))


def _pinned(tensor: Tensor) -> Tensor:
    """Return a pinned host tensor that the current stream fills."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
