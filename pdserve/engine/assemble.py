"""Builds a scheduler from memory, executor and transfer manager, in the same way on every rank.

Called by `build` and `build_follower` at start-up.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Mapping

from pdserve.base.clock import Clock
from pdserve.config import ServerConfig
from pdserve.engine.build_tier import make_host_pool
from pdserve.executor.factory import LoadedEngine
from pdserve.executor.interface import Executor
from pdserve.executor.kv_pages import KVHasher
from pdserve.memory.cache_recorder import CacheRecorder
from pdserve.memory.kv_memory import KVMemory
from pdserve.memory.layout import PageSpace
from pdserve.memory.prefault import MOST_BYTES_AHEAD, TOKENS_AHEAD, Prefault
from pdserve.protocol.messages import ToApi
from pdserve.ranks.pre_step import IdleBatches
from pdserve.scheduler.context import SchedulerContext, StepLimits
from pdserve.scheduler.draft_length import AMX_COST, CPU_COST, CUDA_COST
from pdserve.scheduler.engine_memory import EngineMemory
from pdserve.scheduler.kv_checksum import KVChecksum, WriteLine
from pdserve.scheduler.loop_times import Heartbeat
from pdserve.scheduler.outbox import Outbox
from pdserve.scheduler.request import PriorityRules, WaitingQueue
from pdserve.scheduler.role_switcher import OpenedRole, RoleSwitcher
from pdserve.scheduler.roles.base import SchedulerRole
from pdserve.scheduler.roles.decode import DecodeRole
from pdserve.scheduler.roles.monolith import MonolithRole
from pdserve.scheduler.roles.optimistic import OptimisticLimits
from pdserve.scheduler.roles.prefill import PrefillRole
from pdserve.scheduler.scheduler import InputSource, Scheduler
from pdserve.scheduler.speculation import NgramDrafter, Speculation
from pdserve.scheduler.state_report import LoadReporter
from pdserve.scheduler.step_log import DecodeStepLog
from pdserve.scheduler.weights_update import WeightsUpdater
from pdserve.transfer.manager import KVManager

log = logging.getLogger(__name__)

SATURATION_TOKENS = 128
"""Rows that saturate a matrix product on CPU: the time grows linearly beyond them."""
SATURATION_TOKENS_OF_TILES = 256
"""The same with AMX, where reading the weights takes longer than multiplying fewer rows."""
TILED = "amx bfloat16"
"""`LoadedEngine.arithmetic` of bfloat16 products with AMX tiles."""
STATE_GRID_TOKENS = 64
"""Kernels compute recurrent layers in chunks of 64 tokens at absolute positions."""
Fact = str | int | float | bool | None


def make_memory(
    config: ServerConfig, built: LoadedEngine, stack: contextlib.ExitStack, recorder: CacheRecorder | None = None
) -> KVMemory:
    """Make the KV memory of this replica: pages, rows and aux slots. `stack` ends the thread that commits memory.

    `recorder` gets the changes of the prefix cache; None: they are not recorded.
    """
    num_rows = built.table.num_rows
    commit: Prefault | None = None
    if built.device.type == "cpu":
        held = built.layout.of_rank(built.coord)
        num_ahead = min(built.layout.pages_for(TOKENS_AHEAD), MOST_BYTES_AHEAD // max(1, held.page_bytes))
        buffers = zip(held.groups, built.executor.buffers, strict=True)
        of_tokens = [buffer for group, buffer in buffers if group.space is PageSpace.TOKENS and group.layers]
        if of_tokens:  # a stage may have no layer of these groups
            commit = built.device_memory.commit = Prefault(of_tokens, built.num_pages, num_ahead, built.executor)
            stack.callback(commit.close)
    return KVMemory(
        built.layout,
        built.num_pages,
        built.table,
        num_aux=num_aux_slots(config, num_rows),
        on_take=None if commit is None else commit.used,
        prefix_cache=_caches_prefixes(config, built),
        eviction=config.memory.radix_eviction_policy,
        group_sizes=built.group_sizes,
        recorder=recorder,
    )


def num_aux_slots(config: ServerConfig, num_rows: int) -> int:
    """Return the number of aux slots that the role of `config` needs."""
    return 0 if config.disagg.disaggregation_mode == "null" else 2 * num_rows


def make_kv_checksum(
    config: ServerConfig, built: LoadedEngine, hasher: KVHasher, facts: Mapping[str, Fact], write: WriteLine | None
) -> KVChecksum | None:
    """Make the `KVChecksum` of a role; None when neither a KV log nor KV checksums are enabled.

    `write` receives the log lines; None: no log.
    """
    if not (config.observe.log_kv_target is not None or config.disagg.disaggregation_enable_kv_checksum):
        return None
    layout = built.layout
    line_facts = {name: facts[name] for name in ("instance", "dp_rank", "dtype", "layout_fingerprint")}
    line_facts |= {"page_tokens": layout.page_tokens, "page_bytes": layout.page_bytes}
    verify = config.disagg.disaggregation_enable_kv_checksum
    return KVChecksum(hasher, layout, line_facts, write, verify=verify)


def make_context(
    config: ServerConfig,
    built: LoadedEngine,
    executor: Executor,
    memory: KVMemory,
    clock: Clock,
    send: Callable[[ToApi], None],
    wake: Callable[[], None] | None = None,
) -> SchedulerContext:
    """Make what the roles of a scheduler share; `fit_to_role` follows when the role changes. `wake`: see `HostTier`."""
    limits, speculation = _limits(config, built), make_speculation(config, built)
    return SchedulerContext(
        memory,
        executor,
        Outbox(send),
        clock,
        limits,
        speculation,
        built.loras,
        host=make_host_pool(config, built),
        write_policy=config.tier.hicache_write_policy,
        wake=wake,
    )


def fit_to_role(
    context: SchedulerContext, config: ServerConfig, built: LoadedEngine, recorder: CacheRecorder | None
) -> None:
    """Fit memory and limits to the role of `config`. No request is live. `recorder`: see `make_memory`."""
    context.limits = _limits(config, built)
    num_aux = num_aux_slots(config, built.table.num_rows)
    context.memory.change_role(num_aux, prefix_cache=_caches_prefixes(config, built), recorder=recorder)


def make_role(
    config: ServerConfig,
    context: SchedulerContext,
    kv: KVManager | None,
    kv_checksum: KVChecksum | None,
    step_log: DecodeStepLog | None = None,
) -> SchedulerRole:
    """Make the role of the configured mode. `kv` is None in a monolith.

    `step_log` None: decode steps are not logged.
    """
    schedule, rules = config.schedule, PriorityRules.of(config.schedule)
    waiting = WaitingQueue(schedule.schedule_policy, schedule.schedule_aging_s, context.memory, rules)
    if kv is None:
        return MonolithRole(context, waiting, step_log)
    if config.disagg.disaggregation_mode == "prefill":
        optimistic = OptimisticLimits(
            attempts=config.pairing.optimistic_prefill_attempts,
            memory_fraction=config.pairing.optimistic_prefill_memory_fraction,
        )
        return PrefillRole(context, kv, waiting, kv_checksum, optimistic=optimistic)
    policy = config.disagg.disaggregation_load_failure_policy
    return DecodeRole(context, kv, waiting, kv_checksum, load_failure_policy=policy, step_log=step_log)


def make_scheduler(
    config: ServerConfig,
    context: SchedulerContext,
    opened: OpenedRole,
    input_source: InputSource,
    switcher: RoleSwitcher,
    *,
    live_facts: Callable[[], Mapping[str, str | float]] | None = None,
    idle_batches: IdleBatches | None = None,
    heartbeat: Heartbeat | None = None,
    num_gated: Callable[[], int] | None = None,
    load_reporter: LoadReporter | None = None,
    engine_memory: EngineMemory | None = None,
    weights: WeightsUpdater | None = None,
) -> Scheduler:
    """Make a scheduler that begins with the role `opened`. `live_facts`, `num_gated`: see `Scheduler`."""
    return Scheduler(
        opened.role,
        context,
        opened.kv,
        input_source,
        max_queued=config.schedule.most_queued,
        overlap=config.schedule.disable_overlap_schedule is False,
        profile_name=opened.profile_name,
        facts=opened.facts,
        live_facts=live_facts,
        idle_batches=idle_batches,
        heartbeat=heartbeat,
        num_gated=num_gated,
        rules=PriorityRules.of(config.schedule),
        switcher=switcher,
        load_reporter=load_reporter,
        engine_memory=engine_memory,
        weights=weights,
    )


def make_speculation(config: ServerConfig, built: LoadedEngine) -> Speculation | None:
    """Make the part of the scheduler that chooses drafts; None without speculative decoding."""
    speculative, drafter = config.speculative, None
    if not speculative.is_on:
        return None
    if not speculative.uses_draft_model:
        drafter = NgramDrafter(
            speculative.speculative_ngram_min_match_window_size,
            speculative.speculative_ngram_max_match_window_size,
            speculative.speculative_ngram_capacity,
        )
    cost = CUDA_COST if built.device.type == "cuda" else AMX_COST if built.arithmetic == TILED else CPU_COST
    cost = dataclasses.replace(cost, draft_pass=built.draft_pass_cost)
    return Speculation(speculative.max_drafts, drafter, cost, adaptive=speculative.speculative_adaptive)


def saturation_tokens(config: ServerConfig, built: LoadedEngine) -> int | None:
    """Prompt tokens that keep the processor at its peak, see `StepLimits`; None: steps are not split.

    With experts, each expert needs as many tokens.
    """
    given = config.schedule.prefill_saturation_tokens
    if given is not None:
        return given if given > 0 else None
    if built.device.type != "cpu":
        return None
    peak = SATURATION_TOKENS_OF_TILES if built.arithmetic == TILED else SATURATION_TOKENS
    moe = built.spec.moe
    return peak if moe is None else -(-peak * moe.num_experts // moe.top_k)


def _caches_prefixes(config: ServerConfig, built: LoadedEngine) -> bool:
    """True when the server has a prefix cache; see `ServerConfig.wants_prefix_cache`.

    A model with STATE groups whose prompts are computed in one chunk has none.
    """
    why = None
    if built.layout.has_state and not built.can_split_prompts:
        why = "the model's code cannot continue a prompt from a recurrent state"
    if config.wants_prefix_cache and why is not None:
        log.warning("the prefix cache is off: %s", why)
        return False
    return config.wants_prefix_cache


def _limits(config: ServerConfig, built: LoadedEngine) -> StepLimits:
    schedule, disagg = config.schedule, config.disagg
    chunk = schedule.chunked_prefill_size
    offload = disagg.disaggregation_decode_retraction_backup != "none"
    return StepLimits(
        chunk_tokens=None if chunk is None or chunk < 0 or not built.can_split_prompts else chunk,
        mixed_chunk_tokens=schedule.mixed_chunk_size,
        saturation_tokens=saturation_tokens(config, built),
        prefill_tokens=schedule.max_prefill_tokens,
        reserved_decode_tokens=schedule.num_reserved_decode_tokens,
        conservativeness=schedule.schedule_conservativeness,
        init_new_token_ratio=schedule.init_new_token_ratio,
        clip_tokens=schedule.clip_max_new_tokens_estimation,
        offload_bytes=int(disagg.disaggregation_decode_offload_gb * 1e9) if offload else 0,
        layer_groups=disagg.disaggregation_layerwise_groups if disagg.disaggregation_layerwise_transfer else 0,
        waiting_timeout_s=schedule.waiting_timeout_s,
        running_timeout_s=schedule.running_timeout_s,
        prealloc_timeout_s=disagg.disaggregation_bootstrap_timeout_s,
        eos_token_ids=frozenset(built.spec.eos_token_ids),
        state_grid=math.lcm(STATE_GRID_TOKENS, built.layout.page_tokens) if built.layout.has_state else 0,
        num_stages=config.parallel.pp_size,
        imports_kv=config.parallel.tp_size * config.parallel.pp_size == 1,
    )
