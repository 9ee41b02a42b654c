"""Prompts and conversation keys of request bodies, by which policies choose. Pure; `dispatch` reads them.

Conversation keys, in order of precedence:

    X-SMG-Routing-Key, X-Session-ID     headers that clients of sglang's and of vLLM's router send
    session_params.id                   field that clients of SGLang's sessions send
    conversation, prompt_cache_key      fields of OpenAI's API; a conversation is an id or an object with an id
    user                                of Anthropic's API `metadata.user_id`
    the opening                         without a name: the common start of all turns of a conversation

Requests of another cache salt share no prompt and no opening: a worker's prefix cache keeps them apart.
Conversations with the same opening share a key. Clients of `/generate` and of text completions whose prompts start with
one long template should therefore send a name.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import orjson

from pdserve.http.access import BILLING_HEADER, CHAT_PATH, MESSAGES_PATH, OLLAMA_CHAT_PATH, RESPONSES_PATH
from pdserve.http.response_store import HISTORY_FIELD

TOKENS_MARK = "\udfff"
"""A lone surrogate, which text from JSON does not contain; it marks prompts of token ids."""
SALT_FIELDS = ("cache_salt", "extra_key")


def prompt_of(path: str, body: Mapping[str, Any]) -> str | None:
    """Return the prompt of a body as one string, of a batch the first prompt; None if absent or malformed.

    With a cache salt it begins with a few characters that stand for the salt.
    """
    prompt, salt = _prompt_of(path, body), salt_of(body)
    return prompt if prompt is None or not salt else "".join(chr(0x10000 + byte) for byte in salt) + prompt


def salt_of(body: Mapping[str, Any]) -> bytes:
    """Return a digest of the cache salt, of a batch those of the first prompt; empty without one."""
    values = [body.get(field) for field in SALT_FIELDS]
    if values == [None, None]:
        return b""
    firsts = [value[0] if isinstance(value, list) and value else value for value in values]
    return hashlib.blake2b(repr(firsts).encode(errors="surrogatepass"), digest_size=6).digest()


def _prompt_of(path: str, body: Mapping[str, Any]) -> str | None:
    if path in (CHAT_PATH, OLLAMA_CHAT_PATH):
        return _conversation(body.get("tools"), body.get("messages"))
    if path == RESPONSES_PATH:
        items = _items(body)
        instructions = {"role": "system", "content": body.get("instructions")}
        return None if items is None else _conversation(body.get("tools"), [instructions, *items])
    if path == MESSAGES_PATH:
        given = body.get("messages")
        return _conversation(body.get("tools"), [_system(body), *given]) if isinstance(given, list) and given else None
    return as_text(first_prompt(body))


def first_prompt(body: Mapping[str, Any]) -> Any:
    """Return the unchecked prompt of `/generate` or of a text completion; of a batch the first one."""
    found = next((body[name] for name in ("prompt", "input_ids", "text") if body.get(name) is not None), None)
    return found[0] if isinstance(found, list) and found and isinstance(found[0], str | list) else found


def as_text(prompt: Any) -> str | None:
    """Return text unchanged, and token ids as characters after `TOKENS_MARK`; None if empty or malformed."""
    if isinstance(prompt, str):
        return prompt or None
    if not isinstance(prompt, list) or not prompt:
        return None
    try:
        return TOKENS_MARK + "".join(map(chr, prompt))
    except (TypeError, ValueError, OverflowError):
        return None


def _items(body: Mapping[str, Any]) -> list[Any] | None:
    """Return the items of a body of `/v1/responses`, those of the conversation that it continues first; None: no list.

    Equal texts give equal items, however the client wrote them, and without the ids that the store gave them.
    """
    given, history = body.get("input"), body.get(HISTORY_FIELD) or []
    entries = [{"role": "user", "content": given}] if isinstance(given, str) else given
    return [*map(_plain_item, history), *map(_plain_item, entries)] if isinstance(entries, list) else None


def _plain_item(item: Any) -> Any:
    if not isinstance(item, dict):
        return item
    role, content = item.get("role"), item.get("content")
    if isinstance(role, str) and isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) else None for part in content]
        if all(isinstance(text, str) for text in texts):
            return {"role": role, "content": "\n".join(map(str, texts))}
    return {name: value for name, value in item.items() if name not in ("id", "status")}


def _conversation(tools: Any, messages: Any) -> str | None:
    if not isinstance(messages, list) or not messages:
        return None
    head = orjson.dumps(tools).decode() if tools else ""
    return "\n".join([head, *(_message(message) for message in messages)])


def _message(message: Any) -> str:
    """Return role and text of a message; a message with other fields as JSON."""
    if isinstance(message, dict) and isinstance(message.get("content"), str) and len(message) == 2:
        return f"{message.get('role')}: {message['content']}"
    return orjson.dumps(message).decode()


KEY_HEADERS = ("X-SMG-Routing-Key", "X-Session-ID")
KEY_FIELDS = ("prompt_cache_key", "user")
KEY_OBJECTS = ("session_params", "conversation")
OPENING_CHARS = 256
OPENING_TOKENS = 64


@dataclasses.dataclass(frozen=True)
class ConversationKey:
    """The key shared by all turns of a conversation. `named`: sent by the client; otherwise taken from the opening."""

    value: bytes
    named: bool


def conversation_key(path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> ConversationKey | None:
    """Return the conversation key of a request; None without one. Invalid types are ignored: a worker refuses them."""
    named = [*(headers.get(header) for header in KEY_HEADERS), *(_id_of(body.get(field)) for field in KEY_OBJECTS)]
    metadata = body.get("metadata") if path == MESSAGES_PATH else None
    named.append(metadata.get("user_id") if isinstance(metadata, dict) else None)
    for name in [*named, *(body.get(field) for field in KEY_FIELDS)]:
        if isinstance(name, str) and name:
            return ConversationKey(name.encode(errors="surrogatepass"), named=True)
    if path in (CHAT_PATH, OLLAMA_CHAT_PATH):
        opening = _chat_opening(body.get("messages"))
    elif path == MESSAGES_PATH:
        given = body.get("messages")
        opening = _chat_opening([_system(body), *given]) if isinstance(given, list) and given else None
    elif path == RESPONSES_PATH:
        opening = _chat_opening(_items(body))
    else:
        opening = _prompt_opening(first_prompt(body))
    return None if opening is None else ConversationKey(salt_of(body) + opening, named=False)


def _system(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the system prompt of a body of Anthropic's API as a message, without the text that the server drops."""
    content = body.get("system")
    if isinstance(content, list):
        content = [block for block in content if not _is_billing_header(block)]
    return {"role": "system", "content": content}


def _is_billing_header(block: Any) -> bool:
    text = block.get("text") if isinstance(block, dict) else None
    return isinstance(text, str) and text.startswith(BILLING_HEADER)


def _id_of(value: Any) -> Any:
    """Return X for `{"id": X}` and for X."""
    return value.get("id") if isinstance(value, dict) else value


def _chat_opening(messages: Any) -> bytes | None:
    """Return all messages up to the first user message, as JSON; every later turn repeats them."""
    if not isinstance(messages, list) or not messages:
        return None
    roles = [message.get("role") if isinstance(message, dict) else None for message in messages]
    return orjson.dumps(messages[: roles.index("user") + 1] if "user" in roles else messages)


def _prompt_opening(prompt: Any) -> bytes | None:
    if isinstance(prompt, str) and prompt:
        return prompt[:OPENING_CHARS].encode(errors="surrogatepass")
    if isinstance(prompt, list) and prompt:
        return orjson.dumps(prompt[:OPENING_TOKENS])
    return None
