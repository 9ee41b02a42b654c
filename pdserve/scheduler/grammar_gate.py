"""Holds requests until their grammar is compiled, before the scheduler loop sees them. Scheduler thread.

    GenerateRequest with a grammar ──> compiled already? ──yes──> the loop
                                        └─ no: waits here, later requests pass ──compiled, or failed──> the loop

A step waits for the masks of all its rows, so a row whose grammar takes a second to compile would delay the other rows.
In a replica of several ranks only rank 0 has a gate: released requests enter the ranks' input log. The API process
bounds the number of waiting requests: see `server/engine_client/waiting`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from pdserve.base.mailbox import Mailbox, Woken
from pdserve.protocol.failure import Grammar
from pdserve.protocol.messages import AbortRequest, GenerateRequest
from pdserve.scheduler.scheduler import Event

Prepare = Callable[[Grammar], "Future[Any] | None"]
"""Begins to compile a grammar; returns None where there is nothing to wait for."""


class GrammarGate:
    """Implements `InputSource` over `mailbox`. An abort releases its waiting request first, so that the loop can end
    it.
    """

    def __init__(self, mailbox: Mailbox[Event], prepare: Prepare) -> None:
        self._mailbox = mailbox
        self._prepare = prepare
        self._waiting: dict[str, tuple[GenerateRequest, Future[Any]]] = {}
        """By rid, in order of arrival."""

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their grammar."""
        return len(self._waiting)

    def drain(self) -> Sequence[Event]:
        """See `InputSource.drain`. Released requests come before new events."""
        passed: list[Event] = self._opened() if self._waiting else []
        for event in self._mailbox.drain():
            match event:
                case GenerateRequest() if self._keeps(event):
                    continue
                case AbortRequest() if self._waiting:
                    passed += self._named(event)
            passed.append(event)
        return passed

    def wait(self, timeout_s: float) -> bool:
        """See `InputSource.wait`. A compiled grammar ends the wait."""
        return self._mailbox.wait(timeout_s)

    def _keeps(self, request: GenerateRequest) -> bool:
        grammar = request.sampling.grammar
        if grammar is None or request.rid in self._waiting:  # the loop refuses a duplicate rid
            return False
        opening = self._prepare(grammar)
        if opening is None or opening.done():
            return False
        self._waiting[request.rid] = request, opening
        opening.add_done_callback(lambda _: self._mailbox.post(Woken()))
        return True

    def _opened(self) -> list[Event]:
        rids = [rid for rid, (_, opening) in self._waiting.items() if opening.done()]
        return [self._waiting.pop(rid)[0] for rid in rids]

    def _named(self, abort: AbortRequest) -> list[Event]:
        rids = list(self._waiting) if abort.rid is None else [abort.rid]
        return [self._waiting.pop(rid)[0] for rid in rids if rid in self._waiting]
