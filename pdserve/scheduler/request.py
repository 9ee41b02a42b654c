"""A request's state in the scheduler, and the order of requests: `PriorityRules` compare two, `WaitingQueue` sorts all.

The state is written by the request's role and by the planners of the role.
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
import random
from collections.abc import Callable, Iterator

import msgspec
import numpy as np

from pdserve.config.schedule_group import ScheduleConfig, SchedulePolicy
from pdserve.executor.interface import HostPages, SampledToken
from pdserve.memory.kv_memory import KVMemory
from pdserve.memory.lease import Lease
from pdserve.memory.prefix_cache import SaltedTokens
from pdserve.model.lora import LoraAdapter
from pdserve.protocol.cached_tokens import CachedTokensDetails
from pdserve.protocol.failure import Failure
from pdserve.protocol.hidden_states import HiddenParams
from pdserve.protocol.logprobs import Logprobs
from pdserve.protocol.messages import FinishReason, GenerateRequest
from pdserve.protocol.sampling import CoreSamplingParams
from pdserve.scheduler.draft_length import RequestSpeculation
from pdserve.transfer.manager import KVReceiver, KVSender

RESUME_TOKENS = 16
"""Output tokens that a request retracted once has memory for when it resumes; doubles with each retraction."""


@dataclasses.dataclass(slots=True)
class Times:
    """Timestamps of a request on this server, in seconds of the scheduler's clock; None until the event happens."""

    arrived: float
    peer_ready: float | None = None
    started: float | None = None
    prefilled: float | None = None
    published: float | None = None
    received: float | None = None
    lost: float | None = None
    """When the KV transfer failed and decode took over the prefill of the request."""
    second_token: float | None = None


@dataclasses.dataclass(slots=True, eq=False)
class Req:
    """A request's state.

    The first `computed` tokens of `prompt + output_ids` have KV in the lease's pages. `planned` counts those tokens
    once all planned steps are computed. `row` is set while the executor knows the request. `saved` holds the KV of the
    first `computed` tokens while the KV is in host memory instead.
    """

    spec: GenerateRequest
    times: Times
    output_ids: list[int] = dataclasses.field(default_factory=list)
    computed: int = 0
    planned: int = 0
    num_cached: int = 0
    """Prompt tokens found in the prefix cache when the prefill first started.

    On decode the larger of prefill's number and that of its own cache.
    """
    cached_details: CachedTokensDetails | None = None
    """Where the tokens of `num_cached` were; None: on the device, without a host tier."""
    num_retractions: int = 0
    num_hidden: int = 0
    """Position behind the last token whose hidden state was sent to the API process."""
    state_stops: tuple[int, ...] = ()
    """Positions, ascending, at which a prompt chunk ends so that the prefix cache can keep the recurrent state there.
    """
    cacheable: bool = True
    """False when a fake transfer produced the KV, which must not enter the prefix cache."""
    saved: HostPages | None = None
    lease: Lease | None = None
    aux: Lease | None = None
    row: int | None = None
    sender: KVSender | None = None
    receiver: KVReceiver | None = None
    first_token: SampledToken | None = None
    chunks: list[tuple[float, int]] | None = None
    """See `RequestTiming.chunks`."""
    speculation: RequestSpeculation | None = None
    """None until drafts are looked for."""
    adapter: LoraAdapter | None = None
    """The LoRA adapter that computes the request."""
    key_offset: int = 0
    """See `LoraAdapters.key_offset`; 0 without an adapter."""
    storage_pages: tuple[int, int] | None = None
    """First page, and the one behind the last, that were read from the store into the host tier."""
    draft_hidden: bytes = b""
    """See `AuxRecord`; on decode, until the request has a row."""
    _token_bytes: bytes = b""

    @property
    def rid(self) -> str:
        """The request id."""
        return self.spec.rid

    @property
    def is_incoming(self) -> bool:
        """True when the request comes from another decode server, which has it until its KV is here."""
        return self.spec.room is not None and self.spec.room.sender is not None

    @property
    def num_prompt(self) -> int:
        """Prompt tokens."""
        return len(self.spec.input_ids)

    @property
    def num_input_tokens(self) -> int:
        """Tokens the request came with: its prompt, and the output of an earlier try. Prefill sends their KV."""
        return len(self.spec.input_ids) + len(self.spec.prior_output_ids)

    @property
    def seq_len(self) -> int:
        """Prompt tokens and output tokens so far."""
        return len(self.spec.input_ids) + len(self.output_ids)

    @property
    def max_len(self) -> int:
        """Most tokens whose KV the request can need; the KV of its last token is never computed."""
        max_new_tokens = self.spec.sampling.max_new_tokens
        return len(self.spec.input_ids) + (max_new_tokens - 1 if max_new_tokens > 1 else 0)

    @property
    def num_reserved(self) -> int:
        """Tokens that the request gets memory for when it starts: its known tokens, and more after each retraction.

        So the number of retractions is bounded by the logarithm of the output length.
        """
        ahead = RESUME_TOKENS << self.num_retractions - 1 if self.num_retractions else 0
        return max(self.seq_len, min(self.seq_len + ahead, self.max_len))

    @property
    def logprob_params(self) -> Logprobs | None:
        """Log probabilities still to be computed; those of the prompt drop out once the first token is known."""
        logprob_params = self.spec.logprobs
        if logprob_params is None or logprob_params.prompt_from is None or not self.output_ids:
            return logprob_params
        return msgspec.structs.replace(logprob_params, prompt_from=None)

    @property
    def hidden_params(self) -> HiddenParams | None:
        """Hidden states still to be sent."""
        params = self.spec.hidden
        return None if params is None else msgspec.structs.replace(params, start=max(params.start, self.num_hidden))

    @property
    def most_cached(self) -> int:
        """Known tokens that may come from the prefix cache: those before the first token that has to be computed.

        That token is the last one, or the one at which the prompt's log probabilities, or the hidden states, begin.
        """
        logprob_params, hidden_params = self.logprob_params, self.hidden_params
        most = self.seq_len - 1
        if logprob_params is not None and logprob_params.prompt_from is not None:
            most = min(most, logprob_params.prompt_from)
        return most if hidden_params is None else min(most, hidden_params.start)

    @property
    def num_remaining(self) -> int:
        """Output tokens that may still be sampled."""
        return self.spec.sampling.max_new_tokens - len(self.output_ids)

    @property
    def adapter_digest(self) -> str:
        """Digest of the LoRA adapter; empty without one."""
        return "" if self.adapter is None else self.adapter.digest

    def token_bytes(self, num_tokens: int) -> bytes:
        """The first `num_tokens` known tokens as int32 bytes, the key of the prefix cache.

        With an adapter `key_offset` is added to each, so that no other adapter has the same key. With a cache salt they
        are `SaltedTokens`.
        """
        if len(self._token_bytes) < 4 * num_tokens:
            token_ids = np.asarray(self.spec.input_ids + self.output_ids, dtype=np.int32)
            if self.key_offset:
                token_ids = (token_ids.astype(np.int64) + self.key_offset).astype(np.uint32)
            packed, salt = token_ids.tobytes(), self.spec.cache_salt
            self._token_bytes = SaltedTokens.of(packed, salt) if salt else packed
        return self._token_bytes[: 4 * num_tokens]


def finish_for_token(req: Req, token_id: int, eos_token_ids: frozenset[int]) -> FinishReason | None:
    """Return the finish reason when `token_id`, just appended to the output, ends the request; None otherwise.

    The API process matches stop strings.
    """
    sampling, num_out = req.spec.sampling, len(req.output_ids)
    if sampling.max_new_tokens == 0:
        return FinishReason(type="length", length=0)
    if token_id in sampling.stop_token_ids and num_out >= sampling.min_new_tokens:
        return FinishReason(type="stop", matched=token_id)
    if token_id in eos_token_ids and (_grammar_ends(req) or _eos_counts(sampling, num_out)):
        return FinishReason(type="stop", matched=token_id)
    if num_out >= sampling.max_new_tokens:
        return FinishReason(type="length", length=num_out)
    return None


def _grammar_ends(req: Req) -> bool:
    """True for a request with a grammar, which admits EOS only where the grammar may end.

    While EOS is ignored, its mask admits EOS only where nothing else is allowed.
    """
    return req.spec.sampling.grammar is not None


def _eos_counts(sampling: CoreSamplingParams, num_out: int) -> bool:
    return num_out >= sampling.min_new_tokens and not sampling.ignore_eos


GRAMMAR_FAILED = Failure(
    code="grammar_failed",
    message="the grammar of this request became too complex to follow; make its schema or expression simpler",
    retryable=False,
    status=400,
)
PROCESSOR_FAILED = Failure(
    code="logit_processor_failed",
    message="the custom_logit_processor of this request failed, or its grammar did; the server's log says why",
    retryable=False,
    status=400,
)
EVICTED_CODE = "evicted_from_queue"
EVICTED = Failure(
    code=EVICTED_CODE,
    message="This request is aborted from the waiting queue by a higher priority request.",
    status=503,
)
"""The end of a waiting request whose place a more urgent one takes. The text is SGLang's."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PriorityRules:
    """How the `priority` of requests acts. By default it acts under `--schedule-policy priority` only.

    With `enabled` requests start in the order of their priority and displace less urgent ones from a full queue. With
    `preempts` they also preempt running requests whose priority is lower by more than `threshold`.
    """

    enabled: bool = False
    low_values_first: bool = False
    preempts: bool = True
    threshold: int = 10

    @classmethod
    def of(cls, schedule: ScheduleConfig) -> PriorityRules:
        """Return the rules of a server's flags."""
        return cls(
            enabled=schedule.enable_priority_scheduling,
            low_values_first=schedule.schedule_low_priority_values_first,
            preempts=not schedule.disable_priority_preemption,
            threshold=schedule.priority_scheduling_preemption_threshold,
        )

    @property
    def preemption(self) -> bool:
        """True when a waiting request may preempt a running one at all."""
        return self.enabled and self.preempts

    def rank(self, spec: GenerateRequest) -> int:
        """The priority of a request as a rank: lower is more urgent."""
        return spec.priority if self.low_values_first else -spec.priority

    def level(self, spec: GenerateRequest) -> int:
        """The rank of a request with priority scheduling; 0 for all requests without it."""
        return self.rank(spec) if self.enabled else 0

    def may_preempt(self, spec: GenerateRequest, running: GenerateRequest) -> bool:
        """True when the waiting `spec` may preempt `running`. Health probes preempt no request."""
        return self.preemption and self.level(running) - self.level(spec) > self.threshold and not spec.probe


LPM_WINDOW = 64
"""Requests at the head of the queue that are ranked again when the prefix cache has changed."""
LPM_TOKENS = 256
"""Cached tokens that weigh as much as `aging_s` seconds of waiting."""
LPM_MOST = 6
"""Upper bound on a prefix's weight, in multiples of `LPM_TOKENS`."""

RANDOM_MOST = 6
"""Most that the policy `random` shifts a request, in multiples of `aging_s`, so that no request waits forever."""

Key = tuple[int, float]
Entry = tuple[int, float, int, Req]
"""(group, rank, arrival number, request). Arrival numbers differ, so requests are never compared."""


class WaitingQueue:
    """Requests in the order of a schedule policy.

    Retracted requests come before all new ones, the oldest first. With priority scheduling they have no such advantage:
    requests of the most urgent priority come first, of equal ones the oldest. The policy `priority` then orders
    retracted requests like others, by arrival and priority.
    """

    def __init__(
        self, policy: SchedulePolicy, aging_s: float, memory: KVMemory, rules: PriorityRules | None = None
    ) -> None:
        """`rules` None: no priority scheduling."""
        self.rules = rules or PriorityRules()
        self._memory = memory
        self._policy: SchedulePolicy = policy
        self._aging_s = aging_s
        self._rank: Callable[[Req], float] = {
            "fcfs": _arrival,
            "priority": self._by_priority,
            "lpm": self._by_prefix,
            "random": self._at_random,
        }[policy]
        self._random = random.Random(0)
        self._seen_version = -1
        self._entries: list[Entry] = []
        self._place: dict[str, Entry] = {}
        self._number = 0
        self._resumed: set[str] = set()

    def for_retracted(self) -> WaitingQueue:
        """Return an empty queue for retracted requests beside this one: the oldest first, or by priority as here."""
        policy: SchedulePolicy = self._policy if self.rules.enabled else "fcfs"
        return WaitingQueue(policy, self._aging_s, self._memory, self.rules)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, req: Req) -> bool:
        return req.rid in self._place

    def __getitem__(self, index: int) -> Req:
        """Return the request at position `index`."""
        return self._entries[index][3]

    def __iter__(self) -> Iterator[Req]:
        """Iterate in order. The queue must not change during the iteration."""
        return (entry[3] for entry in self._entries)

    def add(self, req: Req, *, resumed: bool = False) -> None:
        """Add a request; `resumed` for one that was retracted."""
        assert req not in self, f"{req.rid} waits already"
        self._number += 1
        group, rank = self._key(req, resumed=resumed)
        if resumed:
            self._resumed.add(req.rid)
        self._insert((group, rank, self._number, req))

    def remove(self, req: Req) -> None:
        """Remove a request, at any position."""
        entry = self._place.pop(req.rid)
        index = bisect.bisect_left(self._entries, entry)
        assert self._entries[index] is entry
        self._resumed.discard(req.rid)
        del self._entries[index]

    @property
    def num_resumed(self) -> int:
        """Retracted requests in the queue."""
        return len(self._resumed)

    def key(self, req: Req) -> Key:
        """The place of a request in the order of priority scheduling, whether it waits or runs: lower is first."""
        assert self.rules.enabled
        return self._key(req, resumed=False)

    def refresh(self) -> None:
        """Rank the head of the queue again when the policy is `lpm` and the prefix cache has changed."""
        version = self._memory.cache_version
        if self._policy != "lpm" or version == self._seen_version:
            return
        self._seen_version = version
        head = [entry for entry in self._entries[:LPM_WINDOW] if entry[3].rid not in self._resumed]
        for entry in head:
            rank = self._rank(entry[3])
            if rank != entry[1]:
                self.remove(entry[3])
                self._insert((entry[0], rank, entry[2], entry[3]))

    def _insert(self, entry: Entry) -> None:
        bisect.insort(self._entries, entry)
        self._place[entry[3].rid] = entry

    def _key(self, req: Req, *, resumed: bool) -> Key:
        if not self.rules.enabled:
            return (0, req.times.arrived) if resumed else (1, self._rank(req))
        return (0 if self._policy == "priority" else self.rules.level(req.spec)), self._rank(req)

    def _by_priority(self, req: Req) -> float:
        return req.times.arrived + self._aging_s * self.rules.rank(req.spec)

    def _at_random(self, req: Req) -> float:
        return req.times.arrived + self._aging_s * RANDOM_MOST * self._random.random()

    def _by_prefix(self, req: Req) -> float:
        num_cached = self._memory.match_prefix(req.token_bytes(req.seq_len), req.seq_len - 1)
        return req.times.arrived - self._aging_s * min(num_cached / LPM_TOKENS, LPM_MOST)


def _arrival(req: Req) -> float:
    return req.times.arrived


class EvictionOrder:
    """Finds the least urgent queued request, which leaves a full queue first; of equal ones the newest.

    A heap: entries of requests that no longer wait are dropped lazily.
    """

    def __init__(self, rules: PriorityRules, is_queued: Callable[[Req], bool]) -> None:
        self._rules = rules
        self._is_queued = is_queued
        self._heap: list[tuple[int, int, Req]] = []
        self._number = 0

    def add(self, req: Req, num_queued: int) -> None:
        """Add an admitted request. `num_queued`: requests that wait now; it bounds the entries."""
        if len(self._heap) > 2 * num_queued + 64:
            self._heap = [entry for entry in self._heap if self._is_queued(entry[2])]
            heapq.heapify(self._heap)
        self._number += 1
        heapq.heappush(self._heap, (-self._rules.level(req.spec), -self._number, req))

    def displaced_by(self, spec: GenerateRequest) -> Req | None:
        """Return the queued request whose place `spec` takes; None when none is less urgent, or for a health probe."""
        while self._heap and not self._is_queued(self._heap[0][2]):
            heapq.heappop(self._heap)
        if not self._heap or spec.probe:
            return None
        return self._heap[0][2] if self._rules.level(spec) < -self._heap[0][0] else None
