"""The store `file`: one file for each object, in a directory that servers share.

A file is written under another name and then renamed, so that a reader sees a whole object or none. The directory is
kept below a size: the files that were not read or written for the longest time are removed first. Several servers may
use one directory; each one removes files when it finds the directory too large, or the disk full. An object that cannot
be read, such as one of another user, counts as missing: it says nothing about the store.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from pdserve.config.storage_options import FIELD, StorageOptions
from pdserve.errors import ConfigError
from pdserve.memory.tiers.storage import StorageError

log = logging.getLogger(__name__)

DEFAULT_MAX_BYTES = 16 << 30
_SUFFIX, _PART_SUFFIX = ".kv", ".part"
_KEEP = 0.9
"""Share of the limit that is left after files were removed."""
_SHARE_UNSEEN = 1 / 8
"""Share of the limit that a server writes until it looks what others have written."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_UNREADABLE = (errno.EACCES, errno.EPERM, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG)
_STALE_S = 3600.0
"""Seconds after which an unfinished file is removed: its writer has ended."""


class FileStorage:
    """Implements `Storage` in `directory`, which gets at most about `max_bytes` of objects."""

    name = "file"

    def __init__(self, directory: Path, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self._directory, self._max_bytes = directory, max_bytes
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)  # others must not read or replace KV
            with tempfile.TemporaryFile(dir=directory):
                pass
        except OSError as error:
            raise ConfigError(f"cannot write to {directory}: {error}", field=FIELD) from error
        self._num_bytes = sum(size for _, size, _ in self._files())
        self._num_unseen = 0
        """Bytes written since the directory was last read."""

    @classmethod
    def open(cls, options: StorageOptions) -> FileStorage:
        """Open the directory that the options name.

        Raises:
            ConfigError: an option is wrong, or the directory cannot be written.
        """
        options.only(("directory", "max_size"))
        default = os.path.join(tempfile.gettempdir(), f"pdserve-kv-{os.getuid()}")
        directory = options.text("directory", default)
        storage = cls(Path(directory), options.size("max_size", DEFAULT_MAX_BYTES))
        if directory == default and os.lstat(default).st_uid != os.getuid():  # anyone may make it first
            raise ConfigError(f"{default} belongs to another user; name a directory", field=FIELD)
        return storage

    def exists(self, keys: Sequence[str]) -> int:
        """See `Storage.exists`."""
        for index, key in enumerate(keys):
            path = self._path(key)
            try:
                is_object = stat.S_ISREG(path.stat().st_mode) and os.access(path, os.R_OK)
            except OSError as error:
                if not isinstance(error, FileNotFoundError) and error.errno not in _UNREADABLE:
                    raise StorageError(f"cannot read {path}: {error}") from error
                is_object = False
            if not is_object:
                return index
        return len(keys)

    def get_into(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[bool]:
        """See `Storage.get_into`."""
        return [self._read(self._path(key), buffer) for key, buffer in zip(keys, buffers, strict=True)]

    def put_from(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[bool]:
        """See `Storage.put_from`."""
        taken, is_full = list[bool](), False
        for key, buffer in zip(keys, buffers, strict=True):
            is_full = is_full or not self._write(self._path(key), buffer)
            taken.append(not is_full)
        if is_full:  # reads go on, and older objects make room
            self._make_room(0)
        elif self._num_bytes > self._max_bytes or self._num_unseen > _SHARE_UNSEEN * self._max_bytes:
            self._make_room(self._max_bytes)
        return taken

    def discard(self, keys: Sequence[str]) -> None:
        """See `Storage.discard`."""
        for key in keys:
            _remove(self._path(key))

    def clear(self) -> None:
        """See `Storage.clear`."""
        for path, _, _ in self._files():
            _remove(path)
        self._num_bytes = 0

    def close(self) -> None:
        """See `Storage.close`. Files stay."""

    def _path(self, key: str) -> Path:
        return self._directory / f"{zlib.crc32(key.encode()) & 0xFF:02x}" / f"{key}{_SUFFIX}"

    def _read(self, path: Path, buffer: memoryview) -> bool:
        try:
            with path.open("rb", buffering=0) as file:
                if os.fstat(file.fileno()).st_size != len(buffer):
                    return False
                done = 0
                while done < len(buffer) and (count := file.readinto(buffer[done:])):
                    done += count
                os.utime(file.fileno())
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno in _UNREADABLE:
                return False
            raise StorageError(f"cannot read {path}: {error}") from error
        return done == len(buffer)

    def _write(self, path: Path, buffer: memoryview) -> bool:
        """Write a file; False when the disk is full."""
        with contextlib.suppress(OSError):
            os.utime(path)
            return True  # the same bytes
        part = None
        try:
            path.parent.mkdir(exist_ok=True)
            handle, part = tempfile.mkstemp(suffix=_PART_SUFFIX, dir=path.parent)
            with os.fdopen(handle, "wb", buffering=0) as file:
                done = 0
                while done < len(buffer):
                    done += file.write(buffer[done:])
            os.replace(part, path)
        except OSError as error:
            if part is not None:
                _remove(Path(part))
            if error.errno in _FULL:
                return False
            raise StorageError(f"cannot write {path}: {error}") from error
        self._num_bytes += len(buffer)
        self._num_unseen += len(buffer)
        return True

    def _make_room(self, max_bytes: int) -> None:
        """Remove the files that were not used for the longest time. Other servers' files count too.

        `max_bytes` 0: the disk is full, and a share of what is there leaves.
        """
        files = sorted(self._files(), key=lambda file: file[2])
        self._num_bytes, self._num_unseen = sum(size for _, size, _ in files), 0
        most = max_bytes or self._num_bytes
        if max_bytes and self._num_bytes <= max_bytes:
            return
        for path, size, _ in files:
            if self._num_bytes <= _KEEP * most:
                return
            _remove(path)
            self._num_bytes -= size

    def _files(self) -> Iterator[tuple[Path, int, float]]:
        """Yield path, bytes and time of last use of each object. Removes unfinished files of writers that ended."""
        oldest = time.time() - _STALE_S
        with contextlib.suppress(OSError):
            for folder in list(os.scandir(self._directory)):
                if len(folder.name) != 2 or not folder.is_dir(follow_symlinks=False):
                    continue
                for entry in os.scandir(folder.path):
                    with contextlib.suppress(OSError):
                        found = entry.stat(follow_symlinks=False)
                        if entry.name.endswith(_SUFFIX):
                            yield Path(entry.path), found.st_size, found.st_mtime
                        elif entry.name.endswith(_PART_SUFFIX) and found.st_mtime < oldest:
                            _remove(Path(entry.path))


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
