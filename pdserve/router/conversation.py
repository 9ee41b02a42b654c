"""Which conversation a request belongs to, for the policy that keeps one where its KV cache is. Pure; `dispatch` asks.

    X-SMG-Routing-Key, X-Session-ID     headers; what clients of sglang's and of vLLM's router send
    session_params.id                   what clients of SGLang's sessions send
    conversation, prompt_cache_key      fields of the body, as OpenAI has them; a conversation is an id or has one
    user
    the opening                         else: what every turn of a conversation begins with

The first that is there counts. An opening needs no help of the client, but conversations that open alike share it:
clients of `/generate` and of text completions whose prompts begin with one long template should name theirs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import orjson

from pdserve.router.prompt import first_prompt
from pdserve.router.rooms import CHAT_PATH, RESPONSES_PATH

KEY_HEADERS = ("X-SMG-Routing-Key", "X-Session-ID")
KEY_FIELDS = ("prompt_cache_key", "user")
KEY_OBJECTS = ("session_params", "conversation")
OPENING_CHARS = 256
OPENING_TOKENS = 64


@dataclasses.dataclass(frozen=True)
class ConversationKey:
    """What the turns of one conversation have in common. `named` by the client, or else taken from its opening."""

    value: bytes
    named: bool


def conversation_key(path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> ConversationKey | None:
    """The key of a request; None where it has nothing to go by. Wrong types are passed over: a worker refuses them."""
    named = [*(headers.get(header) for header in KEY_HEADERS), *(_id_of(body.get(field)) for field in KEY_OBJECTS)]
    for name in [*named, *(body.get(field) for field in KEY_FIELDS)]:
        if isinstance(name, str) and name:
            return ConversationKey(name.encode(errors="surrogatepass"), named=True)
    if path == CHAT_PATH:
        opening = _chat_opening(body.get("messages"))
    elif path == RESPONSES_PATH:
        given = body.get("input")
        opening = _prompt_opening(given) if isinstance(given, str) else _chat_opening(given)
    else:
        opening = _prompt_opening(first_prompt(body))
    return None if opening is None else ConversationKey(opening, named=False)


def _id_of(value: Any) -> Any:
    """`{"id": X}` and X mean the same."""
    return value.get("id") if isinstance(value, dict) else value


def _chat_opening(messages: Any) -> bytes | None:
    """All up to the first message of the user, which the next turn repeats; whatever comes later it may not."""
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
