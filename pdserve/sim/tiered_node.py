"""The host tier of a simulated server: slots that are poisoned when they are freed, and copies that take time."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pdserve.memory.layout import KVLayout, PageSpace
from pdserve.memory.tiers.host_memory import slots_for
from pdserve.memory.tiers.host_pool import HostPool
from pdserve.scheduler.host_tier import HostTier
from pdserve.sim.hash_lm import HashExecutor
from pdserve.sim.network import SimNet
from pdserve.sim.shape import Shape

SLOW_S = 20.0
"""Least seconds of a copy that the fault `slow_tier` hits."""


class TieredNode:
    """Mixin of `SimNode`: makes its host tier. Ranks other than 0 have the bytes of rank 0's node."""

    layout: KVLayout
    executor: HashExecutor
    _shape: Shape
    _net: SimNet

    def _host_pool(self) -> HostPool | None:
        """Return the slots of the host tier; None without one."""
        shape = self._shape
        if not shape.host_ratio:
            return None
        pages = {
            PageSpace.TOKENS: shape.num_pages,
            PageSpace.WINDOW: shape.num_window_pages,
            PageSpace.SLOTS: shape.num_slots,
        }
        num_slots = slots_for(self.layout, pages, ratio=shape.host_ratio)
        self._open_tier(num_slots)
        return HostPool(self.layout, num_slots, on_free=self._on_slots_free)

    def _open_tier(self, num_slots: Mapping[PageSpace, int]) -> None:
        """Make the bytes of the host tier, with copies that end at random moments."""
        tier, net = self.executor.open_tier(num_slots), self._net

        def later(action: Callable[[], None]) -> None:
            slow = net.happens("copies to and from the host tier that take long", net.faults.slow_tier)
            net.later(action, min_delay_s=SLOW_S if slow else 0.0)

        tier.later = later

    def _on_slots_free(self, space: PageSpace, slots: list[int]) -> None:
        """Poison slots that became free."""
        assert self.executor.tier is not None
        self.executor.tier.poison(space, slots)

    def _tier_counts(self, tier: HostTier | None) -> dict[str, int]:
        """Return the slots of the tier by name; cached ones that can be evicted count as free."""
        if tier is None:
            return {}
        counts = tier.pool.counts()
        counts["host_pages_free"] += counts["host_pages_evictable"]
        return counts
