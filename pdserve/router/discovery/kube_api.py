"""A client of the Kubernetes API for pods: list and watch, over aiohttp. Used by `discovery.pods`.

    GET /api/v1[/namespaces/N]/pods?labelSelector=S&limit=500[&continue=C]                 a list, in pages
    GET the same ?watch=1&resourceVersion=V&allowWatchBookmarks=true&timeoutSeconds=T      a line of JSON for each event

Inside a cluster the address is in the environment, and the token and the CA certificate in files of the pod's service
account. Kubernetes replaces the token before it expires (after an hour by default) and may replace the certificate, so
both files are read for each call. Source: kubernetes.io, "API Concepts" and "Accessing the API from a Pod".
"""

from __future__ import annotations

import dataclasses
import ssl
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from pdserve.base.hosts import url_host
from pdserve.errors import ConfigError
from pdserve.router.config.discovery import DiscoveryConfig

PAGE_SIZE = 500
MAX_PAGES = 200
"""Pages of one list; more pods are an error."""
MAX_LINE_BYTES = 8 << 20
"""Limit of one watch event. The API server's own limit of an object is about 1.5 MB."""
LIST_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 5.0
SILENCE_S = 15.0
"""A watch that is silent for this long after its own end is broken."""
GONE = 410
OPEN = "OPEN"
"""First item of a watch; not a type of Kubernetes."""


class KubeError(Exception):
    """The API server refused a call, or its answer is not valid. `status` 0: no HTTP status."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class VersionExpiredError(Exception):
    """The resource version is too old to continue a watch or a list: list again."""


@dataclasses.dataclass(frozen=True)
class KubePod:
    """What matters of a pod. `ip` None: it has no address yet."""

    uid: str
    name: str
    namespace: str
    ip: str | None
    phase: str
    ready: bool
    """Its condition `Ready` is true."""
    terminating: bool
    labels: Mapping[str, str]
    annotations: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class KubeAccess:
    """Address and credentials of an API server. None: no token, or the system's CA certificates."""

    url: str
    token_file: Path | None = None
    ca_file: Path | None = None

    @classmethod
    def of(cls, config: DiscoveryConfig, environment: Mapping[str, str]) -> KubeAccess:
        """Return `--service-discovery-api`, or the access of the pod in which the router runs.

        Raises:
            ConfigError: the router runs in no pod, or its pod has no service account.
        """
        if config.api_url is not None:
            return cls(config.api_url.rstrip("/"))
        host, port = (environment.get(f"KUBERNETES_SERVICE_{name}", "") for name in ("HOST", "PORT"))
        if not host or not port:
            text = "--service-discovery: KUBERNETES_SERVICE_HOST is not set, so this is no pod; elsewhere give "
            raise ConfigError(text + "--service-discovery-api URL", field="service_discovery")
        token_file, ca_file = config.account_dir / "token", config.account_dir / "ca.crt"
        for path in (token_file, ca_file):
            if not path.is_file():
                text = f"--service-discovery: {path} is missing; the pod needs a service account with "
                raise ConfigError(text + "automountServiceAccountToken", field="service_discovery")
        return cls(f"https://{url_host(host)}:{port}", token_file, ca_file)


class KubeApi:
    """Calls of one API server. Raises `KubeError`, `VersionExpiredError`, or errors of aiohttp and the system."""

    def __init__(self, access: KubeAccess) -> None:
        self._access = access
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        self._ca: bytes = b""
        self._tls: ssl.SSLContext | None = None

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def list_pods(self, namespace: str | None, selector: str) -> tuple[list[KubePod], str]:
        """Return the selected pods and the resource version at which a watch continues."""
        timeout = aiohttp.ClientTimeout(total=LIST_TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S)
        pods: list[KubePod] = []
        query = {"labelSelector": selector, "limit": str(PAGE_SIZE)}
        for _ in range(MAX_PAGES):
            async with self._session.get(self._url(namespace), params=query, timeout=timeout, **self._auth()) as answer:
                await _check(answer)
                body = _object(await answer.read())
            pods += [parse_pod(item) for item in body.get("items") or []]
            metadata = body.get("metadata") or {}
            if not metadata.get("continue"):
                return pods, str(metadata.get("resourceVersion", ""))
            query["continue"] = metadata["continue"]
        raise KubeError(f"the list of pods has more than {MAX_PAGES} pages")

    async def watch_pods(
        self, namespace: str | None, selector: str, version: str, watch_s: float
    ) -> AsyncIterator[tuple[str, KubePod | None, str]]:
        """Yield `(OPEN, None, version)` once connected, then (type, pod, resource version) of each event.

        The pod of a `BOOKMARK` is None. The iterator ends when the API server ends the watch, after about
        `watch_s` seconds.
        """
        query = {"labelSelector": selector, "watch": "1", "allowWatchBookmarks": "true"}
        query |= {"resourceVersion": version, "timeoutSeconds": str(max(1, round(watch_s)))}
        timeout = aiohttp.ClientTimeout(
            total=watch_s + SILENCE_S, sock_connect=CONNECT_TIMEOUT_S, sock_read=watch_s + SILENCE_S
        )
        async with self._session.get(self._url(namespace), params=query, timeout=timeout, **self._auth()) as answer:
            await _check(answer)
            yield OPEN, None, version
            async for line in _lines(answer.content):
                event = _object(line)
                kind, item = event.get("type"), event.get("object")
                if not isinstance(item, dict) or not isinstance(kind, str):
                    raise KubeError(f"a watch event has no type or object: {line[:200]!r}")
                if kind == "ERROR":
                    raise _error(item, int(item.get("code") or 0))
                version = str((item.get("metadata") or {}).get("resourceVersion", ""))
                yield kind, None if kind == "BOOKMARK" else parse_pod(item), version

    def _url(self, namespace: str | None) -> str:
        place = "" if namespace is None else f"/namespaces/{namespace}"
        return f"{self._access.url}/api/v1{place}/pods"

    def _auth(self) -> dict[str, Any]:
        """Return arguments of a call: the token and the TLS context, from the files as they are now."""
        headers = {"Accept": "application/json"}
        if self._access.token_file is not None:
            headers["Authorization"] = f"Bearer {self._access.token_file.read_text().strip()}"
        if self._access.ca_file is None:
            return {"headers": headers}
        ca = self._access.ca_file.read_bytes()
        if self._tls is None or ca != self._ca:
            self._tls, self._ca = ssl.create_default_context(cadata=ca.decode()), ca
        return {"headers": headers, "ssl": self._tls}


def parse_pod(item: Any) -> KubePod:
    """Parse a pod; `KubeError` unless it has a name and a uid."""
    metadata = item.get("metadata") if isinstance(item, dict) else None
    if not isinstance(metadata, dict) or not metadata.get("uid") or not metadata.get("name"):
        raise KubeError(f"a pod has no name or uid: {str(item)[:200]}")
    status = item.get("status") or {}
    conditions = {entry.get("type"): entry.get("status") for entry in status.get("conditions") or []}
    return KubePod(
        uid=str(metadata["uid"]),
        name=str(metadata["name"]),
        namespace=str(metadata.get("namespace", "")),
        ip=status.get("podIP") or None,
        phase=str(status.get("phase", "Unknown")),
        ready=conditions.get("Ready") == "True",
        terminating=metadata.get("deletionTimestamp") is not None,
        labels=metadata.get("labels") or {},
        annotations=metadata.get("annotations") or {},
    )


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield the lines of a stream; a line of more than `MAX_LINE_BYTES` is an error, an incomplete last one is lost."""
    rest = b""
    async for part in content.iter_any():
        *whole, rest = (rest + part).split(b"\n")
        for line in whole:
            if line.strip():
                yield line
        if len(rest) > MAX_LINE_BYTES:
            raise KubeError(f"a watch event has more than {MAX_LINE_BYTES} bytes")


def _object(raw: bytes) -> dict[str, Any]:
    try:
        found = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise KubeError(f"the API server's answer is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise KubeError(f"the API server's answer is a {type(found).__name__}, expected an object")
    return found


async def _check(answer: aiohttp.ClientResponse) -> None:
    """Raise unless the status is 200."""
    if answer.status == 200:
        return
    raw = await answer.content.read(1 << 16)
    try:
        body = _object(raw)
    except KubeError:
        body = {}
    raise _error(body, answer.status)


def _error(status: Mapping[str, Any], code: int) -> Exception:
    """Return the error of a Kubernetes `Status` object."""
    if code == GONE or status.get("reason") == "Expired":
        return VersionExpiredError(str(status.get("message", "")))
    text = f"the API server answered {code}: {status.get('message', 'no message')}"
    if code == 401:
        text += "; the token of the service account is not valid"
    if code == 403:
        text += "; the service account needs a role with get, list and watch of pods (docs/router.md)"
    return KubeError(text, code)
