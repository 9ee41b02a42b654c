"""`/extract` and `/restore`: a live request as a snapshot, and back. `/suspend` and `/resume` keep it at the server.

A snapshot is taken between two steps. The client's response of an extracted request ends with the finish reason
`suspended`; the response of `/restore` and `/resume` goes on behind it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Coroutine
from typing import Any

import orjson
from fastapi import Request
from fastapi.responses import Response

from pdserve.base.stream_state import RESUME_FIELD
from pdserve.errors import RequestError
from pdserve.http.access import CHAT_PATH, COMPLETIONS_PATH, GENERATE_PATH, SNAPSHOT_TYPE
from pdserve.protocol.messages import TokenLogprob
from pdserve.protocol.snapshot import RequestSnapshot, SnapshotGroup, SnapshotKV, SnapshotOrigin, decode, encode
from pdserve.server.context import ServerContext
from pdserve.server.engine_client.engine_queries import Extracted
from pdserve.server.engine_client.live_requests import RequestState
from pdserve.server.http.json_http import (
    ClientGoneError,
    convert,
    json_response,
    read_body,
    read_json_object,
    until_disconnect,
)
from pdserve.server.openai.chat import prepare_chat_call
from pdserve.server.openai.common import OpenAICall
from pdserve.server.openai.completions import prepare_completion
from pdserve.server.request.restored import NOT_KEPT, KVRule, RestoredRequest, identity_of
from pdserve.server.request.schemas import ExtractBody, ResumeBody, SuspendBody
from pdserve.server.sglang_api.generate import GenerateCall, prepare_generate
from pdserve.server.snapshot_store import SnapshotStore

KV_RULES: tuple[KVRule, ...] = ("require", "prefer", "ignore")
HEAD_TOKEN_BYTES = 64
"""Most bytes that a token takes in a snapshot without log probabilities, for the estimate of its size."""
READ_S = 600.0
"""Timeout of the body of `/restore`."""
MAX_AT_ONCE = 2
"""Snapshot bodies that are read at once; further ones wait."""

Prepare = Callable[[ServerContext, dict[str, Any]], Coroutine[Any, Any, OpenAICall | GenerateCall]]


async def _prepare_generate(context: ServerContext, raw: dict[str, Any]) -> GenerateCall:
    return await prepare_generate(context, raw, time.monotonic())


PREPARE: dict[str, Prepare] = {
    CHAT_PATH: prepare_chat_call,
    COMPLETIONS_PATH: prepare_completion,
    GENERATE_PATH: _prepare_generate,
}


def takes_kv(context: ServerContext) -> bool:
    """Return whether one process of this server has all KV of a request, so that snapshots can have its bytes."""
    parallel = context.config.parallel
    return parallel.tp_size * parallel.pp_size == 1


def kv_bytes(context: ServerContext, state: RequestState) -> int:
    """Return the most bytes that the KV of a live sequence has now."""
    token_bytes = context.client.require_ready().facts.get("kv_token_bytes")
    num_tokens = state.prompt_tokens + len(state.request.prior_output_ids) + state.completion_tokens
    return num_tokens * token_bytes if isinstance(token_bytes, int) else 0


def kv_fits(context: ServerContext, state: RequestState, most_bytes: int) -> bool:
    """Return whether a snapshot with KV can be taken, and has at most `most_bytes`."""
    size = kv_bytes(context, state) + HEAD_TOKEN_BYTES * context.limits().capacity
    return takes_kv(context) and size <= most_bytes


async def take_snapshot(context: ServerContext, state: RequestState, *, with_kv: bool, keep: bool) -> bytes:
    """Return a snapshot of a live sequence. `with_kv`: with the bytes of its KV, as far as there are any.

    Without `keep` the sequence ends as `suspended`. Then it must not be cancelled: it returns the only copy.

    Raises:
        RequestError: 404, the sequence has ended; 409, another snapshot of it is being taken; 400, it returns hidden
            states or has input embeddings.
        EngineDeadError: the engine is dead.
    """
    if state.request.hidden is not None or state.request.input_embeds:
        message = f"request {state.name!r} has input embeddings or returns hidden states; a snapshot has neither"
        raise RequestError(message, field="rid", code="unsupported")
    extracted = await context.client.extract(state.request.rid, with_kv=with_kv, keep=keep)
    if state.outcome not in ("", "suspended"):  # a stop string in the text of its last tokens
        raise RequestError(f"request {state.name!r} has ended", field="rid", status=404, code="not_live")
    snapshot = _snapshot_of(context, state, extracted)
    parts = [part for group in extracted.kv for part in group] if snapshot.kv is not None else []
    return await asyncio.to_thread(encode, snapshot, parts)


def _snapshot_of(context: ServerContext, state: RequestState, extracted: Extracted) -> RequestSnapshot:
    reply, request = extracted.reply, state.request
    count = len(reply.output_ids)
    wants_output = request.logprobs is not None and request.logprobs.output
    kv = None
    if reply.kv_tokens:
        sizes = [sum(map(len, parts)) for parts in extracted.kv]
        groups = [
            SnapshotGroup(num_pages=pages, page_bytes=size // pages if pages else 0)
            for pages, size in zip(reply.kv_pages, sizes, strict=True)
        ]
        kv = SnapshotKV(num_tokens=reply.kv_tokens, groups=tuple(groups))
    parts = {part.start: part for part in state.prompt_parts}
    return RequestSnapshot(
        rid=state.name,
        model=context.model_name[:1024],
        identity=identity_of(context.client.require_ready(), reply.adapter),
        input_ids=request.input_ids,
        output_ids=reply.output_ids,
        sampling=request.sampling,
        logprobs=request.logprobs,
        output_logprobs=_padded(state.output_logprobs, count) if wants_output else [],
        prompt_logprobs=[parts[start] for start in sorted(parts)],
        lora=request.lora,
        cache_salt=request.cache_salt,
        priority=request.priority,
        cached_tokens=reply.cached_tokens,
        cached_details=reply.cached_details,
        created_s=time.time(),
        origin=_origin_of(state),
        kv=kv,
    )


def _padded(lines: list[TokenLogprob], count: int) -> list[TokenLogprob]:
    """Return `count` entries. Those of tokens that another server has streamed are not known here, nor sent again."""
    return [TokenLogprob(0.0)] * (count - len(lines)) + lines[:count]


def _origin_of(state: RequestState) -> SnapshotOrigin | None:
    origin = state.origin
    if origin is None:
        return None
    body = {name: value for name, value in origin.body.items() if name not in NOT_KEPT}
    return SnapshotOrigin(
        path=origin.path,
        body=orjson.dumps(body),
        stream_id=origin.head.get("id"),
        created=origin.head.get("created"),
    )


class SnapshotEndpoints:
    """The endpoints of one application. `store`: its suspended requests."""

    def __init__(self, context: ServerContext, store: SnapshotStore) -> None:
        self._context = context
        self.store = store
        self._max_bytes = int(context.config.serving.snapshot_max_gb * 1e9)
        self._reading = asyncio.Semaphore(MAX_AT_ONCE)
        self._tasks: set[asyncio.Task[Any]] = set()

    async def extract(self, request: Request) -> Response:
        """Serve `POST /extract`: return a snapshot of a live request.

        Raises:
            RequestError: 404, no such request is live; 409, it has several sequences; 413, its KV is too large.
        """
        self._check_role()
        body = convert(await read_json_object(request, self._context.max_body_bytes), ExtractBody)
        state = self._live(body.rid)
        with_kv = body.kv == "bytes"
        if with_kv and not takes_kv(self._context):
            message = "kv: the ranks of this server share the KV, and none has all of it; use kv: none"
            raise RequestError(message, field="kv", code="unsupported")
        if with_kv and kv_bytes(self._context, state) > self._max_bytes:
            message = f"kv: the KV of this request is larger than {self._max_bytes} bytes (--snapshot-max-gb)"
            raise RequestError(message, field="kv", status=413, code="snapshot_too_large")
        keep = bool(body.keep)
        if not keep:
            self.store.check(state.name)  # where the snapshot goes if the client has gone
        data = await self._taken(request, state, with_kv=with_kv, keep=keep)
        return Response(data, media_type=SNAPSHOT_TYPE)

    async def suspend(self, request: Request) -> Response:
        """Serve `POST /suspend`: stop a live request and keep its snapshot for `/resume`.

        The snapshot has KV bytes if they fit into the store.

        Raises:
            RequestError: 404, no such request is live; 409, one of its name is suspended; 503, the store is full.
        """
        self._check_role()
        body = convert(await read_json_object(request, self._context.max_body_bytes), SuspendBody)
        state = self._live(body.rid)
        self.store.check(state.name)
        with_kv = kv_fits(self._context, state, min(self.store.num_free, self._max_bytes))
        task = self._spawn(self._suspend(state, with_kv=with_kv))
        return json_response(await asyncio.shield(task))

    async def restore(self, request: Request) -> Response:
        """Serve `POST /restore`: continue the request of the snapshot in the body.

        Raises:
            RequestError: 400, the snapshot is damaged or asks for something that a request cannot; 409, this server
                differs from the one that took it; 413, it is too large.
        """
        self._check_role()
        rule = _kv_rule(request)
        async with self._reading:
            try:
                async with asyncio.timeout(READ_S):
                    data = b"".join(await read_body(request, self._max_bytes, "--snapshot-max-gb"))
            except TimeoutError as error:
                message = f"the snapshot did not arrive within {READ_S:g} s"
                raise RequestError(message, status=408, code="body_timeout") from error
            snapshot, kv = await asyncio.to_thread(decode, data)
        return await self._go_on(request, snapshot, kv, rule)

    async def resume(self, request: Request) -> Response:
        """Serve `POST /resume`: continue a suspended request. It stays suspended if it cannot start.

        Raises:
            RequestError: 404, no such request is suspended; 409, another call resumes it; otherwise as `restore`.
        """
        self._check_role()
        body = convert(await read_json_object(request, self._context.max_body_bytes), ResumeBody)
        rid, rule = body.rid, body.kv
        with self.store.resuming(rid):
            data = await asyncio.to_thread(self.store.get, rid)
            snapshot, kv = await asyncio.to_thread(decode, data)
            if self._context.client.count(rid):
                raise RequestError(f"rid {rid!r} belongs to a request that is still running", field="rid", status=409)
            response = await self._go_on(request, snapshot, kv, rule)
            self.store.drop(rid)
        return response

    async def _go_on(self, request: Request, snapshot: RequestSnapshot, kv: memoryview, rule: KVRule) -> Response:
        return await (await prepare_restored(self._context, snapshot, kv, rule)).answer(request)

    async def _suspend(self, state: RequestState, *, with_kv: bool) -> dict[str, Any]:
        data = await take_snapshot(self._context, state, with_kv=with_kv, keep=False)
        await asyncio.to_thread(self.store.put, state.name, data)
        snapshot, _ = await asyncio.to_thread(decode, data)
        return {
            "rid": state.name,
            "prompt_tokens": len(snapshot.input_ids),
            "completion_tokens": len(snapshot.output_ids),
            "kv_tokens": 0 if snapshot.kv is None else snapshot.kv.num_tokens,
            "bytes": len(data),
        }

    async def _taken(self, request: Request, state: RequestState, *, with_kv: bool, keep: bool) -> bytes:
        """Take a snapshot. It goes to the store if the client leaves before it has the only copy."""
        task = self._spawn(take_snapshot(self._context, state, with_kv=with_kv, keep=keep))
        try:
            return await until_disconnect(request, _shielded(task))
        except (ClientGoneError, asyncio.CancelledError):
            if not keep:
                self._spawn(self._keep(state.name, task))
            raise

    async def _keep(self, rid: str, task: asyncio.Task[bytes]) -> None:
        await asyncio.to_thread(self.store.put, rid, await task)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _live(self, rid: str) -> RequestState:
        self._context.client.require_ready()
        client = self._context.client
        if (count := client.count(rid)) > 1:
            message = f"rid {rid!r} names {count} sequences; only requests of one sequence can be extracted"
            raise RequestError(message, field="rid", status=409, code="several_sequences")
        state = client.find_one(rid)
        if state is None:
            raise RequestError(f"no request {rid!r} is live", field="rid", status=404, code="not_live")
        if state.request.rid in client.moved:
            message = f"request {rid!r} has moved to another server, whose output this one passes on"
            raise RequestError(message, field="rid", status=409, code="migrated")
        return state

    def _check_role(self) -> None:
        if self._context.mode == "prefill":
            raise RequestError(
                "a prefill server has no running requests; use the decode server", code="unsupported", field="role"
            )


async def _shielded(task: asyncio.Task[bytes]) -> bytes:
    return await asyncio.shield(task)


async def prepare_restored(
    context: ServerContext, snapshot: RequestSnapshot, kv: memoryview, rule: KVRule
) -> OpenAICall | GenerateCall:
    """Check `snapshot`, whose KV bytes are `kv`, and prepare the call that continues it.

    Raises:
        RequestError: 400 or 409 naming the field of the snapshot.
    """
    ready = context.client.require_ready()
    restored = RestoredRequest.of(snapshot, kv, ready, rule, takes_kv=takes_kv(context))
    prepare = PREPARE[restored.path]
    try:
        return await prepare(dataclasses.replace(context, restored=restored), restored.body())
    except RequestError as error:
        if error.field != RESUME_FIELD:
            raise
        field = "snapshot.output_ids"
        raise error.renamed(error.message.replace(RESUME_FIELD, field), field) from error


def _kv_rule(request: Request) -> KVRule:
    rule = request.query_params.get("kv", "require")
    for known in KV_RULES:
        if rule == known:
            return known
    raise RequestError(f"kv must be one of {', '.join(KV_RULES)}, got {rule!r}", field="kv")
