"""Inputs of a step on the host: the tokens of its plan, and the sampling metadata of its rows.

A plan becomes tensors (token, position and KV slot of every token) without a loop over tokens: `read_plan` when a step
is launched, `build_batch` when it is computed. The sampling metadata of all table rows are columns, so that a step
picks those of its rows with one index. `LocalExecutor.open_row` writes them; the sampler reads them.
"""

from __future__ import annotations

import dataclasses
import json
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from pdserve.executor.interface import BatchPlan, BatchRow
from pdserve.memory.kv_memory import PageTable
from pdserve.memory.layout import KVLayout
from pdserve.model.forward_batch import ForwardBatch, HostRows, IntArray, TokenEmbeds, to_device
from pdserve.model.parallel import Arrival
from pdserve.protocol.hidden_states import HiddenArray, HiddenParams
from pdserve.protocol.logprobs import Logprobs
from pdserve.protocol.sampling import CoreSamplingParams

MIN_TOKENS = {"cpu": 32, "cuda": 256}
"""By device type: least tokens of a micro-batch. Below, reading the weights dominates, so a split gains nothing."""
_COLUMNS = np.dtype(
    [
        ("temperature", "f4"),
        ("top_p", "f4"),
        ("top_k", "i8"),
        ("min_p", "f4"),
        ("repetition", "f4"),
        ("frequency", "f4"),
        ("presence", "f4"),
        ("seed", "u8"),
        ("num_prompt", "i8"),
        ("min_new", "i8"),
        ("num_top", "i8"),
        ("logprob", "?"),
        ("greedy", "?"),
        ("history", "?"),
        ("grammar", "?"),
        ("plain", "?"),
    ]
)


@dataclasses.dataclass(frozen=True)
class ProcessorCall:
    """A row's logit processor, and the parameters that the request gives it."""

    name: str
    params: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class StepParams:
    """Columns of the rows that sample in this step, in plan order, and the position of the token that each samples.

    A row with k drafts samples at 1 + k positions, and counts as 1 + k rows here.

    `bans[i]`: tokens that row i may not take yet. `biases[i]`: logit biases of row i. `picks[i]`: token ids whose log
    probabilities row i requests. `processors[i]`: logit processor of row i. An absent row has none.
    """

    columns: np.ndarray[tuple[int], np.dtype[np.void]]
    table_rows: IntArray
    positions: IntArray
    bans: dict[int, tuple[int, ...]]
    biases: dict[int, dict[int, float]]
    picks: dict[int, tuple[int, ...]]
    all_greedy: bool
    """True when every row takes the argmax of its raw logits and no row requests log probabilities."""
    processors: dict[int, ProcessorCall] = dataclasses.field(default_factory=dict)

    @property
    def constrained(self) -> IntArray:
        """The rows whose output follows a grammar, as int64 indices."""
        return np.flatnonzero(self.columns["grammar"])

    def without_grammar_bans(self) -> StepParams:
        """Return a copy without the bans of rows with a grammar, whose masks apply them."""
        follows = self.columns["grammar"]
        return dataclasses.replace(self, bans={i: tokens for i, tokens in self.bans.items() if not follows[i]})

    @property
    def wants_logprobs(self) -> bool:
        """True when a row requests log probabilities."""
        return bool(self.columns["logprob"].any())

    @property
    def num_top(self) -> int:
        """The most top entries that a row requests."""
        return int(self.columns["num_top"].max())

    @property
    def num_picks(self) -> int:
        """The most token ids whose log probabilities a row requests."""
        return max(map(len, self.picks.values()), default=0)


class Seeds:
    """Seeds for requests without one. Where several ranks run a request, rank 0 sets its seed."""

    def __init__(self, default_seed: int | None = None) -> None:
        self._random = np.random.default_rng(default_seed)

    def fix(self, sampling: CoreSamplingParams) -> CoreSamplingParams:
        """Return `sampling` with its own seed, or a new one."""
        if sampling.seed is not None:
            return sampling
        return msgspec.structs.replace(sampling, seed=int(self._random.integers(1 << 63)))


class SamplingMetadata:
    """The columns of all rows. `default_seed` seeds the generator for requests without a seed; None: entropy of the
    system.
    """

    def __init__(self, num_rows: int, eos_token_ids: tuple[int, ...], default_seed: int | None = None) -> None:
        self._columns = np.zeros(num_rows, dtype=_COLUMNS)
        self._eos = eos_token_ids
        self._bans: dict[int, tuple[int, ...]] = {}
        self._biases: dict[int, dict[int, float]] = {}
        self._picks: dict[int, tuple[int, ...]] = {}
        self._processors: dict[int, ProcessorCall] = {}
        self.prompt_logprob_params: dict[int, tuple[int, Logprobs]] = {}
        """By row that requests log probabilities of its prompt: prompt tokens and parameters."""
        self.hidden_params: dict[int, HiddenParams] = {}
        """By row that requests hidden states."""
        self._seeds = Seeds(default_seed)
        self._picked = b"", self._columns[:0], False
        """The last rows picked, their columns, and whether all are plain. Successive decode steps pick the same rows.
        """

    def set(
        self,
        row: int,
        num_prompt: int,
        sampling: CoreSamplingParams,
        logprobs: Logprobs | None,
        hidden: HiddenParams | None = None,
    ) -> None:
        """Set the columns of `row` for a new request."""
        self.clear(row)
        seed = self._seeds.fix(sampling).seed
        assert seed is not None, "fixed"
        wants_output_logprobs = logprobs is not None and logprobs.output
        wants_more = wants_output_logprobs or hidden is not None
        self._columns[row] = (
            sampling.temperature,
            sampling.top_p,
            sampling.top_k,
            sampling.min_p,
            sampling.repetition_penalty,
            sampling.frequency_penalty,
            sampling.presence_penalty,
            seed & ((1 << 64) - 1),
            num_prompt,
            sampling.min_new_tokens,
            logprobs.top if logprobs is not None and wants_output_logprobs else 0,
            wants_output_logprobs,
            sampling.greedy,
            sampling.needs_history,
            sampling.grammar is not None,
            sampling.greedy and not (sampling.needs_history or sampling.grammar is not None or wants_more),
        )
        if sampling.min_new_tokens:
            self._bans[row] = tuple(sorted({*self._eos, *sampling.stop_token_ids}))
        if sampling.logit_bias:
            self._biases[row] = sampling.logit_bias
        if sampling.processor is not None:
            self._processors[row] = ProcessorCall(sampling.processor.name, json.loads(sampling.processor.params))
        if logprobs is not None and wants_output_logprobs and logprobs.token_ids:
            self._picks[row] = logprobs.token_ids
        if logprobs is not None and logprobs.prompt_from is not None:
            self.prompt_logprob_params[row] = (num_prompt, logprobs)
        if hidden is not None:
            self.hidden_params[row] = hidden

    @property
    def num_prompt(self) -> IntArray:
        """Prompt tokens of every row, int64 `[num_rows]`."""
        return self._columns["num_prompt"]

    def clear(self, row: int) -> None:
        """Clear `row`, whose request has left."""
        self._picked = b"", self._columns[:0], False
        self._bans.pop(row, None)
        self._biases.pop(row, None)
        self._picks.pop(row, None)
        self._processors.pop(row, None)
        self.prompt_logprob_params.pop(row, None)
        self.hidden_params.pop(row, None)

    def pick(self, table_rows: IntArray, positions: IntArray) -> StepParams:
        """Return the parameters of table rows `table_rows`, which sample the tokens at `positions`."""
        key = table_rows.tobytes()
        if key != self._picked[0]:
            columns = self._columns[table_rows]
            self._picked = key, columns, bool(columns["plain"].all())
        _, columns, plain = self._picked
        bans, biases = {}, {}
        if self._bans:
            early = positions - columns["num_prompt"] < columns["min_new"]
            banned = ((int(i), int(table_rows[i])) for i in np.flatnonzero(early))
            bans = {i: self._bans[row] for i, row in banned if row in self._bans}
        if self._biases:
            biases = {i: self._biases[int(row)] for i, row in enumerate(table_rows) if int(row) in self._biases}
        picks = {}
        if self._picks:
            picks = {i: self._picks[int(row)] for i, row in enumerate(table_rows) if int(row) in self._picks}
        calls = {}
        if self._processors:
            calls = {i: self._processors[int(row)] for i, row in enumerate(table_rows) if int(row) in self._processors}
        is_plain = plain and not bans and not biases
        return StepParams(columns, table_rows, positions, bans, biases, picks, is_plain, calls)


class InputEmbeds:
    """Input embeddings of the open rows that have some."""

    def __init__(self) -> None:
        self._rows: dict[int, HiddenArray] = {}

    def __bool__(self) -> bool:
        return bool(self._rows)

    def open_row(self, row: int, values: HiddenArray) -> None:
        """Give table row `row` the embeddings of its first tokens, float32 `[tokens, hidden_size]`."""
        self._rows[row] = values

    def close_row(self, row: int) -> None:
        """Drop those of a row, which may have none."""
        self._rows.pop(row, None)

    def into(self, batch: HostBatch) -> HostBatch:
        """Return `batch` with the embeddings of its tokens that have some."""
        flat, values = [], []
        for row, table_row in enumerate(batch.table_rows.tolist()):
            own = self._rows.get(table_row)
            begin, end = int(batch.rows.starts[row]), int(batch.rows.ends[row])
            if own is not None and begin < len(own):
                end = min(end, len(own))
                flat.append(np.arange(end - begin) + int(batch.rows.offsets[row]))
                values.append(own[begin:end])
        if not flat:
            return batch
        return dataclasses.replace(batch, embeds=(np.concatenate(flat), np.concatenate(values)))


@dataclasses.dataclass(frozen=True)
class _Late:
    """Tokens that a later pipeline stage has yet to sample, and the rows they belong to."""

    params: StepParams
    token_ids: Tensor
    arrival: Arrival


class TokenPool:
    """Known tokens of all rows: `tensor` int32 `[num_rows, width]`.

    The tokens of at most `num_late` steps are under way from a later pipeline stage.
    """

    def __init__(self, num_rows: int, width: int, num_late: int, device: torch.device) -> None:
        self.tensor = torch.zeros(num_rows, width, dtype=torch.int32, device=device)
        self._host = self.tensor.numpy() if device.type == "cpu" else None
        self._num_late = num_late
        self._late: deque[_Late] = deque()

    def begin(self, rows: Iterable[int], writes: Mapping[int, IntArray]) -> None:
        """Prepare a step that reads `rows`; `writes` are the known tokens of newly opened rows."""
        if self._late:
            self._take({*rows, *writes})
        for row, ids in writes.items():
            self.tensor[row, : len(ids)] = to_device(ids, self.tensor.device)

    def put(self, params: StepParams, token_ids: Tensor) -> None:
        """Write the sampled `token_ids`, int64 `[S]` on the device, into the rows of `params`.

        A row with drafts gets all tokens that it sampled. Those behind the first that is no accepted draft are
        overwritten by the row's next step.
        """
        if self._host is not None:  # see `build_batch`
            self._host[params.table_rows, params.positions] = token_ids.numpy()
            return
        where = to_device(np.stack((params.table_rows, params.positions)), self.tensor.device)
        self.tensor.index_put_((where[0], where[1]), token_ids.int())

    def put_drafts(self, table_rows: IntArray, positions: IntArray, token_ids: IntArray) -> None:
        """Write the drafts of a step, int64 `[D]` each, before the step reads its tokens."""
        assert positions.max() < self.tensor.shape[1] - 1, "the token behind the drafts has its place"
        if self._host is not None:
            self._host[table_rows, positions] = token_ids
            return
        on_device = to_device(np.stack((table_rows, positions, token_ids)), self.tensor.device)
        self.tensor.index_put_((on_device[0], on_device[1]), on_device[2].int())

    def put_later(self, params: StepParams, token_ids: Tensor, arrival: Arrival) -> None:
        """As `put`, once `arrival` has completed: before the next step with one of these rows."""
        self._late.append(_Late(params, token_ids, arrival))

    def _take(self, rows: set[int]) -> None:
        """Put the late tokens of `rows` and all earlier ones, and the oldest beyond `num_late`."""
        wanted = [i for i, late in enumerate(self._late) if not rows.isdisjoint(late.params.table_rows.tolist())]
        num_left = min(len(self._late) - 1 - max(wanted, default=-1), self._num_late)
        while len(self._late) > num_left:
            late = self._late.popleft()
            late.arrival.wait()
            self.put(late.params, late.token_ids)


@dataclasses.dataclass(frozen=True)
class HostBatch:
    """A plan and its page-table entries at the launch, on the host; all arrays int64.

    `columns` `[4, N]`: table row, position, page, and slot in the page of each token. `sampled` `[S]`: the plan row of
    each sampled token, in order; `sample_index` `[S]`: flat index of the token before it. A row with k drafts samples
    1 + k tokens, others the one behind their last. `table_rows` `[R]`: table row of each plan row. `embeds`: flat
    indices `[M]` of the tokens with input embeddings, and these, float32 `[M, hidden_size]`.
    """

    columns: IntArray
    sampled: IntArray
    sample_index: IntArray
    table_rows: IntArray
    rows: HostRows
    embeds: tuple[IntArray, HiddenArray] | None = None


def cut_plan(plan: BatchPlan, num_stages: int, min_tokens: int) -> tuple[BatchPlan, ...]:
    """Cut a step into up to `num_stages` micro-batches of about equal tokens, none below `min_tokens`.

    A row may be cut too: the KV of its first tokens is written before the rest is computed. Rows with drafts stay
    whole.
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
        if row.drafts:
            parts[current].append(row)
            done += row.num_tokens
            while current + 1 < count and done >= bounds[current]:
                current += 1
            continue
        while start < row.end:
            end = min(row.end, start + bounds[current] - done)
            parts[current].append(BatchRow(row.rid, row.row, start, end, row.sample and end == row.end))
            done += end - start
            start = end
            if done == bounds[current]:
                current += 1
    return tuple(BatchPlan(plan.step, tuple(part)) for part in parts if part)


def read_plan(plan: BatchPlan, table: PageTable, prompts: IntArray, layout: KVLayout) -> HostBatch:
    """Flatten `plan`. `prompts` int64 `[table rows]`: prompt tokens of each row.

    The result is a copy: the page table and the rows may change as soon as this returns.
    """
    facts = np.array([(row.row, row.start, row.end) for row in plan.rows]).T.copy()
    table_rows, starts, ends = facts
    longest = layout.pages_for(max(row.end for row in plan.rows))
    num_drafts: IntArray | None = None
    if all(row.sample and row.end - row.start == 1 for row in plan.rows):
        # fast path for decode steps, which are most steps: one token a row
        columns = np.empty((4, len(table_rows)), dtype=np.int64)
        columns[:2] = facts[:2]
        every = np.arange(len(table_rows))
        offsets = sampled = sample_index = every
    else:
        lengths = ends - starts
        assert lengths.min() > 0, "each row has tokens"
        total = int(lengths.sum())
        columns = np.empty((4, total), dtype=np.int64)
        offsets = lengths.cumsum() - lengths
        columns[0], columns[1] = table_rows.repeat(lengths), np.arange(total) - (offsets - starts).repeat(lengths)
        sampled = np.array([row.sample for row in plan.rows]).nonzero()[0]
        sample_index = (offsets + lengths - 1)[sampled]
        if any(row.drafts for row in plan.rows):
            num_drafts = np.array([len(row.drafts) for row in plan.rows], dtype=np.int64)
            counts = 1 + num_drafts[sampled]
            behind = counts.cumsum().repeat(counts) - 1 - np.arange(int(counts.sum()))
            sampled, sample_index = sampled.repeat(counts), sample_index.repeat(counts) - behind
    index, columns[3] = layout.page_and_slot(columns[1])
    columns[2] = table.pages[columns[0], index]
    rows = HostRows(
        starts, ends, offsets, prompts[table_rows], table.pages[table_rows, :longest], num_drafts=num_drafts
    )
    if layout.window or layout.has_state:
        window = table.window[table_rows, :longest] if layout.window else None
        rows = dataclasses.replace(rows, window=window, slots=table.slots[table_rows])
    return HostBatch(columns, sampled, sample_index, table_rows, rows)


def sampled_rows(batches: Sequence[HostBatch]) -> tuple[IntArray, IntArray]:
    """Return the table row and the position of all sampled tokens, int64 `[S]` each."""
    table_rows = [batch.table_rows[batch.sampled] for batch in batches]
    positions = [batch.columns[1][batch.sample_index] + 1 for batch in batches]
    if len(batches) == 1:
        return table_rows[0], positions[0]
    return np.concatenate(table_rows), np.concatenate(positions)


def build_batch(host: HostBatch, tokens: Tensor) -> ForwardBatch:
    """Build the tensors of a step. `tokens` int32 `[num_table_rows, context]`: known tokens, on the device."""
    device = tokens.device
    if device.type == "cpu":  # for a few tokens torch's indexing takes several times as long as numpy's
        numbers = host.columns.copy()
        numbers[0] = tokens.numpy()[numbers[0], numbers[1]]
        columns = torch.from_numpy(numbers)
    else:
        columns = to_device(host.columns, device)
        columns[0] = tokens[columns[0], columns[1]]
    embeds = None if host.embeds is None else TokenEmbeds(*(to_device(array, device) for array in host.embeds))
    return ForwardBatch(columns, to_device(host.sample_index, device), host.rows, embeds)
