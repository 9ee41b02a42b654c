"""Handles of one transfer: `KVSender` on prefill, `KVReceiver` on decode. Created by `KVManager`.

Scheduler thread only. `poll()` only reads a field.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from pdserve.memory.layer_events import ALL_WRITTEN, LayerEvents
from pdserve.memory.layout import KVLayout
from pdserve.memory.lease import Lease
from pdserve.protocol.failure import Failure
from pdserve.protocol.logprobs import PromptLogprobs
from pdserve.transfer.aux import AuxRecord, MetadataBuffers
from pdserve.transfer.receiver import ReceiveSide
from pdserve.transfer.room import KVPoll, ReceiveRoom, SendRoom
from pdserve.transfer.sender import SendSide
from pdserve.transfer.wire import MemoryKey, TransferStats


class KVSender:
    """Prefill's handle on one room."""

    def __init__(self, side: SendSide, aux: MetadataBuffers, layout: KVLayout, room: SendRoom) -> None:
        self._side = side
        self._aux = aux
        self._layout = layout
        self._room = room
        self._num_sent = 0

    def poll(self) -> KVPoll:
        """Return the state of the transfer."""
        return self._room.state

    @property
    def failure(self) -> Failure | None:
        """Why the transfer failed; None unless it did."""
        return self._room.failure

    @property
    def is_fake(self) -> bool:
        """True when no bytes are transferred."""
        return self._room.fake

    @property
    def key(self) -> MemoryKey | None:
        """Key of this transfer on both sides; None before the receiver is known."""
        return None if self._room.target is None else self._room.target.key

    @property
    def num_cached_tokens(self) -> int:
        """Leading tokens (whole pages) whose KV cache the receiver already has; 0 before WAITING_FOR_INPUT.

        The number may change with a new attempt of the receiver until the first page is sent.
        """
        return 0 if self._room.target is None else self._room.target.cached_tokens

    @property
    def sends_drafts(self) -> bool:
        """True when the receiver has an equal drafter: it takes draft KV, drafts and the drafter's hidden state."""
        return self._side.sends_drafts(self._room)

    @property
    def stats(self) -> TransferStats:
        """Amount of sent data and durations; valid after SUCCESS."""
        return self._room.stats

    def send(
        self, lease: Lease, num_pages: int, layers: Sequence[range] = (), layer_events: LayerEvents = ALL_WRITTEN
    ) -> None:
        """Send the first `num_pages` pages of the request, without pages sent before or cached by the receiver.

        Args:
            lease: all pages of the prompt, in token order. Has the hold `send` until the last copy has ended.
            num_pages: counted from the beginning of the prompt.
            layers: ranges that together cover all layers once, in order; each is one copy job. Empty: one range.
            layer_events: of the step that writes the pages. Each range is copied once it is written.
        """
        if self._room.fake or self.poll() is KVPoll.FAILED:
            return
        first = max(self._num_sent, self._layout.whole_pages(self.num_cached_tokens))
        if num_pages > first:
            self._side.send(self._room, lease, range(first, num_pages), layers, layer_events)
            self._num_sent = num_pages

    def send_logprobs(self, part: PromptLogprobs) -> None:
        """Send prompt log probabilities that the client requested, split into messages. Call before `finish`."""
        if not self._room.fake:
            self._side.send_logprobs(self._room, part)

    def finish(
        self,
        slot: Lease,
        record: AuxRecord,
        times: TransferStats,
        *,
        lease: Lease | None = None,
        num_pages: int = 0,
    ) -> None:
        """Send the pages up to the first `num_pages` of `lease`, as `send` does, and the aux record as the last piece.

        One call lands sooner than a `send` followed by a `finish`. `finish` fills in the attempt, the tokens and the
        state items of `record`. Layer copies may still wait for their layers; the transfer succeeds when these copies
        have landed as well.
        """
        if self._room.fake:
            self._room.move(KVPoll.SUCCESS)
            return
        if self.poll() is KVPoll.FAILED or self._room.target is None:
            return
        attempt, num_tokens = self._room.target.key.attempt, self._room.num_tokens or 0

        def write_record(num_state_items: int) -> None:
            own = dataclasses.replace(
                record,
                attempt=attempt,
                num_tokens=num_tokens,
                state_type=self._layout.state_type,
                num_state_items=num_state_items,
            )
            self._aux.write(slot.pages[0], own)

        first = max(self._num_sent, self._layout.whole_pages(self.num_cached_tokens))
        pages = range(first, first if lease is None else max(first, num_pages))
        self._side.send_last(self._room, lease if pages else None, pages, slot, times, write_record)
        self._num_sent = pages.stop

    def abort(self, failure: Failure) -> None:
        """Fail the transfer and notify the receiver."""
        self._side.fail(self._room, failure)

    def close(self) -> None:
        """Release the room. A running transfer continues without the request."""
        self._side.close(self._room)


class KVReceiver:
    """Decode's handle on one room."""

    def __init__(self, side: ReceiveSide, aux: MetadataBuffers, layout: KVLayout, room: ReceiveRoom) -> None:
        self._side = side
        self._aux = aux
        self._state_type = layout.state_type
        self._room = room

    def poll(self) -> KVPoll:
        """Return the state of the transfer."""
        return self._room.state

    @property
    def is_fake(self) -> bool:
        """True when no bytes arrive: the pages then hold no valid KV cache."""
        return self._room.fake

    @property
    def key(self) -> MemoryKey:
        """Key of this transfer on both sides."""
        return self._room.key

    @property
    def failure(self) -> Failure | None:
        """Why the transfer failed; None unless it did."""
        return self._room.failure

    @property
    def stats(self) -> TransferStats:
        """Statistics measured by the sender; valid after SUCCESS."""
        return self._room.stats

    def take_logprobs(self) -> list[PromptLogprobs]:
        """Return the sender's prompt log probabilities in order; after SUCCESS. A second call returns an empty list."""
        logprob_parts, self._room.logprob_parts, self._room.takes_logprobs = self._room.logprob_parts, {}, False
        return [logprob_parts[index] for index in sorted(logprob_parts)]

    def publish(self, lease: Lease, aux: Lease, cached_tokens: int = 0, num_tokens: int | None = None) -> None:
        """Publish the local pages and aux slot to the sender.

        Args:
            lease: all pages, in token order.
            aux: the slot for the first token.
            cached_tokens: leading tokens (whole pages) whose KV cache is already in `lease`. These pages may be shared,
                so the sender is not sent their addresses; the hold `remote` is on the whole lease.
            num_tokens: tokens of the prompt; None: as many as the pages hold.
        """
        self._aux.clear(aux.pages[0])
        if self._room.fake:
            self._aux.write(aux.pages[0], AuxRecord(self._room.room, self._room.key.attempt, first_token=0))
        self._side.publish(self._room, lease, aux, cached_tokens, num_tokens)

    def take(self, aux: Lease) -> AuxRecord | None:
        """Return the aux record after SUCCESS.

        None when it belongs to another room, to KV and state of another length, or when other state items were sent
        than the receiver published: the request must fail.
        """
        record, room = self._aux.read(aux.pages[0]), self._room
        is_own = (record.room, record.attempt) == (room.room, room.key.attempt)
        is_known = room.num_tokens is not None and record.num_tokens > 0
        fits = record.num_tokens == room.num_tokens and self._has_state(record)
        return record if is_own and (fits or not is_known) else None

    def _has_state(self, record: AuxRecord) -> bool:
        """True when the record names the state type of the layout, and as many state items as were published."""
        return (record.state_type, record.num_state_items) == (self._state_type, self._room.num_state_items)

    def abort(self, failure: Failure) -> None:
        """Fail the transfer and notify the sender."""
        self._side.fail(self._room, failure)

    def close(self) -> None:
        """Release the room. Pages stay held until the sender has stopped writing."""
        self._side.close(self._room)
