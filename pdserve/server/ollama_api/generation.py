"""`POST /api/chat` and `/api/generate`: streams are lines of JSON, and the last line has `done` and the counts.

    OllamaChatBody     ─> chat_of        ─┐
    OllamaGenerateBody ─> chat_of_prompt ─┴> prepare_chat ─> OllamaCall ─> an answer, or its lines

With `raw` the prompt of `/api/generate` is tokenized without the chat template. A body without a prompt loads the model
at Ollama; here it is answered at once.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

import orjson
from fastapi import Request
from fastapi.responses import Response

from pdserve.errors import RequestError
from pdserve.protocol.messages import FinishReason
from pdserve.server.context import ServerContext
from pdserve.server.engine_client.live_requests import RequestState
from pdserve.server.generation import GenerationUpdate
from pdserve.server.http.json_http import convert, json_response, read_json_object, refuse_unsupported
from pdserve.server.ollama_api.schemas import UNSUPPORTED_OLLAMA, OllamaBody, OllamaChatBody, OllamaGenerateBody
from pdserve.server.ollama_api.to_chat import chat_of, chat_of_prompt, num_predict, with_ollama_fields
from pdserve.server.openai.chat import prepare_chat
from pdserve.server.openai.chat_tools import ChatReader, ReadPlan
from pdserve.server.openai.common import GenerationCall
from pdserve.server.request.constraints import openai_constraint
from pdserve.server.request.intake import prompt_request
from pdserve.server.request.sampling_fields import is_constrained, openai_sampling
from pdserve.server.request.schemas import ChatBody
from pdserve.server.text.parsers.feed import CallArguments, CallOpened, Content, Delta, Reasoning

BodyT = TypeVar("BodyT", bound=OllamaBody)
NS = 1_000_000_000


class OllamaCall(GenerationCall):
    """One call of `/api/chat` or `/api/generate`. Event loop only."""

    id_prefix = ""
    stream_end = b""
    media_type = "application/x-ndjson"

    def __init__(
        self, context: ServerContext, chat: ChatBody, states: list[RequestState], plan: ReadPlan, *, is_chat: bool
    ) -> None:
        """`chat`: the chat body of the client's body. `states`: the one output, which `plan` parses."""
        super().__init__(context, chat, states, 1)
        self._is_chat = is_chat
        self._reader = ChatReader(plan)
        self._call: tuple[str, str] | None = None
        """Name and arguments so far of the tool call that is being read; None: none is."""
        self._began_ns = time.monotonic_ns()
        self._first_ns: int | None = None

    def whole(self, updates: list[GenerationUpdate]) -> dict[str, Any]:
        """See `GenerationCall`."""
        (update,) = updates
        fields = self._fields([*self._reader.push(update.text), *self._reader.finish()], ends=True)
        return self._answer(fields, self._end(update.finish, update))

    def opening_events(self, update: GenerationUpdate, seen: dict[int, GenerationUpdate]) -> list[bytes]:
        """See `GenerationCall`: there are none."""
        self._first_ns = time.monotonic_ns()
        return []

    def events(self, update: GenerationUpdate, seen: dict[int, GenerationUpdate]) -> Iterator[bytes]:
        """See `GenerationCall`."""
        ends = update.finish is not None
        fields = self._fields([*self._reader.push(update.text), *(self._reader.finish() if ends else [])], ends=ends)
        if any(fields.values()):
            yield _line(self._answer(fields, {"done": False}))
        if ends:
            yield _line(self._answer(self._fields([], ends=True), self._end(update.finish, seen[update.index])))

    def replay(self, update: GenerationUpdate) -> None:
        """See `GenerationCall`."""
        self._fields(self._reader.push(update.text), ends=False)

    def _fields(self, deltas: Sequence[Delta], *, ends: bool) -> dict[str, Any]:
        """Build `content`, `thinking` and the complete `tool_calls` of `deltas`."""
        content, thinking, calls = "", "", list[dict[str, Any]]()
        for delta in deltas:
            match delta:
                case Content(text):
                    content += text
                case Reasoning(text):
                    thinking += text
                case CallOpened(_, name, _):
                    calls += self._close_call()
                    self._call = (name, "")
                case CallArguments(_, text):
                    assert self._call is not None
                    self._call = (self._call[0], self._call[1] + text)
        calls += self._close_call() if ends else []
        return {"content": content, "thinking": thinking, "tool_calls": calls}

    def _close_call(self) -> list[dict[str, Any]]:
        call, self._call = self._call, None
        if call is None:
            return []
        try:
            arguments = json.loads(call[1])
        except (ValueError, RecursionError):
            arguments = {}
        return [{"function": {"name": call[0], "arguments": arguments if isinstance(arguments, dict) else {}}}]

    def _answer(self, fields: dict[str, Any], rest: dict[str, Any]) -> dict[str, Any]:
        extra = {name: value for name, value in fields.items() if name != "content" and value}
        if self._is_chat:
            own: dict[str, Any] = {"message": {"role": "assistant", "content": fields["content"], **extra}}
        else:
            own = {"response": fields["content"], **extra}
        return {"model": self._head["model"], "created_at": _now(), **own, **rest}

    def _end(self, finish: FinishReason | None, total: GenerationUpdate) -> dict[str, Any]:
        """Build the fields of the last line. `total` has all tokens. Durations are in nanoseconds."""
        assert finish is not None
        now = time.monotonic_ns()
        first = now if self._first_ns is None else self._first_ns
        if self._first_ns is None and total.timing is not None and total.timing.prefill_s is not None:
            first = min(now, self._began_ns + int(total.timing.prefill_s * NS))
        return {
            "done": True,
            "done_reason": "length" if finish.type == "length" else "stop",
            "total_duration": now - self._began_ns,
            "load_duration": 0,
            "prompt_eval_count": self._num_prompt_tokens,
            "prompt_eval_duration": first - self._began_ns,
            "eval_count": len(total.token_ids),
            "eval_duration": now - first,
        }


def _line(value: dict[str, Any]) -> bytes:
    return orjson.dumps(value) + b"\n"


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


async def ollama_chat(context: ServerContext, request: Request) -> Response:
    """Serve `POST /api/chat`: validate the whole body, then submit. An invalid request allocates nothing.

    Raises:
        RequestError: the body is invalid; the error names the field.
    """
    body = await read_ollama_body(context, request, OllamaChatBody)
    if not body.messages:
        return _loaded(context, body, {"message": {"role": "assistant", "content": ""}})
    with with_ollama_fields(body):
        chat = chat_of(body)
        states, plan = await prepare_chat(context, chat, default_tokens=num_predict(body))
    return await OllamaCall(context, chat, states, plan, is_chat=True).answer(request)


async def ollama_generate(context: ServerContext, request: Request) -> Response:
    """Serve `POST /api/generate`: validate the whole body, then submit. An invalid request allocates nothing.

    Raises:
        RequestError: the body is invalid; the error names the field.
    """
    body = await read_ollama_body(context, request, OllamaGenerateBody)
    if not body.prompt:
        return _loaded(context, body, {"response": ""})
    with with_ollama_fields(body):
        chat = chat_of_prompt(body)
        if body.raw:
            states, plan = await _prepare_raw(context, chat, body)
        else:
            states, plan = await prepare_chat(context, chat, "prompt", default_tokens=num_predict(body))
    return await OllamaCall(context, chat, states, plan, is_chat=False).answer(request)


async def _prepare_raw(
    context: ServerContext, chat: ChatBody, body: OllamaGenerateBody
) -> tuple[list[RequestState], ReadPlan]:
    """Like `prepare_chat`, without chat template and parsers."""
    if body.system:
        raise RequestError("system and raw cannot be combined: raw uses no chat template", field="system")
    limits = context.limits()
    context.check_model(chat.model)
    assert body.prompt is not None
    (input_ids,) = await context.token_ids([body.prompt], "prompt", batch=False)
    grammar = await context.take_grammar(openai_constraint(chat) if is_constrained(chat) else None, chat.stop_regex)
    sampling = openai_sampling(chat, num_predict(body), len(input_ids), limits, "prompt", grammar)
    requests = [prompt_request(input_ids, sampling, None)]
    return context.make_requests(requests, 1, chat, "prompt", stream=bool(chat.stream)), ReadPlan()


async def read_ollama_body(context: ServerContext, request: Request, kind: type[BodyT]) -> BodyT:
    """Read a body.

    Raises:
        RequestError: 404 without `--enable-ollama-api`; 400, the body is invalid.
    """
    require_ollama_api(context)
    context.limits()
    return convert(
        refuse_unsupported(await read_json_object(request, context.max_body_bytes), UNSUPPORTED_OLLAMA), kind
    )


def require_ollama_api(context: ServerContext) -> None:
    """Refuse a request to a server without `--enable-ollama-api`.

    Raises:
        RequestError: 404.
    """
    if not context.config.serving.enable_ollama_api:
        raise RequestError("this server has no Ollama API (--enable-ollama-api)", status=404, code="not_found")


def _loaded(context: ServerContext, body: OllamaBody, fields: dict[str, Any]) -> Response:
    """Answer a body without a prompt. The model is loaded, whatever `keep_alive` says."""
    context.check_model(body.model)
    head = {"model": body.model or context.model_name, "created_at": _now()}
    return json_response({**head, **fields, "done": True, "done_reason": "load"})
