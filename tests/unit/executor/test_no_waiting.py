"""Launches on the path of CUDA use no operation whose result the host would have to wait for, whatever is sampled."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pdserve.executor.graphs import EagerCapture
from pdserve.executor.interface import BatchPlan, Row
from pdserve.protocol.sampling import SamplingParams
from tests.driver import Driver, build, random_prompt
from tests.tiny import VOCAB_SIZE, Family
from tests.unit.model.triton_kit import DEVICE

WAITING = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::bincount", "aten::equal",
    "aten::_unique2", "aten::unique_dim", "aten::repeat_interleave.Tensor", "aten::is_nonzero",
}  # fmt: skip
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.2, seed=5, top_k=40, top_p=0.9, logit_bias={7: 3.0}),
    SamplingParams(temperature=1.0, seed=6, repetition_penalty=1.4, frequency_penalty=0.7, min_p=0.01),
    SamplingParams(temperature=0.0, presence_penalty=1.5, min_new_tokens=4, stop_token_ids=(9,)),
)


class NothingWaits(TorchDispatchMode):
    """Raises at operations whose result has a shape, or is a number, that only the device knows."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.name() not in WAITING, f"{func.name()} waits for the device"
        if func.name().startswith("aten::index") and isinstance(args[1], (list, tuple)):
            assert all(x is None or x.dtype != torch.bool for x in args[1]), "an index of bool waits for the device"
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def nothing_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within, no operation of torch waits, nor is a tensor turned into numbers."""

    def refuse(self: torch.Tensor) -> None:
        raise AssertionError("a tensor was turned into numbers")

    with monkeypatch.context() as patch, NothingWaits():
        for name in ("item", "tolist", "__bool__", "__int__", "__float__", "__index__"):
            patch.setattr(torch.Tensor, name, refuse)
        yield


def test_what_waits_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.arange(3)
    for wait in (
        lambda: tensor.max().item(),
        lambda: tensor.tolist(),
        lambda: tensor[tensor > 1],
        lambda: bool(tensor[0]),
    ):
        with pytest.raises(AssertionError), nothing_waits(monkeypatch):
            wait()


def test_a_launch_never_waits(tiny_checkpoint: Callable[[Family], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A step with prompts, then steps by replays; log probabilities are asked for by one row."""
    built = build(
        tiny_checkpoint("qwen3_moe"), dtype="float32", attention_backend="triton", context_length=64, max_rows=4,
        device="cuda" if DEVICE == "cuda" else "cpu", disable_cuda_graph=DEVICE == "cpu",
    )  # fmt: skip
    if DEVICE == "cpu":
        built.executor.capture_decode((4,), EagerCapture())
    driver, executor = Driver(built), built.executor
    rows = [
        driver.open(random_prompt(3 + i, VOCAB_SIZE), 16, sampling, top_logprobs=2 if i == 0 else None)
        for i, sampling in enumerate(SAMPLINGS)
    ]
    for step in range(2):
        spans = [(0, 3 + i) if step == 0 else (2 + i + step, 3 + i + step) for i in range(len(rows))]
        plan = BatchPlan(step, tuple(Row(str(row), row, *span, True) for row, span in zip(rows, spans, strict=True)))
        with nothing_waits(monkeypatch):
            handle = executor.launch(plan)
        assert all(token is not None for token in executor.resolve(handle).tokens)
