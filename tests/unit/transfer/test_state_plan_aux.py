"""The pure parts of transfer: state table, copy plans, aux slots."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.protocol.cached_tokens import CachedTokensDetails
from pdserve.transfer.aux import MAX_TOP_LOGPROBS, AuxRecord, MetadataBuffers
from pdserve.transfer.room import TERMINAL, KVPoll, advance, merge_ranks
from pdserve.transfer.wire import TransferStats
from tests.unit.transfer.kit import ADDRESS, meet

PAIRS = list(itertools.product(KVPoll, repeat=2))


def test_the_numbers_are_what_min_over_ranks_relies_on() -> None:
    assert [state.value for state in KVPoll] == [0, 1, 2, 3, 4]
    assert KVPoll.FAILED < KVPoll.BOOTSTRAPPING < KVPoll.WAITING_FOR_INPUT < KVPoll.TRANSFERRING < KVPoll.SUCCESS


@pytest.mark.parametrize(("current", "new"), PAIRS)
def test_advance(current: KVPoll, new: KVPoll) -> None:
    after = advance(current, new)
    if current in TERMINAL:
        assert after is current, "the first terminal state wins"
    elif new is KVPoll.FAILED:
        assert after is KVPoll.FAILED, "failure wins from any live state"
    else:
        assert after >= current and after >= new, "forward only"
    assert advance(after, new) is after, "a repeated event changes nothing"


@pytest.mark.parametrize(("left", "right"), PAIRS)
def test_merging_ranks(left: KVPoll, right: KVPoll) -> None:
    merged = merge_ranks([left, right])
    assert merged is merge_ranks([right, left])
    assert merged in (left, right)
    assert (merged is KVPoll.FAILED) == (KVPoll.FAILED in (left, right)), "one failure fails all"
    assert (merged is KVPoll.SUCCESS) == (left is right is KVPoll.SUCCESS), "the slowest rank leads"


TOKENS = st.integers(0, 2**31)
LOGPROBS = st.floats(-100, 0)
RECORDS = st.builds(
    AuxRecord,
    room=st.integers(0, 2**63 - 1),
    attempt=st.integers(0, 2**63 - 1),
    first_token=TOKENS,
    cached_tokens=TOKENS,
    logprob=st.none() | LOGPROBS,
    top=st.lists(st.tuples(TOKENS, LOGPROBS), max_size=MAX_TOP_LOGPROBS).map(tuple),
    num_tokens=TOKENS,
    state_type=st.sampled_from(("none", "mamba", "swa", "nsa", "mamba,swa", "mamba,swa,nsa")),
    num_state_items=TOKENS,
)


@given(records=st.lists(RECORDS, min_size=3, max_size=3))
@settings(max_examples=60, deadline=None)
def test_what_is_written_to_a_slot_is_read_and_disturbs_no_other(records: list[AuxRecord]) -> None:
    aux = MetadataBuffers(3)
    for _ in range(2):
        for slot, record in enumerate(records):
            aux.write(slot, record)
    assert [aux.read(slot) for slot in range(3)] == records
    aux.clear(1)
    assert aux.read(1) == AuxRecord(room=0, attempt=0, first_token=0, logprob=0.0)
    assert [aux.read(0), aux.read(2)] == [records[0], records[2]]


PARTS = st.integers(0, 2**20)


@given(device=PARTS, host=PARTS, storage=st.none() | PARTS)
@settings(max_examples=30, deadline=None)
def test_a_slot_has_where_cached_tokens_were(device: int, host: int, storage: int | None) -> None:
    details = CachedTokensDetails(device=device, host=host, storage=storage)
    record = AuxRecord(1, 1, 5, cached_tokens=details.num_tokens, cached_details=details)
    aux = MetadataBuffers(1)
    aux.write(0, record)
    assert aux.read(0) == record
    aux.write(0, dataclasses.replace(record, cached_tokens=details.num_tokens + 1))
    assert aux.read(0).cached_details is None, "parts that do not add up"
    aux.write(0, dataclasses.replace(record, cached_details=None))
    assert aux.read(0) == dataclasses.replace(record, cached_details=None)


def test_details_of_cached_tokens_changed_neither_size_nor_offsets() -> None:
    aux = MetadataBuffers(1)
    assert aux.common_bytes == 2496, "servers compare `aux_slot_bytes`"
    aux.write(0, AuxRecord(1, 2, 5, cached_tokens=7, logprob=0.0))
    numbers = np.frombuffer(aux.take_out(0), dtype="<u8")
    older = np.zeros_like(numbers)
    older[::8] = numbers[::8]  # a sender without details writes the first number of each 64 bytes alone
    aux.put_in(0, older.tobytes())
    assert aux.read(0) == AuxRecord(1, 2, 5, cached_tokens=7, logprob=0.0)


def test_a_shorter_record_leaves_nothing_of_a_longer_one() -> None:
    aux = MetadataBuffers(1)
    aux.write(0, AuxRecord(1, 1, 5, top=tuple((i, -1.0) for i in range(MAX_TOP_LOGPROBS))))
    short = AuxRecord(2, 1, 6, top=((7, -0.5),))
    aux.write(0, short)
    assert aux.read(0) == short


def test_every_field_starts_at_64_bytes_for_rdma() -> None:
    aux, empty = MetadataBuffers(1), AuxRecord(0, 0, 0, logprob=0.0)
    changes: list[dict[str, Any]] = [
        {"room": 1},
        {"attempt": 1},
        {"first_token": 1},
        {"cached_tokens": 1},
        {"num_tokens": 1},
        {"logprob": -1.0},
        {"top": ((1, -1.0),)},
    ]
    starts = set()
    for change in changes:
        aux.write(0, empty)
        before = np.frombuffer(aux.take_out(0), dtype="<u8")
        aux.write(0, dataclasses.replace(empty, **change))
        starts |= set((8 * np.flatnonzero(np.frombuffer(aux.take_out(0), dtype="<u8") != before)).tolist())
    assert len(starts) == 9 and all(start % 64 == 0 for start in starts)
    assert MetadataBuffers(4).slot_bytes % 64 == 0
    assert MetadataBuffers(4).buffer[1] == 4 * MetadataBuffers(4).slot_bytes


def test_garbage_in_a_slot_is_read_without_harm() -> None:
    aux = MetadataBuffers(1)
    aux.put_in(0, b"\xff" * aux.slot_bytes)
    assert len(aux.read(0).top) <= MAX_TOP_LOGPROBS


def test_a_record_of_another_length_is_not_taken() -> None:
    """The recurrent state that arrived with it would belong to another position."""
    net, prefill, decode = meet()
    sender = prefill.kv.open_sender(7, ADDRESS[0], "d", 9)
    receiver = decode.kv.open_receiver(7, ADDRESS, "d")
    net.pump()
    (mine, my_slot), (theirs, their_slot) = prefill.leases(3), decode.leases(3)
    receiver.publish(theirs, their_slot, num_tokens=9)
    net.pump()
    sender.finish(my_slot, AuxRecord(7, 0, 42), TransferStats(), lease=mine, num_pages=3)
    sent = prefill.kv.args.aux.read(my_slot.pages[0])
    assert sent.num_tokens == 9
    changes: list[tuple[dict[str, Any], bool]] = [
        ({}, True),
        ({"num_tokens": 8}, False),
        ({"num_tokens": 0}, True),
        ({"num_state_items": 1}, False),
        ({"state_type": "mamba"}, False),
    ]
    for change, is_taken in changes:
        decode.kv.args.aux.write(their_slot.pages[0], dataclasses.replace(sent, **change))
        assert (receiver.take(their_slot) is not None) == is_taken, change
