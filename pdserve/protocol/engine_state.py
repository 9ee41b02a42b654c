"""What a scheduler reports about itself: that it is ready, that it is alive, and its state.

The state is behind `/get_server_info`, `/get_load` and `/metrics`; a `StateReply` carries it. Durations are seconds.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from pdserve.protocol.hidden_states import Pooling


class Flow(msgspec.Struct, frozen=True, kw_only=True):
    """KV transfers in one direction of a session: totals since it began, and those in flight."""

    bytes: int = 0
    transfers: int = 0
    failures: int = 0
    write_s: float = 0.0
    """Seconds that the sender's transport spent writing; `bytes / write_s` is its bandwidth."""
    in_flight: int = 0
    """Transfer keys whose bytes are in flight now."""
    recent_bytes_s: float = 0.0
    """Bytes per second over the last few seconds."""


class PeerLoad(msgspec.Struct, frozen=True, kw_only=True):
    """One peer server's session. `state`: connecting, ready, silent or refused."""

    endpoint: str
    instance: str
    state: str
    heartbeat_age_s: float
    """Seconds since the last message of the peer."""
    silent_s: float | None = None
    """Seconds since the session became silent, which takes longer while the peer's port accepts connections. None: it
    is not silent."""
    sent: Flow = Flow()
    received: Flow = Flow()


WaitsFor = Literal["peer", "memory", "compute", "transfer"]


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of the scheduler for `/get_server_info`, `/get_load` and `/metrics`.

    `queues`: length by queue name. `memory`: counts by name, e.g. pages_total, pages_free, pages_leased,
    pages_held_remote, rows_total, rows_free, aux_total, aux_free, rooms_live.
    `counters`: monotonic totals by name. `facts`: static strings and numbers (layout, transport, dtype).
    `by_priority`: by name of a queue, its requests by their priority; empty without priority scheduling.
    `gen_throughput`: tokens generated a second, recently.
    `audit`: findings of the last self-audit, a sentence each: a page, row, aux slot or room with no owner or two.
    """

    queues: dict[str, int]
    memory: dict[str, int]
    counters: dict[str, float]
    facts: dict[str, str | int | float | bool | None]
    num_running_reqs: int
    num_queue_reqs: int
    num_used_tokens: int
    max_total_tokens: int
    audit: list[str] = msgspec.field(default_factory=list)
    failures: dict[str, int] = msgspec.field(default_factory=dict)
    """Requests that failed on this server, by `Failure.code`."""
    peers: list[PeerLoad] = msgspec.field(default_factory=list)
    oldest_orphan_s: float = 0.0
    """Seconds in quarantine of the oldest KV pages that no request owns and a peer may still write to; 0.0: none."""
    by_priority: dict[str, dict[int, int]] = msgspec.field(default_factory=dict)
    gen_throughput: float = 0.0
    progress: int = 0
    """Grows with each step that computed tokens, and with the KV bytes that were sent."""
    probes: dict[str, WaitsFor] = msgspec.field(default_factory=dict)
    """By rid, the resource that each live probe waits for; see `SchedulerRole.waits_for`."""
    replicas: list[EngineState] = msgspec.field(default_factory=list)
    """States of the data-parallel ranks, which this state adds up; empty for one replica."""


class EngineReady(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Sent when the scheduler can take requests, and again at the end of each `SwitchRole`.

    `vocab_size`, `context_length` and `max_total_tokens` bound the requests it accepts. `hidden_size`: width of hidden
    states. `pooling`: None unless the model serves embeddings. `takes_embeds`: requests may have input embeddings.
    """

    model_type: str
    architectures: list[str]
    vocab_size: int
    context_length: int
    max_total_tokens: int
    eos_token_ids: list[int]
    facts: dict[str, str | int | float | bool | None]
    hidden_size: int = 0
    pooling: Pooling | None = None
    takes_embeds: bool = False


class SchedulerHeartbeat(msgspec.Struct, frozen=True, kw_only=True, tag="Beat"):
    """Heartbeat of one replica's scheduler process. Sent about once a second, also during a long step.

    `turn_s`: seconds since the current loop iteration began; None while the loop sleeps.
    `num_turns`: iterations that computed a step and have ended.
    """

    dp_rank: int
    turn_s: float | None
    num_turns: int
