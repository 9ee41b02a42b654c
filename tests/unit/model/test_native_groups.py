"""Several kinds of heads in one program of the CPU kernels: shapes, pools and page tables of their own; gates."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from pdserve.model.forward_batch import ForwardBatch, IntArray
from pdserve.model.native.program import Program
from pdserve.model.native.resources import HeadShape, Threads
from tests.unit.model.native_kit import attended, batch_of, fill_known, needs_kernels, rotated
from tests.unit.model.native_programs import begin, levels, poison, program, put, relative, taken

pytestmark = needs_kernels
PAGE_TOKENS, WINDOW = 16, 40
ROWS = [(0, 90), (300, 301), (17, 60), (130, 131), (0, 1)]


def of_window(batch: ForwardBatch, num_pages: int) -> tuple[ForwardBatch, ForwardBatch]:
    """`batch` with a page table for the window, and the batch as the layers with a window see it.

    The table's entries behind the window name a page that does not exist.
    """
    host = batch.host
    own = np.random.default_rng(1).permutation(num_pages)[: host.pages.max() + 1]
    table = np.where(host.pages < len(own), own[np.minimum(host.pages, len(own) - 1)], host.pages).astype(np.int32)
    seen = table.copy()
    for row, start in enumerate(host.starts.tolist()):
        seen[row, : max(0, start - WINDOW + 1) // PAGE_TOKENS] = num_pages + 1000
    row_of: IntArray = np.repeat(np.arange(len(host.starts)), host.ends - host.starts)
    columns = batch.columns.clone()
    columns[2] = torch.from_numpy(table[row_of, batch.positions.numpy() // PAGE_TOKENS].astype(np.int64))
    inside = dataclasses.replace(batch, columns=columns, host=dataclasses.replace(host, pages=table))
    return dataclasses.replace(batch, host=dataclasses.replace(host, window=seen)), inside


@levels
@pytest.mark.parametrize("threads", [1, 3])
def test_heads_of_two_shapes(level: str, threads: int) -> None:
    """Full attention with heads of 64 and partial rotary embeddings; a window with heads of 32 and other angles."""
    known, num_pages = batch_of(ROWS, PAGE_TOKENS)
    batch, inside = of_window(known, num_pages)
    tokens = batch.num_tokens
    p = Program(Threads(threads), level)
    checks = []
    shapes = (HeadShape(2, 4, 2, PAGE_TOKENS, 64), HeadShape(3, 6, 1, PAGE_TOKENS, 32, of_window=True))
    for shape, seen, half, window in zip(shapes, (batch, inside), (8, 16), (0, WINDOW), strict=True):
        kv = torch.full(
            (num_pages, shape.layers, 2, shape.num_kv_heads, PAGE_TOKENS, shape.dim), torch.nan, dtype=torch.bfloat16
        )
        fill_known(kv, seen, PAGE_TOKENS)
        if window:
            hide_behind_window(kv, seen)
        number = p.add_heads(shape, kv)
        x = torch.randn(tokens, shape.num_heads + 2 * shape.num_kv_heads, shape.dim)
        inverse = 1e4 ** (-torch.arange(half) / half)
        qkv, out = p.buffer(x[0].numel() + 7), p.buffer(shape.num_heads * shape.dim)
        p.angles(inverse, 1.0, heads=number)
        p.place(qkv, 1, None, None, 0.0, heads=number)
        p.attend(1, out, window=window, heads=number)
        checks.append((shape, seen, half, window, kv, x, inverse, qkv, out))
    p.reserve(tokens + 1, 0)
    p.begin(batch)
    for *_, x, _, qkv, out in checks:
        put(p, qkv, torch.nn.functional.pad(x.flatten(1), (0, 7), value=torch.nan))
        poison(p, out, tokens)
    p.run(0, p.num_ops)
    for shape, seen, half, window, kv, x, inverse, _, out in checks:
        turned = torch.cat((rotated(x[..., : 2 * half], batch.positions, inverse), x[..., 2 * half :]), -1)
        q, k = turned[:, : shape.num_heads], turned[:, shape.num_heads : -shape.num_kv_heads]
        written = kv[seen.write_pages, 1, :, :, seen.write_slots]
        wanted = torch.stack((k, x[:, -shape.num_kv_heads :]), 1).bfloat16()
        torch.testing.assert_close(written, wanted, atol=0.04, rtol=0.01)
        mixed = attended(q, kv, seen, PAGE_TOKENS, layer=1, window=window, softcap=0.0, sinks=None)
        torch.testing.assert_close(taken(p, out, tokens), mixed, atol=0.03, rtol=0.02)


def hide_behind_window(kv: Tensor, batch: ForwardBatch) -> None:
    """NaN in the keys and values that no query of a row sees."""
    for row, start in enumerate(batch.host.starts.tolist()):
        hidden = np.arange(max(0, start - WINDOW + 1))
        pages = torch.from_numpy(batch.host.pages[row, hidden // PAGE_TOKENS].astype(np.int64))
        kv[pages, :, :, :, torch.from_numpy(hidden % PAGE_TOKENS)] = torch.nan


@levels
def test_one_call_decodes_with_all_tables(level: str) -> None:
    """`decode` reads pages and window pages of the lines that are named, as `begin` and `run` do."""
    num_lines, vocab, dim = 5, 32, 16
    generator = np.random.default_rng(0)
    facts = np.array([[3, 0, 4], [100, 5, 33]])
    num_pages = 60
    pages, window = (generator.permutation(num_pages)[:35].reshape(num_lines, 7).astype(np.int32) for _ in range(2))
    tokens = generator.integers(0, vocab, (num_lines, 112)).astype(np.int32)
    shapes = (HeadShape(1, 2, 1, PAGE_TOKENS, dim), HeadShape(1, 2, 1, PAGE_TOKENS, dim, of_window=True))
    pools = [torch.randn(num_pages, 1, 2, 1, PAGE_TOKENS, dim).bfloat16() for _ in shapes]
    embedding = torch.randn(vocab, 2 * dim + 2 * dim).bfloat16()

    def made(copies: list[Tensor]) -> tuple[Program, list[Tensor]]:
        p = Program(Threads(2), level)
        x, mixed = p.buffer(4 * dim), p.buffer(2 * dim)
        logits, chosen = p.buffer(2 * dim, of_samples=True), p.buffer(1, torch.int64, of_samples=True)
        for shape, kv in zip(shapes, copies, strict=True):
            number = p.add_heads(shape, kv)
            p.angles(torch.ones(dim // 2), 1.0, heads=number)
        p.embed(x, embedding)
        for number in range(2):
            p.place(x, 0, None, None, 0.0, heads=number)
            p.attend(0, mixed, window=WINDOW if number else 0, heads=number)
        p.select(mixed, logits)
        p.argmax(logits, chosen)
        return p, [chosen, logits]

    first, second = ([pool.clone() for pool in pools] for _ in range(2))
    p, (chosen, logits) = made(first)
    got = p.decode(facts, tokens, pages, p.num_ops, chosen, window=window)
    assert tokens[facts[0], facts[1] + 1].tolist() == got
    rows = [(position, position + 1) for position in facts[1].tolist()]
    batch, _ = batch_of(rows, PAGE_TOKENS)
    lines, positions = facts
    columns = torch.from_numpy(
        np.stack((tokens[lines, positions], positions, pages[lines, positions // 16], positions % 16)).astype(np.int64)
    )
    host = dataclasses.replace(batch.host, pages=pages[lines], window=window[lines])
    other, (_, wanted) = made(second)
    other.begin(dataclasses.replace(batch, columns=columns, host=host))
    other.run(0, other.num_ops)
    assert torch.equal(p.view(logits, 3), other.view(wanted, 3))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@levels
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("width", [3, 64, 100])
def test_sigmoid_gates(level: str, rows: int, width: int) -> None:
    """Gates of all columns, in place, and one gate of a row, added."""
    p = program(level, 3)
    x, gates, one, out = (p.buffer(size) for size in (width, width + 5, 1, width))
    p.sigmoid(x, one, out, add=True)
    p.sigmoid(x, gates, x, first=5)
    begin(p, rows)
    values, of_all, of_row, before = (torch.randn(rows, size) * 3 for size in (width, width + 5, 1, width))
    for buffer, given in ((x, values), (gates, of_all), (one, of_row), (out, before)):
        put(p, buffer, given)
    p.run(0, p.num_ops)
    assert relative(taken(p, out, rows), before + values * of_row.sigmoid()) < 1e-6
    assert relative(taken(p, x, rows), values * of_all[:, 5:].sigmoid()) < 1e-6
