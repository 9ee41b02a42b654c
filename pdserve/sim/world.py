"""A whole deployment in one process, seeded: prefill and decode schedulers on a simulated network, and the monolith.

The schedulers, roles, leases and transfer managers are the real ones; only clock, network, transport and model are not.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Sequence

from pdserve.base.clock import ManualClock
from pdserve.base.mailbox import Mailbox
from pdserve.config.groups import EvictionPolicy, LoadFailurePolicy, SchedulePolicy
from pdserve.memory.kv_memory import KVMemory
from pdserve.memory.page_table import PageTable
from pdserve.protocol.logprobs import Logprobs, PromptLogprobs
from pdserve.protocol.messages import (
    AbortRequest,
    CommandReply,
    EngineReady,
    FinishReason,
    GenerateRequest,
    OutputBatch,
    RoomAddress,
    StateReply,
    ToApi,
)
from pdserve.protocol.sampling import SamplingParams
from pdserve.scheduler.core import Core, Limits, Outbox
from pdserve.scheduler.roles.decode import DecodeRole
from pdserve.scheduler.roles.monolith import MonolithRole
from pdserve.scheduler.roles.prefill import PrefillRole
from pdserve.scheduler.scheduler import Event, Scheduler
from pdserve.scheduler.waiting import WaitingQueue
from pdserve.sim.hash_lm import HashExecutor, hash_layout
from pdserve.sim.network import Faults, Pool, SimCopyEngine, SimDirectory, SimNet, SimSocket
from pdserve.transfer.aux import MetadataBuffers
from pdserve.transfer.manager import KVArgs, KVManager, TransferTimes
from pdserve.transfer.sessions import SessionTimes
from pdserve.transfer.wire import RankMemory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of every server in the world."""

    page_tokens: int = 4
    num_pages: int = 24
    num_rows: int = 8
    num_aux: int = 6
    chunk_tokens: int | None = 5
    mixed_chunk_tokens: int | None = None
    saturation_tokens: int | None = None
    prefix_cache: bool = True
    decode_prefix_cache: bool = False
    eviction: EvictionPolicy = "lru"
    policy: SchedulePolicy = "fcfs"
    overlap: bool = False
    late: bool = False
    """The executor computes when a step is resolved, not when it is launched."""
    offload_pages: int = 0
    """Pages of host memory for retracted requests."""
    reserved_decode_tokens: int = 4
    layer_groups: int = 0
    notifies: bool = False
    """The transport tells the receiver of writes."""
    fences: bool = True
    """The transport can end what a peer writes; else only the death of the peer's process does."""
    load_failure_policy: LoadFailurePolicy = "fail"
    num_stages: int = 1
    """Steps under way at once, as where a model is split into so many stages."""


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One request of the workload."""

    tokens: tuple[int, ...]
    max_new_tokens: int
    priority: int = 0
    logprobs: Logprobs | None = None
    prior: tuple[int, ...] = ()
    """Output tokens of an earlier try."""


@dataclasses.dataclass(slots=True)
class Half:
    """What a client of one server has seen of one request."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    finish: FinishReason | None = None
    picked: list[list[float]] = dataclasses.field(default_factory=list)
    prompt_parts: list[PromptLogprobs] = dataclasses.field(default_factory=list)


class Node:
    """One server: a scheduler and everything below it. `mode` is null, prefill or decode."""

    def __init__(self, mode: str, shape: Shape, net: SimNet, endpoint: str, instance: str) -> None:
        self.mode, self.endpoint, self.instance = mode, endpoint, instance
        self.halves: dict[str, Half] = defaultdict(Half)
        layout = hash_layout(shape.page_tokens)
        table = PageTable(shape.num_rows, shape.num_pages)
        self.executor = HashExecutor(layout, shape.num_pages, table)
        self.executor.late = shape.late
        self.memory = KVMemory(
            layout,
            shape.num_pages,
            table,
            shape.num_aux,
            on_free=self.executor.poison,
            prefix_cache=shape.decode_prefix_cache if mode == "decode" else shape.prefix_cache,
            eviction=shape.eviction,
        )
        limits = Limits(
            chunk_tokens=shape.chunk_tokens,
            mixed_chunk_tokens=shape.mixed_chunk_tokens,
            saturation_tokens=shape.saturation_tokens,
            reserved_decode_tokens=shape.reserved_decode_tokens,
            offload_bytes=shape.offload_pages * layout.groups[0].page_bytes,
            prealloc_timeout_s=400.0,
            layer_groups=shape.layer_groups if mode == "prefill" else 0,
            num_stages=shape.num_stages,
        )
        core = Core(self.memory, self.executor, Outbox(self._hear), net.clock, limits)
        waiting = WaitingQueue(shape.policy, 10.0, self.memory)
        self.mailbox: Mailbox[Event] = Mailbox()
        self.kv: KVManager | None = None
        if mode == "null":
            self.scheduler = Scheduler(MonolithRole(core, waiting), core, None, self.mailbox, overlap=shape.overlap)
            return
        net.mailboxes[endpoint] = self.mailbox
        net.endpoints[instance] = endpoint
        aux = MetadataBuffers(shape.num_aux)
        pool, group = self.executor.buffers[0][0], layout.groups[0]
        net.pools[pool] = Pool(group.page_bytes, self.memory.pages.allocator)
        net.pools[aux.buffer[0]] = Pool(aux.slot_bytes, self.memory.aux.allocator)
        args = KVArgs(
            instance=instance,
            layout=layout,
            ranks=(RankMemory.of(endpoint, self.executor.buffers),),
            aux=aux,
            facts={"model": "hash"},
            secret=instance,
        )
        self.kv = KVManager(
            args,
            SimSocket(net, endpoint),
            SimCopyEngine(net, endpoint, lambda e: e in net.mailboxes, notifies=shape.notifies, fences=shape.fences),
            SimDirectory(net, endpoint),
            net.clock,
            TransferTimes(
                bootstrap_timeout_s=400.0, waiting_timeout_s=600.0, sessions=SessionTimes(heartbeat_s=5.0, misses=6)
            ),
        )
        role: PrefillRole | DecodeRole
        if mode == "prefill":
            role = PrefillRole(core, self.kv, waiting)
        else:
            role = DecodeRole(core, self.kv, waiting, load_failure_policy=shape.load_failure_policy)
        self.scheduler = Scheduler(role, core, self.kv, self.mailbox, overlap=shape.overlap)

    @property
    def idle(self) -> bool:
        """No request, no step under way, no transfer, nothing unsaid."""
        settled = self.scheduler.core.settled and not self.scheduler.role.live
        return settled and (self.kv is None or self.kv.quiet)

    def leaks(self) -> dict[str, int]:
        """What is not free although the node is idle; empty when all is well."""
        counts = self.memory.counts()
        counts["pages_free"] += counts["pages_evictable"]
        names = ("pages", "rows", "aux")
        lost = {name: counts[f"{name}_total"] - counts[f"{name}_free"] for name in names}
        lost |= dict.fromkeys(self.scheduler.audit(), 1)
        if self.kv is not None:
            lost |= self.kv.counts()
        return {name: count for name, count in lost.items() if count}

    def _hear(self, message: ToApi) -> None:
        match message:
            case OutputBatch(outputs=outputs):
                for output in outputs:
                    half = self.halves[output.rid]
                    assert half.finish is None, f"{output.rid}: output after its end"
                    assert output.cached_tokens <= output.prompt_tokens, output
                    half.tokens += output.token_ids
                    half.picked += [line.picked for line in output.logprobs or ()]
                    if output.prompt_logprobs is not None:
                        assert not half.tokens, f"{output.rid}: of the prompt after its first token"
                        half.prompt_parts.append(output.prompt_logprobs)
                    half.finish = output.finish
            case StateReply() | CommandReply() | EngineReady():
                pass


def monolith_tokens(shape: Shape, prompts: Sequence[Prompt]) -> list[list[int]]:
    """The tokens that an aggregated server gives for each prompt."""
    return [half.tokens for half in monolith_halves(shape, prompts)]


def monolith_halves(shape: Shape, prompts: Sequence[Prompt]) -> list[Half]:
    """All that an aggregated server gives for each prompt."""
    net = SimNet(0, ManualClock(), Faults())
    roomy = Shape(page_tokens=shape.page_tokens, num_pages=512, num_rows=64, prefix_cache=False)
    node = Node("null", roomy, net, "mono", "mono")
    for i, prompt in enumerate(prompts):
        node.mailbox.post(request(f"r{i}", prompt, None))
    for _ in range(100_000):
        node.scheduler.step()
        if node.idle:
            break
    assert node.idle and not node.leaks(), node.leaks()
    return [node.halves[f"r{i}"] for i in range(len(prompts))]


class World:
    """One prefill and one decode server, a workload, and faults."""

    ADDRESS = ("prefill", 1)

    def __init__(self, seed: int, shape: Shape, faults: Faults) -> None:
        self.clock = ManualClock()
        self.net = SimNet(seed, self.clock, faults)
        self.rng = self.net.rng
        self.shape = shape
        self._births = itertools.count()
        self.dead: list[Node] = []
        self.prefill = self._born("prefill")
        self.decode = self._born("decode")
        self.num_aborts = 0
        self.num_kills = 0

    def run(self, prompts: Sequence[Prompt], num_rooms: int, max_steps: int = 60_000) -> list[Half | None]:
        """Play the workload to its end; each prompt's decode half, None where its server was killed.

        Rooms are drawn from a few numbers and used again as soon as both halves have ended; a prompt that comes
        again prefers the room it had, so that late messages of the first use meet the second.
        """
        todo = list(enumerate(prompts))
        rooms: dict[int, tuple[int, Node, Node]] = {}
        results: list[Half | None] = [None] * len(prompts)
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
            self._misfortune(rooms)
            for node in (self.prefill, self.decode):
                if self.rng.random() < 0.6:
                    node.scheduler.step()
            for room, (index, prefill, decode) in list(rooms.items()):
                if self._ended(prefill, index) and self._ended(decode, index):
                    results[index] = None if decode in self.dead else decode.halves[f"r{index}"]
                    del rooms[room]
            if not todo and not rooms and self.prefill.idle and self.decode.idle and not self.net.busy:
                return results
        raise AssertionError(
            f"stuck after {max_steps} steps: rooms {rooms}, leaks {self.prefill.leaks()} {self.decode.leaks()}"
        )

    # ------------------------------------------------------------------ inside

    def _born(self, mode: str) -> Node:
        number = next(self._births)
        node = Node(mode, self.shape, self.net, f"{mode}:{number}", f"{mode}-{number}")
        if mode == "prefill":
            self.net.served[self.ADDRESS] = (node.instance, node.endpoint)
        return node

    def _launch(self, index: int, prompt: Prompt, room: int) -> None:
        """The router's part: the same request to both, at different moments."""
        address = RoomAddress(host=self.ADDRESS[0], port=self.ADDRESS[1], room=room)
        for node in (self.prefill, self.decode):
            spec = request(f"r{index}", prompt, address)
            self.net.later(lambda node=node, spec=spec: node.mailbox.post(spec))  # type: ignore[misc]

    def _misfortune(self, rooms: dict[int, tuple[int, Node, Node]]) -> None:
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
            del self.net.mailboxes[victim.endpoint]
            if victim is self.prefill:
                self.prefill = self._born("prefill")
            else:
                self.decode = self._born("decode")

    def _ended(self, node: Node, index: int) -> bool:
        half = node.halves.get(f"r{index}")
        return node in self.dead or (half is not None and half.finish is not None)


def request(rid: str, prompt: Prompt, room: RoomAddress | None) -> GenerateRequest:
    """A greedy request for one server."""
    sampling = SamplingParams(max_new_tokens=prompt.max_new_tokens, temperature=0.0)
    return GenerateRequest(
        rid=rid,
        input_ids=list(prompt.tokens),
        sampling=sampling,
        logprobs=prompt.logprobs,
        room=room,
        priority=prompt.priority,
        prior_output_ids=list(prompt.prior),
    )
