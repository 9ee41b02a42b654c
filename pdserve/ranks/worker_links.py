"""Rank 0's links to the other ranks of its replica: broadcasts, and the followers' reports, kept until they are needed.

Created by `engine` in rank 0's process before anything is loaded (`meet_followers`); used on the scheduler thread.
Reports arrive on the link thread. Every wait ends when a rank is lost.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence

from torch._C._distributed_c10d import Store

from pdserve.base.parallel import ParallelShape
from pdserve.errors import PdserveError
from pdserve.ranks.copies import Outcome
from pdserve.ranks.failure_detector import LinkTimes, PeerRank
from pdserve.ranks.links import LinkCondition, OnLost, RankLink, end_process
from pdserve.ranks.messages import (
    Alive,
    Digested,
    Offloaded,
    PageCapacity,
    PagesCopied,
    PoolSize,
    RankFailed,
    RankReady,
    RankReport,
    RolePrepared,
    StepDone,
    Stop,
    StorageEnded,
    ToFollower,
    ToLeader,
    Trouble,
    WeightsLoaded,
    follower_codec,
    leader_codec,
)
from pdserve.ranks.rendezvous import MEET_TIMEOUT_S, Facts, Introduction, rank_names
from pdserve.transfer.checksum import RankDigest
from pdserve.transfer.events import CopyDone, Notified, PeerConnected, PeerFenced, ReceiverOpened

ANSWER_TIMEOUT_S = 600.0
"""Seconds after which rank 0 gives up on a live follower that has not completed what rank 0 has."""


class WorkerLinks:
    """All other ranks of the replica, `peers`; implements `RankGroup`. `token` is the control token; see
    `meet_followers`.
    """

    def __init__(
        self,
        shape: ParallelShape,
        links: RankLink[ToFollower, ToLeader],
        peers: Sequence[PeerRank],
        token: str,
        on_lost: OnLost,
    ) -> None:
        assert [peer.rank for peer in peers] == list(range(1, shape.num_ranks))
        self.shape = shape
        self._peers = {peer.rank: peer for peer in peers}
        self._links = links
        self._changed = LinkCondition(on_lost)
        self._capacities: dict[int, int] = {}
        self._ready: dict[int, RankReady] = {}
        self._prepared: dict[int, RolePrepared] = {}
        self._weights: dict[int, WeightsLoaded] = {}
        self._answers: Counter[ToLeader] = Counter()
        self._digests: dict[int, dict[int, RankDigest]] = {}
        """Digests by hash request and rank."""
        self._reports: dict[int, dict[int, bytes]] = {}
        """Answers of `RankReport` by question and rank."""
        self._on_copied: Callable[[Outcome], None] | None = None
        self.on_pages_copied: Callable[[PagesCopied], None] = lambda report: None
        """Receiver of the ends of followers' copies to and from the host tier, as `on_storage_ended`."""
        self.on_storage_ended: Callable[[StorageEnded], None] = lambda report: None
        """Receiver of the ends of followers' storage jobs, on the link thread. Set it before `Begin`."""
        links.connect(
            peers,
            token,
            alive=Alive(),
            on_message=self._take,
            on_lost=self._changed.lose,
            final_message=lambda error: Stop(Trouble.of(error)),
        )

    def broadcast(self, message: ToFollower) -> None:
        """Send `message` to all followers, in order. Never blocks."""
        self._links.broadcast(message)

    def agree(self, num_pages: int) -> int:
        """Return the most pages that every rank can hold, and send the number to all; `num_pages` is ours.

        Blocks until all have loaded. All ranks may call it again, with another number.

        Raises:
            ConfigError, ModelError: a rank could not be started with this configuration.
            RankError: a rank is lost.
        """
        self._changed.wait_until(lambda: len(self._capacities) == len(self._peers), "loaded its weights")
        with self._changed:
            agreed = min(num_pages, *self._capacities.values())
            self._capacities.clear()
        self.broadcast(PoolSize(agreed))
        return agreed

    def wait_ready(self) -> tuple[RankReady, ...]:
        """Wait for `RankReady` of all followers; return them in rank order. Raises like `agree`."""
        self._changed.wait_until(lambda: len(self._ready) == len(self._peers), "become ready", ANSWER_TIMEOUT_S)
        return tuple(self._ready[rank] for rank in self._peers)

    def wait_role(self, number: int) -> tuple[RolePrepared, ...]:
        """Wait for the reports on role change `number` of all followers; return them in rank order.

        Raises RankError when a rank is lost.
        """
        self._changed.wait_until(
            lambda: sum(one.number == number for one in self._prepared.values()) == len(self._peers),
            "opened the parts of the new role",
            ANSWER_TIMEOUT_S,
        )
        return tuple(self._prepared[rank] for rank in self._peers)

    def weights_loaded(self, number: int) -> tuple[WeightsLoaded, ...] | None:
        """Return the reports on load `number` of all followers, in rank order; None while one loads. Never blocks."""
        with self._changed:
            if sum(one.number == number for one in self._weights.values()) < len(self._peers):
                return None
            return tuple(self._weights[rank] for rank in self._peers)

    def computed(self, step: int) -> None:
        """See `RankGroup.computed`: waits for the ranks of the last stage; without pipeline stages it need not wait."""
        if self.shape.pp_size > 1:
            self._wait_answers(StepDone(step), self.shape.tp_size, f"computed step {step}")

    def offloaded(self, number: int) -> None:
        """See `RankGroup.offloaded`."""
        self._wait_answers(Offloaded(number), len(self._peers), "copied pages to host memory")

    def digested(self, number: int, own: RankDigest) -> tuple[RankDigest, ...]:
        """See `RankGroup.digested`."""
        self._changed.wait_until(
            lambda: len(self._digests.get(number, ())) == len(self._peers), "hashed its pages", ANSWER_TIMEOUT_S
        )
        with self._changed:
            found = self._digests.pop(number)
        return (own, *(found[rank] for rank in self._peers))

    def reported(self, number: int, own: bytes) -> tuple[bytes, ...]:
        """See `RankGroup.reported`."""
        self._changed.wait_until(
            lambda: len(self._reports.get(number, ())) == len(self._peers), "answered", ANSWER_TIMEOUT_S
        )
        with self._changed:
            found = self._reports.pop(number)
        return (own, *(found[rank] for rank in self._peers))

    def on_copied(self, take: Callable[[Outcome], None]) -> None:
        """Set the receiver of followers' copy outcomes; `take` runs on the link thread. Call before any of them copies:
        before `Begin`, and before a role change is decided.
        """
        self._on_copied = take

    def root_cause(self) -> PdserveError | None:
        """See `RankGroup.root_cause`."""
        return self._changed.root_cause()

    def close(self, trouble: PdserveError | None = None) -> None:
        """Send `Stop` to all followers, with the error of an irregular end; close the links. May be called again."""
        self._links.close(Stop(None if trouble is None else Trouble.of(trouble)))

    def _wait_answers(self, answer: ToLeader, count: int, what: str) -> None:
        self._changed.wait_until(lambda: self._answers[answer] == count, what, ANSWER_TIMEOUT_S)
        with self._changed:
            del self._answers[answer]

    def _take(self, rank: int, report: ToLeader) -> None:
        """Handle a report. Link thread."""
        match report:
            case Alive():
                return
            case PeerConnected() | CopyDone() | Notified() | ReceiverOpened() | PeerFenced():
                assert self._on_copied is not None, "a report on copies where nothing is transferred"
                self._on_copied(report)
                return
            case PagesCopied():
                self.on_pages_copied(report)
                return
            case StorageEnded():
                self.on_storage_ended(report)
                return
            case RankFailed(trouble=trouble):
                self._links.report(rank, trouble.error())
                return
        with self._changed:
            match report:
                case PageCapacity(num_pages=num_pages):
                    self._capacities[rank] = num_pages
                case RankReady():
                    self._ready[rank] = report
                case RolePrepared():
                    self._prepared[rank] = report
                case WeightsLoaded():
                    self._weights[rank] = report
                case Digested(number=number, digest=digest):
                    self._digests.setdefault(number, {})[rank] = digest
                case RankReport(number=number, data=data):
                    self._reports.setdefault(number, {})[rank] = data
                case StepDone() | Offloaded():
                    self._answers[report] += 1
            self._changed.notify_all()


def meet_followers(
    shape: ParallelShape,
    store: Store,
    token: str,
    *,
    host: str,
    facts: Facts | None = None,
    on_lost: OnLost = end_process,
    times: LinkTimes | None = None,
    timeout_s: float = MEET_TIMEOUT_S,
) -> WorkerLinks:
    """Connect to all followers of a replica over `store`; `host` is our address for them (`rendezvous.own_host`).

    `facts` must be the same on all ranks (`rendezvous.facts_of`).

    `on_lost` is called on another thread when a rank is lost. It should end the process, since the scheduler thread may
    be in an exchange that never ends.

    Raises:
        ConfigError: nothing can be bound at `host`, or a follower was started with other flags.
        RankError: a follower did not join in time, or has another token.
    """
    introduction = Introduction(rank_names(shape), 0, store, token, facts or {}, timeout_s)
    links: RankLink[ToFollower, ToLeader] = RankLink(0, host, follower_codec(), leader_codec(), times)
    with contextlib.ExitStack() as stack:
        stack.callback(links.close)
        introduction.publish(links.endpoint, links.nonce)
        peers = introduction.lookup_followers()
        followers = WorkerLinks(shape, links, peers, token, on_lost)
        stack.pop_all()
    return followers
