"""Root-mean-square normalisation (arXiv:1910.07467)."""

from __future__ import annotations

from torch import Tensor

from pdserve.model.layers.kernels import Kernels


class RMSNorm:
    """Normalises the last dimension in float32, then scales by `weight` in the input's dtype."""

    def __init__(self, weight: Tensor, eps: float, kernels: Kernels) -> None:
        self.weight = weight
        self.eps = eps
        self._kernels = kernels

    def __call__(self, x: Tensor) -> Tensor:
        """The normalised `x`, same shape and dtype."""
        return self._kernels.norm(x, self.weight, self.eps)

    def of_sum(self, x: Tensor, more: Tensor) -> Tensor:
        """The normalised `x + more`, which replaces `x`."""
        return self._kernels.add_norm(x, more, self.weight, self.eps)
