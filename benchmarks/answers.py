"""Streamed requests as their client sees them: when each token came, and from pdserve's servers which. For benchmarks.

`read_answer` reads `/generate` of servers with `--incremental-streaming-output`: each event brings what is new, so that
a long answer costs its client no more by token than a short one.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import aiohttp
import orjson

INCREMENTAL = "--incremental-streaming-output"


@dataclasses.dataclass
class Answer:
    """What has come of one answer so far.

    Times are `time.perf_counter`'s, in seconds: when the request was sent, and when each event with tokens came.
    `timing` has the fields of the last event's `RequestTiming`.
    """

    sent_s: float = 0.0
    came_s: list[float] = dataclasses.field(default_factory=list)
    output_ids: list[int] = dataclasses.field(default_factory=list)
    timing: Mapping[str, float | None] = dataclasses.field(default_factory=dict)

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token."""
        return self.came_s[0] - self.sent_s


async def read_answer(
    session: aiohttp.ClientSession, url: str, prompt: Sequence[int], output_len: int, answer: Answer
) -> None:
    """Send token ids and read the stream to its end into `answer`, greedily and past the end of text.

    Who cancels this has in `answer` what came until then.

    Raises:
        RuntimeError: no whole answer came.
    """
    sampling = {"temperature": 0, "max_new_tokens": output_len, "ignore_eos": True}
    body = {"input_ids": list(prompt), "sampling_params": sampling, "stream": True}
    async for event, now in _events(session, f"{url}/generate", body, answer):
        answer.timing = event["meta_info"]["timing"]
        if event["output_ids"]:
            answer.came_s.append(now)
            answer.output_ids += event["output_ids"]
    if len(answer.output_ids) != output_len:
        raise RuntimeError(f"{url}: {len(answer.output_ids)} of {output_len} tokens came")


async def _events(
    session: aiohttp.ClientSession, url: str, body: Mapping[str, Any], answer: Answer
) -> AsyncIterator[tuple[dict[str, Any], float]]:
    """Send a request and yield the events of its stream, each with the time when it came. Sets `answer.sent_s`.

    Raises:
        RuntimeError: the status is not 200, or an event tells of an error.
    """
    answer.sent_s = time.perf_counter()
    async with session.post(url, data=orjson.dumps(body), headers={"Content-Type": "application/json"}) as response:
        if response.status != 200:
            raise RuntimeError(f"{url}: status {response.status}: {(await response.text())[:200]}")
        async for data in events(response):
            now = time.perf_counter()
            if data == b"[DONE]":
                break
            event = orjson.loads(data)
            if "error" in event:
                raise RuntimeError(f"{url}: {event['error']}")
            yield event, now


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The data of each server-sent event, as soon as its line is complete."""
    pending = b""
    async for chunk in response.content.iter_any():
        *lines, pending = (pending + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def equal_tokens(ours: Sequence[Answer], theirs: Sequence[Answer]) -> list[bool]:
    """Of answers to the same requests: whether each begins as the other, as far as both came.

    Raises:
        ValueError: one has no tokens.
    """
    both = [(a.output_ids, b.output_ids) for a, b in zip(ours, theirs, strict=True)]
    if not all(a and b for a, b in both):
        raise ValueError("an answer has no tokens")
    return [all(x == y for x, y in zip(a, b, strict=False)) for a, b in both]
