"""A prefill and a decode server in one process, seeded, on a simulated network. `cluster` adds servers and a router."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from pdserve.base.clock import ManualClock
from pdserve.protocol.messages import AbortRequest, RoomAddress
from pdserve.scheduler.kv_checksum import WriteLine
from pdserve.sim.network import Faults, SimNet
from pdserve.sim.node import SimNode, monolith_halves, monolith_tokens
from pdserve.sim.shape import Prompt, RequestHalf, Shape, request

__all__ = ["Prompt", "RequestHalf", "Shape", "SimNode", "World", "monolith_halves", "monolith_tokens", "request"]


class World:
    """One prefill and one decode server, a workload, and faults. `write_kv_line`: see `SimNode`.

    Tests override `make_node` and `misfortune`.
    """

    ADDRESS = ("prefill", 1)

    def __init__(self, seed: int, shape: Shape, faults: Faults, *, write_kv_line: WriteLine | None = None) -> None:
        self.clock = ManualClock()
        self.net = SimNet(seed, self.clock, faults)
        self.rng = self.net.rng
        self.shape = shape
        self._write_kv_line = write_kv_line
        self._births = itertools.count()
        self.dead: list[SimNode] = []
        self.prefill = self._start("prefill")
        self.decode = self._start("decode")
        self.num_aborts = 0
        self.num_kills = 0

    def run(self, prompts: Sequence[Prompt], num_rooms: int, max_steps: int = 60_000) -> list[RequestHalf | None]:
        """Play the workload to its end. Returns each prompt's decode half; None when its server was killed.

        Rooms are drawn from a few numbers and reused as soon as both halves have ended. A repeated prompt prefers its
        first room, so that late messages of the first use meet the second.
        """
        todo = list(enumerate(prompts))
        rooms: dict[int, tuple[int, SimNode, SimNode]] = {}
        results: list[RequestHalf | None] = [None] * len(prompts)
        for _ in range(max_steps):
            self.clock.advance(0.25)
            self.net.deliver()
            free = [room for room in range(num_rooms) if room not in rooms]
            if todo and free and self.rng.random() < 0.7:
                index, prompt = todo.pop()
                favourite = sum(prompt.tokens) % num_rooms
                room = favourite if favourite in free else self.rng.choice(free)
                rooms[room] = (index, self.prefill, self.decode)
                self._launch(index, prompt, room)
            self.misfortune(rooms)
            for node in (self.prefill, self.decode):
                if self.rng.random() < 0.6:
                    node.step()
            for room, (index, prefill, decode) in list(rooms.items()):
                if self._ended(prefill, index) and self._ended(decode, index):
                    results[index] = None if decode in self.dead else decode.halves[f"r{index}"]
                    del rooms[room]
            nodes = (self.prefill, self.decode)
            ended = all(node.idle and not node.num_unfenced for node in nodes) and not self.net.busy
            if ended and not todo and not rooms:
                return results
        raise AssertionError(
            f"stuck after {max_steps} steps: rooms {rooms}, leaks {self.prefill.leaks()} {self.decode.leaks()}"
        )

    def make_node(self, mode: str, endpoint: str, instance: str) -> SimNode:
        """Make a new server, which peers reach at `endpoint`."""
        return SimNode(mode, self.shape, self.net, endpoint, instance, write_kv_line=self._write_kv_line)

    def misfortune(self, rooms: dict[int, tuple[int, SimNode, SimNode]]) -> None:
        """Abort requests and kill servers at random. `rooms`: the index of each running request, and its servers."""
        faults = self.net.faults
        if rooms and self.rng.random() < faults.abort:
            index, prefill, decode = self.rng.choice(list(rooms.values()))
            sides = self.rng.choice(((prefill,), (decode,), (prefill, decode)))
            self.num_aborts += 1
            for node in sides:
                node.mailbox.post(AbortRequest(rid=f"r{index}"))
        if self.rng.random() < faults.kill:
            self.num_kills += 1
            victim = self.rng.choice((self.prefill, self.decode))
            self.dead.append(victim)
            victim.die()
            if victim is self.prefill:
                self.prefill = self._start("prefill")
            else:
                self.decode = self._start("decode")

    # ------------------------------------------------------------------ inside

    def _start(self, mode: str) -> SimNode:
        number = next(self._births)
        node = self.make_node(mode, f"{mode}:{number}", f"{mode}-{number}")
        if mode == "prefill":
            self.net.served[self.ADDRESS] = ((node.instance, node.endpoint),)
        return node

    def _launch(self, index: int, prompt: Prompt, room: int) -> None:
        """Act as the router: send the same request to both servers, at different moments."""
        address = RoomAddress(host=self.ADDRESS[0], port=self.ADDRESS[1], room=room)
        for node in (self.prefill, self.decode):
            spec = request(f"r{index}", prompt, address)
            self.net.later(lambda node=node, spec=spec: node.mailbox.post(spec))  # type: ignore[misc]

    def _ended(self, node: SimNode, index: int) -> bool:
        half = node.halves.get(f"r{index}")
        return node in self.dead or (half is not None and half.finish is not None)
