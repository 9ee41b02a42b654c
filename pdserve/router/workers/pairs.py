"""State of pairs of workers, from the results of requests and probes. Owned by `admission`.

    unknown ── a request or probe succeeds ──> serving ── probes fail ──> down ── one succeeds ──> serving
        └───────────────────────────────────── probes fail ────────────────^

Both workers may be healthy while their pair fails: a stuck session, or a network that blocks only the peer. An unknown
pair counts as serving. `dispatch` reports requests, `watchdog` reports probes, `admission` reads the state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from pdserve.router.workers.workers import Pair, Registry, Worker

FAILURES = 2
"""Failed probes in a row after which a pair is down."""


@dataclasses.dataclass(eq=False)
class PairState:
    """State of one pair. Times are the event loop's; None: never."""

    served_at: float | None = None
    """Last time at which an answer to a request or a probe began."""
    probed_at: float | None = None
    """Start of the latest probe."""
    wanted: bool = False
    """True: a request failed, so that a probe is due."""
    num_failed: int = 0
    """Failed probes since the pair last served."""
    down_since: float | None = None
    """Time at which the pair went down; None: it is not down."""
    error: str | None = None

    @property
    def down(self) -> bool:
        """Whether the pair gets no requests."""
        return self.down_since is not None


class Pairs:
    """States of all pairs that were used or probed."""

    def __init__(self, registry: Registry) -> None:
        self._states: dict[Pair, PairState] = {}
        self._num_down = 0
        registry.on_forgotten.append(self._forget)

    @property
    def any_down(self) -> bool:
        """Whether at least one pair is down."""
        return self._num_down > 0

    def serves(self, pair: Pair) -> bool:
        """Whether the pair is not down."""
        state = self._states.get(pair)
        return state is None or not state.down

    def could_serve(self, prefills: Iterable[Worker], decodes: Iterable[Worker]) -> bool:
        """Whether at least one pair of these workers is not down."""
        if not self.any_down:
            return True
        others = list(decodes)
        return any(self.serves(Pair(prefill, decode)) for prefill in prefills for decode in others)

    def state(self, pair: Pair) -> PairState:
        """Return the state of a pair, created if unknown; the state of a removed worker's pair is not stored."""
        if pair.decode.forgotten or (pair.prefill is not None and pair.prefill.forgotten):
            return PairState()
        return self._states.setdefault(pair, PairState())

    def served(self, pair: Pair, now: float) -> bool:
        """Report that an answer has begun. True if the pair was down."""
        state = self.state(pair)
        was_down = state.down
        self._num_down -= was_down
        state.served_at, state.num_failed = now, 0
        state.down_since = state.error = None
        state.wanted = False
        return was_down

    def suspect(self, pair: Pair) -> None:
        """Report a request that failed through a worker's fault, so that a probe is due."""
        self.state(pair).wanted = True

    def failed(self, pair: Pair, begun: float, error: str, now: float) -> bool:
        """Report a failed probe that began at `begun`. True if the pair went down by it."""
        state = self.state(pair)
        if state.served_at is not None and state.served_at >= begun:
            return False
        state.num_failed += 1
        state.error = error
        if state.down or state.num_failed < FAILURES:
            return False
        state.down_since = now
        self._num_down += 1
        return True

    def _forget(self, worker: Worker) -> None:
        for pair in [pair for pair in self._states if worker in (pair.prefill, pair.decode)]:
            self._num_down -= self._states.pop(pair).down

    def shown(self, now: float) -> list[dict[str, Any]]:
        """Return the state of all known pairs, for `/observe`."""
        return [
            {
                "prefill": None if pair.prefill is None else pair.prefill.spec.url,
                "decode": pair.decode.spec.url,
                "serving": not state.down,
                "served_age_s": None if state.served_at is None else now - state.served_at,
                "down_s": None if state.down_since is None else now - state.down_since,
                "error": state.error,
            }
            for pair, state in self._states.items()
        ]

    def __iter__(self) -> Iterator[tuple[Pair, PairState]]:
        return iter(list(self._states.items()))
