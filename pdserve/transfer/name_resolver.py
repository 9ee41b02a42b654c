"""Resolves names in threads of one lane, so that a name server that hangs delays only that lane.

`getaddrinfo` cannot be stopped: a thread that hangs keeps its slot until it ends, even after its look-up was cancelled.
Used by `lookups` (as aiohttp's resolver) and by `directory.Probes`, on the directory's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Sequence
from typing import Any

from aiohttp.abc import AbstractResolver, ResolveResult

Found = Sequence[tuple[int, int, int, str, Any]]
"""Return type of `getaddrinfo`."""


class LaneResolver(AbstractResolver):
    """Resolves at most `max_threads` names at a time; further names wait. Event loop only."""

    def __init__(self, max_threads: int) -> None:
        self._places = asyncio.Semaphore(max_threads)

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Return all stream addresses of `host` (`AbstractResolver`)."""
        results: list[ResolveResult] = []
        for kind, _, protocol, _, address in await self._look_up(host, port, family):
            results.append(
                ResolveResult(
                    hostname=host,
                    host=str(address[0]),
                    port=int(address[1]),
                    family=kind,
                    proto=protocol,
                    flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
                )
            )
        return results

    async def first(self, host: str, port: int) -> tuple[int, Any]:
        """Return family and socket address of the first address of `host`. A numeric `host` needs no thread.

        Raises:
            OSError: the name has no address.
        """
        try:
            found: Found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        except socket.gaierror:
            found = await self._look_up(host, port, socket.AF_UNSPEC)
        family, _, _, _, address = found[0]
        return family, address

    async def close(self) -> None:
        """Do nothing (`AbstractResolver`): other look-ups still use this resolver."""

    async def _look_up(self, host: str, port: int, family: int) -> Found:
        await self._places.acquire()
        loop = asyncio.get_running_loop()
        found: asyncio.Future[Found] = loop.create_future()

        def post_result(result: Found | Exception) -> None:
            self._places.release()
            if found.cancelled():
                return
            if isinstance(result, Exception):
                found.set_exception(result)
            else:
                found.set_result(result)

        def run() -> None:
            result: Found | Exception
            try:
                result = socket.getaddrinfo(host, port, family=family, type=socket.SOCK_STREAM)
            except Exception as error:  # UnicodeError, too: names come from clients
                result = error
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(post_result, result)

        try:
            threading.Thread(target=run, name="kv-names", daemon=True).start()
        except RuntimeError as error:  # the system has no more threads
            self._places.release()
            raise OSError(f"no thread to look {host!r} up with: {error}") from error
        return await found
