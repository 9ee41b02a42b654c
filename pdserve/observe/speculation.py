"""Numbers of speculative decoding under SGLang's names: of one request, and of a server over the last seconds.

The scheduler counts verify steps, draft tokens and accepted tokens, in the counters of `EngineState` and for each
request in `SpeculationStats`. A verify step gives its accepted drafts and one more token, so the accept length is the
number of tokens per verify step. Plain steps, with no drafts, are in no number here.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from pdserve.protocol.engine_state import EngineState
from pdserve.protocol.messages import SpeculationStats

VERIFY_STEPS, DRAFT_TOKENS, ACCEPTED_TOKENS = "spec_verify_steps", "spec_draft_tokens", "spec_accepted_tokens"
"""Counters of `EngineState`, absent before the first verify step."""
ACCEPTED_AT = "spec_accepted_at"
"""Counters `spec_accepted_at.N` of `EngineState`: verify steps whose draft N was accepted, from 1 on."""
IS_DRAFTING, DRAFT_LENGTH = "spec_is_drafting", "spec_draft_length"
"""Facts of `EngineState`, absent without speculation: 1.0 while steps may have drafts, 0.0 while adaptive drafting is
off; and the drafts per row of the last decode step.
"""
RECENT_S = 10.0
"""Seconds over which `RecentAcceptance` counts; more if it gets states more rarely."""
LEAST_GAP_S = 1.0
"""Least seconds between two kept states."""


@dataclasses.dataclass(frozen=True, slots=True)
class Acceptance:
    """Totals of verify steps. A step counts once for each request whose drafts it verifies."""

    num_verify_steps: float = 0
    num_draft_tokens: float = 0
    num_accepted: float = 0

    @classmethod
    def of_state(cls, state: EngineState) -> Acceptance | None:
        """Read the counters of a scheduler; None without speculation."""
        if IS_DRAFTING not in state.facts:
            return None
        return cls(*(state.counters.get(name, 0) for name in (VERIFY_STEPS, DRAFT_TOKENS, ACCEPTED_TOKENS)))

    @classmethod
    def of_request(cls, stats: SpeculationStats) -> Acceptance:
        """Return the totals of one request."""
        return cls(stats.num_verify_steps, stats.num_draft_tokens, stats.num_accepted)

    @property
    def accept_length(self) -> float | None:
        """Tokens per verify step: the accepted drafts and one more. None without a verify step."""
        return 1 + self.num_accepted / self.num_verify_steps if self.num_verify_steps else None

    @property
    def accept_rate(self) -> float | None:
        """The share of draft tokens that were accepted, 0 to 1; None without draft tokens."""
        return self.num_accepted / self.num_draft_tokens if self.num_draft_tokens else None

    def since(self, earlier: Acceptance) -> Acceptance:
        """Return the totals since `earlier`. Totals below it come from a new engine, which has counted from zero."""
        if self.num_verify_steps < earlier.num_verify_steps:
            return self
        return Acceptance(
            self.num_verify_steps - earlier.num_verify_steps,
            self.num_draft_tokens - earlier.num_draft_tokens,
            self.num_accepted - earlier.num_accepted,
        )

    @classmethod
    def sum(cls, parts: Iterable[Acceptance]) -> Acceptance:
        """Add up totals."""
        kept = list(parts)
        return cls(
            sum(part.num_verify_steps for part in kept),
            sum(part.num_draft_tokens for part in kept),
            sum(part.num_accepted for part in kept),
        )


def accept_histogram(stats: SpeculationStats) -> list[int]:
    """Return the number of verify steps by the number of accepted drafts: entry k has the steps that accepted k."""
    at_least = [stats.num_verify_steps, *stats.accepted_by_position, 0]
    return [more - fewer for more, fewer in itertools.pairwise(at_least)]


def request_fields(stats: SpeculationStats | None) -> dict[str, Any]:
    """Return SGLang's `spec_*` fields of `meta_info`; none for a request with no verify step."""
    if stats is None or stats.num_verify_steps == 0:
        return {}
    acceptance = Acceptance.of_request(stats)
    return {
        "spec_accept_rate": acceptance.accept_rate or 0.0,
        "spec_accept_length": acceptance.accept_length,
        "spec_accept_token_num": stats.num_accepted,
        "spec_draft_token_num": stats.num_draft_tokens,
        "spec_verify_ct": stats.num_verify_steps,
        "spec_accept_histogram": accept_histogram(stats),
    }


class RecentAcceptance:
    """Acceptance of a server's replicas over the last `RECENT_S` seconds, from the states that it reports.

    `now` returns monotonic seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._began_s = now()
        self._totals: dict[int, deque[tuple[float, Acceptance]]] = {}
        """By replica: totals with the time of their state, the oldest first."""

    def add(self, state: EngineState | None) -> None:
        """Take the counters of a newer state; None is ignored."""
        if state is None:
            return
        now = self._now()
        for rank, one in enumerate(state.replicas or [state]):
            total = Acceptance.of_state(one)
            if total is None:
                continue
            kept = self._totals.setdefault(rank, deque([(self._began_s, Acceptance())]))
            if len(kept) > 1 and kept[-1][0] - kept[-2][0] < LEAST_GAP_S:
                kept.pop()
            kept.append((now, total))
            while len(kept) > 2 and now - kept[1][0] >= RECENT_S:
                kept.popleft()

    def of(self, rank: int) -> Acceptance | None:
        """Return the acceptance of a replica; None without speculation, or before its first state."""
        kept = self._totals.get(rank)
        return None if kept is None else kept[-1][1].since(kept[0][1])

    def whole(self) -> Acceptance | None:
        """Return the acceptance of all replicas together; None without speculation, or before the first state."""
        found = [one for rank in self._totals if (one := self.of(rank)) is not None]
        return Acceptance.sum(found) if found else None
