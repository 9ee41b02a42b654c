"""A small Kubernetes API server on loopback: lists and watches pods of one namespace, and fails in chosen ways."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import ssl
from typing import Any

import orjson
from aiohttp import web

PREFILL = {"app": "pdserve", "role": "prefill"}
DECODE = {"app": "pdserve", "role": "decode"}


def pod(name: str, ip: str | None, labels: dict[str, str], **changes: Any) -> dict[str, Any]:
    """A pod as the API shows it; `ready`, `terminating`, `phase`, `annotations` and `uid` may be given."""
    metadata: dict[str, Any] = {"name": name, "namespace": "ns", "uid": changes.get("uid", f"uid-{name}")}
    metadata |= {"labels": labels, "annotations": changes.get("annotations", {})}
    if changes.get("terminating"):
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    ready = "True" if changes.get("ready", True) else "False"
    status: dict[str, Any] = {
        "phase": changes.get("phase", "Running"),
        "conditions": [{"type": "Ready", "status": ready}],
    }
    if ip is not None:
        status["podIP"] = ip
    return {"metadata": metadata, "status": status}


@dataclasses.dataclass
class FakeKube:
    """Pods by name; every change has a version, and watches get the changes after theirs."""

    pods: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    changes: list[tuple[int, str, dict[str, Any]]] = dataclasses.field(default_factory=list)
    version: int = 10
    oldest: int = 0
    """Watches from an older version get 410."""
    page_size: int = 500
    refusals: list[int] = dataclasses.field(default_factory=list)
    """Statuses of the next calls."""
    filters: bool = True
    """Honour label selectors: a pod that leaves the selection is `DELETED` in a watch."""
    token: str | None = None
    """The one valid token; None: none is needed."""
    lists: list[dict[str, str]] = dataclasses.field(default_factory=list)
    watches: list[dict[str, str]] = dataclasses.field(default_factory=list)
    tokens: list[str | None] = dataclasses.field(default_factory=list)
    url: str = ""
    _changed: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    _cut: int = 0
    _ended: int = 0
    _errors: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    _runner: web.AppRunner | None = None

    async def start(self, tls: ssl.SSLContext | None = None) -> None:
        """Listen on a free port of loopback."""
        app = web.Application()
        app.router.add_get("/api/v1/namespaces/ns/pods", self._pods)
        app.router.add_get("/api/v1/pods", self._pods)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=tls).start()
        self.url = f"http{'' if tls is None else 's'}://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        """Close the port and all watches."""
        if self._runner is not None:
            await self._runner.cleanup()

    def put(self, name: str, ip: str | None, labels: dict[str, str], **changes: Any) -> None:
        """Add or change a pod."""
        kind = "MODIFIED" if name in self.pods else "ADDED"
        self.pods[name] = pod(name, ip, labels, **changes)
        self._change(kind, self.pods[name])

    def delete(self, name: str) -> None:
        """Delete a pod."""
        self._change("DELETED", self.pods.pop(name))

    def forget_history(self) -> None:
        """Compact: all versions before the present one are too old for a watch."""
        self.oldest = self.version
        self.changes.clear()

    def bookmark(self) -> None:
        """Tell all watches the present version."""
        self._change("BOOKMARK", {"metadata": {}})

    def cut_watches(self) -> None:
        """Break the connections of all watches."""
        self._cut += 1
        self._wake()

    def end_watches(self, error: dict[str, Any] | None = None) -> None:
        """End all watches well, or with an event `ERROR`."""
        self._ended += 1
        self._errors = [] if error is None else [error]
        self._wake()

    def _change(self, kind: str, item: dict[str, Any]) -> None:
        self.version += 1
        item["metadata"]["resourceVersion"] = str(self.version)
        self.changes.append((self.version, kind, item))
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _pods(self, request: web.Request) -> web.StreamResponse:
        query = dict(request.query)
        given = request.headers.get("Authorization")
        self.tokens.append(given)
        is_watch = query.get("watch") == "1"
        (self.watches if is_watch else self.lists).append(query)
        if self.refusals:
            return self._status(self.refusals.pop(0))
        if self.token is not None and given != f"Bearer {self.token}":
            return self._status(401)
        return await self._watch(request, query) if is_watch else self._list(query)

    def _status(self, code: int) -> web.Response:
        return web.json_response({"kind": "Status", "code": code, "message": f"refused with {code}"}, status=code)

    def _list(self, query: dict[str, str]) -> web.Response:
        first = int(query.get("continue", "0"))
        names = sorted(name for name, item in self.pods.items() if self._selects(query, item))
        metadata = {"resourceVersion": str(self.version)}
        if first + self.page_size < len(names):
            metadata["continue"] = str(first + self.page_size)
        shown = [self.pods[name] for name in names[first : first + self.page_size]]
        return web.json_response({"kind": "PodList", "metadata": metadata, "items": shown})

    def _selects(self, query: dict[str, str], item: dict[str, Any]) -> bool:
        """Kubernetes' meaning of `a=b,c in (d,e)`."""
        labels = item["metadata"].get("labels", {})
        for key, value, values in re.findall(r"([^,=() ]+)(?:=([^,]*)| in \(([^)]*)\))", query["labelSelector"]):
            if labels.get(key) not in (values.split(",") if values else [value]):
                return not self.filters
        return True

    async def _watch(self, request: web.Request, query: dict[str, str]) -> web.StreamResponse:
        version = int(query["resourceVersion"])
        if version < self.oldest:
            return self._status(410)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        cut, ended = self._cut, self._ended
        while True:
            changed = self._changed
            for number, kind, item in self.changes:
                if number > version and (kind != "ADDED" or self._selects(query, item)):
                    kind = kind if kind == "BOOKMARK" or self._selects(query, item) else "DELETED"
                    line = orjson.dumps({"type": kind, "object": item}) + b"\n"
                    for part in (line[: len(line) // 2], line[len(line) // 2 :]):  # an event in two parts
                        await response.write(part)
                version = max(version, number)
            if self._cut != cut:
                assert request.transport is not None
                request.transport.abort()
                return response
            if self._ended != ended:
                for error in self._errors:
                    await response.write(orjson.dumps({"type": "ERROR", "object": error}) + b"\n")
                await response.write_eof()
                return response
            await changed.wait()
