"""`Model`: the interface between the executor and a model implementation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from pdserve.model.attention.interface import StepAttention
from pdserve.model.config import ModelSpec
from pdserve.model.forward_batch import ForwardBatch
from pdserve.model.layers.expert_parallel import ExpertParallelMoe
from pdserve.model.layers.moe import TPMoE
from pdserve.model.named_weights import MemoryRange
from pdserve.model.parallel import Parallel
from pdserve.model.params import ParamSlots

MoELayer = TPMoE | ExpertParallelMoe
"""A feed-forward layer with experts."""


class LayerTaps:
    """Keeps the outputs of some layers in a forward pass, for drafters that read them.

    `layers`: indices of layers on this rank. A layer's output is the hidden state that enters the next layer.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self._hidden: Tensor | None = None

    @property
    def hidden(self) -> Tensor:
        """The outputs of `layers` in the last pass, side by side: `[N, len(layers) * hidden_size]`, in `Model.dtype`.

        Valid until the next pass with these taps.
        """
        assert self._hidden is not None, "no pass has put anything"
        return self._hidden

    def replace(self, hidden: Tensor) -> None:
        """Let `hidden` be these outputs. The next pass of as many tokens overwrites them."""
        self._hidden = hidden

    def put(self, layer: int, x: Tensor) -> None:
        """Copy the output `x` `[N, hidden_size]` of `layer`, which may be none of `layers`."""
        num_tokens, width = x.shape
        for place, tapped in enumerate(self.layers):
            if tapped == layer:
                shape = (num_tokens, len(self.layers) * width)
                if self._hidden is None or self._hidden.shape != shape:
                    self._hidden = x.new_empty(shape)
                self._hidden[:, place * width : (place + 1) * width] = x


class Model(Protocol):
    """One rank's part of a model: a `Decoder`, or a `NativeDecoder` made from one."""

    @property
    def spec(self) -> ModelSpec:
        """Configuration of the model."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of hidden states between pipeline stages."""
        ...

    @property
    def params(self) -> ParamSlots:
        """The weights."""
        ...

    def weight_memory(self) -> list[MemoryRange]:
        """Return the memory of all weights; ranges may overlap. Not of weights that are packed for a GPU."""
        ...

    @property
    def parallel(self) -> Parallel:
        """The ranks of the replica."""
        ...

    @property
    def moe_layers(self) -> Mapping[int, MoELayer]:
        """This rank's feed-forward layers with experts, by index in the model."""
        ...

    @property
    def num_layers(self) -> int:
        """Number of layers on this rank."""
        ...

    @property
    def argmax(self) -> Tensor | None:
        """Argmax of the last `forward`'s logits, int64 `[S]`; None when `forward` did not compute it."""
        ...

    def idle(self) -> None:
        """Take part in a step in which only other replicas have tokens; see `DPAttentionGroup.spans_replicas`."""
        ...

    def forward(
        self,
        batch: ForwardBatch,
        attention: StepAttention,
        on_layer: Callable[[int], None] | None = None,
        hidden: Tensor | None = None,
        on_hidden: Callable[[Tensor], None] | None = None,
        taps: LayerTaps | None = None,
    ) -> Tensor:
        """Run this stage's layers.

        The first stage takes the tokens. Other stages take `hidden` `[N, hidden_size]` of the previous stage, and
        overwrite it. All stages but the last return `[N, hidden_size]` for the next stage. The last stage returns this
        rank's part of the logits of the tokens at `batch.sample_index`: `[S, share]`, in float32 or `dtype`. The
        logits are valid until the next call.

        `on_layer(i)` is called once this stage's layer i has written its KV, or enqueued the write on the device.
        `on_hidden` receives the last layer's output of all tokens, `[N, hidden_size]`, as input of `logits`. `taps` get
        the outputs of their layers; models that transformers runs have none.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute this rank's part of the logits of last-layer hidden states, on the last stage only.

        Maps `[n, hidden_size]` to float32 `[n, share]`, valid until the next call.
        """
        ...

    def final_norm(self, hidden: Tensor) -> Tensor:
        """Apply the norm behind the last layer to hidden states `[n, hidden_size]`, on the last stage only.

        `hidden` are states that `on_hidden` of `forward` has received. The result is the input of the head.
        """
        ...
