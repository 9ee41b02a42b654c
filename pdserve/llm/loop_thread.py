"""An event loop in its own thread, so that the caller may run another event loop, as notebooks do.

Owned by `Servers`. The loop thread also starts the child processes. The kernel ends them with the thread that started
them, and the loop thread lives until `close`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")


class LoopThread:
    """Runs coroutines for other threads until `close`."""

    def __init__(self, name: str) -> None:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start `work`; any thread except the loop thread. Cancelling the future cancels the work."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` and wait for its result; any thread except the loop thread.

        An interrupt of the wait requests cancellation of `work` and is raised again.
        """
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def post(self, call: Callable[[], None]) -> None:
        """Schedule `call` on the loop; any thread. Does nothing after `close`."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call)

    @property
    def is_current(self) -> bool:
        """Whether the caller runs in the loop thread."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """Stop the loop and cancel running work. Waits for the thread unless called in it."""
        self.post(self._loop.stop)
        if not self.is_current:
            self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        finally:
            self._loop.close()
