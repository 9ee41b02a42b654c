"""Attention by flashinfer, whose kernels read pages in place. For CUDA, where installed; made by `backend_choice`.

A step of decode rows alone uses flashinfer's decode wrapper. All other steps use its prefill wrapper, for rows of both
kinds together. `plan` prepares a step on the host and copies the result through one pinned buffer of the wrapper. The
next plan waits until that copy is done. With at most one step in flight, it already is.
flashinfer's page table is one list: `indices` concatenates all rows' pages; row r's pages begin at `indptr[r]`.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pdserve.memory.layout import KVGroup
from pdserve.model.attention.interface import Heads
from pdserve.model.attention.page_gather import KVPool
from pdserve.model.forward_batch import Filling, ForwardBatch, HostRows, to_device

HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16)
_WORKSPACE_BYTES = 128 << 20
_LAYOUT, _KERNELS = "HND", "fa2"
"""pdserve's page layout has heads outside tokens, with strides between pages; of flashinfer's kernels, fa2 accepts any
stride.
"""
_TENSOR_CORES_FROM = 4
"""Query heads per KV head from which decode is faster with the prefill kernels' tensor-core products."""


def cannot_run(head_dim: int, dtype: torch.dtype) -> str | None:
    """Return why flashinfer cannot attend to such heads; None when it can."""
    if dtype not in DTYPES:
        return f"flashinfer computes in bfloat16 and float16, and the model is in {str(dtype).removeprefix('torch.')}"
    if head_dim not in HEAD_DIMS:
        return f"flashinfer has no kernels for heads of {head_dim}, only of {', '.join(map(str, HEAD_DIMS))}"
    return None


@dataclasses.dataclass(frozen=True)
class PageList:
    """flashinfer's page table of a step, int32: `indptr` `[R + 1]` and `last_lengths` `[R]` on the host, `indices`."""

    indptr: Tensor
    last_lengths: Tensor
    indices: npt.NDArray[np.int32]

    @staticmethod
    def of(rows: HostRows, group: KVGroup) -> PageList:
        """List the pages that hold the rows' tokens."""
        counts = group.pages_for(rows.ends)
        indptr = np.concatenate(([0], np.cumsum(counts)))
        used = np.arange(rows.pages.shape[1]) < counts[:, None]
        last_slots = group.page_and_slot(rows.ends - 1)[1]
        return PageList(_int32(indptr), _int32(last_slots + 1), rows.pages[used])


class FlashInferAttention:
    """The `flashinfer` backend over one KV pool. Implements `CapturableBackend`.

    `library` replaces the flashinfer module in tests. Importing the module may raise any exception.
    """

    def __init__(self, pool: KVPool, num_heads: int, device: torch.device, library: Any = None) -> None:
        self._library = importlib.import_module("flashinfer") if library is None else library
        self._pool, self._num_heads, self._device = pool, num_heads, device
        self._layers = [pool.layer(layer) for layer in range(pool.group.num_layers)]
        self._uses_tensor_cores = num_heads // pool.group.num_kv_heads >= _TENSOR_CORES_FROM
        self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        decode = self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, _LAYOUT, use_tensor_cores=self._uses_tensor_cores, backend=_KERNELS
        )
        prefill = self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, _LAYOUT, backend=_KERNELS)
        self._decode, self._prefill = Planned(decode, device), Planned(prefill, device)

    def begin(self, batch: ForwardBatch) -> FlashInferStep:
        """See `AttentionBackend.begin`."""
        host = batch.host
        pages = PageList.of(host, self._pool.group)
        if (host.ends - host.starts == 1).all():
            self.plan_decode(self._decode, pages)
            return FlashInferStep(self._layers, self._decode, batch.write_pages, batch.write_slots)
        self._plan_prefill(host, pages)
        return FlashInferStep(self._layers, self._prefill, batch.write_pages, batch.write_slots)

    def capturing(self) -> FlashInferAttention:
        """See `AttentionBackend.capturing`."""
        return self

    def capturable(self, num_rows: int, max_pages: int, write_pages: Tensor, write_slots: Tensor) -> FlashInferCaptured:
        """See `CapturableBackend.capturable`."""
        wrapper = self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, _LAYOUT, use_cuda_graph=True, use_tensor_cores=self._uses_tensor_cores,
            paged_kv_indptr_buffer=torch.zeros(num_rows + 1, dtype=torch.int32, device=self._device),
            paged_kv_indices_buffer=torch.zeros(num_rows * max_pages, dtype=torch.int32, device=self._device),
            paged_kv_last_page_len_buffer=torch.ones(num_rows, dtype=torch.int32, device=self._device),
            backend=_KERNELS,
        )  # fmt: skip
        planned = Planned(wrapper, self._device)
        return FlashInferCaptured(self, self._layers, planned, write_pages, write_slots, self._pool.group)

    def try_out(self) -> None:
        """Attend to the null page with both kinds of kernels. Compiling them may raise any exception."""
        pages = np.full((1, 1), self._pool.null_page, dtype=np.int32)
        start, end = np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.int64)
        rows = HostRows(starts=start, ends=end, offsets=start, prompts=start, pages=pages)
        listed = PageList.of(rows, self._pool.group)
        q = torch.zeros(1, self._num_heads, self._pool.group.head_dim, dtype=self._dtype, device=self._device)
        self.plan_decode(self._decode, listed)
        self._decode.run(q, self._layers[0])
        self._plan_prefill(rows, listed)
        self._prefill.run(q, self._layers[0])

    def plan_decode(self, planned: Planned, pages: PageList) -> None:
        """Plan rows of one new token each."""
        group = self._pool.group
        planned.plan(
            _pinned(pages.indptr, self._device), to_device(pages.indices, self._device),
            _pinned(pages.last_lengths, self._device), self._num_heads, group.num_kv_heads, group.head_dim,
            group.page_tokens, q_data_type=self._dtype, kv_data_type=self._dtype,
        )  # fmt: skip

    def _plan_prefill(self, host: HostRows, pages: PageList) -> None:
        """Plan rows of any lengths: causal, with each row's last query at its last key."""
        group = self._pool.group
        queries = _int32(np.append(host.offsets, host.offsets[-1] + host.ends[-1] - host.starts[-1]))
        self._prefill.plan(
            _pinned(queries, self._device), _pinned(pages.indptr, self._device),
            to_device(pages.indices, self._device), _pinned(pages.last_lengths, self._device),
            self._num_heads, group.num_kv_heads, group.head_dim, group.page_tokens,
            causal=True, q_data_type=self._dtype, kv_data_type=self._dtype,
        )  # fmt: skip

    @property
    def _dtype(self) -> torch.dtype:
        return self._pool.pages.dtype


class Planned:
    """A wrapper, and an event that marks its last plan's copies as done."""

    def __init__(self, wrapper: Any, device: torch.device) -> None:
        self._wrapper = wrapper
        self._copied = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def plan(self, *args: Any, **options: Any) -> None:
        """Call the wrapper's `plan` once its pinned memory is free."""
        if self._copied is None:
            self._wrapper.plan(*args, **options)
            return
        self._copied.synchronize()
        self._wrapper.plan(*args, **options)
        self._copied.record()

    def run(self, q: Tensor, kv: Tensor) -> Tensor:
        """Compute attention of the rows planned last."""
        out: Tensor = self._wrapper.run(q, kv)
        return out


class FlashInferStep:
    """Attention of one step, planned with `planned`."""

    def __init__(self, layers: list[Tensor], planned: Planned, write_pages: Tensor, write_slots: Tensor) -> None:
        from pdserve.model.attention.triton_pages import placed

        self._placed = placed
        self._layers, self._planned = layers, planned
        self._write_pages, self._write_slots = write_pages, write_slots

    def attend(self, layer: int, heads: Heads) -> Tensor:
        """See `StepAttention.attend`."""
        kv = self._layers[layer]
        q = self._placed(heads, kv, self._write_pages, self._write_slots)
        return self._planned.run(q, kv).flatten(1)


class FlashInferCaptured(FlashInferStep):
    """Implements `CapturedAttention` with a wrapper that has its own buffers."""

    def __init__(
        self, backend: FlashInferAttention, layers: list[Tensor], planned: Planned, write_pages: Tensor,
        write_slots: Tensor, group: KVGroup,
    ) -> None:  # fmt: skip
        super().__init__(layers, planned, write_pages, write_slots)
        self._backend, self._group = backend, group

    def filling(self, rows: HostRows) -> list[Filling]:
        """See `CapturedAttention.filling`. flashinfer's plan fills the buffers, so the list is empty."""
        self._backend.plan_decode(self._planned, PageList.of(rows, self._group))
        return []


def _int32(array: npt.NDArray[np.int64]) -> Tensor:
    """Convert to an int32 host tensor."""
    return torch.from_numpy(array.astype(np.int32))


def _pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """Pin a host tensor, so that a copy to `device` does not block."""
    return tensor.pin_memory() if device.type == "cuda" else tensor
