"""What a mixture of experts computes: its weights, and in torch the choice of experts and the activation.

`layers/kernels.py` calls the functions; the Triton kernels (`gpu/experts.py`, `gpu/routes.py`) compute the same. Their
bits do not depend on the batch.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from pdserve.model.layer_spec import ExpertActivation, MoeSpec

TINY = 1e-20
"""Added to the sum of a token's sigmoid scores before they are divided by it."""
SIGMOID_SLOPE = 1.702
"""Factor of the gate in the sigmoid of gpt-oss' activation."""


@dataclasses.dataclass(frozen=True)
class ExpertWeights:
    """Weights of experts, one slot each, and how an expert combines gate and up.

    `gate_up` is `[slots, 2 * inner, hidden]`, `down` `[slots, hidden, inner]`. `gate_up_bias` `[slots, 2 * inner]` and
    `down_bias` `[slots, hidden]` are None without biases. `act` and `act_limit`: see `MoeSpec`.
    """

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    act: ExpertActivation = "silu"
    act_limit: float | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors, `[slots, ...]` each."""
        every = (self.gate_up, self.down, self.gate_up_bias, self.down_bias)
        return tuple(tensor for tensor in every if tensor is not None)


def choose_experts(logits: Tensor, moe: MoeSpec, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Choose the experts of each token from the outputs `[N, E]` of a router.

    `correction` float32 `[E]` is the bias of `MoeSpec.correction_bias`. Returns the experts, best first, int64
    `[N, top_k]`, and their weights, float32 `[N, top_k]`.
    """
    is_sigmoid = moe.scoring == "sigmoid"
    scores = _sigmoid(logits.float()) if is_sigmoid else logits.softmax(-1, dtype=torch.float32)
    choice = scores if correction is None else scores + correction
    if moe.num_groups > 1:
        choice = _in_best_groups(choice, moe)
    best = choice.topk(moe.top_k, -1)
    weights = best.values if correction is None else scores.gather(-1, best.indices)
    if moe.norm_top_k:
        total = weights.sum(-1, keepdim=True)
        weights = weights / (total + TINY if is_sigmoid else total)
    return best.indices, weights if moe.routed_scale == 1.0 else weights * moe.routed_scale


def clamped_gate(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    """Combine gate and up `[N, inner]` of an expert with the activation "gpt_oss" of `MoeSpec`, in float32."""
    wide, up_wide = gate.float(), up.float()
    if limit is not None:
        wide, up_wide = wide.clamp(max=limit), up_wide.clamp(-limit, limit)
    return (wide * _sigmoid(SIGMOID_SLOPE * wide) * (up_wide + 1.0)).to(gate.dtype)


def _in_best_groups(choice: Tensor, moe: MoeSpec) -> Tensor:
    """Set the scores `[N, E]` outside of each token's `top_groups` best groups to -inf; see `MoeSpec`."""
    grouped = choice.view(len(choice), moe.num_groups, moe.num_experts // moe.num_groups)
    if moe.scoring == "sigmoid":
        of_group = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1)
    else:
        of_group = grouped.amax(-1)
    best = of_group.topk(moe.top_groups, -1).indices
    is_out = torch.ones_like(of_group, dtype=torch.bool).scatter_(1, best, False)
    return grouped.masked_fill(is_out[:, :, None], -math.inf).flatten(1)


def _sigmoid(x: Tensor) -> Tensor:
    """Compute the sigmoid by exp, for the reason given in `BatchInvariantKernels.swiglu`."""
    return 1.0 / (1.0 + torch.exp(-x))
