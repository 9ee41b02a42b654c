"""The live sequences of a server: their limits, states and statistics.

Owned by the engine client, on its event loop.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from pdserve.base.clock import Clock, MonotonicClock, RetryAfterEstimator
from pdserve.config.groups import ServerConfig
from pdserve.config.resolve import MAX_RUNNING_REQUESTS
from pdserve.errors import RequestError
from pdserve.observe.metrics import RequestListener, RequestMetrics, RequestRecord
from pdserve.protocol.logprobs import PromptLogprobs
from pdserve.protocol.messages import (
    FAKE_BOOTSTRAP_HOST,
    EngineCoreOutput,
    GenerateRequest,
    KVPart,
    RoomAddress,
    TokenLogprob,
)
from pdserve.protocol.sampling import CoreSamplingParams
from pdserve.server.generation import Generation, GenerationUpdate, HeldUpdates
from pdserve.server.http.middleware import HttpCall
from pdserve.server.text.detokenizer import Detokenizer, NoText
from pdserve.server.text.stop_regex import Pattern, PatternThread
from pdserve.server.text.tokenizer import Tokenizer

MAX_NEW_OF_CLIENT = 16
"""Maximum new addresses in the running requests of one client, and separately in its probes. 64 look-ups run at a
time."""
MAX_SERVED = 1024
"""Number of addresses that have served which are remembered; the least recently used is dropped."""

TOO_MANY = "bootstrap_busy"
"""Error code of the refusal."""
Address = tuple[str, int | None]


@dataclasses.dataclass(frozen=True, slots=True)
class NewAddress:
    """The bootstrap address of a running sequence that was new when the sequence was submitted."""

    client: str
    address: Address


class NewPrefill:
    """Limits the new bootstrap addresses that each client may name on a decode server.

    An address is new until KV has arrived from its server. The transfer manager looks up 64 new addresses at a time,
    for all clients together. A client that names many new addresses would delay the look-ups of other clients, so each
    client may have `MAX_NEW_OF_CLIENT` in its running requests. A client's pair probes have a separate limit of the
    same size. A router's probes therefore find its prefill servers while its requests exhaust their limit.

    Call `take` for each body, `on_output` for each output, `release` at a sequence's end.
    """

    def __init__(self) -> None:
        self._served: OrderedDict[Address, None] = OrderedDict()
        self._named: dict[str, Counter[Address]] = {}

    @classmethod
    def of(cls, config: ServerConfig) -> NewPrefill | None:
        """Create the limit for a decode server without an allow list of prefill addresses; else return None."""
        if config.disagg.disaggregation_mode != "decode" or config.disagg.allowed_prefill is not None:
            return None
        return cls()

    @property
    def num_clients(self) -> int:
        """Clients whose running sequences name new addresses; a client's probes count as another client."""
        return len(self._named)

    def take(self, client: str, requests: Sequence[GenerateRequest]) -> list[NewAddress | None]:
        """Count the new addresses of one body; the entry of a sequence is None if its address is not new.

        Raises:
            RequestError: 503 when `client` would have more than `MAX_NEW_OF_CLIENT` new addresses; no count changes.
        """
        addresses = [self._new(request.room) for request in requests]
        new = {address for address in addresses if address is not None}
        if not new:
            return [None] * len(addresses)
        if any(request.probe for request in requests):
            client = f"probes of {client}"
        named = self._named.get(client, Counter())
        if len(new | named.keys()) > MAX_NEW_OF_CLIENT:
            raise RequestError(
                f"this client names more than {MAX_NEW_OF_CLIENT} bootstrap addresses that have never served this "
                "server; wait until requests to them have ended",
                field="bootstrap_host",
                status=503,
                code=TOO_MANY,
                retry_after_s=1,
            )
        named.update(address for address in addresses if address is not None)
        self._named[client] = named
        return [None if address is None else NewAddress(client, address) for address in addresses]

    def on_output(self, new: NewAddress, output: EngineCoreOutput) -> None:
        """Record an output of the sequence: the address has served if `output` reports transferred KV pages."""
        if output.timing is None or output.timing.kv_pages is None or new.address in self._served:
            return
        self._served[new.address] = None
        if len(self._served) > MAX_SERVED:
            self._served.popitem(last=False)
        for client in list(self._named):
            self._forget(client, new.address)

    def release(self, new: NewAddress) -> None:
        """Release the address of a sequence that has ended."""
        named = self._named.get(new.client, Counter())
        if named[new.address] > 1:
            named[new.address] -= 1
        else:
            self._forget(new.client, new.address)

    def _new(self, room: RoomAddress | None) -> Address | None:
        if room is None or room.host == FAKE_BOOTSTRAP_HOST:
            return None
        address = room.host, room.port
        if address in self._served:
            self._served.move_to_end(address)
            return None
        return address

    def _forget(self, client: str, address: Address) -> None:
        named = self._named.get(client)
        if named is not None:
            named.pop(address, None)
            if not named:
                del self._named[client]


KV_PART_BYTES = 8 << 20
"""Bytes of KV in one message to the scheduler."""
QUEUE_FULL = "queue_full"
"""Error code of the refusal, here and in the scheduler."""
MAX_WAITING_TOKENS = 1 << 24
"""Prompt tokens per replica: about 1.2 GB, because a token takes about 36 bytes in each of the two processes."""
BYTES_OF_TOKEN = 36
WAITING_CONTEXTS = 16
"""Full contexts per replica that may always wait."""
ROWS_AHEAD = 4
"""Sequences without an output that are allowed for each row of a replica, beyond the queue. They are computed or
transferred, or their end is not reported yet."""
MIN_AHEAD = 1024
"""Minimum of `ROWS_AHEAD` times rows: a prefill server reuses a row before the transfer of its prompt has ended."""


class WaitingRequests:
    """Bounds the sequences that were sent to the scheduler and have no output yet, by number and by prompt tokens.

    The API process counts them, because the scheduler's own bound covers only its queues. This count also covers the
    channel, the scheduler's mailbox during a long step, and the grammar gate. An aborted sequence counts until the
    scheduler has ended it, because its message may be in the channel until then.

    `most`: maximum number of waiting sequences.
    """

    def __init__(self, most: int, num_replicas: int, clock: Clock) -> None:
        self._most = most
        self._num_replicas = num_replicas
        self._retry_after = RetryAfterEstimator(clock)
        self._tokens: dict[str, int] = {}
        """Prompt tokens of each waiting sequence, by rid."""
        self._num_tokens = 0
        self._num_begun = 0
        self._num_refused = 0

    @classmethod
    def of(cls, config: ServerConfig) -> WaitingRequests | None:
        """Create the bounds for a server; None when `--max-queued-requests` disables them."""
        most_queued = config.schedule.most_queued
        if most_queued is None:
            return None
        rows = config.schedule.max_running_requests or MAX_RUNNING_REQUESTS
        num_replicas = config.parallel.dp_size
        ahead = max(ROWS_AHEAD * rows, MIN_AHEAD)
        return cls(num_replicas * (most_queued + ahead), num_replicas, MonotonicClock())

    @property
    def num_waiting(self) -> int:
        """Sequences that have no output yet."""
        return len(self._tokens)

    def check(self, requests: Sequence[GenerateRequest], capacity: int) -> None:
        """Check that the sequences of one body may wait. `capacity`: tokens of a full context.

        A server with no waiting sequence takes any body.

        Raises:
            RequestError: 503 with `retry_after_s` when too many sequences or prompt tokens wait.
        """
        if not self._tokens:
            return
        most_tokens = self._num_replicas * max(MAX_WAITING_TOKENS, WAITING_CONTEXTS * capacity)
        if len(self._tokens) + len(requests) > self._most:
            message = f"{len(self._tokens)} requests wait already"
        elif self._num_tokens + sum(map(_num_tokens, requests)) > most_tokens:
            message = f"requests of {self._num_tokens} prompt tokens wait already"
        else:
            return
        self._num_refused += len(requests)
        retry_after_s = self._retry_after.retry_after_s(self._num_begun)
        raise RequestError(message, status=503, code=QUEUE_FULL, retry_after_s=retry_after_s)

    def counters(self) -> dict[str, float]:
        """Return the counters for `/metrics`."""
        return {"requests_refused_by_api": float(self._num_refused)}

    def add(self, request: GenerateRequest) -> None:
        """Count a sequence that is sent to the scheduler."""
        self._retry_after.sample(self._num_begun)
        num_tokens = self._tokens[request.rid] = _num_tokens(request)
        self._num_tokens += num_tokens

    def discard(self, rid: str) -> None:
        """Stop counting a sequence: the scheduler has sent its first output, or its end."""
        num_tokens = self._tokens.pop(rid, None)
        if num_tokens is not None:
            self._num_tokens -= num_tokens
            self._num_begun += 1


def _num_tokens(request: GenerateRequest) -> int:
    """Return the tokens of a request, and for its input embeddings as many as have their size."""
    return len(request.given_ids) + len(request.input_embeds) // BYTES_OF_TOKEN


@dataclasses.dataclass(frozen=True, slots=True)
class RequestOrigin:
    """The HTTP call of a request, for its snapshot: endpoint, the client's body, and the fields of all events."""

    path: str
    body: Mapping[str, Any]
    head: Mapping[str, Any]


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class RequestState(RequestRecord):
    """One sequence in the API process, from its validation to its end: its message, statistics and output.

    `index` is its position in its body. `batch` is the client's id of the whole body; None: it has none.
    `EngineClient.submit` sets `generation` and `detokenizer`, which exist from then on.
    """

    index: int = 0
    batch: str | None = None
    generation: Generation = dataclasses.field(init=False, repr=False)
    detokenizer: Detokenizer = dataclasses.field(init=False, repr=False)
    held: HeldUpdates = dataclasses.field(init=False, repr=False)
    origin: RequestOrigin | None = None
    """The HTTP call, if it has one sequence and its endpoint can go on after a restore; else None."""
    kv: tuple[memoryview, ...] | None = None
    """KV bytes that are sent before the request; see `GenerateRequest.kv_tokens`. None: there are none."""
    output_logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    prompt_parts: list[PromptLogprobs] = dataclasses.field(default_factory=list)
    """Log probabilities so far, of the output with those of an earlier try; for snapshots."""
    attaches: bool = False
    """True: the request is computed here already, for another server, under the rid of `request`."""
    has_resume_state: bool = False
    """True: its stream has resume state, so that another server can send the rest of it."""
    new_address: NewAddress | None = None
    """The bootstrap address, if it was new when the sequence was submitted; else None."""

    def __post_init__(self) -> None:
        """Hold back nothing unless the request is a stream."""
        self.held = HeldUpdates(self.request.sampling.stream_interval if self.request.stream else 1)

    @property
    def weight_version(self) -> str | None:
        """Name of the version of the weights that computed the sequence; None before its first output."""
        return None if self.generation.weights is None else self.generation.weights[0]

    def kv_parts(self) -> Iterator[KVPart]:
        """Yield the messages that carry `kv`."""
        for group, data in enumerate(self.kv or ()):
            for first in range(0, len(data), KV_PART_BYTES):
                yield KVPart(rid=self.request.rid, group=group, data=bytes(data[first : first + KV_PART_BYTES]))

    @property
    def names(self) -> tuple[str, ...]:
        """The client's ids by which the sequence can be aborted: its own, and its batch's."""
        return (self.name,) if self.batch is None else (self.name, self.batch)


class Detokenizers:
    """Gives sequences their detokenizers. Without a `tokenizer` they have no text.

    `match_stops` False: stop strings are not matched.
    """

    def __init__(self, tokenizer: Tokenizer | None, *, match_stops: bool) -> None:
        self._tokenizer, self._match_stops = tokenizer, match_stops
        self._pattern_thread = PatternThread()

    async def add_to(self, states: Sequence[RequestState], client: str) -> None:
        """Create a detokenizer for each sequence. A thread compiles the stop patterns."""
        compiled: dict[str, Pattern] = {}
        if self._match_stops and (patterns := {text for state in states for text in state.request.sampling.stop_regex}):
            compiled = await self._pattern_thread.compile(patterns, client)
        for state in states:
            state.detokenizer = self._make(state.request.sampling, compiled)

    def _make(self, sampling: CoreSamplingParams, compiled: Mapping[str, Pattern]) -> Detokenizer:
        if not self._match_stops:
            sampling = msgspec.structs.replace(sampling, stop=(), stop_regex=())
        if self._tokenizer is None:
            return Detokenizer(NoText(), sampling, compiled)
        decoder = self._tokenizer.text_decoder(skip_special=sampling.skip_special_tokens)
        return Detokenizer(decoder, sampling, compiled)


class RequestStates:
    """Live sequences by `rid`, which is never reused."""

    def __init__(self) -> None:
        self._sequences: dict[str, RequestState] = {}
        self._names: collections.Counter[str] = collections.Counter()

    def __len__(self) -> int:
        return len(self._sequences)

    def add(self, sequence: RequestState) -> None:
        """Add a submitted sequence."""
        self._sequences[sequence.request.rid] = sequence
        self._names.update(sequence.names)

    def get(self, rid: str) -> RequestState | None:
        """Return the sequence; None if it has ended."""
        return self._sequences.get(rid)

    def pop(self, rid: str) -> RequestState:
        """Remove and return a sequence that has ended."""
        sequence = self._sequences.pop(rid)
        for name in sequence.names:
            self._names[name] -= 1
            if self._names[name] <= 0:
                del self._names[name]
        return sequence

    def in_use(self, names: Iterable[str]) -> str | None:
        """Return the first of `names` that belongs to a live sequence; None: all are free."""
        return next((name for name in names if name in self._names), None)

    def find(self, name: str | None) -> list[str]:
        """Return the rids whose client id, or whose batch's id, is `name`; all for None."""
        return [rid for rid, one in self._sequences.items() if name is None or name in one.names]

    def single_names(self) -> list[str]:
        """Return the client ids that belong to one sequence each."""
        return [one.name for one in self._sequences.values() if self._names[one.name] == 1]

    def has_adapter(self, name: str) -> bool:
        """Whether a live sequence has the LoRA adapter `name`."""
        return any(one.request.lora == name for one in self._sequences.values())

    def of(self, generation: Generation) -> list[str]:
        """Return the rids of the sequences of `generation`."""
        return [rid for rid, one in self._sequences.items() if one.generation is generation]


class RequestStatsRecorder:
    """Writes the statistics of records. Reports tokens to `metrics`, and start and end to `metrics` and `listeners`.

    Health probes are excluded from request statistics.
    """

    def __init__(self, metrics: RequestMetrics) -> None:
        self._metrics = metrics
        self.listeners: list[RequestListener] = []

    def started(self, record: RequestRecord, call: HttpCall | None) -> None:
        """Record the submission of a sequence by `call`. A request is `traced` if the call's span is recorded."""
        now = time.monotonic()
        record.arrived_at, record.arrived_s = time.time(), now
        if call is not None:
            record.intake_s = now - call.arrived_s
            record.arrived_at -= record.intake_s
            record.arrived_s = call.arrived_s
            record.path, record.request_id, record.traceparent = call.path, call.request_id, call.traceparent
            record.routing_key = call.routing_key
            if call.span is not None and call.span.recorded:
                record.request = msgspec.structs.replace(record.request, traced=True)
        if not record.request.probe:
            self._metrics.started(record)
            for listener in self.listeners:
                listener.started(record)

    def tokens(self, record: RequestRecord, output: EngineCoreOutput, update: GenerationUpdate) -> None:
        """Record an output, which may hold tokens and the finish.

        A request with `max_new_tokens` 0 has no tokens: its finish marks the end of prefill.
        """
        if record.request.probe:
            return
        if update.finish is not None:
            record.matched, record.failure = update.finish.matched, update.finish.failure
        now, num_tokens = time.monotonic(), len(update.token_ids)
        if record.seen_s is None:
            if num_tokens == 0 and (update.finish is None or update.finish.type == "abort"):
                return
            self._prompt_done(record, output, now)
        elif num_tokens:
            self._metrics.next_tokens(record, (now - record.seen_s) / num_tokens, num_tokens)
        if num_tokens:
            self._metrics.generated(record, num_tokens)
            record.seen_s = now
            record.completion_tokens += num_tokens
        if any(listener.keeps_output for listener in self.listeners):
            record.output_ids += update.token_ids
            record.texts.append(update.text)

    def _prompt_done(self, record: RequestRecord, output: EngineCoreOutput, now: float) -> None:
        record.seen_s = now
        record.ttft_s = now - record.arrived_s
        record.cached_tokens = output.cached_tokens
        self._metrics.first_token(record)
        self._metrics.prompt_done(record, output.prompt_tokens, output.cached_tokens, output.cached_details)

    def ended(self, record: RequestRecord, outcome: str) -> None:
        """Record the end of a sequence; the last call for it. `outcome` is its finish reason."""
        if record.request.probe:
            return
        record.outcome = outcome
        record.e2e_s = time.monotonic() - record.arrived_s
        self._metrics.ended(record)
        for listener in self.listeners:
            listener.ended(record)
