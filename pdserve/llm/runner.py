"""Runs the requests of a call on the servers, with bounded concurrency. Loop thread only; owned by `LLM`.

With prefill/decode pairs it acts as the router: it picks the least loaded servers, creates the bootstrap room, sends
both the same request, and returns decode's output.

    job ──> wait for capacity at a server (or pair) ──> submit ──> updates of all its sequences ──> deliver
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
from pdserve.protocol.failure import Failure
from pdserve.protocol.messages import GenerateRequest
from pdserve.server.engine_client.live_requests import RequestState
from pdserve.server.generation import GenerationUpdate

TRIES = 3
"""Maximum attempts of a request with a retryable failure, such as a broken transfer or a full server."""
LINGER_S = 5.0
"""Seconds to wait for prefill's half after decode has ended; then the half is cancelled."""


@dataclasses.dataclass(frozen=True)
class Job:
    """One prompt: its number in the call, its id, and a request per output sequence, without a bootstrap room."""

    number: int
    request_id: str
    requests: list[GenerateRequest]


Deliver = Callable[[Job, list[GenerationUpdate] | PdserveError], None]
"""Called once per job, in the order in which the jobs end."""


class OfflineRunner:
    """See the file's docstring. `prefills` is empty without disaggregation."""

    def __init__(
        self, prefills: Sequence[RunningServer], others: Sequence[RunningServer], *, pause_s: float = 1.0
    ) -> None:
        """`pause_s`: seconds of backoff before the second attempt, doubled before the third."""
        self._pause_s = pause_s
        self._prefills = prefills
        self._others = others
        self._freed = asyncio.Event()

    async def run(self, jobs: Iterable[Job], deliver: Deliver) -> None:
        """Run all jobs. A failed job is delivered as its error and stops no other job. Cancellation aborts all jobs."""
        async with asyncio.TaskGroup() as group:
            for job in jobs:
                chosen = await self._take(len(job.requests))
                task = group.create_task(self._run_one(job, chosen, deliver))
                task.add_done_callback(functools.partial(self._release, chosen, len(job.requests)))

    async def _run_one(self, job: Job, chosen: Sequence[RunningServer], deliver: Deliver) -> None:
        for attempt in range(TRIES):
            result = await _try(_again(job, attempt), chosen)
            if not (isinstance(result, RequestError) and Failure.from_error(result).retryable):
                break
            if attempt + 1 < TRIES:
                await asyncio.sleep(self._pause_s * (attempt + 1))
        deliver(job, result)

    async def _take(self, count: int) -> list[RunningServer]:
        """Wait for capacity for `count` sequences at the least loaded servers, and reserve it."""
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
        """Release the capacity of a job. Also called for a task that was cancelled before it began."""
        for running in chosen:
            running.num_live -= count
        self._freed.set()


def _again(job: Job, attempt: int) -> Job:
    """Copy `job` with new rids, so that late outputs of the previous attempt are dropped."""
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
    """Submit to one server and return the merged updates of each sequence; the first update sets `begun`."""
    states = [RequestState(request=request, name=job.request_id, index=i) for i, request in enumerate(requests)]
    generation = await running.context.client.submit(states)
    whole = [GenerationUpdate(index) for index in range(len(requests))]
    async with generation:
        async for update in generation:
            whole[update.index].absorb(update)
            if begun is not None:
                begun.set()
    return whole


async def _through_pair(prefill: RunningServer, decode: RunningServer, job: Job) -> list[GenerationUpdate]:
    """Run prefill and decode at once. Prefill's failure fails the job only before decode's first update.

    With that update the KV cache has arrived.
    """
    requests = [msgspec.structs.replace(request, room=prefill.room()) for request in job.requests]
    begun = asyncio.Event()
    async with _task(_sequences(prefill, job, requests)) as first:
        async with _task(_sequences(decode, job, requests, begun)) as second:
            await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
            if first.done() and not begun.is_set():
                await first  # raises prefill's error, if it failed
            updates = await second
        await asyncio.wait({first}, timeout=LINGER_S)
        return updates


@contextlib.asynccontextmanager
async def _task(
    work: Coroutine[None, None, list[GenerationUpdate]],
) -> AsyncIterator[asyncio.Task[list[GenerationUpdate]]]:
    """Run `work` as a task during the block, and cancel it at the end of the block."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
