"""What a request's prompt looks like to policies that compare prompts. Pure; `dispatch` asks once per request.

Text stays text; token ids become one character each, behind a mark that no text begins with. A chat is its tools and
messages one after the other, so that the next turn begins with what this one is. Nothing here is what a model sees:
two prompts that begin alike here begin alike there, and that is all that counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from pdserve.router.rooms import CHAT_PATH, RESPONSES_PATH

TOKENS_MARK = "\udfff"
"""A lone surrogate: JSON's text has none."""
MAX_TOKEN = 0x10FFFF


def prompt_of(path: str, body: Mapping[str, Any]) -> str | None:
    """The prompt of a body as one string, of a batch the first one; None where it has none or is malformed."""
    if path == CHAT_PATH:
        return _conversation(body.get("tools"), body.get("messages"))
    if path == RESPONSES_PATH:
        given = body.get("input")
        if isinstance(given, str):
            given = [{"role": "user", "content": given}]
        instructions = {"role": "system", "content": body.get("instructions")}
        return _conversation(body.get("tools"), [instructions, *given]) if isinstance(given, list) else None
    return as_text(first_prompt(body))


def first_prompt(body: Mapping[str, Any]) -> Any:
    """The prompt of `/generate` or of a text completion, unchecked; of a batch the first one."""
    found = next((body[name] for name in ("prompt", "input_ids", "text") if body.get(name) is not None), None)
    return found[0] if isinstance(found, list) and found and isinstance(found[0], str | list) else found


def as_text(prompt: Any) -> str | None:
    """Text as it is, token ids as characters."""
    if isinstance(prompt, str):
        return prompt or None
    if not isinstance(prompt, list) or not prompt:
        return None
    try:
        return TOKENS_MARK + "".join(map(chr, prompt))
    except (TypeError, ValueError, OverflowError):
        return None


def _conversation(tools: Any, messages: Any) -> str | None:
    if not isinstance(messages, list) or not messages:
        return None
    head = orjson.dumps(tools).decode() if tools else ""
    return "\n".join([head, *(_message(message) for message in messages)])


def _message(message: Any) -> str:
    """Role and text; whatever else there is as JSON."""
    if isinstance(message, dict) and isinstance(message.get("content"), str) and len(message) == 2:
        return f"{message.get('role')}: {message['content']}"
    return orjson.dumps(message).decode()
