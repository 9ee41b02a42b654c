"""Finds prefill servers (`LookUps`) and probes peers (`Probes`): one thread with an event loop.

Created by `engine/build_transfer.py`; called by the scheduler thread. Results are posted from the directory's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable

from pdserve.base.hosts import HostPatterns
from pdserve.transfer.events import Address, PeerGone, PeerListens, TransferEvent
from pdserve.transfer.lookups import LookUps
from pdserve.transfer.name_resolver import LaneResolver

PROBE_TIMEOUT_S = 2.0
MIN_PAUSE_S = 2.0
MAX_PAUSE_S = 60.0
FORGET_AFTER_S = 600.0
"""Seconds without a probe request after which a peer is forgotten."""
MAX_PEERS = 4096
MAX_AT_ONCE = 512


@dataclasses.dataclass(slots=True)
class _Probed:
    asked_s: float
    not_before_s: float = 0.0
    num_unanswered: int = 0
    task: asyncio.Task[None] | None = None


class Probes:
    """All probes. Event loop only; calls `post` with each result until `close`."""

    def __init__(self, post: Callable[[TransferEvent], None], timeout_s: float = PROBE_TIMEOUT_S) -> None:
        self._post = post
        self._timeout_s = timeout_s
        self._resolver = LaneResolver(max_threads=4)
        self._peers: OrderedDict[str, _Probed] = OrderedDict()
        """Probed peers by instance, the most recently requested one at the end."""
        self.num_running = 0
        """Probes under way."""

    def start(self, instance: str, endpoint: str) -> None:
        """Probe `instance` at `endpoint` (`host:port`), unless a probe runs or the pause after a failed one lasts."""
        now = asyncio.get_running_loop().time()
        peer = self._peers.setdefault(instance, _Probed(now))
        peer.asked_s = now
        self._peers.move_to_end(instance)
        self._forget_old(now)
        if peer.task is not None or now < peer.not_before_s or self.num_running >= MAX_AT_ONCE:
            return
        self.num_running += 1
        peer.task = asyncio.create_task(self._probe(instance, endpoint, peer))
        peer.task.add_done_callback(self._ended)

    def close(self) -> None:
        """Cancel all probes."""
        for peer in self._peers.values():
            if peer.task is not None:
                peer.task.cancel()

    async def _probe(self, instance: str, endpoint: str, peer: _Probed) -> None:
        try:
            event = await self._look(instance, endpoint)
        finally:
            peer.task = None
        if event is None:
            pause_s = min(MIN_PAUSE_S * 2**peer.num_unanswered, MAX_PAUSE_S)
            peer.num_unanswered = min(peer.num_unanswered + 1, 16)
            peer.not_before_s = asyncio.get_running_loop().time() + pause_s
            return
        if isinstance(event, PeerGone):
            self._peers.pop(instance, None)
        peer.num_unanswered, peer.not_before_s = 0, 0.0
        self._post(event)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Count the end of a probe, also of one that was cancelled before it began."""
        self.num_running -= 1

    async def _look(self, instance: str, endpoint: str) -> TransferEvent | None:
        """Probe an endpoint; None for no answer in time, no route, or no valid endpoint."""
        host, _, port = endpoint.rpartition(":")
        try:
            async with asyncio.timeout(self._timeout_s):
                family, address = await self._resolver.first(host.strip("[]"), int(port))
                with socket.socket(family, socket.SOCK_STREAM) as connection:
                    connection.setblocking(False)
                    await asyncio.get_running_loop().sock_connect(connection, address)
        except ConnectionRefusedError:
            return PeerGone(instance)
        except (OSError, ValueError, OverflowError):  # a time-out is an OSError
            return None
        return PeerListens(instance)

    def _forget_old(self, now: float) -> None:
        while self._peers:
            instance, oldest = next(iter(self._peers.items()))
            if len(self._peers) <= MAX_PEERS and oldest.asked_s > now - FORGET_AFTER_S:
                return
            if oldest.task is not None:
                oldest.task.cancel()
            del self._peers[instance]


_CLOSE_TIMEOUT_S = 2.0


class HttpDirectory:
    """`Directory` over HTTP. For `patience_s` see `LookUps`.

    `allowed`: the only bootstrap servers that may be looked up; None: any. Names are resolved in separate threads.
    """

    def __init__(
        self,
        post: Callable[[TransferEvent], None],
        token: str,
        patience_s: float | None = None,
        allowed: HostPatterns | None = None,
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._look_ups = LookUps(post, token, patience_s, allowed)
        self._probes = Probes(post)
        self._thread = threading.Thread(target=self._run, name="kv-directory", daemon=True)
        self._thread.start()

    def find(self, address: Address) -> None:
        """See `Directory`."""
        self._call(self._look_ups.start, address)

    def probe(self, instance: str, endpoint: str) -> None:
        """See `Directory`."""
        self._call(self._probes.start, instance, endpoint)

    def close(self) -> None:
        """End the thread and all running look-ups and probes. May be called any number of times."""
        self._call(self._loop.stop)
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _call(self, function: Callable[..., object], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function, *args)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            self._look_ups.close()
            self._probes.close()
            tasks = asyncio.all_tasks(self._loop)
            if tasks:
                self._loop.run_until_complete(asyncio.wait(tasks, timeout=_CLOSE_TIMEOUT_S / 2))
        finally:
            self._loop.close()
