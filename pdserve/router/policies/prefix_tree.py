"""The cache_aware policy, with an approximate radix tree of the prompts that were sent to each worker.

One tree for all workers. A node holds a piece of text and the workers (owners) that were sent it. The owner of a node
owns all its ancestors. The workers' real prefix caches are unknown: the tree limits each worker's text in characters
and nodes, and evicts the oldest leaves.

    "the quick " {a, b} ─┬─ "brown fox" {a}
                         └─ "red fox"   {b}
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import random
from collections import Counter
from collections.abc import Container, Iterator, Sequence

from pdserve.router.config.config import PolicyConfig
from pdserve.router.policies.basic import Candidate, Policy, RoutedRequest, is_imbalanced, least_loaded

MAX_NODES = 1 << 17
"""Limit per worker: a short text has few characters, but takes a node of about 600 bytes."""


@dataclasses.dataclass(eq=False)
class TextNode:
    """A node. `text`: the edge from the parent. `owners`: the insertion count at which each worker was last sent it."""

    text: str
    parent: TextNode | None
    owners: dict[str, int]
    children: dict[str, TextNode] = dataclasses.field(default_factory=dict)

    def owned_below(self, owner: str) -> bool:
        """Whether `owner` owns one of the children."""
        return any(owner in child.owners for child in self.children.values())


class PrefixTree:
    """Texts by owner. A walk costs one dictionary look-up per node and one comparison of the node's text."""

    def __init__(self) -> None:
        self._root = TextNode("", None, {})
        self._sizes: dict[str, int] = {}
        self._nodes: Counter[str] = Counter()
        self._count = 0

    def size(self, owner: str) -> int:
        """Return the characters that `owner` has in the tree."""
        return self._sizes.get(owner, 0)

    def num_nodes(self, owner: str) -> int:
        """Return the nodes that `owner` has."""
        return self._nodes[owner]

    def is_over(self, owner: str, max_size: int, slack: int = 0) -> bool:
        """Whether `owner` exceeds `max_size` characters or `MAX_NODES` nodes.

        With `slack` above 0 both limits are larger by the share 1 / `slack`.
        """
        share = 1 / slack if slack else 0.0
        return self.size(owner) > max_size * (1 + share) or self.num_nodes(owner) > MAX_NODES * (1 + share)

    def insert(self, text: str, owner: str) -> None:
        """Insert `text` for `owner`, which then owns every node on its path."""
        self._count += 1
        self._sizes.setdefault(owner, 0)
        node, done = self._root, 0
        while done < len(text):
            child = node.children.get(text[done])
            if child is None:
                child = TextNode(text[done:], node, {})
                node.children[text[done]] = child
            else:
                shared = common_length(text, done, child.text)
                if shared < len(child.text):
                    child = _split(child, shared)
                    self._nodes.update(child.owners.keys())
            if owner not in child.owners:
                self._sizes[owner] += len(child.text)
                self._nodes[owner] += 1
            child.owners[owner] = self._count
            done += len(child.text)
            node = child

    def match(self, text: str, among: Container[str]) -> tuple[str | None, int]:
        """Return the owner in `among` with the longest common prefix with `text`, and its length in characters.

        Of several owners, the one to which the prefix was sent last; (None, 0) without a common prefix.
        """
        found: tuple[str | None, int] = (None, 0)
        node, done = self._root, 0
        while done < len(text):
            child = node.children.get(text[done])
            if child is None:
                break
            shared = common_length(text, done, child.text)
            owners = [owner for owner in child.owners if owner in among]
            if not owners:
                break
            found = (max(owners, key=child.owners.__getitem__), done + shared)
            if shared < len(child.text):
                break
            done += shared
            node = child
        return found

    def evict(self, max_size: int) -> None:
        """Evict each owner's oldest leaves until it has at most `max_size` characters."""
        for owner in list(self._sizes):
            if self.is_over(owner, max_size):
                self.cut(owner, max_size)

    def cut(self, owner: str, max_size: int) -> None:
        """Evict an owner's oldest leaves down to `max_size` characters and `MAX_NODES` nodes. Walks the tree once."""
        order = itertools.count()
        leaves = [
            (node.owners[owner], next(order), node)
            for node in self.nodes()
            if owner in node.owners and not node.owned_below(owner)
        ]
        heapq.heapify(leaves)
        while leaves and self.is_over(owner, max_size):
            _, _, node = heapq.heappop(leaves)
            self._sizes[owner] -= len(node.text)
            self._nodes[owner] -= 1
            parent = _remove_owner(node, owner)
            if owner in parent.owners and not parent.owned_below(owner):
                heapq.heappush(leaves, (parent.owners[owner], next(order), parent))

    def forget(self, owner: str) -> None:
        """Remove all text of `owner`."""
        if owner in self._sizes:
            self.cut(owner, 0)
            del self._sizes[owner], self._nodes[owner]

    def nodes(self) -> Iterator[TextNode]:
        """Yield all nodes except the root, parents first."""
        waiting = [self._root]
        while waiting:
            node = waiting.pop()
            waiting.extend(node.children.values())
            if node is not self._root:
                yield node


def _remove_owner(node: TextNode, owner: str) -> TextNode:
    """Remove `owner` from a node, and the node if it has no other owner. Returns the parent."""
    parent = node.parent
    assert parent is not None, "the root has no owners"
    del node.owners[owner]
    if not node.owners:
        assert not node.children, "an owner of a child owns its parent"
        del parent.children[node.text[0]]
    return parent


def _split(node: TextNode, at: int) -> TextNode:
    """Split a node's text at `at`; returns the new upper node, which has the same owners."""
    assert node.parent is not None
    upper = TextNode(node.text[:at], node.parent, dict(node.owners))
    node.parent.children[node.text[0]] = upper
    node.text, node.parent = node.text[at:], upper
    upper.children[node.text[0]] = node
    return upper


def common_length(text: str, start: int, piece: str) -> int:
    """Return the length of the common prefix of `piece` and `text[start:]`, by bisection over comparisons in C."""
    if text.startswith(piece, start):
        return len(piece)
    low, high = 0, min(len(piece), len(text) - start)
    while low < high:
        middle = (low + high + 1) // 2
        if text.startswith(piece[low:middle], start + low):
            low = middle
        else:
            high = middle - 1
    return low


SLACK = 8
"""Between evictions a worker may exceed its limits by the share 1 / `SLACK`, because a cut walks the whole tree."""


class CacheAware(Policy):
    """SGLang's cache_aware rule, with its parameters.

    Chooses the least loaded worker if loads are imbalanced, or the request has no prompt. Otherwise the worker with the
    longest common prefix, if the prefix is more than `cache_threshold` of the prompt. Otherwise the worker with the
    least text in the tree, whose cache has the most space; ties by load.
    """

    uses_prompt = True
    uses_load = True

    def __init__(self, config: PolicyConfig) -> None:
        self._config = config
        self._tree = PrefixTree()
        self._next_eviction: float | None = None

    def choose(self, candidates: Sequence[Candidate], request: RoutedRequest, rng: random.Random) -> int:
        """Choose by prefix, see the class."""
        config, prompt = self._config, request.prompt
        if prompt is None or is_imbalanced(candidates, config.balance_abs_threshold, config.balance_rel_threshold):
            return least_loaded(candidates, rng)
        by_url = {candidate.url: index for index, candidate in enumerate(candidates)}
        owner, length = self._tree.match(prompt, by_url)
        if owner is not None and length > config.cache_threshold * len(prompt):
            return by_url[owner]
        least = min(self._tree.size(candidate.url) for candidate in candidates)
        roomy = [index for index, candidate in enumerate(candidates) if self._tree.size(candidate.url) == least]
        return roomy[least_loaded([candidates[index] for index in roomy], rng)]

    def chosen(self, url: str, request: RoutedRequest, now: float) -> None:
        """Insert the prompt for the worker. Evicts at once if the worker exceeds its limit by `SLACK`."""
        most = self._config.max_tree_size
        if request.prompt is not None:
            self._tree.insert(request.prompt[:most], url)
            if self._tree.is_over(url, most, SLACK):
                self._tree.cut(url, most)

    def size(self, url: str) -> int:
        """Return the characters in the tree for a worker."""
        return self._tree.size(url)

    def forget(self, url: str) -> None:
        """Remove the worker's text."""
        self._tree.forget(url)

    def tick(self, now: float) -> None:
        """Evict every `eviction_interval_s`."""
        if self._next_eviction is not None and now < self._next_eviction:
            return
        if self._next_eviction is not None:
            self._tree.evict(self._config.max_tree_size)
        self._next_eviction = now + self._config.eviction_interval_s
