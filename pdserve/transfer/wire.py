"""Control messages between peers: versioned msgpack, sealed with a keyed digest, bounded in size.

    decode                              prefill
      | Hello ----------------------------> |   identity, layout, addresses of the pools
      | <---------------------------- Hello |   (`answer` set), or Refusal naming the field
      | TransferInfo(key, pages, aux) ----> |   prefill may write there now
      |        ... pages, then aux, through the transport ...
      | <--- PromptLogprobsPart(key, index) |   only if requested
      | <---------------- TransferDone(key) |   every byte has landed; engines that notify must confirm it
      | Abort(key) -----------------------> |   stop
      | <------ TransferEnded(key, failure) |   prefill gave up; `quiesced`: no more bytes are written
      | <---- Ping, Pong, Ack, Reset -----> |   any direction; every packet carries acks

On the wire four of them have shorter tags: `Meta`, `Told`, `Done` and `Ended`.

All but Ack, Ping, Pong and Reset are delivered at least once (`sessions` repeats them until acked), in any order;
every handler is idempotent. A key names one use of a room for good, so late messages cannot affect a later use. A
packet names its session, so a message of an ended session cannot affect a later one.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Annotated

import msgspec

from pdserve.base.hosts import MAX_HOST_ADDRESSES
from pdserve.base.parallel import ParallelShape
from pdserve.protocol.codec import Codec, Seal
from pdserve.protocol.failure import Failure
from pdserve.protocol.logprobs import PromptLogprobs

CONTROL_VERSION = 2
"""Version of these messages and of their use by sessions; a fact of the handshake."""
MAX_FRAME_BYTES = 8 << 20
MAX_ACKS = 1024

Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
"""A number that fits the signed 64 bits of msgpack and numpy."""
Size = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
Name = Annotated[str, msgspec.Meta(max_length=256)]
EngineAddress = Annotated[str, msgspec.Meta(max_length=16384)]
"""Address of a transport; some transports encode more than a host and a port."""
Text = Annotated[str, msgspec.Meta(max_length=4096)]


class MemoryKey(msgspec.Struct, frozen=True):
    """One use of a room: `origin` is the receiver's instance id, `attempt` its increasing counter."""

    room: Count
    attempt: Count
    origin: Name


class WireRegion(msgspec.Struct, frozen=True):
    """Registered memory of a peer."""

    address: Count
    num_bytes: Count


class StatePlane(msgspec.Struct, frozen=True):
    """How a rank's items of a state pool are cut: one plane of each layer.

    It begins `offset` bytes into the layer, and has `num_heads` heads of `head_bytes` bytes, from the model's head
    `first_head` on.
    """

    name: Name
    offset: Count
    head_bytes: Count
    first_head: Count
    num_heads: Count


class StateFacts(msgspec.Struct, frozen=True):
    """Type and geometry of a state pool on one rank. An item is a slot, or a page of a group with pages.

    `state_type` is SGLang's name: mamba, swa or nsa. `layers` are the model's numbers. Each layer has `layer_bytes`
    bytes in an item of `item_bytes`.
    """

    group: Name
    state_type: Name
    item_bytes: Count
    layer_bytes: Count
    layers: tuple[Count, ...]
    planes: tuple[StatePlane, ...]


class StateRegion(msgspec.Struct, frozen=True):
    """Registered memory of a peer for the items of a layout group in `KVLayout.state_groups`."""

    address: Count
    num_bytes: Count
    facts: StateFacts


class RankMemory(msgspec.Struct, frozen=True, omit_defaults=True):
    """Memory of one rank that peers write to: its transport address, and its pool of each layout group.

    `state_regions` are the pools of `KVLayout.state_groups`, `kv_regions` those of the other groups. `host_addresses`
    are the IP addresses of the rank's host, from which its connections come; empty: not known. `draft_regions` are the
    pools of DRAFT groups, whose pages have the numbers of those of the first group.
    """

    transport_address: EngineAddress
    kv_regions: tuple[WireRegion, ...]
    host_addresses: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_HOST_ADDRESSES)] = ()
    state_regions: tuple[StateRegion, ...] = ()
    draft_regions: tuple[WireRegion, ...] = ()


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Handshake of the sender. `facts` must be equal on both sides, field by field.

    `ranks` are those of a replica split by `tp_size` and `pp_size`, in rank order; the aux slots are at rank 0. The
    transport addresses in `ranks` are for this peer alone; an answer has none, since its sender receives no KV cache.
    The server has `dp_size` such replicas, which share their tensor ranks with `dp_attention`.

    The dialling side draws `session`, a secret of the two processes, and an answer repeats it. A session that has ended
    does not begin again: its Hello is a replay.

    `draft_facts` tell of DRAFT groups and the drafter's weights, see `draft_fields`; unset without such groups. The
    pages of these groups are sent if the facts are equal on both sides. Slots of `aux_slot_bytes` bytes begin with the
    bytes that all servers have; a drafter's fields follow.
    """

    endpoint: Name
    session: Count = 0
    facts: dict[Name, Name | int]
    tp_size: Size = 1
    pp_size: Size = 1
    dp_size: Size = 1
    dp_attention: bool = False
    ranks: Annotated[tuple[RankMemory, ...], msgspec.Meta(max_length=4096)]
    aux_region: WireRegion
    aux_slot_bytes: Count
    answer: bool
    draft_facts: dict[Name, Name | int] | msgspec.UnsetType = msgspec.UNSET

    @property
    def shape(self) -> ParallelShape:
        """Parallel sizes of the replica."""
        return ParallelShape(tp_size=self.tp_size, pp_size=self.pp_size)


class Refusal(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The handshake is refused because `field` differs."""

    field: Name
    message: Text


WEIGHTS = "weights"
"""Handshake fact: version and fingerprint of the weights. A room compares it too, since it may change in a session."""


class TransferInfo(msgspec.Struct, frozen=True, kw_only=True, tag="Meta", omit_defaults=True):
    """The receiver's pages, state items and aux slot for one key, and the digest of the prompt.

    The receiver has the KV cache of the first `cached_tokens` tokens (whole pages); `pages` are those for the rest, by
    layout group. `state_indices` are the items in the pools of `KVLayout.state_groups`, `pages` those of the other
    groups. `weights`: version and fingerprint of the receiver's weights, see `KVArgs`.
    """

    key: MemoryKey
    cached_tokens: Count
    pages: tuple[tuple[Count, ...], ...]
    aux_slot: Count
    prompt_digest: Name
    state_indices: tuple[tuple[Count, ...], ...] = ()
    weights: Name = ""


class TransferStats(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics measured by the sender; durations in seconds, so that no clocks need agree."""

    num_bytes: int = 0
    num_pages: int = 0
    write_s: float = 0.0
    queue_s: float = 0.0
    bootstrap_s: float = 0.0
    prefill_s: float = 0.0
    tail_s: float = 0.0
    """Seconds from the end of the last forward pass to the last landed byte."""
    kv_checksum: Name | None = None
    """Checksum of the sent pages, taken before sending; None unless either side requests it (`checksum.checksum`)."""


class PromptLogprobsPart(msgspec.Struct, frozen=True, kw_only=True, tag="Told"):
    """A part of the prompt log probabilities that the receiver's client requested; `index` counts from 0."""

    key: MemoryKey
    index: Count
    part: PromptLogprobs


class TransferDone(msgspec.Struct, frozen=True, kw_only=True, tag="Done"):
    """All pages and the aux slot of `key` have landed.

    `num_logprob_parts`: the number of `PromptLogprobsPart` messages that were sent. Some may still arrive.
    `notified`: the number of notified writes for each of the receiver's ranks; empty where engines do not notify.
    """

    key: MemoryKey
    stats: TransferStats
    num_logprob_parts: Count = msgspec.field(default=0, name="num_told")
    notified: Annotated[tuple[Count, ...], msgspec.Meta(max_length=4096)] = ()


class TransferEnded(msgspec.Struct, frozen=True, kw_only=True, tag="Ended"):
    """The sender will not finish `key`. `quiesced`: it promises that no byte of it is written from now on.

    `moved_to`: another replica of the server has the request and expects a `TransferInfo` with a new key. None: the key
    failed. `notified`: with `quiesced`, the successful writes as in `TransferDone`; also empty when there were none.
    """

    key: MemoryKey
    failure: Failure
    quiesced: bool
    moved_to: Count | None = None
    notified: Annotated[tuple[Count, ...], msgspec.Meta(max_length=4096)] = ()


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The receiver aborts `key`; answered with a quiesced `TransferEnded` (or a `TransferDone` already under way)."""

    key: MemoryKey
    failure: Failure
    prompt_digest: Name


class Ping(msgspec.Struct, frozen=True, tag=True):
    """A heartbeat: answered with a Pong, or with a Reset to `endpoint` by a process that does not know the session.

    With a `nonce` above 0 it belongs to no session: it verifies that the receiver is the process at that endpoint.
    """

    nonce: Count = 0
    endpoint: Name = ""


class Pong(msgspec.Struct, frozen=True, tag=True):
    """The answer to a Ping."""

    nonce: Count = 0


class Reset(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The sender has no session with the number of this packet, or has ended it; `endpoint` is the sender's.

    A peer's session ends too when another process answers for its endpoint so.

    `quiesced`: the sender writes nothing into pages that were published to it in that session, now or later. `answer`:
    it answers a packet of that session, so it must not be answered.
    """

    endpoint: Name
    quiesced: bool
    answer: bool


class Ack(msgspec.Struct, frozen=True, tag=True):
    """Carries only the `acks` of its packet."""


Body = (
    Hello
    | Refusal
    | TransferInfo
    | PromptLogprobsPart
    | TransferDone
    | TransferEnded
    | Abort
    | Ping
    | Pong
    | Ack
    | Reset
)


class Packet(msgspec.Struct, frozen=True, kw_only=True):
    """One message between two instances; `receiver` guards against a new process at an old address.

    `session`: the number in the session's Hello; packets with another number are not for this session. `acks`: numbers
    of the packets that have arrived from the receiver. The next packet carries them.
    """

    sender: Name
    receiver: Name
    session: Count = 0
    seq: Count
    body: Body
    acks: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_ACKS)] = ()


class Wire:
    """Encodes and decodes packets, sealed with the cluster's token (an empty token still detects damage).

    Raises:
        ProtocolError: on decode, for frames that are too large, wrongly sealed, or no packet.
    """

    def __init__(self, token: str) -> None:
        self._codec: Codec[Packet] = Codec(Packet, max_bytes=MAX_FRAME_BYTES)
        self._seal = Seal(token)

    def encode(self, packet: Packet) -> bytes:
        """Return one sealed frame."""
        return self._seal.close(self._codec.encode(packet))

    def decode(self, sealed: bytes) -> Packet:
        """Return the packet of a sealed frame."""
        return self._codec.decode(self._seal.open(sealed, max_bytes=MAX_FRAME_BYTES))


def prompt_digest(token_ids: list[int], adapter: str = "") -> str:
    """Return a short digest of a prompt: both sides must have tokenized the request alike.

    `adapter`: digest of the request's LoRA adapter, which follows behind a dot; empty: it has none.
    """
    packed = struct.pack(f"<{len(token_ids)}I", *token_ids)
    digest = hashlib.blake2b(packed, digest_size=8).hexdigest()
    return f"{digest}.{adapter}" if adapter else digest
