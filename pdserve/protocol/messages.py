"""What the API process and the scheduler process say to each other.

All messages are tagged msgspec structs; `codec` turns them into bytes. Token ids are non-negative ints,
durations are seconds, wall times are `time.time()` seconds.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from pdserve.protocol.logprobs import Logprobs, PromptLogprobs
from pdserve.protocol.sampling import CoreSamplingParams

MAX_ROOM = (1 << 63) - 1
FAKE_BOOTSTRAP_HOST = "2.2.2.2"
"""A request whose bootstrap host is this moves no bytes: warm-up and health probes (SGLang's convention)."""


class RoomAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where the two halves of a request meet: the prefill server's bootstrap address, and the room."""

    host: str
    port: int | None
    room: int


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One sequence to generate. `n` > 1 and batches arrive as several of these, each with its own rid and room."""

    rid: str
    input_ids: list[int]
    sampling: CoreSamplingParams
    stream: bool = False
    logprobs: Logprobs | None = None
    """None: nothing is wanted."""
    room: RoomAddress | None = None
    arrival_s: float = 0.0
    priority: int = 0
    """Higher runs first under `--schedule-policy priority`, and its prefix stays longer with priority eviction."""
    replica: int | None = None
    """Which replica must take it, for probes. None: the one that the room names, or that has the least to do."""
    traced: bool = False
    """Somebody wants to see each chunk of the prompt: `RequestTiming.chunks` is filled in."""
    probe: bool = False
    """Nobody's request but a look whether tokens come: counted as such, and in no count of requests and tokens."""
    prior_output_ids: list[int] = msgspec.field(default_factory=list)
    """Output tokens of an earlier try on another server. They are computed with the prompt and never sent again."""

    @property
    def given_ids(self) -> list[int]:
        """All tokens that the request comes with: its prompt, then `prior_output_ids`."""
        return self.input_ids + self.prior_output_ids if self.prior_output_ids else self.input_ids


class AbortRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End a request early; `rid` None means all. `reason` "stop" when a stop string was seen in its text."""

    rid: str | None
    reason: Literal["abort", "stop"] = "abort"


class Divert(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To the prefill replica that `room` names: another one, `replica`, has the request. Decode will ask you for it."""

    room: int
    input_ids: list[int]
    replica: int


class FlushCache(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Forget cached prefixes; refused while requests are running."""

    query_id: str


class StateQuery(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Ask for an `EngineState`. `audit`: check the books first, which takes time in proportion to the pool."""

    query_id: str
    audit: bool = False


PauseMode = Literal["abort", "retract", "in_place"]


class PauseGeneration(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Compute nothing until `ContinueGeneration`; what comes meanwhile waits.

    What is there: `abort` ends it, `retract` takes its memory away (a prefill server's prompts keep theirs, which peers
    may be reading), `in_place` leaves it as it stands.
    """

    query_id: str
    mode: PauseMode = "abort"


class ContinueGeneration(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Go on."""

    query_id: str


class StartProfile(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Record what is computed, for `num_steps` steps or until `StopProfile`, into a file in `output_dir`."""

    query_id: str
    output_dir: str
    profile_id: str | None = None
    num_steps: int | None = None
    activities: tuple[Literal["CPU", "GPU"], ...] = ("CPU", "GPU")
    record_shapes: bool = False
    with_stack: bool = False


class StopProfile(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Write the record."""

    query_id: str


class DeclarePeerDead(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An operator says that the process `instance` of a peer is dead: it writes no more, so its pages are free."""

    query_id: str
    instance: str


class Shutdown(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Stop the scheduler."""


Command = FlushCache | PauseGeneration | ContinueGeneration | StartProfile | StopProfile | DeclarePeerDead
"""Answered with a `CommandReply`."""
ToScheduler = GenerateRequest | AbortRequest | Divert | Command | StateQuery | Shutdown


class TokenLogprob(msgspec.Struct, frozen=True):
    """Natural-log probability of one chosen token, `(token id, logprob)` of the most likely ones, and the
    probabilities of the `token_ids` that were asked for, in their order.
    """

    logprob: float
    top: list[tuple[int, float]] = msgspec.field(default_factory=list)
    picked: list[float] = msgspec.field(default_factory=list)


class FinishReason(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request ended; one terminal state per request.

    `stop`: `matched` is the token id or the stop string. `length`: `length` tokens were generated.
    `abort`: `message`, the HTTP `status_code` the client gets, `err_type`, and for a 503 when to come back.
    """

    type: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    length: int | None = None
    message: str | None = None
    status_code: int | None = None
    err_type: str | None = None
    retry_after_s: int | None = None


class RequestTiming(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time to the first token went, and what was moved. All seconds; None where it does not apply."""

    queue_s: float | None = None
    bootstrap_s: float | None = None
    prefill_s: float | None = None
    transfer_s: float | None = None
    first_decode_step_s: float | None = None
    kv_bytes: int | None = None
    kv_pages: int | None = None
    kv_transfer_s: float | None = None
    """Time the transport spent writing, for GB/s; parts of it overlap with prefill when chunked."""
    chunks: list[tuple[float, int]] | None = None
    """Of a traced request, where the prompt was computed: when each chunk ended, in seconds after the first was
    planned, and how many tokens were computed by then."""


class EngineCoreOutput(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens of one request; the last one carries `finish`.

    `timing` comes whenever a part of it has become known. `prompt_logprobs` come in parts, before the first token; a
    stretch may come again after the request was computed anew.
    """

    rid: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    finish: FinishReason | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    timing: RequestTiming | None = None


class OutputBatch(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """All outputs of one scheduler step."""

    outputs: list[EngineCoreOutput]


class Flow(msgspec.Struct, frozen=True, kw_only=True):
    """What went to a peer, or came from it: totals since the session began, and what is under way."""

    bytes: int = 0
    transfers: int = 0
    failures: int = 0
    write_s: float = 0.0
    """Time that the sender's transport spent writing; `bytes / write_s` is the speed while it wrote."""
    in_flight: int = 0
    """Keys whose bytes are on their way now."""
    recent_bytes_s: float = 0.0
    """Bytes a second over the newest few seconds."""


class PeerLoad(msgspec.Struct, frozen=True, kw_only=True):
    """One server at the other end, as this one sees it. `state`: connecting, ready, silent or refused."""

    endpoint: str
    instance: str
    state: str
    heartbeat_age_s: float
    """Since anything was heard of it."""
    silent_s: float | None = None
    """Since it is taken for silent, which takes longer while somebody listens there; None while it is not."""
    sent: Flow = Flow()
    received: Flow = Flow()


WaitsFor = Literal["peer", "memory", "compute", "transfer"]


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of the scheduler for `/get_server_info`, `/get_load` and `/metrics`.

    `queues`: length by queue name. `memory`: counts by name, e.g. pages_total, pages_free, pages_leased,
    pages_held_remote, rows_total, rows_free, aux_total, aux_free, rooms_live.
    `counters`: ever-growing totals by name. `facts`: static strings and numbers (layout, transport, dtype).
    `audit`: what the newest self-audit found, a sentence each: a page, row, slot or room with no owner or two.
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
    """Requests that failed here, by the code of the failure."""
    peers: list[PeerLoad] = msgspec.field(default_factory=list)
    oldest_orphan_s: float = 0.0
    """For how many seconds the oldest KV pages are kept that no request has and a peer may still write into."""
    probes: dict[str, WaitsFor] = msgspec.field(default_factory=dict)
    """Of each live probe, by rid, what it waits for: see `WorkerRole.waits_for`."""
    replicas: list[EngineState] = msgspec.field(default_factory=list)
    """The states that this one is the sum of, by data-parallel rank; none when there is one replica."""


class StateReply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answer to `StateQuery`."""

    query_id: str
    state: EngineState


class CommandReply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answer to a `Command`."""

    query_id: str
    ok: bool
    message: str


class EngineReady(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Sent once, when the scheduler can take requests.

    `vocab_size`, `context_length` and `max_total_tokens` bound them.
    """

    model_type: str
    architectures: list[str]
    vocab_size: int
    context_length: int
    max_total_tokens: int
    eos_token_ids: list[int]
    facts: dict[str, str | int | float | bool | None]


class SchedulerBeat(msgspec.Struct, frozen=True, kw_only=True, tag="Beat"):
    """The scheduler process of a replica runs. Sent about once a second, also while a step takes long.

    `turn_s` is how long the loop has been at its present turn, None while it sleeps; `num_turns` those that computed
    something and have ended.
    """

    dp_rank: int
    turn_s: float | None
    num_turns: int


ToApi = OutputBatch | StateReply | CommandReply | EngineReady | SchedulerBeat
