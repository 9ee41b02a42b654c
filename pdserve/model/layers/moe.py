"""Mixture of experts: the router, the experts' weights, and the tensor-parallel MoE layer.

`TPMoE` is the layer without expert parallelism: each rank has some columns of every expert. `expert_parallel` has the
layer with whole experts on each rank. A shared expert computes every token beside the routed ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from pdserve.base.parallel import part_of
from pdserve.model.dp_attention import DPAttentionGroup
from pdserve.model.expert_math import ExpertWeights
from pdserve.model.layer_spec import LayerNames, MoeSpec
from pdserve.model.layers.dense import Linear, Outputs, column_linear, row_linear
from pdserve.model.layers.kernels import Kernels
from pdserve.model.params import EXPERT_SAMPLES, Param, ParamSlots
from pdserve.model.tensor_sources import ParamPiece


@dataclasses.dataclass(frozen=True)
class Routes:
    """Routing of tokens: `experts` int64 `[N, top_k]`, best first, and `weights` float32 `[N, top_k]`."""

    experts: Tensor
    weights: Tensor


class Router:
    """Scores of all experts, and the choice among them; see `MoeSpec`."""

    def __init__(self, kernels: Kernels, params: ParamSlots, names: LayerNames, moe: MoeSpec, hidden_size: int) -> None:
        self._kernels = kernels
        weight = params.new(f"{names.router}.weight", moe.num_experts, hidden_size)
        bias = params.new(f"{names.router}.bias", moe.num_experts) if moe.router_bias else None
        self.linear = Linear(kernels, weight, bias)
        self.correction: Tensor | None = None
        """Float32 `[num_experts]`: the bias that is added to the scores for the choice only."""
        if moe.correction_bias:
            self.correction = params.stacked(Param(names.correction, (moe.num_experts,)), dtype=torch.float32)
        self.moe = moe
        self._is_wide = moe.scoring == "sigmoid" and weight.dtype != torch.float32
        if self._is_wide:
            kernels.prepare_linear(moe.num_experts, hidden_size, torch.float32, weight.device, bias=bias is not None)

    def __call__(self, x: Tensor) -> Routes:
        """Return the routes of `[N, hidden]`. Sigmoid scores, which lie close together, come from float32 products."""
        linear = self.linear
        if self._is_wide:
            bias = None if linear.bias is None else linear.bias.float()
            logits = self._kernels.linear(x.float(), linear.weight.float(), bias)
        else:
            logits = linear(x)
        return Routes(*self._kernels.route(logits, self.moe, self.correction))


class LocalExperts(Protocol):
    """The experts that a rank holds, by slot: `Experts`, or a repacked form of it."""

    @property
    def tensors(self) -> Sequence[Tensor]:
        """All weight tensors, `[slots, ...]` each."""
        ...

    def __call__(self, x: Tensor, slots: Tensor) -> Tensor:
        """Run row r of `[R, hidden]` through the expert in slot `slots[r]`: int64 `[R]` to `[R, hidden]`."""
        ...

    def mixed(self, x: Tensor, routes: Routes) -> Tensor:
        """Run each row of `[N, hidden]` through its experts and return their weighted sum: `[N, hidden]`."""
        ...


class Experts:
    """Implements `LocalExperts`: this rank's columns `inner` of the experts `held`.

    `weights` are those of the experts, with `held` as slots. The biases of `down` are added where `adds_bias` is set:
    on one of the ranks that hold columns of an expert.
    """

    def __init__(
        self,
        kernels: Kernels,
        params: ParamSlots,
        names: LayerNames,
        hidden_size: int,
        moe: MoeSpec,
        held: Sequence[int],
        inner: range,
        *,
        adds_bias: bool = True,
    ) -> None:
        self._kernels = kernels
        wide, deep = (moe.intermediate_size, hidden_size), (hidden_size, moe.intermediate_size)
        gates, downs = (names.expert_gate, names.expert_up), (names.expert_down,)
        _accept_fused(params, names, hidden_size, moe)

        def stacked(
            of: Callable[[str, int], str], layers: Sequence[str], shape: tuple[int, ...], dim: int, part: range | None
        ) -> Tensor:
            every = (Param(of(name, expert), shape, dim, part, EXPERT_SAMPLES) for expert in held for name in layers)
            return params.stacked(*every)

        gate_up = stacked(_weight, gates, wide, 0, inner).view(len(held), 2 * len(inner), hidden_size)
        down = stacked(_weight, downs, deep, 1, inner).view(len(held), hidden_size, len(inner))
        wide_bias = deep_bias = None
        if moe.expert_bias:
            wide_bias = stacked(_bias, gates, wide[:1], 0, inner).view(len(held), 2 * len(inner))
        if moe.expert_bias and adds_bias:
            deep_bias = stacked(_bias, downs, deep[:1], 0, None).view(len(held), hidden_size)
        self.weights = ExpertWeights(gate_up, down, wide_bias, deep_bias, moe.act, moe.act_limit)
        self._ignore_others(params, names, moe, held, adds_bias=adds_bias)
        for weight, bias in ((gate_up, wide_bias), (down, deep_bias)):
            num_out, num_in = weight.shape[1:]
            kernels.prepare_linear(num_out, num_in, weight.dtype, weight.device, bias=bias is not None)

    @property
    def tensors(self) -> Sequence[Tensor]:
        """See `LocalExperts`."""
        return self.weights.tensors

    def __call__(self, x: Tensor, slots: Tensor) -> Tensor:
        """See `LocalExperts`."""
        return self._kernels.experts(x, slots, self.weights)

    def mixed(self, x: Tensor, routes: Routes) -> Tensor:
        """See `LocalExperts`."""
        outputs = self._kernels.experts(x, routes.experts.flatten(), self.weights)
        return self._kernels.weighted_sum(outputs.view(*routes.experts.shape, x.shape[1]), routes.weights)

    def release_weights(self) -> None:
        """Drop the weights, which were repacked elsewhere. The object must not be called afterwards."""
        nothing = self.weights.gate_up.new_empty(0)
        self.weights = ExpertWeights(nothing, nothing)

    def _ignore_others(
        self, params: ParamSlots, names: LayerNames, moe: MoeSpec, held: Sequence[int], *, adds_bias: bool
    ) -> None:
        """Accept the tensors of experts, and the biases, that other ranks hold."""
        every = (names.expert_gate, names.expert_up, names.expert_down)
        elsewhere = set(range(moe.num_experts)).difference(held)
        for expert in elsewhere:
            for name in every:
                params.ignore(_weight(name, expert))
                if moe.expert_bias:
                    params.ignore(_bias(name, expert))
        if moe.expert_bias and not adds_bias:
            for expert in held:
                params.ignore(_bias(names.expert_down, expert))


class SharedExpert:
    """The expert that every token goes through: a rank's columns `inner` of it, and its gate if the model has one."""

    def __init__(
        self,
        kernels: Kernels,
        params: ParamSlots,
        names: LayerNames,
        hidden_size: int,
        moe: MoeSpec,
        inner: range,
    ) -> None:
        self._kernels = kernels
        gate, up = (Outputs(name, moe.shared_intermediate_size, inner) for name in (names.shared_gate, names.shared_up))
        self.gate_up = column_linear(kernels, params, (gate, up), hidden_size, bias=False)
        self.down = row_linear(kernels, params, names.shared_down, hidden_size, gate, bias=False, adds_bias=False)
        self.router: Linear | None = None
        """The linear layer `[1, hidden]` of the gate."""
        if moe.shared_gate:
            self.router = Linear(kernels, params.new(f"{names.shared_router}.weight", 1, hidden_size))

    def __call__(self, x: Tensor) -> Tensor:
        """Return this rank's columns' part of the output, `[N, hidden]` to `[N, hidden]`."""
        out = self.down(self.gate_up.gated(x))
        return out if self.router is None else self._kernels.gate(out, self.router(x))


def shared_expert(
    kernels: Kernels, params: ParamSlots, names: LayerNames, hidden_size: int, moe: MoeSpec, rank: int, num_ranks: int
) -> SharedExpert | None:
    """Build the part of a rank of `num_ranks` that split the shared expert; None for a model without one."""
    if not moe.shared_intermediate_size:
        return None
    return SharedExpert(
        kernels, params, names, hidden_size, moe, part_of(moe.shared_intermediate_size, num_ranks, rank)
    )


def _accept_fused(params: ParamSlots, names: LayerNames, hidden_size: int, moe: MoeSpec) -> None:
    """Accept checkpoints that store each projection of all experts as one tensor, as Qwen3.5's do.

    With `MoeSpec.interleaved` the tensors are gpt-oss': `[experts, in, out]`, whose outputs are gate and up in turn.
    """
    inner, every, swapped = moe.intermediate_size, range(moe.num_experts), moe.interleaved
    wide, deep = (2 * inner, hidden_size), (hidden_size, inner)
    block, stride, second = (1, 2, 1) if swapped else (None, 0, inner)
    gate_up = ((names.expert_gate, 0), (names.expert_up, second))

    def halves(of: Callable[[str, int], str], shape: tuple[int, ...], *, transposed: bool) -> list[ParamPiece]:
        return [
            ParamPiece(of(name, expert), shape, first, block, stride, index=expert, transposed=transposed)
            for name, first in gate_up
            for expert in every
        ]

    def wholes(of: Callable[[str, int], str], shape: tuple[int, ...], *, transposed: bool) -> list[ParamPiece]:
        return [ParamPiece(of(names.expert_down, e), shape, index=e, transposed=transposed) for e in every]

    count = moe.num_experts
    pieces = halves(_weight, (inner, hidden_size), transposed=swapped)
    params.divide(names.experts_gate_up, (count, *(wide[::-1] if swapped else wide)), pieces)
    pieces = wholes(_weight, deep, transposed=swapped)
    params.divide(names.experts_down, (count, *(deep[::-1] if swapped else deep)), pieces)
    if moe.expert_bias:
        params.divide(names.experts_gate_up_bias, (count, wide[0]), halves(_bias, (inner,), transposed=False))
        params.divide(names.experts_down_bias, (count, deep[0]), wholes(_bias, deep[:1], transposed=False))


def _weight(name: str, expert: int) -> str:
    return f"{name.format(expert=expert)}.weight"


def _bias(name: str, expert: int) -> str:
    return f"{name.format(expert=expert)}.bias"


def new_counts(moe: MoeSpec, device: torch.device) -> Tensor:
    """Make a layer's counter of tokens per expert."""
    return torch.zeros(moe.num_experts, dtype=torch.int64, device=device)


def count(counts: Tensor, experts: Tensor) -> None:
    """Add a batch's routes to `counts`, without waiting for the device."""
    chosen = experts.flatten()
    counts.index_add_(0, chosen, torch.ones_like(chosen))


class TPMoE:
    """Implements `FeedForward`: every rank of `group` computes its columns of all experts for all tokens.

    `counts` int64 `[num_experts]` are the tokens routed to each expert since the start, equal on all these ranks.
    """

    def __init__(
        self,
        kernels: Kernels,
        params: ParamSlots,
        names: LayerNames,
        hidden_size: int,
        moe: MoeSpec,
        group: DPAttentionGroup,
    ) -> None:
        inner = part_of(moe.intermediate_size, group.size, group.rank)
        self.group = group
        self.counts = new_counts(moe, params.device)
        self.router = Router(kernels, params, names, moe, hidden_size)
        self.route: Callable[[Tensor], Routes] = self.router
        every = range(moe.num_experts)
        self.experts: LocalExperts = Experts(
            kernels, params, names, hidden_size, moe, every, inner, adds_bias=group.rank == 0
        )
        self.shared: Callable[[Tensor], Tensor] | None = shared_expert(
            kernels, params, names, hidden_size, moe, group.rank, group.size
        )

    def __call__(self, x: Tensor) -> Tensor:
        """See `FeedForward`."""
        x = self.group.gather(x)
        routes = self.route(x)
        count(self.counts, routes.experts)
        mixed = self.experts.mixed(x, routes)
        if self.shared is not None:
            mixed += self.shared(x)
        return self.group.reduce_sum(mixed)
