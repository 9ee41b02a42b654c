"""What the leader of a replica and its followers say to each other. Pure; `links` carries it.

    leader                                    follower
      | <----------------------------- Sized |   the weights are loaded, so many pages would fit
      | Agreed ----------------------------> |   so many pages all have
      | <------------------------- RankReady |   pool and transport are there
      | OpenRow, Launch, CloseRow, ... ----> |   obeyed by its computing thread, in order
      | <----------------- StepDone, Offloaded |   where the leader waits for it
      | Submit, Cancel, Forget, Expect ----> |   obeyed at once, by its copy workers
      | <----------- CopyReport, NotesReport |
      | <-- Alive, in both directions -----> |
      | Stop ------------------------------> |
      | <------------------------ RankFailed |

Numbers by the thousand travel as bytes: token ids and pages as little-endian int32, copies as three int64 each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from pdserve.errors import ConfigError, ModelError, PdserveError, ProtocolError, RankError
from pdserve.executor.interface import BatchPlan, Row
from pdserve.protocol.codec import Codec
from pdserve.protocol.failure import Failure
from pdserve.protocol.logprobs import Logprobs
from pdserve.protocol.sampling import SamplingParams
from pdserve.transfer.events import Piece
from pdserve.transfer.kv_digest import RankDigest
from pdserve.transfer.plan import PageCopy
from pdserve.transfer.wire import Key, RankMemory

Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]

_NUMBERS = np.dtype("<i4")
_COPIES = np.dtype("<i8")
_COPY_FIELDS = 3


class OpenRow(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """See `Executor.open_row`. `sampling.seed` is never None: all ranks must draw alike."""

    row: Count
    token_ids: bytes
    num_prompt_tokens: Count
    sampling: SamplingParams
    logprobs: Logprobs | None


class CloseRow(msgspec.Struct, frozen=True, tag=True):
    """See `Executor.close_row`."""

    row: Count


class PlannedRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A row of a plan, without its request's name. `pages` are those behind the ones that were sent before."""

    row: Count
    start: Count
    end: Count
    sample: bool
    pages: bytes


class Launch(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """See `Executor.launch`."""

    step: Count
    rows: tuple[PlannedRow, ...]
    layer_marks: bool


class Offload(msgspec.Struct, frozen=True, tag=True):
    """See `Executor.offload`. Answered with `Offloaded`: from then on the pages may be written by peers."""

    saved: Count
    pages: bytes


class Restore(msgspec.Struct, frozen=True, tag=True):
    """See `Executor.restore`."""

    saved: Count
    pages: bytes


class DropHost(msgspec.Struct, frozen=True, tag=True):
    """Nobody wants these saved pages any more."""

    saved: Count


class Digest(msgspec.Struct, frozen=True, tag=True):
    """Hash these pages, which are those from number `first` on of a request; answered with `Digested`."""

    number: Count
    pages: bytes
    first: Count
    num_tokens: Count


class Rebalance(msgspec.Struct, frozen=True, tag=True):
    """See the method of `ExpertBalance` that has this name."""

    do: Literal["plan", "place"]


class OrderedPiece(msgspec.Struct, frozen=True, array_like=True):
    """Copies between a pool here and one of the peer's; the bases are absolute addresses."""

    source_base: Count
    destination_base: Count
    copies: bytes


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A copy job; answered with a `CopyReport`.

    Not begun before step `after_step` has written the first `after_layers` layers of the model, as far as they are the
    follower's; None: all of them. `after_step` None: there was no step yet.
    """

    job: Count
    key: Key
    index: int
    peer: str
    transport_address: str
    pieces: tuple[OrderedPiece, ...]
    num_bytes: Count
    after_step: Count | None
    after_layers: Count | None


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """See `CopyEngine.cancel`. Unknown jobs have ended already."""

    job: Count


class Forget(msgspec.Struct, frozen=True, tag=True):
    """See `CopyEngine.forget`."""

    transport_address: str


class Expect(msgspec.Struct, frozen=True, tag=True):
    """See `CopyEngine.expect`. Answered with a `NotesReport`."""

    key: Key
    num_writes: Count


class Agreed(msgspec.Struct, frozen=True, tag=True):
    """The pages of every rank's pool."""

    num_pages: Count


class Stop(msgspec.Struct, frozen=True, tag=True):
    """The replica ends; `trouble` says why where that was not wanted."""

    trouble: Trouble | None = None


class Alive(msgspec.Struct, frozen=True, tag=True):
    """Heartbeat, both ways."""


class Sized(msgspec.Struct, frozen=True, tag=True):
    """This many pages would fit. Nothing is allocated yet."""

    num_pages: Count


class RankReady(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The follower can be given orders. `memory` is where peers write to it; None where nothing is transferred.

    `samples` are those of its weights (`WeightSamples`); `settle_s` is its transport's.
    """

    num_pages: Count
    memory: RankMemory | None
    samples: dict[str, dict[int, float]]
    settle_s: float


class StepDone(msgspec.Struct, frozen=True, tag=True):
    """The step is computed here: it writes nothing any more. Sent where the leader's own end of it does not say so."""

    step: Count


class Offloaded(msgspec.Struct, frozen=True, tag=True):
    """These pages are copied to host memory."""

    saved: Count


class Digested(msgspec.Struct, frozen=True, tag=True):
    """What was asked for with that number."""

    number: Count
    digest: RankDigest


class CopyReport(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """See `CopyDone`."""

    job: Count
    failure: Failure | None
    settled: bool
    write_s: float


class NotesReport(msgspec.Struct, frozen=True, tag=True):
    """See `Notified`."""

    key: Key
    num_missing: Count


class Trouble(msgspec.Struct, frozen=True, kw_only=True):
    """A `PdserveError` as a value."""

    kind: Literal["config", "model", "rank"]
    message: str
    field: str | None = None

    @classmethod
    def of(cls, error: BaseException) -> Trouble:
        """The value of an exception; those that pdserve did not raise on purpose are named."""
        match error:
            case ConfigError():
                return cls(kind="config", message=str(error), field=error.field)
            case ModelError():
                return cls(kind="model", message=str(error))
            case PdserveError():
                return cls(kind="rank", message=str(error))
            case _:
                return cls(kind="rank", message=f"{type(error).__name__}: {error}")

    def error(self) -> PdserveError:
        """The exception again."""
        match self.kind:
            case "config":
                return ConfigError(self.message, field=self.field)
            case "model":
                return ModelError(self.message)
            case "rank":
                return RankError(self.message)


class RankFailed(msgspec.Struct, frozen=True, tag=True):
    """The follower's last words."""

    trouble: Trouble


Computing = OpenRow | CloseRow | Launch | Offload | Restore | DropHost | Digest | Rebalance
"""Orders to the thread that computes, to be obeyed one after the other."""
Copying = Submit | Cancel | Forget | Expect
"""Orders that overtake those."""
Order = Computing | Copying | Agreed | Stop | Alive
Report = Sized | RankReady | StepDone | Offloaded | Digested | CopyReport | NotesReport | RankFailed | Alive


def order_codec() -> Codec[Order]:
    """For what the leader sends."""
    return Codec(Order)


def report_codec() -> Codec[Report]:
    """For what followers send."""
    return Codec(Report)


def pack(numbers: Sequence[int] | npt.NDArray[np.int32]) -> bytes:
    """Token ids or pages as bytes."""
    return np.asarray(numbers, dtype=_NUMBERS).tobytes()


def unpack(packed: bytes) -> list[int]:
    """What `pack` packed.

    Raises:
        ProtocolError: not whole numbers, or one is negative.
    """
    return _array(packed, _NUMBERS, 1).reshape(-1).tolist()


def pack_pieces(pieces: Sequence[Piece]) -> tuple[OrderedPiece, ...]:
    """The pieces of a copy job."""
    return tuple(
        OrderedPiece(
            source,
            destination,
            np.array([(c.source, c.destination, c.num_bytes) for c in copies], dtype=_COPIES).tobytes(),
        )
        for source, destination, copies in pieces
    )


def unpack_pieces(pieces: Sequence[OrderedPiece]) -> tuple[Piece, ...]:
    """What `pack_pieces` packed. Raises ProtocolError like `unpack`."""
    return tuple(
        (
            piece.source_base,
            piece.destination_base,
            tuple(PageCopy(*fields) for fields in _array(piece.copies, _COPIES, _COPY_FIELDS).tolist()),
        )
        for piece in pieces
    )


def plan_of(launch: Launch) -> BatchPlan:
    """The plan that a follower computes. Its rows have no names: only the leader knows requests."""
    return BatchPlan(launch.step, tuple(Row("", row.row, row.start, row.end, row.sample) for row in launch.rows))


def _array(packed: bytes, dtype: np.dtype[np.signedinteger], columns: int) -> npt.NDArray[np.signedinteger]:
    if len(packed) % (dtype.itemsize * columns):
        raise ProtocolError(f"{len(packed)} bytes are not whole groups of {columns} numbers")
    numbers = np.frombuffer(packed, dtype=dtype).reshape(-1, columns)
    if numbers.size and int(numbers.min()) < 0:
        raise ProtocolError("a number that counts something is negative")
    return numbers
