"""Requests whose grammar is not open wait before the scheduler; nothing else waits for them."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from pdserve.base.mailbox import Mailbox, Woken
from pdserve.protocol.messages import AbortRequest, GenerateRequest, LoadLora, PauseGeneration, PrepareLora
from pdserve.protocol.sampling import CoreSamplingParams, Grammar
from pdserve.scheduler.input_source import GrammarGate
from pdserve.scheduler.scheduler import Event


def request(rid: str, pattern: str | None = None) -> GenerateRequest:
    grammar = None if pattern is None else Grammar(kind="regex", text=pattern)
    return GenerateRequest(rid=rid, input_ids=[1], sampling=CoreSamplingParams(grammar=grammar))


class Openings:
    """By pattern, what opens it; `ready` needs nothing."""

    def __init__(self) -> None:
        self.of: dict[str, Future[None]] = {}

    def __call__(self, grammar: Grammar) -> Future[None] | None:
        return None if grammar.text == "ready" else self.of.setdefault(grammar.text, Future())


def gate() -> tuple[GrammarGate, Mailbox[Event], Openings]:
    mailbox: Mailbox[Event] = Mailbox()
    openings = Openings()
    return GrammarGate(mailbox, openings), mailbox, openings


def rids(events: object) -> list[str | None]:
    assert isinstance(events, list)
    return [event.rid for event in events if isinstance(event, GenerateRequest | AbortRequest)]


def test_a_request_waits_for_its_grammar_alone() -> None:
    held, mailbox, openings = gate()
    for one in (request("a", "slow"), request("b"), request("c", "ready"), request("d", "bad"), request("e", "slow")):
        mailbox.post(one)
    assert rids(held.drain()) == ["b", "c"] and held.num_waiting == 3
    openings.of["bad"].set_exception(ValueError("bad"))
    assert rids(held.drain()) == ["d"], "it is told where it is obeyed"
    threading.Timer(0.05, lambda: openings.of["slow"].set_result(None)).start()
    assert held.wait(60.0), "woken by what has been opened"
    events = list(held.drain())
    assert rids(events) == ["a", "e"] and Woken() in events and held.num_waiting == 0
    mailbox.post(request("f", "slow"))
    assert rids(held.drain()) == ["f"], "it is open by now"


def test_an_abort_finds_what_waits() -> None:
    held, mailbox, openings = gate()
    for rid in "abc":
        mailbox.post(request(rid, "slow"))
    mailbox.post(AbortRequest(rid="b"))
    assert rids(held.drain()) == ["b", "b"], "the request, then its abort"
    mailbox.post(AbortRequest(rid="elsewhere"))
    mailbox.post(PauseGeneration(query_id="1", mode="abort"))
    assert rids(held.drain()) == ["elsewhere"]
    mailbox.post(AbortRequest(rid=None))
    assert rids(held.drain()) == ["a", "c", None]
    openings.of["slow"].set_result(None)
    assert rids(held.drain()) == []


def test_the_second_of_two_with_one_rid_is_the_loop_s_to_refuse() -> None:
    held, mailbox, _ = gate()
    mailbox.post(request("a", "slow"))
    mailbox.post(request("a", "slow"))
    assert rids(held.drain()) == ["a"] and held.num_waiting == 1


def test_an_adapter_is_loaded_once_it_is_read() -> None:
    mailbox: Mailbox[Event] = Mailbox()
    reading: Future[None] = Future()
    held = GrammarGate(mailbox, Openings(), lambda name, path: reading if name == "slow" else None)
    slow, refused = (LoadLora(query_id=name, name=name, path="/p") for name in ("slow", "refused"))
    for event in (slow, request("a"), refused):
        mailbox.post(event)
    assert held.drain() == [PrepareLora(name="slow", path="/p"), request("a"), refused]
    assert held.drain() == []
    threading.Timer(0.05, lambda: reading.set_result(None)).start()
    assert held.wait(60.0), "woken by the end of the read"
    assert slow in held.drain()
    assert held.drain() == []
