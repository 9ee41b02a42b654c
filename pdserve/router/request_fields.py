"""Bootstrap rooms, prompts and conversation keys of request bodies. Pure; used by `dispatch`, the keys by policies.

Conversation keys, in order of precedence:

    X-SMG-Routing-Key, X-Session-ID     headers that clients of sglang's and of vLLM's router send
    session_params.id                   field that clients of SGLang's sessions send
    conversation, prompt_cache_key      fields of OpenAI's API; a conversation is an id or an object with an id
    user
    the opening                         without a name: the common start of all turns of a conversation

Conversations with the same opening share a key. Clients of `/generate` and of text completions whose prompts start with
one long template should therefore send a name.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from typing import Any

import orjson

from pdserve.http.access import CHAT_PATH, COMPLETIONS_PATH, GENERATE_PATH, RESPONSES_PATH
from pdserve.protocol.messages import MAX_ROOM

MAX_SEQUENCES = 8192
"""Maximum `n`, and maximum number of prompts, for which rooms are made: workers refuse a larger body anyway."""


def batch_size(path: str, body: dict[str, Any]) -> int | None:
    """Return the number of bootstrap rooms that a batch needs as a list; None for a single room.

    Invalid types count as a single room: the worker refuses them.
    """
    if path == RESPONSES_PATH:
        return None
    if path == CHAT_PATH:
        sequences = num_sequences(body)
        return sequences if sequences > 1 else None
    if path == COMPLETIONS_PATH:
        prompts = body.get("prompt")
    else:
        prompts = body.get("text") if body.get("input_ids") is None else body["input_ids"]
    if isinstance(prompts, list) and prompts and isinstance(prompts[0], (str, list)):
        return len(prompts) if len(prompts) <= MAX_SEQUENCES else None
    return None


def num_sequences(body: dict[str, Any]) -> int:
    """Return `n` of a request (for `/generate` from `sampling_params`); 1 if absent or invalid."""
    params = body.get("sampling_params")
    n = params.get("n", 1) if isinstance(params, dict) else body.get("n", 1)
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MAX_SEQUENCES:
        return 1
    return n


def mint(rng: random.Random, sequences: int) -> int:
    """Return a random bootstrap room such that room + i fits 63 bits for every sequence i."""
    return rng.randrange(MAX_ROOM - sequences + 2)


def with_rooms(
    path: str, body: dict[str, Any], data: bytes | None, host: str, port: int | None, rng: random.Random
) -> bytes:
    """Return the JSON of `body` with new `bootstrap_host`, `bootstrap_port` and `bootstrap_room`.

    The client's fields of these names are replaced. `data`: the JSON of `body`, which is copied, because that takes
    less time than to serialize `body`; None: `body` is serialized.
    """
    size = batch_size(path, body)
    sequences = num_sequences(body)
    fields: dict[str, Any]
    if size is None:
        fields = {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": mint(rng, sequences)}
    else:
        rooms = [mint(rng, sequences) for _ in range(size)]
        fields = {"bootstrap_host": [host] * size, "bootstrap_port": [port] * size, "bootstrap_room": rooms}
    if data is None or not body or not fields.keys().isdisjoint(body):
        return orjson.dumps(body | fields)
    end = data.rindex(b"}")
    return b"".join((memoryview(data)[:end], b",", memoryview(orjson.dumps(fields))[1:]))


TOKENS_MARK = "\udfff"
"""A lone surrogate, which text from JSON does not contain; it marks prompts of token ids."""


def prompt_of(path: str, body: Mapping[str, Any]) -> str | None:
    """Return the prompt of a body as one string, of a batch the first prompt; None if absent or malformed."""
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


def wants_prompt_logprobs(path: str, body: dict[str, Any]) -> bool:
    """Whether a request needs prompt log probabilities from prefill's answer."""
    wanted = body.get("return_logprob")
    start = body.get("logprob_start_len")
    return (
        path == GENERATE_PATH
        and (wanted is True or (isinstance(wanted, list) and any(one is True for one in wanted)))
        and (isinstance(start, list) or (isinstance(start, int) and start >= 0))
    )
