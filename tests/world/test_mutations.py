"""A test of the tests: each planted bug must make the simulated world fail."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from pdserve.base.parallel import RankCoord
from pdserve.memory.layout import KVGroup
from pdserve.memory.lease import Lease
from pdserve.protocol.failure import Failure
from pdserve.sim.network import Faults, SimCopyEngine
from pdserve.transfer import plan as chunk_module
from pdserve.transfer import room as room_module
from pdserve.transfer.events import CopyDone
from pdserve.transfer.in_flight import ClosedKeys, OutgoingKeys, WriteOutcome
from pdserve.transfer.manager import KVReceiver, KVSender
from pdserve.transfer.plan import PageCopy, ShardFlow
from pdserve.transfer.receiver import ReceiveSide
from pdserve.transfer.room import ReceiveRoom, RemoteWritablePages, WritableEnd
from pdserve.transfer.wire import MemoryKey, TransferDone, TransferEnded
from tests.world.workload import play

Patch = pytest.MonkeyPatch
MAX_SEEDS = 150


def swap_two_pages(patch: Patch) -> None:
    plan = chunk_module.plan_flow

    def swapped(
        group: KVGroup,
        ours: RankCoord,
        theirs: RankCoord,
        feed: ShardFlow,
        src: list[int],
        dst: list[int],
        layers: range | None,
    ) -> list[PageCopy]:
        return plan(group, ours, theirs, feed, src, dst[::-1], layers)

    patch.setattr(chunk_module, "plan_flow", swapped)


def skip_the_last_layer(patch: Patch) -> None:
    plan = chunk_module.plan_flow

    def shortened(
        group: KVGroup,
        ours: RankCoord,
        theirs: RankCoord,
        feed: ShardFlow,
        src: list[int],
        dst: list[int],
        layers: range,
    ) -> list[PageCopy]:
        return plan(group, ours, theirs, feed, src, dst, layers[:-1])

    patch.setattr(chunk_module, "plan_flow", shortened)


def free_at_abort(patch: Patch) -> None:
    fail = ReceiveSide.fail

    def freeing(self: ReceiveSide, room: ReceiveRoom, failure: Failure) -> None:
        fail(self, room, failure)
        self.published.release(room.key)

    patch.setattr(ReceiveSide, "fail", freeing)


def free_source_at_the_end_of_the_request(patch: Patch) -> None:
    hold = Lease.hold
    patch.setattr(Lease, "hold", lambda self, name: None if name == "send" else hold(self, name))


def count_a_repeated_report(patch: Patch) -> None:
    def counting(self: OutgoingKeys, event: CopyDone) -> WriteOutcome | None:
        out = self.get(event.key)
        if out is None or not out.pending:
            return None
        out.pending.popitem()
        return self._finish(out)

    patch.setattr(OutgoingKeys, "copied", counting)


def max_as_the_update_rule(patch: Patch) -> None:
    patch.setattr(room_module, "advance", max)


def promise_quiet_while_writing(patch: Patch) -> None:
    stop = OutgoingKeys.stop

    def lying(self: OutgoingKeys, key: MemoryKey, failure: Failure) -> None:
        self.notify_receiver(key, TransferEnded(key=key, failure=failure, quiesced=True))
        stop(self, key, failure)

    patch.setattr(OutgoingKeys, "stop", lying)


def no_waiting_for_failed_writes(patch: Patch) -> None:
    copied = OutgoingKeys.copied

    def hasty(self: OutgoingKeys, event: CopyDone) -> WriteOutcome | None:
        return copied(self, msgspec.structs.replace(event, settled=True))

    patch.setattr(OutgoingKeys, "copied", hasty)


def never_promise_quiet(patch: Patch) -> None:
    ended = ReceiveSide.on_transfer_ended

    def deaf(self: ReceiveSide, message: TransferEnded) -> None:
        ended(self, TransferEnded(key=message.key, failure=message.failure, quiesced=False))

    patch.setattr(ReceiveSide, "on_transfer_ended", deaf)


def reopen_closed_keys(patch: Patch) -> None:
    patch.setattr(ClosedKeys, "__contains__", lambda self, key: False)


def send_an_unfinished_page(patch: Patch) -> None:
    send = KVSender.send
    patch.setattr(
        KVSender, "send", lambda self, lease, num_pages: send(self, lease, min(num_pages + 1, len(lease.pages)))
    )


def forget_the_room_check(patch: Patch) -> None:
    """Meaningless alone; together with aux written to the wrong slot it would hand out another request's token."""
    take = KVReceiver.take
    patch.setattr(KVReceiver, "take", lambda self, aux: take(self, aux) or self._aux.read(aux.pages[0]))
    plan = chunk_module.PageCopy
    patch.setattr(chunk_module, "PageCopy", lambda s, d, n: plan(s, 0, n))


def believe_done_without_notifications(patch: Patch) -> None:
    patch.setattr(SimCopyEngine, "expect", lambda self, key, rank, count: True)


def free_at_a_promise_without_notifications(patch: Patch) -> None:
    end = RemoteWritablePages.end

    def hasty(self: RemoteWritablePages, word: TransferDone | TransferEnded) -> WritableEnd | None:
        if isinstance(word, TransferDone):
            return end(self, word)
        self.release(word.key)
        return None

    patch.setattr(RemoteWritablePages, "end", hasty)


NOTHING = Faults()
ABORTS = Faults(abort=0.03, copy_failed=0.05)
LATE = Faults(lands_late=True, abort=0.15)
LATE_AND_FAILING = Faults(lands_late=True, abort=0.3, copy_failed=0.1)
MUTANTS: list[tuple[Callable[[Patch], None], Faults]] = [
    (swap_two_pages, NOTHING),
    (skip_the_last_layer, NOTHING),
    (free_at_abort, ABORTS),
    (free_source_at_the_end_of_the_request, ABORTS),
    (count_a_repeated_report, NOTHING),
    (max_as_the_update_rule, ABORTS),
    (promise_quiet_while_writing, ABORTS),
    (no_waiting_for_failed_writes, ABORTS),
    (never_promise_quiet, ABORTS),
    (reopen_closed_keys, ABORTS),
    (send_an_unfinished_page, NOTHING),
    (forget_the_room_check, NOTHING),
    (believe_done_without_notifications, LATE),
    (free_at_a_promise_without_notifications, LATE_AND_FAILING),
]


@pytest.mark.parametrize(("mutant", "faults"), MUTANTS, ids=lambda value: getattr(value, "__name__", ""))
def test_planted_bug_is_caught(mutant: Callable[[Patch], None], faults: Faults, monkeypatch: Patch) -> None:
    mutant(monkeypatch)
    for seed in range(MAX_SEEDS):
        try:
            play(seed, faults)
        except (AssertionError, KeyError):
            return
    pytest.fail(f"{mutant.__name__}: not caught in {MAX_SEEDS} seeds")


@pytest.mark.parametrize("seeds", [range(50), pytest.param(range(50, MAX_SEEDS), marks=pytest.mark.slow)], ids=len)
@pytest.mark.parametrize("faults", [ABORTS, LATE])
def test_the_same_seeds_pass_without_a_planted_bug(faults: Faults, seeds: range) -> None:
    for seed in seeds:
        play(seed, faults)
