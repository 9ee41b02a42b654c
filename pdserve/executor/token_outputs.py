"""What a step returns of its tokens beside the sampled ones: log probabilities of prompt tokens, and hidden states.

`LocalExecutor` calls `read_token_outputs` when it launches a step. `ModelRunner` computes `TokenOutputs` in the forward
pass. `StepOutputs.pack` turns them into values once they are on the host. Hidden states are computed on the last
pipeline stage; all tensor ranks have the same ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from pdserve.executor.input_batch import HostBatch, SamplingMetadata
from pdserve.executor.interface import BatchPlan
from pdserve.executor.prompt_logprobs import (
    PromptLogprobParams,
    PromptLogprobRange,
    PromptLogprobTensors,
    pack_scores,
    read_prompt_logprobs,
)
from pdserve.model.forward_batch import IntArray, to_device
from pdserve.model.interface import Model
from pdserve.protocol.hidden_states import HiddenParams, HiddenStates
from pdserve.protocol.logprobs import PromptLogprobs


@dataclasses.dataclass(frozen=True)
class HiddenRange:
    """Row `row` of the plan returns the hidden states of `num_tokens` tokens from position `start` on."""

    row: int
    start: int
    num_tokens: int
    pooled: bool

    @property
    def num_rows(self) -> int:
        """Rows of the result."""
        return 1 if self.pooled else self.num_tokens


@dataclasses.dataclass(frozen=True)
class HiddenBatch:
    """Hidden states that a micro-batch returns. `flat` int64 `[M]`: its tokens, those of one range after another."""

    flat: IntArray
    ranges: tuple[HiddenRange, ...]

    @property
    def num_rows(self) -> int:
        """Rows of the result."""
        return sum(each.num_rows for each in self.ranges)

    def compute(self, model: Model, hidden: Tensor) -> Tensor:
        """Return float32 `[num_rows, hidden_size]` of the last layer's output `hidden` `[N, hidden_size]`."""
        normed = model.final_norm(hidden.index_select(0, to_device(self.flat, hidden.device))).float()
        if not any(each.pooled for each in self.ranges):
            return normed
        parts = torch.split(normed, [each.num_tokens for each in self.ranges])
        return torch.cat(
            [part.sum(0, keepdim=True) if each.pooled else part for part, each in zip(parts, self.ranges, strict=True)]
        )


@dataclasses.dataclass(frozen=True)
class TokenOutputParams:
    """What one micro-batch returns of its tokens; None: nothing of that kind."""

    logprobs: PromptLogprobParams | None = None
    hidden: HiddenBatch | None = None

    @property
    def any(self) -> bool:
        """True when the forward pass has to give the hidden states of its tokens."""
        return self.logprobs is not None or self.hidden is not None


@dataclasses.dataclass(frozen=True)
class TokenOutputs:
    """Results of all micro-batches of a step. `hidden` float32 `[rows, hidden_size]`."""

    scores: PromptLogprobTensors | None
    hidden: Tensor | None

    def tensors(self) -> list[Tensor]:
        """All tensors."""
        scores = [] if self.scores is None else self.scores.tensors()
        return scores if self.hidden is None else [*scores, self.hidden]

    @staticmethod
    def blank(params: Sequence[TokenOutputParams], hidden_size: int, device: torch.device) -> TokenOutputs:
        """Return uninitialised tensors of the last stage's shapes."""
        logprobs = [each.logprobs for each in params if each.logprobs is not None]
        num_rows = sum(each.hidden.num_rows for each in params if each.hidden is not None)
        return TokenOutputs(
            PromptLogprobTensors.blank(logprobs, device) if logprobs else None,
            torch.empty(num_rows, hidden_size, device=device) if num_rows else None,
        )

    @staticmethod
    def joined(
        scores: Sequence[PromptLogprobTensors], hidden: Sequence[Tensor], params: Sequence[TokenOutputParams]
    ) -> TokenOutputs:
        """Join the results of the micro-batches with `params`."""
        logprobs = [each.logprobs for each in params if each.logprobs is not None]
        return TokenOutputs(
            PromptLogprobTensors.joined(scores, logprobs) if logprobs else None,
            torch.cat(list(hidden)) if hidden else None,
        )


@dataclasses.dataclass(frozen=True)
class StepOutputs:
    """What a step returns of its tokens: `params` of its micro-batches, and the ranges of its results, in order."""

    params: tuple[TokenOutputParams, ...] = ()
    scored: tuple[PromptLogprobRange, ...] = ()

    def pack(self, found: TokenOutputs | None) -> tuple[dict[int, PromptLogprobs], dict[int, HiddenStates]]:
        """Return the results by row of the plan. `found`: host tensors; None: there are none."""
        if found is None:
            return {}, {}
        scores = {} if found.scores is None else pack_scores(self.scored, found.scores)
        return scores, {} if found.hidden is None else self._pack_hidden(found.hidden)

    def _pack_hidden(self, hidden: Tensor) -> dict[int, HiddenStates]:
        ranges = [each for params in self.params if params.hidden is not None for each in params.hidden.ranges]
        pieces = torch.split(hidden, [each.num_rows for each in ranges])
        by_row: dict[int, list[tuple[HiddenRange, Tensor]]] = {}
        for each, piece in zip(ranges, pieces, strict=True):
            by_row.setdefault(each.row, []).append((each, piece))
        packed = {}
        for row, parts in by_row.items():  # several micro-batches may have a part of one row
            first = parts[0][0]
            joined = torch.cat([piece for _, piece in parts]) if len(parts) > 1 else parts[0][1]
            if first.pooled:
                joined = joined.sum(0, keepdim=True)
            num_tokens = sum(each.num_tokens for each, _ in parts)
            packed[row] = HiddenStates.pack(first.start, num_tokens, joined.numpy())
        return packed


def read_token_outputs(plan: BatchPlan, batches: Sequence[HostBatch], metadata: SamplingMetadata) -> StepOutputs:
    """Return what the step returns of its tokens. `metadata` has what each table row requests."""
    logprobs: tuple[PromptLogprobParams | None, ...] = (None,) * len(batches)
    scored: tuple[PromptLogprobRange, ...] = ()
    if metadata.prompt_logprob_params:
        logprobs, scored = read_prompt_logprobs(plan, batches, metadata.prompt_logprob_params)
    hidden: Sequence[HiddenBatch | None] = (None,) * len(batches)
    if metadata.hidden_params:
        places = {row.row: index for index, row in enumerate(plan.rows)}
        hidden = [_read_hidden(batch, places, metadata.hidden_params) for batch in batches]
    return StepOutputs(tuple(map(TokenOutputParams, logprobs, hidden)), scored)


def _read_hidden(batch: HostBatch, places: Mapping[int, int], wanted: Mapping[int, HiddenParams]) -> HiddenBatch | None:
    """Return the hidden states that a micro-batch returns; None: none. `places`: row of the plan by table row."""
    ranges, flat = [], []
    for row, table_row in enumerate(batch.table_rows.tolist()):
        params = wanted.get(table_row)
        if params is None:
            continue
        begin, end = int(batch.rows.starts[row]), int(batch.rows.ends[row])
        start = max(begin, params.start)
        if start < end:
            ranges.append(HiddenRange(places[table_row], start, end - start, params.pooled))
            first = int(batch.rows.offsets[row]) - begin
            flat.append(np.arange(first + start, first + end))
    return HiddenBatch(np.concatenate(flat), tuple(ranges)) if ranges else None
