"""The composition root of a scheduler process: from a configuration to a running loop."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import threading
import time
from collections.abc import Callable, Mapping

from pdserve.base.clock import Clock, MonotonicClock
from pdserve.base.mailbox import Mailbox
from pdserve.base.startup_times import SCHEDULER, TRANSFER, StartupTimes, process_age_s
from pdserve.config import ServerConfig
from pdserve.errors import ProtocolError
from pdserve.executor.factory import Built
from pdserve.memory.kv_memory import KVMemory
from pdserve.observe.json_lines import JsonLines
from pdserve.protocol.channel import SchedulerChannel
from pdserve.protocol.messages import Beat, EngineReady, Shutdown
from pdserve.scheduler.build_transfer import Fact, Replica, open_transfer
from pdserve.scheduler.core import Core, Limits, Outbox
from pdserve.scheduler.engine import Engine, open_engine
from pdserve.scheduler.idle_rounds import IdleRounds, RoundCalled
from pdserve.scheduler.roles.base import Role
from pdserve.scheduler.roles.decode import DecodeRole
from pdserve.scheduler.roles.monolith import MonolithRole
from pdserve.scheduler.roles.prefill import PrefillRole
from pdserve.scheduler.scheduler import Event, Scheduler
from pdserve.scheduler.waiting import WaitingQueue
from pdserve.scheduler.witness import KVWitness
from pdserve.transfer.manager import KVManager

log = logging.getLogger(__name__)

_INGRESS_POLL_S = 0.5
BEAT_S = 1.0
"""How often the API process hears that we run."""


def run_scheduler(
    config: ServerConfig,
    channel: SchedulerChannel,
    replica: Replica,
    token: str,
    startup: StartupTimes | None = None,
) -> None:
    """Build everything, announce readiness, and run the loop until it is shut down. `token` seals control messages.

    `startup` has what the start took until now; the rest is added, and shown among the facts.

    Raises:
        ConfigError, ModelError, RankError: what `open_engine` and transports raise.
    """
    mailbox: Mailbox[Event] = Mailbox()
    stop = threading.Event()
    startup = startup or StartupTimes()
    with contextlib.ExitStack() as stack:
        engine = open_engine(config, replica.rendezvous, token, stack, dp_rank=replica.dp_rank, startup=startup)
        built = engine.built
        try:
            scheduler = build_scheduler(config, engine, channel, mailbox, MonotonicClock(), replica, token, stack)
        except BaseException as error:
            engine.close(error)
            raise
        stack.callback(engine.close)  # first of all, so that no rank copies on while we close
        beat = functools.partial(scheduler.pulse.beat, replica.dp_rank)
        ingress = threading.Thread(target=_ingress, args=(channel, mailbox, beat, stop), name="ingress", daemon=True)
        ingress.start()
        stack.callback(ingress.join)
        stack.callback(stop.set)
        startup.add(SCHEDULER, process_age_s())
        channel.send(
            EngineReady(
                model_type=built.spec.model_type,
                architectures=list(built.spec.architectures),
                vocab_size=built.spec.vocab_size,
                context_length=built.context_length,
                max_total_tokens=built.max_total_tokens,
                eos_token_ids=list(built.spec.eos_token_ids),
                facts={**scheduler.facts, **engine.facts()},
            )
        )
        keep_for_good()
        try:
            scheduler.run()
        except BaseException as error:
            engine.close(error)
            raise


def keep_for_good() -> None:
    """Everything that is built by now lives as long as the process, so garbage collections need not look at it.

    Modules and weights are some hundred thousand objects: without this, now and then a step takes 15 ms longer.
    """
    gc.collect()
    gc.freeze()


def build_scheduler(
    config: ServerConfig,
    engine: Engine,
    channel: SchedulerChannel,
    mailbox: Mailbox[Event],
    clock: Clock,
    replica: Replica,
    token: str,
    stack: contextlib.ExitStack,
) -> Scheduler:
    """A scheduler over `engine`, with a transfer manager unless the mode is null; `stack` ends threads and sockets."""
    mode = config.disagg.disaggregation_mode
    built = engine.built
    num_rows = built.table.num_rows
    memory = KVMemory(
        built.layout,
        built.num_pages,
        built.table,
        num_aux=0 if mode == "null" else 2 * num_rows,
        prefix_cache=_caches_prefixes(config),
        eviction=config.memory.radix_eviction_policy,
    )
    limits = _limits(config, built)
    core = Core(memory, engine.executor, Outbox(channel.send), clock, limits)
    facts: dict[str, Fact] = {
        "dtype": built.dtype,
        "device": str(built.device),
        "disaggregation_mode": mode,
        "dp_rank": replica.dp_rank,
        "layout_fingerprint": built.layout.fingerprint(),
        "layout": str(built.layout.fields()),
        "kv_token_bytes": built.layout.token_bytes,
    }
    waiting = WaitingQueue(config.schedule.schedule_policy, config.schedule.schedule_aging_s, memory)
    role: Role
    kv: KVManager | None
    if mode == "null":
        role, kv = MonolithRole(core, waiting), None
    else:
        num_aux = memory.aux.num_total
        with engine.startup.part(TRANSFER):
            kv, more_facts = open_transfer(config, engine, mailbox, clock, num_aux, replica, token, stack)
        facts |= more_facts
        witness = _witness(config, engine, facts, stack)
        role_class = PrefillRole if mode == "prefill" else DecodeRole
        role = role_class(core, kv, waiting, witness)
    return Scheduler(
        role,
        core,
        kv,
        mailbox,
        max_queued=config.schedule.max_queued_requests,
        overlap=config.schedule.disable_overlap_schedule is False,
        profile_name=f"{mode if mode != 'null' else 'server'}-DP-{replica.dp_rank}",
        facts=facts,
        live_facts=engine.facts,
        idle_rounds=_idle_rounds(engine, mailbox),
    )


def _witness(
    config: ServerConfig, engine: Engine, facts: Mapping[str, Fact], stack: contextlib.ExitStack
) -> KVWitness | None:
    """Who hashes the KV that is sent or arrives, where somebody wants that; `stack` ends its log."""
    target, verify = config.observe.log_kv_target, config.disagg.disaggregation_enable_kv_checksum
    if target is None and not verify:
        return None
    layout = engine.built.layout
    told = {name: facts[name] for name in ("instance", "dp_rank", "dtype", "layout_fingerprint")}
    told |= {"page_tokens": layout.page_tokens, "page_bytes": layout.token_bytes * layout.page_tokens}
    write = None
    if target is not None:
        lines = JsonLines(target, f"kv-{config.disagg.disaggregation_mode}-{facts['dp_rank']}", "log_kv_target")
        stack.callback(lines.close)
        write = lines.write
    return KVWitness(engine.hasher(), layout.page_tokens, told, write, verify=verify)


def _idle_rounds(engine: Engine, mailbox: Mailbox[Event]) -> IdleRounds | None:
    """Where replicas compute together, their calls wake the loop."""
    if engine.lockstep is None:
        return None
    engine.lockstep.wake = lambda: mailbox.post(RoundCalled())
    return IdleRounds(engine.lockstep)


def _caches_prefixes(config: ServerConfig) -> bool:
    """Prefill and monolith keep prefixes unless told not to, decode only when told to."""
    if config.disagg.disaggregation_mode == "decode":
        return config.disagg.disaggregation_decode_enable_radix_cache
    return not config.memory.disable_radix_cache


def _limits(config: ServerConfig, built: Built) -> Limits:
    schedule, disagg = config.schedule, config.disagg
    chunk = schedule.chunked_prefill_size
    offload = disagg.disaggregation_decode_enable_offload_kvcache
    return Limits(
        chunk_tokens=None if chunk is None or chunk < 0 else chunk,
        prefill_tokens=schedule.max_prefill_tokens,
        reserved_decode_tokens=schedule.num_reserved_decode_tokens,
        conservativeness=schedule.schedule_conservativeness,
        offload_bytes=int(disagg.disaggregation_decode_offload_gb * 1e9) if offload else 0,
        layer_groups=disagg.disaggregation_layerwise_groups if disagg.disaggregation_layerwise_transfer else 0,
        prealloc_timeout_s=disagg.disaggregation_bootstrap_timeout_s,
        eos_token_ids=frozenset(built.spec.eos_token_ids),
        num_stages=config.parallel.pp_size,
    )


def _ingress(
    channel: SchedulerChannel, mailbox: Mailbox[Event], beat: Callable[[], Beat], stop: threading.Event
) -> None:
    """Brings the API process's messages into the mailbox, and tells it now and then that this process runs."""
    beats_at = time.monotonic()
    while not stop.is_set():
        if time.monotonic() >= beats_at:
            channel.beat(beat())
            beats_at = time.monotonic() + BEAT_S
        try:
            message = channel.recv(_INGRESS_POLL_S)
        except ProtocolError as error:
            log.error("message from the API process refused: %s", error)
            continue
        if message is not None:
            mailbox.post(message)
        if isinstance(message, Shutdown):
            return  # nothing follows it, and whoever joins this thread need not wait
