"""What a request's output must look like, as a value. Made by the API process, obeyed by the executor that samples."""

from __future__ import annotations

from typing import Literal

import msgspec

GrammarKind = Literal["json_schema", "regex", "ebnf", "structural_tag"]


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """`text` is a JSON schema or structural tag as JSON, a regular expression, or a grammar (GBNF or Lark).

    Its state is never sent: it is a function of the grammar and the output ids, and each side that samples works it out
    from the ids that it knows.
    """

    kind: GrammarKind
    text: str
