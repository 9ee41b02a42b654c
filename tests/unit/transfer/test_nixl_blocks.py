"""Copies as indices into prepared lists: every index pair names exactly the bytes of the copies."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.transfer.transport import Copy
from pdserve.transfer.transports.nixl_blocks import (
    MAX_BLOCKS_PER_COPY,
    Ranges,
    Span,
    Spans,
    block_indices,
    choose_block,
    grid,
    split_by_kind,
)

HERE = Spans([Span(50_000, 4096 * 3, 1), Span(1000, 4096 * 2 + 100, 0)])
THERE = Spans([Span(7, 4096 * 4 + 1, 0), Span(900_000, 4096 * 3, 2)])
PAGES_HERE = [1000, 1000 + 4096, *(50_000 + 4096 * n for n in range(3))]
PAGES_THERE = [*(7 + 4096 * n for n in range(4)), *(900_000 + 4096 * n for n in range(3))]


def ranges(*copies: tuple[int, int, int]) -> Ranges:
    return Ranges.of([Copy(*copy) for copy in copies])


@settings(max_examples=100)
@given(
    unit=st.sampled_from([64, 512, 4096]),
    picks=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(1, 10**6)), min_size=1),
)
def test_indices_name_the_bytes_of_the_copies(unit: int, picks: list[tuple[int, int, int]]) -> None:
    copies = []
    for source, destination, length in picks:
        start, room = _place(HERE, unit, source)
        goal, there = _place(THERE, unit, destination)
        copies.append((start, goal, unit * (1 + length % min(room, there))))
    given_ranges = ranges(*copies)
    block = choose_block(given_ranges, HERE, THERE, (), max_lists=1)
    if block is None:
        return
    local, remote = block_indices(given_ranges, HERE, THERE, block)
    got = np.stack([HERE.blocks(block)[local, 0], THERE.blocks(block)[remote, 0]], axis=1).tolist()
    expected = [
        [source + at, destination + at] for source, destination, length in copies for at in range(0, length, block)
    ]
    assert got == expected


def _place(spans: Spans, unit: int, pick: int) -> tuple[int, int]:
    """An address that is a whole number of units into a span, and how many units follow it there."""
    places = [
        (int(start) + unit * n, int(length) // unit - n)
        for start, length in zip(spans.starts, spans.lengths, strict=True)
        for n in range(int(length) // unit)
    ]
    return places[pick % len(places)]


def test_a_list_has_each_span_s_whole_blocks_and_devices() -> None:
    blocks = HERE.blocks(4096)
    assert blocks[:, 0].tolist() == PAGES_HERE
    assert set(blocks[:, 1].tolist()) == {4096}
    assert blocks[:, 2].tolist() == [0, 0, 1, 1, 1]
    assert len(blocks) == HERE.num_blocks(4096)


def test_a_known_block_size_that_fits_is_taken_again() -> None:
    two_pages = ranges((50_000, 900_000, 8192))
    assert grid(two_pages, HERE, THERE) == 8192
    assert choose_block(two_pages, HERE, THERE, (4096, 64), max_lists=1) == 4096


def test_odd_and_very_long_copies_are_named_by_address() -> None:
    big = Spans([Span(0, 1 << 40, 0)])
    assert choose_block(ranges((7, 0, 1)), big, big, (), max_lists=4) is None  # a list of single bytes
    far = ranges((0, 0, 4096 * (MAX_BLOCKS_PER_COPY + 1)))
    assert choose_block(far, big, big, (4096,), max_lists=4) is None  # too many indices
    assert choose_block(ranges((0, 1 << 30, 1 << 30)), big, big, (4096 + 1,), max_lists=1) is None  # no more lists


def test_copies_are_parted_by_kind_of_memory() -> None:
    here = {"DRAM": Spans([Span(1000, 100, 0)]), "VRAM": Spans([Span(5000, 100, 3)])}
    there = {"DRAM": Spans([Span(1000, 100, 0)]), "VRAM": Spans([Span(9000, 100, 1)])}
    parts = dict(split_by_kind(ranges((5000, 9000, 10), (1000, 1010, 5), (5050, 9050, 50)), here, there))
    assert parts["VRAM", "VRAM"].sources.tolist() == [5000, 5050]
    assert parts["DRAM", "DRAM"].destinations.tolist() == [1010]
    assert len(parts) == 2


@pytest.mark.parametrize("destination", [0, 899, 1090, 5000])
def test_a_destination_outside_every_span_is_named(destination: int) -> None:
    spans = {"DRAM": Spans([Span(1000, 100, 0)])}
    with pytest.raises(ValueError, match=f"{destination:#x}"):
        split_by_kind(ranges((1000, destination, 20)), spans, spans)
