"""Log probabilities between processes and hosts: a request's parameters, and the results for its prompt.

The API process creates `Logprobs`, executors create `PromptLogprobs`. The channel carries both. The control plane
carries `PromptLogprobs` from prefill to decode. Arrays are sent as little-endian bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from pdserve.errors import ProtocolError

Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]

PART_BYTES = 1 << 18
"""Maximum bytes of arrays in one message. Log probabilities of a longer prompt range are split into parts."""

FloatArray = npt.NDArray[np.float32]
IdArray = npt.NDArray[np.int32]


class Logprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log probabilities that a request wants: natural logs of the model's distribution, before sampling parameters.

    `output`: for every output token, those of the token itself, of the `top` most likely tokens at its position, and of
    `token_ids` there. `prompt_from`: the same for prompt tokens at positions `prompt_from + 1` and later; None: none.
    """

    output: bool = True
    top: int = 0
    token_ids: tuple[int, ...] = ()
    prompt_from: int | None = None
    to_decode: bool = False
    """True: prefill also sends the prompt's log probabilities to decode, whose response includes them."""

    @property
    def needs_transfer(self) -> bool:
        """Whether prefill sends log probabilities to decode beside the aux record."""
        return (self.prompt_from is not None and self.to_decode) or (self.output and bool(self.token_ids))


class PromptLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Packed log probabilities of T consecutive tokens from position `start` on.

    `own` float32 `[T]`: of the token itself. `ranks` int32 `[T]`: its rank, 1 for the most likely token. `top_ids`
    int32 and `top` float32 `[T, n]`: the most likely tokens, best first. `picked` float32 `[T, k]`: of the requested
    `token_ids`, in their order.
    """

    start: Count
    own: bytes
    ranks: bytes
    top_ids: bytes = b""
    top: bytes = b""
    picked: bytes = b""

    @staticmethod
    def pack(
        start: int, own: FloatArray, ranks: IdArray, top_ids: IdArray | FloatArray, top: FloatArray, picked: FloatArray
    ) -> PromptLogprobs:
        """Pack the arrays into one value."""
        assert len(own) == len(ranks) == len(top_ids) == len(top) == len(picked), "one line per token"
        return PromptLogprobs(
            start=start,
            own=own.astype("<f4").tobytes(),
            ranks=ranks.astype("<i4").tobytes(),
            top_ids=top_ids.astype("<i4").tobytes(),
            top=top.astype("<f4").tobytes(),
            picked=picked.astype("<f4").tobytes(),
        )

    @staticmethod
    def of_token(position: int, picked: Sequence[float]) -> PromptLogprobs:
        """Pack the `picked` of the first output token, at `position`, which prefill sends to decode.

        The aux record carries its other log probabilities.
        """
        values = np.asarray([picked], dtype=np.float32)
        nothing = np.zeros((1, 0), dtype=np.float32)
        return PromptLogprobs.pack(position, values[:, 0], np.ones(1, dtype=np.int32), nothing, nothing, values)

    @property
    def num_tokens(self) -> int:
        """Number of tokens T."""
        return len(self.own) // 4

    def check(self) -> None:
        """Check that the field lengths match. Called for values that a peer sent.

        Raises:
            ProtocolError: the lengths do not match.
        """
        fields = (self.own, self.ranks, self.top_ids, self.top, self.picked)
        line = 4 * self.num_tokens
        fits = line > 0 and len(self.ranks) == line and len(self.top_ids) == len(self.top)
        if not fits or any(len(field) % line for field in fields):
            raise ProtocolError(f"log probabilities of {[len(field) for field in fields]} bytes do not fit each other")

    def arrays(self) -> tuple[FloatArray, IdArray, IdArray, FloatArray, FloatArray]:
        """Unpack `own`, `ranks`, `top_ids`, `top`, `picked`."""
        count = self.num_tokens
        return (
            np.frombuffer(self.own, "<f4"),
            np.frombuffer(self.ranks, "<i4"),
            np.frombuffer(self.top_ids, "<i4").reshape(count, -1),
            np.frombuffer(self.top, "<f4").reshape(count, -1),
            np.frombuffer(self.picked, "<f4").reshape(count, -1),
        )

    def parts(self, max_bytes: int = PART_BYTES) -> Iterator[PromptLogprobs]:
        """Split into parts of at most `max_bytes` of arrays (or one token, if one token has more)."""
        count = self.num_tokens
        num_bytes = sum(map(len, (self.own, self.ranks, self.top_ids, self.top, self.picked)))
        step = max(1, max_bytes * count // max(num_bytes, 1))
        if step >= count:
            yield self
            return
        arrays = self.arrays()
        for first in range(0, count, step):
            own, ranks, top_ids, top, picked = (array[first : first + step] for array in arrays)
            yield PromptLogprobs.pack(self.start + first, own, ranks, top_ids, top, picked)  # type: ignore[arg-type]


def join(parts: Sequence[PromptLogprobs], start: int, end: int) -> PromptLogprobs | None:
    """Join parts into one value for the tokens at positions `[start, end)`. Parts may be unordered and repeated.

    Returns None when a token is missing, as for a request that ended early.
    """
    by_start = {part.start: part for part in parts}
    pieces, at = [], start
    while at < end:
        part = by_start.get(at)
        if part is None:
            return None
        pieces.append(part.arrays())
        at += part.num_tokens
    if not pieces or at != end:
        return None
    own, ranks, top_ids, top, picked = (np.concatenate(columns) for columns in zip(*pieces, strict=True))
    return PromptLogprobs.pack(start, own, ranks, top_ids, top, picked)
