"""A model for simulations: its next token is a hash of every KV byte that attention would read.

Any wrong, missing, stale or swapped byte changes the tokens. "The same tokens as the monolith" is therefore an oracle
for all code between the pools. Hash weights depend on the position, so that order matters too.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pdserve.base.parallel import SINGLE, ParallelShape
from pdserve.executor.interface import BatchPlan, BatchRow, HostPages, SampledToken, StepHandle, StepResult
from pdserve.memory.kv_memory import PageTable
from pdserve.memory.layer_events import ALL_WRITTEN, CountedLayerEvents, LayerEvents
from pdserve.memory.layout import KVLayout, attention_group
from pdserve.protocol.logprobs import Logprobs, PromptLogprobs
from pdserve.protocol.sampling import CoreSamplingParams
from pdserve.transfer.checksum import RankDigest, digest_group
from pdserve.transfer.plan import RankShard

VOCAB_SIZE = 50257
POISON = np.uint64(0xDEADDEADDEADDEAD)
_MAX_TOKENS = 4096

U64 = npt.NDArray[np.uint64]

_rng = np.random.default_rng(20250101)
_WEIGHTS: U64 = _rng.integers(1, 1 << 63, size=(2, _MAX_TOKENS), dtype=np.uint64) | np.uint64(1)


def hash_layout(page_tokens: int, num_layers: int = 3, num_heads: int = 1) -> KVLayout:
    """Return the KV layout of the hash model: heads of one 64-bit number."""
    group = attention_group(
        num_layers=num_layers, page_tokens=page_tokens, num_kv_heads=num_heads, head_dim=1, dtype="uint64"
    )
    return KVLayout((group,))


def _mix(value: int) -> int:
    """Apply splitmix64's finalizer."""
    value = (value + 0x9E3779B97F4A7C15) & ((1 << 64) - 1)
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & ((1 << 64) - 1)
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & ((1 << 64) - 1)
    return value ^ (value >> 31)


class HashExecutor:
    """Implements `Executor` over a numpy pool `[page, layer, k/v, head, token, 1]` of uint64 for each rank.

    `layout` is the whole model's. The executor computes for all ranks of a replica; `buffers` is the first rank's.
    """

    def __init__(
        self, layout: KVLayout, num_pages: int, page_table: PageTable, shape: ParallelShape = SINGLE.shape
    ) -> None:
        self._layout = layout
        self._group = layout.groups[0]
        coords = [shape.coord(rank) for rank in range(shape.num_ranks)]
        self.windows = [RankShard.of(self._group, coord) for coord in coords]
        self.pools: list[U64] = [
            np.full((num_pages, *self._group.of_rank(coord).page_shape), POISON, dtype=np.uint64) for coord in coords
        ]
        self.pool = self.pools[0]
        self._held: dict[tuple[int, int], list[tuple[U64, int, int]]] = {}
        """By model layer and head: every pool that holds it, with the layer and head index in that pool."""
        for coord, pool in zip(coords, self.pools, strict=True):
            layers, heads = self._group.layers_of(coord), self._group.heads_of(coord)[0]
            for (index, layer), head in itertools.product(enumerate(layers), heads):
                entry = (pool, index, head - heads.start)
                self._held.setdefault((layer, head), []).append(entry)
        self._table = page_table
        self._tokens: dict[int, list[int]] = {}
        self._logprob_params: dict[int, tuple[int, Logprobs]] = {}
        """By row that requests log probabilities: number of prompt tokens, and the request's `Logprobs`."""
        self.late = False
        self._last_step = 0
        """The newest computed step."""
        self._layer_events: dict[int, CountedLayerEvents] = {}
        """Of steps that are not computed."""

    @property
    def layout(self) -> KVLayout:
        """See `Executor`."""
        return self._layout

    @property
    def buffers(self) -> tuple[tuple[int, int], ...]:
        """See `Executor`."""
        return ((int(self.pool.ctypes.data), self.pool.nbytes),)

    def events_of(self, step: int) -> LayerEvents:
        """Return the layer events of `step`: of all layers at once, because rows are computed token by token."""
        if step <= self._last_step:
            return ALL_WRITTEN
        return self._layer_events.setdefault(step, CountedLayerEvents(range(1)))

    def computed(self, step: int) -> None:
        """Record that `step` is computed."""
        self._last_step = step
        events = self._layer_events.pop(step, None)
        if events is not None:
            events.on_layer(0)

    def poison(self, pages: list[int]) -> None:
        """Overwrite freed pages, so that a read after free changes the tokens."""
        for pool in self.pools:
            pool[pages] = POISON

    def open_row(
        self,
        row: int,
        token_ids: Sequence[int],
        num_prompt_tokens: int,
        sampling: CoreSamplingParams,
        logprobs: Logprobs | None,
    ) -> None:
        """See `Executor`."""
        self._tokens[row] = list(token_ids)
        if logprobs is not None:
            self._logprob_params[row] = (num_prompt_tokens, logprobs)

    def close_row(self, row: int) -> None:
        """See `Executor`."""
        del self._tokens[row]
        self._logprob_params.pop(row, None)

    def launch(self, plan: BatchPlan, *, layer_events: bool = False) -> StepHandle:
        """See `Executor`.

        A `late` executor computes in `resolve`, from a copy of the page table made at launch.
        """
        step = _Step(self, plan, {row.row: self._table.pages[row.row].copy() for row in plan.rows})
        if not self.late:
            step.result()
        return StepHandle(plan, self.events_of(plan.step) if layer_events else None, step.result)

    def resolve(self, handle: StepHandle) -> StepResult:
        """See `Executor`."""
        return handle.finish()

    def offload(self, pages: Sequence[int]) -> HostPages:
        """See `Executor`."""
        return _Saved([pool[list(pages)].copy() for pool in self.pools])

    def restore(self, saved: HostPages, pages: Sequence[int]) -> None:
        """See `Executor`."""
        assert isinstance(saved, _Saved)
        for pool, content in zip(self.pools, saved.contents, strict=True):
            pool[list(pages)] = content

    def zero(self, pages: Sequence[int]) -> None:
        """See `Executor`."""
        for pool in self.pools:
            pool[list(pages)] = 0

    def compute(self, row: BatchRow, pages: npt.NDArray[np.int32]) -> tuple[SampledToken | None, PromptLogprobs | None]:
        """Compute one row of a step. `pages` is the row's page-table line at launch."""
        tokens = self._tokens[row.row]
        told: dict[int, int] = {}
        num_prompt, logprob_params = self._logprob_params.get(row.row, (0, None))
        first = None if logprob_params is None else logprob_params.prompt_from
        last = 0
        for position in range(row.start, row.end):
            carry = _mix(tokens[position] * 1_000_003 + position)
            index, offset = self._group.page_and_slot(position)
            page, num_pages = int(pages[index]), index + 1
            for layer in range(self._group.num_layers):
                total = layer
                for head in range(self._group.num_kv_heads):
                    sums = set()
                    for pool, own_layer, own_head in self._held[layer, head]:
                        pool[page, own_layer, 0, own_head, offset, 0] = _mix(carry ^ head) if head else carry
                        pool[page, own_layer, 1, own_head, offset, 0] = _mix(carry ^ 0x5555 ^ head)
                        kv = pool[pages[:num_pages], own_layer, :, own_head, :, 0].swapaxes(0, 1)
                        kv = kv.reshape(2, -1)[:, : position + 1]
                        sums.add(int((kv * _WEIGHTS[:, : position + 1]).sum(dtype=np.uint64)))
                    total = total * 3 + sum(sums)  # ranks that hold the same head count once if they agree
                carry = _mix(total)
            last = carry
            if first is not None and first <= position < num_prompt - 1:
                told[position + 1] = _mix(carry ^ tokens[position + 1])
        part = _told(told, logprob_params) if told and logprob_params is not None else None
        if not row.sample:
            return None, part
        token = last % VOCAB_SIZE
        del tokens[row.end :]
        tokens.append(token)
        return SampledToken(token, picked=tuple(-float(token % (i + 2)) for i in _picks(logprob_params))), part


def _picks(logprob_params: Logprobs | None) -> tuple[int, ...]:
    return () if logprob_params is None else logprob_params.token_ids


def _told(hashes: dict[int, int], logprob_params: Logprobs) -> PromptLogprobs:
    """Make up log probabilities of the tokens at consecutive positions, the keys of `hashes`."""
    own = np.array([-(value % 4096) / 64 for value in hashes.values()], dtype=np.float32)
    top = np.repeat(own[:, None], logprob_params.top, 1)
    picked = np.repeat(own[:, None], len(logprob_params.token_ids), 1)
    ids = np.zeros(top.shape, dtype=np.int32)
    return PromptLogprobs.pack(min(hashes), own, np.ones(len(own), dtype=np.int32), ids, top, picked)


class _Step:
    """A launched step."""

    def __init__(self, executor: HashExecutor, plan: BatchPlan, tables: dict[int, npt.NDArray[np.int32]]) -> None:
        self._executor, self._plan, self._tables = executor, plan, tables
        self._result: StepResult | None = None

    def result(self) -> StepResult:
        """Compute the step once."""
        if self._result is None:
            found = [self._executor.compute(row, self._tables[row.row]) for row in self._plan.rows]
            self._executor.computed(self._plan.step)
            prompts = {index: part for index, (_, part) in enumerate(found) if part is not None}
            self._result = StepResult(self._plan.step, tuple(token for token, _ in found), prompts)
        return self._result


@dataclasses.dataclass(frozen=True)
class _Saved:
    """Implements `HostPages`."""

    contents: list[U64]

    @property
    def num_bytes(self) -> int:
        """See `HostPages`."""
        return sum(content.nbytes for content in self.contents)


class HashHasher:
    """Implements `KVHasher` over the pools of a `HashExecutor`."""

    def __init__(self, executor: HashExecutor) -> None:
        self._executor = executor

    def digest(self, pages: Sequence[int], first: int, num_tokens: int) -> tuple[RankDigest, ...]:
        """See `KVHasher`."""
        digests = []
        for rank, (window, pool) in enumerate(zip(self._executor.windows, self._executor.pools, strict=True)):
            rows = pool[list(pages)].reshape(len(pages), -1).view(np.uint8)
            digests.append(RankDigest(rank, (digest_group(window, [rows], first, num_tokens),)))
        return tuple(digests)
