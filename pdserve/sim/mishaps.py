"""Injects faults into the servers, clocks and links of a `Cluster`: starts them at random and ends them.

`SimNet` injects faults of single messages, copies, probes and look-ups. `SimNet.counts` counts all faults.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from pdserve.protocol.engine_memory import KV_CACHE, ReleaseMemory, ResumeMemory
from pdserve.protocol.messages import CommandReply, SwitchRole
from pdserve.sim.migrations import SimMigrations
from pdserve.sim.network import SimNet
from pdserve.sim.node import MachineClock
from pdserve.sim.router import SimRouter
from pdserve.sim.server import SimServer
from pdserve.transfer.events import FrameArrived

SOON_S, REPLACEMENT_S = 2.0, 20.0
"""Possible downtimes of a server in seconds. The short one may go unnoticed by probes."""
MAX_LEAP_S = 25.0
MAX_DRAIN_S = 60.0
LINGER_S = 2.0
"""Seconds for which a drained server still answers its peers, for requests that are in transit."""
QUIET_S = 20.0
"""Upper bound of the seconds that it waits for peers to release pages."""
CHANGE_S = 5.0
"""Seconds within which a drained replica must have become idle, to change its role in place."""
MAX_RELEASED_S = 30.0
OTHER = {"prefill": "decode", "decode": "prefill"}


class ClusterView(Protocol):
    """The cluster, as seen by `Mishaps`."""

    net: SimNet
    servers: list[SimServer]
    dead: list[SimServer]
    router: SimRouter | None
    migrations: SimMigrations

    def start(self, role: str, host: str, clock: MachineClock, endpoints: Sequence[str] = ()) -> SimServer:
        """Start a new server process on `host`; see `Cluster.start`."""
        ...

    @property
    def may_change_in_place(self) -> bool:
        """See `Cluster.may_change_in_place`."""
        ...

    def names_in_place(self, role: str, endpoint: str) -> tuple[str, str]:
        """See `Cluster.names_in_place`."""
        ...


@dataclasses.dataclass(slots=True)
class _Drain:
    server: SimServer
    cut_at: float
    is_cut: bool = False
    ended_at: float | None = None
    in_place: bool = False
    """The server takes the other role in place, instead of ending."""
    releases: bool = False
    """The server releases its memory, instead of ending."""


_numbers = itertools.count()


@dataclasses.dataclass(slots=True)
class RoleChangeInPlace:
    """The change of one server to `role`, under way. `goes_back`: replicas that have changed return to the old role."""

    server: SimServer
    role: str
    goes_back: bool = False
    number: int = dataclasses.field(default_factory=_numbers.__next__)

    def begin(self, names: Callable[[str, str], tuple[str, str]]) -> None:
        """Send the command to all replicas. `names` returns an endpoint, perhaps the present one, and an instance."""
        for index, node in enumerate(self.server.replicas):
            endpoint, instance = names(self.role, node.endpoint)
            settings: dict[str, str | int | float | bool | None] = {"mode": self.role}
            settings |= {"endpoint": endpoint, "instance": instance}
            query_id = f"{self.number}.{index}"
            node.mailbox.post(
                SwitchRole(query_id=query_id, disagg=settings, server="", bootstrap_port=None, timeout_s=CHANGE_S)
            )

    def outcome(self) -> bool | None:
        """Whether all replicas have the role; None while one has not replied."""
        replies: list[CommandReply] = []
        for index, node in enumerate(self.server.replicas):
            reply = node.replies.get(f"{self.number}.{index}")
            if reply is None:
                return None
            replies.append(reply)
        return all(reply.ok for reply in replies)


@dataclasses.dataclass(slots=True)
class MemoryRelease:
    """KV memory of one server that is released, and resumed at `resume_at`; None: not all replicas have released."""

    server: SimServer
    resume_at: float | None = None
    is_resuming: bool = False
    number: int = dataclasses.field(default_factory=_numbers.__next__)

    def begin(self) -> None:
        """Send the release to all replicas."""
        release = ReleaseMemory(query_id="", tags=(KV_CACHE,), timeout_s=CHANGE_S)
        self._post(lambda query_id: msgspec.structs.replace(release, query_id=query_id))

    def resume(self) -> None:
        """Send the resume to all replicas, also to those that have released nothing."""
        self.is_resuming, self.number = True, next(_numbers)
        self._post(lambda query_id: ResumeMemory(query_id=query_id, tags=(KV_CACHE,), server="again"))

    def _post(self, make: Callable[[str], ReleaseMemory | ResumeMemory]) -> None:
        for index, node in enumerate(self.server.replicas):
            node.mailbox.post(make(f"memory {self.number}.{index}"))

    def outcome(self) -> bool | None:
        """Whether all replicas have obeyed; None while one has not replied."""
        names = [f"memory {self.number}.{index}" for index in range(len(self.server.replicas))]
        replies = [node.replies.get(name) for node, name in zip(self.server.replicas, names, strict=True)]
        return None if None in replies else all(reply is not None and reply.ok for reply in replies)


class Mishaps:
    """The faults of one cluster. `pending` counts servers that are draining or about to restart."""

    def __init__(self, cluster: ClusterView) -> None:
        self._cluster = cluster
        self._net = cluster.net
        self._rng: random.Random = cluster.net.rng
        self._drains: list[_Drain] = []
        self._changes: list[RoleChangeInPlace] = []
        self._releases: list[MemoryRelease] = []
        self._num_absent = 0
        self._has_healed = False
        """Whether `heal` was called. From then on no frames of dead processes are replayed or forged, because such
        frames would keep their sessions alive.
        """
        self.aborted: set[int] = set()
        """Clients that disconnected, or whose request was aborted at a server."""

    @property
    def pending(self) -> int:
        """Number of servers that are draining, changing their role, without memory, or down."""
        return len(self._drains) + len(self._changes) + len(self._releases) + self._num_absent

    def step(self) -> None:
        """Draw faults for one step of the world, while clients are waiting."""
        net, faults, cluster = self._net, self._net.faults, self._cluster
        happens = net.happens
        router = cluster.router
        if router is not None and router.open and happens("clients that went away", faults.abort / 2):
            client = self._rng.choice(router.open)
            self.aborted.add(client.index)
            router.leave(client)
        if router is not None and router.tries and happens("halves aborted", faults.abort / 2):
            each = self._rng.choice(router.tries)
            role, server = self._rng.choice(each.sides())
            if role in each.sent and not server.dead:
                self.aborted.add(each.index)
                server.abort(each.rid)
        if cluster.servers and happens("servers killed", faults.kill):
            self._kill(self._rng.choice(cluster.servers))
        if faults.stage_death:
            self._kill_in_a_stage()
        if cluster.servers:
            if happens("servers stopped", faults.stop):
                self._stop(self._rng.choice(cluster.servers))
            if happens("clock leaps", faults.clock_leap):
                self._leap(self._rng.choice(cluster.servers))
            if happens("drains", faults.switch):
                self._drain(self._rng.choice(cluster.servers))
            if cluster.may_change_in_place and happens("drains for a role change in place", faults.change):
                self._drain(self._rng.choice(cluster.servers), in_place=True)
            if cluster.may_change_in_place and happens("drains for a release of memory", faults.release):
                self._drain(self._rng.choice(cluster.servers), releases=True)
            if happens("deaths of one rank or replica", faults.rank_death):
                self._kill_part(self._rng.choice(cluster.servers))
        if len(cluster.servers) > 1 and happens("links cut", faults.cut):
            self._cut()
        if net.recorder is not None:
            senders = net.mailboxes if self._has_healed else None
            if happens("frames replayed", faults.replayed):
                found = net.recorder.replay(senders)
                net.counts["Hellos replayed"] += found is not None and b"Hello" in found[1]
                self._inject(found)
            if happens("Hellos of a second instance", faults.usurper):
                self._inject(net.recorder.usurp())
            if happens("odd frames", faults.odd_frame):
                self._inject(net.recorder.odd(senders))
        self._go_on()

    def heal(self) -> None:
        """Turn off faults that may fail a request, restore links, and resume stopped servers."""
        self._net.faults, self._has_healed = self._net.faults.healed(), True
        self._net.links.heal()
        for server in self._cluster.servers:
            server.stopped_until = 0.0

    def end(self) -> None:
        """Turn off all faults once no client is left, so that every server can become idle."""
        if not self._net.calm:
            self._net.calm = True
            self.heal()
        self._go_on()

    # ------------------------------------------------------------------ inside

    def _go_on(self) -> None:
        """Resume servers whose stop is over, and end servers that have drained."""
        now = self._net.clock.now()
        stopped = {s for server in self._cluster.servers if now < server.stopped_until for s in _processes(server)}
        self._net.stopped = stopped
        for drain in list(self._drains):
            self._go_on_draining(drain, now)
        for change in list(self._changes):
            self._go_on_changing(change)
        for release in list(self._releases):
            self._go_on_releasing(release, now)

    def _inject(self, found: tuple[str, bytes] | None) -> None:
        if found is not None:
            self._net.later(lambda: self._net.post(found[0], FrameArrived(found[1])))

    def _kill(self, server: SimServer) -> None:
        """Kill all processes of a server (kill -9). It restarts in the same role, perhaps at the same endpoints."""
        self._remove(server)
        self._come_back(server, server.role)

    def _kill_in_a_stage(self) -> None:
        """Kill one of the servers between which a stage of a migration is on its way."""
        moves = self._cluster.migrations.with_stage_under_way()
        if moves:
            move = self._rng.choice(moves)
            side, server = self._rng.choice((("source", move.source), ("target", move.target)))
            if self._net.happens(f"deaths of the {side} in the middle of a stage", self._net.faults.stage_death):
                self._kill(server)

    def _kill_part(self, server: SimServer) -> None:
        """Kill one process: a replica, or one rank of it. The rest of the server dies some time later."""
        node = self._rng.choice(server.replicas)
        if not node.lives:
            return
        lasts_s = node.lose_a_process(self._rng)
        server.draining = True  # as the server's health reports

        def follow() -> None:
            self._arrive()
            if not server.dead:
                self._kill(server)

        self._num_absent += 1
        self._net.later(follow, lasts_s)

    def _arrive(self) -> None:
        self._num_absent -= 1

    def _remove(self, server: SimServer) -> None:
        server.die()
        self._cluster.servers.remove(server)
        self._cluster.dead.append(server)
        self._drains = [drain for drain in self._drains if drain.server is not server]
        self._changes = [change for change in self._changes if change.server is not server]
        self._releases = [release for release in self._releases if release.server is not server]

    def _come_back(self, server: SimServer, role: str) -> None:
        cluster = self._cluster
        same = self._rng.random() < 0.5
        endpoints = [node.endpoint for node in server.replicas] if same else []
        self._net.counts["restarts at the same endpoint"] += same

        def begin() -> None:
            self._arrive()
            cluster.servers.append(cluster.start(role, server.host, server.clock, endpoints))

        self._num_absent += 1
        self._net.later(begin, self._rng.choice((SOON_S, REPLACEMENT_S)), min_delay_s=0.1)

    def _stop(self, server: SimServer) -> None:
        """Send SIGSTOP, and SIGCONT some time later."""
        for_s = self._rng.uniform(1.0, self._net.faults.max_stop_s)
        server.stopped_until = max(server.stopped_until, self._net.clock.now() + for_s)

    def _leap(self, server: SimServer) -> None:
        """Move the server's clock ahead.

        Under faults that leave writes to settle, the leap is at most `max_delay_s`: settling is timed by this clock.
        """
        faults = self._net.faults
        settles = faults.copy_failed or faults.note_lost or faults.cut
        server.clock.leap(self._rng.uniform(0.0, faults.max_delay_s if settles else MAX_LEAP_S))

    def _cut(self) -> None:
        now = self._net.clock.now()
        hosts = {role: [it.host for it in self._cluster.servers if it.role == role] for role in OTHER}
        pair = [self._rng.choice(each) for each in hosts.values() if each]
        self._rng.shuffle(pair)
        if len(pair) < 2:
            return
        one, other = pair
        until = now + self._rng.uniform(1.0, self._net.faults.max_cut_s)
        self._net.links.cut(one, other, until)
        if self._rng.random() < 0.5:
            self._net.links.cut(other, one, until)
        else:
            self._net.counts["links cut in one direction"] += 1

    def _drain(self, server: SimServer, *, in_place: bool = False, releases: bool = False) -> None:
        if server.draining:
            return
        server.draining = True
        cut_at = self._net.clock.now() + self._rng.uniform(1.0, MAX_DRAIN_S)
        self._drains.append(_Drain(server, cut_at, in_place=in_place, releases=releases))

    def _go_on_releasing(self, release: MemoryRelease, now: float) -> None:
        """Resume a while after all replicas have released, or at once where one has not; again where one cannot."""
        if release.resume_at is not None:
            if now >= release.resume_at:
                release.resume_at = None
                release.resume()
            return
        succeeded = release.outcome()
        if succeeded is None:
            return
        if not release.is_resuming:
            self._net.counts["releases of memory"] += succeeded
            release.resume_at = now + (self._rng.uniform(0.0, MAX_RELEASED_S) if succeeded else 0.0)
        elif succeeded:
            self._releases.remove(release)
            release.server.take_role(release.server.role)
            release.server.draining = False
        else:
            release.resume_at = now + SOON_S

    def _change_in_place(self, server: SimServer, role: str, *, goes_back: bool = False) -> None:
        change = RoleChangeInPlace(server, role, goes_back)
        change.begin(self._cluster.names_in_place)
        self._changes.append(change)

    def _go_on_changing(self, change: RoleChangeInPlace) -> None:
        """End a role change once all replicas have replied. Where one has kept its role, the others return to it."""
        succeeded, server = change.outcome(), change.server
        if succeeded is None:
            return
        self._changes.remove(change)
        if succeeded:
            server.take_role(change.role)
            self._net.counts["role changes in place"] += not change.goes_back
            server.draining = False
        elif change.goes_back:  # as the API process, which starts the engine anew
            self._remove(server)
            self._come_back(server, server.role)
        elif len(server.replicas) > 1:
            self._change_in_place(server, server.role, goes_back=True)
        else:
            server.draining = False

    def _go_on_draining(self, drain: _Drain, now: float) -> None:
        """Advance a drain as `EngineInstance.drain` does.

        Running requests may end until the drain times out; then they are aborted. Peers release pages, and the process
        ends.
        """
        server = drain.server
        live = any(node.scheduler.role.live for node in server.replicas)
        if live and now >= drain.cut_at and not drain.is_cut:
            drain.is_cut = True
            self._net.counts["drains that cut requests"] += 1
            server.abort_all()
        if live:
            drain.ended_at = None
            return
        drain.ended_at = now if drain.ended_at is None else drain.ended_at
        waited_s = now - drain.ended_at
        if waited_s >= LINGER_S and (server.idle or waited_s >= QUIET_S or drain.in_place or drain.releases):
            role = server.role
            others = [other for other in self._cluster.servers if other.role == role and not other.draining]
            if drain.releases:
                self._drains.remove(drain)
                self._releases.append(MemoryRelease(server))
                self._releases[-1].begin()
                return
            if drain.in_place:  # perhaps while peers still hold pages, for which the scheduler waits
                self._drains.remove(drain)
                if others:
                    self._change_in_place(server, OTHER[role])
                else:
                    server.draining = False
                return
            if others and self._rng.random() < 0.7:
                role = OTHER[role]
                self._net.counts["role switches"] += 1
            self._remove(server)
            self._come_back(server, role)


def _processes(server: SimServer) -> list[str]:
    return [name for node in server.replicas for name in node.processes]
