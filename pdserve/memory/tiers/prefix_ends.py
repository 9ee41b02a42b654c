"""Where a stored prompt can be continued, for models with window pages or recurrent states.

    token pages    [A] [B] [C] [D] [E]        the store has five leading pages. A window of two pages, and states behind
    window pages       (B) (C) (D) (E)        C and E: a prompt continues behind E if (D), (E) and its state are stored,
    states                  C*      E*        else behind C if (B), (C) and its state are

A store is asked for leading keys only. So the ends of the prompt are tried from the last one on. The first key of an
end is its state, then its window pages follow, the last one first. The answer names the next end that is worth a try.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from pdserve.memory.layout import PageSpace

MOST_TRIES = 256
"""Ends of one prompt that are tried."""


@dataclasses.dataclass(frozen=True, slots=True)
class PageKey:
    """A page of a page space. `digest`: key of the token page (32 bytes) that it belongs to.

    A window page has the tokens of that page. A state covers all tokens up to the end of that page.
    """

    digest: bytes
    space: PageSpace = PageSpace.TOKENS


def token_keys(digests: Sequence[bytes]) -> list[PageKey]:
    """Return the keys of token pages."""
    return [PageKey(digest) for digest in digests]


@dataclasses.dataclass(frozen=True, slots=True)
class PrefixEnds:
    """The ends of a prompt that are tried, in pages. Any thread.

    `digests`: of the prompt's token pages, from its first on. `first`: pages in front of those that the store is asked
    for. `after`: only ends behind this number of pages are of interest. `grid`: states lie behind multiples of this
    number of pages; 0: the model has none. `first_window(end)`: number of the first window page that must be there for
    the prompt to continue behind `end` pages; None: the model has none.
    """

    digests: Sequence[bytes]
    first: int
    after: int
    grid: int
    first_window: Callable[[int], int] | None

    def needed(self, end: int) -> list[PageKey]:
        """Return what must be stored besides token pages for the prompt to continue behind `end` pages.

        The state is first, then the window pages follow from the last one on.
        """
        keys = [PageKey(self.digests[end - 1], PageSpace.SLOTS)] if self.grid else []
        if self.first_window is not None:
            numbers = range(end - 1, self.first_window(end) - 1, -1)
            keys += [PageKey(self.digests[number], PageSpace.WINDOW) for number in numbers]
        return keys

    def last(self, num_leading: int, count: Callable[[Sequence[PageKey]], int | None]) -> int:
        """Return the last end for which the store has everything, in pages; 0: none.

        `num_leading`: token pages from `first` on that the store has. `count` returns how many leading keys the store
        has; None ends the search.
        """
        end = self.first + num_leading
        for _ in range(MOST_TRIES):
            end -= end % self.grid if self.grid else 0
            if end <= self.after:
                return 0
            keys = self.needed(end)
            found = count(keys)
            if found is None:
                return 0
            if found >= len(keys):
                return end
            num_windows = found - bool(self.grid)  # those that are there, from the last one on
            end -= 1 + max(0, num_windows)
        return 0
