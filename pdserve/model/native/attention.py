"""The attention backend of `NativeDecoder`, which has attention in its program: nothing is gathered for a step."""

from __future__ import annotations

from torch import Tensor

from pdserve.model.attention.interface import Heads
from pdserve.model.forward_batch import ForwardBatch


class AttentionInProgram:
    """Implements `AttentionBackend` and `StepAttention` as far as such a model asks for them."""

    def begin(self, batch: ForwardBatch) -> AttentionInProgram:
        """See `AttentionBackend.begin`: the program reads the pages in place."""
        return self

    def capturing(self) -> None:
        """See `AttentionBackend.capturing`."""

    def attend(self, layer: int, heads: Heads) -> Tensor:
        """Not called."""
        raise AssertionError("attention is an operation of the program")
