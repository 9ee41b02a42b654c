"""Who feeds whom when a prefill replica and a decode replica are split differently. Pure; read by `chunk` and checks.

Every (layer, KV head) that a decode rank holds comes from exactly one prefill rank. Where several prefill ranks hold
the same head, the decode ranks that need it are spread over them; a latent (MLA) is held by all of a stage.
"""

from __future__ import annotations

import dataclasses
import functools

from pdserve.base.parallel import ParallelShape
from pdserve.errors import HandshakeError
from pdserve.memory.layout import KVGroup


@dataclasses.dataclass(frozen=True, slots=True)
class ShardFlow:
    """`source_rank` sends `layers` x `heads`, numbers within the model, to `destination_rank`."""

    source_rank: int
    destination_rank: int
    layers: range
    heads: range


def check_shapes(prefill: ParallelShape, decode: ParallelShape) -> None:
    """Which splits may work together: tensor sizes as they like, decode's stages as many as prefill's, or one.

    Raises:
        HandshakeError: naming `pp_size`.
    """
    if decode.pp_size not in (1, prefill.pp_size):
        raise HandshakeError("pp_size", f"{prefill.pp_size} on prefill", f"{decode.pp_size} on decode")


@functools.lru_cache(maxsize=256)
def feeds(group: KVGroup, source: ParallelShape, destination: ParallelShape) -> tuple[ShardFlow, ...]:
    """All feeds of `group`, the whole model's, by destination rank, layers and heads."""
    found = []
    for rank in range(destination.num_ranks):
        place = destination.place(rank)
        for stage in range(source.pp_size):
            layers = _overlap(group.layers_of(place), group.layers_of(source.place(stage * source.tp_size)))
            if layers:
                found += [
                    ShardFlow(stage * source.tp_size + tp_rank, rank, layers, heads)
                    for tp_rank, heads in _head_sources(group, source, place.tp_rank, group.heads_of(place))
                ]
    return tuple(found)


def _head_sources(group: KVGroup, source: ParallelShape, asker: int, wanted: range) -> list[tuple[int, range]]:
    """Tensor ranks of a source stage, each with the heads it gives of those `wanted` by tensor rank `asker`."""
    holders: dict[range, list[int]] = {}
    for tp_rank in range(source.tp_size):
        holders.setdefault(group.heads_of(source.place(tp_rank)), []).append(tp_rank)
    return [(ranks[asker % len(ranks)], heads) for held, ranks in holders.items() if (heads := _overlap(held, wanted))]


def _overlap(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))
