"""Writes JSON lines to a file or to stdout, in a separate thread. Used by the request log and the log of KV hashes.

Callers never wait for the disk: when `MAX_WAITING` lines are queued, newer ones are dropped and counted.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections import deque
from pathlib import Path
from typing import Any

import orjson

from pdserve.errors import ConfigError

log = logging.getLogger(__name__)

MAX_WAITING = 10_000
"""Most lines in the queue."""
CLOSE_TIMEOUT_S = 5.0


class JsonLines:
    """Writes lines to `target`: `stdout`, a file whose name ends with .jsonl, or a directory, for `name`.jsonl in it.

    Lines are appended whole, so several processes may share a file. `write` may be called from any thread.

    Raises:
        ConfigError: the file cannot be opened.
    """

    def __init__(self, target: str, name: str, field: str) -> None:
        """`field` is the flag that a ConfigError names."""
        self.num_dropped = 0
        """Lines that were dropped."""
        self._waiting: deque[dict[str, Any]] = deque()
        self._writing = False
        self._ending = False
        self._news = threading.Condition()
        self._fd = sys.stdout.fileno() if target == "stdout" else _open(target, name, field)
        self._owned = target != "stdout"
        self._thread = threading.Thread(target=self._work, name="json-lines", daemon=True)
        self._thread.start()

    def write(self, line: dict[str, Any]) -> None:
        """Queue `line`, or drop it. Any thread; never waits for the disk."""
        with self._news:
            if self._ending or len(self._waiting) >= MAX_WAITING:
                self._drop(1, "the disk is too slow, or the log is closed")
                return
            self._waiting.append(line)
            self._news.notify()

    def close(self) -> None:
        """Write the queued lines for at most `CLOSE_TIMEOUT_S` seconds; the rest is dropped and counted."""
        with self._news:
            self._ending = True
            self._news.notify()
        self._thread.join(CLOSE_TIMEOUT_S)
        with self._news:
            left = len(self._waiting) + self._writing
            self._waiting.clear()
            self._writing = False
            if left:
                self._drop(left, f"the disk took longer than {CLOSE_TIMEOUT_S:g} s at the end")
            if self._owned and not self._thread.is_alive():
                os.close(self._fd)
                self._owned = False
        if self.num_dropped:
            log.warning("%d lines of a log were dropped", self.num_dropped)

    def _work(self) -> None:
        while (line := self._next()) is not None:
            try:
                data = orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS)
                while data:
                    data = data[os.write(self._fd, data) :]
            except (OSError, orjson.JSONEncodeError) as error:
                with self._news:
                    if self._writing:  # else `close` has already counted this line
                        self._drop(1, error)

    def _next(self) -> dict[str, Any] | None:
        """Wait for the next line; None after `close`, when the queue is empty."""
        with self._news:
            self._writing = False
            while not self._waiting:
                if self._ending:
                    return None
                self._news.wait()
            self._writing = True
            return self._waiting.popleft()

    def _drop(self, count: int, why: object) -> None:
        """Count dropped lines. Under the lock. Logs at doubling counts only, so a full disk does not fill the log."""
        before, self.num_dropped = self.num_dropped, self.num_dropped + count
        if before.bit_length() != self.num_dropped.bit_length():
            log.error("a line of a log was dropped (%d so far): %s", self.num_dropped, why)


def _open(target: str, name: str, field: str) -> int:
    path = Path(target).expanduser()
    try:
        if path.suffix != ".jsonl":
            path.mkdir(parents=True, exist_ok=True)
            path = path / f"{name}.jsonl"
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot write to {path}: {error.strerror or error}", field=field) from error
