"""Whether the other ranks live: what was heard of each, and what to say when one is lost. Pure; time is an argument.

Owned by the link thread of a rank (`links`), which asks for a verdict a few times a second. The first trouble seen is
rarely its cause: when a rank dies, others fail in the middle of an exchange with it, and last words may arrive after
the end of the connection is seen. So the verdict waits a moment, and names those first who ended without a word.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from pdserve.errors import ConfigError, ModelError, PdserveError, RankError


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinkTimes:
    """Seconds. A rank is lost when nothing is heard of it for `silent_s`, or for `join_s` before its first word.

    A follower hears its leader's first word when all ranks have come.
    """

    beat_s: float = 1.0
    silent_s: float = 10.0
    join_s: float = 600.0
    grace_s: float = 0.5


@dataclasses.dataclass(frozen=True)
class PeerRank:
    """Another rank. `name` is for people: its number, host and process. `nonce` is what it drew at its start."""

    rank: int
    name: str
    endpoint: str
    nonce: str


@dataclasses.dataclass(slots=True)
class _State:
    since: float
    """When it was heard last, or when the watch began."""
    last: str | None = None
    refused_at: float | None = None
    """Since when nobody listens where it should."""
    trouble_at: float | None = None
    gone: str | None = None
    """It ended without a word, or is silent."""
    failure: PdserveError | None = None
    """Its own word."""


class FailureDetector:
    """Peers and what is known of them. One thread only."""

    def __init__(self, peers: Sequence[PeerRank], times: LinkTimes, now: float) -> None:
        self._peers = {peer.rank: peer for peer in peers}
        self._times = times
        self._states = {peer.rank: _State(now) for peer in peers}
        self._asked_at = now

    def heard(self, rank: int, what: str, now: float) -> None:
        """A message, called `what`, came from `rank`."""
        state = self._states[rank]
        state.since, state.last = now, what

    def closed(self, rank: int, now: float) -> None:
        """Its connection is closed: its process has ended, or the network between us."""
        self._trouble(rank, now, gone=f"is gone: its connection is closed{self._last_heard(rank, now)}")

    def refused(self, rank: int, now: float) -> None:
        """It could not be reached; another try follows."""
        state = self._states[rank]
        state.refused_at = now if state.refused_at is None else state.refused_at

    def reached(self, rank: int) -> None:
        """It was reached after all."""
        self._states[rank].refused_at = None

    def failed(self, rank: int, error: PdserveError, now: float) -> None:
        """It said what went wrong, or what came from it was wrong."""
        state = self._states[rank]
        state.failure = state.failure or error
        state.trouble_at = now if state.trouble_at is None else state.trouble_at

    def verdict(self, now: float) -> PdserveError | None:
        """Why the replica cannot go on; None while nothing is known to be wrong.

        Call it after everything that has arrived was taken in. When it was not called for long it is this process that
        was held up, and nobody's silence is counted.
        """
        if now - self._asked_at > self._times.silent_s / 2:
            for state in self._states.values():
                state.since = max(state.since, now - self._times.silent_s / 2)
        self._asked_at = now
        for rank, state in self._states.items():
            if state.refused_at is not None and now - state.refused_at > self._times.silent_s:
                self._trouble(rank, now, gone=f"cannot be reached{self._last_heard(rank, None)}")
            limit_s = self._times.join_s if state.last is None else self._times.silent_s
            if state.trouble_at is None and now - state.since > limit_s:
                self._trouble(rank, now, gone=f"is silent for {now - state.since:.1f} s{self._last_heard(rank, None)}")
        found = [state for state in self._states.values() if state.trouble_at is not None]
        if not found:
            return None
        refusals = [state for state in found if isinstance(state.failure, ConfigError | ModelError)]
        first_at = min(state.trouble_at for state in found if state.trouble_at is not None)
        if refusals or now - first_at >= self._times.grace_s:
            return self._sentence()
        return None

    def _trouble(self, rank: int, now: float, gone: str) -> None:
        state = self._states[rank]
        state.gone = state.gone or gone
        state.trouble_at = now if state.trouble_at is None else state.trouble_at

    def _last_heard(self, rank: int, now: float | None) -> str:
        state = self._states[rank]
        if state.last is None:
            return "; it never said a word"
        ago = "" if now is None else f" {now - state.since:.1f} s before"
        return f"; the last we heard was {state.last}{ago}"

    def _sentence(self) -> PdserveError:
        """Refusals first, then those who ended without a word, then those who complain."""
        sentences = dict[int, list[tuple[int, str, PdserveError | None]]]({0: [], 1: [], 2: []})
        for rank, state in self._states.items():
            name = self._peers[rank].name
            match state.failure:
                case ConfigError() | ModelError() as refusal:
                    sentences[0].append((rank, f"{name}: {refusal}", refusal))
                case None if state.gone is not None:
                    sentences[1].append((rank, f"{name} {state.gone}", None))
                case None:
                    pass
                case error:
                    sentences[2].append((rank, f"{name} failed: {error}", None))
        ordered = [*sentences[0], *sentences[1], *sentences[2]]
        message = "; ".join(dict.fromkeys(sentence for _, sentence, _ in ordered))
        match ordered[0][2]:
            case ConfigError(field=field):
                return ConfigError(message, field=field)
            case ModelError():
                return ModelError(message)
            case _:
                return RankError(message)
