"""What the leader of a replica and its followers say to each other. Pure; `links` carries it.

leader                                    follower
  | <----------------------------- Sized |   the weights are loaded, so many pages would fit
  | Agreed ----------------------------> |   so many pages all have
  | <------------------------- RankReady |   pool and transport are there
  | Begin -----------------------------> |   what a scheduler like the leader's is made with
  | Turn, Launched, Settled, Answer ---> |   what the schedulers of all ranks decide by, in order (`input_log`)
  | <------ StepDone, Offloaded, Digested |   where the leader waits for it
  | <------- Reached, CopyDone, Notified |   of this rank's transport: news, on which all agree then (`consensus`)
  | <-- Alive, in both directions -----> |
  | Stop ------------------------------> |
  | <------------------------ RankFailed |
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from pdserve.errors import ConfigError, ModelError, PdserveError, RankError
from pdserve.executor.interface import StepResult
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


class More(msgspec.Struct, frozen=True, tag=True):
    """What has come since the last turn, but for the last part, which the `Turn` has: together it may be too much."""

    events: tuple[SharedEvent, ...]


class Turn(msgspec.Struct, frozen=True, tag=True):
    """A turn of the loop begins: the time, what has come since the last one, and what is due of a `Reduction`, of so
    many pending items.
    """

    now: float
    events: tuple[SharedEvent, ...]
    reduction: int = 0
    num_pending: Count = 0


class Launched(msgspec.Struct, frozen=True, tag=True):
    """A step is about to be computed; `seen` is what the leader sees of its plan (`RankExecutor`)."""

    step: Count
    seen: int


class Settled(msgspec.Struct, frozen=True, tag=True):
    """The oldest step under way has ended: the time, and what it gave."""

    now: float
    result: StepResult


class Answer(msgspec.Struct, frozen=True, tag=True):
    """What the leader alone can know, where all ranks have come to ask."""

    value: Value


Entry = More | Turn | Launched | Settled | Answer
"""One line of the log that all schedulers of a replica read."""


WIRE_NAMES = {"drain_timeout_s": "settle_s", "fence_drain_timeout_s": "fence_settle_s"}
"""Names of fields in frames, where they differ from the attributes."""


class TransferStart(msgspec.Struct, frozen=True, kw_only=True, rename=WIRE_NAMES):
    """What a transfer manager like the leader's is made with. `ranks` are all of the replica's, the leader's first.

    `secret`: see `KVArgs`.
    """

    instance: str
    endpoint: str
    handshake: dict[str, str | int]
    ranks: tuple[RankMemory, ...]
    drain_timeout_s: float
    fence_drain_timeout_s: float
    secret: str


class Begin(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """All ranks are ready. `now` is the time until the first turn; `rebalances`: experts will be moved between steps.

    `transfer` is None in a monolith.
    """

    now: float
    rebalances: bool
    transfer: TransferStart | None


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


class RankReady(msgspec.Struct, frozen=True, kw_only=True, tag=True, rename=WIRE_NAMES):
    """The follower can begin. `memory` is where peers write to it; None where nothing is transferred.

    `facts` must be the leader's, too: what no flag says of its checkpoint and its kernels. `samples` are those of
    its weights (`WeightSamples`); `drain_timeout_s` and `fence_drain_timeout_s` are its transport's.
    """

    facts: dict[str, str]
    memory: RankMemory | None
    samples: dict[str, dict[int, float]]
    drain_timeout_s: float
    fence_drain_timeout_s: float


class StepDone(msgspec.Struct, frozen=True, tag=True):
    """The step is computed here: it writes nothing any more. Sent where the leader's own end of it does not say so."""

    step: Count


class Offloaded(msgspec.Struct, frozen=True, tag=True):
    """The pages of the so many-th offload are copied to host memory."""

    number: Count


class Digested(msgspec.Struct, frozen=True, tag=True):
    """What this rank has of the pages that were hashed as the so many-th."""

    number: Count
    digest: RankDigest


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


ToFollower = Entry | Begin | Agreed | Stop | Alive
ToLeader = (
    Sized
    | RankReady
    | StepDone
    | Offloaded
    | Digested
    | PeerConnected
    | CopyDone
    | Notified
    | ReceiverOpened
    | PeerFenced
    | RankFailed
    | Alive
)


def follower_codec() -> Codec[ToFollower]:
    """For what the leader sends."""
    return Codec(ToFollower, max_bytes=MAX_RANK_BYTES)


def leader_codec() -> Codec[ToLeader]:
    """For what followers send."""
    return Codec(ToLeader, max_bytes=MAX_RANK_BYTES)
