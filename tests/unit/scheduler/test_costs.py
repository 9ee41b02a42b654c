"""What a step may cost: counts of what it looks at, never times (`benchmarks/bench_scheduler.py` has those)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.costed_states import STATES, Case, RoleName
from pdserve.transfer.handles import KVReceiver, KVSender
from pdserve.transfer.room import KVPoll
from tests.unit.scheduler.kit import Mono


def test_a_flood_of_short_prompts_fills_the_steps_budget() -> None:
    """However many start: only those that are passed over are limited."""
    mono = Mono(num_pages=400, num_rows=100, chunk=500, width=4)
    for index in range(100):
        mono.post(f"r{index}", [3, index, 7, 8, 9])
    assert len(mono.step()) == 100
    mono.run()
    assert mono.all_free()


@pytest.mark.parametrize(
    ("role", "state"), [(role, state) for role, state in STATES if role != "null" and state != "step"]
)
def test_rooms_in_which_nothing_happens_are_not_looked_at(
    role: RoleName, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = STATES[role, state](Case(role, state, "fcfs", 3, 40))
    made.server.step()
    looks: list[object] = []

    def counting(poll: Callable[[Any], KVPoll]) -> Callable[[Any], KVPoll]:
        def counted(handle: object) -> KVPoll:
            looks.append(handle)
            return poll(handle)

        return counted

    for kind in (KVReceiver, KVSender):
        monkeypatch.setattr(kind, "poll", counting(kind.poll))
    made.server.step()
    made.check()
    assert not looks
