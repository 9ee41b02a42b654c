"""A request as a value: everything that another server needs in order to continue it with the same tokens.

    bytes of a snapshot = "PDSNAP" | version uint16 | length of the head uint64 | length of the KV uint64
                          | SHA-256 of head and KV | head (msgpack) | KV bytes of group 0, of group 1, ...

All numbers are little-endian. The state of a grammar, of stop strings and of penalties follows from the output tokens,
so no snapshot holds it. The API process makes and reads snapshots; clients keep them. Nothing in a snapshot is trusted:
`decode` checks form and sizes, and the restoring server checks the values as it checks those of a request body.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec

from pdserve.errors import ProtocolError, RequestError
from pdserve.protocol.cached_tokens import CachedTokensDetails
from pdserve.protocol.logprobs import Logprobs, PromptLogprobs
from pdserve.protocol.messages import TokenLogprob
from pdserve.protocol.sampling import CoreSamplingParams

MAGIC = b"PDSNAP"
SNAPSHOT_VERSION = 1
CONTENT_TYPE = "application/vnd.pdserve.snapshot"
"""Content type of a snapshot in HTTP bodies."""
MAX_HEAD_BYTES = 256 << 20
"""Most bytes of a head: tokens, log probabilities and the client's body."""
MAX_GROUPS = 64
MAX_TOP = 128
MAX_PICKED = 1024
_FIXED = struct.Struct("<6sHQQ32s")

TokenId = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 40))]
Name = Annotated[str, msgspec.Meta(max_length=1024)]


class KVIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """What the KV of a token depends on besides the tokens: the fields that two servers must have in common.

    `weights`: fingerprint of the loaded weights. `layout`: `KVLayout.fingerprint`. `adapter`: digest of the LoRA
    adapter; empty without one. `model`: `ModelSpec.digest`; empty in snapshots of older releases.
    """

    weights: Name
    layout: Name
    dtype: Name
    page_tokens: Count
    adapter: Name = ""
    model: Name = ""


class SnapshotGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Pages of one layout group in the KV bytes: `num_pages` pages of `page_bytes` bytes, in the request's order."""

    num_pages: Count
    page_bytes: Count


class SnapshotKV(msgspec.Struct, frozen=True, kw_only=True):
    """The KV of the first `num_tokens` tokens of prompt and output. `groups`: one for each group of the layout."""

    num_tokens: Count
    groups: Annotated[tuple[SnapshotGroup, ...], msgspec.Meta(max_length=MAX_GROUPS)]

    @property
    def num_bytes(self) -> int:
        """Bytes of all groups."""
        return sum(group.num_pages * group.page_bytes for group in self.groups)

    def split(self, data: memoryview) -> list[memoryview]:
        """Cut `data`, `num_bytes` bytes, into the bytes of each group."""
        parts, at = [], 0
        for group in self.groups:
            end = at + group.num_pages * group.page_bytes
            parts.append(data[at:end])
            at = end
        return parts


class SnapshotOrigin(msgspec.Struct, frozen=True, kw_only=True):
    """The HTTP call that began the request, so that its answer goes on in the same form.

    `path`: of the endpoint. `body`: the client's JSON body. `stream_id` and `created` (Unix time in seconds): those of
    the events that the client has; None: it has none.
    """

    path: Name
    body: bytes
    stream_id: Annotated[str, msgspec.Meta(max_length=512)] | None = None
    created: Count | None = None


class RequestSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """See the file's docstring.

    `rid`: the client's id of the request. `model`: name of the model, for people. `sampling` has the request's seed,
    also where the client gave none. `output_logprobs`: one entry for each output token if the request wants them.
    `prompt_logprobs`: parts that the client's answer needs. `cached_tokens`: prompt tokens found in a prefix cache.
    `cached_details`: where they were; None: on the device, or an older server made the snapshot.
    `created_s`: Unix time in seconds. `origin` None: the request did not come by an HTTP call of one sequence.
    `kv` None: the snapshot has no KV; the restoring server finds it in its caches or computes it.
    """

    rid: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    model: Name
    identity: KVIdentity
    input_ids: Annotated[list[TokenId], msgspec.Meta(min_length=1)]
    output_ids: list[TokenId]
    sampling: CoreSamplingParams
    logprobs: Logprobs | None = None
    output_logprobs: list[TokenLogprob] = msgspec.field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = msgspec.field(default_factory=list)
    lora: Name | None = None
    cache_salt: Name = ""
    priority: Annotated[int, msgspec.Meta(ge=-(1 << 31), le=(1 << 31) - 1)] = 0
    cached_tokens: Count = 0
    cached_details: CachedTokensDetails | None = None
    created_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    origin: SnapshotOrigin | None = None
    kv: SnapshotKV | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output."""
        return len(self.input_ids) + len(self.output_ids)

    def check(self) -> None:
        """Check that the fields fit each other.

        Raises:
            RequestError: 400 naming the field.
        """
        if len(self.output_ids) >= max(1, self.sampling.max_new_tokens):
            raise _bad("output_ids", f"has {len(self.output_ids)} tokens; {self.sampling.max_new_tokens} were wanted")
        wants_output = self.logprobs is not None and self.logprobs.output
        if len(self.output_logprobs) != (len(self.output_ids) if wants_output else 0):
            raise _bad("output_logprobs", f"has {len(self.output_logprobs)} entries for {len(self.output_ids)} tokens")
        for line in self.output_logprobs:
            if len(line.top) > MAX_TOP or len(line.picked) > MAX_PICKED:
                raise _bad("output_logprobs", f"has an entry with more than {MAX_TOP} tokens or {MAX_PICKED} values")
        if self.prompt_logprobs and self.logprobs is None:
            raise _bad("prompt_logprobs", "belongs to a request without log probabilities")
        for part in self.prompt_logprobs:
            try:
                part.check()
            except ProtocolError as error:
                raise _bad("prompt_logprobs", str(error)) from None
            if part.start + part.num_tokens > len(self.input_ids):
                raise _bad("prompt_logprobs", f"goes beyond the {len(self.input_ids)} prompt tokens")
        if self.kv is not None and not 0 < self.kv.num_tokens < self.num_tokens:
            raise _bad("kv.num_tokens", f"is {self.kv.num_tokens}; the request has {self.num_tokens} tokens")


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(RequestSnapshot)


def encode(snapshot: RequestSnapshot, kv: Sequence[bytes | memoryview] = ()) -> bytes:
    """Return `snapshot` as bytes. `kv`: the bytes of its KV in order, cut anywhere; empty without `snapshot.kv`."""
    head = _encoder.encode(snapshot)
    num_bytes = sum(map(len, kv))
    wanted = 0 if snapshot.kv is None else snapshot.kv.num_bytes
    assert num_bytes == wanted, f"{num_bytes} bytes of KV are given, {wanted} are named"
    fixed = _FIXED.pack(MAGIC, SNAPSHOT_VERSION, len(head), num_bytes, _digest([head, *kv]))
    return b"".join([fixed, head, *kv])


def decode(data: bytes | memoryview) -> tuple[RequestSnapshot, memoryview]:
    """Return the snapshot in `data`, and the bytes of its KV, which share memory with `data`.

    Raises:
        RequestError: 400 naming what is wrong: `magic`, `version`, `length`, `checksum`, or a field of the snapshot.
    """
    view = memoryview(data)
    if len(view) < _FIXED.size:
        raise _bad("length", f"is {len(view)} bytes, less than the {_FIXED.size} that every snapshot begins with")
    magic, version, head_bytes, kv_bytes, digest = _FIXED.unpack_from(view)
    if magic != MAGIC:
        raise _bad("magic", f"is {magic!r}, expected {MAGIC!r}")
    if version != SNAPSHOT_VERSION:
        raise _bad("version", f"is {version}; this server reads version {SNAPSHOT_VERSION}")
    rest = view[_FIXED.size :]
    if head_bytes > MAX_HEAD_BYTES or head_bytes + kv_bytes != len(rest):
        raise _bad("length", f"is {len(rest)} bytes behind the beginning, which names {head_bytes} + {kv_bytes}")
    if not hmac.compare_digest(_digest([rest]), digest):
        raise _bad("checksum", "does not fit the bytes: the snapshot is damaged")
    snapshot = _decoded(rest[:head_bytes])
    named = 0 if snapshot.kv is None else snapshot.kv.num_bytes
    if named != kv_bytes:
        raise _bad("kv", f"names {named} bytes of KV; {kv_bytes} are there")
    snapshot.check()
    return snapshot, rest[head_bytes:]


def _decoded(head: memoryview) -> RequestSnapshot:
    try:
        return _decoder.decode(head)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        text = str(error)
        place = text.rpartition("`$.")[2].rstrip("`") if "`$." in text else "head"
        raise _bad(place, f"does not decode: {text}") from None


def _digest(parts: Iterable[bytes | memoryview]) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.digest()


def _bad(field: str, what: str) -> RequestError:
    name = f"snapshot.{field}"
    return RequestError(f"{name} {what}", field=name, code="bad_snapshot")
