"""How many tokens of an answer are thoughts, for `usage`."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.server.chat_reader import ReadPlan
from pdserve.server.parsers.feed import SPACE
from pdserve.server.tokenizer import Tokenizer


def count_reasoning(tokenizer: Tokenizer | None, plan: ReadPlan, token_ids: Sequence[int]) -> int:
    """Tokens of `token_ids` up to the end of the thoughts, tags included; 0 where there are none."""
    thinking = plan.thinking
    if tokenizer is None or thinking is None or plan.inside is False:
        return 0
    decoder = tokenizer.text_decoder(skip_special=False)
    text = ""
    for count, token_id in enumerate(token_ids, 1):
        fresh = decoder.push(token_id)
        text += fresh
        begun = plan.inside or text.lstrip(SPACE).startswith(thinking.opening)
        if not begun and not thinking.opening.startswith(text.lstrip(SPACE)):
            return 0
        searched = text[-(len(fresh) + len(thinking.closing)) :]
        if thinking.closing in searched:
            return count
    return len(token_ids) if plan.inside or text.lstrip(SPACE).startswith(thinking.opening) else 0
