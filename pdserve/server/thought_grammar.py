"""A grammar for answers of models that think first: free thoughts up to their closing tag, then the grammar. Pure."""

from __future__ import annotations

import json
from typing import Any

from pdserve.protocol.grammar import Grammar
from pdserve.server.constraints import Constraint
from pdserve.server.parsers.thinking import ReasoningFormat

SPACE_AFTER_THOUGHTS = r"[ \n]{0,4}"


def after_thoughts(constraint: Constraint, thinking: ReasoningFormat, inside: bool | None) -> Constraint:
    """`constraint` for the text behind the thoughts. `inside`: see `ReasoningFormat.begins_inside`; where
    the model may begin to think by itself, it may also answer at once.

    A grammar that the client wrote by hand (`ebnf`, `structural_tag`) is for the whole text, and stays as it is.
    """
    answer = _node(constraint.grammar)
    if answer is None or inside is False:
        return constraint
    closing = {
        "type": "triggered_tags",
        "triggers": [thinking.closing],
        "tags": [{"begin": thinking.closing, "content": _spaced(answer), "end": ""}],
        "at_least_one": True,
        "stop_after_first": True,
    }
    whole: dict[str, Any] = closing
    if inside is None:
        opening = {"type": "const_string", "value": thinking.opening}
        whole = {"type": "or", "elements": [{"type": "sequence", "elements": [opening, closing]}, answer]}
    text = json.dumps({"type": "structural_tag", "format": whole}, ensure_ascii=False, separators=(",", ":"))
    return Constraint(Grammar(kind="structural_tag", text=text), constraint.field)


def _node(grammar: Grammar) -> dict[str, Any] | None:
    if grammar.kind == "json_schema":
        return {"type": "json_schema", "json_schema": json.loads(grammar.text)}
    if grammar.kind == "regex":
        return {"type": "regex", "pattern": grammar.text}
    return None


def _spaced(answer: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": [{"type": "regex", "pattern": SPACE_AFTER_THOUGHTS}, answer]}
