"""DeepSeek sparse attention (DSA) over pages of index keys: which tokens of its row each token attends to.

Scores are float32. All tensor ranks compute the same ones, and select the same tokens.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch import Tensor

from pdserve.memory.layout import PageSpace
from pdserve.model.attention.latents import MAX_SCORES
from pdserve.model.attention.paged_attention import PagedPlane, gather_bucket
from pdserve.model.attention.paged_rows import PassRows, causal_mask

REUSED: Literal["reused"] = "reused"
"""Stands for the inputs of a layer whose tokens attend to those that an earlier layer has selected."""
NO_TOKEN = -1
"""Stands for a token that is not selected, where a row has fewer tokens than are selected."""


@dataclasses.dataclass(frozen=True, eq=False)
class IndexInputs:
    """What a layer computes for N tokens: queries `[N, heads, dim]`, keys `[N, dim]`, weights float32 `[N, heads]`.

    Queries and keys are rotated. `top_k`: tokens that each token selects.
    """

    query: Tensor
    key: Tensor
    weights: Tensor
    top_k: int


Index = IndexInputs | Literal["reused"]
"""Inputs of a layer's index, or REUSED."""


def select_tokens(inputs: IndexInputs, rows: PassRows, plane: PagedPlane, null_page: int) -> Tensor | None:
    """Return the tokens that each token selects, int64 `[N, top_k]`; their numbers are those of `PassRows.context`.

    `plane` holds the keys already, those of the step's tokens included. None: all rows are so short that each token
    selects all that it may see.
    """
    if int(rows.ends.max()) <= inputs.top_k:
        return None
    found = torch.full((len(inputs.query), inputs.top_k), NO_TOKEN, device=inputs.query.device)
    for bucket in rows.decodes(PageSpace.TOKENS, None, null_page):
        keys = gather_bucket(plane, bucket)[:, 0]
        query = inputs.query[bucket.tokens][:, None]
        scores = _scores(query, keys, inputs.weights[bucket.tokens][:, None])[:, 0]
        if bucket.visible is not None:
            scores = scores.masked_fill(~bucket.visible, float("-inf"))
        found[bucket.tokens] = _best(scores, inputs.top_k)
    for span in rows.extends(PageSpace.TOKENS, None):
        num_tokens, num_keys = span.end - span.start, span.end - span.first
        keys = plane.values[span.pages, 0].flatten(0, 1)[:num_keys]
        block = max(1, MAX_SCORES // (inputs.query.shape[1] * num_keys))
        for begin in range(0, num_tokens, block):
            stop = min(num_tokens, begin + block)
            tokens = slice(span.offset + begin, span.offset + stop)
            visible = causal_mask(
                span.start + begin, span.start + stop, span.first, num_keys, None, inputs.query.device
            )
            scores = _scores(inputs.query[tokens][None], keys[None], inputs.weights[tokens][None])[0]
            found[tokens] = _best(scores.masked_fill(~visible, float("-inf")), inputs.top_k)
    return found.where(found == NO_TOKEN, found + rows.context_firsts)


def _scores(query: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """Score keys `[rows, keys, dim]` for queries `[rows, tokens, heads, dim]`: `[rows, tokens, keys]`."""
    products = torch.einsum("rthd,rkd->rthk", query.float(), keys.float()) * query.shape[-1] ** -0.5
    return torch.einsum("rth,rthk->rtk", weights, products.relu_())


def _best(scores: Tensor, top_k: int) -> Tensor:
    """Return the indices of the highest scores of each line, `[lines, top_k]`; `NO_TOKEN` for those of -inf."""
    best = scores.topk(min(top_k, scores.shape[-1]), -1)
    found = best.indices.masked_fill(best.values == float("-inf"), NO_TOKEN)
    return torch.nn.functional.pad(found, (0, top_k - found.shape[-1]), value=NO_TOKEN)
