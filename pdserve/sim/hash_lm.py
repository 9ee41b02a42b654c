"""A model for simulations: its next token is a hash of every KV byte that attention would read.

Any wrong, missing, stale or swapped byte changes the tokens. "The same tokens as the monolith" is therefore an oracle
for all code between the pools. Hash weights depend on the position, so that order matters too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from pdserve.base.parallel import SINGLE, ParallelShape
from pdserve.executor.interface import BatchPlan, BatchRow, HostPages, SampledToken, StepHandle, StepResult
from pdserve.memory.kv_memory import PageTable
from pdserve.memory.layer_events import ALL_WRITTEN, CountedLayerEvents, LayerEvents
from pdserve.memory.layout import GroupKind, KVGroup, KVLayout, PageSpace, Plane, Shard, attention_group
from pdserve.memory.slot_stamp import SlotStamp
from pdserve.protocol.logprobs import Logprobs, PromptLogprobs
from pdserve.protocol.sampling import CoreSamplingParams
from pdserve.transfer.checksum import GroupDigest, RankDigest, digest_group
from pdserve.transfer.plan import RankShard

VOCAB_SIZE = 50257
POISON = np.uint64(0xDEADDEADDEADDEAD)
_MAX_TOKENS = 4096

CONV_COLUMNS = 2
"""Earlier positions that a recurrent layer remembers one by one."""
VALUES_PER_KEY = 2
"""State heads of a recurrent layer that share one head of its convolution."""

U64 = npt.NDArray[np.uint64]

_rng = np.random.default_rng(20250101)
_WEIGHTS: U64 = _rng.integers(1, 1 << 63, size=(2, _MAX_TOKENS), dtype=np.uint64) | np.uint64(1)


def hash_layout(
    page_tokens: int, num_layers: int = 3, num_heads: int = 1, window: int = 0, *, has_state: bool = False
) -> KVLayout:
    """Return the KV layout of the hash model: heads of one 64-bit number.

    With `window` the model is a hybrid: its layers are full attention, attention over `window` tokens, and a recurrent
    state, in turn. With `has_state` and no window they are full attention and a recurrent state, in turn.
    """

    def attention(layers: Sequence[int], kind: GroupKind, window: int | None = None) -> KVGroup:
        return attention_group(
            kind=kind,
            num_layers=num_layers,
            layers=layers,
            page_tokens=page_tokens,
            num_kv_heads=num_heads,
            head_dim=1,
            dtype="uint64",
            window=window,
        )

    if not window and not has_state:
        return KVLayout((attention(range(num_layers), GroupKind.FULL),))
    assert num_layers >= 3, "a layer of each kind"
    kinds = 3 if window else 2
    state = KVGroup(
        name="state",
        kind=GroupKind.STATE,
        layers=tuple(range(kinds - 1, num_layers, kinds)),
        num_model_layers=num_layers,
        page_tokens=0,
        planes=(
            _state_plane("conv", num_heads, CONV_COLUMNS, Shard.KEY_HEAD),
            _state_plane("state", VALUES_PER_KEY * num_heads, 1, Shard.VALUE_HEAD),
        ),
    )
    full = attention(range(0, num_layers, kinds), GroupKind.FULL)
    if not window:
        return KVLayout((full, state)).with_stamps()
    return KVLayout((full, attention(range(1, num_layers, 3), GroupKind.WINDOW, window), state)).with_stamps()


def _state_plane(name: str, num_heads: int, width: int, shard: Shard) -> Plane:
    return Plane(
        name=name, num_heads=num_heads, num_heads_total=num_heads, rows=1, width=width, dtype="uint64", shard=shard
    )


def _mix(value: int) -> int:
    """Apply splitmix64's finalizer."""
    value = (value + 0x9E3779B97F4A7C15) & ((1 << 64) - 1)
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & ((1 << 64) - 1)
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & ((1 << 64) - 1)
    return value ^ (value >> 31)


@dataclasses.dataclass(frozen=True)
class RowPages:
    """A row's page numbers: `pages` of tokens, `window` of the WINDOW group, and its state slot."""

    pages: npt.NDArray[np.int32]
    window: npt.NDArray[np.int32]
    slot: int


@dataclasses.dataclass(frozen=True)
class _Layer:
    """A layer of the model: its group, and by plane and head every view `[page, row * width]` of a pool that holds it.

    `attended`: by head, views `[page, k/v, token]`; empty for recurrent layers.
    """

    group: KVGroup
    planes: tuple[tuple[list[U64], ...], ...]
    attended: tuple[list[U64], ...]


class HashExecutor:
    """Implements `Executor` over numpy pools of uint64, one for each rank and group: `[page, layer, word]`.

    `layout` is the whole model's. The executor computes for all ranks of a replica; `buffers` are the first rank's.
    `num_pages`: pages of each group's pool; an int: of the token groups, when the model has no others.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_pages: int | Mapping[PageSpace, int],
        page_table: PageTable,
        shape: ParallelShape = SINGLE.shape,
    ) -> None:
        self._layout = layout
        sizes = {PageSpace.TOKENS: num_pages} if isinstance(num_pages, int) else num_pages
        coords = [shape.coord(rank) for rank in range(shape.num_ranks)]
        self.windows = [[RankShard.of(group, coord) for group in layout.groups] for coord in coords]
        self.pools: list[list[U64]] = [
            [
                np.full((sizes[own.group.space], own.group.num_layers, own.group.layer_bytes // 8), POISON)
                for own in shards
            ]
            for shards in self.windows
        ]
        """By rank and group."""
        self._layers = [self._layer(layer) for layer in range(layout.num_layers)]
        self._table = page_table
        self._tokens: dict[int, list[int]] = {}
        self._stamped: dict[int, tuple[int, int]] = {}
        """By row: the request's number in stamps, and the tokens that were known when the row was opened."""
        self._logprob_params: dict[int, tuple[int, Logprobs]] = {}
        """By row that requests log probabilities: number of prompt tokens, and the request's `Logprobs`."""
        self.late = False
        self._last_step = 0
        """The newest computed step."""
        self._layer_events: dict[int, CountedLayerEvents] = {}
        """Of steps that are not computed."""

    def _layer(self, layer: int) -> _Layer:
        index, group = next((i, group) for i, group in enumerate(self._layout.groups) if layer in group.layers)
        heads = [plane.num_heads for plane in group.planes]
        planes: list[list[list[U64]]] = [[[] for _ in range(count)] for count in heads]
        attended: list[list[U64]] = [[] for _ in range(heads[0])]
        for shards, pools in zip(self.windows, self.pools, strict=True):
            shard = shards[index]
            if layer not in shard.layers:
                continue
            words = pools[index][:, shard.layers.index(layer)]
            for number, (plane, offset) in enumerate(zip(shard.group.planes, shard.group.plane_offsets, strict=True)):
                size = plane.head_bytes // 8
                for own, head in enumerate(shard.heads[number]):
                    start = offset // 8 + own * size
                    planes[number][head].append(words[:, start : start + size])
            if group.space is not PageSpace.SLOTS:
                tokens = words.reshape(len(words), shard.group.num_planes, shard.group.num_kv_heads, group.page_tokens)
                for own, head in enumerate(shard.heads[0]):
                    attended[head].append(tokens[:, :, own])
        return _Layer(group, tuple(map(tuple, planes)), tuple(attended))

    @property
    def layout(self) -> KVLayout:
        """See `Executor`."""
        return self._layout

    @property
    def buffers(self) -> tuple[tuple[int, int], ...]:
        """See `Executor`."""
        return self.buffers_of(0)

    def buffers_of(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Return `(address, bytes)` of each pool of a rank."""
        return tuple((int(pool.ctypes.data), pool.nbytes) for pool in self.pools[rank])

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

    def poison(self, pages: list[int], space: PageSpace = PageSpace.TOKENS) -> None:
        """Overwrite freed pages, so that a read after free changes the tokens."""
        for group, pool in self._all_pools():
            if group.space is space:
                pool[pages] = POISON

    def _all_pools(self) -> Iterator[tuple[KVGroup, U64]]:
        for pools in self.pools:
            yield from zip(self._layout.groups, pools, strict=True)

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
        self._stamped[row] = SlotStamp.of(token_ids[:num_prompt_tokens], 0).request, len(token_ids)
        if logprobs is not None:
            self._logprob_params[row] = (num_prompt_tokens, logprobs)

    def close_row(self, row: int) -> None:
        """See `Executor`."""
        del self._tokens[row], self._stamped[row]
        self._logprob_params.pop(row, None)

    def launch(self, plan: BatchPlan, *, layer_events: bool = False) -> StepHandle:
        """See `Executor`.

        A `late` executor computes in `resolve`, from a copy of the page table made at launch.
        """
        step = _Step(self, plan, {row.row: self._row_pages(row.row) for row in plan.rows})
        if not self.late:
            step.result()
        return StepHandle(plan, self.events_of(plan.step) if layer_events else None, step.result)

    def resolve(self, handle: StepHandle) -> StepResult:
        """See `Executor`."""
        return handle.finish()

    def offload(self, pages: Sequence[Sequence[int]]) -> HostPages:
        """See `Executor`."""
        return _Saved([pool[list(own)].copy() for pools in self.pools for pool, own in zip(pools, pages, strict=True)])

    def restore(self, saved: HostPages, pages: Sequence[Sequence[int]]) -> None:
        """See `Executor`."""
        assert isinstance(saved, _Saved)
        contents = iter(saved.contents)
        for pools in self.pools:
            for pool, own in zip(pools, pages, strict=True):
                pool[list(own)] = next(contents)

    def zero(self, pages: Sequence[Sequence[int]]) -> None:
        """See `Executor`."""
        for pools in self.pools:
            for pool, own in zip(pools, pages, strict=True):
                pool[list(own)] = 0

    def has_stamp(self, slot: int, stamp: SlotStamp) -> bool:
        """See `Executor`; compares the stamps of all ranks."""
        index = self._layout.stamp_group
        return index is None or all(stamp.fills(pools[index][slot].tobytes()) for pools in self.pools)

    def _copy_slot(self, source: int, target: int) -> None:
        for pool in self._slot_pools():
            pool[target] = pool[source]

    def _slot_pools(self) -> list[U64]:
        return [pool for group, pool in self._all_pools() if group.space is PageSpace.SLOTS]

    def _stamp(self, row: BatchRow, slot: int) -> None:
        """Write the stamp of a row that computes known tokens."""
        index = self._layout.stamp_group
        request, num_known = self._stamped[row.row]
        if index is not None and row.end <= num_known:
            for pools in self.pools:
                pools[index][slot] = SlotStamp(request, row.end).words

    def _row_pages(self, row: int) -> RowPages:
        table = self._table
        return RowPages(table.pages[row].copy(), table.window[row].copy(), int(table.slots[row]))

    def compute(self, row: BatchRow, pages: RowPages) -> tuple[SampledToken | None, PromptLogprobs | None]:
        """Compute one row of a step. `pages` are the row's at launch."""
        tokens = self._tokens[row.row]
        if row.state_from >= 0:
            self._copy_slot(row.state_from, pages.slot)
        self._stamp(row, pages.slot)
        told: dict[int, int] = {}
        num_prompt, logprob_params = self._logprob_params.get(row.row, (0, None))
        first = None if logprob_params is None else logprob_params.prompt_from
        last = 0
        for position in range(row.start, row.end):
            carry = _mix(tokens[position] * 1_000_003 + position)
            for number, layer in enumerate(self._layers):
                match layer.group.space:
                    case PageSpace.TOKENS:
                        total = _attend(layer, pages.pages, position, carry, 0)
                    case PageSpace.WINDOW:
                        total = _attend(layer, pages.window, position, carry, position + 1 - (layer.group.window or 0))
                    case PageSpace.SLOTS:
                        total = _recur(layer, pages.slot, position, carry)
                carry = _mix(total + number * 3 ** len(layer.planes[0]))
            last = carry
            if row.state_to >= 0 and position == row.end - 1:
                self._copy_slot(pages.slot, row.state_to)
            if first is not None and first <= position < num_prompt - 1:
                told[position + 1] = _mix(carry ^ tokens[position + 1])
        part = _told(told, logprob_params) if told and logprob_params is not None else None
        if not row.sample:
            return None, part
        token = last % VOCAB_SIZE
        del tokens[row.end :]
        tokens.append(token)
        return SampledToken(token, picked=tuple(-float(token % (i + 2)) for i in _picks(logprob_params))), part


def _attend(layer: _Layer, pages: npt.NDArray[np.int32], position: int, carry: int, first: int) -> int:
    """Write K and V of `position`, and return a number made of those of positions `[first, position]`."""
    group = layer.group
    index, offset = group.page_and_slot(position)
    first_page = max(0, first) // group.page_tokens
    first_read = max(0, first) - first_page * group.page_tokens
    used = pages[first_page : index + 1]
    total = 0
    for head, views in enumerate(layer.attended):
        sums = set()
        for view in views:
            view[pages[index], 0, offset] = _mix(carry ^ head) if head else carry
            view[pages[index], 1, offset] = _mix(carry ^ 0x5555 ^ head)
            kv = view[used].swapaxes(0, 1).reshape(2, -1)
            kv = kv[:, first_read : position + 1 - first_page * group.page_tokens]
            sums.add(int((kv * _WEIGHTS[:, max(0, first) : position + 1]).sum(dtype=np.uint64)))
        total = total * 3 + sum(sums)  # ranks that hold the same head count once if they agree
    return total


def _recur(layer: _Layer, slot: int, position: int, carry: int) -> int:
    """Update the state of a request by `position`, and return a number made of it. The first position reads no state.

    The convolution remembers the last `CONV_COLUMNS` positions, the state all of them.
    """
    convolutions, states = layer.planes
    total = 0
    columns: list[int] = []
    for head, views in enumerate(convolutions):
        sums = set()
        for view in views:
            before = [int(value) for value in view[slot]] if position else [0] * CONV_COLUMNS
            sums.add(sum(value * (2 * i + 3) for i, value in enumerate(before)))
            view[slot] = [*before[1:], _mix(carry ^ 0x3333 ^ head)]
        columns.append(sum(sums))
    for head, views in enumerate(states):
        sums = set()
        for view in views:
            before_state = int(view[slot, 0]) if position else 0
            state = _mix(before_state * 5 + carry + columns[head // VALUES_PER_KEY] + head)
            view[slot, 0] = state
            sums.add(state)
        total = total * 3 + sum(sums)
    return total


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

    def __init__(self, executor: HashExecutor, plan: BatchPlan, tables: dict[int, RowPages]) -> None:
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

    def digest(self, pages: Sequence[Sequence[int]], firsts: Sequence[int], num_tokens: int) -> tuple[RankDigest, ...]:
        """See `KVHasher`."""
        digests = []
        for rank, (windows, pools) in enumerate(zip(self._executor.windows, self._executor.pools, strict=True)):
            groups: list[GroupDigest] = []
            for window, pool, own, first in zip(windows, pools, pages, firsts, strict=True):
                rows = pool[list(own)].reshape(len(own), window.group.page_bytes // 8).view(np.uint8)
                groups += digest_group(window, [rows], first, num_tokens)
            digests.append(RankDigest(rank, tuple(groups)))
        return tuple(digests)
