"""`StateSlots`: the recurrent states of one STATE group, offered to the layers of a step. The layers compute."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from pdserve.model.attention.interface import LayerStates, StateRows
from pdserve.model.attention.page_gather import GroupPool
from pdserve.model.forward_batch import NOWHERE, Filling, HostRows, to_device


def state_rows(host: HostRows, device: torch.device) -> StateRows:
    """Send the rows of a step to the device, in one copy."""
    assert host.slots is not None, "the layout has no STATE group"
    num_rows = len(host.starts)
    lengths = host.ends - host.starts
    packed = to_device(np.concatenate((host.slots, host.starts, [0], lengths.cumsum())).astype(np.int64), device)
    slots, starts, offsets = packed[:num_rows], packed[num_rows : 2 * num_rows], packed[2 * num_rows :]
    return StateRows(slots, starts, offsets, host, is_decode=bool((lengths == 1).all()))


class StateSlots:
    """The state backend over one pool, whose pages are slots."""

    def __init__(self, pool: GroupPool, device: torch.device) -> None:
        self._device = device
        planes = pool.group.planes
        self._layers: list[Mapping[str, Tensor]] = [
            {plane.name: pool.plane(layer, index) for index, plane in enumerate(planes)}
            for layer in range(pool.group.num_layers)
        ]

    def begin(self, rows: StateRows) -> StepSlots:
        """Offer the states of one step. `rows` are the same for all STATE groups."""
        return StepSlots(self._layers, rows)


class StepSlots:
    """Implements `StepStates` for the layers of one group, counted within it."""

    def __init__(self, layers: list[Mapping[str, Tensor]], rows: StateRows) -> None:
        self._layers, self._rows = layers, rows

    def states(self, layer: int) -> LayerStates:
        """See `StepStates.states`."""
        return LayerStates(self._rows, self._layers[layer])


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
