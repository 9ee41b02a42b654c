"""Stop patterns find the same match however the text is cut, and no pattern takes long."""

from __future__ import annotations

import random
import re
import threading

import pytest
import regex

from pdserve.errors import RequestError
from pdserve.server.stop_regex import CONTEXT_CHARS, RegexMatcher, _Compiled, compile_own
from pdserve.server.tokenizer import Tokenizer
from tests.unit.server.server_kit import bench

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


SLOW = [r"(\w+\s?)+\d$", "(a?)" * 40 + r"\1" * 9 + "x", "(?:" + "abcdefghij" * 20 + "){e<=50}"]


@pytest.mark.parametrize("pattern", SLOW)
def test_a_pattern_that_takes_too_long_ends_its_request(pattern: str) -> None:
    matcher = RegexMatcher([pattern], keep_match=False)
    with pytest.raises(RequestError, match="takes too long") as refused:
        _pushed(matcher, ["word aaaa abcdefghi "] * 2000)
    assert (refused.value.status, refused.value.code) == (400, "stop_regex_too_slow")
    assert refused.value.field == "stop_regex"
    another = RegexMatcher([pattern], keep_match=False)
    with pytest.raises(RequestError, match="takes too long"):
        another.push("x")  # which is quick: but other sequences of the request do not pay again


def test_a_pattern_is_forgiven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.server.stop_regex.FORGIVEN_S", 0.0)
    with pytest.raises(RequestError, match="takes too long"):
        _pushed(RegexMatcher([r"(\w+\s?)+\D\d$"], keep_match=False), ["word aaaa abcdefghi "] * 2000)
    assert RegexMatcher([r"(\w+\s?)+\D\d$"], keep_match=False).push("!") == "!"


def test_slow_looks_have_a_limit_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10_000))
    monkeypatch.setattr("pdserve.server.stop_regex.time.thread_time", lambda: next(clock) * 0.02)
    matcher = RegexMatcher([r"\d{2}"], keep_match=False)
    assert matcher.push("a") + matcher.push("b") == "ab"
    with pytest.raises(RequestError, match="takes too long"):
        _pushed(matcher, ["c", "1"])


@pytest.mark.parametrize("pattern", ["(", "a*", "", "[z-a]", "(?P<x>a)(?P<x", "x{99999999999}"])
def test_what_stops_everything_or_nothing_is_refused(pattern: str) -> None:
    with pytest.raises(RequestError, match="stop_regex"):
        compile_own(pattern)


@pytest.mark.asyncio
async def test_the_event_loop_compiles_no_pattern(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    get, threads = _Compiled.get, set[int]()

    def watched(self: _Compiled, pattern: str) -> regex.Pattern[str]:
        threads.add(threading.get_ident())
        return get(self, pattern)

    monkeypatch.setattr(_Compiled, "get", watched)
    async with bench(tokenizer) as b:
        body = {"text": "hi", "sampling_params": {"stop_regex": ["zz{200}", "yy"]}}
        assert (await b.http.post("/generate", json=body)).status_code == 200
    assert threads and threading.get_ident() not in threads


def test_patterns_that_are_kept_for_the_next_request_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.server.stop_regex.MAX_KEPT", 30_000)
    cache = _Compiled()
    first = cache.get("a{9000}0")
    assert cache.get("a{9000}0") is first, "kept"
    for i in range(1, 9):
        cache.get(f"a{{9000}}{i}")
    assert len(cache._kept) == 3 and cache.get("a{9000}0") is not first
