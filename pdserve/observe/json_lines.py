"""JSON lines to a file or to stdout, written by a thread of their own. Used by the request log and by KV observation.

Whoever writes never waits: when the disk is slower than the lines come, the newest are dropped and counted.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
from pathlib import Path
from typing import Any

import orjson

from pdserve.errors import ConfigError

log = logging.getLogger(__name__)

MAX_WAITING = 10_000
CLOSE_TIMEOUT_S = 5.0


class JsonLines:
    """Lines for `target`: `stdout`, a file whose name ends with .jsonl, or a directory, where `name`.jsonl is made.

    Lines are appended whole, so several processes may share a file.

    Raises:
        ConfigError: the file cannot be opened.
    """

    def __init__(self, target: str, name: str, field: str) -> None:
        """`field` is the flag that an error names."""
        self.num_dropped = 0
        self._waiting: queue.Queue[dict[str, Any] | None] = queue.Queue(MAX_WAITING)
        self._fd = sys.stdout.fileno() if target == "stdout" else _open(target, name, field)
        self._owned = target != "stdout"
        self._thread = threading.Thread(target=self._work, name="json-lines", daemon=True)
        self._thread.start()

    def write(self, line: dict[str, Any]) -> None:
        """Any thread; never waits."""
        try:
            self._waiting.put_nowait(line)
        except queue.Full:
            self.num_dropped += 1

    def close(self) -> None:
        """Write what waits, for some seconds at most. Once."""
        self._waiting.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._owned and not self._thread.is_alive():
            os.close(self._fd)

    def _work(self) -> None:
        while (line := self._waiting.get()) is not None:
            data = orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS)
            try:
                while data:
                    data = data[os.write(self._fd, data) :]
            except OSError as error:
                self.num_dropped += 1
                if self.num_dropped & (self.num_dropped - 1) == 0:  # a full disk must not fill the log as well
                    log.error("a line could not be written (%d so far): %s", self.num_dropped, error)


def _open(target: str, name: str, field: str) -> int:
    path = Path(target).expanduser()
    try:
        if path.suffix != ".jsonl":
            path.mkdir(parents=True, exist_ok=True)
            path = path / f"{name}.jsonl"
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot write to {path}: {error.strerror or error}", field=field) from error
