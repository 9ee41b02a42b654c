"""What one client may name of bootstrap addresses that have never served, beside other clients."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pdserve.config.access_group import AccessConfig
from pdserve.errors import RequestError
from pdserve.protocol.messages import EngineCoreOutput, GenerateRequest, RequestTiming, RoomAddress
from pdserve.protocol.sampling import CoreSamplingParams
from pdserve.server.engine_client import live_requests as new_prefill
from pdserve.server.engine_client.live_requests import MAX_NEW_OF_CLIENT, MAX_SERVED, NewAddress, NewPrefill
from pdserve.server.text.tokenizer import Tokenizer
from tests.unit.server.server_kit import Bench, bench
from tests.waiting import until

pytestmark = pytest.mark.timeout(60)
MOST = 3


def body(host: int, room: int) -> dict[str, Any]:
    return {"text": "hi", "bootstrap_host": f"10.0.0.{host}", "bootstrap_port": 8998, "bootstrap_room": room}


async def ask(b: Bench, client: str, host: int, room: int, path: str = "/generate") -> Any:
    sent = body(host, room)
    if path != "/generate":
        del sent["text"]
    return await b.http.post(path, json=sent, headers={"X-Forwarded-For": client})


@pytest.mark.asyncio
async def test_a_client_cannot_fill_the_look_ups_of_another(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(new_prefill, "MAX_NEW_OF_CLIENT", MOST)
    async with bench(tokenizer, "decode", access=AccessConfig(forwarded_allow_ips="*")) as b:
        b.scheduler.script = lambda request: []
        assert (await ask(b, "192.0.2.1", 9, 1)).status_code == 200, "KV came from there"
        b.scheduler.hold = True
        waiting = [asyncio.create_task(ask(b, "192.0.2.1", host % MOST, 10 + host)) for host in range(2 * MOST)]
        await until(lambda: len(b.scheduler.requests) == 1 + 2 * MOST)
        refused = await ask(b, "192.0.2.1", MOST, 2)
        assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
        error = refused.json()["error"]
        assert (error["code"], error["param"]) == ("bootstrap_busy", "bootstrap_host")
        probes = [asyncio.create_task(ask(b, "192.0.2.1", MOST + n, 30 + n, "/health_pair")) for n in range(MOST)]
        await until(lambda: len(b.scheduler.requests) == 1 + 3 * MOST)
        probed = await ask(b, "192.0.2.1", 2 * MOST, 3, "/health_pair")
        assert probed.json()["status"] == "busy", "it says nothing of the pair"
        waiting += probes
        waiting.append(asyncio.create_task(ask(b, "192.0.2.1", 9, 4)))
        waiting.append(asyncio.create_task(ask(b, "192.0.2.2", MOST, 5)))
        await until(lambda: len(b.scheduler.requests) == 3 + 3 * MOST)
        for request in b.scheduler.requests[1:]:
            b.scheduler.finish(request)
        assert [answer.status_code for answer in await asyncio.gather(*waiting)] == [200] * len(waiting)
        b.scheduler.hold = False
        assert (await ask(b, "192.0.2.1", MOST + 1, 6)).status_code == 200, "those have served or ended"


@pytest.mark.asyncio
async def test_addresses_that_the_operator_lists_are_not_counted(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(new_prefill, "MAX_NEW_OF_CLIENT", 0)
    async with bench(tokenizer, "decode", allowed_prefill="10.0.0.0/24") as b:
        assert (await ask(b, "192.0.2.1", 1, 1)).status_code == 200


def sequences(*ports: int) -> list[GenerateRequest]:
    return [
        GenerateRequest(
            rid=str(port), input_ids=[1], sampling=CoreSamplingParams(), room=RoomAddress(host="h", port=port, room=1)
        )
        for port in ports
    ]


def came(kv_pages: int | None) -> EngineCoreOutput:
    return EngineCoreOutput(rid="", token_ids=[1], timing=RequestTiming(kv_pages=kv_pages))


def test_an_address_is_new_until_kv_comes_from_there() -> None:
    known = NewPrefill()
    (one,) = known.take("a", sequences(1))
    assert one == NewAddress("a", ("h", 1))
    known.on_output(one, came(None))
    assert known.take("a", sequences(1)) == [one], "the prompt was computed here"
    known.on_output(one, came(0))
    assert known.take("b", sequences(1)) == [None] and known.num_clients == 0
    known.release(one)
    known.release(one)
    for port in range(2, MAX_SERVED + 2):
        (other,) = known.take("a", sequences(port))
        assert other is not None
        known.on_output(other, came(1))
        known.release(other)
    newest = range(2, MAX_SERVED + 2)
    assert known.take("a", sequences(1, *newest)) == [one, *[None] * MAX_SERVED], "the newest are kept"


def test_new_addresses_go_with_their_last_sequence() -> None:
    known = NewPrefill()
    held = known.take("a", sequences(*range(1, MAX_NEW_OF_CLIENT + 1), 1))
    with pytest.raises(RequestError, match="bootstrap addresses"):
        known.take("a", sequences(99))
    first, last = held[0], held[-1]
    assert first is not None and first == last
    known.release(first)
    with pytest.raises(RequestError, match="bootstrap addresses"):
        known.take("a", sequences(99))
    known.release(first)
    held[0] = known.take("a", sequences(99))[0]
    for one in held[:-1]:
        assert one is not None
        known.release(one)
    assert known.num_clients == 0
