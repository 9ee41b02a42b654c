"""Records GatedDeltaNet layers, layers with experts and the heads of attention in a `Program`, for `NativeDecoder`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from pdserve.memory.layout import PageSpace
from pdserve.model.attention.page_gather import GroupPool, places_in
from pdserve.model.decoder import Attention
from pdserve.model.layer_spec import MoeSpec
from pdserve.model.layers.gated_delta import CONV_PLANES, PendingTokens
from pdserve.model.layers.kernels import Rotary
from pdserve.model.mla import MLA
from pdserve.model.native.delta import DeltaShape, DeltaStates
from pdserve.model.native.latents import LatentProgram, LayerHeads, MakeBuffer, index_shape, latent_shape
from pdserve.model.native.packer import PackedDelta, PackedMoe
from pdserve.model.native.program import Program
from pdserve.model.native.resources import Buffer, HeadShape

Norm = tuple[Tensor | None, float]
"""Weights of the RMS norm of the inputs, or None, and its epsilon."""


class LayerPlaces:
    """Where the layers of a rank lie in its pools, and the program's heads of those that attend.

    `rotaries`: those of the model. `first`: the number in the layout of the rank's first layer. Layers are counted from
    it.
    """

    def __init__(
        self, program: LatentProgram, rotaries: Sequence[Rotary], pools: Sequence[GroupPool], first: int
    ) -> None:
        self._program, self._rotaries = program, rotaries
        self._places, self._index_places = (places_in(pools, first, of_index=of_index) for of_index in (False, True))
        self._heads: dict[tuple[GroupPool, HeadShape, int | None], int] = {}

    def of(self, layer: int) -> tuple[GroupPool, int]:
        """Return the pool of a layer's KV or states, and the layer's number there."""
        return self._places[layer]

    def heads_of(self, layer: int, op: Attention | MLA) -> LayerHeads:
        """Return the program's heads of a layer."""
        pool, index = self._places[layer]
        group = pool.group
        if isinstance(op, MLA):
            shape = latent_shape(group, op)
        else:
            of_window = group.space is PageSpace.WINDOW
            shape = HeadShape(
                group.num_layers, op.num_heads, group.num_kv_heads, group.page_tokens, group.head_dim, of_window,
                op.spec.scale, kv_dtype=group.dtype,
            )  # fmt: skip
        return LayerHeads(self._add_heads(pool, shape, op.rotary), index)

    def index_of(self, layer: int, op: Attention | MLA) -> LayerHeads | None:
        """Return the program's heads of a layer's index (DSA); None without one."""
        if isinstance(op, Attention) or op.index is None:
            return None
        pool, index = self._index_places[layer]
        return LayerHeads(self._add_heads(pool, index_shape(pool.group, op.index), op.rotary), index)

    def _add_heads(self, pool: GroupPool, shape: HeadShape, rotary: int | None) -> int:
        """Return the program's number of heads; layers with equal heads over one pool share it."""
        key = (pool, shape, rotary)
        if key not in self._heads:
            number = self._program.add_heads(shape, pool.pages)
            if rotary is not None:
                angles = self._rotaries[rotary]
                self._program.angles(angles.inverse, angles.factor, heads=number)
            self._heads[key] = number
        return self._heads[key]


def record_delta(
    program: LatentProgram,
    buffer: MakeBuffer,
    x: Buffer,
    norm: Norm,
    weights: PackedDelta,
    pool: GroupPool,
    index: int,
    pending: PendingTokens | None,
) -> Buffer:
    """Record the projections of a GatedDeltaNet layer, then its recurrence, and return the recurrence's output.

    `pool` has the states; the layer is `index` there. `pending`: tokens that the states do not cover yet.
    """
    op, (weight, eps) = weights.op, norm
    planes = {plane.name: pool.plane(index, number) for number, plane in enumerate(pool.group.planes)}
    conv_q, conv_k, conv_v = (planes[name] for name in CONV_PLANES)
    shape = DeltaShape(
        op.num_key_heads, op.num_value_heads, op.key_dim, op.value_dim, op.conv_weight.shape[1],
        channel_decay=op.low_rank is not None,
    )  # fmt: skip
    inputs, mixed = buffer("delta", weights.project.num_out), buffer("mixed", shape.value_width)
    program.linear(x, weights.project, inputs, norm=weight, eps=eps)
    gates: Buffer | None = None
    if weights.gates is not None:
        gates, num_heads = buffer("gates", shape.gate_width), op.num_value_heads
        program.head_product(
            inputs, weights.gates, gates, num_heads=2 * num_heads, first=shape.width, sharing=num_heads
        )
    program.delta(
        inputs, shape, DeltaStates((conv_q, conv_k, conv_v), planes["state"], pending),
        op.conv_weight, -op.a_log.float().exp(), op.dt_bias, op.norm_weight, op.eps, mixed, gates,
    )  # fmt: skip
    return mixed


@dataclasses.dataclass(frozen=True)
class RoutingBuffers:
    """Buffers of a program that all layers with experts share: router logits, and the experts of tokens and their
    weights.
    """

    scores: Buffer
    routes: Buffer
    shares: Buffer

    @staticmethod
    def of(program: Program, moe: MoeSpec) -> RoutingBuffers:
        """Allocate them."""
        routes = program.buffer(moe.top_k, torch.int64)
        return RoutingBuffers(program.buffer(moe.num_experts), routes, program.buffer(moe.top_k))


def record_moe(
    program: Program,
    buffer: MakeBuffer,
    x: Buffer,
    norm: Norm,
    weights: PackedMoe,
    routing: RoutingBuffers,
    out: Buffer,
    *,
    add: bool,
) -> None:
    """Record the router and the experts of one layer. `out` may be `x`, so what reads `x` comes first."""
    op, shared, (weight, eps) = weights.op, weights.shared, norm
    router, gate = op.router, None if shared is None else shared.router
    program.linear(x, weights.router, routing.scores, norm=weight, eps=eps)
    program.route(routing.scores, routing.routes, routing.shares, router.moe, router.correction)
    if shared is not None:
        program.gated(x, shared.gate_up, norm=weight, eps=eps)
    if shared is not None and gate is not None:
        mixed, gates = buffer("shared", out.width), buffer("shared_gate", 1)
        program.linear(None, shared.down, mixed)
        program.linear(x, gate, gates, norm=weight, eps=eps)
    program.experts(
        x, weights.gate_up, weights.down, routing.routes, routing.shares, out,
        norm=weight, eps=eps, act=router.moe.act, limit=router.moe.act_limit, counts=op.counts, add=add,
    )  # fmt: skip
    if shared is not None and gate is None:
        program.linear(None, shared.down, out, add=True)
    elif shared is not None:
        program.sigmoid(mixed, gates, out, add=True)
