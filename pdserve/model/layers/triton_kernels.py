"""The arithmetic of decoder layers on CUDA: cuBLAS for products of many rows, Triton kernels for all else.

Made by the executor factory when attention is not torch's; called by the layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdserve.model.expert_math import ExpertWeights
from pdserve.model.gpu import elementwise, experts, routes, small_batch_gemm
from pdserve.model.gpu import fused_qk_norm_rope_cache as heads
from pdserve.model.layer_spec import Activation, MoeSpec
from pdserve.model.layers.kernels import FastKernels


class TritonKernels(FastKernels):
    """Implements `Kernels`."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See `Kernels.linear`."""
        if small_batch_gemm.fits(x, weight):
            return small_batch_gemm.linear(x, weight, bias)
        return super().linear(x, weight, bias)

    def gated(self, x: Tensor, weight: Tensor, bias: Tensor | None, act: Activation = "silu") -> Tensor:
        """See `Kernels.gated`."""
        if small_batch_gemm.fits(x, weight):
            return small_batch_gemm.gated(x, weight, bias, act)
        return super().gated(x, weight, bias, act)

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """See `Kernels.swiglu`."""
        return elementwise.swiglu(gate, up)

    def geglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """See `TorchKernels.geglu`."""
        return elementwise.geglu(gate, up)

    def gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """See `Kernels.gate`."""
        if x.dim() == 2:
            return elementwise.gate_by_sigmoid(x[:, None], gate[:, None])[:, 0]
        return elementwise.gate_by_sigmoid(x, gate)

    def norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        """See `Kernels.norm`."""
        return elementwise.rms_norm(x, weight, eps, offset)

    def add_norm(self, x: Tensor, more: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        """See `Kernels.add_norm`."""
        return elementwise.add_rms_norm(x, more, weight, eps, offset)

    def angles(self, positions: Tensor, inverse: Tensor, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """See `Kernels.angles`."""
        return heads.angle_tables(positions, inverse, factor, dtype)

    def route(self, logits: Tensor, moe: MoeSpec, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See `Kernels.route`."""
        return routes.route(logits, moe, correction)

    def experts(self, x: Tensor, slots: Tensor, weights: ExpertWeights) -> Tensor:
        """See `Kernels.experts`. Does not synchronise with the host."""
        return experts.expert_rows(x, slots, weights)

    def weighted_sum(self, outputs: Tensor, weights: Tensor) -> Tensor:
        """See `Kernels.weighted_sum`."""
        return experts.weighted_sum(outputs, weights)
