"""Mixture of experts: the router, the experts' weights, and the tensor-parallel MoE layer.

`TPMoE` is the layer without expert parallelism: each rank has some columns of every expert. `expert_parallel` has the
layer with whole experts on each rank.
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
from pdserve.model.layers.dense import Linear
from pdserve.model.layers.kernels import Kernels
from pdserve.model.params import EXPERT_SAMPLES, Param, ParamSlots


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

    def __call__(self, x: Tensor) -> Tensor:
        """See `FeedForward`."""
        x = self.group.gather(x)
        routes = self.route(x)
        count(self.counts, routes.experts)
        return self.group.reduce_sum(self.experts.mixed(x, routes))
