"""Prompts of which decode has the beginning already, and chunks that go layer by layer."""

from __future__ import annotations

import dataclasses

import pytest

from pdserve.base.parallel import ParallelShape
from pdserve.memory.layer_events import ALL_WRITTEN, CountedLayerEvents
from pdserve.memory.layout import KVLayout, attention_group
from pdserve.protocol.failure import Failure
from pdserve.sim.hash_lm import hash_layout
from pdserve.transfer.aux import AuxRecord
from pdserve.transfer.copy_workers import NEVER_WRITTEN
from pdserve.transfer.events import CopyDone, FrameArrived
from pdserve.transfer.manager import FAKE_BOOTSTRAP_HOST
from pdserve.transfer.plan import ChunkPlanner
from pdserve.transfer.room import KVPoll, check_prompt_fits_pages
from pdserve.transfer.wire import (
    Hello,
    MemoryKey,
    Packet,
    RankMemory,
    TransferDone,
    TransferEnded,
    TransferInfo,
    TransferStats,
    Wire,
    WireRegion,
)
from tests.unit.transfer.kit import ADDRESS, CLIENT_LEFT, TOKEN, Net, Pair, Side, assert_quiet_and_free, meet

PAGE_TOKENS, NUM_LAYERS = 4, 3


def computing() -> CountedLayerEvents:
    """Layer events of a step that has written none yet."""
    return CountedLayerEvents(range(NUM_LAYERS))


# ---------------------------------------------------------------------- what decode has already


@pytest.mark.parametrize("num_cached", [0, 1, 2, 3])
def test_only_pages_that_the_receiver_lacks_are_published_and_sent(num_cached: int) -> None:
    net, prefill, decode = meet()
    page_bytes = prefill.kv.args.layout.groups[0].page_bytes
    pair = Pair(net, prefill, decode, cached_tokens=num_cached * PAGE_TOKENS)
    (info,) = net.said(TransferInfo)
    assert isinstance(info, TransferInfo)
    assert info.pages == (tuple(pair.theirs[0].pages[num_cached:]),), "cached pages are not published"
    assert pair.sender.num_cached_tokens == info.cached_tokens == num_cached * PAGE_TOKENS
    assert decode.kv.counts()["pages_held_remote"] == 3 - num_cached + 1
    assert all(lease.held_by("remote") for lease in pair.theirs)

    pair.send()
    base = decode.kv.args.ranks[0].kv_regions[0].address
    written = {
        (copy.destination + i * page_bytes) // page_bytes
        for job in prefill.engine.jobs
        for _, destination, copies in job.pieces
        for copy in copies
        if destination == base
        for i in range(copy.num_bytes // page_bytes)
    }
    assert written == set(pair.theirs[0].pages[num_cached:])
    assert len(prefill.engine.jobs) == (1 if num_cached == 3 else 2)
    prefill.end_jobs()
    net.pump()
    assert pair.sender.poll() is pair.receiver.poll() is KVPoll.SUCCESS
    stats = pair.receiver.stats
    assert stats.num_pages == 3 - num_cached
    assert stats.num_bytes == (3 - num_cached) * page_bytes + decode.kv.args.aux.slot_bytes
    pair.drop_requests()
    assert_quiet_and_free(prefill, decode)


def test_chunks_below_what_is_cached_send_nothing_and_the_next_begins_behind_it() -> None:
    net, prefill, decode = meet()
    pair = Pair(net, prefill, decode, cached_tokens=2 * PAGE_TOKENS)
    page_bytes = prefill.kv.args.layout.groups[0].page_bytes
    for num_pages in (0, 1, 2):
        pair.sender.send(pair.mine[0], num_pages)
    assert not prefill.engine.jobs and pair.sender.poll() is KVPoll.WAITING_FOR_INPUT
    assert not pair.mine[0].held_by("send")
    pair.sender.send(pair.mine[0], 3)
    (job,) = prefill.engine.jobs
    ((_, _, (copy,)),) = job.pieces
    assert (copy.source, copy.destination) == (
        pair.mine[0].pages[2] * page_bytes,
        pair.theirs[0].pages[2] * page_bytes,
    )


def test_nothing_but_the_aux_slot_goes_when_all_is_cached_even_without_a_send() -> None:
    net, prefill, decode = meet()
    pair = Pair(net, prefill, decode, cached_tokens=3 * PAGE_TOKENS)
    pair.sender.finish(pair.mine[1], AuxRecord(7, 0, 42, cached_tokens=12), TransferStats(prefill_s=1.0))
    assert [job.num_bytes for job in prefill.engine.jobs] == [decode.kv.args.aux.slot_bytes]
    prefill.end_jobs()
    net.pump()
    assert pair.receiver.poll() is KVPoll.SUCCESS
    assert (pair.receiver.stats.num_pages, pair.receiver.stats.prefill_s) == (0, 1.0)
    pair.drop_requests()
    assert_quiet_and_free(prefill, decode)


def test_what_is_cached_is_unknown_before_the_receiver_came() -> None:
    net, prefill, decode = meet()
    sender = prefill.kv.open_sender(7, ADDRESS[0], "d", num_tokens=12)
    assert (sender.poll(), sender.num_cached_tokens) == (KVPoll.BOOTSTRAPPING, 0)
    decode.kv.open_receiver(7, ADDRESS, "d").publish(*decode.leases(), cached_tokens=8)
    net.pump()
    assert (sender.poll(), sender.num_cached_tokens) == (KVPoll.WAITING_FOR_INPUT, 8)


def test_a_later_attempt_that_has_less_gets_what_the_earlier_one_had() -> None:
    net, prefill, decode = meet()
    pair = Pair(net, prefill, decode, cached_tokens=2 * PAGE_TOKENS)
    pair.sender.send(pair.mine[0], 2)
    pair.receiver.close()
    second = decode.kv.open_receiver(7, ADDRESS, "d")
    second.publish(*decode.leases())
    net.pump()
    assert pair.sender.num_cached_tokens == 0
    pair.send()
    prefill.end_jobs()
    net.pump()
    assert second.poll() is KVPoll.SUCCESS and second.stats.num_pages == 3


def test_a_fake_transfer_may_have_cached_tokens() -> None:
    side = Side(Net(), "alone")
    receiver = side.kv.open_receiver(7, (FAKE_BOOTSTRAP_HOST, 1), "d")
    lease, aux = side.leases()
    receiver.publish(lease, aux, cached_tokens=8)
    assert receiver.poll() is KVPoll.SUCCESS
    sender = side.kv.open_sender(7, FAKE_BOOTSTRAP_HOST, "d", num_tokens=12)
    sender.send(lease, 3, [range(NUM_LAYERS)], computing())
    assert sender.num_cached_tokens == 0 and not side.engine.jobs


@pytest.mark.parametrize("cached_tokens", [3, 16])
def test_publishing_other_than_whole_pages_of_ours_is_a_bug(cached_tokens: int) -> None:
    _, _, decode = meet()
    receiver = decode.kv.open_receiver(7, ADDRESS, "d")
    leases = decode.leases()
    with pytest.raises(AssertionError):
        receiver.publish(*leases, cached_tokens)
    assert not any(lease.held_by("remote") for lease in leases)


@pytest.mark.parametrize("early", [False, True], ids=["request first", "info first"])
@pytest.mark.parametrize(
    ("cached_tokens", "num_pages", "says"),
    [
        pytest.param(3, 3, "cached_tokens is 3", id="no whole pages"),
        pytest.param(16, 0, "cached_tokens is 16", id="more than the prompt"),
        pytest.param((1 << 62), 3, "cached_tokens is 4611686018427387904", id="far more"),
        pytest.param(0, 2, "pages has 2 pages, but 3", id="a page too few"),
        pytest.param(8, 0, "pages has 0 pages, but 1", id="a page too few behind cached ones"),
    ],
)
def test_metadata_that_does_not_fit_the_prompt_is_refused_by_name(
    cached_tokens: int, num_pages: int, says: str, early: bool
) -> None:
    net, prefill, _ = meet()
    info = TransferInfo(
        key=MemoryKey(7, 1, "decode-1"),
        cached_tokens=cached_tokens,
        pages=(tuple(range(num_pages)),),
        aux_slot=0,
        prompt_digest="d",
    )
    peer = prefill.kv.sessions.peer("decode-1")
    assert peer is not None
    packet = Packet(sender="decode-1", receiver=prefill.instance, session=peer.session, seq=1 << 40, body=info)
    sender = None if early else prefill.kv.open_sender(7, ADDRESS[0], "d", num_tokens=11)
    prefill.kv.handle(FrameArrived(Wire(TOKEN).encode(packet)))
    sender = sender or prefill.kv.open_sender(7, ADDRESS[0], "d", num_tokens=11)
    net.pump()
    assert prefill.kv.counters["metas_refused"] == 1
    assert sender.poll() is KVPoll.BOOTSTRAPPING
    ended = net.said(TransferEnded)[-1]
    assert isinstance(ended, TransferEnded) and ended.quiesced
    assert ended.failure.code == "bad_metadata" and says in ended.failure.message


@pytest.mark.parametrize(
    ("num_tokens", "cached_tokens", "num_pages", "fits"),
    [(9, 8, 1, True), (8, 8, 0, True), (9, 8, 0, False), (7, 8, 5, False), (1, 0, 1, True), (12, 4, 9, True)],
)
def test_shortfall(num_tokens: int, cached_tokens: int, num_pages: int, fits: bool) -> None:
    pages = (tuple(range(num_pages)),)
    info = TransferInfo(
        key=MemoryKey(1, 1, "d"), cached_tokens=cached_tokens, pages=pages, aux_slot=0, prompt_digest="d"
    )
    assert (check_prompt_fits_pages(info, num_tokens, hash_layout(PAGE_TOKENS)) is None) is fits


# ---------------------------------------------------------------------- layer by layer


def test_each_layer_range_is_a_job_that_waits_for_its_layers_and_pages_count_once() -> None:
    net, prefill, decode = meet()
    pair = Pair(net, prefill, decode, cached_tokens=PAGE_TOKENS)
    group = prefill.kv.args.layout.groups[0]
    events = computing()
    pair.sender.send(pair.mine[0], 3, [range(2), range(2, 3)], events)
    lower, upper = prefill.engine.jobs
    assert (lower.num_layers, upper.num_layers) == (2, 3) and lower.layer_events is upper.layer_events is events
    pages = list(zip(pair.mine[0].pages[1:], pair.theirs[0].pages[1:], strict=True))
    for job, first, num_layers in ((lower, 0, 2), (upper, 2, 1)):
        ((_, _, copies),) = job.pieces
        assert [(copy.source, copy.destination, copy.num_bytes) for copy in copies] == [
            (
                ours * group.page_bytes + first * group.layer_bytes,
                theirs * group.page_bytes + first * group.layer_bytes,
                num_layers * group.layer_bytes,
            )
            for ours, theirs in pages
        ]
    pair.sender.finish(pair.mine[1], AuxRecord(7, 0, 42), TransferStats())
    assert prefill.engine.jobs[-1].layer_events is ALL_WRITTEN
    prefill.end_jobs()
    net.pump()
    stats = pair.receiver.stats
    assert stats.num_pages == 2
    assert stats.num_bytes == 2 * group.page_bytes + decode.kv.args.aux.slot_bytes
    assert stats.write_s == pytest.approx(0.3)
    pair.drop_requests()
    assert_quiet_and_free(prefill, decode)


def test_one_range_of_all_layers_still_merges_neighbouring_pages() -> None:
    net, prefill, decode = meet()
    pair = Pair(net, prefill, decode)
    pair.sender.send(pair.mine[0], 3, [range(NUM_LAYERS)], computing())
    (job,) = prefill.engine.jobs
    assert job.num_layers == NUM_LAYERS and len(job.pieces[0][2]) == 1


def test_done_waits_for_layers_that_the_aux_slot_overtook() -> None:
    net, prefill, decode = meet()
    pair = Pair(net, prefill, decode)
    pair.sender.send(pair.mine[0], 3, [range(2), range(2, 3)], computing())
    pair.sender.finish(pair.mine[1], AuxRecord(7, 0, 42), TransferStats())
    layers, aux = prefill.engine.jobs[:2], prefill.engine.jobs[2]
    for job in (aux, layers[1]):
        prefill.kv.handle(CopyDone.of(job, None, settled=True, write_s=0.0))
        net.pump()
        assert pair.sender.poll() is KVPoll.TRANSFERRING and not net.said(TransferDone)
        assert pair.mine[0].held_by("send") and pair.mine[1].held_by("send")
    prefill.kv.handle(CopyDone.of(layers[0], None, settled=True, write_s=0.0))
    net.pump()
    assert pair.sender.poll() is pair.receiver.poll() is KVPoll.SUCCESS
    pair.drop_requests()
    prefill.engine.jobs = []
    assert_quiet_and_free(prefill, decode)


def test_source_pages_are_held_until_the_last_job_of_a_layer_range_has_ended() -> None:
    net, prefill, decode = meet()
    pair = Pair(net, prefill, decode)
    pair.sender.send(pair.mine[0], 3, [range(2), range(2, 3)], computing())
    pair.receiver.abort(CLIENT_LEFT)
    net.pump()
    pair.drop_requests()
    first, second = prefill.engine.jobs
    assert first.cancelled and second.cancelled
    prefill.kv.handle(CopyDone.of(first, CLIENT_LEFT, settled=True, write_s=0.0))
    net.pump()
    assert prefill.free == (13, 4) and decode.free == (13, 3), "the second may be running"
    prefill.kv.handle(CopyDone.of(second, CLIENT_LEFT, settled=True, write_s=0.0))
    net.pump()
    assert_quiet_and_free(prefill, decode)


def test_layers_that_are_never_written_fail_both_halves() -> None:
    net, prefill, decode = meet()
    pair = Pair(net, prefill, decode)
    pair.sender.send(pair.mine[0], 3, [range(NUM_LAYERS)], computing())
    prefill.end_jobs(NEVER_WRITTEN)
    net.pump()
    failures: list[Failure | None] = [pair.sender.failure, pair.receiver.failure]
    assert failures == [NEVER_WRITTEN, NEVER_WRITTEN]
    assert prefill.kv.counters["copies_failed"] == 1
    pair.drop_requests()
    assert_quiet_and_free(prefill, decode)


@pytest.mark.parametrize(
    "ranges",
    [
        pytest.param([range(2)], id="a layer is missing"),
        pytest.param([range(2), range(1, 3)], id="a layer twice"),
        pytest.param([range(4)], id="a layer too many"),
        pytest.param([range(0), range(3)], id="an empty range"),
        pytest.param([range(0, 3, 2), range(1, 2)], id="with gaps"),
        pytest.param([range(2, 3), range(2)], id="in another order"),
    ],
)
def test_layer_ranges_must_cover_each_layer_once_in_order(ranges: list[range]) -> None:
    net, prefill, decode = meet()
    pair = Pair(net, prefill, decode)
    with pytest.raises(AssertionError):
        pair.sender.send(pair.mine[0], 3, ranges, computing())
    assert not prefill.engine.jobs


def test_every_group_sends_its_own_layers_of_a_range() -> None:
    first = attention_group(num_layers=5, layers=(0, 2, 4), page_tokens=4, num_kv_heads=1, head_dim=1, dtype="uint64")
    second = dataclasses.replace(first, name="other", layers=(1, 3))
    planner = ChunkPlanner(
        KVLayout((first, second)), ParallelShape(), ((1000, 2000),), aux_base=3000, aux_slot_bytes=64
    )
    hello = Hello(
        endpoint="e",
        facts={},
        ranks=(RankMemory("t", (WireRegion(10, 1 << 20), WireRegion(20, 1 << 20))),),
        aux_region=WireRegion(30, 1 << 20),
        aux_slot_bytes=64,
        answer=False,
    )
    pages, targets = [[1], [7]], [[2], [3]]
    ((lower, other),) = [part.pieces for part in planner.pages(hello, pages, targets, range(3))]
    assert lower[:2] == (1000, 10) and lower[2][0].num_bytes == 2 * first.layer_bytes
    assert other[:2] == (2000, 20) and other[2][0].num_bytes == second.layer_bytes
    assert other[2][0].source == 7 * second.page_bytes and other[2][0].destination == 3 * second.page_bytes
    ((upper, _),) = [part.pieces for part in planner.pages(hello, pages, targets, range(3, 5))]
    assert upper[2][0].num_bytes == first.layer_bytes
    ((only,),) = [part.pieces for part in planner.pages(hello, [[1], []], [[2], []], range(5))]
    assert only[2][0].num_bytes == first.page_bytes
