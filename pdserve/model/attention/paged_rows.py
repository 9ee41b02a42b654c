"""Rows of one forward pass, and the page indices that its layers share: for latents, and for models of transformers.

A step is cut into passes: one for all rows of a model without recurrent state; else one for each row that computes
several tokens or its first one, and one for all other rows, which are decoding.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import torch
from torch import Tensor

from pdserve.memory.layout import PageSpace
from pdserve.model.forward_batch import ForwardBatch, IntArray, to_device

MOST_PADDING = 4
"""Decoding rows share a gather while the longest has at most twice the pages of the shortest, plus this many."""


@dataclasses.dataclass(frozen=True)
class DecodeBucket:
    """Rows with one new token each, whose pages are gathered together.

    `tokens` int64 `[B]`: their flat indices. `pages` `[B, P]`: pages of their context, padded with null pages.
    `visible` bool `[B, P * page_tokens]`: slots that the new token sees; None: all. `unwritten` int64: flat indices in
    `[B, P * page_tokens]` of slots behind the last token of a row, null pages excepted.
    """

    tokens: Tensor
    pages: Tensor
    visible: Tensor | None
    unwritten: Tensor
    _made: dict[tuple[int, ...], Tensor] = dataclasses.field(default_factory=dict)

    def blocks(self, num_heads: int, page_blocks: int) -> Tensor:
        """Return the blocks of all pages and heads, `[B, heads, P]`, flat; see `GroupPool.plane_blocks`."""
        key = (num_heads, page_blocks)
        if key not in self._made:
            heads = torch.arange(num_heads, device=self.pages.device)
            self._made[key] = (self.pages[:, None] * page_blocks + heads[None, :, None]).flatten()
        return self._made[key]

    def unwritten_of(self, num_heads: int, num_slots: int) -> Tensor:
        """Return `unwritten` as flat indices in `[B, heads, slots]`."""
        key = (num_heads,)
        if key not in self._made:
            heads = torch.arange(num_heads, device=self.pages.device)[:, None]
            row, slot = self.unwritten // num_slots, self.unwritten % num_slots
            self._made[key] = ((row * num_heads + heads) * num_slots + slot).flatten()
        return self._made[key]


@dataclasses.dataclass(frozen=True)
class ExtendSpan:
    """Row number `row` of a pass, with several new tokens at flat index `offset`, positions `[start, end)`.

    `pages` `[P]`: the pages of its context. The first page begins at position `first`.
    """

    row: int
    offset: int
    start: int
    end: int
    first: int
    pages: Tensor


class PassRows:
    """Rows of one pass. Row r computes positions `[starts[r], ends[r])`, whose flat index in the pass is `offsets[r]`.

    `is_decode`: each row has one token, and the model gets them as `[rows, 1]`; else as `[1, tokens]`. `indices`
    int64 `[tokens]`: their numbers in the step.
    """

    def __init__(self, batch: ForwardBatch, rows: IntArray, page_tokens: int, *, is_decode: bool) -> None:
        host, self._device = batch.host, batch.columns.device
        self.starts, self.ends = host.starts[rows], host.ends[rows]
        lengths = self.ends - self.starts
        self.offsets: IntArray = lengths.cumsum() - lengths
        self.is_decode = is_decode
        self._page_tokens = page_tokens
        self._pages = {PageSpace.TOKENS: host.pages[rows]}
        if host.window is not None:
            self._pages[PageSpace.WINDOW] = host.window[rows]
        self._slots = None if host.slots is None else host.slots[rows]
        total = int(lengths.sum())
        self.num_tokens = total
        within = np.arange(total) - self.offsets.repeat(lengths)
        self._row_of: IntArray = np.arange(len(rows)).repeat(lengths)
        self._positions: IntArray = self.starts.repeat(lengths) + within
        indices = host.offsets[rows].repeat(lengths) + within
        self.indices = to_device(indices, self._device)

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.starts)

    @property
    def has_state(self) -> bool:
        """True when the rows have computed tokens before; the rows of a pass agree where the model has states."""
        return bool(self.starts[0] > 0)

    @functools.cached_property
    def slots(self) -> Tensor:
        """State slot of each row, int64 `[rows]`."""
        assert self._slots is not None
        return self._tensor(self._slots.astype(np.int64))

    @functools.cached_property
    def context_starts(self) -> list[int]:
        """Where each row's tokens begin in `context`."""
        starts: list[int] = (np.cumsum(self.ends) - self.ends).tolist()
        return starts

    @functools.cached_property
    def written(self) -> dict[PageSpace, tuple[Tensor, Tensor]]:
        """By page space, page and slot in the page of each new token, int64 `[tokens]`."""
        index, slots = np.divmod(self._positions, self._page_tokens)
        found = {}
        for space, pages in self._pages.items():
            found[space] = self._tensor(pages[self._row_of, index].astype(np.int64)), self._tensor(slots)
        return found

    @functools.cached_property
    def context(self) -> tuple[Tensor, Tensor]:
        """Token page and slot in the page of all tokens of all rows, the new ones included: int64 `[sum of ends]`."""
        row_of = np.arange(self.num_rows).repeat(self.ends)
        positions = np.arange(len(row_of)) - np.asarray(self.context_starts).repeat(self.ends)
        index, slots = np.divmod(positions, self._page_tokens)
        pages = self._pages[PageSpace.TOKENS][row_of, index].astype(np.int64)
        return self._tensor(pages), self._tensor(slots)

    @functools.cached_property
    def context_firsts(self) -> Tensor:
        """For each new token, where its row's tokens begin in `context`: int64 `[tokens, 1]`."""
        firsts = np.asarray(self.context_starts, dtype=np.int64)
        return self._tensor(firsts[self._row_of])[:, None]

    @functools.cached_property
    def decode_contexts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of the rows with one new token: its flat index `[rows]`, and the range of the row's tokens in `context`.

        First and end are int64 `[rows, 1]`.
        """
        rows = self._decoding
        firsts = np.asarray(self.context_starts, dtype=np.int64)[rows]
        first, end = (self._tensor(array)[:, None] for array in (firsts, firsts + self.ends[rows]))
        return self._tensor(self.offsets[rows]), first, end

    @functools.cached_property
    def _decoding(self) -> IntArray:
        return np.flatnonzero(self.ends - self.starts == 1)

    def extends(self, space: PageSpace, window: int | None) -> list[ExtendSpan]:
        """Return the rows with several new tokens."""
        key = ("extend", space, window)
        if key not in self._made:
            spans = []
            for row in np.flatnonzero(self.ends - self.starts > 1).tolist():
                start, end = int(self.starts[row]), int(self.ends[row])
                first = self._first_page(start, window)
                pages = self._pages[space][row, first : -(-end // self._page_tokens)].astype(np.int64)
                offset = int(self.offsets[row])
                spans.append(ExtendSpan(row, offset, start, end, first * self._page_tokens, self._tensor(pages)))
            self._made[key] = spans
        found: list[ExtendSpan] = self._made[key]
        return found

    def decodes(self, space: PageSpace, window: int | None, null_page: int) -> list[DecodeBucket]:
        """Return the rows with one new token, in buckets of similar length."""
        key = ("decode", space, window)
        if key not in self._made:
            rows = self._decoding
            firsts = np.array([self._first_page(start, window) for start in self.starts[rows].tolist()], dtype=np.int64)
            lasts = -(-self.ends[rows] // self._page_tokens)
            order = np.argsort(lasts - firsts, kind="stable")
            counts = (lasts - firsts)[order]
            buckets, begin = [], 0
            for i in range(1, len(order) + 1):
                if i == len(order) or counts[i] > 2 * counts[begin] + MOST_PADDING:
                    part = order[begin:i]
                    buckets.append(self._bucket(space, rows[part], firsts[part], window, null_page))
                    begin = i
            self._made[key] = buckets
        found: list[DecodeBucket] = self._made[key]
        return found

    @functools.cached_property
    def _made(self) -> dict[object, list]:  # type: ignore[type-arg]
        return {}

    def _bucket(
        self, space: PageSpace, rows: IntArray, firsts: IntArray, window: int | None, null_page: int
    ) -> DecodeBucket:
        table, size, ends = self._pages[space], self._page_tokens, self.ends[rows]
        counts = -(-ends // size) - firsts
        most = int(counts.max())
        index = firsts[:, None] + np.arange(most)
        pages = table[rows[:, None], np.minimum(index, table.shape[1] - 1)].astype(np.int64)
        pages[np.arange(most) >= counts[:, None]] = null_page
        positions = firsts[:, None] * size + np.arange(most * size)
        visible = positions < ends[:, None]
        if window is not None:
            visible &= positions >= ends[:, None] - window
        unwritten = (positions >= ends[:, None]) & (pages != null_page).repeat(size, 1)
        return DecodeBucket(
            self._tensor(self.offsets[rows]),
            self._tensor(pages),
            None if visible.all() else to_device(visible, self._device),
            self._tensor(np.flatnonzero(unwritten)),
        )

    def _first_page(self, position: int, window: int | None) -> int:
        """Return the number of the first page that the token at `position` sees."""
        return 0 if window is None else max(0, position - window + 1) // self._page_tokens

    def _tensor(self, array: IntArray) -> Tensor:
        return to_device(array, self._device)


def passes_of(batch: ForwardBatch, page_tokens: int, *, is_stateful: bool) -> list[PassRows]:
    """Cut the rows of a step into passes."""
    starts, ends = batch.host.starts, batch.host.ends
    every = np.arange(len(starts))
    if not is_stateful:
        return [PassRows(batch, every, page_tokens, is_decode=False)]
    goes_on = (starts > 0) & (ends - starts == 1)
    passes = [PassRows(batch, every[row : row + 1], page_tokens, is_decode=False) for row in np.flatnonzero(~goes_on)]
    decoding = np.flatnonzero(goes_on)
    if len(decoding):
        passes.append(PassRows(batch, decoding, page_tokens, is_decode=True))
    return passes


def causal_mask(start: int, end: int, first: int, length: int, window: int | None, device: torch.device) -> Tensor:
    """Return which of `length` keys from position `first` on the queries at `[start, end)` see: bool."""
    queries = torch.arange(start, end, device=device)[:, None]
    keys = torch.arange(first, first + length, device=device)[None]
    visible = keys <= queries
    return visible if window is None else visible & (keys > queries - window)
