"""Stores of KV pages that servers share: the interface, and the format of a stored object.

    StorageClient (storage_client.py)   threads, deadline, circuit breaker; seals and checks objects
      └─ Storage (this file)            file, memory, mooncake, or a third party's: bytes by key, nothing else

A store is a cache that others write to. It may lose an object, return another one, or say that it has one that it has
not. So an object has a header with everything that its bytes depend on and a checksum, and a reader takes an object
only if the header is the one that it expects. Otherwise the object is a miss.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Protocol

from pdserve.base.parallel import RankCoord
from pdserve.errors import PdserveError
from pdserve.memory.layout import PageSpace

OBJECT_VERSION = 1
_MAGIC = b"PDKV"
_HEADER = struct.Struct("<4sHH32s32s16sQ")
_CHECKSUM = struct.Struct("<I")
SPACE_NAMES: Mapping[PageSpace, str] = {
    PageSpace.TOKENS: "tokens", PageSpace.WINDOW: "window", PageSpace.SLOTS: "state"
}  # fmt: skip
"""How the names of the parts of each page space begin."""
PUT_THREAD = "kv-tier-put"
"""Name of the thread that puts and clears; `kv-tier-get` makes the other calls."""
HEADER_BYTES = 128
"""Bytes in front of the page. Payloads begin at a multiple of 64 bytes."""


class StorageError(PdserveError):
    """The store cannot be reached, or failed as a whole. It says nothing about a single object."""


class Storage(Protocol):
    """Bytes by key. A `StorageClient` calls it on two threads: puts on one, gets and discards on the other, `exists` on
    both.

    A key is text of letters, digits, `-` and `_`, at most 128 of them. One key always has the same bytes, so a put of a
    key that the store has may keep the old object. Calls may block; the client bounds what depends on them.
    """

    @property
    def name(self) -> str:
        """Name of the backend, such as `file`."""
        ...

    def exists(self, keys: Sequence[str]) -> int:
        """Return how many leading keys the store has.

        Raises:
            StorageError: the store is away.
        """
        ...

    def get_into(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[bool]:
        """Read the object of each key into the buffer of the same index; return whether each was read.

        An object that is missing, or whose size is not the buffer's, is not read. The content of its buffer is then
        undefined. Buffers are written only until the call returns.

        Raises:
            StorageError: the store is away.
        """
        ...

    def put_from(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[bool]:
        """Store each buffer under its key; return whether each was taken. True is no promise that it can be read.

        Raises:
            StorageError: the store is away.
        """
        ...

    def discard(self, keys: Sequence[str]) -> None:
        """Remove objects that could not be read or are damaged, so that a later put of their keys stores them again.

        Raises:
            StorageError: the store is away.
        """
        ...

    def clear(self) -> None:
        """Remove all objects, those of other servers too.

        Raises:
            StorageError: the store is away.
        """
        ...

    def close(self) -> None:
        """Release what the store holds. Running calls may fail. Idempotent."""
        ...


class Miss(enum.StrEnum):
    """Why an object was not used. The values label a metric."""

    ABSENT = "absent"
    """The store does not have it, though it may have said so."""
    NOT_AN_OBJECT = "not_an_object"
    """Other bytes, or another version of the format."""
    NAMESPACE = "namespace"
    """KV of other weights, another layout, dtype or page size."""
    KEY = "key"
    """KV of other tokens, or of another rank."""
    LENGTH = "length"
    CHECKSUM = "checksum"


@dataclasses.dataclass(frozen=True, slots=True)
class ObjectId:
    """What one stored page is.

    `namespace`: `KeyNamespace.root`, 32 bytes. `digest`: key of the page, 32 bytes. `part`: which part of the page it
    is, as `shard_name` returns it. The state behind a page, and the window page of its tokens, are parts too.
    """

    namespace: bytes
    digest: bytes
    part: str

    @property
    def key(self) -> str:
        """The key in the store. The namespace is part of it, though the digest continues the namespace's digest."""
        return f"{self.namespace[:6].hex()}-{self.digest.hex()}-{self.part}"

    def header(self, num_bytes: int) -> bytes:
        """Return the header of a payload of `num_bytes`, without the checksum."""
        part = hashlib.sha256(self.part.encode()).digest()[:16]
        return _HEADER.pack(_MAGIC, OBJECT_VERSION, HEADER_BYTES, self.namespace, self.digest, part, num_bytes)


def shard_name(space: str, *, tp_rank: int, tp_size: int, pp_rank: int, pp_size: int) -> str:
    """Return the name of one rank's part of the pages of a page space.

    Servers whose ranks are split alike have equal names, and share objects.
    """
    return f"{space}-t{tp_rank}of{tp_size}-p{pp_rank}of{pp_size}"


def rank_parts(coord: RankCoord) -> dict[PageSpace, str]:
    """Return the names of the parts that the rank at `coord` stores, by page space."""
    shape = coord.shape
    ranks = {"tp_rank": coord.tp_rank, "tp_size": shape.tp_size, "pp_rank": coord.pp_rank, "pp_size": shape.pp_size}
    return {space: shard_name(name, **ranks) for space, name in SPACE_NAMES.items()}


def object_bytes(num_bytes: int) -> int:
    """Return the size of the object whose payload has `num_bytes` bytes."""
    return HEADER_BYTES + num_bytes


def seal(target: memoryview, identity: ObjectId, payload: memoryview) -> None:
    """Write the object of `payload` into `target`, which has `object_bytes` of it."""
    header = identity.header(len(payload))
    target[: len(header)] = header
    target[HEADER_BYTES:] = payload
    checksum = _CHECKSUM.pack(_checksum(header, target[HEADER_BYTES:]))
    target[len(header) : HEADER_BYTES] = checksum.ljust(HEADER_BYTES - len(header), b"\0")


def check(stored: memoryview, identity: ObjectId) -> Miss | None:
    """Return why `stored` is not the object of `identity`; None when it is."""
    if len(stored) < HEADER_BYTES or bytes(stored[:4]) != _MAGIC:
        return Miss.NOT_AN_OBJECT
    _, version, header_bytes, namespace, *_, num_bytes = _HEADER.unpack_from(stored)
    if (version, header_bytes) != (OBJECT_VERSION, HEADER_BYTES):
        return Miss.NOT_AN_OBJECT
    if namespace != identity.namespace:
        return Miss.NAMESPACE
    expected = identity.header(len(stored) - HEADER_BYTES)
    if num_bytes != len(stored) - HEADER_BYTES:
        return Miss.LENGTH
    if bytes(stored[: len(expected)]) != expected:
        return Miss.KEY
    (checksum,) = _CHECKSUM.unpack_from(stored, len(expected))
    return None if checksum == _checksum(expected, stored[HEADER_BYTES:]) else Miss.CHECKSUM


def _checksum(header: bytes, payload: memoryview) -> int:
    return zlib.crc32(payload, zlib.crc32(header))
