"""The router as a process: it says when it is ready, serves, and ends cleanly."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from pdserve.base.process import Child
from tests.waiting import until

RunWorld = Callable[[Callable[[Any], Coroutine[Any, Any, None]]], None]
ROUTER = [sys.executable, "-m", "pdserve.launch_router"]
READY_S = 20.0


def test_the_process_announces_itself_serves_and_ends_on_sigterm(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        prefill, decode = await world.worker("p"), await world.worker("d")
        argv = [*ROUTER, "--pd-disaggregation", "--prefill", prefill.url, "8999", "--decode", decode.url, "--port", "0"]
        child = Child("router", argv)
        try:
            ready = await asyncio.to_thread(child.wait_ready, READY_S)
            assert ready.role == "router" and ready.bootstrap_port is None
            async with world.session.post(ready.url + "/generate", json={"text": "a"}) as response:
                assert response.status == 200
            assert decode.bodies[0]["bootstrap_port"] == 8999
        finally:
            status = await asyncio.to_thread(child.end, READY_S)
        assert status == 0

    run_world(scenario)


def test_sigterm_ends_it_while_a_request_hangs(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        async def silent(worker: Any, request: Any, body: dict[str, Any]) -> Any:
            await asyncio.Event().wait()

        worker = await world.worker("w", silent)
        child = Child("router", [*ROUTER, "--worker-urls", worker.url, "--port", "0", "--shutdown-timeout", "0.1"])
        try:
            ready = await asyncio.to_thread(child.wait_ready, READY_S)
            await world.until(lambda: world.healthy_urls(ready.url), lambda urls: len(urls) == 1)
            call = asyncio.create_task(world.session.post(ready.url + "/generate", json={"text": "a"}))
            await until(lambda: bool(worker.bodies))
        finally:
            status = await asyncio.to_thread(child.end, READY_S)
        assert status == 0
        await until(lambda: worker.num_cancelled == 1)
        answer = await call
        assert (answer.status, (await answer.json())["error"]["code"]) == (503, "router_shutting_down")

    run_world(scenario)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--worker-urls", "nowhere"], "--worker-urls needs a URL"),
        (["--pd-disaggregation", "--decode", "http://127.0.0.1:1"], "at least one --prefill"),
    ],
)
def test_wrong_flags_end_it_with_a_clear_message(flags: list[str], said: str) -> None:
    done = subprocess.run([*ROUTER, *flags], capture_output=True, text=True, timeout=READY_S, check=False)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


def test_a_taken_port_is_said_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        argv = [*ROUTER, "--worker-urls", "http://127.0.0.1:1", "--port", port]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=READY_S, check=False)
    assert done.returncode == 2 and f"cannot listen on 127.0.0.1:{port}" in done.stderr
