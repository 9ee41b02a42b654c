"""Parses the servers' answers to `GET /observe` and merges them into one deployment. Pure; called by `observe`.

Both ends of a transfer report it, and both halves of a request; they are merged into one edge and one request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from pdserve.router.config.config import WorkerRole

NUM_REQUESTS = 64


class TokensSnapshot(msgspec.Struct, frozen=True):
    """Token slots of a replica."""

    used: int = 0
    max: int = 0


class PagesSnapshot(msgspec.Struct, frozen=True):
    """KV pages of a replica by state; `total` is the sum of the other four."""

    total: int = 0
    free: int = 0
    evictable: int = 0
    locked: int = 0
    leased: int = 0


class HeldSnapshot(msgspec.Struct, frozen=True):
    """`remote`: pages that a peer may write into; `send`: pages that are read for a peer."""

    remote: int = 0
    send: int = 0


class TierSnapshot(msgspec.Struct, frozen=True):
    """KV in host memory (tokens), and the traffic of the store: totals in bytes. None: the server has no such tier."""

    host_used: int | None = None
    host_max: int | None = None
    store: str | None = None
    store_read_bytes: float | None = None
    store_written_bytes: float | None = None


class StateSnapshot(msgspec.Struct, frozen=True):
    """State of a scheduler."""

    endpoint: str | None = None
    transfer_backend: str | None = None
    queues: dict[str, int] = {}
    running: int = 0
    waiting: int = 0
    tokens: TokensSnapshot = TokensSnapshot()
    pages: PagesSnapshot = PagesSnapshot()
    pages_held: HeldSnapshot = HeldSnapshot()
    tiers: TierSnapshot = TierSnapshot()
    failures: dict[str, int] = {}


class ReplicaSnapshot(msgspec.Struct, frozen=True):
    """One replica of a server; `state` is None before its scheduler's first answer."""

    dp_rank: int = 0
    alive: bool = True
    silent: bool = False
    turn_s: float | None = None
    trouble: str | None = None
    state: StateSnapshot | None = None


class ServerSnapshot(msgspec.Struct, frozen=True):
    """Facts and status of a server."""

    model: str = ""
    mode: str = ""
    version: str = ""
    started_at: float | None = None
    status: str = ""
    trouble: str | None = None
    state_age_s: float | None = None
    live_requests: int = 0


class EdgeSnapshot(msgspec.Struct, frozen=True, rename={"source": "from", "target": "to"}):
    """KV transfers from one replica to another, identified by their control endpoints."""

    source: str | None = None
    target: str | None = None
    in_flight: int = 0
    gb_per_s: float = 0.0
    gb_per_s_writing: float | None = None
    bytes: int = 0
    transfers: int = 0
    failures: int = 0
    peer_state: str = ""
    heartbeat_age_s: float | None = None


class RatesSnapshot(msgspec.Struct, frozen=True):
    """Current rates of a server. `spec_*` None: the server has no speculative decoding."""

    generation_tokens_per_s: float = 0.0
    cache_hit_rate: float = 0.0
    spec_accept_length: float | None = None
    spec_accept_rate: float | None = None


class EndedRequest(msgspec.Struct, frozen=True):
    """One half of an ended request, or the whole request on a monolith."""

    id: str = ""
    path: str | None = None
    room: str | None = None
    arrived_at: float = 0.0
    outcome: str = ""
    error: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    ttft_s: float | None = None
    ttft_parts: dict[str, float] = {}
    e2e_s: float | None = None
    kv_bytes: int | None = None
    kv_transfer_s: float | None = None


class ObserveReply(msgspec.Struct, frozen=True):
    """A server's answer. Missing fields get defaults, so that servers of other versions can be shown."""

    server: ServerSnapshot = ServerSnapshot()
    replicas: list[ReplicaSnapshot] = []
    edges: list[EdgeSnapshot] = []
    rates: RatesSnapshot = RatesSnapshot()
    requests: list[EndedRequest] = []

    @property
    def endpoints(self) -> list[str]:
        """Control endpoints of the server's replicas."""
        return [one.state.endpoint for one in self.replicas if one.state is not None and one.state.endpoint is not None]


def parse_answer(raw: bytes) -> ObserveReply:
    """Parse an answer. Raises `msgspec.MsgspecError` (a `ValueError`) that names the invalid field."""
    return msgspec.json.decode(raw, type=ObserveReply)


def join_edges(answers: Iterable[ObserveReply], owners: Mapping[str, str]) -> list[dict[str, Any]]:
    """Merge reports into one edge for each pair of endpoints; `owners` maps endpoints to URLs.

    Numbers are the larger of the two reports, which is the later one or that of the end that has run longer.
    `from_url` and `to_url` are None for servers that are not workers of this router.
    """
    seen: dict[tuple[str, str], list[EdgeSnapshot]] = {}
    for answer in answers:
        for edge in answer.edges:
            if edge.source is not None and edge.target is not None:
                seen.setdefault((edge.source, edge.target), []).append(edge)
    return [_joined(ends, reports, owners) for ends, reports in sorted(seen.items())]


def _joined(ends: tuple[str, str], reports: Sequence[EdgeSnapshot], owners: Mapping[str, str]) -> dict[str, Any]:
    writing = [one.gb_per_s_writing for one in reports if one.gb_per_s_writing is not None]
    ages = [one.heartbeat_age_s for one in reports if one.heartbeat_age_s is not None]
    states = {one.peer_state for one in reports}
    return {
        "from": ends[0],
        "to": ends[1],
        "from_url": owners.get(ends[0]),
        "to_url": owners.get(ends[1]),
        "in_flight": max(one.in_flight for one in reports),
        "gb_per_s": max(one.gb_per_s for one in reports),
        "gb_per_s_writing": max(writing, default=None),
        "bytes": max(one.bytes for one in reports),
        "transfers": max(one.transfers for one in reports),
        "failures": max(one.failures for one in reports),
        "peer_state": min(states - {"ready"}, default="ready"),
        "heartbeat_age_s": max(ages, default=None),
        "reports": len(reports),
    }


def join_requests(answers: Iterable[tuple[WorkerRole, str, ObserveReply]]) -> list[dict[str, Any]]:
    """Return the newest `NUM_REQUESTS` requests of all servers (role, URL, answer), newest first, with halves by role.

    Halves are matched by their bootstrap room; a request without a room is identified by URL and id.
    """
    found: dict[str, dict[str, Any]] = {}
    for role, url, answer in answers:
        for ended in answer.requests:
            name = f"{url} {ended.id}" if ended.room is None else ended.room
            entry = found.setdefault(name, {"key": name, "arrived_at": ended.arrived_at, "halves": {}})
            entry["arrived_at"] = min(entry["arrived_at"], ended.arrived_at)
            entry["halves"].setdefault(role.value, msgspec.to_builtins(ended) | {"url": url})
    newest = sorted(found.values(), key=lambda entry: entry["arrived_at"], reverse=True)
    return newest[:NUM_REQUESTS]
