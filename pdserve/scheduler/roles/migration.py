"""Requests that move to another decode server, on the server that has them. Made by `DecodeRole`.

running     MigrateOut: an aux slot is reserved
   v
stopping    no step is under way: the request leaves the batch and its row
   v
offered     the API process has the request as a value, for the other server; a sender is open in the migration's room
   v
sending     the other server has published its pages: all missing pages and the last token are sent
   v
sent        every byte has landed, and the other server computes the request
   ^ |
   | MigrateOut of a retracted request: it leaves its queue; the other server has its value, and computes its KV again
   |
   |- EndMigration(commit)                          the request is forgotten here
   `- not committed, failed or late (all states)    the request goes on here

The other server can take the request only if everything has landed, and then this side's sender has succeeded. So a
request whose sender fails goes on at once, and a commit without a success is refused. After a success without a commit
both servers have the request. The API process, which passes on one server's output alone, ends the other copy.

All ranks of a replica run this on the same inputs. Scheduler thread.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Callable, Iterator

import msgspec

from pdserve.errors import RequestError
from pdserve.memory.slot_stamp import SlotStamp
from pdserve.protocol.failure import MIGRATED, Failure
from pdserve.protocol.messages import (
    CommandReply,
    EndMigration,
    FinishReason,
    GenerateRequest,
    MigrateOut,
    MigrationCommand,
    MigrationOffer,
    RoomAddress,
    SendPrefix,
)
from pdserve.scheduler.batch_planner import BatchPlanner
from pdserve.scheduler.context import SchedulerContext
from pdserve.scheduler.kv_checksum import KVChecksum
from pdserve.scheduler.request import Req
from pdserve.scheduler.roles.prefix_sends import PrefixSends
from pdserve.transfer.aux import AuxRecord
from pdserve.transfer.manager import KVManager
from pdserve.transfer.room import KVPoll
from pdserve.transfer.wire import TransferStats, prompt_digest

TIMEOUT_S = 60.0
"""Seconds after which a migration without a commit ends, and its request goes on here."""
ABORTED = Failure(code="migration_aborted", message="the migration was aborted; the request goes on where it was")


NO_ROOM = Failure(
    code="migration_no_room", message="no row or KV memory is free for a request of another server", status=503
)


def not_migratable(message: str, *, status: int = 409, code: str = "not_migratable") -> Failure:
    """Return the refusal of a `MigrateOut`."""
    return Failure(code=code, message=message, status=status, field="rid", retryable=False)


class MovePhase(enum.Enum):
    """Progress of a migration, see the file's docstring."""

    STOPPING = "stopping"
    OFFERED = "offered"
    SENDING = "sending"
    SENT = "sent"


@dataclasses.dataclass(slots=True)
class OutgoingMove:
    """A request that moves away. `query_id`: of the `MigrateOut` whose reply is due while STOPPING."""

    req: Req
    query_id: str
    room: int
    begun_at: float
    phase: MovePhase = MovePhase.STOPPING
    was_retracted: bool = False
    """True: the request holds no memory, and goes on in the queue of retracted requests."""
    stopped_at: float | None = None
    draft_hidden: bytes = b""
    """See `Executor.draft_hidden`: the drafter's state when the request stopped."""


class OutgoingMigrations:
    """All migrations of one server. `planner`: it has the decode batch and the queue of retracted requests.

    `leave` releases a request without an output.
    """

    def __init__(
        self,
        context: SchedulerContext,
        kv: KVManager,
        kv_checksum: KVChecksum | None,
        planner: BatchPlanner,
        leave: Callable[[Req], None],
    ) -> None:
        self._context = context
        self._kv = kv
        self._kv_checksum = kv_checksum
        self.prefixes = PrefixSends(context, kv, enabled=kv_checksum is None)
        self._running = planner.running
        self._prefilling = planner.prefilling
        self._leave = leave
        self._resuming: dict[str, Req] = {}
        """Requests whose migration failed: they get the first free rows."""
        self._moves: dict[str, OutgoingMove] = {}
        self._by_room: dict[int, OutgoingMove] = {}

    def __contains__(self, req: Req) -> bool:
        return req.rid in self._moves

    @property
    def stopped(self) -> Iterator[Req]:
        """Requests that have left the batch and hold memory."""
        moves = self._moves.values()
        moving = (it.req for it in moves if it.phase is not MovePhase.STOPPING and not it.was_retracted)
        return itertools.chain(moving, self._resuming.values())

    @property
    def needs_sync(self) -> bool:
        """True when a request is to stop: no step may be under way at the next plan."""
        return any(move.phase is MovePhase.STOPPING for move in self._moves.values())

    def handle(self, command: MigrationCommand, req: Req | None, state: str) -> None:
        """Handle a command about `req`, None where it is not live. `state`: the queue that it is in."""
        match command:
            case EndMigration():
                self.prefixes.cancel(command.rid)
                self.end(command)
            case SendPrefix(prompt=None) if state != "running":
                self._refuse(command.query_id, not_migratable(f"the request is {state or 'not live'}"))
            case SendPrefix():
                self.prefixes.begin(command, req)
            case MigrateOut():
                self.begin(command, req, state)

    def begin(self, command: MigrateOut, req: Req | None, state: str) -> None:
        """Begin to move a request. `state`: the queue that it is in; only running and retracted ones move."""
        failure = self._why_not(command, req, state)
        if failure is not None:
            self._refuse(command.query_id, failure)
            return
        assert req is not None
        if state == "retracted":
            self._offer_retracted(command, req)
            return
        req.aux = self._context.memory.aux.reserve(1, req.rid)
        if req.aux is None:
            self._refuse(command.query_id, not_migratable("no aux slot is free to send the request", status=503))
            return
        move = OutgoingMove(req, command.query_id, command.room, self._context.clock.now())
        self._moves[req.rid] = self._by_room[command.room] = move

    def resume(self) -> None:
        """Give free rows to requests whose migration failed."""
        for req in list(self._resuming.values())[: self._context.memory.table.num_free]:
            del self._resuming[req.rid]
            self._context.assign_row(req)
            self._running.add(req)

    def stop_due(self) -> None:
        """Stop the requests that are to stop. No step is under way."""
        assert self._context.no_step_in_flight
        for move in [move for move in self._moves.values() if move.phase is MovePhase.STOPPING]:
            if self._running.reqs.get(move.req.rid) is move.req:
                self._offer(move)
            else:
                self._cancel(move, not_migratable("the request was retracted before it could move"), resume=False)

    def poll(self) -> None:
        """Send the KV of requests whose receiver is ready; let requests go on whose migration failed or is late."""
        for room in self._kv.drain_state_changes(sending=True):
            move = self._by_room.get(room)
            if move is None or move.req.sender is None:
                self.prefixes.on_change(room)
                continue
            match move.req.sender.poll():
                case KVPoll.FAILED:
                    self._cancel(move, move.req.sender.failure or ABORTED)
                case KVPoll.WAITING_FOR_INPUT if move.phase is MovePhase.OFFERED:
                    self._send(move)
                case KVPoll.SUCCESS:
                    move.phase = MovePhase.SENT
        self.prefixes.tick()
        now = self._context.clock.now()
        for move in [move for move in self._moves.values() if now - move.begun_at > TIMEOUT_S]:
            self._cancel(move, ABORTED, resume=move.phase is not MovePhase.STOPPING)

    def end(self, command: EndMigration) -> None:
        """Commit or abort a migration."""
        move = self._moves.get(command.rid)
        if move is None or (command.commit and move.phase is not MovePhase.SENT):
            message = f"no migration of {command.rid!r} can be committed" if command.commit else "nothing to abort"
            self._refuse(command.query_id, not_migratable(message))
            return
        if command.commit:
            self._context.counters["migrations_out"] += 1
            assert move.stopped_at is not None
            self._context.counters["migration_pause_ms"] += round(1000 * (self._context.clock.now() - move.stopped_at))
            self._leave(move.req)
            self._context.outbox.emit(move.req, (), FinishReason.failed(MIGRATED))
        else:
            self._cancel(move, ABORTED, resume=move.phase is not MovePhase.STOPPING)
        self._reply(CommandReply(query_id=command.query_id, ok=True, message="ok"))

    def leave(self, req: Req, failure: Failure | None) -> None:
        """Forget the migration of a request that ends here, whatever the cause."""
        self._resuming.pop(req.rid, None)
        self.prefixes.leave(req)
        move = self._moves.pop(req.rid, None)
        if move is None:
            return
        del self._by_room[move.room]
        self._reply_if_due(move, not_migratable("the request has ended", status=404, code="no_such_request"))
        if req.sender is not None:
            if move.phase is not MovePhase.SENT:
                req.sender.abort(failure or ABORTED)
            req.sender.close()
            req.sender = None
        if self._kv_checksum is not None:
            self._kv_checksum.forget(req)

    # ------------------------------------------------------------------ inside

    def _why_not(self, command: MigrateOut, req: Req | None, state: str) -> Failure | None:
        if req is None:
            return not_migratable(f"no request {command.rid!r} is live", status=404, code="no_such_request")
        if req.rid in self._moves:
            return not_migratable("another migration of the request has not ended", code="migration_under_way")
        if state not in ("running", "retracted"):
            return not_migratable(f"the request is {state}; only running and retracted requests move")
        if not req.output_ids:
            return not_migratable("the request has no output yet")
        if req.spec.hidden is not None:
            return not_migratable("the request returns hidden states")
        if req.spec.input_embeds:
            return not_migratable("the request has input embeddings")
        if command.room in self._by_room:
            return not_migratable("the migration's room is in use")
        return None

    def _offer_retracted(self, command: MigrateOut, req: Req) -> None:
        """Take a retracted request out of its queue and offer its value: nothing else of it is to be sent."""
        now = self._context.clock.now()
        move = OutgoingMove(
            req, command.query_id, command.room, now, MovePhase.SENT, was_retracted=True, stopped_at=now
        )
        self._moves[req.rid] = self._by_room[command.room] = move
        self._prefilling.remove(req)
        self._reply_with(move)

    def _offer(self, move: OutgoingMove) -> None:
        """Take the request out of the batch and offer it to the other server."""
        req, context = move.req, self._context
        num_tokens = req.seq_len - 1
        assert req.computed == num_tokens and req.row is not None, (req.computed, req.seq_len)
        if context.speculation is not None:
            move.draft_hidden = context.executor.draft_hidden(req.row)
        del self._running.reqs[req.rid]
        req.planned = req.computed
        context.cover_window(req, req.computed, req.computed)
        self._seal(req)
        context.release_row(req)
        move.phase, move.stopped_at = MovePhase.OFFERED, context.clock.now()
        sent = (req.spec.input_ids + req.output_ids)[:num_tokens]
        try:
            req.sender = self._kv.open_sender(move.room, "", prompt_digest(sent, req.adapter_digest), num_tokens)
        except RequestError as error:
            self._reply_if_due(move, Failure.from_error(error), always=True)
            self._cancel(move, ABORTED)
            return
        self._reply_with(move)

    def _reply_with(self, move: OutgoingMove) -> None:
        """Reply to `MigrateOut` with the request as a value."""
        offer = MigrationOffer(request=self._value(move), num_output_tokens=len(move.req.output_ids))
        payload = msgspec.msgpack.encode(offer)
        self._reply(CommandReply(query_id=move.query_id, ok=True, message="ok", payload=payload))

    def _seal(self, req: Req) -> None:
        """Complete the request's state slot, whose stamp names its prompt and its computed tokens."""
        groups = None if req.lease is None else req.lease.groups
        if groups is not None and groups.slot is not None:
            self._context.executor.seal(groups.slot, SlotStamp.of(req.spec.input_ids, req.computed))

    def _value(self, move: OutgoingMove) -> GenerateRequest:
        """Return the request as the other server gets it. The log probabilities of its prompt are known already."""
        spec, req = move.req.spec, move.req
        logprobs = spec.logprobs
        if logprobs is not None:
            logprobs = msgspec.structs.replace(logprobs, prompt_from=None)
        room = RoomAddress(host="migration", port=None, room=move.room, sender=self._kv.address)
        again = move.was_retracted
        return msgspec.structs.replace(
            spec,
            room=None if again else room,
            prior_output_ids=list(req.output_ids) if again else req.output_ids[:-1],
            logprobs=logprobs,
            replica=None,
            traced=False,
            local=again,
            taken_over=again,
            lora_digest=req.adapter_digest if again else "",
            kv_tokens=0,
        )

    def _send(self, move: OutgoingMove) -> None:
        """Send all pages that the other server lacks, and the last token."""
        req, memory = move.req, self._context.memory
        assert req.sender is not None and req.aux is not None and req.lease is not None
        num_pages = memory.num_pages(req.computed)
        times = TransferStats()
        if self._kv_checksum is not None:
            self._kv_checksum.computed(req, num_pages, req.computed)
            times = msgspec.structs.replace(times, kv_checksum=self._kv_checksum.sent(req, req.computed))
        hidden = move.draft_hidden if req.sender.sends_drafts else b""
        record = AuxRecord(
            room=move.room,
            attempt=0,
            first_token=req.output_ids[-1],
            cached_tokens=req.num_cached,
            cached_details=req.cached_details,
            draft_hidden=hidden,
        )
        move.phase = MovePhase.SENDING
        req.sender.finish(req.aux, record, times, lease=req.lease, num_pages=num_pages)

    def _cancel(self, move: OutgoingMove, failure: Failure, *, resume: bool = True) -> None:
        """End a migration that is not committed. `resume`: the request has left the batch, and goes on."""
        req = move.req
        self._reply_if_due(move, failure)
        self.leave(req, failure)
        self._context.counters["migrations_failed"] += 1
        if req.aux is not None:
            req.aux.drop("request")
            req.aux = None
        if move.was_retracted:
            self._prefilling.waiting.add(req, resumed=True)
        elif resume:
            req.draft_hidden = move.draft_hidden
            self._resuming[req.rid] = req

    def _reply_if_due(self, move: OutgoingMove, failure: Failure, *, always: bool = False) -> None:
        if move.phase is MovePhase.STOPPING or always:
            self._refuse(move.query_id, failure)

    def _refuse(self, query_id: str, failure: Failure) -> None:
        self._reply(CommandReply(query_id=query_id, ok=False, message=failure.message, failure=failure))

    def _reply(self, reply: CommandReply) -> None:
        self._context.outbox.send(reply)
