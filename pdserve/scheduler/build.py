"""The composition root of a scheduler process: from a configuration to a running loop."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import threading
import uuid

from pdserve import __version__
from pdserve.base.clock import Clock, MonotonicClock
from pdserve.base.mailbox import Mailbox
from pdserve.base.parallel import ParallelShape
from pdserve.config import ServerConfig
from pdserve.errors import ProtocolError
from pdserve.executor.factory import Built, build_executor
from pdserve.memory.kv_memory import KVMemory
from pdserve.protocol.channel import SchedulerChannel
from pdserve.protocol.messages import EngineReady
from pdserve.scheduler.core import Core, Limits, Outbox
from pdserve.scheduler.roles.base import Role
from pdserve.scheduler.roles.decode import DecodeRole
from pdserve.scheduler.roles.monolith import MonolithRole
from pdserve.scheduler.roles.prefill import PrefillRole
from pdserve.scheduler.scheduler import Event, Scheduler
from pdserve.scheduler.waiting import WaitingQueue
from pdserve.transfer.aux import MetadataBuffers
from pdserve.transfer.bootstrap import ReplicaRoute, register_route
from pdserve.transfer.control import ZmqControlSocket
from pdserve.transfer.directory import HttpDirectory
from pdserve.transfer.manager import KVArgs, KVManager, TransferTimes
from pdserve.transfer.registry import open_transport
from pdserve.transfer.sessions import SessionTimes
from pdserve.transfer.transport import MemoryRegion
from pdserve.transfer.workers import CopyWorkers

log = logging.getLogger(__name__)

_INGRESS_POLL_S = 0.5
Fact = str | int | float | bool | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replica:
    """Which replica of which server this is. `bootstrap_port` is the server's own, None where it has none."""

    server: str
    dp_rank: int = 0
    bootstrap_port: int | None = None
    rendezvous: str | None = None
    """Where the other ranks are met; None when there are none."""


def run_scheduler(config: ServerConfig, channel: SchedulerChannel, replica: Replica, token: str) -> None:
    """Build everything, announce readiness, and run the loop until it is shut down. `token` seals control messages.

    Raises:
        ConfigError, ModelError: what `build_executor` and transports raise.
    """
    mailbox: Mailbox[Event] = Mailbox()
    built = build_executor(config, max_rows=config.schedule.max_running_requests or 1)
    stop = threading.Event()
    with contextlib.ExitStack() as stack:
        stack.callback(built.executor.close)
        scheduler = build_scheduler(config, built, channel, mailbox, MonotonicClock(), replica, token, stack)
        ingress = threading.Thread(target=_ingress, args=(channel, mailbox, stop), name="ingress", daemon=True)
        ingress.start()
        stack.callback(ingress.join)
        stack.callback(stop.set)
        channel.send(
            EngineReady(
                model_type=built.spec.model_type,
                architectures=list(built.spec.architectures),
                vocab_size=built.spec.vocab_size,
                context_length=built.context_length,
                max_total_tokens=built.max_total_tokens,
                eos_token_ids=list(built.spec.eos_token_ids),
                facts=dict(scheduler.facts),
            )
        )
        keep_for_good()
        scheduler.run()


def keep_for_good() -> None:
    """Everything that is built by now lives as long as the process, so garbage collections need not look at it.

    Modules and weights are some hundred thousand objects: without this, now and then a step takes 15 ms longer.
    """
    gc.collect()
    gc.freeze()


def build_scheduler(
    config: ServerConfig,
    built: Built,
    channel: SchedulerChannel,
    mailbox: Mailbox[Event],
    clock: Clock,
    replica: Replica,
    token: str,
    stack: contextlib.ExitStack,
) -> Scheduler:
    """A scheduler over `built`, with its transfer manager unless the mode is null; `stack` ends threads and sockets."""
    mode = config.disagg.disaggregation_mode
    num_rows = built.table.num_rows
    memory = KVMemory(
        built.executor.layout,
        built.num_pages,
        built.table,
        num_aux=0 if mode == "null" else 2 * num_rows,
        prefix_cache=_caches_prefixes(config),
        eviction=config.memory.radix_eviction_policy,
    )
    limits = _limits(config, built)
    core = Core(memory, built.executor, Outbox(channel.send), clock, limits)
    facts: dict[str, Fact] = {
        "dtype": built.dtype,
        "device": str(built.device),
        "disaggregation_mode": mode,
        "layout_fingerprint": built.executor.layout.fingerprint(),
        "layout": str(built.executor.layout.fields()),
        "kv_token_bytes": built.executor.layout.token_bytes,
    }
    waiting = WaitingQueue(config.schedule.schedule_policy, config.schedule.schedule_aging_s, memory)
    role: Role
    kv: KVManager | None
    if mode == "null":
        role, kv = MonolithRole(core, waiting), None
    else:
        num_aux = memory.aux.num_total
        kv, more_facts = _transfer(config, built, mailbox, clock, num_aux, replica, token, stack)
        facts |= more_facts
        role = PrefillRole(core, kv, waiting) if mode == "prefill" else DecodeRole(core, kv, waiting)
    return Scheduler(
        role,
        core,
        kv,
        mailbox,
        max_queued=config.schedule.max_queued_requests,
        overlap=config.schedule.disable_overlap_schedule is False,
        facts=facts,
    )


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
    )


def _transfer(
    config: ServerConfig,
    built: Built,
    mailbox: Mailbox[Event],
    clock: Clock,
    num_aux: int,
    replica: Replica,
    token: str,
    stack: contextlib.ExitStack,
) -> tuple[KVManager, dict[str, Fact]]:
    """The transfer manager on real sockets and a real transport; a prefill replica registers its route."""
    disagg = config.disagg
    host = disagg.disaggregation_host or config.serving.host
    transport = open_transport(disagg.disaggregation_transfer_backend, host, disagg.disaggregation_ib_device)
    stack.callback(transport.close)
    aux = MetadataBuffers(num_aux)
    transport.register([MemoryRegion(*buffer) for buffer in (*built.executor.buffers, aux.buffer)])
    socket = ZmqControlSocket(host, mailbox.post)
    stack.callback(socket.close)
    workers = CopyWorkers(transport, mailbox.post, disagg.disaggregation_transfer_threads)
    stack.callback(workers.close)
    directory = HttpDirectory(mailbox.post, token)
    stack.callback(directory.close)
    instance = uuid.uuid4().hex
    handshake: dict[str, str | int] = {
        "pdserve_version": __version__,
        "model": built.spec.digest(),
        "transfer_backend": transport.name,
        "weights": built.executor.weights_fingerprint,
        "enable_deterministic_inference": int(config.kernels.enable_deterministic_inference),
    }
    args = KVArgs(
        instance=instance,
        layout=built.executor.layout,
        shape=ParallelShape(tp_size=config.parallel.tp_size, pp_size=config.parallel.pp_size),
        dp_size=config.parallel.dp_size,
        decode_sizes=_decode_sizes(config),
        buffers=built.executor.buffers,
        aux=aux,
        facts=handshake,
        token=token,
    )
    times = TransferTimes(
        bootstrap_timeout_s=disagg.disaggregation_bootstrap_timeout_s,
        waiting_timeout_s=disagg.disaggregation_waiting_timeout_s,
        sessions=SessionTimes(
            heartbeat_s=disagg.disaggregation_heartbeat_interval_s, misses=disagg.disaggregation_heartbeat_misses
        ),
    )
    kv = KVManager(args, socket, workers, directory, clock, times, fake=not transport.facts.moves_bytes)
    if replica.bootstrap_port is not None:
        route_host, _, route_port = socket.endpoint.rpartition(":")
        route = ReplicaRoute(
            server=replica.server,
            instance=instance,
            dp_rank=replica.dp_rank,
            dp_size=config.parallel.dp_size,
            tp_size=config.parallel.tp_size,
            pp_size=config.parallel.pp_size,
            host=route_host,
            port=int(route_port),
            page_size=config.memory.page_size,
            kv_cache_dtype=built.dtype,
            model=built.spec.digest(),
            facts={**handshake, **built.executor.layout.fields()},
        )
        register_route(
            "127.0.0.1" if config.serving.host == "0.0.0.0" else config.serving.host,
            replica.bootstrap_port,
            route,
            token,
        )
    facts: dict[str, Fact] = {
        "transfer_backend": transport.name,
        "transfer_protocol": transport.facts.protocol,
        "control_endpoint": socket.endpoint,
        "instance": instance,
    }
    return kv, facts


def _decode_sizes(config: ServerConfig) -> dict[str, int]:
    """The only sizes that a decode server may have, where they were given."""
    given = {
        "disaggregation_decode_tp": config.disagg.disaggregation_decode_tp,
        "disaggregation_decode_dp": config.disagg.disaggregation_decode_dp,
    }
    return {field: size for field, size in given.items() if size is not None}


def _ingress(channel: SchedulerChannel, mailbox: Mailbox[Event], stop: threading.Event) -> None:
    """Brings the API process's messages into the mailbox."""
    while not stop.is_set():
        try:
            message = channel.recv(_INGRESS_POLL_S)
        except ProtocolError as error:
            log.error("message from the API process refused: %s", error)
            continue
        if message is not None:
            mailbox.post(message)
