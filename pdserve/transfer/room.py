"""Mutable state of a bootstrap room on each side, behind `KVSender` and `KVReceiver`. Scheduler thread only."""

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
    """Fields common to both sides of a bootstrap room. `state` changes only through `advance`; `failure` explains
    FAILED.
    """

    room: int
    digest: str
    opened_at: float
    state: KVPoll = KVPoll.BOOTSTRAPPING
    failure: Failure | None = None
    moved: dict[int, None] = dataclasses.field(default_factory=dict)
    """Rooms of this side whose state changed, in order. All rooms share the dict; `KVManager` empties it."""

    def move(self, new: KVPoll) -> None:
        """Apply a local event to `state`, and record a change in `moved`."""
        before, self.state = self.state, advance(self.state, new)
        if self.state is not before:
            self.moved[self.room] = None

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

    target: Meta | None = None
    num_tokens: int | None = None
    """Prompt tokens; None when the request does not state the number."""
    untold: list[PromptLogprobs] = dataclasses.field(default_factory=list)
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
    unheard: RemoteWritable | None = None
    """Pages to publish again once a session with `replica` is READY; None: nothing to publish again."""
    published_at: float | None = None
    stats: TransferStats = TransferStats()
    takes_logprobs: bool = False
    told: dict[int, PromptLogprobs] = dataclasses.field(default_factory=dict)
    num_told: int | None = None
    """Number of `Told` messages that the sender sent; None until all KV cache has landed."""
    fake: bool = False

    @property
    def is_told(self) -> bool:
        """True when all KV cache has landed and all requested log probabilities have arrived."""
        return self.num_told is not None and (not self.takes_logprobs or len(self.told) >= self.num_told)


def check_receiver_pages(meta: Meta, hello: Hello, layout: KVLayout, aux_slot_bytes: int) -> str | None:
    """Return why the receiver's pages or aux slot lie outside the pools of its `hello`; None when they fit."""
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
    """Return the bytes of one page, by rank of a replica of that shape and by layout group."""
    ranks = map(layout.of_rank, map(shape.place, range(shape.num_ranks)))
    return tuple(tuple(group.page_bytes for group in own.groups) for own in ranks)


def check_prompt_fits_pages(meta: Meta, num_tokens: int, page_tokens: int) -> str | None:
    """Return why a prompt of `num_tokens` tokens does not fit the pages of `meta`; None when it fits."""
    if meta.cached_tokens > num_tokens:
        return f"cached_tokens is {meta.cached_tokens}, but the prompt has {num_tokens} tokens"
    num_missing = pages_for(num_tokens, page_tokens) - meta.cached_tokens // page_tokens
    num_given = min(map(len, meta.pages), default=0)
    if num_given < num_missing:
        return f"pages has {num_given} pages, but {num_missing} of the prompt's are missing"
    return None
