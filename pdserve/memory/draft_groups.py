"""DRAFT groups of a layout: the KV of models that draft tokens, which only one server of a pair may have.

A DRAFT group uses the page numbers of all tokens. It is the last group of a layout. Two servers connect whatever their
drafters are: peers compare `KVLayout.fields`, which leaves DRAFT groups out. Their pages are sent where `draft_fields`
of both sides are equal.
"""

from __future__ import annotations

import functools

from pdserve.memory.layout import GroupKind, KVGroup, KVLayout, PageSpace


def with_draft(layout: KVLayout, group: KVGroup) -> KVLayout:
    """Return `layout`, the whole model's, with the DRAFT group `group`."""
    assert group.kind is GroupKind.DRAFT and group.page_tokens == layout.page_tokens, group
    assert group.space is PageSpace.TOKENS is layout.groups[0].space, "draft pages have the numbers of token pages"
    return KVLayout((*layout.groups, group))


@functools.lru_cache(maxsize=256)
def without_drafts(layout: KVLayout) -> KVLayout:
    """Return `layout` without its DRAFT groups: what every peer of the model has."""
    return KVLayout(tuple(group for group in layout.groups if group.kind is not GroupKind.DRAFT))


def draft_groups(layout: KVLayout) -> tuple[KVGroup, ...]:
    """Return the DRAFT groups of `layout`; empty without a model that drafts."""
    return tuple(group for group in layout.groups if group.kind is GroupKind.DRAFT)


def draft_fields(layout: KVLayout) -> dict[str, str | int]:
    """Return the facts of DRAFT groups that two peers compare, by user-readable names; empty without such groups."""
    groups = draft_groups(layout)
    return {f"{group.name}.{name}": value for group in groups for name, value in group.fields().items()}
