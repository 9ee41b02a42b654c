"""The n-gram drafter: the last tokens of a request are looked up in its own prompt and output, then in past outputs.

An index chains all positions whose last `min_match` tokens have the same hash, the most recent first:

    tokens   the cat sat on the mat . the cat
                    ^1                    ^8     position 8 -> position 1 -> none, so the drafts are: sat on the ...

A lookup follows the chain of the newest position and keeps the longest match. It does not scan the tokens. All ranks
of a replica build equal indexes from equal tokens, so they draft alike.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

MAX_CANDIDATES = 16
"""Positions of a chain that a lookup compares."""
BULK = 48
"""From this many tokens on, numpy adds tokens faster than a loop does."""
SEPARATOR = -1
"""Stands between two past outputs; no token id is negative."""
_FACTOR, _SPREAD, _MASK = 0x9E3779B1, 0x9E3779B97F4A7C15, (1 << 64) - 1

I32 = npt.NDArray[np.int32]


@dataclasses.dataclass(frozen=True, slots=True)
class NgramMatch:
    """The last `length` tokens of a request occur in `index` up to position `end`, exclusive.

    `length` is at most the largest match window; the real match may be longer.
    """

    index: NgramIndex
    end: int
    length: int

    def drafts(self, num_tokens: int) -> tuple[int, ...]:
        """Return at most `num_tokens` tokens that follow the match.

        Where the match ends `n` tokens before the end of the request, the text repeats itself every `n` tokens, and so
        do the drafts.
        """
        return self.index.following(self.end, num_tokens)


class NgramIndex:
    """Tokens, and chains of equal n-grams among them. Up to 24 bytes per token. Scheduler thread only."""

    def __init__(self, min_match: int, max_match: int) -> None:
        """A match has at least `min_match` tokens; at most `max_match` are compared."""
        assert 1 <= min_match <= max_match
        self._min, self._max = min_match, max_match
        self._tokens = array("i")
        self._previous = array("i")
        """By position of an n-gram's last token: the previous position in its chain, plus 1; 0: none."""
        self._bits = 6
        self._heads = array("i", bytes(4 << self._bits))
        """By slot of a hash: the newest position of the chain, plus 1; 0: none."""
        self._hash = 0
        """Of the last `min_match` tokens."""
        self._oldest_factor = pow(_FACTOR, min_match, 1 << 64)
        self._last: tuple[int, int] | None = None
        """End of the last match within itself, and the number of tokens then."""

    def __len__(self) -> int:
        """Tokens in the index."""
        return len(self._tokens)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens."""
        if len(self._tokens) + len(token_ids) > len(self._heads) // 2:
            while len(self._tokens) + len(token_ids) > (1 << self._bits) // 2:
                self._bits += 1
            self._tokens.extend(token_ids)
            self._heads = array("i", bytes(4 << self._bits))
            self._add_many(0)
        elif len(token_ids) >= BULK:
            start = len(self._tokens)
            self._tokens.extend(token_ids)
            self._add_many(start)
        else:
            for token_id in token_ids:
                self._add(token_id)

    def find(self) -> NgramMatch | None:
        """Return the longest earlier occurrence of the last tokens, of equal ones the most recent; None: there is none.

        A chain longer than `MAX_CANDIDATES` is followed so far. The match of the last call is compared as well, moved
        by the tokens that were appended since.
        """
        num_tokens = len(self._tokens)
        if num_tokens <= self._min:
            return None
        end, length = self._longest(self._tokens, self._previous[num_tokens - 1])
        if length < self._max and self._last is not None:
            moved = self._last[0] + num_tokens - self._last[1]
            also = self._match_length(self._tokens, moved - 1)
            if also > length:
                end, length = moved, also
        if length < self._min:
            self._last = None
            return None
        self._last = end, num_tokens
        return NgramMatch(self, end, length)

    def find_tail_of(self, other: NgramIndex) -> NgramMatch | None:
        """Return the longest occurrence of the last tokens of `other`, which has the same match windows."""
        if len(other) < self._min or not self._tokens:
            return None
        end, length = self._longest(other._tokens, self._heads[self._slot(other._hash)])
        return None if length < self._min else NgramMatch(self, end, length)

    def following(self, position: int, num_tokens: int) -> tuple[int, ...]:
        """Return at most `num_tokens` tokens from `position` on, up to a separator; see `NgramMatch.drafts`."""
        found = self._tokens[position : position + num_tokens].tolist()
        if SEPARATOR in found:
            return tuple(found[: found.index(SEPARATOR)])
        if len(found) < num_tokens and found:
            found = [found[i % len(found)] for i in range(num_tokens)]
        return tuple(found)

    # ------------------------------------------------------------------ inside

    def _slot(self, hashed: int) -> int:
        return (hashed * _SPREAD & _MASK) >> (64 - self._bits)

    def _add(self, token_id: int) -> None:
        tokens, position = self._tokens, len(self._tokens)
        oldest = tokens[position - self._min] + 1 if position >= self._min else 0
        tokens.append(token_id)
        self._hash = (self._hash * _FACTOR + token_id + 1 - oldest * self._oldest_factor) & _MASK
        if position + 1 < self._min:
            self._previous.append(0)
            return
        slot = self._slot(self._hash)
        self._previous.append(self._heads[slot])
        self._heads[slot] = position + 1

    def _add_many(self, start: int) -> None:
        """Add all positions from `start` on to the chains; their tokens are in `_tokens`."""
        num_tokens, size = len(self._tokens), self._min
        del self._previous[start:]
        self._previous.extend(array("i", bytes(4 * (num_tokens - start))))
        first = max(start, size - 1)  # the first position that ends an n-gram
        if first >= num_tokens:
            self._hash = self._hash_of_tail()
            return
        words = np.frombuffer(self._tokens, np.int32)[first - size + 1 :].astype(np.int64).astype(
            np.uint64
        ) + np.uint64(1)
        count = num_tokens - first
        hashed = np.zeros(count, np.uint64)
        for offset in range(size):
            hashed = hashed * np.uint64(_FACTOR) + words[offset : offset + count]
        self._hash = int(hashed[-1])
        slots = ((hashed * np.uint64(_SPREAD)) >> np.uint64(64 - self._bits)).astype(np.int64)
        order = np.argsort(slots, kind="stable")
        ordered = slots[order]
        is_first = np.ones(count, bool)
        is_first[1:] = ordered[1:] != ordered[:-1]
        heads, previous = np.frombuffer(self._heads, np.int32), np.frombuffer(self._previous, np.int32)
        before = np.empty(count, np.int32)
        before[1:] = order[:-1] + (first + 1)
        before[is_first] = heads[ordered[is_first]]
        previous[first + order] = before
        is_last = np.ones(count, bool)
        is_last[:-1] = is_first[1:]
        heads[ordered[is_last]] = order[is_last] + (first + 1)

    def _hash_of_tail(self) -> int:
        hashed = 0
        for token_id in self._tokens[-self._min :]:
            hashed = (hashed * _FACTOR + token_id + 1) & _MASK
        return hashed

    def _longest(self, context: array[int], link: int) -> tuple[int, int]:
        """Return (end, length) of the longest match of the end of `context` in the chain from `link` on, or (0, 0)."""
        tokens, previous = self._tokens, self._previous
        found, length, newest = 0, 0, len(context) - 1
        for _ in range(MAX_CANDIDATES):
            if link == 0:
                break
            position = link - 1
            if position >= length and tokens[position - length] == context[newest - length]:
                own = self._match_length(context, position)
                if own > length:
                    found, length = link, own
                    if length >= self._max or length > newest:
                        break
            link = previous[position]
        return found, length

    def _match_length(self, context: array[int], position: int) -> int:
        """Return how many tokens up to `position` equal the last ones of `context`: at most the largest window."""
        tokens, newest = self._tokens, len(context) - 1
        if not 0 <= position < len(tokens):
            return 0
        most, length = min(self._max, position + 1, newest + 1), 0
        while length < most and tokens[position - length] == context[newest - length]:
            length += 1
        return length


class PastOutputs:
    """The outputs of ended requests: the newest `capacity` tokens, or at least half of that. Scheduler thread only."""

    def __init__(self, min_match: int, max_match: int, capacity: int) -> None:
        self._windows = min_match, max_match
        self._capacity = capacity
        self._newer, self._older = NgramIndex(*self._windows), NgramIndex(*self._windows)

    def __len__(self) -> int:
        """Tokens, with one separator for each output."""
        return len(self._newer) + len(self._older)

    def add(self, token_ids: Sequence[int]) -> None:
        """Add an output. The oldest outputs leave when the capacity is reached."""
        half = self._capacity // 2
        if len(token_ids) <= self._windows[0] or half == 0:
            return
        kept = token_ids[-half:]
        if len(self._newer) + len(kept) > half:
            self._newer, self._older = NgramIndex(*self._windows), self._newer
        self._newer.extend([*kept, SEPARATOR])

    def find(self, request: NgramIndex) -> NgramMatch | None:
        """Return the longest match of the last tokens of a request; of equal ones the most recent."""
        newer, older = self._newer.find_tail_of(request), self._older.find_tail_of(request)
        if newer is None or older is None:
            return newer or older
        return older if older.length > newer.length else newer

    def clear(self) -> None:
        """Forget all outputs."""
        self._newer, self._older = NgramIndex(*self._windows), NgramIndex(*self._windows)
