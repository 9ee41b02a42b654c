"""SGLang's `POST /parse_function_call` and `/separate_reasoning`: parse a model's text without generating any.

They read text with the same formats as chat completions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from pdserve.errors import RequestError
from pdserve.server.context import ServerContext
from pdserve.server.http.json_http import convert, json_response, read_json_object
from pdserve.server.openai.chat_tools import ChatReader, ReadPlan, join_deltas, plan_tools
from pdserve.server.request.schemas import ChatBody, FunctionCallBody, ReasoningBody
from pdserve.server.text.chat_formats import HARMONY, REASONING_NAMES, TOOL_FORMATS, TOOL_NAMES
from pdserve.server.text.parsers.feed import Content, Delta, Reasoning
from pdserve.server.text.parsers.thinking import THINKING
from pdserve.server.text.parsers.tool_format import ToolFormat

MAX_CALL_CHARS = 1 << 15
"""Maximum characters of a text with tool calls. The time for markup alone grows with its square, up to a second."""
MAX_REASONING_CHARS = 1 << 18
"""Maximum characters of a text with reasoning, whose time is proportional to its length."""
LARGE_CHARS = 1 << 12
"""Longer texts are parsed in a thread, one at a time, not on the event loop."""
_THREAD = ThreadPoolExecutor(max_workers=1, thread_name_prefix="parse")


async def parse_function_call(context: ServerContext, request: Request) -> Response:
    """Return `{normal_text, calls}`; each call has `tool_index` (from 0), `name` and `parameters`, a JSON text.

    Raises:
        RequestError: the body is invalid; the error names the field.
    """
    body = convert(await read_json_object(request, context.max_body_bytes), FunctionCallBody)
    _check_length(body.text, MAX_CALL_CHARS)
    tool_format = _tool_format(context, body.tool_call_parser)
    schemas = plan_tools(ChatBody(tools=body.tools), tool_format).schemas
    plan = ReadPlan(tools=schemas, reading=tool_format, native=tool_format, show_reasoning=False)
    answer = join_deltas(await _parse(plan, body.text))
    calls = [
        {"tool_index": index, "name": call.name, "parameters": call.arguments}
        for index, call in enumerate(answer.calls)
    ]
    return json_response({"normal_text": answer.content or "", "calls": calls})


async def separate_reasoning(context: ServerContext, request: Request) -> Response:
    """Return `{reasoning_text, text}`; both are empty texts where there is none.

    With `return_blocks` also `blocks`, `{type, text}` in the order of the text with `type` `reasoning` or `text`, and
    the texts of either type as `reasoning_blocks` and `text_blocks`. The last block is a text, if need be an empty one.

    Raises:
        RequestError: the body is invalid; the error names the field.
    """
    body = convert(await read_json_object(request, context.max_body_bytes), ReasoningBody)
    plan = _reasoning_plan(context, body.reasoning_parser)
    _check_length(body.text, MAX_CALL_CHARS if plan.harmony else MAX_REASONING_CHARS)
    deltas = await _parse(plan, body.text)
    answer = join_deltas(deltas)
    found: dict[str, Any] = {"reasoning_text": answer.reasoning or "", "text": answer.content or ""}
    if body.return_blocks:
        found |= _blocks(deltas)
    return json_response(found)


def _blocks(deltas: Sequence[Delta]) -> dict[str, Any]:
    blocks: list[tuple[str, str]] = []
    for delta in deltas:
        match delta:
            case Reasoning(text):
                kind = "reasoning"
            case Content(text):
                kind = "text"
            case _:
                continue
        if blocks and blocks[-1][0] == kind:
            text = blocks.pop()[1] + text
        blocks.append((kind, text))
    if not blocks or blocks[-1][0] != "text":
        blocks.append(("text", ""))
    return {
        "reasoning_blocks": [text for kind, text in blocks if kind == "reasoning"],
        "text_blocks": [text for kind, text in blocks if kind == "text"],
        "blocks": [{"type": kind, "text": text} for kind, text in blocks],
    }


def _check_length(text: str, most: int) -> None:
    if len(text) > most:
        raise RequestError(f"text has {len(text)} characters; the maximum is {most}", field="text")


def _tool_format(context: ServerContext, name: str | None) -> type[ToolFormat]:
    found = context.formats.tools if name is None else TOOL_FORMATS.get(name)
    if found is None:
        raise _no_parser("tool_call_parser", name, TOOL_NAMES)
    return found


def _reasoning_plan(context: ServerContext, name: str | None) -> ReadPlan:
    formats = context.formats
    if name == HARMONY or (name is None and formats.harmony):
        return ReadPlan(harmony=True)
    thinking = formats.thinking if name is None else THINKING.get(name)
    if thinking is None:
        raise _no_parser("reasoning_parser", name, REASONING_NAMES)
    return ReadPlan(thinking=thinking, inside=True if thinking.from_start else None)


def _no_parser(field: str, name: str | None, names: tuple[str, ...]) -> RequestError:
    problem = "must be given, because this server has no parser of its own" if name is None else f"is {name!r}"
    return RequestError(f"{field} {problem}; known are {', '.join(names)}", field=field)


async def _parse(plan: ReadPlan, text: str) -> list[Delta]:
    def parse() -> list[Delta]:
        reader = ChatReader(plan)
        return [*reader.push(text), *reader.finish()]

    if len(text) <= LARGE_CHARS:
        return parse()
    return await asyncio.get_running_loop().run_in_executor(_THREAD, parse)
