"""Splits a model over ranks: pure arithmetic that config, model, memory and transfer share.

A replica has `tp_size * pp_size` ranks. Rank r is tensor rank `r % tp_size` of pipeline stage `r // tp_size`; rank 0 is
the leader. KV heads are split evenly over the tensor ranks of a stage. With fewer heads than ranks, neighbouring ranks
hold the same head.

With DP attention the replicas of a server share one copy of the feed-forward layers, split over all their ranks.
"""

from __future__ import annotations

import dataclasses

from pdserve.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelShape:
    """Tensor and pipeline parallel sizes of one replica."""

    tp_size: int = 1
    pp_size: int = 1

    @property
    def num_ranks(self) -> int:
        """Number of processes of the replica."""
        return self.tp_size * self.pp_size

    def coord(self, rank: int) -> RankCoord:
        """Return the coordinates of `rank`."""
        assert 0 <= rank < self.num_ranks, (rank, self)
        return RankCoord(self, rank % self.tp_size, rank // self.tp_size)


@dataclasses.dataclass(frozen=True)
class RankCoord:
    """Tensor and pipeline rank of one process in its replica."""

    shape: ParallelShape
    tp_rank: int
    pp_rank: int

    @property
    def rank(self) -> int:
        """Index within the replica."""
        return self.pp_rank * self.shape.tp_size + self.tp_rank

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank embeds the tokens."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes the logits."""
        return self.pp_rank == self.shape.pp_size - 1


SINGLE = ParallelShape().coord(0)
"""The only rank of an unsplit replica."""


@dataclasses.dataclass(frozen=True)
class DpRankCoord:
    """One rank among all ranks of `dp_size` replicas that share their feed-forward layers (DP attention).

    Without DP attention `dp_size` is 1.
    """

    in_replica: RankCoord
    dp_size: int = 1
    dp_rank: int = 0

    @property
    def num_ranks(self) -> int:
        """Number of processes of all these replicas."""
        return self.dp_size * self.in_replica.shape.num_ranks

    @property
    def rank(self) -> int:
        """Index among all these processes."""
        return self.first_rank + self.in_replica.rank

    @property
    def first_rank(self) -> int:
        """Index of the replica's leader."""
        return self.dp_rank * self.in_replica.shape.num_ranks


def dealt(num_items: int, num_parts: int) -> list[int]:
    """Return the sizes of `num_parts` consecutive parts of `num_items`: all equal, except that the last may be smaller.

    Trailing parts may be empty.
    """
    share = -(-num_items // num_parts)
    return [max(0, min(share, num_items - index * share)) for index in range(num_parts)]


def part_of(num_items: int, num_parts: int, index: int) -> range:
    """Return part `index` of `num_items` split evenly; `num_parts` must divide `num_items`."""
    assert num_items % num_parts == 0, (num_items, num_parts)
    size = num_items // num_parts
    return range(index * size, (index + 1) * size)


def kv_heads_of(num_kv_heads: int, tp_size: int, tp_rank: int) -> range:
    """Return the KV heads of a tensor rank: its share, or the one head that it replicates with its neighbours."""
    if tp_size <= num_kv_heads:
        return part_of(num_kv_heads, tp_size, tp_rank)
    assert tp_size % num_kv_heads == 0, (tp_size, num_kv_heads)
    head = tp_rank // (tp_size // num_kv_heads)
    return range(head, head + 1)


def layers_of(num_layers: int, pp_size: int, pp_rank: int) -> range:
    """Return the layers of a pipeline stage, split as evenly as possible.

    Remaining layers go one each to the stages before the last. The last stage also computes the logits, so it never
    has more layers than another stage.
    """
    assert pp_size <= num_layers, (pp_size, num_layers)
    share, more = divmod(num_layers, pp_size)
    extra = [0] * pp_size
    for index in range(more):
        extra[pp_size - 2 - index] = 1
    start = pp_rank * share + sum(extra[:pp_rank])
    return range(start, start + share + extra[pp_rank])


def vocab_of(vocab_size: int, tp_size: int, tp_rank: int) -> range:
    """Return the token ids whose embeddings a tensor rank holds; the last ranks may hold fewer, or none."""
    share = -(-vocab_size // tp_size)
    return range(min(tp_rank * share, vocab_size), min((tp_rank + 1) * share, vocab_size))


def check_split(
    shape: ParallelShape,
    *,
    num_heads: int,
    num_kv_heads: int,
    num_layers: int,
    intermediate_size: int,
    num_sharing: int = 1,
) -> None:
    """Check that the model can be split by `shape`; `num_sharing` replicas share its feed-forward layers.

    Raises:
        ConfigError: the sizes do not divide; the error names `tp_size` or `pp_size`.
    """
    tp, pp = shape.tp_size, shape.pp_size
    wide = tp * num_sharing
    tp_flag = f"--tp-size {wide}"
    of_attention = tp_flag if num_sharing == 1 else f"{tp_flag} with --dp-size {num_sharing}, {tp} ranks a replica,"
    for flag, size, name, count in (
        (of_attention, tp, "attention heads", num_heads),
        (tp_flag, wide, "intermediate columns", intermediate_size),
    ):
        if count % size:
            text = f"{flag} does not divide the model's {count} {name}; give a divisor of {count}"
            raise ConfigError(text, field="tp_size")
    if num_kv_heads % tp and tp % num_kv_heads:
        raise ConfigError(
            f"{of_attention} neither divides the model's {num_kv_heads} KV heads nor is a multiple of them",
            field="tp_size",
        )
    if pp > num_layers:
        raise ConfigError(f"--pp-size {pp} is more than the model's {num_layers} layers", field="pp_size")
