"""Where experts should lie so that all ranks have as much to do: from the tokens each was given to a placement.

Pure, and equal on all ranks that are given equal counts. Called when a server starts from counts (`placement`), and by
the thread that plans while others compute (`executor/expert_balance`).

Greedy: copies go to the experts with most tokens a copy; then, the heaviest first, each copy goes to the rank with the
least to do. Ranks are then named so that most experts stay where they are.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

Row = tuple[int, ...]
"""One layer: the expert in each slot, rank after rank; all ranks have as many slots."""


def balanced(counts: Sequence[int], num_ranks: int, before: Row) -> Row:
    """The layer's new row: `counts[e]` tokens went to expert e, `before` is how experts lie now.

    It is `before` itself unless the new one balances better.
    """
    num_slots = len(before) // num_ranks
    copies = num_copies(counts, num_ranks, len(before))
    ranks = _pack(counts, copies, num_ranks, num_slots)
    after = _stay(ranks, [before[i * num_slots : (i + 1) * num_slots] for i in range(num_ranks)])
    return after if balancedness(counts, num_ranks, after) > balancedness(counts, num_ranks, before) else before


def balancedness(counts: Sequence[int], num_ranks: int, row: Row) -> float:
    """The mean load of the ranks over the highest, in (0, 1]; 1 is best. Copies of an expert share its tokens."""
    num_slots = len(row) // num_ranks
    copies = Counter(row)
    loads = [0.0] * num_ranks
    for index, expert in enumerate(row):
        loads[index // num_slots] += counts[expert] / copies[expert]
    return sum(loads) / num_ranks / max(loads) if max(loads) > 0 else 1.0


def num_copies(counts: Sequence[int], num_ranks: int, num_places: int) -> list[int]:
    """How often each expert shall be there, `num_places` in all: 1 to `num_ranks` times."""
    copies = [1] * len(counts)
    for _ in range(num_places - len(counts)):
        open_to = [expert for expert in range(len(counts)) if copies[expert] < num_ranks]
        copies[max(open_to, key=lambda expert: (counts[expert] / copies[expert], -expert))] += 1
    return copies


def _pack(counts: Sequence[int], copies: Sequence[int], num_ranks: int, num_slots: int) -> list[list[int]]:
    """The experts of each rank, no two alike."""
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
    """All ranks with a free slot have `expert` already: a full one without it gives its lightest to `free`.

    There is one that `free` does not have, for it has fewer experts than the full one, and this one besides.
    """
    giver = next(rank for rank in range(len(ranks)) if expert not in ranks[rank])
    moved = min((other for other in ranks[giver] if other not in ranks[free]), key=lambda other: weight[other])
    ranks[giver].remove(moved)
    ranks[free].append(moved)
    loads[giver] -= weight[moved]
    loads[free] += weight[moved]
    return giver


def _stay(ranks: list[list[int]], before: Sequence[Row]) -> Row:
    """As one row; ranks are alike, so each old one takes the new set that has most of its experts, in their slots."""
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
    """An expert goes from a slot of one rank to a slot of another."""

    source: int
    source_slot: int
    target: int
    target_slot: int


def moves_between(before: Row, after: Row, num_ranks: int) -> list[ExpertMove]:
    """What makes `before` `after`: each slot whose expert changes gets it from the first slot that had it.

    In the order of sources and then of targets, as senders and receivers alike read it.
    """
    num_slots = len(before) // num_ranks
    moves = []
    for index, expert in enumerate(after):
        if before[index] != expert:
            source, target = divmod(before.index(expert), num_slots), divmod(index, num_slots)
            moves.append(ExpertMove(*source, *target))
    return sorted(moves, key=lambda move: (move.source, move.target, move.target_slot))
