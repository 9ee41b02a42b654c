"""How many tokens of an answer are thoughts, for `usage`. One counter per sequence, made by the chat endpoints."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.server.chat_reader import ReadPlan
from pdserve.server.parsers.feed import SPACE
from pdserve.server.parsers.thinking import ReasoningFormat
from pdserve.server.tokenizer import Tokenizer


class ReasoningCounter:
    """Counts the tokens up to the end of the thoughts, tags included, each once however often it is asked."""

    def __init__(self, tokenizer: Tokenizer | None, plan: ReadPlan) -> None:
        self._thinking = plan.thinking if plan.inside is not False else None
        self._decoder = tokenizer.text_decoder(skip_special=False) if tokenizer is not None else None
        self._inside = plan.inside is True
        self._text = ""
        self._num_seen = 0
        self._num_thoughts = 0

    def count(self, token_ids: Sequence[int]) -> int:
        """Of the answer so far, `token_ids`, which begins with what it was at the last call."""
        while self._thinking is not None and self._num_seen < len(token_ids):
            self._num_seen += 1
            self._step(self._thinking, token_ids[self._num_seen - 1])
        return self._num_thoughts

    def _step(self, thinking: ReasoningFormat, token_id: int) -> None:
        self._text += self._decoder.push(token_id) if self._decoder is not None else ""
        if not self._inside:
            begun = self._text.lstrip(SPACE)
            if not begun.startswith(thinking.opening):
                if not thinking.opening.startswith(begun):
                    self._thinking = None
                return
            self._inside = True
            self._text = begun.removeprefix(thinking.opening)
        self._num_thoughts = self._num_seen
        ends = (thinking.closing, *thinking.calls)
        if any(end in self._text for end in ends):
            self._thinking = None
        self._text = self._text[-max(len(end) for end in ends) :]
