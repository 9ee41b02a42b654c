"""Worlds in which every server has a second rank: a scheduler that decides by rank 0's log alone.

Whatever rank 0 comes to, the other rank must come to as well, turn by turn.
"""

from __future__ import annotations

from typing import Any

from pdserve.base.parallel import ParallelShape
from pdserve.ranks.messages import Entry, follower_codec
from pdserve.sim.node import SimNode
from pdserve.sim.ranks import RankedNode
from pdserve.sim.world import World

TWO = ParallelShape(tp_size=2)


class ShadowedNode(RankedNode):
    """A server of two ranks. The log passes through the codec that real ranks use. `num_turns`: turns of rank 0."""

    num_turns = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._codec = follower_codec()
        super().__init__(*args, **kwargs)

    def step(self) -> None:
        super().step()
        self.num_turns += 1

    def log_entry(self, entry: Entry) -> None:
        told = self._codec.decode(self._codec.encode(entry))
        assert isinstance(told, Entry)
        super().log_entry(told)

    def assert_alike(self) -> None:
        """The books of both ranks, once the other one has followed all turns."""
        (shadow,) = self.followers
        shadow.catch_up()
        assert self.memory.counts() == shadow.memory.counts()
        assert self.kv is not None and shadow.kv is not None and self.kv.counts() == shadow.kv.counts()
        assert list(self.scheduler.role.live) == list(shadow.scheduler.role.live)
        assert self.memory.table.pages.tolist() == shadow.memory.table.pages.tolist()


class ShadowWorld(World):
    """Servers of two ranks each."""

    def make_node(self, mode: str, endpoint: str, instance: str) -> SimNode:
        return ShadowedNode(mode, self.shape, self.net, endpoint, instance, clock=self.clock, parallel=TWO)

    @property
    def nodes(self) -> list[ShadowedNode]:
        """All servers that have lived."""
        return [node for node in (self.prefill, self.decode, *self.dead) if isinstance(node, ShadowedNode)]

    def assert_alike(self) -> None:
        """The books of both ranks of each live server."""
        for node in self.nodes:
            if node.lives:
                node.assert_alike()
