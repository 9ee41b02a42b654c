"""Chat templates: which one a request uses, what it takes, and the prompt it makes. Owned by the tokenizer.

Templates run in transformers' immutable sandbox, with JSON values only. Whatever a template raises is a refusal of the
messages: it is a program of the model's author, who checks roles and their order in it.
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
    """What a template wants, found out by trying.

    `parts`: a message's content as a list of parts, not as a string. `text_arguments`: the arguments of a past tool
    call as JSON text, not as an object. `developer`: it knows the role of that name.
    """

    parts: bool = False
    text_arguments: bool = False
    developer: bool = False


def built_in_names() -> list[str]:
    """Names that `--chat-template` takes beside files."""
    return sorted(path.stem for path in BUILT_IN.glob("*.jinja"))


def read_template(name: str) -> str:
    """The text of a built-in template or of a file.

    Raises:
        ConfigError: there is neither, or it is no text.
    """
    known = BUILT_IN / f"{name}.jinja"
    path = known if name in built_in_names() else Path(name)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        names = ", ".join(built_in_names())
        raise ConfigError(
            f"cannot read the chat template {name}: {error}; built in are {names}", field="chat_template"
        ) from error


class ChatTemplates:
    """The templates of one model. Safe in all threads."""

    def __init__(self, hf_tokenizer: Any, override: str | None) -> None:
        """`hf_tokenizer`: of transformers, with its own template or several. `override`: one that replaces them.

        Raises:
            ConfigError: `override` is no Jinja.
        """
        self._hf = hf_tokenizer
        self._override = override
        self._facts: dict[str, TemplateFacts] = {}
        if override is not None:
            self._check_syntax(override)

    def text(self, *, tools: bool = False) -> str | None:
        """The template for a request, which some models have two of: with and without tools."""
        own = self._hf.chat_template if self._override is None else self._override
        if not isinstance(own, dict):
            return None if own is None else str(own)
        names = ("tool_use", "default") if tools else ("default",)
        found = next((own[name] for name in names if name in own), None)
        return None if found is None else str(found)

    def facts(self, template: str) -> TemplateFacts:
        """What `template` wants; found out once."""
        facts = self._facts.get(template)
        if facts is None:
            if len(self._facts) >= NUM_REMEMBERED:
                self._facts.clear()
            facts = self._facts[template] = self._try_out(template)
        return facts

    def render(self, template: str, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        """The prompt of a conversation. `options`: tools, documents, and variables for the template.

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
            raise ConfigError(f"the chat template is no Jinja: {error}", field="chat_template") from error
        except Exception:
            return  # it may refuse this conversation, and take others

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
        """A conversation with a past call of a tool, as text."""
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
