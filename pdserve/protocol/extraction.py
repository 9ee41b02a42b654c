"""Messages about the state of one request that leaves the scheduler, or comes with its KV.

    API process                                  scheduler
        ExtractRequest ─────────────────────────>
                       <───── KVPart, ..., ExtractReply
        KVPart, ..., GenerateRequest ───────────>

The API process makes a `RequestSnapshot` of the reply, and a request of a snapshot.
"""

from __future__ import annotations

import msgspec

from pdserve.protocol.cached_tokens import CachedTokensDetails
from pdserve.protocol.failure import Failure


class ExtractRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Asks for the state of the live request `rid`, for a snapshot.

    `with_kv`: also for the bytes of its KV, which `KVPart`s carry before the `ExtractReply`. `keep` False: the request
    ends with the finish reason `suspended`.
    """

    query_id: str
    rid: str
    with_kv: bool = False
    keep: bool = False


class KVPart(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The next bytes of the KV of layout group `group`, in order: of an extracted request `rid`, or of one that follows
    as a `GenerateRequest`.
    """

    rid: str
    group: int
    data: bytes


class ExtractReply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answers an `ExtractRequest`, behind all outputs of the request so far.

    `failure`: why there is no snapshot; None: there is one. `kv_tokens`: tokens whose KV the `KVPart`s carry; 0: none.
    `adapter`: digest of the LoRA adapter; empty without one.
    """

    query_id: str
    rid: str
    failure: Failure | None = None
    output_ids: list[int] = msgspec.field(default_factory=list)
    cached_tokens: int = 0
    cached_details: CachedTokensDetails | None = None
    adapter: str = ""
    kv_tokens: int = 0
    kv_pages: tuple[int, ...] = ()
    """Pages of each layout group."""
