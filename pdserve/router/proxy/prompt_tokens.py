"""The token ids of requests, for policies that compare prompts by tokens (`kv_aware`).

    /generate, /v1/completions   token ids as given; text by a worker's `/tokenize`
    /v1/chat/completions         by a worker's `/tokenize`, which applies the chat template
    others                       none: such a request is routed by load

Of a batch it is the first prompt. A failed or late call of `/tokenize` is counted; the request has no tokens then, and
the worker that gets it says what is wrong with it. Made by `app`.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from typing import Any

import orjson
from aiohttp import web

from pdserve.http.access import CHAT_PATH, COMPLETIONS_PATH, GENERATE_PATH
from pdserve.observe.kv_keys import PromptKeys
from pdserve.protocol.cached_tokens import joined_salt
from pdserve.router.policies import RoutedRequest
from pdserve.router.policies.routing_keys import SALT_FIELDS, first_prompt
from pdserve.router.workers.fanout import WorkerFanout
from pdserve.router.workers.metrics import RouterMetrics

TIMEOUT_S = 1.0
"""Most seconds that a request waits for `/tokenize`."""
PATH = "/tokenize"


class PromptTokenizer:
    """Adds token ids to requests. Not `enabled`: no policy uses them."""

    def __init__(self, fanout: WorkerFanout, metrics: RouterMetrics, *, enabled: bool) -> None:
        self._fanout, self._metrics, self.enabled = fanout, metrics, enabled

    async def tokenized(self, request: web.Request, body: Mapping[str, Any], routed: RoutedRequest) -> RoutedRequest:
        """Return `routed` with the tokens of the request; unchanged if they are not found in time.

        `body`: for the workers, with the whole prompt of a session.
        """
        source, ids = await self._token_ids(request, body)
        tokens = None if ids is None else keys_of(body, ids)
        self._metrics.prompt_tokens.labels("failed" if ids is not None and tokens is None else source).inc()
        return dataclasses.replace(routed, tokens=tokens)

    async def _token_ids(self, request: web.Request, body: Mapping[str, Any]) -> tuple[str, list[int] | None]:
        """Return the source of the token ids, for the metric, and the ids; None if there are none."""
        asked: Mapping[str, Any] | None = None
        if request.path == CHAT_PATH and isinstance(body.get("messages"), list):
            asked = {name: value for name, value in body.items() if name not in ("prompt", "stream")}
        elif request.path in (GENERATE_PATH, COMPLETIONS_PATH) and body.get("input_embeds") is None:
            given = first_prompt(body)
            if isinstance(given, list):
                return "given", given
            if isinstance(given, str):
                asked = {"prompt": given}
        if asked is None:
            return "none", None
        try:
            async with asyncio.timeout(TIMEOUT_S):
                answer = await self._fanout.query(request, PATH, orjson.dumps(asked), spread=True)
        except TimeoutError:
            return "timeout", None
        except orjson.JSONEncodeError:
            return "failed", None
        ids = None if answer is None or answer.status != 200 else _tokens(answer.body)
        return ("failed", None) if ids is None else ("tokenized", ids)


def keys_of(body: Mapping[str, Any], token_ids: list[int]) -> PromptKeys | None:
    """Return the keys of a body's first prompt with these tokens; None if a field is malformed."""
    salts = [_first(body.get(field)) for field in SALT_FIELDS]
    adapter, model = _first(body.get("lora_path")), body.get("model")
    if not all(isinstance(value, str | None) for value in (*salts, adapter, model)):
        return None
    try:
        return PromptKeys(token_ids, adapter=adapter, model=model, salt=joined_salt(*salts))
    except ValueError:
        return None


def _first(value: Any) -> Any:
    """Return the value of the first prompt of a field that is given once, or as a list by prompt."""
    return value[0] if isinstance(value, list) and value else value


def _tokens(answer: bytes) -> list[int] | None:
    """Return `tokens` of an answer of `/tokenize`; None if it is something else."""
    try:
        value = orjson.loads(answer)
    except orjson.JSONDecodeError:
        return None
    tokens = value.get("tokens") if isinstance(value, dict) else None
    return tokens if isinstance(tokens, list) else None
