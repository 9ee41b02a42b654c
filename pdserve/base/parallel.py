"""How a model is split over ranks: pure arithmetic that config, model, memory and transfer share.

A replica has `tp_size * pp_size` ranks. Rank r is tensor rank `r % tp_size` of pipeline stage `r // tp_size`; rank 0
leads. KV heads are split evenly over the tensor ranks of a stage; where there are fewer heads than ranks, neighbouring
ranks hold the same one.
"""

from __future__ import annotations

import dataclasses

from pdserve.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelShape:
    """How one replica is split."""

    tp_size: int = 1
    pp_size: int = 1

    @property
    def num_ranks(self) -> int:
        """Processes of the replica."""
        return self.tp_size * self.pp_size

    def place(self, rank: int) -> Place:
        """Where `rank` stands."""
        assert 0 <= rank < self.num_ranks, (rank, self)
        return Place(self, rank % self.tp_size, rank // self.tp_size)


@dataclasses.dataclass(frozen=True)
class Place:
    """One rank's place in its replica."""

    shape: ParallelShape
    tp_rank: int
    pp_rank: int

    @property
    def rank(self) -> int:
        """Number within the replica."""
        return self.pp_rank * self.shape.tp_size + self.tp_rank

    @property
    def is_first_stage(self) -> bool:
        """Embeds the tokens."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Computes the logits."""
        return self.pp_rank == self.shape.pp_size - 1


SINGLE = ParallelShape().place(0)
"""The only rank of a replica that is not split."""


def part_of(num_items: int, num_parts: int, index: int) -> range:
    """Part `index` of `num_items` things split evenly; they must divide."""
    assert num_items % num_parts == 0, (num_items, num_parts)
    size = num_items // num_parts
    return range(index * size, (index + 1) * size)


def kv_heads_of(num_kv_heads: int, tp_size: int, tp_rank: int) -> range:
    """KV heads of a tensor rank: its share, or the one head that it has in common with its neighbours."""
    if tp_size <= num_kv_heads:
        return part_of(num_kv_heads, tp_size, tp_rank)
    assert tp_size % num_kv_heads == 0, (tp_size, num_kv_heads)
    head = tp_rank // (tp_size // num_kv_heads)
    return range(head, head + 1)


def layers_of(num_layers: int, pp_size: int, pp_rank: int) -> range:
    """Layers of a pipeline stage: as even as can be; what is left over goes to the last stages but one, one each.

    The last stage has the logits to compute as well, so it never has more layers than another.
    """
    assert pp_size <= num_layers, (pp_size, num_layers)
    share, more = divmod(num_layers, pp_size)
    extra = [0] * pp_size
    for index in range(more):
        extra[pp_size - 2 - index] = 1
    start = pp_rank * share + sum(extra[:pp_rank])
    return range(start, start + share + extra[pp_rank])


def vocab_of(vocab_size: int, tp_size: int, tp_rank: int) -> range:
    """Token ids whose embeddings a tensor rank has; the last ranks may have fewer, or none."""
    share = -(-vocab_size // tp_size)
    return range(min(tp_rank * share, vocab_size), min((tp_rank + 1) * share, vocab_size))


def check_split(
    shape: ParallelShape, *, num_heads: int, num_kv_heads: int, num_layers: int, intermediate_size: int
) -> None:
    """A model must be divisible that way.

    Raises:
        ConfigError: naming `tp_size` or `pp_size`.
    """
    tp, pp = shape.tp_size, shape.pp_size
    for name, count in (("attention heads", num_heads), ("intermediate columns", intermediate_size)):
        if count % tp:
            raise ConfigError(f"--tp-size {tp} does not divide the model's {count} {name}", field="tp_size")
    if num_kv_heads % tp and tp % num_kv_heads:
        raise ConfigError(
            f"--tp-size {tp} neither divides the model's {num_kv_heads} KV heads nor is a multiple of them",
            field="tp_size",
        )
    if pp > num_layers:
        raise ConfigError(f"--pp-size {pp} is more than the model's {num_layers} layers", field="pp_size")
