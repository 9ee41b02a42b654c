"""The scheduler's self-audit: what is held, and for whom. Runs at idle moments, on request, and in tests."""

from __future__ import annotations

from pdserve.scheduler.context import SchedulerContext
from pdserve.scheduler.roles.base import SchedulerRole
from pdserve.transfer.manager import KVManager


def audit(
    context: SchedulerContext, role: SchedulerRole, kv: KVManager | None, *, under_way: bool, idle: bool
) -> list[str]:
    """Return one sentence for each page, row, aux slot or room whose owner is missing, duplicate, or ended.

    Args:
        context: memory, host tier and saved KV.
        role: has the live requests, and those of other servers whose pages it keeps.
        kv: the transfer manager; None in a monolith.
        under_way: a step is under way, so rows and pages may be released later.
        idle: nothing is live, under way or copied.
    """
    memory, live, guests = context.memory, role.live, role.guests
    found = memory.audit()
    if not under_way:
        found += [
            f"{len(lease.pages)} {name} are held for request {lease.owner!r}, which has ended: {lease!r}"
            for name, pool in (("pages", memory.pages), ("aux slots", memory.aux))
            for lease in pool.live_leases
            if idle or (lease.held_by("request") and lease.owner not in live and lease.owner not in guests)
        ]
        taken = {req.row for req in live.values()}
        found += [f"row {row} is open for no request" for row in memory.table.open_rows if row not in taken]
    if kv is not None and (num_rooms := kv.counts()["rooms_live"]) > len(live) + len(guests):
        found.append(f"{num_rooms} rooms are live for {len(live)} requests")
    if context.tier is not None:
        found += context.tier.audit(idle=idle)
    if idle and context.offloaded_bytes:
        found.append(f"{context.offloaded_bytes} bytes of host memory are held for no request")
    return found
