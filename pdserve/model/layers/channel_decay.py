"""Products of keys and queries within a block where each channel of a key decays on its own (arXiv:2510.26692).

Token i reads key j with the weights `exp(G_i - G_j)` of the channels, G being the running sum of a channel's log
decays. The weight is at most 1, but `exp(-G_j)` alone may overflow. So the block is cut into parts of `PART` tokens.
Queries and keys of a part meet earlier keys by way of the part's first token r: the weight is
`exp(G_i - G_r) * exp(G_r - G_j)`, whose factors are at most 1. Within a part the keys decay token by token.
"""

from __future__ import annotations

import torch
from torch import Tensor

PART = 16
"""Tokens of a part."""


def decayed_scores(q: Tensor, rated: Tensor, k: Tensor, log_decay: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return running sums of `log_decay`, and the products of `q` and of `rated` with keys `k` at or before them.

    All are `[n, heads, C, key_dim]`; C is a multiple of PART. Products with later keys are 0.

    Returns:
        The sums, with the shape of `log_decay`, and two tensors `[n, heads, C, C]`.
    """
    sums, length = log_decay.cumsum(-2), q.shape[-2]
    readers = torch.stack((q, rated))
    scores = q.new_zeros(*readers.shape[:-1], length)
    within = _scores_in_parts(readers, k, log_decay)
    for number, first in enumerate(range(0, length, PART)):
        part, own = slice(first, first + PART), sums[..., first : first + PART, :]
        scores[..., part, part] = within[..., number, :, :]
        if first:
            entry = own[..., :1, :]
            earlier = k[..., :first, :] * (entry - sums[..., :first, :]).exp()
            scores[..., part, :first] = (readers[..., part, :] * (own - entry).exp()) @ earlier.mT
    return sums, scores[0], scores[1]


def _scores_in_parts(readers: Tensor, k: Tensor, log_decay: Tensor) -> Tensor:
    """Return the products of `readers` `[2, n, heads, C, key_dim]` with the keys of their parts, up to their own.

    Returns:
        `[2, n, heads, C / PART, PART, PART]`.
    """
    num_parts = readers.shape[-2] // PART
    keys, decays, queries = (
        x.reshape(*x.shape[:-2], num_parts, PART, x.shape[-1]) for x in (k, log_decay.exp(), readers)
    )
    columns = queries.movedim(0, -1)
    decayed, scores = torch.empty_like(keys), columns.new_zeros(*columns.shape[:-2], PART, 2)
    for token in range(PART):
        decayed[..., :token, :] *= decays[..., token : token + 1, :]
        decayed[..., token, :] = keys[..., token, :]
        scores[..., token, : token + 1, :] = decayed[..., : token + 1, :] @ columns[..., token, :, :]
    return scores.movedim(-1, 0)
