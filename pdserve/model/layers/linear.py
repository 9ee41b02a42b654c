"""Linear layers; several checkpoint matrices may be stacked into one, so that one product computes them all.

`column_linear` and `row_linear` make those of a split model (arXiv:1909.08053): the first has its outputs split over
the tensor ranks, the second takes such outputs as its inputs, and what the ranks compute adds up to the result.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from pdserve.model.layers.kernels import Kernels
from pdserve.model.params import Param, ParamSlots


class Linear:
    """`x @ weight.T + bias`; `weight` is `[out, in]`, `bias` `[out]` or absent."""

    def __init__(self, kernels: Kernels, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self._kernels = kernels
        num_out, num_in = weight.shape
        kernels.prepare_linear(num_out, num_in, weight.dtype, weight.device, bias is not None)

    def __call__(self, x: Tensor) -> Tensor:
        """`[N, in]` to `[N, out]`."""
        return self._kernels.linear(x, self.weight, self.bias)

    def give_away(self) -> None:
        """Let go of the weights, which others have made something else of. There are no calls after this."""
        self.weight = self.weight.new_empty(0)


@dataclasses.dataclass(frozen=True)
class Outputs:
    """The checkpoint's linear layer `name` has `total` outputs, of which a rank computes `held`."""

    name: str
    total: int
    held: range


def column_linear(kernels: Kernels, params: ParamSlots, parts: tuple[Outputs, ...], num_in: int, bias: bool) -> Linear:
    """One layer that stacks what is held of `parts`: `[N, num_in]` to `[N, sum of held]`."""
    weight = params.stacked(*(Param(f"{part.name}.weight", (part.total, num_in), 0, part.held) for part in parts))
    biases = None
    if bias:
        biases = params.stacked(*(Param(f"{part.name}.bias", (part.total,), 0, part.held) for part in parts))
    return Linear(kernels, weight, biases)


def row_linear(
    kernels: Kernels, params: ParamSlots, name: str, num_out: int, inputs: Outputs, *, bias: bool, adds_bias: bool
) -> Linear:
    """`[N, held of inputs]` to a summand of `[N, num_out]`, which takes `inputs` in; one rank `adds_bias` to it."""
    weight = params.stacked(Param(f"{name}.weight", (num_out, inputs.total), 1, inputs.held))
    biases = None
    if bias and adds_bias:
        biases = params.new(f"{name}.bias", num_out)
    elif bias:
        params.ignore(f"{name}.bias")
    return Linear(kernels, weight, biases)
