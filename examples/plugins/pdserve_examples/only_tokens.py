"""A logit processor that lets a request have some tokens only, such as the labels of a classification.

    pdserve serve MODEL --logit-processors only_tokens
    {"messages": [...], "custom_logit_processor": "only_tokens", "custom_params": {"token_ids": [9693, 2152]}}

docs/logit-processors.md explains it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class OnlyTokens:
    """Forbids all tokens but `token_ids` of the request's `custom_params`."""

    def __call__(self, logits: Tensor, params: Sequence[Mapping[str, Any]]) -> Tensor:
        """See `LogitProcessor`. A request without valid `token_ids` fails: the server's log has the reason."""
        for row, given in zip(logits, params, strict=True):
            kept = torch.tensor(given["token_ids"], dtype=torch.int64, device=logits.device)
            values = row[kept]
            row.fill_(-torch.inf)
            row[kept] = values
        return logits
