"""Moves running requests between the decode servers of a `Cluster`, at random times.

It does what the API processes of both servers and the router do: it stops a request at one server, starts it at another
one, and commits or aborts. From the commit on the client gets the other server's tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import msgspec

from pdserve.protocol.messages import CommandReply, EndMigration, MigrateOut, MigrationOffer, SendPrefix
from pdserve.sim.network import SimNet
from pdserve.sim.node import SimNode
from pdserve.sim.router import Client, SimRouter, SimTry
from pdserve.sim.server import SimServer
from pdserve.sim.shape import RequestHalf

PATIENCE_S = 40.0
"""Seconds that the other server may take to compute the request."""
FIRST_ROOM = 1 << 40
MAX_STAGES = 3


class MovedServer:
    """A server that has taken over a request under the name `rid`, as the router sees it.

    `before`: the output tokens of the servers before it. `repeats`: its own output begins with the last of these again.
    """

    def __init__(self, server: SimServer, rid: str, before: Sequence[int], *, repeats: bool) -> None:
        self.server, self.rid, self.before, self._first = server, rid, list(before), int(repeats)
        self.host, self.address = server.host, server.address

    @property
    def role(self) -> str:
        """See `ServerView`."""
        return self.server.role

    @property
    def dead(self) -> bool:
        """See `ServerView`."""
        return self.server.dead

    @property
    def draining(self) -> bool:
        """See `ServerView`."""
        return self.server.draining

    def post(self, spec: object) -> None:
        """See `ServerView`. No request is sent here."""
        raise AssertionError(spec)

    def refuse(self, rid: str) -> None:
        """See `ServerView`. No request is sent here."""
        raise AssertionError(rid)

    def abort(self, rid: str) -> None:
        """See `ServerView`."""
        self.server.abort(self.rid)

    def half(self, rid: str) -> RequestHalf | None:
        """See `ServerView`: all tokens of the request."""
        own = self.server.half(self.rid)
        if own is None:
            return RequestHalf(tokens=list(self.before))
        return RequestHalf(tokens=[*self.before, *own.tokens[self._first :]], finish=own.finish)

    def status(self, rid: str) -> int:
        """See `ServerView`."""
        return self.server.status(self.rid)


@dataclasses.dataclass(slots=True)
class SimMove:
    """One migration of the request of `client`. `phase`: asked, offered, committing or aborting."""

    client: Client
    each: SimTry
    source: SimServer
    node: SimNode
    rid: str
    target: SimServer
    room: int
    deadline: float
    phase: str = "asked"
    num_stages: int = 0
    """Stages that were begun."""
    after: int = 0
    """Leading tokens that the stages so far have sent."""
    sends_kv: bool = True
    """False: the request was retracted, and the target computes it again."""

    @property
    def stage_rid(self) -> str:
        """The name of the last stage at the target."""
        return f"{self.new_rid}/stage {self.num_stages}"

    @property
    def new_rid(self) -> str:
        """The request's name at the target."""
        return f"{self.each.rid}/{self.room - FIRST_ROOM}"

    @property
    def query_id(self) -> str:
        """Of the command whose reply is due."""
        return f"{self.phase} {self.num_stages} {self.room}"


class SimMigrations:
    """All migrations of a cluster. `servers` returns the live servers of a role, draining or not."""

    def __init__(self, net: SimNet, servers: Callable[[str], Sequence[SimServer]]) -> None:
        self._net = net
        self._servers = servers
        self._moves: list[SimMove] = []
        self._num_begun = 0
        self._left: list[tuple[SimServer, str, int]] = []
        """Servers whose request another one has taken, its name there, and its output tokens until then."""

    @property
    def num_pending(self) -> int:
        """Migrations that have not ended."""
        return len(self._moves)

    def with_stage_under_way(self) -> list[SimMove]:
        """Migrations with a stage on its way from one live server to another."""
        found = []
        for move in self._moves:
            if move.phase != "staging" or move.source.dead or move.target.dead or not move.target.has(move.stage_rid):
                continue
            half = move.target.half(move.stage_rid)
            if half is None or half.finish is None:
                found.append(move)
        return found

    def step(self, router: SimRouter) -> None:
        """Begin a migration at random, and those of draining servers, and advance all others."""
        rng, faults = self._net.rng, self._net.faults
        if faults.migrate and router.open and rng.random() < faults.migrate:
            self._begin(rng.choice(router.open))
        if faults.drain_migrate:
            for client in router.open:
                each = client.current
                if each is not None and each.decode.draining and rng.random() < faults.drain_migrate:
                    self._begin(client)
        for move in list(self._moves):
            self._advance(move)

    def check(self) -> None:
        """Check that no server has gone on with a request that another one has taken. Raises AssertionError."""
        for source, rid, num_tokens in self._left:
            half = source.raw_half(rid)
            if source.dead or half is None:
                continue
            assert len(half.tokens) == num_tokens, f"{rid}: two servers have computed it"
            assert half.finish is not None, f"{rid}: it is still live where it was"

    def _begin(self, client: Client) -> None:
        """Ask the server of a client's request to stop it."""
        each = client.current
        if each is None or each.closed or any(move.each is each for move in self._moves):
            return
        moved = each.decode
        source, rid = (moved.server, moved.rid) if isinstance(moved, MovedServer) else (moved, each.rid)
        assert isinstance(source, SimServer)
        half = source.half(rid)
        others = [it for it in self._servers("decode") if it is not source and not (it.dead or it.draining)]
        if source.dead or half is None or not half.tokens or half.finish is not None or not others:
            return
        self._num_begun += 1
        self._net.counts["migrations begun"] += 1
        self._net.counts["migrations begun by a drain"] += source.draining
        target, room = self._net.rng.choice(others), FIRST_ROOM + self._num_begun
        deadline = self._net.clock.now() + PATIENCE_S
        move = SimMove(client, each, source, source.node_of(rid), rid, target, room, deadline)
        self._moves.append(move)
        if move.target.replicas[0].memory.has_prefix_cache and self._net.rng.random() < 0.7:
            self._begin_stage(move)
        else:
            self._stop(move)

    def _stop(self, move: SimMove) -> None:
        move.phase = "asked"
        move.node.mailbox.post(MigrateOut(query_id=move.query_id, rid=move.rid, room=move.room))

    def _begin_stage(self, move: SimMove) -> None:
        move.phase = "stage"
        move.num_stages += 1
        room = move.room + (move.num_stages << 20)
        move.node.mailbox.post(SendPrefix(query_id=move.query_id, rid=move.rid, room=room, after=move.after))

    def _look_at_stage(self, move: SimMove) -> None:
        """Begin the next stage once the target has the pages of this one; stop the request when it fails."""
        half = None if move.target.dead else move.target.half(move.stage_rid)
        if half is not None and half.finish is not None:
            arrived = half.finish.type == "length"
            self._net.counts["stages"] += arrived
            if arrived and move.num_stages < MAX_STAGES:
                self._begin_stage(move)
            else:
                self._stop(move)
        elif move.target.dead or self._net.clock.now() > move.deadline:
            self._command(move, "aborting")

    def _advance(self, move: SimMove) -> None:
        if move.source.dead:
            self._end(move, "migrations cut off by the death of the source")
            return
        if move.phase in ("offered", "staging"):
            (self._look_at_target if move.phase == "offered" else self._look_at_stage)(move)
            return
        reply = move.node.replies.pop(move.query_id, None)
        if reply is None:
            return
        if move.phase == "stage":
            if reply.ok:
                move.phase = "staging"
                self._offer(move, reply)
            else:
                self._stop(move)
            return
        if move.phase == "asked":
            if not reply.ok:
                self._moves.remove(move)
                self._net.counts["migrations refused"] += 1
                return
            move.phase = "offered"
            self._offer(move, reply)
        elif move.phase == "committing" and reply.ok:
            self._take_over(move)
        else:
            self._end(move, "migrations given up")

    def _offer(self, move: SimMove, reply: CommandReply) -> None:
        """Send the request to the target, which may have died when the message arrives."""
        offer = msgspec.msgpack.decode(reply.payload, type=MigrationOffer)
        phase, rid = move.phase, move.new_rid if move.phase == "offered" else move.stage_rid
        spec = msgspec.structs.replace(offer.request, rid=rid)
        if phase == "staging":
            move.after = len(spec.input_ids)
        else:
            move.sends_kv = not spec.taken_over
            self._net.counts["migrations of retracted requests"] += spec.taken_over
            num_sent = len(spec.prior_output_ids) + move.sends_kv
            assert num_sent == offer.num_output_tokens, "not all tokens are offered"

        def arrive() -> None:
            if not move.target.dead and move.phase == phase and move.target.role == "decode":
                move.target.post(spec)

        self._net.later(arrive)

    def _look_at_target(self, move: SimMove) -> None:
        half = None if move.target.dead else move.target.half(move.new_rid)
        if half is not None and half.tokens:
            self._command(move, "committing")
        elif (
            move.target.dead or (half is not None and half.finish is not None) or self._net.clock.now() > move.deadline
        ):
            self._command(move, "aborting")

    def _command(self, move: SimMove, phase: str) -> None:
        move.phase = phase
        command = EndMigration(query_id=move.query_id, rid=move.rid, commit=phase == "committing")
        move.node.mailbox.post(command)

    def _take_over(self, move: SimMove) -> None:
        """Let the client have the target's tokens from now on."""
        self._moves.remove(move)
        self._net.counts["migrations"] += 1
        self._net.counts["migrations away from a draining server"] += move.source.draining
        before = move.each.decode.half(move.each.rid)
        own = move.source.raw_half(move.rid)
        assert before is not None and own is not None
        self._left.append((move.source, move.rid, len(own.tokens)))
        move.each.decode = MovedServer(move.target, move.new_rid, before.tokens, repeats=move.sends_kv)
        move.client.servers.append(move.target)
        if move.each.closed and not move.target.dead:
            move.target.abort(move.new_rid)

    def _end(self, move: SimMove, what: str) -> None:
        """End a migration without a commit; the target's copy ends as well."""
        self._moves.remove(move)
        self._net.counts[what] += 1
        if move.target.has(move.new_rid) and not move.target.dead:
            move.target.abort(move.new_rid)
