"""`/update_weights_from_disk` and `/update_weight_version` over a scripted scheduler: the commands of each field."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from pdserve.protocol.messages import Command, CommandReply, ContinueGeneration, PauseGeneration
from pdserve.protocol.weights import EndWeightsUpdate, HoldRequests, InstallWeights, PrepareWeights, WeightsCommand
from pdserve.server.sglang_api import weights
from pdserve.server.text.tokenizer import Tokenizer
from tests.unit.server.server_kit import Bench, bench
from tests.waiting import until

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]
DISK = "/update_weights_from_disk"
VERSION = "/update_weight_version"
BODY = {"model_path": "/models/next"}
UPDATE = [PrepareWeights, HoldRequests, InstallWeights, EndWeightsUpdate]


@dataclasses.dataclass
class Engine:
    """Carries out commands of an update. `refuses`: the kind of command that fails; `gate` holds back a load."""

    bench: Bench
    refuses: type[WeightsCommand] | None = None
    gate: threading.Event | None = None

    def __post_init__(self) -> None:
        self.bench.scheduler.on_weights = self._answer

    def new(self) -> list[Command]:
        """The commands since the last call."""
        seen = list(self.bench.scheduler.commands)
        self.bench.scheduler.commands.clear()
        return seen

    def _answer(self, command: Any) -> CommandReply:
        if isinstance(command, PrepareWeights) and self.gate is not None:
            assert self.gate.wait(20.0)
        if isinstance(command, InstallWeights):
            self.bench.scheduler.announce(weight_version=command.weight_version or "default")
        fails = self.refuses is not None and isinstance(command, self.refuses)
        return CommandReply(query_id=command.query_id, ok=not fails, message="no such model" if fails else "ok")


def kinds(commands: Sequence[Command]) -> list[type[Command]]:
    return [type(command) for command in commands]


async def test_a_version_is_named_anew_and_answers_have_it(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        engine = Engine(b)
        for version, fields, aborts in (("step-1", {}, True), ("step-2", {"abort_all_requests": False}, False)):
            answer = await b.http.post(VERSION, json={"new_version": version, **fields})
            assert answer.status_code == 200, answer.text
            assert (answer.json()["success"], answer.json()["new_version"]) == (True, version)
            hold, install, end = engine.new()
            assert isinstance(hold, HoldRequests) and hold.abort_all is aborts
            assert isinstance(install, InstallWeights) and install.weight_version == version
            assert isinstance(end, EndWeightsUpdate)
            assert (await b.http.get("/get_weight_version")).json() == {"weight_version": version}
            meta = (await b.http.post("/generate", json={"text": "x"})).json()["meta_info"]
            assert meta["weight_version"] == version
        for wrong in ({"new_version": ""}, {"new_version": "x" * 200}, {"new_version": 5}, {}):
            refused = await b.http.post(VERSION, json=wrong)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "new_version"), wrong
        engine.refuses = HoldRequests
        refused = await b.http.post(VERSION, json={"new_version": "step-3"})
        assert (refused.status_code, refused.json()["success"]) == (400, False)
        assert kinds(engine.new()) == [HoldRequests, EndWeightsUpdate]
        assert (await b.http.get("/get_weight_version")).json() == {"weight_version": "step-2"}


async def test_the_hold_has_the_fields_of_the_body(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        engine = Engine(b)
        for fields, abort_all, timeout_s in (
            ({}, False, weights.DRAIN_S),
            ({"abort_all_requests": True, "drain_timeout_secs": 7}, True, 7.0),
            ({"drain_timeout_secs": 0.5}, False, 0.5),
        ):
            answer = await b.http.post(DISK, json=BODY | fields)
            assert answer.status_code == 200 and answer.json()["success"], answer.text
            commands = engine.new()
            assert kinds(commands) == UPDATE
            prepare, hold = commands[:2]
            assert isinstance(prepare, PrepareWeights) and prepare.model_path == BODY["model_path"]
            assert isinstance(hold, HoldRequests) and (hold.abort_all, hold.timeout_s) == (abort_all, timeout_s)
        for fields, field in (
            ({"drain_timeout_secs": 0}, "drain_timeout_secs"),
            ({"drain_timeout_secs": 1e9}, "drain_timeout_secs"),
            ({"drain_timeout_secs": "5"}, "drain_timeout_secs"),
            ({"manifest": {"files": []}}, "manifest"),
            ({"load_format": "pt"}, "load_format"),
            ({"flush_cache": False}, "flush_cache"),
            ({"weight_version": ""}, "weight_version"),
            ({"model_path": " "}, "model_path"),
            ({"keep_pause": 1}, "keep_pause"),
            ({"bogus": 1}, "bogus"),
        ):
            refused = await b.http.post(DISK, json=BODY | fields)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, field), refused.text
        assert engine.new() == []


async def test_keep_pause_computes_nothing_until_generation_continues(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        engine = Engine(b)
        answer = await b.http.post(DISK, json=BODY | {"keep_pause": True, "weight_version": "step-1"})
        assert (answer.status_code, answer.json()["weight_version"]) == (200, "step-1")
        commands = engine.new()
        assert kinds(commands) == [*UPDATE[:3], PauseGeneration, EndWeightsUpdate], "paused before the hold ends"
        pause = commands[3]
        assert isinstance(pause, PauseGeneration) and pause.mode == "in_place"
        assert (await b.http.post("/continue_generation", json={})).status_code == 200
        assert kinds(engine.new()) == [ContinueGeneration]
        engine.refuses = InstallWeights
        assert (await b.http.post(DISK, json=BODY | {"keep_pause": True})).status_code == 400
        assert kinds(engine.new()) == UPDATE, "an update that failed does not pause"


async def test_prepared_weights_are_installed_once_and_only_by_the_same_body(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        engine = Engine(b)

        async def send(path: str = DISK, **fields: Any) -> list[type[Command]]:
            answer = await b.http.post(path, json=fields)
            assert answer.status_code == 200, answer.text
            return kinds(engine.new())

        assert await send(**BODY, prepare_only=True) == [PrepareWeights]
        assert await send(**BODY, weight_version="step-1") == UPDATE[1:], "not loaded again"
        assert await send(**BODY) == UPDATE, "installed before"
        for other in ({"model_path": "/models/other"}, {**BODY, "load_format": "dummy"}):
            assert await send(**BODY, prepare_only=True) == [PrepareWeights]
            assert await send(**other) == UPDATE
        assert await send(**BODY, prepare_only=True) == [PrepareWeights]
        assert await send(**BODY, prepare_only=True) == [], "prepared already"
        assert await send(VERSION, new_version="step-2") == [EndWeightsUpdate, *UPDATE[1:]], "dropped"
        assert await send(**BODY) == UPDATE
        engine.refuses = PrepareWeights
        refused = await b.http.post(DISK, json=BODY | {"prepare_only": True})
        assert (refused.status_code, refused.json()["success"]) == (400, False) and "no such model" in refused.text
        assert kinds(engine.new()) == [PrepareWeights, EndWeightsUpdate]


async def test_prepared_weights_are_dropped_after_ten_minutes(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert weights.PREPARED_S == 600.0
    monkeypatch.setattr(weights, "PREPARED_S", 0.0)
    async with bench(tokenizer) as b:
        engine = Engine(b)
        assert (await b.http.post(DISK, json=BODY | {"prepare_only": True})).status_code == 200
        await until(lambda: kinds(b.scheduler.commands) == [PrepareWeights, EndWeightsUpdate])
        engine.new()
        assert (await b.http.post(DISK, json=BODY)).status_code == 200
        assert kinds(engine.new()) == UPDATE, "loaded again"


async def test_a_second_update_during_one_is_refused(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        engine = Engine(b, gate=threading.Event())
        assert engine.gate is not None
        running = asyncio.create_task(b.http.post(DISK, json=BODY))
        await until(lambda: kinds(b.scheduler.commands) == [PrepareWeights])
        for path, body in (
            (DISK, BODY),
            (DISK, BODY | {"prepare_only": True}),
            (VERSION, {"new_version": "step-1"}),
            ("/update_weights_from_tensor", {"tensors": "AA=="}),
            ("/destroy_weights_update_group", {}),
            ("/release_memory_occupation", {}),
        ):
            refused = await b.http.post(path, json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, "weights_busy"), path
        engine.gate.set()
        assert (await running).status_code == 200
        assert kinds(engine.new()) == UPDATE
        assert (await b.http.post(VERSION, json={"new_version": "step-1"})).status_code == 200
