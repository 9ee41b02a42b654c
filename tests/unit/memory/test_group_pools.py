"""Window pages of requests that decode with drafts: the commitment is enough, whatever is accepted."""

from __future__ import annotations

import random

import pytest

from pdserve.memory.group_pools import GroupPools, GroupPoolSizes
from pdserve.memory.layout import PageSpace
from pdserve.sim.hash_lm import hash_layout


@pytest.mark.parametrize("chunk", [None, 2, 16])
@pytest.mark.parametrize("max_drafts", [0, 1, 4, 11])
@pytest.mark.parametrize(("page_tokens", "window"), [(1, 3), (2, 9), (4, 4), (16, 40)])
def test_a_request_with_drafts_always_finds_its_window_pages(
    page_tokens: int, window: int, max_drafts: int, chunk: int | None
) -> None:
    rng, layout = random.Random(page_tokens * 100 + max_drafts), hash_layout(page_tokens, window=window)
    num_prompt, max_len = 20, 150
    sizes = GroupPoolSizes(step_tokens=chunk, decode_step_tokens=1 + max_drafts, num_slots=2)
    most = GroupPools(layout, sizes).most_window_pages(max_len)
    sizes = GroupPoolSizes(step_tokens=chunk, decode_step_tokens=1 + max_drafts, num_slots=2, num_window_pages=2 * most)
    pools = GroupPools(layout, sizes)
    for decode_only in (False, True):
        lease = pools.reserve("a", max_len, decode_only=decode_only)
        assert lease is not None
        position = 0
        step = chunk or num_prompt
        while position < num_prompt and not decode_only:
            end = min(num_prompt, position + step)
            _, released = pools.cover(lease, position, end)
            pools.give_back(lease, released)
            position = end
        position = num_prompt
        pools.begin_decode(lease, max_len)
        while position < max_len:
            num_drafts = rng.randrange(min(max_drafts, max_len - position - 1) + 1)
            end = position + 1 + num_drafts
            _, released = pools.cover(lease, position, end)
            assert set(layout.window_pages(position, end)) <= set(lease.window)
            pools.give_back(lease, released)
            position += 1 + rng.randrange(num_drafts + 1)
        pools.end(lease)
        assert pools.audit() == [] and pools.allocator_of(PageSpace.WINDOW).num_free == 2 * most
