"""The demo, run as a program against a made-up OpenAI server."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from tests.unit.router.answers import begin_stream

RunWorld = Callable[[Callable[[Any], Coroutine[Any, Any, None]]], None]
REPO = Path(__file__).parents[3]
TIMING = {
    "queue_s": 0.001,
    "bootstrap_s": 0.002,
    "prefill_s": 0.03,
    "transfer_s": 0.004,
    "first_decode_step_s": 0.005,
    "kv_bytes": 46080,
    "kv_pages": 2,
    "kv_transfer_s": 0.001,
}


def openai_stream(broken: Callable[[dict[str, Any]], bool] = lambda body: False) -> Any:
    """Streams `max_tokens` pieces, two in one write; `broken` requests end with an error event."""

    async def answer(worker: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        chat = request.path.endswith("chat/completions")
        prompt = body["messages"][-1]["content"] if chat else body["prompt"]
        num_prompt = len(prompt.split()) if isinstance(prompt, str) else len(prompt)
        response = await begin_stream(request)
        head = {"id": "1", "created": 1, "model": "d", "object": "chat.completion.chunk" if chat else "text_completion"}
        events: list[dict[str, Any]] = []
        if chat:
            events.append({"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None})
        for index in range(body["max_tokens"]):
            piece = f" w{index}"
            fields = {"delta": {"content": piece}} if chat else {"text": piece}
            events.append({"index": 0, "finish_reason": None, **fields})
        packed = [b"data: " + orjson.dumps(head | {"choices": [choice], "usage": None}) + b"\n\n" for choice in events]
        if broken(body):
            packed = [*packed[:1], b'data: {"error": {"message": "decode died"}}\n\n']
        else:
            usage = {"prompt_tokens": num_prompt, "completion_tokens": body["max_tokens"], "total_tokens": 0}
            extra = {"pdserve": TIMING} if body.get("return_meta_info") else {}
            packed.append(b"data: " + orjson.dumps(head | {"choices": [], "usage": usage} | extra) + b"\n\n")
            packed.append(b"data: [DONE]\n\n")
        for first in range(0, len(packed), 2):
            await response.write(b"".join(packed[first : first + 2]))
        return response

    return answer


async def run_program(*argv: str, stdin: bytes = b"") -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *argv,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=REPO,
    )
    try:
        out, err = await process.communicate(stdin)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


def test_the_demo_shows_what_happened(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        server = await world.worker("d", openai_stream())
        argv = ["scripts/demo.py", "--base-url", server.url + "/v1", "--question", "a b c", "--max-tokens", "6"]
        code, out, err = await run_program(*argv, "--once")
        assert code == 0, err
        assert " w0 w1 w2 w3 w4 w5\n" in out
        assert "prompt 3 tokens, answer 6 tokens" in out
        assert "46,080 bytes in 2 pages, 1.0 ms, 0.05 GB/s" in out
        assert (
            "37.0 ms = queue 1.0 + bootstrap 2.0 + prefill 30.0 + transfer 4.0; then the first decode step 5.0" in out
        )
        assert "TTFT at the client" in out and "ITL mean" in out and "p99" in out

    run_world(scenario)


def test_the_demo_keeps_the_conversation(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        server = await world.worker("d", openai_stream())
        argv = ["scripts/demo.py", "--base-url", server.url + "/v1", "--question", "one", "--max-tokens", "2"]
        code, _, err = await run_program(*argv, stdin=b"\ntwo\n")
        assert code == 0, err
        roles = [message["role"] for message in server.bodies[1]["messages"]]
        contents = [message["content"] for message in server.bodies[1]["messages"]]
        assert roles == ["user", "assistant", "user"] and contents == ["one", " w0 w1", "two"]

    run_world(scenario)


def test_the_demo_says_when_the_service_refuses(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        server = await world.worker("d", openai_stream(lambda body: True))
        code, _, err = await run_program("scripts/demo.py", "--base-url", server.url + "/v1", "--once")
        assert code == 1 and "decode died" in err

    run_world(scenario)
