"""Runs one rank's part of a step: micro-batches through its pipeline stage, and one sampling for all ranks.

`LocalExecutor` calls it for each step. All ranks of a replica compute the same plans in the same order. A stage begins
its next step before the tokens of the last one are known, because the next step has other requests.

    stage 0   | step 1 | step 2 |           | step 3 | step 4 |      step 3 uses the tokens of step 1
    stage 1            | step 1, sampling | step 2, sampling | step 3 ...
                                  └─ tokens ──> every rank
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pdserve.executor.grammar_rows import StepMasks
from pdserve.executor.graphs import DecodeGraphs
from pdserve.executor.input_batch import HostBatch, StepParams, build_batch
from pdserve.executor.interface import BatchPlan, BatchRow
from pdserve.executor.prompt_logprobs import PromptLogprobComputer, PromptLogprobParams, PromptLogprobTensors
from pdserve.executor.sampler import Sampled, TokenSampler, choose_with_torch, sample
from pdserve.model.attention.interface import AttentionBackend
from pdserve.model.interface import Model
from pdserve.model.parallel import Arrival, is_sampler

MIN_TOKENS = {"cpu": 32, "cuda": 256}
"""By device type: least tokens of a micro-batch. Below, reading the weights dominates, so a split gains nothing."""


class ModelRunner:
    """Computes one rank's part of the model."""

    def __init__(self, model: Model, attention: AttentionBackend, choose: TokenSampler = choose_with_torch) -> None:
        self.graphs: DecodeGraphs | None = None
        """Captured decode steps; None until they are captured."""
        self._argmax: Tensor | None = None
        self.has_put = False
        """True when the argmax tokens of the step just computed are already in the rows' tokens."""
        self._model = model
        self._attention = attention
        self._choose = choose
        self._parallel = model.parallel
        self.is_sampler = is_sampler(self._parallel.coord)
        self._scores: list[PromptLogprobTensors] = []

    def logits(
        self,
        batches: Sequence[HostBatch],
        tokens: Tensor,
        on_layer: Callable[[int], None] | None,
        prompt_logprob_params: Sequence[PromptLogprobParams | None],
    ) -> Tensor | None:
        """Compute a step's micro-batches. Returns logits `[S, vocab]` on the sampling rank, None elsewhere.

        `on_layer(i)` is called once all micro-batches have written the KV of this rank's layer i.
        `prompt_logprob_params`: for each micro-batch, the prompt tokens that `prompt_scores` scores.
        """
        last = len(batches) - 1
        self._scores, self._argmax, self.has_put = [], None, False
        size = None
        if self.graphs is not None and last == 0 and on_layer is None and prompt_logprob_params[0] is None:
            size = self.graphs.size_for(batches[0])
        if self.graphs is not None and size is not None:
            decoded = self.graphs.run(batches[0], size)
            self._argmax = decoded.argmax
            self.has_put = True
            return decoded.logits
        is_last = self._parallel.coord.is_last_stage
        outputs = []
        for i, (host, logprob_params) in enumerate(zip(batches, prompt_logprob_params, strict=True)):
            output = self._run(host, tokens, on_layer if i == last else None, logprob_params)
            outputs.append(output.clone() if is_last and i < last else output)
        if last == 0:
            self._argmax = self._model.argmax
        if not self._parallel.coord.is_last_stage or not any(len(host.sampled) for host in batches):
            return None
        part = outputs[0] if last == 0 else torch.cat(outputs)
        return self._parallel.gather_logits(part.float(), self._model.spec.vocab_size)

    def begin(self, step: int, num_tokens: int) -> None:
        """Begin `step` on all ranks; this replica computes `num_tokens` tokens."""
        self._parallel.dp_attention_group.begin(step, num_tokens)

    def idle(self) -> None:
        """Take part in a step in which this replica has nothing to compute."""
        if self._parallel.dp_attention_group.spans_replicas:
            self._model.idle()

    def choose(self, logits: Tensor | None, params: StepParams, tokens: Tensor, masks: StepMasks | None) -> Sampled:
        """Sample on the sampling rank; on other ranks return tensors that `share` fills.

        `tokens`: see `sample`. `masks`: None where no row has a grammar.
        """
        if not self.is_sampler:
            return Sampled.blank(params, self._model.spec.vocab_size, tokens.device)
        assert logits is not None, "the sampling rank has the logits"
        if self._argmax is not None and params.all_greedy:
            return Sampled(self._argmax, None, None, None)
        logits = logits.float()
        if masks is None:
            return sample(logits, params, tokens, self._choose)
        failed, params = masks.apply(logits), params.without_grammar_bans()
        return dataclasses.replace(sample(logits, params, tokens, self._choose), failed=failed)

    def prompt_scores(
        self, prompt_logprob_params: Sequence[PromptLogprobParams | None], device: torch.device
    ) -> PromptLogprobTensors | None:
        """Return the prompt scores of the micro-batches just computed; None when none are requested.

        On stages before the last one, `share` fills the tensors.
        """
        wanted = [logprob_params for logprob_params in prompt_logprob_params if logprob_params is not None]
        if not wanted:
            return None
        if not self._parallel.coord.is_last_stage:
            return PromptLogprobTensors.blank(wanted, device)
        scores, self._scores = PromptLogprobTensors.joined(self._scores, wanted), []
        return scores

    def share(self, chosen: Sampled | None, scores: PromptLogprobTensors | None) -> Arrival:
        """Begin to send the sampling rank's results of a step to every rank."""
        tensors = [] if chosen is None else chosen.tensors()
        if scores is not None and self._parallel.coord.shape.pp_size > 1:
            tensors += [tensor for tensor in scores.tensors() if tensor.numel()]
        return self._parallel.share_tokens(tensors)

    def _run(
        self,
        host: HostBatch,
        tokens: Tensor,
        on_layer: Callable[[int], None] | None,
        prompt_logprob_params: PromptLogprobParams | None,
    ) -> Tensor:
        """Compute one micro-batch, and send its output to the next stage where there is one."""
        model, parallel = self._model, self._parallel
        batch = build_batch(host, tokens)
        hidden = None
        if not parallel.coord.is_first_stage:
            shape = (len(batch.positions), model.spec.hidden_size)
            hidden = parallel.receive(shape, model.dtype, tokens.device)
        on_hidden = None
        if prompt_logprob_params is not None and parallel.coord.is_last_stage:
            scorer = PromptLogprobComputer(model, prompt_logprob_params, tokens)

            def on_hidden(x: Tensor) -> None:
                self._scores.append(scorer(x))

        output = model.forward(batch, self._attention.begin(batch), on_layer, hidden, on_hidden)
        if not parallel.coord.is_last_stage:
            parallel.send(output)
        return output


def cut_plan(plan: BatchPlan, num_stages: int, min_tokens: int) -> tuple[BatchPlan, ...]:
    """Cut a step into up to `num_stages` micro-batches of about equal tokens, none below `min_tokens`.

    A row may be cut too: the KV of its first tokens is written before the rest is computed.
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
