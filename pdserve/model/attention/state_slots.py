"""`StateSlots`: the recurrent states of one STATE group, offered to the layers of a step. The layers compute.

Beside the states it has the pending tokens of rows with drafts, in the model's own memory, which no peer reads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from pdserve.errors import ConfigError
from pdserve.memory.layout import KVGroup
from pdserve.model.attention.interface import LayerStates, StateRows
from pdserve.model.attention.page_gather import GroupPool
from pdserve.model.forward_batch import NOWHERE, Filling, HostRows, IntArray, to_device
from pdserve.model.layers.gated_delta import CONV_PLANES, MAX_PENDING, DeltaRows, PendingTokens, fold_pending
from pdserve.model.params import torch_dtype


def state_rows(host: HostRows, device: torch.device) -> StateRows:
    """Send the rows of a step to the device, in one copy."""
    assert host.slots is not None, "the layout has no STATE group"
    num_rows = len(host.starts)
    lengths = host.ends - host.starts
    packed = to_device(np.concatenate((host.slots, host.starts, [0], lengths.cumsum())).astype(np.int64), device)
    slots, starts, offsets = packed[:num_rows], packed[num_rows : 2 * num_rows], packed[2 * num_rows :]
    return StateRows(slots, starts, offsets, host, is_decode=bool((lengths == 1).all()))


def pending_tokens(pool: GroupPool, max_drafts: int, *, channel_decay: bool = False) -> list[PendingTokens | None]:
    """Allocate the pending tokens of each layer of a STATE group; None for each without drafts.

    `max_drafts`: most draft tokens of a row. `channel_decay`: see `GatedDeltaSpec`. On CPU memory is committed on first
    touch.

    Raises:
        ConfigError: a row would have more than MAX_PENDING tokens.
    """
    layers = range(pool.group.num_layers)
    if not max_drafts:
        return [None for _ in layers]
    if max_drafts >= MAX_PENDING:
        raise ConfigError(
            f"{max_drafts} drafts of a row are more than the {MAX_PENDING - 1} that recurrent layers keep",
            field="speculative_num_draft_tokens",
        )
    shapes, device = _pending_shapes(pool.group, max_drafts + 1, channel_decay), pool.pages_as_bytes.device

    def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(pool.num_pages + 1, *shape, dtype=dtype, device=device)

    return [PendingTokens(*(empty(*shape) for shape in shapes)) for _ in layers]


def pending_bytes(group: KVGroup, max_drafts: int, *, channel_decay: bool = False) -> int:
    """Return the bytes that `pending_tokens` takes for each slot of a STATE group, in all its layers."""
    if not max_drafts:
        return 0
    shapes = _pending_shapes(group, max_drafts + 1, channel_decay)
    return group.num_layers * sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes)


def _pending_shapes(group: KVGroup, most: int, channel_decay: bool) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and dtype of what a slot with `most` pending tokens has in each tensor of `PendingTokens`."""
    *convs, state = group.planes
    heads, channels = state.num_heads, sum(plane.num_heads * plane.rows for plane in convs)
    key = next(plane for plane in convs if plane.name == "conv_k")
    return [
        ((most, channels), torch_dtype(key.dtype)),
        ((most, key.num_heads, key.rows), torch.float32),
        ((most, heads, state.width), torch.float32),
        ((most, heads, state.rows) if channel_decay else (most, heads), torch.float32),
    ]


def fold_rows(slots: IntArray, counts: IntArray) -> HostRows:
    """Return rows without tokens that fold `counts` pending tokens of `slots`; see `StateBackend.fold`."""
    num_rows = len(slots)
    ones, zeros = np.ones(num_rows, dtype=np.int64), np.zeros(num_rows, dtype=np.int64)
    return HostRows(
        starts=ones, ends=ones, offsets=zeros, prompts=zeros, pages=np.zeros((num_rows, 1), dtype=np.int32),
        slots=slots.astype(np.int32), num_folded=counts.astype(np.int64),
    )  # fmt: skip


class StateSlots:
    """The state backend over one pool, whose pages are slots. `max_drafts`: most draft tokens of a row.

    `channel_decay`: see `GatedDeltaSpec`.
    """

    def __init__(
        self, pool: GroupPool, device: torch.device, max_drafts: int = 0, *, channel_decay: bool = False
    ) -> None:
        self._device = device
        self._pending = pending_tokens(pool, max_drafts, channel_decay=channel_decay)
        planes = pool.group.planes
        self._layers: list[Mapping[str, Tensor]] = [
            {plane.name: pool.plane(layer, index) for index, plane in enumerate(planes)}
            for layer in range(pool.group.num_layers)
        ]

    def begin(self, rows: StateRows) -> StepSlots:
        """Offer the states of one step. `rows` are the same for all STATE groups."""
        return StepSlots(self._layers, self._pending, rows)

    def fold(self, rows: HostRows) -> None:
        """Fold pending tokens of all layers. `rows` come from `fold_rows`."""
        on_device = state_rows(rows, self._device)
        shared = DeltaRows(on_device.slots, on_device.starts, rows)
        for planes, pending in zip(self._layers, self._pending, strict=True):
            assert pending is not None, "no row has drafts"
            fold_pending([planes[name] for name in CONV_PLANES], planes["state"], shared, pending)


class StepSlots:
    """Implements `StepStates` for the layers of one group, counted within it."""

    def __init__(
        self, layers: Sequence[Mapping[str, Tensor]], pending: Sequence[PendingTokens | None], rows: StateRows
    ) -> None:
        self._layers, self._pending, self._rows = layers, pending, rows

    def states(self, layer: int) -> LayerStates:
        """See `StepStates.states`."""
        return LayerStates(self._rows, self._layers[layer], self._pending[layer])


class CapturedRows:
    """State rows of decode steps of one size, at fixed addresses."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.rows = StateRows(
            slots=torch.full((num_rows,), NOWHERE, dtype=torch.int64, device=device),
            starts=torch.zeros(num_rows, dtype=torch.int64, device=device),
            offsets=torch.arange(num_rows + 1, dtype=torch.int64, device=device),
            host=None,
            is_decode=True,
        )

    def filling(self, rows: HostRows) -> list[Filling]:
        """See `CapturedAttention.filling`."""
        assert rows.slots is not None, "the layout has no STATE group"
        return [(self.rows.slots, rows.slots.astype(np.int64)), (self.rows.starts, rows.starts)]
