"""`input_embeds` of `/generate`: prompts as outputs of the embedding layer instead of token ids.

A prompt is SGLang's list of float lists `[tokens, hidden_size]`, or the base64 of as many little-endian float32
numbers, which is shorter and has no part in the limit on JSON values. The tokens of such a prompt have the id
`PLACEHOLDER`. A salt that depends on the numbers keeps their cached KV apart.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from pdserve.errors import RequestError
from pdserve.protocol.hidden_states import HiddenArray
from pdserve.protocol.messages import GenerateRequest
from pdserve.server.context import ServerContext
from pdserve.server.request.intake import MAX_PROMPTS, prompt_field
from pdserve.server.request.sampling_fields import check_prompt_fits
from pdserve.server.request.schemas import GenerateBody

FIELD = "input_embeds"
PLACEHOLDER = 0


def is_batch(value: Any) -> bool:
    """Whether `input_embeds` has several prompts, or a list of one."""
    if not isinstance(value, list) or not value:
        return False
    first = value[0]
    return isinstance(first, str) or (isinstance(first, list) and bool(first) and isinstance(first[0], list))


def check_embeds_alone(body: GenerateBody) -> None:
    """Check that a body with `input_embeds` has no other prompt. Raises RequestError, 400."""
    for field in ("text", "input_ids", "session_params"):
        if getattr(body, field) is not None:
            raise RequestError(f"{FIELD} does not go with {field}", field=FIELD)


async def embeds_of(context: ServerContext, value: Any) -> list[bytes]:
    """Return the embeddings of each prompt in `value`, as little-endian float32.

    Raises:
        RequestError: 400 naming the prompt, or `input_embeds` where this model takes none.
    """
    ready = context.client.require_ready()
    if not ready.takes_embeds:
        message = f"{FIELD}: this model runs through transformers, which takes token ids only"
        raise RequestError(message, field=FIELD, code="unsupported")
    batch = is_batch(value)
    prompts = value if batch else [value]
    if len(prompts) > MAX_PROMPTS:
        raise RequestError(f"{FIELD} has {len(prompts)} prompts; the maximum is {MAX_PROMPTS}", field=FIELD)
    names = [prompt_field(FIELD, index, batch=batch) for index in range(len(prompts))]

    def parse() -> list[HiddenArray]:
        return [_parse(prompt, ready.hidden_size, name) for prompt, name in zip(prompts, names, strict=True)]

    arrays = await asyncio.to_thread(parse)
    for array, name in zip(arrays, names, strict=True):
        check_prompt_fits(len(array), context.limits(), name)
    return [array.astype("<f4").tobytes() for array in arrays]


def _parse(prompt: Any, width: int, name: str) -> HiddenArray:
    """Return float32 `[tokens, width]`. Raises RequestError naming `name`."""
    if isinstance(prompt, str):
        array = _decode(prompt, width, name)
    else:
        try:
            found = np.asarray(prompt)
        except ValueError:
            found = np.zeros(0, dtype=object)
        if found.ndim != 2 or found.dtype.kind not in "fiu":
            raise RequestError(f"{name} must be a list of float lists of equal length, or base64", field=name)
        with np.errstate(over="ignore"):
            array = found.astype(np.float32)
    if array.shape[1] != width:
        message = f"{name} has {array.shape[1]} numbers for a token; this model's hidden size is {width}"
        raise RequestError(message, field=name)
    if not len(array):
        raise RequestError(f"{name} must not be empty", field=name)
    if not np.isfinite(array).all():
        raise RequestError(f"{name} must have finite float32 numbers", field=name)
    return array


def _decode(text: str, width: int, name: str) -> HiddenArray:
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"{name} is not base64: {error}", field=name) from error
    if len(data) % (4 * width):
        message = f"{name} has {len(data)} bytes; a token of this model has {4 * width}"
        raise RequestError(message, field=name)
    return np.frombuffer(data, "<f4").reshape(-1, width)


def placeholders(context: ServerContext, embeds: Sequence[bytes]) -> list[list[int]]:
    """Return the token ids of prompts with these embeddings."""
    width = context.client.require_ready().hidden_size
    return [[PLACEHOLDER] * (len(data) // (4 * width)) for data in embeds]


def with_embeds(requests: Sequence[GenerateRequest], embeds: Sequence[bytes]) -> list[GenerateRequest]:
    """Give each request its input embeddings. They take no draft tokens.

    Raises:
        RequestError: 400, a request wants log probabilities of its prompt, which has no tokens.
    """
    if any(request.logprobs is not None and request.logprobs.prompt_from is not None for request in requests):
        raise RequestError(f"logprob_start_len does not go with {FIELD}", field="logprob_start_len")
    return [
        msgspec.structs.replace(
            request, input_embeds=data, sampling=msgspec.structs.replace(request.sampling, speculative=False)
        )
        for request, data in zip(requests, embeds, strict=True)
    ]
