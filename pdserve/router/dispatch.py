"""One request's way through the router: pick a pair, send the same body to both, take decode's answer.

    try 1..max_tries:  pick pair, mint room
                       prefill POST ----- read whole ----->|
                       decode  POST ----- first bytes ---->| judge: decode answered -> relay; one failed -> cancel both
    after the first byte nothing is tried again, nor when the last worker that was left says when to come back

A pair is one thing: whatever ends a try (a failed half, the client's disconnect, the deadline) closes both
connections, which is how a worker learns that it must abort. Called by `app`; relaying is in `relay`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import random
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import orjson
from multidict import CIMultiDict

from pdserve.router.config import RouterConfig
from pdserve.router.conversation import conversation_key
from pdserve.router.metrics import RouterMetrics
from pdserve.router.rooms import with_rooms
from pdserve.router.upstream import Broken, Live, Whole, open_live, read_whole
from pdserve.router.workers import Pair, Worker, WorkerPool

log = logging.getLogger(__name__)

RETRYABLE_STATUSES = frozenset({502, 503})
PREFILL_GRACE_S = 1.0
"""How long prefill's answer may take after decode's has ended; it was handed over long before."""


@dataclasses.dataclass(frozen=True)
class Call:
    """What a client asked for: the path, its JSON object, the headers for the workers."""

    path: str
    body: dict[str, Any]
    headers: CIMultiDict[str]


@dataclasses.dataclass(frozen=True)
class Refused:
    """No try could be made: nothing is alive."""


Outcome = Live | Whole | Broken | Refused


def judge(prefill: Whole | Broken | None, decode: Live | Whole | Broken | None) -> Live | Whole | Broken | None:
    """What a try has come to; None while it is open. `prefill` None means no answer yet, or no prefill at all.

    Once decode has its first bytes the KV cache has arrived, so that prefill does not matter any more. Of two
    failures the client's own fault (4xx) says more than a server's, and prefill's says more than decode's.
    """
    if isinstance(decode, Live):
        return decode
    failures = [half for half in (prefill, decode) if failed(half)]
    failures.sort(key=lambda half: not (isinstance(half, Whole) and half.status < 500))
    return failures[0] if failures else None


def failed(half: Live | Whole | Broken | None) -> bool:
    """Whether one half ended without a good answer."""
    return isinstance(half, Broken) or (isinstance(half, Whole) and half.status >= 400)


def retryable(outcome: Outcome) -> bool:
    """Whether another try may help."""
    return isinstance(outcome, Broken) or (isinstance(outcome, Whole) and outcome.status in RETRYABLE_STATUSES)


def told_to_wait(outcome: Outcome) -> bool:
    """Whether a worker said when to come back (`Retry-After`): it has no room, and knows it."""
    return isinstance(outcome, Whole) and "Retry-After" in outcome.headers


class Dispatcher:
    """Sends calls to pairs; one per app."""

    def __init__(
        self,
        config: RouterConfig,
        pool: WorkerPool,
        session: aiohttp.ClientSession,
        metrics: RouterMetrics,
        rng: random.Random,
    ) -> None:
        self._config = config
        self._pool = pool
        self._session = session
        self._metrics = metrics
        self._rng = rng

    @contextlib.asynccontextmanager
    async def answer(self, call: Call) -> AsyncIterator[Outcome]:
        """The final outcome, tried as often as allowed; leaving the block closes whatever is still open."""
        avoid: set[Worker] = set()
        by_conversation = self._config.policy == "consistent_hashing"
        key = conversation_key(call.path, call.body, call.headers) if by_conversation else None
        outcome: Outcome = Refused()
        for attempt in range(1, self._config.max_tries + 1):
            pair = self._pool.pick(avoid, key)
            if pair is None:
                break
            if attempt > 1:
                self._metrics.retries.inc()
            async with self._attempt(pair, call) as tried:
                if not retryable(tried):
                    yield tried
                    return
            outcome = tried
            avoid.add(tried.worker)
            if told_to_wait(tried) and not self._pool.others(tried.worker.spec.role, avoid):
                break
            await self._after_failure(tried, attempt)
        yield outcome

    @contextlib.asynccontextmanager
    async def _attempt(self, pair: Pair, call: Call) -> AsyncIterator[Live | Whole | Broken]:
        """One try. On leaving, both connections are closed."""
        body = call.body
        if pair.prefill is not None:
            body = with_rooms(call.path, body, pair.prefill.spec.host, pair.prefill.bootstrap_port, self._rng)
        data = orjson.dumps(body)
        decode = asyncio.create_task(self._decode_half(pair.decode, call, data))
        prefill = None
        if pair.prefill is not None:
            prefill = asyncio.create_task(self._prefill_half(pair.prefill, call, data))
        with self._pool.hold(pair.decode):
            try:
                outcome = await self._wait(prefill, decode)
                self._count_failure(outcome)
                yield outcome
                if prefill is not None and isinstance(outcome, Live):
                    await asyncio.wait({prefill}, timeout=PREFILL_GRACE_S)
            finally:
                await _close(prefill, decode)

    async def _wait(
        self,
        prefill: asyncio.Task[Whole | Broken] | None,
        decode: asyncio.Task[Live | Whole | Broken],
    ) -> Live | Whole | Broken:
        """Until decode has answered or either half has failed.

        Prefill's input logprobs belong to be merged into decode's answer here: both are at hand, nothing was sent.
        """
        while True:
            pending = [half for half in (prefill, decode) if half is not None and not half.done()]
            verdict = judge(
                prefill.result() if prefill is not None and prefill.done() else None,
                decode.result() if decode.done() else None,
            )
            if verdict is not None:
                return verdict
            assert pending, "a decode that is done is an answer or a failure"
            await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)

    async def _prefill_half(self, worker: Worker, call: Call, data: bytes) -> Whole | Broken:
        with self._pool.hold(worker):
            return await read_whole(self._session, worker, call.path, data, call.headers)

    async def _decode_half(self, worker: Worker, call: Call, data: bytes) -> Live | Whole | Broken:
        return await open_live(self._session, worker, call.path, data, call.headers)

    async def _after_failure(self, outcome: Live | Whole | Broken, attempt: int) -> None:
        """Before the next try: see whether a silent worker is still there, and leave a busy one some time."""
        if isinstance(outcome, Broken):
            await self._pool.check(outcome.worker)
        if attempt < self._config.max_tries:
            await asyncio.sleep(self._config.retry_backoff_s * 2 ** (attempt - 1))

    def _count_failure(self, outcome: Live | Whole | Broken) -> None:
        if isinstance(outcome, Live):
            return
        spec = outcome.worker.spec
        kind = "connection" if isinstance(outcome, Broken) else str(outcome.status)
        self._metrics.worker_errors.labels(spec.role, spec.url, kind).inc()
        log.info("%s %s failed: %s", spec.role, spec.url, outcome.message if isinstance(outcome, Broken) else kind)


async def _close(prefill: asyncio.Task[Whole | Broken] | None, decode: asyncio.Task[Live | Whole | Broken]) -> None:
    """Cancel both halves; closes decode's connection unless its answer was read to the end."""
    halves: list[asyncio.Task[Any]] = [decode] if prefill is None else [prefill, decode]
    for half in halves:
        half.cancel()
    for result in await asyncio.gather(*halves, return_exceptions=True):
        if isinstance(result, Live):
            result.response.close()
        elif isinstance(result, Exception):
            log.error("a call to a worker ended in an unexpected error", exc_info=result)
