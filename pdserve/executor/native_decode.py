"""The fast path for small greedy decode steps, which one call of the native kernels computes. Called by
`LocalExecutor`.

Between two such steps the processor's caches hold none of Python's data, so a short Python path decides the speed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt

from pdserve.executor.interface import BatchPlan, SampledToken, StepResult
from pdserve.executor.sampling_metadata import SamplingMetadata
from pdserve.executor.step_runners import Collect, Compute, OnLayer
from pdserve.memory.page_table import PageTable
from pdserve.model.forward_batch import IntArray

Decode = Callable[[IntArray, npt.NDArray[np.int32], npt.NDArray[np.int32]], list[int]]
"""Signature of `NativeDecoder.decode`."""


class NativeDecodePath:
    """Computes greedy decode steps of at most `most_rows` rows.

    `tokens` int32 `[table rows, context]`: known tokens of each row, on the host.
    """

    def __init__(
        self, decode: Decode, most_rows: int, tokens: npt.NDArray[np.int32], table: PageTable, params: SamplingMetadata
    ) -> None:
        self._decode = decode
        self._most_rows = most_rows
        self._tokens = tokens
        self._pages = table.pages
        self._params = params

    def computation(self, plan: BatchPlan) -> Compute | None:
        """Return the computation of `plan`; None: the plan is no small greedy decode step.

        It must run at once, not later: it reads the page table.
        """
        rows = plan.rows
        if not 0 < len(rows) <= self._most_rows or self._params.prompt_wishes:
            return None
        for row in rows:
            if not row.sample or row.end - row.start != 1:
                return None
            assert row.end < self._tokens.shape[1], "the next token has its place"
        facts = np.array([[row.row for row in rows], [row.start for row in rows]])
        params = self._params.pick(facts[0], facts[1] + 1)
        if not params.takes_best or (facts[1] < params.columns["num_prompt"]).any():
            return None
        return partial(self._compute, plan.step, facts)

    def _compute(self, step: int, facts: IntArray, on_layer: OnLayer | None) -> Collect:
        assert on_layer is None, "the fast path reports no layer events"
        tokens = self._decode(facts, self._tokens, self._pages)
        return lambda: StepResult(step, tuple(map(SampledToken, tokens)))
