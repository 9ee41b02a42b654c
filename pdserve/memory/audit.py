"""The audit of a pool: every page has one owner, and locks of cached pages belong to live leases."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pdserve.memory.cached_states import RadixNode
from pdserve.memory.lease import Lease, LeasePool
from pdserve.memory.prefix_cache import RadixTree

NUM_NAMED = 8


def audit_pool(name: str, pool: LeasePool) -> list[str]:
    """Return one sentence for each inconsistency in `pool`, which is called `name`; empty when there is none."""
    found = _audit_free_list(name, pool) + _audit_owners(name, pool)
    for lease in pool.live_leases:
        if not lease.alive:
            found.append(f"{name}: {lease!r} has ended and still has {len(lease.pages)} pages")
    if pool.tree is not None:
        found += _audit_counts(name, pool.tree) + _audit_locks(name, pool, pool.tree)
    return found


def _audit_free_list(name: str, pool: LeasePool) -> list[str]:
    listed, marked = pool.allocator.free_pages()
    differs = sorted(set(listed) ^ set(marked))
    if not differs:
        return []
    return [f"{name}: free list and free marks differ in {_some(differs, pool.num_total)}"]


def _audit_owners(name: str, pool: LeasePool) -> list[str]:
    """Check that every page has one owner: the free list, the cache, or one lease."""
    parts: list[tuple[str, Sequence[int]]] = [("the free list", pool.allocator.free_pages()[0])]
    if pool.tree is not None:
        parts += [("the cache", node.pages) for node in pool.tree.nodes()]
    parts += [(f"the {lease!r}", lease.owned) for lease in pool.live_leases]
    pages = np.concatenate([np.asarray(part, np.int64) for _, part in parts])
    part_of = np.repeat(np.arange(len(parts)), [len(part) for _, part in parts])
    strange = (pages < 0) | (pages >= pool.num_total)
    found = [
        f"{name}: {parts[part_of[i]][0]} has page {pages[i]}, which does not exist" for i in np.flatnonzero(strange)
    ]
    num_owners = np.bincount(pages[~strange], minlength=pool.num_total)
    lost = np.flatnonzero(num_owners == 0)
    if len(lost):
        found.append(f"{name}: no owner of {_some(lost.tolist(), pool.num_total)}")
    for page in np.flatnonzero(num_owners > 1)[:NUM_NAMED]:
        owners = " and ".join(parts[i][0] for i in part_of[pages == page])
        found.append(f"{name}: page {page} of {pool.num_total} has {num_owners[page]} owners: {owners}")
    if (num_more := int((num_owners > 1).sum()) - NUM_NAMED) > 0:
        found.append(f"{name}: {num_more} more pages of {pool.num_total} have several owners")
    return found


def _audit_counts(name: str, tree: RadixTree) -> list[str]:
    """Compare the cache's running counts with its nodes."""
    num_cached = num_evictable = 0
    for node in tree.nodes():
        num_cached += len(node.pages)
        num_evictable += 0 if node.locks else len(node.pages)
    found = []
    if num_cached != tree.num_cached:
        found.append(f"{name}: the cache has {num_cached} pages and counts {tree.num_cached}")
    if num_evictable != tree.num_evictable:
        found.append(f"{name}: {num_evictable} cached pages are not locked, the cache counts {tree.num_evictable}")
    return found


def _audit_locks(name: str, pool: LeasePool, tree: RadixTree) -> list[str]:
    """Check that locks belong to live leases, and that each lease locks the pages it uses without owning them."""
    nodes = list(tree.nodes())
    expected: dict[RadixNode, int] = dict.fromkeys(nodes, 0)
    found = []
    for lease in pool.live_leases:
        if lease.node is None:
            continue
        if lease.node not in expected:
            found.append(f"{name}: the {lease!r} locks {lease.num_locked_pages} pages that left the cache")
            continue
        expected[lease.node] += 1
        found += _audit_path(name, lease, tree.pages_of(lease.node))
    for node in reversed(nodes):  # children before their parents
        if node.parent in expected:
            expected[node.parent] += expected[node]
        if node.locks != expected[node]:
            found.append(
                f"{name}: {len(node.pages)} cached pages ({_names(node.pages)}) have {node.locks} locks, "
                f"live leases have {expected[node]}"
            )
    return found


def _audit_path(name: str, lease: Lease, path: list[int]) -> list[str]:
    if len(path) != lease.num_locked_pages or len(path) > len(lease.pages):
        return [f"{name}: the {lease!r} counts {lease.num_locked_pages} locked pages and locks {len(path)}"]
    ours, theirs = np.asarray(lease.pages[: len(path)]), np.asarray(path)
    foreign = np.setdiff1d(ours[ours != theirs], np.asarray(lease.spares, np.int64))
    if len(foreign) == 0:
        return []
    return [f"{name}: the {lease!r} uses {len(foreign)} pages ({_names(foreign.tolist())}) that it does not lock"]


def _some(pages: list[int], num_total: int) -> str:
    return f"{len(pages)} of {num_total} ({_names(pages)})"


def _names(pages: Sequence[int]) -> str:
    return ", ".join(str(page) for page in pages[:NUM_NAMED]) + (", ..." if len(pages) > NUM_NAMED else "")
