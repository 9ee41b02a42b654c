"""One half of a prefill/decode pair that only transfers: pools, transport, copy workers, control socket, `KVManager`.

`bench_transfer` runs the sending half in its process, and the receiving one as `python -m benchmarks.transfer_side`.
Only the scheduler and the model are missing; a loop here does what a role does about transfers.

stdin of the receiving half: a JSON object a line, `{"first_room", "count", "num_pages", "window", "check"}`
stdout: `READY` and a JSON object; then for each line `DONE` and a JSON object
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import random
import sys
import time
import uuid
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from pdserve.base.clock import MonotonicClock
from pdserve.base.mailbox import Mailbox
from pdserve.base.parallel import SINGLE
from pdserve.memory import shared
from pdserve.memory.layout import KVLayout, attention_group
from pdserve.memory.lease import Lease, LeasePool, PageAllocator
from pdserve.transfer.aux import AuxRecord, MetadataBuffers
from pdserve.transfer.control import ZmqControlSocket
from pdserve.transfer.copy_workers import CopyWorkers
from pdserve.transfer.events import Address, PrefillFound, TransferEvent
from pdserve.transfer.manager import KVArgs, KVManager, KVReceiver, KVSender, TransferTimes
from pdserve.transfer.peers import SessionTimes
from pdserve.transfer.plan import rank_memory
from pdserve.transfer.registry import open_transport
from pdserve.transfer.room import KVPoll
from pdserve.transfer.transport import MemoryRegion
from pdserve.transfer.wire import TransferStats

HOST = "127.0.0.1"
ADDRESS: Address = (HOST, 1)
DIGEST = "benchmark"
PATIENCE_S = 30.0
GROUPS = {
    "smollm2-135m": (30, 3, 64),
    "llama-8b": (32, 8, 128),
    "tiny": (2, 2, 16),
}
"""Layers, KV heads and head size of each layout; bfloat16."""


def layout_of(name: str, page_tokens: int) -> KVLayout:
    """The layout called `name`."""
    num_layers, num_heads, head_dim = GROUPS[name]
    group = attention_group(
        name="kv",
        num_layers=num_layers,
        page_tokens=page_tokens,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        dtype="bfloat16",
    )
    return KVLayout((group,))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """Requests of one run: rooms `first_room` on, `num_pages` each, `window` of them at once."""

    first_room: int
    count: int
    num_pages: int
    window: int
    check: bool = False

    @property
    def rooms(self) -> range:
        """All rooms."""
        return range(self.first_room, self.first_room + self.count)


class KnownDirectory:
    """`Directory` that knows the one prefill server there is, and takes everybody to live."""

    def __init__(self, post: Callable[[TransferEvent], None], replica: tuple[str, str] | None) -> None:
        self._post = post
        self._replica = replica

    def find(self, address: Address) -> None:
        """Answers at once."""
        assert self._replica is not None, "senders look for nobody"
        self._post(PrefillFound(address, (self._replica,)))

    def probe(self, instance: str, endpoint: str) -> None:
        """Says nothing."""


class Side:
    """A half. `scattered`: pages are given out in random order, so that hardly two of a request are neighbours."""

    def __init__(
        self,
        stack: contextlib.ExitStack,
        backend: str,
        layout: KVLayout,
        num_pages: int,
        *,
        scattered: bool,
        replica: tuple[str, str] | None = None,
        seed: int = 0,
    ) -> None:
        self.layout = layout
        self.page_bytes = layout.groups[0].page_bytes
        self.mailbox: Mailbox[TransferEvent] = Mailbox()
        memory = shared.allocate(num_pages * self.page_bytes)
        self.region = MemoryRegion(shared.address_of(memory), num_pages * self.page_bytes)
        self.bytes = np.frombuffer(memory, dtype=np.uint8).reshape(num_pages, self.page_bytes)
        self.bytes[:] = np.random.default_rng(seed).integers(0, 256, self.page_bytes, dtype=np.uint8)
        self.bytes[:, :8] = np.arange(num_pages, dtype=np.uint64).view(np.uint8).reshape(num_pages, 8)
        aux = MetadataBuffers(256)
        self.pages, self.slots = (
            LeasePool(_allocator(num_pages, seed if scattered else None)),
            LeasePool(PageAllocator(256)),
        )
        self.transport = open_transport(backend, HOST, None)
        stack.callback(self.transport.close)
        self.transport.register([self.region, MemoryRegion(*aux.buffer)])
        self.instance = uuid.uuid4().hex
        socket = ZmqControlSocket(HOST)
        stack.callback(socket.close)
        self.mailbox.attach(socket)
        self.endpoint = socket.endpoint
        workers = CopyWorkers(self.transport, self.mailbox.post, 2)
        stack.callback(workers.close)
        args = KVArgs(
            instance=self.instance,
            layout=layout,
            ranks=(rank_memory(layout, SINGLE, "", [(self.region.address, self.region.num_bytes)]),),
            aux=aux,
            facts={"transfer_backend": backend},
            secret=self.instance,
        )
        times = TransferTimes(sessions=SessionTimes(heartbeat_s=3600.0))  # the halves stand still between runs
        directory = KnownDirectory(self.mailbox.post, replica)
        self.kv = KVManager(args, socket, workers, directory, MonotonicClock(), times)

    def checksum(self, pages: list[int]) -> int:
        """Of the bytes of `pages`, in their order."""
        total = 0
        for page in pages:
            total = zlib.crc32(self.bytes[page], total)
        return total

    def moved(self) -> Iterator[list[int]]:
        """What a scheduler does each step; ends with an error when nothing has moved for long."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            for event in self.mailbox.drain():
                self.kv.handle(event)
            self.kv.tick()
            rooms = [*self.kv.drain_state_changes(sending=True), *self.kv.drain_state_changes(sending=False)]
            if rooms:
                deadline = time.monotonic() + PATIENCE_S
            yield rooms
            self.mailbox.wait(0.05)
        raise TimeoutError(f"nothing has moved for {PATIENCE_S:g} s: {self.kv.counts()}")

    def lease(self, num_pages: int) -> tuple[Lease, Lease]:
        """Pages and an aux slot; the window is such that there are enough."""
        lease, slot = self.pages.reserve(num_pages), self.slots.reserve(1)
        assert lease is not None and slot is not None
        return lease, slot


@dataclasses.dataclass(frozen=True)
class Sent:
    """By room: the moment at which it was decided to send, of the clock that all processes share; and a checksum."""

    at: dict[int, float]
    sums: dict[int, int]


def send_all(side: Side, load: Load, start: Callable[[], None]) -> Sent:
    """The sending half of a run: open all rooms, call `start`, send to whoever comes."""
    open_rooms = {room: side.kv.open_sender(room, HOST, DIGEST) for room in load.rooms}
    leases: dict[int, tuple[Lease, Lease]] = {}
    sums: dict[int, int] = {}
    sent_at: dict[int, float] = {}
    start()
    for rooms in side.moved():
        for room in rooms:
            sender: KVSender = open_rooms[room]
            state = sender.poll()
            if state is KVPoll.FAILED:
                raise RuntimeError(f"room {room}: {sender.failure}")
            if state is KVPoll.WAITING_FOR_INPUT:
                lease, slot = leases[room] = side.lease(load.num_pages)
                if load.check:
                    sums[room] = side.checksum(lease.pages)
                sent_at[room] = time.perf_counter()
                record = AuxRecord(room, 0, first_token=1)
                sender.finish(slot, record, TransferStats(), lease=lease, num_pages=load.num_pages)
            elif state is KVPoll.SUCCESS:
                for held in leases.pop(room):
                    held.drop("request")
                open_rooms.pop(room).close()
        if not open_rooms and side.kv.quiet:
            return Sent(sent_at, sums)
    raise AssertionError


def receive_all(side: Side, load: Load) -> dict[str, Any]:
    """The receiving half: `window` rooms are published at any time.

    Returns:
        `seconds` from the first publication to the last success, `write_s` of them within the transport, `landed`,
        each room's moment of success, and `sums` as asked for.
    """
    waiting = iter(load.rooms)
    live: dict[int, tuple[KVReceiver, Lease, Lease]] = {}
    published: set[int] = set()
    landed, sums, write_s = {}, {}, 0.0
    began = time.perf_counter()

    def open_next() -> None:
        room = next(waiting, None)
        if room is not None:
            receiver = side.kv.open_receiver(room, ADDRESS, DIGEST)
            live[room] = (receiver, *side.lease(load.num_pages))
            publish(room)

    def publish(room: int) -> None:
        receiver, lease, slot = live[room]
        if receiver.poll() is KVPoll.WAITING_FOR_INPUT and room not in published:  # only the first waits for a session
            published.add(room)
            receiver.publish(lease, slot)

    for _ in range(load.window):
        open_next()
    for rooms in side.moved():
        for room in rooms:
            receiver, lease, slot = live[room]
            state = receiver.poll()
            if state is KVPoll.FAILED:
                raise RuntimeError(f"room {room}: {receiver.failure}")
            publish(room)
            if state is KVPoll.SUCCESS:
                landed[room] = time.perf_counter()
                assert receiver.take(slot) is not None
                write_s += receiver.stats.write_s
                if load.check:
                    sums[room] = side.checksum(lease.pages)
                receiver.close()
                lease.drop("request")
                slot.drop("request")
                del live[room]
                open_next()
        if not live:
            seconds = time.perf_counter() - began
            side.kv.flush()  # we stand still now
            return {"seconds": seconds, "write_s": write_s, "landed": landed, "sums": sums}
    raise AssertionError


def _allocator(num_pages: int, seed: int | None) -> PageAllocator:
    allocator = PageAllocator(num_pages)
    if seed is not None:
        pages = allocator.take(num_pages)
        assert pages is not None
        random.Random(seed).shuffle(pages)
        allocator.give_back(pages)
    return allocator


def main() -> None:
    """Be the receiving half until stdin closes."""
    parser = argparse.ArgumentParser()
    for name in ("--backend", "--layout", "--instance", "--endpoint"):
        parser.add_argument(name, required=True)
    parser.add_argument("--page-tokens", type=int, required=True)
    parser.add_argument("--num-pages", type=int, required=True)
    parser.add_argument("--scattered", action="store_true")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        replica = (args.instance, args.endpoint)
        layout = layout_of(args.layout, args.page_tokens)
        side = Side(stack, args.backend, layout, args.num_pages, scattered=args.scattered, replica=replica, seed=1)
        ready = {"address": side.transport.address(), "start": side.region.address}
        print("READY " + json.dumps(ready), flush=True)
        for line in sys.stdin:
            print("DONE " + json.dumps(receive_all(side, Load(**json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()
