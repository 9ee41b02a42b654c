"""Stopping requests of an `LLM` and continuing them: `extract` and `restore`, `suspend` and `resume`.

Each method has an async form for callers with their own event loop. The work runs in the LLM's loop thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Literal, TypeVar

from pdserve.errors import RequestError
from pdserve.llm.outputs import InvalidRequestError, OutputMaker, RequestOutput
from pdserve.llm.servers import RunningServer, Servers
from pdserve.protocol.snapshot import RequestSnapshot, decode
from pdserve.server.engine_client.live_requests import RequestState
from pdserve.server.http.json_http import collect
from pdserve.server.request.restored import KVRule
from pdserve.server.sglang_api.snapshots import kv_fits, prepare_restored, take_snapshot, takes_kv
from pdserve.server.snapshot_store import SnapshotStore

T = TypeVar("T")


class SnapshotCalls:
    """The methods of `LLM` about snapshots. Thread-safe; another thread runs the `generate` that they stop."""

    _servers: Servers
    _maker: OutputMaker
    _store: SnapshotStore
    _check_alive: Callable[[], None]

    def running(self) -> list[str]:
        """Return the ids of the requests that run now and have one output; see `request_ids` of `generate`."""
        return self._call(self._running())

    def extract(self, request_id: str, *, kv: Literal["none", "bytes"] = "none", keep: bool = False) -> bytes:
        """Return a snapshot of a running request: bytes that `restore` of any equal LLM or server continues.

        `kv`: "bytes" adds the KV computed so far, so that it need not be computed again. `keep` False: the request ends
        here, and its output has the finish reason `suspended`.

        Raises:
            InvalidRequestError: no such request runs, or it has several outputs; or `kv` with several ranks.
            EngineDeadError: the LLM was shut down, or a server has died.
        """
        return self._call(self._extract(request_id, kv, keep=keep))

    def restore(self, snapshot: bytes, *, kv: KVRule = "require") -> RequestOutput:
        """Continue the request of a snapshot and return its whole output. Blocks the calling thread.

        `kv`: what happens with the KV of the snapshot if it does not fit: "require" refuses the snapshot, "prefer"
        computes the KV again, "ignore" always does. The output's `prompt` is None.

        Raises:
            InvalidRequestError: the snapshot is damaged, or another model took it; `field` names what differs.
            EngineDeadError: the LLM was shut down, or a server died.
        """
        return self._call(self._restore(snapshot, kv))

    def suspend(self, request_id: str) -> None:
        """Stop a running request and keep its snapshot, in memory or in `snapshot_dir`, until `resume`.

        Raises:
            InvalidRequestError: no such request runs, it has several outputs, or the store (`snapshot_store_gb`) is
                full.
        """
        self._call(self._suspend(request_id))

    def resume(self, request_id: str) -> RequestOutput:
        """Continue a suspended request and return its whole output. It stays suspended until it has ended.

        Raises:
            InvalidRequestError: no such request is suspended, or another call resumes it; otherwise as `restore`.
        """
        return self._call(self._resume(request_id))

    async def extract_async(
        self, request_id: str, *, kv: Literal["none", "bytes"] = "none", keep: bool = False
    ) -> bytes:
        """See `extract`."""
        return await self._call_async(self._extract(request_id, kv, keep=keep))

    async def restore_async(self, snapshot: bytes, *, kv: KVRule = "require") -> RequestOutput:
        """See `restore`. Cancelling the call aborts the request."""
        return await self._call_async(self._restore(snapshot, kv))

    async def suspend_async(self, request_id: str) -> None:
        """See `suspend`."""
        await self._call_async(self._suspend(request_id))

    async def resume_async(self, request_id: str) -> RequestOutput:
        """See `resume`. Cancelling the call aborts the request, which stays suspended."""
        return await self._call_async(self._resume(request_id))

    # inside ----------------------------------------------------------------------------------------------------------

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        self._check_alive()
        try:
            return self._servers.loop.call(work)
        except RequestError as error:
            raise InvalidRequestError.of(error) from None

    async def _call_async(self, work: Coroutine[Any, Any, T]) -> T:
        self._check_alive()
        try:
            return await asyncio.wrap_future(self._servers.loop.submit(work))
        except RequestError as error:
            raise InvalidRequestError.of(error) from None

    @property
    def _decoding(self) -> list[RunningServer]:
        return self._servers.of("null", "decode")

    async def _running(self) -> list[str]:
        return [name for server in self._decoding for name in server.context.client.single_names()]

    def _find(self, request_id: str) -> tuple[RunningServer, RequestState]:
        for server in self._decoding:
            client = server.context.client
            if (count := client.count(request_id)) > 1:
                message = f"request {request_id!r} has {count} outputs; only requests of one output can be stopped"
                raise RequestError(message, field="request_id", status=409)
            state = client.find_one(request_id)
            if state is not None:
                return server, state
        raise RequestError(f"no request {request_id!r} is running", field="request_id", status=404)

    async def _extract(self, request_id: str, kv: str, *, keep: bool) -> bytes:
        if kv not in ("none", "bytes"):
            raise RequestError(f'kv must be "none" or "bytes", got {kv!r}', field="kv")
        server, state = self._find(request_id)
        if kv == "bytes" and not takes_kv(server.context):
            raise RequestError("kv: the ranks of this model share the KV, and none has all of it", field="kv")
        return await take_snapshot(server.context, state, with_kv=kv == "bytes", keep=keep)

    async def _suspend(self, request_id: str) -> None:
        server, state = self._find(request_id)
        self._store.check(request_id)
        with_kv = kv_fits(server.context, state, self._store.num_free)
        data = await take_snapshot(server.context, state, with_kv=with_kv, keep=False)
        await asyncio.to_thread(self._store.put, request_id, data)

    async def _resume(self, request_id: str) -> RequestOutput:
        with self._store.resuming(request_id):
            output = await self._restore(await asyncio.to_thread(self._store.get, request_id), "prefer")
            self._store.drop(request_id)
        return output

    async def _restore(self, data: bytes, rule: KVRule) -> RequestOutput:
        if rule not in ("require", "prefer", "ignore"):
            raise RequestError(f'kv must be "require", "prefer" or "ignore", got {rule!r}', field="kv")
        snapshot, kv = await asyncio.to_thread(decode, data)
        server = min(self._decoding, key=lambda running: running.num_live)
        call = await prepare_restored(server.context, snapshot, kv, rule)
        server.num_live += 1
        try:
            generation = await server.context.client.submit(call.states)
            restored = call.context.restored
            assert restored is not None
            (update,) = await collect(generation, 1, restored.before(generation.prior_text.get(0, "")))
        finally:
            server.num_live -= 1
        requests = [state.request for state in call.states]
        return self._maker.make(snapshot.rid, None, requests, [update], *_tops(snapshot))


def _tops(snapshot: RequestSnapshot) -> tuple[int | None, int | None]:
    """The numbers of most likely tokens for output and prompt; None: no log probabilities."""
    logprobs = snapshot.logprobs
    if logprobs is None:
        return None, None
    return (logprobs.top if logprobs.output else None), (None if logprobs.prompt_from is None else logprobs.top)
