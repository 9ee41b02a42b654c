"""Pools of a stage that has no layer of a group: saved, loaded, zeroed and hashed as nothing."""

from __future__ import annotations

import torch

from pdserve.base.parallel import ParallelShape
from pdserve.config.groups import MemoryConfig, ServerConfig
from pdserve.executor import kv_pages
from pdserve.executor.kv_pages import PoolHasher
from pdserve.executor.pools import PoolDemand, make_pools, size_pools
from pdserve.memory.layout import GroupKind, KVLayout, PageSpace, attention_group
from pdserve.model.config import spec_from_config
from pdserve.transfer.checksum import checksum

CPU = torch.device("cpu")
LAYOUT = KVLayout(
    (
        attention_group(num_layers=2, layers=(1,), page_tokens=4, num_kv_heads=2, head_dim=8, dtype="float32"),
        attention_group(
            num_layers=2, layers=(0,), page_tokens=4, num_kv_heads=2, head_dim=8, dtype="float32",
            kind=GroupKind.WINDOW, window=6,
        ),
    )
)  # fmt: skip
CONFIG = {
    "architectures": ["MistralForCausalLM"], "vocab_size": 320, "hidden_size": 32, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": None,
}  # fmt: skip


def demand_of(held: KVLayout) -> PoolDemand:
    return PoolDemand(
        spec_from_config(CONFIG, {}, where="here"), held, "float32", CPU, max_rows=3, context_length=40, num_sharing=1,
        can_split_prompts=True, tp_size=1, pp_size=2,
    )  # fmt: skip


def test_ranks_agree_on_requests_and_then_on_pages() -> None:
    config = ServerConfig(memory=MemoryConfig(page_size=4, max_total_tokens=80))
    asked: list[int] = []

    def agree(number: int) -> int:
        asked.append(number)
        return number if len(asked) % 2 == 0 else 2

    sizes = [
        size_pools(config, demand_of(LAYOUT.of_rank(ParallelShape(pp_size=2).coord(rank))), agree) for rank in (0, 1)
    ]
    assert sizes[0] == sizes[1] and sizes[0].num_pages == 20
    assert asked == [3, 20, 3, 20], "requests, then pages"
    assert sizes[0].groups.num_window_pages == 2 * 10, "two requests of 40 tokens, whose chunks may be whole prompts"
    assert sizes[0].pages_of(LAYOUT.groups[1]) == 20


def test_pools_without_layers_hold_nothing() -> None:
    config = ServerConfig(memory=MemoryConfig(page_size=4, max_total_tokens=80))
    digests = []
    for rank in (0, 1):
        coord = ParallelShape(pp_size=2).coord(rank)
        held = LAYOUT.of_rank(coord)
        pools = make_pools(held, size_pools(config, demand_of(held), None), CPU, shareable=False)
        assert [pool.group.space for pool in pools] == [PageSpace.TOKENS, PageSpace.WINDOW]
        assert [pool.buffer[1] > 0 for pool in pools] == [rank == 1, rank == 0]
        for pool in pools:
            pool.pages_as_bytes.fill_(7)
        saved = kv_pages.save(pools, [[3, 1], [2]])
        digests.append(PoolHasher(pools, LAYOUT, coord).digest([[3, 1], [2]], [0, 0], 7)[0])
        kv_pages.zero(pools, [[3, 1], [2]])
        kv_pages.load(pools, saved, [[5, 6], [2]])
        assert all(bool((pool.pages_as_bytes[[2]] == 7).all()) for pool in pools)
    assert checksum(digests) is not None
