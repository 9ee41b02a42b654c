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
    """Digest of one rank's part of one layout group: layers and heads as `(first, end)` of the model.

    `cells` is little-endian uint32 `[layer, plane, head]`, `pages` little-endian uint32 `[page, plane]`.
    """

    name: str
    layers: tuple[int, int]
    heads: tuple[int, int]
    num_planes: int
    cells: bytes
    pages: bytes

    def cell_array(self) -> U32:
        """Return `cells` as an array with its shape."""
        shape = (self.layers[1] - self.layers[0], self.num_planes, self.heads[1] - self.heads[0])
        return np.frombuffer(self.cells, dtype="<u4").reshape(shape)

    def page_array(self) -> U32:
        """Return `pages` as an array with its shape."""
        return np.frombuffer(self.pages, dtype="<u4").reshape(-1, self.num_planes)

    def with_more(self, later: GroupDigest) -> GroupDigest:
        """Return the digest extended by the pages that follow."""
        assert (self.name, self.layers, self.heads) == (later.name, later.layers, later.heads)
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
) -> GroupDigest:
    """Return the digest of a rank's pages.

    Args:
        window: the part of the model's group that the pages hold.
        pieces: uint8 `[pages, page_bytes]` each, in the order of the request's tokens.
        first: number within the request of the first page.
        num_tokens: leading tokens of the request that count.
    """
    group = window.group
    assert len(window.layers) == window.layers[-1] + 1 - window.layers[0], "layers without a gap"
    cells = np.zeros((group.num_layers, group.num_planes, group.num_kv_heads), dtype=np.uint32)
    pages: list[U32] = []
    for piece in pieces:
        hashes = _blocks(window, piece, first, num_tokens)
        cells += hashes.sum(axis=0, dtype=np.uint32)
        pages.append(hashes.sum(axis=(1, 3), dtype=np.uint32))
        first += len(piece)
    return GroupDigest(
        name=group.name,
        layers=(window.layers[0], window.layers[-1] + 1),
        heads=(window.heads[0].start, window.heads[0].stop),
        num_planes=group.num_planes,
        cells=cells.astype("<u4").tobytes(),
        pages=np.concatenate(pages).astype("<u4").tobytes() if pages else b"",
    )


def checksum(digests: Sequence[RankDigest]) -> str | None:
    """Return one checksum text for all ranks, equal on both ends of a correct transfer.

    None: ranks that hold copies of the same head disagree.
    """
    totals: dict[str, U32] = {}
    seen: dict[tuple[str, int, int], U32] = {}
    for digest in digests:
        for group in digest.groups:
            cells = group.cell_array()
            total = totals.setdefault(group.name, np.zeros(group.num_planes, dtype=np.uint32))
            for layer in range(*group.layers):
                for head in range(*group.heads):
                    cell = cells[layer - group.layers[0], :, head - group.heads[0]]
                    known = seen.setdefault((group.name, layer, head), cell)
                    if known is cell:
                        total += cell
                    elif not np.array_equal(known, cell):
                        return None
    return "/".join(".".join(f"{int(plane):08x}" for plane in total) for total in totals.values())


def _blocks(window: RankShard, piece: npt.NDArray[np.uint8], first: int, num_tokens: int) -> U32:
    """Return the block hashes of pages, uint32 `[page, layer, plane, head]`."""
    group = window.group
    token_bytes = group.head_bytes // group.page_tokens
    word = np.dtype("<u4") if token_bytes % 4 == 0 else np.dtype("<u2") if token_bytes % 2 == 0 else np.dtype("u1")
    shape = (len(piece), *group.page_shape[:3])
    words = np.ascontiguousarray(piece).view(word).reshape(*shape, group.page_tokens, token_bytes // word.itemsize)
    valid = np.clip(num_tokens - (first + np.arange(len(piece))) * group.page_tokens, 0, group.page_tokens)
    if len(piece) and int(valid.min()) < group.page_tokens:
        kept = np.arange(group.page_tokens) < valid[:, None]
        words = words * kept[:, None, None, None, :, None].astype(word)
    flat = words.reshape(*shape, -1)
    multipliers = _mix(np.arange(1, flat.shape[-1] + 1, dtype=np.uint64)) | np.uint64(1)
    content = (flat.astype(np.uint64) * multipliers).sum(axis=-1, dtype=np.uint64)
    numbers = [
        np.arange(first, first + len(piece)),
        np.asarray(window.layers),
        np.arange(group.num_planes),
        np.asarray(window.heads[0]),
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
