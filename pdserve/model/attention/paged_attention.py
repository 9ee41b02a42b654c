"""Attention over pages for models of transformers, and its parts for latents: windows, soft caps, sinks, selected keys.

Rows with one new token are gathered in buckets of similar length; rows with several are attended one by one. Unwritten
slots never reach a result, not even as NaN.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.memory.layout import PageSpace
from pdserve.model.attention.paged_rows import DecodeBucket, ExtendSpan, PassRows, causal_mask


class AttentionOptions(Protocol):
    """What one attention call asks for. `scaling` multiplies the scores, and `softcap` bounds them; None: no bound.

    `window`: tokens that a query sees, its own included; None: all earlier ones. `sinks` `[heads]`: logits that take
    part in the softmax and have no value; None: there are none. `indices`: keys that each query may see (sparse
    attention); None: all.
    """

    @property
    def scaling(self) -> float:
        """See the class."""
        ...

    @property
    def window(self) -> int | None:
        """See the class."""
        ...

    @property
    def softcap(self) -> float | None:
        """See the class."""
        ...

    @property
    def sinks(self) -> Tensor | None:
        """See the class."""
        ...

    @property
    def indices(self) -> Tensor | None:
        """See the class."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class PagedPlane:
    """Keys or values of one layer in pages: `values` `[page, kv_head, row, width]`.

    `blocks`: see `GroupPool.plane_blocks`, for faster gathers.
    """

    values: Tensor
    blocks: tuple[Tensor, int] | None


QUERY_BLOCK = 512
"""Query tokens that are attended together: each block skips the keys after its last query."""


def attend_pages(
    query: Tensor,
    new_k: Tensor,
    new_v: Tensor,
    call: AttentionOptions,
    rows: PassRows,
    k: PagedPlane,
    v: PagedPlane,
    space: PageSpace,
    null_page: int,
) -> Tensor:
    """Attend with queries `[tokens, heads, width]` over the pages of their rows.

    `new_k` and `new_v` `[tokens, kv_heads, width]` are in the pages already. Returns `[tokens, heads, v width]`.
    """
    out = query.new_empty(query.shape[0], query.shape[1], v.values.shape[-1])
    for bucket in rows.decodes(space, call.window, null_page):
        out[bucket.tokens] = _decode(query[bucket.tokens], bucket, k, v, call)
    for span in rows.extends(space, call.window):
        tokens = slice(span.offset, span.offset + span.end - span.start)
        if span.start == 0:
            keys, values, first = new_k[tokens].transpose(0, 1), new_v[tokens].transpose(0, 1), 0
        else:
            first = span.first
            keys, values = (_row(plane.values, span) for plane in (k, v))
        out[tokens] = attend_span(query[tokens], keys, values, call, span.start, span.end, first)
    return out


def attend_rows(query: Tensor, key: Tensor, value: Tensor, call: AttentionOptions, rows: PassRows) -> Tensor:
    """Attend over `key` and `value`, `[1, heads, context tokens, width]`: the rows' contexts in turn."""
    out = query.new_empty(query.shape[0], query.shape[1], value.shape[-1])
    selected = None if call.indices is None else call.indices.flatten(0, 1).long()
    for row, first in enumerate(rows.context_starts):
        start, end, offset = int(rows.starts[row]), int(rows.ends[row]), int(rows.offsets[row])
        tokens, context = slice(offset, offset + end - start), slice(first, first + end)
        keys, values = key[0, :, context], value[0, :, context]
        only = None
        if selected is not None:
            only = torch.zeros(end - start, key.shape[2], dtype=torch.bool, device=query.device)
            only = only.scatter_(1, selected[tokens], True)[:, context]
        out[tokens] = attend_span(query[tokens], keys, values, call, start, end, 0, only)
    return out


def _decode(query: Tensor, bucket: DecodeBucket, k: PagedPlane, v: PagedPlane, call: AttentionOptions) -> Tensor:
    """Attend with one query a row, `[rows, heads, width]`."""
    num_rows, num_heads, _ = query.shape
    keys, values = (gather_bucket(plane, bucket) for plane in (k, v))
    num_kv_heads = keys.shape[1]
    visible = None if bucket.visible is None else bucket.visible[:, None, None]
    sinks = None if call.sinks is None else call.sinks.view(1, num_kv_heads, -1, 1)
    out = _attend(query.view(num_rows, num_kv_heads, num_heads // num_kv_heads, -1), keys, values, visible, call, sinks)
    return out.reshape(num_rows, num_heads, -1)


def gather_bucket(plane: PagedPlane, bucket: DecodeBucket) -> Tensor:
    """Gather the context of a bucket: `[rows, kv_heads, slots, width]`; slots without a token are zero."""
    num_rows, num_pages = bucket.pages.shape
    _, num_heads, size, width = plane.values.shape
    if plane.blocks is not None:
        blocks, page_blocks = plane.blocks
        found = blocks.index_select(0, bucket.blocks(num_heads, page_blocks))
    else:
        heads = torch.arange(num_heads, device=bucket.pages.device)
        found = plane.values[bucket.pages[:, None], heads[None, :, None]]
    num_slots = num_pages * size
    if len(bucket.unwritten):
        found.view(-1, width).index_fill_(0, bucket.unwritten_of(num_heads, num_slots), 0.0)
    return found.view(num_rows, num_heads, num_slots, width)


def _row(plane: Tensor, span: ExtendSpan) -> Tensor:
    """Gather the context of one row: `[kv_heads, tokens, width]`."""
    return plane[span.pages].transpose(0, 1).flatten(1, 2)[:, : span.end - span.first]


def attend_span(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    call: AttentionOptions,
    start: int,
    end: int,
    first: int,
    only: Tensor | None = None,
) -> Tensor:
    """Attend with the queries `[tokens, heads, width]` of one row at positions `[start, end)`.

    `keys` and `values` `[kv_heads, keys, width]` begin at position `first`. `only` `[tokens, keys]`: keys that each
    query may see.
    """
    num_tokens, num_heads, _ = query.shape
    group = num_heads // keys.shape[0]
    parts = []
    for begin in range(0, num_tokens, QUERY_BLOCK):
        stop = min(num_tokens, begin + QUERY_BLOCK)
        low = 0 if call.window is None else max(0, start + begin - call.window + 1 - first)
        high = start + stop - first
        mask = causal_mask(start + begin, start + stop, first + low, high - low, call.window, query.device)
        if only is not None:
            mask = mask & only[begin:stop, low:high]
        k, v = (x[:, low:high].repeat_interleave(group, 0)[None] for x in (keys, values))
        sinks = None if call.sinks is None else call.sinks.view(1, num_heads, 1, 1)
        part = _attend(query[begin:stop].transpose(0, 1)[None], k, v, mask, call, sinks)
        parts.append(part[0].transpose(0, 1))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None, call: AttentionOptions, sinks: Tensor | None
) -> Tensor:
    """Attention `[rows, heads, queries, width]` over `[rows, heads, keys, width]`.

    `visible` and `sinks` broadcast to the scores `[rows, heads, queries, keys]`, the latter with one key.
    """
    if call.softcap is None and sinks is None:
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=visible, scale=call.scaling)
    return attend_explicitly(query, keys, values, visible, call, sinks)


def attend_explicitly(
    query: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None, call: AttentionOptions, sinks: Tensor | None
) -> Tensor:
    """Attention `[..., queries, width]` over `[..., keys, width]` by two products, with all options of `call`.

    `visible` and `sinks` broadcast to the scores `[..., queries, keys]`, the latter with one key.
    """
    scores = torch.matmul(query, keys.transpose(-1, -2)).float() * call.scaling
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        extra = sinks.float().expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, extra], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return torch.matmul(weights.to(query.dtype), values)
