"""Both schedulers run their loops in threads, over real zmq sockets, copy workers and memmove."""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from collections.abc import Callable

from pdserve.base.clock import MonotonicClock
from pdserve.base.mailbox import Mailbox
from pdserve.base.parallel import SINGLE
from pdserve.memory.kv_memory import KVMemory, PageTable
from pdserve.protocol.messages import (
    AbortRequest,
    EngineState,
    FinishReason,
    GenerateRequest,
    OutputBatch,
    RoomAddress,
    Shutdown,
    StateQuery,
    StateReply,
    ToApi,
)
from pdserve.protocol.sampling import CoreSamplingParams
from pdserve.scheduler.context import Outbox, SchedulerContext, StepLimits
from pdserve.scheduler.request import WaitingQueue
from pdserve.scheduler.roles.decode import DecodeRole
from pdserve.scheduler.roles.prefill import PrefillRole
from pdserve.scheduler.scheduler import Event, Scheduler
from pdserve.sim.hash_lm import HashExecutor, hash_layout
from pdserve.sim.world import Prompt, Shape, monolith_tokens
from pdserve.transfer.aux import MetadataBuffers
from pdserve.transfer.control import ZmqControlSocket
from pdserve.transfer.copy_workers import CopyWorkers
from pdserve.transfer.events import Address, PeerListens, PrefillFound
from pdserve.transfer.manager import KVArgs, KVManager, TransferTimes
from pdserve.transfer.plan import rank_memory
from pdserve.transfer.transport import MemoryRegion
from pdserve.transfer.transports.memory import MemoryHub, MemoryTransport
from tests.waiting import wait_until

DEADLINE_S = 60.0
NUM_REQUESTS = 60
NUM_PAGES, NUM_ROWS, NUM_AUX = 48, 8, 8
ADDRESS: Address = ("prefill", 1)


class LocalDirectory:
    """Everybody is where the test says, and listens."""

    def __init__(self, served: dict[Address, tuple[str, str]], post: Callable[[Event], None]) -> None:
        self._served, self._post = served, post

    def find(self, address: Address) -> None:
        self._post(PrefillFound(address, (self._served[address],)))

    def probe(self, instance: str, endpoint: str) -> None:
        self._post(PeerListens(instance))


class Server:
    """A scheduler in a thread, with everything real below it but the model."""

    def __init__(self, mode: str, hub: MemoryHub, served: dict[Address, tuple[str, str]]) -> None:
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.finish: dict[str, FinishReason] = {}
        self._states: list[EngineState] = []
        self._heard = threading.Condition()
        table = PageTable(NUM_ROWS, NUM_PAGES)
        executor = HashExecutor(hash_layout(4), NUM_PAGES, table)
        memory = KVMemory(executor.layout, NUM_PAGES, table, NUM_AUX, on_free=executor.poison)
        context = SchedulerContext(memory, executor, Outbox(self._hear), MonotonicClock(), StepLimits(chunk_tokens=7))
        self.mailbox: Mailbox[Event] = Mailbox()
        aux = MetadataBuffers(NUM_AUX, shareable=False)
        self._transport = MemoryTransport(hub)
        self._transport.register([MemoryRegion(*buffer) for buffer in (*executor.buffers, aux.buffer)])
        self._socket = ZmqControlSocket("127.0.0.1")
        self.mailbox.attach(self._socket)
        self._workers = CopyWorkers(self._transport, self.mailbox.post, num_threads=2)
        args = KVArgs(
            instance=mode,
            layout=executor.layout,
            ranks=(rank_memory(executor.layout, SINGLE, "", executor.buffers),),
            aux=aux,
            facts={"model": "hash"},
            token="t",
            secret=mode,
        )
        kv = KVManager(
            args, self._socket, self._workers, LocalDirectory(served, self.mailbox.post), context.clock, TransferTimes()
        )
        if mode == "prefill":
            served[ADDRESS] = (mode, self._socket.endpoint)
        waiting = WaitingQueue("fcfs", 10.0, context.memory)
        role = PrefillRole(context, kv, waiting) if mode == "prefill" else DecodeRole(context, kv, waiting)
        self._thread = threading.Thread(target=Scheduler(role, context, kv, self.mailbox).run, name=mode)
        self._thread.start()

    def state(self) -> EngineState:
        """Ask, and wait for the answer."""
        with self._heard:
            count = len(self._states)
            self.mailbox.post(StateQuery(query_id="q"))
            assert self._heard.wait_for(lambda: len(self._states) > count, DEADLINE_S), "the scheduler is dead"
            return self._states[-1]

    def wait_for(self, count: int) -> None:
        """Until `count` requests have ended."""
        with self._heard:
            assert self._heard.wait_for(lambda: len(self.finish) >= count, DEADLINE_S), len(self.finish)

    def close(self) -> None:
        self.mailbox.post(Shutdown())
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()
        self._socket.close()
        self._workers.close()
        self._transport.close()

    def _hear(self, message: ToApi) -> None:
        with self._heard:
            if isinstance(message, StateReply):
                self._states.append(message.state)
            elif isinstance(message, OutputBatch):
                for output in message.outputs:
                    self.tokens[output.rid] += output.token_ids
                    if output.finish is not None:
                        self.finish[output.rid] = output.finish
            self._heard.notify_all()


def _all_free(state: EngineState) -> bool:
    memory = state.memory
    live = ("rooms_live", "reqs_live", "keys_writing", "keys_published", "keys_early", "control_unacked")
    return all(memory[f"{n}_free"] == memory[f"{n}_total"] for n in ("pages", "rows", "aux")) and not any(
        memory[name] for name in live
    )


def test_requests_and_hang_ups_over_real_threads_give_the_monoliths_tokens_and_leave_nothing() -> None:
    before = set(threading.enumerate())
    rng = random.Random(1)
    prompts = [
        Prompt(tuple(rng.randrange(999) for _ in range(rng.randint(1, 40))), rng.randint(1, 12))
        for _ in range(NUM_REQUESTS)
    ]
    expected = monolith_tokens(Shape(num_pages=48), prompts)
    hub, served = MemoryHub(), dict[Address, tuple[str, str]]()
    servers = [Server("prefill", hub, served), Server("decode", hub, served)]
    try:
        for i, prompt in enumerate(prompts):
            request = GenerateRequest(
                rid=f"r{i}",
                input_ids=list(prompt.tokens),
                sampling=CoreSamplingParams(max_new_tokens=prompt.max_new_tokens, temperature=0.0),
                room=RoomAddress(host=ADDRESS[0], port=ADDRESS[1], room=i),
            )
            for server in rng.sample(servers, 2):
                server.mailbox.post(request)
            if i % 10 == 9:
                rid = f"r{i - rng.randrange(10)}"
                for server in servers:  # as a router does whose client hung up
                    server.mailbox.post(AbortRequest(rid=rid))
        for server in servers:
            server.wait_for(NUM_REQUESTS)
        wait_until(lambda: all(_all_free(server.state()) for server in servers), "all is free", DEADLINE_S)
        decode = servers[1]
        aborted = [rid for rid, finish in decode.finish.items() if finish.type == "abort"]
        assert len(aborted) <= NUM_REQUESTS // 10
        for i, tokens in enumerate(expected):
            if f"r{i}" not in aborted:
                assert decode.tokens[f"r{i}"] == tokens
        assert decode.state().counters.get("peers_lost", 0) == 0
    finally:
        for server in servers:
            server.close()
    assert set(threading.enumerate()) <= before, "threads are left"
