"""Products of keys and queries within a block where each channel of a key decays on its own (arXiv:2510.26692).

Token i reads key j with the weights `exp(G_i - G_j)` of the channels, G being the running sum of a channel's log
decays. The weight is at most 1, but `exp(-G_j)` alone may overflow. So the block is cut into parts of `PART` tokens.
Queries and keys of a part meet earlier keys by way of the part's first token r: the weight is
`exp(G_i - G_r) * exp(G_r - G_j)`, whose factors are at most 1. Within a part the weights of all pairs are computed.
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
    sums = log_decay.cumsum(-2)
    length = q.shape[-2]
    scores = q.new_zeros(2, *q.shape[:-1], length)
    readers = torch.stack((q, rated))
    hidden = torch.ones(PART, PART, dtype=torch.bool, device=q.device).triu(1)[..., None]
    for first in range(0, length, PART):
        part, own = slice(first, first + PART), sums[..., first : first + PART, :]
        if first:
            entry = own[..., :1, :]
            earlier = k[..., :first, :] * (entry - sums[..., :first, :]).exp()
            scores[..., part, :first] = (readers[..., part, :] * (own - entry).exp()) @ earlier.mT
        between = (own[..., :, None, :] - own[..., None, :, :]).masked_fill(hidden, float("-inf")).exp()
        weighted = k[..., None, part, :] * between
        scores[..., part, part] = (weighted @ readers[..., part, :, None])[..., 0]
    return sums, scores[0], scores[1]
