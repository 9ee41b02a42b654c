"""The composition root of a scheduler process: from a configuration to a running loop."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable

from pdserve import __version__
from pdserve.base.clock import Clock, MonotonicClock
from pdserve.base.mailbox import Mailbox
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
from pdserve.transfer.aux import MetadataBuffers
from pdserve.transfer.bootstrap import RankRoute, register_route
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


class Runtime:
    """A scheduler with the threads and sockets it stands on. `close` ends them in order."""

    def __init__(self, scheduler: Scheduler, closers: list[Callable[[], None]]) -> None:
        self.scheduler = scheduler
        self._closers = closers

    def close(self) -> None:
        """End threads and sockets."""
        for close in reversed(self._closers):
            close()


def run_scheduler(config: ServerConfig, channel: SchedulerChannel, bootstrap_port: int | None, token: str) -> None:
    """Build everything, announce readiness, and run the loop until it is shut down.

    `bootstrap_port` is the prefill server's bootstrap server, None elsewhere. `token` seals control messages.

    Raises:
        ConfigError, ModelError: what `build_executor` and transports raise.
    """
    mailbox: Mailbox[Event] = Mailbox()
    built = build_executor(config, max_rows=config.schedule.max_running_requests or 1)
    runtime = build_runtime(config, built, channel, mailbox, MonotonicClock(), bootstrap_port, token)
    stop = threading.Event()
    ingress = threading.Thread(target=_ingress, args=(channel, mailbox, stop), name="ingress", daemon=True)
    ingress.start()
    try:
        channel.send(
            EngineReady(
                model_type=built.spec.model_type,
                architectures=list(built.spec.architectures),
                vocab_size=built.spec.vocab_size,
                context_length=built.context_length,
                max_total_tokens=built.max_total_tokens,
                eos_token_ids=list(built.spec.eos_token_ids),
                facts=dict(runtime.scheduler.facts),
            )
        )
        runtime.scheduler.run()
    finally:
        stop.set()
        ingress.join()
        runtime.close()


def build_runtime(
    config: ServerConfig,
    built: Built,
    channel: SchedulerChannel,
    mailbox: Mailbox[Event],
    clock: Clock,
    bootstrap_port: int | None,
    token: str,
) -> Runtime:
    """A scheduler over `built`, with its transfer manager unless the mode is null."""
    mode = config.disagg.disaggregation_mode
    num_rows = built.table.num_rows
    memory = KVMemory(
        built.executor.layout, built.num_pages, built.table, num_aux=0 if mode == "null" else 2 * num_rows
    )
    chunk = config.schedule.chunked_prefill_size
    limits = Limits(
        chunk_tokens=None if chunk is None or chunk < 0 else chunk, eos_token_ids=frozenset(built.spec.eos_token_ids)
    )
    core = Core(memory, built.executor, Outbox(channel.send), clock, limits)
    facts: dict[str, Fact] = {
        "dtype": built.dtype,
        "device": str(built.device),
        "disaggregation_mode": mode,
        "layout_fingerprint": built.executor.layout.fingerprint(),
        "layout": str(built.executor.layout.fields()),
        "kv_token_bytes": built.executor.layout.token_bytes,
    }
    role: Role
    if mode == "null":
        return Runtime(
            Scheduler(
                MonolithRole(core), core, None, mailbox, max_queued=config.schedule.max_queued_requests, facts=facts
            ),
            [],
        )
    kv, more_facts, closers = _transfer(config, built, mailbox, clock, memory.aux.num_total, bootstrap_port, token)
    role = PrefillRole(core, kv) if mode == "prefill" else DecodeRole(core, kv)
    scheduler = Scheduler(
        role, core, kv, mailbox, max_queued=config.schedule.max_queued_requests, facts=facts | more_facts
    )
    return Runtime(scheduler, closers)


def _transfer(
    config: ServerConfig,
    built: Built,
    mailbox: Mailbox[Event],
    clock: Clock,
    num_aux: int,
    bootstrap_port: int | None,
    token: str,
) -> tuple[KVManager, dict[str, Fact], list[Callable[[], None]]]:
    """The transfer manager on real sockets and a real transport; a prefill rank registers with its bootstrap server."""
    disagg = config.disagg
    host = disagg.disaggregation_host or config.serving.host
    transport = open_transport(disagg.disaggregation_transfer_backend, host, disagg.disaggregation_ib_device)
    aux = MetadataBuffers(num_aux)
    transport.register([MemoryRegion(*buffer) for buffer in (*built.executor.buffers, aux.buffer)])
    socket = ZmqControlSocket(host, mailbox.post)
    workers = CopyWorkers(transport, mailbox.post, disagg.disaggregation_transfer_threads)
    directory = HttpDirectory(mailbox.post, token)
    instance = uuid.uuid4().hex
    handshake: dict[str, str | int] = {
        "pdserve_version": __version__,
        "model": built.spec.digest(),
        "transfer_backend": transport.name,
        "weights": built.executor.weights_fingerprint,
    }
    args = KVArgs(
        instance=instance,
        layout=built.executor.layout,
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
    if bootstrap_port is not None:
        route_host, _, route_port = socket.endpoint.rpartition(":")
        route = RankRoute(
            instance=instance,
            host=route_host,
            port=int(route_port),
            page_size=config.memory.page_size,
            kv_cache_dtype=built.dtype,
            model=built.spec.digest(),
            facts={**handshake, **built.executor.layout.fields()},
        )
        register_route(
            "127.0.0.1" if config.serving.host == "0.0.0.0" else config.serving.host, bootstrap_port, route, token
        )
    facts: dict[str, Fact] = {
        "transfer_backend": transport.name,
        "transfer_protocol": transport.facts.protocol,
        "control_endpoint": socket.endpoint,
        "instance": instance,
    }
    return kv, facts, [transport.close, workers.close, socket.close, directory.close]


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
