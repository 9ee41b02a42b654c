"""The composition root of a scheduler process: from a configuration to a running loop."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping

from pdserve.base.clock import MonotonicClock
from pdserve.base.mailbox import Mailbox, Woken
from pdserve.base.process import freeze_heap
from pdserve.base.startup_times import SCHEDULER, StartupTimes, process_age_s
from pdserve.config import ServerConfig
from pdserve.engine.assemble import Fact, make_context, make_memory, make_scheduler, saturation_tokens
from pdserve.engine.build_storage import add_storage_tier, leader_port, open_storage_port, storage_namespace
from pdserve.engine.build_tier import connect_leader
from pdserve.engine.build_transfer import ReplicaId
from pdserve.engine.kv_events import key_namespace, open_kv_events, open_load_events
from pdserve.engine.replica import ReplicaEngine, open_engine
from pdserve.engine.role import LeaderRoles, OnRole, ignore_role
from pdserve.engine.weights import LeaderWeights
from pdserve.errors import ProtocolError
from pdserve.executor.memory_sizing import free_bytes
from pdserve.memory.layout import GroupKind
from pdserve.memory.page_keys import KeyNamespace
from pdserve.protocol.channel import SchedulerChannel
from pdserve.protocol.engine_state import EngineReady, SchedulerHeartbeat
from pdserve.protocol.messages import Shutdown
from pdserve.ranks.pre_step import IdleBatches, SharedDpSync
from pdserve.scheduler.engine_memory import EngineMemory
from pdserve.scheduler.input_source import GrammarGate, LeaderInputSource
from pdserve.scheduler.loop_times import Heartbeat
from pdserve.scheduler.role_switcher import RoleSwitcher
from pdserve.scheduler.scheduler import Event, InputSource, Scheduler
from pdserve.scheduler.state_report import LoadReporter
from pdserve.scheduler.weights_update import WeightsUpdater

log = logging.getLogger(__name__)

_INGRESS_POLL_S = 0.5
BEAT_S = 1.0
"""Seconds between heartbeats to the API process."""


def run_scheduler(
    config: ServerConfig,
    channel: SchedulerChannel,
    replica: ReplicaId,
    token: str,
    startup: StartupTimes | None = None,
    on_role: OnRole = ignore_role,
) -> None:
    """Build the engine, announce readiness, and run the loop until shutdown. `token` seals control messages.

    `startup` holds the start-up times so far; further parts are added and appear among the facts.

    Raises:
        ConfigError, ModelError, RankError: what `open_engine` and transports raise.
    """
    mailbox: Mailbox[Event] = Mailbox()
    stop = threading.Event()
    startup = startup or StartupTimes()
    with contextlib.ExitStack() as stack:
        engine = open_engine(config, replica.rendezvous, token, stack, dp_rank=replica.dp_rank, startup=startup)
        try:
            scheduler = build_scheduler(config, engine, channel, mailbox, replica, token, stack, on_role)
        except BaseException as error:
            engine.close(error)
            raise
        stack.callback(engine.close)  # before transports close, so that no rank copies on
        beat = functools.partial(scheduler.heartbeat.beat, replica.dp_rank)
        ingress = threading.Thread(target=_ingress, args=(channel, mailbox, beat, stop), name="ingress", daemon=True)
        ingress.start()
        stack.callback(ingress.join)
        stack.callback(stop.set)
        startup.add(SCHEDULER, process_age_s())
        startup.close()
        channel.send(_engine_ready(engine, scheduler.facts))
        freeze_heap()
        try:
            scheduler.run()
        except BaseException as error:
            engine.close(error)
            raise


def build_scheduler(
    config: ServerConfig,
    engine: ReplicaEngine,
    channel: SchedulerChannel,
    mailbox: Mailbox[Event],
    replica: ReplicaId,
    token: str,
    stack: contextlib.ExitStack,
    on_role: OnRole = ignore_role,
) -> Scheduler:
    """Make the scheduler of rank 0, with a transfer manager unless the mode is null, and start the followers'
    schedulers.

    `stack` ends threads and closes sockets.
    """
    built = engine.built

    def wake() -> None:
        mailbox.post(Woken())

    events = open_kv_events(config, engine, replica.dp_rank, stack)
    memory = make_memory(config, built, stack, None if events is None else events.recorder)
    facts: dict[str, Fact] = {
        "dtype": built.dtype,
        "device": str(built.device),
        "dp_rank": replica.dp_rank,
        "layout_fingerprint": built.layout.fingerprint(),
        "weights_fingerprint": engine.weights_fingerprint,
        "model_digest": built.spec.digest(),
        "weight_version": config.model.weight_version,
        "weights_load_format": config.model.load_format,
        "page_tokens": built.layout.page_tokens,
        "layout": str(built.layout.fields()),
        "kv_groups": ",".join(group.name for group in built.layout.groups if group.kind is not GroupKind.STAMP),
        "state_type": built.layout.state_type,
        "kv_token_bytes": built.layout.token_bytes,
        "prefill_saturation_tokens": saturation_tokens(config, built),
        "startup_available_bytes": free_bytes(built.device),
    }
    load_events = open_load_events(config, replica.dp_rank, stack)
    if load_events is not None:
        facts["load_endpoint"] = load_events.endpoint
    connect_leader(engine, wake)
    context = make_context(config, built, engine.executor, memory, engine.clock, channel.send, wake)
    if events is not None and context.tier is not None:
        context.tier.pool.record_to(events.host_recorder, memory)
    namespace = storage_namespace(config, engine)
    if namespace is not None:
        own = open_storage_port(config, built, context, wake, stack)
        add_storage_tier(config, context, leader_port(engine, own, wake), namespace)

    def announce(facts: Mapping[str, Fact]) -> None:
        channel.send(_engine_ready(engine, facts))

    def change_keys() -> KeyNamespace | None:
        """Change the keys of pages for other weights; returns the namespace of the store."""
        if roles.events is not None:
            roles.events.change_weights(key_namespace(config, engine))
        return storage_namespace(config, engine)

    roles = LeaderRoles(config, engine, mailbox, replica, token, facts, events, stack, announce)
    roles.on_role = on_role
    opened = roles.open_first(context, namespace)
    loras = built.loras
    gate = GrammarGate(mailbox, built.executor.prepare_grammar, None if loras is None else loras.prepare)
    return make_scheduler(
        config,
        context,
        opened,
        _input_source(engine, gate, roles),
        RoleSwitcher(roles, engine.clock, channel.send),
        live_facts=roles.live_facts,
        idle_batches=_idle_batches(engine, mailbox),
        heartbeat=Heartbeat(MonotonicClock()),
        num_gated=lambda: gate.num_waiting,
        load_reporter=None if load_events is None else LoadReporter(load_events.post, replica.dp_rank),
        engine_memory=EngineMemory(built.device_memory, roles, engine.reports(), engine.clock, channel.send),
        weights=WeightsUpdater(
            LeaderWeights(engine, config.model.weight_version, roles.change_weights, change_keys, replica.dp_rank),
            engine.clock,
            channel.send,
        ),
    )


def _engine_ready(engine: ReplicaEngine, facts: Mapping[str, Fact]) -> EngineReady:
    """Return the message that the engine can take requests."""
    built = engine.built
    return EngineReady(
        model_type=built.spec.model_type,
        architectures=list(built.spec.architectures),
        vocab_size=built.spec.vocab_size,
        context_length=built.context_length,
        max_total_tokens=built.max_total_tokens,
        eos_token_ids=list(built.spec.eos_token_ids),
        facts={**facts, **engine.facts()},
        hidden_size=built.spec.hidden_size,
        pooling=built.pooling,
        takes_embeds=built.takes_embeds,
    )


def _input_source(engine: ReplicaEngine, gate: GrammarGate, roles: LeaderRoles) -> InputSource:
    """Return the input of the loop: the gate, behind the shared input log where the replica has several ranks."""
    if engine.group is None:
        return gate
    source = LeaderInputSource(gate, engine.group.log, roles.consensus)
    roles.on_consensus = source.change_consensus
    return source


def _idle_batches(engine: ReplicaEngine, mailbox: Mailbox[Event]) -> IdleBatches | None:
    """Make the idle batches of a DP-attention group; a round entered by another replica wakes the loop. None without
    one.
    """
    if engine.dp_sync is None:
        return None
    engine.dp_sync.wake = lambda: mailbox.post(Woken())
    return IdleBatches(engine.dp_sync if engine.group is None else SharedDpSync(engine.dp_sync, engine.group.log))


def _ingress(
    channel: SchedulerChannel, mailbox: Mailbox[Event], beat: Callable[[], SchedulerHeartbeat], stop: threading.Event
) -> None:
    """Post the API process's messages to the mailbox, and send a heartbeat every `BEAT_S` seconds. Thread "ingress"."""
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
            return  # the last message: the thread ends at once, so that its join does not wait
