"""The n-gram index against a scan of the tokens, and the cache of past outputs."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.scheduler.ngram import MAX_CANDIDATES, NgramIndex, PastOutputs


def scan(tokens: Sequence[int], low: int, high: int) -> tuple[int, int] | None:
    """(end, length) of the longest earlier occurrence of the last tokens, the most recent of equal ones."""
    best = None
    for end in range(len(tokens) - 1, 0, -1):
        length = 0
        while length < min(high, end) and tokens[end - 1 - length] == tokens[len(tokens) - 1 - length]:
            length += 1
        if length >= low and (best is None or length > best[1]):
            best = end, length
    return best


@given(st.lists(st.lists(st.integers(0, 3), max_size=70), max_size=6), st.integers(1, 4), st.integers(0, 4))
def test_it_finds_what_a_scan_finds(pieces: list[list[int]], low: int, more: int) -> None:
    index, tokens = NgramIndex(low, low + more), list[int]()
    for piece in pieces:
        index.extend(piece)
        tokens += piece
        found, expected = index.find(), scan(tokens, low, low + more)
        assert len(index) == len(tokens)
        if found is None or expected is None:
            assert found is None and expected is None
            continue
        assert found.length <= expected[1]
        assert tokens[found.end - found.length : found.end] == tokens[-found.length :] and found.end < len(tokens)
        num_occurrences = sum(tokens[i : i + low] == tokens[-low:] for i in range(len(tokens) - low))
        if num_occurrences <= MAX_CANDIDATES // 2:
            assert (found.end, found.length) == expected


@pytest.mark.parametrize("sizes", [[1] * 400, [400], [3, 397], [100, 1, 1, 200, 98]])
def test_tokens_may_come_one_by_one_or_many_at_once(sizes: list[int]) -> None:
    rng = random.Random(1)
    tokens = [rng.randrange(40) for _ in range(200)] * 2
    index, start = NgramIndex(2, 8), 0
    for size in sizes:
        index.extend(tokens[start : start + size])
        start += size
    found = index.find()
    assert found is not None and (found.end, found.length) == (200, 8)
    assert found.drafts(5) == tuple(tokens[200:205])


def test_a_text_that_repeats_itself_gives_as_many_drafts_as_are_asked_for() -> None:
    index = NgramIndex(2, 4)
    index.extend([9, 1, 2, 3, 1, 2, 3])
    found = index.find()
    assert found is not None and found.drafts(7) == (1, 2, 3, 1, 2, 3, 1)


def test_too_few_tokens_match_nothing() -> None:
    index = NgramIndex(3, 4)
    for token in (1, 1, 1):
        assert index.find() is None
        index.extend([token])
    assert index.find() is None
    index.extend([1])
    assert index.find() is not None


def test_a_match_goes_on_although_its_chain_is_long() -> None:
    """Later occurrences of the same two tokens do not hide the text that is being copied."""
    source = [7, 8, 50, 7, 8, 51, 7, 8, 52, 7, 8, 53]
    others = [token for i in range(MAX_CANDIDATES + 4) for token in (7, 8, 100 + i)]
    index = NgramIndex(2, 12)
    index.extend([*source, *others, 1, *source[:3]])
    drafts = []
    for token in source[3:]:
        found = index.find()
        drafts.append(found.drafts(1)[0] if found is not None else None)
        index.extend([token])
    assert drafts[:2] == [7, 8]
    assert drafts[2:] == source[5:]


def test_past_outputs_are_found_and_end_where_the_output_ended() -> None:
    past, request = PastOutputs(2, 6, 1000), NgramIndex(2, 6)
    past.add([1, 2, 3, 4])
    past.add([5, 6, 7])
    request.extend([9, 1, 2])
    found = past.find(request)
    assert found is not None and found.drafts(6) == (3, 4)
    request.extend([4, 5])
    assert past.find(request) is None  # the separator is between 4 and 5
    request.extend([7])
    assert past.find(request) is None


def test_the_longer_past_output_is_taken_else_the_newer() -> None:
    past, request = PastOutputs(2, 6, 1000), NgramIndex(2, 6)
    past.add([1, 2, 3, 10])
    past.add([8, 2, 3, 20])
    for tokens, draft in (([0, 2, 3], 20), ([1, 2, 3], 10)):
        request.extend(tokens)
        found = past.find(request)
        assert found is not None and found.drafts(1) == (draft,)


def test_past_outputs_are_bounded_and_can_be_cleared() -> None:
    past = PastOutputs(2, 6, 100)
    for start in range(0, 4000, 20):
        past.add(range(start, start + 20))
        assert len(past) <= 110
    newest, oldest = NgramIndex(2, 6), NgramIndex(2, 6)
    newest.extend([3990, 3991])
    oldest.extend([10, 11])
    assert past.find(newest) is not None and past.find(oldest) is None
    past.add([])
    past.add([1])
    past.clear()
    assert len(past) == 0 and past.find(newest) is None


def test_no_past_outputs_are_kept_without_capacity() -> None:
    past = PastOutputs(2, 6, 0)
    past.add(range(100))
    assert len(past) == 0


def test_equal_tokens_give_equal_drafts() -> None:
    """All ranks draft alike, however their tokens came in."""
    rng = random.Random(3)
    first, second = NgramIndex(2, 12), NgramIndex(2, 12)
    for _ in range(300):
        piece = [rng.randrange(12) for _ in range(rng.randrange(1, 4))]
        first.extend(piece)
        for token in piece:
            second.extend([token])
        one, two = first.find(), second.find()
        assert (one is None) == (two is None)
        assert one is None or two is None or (one.end, one.length) == (two.end, two.length)
