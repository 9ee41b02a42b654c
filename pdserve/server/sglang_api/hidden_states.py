"""`return_hidden_states` of `/generate`: checks the field, and builds `meta_info.hidden_states`.

The list has SGLang's form: the vectors of all prompt tokens as its first entry, then one vector for each output token
but the last, whose hidden state is never computed. On a decode server the first entry is empty: prefill's answer has
the prompt's vectors, and routers put them there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from pdserve.errors import RequestError
from pdserve.protocol.hidden_states import HiddenParams, HiddenStates
from pdserve.protocol.messages import GenerateRequest
from pdserve.server.context import ServerContext
from pdserve.server.http.json_http import scalar_or_list
from pdserve.server.request.schemas import GenerateBody

FIELD = "return_hidden_states"
MAX_VALUES = 1 << 25
"""Maximum numbers of one body's hidden states: 128 MB in each process, and several times as much as JSON."""


def with_hidden_states(
    context: ServerContext, body: GenerateBody, prompts: list[GenerateRequest], n: int, *, listed: bool
) -> list[GenerateRequest]:
    """Return the prompts with what the body wants of their hidden states. `listed`: the answer is a list.

    Requests that return hidden states take no draft tokens.

    Raises:
        RequestError: 400 naming the field, also where this server, or a pair, cannot serve it.
    """
    wanted = scalar_or_list(body.return_hidden_states, len(prompts), FIELD, bool)
    if not any(wanted):
        return prompts
    if not context.config.embedding.enable_return_hidden_states:
        message = f"{FIELD}: this server is started without --enable-return-hidden-states"
        raise RequestError(message, field=FIELD, code="unsupported")
    if context.mode != "null":
        _refuse_in_pair(body, listed=listed)
    tokens = sum(
        len(prompt.input_ids) + prompt.sampling.max_new_tokens
        for prompt, want in zip(prompts, wanted, strict=True)
        if want
    )
    size = context.client.require_ready().hidden_size
    if n * tokens * size > MAX_VALUES:
        message = f"{n * tokens} tokens of {size} numbers are more than {MAX_VALUES}; send less in one body"
        raise RequestError(f"{FIELD}: {message}", field=FIELD)
    return [_with(prompt) if want else prompt for prompt, want in zip(prompts, wanted, strict=True)]


def _with(prompt: GenerateRequest) -> GenerateRequest:
    sampling = msgspec.structs.replace(prompt.sampling, speculative=False)
    return msgspec.structs.replace(prompt, sampling=sampling, hidden=HiddenParams())


def _refuse_in_pair(body: GenerateBody, *, listed: bool) -> None:
    """Refuse what routers do not merge of prefill's answer."""
    reason = None
    if body.stream:
        reason = "a stream through prefill and decode servers"
    elif listed:
        reason = "a list of answers through prefill and decode servers"
    elif body.pdserve_single_request:
        reason = "a decode server without a router"
    if reason is not None:
        message = f"{FIELD} is not supported for {reason}"
        raise RequestError(message, field=FIELD, code="unsupported")


def hidden_states(request: GenerateRequest, parts: Sequence[HiddenStates], num_output: int) -> list[Any]:
    """Build `meta_info.hidden_states` of a request with `num_output` output tokens, as arrays of float32.

    A request that ended early has the entries that were computed.
    """
    num_prompt = len(request.input_ids)
    width = parts[0].width if parts else 0
    rows = np.concatenate([part.rows() for part in parts]) if parts else np.zeros((0, width), dtype=np.float32)
    begin = parts[0].start if parts else num_prompt
    of_prompt = max(0, num_prompt - begin)
    return [rows[:of_prompt], *rows[of_prompt : of_prompt + max(0, num_output - 1)]]
