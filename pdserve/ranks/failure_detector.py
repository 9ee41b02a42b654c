"""Failure detector of the other ranks: the last message and state of each, and the error when one is lost. Pure.

Time is an argument. Owned by the link thread of a rank (`links`), which calls `root_cause` a few times a second. The
first trouble seen is rarely its cause: when a rank dies, other ranks fail in an exchange with it, and final messages
may arrive after the end of the connection. So `root_cause` waits `grace_s`, and names ranks that ended without a
message first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from pdserve.errors import ConfigError, ModelError, PdserveError, RankError


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinkTimes:
    """Times in seconds. A rank is lost after `silent_s` without a message, or `join_s` before its first message.

    Rank 0 sends a follower its first message when all ranks have joined.
    """

    beat_s: float = 1.0
    silent_s: float = 10.0
    join_s: float = 600.0
    grace_s: float = 0.5


@dataclasses.dataclass(frozen=True)
class PeerRank:
    """Another rank. `name` is for display: its number, host and process. `nonce` is drawn at its start."""

    rank: int
    name: str
    endpoint: str
    nonce: str


@dataclasses.dataclass(slots=True)
class _State:
    since: float
    """Time of its last message, or of the start of the watch."""
    last: str | None = None
    refused_at: float | None = None
    """Since when its endpoint refuses connections; None: it does not."""
    trouble_at: float | None = None
    gone: str | None = None
    """Why the rank counts as ended without a message, or as silent; None: it does not."""
    failure: PdserveError | None = None
    """The error that the rank reported, or that its messages caused."""


class FailureDetector:
    """Peers and their state. One thread only."""

    def __init__(self, peers: Sequence[PeerRank], times: LinkTimes, now: float) -> None:
        self._peers = {peer.rank: peer for peer in peers}
        self._times = times
        self._states = {peer.rank: _State(now) for peer in peers}
        self._asked_at = now

    def heard(self, rank: int, what: str, now: float) -> None:
        """Record a message of type `what` from `rank`."""
        state = self._states[rank]
        state.since, state.last = now, what

    def closed(self, rank: int, now: float) -> None:
        """Record a closed connection: the peer's process has ended, or the network is broken."""
        self._trouble(rank, now, gone=f"is gone: its connection is closed{self._last_heard(rank, now)}")

    def refused(self, rank: int, now: float) -> None:
        """Record a refused connection; zmq retries."""
        state = self._states[rank]
        state.refused_at = now if state.refused_at is None else state.refused_at

    def reached(self, rank: int) -> None:
        """Record a successful connection."""
        self._states[rank].refused_at = None

    def failed(self, rank: int, error: PdserveError, now: float) -> None:
        """Record an error that the rank reported, or that its messages caused."""
        state = self._states[rank]
        state.failure = state.failure or error
        state.trouble_at = now if state.trouble_at is None else state.trouble_at

    def root_cause(self, now: float) -> PdserveError | None:
        """Return the error that ends the replica; None while no loss is known.

        Call it after all received messages were handled. After a long pause between calls, this process was held up
        itself, and the pause does not count as silence of any rank.
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
            return "; it never sent a message"
        ago = "" if now is None else f" {now - state.since:.1f} s before"
        return f"; its last message was {state.last}{ago}"

    def _sentence(self) -> PdserveError:
        """Return the error: configuration errors first, then ranks that ended without a message, then ranks with
        errors.
        """
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
