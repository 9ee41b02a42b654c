"""A step that is computed in parts, whole prompts in turn.

Computed together, the first of some prompts would wait for the last; and from some number of rows on a product is no
faster for more of them. But each part reads the head's weights and is launched, so where streams pause meanwhile parts
are larger. Owned by a role or by `Generating`, between what plans a step and what launches it.
"""

from __future__ import annotations

import math
from collections import deque

from pdserve.executor.interface import BatchRow

TIMES_BESIDE_STREAMS = 2
"""So many times as large is a part where streams pause."""


class BatchSplitter:
    """Rows of the step that was planned last and that no part has had yet. False when there are none."""

    def __init__(self, saturation_tokens: int | None) -> None:
        """See `Limits.saturation_tokens`. A part has half as many at least, for then it is nearly as fast for each."""
        self._saturation_tokens = saturation_tokens
        self._most: float = math.inf
        self._prompts: deque[BatchRow] = deque()
        self._decode: list[BatchRow] = []

    def __bool__(self) -> bool:
        return bool(self._prompts or self._decode)

    def put(self, decode: list[BatchRow], prompts: list[BatchRow], *, beside_streams: bool = False) -> None:
        """The next step, when nothing is left of the last one."""
        assert not self
        self._decode, self._prompts = decode, deque(prompts)
        if self._saturation_tokens is not None:
            self._most = self._saturation_tokens * (TIMES_BESIDE_STREAMS if beside_streams else 1)

    def take(self) -> list[BatchRow]:
        """The next part: chunks of prompts, in turn; with the last of them the rows that decode, which come first."""
        part: list[BatchRow] = []
        taken, left = 0, sum(row.num_tokens for row in self._prompts)
        while self._prompts and not self._is_full(taken, left):
            row = self._prompts.popleft()
            part.append(row)
            taken, left = taken + row.num_tokens, left - row.num_tokens
        if self._prompts:
            return part
        decode, self._decode = self._decode, []
        return decode + part

    def drop(self, rid: str) -> None:
        """A request has ended, or gave way."""
        self._decode = [row for row in self._decode if row.rid != rid]
        self._prompts = deque(row for row in self._prompts if row.rid != rid)

    def clear(self) -> None:
        """All have."""
        self._decode, self._prompts = [], deque()

    def _is_full(self, taken: int, left: int) -> bool:
        """True when the next chunk is better off in the next part, behind `taken` tokens in this and with `left`."""
        return min(taken, left) >= self._most / 2 and taken + self._prompts[0].num_tokens > self._most
