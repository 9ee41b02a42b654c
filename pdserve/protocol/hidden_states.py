"""Hidden states between processes: what a request wants of them, the results of a step, and input embeddings.

Hidden states are those of the last layer behind the final norm, as input of the head. The API process creates
`HiddenParams`, executors create `HiddenStates`, and the channel carries both. Arrays are sent as little-endian float32.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec
import numpy as np
import numpy.typing as npt

HiddenArray = npt.NDArray[np.float32]
Width = Annotated[int, msgspec.Meta(ge=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]


class Pooling(msgspec.Struct, frozen=True, kw_only=True):
    """How an embedding model makes one vector of the hidden states of a text.

    `mode`: the last token's state, or the mean of all tokens' states. `normalize`: the vector gets length 1.
    """

    mode: Literal["last", "mean"] = "last"
    normalize: bool = True


def unpack_embeds(data: bytes, num_tokens: int) -> HiddenArray:
    """Return `GenerateRequest.input_embeds` as an array float32 `[num_tokens, hidden_size]`."""
    return np.frombuffer(data, "<f4").reshape(num_tokens, -1)


def salt_of_embeds(salt: str, data: bytes) -> str:
    """Return the cache salt of a request with input embeddings `data` and the client's `salt`.

    All its token ids are alike, so the salt tells its cached KV from that of other embeddings. It has a NUL, which no
    client's salt has.
    """
    return f"{salt}\0embeds {hashlib.sha256(data).hexdigest()}"


class HiddenParams(msgspec.Struct, frozen=True, kw_only=True):
    """Hidden states that a request wants: those of all computed tokens from position `start` on.

    `pooled`: the API process gets their sum instead, in one row for each step.
    """

    start: Count = 0
    pooled: bool = False


class HiddenStates(msgspec.Struct, frozen=True, kw_only=True):
    """Hidden states of `num_tokens` consecutive tokens from position `start` on.

    `values`: float32 `[num_tokens, width]`, or `[1, width]`, the sum, if the request has `HiddenParams.pooled`.
    """

    start: Count
    num_tokens: Count
    width: Width
    values: bytes

    @staticmethod
    def pack(start: int, num_tokens: int, rows: HiddenArray) -> HiddenStates:
        """Pack `rows`, one for each token or their sum."""
        assert len(rows) in (1, num_tokens), "one row for each token, or one in all"
        values = np.ascontiguousarray(rows, dtype="<f4").tobytes()
        return HiddenStates(start=start, num_tokens=num_tokens, width=rows.shape[1], values=values)

    @property
    def end(self) -> int:
        """The position behind the last token."""
        return self.start + self.num_tokens

    def rows(self) -> HiddenArray:
        """Unpack `values`."""
        return np.frombuffer(self.values, "<f4").reshape(-1, self.width)

    def parts(self, max_bytes: int) -> Iterator[HiddenStates]:
        """Split into parts of at most `max_bytes` (or one row, if a row has more)."""
        rows = self.rows()
        step = max(1, max_bytes // (4 * self.width))
        if len(rows) <= step:
            yield self
            return
        for first in range(0, len(rows), step):
            some = rows[first : first + step]
            yield HiddenStates.pack(self.start + first, len(some), some)
