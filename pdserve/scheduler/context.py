"""State shared by all roles: memory, executor, outbox and clock; and how requests take and release rows and pages."""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Callable, Iterable

from pdserve.base.clock import Clock
from pdserve.errors import ModelError, RequestError
from pdserve.executor.interface import BatchPlan, BatchRow, Executor, HostPages, SampledToken
from pdserve.executor.loras import LoraAdapters
from pdserve.memory.kv_memory import KVMemory
from pdserve.memory.lease import GroupLease, Lease
from pdserve.memory.tiers.host_pool import HostPool
from pdserve.protocol.failure import Failure
from pdserve.protocol.messages import (
    FinishReason,
    LoadLora,
    UnloadLora,
)
from pdserve.scheduler.host_tier import HostTier, WritePolicy
from pdserve.scheduler.outbox import Outbox
from pdserve.scheduler.request import Req, finish_for_token
from pdserve.scheduler.retracted_kv import RetractedKV
from pdserve.scheduler.speculation import Speculation
from pdserve.scheduler.storage_tier import StorageTier


def validate_fits(context: SchedulerContext, num_tokens: int) -> None:
    """Reject a request that could never run, even with all memory free.

    Raises:
        RequestError: status 400.
    """
    memory = context.memory
    if memory.groups.is_used and not memory.groups.could_ever_fit(num_tokens):
        raise RequestError(
            f"prompt and max_new_tokens are {num_tokens} tokens, which need more window pages or state slots than the "
            "pools have",
            field="max_new_tokens",
        )
    if memory.num_pages(num_tokens) > memory.pages.num_total:
        raise RequestError(
            f"prompt and max_new_tokens need {num_tokens} tokens of KV memory, the pool has {memory.max_tokens}",
            field="max_new_tokens",
        )
    if memory.num_pages(num_tokens) > memory.table.max_pages_per_row:
        longest = memory.layout.tokens_in(memory.table.max_pages_per_row)
        raise RequestError(
            f"prompt and max_new_tokens are {num_tokens} tokens, a request can have {longest}", field="max_new_tokens"
        )


MAX_FAILURE_CODES = 64


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """Limits of a step, and the memory kept for running requests.

    `chunk_tokens` None: prompts are not cut, and a step takes whole prompts of up to `prefill_tokens` together.
    `mixed_chunk_tokens` None: a step with decode rows takes as many prompt tokens as one without. `saturation_tokens`:
    prompt tokens that keep the processor at its peak, see `BatchSplitter`; None: steps are not split. `offload_bytes`
    0: the KV of retracted requests is computed again.
    """

    chunk_tokens: int | None
    mixed_chunk_tokens: int | None = None
    saturation_tokens: int | None = None
    prefill_tokens: int = 16384
    reserved_decode_tokens: int = 512
    conservativeness: float = 1.0
    init_new_token_ratio: float = 0.7
    """See `NewTokenRatio`."""
    clip_tokens: int = 4096
    """Most remaining output tokens a request is charged for; few requests use up a larger `max_new_tokens`."""
    offload_bytes: int = 0
    prealloc_timeout_s: float = 300.0
    """Seconds that decode lets a request wait for its session and memory."""
    waiting_timeout_s: float | None = None
    """Seconds after which a request that has not started ends; None: no limit."""
    running_timeout_s: float | None = None
    """Seconds after which a request that has started ends; None: no limit."""
    layer_groups: int = 0
    """Layer groups in which prefill sends a page; 0: whole pages after the step."""
    eos_token_ids: frozenset[int] = frozenset()
    state_grid: int = 0
    """Multiples of this number are where the prefix cache keeps recurrent states, and where prompts of models with
    states are cut; whole pages. A step that takes less than two grid lengths of prompts also cuts them elsewhere. 0: no
    model with states.
    """
    imports_kv: bool = True
    """True where this process has the KV of all layers and heads, so that restored requests can bring theirs."""
    num_stages: int = 1
    """Pipeline stages. Each stage computes another step, so a request is in one step at a time."""

    @property
    def has_timeouts(self) -> bool:
        """True when requests may end because they wait or run for too long."""
        return self.waiting_timeout_s is not None or self.running_timeout_s is not None

    @property
    def step_tokens(self) -> int:
        """Prompt tokens of a full step, see `PrefillBudget`."""
        return self.prefill_tokens if self.chunk_tokens is None else self.chunk_tokens

    @property
    def mixed_step_tokens(self) -> int:
        """Prompt tokens of a step beside decode rows."""
        mixed = None if self.chunk_tokens is None else self.mixed_chunk_tokens
        return self.step_tokens if mixed is None else mixed


@dataclasses.dataclass(frozen=True, slots=True)
class _DeferredFree:
    """Resources that a request has released, and the newest step that may still use them."""

    step: int
    row: int | None
    leases: tuple[Lease, ...]
    window: tuple[GroupLease, list[int]] | None = None
    """Window pages that fell behind the window of a running request."""


class SchedulerContext:
    """The part of a scheduler that does not depend on the role.

    Resources released while a step is under way become free only when that step is resolved. Until then the step may
    still write KV into them.
    """

    def __init__(
        self,
        memory: KVMemory,
        executor: Executor,
        outbox: Outbox,
        clock: Clock,
        limits: StepLimits,
        speculation: Speculation | None = None,
        loras: LoraAdapters | None = None,
        host: HostPool | None = None,
        write_policy: WritePolicy = "write_through",
        wake: Callable[[], None] | None = None,
    ) -> None:
        """`speculation` None: no row has drafts. `loras` None: the model takes no LoRA adapters. `host`: slots of the
        host tier; None: there is no tier. `write_policy`: when pages are saved there. `wake`: see `HostTier`.
        """
        self.memory = memory
        self.speculation = speculation
        self.executor = executor
        self.outbox = outbox
        self.clock = clock
        self.limits = limits
        self._loras = loras
        self.counters: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.tier: HostTier | None = None
        """The host tier of the prefix cache; None without one."""
        if host is not None:
            more = {} if wake is None else {"wake": wake}
            self.tier = HostTier(memory, host, executor, self.counters, clock.now, write_policy, **more)
        self.retracted_kv = RetractedKV(
            memory, executor, self.counters, lambda: self.limits.offload_bytes, host, lambda: self.limits.imports_kv
        )
        self._launched = self._resolved = 0
        self._deferred_frees: deque[_DeferredFree] = deque()

    @property
    def storage(self) -> StorageTier | None:
        """The store below the host tier; None without one."""
        return None if self.tier is None else self.tier.storage

    def look_up(self, req: Req) -> None:
        """Look up the prompt of a new request in the store, if there is one.

        Not that of a request of another server, which brings its KV.
        """
        if self.storage is not None and not req.is_incoming:
            self.storage.admit(req)

    def clear_storage(self) -> tuple[bool, str]:
        """Remove all objects of the store, in the background; returns whether there is one, and a message."""
        return (False, "there is no store") if self.storage is None else (True, self.storage.clear())

    def flush_tier(self) -> None:
        """Drop what the host tier has, but for what copies use; the store keeps its objects."""
        if self.tier is not None:
            self.tier.flush()

    # ------------------------------------------------------------------ steps under way

    def launched(self, step: int) -> None:
        """Record that step `step` is under way."""
        self._launched = step

    def resolved(self, step: int) -> None:
        """Free the resources that no step after `step` can use: all steps up to `step` have ended."""
        self._resolved = step
        while self._deferred_frees and self._deferred_frees[0].step <= step:
            self._free(self._deferred_frees.popleft())

    @property
    def no_step_in_flight(self) -> bool:
        """True while no step is under way."""
        return self._launched == self._resolved

    def has_ended(self, step: int) -> bool:
        """True when step `step` has ended, so that what was released before it was launched is free."""
        return self._resolved >= step

    @property
    def newest_step(self) -> int:
        """The step that was launched last; 0 before the first one."""
        return self._launched

    # ------------------------------------------------------------------ LoRA adapters

    def give_adapter(self, req: Req, name: str) -> None:
        """Give a request the adapter `name`. Raises RequestError when it is not loaded."""
        loras = self._require_loras()
        req.adapter = loras.find(name)
        req.key_offset = loras.key_offset(req.adapter)

    def adapter_digest(self, name: str) -> str:
        """Return the digest of the adapter `name`; empty when it is not loaded."""
        loras = self._require_loras()
        return loras.find(name).digest if name in loras.names else ""

    def prepare_adapter(self, name: str, path: str) -> None:
        """Begin to read an adapter, which a `LoadLora` installs."""
        if self._loras is not None:
            self._loras.prepare(name, path)

    def change_adapters(self, command: LoadLora | UnloadLora) -> tuple[bool, str]:
        """Load or unload an adapter; returns whether it succeeded, and a message."""
        try:
            loras = self._require_loras()
            if isinstance(command, LoadLora):
                adapter = loras.load(command.name, command.path)
                return True, f"the LoRA adapter {command.name!r} of rank {adapter.rank} is loaded"
            loras.unload(command.name)
        except (ModelError, RequestError) as error:
            return False, str(error)
        return True, f"the LoRA adapter {command.name!r} is unloaded"

    def _require_loras(self) -> LoraAdapters:
        if self._loras is None:
            raise RequestError("this server takes no LoRA adapters; start it with --enable-lora", field="lora_path")
        return self._loras

    # ------------------------------------------------------------------ rows and pages of a request

    def assign_row(self, req: Req) -> bool:
        """Give `req`, which has a lease, a row; False when no row is free."""
        assert req.lease is not None and req.row is None
        row = self.memory.open_row(req.lease)
        if row is None:
            return False
        req.row = row
        tokens = req.spec.input_ids + req.output_ids
        hidden, req.draft_hidden = req.draft_hidden, b""
        logprobs, states = req.logprob_params, req.hidden_params
        spec = req.spec
        self.executor.open_row(
            row, tokens, req.num_prompt, spec.sampling, logprobs, hidden, states, spec.input_embeds
        )  # fmt: skip
        if req.adapter is not None:
            self._require_loras().open_row(row, req.adapter)
        return True

    def grow(self, req: Req, num_tokens: int) -> bool:
        """Extend the lease and page-table row of `req` to `num_tokens` tokens; False when pages are short."""
        lease, row = req.lease, req.row
        assert lease is not None and row is not None
        before = len(lease.pages)
        if not self.memory.grow(lease, num_tokens):
            return False
        if len(lease.pages) > before:
            self.memory.table.extend(row, before, lease.pages[before:])
        return True

    def cover_window(self, req: Req, start: int, end: int) -> None:
        """Give `req` the window pages of a step that computes its tokens `[start, end)`.

        Those behind the window become free once no step under way reads them.
        """
        lease = req.lease
        assert lease is not None
        if lease.groups is None or self.memory.layout.window == 0:
            return
        released = self.memory.cover_window(lease, req.row, start, end)
        if released:
            self._free_or_defer(_DeferredFree(self._launched, None, (), (lease.groups, released)))

    def begin_decode(self, req: Req) -> None:
        """Lower the window pages that are committed to `req`, whose prompt is complete."""
        if req.lease is not None and req.lease.groups is not None:
            self.memory.groups.begin_decode(req.lease.groups, req.max_len)

    def cache(self, req: Req, *, ending: bool = False) -> None:
        """Insert the computed pages of `req` into the prefix cache. `ending`: the request releases the pages next."""
        if req.lease is not None and req.cacheable and not req.spec.probe:
            self.memory.cache(req.lease, req.token_bytes(req.computed), req.spec.priority, ending=ending)
            if self.tier is not None:
                self.tier.cached(req)

    def release_row(self, req: Req) -> None:
        """Release the row of the request; it keeps its pages."""
        if req.row is not None:
            self._free_or_defer(_DeferredFree(self._launched, req.row, ()))
            req.row = None

    def release(self, req: Req) -> None:
        """Release the request's row, and its `request` hold on pages and aux slot. Transfers may hold pages longer."""
        self.cache(req, ending=True)
        self.leave_device(req)
        self.retracted_kv.forget(req)
        if self.tier is not None:
            self.tier.left(req)

    def retract(self, req: Req) -> None:
        """Retract a running request: its KV is copied to host memory, or is computed again when the request resumes.

        No step may be under way.
        """
        if not self._save(req):
            self.cache(req, ending=True)
            req.computed = 0
        req.planned = req.computed
        self.leave_device(req)

    def append(self, req: Req, token: SampledToken) -> FinishReason | None:
        """Append an output token; returns the finish reason when it is the last one, None otherwise."""
        req.output_ids.append(token.token_id)
        self.counters["generation_tokens"] += not req.spec.probe
        return finish_for_token(req, token.token_id, self.limits.eos_token_ids)

    def count_failure(self, req: Req, failure: Failure) -> None:
        """Count that `req` ends with `failure`. Peers may send any code, so at most `MAX_FAILURE_CODES` are counted
        apart.
        """
        if req.spec.probe:
            return
        known = failure.code in self.failures or len(self.failures) < MAX_FAILURE_CODES
        self.failures[failure.code if known else "other"] += 1

    def restore(self, req: Req) -> None:
        """Copy the saved KV into the request's lease. No step may be under way."""
        assert self.no_step_in_flight
        self.cover_window(req, req.computed, req.computed)
        self.retracted_kv.restore(req)

    def copy_out(self, req: Req) -> HostPages:
        """Return a copy of the request's computed KV in host memory. No step may be under way."""
        assert req.lease is not None and self.no_step_in_flight
        self.cover_window(req, req.computed, req.computed)
        return self.executor.offload(self.memory.pages_by_group(req.lease, req.computed))

    def take_saved(self, req: Req, saved: HostPages, num_tokens: int) -> None:
        """Give a new request the KV of its first `num_tokens` tokens, in host memory, as if it had been retracted."""
        req.saved = saved
        req.computed = req.planned = num_tokens
        self.retracted_kv.num_bytes += saved.num_bytes

    # ------------------------------------------------------------------ inside

    def _save(self, req: Req) -> bool:
        """Copy the computed KV to host memory; False when offload is off or its memory is full."""
        assert req.lease is not None and self.no_step_in_flight
        self.cover_window(req, req.computed, req.computed)
        return self.retracted_kv.save(req)

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of host memory that retracted requests have."""
        return self.retracted_kv.num_bytes

    def leave_device(self, req: Req) -> None:
        """Release the request's row, and its `request` hold on pages and aux slot, without caching the pages."""
        leases = tuple(lease for lease in (req.lease, req.aux) if lease is not None)
        if leases or req.row is not None:
            self._free_or_defer(_DeferredFree(self._launched, req.row, leases))
        req.lease = req.aux = req.row = None

    def _free_or_defer(self, resources: _DeferredFree) -> None:
        if self.no_step_in_flight:
            self._free(resources)
        else:
            self._deferred_frees.append(resources)

    def _free(self, resources: _DeferredFree) -> None:
        if resources.row is not None:
            self.executor.close_row(resources.row)
            self.memory.table.close(resources.row)
        for lease in resources.leases:
            lease.drop("request")
        if resources.window is not None:
            self.memory.groups.give_back(*resources.window)


def group_leases(reqs: Iterable[Req]) -> list[GroupLease]:
    """Return the window pages and slots of `reqs`."""
    return [req.lease.groups for req in reqs if req.lease is not None and req.lease.groups is not None]


def plan_of(step: int, rows: list[BatchRow], num_proposals: int | None = None) -> BatchPlan | None:
    """Return a plan of `rows`, or None when there are no rows."""
    return BatchPlan(step, tuple(rows), num_proposals) if rows else None
