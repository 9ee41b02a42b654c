"""`POST /replicate`: copies the cached prefix of a prompt from one decode worker to others. Made by `app`.

    {"text" | "input_ids", "lora_path"?, "cache_salt"?, "extra_key"?,
     "from"?: URL or id, "to"?: URL or id, or a list of them}

    POST /replicate without `to`  to all decode workers in question ──> how many tokens of the prompt each has cached
    POST /replicate {"to": URL}   to the worker with the longest prefix, once for each worker that has less of it

`docs/migration.md` has the contract of the workers' `/replicate`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import msgspec
import orjson
from aiohttp import web

from pdserve.router.config.config import RouterConfig, WorkerRole
from pdserve.router.http import BODY, error_response, json_response
from pdserve.router.workers.api import BadBody, parse_body
from pdserve.router.workers.outcome import describe, own_headers, read_at_most
from pdserve.router.workers.workers import Registry, Worker

PATH = "/replicate"
TIMEOUT_S = 60.0
"""Seconds for an answer of a worker. It gives up a copy itself before that."""
MOST_AT_ONCE = 2
"""Copies that the source sends at a time."""
MAX_ANSWER_BYTES = 1 << 20


class CopyPrefixBody(msgspec.Struct, forbid_unknown_fields=True):
    """`POST /replicate` at the router. `source` and `to` are URLs or ids of decode workers; None: the router chooses.

    Exactly one of `text` and `input_ids` is given. Without `to` each other decode worker gets the prefix.
    """

    text: str | None = None
    input_ids: list[int] | None = None
    lora_path: str | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    source: str | None = msgspec.field(default=None, name="from")
    to: str | list[str] | None = None

    def prompt(self) -> dict[str, Any]:
        """Return the fields that name the prompt. Raises BadBody unless there is exactly one prompt."""
        if (self.text is None) == (self.input_ids is None):
            raise BadBody("exactly one of text and input_ids must be given", "text")
        fields = {"text": self.text, "input_ids": self.input_ids, "lora_path": self.lora_path}
        fields |= {"cache_salt": self.cache_salt, "extra_key": self.extra_key}
        return {name: value for name, value in fields.items() if value is not None}


class UnknownWorkerError(Exception):
    """A field names no decode worker that can take part."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


class WorkerRefusedError(Exception):
    """A worker does not answer, or answers with an error."""

    def __init__(self, message: str, *, code: str | None = None, param: str | None = None, status: int = 502) -> None:
        super().__init__(message)
        self.code = code
        self.param = param
        self.status = status


class PrefixReplication:
    """The handler. Event loop only."""

    def __init__(
        self, config: RouterConfig, registry: Registry, session: aiohttp.ClientSession, rng: random.Random
    ) -> None:
        self._config = config
        self._registry = registry
        self._session = session
        self._rng = rng

    async def post(self, request: web.Request) -> web.Response:
        """Copy a cached prefix to other decode workers, see `CopyPrefixBody`. Answers after the last copy."""
        try:
            body = parse_body(request[BODY], CopyPrefixBody)
            prompt = body.prompt()
            sources, targets = self._workers(body)
        except BadBody as error:
            return error_response(400, str(error), "invalid_request", param=error.field)
        except UnknownWorkerError as error:
            return error_response(404, str(error), "worker_not_found", param=error.field)
        lengths = await self._lengths({*sources, *targets}, prompt)
        known = {worker: length for worker, length in lengths.items() if isinstance(length, int)}
        longest = max((known.get(worker, 0) for worker in sources), default=0)
        if not longest:
            return _no_prefix(body, sources, lengths)
        holders = [worker for worker in sources if known.get(worker) == longest]
        least = min(worker.inflight for worker in holders)
        source = self._rng.choice([worker for worker in holders if worker.inflight == least])
        slots = asyncio.Semaphore(MOST_AT_ONCE)
        copies = [self._copy(slots, source, one, prompt, lengths[one], longest) for one in targets if one is not source]
        results = await asyncio.gather(*copies)
        failed = [result for result in results if not result["success"]]
        answer = {"success": not failed, "from": source.spec.url, "num_tokens": longest, "to": results}
        return json_response(answer, status=502 if failed and len(failed) == len(results) else 200)

    def _workers(self, body: CopyPrefixBody) -> tuple[list[Worker], list[Worker]]:
        """Return the workers that may send the prefix, and those that shall have it.

        Raises:
            UnknownWorkerError: `from` or `to` names no decode worker, or there are no two of them.
        """
        usable = self._registry.usable(WorkerRole.DECODE)
        sources = usable if body.source is None else [self._found(body.source, usable, "from")]
        if body.to is None:
            targets = [worker for worker in usable if [worker] != sources]
        else:
            names = [body.to] if isinstance(body.to, str) else body.to
            targets = list(dict.fromkeys(self._found(name, usable, "to") for name in names))
            if body.source is None:
                sources = [worker for worker in usable if worker not in targets]
        if not sources or not targets:
            text = "a prefix is copied between two decode workers that are healthy and not draining"
            raise UnknownWorkerError(text, "to")
        if body.source is not None and sources[0] in targets:
            raise UnknownWorkerError(f"{body.source!r} is in from and in to", "to")
        return sources, targets

    def _found(self, name: str, usable: Sequence[Worker], field: str) -> Worker:
        worker = self._registry.find(name)
        if worker is None or worker not in usable:
            text = f"{name!r} is no decode worker that is healthy and not draining"
            raise UnknownWorkerError(text, field)
        return worker

    async def _lengths(self, workers: set[Worker], prompt: Mapping[str, Any]) -> dict[Worker, int | WorkerRefusedError]:
        """Ask workers how many tokens of the prompt they have cached; the error of each that does not say it."""

        async def length(worker: Worker) -> int | WorkerRefusedError:
            try:
                return _num_tokens(worker, await self._ask(worker, prompt))
            except WorkerRefusedError as error:
                return error

        ordered = sorted(workers, key=lambda worker: worker.spec.url)
        return dict(zip(ordered, await asyncio.gather(*map(length, ordered)), strict=True))

    async def _copy(
        self,
        slots: asyncio.Semaphore,
        source: Worker,
        target: Worker,
        prompt: Mapping[str, Any],
        has: int | WorkerRefusedError,
        longest: int,
    ) -> dict[str, Any]:
        """Copy the prefix to one worker; returns its entry of the answer. `has`: tokens of it that are there."""
        entry: dict[str, Any] = {"url": target.spec.url}
        if isinstance(has, int) and has >= longest:
            return entry | {"success": True, "num_tokens": has, "copied": False}
        async with slots:
            try:
                answer = await self._ask(source, {**prompt, "to": target.spec.url})
                return entry | {"success": True, "num_tokens": _num_tokens(source, answer), "copied": True}
            except WorkerRefusedError as error:
                told = {"message": str(error), "code": error.code, "param": error.param}
                return entry | {"success": False, "error": told}

    async def _ask(self, worker: Worker, body: Mapping[str, Any]) -> dict[str, Any]:
        """Call `/replicate` of a worker. Raises WorkerRefusedError unless it answers 200."""
        headers = own_headers(worker, self._config.access.admin_key_for_workers)
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        url = worker.spec.url
        try:
            async with self._session.post(
                url + PATH, json=dict(body), headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                status, raw = response.status, await read_at_most(response, MAX_ANSWER_BYTES)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise WorkerRefusedError(f"{url} does not answer: {describe(error)}", code="worker") from error
        try:
            answer = orjson.loads(raw)
        except orjson.JSONDecodeError:
            answer = None
        if status == 200 and isinstance(answer, dict):
            return answer
        told = answer.get("error") if isinstance(answer, dict) else None
        told = told if isinstance(told, dict) else {}
        text = f"{url} answered {status}: {told.get('message', 'no JSON object')}"
        raise WorkerRefusedError(text, code=told.get("code"), param=told.get("param"), status=status)


def _num_tokens(worker: Worker, answer: Mapping[str, Any]) -> int:
    num_tokens = answer.get("num_tokens")
    if not isinstance(num_tokens, int):
        raise WorkerRefusedError(f"{worker.spec.url}: num_tokens is missing", code="worker")
    return num_tokens


def _no_prefix(
    body: CopyPrefixBody, sources: Sequence[Worker], lengths: Mapping[Worker, int | WorkerRefusedError]
) -> web.Response:
    """Return the error where no source has the prefix: a 400 of a worker is about the body."""
    errors = [error for error in map(lengths.__getitem__, sources) if isinstance(error, WorkerRefusedError)]
    for error in errors:
        if error.status == 400:
            return error_response(400, str(error), error.code or "invalid_request", param=error.param)
    if len(errors) == len(sources):
        return error_response(502, "; ".join(map(str, errors)), errors[0].code or "worker")
    field = "text" if body.text is not None else "input_ids"
    return error_response(404, "no decode worker in question has a cached page of the prompt", "no_prefix", param=field)
