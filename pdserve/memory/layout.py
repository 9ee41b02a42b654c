"""KV page geometry as frozen data: what a model caches, and the memory layout of a page.

A model's cache is a list of groups. A group has layers of the model, and for each layer the same planes. A plane is one
tensor `[head, row, width]`: keys, values, a latent, a recurrent state. A page is one contiguous block across all layers
of its group, `[page, layer, plane]`. A page of a token group holds `page_tokens` tokens, the rows of its planes. A page
of a STATE group is a slot, which holds the state of one request.

Allocator, planner, transports and tests know a model only by this geometry. All arithmetic on pages, slots and bytes is
here.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from pdserve.base.parallel import RankCoord, kv_heads_of, layers_of, part_of
from pdserve.memory.dtypes import DTYPE_BYTES, row_bytes, row_items

LAYOUT_VERSION = 3
Count = TypeVar("Count", int, npt.NDArray[np.int64])
"""A number of tokens or pages, or a position; or an array of them."""
Item = TypeVar("Item")


class GroupKind(enum.Enum):
    """Content of a group's pages."""

    FULL = "full"
    """Keys and values of every token."""
    WINDOW = "window"
    """Keys and values of the last `window` tokens."""
    MLA = "mla"
    """One latent vector for every token, the same on all tensor ranks (arXiv:2405.04434)."""
    INDEX = "index"
    """One key for every token, by which sparse attention selects tokens (DeepSeek-V3.2)."""
    STATE = "state"
    """Recurrent state of a request, which replaces its predecessor with every token."""
    DRAFT = "draft"
    """Keys and values of the layers of a draft model."""
    STAMP = "stamp"
    """For each STATE layer, the request and the position that the state in the slot belongs to (`SlotStamp`)."""


class PageSpace(enum.Enum):
    """Page numbers that groups share. A request has pages in each space that its model's groups use."""

    TOKENS = "tokens"
    """Pages of all tokens: FULL, MLA, INDEX, DRAFT."""
    WINDOW = "window"
    """Pages of the tokens in the window."""
    SLOTS = "slots"
    """One slot for each request: STATE and STAMP."""


STATE_TYPES = {GroupKind.STATE: "mamba", GroupKind.STAMP: "mamba", GroupKind.WINDOW: "swa", GroupKind.INDEX: "nsa"}
"""SGLang's names of what a request has beside keys and values (or latents) of all its tokens."""
_SPACES = {GroupKind.WINDOW: PageSpace.WINDOW, GroupKind.STATE: PageSpace.SLOTS, GroupKind.STAMP: PageSpace.SLOTS}


class Shard(enum.Enum):
    """How tensor ranks divide the heads of a plane."""

    KV_HEAD = "kv_head"
    KEY_HEAD = "key_head"
    VALUE_HEAD = "value_head"
    GROUP = "group"
    """Groups of heads that share B and C (Mamba-2); every rank has all of them if the ranks do not divide them."""
    REPLICATED = "replicated"
    """Every rank has all heads."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plane:
    """One tensor of each layer of a group: `[num_heads, rows, width]`, contiguous. `dtype`: see `dtypes`.

    `num_heads`: heads that the page holds. `num_heads_total`: heads of the model. In a token group the rows are the
    tokens of a page.
    """

    name: str
    num_heads: int
    num_heads_total: int
    rows: int
    width: int
    dtype: str
    shard: Shard = Shard.KV_HEAD

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of one layer of one page."""
        return self.rows * row_bytes(self.width, self.dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes of one layer of one page."""
        return self.num_heads * self.head_bytes

    def heads_of(self, coord: RankCoord) -> range:
        """Return the model's heads that a rank has."""
        size = coord.shape.tp_size
        undivided = self.shard is Shard.GROUP and self.num_heads_total % size != 0
        if self.shard is Shard.REPLICATED or undivided:
            return range(self.num_heads_total)
        if self.shard is Shard.GROUP:
            return part_of(self.num_heads_total, size, coord.tp_rank)
        return kv_heads_of(self.num_heads_total, size, coord.tp_rank)

    def of_rank(self, coord: RankCoord) -> Plane:
        """Return the part of this plane that lies in one rank's pages."""
        assert self.num_heads == self.num_heads_total, "this plane is a rank's part already"
        return dataclasses.replace(self, num_heads=len(self.heads_of(coord)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVGroup:
    """Layers that share a page pool: those of the whole model, or after `of_rank` those of one rank.

    `layers` are the model's numbers, ascending. `num_model_layers`: layers of the model, which pipeline stages divide.
    `page_tokens` is 0 for STATE. `window`: tokens that a WINDOW layer reads, its own included; None for other kinds.
    """

    name: str
    kind: GroupKind
    layers: tuple[int, ...]
    num_model_layers: int
    page_tokens: int
    planes: tuple[Plane, ...]
    window: int | None = None

    def __hash__(self) -> int:
        """Return the hash of the fields, which is computed once: groups are keys of caches on the transfer path."""
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in dataclasses.fields(self)))

    @property
    def space(self) -> PageSpace:
        """The page numbers that the group uses."""
        return _SPACES.get(self.kind, PageSpace.TOKENS)

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @property
    def num_planes(self) -> int:
        """Number of planes of a layer, such as 2 for keys and values, 1 for an MLA latent."""
        return len(self.planes)

    @functools.cached_property
    def plane_offsets(self) -> tuple[int, ...]:
        """Byte offset of each plane in its layer; a plane is aligned to its dtype."""
        offsets, end = [], 0
        for plane in self.planes:
            start = _align(end, DTYPE_BYTES[plane.dtype])
            offsets.append(start)
            end = start + plane.num_bytes
        return tuple(offsets)

    @functools.cached_property
    def layer_bytes(self) -> int:
        """Bytes of one layer of one page."""
        end = self.plane_offsets[-1] + self.planes[-1].num_bytes
        return _align(end, max(DTYPE_BYTES[plane.dtype] for plane in self.planes))

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.num_layers * self.layer_bytes

    def bytes_of(self, num_pages: int) -> int:
        """Return the bytes of `num_pages` pages."""
        return num_pages * self.page_bytes

    def pages_in(self, num_bytes: int) -> int:
        """Return how many pages fit in `num_bytes` bytes, at least 1."""
        return max(1, num_bytes // max(1, self.page_bytes))

    def pages_for(self, num_tokens: Count) -> Count:
        """Return the pages that hold `num_tokens` tokens."""
        return pages_for(num_tokens, self.page_tokens)

    def tokens_in(self, num_pages: Count) -> Count:
        """Return the tokens that `num_pages` pages hold."""
        return num_pages * self.page_tokens

    def page_and_slot(self, positions: Count) -> tuple[Count, Count]:
        """Return the index of each position's page among the pages of its row, and its slot in the page."""
        return page_and_slot(positions, self.page_tokens)

    # ------------------------------------------------------------------ groups whose planes are alike, as K and V

    @property
    def is_uniform(self) -> bool:
        """True when all planes have the same shape, dtype and shard."""
        return all(dataclasses.replace(plane, name=self.planes[0].name) == self.planes[0] for plane in self.planes)

    @property
    def page_shape(self) -> tuple[int, int, int, int, int]:
        """`(layer, plane, head, row, items of a row)` of one page of a uniform group."""
        assert self.is_uniform, self.name
        plane = self.planes[0]
        items = row_items(plane.width, plane.dtype)
        return (self.num_layers, self.num_planes, plane.num_heads, plane.rows, items)

    @property
    def num_kv_heads(self) -> int:
        """Heads of the first plane."""
        return self.planes[0].num_heads

    @property
    def head_dim(self) -> int:
        """Width of the first plane."""
        return self.planes[0].width

    @property
    def dtype(self) -> str:
        """Dtype of the first plane."""
        return self.planes[0].dtype

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of the first plane of one layer of one page."""
        return self.planes[0].head_bytes

    @property
    def page_blocks(self) -> int:
        """Blocks in one page of a uniform group. A block is one head of one plane of one layer, `[row, width]`."""
        return self.num_layers * self.num_planes * self.num_kv_heads

    def block(self, layer: int, plane: int = 0, head: int = 0) -> int:
        """Return the index of a block in its page. The arguments are numbers within this uniform group."""
        return (layer * self.num_planes + plane) * self.num_kv_heads + head

    # ------------------------------------------------------------------ the whole model's group

    def layers_of(self, coord: RankCoord) -> tuple[int, ...]:
        """Return the model's layers of this group that a rank has."""
        stage = layers_of(self.num_model_layers, coord.shape.pp_size, coord.pp_rank)
        return tuple(layer for layer in self.layers if layer in stage)

    def heads_of(self, coord: RankCoord) -> tuple[range, ...]:
        """Return the model's heads that a rank has, for each plane."""
        return tuple(plane.heads_of(coord) for plane in self.planes)

    def of_rank(self, coord: RankCoord) -> KVGroup:
        """Return the part of this group that lies in one rank's pages. It may have no layer."""
        planes = tuple(plane.of_rank(coord) for plane in self.planes)
        return dataclasses.replace(self, layers=self.layers_of(coord), planes=planes)

    def fields(self) -> dict[str, str | int]:
        """Return the facts that two peers must agree on, by user-readable names."""
        facts: dict[str, str | int] = {"kind": self.kind.value}
        if self.num_layers != self.num_model_layers:
            facts["layers"] = ",".join(map(str, self.layers))
        if self.page_tokens:
            facts["page_size"] = self.page_tokens
        if self.window is not None:
            facts["window"] = self.window
        if self.is_uniform and self.page_tokens:
            plane = self.planes[0]
            return facts | {
                "num_kv_heads": plane.num_heads,
                "head_dim": plane.width,
                "kv_cache_dtype": plane.dtype,
            }
        for plane in self.planes:
            facts |= {
                f"{plane.name}.num_heads": plane.num_heads,
                f"{plane.name}.rows": plane.rows,
                f"{plane.name}.width": plane.width,
                f"{plane.name}.dtype": plane.dtype,
                f"{plane.name}.shard": plane.shard.value,
            }
        return facts


def attention_group(
    *,
    page_tokens: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: str,
    num_layers: int,
    layers: Sequence[int] | None = None,
    name: str | None = None,
    kind: GroupKind = GroupKind.FULL,
    v_head_dim: int | None = None,
    window: int | None = None,
) -> KVGroup:
    """Return the group of a model's attention layers: planes `k` and `v`, or the one plane `latent` of MLA.

    `num_layers` are the layers of the model, `layers` those of the group: all when None. `v_head_dim` is `head_dim`
    when None.
    """
    names = {"k": head_dim, "v": head_dim if v_head_dim is None else v_head_dim}
    if kind is GroupKind.MLA:
        names = {"latent": head_dim}
    planes = tuple(
        Plane(
            name=plane,
            num_heads=num_kv_heads,
            num_heads_total=num_kv_heads,
            rows=page_tokens,
            width=width,
            dtype=dtype,
            shard=Shard.REPLICATED if kind in (GroupKind.MLA, GroupKind.INDEX) else Shard.KV_HEAD,
        )
        for plane, width in names.items()
    )
    return KVGroup(
        name=kind.value if name is None else name,
        kind=kind,
        layers=tuple(range(num_layers) if layers is None else layers),
        num_model_layers=num_layers,
        page_tokens=page_tokens,
        planes=planes,
        window=window,
    )


@dataclasses.dataclass(frozen=True)
class KVLayout:
    """All groups of a model, or of one rank of it. The first is a token group."""

    groups: tuple[KVGroup, ...]

    @property
    def num_layers(self) -> int:
        """Layers of the whole model."""
        return self.groups[0].num_model_layers

    @property
    def page_tokens(self) -> int:
        """Tokens per page; equal in all token groups."""
        return self.groups[0].page_tokens

    @functools.cached_property
    def window(self) -> int:
        """Tokens that WINDOW layers read, the largest of all groups; 0 without WINDOW groups."""
        return max((group.window or 0 for group in self.groups if group.space is PageSpace.WINDOW), default=0)

    @functools.cached_property
    def has_state(self) -> bool:
        """True when a request needs a state slot."""
        return any(group.space is PageSpace.SLOTS for group in self.groups)

    @functools.cached_property
    def state_type(self) -> str:
        """SGLang's names of what a request has beside the KV of its tokens: `mamba`, `swa` and `nsa`, joined by commas;
        `none` without such groups.
        """
        found = {STATE_TYPES[group.kind] for group in self.state_groups}
        return ",".join(name for name in ("mamba", "swa", "nsa") if name in found) or "none"

    @functools.cached_property
    def state_groups(self) -> tuple[KVGroup, ...]:
        """The groups that `state_type` names."""
        return tuple(group for group in self.groups if group.kind in STATE_TYPES)

    def split(self, by_group: Sequence[Item]) -> tuple[tuple[Item, ...], tuple[Item, ...]]:
        """Divide a list with one item for each group: those of the other groups, and those of `state_groups`."""
        pairs = list(zip(self.groups, by_group, strict=True))
        others = tuple(item for group, item in pairs if group.kind not in STATE_TYPES)
        return others, tuple(item for group, item in pairs if group.kind in STATE_TYPES)

    def merge(self, others: Sequence[Item], of_state: Sequence[Item]) -> tuple[Item, ...]:
        """Undo `split`: return one item for each group. Both lists must have as many items as there are groups."""
        sources = iter(others), iter(of_state)
        return tuple(next(sources[group.kind in STATE_TYPES]) for group in self.groups)

    @functools.cached_property
    def stamp_group(self) -> int | None:
        """Index of the STAMP group; None without one."""
        return next((i for i, group in enumerate(self.groups) if group.kind is GroupKind.STAMP), None)

    def with_stamps(self) -> KVLayout:
        """Return the layout with a STAMP group for its STATE layers; itself when it has no STATE layers."""
        states = [group for group in self.groups if group.kind is GroupKind.STATE]
        if not states or self.stamp_group is not None:
            return self
        stamp = Plane(
            name="stamp", num_heads=1, num_heads_total=1, rows=1, width=2, dtype="uint64", shard=Shard.REPLICATED
        )
        group = KVGroup(
            name="stamp",
            kind=GroupKind.STAMP,
            layers=tuple(sorted(layer for group in states for layer in group.layers)),
            num_model_layers=self.num_layers,
            page_tokens=0,
            planes=(stamp,),
        )
        return KVLayout((*self.groups, group))

    @functools.cached_property
    def token_bytes(self) -> int:
        """KV bytes of one token over the groups that have pages of all tokens."""
        return self.page_bytes // self.page_tokens

    @functools.cached_property
    def page_bytes(self) -> int:
        """KV bytes of one page number over the groups that have pages of all tokens."""
        return self.space_bytes(PageSpace.TOKENS)

    def space_bytes(self, space: PageSpace) -> int:
        """Return the bytes of one page number over all groups that use it."""
        return sum(group.page_bytes for group in self.groups if group.space is space)

    def bytes_of(self, num_pages: int) -> int:
        """Return the KV bytes of `num_pages` pages of tokens over all groups that have them."""
        return num_pages * self.page_bytes

    def bytes_by_group(self, pages: Sequence[Sequence[int]]) -> int:
        """Return the bytes of `pages`, a list for each group."""
        return sum(group.bytes_of(len(own)) for group, own in zip(self.groups, pages, strict=True))

    def window_pages(self, start: int, end: int) -> range:
        """Return the numbers within a request of the WINDOW pages that computing tokens `[start, end)` uses.

        With `start` equal to `end`: of the pages with KV that the token at `end` reads.
        """
        return range(max(0, start - self.window + 1) // self.page_tokens, pages_for(end, self.page_tokens))

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

    def layers_of(self, coord: RankCoord) -> range:
        """Return the model's layers that a rank has. Call it and `of_rank` on the whole model's layout."""
        return layers_of(self.num_layers, coord.shape.pp_size, coord.pp_rank)

    def of_rank(self, coord: RankCoord) -> KVLayout:
        """Return the part of this layout that lies in one rank's pages."""
        return KVLayout(tuple(group.of_rank(coord) for group in self.groups))

    def fields(self) -> dict[str, str | int]:
        """Return the facts that two peers must agree on, by user-readable names. For the whole model, not a rank.

        They do not tell of DRAFT groups, see `draft_groups`.
        """
        groups = [group for group in self.groups if group.kind is not GroupKind.DRAFT]
        facts: dict[str, str | int] = {
            "layout_version": LAYOUT_VERSION,
            "num_groups": len(groups),
            "num_layers": self.num_layers,
        }
        if self.state_groups:
            facts["state_type"] = self.state_type
        for group in groups:
            prefix = "" if len(groups) == 1 else f"{group.name}."
            facts |= {f"{prefix}{name}": value for name, value in group.fields().items()}
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


def _align(offset: int, size: int) -> int:
    return -(-offset // size) * size
