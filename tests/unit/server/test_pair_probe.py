"""`POST /health_pair`: one token through a server and its partner, and what is said where it does not come."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.config.access_group import AccessConfig
from pdserve.config.groups import DisaggMode
from pdserve.protocol.engine_state import EngineState, WaitsFor
from pdserve.protocol.messages import FinishReason, RoomAddress
from pdserve.protocol.replicas import merge_states
from pdserve.server.sglang_api import health as pair_probe
from pdserve.server.text.tokenizer import Tokenizer
from tests.unit.server.server_kit import Bench, bench
from tests.waiting import until

pytestmark = pytest.mark.timeout(60)
ADDRESS = {"bootstrap_host": "10.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 1001}
QUICK = {"timeout": 0.4}


async def probe(b: Bench, **more: Any) -> tuple[int, str]:
    """Status, and what the body says: its status or the code of its error."""
    answer = await b.http.post("/health_pair", json=ADDRESS | more)
    body = answer.json()
    return answer.status_code, body.get("status") or body["error"]["code"]


@pytest.mark.parametrize("mode", ["prefill", "decode"])
async def test_both_halves_make_the_same_request_of_a_room(tokenizer: Tokenizer, mode: DisaggMode) -> None:
    async with bench(tokenizer, mode) as b:
        assert await probe(b) == (200, "ok")
        (request,) = b.scheduler.requests
        assert request.room == RoomAddress(host="10.0.0.1", port=8998, room=1001)
        vocab_size = b.client.require_ready().vocab_size
        assert (request.input_ids, request.sampling.max_new_tokens) == ([1001 % vocab_size], 1)
        assert request.probe and request.replica is None, "nothing counts it, and its room names the replica"


BUSY, STALLED, NO_TOKEN = (200, "busy"), (503, "stalled"), (503, "no_token")
WORK, ARRIVING = {"num_queue_reqs": 1}, {"num_decode_transfer_queue_reqs": 1}


@pytest.mark.parametrize(
    ("waits_for", "queues", "progresses", "said"),
    [
        ("peer", {}, False, NO_TOKEN),
        ("peer", WORK, True, NO_TOKEN),
        ("peer", WORK, False, STALLED),
        ("transfer", {}, False, NO_TOKEN),
        ("transfer", WORK, True, NO_TOKEN),
        ("memory", {}, True, BUSY),
        ("memory", {}, False, STALLED),
        ("memory", ARRIVING, False, BUSY),
        ("memory", ARRIVING | WORK, False, STALLED),
        ("compute", {}, True, BUSY),
        ("compute", {}, False, STALLED),
    ],
)
async def test_a_probe_is_busy_only_behind_work_that_progresses(
    tokenizer: Tokenizer, waits_for: WaitsFor, queues: dict[str, int], progresses: bool, said: tuple[int, str]
) -> None:
    async with bench(tokenizer, "decode") as b:
        b.scheduler.hold, b.scheduler.script, b.scheduler.probe_waits_for = True, lambda request: [], waits_for
        b.scheduler.queues, b.scheduler.progress_per_state = queues, int(progresses)
        assert await probe(b, **QUICK) == said
        await until(lambda: [abort.rid for abort in b.scheduler.aborts] == [b.scheduler.requests[0].rid])


async def test_a_long_step_and_a_pause_are_no_news(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer, "decode") as b:
        b.scheduler.hold, b.scheduler.script, b.scheduler.silent_queries = True, lambda request: [], True
        assert await probe(b, **QUICK) == (200, "busy")
        b.scheduler.silent_queries = False
        await b.http.post("/pause_generation", json={"mode": "in_place"})
        assert await probe(b) == (200, "busy")


@pytest.mark.parametrize(
    ("code", "progresses", "said"),
    [("incompatible", True, (503, "incompatible")), ("queue_full", True, BUSY), ("queue_full", False, STALLED)],
)
async def test_a_refusal_has_its_code_and_a_full_queue_is_busy_while_it_shrinks(
    tokenizer: Tokenizer, code: str, progresses: bool, said: tuple[int, str]
) -> None:
    async with bench(tokenizer, "prefill") as b:
        b.scheduler.script = lambda request: FinishReason(type="abort", message="no", status_code=503, err_type=code)
        b.scheduler.progress_per_state = int(progresses)
        assert await probe(b, **QUICK) == said


def state_of(progress: int, **probes: WaitsFor) -> EngineState:
    counts = {"num_running_reqs": 0, "num_queue_reqs": 0, "num_used_tokens": 0, "max_total_tokens": 16}
    return EngineState(queues={}, memory={}, counters={}, facts={}, progress=progress, probes=probes, **counts)


async def test_of_several_replicas_the_one_with_the_probe_must_progress(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer, "decode") as b:
        b.scheduler.hold, b.scheduler.script, b.scheduler.probe_waits_for = True, lambda request: [], "memory"
        one_replica, num_states = b.scheduler.state, 0

        def states() -> EngineState:
            nonlocal num_states
            num_states += 1
            return merge_states([state_of(num_states if said is STALLED else 0), one_replica()])

        b.scheduler.state = states  # type: ignore[method-assign]
        for said in (STALLED, BUSY):  # only the other replica progresses, or only the one with the probe
            b.scheduler.progress_per_state = int(said is BUSY)
            assert await probe(b, **QUICK) == said


async def test_what_probes_may_cost_is_bounded(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_probe, "MAX_PROBES", 0)
    async with bench(tokenizer, "decode") as b:
        assert await probe(b) == (200, "busy")
        assert b.scheduler.requests == []


async def test_it_takes_the_key_and_the_address_of_a_request(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer, "decode", access=AccessConfig(api_key="k"), allowed_prefill="10.0.0.0/24") as b:
        assert (await b.http.post("/health_pair", json=ADDRESS)).status_code == 401
        b.http.headers["Authorization"] = "Bearer k"
        assert await probe(b) == (200, "ok")
        for wrong in (
            {"bootstrap_room": None},
            {"bootstrap_host": None},
            {"bootstrap_host": "10.9.9.9"},  # not listed
            {"bootstrap_port": 0},
            {"bootstrap_room": -1},
        ):
            answer = await b.http.post("/health_pair", json=ADDRESS | wrong)
            assert answer.status_code == 400 and next(iter(wrong)) in answer.json()["error"]["message"]
        assert (await b.http.post("/health_pair", json=ADDRESS | {"timeout": 1e9})).status_code == 400
        assert (await b.http.post("/health_pair", json=ADDRESS | {"input_ids": [1]})).status_code == 400
