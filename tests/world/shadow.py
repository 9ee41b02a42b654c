"""Worlds in which every server has a second rank: a scheduler that decides by its leader's log alone.

It copies nothing and computes for nobody; whatever its leader comes to, it must come to as well, turn by turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from torch import Tensor

from pdserve.base.mailbox import Woken
from pdserve.base.parallel import ParallelShape
from pdserve.ranks.consensus import Consensus
from pdserve.ranks.copies import RankCopies
from pdserve.ranks.input_log import FollowerLog, InputLog, LeaderLog
from pdserve.ranks.messages import Entry, follower_codec
from pdserve.ranks.rank_executor import RankExecutor, SharedMetadata
from pdserve.scheduler.input_source import FollowerInputSource, LeaderInputSource
from pdserve.scheduler.scheduler import Scheduler
from pdserve.sim.network import Faults, SimNet
from pdserve.sim.world import SimNode, World
from tests.unit.ranks.reductions import Ended, Reductions, Unaided

TWO = ParallelShape(tp_size=2)


class Ranks:
    """A server's leader, `node`, and its shadow; takes a scheduler's place in a world."""

    def __init__(self, node: SimNode, world: ShadowWorld) -> None:
        self.node, self._world = node, world
        self._said: deque[bytes] = deque()
        codec = follower_codec()
        leader_log = LeaderLog(world.clock, lambda entry: self._said.append(codec.encode(entry)))

        def hear() -> Entry:
            return codec.decode(self._said.popleft())

        log = FollowerLog("the shadow", leader_log.now(), hear)
        self.shadow = SimNode(node.mode, world.shape, SimNet(0, log, Faults()), node.endpoint, node.instance)  # type: ignore[arg-type]
        self._reductions = Reductions(2)
        self.leader = node.scheduler
        for number, side, own_log in ((0, node, leader_log), (1, self.shadow, log)):
            self._equip(number, side, own_log)

    def step(self) -> bool:
        """A turn of the leader; the shadow follows now, or some turns later."""
        computed = self.leader.step()
        if self._world.rng.random() < 0.7:
            self.catch_up()
        return computed

    def catch_up(self) -> None:
        """All that the leader has done."""
        while self._said:
            self.shadow.scheduler.step()
            self._world.num_turns += 1

    def assert_alike(self) -> None:
        """The books of both."""
        self.catch_up()
        ours, theirs = self.node, self.shadow
        assert ours.memory.counts() == theirs.memory.counts()
        assert ours.kv is not None and theirs.kv is not None and ours.kv.counts() == theirs.kv.counts()
        assert list(ours.scheduler.role.live) == list(theirs.scheduler.role.live)
        assert ours.executor._table.pages.tolist() == theirs.executor._table.pages.tolist()

    def __getattr__(self, name: str) -> object:
        return getattr(self.leader, name)

    def _equip(self, number: int, node: SimNode, log: InputLog) -> None:
        """Give a node what a rank has in place of what a server of one rank has."""
        kv, scheduler, context = node.kv, node.scheduler, node.scheduler.context
        assert kv is not None and isinstance(scheduler, Scheduler)
        copies = RankCopies(number)

        def wake() -> None:
            if number == 0:
                node.mailbox.post(Woken())

        def begin(values: Tensor, then: Callable[[], None]) -> Ended:
            return self._reductions.begin(number, values, then)

        consensus = Consensus(copies, begin, log, lambda: None, wake, in_step=False)
        engine = kv._engine
        engine._report = lambda event: self._world.net.later(lambda: copies.post(event))  # type: ignore[attr-defined]
        own = engine if number == 0 else self.node.kv._engine  # type: ignore[union-attr]
        copies.drive(engine, own.drain_timeout_s, own.fence_drain_timeout_s,
                     consensus.heard if number == 0 else lambda event: None)  # fmt: skip
        side = kv.send_side
        kv._engine = side.outgoing._engine = side._connecting._engine = copies
        kv.receive_side._engine = kv.receive_side.published._engine = copies
        kv.args.aux.__class__ = SharedMetadata
        kv.args.aux._log = log  # type: ignore[attr-defined]
        context.executor = RankExecutor(
            node.executor, node.executor._table, node.executor.layout, TWO.place(0), Unaided(), log
        )
        scheduler.mailbox = (
            LeaderInputSource(node.mailbox, log, consensus) if number == 0 else FollowerInputSource(log, consensus)
        )


class ShadowWorld(World):
    """`num_turns` is how many turns shadows have followed."""

    num_turns = 0

    def _born(self, mode: str) -> SimNode:
        node = super()._born(mode)
        node.scheduler = Ranks(node, self)  # type: ignore[assignment]
        return node

    def assert_alike(self) -> None:
        for node in (self.prefill, self.decode):
            assert isinstance(node.scheduler, Ranks)
            node.scheduler.assert_alike()
