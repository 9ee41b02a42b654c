"""Stop patterns: regular expressions of clients, searched in text that arrives in pieces.

Made by `Detokenizer` for sequences that ask for it. A pattern is a program of a stranger's, so each look has a time
limit, and so have all slow looks of a sequence together; and none sees further back than `CONTEXT_CHARS`, so that a
long answer costs no more per token than a short one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import regex

from pdserve.errors import RequestError

CONTEXT_CHARS = 4096
"""So much text before the newest piece a pattern can match in, or look back at."""
LOOK_S = 0.1
"""A pattern that needs longer for one look does not stop anything any more."""
SLOW_S = 0.25
"""Patterns of a sequence that have taken so long in all, quick looks not counted, do not stop anything any more."""
QUICK_S = 0.001
"""A look that is over by then is not slow."""


def check_pattern(pattern: str) -> None:
    """Refuse what is no regular expression, or matches the empty text.

    Raises:
        RequestError: 400 naming `stop_regex`.
    """
    try:
        empty = regex.compile(pattern).search("", timeout=LOOK_S)
    except (regex.error, RecursionError, OverflowError, TimeoutError) as error:
        message = f"stop_regex {pattern!r} is not a regular expression: {error}"
        raise RequestError(message, field="stop_regex") from error
    if empty is not None:
        raise RequestError(f"stop_regex {pattern!r} matches the empty text", field="stop_regex")


class RegexMatcher:
    """Finds the first match of any of `patterns`; of several, the one that begins first.

    Text that may be the beginning of a match is held back. `matched` is the pattern that stopped the text.
    """

    def __init__(self, patterns: Sequence[str], *, keep_match: bool) -> None:
        self._patterns = [regex.compile(pattern) for pattern in patterns]
        self._keep_match = keep_match
        self._text = ""
        self._num_shown = 0
        self._slow_s = 0.0
        self.matched: str | None = None

    def push(self, piece: str) -> str:
        """Text that may be shown now; after a match it is what stands before it (and the match, if kept)."""
        if not self._patterns or not piece:
            return piece
        self._text += piece
        found = [match for pattern in list(self._patterns) if (match := self._search(pattern, partial=False))]
        if found:
            first = min(found, key=lambda match: match.start())
            self.matched = first.re.pattern
            return self._show(first.end() if self._keep_match else first.start())
        starts = [match.start() for pattern in list(self._patterns) if (match := self._search(pattern, partial=True))]
        return self._show(min(starts, default=len(self._text)))

    def flush(self) -> str:
        """Text that was held back; the sequence has ended."""
        return "" if self.matched is not None else self._show(len(self._text))

    def _search(self, pattern: regex.Pattern[str], *, partial: bool) -> regex.Match[str] | None:
        if self._slow_s > SLOW_S:
            self._patterns.clear()
            return None
        begun = time.perf_counter()
        try:
            return pattern.search(self._text, self._num_shown, partial=partial, timeout=LOOK_S)
        except TimeoutError:
            self._patterns.remove(pattern)
            return None
        finally:
            self._slow_s += max(0.0, time.perf_counter() - begun - QUICK_S)

    def _show(self, end: int) -> str:
        """The text up to `end` that was not shown; forgets what is too far back."""
        end = max(end, self._num_shown, len(self._text) - CONTEXT_CHARS)
        text = self._text[self._num_shown : end]
        cut = max(0, end - CONTEXT_CHARS)
        self._text, self._num_shown = self._text[cut:], end - cut
        return text
