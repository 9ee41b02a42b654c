"""A server whose role is changed while it runs: who is let in, what is cut, what answers meanwhile, and ways back."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from pdserve.base.stream_state import ROLE_HEADER
from pdserve.config.access_group import AccessConfig
from pdserve.config.cli import parse_server_args
from pdserve.config.groups import DisaggMode, ServerConfig
from pdserve.config.resolve import Machine, fill_in, for_mode
from pdserve.errors import ConfigError
from pdserve.protocol.channel import memory_channel_pair
from pdserve.server.lifecycle.instance import EngineBackend
from pdserve.server.lifecycle.run import serve
from pdserve.server.text.tokenizer import Tokenizer
from tests.unit.server.server_kit import ScriptedScheduler, bench, make_config
from tests.waiting import until

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]
PATH = "/pd_role_switch"
PROMPT = {"input_ids": [5, 6], "bootstrap_host": "10.0.0.1", "bootstrap_room": 7}


class Engines:
    """What a launcher makes, with scripted schedulers in threads: one for each role that the server has had."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.schedulers: list[ScriptedScheduler] = []
        self.events: list[str] = []
        self.dead: set[DisaggMode] = set()
        self.impossible: set[DisaggMode] = set()
        self.ready: list[int] = []
        self.hold = False

    def backend(self, role: DisaggMode) -> EngineBackend:
        if role in self.impossible:
            raise ConfigError("--tp-size is 3, which does not fit", field="tp_size")
        api, low = memory_channel_pair()
        scheduler = ScriptedScheduler(low)
        disagg = dataclasses.replace(self.config.disagg, disaggregation_mode=role)

        def start() -> None:
            self.events.append(f"start {role}")
            if role not in self.dead:
                self.schedulers.append(scheduler)
                scheduler.hold = self.hold
                scheduler.start()

        def end() -> None:
            self.events.append(f"end {role}")

        return EngineBackend(
            config=dataclasses.replace(self.config, disagg=disagg),
            open_channel=lambda: api,
            engine_died=lambda: f"the {role} process has ended" if role in self.dead else None,
            bootstrap_port=7001 if role == "prefill" else None,
            on_ready=self.ready.append,
            start=start,
            end=end,
        )


class Running:
    """A server on a real port, and its engines."""

    def __init__(self, engines: Engines, http: httpx.AsyncClient, task: asyncio.Task[int]) -> None:
        self.engines, self.http, self.task = engines, http, task

    async def switch(self, role: str, **more: Any) -> httpx.Response:
        return await self.http.post(PATH, json={"new_role": role, **more})

    async def role(self) -> str:
        return str((await self.http.get("/get_server_info")).json()["disaggregation_mode"])


@contextlib.asynccontextmanager
async def running(
    tokenizer: Tokenizer, role: DisaggMode = "decode", *, hold: bool = False, allowed: bool = True
) -> AsyncIterator[Running]:
    config = make_config(role)
    disagg = dataclasses.replace(config.disagg, enable_pd_role_switch=allowed)
    engines = Engines(dataclasses.replace(config, disagg=disagg))
    engines.hold = hold
    first = engines.backend(role)
    first.start()
    task = asyncio.create_task(serve(first, tokenizer, other=engines.backend))
    try:
        await until(lambda: bool(engines.ready), 10.0)
        url = f"http://127.0.0.1:{engines.ready[0]}"
        async with httpx.AsyncClient(base_url=url, timeout=20.0) as http:
            yield Running(engines, http, task)
    finally:
        if not task.done():
            os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(asyncio.shield(task), 20.0)
        for scheduler in engines.schedulers:
            scheduler.stop()


async def test_another_role_on_the_same_port_and_back(tokenizer: Tokenizer) -> None:
    async with running(tokenizer) as server:
        engines = server.engines
        answer = await server.switch("prefill", drain_timeout_secs=5)
        assert (answer.status_code, answer.json()) == (
            200,
            {"success": True, "old_role": "decode", "new_role": "prefill", "message": "ok", "bootstrap_port": 7001}
            | {"safe_to_restore": True, "in_place": False},
        )
        assert await server.role() == "prefill"
        assert (await server.http.get("/health")).headers[ROLE_HEADER] == "prefill"
        assert (await server.http.post("/generate", json=PROMPT)).status_code == 200
        assert [len(one.requests) for one in engines.schedulers] == [0, 1]
        again = await server.switch("prefill")
        assert (again.status_code, again.json()["message"]) == (200, "already in target role")
        assert (await server.switch("null")).json()["old_role"] == "prefill"
        assert (await server.http.post("/generate", json={"input_ids": [5]})).status_code == 200
        assert (await server.switch("decode")).status_code == 200
        roles = ["decode", "prefill", "null", "decode"]
        ends = [f"{word} {role}" for old, new in itertools.pairwise(roles)
                for word, role in (("end", old), ("start", new))]  # fmt: skip
        assert engines.events == ["start decode", *ends], "one engine at a time"
        assert len(set(engines.ready)) == 1 and len(engines.ready) == 4
        assert all(scheduler.shutdown for scheduler in engines.schedulers[:-1])


async def test_what_runs_ends_first_and_who_comes_meanwhile_is_sent_elsewhere(tokenizer: Tokenizer) -> None:
    async with running(tokenizer, hold=True) as server:
        scheduler = server.engines.schedulers[0]
        old = asyncio.create_task(server.http.post("/generate", json=PROMPT))
        await until(lambda: len(scheduler.requests) == 1)
        begun = await server.switch("prefill", wait=False)
        assert (begun.status_code, begun.json()["success"]) == (202, True)
        refused = await server.http.post("/generate", json=PROMPT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "role_switching")
        assert refused.headers["Retry-After"] == "1" and refused.headers[ROLE_HEADER] == "none"
        assert (await server.http.get("/health")).headers[ROLE_HEADER] == "none"
        unready = await server.http.get("/ready")
        assert (unready.status_code, unready.json()["error"]["code"]) == (503, "role_switching")
        for role in ("prefill", "null"):
            second = await server.switch(role)
            assert (second.status_code, second.json()["param"]) == (409, "new_role")
        assert (await server.switch("decode")).status_code == 503
        assert await server.role() == "decode", "as long as anything runs"
        assert not old.done()
        scheduler.script = lambda request: [73]
        scheduler.hold = False
        scheduler.finish(scheduler.requests[0])
        assert (await old).status_code == 200
        await until(lambda: len(server.engines.ready) == 2, 10.0)
        assert await server.role() == "prefill"


@pytest.mark.parametrize("stream", [False, True])
async def test_what_does_not_end_in_time_is_cut_and_its_scheduler_told(tokenizer: Tokenizer, stream: bool) -> None:
    async with running(tokenizer, hold=True) as server:
        scheduler = server.engines.schedulers[0]
        old = asyncio.create_task(server.http.post("/generate", json={**PROMPT, "stream": stream}))
        await until(lambda: len(scheduler.requests) == 1)
        assert (await server.switch("prefill", drain_timeout_secs=0.05)).status_code == 200
        answer = await old
        if stream:
            error = json.loads(answer.text.split("\n\n")[-3].removeprefix("data: "))["error"]
        else:
            assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
            error = answer.json()["error"]
        assert error["code"] == "role_switching"
        assert [abort.rid for abort in scheduler.aborts] == [scheduler.requests[0].rid]
        assert scheduler.shutdown


async def test_what_cannot_be_is_refused_and_changes_nothing(tokenizer: Tokenizer) -> None:
    async with running(tokenizer) as server:
        server.engines.impossible = {"null"}
        bad: list[tuple[dict[str, Any], str]] = [
            ({}, "new_role"),
            ({"new_role": "router"}, "new_role"),
            ({"new_role": ["prefill"]}, "new_role"),
            ({"new_role": "null"}, "new_role"),
            ({"new_role": "prefill", "drain_timeout_secs": -1}, "drain_timeout_secs"),
            ({"new_role": "prefill", "drain_timeout_secs": 1e9}, "drain_timeout_secs"),
            ({"new_role": "prefill", "drain_timeout_secs": "1"}, "drain_timeout_secs"),
            ({"new_role": "prefill", "wait": "no"}, "wait"),
            ({"new_role": "prefill", "reload": "no"}, "reload"),
        ]
        for body, field in bad:
            answer = await server.http.post(PATH, json=body)
            assert (answer.status_code, answer.json()["param"]) == (400, field), body
        impossible = (await server.switch("null")).json()
        assert "--tp-size is 3" in impossible["message"]
        assert (impossible["success"], impossible["safe_to_restore"]) == (False, True)
        assert server.engines.events == ["start decode"]
        assert (await server.http.post("/generate", json=PROMPT)).status_code == 200


async def test_an_engine_that_does_not_come_up_means_the_old_role_again(tokenizer: Tokenizer) -> None:
    async with running(tokenizer) as server:
        server.engines.dead = {"prefill"}
        answer = await server.switch("prefill")
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "role_switch_failed")
        assert (answer.json()["success"], answer.json()["safe_to_restore"]) == (False, True)
        assert "the prefill process has ended" in answer.text and "a decode server again" in answer.text
        assert server.engines.events[1:] == ["end decode", "start prefill", "end prefill", "start decode"]
        assert (await server.http.post("/generate", json=PROMPT)).status_code == 200
        server.engines.dead = set()
        assert (await server.switch("prefill")).status_code == 200, "and it may be tried again"


async def test_when_the_old_role_does_not_come_back_either_the_server_ends_with_1(tokenizer: Tokenizer) -> None:
    async with running(tokenizer) as server:
        begun = await server.switch("prefill", wait=False)
        server.engines.dead = {"prefill", "decode"}
        assert begun.status_code == 202
        assert await asyncio.wait_for(asyncio.shield(server.task), 20.0) == 1


async def test_a_signal_ends_a_server_whose_role_is_being_changed(tokenizer: Tokenizer) -> None:
    async with running(tokenizer, hold=True) as server:
        scheduler = server.engines.schedulers[0]
        old = asyncio.create_task(server.http.post("/generate", json=PROMPT))
        await until(lambda: len(scheduler.requests) == 1)
        assert (await server.switch("prefill", wait=False)).status_code == 202
        scheduler.finish(scheduler.requests[0])
        os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.wait_for(asyncio.shield(server.task), 20.0) == 0
        await asyncio.gather(old, return_exceptions=True)
        await until(lambda: server.engines.schedulers[-1].shutdown)


async def test_a_request_that_was_meant_for_another_role_is_sent_away(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer, "prefill") as b:
        for role, status in (("decode", 503), ("null", 503), ("prefill", 200)):
            answer = await b.http.post("/generate", json=PROMPT, headers={ROLE_HEADER: role})
            assert answer.status_code == status
        refused = await b.http.post("/v1/completions", json={"prompt": "x"}, headers={ROLE_HEADER: "decode"})
        assert refused.json()["error"]["code"] == "wrong_role" and "Retry-After" in refused.headers
        assert refused.headers[ROLE_HEADER] == "prefill"
        assert (
            await b.http.post("/tokenize", json={"prompt": "x"}, headers={ROLE_HEADER: "decode"})
        ).status_code == 200
        assert len(b.scheduler.requests) == 1


async def test_it_is_a_command_and_can_be_off(tokenizer: Tokenizer) -> None:
    access = AccessConfig(api_key="key", admin_api_key="root")
    async with bench(tokenizer, access=access) as b:
        for key, status in (("key", 401), ("root", 200)):
            headers = {"Authorization": f"Bearer {key}"}
            answer = await b.http.post(PATH, json={"new_role": "null"}, headers=headers)
            assert answer.status_code == status
    async with running(tokenizer, allowed=False) as server:
        answer = await server.switch("prefill")
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "role_switch_off")


MACHINE = Machine(has_cuda=False, num_cores=8)


@pytest.mark.parametrize("mode", ["prefill", "decode", "null"])
async def test_flags_of_one_role_are_left_out_in_another_and_there_again_when_it_comes_back(mode: DisaggMode) -> None:
    flags = {
        "prefill": ["--disaggregation-layerwise-transfer", "--disaggregation-decode-tp", "2"],
        "decode": [
            "--disaggregation-decode-enable-radix-cache",
            "--disaggregation-decode-retraction-backup=cpu_tensor",
        ],
        "null": ["--disaggregation-decode-retraction-backup=cpu_tensor"],
    }
    given = parse_server_args(["--model-path", "m", "--disaggregation-mode", mode, *flags[mode]])
    at_home, _ = fill_in(given, MACHINE)
    for other in ("prefill", "decode", "null"):
        config, _ = fill_in(for_mode(given, other), MACHINE)  # type: ignore[arg-type]
        assert config.disagg.disaggregation_mode == other
        assert config.model == at_home.model
        assert config.disagg.disaggregation_bootstrap_port == (None if other == "null" else 8998)
    assert fill_in(for_mode(given, mode), MACHINE)[0] == at_home
