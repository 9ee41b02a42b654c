"""Checksums of a request's KV before it is sent and after it has arrived. Scheduler thread only.

    prefill   computed: hashes each page once it is whole, before the page is sent
              sent: writes a log line, and returns the checksum that goes to decode with `TransferDone`
    decode    received: hashes the received pages before any step reads them; writes a log line; compares with `verify`

`engine/assemble` makes a `KVChecksum` when `--log-kv-target` or `--disaggregation-enable-kv-checksum` is given; the
roles hold None otherwise. `python -m pdserve.observe.compare_kv` joins the lines of both sides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from pdserve.executor.kv_pages import KVHasher
from pdserve.memory.layout import KVLayout
from pdserve.memory.lease import numbers_with, pages_at
from pdserve.protocol.failure import Failure
from pdserve.scheduler.request import Req
from pdserve.transfer.checksum import RankDigest, checksum
from pdserve.transfer.wire import MemoryKey

WriteLine = Callable[[dict[str, Any]], None]


class KVChecksum:
    """Hashes the KV that a role sends or receives.

    `write` receives the log lines; None: no log. With `verify`, decode rejects KV whose checksum differs.
    """

    def __init__(
        self, hasher: KVHasher, layout: KVLayout, facts: dict[str, Any], write: WriteLine | None, *, verify: bool
    ) -> None:
        self._hasher = hasher
        self._layout = layout
        self._facts = facts
        self._write = write
        self._verify = verify
        self._found: dict[str, tuple[int, int, tuple[RankDigest, ...]]] = {}
        """By rid of a request in transfer: first page that is sent, end of the hashed pages, and their digests by rank.
        """

    def computed(self, req: Req, num_pages: int, num_tokens: int | None = None) -> None:
        """Hash the first `num_pages` pages of the request, which are whole and are sent next.

        `num_tokens`: tokens whose KV is sent in all; None: the request's input.
        """
        assert req.sender is not None and req.lease is not None
        if req.sender.is_fake:
            return
        cached = self._layout.whole_pages(req.sender.num_cached_tokens)
        first, end, digests = self._found.get(req.rid, (cached, cached, ()))
        if num_pages <= end:
            return
        more = self._digest(req, range(end, num_pages), num_tokens)
        if digests:
            more = tuple(old.with_more(new) for old, new in zip(digests, more, strict=True))
        self._found[req.rid] = (first, num_pages, more)

    def sent(self, req: Req, num_tokens: int | None = None) -> str | None:
        """Return the checksum of all pages that decode receives; None when decode receives no page. Writes the log
        line.
        """
        assert req.sender is not None and req.lease is not None
        found = self._found.pop(req.rid, None)
        key = req.sender.key
        if found is None or key is None:
            return None
        first, end, digests = found
        total = checksum(digests)
        self._line("kv.sent", req, key, first, req.lease.pages[first:end], digests, total, num_tokens)
        return total

    def forget(self, req: Req) -> None:
        """Drop the digests of a request that has ended."""
        self._found.pop(req.rid, None)

    def received(self, req: Req) -> Failure | None:
        """Hash the received pages and write the log line; with `verify`, return a failure when the checksum differs."""
        assert req.receiver is not None and req.lease is not None
        if req.receiver.is_fake:
            return None
        first = req.lease.num_prefix_pages
        end = self._layout.pages_for(req.num_input_tokens)
        pages = req.lease.pages[first:end]
        digests = self._digest(req, range(first, end)) if pages else ()
        total = checksum(digests) if digests else None
        if digests:
            self._line("kv.received", req, req.receiver.key, first, pages, digests, total)
        expected = req.receiver.stats.kv_checksum
        if not self._verify or total == expected:
            return None
        message = f"the received KV differs from the KV that was sent: checksum {total}, expected {expected}"
        return Failure(code="kv_checksum_mismatch", message=message, origin="decode", status=502)

    def _digest(self, req: Req, pages: range, num_tokens: int | None = None) -> tuple[RankDigest, ...]:
        """Return the digests of the token pages with these numbers, and of the pages that move with them."""
        lease, layout = req.lease, self._layout
        assert lease is not None
        num_tokens = req.num_input_tokens if num_tokens is None else num_tokens
        numbers = [numbers_with(layout, group, pages, num_tokens) for group in layout.groups]
        found = [pages_at(group, lease, own) for group, own in zip(layout.groups, numbers, strict=True)]
        return self._hasher.digest(found, [own.start for own in numbers], num_tokens)

    def _line(
        self,
        event: str,
        req: Req,
        key: MemoryKey,
        first: int,
        pages: Sequence[int],
        digests: Sequence[RankDigest],
        total: str | None,
        num_tokens: int | None = None,
    ) -> None:
        if self._write is None:
            return
        self._write(
            {
                "at": time.time(),
                "event": event,
                "rid": req.rid,
                "request_id": req.spec.request_id,
                "room": str(key.room),
                "key": f"{key.room}/{key.attempt}/{key.origin}",
                **self._facts,
                "num_tokens": req.num_input_tokens if num_tokens is None else num_tokens,
                "first_page": first,
                "pages": list(pages),
                "bytes": len(pages) * self._facts["page_bytes"],
                "checksum": total,
                "ranks": [digest_as_json(digest) for digest in digests],
            }
        )


def digest_as_json(digest: RankDigest) -> dict[str, Any]:
    """Return the entry of one rank in a log line."""
    groups = []
    for group in digest.groups:
        planes = group.planes
        cells, pages = group.cell_array(), group.page_array()
        groups.append(
            {
                "name": group.name,
                "layers": list(group.layers),
                "heads": list(group.heads),
                "cells": {
                    plane: [[f"{int(cell):08x}" for cell in layer] for layer in cells[:, index]]
                    for index, plane in enumerate(planes)
                },
                "pages": {plane: [f"{int(page):08x}" for page in pages[:, i]] for i, plane in enumerate(planes)},
            }
        )
    return {"rank": digest.rank, "groups": groups}
