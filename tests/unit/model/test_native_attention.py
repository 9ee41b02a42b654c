"""Attention by the CPU kernels against torch: heads, page sizes, lengths, masks, threads, every level this CPU can run.

What is not of a row in its pages is NaN, and other memory that must not be read is poisoned: see `native_programs`.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pdserve.model.native.program import Program
from pdserve.model.native.resources import MAX_HEAD_DIM, HeadShape, Threads
from tests.unit.model.native_kit import (
    attended,
    batch_of,
    fill_known,
    needs_kernels,
    part_of,
    rms,
    rotated,
    rows_of_batch,
)
from tests.unit.model.native_programs import FEW, fenced, levels, poison, put, relative, taken

pytestmark = needs_kernels
HEADS = [
    (9, 3, 64), (4, 2, 16), (8, 1, 32), (6, 2, 80), (2, 2, 128), (3, 1, 34), (4, 2, 256), (2, 1, MAX_HEAD_DIM)
]  # fmt: skip
"""Query heads, KV heads and their dim."""


@levels
@FEW
@given(
    heads=st.sampled_from(HEADS),
    page_tokens=st.sampled_from([1, 5, 8, 16, 48, 64, 128]),
    rows=st.lists(
        st.sampled_from([(0, 1), (0, 2), (0, 40), (17, 18), (255, 256), (300, 301), (130, 150), (1, 90)]),
        min_size=1,
        max_size=5,
    ),
    qk_norm=st.booleans(),
    window=st.sampled_from([0, 0, 7, 130]),
    softcap=st.sampled_from([0.0, 0.0, 5.0]),
    with_sinks=st.booleans(),
    threads=st.integers(1, 3),
)
def test_attention(
    level: str,
    heads: tuple[int, int, int],
    page_tokens: int,
    rows: list[tuple[int, int]],
    qk_norm: bool,
    window: int,
    softcap: float,
    with_sinks: bool,
    threads: int,
) -> None:
    """Heads to their places, then attention, in the second of two layers; prompts, chunks and decode rows at once."""
    num_heads, num_kv_heads, dim = heads
    torch.manual_seed(len(rows))
    batch, num_pages = batch_of(rows, page_tokens)
    tokens = len(batch.positions)
    kv = torch.full((num_pages, 2, 2, num_kv_heads, page_tokens, dim), float("nan"), dtype=torch.bfloat16)
    fill_known(kv, batch, page_tokens)
    x = torch.randn(tokens, num_heads + 2 * num_kv_heads, dim)
    q_norm, k_norm = (torch.rand(dim) + 0.5, torch.rand(dim) + 0.5) if qk_norm else (None, None)
    inverse = 1e4 ** (-torch.arange(0, dim, 2) / dim)
    sinks = torch.randn(num_heads) if with_sinks else None

    mine = kv.clone()
    p = Program(Threads(threads), level, HeadShape(2, num_heads, num_kv_heads, page_tokens, dim), mine)
    qkv, out = p.buffer(x[0].numel()), p.buffer(num_heads * dim)
    p.angles(inverse, 1.0)
    p.place(qkv, 1, *(None if norm is None else fenced(norm) for norm in (q_norm, k_norm)), 1e-6)
    p.attend(1, out, window=window, softcap=softcap, sinks=None if sinks is None else fenced(sinks))
    p.reserve(tokens + 1, 0)
    p.begin(batch)
    put(p, qkv, x.flatten(1))
    poison(p, out, tokens)
    p.run(0, p.num_ops)

    q = rotated(rms(x[:, :num_heads], q_norm, 1e-6), batch.positions, inverse)
    k = rotated(rms(x[:, num_heads:-num_kv_heads], k_norm, 1e-6), batch.positions, inverse)
    kv[batch.write_pages, 1, 0, :, batch.write_slots] = k.bfloat16()
    kv[batch.write_pages, 1, 1, :, batch.write_slots] = x[:, -num_kv_heads:].bfloat16()
    torch.testing.assert_close(mine, kv, atol=0.04, rtol=0.01, equal_nan=True)
    wanted = attended(q, kv, batch, page_tokens, layer=1, window=window, softcap=softcap, sinks=sinks)
    torch.testing.assert_close(taken(p, out, tokens), wanted, atol=0.03, rtol=0.02)


@levels
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "dim"),
    [(4, 1, 64), (9, 3, 64), (5, 5, 64), (8, 4, 128), (16, 8, 64), (4, 2, 256), (3, 1, 512)],
)
@pytest.mark.parametrize("page_tokens", [16, 5, 64])
def test_long_rows_are_shared_by_the_threads(
    level: str, threads: int, num_heads: int, num_kv_heads: int, dim: int, page_tokens: int
) -> None:
    """Queries over thousands of keys, whose pieces are merged, beside shorter ones; of one, of some or of all heads;
    of all keys or a window of them, plain, and with soft caps and sinks, which each row has once, however it was cut.
    Twice in a step, as by two layers, for counters that go on from one to the next."""
    rows = [(at, at + 1) for at in (3000, 2100, 511, 510, 700, 40)]
    batch, num_pages = batch_of(rows, page_tokens)
    kv = torch.full((num_pages, 1, 2, num_kv_heads, page_tokens, dim), float("nan"), dtype=torch.bfloat16)
    fill_known(kv, batch, page_tokens)
    p = Program(Threads(threads), level, HeadShape(1, num_heads, num_kv_heads, page_tokens, dim), kv)
    qkv, outs = p.buffer((num_heads + 2 * num_kv_heads) * dim), [p.buffer(num_heads * dim) for _ in range(2)]
    p.angles(torch.zeros(dim // 2), 1.0)
    p.place(qkv, 0, None, None, 0.0)
    sinks = torch.randn(num_heads) + 6.0  # so that they weigh as much as hundreds of keys
    for window, softcap, own in ((0, 0.0, None), (600, 0.0, None), (0, 2.0, sinks), (600, 2.0, sinks)):
        attend = p.num_ops
        for out in outs:
            p.attend(0, out, window=window, softcap=softcap, sinks=None if own is None else fenced(own))
        x = torch.randn(len(rows), num_heads + 2 * num_kv_heads, dim)
        p.reserve(len(rows) + 1, 0)
        p.begin(batch)
        put(p, qkv, x.flatten(1))
        for out in outs:
            poison(p, out, len(rows))
        p.run(0, 2)
        p.run(attend, p.num_ops)
        q = x[:, :num_heads]
        wanted = attended(q, kv, batch, page_tokens, layer=0, window=window, softcap=softcap, sinks=own)
        for out in outs:
            for got, row in zip(taken(p, out, len(rows)), wanted, strict=True):
                assert relative(got, row) < 0.01


@levels
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "dim"), [(10, 5, 64), (5, 5, 128), (64, 4, 32), (15, 3, 96), (7, 1, 40)]
)
@pytest.mark.parametrize("threads", [1, 2])
def test_query_heads_share_what_is_loaded(
    level: str, threads: int, num_heads: int, num_kv_heads: int, dim: int
) -> None:
    """More heads than are taken together, so that the last ones are fewer; a prompt among rows that decode."""
    page_tokens, rows = 16, [(at, at + 1) for at in (0, 15, 16, 127, 128, 260, 400)] + [(9, 30)]
    batch, num_pages = batch_of(rows, page_tokens)
    tokens = len(batch.positions)
    kv = torch.full((num_pages, 1, 2, num_kv_heads, page_tokens, dim), float("nan"), dtype=torch.bfloat16)
    fill_known(kv, batch, page_tokens)
    p = Program(Threads(threads), level, HeadShape(1, num_heads, num_kv_heads, page_tokens, dim), kv)
    x = torch.randn(tokens, num_heads + 2 * num_kv_heads, dim)
    qkv, out = p.buffer(x[0].numel()), p.buffer(num_heads * dim)
    p.angles(torch.zeros(dim // 2), 1.0)
    p.place(qkv, 0, None, None, 0.0)
    for window in (0, 100):
        p.attend(0, out, window=window)
        p.reserve(tokens + 1, 0)
        p.begin(batch)
        put(p, qkv, x.flatten(1))
        poison(p, out, tokens)
        p.run(0, p.num_ops)
        wanted = attended(x[:, :num_heads], kv, batch, page_tokens, layer=0, window=window, softcap=0.0, sinks=None)
        torch.testing.assert_close(taken(p, out, tokens), wanted, atol=0.01, rtol=0.02)


@levels
@pytest.mark.parametrize("window", [0, 100, 128])
@pytest.mark.parametrize("kind", ["prompt", "decoded"])
def test_chunks_threads_and_pages_leave_every_bit_as_it_is(level: str, window: int, kind: str) -> None:
    """Queries of one row, all in one step and in several, as tokens of a prompt or as decoded ones."""
    num_heads, num_kv_heads, dim, total = 6, 2, 80, 420
    x = torch.randn(total, num_heads + 2 * num_kv_heads, dim)
    results = []
    for threads, page_tokens, cuts in (
        (1, 64, (0, total)),
        (2, 16, (0, 1, 130, 300, 301, total)),
        (3, 5, (0, 70, total)),
    ):
        whole, num_pages = batch_of([(0, total)], page_tokens)
        kv = torch.full((num_pages, 1, 2, num_kv_heads, page_tokens, dim), float("nan"), dtype=torch.bfloat16)
        p = Program(Threads(threads), level, HeadShape(1, num_heads, num_kv_heads, page_tokens, dim), kv)
        qkv, out = p.buffer(x[0].numel()), p.buffer(num_heads * dim)
        p.angles(1e4 ** (-torch.arange(0, dim, 2) / dim), 1.0)
        p.place(qkv, 0, None, None, 0.0)
        p.attend(0, out, window=window)
        p.reserve(total + 1, 0)
        found = []
        for start, end in itertools.pairwise(cuts):
            batch = part_of(whole, start, end, prompt=total if kind == "prompt" else 0)
            p.begin(batch)
            put(p, qkv, x[start:end].flatten(1))
            poison(p, out, end - start)
            p.run(0, p.num_ops)
            found.append(taken(p, out, end - start).clone())
        results.append(torch.cat(found))
    assert all(torch.equal(result, results[0]) for result in results)


@levels
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "dim"), [(9, 3, 64), (64, 4, 32), (40, 2, 64), (8, 8, 128), (64, 1, 16)]
)
def test_keys_that_threads_share_leave_every_bit_as_it_is(
    level: str, num_heads: int, num_kv_heads: int, dim: int
) -> None:
    """One decoded row alone, cut as it suits so many threads, and among others: of all keys, or a window of them that
    begins anywhere; with soft caps and sinks. Thousands of keys have longer segments."""
    page_tokens, lengths = 16, (4500, 1300, 129, 700, 128, 2000, 300)
    whole, num_pages = batch_of([(length - 1, length) for length in lengths], page_tokens)
    kv = torch.full((num_pages, 1, 2, num_kv_heads, page_tokens, dim), float("nan"), dtype=torch.bfloat16)
    fill_known(kv, whole, page_tokens)
    x = torch.randn(len(lengths), num_heads + 2 * num_kv_heads, dim)
    sinks = torch.randn(num_heads) + 6.0
    for window, softcap in ((0, 0.0), (777, 0.0), (0, 2.0), (1000, 2.0)):
        results: list[list[torch.Tensor]] = [[] for _ in lengths]
        for threads in (1, 2, 3, 4, 8):
            p = Program(Threads(threads), level, HeadShape(1, num_heads, num_kv_heads, page_tokens, dim), kv)
            qkv, out = p.buffer(x[0].numel()), p.buffer(num_heads * dim)
            p.angles(torch.zeros(dim // 2), 1.0)
            p.place(qkv, 0, None, None, 0.0)
            p.attend(0, out, window=window, softcap=softcap, sinks=sinks if softcap else None)
            p.reserve(len(lengths) + 1, 0)
            for rows in ([0], [1], [0, 2], [1, 4, 3, 0], list(range(len(lengths)))):
                p.begin(rows_of_batch(whole, rows))
                put(p, qkv, x[rows].flatten(1))
                poison(p, out, len(rows))
                p.run(0, p.num_ops)
                for row, result in zip(rows, taken(p, out, len(rows)).clone(), strict=True):
                    results[row].append(result)
        assert len(results[0]) == 20
        for found in results:
            assert all(torch.equal(one, found[0]) for one in found)
