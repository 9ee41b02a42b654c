"""What a scheduler plans for: one executor, or as many as its replica has ranks. Opened by `build` at start-up."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Sequence

from pdserve.base.parallel import ParallelShape
from pdserve.config import ServerConfig
from pdserve.errors import PdserveError, RankError
from pdserve.executor.factory import Built, build_executor, join_replica
from pdserve.executor.interface import Executor
from pdserve.model.params import fingerprint_of
from pdserve.ranks.copies import RankCopies
from pdserve.ranks.followers import Followers, meet_followers
from pdserve.ranks.leader import GroupExecutor
from pdserve.ranks.meeting import facts_of, own_host
from pdserve.ranks.orders import RankReady
from pdserve.ranks.rebalance import Rebalancer
from pdserve.ranks.rendezvous import open_store
from pdserve.transfer.events import CopyEngine, TransferEvent
from pdserve.transfer.wire import RankMemory

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class _Group:
    """The followers, and what they said when they were ready."""

    executor: GroupExecutor
    followers: Followers
    ready: tuple[RankReady, ...]


@dataclasses.dataclass(frozen=True)
class Engine:
    """`built` is this rank's own, the first; `executor` is that of all of them."""

    built: Built
    executor: Executor
    group: _Group | None

    @property
    def weights_fingerprint(self) -> str:
        """Equal for servers that loaded the same weights, however they are split."""
        samples = [self.built.executor.weight_samples()]
        return fingerprint_of(samples if self.group is None else [*samples, *(one.samples for one in self.group.ready)])

    def facts(self) -> dict[str, float]:
        """What changes while it runs, for `/get_server_info`: how the first stage's experts are balanced."""
        experts = self.built.executor.experts
        return {} if experts is None else experts.facts()

    @property
    def others(self) -> Sequence[RankMemory]:
        """Where peers write to the other ranks; none in a monolith."""
        ready = () if self.group is None else self.group.ready
        return [one.memory for one in ready if one.memory is not None]

    def close(self, error: BaseException | None = None) -> None:
        """Tell the followers to end, and why when that was not wanted. May be called again."""
        if self.group is not None:
            self.group.followers.close(None if error is None else _trouble(error))

    def copies(self, own: CopyEngine, post: Callable[[TransferEvent], None]) -> CopyEngine:
        """The copy engine of all ranks, `own` being this one's."""
        if self.group is None:
            return own
        executor = self.group.executor
        return RankCopies(own, self.group.followers, self.group.ready, lambda: executor.last_resolved, post)


def _trouble(error: BaseException) -> PdserveError:
    """What the followers are told when the leader fails."""
    return error if isinstance(error, PdserveError) else RankError(f"the leader failed: {error!r}")


def open_engine(config: ServerConfig, rendezvous: str | None, token: str, stack: contextlib.ExitStack) -> Engine:
    """Load the model; with a `rendezvous`, meet the other ranks there and wait until all have. `stack` ends it all.

    Raises:
        ConfigError, ModelError: a flag or the checkpoint will not do, here or at another rank.
        RankError: another rank did not come, or is lost.
    """
    max_rows = config.schedule.max_running_requests or 1
    if rendezvous is None:
        built = build_executor(config, max_rows=max_rows)
        stack.callback(built.executor.close)
        return Engine(built, built.executor, None)
    shape = ParallelShape(tp_size=config.parallel.tp_size, pp_size=config.parallel.pp_size)
    host = own_host(config)
    store = open_store(rendezvous, 0, shape.num_ranks)
    followers = meet_followers(shape, store, token, host=host, facts=facts_of(config))
    stack.callback(followers.close)
    try:
        parallel = join_replica(config, shape.place(0), store, host=host)
        stack.callback(parallel.close)
        built = build_executor(config, max_rows=max_rows, parallel=parallel, agree_num_pages=followers.agree)
        stack.callback(built.executor.close)
        ready = followers.wait_ready()
    except BaseException as error:
        followers.close(_trouble(error))
        raise
    stack.callback(followers.close)  # before the ranks part: who is told that all ends does not take it for a loss
    rebalancer = _rebalancer(config, built, followers)
    executor = GroupExecutor(built.executor, built.table, built.layout, followers, rebalancer)
    engine = Engine(built, executor, _Group(executor, followers, ready))
    try:
        log.info("weights of all %d ranks: %s", shape.num_ranks, engine.weights_fingerprint)
    except PdserveError as error:  # ranks have different ones
        followers.close(error)
        raise
    return engine


def _rebalancer(config: ServerConfig, built: Built, followers: Followers) -> Rebalancer | None:
    """What moves experts, where that is asked for; the leader's stage must have some."""
    experts = built.executor.experts
    if not config.parallel.enable_eplb or experts is None:
        return None
    return Rebalancer(experts, followers.order, config.parallel.eplb_rebalance_num_iterations)
