"""From the fields of a body to the grammar that its answers must follow. Pure.

Called by the endpoints; `grammar_check` finds out whether the grammar is one.
"""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

from pdserve.errors import RequestError
from pdserve.grammar.compile import MAX_CHARS
from pdserve.protocol.failure import Grammar, GrammarKind
from pdserve.server.request.schemas import ConstraintFields, NativeSampling
from pdserve.server.text.parsers.thinking import ReasoningFormat

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


ANY_OBJECT = {"type": "object"}
_META = re.compile(r"[\\.+*?()|\[\]{}^$/&~#-]")


@dataclasses.dataclass(frozen=True)
class Constraint:
    """A grammar, and the field of the body that it came in."""

    grammar: Grammar
    field: str


def native_constraint(fields: NativeSampling, prefix: str) -> Constraint | None:
    """What `sampling_params` of `/generate` ask for in `json_schema`, `regex`, `ebnf` or `structural_tag`; errors call
    them `prefix`.

    Raises:
        RequestError: 400 naming the field: of the wrong type, or the second one.
    """
    return _only(
        _text_constraint("json_schema", fields.json_schema, f"{prefix}.json_schema"),
        _text_constraint("regex", fields.regex, f"{prefix}.regex"),
        _text_constraint("ebnf", fields.ebnf, f"{prefix}.ebnf"),
        _text_constraint("structural_tag", fields.structural_tag, f"{prefix}.structural_tag"),
    )


def openai_constraint(fields: ConstraintFields) -> Constraint | None:
    """What a chat or completion body asks for, by any of its fields; None for free text.

    Raises:
        RequestError: 400 naming the field: of the wrong type, or the second one.
    """
    return _only(
        _response_format(fields.response_format),
        _text_constraint("json_schema", fields.json_schema, "json_schema"),
        _text_constraint("regex", fields.regex, "regex"),
        _text_constraint("ebnf", fields.ebnf, "ebnf"),
        _text_constraint("structural_tag", fields.structural_tag, "structural_tag"),
        _text_constraint("json_schema", fields.guided_json, "guided_json"),
        _text_constraint("regex", fields.guided_regex, "guided_regex"),
        _choice(fields.guided_choice, "guided_choice"),
        _text_constraint("ebnf", fields.guided_grammar, "guided_grammar"),
        _structured_outputs(fields.structured_outputs),
    )


def schema_constraint(schema: Any, field: str, *, lenient: bool = False) -> Constraint:
    """An answer that is JSON after `schema`, an object or a boolean. `lenient`: keywords that the engine does not know
    are passed over, not refused.

    Raises:
        RequestError: 400 naming `field`.
    """
    if not isinstance(schema, dict | bool):
        raise RequestError(f"{field} must be a JSON schema, got {type(schema).__name__}", field=field)
    if lenient and isinstance(schema, dict):
        options = schema.get("x-guidance", {})
        schema = {**schema, "x-guidance": {"lenient": True, **options}} if isinstance(options, dict) else schema
    return Constraint(Grammar(kind="json_schema", text=_dump(schema, field)), field)


def _only(*asked: Constraint | None) -> Constraint | None:
    """The one that there is."""
    constraints = [constraint for constraint in asked if constraint is not None]
    if len(constraints) > 1:
        names = " and ".join(constraint.field for constraint in constraints)
        raise RequestError(f"{names} exclude each other: an answer follows one grammar", field=constraints[1].field)
    return constraints[0] if constraints else None


def _text_constraint(kind: GrammarKind, value: Any, field: str) -> Constraint | None:
    """A grammar as text; schemas and structural tags may come as JSON values, too."""
    if value is None or value == "":
        return None
    if not isinstance(value, str):
        if kind not in ("json_schema", "structural_tag"):
            raise RequestError(f"{field} must be a string, got {type(value).__name__}", field=field)
        if kind == "json_schema":
            return schema_constraint(value, field)
        value = _dump(value, field)
    return Constraint(Grammar(kind=kind, text=value), field)


def _response_format(value: Any) -> Constraint | None:
    field = "response_format"
    if value is None:
        return None
    if not isinstance(value, dict):
        raise RequestError(f"{field} must be an object, got {type(value).__name__}", field=field)
    match value.get("type"):
        case "text":
            return None
        case "json_object":
            return schema_constraint(value.get("schema") or ANY_OBJECT, f"{field}.schema")
        case "json_schema":
            return _named_schema(value.get("json_schema"), f"{field}.json_schema")
        case "structural_tag":
            return _text_constraint("structural_tag", value, field)
        case kind:
            known = "text, json_object, json_schema or structural_tag"
            raise RequestError(f"{field}.type must be {known}, got {kind!r}", field=f"{field}.type")


def _named_schema(value: Any, field: str) -> Constraint:
    """OpenAI's `{name, schema, strict, description}`. Answers follow the schema whatever `strict` says; false allows
    keywords that cannot be enforced.
    """
    if not isinstance(value, dict):
        raise RequestError(f"{field} must be an object with name and schema", field=field)
    strict = value.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise RequestError(f"{field}.strict must be true or false", field=f"{field}.strict")
    if not isinstance(value.get("name", ""), str):
        raise RequestError(f"{field}.name must be a string", field=f"{field}.name")
    if value.get("schema") is None:
        raise RequestError(f"{field}.schema is missing", field=f"{field}.schema")
    return schema_constraint(value["schema"], f"{field}.schema", lenient=strict is False)


def _choice(options: Any, field: str) -> Constraint | None:
    """One of several texts."""
    if options is None:
        return None
    if not isinstance(options, list) or not options or not all(isinstance(text, str) and text for text in options):
        raise RequestError(f"{field} must be a list of strings that are not empty", field=field)
    pattern = "|".join(_META.sub(r"\\\g<0>", text) for text in options)
    return Constraint(Grammar(kind="regex", text=f"({pattern})"), field)


def _structured_outputs(value: dict[str, Any] | None) -> Constraint | None:
    """vLLM's newer form."""
    field = "structured_outputs"
    given = {name: entry for name, entry in (value or {}).items() if entry is not None and entry is not False}
    found: list[Constraint | None] = []
    for name, entry in given.items():
        where = f"{field}.{name}"
        match name:
            case "json":
                found.append(_text_constraint("json_schema", entry, where))
            case "json_object":
                found.append(schema_constraint(ANY_OBJECT, where))
            case "regex":
                found.append(_text_constraint("regex", entry, where))
            case "choice":
                found.append(_choice(entry, where))
            case "grammar":
                found.append(_text_constraint("ebnf", entry, where))
            case "structural_tag":
                found.append(_text_constraint("structural_tag", entry, where))
            case _:
                raise RequestError(f"{where} is not supported by this server", field=where, code="unsupported")
    return _only(*found)


def _dump(value: Any, field: str) -> str:
    """JSON text, the order of keys kept: it is the order of an answer's."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{field} is not valid JSON: {error}", field=field) from error
    if len(text) > MAX_CHARS:
        raise RequestError(f"{field} has {len(text)} characters, at most {MAX_CHARS} are taken", field=field)
    return text
