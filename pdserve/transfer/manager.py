"""KVManager: entry point of KV transfer for one scheduler rank, for the sending and the receiving side.

    roles -> KVSender / KVReceiver -> SendSide / ReceiveSide -> Sessions -> control socket
                                                             -> copy engine -> transport
    threads -> mailbox -> scheduler -> KVManager.handle

The scheduler thread is the only caller. `poll()` on a handle only reads a field.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping

import msgspec

from pdserve.base.clock import Clock
from pdserve.base.parallel import ParallelShape
from pdserve.errors import RequestError
from pdserve.memory.draft_groups import draft_fields, without_drafts
from pdserve.memory.layout import KVLayout
from pdserve.protocol.engine_state import PeerLoad
from pdserve.protocol.messages import FAKE_BOOTSTRAP_HOST, SenderAddress
from pdserve.transfer.aux import MetadataBuffers
from pdserve.transfer.events import (
    Address,
    ControlSocket,
    CopyDone,
    CopyEngine,
    Directory,
    FrameArrived,
    HandshakesFailed,
    Notified,
    PeerConnected,
    PeerFenced,
    PeerGone,
    PeerHandshakeFailed,
    PeerListens,
    PrefillFound,
    PrefillNotFound,
    ReceiverOpened,
    TransferEvent,
)
from pdserve.transfer.handles import KVReceiver, KVSender
from pdserve.transfer.peers import DialFailed, Message, Notice, PeerLost, PeerReady, SenderQuiesced, SessionTimes
from pdserve.transfer.plan import ChunkPlanner
from pdserve.transfer.receiver import ReceiveSide
from pdserve.transfer.receiving_engines import SessionReceivers
from pdserve.transfer.sender import SendSide
from pdserve.transfer.sessions import Sessions
from pdserve.transfer.wire import (
    CONTROL_VERSION,
    Abort,
    Hello,
    PromptLogprobsPart,
    RankMemory,
    TransferDone,
    TransferEnded,
    TransferInfo,
    Wire,
    WireRegion,
)

__all__ = ["FAKE_BOOTSTRAP_HOST", "KVArgs", "KVManager", "KVReceiver", "KVSender", "TransferTimes"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVArgs:
    """A replica's configuration for transfer. `layout` is the whole model's, with DRAFT groups; `facts` must equal a
    peer's. The fact `WEIGHTS` is version and fingerprint of the weights, which may change while the replica runs.

    `ranks` are all ranks of the replica in the order of `shape`: addresses and lengths of their pools, and for state
    type and geometry (`StateFacts`). Each session fills in their transport addresses. `secret` is the same on all of
    them, and known to no other process.
    """

    instance: str
    layout: KVLayout
    shape: ParallelShape = ParallelShape()
    dp_size: int = 1
    dp_attention: bool = False
    peer_sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """See `check_hello`."""
    ranks: tuple[RankMemory, ...]
    aux: MetadataBuffers
    facts: dict[str, str | int]
    draft_facts: Mapping[str, str | int] = dataclasses.field(default_factory=dict)
    """What a peer's drafter must have alike beside the DRAFT groups, so that draft KV is sent to it."""
    token: str = ""
    secret: str
    poll_failures: float = 0.0
    """Share of the polls of transfers that fail on purpose, see `PollFailures`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransferTimes:
    """Transfer timeouts in seconds."""

    bootstrap_timeout_s: float = 300.0
    waiting_timeout_s: float = 300.0
    sessions: SessionTimes = SessionTimes()


class KVManager:
    """Opens senders and receivers, and applies the events that threads post."""

    def __init__(
        self,
        args: KVArgs,
        socket: ControlSocket,
        engine: CopyEngine,
        directory: Directory,
        clock: Clock,
        times: TransferTimes,
        *,
        fake: bool = False,
    ) -> None:
        self.args = args
        self._layout = without_drafts(args.layout)
        self.counters: Counter[str] = Counter()
        self._all_fake = fake
        self._clock = clock
        self._endpoint = socket.endpoint
        self._engine = engine
        ranks = args.ranks
        of_layout = draft_fields(args.layout)
        draft_facts = of_layout | dict(args.draft_facts) if of_layout else {}
        assert len(ranks) == args.shape.num_ranks, (len(ranks), args.shape)
        hello = Hello(
            endpoint=socket.endpoint,
            facts=_facts(args),
            tp_size=args.shape.tp_size,
            pp_size=args.shape.pp_size,
            dp_size=args.dp_size,
            dp_attention=args.dp_attention,
            ranks=ranks,
            aux_region=WireRegion(*args.aux.buffer),
            aux_slot_bytes=args.aux.slot_bytes,
            answer=False,
            draft_facts=draft_facts or msgspec.UNSET,
        )
        self.receivers = SessionReceivers(engine, clock, args.shape.num_ranks)
        self.sessions = Sessions(
            args.instance,
            hello,
            Wire(args.token),
            socket,
            directory,
            clock,
            times.sessions,
            self.counters,
            self.receivers,
            lambda session: self.send_side.outgoing.writes_in(session),
            args.secret,
            args.peer_sizes,
        )
        self.send_side = SendSide(
            ChunkPlanner.of(
                args.layout,
                args.shape,
                ranks,
                (args.aux.buffer[0], args.aux.slot_bytes),
                draft_facts=draft_facts,
                aux_common_bytes=args.aux.common_bytes,
            ),
            self.sessions,
            engine,
            clock,
            times.bootstrap_timeout_s,
            self.counters,
        )
        self.receive_side = ReceiveSide(
            args.instance,
            self.sessions,
            engine,
            clock,
            times.bootstrap_timeout_s,
            times.waiting_timeout_s,
            self._layout,
            args.shape.num_ranks,
            self.counters,
        )

    def open_sender(self, room: int, host: str, digest: str, num_tokens: int | None = None) -> KVSender:
        """Return a handle to send a prompt of `num_tokens` tokens; with None, a receiver's pages are not checked
        against it.

        Raises:
            RequestError: 409 when the room is live.
        """
        record = self.send_side.open(room, digest, self._is_fake(host), num_tokens)
        return KVSender(self.send_side, self.args.aux, self._layout, record)

    def open_receiver(self, room: int, address: Address, digest: str, *, takes_logprobs: bool = False) -> KVReceiver:
        """Return a handle to receive from the prefill server behind `address`.

        `takes_logprobs`: the handle also receives the log probabilities of the prompt.

        Raises:
            RequestError: 409 when the room is live.
        """
        record = self.receive_side.open(room, address, digest, self._is_fake(address[0]), takes_logprobs=takes_logprobs)
        return KVReceiver(self.receive_side, self.args.aux, self._layout, record)

    @property
    def address(self) -> SenderAddress:
        """This process as a sender, for a request that another server receives from it."""
        return SenderAddress(instance=self.args.instance, endpoint=self._endpoint)

    def learn_sender(self, address: Address, sender: SenderAddress) -> None:
        """Let `sender` be the process behind `address`, for which then no bootstrap server is asked.

        Raises:
            RequestError: 400, it is this process itself.
        """
        if sender.instance == self.args.instance:
            raise RequestError("a request cannot migrate to the server that has it", field="to")
        self._apply(self.sessions.found(PrefillFound(address, ((sender.instance, sender.endpoint),))))

    def change_weights(self, weights: str) -> None:
        """Have handshakes and rooms carry `weights`, the fact `WEIGHTS`, from now on. No room is live."""
        self.sessions.change_weights(weights)

    def forget_early(self) -> None:
        """Drop the receivers whose prefill request has not arrived here, before `end_sessions`, which they see."""
        self.send_side.forget_early()

    def redirect(self, room: int, digest: str, replica: int) -> None:
        """Redirect the receiver of this room to `replica` of this server, which has the request."""
        self.send_side.redirect(room, digest, replica)

    def handle(self, event: TransferEvent) -> None:
        """Apply one event that a thread posted."""
        match event:
            case CopyDone():
                self.send_side.on_copy(event)
            case PeerConnected():
                self.send_side.on_connected(event)
            case Notified():
                self.receive_side.on_notified(event)
            case FrameArrived(frame=frame, source=source):
                self._apply(self.sessions.arrived(frame, source))
            case PrefillFound():
                self._apply(self.sessions.found(event))
            case PrefillNotFound():
                self._apply(self.sessions.not_found(event))
            case ReceiverOpened():
                self._apply(self.sessions.receiver_opened(event))
            case PeerFenced():
                self._free(self.receivers.fenced(event))
            case PeerGone(instance=instance):
                self._apply(self.sessions.gone(instance))
            case PeerHandshakeFailed(endpoint=endpoint):
                self._apply(self.sessions.handshake_failed(endpoint))
            case PeerListens(instance=instance):
                self.sessions.listens(instance)
            case HandshakesFailed(count=count):
                self.counters["control_handshakes_failed"] += count

    def tick(self) -> None:
        """Process heartbeats, repeats and timeouts. Called once a step."""
        self._apply(self.sessions.tick())
        self._free(self.receivers.tick())
        self.send_side.tick()
        self.receive_side.tick()

    def flush(self) -> None:
        """Send delayed acks now. Called before a step that may take long."""
        self.sessions.flush()

    def drain_state_changes(self, *, sending: bool) -> list[int]:
        """Return the open rooms of one side whose state changed since the last call, oldest change first.

        `sending`: rooms of senders, else of receivers. The result equals polling all handles of that side, at the cost
        of the changed rooms only.
        """
        rooms = self.send_side.changed_rooms if sending else self.receive_side.changed_rooms
        changed = list(rooms)
        rooms.clear()
        return changed

    @property
    def quiet(self) -> bool:
        """True when no transfer is open or running, and no ack is due on either side."""
        return not (
            self.send_side.rooms
            or self.send_side.outgoing
            or self.send_side.num_early
            or self.receive_side.rooms
            or self.receive_side.published
            or self.sessions.num_unacked
            or self.sessions.owes_acks
        )

    def counts(self) -> dict[str, int]:
        """Gauges for the audit; all 0 at idle."""
        return {
            "rooms_live": len(self.send_side.rooms) + len(self.receive_side.rooms),
            "keys_writing": len(self.send_side.outgoing),
            "keys_published": len(self.receive_side.published),
            "keys_early": self.send_side.num_early,
            "pages_held_remote": self.receive_side.num_remote_pages,
            "pages_held_send": self.send_side.outgoing.num_held_pages,
            "senders_unfenced": self.receivers.num_fencing,
            "control_unacked": self.sessions.num_unacked,
        }

    def oldest_orphan_s(self) -> float:
        """Age in seconds of the oldest pages that no request holds and a peer may still write into."""
        return self.receive_side.published.oldest_orphan_s()

    def peer_loads(self) -> list[PeerLoad]:
        """Return the traffic and state of each peer, for display."""
        now = self._clock.now()
        sending = Counter(out.peer for out in self.send_side.outgoing)
        receiving = Counter(entry.peer for entry in self.receive_side.published)
        return [
            PeerLoad(
                endpoint=peer.endpoint,
                instance=peer.instance,
                state=peer.state.value,
                heartbeat_age_s=max(0.0, now - peer.heard_at),
                silent_s=None if peer.silent_at is None else now - peer.silent_at,
                sent=peer.sent.flow(0 if peer.dialled else sending[peer.instance], now),
                received=peer.received.flow(receiving[peer.instance] if peer.dialled else 0, now),
            )
            for peer in self.sessions
        ]

    def declare_dead(self, instance: str) -> bool:
        """Free a peer's pages at once: an operator declared its process dead. False: the peer is unknown."""
        receivers = self.sessions.receivers_of(instance)
        known = self.sessions.peer(instance) is not None or bool(receivers)
        self._apply(self.sessions.gone(instance))
        for receiver in receivers:
            self.receivers.forget(receiver)
            self.receive_side.on_fenced(receiver)
        return known

    def end_sessions(self) -> None:
        """End the sessions with all peers, which are sent a Reset: this manager closes, with no transfer open."""
        for peer in list(self.sessions):
            self.sessions.gone(peer.instance)

    def _free(self, receivers: list[str]) -> None:
        for receiver in receivers:
            self.receive_side.on_fenced(receiver)

    def _is_fake(self, host: str) -> bool:
        return self._all_fake or host == FAKE_BOOTSTRAP_HOST

    def _apply(self, notices: list[Notice]) -> None:
        for notice in notices:
            match notice:
                case PeerReady(peer=peer):
                    self.receive_side.on_peer_ready(peer)
                case DialFailed(address=address, failure=failure):
                    self.receive_side.on_dial_failed(address, failure)
                case PeerLost(peer=peer, failure=failure, gone=gone):
                    self.counters["peers_lost"] += 1
                    if peer.dialled:
                        self.receive_side.on_peer_lost(peer, failure)
                    else:
                        self.send_side.on_peer_lost(peer, failure, gone)
                    if gone and not peer.dialled and peer.hello is not None:
                        for rank in peer.hello.ranks:
                            if rank.transport_address:
                                self._engine.forget(rank.transport_address)
                case SenderQuiesced(receiver=receiver):
                    self.receivers.forget(receiver)
                    self.receive_side.on_quiesced(receiver)
                case Message(peer=peer, body=body):
                    match body:
                        case TransferInfo() if not peer.dialled:
                            self.send_side.on_transfer_info(peer, body)
                        case Abort() if not peer.dialled:
                            self.send_side.on_abort(peer, body)
                        case PromptLogprobsPart() if peer.dialled:
                            self.receive_side.on_logprobs(peer, body)
                        case TransferDone():
                            if self.receive_side.sends(peer, body.key):
                                self.receive_side.on_transfer_done(body)
                        case TransferEnded():
                            if self.receive_side.sends(peer, body.key):
                                self.receive_side.on_transfer_ended(body)


def _facts(args: KVArgs) -> dict[str, str | int]:
    """Return the facts that must be equal at a peer, in the order of comparison."""
    layout = args.layout.fields() | {"aux_slot_bytes": args.aux.common_bytes}
    return {"control_version": CONTROL_VERSION} | layout | args.facts
