"""Builds the transfer manager of a rank on a real transport. Called by `build` and `build_follower` at start-up."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import uuid
from collections.abc import Callable, Sequence

from pdserve import __version__
from pdserve.base.clock import Clock
from pdserve.base.env import transfer_failures
from pdserve.base.hosts import outward_addresses
from pdserve.base.mailbox import Mailbox, Woken
from pdserve.config import ServerConfig
from pdserve.engine.assemble import Fact
from pdserve.engine.kv_log import submission_log
from pdserve.engine.replica import ReplicaEngine
from pdserve.executor.factory import LoadedEngine
from pdserve.model.parallel import Parallel
from pdserve.ranks.consensus import Consensus
from pdserve.ranks.copies import RankCopies
from pdserve.ranks.input_log import InputLog, RankGroup
from pdserve.ranks.messages import RankReady, RolePrepared, TransferStart
from pdserve.ranks.rank_executor import SharedMetadata
from pdserve.ranks.rendezvous import transfer_host
from pdserve.scheduler.kv_checksum import WriteLine
from pdserve.scheduler.scheduler import Event
from pdserve.transfer.aux import MetadataBuffers
from pdserve.transfer.bootstrap_client import register_route
from pdserve.transfer.bootstrap_routes import ReplicaRoute
from pdserve.transfer.control import ZmqControlSocket
from pdserve.transfer.copy_workers import CopyWorkers
from pdserve.transfer.directory import HttpDirectory
from pdserve.transfer.events import ControlSocket, CopyEngine, Directory, TransferEvent
from pdserve.transfer.manager import KVArgs, KVManager, TransferTimes
from pdserve.transfer.peers import SessionTimes
from pdserve.transfer.plan import rank_memory
from pdserve.transfer.registry import open_transport
from pdserve.transfer.transport import MemoryRegion, Transport, TransportOptions
from pdserve.transfer.wire import WEIGHTS


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicaId:
    """Identifies a replica of a server. `bootstrap_port` is the server's own port, None where it has no bootstrap
    server.
    """

    server: str
    dp_rank: int = 0
    bootstrap_port: int | None = None
    rendezvous: str | None = None
    """Address at which the ranks meet; None for a single rank."""


@dataclasses.dataclass(frozen=True)
class OpenedTransfer:
    """Rank 0's transfer manager, the settings that followers make theirs with, and facts for `/get_server_info`.

    `consensus` is None for a single rank.
    """

    kv: KVManager
    start: TransferStart
    facts: dict[str, Fact]
    consensus: Consensus | None


def open_transfer(
    config: ServerConfig,
    engine: ReplicaEngine,
    mailbox: Mailbox[Event],
    num_aux: int,
    replica: ReplicaId,
    token: str,
    stack: contextlib.ExitStack,
    write_line: WriteLine | None,
    reports: Callable[[], Sequence[RankReady | RolePrepared]],
    weights: str,
) -> OpenedTransfer:
    """Open the transfer manager on real sockets and a real transport; a prefill replica registers its route.

    `weights`: see `weights_name`.

    `write_line` writes the KV log; None: no log. `reports` waits for what followers report about their own transports,
    once this rank's is open.
    """
    built, group = engine.built, engine.group
    hidden = built.draft_hidden_bytes
    aux = (
        MetadataBuffers(num_aux, draft_hidden_bytes=hidden)
        if group is None
        else SharedMetadata(num_aux, group.log, draft_hidden_bytes=hidden)
    )
    transport, copies, workers, consensus = _open_copies(
        config, engine, mailbox, aux, replica.dp_rank, write_line, stack
    )
    host = transfer_host(config)
    socket = ZmqControlSocket(host, token)
    stack.callback(socket.close)
    mailbox.attach(socket)
    stack.callback(mailbox.detach, socket)
    directory = HttpDirectory(mailbox.post, token, allowed=config.disagg.allowed_prefill)
    stack.callback(directory.close)
    others = reports()
    if consensus is not None:
        assert isinstance(copies, RankCopies)
        drain_timeout_s = max(workers.drain_timeout_s, *(each.drain_timeout_s for each in others))
        fence_drain_timeout_s = max(workers.fence_drain_timeout_s, *(each.fence_drain_timeout_s for each in others))
        copies.drive(workers, drain_timeout_s, fence_drain_timeout_s, consensus.heard)
    own = rank_memory(built.layout, built.coord, "", built.executor.buffers, outward_addresses(host))
    start = TransferStart(
        instance=uuid.uuid4().hex,
        endpoint=socket.endpoint,
        handshake=_handshake(config, built, transport, weights),
        ranks=(own, *(one.memory for one in others if one.memory is not None)),
        drain_timeout_s=copies.drain_timeout_s,
        fence_drain_timeout_s=copies.fence_drain_timeout_s,
        secret=secrets.token_hex(32),
        poll_failures=transfer_failures(),
        draft_facts=engine.draft_facts(),
    )
    kv = make_manager(config, built, start, aux, socket, copies, directory, engine.clock, token, transport)
    if replica.bootstrap_port is not None:
        _register(config, built, start, replica, replica.bootstrap_port, token)
    facts: dict[str, Fact] = {
        "transfer_backend": transport.name,
        "transfer_protocol": transport.facts.protocol,
        "control_endpoint": socket.endpoint,
        "instance": start.instance,
    }
    return OpenedTransfer(kv, start, facts, consensus)


def _open_copies(
    config: ServerConfig,
    engine: ReplicaEngine,
    mailbox: Mailbox[Event],
    aux: MetadataBuffers,
    dp_rank: int,
    write_line: WriteLine | None,
    stack: contextlib.ExitStack,
) -> tuple[Transport, CopyEngine, CopyWorkers, Consensus | None]:
    """Open this rank's transport, and the copy engine of the transfer manager, which `open_transfer` drives."""
    built, group = engine.built, engine.group
    if group is None:
        transport, workers = open_workers(config, built, mailbox.post, stack, dp_rank, write_line, [aux.buffer])
        return transport, workers, workers, None
    copies = RankCopies(0)
    transport, workers = open_workers(config, built, copies.post, stack, dp_rank, write_line, [aux.buffer])
    consensus = make_consensus(copies, group.parallel, group.log, group.followers, lambda: mailbox.post(Woken()))
    stack.callback(consensus.close)
    return transport, copies, workers, consensus


def make_consensus(
    copies: RankCopies, parallel: Parallel, log: InputLog, rank_group: RankGroup, wake: Callable[[], None]
) -> Consensus:
    """Make this rank's side of the agreement on the outcome of `copies`."""
    in_step = parallel.coord.shape.pp_size == 1
    return Consensus(copies, parallel.begin_least, log, rank_group.root_cause, wake, in_step=in_step)


def open_workers(
    config: ServerConfig,
    built: LoadedEngine,
    post: Callable[[TransferEvent], None],
    stack: contextlib.ExitStack,
    dp_rank: int,
    write_line: WriteLine | None,
    more_memory: Sequence[tuple[int, int]] = (),
) -> tuple[Transport, CopyWorkers]:
    """Open this rank's transport, register its KV pools and `more_memory` `(address, bytes)`, and start its copy
    workers. `write_line` writes the KV log; None: no log.
    """
    disagg = config.disagg
    host = transfer_host(config)
    options = TransportOptions(
        ib_device=disagg.disaggregation_ib_device,
        ib_traffic_class=disagg.disaggregation_ib_traffic_class,
        mooncake_protocol=disagg.mooncake_protocol,
    )
    backend = disagg.disaggregation_transfer_backend
    assert backend is not None, "resolve fills it in"
    transport = open_transport(backend, host, options)
    stack.callback(transport.close)
    buffers = [buffer for buffer in built.executor.buffers if buffer[1]]  # a stage may have no layer of a group
    transport.register([MemoryRegion(*buffer) for buffer in (*buffers, *more_memory)])
    submissions = submission_log(config, write_line, transport, dp_rank=dp_rank, device=str(built.device))
    workers = CopyWorkers(transport, post, disagg.disaggregation_transfer_threads, submissions)
    stack.callback(workers.close)
    return transport, workers


def make_manager(
    config: ServerConfig,
    built: LoadedEngine,
    start: TransferStart,
    aux: MetadataBuffers,
    socket: ControlSocket,
    copies: CopyEngine,
    directory: Directory,
    clock: Clock,
    token: str,
    transport: Transport,
) -> KVManager:
    """Make a transfer manager, on any rank. Ranks differ in `socket` and `directory`, and in the copies they run
    themselves.
    """
    disagg = config.disagg
    args = KVArgs(
        instance=start.instance,
        layout=built.layout,
        shape=config.parallel.shape,
        dp_size=config.parallel.dp_size,
        dp_attention=config.parallel.enable_dp_attention,
        peer_sizes=_peer_sizes(config),
        ranks=start.ranks,
        aux=aux,
        facts=start.handshake,
        draft_facts=start.draft_facts,
        token=token,
        secret=start.secret,
        poll_failures=start.poll_failures,
    )
    times = TransferTimes(
        bootstrap_timeout_s=disagg.disaggregation_bootstrap_timeout_s,
        waiting_timeout_s=disagg.disaggregation_waiting_timeout_s,
        sessions=SessionTimes(
            heartbeat_s=disagg.disaggregation_heartbeat_interval_s,
            misses=disagg.disaggregation_heartbeat_misses,
            silent_timeout_s=disagg.disaggregation_silent_peer_timeout_s,
        ),
    )
    return KVManager(args, socket, copies, directory, clock, times, fake=not transport.facts.moves_bytes)


def _handshake(config: ServerConfig, built: LoadedEngine, transport: Transport, weights: str) -> dict[str, str | int]:
    """Facts that must be equal at a peer, beside the KV layout."""
    parallel, fixed = config.parallel, config.kernels.enable_deterministic_inference
    facts: dict[str, str | int] = {
        "pdserve_version": __version__,
        "model": built.spec.digest(),
        "transfer_backend": transport.name,
        WEIGHTS: weights,
        "enable_deterministic_inference": int(fixed),
        "deterministic_arithmetic": built.arithmetic if fixed else "",
        "deterministic_tp_size": parallel.tp_size if fixed else 0,
        "deterministic_ep_size": parallel.ep_size if fixed else 0,
        "deterministic_dp_attention": parallel.num_sharing if fixed else 0,
    }
    if built.kv_dtype != built.dtype:  # otherwise the KV layout names the model's dtype
        facts["dtype"] = built.dtype
    if config.disagg.disaggregation_enable_kv_checksum:
        facts["disaggregation_enable_kv_checksum"] = 1
    return facts


def _register(
    config: ServerConfig, built: LoadedEngine, start: TransferStart, replica: ReplicaId, bootstrap_port: int, token: str
) -> None:
    """Register this replica's route at the server's own bootstrap server. The weights, which may change, are left
    out.
    """
    host, _, port = start.endpoint.rpartition(":")
    facts: dict[str, Fact] = {**start.handshake, **built.layout.fields()}
    del facts[WEIGHTS]
    route = ReplicaRoute(
        server=replica.server,
        instance=start.instance,
        dp_rank=replica.dp_rank,
        dp_size=config.parallel.dp_size,
        tp_size=config.parallel.shape.tp_size,
        pp_size=config.parallel.pp_size,
        host=host,
        port=int(port),
        page_size=config.memory.page_size,
        kv_cache_dtype=built.kv_dtype,
        model=built.spec.digest(),
        facts=facts,
    )
    own_address = "127.0.0.1" if config.serving.host == "0.0.0.0" else config.serving.host
    register_route(own_address, bootstrap_port, route, token)


def _peer_sizes(config: ServerConfig) -> dict[str, int]:
    """The parallel sizes that peers must have, where flags fix them."""
    disagg = config.disagg
    given = {
        "disaggregation_decode_tp": disagg.disaggregation_decode_tp,
        "disaggregation_decode_dp": disagg.disaggregation_decode_dp,
    }
    if disagg.disaggregation_mode == "decode":
        given["disaggregation_prefill_pp"] = disagg.disaggregation_prefill_pp
    return {field: size for field, size in given.items() if size is not None}
