"""Memory of a rank that is given back to the system while nothing runs: the KV pools, and the weights.

    prepare   writes a copy of the weights to an unnamed file, where they go; may fail, and changes nothing
    release   gives the pages of the memory back; addresses, views and programs stay valid
    restore   reads the weights back; the KV pools are empty

Only on CPU: an address keeps its memory without its content there. Each rank's scheduler has a `DeviceMemory`.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import tempfile
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Protocol

import torch

from pdserve.errors import ModelError
from pdserve.memory import shared
from pdserve.memory.prefault import Prefault
from pdserve.model.attention.page_gather import GroupPool
from pdserve.model.named_weights import MemoryRange, NamedRows
from pdserve.protocol.engine_memory import KV_CACHE, WEIGHTS

log = logging.getLogger(__name__)

_PIECE_BYTES = 16 << 20
_IN_MEMORY = ("tmpfs", "ramfs")
"""File systems whose files are in memory: a copy of the weights there would free nothing."""


class ReleasableModel(Protocol):
    """What `DeviceMemory` needs of an executor."""

    device: torch.device
    pools: tuple[GroupPool, ...]

    def weight_memory(self) -> list[MemoryRange]:
        """Return the memory of the weights; ranges may overlap."""
        ...

    def read_weights(self, name: str, max_rows: int) -> list[NamedRows]:
        """See `ParamSlots.read`."""
        ...


class DeviceMemory:
    """The memory of one rank. Scheduler thread; no step is under way.

    `commit`: see `DeviceMemory.commit`. `refuses_experts`: experts move between the
    ranks, so that they have other names than their memory.
    """

    def __init__(
        self, executor: ReleasableModel, commit: Prefault | None = None, *, refuses_experts: bool = False
    ) -> None:
        self._executor, self._refuses_experts = executor, refuses_experts
        self.commit = commit
        """Commits KV pages ahead; None: nothing does. Set when the engine is assembled."""
        self._copy: WeightsCopy | None = None

    def read(self, name: str, max_rows: int) -> list[NamedRows]:
        """Return what this rank has of the first `max_rows` rows of the checkpoint's tensor `name`.

        Raises:
            ModelError: as `ParamSlots.read`, or the weights are released.
        """
        if self._copy is not None:
            raise ModelError("the weights are released; resume them first")
        if self._refuses_experts and ".experts." in name:
            raise ModelError(f"{name}: with --enable-eplb experts move between ranks, and are not read by name")
        return self._executor.read_weights(name, max_rows)

    def prepare(self, tags: Collection[str]) -> None:
        """Do what can fail before `release`.

        Raises:
            ModelError: the memory of this device is not released, or no copy of the weights can be written.
        """
        if self._executor.device.type != "cpu":
            raise ModelError(f"memory of a {self._executor.device.type} device is not released; only that of a CPU is")
        if WEIGHTS in tags:
            self._copy = WeightsCopy(whole_pages(self._executor.weight_memory()))

    def cancel(self) -> None:
        """Forget what `prepare` has done."""
        if self._copy is not None:
            self._copy.close()
            self._copy = None

    def release(self, tags: Collection[str]) -> int:
        """Give the memory of `tags` back; returns its bytes. `prepare` comes first."""
        num_bytes = 0
        if KV_CACHE in tags:
            if self.commit is not None:
                self.commit.hold()
            for pool in self._executor.pools:
                pool.give_back()
                num_bytes += pool.buffer[1]
        if WEIGHTS in tags:
            assert self._copy is not None, "prepare comes first"
            for one in self._copy.ranges:
                shared.give_back(one.address, one.num_bytes)
            num_bytes += self._copy.num_bytes
        return num_bytes

    def restore(self, tags: Collection[str]) -> None:
        """Take the memory of `tags` again.

        Raises:
            ModelError: the copy of the weights cannot be read. It is kept.
        """
        if WEIGHTS in tags and self._copy is not None:
            self._copy.read_back()
            self.cancel()
        if KV_CACHE in tags and self.commit is not None:
            self.commit.go_on()


class WeightsCopy:
    """A copy of memory `ranges` in a file without a name, which ends with the process.

    Raises:
        ModelError: no directory for temporary files is on a disk, or the disk is full.
    """

    def __init__(self, ranges: Sequence[MemoryRange]) -> None:
        self.ranges = tuple(ranges)
        self.num_bytes = sum(one.num_bytes for one in ranges)
        directory = copy_directory()
        try:
            self._file = tempfile.TemporaryFile(prefix="pdserve-weights-", dir=directory, buffering=0)  # noqa: SIM115
            for one in self.ranges:
                for piece in _pieces(one):
                    _write(self._file.fileno(), piece)
        except OSError as error:
            with contextlib.suppress(AttributeError):
                self._file.close()
            raise ModelError(
                f"no copy of the weights, {self.num_bytes >> 20} MB, can be written to {directory}: {error}"
            ) from error

    def read_back(self) -> None:
        """Write the bytes into the memory again. Raises ModelError when the file cannot be read."""
        try:
            self._file.seek(0)
            for one in self.ranges:
                for piece in _pieces(one):
                    _read(self._file.fileno(), piece)
        except OSError as error:
            raise ModelError(f"the copy of the weights cannot be read: {error}") from error

    def close(self) -> None:
        """Drop the copy."""
        self._file.close()


def whole_pages(ranges: Iterable[MemoryRange]) -> list[MemoryRange]:
    """Return the whole pages of memory in `ranges`, each once, in ascending order."""
    page = os.sysconf("SC_PAGE_SIZE")
    merged: list[tuple[int, int]] = []
    for one in sorted(ranges, key=lambda one: one.address):
        begin, end = one.address, one.address + one.num_bytes
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    inner = [(-(-begin // page) * page, end // page * page) for begin, end in merged]
    return [MemoryRange(begin, end - begin) for begin, end in inner if begin < end]


def copy_directory() -> str:
    """Return the first directory for temporary files that is on a disk. Raises ModelError when there is none."""
    candidates = [tempfile.gettempdir(), "/var/tmp", str(Path.cwd())]
    for directory in candidates:
        if os.access(directory, os.W_OK) and file_system_of(directory) not in _IN_MEMORY:
            return directory
    raise ModelError(f"no directory for a copy of the weights is on a disk: {', '.join(candidates)}; set TMPDIR")


def file_system_of(directory: str) -> str:
    """Return the type of the file system that has `directory`; empty where the system does not say."""
    real, found = os.path.realpath(directory), ("", "")
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mounts").read_text(errors="replace").splitlines():
            _, mount, kind, *_ = line.split(" ")
            inside = real == mount or real.startswith(mount.rstrip("/") + "/")
            if inside and len(mount) >= len(found[0]):
                found = mount, kind
    return found[1]


def _pieces(one: MemoryRange) -> Iterable[memoryview]:
    """Yield the bytes of a range, in pieces."""
    for begin in range(0, one.num_bytes, _PIECE_BYTES):
        count = min(_PIECE_BYTES, one.num_bytes - begin)
        yield memoryview((ctypes.c_char * count).from_address(one.address + begin)).cast("B")


def _write(descriptor: int, piece: memoryview) -> None:
    while piece:
        piece = piece[os.write(descriptor, piece) :]


def _read(descriptor: int, piece: memoryview) -> None:
    while piece:
        count = os.readv(descriptor, [piece])
        if count == 0:
            raise OSError("the file is too short")
        piece = piece[count:]
