"""Requests that come from another server, and requests that another server has taken. Owned by `EngineClient`.

    D: /migrate_in ──> IncomingRequests.add ──> the scheduler ──> outputs are kept until a reader comes
                                                                      ├─ /migrate_stream: the other server
                                                                      └─ a stream with `pdserve_resume.attach`
    S: MovedRequests.follow ──> reads /migrate_stream of D ──> the request's own Generation

The scheduler of D sends the last token of S again, as the first token of the transfer; it is left out here. A request
that comes without its KV has no such token. Event loop only.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator, Callable

import msgspec

from pdserve.errors import PdserveError, RequestError
from pdserve.protocol.failure import Failure
from pdserve.protocol.messages import EngineCoreOutput, FinishReason, GenerateRequest

log = logging.getLogger(__name__)

ATTACH_S = 10.0
"""Seconds after which a request without a reader ends."""
MAX_INCOMING = 4096
"""Most requests from other servers at a time."""
FOLLOW_S = 10.0
"""Seconds from the end of a moved request in the scheduler here until the other server's output is read."""
TARGET_FAILED = "migration_target_failed"
Outputs = AsyncIterator[EngineCoreOutput]


@dataclasses.dataclass(eq=False)
class IncomingRequest:
    """A request of another server. `outputs` are those that no reader has taken, without the repeated token."""

    request: GenerateRequest
    outputs: list[EngineCoreOutput] = dataclasses.field(default_factory=list)
    news: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    runs: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    """Set once the request is computed here, or has failed."""
    failure: Failure | None = None
    has_begun: bool = False
    has_ended: bool = False
    """True: it has ended without a token, as a prefix does."""
    is_attached: bool = False
    timer: asyncio.TimerHandle | None = None
    held: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)
    """What is closed once the request has a reader or has ended, such as its place in the drain gate."""

    @property
    def repeats_token(self) -> bool:
        """True when the first token here is the other server's last one, which came with its KV."""
        return not self.request.taken_over

    @property
    def num_tokens(self) -> int:
        """Output tokens that the other server generated."""
        return len(self.request.prior_output_ids) + self.repeats_token

    def put(self, output: EngineCoreOutput) -> None:
        """Add an output of the scheduler."""
        if output.finish is not None and not self.has_begun and not output.token_ids:
            self.failure = output.finish.failure
            self.has_ended = True
        starts = not self.has_begun
        if output.token_ids and starts:
            self.has_begun = True
        if output.token_ids and starts and self.repeats_token:
            logprobs = None if output.logprobs is None else output.logprobs[1:]
            output = msgspec.structs.replace(output, token_ids=output.token_ids[1:], logprobs=logprobs)
        if output.token_ids or output.finish is not None:
            self.outputs.append(output)
        self.runs.set()
        self.news.set()


class IncomingRequests:
    """Requests of other servers by their rid here. `abort` ends one at the scheduler."""

    def __init__(self, abort: Callable[[str], None]) -> None:
        self._abort = abort
        self._requests: dict[str, IncomingRequest] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, rid: str) -> bool:
        return rid in self._requests

    def add(self, request: GenerateRequest) -> IncomingRequest:
        """Add a request that is sent to the scheduler next.

        Raises:
            RequestError: 409 when the rid is in use; 503 when there are too many.
        """
        if request.rid in self._requests:
            raise RequestError(f"rid {request.rid!r} is in use", field="rid", status=409, code="rid_in_use")
        if len(self._requests) >= MAX_INCOMING:
            raise RequestError("too many requests of other servers", status=503, code="migration_no_room")
        entry = self._requests[request.rid] = IncomingRequest(request)
        return entry

    def on_output(self, output: EngineCoreOutput) -> None:
        """Keep an output of a request here; outputs of other requests are dropped."""
        entry = self._requests.get(output.rid)
        if entry is not None:
            entry.put(output)

    def wait_for_reader(self, entry: IncomingRequest) -> None:
        """End the request unless a reader comes within `ATTACH_S`."""
        loop = asyncio.get_running_loop()
        entry.timer = loop.call_later(ATTACH_S, self.drop, entry.request.rid)

    def drop(self, rid: str) -> None:
        """Forget a request, and end it at the scheduler unless it has ended."""
        entry = self._requests.pop(rid, None)
        if entry is None:
            return
        entry.held.close()
        if entry.timer is not None:
            entry.timer.cancel()
        if not entry.has_ended and not any(output.finish is not None for output in entry.outputs):
            self._abort(rid)

    def end_all(self, error: PdserveError) -> None:
        """End all requests with `error`, which their readers get, and those that wait for one."""
        if isinstance(error, RequestError):
            failure = Failure.from_error(error)
        else:
            failure = Failure(code="aborted", message=str(error), status=503)
        for rid, entry in list(self._requests.items()):
            entry.put(EngineCoreOutput(rid=rid, token_ids=[], finish=FinishReason.failed(failure)))
            self._abort(rid)
            if entry.has_begun and not entry.is_attached:
                self.drop(rid)

    def attach(self, rid: str, field: str) -> IncomingRequest:
        """Give the request to a reader; there is one at most.

        Raises:
            RequestError: 404, naming `field`.
        """
        entry = self._requests.get(rid)
        if entry is None or entry.is_attached or not entry.has_begun:
            message = f"{field}: no request {rid!r} waits here for a reader"
            raise RequestError(message, field=field, status=404, code="no_such_request")
        entry.is_attached = True
        if entry.timer is not None:
            entry.timer.cancel()
        return entry

    def take(self, rid: str, field: str, num_tokens: int) -> IncomingRequest:
        """Attach, and forget the request: its later outputs go to a live sequence of that rid.

        Raises:
            RequestError: 400 when the reader does not have exactly the other server's `num_tokens` output tokens.
        """
        known = self._requests.get(rid)
        if known is not None and known.num_tokens != num_tokens:
            message = f"{field}: the reader has {num_tokens} output tokens, and the request had {known.num_tokens}"
            raise RequestError(message, field="pdserve_resume.token_ids")
        entry = self.attach(rid, field)
        entry.held.close()
        del self._requests[rid]
        return entry

    async def read(self, entry: IncomingRequest) -> Outputs:
        """Yield the outputs of an attached request to its end. A reader that leaves early ends the request."""
        rid = entry.request.rid
        entry.held.close()
        try:
            while True:
                while entry.outputs:
                    output = entry.outputs.pop(0)
                    yield output
                    if output.finish is not None:
                        self._requests.pop(rid, None)
                        return
                entry.news.clear()
                await entry.news.wait()
        finally:
            self.drop(rid)


class MovedRequests:
    """Requests of this server that another one computes. `feed` takes their outputs, under their rid here."""

    def __init__(self, feed: Callable[[EngineCoreOutput], None]) -> None:
        self._feed = feed
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def __contains__(self, rid: str) -> bool:
        return rid in self._tasks

    def __len__(self) -> int:
        return len(self._tasks)

    def follow(self, rid: str, outputs: Outputs) -> None:
        """Feed the outputs of a moved request until its end."""
        self._tasks[rid] = asyncio.create_task(self._follow(rid, outputs))

    def expect(self, rid: str, is_live: Callable[[], bool]) -> None:
        """Fail a request that the scheduler has given away unless `follow` comes within `FOLLOW_S`.

        The reply to the commit may be lost, and then it does not come. `is_live`: whether the request has a client.
        """
        asyncio.get_running_loop().call_later(FOLLOW_S, self._check, rid, is_live)

    def ended(self, rid: str) -> None:
        """Stop reading: the sequence has ended here. The other server then ends the request."""
        task = self._tasks.pop(rid, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    def abort(self, rid: str, failure: Failure) -> bool:
        """End a moved request; False: it is not one."""
        if rid not in self._tasks:
            return False
        self._feed(EngineCoreOutput(rid=rid, token_ids=[], finish=FinishReason.failed(failure)))
        return True

    async def close(self) -> None:
        """Stop reading all requests."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _check(self, rid: str, is_live: Callable[[], bool]) -> None:
        if rid not in self._tasks and is_live():
            self._fail(rid, "the commit of the migration has no answer")

    def _fail(self, rid: str, why: str) -> None:
        message = f"the server that has taken over the request failed: {why}"
        failure = Failure(code=TARGET_FAILED, message=message, status=502)
        self._feed(EngineCoreOutput(rid=rid, token_ids=[], finish=FinishReason.failed(failure)))

    async def _follow(self, rid: str, outputs: Outputs) -> None:
        finished, why = False, "its answer ended early"
        try:
            async with contextlib.aclosing(outputs):  # type: ignore[type-var]
                async for output in outputs:
                    if rid not in self._tasks:
                        return
                    finished = output.finish is not None
                    self._feed(msgspec.structs.replace(output, rid=rid))
                    if finished:
                        break
        except PdserveError as error:
            why = str(error)
        if not finished and rid in self._tasks:
            self._fail(rid, why)
        self._tasks.pop(rid, None)
