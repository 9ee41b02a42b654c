"""The store `file`: one file for each object, in a directory that servers share.

A file is written under another name and then renamed, so that a reader sees a whole object or none. The directory is
kept below a size: the files that were not read or written for the longest time are removed first. Several servers may
use one directory; each one removes files when it finds the directory too large.
"""

from __future__ import annotations

import contextlib
import logging
import os
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
_STALE_S = 3600.0
"""Seconds after which an unfinished file is removed: its writer has ended."""


class FileStorage:
    """Implements `Storage` in `directory`, which gets at most about `max_bytes` of objects."""

    name = "file"

    def __init__(self, directory: Path, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self._directory, self._max_bytes = directory, max_bytes
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=directory):
                pass
        except OSError as error:
            raise ConfigError(f"cannot write to {directory}: {error}", field=FIELD) from error
        self._num_bytes = sum(size for _, size, _ in self._files())

    @classmethod
    def open(cls, options: StorageOptions) -> FileStorage:
        """Open the directory that the options name.

        Raises:
            ConfigError: an option is wrong, or the directory cannot be written.
        """
        options.only(("directory", "max_size"))
        default = os.path.join(tempfile.gettempdir(), f"pdserve-kv-{os.getuid()}")
        return cls(Path(options.text("directory", default)), options.size("max_size", DEFAULT_MAX_BYTES))

    def exists(self, keys: Sequence[str]) -> int:
        """See `Storage.exists`."""
        for index, key in enumerate(keys):
            if not self._path(key).exists():
                return index
        return len(keys)

    def get_into(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[bool]:
        """See `Storage.get_into`."""
        return [self._read(self._path(key), buffer) for key, buffer in zip(keys, buffers, strict=True)]

    def put_from(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[bool]:
        """See `Storage.put_from`."""
        taken = [self._write(self._path(key), buffer) for key, buffer in zip(keys, buffers, strict=True)]
        if self._num_bytes > self._max_bytes:
            self._make_room()
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
            raise StorageError(f"cannot read {path}: {error}") from error
        return done == len(buffer)

    def _write(self, path: Path, buffer: memoryview) -> bool:
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
            raise StorageError(f"cannot write {path}: {error}") from error
        self._num_bytes += len(buffer)
        return True

    def _make_room(self) -> None:
        """Remove the files that were not used for the longest time. Other servers' files count too."""
        files = sorted(self._files(), key=lambda file: file[2])
        self._num_bytes = sum(size for _, size, _ in files)
        for path, size, _ in files:
            if self._num_bytes <= _KEEP * self._max_bytes:
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
