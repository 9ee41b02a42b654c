"""Checksums of KV pages that do not depend on how a model is split, so that both ends of a transfer can compare them.

The unit is a block: one head of one plane (K, V, or a latent) of one layer of one page, the same bytes on every split.
A block's hash depends on its content and on its position in the request: page, layer, plane and head numbers of the
whole model. Block hashes are added modulo 2^32, along pages to cells (layer, plane, head) and along layers and heads to
pages. The digest of several ranks is the sum of their digests, so ranks with different heads or layers hash alone.

Multilinear hashing modulo 2^64 with odd multipliers, finished by splitmix64: any one changed word changes the hash. It
detects damage, not malice. Slots behind the prompt's last token are left out, whatever their content. Pure numpy;
called by `executor.kv_pages` on the scheduler thread and on the other ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from pdserve.transfer.plan import RankShard

U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class GroupDigest(msgspec.Struct, frozen=True):
    """Digest of one rank's part of planes of one layout group.

    `layers` and `heads` are `(first, end)`: layers are numbers within the whole model's group, heads within the model.
    `cells` is little-endian uint32 `[layer, plane, head]`, `pages` little-endian uint32 `[page, plane]`. Planes of
    different shapes have digests of their own.
    """

    name: str
    layers: tuple[int, int]
    heads: tuple[int, int]
    planes: tuple[str, ...]
    cells: bytes
    pages: bytes

    @property
    def num_planes(self) -> int:
        """Number of planes."""
        return len(self.planes)

    def cell_array(self) -> U32:
        """Return `cells` as an array with its shape."""
        shape = (self.layers[1] - self.layers[0], self.num_planes, self.heads[1] - self.heads[0])
        return np.frombuffer(self.cells, dtype="<u4").reshape(shape)

    def page_array(self) -> U32:
        """Return `pages` as an array with its shape."""
        return np.frombuffer(self.pages, dtype="<u4").reshape(-1, self.num_planes)

    def with_more(self, later: GroupDigest) -> GroupDigest:
        """Return the digest extended by the pages that follow."""
        assert (self.name, self.planes, self.layers, self.heads) == (
            later.name,
            later.planes,
            later.layers,
            later.heads,
        )
        cells = self.cell_array() + later.cell_array()
        return msgspec.structs.replace(self, cells=cells.tobytes(), pages=self.pages + later.pages)


class RankDigest(msgspec.Struct, frozen=True):
    """Digest of one rank's part of some pages of a request."""

    rank: int
    groups: tuple[GroupDigest, ...]

    def with_more(self, later: RankDigest) -> RankDigest:
        """Return the digest extended by the pages that follow."""
        groups = tuple(mine.with_more(theirs) for mine, theirs in zip(self.groups, later.groups, strict=True))
        return RankDigest(self.rank, groups)


def digest_group(
    window: RankShard, pieces: Iterable[npt.NDArray[np.uint8]], first: int, num_tokens: int
) -> tuple[GroupDigest, ...]:
    """Return the digests of a rank's pages: one, or one for each plane where planes differ in shape.

    Args:
        window: the part of the model's group that the pages hold.
        pieces: uint8 `[pages, page_bytes]` each, in the order of the request's tokens.
        first: number within the request of the first page.
        num_tokens: leading tokens of the request that count; the state of a STATE group counts whole.
    """
    group = window.group
    parts = [range(group.num_planes)] if group.is_uniform else [range(i, i + 1) for i in range(group.num_planes)]
    cells = [np.zeros((group.num_layers, len(p), group.planes[p[0]].num_heads), dtype=np.uint32) for p in parts]
    pages: list[list[U32]] = [[] for _ in parts]
    for piece in pieces:
        for index, planes in enumerate(parts):
            hashes = _blocks(window, piece, planes, first, num_tokens)
            cells[index] += hashes.sum(axis=0, dtype=np.uint32)
            pages[index].append(hashes.sum(axis=(1, 3), dtype=np.uint32))
        first += len(piece)
    return tuple(
        GroupDigest(
            name=group.name,
            layers=(window.first_layer, window.first_layer + group.num_layers),
            heads=(window.heads[planes[0]].start, window.heads[planes[0]].stop),
            planes=tuple(group.planes[plane].name for plane in planes),
            cells=cells[index].astype("<u4").tobytes(),
            pages=np.concatenate(pages[index]).astype("<u4").tobytes() if pages[index] else b"",
        )
        for index, planes in enumerate(parts)
    )


def checksum(digests: Sequence[RankDigest]) -> str | None:
    """Return one checksum text for all ranks, equal on both ends of a correct transfer.

    None: ranks that hold copies of the same head disagree.
    """
    totals: dict[tuple[str, tuple[str, ...]], U32] = {}
    seen: dict[tuple[str, tuple[str, ...], int, int], U32] = {}
    for digest in digests:
        for group in digest.groups:
            cells = group.cell_array()
            total = totals.setdefault((group.name, group.planes), np.zeros(group.num_planes, dtype=np.uint32))
            for layer in range(*group.layers):
                for head in range(*group.heads):
                    cell = cells[layer - group.layers[0], :, head - group.heads[0]]
                    known = seen.setdefault((group.name, group.planes, layer, head), cell)
                    if known is cell:
                        total += cell
                    elif not np.array_equal(known, cell):
                        return None
    return "/".join(".".join(f"{int(plane):08x}" for plane in total) for total in totals.values())


def _blocks(window: RankShard, piece: npt.NDArray[np.uint8], planes: range, first: int, num_tokens: int) -> U32:
    """Return the block hashes of `planes`, which have one shape, of pages: uint32 `[page, layer, plane, head]`."""
    group, plane = window.group, window.group.planes[planes[0]]
    row_bytes = plane.head_bytes // plane.rows
    word = np.dtype("<u4") if row_bytes % 4 == 0 else np.dtype("<u2") if row_bytes % 2 == 0 else np.dtype("u1")
    layers = np.ascontiguousarray(piece).reshape(len(piece), group.num_layers, group.layer_bytes)
    start = group.plane_offsets[planes[0]]
    mine = np.ascontiguousarray(layers[:, :, start : start + len(planes) * plane.num_bytes])
    shape = (len(piece), group.num_layers, len(planes), plane.num_heads)
    words = mine.view(word).reshape(*shape, plane.rows, row_bytes // word.itemsize)
    if group.page_tokens:
        valid = np.clip(num_tokens - (first + np.arange(len(piece))) * group.page_tokens, 0, group.page_tokens)
        if len(piece) and int(valid.min()) < group.page_tokens:
            kept = np.arange(group.page_tokens) < valid[:, None]
            words = words * kept[:, None, None, None, :, None].astype(word)
    flat = words.reshape(*shape, plane.rows * row_bytes // word.itemsize)
    multipliers = _mix(np.arange(1, flat.shape[-1] + 1, dtype=np.uint64)) | np.uint64(1)
    content = (flat.astype(np.uint64) * multipliers).sum(axis=-1, dtype=np.uint64)
    numbers = [
        np.arange(first, first + len(piece)),
        np.arange(window.first_layer, window.first_layer + group.num_layers),
        np.asarray(planes),
        np.asarray(window.heads[planes[0]]),
    ]
    salt = np.zeros((), dtype=np.uint64)
    for axis, values in enumerate(numbers):
        lifted = values.astype(np.uint64).reshape([-1 if i == axis else 1 for i in range(len(numbers))])
        salt = _mix(salt + _GOLDEN + lifted)
    return (_mix(content ^ salt) >> np.uint64(32)).astype(np.uint32)


def _mix(values: U64) -> U64:
    """splitmix64's finalizer, element by element."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
