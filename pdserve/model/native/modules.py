"""Modules with packed weights outside of the program: layers whose tokens travel between ranks, and single layers.

`Packer` and `NativeDecoder.pack` make them. Each call runs operations of `native/ops.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from pdserve.model.layer_spec import Activation, MoeSpec
from pdserve.model.layers.moe import Routes
from pdserve.model.native.weights import Packed


@dataclasses.dataclass(frozen=True)
class PackedLinear:
    """A linear layer outside of the program."""

    weight: Packed

    def __call__(self, x: Tensor) -> Tensor:
        """Map `[N, in]` to `[N, out]`, in the dtype of `x`."""
        packed = self.weight
        product: Tensor = torch.ops.pdserve.linear(x, packed.data, packed.scale, packed.bias, packed.num_out)
        return product


@dataclasses.dataclass(frozen=True)
class NativeFeedForward:
    """A rank's columns of a dense layer; see `DenseMLP.product`."""

    gate_up: Packed
    down: Packed
    act: Activation = "silu"

    def __call__(self, x: Tensor) -> Tensor:
        """Map `[N, hidden]` to a partial sum of `[N, hidden]`."""
        wide, deep = self.gate_up, self.down
        summand: Tensor = torch.ops.pdserve.feed_forward(
            x, wide.data, wide.scale, wide.bias, deep.data, deep.scale, deep.bias, self.act
        )
        return summand


@dataclasses.dataclass(frozen=True)
class PackedShared:
    """Packed linear layers of a `SharedExpert`. `router` is that of its gate; None: it has no gate."""

    gate_up: Packed
    down: Packed
    router: Packed | None

    def __call__(self, x: Tensor) -> Tensor:
        """Map `[N, hidden]` to this rank's columns' part of `[N, hidden]`."""
        part = NativeFeedForward(self.gate_up, self.down)(x)
        router = self.router
        if router is None:
            return part
        gate: Tensor = torch.ops.pdserve.linear(x.float(), router.data, router.scale, router.bias, router.num_out)
        return part * gate.sigmoid().to(part.dtype)


@dataclasses.dataclass(frozen=True)
class PackedRouter:
    """The router of a MoE layer with packed weights; see `Router`."""

    weight: Packed
    moe: MoeSpec
    correction: Tensor | None

    def __call__(self, x: Tensor) -> Routes:
        """Return the routes of `[N, hidden]`. Scores are not rounded to the dtype of `x`."""
        packed, moe = self.weight, self.moe
        scores = torch.ops.pdserve.linear(x.float(), packed.data, packed.scale, packed.bias, packed.num_out)
        return Routes(
            *torch.ops.pdserve.route(
                scores, moe.top_k, moe.norm_top_k, moe.scoring == "sigmoid", self.correction, moe.num_groups,
                moe.top_groups, moe.routed_scale,
            )
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class PackedExperts:
    """Implements `LocalExperts`."""

    gate_up: Packed
    down: Packed
    moe: MoeSpec

    @property
    def tensors(self) -> Sequence[Tensor]:
        """See `LocalExperts`."""
        return [*self.gate_up.tensors, *self.down.tensors]

    def __call__(self, x: Tensor, slots: Tensor) -> Tensor:
        """See `LocalExperts`."""
        return self.mixed(x, Routes(slots[:, None], torch.ones(len(slots), 1)))

    def mixed(self, x: Tensor, routes: Routes) -> Tensor:
        """See `LocalExperts`."""
        wide, deep = self.gate_up, self.down
        mixed: Tensor = torch.ops.pdserve.experts(
            x, routes.experts, routes.weights, wide.data, wide.scale, deep.data, deep.scale, wide.bias, deep.bias,
            self.moe.act, self.moe.act_limit,
        )  # fmt: skip
        return mixed
