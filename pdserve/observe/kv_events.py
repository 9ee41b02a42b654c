"""KV events: what the prefix cache holds, as numbered batches in the wire forms of vLLM and SGLang.

`KVEventStream` keeps a copy of the cache's content, from which it makes events, snapshots and replays. It does not
touch the cache. One thread uses it: see `kv_publisher`.
"""

from __future__ import annotations

import dataclasses
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from pdserve.config.kv_events_group import WireForm
from pdserve.memory.cache_recorder import (
    CacheAdapter,
    CacheChange,
    CacheCleared,
    GroupChanged,
    HostChanged,
    PagesRemoved,
    PagesStored,
    WeightsChanged,
)
from pdserve.memory.layout import GroupKind, KVLayout, PageSpace
from pdserve.memory.page_keys import KeyNamespace, short_hash
from pdserve.memory.prefix_cache import TOKEN_BYTES
from pdserve.observe.kv_keys import STATE_KIND, Group

MEDIUM, HOST_MEDIUM = "GPU", "CPU"
"""Medium of pages that steps read, and of the host tier; readers know these names, on a server without GPU as well."""
SNAPSHOT_BLOCKS = 1024
"""Blocks of a snapshot's batch."""
MAX_ROOTS = 1024
"""Most roots of adapters and cache salts that are kept; others are computed again."""
MAX_BUFFER_BYTES = 256 << 20
"""Most bytes of batches that are kept for replay."""
_KINDS = {
    GroupKind.FULL: "full_attention",
    GroupKind.WINDOW: "sliding_window",
    GroupKind.MLA: "mla_attention",
    GroupKind.STATE: STATE_KIND,
}


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    """Blocks that readers of a prompt can take from the cache, in token order; field names are vLLM's.

    `block_hashes`: signed 64-bit numbers. `parent_block_hash`: the block before the first one; None: the prompt begins
    there. `token_ids`: of all blocks, `block_size` for each. `group_idx`: number of the layout's group. `extra_keys`,
    by block: the adapter's name, and for the first block of a prompt its cache salt; None: neither.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True):
    """Blocks that have left the cache."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """The cache is empty."""


class ArrayBlockStored(BlockStored, array_like=True, tag="BlockStored"):
    """`BlockStored` as an array, for older readers."""


class ArrayBlockRemoved(BlockRemoved, array_like=True, tag="BlockRemoved"):
    """`BlockRemoved` as an array."""


class ArrayAllBlocksCleared(AllBlocksCleared, array_like=True, tag="AllBlocksCleared"):
    """`AllBlocksCleared` as an array."""


Event = BlockStored | BlockRemoved | AllBlocksCleared
_ARRAYS: Mapping[type[Any], type[Any]] = {
    BlockStored: ArrayBlockStored,
    BlockRemoved: ArrayBlockRemoved,
    AllBlocksCleared: ArrayAllBlocksCleared,
}


class EventBatch(msgspec.Struct, array_like=True):
    """The payload of a message. `ts`: seconds since 1970."""

    ts: float
    events: list[Any]
    data_parallel_rank: int


@dataclasses.dataclass(frozen=True, slots=True)
class Numbered:
    """A batch with its sequence number, as it is sent."""

    seq: int
    payload: bytes


@dataclasses.dataclass(slots=True)
class _Block:
    """A page of the tree. `parent`: hash of the page before, None at the root."""

    digest: bytes
    hash: int
    parent: int | None
    tokens: bytes
    adapter: CacheAdapter | None
    spaces: set[PageSpace]
    salt: str = ""

    @property
    def extra_keys(self) -> list[str] | None:
        """The entry of the block in `BlockStored.extra_keys`, which is vLLM's."""
        keys = [] if self.adapter is None else [self.adapter.name]
        return [*keys, self.salt] if self.salt and self.parent is None else keys or None


@dataclasses.dataclass(slots=True)
class _Tier:
    """The content of a tier: blocks by page of the device, or by slot of the host tier."""

    medium: str
    blocks: dict[int, _Block] = dataclasses.field(default_factory=dict)


def groups_of(layout: KVLayout) -> dict[PageSpace, Group]:
    """Return the group whose number events carry, for each space: the first of the layout in that space."""
    found: dict[PageSpace, Group] = {}
    for index, group in enumerate(layout.groups):
        kind = _KINDS.get(group.kind)
        if kind is not None:
            found.setdefault(group.space, Group(index, kind, group.window))
    return found


class KVEventStream:
    """Turns changes of a prefix cache into batches, which are numbered from 0 on.

    `groups`: see `groups_of`. `buffer_steps`: most batches that are kept for replay.
    """

    def __init__(
        self,
        namespace: KeyNamespace,
        groups: Mapping[PageSpace, Group],
        *,
        dp_rank: int = 0,
        wire_form: WireForm = "map",
        buffer_steps: int = 10_000,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._namespace, self._groups = namespace, groups
        self._dp_rank, self._wire_form, self._clock = dp_rank, wire_form, clock
        self._encoder = msgspec.msgpack.Encoder()
        self._device, self._host = _Tier(MEDIUM), _Tier(HOST_MEDIUM)
        self._roots: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        self._buffer: deque[Numbered] = deque()
        self._buffer_steps, self._buffer_bytes = buffer_steps, 0
        self.next_seq = 0
        """Number of the next batch."""

    @property
    def num_blocks(self) -> int:
        """Blocks of all tokens that the cache holds now."""
        return len(self._device.blocks)

    def apply(self, changes: Sequence[CacheChange]) -> list[Numbered]:
        """Return the batch that describes `changes`; none when there is nothing to tell."""
        events = [event for change in changes for event in self._events(change)]
        return [self._number(events)] if events else []

    def snapshot(self, *, cleared: bool = False) -> Iterator[Numbered]:
        """Yield batches that describe the present content, parents before their children; at least one.

        `cleared`, or an empty cache: an `AllBlocksCleared` comes first, so that readers forget what they had before.
        The iterator must be used up before other calls.
        """
        is_empty = not self._device.blocks and not self._host.blocks
        events: list[Event] = [AllBlocksCleared()] if cleared or is_empty else []
        num_blocks = 0
        for event in (*self._content(self._device), *self._content(self._host)):
            events.append(event)
            num_blocks += len(event.block_hashes)
            if num_blocks >= SNAPSHOT_BLOCKS:
                yield self._number(events)
                events, num_blocks = [], 0
        if events:
            yield self._number(events)

    def replay(self, start: int) -> list[Numbered] | None:
        """Return the batches from the number `start` on; None when they are not all kept, or not yet made."""
        oldest = self._buffer[0].seq if self._buffer else self.next_seq
        if not oldest <= start <= self.next_seq:
            return None
        return [batch for batch in self._buffer if batch.seq >= start]

    # ------------------------------------------------------------------ events

    def _events(self, change: CacheChange, tier: _Tier | None = None) -> Iterator[Event]:
        """Yield the events of a change of `tier`; None: of the device."""
        tier = tier or self._device
        match change:
            case WeightsChanged(namespace=namespace):
                assert isinstance(namespace, KeyNamespace)
                self._namespace = namespace
                self._roots.clear()
            case HostChanged(change=inner):
                yield from self._events(inner, self._host)
            case PagesStored():
                yield self._store(change, tier)
            case PagesRemoved(pages=pages):
                yield self._removed([tier.blocks.pop(page).hash for page in pages], PageSpace.TOKENS, tier)
            case CacheCleared() if tier is self._host:
                gone = [block.hash for block in tier.blocks.values()]
                tier.blocks.clear()
                if gone:
                    yield self._removed(gone, PageSpace.TOKENS, tier)
            case CacheCleared():
                tier.blocks.clear()
                yield AllBlocksCleared()
                yield from self._content(self._host)  # readers have forgotten it too
            case GroupChanged(space=space, page=page, stored=stored):
                block = tier.blocks[page]
                if stored:
                    block.spaces.add(space)
                    yield self._stored([block], space, tier)
                else:
                    block.spaces.discard(space)
                    yield self._removed([block.hash], space, tier)

    def _store(self, change: PagesStored, tier: _Tier) -> BlockStored:
        before = None if change.parent is None else tier.blocks[change.parent]
        digest = self._root(change.adapter, change.salt) if before is None else before.digest
        parent = None if before is None else before.hash
        size, blocks = self._namespace.page_tokens * TOKEN_BYTES, list[_Block]()
        digests = self._namespace.chain(digest, change.tokens)
        for index, (page, key) in enumerate(zip(change.pages, digests, strict=True)):
            tokens = change.tokens[index * size : (index + 1) * size]
            block = _Block(key, short_hash(key), parent, tokens, change.adapter, set(), change.salt)
            tier.blocks[page] = block
            blocks.append(block)
            parent = block.hash
        return self._stored(blocks, PageSpace.TOKENS, tier)

    def _root(self, adapter: CacheAdapter | None, salt: str) -> bytes:
        identity = "" if adapter is None else adapter.digest, salt
        if identity not in self._roots:
            self._roots[identity] = self._namespace.root(*identity)
            if len(self._roots) > MAX_ROOTS:
                self._roots.popitem(last=False)
        return self._roots[identity]

    def _content(self, tier: _Tier) -> Iterator[BlockStored]:
        """Yield the whole content of a tier. Blocks entered in an order in which parents come before their children."""
        run: list[_Block] = []
        for block in tier.blocks.values():
            if run and (
                block.parent != run[-1].hash or block.adapter != run[-1].adapter or len(run) >= SNAPSHOT_BLOCKS
            ):
                yield self._stored(run, PageSpace.TOKENS, tier)
                run = []
            run.append(block)
        if run:
            yield self._stored(run, PageSpace.TOKENS, tier)
        for block in tier.blocks.values():
            for space in block.spaces:
                yield self._stored([block], space, tier)

    def _stored(self, blocks: Sequence[_Block], space: PageSpace, tier: _Tier) -> BlockStored:
        group, adapter = self._groups[space], blocks[0].adapter
        tokens = b"".join(block.tokens for block in blocks)
        extra_keys = [block.extra_keys for block in blocks]
        return BlockStored(
            block_hashes=[block.hash for block in blocks],
            parent_block_hash=blocks[0].parent,
            token_ids=memoryview(tokens).cast("I").tolist(),
            block_size=self._namespace.page_tokens,
            lora_id=None if adapter is None else adapter.number,
            medium=tier.medium,
            lora_name=None if adapter is None else adapter.name,
            extra_keys=extra_keys if any(extra_keys) else None,
            group_idx=group.index,
            kv_cache_spec_kind=group.kind,
            kv_cache_spec_sliding_window=group.window,
        )

    def _removed(self, hashes: list[int], space: PageSpace, tier: _Tier) -> BlockRemoved:
        return BlockRemoved(block_hashes=hashes, medium=tier.medium, group_idx=self._groups[space].index)

    # ------------------------------------------------------------------ batches

    def _number(self, events: Sequence[Event]) -> Numbered:
        sent: list[Any] = list(events)
        if self._wire_form == "array":
            sent = [_ARRAYS[type(event)](*(getattr(event, f) for f in event.__struct_fields__)) for event in events]
        payload = self._encoder.encode(EventBatch(self._clock(), sent, self._dp_rank))
        batch = Numbered(self.next_seq, payload)
        self.next_seq += 1
        self._buffer.append(batch)
        self._buffer_bytes += len(payload)
        while len(self._buffer) > self._buffer_steps or self._buffer_bytes > MAX_BUFFER_BYTES:
            self._buffer_bytes -= len(self._buffer.popleft().payload)
        return batch
