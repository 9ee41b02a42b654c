"""Decode steps as CUDA graphs: one call launches all kernels of a step, at a list of batch sizes.

`LocalExecutor.capture_decode` captures them at start-up, when weights and KV pool have their addresses. `ModelRunner`
uses them for decode steps. A step of n rows is padded to the next size. The inputs of a step lie in tensors at
fixed addresses: tokens, positions and slots here, lengths, pages and state slots in the backends of the layers. Padding
rows read the null page, write no KV and no state, and take their token from a row of the token table that no request
has.

Sizes are captured from the largest down, so that smaller graphs reuse the memory pool of the larger ones.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pdserve.executor.input_batch import HostBatch
from pdserve.memory.layout import PageSpace
from pdserve.model.attention.interface import CapturableBackend, CapturedAttention
from pdserve.model.attention.page_gather import GroupPool
from pdserve.model.forward_batch import NOWHERE, ForwardBatch, HostRows, fill
from pdserve.model.gpu import runtime
from pdserve.model.interface import LayerTaps, Model

_LOG = logging.getLogger(__name__)
DEFAULT_MAX_ROWS = 256


@dataclasses.dataclass(frozen=True)
class DecodeOutput:
    """The output of a decode step, valid until the next step.

    `logits` `[n, vocab]` in the model's dtype; `argmax` int64 `[n]`, which is already in the rows' tokens. `tapped`:
    the outputs of the tapped layers, as `LayerTaps.hidden`; None where no layer is tapped.
    """

    logits: Tensor
    argmax: Tensor
    tapped: Tensor | None = None


Replay = Callable[[], None]


class Capture(Protocol):
    """Makes a step repeatable."""

    def __call__(self, work: Callable[[], None]) -> Replay:
        """Run `work`, which writes its results to tensors at fixed addresses, and return a function that repeats it."""
        ...


@dataclasses.dataclass(frozen=True)
class _Recorded:
    """A graph and the work that it repeats: the graph knows addresses only, the work owns the tensors there."""

    graph: torch.cuda.CUDAGraph
    work: Callable[[], None]

    def __call__(self) -> None:
        self.graph.replay()


class GraphCapture:
    """Implements `Capture` with CUDA graphs that share one memory pool."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], None]) -> Replay:
        """See `Capture`. The first run compiles kernels and fills caches, which cannot be captured."""
        work()
        torch.cuda.current_stream().synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            work()
        return _Recorded(graph, work)


class EagerCapture:
    """Implements `Capture` by running the work again, on any device. For tests."""

    def __call__(self, work: Callable[[], None]) -> Replay:
        """See `Capture`."""
        work()
        return work


def graph_sizes(max_rows: int) -> tuple[int, ...]:
    """Return the batch sizes to capture, up to and including `max_rows`: padding stays under 8 rows up to 256."""
    every = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), *range(544, max_rows + 1, 32))
    return (*(size for size in every if size < max_rows), max_rows)


@dataclasses.dataclass(frozen=True)
class Padding:
    """What rows of padding read: a row of the token table that no request has, and null pages; they have no slot.

    `null_window_page`: None without WINDOW groups.
    """

    spare_row: int
    null_page: int
    null_window_page: int | None = None
    has_state: bool = False

    @staticmethod
    def of(pools: Sequence[GroupPool], spare_row: int) -> Padding:
        """Return the padding of steps over `pools`."""
        nulls = {pool.group.space: pool.null_page for pool in pools}
        return Padding(spare_row, nulls[PageSpace.TOKENS], nulls.get(PageSpace.WINDOW), PageSpace.SLOTS in nulls)

    def pages(self, num_rows: int, num_pages: int) -> npt.NDArray[np.int32]:
        """Return a page table of null pages."""
        return np.full((num_rows, num_pages), self.null_page, dtype=np.int32)

    def window(self, num_rows: int, num_pages: int) -> npt.NDArray[np.int32] | None:
        """Return a table of null window pages; None without WINDOW groups."""
        if self.null_window_page is None:
            return None
        return np.full((num_rows, num_pages), self.null_window_page, dtype=np.int32)

    def slots(self, num_rows: int) -> npt.NDArray[np.int32] | None:
        """Return the slots of rows of padding; None without STATE groups."""
        return np.full(num_rows, NOWHERE, dtype=np.int32) if self.has_state else None


def padded(host: HostBatch, size: int, padding: Padding) -> HostBatch:
    """Pad a decode step to `size` rows; the results of the padding rows are ignored."""
    num_rows, num_pages = host.rows.pages.shape
    missing = size - num_rows
    assert missing >= 0, "a step is padded, never cut"
    filler = np.array([padding.spare_row, 0, NOWHERE, 0], dtype=np.int64)[:, None].repeat(missing, 1)
    pages, window, slots = padding.pages(size, num_pages), padding.window(size, num_pages), padding.slots(size)
    pages[:num_rows] = host.rows.pages
    if window is not None and host.rows.window is not None:
        window[:num_rows] = host.rows.window
    if slots is not None and host.rows.slots is not None:
        slots[:num_rows] = host.rows.slots
    rows = HostRows(
        starts=np.concatenate((host.rows.starts, np.zeros(missing, dtype=np.int64))),
        ends=np.concatenate((host.rows.ends, np.ones(missing, dtype=np.int64))),
        offsets=np.arange(size),
        prompts=np.zeros(size, dtype=np.int64),
        pages=pages,
        window=window,
        slots=slots,
    )
    everyone = np.arange(size)
    table_rows = np.concatenate((host.table_rows, filler[0]))
    return HostBatch(np.concatenate((host.columns, filler), 1), everyone, everyone, table_rows, rows)


def is_decode(host: HostBatch) -> bool:
    """True when every row of the step has one new token and samples."""
    return host.columns.shape[1] == len(host.table_rows) and len(host.sampled) == len(host.table_rows)


@dataclasses.dataclass(frozen=True)
class _Sized:
    """A captured size: its columns `[4, size]`, its attention, and the function that replays it."""

    columns: Tensor
    attention: CapturedAttention
    replay: Replay


class DecodeGraphs:
    """The captured sizes of one model. `tokens` int32 `[rows, context]`: no request has row `padding.spare_row`.

    `tapped`: layers whose outputs each step keeps, for a drafter.
    """

    def __init__(
        self,
        model: Model,
        backend: CapturableBackend,
        tokens: Tensor,
        *,
        padding: Padding,
        max_pages: int,
        sizes: Sequence[int],
        capture: Capture,
        tapped: Sequence[int] = (),
    ) -> None:
        assert sizes and list(sizes) == sorted(set(sizes)), "sizes ascend"
        self._model, self._tokens = model, tokens
        self._padding = padding
        self._facts = torch.zeros(4 * sizes[-1], dtype=torch.int64, device=tokens.device)
        self._logits = torch.zeros(sizes[-1], model.spec.vocab_size, dtype=model.dtype, device=tokens.device)
        self._argmax = torch.zeros(sizes[-1], dtype=torch.int64, device=tokens.device)
        self._tapped = tuple(tapped)
        width = len(tapped) * model.spec.hidden_size
        self._hidden = torch.zeros(sizes[-1], width, dtype=model.dtype, device=tokens.device) if tapped else None
        self._sizes = np.array(sizes)
        began, before = time.monotonic(), _free_bytes(tokens.device)
        gc.collect()
        gc.freeze()  # each capture runs a garbage collection over all objects
        self._sized = {size: self._capture(size, max_pages, backend, capture) for size in reversed(sizes)}
        gc.unfreeze()
        for moe in model.moe_layers.values():
            moe.counts.zero_()
        self.seconds, self.num_bytes = time.monotonic() - began, max(0, before - _free_bytes(tokens.device))
        """Seconds of the capture, and bytes of device memory that it took."""
        _LOG.info(
            "captured decode steps at %d batch sizes up to %d: %.1f s, %d MB",
            len(sizes), sizes[-1], self.seconds, self.num_bytes >> 20,
        )  # fmt: skip

    @property
    def sizes(self) -> tuple[int, ...]:
        """The captured sizes, ascending."""
        return tuple(self._sizes.tolist())

    def size_for(self, host: HostBatch) -> int | None:
        """Return the size that the step is padded to; None for a step that is no decode step, or too large.

        Captured steps fold no pending tokens, and their rows have no adapters.
        """
        rows = host.rows
        if not is_decode(host) or len(host.table_rows) > self._sizes[-1] or rows.num_folded is not None:
            return None
        if rows.adapters is not None:
            return None
        return int(self._sizes[np.searchsorted(self._sizes, len(host.table_rows))])

    def run(self, host: HostBatch, size: int) -> DecodeOutput:
        """Compute a step whose `size_for` is `size`; does not wait for the device."""
        sized = self._sized[size]
        filled = padded(host, size, self._padding)
        fill([(sized.columns, filled.columns), *sized.attention.filling(filled.rows)])
        sized.replay()
        num_rows = len(host.table_rows)
        tapped = None if self._hidden is None else self._hidden[:num_rows]
        return DecodeOutput(self._logits[:num_rows], self._argmax[:num_rows], tapped)

    def _capture(self, size: int, max_pages: int, backend: CapturableBackend, capture: Capture) -> _Sized:
        """Capture one size, filled with padding rows."""
        columns = self._facts[: 4 * size].view(4, size)
        nothing = np.empty(0, dtype=np.int64)
        no_rows = HostRows(nothing, nothing, nothing, nothing, self._padding.pages(0, 1))
        none = HostBatch(np.empty((4, 0), dtype=np.int64), nothing, nothing, nothing, no_rows)
        filled = padded(none, size, self._padding)
        attention = backend.capturable(size, max_pages, columns[2], columns[3])
        fill([(columns, filled.columns), *attention.filling(filled.rows)])
        sample_index = torch.arange(size, device=columns.device)
        taps: LayerTaps | None = None
        if self._hidden is not None:
            taps = LayerTaps(self._tapped)
            taps.replace(self._hidden[:size])

        def work() -> None:
            ids = self._tokens[columns[0], columns[1]].long()
            batch = ForwardBatch(torch.cat((ids[None], columns[1:])), sample_index, filled.rows)
            logits = self._model.forward(batch, attention, taps=taps)
            _keep_argmax(logits, self._logits[:size], self._argmax[:size], self._tokens, columns[0], columns[1])

        return _Sized(columns, attention, capture(work))


def _keep_argmax(
    logits: Tensor, kept: Tensor, argmax: Tensor, tokens: Tensor, table_rows: Tensor, positions: Tensor
) -> None:
    """Copy the logits and store the argmax tokens; see `keep_argmax` in `model/gpu/sampling.py`."""
    if tokens.device.type == "cuda" and runtime.is_installed():
        from pdserve.model.gpu.sampling import keep_argmax

        keep_argmax(logits, kept, argmax, tokens, table_rows, positions)
        return
    kept.copy_(logits)
    torch.argmax(kept, -1, out=argmax)
    tokens[table_rows, positions + 1] = argmax.int()


def _free_bytes(device: torch.device) -> int:
    """Free bytes of a CUDA device; 0 elsewhere."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
