"""One submitted body as an async iterator of updates. Made and fed by the engine client, read by one endpoint.

Updates of a sequence that the reader has not taken yet are merged, so a slow reader costs memory for its text only.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterator
from types import TracebackType
from typing import Self

from pdserve.errors import PdserveError
from pdserve.protocol.logprobs import PromptLogprobs
from pdserve.protocol.messages import FinishReason, RequestTiming, TokenLogprob


@dataclasses.dataclass
class GenerationUpdate:
    """News of sequence `index`: text that is safe to show, and the tokens since the last update.

    `finish` comes with the last one, `timing` is the newest known.
    `logprobs` has one entry per token when they were asked for; `prompt_parts` are the prompt's, in parts.
    """

    index: int
    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    prompt_parts: list[PromptLogprobs] = dataclasses.field(default_factory=list)
    finish: FinishReason | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    timing: RequestTiming | None = None

    def absorb(self, newer: GenerationUpdate) -> None:
        """Append what came later for the same sequence."""
        assert newer.index == self.index and self.finish is None
        self.text += newer.text
        self.token_ids += newer.token_ids
        self.logprobs += newer.logprobs
        self.prompt_parts += newer.prompt_parts
        self.finish = newer.finish
        self.prompt_tokens = newer.prompt_tokens
        self.cached_tokens = newer.cached_tokens
        self.timing = newer.timing


class Generation:
    """The updates of a body's sequences, in the order of arrival; ends when every sequence has finished.

    Iterating raises the error that ended it: `RequestError` when the scheduler refused a sequence, `EngineDeadError`
    when the engine is gone. Leaving the `async with` block early aborts what is still running.
    """

    def __init__(self, num_sequences: int, on_close: Callable[[Generation], None]) -> None:
        self.prior_text: dict[int, str] = {}
        """By sequence, what its client was shown before it came here; see `GenerateRequest.prior_output_ids`."""
        self._unfinished = num_sequences
        self._on_close = on_close
        self._pending: dict[int, GenerationUpdate] = {}
        self._news = asyncio.Event()
        self._error: PdserveError | None = None

    def put(self, update: GenerationUpdate) -> None:
        """Called by the engine client on the event loop."""
        if update.finish is not None:
            self._unfinished -= 1
        waiting = self._pending.get(update.index)
        if waiting is None:
            self._pending[update.index] = update
        else:
            waiting.absorb(update)
        self._news.set()

    def fail(self, error: PdserveError) -> None:
        """Called by the engine client; the first error counts."""
        if self._error is None:
            self._error = error
        self._news.set()

    def __aiter__(self) -> AsyncIterator[GenerationUpdate]:
        return self

    async def __anext__(self) -> GenerationUpdate:
        while True:
            if self._error is not None:
                raise self._error
            if self._pending:
                return self._pending.pop(next(iter(self._pending)))
            if self._unfinished == 0:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextlib.contextmanager
    def closed_on_error(self) -> Iterator[None]:
        """For the stretch between submission and the reader's `async with`, which a cancelled reader never enters."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Abort what is unfinished and forget the rest."""
        self._on_close(self)
