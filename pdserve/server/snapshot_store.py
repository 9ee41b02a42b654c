"""Suspended requests of one server, as the bytes of their snapshots: in memory, or as files of a directory.

A server has one store; it outlives the engine and a change of the role. Event loop only, except `put` and `get`,
which a thread may run.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import pathlib
import time
from collections.abc import Iterator

from pdserve.config.groups import ServerConfig
from pdserve.errors import ConfigError, RequestError

log = logging.getLogger(__name__)

MAX_STORED = 1 << 16
"""Most suspended requests."""
SUFFIX = ".pdsnap"
LEFTOVER_S = 600.0
"""Age of an unfinished file at which its writer has ended."""


class SnapshotStore:
    """Keeps snapshots by the request's id. `max_bytes` bounds all of them together; 0: it keeps none."""

    def __init__(self, max_bytes: int, directory: str | None = None) -> None:
        """`directory` None: in memory. Files that are there already belong to the store.

        Raises:
            ConfigError: the directory cannot be used.
        """
        self._max_bytes = max_bytes
        self._directory = None if directory is None else pathlib.Path(directory)
        self._held: dict[str, bytes] = {}
        """In memory: all snapshots, or with a directory those whose file could not be written."""
        self._resuming: set[str] = set()
        if self._directory is not None:
            try:
                self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                _remove_leftovers(self._directory)
            except OSError as error:
                raise ConfigError(f"snapshot_dir: {error}", field="snapshot_dir") from error

    @classmethod
    def of(cls, config: ServerConfig) -> SnapshotStore:
        """Return the store that a server's flags describe."""
        serving = config.serving
        return cls(int(serving.snapshot_store_gb * 1e9), serving.snapshot_dir)

    @property
    def num_bytes(self) -> int:
        """Bytes of all snapshots."""
        return sum(map(len, self._held.values())) + sum(size for _, size in self._files())

    def __len__(self) -> int:
        return len(self._held) + sum(1 for _ in self._files())

    def __contains__(self, rid: str) -> bool:
        return rid in self._held or (self._directory is not None and self._path(rid).exists())

    @property
    def num_free(self) -> int:
        """Bytes that the store still takes."""
        return max(0, self._max_bytes - self.num_bytes)

    def check(self, rid: str) -> None:
        """Check that the store may take a snapshot of `rid`.

        Raises:
            RequestError: 409, it has one already; 503, it is full or off.
        """
        if rid in self:
            raise RequestError(f"a request {rid!r} is suspended already", field="rid", status=409, code="suspended")
        if self.num_free == 0 or len(self) >= MAX_STORED:
            raise RequestError(
                f"{len(self)} suspended requests take {self.num_bytes} bytes; --snapshot-store-gb allows "
                f"{self._max_bytes}",
                status=503,
                code="snapshot_store_full",
                retry_after_s=1,
            )

    def put(self, rid: str, data: bytes) -> None:
        """Keep the snapshot `data` of `rid`, the only copy. It stays in memory if its file cannot be written."""
        if self._directory is None:
            self._held[rid] = data
            return
        try:
            self._write(rid, data)
        except OSError as error:
            log.warning("the snapshot of request %s stays in memory: %s", rid, error)
            self._held[rid] = data

    def _write(self, rid: str, data: bytes) -> None:
        path = self._path(rid)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        try:
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise

    def get(self, rid: str) -> bytes:
        """Return the snapshot of `rid`.

        Raises:
            RequestError: 404, no such request is suspended; 500, its file cannot be read.
        """
        try:
            if self._directory is None or rid in self._held:
                return self._held[rid]
            return self._path(rid).read_bytes()
        except (KeyError, FileNotFoundError):
            raise RequestError(
                f"no request {rid!r} is suspended", field="rid", status=404, code="not_suspended"
            ) from None
        except OSError as error:
            message = f"the snapshot of {rid!r} cannot be read: {error}"
            raise RequestError(message, field="rid", status=500, code="snapshot_unreadable") from error

    def drop(self, rid: str) -> bool:
        """Forget the snapshot of `rid`; returns whether there was one."""
        if self._held.pop(rid, None) is not None:
            return True
        if self._directory is None:
            return False
        try:
            self._path(rid).unlink()
        except FileNotFoundError:
            return False
        return True

    @contextlib.contextmanager
    def resuming(self, rid: str) -> Iterator[None]:
        """Let one caller at a time resume `rid`, also of the servers that share the directory.

        Raises:
            RequestError: 409, another call is resuming it.
        """
        refused = RequestError(f"request {rid!r} is being resumed", field="rid", status=409, code="suspended")
        if rid in self._resuming:
            raise refused
        self._resuming.add(rid)
        file: int | None = None
        try:
            if self._directory is not None and rid not in self._held:
                with contextlib.suppress(OSError):  # then `get` says why
                    file = os.open(self._path(rid), os.O_RDONLY)
            if file is not None:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise refused from None
            yield
        finally:
            self._resuming.discard(rid)
            if file is not None:
                os.close(file)

    def _path(self, rid: str) -> pathlib.Path:
        assert self._directory is not None
        return self._directory / f"{hashlib.sha256(rid.encode()).hexdigest()}{SUFFIX}"

    def _files(self) -> Iterator[tuple[pathlib.Path, int]]:
        if self._directory is None:
            return
        with contextlib.suppress(OSError):
            for entry in os.scandir(self._directory):
                if entry.name.endswith(SUFFIX):
                    with contextlib.suppress(FileNotFoundError):
                        yield pathlib.Path(entry.path), entry.stat().st_size


def _remove_leftovers(directory: pathlib.Path) -> None:
    """Remove the files of servers that ended while they wrote a snapshot."""
    for path in directory.glob("*.partial"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > LEFTOVER_S:
                path.unlink()
