"""The feed-forward half of a layer: what all kinds have in common, and the dense one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from pdserve.base.parallel import part_of
from pdserve.model.layers.kernels import Kernels
from pdserve.model.layers.linear import Outputs, column_linear, row_linear
from pdserve.model.params import ParamSlots
from pdserve.model.wide import DPAttentionGroup


class FeedForward(Protocol):
    """One layer's feed-forward, on one rank."""

    def __call__(self, x: Tensor) -> Tensor:
        """`[N, hidden]`, equal on all tensor ranks, to `[N, hidden]`, equal on all tensor ranks.

        All ranks of `Parallel.wide` call it together; N may be 0.
        """
        ...


class DenseMLP:
    """Gated by SiLU; the ranks of `wide` split its columns."""

    def __init__(
        self,
        kernels: Kernels,
        params: ParamSlots,
        prefix: str,
        hidden_size: int,
        intermediate_size: int,
        bias: bool,
        wide: DPAttentionGroup,
    ) -> None:
        self._kernels, self.wide = kernels, wide
        self.product: Callable[[Tensor], Tensor] | None = None
        """What computes this rank's columns in our place: `[N, hidden]` to a summand of `[N, hidden]`."""
        inner = part_of(intermediate_size, wide.size, wide.rank)
        gate, up = (Outputs(prefix + name, intermediate_size, inner) for name in ("gate_proj", "up_proj"))
        self.gate_up = column_linear(kernels, params, (gate, up), hidden_size, bias)
        first = wide.rank == 0
        self.down = row_linear(kernels, params, prefix + "down_proj", hidden_size, gate, bias=bias, adds_bias=first)

    def __call__(self, x: Tensor) -> Tensor:
        """See `FeedForward`."""
        x = self.wide.gather(x)
        if self.product is not None:
            return self.wide.add_up(self.product(x))
        gated = self._kernels.gated(x, self.gate_up.weight, self.gate_up.bias)
        return self.wide.add_up(self.down(gated))
