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
from pdserve.model.layer_spec import LayerNames, MoeSpec
from pdserve.model.layers.dense import Linear, Outputs, column_linear, row_linear
from pdserve.model.layers.kernels import Kernels
from pdserve.model.params import EXPERT_SAMPLES, Param, ParamPiece, ParamSlots


@dataclasses.dataclass(frozen=True)
class Routes:
    """Routing of tokens: `experts` int64 `[N, top_k]`, best first, and `weights` float32 `[N, top_k]`."""

    experts: Tensor
    weights: Tensor


class Router:
    """Softmax over all experts, and the top k of them."""

    def __init__(self, kernels: Kernels, params: ParamSlots, name: str, moe: MoeSpec, hidden_size: int) -> None:
        self._kernels = kernels
        self.linear = Linear(kernels, params.new(f"{name}.weight", moe.num_experts, hidden_size))
        self.moe = moe

    def __call__(self, x: Tensor) -> Routes:
        """Return the routes of `[N, hidden]`."""
        return Routes(*self._kernels.route(self.linear(x), self.moe.top_k, normalise=self.moe.norm_top_k))


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

    `gate_up` is `[slots, 2 * len(inner), hidden]`, `down` `[slots, hidden, len(inner)]`.
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
    ) -> None:
        self._kernels = kernels
        wide, deep = (moe.intermediate_size, hidden_size), (hidden_size, moe.intermediate_size)
        pairs = [
            Param(_weight(name, expert), wide, 0, inner, EXPERT_SAMPLES)
            for expert in held
            for name in (names.expert_gate, names.expert_up)
        ]
        downs = [Param(_weight(names.expert_down, expert), deep, 1, inner, EXPERT_SAMPLES) for expert in held]
        _accept_fused(params, names, hidden_size, moe)
        self.gate_up = params.stacked(*pairs).view(len(held), 2 * len(inner), hidden_size)
        self.down = params.stacked(*downs).view(len(held), hidden_size, len(inner))
        for expert in set(range(moe.num_experts)).difference(held):
            for name in (names.expert_gate, names.expert_up, names.expert_down):
                params.ignore(_weight(name, expert))
        for weight in (self.gate_up, self.down):
            kernels.prepare_linear(weight.shape[1], weight.shape[2], weight.dtype, weight.device, bias=False)

    @property
    def tensors(self) -> Sequence[Tensor]:
        """See `LocalExperts`."""
        return self.gate_up, self.down

    def __call__(self, x: Tensor, slots: Tensor) -> Tensor:
        """See `LocalExperts`."""
        return self._kernels.experts(x, slots, self.gate_up, self.down)

    def mixed(self, x: Tensor, routes: Routes) -> Tensor:
        """See `LocalExperts`."""
        outputs = self._kernels.experts(x, routes.experts.flatten(), self.gate_up, self.down)
        return self._kernels.weighted_sum(outputs.view(*routes.experts.shape, x.shape[1]), routes.weights)

    def release_weights(self) -> None:
        """Drop the weights, which were repacked elsewhere. The object must not be called afterwards."""
        self.gate_up, self.down = self.gate_up.new_empty(0), self.down.new_empty(0)


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
        out = self.down(self._kernels.gated(x, self.gate_up.weight, self.gate_up.bias))
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
    """Accept checkpoints that store each projection of all experts as one tensor, as Qwen3.5's do."""
    inner = moe.intermediate_size
    gates, ups = (
        [
            ParamPiece(_weight(name, expert), (inner, hidden_size), first, index=expert)
            for expert in range(moe.num_experts)
        ]
        for name, first in ((names.expert_gate, 0), (names.expert_up, inner))
    )
    params.divide(names.experts_gate_up, (moe.num_experts, 2 * inner, hidden_size), [*gates, *ups])
    downs = [
        ParamPiece(_weight(names.expert_down, expert), (hidden_size, inner), index=expert)
        for expert in range(moe.num_experts)
    ]
    params.divide(names.experts_down, (moe.num_experts, hidden_size, inner), downs)


def _weight(name: str, expert: int) -> str:
    return f"{name.format(expert=expert)}.weight"


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
        self.router = Router(kernels, params, names.router, moe, hidden_size)
        self.route: Callable[[Tensor], Routes] = self.router
        every = range(moe.num_experts)
        self.experts: LocalExperts = Experts(kernels, params, names, hidden_size, moe, every, inner)
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
