"""Preemption: running requests make room for a waiting one whose priority is much higher.

A preempted request is retracted: it waits again, in the order of its priority, and continues where it was.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence

from pdserve.scheduler.batch_planner import BatchPlanner
from pdserve.scheduler.request import Req, WaitingQueue


class Preemption:
    """Chooses the requests that a waiting one preempts: the least urgent first, of equal ones the newest.

    It chooses as few as are enough, and none where all together are not enough. A request whose place in the queue
    would be before the waiting one is never preempted, so the two cannot take turns.
    """

    def __init__(self, planner: BatchPlanner, waiting: WaitingQueue) -> None:
        """`waiting`: the queue whose order decides, and whose rules apply."""
        self._planner = planner
        self._waiting = waiting

    @property
    def is_due(self) -> bool:
        """True when the request at the head of the planner's queue would preempt others now."""
        return bool(self._for_head()[1])

    def victims(self, req: Req, fits: Callable[[Sequence[Req]], bool]) -> list[Req]:
        """Return the requests that the waiting `req` preempts; empty if preemption is not allowed or does not help.

        `fits(gone)` is true when `req` can start once the requests `gone` are retracted.
        """
        rules, place, key = self._waiting.rules, self._waiting.key(req), self._waiting.key
        running, active = self._planner.running.reqs, self._planner.prefilling.active
        found = [
            other
            for other in itertools.chain(running.values(), active.values())
            if rules.may_preempt(req.spec, other.spec) and key(other) > place
        ]
        found.reverse()  # of those that arrived at once, the last first
        found.sort(key=key, reverse=True)
        if not found or not fits(found):
            return []
        fewer = bisect.bisect_left(range(1, len(found)), True, key=lambda count: fits(found[:count]))
        return found[: fewer + 1]

    def run(self) -> None:
        """Start requests at the head of the planner's queue in place of those that they preempt.

        No step may be under way.
        """
        while True:
            head, victims = self._for_head()
            if head is None or not victims:
                return
            self._planner.preempt(victims)
            if not self._planner.prefilling.start(head):
                return

    def _for_head(self) -> tuple[Req | None, list[Req]]:
        """The request at the head of the queue, unless it can start, or waits for another prompt's page or the host
        tier; its victims.
        """
        prefilling = self._planner.prefilling
        if not len(prefilling.waiting):
            return None, []
        head = prefilling.waiting[0]
        if prefilling.is_loading(head) or prefilling.may_start(head) or prefilling.waits_for_page(head):
            return None, []
        return head, self.victims(head, lambda gone: prefilling.may_start(head, gone))
