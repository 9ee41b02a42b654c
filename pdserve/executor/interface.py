"""The seam between scheduling and the device: plans go down as values, results come back as values.

The executor owns tokens on the device: `open_row` writes a request's known tokens into row `row`, `run` writes each
sampled token behind them, so a plan names only rows and ranges. The page table says which pages a row has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from pdserve.memory.layout import KVLayout
from pdserve.protocol.logprobs import Logprobs, PromptLogprobs
from pdserve.protocol.sampling import CoreSamplingParams


class BatchRow(msgspec.Struct, frozen=True, gc=False):
    """Compute positions `[start, end)` of the request in page-table row `row`; sample the token at `end` if
    `sample`.

    Thousands of these are made in every step: a frozen dataclass would take ten times as long.
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
    rows: tuple[BatchRow, ...]


class SampledToken(msgspec.Struct, frozen=True, gc=False):
    """A chosen token; natural-log probabilities only where the row asked for them."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    picked: tuple[float, ...] = ()
    """Of the `token_ids` that the row asked for."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """One entry per row of the plan: the sampled token, or None where the row did not sample.

    `prompts`: by index of the row, the log probabilities of prompt tokens that the row asked for and that this step's
    tokens are followed by.
    """

    step: int
    tokens: tuple[SampledToken | None, ...]
    prompts: Mapping[int, PromptLogprobs] = dataclasses.field(default_factory=dict)
    failed: tuple[int, ...] = ()
    """Rows of the plan whose grammar cannot be followed any more; their tokens mean nothing."""


class LayerEvents(Protocol):
    """Says when the KV of the first layers of a launched step is written. Made by `Executor.launch` where asked for.

    Waited on by copy workers, never by the scheduler thread or inside attention.
    """

    def wait(self, num_layers: int, timeout_s: float) -> bool:
        """Block until layers `[0, num_layers)` of the step are in the pool; False after `timeout_s`. Any thread."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class StepHandle:
    """A launched step, to be given to `Executor.resolve` once.

    `marks` say where it stands, layer by layer; None where `launch` was not asked for them. `finish` waits for the
    step; only the executor calls it.
    """

    plan: BatchPlan
    marks: LayerEvents | None
    finish: Callable[[], StepResult]


class HostPages(Protocol):
    """KV pages that were copied to host memory by `Executor.offload`."""

    @property
    def num_bytes(self) -> int:
        """Host memory that they take."""
        ...


class Executor(Protocol):
    """Runs plans. Called by the scheduler thread only.

    Steps run in the order of their launch. A launched step reads page table, row parameters and token rows as they are
    at the launch, and writes KV and tokens until it is resolved: its pages and rows must not be given to anybody else
    before. `offload` and `restore` are called while no step is unresolved.
    """

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
        sampling: CoreSamplingParams,
        logprobs: Logprobs | None,
    ) -> None:
        """A request takes `row`; `token_ids` are its prompt and any output tokens known so far.

        Where its grammar stands follows from these, and from what is sampled after.
        Sampling at position p with a seed depends on (seed, p) only, so that decode goes on where prefill ended.
        """
        ...

    def launch(self, plan: BatchPlan, *, layer_marks: bool = False) -> StepHandle:
        """Begin to compute the plan: writes KV pages, samples, appends sampled tokens to their rows.

        The next plan may use these tokens before `resolve`.
        """
        ...

    def resolve(self, handle: StepHandle) -> StepResult:
        """Wait for the oldest unresolved step and return what it sampled."""
        ...

    def offload(self, pages: Sequence[int]) -> HostPages:
        """Copy the KV of `pages` to host memory."""
        ...

    def restore(self, saved: HostPages, pages: Sequence[int]) -> None:
        """Copy saved KV into `pages`, as many as were saved; the host copy may then be dropped."""
        ...

    def zero(self, pages: Sequence[int]) -> None:
        """Clear the KV of `pages`, which no launched step uses: later steps read zeros there."""
        ...

    def close_row(self, row: int) -> None:
        """The request has left `row`."""
        ...


def run(executor: Executor, plan: BatchPlan) -> StepResult:
    """Compute one plan from beginning to end."""
    return executor.resolve(executor.launch(plan))
