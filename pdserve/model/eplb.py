"""Expert-parallel load balancing: computes a placement of experts on ranks from token counts per expert.

Pure and deterministic: all ranks compute the same placement from the same counts. Called by `placement` when a server
starts from counts, and by the planning thread of `executor/expert_balance` while steps run.
The algorithm is greedy. Extra copies go to the experts with the most tokens per copy. Then each copy, heaviest first,
goes to the rank with the least load. Finally, rank numbers are assigned so that most experts stay in place.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

Row = tuple[int, ...]
"""One layer: the expert in each slot, rank after rank. All ranks have the same number of slots."""


def balanced(counts: Sequence[int], num_ranks: int, before: Row) -> Row:
    """Compute a layer's new placement. `counts[e]` tokens were routed to expert e; `before` is the present row.

    Returns `before` itself unless the new row is better balanced.
    """
    num_slots = len(before) // num_ranks
    copies = num_copies(counts, num_ranks, len(before))
    ranks = _pack(counts, copies, num_ranks, num_slots)
    after = _stay(ranks, [before[i * num_slots : (i + 1) * num_slots] for i in range(num_ranks)])
    return after if balancedness(counts, num_ranks, after) > balancedness(counts, num_ranks, before) else before


def balancedness(counts: Sequence[int], num_ranks: int, row: Row) -> float:
    """Return mean rank load divided by the highest, in (0, 1]; 1 is best. Copies of an expert share its tokens."""
    num_slots = len(row) // num_ranks
    copies = Counter(row)
    loads = [0.0] * num_ranks
    for index, expert in enumerate(row):
        loads[index // num_slots] += counts[expert] / copies[expert]
    return sum(loads) / num_ranks / max(loads) if max(loads) > 0 else 1.0


def num_copies(counts: Sequence[int], num_ranks: int, num_places: int) -> list[int]:
    """Return the number of copies of each expert, 1 to `num_ranks`; the copies fill `num_places` slots."""
    copies = [1] * len(counts)
    for _ in range(num_places - len(counts)):
        open_to = [expert for expert in range(len(counts)) if copies[expert] < num_ranks]
        copies[max(open_to, key=lambda expert: (counts[expert] / copies[expert], -expert))] += 1
    return copies


def _pack(counts: Sequence[int], copies: Sequence[int], num_ranks: int, num_slots: int) -> list[list[int]]:
    """Assign experts to ranks. A rank holds no expert twice."""
    items = [expert for expert, count in enumerate(copies) for _ in range(count)]
    weight = [count / number for count, number in zip(counts, copies, strict=True)]
    items.sort(key=lambda expert: (-weight[expert], expert))
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0.0] * num_ranks
    for expert in items:
        free = [rank for rank in range(num_ranks) if len(ranks[rank]) < num_slots]
        fitting = [rank for rank in free if expert not in ranks[rank]]
        if fitting:
            rank = min(fitting, key=lambda rank: (loads[rank], rank))
        else:
            rank = _make_room(expert, free[0], ranks, loads, weight)
        ranks[rank].append(expert)
        loads[rank] += weight[expert]
    return ranks


def _make_room(expert: int, free: int, ranks: list[list[int]], loads: list[float], weight: Sequence[float]) -> int:
    """Free a slot for `expert` when every rank with a free slot already holds it.

    A full rank without `expert` moves its lightest expert to rank `free`. Such an expert exists: `free` holds fewer
    experts than the full rank, and `expert` besides. Returns the full rank.
    """
    giver = next(rank for rank in range(len(ranks)) if expert not in ranks[rank])
    moved = min((other for other in ranks[giver] if other not in ranks[free]), key=lambda other: weight[other])
    ranks[giver].remove(moved)
    ranks[free].append(moved)
    loads[giver] -= weight[moved]
    loads[free] += weight[moved]
    return giver


def _stay(ranks: list[list[int]], before: Sequence[Row]) -> Row:
    """Flatten `ranks` into one row. Each old rank takes the new set with the most of its experts, in their slots."""
    left = list(ranks)
    row: list[int] = []
    for old in before:
        chosen = max(left, key=lambda new: len(set(new).intersection(old)))
        left.remove(chosen)
        arriving = iter([expert for expert in chosen if expert not in old])
        row += [expert if expert in chosen else next(arriving) for expert in old]
    return tuple(row)


@dataclasses.dataclass(frozen=True)
class ExpertMove:
    """Copy of an expert from a slot of one rank to a slot of another."""

    source: int
    source_slot: int
    target: int
    target_slot: int


def moves_between(before: Row, after: Row, num_ranks: int) -> list[ExpertMove]:
    """Return the moves that turn `before` into `after`. A changed slot receives its expert from the first slot in
    `before` that has it.

    Moves are sorted by source, then target: senders and receivers read the same order.
    """
    num_slots = len(before) // num_ranks
    moves = []
    for index, expert in enumerate(after):
        if before[index] != expert:
            source, target = divmod(before.index(expert), num_slots), divmod(index, num_slots)
            moves.append(ExpertMove(*source, *target))
    return sorted(moves, key=lambda move: (move.source, move.target, move.target_slot))
