"""Linear layers; several checkpoint matrices may be stacked into one, so that one product computes them all."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


class Linear:
    """`x @ weight.T + bias`; `weight` is `[out, in]`, `bias` `[out]` or absent."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """`[N, in]` to `[N, out]`."""
        return F.linear(x, self.weight, self.bias)
