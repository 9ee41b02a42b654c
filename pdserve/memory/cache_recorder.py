"""Records what enters and leaves the prefix cache, for readers on another thread.

The radix tree, its windows and its states call a `CacheRecorder` for each change. The scheduler flushes it once a turn.
A change names pages by their numbers: a page that is in the tree has one place there, so the page number identifies its
tokens until the page is removed. No change is needed when a node is split.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from pdserve.memory.layout import PageSpace


@dataclasses.dataclass(frozen=True, slots=True)
class CacheAdapter:
    """The LoRA adapter that pages were computed with. `number`: see `LoraAdapters.key_offset`."""

    number: int
    name: str
    digest: str


@dataclasses.dataclass(frozen=True, slots=True)
class PagesStored:
    """Pages that entered the tree behind page `parent` (None: at its root), in token order.

    `tokens`: their token ids, as uint32 LE, without the bits of the adapter. `salt`: cache salt of the requests that
    may use them; empty without one.
    """

    parent: int | None
    pages: Sequence[int]
    tokens: bytes
    adapter: CacheAdapter | None
    salt: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class PagesRemoved:
    """Pages that left the tree, children with or before their parents."""

    pages: Sequence[int]


@dataclasses.dataclass(frozen=True, slots=True)
class CacheCleared:
    """The tree is empty."""


@dataclasses.dataclass(frozen=True, slots=True)
class GroupChanged:
    """The cache has got, or has lost, the window page or the state of the tokens that end with `page` of the tree."""

    space: PageSpace
    page: int
    stored: bool


@dataclasses.dataclass(frozen=True, slots=True)
class HostChanged:
    """A change of the host tier, whose pages are slots: their numbers are not those of the device's pages."""

    change: PagesStored | PagesRemoved | CacheCleared | GroupChanged


@dataclasses.dataclass(frozen=True, slots=True)
class WeightsChanged:
    """Pages that are stored from now on have keys of `namespace`, a `KeyNamespace`. The caches are empty."""

    namespace: object


CacheChange = PagesStored | PagesRemoved | CacheCleared | GroupChanged | HostChanged | WeightsChanged


class ChangeSink(Protocol):
    """Takes changes. Never waits."""

    @property
    def has_room(self) -> bool:
        """Whether `post` would take changes now."""
        ...

    def post(self, changes: list[CacheChange]) -> bool:
        """Take the changes of a turn; False, without taking any, when there is no room."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterKeys:
    """How keys of the tree tell adapters apart: bits from `shift` on hold the adapter's number, 0 for none.

    `find` returns the adapter of a number.
    """

    shift: int
    find: Callable[[int], CacheAdapter]


class CacheRecorder:
    """Collects the changes of a turn and gives them to `sink`. Scheduler thread only.

    `of_host`: the recorder of the host tier, whose changes are `HostChanged`. When the sink is full, changes are lost,
    and the next flush that the sink takes describes the whole cache anew.
    """

    def __init__(self, sink: ChangeSink, adapters: AdapterKeys | None = None, *, of_host: bool = False) -> None:
        self._of_host = of_host
        self._sink = sink
        self._adapters = adapters
        self._changes: list[PagesStored | PagesRemoved | CacheCleared | GroupChanged] = []
        self._new_weights: WeightsChanged | None = None
        """What the sink has not taken yet."""
        self._lost = False
        self.num_lost = 0
        """Flushes whose changes the sink did not take."""

    def stored(self, parent: int | None, pages: Sequence[int], key: bytes, salt: str = "") -> None:
        """Record that the tree has new `pages` with the tokens `key` behind page `parent`; None: at its root.

        `salt`: see `PagesStored`.
        """
        tokens, adapter = key, None
        if self._adapters is not None:
            number = int.from_bytes(key[:4], "little") >> self._adapters.shift
            if number:
                adapter = self._adapters.find(number)
                tokens = _without_bits(key, self._adapters.shift)
        self._changes.append(PagesStored(parent, tuple(pages), tokens, adapter, salt))

    def removed(self, pages: Sequence[int]) -> None:
        """Record that `pages` have left the tree."""
        if pages:
            self._changes.append(PagesRemoved(tuple(pages)))

    def cleared(self) -> None:
        """Record that the tree is empty."""
        self._changes.append(CacheCleared())

    def group_changed(self, space: PageSpace, page: int, *, stored: bool) -> None:
        """Record a `GroupChanged`."""
        self._changes.append(GroupChanged(space, page, stored))

    def weights_changed(self, namespace: object) -> None:
        """Record a `WeightsChanged`, behind `cleared`."""
        self._new_weights = WeightsChanged(namespace)

    def flush(self, describe: Callable[[], None]) -> None:
        """Give the changes since the last flush to the sink.

        `describe` records the whole content of the cache, parents before their children; called when changes were lost.
        """
        if self._lost:
            if not self._sink.has_room:
                self.num_lost += bool(self._changes)
                self._changes.clear()
                return
            self._changes.clear()
            self.cleared()
            describe()
        if self._changes or self._new_weights is not None:
            changes, self._changes = self._changes, []
            sent: list[CacheChange] = [*changes]
            if self._of_host:
                sent = [HostChanged(change) for change in changes]
            if self._new_weights is not None:
                sent.insert(_behind_the_clear(changes), self._new_weights)
            self._lost = not self._sink.post(sent)
            self._new_weights = self._new_weights if self._lost else None
            self.num_lost += self._lost


def _behind_the_clear(changes: Sequence[object]) -> int:
    """Return the index behind the last `CacheCleared`; 0 without one."""
    return max((index + 1 for index, one in enumerate(changes) if isinstance(one, CacheCleared)), default=0)


def _without_bits(tokens: bytes, shift: int) -> bytes:
    return (np.frombuffer(tokens, dtype="<u4") & np.uint32((1 << shift) - 1)).tobytes()
