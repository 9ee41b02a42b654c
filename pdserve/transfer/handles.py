"""What a role holds of one transfer: `KVSender` on prefill, `KVReceiver` on decode. Made by `KVManager`.

Scheduler thread only. `poll()` is a plain read.
"""

from __future__ import annotations

import dataclasses

from pdserve.memory.lease import Lease
from pdserve.protocol.failure import Failure
from pdserve.protocol.logprobs import PromptLogprobs
from pdserve.transfer.aux import AuxRecord, MetadataBuffers
from pdserve.transfer.events import Gates
from pdserve.transfer.receiver import ReceiveSide
from pdserve.transfer.room import ReceiveRoom, SendRoom
from pdserve.transfer.sender import SendSide
from pdserve.transfer.state import KVPoll
from pdserve.transfer.wire import MemoryKey, TransferStats


class KVSender:
    """Prefill's handle on one room."""

    def __init__(self, side: SendSide, aux: MetadataBuffers, page_tokens: int, room: SendRoom) -> None:
        self._side = side
        self._aux = aux
        self._page_tokens = page_tokens
        self._room = room
        self._num_sent = 0

    def poll(self) -> KVPoll:
        """Where the transfer stands."""
        return self._room.state

    @property
    def failure(self) -> Failure | None:
        """Why it failed."""
        return self._room.failure

    @property
    def is_fake(self) -> bool:
        """True when no bytes go anywhere."""
        return self._room.fake

    @property
    def key(self) -> MemoryKey | None:
        """What both sides call this transfer; None before the receiver is known."""
        return None if self._room.target is None else self._room.target.key

    @property
    def num_cached_tokens(self) -> int:
        """Tokens, from the first on and whole pages, whose KV the receiver has already; 0 before WAITING_FOR_INPUT.

        Until something was sent, another attempt of the receiver may change it.
        """
        return 0 if self._room.target is None else self._room.target.cached_tokens

    @property
    def stats(self) -> TransferStats:
        """What was sent, and how long that took; after SUCCESS."""
        return self._room.stats

    def send(self, lease: Lease, num_pages: int, gates: Gates = ()) -> None:
        """Send the request's pages up to the first `num_pages`, but for those sent before or cached by the receiver.

        Args:
            lease: all pages of the prompt, in the order of its tokens. Held as `send` until the last copy has ended.
            num_pages: counted from the prompt's beginning.
            gates: ranges which together cover the layers `[0, num_layers)` once. Each is copied once its gate is
                open. Empty: all layers are written, and go at once.
        """
        if self._room.fake or self.poll() is KVPoll.FAILED:
            return
        first = max(self._num_sent, self.num_cached_tokens // self._page_tokens)
        if num_pages > first:
            self._side.send(self._room, lease, range(first, num_pages), gates)
            self._num_sent = num_pages

    def tell(self, part: PromptLogprobs) -> None:
        """Send log probabilities that the receiver's client wants. Before `finish`; a long stretch goes in parts."""
        if not self._room.fake:
            self._side.tell(self._room, part)

    def finish(
        self,
        slot: Lease,
        record: AuxRecord,
        times: TransferStats,
        *,
        lease: Lease | None = None,
        num_pages: int = 0,
    ) -> None:
        """Send the pages up to the first `num_pages` of `lease`, as `send` does, and the aux record, the last piece.

        Together they are sooner there than by `send` and `finish`. `record.attempt` is filled in here. Copies of
        layers may still wait for their gates; the transfer succeeds when these, too, have landed.
        """
        if self._room.fake:
            self._room.move(KVPoll.SUCCESS)
            return
        if self.poll() is KVPoll.FAILED or self._room.target is None:
            return
        self._aux.write(slot.pages[0], dataclasses.replace(record, attempt=self._room.target.key.attempt))
        first = max(self._num_sent, self.num_cached_tokens // self._page_tokens)
        pages = range(first, first if lease is None else max(first, num_pages))
        self._side.send_last(self._room, lease if pages else None, pages, slot, times)
        self._num_sent = pages.stop

    def abort(self, failure: Failure) -> None:
        """End the transfer; the receiver is told."""
        self._side.fail(self._room, failure)

    def close(self) -> None:
        """Let go of the room. A transfer still running goes on without the request."""
        self._side.close(self._room)


class KVReceiver:
    """Decode's handle on one room."""

    def __init__(self, side: ReceiveSide, aux: MetadataBuffers, room: ReceiveRoom) -> None:
        self._side = side
        self._aux = aux
        self._room = room

    def poll(self) -> KVPoll:
        """Where the transfer stands."""
        return self._room.state

    @property
    def is_fake(self) -> bool:
        """True when no bytes come: whatever is in the pages then is nobody's KV."""
        return self._room.fake

    @property
    def key(self) -> MemoryKey:
        """What both sides call this transfer."""
        return self._room.key

    @property
    def failure(self) -> Failure | None:
        """Why it failed."""
        return self._room.failure

    @property
    def stats(self) -> TransferStats:
        """What the sender measured; after SUCCESS."""
        return self._room.stats

    def take_logprobs(self) -> list[PromptLogprobs]:
        """What the sender told, in the order of its telling; after SUCCESS, and once: they are the caller's then."""
        told, self._room.told, self._room.takes_logprobs = self._room.told, {}, False
        return [told[index] for index in sorted(told)]

    def publish(self, lease: Lease, aux: Lease, cached_tokens: int = 0) -> None:
        """Give our pages and aux slot to the sender.

        Args:
            lease: all pages, in the order of their tokens.
            aux: the slot for the first token.
            cached_tokens: tokens whose KV is in the first pages of `lease` already, whole pages. These pages may be
                shared, so the sender never learns where they are; the hold `remote` is on the whole lease.
        """
        self._aux.clear(aux.pages[0])
        if self._room.fake:
            self._aux.write(aux.pages[0], AuxRecord(self._room.room, self._room.key.attempt, first_token=0))
        self._side.publish(self._room, (lease,), aux, cached_tokens)

    def take(self, aux: Lease) -> AuxRecord | None:
        """The aux record after SUCCESS; None when it is not of this room, which must fail the request."""
        record = self._aux.read(aux.pages[0])
        return record if (record.room, record.attempt) == (self._room.room, self._room.key.attempt) else None

    def abort(self, failure: Failure) -> None:
        """End the transfer; the sender is told."""
        self._side.fail(self._room, failure)

    def close(self) -> None:
        """Let go of the room. Pages stay held until the sender has stopped writing."""
        self._side.close(self._room)
