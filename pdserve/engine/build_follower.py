"""The process of a follower rank: its part of the model, and a scheduler with the same input as rank 0's.

    thread "ranks"   receives the messages of rank 0, and queues them
    main thread      loads, then runs the loop: the same role on the same events and the same time as on rank 0
    "kv-copy-0" ...  copy KV, in prefill and decode servers

A follower has no API process, sends nothing to peers, and looks up no addresses: rank 0 does all of that. The launcher
starts a process that calls `run_follower` for each rank but the first.
"""

from __future__ import annotations

import contextlib
import logging

from pdserve.base.parallel import RankCoord
from pdserve.base.process import die_with_parent, freeze_heap
from pdserve.base.startup_times import RANKS, StartupTimes
from pdserve.config import ServerConfig
from pdserve.engine.assemble import make_context, make_memory, make_scheduler
from pdserve.engine.build_storage import add_storage_tier, follower_port, open_storage_port
from pdserve.engine.follower_role import FollowerParts, FollowerRoles, open_parts
from pdserve.engine.replica import make_rebalancer, rank_facts
from pdserve.engine.role import OnRole, ignore_role
from pdserve.engine.weights import FollowerWeights
from pdserve.errors import RankError
from pdserve.executor.factory import LoadedEngine, build_executor, join_replica
from pdserve.executor.interface import Executor
from pdserve.model.parallel import Parallel
from pdserve.protocol.messages import ToApi
from pdserve.ranks.input_log import FollowerLog
from pdserve.ranks.messages import Begin, RankReady
from pdserve.ranks.pre_step import IdleBatches, PreStepExecutor, SharedDpSync
from pdserve.ranks.rank0_link import Rank0Link, Stopped
from pdserve.ranks.rank_copies import RankCopyEnds
from pdserve.ranks.rank_executor import RankExecutor
from pdserve.ranks.rank_reports import GroupReports
from pdserve.ranks.rendezvous import facts_of, open_stores, own_host, rank_names
from pdserve.scheduler.engine_memory import EngineMemory
from pdserve.scheduler.input_source import FollowerInputSource
from pdserve.scheduler.outbox import REQUEST_LOGGER
from pdserve.scheduler.role_switcher import RoleSwitcher
from pdserve.scheduler.scheduler import Scheduler
from pdserve.scheduler.weights_update import WeightsUpdater

log = logging.getLogger(__name__)

_LEADER_SAYS = ("pdserve.transfer.sessions", REQUEST_LOGGER)
"""Loggers whose messages are equal on all ranks; only rank 0 writes them."""


def run_follower(
    config: ServerConfig,
    coord: RankCoord,
    rendezvous: str,
    token: str,
    *,
    dp_rank: int = 0,
    parent_pid: int | None = None,
    startup: StartupTimes | None = None,
    on_role: OnRole = ignore_role,
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
            _serve(config, parallel, leader, token, dp_rank, startup, stack, on_role)
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
    on_role: OnRole,
) -> None:
    """Load, report readiness to rank 0, and run the scheduler; `stack` closes what was opened.

    Raises:
        Stopped: rank 0 has stopped the replica.
    """
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
    parts = open_parts(config, built, parallel, dp_rank)
    stack.callback(parts.stack.close)
    leader.report(
        RankReady(
            facts=rank_facts(built),
            memory=parts.memory,
            samples=built.executor.weight_samples(),
            draft_samples={} if built.drafter is None else built.drafter.weight_samples(),
            drain_timeout_s=parts.drain_timeout_s,
            fence_drain_timeout_s=parts.fence_drain_timeout_s,
        )
    )
    startup.close()
    begin = leader.wait_begin()
    for name in _LEADER_SAYS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    scheduler = _make_scheduler(config, built, leader, begin, parts, token, dp_rank, stack, on_role)
    freeze_heap()
    scheduler.run()
    leader.wait_stop()


def _make_scheduler(
    config: ServerConfig,
    built: LoadedEngine,
    leader: Rank0Link,
    begin: Begin,
    parts: FollowerParts,
    token: str,
    dp_rank: int,
    stack: contextlib.ExitStack,
    on_role: OnRole,
) -> Scheduler:
    """Make a scheduler equal to rank 0's, except for its executor, input and peers."""
    coord, shares_steps = built.coord, config.parallel.num_sharing > 1
    inputs = FollowerLog(rank_names(coord.shape)[coord.rank], begin.now, leader.next_entry)
    memory = make_memory(config, built, stack)
    executor = _executor(config, built, leader, begin, inputs)
    context = make_context(config, built, executor, memory, inputs, _say_nothing)
    if begin.storage is not None:
        own = open_storage_port(config, built, context, _do_nothing, stack)
        add_storage_tier(config, context, follower_port(own, inputs, leader.report), begin.storage)
    roles = FollowerRoles(built, leader, inputs, context, parts, token, dp_rank)
    roles.on_role = on_role
    stack.callback(roles.close)
    opened = roles.begin(begin.transfer)
    source = FollowerInputSource(inputs, roles.consensus)
    roles.on_consensus = source.change_consensus
    return make_scheduler(
        config,
        context,
        opened,
        source,
        RoleSwitcher(roles, inputs, _say_nothing),
        engine_memory=EngineMemory(built.device_memory, roles, GroupReports(leader, inputs), inputs, _say_nothing),
        idle_batches=IdleBatches(SharedDpSync(None, inputs)) if shares_steps else None,
        weights=WeightsUpdater(
            FollowerWeights(built, inputs, leader.report, dp_rank, shares_steps=shares_steps), inputs, _say_nothing
        ),
    )


def _executor(
    config: ServerConfig, built: LoadedEngine, leader: Rank0Link, begin: Begin, inputs: FollowerLog
) -> Executor:
    own = built.executor
    overlap = built.device.type == "cuda" or config.schedule.disable_overlap_schedule is False
    rank_executor = RankExecutor(
        own, built.table, built.layout, built.coord, leader, inputs, compute_at_launch=not overlap,
        adapter_of=None if built.loras is None else built.loras.fingerprint,
    )  # fmt: skip
    rank_executor.copy_ends = RankCopyEnds(inputs, leader.report)
    executor: Executor = rank_executor
    if begin.rebalances:
        rebalancer = make_rebalancer(config, own.experts, inputs)
        executor = PreStepExecutor(executor, rebalancer.before_step, leader.root_cause)
    return executor


def _do_nothing() -> None:
    """Ignore the end of a job: rank 0 decides when followers look."""


def _say_nothing(message: ToApi) -> None:
    """Discard a message for the API process: rank 0 sends it."""
