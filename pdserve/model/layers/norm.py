"""Root-mean-square normalisation (arXiv:1910.07467)."""

from __future__ import annotations

import torch
from torch import Tensor


class RMSNorm:
    """Normalises the last dimension in float32, then scales by `weight` in the input's dtype."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """The normalised `x`, same shape and dtype."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale).to(x.dtype) * self.weight
