"""Rotary position embedding over the halves of a head, as Llama and Qwen do it."""

from __future__ import annotations

import torch
from torch import Tensor

from pdserve.model.rope import RopeSpec, inverse_frequencies


class Rotary:
    """Angles for one model. Called once a step; the tables serve all layers."""

    def __init__(self, rope: RopeSpec, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self._inverse = inverse_frequencies(rope, head_dim).to(device)
        self._factor = rope.attention_factor
        self._dtype = dtype

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """`(cos, sin)`, each `[N, 1, head_dim]`; the first half of sin is negated, so that `rotate` is two products."""
        angles = positions.to(torch.float32)[:, None, None] * self._inverse
        cos, sin = angles.cos() * self._factor, angles.sin() * self._factor
        return torch.cat((cos, cos), -1).to(self._dtype), torch.cat((-sin, sin), -1).to(self._dtype)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `[N, num_heads, head_dim]` by the angles of `Rotary.tables`."""
    return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, -1), sin)
