"""Launches on the path of CUDA use no operation whose result the host would have to wait for, whatever is sampled.

But for one exception that no operation shows: the last token of a row with a grammar, by a thread (`grammar_rows.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from pdserve.executor.graphs import EagerCapture
from pdserve.executor.interface import BatchPlan, BatchRow
from pdserve.protocol.sampling import CoreSamplingParams, Grammar
from tests.driver import Driver, build, random_prompt
from tests.model_families import FAMILIES
from tests.share import rest_slow
from tests.tiny import VOCAB_SIZE, Family
from tests.unit.model.triton_kit import DEVICE

WAITING = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::bincount", "aten::equal",
    "aten::_unique2", "aten::unique_dim", "aten::repeat_interleave.Tensor", "aten::is_nonzero",
}  # fmt: skip
MAKES_AND_SENDS = {torch.tensor, torch.as_tensor, torch.asarray}
SENDS = {torch.Tensor.to, torch.Tensor.cuda}
SAMPLINGS = (
    CoreSamplingParams(temperature=0.0),
    CoreSamplingParams(temperature=1.2, seed=5, top_k=40, top_p=0.9, logit_bias={7: 3.0}),
    CoreSamplingParams(temperature=1.0, seed=6, repetition_penalty=1.4, frequency_penalty=0.7, min_p=0.01),
    CoreSamplingParams(temperature=0.0, presence_penalty=1.5, min_new_tokens=4, stop_token_ids=(9,)),
    CoreSamplingParams(temperature=1.0, seed=7, grammar=Grammar(kind="regex", text="[0-9]{9}")),
)


class NothingWaits(TorchDispatchMode):
    """Raises at operations whose result has a shape, or is a number, that only the device knows."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.name() not in WAITING, f"{func.name()} waits for the device"
        if func.name().startswith("aten::index") and isinstance(args[1], (list, tuple)):
            assert all(x is None or x.dtype != torch.bool for x in args[1]), "an index of bool waits for the device"
        return func(*args, **(kwargs or {}))


class NothingIsSentAndWaitedFor(TorchFunctionMode):
    """Raises at copies to a named device that wait, whichever device that is: out of memory that is not pinned."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        assert func is not torch.Tensor.new_tensor, "new_tensor waits for the copy to the device"
        if func in MAKES_AND_SENDS:
            assert kwargs.get("device") is None, f"{func.__name__} waits for the copy to the device; see `to_device`"
        if func in SENDS and (func is torch.Tensor.cuda or names_a_device(args[1:], kwargs)):
            assert args[0].is_pinned() and kwargs.get("non_blocking"), f"{func.__name__} waits for the copy"
        return func(*args, **kwargs)


def names_a_device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether these arguments of `Tensor.to` say where to."""
    return any(isinstance(value, (torch.device, str)) for value in (*args, kwargs.get("device")))


@contextlib.contextmanager
def nothing_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within, no operation of torch waits, nor is a tensor turned into numbers, or numbers sent as a tensor."""

    def refuse(self: torch.Tensor) -> None:
        raise AssertionError("a tensor was turned into numbers")

    with monkeypatch.context() as patch, NothingWaits(), NothingIsSentAndWaitedFor():
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
        lambda: torch.tensor([1, 2], device=DEVICE),
        lambda: torch.as_tensor([1, 2], device=torch.device(DEVICE)),
        lambda: tensor.new_tensor([1, 2]),
        lambda: tensor.to(DEVICE),
        lambda: tensor.to(device=torch.device(DEVICE), non_blocking=True),
    ):
        with pytest.raises(AssertionError), nothing_waits(monkeypatch):
            wait()


@pytest.mark.parametrize("has_state", rest_slow([False, True]))
def test_a_launch_never_waits(
    tiny_checkpoint: Callable[[Family], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_state: bool
) -> None:
    """A step with prompts, then steps by replays; one row asks for log probabilities, one follows a grammar."""
    checkpoint, samplings = tmp_path, SAMPLINGS[:-1]  # without an EOS token there is no grammar
    if has_state:
        FAMILIES["qwen3_next"].write(checkpoint)
    else:
        checkpoint, samplings = tiny_checkpoint("qwen3_moe"), SAMPLINGS
    built = build(
        checkpoint, dtype="float32", attention_backend="triton", context_length=64, max_rows=5,
        device="cuda" if DEVICE == "cuda" else "cpu", disable_cuda_graph=DEVICE == "cpu",
    )  # fmt: skip
    if DEVICE == "cpu":
        built.executor.capture_decode((5,), EagerCapture())
    driver, executor = Driver(built), built.executor
    rows = [
        driver.open(random_prompt(3 + i, VOCAB_SIZE), 16, sampling, top_logprobs=2 if i == 0 else None)
        for i, sampling in enumerate(samplings)
    ]
    for step in range(2):
        spans = [(0, 3 + i) if step == 0 else (2 + i + step, 3 + i + step) for i in range(len(rows))]
        plan = BatchPlan(
            step, tuple(BatchRow(str(row), row, *span, True) for row, span in zip(rows, spans, strict=True))
        )
        with nothing_waits(monkeypatch):
            handle = executor.launch(plan)
        result = executor.resolve(handle)
        assert all(token is not None for token in result.tokens) and not result.failed
