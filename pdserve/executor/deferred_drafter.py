"""`DeferredDrafter`: while it drafts nothing, the drafter of an executor sees decode steps later, several at once.

While adaptive drafting is off (`BatchPlan.num_proposals` is 0), a decode step without drafts does not run the draft
model. The executor keeps the hidden states that the drafter reads, and the step may be a captured one, or one call of
the CPU kernels. The kept positions of a row are its *backlog*:

    step         plain   plain   plain   drafts again
    target       h(10)   h(11)   h(12)   h(13)
    draft model                          slots 10 to 13 by one pass for the backlog, then slot 14 and drafts

The backlog of a row goes to the drafter before its next step that is not deferred: one that drafts, has drafts or
prompt tokens, or finds the backlog full. To the drafter it is a chunk of several tokens, so drafts do not change. Where
the row is closed before, its last slots in the draft KV stay as they are, which costs acceptance, and never a token.

A small greedy step of the CPU kernels is one call in any case: the drafter runs behind it, with the hidden states that
the call has kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from pdserve.executor.drafter import ModelDrafter, Proposals
from pdserve.executor.input_batch import HostBatch, read_plan
from pdserve.executor.interface import BatchPlan, BatchRow
from pdserve.executor.model_runner import Collect, Compute, OnLayer
from pdserve.executor.verify import accepted_counts
from pdserve.memory.kv_memory import PageTable
from pdserve.memory.layout import KVLayout
from pdserve.model.forward_batch import IntArray, to_device
from pdserve.model.interface import Model

DEPTH = 16
"""Most positions of a row's backlog."""


@dataclasses.dataclass(frozen=True)
class Backlog:
    """What a step adds to the backlogs of its rows, or what the drafter gets before the step.

    `lines` int64 `[N]`: where the hidden states of the tokens are kept. `host`: the tokens that the drafter gets; None:
    the step is deferred, and its own tokens are kept.
    """

    lines: IntArray
    host: HostBatch | None = None


class DeferredDrafter:
    """Runs a `ModelDrafter` beside the steps of one executor. All ranks of a replica defer the same steps.

    `model` is the target. `num_prompt` int64 `[table rows]`: prompt tokens of each row.
    """

    def __init__(
        self,
        drafter: ModelDrafter,
        model: Model,
        table: PageTable,
        layout: KVLayout,
        num_prompt: IntArray,
        device: torch.device,
    ) -> None:
        self._drafter, self._table, self._layout, self._num_prompt = drafter, table, layout, num_prompt
        self._device = device
        self._starts = np.zeros(table.num_rows, dtype=np.int64)
        self._counts = np.zeros(table.num_rows, dtype=np.int64)
        """By table row: the first position of its backlog, and the number of its positions."""
        width = 0 if drafter.taps is None else len(drafter.taps.layers) * model.spec.hidden_size
        self._hidden = torch.zeros(table.num_rows * DEPTH, width, dtype=model.dtype, device=device)

    def open(self, row: int) -> None:
        """Drop the backlog of table row `row`: a new request has it."""
        self._counts[row] = 0

    def begin(self, plan: BatchPlan) -> Backlog | None:
        """Read a plan at its launch: whether it is deferred, or else the backlogs of its rows; None: they have none.

        Scheduler thread. The step must follow: it passes the value to `catch_up`, and to `propose` or `keep`.
        """
        rows = np.array([row.row for row in plan.rows], dtype=np.int64)
        if not len(rows):
            return None
        if self._may_defer(plan, rows):
            starts, counts = np.array([row.start for row in plan.rows], dtype=np.int64), self._counts[rows]
            self._starts[rows] = np.where(counts == 0, starts, self._starts[rows])
            assert (self._starts[rows] + counts == starts).all(), "a row goes on where it was"
            self._counts[rows] += 1
            return Backlog(rows * DEPTH + counts)
        kept = [row for row in plan.rows if self._counts[row.row]]
        if not kept:
            return None
        numbers = np.array([row.row for row in kept], dtype=np.int64)
        starts, counts = self._starts[numbers].tolist(), self._counts[numbers]
        self._counts[numbers] = 0
        ends = (start + count for start, count in zip(starts, counts.tolist(), strict=True))
        known = tuple(
            BatchRow(row.rid, row.row, start, end, True) for row, start, end in zip(kept, starts, ends, strict=True)
        )
        within = np.arange(int(counts.sum())) - (counts.cumsum() - counts).repeat(counts)
        host = read_plan(BatchPlan(plan.step, known), self._table, self._num_prompt, self._layout)
        return Backlog((numbers * DEPTH).repeat(counts) + within, host)

    def _may_defer(self, plan: BatchPlan, rows: IntArray) -> bool:
        """Whether the plan is a decode step without drafts, for which the drafter proposes nothing."""
        if plan.num_proposals != 0 or not all(row.sample and row.end == row.start + 1 for row in plan.rows):
            return False
        starts = np.array([row.start for row in plan.rows], dtype=np.int64)
        return bool((starts >= self._num_prompt[rows]).all() and (self._counts[rows] < DEPTH).all())

    def catch_up(self, backlog: Backlog | None, tokens: Tensor) -> None:
        """Give the drafter what was kept. Called before the target computes the step; `tokens`: see `propose`."""
        if backlog is None or backlog.host is None:
            return
        taps = self._drafter.taps
        if taps is not None:
            taps.replace(self._hidden.index_select(0, to_device(backlog.lines, self._device)))
        self._drafter.propose(backlog.host, None, tokens, 0)

    def propose(
        self,
        backlog: Backlog | None,
        plan: BatchPlan,
        host: HostBatch,
        sampled: Tensor | None,
        tokens: Tensor,
    ) -> Proposals | None:
        """See `ModelDrafter.propose`. A deferred step is kept, and has no proposals.

        `sampled`: all tokens that a step with drafts has sampled, int64 `[S]`; None: it had no drafts.
        """
        if backlog is None or backlog.host is not None:
            num_accepted = None if sampled is None else accepted_counts(plan, sampled.tolist())
            return self._drafter.propose(host, num_accepted, tokens, plan.num_proposals)
        if self._drafter.taps is not None:
            self.keep(backlog, self._drafter.taps.hidden)
        return None

    def keep(self, backlog: Backlog, hidden: Tensor) -> None:
        """Keep the outputs of the tapped layers of a deferred step, `[N, layers * hidden_size]`."""
        if self._hidden.shape[1]:
            self._hidden.index_copy_(0, to_device(backlog.lines, self._device), hidden)

    def beside(self, plan: BatchPlan, compute: Compute, tapped: Callable[[int], Tensor], tokens: Tensor) -> Compute:
        """Return a computation of `plan`, a step that `compute` computes in one call, and of the drafter behind it.

        `tapped(n)` returns the outputs of the tapped layers of the `n` tokens that `compute` has computed.
        `tokens`: see `propose`. The step must follow.
        """
        backlog = self.begin(plan)
        if backlog is not None and backlog.host is None:
            return partial(self._deferred_step, plan, backlog, compute, tapped)
        host = read_plan(plan, self._table, self._num_prompt, self._layout)
        return partial(self._drafting_step, plan, host, backlog, compute, tapped, tokens)

    def _deferred_step(
        self,
        plan: BatchPlan,
        backlog: Backlog,
        compute: Compute,
        tapped: Callable[[int], Tensor],
        on_layer: OnLayer | None,
    ) -> Collect:
        collect = compute(on_layer)
        if self._hidden.shape[1]:
            self.keep(backlog, tapped(len(plan.rows)))
        return collect

    @torch.inference_mode()
    def _drafting_step(
        self,
        plan: BatchPlan,
        host: HostBatch,
        backlog: Backlog | None,
        compute: Compute,
        tapped: Callable[[int], Tensor],
        tokens: Tensor,
        on_layer: OnLayer | None,
    ) -> Collect:
        self.catch_up(backlog, tokens)
        result = compute(on_layer)()
        taps, num_accepted = self._drafter.taps, None
        if taps is not None:
            taps.replace(tapped(host.columns.shape[1]))
        if any(row.drafts for row in plan.rows):
            num_accepted = np.array([len(result.more.get(index, ())) for index in range(len(plan.rows))])
        proposals = self._drafter.propose(host, num_accepted, tokens, plan.num_proposals)
        if proposals is None:
            return lambda: result
        return lambda: dataclasses.replace(result, drafts=proposals.by_row())
