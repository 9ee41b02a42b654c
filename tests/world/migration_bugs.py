"""Bugs of migrations that the tests of the simulated world plant."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pdserve.protocol.failure import Failure
from pdserve.protocol.messages import CommandReply, EndMigration, GenerateRequest, MigrateOut
from pdserve.scheduler.context import SchedulerContext
from pdserve.scheduler.request import Req
from pdserve.scheduler.roles import migration, prefix_sends
from pdserve.scheduler.roles.migration import OutgoingMigrations, OutgoingMove
from pdserve.scheduler.roles.prefix_sends import PrefixSends
from pdserve.sim.migrations import MovedServer
from pdserve.sim.server import SimServer
from pdserve.transfer.handles import KVSender

Patch = pytest.MonkeyPatch


def it_goes_on_after_a_commit(patch: Patch) -> None:
    end = OutgoingMigrations.end

    def blunt(self: OutgoingMigrations, command: EndMigration) -> None:
        move = self._moves.get(command.rid)
        if command.commit and move is not None and move.stopped_at is not None:
            self._cancel(move, migration.ABORTED)
            self._reply(CommandReply(query_id=command.query_id, ok=True, message="ok"))
            return
        end(self, command)

    patch.setattr(OutgoingMigrations, "end", blunt)


def a_late_commit_is_accepted(patch: Patch) -> None:
    """Both servers have the request."""
    refuse = OutgoingMigrations._refuse

    def mild(self: OutgoingMigrations, query_id: str, failure: Failure) -> None:
        if query_id.startswith("committing"):
            self._reply(CommandReply(query_id=query_id, ok=True, message="ok"))
        else:
            refuse(self, query_id, failure)

    patch.setattr(migration, "TIMEOUT_S", 12.0)
    patch.setattr(OutgoingMigrations, "_refuse", mild)


def the_last_page_is_left_out(patch: Patch) -> None:
    finish = KVSender.finish

    def short(self: KVSender, slot: object, record: object, times: object, **more: object) -> None:
        if record.room >= 1 << 40:  # type: ignore[attr-defined]
            more["num_pages"] -= 1  # type: ignore[operator]
        finish(self, slot, record, times, **more)  # type: ignore[arg-type]

    patch.setattr(KVSender, "finish", short)


def one_token_too_few_is_offered(patch: Patch) -> None:
    value = OutgoingMigrations._value

    def short(self: OutgoingMigrations, move: OutgoingMove) -> GenerateRequest:
        last = move.req.output_ids.pop()
        try:
            return value(self, move)
        finally:
            move.req.output_ids.append(last)

    patch.setattr(OutgoingMigrations, "_value", short)


def a_stopped_request_keeps_its_row(patch: Patch) -> None:
    release_row = SchedulerContext.release_row

    def idle(self: SchedulerContext, req: Req) -> None:
        if req.sender is not None:
            release_row(self, req)
        else:
            req.row = None

    patch.setattr(SchedulerContext, "release_row", idle)


def a_stage_outlives_the_pages_of_its_request(patch: Patch) -> None:
    patch.setattr(PrefixSends, "leave", lambda self, req: None)
    patch.setattr(prefix_sends._Sending, "has_pages", True)


def a_retracted_request_does_not_come_back(patch: Patch) -> None:
    cancel = OutgoingMigrations._cancel

    def blunt(self: OutgoingMigrations, move: OutgoingMove, failure: Failure, *, resume: bool = True) -> None:
        if not move.was_retracted:
            cancel(self, move, failure, resume=resume)

    patch.setattr(OutgoingMigrations, "_cancel", blunt)


def a_moved_request_stays_in_its_queue(patch: Patch) -> None:
    """The server computes a retracted request that another one has."""
    offer = OutgoingMigrations._offer_retracted

    def blunt(self: OutgoingMigrations, command: MigrateOut, req: Req) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(self._prefilling, "remove", lambda req: None)
            offer(self, command, req)

    patch.setattr(OutgoingMigrations, "_offer_retracted", blunt)


def its_last_token_counts_as_sent(patch: Patch) -> None:
    """The client's tokens of the other server begin one too late."""
    init = MovedServer.__init__

    def late(self: MovedServer, server: SimServer, rid: str, before: Sequence[int], *, repeats: bool) -> None:
        init(self, server, rid, before, repeats=True)

    patch.setattr(MovedServer, "__init__", late)
