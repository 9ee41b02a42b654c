"""An approximate radix tree: which worker was sent which prompts, so that one that begins alike can go there.

One tree for all workers. A node holds a piece of text and who was sent it; who has a node has all nodes above it. What
a worker really keeps is not known here: each one's texts are bounded in characters and nodes, oldest leaves first.

    "the quick " {a, b} ─┬─ "brown fox" {a}
                         └─ "red fox"   {b}

Pure but for its own state; owned by `cache_aware`.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import random
from collections import Counter
from collections.abc import Container, Iterator, Sequence

from pdserve.router.config.config import PolicyConfig
from pdserve.router.policies.base import Candidate, Policy, RoutedRequest, is_imbalanced, least_loaded

MAX_NODES = 1 << 17
"""Of one worker: short texts take a node each, of some 600 bytes, and few characters."""


@dataclasses.dataclass(eq=False)
class TextNode:
    """`text` leads here from the parent. `owners`: when each worker was last sent it, as a count of insertions."""

    text: str
    parent: TextNode | None
    owners: dict[str, int]
    children: dict[str, TextNode] = dataclasses.field(default_factory=dict)

    def owned_below(self, owner: str) -> bool:
        """Whether `owner` has one of the children."""
        return any(owner in child.owners for child in self.children.values())


class PrefixTree:
    """Texts by owner. A walk costs a dictionary look-up a node and one comparison of all its text."""

    def __init__(self) -> None:
        self._root = TextNode("", None, {})
        self._sizes: dict[str, int] = {}
        self._nodes: Counter[str] = Counter()
        self._count = 0

    def size(self, owner: str) -> int:
        """Characters that `owner` has in the tree."""
        return self._sizes.get(owner, 0)

    def is_over(self, owner: str, max_size: int, slack: int = 0) -> bool:
        """Whether `owner` has more than `max_size` characters, or than `MAX_NODES` nodes; both by one part in `slack`
        more, where that is not 0.
        """
        share = 1 / slack if slack else 0.0
        return self.size(owner) > max_size * (1 + share) or self._nodes[owner] > MAX_NODES * (1 + share)

    def insert(self, text: str, owner: str) -> None:
        """`owner` was sent `text`: it has every node on the way from now on."""
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
        """The owner in `among` with the longest common beginning with `text`, and its length in characters.

        Of several the one that was sent it last; None where nobody has any of it.
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
        """Bring each owner down to `max_size` characters, leaves that it was sent longest ago first."""
        for owner in list(self._sizes):
            if self.is_over(owner, max_size):
                self.cut(owner, max_size)

    def cut(self, owner: str, max_size: int) -> None:
        """Bring one owner down to `max_size` characters and `MAX_NODES` nodes, likewise. Walks the whole tree once."""
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
        """Remove all that `owner` has."""
        if owner in self._sizes:
            self.cut(owner, 0)
            del self._sizes[owner], self._nodes[owner]

    def nodes(self) -> Iterator[TextNode]:
        """All nodes but the root, parents first."""
        waiting = [self._root]
        while waiting:
            node = waiting.pop()
            waiting.extend(node.children.values())
            if node is not self._root:
                yield node


def _remove_owner(node: TextNode, owner: str) -> TextNode:
    """Take a leaf of `owner` from it; a node that nobody has is gone. Returns the parent."""
    parent = node.parent
    assert parent is not None, "the root has no owners"
    del node.owners[owner]
    if not node.owners:
        assert not node.children, "who has a child has its parent"
        del parent.children[node.text[0]]
    return parent


def _split(node: TextNode, at: int) -> TextNode:
    """Cut a node's text in two; returns the new upper half, which has the same owners."""
    assert node.parent is not None
    upper = TextNode(node.text[:at], node.parent, dict(node.owners))
    node.parent.children[node.text[0]] = upper
    node.text, node.parent = node.text[at:], upper
    upper.children[node.text[0]] = node
    return upper


def common_length(text: str, start: int, piece: str) -> int:
    """How many characters of `piece` are what `text` has from `start` on: bisection over comparisons in C."""
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
"""Between two evictions a worker's texts may outgrow their limit by one part in so many: a cut walks the whole tree."""


class CacheAware(Policy):
    """SGLang's rule, with its parameters.

    The least loaded where loads are imbalanced, or where there is no prompt to go by. Else the worker that was sent
    the longest common beginning, if that is more than `cache_threshold` of the prompt. Else the one that was sent the
    least text, whose cache has most room; equals by load.
    """

    uses_prompt = True
    uses_load = True

    def __init__(self, config: PolicyConfig) -> None:
        self._config = config
        self._tree = PrefixTree()
        self._next_eviction: float | None = None

    def choose(self, candidates: Sequence[Candidate], request: RoutedRequest, rng: random.Random) -> int:
        """See the class."""
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
        """The worker will have the prompt in its cache. A burst does not wait for `tick`; see `SLACK`."""
        most = self._config.max_tree_size
        if request.prompt is not None:
            self._tree.insert(request.prompt[:most], url)
            if self._tree.is_over(url, most, SLACK):
                self._tree.cut(url, most)

    def size(self, url: str) -> int:
        """Characters that are kept for a worker."""
        return self._tree.size(url)

    def forget(self, url: str) -> None:
        """Its cache is gone with it."""
        self._tree.forget(url)

    def tick(self, now: float) -> None:
        """Evict every `eviction_interval_s`."""
        if self._next_eviction is not None and now < self._next_eviction:
            return
        if self._next_eviction is not None:
            self._tree.evict(self._config.max_tree_size)
        self._next_eviction = now + self._config.eviction_interval_s
