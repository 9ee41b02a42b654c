"""Merges what prefill computes of the prompt into decode's answer, which the client gets. Pure.

Prefill's `meta_info.input_token_logprobs` and the other lists of `MERGED` replace empty lists in decode's answer to
`/generate`, as in SGLang's router; also for batches and streams. The first entry of `hidden_states` is the prompt's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson

MERGED = ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs")
HIDDEN = "hidden_states"
EVENT_END = b"\n\n"
DATA = b"data:"

Metas = list[dict[str, Any]]
"""Prefill's `meta_info` of each sequence."""


def prefill_metas(body: bytes) -> Metas:
    """Return the `meta_info` of each sequence in prefill's answer: JSON, or a stream whose last events count."""
    found: dict[int, dict[str, Any]] = {}
    for index, answer in enumerate(_answers(body)):
        if isinstance(answer, dict) and isinstance(answer.get("meta_info"), dict):
            place = answer.get("index", index)
            found[place if isinstance(place, int) else index] = answer["meta_info"]
    return [found.get(index, {}) for index in range(max(found, default=-1) + 1)]


def _answers(body: bytes) -> list[Any]:
    try:
        whole = orjson.loads(body)
    except orjson.JSONDecodeError:
        events = [_parse_event(event) for event in body.split(EVENT_END)]
        return [event if not isinstance(event, dict) else {"index": 0} | event for event in events]
    return whole if isinstance(whole, list) else [whole]


def merged_body(body: bytes, metas: Metas) -> bytes:
    """Merge prefill's lists into decode's complete answer; an answer of unexpected form is returned unchanged."""
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body
    changed = False
    for index, one in enumerate(answer if isinstance(answer, list) else [answer]):
        changed |= _merge(one, metas, index)
    return orjson.dumps(answer) if changed else body


def event_merger(metas: Metas) -> Callable[[bytes, bool], bytes]:
    """Return a function that merges decode's stream: (next bytes, whether they are the last) -> bytes for the client.

    The function buffers incomplete events.
    """
    rest = b""

    def merge(chunk: bytes, last: bool) -> bytes:
        nonlocal rest
        *events, rest = (rest + chunk).split(EVENT_END)
        out = b"".join(_merge_event(event, metas) + EVENT_END for event in events)
        if last:
            out, rest = out + rest, b""
        return out

    return merge


def _merge_event(event: bytes, metas: Metas) -> bytes:
    answer = _parse_event(event)
    if not isinstance(answer, dict):
        return event
    index = answer.get("index", 0)
    return b"data: " + orjson.dumps(answer) if _merge(answer, metas, index if isinstance(index, int) else 0) else event


def _parse_event(event: bytes) -> Any:
    """Parse the JSON after `data:`; None if the event has another form."""
    if not event.startswith(DATA):
        return None
    try:
        return orjson.loads(event.removeprefix(DATA))
    except orjson.JSONDecodeError:
        return None


def _merge(answer: Any, metas: Metas, index: int) -> bool:
    """Replace decode's empty lists with prefill's; returns whether a list changed."""
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    if not isinstance(meta, dict) or not 0 <= index < len(metas):
        return False
    changed = False
    for name in MERGED:
        ours = metas[index].get(name)
        if isinstance(ours, list) and ours and meta.get(name) == []:
            meta[name] = ours
            changed = True
    ours, theirs = metas[index].get(HIDDEN), meta.get(HIDDEN)
    if isinstance(ours, list) and ours and isinstance(theirs, list) and theirs and theirs[0] == []:
        theirs[0] = ours[0]
        changed = True
    return changed
