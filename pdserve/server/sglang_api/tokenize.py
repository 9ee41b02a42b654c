"""`POST /tokenize` and `/detokenize`, as in SGLang and vLLM: text, texts or messages to token ids, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from pdserve.errors import RequestError
from pdserve.server.context import ServerContext
from pdserve.server.http.json_http import convert, json_response, read_json_object
from pdserve.server.openai.chat import chat_prompt, check_chat_size
from pdserve.server.openai.chat_tools import plan_tools
from pdserve.server.request.intake import MAX_PROMPTS, check_token_ids, prompt_field
from pdserve.server.request.schemas import ChatBody, DetokenizeBody, TokenizeBody

MAX_TOKENS = 1 << 18
"""Maximum tokens of one response of `/tokenize`; the capacity of a context if that is larger."""


async def tokenize(context: ServerContext, request: Request) -> Response:
    """Return `{tokens, count, max_model_len}`, and `token_strs` with `return_token_strs`.

    For a list of texts, all but `max_model_len` are lists.

    Raises:
        RequestError: the body is invalid; the error names the field.
    """
    raw = await read_json_object(request, context.max_body_bytes)
    body = convert(raw, TokenizeBody)
    context.check_model(body.model)
    ready = context.client.require_ready()
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("exactly one of prompt and messages must be given", field="prompt")
    if body.messages is None:
        lists = await _encode_all(context, body.prompt, body.add_special_tokens is not False)
    else:
        lists = [await _encode_chat(context, convert(raw, ChatBody), body.add_special_tokens is True)]
    answer: dict[str, Any] = {
        "tokens": lists,
        "count": [len(ids) for ids in lists],
        "max_model_len": ready.context_length,
    }
    if body.return_token_strs:
        tokenizer = context.require_tokenizer("return_token_strs")
        answer["token_strs"] = await tokenizer.texts_of_tokens(lists)
    if not isinstance(body.prompt, list):
        answer |= {name: answer[name][0] for name in ("tokens", "count", "token_strs") if name in answer}
    return json_response(answer)


async def detokenize(context: ServerContext, request: Request) -> Response:
    """Return `{text, prompt}`, which are equal: SGLang's name and vLLM's. Both are lists for a list of lists.

    Raises:
        RequestError: the body is invalid; the error names the field.
    """
    body = convert(await read_json_object(request, context.max_body_bytes), DetokenizeBody)
    context.check_model(body.model)
    vocab_size = context.client.require_ready().vocab_size
    tokenizer = context.require_tokenizer("tokens")
    listed = isinstance(body.tokens, list) and bool(body.tokens) and isinstance(body.tokens[0], list)
    lists = body.tokens if listed else [body.tokens]
    _check_count(lists, "tokens")
    for i, ids in enumerate(lists):
        field = prompt_field("tokens", i, batch=listed)
        if not isinstance(ids, list):
            raise RequestError(f"{field} must be a list of token ids", field=field)
        check_token_ids(ids, vocab_size, field)
    texts = await tokenizer.decode_all(lists, skip_special=body.skip_special_tokens is not False)
    text = texts if listed else texts[0]
    return json_response({"text": text, "prompt": text})


def _texts(prompt: Any) -> list[str]:
    listed = isinstance(prompt, list)
    texts = prompt if listed else [prompt]
    _check_count(texts, "prompt")
    for i, text in enumerate(texts):
        field = prompt_field("prompt", i, batch=listed)
        if not isinstance(text, str):
            raise RequestError(f"{field} must be a string, got {type(text).__name__}", field=field)
    return texts


def _check_count(given: Sequence[Any], field: str) -> None:
    if len(given) > MAX_PROMPTS:
        raise RequestError(f"{field} has {len(given)} entries; the maximum is {MAX_PROMPTS}", field=field)


async def _encode_all(context: ServerContext, prompt: Any, add_special_tokens: bool) -> list[list[int]]:
    tokenizer, listed = context.require_tokenizer("prompt"), isinstance(prompt, list)
    most = max(MAX_TOKENS, context.limits().capacity)
    return await tokenizer.encode_all(
        _texts(prompt),
        lambda i: prompt_field("prompt", i, batch=listed),
        add_special_tokens=add_special_tokens,
        most_tokens=most,
        most_in_all=most,
    )


async def _encode_chat(context: ServerContext, body: ChatBody, add_special_tokens: bool) -> list[int]:
    if not body.messages:
        raise RequestError("messages must not be empty", field="messages")
    check_chat_size(body, "messages")
    text = await chat_prompt(context, body, plan_tools(body, context.formats.tools), "messages")
    tokenizer = context.require_tokenizer("messages")
    most = max(MAX_TOKENS, context.limits().capacity)
    return await tokenizer.encode(text, field="messages", add_special_tokens=add_special_tokens, most_tokens=most)
