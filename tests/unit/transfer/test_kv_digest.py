"""Hashes of KV pages: any damage shows, and how the model is split does not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from pdserve.base.parallel import SINGLE, ParallelShape, RankCoord
from pdserve.memory.layout import GroupKind, KVGroup, attention_group
from pdserve.observe.compare_kv import compare
from pdserve.scheduler.kv_checksum import digest_as_json
from pdserve.transfer.checksum import RankDigest, checksum, digest_group
from pdserve.transfer.plan import RankShard

NUM_PAGES, NUM_TOKENS = 5, 18


def group_of(kind: GroupKind = GroupKind.FULL, heads: int = 4, dtype: str = "bfloat16", head_dim: int = 6) -> KVGroup:
    return attention_group(
        name="full", kind=kind, num_layers=4, page_tokens=4, num_kv_heads=heads, head_dim=head_dim, dtype=dtype
    )


def pages_of(group: KVGroup, seed: int = 1) -> np.ndarray:
    """uint8 `[page, layer, plane, head, block]` of the whole model."""
    shape = (NUM_PAGES, group.num_layers, group.num_planes, group.num_kv_heads, group.head_bytes)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def part(whole: np.ndarray, group: KVGroup, coord: RankCoord) -> np.ndarray:
    """What of it one rank has, as it has it."""
    cut = whole[:, group.layers_of(coord)][:, :, :, group.heads_of(coord)[0]]
    return np.ascontiguousarray(cut).reshape(len(whole), -1)


def digests(whole: np.ndarray, group: KVGroup, shape: ParallelShape, first: int = 0) -> list[RankDigest]:
    coords = [shape.coord(rank) for rank in range(shape.num_ranks)]
    return [
        RankDigest(p.rank, digest_group(RankShard.of(group, p), [part(whole, group, p)], first, NUM_TOKENS))
        for p in coords
    ]


def line(event: str, found: Sequence[RankDigest], pages: Sequence[int]) -> dict[str, Any]:
    known = {"key": "7/1/x", "rid": "r", "layout_fingerprint": "f", "num_tokens": NUM_TOKENS, "first_page": 0}
    return {"event": event, **known, "pages": list(pages), "ranks": [digest_as_json(digest) for digest in found]}


SHAPES = [ParallelShape(tp_size=tp, pp_size=pp) for tp in (1, 2, 4, 8) for pp in (1, 2, 3)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_split_has_the_same_checksum_and_compares(shape: ParallelShape) -> None:
    group = group_of()
    whole = pages_of(group)
    alone, split = digests(whole, group, ParallelShape()), digests(whole, group, shape)
    assert checksum(split) == checksum(alone) is not None
    report = compare([line("kv.sent", split, range(5)), line("kv.received", alone, range(10, 15))])
    assert (report.status, report.num_equal) == (0, 1)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_damage_is_found_and_named(shape: ParallelShape) -> None:
    group = group_of()
    whole = pages_of(group)
    hurt = whole.copy()
    hurt[3, 2, 1, 1, 11] ^= 4
    sent, received = digests(whole, group, shape), digests(hurt, group, ParallelShape())
    assert checksum(sent) != checksum(received)
    (found,) = compare([line("kv.received", received, range(10, 15)), line("kv.sent", sent, range(5))]).differences
    assert found.cells == (("full", 2, "v", 1),)
    if shape.tp_size <= group.num_kv_heads:
        assert found.pages == ((3, 3, 13, "full.v"),)
    assert "layers 2" in found.sentence() and "heads 1" in found.sentence()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("head_dim", [5, 6, 8])
def test_any_changed_bit_of_a_token_that_counts_shows_and_others_do_not(dtype: str, head_dim: int) -> None:
    group = group_of(heads=1, dtype=dtype, head_dim=head_dim)
    whole = pages_of(group)
    before = checksum(digests(whole, group, ParallelShape()))
    token_bytes = group.head_bytes // group.page_tokens
    rng = np.random.default_rng(3)
    for _ in range(60):
        page, layer, plane, byte = (int(rng.integers(n)) for n in (NUM_PAGES, 4, 2, group.head_bytes))
        hurt = whole.copy()
        hurt[page, layer, plane, 0, byte] ^= 1 << int(rng.integers(8))
        counts = page * 4 + byte // token_bytes < NUM_TOKENS
        assert (checksum(digests(hurt, group, ParallelShape())) != before) == counts


def test_pages_layers_planes_and_heads_that_change_places_show() -> None:
    group = group_of()
    whole = pages_of(group)
    before = checksum(digests(whole, group, ParallelShape()))
    for axis in range(4):
        order = list(range(whole.shape[axis]))
        order[0], order[1] = order[1], order[0]
        assert checksum(digests(np.take(whole, order, axis), group, ParallelShape())) != before, axis


def test_a_latent_has_one_plane_and_every_rank_has_it() -> None:
    group = group_of(GroupKind.MLA, heads=1)
    whole = pages_of(group)
    assert checksum(digests(whole, group, ParallelShape(tp_size=4))) == checksum(digests(whole, group, ParallelShape()))


def test_copies_of_a_head_that_differ_have_no_checksum() -> None:
    group = group_of(heads=1)
    whole = pages_of(group)
    hurt = whole.copy()
    hurt[0, 0, 0, 0, 0] ^= 1
    shape = ParallelShape(tp_size=2)
    good, bad = digests(whole, group, shape), digests(hurt, group, shape)
    assert checksum([good[0], bad[1]]) is None


def test_what_comes_in_pieces_is_the_same() -> None:
    group = group_of()
    window = RankShard.of(group, SINGLE)
    rows = pages_of(group).reshape(NUM_PAGES, -1)
    (whole,) = digest_group(window, [rows], 0, NUM_TOKENS)
    assert digest_group(window, [rows[:2], rows[2:]], 0, NUM_TOKENS) == (whole,)
    (first,), (later,) = (
        digest_group(window, [rows[:2]], 0, NUM_TOKENS),
        digest_group(window, [rows[2:]], 2, NUM_TOKENS),
    )
    assert first.with_more(later) == whole
    assert checksum([RankDigest(0, digest_group(window, [], 0, NUM_TOKENS))]) == "00000000.00000000"
