"""Sends requests through the servers, many at once but not more than keep them busy. Loop thread only; owned by `LLM`.

With pairs it is the router: it picks the servers with the least to do, makes the room, gives both the same request, and
takes decode's answer.

    job ──> wait for places at a server (or pair) ──> submit ──> updates of all its sequences ──> deliver
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence

import msgspec

from pdserve.errors import PdserveError, RequestError
from pdserve.llm.servers import RunningServer
from pdserve.protocol.messages import GenerateRequest
from pdserve.server.generation import GenerationUpdate

TRIES = 3
"""How often a request is tried that failed for a cause that may pass: a transfer that broke, a server that was full."""
PASSING = frozenset({502, 503})
LINGER_S = 5.0
"""How long prefill may take to see that decode is done."""


@dataclasses.dataclass(frozen=True)
class Job:
    """One prompt: its number in the call, its id, and a request per answer, with no room yet."""

    number: int
    request_id: str
    requests: list[GenerateRequest]


Deliver = Callable[[Job, list[GenerationUpdate] | PdserveError], None]
"""Called once per job, in the order in which they end."""


class OfflineRunner:
    """See the file's docstring. `prefills` is empty where servers do both halves."""

    def __init__(
        self, prefills: Sequence[RunningServer], others: Sequence[RunningServer], *, pause_s: float = 1.0
    ) -> None:
        """`pause_s`: seconds before a second try, twice as long before the third."""
        self._pause_s = pause_s
        self._prefills = prefills
        self._others = others
        self._freed = asyncio.Event()

    async def run(self, jobs: Iterable[Job], deliver: Deliver) -> None:
        """Run all jobs. A failed one is delivered as its error, and the others go on; cancelled, all are aborted."""
        async with asyncio.TaskGroup() as group:
            for job in jobs:
                chosen = await self._take(len(job.requests))
                task = group.create_task(self._run_one(job, chosen, deliver))
                task.add_done_callback(functools.partial(self._release, chosen, len(job.requests)))

    async def _run_one(self, job: Job, chosen: Sequence[RunningServer], deliver: Deliver) -> None:
        for attempt in range(TRIES):
            result = await _try(_again(job, attempt), chosen)
            if not (isinstance(result, RequestError) and result.status in PASSING):
                break
            if attempt + 1 < TRIES:
                await asyncio.sleep(self._pause_s * (attempt + 1))
        deliver(job, result)

    async def _take(self, count: int) -> list[RunningServer]:
        """Places for `count` sequences at the servers with the least to do, once they have them."""
        while True:
            groups = [group for group in (self._prefills, self._others) if group]
            chosen = [min(group, key=lambda running: running.num_live) for group in groups]
            if all(_has_room(running, count) for running in chosen):
                break
            self._freed.clear()
            await self._freed.wait()
        for running in chosen:
            running.num_live += count
        return chosen

    def _release(self, chosen: Sequence[RunningServer], count: int, _: asyncio.Task[None]) -> None:
        """Also called for a task that was cancelled before it began."""
        for running in chosen:
            running.num_live -= count
        self._freed.set()


def _again(job: Job, attempt: int) -> Job:
    """`job` under other ids, so that what is still under way for the try before reaches nobody."""
    if attempt == 0:
        return job
    requests = [msgspec.structs.replace(request, rid=f"{request.rid}.{attempt}") for request in job.requests]
    return dataclasses.replace(job, requests=requests)


async def _try(job: Job, chosen: Sequence[RunningServer]) -> list[GenerationUpdate] | PdserveError:
    try:
        if len(chosen) == 1:
            return await _sequences(chosen[0], job, job.requests)
        return await _through_pair(chosen[0], chosen[1], job)
    except PdserveError as error:
        return error


def _has_room(running: RunningServer, count: int) -> bool:
    return running.num_live == 0 or running.num_live + count <= running.server.most_requests


async def _sequences(
    running: RunningServer, job: Job, requests: Sequence[GenerateRequest], begun: asyncio.Event | None = None
) -> list[GenerationUpdate]:
    """Submit to one server, and all that came of each sequence; `begun` is set with the first news."""
    generation = await running.context.client.submit(requests, [job.request_id] * len(requests))
    whole = [GenerationUpdate(index) for index in range(len(requests))]
    async with generation:
        async for update in generation:
            whole[update.index].absorb(update)
            if begun is not None:
                begun.set()
    return whole


async def _through_pair(prefill: RunningServer, decode: RunningServer, job: Job) -> list[GenerationUpdate]:
    """Both halves at once. Prefill's failure counts until decode has begun; then its KV cache has arrived."""
    requests = [msgspec.structs.replace(request, room=prefill.room()) for request in job.requests]
    begun = asyncio.Event()
    async with _task(_sequences(prefill, job, requests)) as first:
        async with _task(_sequences(decode, job, requests, begun)) as second:
            await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
            if first.done() and not begun.is_set():
                await first  # raises what went wrong, if anything did
            updates = await second
        await asyncio.wait({first}, timeout=LINGER_S)
        return updates


@contextlib.asynccontextmanager
async def _task(
    work: Coroutine[None, None, list[GenerationUpdate]],
) -> AsyncIterator[asyncio.Task[list[GenerationUpdate]]]:
    """`work` beside the block; what has not ended with the block is cancelled."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
