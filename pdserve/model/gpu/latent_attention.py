"""Paged attention over latents (MLA), and the index scores of sparse attention (DSA).

Called by `attention/triton_latents.py` once the new tokens' latents and index keys are in the pages. Queries are
absorbed: all heads share one key, the latent, whose first part is the value. A tile is some new tokens of one row and
some of its heads, which share the loaded latents. The latents of a tile may be split over programs, which a launch
fixes; the last program to finish adds their parts up, in order.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.base.env import triton_is_interpreted
from pdserve.model.gpu.attention_math import key_row, online_softmax_update, page_rows
from pdserve.model.gpu.decode_attention import LOG2_E, reduced_sum
from pdserve.model.gpu.runtime import chaining, power_of_2

_LEAST = 16
"""Minimum lines and columns of a product."""
_PART_TOKENS = 128
"""Minimum latents of a part, as in `decode_attention`."""
_MAX_PARTS = 64


@dataclasses.dataclass(frozen=True)
class PagedContext:
    """Rows and their pages on the device, int32.

    `table` `[R, P]`: pages of each row. Row r computes positions `[starts[r], ends[r])`, and its first token has index
    `offsets[r]` among the step's tokens.
    """

    table: Tensor
    starts: Tensor
    ends: Tensor
    offsets: Tensor


@dataclasses.dataclass(frozen=True)
class LatentTiling:
    """Lines of a tile, and the heads among them; a tile has `lines // heads` tokens."""

    lines: int
    heads: int

    @staticmethod
    def of_one_token(num_heads: int) -> LatentTiling:
        """Choose the tiling of rows, or of tokens, that share no latents with others."""
        lines = min(max(_LEAST, power_of_2(num_heads)), 32 if triton_is_interpreted() else 64)
        return LatentTiling(lines, lines)

    @staticmethod
    def of_prompts(num_heads: int, dtype: torch.dtype) -> LatentTiling:
        """Choose the tiling of rows with several new tokens. `dtype`: that of the pages."""
        lines = 32 if triton_is_interpreted() or dtype.itemsize > 2 else 64
        return LatentTiling(lines, min(power_of_2(num_heads), lines))

    @property
    def tokens(self) -> int:
        """New tokens of a tile."""
        return self.lines // self.heads

    def blocks(self, num_heads: int) -> int:
        """Return the number of tiles that some tokens need for all heads."""
        return -(-num_heads // self.heads)


def attend_latents(
    q: Tensor,
    out: Tensor,
    latents: Tensor,
    rows: PagedContext,
    tiles: Tensor,
    tiling: LatentTiling,
    *,
    scale: float,
    parts: int,
    through: Tensor,
    selected: Tensor | None = None,
) -> None:
    """Write the attention of tiles over latents into `out`.

    `q` `[N, num_heads, latent]` and `out` `[N, num_heads, rank]`, the last two dimensions contiguous. `latents`
    `[num_pages, page_tokens, latent]`, contiguous within a page: `rank` columns that are values too, and the rotated
    ones. `tiles` int32 `[T, 2]`: a row, and the first of up to `tiling.tokens` of its new tokens. `parts`, a power of
    two: programs that share the latents of a tile. `through` int32, zeros: one for each tile and block of heads.

    With `selected` int32 `[N, K]` each token attends to these positions of its row only; negative ones, which follow
    all others, stand for none. A tile then has one token.
    """
    num_heads, width = q.shape[1:]
    rank, page_tokens = out.shape[2], latents.shape[1]
    blocks = tiling.blocks(num_heads)
    assert selected is None or tiling.tokens == 1, "tokens that select share no latents"
    partial_out = lse = out
    if parts > 1:
        assert len(through) >= len(tiles) * blocks, "one counter for each tile and block of heads"
        shape = (len(tiles) * blocks, parts, tiling.lines)
        partial_out = torch.empty(*shape, rank, dtype=torch.float32, device=q.device)
        lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    wide = tiling.lines * power_of_2(rank) >= 64 * 512
    _attend_latents[(len(tiles), blocks, parts)](
        q, out, latents, rows.table, rows.starts, rows.ends, rows.offsets, tiles,
        tiles if selected is None else selected, partial_out, lse, through,
        q.stride(0), out.stride(0), latents.stride(0), rows.table.stride(0),
        0 if selected is None else selected.shape[1], scale * LOG2_E,
        HEADS=num_heads, PAGE=page_tokens, RANK=rank, ROPE=width - rank,
        BLOCK_RANK=max(_LEAST, power_of_2(rank)), BLOCK_ROPE=max(_LEAST, power_of_2(width - rank)),
        BLOCK_LINES=tiling.lines, BLOCK_HEADS=tiling.heads, BLOCK_KEYS=32,
        PART=_PART_TOKENS, MOST_PARTS=_MAX_PARTS, IS_WHOLE=parts == 1, HAS_SELECTED=selected is not None,
        num_warps=8 if wide else 4, num_stages=2, **chaining(q.device),
    )  # fmt: skip


@triton.jit(do_not_specialize=["table_stride", "num_selected"])
def _attend_latents(
    q, out, latents, table, starts, ends, offsets, tiles, selected, partial_out, lse, through,
    q_stride, out_stride, page_stride, table_stride, num_selected, scale,
    HEADS: tl.constexpr, PAGE: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr,
    BLOCK_RANK: tl.constexpr, BLOCK_ROPE: tl.constexpr,
    BLOCK_LINES: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    PART: tl.constexpr, MOST_PARTS: tl.constexpr, IS_WHOLE: tl.constexpr, HAS_SELECTED: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """One tile, one block of heads, and one part of the latents."""
    if CHAINED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tile, block, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(tiles + 2 * tile)
    new = tl.load(tiles + 2 * tile + 1)
    start, end = tl.load(starts + row), tl.load(ends + row)
    first_token = tl.load(offsets + row).to(tl.int64) + new

    lines = tl.arange(0, BLOCK_LINES)
    inner = lines // BLOCK_HEADS
    head = block * BLOCK_HEADS + lines % BLOCK_HEADS
    position = start + new + inner
    is_line = (position < end) & (head < HEADS)
    ranks, ropes = tl.arange(0, BLOCK_RANK), tl.arange(0, BLOCK_ROPE)
    is_rank, is_rope = ranks < RANK, ropes < ROPE
    cells = is_line[:, None] & is_rank[None, :]

    num_keys = tl.minimum(start + new + BLOCK_LINES // BLOCK_HEADS, end)
    if HAS_SELECTED:
        num_keys = tl.minimum(num_keys, num_selected)
    share = num_keys
    if not IS_WHOLE:
        share = tl.cdiv(tl.cdiv(num_keys, tl.num_programs(2)), BLOCK_KEYS) * BLOCK_KEYS
        share = tl.maximum(share, PART)
    begin = part * share
    if (begin < num_keys) | (part == 0):
        last = tl.minimum(begin + share, num_keys)
        of_line = q + (first_token + inner)[:, None] * q_stride + head[:, None] * (RANK + ROPE)
        q_rank = tl.load(of_line + ranks[None, :], mask=cells, other=0.0)
        q_rope = tl.load(of_line + RANK + ropes[None, :], mask=is_line[:, None] & is_rope[None, :], other=0.0)
        total = tl.zeros((BLOCK_LINES, BLOCK_RANK), tl.float32)
        top = tl.full((BLOCK_LINES,), float("-inf"), tl.float32)
        weight = tl.zeros((BLOCK_LINES,), tl.float32)
        of_row = table + row.to(tl.int64) * table_stride
        for at in range(begin, last, BLOCK_KEYS):
            keys = at + tl.arange(0, BLOCK_KEYS)
            is_read = keys < last
            if HAS_SELECTED:
                keys = tl.load(selected + first_token * num_selected + keys, mask=is_read, other=-1)
                is_read = keys >= 0
                keys = tl.where(is_read, keys, 0)
            pointers = page_rows(latents, of_row, keys, is_read, page_stride, PAGE, RANK + ROPE)
            of_rank = pointers[:, None] + ranks[None, :]
            of_rope = pointers[:, None] + RANK + ropes[None, :]
            values = tl.load(of_rank, mask=is_read[:, None] & is_rank[None, :], other=0.0)
            rotated = tl.load(of_rope, mask=is_read[:, None] & is_rope[None, :], other=0.0)
            scores = tl.dot(q_rank, tl.trans(values), input_precision="ieee")
            scores = tl.dot(q_rope, tl.trans(rotated), scores, input_precision="ieee") * scale
            is_seen = is_read[None, :] & (keys[None, :] <= position[:, None])
            scores = tl.where(is_seen, scores, float("-inf"))
            total, top, weight = online_softmax_update(total, top, weight, scores, values)

        is_last = True
        if not IS_WHOLE:
            pair = tile * tl.num_programs(1) + block
            parts = tl.maximum(tl.cdiv(num_keys, share), 1)
            known = tl.where(weight > 0.0, weight, 1.0)
            places = (pair.to(tl.int64) * tl.num_programs(2) + part) * BLOCK_LINES + lines
            tl.store(partial_out + places[:, None] * RANK + ranks[None, :], total / known[:, None], mask=cells)
            tl.store(lse + places, top + tl.log2(known), mask=is_line)
            tl.debug_barrier()  # all threads' stores are done before one thread increments the counter
            is_last = tl.atomic_add(through + pair, 1) == parts - 1
            if is_last:
                tl.store(through + pair, 0)
                places = pair.to(tl.int64) * tl.num_programs(2) * BLOCK_LINES + lines
                total, top, weight = reduced_sum(
                    partial_out, lse, places, is_line, cells, parts, BLOCK_LINES, RANK, BLOCK_RANK, BLOCK_LINES,
                    MOST_PARTS,
                )  # fmt: skip
        if is_last:
            found = total / tl.where(weight > 0.0, weight, 1.0)[:, None]
            to = out + (first_token + inner)[:, None] * out_stride + head[:, None] * RANK + ranks[None, :]
            tl.store(to, found.to(out.dtype.element_ty), mask=cells)


def place_latents(latents: Tensor, pages: Tensor, write_pages: Tensor, write_slots: Tensor) -> None:
    """Write `latents` `[N, latent]` to `pages` `[num_pages, page_tokens, latent]`, contiguous within a page.

    `write_pages` and `write_slots` int64 `[N]`. A token with a negative page is not written.
    """
    num_tokens, width = latents.shape
    if num_tokens:
        _place_latents[(num_tokens,)](
            latents, pages, write_pages, write_slots, latents.stride(0), pages.stride(0), PAGE=pages.shape[1],
            WIDTH=width, BLOCK=power_of_2(width), num_warps=4, **chaining(latents.device),
        )  # fmt: skip


# Pages and slots are rows of `ForwardBatch.columns`, so the number of tokens decides whether they are 16-byte aligned.
@triton.jit(do_not_specialize_on_alignment=["write_pages", "write_slots"])
def _place_latents(
    latents, pages, write_pages, write_slots, stride, page_stride,
    PAGE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One token."""
    if CHAINED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    page, slot = tl.load(write_pages + token), tl.load(write_slots + token)
    values = tl.load(latents + token * stride + at, mask=at < WIDTH, other=0.0)
    to = key_row(pages, page, 0, slot, page_stride, PAGE, WIDTH)
    tl.store(to + at, values, mask=(at < WIDTH) & (page >= 0))


def index_scores(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    table: Tensor,
    row_of: Tensor,
    positions: Tensor,
    scores: Tensor,
    *,
    scale: float,
) -> None:
    """Write the index scores of n tokens with the keys of their rows into `scores` float32 `[n, K]`.

    `q` `[n, heads, D]` and `weights` float32 `[n, heads]`, contiguous. `keys` `[num_pages, page_tokens, D]`, contiguous
    within a page. `table` int32 `[R, P]`; `row_of` and `positions` int32 `[n]`: a token's row and position. The score
    of a key is the sum over heads of `weights * scale * max(0, q k)`; that of a key behind the token is -inf.
    """
    num_tokens, num_heads, dim = q.shape
    block_keys = 32 if triton_is_interpreted() else 64
    _index_scores[(num_tokens, triton.cdiv(scores.shape[1], block_keys))](
        q, weights, keys, table, row_of, positions, scores,
        keys.stride(0), table.stride(0), scores.shape[1], scale,
        HEADS=num_heads, PAGE=keys.shape[1], DIM=dim, BLOCK_DIM=max(_LEAST, power_of_2(dim)),
        BLOCK_HEADS=min(max(_LEAST, power_of_2(num_heads)), 64), BLOCK_KEYS=block_keys, num_warps=4,
        **chaining(q.device),
    )  # fmt: skip


@triton.jit(do_not_specialize=["table_stride", "num_keys"])
def _index_scores(
    q, weights, keys, table, row_of, positions, scores, page_stride, table_stride, num_keys, scale,
    HEADS: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One token and one block of keys."""
    if CHAINED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    row, position = tl.load(row_of + token), tl.load(positions + token)
    at = tl.program_id(1) * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
    is_seen = at <= position
    dims = tl.arange(0, BLOCK_DIM)
    is_dim = dims < DIM
    pointers = page_rows(keys, table + row.to(tl.int64) * table_stride, at, is_seen, page_stride, PAGE, DIM)
    read = tl.load(pointers[:, None] + dims[None, :], mask=is_seen[:, None] & is_dim[None, :], other=0.0)
    total = tl.zeros((BLOCK_KEYS,), tl.float32)
    for first in range(0, HEADS, BLOCK_HEADS):
        head = first + tl.arange(0, BLOCK_HEADS)
        is_head = head < HEADS
        of_head = q + (token * HEADS + head)[:, None] * DIM + dims[None, :]
        query = tl.load(of_head, mask=is_head[:, None] & is_dim[None, :], other=0.0)
        share = tl.load(weights + token * HEADS + head, mask=is_head, other=0.0)
        products = tl.maximum(tl.dot(query, tl.trans(read), input_precision="ieee"), 0.0)
        total += tl.sum(products * share[:, None], 0)
    found = tl.where(is_seen, total * scale, float("-inf"))
    tl.store(scores + token * num_keys + at, found, mask=at < num_keys)
