"""SGLang's sessions: what a request continues, what it replaces, and what is bounded and refused."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from pdserve.config.access_group import AccessConfig
from pdserve.config.pairing_group import PairingConfig
from pdserve.errors import RequestError
from pdserve.http import session_store
from pdserve.http.session_store import OpenSession, OpenSessionBody, OpenSessions, SessionFields
from pdserve.protocol.messages import FinishReason
from pdserve.server.text.tokenizer import Tokenizer
from tests.unit.server.chat_kit import long_context
from tests.unit.server.server_kit import EOS, bench
from tests.unit.server.test_single_requests import FakePrefill
from tests.waiting import until

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("long_context")]
__all__ = ["long_context"]
OUTPUT = [7, 8]


class Client:
    """A client of a server with one open session."""

    def __init__(self, b: Any) -> None:
        self.b = b
        self.id = ""

    async def open(self, **fields: Any) -> None:
        answer = await self.b.http.post("/open_session", json={"capacity_of_str_len": 1000, **fields})
        assert answer.status_code == 200, answer.text
        self.id = answer.json()

    async def ask(self, ids: list[int], *, stream: bool = False, rid: str | None = None, **params: Any) -> Any:
        """The answer, and the prompt that the scheduler got."""
        body = {"input_ids": ids, "session_params": {"id": self.id, **params}, "stream": stream, "rid": rid}
        return await self.b.http.post("/generate", json=body)

    @property
    def prompt(self) -> list[int]:
        return list(self.b.scheduler.requests[-1].input_ids)


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_continues_another_of_its_session(tokenizer: Tokenizer, stream: bool) -> None:
    async with bench(tokenizer) as b:
        b.scheduler.script = lambda request: OUTPUT
        client = Client(b)
        await client.open(session_id="mine")
        assert client.id == "mine"
        assert (await client.ask([1, 2], rid="a", stream=stream)).status_code == 200
        assert client.prompt == [1, 2]
        await client.ask([3], rid="b", stream=stream, id="mine")
        assert client.prompt == [3], "without rid it is a root"

        async def after(new: list[int], **params: Any) -> list[int]:
            body = {"input_ids": new, "stream": stream, "session_params": {"id": "mine", "rid": "a", **params}}
            answer = await b.http.post("/generate", json=body)
            assert answer.status_code == 200, answer.text
            return client.prompt

        whole = [1, 2, *OUTPUT, EOS]
        assert await after([3, 4]) == [*whole, 3, 4]
        assert await after([3, 4], drop_previous_output=True) == [1, 2, 3, 4]
        assert await after([3, 4], offset=3) == [*whole[:3], 3, 4]
        assert await after([3, 4], offset=-1) == [*whole[:-1], 3, 4]
        assert await after([3, 4], offset=0, replace=True) == [*whole, 3, 4]
        meta = (
            await b.http.post("/generate", json={"input_ids": [5], "session_params": {"id": "mine", "rid": "b"}})
        ).json()
        assert client.prompt == [3, *OUTPUT, EOS, 5]
        more = {"input_ids": [6], "session_params": {"id": "mine", "rid": meta["meta_info"]["id"]}}
        await b.http.post("/generate", json=more)
        assert client.prompt == [3, *OUTPUT, EOS, 5, *OUTPUT, EOS, 6]
        assert (await b.http.post("/close_session", json={"session_id": "mine"})).status_code == 200
        assert (await b.http.post("/generate", json=more)).status_code == 404


@pytest.mark.asyncio
async def test_replaced_requests_are_gone_and_running_ones_end(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        client = Client(b)
        await client.open()
        b.scheduler.script = lambda request: OUTPUT
        await client.ask([1], rid="a")
        await b.http.post(
            "/generate", json={"input_ids": [2], "rid": "b", "session_params": {"id": client.id, "rid": "a"}}
        )
        replacing = {"input_ids": [3], "rid": "c", "session_params": {"id": client.id, "rid": "a", "replace": True}}
        assert (await b.http.post("/generate", json=replacing)).status_code == 200
        gone = {"input_ids": [3], "session_params": {"id": client.id, "rid": "b"}}
        answer = await b.http.post("/generate", json=gone)
        assert (answer.status_code, answer.json()["error"]["param"]) == (404, "session_params.rid")
        b.scheduler.hold = True
        running = asyncio.ensure_future(client.ask([4], rid="d", replace=True))
        await until(lambda: b.scheduler.requests[-1].input_ids == [4])
        waits = {"input_ids": [5], "session_params": {"id": client.id, "rid": "d"}}
        answer = await b.http.post("/generate", json=waits)
        assert answer.status_code == 400 and "still runs" in answer.json()["error"]["message"]
        b.scheduler.hold = False
        await client.ask([6], rid="e", replace=True)
        await asyncio.wait_for(running, 10)
        assert client.prompt == [6]


@pytest.mark.asyncio
async def test_what_a_session_cannot_do_is_refused_by_field(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        b.scheduler.script = lambda request: OUTPUT
        for body, field in (
            ({}, "capacity_of_str_len"),
            ({"capacity_of_str_len": 0}, "capacity_of_str_len"),
            ({"capacity_of_str_len": 9, "session_id": ""}, "session_id"),
            ({"capacity_of_str_len": 9, "timeout": 1e9}, "timeout"),
        ):
            answer = await b.http.post("/open_session", json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), body
        client = Client(b)
        await client.open(session_id="s", capacity_of_str_len=30)
        assert (
            await b.http.post("/open_session", json={"capacity_of_str_len": 9, "session_id": "s"})
        ).status_code == 400
        await client.ask([1], rid="a")
        count = len(b.scheduler.requests)
        for fields, status, field in (
            ({"session_params": {"id": "x"}}, 404, "session_params.id"),
            ({"session_params": {}}, 400, "session_params.id"),
            ({"session_params": 5}, 400, "session_params"),
            ({"session_params": {"id": "s", "unknown": 1}}, 400, "session_params.unknown"),
            ({"session_params": {"id": "s", "rid": "x"}}, 404, "session_params.rid"),
            ({"session_params": {"id": "s", "rid": "a", "offset": 99}}, 400, "session_params.offset"),
            ({"session_params": {"id": "s", "offset": 2}}, 400, "session_params.rid"),
            ({"session_params": {"id": "s"}, "rid": "a"}, 400, "rid"),
            ({"session_params": {"id": "s"}, "sampling_params": {"n": 2}}, 400, "session_params"),
            ({"session_params": {"id": "s"}, "input_ids": [[1], [2]]}, 400, "session_params"),
            ({"session_params": {"id": "s"}, "input_ids": [40] * 31}, 400, "session_params"),
        ):
            answer = await b.http.post("/generate", json={"input_ids": [1], **fields})
            assert (answer.status_code, answer.json()["error"]["param"]) == (status, field), fields
        assert (await b.http.post("/close_session", json={"session_id": "x"})).status_code == 404
        assert len(b.scheduler.requests) == count
        await client.ask([2], rid="b")
        assert (await b.http.post("/generate", json={"input_ids": [-1], "session_params": {"id": "s", "replace": True}})
                ).status_code == 400  # fmt: skip
        answer = await b.http.post("/generate", json={"input_ids": [3], "session_params": {"id": "s", "rid": "b"}})
        assert answer.status_code == 200, "a refused request replaces nothing"


@pytest.mark.asyncio
@pytest.mark.parametrize("mode", ["prefill", "decode"])
async def test_servers_of_a_pair_have_no_sessions(tokenizer: Tokenizer, mode: Any) -> None:
    async with bench(tokenizer, mode=mode) as b:
        answer = await b.http.post("/open_session", json={"capacity_of_str_len": 9})
        assert answer.status_code == 400 and f"a {mode} server has no sessions" in answer.text
        answer = await b.http.post("/generate", json={"input_ids": [1], "session_params": {"id": "s"}})
        assert answer.status_code == 400 and "session_params" in answer.text


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [False, True])
async def test_a_decode_server_that_sends_the_prefill_half_has_sessions(tokenizer: Tokenizer, stream: bool) -> None:
    prefill = await FakePrefill().start()
    try:
        async with bench(tokenizer, "decode", pairing=PairingConfig(disaggregation_prefill=prefill.url)) as b:
            b.scheduler.script = lambda request: OUTPUT
            client = Client(b)
            await client.open(capacity_of_str_len=20)
            whole = [1, 2, *OUTPUT, EOS, 3, 4]
            assert (await client.ask([1, 2], rid="a", stream=stream)).status_code == 200
            follow = {
                "input_ids": [3, 4],
                "rid": "b",
                "stream": stream,
                "session_params": {"id": client.id, "rid": "a"},
            }
            assert (await b.http.post("/generate", json=follow)).status_code == 200
            assert client.prompt == whole and prefill.bodies[-1]["input_ids"] == whole
            assert prefill.bodies[-1]["session_params"] is None and prefill.bodies[-1]["rid"] == "b"
            b.scheduler.script = lambda request: FinishReason(type="abort", message="no", status_code=400)
            failed = {**follow, "rid": "c"}
            assert (await b.http.post("/generate", json=failed)).status_code == 400
            b.scheduler.script = lambda request: OUTPUT
            assert (await b.http.post("/generate", json=failed)).status_code == 200, "it was forgotten"
            for fields, param in (
                ({"input_ids": [5] * 20}, "session_params"),
                ({"sampling_params": {"n": 2}}, "session_params"),
                ({"input_ids": None, "input_embeds": [[0.0]]}, "input_embeds"),
                ({"bootstrap_room": 5, "bootstrap_host": "127.0.0.1"}, "session_params"),
            ):
                answer = await b.http.post("/generate", json={**follow, "rid": None, **fields})
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), fields
            assert (await b.http.post("/close_session", json={"session_id": client.id})).status_code == 200
    finally:
        await prefill.stop()


@pytest.mark.asyncio
async def test_each_key_has_its_own_sessions(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer, access=AccessConfig(api_key="a,b")) as b:
        b.scheduler.script = lambda request: OUTPUT
        for key, status in (("a", 200), ("b", 404)):
            headers = {"Authorization": f"Bearer {key}"}
            if status == 200:
                opened = {"capacity_of_str_len": 9, "session_id": "s"}
                assert (await b.http.post("/open_session", json=opened, headers=headers)).status_code == 200
            body = {"input_ids": [1], "session_params": {"id": "s"}}
            assert (await b.http.post("/generate", json=body, headers=headers)).status_code == status


def opened(store: OpenSessions, name: str, **fields: Any) -> OpenSession:
    store.open(OpenSessionBody(capacity_of_str_len=99, session_id=name, **fields), "", lambda node: None)
    return store.find(name, "", "session_id")


def test_idle_sessions_close_and_all_have_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    store = OpenSessions(lambda: now[0])
    monkeypatch.setattr(session_store, "MAX_SESSIONS", 3)
    monkeypatch.setattr(session_store, "MAX_SESSION_TOKENS", 50)
    monkeypatch.setattr(session_store, "MAX_SESSION_REQUESTS", 2)
    short, busy = opened(store, "short", timeout=5.0), opened(store, "busy", timeout=5.0)
    opened(store, "long")
    with pytest.raises(RequestError) as full:
        opened(store, "more")
    assert full.value.status == 503 and full.value.retry_after_s
    turn = busy.begin(SessionFields(id="busy"), "r", [1] * 30, None)
    with turn.running():
        now[0] = 6.0
        opened(store, "more")
        assert len(store) == 3 and short.id not in store._sessions, "a session with a running request stays"
        with pytest.raises(RequestError, match="have 50 tokens"):
            store.check_room(21)
        store.check_room(20)
        turn.ended([5])
    follow = busy.begin(SessionFields(id="busy", rid="r"), "q", [9, 2], 9)
    assert follow.prompt == [*[1] * 30, 5, 2], "the BOS token of appended text is dropped"
    with follow.running():
        follow.left()
    with busy.begin(SessionFields(id="busy"), "s", [1], None).running():
        with pytest.raises(RequestError, match="2 requests, the maximum"):
            busy.begin(SessionFields(id="busy"), "t", [1], None)
        assert busy.begin(SessionFields(id="busy", replace=True), "t", [1], None).prompt == [1]


def test_a_session_is_idle_from_the_end_of_its_last_request() -> None:
    now = [0.0]
    store = OpenSessions(lambda: now[0])
    for name, ends in (("ends", True), ("fails", False)):
        session = opened(store, name, timeout=5.0)
        turn = session.begin(SessionFields(id=name), "r", [1], None)
        with turn.running():
            now[0] += 20.0
            turn.ended([2]) if ends else turn.left()
        now[0] += 4.0
        assert store.find(name, "", "session_id") is session
        now[0] += 6.0
        with pytest.raises(RequestError, match="no open session"):
            store.find(name, "", "session_id")


@pytest.mark.parametrize("fails", [False, True])
def test_a_request_stays_that_replaces_a_running_one_which_it_follows(fails: bool) -> None:
    aborted: list[str] = []
    store = OpenSessions(lambda: 0.0)
    store.open(OpenSessionBody(capacity_of_str_len=99, session_id="s"), "", lambda node: aborted.append(node.rid))
    session = store.find("s", "", "session_id")
    first = session.begin(SessionFields(id="s"), "a", [1], None)
    with contextlib.suppress(KeyError), first.running():
        second = session.begin(SessionFields(id="s", rid="a", replace=True), "b", [2], None)
        session.enter(second.node, second.replaced)
        assert aborted == ["a"]
        if fails:
            raise KeyError
        first.left()
    assert aborted == ["a"], "the end of the first request ends no other"
    second.ended([3])
    assert session.begin(SessionFields(id="s", rid="b"), "c", [4], None).prompt == [1, 2, 3, 4]
    assert session.begin(SessionFields(id="s", rid="a"), "c", [4], None).prompt == [1, 4], "without its output"


def test_replacing_a_request_that_is_gone_removes_no_other_with_its_id() -> None:
    session = opened(OpenSessions(lambda: 0.0), "s")
    with contextlib.suppress(KeyError), session.begin(SessionFields(id="s"), "a", [1], None).running():
        late = session.begin(SessionFields(id="s", replace=True), "b", [2], None)
        raise KeyError
    again = session.begin(SessionFields(id="s"), "a", [3], None)
    with again.running(), late.running():
        again.ended([4])
    assert session.begin(SessionFields(id="s", rid="a"), "c", [5], None).prompt == [3, 4, 5]


def test_a_request_that_has_ended_stays_if_its_client_leaves_then() -> None:
    session = opened(OpenSessions(lambda: 0.0), "s")
    turn = session.begin(SessionFields(id="s"), "a", [1], None)
    with contextlib.suppress(KeyError), turn.running():
        turn.ended([2])
        raise KeyError
    assert session.begin(SessionFields(id="s", rid="a"), "b", [3], None).prompt == [1, 2, 3]


def test_a_session_that_changes_meanwhile_refuses_the_request() -> None:
    session = opened(OpenSessions(lambda: 0.0), "s")
    first = session.begin(SessionFields(id="s"), "a", [1], None)
    with first.running():
        first.ended([2])
    late = session.begin(SessionFields(id="s", rid="a"), "b", [3], None)
    with session.begin(SessionFields(id="s", replace=True), "c", [4], None).running():
        with pytest.raises(RequestError, match="changed meanwhile"), late.running():
            pass
