"""The bootstrap fields that both halves of a request carry. Pure; called by `dispatch` once per try.

The shape follows SGLang's router: one value for a single prompt, LISTS for a batch and for chat with n > 1.
Completions and `/generate` with n > 1 carry one room per prompt, and sequence i uses room + i.
"""

from __future__ import annotations

import random
from typing import Any

from pdserve.protocol.messages import MAX_ROOM

CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"
GENERATE_PATH = "/generate"
RESPONSES_PATH = "/v1/responses"
GENERATING = (CHAT_PATH, COMPLETIONS_PATH, GENERATE_PATH, RESPONSES_PATH)
MAX_SEQUENCES = 8192
"""No worker takes a larger n or more prompts; beyond it the body is refused there, whatever its rooms."""


def batch_size(path: str, body: dict[str, Any]) -> int | None:
    """How many rooms the request needs as a list; None for a single room.

    Wrong types count as a single room: refusing them is the worker's business.
    """
    if path == RESPONSES_PATH:
        return None
    if path == CHAT_PATH:
        sequences = num_sequences(body)
        return sequences if sequences > 1 else None
    if path == COMPLETIONS_PATH:
        prompts = body.get("prompt")
    else:
        prompts = body.get("text") if body.get("input_ids") is None else body["input_ids"]
    if isinstance(prompts, list) and prompts and isinstance(prompts[0], (str, list)):
        return len(prompts) if len(prompts) <= MAX_SEQUENCES else None
    return None


def num_sequences(body: dict[str, Any]) -> int:
    """`n` of a request (`/generate` has it in `sampling_params`), 1 where absent or not a sensible number."""
    params = body.get("sampling_params")
    n = params.get("n", 1) if isinstance(params, dict) else body.get("n", 1)
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MAX_SEQUENCES:
        return 1
    return n


def mint(rng: random.Random, sequences: int) -> int:
    """A room such that room + i stays within 63 bits for every sequence i."""
    return rng.randrange(MAX_ROOM - sequences + 2)


def with_rooms(path: str, body: dict[str, Any], host: str, port: int | None, rng: random.Random) -> dict[str, Any]:
    """The body with fresh `bootstrap_host`, `bootstrap_port` and `bootstrap_room`; the client's own are replaced."""
    size = batch_size(path, body)
    sequences = num_sequences(body)
    if size is None:
        return body | {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": mint(rng, sequences)}
    rooms = [mint(rng, sequences) for _ in range(size)]
    return body | {"bootstrap_host": [host] * size, "bootstrap_port": [port] * size, "bootstrap_room": rooms}
