"""The live sequences of a server, by rid and by their clients' ids. Owned by the engine client."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable

from pdserve.observe.record import RequestRecord
from pdserve.server.engine_client.new_prefill import NewAddress
from pdserve.server.generation import Generation
from pdserve.server.text.detokenizer import Detokenizer


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class RequestState(RequestRecord):
    """One sequence in the API process, from its validation to its end: its message, statistics and output.

    `index` is its position in its body. `batch` is the client's id of the whole body; None: it has none.
    `EngineClient.submit` sets `generation` and `detokenizer`, which exist from then on.
    """

    index: int = 0
    batch: str | None = None
    generation: Generation = dataclasses.field(init=False, repr=False)
    detokenizer: Detokenizer = dataclasses.field(init=False, repr=False)
    new_address: NewAddress | None = None
    """The bootstrap address, if it was new when the sequence was submitted; else None."""

    @property
    def names(self) -> tuple[str, ...]:
        """The client's ids by which the sequence can be aborted: its own, and its batch's."""
        return (self.name,) if self.batch is None else (self.name, self.batch)


class RequestStates:
    """Live sequences by `rid`, which is never reused."""

    def __init__(self) -> None:
        self._sequences: dict[str, RequestState] = {}
        self._names: collections.Counter[str] = collections.Counter()

    def __len__(self) -> int:
        return len(self._sequences)

    def add(self, sequence: RequestState) -> None:
        """Add a submitted sequence."""
        self._sequences[sequence.request.rid] = sequence
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
