"""The store of a simulated world: shared by its servers, slow, forgetful and lying.

Jobs of a port end at random moments. A call that finds the store away ends the port's reads, as a breaker does. The
bytes of a read move at its end, unless the server has given up: then slots of the host tier are not touched. Objects
are real ones, with header and checksum, so that damage is found as in a server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pdserve.base.parallel import RankCoord
from pdserve.config.storage_options import StorageOptions
from pdserve.memory.layout import PageSpace
from pdserve.memory.page_keys import KeyNamespace
from pdserve.memory.tiers.host_memory import HostMemory
from pdserve.memory.tiers.prefix_ends import PageKey, PrefixEnds
from pdserve.memory.tiers.storage import HEADER_BYTES, Miss, ObjectId, check, object_bytes, rank_parts, seal
from pdserve.memory.tiers.storage_port import JobEnd, SlotBytes, StoragePort
from pdserve.scheduler.context import SchedulerContext
from pdserve.scheduler.storage_tier import StorageTier
from pdserve.sim.hash_sampling import HashDrafting
from pdserve.sim.network import SimNet
from pdserve.sim.shape import Shape


class SimStore:
    """Objects by key, and what goes wrong with them."""

    def __init__(self, net: SimNet) -> None:
        self._net, self.objects = net, net.objects

    def exists(self, keys: Sequence[str]) -> int:
        """Return how many leading keys there are, or a lie."""
        if self._net.happens("look-ups that name objects that are not there", self._net.faults.store_lies):
            return len(keys)
        return next((index for index, key in enumerate(keys) if key not in self.objects), len(keys))

    def put(self, identity: ObjectId, payload: memoryview) -> None:
        """Keep an object: not at all, damaged, cut short, or under another one's key, where that happens."""
        if self._net.happens("puts that are lost", self._net.faults.put_lost):
            return
        target = bytearray(object_bytes(len(payload)))
        seal(memoryview(target), identity, payload)
        if self._net.happens("stored objects that are damaged", self._net.faults.object_damaged):
            self._damage(target, identity)
        self.objects.setdefault(identity.key, bytes(target))

    def _damage(self, target: bytearray, identity: ObjectId) -> None:
        """Flip a bit, cut the object short, or take another one. Half of the latter are of another namespace."""
        rng, counts = self._net.rng, self._net.counts
        match rng.randrange(3):
            case 0 if len(target) > HEADER_BYTES:
                target[rng.randrange(HEADER_BYTES, len(target))] ^= 1 << rng.randrange(8)
                counts["stored objects with a flipped bit"] += 1
            case 0 | 1:  # a rank without layers of this space has only the header
                del target[rng.randrange(len(target)) :]
                counts["stored objects that are cut short"] += 1
            case _:
                own = namespace_of(identity.key)
                foreign = [key for key in sorted(self.objects) if namespace_of(key) != own]
                keys = foreign if foreign and rng.random() < 0.5 else sorted(self.objects)
                if keys:
                    stale = rng.choice(keys)
                    target[:] = self.objects[stale]
                    of = "key" if namespace_of(stale) == own else "namespace"
                    counts[f"stored objects of another {of} under the right name"] += 1


def namespace_of(key: str) -> str:
    """Return the part of a key that names the namespace."""
    return key.partition("-")[0]


class SimStoragePort:
    """Implements `StoragePort` for one rank of a simulated server. `wake` is called when a job has ended."""

    def __init__(
        self, net: SimNet, parts: Mapping[PageSpace, str], slot_bytes: SlotBytes, wake: Callable[[], None]
    ) -> None:
        self._store, self._net, self._parts, self._slot_bytes, self._wake = SimStore(net), net, parts, slot_bytes, wake
        self._num_started = 0
        self._running: set[int] = set()
        self._reads: set[int] = set()
        self._ended: list[JobEnd] = []

    def look_up(self, root: bytes, keys: Sequence[PageKey], ends: PrefixEnds | None = None) -> int:
        """See `StoragePort.look_up`."""

        def count(wanted: Sequence[PageKey]) -> int:
            return self._store.exists([identity.key for identity in self._ids(root, wanted)])

        return self._start(lambda: count(keys) if ends is None else ends.last(count(keys), count), reads=True)

    def get(self, root: bytes, keys: Sequence[PageKey], slots: Sequence[int]) -> int:
        """See `StoragePort.get`."""
        return self._start(lambda: self._read(root, keys, slots), reads=True)

    def put(self, root: bytes, keys: Sequence[PageKey], slots: Sequence[int]) -> int:
        """See `StoragePort.put`."""
        return self._start(lambda: self._write(root, keys, slots))

    def give_up(self, number: int, *, late: bool) -> None:
        """See `StoragePort.give_up`."""
        self._end(number, 0)

    def poll(self) -> Sequence[JobEnd]:
        """See `StoragePort.poll`."""
        ended, self._ended = self._ended, []
        return ended

    @property
    def num_pending(self) -> int:
        """See `StoragePort.num_pending`."""
        return len(self._running) + len(self._ended)

    def clear(self) -> None:
        """See `StoragePort.clear`."""
        self._store.objects.clear()

    def facts(self) -> Mapping[str, float | str]:
        """See `StoragePort.facts`."""
        return {}

    def _ids(self, root: bytes, keys: Sequence[PageKey]) -> list[ObjectId]:
        return [ObjectId(root, key.digest, self._parts[key.space]) for key in keys]

    def _start(self, work: Callable[[], int], *, reads: bool = False) -> int:
        self._num_started += 1
        number = self._num_started
        self._running.add(number)
        if reads:
            self._reads.add(number)
        away = self._net.happens("calls of a store that is away", self._net.faults.store_away)
        slow = self._net.happens("calls of a store that take long", self._net.faults.slow_store)

        def end() -> None:
            if number in self._running:  # else the server has given up
                self._end(number, 0 if away else work())
            for other in sorted(self._reads) if away else ():  # the breaker opens
                self._end(other, 0)

        self._net.later(end, min_delay_s=60.0 if slow else 0.0)
        return number

    def _end(self, number: int, num_pages: int) -> None:
        if number in self._running:
            self._running.remove(number)
            self._reads.discard(number)
            self._ended.append(JobEnd(number, num_pages))
            self._wake()

    def _read(self, root: bytes, keys: Sequence[PageKey], slots: Sequence[int]) -> int:
        for index, (identity, key, slot) in enumerate(zip(self._ids(root, keys), keys, slots, strict=True)):
            buffer = self._slot_bytes(key.space, slot)
            stored = memoryview(self._store.objects.get(identity.key, b""))
            miss = Miss.LENGTH if len(stored) != object_bytes(len(buffer)) else check(stored, identity)
            if miss is not None:
                self._net.counts[f"reads of the store without the object: {miss if stored else Miss.ABSENT}"] += 1
                return index
            buffer[:] = stored[HEADER_BYTES:]
        return len(keys)

    def _write(self, root: bytes, keys: Sequence[PageKey], slots: Sequence[int]) -> int:
        for identity, key, slot in zip(self._ids(root, keys), keys, slots, strict=True):
            self._store.put(identity, self._slot_bytes(key.space, slot))
        return len(keys)


def open_port(net: SimNet, host: HostMemory, coord: RankCoord, wake: Callable[[], None]) -> SimStoragePort:
    """Return the access of the rank at `coord` to the world's store; `host` has its slots."""
    return SimStoragePort(net, rank_parts(coord), host.slot, wake)


def add_store(
    context: SchedulerContext, shape: Shape, drafter: HashDrafting | None, open_own_port: Callable[[], StoragePort]
) -> None:
    """Put the world's store behind the host tier, where the shape has one.

    Pages have the draft KV of `drafter`, so its weights belong to the namespace.
    """
    tier, layout = context.tier, context.memory.layout
    if shape.storage is None or tier is None:
        return
    namespace = KeyNamespace(
        weights=f"{shape.model_weights}:{0 if drafter is None else drafter.weights}",
        weights_are_sampled=False,
        layout=layout.fingerprint(),
        dtype="uint64",
        page_tokens=layout.page_tokens,
    )
    tier.storage = StorageTier(
        open_own_port(),
        tier.pool,
        context.memory,
        namespace,
        context.clock,
        context.counters,
        options=StorageOptions(threshold_tokens=1, timeout_base_s=4.0, decode_stride=1),
        policy=shape.storage,
        stores_decode=True,
        state_grid=context.limits.state_grid,
    )
