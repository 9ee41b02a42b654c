"""Keys and values in 8-bit formats: codes, and attention over pages of them by torch, the CPU kernels and Triton.

The reference is attention over the values that the codes stand for.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pdserve.memory.dtypes import EIGHT_BIT, row_bytes, row_items
from pdserve.memory.layout import attention_group
from pdserve.model.attention.batch_invariant import BatchInvariantAttention
from pdserve.model.attention.interface import AttentionBackend, Heads
from pdserve.model.attention.kv_rows import decode_rows, encode_rows
from pdserve.model.attention.page_gather import KVPool
from pdserve.model.attention.torch_sdpa import TorchAttention
from pdserve.model.forward_batch import ForwardBatch
from pdserve.model.native.program import HeadShape, Program, Threads
from pdserve.model.params import torch_dtype
from tests.unit.model.native_kit import LEVELS_HERE, attended, batch_of, needs_kernels, part_of

CPU = torch.device("cpu")
formats = pytest.mark.parametrize("kv_dtype", EIGHT_BIT)
E4M3 = torch.arange(256, dtype=torch.uint8)
SPANS = [(0, 1), (0, 20), (63, 64), (17, 30), (200, 201), (130, 150)]
Shape = tuple[int, int, int]


def spread(*shape: int) -> Tensor:
    """Numbers of many magnitudes, some beyond the range of fp8_e4m3, in bfloat16."""
    size = torch.exp2(torch.rand(*shape) * 22 - 12)
    return (size * torch.randn(*shape)).bfloat16()


def test_all_codes_of_fp8_stand_for_what_torch_says() -> None:
    values = decode_rows(E4M3[None], "fp8_e4m3", 256, torch.float32)[0]
    assert torch.equal(values.nan_to_num(0.0), E4M3.view(torch.float8_e4m3fn).float().nan_to_num(0.0))
    known = values.isfinite()
    assert torch.equal(encode_rows(values[known], "fp8_e4m3"), E4M3[known])
    assert decode_rows(encode_rows(torch.tensor([1e9, -450.0]), "fp8_e4m3"), "fp8_e4m3", 2, torch.float32).tolist() == [
        448.0, -448.0,
    ]  # fmt: skip


@pytest.mark.parametrize("width", [1, 4, 6, 64])
def test_int8_rows_are_within_half_a_step_of_their_own_scale(width: int) -> None:
    values = spread(50, 3, width).float()
    values[0] = 0.0
    rows = encode_rows(values, "int8")
    assert rows.shape == (50, 3, row_items(width, "int8")) and row_items(width, "int8") % 4 == 0
    step = values.abs().amax(-1, keepdim=True) / 127
    found = decode_rows(rows, "int8", width, torch.float32)
    assert ((found - values).abs() <= 0.501 * step).all() and not found[0].any()
    assert torch.equal(encode_rows(values[7, 1], "int8"), rows[7, 1]), "a row alone"
    assert not decode_rows(torch.zeros_like(rows), "int8", width, torch.float32).any()


@formats
def test_pages_of_codes_take_about_half(kv_dtype: str) -> None:
    shape: dict[str, Any] = {"num_layers": 2, "page_tokens": 16, "num_kv_heads": 3, "head_dim": 64}
    wide, narrow = (attention_group(**shape, dtype=dtype) for dtype in ("bfloat16", kv_dtype))
    assert narrow.page_bytes == 2 * 2 * 3 * 16 * row_bytes(64, kv_dtype)
    assert narrow.page_bytes / wide.page_bytes == (0.5 if kv_dtype == "fp8_e4m3" else 68 / 128)
    assert narrow.head_dim == 64 and narrow.fields()["head_dim"] == 64
    assert narrow.fields() | {"kv_cache_dtype": "bfloat16"} == wide.fields()


def filled_pool(
    kv_dtype: str, batch: ForwardBatch, num_pages: int, page: int, shape: Shape, dtype: torch.dtype
) -> tuple[KVPool, Tensor]:
    """A pool of two layers that holds random tokens before each row's first new one, other bytes set; and its values.

    The values are `[num_pages, 2, 2, kv_heads, page, dim]`.
    """
    _, kv_heads, dim = shape
    group = attention_group(num_layers=2, page_tokens=page, num_kv_heads=kv_heads, head_dim=dim, dtype=kv_dtype)
    pool = KVPool(group, num_pages, CPU)
    pool.pages_as_bytes.fill_(255)
    values = torch.zeros(num_pages, 2, 2, kv_heads, page, dim, dtype=dtype)
    for line, start in enumerate(batch.host.starts.tolist()):
        tokens = np.arange(start)
        pages = torch.from_numpy(batch.host.pages[line, tokens // page].astype(np.int64))
        slots = torch.from_numpy(tokens % page)
        rows = encode_rows(torch.randn(start, 2, 2, kv_heads, dim), kv_dtype)
        pool.pages[pages, :, :, :, slots] = rows
        values[pages, :, :, :, slots] = decode_rows(rows, kv_dtype, dim, dtype)
    return pool, values


def put(values: Tensor, batch: ForwardBatch, layer: int, k: Tensor, v: Tensor, kv_dtype: str) -> None:
    """Write what the codes of new keys and values stand for."""
    for plane, new in enumerate((k, v)):
        kept = decode_rows(encode_rows(new, kv_dtype), kv_dtype, new.shape[-1], values.dtype)
        values[batch.write_pages, layer, plane, :, batch.write_slots] = kept


@formats
@pytest.mark.parametrize("make", [TorchAttention, BatchInvariantAttention])
@pytest.mark.parametrize("page", [5, 16])
def test_torch_attends_to_the_values_of_the_codes(
    kv_dtype: str, make: type[TorchAttention | BatchInvariantAttention], page: int
) -> None:
    torch.manual_seed(0)
    shape = num_heads, kv_heads, dim = 4, 2, 16
    batch, num_pages = batch_of(SPANS, page)
    pool, values = filled_pool(kv_dtype, batch, num_pages, page, shape, torch.float32)
    qkv = torch.randn(len(batch.positions), num_heads + 2 * kv_heads, dim)
    cos, sin = torch.ones(len(qkv), 1, dim), torch.zeros(len(qkv), 1, dim)
    backend: AttentionBackend = make(pool, num_heads, CPU)
    got = backend.begin(batch).attend(1, Heads(qkv, num_heads, kv_heads, None, None, cos, sin))
    put(values, batch, 1, qkv[:, num_heads:-kv_heads], qkv[:, -kv_heads:], kv_dtype)
    wanted = attended(qkv[:, :num_heads], values, batch, page, layer=1, window=0, softcap=0.0, sinks=None)
    torch.testing.assert_close(got, wanted, atol=2e-5, rtol=2e-5)


@needs_kernels
@formats
@pytest.mark.parametrize("level", LEVELS_HERE)
@pytest.mark.parametrize(
    ("shape", "page", "window"), [((9, 3, 64), 64, 0), ((6, 2, 80), 16, 30), ((3, 1, 34), 5, 0), ((2, 1, 512), 16, 0)]
)
def test_the_kernels_write_torchs_codes_and_attend_to_their_values(
    level: str, kv_dtype: str, shape: Shape, page: int, window: int
) -> None:
    torch.manual_seed(0)
    num_heads, kv_heads, dim = shape
    batch, num_pages = batch_of(SPANS, page)
    pool, values = filled_pool(kv_dtype, batch, num_pages, page, shape, torch.bfloat16)
    tokens = len(batch.positions)
    x = torch.randn(tokens, num_heads + 2 * kv_heads, dim)
    x[0, num_heads:] = spread(2 * kv_heads, dim)
    p = Program(Threads(2), level, HeadShape(2, num_heads, kv_heads, page, dim, kv_dtype=kv_dtype), pool.pages)
    qkv, out = p.buffer(x[0].numel()), p.buffer(num_heads * dim)
    p.angles(torch.zeros(dim // 2), 1.0)
    p.place(qkv, 1, None, None, 0.0)
    p.attend(1, out, window=window)
    p.reserve(tokens, 0)
    p.begin(batch)
    p.view(qkv, tokens).copy_(x.flatten(1))
    p.run(0, p.num_ops)
    for plane, new in enumerate((x[:, num_heads:-kv_heads], x[:, -kv_heads:])):
        written = pool.pages[batch.write_pages, 1, plane, :, batch.write_slots]
        assert torch.equal(written, encode_rows(new, kv_dtype))
    put(values, batch, 1, x[:, num_heads:-kv_heads], x[:, -kv_heads:], kv_dtype)
    queries = x[:, :num_heads]
    wanted = attended(queries, values, batch, page, layer=1, window=window, softcap=0.0, sinks=None)[1:]
    found = p.view(out, tokens)[1:]
    assert float((found - wanted).norm() / wanted.norm()) < 0.01


@needs_kernels
@formats
def test_chunks_and_threads_keep_the_bits(kv_dtype: str) -> None:
    shape = num_heads, kv_heads, dim = 4, 2, 64
    total, results = 300, []
    x = torch.randn(total, num_heads + 2 * kv_heads, dim)
    for threads, page, cuts in ((1, 64, (0, total)), (2, 16, (0, 1, 130, 131, total))):
        whole, num_pages = batch_of([(0, total)], page)
        pool, _ = filled_pool(kv_dtype, whole, num_pages, page, shape, torch.bfloat16)
        p = Program(
            Threads(threads),
            LEVELS_HERE[-1],
            HeadShape(2, num_heads, kv_heads, page, dim, kv_dtype=kv_dtype),
            pool.pages,
        )
        qkv, out = p.buffer(x[0].numel()), p.buffer(num_heads * dim)
        p.angles(1e4 ** (-torch.arange(0, dim, 2) / dim), 1.0)
        p.place(qkv, 0, None, None, 0.0)
        p.attend(0, out)
        found = []
        for start, end in itertools.pairwise(cuts):
            p.begin(part_of(whole, start, end, prompt=total))
            p.view(qkv, end - start).copy_(x[start:end].flatten(1))
            p.run(0, p.num_ops)
            found.append(p.view(out, end - start).clone())
        results.append(torch.cat(found))
    assert torch.equal(*results)


@formats
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_triton_writes_torchs_codes_and_attends_to_their_values(kv_dtype: str, dtype: torch.dtype) -> None:
    pytest.importorskip("tests.unit.model.triton_kit")
    from pdserve.model.attention.triton_pages import TritonAttention
    from tests.unit.model.triton_kit import DEVICE

    torch.manual_seed(0)
    shape = num_heads, kv_heads, dim = 4, 2, 24
    page, device = 16, torch.device(DEVICE)
    for spans in ([(0, 9), (40, 70), (33, 34)], [(20, 21), (150, 151), (0, 1)]):
        batch, num_pages = batch_of(spans, page)
        pool, values = filled_pool(kv_dtype, batch, num_pages, page, shape, dtype)
        on_device = KVPool(pool.group, num_pages, device)
        on_device.pages_as_bytes.copy_(pool.pages_as_bytes)
        qkv = torch.randn(len(batch.positions), num_heads + 2 * kv_heads, dim).to(dtype)
        qkv[0, num_heads:] = spread(2 * kv_heads, dim).to(dtype)
        cos, sin = (x.to(device, dtype) for x in (torch.ones(len(qkv), 1, dim), torch.zeros(len(qkv), 1, dim)))
        moved = ForwardBatch(batch.columns.to(device), batch.sample_index.to(device), batch.host)
        step = TritonAttention(on_device, num_heads, device).begin(moved)
        got = step.attend(1, Heads(qkv.to(device), num_heads, kv_heads, None, None, cos, sin)).cpu()
        k, v = qkv[:, num_heads:-kv_heads], qkv[:, -kv_heads:]
        for plane, new in enumerate((k, v)):
            written = on_device.pages.cpu()[batch.write_pages, 1, plane, :, batch.write_slots]
            assert torch.equal(written, encode_rows(new, kv_dtype))
        put(values, batch, 1, k, v, kv_dtype)
        wanted = attended(qkv[:, :num_heads].float(), values, batch, page, layer=1, window=0, softcap=0.0, sinks=None)
        tolerance = 2e-5 if dtype == torch.float32 else 4e-3
        torch.testing.assert_close(got[1:].float(), wanted[1:], atol=tolerance, rtol=tolerance)


def test_codes_have_dtypes_of_their_own() -> None:
    assert [torch_dtype(name) for name in EIGHT_BIT] == [torch.uint8, torch.int8]
