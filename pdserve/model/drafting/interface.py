"""`DraftModel`: what the executor's drafter runs. Implemented by the MTP module, and by other heads and draft models.

The KV cache of a draft model is the DRAFT group of the target's layout, in pages of the same numbers. Slot j has the KV
of token j, computed with the target's hidden state of position j - 1. So a page depends on the tokens before its end
alone, as the target's pages do, and the prefix cache and transfers treat both alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from pdserve.memory.layout import GroupKind, KVGroup, attention_group
from pdserve.model.attention.interface import AttentionBackend
from pdserve.model.attention.page_gather import KVPool
from pdserve.model.config import ModelSpec
from pdserve.model.forward_batch import ForwardBatch
from pdserve.model.named_weights import MemoryRange
from pdserve.model.parallel import Parallel
from pdserve.model.params import ParamSlots, WeightSamples

Bind = Callable[[KVPool], AttentionBackend]
"""Binds a draft model's layers to their pool, and returns their attention."""


@dataclasses.dataclass(frozen=True)
class Drafted:
    """One draft for each token at `ForwardBatch.sample_index`, equal on all tensor ranks.

    `token_ids` int64 `[S]`: ids in the target's vocabulary. `hidden` `[S, hidden_size]`: the hidden states with which
    the draft model computes these tokens.
    """

    token_ids: Tensor
    hidden: Tensor


class DraftModel(Protocol):
    """One rank's part of a model that drafts tokens."""

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states that `forward` takes; 0: it takes none."""
        ...

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers of the target whose outputs `take` gets, side by side; empty: it is not called."""
        ...

    def kv_group(self, page_tokens: int, dtype: str) -> KVGroup:
        """Return the DRAFT group of the whole model; see `draft_group`."""
        ...

    def bind(self, pool: KVPool) -> None:
        """Keep the KV cache in `pool`, this rank's part of the DRAFT group. Called once, before `forward`."""
        ...

    def take(self, hidden: Tensor) -> Tensor:
        """Convert what `taps` keep, `[N, len(taps) * hidden size of the target]`, to hidden states for `forward`.

        Returns `[N, hidden_size]`, a copy.
        """
        ...

    @property
    def num_weights(self) -> int:
        """Weights of linear layers that `forward` reads for one token, of all ranks together, the head's included."""
        ...

    @property
    def params(self) -> ParamSlots:
        """This rank's weights, without those of the target."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of this rank's weights, without those of the target."""
        ...

    def weight_samples(self) -> WeightSamples:
        """Return samples of this rank's weights, without those of the target; see `ParamSlots.samples`."""
        ...

    def weight_memory(self) -> list[MemoryRange]:
        """Return the memory of the weights, see `Model.weight_memory`. Those of the target may be among them."""
        ...

    def forward(self, batch: ForwardBatch, hidden: Tensor) -> Drafted | None:
        """Write the KV of all tokens of `batch`, and draft the token behind each one at `sample_index`.

        `hidden` `[N, hidden_size]`, which may be overwritten: for each token, the hidden state of the position before
        it. None: no token is at `sample_index`. All tensor ranks call it together.
        """
        ...


def draft_group(
    target: ModelSpec,
    *,
    num_layers: int,
    page_tokens: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: str,
    of_latents: bool = False,
) -> KVGroup:
    """Return the DRAFT group of a draft model of `num_layers` layers, at most as many as the target has.

    The group's layers have the numbers of the target's last layers. With `of_latents` it has latents of `head_dim`
    instead of keys and values.
    """
    assert num_layers <= target.num_layers, (num_layers, target.num_layers)
    group = attention_group(
        kind=GroupKind.MLA if of_latents else GroupKind.DRAFT, name=GroupKind.DRAFT.value, page_tokens=page_tokens,
        num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype, num_layers=target.num_layers,
        layers=range(target.num_layers - num_layers, target.num_layers),
    )  # fmt: skip
    return dataclasses.replace(group, kind=GroupKind.DRAFT)


def likeliest(part: Tensor, argmax: Tensor | None, vocab_size: int, parallel: Parallel) -> Tensor:
    """Return the argmax of logits, int64 `[S]`, on all tensor ranks. `part` `[S, share]` is this rank's.

    `argmax`: see `Model.argmax`.
    """
    if argmax is not None:
        return argmax
    logits = parallel.gather_logits(part.float(), vocab_size)
    blank = torch.zeros(len(part), dtype=torch.int64, device=part.device)
    token_ids = blank if logits is None else logits.argmax(-1)
    if parallel.coord.shape.tp_size > 1:
        parallel.share_tokens([token_ids]).wait()
    return token_ids
