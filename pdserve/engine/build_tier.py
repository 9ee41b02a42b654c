"""Makes the host tier of a rank: its slots in host memory, and the copies of its executor."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from pdserve.base.host_memory import available_bytes
from pdserve.config import ServerConfig
from pdserve.engine.replica import ReplicaEngine
from pdserve.errors import ConfigError
from pdserve.executor.factory import LoadedEngine, LocalRanks
from pdserve.executor.page_copies import pinned
from pdserve.memory.layout import KVLayout, PageSpace
from pdserve.memory.tiers.host_memory import HostMemory, slots_for, zeros
from pdserve.memory.tiers.host_pool import HostPool
from pdserve.ranks.rank_copies import CopyReports, RankCopyEnds

log = logging.getLogger(__name__)


def connect_leader(engine: ReplicaEngine, wake: Callable[[], None]) -> None:
    """Have rank 0 agree with all ranks on the ends of copies. `wake` is called when a copy has ended on all ranks."""
    group = engine.group
    if group is None:
        return
    reports = CopyReports(group.followers.shape.num_ranks, wake)
    group.followers.on_pages_copied = reports.add
    group.executor.copy_ends = RankCopyEnds(group.log, reports.add, reports)


def layouts_on_host(config: ServerConfig, built: LoadedEngine) -> list[KVLayout]:
    """Return the KV layouts of the ranks whose slots this host's free memory must hold, one for each rank.

    On the CPU the memory of slots is committed as they are used, so those of the other ranks, and replicas, count too.
    Pinned memory is taken at once, so what other ranks have taken is no longer free.
    """
    if built.device.type == "cuda":
        return [built.layout.of_rank(built.coord)]
    local, shape = LocalRanks.of(config.parallel, built.coord), built.coord.shape
    first = built.coord.rank - local.index
    ranks = range(first, first + local.count)
    return [built.layout.of_rank(shape.coord(rank)) for rank in ranks] * config.parallel.dp_size


def check_host_memory(
    layouts: Sequence[KVLayout],
    num_slots: Mapping[PageSpace, int],
    *,
    by_size: bool,
    available: int,
    fraction: float = 1.0,
) -> None:
    """Check that a host tier has slots of each space, and that this host has the memory that they will take.

    Args:
        layouts: the KV layout of each rank on this host.
        num_slots: slots of each space.
        by_size: True when `--hicache-size` sets the number of slots, False when `--hicache-ratio` does.
        available: bytes of host memory that are free.
        fraction: `--hicache-host-memory-fraction`, the share of `available` that the slots may take.

    Raises:
        ConfigError: there is no slot for a page, or the slots take more than their share of `available`. The field is
            that of the flag.
    """
    field = "hicache_size" if by_size else "hicache_ratio"
    if not all(num_slots.values()):
        raise ConfigError(
            f"the host tier would have no slot for a page; raise --{field.replace('_', '-')}", field=field
        )
    needed = sum(count * layout.space_bytes(space) for space, count in num_slots.items() for layout in layouts)
    if needed > fraction * available:
        of_ranks = f" for {len(layouts)} ranks of this host" if len(layouts) > 1 else ""
        raise ConfigError(
            f"the host tier would take {needed / 1e9:.2f} GB of host memory{of_ranks}, and {available / 1e9:.2f} GB "
            + ("are free; " if fraction == 1 else f"are free, {fraction:.0%} of it for the tier; ")
            + f"lower --{field.replace('_', '-')}"
            + ("" if by_size else ", or set --hicache-size (GB)"),
            field=field,
        )


def make_host_pool(config: ServerConfig, built: LoadedEngine) -> HostPool | None:
    """Make this rank's host tier; None where there is none.

    Raises:
        ConfigError: the slots of the ranks on this host take more host memory than is free.
    """
    if not config.wants_host_tier:
        return None
    layout, sizes = built.layout, built.group_sizes
    pages = {
        PageSpace.TOKENS: built.num_pages,
        PageSpace.WINDOW: sizes.num_window_pages,
        PageSpace.SLOTS: sizes.num_slots,
    }
    num_bytes = int(config.tier.hicache_size * 1e9) * built.coord.shape.num_ranks
    num_slots = slots_for(layout, pages, ratio=config.tier.hicache_ratio, num_bytes=num_bytes)
    allocate = pinned if built.device.type == "cuda" else zeros
    own = layout.of_rank(built.coord)
    check_host_memory(
        layouts_on_host(config, built),
        num_slots,
        by_size=num_bytes > 0,
        available=available_bytes(),
        fraction=config.tier.hicache_host_memory_fraction,
    )
    memory = HostMemory(own, num_slots, allocate)
    built.executor.open_host_tier(memory)
    log.info("host tier: %d tokens, %.2f GB", layout.tokens_in(num_slots[PageSpace.TOKENS]), memory.num_bytes / 1e9)
    return HostPool(layout, num_slots, memory)
