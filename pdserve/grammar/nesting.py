"""Keeps brackets within brackets away from the engine's parsers, which recurse and would take the process with them."""

from __future__ import annotations

import re

from pdserve.errors import GrammarError

MAX_NESTING = 64
_BRACKETS = re.compile(r"\\.|[()\[\]{}]", re.DOTALL)


def check_nesting(text: str) -> None:
    """Refuse regular expressions and grammars whose brackets are nested too deeply.

    Brackets in strings and character classes are counted, too; so many of them are never needed.

    Raises:
        GrammarError: they are nested deeper than `MAX_NESTING`.
    """
    depth = 0
    for bracket in _BRACKETS.findall(text):
        depth += bracket in "([{"
        depth = max(0, depth - (bracket in ")]}"))
        if depth > MAX_NESTING:
            raise GrammarError(f"its brackets are nested deeper than {MAX_NESTING}")
