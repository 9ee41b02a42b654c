"""Bodies of the endpoints of embeddings and scores."""

from __future__ import annotations

from typing import Literal

import msgspec

from pdserve.server.request.field_types import Hosts, Names, Ports, Prompts, Rooms
from pdserve.server.request.schemas import Priority

UNSUPPORTED_EMBEDDINGS = ("messages", "image_data", "modality", "truncate_prompt_tokens")
"""Fields of SGLang and vLLM that are refused."""


class PoolingBody(msgspec.Struct, kw_only=True):
    """Fields of all bodies that no token is generated for. The bootstrap fields have no effect, as in `/generate`."""

    model: str | None = None
    user: str | None = None
    rid: Names = None
    priority: Priority | None = None
    data_parallel_rank: int | None = None
    cache_salt: Names = None
    extra_key: Names = None
    bootstrap_host: Hosts = None
    bootstrap_port: Ports = None
    bootstrap_room: Rooms = None


class EmbeddingsBody(PoolingBody, kw_only=True):
    """`POST /v1/embeddings`. `dimensions`: leading numbers of each vector, which gets length 1 again."""

    input: Prompts = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
