"""Stop patterns: regular expressions of clients, searched in text that arrives in pieces.

`Detokenizer` makes a `RegexMatcher` for each sequence. Patterns are untrusted: `GrammarCheck` compiles a pattern in
the compile worker before a thread compiles it here. Each search has a time limit, and so have all slow searches of a
sequence together. The searches of all sequences run on the event loop, so they share one more budget, `SlowLooks`. A
search looks back at most `CONTEXT_CHARS` characters, so its cost per token does not grow with the output.
"""

from __future__ import annotations

import asyncio
import collections
import functools
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import TypeAlias

import regex

from pdserve.errors import GrammarError, RequestError
from pdserve.grammar.bounds import MAX_STOP_REPEATED, check_pattern_size, expanded_size

Pattern: TypeAlias = "regex.Pattern[str]"
MAX_STOP_PATTERNS = 8
MAX_STOP_CHARS = 1024
CONTEXT_CHARS = 4096
"""Characters before the newest piece that a pattern can match or look back at."""
LOOK_S = 0.05
"""Time limit of one search in seconds of processor time; a slower search fails its request. See `FLOOR_S` for less."""
SLOW_S = 0.1
"""Processor seconds that the slow searches of one sequence may take in all. Quick searches are not counted."""
QUICK_S = 0.001
"""Searches of at most this many seconds are quick."""
SHARED_S = 0.1
"""Processor seconds of slow searches that all sequences of the process may take at once: the shared budget."""
SHARED_RATE = 0.1
"""Seconds by which the shared budget refills each second."""
FLOOR_S = 0.005
"""Time limit in seconds of a search while the shared budget is used up. A search with a cheap pattern takes some 0.05
ms.
"""
TURN_S = 0.01
"""After searches of this many processor seconds the event loop serves other tasks for `BREATH_S` seconds."""
BREATH_S = 0.005
MAX_COMPILING = 1024
MAX_COMPILING_OF_CLIENT = 256
"""Maximum number of distinct patterns that wait to be compiled: of all clients, and of one client."""
NEARLY = 0.8
"""A search that used this share of its time limit counts as timed out, because the library's clock and ours differ."""
SUSPECT_S = 10.0
"""Seconds for which a pattern is suspect after it was too slow for one sequence. Searches of other sequences with a
suspect pattern get `FLOOR_S` each and `SUSPECT_SLOW_S` in all.
"""
SUSPECT_SLOW_S = 0.01
"""Replaces `SLOW_S` for sequences with a suspect pattern. A sequence whose own searches are quick continues."""
MAX_KEPT = 100_000
"""Total expanded size of the compiled patterns that are cached: about 40 MB."""


def check_stop_regex(patterns: str | Sequence[str] | None, field: str = "stop_regex") -> tuple[str, ...]:
    """Check the number, length and apparent size of `patterns`; return them as a tuple. Compiles nothing.

    Raises:
        RequestError: 400 naming `field`.
    """
    given = (patterns,) if isinstance(patterns, str) else tuple(patterns or ())
    if len(given) > MAX_STOP_PATTERNS or any(len(text) > MAX_STOP_CHARS for text in given):
        message = f"{field} takes at most {MAX_STOP_PATTERNS} patterns of {MAX_STOP_CHARS} characters"
        raise RequestError(message, field=field)
    for pattern in given:
        try:
            check_pattern_size(pattern, MAX_STOP_REPEATED)
        except GrammarError as error:
            raise RequestError(f"{field} {pattern[:80]!r}: {error}", field=field) from error
    return given


def compile_own(patterns: str | Sequence[str] | None) -> None:
    """Compile trusted patterns at once: those of `SamplingParams` of the Python API.

    Raises:
        RequestError: naming `stop_regex`: a pattern is no regular expression, is too large, or matches the empty text.
    """
    for pattern in check_stop_regex(patterns):
        try:
            empty = regex.compile(pattern).search("", timeout=LOOK_S)
        except (regex.error, RecursionError, OverflowError, TimeoutError) as error:
            message = f"stop_regex {pattern!r} is not a regular expression: {error}"
            raise RequestError(message, field="stop_regex") from error
        if empty is not None:
            raise RequestError(f"stop_regex {pattern!r} matches the empty text", field="stop_regex")


class PatternCache:
    """LRU cache of compiled patterns, bounded by `MAX_KEPT`. The library's own cache has no bound in bytes."""

    def __init__(self) -> None:
        self._suspect_until: dict[str, float] = {}
        """By suspect pattern: when the suspicion ends, in monotonic seconds."""
        self._kept: collections.OrderedDict[str, tuple[Pattern, int]] = collections.OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def kept(self, pattern: str) -> Pattern | None:
        """Return `pattern` if it is in the cache. Any thread."""
        found = self._kept.get(pattern)
        return None if found is None else found[0]

    def get(self, pattern: str) -> Pattern:
        """Return the compiled pattern. Any thread: the lock is not held while a pattern is compiled."""
        kept = self._kept.get(pattern) or (regex.compile(pattern, cache_pattern=False), expanded_size(pattern))
        with self._lock:
            if pattern not in self._kept:
                self._kept[pattern] = kept
                self._size += kept[1]
            self._kept.move_to_end(pattern)
            while self._size > MAX_KEPT and len(self._kept) > 1:
                self._size -= self._kept.popitem(last=False)[1][1]
        return kept[0]

    def too_slow(self, pattern: str, *, remember: bool = True) -> RequestError:
        """Build the error of a sequence whose pattern timed out. `remember`: mark the pattern as suspect for
        `SUSPECT_S`.
        """
        now = time.monotonic()
        self._suspect_until = {text: until for text, until in self._suspect_until.items() if until > now}
        if remember:
            self._suspect_until.setdefault(pattern, now + SUSPECT_S)
        text = f"stop_regex {pattern[:80]!r} takes too long on the text of this answer"
        return RequestError(text, field="stop_regex", code="stop_regex_too_slow")

    def is_suspect(self, pattern: str) -> bool:
        """Whether the pattern was too slow for some sequence within the last `SUSPECT_S`."""
        return bool(self._suspect_until) and self._suspect_until.get(pattern, 0.0) > time.monotonic()


PATTERN_CACHE = PatternCache()
"""The cache of this process: requests often bring the same patterns."""


class PatternThread:
    """Compiles each pattern once, in a thread of its own: a pattern takes up to 0.1 s. Used on the event loop."""

    def __init__(self, cache: PatternCache = PATTERN_CACHE) -> None:
        self._cache = cache
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="stop-regex")
        self._compiling: dict[str, tuple[str, asyncio.Future[Pattern]]] = {}
        """By pattern: the client that requested it first, and the pending result."""

    async def compile(self, patterns: Collection[str], client: str) -> dict[str, Pattern]:
        """Return `patterns` compiled, for `RegexMatcher`. An empty `client` is the Python API.

        Raises:
            RequestError: 503, `MAX_COMPILING` patterns wait for the thread, or `MAX_COMPILING_OF_CLIENT` of `client`.
        """
        found = {pattern: kept for pattern in patterns if (kept := self._cache.kept(pattern)) is not None}
        wanted = set(patterns) - found.keys()
        if new := wanted - self._compiling.keys():
            self._check_bounds(len(new), client)
        for pattern in new:
            future = asyncio.get_running_loop().run_in_executor(self._thread, self._cache.get, pattern)
            self._compiling[pattern] = client, future
            future.add_done_callback(functools.partial(self._compiled, pattern))
        for pattern, future in [(pattern, self._compiling[pattern][1]) for pattern in wanted]:
            found[pattern] = await asyncio.shield(future)  # other requests may wait for the same future
        return found

    def _compiled(self, pattern: str, _: asyncio.Future[Pattern]) -> None:
        del self._compiling[pattern]

    def _check_bounds(self, num_new: int, client: str) -> None:
        if not client:
            return
        num_own = sum(owner == client for owner, _ in self._compiling.values())
        if len(self._compiling) + num_new > MAX_COMPILING or num_own + num_new > MAX_COMPILING_OF_CLIENT:
            message = f"{len(self._compiling)} stop patterns wait to be compiled already; try again"
            raise RequestError(message, status=503, code="stop_regex_busy", retry_after_s=1)


class SlowLooks:
    """The time budget for slow searches that all sequences of a process share: a token bucket.

    The bucket holds `SHARED_S` seconds and refills with `SHARED_RATE`. An empty bucket refuses no request. It shortens
    the time limit of searches to `FLOOR_S`, so only slower searches fail. Searches of up to `QUICK_S` take nothing from
    the bucket. Used on the event loop.

    The `regex` library measures a timeout by the processor time of all threads of the process, and with `concurrent`
    would release the GIL meanwhile. So a search keeps the GIL. A search that timed out before it had used its own limit
    is repeated once.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, worked: Callable[[], float] = time.thread_time
    ) -> None:
        """`clock`: monotonic seconds. `worked`: processor seconds that this thread has taken so far."""
        self._clock = clock
        self._worked = worked
        self._left_s = SHARED_S
        self._as_of = clock()
        self._since_turn_s = 0.0
        self.last_s = 0.0
        """Processor seconds that the newest search took."""
        self.must_yield = False
        """Whether searches, slow and quick, have taken `TURN_S` of the event loop since its last yield."""

    def timeout_s(self) -> float:
        """Return the time limit in seconds of the next search."""
        now = self._clock()
        self._left_s = min(SHARED_S, self._left_s + SHARED_RATE * (now - self._as_of))
        self._as_of = now
        return max(FLOOR_S, min(LOOK_S, self._left_s))

    def search(
        self, pattern: Pattern, text: str, start: int, *, partial: bool, most_s: float = LOOK_S
    ) -> tuple[regex.Match[str] | None, float]:
        """Find the first match at or behind `start`; return it and the seconds that count as slow.

        `most_s`: upper bound of the time limit in seconds. `partial`: also match a prefix of a match at the end of the
        text.

        Raises:
            TimeoutError: the search exceeded its time limit.
        """
        timeout_s, begun_s = min(self.timeout_s(), most_s), self._worked()
        slow_s = 0.0

        def look(seconds: float) -> regex.Match[str] | None:
            return pattern.search(text, start, partial=partial, concurrent=False, timeout=seconds)

        try:
            try:
                found = look(timeout_s)
            except TimeoutError:
                left_s = timeout_s - (self._worked() - begun_s)
                if left_s <= (1 - NEARLY) * timeout_s:
                    raise
                found = look(left_s)
        finally:
            self.last_s = self._worked() - begun_s
            slow_s = max(0.0, self.last_s - QUICK_S)
            self._left_s = max(0.0, self._left_s - slow_s)
            self._since_turn_s += self.last_s
            self.must_yield = self._since_turn_s >= TURN_S
        return found, slow_s

    async def yield_to_loop(self) -> None:
        """Let other tasks run for `BREATH_S` seconds."""
        self._since_turn_s, self.must_yield = 0.0, False
        await asyncio.sleep(BREATH_S)


SLOW_LOOKS = SlowLooks()
"""The shared budget of this process."""


class RegexMatcher:
    """Finds the first match of any of `patterns`; of several, the one that begins first.

    `patterns` must have passed `GrammarCheck.take_patterns`. The constructor compiles those that are not in `compiled`,
    which `PatternThread.compile` returns. Text that may be the beginning of a match is held back. `matched` is the
    pattern that stopped the text; None so far.
    """

    def __init__(
        self,
        patterns: Sequence[str],
        *,
        keep_match: bool,
        compiled: Mapping[str, Pattern] = MappingProxyType({}),
        looks: SlowLooks = SLOW_LOOKS,
        cache: PatternCache = PATTERN_CACHE,
    ) -> None:
        self._cache = cache
        self._looks = looks
        self._patterns = [compiled.get(pattern) or cache.get(pattern) for pattern in patterns]
        self._keep_match = keep_match
        self._text = ""
        self._num_shown = 0
        self._slow_s = 0.0
        self.matched: str | None = None

    def push(self, piece: str) -> str:
        """Append `piece`; return the text that may be sent now.

        After a match that is the text before the match (and the match itself with `keep_match`).

        Raises:
            RequestError: 400 naming `stop_regex`: the patterns take too long on this text.
        """
        if not self._patterns or not piece:
            return piece
        self._text += piece
        found = [match for pattern in self._patterns if (match := self._search(pattern, partial=False))]
        if found:
            first = min(found, key=lambda match: match.start())
            self.matched = first.re.pattern
            return self._show(first.end() if self._keep_match else first.start())
        starts = [match.start() for pattern in self._patterns if (match := self._search(pattern, partial=True))]
        return self._show(min(starts, default=len(self._text)))

    def flush(self) -> str:
        """Return the text that was held back; the sequence has ended."""
        return "" if self.matched is not None else self._show(len(self._text))

    def _search(self, pattern: Pattern, *, partial: bool) -> regex.Match[str] | None:
        is_suspect = self._cache.is_suspect(pattern.pattern)
        most_s = FLOOR_S if is_suspect else LOOK_S
        try:
            found, slow_s = self._looks.search(pattern, self._text, self._num_shown, partial=partial, most_s=most_s)
        except TimeoutError as error:
            own_s = self._slow_s + self._looks.last_s  # less where other sequences have used up the shared budget
            raise self._cache.too_slow(pattern.pattern, remember=own_s >= NEARLY * LOOK_S) from error
        self._slow_s += slow_s
        if slow_s and self._slow_s > (SUSPECT_SLOW_S if is_suspect else SLOW_S):
            raise self._cache.too_slow(pattern.pattern)
        return found

    def _show(self, end: int) -> str:
        """Return the unsent text up to `end`; drop text beyond `CONTEXT_CHARS` before it."""
        end = max(end, self._num_shown, len(self._text) - CONTEXT_CHARS)
        text = self._text[self._num_shown : end]
        cut = max(0, end - CONTEXT_CHARS)
        self._text, self._num_shown = self._text[cut:], end - cut
        return text
