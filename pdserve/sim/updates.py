"""Updates of the weights of all servers of a simulated cluster; `in_place.py` has how a `SimNode` takes other weights.

    round k    each server in turn, or several at a time:
               PrepareWeights ──> HoldRequests ──> InstallWeights ──> EndWeightsUpdate, to all its replicas
                  └─ a rank cannot load, or requests do not end: EndWeightsUpdate, and again later

The weights of a `HashExecutor` are a number, which changes every token. So a page of other weights, or a request that
is computed with both, shows in the tokens.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

from pdserve.protocol.messages import CommandReply
from pdserve.protocol.weights import EndWeightsUpdate, HoldRequests, InstallWeights, PrepareWeights
from pdserve.sim.network import SimNet
from pdserve.sim.server import SimServer

HOLD_S = 30.0
"""Seconds that requests have to end. Rooms may wait longer for a lost peer, so holds time out too."""
NUM_ROUNDS = 2


_numbers = itertools.count()


@dataclasses.dataclass(slots=True)
class _Update:
    """The update of one server to weights `number`. `phase`: the command that the replicas have not all answered."""

    server: SimServer
    number: int
    phase: str = "prepare"
    failed: bool = False
    query: int = dataclasses.field(default_factory=_numbers.__next__)

    def post(self, phase: str) -> None:
        """Send the next command to all replicas."""
        self.phase = phase
        query_id = f"weights-{self.query}-{phase}"
        for node in self.server.replicas:
            match phase:
                case "prepare":
                    node.mailbox.post(PrepareWeights(query_id=query_id, model_path=str(self.number)))
                case "hold":
                    node.mailbox.post(HoldRequests(query_id=query_id, abort_all=False, timeout_s=HOLD_S))
                case "install":
                    node.mailbox.post(InstallWeights(query_id=query_id, weight_version=f"v{self.number}"))
                case _:
                    node.mailbox.post(EndWeightsUpdate(query_id=query_id))

    def outcome(self) -> bool | None:
        """Whether all replicas have done what the command says; None while one has not answered."""
        replies: list[CommandReply] = []
        for node in self.server.replicas:
            reply = node.replies.get(f"weights-{self.query}-{self.phase}")
            if reply is None:
                return None
            replies.append(reply)
        return all(reply.ok for reply in replies)


AFTER = {"prepare": "hold", "hold": "install", "install": "end"}


class SimUpdates:
    """Updates of all servers of a cluster, in rounds. `servers` returns the live ones, `is_busy` whether clients wait.

    With `Faults.update` 0 there are none.
    """

    def __init__(self, net: SimNet, servers: Callable[[], list[SimServer]]) -> None:
        self._net, self._servers = net, servers
        self._updates: list[_Update] = []
        self._done: set[SimServer] = set()
        self.round = 0
        """Number of the round that runs; its weights have this number. 0: none has begun."""

    @property
    def num_pending(self) -> int:
        """Servers of the present round that have not the new weights, and updates that run."""
        waiting = len(set(self._servers()) - self._done) if self.round else 0
        return waiting + len(self._updates)

    def step(self, *, is_busy: bool) -> None:
        """Begin updates at random, and go on with those that run."""
        faults, rng = self._net.faults, self._net.rng
        if not faults.update:
            return
        if not self.num_pending and is_busy and self.round < NUM_ROUNDS and rng.random() < faults.update:
            self.round += 1
            self._done.clear()
        for update in list(self._updates):
            self._go_on(update)
        if self.round:
            waiting = [it for it in self._servers() if it not in self._done and it not in self._present()]
            if waiting and rng.random() < max(faults.update, 0.1):
                update = _Update(rng.choice(waiting), self.round)
                update.post("prepare")
                self._updates.append(update)

    def _present(self) -> set[SimServer]:
        return {update.server for update in self._updates}

    def _go_on(self, update: _Update) -> None:
        succeeded = update.outcome()
        if succeeded is None:
            return
        if update.phase == "end":
            self._updates.remove(update)
            if not update.failed:
                self._net.counts["servers with other weights"] += 1
                self._done.add(update.server)
            return
        if not succeeded:
            assert update.phase != "install", "one replica has other weights than the others"
            self._net.counts[f"updates that failed at {update.phase}"] += 1
            update.failed = True
        update.post(AFTER[update.phase] if succeeded else "end")
