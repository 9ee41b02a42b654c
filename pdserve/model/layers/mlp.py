"""The feed-forward half of a layer: what all kinds have in common, and the dense one."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from pdserve.base.parallel import part_of
from pdserve.model.layers.kernels import Kernels
from pdserve.model.layers.linear import Outputs, column_linear, row_linear
from pdserve.model.parallel import Parallel
from pdserve.model.params import ParamSlots


class FeedForward(Protocol):
    """One layer's feed-forward, on one rank."""

    def __call__(self, x: Tensor) -> Tensor:
        """`[N, hidden]`, equal on all tensor ranks, to `[N, hidden]`, equal on all tensor ranks."""
        ...


class DenseMLP:
    """Gated by SiLU; the tensor ranks split its columns."""

    def __init__(
        self,
        kernels: Kernels,
        params: ParamSlots,
        prefix: str,
        hidden_size: int,
        intermediate_size: int,
        bias: bool,
        parallel: Parallel,
    ) -> None:
        self._kernels, self._parallel = kernels, parallel
        place = parallel.place
        inner = part_of(intermediate_size, place.shape.tp_size, place.tp_rank)
        gate, up = (Outputs(prefix + name, intermediate_size, inner) for name in ("gate_proj", "up_proj"))
        self._gate_up = column_linear(kernels, params, (gate, up), hidden_size, bias)
        first = place.tp_rank == 0
        self._down = row_linear(kernels, params, prefix + "down_proj", hidden_size, gate, bias=bias, adds_bias=first)

    def __call__(self, x: Tensor) -> Tensor:
        """See `FeedForward`."""
        gate, up = self._gate_up(x).chunk(2, -1)
        return self._parallel.all_reduce(self._down(self._kernels.swiglu(gate, up)))
