"""Rows and state planes of a step, as the kernels of recurrent layers read them. Imports no Triton."""

from __future__ import annotations

import dataclasses

from torch import Tensor

CHUNK = 64
"""Tokens of a chunk. Chunk c of a row has the positions `[CHUNK * c, CHUNK * (c + 1))`."""


@dataclasses.dataclass(frozen=True)
class StatePlanes:
    """The state of one GatedDeltaNet or KDA layer in all slots; contiguous within a slot.

    `conv_q`, `conv_k` `[S, Hk, dk, taps - 1]` and `conv_v` `[S, Hv, dv, taps - 1]` hold the last inputs of the
    convolution, the oldest first, in the model's dtype and with one stride between slots. `state` float32
    `[S, Hv, dk, dv]` is the recurrent state.
    """

    conv_q: Tensor
    conv_k: Tensor
    conv_v: Tensor
    state: Tensor

    @property
    def num_key_heads(self) -> int:
        """Hk, the key heads of this rank."""
        return self.conv_q.shape[1]

    @property
    def num_value_heads(self) -> int:
        """Hv, the value heads of this rank: a multiple of Hk."""
        return self.state.shape[1]

    @property
    def key_dim(self) -> int:
        """Width dk of a key head."""
        return self.state.shape[2]

    @property
    def value_dim(self) -> int:
        """Width dv of a value head."""
        return self.state.shape[3]

    @property
    def taps(self) -> int:
        """Inputs of the convolution, the token's own included."""
        return self.conv_q.shape[3] + 1


@dataclasses.dataclass(frozen=True)
class DecodeStateRows:
    """Rows with one new token each, int64 `[R]` on the device.

    Row r computes position `starts[r]`, whose index in the flat batch is `tokens[r]`; its state is in slot `slots[r]`.
    A negative slot is neither read nor written. A row with a start of 0 begins from zero, whatever its slot holds.
    """

    slots: Tensor
    starts: Tensor
    tokens: Tensor


@dataclasses.dataclass(frozen=True)
class FoldRows:
    """Rows that fold pending tokens, int64 `[R]` on the device: the first `counts[r]` of those of slot `slots[r]`."""

    slots: Tensor
    counts: Tensor


@dataclasses.dataclass(frozen=True)
class VerifyRows:
    """Rows with drafts, int64 `[R]` on the device.

    Row r has the tokens `[tokens[r], tokens[r] + counts[r])` of the flat batch. It goes on from the state in slot
    `slots[r]`, and leaves its tokens pending there.
    """

    slots: Tensor
    tokens: Tensor
    counts: Tensor


@dataclasses.dataclass(frozen=True)
class StateChunks:
    """Chunks of the rows of a step with several new tokens: all of them, or some that follow each other.

    `slots`, `starts` int64 `[R]` as in `DecodeStateRows`, of all rows; row r has the tokens
    `[offsets[r], offsets[r + 1])` of the flat batch: int64 `[R + 1]`. `chunks` int32 `[T, 2]`: row and chunk of each
    chunk with new tokens, row after row. `chunk_starts` int32 `[C + 1]`: where the chunks of each of the C rows begin,
    and T.
    """

    slots: Tensor
    starts: Tensor
    offsets: Tensor
    chunks: Tensor
    chunk_starts: Tensor

    @property
    def num_rows(self) -> int:
        """C, the rows that have chunks."""
        return len(self.chunk_starts) - 1
