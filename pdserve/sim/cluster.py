"""Simulates prefill and decode servers, their replicas and ranks, a router and its clients, in one process, seeded.

    clients ──> SimRouter ──> SimServer (one host): replicas, each a SimNode, perhaps with ranks
                                   └── SimNet: control frames, copies, look-ups, probes     Mishaps: injected faults

`Cluster.run` plays a workload to its end and asserts three invariants. A copy touches only pages of its own key. A
request ends once at a server and once at the client. At the end no page, row or aux slot is held.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from pdserve.base.clock import ManualClock
from pdserve.base.parallel import ParallelShape
from pdserve.sim.faults import Recorder
from pdserve.sim.in_place import SharedSteps
from pdserve.sim.migrations import SimMigrations
from pdserve.sim.mishaps import Mishaps
from pdserve.sim.network import Faults, SimNet
from pdserve.sim.node import MachineClock, SimNode
from pdserve.sim.ranks import RankedNode
from pdserve.sim.router import ClientAnswer, SimRouter
from pdserve.sim.server import SimServer
from pdserve.sim.shape import Prompt, Shape
from pdserve.sim.updates import SimUpdates

TICK_S, IDLE_TICK_S = 0.25, 1.0
RECOVERY_S = 100.0
"""Seconds after the last fault that may fail a request, from which no request may fail."""
QUIET_S = 12.0
"""Seconds for which the cluster must stay idle at the end; longer than any message delay."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Numbers of servers per role and of replicas per server, and how replicas are split over ranks."""

    prefills: int = 2
    decodes: int = 2
    prefill_dp: int = 1
    decode_dp: int = 1
    prefill_ranks: ParallelShape = ParallelShape()
    decode_ranks: ParallelShape = ParallelShape()
    redirect: float = 0.0
    """Probability that a request goes to a prefill replica other than the one its bootstrap room names."""
    shares_steps: bool = False
    """Whether replicas of a server take other weights together, as with DP attention."""

    def dp_size(self, role: str) -> int:
        """Return the number of replicas of a server."""
        return self.prefill_dp if role == "prefill" else self.decode_dp

    def ranks(self, role: str) -> ParallelShape:
        """Return how a replica is split."""
        return self.prefill_ranks if role == "prefill" else self.decode_ranks


class Cluster:
    """A simulated deployment: servers, a workload, and faults."""

    def __init__(self, seed: int, shape: Shape, faults: Faults, layout: Layout = Layout()) -> None:
        self.clock = ManualClock()
        self.net = SimNet(seed, self.clock, faults)
        self.net.recorder = Recorder(self.net.rng)
        self.rng = self.net.rng
        self.shape, self.layout = shape, layout
        self._births, self._runs = itertools.count(), itertools.count()
        self.dead: list[SimServer] = []
        self.servers: list[SimServer] = []
        for role, number in (("prefill", layout.prefills), ("decode", layout.decodes)):
            for index in range(number):
                host = f"host-{role}-{index}"
                self.servers.append(self.start(role, host, self._machine_clock()))
        self.mishaps = Mishaps(self)
        self.migrations = SimMigrations(self.net, self.of_role)
        self.updates = SimUpdates(self.net, lambda: self.servers)
        self.router: SimRouter | None = None

    def of_role(self, role: str) -> list[SimServer]:
        """Return the live servers of `role`, draining or not."""
        return [server for server in self.servers if server.role == role]

    def start(self, role: str, host: str, clock: MachineClock, endpoints: Sequence[str] = ()) -> SimServer:
        """Start a new server process on `host`. `endpoints` has one per replica; missing ones get new endpoints."""
        replicas = []
        dp_size, parallel = self.layout.dp_size(role), self.layout.ranks(role)
        for index in range(dp_size):
            number = next(self._births)
            endpoint = endpoints[index] if index < len(endpoints) else f"{host}:{number}"
            name = f"{role}-{number}"
            if parallel.num_ranks == 1:
                node = SimNode(role, self.shape, self.net, endpoint, name, clock=clock, dp_size=dp_size)
            else:
                node = RankedNode(
                    role, self.shape, self.net, endpoint, name, clock=clock, parallel=parallel, dp_size=dp_size
                )
            replicas.append(node)
            self.net.counts["replicas of several ranks"] += parallel.num_ranks > 1
            for name in (endpoint, *self.net.processes[node.instance]):
                self.net.hosts[name] = host
        self.net.hosts[host] = host
        if self.layout.shares_steps and len(replicas) > 1:
            shared = SharedSteps(self.net, len(replicas))
            for node in replicas:
                node.share_steps(shared)
        server = SimServer(role, host, clock, replicas, self.net, self.layout.redirect)
        server.take_role(role)
        return server

    @property
    def may_change_in_place(self) -> bool:
        """Whether any two servers are a pair in either role: a decode server has the stages of its prefill, or one."""
        return self.layout.prefill_ranks.pp_size == self.layout.decode_ranks.pp_size

    def names_in_place(self, role: str, endpoint: str) -> tuple[str, str]:
        """Return the endpoint and the instance with which a replica takes `role` in place."""
        number = next(self._births)
        same = self.rng.random() < 0.5
        return endpoint if same else f"{endpoint.rpartition(':')[0]}:{number}", f"{role}-{number}"

    def run(
        self,
        prompts: Sequence[Prompt],
        num_rooms: int = 6,
        late: Sequence[Prompt] = (),
        max_steps: int = 24_000,
        *,
        at_once: bool = False,
    ) -> list[ClientAnswer]:
        """Play the workload to its end and return each client's answer.

        In each step one prompt may begin, at random. `at_once`: all begin as soon as a room is free.

        The `late` prompts start once all others have ended, faults that may fail a request are off, and RECOVERY_S
        seconds have passed.
        """
        router = self.router = SimRouter(
            self.of_role,
            self.net.later,
            self.clock,
            self.rng,
            num_rooms,
            self.net.counts,
            f"r{next(self._runs)}-",
        )
        todo = list(enumerate(prompts))[::-1]
        at_last = list(enumerate(late, len(prompts)))[::-1]
        late_at: float | None = None
        quiet_since: float | None = None
        for _ in range(max_steps):
            self.clock.advance(TICK_S if todo or router.open else IDLE_TICK_S)
            self.net.deliver()
            if at_last and not (todo or router.open):
                if late_at is None:
                    self.mishaps.heal()
                    late_at = self.clock.now() + RECOVERY_S
                elif self.clock.now() >= late_at and not self.mishaps.pending:
                    todo, at_last = at_last, []
            while todo and len(router.open) < num_rooms and (at_once or self.rng.random() < 0.5):
                router.begin(*todo.pop())
                if not at_once:
                    break
            if todo or router.open or at_last:
                self.mishaps.step()
            else:
                self.mishaps.end()
            router.step()
            self.migrations.step(router)
            self.updates.step(is_busy=bool(todo))
            for server in list(self.servers):
                if self.clock.now() >= server.stopped_until:
                    server.step()
            busy = todo or at_last or router.open or router.tries or self.mishaps.pending
            busy = busy or self.migrations.num_pending or self.updates.num_pending
            if busy or not all(server.idle for server in self.servers):
                quiet_since = None
                continue
            quiet_since = self.clock.now() if quiet_since is None else quiet_since
            if self.clock.now() - quiet_since >= QUIET_S:
                self.migrations.check()
                return self._answers(router)
        raise AssertionError(f"stuck after {max_steps} steps: {self._stuck(router, todo)}")

    def leaks(self) -> dict[str, dict[str, int]]:
        """Return resources still held at the end, by instance; empty when there are none."""
        found = {node.instance: node.leaks() for server in self.servers for node in server.replicas}
        return {instance: leaks for instance, leaks in found.items() if leaks}

    # ------------------------------------------------------------------ inside

    def _machine_clock(self) -> MachineClock:
        origin = self.rng.uniform(0.0, 1e6) if self.net.faults.clocks_differ else 0.0
        self.net.counts["clocks that differ"] += self.net.faults.clocks_differ
        return MachineClock(self.clock, origin)

    def _answers(self, router: SimRouter) -> list[ClientAnswer]:
        answers = []
        for client in sorted(router.clients, key=lambda client: client.index):
            assert client.answer is not None
            answers.append(client.answer)
        return answers

    def _stuck(self, router: SimRouter, todo: Sequence[object]) -> str:
        open_ = [client.index for client in router.open]
        tries = [(each.rid, each.room, each.closed, sorted(each.sent)) for each in router.tries]
        leaks = {k: v for k, v in self.leaks().items() if v}
        return f"{len(todo)} to come, clients {open_}, tries {tries}, leaks {leaks}, {self.mishaps.pending}"
