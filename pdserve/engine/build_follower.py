"""The process of a follower rank: its part of the model, and a scheduler with the same input as rank 0's.

    thread "ranks"   receives the messages of rank 0, and queues them
    main thread      loads, then runs the loop: the same role on the same events and the same time as on rank 0
    "kv-copy-0" ...  copy KV, in prefill and decode servers

A follower has no API process, sends nothing to peers, and looks up no addresses: rank 0 does all of that. The launcher
starts a process that calls `run_follower` for each rank but the first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging

from pdserve.base.hosts import outward_addresses
from pdserve.base.parallel import RankCoord
from pdserve.base.process import die_with_parent, freeze_heap
from pdserve.base.startup_times import RANKS, StartupTimes
from pdserve.config import ServerConfig
from pdserve.engine.assemble import Fact, make_kv_checksum, make_memory, make_scheduler
from pdserve.engine.build_transfer import make_consensus, make_manager, open_workers
from pdserve.engine.kv_log import open_kv_log
from pdserve.engine.replica import make_rebalancer, rank_facts
from pdserve.errors import RankError
from pdserve.executor.factory import LoadedEngine, build_executor, join_replica
from pdserve.executor.interface import Executor
from pdserve.executor.kv_pages import PoolHasher
from pdserve.model.parallel import Parallel
from pdserve.protocol.messages import ToApi
from pdserve.ranks.copies import RankCopies
from pdserve.ranks.input_log import FollowerLog
from pdserve.ranks.messages import Begin, RankReady
from pdserve.ranks.pre_step import IdleBatches, PreStepExecutor, SharedDpSync
from pdserve.ranks.rank0_link import Rank0Link, Stopped
from pdserve.ranks.rank_executor import GroupHasher, RankExecutor, SharedMetadata
from pdserve.ranks.rendezvous import facts_of, open_stores, own_host, rank_names, transfer_host
from pdserve.scheduler.context import REQUEST_LOGGER
from pdserve.scheduler.input_source import FollowerInputSource
from pdserve.scheduler.scheduler import Scheduler
from pdserve.transfer.copy_workers import CopyWorkers
from pdserve.transfer.events import Address
from pdserve.transfer.plan import rank_memory
from pdserve.transfer.transport import Transport

log = logging.getLogger(__name__)

_LEADER_SAYS = ("pdserve.transfer.sessions", REQUEST_LOGGER)
"""Loggers whose messages are equal on all ranks; only rank 0 writes them."""


class SilentSocket:
    """Implements `ControlSocket` without sending: rank 0, at `endpoint`, talks to peers."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint

    def send(self, endpoint: str, frame: bytes) -> None:
        """See `ControlSocket`."""

    def forget(self, endpoint: str) -> None:
        """See `ControlSocket`."""


class NoDirectory:
    """Implements `Directory` without look-ups: rank 0 looks addresses up and shares the results."""

    def find(self, address: Address) -> None:
        """See `Directory`."""

    def probe(self, instance: str, endpoint: str) -> None:
        """See `Directory`."""


@dataclasses.dataclass(frozen=True)
class _Copying:
    """The objects this rank copies KV with."""

    transport: Transport
    workers: CopyWorkers
    copies: RankCopies
    parallel: Parallel


def run_follower(
    config: ServerConfig,
    coord: RankCoord,
    rendezvous: str,
    token: str,
    *,
    dp_rank: int = 0,
    parent_pid: int | None = None,
    startup: StartupTimes | None = None,
) -> None:
    """Run rank `coord` of replica `dp_rank` until rank 0 stops it. Main thread of its own process.

    The process ends with status 1 when rank 0 or another rank is lost, with 2 when one of them refuses to start. With
    `parent_pid` it is also killed when that process dies. `startup` records how long each part takes, and is closed
    when this rank is ready.

    Raises:
        ConfigError, ModelError: what `build_executor` and transports raise; rank 0 has been notified.
        RankError: rank 0 did not arrive, has another token, or has reached different plans.
    """
    if parent_pid is not None:
        die_with_parent(parent_pid)
    startup = startup or StartupTimes()
    store, own_store = open_stores(rendezvous, config.parallel, coord, dp_rank)
    leader = Rank0Link(coord, own_store, token, host=own_host(config), facts=facts_of(config))
    with contextlib.ExitStack() as stack:
        stack.callback(leader.close)
        try:
            with startup.part(RANKS):
                parallel = join_replica(config, coord, store, host=own_host(config), dp_rank=dp_rank)
            stack.callback(parallel.close)
            _serve(config, parallel, leader, token, dp_rank, startup, stack)
        except Stopped:
            log.info("rank %d was stopped by rank 0", coord.rank)
        except Exception as error:
            leader.report_failure(error)
            raise
        leader.set_close_timeout(RankError(f"rank {coord.rank} has not ended within its time limit"))


def _serve(
    config: ServerConfig,
    parallel: Parallel,
    leader: Rank0Link,
    token: str,
    dp_rank: int,
    startup: StartupTimes,
    stack: contextlib.ExitStack,
) -> None:
    """Load, report readiness to rank 0, and run the scheduler; `stack` closes what was opened.

    Raises:
        Stopped: rank 0 has stopped the replica.
    """
    coord = parallel.coord
    max_rows = config.schedule.max_running_requests or 1
    built = build_executor(
        config,
        max_rows=max_rows,
        parallel=parallel,
        agree=leader.agree,
        returns_results=False,
        startup=startup,
    )
    stack.callback(built.executor.close)
    copying = memory = None
    copies = RankCopies(coord.rank)
    if config.disagg.disaggregation_mode != "null":
        write_line = open_kv_log(config, dp_rank, coord.rank, stack)
        transport, workers = open_workers(config, built, copies.post, stack, dp_rank, write_line)
        copying = _Copying(transport, workers, copies, parallel)
        hosts = outward_addresses(transfer_host(config))
        memory = rank_memory(built.layout, coord, "", built.executor.buffers, hosts)
    leader.report(
        RankReady(
            facts=rank_facts(built),
            memory=memory,
            samples=built.executor.weight_samples(),
            draft_samples={} if built.drafter is None else built.drafter.weight_samples(),
            drain_timeout_s=0.0 if copying is None else copying.workers.drain_timeout_s,
            fence_drain_timeout_s=0.0 if copying is None else copying.workers.fence_drain_timeout_s,
        )
    )
    startup.close()
    begin = leader.wait_begin()
    for name in _LEADER_SAYS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    scheduler = _make_scheduler(config, built, leader, begin, copying, token, dp_rank, stack)
    freeze_heap()
    scheduler.run()
    leader.wait_stop()


def _make_scheduler(
    config: ServerConfig,
    built: LoadedEngine,
    leader: Rank0Link,
    begin: Begin,
    copying: _Copying | None,
    token: str,
    dp_rank: int,
    stack: contextlib.ExitStack,
) -> Scheduler:
    """Make a scheduler equal to rank 0's, except for its executor, input and peers."""
    coord = built.coord
    inputs = FollowerLog(rank_names(coord.shape)[coord.rank], begin.now, leader.next_entry)
    memory = make_memory(config, built, stack)
    kv, kv_checksum, consensus = None, None, None
    if copying is not None:
        start, copies = begin.transfer, copying.copies
        assert start is not None, "rank 0 sent no transfer settings"
        copies.drive(copying.workers, start.drain_timeout_s, start.fence_drain_timeout_s, leader.report)
        consensus = make_consensus(copies, copying.parallel, inputs, leader, _do_nothing)
        stack.callback(consensus.close)
        aux = SharedMetadata(memory.aux.num_total, inputs, draft_hidden_bytes=built.draft_hidden_bytes)
        socket = SilentSocket(start.endpoint)
        kv = make_manager(config, built, start, aux, socket, copies, NoDirectory(), inputs, token, copying.transport)
        hasher = GroupHasher(PoolHasher(built.executor.pools, built.layout, coord), leader, inputs)
        facts: dict[str, Fact] = {
            "instance": start.instance,
            "dp_rank": dp_rank,
            "dtype": built.dtype,
            "layout_fingerprint": built.layout.fingerprint(),
        }
        kv_checksum = make_kv_checksum(config, built, hasher, facts, None)
    return make_scheduler(
        config,
        built,
        _executor(config, built, leader, begin, inputs),
        memory,
        kv,
        kv_checksum,
        FollowerInputSource(inputs, consensus),
        inputs,
        _say_nothing,
        profile_name=f"DP-{dp_rank}-RANK-{coord.rank}",
        idle_batches=IdleBatches(SharedDpSync(None, inputs)) if config.parallel.num_sharing > 1 else None,
    )


def _executor(
    config: ServerConfig, built: LoadedEngine, leader: Rank0Link, begin: Begin, inputs: FollowerLog
) -> Executor:
    own = built.executor
    overlap = built.device.type == "cuda" or config.schedule.disable_overlap_schedule is False
    executor: Executor = RankExecutor(
        own, built.table, built.layout, built.coord, leader, inputs, compute_at_launch=not overlap,
        adapter_of=None if built.loras is None else built.loras.fingerprint,
    )  # fmt: skip
    if begin.rebalances:
        rebalancer = make_rebalancer(config, own.experts, inputs)
        executor = PreStepExecutor(executor, rebalancer.before_step, leader.root_cause)
    return executor


def _say_nothing(message: ToApi) -> None:
    """Discard a message for the API process: rank 0 sends it."""


def _do_nothing() -> None:
    """Ignore the wake-up: rank 0 decides when followers take a reduction."""
