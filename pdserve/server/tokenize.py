"""`POST /tokenize` and `/detokenize`, as SGLang and vLLM have them: text, texts or messages to ids, and back."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from fastapi.responses import Response

from pdserve.errors import RequestError
from pdserve.server.chat_prepare import chat_prompt
from pdserve.server.chat_tools import plan_tools
from pdserve.server.context import ServerContext
from pdserve.server.intake import MAX_PROMPTS, check_token_ids
from pdserve.server.json_http import convert, json_response, read_json_object
from pdserve.server.schemas import ChatBody, DetokenizeBody, TokenizeBody


async def tokenize(context: ServerContext, request: Request) -> Response:
    """`{tokens, count, max_model_len}`; lists of them for a list of texts, `token_strs` too where wanted.

    Raises:
        RequestError: what was wrong with the body.
    """
    raw = await read_json_object(request, context.max_body_bytes)
    body = convert(raw, TokenizeBody)
    context.check_model(body.model)
    ready = context.client.require_ready()
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("exactly one of prompt and messages must be given", field="prompt")
    if body.messages is None:
        lists = [await _encode(context, text, body.add_special_tokens is not False) for text in _texts(body.prompt)]
    else:
        lists = [await _encode_chat(context, convert(raw, ChatBody), body.add_special_tokens is True)]
    answer: dict[str, Any] = {
        "tokens": lists,
        "count": [len(ids) for ids in lists],
        "max_model_len": ready.context_length,
    }
    if body.return_token_strs:
        tokenizer = context.require_tokenizer("return_token_strs")
        answer["token_strs"] = [[tokenizer.token_text(token_id) for token_id in ids] for ids in lists]
    if not isinstance(body.prompt, list):
        answer |= {name: answer[name][0] for name in ("tokens", "count", "token_strs") if name in answer}
    return json_response(answer)


async def detokenize(context: ServerContext, request: Request) -> Response:
    """`{text, prompt}`, which are equal: SGLang's name and vLLM's; lists for a list of lists.

    Raises:
        RequestError: what was wrong with the body.
    """
    body = convert(await read_json_object(request, context.max_body_bytes), DetokenizeBody)
    context.check_model(body.model)
    vocab_size = context.client.require_ready().vocab_size
    tokenizer = context.require_tokenizer("tokens")
    if not isinstance(body.tokens, list):
        raise RequestError("tokens must be a list of token ids, or of such lists", field="tokens")
    listed = bool(body.tokens) and all(isinstance(entry, list) for entry in body.tokens)
    texts = []
    for ids in body.tokens if listed else [body.tokens]:
        check_token_ids(ids, vocab_size, "tokens")
        texts.append(tokenizer.decode(ids, skip_special=body.skip_special_tokens is not False))
    text = texts if listed else texts[0]
    return json_response({"text": text, "prompt": text})


def _texts(prompt: Any) -> list[str]:
    texts = prompt if isinstance(prompt, list) else [prompt]
    if len(texts) > MAX_PROMPTS or not all(isinstance(text, str) for text in texts):
        raise RequestError(f"prompt must be a text or a list of at most {MAX_PROMPTS} texts", field="prompt")
    return texts


async def _encode(context: ServerContext, text: str, add_special_tokens: bool) -> list[int]:
    tokenizer = context.require_tokenizer("prompt")
    return await tokenizer.encode(text, field="prompt", add_special_tokens=add_special_tokens)


async def _encode_chat(context: ServerContext, body: ChatBody, add_special_tokens: bool) -> list[int]:
    if not body.messages:
        raise RequestError("messages must not be empty", field="messages")
    text = await chat_prompt(context, body, plan_tools(body, context.formats.tools), "messages")
    tokenizer = context.require_tokenizer("messages")
    return await tokenizer.encode(text, field="messages", add_special_tokens=add_special_tokens)
