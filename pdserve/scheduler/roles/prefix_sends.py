"""Prefixes that are sent to another decode server while they stay here: stages of a migration, and hot prefixes.

SendPrefix ──> offered: a sender is open; the reply has a request with `max_new_tokens` 0 for the other server
                 v      the other server publishes the pages that its prefix cache lacks
               sent ──> the pages have landed there, and its prefix cache has them

Whole pages whose KV is computed never change, so a running request's pages are sent while it runs. A prefix without a
request is a lease over pages of the prefix cache. Only layouts whose groups all have pages of tokens: window pages and
states of a running request change. Part of `OutgoingMigrations`; scheduler thread.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import msgspec

from pdserve.errors import RequestError
from pdserve.memory.layout import PageSpace
from pdserve.memory.lease import Lease
from pdserve.protocol.failure import Failure
from pdserve.protocol.messages import CommandReply, MigrationOffer, RoomAddress, SendPrefix
from pdserve.protocol.sampling import CoreSamplingParams
from pdserve.scheduler.context import SchedulerContext
from pdserve.scheduler.request import Req, Times
from pdserve.transfer.aux import AuxRecord
from pdserve.transfer.handles import KVSender
from pdserve.transfer.manager import KVManager
from pdserve.transfer.room import KVPoll
from pdserve.transfer.wire import TransferStats, prompt_digest

TIMEOUT_S = 60.0
"""Seconds after which a prefix that no server has taken is given up."""
MIN_STAGE_PAGES = 2
"""A later stage of a migration has at least as many new pages."""
GIVEN_UP = Failure(code="migration_aborted", message="the prefix is not sent any more")


@dataclasses.dataclass(slots=True)
class _Sending:
    """One prefix. `req`: the running request whose pages they are; None: `lease` is of this prefix alone."""

    rid: str
    room: int
    sender: KVSender
    aux: Lease
    lease: Lease
    num_pages: int
    begun_at: float
    req: Req | None

    @property
    def has_pages(self) -> bool:
        """False once the request has given its pages back: it was retracted, or has ended."""
        return self.req is None or self.req.lease is self.lease


class PrefixSends:
    """All prefixes that are being sent. `enabled` False: KV is hashed on its way, which prefixes have no place for."""

    def __init__(self, context: SchedulerContext, kv: KVManager, *, enabled: bool) -> None:
        self._context = context
        self._kv = kv
        self._by_room: dict[int, _Sending] = {}
        layout = context.memory.layout
        self._enabled = enabled and all(group.space is PageSpace.TOKENS for group in layout.groups)

    @property
    def owners(self) -> Collection[str]:
        """Owners of leases and rooms here that are no live requests."""
        return [_owner(room) for room in self._by_room]

    def begin(self, command: SendPrefix, req: Req | None) -> None:
        """Offer a prefix, or count its tokens.

        `req`: the running request of the command's rid; None: `command.prompt` names it.
        """
        if not self._enabled:
            self._refuse(command, "prefixes of this model do not move", code="no_prefix")
            return
        try:
            prompt = req or self._cached(command)
            if command.count_only:
                payload = msgspec.msgpack.encode(self._context.memory.layout.round_down(prompt.computed))
                self._reply(CommandReply(query_id=command.query_id, ok=True, message="ok", payload=payload))
                return
            self._offer(command, prompt, req)
        except RequestError as error:
            failure = Failure.from_error(error)
            self._reply(CommandReply(query_id=command.query_id, ok=False, message=failure.message, failure=failure))

    def on_change(self, room: int) -> None:
        """Send a prefix whose receiver is ready; end one that has landed or failed."""
        sending = self._by_room.get(room)
        if sending is None:
            return
        match sending.sender.poll():
            case KVPoll.WAITING_FOR_INPUT if not sending.has_pages:
                self._give_up(sending)
            case KVPoll.WAITING_FOR_INPUT:
                sending.sender.finish(
                    sending.aux,
                    AuxRecord(room=room, attempt=0, first_token=0),
                    TransferStats(),
                    lease=sending.lease,
                    num_pages=sending.num_pages,
                )
            case KVPoll.SUCCESS:
                self._context.counters["prefixes_sent"] += 1
                self._end(sending)
            case KVPoll.FAILED:
                self._end(sending)

    def tick(self) -> None:
        """Give up prefixes that no server has taken in time."""
        now = self._context.clock.now()
        for sending in [it for it in self._by_room.values() if now - it.begun_at > TIMEOUT_S]:
            self._give_up(sending)

    def leave(self, req: Req) -> None:
        """Give up the prefixes of a request that gives its pages back. Copies that have begun hold the pages."""
        for sending in [it for it in self._by_room.values() if it.req is req]:
            self._give_up(sending)

    def cancel(self, rid: str) -> None:
        """Give up the prefixes of the request `rid`, or the one that `SendPrefix` named so."""
        for sending in [it for it in self._by_room.values() if it.rid == rid]:
            self._give_up(sending)

    # ------------------------------------------------------------------ inside

    def _cached(self, command: SendPrefix) -> Req:
        """Return a request for the pages of a prompt that the prefix cache has."""
        spec = command.prompt
        assert spec is not None, "a prefix is named by a request or a prompt"
        req = Req(spec, Times(arrived=self._context.clock.now()))
        if spec.lora is not None:
            self._context.give_adapter(req, spec.lora)
        req.computed = self._context.memory.match_prefix(req.token_bytes(req.seq_len), req.seq_len)
        return req

    def _offer(self, command: SendPrefix, prompt: Req, req: Req | None) -> None:
        """Open a sender for the whole computed pages of `prompt`. Raises RequestError when there is nothing to send."""
        context, memory = self._context, self._context.memory
        num_tokens = memory.layout.round_down(prompt.computed)
        if num_tokens - command.after < memory.layout.tokens_in(MIN_STAGE_PAGES if command.after else 1):
            raise RequestError("there are no whole pages to send", field="rid", status=409, code="no_prefix")
        tokens, owner = (prompt.spec.input_ids + prompt.output_ids)[:num_tokens], _owner(command.room)
        sender = self._kv.open_sender(command.room, "", prompt_digest(tokens, prompt.adapter_digest), num_tokens)
        aux = memory.aux.reserve(1, owner)
        lease = prompt.lease
        if req is None and aux is not None:
            lease = memory.reserve_tokens(num_tokens, owner, prompt.token_bytes(num_tokens), num_tokens)
        if aux is None or lease is None:
            sender.close()
            if aux is not None:
                aux.drop("request")
            raise RequestError("no memory is free to send the prefix", status=503, code="no_prefix")
        num_pages = memory.num_pages(num_tokens)
        self._by_room[command.room] = _Sending(
            command.rid, command.room, sender, aux, lease, num_pages, context.clock.now(), req
        )
        request = msgspec.structs.replace(
            prompt.spec,
            input_ids=tokens,
            prior_output_ids=[],
            sampling=CoreSamplingParams(max_new_tokens=0),
            logprobs=None,
            stream=False,
            room=RoomAddress(host="migration", port=None, room=command.room, sender=self._kv.address),
            replica=None,
            traced=False,
            local=False,
            taken_over=False,
        )
        payload = msgspec.msgpack.encode(MigrationOffer(request=request, num_output_tokens=0))
        self._reply(CommandReply(query_id=command.query_id, ok=True, message="ok", payload=payload))

    def _give_up(self, sending: _Sending) -> None:
        sending.sender.abort(GIVEN_UP)
        self._end(sending)

    def _end(self, sending: _Sending) -> None:
        del self._by_room[sending.room]
        sending.sender.close()
        sending.aux.drop("request")
        if sending.req is None:
            sending.lease.drop("request")

    def _refuse(self, command: SendPrefix, message: str, *, code: str) -> None:
        failure = Failure(code=code, message=message, status=409, field="rid", retryable=False)
        self._reply(CommandReply(query_id=command.query_id, ok=False, message=message, failure=failure))

    def _reply(self, reply: CommandReply) -> None:
        self._context.outbox.send(reply)


def _owner(room: int) -> str:
    return f"prefix in room {room}"
