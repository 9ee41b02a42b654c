"""Both schedulers run their loops in threads, over real zmq sockets, copy workers and memmove."""

from __future__ import annotations

import random
import threading

from pdserve.base.clock import MonotonicClock
from pdserve.memory.kv_memory import KVMemory, PageTable
from pdserve.protocol.messages import AbortRequest, GenerateRequest, RoomAddress
from pdserve.protocol.sampling import CoreSamplingParams
from pdserve.scheduler.context import SchedulerContext, StepLimits
from pdserve.scheduler.outbox import Outbox
from pdserve.scheduler.request import WaitingQueue
from pdserve.scheduler.roles.decode import DecodeRole
from pdserve.scheduler.roles.prefill import PrefillRole
from pdserve.scheduler.scheduler import Scheduler
from pdserve.sim.hash_lm import HashExecutor, hash_layout
from pdserve.sim.world import Prompt, Shape, monolith_tokens
from pdserve.transfer.transports.memory import MemoryHub
from tests.scheduler_threads import ADDRESS, DEADLINE_S, SchedulerThread, Served
from tests.waiting import wait_until

NUM_REQUESTS = 60
NUM_PAGES, NUM_ROWS, NUM_AUX = 48, 8, 8


class HashServer(SchedulerThread):
    """A scheduler in a thread, with everything real below it but the model."""

    def __init__(self, mode: str, hub: MemoryHub, served: Served) -> None:
        super().__init__(mode)
        table = PageTable(NUM_ROWS, NUM_PAGES)
        executor = HashExecutor(hash_layout(4), NUM_PAGES, table)
        memory = KVMemory(executor.layout, NUM_PAGES, table, NUM_AUX, on_free=executor.poison)
        context = SchedulerContext(memory, executor, Outbox(self.hear), MonotonicClock(), StepLimits(chunk_tokens=7))
        kv = self.make_kv(executor, NUM_AUX, hub, served, {"model": "hash"})
        waiting = WaitingQueue("fcfs", 10.0, context.memory)
        role = PrefillRole(context, kv, waiting) if mode == "prefill" else DecodeRole(context, kv, waiting)
        self.start(Scheduler(role, context, kv, self.mailbox))


def test_requests_and_hang_ups_over_real_threads_give_the_monoliths_tokens_and_leave_nothing() -> None:
    before = set(threading.enumerate())
    rng = random.Random(1)
    prompts = [
        Prompt(tuple(rng.randrange(999) for _ in range(rng.randint(1, 40))), rng.randint(1, 12))
        for _ in range(NUM_REQUESTS)
    ]
    expected = monolith_tokens(Shape(num_pages=48), prompts)
    hub, served = MemoryHub(), Served()
    servers = [HashServer("prefill", hub, served), HashServer("decode", hub, served)]
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
            server.wait_for([f"r{i}" for i in range(NUM_REQUESTS)])
        wait_until(lambda: not any(server.leaks() for server in servers), "all is free", DEADLINE_S)
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
