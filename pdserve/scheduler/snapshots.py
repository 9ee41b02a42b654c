"""Takes the state of a live request out of the scheduler, and takes KV bytes of a restored one in.

    ExtractRequest ──> KVPart, ... ──> ExtractReply          the request goes on, or ends as `suspended`
    KVPart, ... ──> GenerateRequest                          its KV is in host memory, as that of a retracted request

The API process makes and reads the snapshot (`protocol/snapshot.py`). Scheduler thread.
"""

from __future__ import annotations

from collections.abc import Callable

from pdserve.errors import RequestError
from pdserve.executor.interface import ImportedPages
from pdserve.memory.lease import numbers_to_move
from pdserve.protocol.failure import Failure
from pdserve.protocol.messages import ExtractReply, FinishReason, KVPart
from pdserve.scheduler.context import SchedulerContext
from pdserve.scheduler.request import Req

SUSPENDED = FinishReason(type="suspended", message="a snapshot of the request was taken")
NOT_LIVE = Failure(code="not_live", message="the request has ended", status=404, origin="client")
MOVING = Failure(
    code="migration_under_way", message="another server is taking the request over", status=409, field="rid"
)
PART_BYTES = 8 << 20
"""Bytes of KV in one message."""
MAX_ARRIVING = 64
"""Requests whose KV has arrived before they have. Beyond this number the KV of the oldest one is dropped."""


def check_adapter(req: Req) -> None:
    """Check that the adapter of a restored request, or of one taken over, is the one it began with.

    Raises:
        RequestError: 409, an adapter of the same name has other weights here.
    """
    if req.spec.lora_digest and req.spec.lora_digest != req.adapter_digest:
        if req.spec.taken_over:
            message = f"the adapter {req.spec.lora!r} has other weights here"
            raise RequestError(message, field="lora_path", status=409, code="lora_mismatch")
        raise RequestError(
            f"snapshot.identity.adapter is {req.spec.lora_digest!r}; {req.spec.lora!r} has {req.adapter_digest!r} here",
            field="snapshot.identity.adapter",
            status=409,
            code="snapshot_differs",
        )


class RequestExtractor:
    """Extracts and restores requests. Call its methods while no step is under way, except `arrived`."""

    def __init__(self, context: SchedulerContext) -> None:
        self._context = context
        self._arriving: dict[str, list[list[bytes]]] = {}
        """Bytes of each group, by rid, of requests that have not arrived."""

    def extract(self, query_id: str, req: Req, *, with_kv: bool) -> ExtractReply:
        """Return the state of `req`; sends its KV bytes first, `with_kv` and as far as they are computed."""
        kv_pages: tuple[int, ...] = ()
        groups = self._kv_of(req) if with_kv else None
        if groups is not None:
            kv_pages = tuple(self.num_pages(req.computed))
            for group, data in enumerate(groups):
                for first in range(0, len(data), PART_BYTES):
                    part = KVPart(rid=req.rid, group=group, data=data[first : first + PART_BYTES])
                    self._context.outbox.send(part)
        return ExtractReply(
            query_id=query_id,
            rid=req.rid,
            output_ids=list(req.output_ids),
            cached_tokens=req.num_cached,
            cached_details=req.cached_details,
            adapter=req.adapter_digest,
            kv_tokens=0 if groups is None else req.computed,
            kv_pages=kv_pages,
        )

    def arrived(self, part: KVPart) -> None:
        """Take a part of the KV of a request that follows."""
        groups = self._arriving.setdefault(part.rid, [[] for _ in self._context.memory.layout.groups])
        if 0 <= part.group < len(groups):
            groups[part.group].append(part.data)
        while len(self._arriving) > MAX_ARRIVING:
            del self._arriving[next(iter(self._arriving))]

    def forget(self, rid: str) -> None:
        """Drop the KV of a request that does not follow."""
        self._arriving.pop(rid, None)

    def admit(self, req: Req, admit: Callable[[Req], None]) -> None:
        """Have the role `admit` a request with the KV that came before it. A refusal drops the KV.

        Raises:
            RequestError: see `restore`, and `SchedulerRole.admit`.
        """
        self.restore(req)
        try:
            admit(req)
        except RequestError:
            self._context.retracted_kv.forget(req)
            raise

    def restore(self, req: Req) -> None:
        """Give an arriving request the KV that came before it, if any: that of its first `kv_tokens` tokens.

        Raises:
            RequestError: 409, the bytes are not those of as many tokens here.
        """
        groups = self._arriving.pop(req.rid, None)
        num_tokens = req.spec.kv_tokens
        if groups is None or not num_tokens:
            return
        data = [b"".join(parts) for parts in groups]
        layout = self._context.memory.layout
        wanted = [group.bytes_of(count) for group, count in zip(layout.groups, self.num_pages(num_tokens), strict=True)]
        if [len(own) for own in data] != wanted or num_tokens >= req.seq_len or not self._context.limits.imports_kv:
            raise RequestError(
                f"snapshot.kv: the KV of {num_tokens} tokens has {[len(own) for own in data]} bytes by group; here it "
                f"has {wanted}",
                field="snapshot.kv",
                status=409,
                code="snapshot_differs",
            )
        self._context.take_saved(req, ImportedPages(tuple(data)), num_tokens)

    def num_pages(self, num_tokens: int) -> list[int]:
        """Return the pages of each group that hold the KV of a request's first `num_tokens` tokens."""
        layout = self._context.memory.layout
        return [len(numbers_to_move(layout, group, num_tokens, 0)) for group in layout.groups]

    def _kv_of(self, req: Req) -> list[bytes] | None:
        """Return the KV bytes of each group; None: no KV is computed, or this process does not have all of it."""
        if not req.computed or (req.saved is None and req.row is None):
            return None
        return (self._context.copy_out(req) if req.saved is None else req.saved).export()
