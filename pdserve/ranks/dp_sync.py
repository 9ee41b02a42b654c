"""Synchronizes DP attention replicas: they compute every step together, in rounds that their ranks 0 announce.

    a rank 0 with work enters round k ── RoundEntered(k) ──> the other ranks 0: those without work enter round k
                                                             with no tokens

A rank 0 that has received the announcement of a round enters the round without a message. So only ranks 0 that start a
round announce it, to all, and idle replicas send nothing. Every rank 0 enters every round in order. A round that all
have entered waits for nothing else, so one replica can always proceed.

    other weights    each rank 0 has loaded ── WeightsReport ──> all know whether all have, and all ranks' samples
                     a rank 0 does not begin ── LoadRefused ──> no other one waits for its report
                     nothing runs at a rank 0 ── SwapReady ──> all have sent it: all swap behind the same round

A rank 0 that has sent `SwapReady` starts no round until all have swapped. So no round is computed with both weights.

Each rank 0's process has one `DpSync`, created by `engine` and used on the scheduler thread. Messages of the other
replicas arrive on the link thread.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Annotated

import msgspec
from torch._C._distributed_c10d import Store

from pdserve.errors import PdserveError
from pdserve.model.params import WeightSamples
from pdserve.protocol.codec import Codec
from pdserve.ranks.failure_detector import LinkTimes, PeerRank
from pdserve.ranks.links import LinkCondition, OnLost, RankLink, end_process
from pdserve.ranks.messages import Alive, RankFailed, Trouble
from pdserve.ranks.rendezvous import MEET_TIMEOUT_S, Facts, Introduction

Round = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class LoadAgreed(msgspec.Struct, frozen=True, tag="Loaded"):
    """The replica has loaded; `samples` of the weights of each of its ranks."""

    samples: tuple[dict[str, dict[int, float]], ...]


class RoundEntered(msgspec.Struct, frozen=True, tag="Entered"):
    """The sender enters this round."""

    round: Round


class RoundLeft(msgspec.Struct, frozen=True, tag="Left"):
    """The sender was stopped in this round, and enters later rounds only when another replica announces them."""

    round: Round


class WeightsReport(msgspec.Struct, frozen=True, tag="WeightsReport"):
    """The replica has loaded other weights for the command `query_id`, or has not: `failure` says why.

    `samples` of the weights of each of its ranks.
    """

    query_id: str
    failure: str = ""
    samples: tuple[dict[str, dict[int, float]], ...] = ()


class LoadRefused(msgspec.Struct, frozen=True, tag="LoadRefused"):
    """The replica does not begin the command `query_id`, such as because it loads still; `why` for people."""

    query_id: str
    why: str


class SwapReady(msgspec.Struct, frozen=True, tag="SwapReady"):
    """Nothing runs at the sender, which carries out the command `query_id` once all replicas have sent this."""

    query_id: str


LeaderMessage = LoadAgreed | RoundEntered | RoundLeft | WeightsReport | LoadRefused | SwapReady | RankFailed | Alive
MOST_REFUSALS = 256
"""Refusals of a rank 0 that the others keep."""


class DpSync:
    """Rank 0 of this replica among the ranks 0 of the others, `peers`. Rounds count from 1, like a scheduler's steps.

    `wake` is called on the link thread when another replica has entered a round that this one has not, or leaves.
    """

    def __init__(
        self, links: RankLink[LeaderMessage, LeaderMessage], peers: Sequence[PeerRank], token: str, on_lost: OnLost
    ) -> None:
        self._links = links
        self._num_others = len(peers)
        self._changed = LinkCondition(on_lost)
        self._called = 0
        self._entered = 0
        self._loaded: dict[int, LoadAgreed] = {}
        self._left: set[int] = set()
        self._reports: dict[int, WeightsReport] = {}
        """The newest of each other rank 0."""
        self._refusals: dict[int, dict[str, str]] = {}
        """By other rank 0 and query id: why it has not begun; the newest ones."""
        self._ready: dict[int, str] = {}
        """Query id of the newest `SwapReady` of each other rank 0."""
        self._announced = ""
        """That of the newest of ours."""
        self.wake: Callable[[], None] = lambda: None
        links.connect(
            peers,
            token,
            alive=Alive(),
            on_message=self._take,
            on_lost=self._changed.lose,
            final_message=lambda error: RankFailed(Trouble.of(error)),
        )

    def share_samples(self, samples: Sequence[WeightSamples]) -> list[WeightSamples]:
        """Return the weight samples of the other replicas' ranks; `samples` are ours. Blocks until all have loaded.

        Raises:
            PdserveError: the error that ends the server.
        """
        ours = tuple({name: dict(values) for name, values in rank.items()} for rank in samples)
        self._links.broadcast(LoadAgreed(ours))
        self._changed.wait_until(lambda: len(self._loaded) == self._num_others, "loaded its weights")
        with self._changed:
            return [rank for loaded in self._loaded.values() for rank in loaded.samples]

    def report_weights(self, report: WeightsReport) -> None:
        """Tell the other replicas what the load of other weights has come to here. Call once for a command."""
        self._links.broadcast(report)

    def refuse_load(self, query_id: str, why: str) -> None:
        """Tell the other replicas that this one does not begin a command, and why."""
        self._links.broadcast(LoadRefused(query_id, why))

    def weights_reports(self, query_id: str) -> list[WeightsReport] | None:
        """Return the reports of all other replicas on a command, in their order; None while one is missing.

        Once a replica has refused the command, the result is a report of its refusal alone.
        """
        with self._changed:
            for refused in self._refusals.values():
                if query_id in refused:
                    return [WeightsReport(query_id, refused[query_id])]
            found = [self._reports[rank] for rank in sorted(self._reports) if self._reports[rank].query_id == query_id]
            return found if len(found) == self._num_others else None

    def may_swap(self, query_id: str) -> bool:
        """Return whether this replica swaps its weights now. Called while nothing runs here and no round is started.

        The first call for a command sends `SwapReady`. True once all replicas have sent it, and this one has entered
        all rounds. Links keep the order of messages, so a rank 0 that has all `SwapReady` knows all rounds before the
        swap.
        """
        if self._announced != query_id:
            self._announced = query_id
            self._links.broadcast(SwapReady(query_id))
        with self._changed:
            there = sum(ready == query_id for ready in self._ready.values())
            return there == self._num_others and self._called <= self._entered

    def enter(self, number: int) -> None:
        """Enter round `number`, and announce it unless another replica did. Never blocks."""
        assert number == self._entered + 1, (number, self._entered)
        self._entered = number
        with self._changed:
            heard, self._called = number <= self._called, max(self._called, number)
        if not heard:
            self._links.broadcast(RoundEntered(number))

    @property
    def is_behind(self) -> bool:
        """True when another replica has entered a round that this one has not."""
        with self._changed:
            return self._called > self._entered

    def leave(self) -> None:
        """Announce that this replica stops; call once. From now on the end of a peer is no loss."""
        self._links.broadcast(RoundLeft(self._entered))
        self._links.expect_end()

    @property
    def may_end(self) -> bool:
        """True when all other replicas leave as well, and no round waits for this one."""
        with self._changed:
            return len(self._left) == self._num_others and self._called <= self._entered

    def ended(self, deadline: float) -> bool:
        """Return whether this replica may end, or `deadline` (`time.monotonic()`) has passed."""
        return self.may_end or time.monotonic() >= deadline

    def root_cause(self) -> PdserveError | None:
        """Return the loss behind a failed exchange, after waiting some seconds for it; None: no rank is lost."""
        return self._changed.root_cause()

    def close(self, trouble: PdserveError | None = None) -> None:
        """Close the links; send `trouble` first, the error of an irregular end. May be called again."""
        self._links.close(None if trouble is None else RankFailed(Trouble.of(trouble)))

    def _take(self, rank: int, message: LeaderMessage) -> None:
        """Handle a message. Link thread."""
        with self._changed:
            match message:
                case LoadAgreed():
                    self._loaded[rank] = message
                case RoundEntered(round=number):
                    self._called = max(self._called, number)
                case RoundLeft(round=number):
                    self._called = max(self._called, number)
                    self._left.add(rank)
                case WeightsReport():
                    self._reports[rank] = message
                case LoadRefused(query_id=query_id, why=why):
                    refused = self._refusals.setdefault(rank, {})
                    refused[query_id] = why
                    if len(refused) > MOST_REFUSALS:
                        del refused[next(iter(refused))]
                case SwapReady(query_id=query_id):
                    self._ready[rank] = query_id
                case RankFailed(trouble=trouble):
                    self._links.report(rank, trouble.error())
                case Alive():
                    return
            self._changed.notify_all()
        self.wake()


def meet_leaders(
    num_replicas: int,
    dp_rank: int,
    store: Store,
    token: str,
    *,
    host: str,
    facts: Facts | None = None,
    on_lost: OnLost = end_process,
    times: LinkTimes | None = None,
    timeout_s: float = MEET_TIMEOUT_S,
) -> DpSync:
    """Connect to rank 0 of the other replicas over `store`; `host` is the address at which they reach this process.

    `on_lost` as for `meet_followers`.

    Raises:
        ConfigError: nothing can be bound at `host`, or a replica was started with other flags.
        RankError: a rank 0 did not join in time, or has another token.
    """
    names = [f"replica {number}" for number in range(num_replicas)]
    introduction = Introduction(names, dp_rank, store, token, facts or {}, timeout_s)
    codec = Codec[LeaderMessage](LeaderMessage)
    links: RankLink[LeaderMessage, LeaderMessage] = RankLink(dp_rank, host, codec, codec, times)
    with contextlib.ExitStack() as stack:
        stack.callback(links.close)
        introduction.publish(links.endpoint, links.nonce)
        peers = [introduction.lookup(number) for number in range(num_replicas) if number != dp_rank]
        dp_sync = DpSync(links, peers, token, on_lost)
        stack.pop_all()
    return dp_sync
