"""How much memory decode keeps free for the requests that it has accepted. Made anew each time it may accept some."""

from __future__ import annotations

from collections.abc import Iterable

from pdserve.scheduler.req import Req


class DecodeReservation:
    """Token slots that a new request must leave free beside those that have memory and will want more.

    Each of them is granted `each_tokens` ahead, and the largest must be able to finish once all others have given way.
    """

    def __init__(self, each_tokens: int, held: Iterable[Req]) -> None:
        self._each_tokens = each_tokens
        self._growth = self._occupied = self._largest = 0
        for req in held:
            self.add(req)

    def add(self, req: Req) -> None:
        """One more has been accepted."""
        self._growth += min(self._each_tokens, req.num_left)
        self._occupied += req.num_known
        self._largest = max(self._largest, req.num_worst)

    @property
    def tokens(self) -> int:
        """To be kept free now."""
        return max(self._growth, self._largest - self._occupied)
