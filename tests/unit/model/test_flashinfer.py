"""What flashinfer is asked to do, by a library in its place that does it: plan, run, and buffers for CUDA graphs.

Its wrappers are those of flashinfer 0.7 as far as their arguments and page table go; attention is by its definition.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pdserve.memory.layout import attention_group
from pdserve.model.attention.flashinfer_pages import FlashInferAttention, cannot_run
from pdserve.model.attention.interface import Heads
from pdserve.model.attention.page_gather import KVPool
from pdserve.model.attention.torch_sdpa import TorchAttention
from pdserve.model.forward_batch import ForwardBatch, HostRows
from pdserve.model.layers.kernels import Rotary
from pdserve.model.rope import RopeSpec
from tests.unit.model.triton_kit import DEVICE, attended

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="the stand-in computes on the host")
HEADS, KV_HEADS, DIM, PAGE = 4, 2, 16, 4
CPU = torch.device("cpu")


class Wrapper:
    """Both wrappers; `kind` says which. Every argument is checked as flashinfer 0.7 documents it."""

    def __init__(self, workspace: torch.Tensor, kv_layout: str, **options: Any) -> None:
        assert workspace.dtype == torch.uint8 and not workspace.any() and kv_layout == "HND"
        assert options.pop("backend") == "fa2"
        self.graph = options.pop("use_cuda_graph", False)
        self.indptr = options.pop("paged_kv_indptr_buffer", None)
        self.indices = options.pop("paged_kv_indices_buffer", None)
        self.last = options.pop("paged_kv_last_page_len_buffer", None)
        assert set(options) <= {"use_tensor_cores"}
        self.plans = 0

    def _plan(
        self, queries: torch.Tensor, indptr: torch.Tensor, indices: torch.Tensor, last: torch.Tensor, *shape: int
    ) -> None:
        assert shape == (HEADS, KV_HEADS, DIM, PAGE)
        for x in (queries, indptr, indices, last):
            assert x.dtype == torch.int32 and x.ndim == 1
        assert len(indptr) == len(last) + 1 == len(queries) and indptr[-1] == len(indices)
        assert (last >= 1).all() and (last <= PAGE).all()
        self.queries = queries
        if self.graph:  # a graph reads its own buffers
            self.indptr.copy_(indptr)
            self.indices[: len(indices)].copy_(indices)
            self.last.copy_(last)
        else:
            self.indptr, self.indices, self.last = indptr, indices, last
        self.plans += 1

    def run(self, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        assert q.shape[1:] == (HEADS, DIM) and kv.shape[1:] == (2, KV_HEADS, PAGE, DIM) and q.is_contiguous()
        out = torch.empty_like(q)
        for row in range(len(self.last)):
            pages = self.indices[self.indptr[row] : self.indptr[row + 1]].long()
            length = (len(pages) - 1) * PAGE + int(self.last[row])
            keys, values = kv[pages].permute(1, 0, 3, 2, 4).reshape(2, -1, KV_HEADS, DIM)[:, :length]
            new = slice(int(self.queries[row]), int(self.queries[row + 1]))
            start = length - (new.stop - new.start)
            out[new] = attended(q[new], keys, values, start, window=0, softcap=0.0, sinks=None).to(q.dtype)
        return out


class DecodeWrapper(Wrapper):
    """`BatchDecodeWithPagedKVCacheWrapper`."""

    def plan(
        self, indptr: torch.Tensor, indices: torch.Tensor, last: torch.Tensor, *shape: int, **options: Any
    ) -> None:
        assert options == {"q_data_type": torch.float32, "kv_data_type": torch.float32}
        self._plan(torch.arange(len(indptr), dtype=torch.int32), indptr, indices, last, *shape)


class PrefillWrapper(Wrapper):
    """`BatchPrefillWithPagedKVCacheWrapper`."""

    def plan(self, *args: Any, **options: Any) -> None:
        assert options == {"causal": True, "q_data_type": torch.float32, "kv_data_type": torch.float32}
        self._plan(*args)


class Library:
    """The module."""

    def __init__(self) -> None:
        self.made: list[Wrapper] = []

    def BatchDecodeWithPagedKVCacheWrapper(self, *args: Any, **options: Any) -> Wrapper:
        self.made.append(DecodeWrapper(*args, **options))
        return self.made[-1]

    def BatchPrefillWithPagedKVCacheWrapper(self, *args: Any, **options: Any) -> Wrapper:
        self.made.append(PrefillWrapper(*args, **options))
        return self.made[-1]


def pool_of(seed: int) -> KVPool:
    """Two layers and 12 pages, filled with KV from a seed."""
    group = attention_group(
        num_layers=2, page_tokens=PAGE, num_kv_heads=KV_HEADS, head_dim=DIM, dtype="float32",
    )  # fmt: skip
    pool = KVPool(group, 12, CPU)
    pool.pages.copy_(torch.randn(pool.pages.shape, generator=torch.Generator().manual_seed(seed)))
    return pool


def batch_of(spans: list[tuple[int, int]]) -> ForwardBatch:
    """Rows of `(start, end)`, on pages 0, 1, ... in turn; lines of the page table end in nonsense."""
    starts, ends = (np.array(x, dtype=np.int64) for x in zip(*spans, strict=True))
    counts = -(-ends // PAGE)
    pages = np.full((len(spans), int(counts.max()) + 1), 99, dtype=np.int32)
    firsts = np.cumsum(counts) - counts
    for row, (first, count) in enumerate(zip(firsts, counts, strict=True)):
        pages[row, :count] = np.arange(first, first + count)
    offsets = np.cumsum(ends - starts) - (ends - starts)
    where = [(pages[row, p // PAGE], p % PAGE, p) for row, (s, e) in enumerate(spans) for p in range(s, e)]
    write_pages, slots, positions = (torch.tensor(x, dtype=torch.int64) for x in zip(*where, strict=True))
    host = HostRows(starts=starts, ends=ends, offsets=offsets, prompts=np.zeros_like(starts), pages=pages)
    return ForwardBatch(torch.stack((positions, positions, write_pages, slots)), torch.arange(len(spans)), host)


def heads_of(batch: ForwardBatch) -> Heads:
    """Random projections for the batch."""
    cos, sin = Rotary(RopeSpec(theta=100.0), DIM, torch.float32, CPU).tables(batch.positions)
    qkv = torch.randn(len(batch.positions), HEADS + 2 * KV_HEADS, DIM, generator=torch.Generator().manual_seed(7))
    return Heads(qkv, HEADS, KV_HEADS, None, None, cos, sin)


@pytest.mark.parametrize(
    ("spans", "wrapper"), [([(3, 4), (8, 9)], 0), ([(0, 6)], 1), ([(5, 6), (2, 11), (0, 1), (7, 8)], 1)]
)
def test_a_step_is_planned_once_and_attends_as_torch_does(spans: list[tuple[int, int]], wrapper: int) -> None:
    batch = batch_of(spans)
    library = Library()
    step = FlashInferAttention(mine := pool_of(1), HEADS, CPU, library).begin(batch)
    reference = TorchAttention(theirs := pool_of(1), HEADS, CPU).begin(batch)
    for layer in range(2):
        got, expected = (one.attend(layer, heads_of(batch)) for one in (step, reference))
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(mine.pages, theirs.pages)
    assert [made.plans for made in library.made] == [int(wrapper == 0), int(wrapper == 1)]


def test_a_captured_step_reads_buffers_that_stay() -> None:
    library = Library()
    backend = FlashInferAttention(pool_of(1), HEADS, CPU, library)
    batch = batch_of([(3, 4), (8, 9)])
    captured = backend.capturable(2, 5, batch.write_pages, batch.write_slots)
    wrapper = library.made[-1]
    buffers = (wrapper.indptr, wrapper.indices, wrapper.last)
    assert wrapper.graph and [len(x) for x in buffers] == [3, 10, 2]
    for spans in ([(3, 4), (8, 9)], [(4, 5), (9, 10)]):
        batch = batch_of(spans)
        captured.filling(batch.host)
        expected = TorchAttention(pool_of(1), HEADS, CPU).begin(batch).attend(1, heads_of(batch))
        fresh = FlashInferAttention(pool_of(1), HEADS, CPU, Library())
        again = fresh.capturable(2, 5, batch.write_pages, batch.write_slots)
        again.filling(batch.host)
        torch.testing.assert_close(again.attend(1, heads_of(batch)), expected, atol=1e-5, rtol=1e-5)
        assert all(a is b for a, b in zip(buffers, (wrapper.indptr, wrapper.indices, wrapper.last), strict=True))
    assert wrapper.plans == 2


def test_it_is_tried_out_by_both_kinds_of_kernels() -> None:
    library = Library()
    FlashInferAttention(pool_of(1), HEADS, CPU, library).try_out()
    assert [made.plans for made in library.made] == [1, 1]


def test_what_it_has_no_kernels_for_is_said() -> None:
    assert cannot_run(128, torch.bfloat16) is None
    assert "float32" in str(cannot_run(128, torch.float32))
    assert "heads of 80" in str(cannot_run(80, torch.float16))
