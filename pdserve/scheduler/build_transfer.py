"""The transfer manager of a server on real sockets and a real transport. Called by `build` at start-up."""

from __future__ import annotations

import contextlib
import dataclasses
import uuid

from pdserve import __version__
from pdserve.base.clock import Clock
from pdserve.base.mailbox import Mailbox
from pdserve.config import ServerConfig
from pdserve.ranks.meeting import transfer_host
from pdserve.scheduler.engine import Engine
from pdserve.scheduler.scheduler import Event
from pdserve.transfer.aux import MetadataBuffers
from pdserve.transfer.bootstrap import ReplicaRoute, register_route
from pdserve.transfer.control import ZmqControlSocket
from pdserve.transfer.directory import HttpDirectory
from pdserve.transfer.manager import KVArgs, KVManager, TransferTimes
from pdserve.transfer.registry import open_transport
from pdserve.transfer.sessions import SessionTimes
from pdserve.transfer.transport import MemoryRegion
from pdserve.transfer.workers import CopyWorkers

Fact = str | int | float | bool | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replica:
    """Which replica of which server this is. `bootstrap_port` is the server's own, None where it has none."""

    server: str
    dp_rank: int = 0
    bootstrap_port: int | None = None
    rendezvous: str | None = None
    """Where the other ranks are met; None when there are none."""


def open_transfer(
    config: ServerConfig,
    engine: Engine,
    mailbox: Mailbox[Event],
    clock: Clock,
    num_aux: int,
    replica: Replica,
    token: str,
    stack: contextlib.ExitStack,
) -> tuple[KVManager, dict[str, Fact]]:
    """The transfer manager on real sockets and a real transport; a prefill replica registers its route."""
    disagg, built = config.disagg, engine.built
    host = transfer_host(config)
    transport = open_transport(disagg.disaggregation_transfer_backend, host, disagg.disaggregation_ib_device)
    stack.callback(transport.close)
    aux = MetadataBuffers(num_aux)
    transport.register([MemoryRegion(*buffer) for buffer in (*built.executor.buffers, aux.buffer)])
    socket = ZmqControlSocket(host)
    stack.callback(socket.close)
    mailbox.attach(socket)
    workers = CopyWorkers(transport, mailbox.post, disagg.disaggregation_transfer_threads)
    stack.callback(workers.close)
    copies = engine.copies(workers, mailbox.post)
    directory = HttpDirectory(mailbox.post, token)
    stack.callback(directory.close)
    instance = uuid.uuid4().hex
    handshake: dict[str, str | int] = {
        "pdserve_version": __version__,
        "model": built.spec.digest(),
        "transfer_backend": transport.name,
        "weights": engine.weights_fingerprint,
        "enable_deterministic_inference": int(config.kernels.enable_deterministic_inference),
        "deterministic_tp_size": config.parallel.tp_size if config.kernels.enable_deterministic_inference else 0,
        "deterministic_ep_size": config.parallel.ep_size if config.kernels.enable_deterministic_inference else 0,
        "deterministic_dp_attention": config.parallel.num_sharing
        if config.kernels.enable_deterministic_inference
        else 0,
    }
    if disagg.disaggregation_enable_kv_checksum:
        handshake["disaggregation_enable_kv_checksum"] = 1
    args = KVArgs(
        instance=instance,
        layout=built.layout,
        shape=config.parallel.shape,
        dp_size=config.parallel.dp_size,
        dp_attention=config.parallel.enable_dp_attention,
        decode_sizes=_decode_sizes(config),
        buffers=built.executor.buffers,
        others=engine.others,
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
    kv = KVManager(args, socket, copies, directory, clock, times, fake=not transport.facts.moves_bytes)
    if replica.bootstrap_port is not None:
        route_host, _, route_port = socket.endpoint.rpartition(":")
        route = ReplicaRoute(
            server=replica.server,
            instance=instance,
            dp_rank=replica.dp_rank,
            dp_size=config.parallel.dp_size,
            tp_size=config.parallel.shape.tp_size,
            pp_size=config.parallel.pp_size,
            host=route_host,
            port=int(route_port),
            page_size=config.memory.page_size,
            kv_cache_dtype=built.dtype,
            model=built.spec.digest(),
            facts={**handshake, **built.layout.fields()},
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
