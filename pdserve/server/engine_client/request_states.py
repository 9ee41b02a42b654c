"""The live sequences of a server, by rid and by their clients' ids. Owned by the engine client."""

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
    """One live sequence; `progress` is its request statistics.

    `names`: the client's id of the sequence, and that of its batch if it has one.
    `timing`: the newest one that the scheduler sent. It is kept because a stop string ends the sequence before the
    scheduler's last output.
    """

    index: int
    names: tuple[str, ...]
    generation: Generation
    sampling: CoreSamplingParams
    detokenizer: Detokenizer
    progress: SequenceProgress
    timing: RequestTiming | None = None
    new_address: NewAddress | None = None
    """The bootstrap address, if it was new when the sequence was submitted; else None."""


class RequestStates:
    """Live sequences by `rid`, which is never reused."""

    def __init__(self) -> None:
        self._sequences: dict[str, RequestState] = {}
        self._names: collections.Counter[str] = collections.Counter()

    def __len__(self) -> int:
        return len(self._sequences)

    def add(self, rid: str, sequence: RequestState) -> None:
        """Add a submitted sequence."""
        self._sequences[rid] = sequence
        self._names.update(sequence.names)

    def get(self, rid: str) -> RequestState | None:
        """Return the sequence; None if it has ended."""
        return self._sequences.get(rid)

    def pop(self, rid: str) -> RequestState:
        """Remove and return a sequence that has ended."""
        sequence = self._sequences.pop(rid)
        for name in sequence.names:
            self._names[name] -= 1
            if self._names[name] <= 0:
                del self._names[name]
        return sequence

    def taken(self, names: Iterable[str]) -> str | None:
        """Return the first of `names` that belongs to a live sequence; None: all are free."""
        return next((name for name in names if name in self._names), None)

    def called(self, name: str | None) -> list[str]:
        """Return the rids whose client id, or whose batch's id, is `name`; all for None."""
        return [rid for rid, one in self._sequences.items() if name is None or name in one.names]

    def of(self, generation: Generation) -> list[str]:
        """Return the rids of the sequences of `generation`."""
        return [rid for rid, one in self._sequences.items() if one.generation is generation]
