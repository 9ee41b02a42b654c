"""Where prefill leaves recurrent states for the prefix cache. `PrefillManager` owns one `StateStops`.

    cached pages  ├────────────────────────┤         a prompt that shares them up to its junction
    cached state  ├───────┤                ┊
    new prompt            ├──── chunk ─────┼──────── chunk ─────────┼─ chunk ─┤
                          starts here      junction: keeps a state  last multiple of the grid: keeps a state

A state belongs to the end of its tokens, so a later prompt can use cached pages only up to a state. The request that
finds pages without a state behind them computes them again, and leaves the state for the next one. The state at the
last multiple of the grid serves the next turn of a conversation. States at the ends of other chunks are kept while
slots are free.
"""

from __future__ import annotations

import msgspec

from pdserve.executor.interface import BatchRow
from pdserve.scheduler.context import SchedulerContext
from pdserve.scheduler.request import Req

MIN_GRID_UNITS = 2
"""A chunk ends for a next turn if this many multiples of the grid are computed since the last state: a cut costs a
step.
"""


class StateStops:
    """Cuts chunks where a state is kept, and names the slots of the copies. The prefix cache must keep states."""

    def __init__(self, context: SchedulerContext) -> None:
        self._context = context
        self._grid = context.limits.state_grid
        assert self._grid and context.memory.has_cached_states, "states are kept on a grid"
        assert self._grid == context.memory.layout.round_down(self._grid), "the grid is of whole pages"

    def stops(self, req: Req) -> tuple[int, ...]:
        """Return the positions at which the chunks of a request end that starts now; see `Req.state_stops`."""
        if not self._keeps(req):
            return ()
        known = self._context.memory.match_pages(req.token_bytes(req.seq_len), req.seq_len - 1)
        junction, last = known - known % self._grid, req.seq_len - 1 - (req.seq_len - 1) % self._grid
        found = [junction] if junction > req.computed else []
        if last - max(req.computed, junction) >= MIN_GRID_UNITS * self._grid:
            found.append(last)
        return tuple(found)

    def end_of_chunk(self, req: Req, end: int) -> int:
        """Return where a chunk ends that could reach `end`."""
        return next((stop for stop in req.state_stops if req.planned < stop < end), end)

    def with_slots(self, req: Req, row: BatchRow) -> BatchRow:
        """Add the slots to a row: of the cached state from which the request continues, and of the state to keep."""
        assert req.lease is not None and req.lease.groups is not None
        groups, lease = self._context.memory.groups, req.lease.groups
        source = groups.source_of(lease) if row.start == req.computed else -1
        target = -1
        is_kept = row.end % self._grid == 0 and self._keeps(req)
        if is_kept and not self._context.memory.has_state_at(req.token_bytes(row.end)):
            target = groups.keep(lease, row.end, evict=row.end in req.state_stops)
        self._context.counters["states_copied"] += source >= 0
        self._context.counters["states_kept"] += target >= 0
        return msgspec.structs.replace(row, state_from=source, state_to=target)

    def committed(self, req: Req) -> None:
        """Record that a chunk is computed: its copy of a cached state has ended."""
        if req.lease is not None and req.lease.groups is not None:
            self._context.memory.groups.copied(req.lease.groups)

    def _keeps(self, req: Req) -> bool:
        return req.cacheable and not req.spec.probe
