"""`POST /v1/embeddings`, OpenAI's: one vector for each text."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from pdserve.errors import RequestError
from pdserve.http.access import EMBEDDINGS_PATH
from pdserve.server.context import ServerContext
from pdserve.server.http.json_http import convert, json_response, read_json_object, refuse_unsupported
from pdserve.server.pooling_api.pooling import MANY_VALUES, Vector, embed, head_of, require_pooling, usage_of
from pdserve.server.pooling_api.schemas import UNSUPPORTED_EMBEDDINGS, EmbeddingsBody
from pdserve.server.request.intake import as_prompts


async def embeddings(context: ServerContext, request: Request) -> Response:
    """Return `{object, data: [{object, index, embedding}], model, usage}`.

    `embedding` is a list of floats, or with `encoding_format` base64 the base64 of its little-endian float32 numbers.

    Raises:
        RequestError: the body is invalid, and the error names the field; 400 on a server without `--is-embedding`.
    """
    raw = await read_json_object(request, context.max_body_bytes)
    pooling = require_pooling(context, EMBEDDINGS_PATH)
    body = convert(refuse_unsupported(raw, UNSUPPORTED_EMBEDDINGS), EmbeddingsBody)
    context.check_model(body.model)
    size = context.client.require_ready().hidden_size
    if body.dimensions is not None and not 1 <= body.dimensions <= size:
        raise RequestError(f"dimensions must be in [1, {size}], got {body.dimensions}", field="dimensions")
    given, batch = as_prompts(body.input, "input", allow_text=True, allow_ids=True)
    lists = await context.token_ids(given, "input", batch=batch)
    vectors = await embed(context, request, lists, body, "input", pooling, body.dimensions)

    def answer() -> Response:
        data = [
            {"object": "embedding", "index": index, "embedding": _shown(vector, body.encoding_format)}
            for index, vector in enumerate(vectors)
        ]
        head = head_of(context, body, "embd-")
        return json_response({**head, "object": "list", "data": data, "usage": usage_of(lists)})

    return answer() if len(vectors) * size < MANY_VALUES else await asyncio.to_thread(answer)


def _shown(vector: Vector, encoding_format: str | None) -> Any:
    if encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.tolist()
