"""Stop patterns find the same match however the text is cut, and no pattern takes long."""

from __future__ import annotations

import random
import re

import pytest

from pdserve.errors import RequestError
from pdserve.server.stop_regex import CONTEXT_CHARS, RegexMatcher, check_pattern

TEXTS = ["total: 42 and more", "a\n\nb\n\n\nc", "no match at all", "END of ENDS: END1 END22"]
PATTERNS = [r"\d+", r"\n{3}", r"END\d", r"(?<=: )\w", r"a.*m", r"END22|zz"]


def _pushed(matcher: RegexMatcher, pieces: list[str]) -> str:
    shown = ""
    for piece in pieces:
        shown += matcher.push(piece)
        if matcher.matched is not None:
            return shown
    return shown + matcher.flush()


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("text", TEXTS)
def test_text_before_the_first_match_is_shown(pattern: str, text: str) -> None:
    found = re.search(pattern, text)
    for seed in range(5):
        rng = random.Random(seed)
        cuts = sorted(rng.sample(range(len(text)), 4))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        matcher = RegexMatcher([pattern], keep_match=False)
        shown = _pushed(matcher, pieces)
        assert shown == (text if found is None else text[: found.start()])
        assert matcher.matched == (None if found is None else pattern)


def test_a_match_may_be_kept() -> None:
    matcher = RegexMatcher(["zz", r"b\d"], keep_match=True)
    assert _pushed(matcher, ["a", "b", "1", "2"]) == "ab1" and matcher.matched == r"b\d"


def test_text_that_may_become_a_match_is_held_back_but_not_for_ever() -> None:
    matcher = RegexMatcher(["a.*b"], keep_match=False)
    assert matcher.push("xxa") == "xx"
    assert "".join(matcher.push("y" * 100) for _ in range(CONTEXT_CHARS // 100)) == ""
    assert len(matcher.push("y" * 200)) > 100, "older text is let go"


def test_a_pattern_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.server.stop_regex.LOOK_S", 1e-9)
    matcher = RegexMatcher([r"(\w+\s?)+\d$"], keep_match=False)
    assert _pushed(matcher, ["word " * 2000, "!"]) == "word " * 2000 + "!"


@pytest.mark.parametrize("pattern", ["(", "a*", "", "[z-a]", "(?P<x>a)(?P<x", "x{99999999999}"])
def test_what_stops_everything_or_nothing_is_refused(pattern: str) -> None:
    with pytest.raises(RequestError, match="stop_regex"):
        check_pattern(pattern)


def test_slow_looks_have_a_limit_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10_000))
    monkeypatch.setattr("pdserve.server.stop_regex.time.perf_counter", lambda: next(clock) * 0.05)
    matcher = RegexMatcher([r"\d{2}"], keep_match=False)
    shown = "".join(matcher.push(piece) for piece in ["a", "b", "c", "d", "1", "2", "e"])
    assert shown == "abcd12e" and matcher.matched is None, "given up after five looks of 50 ms"
