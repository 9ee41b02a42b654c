"""Log probabilities as they cross processes and hosts: what a request wants, and what was computed of its prompt.

Made by the API process (`Logprobs`) and by executors (`PromptLogprobs`); carried by the channel and, from prefill to
decode, by the control plane. Numbers by the thousand travel as little-endian bytes.
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
"""Most bytes of numbers in one message: log probabilities of a longer stretch of a prompt are cut into parts."""

FloatArray = npt.NDArray[np.float32]
IdArray = npt.NDArray[np.int32]


class Logprobs(msgspec.Struct, frozen=True, kw_only=True):
    """What a request wants to know. All are natural logs of the model's own distribution, before any sampling field.

    With `output`, of every output token: its own, of the `top` most likely tokens at its place, and of `token_ids`
    there. With `prompt_from` the same of the prompt's tokens at positions `prompt_from + 1` and later.
    """

    output: bool = True
    top: int = 0
    token_ids: tuple[int, ...] = ()
    prompt_from: int | None = None
    to_decode: bool = False
    """Whether prefill hands the prompt's to decode as well, whose client wants them from there."""

    @property
    def needs_transfer(self) -> bool:
        """Whether anything goes from prefill to decode beside the aux record."""
        return (self.prompt_from is not None and self.to_decode) or (self.output and bool(self.token_ids))


class PromptLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Of the T tokens from position `start` on, which follow each other: `T`, `[T, n]` and `[T, k]` numbers, packed.

    `own` float32 `[T]`. `ranks` int32 `[T]`: 1 for the most likely token. `top_ids` int32 and `top` float32 `[T, n]`:
    the most likely ones, best first. `picked` float32 `[T, k]`: of the `token_ids` that were asked for, in their order.
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
        """The arrays as one value."""
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
        """What prefill tells decode of the first output token, at `position`, beside the aux record."""
        values = np.asarray([picked], dtype=np.float32)
        nothing = np.zeros((1, 0), dtype=np.float32)
        return PromptLogprobs.pack(position, values[:, 0], np.ones(1, dtype=np.int32), nothing, nothing, values)

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.own) // 4

    def check(self) -> None:
        """Whether the lengths fit each other.

        Raises:
            ProtocolError: they do not; a peer sent it.
        """
        fields = (self.own, self.ranks, self.top_ids, self.top, self.picked)
        line = 4 * self.num_tokens
        fits = line > 0 and len(self.ranks) == line and len(self.top_ids) == len(self.top)
        if not fits or any(len(field) % line for field in fields):
            raise ProtocolError(f"log probabilities of {[len(field) for field in fields]} bytes do not fit each other")

    def arrays(self) -> tuple[FloatArray, IdArray, IdArray, FloatArray, FloatArray]:
        """`own`, `ranks`, `top_ids`, `top`, `picked` again."""
        count = self.num_tokens
        return (
            np.frombuffer(self.own, "<f4"),
            np.frombuffer(self.ranks, "<i4"),
            np.frombuffer(self.top_ids, "<i4").reshape(count, -1),
            np.frombuffer(self.top, "<f4").reshape(count, -1),
            np.frombuffer(self.picked, "<f4").reshape(count, -1),
        )

    def parts(self, max_bytes: int = PART_BYTES) -> Iterator[PromptLogprobs]:
        """The same, in pieces of at most `max_bytes` of numbers (or one token, if that has more)."""
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
    """One value for the tokens at positions `[start, end)`, out of parts in any order, some of them repeated.

    None when a token is missing: whoever should have computed it did not (a request that ended early).
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
