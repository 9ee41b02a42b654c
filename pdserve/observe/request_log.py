"""Logs requests as JSON lines (`--log-requests`): one line at the start of a sequence, one at its end.

Levels are SGLang's: 0 has metadata and times, 1 adds sampling parameters, 2 adds tokens and text cut at 2048
characters, 3 has them uncut. `json_lines` writes in its own thread; the event loop never waits for a disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from pdserve.observe.json_lines import JsonLines
from pdserve.observe.metrics import RequestRecord

CUT = 2048
"""Characters of text at level 2. Token ids are cut at a quarter of it: a token has about four characters."""
_SAMPLING, _SOME, _ALL = 1, 2, 3


class RequestLog:
    """A `RequestListener` that writes to `lines`. `text_of` decodes token ids; None without a tokenizer."""

    def __init__(self, lines: JsonLines, level: int, text_of: Callable[[Sequence[int]], str] | None) -> None:
        self._lines = lines
        self._level = level
        self._text_of = text_of

    @property
    def keeps_output(self) -> bool:
        """See `RequestListener`."""
        return self._level >= _SOME

    def started(self, record: RequestRecord) -> None:
        """See `RequestListener`."""
        line = self._head("request.received", record) | {
            "arrived_at": record.arrived_at,
            "intake_s": record.intake_s,
            "stream": record.request.stream,
            "prompt_tokens": record.prompt_tokens,
            "traceparent": record.traceparent,
        }
        if self._level >= _SAMPLING:
            line["sampling_params"] = msgspec.to_builtins(record.request.sampling)
        if self._level >= _SOME:
            line["input_ids"] = self._ids(record.request.input_ids)
            if self._text_of is not None:
                line["text"] = self._cut(self._text_of(line["input_ids"]))
        self._lines.write(line)

    def ended(self, record: RequestRecord) -> None:
        """See `RequestListener`."""
        failure = record.failure
        line = self._head("request.finished", record) | {
            "outcome": record.outcome,
            "matched": record.matched,
            "error": None if failure is None else failure.message,
            "code": None if failure is None else failure.code,
            "status": None if failure is None else failure.status,
            "prompt_tokens": record.prompt_tokens,
            "cached_tokens": record.cached_tokens,
            "completion_tokens": record.completion_tokens,
            "ttft_s": record.ttft_s,
            "ttft_parts": record.parts,
            "e2e_s": record.e2e_s,
            "timing": None if record.timing is None else msgspec.to_builtins(record.timing),
            "speculation": None if record.speculation is None else msgspec.to_builtins(record.speculation),
        }
        if self._level >= _SOME:
            line |= {"output_ids": self._ids(record.output_ids), "text": self._cut("".join(record.texts))}
        self._lines.write(line)

    def close(self) -> None:
        """Write the queued lines and close the file."""
        self._lines.close()

    def _head(self, event: str, record: RequestRecord) -> dict[str, Any]:
        names = {
            "request_id": record.request_id,
            "rid": record.name,
            "key": record.request.rid,
            "path": record.path,
            "room": None if record.room is None else str(record.room),  # exceeds what JSON readers keep exact
        }
        return {"at": time.time(), "event": event, **names}

    def _ids(self, ids: Sequence[int]) -> list[int]:
        return list(ids if self._level >= _ALL else ids[: CUT // 4])

    def _cut(self, text: str) -> str:
        return text if self._level >= _ALL or len(text) <= CUT else text[:CUT] + "…"
