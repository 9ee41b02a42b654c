"""Where a model has stages, each computes a step of its own: what is planned while others are under way."""

from __future__ import annotations

import pytest

from tests.unit.scheduler.kit import PROMPT, Mono


def staged(num_stages: int, num_requests: int, late: bool) -> Mono:
    """So many requests that have all come to their second token."""
    mono = Mono(num_stages=num_stages, late=late, num_rows=num_requests, num_pages=16 * num_requests, chunk=None)
    for index in range(num_requests):
        mono.post(f"r{index}", [*PROMPT, index + 1], max_new_tokens=9)
    while (
        len(mono.scheduler.role.live) < num_requests or mono.scheduler.role.queues()["num_running_reqs"] < num_requests
    ):
        mono.step()
    return mono


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("num_stages", "num_requests"), [(2, 1), (2, 2), (2, 5), (3, 2), (3, 7), (4, 8)])
def test_steps_under_way_are_of_different_requests(num_stages: int, num_requests: int, late: bool) -> None:
    mono = staged(num_stages, num_requests, late)
    share = -(-num_requests // num_stages)
    steps = [set(mono.step()) for _ in range(3 * num_stages)]
    for at in range(len(steps) - num_stages + 1):
        under_way = steps[at : at + num_stages]
        assert sum(map(len, under_way)) == len(set().union(*under_way)), under_way
    settled = steps[num_stages:]
    assert max(map(len, settled)) == share
    for at in range(len(settled) - num_stages + 1):
        turn = set().union(*settled[at : at + num_stages])
        assert len(turn) == num_requests or num_requests < num_stages, turn
    mono.run()
    assert all(mono.tokens(f"r{index}") == [100] * 9 for index in range(num_requests)) and mono.all_free()


def test_chunks_of_a_prompt_follow_each_other_through_the_stages() -> None:
    mono = Mono(num_stages=3, late=True, chunk=2, num_rows=4)
    mono.post("a", [1, 2, 3, 4, 5, 6], max_new_tokens=2)
    assert [mono.step()["a"] for _ in range(3)] == [(0, 2), (2, 4), (4, 6)]
    assert mono.tokens("a") == [], "no chunk has been computed to its end"
    mono.run()
    assert mono.tokens("a") == [100, 100] and mono.all_free()
