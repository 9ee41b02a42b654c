"""KV page geometry as frozen data: what a model caches, and the memory layout of a page.

A page is one contiguous block across all layers of its group: `[page, layer, k/v, head, token, dim]`. Allocator,
planner, transports and tests know a model only by this geometry. All arithmetic on pages, slots and bytes is here.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from pdserve.base.parallel import RankCoord, kv_heads_of, layers_of

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "uint64": 8}
LAYOUT_VERSION = 2
Count = TypeVar("Count", int, npt.NDArray[np.int64])
"""A number of tokens or pages, or a position; or an array of them."""


class GroupKind(enum.Enum):
    """Content of a group's pages. Planned kinds: WINDOW, STATE, INDEX, EMBED."""

    FULL = "full"
    """Keys and values of every token."""
    MLA = "mla"
    """One latent vector for every token, the same on all tensor ranks (arXiv:2405.04434)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVGroup:
    """Layers that share a page pool: those of the whole model, or after `of_rank` those of one rank.

    `num_kv_heads`: heads in a page. `num_kv_heads_total`: heads of the model. MLA has one head, the latent.
    """

    name: str
    kind: GroupKind
    num_layers: int
    page_tokens: int
    num_kv_heads: int
    num_kv_heads_total: int
    head_dim: int
    dtype: str

    @property
    def page_shape(self) -> tuple[int, int, int, int, int]:
        """`(layer, k/v, head, token, dim)` of one page."""
        return (self.num_layers, self.num_planes, self.num_kv_heads, self.page_tokens, self.head_dim)

    @property
    def num_planes(self) -> int:
        """2 for keys and values, 1 for an MLA latent."""
        return 1 if self.kind is GroupKind.MLA else 2

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of one plane of one layer of one page."""
        return self.page_tokens * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of one page."""
        return self.num_planes * self.num_kv_heads * self.head_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.num_layers * self.layer_bytes

    @property
    def page_blocks(self) -> int:
        """Blocks in one page. A block is one head of one plane of one layer, `[token, dim]`, contiguous."""
        return self.num_layers * self.num_planes * self.num_kv_heads

    def block(self, layer: int, plane: int = 0, head: int = 0) -> int:
        """Return the index of a block in its page. The arguments are numbers within this group."""
        return (layer * self.num_planes + plane) * self.num_kv_heads + head

    def pages_for(self, num_tokens: Count) -> Count:
        """Return the pages that hold `num_tokens` tokens."""
        return pages_for(num_tokens, self.page_tokens)

    def tokens_in(self, num_pages: Count) -> Count:
        """Return the tokens that `num_pages` pages hold."""
        return num_pages * self.page_tokens

    def bytes_of(self, num_pages: int) -> int:
        """Return the bytes of `num_pages` pages."""
        return num_pages * self.page_bytes

    def pages_in(self, num_bytes: int) -> int:
        """Return how many pages fit in `num_bytes` bytes, at least 1."""
        return max(1, num_bytes // self.page_bytes)

    def page_and_slot(self, positions: Count) -> tuple[Count, Count]:
        """Return the index of each position's page among the pages of its row, and its slot in the page."""
        return page_and_slot(positions, self.page_tokens)

    def layers_of(self, coord: RankCoord) -> range:
        """Return the model's layers that a rank has. Call it, `heads_of` and `of_rank` on the whole model's group."""
        return layers_of(self.num_layers, coord.shape.pp_size, coord.pp_rank)

    def heads_of(self, coord: RankCoord) -> range:
        """Return the model's KV heads that a rank has."""
        return kv_heads_of(self.num_kv_heads_total, coord.shape.tp_size, coord.tp_rank)

    def of_rank(self, coord: RankCoord) -> KVGroup:
        """Return the part of this group that lies in one rank's pages."""
        assert self.num_kv_heads == self.num_kv_heads_total, "this group is a rank's part already"
        layers, heads = self.layers_of(coord), self.heads_of(coord)
        return dataclasses.replace(self, num_layers=len(layers), num_kv_heads=len(heads))


@dataclasses.dataclass(frozen=True)
class KVLayout:
    """All groups of a model, or of one rank of it."""

    groups: tuple[KVGroup, ...]

    @property
    def page_tokens(self) -> int:
        """Tokens per page; equal in all groups."""
        return self.groups[0].page_tokens

    @property
    def token_bytes(self) -> int:
        """KV bytes of one token over all groups."""
        return sum(group.page_bytes // group.page_tokens for group in self.groups)

    @property
    def page_bytes(self) -> int:
        """KV bytes of one page over all groups."""
        return sum(group.page_bytes for group in self.groups)

    def bytes_of(self, num_pages: int) -> int:
        """Return the KV bytes of `num_pages` pages over all groups."""
        return num_pages * self.page_bytes

    def pages_for(self, num_tokens: Count) -> Count:
        """Return the pages that hold `num_tokens` tokens."""
        return pages_for(num_tokens, self.page_tokens)

    def whole_pages(self, num_tokens: int) -> int:
        """Return the pages that `num_tokens` tokens fill completely."""
        return num_tokens // self.page_tokens

    def round_down(self, num_tokens: int) -> int:
        """Return the tokens in the pages that `num_tokens` tokens fill completely."""
        return self.tokens_in(self.whole_pages(num_tokens))

    def tokens_in(self, num_pages: int) -> int:
        """Return the tokens that `num_pages` pages hold."""
        return num_pages * self.page_tokens

    def page_and_slot(self, positions: Count) -> tuple[Count, Count]:
        """Return the index of each position's page among the pages of its row, and its slot in the page."""
        return page_and_slot(positions, self.page_tokens)

    def of_rank(self, coord: RankCoord) -> KVLayout:
        """Return the part of this layout that lies in one rank's pages."""
        return KVLayout(tuple(group.of_rank(coord) for group in self.groups))

    def fields(self) -> dict[str, str | int]:
        """Return the facts that two peers must agree on, by user-readable names. For the whole model, not a rank."""
        facts: dict[str, str | int] = {"layout_version": LAYOUT_VERSION, "num_groups": len(self.groups)}
        for group in self.groups:
            prefix = "" if len(self.groups) == 1 else f"{group.name}."
            facts |= {
                f"{prefix}kind": group.kind.value,
                f"{prefix}num_layers": group.num_layers,
                f"{prefix}page_size": group.page_tokens,
                f"{prefix}num_kv_heads": group.num_kv_heads,
                f"{prefix}head_dim": group.head_dim,
                f"{prefix}kv_cache_dtype": group.dtype,
            }
        return facts

    def fingerprint(self) -> str:
        """Return a short digest of `fields()`."""
        return hashlib.blake2b(repr(sorted(self.fields().items())).encode(), digest_size=8).hexdigest()


def pages_for(num_tokens: Count, page_tokens: int) -> Count:
    """Return the pages that hold `num_tokens` tokens."""
    return -(-num_tokens // page_tokens)


def page_and_slot(positions: Count, page_tokens: int) -> tuple[Count, Count]:
    """Return the index of each position's page among the pages of its row, and its slot in the page."""
    return divmod(positions, page_tokens)
