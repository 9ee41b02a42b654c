"""Types of body fields that accept several shapes. Used by `schemas` and `responses.schemas`.

The parser sees `Any`: endpoints check these fields with their own error messages. The OpenAPI document shows the
shapes.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from pdserve.protocol.messages import MAX_ROOM

Schema = dict[str, Any]


def _any_of(*schemas: Schema) -> msgspec.Meta:
    return msgspec.Meta(extra_json_schema={"anyOf": [*schemas, {"type": "null"}]})


def _list(items: Schema, **limits: int) -> Schema:
    return {"type": "array", "items": items, **limits}


def _or_list(schema: Schema) -> msgspec.Meta:
    return _any_of(schema, _list({"anyOf": [schema, {"type": "null"}]}))


def _tagged(kind: str, properties: Schema) -> Schema:
    """Schema of an object with this `type`."""
    return {
        "type": "object",
        "properties": {"type": {"const": kind}, **properties},
        "required": ["type", *properties],
    }


_TEXT: Schema = {"type": "string"}
_SOME_TEXT: Schema = {"type": "string", "minLength": 1}
_INT: Schema = {"type": "integer"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_BOOL: Schema = {"type": "boolean"}
_OBJECT: Schema = {"type": "object"}
_IDS = _list(_COUNT)
_SOME_IDS = _list(_COUNT, minItems=1)
_NAMED: Schema = {"type": "object", "properties": {"name": _TEXT}, "required": ["name"]}
_CHOICE: Schema = {"enum": ["none", "auto", "required"]}

Texts = Annotated[Any, _any_of(_SOME_TEXT, _list(_SOME_TEXT, minItems=1))]
"""One text, or a list of texts."""
TokenIds = Annotated[Any, _any_of(_SOME_IDS, _list(_SOME_IDS, minItems=1))]
"""Token ids of one prompt, or a list of token id lists."""
Prompts = Annotated[Any, _any_of(_SOME_TEXT, _list(_SOME_TEXT, minItems=1), _SOME_IDS, _list(_SOME_IDS, minItems=1))]
"""A text or token ids, or a list of either."""
_EMBEDS: Schema = {"anyOf": [_SOME_TEXT, _list({"type": "array", "items": {"type": "number"}}, minItems=1)]}
InputEmbeds = Annotated[Any, _any_of(_EMBEDS, _list(_EMBEDS, minItems=1))]
"""Float lists, one for each token, or their base64; or a list of either."""
QueryText = Annotated[Any, _any_of(_SOME_TEXT, _SOME_IDS)]
"""A text, or token ids."""
ScoredItems = Annotated[Any, _any_of(_SOME_TEXT, _list(_TEXT, minItems=1), _list(_IDS, minItems=1))]
"""A text, a list of texts, or a list of token id lists."""
Documents = Annotated[
    Any, _any_of(_list({"anyOf": [_SOME_TEXT, {"type": "object", "required": ["text"]}]}, minItems=1))
]
"""Texts, or objects with a `text`."""
DecodedIds = Annotated[Any, _any_of(_IDS, _list(_IDS))]
SamplingFields = Annotated[
    Any,
    _any_of({"$ref": "#/components/schemas/NativeSampling"}, _list({"$ref": "#/components/schemas/NativeSampling"})),
]
Flags = Annotated[Any, _or_list(_BOOL)]
Counts = Annotated[Any, _or_list(_COUNT)]
Starts = Annotated[Any, _or_list({"type": "integer", "minimum": -1})]
PickedIds = Annotated[Any, _any_of(_IDS, _list({"anyOf": [_IDS, {"type": "null"}]}))]
Names = Annotated[Any, _or_list(_TEXT)]
"""The client's id of a request, or one id per prompt."""
Hosts = Annotated[Any, _or_list(_TEXT)]
Ports = Annotated[Any, _or_list({"type": "integer", "minimum": 1, "maximum": 65535})]
Rooms = Annotated[Any, _or_list({"type": "integer", "minimum": 0, "maximum": MAX_ROOM})]
JsonSchema = Annotated[Any, _any_of(_OBJECT, _TEXT)]
"""A JSON schema, as a JSON object or as text."""
StructuralTag = Annotated[Any, _any_of(_OBJECT, _TEXT)]
ResponseFormat = Annotated[
    Any,
    _any_of(
        {"type": "object", "properties": {"type": {"enum": ["text", "json_object"]}}, "required": ["type"]},
        _tagged(
            "json_schema",
            {
                "json_schema": {
                    "type": "object",
                    "properties": {"name": _TEXT, "schema": _OBJECT},
                    "required": ["schema"],
                }
            },
        ),
        {"type": "object", "properties": {"type": {"const": "structural_tag"}}, "required": ["type"]},
    ),
]
ToolChoice = Annotated[Any, _any_of(_CHOICE, _tagged("function", {"function": _NAMED}))]
ResponsesToolChoice = Annotated[Any, _any_of(_CHOICE, _tagged("function", {"name": _TEXT}))]
Input = Annotated[Any, _any_of(_SOME_TEXT, _list(_OBJECT, minItems=1))]
"""Input of `/v1/responses`: a text, or messages, calls and call outputs."""
