"""Ends tries from outside: their worker is silent, or the router itself ends. Made by `dispatch` and `app`.

    Try     health ── lost ──┐
            Drain ── cut ────┴──> `ended` ──> what `dispatch` waits for; the exception that `relay` reads
    Drain   open ── close ──> 503 for new requests, those that run go on ── cut ──> each of them ends now

A try that has no byte yet ends as any other failure does: it is tried elsewhere, or answered with an error. A stream
that has begun ends in an error event. Event loop only.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

from pdserve.router.workers.admission import Refused
from pdserve.router.workers.outcome import WORKER_FAILED, ConnectionFailed, EndedError, WorkerStream
from pdserve.router.workers.workers import Pair, Worker

SHUTTING_DOWN = Refused("router_shutting_down", "the router is shutting down; send the request again")
WRITE_S = 2.0
"""How long clients may take to read the error that their request is cut with."""


class Attempt:
    """One try at a pair, as long as its `with` block. `ended` is done when it was ended from outside, and says why."""

    def __init__(self, pair: Pair, drain: Drain, goes_on_without: Callable[[Pair], bool] = lambda pair: False) -> None:
        """`goes_on_without`: whether decode is to do without the prefill server of the pair when that is lost."""
        self._goes_on_without = goes_on_without
        self._workers = [pair.decode] if pair.prefill is None else [pair.prefill, pair.decode]
        self.pair = pair
        self.begun = asyncio.get_running_loop().time()
        self._drain = drain
        self._live: WorkerStream | None = None
        self.ended: asyncio.Future[ConnectionFailed | Refused] = asyncio.get_running_loop().create_future()

    def __enter__(self) -> Self:
        for worker in self._workers:
            worker.tries.add(self)
        self._drain.enter(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers:
            worker.tries.discard(self)
            worker.num_heard += self.num_bytes(worker)
        self._drain.leave(self)

    @property
    def waits(self) -> bool:
        """Whether no answer has begun."""
        return self._live is None and not self.ended.done()

    def lost(self, worker: Worker, reason: str) -> None:
        """See `LosesWorker`. Prefill's end does not concern an answer that decode has begun."""
        if worker is self.pair.prefill and self._goes_on_without(self.pair):
            return
        if self._live is None or self._live.worker is worker:
            self._end(ConnectionFailed(worker, reason, lost=True))

    def cut(self) -> None:
        """The router ends."""
        self._end(SHUTTING_DOWN)

    def answers(self, live: WorkerStream) -> None:
        """Decode has begun its answer, which ends with this try."""
        self._live = live
        if self.ended.done():
            self._break(live, self.ended.result())

    def num_bytes(self, worker: Worker) -> int:
        """What `worker` has written of its answer so far."""
        return 0 if self._live is None or self._live.worker is not worker else self._live.response.content.total_bytes

    def _end(self, why: ConnectionFailed | Refused) -> None:
        if not self.ended.done():
            self.ended.set_result(why)
            if self._live is not None:
                self._break(self._live, why)

    @staticmethod
    def _break(live: WorkerStream, why: ConnectionFailed | Refused) -> None:
        """Whoever reads the answer gets an `EndedError`."""
        if live.response.content.is_eof():
            return
        if isinstance(why, Refused):
            error = EndedError(why.message, why.status, why.reason)
        else:
            error = EndedError(f"the {why.worker.spec.role} worker is dead: {why.message}", 502, WORKER_FAILED)
        live.response.content.set_exception(error)


class Drain:
    """The end of one router: see the file's docstring."""

    def __init__(self) -> None:
        self.tries: set[Attempt] = set()
        """All that are under way."""
        self._num_calls = 0
        self._left = asyncio.Event()
        self.closed = False
        """New requests are refused with `SHUTTING_DOWN`."""
        self.is_cut = False
        """Those that run are, too."""

    def close(self) -> None:
        """Take nothing new."""
        self.closed = True

    def cut(self) -> None:
        """End what runs."""
        self.closed = self.is_cut = True
        for one in list(self.tries):
            one.cut()

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """A request of a client, from its arrival to the end of its answer."""
        self._num_calls += 1
        try:
            yield
        finally:
            self._num_calls -= 1
            self._left.set()

    async def empty(self, timeout_s: float) -> bool:
        """Wait until no request runs; False when some still do after `timeout_s` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._num_calls:
                    self._left.clear()
                    await self._left.wait()
        return self._num_calls == 0

    def enter(self, one: Attempt) -> None:
        """Called by the try."""
        self.tries.add(one)
        if self.is_cut:
            one.cut()

    def leave(self, one: Attempt) -> None:
        """Called by the try."""
        self.tries.discard(one)
