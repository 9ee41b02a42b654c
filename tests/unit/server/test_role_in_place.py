"""A server whose running engine takes another role: what stays, what answers meanwhile, and ways back."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
from collections.abc import AsyncIterator

import httpx
import pytest

from pdserve.base.stream_state import ROLE_HEADER
from pdserve.config.groups import DisaggMode
from pdserve.protocol.channel import ApiChannel, memory_channel_pair
from pdserve.protocol.messages import SwitchRole
from pdserve.server.lifecycle import instance as instance_module
from pdserve.server.lifecycle.instance import EngineBackend
from pdserve.server.lifecycle.run import serve
from pdserve.server.text.tokenizer import Tokenizer
from tests.unit.server.server_kit import ScriptedScheduler, make_config
from tests.waiting import until

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]
PROMPT = {"input_ids": [5, 6], "bootstrap_host": "10.0.0.1", "bootstrap_room": 7}


class OneEngine:
    """What a launcher makes: an engine, and backends that take it over. Engines after the first are `reloads`."""

    def __init__(self) -> None:
        self.config = make_config("decode")
        self.engines: list[ScriptedScheduler] = []
        self.channels: list[ApiChannel] = []
        self.events: list[str] = []
        self.ready: list[int] = []
        self.registered = True

    def fresh(self, role: DisaggMode) -> EngineBackend:
        """A backend with an engine of its own."""
        api, low = memory_channel_pair()
        scheduler = ScriptedScheduler(low)

        def start() -> None:
            self.events.append(f"start {role}")
            self.engines.append(scheduler)
            self.channels.append(api)
            scheduler.start()

        return dataclasses.replace(self._backend(role), open_channel=lambda: api, start=start)

    def other(self, role: DisaggMode) -> EngineBackend:
        """A backend that takes over the newest engine."""
        return dataclasses.replace(
            self._backend(role),
            open_channel=lambda: self.channels[-1],
            reload=lambda: self.fresh(role),
            adopt=lambda: self.events.append(f"adopt {role}"),
        )

    def _backend(self, role: DisaggMode) -> EngineBackend:
        disagg = dataclasses.replace(self.config.disagg, disaggregation_mode=role)

        def switch(query_id: str) -> SwitchRole:
            return SwitchRole(query_id=query_id, disagg={"to": role}, server="s", bootstrap_port=None, timeout_s=1.0)

        return EngineBackend(
            config=dataclasses.replace(self.config, disagg=disagg),
            open_channel=lambda: self.channels[-1],
            engine_died=lambda: None,
            bootstrap_port=7001 if role == "prefill" else None,
            on_ready=self.ready.append,
            registered=lambda: role != "prefill" or self.registered,
            end=lambda: self.events.append(f"end {role}"),
            switch=switch,
        )


@contextlib.asynccontextmanager
async def running(tokenizer: Tokenizer) -> AsyncIterator[tuple[OneEngine, httpx.AsyncClient, asyncio.Task[int]]]:
    engine = OneEngine()
    first = engine.fresh("decode")
    first.start()
    task = asyncio.create_task(serve(first, tokenizer, other=engine.other))
    try:
        await until(lambda: bool(engine.ready), 10.0)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{engine.ready[0]}", timeout=20.0) as http:
            yield engine, http, task
    finally:
        if not task.done():
            os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(asyncio.shield(task), 20.0)
        for scheduler in engine.engines:
            scheduler.stop()


async def switch(http: httpx.AsyncClient, role: str) -> httpx.Response:
    return await http.post("/pd_role_switch", json={"new_role": role, "drain_timeout_secs": 5})


async def role_of(http: httpx.AsyncClient) -> str:
    return (await http.get("/health")).headers[ROLE_HEADER]


async def test_the_engine_stays_and_serves_in_each_role(tokenizer: Tokenizer) -> None:
    async with running(tokenizer) as (engine, http, _):
        for old, role, port in (("decode", "prefill", 7001), ("prefill", "null", None), ("null", "decode", None)):
            answer = await switch(http, role)
            assert answer.status_code == 200
            expected = {"success": True, "old_role": old, "new_role": role, "message": "ok", "in_place": True}
            expected |= {"safe_to_restore": True} | ({} if port is None else {"bootstrap_port": port})
            assert answer.json() == expected
            assert await role_of(http) == role
            body = {"input_ids": [5]} if role == "null" else PROMPT
            assert (await http.post("/generate", json=body)).status_code == 200
        assert len(engine.engines) == 1 and not engine.engines[0].shutdown
        assert engine.events == ["start decode", "adopt prefill", "adopt null", "adopt decode"]
        assert [command.disagg["to"] for command in engine.engines[0].switches] == ["prefill", "null", "decode"]


async def test_an_engine_that_cannot_take_the_role_goes_on_in_its_own(tokenizer: Tokenizer) -> None:
    async with running(tokenizer) as (engine, http, _):
        engine.engines[0].on_switch = lambda command: "the transport cannot listen"
        answer = await switch(http, "prefill")
        body = answer.json()
        assert (answer.status_code, body["success"], body["safe_to_restore"]) == (500, False, True)
        assert body["error"]["code"] == "role_switch_failed"
        assert (body["old_role"], body["new_role"]) == ("decode", "prefill")
        assert "the transport cannot listen" in body["message"] and "a decode server again" in body["message"]
        assert await role_of(http) == "decode"
        assert (await http.post("/generate", json=PROMPT)).status_code == 200
        engine.engines[0].on_switch = lambda command: None
        assert (await switch(http, "prefill")).status_code == 200, "and it may be tried again"
        assert engine.events == ["start decode", "end prefill", "adopt prefill"]


async def test_an_engine_that_serves_but_is_not_registered_returns_to_its_role(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instance_module, "REGISTER_S", 0.0)
    async with running(tokenizer) as (engine, http, _):
        engine.registered = False
        answer = await switch(http, "prefill")
        assert (answer.status_code, answer.json()["safe_to_restore"]) == (500, True)
        assert "does not know all replicas" in answer.text
        assert [command.disagg["to"] for command in engine.engines[0].switches] == ["prefill", "decode"]
        assert await role_of(http) == "decode" and len(engine.engines) == 1


async def test_an_engine_that_does_not_answer_is_reloaded_in_the_old_role(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instance_module, "SWITCH_S", 0.05)
    async with running(tokenizer) as (engine, http, _):
        engine.engines[0].on_switch = None
        answer = await switch(http, "prefill")
        assert (answer.status_code, answer.json()["safe_to_restore"]) == (500, True)
        assert await role_of(http) == "decode"
        assert (await http.post("/generate", json=PROMPT)).status_code == 200
        assert len(engine.engines) == 2 and engine.engines[0].shutdown
        assert engine.events == ["start decode", "end prefill", "end decode", "end decode", "start decode"]


async def test_an_engine_whose_pages_peers_still_hold_is_reloaded(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instance_module, "QUIET_S", 0.05)
    async with running(tokenizer) as (engine, http, _):
        engine.engines[0].memory = {"pages_held_remote": 3}
        answer = await switch(http, "prefill")
        assert (answer.status_code, answer.json()["in_place"]) == (200, False)
        assert await role_of(http) == "prefill"
        assert engine.events == ["start decode", "end prefill", "end decode", "start prefill"]
        assert not engine.engines[0].switches


async def test_a_preparation_changes_nothing(tokenizer: Tokenizer) -> None:
    async with running(tokenizer) as (engine, http, _):
        answer = await http.post("/pd_role_switch", json={"new_role": "prefill", "prepare_only": True})
        assert (answer.status_code, answer.json()["success"], answer.json()["old_role"]) == (200, True, "decode")
        assert await role_of(http) == "decode" and not engine.engines[0].switches


async def test_a_reload_can_be_asked_for(tokenizer: Tokenizer) -> None:
    async with running(tokenizer) as (engine, http, _):
        answer = await http.post("/pd_role_switch", json={"new_role": "null", "reload": True})
        assert (answer.status_code, answer.json()["in_place"]) == (200, False)
        assert await role_of(http) == "null"
        assert engine.events == ["start decode", "end null", "end decode", "start null"]
