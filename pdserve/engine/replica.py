"""The engine of a replica: one executor, or one on each rank behind a single interface. `build` opens it."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Sequence

from torch._C._distributed_c10d import PrefixStore, Store

from pdserve.base.clock import Clock, MonotonicClock
from pdserve.base.startup_times import RANKS, StartupTimes
from pdserve.config import ServerConfig
from pdserve.errors import ConfigError, PdserveError, RankError
from pdserve.executor.drafter import draft_facts
from pdserve.executor.expert_balance import ExpertBalance
from pdserve.executor.factory import LoadedEngine, build_executor, join_replica
from pdserve.executor.interface import Executor
from pdserve.executor.kv_pages import KVHasher, PoolHasher
from pdserve.executor.model_loading import TORCH
from pdserve.memory.page_keys import KeyNamespace
from pdserve.model.parallel import Parallel
from pdserve.model.params import WeightSamples, fingerprint_of
from pdserve.ranks.dp_sync import DpSync, meet_leaders
from pdserve.ranks.input_log import InputLog, LeaderLog
from pdserve.ranks.messages import Begin, RankReady, TransferStart
from pdserve.ranks.pre_step import ExpertRebalancer, PreStepExecutor, RoundRebalancer, StepRebalancer
from pdserve.ranks.rank_executor import GroupHasher, RankExecutor
from pdserve.ranks.rank_reports import GroupReports, OwnReport, RankReports
from pdserve.ranks.rendezvous import LOOPBACK, close_rendezvous, facts_of, open_stores, own_host
from pdserve.ranks.worker_links import WorkerLinks, meet_followers

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class RankProcessGroup:
    """The followers of rank 0: their links, their readiness reports, and the input log they follow.

    `rebalances` is True when ranks move experts between steps. `executor`: rank 0's.
    """

    followers: WorkerLinks
    ready: tuple[RankReady, ...]
    log: LeaderLog
    parallel: Parallel
    rebalances: bool
    executor: RankExecutor

    def begin(self, transfer: TransferStart | None, storage: KeyNamespace | None) -> None:
        """Start the followers' schedulers, once rank 0 is ready. `transfer` is None in a monolith.

        `storage`: see `Begin`.
        """
        begin = Begin(now=self.log.now(), rebalances=self.rebalances, transfer=transfer, storage=storage)
        self.followers.broadcast(begin)


@dataclasses.dataclass
class _Met:
    """The ranks connected so far: the followers, and the leaders of the replicas in the same DP-attention group."""

    followers: WorkerLinks | None = None
    dp_sync: DpSync | None = None

    def close(self, error: BaseException | None = None) -> None:
        """End all links; with `error`, send the reason. May be called again."""
        trouble = None if error is None else _trouble(error)
        if self.followers is not None:
            self.followers.close(trouble)
        if self.dp_sync is not None:
            self.dp_sync.close(trouble)


@dataclasses.dataclass
class ReplicaEngine:
    """The executors of a replica.

    `built` is rank 0's own part. `executor` computes in step with all ranks of `group`, which is None for a single
    rank. `dp_sync` is set where replicas compute together (DP attention). `samples` are the weight samples of all
    ranks that compute together.
    """

    built: LoadedEngine
    executor: Executor
    group: RankProcessGroup | None
    dp_sync: DpSync | None = None
    samples: Sequence[WeightSamples] | None = None
    startup: StartupTimes = dataclasses.field(default_factory=StartupTimes)
    """Written until the scheduler takes requests."""
    draft_samples: Sequence[WeightSamples] | None = None
    """Samples of the followers' drafters; None: those that they reported at start-up."""

    digest: str | None = None
    """Digest of the weights, see `PreparedWeights`; None: those of the start."""

    def change_weights(
        self, samples: Sequence[WeightSamples], draft_samples: Sequence[WeightSamples], digest: str
    ) -> None:
        """Take samples of all ranks and of followers' drafters, and the digest, of weights that all ranks have now."""
        self.samples, self.draft_samples, self.digest = tuple(samples), tuple(draft_samples), digest

    @property
    def weights_fingerprint(self) -> str:
        """Equal for servers that loaded the same weights, however they are split.

        Raises:
            ModelError: ranks loaded different weights.
        """
        return fingerprint_of(self.samples or [self.built.executor.weight_samples()])

    def draft_facts(self) -> dict[str, str | int]:
        """Return `draft_facts` of the model that drafts; empty without one.

        Raises:
            ModelError: ranks loaded different weights.
        """
        drafter, ready = self.built.drafter, () if self.group is None else self.group.ready
        others = [one.draft_samples for one in ready] if self.draft_samples is None else self.draft_samples
        return {} if drafter is None else draft_facts(drafter, others)

    def hasher(self) -> KVHasher:
        """Return the hasher of the KV pages of all ranks."""
        own = PoolHasher(self.built.executor.pools, self.built.layout, self.built.executor.coord)
        return own if self.group is None else GroupHasher(own, self.group.followers, self.group.log)

    def reports(self) -> RankReports:
        """Return what gathers answers of all ranks."""
        return OwnReport() if self.group is None else GroupReports(self.group.followers, self.group.log)

    @property
    def clock(self) -> Clock:
        """The clock of the scheduler, shared by all ranks."""
        return MonotonicClock() if self.group is None else self.group.log

    def facts(self) -> dict[str, float]:
        """Facts for `/get_server_info` and `/metrics`: start-up times, and rank 0's memory and expert balance."""
        own = self.built.executor
        graph_s, graph_bytes = (0.0, 0) if own.graphs is None else (own.graphs.seconds, own.graphs.num_bytes)
        memory: dict[str, float] = {
            "weight_bytes": own.weight_bytes,
            "kv_pool_bytes": sum(size for _, size in own.buffers),
            "graph_s": graph_s,
            "graph_bytes": graph_bytes,
        }
        return {**self.startup.facts(), **memory, **({} if own.experts is None else own.experts.facts())}

    def close(self, error: BaseException | None = None) -> None:
        """Stop the other ranks; with `error`, send the reason. May be called again."""
        _Met(None if self.group is None else self.group.followers, self.dp_sync).close(error)


def _trouble(error: BaseException) -> PdserveError:
    """The error that followers are sent when rank 0 fails."""
    return error if isinstance(error, PdserveError) else RankError(f"rank 0 failed: {error!r}")


def open_engine(
    config: ServerConfig,
    rendezvous: str | None,
    token: str,
    stack: contextlib.ExitStack,
    *,
    dp_rank: int = 0,
    startup: StartupTimes | None = None,
) -> ReplicaEngine:
    """Load the model; with a `rendezvous`, meet the other ranks there and wait until all have loaded. `stack` closes it
    all.

    With DP attention all replicas meet there, and this one is `dp_rank`. `startup` records how long each part takes.

    Raises:
        ConfigError, ModelError: a flag or the checkpoint is not usable, on this rank or another.
        RankError: another rank did not arrive, or is lost.
    """
    max_rows = config.schedule.max_running_requests or 1
    startup = startup or StartupTimes()
    if rendezvous is None:
        built = build_executor(config, max_rows=max_rows, startup=startup)
        stack.callback(built.executor.close)
        return ReplicaEngine(built, built.executor, None, startup=startup)
    parallel_config, host = config.parallel, own_host(config)
    shape = parallel_config.shape
    store, own_store = open_stores(rendezvous, parallel_config, shape.coord(0), dp_rank)
    met = _Met()
    try:
        if parallel_config.num_sharing > 1:
            met.dp_sync = _meet_leaders(config, dp_rank, store, token)
            stack.callback(met.dp_sync.close)
        if shape.num_ranks > 1:
            met.followers = meet_followers(shape, own_store, token, host=host, facts=facts_of(config))
            stack.callback(met.followers.close)
        with startup.part(RANKS):
            parallel = join_replica(config, shape.coord(0), store, host=host, dp_rank=dp_rank)
        stack.callback(parallel.close)
        agree = None if met.followers is None else met.followers.agree
        built = build_executor(config, max_rows=max_rows, parallel=parallel, agree=agree, startup=startup)
        stack.callback(built.executor.close)
        stack.callback(met.close)  # before the process groups close: a stopped rank does not report a lost peer
        with startup.part(RANKS):  # waits for ranks that load longer
            engine = dataclasses.replace(_join(config, built, parallel, met), startup=startup)
        if built.device.type == "cpu":  # NCCL may connect to the store again
            close_rendezvous(store)
        log.info("weights of all ranks: %s", engine.weights_fingerprint)
    except BaseException as error:
        met.close(error)
        raise
    return engine


def _meet_leaders(config: ServerConfig, dp_rank: int, store: Store, token: str) -> DpSync:
    """Connect the leaders (rank 0) of all replicas, which all run on the first host."""
    num_replicas = config.parallel.num_sharing
    leaders = PrefixStore("leaders", store)
    return meet_leaders(num_replicas, dp_rank, leaders, token, host=LOOPBACK, facts=facts_of(config))


def _join(config: ServerConfig, built: LoadedEngine, parallel: Parallel, met: _Met) -> ReplicaEngine:
    """Wait for all ranks, and combine their executors."""
    own = built.executor
    executor: Executor = own
    samples: list[WeightSamples] = [own.weight_samples()]
    group = None
    dp_sync, followers = met.dp_sync, met.followers
    root_cause = dp_sync.root_cause if followers is None and dp_sync is not None else None
    moves = config.parallel.enable_eplb and own.experts is not None
    if followers is not None:
        ready = followers.wait_ready()
        check_rank_facts(built, ready)
        samples += [one.samples for one in ready]
        input_log = LeaderLog(MonotonicClock(), followers.broadcast)
        adapter_of = None if built.loras is None else built.loras.fingerprint
        rank_executor = RankExecutor(
            own, built.table, built.layout, built.coord, followers, input_log, adapter_of=adapter_of
        )
        group = RankProcessGroup(followers, ready, input_log, parallel, moves, rank_executor)
        executor = rank_executor
        root_cause = followers.root_cause
    if moves and root_cause is not None:
        log = None if group is None else group.log
        executor = PreStepExecutor(executor, make_rebalancer(config, own.experts, log).before_step, root_cause)
    if dp_sync is not None:
        samples += dp_sync.share_samples(samples)
        executor = PreStepExecutor(executor, dp_sync.enter, dp_sync.root_cause)
    return ReplicaEngine(built, executor, group, dp_sync, tuple(samples))


def rank_facts(built: LoadedEngine) -> dict[str, str]:
    """Facts that must be equal on all ranks and that follow from each host, not from flags."""
    return {
        "model": built.spec.digest(),
        "eos_token_ids": str(sorted(built.spec.eos_token_ids)),
        "context_length": str(built.context_length),
        "layout": built.layout.fingerprint(),
        "cpu_kernels": "torch" if built.arithmetic == TORCH else "native",
    }


def check_rank_facts(built: LoadedEngine, ready: Sequence[RankReady]) -> None:
    """Compare the facts of all ranks.

    Raises:
        ConfigError: a host has another model, or lacks the CPU kernels that another host has.
    """
    for rank, one in enumerate(ready, 1):
        for field, ours in rank_facts(built).items():
            if one.facts[field] != ours:
                message = f"rank {rank} has {field} {one.facts[field]}, rank 0 has {ours}: their hosts differ"
                raise ConfigError(message, field=field)


def make_rebalancer(config: ServerConfig, experts: ExpertBalance | None, log: InputLog | None) -> ExpertRebalancer:
    """Make the rebalancer of a rank whose stage has `experts`; `log` is None where the replica is one rank."""
    every = config.parallel.eplb_rebalance_num_iterations
    if config.parallel.num_sharing > 1:
        assert experts is not None, "replicas that share experts have no pipeline stages"
        return RoundRebalancer(experts, every)
    assert log is not None, "whole experts lie on several ranks"
    return StepRebalancer(experts, log, every)
