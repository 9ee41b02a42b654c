"""What decode does before it publishes a request's pages: it reserves memory, and the host tier gives prefixes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from pdserve.memory.layout import KVLayout
from pdserve.memory.lease import Lease
from pdserve.scheduler.context import SchedulerContext, group_leases
from pdserve.scheduler.request import Req, WaitingQueue

LOAD_AHEAD = 8
"""Requests at the head of the queue whose pages may come from the host tier at the same time."""


def most_cached(layout: KVLayout, req: Req) -> int:
    """Return the input tokens that need not be transferred when the prefix cache has their token pages."""
    most = req.num_input_tokens - layout.has_state  # the state comes with the last page
    if layout.window:  # window pages come with the token pages of the same numbers
        window = layout.window_pages(req.num_input_tokens, req.num_input_tokens)
        most = min(most, layout.tokens_in(window.start))
    return most


class HostLoads:
    """Prefixes of requests with a session come from the host tier before the other pages are published.

    `has_memory` returns whether the pages of a request could be published now. Without a host tier it does nothing.
    Requests of other servers stand still meanwhile, so they wait for no load.
    """

    def __init__(self, context: SchedulerContext, has_memory: Callable[[Req], bool]) -> None:
        self._context, self._has_memory = context, has_memory

    def begin(self, ready: WaitingQueue) -> None:
        """Begin loads for the first requests of the queue."""
        if self._context.tier is not None:
            for req in [ready[index] for index in range(min(LOAD_AHEAD, len(ready)))]:
                self.holds_back(req)

    def holds_back(self, req: Req) -> bool:
        """True when pages of `req` come from the host tier, or begin to now."""
        tier, layout = self._context.tier, self._context.memory.layout
        return (
            tier is not None
            and not req.is_incoming
            and tier.holds_back(req, lambda: self._has_memory(req), most_cached(layout, req))
        )

    def is_running(self, req: Req) -> bool:
        """True while pages of `req` come from the host tier."""
        return self._context.tier is not None and self._context.tier.is_loading(req)

    def started(self, req: Req) -> None:
        """Note that `req` has its pages, and that `Req.num_cached` of its tokens were cached."""
        if self._context.tier is not None:
            req.cached_details = self._context.tier.started(req)


class DecodeReservation:
    """Counts the token slots that a new request must leave free, so that the requests `held` can grow.

    Held requests have memory, and each can grow by `each_tokens`. The largest one can finish once all others are
    retracted.
    """

    def __init__(self, each_tokens: int, held: Iterable[Req]) -> None:
        self._each_tokens = each_tokens
        self._growth = self._occupied = self._largest = 0
        for req in held:
            self.add(req)

    def add(self, req: Req) -> None:
        """Add a request that has been given memory."""
        self._growth += min(self._each_tokens, req.num_remaining)
        self._occupied += req.seq_len
        self._largest = max(self._largest, req.max_len)

    @property
    def tokens(self) -> int:
        """Token slots to keep free."""
        return max(self._growth, self._largest - self._occupied)


class DecodeMemory:
    """Finds and reserves the memory of requests whose KV will arrive.

    `held` returns the requests that hold memory and will need more.
    """

    def __init__(self, context: SchedulerContext, held: Callable[[], Iterable[Req]]) -> None:
        self._context, self._held = context, held

    def to_keep_free(self, without: Collection[str] = ()) -> DecodeReservation:
        """Return what a new request must leave free, once the requests with the rids `without` are retracted."""
        held = (req for req in self._held() if req.rid not in without)
        return DecodeReservation(self._context.limits.reserved_decode_tokens, held)

    def fits(self, req: Req, without: Sequence[Req] = ()) -> bool:
        """True when `reserve` finds enough memory for `req`, once the requests `without` are retracted."""
        memory = self._context.memory
        after = memory.preview_release(other.lease for other in without if other.lease is not None)
        if memory.groups.is_used and not memory.groups.fits(
            max(req.max_len, req.num_input_tokens), decode_only=True, after=group_leases(without)
        ):
            return False
        num_remaining = memory.num_available + after.num_pages - memory.num_pages(req.num_input_tokens)
        reserve = self.to_keep_free({other.rid for other in without})
        return memory.aux.num_free > 0 and memory.layout.tokens_in(num_remaining) >= reserve.tokens

    def reserve(self, req: Req, reserve: DecodeReservation) -> tuple[Lease, Lease] | None:
        """Return leases of pages for the input of `req` and of an aux slot; None when too little memory is free."""
        memory = self._context.memory
        num_remaining = memory.num_available - memory.num_pages(req.num_input_tokens)
        if memory.aux.num_free == 0 or memory.layout.tokens_in(num_remaining) < reserve.tokens:
            return None
        lease = memory.reserve_tokens(
            req.num_input_tokens,
            req.rid,
            req.token_bytes(req.num_input_tokens),
            most_cached(memory.layout, req),
            max_len=req.max_len,
            decode_only=True,
            needs_state=False,
        )
        if lease is None:
            return None
        aux = memory.aux.reserve(1, req.rid)
        assert aux is not None, "a slot was free"
        return lease, aux
