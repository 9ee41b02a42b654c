"""Programs with MLA layers: projections, absorption, attention over latents. Made by `NativeDecoder`.

down = norm(x) Wkv_a   queries = norm(x) Wq, or q_a_norm(norm(x) Wq_a) Wq_b
absorbed = queries Wk of each head   place: latents into pages, queries over latents into q
attended = attention with one KV head, the latent   mixed = attended Wv of each head

With an index (DSA), before the write of latents:
index queries = q_a_norm(norm(x) Wq_a) Wiq   index keys = norm(x) Wik   weights of index heads = norm(x) Wiw
place: index keys into pages   select: the tokens with the highest scores, which attention reads
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from pdserve.memory.layout import KVGroup
from pdserve.model.layers.dense import RMSNorm
from pdserve.model.mla import INDEX_EPS, MLA, Indexer
from pdserve.model.native.packer import PackedIndex, PackedMLA
from pdserve.model.native.program import Program
from pdserve.model.native.resources import Buffer, HeadShape
from pdserve.model.native.weights import Packed

MakeBuffer = Callable[[str, int], Buffer]
"""Returns the buffer of a role with a width."""


class LatentProgram(Program):
    """A program that has the operations of MLA layers too."""

    def head_product(
        self, source: Buffer, weights: Packed, out: Buffer, *, num_heads: int, first: int = 0, sharing: int = 1
    ) -> None:
        """Record: `out` = for each head, its items of `source` times its layer of `weights`.

        From item `first` on `source` has equally many items for each `sharing` heads, and `out` for each head. The
        inputs of a head are the first `weights.num_in` of its items.
        """
        assert len(weights.data) == num_heads and weights.bias is None and weights.num_parts == 1
        stride, rest = divmod((source.width - first) * sharing, num_heads)
        assert first >= 0 and rest == 0 and num_heads % sharing == 0 and weights.num_in <= stride
        assert out.width == num_heads * weights.num_out and out.dtype == source.dtype == torch.float32
        assert not source.of_samples and not out.of_samples
        self._op(
            self._library.pdk_op_head_product(
                self._handle, source.number, first, stride, sharing, weights.num_in, num_heads,
                self._weights(weights), out.number,
            )
        )  # fmt: skip

    def place_latents(
        self,
        absorbed: Buffer,
        queries: Buffer,
        down: Buffer,
        layer: int,
        norm: Tensor,
        eps: float,
        *,
        pairs: int,
        heads: int,
    ) -> None:
        """Record: normalise and rotate latents and queries over latents; write the latents to pages.

        `absorbed` `[heads * rank]`, `queries` `[heads * (nope + rope)]`, `down` `[rank + rope]`, `norm` `[rank]`.
        `pairs`: see `pdk_op_place_latents`. `layer`: number in the pool of the heads.
        """
        shape = self._heads[heads]
        rank = absorbed.width // shape.num_heads
        assert shape.of_latents and shape.num_kv_heads == 1 and 0 <= layer < shape.layers and pairs in (0, 1, 2)
        assert absorbed.width == shape.num_heads * rank and rank < shape.dim == down.width
        assert queries.width % shape.num_heads == 0 and queries.width // shape.num_heads >= shape.dim - rank
        self._op(
            self._library.pdk_op_place_latents(
                self._handle, heads, absorbed.number, queries.number, down.number, layer, self._norm(norm, rank), eps,
                pairs,
            )
        )  # fmt: skip

    def place_index(
        self,
        queries: Buffer,
        keys: Buffer,
        layer: int,
        norm: tuple[Tensor, Tensor],
        eps: float,
        *,
        beside: bool,
        heads: int,
    ) -> None:
        """Record: rotate the queries of an index; normalise and rotate its keys; write the keys to pages.

        `queries` `[heads * dim]`, `keys` `[dim]`, `norm` weight and bias `[dim]` of the layer norm. `beside`: see
        `pdk_op_place_index`. `layer`: number in the pool of the heads.
        """
        shape = self._heads[heads]
        assert shape.of_latents and shape.num_kv_heads == 1 and 0 <= layer < shape.layers
        assert queries.width == shape.num_heads * shape.dim and keys.width == shape.dim
        vectors = (self._norm(each, shape.dim) for each in norm)
        self._op(
            self._library.pdk_op_place_index(
                self._handle, heads, queries.number, keys.number, layer, *vectors, eps, beside
            )
        )

    def select_tokens(self, layer: int, weights: Buffer, scale: float, top_k: int, *, heads: int) -> None:
        """Record: each token selects `top_k` of the tokens that it sees, those with the highest index scores.

        Follows `place_index`. `weights` `[heads]` multiply the heads' scores, and `scale` multiplies all. A token that
        sees no more than `top_k` tokens selects all. Of equal scores the earlier token is taken.
        """
        shape = self._heads[heads]
        assert weights.width == shape.num_heads and 0 <= layer < shape.layers and top_k > 0
        self._op(self._library.pdk_op_select_tokens(self._handle, heads, layer, weights.number, scale, top_k))

    def attend_selected(self, layer: int, out: Buffer, top_k: int, *, heads: int) -> None:
        """Record: as `attend`, over the tokens that the last `select_tokens` with this `top_k` has selected."""
        shape = self._heads[heads]
        assert shape.of_latents and out.width == shape.num_heads * shape.dim and 0 <= layer < shape.layers and top_k > 0
        self._op(self._library.pdk_op_attend_selected(self._handle, heads, layer, out.number, top_k))


class LayerHeads(NamedTuple):
    """The program's number of a layer's heads, and the layer's number in their pool."""

    heads: int
    layer: int


@dataclasses.dataclass(frozen=True)
class Mixed:
    """The output of the heads, and the number of operations up to the end of the write of latents and index keys."""

    buffer: Buffer
    written: int


def latent_shape(group: KVGroup, op: MLA) -> HeadShape:
    """Return the heads of an MLA layer over the pool of its group."""
    spec = op.spec
    return HeadShape(
        group.num_layers, op.num_heads, 1, group.page_tokens, spec.latent_dim, scale=spec.scale, of_latents=True
    )


def index_shape(group: KVGroup, op: Indexer) -> HeadShape:
    """Return the heads of an index over the pool of its group."""
    spec = op.spec
    return HeadShape(group.num_layers, spec.num_heads, 1, group.page_tokens, spec.head_dim, scale=1.0, of_latents=True)


def record_latents(
    program: LatentProgram,
    buffer: MakeBuffer,
    x: Buffer,
    norm: tuple[Tensor | None, float],
    weights: PackedMLA,
    place: LayerHeads,
    index: LayerHeads | None,
) -> Mixed:
    """Record a layer up to its output projection.

    `norm`: what the norm before the layer multiplies by, and its epsilon; None: there is no norm. `place`: the heads
    over latents; `index`: those of the layer's index, None without one.
    """
    op, spec, count, (weight, eps) = weights.op, weights.op.spec, weights.op.num_heads, norm
    down, queries = buffer("latent", spec.latent_dim), buffer("queries", weights.q.num_out)
    program.linear(x, weights.kv_a, down, norm=weight, eps=eps)
    if weights.q_a is None or op.q_a_norm is None:
        program.linear(x, weights.q, queries, norm=weight, eps=eps)
    else:
        lower, lower_norm = buffer("q_a", weights.q_a.num_out), (_weight(op.q_a_norm), op.q_a_norm.eps)
        program.linear(x, weights.q_a, lower, norm=weight, eps=eps)
        program.linear(lower, weights.q, queries, norm=lower_norm[0], eps=lower_norm[1])
        if weights.index is not None and index is not None:
            _record_index(program, buffer, (x, norm), (lower, lower_norm), weights.index, index)
    absorbed = buffer("absorbed", count * spec.kv_lora_rank)
    program.head_product(queries, weights.absorb, absorbed, num_heads=count)
    program.place_latents(
        absorbed, queries, down, place.layer, _weight(op.kv_a_norm), op.kv_a_norm.eps, pairs=_pairs(op),
        heads=place.heads,
    )  # fmt: skip
    written = program.num_ops
    attended, mixed = buffer("attended", count * spec.latent_dim), buffer("mixed", count * spec.value_dim)
    if spec.index is None:
        program.attend(place.layer, attended, heads=place.heads)
    else:
        program.attend_selected(place.layer, attended, spec.index.top_k, heads=place.heads)
    program.head_product(attended, weights.project, mixed, num_heads=count)
    return Mixed(mixed, written)


def _record_index(
    program: LatentProgram,
    buffer: MakeBuffer,
    x: tuple[Buffer, tuple[Tensor | None, float]],
    lower: tuple[Buffer, tuple[Tensor, float]],
    weights: PackedIndex,
    place: LayerHeads,
) -> None:
    """Record the selection of a layer. `x` and `lower`: what the keys and the queries are made of, and its norm."""
    spec = weights.op.spec
    queries, keys = buffer("index_queries", weights.q.num_out), buffer("index_keys", weights.k.num_out)
    of_heads = buffer("index_weights", spec.num_heads)
    program.linear(lower[0], weights.q, queries, norm=lower[1][0], eps=lower[1][1])
    program.linear(x[0], weights.k, keys, norm=x[1][0], eps=x[1][1])
    program.linear(x[0], weights.weights, of_heads, norm=x[1][0], eps=x[1][1])
    program.place_index(
        queries, keys, place.layer, weights.op.norm, INDEX_EPS, beside=spec.interleaved, heads=place.heads
    )
    scale = (spec.num_heads * spec.head_dim) ** -0.5
    program.select_tokens(place.layer, of_heads, scale, spec.top_k, heads=place.heads)


def _pairs(op: MLA) -> int:
    """Return where the columns of a rotated pair lie; see `pdk_op_place_latents`."""
    if op.spec.rope is None or not op.spec.rope.interleaved:
        return 0
    return 2 if op.spec.caches_pairs else 1


def norm_of(norm: RMSNorm | None) -> tuple[Tensor | None, float]:
    """Return what a norm multiplies by, and its epsilon; None: there is no norm."""
    return (None, 0.0) if norm is None else (_weight(norm), norm.eps)


def _weight(norm: RMSNorm) -> Tensor:
    """Return what a norm multiplies by."""
    return norm.offset + norm.weight.float() if norm.offset else norm.weight
