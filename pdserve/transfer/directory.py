"""Finds prefill servers (`lookups`) and looks whether peers still live (`probes`): one thread with an event loop.

Made by `build_transfer`; the scheduler thread calls it, and its answers are posted from here.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable

from pdserve.base.host_patterns import HostPatterns
from pdserve.transfer.events import Address, TransferEvent
from pdserve.transfer.lookups import PATIENCE_S, LookUps
from pdserve.transfer.probes import Probes

_CLOSE_TIMEOUT_S = 2.0


class HttpDirectory:
    """`Directory` over HTTP. A server that is just starting is asked again for `patience_s`.

    `allowed`: the only bootstrap servers that are asked; None: any. Names are resolved in threads beside.
    """

    def __init__(
        self,
        post: Callable[[TransferEvent], None],
        token: str,
        patience_s: float = PATIENCE_S,
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
        """End the thread and what is under way. Any number of times."""
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
