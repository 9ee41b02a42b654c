"""Bootstrap rooms: the states of a transfer, each side's room, and pages that a peer may still write. Scheduler thread.

A room changes its state through the pure function `advance`. `merge_ranks` gives the state over several ranks.

Pages whose addresses a peer knows are kept by key until no write can land there, independent of the request. They have
the hold `remote`, which drops in one of these cases:

- The sender has sent its final message (`TransferDone`, or a quiesced `TransferEnded`), and all its writes have landed.
- The sender redirects the key to another replica, and the same pages are published there under a new key.
- The sender's quiesced `Reset` ends the session, and engines do not notify.
- The session with the sender has ended and is fenced (`receiving_engines`).
- An operator has declared the sender dead (`KVManager.declare_dead`).
- The drain timeout has passed since a notification was found missing, or since a quiesced `Reset`.

Where engines notify, the engine of each rank confirms that writes have landed.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Iterable, Iterator, Sequence

from pdserve.base.clock import Clock
from pdserve.base.parallel import ParallelShape
from pdserve.memory.layout import KVGroup, KVLayout
from pdserve.memory.lease import Lease, numbers_to_move
from pdserve.protocol.failure import Failure
from pdserve.protocol.logprobs import PromptLogprobs
from pdserve.transfer.events import Address, CopyEngine, Notified
from pdserve.transfer.plan import pool_regions, state_facts
from pdserve.transfer.wire import (
    Hello,
    MemoryKey,
    StateFacts,
    TransferDone,
    TransferEnded,
    TransferInfo,
    TransferStats,
)


class KVPoll(enum.IntEnum):
    """State of a transfer. Ranks merge with MIN: one FAILED rank fails the transfer, else the slowest rank decides."""

    FAILED = 0
    BOOTSTRAPPING = 1
    WAITING_FOR_INPUT = 2
    TRANSFERRING = 3
    SUCCESS = 4


TERMINAL = frozenset({KVPoll.FAILED, KVPoll.SUCCESS})


def advance(current: KVPoll, new: KVPoll) -> KVPoll:
    """Return the state after a local event: states only move forward, terminal states stay, FAILED overrides live
    states.
    """
    if current in TERMINAL:
        return current
    return new if new is KVPoll.FAILED else max(current, new)


def merge_ranks(states: Iterable[KVPoll]) -> KVPoll:
    """Return the state of a transfer over all participating ranks: the minimum."""
    return min(states)


@dataclasses.dataclass(slots=True)
class RemoteWritable:
    """The pages of one key."""

    key: MemoryKey
    peer: str
    """Instance id of the sender; no other process can end the key."""
    receiver: str | None
    """Our receiving engines of the session; their fence ends the peer's writes. None: no engines."""
    leases: tuple[Lease, ...]
    num_pages: int
    """KV pages and aux slots that were sent to the peer; a lease may have more, which the peer must not write."""
    cached_tokens: int = 0
    """`TransferInfo.cached_tokens`."""
    drained_at: float | None = None
    """Time at which all writes in flight have drained; None: the pages do not wait for a drain."""
    final_message: TransferDone | TransferEnded | None = None
    """The sender's final message, after which it writes no more; None before."""
    orphan_at: float | None = None
    """When the pages were first seen without a request; None: a request has them."""
    at_ranks: list[KVPoll] = dataclasses.field(default_factory=list)
    """Since `final_message`: whether the writes have landed, for each local rank; one entry for all where engines do
    not notify.
    """


@dataclasses.dataclass(frozen=True, slots=True)
class WritableEnd:
    """End of a key: the sender's final message, and whether all its writes have landed at all ranks."""

    entry: RemoteWritable
    final_message: TransferDone | TransferEnded
    landed: bool


class RemoteWritablePages:
    """All keys that peers may write to. `num_ranks` counts the ranks of this replica."""

    def __init__(self, engine: CopyEngine, clock: Clock, num_ranks: int) -> None:
        self._engine = engine
        self._clock = clock
        self._num_notified = num_ranks if engine.notifies else 0
        """Ranks for which a final message must give a number of writes."""
        self._entries: dict[MemoryKey, RemoteWritable] = {}
        self._draining: dict[MemoryKey, RemoteWritable] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[RemoteWritable]:
        return iter(self._entries.values())

    def get(self, key: MemoryKey) -> RemoteWritable | None:
        """Return what is published under `key`; None when nothing is."""
        return self._entries.get(key)

    def add(self, entry: RemoteWritable) -> None:
        """Set the hold `remote` on pages that are about to be published."""
        for lease in entry.leases:
            lease.hold("remote")
        self._entries[entry.key] = entry

    def release(self, key: MemoryKey) -> None:
        """Free the pages of a key to which no write can land any more. Unknown keys are ignored."""
        self._draining.pop(key, None)
        entry = self._entries.pop(key, None)
        if entry is not None:
            for lease in entry.leases:
                lease.drop("remote")

    def end(self, message: TransferDone | TransferEnded) -> WritableEnd | None:
        """Apply the sender's final message; return the end of the key, or None while engines must be waited for.

        The first message counts: a quiesced `TransferEnded` may come with a `TransferDone`, in any order.
        """
        entry = self._entries.get(message.key)
        if entry is None or entry.final_message is not None:
            return None
        entry.final_message = message
        if len(message.notified) == self._num_notified or (isinstance(message, TransferEnded) and not message.notified):
            states = [self._at_rank(message.key, rank, count) for rank, count in enumerate(message.notified)]
            entry.at_ranks = states or [KVPoll.SUCCESS]
        else:
            entry.at_ranks = [KVPoll.FAILED]
        return self._ending(entry)

    def notified(self, event: Notified) -> WritableEnd | None:
        """Apply an engine's report that, at one local rank, all writes of a key have landed, or that some did not in
        time.
        """
        entry = self._entries.get(event.key)
        if entry is None or entry.final_message is None or entry.at_ranks[event.rank] is not KVPoll.TRANSFERRING:
            return None
        entry.at_ranks[event.rank] = KVPoll.FAILED if event.num_missing else KVPoll.SUCCESS
        return self._ending(entry)

    def fenced(self, receiver: str) -> None:
        """Free the pages published in the session of `receiver`: writes cannot land there any more."""
        for entry in [entry for entry in self._entries.values() if entry.receiver == receiver]:
            self.release(entry.key)

    def quiesced(self, receiver: str) -> None:
        """Handle the sender's promise to write no more in the session of `receiver`.

        Where engines notify, bytes that have left the sender may still land.
        """
        for entry in [entry for entry in self._entries.values() if entry.receiver == receiver]:
            if self._engine.notifies:
                self._start_drain(entry, self._engine.drain_timeout_s)
            else:
                self.release(entry.key)

    def oldest_orphan_s(self) -> float:
        """Age in seconds of the oldest pages that are kept for a peer without a request; 0.0 when there are none."""
        now = self._clock.now()
        for entry in self._entries.values():
            if entry.orphan_at is None and not any(lease.held_by("request") for lease in entry.leases):
                entry.orphan_at = now
        since = [entry.orphan_at for entry in self._entries.values() if entry.orphan_at is not None]
        return now - min(since, default=now)

    def tick(self) -> None:
        """Free pages whose writes in flight have drained."""
        now = self._clock.now()
        for entry in [
            entry for entry in self._draining.values() if entry.drained_at is None or now >= entry.drained_at
        ]:
            self.release(entry.key)

    def _at_rank(self, key: MemoryKey, rank: int, num_written: int) -> KVPoll:
        """Return the state of a key at one local rank, to which `num_written` writes went."""
        if not num_written or self._engine.expect(key, rank, num_written):
            return KVPoll.SUCCESS
        return KVPoll.TRANSFERRING

    def _ending(self, entry: RemoteWritable) -> WritableEnd | None:
        """Return the end of a key once all ranks have reported; the slowest rank decides.

        Its pages are freed then. Where a rank misses a notification, bytes may still land, and the pages drain first.
        """
        assert entry.final_message is not None
        if KVPoll.TRANSFERRING in entry.at_ranks:
            return None
        landed = merge_ranks(entry.at_ranks) is KVPoll.SUCCESS
        if landed:
            self.release(entry.key)
        else:
            self._start_drain(entry, self._engine.drain_timeout_s)
        return WritableEnd(entry, entry.final_message, landed)

    def _start_drain(self, entry: RemoteWritable, drain_timeout_s: float) -> None:
        """Keep the pages of a key for at least `drain_timeout_s` seconds from now."""
        until = self._clock.now() + drain_timeout_s
        entry.drained_at = until if entry.drained_at is None else max(entry.drained_at, until)
        self._draining[entry.key] = entry


@dataclasses.dataclass(slots=True)
class Room:
    """Fields common to both sides of a bootstrap room. `state` changes only through `advance`; `failure` explains
    FAILED.
    """

    room: int
    digest: str
    opened_at: float
    state: KVPoll = KVPoll.BOOTSTRAPPING
    failure: Failure | None = None
    changed_rooms: dict[int, None] = dataclasses.field(default_factory=dict)
    """Rooms of this side whose state changed, in order. All rooms share the dict; `KVManager` empties it."""

    def move(self, new: KVPoll) -> None:
        """Apply a local event to `state`, and record a change in `changed_rooms`."""
        before, self.state = self.state, advance(self.state, new)
        if self.state is not before:
            self.changed_rooms[self.room] = None

    def fail(self, failure: Failure) -> bool:
        """Fail the room unless its state is terminal; return True when this call failed it."""
        if self.state in TERMINAL:
            return False
        self.move(KVPoll.FAILED)
        self.failure = failure
        return True


@dataclasses.dataclass(slots=True)
class SendRoom(Room):
    """Prefill side of a room. `target` is None until the receiver has published its pages."""

    target: TransferInfo | None = None
    num_tokens: int | None = None
    """Prompt tokens; None when the request does not state the number."""
    num_state_items: int = 0
    """Slots and pages that were sent to the receiver's pools of `KVLayout.state_groups`."""
    queued_logprobs: list[PromptLogprobs] = dataclasses.field(default_factory=list)
    """Prompt log probabilities that are queued until the receiver's key is final."""
    fake: bool = False
    stats: TransferStats = TransferStats()
    """Statistics of the sent data; valid after SUCCESS."""


@dataclasses.dataclass(slots=True)
class ReceiveRoom(Room):
    """Decode side of a room. `peer` is the prefill instance id; None until a session is READY."""

    address: Address = ("", 0)
    key: MemoryKey = MemoryKey(0, 0, "")
    peer: str | None = None
    replica: int | None = None
    """Replica that has the request, once the replica `room % dp_size` has redirected us; None before."""
    republish: RemoteWritable | None = None
    """Pages to publish again once a session with `replica` is READY; None: nothing to publish again."""
    num_tokens: int | None = None
    """Tokens of the prompt; None before the pages are published, or if the receiver does not state the number."""
    num_state_items: int = 0
    """Slots and pages that were published for the groups in `KVLayout.state_groups`."""
    published_at: float | None = None
    stats: TransferStats = TransferStats()
    takes_logprobs: bool = False
    logprob_parts: dict[int, PromptLogprobs] = dataclasses.field(default_factory=dict)
    num_logprob_parts: int | None = None
    """Number of `PromptLogprobsPart` messages that the sender sent; None until all KV cache has landed."""
    fake: bool = False

    @property
    def has_all_logprobs(self) -> bool:
        """True when all KV cache has landed and all requested log probabilities have arrived."""
        if self.num_logprob_parts is None:
            return False
        return not self.takes_logprobs or len(self.logprob_parts) >= self.num_logprob_parts


def check_receiver_pages(info: TransferInfo, hello: Hello, layout: KVLayout, aux_bytes: int) -> str | None:
    """Return why the receiver's pages or aux slot lie outside the pools of its `hello`; None when they fit.

    `aux_bytes`: bytes that are written into its aux slot.
    """
    if wrong := _check_pools(hello, layout):
        return wrong
    num_groups, num_state = len(layout.groups) - len(layout.state_groups), len(layout.state_groups)
    if len(info.pages) != num_groups:
        return f"pages has {len(info.pages)} groups, expected {num_groups}"
    if len(info.state_indices) != num_state:
        return f"state_indices has {len(info.state_indices)} groups, expected {num_state}"
    last_pages = [max(pages, default=-1) for pages in layout.merge(info.pages, info.state_indices)]
    for memory, page_bytes in zip(hello.ranks, _page_bytes(layout, hello.shape), strict=True):
        for i, (num_bytes, region) in enumerate(zip(page_bytes, pool_regions(layout, memory), strict=True)):
            if (last_pages[i] + 1) * num_bytes > region.num_bytes:
                return f"page {last_pages[i]} lies outside the pool of group {layout.groups[i].name}"
    if layout.round_down(info.cached_tokens) != info.cached_tokens:
        return f"cached_tokens is {info.cached_tokens}, expected whole pages of {layout.page_tokens} tokens"
    if hello.aux_slot_bytes < aux_bytes:
        return f"aux_slot_bytes is {hello.aux_slot_bytes}, expected at least {aux_bytes}"
    if (info.aux_slot + 1) * hello.aux_slot_bytes > hello.aux_region.num_bytes:
        return f"aux slot {info.aux_slot} lies outside its buffer"
    return None


def check_draft_pages(info: TransferInfo, hello: Hello, drafts: Sequence[KVGroup]) -> str | None:
    """Return why the receiver's pages lie outside its pools of the DRAFT groups `drafts`; None when they fit."""
    last_page = max(info.pages[0], default=-1)
    for rank, memory in enumerate(hello.ranks):
        if len(memory.draft_regions) != len(drafts):
            return f"draft_regions has {len(memory.draft_regions)} pools, expected {len(drafts)}"
        for group, region in zip(drafts, memory.draft_regions, strict=True):
            if group.of_rank(hello.shape.coord(rank)).bytes_of(last_page + 1) > region.num_bytes:
                return f"page {last_page} lies outside the pool of group {group.name}"
    return None


def _check_pools(hello: Hello, layout: KVLayout) -> str | None:
    """Return how the pools of `hello` differ from those of the layout; None when they agree."""
    num_groups = len(layout.groups) - len(layout.state_groups)
    for rank, memory in enumerate(hello.ranks):
        if len(memory.kv_regions) != num_groups:
            return f"kv_regions has {len(memory.kv_regions)} pools, expected {num_groups}"
        expected = state_facts(layout, hello.shape.coord(rank))
        if len(memory.state_regions) != len(expected):
            return f"state_regions has {len(memory.state_regions)} pools, expected {len(expected)}"
        for region, facts in zip(memory.state_regions, expected, strict=True):
            if region.facts != facts:
                return f"state_regions of rank {rank}: {_difference(region.facts, facts)}"
    return None


def _difference(found: StateFacts, expected: StateFacts) -> str:
    """Name the first field in which two geometries differ."""
    field = next(f for f in StateFacts.__struct_fields__ if getattr(found, f) != getattr(expected, f))
    return f"{field} of group {expected.group} is {getattr(found, field)}, expected {getattr(expected, field)}"


@functools.lru_cache(maxsize=256)
def _page_bytes(layout: KVLayout, shape: ParallelShape) -> tuple[tuple[int, ...], ...]:
    """Return the bytes of one page, by rank of a replica of that shape and by layout group."""
    ranks = map(layout.of_rank, map(shape.coord, range(shape.num_ranks)))
    return tuple(tuple(group.page_bytes for group in own.groups) for own in ranks)


def check_prompt_fits_pages(info: TransferInfo, num_tokens: int, layout: KVLayout) -> str | None:
    """Return why a prompt of `num_tokens` tokens does not fit the pages of `info`; None when it fits."""
    if info.cached_tokens > num_tokens:
        return f"cached_tokens is {info.cached_tokens}, but the prompt has {num_tokens} tokens"
    for group, pages in zip(layout.groups, layout.merge(info.pages, info.state_indices), strict=True):
        first = layout.whole_pages(info.cached_tokens)
        num_missing = len(numbers_to_move(layout, group, num_tokens, first))
        if len(pages) < num_missing:
            of_group = "" if len(layout.groups) == 1 else f" of group {group.name}"
            return f"pages has {len(pages)} pages{of_group}, but {num_missing} of the prompt's are missing"
    return None
