"""Formats that write a call's arguments as JSON between model-specific markers."""

from __future__ import annotations

from collections.abc import Container

from pdserve.server.text.parsers.feed import CutOffError, IncrementalParser, NotACallError, Sink, Steps
from pdserve.server.text.parsers.json_read import call_object, forward_value
from pdserve.server.text.parsers.tool_format import MAX_NAME_CHARS, MarkedFormat, ToolFormat


class Hermes(MarkedFormat):
    """Hermes, Qwen 2.5 and 3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

    template_marks = ("<tool_call>", '"arguments"')
    opening = ("<tool_call>",)

    def call(self, feed: IncrementalParser, marker: str) -> Steps[None]:
        """See `MarkedFormat.call`."""
        yield from call_object(feed)
        yield from feed.skip_spaced("</tool_call>")
        feed.commit()


class Llama3(ToolFormat):
    """Llama 3.x: `{"name": ..., "parameters": {...}}` as the whole output or after `<|python_tag|>`; `;` separates
    calls.
    """

    template_marks = ("<|python_tag|>",)
    special_tokens = True
    tag = "<|python_tag|>"

    def read(self, feed: IncrementalParser) -> Steps[None]:
        """See `ToolFormat.read`."""
        try:
            yield from self._calls(feed, self.tools)
        except NotACallError:
            feed.give_up(0)
        except CutOffError:
            if feed.num_calls:
                raise
            feed.give_up(len(feed.text))
        while (yield from feed.content_until((self.tag,))) is not None:
            try:
                yield from self._calls(feed, None)
            except NotACallError:
                feed.give_up(len(self.tag))

    def _calls(self, feed: IncrementalParser, known: Container[str] | None) -> Steps[None]:
        yield from call_object(feed, known)
        try:
            while (yield from feed.skip_spaced(";")) or (yield from feed.skip_spaced(",")):
                yield from call_object(feed, known)
        except NotACallError:
            feed.give_up(0)


class Mistral(MarkedFormat):
    """Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`.

    Since tokenizer version 11 each call is `[TOOL_CALLS]name[ARGS]{...}`; some models write `[CALL_ID]id` before the
    arguments.
    """

    template_marks = ("[TOOL_CALLS]",)
    special_tokens = True
    opening = ("[TOOL_CALLS]",)

    @classmethod
    def new_id(cls, index: int, name: str, random: str) -> str:
        """See `ToolFormat.new_id`: nine letters and digits, as Mistral's templates require."""
        return random[:9]

    def call(self, feed: IncrementalParser, marker: str) -> Steps[None]:
        """See `MarkedFormat.call`."""
        if (yield from feed.skip_spaced("[")):
            yield from call_object(feed)
            yield from self._more_of_list(feed)
        elif (yield from feed.skip_spaced("{")):
            feed.pos -= 1
            yield from call_object(feed)
        else:
            yield from self._named(feed)

    def _more_of_list(self, feed: IncrementalParser) -> Steps[None]:
        try:
            while (yield from feed.skip_spaced(",")):
                yield from call_object(feed)
        except NotACallError:
            feed.give_up(0)
        else:
            yield from feed.skip_spaced("]")
            feed.commit()

    def _named(self, feed: IncrementalParser) -> Steps[None]:
        name, then = yield from feed.take_until(("[ARGS]", "[CALL_ID]", "{"), MAX_NAME_CHARS)
        call_id = None
        if then == "[CALL_ID]":
            call_id, then = yield from feed.take_until(("[ARGS]", "{"), MAX_NAME_CHARS)
        if then == "{":
            feed.pos -= 1
        if not name.strip() or any(char.isspace() for char in name.strip()):
            raise NotACallError
        sink = feed.open_call(name.strip(), call_id)
        yield from feed.skip_space()
        yield from _arguments(feed, sink)


class DeepSeek(MarkedFormat):
    """DeepSeek V3 and R1: `function<sep>name` and the arguments in a fenced block. V3.1: `name<sep>{...}`."""

    template_marks = ("<｜tool▁call▁begin｜>",)
    special_tokens = True
    opening = ("<｜tool▁call▁begin｜>",)
    swallowed = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁end｜>")

    def call(self, feed: IncrementalParser, marker: str) -> Steps[None]:
        """See `MarkedFormat.call`."""
        name, _ = yield from feed.take_until(("<｜tool▁sep｜>",), MAX_NAME_CHARS)
        if not (yield from feed.skip_spaced("{")):
            name, _ = yield from feed.take_until(("\n",), MAX_NAME_CHARS)
            yield from feed.skip_spaced("```json")
        else:
            feed.pos -= 1
        sink = feed.open_call(name.strip())
        yield from feed.skip_space()
        yield from _arguments(feed, sink)
        yield from feed.skip_spaced("```")
        feed.commit()


class KimiK2(MarkedFormat):
    """Kimi K2: `<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`.

    The model's own id is kept, because the model expects it in the next turn.
    """

    template_marks = ("<|tool_call_argument_begin|>",)
    special_tokens = True
    opening = ("<|tool_call_begin|>",)
    swallowed = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_end|>")

    @classmethod
    def new_id(cls, index: int, name: str, random: str) -> str:
        """See `ToolFormat.new_id`: the id that the model itself would write."""
        return f"functions.{name}:{index}"

    def call(self, feed: IncrementalParser, marker: str) -> Steps[None]:
        """See `MarkedFormat.call`."""
        call_id, _ = yield from feed.take_until(("<|tool_call_argument_begin|>",), MAX_NAME_CHARS)
        name = call_id.strip().rpartition(":")[0] or call_id.strip()
        sink = feed.open_call(name.removeprefix("functions."), call_id.strip())
        yield from feed.skip_space()
        yield from _arguments(feed, sink)


class JsonList(ToolFormat):
    """The whole output is a list of calls, as the grammar of `tool_choice: required` enforces."""

    def read(self, feed: IncrementalParser) -> Steps[None]:
        """See `ToolFormat.read`."""
        try:
            yield from feed.expect("[")
            while not (yield from feed.skip_spaced("]")):
                yield from feed.skip_spaced(",")
                yield from call_object(feed)
            feed.commit()
        except NotACallError:
            feed.give_up(0)
        yield from feed.content_to_end()


class JsonArguments(ToolFormat):
    """The whole output is the arguments of the only tool in `tools`, as the grammar of a named tool enforces."""

    def read(self, feed: IncrementalParser) -> Steps[None]:
        """See `ToolFormat.read`."""
        yield from feed.skip_space()
        sink = feed.open_call(next(iter(self.tools)))
        yield from _arguments(feed, sink)
        yield from feed.content_to_end()


def _arguments(feed: IncrementalParser, sink: Sink) -> Steps[None]:
    """Read the arguments of an opened call; text that is no JSON value is read again as content."""
    try:
        yield from forward_value(feed, sink)
    except NotACallError:
        feed.give_up(0)
