"""One step's tokens as tensors. Built by `executor/batch_builder.py`, read by families and attention backends."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

IntArray = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class HostRows:
    """The batch's rows on the host, in flat order. All int64 `[num_rows]`, but `pages`.

    Row r computes positions `[starts[r], ends[r])`; its first token lies at `offsets[r]` of the flat batch.
    `prompts[r]` tokens of it are its prompt; kernels whose bits are not those of decode there go by it.
    `pages[r]` is its line of the page table, `[max_pages]` int32; entries beyond its length mean nothing.
    """

    starts: IntArray
    ends: IntArray
    offsets: IntArray
    prompts: IntArray
    pages: npt.NDArray[np.int32]


@dataclasses.dataclass(frozen=True)
class ForwardBatch:
    """A flattened batch of N tokens, no padding. Tensors are int64 on the model's device.

    `columns` `[4, N]`, contiguous: each token, its position, and page and slot where its KV goes. `sample_index` `[S]`:
    flat indices of the tokens whose logits are wanted. `host`: the same rows on the host.
    """

    columns: Tensor
    sample_index: Tensor
    host: HostRows

    @property
    def num_tokens(self) -> int:
        """N."""
        return self.columns.shape[1]

    @property
    def input_ids(self) -> Tensor:
        """`[N]`."""
        return self.columns[0]

    @property
    def positions(self) -> Tensor:
        """`[N]`."""
        return self.columns[1]

    @property
    def write_pages(self) -> Tensor:
        """`[N]`."""
        return self.columns[2]

    @property
    def write_slots(self) -> Tensor:
        """`[N]`."""
        return self.columns[3]


def to_device(
    array: npt.NDArray[np.int32 | np.int64 | np.float32 | np.float64 | np.bool_ | np.uint8],
    device: torch.device,
) -> Tensor:
    """`array` on `device`. The copy does not wait for it: torch keeps the pinned memory until it has been read."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor


Filling = tuple[Tensor, npt.NDArray[np.int32] | npt.NDArray[np.int64]]
"""A tensor that stays, and what it becomes: an array of its shape and dtype."""


def fill(fillings: Sequence[Filling]) -> None:
    """Overwrite tensors of one device, in its current stream. Nothing waits; see `to_device`.

    All that they become travels there in one copy, in a stream of its own: while what is in the current one still runs.
    """
    device = fillings[0][0].device
    if device.type != "cuda":
        for target, array in fillings:
            target.copy_(torch.from_numpy(np.ascontiguousarray(array)))
        return
    parts = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for _, array in fillings]
    stream = _copying(device)
    with torch.cuda.stream(stream):
        packed = to_device(np.concatenate([np.pad(part, (0, -len(part) % 8)) for part in parts]), device)
    current = torch.cuda.current_stream(device)
    current.wait_stream(stream)
    packed.record_stream(current)
    at = 0
    for (target, _), part in zip(fillings, parts, strict=True):
        target.copy_(packed[at : at + len(part)].view(target.dtype).view(target.shape))
        at += len(part) + -len(part) % 8  # each begins where a wide number may


@functools.cache
def _copying(device: torch.device) -> torch.cuda.Stream:
    """The stream of `fill`."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
