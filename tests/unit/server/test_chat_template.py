"""Chat templates: built-in ones, what they want, and whether they can be read."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from pdserve.errors import ConfigError, RequestError
from pdserve.server.openai.chat import template_messages
from pdserve.server.request.schemas import ChatMessage, FunctionCall, ToolCall
from pdserve.server.text.tokenizer import ChatTemplates, TemplateFacts, built_in_names, read_template
from tests.unit.server.server_kit import tiny_hf_tokenizer

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "three"},
]


def templates(override: str | None = None, own: dict[str, str] | None = None) -> ChatTemplates:
    """`override` replaces the tokenizer's templates. `own`: the tokenizer has several templates, by name."""
    hf = tiny_hf_tokenizer()
    hf.bos_token = "<s>"
    if own is not None:
        hf.chat_template = own
    return ChatTemplates(hf, override)


@pytest.mark.parametrize("name", [name for name in built_in_names() if "reranker" not in name])
def test_built_in_templates_show_every_message_in_order(name: str) -> None:
    text = read_template(name)
    shown = templates(text).render(text, MESSAGES, {"add_generation_prompt": True})
    places = [shown.index(str(message["content"])) for message in MESSAGES]
    assert len(set(places)) == 4 and places[1] < places[2] < places[3]
    assert templates(text).facts(text) == TemplateFacts()


def test_chatml_is_what_everybody_calls_chatml() -> None:
    assert templates().render(read_template("chatml"), MESSAGES[1:3], {"add_generation_prompt": True}) == (
        "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_template_from_a_file_or_none(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("{{ messages[0].content }}!")
    assert read_template(str(file)) == "{{ messages[0].content }}!"
    with pytest.raises(ConfigError, match="built-in templates: chatml"):
        read_template("no-such-template")
    with pytest.raises(ConfigError, match="not valid Jinja"):
        templates("{% if %}")


PARTS = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
CALLS = "{{% for m in messages %}}{{{{ m.content }}}}{{% for c in m.tool_calls or [] %}}{}{{% endfor %}}{{% endfor %}}"


@pytest.mark.parametrize(
    ("template", "facts"),
    [
        (PARTS, TemplateFacts(parts=True)),
        (CALLS.format("{{ c.function.arguments | tojson }}"), TemplateFacts()),
        (CALLS.format("{{ c.function.arguments }}"), TemplateFacts(text_arguments=True)),
        (CALLS.format("{{ 'x' + c.function.arguments }}"), TemplateFacts(text_arguments=True)),
        (
            "{% for m in messages %}{{ m.role == 'developer' }}{{ m.content }}{% endfor %}",
            TemplateFacts(developer=True),
        ),
    ],
)
def test_what_a_template_wants_is_found_out(template: str, facts: TemplateFacts) -> None:
    assert templates().facts(template) == facts


def test_messages_take_the_form_that_the_template_wants() -> None:
    call = ToolCall(function=FunctionCall(name="f", arguments='{"a": 1}'), id="c")
    messages = [
        ChatMessage(role="developer", content="d"),
        ChatMessage(role="assistant", tool_calls=[call], reasoning="hm"),
        ChatMessage(role="tool", content="out", tool_call_id="c"),
    ]
    plain = template_messages(messages, TemplateFacts(), "messages")
    assert [(message["role"], message["content"]) for message in plain] == [
        ("system", "d"), ("assistant", ""), ("tool", "out"),
    ]  # fmt: skip
    assert plain[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert (plain[1]["reasoning_content"], plain[2]["name"]) == ("hm", "f")
    other = template_messages(messages, TemplateFacts(parts=True, text_arguments=True, developer=True), "messages")
    assert other[0] == {"role": "developer", "content": [{"type": "text", "text": "d"}]}
    assert other[1]["content"] == []
    assert other[1]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'


def test_a_model_with_two_templates_has_one_for_tools() -> None:
    made = templates(own={"default": "plain", "tool_use": "tools"})
    assert (made.text(), made.text(tools=True)) == ("plain", "tools")


@pytest.mark.parametrize("options", [{"template": 1}, {"messages": 1}, {"self": 1}])
def test_no_variable_of_a_request_can_break_the_call(options: dict[str, Any]) -> None:
    with contextlib.suppress(RequestError):  # which is a 400
        assert "one" in templates().render(read_template("chatml"), MESSAGES[1:2], options)
