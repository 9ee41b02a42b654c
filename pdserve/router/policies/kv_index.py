"""The policy kv_aware: the worker whose prefix cache has most of the prompt, as its KV events say.

    KVIndex ── (worker, replica) ─> CachedBlocks: block hash -> tiers and groups, as bits

`workers.kv_events` writes the index. A block takes about 100 bytes. `MAX_BLOCKS` bounds all blocks together; further
ones are not recorded, and prompts that end with them count as cached only up to there.

Unlike cache_aware the policy knows what workers have evicted, what they have cached for other routers and clients, and
that prompts of different texts have the same tokens. It needs workers with `--kv-events-config`; others are chosen by
load.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence

from pdserve.observe.kv_events import HOST_MEDIUM, AllBlocksCleared, BlockRemoved, BlockStored, Event
from pdserve.observe.kv_keys import HASHED_AT_ONCE, PromptKeys, ReplicaKeys
from pdserve.router.config.config import PolicyConfig
from pdserve.router.policies.basic import Candidate, Policy, RoutedRequest, is_imbalanced, least_loaded

MAX_BLOCKS = 1 << 22
"""About 400 MiB."""


class CachedBlocks:
    """The blocks of one replica of a worker, in both tiers: applies its events."""

    def __init__(self, index: KVIndex, keys: ReplicaKeys) -> None:
        self._index = index
        self._blocks: dict[int, int] = {}
        """Tiers and groups by block hash: bit `at` for the group at this position, in the host tier shifted further."""
        self._is_forgotten = False
        self.num_refused = 0
        """Blocks that were not recorded, see `MAX_BLOCKS`."""
        self.keys = keys
        self.are_keys_outdated = False
        """True: an event has a hash that `keys` do not give, because weights or adapters have changed."""

    def __len__(self) -> int:
        return len(self._blocks)

    def use(self, keys: ReplicaKeys) -> bool:
        """Compute the hashes of prompts with these keys; False if they are those in use. Groups never change."""
        if keys == self.keys:
            return False
        self.keys, self.are_keys_outdated = keys, False
        return True

    def clear(self) -> None:
        """Forget all blocks."""
        self._index.num_blocks -= len(self._blocks)
        self._blocks.clear()

    def forget(self) -> None:
        """Forget all blocks; events that still come change nothing."""
        self.clear()
        self._is_forgotten = True

    def apply(self, event: Event) -> None:
        """Apply an event. Applying one twice changes nothing."""
        if self._is_forgotten:
            return
        match event:
            case BlockStored():
                self._check_keys(event)
                self._store(event.block_hashes, self._bit(event))
            case BlockRemoved():
                self._remove(event.block_hashes, self._gone(event))
            case AllBlocksCleared():
                self.clear()

    def num_cached(self, prompt: PromptKeys) -> int:
        """Return the leading tokens of a prompt that the replica has, on the device or in the host tier.

        A cached block's parents are cached, so one look-up tells of `HASHED_AT_ONCE` pages.
        """
        namespace, root = self.keys.namespace, self.keys.root(prompt)
        if root is None or not self._blocks:
            return 0
        num, num_pages = 0, prompt.num_pages(namespace)
        hashes: list[int] = []
        while num < num_pages:
            end = min(num + HASHED_AT_ONCE, num_pages)
            hashes = prompt.hashes(namespace, root, end)
            if not self._has_all_tokens(hashes[end - 1]):
                num = self._longest(hashes, num, end - 1)
                break
            num = end
        if len(self.keys.groups) > 1 and num:
            num_groups = len(self.keys.groups)
            has = {one: self._blocks.get(one, 0) | self._blocks.get(one, 0) >> num_groups for one in hashes[:num]}
            num = self.keys.usable(hashes[:num], has)
        return num * namespace.page_tokens

    def _longest(self, hashes: Sequence[int], low: int, high: int) -> int:
        """Return how many leading blocks are cached, from `low` to `high`, by bisection."""
        while low < high:
            middle = (low + high + 1) // 2
            if self._has_all_tokens(hashes[middle - 1]):
                low = middle
            else:
                high = middle - 1
        return low

    def _has_all_tokens(self, one: int) -> bool:
        """Whether a tier has the KV of all tokens of a block."""
        return bool(self._blocks.get(one, 0) & (1 | 1 << len(self.keys.groups)))

    def _bit(self, event: BlockStored | BlockRemoved) -> int:
        """Return the bit of the event's group and tier; 0 for a group that the worker has not told of."""
        groups = self.keys.groups
        index = groups[0].index if event.group_idx is None else event.group_idx
        at = next((at for at, group in enumerate(groups) if group.index == index), None)
        if at is None:
            return 0
        return 1 << (at + len(groups) if event.medium == HOST_MEDIUM else at)

    def _gone(self, event: BlockRemoved) -> int:
        """Return the bits that a removal takes: with the KV of all tokens, window pages and states of the tier too."""
        bit, of_tier = self._bit(event), (1 << len(self.keys.groups)) - 1
        if bit == 1:
            return of_tier
        return of_tier << len(self.keys.groups) if bit == of_tier + 1 else bit

    def _store(self, hashes: Sequence[int], bit: int) -> None:
        if not bit:
            return
        blocks, before = self._blocks, len(self._blocks)
        room = MAX_BLOCKS - self._index.num_blocks
        for one in hashes:
            known = blocks.get(one)
            if known is not None:
                blocks[one] = known | bit
            elif len(blocks) - before < room:
                blocks[one] = bit
            else:
                self.num_refused += 1
        self._index.num_blocks += len(blocks) - before

    def _remove(self, hashes: Sequence[int], bit: int) -> None:
        blocks, before = self._blocks, len(self._blocks)
        for one in hashes:
            left = blocks.get(one, 0) & ~bit
            if left:
                blocks[one] = left
            else:
                blocks.pop(one, None)
        self._index.num_blocks += len(blocks) - before

    def _check_keys(self, event: BlockStored) -> None:
        """Compare the hash of a prompt's first block with that of `keys`."""
        if event.parent_block_hash is not None or not event.block_hashes:
            return
        size = self.keys.namespace.page_tokens
        extra = list((event.extra_keys or [None])[0] or ())
        salt = extra[-1] if len(extra) > (event.lora_name is not None) else ""
        expected = None
        if event.block_size == size and len(event.token_ids) >= size:
            expected = self.keys.first_hash(event.token_ids, event.lora_name, salt)
        if expected != event.block_hashes[0]:
            self.are_keys_outdated = True


class KVIndex:
    """The blocks of all workers of one role. Event loop only."""

    def __init__(self) -> None:
        self._replicas: dict[str, dict[int, CachedBlocks]] = {}
        self.num_blocks = 0
        """Blocks of all replicas."""

    def add(self, url: str, dp_rank: int, keys: ReplicaKeys) -> CachedBlocks:
        """Return the new, empty blocks of a replica."""
        assert dp_rank not in self._replicas.get(url, ()), "call `forget` first"
        return self._replicas.setdefault(url, {}).setdefault(dp_rank, CachedBlocks(self, keys))

    def replicas(self, url: str) -> Mapping[int, CachedBlocks]:
        """Return the blocks of a worker by replica; empty if its events are not followed."""
        return self._replicas.get(url, {})

    def forget(self, url: str) -> None:
        """Forget the blocks of a worker."""
        for blocks in self._replicas.pop(url, {}).values():
            blocks.forget()

    def num_cached(self, url: str, prompt: PromptKeys) -> int:
        """Return the leading tokens of a prompt that a worker has, of several replicas the one with the most."""
        return max((blocks.num_cached(prompt) for blocks in self.replicas(url).values()), default=0)

    def __iter__(self) -> Iterator[tuple[str, int, CachedBlocks]]:
        for url, replicas in self._replicas.items():
            for dp_rank, blocks in replicas.items():
                yield url, dp_rank, blocks


class KVAware(Policy):
    """Chooses by `index`, which `workers.kv_events` keeps.

    Workers whose load exceeds the smallest one by both balance thresholds are left out. Of the others, those with the
    longest cached prefix are chosen among by load, if the prefix is more than `cache_threshold` of the prompt. Else,
    and for a request without known tokens, the least loaded worker is chosen.
    """

    uses_load = True
    uses_tokens = True

    def __init__(self, config: PolicyConfig) -> None:
        self._config = config
        self.index = KVIndex()

    def choose(self, candidates: Sequence[Candidate], request: RoutedRequest, rng: random.Random) -> int:
        """Choose by cached prefix, see the class."""
        prompt, config = request.tokens, self._config
        if prompt is None:
            return least_loaded(candidates, rng)
        least = min(candidates, key=lambda candidate: candidate.load)
        lengths = [
            0
            if is_imbalanced([candidate, least], config.balance_abs_threshold, config.balance_rel_threshold)
            else self.index.num_cached(candidate.url, prompt)
            for candidate in candidates
        ]
        longest = max(lengths)
        if longest <= config.cache_threshold * prompt.num_tokens:
            return least_loaded(candidates, rng)
        holders = [index for index, length in enumerate(lengths) if length == longest]
        return holders[least_loaded([candidates[index] for index in holders], rng)]

    def forget(self, url: str) -> None:
        """Forget the worker's blocks."""
        self.index.forget(url)
