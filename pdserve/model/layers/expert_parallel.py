"""Expert-parallel MoE: each expert is whole on a rank of `DPAttentionGroup`; tokens travel to experts and back.

Built by the decoder when an `ExpertMap` is given. All tensor ranks of a replica have all its tokens. Each rank handles
its token share:

    route the share ── gather: all routes ──> every rank computes all send and receive counts, and the expert load
    all_to_all: rows to their experts ──> products ──> all_to_all: back ──> weighted sum ── gather: the replica's tokens
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pdserve.model.dp_attention import DPAttentionGroup
from pdserve.model.eplb import Row, moves_between
from pdserve.model.layer_spec import LayerNames, MoeSpec
from pdserve.model.layers.kernels import Kernels
from pdserve.model.layers.moe import Experts, LocalExperts, Router, Routes, count, new_counts, shared_expert
from pdserve.model.params import ParamSlots
from pdserve.model.placement import slots_of


class ExpertTable:
    """Slots of each expert's copies, on the device. `row` is one layer's row of an `ExpertMap`."""

    def __init__(self, row: Row, num_ranks: int, num_experts: int, device: torch.device) -> None:
        self.num_ranks = num_ranks
        self.num_slots = len(row) // num_ranks
        copies = [[index for index, held in enumerate(row) if held == expert] for expert in range(num_experts)]
        most = max(len(places) for places in copies)
        padded = [places + places[:1] * (most - len(places)) for places in copies]
        self._places = torch.tensor(padded, device=device)
        self._num_copies = torch.tensor([len(places) for places in copies], device=device)

    def places(self, experts: Tensor) -> Tensor:
        """Return a global slot for each expert in `[N, top_k]`; copies of an expert take tokens in turn."""
        turn = torch.arange(len(experts), device=experts.device)[:, None] % self._num_copies[experts]
        return self._places[experts, turn]


@dataclasses.dataclass(frozen=True)
class Dispatch:
    """One rank's part of an exchange.

    `rows` int64 `[S]`: indices `token * top_k + choice` in the rank's token share, in the order sent. `send[i]` rows go
    to rank i, and `receive[i]` rows come from rank i, for the experts in `slots`, int64 `[R]`.
    """

    rows: Tensor
    send: list[int]
    receive: list[int]
    slots: Tensor


def plan_dispatch(places: Tensor, sizes: Sequence[int], rank: int, table: ExpertTable) -> Dispatch:
    """Compute the rows that `rank` sends and receives. `places` `[T, top_k]` has `sizes[i]` tokens of rank i, in order.

    Blocks until the device has counted the rows.
    """
    top_k = places.shape[1]
    num_ranks, num_slots = table.num_ranks, table.num_slots
    source = torch.cat([torch.full((size * top_k,), i, device=places.device) for i, size in enumerate(sizes)])
    place = places.flatten()
    order = (source * (num_ranks * num_slots) + place).argsort(stable=True)
    pairs = torch.bincount(source * num_ranks + place // num_slots, minlength=num_ranks * num_ranks)
    counts = pairs.view(num_ranks, num_ranks).tolist()  # the only host synchronisation
    begin = sum(sum(row) for row in counts[:rank])
    sent = order[begin : begin + sum(counts[rank])]
    sorted_places = place[order]
    here = sorted_places[sorted_places // num_slots == rank]
    return Dispatch(sent - sum(sizes[:rank]) * top_k, counts[rank], [row[rank] for row in counts], here % num_slots)


class ExpertParallelMoe:
    """Implements `FeedForward` with whole experts on each rank. `row` is the layer's placement.

    `counts` int64 `[num_experts]` are the tokens routed to each expert since the start, equal on all ranks of `group`.
    """

    def __init__(
        self,
        kernels: Kernels,
        params: ParamSlots,
        names: LayerNames,
        hidden_size: int,
        moe: MoeSpec,
        group: DPAttentionGroup,
        row: Row,
    ) -> None:
        self._kernels, self._group = kernels, group
        self.router = Router(kernels, params, names, moe, hidden_size)
        self.route: Callable[[Tensor], Routes] = self.router
        held = slots_of(row, group.size, group.rank)
        inner = range(moe.intermediate_size)
        self.experts: LocalExperts = Experts(kernels, params, names, hidden_size, moe, held, inner)
        self.shared: Callable[[Tensor], Tensor] | None = shared_expert(kernels, params, names, hidden_size, moe, 0, 1)
        """The whole shared expert, which computes this rank's token share."""
        self.row = row
        self.counts = new_counts(moe, params.device)
        self._table = ExpertTable(row, group.size, moe.num_experts, params.device)

    def __call__(self, x: Tensor) -> Tensor:
        """See `FeedForward`."""
        token_share = self._group.token_share(len(x))
        mine = x[token_share.mine]
        routes = self.route(mine)
        experts = self._group.all_gather_rows(routes.experts, token_share.sizes)
        count(self.counts, experts)
        dispatch = plan_dispatch(self._table.places(experts), token_share.sizes, self._group.rank, self._table)
        top_k = experts.shape[1]
        arrived = self._group.all_to_all(mine[dispatch.rows // top_k], dispatch.send, dispatch.receive)
        computed = self.experts(arrived, dispatch.slots)
        returned = self._group.all_to_all(computed, dispatch.receive, dispatch.send)
        outputs = torch.empty_like(returned).index_copy_(0, dispatch.rows, returned)
        mixed = self._kernels.weighted_sum(outputs.view(len(mine), top_k, x.shape[1]), routes.weights)
        if self.shared is not None:
            mixed += self.shared(mine)
        return self._group.rejoin(mixed, len(x))

    def move(self, row: Row) -> int:
        """Replace the held experts by those of `row`, on all ranks, between steps. Returns the number received.

        A rank receives a missing expert from the first slot that has it.
        """
        moves = moves_between(self.row, row, self._group.size)
        device, ranks = self.counts.device, range(self._group.size)
        leaving = [move for move in moves if move.source == self._group.rank]
        arriving = [move for move in moves if move.target == self._group.rank]
        send = [sum(move.target == rank for move in leaving) for rank in ranks]
        receive = [sum(move.source == rank for move in arriving) for rank in ranks]
        old = torch.tensor([move.source_slot for move in leaving], dtype=torch.int64, device=device)
        new = torch.tensor([move.target_slot for move in arriving], dtype=torch.int64, device=device)
        for weight in self.experts.tensors:
            weight.index_copy_(0, new, self._group.all_to_all(weight[old], send, receive))
        self.row = row
        self._table = ExpertTable(row, self._group.size, len(self.counts), self.counts.device)
        return len(arriving)
