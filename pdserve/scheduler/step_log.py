"""Writes the tokens of each decode step (`--log-kv-target`), to find the step at which two runs part.

`engine/build` makes a `DecodeStepLog` on rank 0 of decode and monolith servers; the roles hold None without the flag.
"""

from __future__ import annotations

import time
from typing import Any

from pdserve.memory.layout import KVLayout
from pdserve.protocol.messages import FinishReason
from pdserve.scheduler.kv_checksum import WriteLine
from pdserve.scheduler.request import Req


class DecodeStepLog:
    """Collects the rows of a step and writes them as one `decode.step` line. Scheduler thread only."""

    def __init__(self, write: WriteLine, layout: KVLayout, *, dp_rank: int) -> None:
        self._write = write
        self._layout = layout
        self._dp_rank = dp_rank
        self._rows: list[dict[str, Any]] = []

    def add(self, req: Req, num_tokens: int, finish: FinishReason | None) -> None:
        """Add a request that has just got `num_tokens` tokens, a row for each.

        Its first token is left out: a prefill has computed that.
        """
        num_out = len(req.output_ids)
        for number in range(max(1, num_out - num_tokens), num_out):
            position = req.num_prompt + number - 1
            is_last = number == num_out - 1
            self._rows.append(
                {
                    "rid": req.rid,
                    "request_id": req.spec.request_id,
                    "position": position,
                    "last_token": req.output_ids[number - 1],
                    "next_token": req.output_ids[number],
                    "kv_index": self._kv_index(req, position),
                    "finish_reason": finish.type if finish is not None and is_last else None,
                }
            )

    def end_step(self, step: int) -> None:
        """Write the line of step `step`; none if no request got a token."""
        if self._rows:
            line = {"at": time.time(), "event": "decode.step", "dp_rank": self._dp_rank, "step": step}
            self._write(line | {"rows": self._rows})
            self._rows = []

    def _kv_index(self, req: Req, position: int) -> int | None:
        """The token slot of the KV pool that holds the KV of the token at `position`; None without pages."""
        if req.lease is None:
            return None
        page_tokens = self._layout.page_tokens
        return req.lease.pages[position // page_tokens] * page_tokens + position % page_tokens
