"""Quantized weights of a `Decoder` on a CUDA device: they stay packed, and Triton kernels multiply with them.

`packable` says which parameters that are. `keep_packed` makes a layer's weight a `PackedWeight` as soon as the loader
has filled it, in host memory, and drops the original. All other weights are dequantized, as without this module.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from pdserve.model.decoder import Attention, Decoder
from pdserve.model.gated_delta_net import GatedDeltaNet
from pdserve.model.gpu import packed_gemm
from pdserve.model.gpu.packed_gemm import PackedWeight
from pdserve.model.grouped_weights import GroupFormat, common_format, stacked
from pdserve.model.layer_spec import ExpertActivation
from pdserve.model.layers.dense import DenseMLP, Linear
from pdserve.model.layers.expert_parallel import ExpertParallelMoe
from pdserve.model.layers.kernels import Kernels
from pdserve.model.layers.moe import Experts, Routes, SharedExpert, TPMoE
from pdserve.model.mla import MLA
from pdserve.model.params import ParamSlots

MoE = TPMoE | ExpertParallelMoe


def packable(model: Decoder, formats: Mapping[str, GroupFormat]) -> set[str]:
    """Return the names of the parameters of `model` that `keep_packed` packs.

    `formats`: those of the checkpoint's quantized weights, by parameter.
    """
    pairs = [(experts.weights.gate_up, experts.weights.down) for _, experts in _experts(model)]
    found = [*((linear.weight,) for linear in _linears(model)), *pairs]
    kept = [weights for weights in found if _formats_of(model.params, weights, formats) is not None]
    return {param.name for weights in kept for weight in weights for param in model.params.params_in(weight)}


def keep_packed(model: Decoder, formats: Mapping[str, GroupFormat], device: torch.device) -> None:
    """Pack the weights of `packable` on `device`, each once it is filled."""
    for linear in _linears(model):
        forms = _formats_of(model.params, (linear.weight,), formats)
        if forms is not None:
            _pack_linear(model.params, linear, forms[0], device)
    for moe, experts in _experts(model):
        forms = _formats_of(model.params, (experts.weights.gate_up, experts.weights.down), formats)
        if forms is not None:
            _pack_experts(model, moe, experts, forms, device)


@dataclasses.dataclass(frozen=True)
class TritonPackedLinear:
    """Implements `PackedProduct`."""

    weight: PackedWeight

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """See `PackedProduct`."""
        return packed_gemm.linear(x, self.weight, bias)


@dataclasses.dataclass(frozen=True)
class TritonPackedExperts:
    """Implements `LocalExperts`. `biases` are those of `gate_up` and of `down`; `act` and `limit`: see `MoeSpec`."""

    kernels: Kernels
    gate_up: PackedWeight
    down: PackedWeight
    biases: tuple[Tensor | None, Tensor | None]
    act: ExpertActivation
    limit: float | None

    @property
    def tensors(self) -> Sequence[Tensor]:
        """See `LocalExperts`."""
        biases = [bias for bias in self.biases if bias is not None]
        return [*self.gate_up.tensors, *self.down.tensors, *biases]

    def __call__(self, x: Tensor, slots: Tensor) -> Tensor:
        """See `LocalExperts`."""
        return packed_gemm.expert_rows(x, slots, self.gate_up, self.down, *self.biases, self.act, self.limit)

    def mixed(self, x: Tensor, routes: Routes) -> Tensor:
        """See `LocalExperts`."""
        outputs = self(x, routes.experts.flatten())
        return self.kernels.weighted_sum(outputs.view(*routes.experts.shape, x.shape[1]), routes.weights)


def _pack_linear(params: ParamSlots, linear: Linear, form: GroupFormat, device: torch.device) -> None:
    """Pack the weight of a linear layer once it is filled."""
    weight = linear.weight
    params.keep_quantized(weight)

    def take() -> None:
        packed = PackedWeight.empty(form, 1, weight.shape[0], weight.shape[1], device)
        packed.put(0, stacked(params.take_quantized(weight), form))
        params.release_weights(weight, packed.num_bytes)
        linear.release_weights()
        linear.packed = TritonPackedLinear(packed)

    params.when_given([weight], take)


def _pack_experts(
    model: Decoder, moe: MoE, experts: Experts, forms: Sequence[GroupFormat], device: torch.device
) -> None:
    """Pack the weights of a layer's experts once they are filled. Their biases stay as they are."""
    params = model.params
    weights = experts.weights
    wholes = weights.gate_up, weights.down
    for whole in wholes:
        params.keep_quantized(whole)

    def take() -> None:
        made = []
        for whole, form in zip(wholes, forms, strict=True):
            packed = PackedWeight.empty(form, len(whole), whole.shape[1], whole.shape[2], device)
            parts = params.take_quantized(whole)
            each = len(parts) // len(whole)
            for index in range(len(whole)):
                packed.put(index, stacked(parts[index * each : (index + 1) * each], form))
            params.release_weights(whole, packed.num_bytes)
            made.append(packed)
        biases = weights.gate_up_bias, weights.down_bias
        moe.experts = TritonPackedExperts(model.kernels, made[0], made[1], biases, weights.act, weights.act_limit)
        experts.release_weights()

    params.when_given(wholes, take)


def _linears(model: Decoder) -> Iterator[Linear]:
    """Yield the linear layers whose weights nothing but their product reads."""
    for op in (op for layer in model.layers for op in layer.operations):
        found: tuple[Linear | None, ...] = ()
        if isinstance(op, Attention):
            found = op.qkv, op.out
        elif isinstance(op, MLA):
            found = op.q_a, op.q, op.kv_a, op.out
        elif isinstance(op, GatedDeltaNet):
            found = op.project, op.out
        elif isinstance(op, DenseMLP):
            found = op.gate_up, op.down
        elif isinstance(op, MoE) and isinstance(op.shared, SharedExpert):
            found = op.shared.gate_up, op.shared.down
        yield from (linear for linear in found if linear is not None)


def _experts(model: Decoder) -> Iterator[tuple[MoE, Experts]]:
    """Yield the layers with experts whose weights are not packed yet."""
    for op in (op for layer in model.layers for op in layer.operations):
        if isinstance(op, MoE) and isinstance(op.experts, Experts):
            yield op, op.experts


def _formats_of(
    params: ParamSlots, weights: Sequence[Tensor], formats: Mapping[str, GroupFormat]
) -> list[GroupFormat] | None:
    """Return the format in which each of `weights` stays packed; None: one of them does not."""
    kept = []
    for weight in weights:
        found = params.formats_in(weight, formats)
        form = common_format(found) if found else None
        if form is None:
            return None
        kept.append(form)
    return kept
