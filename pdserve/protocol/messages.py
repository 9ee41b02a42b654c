"""Messages between the API process and the scheduler process.

All messages are tagged msgspec structs; `codec` turns them into bytes. Token ids are non-negative ints,
durations are seconds, wall times are `time.time()` seconds.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from pdserve.protocol.cached_tokens import CachedTokensDetails
from pdserve.protocol.engine_memory import MemoryCommand
from pdserve.protocol.engine_state import EngineReady, EngineState, SchedulerHeartbeat
from pdserve.protocol.failure import ABORTED_STATUS, Failure
from pdserve.protocol.hidden_states import HiddenParams, HiddenStates
from pdserve.protocol.logprobs import Logprobs, PromptLogprobs
from pdserve.protocol.sampling import CoreSamplingParams
from pdserve.protocol.weights import WeightsCommand

MAX_ROOM = (1 << 63) - 1
FAKE_BOOTSTRAP_HOST = "2.2.2.2"
"""Bootstrap host of requests that transfer no KV: warm-up and health probes (SGLang's convention)."""


class SenderAddress(msgspec.Struct, frozen=True, kw_only=True):
    """The process that sends a request's KV: its instance id, and its control endpoint `host:port`."""

    instance: str
    endpoint: str


class RoomAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Address at which prefill and decode meet: the prefill server's bootstrap host and port, and the bootstrap room.

    `port` None: the request names no port. `sender`: set for a request that migrates. It names the sending process, for
    which no bootstrap server is asked.
    """

    host: str
    port: int | None
    room: int
    sender: SenderAddress | None = None


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One sequence to generate. `n` > 1 and batches are sent as several requests, each with its own rid and room."""

    rid: str
    input_ids: list[int]
    sampling: CoreSamplingParams
    stream: bool = False
    logprobs: Logprobs | None = None
    """None: the request wants no log probabilities."""
    hidden: HiddenParams | None = None
    """None: the request wants no hidden states. Each is sent once, in the order of positions."""
    input_embeds: bytes = b""
    """Output of the embedding layer for `input_ids`, float32 `[tokens, hidden_size]`; empty: the model's own."""
    room: RoomAddress | None = None
    arrival_s: float = 0.0
    priority: int = 0
    """Urgency, see `PriorityRules`: higher runs first by default. Priority eviction keeps its prefix longer."""
    replica: int | None = None
    """Data-parallel rank that must take the request, for probes. None: the room's rank, or the least loaded one."""
    traced: bool = False
    """True: the scheduler fills in `RequestTiming.chunks`, for a recorded trace span."""
    probe: bool = False
    """True for a health probe. Probes have their own counter and are in no count of requests and tokens."""
    request_id: str | None = None
    """`X-Request-Id` of the HTTP call, for log lines. None: it was not sent by HTTP."""
    prior_output_ids: list[int] = msgspec.field(default_factory=list)
    """Output tokens of an earlier attempt on another server. They are prefilled with the prompt and not sent again."""
    lora: str | None = None
    """Name of a loaded LoRA adapter. None: the model itself."""
    cache_salt: str = ""
    """The request shares cached KV, and past outputs as drafts, with requests of the same salt only. Empty: no salt."""

    local: bool = False
    """True: a decode server computes the prompt itself, as of a restored request. `room` is None then."""
    lora_digest: str = ""
    """Digest that the adapter `lora` must have, as of a restored request. Empty: any."""
    taken_over: bool = False
    """True: another decode server has the request, whose KV it does not send, until its first output here. `local`."""
    migration_id: str = ""
    """Name of the migration that the request is a stage or the end of: all of it goes to one replica. Empty: none."""
    kv_tokens: int = 0
    """First tokens of `given_ids` whose KV came before, in `KVPart`s."""

    @property
    def given_ids(self) -> list[int]:
        """All tokens to prefill: the prompt, then `prior_output_ids`."""
        return self.input_ids + self.prior_output_ids if self.prior_output_ids else self.input_ids


class AbortRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Ends a request early; `rid` None means all. `reason` "stop": the text matched a stop string or pattern."""

    rid: str | None
    reason: Literal["abort", "stop"] = "abort"


class RedirectReceiver(msgspec.Struct, frozen=True, kw_only=True, tag="Divert"):
    """Notifies the prefill replica that `room` names: data-parallel rank `replica` has the request instead.

    The decode server requests the room from the named replica, which redirects it.
    """

    room: int
    input_ids: list[int]
    replica: int
    lora: str | None = None


class ExtractRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Asks for the state of the live request `rid`, for a snapshot.

    `with_kv`: also for the bytes of its KV, which `KVPart`s carry before the `ExtractReply`. `keep` False: the request
    ends with the finish reason `suspended`.
    """

    query_id: str
    rid: str
    with_kv: bool = False
    keep: bool = False


class KVPart(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The next bytes of the KV of layout group `group`, in order: of an extracted request `rid`, or of one that follows
    as a `GenerateRequest`.
    """

    rid: str
    group: int
    data: bytes


class FlushCache(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Empties the prefix cache; refused while requests are running."""

    query_id: str


class ClearStorage(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Removes all pages of the store below the host tier, those of other servers too; refused without a store."""

    query_id: str


class StateQuery(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Requests an `EngineState`. `audit`: run the self-audit first, which takes time in proportion to the KV pool."""

    query_id: str
    audit: bool = False


PauseMode = Literal["abort", "retract", "in_place"]


class PauseGeneration(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Stops computation until `ContinueGeneration`; new requests are queued.

    Live requests: `abort` ends them, `retract` frees their KV pages, `in_place` leaves them unchanged.
    On a prefill server `retract` frees no pages, because peers may be reading them.
    """

    query_id: str
    mode: PauseMode = "abort"


class ContinueGeneration(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Resumes computation after `PauseGeneration`."""

    query_id: str


class StartProfile(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Starts torch's profiler, which writes a file into `output_dir`.

    `num_steps`: scheduler steps to record; None: until `StopProfile`.
    """

    query_id: str
    output_dir: str
    profile_id: str | None = None
    num_steps: int | None = None
    activities: tuple[Literal["CPU", "GPU"], ...] = ("CPU", "GPU")
    record_shapes: bool = False
    with_stack: bool = False


class StopProfile(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Stops the profiler and writes its file."""

    query_id: str


class DeclarePeerDead(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An operator's statement that the peer process `instance` is dead. Pages that it could write to are released."""

    query_id: str
    instance: str


class LoadLora(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Loads the LoRA adapter in the directory `path` as `name`."""

    query_id: str
    name: str
    path: str


class PrepareLora(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Begins to read the adapter of a `LoadLora` that follows once rank 0 has read it. Rank 0 sends it to all ranks."""

    name: str
    path: str


class UnloadLora(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Unloads the LoRA adapter `name`. Requests that have it keep it."""

    query_id: str
    name: str


class SwitchRole(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Changes the role of the running engine; see `scheduler/role_switcher.py`. An `EngineReady` precedes the reply.

    `disagg`: the fields of the new `DisaggConfig`, by name. `server`, `bootstrap_port`: see `ReplicaId`. `timeout_s`:
    seconds until the last request, step and transfer must have ended; otherwise the role stays.
    """

    query_id: str
    disagg: dict[str, str | int | float | bool | None]
    server: str
    bootstrap_port: int | None
    timeout_s: float


class Shutdown(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Stops the scheduler."""


class MigrateOut(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Stops the running request `rid` and offers its KV in `room`. The reply's payload is a `MigrationOffer`.

    A retracted request is offered without KV: the other server computes it again. The request stays stopped until
    `EndMigration`, a failure of the transfer, or a timeout.
    """

    query_id: str
    rid: str
    room: int


class EndMigration(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Ends the migration of `rid`. `commit`: the other server has the request, and this one forgets it. Else the
    request goes on here. A commit is refused unless all KV was sent and the request is still stopped.
    """

    query_id: str
    rid: str
    commit: bool


class SendPrefix(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Offers whole computed pages in `room`: those of the running request `rid`, or those of `prompt` that are cached.

    `after`: leading tokens that the other server has from an earlier stage. The reply's payload is a `MigrationOffer`
    of a request with `max_new_tokens` 0. The pages stay here.

    `count_only`: nothing is offered; the payload is the number of tokens that would be, as msgpack.
    """

    query_id: str
    rid: str
    room: int
    after: int = 0
    prompt: GenerateRequest | None = None
    count_only: bool = False


class MigrationOffer(msgspec.Struct, frozen=True, kw_only=True):
    """A stopped request as a value: what another decode server needs to go on with it, but the KV.

    `request.prior_output_ids` are the output tokens whose KV is sent, all but the last one. `request.room` names the
    sender. Of a retracted request they are all output tokens, and `room` is None.
    """

    request: GenerateRequest
    num_output_tokens: int


EngineCommand = (
    FlushCache
    | ClearStorage
    | PauseGeneration
    | ContinueGeneration
    | StartProfile
    | StopProfile
    | DeclarePeerDead
    | LoadLora
    | UnloadLora
)
MigrationCommand = MigrateOut | EndMigration | SendPrefix
"""Commands about one request, for the replica that has it."""
Command = EngineCommand | MigrationCommand | WeightsCommand | MemoryCommand
"""Answered with a `CommandReply`."""
ToScheduler = (
    GenerateRequest
    | AbortRequest
    | ExtractRequest
    | KVPart
    | RedirectReceiver
    | Command
    | StateQuery
    | PrepareLora
    | SwitchRole
    | Shutdown
)


class TokenLogprob(msgspec.Struct, frozen=True):
    """Natural-log probabilities at one output position.

    `logprob`: of the sampled token. `top`: `(token id, logprob)` of the most likely tokens.
    `picked`: log probabilities of the requested `token_ids`, in their order.
    """

    logprob: float
    top: list[tuple[int, float]] = msgspec.field(default_factory=list)
    picked: list[float] = msgspec.field(default_factory=list)


REFUSED_FIELDS = {
    "room_in_use": "bootstrap_room",
    "lora_mismatch": "lora_path",
    "not_migratable": "disaggregation_mode",
}
"""Fields of the errors with which a scheduler refuses a request, by code."""


class FinishReason(msgspec.Struct, frozen=True, kw_only=True):
    """The reason for which a request ended; one per request.

    `stop`: `matched` is the token id or the stop string. `length`: `length` tokens were generated.
    `abort`: `message`, the client's HTTP `status_code`, `err_type`, and for a 503 `retry_after_s` in seconds.
    `suspended`: a snapshot of the request was taken, and the request has ended here.
    """

    type: Literal["stop", "length", "abort", "suspended"]
    matched: int | str | None = None
    length: int | None = None
    message: str | None = None
    status_code: int | None = None
    err_type: str | None = None
    retry_after_s: int | None = None

    @classmethod
    def failed(cls, failure: Failure) -> FinishReason:
        """Return the finish reason `abort` of a request that ended with `failure`."""
        return cls(
            type="abort",
            message=failure.message,
            status_code=failure.status,
            err_type=failure.code,
            retry_after_s=None if failure.retry_after_s is msgspec.UNSET else failure.retry_after_s,
        )

    @property
    def failure(self) -> Failure | None:
        """The failure that ended the request; None for other reasons than `abort`. Its field follows from the code."""
        if self.type != "abort":
            return None
        field = REFUSED_FIELDS.get(self.err_type or "", msgspec.UNSET)
        if self.err_type == "snapshot_differs" and self.message:  # its message begins with the field
            field = self.message.split(maxsplit=1)[0].rstrip(":")
        return Failure(
            code=self.err_type or "aborted",
            message=self.message or "aborted",
            status=self.status_code or ABORTED_STATUS,
            field=field,
            retry_after_s=msgspec.UNSET if self.retry_after_s is None else self.retry_after_s,
        )


class RequestTiming(msgspec.Struct, frozen=True, kw_only=True):
    """Parts of a request's TTFT, and its KV transfer volume. Durations are in seconds; None: does not apply."""

    queue_s: float | None = None
    bootstrap_s: float | None = None
    prefill_s: float | None = None
    transfer_s: float | None = None
    first_decode_step_s: float | None = None
    kv_bytes: int | None = None
    kv_pages: int | None = None
    kv_transfer_s: float | None = None
    """Seconds the transport spent writing, for GB/s. With chunked prefill a part of it overlaps with prefill."""
    chunks: list[tuple[float, int]] | None = None
    """One `(end, tokens)` per prefill chunk of a traced request: seconds since the first chunk was planned, and prompt
    tokens computed by then. Set by the server that prefilled."""


class SpeculationStats(msgspec.Struct, frozen=True, kw_only=True):
    """Speculative decoding of one request on this server.

    `num_verify_steps`: steps that verified drafts of the request. `num_draft_tokens`: drafts that they verified.
    `accepted_by_position[j]`: of these steps, those that accepted at least j + 1 drafts.
    """

    num_verify_steps: int
    num_draft_tokens: int
    accepted_by_position: tuple[int, ...] = ()

    @property
    def num_accepted(self) -> int:
        """Drafts that were accepted."""
        return sum(self.accepted_by_position)


class EngineCoreOutput(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens of one request; the last output carries `finish`.

    `timing` is set whenever a part of it has become known. `prompt_logprobs` are sent in parts, before the first token.
    A part may be sent again when a retracted request is computed again. `hidden` is sent in parts too, each of them
    once, before the token that follows from it.
    """

    rid: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    hidden: HiddenStates | None = None
    finish: FinishReason | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    cached_details: CachedTokensDetails | None = None
    """None: all of them were on the device, of a server without a host tier. On decode as `cached_tokens`."""
    timing: RequestTiming | None = None
    speculation: SpeculationStats | None = None
    """Of a request whose drafts were verified, with its last output; None: none were.

    Each output has it where the API process may end the request at a stop string: it drops later outputs then.
    """


class OutputBatch(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """All outputs of one scheduler step."""

    outputs: list[EngineCoreOutput]


class StateReply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answers a `StateQuery`."""

    query_id: str
    state: EngineState


class ExtractReply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answers an `ExtractRequest`, behind all outputs of the request so far.

    `failure`: why there is no snapshot; None: there is one. `kv_tokens`: tokens whose KV the `KVPart`s carry; 0: none.
    `adapter`: digest of the LoRA adapter; empty without one.
    """

    query_id: str
    rid: str
    failure: Failure | None = None
    output_ids: list[int] = msgspec.field(default_factory=list)
    cached_tokens: int = 0
    cached_details: CachedTokensDetails | None = None
    adapter: str = ""
    kv_tokens: int = 0
    kv_pages: tuple[int, ...] = ()
    """Pages of each layout group."""


class CommandReply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answers a `Command`."""

    query_id: str
    ok: bool
    message: str
    payload: bytes = b""
    """Of `MigrateOut` and `SendPrefix`: see there. Empty for other commands."""
    failure: Failure | None = None
    """Of a refused migration, or of weights that cannot be used: why."""
    is_final: bool = False
    """Of a command to all replicas that has failed here: it has failed, whatever the others reply."""


ToApi = OutputBatch | StateReply | CommandReply | ExtractReply | KVPart | EngineReady | SchedulerHeartbeat
