"""Log probabilities of prompt tokens.

`LocalExecutor` calls `read_prompt_logprobs` when it launches a step; `ModelRunner` calls `PromptLogprobComputer` while
the step is computed. The logits of a long prompt would not fit into memory: positions are processed a few at
a time, and only the requested values are kept. With the vocabulary split over tensor ranks, each rank reduces its part,
and the ranks exchange the results.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from pdserve.base.parallel import vocab_of
from pdserve.executor.input_batch import HostBatch
from pdserve.executor.interface import BatchPlan
from pdserve.model.forward_batch import IntArray, to_device
from pdserve.model.interface import Model
from pdserve.protocol.logprobs import Logprobs, PromptLogprobs

LOGIT_BYTES = 64 << 20
"""Bytes of float32 logits that are held at a time."""


@dataclasses.dataclass(frozen=True)
class PromptLogprobParams:
    """The prompt tokens of a micro-batch whose log probabilities are requested; arrays int64.

    `flat` `[M]`: tokens of the batch whose successors are scored. `table_rows`, `positions` `[M]`: table row and
    position of each successor. `ids` `[R, K]`: token ids that each request asks for, padded with 0. `owners` `[M]`:
    index in `ids` of each successor's request. `num_top`: the most top entries that a request asks for.
    """

    flat: IntArray
    table_rows: IntArray
    positions: IntArray
    owners: IntArray
    ids: IntArray
    num_top: int


@dataclasses.dataclass(frozen=True)
class PromptLogprobRange:
    """The successors that one row of the plan requests: `num_tokens` from position `start` on."""

    row: int
    start: int
    num_tokens: int
    logprob_params: Logprobs


@dataclasses.dataclass(frozen=True)
class PromptLogprobTensors:
    """Scores of M prompt tokens.

    `own` float32 and `ranks` int64 `[M]`; `top_ids` int64 and `top` float32 `[M, n]`; `picked` float32 `[M, K]`.
    """

    own: Tensor
    ranks: Tensor
    top_ids: Tensor
    top: Tensor
    picked: Tensor

    def tensors(self) -> list[Tensor]:
        """All tensors, in the order of the fields."""
        return [self.own, self.ranks, self.top_ids, self.top, self.picked]

    @staticmethod
    def blank(prompt_logprob_params: Sequence[PromptLogprobParams], device: torch.device) -> PromptLogprobTensors:
        """Return uninitialised tensors of the sampling rank's shapes."""
        count, num_top, num_ids = _widths(prompt_logprob_params)
        return PromptLogprobTensors(
            torch.empty(count, device=device),
            torch.empty(count, dtype=torch.int64, device=device),
            torch.empty(count, num_top, dtype=torch.int64, device=device),
            torch.empty(count, num_top, device=device),
            torch.empty(count, num_ids, device=device),
        )

    @staticmethod
    def joined(
        parts: Sequence[PromptLogprobTensors], prompt_logprob_params: Sequence[PromptLogprobParams]
    ) -> PromptLogprobTensors:
        """Concatenate the scores of all micro-batches; missing columns stay uninitialised."""
        whole = PromptLogprobTensors.blank(prompt_logprob_params, parts[0].own.device)
        at = 0
        for part in parts:
            for target, source in zip(whole.tensors(), part.tensors(), strict=True):
                rows = target[at : at + len(source)]
                (rows if source.dim() == 1 else rows[:, : source.shape[1]]).copy_(source)
            at += len(part.own)
        return whole


def read_prompt_logprobs(
    plan: BatchPlan, batches: Sequence[HostBatch], wanted: Mapping[int, tuple[int, Logprobs]]
) -> tuple[tuple[PromptLogprobParams | None, ...], tuple[PromptLogprobRange, ...]]:
    """Return the parameters of each micro-batch of `plan`, None where it scores no prompt tokens, and all ranges.

    `wanted`: prompt tokens and log-probability parameters by table row.
    """
    params = tuple(_read_params(batch, wanted) for batch in batches)
    rows = [(index, row) for index, row in enumerate(plan.rows) if row.row in wanted]
    prompt_ranges = [_range_of(index, row.start, row.end, *wanted[row.row]) for index, row in rows]
    return params, tuple(each for each in prompt_ranges if each is not None)


def _read_params(batch: HostBatch, wanted: Mapping[int, tuple[int, Logprobs]]) -> PromptLogprobParams | None:
    """Return the parameters of a micro-batch; None when it scores no prompt tokens."""
    prompt_ranges = _prompt_ranges(batch, wanted)
    if not prompt_ranges:
        return None
    rows = batch.rows
    flat = [
        np.arange(s.start - 1, s.start - 1 + s.num_tokens) - rows.starts[s.row] + rows.offsets[s.row]
        for s in prompt_ranges
    ]
    num_ids = max(len(s.logprob_params.token_ids) for s in prompt_ranges)
    ids = np.zeros((len(prompt_ranges), num_ids), dtype=np.int64)
    for index, s in enumerate(prompt_ranges):
        ids[index, : len(s.logprob_params.token_ids)] = s.logprob_params.token_ids
    counts = [s.num_tokens for s in prompt_ranges]
    return PromptLogprobParams(
        flat=np.concatenate(flat),
        table_rows=np.repeat([batch.table_rows[s.row] for s in prompt_ranges], counts),
        positions=np.concatenate([np.arange(s.start, s.start + s.num_tokens) for s in prompt_ranges]),
        owners=np.repeat(np.arange(len(prompt_ranges)), counts),
        ids=ids,
        num_top=max(s.logprob_params.top for s in prompt_ranges),
    )


def _prompt_ranges(batch: HostBatch, wanted: Mapping[int, tuple[int, Logprobs]]) -> list[PromptLogprobRange]:
    found = []
    for row, table_row in enumerate(batch.table_rows.tolist()):
        if table_row in wanted:
            prompt_range = _range_of(row, int(batch.rows.starts[row]), int(batch.rows.ends[row]), *wanted[table_row])
            if prompt_range is not None:
                found.append(prompt_range)
    return found


def _range_of(row: int, start: int, end: int, num_prompt: int, logprob_params: Logprobs) -> PromptLogprobRange | None:
    """The requested prompt tokens that the logits at positions `[start, end)` score; None when there are none."""
    assert logprob_params.prompt_from is not None, "`wanted` has only rows that request prompt log probabilities"
    first, stop = max(start, logprob_params.prompt_from), min(end, num_prompt - 1)
    return PromptLogprobRange(row, first + 1, stop - first, logprob_params) if first < stop else None


def pack_scores(prompt_ranges: Sequence[PromptLogprobRange], scores: PromptLogprobTensors) -> dict[int, PromptLogprobs]:
    """Return the results by row of the plan. `scores` are host tensors, in the order of `prompt_ranges`."""
    own, ranks, top_ids, top, picked = (tensor.numpy() for tensor in scores.tensors())
    packed, at = {}, 0
    for prompt_range in prompt_ranges:
        rows, logprob_params = slice(at, at + prompt_range.num_tokens), prompt_range.logprob_params
        at += prompt_range.num_tokens
        packed[prompt_range.row] = PromptLogprobs.pack(
            prompt_range.start,
            own[rows],
            ranks[rows].astype(np.int32),
            top_ids[rows, : logprob_params.top].astype(np.int32),
            top[rows, : logprob_params.top],
            picked[rows, : len(logprob_params.token_ids)],
        )
    assert at == len(own), (at, len(own))
    return packed


class PromptLogprobComputer:
    """Scores the hidden states of one micro-batch on a rank of the last stage. All tensor ranks must take part."""

    def __init__(self, model: Model, prompt_logprob_params: PromptLogprobParams, tokens: Tensor) -> None:
        """`tokens` int32 `[num_table_rows, context]`: known tokens of each row."""
        self._model = model
        self._parallel = model.parallel
        device = tokens.device
        self._flat = to_device(prompt_logprob_params.flat, device)
        self._targets = tokens[
            to_device(prompt_logprob_params.table_rows, device), to_device(prompt_logprob_params.positions, device)
        ].long()
        self._owners = to_device(prompt_logprob_params.owners, device)
        self._ids = to_device(prompt_logprob_params.ids, device)
        vocab_size = model.spec.vocab_size
        coord = model.parallel.coord
        self._held = vocab_of(vocab_size, coord.shape.tp_size, coord.tp_rank)
        self._share = len(vocab_of(vocab_size, coord.shape.tp_size, 0))
        self._num_top = min(prompt_logprob_params.num_top, vocab_size)
        self._blank = PromptLogprobTensors.blank([prompt_logprob_params], device)

    def __call__(self, hidden: Tensor) -> PromptLogprobTensors:
        """Return the scores of hidden states `[N, hidden]`, equal on all tensor ranks."""
        step = max(1, LOGIT_BYTES // (4 * self._share))
        for first in range(0, len(self._flat), step):
            some = slice(first, first + step)
            logits = self._model.logits(hidden.index_select(0, self._flat[some]))
            logits[:, len(self._held) :] = -torch.inf  # behind the end of the vocabulary
            for target, source in zip(self._blank.tensors(), self._look(logits, some), strict=True):
                (target if target.dim() == 1 else target[:, : source.shape[1]])[some] = source
        return self._blank

    def _look(self, logits: Tensor, some: slice) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Reduce this rank's logits `[c, share]` of a few positions to rows of `PromptLogprobTensors`."""
        total = self._over_ranks(logsumexp_of_rows(logits)).logsumexp(0)
        own_logit = self._of_ids(logits, self._targets[some, None])
        ranks = self._over_ranks((logits > own_logit).sum(-1)).sum(0) + 1
        picked = self._of_ids(logits, self._ids[self._owners[some]]) - total[:, None]
        best, ids = logits.topk(min(self._num_top, self._share), sorted=True)
        best, ids = self._best_of_all(best, ids + self._held.start)
        return own_logit[:, 0] - total, ranks, ids, best - total[:, None], picked

    def _of_ids(self, logits: Tensor, ids: Tensor) -> Tensor:
        """Return the logits of `ids` `[c, k]`, from the tensor rank that has each."""
        if ids.shape[1] == 0:
            return logits.new_empty(ids.shape)
        local = ids - self._held.start
        here = (local >= 0) & (local < len(self._held))
        values = logits.gather(1, local.masked_fill(~here, 0)).masked_fill(~here, -torch.inf)
        return self._over_ranks(values).amax(0)

    def _best_of_all(self, best: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the top entries over all ranks, from each rank's top entries `[c, n]`."""
        if self._parallel.coord.shape.tp_size == 1 or self._num_top == 0:
            return best, ids
        values = torch.cat(list(self._over_ranks(best)), -1)
        all_ids = torch.cat(list(self._over_ranks(ids)), -1)
        best, where = values.topk(self._num_top, sorted=True)
        return best, all_ids.gather(1, where)

    def _over_ranks(self, part: Tensor) -> Tensor:
        """Gather `[...]` of each tensor rank to `[tp_size, ...]`."""
        return self._parallel.all_gather(part[None])


def _widths(prompt_logprob_params: Sequence[PromptLogprobParams]) -> tuple[int, int, int]:
    """Return the number of rows, and the most columns of top entries and of ids."""
    return (
        sum(len(logprob_params.flat) for logprob_params in prompt_logprob_params),
        max(logprob_params.num_top for logprob_params in prompt_logprob_params),
        max(logprob_params.ids.shape[1] for logprob_params in prompt_logprob_params),
    )


def logsumexp_of_rows(logits: Tensor) -> Tensor:
    """Return the logsumexp of each row of `[c, n]`, the same bits however many rows there are.

    A single row is repeated: torch would split it over its threads, and add in another order.
    """
    return (logits if len(logits) > 1 else logits.repeat(2, 1)).logsumexp(-1)[: len(logits)]
