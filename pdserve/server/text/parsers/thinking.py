"""Reasoning formats: where a model's thoughts end and its answer begins. Looked up by name for `--reasoning-parser`."""

from __future__ import annotations

import dataclasses

from pdserve.server.text.parsers.feed import SPACE, CutOffError, IncrementalParser, Steps


@dataclasses.dataclass(frozen=True)
class ReasoningFormat:
    """Thoughts stand between `opening` and `closing`.

    `from_start`: the text begins with thoughts even without `opening`, unless the prompt says otherwise.
    `calls`: what begins a tool call, which some models write without closing their thoughts.
    `special_tokens`: the tags are special tokens, which must not be skipped when tokens become text.
    """

    opening: str = "<think>"
    closing: str = "</think>"
    from_start: bool = False
    calls: tuple[str, ...] = ()
    special_tokens: bool = False

    def begins_inside(self, prompt: str, continued: str | None = None) -> bool | None:
        """Whether the answer to `prompt` begins with thoughts; None: if it begins with `opening`.

        Chat templates open or close the tag where the request asks for thoughts or for none. `continued` is the final
        message that the model goes on with.
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
        """Read all of `feed`: thoughts first, if there are any; the rest is content, as it is."""
        try:
            opened = inside is not False and (yield from feed.skip_spaced(self.opening))
        except CutOffError:
            opened = False
        if inside or opened:
            feed.commit()
            yield from self._thoughts(feed)
        else:
            feed.pos = 0
        while True:
            feed.plain(len(feed.text))
            if not (yield from feed.more()):
                return

    def _thoughts(self, feed: IncrementalParser) -> Steps[None]:
        """Read thoughts and the white space behind them."""
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
"""By SGLang's names; `gpt-oss` is `harmony`'s."""
