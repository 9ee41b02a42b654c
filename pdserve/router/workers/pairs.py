"""Which pairs of workers serve requests, as far as real requests and probes have shown. Owned by `admission`.

    unknown ── a request or a probe succeeds ──> serving ── probes fail ──> not serving ── one succeeds ──> serving
        └───────────────────────────────────────── probes fail ────────────────^

Workers may be well and their pair may not: a wedged session, a network that lets the router through and not the peer.
What is unknown counts as serving. `dispatch` tells of requests, `watchdog` of probes, `admission` asks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from pdserve.router.workers.workers import Pair, Registry, Worker

FAILURES = 2
"""Probes in a row that must fail before a pair counts as not serving."""


@dataclasses.dataclass(eq=False)
class PairState:
    """What is known of one pair. Times are the event loop's; None: never."""

    served_at: float | None = None
    """When an answer of it began last, to a request or a probe."""
    probed_at: float | None = None
    """When the newest probe began."""
    wanted: bool = False
    """A request has failed: a probe shall show why."""
    num_failed: int = 0
    """Probes that have failed since it served."""
    down_since: float | None = None
    """It counts as not serving since then."""
    error: str | None = None

    @property
    def down(self) -> bool:
        """Whether it counts as not serving."""
        return self.down_since is not None


class Pairs:
    """The states of all pairs that were used or probed."""

    def __init__(self, registry: Registry) -> None:
        self._states: dict[Pair, PairState] = {}
        self._num_down = 0
        registry.on_forgotten.append(self._forget)

    @property
    def any_down(self) -> bool:
        """Whether there is a pair that serves nothing."""
        return self._num_down > 0

    def serves(self, pair: Pair) -> bool:
        """False where it is known that it does not."""
        state = self._states.get(pair)
        return state is None or not state.down

    def could_serve(self, prefills: Iterable[Worker], decodes: Iterable[Worker]) -> bool:
        """Whether a pair of these is not known to serve nothing."""
        if not self.any_down:
            return True
        others = list(decodes)
        return any(self.serves(Pair(prefill, decode)) for prefill in prefills for decode in others)

    def state(self, pair: Pair) -> PairState:
        """Of one pair; made where nothing is known yet, and not kept where a worker is gone."""
        if pair.decode.forgotten or (pair.prefill is not None and pair.prefill.forgotten):
            return PairState()
        return self._states.setdefault(pair, PairState())

    def served(self, pair: Pair, now: float) -> bool:
        """An answer has begun. True when the pair counted as not serving."""
        state = self.state(pair)
        was_down = state.down
        self._num_down -= was_down
        state.served_at, state.num_failed = now, 0
        state.down_since = state.error = None
        state.wanted = False
        return was_down

    def suspect(self, pair: Pair) -> None:
        """A request has failed there through the fault of a worker."""
        self.state(pair).wanted = True

    def failed(self, pair: Pair, begun: float, error: str, now: float) -> bool:
        """A probe that began at `begun` has failed. True when the pair counts as not serving from now on."""
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
        """For `/observe`: every pair of which something is known."""
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
