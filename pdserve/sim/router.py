"""The router of a simulated world: pairs, bootstrap rooms, retries, and one answer per client. Owned by `Cluster`.

    client ── begin ──> try 1: pair, room, the same request to both ──> judge ──> decode answered: relay to its end
                             │ one half failed: both are closed           │
                             └──── retryable: another pair, a new room <──┘

The real router's `outcome` module interprets the answers. A server that ends closes its connections.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol, cast

import aiohttp
from multidict import CIMultiDict

from pdserve.base.clock import Clock
from pdserve.protocol.messages import GenerateRequest, RoomAddress
from pdserve.router.workers import outcome as verdict
from pdserve.router.workers.outcome import ConnectionFailed, WorkerResponse, WorkerStream
from pdserve.router.workers.workers import Worker
from pdserve.sim.shape import Prompt, RequestHalf, request

MAX_TRIES = 4
GRACE_S = 8.0
"""Seconds that prefill's half may take after decode's has ended, before the router closes it."""


class ServerView(Protocol):
    """A server, as seen by the router."""

    @property
    def role(self) -> str:
        """The role in which it takes requests."""
        ...

    @property
    def host(self) -> str:
        """The machine's name."""
        ...

    @property
    def address(self) -> tuple[str, int]:
        """The bootstrap address, for a prefill server."""
        ...

    @property
    def dead(self) -> bool:
        """Whether the server's connections are closed."""
        ...

    @property
    def draining(self) -> bool:
        """Whether the server refuses new requests."""
        ...

    def post(self, spec: GenerateRequest) -> None:
        """Send a request."""
        ...

    def refuse(self, rid: str) -> None:
        """Refuse a request that is meant for another role, with status 503."""
        ...

    def abort(self, rid: str) -> None:
        """Close the connection of a request."""
        ...

    def half(self, rid: str) -> RequestHalf | None:
        """Return the output so far; None when the server has not sent any."""
        ...

    def status(self, rid: str) -> int:
        """Return the HTTP status of an answer that has ended."""
        ...


@dataclasses.dataclass(frozen=True)
class ClientAnswer:
    """How a client's request ended. `error` is None when the client received all `tokens`.

    `num_tries` is the number of tries; `took_s` is the total time in seconds.
    """

    tokens: list[int]
    error: str | None
    num_tries: int
    took_s: float


@dataclasses.dataclass(slots=True)
class SimTry:
    """One request at one pair of servers, for client `index`. `sent` has the roles that it has reached."""

    index: int
    rid: str
    room: int
    prefill: ServerView
    decode: ServerView
    sent: set[str] = dataclasses.field(default_factory=set)
    closed: bool = False
    """Whether the router has closed both connections."""
    decoded_at: float | None = None

    def sides(self) -> tuple[tuple[str, ServerView], ...]:
        """Both halves, by role."""
        return (("prefill", self.prefill), ("decode", self.decode))

    @property
    def over(self) -> bool:
        """Whether neither server works on the request any more, so that the room may be reused."""
        return all(map(self._over, self.sides()))

    def _over(self, side: tuple[str, ServerView]) -> bool:
        role, server = side
        if server.dead:
            return True
        half = server.half(self.rid)
        return (half is not None and half.finish is not None) or (self.closed and role not in self.sent)


@dataclasses.dataclass(slots=True)
class Client:
    """A client waiting for its request."""

    index: int
    prompt: Prompt
    began_at: float
    num_tries: int = 0
    num_mismatches: int = 0
    """Tries at a pair whose servers had different weights, which are not counted."""
    current: SimTry | None = None
    servers: list[ServerView] = dataclasses.field(default_factory=list)
    """Servers of all its tries."""
    again_at: float = 0.0
    avoid: list[ServerView] = dataclasses.field(default_factory=list)
    answer: ClientAnswer | None = None


class SimRouter:
    """Sends requests to pairs of `servers`, by role. `later` delays HTTP messages. Request ids begin with `prefix`."""

    def __init__(
        self,
        servers: Callable[[str], Sequence[ServerView]],
        later: Callable[[Callable[[], None]], None],
        clock: Clock,
        rng: random.Random,
        num_rooms: int,
        counts: Counter[str],
        prefix: str = "r",
    ) -> None:
        self._servers = servers
        self._later = later
        self._clock = clock
        self._rng = rng
        self._num_rooms = num_rooms
        self._counts = counts
        self._prefix = prefix
        self.clients: list[Client] = []
        self.open: list[Client] = []
        self.tries: list[SimTry] = []
        """Tries whose rooms are in use."""

    def begin(self, index: int, prompt: Prompt) -> Client:
        """Accept a client's request."""
        client = Client(index, prompt, self._clock.now())
        self.clients.append(client)
        self.open.append(client)
        return client

    def leave(self, client: Client) -> None:
        """Disconnect a client, which then receives no answer."""
        self._end(client, "the client went away")

    def step(self) -> None:
        """Process answers, close tries that are over, and start new tries."""
        now = self._clock.now()
        for client in list(self.open):
            if client.current is not None:
                self._judge(client, client.current, now)
            elif now >= client.again_at:
                self._try(client)
        for each in self.tries:
            decode = each.decode.half(each.rid)
            if each.closed or decode is None or decode.finish is None:
                continue
            each.decoded_at = now if each.decoded_at is None else each.decoded_at
            if now - each.decoded_at > GRACE_S:
                self._close(each)
        self.tries = [each for each in self.tries if not each.over]

    # ------------------------------------------------------------------ inside

    def _try(self, client: Client) -> None:
        taken = {each.room for each in self.tries}
        favourite = sum(client.prompt.tokens) % self._num_rooms  # a repeated prompt meets late messages of its past
        rooms = [room for room in range(self._num_rooms) if room not in taken]
        prefill, decode = self._choose("prefill", client), self._choose("decode", client)
        if not rooms or prefill is None or decode is None:
            return
        client.num_tries += 1
        self._counts["retries"] += client.num_tries > 1
        room = favourite if favourite in rooms else self._rng.choice(rooms)
        each = SimTry(client.index, f"{self._prefix}{client.index}.{client.num_tries}", room, prefill, decode)
        client.current = each
        client.servers += (prefill, decode)
        self.tries.append(each)
        spec = request(
            each.rid, client.prompt, RoomAddress(host=prefill.address[0], port=prefill.address[1], room=room)
        )
        for role, server in each.sides():
            self._later(lambda role=role, server=server: self._send(each, role, server, spec))  # type: ignore[misc]

    def _choose(self, role: str, client: Client) -> ServerView | None:
        usable = [server for server in self._servers(role) if not (server.dead or server.draining)]
        fresh = [server for server in usable if server not in client.avoid]
        return self._rng.choice(fresh or usable) if usable else None

    def _send(self, each: SimTry, role: str, server: ServerView, spec: GenerateRequest) -> None:
        if each.closed or server.dead:
            return
        each.sent.add(role)
        if server.role != role:
            server.refuse(each.rid)
            return
        server.post(spec)

    def _judge(self, client: Client, each: SimTry, now: float) -> None:
        """Act on a try's outcome, if there is one."""
        outcome = verdict.resolve_outcome(_prefill_half(each), _decode_half(each))
        match outcome:
            case None:
                return
            case WorkerStream():
                half = each.decode.half(each.rid)
                assert half is not None
                if half.finish is not None:
                    self._end(client, None if half.finish.type != "abort" else f"cut: {half.finish.err_type}")
                elif each.decode.dead:
                    self._counts["streams broken"] += 1
                    self._end(client, "the stream broke")
            case _:
                self._close(each)
                if _weights_differ(each):
                    self._counts["tries with different weights"] += 1
                    client.num_mismatches += 1
                    client.current, client.again_at = None, now + self._rng.uniform(0.0, 3.0)
                    return
                if verdict.retryable(outcome) and client.num_tries - client.num_mismatches < MAX_TRIES:
                    client.avoid.append(each.decode if outcome.worker is cast(Worker, each.decode) else each.prefill)
                    client.current, client.again_at = None, now + self._rng.uniform(0.0, 3.0)
                    return
                self._end(client, f"{outcome.status}" if isinstance(outcome, WorkerResponse) else "no connection")

    def _end(self, client: Client, error: str | None) -> None:
        assert client.answer is None, f"client {client.index} is answered twice"
        each = client.current
        half = None if each is None else each.decode.half(each.rid)
        took_s = self._clock.now() - client.began_at
        client.answer = ClientAnswer([] if half is None else list(half.tokens), error, client.num_tries, took_s)
        self.open.remove(client)
        if each is not None and error is not None:
            self._close(each)

    def _close(self, each: SimTry) -> None:
        """Close the connections of both halves."""
        if each.closed:
            return
        each.closed = True
        for role, server in each.sides():
            half = server.half(each.rid)
            if role in each.sent and not server.dead and (half is None or half.finish is None):
                self._later(lambda server=server: server.abort(each.rid))  # type: ignore[misc]


def _weights_differ(each: SimTry) -> bool:
    """Whether the pair's servers have different weights, as `outcome.weights_differ` says of an answer."""
    halves = (each.prefill.half(each.rid), each.decode.half(each.rid))
    return any(
        half is not None and half.finish is not None and half.finish.err_type == verdict.MISMATCH for half in halves
    )


def _prefill_half(each: SimTry) -> WorkerResponse | ConnectionFailed | None:
    half = each.prefill.half(each.rid)
    worker = cast(Worker, each.prefill)
    if half is not None and half.finish is not None:
        return WorkerResponse(worker, each.prefill.status(each.rid), CIMultiDict(), b"")
    return ConnectionFailed(worker, "closed") if each.prefill.dead else None


def _decode_half(each: SimTry) -> WorkerStream | WorkerResponse | ConnectionFailed | None:
    half = each.decode.half(each.rid)
    worker = cast(Worker, each.decode)
    if half is not None and half.tokens:
        return WorkerStream(worker, cast(aiohttp.ClientResponse, None), CIMultiDict(), b"")
    if half is not None and half.finish is not None:
        return WorkerResponse(worker, each.decode.status(each.rid), CIMultiDict(), b"")
    return ConnectionFailed(worker, "closed") if each.decode.dead else None
