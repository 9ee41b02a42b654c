"""Draft KV of the hash model: what its drafter has in the DRAFT group, and the hidden state that it keeps by row.

Slot j has a key made of token j and its position, and a value made of the model's number at position j - 1 (the hidden
state). Both are the drafter's own: drafters with other weights write other numbers. So draft KV of another token,
request or drafter shows, whichever way it came. Slots may be missing, which costs acceptance alone.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from pdserve.sim.hash_layers import POISON, HashLayer, RowPages, mix

NO_HIDDEN = 0
"""Value of a slot whose hidden state was not known."""
HIDDEN_BYTES = 8


class HashDraftKV:
    """The draft KV of all rows. `layer`: the only layer of the DRAFT group. `weights`: see `HashDrafting`.

    With `checks`, draft KV that the drafter did not write for the same tokens is an AssertionError.
    """

    def __init__(self, layer: HashLayer, weights: int, *, checks: bool = True) -> None:
        self._layer, self._weights, self._checks = layer, weights, checks
        self._kept: dict[int, tuple[int, int]] = {}
        """By table row: the position that takes the hidden state, and the hidden state."""

    @staticmethod
    def number(hidden: bytes) -> int:
        """Return the model's number in what `hidden` returned."""
        assert len(hidden) == HIDDEN_BYTES, len(hidden)
        return int.from_bytes(hidden, "little")

    def resume(self, row: int, position: int, hidden: bytes) -> None:
        """Keep the hidden state from another server, which the token at `position` takes."""
        self._kept[row] = position, self.number(hidden)

    def hidden(self, row: int) -> bytes:
        """Return the hidden state that is kept of table row `row`; empty without one."""
        kept = self._kept.get(row)
        return b"" if kept is None else kept[1].to_bytes(HIDDEN_BYTES, "little")

    def close(self, row: int) -> None:
        """Forget what is kept of table row `row`."""
        self._kept.pop(row, None)

    def write(self, row: int, pages: RowPages, tokens: Sequence[int], start: int, carries: Sequence[int]) -> None:
        """Write the slots of the tokens from `start` on. `carries`: the model's number at each computed position.

        `tokens` end with the computed positions, or with the token sampled behind them. Its slot is written if the page
        of the position before has it.
        """
        known = start + len(carries)
        position, kept = self._kept.get(row, (-1, NO_HIDDEN))
        hidden = kept if position == start else NO_HIDDEN
        for position in range(start, len(tokens)):
            within = position % self._layer.group.page_tokens > 0
            if position > start:
                hidden = carries[position - 1 - start]
            if (hidden == NO_HIDDEN and within) or (position == known and not within):
                continue
            self._put(pages, position, tokens[position], hidden)
        self._kept[row] = known, carries[-1]

    def is_whole(self, pages: RowPages, tokens: Sequence[int]) -> bool:
        """Return whether the slots of all `tokens` are written, with their hidden states.

        Raises:
            AssertionError: a slot has draft KV of another token, request or drafter.
        """
        group, count = self._layer.group, len(tokens)
        own = pages.of(group.space)[: -(-count // group.page_tokens)]
        has_all = True
        for head, views in enumerate(self._layer.attended):
            wanted = np.array([_key(self._weights, token, i, head) for i, token in enumerate(tokens)], dtype=np.uint64)
            for view in views:
                keys, values = view[own].swapaxes(0, 1).reshape(2, -1)[:, :count]
                is_blank = (keys == POISON) | (keys == 0)
                if self._checks:
                    assert ((keys == wanted) | is_blank).all(), "draft KV of another token, request or drafter"
                has_all = has_all and bool(((keys == wanted) & (values != NO_HIDDEN)).all())
        return has_all

    def _put(self, pages: RowPages, position: int, token: int, hidden: int) -> None:
        index, offset = self._layer.group.page_and_slot(position)
        page = pages.of(self._layer.group.space)[index]
        for head, views in enumerate(self._layer.attended):
            value = mix(hidden ^ self._weights ^ head << 8) if hidden or not position else NO_HIDDEN
            for view in views:
                view[page, :, offset] = _key(self._weights, token, position, head), value


@functools.lru_cache(maxsize=1 << 16)
def _key(weights: int, token: int, position: int, head: int) -> int:
    return mix(mix(token * 1_000_003 + position) ^ weights ^ head << 8)
