"""A scheduler in a thread, for tests of pairs in one process: zmq sockets, and a transport that copies memory."""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from pdserve.base.clock import MonotonicClock
from pdserve.base.mailbox import Mailbox
from pdserve.base.parallel import SINGLE
from pdserve.executor.interface import Executor
from pdserve.protocol.engine_state import EngineState
from pdserve.protocol.messages import (
    Command,
    CommandReply,
    FinishReason,
    OutputBatch,
    Shutdown,
    StateQuery,
    StateReply,
    ToApi,
    TokenLogprob,
)
from pdserve.scheduler.scheduler import Event, Scheduler
from pdserve.transfer.aux import MetadataBuffers
from pdserve.transfer.control import ZmqControlSocket
from pdserve.transfer.copy_workers import CopyWorkers
from pdserve.transfer.events import Address, PeerListens, PrefillFound
from pdserve.transfer.manager import KVArgs, KVManager, TransferTimes
from pdserve.transfer.plan import rank_memory
from pdserve.transfer.transport import MemoryRegion
from pdserve.transfer.transports.memory import MemoryHub, MemoryTransport

DEADLINE_S = 120.0
ADDRESS: Address = ("prefill", 1)
Served = dict[Address, tuple[str, str]]
"""By address, a prefill server's instance and control endpoint."""


class LocalDirectory:
    """Finds prefill servers in `served`. All of them listen."""

    def __init__(self, served: Served, post: Callable[[Event], None]) -> None:
        self._served, self._post = served, post

    def find(self, address: Address) -> None:
        self._post(PrefillFound(address, (self._served[address],)))

    def probe(self, instance: str, endpoint: str) -> None:
        self._post(PeerListens(instance))


class SchedulerThread:
    """Runs one scheduler, and keeps what it answers: `tokens`, their `logprobs` and `finish` by request id.

    Call `start` with a scheduler that posts to `hear`, and reads `mailbox`.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.mailbox: Mailbox[Event] = Mailbox()
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.logprobs: dict[str, list[TokenLogprob]] = defaultdict(list)
        self.finish: dict[str, FinishReason] = {}
        self.stack = contextlib.ExitStack()
        """Closed after the scheduler has ended."""
        self._states: list[EngineState] = []
        self._replies: dict[str, CommandReply] = {}
        self._heard = threading.Condition()
        self._thread: threading.Thread | None = None

    def make_kv(
        self,
        executor: Executor,
        num_aux: int,
        hub: MemoryHub,
        served: Served,
        facts: Mapping[str, str],
        *,
        draft_facts: Mapping[str, str | int] | None = None,
        draft_hidden_bytes: int | None = None,
    ) -> KVManager:
        """Make the transfer manager of this scheduler. A scheduler named "prefill" is put into `served`."""
        aux = MetadataBuffers(num_aux, shareable=False, draft_hidden_bytes=draft_hidden_bytes)
        transport = MemoryTransport(hub)
        transport.register([MemoryRegion(*buffer) for buffer in (*executor.buffers, aux.buffer)])
        socket = ZmqControlSocket("127.0.0.1")
        self.mailbox.attach(socket)
        workers = CopyWorkers(transport, self.mailbox.post, num_threads=2)
        for close in (transport.close, workers.close, socket.close):
            self.stack.callback(close)
        args = KVArgs(
            instance=self.name,
            layout=executor.layout,
            ranks=(rank_memory(executor.layout, SINGLE, "", executor.buffers),),
            aux=aux,
            facts=dict(facts),
            draft_facts=draft_facts or {},
            token="t",
            secret=self.name,
        )
        if self.name == "prefill":
            served[ADDRESS] = (self.name, socket.endpoint)
        directory = LocalDirectory(served, self.mailbox.post)
        return KVManager(args, socket, workers, directory, MonotonicClock(), TransferTimes())

    def start(self, scheduler: Scheduler) -> None:
        """Run `scheduler` in a thread."""
        self._thread = threading.Thread(target=scheduler.run, name=self.name, daemon=True)
        self._thread.start()

    def state(self) -> EngineState:
        """Ask for the scheduler's state, and wait for it."""
        with self._heard:
            count = len(self._states)
            self.mailbox.post(StateQuery(query_id="q"))
            assert self._heard.wait_for(lambda: len(self._states) > count, DEADLINE_S), "the scheduler is dead"
            return self._states[-1]

    def command(self, command: Command) -> CommandReply:
        """Send a command, whose `query_id` is new, and wait for its reply."""
        with self._heard:
            self.mailbox.post(command)
            answered = self._heard.wait_for(lambda: command.query_id in self._replies, DEADLINE_S)
            assert answered, "the scheduler is dead"
            return self._replies[command.query_id]

    def wait_for(self, rids: Sequence[str]) -> None:
        """Wait until these requests have ended."""
        with self._heard:
            ended = self._heard.wait_for(lambda: all(rid in self.finish for rid in rids), DEADLINE_S)
        assert ended, f"{len(self.finish)} of {len(rids)} requests have ended"

    def leaks(self) -> dict[str, int]:
        """Return by name memory that is not free, rooms that live, and transfers that have not ended."""
        memory = self.state().memory
        names = [name.removesuffix("_total") for name in memory if name.endswith("_total")]
        lost = {name: memory[f"{name}_total"] - memory[f"{name}_free"] for name in names}
        lost["pages"] -= memory["pages_evictable"]
        for name in ("slots", "window_pages"):
            lost[name] = lost.get(name, 0) - memory.get(f"{name}_cached", 0)
        live = ("rooms_live", "reqs_live", "keys_writing", "keys_published", "keys_early", "control_unacked")
        lost |= {name: memory[name] for name in live if name in memory}
        return {name: count for name, count in lost.items() if count}

    def close(self) -> None:
        """End the scheduler and free what it has."""
        self.mailbox.post(Shutdown())
        if self._thread is not None:
            self._thread.join(DEADLINE_S)
            assert not self._thread.is_alive()
        self.stack.close()

    def hear(self, message: ToApi) -> None:
        """Take what the scheduler sends."""
        with self._heard:
            if isinstance(message, StateReply):
                self._states.append(message.state)
            elif isinstance(message, CommandReply):
                self._replies[message.query_id] = message
            elif isinstance(message, OutputBatch):
                for output in message.outputs:
                    self.tokens[output.rid] += output.token_ids
                    self.logprobs[output.rid] += output.logprobs or []
                    if output.finish is not None:
                        self.finish[output.rid] = output.finish
            self._heard.notify_all()
