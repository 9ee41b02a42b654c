"""Computes prompts without generation and pools their hidden states. For the endpoints of this package."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from fastapi import Request

from pdserve.errors import RequestError
from pdserve.protocol.hidden_states import HiddenParams, HiddenStates, Pooling
from pdserve.protocol.messages import GenerateRequest
from pdserve.protocol.sampling import CoreSamplingParams
from pdserve.server.context import ServerContext
from pdserve.server.generation import GenerationUpdate
from pdserve.server.http.json_http import collect, until_disconnect
from pdserve.server.pooling_api.schemas import PoolingBody

Vector = npt.NDArray[np.float32]
MANY_VALUES = 1 << 16
"""Numbers from which on an answer is made on a thread."""
_PROMPT_ONLY = CoreSamplingParams(max_new_tokens=0, temperature=0.0, speculative=False)
"""The prompt is computed, and no token is sent."""


def require_pooling(context: ServerContext, path: str) -> Pooling:
    """Return how this server's model pools hidden states.

    Raises:
        RequestError: 400, this server serves no embeddings; 503 while the engine is starting.
    """
    if context.mode != "null":
        message = f"{path} needs a server of its own: this is a {context.mode} server, and embeddings need no decode"
        raise RequestError(message, code="unsupported")
    pooling = context.client.require_ready().pooling
    if pooling is None:
        message = f"{path}: this server generates text; start one with --is-embedding for an embedding model"
        raise RequestError(message, code="unsupported")
    return pooling


def pooled_request(input_ids: list[int], pooling: Pooling) -> GenerateRequest:
    """Return the request that computes one prompt and returns what `pool` needs of its hidden states."""
    is_last = pooling.mode == "last"
    hidden = HiddenParams(start=len(input_ids) - 1 if is_last else 0, pooled=not is_last)
    return GenerateRequest(rid="", input_ids=input_ids, sampling=_PROMPT_ONLY, hidden=hidden)


def pool(parts: Sequence[HiddenStates], pooling: Pooling, dimensions: int | None = None) -> Vector:
    """Return the vector of one text, float32 `[hidden_size]`, or its first `dimensions` numbers.

    `parts`: the hidden states that its request has returned. Raises RequestError (500) if there are none.
    """
    if not parts:
        raise RequestError("the engine returned no hidden states", status=500, code="internal_error")
    vector: npt.NDArray[np.float64]
    if pooling.mode == "last":
        vector = parts[-1].rows()[-1].astype(np.float64)
    else:
        sums = np.concatenate([part.rows() for part in parts]).astype(np.float64)
        vector = sums.sum(0) / sum(part.num_tokens for part in parts)
    if dimensions is not None:
        vector = vector[:dimensions]
    if pooling.normalize:
        vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
    narrow: Vector = vector.astype(np.float32)
    return narrow


async def compute(
    context: ServerContext, request: Request, prompts: Sequence[GenerateRequest], body: PoolingBody, field: str
) -> list[GenerationUpdate]:
    """Submit `prompts`, which came in `field`, and return one whole update for each, in their order.

    Raises:
        RequestError: 400 naming the field; 503 when too many requests wait.
        ClientGoneError: the client has disconnected; the requests are aborted.
    """
    states = context.make_requests(prompts, 1, body, field, stream=False, pools=True)
    generation = await context.client.submit(states)
    with generation.closed_on_error():
        updates = await until_disconnect(request, collect(generation, len(states)))
    for update in updates:
        check_computed(update)
    return updates


def check_computed(update: GenerationUpdate) -> None:
    """Raise the error with which the scheduler has ended a prompt, if it has."""
    failure = None if update.finish is None else update.finish.failure
    if failure is not None:
        raise failure.error()


async def embed(
    context: ServerContext,
    request: Request,
    lists: Sequence[list[int]],
    body: PoolingBody,
    field: str,
    pooling: Pooling,
    dimensions: int | None = None,
) -> list[Vector]:
    """Return the vectors of the prompts `lists`, which came in `field`. Raises as `compute`."""
    prompts = [pooled_request(ids, pooling) for ids in lists]
    updates = await compute(context, request, prompts, body, field)

    def vectors() -> list[Vector]:
        return [pool(update.hidden_parts, pooling, dimensions) for update in updates]

    size = context.client.require_ready().hidden_size
    return vectors() if len(lists) * size < MANY_VALUES else await asyncio.to_thread(vectors)


def usage_of(lists: Sequence[Sequence[int]]) -> dict[str, int]:
    """Build `usage` of an answer without output tokens."""
    count = sum(map(len, lists))
    return {"prompt_tokens": count, "total_tokens": count}


def head_of(context: ServerContext, body: PoolingBody, prefix: str) -> dict[str, Any]:
    """Build the fields that all answers have."""
    return {
        "id": f"{prefix}{uuid.uuid4().hex}",
        "created": int(time.time()),
        "model": body.model or context.model_name,
    }
