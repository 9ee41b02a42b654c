"""Messages between rank 0 of a replica and the other ranks, its followers. Pure; `links` carries them.

rank 0                                    follower
  | <---------------------- PageCapacity |   the weights are loaded; number of pages that fit
  | PoolSize --------------------------> |   number of pages of every rank's pool
  | <------------------------- RankReady |   pool and transport are open
  | Begin -----------------------------> |   the parameters of a scheduler equal to rank 0's
  | Tick, Launched, StepEnded, Answer -> |   the input of the schedulers of all ranks, in order (`input_log`)
  | <------ StepDone, Offloaded, Digested |   where rank 0 waits for it
  | <------------------------ RankReport |   the answer to a question about memory or weights (`rank_reports`)
  | <- PeerConnected, CopyDone, Notified |   events of this rank's transport, to be agreed on (`consensus`)
  | <---------------------- RolePrepared |   the parts of another role are open; an Answer has the RoleDecision
  | <--------------------- WeightsLoaded |   other weights are loaded beside those in use, or not
  | <----------------------- PagesCopied |   ends of copies to and from the host tier (`rank_copies`)
  | <---------------------- StorageEnded |   ends of storage jobs; rank 0 takes the minimum (`rank_storage`)
  | <-- Alive, in both directions -----> |
  | Stop ------------------------------> |
  | <------------------------ RankFailed |
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from pdserve.errors import ConfigError, ModelError, PdserveError, RankError
from pdserve.executor.interface import StepResult
from pdserve.memory.page_keys import KeyNamespace
from pdserve.protocol.codec import MAX_RANK_BYTES, Codec
from pdserve.protocol.messages import ToScheduler
from pdserve.transfer.checksum import RankDigest
from pdserve.transfer.events import (
    CopyDone,
    FrameArrived,
    Notified,
    PeerConnected,
    PeerFenced,
    PeerGone,
    PeerHandshakeFailed,
    PeerListens,
    PrefillFound,
    PrefillNotFound,
    ReceiverOpened,
)
from pdserve.transfer.wire import RankMemory

Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
SharedEvent = ToScheduler | FrameArrived | PrefillFound | PrefillNotFound | PeerGone | PeerListens | PeerHandshakeFailed
Value = bool | bytes | tuple[RankDigest, ...]


class PartialTick(msgspec.Struct, frozen=True, tag="More"):
    """Events since the last turn, except the last part, which is in the `Tick`: one frame has a size limit."""

    events: tuple[SharedEvent, ...]


class Tick(msgspec.Struct, frozen=True, tag="Turn"):
    """Start of a turn of the loop.

    `now` is the time, `events` came since the last turn. `reduction` are the actions of a `Reduction` that are due,
    over `num_pending` pending items.
    """

    now: float
    events: tuple[SharedEvent, ...]
    reduction: int = 0
    num_pending: Count = 0


class Launched(msgspec.Struct, frozen=True, tag=True):
    """A step is about to be computed; `seen` is rank 0's fingerprint of its plan (`RankExecutor`)."""

    step: Count
    seen: int


class StepEnded(msgspec.Struct, frozen=True, tag="Settled"):
    """The oldest step under way has ended: the time, and its result."""

    now: float
    result: StepResult


class Answer(msgspec.Struct, frozen=True, tag=True):
    """A value that only rank 0 knows, at a point that all ranks reach."""

    value: Value


Entry = PartialTick | Tick | Launched | StepEnded | Answer
"""One entry of the log that all schedulers of a replica read."""


WIRE_NAMES = {"drain_timeout_s": "settle_s", "fence_drain_timeout_s": "fence_settle_s"}
"""Names of fields in frames, where they differ from the attributes."""


class TransferStart(msgspec.Struct, frozen=True, kw_only=True, rename=WIRE_NAMES):
    """Parameters of a transfer manager equal to rank 0's. `ranks` are all ranks of the replica, rank 0 first.

    `secret`, `poll_failures`, `draft_facts`: see `KVArgs`.
    """

    instance: str
    endpoint: str
    handshake: dict[str, str | int]
    ranks: tuple[RankMemory, ...]
    drain_timeout_s: float
    fence_drain_timeout_s: float
    secret: str
    poll_failures: float = 0.0
    draft_facts: dict[str, str | int] = {}


class Begin(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """All ranks are ready. `now` is the time until the first turn; `rebalances`: experts are moved between steps.

    `transfer` is None in a monolith. `storage`: namespace of the pages in the store; None: there is none.
    """

    now: float
    rebalances: bool
    transfer: TransferStart | None
    storage: KeyNamespace | None = None


class PoolSize(msgspec.Struct, frozen=True, tag="Agreed"):
    """The number of pages of every rank's pool."""

    num_pages: Count


class Stop(msgspec.Struct, frozen=True, tag=True):
    """The replica ends; `trouble` is the error, None for a regular end."""

    trouble: Trouble | None = None


class Alive(msgspec.Struct, frozen=True, tag=True):
    """Heartbeat, in both directions."""


class PageCapacity(msgspec.Struct, frozen=True, tag="Sized"):
    """The number of pages that would fit. Nothing is allocated yet."""

    num_pages: Count


class RankReady(msgspec.Struct, frozen=True, kw_only=True, tag=True, rename=WIRE_NAMES):
    """The follower can begin. `memory` is what peers write to at this rank; None where nothing is transferred.

    `facts` must equal rank 0's: properties of its checkpoint and its kernels that no flag sets. `samples` are those of
    its weights (`WeightSamples`), `draft_samples` those of its drafter's; `drain_timeout_s` and `fence_drain_timeout_s`
    are its transport's.
    """

    facts: dict[str, str]
    memory: RankMemory | None
    samples: dict[str, dict[int, float]]
    drain_timeout_s: float
    fence_drain_timeout_s: float
    draft_samples: dict[str, dict[int, float]] = {}


class RolePrepared(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The follower has opened its parts for role change `number`, or could not: `trouble`. Else as in `RankReady`."""

    number: Count
    memory: RankMemory | None = None
    drain_timeout_s: float = 0.0
    fence_drain_timeout_s: float = 0.0
    trouble: Trouble | None = None


class RoleDecision(msgspec.Struct, frozen=True):
    """Rank 0's decision on a role change, in an `Answer`. `failure` None: all ranks change now, with `transfer`."""

    failure: str | None
    transfer: TransferStart | None


class WeightsLoaded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The follower has loaded other weights, its load `number`, or could not: `trouble`. Samples as in `RankReady`."""

    number: Count
    samples: dict[str, dict[int, float]] = {}
    draft_samples: dict[str, dict[int, float]] = {}
    trouble: Trouble | None = None


class StepDone(msgspec.Struct, frozen=True, tag=True):
    """The follower's part of the step is computed and writes no more. Sent only by the last pipeline stage."""

    step: Count


class Offloaded(msgspec.Struct, frozen=True, tag=True):
    """The pages of offload `number` are copied to host memory."""

    number: Count


class PagesCopied(msgspec.Struct, frozen=True, tag=True):
    """The follower's part of the copy between tiers with this number has ended (`rank_copies`)."""

    number: Count


class StorageEnded(msgspec.Struct, frozen=True, tag=True):
    """The storage job `number` has ended on this rank; it moved the first `num_pages` pages (`rank_storage`)."""

    number: Count
    num_pages: Count


class Digested(msgspec.Struct, frozen=True, tag=True):
    """The follower's digest of the pages of hash request `number`."""

    number: Count
    digest: RankDigest


class RankReport(msgspec.Struct, frozen=True, tag=True):
    """The follower's answer to question `number` of `RankReports`."""

    number: Count
    data: bytes


class Trouble(msgspec.Struct, frozen=True, kw_only=True):
    """A `PdserveError` as a value."""

    kind: Literal["config", "model", "rank"]
    message: str
    field: str | None = None

    @classmethod
    def of(cls, error: BaseException) -> Trouble:
        """Return the value of an exception; exceptions other than `PdserveError` are named by type."""
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
        """Return the exception again."""
        match self.kind:
            case "config":
                return ConfigError(self.message, field=self.field)
            case "model":
                return ModelError(self.message)
            case "rank":
                return RankError(self.message)


class RankFailed(msgspec.Struct, frozen=True, tag=True):
    """The follower's final message: its error."""

    trouble: Trouble


ToFollower = Entry | Begin | PoolSize | Stop | Alive
ToLeader = (
    PageCapacity
    | RankReady
    | RolePrepared
    | WeightsLoaded
    | StepDone
    | Offloaded
    | StorageEnded
    | PagesCopied
    | Digested
    | RankReport
    | PeerConnected
    | CopyDone
    | Notified
    | ReceiverOpened
    | PeerFenced
    | RankFailed
    | Alive
)


def follower_codec() -> Codec[ToFollower]:
    """Return the codec for messages of rank 0."""
    return Codec(ToFollower, max_bytes=MAX_RANK_BYTES)


def leader_codec() -> Codec[ToLeader]:
    """Return the codec for messages of followers."""
    return Codec(ToLeader, max_bytes=MAX_RANK_BYTES)
