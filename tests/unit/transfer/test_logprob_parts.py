"""Log probabilities of a prompt on their way to decode: all of them before success, for whom asked for them."""

from __future__ import annotations

from pdserve.protocol.logprobs import PART_BYTES, PromptLogprobs
from pdserve.transfer.room import KVPoll
from pdserve.transfer.wire import Abort, PromptLogprobsPart, TransferDone
from tests.unit.transfer.kit import CLIENT_LEFT, Net, Pair, Side, meet


def _part(start: int, count: int = 3) -> PromptLogprobs:
    return PromptLogprobs(start=start, own=b"\0" * 4 * count, ranks=b"\1" * 4 * count)


def _pair(**changes: bool) -> tuple[Net, Side, Side, Pair]:
    net, prefill, decode = meet()
    return net, prefill, decode, Pair(net, prefill, decode, takes_logprobs=True, **changes)


def test_parts_are_taken_in_the_order_of_the_prompt() -> None:
    net, prefill, decode, pair = _pair()
    pair.sender.send_logprobs(_part(1))  # before a page was sent: the receiver's key may still be replaced
    net.pump()
    assert not net.said(PromptLogprobsPart)
    pair.sender.send(pair.mine[0], 1)
    pair.sender.send_logprobs(_part(4))
    net.pump()
    assert [body.index for body in net.said(PromptLogprobsPart) if isinstance(body, PromptLogprobsPart)] == [0, 1]
    pair.sender.send_logprobs(_part(7))
    pair.send()
    prefill.end_jobs()
    net.pump()
    assert pair.receiver.poll() is KVPoll.SUCCESS
    assert [part.start for part in pair.receiver.take_logprobs()] == [1, 4, 7]
    assert pair.receiver.take_logprobs() == [], "they are not kept for as long as the request lives"
    (peer,) = decode.kv.sessions
    for body in net.said(PromptLogprobsPart):
        assert isinstance(body, PromptLogprobsPart)
        decode.kv.receive_side.on_logprobs(peer, body)
    assert pair.receiver.take_logprobs() == [] and pair.receiver.poll() is KVPoll.SUCCESS


def test_a_part_that_comes_after_done_is_waited_for() -> None:
    net, prefill, decode, pair = _pair()
    net.drop = lambda packet: isinstance(packet.body, PromptLogprobsPart)
    pair.sender.send_logprobs(_part(1))
    pair.send()
    prefill.end_jobs()
    net.pump()
    assert net.said(TransferDone) and pair.sender.poll() is KVPoll.SUCCESS
    assert pair.receiver.poll() is KVPoll.WAITING_FOR_INPUT
    assert not pair.theirs[0].held_by("remote"), "every byte has landed, whatever else comes"
    net.drop = lambda packet: False
    net.pass_time(3.0)
    assert pair.receiver.poll() is KVPoll.SUCCESS and len(pair.receiver.take_logprobs()) == 1
    pair.drop_requests()
    assert decode.kv.quiet and prefill.kv.quiet


def test_parts_that_never_come_end_in_a_timeout_or_at_an_abort() -> None:
    net, prefill, decode, pair = _pair()
    net.drop = lambda packet: isinstance(packet.body, PromptLogprobsPart)
    pair.sender.send_logprobs(_part(1))
    pair.send()
    prefill.end_jobs()
    net.pump()
    pair.receiver.abort(CLIENT_LEFT)
    net.pump()
    assert pair.receiver.poll() is KVPoll.FAILED and net.said(Abort)
    pair.drop_requests()
    net.drop = lambda packet: False
    net.pass_time(3.0)
    assert decode.kv.quiet and prefill.kv.quiet


def test_a_long_stretch_goes_in_bounded_messages() -> None:
    net, prefill, _, pair = _pair()
    pair.sender.send_logprobs(_part(1, 100_000))
    pair.send()
    prefill.end_jobs()
    net.pump()
    told = [body for body in net.said(PromptLogprobsPart) if isinstance(body, PromptLogprobsPart)]
    assert len(told) == -(-100_000 * 8 // PART_BYTES)
    assert all(len(body.part.own) + len(body.part.ranks) <= PART_BYTES for body in told)
    assert sum(part.num_tokens for part in pair.receiver.take_logprobs()) == 100_000


def test_what_nobody_asked_for_is_not_kept() -> None:
    net, prefill, decode = meet()
    pair = Pair(net, prefill, decode)
    pair.sender.send_logprobs(_part(1))
    pair.send()
    net.pump()
    prefill.end_jobs()
    net.pump()
    assert net.said(PromptLogprobsPart) and pair.receiver.take_logprobs() == []
    assert pair.receiver.poll() is KVPoll.SUCCESS


def test_parts_that_do_not_fit_fail_the_request() -> None:
    net, _, _, pair = _pair()
    pair.sender.send(pair.mine[0], 1)
    pair.sender.send_logprobs(PromptLogprobs(start=1, own=b"\0" * 8, ranks=b"\0" * 4))
    net.pump()
    assert pair.receiver.poll() is KVPoll.FAILED
    assert pair.receiver.failure is not None and pair.receiver.failure.code == "bad_metadata"


def test_a_fake_transfer_tells_nothing() -> None:
    net, prefill, _ = meet()
    sender = prefill.kv.open_sender(9, "2.2.2.2", "d")
    sender.send_logprobs(_part(1))
    net.pump()
    assert not net.said(PromptLogprobsPart)
