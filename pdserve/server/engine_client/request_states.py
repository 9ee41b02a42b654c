"""The sequences of a server that have not ended, by id and by what clients call them. Owned by the engine client."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable

from pdserve.protocol.messages import RequestTiming
from pdserve.protocol.sampling import CoreSamplingParams
from pdserve.server.engine_client.new_prefill import NewAddress
from pdserve.server.engine_client.request_stats import SequenceProgress
from pdserve.server.generation import Generation
from pdserve.server.text.detokenizer import Detokenizer


@dataclasses.dataclass
class RequestState:
    """One live sequence; `progress` is what is told of it.

    `names` are what the client knows it by: its own, and that of its batch.
    `timing` is the newest that the scheduler sent: a stop string ends the sequence before the scheduler's last output.
    """

    index: int
    names: tuple[str, ...]
    generation: Generation
    sampling: CoreSamplingParams
    detokenizer: Detokenizer
    progress: SequenceProgress
    timing: RequestTiming | None = None
    new_address: NewAddress | None = None
    """The bootstrap address, where it had never served when the sequence was submitted."""


class RequestStates:
    """By `rid`, which no other request ever has."""

    def __init__(self) -> None:
        self._sequences: dict[str, RequestState] = {}
        self._names: collections.Counter[str] = collections.Counter()

    def __len__(self) -> int:
        return len(self._sequences)

    def add(self, rid: str, sequence: RequestState) -> None:
        """It is submitted."""
        self._sequences[rid] = sequence
        self._names.update(sequence.names)

    def get(self, rid: str) -> RequestState | None:
        """None where it has ended."""
        return self._sequences.get(rid)

    def pop(self, rid: str) -> RequestState:
        """It has ended."""
        sequence = self._sequences.pop(rid)
        for name in sequence.names:
            self._names[name] -= 1
            if self._names[name] <= 0:
                del self._names[name]
        return sequence

    def taken(self, names: Iterable[str]) -> str | None:
        """The first of `names` that belongs to one of them."""
        return next((name for name in names if name in self._names), None)

    def called(self, name: str | None) -> list[str]:
        """Those that the client knows as `name`, their own or that of their batch; all for None."""
        return [rid for rid, one in self._sequences.items() if name is None or name in one.names]

    def of(self, generation: Generation) -> list[str]:
        """Those whose updates go there."""
        return [rid for rid, one in self._sequences.items() if one.generation is generation]
