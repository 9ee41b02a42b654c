"""One process lifetime of a server of a `Cluster`: its replicas behind one address, as the router sees them."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.protocol.failure import MIGRATED
from pdserve.protocol.messages import AbortRequest, FinishReason, GenerateRequest, RedirectReceiver
from pdserve.sim.network import SimNet
from pdserve.sim.node import MachineClock, SimNode
from pdserve.sim.shape import RequestHalf


class SessionHistory:
    """The control sessions of a replica, by instance and number. An ended session must not begin again."""

    def __init__(self, node: SimNode, net: SimNet) -> None:
        self._node, self._net = node, net
        self._living: set[tuple[str, int]] = set()
        self._ended: set[tuple[str, int]] = set()

    def look(self) -> None:
        """Check the sessions; called after each turn of the scheduler. Raises AssertionError."""
        kv = self._node.kv
        living = {(peer.instance, peer.session) for peer in kv.sessions} if kv is not None else set()
        if living == self._living:
            return
        again = living & self._ended
        assert not again, f"{self._node.instance}: ended sessions have begun again: {again}"
        known = {instance for instance, _ in self._ended}
        returned = [instance for instance, _ in living - self._living if instance in known]
        self._net.counts["peers that came back after their session had ended"] += len(returned)
        self._ended |= self._living - living
        self._living = living


class SimServer:
    """One process lifetime of a server on `host`: its replicas, and the replica of each request."""

    def __init__(
        self, role: str, host: str, clock: MachineClock, replicas: Sequence[SimNode], net: SimNet, redirect: float
    ) -> None:
        """`redirect` is the probability that a prefill replica other than the one the room names gets a request."""
        self.role, self.host, self.clock = role, host, clock
        self.replicas = list(replicas)
        self.address = (host, 1)
        self.dead = False
        self.draining = False
        self.stopped_until = 0.0
        self._cut: set[str] = set()
        self._histories = [SessionHistory(node, net) for node in self.replicas]
        self._net = net
        self._redirect = redirect
        self._whose: dict[str, SimNode] = {}
        self._refused: dict[str, RequestHalf] = {}
        """Requests that came for a role that the server does not have any more."""

    def post(self, spec: GenerateRequest) -> None:
        """See `ServerView`. As `ReplicatedChannel`: a room names a prefill replica, but another may get the request."""
        net, number = self._net, len(self.replicas)
        named = 0 if spec.room is None else spec.room.room % number
        chosen = named if self.role == "prefill" else net.rng.randrange(number)
        if self.role == "prefill" and number > 1 and net.happens("diverts", self._redirect):
            chosen = (named + 1) % number
            assert spec.room is not None
            redirect = RedirectReceiver(room=spec.room.room, input_ids=spec.input_ids, replica=chosen)
            net.later(lambda: self.replicas[named].mailbox.post(redirect))
        self._whose[spec.rid] = self.replicas[chosen]
        self.replicas[chosen].mailbox.post(spec)

    def take_role(self, role: str) -> None:
        """Serve in `role`: all replicas have it. A prefill server is found at its address, under new instances."""
        self.role = role
        if role == "prefill":
            self._net.served[self.address] = tuple((node.instance, node.endpoint) for node in self.replicas)
        else:
            self._net.served.pop(self.address, None)

    def refuse(self, rid: str) -> None:
        """See `ServerView`."""
        self._refused[rid] = RequestHalf(finish=FinishReason(type="abort", status_code=503, err_type="wrong_role"))

    def abort(self, rid: str) -> None:
        """See `ServerView`."""
        if rid in self._refused:
            return
        self._whose[rid].mailbox.post(AbortRequest(rid=rid))

    def abort_all(self) -> None:
        """Abort all running requests after the drain timeout. Clients get status 503, which lets them retry."""
        self._cut |= {rid for node in self.replicas for rid in node.scheduler.role.live}
        for node in self.replicas:
            node.mailbox.post(AbortRequest(rid=None))

    def has(self, rid: str) -> bool:
        """Whether a request of that name was sent here."""
        return rid in self._whose

    def node_of(self, rid: str) -> SimNode:
        """Return the replica that has a request."""
        return self._whose[rid]

    def raw_half(self, rid: str) -> RequestHalf | None:
        """Return the scheduler's output, with an end that clients do not see."""
        node = self._whose.get(rid)
        return None if node is None else node.halves.get(rid)

    def half(self, rid: str) -> RequestHalf | None:
        """See `ServerView`."""
        if rid in self._refused:
            return self._refused[rid]
        half = self.raw_half(rid)
        if half is not None and half.finish is not None and half.finish.err_type == MIGRATED.code:
            return RequestHalf(tokens=half.tokens)  # the API process does not pass this end on
        return half

    def status(self, rid: str) -> int:
        """See `ServerView`."""
        half = self.half(rid)
        assert half is not None and half.finish is not None, f"{rid} has not ended"
        if half.finish.type != "abort":
            return 200
        return 503 if rid in self._cut else half.finish.status_code or 500

    def step(self) -> None:
        """Run turns of the replicas' schedulers at random; fewer turns for idle replicas."""
        for node, history in zip(self.replicas, self._histories, strict=True):
            if node.lives and self._net.rng.random() < (0.25 if node.idle else 0.6):
                node.step()
                history.look()

    @property
    def idle(self) -> bool:
        """Whether every replica is idle, and no former peer may still write to its pages."""
        return all(node.idle and not node.num_unfenced for node in self.replicas)

    def die(self) -> None:
        """Kill all processes at once."""
        self.dead = True
        for node in self.replicas:
            node.die()
