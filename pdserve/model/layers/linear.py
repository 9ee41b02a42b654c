"""Linear layers; several checkpoint matrices may be stacked into one, so that one product computes them all."""

from __future__ import annotations

from torch import Tensor

from pdserve.model.layers.kernels import Kernels


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
