"""`POST /v1/score` and `/v1/rerank`: how likely labels follow a text, and how well texts fit together.

| body | server | score |
|---|---|---|
| `query`, `items`, `label_token_ids` (SGLang) | generates | probabilities of the labels behind query and item |
| `text_1`, `text_2` (vLLM), and `/v1/rerank` | has a reranker's chat template | probability of "yes" against "no" |
| the same | `--is-embedding` | cosine of the two vectors |
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
from fastapi import Request
from fastapi.responses import Response

from pdserve.errors import RequestError
from pdserve.http.access import RERANK_PATH, SCORE_PATH
from pdserve.protocol.hidden_states import Pooling
from pdserve.protocol.logprobs import Logprobs
from pdserve.protocol.messages import GenerateRequest
from pdserve.protocol.sampling import CoreSamplingParams
from pdserve.server.context import ServerContext
from pdserve.server.http.json_http import convert, json_response, read_json_object, refuse_unsupported
from pdserve.server.pooling_api.pooling import compute, embed, head_of, usage_of
from pdserve.server.pooling_api.schemas import UNSUPPORTED_SCORES, PoolingBody, RerankBody, ScoreBody
from pdserve.server.request.intake import MAX_PROMPTS, check_token_ids, prompt_field

MAX_LABELS = 1024
"""Maximum number of `label_token_ids`."""
ROLES = ("query", "document")
"""Roles of the messages of a pair of texts in a reranker's chat template, as in vLLM and sentence-transformers."""
_ONE_TOKEN = CoreSamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True, speculative=False)
Pairs = list[tuple[str, str]]


async def score(context: ServerContext, request: Request) -> Response:
    """Serve `/v1/score`: SGLang's answer to SGLang's body, vLLM's to vLLM's.

    Raises:
        RequestError: 400 naming the field; also where this server's model cannot give such scores.
    """
    raw = await read_json_object(request, context.max_body_bytes)
    _refuse_role(context, SCORE_PATH)
    body = convert(refuse_unsupported(raw, UNSUPPORTED_SCORES), ScoreBody)
    context.check_model(body.model)
    if body.text_1 is None and body.text_2 is None:
        return await _label_scores(context, request, body)
    for field in ("query", "items", "label_token_ids"):
        if getattr(body, field) is not None:
            raise RequestError(f"{field} does not go with text_1 and text_2", field=field)
    pairs = _pairs(body)
    scores, usage = await _score_pairs(context, request, pairs, body, "text_2", body.instruct)
    data = [{"index": index, "object": "score", "score": value} for index, value in enumerate(scores)]
    return json_response({**head_of(context, body, "score-"), "object": "list", "data": data, "usage": usage})


async def rerank(context: ServerContext, request: Request) -> Response:
    """Serve `/v1/rerank` in the form of Jina, Cohere and vLLM: documents in the order of their relevance to a query.

    Raises:
        RequestError: 400 naming the field; also where this server's model cannot rank.
    """
    raw = await read_json_object(request, context.max_body_bytes)
    _refuse_role(context, RERANK_PATH)
    body = convert(refuse_unsupported(raw, UNSUPPORTED_SCORES), RerankBody)
    context.check_model(body.model)
    if not body.query:
        raise RequestError("query must be a text that is not empty", field="query")
    documents = _documents(body)
    if body.top_n is not None and body.top_n < 1:
        raise RequestError(f"top_n must be at least 1, got {body.top_n}", field="top_n")
    pairs = [(body.query, document) for document in documents]
    scores, usage = await _score_pairs(context, request, pairs, body, "documents", body.instruct)
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n]
    shown = body.return_documents is not False
    results = [
        {
            "index": index,
            **({"document": {"text": documents[index]}} if shown else {}),
            "relevance_score": scores[index],
        }
        for index in order
    ]
    return json_response({**head_of(context, body, "rerank-"), "results": results, "usage": usage})


def _refuse_role(context: ServerContext, path: str) -> None:
    if context.mode != "null":
        message = f"{path} needs a server of its own: this is a {context.mode} server, and scores need no decode"
        raise RequestError(message, code="unsupported")


# ---------------------------------------------------------------------- labels


async def _label_scores(context: ServerContext, request: Request, body: ScoreBody) -> Response:
    """Answer SGLang's body: for each item a probability of each label as the token behind query and item."""
    if context.config.embedding.is_embedding:
        message = "label_token_ids needs a model that generates; this server has an embedding model (--is-embedding)"
        raise RequestError(message, field="label_token_ids", code="unsupported")
    labels = body.label_token_ids
    if not labels:
        raise RequestError("label_token_ids must be a list of token ids that is not empty", field="label_token_ids")
    if len(labels) > MAX_LABELS:
        message = f"label_token_ids takes at most {MAX_LABELS} token ids, got {len(labels)}"
        raise RequestError(message, field="label_token_ids")
    check_token_ids(labels, context.limits().vocab_size, "label_token_ids")
    lists = await context.token_ids(_joined(body), "items", batch=True)
    logprobs = await _logprobs_of(context, request, lists, tuple(labels), body, "items")
    scores = [softmax(own) if body.apply_softmax else np.exp(own).tolist() for own in logprobs]
    head = head_of(context, body, "score-")
    return json_response({**head, "object": "scoring", "scores": scores, "usage": usage_of(lists)})


def _joined(body: ScoreBody) -> list[str | list[int]]:
    """Return the prompt of each item: query and item, or with `item_first` item and query. All texts, or all ids."""
    query, items = body.query, body.items
    if not isinstance(query, str | list) or not query:
        raise RequestError("query must be a text or a list of token ids that is not empty", field="query")
    if isinstance(items, str):
        items = [items]
    if not isinstance(items, list) or not items:
        raise RequestError("items must be a text, or a list of texts or of token id lists", field="items")
    if len(items) > MAX_PROMPTS:
        raise RequestError(f"items has {len(items)} entries; the maximum is {MAX_PROMPTS}", field="items")
    kind = type(query)
    for index, item in enumerate(items):
        if type(item) is not kind:
            field = prompt_field("items", index, batch=True)
            raise RequestError(f"{field} must be {'a text' if kind is str else 'token ids'}, as query is", field=field)
    return [item + query if body.item_first else query + item for item in items]


async def _logprobs_of(
    context: ServerContext,
    request: Request,
    lists: Sequence[list[int]],
    labels: tuple[int, ...],
    body: PoolingBody,
    field: str,
) -> list[list[float]]:
    """Return for each prompt the natural log of the probability of each label as its next token."""
    prompts = [label_request(ids, labels) for ids in lists]
    updates = await compute(context, request, prompts, body, field)
    return [list(update.logprobs[0].picked) for update in updates]


def label_request(input_ids: list[int], labels: tuple[int, ...]) -> GenerateRequest:
    """Return the request whose output has the log probabilities of `labels` as the next token."""
    wanted = Logprobs(output=True, token_ids=labels)
    return GenerateRequest(rid="", input_ids=input_ids, sampling=_ONE_TOKEN, logprobs=wanted)


def softmax(logprobs: Sequence[float]) -> list[float]:
    """Return the probabilities of labels among themselves."""
    values = np.exp(np.asarray(logprobs, dtype=np.float64) - max(logprobs))
    scores: list[float] = (values / values.sum()).tolist()
    return scores


# ---------------------------------------------------------------------- pairs


def _pairs(body: ScoreBody) -> Pairs:
    """Return the pairs of texts of vLLM's body: one with each, or as many of both."""
    sides = []
    for field in ("text_1", "text_2"):
        given = getattr(body, field)
        sides.append(_texts([given] if isinstance(given, str) else given, field))
    first, second = sides
    if len(first) not in (1, len(second)):
        message = f"text_1 has {len(first)} texts and text_2 {len(second)}; it must have one, or as many"
        raise RequestError(message, field="text_1")
    return list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))


def _documents(body: RerankBody) -> list[str]:
    given = body.documents
    if isinstance(given, list):
        given = [each.get("text") if isinstance(each, dict) else each for each in given]
    return _texts(given, "documents")


def _texts(given: Any, field: str) -> list[str]:
    """Check that `given` is a list of texts that are not empty. Raises RequestError naming `field`, or an entry."""
    if not isinstance(given, list) or not given:
        raise RequestError(f"{field} must be a list of texts that is not empty", field=field)
    if len(given) > MAX_PROMPTS:
        raise RequestError(f"{field} has {len(given)} entries; the maximum is {MAX_PROMPTS}", field=field)
    for index, text in enumerate(given):
        if not isinstance(text, str) or not text:
            name = prompt_field(field, index, batch=True)
            raise RequestError(f"{name} must be a text that is not empty", field=name)
    return given


async def _score_pairs(
    context: ServerContext, request: Request, pairs: Pairs, body: PoolingBody, field: str, instruct: str | None
) -> tuple[list[float], dict[str, int]]:
    """Return the score of each pair of texts, and the usage. `field` has the second texts."""
    pooling = context.client.require_ready().pooling
    if pooling is not None:
        if instruct is not None:
            message = "instruct is for rerankers; put it into the text of an embedding model"
            raise RequestError(message, field="instruct", code="unsupported")
        return await _cosines(context, request, pairs, body, field, pooling)
    lists, labels = await reranker_prompts(context, pairs, field, instruct)
    logprobs = await _logprobs_of(context, request, lists, labels, body, field)
    return [softmax(own)[0] for own in logprobs], usage_of(lists)


async def reranker_prompts(
    context: ServerContext, pairs: Sequence[tuple[str, str]], field: str, instruct: str | None
) -> tuple[list[list[int]], tuple[int, int]]:
    """Return the prompts in which a reranker judges `pairs`, and the ids of its tokens "yes" and "no".

    Raises:
        RequestError: 400 naming `field`: the model is no reranker, or a prompt is too long.
    """
    template = "" if context.tokenizer is None else context.tokenizer.chat.text() or ""
    if not is_reranker(template):
        raise RequestError(
            "this model ranks no texts: it needs --is-embedding, or the chat template of a reranker "
            "(--chat-template qwen3_reranker)",
            field=field,
            code="unsupported",
        )
    tokenizer = context.require_tokenizer(field)
    labels = await _only_token(context, "yes"), await _only_token(context, "no")
    texts = []
    for pair in pairs:
        texts.append(await tokenizer.render_chat(_messages(*pair, instruct), template, {}))
        await asyncio.sleep(0)
    limits = context.limits()
    lists = await tokenizer.encode_all(
        texts,
        lambda index: prompt_field(field, index, batch=True),
        add_special_tokens=False,
        most_tokens=limits.most_prompt_tokens,
        most_in_all=limits.most_body_tokens,
    )
    return lists, labels


def is_reranker(template: str) -> bool:
    """Whether a chat template makes a prompt of a query and a document: it names both roles."""
    return all(f'"{role}"' in template or f"'{role}'" in template for role in ROLES)


def _messages(query: str, document: str, instruct: str | None) -> list[dict[str, str]]:
    messages = [{"role": role, "content": text} for role, text in zip(ROLES, (query, document), strict=True)]
    return messages if instruct is None else [{"role": "system", "content": instruct}, *messages]


async def _only_token(context: ServerContext, text: str) -> int:
    """Return the id of the only token of `text`. Raises RequestError where the tokenizer makes several."""
    ids = await context.require_tokenizer("query").encode(text, field="query", add_special_tokens=False)
    if len(ids) != 1:
        raise RequestError(f"this model ranks no texts: {text!r} is not one token", code="unsupported")
    return ids[0]


async def _cosines(
    context: ServerContext, request: Request, pairs: Pairs, body: PoolingBody, field: str, pooling: Pooling
) -> tuple[list[float], dict[str, int]]:
    """Return the cosine of the vectors of each pair. Equal texts are computed once."""
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))
    lists = await context.token_ids(texts, field, batch=True)
    unit = Pooling(mode=pooling.mode, normalize=True)
    vectors = dict(zip(texts, await embed(context, request, lists, body, field, unit), strict=True))
    return [float(vectors[first] @ vectors[second]) for first, second in pairs], usage_of(lists)
