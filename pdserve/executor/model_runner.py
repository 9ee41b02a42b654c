"""A step on one rank of a split model: micro-batches through its stage, and one choice of tokens for all ranks.

Called by `LocalExecutor` while it computes a step; all ranks of a replica do so for the same plans in the same order.
Stages do not wait for a step's tokens before they go on: the next step is of other requests.

    stage 0   | step 1 | step 2 |           | step 3 | step 4 |      step 3 uses the tokens of step 1
    stage 1            | step 1, sampling | step 2, sampling | step 3 ...
                                  └─ tokens ──> every rank
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pdserve.executor.batch_builder import HostBatch, build_batch
from pdserve.executor.grammar_rows import StepMasks
from pdserve.executor.graphs import DecodeGraphs
from pdserve.executor.interface import BatchPlan, BatchRow
from pdserve.executor.prompt_logprobs import PromptLogprobComputer, PromptLogprobParams, PromptLogprobTensors
from pdserve.executor.sampler import Choose, Sampled, choose_with_torch, sample
from pdserve.executor.sampling_metadata import StepParams
from pdserve.model.attention.interface import AttentionBackend
from pdserve.model.families.interface import Model
from pdserve.model.parallel import Arrival, is_sampler

MIN_TOKENS = {"cpu": 32, "cuda": 256}
"""By device: a micro-batch of fewer tokens costs what reading the weights costs, so to cut it off gains nothing."""


class ModelRunner:
    """One rank's part of the model at work."""

    def __init__(self, model: Model, attention: AttentionBackend, choose: Choose = choose_with_torch) -> None:
        self.graphs: DecodeGraphs | None = None
        """Captured decode steps, once there are some."""
        self._best: Tensor | None = None
        self.has_put = False
        """Whether the likeliest tokens of the step just computed have their places among the rows' tokens already."""
        self._model = model
        self._attention = attention
        self._choose = choose
        self._parallel = model.parallel
        self.is_sampler = is_sampler(self._parallel.place)
        self._scores: list[PromptLogprobTensors] = []

    def logits(
        self,
        batches: Sequence[HostBatch],
        tokens: Tensor,
        on_layer: Callable[[int], None] | None,
        prompt_logprob_params: Sequence[PromptLogprobParams | None],
    ) -> Tensor | None:
        """Compute a step's micro-batches: `[S, vocab]`, for `choose`, on the sampling rank, None on the others.

        `on_layer(i)` is called once all of them have written the KV of this rank's layer i. `prompt_logprob_params`:
        for each micro-batch, what `prompt_scores` returns.
        """
        last = len(batches) - 1
        self._scores, self._best, self.has_put = [], None, False
        size = None
        if self.graphs is not None and last == 0 and on_layer is None and prompt_logprob_params[0] is None:
            size = self.graphs.size_for(batches[0])
        if self.graphs is not None and size is not None:
            decoded = self.graphs.run(batches[0], size)
            self._best = decoded.best
            self.has_put = True
            return decoded.logits
        is_last = self._parallel.place.is_last_stage
        outputs = []
        for i, (host, logprob_params) in enumerate(zip(batches, prompt_logprob_params, strict=True)):
            output = self._run(host, tokens, on_layer if i == last else None, logprob_params)
            outputs.append(output.clone() if is_last and i < last else output)
        if last == 0:
            self._best = self._model.best
        if not self._parallel.place.is_last_stage or not any(len(host.sampled) for host in batches):
            return None
        part = outputs[0] if last == 0 else torch.cat(outputs)
        return self._parallel.gather_logits(part.float(), self._model.spec.vocab_size)

    def begin(self, step: int, num_tokens: int) -> None:
        """All ranks begin `step`, in which this replica computes `num_tokens` tokens."""
        self._parallel.wide.begin(step, num_tokens)

    def idle(self) -> None:
        """Our part of a step in which this replica has nothing to compute."""
        if self._parallel.wide.spans_replicas:
            self._model.idle()

    def choose(self, logits: Tensor | None, params: StepParams, tokens: Tensor, masks: StepMasks | None) -> Sampled:
        """The sampling rank's choice; what the others get is filled by `share`. `tokens` as for `sample`; `masks` are
        there where grammars are.
        """
        if not self.is_sampler:
            return Sampled.blank(params, self._model.spec.vocab_size, tokens.device)
        assert logits is not None, "the sampling rank has the logits"
        if self._best is not None and params.takes_best:
            return Sampled(self._best, None, None, None)
        logits = logits.float()
        if masks is None:
            return sample(logits, params, tokens, self._choose)
        failed, params = masks.apply(logits), params.without_grammar_bans()
        return dataclasses.replace(sample(logits, params, tokens, self._choose), failed=failed)

    def prompt_scores(
        self, prompt_logprob_params: Sequence[PromptLogprobParams | None], device: torch.device
    ) -> PromptLogprobTensors | None:
        """What the micro-batches just computed say of prompt tokens; None when nothing was wanted. Stages before the
        last one get theirs by `share`.
        """
        wanted = [logprob_params for logprob_params in prompt_logprob_params if logprob_params is not None]
        if not wanted:
            return None
        if not self._parallel.place.is_last_stage:
            return PromptLogprobTensors.blank(wanted, device)
        scores, self._scores = PromptLogprobTensors.joined(self._scores, wanted), []
        return scores

    def share(self, chosen: Sampled | None, scores: PromptLogprobTensors | None) -> Arrival:
        """Begin to give every rank what the sampling rank has found in a step."""
        tensors = [] if chosen is None else chosen.tensors()
        if scores is not None and self._parallel.place.shape.pp_size > 1:
            tensors += [tensor for tensor in scores.tensors() if tensor.numel()]
        return self._parallel.share_tokens(tensors)

    def _run(
        self,
        host: HostBatch,
        tokens: Tensor,
        on_layer: Callable[[int], None] | None,
        prompt_logprob_params: PromptLogprobParams | None,
    ) -> Tensor:
        """One micro-batch; what it gives is sent on where there is a next stage."""
        model, parallel = self._model, self._parallel
        batch = build_batch(host, tokens)
        hidden = None
        if not parallel.place.is_first_stage:
            shape = (len(batch.positions), model.spec.hidden_size)
            hidden = parallel.receive(shape, model.dtype, tokens.device)
        on_hidden = None
        if prompt_logprob_params is not None and parallel.place.is_last_stage:
            scorer = PromptLogprobComputer(model, prompt_logprob_params, tokens)

            def on_hidden(x: Tensor) -> None:
                self._scores.append(scorer(x))

        output = model.forward(batch, self._attention.begin(batch), on_layer, hidden, on_hidden)
        if not parallel.place.is_last_stage:
            parallel.send(output)
        return output


def cut_plan(plan: BatchPlan, num_stages: int, min_tokens: int) -> tuple[BatchPlan, ...]:
    """Cut a step into up to `num_stages` micro-batches of about as many tokens each, none below `min_tokens`.

    A row may be cut as well, for its first tokens' KV is written before the rest is computed.
    """
    if num_stages == 1:
        return (plan,)
    total = sum(row.num_tokens for row in plan.rows)
    count = max(1, min(num_stages, total // min_tokens))
    if count == 1:
        return (plan,)
    bounds = [total * i // count for i in range(1, count + 1)]
    parts: list[list[BatchRow]] = [[] for _ in bounds]
    done, current = 0, 0
    for row in plan.rows:
        start = row.start
        while start < row.end:
            end = min(row.end, start + bounds[current] - done)
            parts[current].append(BatchRow(row.rid, row.row, start, end, row.sample and end == row.end))
            done += end - start
            start = end
            if done == bounds[current]:
                current += 1
    return tuple(BatchPlan(plan.step, tuple(part)) for part in parts)
