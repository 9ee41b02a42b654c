"""What a scheduler plans for: one executor, or as many as its replica has ranks. Opened by `build` at start-up."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Sequence

from torch._C._distributed_c10d import PrefixStore, Store

from pdserve.base.startup_times import RANKS, StartupTimes
from pdserve.config import ServerConfig
from pdserve.errors import PdserveError, RankError
from pdserve.executor.factory import Built, build_executor, join_replica
from pdserve.executor.interface import Executor
from pdserve.executor.kv_hasher import KVHasher, PoolHasher
from pdserve.model.params import WeightSamples, fingerprint_of
from pdserve.ranks.copies import RankCopies
from pdserve.ranks.digests import GroupHasher
from pdserve.ranks.followers import Followers, meet_followers
from pdserve.ranks.leader import GroupExecutor
from pdserve.ranks.lockstep import Lockstep, meet_leaders
from pdserve.ranks.meeting import LOOPBACK, facts_of, own_host
from pdserve.ranks.orders import Order, RankReady
from pdserve.ranks.rebalance import Rebalancer, RoundRebalancer
from pdserve.ranks.rendezvous import open_stores
from pdserve.ranks.rounds import RoundExecutor
from pdserve.transfer.events import CopyEngine, TransferEvent
from pdserve.transfer.wire import RankMemory

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class _Group:
    """The followers, and what they said when they were ready."""

    executor: GroupExecutor
    followers: Followers
    ready: tuple[RankReady, ...]


@dataclasses.dataclass
class _Met:
    """Whom we have met so far: the followers, and the leaders of replicas that we compute together with."""

    followers: Followers | None = None
    lockstep: Lockstep | None = None

    def close(self, error: BaseException | None = None) -> None:
        """Tell all to end, and why when that was not wanted. May be called again."""
        trouble = None if error is None else _trouble(error)
        if self.followers is not None:
            self.followers.close(trouble)
        if self.lockstep is not None:
            self.lockstep.close(trouble)


@dataclasses.dataclass(frozen=True)
class Engine:
    """`built` is this rank's own, the first; `executor` is that of all of them.

    `lockstep` is there where replicas compute together; `samples` are of the weights of all ranks that do.
    """

    built: Built
    executor: Executor
    group: _Group | None
    lockstep: Lockstep | None = None
    samples: Sequence[WeightSamples] | None = None
    startup: StartupTimes = dataclasses.field(default_factory=StartupTimes)
    """Written until the scheduler takes requests."""

    @property
    def weights_fingerprint(self) -> str:
        """Equal for servers that loaded the same weights, however they are split. Raises ModelError: ranks differ."""
        return fingerprint_of(self.samples or [self.built.executor.weight_samples()])

    def hasher(self) -> KVHasher:
        """Hashes KV pages of all ranks."""
        own = PoolHasher(self.built.executor.pools, self.built.layout, self.built.executor.place)
        return own if self.group is None else GroupHasher(own, self.group.followers)

    def facts(self) -> dict[str, float]:
        """For `/get_server_info` and `/metrics`: the start; the first rank's memory, and balance of its experts."""
        own = self.built.executor
        memory = {"weight_bytes": own.weight_bytes, "kv_pool_bytes": sum(size for _, size in own.buffers)}
        return {**self.startup.facts(), **memory, **({} if own.experts is None else own.experts.facts())}

    @property
    def others(self) -> Sequence[RankMemory]:
        """Where peers write to the other ranks; none in a monolith."""
        ready = () if self.group is None else self.group.ready
        return [one.memory for one in ready if one.memory is not None]

    def close(self, error: BaseException | None = None) -> None:
        """Tell the other ranks to end, and why when that was not wanted. May be called again."""
        _Met(None if self.group is None else self.group.followers, self.lockstep).close(error)

    def copies(self, own: CopyEngine, post: Callable[[TransferEvent], None]) -> CopyEngine:
        """The copy engine of all ranks, `own` being this one's."""
        if self.group is None:
            return own
        executor = self.group.executor
        return RankCopies(own, self.group.followers, self.group.ready, lambda: executor.last_resolved, post)


def _trouble(error: BaseException) -> PdserveError:
    """What the followers are told when the leader fails."""
    return error if isinstance(error, PdserveError) else RankError(f"the leader failed: {error!r}")


def open_engine(
    config: ServerConfig,
    rendezvous: str | None,
    token: str,
    stack: contextlib.ExitStack,
    *,
    dp_rank: int = 0,
    startup: StartupTimes | None = None,
) -> Engine:
    """Load the model; with a `rendezvous`, meet the other ranks there and wait until all have. `stack` ends it all.

    With DP attention all replicas meet there, of which this one is `dp_rank`. `startup` learns what takes how long.

    Raises:
        ConfigError, ModelError: a flag or the checkpoint will not do, here or at another rank.
        RankError: another rank did not come, or is lost.
    """
    max_rows = config.schedule.max_running_requests or 1
    startup = startup or StartupTimes()
    if rendezvous is None:
        built = build_executor(config, max_rows=max_rows, startup=startup)
        stack.callback(built.executor.close)
        return Engine(built, built.executor, None, startup=startup)
    parallel_config, host = config.parallel, own_host(config)
    shape = parallel_config.shape
    store, own_store = open_stores(rendezvous, parallel_config, shape.place(0), dp_rank)
    met = _Met()
    try:
        if parallel_config.num_sharing > 1:
            met.lockstep = _meet_leaders(config, dp_rank, store, token)
            stack.callback(met.lockstep.close)
        if shape.num_ranks > 1:
            met.followers = meet_followers(shape, own_store, token, host=host, facts=facts_of(config))
            stack.callback(met.followers.close)
        with startup.part(RANKS):
            parallel = join_replica(config, shape.place(0), store, host=host, dp_rank=dp_rank)
        stack.callback(parallel.close)
        agree = None if met.followers is None else met.followers.agree
        built = build_executor(config, max_rows=max_rows, parallel=parallel, agree_num_pages=agree, startup=startup)
        stack.callback(built.executor.close)
        stack.callback(met.close)  # before the ranks part: who is told that all ends does not take it for a loss
        with startup.part(RANKS):  # those that load longer than this one
            engine = dataclasses.replace(_join(config, built, met), startup=startup)
        log.info("weights of all ranks: %s", engine.weights_fingerprint)
    except BaseException as error:
        met.close(error)
        raise
    return engine


def _meet_leaders(config: ServerConfig, dp_rank: int, store: Store, token: str) -> Lockstep:
    """Leaders are all at the first host."""
    num_replicas = config.parallel.num_sharing
    leaders = PrefixStore("leaders", store)
    return meet_leaders(num_replicas, dp_rank, leaders, token, host=LOOPBACK, facts=facts_of(config))


def _join(config: ServerConfig, built: Built, met: _Met) -> Engine:
    """Wait for all ranks, and put their executors together."""
    executor: Executor = built.executor
    samples: list[WeightSamples] = [built.executor.weight_samples()]
    group = None
    lockstep, followers = met.lockstep, met.followers
    if followers is not None:
        ready = followers.wait_ready()
        samples += [one.samples for one in ready]
        rebalancer = None if lockstep is not None else _rebalancer(config, built, followers)
        of_all = GroupExecutor(built.executor, built.table, built.layout, followers, rebalancer)
        executor, group = of_all, _Group(of_all, followers, ready)
    if lockstep is not None:
        samples += lockstep.share_samples(samples)
        executor = RoundExecutor(executor, lockstep, _round_rebalancer(config, built, followers))
    return Engine(built, executor, group, lockstep, tuple(samples))


def _rebalancer(config: ServerConfig, built: Built, followers: Followers) -> Rebalancer | None:
    """What moves experts, where that is asked for; the leader's stage must have some."""
    experts = built.executor.experts
    if not config.parallel.enable_eplb or experts is None:
        return None
    return Rebalancer(experts, followers.order, config.parallel.eplb_rebalance_num_iterations)


def _round_rebalancer(config: ServerConfig, built: Built, followers: Followers | None) -> RoundRebalancer | None:
    """The same where replicas share the experts."""
    experts = built.executor.experts
    if not config.parallel.enable_eplb or experts is None:
        return None
    order = _nobody if followers is None else followers.order
    return RoundRebalancer(experts, order, config.parallel.eplb_rebalance_num_iterations)


def _nobody(order: Order) -> None:
    """A replica of one rank has nobody to order."""
