"""Copies between pages of the pool and slots of the host tier, on the thread "kv-tier", beside the steps.

    scheduler   start_save, start_load ──> jobs, in order ──> kv-tier: copies ──> handle is done, `wake` is called

On CPU the thread copies page by page, without torch: its operations would use as many threads as a step. On CUDA it
copies in a stream of its own, in pieces, from and to pinned memory, and waits for the stream. The rules of
`Executor.start_save` and `start_load` make copies independent of steps: no step under way uses the pages.
"""

from __future__ import annotations

import ctypes
import queue
import threading
from collections.abc import Callable, Sequence

import numpy as np
import torch

from pdserve.executor.interface import CopyHandle
from pdserve.executor.kv_pages import PIECE_BYTES
from pdserve.memory.layout import PageSpace
from pdserve.memory.tiers.host_memory import Bytes, GroupPart, HostMemory, PageCopies
from pdserve.model.attention.page_gather import GroupPool
from pdserve.model.forward_batch import to_device


class NoHostTier:
    """The part of `Executor` for copies to the host tier, where there is none."""

    def start_save(self, copies: Sequence[PageCopies]) -> CopyHandle:
        """See `Executor.start_save`."""
        raise AssertionError("this executor has no host tier")

    def start_load(self, copies: Sequence[PageCopies]) -> CopyHandle:
        """See `Executor.start_load`."""
        raise AssertionError("this executor has no host tier")

    def poll_copies(self) -> None:
        """See `Executor.poll_copies`. Does nothing: handles of a single rank need no agreement."""

    def copy_now(self, copies: Sequence[PageCopies], *, to_host: bool) -> None:
        """See `Executor.copy_now`."""
        raise AssertionError("this executor has no host tier")


class EndedCopy:
    """Implements `CopyHandle` of copies that are complete."""

    is_done = True

    def on_end(self, then: Callable[[], None]) -> None:
        """See `CopyHandle`."""
        then()


class PendingCopy:
    """Implements `CopyHandle` of copies that another thread makes, which calls `end`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._has_ended = False
        self._failure: BaseException | None = None
        self._then: list[Callable[[], None]] = []

    @property
    def is_done(self) -> bool:
        """See `CopyHandle`."""
        if not self._has_ended:
            return False
        if self._failure is not None:
            raise self._failure
        return True

    def on_end(self, then: Callable[[], None]) -> None:
        """See `CopyHandle`."""
        with self._lock:
            ended = self._has_ended
            if not ended:
                self._then.append(then)
        if ended:
            then()

    def end(self, failure: BaseException | None = None) -> None:
        """Record the end of the copies; `failure` is raised by `is_done`."""
        with self._lock:
            self._failure, self._has_ended = failure, True
            waiting, self._then = self._then, []
        for then in waiting:
            then()


class HostTierCopies:
    """Mixin of an executor: the part of `Executor` for the host tier. `pools`, one for each group, are on `device`."""

    pools: tuple[GroupPool, ...]
    device: torch.device
    _copier: PageCopier | None = None

    def open_host_tier(self, host: HostMemory) -> None:
        """Copy to and from the slots of `host` from now on. Call it before the first copy."""
        assert self._copier is None, "the host tier is opened once"
        self._copier = PageCopier(self.pools, host, self.device)

    def start_save(self, copies: Sequence[PageCopies]) -> CopyHandle:
        """See `Executor.start_save`."""
        assert self._copier is not None, "there is no host tier"
        return self._copier.start_save(copies)

    def start_load(self, copies: Sequence[PageCopies]) -> CopyHandle:
        """See `Executor.start_load`."""
        assert self._copier is not None, "there is no host tier"
        return self._copier.start_load(copies)

    def poll_copies(self) -> None:
        """See `Executor.poll_copies`. Does nothing: handles of a single rank need no agreement."""

    def copy_now(self, copies: Sequence[PageCopies], *, to_host: bool) -> None:
        """See `Executor.copy_now`. Raises what made the copy fail."""
        if to_host:
            self.settle_slots([slot for one in copies if one.space is PageSpace.SLOTS for slot in one.pages])
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        handle, ended = self.start_save(copies) if to_host else self.start_load(copies), threading.Event()
        handle.on_end(ended.set)
        ended.wait()
        assert handle.is_done

    def settle_slots(self, slots: Sequence[int]) -> None:
        """Bring state slots up to date before they are copied."""
        raise NotImplementedError

    def close_host_tier(self) -> None:
        """Make the copies that have been started, then end the thread. Does nothing without a host tier."""
        if self._copier is not None:
            self._copier.close()


class PageCopier:
    """Copies between `pools`, one for each group of this rank, and `host`. `close` ends the thread.

    The scheduler thread calls it.
    """

    def __init__(self, pools: Sequence[GroupPool], host: HostMemory, device: torch.device) -> None:
        self._pools, self._host, self._device = pools, host, device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._jobs: queue.SimpleQueue[tuple[PendingCopy, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="kv-tier", daemon=True)
        self._thread.start()

    def start_save(self, copies: Sequence[PageCopies]) -> CopyHandle:
        """See `Executor.start_save`."""
        return self._start(copies, to_host=True)

    def start_load(self, copies: Sequence[PageCopies]) -> CopyHandle:
        """See `Executor.start_load`."""
        return self._start(copies, to_host=False)

    def close(self) -> None:
        """Make the copies that have been started, then end the thread."""
        if self._thread.is_alive():
            self._jobs.put(None)
            self._thread.join()

    def _start(self, copies: Sequence[PageCopies], *, to_host: bool) -> CopyHandle:
        handle, own = PendingCopy(), tuple(copies)

        def run() -> None:
            for one in own:
                for part in self._host.parts[one.space]:
                    self._copy(one, part, to_host=to_host)
            if self._stream is not None:
                self._stream.synchronize()

        self._jobs.put((handle, run))
        return handle

    @torch.inference_mode()
    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            handle, run = job
            try:
                if self._stream is None:
                    run()
                else:
                    with torch.cuda.stream(self._stream):
                        run()
            except BaseException as error:
                handle.end(error)
            else:
                handle.end()

    def _copy(self, copies: PageCopies, part: GroupPart, *, to_host: bool) -> None:
        slab = self._host.slabs[copies.space]
        if self._stream is None:
            self._move(slab, part, copies, to_host=to_host)
            return
        rows, host = self._pools[part.group].pages_as_bytes, torch.from_numpy(slab)
        for pages, slots in _pieces(copies, part):
            index = to_device(np.asarray(pages, dtype=np.int64), self._device)
            if to_host:
                staged = rows.index_select(0, index)
            else:
                staged = torch.empty((len(pages), part.num_bytes), dtype=torch.uint8, device=self._device)
            for number, slot in enumerate(slots):
                own, other = staged[number], host[slot, part.start : part.start + part.num_bytes]
                target, source = (other, own) if to_host else (own, other)
                target.copy_(source, non_blocking=True)
            if not to_host:
                rows.index_copy_(0, index, staged)

    def _move(self, slab: Bytes, part: GroupPart, copies: PageCopies, *, to_host: bool) -> None:
        """Copy between a pool and a slab on CPU. `memmove` lets other threads run."""
        pool, _ = self._pools[part.group].buffer
        host, slot_bytes = int(slab.ctypes.data) + part.start, slab.shape[1]
        for page, slot in zip(copies.pages, copies.slots, strict=True):
            device, own = pool + page * part.num_bytes, host + slot * slot_bytes
            target, source = (own, device) if to_host else (device, own)
            ctypes.memmove(target, source, part.num_bytes)


def _pieces(copies: PageCopies, part: GroupPart) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut copies into pieces of about `PIECE_BYTES` on the device."""
    count = max(1, PIECE_BYTES // part.num_bytes)
    starts = range(0, len(copies.pages), count)
    return [(copies.pages[first : first + count], copies.slots[first : first + count]) for first in starts]


def pinned(num_bytes: int) -> Bytes:
    """Allocate zeroed host memory that a CUDA device can copy from and to."""
    found: Bytes = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True).numpy()
    return found
