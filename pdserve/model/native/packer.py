"""Packs a decoder's weights layer by layer as they are loaded, and drops the originals. Called by `NativeDecoder`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager

from pdserve.model.decoder import DecoderLayer
from pdserve.model.layers.dense import DenseMLP, Linear
from pdserve.model.layers.expert_parallel import ExpertParallelMoe
from pdserve.model.layers.moe import Experts, TPMoE
from pdserve.model.native.layers import NativeFeedForward, PackedExperts, PackedRouter
from pdserve.model.native.weights import Arena, Format, Packed, open_packed
from pdserve.model.params import ParamSlots


@dataclasses.dataclass(frozen=True)
class PackedLayer:
    """Packed linear layers of one decoder layer.

    `gate_up` and `down` hold one layer, or one layer per expert of `mixture`. They are None when the whole feed-forward
    runs in Python at a stop.
    """

    qkv: Packed
    out: Packed
    gate_up: Packed | None = None
    down: Packed | None = None
    mixture: PackedMoe | None = None


@dataclasses.dataclass(frozen=True)
class PackedMoe:
    """The router and the layer object of a MoE layer, apart from its experts."""

    router: Packed
    layer: TPMoE


@dataclasses.dataclass(frozen=True)
class Packer:
    """Makes packed layers that receive their weights once `params` has them."""

    arena: Arena
    format: Format
    params: ParamSlots
    packing: Callable[[], AbstractContextManager[object]]

    def layer(self, layer: DecoderLayer) -> PackedLayer:
        """Pack one layer. Takes ownership of its weights."""
        qkv, out = self.linear(layer.qkv), self.linear(layer.out)
        mlp = layer.mlp
        if isinstance(mlp, DenseMLP):
            gate_up, down = self.linear(mlp.gate_up, num_parts=2), self.linear(mlp.down)
            if not mlp.wide.spans_replicas:
                return PackedLayer(qkv, out, gate_up, down)
            mlp.product = NativeFeedForward(gate_up, down)
            return PackedLayer(qkv, out)
        assert isinstance(mlp, TPMoE | ExpertParallelMoe) and isinstance(mlp.experts, Experts), mlp
        gate_up, down = self.experts(mlp.experts)
        router = self.linear(mlp.router.linear, format="bf16")
        if isinstance(mlp, TPMoE) and not mlp.wide.spans_replicas:
            return PackedLayer(qkv, out, gate_up, down, PackedMoe(router, mlp))
        mlp.route, mlp.experts = PackedRouter(router, mlp.router.moe), PackedExperts(gate_up, down)
        return PackedLayer(qkv, out)

    def experts(self, experts: Experts) -> tuple[Packed, Packed]:
        """Pack all experts' gate and up, and down. Drops the originals."""
        count, wide, hidden_size = experts.gate_up.shape
        gate_up = open_packed(self.arena, self.format, wide, hidden_size, num_parts=2, count=count)
        down = open_packed(self.arena, self.format, hidden_size, wide // 2, count=count)

        def take() -> None:
            with self.packing():
                for packed, weights in ((gate_up, experts.gate_up), (down, experts.down)):
                    for index, weight in enumerate(weights):
                        packed.put(weight, index=index)
                    self.params.release_weights(weights, packed.num_bytes)
                experts.release_weights()

        self.params.when_given([experts.gate_up, experts.down], take)
        return gate_up, down

    def linear(
        self, linear: Linear, *, num_parts: int = 1, keeps: bool = False, format: Format | None = None
    ) -> Packed:
        """Pack a linear layer. Drops the original unless `keeps` is set, which means it is needed elsewhere too."""
        num_out, num_in = linear.weight.shape
        has_bias, kind = linear.bias is not None, format or self.format
        packed = open_packed(self.arena, kind, num_out, num_in, has_bias=has_bias, num_parts=num_parts)

        def take() -> None:
            with self.packing():
                packed.put(linear.weight, linear.bias)
                if keeps:
                    self.params.add_bytes(packed.num_bytes)
                else:
                    self.params.release_weights(linear.weight, packed.num_bytes)
                    linear.release_weights()

        self.params.when_given([linear.weight] if linear.bias is None else [linear.weight, linear.bias], take)
        return packed
