"""Many streams through one router, some of whose clients hang up, while servers come and go: who stays sees nothing."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import requests

from tests.e2e.clients import Outcome, chat_all
from tests.e2e.harness import Server, assert_idle, running, start_router, start_server
from tests.tiny import Family
from tests.waiting import seen_until

FLAGS = ("--served-model-name", "tiny", "--max-total-tokens", "32768")
OPERATOR_S = 60.0


class Crowd:
    """Clients of one run: a third comes late, and 30% have little patience and want more than comes in that time."""

    def __init__(self, size: int, seed: int) -> None:
        rng = random.Random(seed)
        self.leaving = set(rng.sample(range(size), size * 3 // 10))
        self.bodies = [
            {
                "model": "tiny",
                "messages": [{"role": "user", "content": f"{i}: " + "page " * rng.randint(1, 60)}],
                "max_tokens": 1000 if i in self.leaving else rng.randint(60, 120),
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
            }
            for i in range(size)
        ]
        self.delays = [rng.uniform(0, 0.5) if i % 3 else rng.uniform(0.5, 4) for i in range(size)]
        self.patience = [rng.uniform(0.02, 1.0) if i in self.leaving else None for i in range(size)]

    async def talk(self, url: str) -> list[Outcome]:
        """All of them at once."""
        return await chat_all(url, self.bodies, self.delays, self.patience)

    def check(self, outcomes: list[Outcome]) -> None:
        """Nobody who stayed was let down; and enough have left for that to mean something."""
        stayed = [outcome for i, outcome in enumerate(outcomes) if i not in self.leaving]
        for outcome in stayed:
            assert (outcome.status, outcome.error, outcome.finish) == (200, None, "length"), outcome
        hung_up = sum(outcome.hung_up for outcome in outcomes)
        assert hung_up >= len(self.leaving) // 2, "most of them must have hung up for this to mean much"


class Operator:
    """Adds and drains servers over the router's HTTP API."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session, self._url = session, url

    async def state(self, server: Server) -> dict[str, Any] | None:
        """What the router says of a server; None where it does not know it."""
        async with self._session.get(f"{self._url}/workers/{server.url}") as response:
            return dict(await response.json()) if response.status == 200 else None

    async def until(self, server: Server, good: Callable[[dict[str, Any] | None], bool]) -> None:
        """Look until the router's view of a server is good."""
        await seen_until(lambda: self.state(server), good, 120.0)

    async def add(self, server: Server, role: str) -> None:
        """Bring a server in; returns when it is used."""
        body = {"url": server.url, "worker_type": role}
        async with self._session.post(f"{self._url}/workers", json=body) as response:
            assert response.status == 202, await response.text()
        await self.until(server, lambda state: state is not None and state["is_healthy"])

    async def drain(self, server: Server) -> int:
        """Take a server out; returns how many requests it still ran, when they have ended."""
        async with self._session.delete(f"{self._url}/workers/{server.url}") as response:
            assert response.status == 202, await response.text()
        state = await self.state(server)
        await self.until(server, lambda state: state is None)
        return 0 if state is None else int(state["load"])


async def swap(url: str, crowd: Crowd, swaps: list[tuple[str, Server, Server]]) -> list[Outcome]:
    """The crowd talks; meanwhile each (role, old, new) is swapped, when the old one has something to do.

    All at once: the crowd may have ended before a second swap after the first.
    """
    async with aiohttp.ClientSession() as session:
        operator = Operator(session, url)

        async def swap_one(role: str, old: Server, new: Server) -> None:
            least = 4 if role == "decode" else 1
            await operator.until(old, lambda state: state is not None and state["load"] >= least)
            await operator.add(new, role)
            await operator.drain(old)

        talking = asyncio.create_task(crowd.talk(url))
        async with asyncio.timeout(OPERATOR_S):
            await asyncio.gather(*(swap_one(*each) for each in swaps))
        return await talking


def dispatched(router: Server, server: Server) -> float:
    """How many requests the router has sent to a server."""
    lines = requests.get(f"{router.url}/metrics", timeout=30).text.splitlines()
    mine = [line for line in lines if line.startswith("pdserve_router_dispatched_total{") and server.url in line]
    return sum(float(line.rsplit(" ", 1)[1]) for line in mine)


def run(size: int, model: Path, num_prefill: int, num_decode: int, policy: str) -> None:
    """Start the servers, let the crowd talk through swaps of the first of each role, and see that nothing stays."""
    prefills = [start_server(str(model), "prefill", *FLAGS, name=f"prefill-{i}") for i in range(num_prefill)]
    decodes = [start_server(str(model), "decode", *FLAGS, name=f"decode-{i}") for i in range(num_decode)]
    with running(*prefills, *decodes):
        router = start_router(prefills[: max(1, num_prefill - 1)], decodes[:-1], "--policy", policy)
        with running(router):
            swaps = [("decode", decodes[0], decodes[-1])]
            swaps += [("prefill", prefills[0], prefills[-1])] if num_prefill > 1 else []
            crowd = Crowd(size, seed=7)
            outcomes = asyncio.run(swap(router.url, crowd, swaps))
            crowd.check(outcomes)
            assert_idle(*prefills, *decodes)
            assert dispatched(router, decodes[-1]) > 0, "the new one has served"
            listed = requests.get(f"{router.url}/workers", timeout=30).json()["workers"]
            assert {state["load"] for state in listed} == {0}
            assert {state["url"] for state in listed}.isdisjoint({old.url for _, old, _ in swaps})


@pytest.mark.slow
def test_64_streams_a_third_hang_up_one_decode_server_comes_and_one_goes(
    tiny_checkpoint: Callable[[Family], Path],
) -> None:
    run(64, tiny_checkpoint("llama"), num_prefill=1, num_decode=2, policy="least_loaded")


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["cache_aware", "power_of_two", "consistent_hashing"])
def test_256_streams_while_servers_of_both_roles_come_and_go(
    tiny_checkpoint: Callable[[Family], Path], policy: str
) -> None:
    run(256, tiny_checkpoint("qwen3"), num_prefill=2, num_decode=3, policy=policy)
