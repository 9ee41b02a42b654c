"""The seam between scheduling and the device: plans go down as values, results come back as values.

The executor owns tokens on the device: `open_row` writes a request's known tokens into row `row`, `run` writes each
sampled token behind them, so a plan names only rows and ranges. The page table says which pages a row has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from pdserve.memory.layout import KVLayout
from pdserve.protocol.sampling import SamplingParams


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """Compute positions `[start, end)` of the request in page-table row `row`; sample the token at `end` if
    `sample`.
    """

    rid: str
    row: int
    start: int
    end: int
    sample: bool

    @property
    def num_tokens(self) -> int:
        """Tokens that this row adds to the batch."""
        return self.end - self.start


@dataclasses.dataclass(frozen=True, slots=True)
class BatchPlan:
    """One step: rows of any lengths, flattened by the executor into one batch without padding."""

    step: int
    rows: tuple[Row, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class SampledToken:
    """A chosen token; natural-log probabilities only where the row asked for them."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """One entry per row of the plan: the sampled token, or None where the row did not sample."""

    step: int
    tokens: tuple[SampledToken | None, ...]


class Executor(Protocol):
    """Runs plans. Called by the scheduler thread only."""

    @property
    def layout(self) -> KVLayout:
        """Geometry of the KV pool."""
        ...

    @property
    def buffers(self) -> tuple[tuple[int, int], ...]:
        """`(address, bytes)` of the KV pool of each layout group, for registration with a transport."""
        ...

    def open_row(
        self,
        row: int,
        token_ids: Sequence[int],
        num_prompt_tokens: int,
        sampling: SamplingParams,
        top_logprobs: int | None,
    ) -> None:
        """A request takes `row`; `token_ids` are its prompt and any output tokens known so far.

        Sampling at position p with a seed depends on (seed, p) only, so that decode goes on where prefill ended.
        """
        ...

    def run(self, plan: BatchPlan) -> StepResult:
        """Compute the plan: writes KV pages, samples, appends sampled tokens to their rows."""
        ...

    def close_row(self, row: int) -> None:
        """The request has left `row`."""
        ...
