"""The progress bar of one call: ended prompts, and tokens per second. Used by `LLM` in the caller's thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from pdserve.llm.outputs import RequestOutput


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

    def ended(self, output: RequestOutput | None) -> None:
        """Advance the bar by one prompt. `output` None: the prompt failed."""
        if self._bar is None:
            return
        if output is not None:
            self._num_input += len(output.prompt_token_ids)
            self._num_output += sum(len(answer.token_ids) for answer in output.outputs)
            seconds = max(1e-6, time.monotonic() - self._started_s)
            text = f"input: {self._num_input / seconds:.1f} toks/s, output: {self._num_output / seconds:.1f} toks/s"
            self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(1)

    def close(self) -> None:
        """Finish the bar at the end of the call, successful or not."""
        if self._bar is not None:
            self._bar.close()
