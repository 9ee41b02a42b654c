"""Embedding and head of a vocabulary that is split over tensor ranks (arXiv:1909.08053, section 3).

Each rank has `share` rows, of which those behind the end of the vocabulary are zero.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from pdserve.base.parallel import RankCoord, vocab_of
from pdserve.model.parallel import Parallel
from pdserve.model.params import Param, ParamSlots


def vocab_rows(params: ParamSlots, name: str, vocab_size: int, hidden_size: int, place: RankCoord) -> Tensor:
    """Allocate this rank's rows of the checkpoint's `[vocab, hidden]` matrix `name`: `[share, hidden]`."""
    tp_size = place.shape.tp_size
    held = vocab_of(vocab_size, tp_size, place.tp_rank)
    share = len(vocab_of(vocab_size, tp_size, 0))
    return params.stacked(Param(name, (vocab_size, hidden_size), 0, held), num_rows=share)


class VocabEmbedding:
    """Looks token ids up where they are: one rank has the row, the others add zero, so that the sum is exact."""

    def __init__(self, weight: Tensor, vocab_size: int, parallel: Parallel) -> None:
        self.weight = weight
        self._parallel = parallel
        self._held = vocab_of(vocab_size, parallel.place.shape.tp_size, parallel.place.tp_rank)

    def __call__(self, ids: Tensor) -> Tensor:
        """`[N]` int64 to `[N, hidden]`, equal on all ranks."""
        if self._parallel.place.shape.tp_size == 1:
            return F.embedding(ids, self.weight)
        local = ids - self._held.start
        elsewhere = (local < 0) | (local >= len(self._held))
        rows = F.embedding(local.masked_fill_(elsewhere, 0), self.weight)
        return self._parallel.all_reduce(rows.masked_fill_(elsewhere[:, None], 0.0))
