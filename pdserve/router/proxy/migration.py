"""Moves running requests of a draining decode worker to other decode workers. Made by `app`.

    Registry.drain ──> Migrator: for each attempt at the worker, at most `MOST_AT_ONCE` at a time
                         POST /migrate {"rid", "to", "attach"} to the worker S
                           200 ──> the request runs at D
                                     attach: S ends the stream with the event `migrated`, and `StreamProgress` opens
                                     the rest at D; else: S passes D's answer on, and its connection stays open
                           409, 502, 503 ──> the request goes on at S; another D, or later once more

`docs/migration.md` has the contract of `/migrate`. A request without a `rid` that names it alone (`n` above 1, batches)
does not move: it ends where it runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from typing import Any

import aiohttp
import msgspec
import orjson
from aiohttp import web

from pdserve.router.config.config import RouterConfig, WorkerRole
from pdserve.router.http import BODY, error_response, json_response
from pdserve.router.proxy.attempts import Attempt, Drain
from pdserve.router.workers.admission import Admission
from pdserve.router.workers.api import BadBody, parse_body
from pdserve.router.workers.metrics import RouterMetrics
from pdserve.router.workers.outcome import describe, own_headers
from pdserve.router.workers.workers import Registry, Worker

log = logging.getLogger(__name__)

PATH = "/migrate"
MOST_AT_ONCE = 2
"""Requests of one worker that move at a time."""
MAX_TRIES = 20
"""Calls of `/migrate` for one request in one drain."""
FIRST_WAIT_S, MAX_WAIT_S = 0.1, 2.0
"""Seconds between two calls for one request: the first wait, and the longest."""
POLL_S = 0.2
TIMEOUT_S = 180.0
"""Seconds for an answer to `/migrate`."""
MOVED, GONE, LATER, REFUSED, FAILED = "moved", "gone", "later", "refused", "failed"
"""Results of a call: the request runs at the other worker; it has ended or not arrived; it cannot move yet; never to
this worker; it failed, and another worker may take it.
"""


class MoveBody(msgspec.Struct, forbid_unknown_fields=True):
    """`POST /migrate` at the router. `rid`: the client's. `to`: URL or id of a decode worker; None: one is chosen."""

    rid: str
    to: str | None = None


class Migrator:
    """Moves requests while the app runs. Event loop only."""

    def __init__(
        self,
        config: RouterConfig,
        registry: Registry,
        admission: Admission,
        session: aiohttp.ClientSession,
        metrics: RouterMetrics,
        drain: Drain,
        rng: random.Random,
    ) -> None:
        self._config = config
        self._registry = registry
        self._admission = admission
        self._session = session
        self._metrics = metrics
        self._drain = drain
        self._rng = rng
        self._tasks: dict[Worker, asyncio.Task[None]] = {}
        if config.drain_migrate:
            registry.on_draining.append(self._begin)

    async def close(self) -> None:
        """Stop; requests that are moving move on."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def post(self, request: web.Request) -> web.Response:
        """Move one request, see `MoveBody`. Answers with the worker's answer."""
        try:
            body = parse_body(request[BODY], MoveBody)
        except BadBody as error:
            return error_response(400, str(error), "invalid_request", param=error.field)
        attempt = next((one for one in self._drain.attempts if body.rid in one.rids), None)
        if attempt is None:
            text = f"no running request of this router has the rid {body.rid!r}"
            return error_response(404, text, "no_such_request", param="rid")
        source = attempt.pair.decode
        target = self._target(source, set()) if body.to is None else self._registry.find(body.to)
        if target is None or target.spec.role is not source.spec.role or target is source or not target.usable:
            text = f"{body.to!r} is no other {source.spec.role} worker that is healthy and not draining"
            return error_response(404, text, "worker_not_found", param="to")
        try:
            status, answer = await self._ask(attempt, target)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            text = f"{source.spec.url} does not answer: {describe(error)}"
            return error_response(502, text, "worker")
        self._count(source, target, _result_of(status, answer))
        return json_response(answer, status=status)

    # ------------------------------------------------------------------ drains

    def _begin(self, worker: Worker) -> None:
        if worker.spec.role is WorkerRole.DECODE and worker not in self._tasks:
            task = self._tasks[worker] = asyncio.create_task(self._empty(worker))
            task.add_done_callback(lambda _: self._tasks.pop(worker, None))

    async def _empty(self, worker: Worker) -> None:
        """Move the worker's requests until it has none, serves again, or is removed."""
        seen: set[Attempt] = set()
        moving: set[asyncio.Task[None]] = set()
        try:
            while worker.draining and not worker.forgotten:
                here = [one for one in self._drain.attempts if one.pair.decode is worker]
                seen.intersection_update(here)
                new = [one for one in here if one.rids and one not in seen]
                for attempt in new[: MOST_AT_ONCE - len(moving)]:
                    seen.add(attempt)
                    moving.add(asyncio.create_task(self._move(attempt, worker)))
                if not here and not moving:
                    return
                if moving:
                    _, moving = await asyncio.wait(moving, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
                else:
                    await asyncio.sleep(POLL_S)
        finally:
            for task in moving:
                task.cancel()
            await asyncio.gather(*moving, return_exceptions=True)

    async def _move(self, attempt: Attempt, worker: Worker) -> None:
        """Move one request; it stays at `worker` after `MAX_TRIES`, and where no worker takes it."""
        unfit: set[Worker] = set()
        wait_s = FIRST_WAIT_S
        worker.num_moving += 1
        try:
            for _ in range(MAX_TRIES):
                if attempt not in self._drain.attempts or not worker.draining:
                    return
                target = self._target(worker, unfit)
                result = LATER
                if target is not None:
                    try:
                        status, answer = await self._ask(attempt, target)
                        result = _result_of(status, answer)
                        text = str(answer.get("error", answer))
                    except (aiohttp.ClientError, OSError, TimeoutError) as error:
                        result, text = FAILED, describe(error)
                    self._count(worker, target, result)
                    if result == MOVED:
                        return
                    log.info("%s stays at %s: %s", attempt.rids[0], worker.spec.url, text[:500])
                    if result in (REFUSED, FAILED):
                        unfit.add(target)
                elif unfit:
                    return  # all of them have refused it
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, MAX_WAIT_S)
        finally:
            worker.num_moving -= 1

    def _target(self, worker: Worker, unfit: set[Worker]) -> Worker | None:
        """Return the least loaded worker of the same role that may take a request now; None without one."""
        now = self._admission.now()
        limit = self._config.limits.max_inflight
        fit = [
            one
            for one in self._registry.usable(worker.spec.role)
            if one is not worker and one not in unfit and one.breaker.admits(now)
            if limit is None or one.inflight < limit
        ]
        load = {one: one.inflight + one.num_arriving for one in fit}
        least = min(load.values(), default=0)
        return self._rng.choice([one for one in fit if load[one] == least]) if fit else None

    async def _ask(self, attempt: Attempt, target: Worker) -> tuple[int, dict[str, Any]]:
        """Call `/migrate` of the worker that has the request: by its newest name, and then by the older ones."""
        source, status, answer = attempt.pair.decode, 404, dict[str, Any]()
        headers = own_headers(source, self._config.access.admin_key_for_workers)
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        target.num_arriving += 1
        try:
            for rid in reversed(attempt.rids):
                body = {"rid": rid, "to": target.spec.url, "attach": attempt.attaches}
                async with self._session.post(
                    source.spec.url + PATH, json=body, headers=headers, timeout=timeout, allow_redirects=False
                ) as response:
                    status, answer = response.status, _object(await response.read())
                if status != 404:
                    break
            error = answer.get("error")
            if status == 409 and isinstance(error, dict) and error.get("param") == "attach":
                attempt.attaches = False  # the stream has no resume state: the worker passes the rest on
        finally:
            target.num_arriving -= 1
        return status, answer

    def _count(self, source: Worker, target: Worker, result: str) -> None:
        self._metrics.migrations.labels(result).inc()
        if result == MOVED:
            source.num_moved_away += 1
            log.info("a request of %s has moved to %s", source.spec.url, target.spec.url)


def _result_of(status: int, answer: dict[str, Any]) -> str:
    if status == 200:
        return MOVED
    error = answer.get("error")
    code = error.get("code") if isinstance(error, dict) else None
    if status == 404:
        return GONE if code == "no_such_request" else REFUSED  # a server without the endpoint moves nothing
    if code in ("not_migratable", "migration_under_way", "migration_no_room"):
        return LATER
    return REFUSED if code == "migration_refused" else FAILED


def _object(raw: bytes) -> dict[str, Any]:
    with contextlib.suppress(orjson.JSONDecodeError):
        found = orjson.loads(raw)
        if isinstance(found, dict):
            return found
    return {"error": {"message": "the worker's answer is no JSON object", "code": None}}
