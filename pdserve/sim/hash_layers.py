"""The layers of the hash model: each makes one number of a token, and of every KV byte that its attention reads.

`HashExecutor` owns the pools; a `HashLayer` has views of them. Hash weights depend on the position.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pdserve.memory.layout import KVGroup, PageSpace

POISON = np.uint64(0xDEADDEADDEADDEAD)
_MAX_TOKENS = 4096

CONV_COLUMNS = 2
"""Earlier positions that a recurrent layer remembers one by one."""
VALUES_PER_KEY = 2
"""State heads of a recurrent layer that share one head of its convolution."""

U64 = npt.NDArray[np.uint64]

_rng = np.random.default_rng(20250101)
_WEIGHTS: U64 = _rng.integers(1, 1 << 63, size=(2, _MAX_TOKENS), dtype=np.uint64) | np.uint64(1)


def mix(value: int) -> int:
    """Apply splitmix64's finalizer."""
    value = (value + 0x9E3779B97F4A7C15) & ((1 << 64) - 1)
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & ((1 << 64) - 1)
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & ((1 << 64) - 1)
    return value ^ (value >> 31)


@dataclasses.dataclass(frozen=True)
class RowPages:
    """A row's page numbers: `pages` of tokens, `window` of the WINDOW group, and its state slot."""

    pages: npt.NDArray[np.int32]
    window: npt.NDArray[np.int32]
    slot: int

    def of(self, space: PageSpace) -> npt.NDArray[np.int32]:
        """Return the page numbers in a space of token pages."""
        return self.window if space is PageSpace.WINDOW else self.pages


@dataclasses.dataclass(frozen=True)
class HashLayer:
    """A layer of the model: its group, and by plane and head every view `[page, row * width]` of a pool that holds it.

    `attended`: by head, views `[page, k/v, token]`; empty for recurrent layers.
    """

    group: KVGroup
    planes: tuple[tuple[list[U64], ...], ...]
    attended: tuple[list[U64], ...]
    weights: int = 0
    """Models with other numbers write other KV."""

    @property
    def is_recurrent(self) -> bool:
        """True for a layer with a state instead of attention."""
        return self.group.space is PageSpace.SLOTS

    def attend(self, pages: RowPages, position: int, carry: int) -> int:
        """Write K and V of `position`, and return a number made of those of all positions that it attends to."""
        group = self.group
        own = pages.of(group.space)
        carry ^= self.weights
        first = 0 if group.window is None else max(0, position + 1 - group.window)
        index, offset = group.page_and_slot(position)
        first_page = first // group.page_tokens
        first_read = first - first_page * group.page_tokens
        used = own[first_page : index + 1]
        total = 0
        for head, views in enumerate(self.attended):
            sums = set()
            for view in views:
                view[own[index], 0, offset] = mix(carry ^ head) if head else carry
                view[own[index], 1, offset] = mix(carry ^ 0x5555 ^ head)
                kv = view[used].swapaxes(0, 1).reshape(2, -1)
                kv = kv[:, first_read : position + 1 - first_page * group.page_tokens]
                sums.add(int((kv * _WEIGHTS[:, first : position + 1]).sum(dtype=np.uint64)))
            total = total * 3 + sum(sums)  # ranks that hold the same head count once if they agree
        return total

    def recur(self, slot: int, position: int, carry: int) -> int:
        """Update the state in `slot` by `position`, and return a number made of it. Position 0 reads no state.

        The convolution remembers the last `CONV_COLUMNS` positions, the state all of them.
        """
        convolutions, states = self.planes
        total = 0
        columns: list[int] = []
        for head, views in enumerate(convolutions):
            sums = set()
            for view in views:
                before = [int(value) for value in view[slot]] if position else [0] * CONV_COLUMNS
                sums.add(sum(value * (2 * i + 3) for i, value in enumerate(before)))
                view[slot] = [*before[1:], mix(carry ^ 0x3333 ^ head)]
            columns.append(sum(sums))
        for head, views in enumerate(states):
            sums = set()
            for view in views:
                before_state = int(view[slot, 0]) if position else 0
                state = mix(before_state * 5 + carry + columns[head // VALUES_PER_KEY] + head)
                view[slot, 0] = state
                sums.add(state)
            total = total * 3 + sum(sums)
        return total

    def forget(self, pages: RowPages, position: int) -> None:
        """Overwrite K and V of `position`, so that a later read of them changes the tokens. A state has none."""
        if self.is_recurrent:
            return
        index, offset = self.group.page_and_slot(position)
        for views in self.attended:
            for view in views:
                view[pages.of(self.group.space)[index], :, offset] = POISON


def forward(
    layers: Sequence[HashLayer], pages: RowPages, position: int, token: int, inputs: list[int] | None = None
) -> int:
    """Compute one token in all layers and return the number from which the next token is drawn.

    Writes its KV and updates the state. `inputs` gets the input of each recurrent layer.
    """
    carry = mix(token * 1_000_003 + position)
    for number, layer in enumerate(layers):
        if layer.is_recurrent:
            if inputs is not None:
                inputs.append(carry)
            total = layer.recur(pages.slot, position, carry)
        else:
            total = layer.attend(pages, position, carry)
        carry = mix(total + number * 3 ** len(layer.planes[0]))
    return carry
