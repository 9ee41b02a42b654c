"""The thinking budget: how many tokens an output may reason before the end of its reasoning is forced.

The state is a function of the budget and the output ids, as a grammar's is. So no count goes over a hand-over, a
retraction, a migration or a snapshot: each server that samples follows the output from its begin.

    before ── the output begins with the opening tag ──> inside ── the closing tag, or a tool call ──> closed
       └──── it does not ──> closed                        └─ `num_tokens` tokens: `closing_ids`, one by one ──> closed
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from pdserve.grammar.matcher import MaskWords, OutputMatcher
from pdserve.protocol.sampling import ThinkingBudget

Piece = Callable[[int], bytes]
"""Returns the bytes of a token. Those of a special token are its text."""
SPACE = b" \t\r\n"
MAX_KEPT = 4096
"""States kept for `ThinkingMatcher.roll_back`: more than a row has drafts."""


@dataclasses.dataclass(frozen=True, slots=True)
class ThinkingState:
    """Where an output is in its reasoning.

    `num_tokens`: tokens of the reasoning so far. `num_forced`: how many of `closing_ids` the output ends with. `tail`:
    the last bytes, in which a tag may have begun.
    """

    phase: Literal["before", "inside", "closed"]
    num_tokens: int = 0
    num_forced: int = 0
    tail: bytes = b""

    @staticmethod
    def first(budget: ThinkingBudget) -> ThinkingState:
        """Return the state before the first token of an output."""
        return ThinkingState("inside" if budget.inside else "before")

    def forced(self, budget: ThinkingBudget) -> tuple[int, ...]:
        """Return the tokens that must follow here; empty where the output is free."""
        if self.phase != "inside" or not (self.num_forced or self.num_tokens >= budget.num_tokens):
            return ()
        return budget.closing_ids[self.num_forced :]

    def after(self, token: int, budget: ThinkingBudget, piece: Piece) -> ThinkingState:
        """Return the state after `token`."""
        if self.phase == "closed":
            return self
        if self.phase == "before":
            return self._opening(self.tail + piece(token), budget)
        forced = self.forced(budget)
        if not forced or token != forced[0]:
            return _reasoning(self.tail + piece(token), budget, self.num_tokens + 1)
        if len(forced) == 1:
            return ThinkingState("closed")
        return dataclasses.replace(self, num_forced=self.num_forced + 1, tail=b"")

    @staticmethod
    def _opening(text: bytes, budget: ThinkingBudget) -> ThinkingState:
        text, opening = text.lstrip(SPACE), budget.opening.encode()
        if text.startswith(opening):
            return _reasoning(text[len(opening) :], budget, 0)
        return ThinkingState("before", tail=text) if opening.startswith(text) else ThinkingState("closed")


def _reasoning(text: bytes, budget: ThinkingBudget, num_tokens: int) -> ThinkingState:
    ends = [end.encode() for end in budget.ends]
    if any(end in text for end in ends):
        return ThinkingState("closed")
    longest = max(map(len, ends), default=1)
    return ThinkingState("inside", num_tokens, tail=text[max(0, len(text) - longest + 1) :])


class ThinkingMatcher:
    """Implements `OutputMatcher`: the output follows `inner`, and its reasoning is limited by `budget`.

    Where `inner` forbids the next of `closing_ids`, as in the middle of a character, the reasoning goes on until it
    does not.
    """

    def __init__(self, inner: OutputMatcher, budget: ThinkingBudget, piece: Piece) -> None:
        self._inner, self._budget, self._piece = inner, budget, piece
        self._states = [ThinkingState.first(budget)]

    def copy(self) -> ThinkingMatcher:
        """See `OutputMatcher.copy`."""
        other = ThinkingMatcher(self._inner.copy(), self._budget, self._piece)
        other._states = list(self._states)
        return other

    def accept(self, token_ids: Sequence[int]) -> None:
        """See `OutputMatcher.accept`."""
        self._inner.accept(token_ids)
        for token in token_ids:
            self._states.append(self._states[-1].after(token, self._budget, self._piece))
        del self._states[:-MAX_KEPT]

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """See `OutputMatcher.num_allowed`."""
        most, state = self._inner.num_allowed(token_ids), self._states[-1]
        for count, token in enumerate(token_ids[:most]):
            forced = state.forced(self._budget)
            if forced and token != forced[0]:
                return count
            state = state.after(token, self._budget, self._piece)
        return most

    def roll_back(self, num_tokens: int) -> None:
        """See `OutputMatcher.roll_back`."""
        self._inner.roll_back(num_tokens)
        if num_tokens:
            del self._states[-num_tokens:]

    def forced_tokens(self) -> list[int]:
        """See `OutputMatcher.forced_tokens`."""
        forced = self._states[-1].forced(self._budget)
        allowed = self._inner.num_allowed(forced) if forced else 0
        return list(forced[:allowed]) if allowed else self._inner.forced_tokens()

    @property
    def ended(self) -> bool:
        """See `OutputMatcher.ended`."""
        return self._inner.ended

    def mask(self) -> MaskWords:
        """See `OutputMatcher.mask`."""
        words = self._inner.mask()
        forced = self._states[-1].forced(self._budget)
        if not forced:
            return words
        index, bit = forced[0] // 32, np.uint32(1 << forced[0] % 32)
        if index >= len(words) or not words[index] & bit:
            return words
        only = np.zeros_like(words)
        only[index] = bit
        return only
