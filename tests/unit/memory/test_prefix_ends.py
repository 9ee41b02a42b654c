"""The end of a stored prompt is the last one behind which all is stored, found with few questions."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from pdserve.memory.layout import PageSpace
from pdserve.memory.tiers.prefix_ends import MOST_TRIES, PageKey, PrefixEnds

DIGESTS = [bytes([number]) * 32 for number in range(24)]


class Store:
    """Counts leading keys, and how often it was asked."""

    def __init__(self, windows: set[int], states: set[int]) -> None:
        self.has = {PageKey(DIGESTS[number], PageSpace.WINDOW) for number in windows}
        self.has |= {PageKey(DIGESTS[end - 1], PageSpace.SLOTS) for end in states}
        self.num_asked = 0

    def count(self, keys: Sequence[PageKey]) -> int:
        """Leading keys that are there."""
        self.num_asked += 1
        return next((index for index, key in enumerate(keys) if key not in self.has), len(keys))


@given(
    st.sets(st.integers(0, 23)),
    st.sets(st.integers(1, 24)),
    st.integers(0, 24),
    st.integers(0, 4),
    st.integers(0, 4),
    st.data(),
)
def test_the_end_is_the_one_that_a_search_of_all_ends_finds(
    windows: set[int], states: set[int], num_leading: int, grid: int, size: int, data: st.DataObject
) -> None:
    """`size`: pages of the window; 0: the model has none."""
    first = data.draw(st.integers(0, 24 - num_leading))
    after = data.draw(st.integers(0, 24))
    first_window = (lambda end: max(0, end - size)) if size else None
    ends = PrefixEnds(DIGESTS, first, after, grid, first_window)
    store = Store(windows, states)

    def is_usable(end: int) -> bool:
        has_state = not grid or (end % grid == 0 and end in states)
        return has_state and (not size or windows.issuperset(range(max(0, end - size), end)))

    usable = [end for end in range(after + 1, first + num_leading + 1) if is_usable(end)]
    assert ends.last(num_leading, store.count) == max(usable, default=0)


def test_a_hole_is_passed_over_at_once() -> None:
    store = Store(set(range(20)) - {15}, set())
    ends = PrefixEnds(DIGESTS, 0, 0, 0, lambda end: max(0, end - 8))
    assert ends.last(20, store.count) == 15 and store.num_asked == 2


def test_the_search_ends_where_the_store_fails_and_after_so_many_tries() -> None:
    digests = [number.to_bytes(32, "big") for number in range(2 * MOST_TRIES)]
    ends = PrefixEnds(digests, 0, 0, 1, None)
    asked: list[PageKey] = []

    def none_is_there(keys: Sequence[PageKey]) -> int:
        asked.extend(keys)
        return 0

    assert ends.last(2 * MOST_TRIES, lambda keys: None) == 0
    assert ends.last(2 * MOST_TRIES, none_is_there) == 0 and len(asked) == MOST_TRIES
