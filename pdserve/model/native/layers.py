"""This rank's part of feed-forward layers whose tokens travel between ranks, computed by the CPU kernels.

`Packer` installs these in place of the torch computation. The layers and the exchange of tokens are unchanged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from pdserve.model.attention.interface import Heads
from pdserve.model.forward_batch import ForwardBatch
from pdserve.model.layer_spec import MoeSpec
from pdserve.model.layers.moe import Routes
from pdserve.model.native.weights import Packed


class AttentionInProgram:
    """Implements `AttentionBackend` and `StepAttention` for `NativeDecoder`, whose program computes attention."""

    def begin(self, batch: ForwardBatch) -> AttentionInProgram:
        """See `AttentionBackend.begin`. Does nothing: the program reads the pages in place."""
        return self

    def capturing(self) -> None:
        """See `AttentionBackend.capturing`. Returns None."""

    def attend(self, layer: int, heads: Heads) -> Tensor:
        """Must not be called."""
        raise AssertionError("attention is an operation of the program")


@dataclasses.dataclass(frozen=True)
class NativeFeedForward:
    """A rank's columns of a dense layer; see `DenseMLP.product`."""

    gate_up: Packed
    down: Packed

    def __call__(self, x: Tensor) -> Tensor:
        """Map `[N, hidden]` to a partial sum of `[N, hidden]`."""
        wide, deep = self.gate_up, self.down
        summand: Tensor = torch.ops.pdserve.feed_forward(
            x, wide.data, wide.scale, wide.bias, deep.data, deep.scale, deep.bias
        )
        return summand


@dataclasses.dataclass(frozen=True)
class PackedRouter:
    """The router of a MoE layer with packed weights; see `Router`."""

    weight: Packed
    moe: MoeSpec

    def __call__(self, x: Tensor) -> Routes:
        """Return the routes of `[N, hidden]`. Scores are not rounded to the dtype of `x`."""
        packed = self.weight
        scores = torch.ops.pdserve.linear(x.float(), packed.data, packed.scale, packed.bias, packed.num_out)
        return Routes(*torch.ops.pdserve.route(scores, self.moe.top_k, self.moe.norm_top_k))


@dataclasses.dataclass(frozen=True)
class PackedExperts:
    """Implements `LocalExperts`."""

    gate_up: Packed
    down: Packed

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
            x, routes.experts, routes.weights, wide.data, wide.scale, deep.data, deep.scale
        )
        return mixed
