"""`tools` and `tool_choice` of a chat body: the template's tools, the grammar constraint, and the parser of calls."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from pdserve.errors import RequestError
from pdserve.server.request.constraints import Constraint, schema_constraint
from pdserve.server.request.schemas import ChatBody, FunctionSpec
from pdserve.server.text.parsers.json_formats import JsonArguments, JsonList
from pdserve.server.text.parsers.tool_format import ToolFormat

MAX_TOOLS = 256
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


@dataclasses.dataclass(frozen=True)
class ToolPlan:
    """Result of a body's `tools` and `tool_choice`.

    `shown`: tools for the template, None without tools. `schemas`: of the parameters, by function name. `reading`: the
    format that calls are parsed in; None: no calls are parsed. `constraint`: the grammar that `tool_choice` requires;
    None: none.
    """

    shown: list[dict[str, Any]] | None = None
    schemas: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    reading: type[ToolFormat] | None = None
    constraint: Constraint | None = None


def plan_tools(body: ChatBody, native: type[ToolFormat] | None) -> ToolPlan:
    """Plan the tools of `body`.

    `native`: the model's own tool format; None: unknown. Without it calls are parsed only if the grammar makes them
    JSON; otherwise they stay in the text.

    Raises:
        RequestError: 400 naming the field.
    """
    functions = _functions(body)
    choice = _choice(body, functions)
    if not functions or choice == "none":
        return ToolPlan()
    chosen = [function for function in functions if not isinstance(choice, tuple) or function.name in choice[1]]
    schemas = {function.name: function.parameters or _NO_PARAMETERS for function in chosen}
    shown = [_shown(function) for function in chosen]
    mode = choice[0] if isinstance(choice, tuple) else choice
    if mode == "auto":
        return ToolPlan(shown, schemas, native)
    if mode == "named":
        function = chosen[0]
        schema = _parameters(function)
        constraint = schema_constraint(schema, _where(functions, function), lenient=not function.strict)
        return ToolPlan([_shown(other) for other in functions], schemas, JsonArguments, constraint)
    schema = _list_schema(chosen, parallel=body.parallel_tool_calls is not False)
    strict = all(function.strict for function in chosen)
    return ToolPlan(shown, schemas, JsonList, schema_constraint(schema, "tools", lenient=not strict))


def _functions(body: ChatBody) -> list[FunctionSpec]:
    tools = body.tools or []
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"tools holds {len(tools)} tools, at most {MAX_TOOLS} are taken", field="tools")
    functions: list[FunctionSpec] = []
    for i, tool in enumerate(tools):
        field = f"tools[{i}]"
        if tool.type != "function":
            raise RequestError(
                f"{field}.type must be 'function', got {tool.type!r}", field=f"{field}.type", code="unsupported"
            )
        if tool.function is None:
            raise RequestError(f"{field}.function is missing", field=f"{field}.function")
        if not _NAME.fullmatch(tool.function.name):
            raise RequestError(
                f"{field}.function.name must have 1 to 128 letters, digits, '_', '-' and '.', "
                f"got {tool.function.name!r}",
                field=f"{field}.function.name",
            )
        if any(tool.function.name == other.name for other in functions):
            raise RequestError(f"tools has two functions {tool.function.name!r}", field=f"{field}.function.name")
        functions.append(tool.function)
    return functions


def _choice(body: ChatBody, functions: Sequence[FunctionSpec]) -> str | tuple[str, tuple[str, ...]]:
    """Parse `tool_choice`: `none`, `auto` or `required`; or a pair of mode (also `named`) and function names."""
    choice, field = body.tool_choice, "tool_choice"
    if choice is None or (not functions and choice in ("none", "auto")):
        return "auto"
    if not functions:
        raise RequestError("tool_choice needs tools", field=field)
    if isinstance(choice, str):
        if choice not in ("none", "auto", "required"):
            raise RequestError(f"tool_choice must be none, auto, required or a function, got {choice!r}", field=field)
        return choice
    known = {function.name for function in functions}
    mode: str
    names: tuple[str, ...]
    match choice:
        case {"type": "function", "function": {"name": str(name)}}:
            mode, names = "named", (name,)
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [*tools]}}:
            names = tuple(_allowed_name(tool) for tool in tools)
        case _:
            raise RequestError(
                'tool_choice must be none, auto, required, {"type": "function", "function": {"name": ...}}, or '
                '{"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}',
                field=field,
            )
    for name in names:
        if name not in known:
            raise RequestError(f"tool_choice names {name!r}, which is not in tools", field=field)
    if not names:
        raise RequestError("tool_choice allows no tool", field=field)
    return mode, names


def _allowed_name(tool: Any) -> str:
    match tool:
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return name
    raise RequestError("tool_choice.allowed_tools.tools must be functions with a name", field="tool_choice")


def _where(functions: Sequence[FunctionSpec], function: FunctionSpec) -> str:
    return f"tools[{functions.index(function)}].function.parameters"


def _shown(function: FunctionSpec) -> dict[str, Any]:
    """A tool in the form of chat templates."""
    fields: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        fields["description"] = function.description
    fields["parameters"] = function.parameters or _NO_PARAMETERS
    return {"type": "function", "function": fields}


def _parameters(function: FunctionSpec) -> dict[str, Any]:
    """The schema of the arguments. Its type is always object."""
    return {**_NO_PARAMETERS, **(function.parameters or {}), "type": "object"}


def _list_schema(functions: Sequence[FunctionSpec], *, parallel: bool) -> dict[str, Any]:
    """The schema of a list of calls. The definitions of each tool's schema move to the root, under unique names."""
    definitions: dict[str, Any] = {}
    options = []
    for i, function in enumerate(functions):
        schema = dict(_parameters(function))
        for word in ("$defs", "definitions"):
            moved = schema.pop(word, None)
            if isinstance(moved, dict):
                definitions |= {f"{i}.{word}.{name}": _moved(value, i) for name, value in moved.items()}
        options.append(
            {
                "type": "object",
                "properties": {"name": {"const": function.name}, "parameters": _moved(schema, i)},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    schema = {"type": "array", "minItems": 1, "items": {"anyOf": options}}
    return {**schema, **({} if parallel else {"maxItems": 1}), **({"$defs": definitions} if definitions else {})}


def _moved(value: Any, tool: int, depth: int = 0) -> Any:
    """Rewrite the references in `value` to the moved definitions of tool number `tool`."""
    if depth > 64:
        raise RequestError("tools: a schema is nested too deeply", field="tools")
    if isinstance(value, list):
        return [_moved(entry, tool, depth + 1) for entry in value]
    if not isinstance(value, dict):
        return value
    moved = {key: _moved(entry, tool, depth + 1) for key, entry in value.items()}
    match value.get("$ref"):
        case str(ref) if (found := re.fullmatch(r"#/(\$defs|definitions)/([^/]+)", ref)) is not None:
            moved["$ref"] = f"#/$defs/{tool}.{found[1]}.{found[2]}"
    return moved
