"""`Grammar`: the grammar of a structured output, as text."""

from __future__ import annotations

from typing import Literal

import msgspec

GrammarKind = Literal["json_schema", "regex", "ebnf", "structural_tag"]


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """Grammar of structured output. `text`: a JSON schema, structural tag, regular expression, GBNF or Lark grammar.

    The matcher state is never sent. Each server that samples rebuilds it from the grammar and the output ids.
    """

    kind: GrammarKind
    text: str
