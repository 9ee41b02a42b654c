"""Messages that change the weights of a running engine: from the API process to the scheduler of each replica.

    PrepareWeights ──> all ranks load beside the weights in use ──> HoldRequests ──> nothing runs any more
        ──> InstallWeights: all ranks compute with them ──> EndWeightsUpdate: requests go on

Each is answered with a `CommandReply`. All replicas have answered one before the next is sent. `EndWeightsUpdate` may
follow any of them, and undoes what is not installed. `scheduler/weights_update.py` carries them out.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class PrepareWeights(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Begins to load other weights of the same model; the reply follows when all ranks have them, or one has failed.

    `model_path`: a checkpoint on the hosts of the engine; None: that of the weights in use. `load_format`: as
    `--load-format`; None: that of the weights in use.
    """

    query_id: str
    model_path: str | None = None
    load_format: Literal["auto", "dummy"] | None = None


class SentTensor(msgspec.Struct, frozen=True):
    """A tensor that a trainer sends to a group: its name in the checkpoint, number format and shape."""

    name: str
    dtype: Literal["bfloat16", "float16", "float32"]
    shape: tuple[int, ...]


class PrepareTensors(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Begins to load weights with some new tensors; the others are those in use. Replies as `PrepareWeights`.

    `files`: safetensors files on the engine's host that have the new tensors; `names`: what errors call each of them,
    such as "entry 0". `sent`: tensors that the group `group` sends in this order, instead of files.
    """

    query_id: str
    files: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    group: str = ""
    sent: tuple[SentTensor, ...] = ()


class JoinGroup(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Joins a process group of torch.distributed; the reply follows when all ranks are members, or one is not.

    `host`, `port`: where the group meets. Rank r of the replica has rank `rank_offset` + r in the group of
    `world_size`. `timeout_s`: of the meeting, and of each broadcast.
    """

    query_id: str
    name: str
    host: str
    port: int
    rank_offset: int
    world_size: int
    backend: Literal["gloo", "nccl"]
    timeout_s: float


class LeaveGroup(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Leaves a process group; replies as `JoinGroup`."""

    query_id: str
    name: str


Preparation = PrepareWeights | PrepareTensors | JoinGroup | LeaveGroup
"""What the ranks do on a thread, one at a time."""


class HoldRequests(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Starts no further request: those that wait and new ones are held. The reply follows when nothing runs any more.

    `abort_all`: running and waiting requests are aborted first. `timeout_s`: if the last request has not ended after
    this many seconds, the hold ends, and the reply is a refusal. A hold that is not ended ends a minute later.
    """

    query_id: str
    abort_all: bool
    timeout_s: float


class InstallWeights(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Begins with the prepared weights, if there are any, and with the name of their version. Needs a hold.

    An `EngineReady` with the new facts precedes the reply. `weight_version` None: the name stays.
    """

    query_id: str
    weight_version: str | None = None


class EndWeightsUpdate(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Ends a hold, so that the held requests start, and drops weights that were prepared and not installed."""

    query_id: str


def weights_name(version: str, fingerprint: str) -> str:
    """Return what handshakes and rooms carry of the weights: the name of their version, and their fingerprint."""
    return f"{version}@{fingerprint}"


WeightsCommand = Preparation | HoldRequests | InstallWeights | EndWeightsUpdate
