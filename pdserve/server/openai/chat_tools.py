"""Tools of a chat body, and the parser of a chat model's output: incremental text to reasoning, content and tool calls.

A `ToolPlan` has the template's tools, the grammar constraint of `tool_choice`, and the format of calls.

    text ─> ReasoningFormat ─┬─> reasoning           models with one format for all three have one reader, `Harmony`
                             └─> ToolFormat ─┬─> content
                                             └─> calls

The chat endpoints create one `ChatReader` per sequence.
"""

from __future__ import annotations

import dataclasses
import re
import uuid
from collections.abc import Sequence
from typing import Any

from pdserve.errors import RequestError
from pdserve.server.request.constraints import Constraint, schema_constraint
from pdserve.server.request.schemas import ChatBody, FunctionSpec
from pdserve.server.text.parsers.feed import (
    SPACE,
    CallArguments,
    CallOpened,
    Content,
    Delta,
    DeltaReader,
    IncrementalParser,
    Reasoning,
)
from pdserve.server.text.parsers.json_formats import JsonArguments, JsonList
from pdserve.server.text.parsers.tag_formats import Harmony
from pdserve.server.text.parsers.thinking import ReasoningFormat
from pdserve.server.text.parsers.tool_format import ToolFormat, Tools
from pdserve.server.text.tokenizer import Tokenizer

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
        raise RequestError(f"tools holds {len(tools)} tools; the maximum is {MAX_TOOLS}", field="tools")
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


class ReasoningCounter:
    """Counts the reasoning tokens of one sequence, tags included. Repeated calls read each token once."""

    def __init__(self, tokenizer: Tokenizer | None, plan: ReadPlan) -> None:
        self._thinking = plan.thinking if plan.inside is not False else None
        self._decoder = tokenizer.text_decoder(skip_special=False) if tokenizer is not None else None
        self._inside = plan.inside is True
        self._text = ""
        self._num_seen = 0
        self._num_reasoning = 0

    def count(self, token_ids: Sequence[int]) -> int:
        """Return the number of reasoning tokens. `token_ids`: the output so far, an extension of the last call's."""
        while self._thinking is not None and self._num_seen < len(token_ids):
            self._num_seen += 1
            self._step(self._thinking, token_ids[self._num_seen - 1])
        return self._num_reasoning

    def _step(self, thinking: ReasoningFormat, token_id: int) -> None:
        self._text += self._decoder.push(token_id) if self._decoder is not None else ""
        if not self._inside:
            begun = self._text.lstrip(SPACE)
            if not begun.startswith(thinking.opening):
                if not thinking.opening.startswith(begun):
                    self._thinking = None
                return
            self._inside = True
            self._text = begun.removeprefix(thinking.opening)
        self._num_reasoning = self._num_seen
        ends = (thinking.closing, *thinking.calls)
        if any(end in self._text for end in ends):
            self._thinking = None
        self._text = self._text[-max(len(end) for end in ends) :]


@dataclasses.dataclass(frozen=True)
class ReadPlan:
    """Parser settings for the outputs of one request.

    `tools`: schemas by name. `reading`: the format that tool calls are parsed in; None: no calls are parsed. `native`:
    the model's own tool format, which defines the form of call ids; None: unknown. `thinking`: the reasoning format;
    None: reasoning stays in the content. `inside`: see `ReasoningFormat.begins_inside`. `harmony`: one `Harmony` reader
    parses all. `show_reasoning` False: parsed reasoning is returned as content. `stream_reasoning` False: reasoning is
    sent in one piece, at its end. `one_call`: calls after the first are dropped.
    """

    tools: Tools = dataclasses.field(default_factory=dict)
    reading: type[ToolFormat] | None = None
    native: type[ToolFormat] | None = None
    thinking: ReasoningFormat | None = None
    inside: bool | None = None
    harmony: bool = False
    show_reasoning: bool = True
    stream_reasoning: bool = True
    one_call: bool = False

    @property
    def special_tokens(self) -> bool:
        """True when a format's markup is special tokens, which detokenization must keep."""
        formats = (self.reading is not None and self.reading.special_tokens, self.harmony)
        return any(formats) or (self.thinking is not None and self.thinking.special_tokens)


class ChatReader:
    """See the file's docstring. `called`: a tool call has begun."""

    def __init__(self, plan: ReadPlan) -> None:
        self._plan = plan
        self._thinking: DeltaReader | None = None
        self._calls: DeltaReader | None = None
        self._held_reasoning: list[str] = []
        self.called = False
        if plan.harmony:
            self._calls = _reader(Harmony(plan.tools))
        elif plan.reading is not None:
            self._calls = _reader(plan.reading(plan.tools))
        if plan.thinking is not None:
            feed = IncrementalParser()
            self._thinking = DeltaReader(feed, plan.thinking.read(feed, plan.inside))

    def push(self, text: str) -> list[Delta]:
        """Parse `text`, the continuation of all earlier text, and return the completed deltas."""
        if not text:
            return []
        return self._shown(self._parse_calls(self._thinking.push(text) if self._thinking else [Content(text)]))

    def finish(self) -> list[Delta]:
        """Return the remaining deltas at the end of the text."""
        deltas = self._parse_calls(self._thinking.finish() if self._thinking else [])
        deltas += self._calls.finish() if self._calls else []
        shown = self._shown(deltas)
        return [*shown, *self._take_reasoning()]

    def _parse_calls(self, deltas: Sequence[Delta]) -> list[Delta]:
        """Parse the tool calls in the content of `deltas`."""
        if self._calls is None:
            return list(deltas)
        read: list[Delta] = []
        for delta in deltas:
            read += self._calls.push(delta.text) if isinstance(delta, Content) else [delta]
        return read

    def _shown(self, deltas: Sequence[Delta]) -> list[Delta]:
        """Filter `deltas` by the plan's options and give each call an id."""
        shown: list[Delta] = []
        for delta in deltas:
            match delta:
                case Reasoning(text) if not self._plan.show_reasoning:
                    delta = Content(text)
                case Reasoning(text) if not self._plan.stream_reasoning:
                    self._held_reasoning.append(text)
                    continue
                case CallOpened(index) | CallArguments(index) if index and self._plan.one_call:
                    continue
                case CallOpened(index, name, call_id):
                    self.called = True
                    delta = CallOpened(index, name, call_id or self._new_id(index, name))
            shown += [*self._take_reasoning(), delta]
        return shown

    def _take_reasoning(self) -> list[Delta]:
        held, self._held_reasoning = self._held_reasoning, []
        return [Reasoning("".join(held))] if held else []

    def _new_id(self, index: int, name: str) -> str:
        random = uuid.uuid4().hex
        return f"call_{random[:24]}" if self._plan.native is None else self._plan.native.new_id(index, name, random)


def _reader(format: ToolFormat) -> DeltaReader:
    feed = IncrementalParser()
    return DeltaReader(feed, format.read(feed))


@dataclasses.dataclass
class ParsedToolCall:
    """A complete tool call; `arguments` is JSON text as the model wrote it."""

    name: str
    id: str | None = None
    arguments: str = ""


@dataclasses.dataclass
class ParsedAnswer:
    """All deltas of a response joined; None for a kind without deltas."""

    content: str | None = None
    reasoning: str | None = None
    calls: list[ParsedToolCall] = dataclasses.field(default_factory=list)


def join_deltas(deltas: Sequence[Delta]) -> ParsedAnswer:
    """Join `deltas`, in order, to a response."""
    whole = ParsedAnswer()
    for delta in deltas:
        match delta:
            case Content(text):
                whole.content = (whole.content or "") + text
            case Reasoning(text):
                whole.reasoning = (whole.reasoning or "") + text
            case CallOpened(_, name, call_id):
                whole.calls.append(ParsedToolCall(name, call_id))
            case CallArguments(index, text):
                whole.calls[index].arguments += text
    return whole
