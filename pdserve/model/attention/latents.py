"""Multi-head latent attention (MLA, arXiv:2405.04434) with torch, over pages that hold latents.

A row with few new tokens multiplies its queries with the key part of the weight that expands latents, attends over the
latents, and multiplies the result with the value part. A row with many new tokens expands the latents of its context to
keys and values of all heads, where that takes fewer products.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.memory.layout import PageSpace
from pdserve.model.attention.paged_attention import (
    AttentionOptions,
    PagedPlane,
    attend_explicitly,
    attend_span,
    gather_bucket,
)
from pdserve.model.attention.paged_rows import ExtendSpan, PassRows, causal_mask

MAX_SCORES = 1 << 24
"""Scores, `[queries, heads, keys]`, that are in memory at once."""


class LatentProjection:
    """The weight that expands the latents of one layer: `[heads * (nope + v_width), rank]`.

    A latent is `[rank + rope_width]`: the part that is expanded, and the rotary key that all heads share. A key is
    `[nope + rope_width]`.
    """

    def __init__(self, weight: Tensor, num_heads: int, nope: int, v_width: int, rope_width: int) -> None:
        self._weight = weight
        self.rank = weight.shape[1]
        self.v_width = v_width
        self._nope = nope
        by_head = weight.view(num_heads, nope + v_width, self.rank)
        self._to_k, self._to_v = by_head[:, :nope], by_head[:, nope:]
        expanded = self.rank * (nope + v_width)
        saved = 2 * self.rank + rope_width - (nope + rope_width + v_width)
        self.worth = expanded / saved if saved > 0 else float("inf")
        """New tokens of a row from which on `is_worth` is true."""

    def is_worth(self, num_tokens: int) -> bool:
        """True when expanding a context takes fewer products than `num_tokens` absorbed queries over its latents.

        Expanding costs `rank * (nope + v_width)` products for each head and token of the context. Each query then
        saves the difference of the widths.
        """
        return num_tokens >= self.worth

    def absorb(self, query: Tensor) -> Tensor:
        """Map queries `[tokens, heads, nope + rope_width]` to queries over latents, `[tokens, heads, latent]`."""
        nope, rope = query[..., : self._nope], query[..., self._nope :]
        return torch.cat([torch.bmm(nope.transpose(0, 1), self._to_k).transpose(0, 1), rope], -1)

    def project(self, attended: Tensor) -> Tensor:
        """Map attended latents `[tokens, heads, rank]` to the output of attention, `[tokens, heads, v_width]`."""
        return torch.bmm(attended.transpose(0, 1), self._to_v.transpose(1, 2)).transpose(0, 1)

    def expand(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Expand latents `[tokens, latent]` to keys `[heads, tokens, key width]` and values of all heads."""
        both = F.linear(latents[:, : self.rank], self._weight).view(len(latents), len(self._to_k), -1)
        nope, values = both[..., : self._nope], both[..., self._nope :]
        rope = latents[:, None, self.rank :].expand(-1, nope.shape[1], -1)
        return torch.cat([nope, rope], -1).transpose(0, 1), values.transpose(0, 1)


@dataclasses.dataclass(frozen=True, eq=False)
class LatentPlane:
    """The latents of one layer in pages. `rank`: width of the part without the rotary key.

    `projection` is None where the layer's own code expands the latents.
    """

    plane: PagedPlane
    rank: int
    null_page: int
    projection: LatentProjection | None


def attend_latents(query: Tensor, new: Tensor, call: AttentionOptions, rows: PassRows, layer: LatentPlane) -> Tensor:
    """Attend with queries `[tokens, heads, key width]` over the latents of their rows.

    `new` `[tokens, latent]` are in the pages already. Returns `[tokens, heads, v_width]`.
    """
    projection = layer.projection
    assert projection is not None
    out = query.new_empty(*query.shape[:2], projection.v_width)
    selected = None if call.indices is None else call.indices.flatten(0, 1).long()
    if selected is None:
        for bucket in rows.decodes(PageSpace.TOKENS, call.window, layer.null_page):
            latents = gather_bucket(layer.plane, bucket)[:, 0]
            out[bucket.tokens] = _absorbed(query[bucket.tokens], latents, bucket.visible, call, projection)
    else:
        decoding, firsts, ends = rows.decode_contexts
        if len(decoding):
            latents, visible = _selected(selected[decoding], firsts, ends, call.window, rows, layer.plane)
            out[decoding] = _absorbed(query[decoding], latents, visible, call, projection)
    for span in rows.extends(PageSpace.TOKENS, None if selected is not None else call.window):
        tokens = slice(span.offset, span.offset + span.end - span.start)
        latents = new[tokens] if span.start == 0 else _row(layer.plane.values, span)
        only = None
        if selected is not None:
            only = _only(selected[tokens] - rows.context_starts[span.row], len(latents))
        out[tokens] = _extend(query[tokens], latents, span, only, call, projection)
    return out


def attend_expanded(
    query: Tensor,
    new: Tensor,
    plane: PagedPlane,
    span: ExtendSpan,
    call: AttentionOptions,
    projection: LatentProjection,
) -> Tensor:
    """Attend with the queries of one row `[tokens, heads, key width]` over keys and values of its expanded latents.

    `new` `[tokens, latent]` are in the pages already. Returns `[tokens, heads, v_width]`.
    """
    keys, values = projection.expand(new if span.start == 0 else _row(plane.values, span))
    return attend_span(query, keys, values, call, span.start, span.end, span.first)


def _row(plane: Tensor, span: ExtendSpan) -> Tensor:
    """Gather the latents of one row, `[tokens, latent]`, from position `span.first` on."""
    return plane[span.pages, 0].flatten(0, 1)[: span.end - span.first]


def _selected(
    selected: Tensor, firsts: Tensor, ends: Tensor, window: int | None, rows: PassRows, plane: PagedPlane
) -> tuple[Tensor, Tensor]:
    """Gather the latents that one query a row selects: `[rows, keys, latent]`, and which of them it may see.

    `selected` `[rows, keys]`: their numbers among the contexts of all rows. `firsts` and `ends` `[rows, 1]`: the range
    of the row's own ones.
    """
    visible = (selected >= firsts) & (selected < ends)
    if window is not None:
        visible &= selected >= ends - window
    pages, slots = rows.context
    own = selected.clamp(firsts, ends - 1)
    return plane.values[pages[own], 0, slots[own]], visible


def _only(selected: Tensor, num_keys: int) -> Tensor:
    """Return which keys of a row each query selects, `[queries, num_keys]`; other rows' keys are outside the range."""
    own = selected.where((selected >= 0) & (selected < num_keys), num_keys)
    marks = torch.zeros(len(selected), num_keys + 1, dtype=torch.bool, device=selected.device)
    return marks.scatter_(1, own, True)[:, :num_keys]


def _extend(
    query: Tensor,
    latents: Tensor,
    span: ExtendSpan,
    only: Tensor | None,
    call: AttentionOptions,
    projection: LatentProjection,
) -> Tensor:
    """Attend with the queries of one row `[tokens, heads, key width]` over its latents `[keys, latent]`.

    The latents begin at position `span.first`.
    """
    num_tokens, num_heads, _ = query.shape
    if projection.is_worth(num_tokens):
        keys, values = projection.expand(latents)
        return attend_span(query, keys, values, call, span.start, span.end, span.first, only)
    block = max(1, MAX_SCORES // (num_heads * len(latents)))
    parts = []
    for begin in range(0, num_tokens, block):
        stop = min(num_tokens, begin + block)
        visible = causal_mask(
            span.start + begin, span.start + stop, span.first, len(latents), call.window, query.device
        )
        if only is not None:
            visible = visible & only[begin:stop]
        parts.append(_absorbed(query[begin:stop], latents[None], visible, call, projection))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _absorbed(
    query: Tensor, latents: Tensor, visible: Tensor | None, call: AttentionOptions, projection: LatentProjection
) -> Tensor:
    """Attend over latents with absorbed queries; returns `[tokens, heads, v_width]`.

    `query` `[tokens, heads, key width]`. `latents` `[rows, keys, latent]`: one row for each token, or one row for all
    tokens. `visible` `[tokens, keys]`.
    """
    num_tokens, num_heads, _ = query.shape
    num_rows, num_keys, _ = latents.shape
    absorbed = projection.absorb(query).reshape(num_rows, -1, latents.shape[-1])
    if visible is not None:
        visible = visible[:, None].expand(-1, num_heads, -1).reshape(num_rows, -1, num_keys)
    sinks = None if call.sinks is None else call.sinks.repeat(num_tokens).view(num_rows, -1, 1)
    attended = attend_explicitly(absorbed, latents, latents[..., : projection.rank], visible, call, sinks)
    return projection.project(attended.view(num_tokens, num_heads, projection.rank))
