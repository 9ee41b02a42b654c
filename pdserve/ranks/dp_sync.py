"""Replicas that compute every step together, a round, as DP attention asks: how their leaders call each other to it.

    a leader with something to compute enters round k ── Entered(k) ──> the others: who has nothing to compute
                                                                        enters round k with no tokens

Who has heard of a round enters it silently. So a round is announced by those who enter it by themselves, and reaches
everybody; where nobody has anything to compute nothing is said. As every leader enters every round in its order,
and nothing else holds up a round that all have entered, there is always one that can go on.

One `DpSync` in each leader's process, made by its composition root, used on the scheduler thread; the others'
messages come in on the link thread.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Annotated

import msgspec
from torch._C._distributed_c10d import Store

from pdserve.errors import PdserveError
from pdserve.model.params import WeightSamples
from pdserve.protocol.codec import Codec
from pdserve.ranks.failure_detector import LinkTimes, PeerRank
from pdserve.ranks.links import RankLink, end_process
from pdserve.ranks.messages import Alive, RankFailed, Trouble
from pdserve.ranks.rendezvous import MEET_TIMEOUT_S, Facts, Introduction

Round = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_VERDICT_S = 3.0
_SLICE_S = 0.5
_OnLost = Callable[[PdserveError], None]


class LoadAgreed(msgspec.Struct, frozen=True, tag="Loaded"):
    """The replica can compute; `samples` of the weights of each of its ranks."""

    samples: tuple[dict[str, dict[int, float]], ...]


class RoundEntered(msgspec.Struct, frozen=True, tag="Entered"):
    """The sender enters this round."""

    round: Round


class RoundLeft(msgspec.Struct, frozen=True, tag="Left"):
    """The sender was told to stop in this round, and enters later ones only where it is called."""

    round: Round


LeaderMessage = LoadAgreed | RoundEntered | RoundLeft | RankFailed | Alive


class DpSync:
    """This replica's leader among the others', which are `peers`. Rounds are counted from 1, like a scheduler's steps.

    `wake` is called on the link thread when another leader has entered a round that we have not, or leaves.
    """

    def __init__(
        self, links: RankLink[LeaderMessage, LeaderMessage], peers: Sequence[PeerRank], token: str, on_lost: _OnLost
    ) -> None:
        self._links = links
        self._num_others = len(peers)
        self._changed = threading.Condition()
        self._called = 0
        self._entered = 0
        self._loaded: dict[int, LoadAgreed] = {}
        self._left: set[int] = set()
        self._lost: PdserveError | None = None
        self._end_server = on_lost
        self.wake: Callable[[], None] = lambda: None
        links.connect(
            peers,
            token,
            alive=Alive(),
            on_message=self._take,
            on_lost=self._give_up,
            last_words=lambda error: RankFailed(Trouble.of(error)),
        )

    def share_samples(self, samples: Sequence[WeightSamples]) -> list[WeightSamples]:
        """Those of the other replicas' ranks, `samples` being those of ours. Blocks until all have loaded.

        Raises:
            PdserveError: why the server ends.
        """
        ours = tuple({name: dict(values) for name, values in rank.items()} for rank in samples)
        self._links.broadcast(LoadAgreed(ours))
        with self._changed:
            while not self._changed.wait_for(
                lambda: self._lost is not None or len(self._loaded) == self._num_others, _SLICE_S
            ):
                pass
            if self._lost is not None:
                raise self._lost
            return [rank for loaded in self._loaded.values() for rank in loaded.samples]

    def enter(self, number: int) -> None:
        """We are about to compute round `number`: all others shall, too. Never blocks."""
        assert number == self._entered + 1, (number, self._entered)
        self._entered = number
        with self._changed:
            heard, self._called = number <= self._called, max(self._called, number)
        if not heard:
            self._links.broadcast(RoundEntered(number))

    @property
    def is_behind(self) -> bool:
        """Whether others have entered a round that we have not."""
        with self._changed:
            return self._called > self._entered

    def leave(self) -> None:
        """We shall stop; to be called once. From now on nobody's end is taken for a loss."""
        self._links.broadcast(RoundLeft(self._entered))
        self._links.expect_end()

    @property
    def may_end(self) -> bool:
        """Whether all others leave as well, and nobody needs us for a round any more."""
        with self._changed:
            return len(self._left) == self._num_others and self._called <= self._entered

    def ended(self, deadline: float) -> bool:
        """Whether we may end, or it is too late (`time.monotonic()`) for the others to say so."""
        return self.may_end or time.monotonic() >= deadline

    def root_cause(self) -> PdserveError | None:
        """An exchange with other ranks failed here: who is lost, if anybody, as soon as that is known."""
        with self._changed:
            self._changed.wait_for(lambda: self._lost is not None, _VERDICT_S)
            return self._lost

    def close(self, trouble: PdserveError | None = None) -> None:
        """End the links, and say why when that was not wanted. May be called again."""
        self._links.close(None if trouble is None else RankFailed(Trouble.of(trouble)))

    def _take(self, rank: int, message: LeaderMessage) -> None:
        """Link thread."""
        with self._changed:
            match message:
                case LoadAgreed():
                    self._loaded[rank] = message
                case RoundEntered(round=number):
                    self._called = max(self._called, number)
                case RoundLeft(round=number):
                    self._called = max(self._called, number)
                    self._left.add(rank)
                case RankFailed(trouble=trouble):
                    self._links.report(rank, trouble.error())
                case Alive():
                    return
            self._changed.notify_all()
        self.wake()

    def _give_up(self, error: PdserveError) -> None:
        """Link thread; the others have been told."""
        with self._changed:
            self._lost = error
            self._changed.notify_all()
        self._end_server(error)


def meet_leaders(
    num_replicas: int,
    dp_rank: int,
    store: Store,
    token: str,
    *,
    host: str,
    facts: Facts | None = None,
    on_lost: _OnLost = end_process,
    times: LinkTimes | None = None,
    timeout_s: float = MEET_TIMEOUT_S,
) -> DpSync:
    """Meet the leaders of the other replicas over `store`; `host` is where they reach us.

    `on_lost` as for `meet_followers`.

    Raises:
        ConfigError: nothing can be bound at `host`, or a replica was started differently.
        RankError: a leader did not come in time, or has another token.
    """
    names = [f"replica {number}" for number in range(num_replicas)]
    introduction = Introduction(names, dp_rank, store, token, facts or {}, timeout_s)
    codec = Codec[LeaderMessage](LeaderMessage)
    links: RankLink[LeaderMessage, LeaderMessage] = RankLink(dp_rank, host, codec, codec, times)
    with contextlib.ExitStack() as stack:
        stack.callback(links.close)
        introduction.publish(links.endpoint, links.nonce)
        peers = [introduction.lookup(number) for number in range(num_replicas) if number != dp_rank]
        lockstep = DpSync(links, peers, token, on_lost)
        stack.pop_all()
    return lockstep
