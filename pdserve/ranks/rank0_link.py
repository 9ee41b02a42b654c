"""A follower's link to rank 0. Created by `engine` in the follower's process; used on its main thread.

Messages of rank 0 arrive on the link thread; copy workers report from their threads.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from typing import NoReturn

from torch._C._distributed_c10d import Store

from pdserve.base.parallel import RankCoord
from pdserve.errors import PdserveError, RankError
from pdserve.ranks.failure_detector import LinkTimes
from pdserve.ranks.links import LinkCondition, OnLost, RankLink, end_process
from pdserve.ranks.messages import (
    Alive,
    Answer,
    Begin,
    Digested,
    Entry,
    Launched,
    Offloaded,
    PageCapacity,
    PartialTick,
    PoolSize,
    RankFailed,
    RankReport,
    StepDone,
    StepEnded,
    Stop,
    Tick,
    ToFollower,
    ToLeader,
    Trouble,
    follower_codec,
    leader_codec,
)
from pdserve.ranks.rendezvous import MEET_TIMEOUT_S, Facts, Introduction, rank_names
from pdserve.transfer.checksum import RankDigest

log = logging.getLogger(__name__)

END_TIMEOUT_S = 10.0
_LEADER = 0


class Stopped(Exception):
    """Rank 0 stopped this follower regularly. Control flow inside the follower's process."""


class Rank0Link:
    """A follower's link to rank 0; implements `RankGroup`.

    `on_lost` is called on the link thread when rank 0 is gone or reports the replica lost: it should end the process.
    """

    def __init__(
        self,
        coord: RankCoord,
        store: Store,
        token: str,
        *,
        host: str,
        facts: Facts | None = None,
        on_lost: OnLost = end_process,
        times: LinkTimes | None = None,
        timeout_s: float = MEET_TIMEOUT_S,
    ) -> None:
        self._coord = coord
        self._received: queue.SimpleQueue[Entry | Begin | Stop] = queue.SimpleQueue()
        self._agreed: queue.SimpleQueue[int | PdserveError] = queue.SimpleQueue()
        self._changed = LinkCondition(on_lost)
        self._links: RankLink[ToLeader, ToFollower] = RankLink(
            coord.rank, host, leader_codec(), follower_codec(), times
        )
        with contextlib.ExitStack() as stack:
            stack.callback(self._links.close)
            introduction = Introduction(rank_names(coord.shape), coord.rank, store, token, facts or {}, timeout_s)
            introduction.publish(self._links.endpoint, self._links.nonce)
            self._links.connect(
                [introduction.lookup(_LEADER)],
                token,
                alive=Alive(),
                on_message=self._take,
                on_lost=self._on_lost,
                final_message=lambda error: RankFailed(Trouble.of(error)),
            )
            stack.pop_all()

    def report(self, report: ToLeader) -> None:
        """Send a report to rank 0. Any thread; never blocks."""
        self._links.send(_LEADER, report)

    def agree(self, num_pages: int) -> int:
        """Return the number of pages of every rank's pool; `num_pages` is the most that fit here. Blocks.

        Raises:
            PdserveError: the error that ends the replica.
        """
        self.report(PageCapacity(num_pages))
        match self._agreed.get():
            case int() as agreed:
                return agreed
            case error:
                raise error

    def wait_begin(self) -> Begin:
        """Wait for `Begin`. Raises Stopped."""
        match self._received.get():
            case Begin() as begin:
                return begin
            case Stop():
                raise Stopped
            case entry:
                raise RankError(f"rank 0 sent {type(entry).__name__} before Begin")

    def next_entry(self) -> Entry:
        """Wait for the next entry of the log. Raises Stopped."""
        match self._received.get():
            case PartialTick() | Tick() | Launched() | StepEnded() | Answer() as entry:
                return entry
            case Stop():
                raise Stopped
            case Begin():
                raise RankError("rank 0 sent Begin twice")

    def wait_stop(self) -> NoReturn:
        """Wait, after the end of the loop here and on rank 0, until rank 0 sends `Stop` or is gone. Raises Stopped."""
        while True:
            self.next_entry()

    def computed(self, step: int) -> None:
        """See `RankGroup.computed`: ranks of the last pipeline stage report, since rank 0 waits for them."""
        if self._coord.shape.pp_size > 1 and self._coord.is_last_stage:
            self.report(StepDone(step))

    def offloaded(self, number: int) -> None:
        """See `RankGroup.offloaded`."""
        self.report(Offloaded(number))

    def digested(self, number: int, own: RankDigest) -> tuple[RankDigest, ...]:
        """See `RankGroup.digested`."""
        self.report(Digested(number, own))
        return (own,)

    def reported(self, number: int, own: bytes) -> tuple[bytes, ...]:
        """See `RankGroup.reported`."""
        self.report(RankReport(number, own))
        return (own,)

    def root_cause(self) -> PdserveError | None:
        """See `RankGroup.root_cause`: None, since rank 0 detects losses and reports them; see `report_failure`."""
        return None

    def report_failure(self, error: Exception) -> None:
        """Send our error to rank 0, and start the close timer.

        When an exchange failed because of another rank, rank 0 soon reports that loss, which ends the process first.
        """
        self.report(RankFailed(Trouble.of(error)))
        self._changed.root_cause()
        if not isinstance(error, PdserveError):
            log.error("rank %d failed", self._coord.rank, exc_info=error)
        self.set_close_timeout(Trouble.of(error).error())

    def set_close_timeout(self, error: PdserveError) -> None:
        """End the process after `END_TIMEOUT_S`: closing may wait for ranks that are gone."""
        timer = threading.Timer(END_TIMEOUT_S, end_process, (error,))
        timer.daemon = True
        timer.start()

    def close(self, error: BaseException | None = None) -> None:
        """Close the link; `error` is sent first. Not from the link thread; may be called again."""
        self._links.close(None if error is None else RankFailed(Trouble.of(error)))

    def _take(self, rank: int, message: ToFollower) -> None:
        """Handle a message. Link thread."""
        match message:
            case Alive():
                pass
            case PoolSize(num_pages=num_pages):
                self._agreed.put(num_pages)
            case Stop(trouble=None):
                self._links.expect_end()
                self._agreed.put(RankError("rank 0 ended before all ranks had loaded"))
                self._received.put(message)
            case Stop(trouble=trouble):
                assert trouble is not None
                self._links.fail(trouble.error())
            case _:
                self._received.put(message)

    def _on_lost(self, error: PdserveError) -> None:
        """Handle the loss of the replica. Link thread."""
        self._agreed.put(error)
        self._received.put(Stop())
        self._changed.lose(error)
