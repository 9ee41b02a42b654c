"""`ForwardBatch`: one step's tokens as tensors. Built by `executor/input_batch.py`; read by decoders and backends."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pdserve.model.lora import Adapters

IntArray = npt.NDArray[np.int64]
NOWHERE = -1
"""The page of a token whose KV is not written, and the slot of a row whose state is not kept."""


@dataclasses.dataclass(frozen=True)
class HostRows:
    """The batch's rows on the host, in flat order. All arrays are int64 `[num_rows]`, except `pages`.

    Row r computes positions `[starts[r], ends[r])`; its first token has index `offsets[r]` in the flat batch.
    `prompts[r]` is its number of prompt tokens; kernels whose bits differ between prefill and decode read it.
    `pages[r]` is the row's page-table line, int32 `[max_pages]`; entries beyond the row's length are undefined.
    `window` is the same for WINDOW groups: its entries are valid for the pages in the row's window. `slots` int32
    `[num_rows]` are the state slots. Both are None without such groups.

    `num_drafts[r]` is the number of row r's draft tokens, its last ones: a row with drafts has `1 + num_drafts[r]`
    tokens beyond its prompt. None: no row has drafts. Layers with a recurrent state leave the tokens of such a row
    *pending*: its slot keeps the state before the row, and beside it what the tokens change. `num_folded[r]` is the
    number of the slot's pending tokens that are folded into the state before the row's own tokens: the first token of
    the row that left them and its accepted drafts, or 0. The others are dropped. None: nothing is folded.
    """

    starts: IntArray
    ends: IntArray
    offsets: IntArray
    prompts: IntArray
    pages: npt.NDArray[np.int32]
    window: npt.NDArray[np.int32] | None = None
    slots: npt.NDArray[np.int32] | None = None
    num_drafts: IntArray | None = None
    num_folded: IntArray | None = None
    adapters: Adapters | None = None
    """The LoRA adapter of each row. None: no row has one."""

    def in_window(self) -> HostRows:
        """Return the rows as backends over a WINDOW group see them: `pages` are the window's."""
        assert self.window is not None, "the layout has no WINDOW group"
        return dataclasses.replace(self, pages=self.window)

    def apart(self) -> HostRows:
        """Return rows without drafts: each token of a row with drafts becomes a row of one token.

        For attention kernels that compute such a row like a decode step. `num_folded` and `adapters` are dropped.
        """
        if self.num_drafts is None:
            return self
        counts = np.where(self.num_drafts > 0, 1 + self.num_drafts, 1)
        index = np.arange(len(counts)).repeat(counts)
        within = np.arange(len(index)) - (counts.cumsum() - counts).repeat(counts)
        starts, has_drafts = self.starts[index] + within, self.num_drafts[index] > 0
        return HostRows(
            starts=starts,
            ends=np.where(has_drafts, starts + 1, self.ends[index]),
            offsets=self.offsets[index] + within,
            prompts=self.prompts[index],
            pages=self.pages[index],
            window=None if self.window is None else self.window[index],
            slots=None if self.slots is None else self.slots[index],
        )


@dataclasses.dataclass(frozen=True)
class TokenEmbeds:
    """Outputs of the embedding layer that some tokens of a batch bring with them.

    `index` int64 `[M]`: flat indices of these tokens. `values` float32 `[M, hidden_size]`, with the scale of the
    embeddings if the model has one.
    """

    index: Tensor
    values: Tensor

    def put(self, x: Tensor) -> None:
        """Overwrite the embeddings of these tokens in `x` `[N, hidden_size]`, of any dtype."""
        x.index_copy_(0, self.index, self.values.to(x.dtype))


@dataclasses.dataclass(frozen=True)
class ForwardBatch:
    """A flattened batch of N tokens without padding. Tensors are int64 on the model's device.

    `columns` `[4, N]`, contiguous: token id, position, and the page and slot that the token's KV is written to.
    `sample_index` `[S]`: flat indices of the tokens that need logits. `host`: the rows on the host. `embeds`: None
    where all tokens have the model's embeddings; the first stage reads it.
    """

    columns: Tensor
    sample_index: Tensor
    host: HostRows
    embeds: TokenEmbeds | None = None

    @property
    def num_tokens(self) -> int:
        """N, the number of tokens."""
        return self.columns.shape[1]

    @property
    def input_ids(self) -> Tensor:
        """Token ids, `[N]`."""
        return self.columns[0]

    @property
    def positions(self) -> Tensor:
        """Positions, `[N]`."""
        return self.columns[1]

    @property
    def write_pages(self) -> Tensor:
        """Page of each token's KV, `[N]`."""
        return self.columns[2]

    @property
    def write_slots(self) -> Tensor:
        """Slot in the page of each token's KV, `[N]`."""
        return self.columns[3]

    def in_window(self, page_tokens: int) -> ForwardBatch:
        """Return the batch as backends over a WINDOW group see it: all pages are the window's.

        A token whose KV is not written (`NOWHERE`) is not written there either.
        """
        host = self.host.in_window()
        lengths = host.ends - host.starts
        rows = np.arange(len(lengths)).repeat(lengths)
        positions = np.arange(len(rows)) - (host.offsets - host.starts).repeat(lengths)
        pages = to_device(host.pages[rows, positions // page_tokens].astype(np.int64), self.columns.device)
        columns = self.columns.clone()
        columns[2] = torch.where(columns[2] == NOWHERE, NOWHERE, pages)
        return ForwardBatch(columns, self.sample_index, host)


def to_device(
    array: npt.NDArray[np.int32 | np.int64 | np.float32 | np.float64 | np.bool_ | np.uint8],
    device: torch.device,
) -> Tensor:
    """Copy `array` to `device` without blocking: torch keeps the pinned memory until the copy is done."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor


Filling = tuple[Tensor, npt.NDArray[np.int32] | npt.NDArray[np.int64]]
"""A tensor at a fixed address, and its new contents: an array of its shape and dtype."""


def fill(fillings: Sequence[Filling]) -> None:
    """Overwrite tensors of one device on its current stream. Does not block the host; see `to_device`.

    All contents travel in one host-to-device copy on a separate stream, which overlaps kernels of the current stream.
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
        at += len(part) + -len(part) % 8  # each part begins 8-byte aligned


@functools.cache
def _copying(device: torch.device) -> torch.cuda.Stream:
    """The copy stream of `fill`."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
