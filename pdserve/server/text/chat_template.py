"""Chat templates: selects the template of a request, detects its features, renders the prompt. Owned by the tokenizer.

Templates run in transformers' immutable sandbox, with JSON values only. Any exception of a template counts as a refusal
of the messages: templates check roles and their order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError

from pdserve.errors import ConfigError, RequestError

BUILT_IN = Path(__file__).parent / "chat_templates"
NUM_REMEMBERED = 64
_PROBE = "pdserve-probe"


@dataclasses.dataclass(frozen=True)
class TemplateFacts:
    """Features of a template, detected by rendering test conversations.

    `parts`: message content must be a list of parts, not a string. `text_arguments`: the arguments of a past tool call
    must be JSON text, not an object. `developer`: the template handles the role `developer`.
    """

    parts: bool = False
    text_arguments: bool = False
    developer: bool = False


def built_in_names() -> list[str]:
    """Return the built-in template names that `--chat-template` accepts beside files."""
    return sorted(path.stem for path in BUILT_IN.glob("*.jinja"))


def read_template(name: str) -> str:
    """Read a built-in template or a template file.

    Raises:
        ConfigError: neither exists, or the file is not UTF-8 text.
    """
    known = BUILT_IN / f"{name}.jinja"
    path = known if name in built_in_names() else Path(name)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        names = ", ".join(built_in_names())
        raise ConfigError(
            f"cannot read the chat template {name}: {error}; built-in templates: {names}", field="chat_template"
        ) from error


class ChatTemplates:
    """The templates of one model. Thread-safe."""

    def __init__(self, hf_tokenizer: Any, override: str | None) -> None:
        """`hf_tokenizer`: a tokenizer of transformers with its template or templates. `override`: a template that
        replaces them.

        Raises:
            ConfigError: `override` is not valid Jinja.
        """
        self._hf = hf_tokenizer
        self._override = override
        self._facts: dict[str, TemplateFacts] = {}
        if override is not None:
            self._check_syntax(override)

    def text(self, *, tools: bool = False) -> str | None:
        """Return the template for a request with or without tools; None if the model has none."""
        own = self._hf.chat_template if self._override is None else self._override
        if not isinstance(own, dict):
            return None if own is None else str(own)
        names = ("tool_use", "default") if tools else ("default",)
        found = next((own[name] for name in names if name in own), None)
        return None if found is None else str(found)

    def facts(self, template: str) -> TemplateFacts:
        """Return the features of `template`; detected once and cached."""
        facts = self._facts.get(template)
        if facts is None:
            if len(self._facts) >= NUM_REMEMBERED:
                self._facts.clear()
            facts = self._facts[template] = self._try_out(template)
        return facts

    def render(self, template: str, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        """Render a conversation to a prompt. `options`: tools, documents, and variables for the template.

        Raises:
            RequestError: 400 naming `messages`, when the template refuses them.
        """
        try:
            return self._render(template, messages, options)
        except Exception as error:
            raise RequestError(f"the chat template refuses these messages: {error}", field="messages") from error

    def _render(self, template: str, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        return str(self._hf.apply_chat_template(list(messages), chat_template=template, tokenize=False, **options))

    def _check_syntax(self, template: str) -> None:
        try:
            self._render(template, [{"role": "user", "content": _PROBE}], {})
        except TemplateSyntaxError as error:
            raise ConfigError(f"the chat template is not valid Jinja: {error}", field="chat_template") from error
        except Exception:
            return  # the template may refuse this conversation and accept real ones

    def _try_out(self, template: str) -> TemplateFacts:
        text = self._attempt(template, [{"role": "user", "content": _PROBE}])
        parts = _PROBE not in text and _PROBE in self._attempt(
            template, [{"role": "user", "content": [{"type": "text", "text": _PROBE}]}]
        )
        as_text, as_object = '{"a": "' + _PROBE + '"}', {"a": _PROBE}
        wants_text = f'"{_PROBE}"' not in self._with_call(template, as_object, parts=parts)
        text_works = f'"{_PROBE}"' in self._with_call(template, as_text, parts=parts)
        developer = "'developer'" in template or '"developer"' in template
        return TemplateFacts(parts, wants_text and text_works, developer)

    def _with_call(self, template: str, arguments: Any, *, parts: bool) -> str:
        """Render a conversation with a past tool call."""
        user: Any = [{"type": "text", "text": "u"}] if parts else "u"
        call = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": arguments}}
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": user},
            {"role": "assistant", "content": [] if parts else "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "abcdefghi", "name": "f", "content": user},
        ]
        return self._attempt(template, messages)

    def _attempt(self, template: str, messages: Sequence[Mapping[str, Any]]) -> str:
        try:
            return self._render(template, messages, {"add_generation_prompt": True})
        except Exception:
            return ""
