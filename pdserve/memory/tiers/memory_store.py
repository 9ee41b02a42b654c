"""The store `memory`: objects in this process. For tests and the simulation, where nodes share one such store."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from pdserve.config.storage_options import StorageOptions

DEFAULT_MAX_BYTES = 1 << 30


class MemoryStorage:
    """Implements `Storage` with at most `max_bytes` of objects; the ones unused for the longest time go first."""

    name = "memory"

    def __init__(self, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._objects: OrderedDict[str, bytes] = OrderedDict()
        self._lock = threading.Lock()

    @classmethod
    def open(cls, options: StorageOptions) -> MemoryStorage:
        """Make an empty store.

        Raises:
            ConfigError: an option is wrong.
        """
        options.only(("max_size",))
        return cls(options.size("max_size", DEFAULT_MAX_BYTES))

    def exists(self, keys: Sequence[str]) -> int:
        """See `Storage.exists`."""
        with self._lock:
            return next((index for index, key in enumerate(keys) if key not in self._objects), len(keys))

    def get_into(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[bool]:
        """See `Storage.get_into`."""
        return [self._get(key, buffer) for key, buffer in zip(keys, buffers, strict=True)]

    def put_from(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[bool]:
        """See `Storage.put_from`."""
        return [self._put(key, bytes(buffer)) for key, buffer in zip(keys, buffers, strict=True)]

    def discard(self, keys: Sequence[str]) -> None:
        """See `Storage.discard`."""
        with self._lock:
            for key in keys:
                self._num_bytes -= len(self._objects.pop(key, b""))

    def clear(self) -> None:
        """See `Storage.clear`."""
        with self._lock:
            self._objects.clear()
            self._num_bytes = 0

    def close(self) -> None:
        """See `Storage.close`."""

    def _get(self, key: str, buffer: memoryview) -> bool:
        with self._lock:
            found = self._objects.get(key)
            if found is None or len(found) != len(buffer):
                return False
            self._objects.move_to_end(key)
        buffer[:] = found
        return True

    def _put(self, key: str, value: bytes) -> bool:
        with self._lock:
            if key in self._objects:
                self._objects.move_to_end(key)
                return True
            if len(value) > self._max_bytes:
                return False
            self._objects[key] = value
            self._num_bytes += len(value)
            while self._num_bytes > self._max_bytes:
                self._num_bytes -= len(self._objects.popitem(last=False)[1])
            return True
