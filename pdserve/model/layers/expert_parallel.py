"""A mixture of experts whose experts lie whole on the tensor ranks of a stage: tokens travel to them and back.

Built by the decoder where a `Placement` is given. All tensor ranks have all tokens of a batch. Each takes its slice of
them in hand:

    route the slice ── all_gather: routes ──> every rank knows who sends how much to whom, and counts the load alike
    all_to_all: rows to their experts ──> products ──> all_to_all: back ──> weighted sum ── all_gather: all tokens
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from pdserve.model.config import MoeSpec
from pdserve.model.eplb import Row, moves_between
from pdserve.model.layers.kernels import Kernels
from pdserve.model.layers.moe import Experts, Router, count, new_counts, weighted_sum
from pdserve.model.parallel import Parallel
from pdserve.model.params import ParamSlots
from pdserve.model.placement import slots_of


class ExpertTable:
    """Where the copies of each expert are, on the device. `row` is one layer's of a `Placement`."""

    def __init__(self, row: Row, num_ranks: int, num_experts: int, device: torch.device) -> None:
        self.num_ranks = num_ranks
        self.num_slots = len(row) // num_ranks
        copies = [[index for index, held in enumerate(row) if held == expert] for expert in range(num_experts)]
        most = max(len(places) for places in copies)
        padded = [places + places[:1] * (most - len(places)) for places in copies]
        self._places = torch.tensor(padded, device=device)
        self._num_copies = torch.tensor([len(places) for places in copies], device=device)

    def places(self, experts: Tensor) -> Tensor:
        """A slot of all ranks' for each of `[N, top_k]`: the copies of an expert take the tokens in turns."""
        turn = torch.arange(len(experts), device=experts.device)[:, None] % self._num_copies[experts]
        return self._places[experts, turn]


@dataclasses.dataclass(frozen=True)
class Dispatch:
    """One rank's part of an exchange.

    `rows` int64 `[S]`: which of its slice's `token * top_k + choice` it sends, in this order; `send[i]` of them go to
    rank i and `receive[i]` come from there, for the experts in `slots`, int64 `[R]`.
    """

    rows: Tensor
    send: list[int]
    receive: list[int]
    slots: Tensor


def plan_dispatch(places: Tensor, share: int, rank: int, table: ExpertTable) -> Dispatch:
    """What `rank` sends and receives. `places` `[N, top_k]` are all tokens'; each rank has `share` of them in turn."""
    num_tokens, top_k = places.shape
    num_ranks, num_slots = table.num_ranks, table.num_slots
    source = (torch.arange(num_tokens, device=places.device) // share).repeat_interleave(top_k)
    place = places.flatten()
    order = (source * (num_ranks * num_slots) + place).argsort(stable=True)
    pairs = torch.bincount(source * num_ranks + place // num_slots, minlength=num_ranks * num_ranks)
    counts = pairs.view(num_ranks, num_ranks).tolist()  # the one wait for the device
    begin = sum(sum(row) for row in counts[:rank])
    sent = order[begin : begin + sum(counts[rank])]
    sorted_places = place[order]
    here = sorted_places[sorted_places // num_slots == rank]
    return Dispatch(sent - rank * share * top_k, counts[rank], [row[rank] for row in counts], here % num_slots)


class ExpertParallelMoe:
    """Implements `FeedForward`. `row` says where the layer's experts are; `counts` int64 `[num_experts]` the tokens
    that each was given since the start, equal on all tensor ranks.
    """

    def __init__(
        self,
        kernels: Kernels,
        params: ParamSlots,
        prefix: str,
        hidden_size: int,
        moe: MoeSpec,
        parallel: Parallel,
        row: Row,
    ) -> None:
        self._parallel = parallel
        self._num_ranks, self._rank = parallel.place.shape.tp_size, parallel.place.tp_rank
        self._router = Router(kernels, params, prefix + "gate", moe, hidden_size)
        held = slots_of(row, self._num_ranks, self._rank)
        inner = range(moe.intermediate_size)
        self.experts = Experts(kernels, params, prefix + "experts.", hidden_size, moe, held, inner)
        self.row = row
        self.counts = new_counts(moe, params.device)
        self._table = ExpertTable(row, self._num_ranks, moe.num_experts, params.device)

    def __call__(self, x: Tensor) -> Tensor:
        """See `FeedForward`."""
        num_tokens = len(x)
        share = -(-num_tokens // self._num_ranks)
        mine = x[self._rank * share : (self._rank + 1) * share]
        routes = self._router(mine)
        experts = self._everyones(routes.experts, share)[:num_tokens]
        count(self.counts, experts)
        dispatch = plan_dispatch(self._table.places(experts), share, self._rank, self._table)
        top_k = experts.shape[1]
        arrived = self._parallel.all_to_all(mine[dispatch.rows // top_k], dispatch.send, dispatch.receive)
        computed = self.experts(arrived, dispatch.slots)
        returned = self._parallel.all_to_all(computed, dispatch.receive, dispatch.send)
        outputs = torch.empty_like(returned).index_copy_(0, dispatch.rows, returned)
        mixed = weighted_sum(outputs.view(len(mine), top_k, x.shape[1]), routes.weights)
        return self._everyones(mixed, share)[:num_tokens]

    def _everyones(self, part: Tensor, share: int) -> Tensor:
        """All ranks' slices, one behind the other; the last ones may be shorter than `share`."""
        padded = part.new_zeros(share, *part.shape[1:])
        padded[: len(part)] = part
        return self._parallel.all_gather(padded)

    def move(self, row: Row) -> int:
        """Take the experts of `row` in place of those held: all tensor ranks, between steps. Returns how many came.

        Every expert that a rank lacks comes from the first one that has it.
        """
        moves = moves_between(self.row, row, self._num_ranks)
        device, ranks = self.counts.device, range(self._num_ranks)
        leaving = [move for move in moves if move.source == self._rank]
        arriving = [move for move in moves if move.target == self._rank]
        send = [sum(move.target == rank for move in leaving) for rank in ranks]
        receive = [sum(move.source == rank for move in arriving) for rank in ranks]
        old = torch.tensor([move.source_slot for move in leaving], dtype=torch.int64, device=device)
        new = torch.tensor([move.target_slot for move in arriving], dtype=torch.int64, device=device)
        for weight in (self.experts.gate_up, self.experts.down):
            weight.index_copy_(0, new, self._parallel.all_to_all(weight[old], send, receive))
        self.row = row
        self._table = ExpertTable(row, self._num_ranks, len(self.counts), self.counts.device)
        return len(arriving)
