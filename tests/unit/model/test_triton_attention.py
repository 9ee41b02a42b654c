"""Triton's attention kernels beside the definition, over shapes, page sizes, lengths and masks, in pools of NaN."""

from __future__ import annotations

import dataclasses
from unittest import mock

import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from pdserve.model.gpu.decode_attention import (
    AttentionMask,
    AttentionTiling,
    FreshKV,
    attend_decode,
    counters,
    num_parts,
)
from pdserve.model.gpu.extend_attention import attend_extend, tile_tokens
from pdserve.model.gpu.fused_qk_norm_rope_cache import angle_tables, place_heads
from tests.unit.model.triton_kit import DEVICE, attended, behind_window, paged

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}
HEADS = st.sampled_from([(1, 1), (2, 1), (4, 2), (3, 3), (6, 2), (7, 1)])
DIMS = st.sampled_from([8, 16, 24, 64])
PAGES = st.sampled_from([1, 3, 16, 64])
MASKS = st.builds(AttentionMask, window=st.sampled_from([0, 0, 1, 7, 40]), softcap=st.sampled_from([0.0, 0.0, 5.0]))
DTYPES = st.sampled_from([torch.float32, torch.float16])
QUICK = settings(max_examples=10, deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate))


def close(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Equal up to rounding, and never NaN."""
    torch.testing.assert_close(got.double().cpu(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@QUICK
@given(
    lengths=st.lists(st.integers(1, 130), min_size=1, max_size=3),
    heads=HEADS, dim=DIMS, page=PAGES, mask=MASKS, dtype=DTYPES, parts=st.sampled_from([1, 1, 2, 8]),
    with_sinks=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_decode_attention_is_the_definition(
    lengths: list[int], heads: tuple[int, int], dim: int, page: int, mask: AttentionMask, dtype: torch.dtype,
    parts: int, with_sinks: bool, seed: int,
) -> None:  # fmt: skip
    rows = paged(lengths, heads[1], dim, page, dtype, seed)
    if mask.window:
        behind_window(rows, [length - 1 for length in lengths], mask.window)
    q = torch.randn(len(lengths) + 1, heads[0], dim, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)
    sinks = torch.linspace(-2, 3, heads[0], device=DEVICE) if with_sinks else None
    tokens = torch.arange(len(lengths), 0, -1, dtype=torch.int32, device=DEVICE)
    out = torch.full_like(q, float("nan"))
    through = counters(len(lengths), heads[1], torch.device(DEVICE))
    attend_decode(
        q, out, rows.kv, rows.table, rows.ends, tokens, through, scale=dim**-0.5, parts=parts, mask=mask, sinks=sinks
    )  # fmt: skip
    assert not through.any(), "counters are as they were"
    assert out[0].isnan().all(), "a token that is no row's"
    for row, token in enumerate(tokens.tolist()):
        expected = attended(
            q[token : token + 1], rows.keys[row], rows.values[row], lengths[row] - 1,
            window=mask.window, softcap=mask.softcap, sinks=sinks,
        )  # fmt: skip
        close(out[token : token + 1], expected, dtype)


def test_parts_of_long_rows_are_added_up() -> None:
    lengths = [700, 3, 257]
    rows = paged(lengths, 1, 16, 16, torch.float32, 1)
    q = torch.randn(3, 2, 16, device=DEVICE)
    tokens = torch.arange(3, dtype=torch.int32, device=DEVICE)
    for parts in (1, 2, 8):
        out = torch.full_like(q, float("nan"))
        attend_decode(
            q,
            out,
            rows.kv,
            rows.table,
            rows.ends,
            tokens,
            counters(3, 1, torch.device(DEVICE)),
            scale=0.25,
            parts=parts,
        )
        for row in range(3):
            keys, values = rows.keys[row], rows.values[row]
            one = attended(q[row : row + 1], keys, values, lengths[row] - 1, window=0, softcap=0.0, sinks=None)
            close(out[row : row + 1], one, torch.float32)


@QUICK
@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=3),
    heads=HEADS, dim=DIMS, page=PAGES, mask=MASKS, dtype=DTYPES, parts=st.sampled_from([1, 2, 8]),
    with_norm=st.booleans(), offset=st.sampled_from([0.0, 1.0]), part=st.sampled_from([1, 1, 2, None]),
    has_gates=st.booleans(), keys=st.sampled_from([16, 64]), seed=st.integers(0, 99),
)  # fmt: skip
def test_attention_of_fresh_tokens_is_that_of_placed_ones(
    lengths: list[int], heads: tuple[int, int], dim: int, page: int, mask: AttentionMask, dtype: torch.dtype,
    parts: int, with_norm: bool, offset: float, part: int | None, has_gates: bool, keys: int, seed: int,
) -> None:  # fmt: skip
    """Norms, rotation of all, the first or no dimensions, and K and V in their pages, or nowhere, too."""
    generator = torch.Generator().manual_seed(seed)
    rows = paged(lengths, heads[1], dim, page, dtype, seed)
    num_rows, device = len(lengths), torch.device(DEVICE)
    num_queries = 2 * heads[0] if has_gates else heads[0]
    qkv = torch.randn(num_rows, num_queries + 2 * heads[1], dim, generator=generator).to(DEVICE, dtype)
    at = torch.tensor(lengths, device=DEVICE) - 1
    pages, slots = rows.table[torch.arange(num_rows, device=DEVICE), at // page].long(), at % page
    norms = [torch.linspace(low, 1.5, dim, device=DEVICE).to(dtype) if with_norm else None for low in (0.5, 1.0)]
    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None
    if part is not None:
        cos, sin = angle_tables(at, torch.linspace(1.0, 0.01, dim // part // 2, device=DEVICE), 1.0, dtype)
    fresh = FreshKV(qkv, pages, slots, cos, sin, norms[0], norms[1], 1e-6, offset, has_gates)
    through, tokens = counters(num_rows, heads[1], device), torch.arange(num_rows, dtype=torch.int32, device=DEVICE)
    theirs, mine = rows.kv.clone(), rows.kv.clone()
    q = place_heads(
        qkv, heads[0], theirs, pages, slots, cos, sin, norms[0], norms[1], 1e-6, offset, has_gates=has_gates
    )  # fmt: skip
    expected, got = torch.full_like(q, float("nan")), torch.full_like(q, float("nan"))
    scale = dim**-0.5
    attend_decode(q, expected, theirs, rows.table, rows.ends, tokens, through, scale=scale, parts=parts, mask=mask)
    with mock.patch.object(AttentionTiling, "of", return_value=AttentionTiling(keys=keys, warps=4)):
        attend_decode(fresh, got, mine, rows.table, rows.ends, tokens, through, scale=scale, parts=parts, mask=mask)
    close(got, expected.double().cpu(), dtype)
    close(mine.nan_to_num(7.0), theirs.double().nan_to_num(7.0).cpu(), dtype)
    nowhere = rows.kv.clone()
    fresh = dataclasses.replace(fresh, write_pages=torch.full_like(pages, -1))
    attend_decode(fresh, got, nowhere, rows.table, rows.ends, tokens, through, scale=scale, parts=parts, mask=mask)
    close(got, expected.double().cpu(), dtype)
    assert torch.equal(nowhere.nan_to_num(7.0), rows.kv.nan_to_num(7.0)) and not through.any()


def test_a_row_without_positions_gets_zeros() -> None:
    rows = paged([5], 1, 16, 4, torch.float32, 2)
    q = torch.randn(1, 2, 16, device=DEVICE)
    nothing = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    for parts in (1, 2):
        out = torch.full_like(q, float("nan"))
        attend_decode(
            q, out, rows.kv, rows.table, nothing, nothing, counters(1, 1, torch.device(DEVICE)), scale=0.25, parts=parts
        )
        assert (out == 0).all()


def test_parts_follow_rows_and_the_longest_context() -> None:
    device = torch.device("cpu")
    assert num_parts(1, 1, 100, device) == 1
    assert num_parts(1, 1, 100_000, device) == 16
    assert num_parts(256, 8, 100_000, device) == 1


@QUICK
@given(
    spans=st.lists(st.tuples(st.integers(0, 70), st.integers(1, 40)), min_size=1, max_size=2),
    heads=HEADS, dim=DIMS, page=PAGES, mask=MASKS, dtype=DTYPES, with_sinks=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_extend_attention_is_the_definition(
    spans: list[tuple[int, int]], heads: tuple[int, int], dim: int, page: int, mask: AttentionMask, dtype: torch.dtype,
    with_sinks: bool, seed: int,
) -> None:  # fmt: skip
    """Rows of a prefix and new tokens each, in one launch."""
    rows = paged([prefix + new for prefix, new in spans], heads[1], dim, page, dtype, seed)
    if mask.window:
        behind_window(rows, [prefix for prefix, _ in spans], mask.window)
    counts = [new for _, new in spans]
    q = torch.randn(sum(counts), heads[0], dim, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)
    offsets = [sum(counts[:row]) for row in range(len(counts))]
    step = tile_tokens(heads[0] // heads[1], dim, dtype)
    tiles = [(row, first) for row, count in enumerate(counts) for first in range(0, count, step)]
    starts, flat, cut = (
        torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([prefix for prefix, _ in spans], offsets, tiles)
    )
    sinks = torch.linspace(-2, 3, heads[0], device=DEVICE) if with_sinks else None
    out = torch.full_like(q, float("nan"))
    attend_extend(
        q, out, rows.kv, rows.table, starts, rows.ends, flat, cut, scale=dim**-0.5, mask=mask, sinks=sinks
    )  # fmt: skip
    for row, (prefix, count) in enumerate(spans):
        new = slice(offsets[row], offsets[row] + count)
        expected = attended(
            q[new], rows.keys[row], rows.values[row], prefix,
            window=mask.window, softcap=mask.softcap, sinks=sinks,
        )  # fmt: skip
        close(out[new], expected, dtype)
