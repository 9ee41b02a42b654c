"""Refuses requests that could never run. Called by roles at admission."""

from __future__ import annotations

from pdserve.errors import RequestError
from pdserve.scheduler.core import SchedulerContext


def check_fits(core: SchedulerContext, num_tokens: int) -> None:
    """Refuse what could never run, however long it waits.

    Raises:
        RequestError: 400.
    """
    memory = core.memory
    if memory.num_pages(num_tokens) > memory.pages.num_total:
        raise RequestError(
            f"prompt and max_new_tokens need {num_tokens} tokens of KV memory, the pool has {memory.max_tokens}",
            field="max_new_tokens",
        )
    if memory.num_pages(num_tokens) > memory.table.max_pages_per_row:
        longest = memory.table.max_pages_per_row * memory.layout.page_tokens
        raise RequestError(
            f"prompt and max_new_tokens are {num_tokens} tokens, a request can have {longest}", field="max_new_tokens"
        )
