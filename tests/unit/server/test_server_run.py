"""The real HTTP server on a free port: clients that hang up, the OpenAI client, the engine's death, an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from pdserve.errors import ConfigError
from pdserve.protocol.channel import memory_channel_pair
from pdserve.protocol.messages import FinishReason
from pdserve.server.lifecycle.instance import EngineBackend
from pdserve.server.lifecycle.run import run_api, serve
from pdserve.server.text.tokenizer import Tokenizer, load_tokenizer
from tests.hostile_http import POST, REFUSED, SIZED, error_of, send
from tests.unit.server.server_kit import ScriptedScheduler, make_config, tiny_hf_tokenizer
from tests.waiting import until

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]
Ids = Callable[[str], list[int]]
TEXT = "héllo 👩‍👧 世界"


class Running:
    """A server that listens, its scheduler, and a switch that kills the engine."""

    def __init__(self, url: str, scheduler: ScriptedScheduler, task: asyncio.Task[int], alive: list[bool]) -> None:
        self.url = url
        self.scheduler = scheduler
        self.task = task
        self.alive = alive


@contextlib.asynccontextmanager
async def running(tokenizer: Tokenizer, **serving: Any) -> AsyncIterator[Running]:
    api, low = memory_channel_pair()
    scheduler = ScriptedScheduler(low)
    scheduler.start()
    listening: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    alive = [True]
    task = asyncio.create_task(
        serve(
            EngineBackend(
                config=make_config(**serving),
                open_channel=lambda: api,
                engine_died=lambda: None if alive[0] else "the scheduler process has ended",
                on_ready=listening.set_result,
            ),
            tokenizer,
        )
    )
    try:
        port = await asyncio.wait_for(listening, 10.0)
        yield Running(f"http://127.0.0.1:{port}", scheduler, task, alive)
    finally:
        if not task.done():
            os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(asyncio.shield(task), 15.0)
        scheduler.stop()


async def test_the_openai_client(tokenizer: Tokenizer, ids: Ids) -> None:
    async with running(tokenizer) as server:
        server.scheduler.script = lambda request: ids(TEXT)
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        assert (await client.models.list()).data[0].id == "tiny"
        messages = [{"role": "user", "content": "hi"}]
        chat = await client.chat.completions.create(
            model="tiny", messages=messages, logprobs=True, top_logprobs=2, extra_body={"return_meta_info": True}
        )
        assert chat.choices[0].message.content == TEXT
        assert chat.choices[0].logprobs is not None
        assert chat.model_extra is not None
        assert chat.model_extra["pdserve"]["kv_bytes"] == 1024
        stream = await client.chat.completions.create(
            model="tiny", messages=messages, stream=True, stream_options={"include_usage": True}
        )
        text, usage = "", None
        async for chunk in stream:
            text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
            usage = chunk.usage or usage
        assert text == TEXT
        assert usage == chat.usage
        done = await client.completions.create(model="tiny", prompt="x", n=2, stop=["世"], max_tokens=60)
        assert [choice.text for choice in done.choices] == ["héllo 👩‍👧 "] * 2
        text = ""
        async for part in await client.completions.create(model="tiny", prompt="x", max_tokens=60, stream=True):
            text += part.choices[0].text
        assert text == TEXT
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.models.retrieve("gpt-4")
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await client.completions.create(model="tiny", prompt="x", temperature=-1)
        await client.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens_first", [False, True])
async def test_a_client_that_hangs_up_aborts_its_request(
    tokenizer: Tokenizer, ids: Ids, stream: bool, tokens_first: bool
) -> None:
    async with running(tokenizer) as server:
        scheduler = server.scheduler
        scheduler.hold = True
        scheduler.script = lambda request: ids("abc") if tokens_first else []
        async with httpx.AsyncClient(base_url=server.url, timeout=20.0) as http:
            body = {"prompt": ["x", "y"], "stream": stream}
            call = asyncio.create_task(_read(http, body, wait_for_event=stream and tokens_first))
            await until(lambda: len(scheduler.requests) == 2)
            if stream and tokens_first:
                await until(lambda: call.done())
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
        await until(lambda: len(scheduler.aborts) == 2)
        assert {abort.rid for abort in scheduler.aborts} == {request.rid for request in scheduler.requests}
        async with httpx.AsyncClient(base_url=server.url, timeout=20.0) as http:
            scheduler.hold = False
            assert (await http.post("/v1/completions", json={"prompt": "x"})).status_code == 200


async def _read(http: httpx.AsyncClient, body: dict[str, object], *, wait_for_event: bool) -> None:
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if wait_for_event and line.startswith("data:"):
                return


async def test_death_of_the_engine_ends_streams_with_an_error_and_the_server_with_1(
    tokenizer: Tokenizer, ids: Ids
) -> None:
    async with running(tokenizer) as server:
        server.scheduler.hold = True
        server.scheduler.script = lambda request: ids("abc")
        async with httpx.AsyncClient(base_url=server.url, timeout=20.0) as http:
            waiting = asyncio.create_task(http.post("/v1/completions", json={"prompt": "x"}))
            async with http.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as answer:
                lines = answer.aiter_lines()
                assert (await anext(lines)).startswith("data:")
                await until(lambda: len(server.scheduler.requests) == 2)
                server.alive[0] = False
                events = [line.removeprefix("data: ") async for line in lines if line]
            assert events[-1] == "[DONE]"
            assert json.loads(events[-2])["error"]["code"] == "engine_dead"
            assert (await waiting).status_code == 503
        assert await asyncio.wait_for(asyncio.shield(server.task), 15.0) == 1
        assert not server.scheduler.shutdown


async def test_a_late_refusal_is_an_error_event(tokenizer: Tokenizer, ids: Ids) -> None:
    async with running(tokenizer) as server:
        server.scheduler.hold = True
        server.scheduler.script = lambda request: ids("abc")
        body = {"prompt": "x", "stream": True}
        async with (
            httpx.AsyncClient(base_url=server.url, timeout=20.0) as http,
            http.stream("POST", "/v1/completions", json=body) as answer,
        ):
            assert answer.status_code == 200
            lines = answer.aiter_lines()
            assert (await anext(lines)).startswith("data:")
            finish = FinishReason(type="abort", message="no pages", status_code=503)
            server.scheduler.refuse(server.scheduler.requests[0], finish)
            events = [line.removeprefix("data: ") async for line in lines if line]
        assert json.loads(events[-2])["error"]["message"] == "no pages"
        assert events[-1] == "[DONE]"


async def test_an_orderly_end_tells_the_scheduler(tokenizer: Tokenizer) -> None:
    async with running(tokenizer) as server:
        os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.wait_for(asyncio.shield(server.task), 15.0) == 0
        await until(lambda: server.scheduler.shutdown)


async def test_each_hostile_request_gets_its_status(tokenizer: Tokenizer) -> None:
    async with running(tokenizer) as server:
        port = int(server.url.rpartition(":")[2])
        for name, (data, status, code) in REFUSED.items():
            found, answer = await send(port, data)
            assert found == status or (name == "a long path" and found == 414), (name, answer[:500])
            assert code is None or error_of(answer)["code"] == code, name
            assert answer.count(b"HTTP/1.") == 1, (name, "one request has one answer")
        assert server.scheduler.requests == []
        assert (await send(port, POST + SIZED))[0] == 200, "curl sends a form's type, and programs none"


async def test_sigterm_refuses_what_comes_and_lets_what_runs_end(tokenizer: Tokenizer, ids: Ids) -> None:
    async with running(tokenizer, timeout_graceful_shutdown=60) as server:
        server.scheduler.hold = True
        server.scheduler.script = lambda request: ids("abc")
        body = {"prompt": "x", "stream": True}
        async with (
            httpx.AsyncClient(base_url=server.url, timeout=20.0) as http,
            http.stream("POST", "/v1/completions", json=body) as answer,
        ):
            lines = answer.aiter_lines()
            assert (await anext(lines)).startswith("data:")
            os.kill(os.getpid(), signal.SIGTERM)
            refused = await http.post("/v1/completions", json={"prompt": "y"})
            assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
            assert refused.json()["error"]["code"] == "server_shutting_down"
            for path in ("/health", "/ready"):
                said = await http.get(path)
                assert (said.status_code, said.json()["error"]["code"]) == (503, "server_shutting_down"), path
            (request,) = server.scheduler.requests
            server.scheduler.refuse(request, FinishReason(type="length", length=3))
            events = [line.removeprefix("data: ") async for line in lines if line]
        assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
        assert await asyncio.wait_for(asyncio.shield(server.task), 15.0) == 0
        await until(lambda: server.scheduler.shutdown)


@pytest.mark.parametrize("by_signal", [False, True])
async def test_what_runs_after_the_grace_time_ends_with_a_retryable_error(
    tokenizer: Tokenizer, ids: Ids, by_signal: bool
) -> None:
    async with running(tokenizer, timeout_graceful_shutdown=60 if by_signal else 0) as server:
        server.scheduler.hold = True
        server.scheduler.script = lambda request: ids("abc") if request.stream else []
        async with httpx.AsyncClient(base_url=server.url, timeout=20.0) as http:
            plain = asyncio.create_task(http.post("/v1/completions", json={"prompt": "x"}))
            async with http.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as answer:
                lines = answer.aiter_lines()
                assert (await anext(lines)).startswith("data:")
                await until(lambda: len(server.scheduler.requests) == 2)
                os.kill(os.getpid(), signal.SIGTERM)
                if by_signal:
                    assert (await http.get("/health")).status_code == 503
                    os.kill(os.getpid(), signal.SIGTERM)
                events = [line.removeprefix("data: ") async for line in lines if line]
            assert events[-1] == "[DONE]"
            assert json.loads(events[-2])["error"]["code"] == "server_shutting_down"
            ended = await plain
            assert (ended.status_code, ended.json()["error"]["code"]) == (503, "server_shutting_down")
            assert ended.headers["Retry-After"] == "1"
        assert await asyncio.wait_for(asyncio.shield(server.task), 15.0) == 0
        await until(lambda: server.scheduler.shutdown)


async def test_an_http2_preface_is_refused_at_once(tokenizer: Tokenizer) -> None:
    async with running(tokenizer) as server:
        host, port = server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00")
        answer = await asyncio.wait_for(reader.read(), 2.0)
        assert answer.startswith(b"HTTP/1.1 4")
        writer.close()
        async with httpx.AsyncClient(base_url=server.url) as http:
            assert (await http.get("/health")).status_code == 200


async def test_a_taken_port_is_a_config_error(tokenizer: Tokenizer) -> None:
    async with running(tokenizer) as server:
        api, _ = memory_channel_pair()
        config = make_config()
        taken = type(config.serving)(port=int(server.url.rsplit(":", 1)[1]))
        config = type(config)(model=config.model, serving=taken)
        with pytest.raises(ConfigError, match="cannot listen"):
            await serve(EngineBackend(config=config, open_channel=lambda: api, engine_died=lambda: None), None)


async def test_run_api_blocks_a_thread_until_the_engine_is_gone(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tiny_hf_tokenizer().save_pretrained(tmp_path)
    api, low = memory_channel_pair()
    scheduler = ScriptedScheduler(low)
    scheduler.start()
    ports: list[int] = []
    alive = [True]
    served = asyncio.create_task(
        asyncio.to_thread(
            run_api,
            EngineBackend(
                config=make_config(),
                open_channel=lambda: api,
                engine_died=lambda: None if alive[0] else "the scheduler process has ended",
            ),
            tokenizer_dir=tmp_path,
            on_listening=ports.append,
        )
    )
    try:
        await until(lambda: bool(ports), 20.0)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{ports[0]}", timeout=20.0) as http:
            answer = await http.post("/v1/completions", json={"prompt": "x"})
            assert answer.json()["choices"][0]["text"] == tokenizer.decode([73, 74])
    finally:
        alive[0] = False
        assert await asyncio.wait_for(served, 15.0) == 1
        scheduler.stop()


async def test_a_tokenizer_directory_may_be_empty_or_broken(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text("junk")
    with pytest.raises(ConfigError, match="cannot read the tokenizer"):
        load_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match="chat template"):
        load_tokenizer(tmp_path, str(tmp_path / "absent.jinja"))
    (tmp_path / "latin1.jinja").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="chat template"):
        load_tokenizer(tmp_path, str(tmp_path / "latin1.jinja"))
