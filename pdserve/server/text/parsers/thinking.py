"""Reasoning formats: where a model's reasoning ends and its answer begins. `--reasoning-parser` selects one by name."""

from __future__ import annotations

import dataclasses

from pdserve.server.text.parsers.feed import SPACE, CutOffError, IncrementalParser, Steps


@dataclasses.dataclass(frozen=True)
class ReasoningFormat:
    """Format of a model whose reasoning stands between `opening` and `closing`.

    `from_start`: the text begins with reasoning even without `opening`, unless the prompt closes the tag. `calls`:
    markers of a tool call, which some models write without closing their reasoning. `special_tokens`: the tags are
    special tokens, which the detokenizer must not skip.
    """

    opening: str = "<think>"
    closing: str = "</think>"
    from_start: bool = False
    calls: tuple[str, ...] = ()
    special_tokens: bool = False

    def begins_inside(self, prompt: str, continued: str | None = None) -> bool | None:
        """Whether the output for `prompt` begins inside the reasoning; None: it does if it begins with `opening`.

        Chat templates open or close the tag if the request enables or disables reasoning. `continued` is the final
        message that the model continues; None: a new message.
        """
        if continued is not None and (self.opening in continued or self.closing in continued):
            return continued.rfind(self.opening) > continued.rfind(self.closing)
        tail = prompt.rstrip(SPACE)
        if tail.endswith(self.closing):
            return False
        if tail.endswith(self.opening) or self.from_start:
            return True
        return None

    def read(self, feed: IncrementalParser, inside: bool | None) -> Steps[None]:
        """Parse all of `feed`: first the reasoning, if any; the rest is content, unchanged. `inside`: see
        `begins_inside`.
        """
        try:
            opened = inside is not False and (yield from feed.skip_spaced(self.opening))
        except CutOffError:
            opened = False
        if inside or opened:
            feed.commit()
            yield from self._reasoning(feed)
        else:
            feed.pos = 0
        while True:
            feed.plain(len(feed.text))
            if not (yield from feed.more()):
                return

    def _reasoning(self, feed: IncrementalParser) -> Steps[None]:
        """Read the reasoning and the white space after it."""
        end = yield from feed.forward_until((self.closing, *self.calls), feed.reasoning)
        if end != self.closing:
            feed.text = end + feed.text
            return
        yield from feed.skip_space()
        feed.commit()


_THINK = ReasoningFormat()
_FROM_START = ReasoningFormat(from_start=True)

THINKING: dict[str, ReasoningFormat] = {
    "deepseek-r1": _FROM_START,
    "deepseek-v3": _THINK,
    "glm45": ReasoningFormat(calls=("<tool_call>",)),
    "hunyuan": _THINK,
    "interns1": _THINK,
    "kimi": ReasoningFormat("◁think▷", "◁/think▷"),
    "kimi_k2": ReasoningFormat(calls=("<|tool_calls_section_begin|>", "<|tool_call_begin|>")),
    "mimo": _THINK,
    "minimax": _FROM_START,
    "mistral": ReasoningFormat("[THINK]", "[/THINK]", special_tokens=True),
    "nemotron_3": _THINK,
    "qwen3": _THINK,
    "qwen3-thinking": _FROM_START,
    "step3": _FROM_START,
    "step3p5": _FROM_START,
}
"""Formats by SGLang's names; `tag_formats.Harmony` parses `gpt-oss`."""
