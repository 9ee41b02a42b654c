"""The message format of gpt-oss ("harmony"): channels for reasoning, calls and the final answer.

<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json
<|message|>{...}<|call|>             <|start|>assistant<|channel|>final<|message|>...<|return|>
"""

from __future__ import annotations

import re

from pdserve.server.text.parsers.feed import IncrementalParser, Steps
from pdserve.server.text.parsers.tool_format import ToolFormat

_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_STARTS = ("<|start|>", "<|channel|>")
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")


class Harmony(ToolFormat):
    """Parses reasoning and calls together."""

    template_marks = ("<|channel|>",)
    special_tokens = True

    def read(self, feed: IncrementalParser) -> Steps[None]:
        """See `ToolFormat.read`."""
        start = yield from feed.forward_until(_STARTS, feed.content)
        while True:
            header, _ = yield from feed.take_until(("<|message|>",))
            header = start + header
            feed.commit()
            start = yield from self._body(feed, header)
            while start not in _STARTS:
                start = yield from feed.forward_until(_STARTS, _ignore)

    def _body(self, feed: IncrementalParser, header: str) -> Steps[str]:
        recipient = _RECIPIENT.search(header)
        channel = _CHANNEL.search(header)
        if recipient is not None and recipient[1].startswith("functions.") and recipient[1] != "functions.":
            sink = feed.open_call(recipient[1].removeprefix("functions."))
        elif channel is not None and channel[1] == "analysis":
            sink = feed.reasoning
        else:
            sink = feed.content
        return (yield from feed.forward_until(_ENDS, sink))


def _ignore(_: str) -> None:
    """Drop text between two messages."""
