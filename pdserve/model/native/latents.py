"""Programs with MLA layers: projections, absorption, attention over latents. Made by `NativeDecoder`.

down = norm(x) Wkv_a   queries = norm(x) Wq, or q_a_norm(norm(x) Wq_a) Wq_b
absorbed = queries Wk of each head   place: latents into pages, queries over latents into q
attended = attention with one KV head, the latent   mixed = attended Wv of each head
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from pdserve.memory.layout import KVGroup
from pdserve.model.layers.dense import RMSNorm
from pdserve.model.mla import MLA
from pdserve.model.native.packer import PackedMLA
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


@dataclasses.dataclass(frozen=True)
class Mixed:
    """The output of the heads, and the number of operations up to the end of the write of latents."""

    buffer: Buffer
    written: int


def latent_shape(group: KVGroup, op: MLA) -> HeadShape:
    """Return the heads of an MLA layer over the pool of its group."""
    spec = op.spec
    return HeadShape(
        group.num_layers, op.num_heads, 1, group.page_tokens, spec.latent_dim, scale=spec.scale, of_latents=True
    )


def record_latents(
    program: LatentProgram,
    buffer: MakeBuffer,
    x: Buffer,
    norm: tuple[Tensor | None, float],
    weights: PackedMLA,
    heads: int,
    index: int,
) -> Mixed:
    """Record a layer up to its output projection.

    `norm`: what the norm before the layer multiplies by, and its epsilon; None: there is no norm. `heads` is the
    program's number of its heads, and `index` the layer's number in their pool.
    """
    op, spec, count, (weight, eps) = weights.op, weights.op.spec, weights.op.num_heads, norm
    down, queries = buffer("latent", spec.latent_dim), buffer("queries", weights.q.num_out)
    program.linear(x, weights.kv_a, down, norm=weight, eps=eps)
    if weights.q_a is None or op.q_a_norm is None:
        program.linear(x, weights.q, queries, norm=weight, eps=eps)
    else:
        lower = buffer("q_a", weights.q_a.num_out)
        program.linear(x, weights.q_a, lower, norm=weight, eps=eps)
        program.linear(lower, weights.q, queries, norm=_weight(op.q_a_norm), eps=op.q_a_norm.eps)
    absorbed = buffer("absorbed", count * spec.kv_lora_rank)
    program.head_product(queries, weights.absorb, absorbed, num_heads=count)
    program.place_latents(
        absorbed, queries, down, index, _weight(op.kv_a_norm), op.kv_a_norm.eps, pairs=_pairs(op), heads=heads
    )
    written = program.num_ops
    attended, mixed = buffer("attended", count * spec.latent_dim), buffer("mixed", count * spec.value_dim)
    program.attend(index, attended, heads=heads)
    program.head_product(attended, weights.project, mixed, num_heads=count)
    return Mixed(mixed, written)


def _pairs(op: MLA) -> int:
    """Return where the columns of a rotated pair lie; see `pdk_op_place_latents`."""
    if op.spec.rope is None or not op.spec.rope.interleaved:
        return 0
    return 2 if op.spec.caches_pairs else 1


def _weight(norm: RMSNorm) -> Tensor:
    """Return what a norm multiplies by."""
    return norm.offset + norm.weight.float() if norm.offset else norm.weight
