"""What users give as prompts and conversations, told apart. Pure; called by `LLM` before anything else."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from pdserve.llm.errors import InvalidRequestError


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: list[int]


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt
Message = Mapping[str, Any]
Conversation = Sequence[Message]


@dataclasses.dataclass(frozen=True)
class GivenPrompt:
    """Text or token ids, and what to call it in a refusal."""

    where: str
    content: str | list[int]


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[GivenPrompt]:
    """The prompts in `prompts`, which is one or several.

    Raises:
        InvalidRequestError: naming `prompts`, for another shape or an empty prompt.
    """
    if isinstance(prompts, str | Mapping) or _is_ids(prompts):
        return [_prompt(prompts, "prompts")]
    if not isinstance(prompts, Sequence):
        raise _wrong("prompts", prompts)
    return [_prompt(entry, f"prompts[{i}]") for i, entry in enumerate(prompts)]


def as_conversations(messages: Conversation | Sequence[Conversation]) -> list[list[dict[str, Any]]]:
    """The conversations in `messages`, which is one or several.

    Raises:
        InvalidRequestError: naming `messages`, for another shape.
    """
    wrong = InvalidRequestError("messages must be a list of messages, or a list of such lists", field="messages")
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise wrong
    several: list[Any] = [*messages] if all(isinstance(entry, list | tuple) for entry in messages) else [messages]
    for conversation in several:
        if not conversation or not all(isinstance(message, Mapping) for message in conversation):
            raise wrong
    return [[dict(message) for message in conversation] for conversation in several]


def _is_ids(value: Any) -> bool:
    return isinstance(value, Sequence) and bool(value) and all(type(entry) is int for entry in value)


def _prompt(value: Any, where: str) -> GivenPrompt:
    if isinstance(value, Mapping):
        names = value.keys() & {"prompt", "prompt_token_ids"}
        if len(value) != 1 or len(names) != 1:
            message = f"{where} must have either prompt or prompt_token_ids, and nothing else, got {sorted(value)}"
            raise InvalidRequestError(message, field="prompts")
        name = names.pop()
        content = value[name]
        if isinstance(content, str) != (name == "prompt"):
            raise _wrong(where, content)
        return _prompt(content, where)
    if isinstance(value, str) and value:
        return GivenPrompt(where, value)
    if _is_ids(value):
        return GivenPrompt(where, list(value))
    raise _wrong(where, value)


def _wrong(where: str, value: Any) -> InvalidRequestError:
    kind = "an empty one" if isinstance(value, Sequence) and not value else type(value).__name__
    return InvalidRequestError(f"{where} must be text or a list of token ids, got {kind}", field="prompts")
