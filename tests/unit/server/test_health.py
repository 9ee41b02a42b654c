"""Liveness, readiness and the data path: true while the engine works, however long a step takes, and false else."""

from __future__ import annotations

import dataclasses
import threading

import pytest

from pdserve.base.clock import ManualClock
from pdserve.config.groups import DisaggMode
from pdserve.protocol.engine_state import PeerLoad, SchedulerHeartbeat
from pdserve.scheduler.loop_times import Heartbeat
from pdserve.server.engine_client import engine_queries
from pdserve.server.sglang_api import health
from pdserve.server.sglang_api.health import partners_missing
from pdserve.server.text.tokenizer import Tokenizer
from tests.unit.server.server_kit import Bench, bench
from tests.waiting import until

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence is noticed at once."""
    monkeypatch.setattr(engine_queries, "SILENT_S", 0.2)
    monkeypatch.setattr(health, "SECOND_LOOK_S", 0.05)
    monkeypatch.setattr(health, "PROBE_TIMEOUT_S", 0.2)


class Heart:
    """Beats for a scheduler, until it stops."""

    def __init__(self, b: Bench, *, turn_s: float | None = None) -> None:
        self.turn_s = turn_s
        self.num_turns = 0
        self._b = b
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._stop.wait(0.02):
            self._b.channel.deliver(SchedulerHeartbeat(dp_rank=0, turn_s=self.turn_s, num_turns=self.num_turns))

    def __enter__(self) -> Heart:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


async def _status(b: Bench, path: str) -> tuple[int, str]:
    answer = await b.http.get(path)
    body = answer.json()
    return answer.status_code, body.get("status") or body["error"]["code"]


@pytest.mark.usefixtures("impatient")
async def test_a_scheduler_that_stops_is_noticed_by_all_three_and_named(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        with Heart(b):
            await until(lambda: b.client.watchdog.heartbeats(1)[0].age_s < 0.1)
            assert await _status(b, "/health") == (200, "ok")
            assert await _status(b, "/ready") == await _status(b, "/readiness") == (200, "ready")
            assert await _status(b, "/health_generate") == (200, "ok")
        await until(lambda: b.client.watchdog.heartbeats(1)[0].silent)
        for path in ("/health", "/ready", "/health_generate"):
            assert await _status(b, path) == (503, "engine_stuck")
        told = (await b.http.get("/get_server_info")).json()["replica_health"]
        assert told[0]["silent"] and not told[0]["alive"] and "replica 0 is silent" in told[0]["trouble"]
        with Heart(b):
            await until(lambda: not b.client.watchdog.heartbeats(1)[0].silent)
            assert await _status(b, "/health") == (200, "ok")


@pytest.mark.usefixtures("impatient")
async def test_a_long_step_is_healthy_until_it_is_longer_than_any_step_may_be(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        b.scheduler.hold = True  # no token comes to the probe
        b.scheduler.script = lambda request: []
        with Heart(b, turn_s=25.0) as heart:
            await until(lambda: b.client.watchdog.heartbeats(1)[0].turn_s is not None)
            for path, word in (("/health", "ok"), ("/ready", "ready"), ("/health_generate", "busy")):
                assert await _status(b, path) == (200, word)
            heart.turn_s = b.config.observe.watchdog_timeout + 1
            await until(lambda: (b.client.watchdog.heartbeats(1)[0].turn_s or 0) > 100)
            for path in ("/health", "/ready", "/health_generate"):
                assert await _status(b, path) == (503, "engine_stuck")


@pytest.mark.usefixtures("impatient")
async def test_a_probe_that_is_lost_in_an_idle_scheduler_is_ill(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        b.scheduler.hold = True
        b.scheduler.script = lambda request: []
        with Heart(b):
            await until(lambda: b.client.watchdog.heartbeats(1)[0].age_s < 0.1)
            assert await _status(b, "/health_generate") == (503, "engine_busy")
            assert await _status(b, "/health") == (200, "ok")


async def test_a_paused_server_is_alive_takes_requests_and_gives_no_token(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        with Heart(b):
            await b.http.post("/pause_generation", json={"mode": "in_place"})
            assert await _status(b, "/health_generate") == (503, "paused")
            assert await _status(b, "/health") == (200, "ok")
            assert await _status(b, "/ready") == (200, "ready")
            await b.http.post("/continue_generation")
            assert await _status(b, "/health_generate") == (200, "ok")


async def test_a_prefill_server_is_ready_once_it_is_registered(tokenizer: Tokenizer) -> None:
    known = False
    async with bench(tokenizer, "prefill", registered=lambda: known) as b:
        assert await _status(b, "/ready") == (503, "not_registered")
        assert await _status(b, "/health") == (200, "ok")
        known = True
        assert await _status(b, "/ready") == (200, "ready")


def _peer(state: str, age_s: float) -> PeerLoad:
    silent_s = age_s if state == "silent" else None
    endpoint = f"10.0.0.{int(age_s)}:1"
    return PeerLoad(endpoint=endpoint, instance="i", state=state, heartbeat_age_s=age_s, silent_s=silent_s)


@pytest.mark.parametrize("mode", ["prefill", "decode"])
async def test_a_server_without_a_partner_that_answers_is_not_ready(tokenizer: Tokenizer, mode: DisaggMode) -> None:
    async with bench(tokenizer, mode) as b:
        assert await _status(b, "/ready") == (200, "ready")  # nobody has ever come: a router must be able to send one
        b.scheduler.peers = [_peer("silent", 8)]
        assert await _status(b, "/ready") == (503, "no_partner")
        assert await _status(b, "/health") == (200, "ok")
        b.scheduler.peers = [_peer("silent", 8), _peer("ready", 1)]
        assert (await b.http.get("/ready")).json()["partners"] == {"10.0.0.8:1": "silent", "10.0.0.1:1": "ready"}


def test_partners_that_are_long_gone_or_new_do_not_count() -> None:
    assert partners_missing([]) is None
    assert partners_missing([_peer("connecting", 3), _peer("refused", 3)]) is None
    assert partners_missing([_peer("silent", health.PARTNER_MEMORY_S + 1)]) is None, "nobody would ever come again"
    assert "10.0.0.9:1" in (partners_missing([_peer("silent", 9), _peer("connecting", 1)]) or "")


def test_of_two_replicas_the_silent_one_is_named() -> None:
    found = engine_queries.SchedulerWatchdog()
    assert found.heartbeats(2) == [], "nothing runs before the engine has started"
    found.begin()
    found.on_beat(SchedulerHeartbeat(dp_rank=0, turn_s=None, num_turns=3))
    later = [dataclasses.replace(each, age_s=each.age_s + 11 * each.dp_rank) for each in found.heartbeats(2)]
    assert [each.silent for each in later] == [False, True]
    assert later[0].trouble(300) is None and "replica 1 is silent" in (later[1].trouble(300) or "")


def test_a_pulse_says_what_the_loop_is_at() -> None:
    clock = ManualClock()
    heartbeat = Heartbeat(clock)
    assert heartbeat.beat(3) == SchedulerHeartbeat(dp_rank=3, turn_s=None, num_turns=0)
    heartbeat.begin()
    clock.advance(2.5)
    assert heartbeat.beat(3).turn_s == 2.5
    heartbeat.end(computed=False)
    heartbeat.begin()
    heartbeat.end(computed=True)
    assert heartbeat.beat(3) == SchedulerHeartbeat(dp_rank=3, turn_s=None, num_turns=1)
