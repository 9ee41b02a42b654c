"""Runs prepared jobs for the calling thread, with a progress bar. For the calls of `LLM`."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from pdserve.errors import PdserveError
from pdserve.llm.outputs import BatchError
from pdserve.llm.runner import Job, OfflineRunner
from pdserve.llm.servers import Servers
from pdserve.server.generation import GenerationUpdate

T = TypeVar("T")
_Outcome = tuple[Job, list[GenerationUpdate] | PdserveError]


class Bar(Protocol):
    """The methods of tqdm that `Progress` calls."""

    def update(self, n: float = 1) -> Any:
        """Advance the bar by `n` ended prompts."""
        ...

    def set_postfix_str(self, s: str = "", refresh: bool = True) -> Any:
        """Show `s` behind the bar."""
        ...

    def close(self) -> Any:
        """Finish the bar."""
        ...


class Progress:
    """`use_tqdm` False: no bar. True: tqdm's bar. A function: called in place of `tqdm`."""

    def __init__(self, use_tqdm: bool | Callable[..., Bar], total: int) -> None:
        self._bar: Bar | None = None
        if use_tqdm:
            from tqdm.auto import tqdm

            make: Callable[..., Bar] = tqdm if use_tqdm is True else use_tqdm
            self._bar = make(total=total, desc="Processed prompts", unit="prompt", dynamic_ncols=True)
        self._started_s = time.monotonic()
        self._num_input = self._num_output = 0

    def ended(self, num_input: int, num_output: int) -> None:
        """Advance the bar by one prompt, and add its tokens to the rates. Both numbers are 0 for a failed prompt."""
        if self._bar is None:
            return
        if num_input:
            self._num_input += num_input
            self._num_output += num_output
            seconds = max(1e-6, time.monotonic() - self._started_s)
            text = f"input: {self._num_input / seconds:.1f} toks/s, output: {self._num_output / seconds:.1f} toks/s"
            self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(1)

    def close(self) -> None:
        """Finish the bar at the end of the call, successful or not."""
        if self._bar is not None:
            self._bar.close()


UseTqdm = bool | Callable[..., Bar]


def run_jobs(
    servers: Servers,
    runner: OfflineRunner,
    jobs: Sequence[Job],
    make: Callable[[Job, list[GenerationUpdate]], T],
    use_tqdm: UseTqdm,
) -> list[T]:
    """Run `jobs`, whose numbers are their places, and return what `make` makes of each one's updates, in their order.

    The loop thread delivers ended jobs; the calling thread calls `make` and shows the bar.

    Raises:
        BatchError: jobs have failed, or `make` raised a PdserveError; raised after all have ended.
    """
    outputs: list[T | None] = [None] * len(jobs)
    errors: dict[int, PdserveError] = {}
    news: queue.SimpleQueue[_Outcome | None] = queue.SimpleQueue()
    work = runner.run(jobs, lambda job, result: news.put((job, result)))
    with contextlib.closing(Progress(use_tqdm, len(jobs))) as progress:
        future = servers.loop.submit(work)
        future.add_done_callback(lambda _: news.put(None))
        try:
            while (outcome := news.get()) is not None:
                job, result = outcome
                num_input = num_output = 0
                try:
                    if isinstance(result, PdserveError):
                        raise result
                    num_output = sum(len(update.token_ids) for update in result)
                    outputs[job.number] = make(job, result)
                    num_input = len(job.requests[0].input_ids)
                except PdserveError as error:
                    errors[job.number] = error
                progress.ended(num_input, num_output)
        finally:
            future.cancel()  # after an interrupt; has no effect if the future has ended
    future.result()
    if errors:
        raise BatchError(outputs, errors)
    return [output for output in outputs if output is not None]
