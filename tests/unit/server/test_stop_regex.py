"""Stop patterns find the same match however the text is cut, and no pattern takes long."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import re
import threading
from typing import Any

import pytest
import regex

from pdserve.errors import RequestError
from pdserve.server.text import stop_regex
from pdserve.server.text.stop_regex import (
    CONTEXT_CHARS,
    FLOOR_S,
    LOOK_S,
    QUICK_S,
    SHARED_RATE,
    SLOW_LOOKS,
    TURN_S,
    PatternCache,
    PatternThread,
    RegexMatcher,
    SlowLooks,
    compile_own,
)
from pdserve.server.text.tokenizer import Tokenizer
from tests.unit.server.server_kit import bench

TEXTS = ["total: 42 and more", "a\n\nb\n\n\nc", "no match at all", "END of ENDS: END1 END22"]
PATTERNS = [r"\d+", r"\n{3}", r"END\d", r"(?<=: )\w", r"a.*m", r"END22|zz"]


class World:
    """Patterns that take as long as the test says, on clocks of their own. No pattern matches."""

    def __init__(self) -> None:
        self.now_s = self.worked_s = 0.0
        self.timeouts: list[float] = []
        self.num_cut_short = 0
        """Looks that time out before they have worked at all: the library's clock counts all threads."""
        self.looks = SlowLooks(lambda: self.now_s, lambda: self.worked_s)
        self.takes_s: dict[str, float] = {}
        self._cache = SlowCache(self)

    def matcher(self, pattern: str, *, takes_s: float) -> RegexMatcher:
        self.takes_s[pattern] = takes_s
        return RegexMatcher([pattern], keep_match=False, looks=self.looks, cache=self._cache)


class SlowCache(PatternCache):
    """Its patterns take as long as the world says."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def get(self, pattern: str) -> Any:
        return Slow(self._world, pattern, self._world.takes_s[pattern])


@dataclasses.dataclass
class Slow:
    """A `regex.Pattern` whose look takes `takes_s`, or its timeout if that is less."""

    world: World
    pattern: str
    takes_s: float

    def search(self, text: str, start: int, *, partial: bool, concurrent: bool, timeout: float) -> None:
        assert not concurrent, "the interpreter's lock is kept"
        self.world.timeouts.append(timeout)
        if self.world.num_cut_short:
            self.world.num_cut_short -= 1
            raise TimeoutError
        self.world.worked_s += min(self.takes_s, timeout)
        if self.takes_s > timeout:
            raise TimeoutError


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
    matcher = RegexMatcher([pattern], keep_match=False, looks=SlowLooks())
    with pytest.raises(RequestError, match="takes too long") as refused:
        _pushed(matcher, ["word aaaa abcdefghi "] * 2000)
    assert (refused.value.status, refused.value.code) == (400, "stop_regex_too_slow")
    assert refused.value.field == "stop_regex"
    another = RegexMatcher([pattern], keep_match=False, looks=SlowLooks())
    assert another.push("") == "" and another.push("!") + another.flush() == "!", "quick on its own text"


@pytest.mark.parametrize("suspect_s", [0.0, 60.0])
def test_a_pattern_that_was_too_slow_has_less_time_for_a_while(
    suspect_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop_regex, "SUSPECT_S", suspect_s)
    world = World()
    innocent, other = world.matcher("zz", takes_s=QUICK_S), world.matcher("yy", takes_s=0.0)
    with pytest.raises(RequestError, match="takes too long"):
        world.matcher("zz", takes_s=1.0).push("a")
    world.now_s += 3600.0
    world.timeouts.clear()
    assert _pushed(innocent, ["b"] * 1000) == "b" * 1000, "other sequences go on while their own looks are quick"
    assert set(world.timeouts) == {FLOOR_S if suspect_s else LOOK_S}
    slow = world.matcher("zz", takes_s=QUICK_S + 0.0021)
    world.timeouts.clear()
    with pytest.raises(RequestError, match="takes too long"):
        _pushed(slow, ["c"] * 100)
    assert len(world.timeouts) == (5 if suspect_s else 48)
    world.now_s += 3600.0
    world.timeouts.clear()
    other.push("d")
    assert set(world.timeouts) == {LOOK_S}, "another pattern"


def test_slow_looks_have_a_limit_in_all() -> None:
    world = World()
    matcher = world.matcher(r"\d{2}", takes_s=0.02)
    assert matcher.push("a") + matcher.push("b") == "ab"
    with pytest.raises(RequestError, match="takes too long"):
        _pushed(matcher, ["c", "1"])


def test_the_looks_of_all_sequences_get_shorter_together_and_recover() -> None:
    world = World()
    for i in range(100):
        with pytest.raises(RequestError, match="takes too long"):
            world.matcher(f"slow{i}", takes_s=1.0).push("x")
    assert world.timeouts[:2] == pytest.approx([LOOK_S, LOOK_S])
    assert world.timeouts[3:] == pytest.approx([FLOOR_S] * 97)
    innocent = world.matcher("zz", takes_s=0.9 * FLOOR_S)
    assert _pushed(innocent, list("abc")) == "abc", "an empty budget refuses no quick pattern"
    world.now_s += 0.2
    world.matcher("yy", takes_s=0.0).push("x")
    assert world.timeouts[-2:] == pytest.approx([0.2 * SHARED_RATE] * 2)
    world.now_s += 3600.0
    world.timeouts.clear()
    for i in range(4):
        with pytest.raises(RequestError, match="takes too long"):
            world.matcher(f"again{i}", takes_s=1.0).push("x")
    assert world.timeouts[-1] == pytest.approx(FLOOR_S), "an hour saves up no more than the bucket holds"


def test_quick_looks_use_up_no_budget_and_owe_turns() -> None:
    world = World()
    matcher = world.matcher("zz", takes_s=QUICK_S)
    assert _pushed(matcher, ["a"] * 4) == "a" * 4 and not world.looks.must_yield  # two looks for each
    assert _pushed(matcher, ["a"] * 2000) == "a" * 2000
    assert set(world.timeouts) == {LOOK_S} and world.looks.must_yield


def test_a_look_that_was_cut_short_by_other_threads_is_repeated_once() -> None:
    world = World()
    matcher = world.matcher("zz", takes_s=0.0)
    world.num_cut_short = 1
    assert matcher.push("a") == "a" and world.num_cut_short == 0
    world.num_cut_short = 2
    with pytest.raises(RequestError, match="takes too long"):
        matcher.push("b")
    assert matcher.push("c") == "bc", "its pattern is not to blame"


@pytest.mark.asyncio
async def test_slow_looks_owe_the_event_loop_a_turn() -> None:
    world = World()
    world.matcher("zz", takes_s=TURN_S).push("a")
    assert world.looks.must_yield
    ran = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(ran.set_result, None)
    await world.looks.yield_to_loop()
    assert ran.done() and not world.looks.must_yield


@pytest.mark.asyncio
async def test_outputs_of_one_step_leave_turns_to_others(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[None] = []

    async def turn() -> None:
        turns.append(None)

    monkeypatch.setattr(SLOW_LOOKS, "must_yield", True)
    monkeypatch.setattr(SLOW_LOOKS, "yield_to_loop", turn)
    async with bench(tokenizer) as b:
        assert (await b.http.post("/generate", json={"text": ["a", "b"]})).status_code == 200
    assert len(turns) >= 2


@pytest.mark.parametrize("pattern", ["(", "a*", "", "[z-a]", "(?P<x>a)(?P<x", "x{99999999999}"])
def test_what_stops_everything_or_nothing_is_refused(pattern: str) -> None:
    with pytest.raises(RequestError, match="stop_regex"):
        compile_own(pattern)


@pytest.mark.asyncio
async def test_the_event_loop_compiles_no_pattern(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    size, threads = stop_regex.expanded_size, set[int]()

    def watched(pattern: str) -> int:
        threads.add(threading.get_ident())
        return size(pattern)

    monkeypatch.setattr(stop_regex, "expanded_size", watched)  # called where a pattern is compiled
    monkeypatch.setattr(stop_regex, "MAX_KEPT", 1)  # the cache has one pattern at a time
    async with bench(tokenizer) as b:
        body = {"text": "hi", "sampling_params": {"stop_regex": ["zz{200}", "yy", "xx"]}}
        assert (await b.http.post("/generate", json=body)).status_code == 200
    assert threads and threading.get_ident() not in threads


@pytest.mark.asyncio
async def test_patterns_that_wait_to_be_compiled_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_regex, "MAX_COMPILING", 3)
    monkeypatch.setattr(stop_regex, "MAX_COMPILING_OF_CLIENT", 2)
    go_on, compiled = threading.Event(), list[str]()

    class Held(PatternCache):
        def get(self, pattern: str) -> regex.Pattern[str]:
            assert go_on.wait(30.0)
            compiled.append(pattern)
            return super().get(pattern)

    thread = PatternThread(Held())
    waiting = [asyncio.create_task(thread.compile(["a1", "a2"], "a")) for _ in range(300)]
    await asyncio.sleep(0)
    with pytest.raises(RequestError) as refused:
        await thread.compile(["a2", "a3"], "a")
    assert (refused.value.status, refused.value.code) == (503, "stop_regex_busy")
    waiting += [asyncio.create_task(thread.compile(["a1", "b1"], "b"))]
    waiting[0].cancel()
    await asyncio.sleep(0)
    with pytest.raises(RequestError):
        await thread.compile(["c1"], "c")
    waiting += [asyncio.create_task(thread.compile([f"own{i}" for i in range(50)], ""))]
    await asyncio.sleep(0)
    go_on.set()
    found = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(found[0], asyncio.CancelledError)
    assert all(isinstance(one, dict) and set(one) >= {"a1"} for one in found[1:-1])
    assert sorted(compiled) == sorted({"a1", "a2", "b1", *(f"own{i}" for i in range(50))}), "each once"
    go_on.clear()
    await asyncio.wait_for(thread.compile(["a1", "b1"], "c"), 30.0)  # nothing is compiled


@pytest.mark.asyncio
async def test_hundreds_of_requests_with_one_pattern_are_taken(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        body = {"text": "hi", "sampling_params": {"stop_regex": "foo+bar"}}
        answers = await asyncio.gather(*(b.http.post("/generate", json=body) for _ in range(200)))
    assert {answer.status_code for answer in answers} == {200}


def test_patterns_that_are_kept_for_the_next_request_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.server.text.stop_regex.MAX_KEPT", 30_000)
    cache = PatternCache()
    first = cache.get("a{9000}0")
    assert cache.get("a{9000}0") is first, "kept"
    patterns = [f"a{{9000}}{i}" for i in range(9)]
    for pattern in patterns[1:]:
        cache.get(pattern)
    assert [pattern for pattern in patterns if cache.kept(pattern) is not None] == patterns[-3:]
    assert cache.get(patterns[0]) is not first
