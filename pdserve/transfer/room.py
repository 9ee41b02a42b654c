"""Rooms as each side sees them: the mutable records behind `KVSender` and `KVReceiver`. Scheduler thread only."""

from __future__ import annotations

import dataclasses
import functools

from pdserve.base.parallel import ParallelShape
from pdserve.memory.layout import KVLayout, pages_for
from pdserve.protocol.failure import Failure
from pdserve.protocol.logprobs import PromptLogprobs
from pdserve.transfer.events import Address
from pdserve.transfer.remote_writable import RemoteWritable
from pdserve.transfer.state import TERMINAL, KVPoll, advance
from pdserve.transfer.wire import Hello, MemoryKey, Meta, TransferStats


@dataclasses.dataclass(slots=True)
class Room:
    """What both sides of a room have: a state that moves by `advance` only, and why it failed."""

    room: int
    digest: str
    opened_at: float
    state: KVPoll = KVPoll.BOOTSTRAPPING
    failure: Failure | None = None
    moved: dict[int, None] = dataclasses.field(default_factory=dict)
    """Numbers of the rooms of this side that have moved, in order; shared by all of them, emptied by the manager."""

    def move(self, new: KVPoll) -> None:
        """A local event."""
        before, self.state = self.state, advance(self.state, new)
        if self.state is not before:
            self.moved[self.room] = None

    def fail(self, failure: Failure) -> bool:
        """Fail, unless the room has ended; True when this call did it."""
        if self.state in TERMINAL:
            return False
        self.move(KVPoll.FAILED)
        self.failure = failure
        return True


@dataclasses.dataclass(slots=True)
class SendRoom(Room):
    """Prefill's side. `target` is set once the receiver's pages are known."""

    target: Meta | None = None
    num_tokens: int | None = None
    """Tokens of the prompt, where the request said so."""
    untold: list[PromptLogprobs] = dataclasses.field(default_factory=list)
    """Log probabilities that wait until it is certain which key they are for."""
    fake: bool = False
    stats: TransferStats = TransferStats()
    """What was sent; after SUCCESS."""


@dataclasses.dataclass(slots=True)
class ReceiveRoom(Room):
    """Decode's side. `peer` is the prefill instance once the session is ready."""

    address: Address = ("", 0)
    key: MemoryKey = MemoryKey(0, 0, "")
    peer: str | None = None
    replica: int | None = None
    """Which one has the request, where the one that the room's number names said so."""
    unheard: RemoteWritable | None = None
    """What is to be published again as soon as there is a session with `replica`."""
    published_at: float | None = None
    stats: TransferStats = TransferStats()
    takes_logprobs: bool = False
    told: dict[int, PromptLogprobs] = dataclasses.field(default_factory=dict)
    num_told: int | None = None
    """Parts that there are; known when everything else has landed."""
    fake: bool = False

    @property
    def is_told(self) -> bool:
        """Whether all has landed and been told."""
        return self.num_told is not None and (not self.takes_logprobs or len(self.told) >= self.num_told)


def check_receiver_pages(meta: Meta, hello: Hello, layout: KVLayout, aux_slot_bytes: int) -> str | None:
    """Why the pages or the aux slot that a receiver names cannot be in the pools of its `hello`; None when they can."""
    num_groups = len(layout.groups)
    last_pages = [max(pages, default=-1) for pages in meta.pages]
    for memory, page_bytes in zip(hello.ranks, _page_bytes(layout, hello.shape), strict=True):
        if not len(meta.pages) == len(memory.kv_regions) == num_groups:
            return f"pages of {len(meta.pages)} groups in {len(memory.kv_regions)} pools, expected {num_groups}"
        for i, (num_bytes, region) in enumerate(zip(page_bytes, memory.kv_regions, strict=True)):
            if (last_pages[i] + 1) * num_bytes > region.num_bytes:
                return f"page {last_pages[i]} lies outside the pool of group {layout.groups[i].name}"
    if meta.cached_tokens % layout.page_tokens:
        return f"cached_tokens is {meta.cached_tokens}, expected whole pages of {layout.page_tokens} tokens"
    if (meta.aux_slot + 1) * aux_slot_bytes > hello.aux_region.num_bytes:
        return f"aux slot {meta.aux_slot} lies outside its buffer"
    return None


@functools.lru_cache(maxsize=256)
def _page_bytes(layout: KVLayout, shape: ParallelShape) -> tuple[tuple[int, ...], ...]:
    """Bytes of a page of each group, at each rank of a replica split like that."""
    ranks = map(layout.of_rank, map(shape.place, range(shape.num_ranks)))
    return tuple(tuple(group.page_bytes for group in own.groups) for own in ranks)


def check_prompt_fits_pages(meta: Meta, num_tokens: int, page_tokens: int) -> str | None:
    """Why a prompt of `num_tokens` tokens cannot go to the pages of `meta`; None when it can."""
    if meta.cached_tokens > num_tokens:
        return f"cached_tokens is {meta.cached_tokens}, but the prompt has {num_tokens} tokens"
    num_missing = pages_for(num_tokens, page_tokens) - meta.cached_tokens // page_tokens
    num_given = min(map(len, meta.pages), default=0)
    if num_given < num_missing:
        return f"pages has {num_given} pages, but {num_missing} of the prompt's are missing"
    return None
