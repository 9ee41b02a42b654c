"""Who feeds whom, and the plan of it, against a byte-level oracle."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.base.parallel import SINGLE, ParallelShape, RankCoord, check_split, layers_of
from pdserve.errors import ConfigError, HandshakeError
from pdserve.memory.dtypes import DTYPE_BYTES
from pdserve.memory.layout import GroupKind, KVGroup, KVLayout, Plane, Shard, attention_group
from pdserve.transfer.plan import PageCopy, ShardFlow, check_shapes, plan_flow, shard_flows
from tests.share import rest_slow

Pool = npt.NDArray[np.int64]
TP_SIZES = (1, 2, 3, 4, 6, 8)


def group_of(num_layers: int, num_heads: int, page_tokens: int, kind: GroupKind = GroupKind.FULL) -> KVGroup:
    """Heads of one element, so that pools stay small; the page's tokens are its bytes."""
    return attention_group(
        kind=kind,
        num_layers=num_layers,
        page_tokens=page_tokens,
        num_kv_heads=num_heads,
        head_dim=1,
        dtype="bfloat16",
    )


def plane(name: str, num_heads: int, rows: int, width: int, dtype: str, shard: Shard) -> Plane:
    return Plane(
        name=name, num_heads=num_heads, num_heads_total=num_heads, rows=rows, width=width, dtype=dtype, shard=shard
    )


def state_group(layers: Sequence[int], num_layers: int, planes: tuple[Plane, ...]) -> KVGroup:
    return KVGroup(
        name="state",
        kind=GroupKind.STATE,
        layers=tuple(layers),
        num_model_layers=num_layers,
        page_tokens=0,
        planes=planes,
    )


def delta_net(layers: Sequence[int], num_layers: int, num_keys: int, per_key: int) -> KVGroup:
    """The state of GatedDeltaNet layers: a convolution's columns of q, k and v by head, and the recurrent state."""
    num_values = num_keys * per_key
    planes = (
        plane("conv_q", num_keys, 2, 3, "bfloat16", Shard.KEY_HEAD),
        plane("conv_k", num_keys, 2, 3, "bfloat16", Shard.KEY_HEAD),
        plane("conv_v", num_values, 3, 3, "bfloat16", Shard.VALUE_HEAD),
        plane("state", num_values, 2, 3, "float32", Shard.VALUE_HEAD),
    )
    return state_group(layers, num_layers, planes)


def mamba2(layers: Sequence[int], num_layers: int, num_heads: int, num_groups: int) -> KVGroup:
    """The state of Mamba-2 layers, whose B and C are divided by group or replicated."""
    planes = (
        plane("conv_x", num_heads, 2, 3, "bfloat16", Shard.VALUE_HEAD),
        plane("conv_b", num_groups, 3, 3, "bfloat16", Shard.GROUP),
        plane("conv_c", num_groups, 3, 3, "bfloat16", Shard.GROUP),
        plane("state", num_heads, 2, 5, "float32", Shard.VALUE_HEAD),
    )
    return state_group(layers, num_layers, planes)


@st.composite
def groups(draw: st.DrawFn) -> KVGroup:
    num_layers = draw(st.integers(4, 7))
    layers = sorted(draw(st.sets(st.integers(0, num_layers - 1), min_size=1)))
    match draw(st.sampled_from(("attention", "latent", "uneven", "delta net", "mamba"))):
        case "delta net":
            return delta_net(layers, num_layers, draw(st.sampled_from((1, 2, 4, 12))), draw(st.integers(1, 3)))
        case "mamba":
            return mamba2(layers, num_layers, draw(st.sampled_from((1, 2, 8, 24))), draw(st.integers(1, 8)))
        case "latent":
            kind, num_heads, v_head_dim = draw(st.sampled_from((GroupKind.MLA, GroupKind.INDEX))), 1, None
        case "uneven":
            kind, num_heads, v_head_dim = GroupKind.WINDOW, draw(st.integers(1, 16)), 3
        case _:
            kind = draw(st.sampled_from((GroupKind.FULL, GroupKind.DRAFT)))
            num_heads, v_head_dim = draw(st.integers(1, 16)), None
    return attention_group(
        kind=kind,
        num_layers=num_layers,
        layers=layers,
        page_tokens=draw(st.sampled_from((1, 2, 3, 16, 64))),
        num_kv_heads=num_heads,
        head_dim=1,
        v_head_dim=v_head_dim,
        dtype="bfloat16",
    )


def sizes(group: KVGroup) -> list[int]:
    """Tensor sizes that the heads of all planes can be split over."""
    divided = [p.num_heads_total for p in group.planes if p.shard not in (Shard.REPLICATED, Shard.GROUP)]
    return [size for size in TP_SIZES if all(total % size == 0 or size % total == 0 for total in divided)]


def shapes(group: KVGroup) -> st.SearchStrategy[ParallelShape]:
    return st.builds(ParallelShape, tp_size=st.sampled_from(sizes(group)), pp_size=st.integers(1, 4))


NOT_SENT = -1


def held_by(group: KVGroup, coord: RankCoord, num_pages: int) -> Pool:
    """The pool of a rank, `[page, byte]`: a number for each byte of the model's KV, `NOT_SENT` for padding."""
    stage = layers_of(group.num_model_layers, coord.shape.pp_size, coord.pp_rank)
    page_starts = np.arange(num_pages, dtype=np.int64)[:, None] << 40
    columns: list[Pool] = []
    for layer in (layer for layer in group.layers if layer in stage):
        end = 0
        for index, each in enumerate(group.planes):
            item = DTYPE_BYTES[each.dtype]
            columns.append(np.full((num_pages, -end % item), NOT_SENT))
            end += -end % item
            for head in each.heads_of(coord):
                first = (layer << 32) + (index << 28) + (head << 20)
                columns.append(page_starts + first + np.arange(each.rows * each.width * item))
                end += each.rows * each.width * item
        columns.append(np.full((num_pages, -end % max(DTYPE_BYTES[p.dtype] for p in group.planes)), NOT_SENT))
    return np.concatenate([np.zeros((num_pages, 0), dtype=np.int64), *columns], axis=1)


def check_bytes(
    group: KVGroup,
    source: ParallelShape,
    destination: ParallelShape,
    num_pages: int,
    source_pages: Sequence[int],
    target_pages: Sequence[int],
    ranges: Sequence[range],
) -> None:
    """Carry out all plans, a range of layers after the other, and look at every byte of every decode rank."""
    sources = [held_by(group, source.coord(rank), num_pages).ravel() for rank in range(source.num_ranks)]
    complete = [held_by(group, destination.coord(rank), num_pages) for rank in range(destination.num_ranks)]
    found = [np.full(pool.size, NOT_SENT, dtype=np.int64) for pool in complete]
    num_writes = [np.zeros(pool.size, dtype=np.int64) for pool in complete]
    for flow in shard_flows(group, source, destination):
        ours, theirs = source.coord(flow.source_rank), destination.coord(flow.destination_rank)
        for layers in [None] if len(ranges) == 1 else ranges:
            for copy in plan_flow(group, ours, theirs, flow, source_pages, target_pages, layers):
                taken = sources[flow.source_rank][copy.source : copy.source + copy.num_bytes]
                assert len(taken) == copy.num_bytes, "read outside the pool"
                where = slice(copy.destination, copy.destination + copy.num_bytes)
                found[flow.destination_rank][where] = taken
                num_writes[flow.destination_rank][where] += 1
    for rank, pool in enumerate(found):
        assert complete[rank].shape[1] == group.of_rank(destination.coord(rank)).page_bytes
        expected = np.full_like(complete[rank], NOT_SENT)
        expected[list(target_pages)] = complete[rank][list(source_pages)]
        assert (pool == expected.ravel()).all(), rank
        assert num_writes[rank].max(initial=0) <= 1, "a byte was written twice"


@given(data=st.data(), group=groups(), num_pages=st.integers(1, 4))
@settings(max_examples=300, deadline=None)
def test_every_byte_of_every_decode_rank_comes_from_the_right_place_once(
    data: st.DataObject, group: KVGroup, num_pages: int
) -> None:
    source, destination = data.draw(shapes(group)), data.draw(shapes(group))
    count = data.draw(st.integers(0, num_pages))
    source_pages = data.draw(st.permutations(range(num_pages)))[:count]
    target_pages = data.draw(st.permutations(range(num_pages)))[:count]
    cuts = data.draw(st.sets(st.integers(1, group.num_model_layers - 1)))
    ends = [*sorted(cuts), group.num_model_layers]
    ranges = [range(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    check_bytes(group, source, destination, num_pages, source_pages, target_pages, ranges)


@pytest.mark.parametrize("num_heads", range(1, 17))
def test_every_byte_between_all_splits_there_are(num_heads: int) -> None:
    random = np.random.default_rng(num_heads)
    plain = group_of(4, num_heads, 1)
    every = [ParallelShape(tp_size=tp, pp_size=pp) for tp in sizes(plain) for pp in (1, 2, 3, 4)]
    for source in every:
        for destination in every:
            group = group_of(4, num_heads, int(random.choice((1, 2, 3, 16, 64))))
            num_pages = int(random.integers(1, 4))
            pages = random.permutation(num_pages)[: random.integers(1, num_pages + 1)].tolist()
            check_bytes(group, source, destination, num_pages, pages, pages[::-1], [range(4)])


def token_group(kind: GroupKind, num_heads: int, v_head_dim: int | None = None) -> KVGroup:
    return attention_group(
        kind=kind,
        num_layers=5,
        layers=(0, 3, 4),
        page_tokens=2,
        num_kv_heads=num_heads,
        head_dim=2,
        v_head_dim=v_head_dim,
        dtype="bfloat16",
        window=4 if kind is GroupKind.WINDOW else None,
    )


STAMPED = KVLayout((group_of(5, 1, 1), delta_net((0, 1, 2, 4), 5, 24, 1))).with_stamps()
ALL_KINDS = {
    "full": token_group(GroupKind.FULL, 24),
    "window": token_group(GroupKind.WINDOW, 24),
    "wider keys": token_group(GroupKind.WINDOW, 24, 1),
    "draft": token_group(GroupKind.DRAFT, 24),
    "latent": token_group(GroupKind.MLA, 1),
    "index": token_group(GroupKind.INDEX, 1),
    "delta net": delta_net((0, 1, 2, 4), 5, 24, 1),
    "more value heads": delta_net((1, 3), 5, 24, 2),
    "groups": mamba2((0, 2, 3), 5, 24, 24),
    "groups on some splits": mamba2((0, 2, 3), 5, 24, 8),
    "replicated groups": mamba2((0, 2, 3), 5, 24, 5),
    "stamp": STAMPED.groups[2],
}
"""A group of every kind, with planes of every shard. Its heads can be split over all of `TP_SIZES`."""


def test_every_kind_and_every_shard_is_among_the_groups() -> None:
    assert {group.kind for group in ALL_KINDS.values()} == set(GroupKind)
    assert {plane.shard for group in ALL_KINDS.values() for plane in group.planes} == set(Shard)


@pytest.mark.parametrize(
    ("kind", "prefill_tp"),
    rest_slow(
        sorted(itertools.product(ALL_KINDS, TP_SIZES), key=lambda case: (TP_SIZES.index(case[1]) + len(case[0])) % 6),
        keep=6,
    ),
)
def test_every_plane_between_all_splits_there_are(kind: str, prefill_tp: int) -> None:
    """P and D of 1, 2, 3, 4, 6 and 8 tensor ranks and 1 to 4 stages: every byte arrives, from one rank, and no other.

    One case is a kind and the tensor ranks of P; the default tests take a few cases.
    """
    group = ALL_KINDS[kind]
    assert sizes(group) == list(TP_SIZES)
    for prefill_pp, decode_tp, decode_pp in itertools.product((1, 2, 3, 4), TP_SIZES, (1, 2, 3, 4)):
        source = ParallelShape(tp_size=prefill_tp, pp_size=prefill_pp)
        destination = ParallelShape(tp_size=decode_tp, pp_size=decode_pp)
        ranges = [range(5)] if (prefill_pp + decode_tp) % 2 else [range(2), range(2, 5)]
        check_bytes(group, source, destination, 2, [1], [0], ranges)


@pytest.mark.parametrize(
    "group",
    [delta_net((0, 1, 2, 4), 5, 4, 2), delta_net((1, 3), 5, 12, 2)],
    ids=["fewer key heads than ranks", "3 key heads a rank"],
)
def test_planes_with_fewer_heads_than_ranks(group: KVGroup) -> None:
    every = [ParallelShape(tp_size=tp, pp_size=pp) for tp in sizes(group) for pp in (1, 3)]
    for source, destination in itertools.product(every, every):
        check_bytes(group, source, destination, 2, [1], [0], [range(5)])


def test_a_replicated_plane_has_one_writer_while_its_neighbours_are_split() -> None:
    group = mamba2((0,), 1, 8, 3)
    flows = shard_flows(group, ParallelShape(tp_size=4), ParallelShape())
    assert [len(flow.heads[0]) for flow in flows] == [2, 2, 2, 2]
    assert [len(flow.heads[1]) for flow in flows] == [3, 0, 0, 0]


@pytest.mark.parametrize("num_heads", range(1, 17))
def test_all_tensor_sizes_feed_each_other(num_heads: int) -> None:
    group = group_of(4, num_heads, 1)
    for source_size in sizes(group):
        for destination_size in sizes(group):
            found = shard_flows(group, ParallelShape(tp_size=source_size), ParallelShape(tp_size=destination_size))
            for rank in range(destination_size):
                own = [head for flow in found if flow.destination_rank == rank for head in flow.heads[0]]
                coord = ParallelShape(tp_size=destination_size).coord(rank)
                assert sorted(own) == list(group.heads_of(coord)[0])
            per_source = [sum(flow.source_rank == rank for flow in found) for rank in range(source_size)]
            assert max(per_source) <= -(-len(found) // source_size) + 1, "replicas share the work"


def test_a_latent_has_one_writer_and_every_tensor_rank_gets_it() -> None:
    group = group_of(4, 1, 2, GroupKind.MLA)
    assert shard_flows(group, ParallelShape(tp_size=4), ParallelShape()) == (
        ShardFlow(0, 0, (0, 1, 2, 3), (range(1),)),
    )
    found = shard_flows(group, ParallelShape(), ParallelShape(tp_size=4))
    assert [(flow.source_rank, flow.destination_rank) for flow in found] == [(0, 0), (0, 1), (0, 2), (0, 3)]


def plan_alone(group: KVGroup, source: list[int], destination: list[int]) -> list[PageCopy]:
    (flow,) = shard_flows(group, ParallelShape(), ParallelShape())
    return plan_flow(group, SINGLE, SINGLE, flow, source, destination)


def test_pages_side_by_side_in_both_pools_become_one_copy() -> None:
    group = group_of(2, 1, 4)
    plan = plan_alone(group, [3, 4, 5, 9, 10], [0, 1, 2, 4, 3])
    assert [copy.num_bytes // group.page_bytes for copy in plan] == [3, 1, 1]
    assert len(plan_alone(group, list(range(100)), list(range(50, 150)))) == 1
    assert plan_alone(group, [], []) == []


def test_equal_heads_on_both_sides_are_one_copy_a_page_however_many_layers() -> None:
    group = group_of(6, 4, 2)
    source, destination = ParallelShape(tp_size=2, pp_size=3), ParallelShape(tp_size=2)
    for flow in shard_flows(group, source, destination):
        coords = source.coord(flow.source_rank), destination.coord(flow.destination_rank)
        assert len(plan_flow(group, *coords, flow, [0, 1], [4, 2])) == 2


def test_pages_must_come_in_pairs() -> None:
    with pytest.raises(AssertionError):
        plan_alone(group_of(1, 1, 1), [1, 2], [1])


@pytest.mark.parametrize(("prefill", "decode", "fits"), [(1, 1, True), (4, 1, True), (3, 3, True), (1, 2, False)])
def test_decode_has_as_many_stages_as_prefill_or_one(prefill: int, decode: int, fits: bool) -> None:
    one, other = ParallelShape(pp_size=prefill), ParallelShape(pp_size=decode)
    if fits:
        check_shapes(one, other)
        return
    with pytest.raises(HandshakeError) as caught:
        check_shapes(one, other)
    assert caught.value.field == "pp_size" and "pp_size" in str(caught.value)


@pytest.mark.parametrize(
    ("shape", "field"),
    [
        (ParallelShape(tp_size=5), "tp_size"),
        (ParallelShape(tp_size=4), "tp_size"),
        (ParallelShape(tp_size=6), None),
        (ParallelShape(tp_size=12), None),
        (ParallelShape(pp_size=6), "pp_size"),
        (ParallelShape(tp_size=2, pp_size=5), None),
    ],
)
def test_a_model_that_cannot_be_split_so_is_refused_by_field(shape: ParallelShape, field: str | None) -> None:
    def check() -> None:
        check_split(shape, num_heads=12, num_kv_heads=6, num_layers=5, intermediate_size=48)

    if field is None:
        check()
        return
    with pytest.raises(ConfigError) as caught:
        check()
    assert caught.value.field == field


def test_no_stage_has_more_layers_than_the_next_to_last_and_all_are_there() -> None:
    for num_layers in range(1, 12):
        group = dataclasses.replace(group_of(num_layers, 1, 1))
        for pp_size in range(1, min(num_layers, 5) + 1):
            shape = ParallelShape(pp_size=pp_size)
            stages = [group.layers_of(shape.coord(rank)) for rank in range(pp_size)]
            assert [layer for stage in stages for layer in stage] == list(range(num_layers))
            assert len(stages[-1]) == min(map(len, stages)) and max(map(len, stages)) - len(stages[-1]) <= 1
