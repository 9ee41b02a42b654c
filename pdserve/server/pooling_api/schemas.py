"""Bodies of the endpoints of embeddings and scores."""

from __future__ import annotations

from typing import Literal

import msgspec

from pdserve.server.request.field_types import (
    Documents,
    Hosts,
    Names,
    Ports,
    Prompts,
    QueryText,
    Rooms,
    ScoredItems,
    Texts,
)
from pdserve.server.request.schemas import Priority

UNSUPPORTED_EMBEDDINGS = ("messages", "image_data", "modality", "truncate_prompt_tokens")
"""Fields of SGLang and vLLM that are refused."""

UNSUPPORTED_SCORES = (
    *("data_1", "data_2", "max_tokens_per_doc", "max_chunks_per_doc", "rank_fields", "return_pooled_hidden_states"),
    "truncate_prompt_tokens",
)


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


class ScoreBody(PoolingBody, kw_only=True):
    """`POST /v1/score`: `query`, `items` and `label_token_ids` (SGLang), or `text_1` and `text_2` (vLLM).

    `apply_softmax`: over the labels; else the probabilities of the model. `instruct`: for the template of a reranker.
    """

    query: QueryText = None
    items: ScoredItems = None
    label_token_ids: list[int] | None = None
    apply_softmax: bool | None = None
    item_first: bool | None = None
    text_1: Texts = None
    text_2: Texts = None
    instruct: str | None = None


class RerankBody(PoolingBody, kw_only=True):
    """`POST /v1/rerank`. `top_n`: the best documents; None: all. `instruct`: for the template of a reranker."""

    query: str | None = None
    documents: Documents = None
    top_n: int | None = None
    return_documents: bool | None = None
    instruct: str | None = None
