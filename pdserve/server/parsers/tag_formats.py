"""Formats in which every argument stands between tags of its own."""

from __future__ import annotations

from pdserve.server.parsers.arguments import ArgumentWriter
from pdserve.server.parsers.feed import IncrementalParser, NotACallError, Steps
from pdserve.server.parsers.tool_format import MAX_NAME_CHARS, MarkedFormat


def _checked(name: str) -> str:
    """A tool's name.

    Raises:
        NotACallError: it cannot be one.
    """
    name = name.strip()
    if not name or any(char.isspace() or char in "<>{}" for char in name):
        raise NotACallError
    return name


class Qwen3Coder(MarkedFormat):
    """Qwen3-Coder: `<tool_call><function=name><parameter=key>value</parameter>...</function></tool_call>`."""

    template_marks = ("<function=", "<parameter=")
    opening = ("<tool_call>", "<function=")

    def call(self, feed: IncrementalParser, marker: str) -> Steps[None]:
        """See `MarkedFormat.call`."""
        if marker == "<tool_call>":
            yield from feed.expect("<function=")
        name = _checked((yield from feed.take_until((">",), MAX_NAME_CHARS))[0])
        arguments = ArgumentWriter(feed.open_call(name), self.tools.get(name, {}))
        ends = ("</parameter>", "<parameter=", "</function>", "</tool_call>")
        end = "</parameter>"
        while end in ("</parameter>", "<parameter="):
            if end == "</parameter>" and not (yield from feed.skip_spaced("<parameter=")):
                break
            key, _ = yield from feed.take_until((">",))
            end = yield from arguments.field(feed, key.strip(), ends, trim=True)
        arguments.close()
        if end != "</tool_call>":
            yield from feed.skip_spaced("</function>")
            yield from feed.skip_spaced("</tool_call>")
        feed.commit()


class Glm45(MarkedFormat):
    """GLM 4.5 to 4.7: `<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>...</tool_call>`."""

    template_marks = ("<arg_key>", "<arg_value>")
    opening = ("<tool_call>",)

    def call(self, feed: IncrementalParser, marker: str) -> Steps[None]:
        """See `MarkedFormat.call`."""
        text, end = yield from feed.take_until(("<arg_key>", "</tool_call>"), MAX_NAME_CHARS)
        name = _checked(text)
        arguments = ArgumentWriter(feed.open_call(name), self.tools.get(name, {}))
        while end == "<arg_key>":
            key, _ = yield from feed.take_until(("</arg_key>",))
            yield from feed.skip_spaced("<arg_value>")
            end = yield from arguments.field(feed, key.strip(), ("</arg_value>", "</tool_call>"), trim=False)
            if end == "</arg_value>":
                if (yield from feed.skip_spaced("<arg_key>")):
                    end = "<arg_key>"
                else:
                    yield from feed.skip_spaced("</tool_call>")
        arguments.close()
        feed.commit()
