"""What the executor asks of a model, whichever way it is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from pdserve.model.attention.interface import StepAttention
from pdserve.model.config import ModelSpec
from pdserve.model.forward_batch import ForwardBatch
from pdserve.model.layers.expert_parallel import ExpertParallelMoe
from pdserve.model.layers.moe import TPMoE
from pdserve.model.parallel import Parallel
from pdserve.model.params import ParamSlots

Mixture = TPMoE | ExpertParallelMoe
"""A feed-forward layer with experts."""


class Model(Protocol):
    """What one rank has of a model: a `Decoder`, or a `NativeDecoder` made of one."""

    @property
    def spec(self) -> ModelSpec:
        """What it is."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The number format of hidden states between stages."""
        ...

    @property
    def params(self) -> ParamSlots:
        """Its weights."""
        ...

    @property
    def parallel(self) -> Parallel:
        """The other ranks."""
        ...

    @property
    def moe_layers(self) -> Mapping[int, Mixture]:
        """By index in the model, this rank's feed-forward layers that have experts."""
        ...

    @property
    def num_layers(self) -> int:
        """Layers that this rank has."""
        ...

    @property
    def best(self) -> Tensor | None:
        """The likeliest tokens by the logits of the last `forward`, where it has found them on its way: int64 `[S]`."""
        ...

    def idle(self) -> None:
        """Take part in a step that only other replicas have tokens in; see `DPAttentionGroup.spans_replicas`."""
        ...

    def forward(
        self,
        batch: ForwardBatch,
        attention: StepAttention,
        on_layer: Callable[[int], None] | None = None,
        hidden: Tensor | None = None,
        on_hidden: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """Run this stage's layers.

        The first stage begins with the tokens, the others with `hidden` `[N, hidden_size]` of the stage before, which
        is overwritten. All but the last return `[N, hidden_size]` for the next. The last returns this rank's part of
        the logits of the tokens at `batch.sample_index`: `[S, share]`, in float32 or `dtype`. They are
        good until the next call.

        `on_layer(i)` is called once its layer i's KV is written, or its writing enqueued on a device that has a queue.
        `on_hidden` is given what the last layer of the last stage says of all tokens, `[N, hidden_size]`, for `logits`.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """This rank's part of the logits behind hidden states of the last layer: `[n, hidden_size]` to float32
        `[n, share]`, good until the next call. On the last stage only.
        """
        ...
