"""Servers and requests of a simulated world: sizes, options, prompts, and what a client receives."""

from __future__ import annotations

import dataclasses

import msgspec

from pdserve.config.groups import EvictionPolicy, LoadFailurePolicy
from pdserve.config.schedule_group import SchedulePolicy
from pdserve.config.tier_group import PrefetchPolicy
from pdserve.protocol.cached_tokens import CachedTokensDetails
from pdserve.protocol.hidden_states import HiddenParams, HiddenStates, salt_of_embeds
from pdserve.protocol.logprobs import Logprobs, PromptLogprobs
from pdserve.protocol.messages import EngineCoreOutput, FinishReason, GenerateRequest, RoomAddress, SpeculationStats
from pdserve.protocol.sampling import CoreSamplingParams
from pdserve.scheduler.draft_length import CPU_COST, StepCost
from pdserve.scheduler.host_tier import WritePolicy
from pdserve.scheduler.request import PriorityRules
from pdserve.scheduler.roles.optimistic import OptimisticLimits
from pdserve.scheduler.speculation import NgramDrafter, Speculation
from pdserve.sim.hash_sampling import HashDrafting


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimDrafting:
    """Speculative decoding of every server in the world: the drafters, and the numbers of drafts.

    `min_match` 0: no n-gram drafter. `chance` None: no model drafter, see `HashDrafting`. Not `adaptive`: each row gets
    all its drafts. `weights`: those of the model drafters of prefill and of decode, 0 where a server has none; a
    monolith has that of decode.
    """

    max_drafts: int
    min_match: int = 2
    capacity: int = 4096
    chance: float | None = None
    weights: tuple[int, int] = (1, 1)
    adaptive: bool = False
    cost: StepCost = CPU_COST

    def speculation(self) -> Speculation:
        """Make the part of a scheduler that chooses drafts."""
        ngram = NgramDrafter(self.min_match, 8, self.capacity) if self.min_match else None
        return Speculation(self.max_drafts, ngram, self.cost, adaptive=self.adaptive)

    def model(self, mode: str) -> HashDrafting | None:
        """Return the drafter of the executor of a server with this mode: null, prefill or decode."""
        weights = self.weights[mode != "prefill"]
        if self.chance is None or not weights:
            return None
        return HashDrafting(num_draft_tokens=self.max_drafts, chance=self.chance, weights=weights)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes and options of every server in the world."""

    page_tokens: int = 4
    num_pages: int = 24
    num_rows: int = 8
    num_aux: int = 6
    chunk_tokens: int | None = 5
    mixed_chunk_tokens: int | None = None
    saturation_tokens: int | None = None
    prefix_cache: bool = True
    decode_prefix_cache: bool = False
    eviction: EvictionPolicy = "lru"
    policy: SchedulePolicy = "fcfs"
    overlap: bool = False
    late: bool = False
    """Whether the executor computes when a step is resolved instead of when it is launched."""
    offload_pages: int = 0
    """Pages of host memory for retracted requests."""
    host_ratio: float = 0.0
    """Slots of the host tier for each page of the pool; 0: no tier."""
    write_policy: WritePolicy = "write_through"
    storage: PrefetchPolicy | None = None
    """How long prompts wait for the store below the host tier; None: there is no store."""
    model_weights: int = 0
    """Models with other numbers compute other KV and other tokens."""
    reserved_decode_tokens: int = 4
    layer_groups: int = 0
    notifies: bool = False
    """Whether the transport notifies the receiver of writes."""
    fences: bool = True
    """Whether the transport can fence a peer's writes; otherwise only the death of the peer's process ends them."""
    load_failure_policy: LoadFailurePolicy = "fail"
    optimistic: OptimisticLimits = OptimisticLimits()
    """How often prefill computes a prompt before its decode server is ready."""
    num_stages: int = 1
    """Steps in flight at once; as with a model split into this many pipeline stages."""
    num_heads: int = 1
    """KV heads of the model, which tensor ranks split."""
    kv_checksum: bool = False
    """Whether the receiver compares received KV with the sender's checksum."""
    max_queued: int | None = None
    rules: PriorityRules = dataclasses.field(default_factory=PriorityRules)
    """Of priority scheduling."""
    window: int = 0
    """Tokens of the window of a hybrid model, see `hash_layout`; 0: full attention only."""
    is_hybrid: bool = True
    """Whether a model with a window has recurrent layers too."""
    num_window_pages: int = 0
    num_slots: int = 0
    has_state: bool = False
    """Whether a model without a window has recurrent layers, see `hash_layout`."""
    state_grid_pages: int = 1
    """Pages between positions at which the prefix cache keeps states."""
    echo: float = 0.0
    """Share of the model's tokens that follow from the token before, see `HashSampler`."""
    drafting: SimDrafting | None = None
    """None: no speculative decoding."""

    @property
    def decode_step_tokens(self) -> int:
        """Most tokens of a decode row: the last token and its drafts."""
        return 1 if self.drafting is None else 1 + self.drafting.max_drafts


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One request of the workload."""

    tokens: tuple[int, ...]
    max_new_tokens: int
    priority: int = 0
    logprobs: Logprobs | None = None
    hidden: HiddenParams | None = None
    embeds: bytes = b""
    """See `GenerateRequest.input_embeds`."""
    prior: tuple[int, ...] = ()
    """Output tokens of an earlier try."""
    sampling: CoreSamplingParams = CoreSamplingParams(temperature=0.0)
    """All but `max_new_tokens`."""
    salt: str = ""
    """Cache salt; empty without one."""


@dataclasses.dataclass(slots=True)
class RequestHalf:
    """Output of one server for one request, as its client has received it."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    finish: FinishReason | None = None
    picked: list[list[float]] = dataclasses.field(default_factory=list)
    prompt_parts: list[PromptLogprobs] = dataclasses.field(default_factory=list)
    hidden_parts: list[HiddenStates] = dataclasses.field(default_factory=list)
    speculation: SpeculationStats | None = None
    cached_tokens: int = 0
    cached_details: CachedTokensDetails | None = None

    def add(self, output: EngineCoreOutput) -> None:
        """Add the output of a step, and check that it may follow what came before."""
        assert self.finish is None, f"{output.rid}: output after its end"
        assert output.cached_tokens <= output.prompt_tokens, output
        assert output.cached_details is None or output.cached_details.num_tokens == output.cached_tokens, output
        self.tokens += output.token_ids
        self.picked += [line.picked for line in output.logprobs or ()]
        if output.prompt_logprobs is not None:
            assert not self.tokens, f"{output.rid}: of the prompt after its first token"
            self.prompt_parts.append(output.prompt_logprobs)
        if output.hidden is not None:
            self.hidden_parts.append(output.hidden)
        self.finish, self.speculation = output.finish, output.speculation
        self.cached_tokens, self.cached_details = output.cached_tokens, output.cached_details


def request(rid: str, prompt: Prompt, room: RoomAddress | None) -> GenerateRequest:
    """Make a request for one server. `room` is None for an aggregated server."""
    sampling = msgspec.structs.replace(prompt.sampling, max_new_tokens=prompt.max_new_tokens)
    return GenerateRequest(
        rid=rid,
        input_ids=list(prompt.tokens),
        sampling=sampling,
        logprobs=prompt.logprobs,
        hidden=prompt.hidden,
        room=room,
        priority=prompt.priority,
        cache_salt=salt_of_embeds(prompt.salt, prompt.embeds) if prompt.embeds else prompt.salt,
        input_embeds=prompt.embeds,
        prior_output_ids=list(prompt.prior),
    )
