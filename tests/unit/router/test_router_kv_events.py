"""A router that follows the KV events of fake workers: late, with gaps, restarts, other weights, and none at all."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import zmq
import zmq.asyncio
from aiohttp import web

from pdserve.memory.cache_recorder import CacheChange, PagesStored
from pdserve.memory.layout import PageSpace
from pdserve.memory.page_keys import KeyNamespace
from pdserve.observe.kv_events import KVEventStream, Numbered
from pdserve.observe.kv_keys import KEYS_FACT, Group, ReplicaKeys
from pdserve.observe.kv_publisher import END
from pdserve.router.app import ROUTER
from pdserve.router.proxy import prompt_tokens
from pdserve.router.workers import kv_events
from pdserve.router.workers.kv_events import NoEventsError, endpoints_of
from tests.unit.memory.kit import letters
from tests.unit.observe.test_kv_events import NAMESPACE
from tests.unit.observe.test_kv_publisher import Cache
from tests.unit.router.test_router_dispatch import CHAT, GENERATE, RunWorld
from tests.waiting import until

GROUP = Group(0, "full_attention")


def tokens(text: str) -> list[int]:
    return [token for letter in text for token in (ord(letter), 7)]


def facts_of(*endpoints: tuple[str, str | None], namespace: KeyNamespace = NAMESPACE, **more: Any) -> dict[str, Any]:
    """The part of `/get_server_info` that says where each replica publishes, and with which keys."""
    keys = ReplicaKeys(namespace, (GROUP,)).to_json()
    states = [
        {"facts": {"kv_events_endpoint": events, "kv_events_replay_endpoint": replay, KEYS_FACT: keys}}
        for events, replay in endpoints
    ]
    return {"kv_events": {"topic": "", "bind": True, **more}, "internal_states": states}


def facts_of_caches(*caches: Cache) -> dict[str, Any]:
    return facts_of(*((cache.publisher.endpoint, cache.publisher.replay_endpoint) for cache in caches))


async def generate(world: Any, url: str, body: dict[str, Any], path: str = GENERATE) -> str:
    """The name of the worker that answers."""
    async with world.session.post(url + path, json=body) as answer:
        assert answer.status == 200, await answer.text()
        return str((await answer.json())["from"])


async def events(world: Any, url: str) -> dict[str, dict[str, Any]]:
    """What `/workers` says of the events of each worker, by its URL."""
    async with world.session.get(f"{url}/workers") as response:
        return {entry["url"]: entry["kv_events"] for entry in (await response.json())["workers"]}


async def blocks_until(world: Any, url: str, worker: Any, num_blocks: int) -> dict[str, Any]:
    async def look() -> dict[str, Any]:
        return (await events(world, url))[worker.url]

    found = await world.until(look, lambda state: state["followed"] and state["num_blocks"] == num_blocks)
    return dict(found)


def counted(world: Any, name: str, **labels: str) -> float:
    """A value of the router's metrics."""
    registry = world.app[ROUTER].metrics._registry
    return float(registry.get_sample_value(name, labels) or 0)


def test_a_prompt_goes_where_it_is_cached_though_the_router_never_sent_it(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        with ExitStack() as stack:
            caches = [Cache(stack), Cache(stack)]
            first, second = await world.worker("first"), await world.worker("second")
            caches[0].insert("abcd")  # before the router starts
            for worker, cache in zip((first, second), caches, strict=True):
                worker.facts = facts_of_caches(cache)
            async with world.router([], [first, second], policy="kv_aware") as url:
                state = await blocks_until(world, url, first, 4)
                assert (state["num_replicas"], state["num_gaps"], state["error"]) == (1, 0, None)
                await blocks_until(world, url, second, 0)
                asked = {"input_ids": [*tokens("abcd"), 5]}
                assert {await generate(world, url, asked) for _ in range(4)} == {"first"}
                caches[0].clear()
                caches[1].insert("abxy")
                await blocks_until(world, url, first, 0)
                await blocks_until(world, url, second, 4)
                assert {await generate(world, url, asked) for _ in range(4)} == {"second"}
                async with world.session.get(f"{url}/metrics") as answer:
                    shown = await answer.text()
                assert f'pdserve_router_kv_events_blocks{{role="regular",worker="{second.url}"}} 4.0' in shown
                assert f'pdserve_router_kv_events_followed{{role="regular",worker="{first.url}"}} 1.0' in shown
                assert counted(world, "pdserve_router_prompt_tokens_total", source="given") == 8

    run_world(scenario)


def test_each_replica_is_followed_and_each_role_of_a_pair_has_its_own_choice(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        with ExitStack() as stack:
            caches = [Cache(stack), Cache(stack, dp_rank=1), Cache(stack), Cache(stack)]
            prefills = [await world.worker("p0"), await world.worker("p1")]
            decodes = [await world.worker("d0"), await world.worker("d1")]
            prefills[0].facts, prefills[1].facts = facts_of_caches(*caches[:2]), facts_of_caches(caches[2])
            decodes[1].facts = facts_of_caches(caches[3])
            caches[1].insert("abcd")
            caches[2].insert("ab")
            caches[3].insert("abcd")
            async with world.router(prefills, decodes, policy="kv_aware") as url:
                assert (await blocks_until(world, url, prefills[0], 4))["num_replicas"] == 2
                await blocks_until(world, url, prefills[1], 2)
                await blocks_until(world, url, decodes[1], 4)
                for _ in range(3):
                    assert await generate(world, url, {"input_ids": tokens("abcd")}) == "d1"
                assert (len(prefills[0].bodies), len(prefills[1].bodies)) == (3, 0)

    run_world(scenario)


class Publisher:
    """A publisher in the hands of the test: it sends what it is told to."""

    def __init__(self, stack: ExitStack) -> None:
        context = zmq.asyncio.Context()
        stack.callback(context.destroy, 0)
        self.events, self.replays = context.socket(zmq.XPUB), context.socket(zmq.ROUTER)
        self.events.set(zmq.XPUB_VERBOSE, 1)
        for socket in (self.events, self.replays):
            socket.bind("tcp://127.0.0.1:0")
        self.stream = KVEventStream(NAMESPACE, {PageSpace.TOKENS: GROUP})
        self.num_pages = 0

    def facts(self, namespace: KeyNamespace = NAMESPACE) -> dict[str, Any]:
        endpoints = (socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0") for socket in (self.events, self.replays))
        return facts_of(tuple(endpoints), namespace=namespace)  # type: ignore[arg-type]

    def make(self, *changes: CacheChange | str) -> Numbered:
        """The next batch; texts are prompts whose pages enter the cache."""
        told: list[CacheChange] = []
        for change in changes:
            if isinstance(change, str):
                pages = range(self.num_pages, self.num_pages + len(change))
                self.num_pages += len(change)
                change = PagesStored(None, pages, letters(change), None)
            told.append(change)
        [batch] = self.stream.apply(told)
        return batch

    async def send(self, *batches: Numbered) -> None:
        for batch in batches:
            await self.events.send_multipart((b"", batch.seq.to_bytes(8, "big"), batch.payload))

    async def subscribed(self) -> None:
        """Wait for the next subscription, and send the content."""
        while (await self.events.recv())[:1] != b"\1":
            pass
        await self.send(*self.stream.snapshot())

    async def replay(self, *batches: Numbered) -> int:
        """Answer the next request for a replay; returns its number."""
        peer, _, number = await self.replays.recv_multipart()
        for batch in batches:
            await self.replays.send_multipart((peer, b"", b"", batch.seq.to_bytes(8, "big"), batch.payload))
        await self.replays.send_multipart((peer, b"", b"", END, b""))
        return int.from_bytes(number, "big")


def test_gaps_are_replayed_and_else_the_content_is_read_anew(
    run_world: RunWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "RETRY_S", 0.01)

    async def scenario(world: Any) -> None:
        with ExitStack() as stack:
            publisher, worker = Publisher(stack), await world.worker("one")
            worker.facts = publisher.facts()
            async with world.router([], [worker], policy="kv_aware") as url:
                await publisher.subscribed()
                await publisher.send(publisher.make("ab"))
                await blocks_until(world, url, worker, 2)
                lost, seen = publisher.make("cd"), publisher.make("efg")
                await publisher.send(seen)
                assert await publisher.replay(lost, seen) == lost.seq
                state = await blocks_until(world, url, worker, 7)
                assert (state["num_gaps"], state["num_subscribed_again"]) == (1, 0)
                publisher.make("h")
                await publisher.send(publisher.make("i"))
                await publisher.replay()  # too old
                await publisher.subscribed()
                state = await blocks_until(world, url, worker, 9)
                assert (state["num_gaps"], state["num_subscribed_again"]) == (2, 1)
                labels = {"role": "regular", "worker": worker.url}
                assert counted(world, "pdserve_router_kv_events_gaps_total", **labels) == 2
                await publisher.events.send_multipart((b"", b"\0" * 8, b"nonsense"))
                await publisher.subscribed()
                await publisher.send(publisher.make("k"))
                await blocks_until(world, url, worker, 10)

    run_world(scenario)


def test_a_restart_and_a_death_forget_the_blocks(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        with ExitStack() as stack:
            publisher, worker = Publisher(stack), await world.worker("one")
            worker.facts = publisher.facts()
            async with world.router([], [worker], policy="kv_aware") as url:
                await publisher.subscribed()
                await publisher.send(publisher.make("ab"), publisher.make("cd"))
                await blocks_until(world, url, worker, 4)
                publisher.stream = KVEventStream(NAMESPACE, {PageSpace.TOKENS: GROUP})
                await publisher.send(publisher.make("xyz"))
                await blocks_until(world, url, worker, 3)
                worker.health_status = 503
                index = world.app[ROUTER].kv_events
                await until(lambda: not index.workers)
                state = (await events(world, url))[worker.url]
                assert (state["followed"], state["num_blocks"]) == (False, 0)
                cache = Cache(stack)
                cache.insert("abcde")
                worker.facts, worker.health_status = facts_of_caches(cache), 200
                await blocks_until(world, url, worker, 5)
                async with world.session.delete(f"{url}/workers/{worker.url}") as answer:
                    assert answer.status == 202
                await until(lambda: not index.workers)

    run_world(scenario)


def test_other_weights_are_noticed_by_the_first_block(run_world: RunWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "RETRY_S", 0.01)

    async def scenario(world: Any) -> None:
        with ExitStack() as stack:
            publisher, first, second = Publisher(stack), await world.worker("first"), await world.worker("second")
            first.facts = publisher.facts()
            async with world.router([], [first, second], policy="kv_aware") as url:
                await publisher.subscribed()
                other = dataclasses.replace(NAMESPACE, weights="w2")
                publisher.stream = KVEventStream(other, {PageSpace.TOKENS: GROUP})
                await publisher.send(publisher.make("ab"))
                await blocks_until(world, url, first, 2)
                [followed] = [one for one in world.app[ROUTER].kv_events.workers.values() if one.replicas]
                blocks = followed.replicas[0].blocks
                await until(lambda: followed.keys_wait_s > 0.01)  # the old keys were read once more
                assert blocks.are_keys_outdated and blocks.keys.namespace == NAMESPACE
                first.facts = publisher.facts(other)
                await until(lambda: blocks.keys.namespace == other and not blocks.are_keys_outdated)
                assert {await generate(world, url, {"input_ids": tokens("ab")}) for _ in range(8)} == {"first"}

    run_world(scenario)


def test_workers_without_events_are_chosen_by_load_with_one_warning_each(
    run_world: RunWorld, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(world: Any) -> None:
        workers = [await world.worker("first"), await world.worker("second")]
        workers[1].facts = facts_of(("tcp://127.0.0.1:1", None), bind=False)
        with caplog.at_level(logging.WARNING, kv_events.__name__):
            async with world.router([], workers, policy="kv_aware") as url:
                await until(lambda: sum("by load alone" in text for text in caplog.messages) == 2)
                states = await events(world, url)
                assert "--kv-events-config" in states[workers[0].url]["error"]
                assert "bind: true" in states[workers[1].url]["error"]
                names = {await generate(world, url, {"input_ids": [1, 2]}) for _ in range(20)}
                assert names == {"first", "second"}
        assert len([text for text in caplog.messages if "by load alone" in text]) == 2

    run_world(scenario)


async def tokenize(worker: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """A letter is a page; of messages the content of the last one."""
    if request.path != "/tokenize":
        return web.json_response({"from": worker.name})
    text = body["prompt"] if "prompt" in body else body["messages"][-1]["content"]
    return web.json_response({"tokens": tokens(text)})


async def refuse_to_tokenize(worker: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    if request.path != "/tokenize":
        return web.json_response({"from": worker.name})
    return web.json_response({"error": {"message": "no tokenizer"}}, status=400)


async def never_tokenize(worker: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    if request.path != "/tokenize":
        return web.json_response({"from": worker.name})
    await asyncio.Event().wait()
    raise AssertionError("never")


def test_text_and_chats_are_tokenized_by_the_workers_in_turn(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        with ExitStack() as stack:
            cache = Cache(stack)
            cache.insert("abcd")
            first, second = await world.worker("first", tokenize), await world.worker("second", tokenize)
            first.facts = facts_of_caches(cache)
            async with world.router([], [first, second], policy="kv_aware") as url:
                await blocks_until(world, url, first, 4)
                chat = {"messages": [{"role": "user", "content": "abcd"}], "stream": False}
                assert {await generate(world, url, {"text": ["abcd", "z"]}) for _ in range(4)} == {"first"}
                assert {await generate(world, url, chat, CHAT) for _ in range(4)} == {"first"}
                assert [one.paths.count("/tokenize") for one in (first, second)] == [4, 4]
                assert counted(world, "pdserve_router_prompt_tokens_total", source="tokenized") == 8

    run_world(scenario)


@pytest.mark.parametrize(("answer", "source"), [(refuse_to_tokenize, "failed"), (never_tokenize, "timeout")])
def test_without_token_ids_a_request_is_served_by_load(
    run_world: RunWorld, monkeypatch: pytest.MonkeyPatch, answer: Callable[..., Any], source: str
) -> None:
    monkeypatch.setattr(prompt_tokens, "TIMEOUT_S", 0.05)

    async def scenario(world: Any) -> None:
        worker = await world.worker("one", answer)
        async with world.router([], [worker], policy="kv_aware") as url:
            assert await generate(world, url, {"text": "abcd"}) == "one"
            assert counted(world, "pdserve_router_prompt_tokens_total", source=source) == 1
            assert await generate(world, url, {"input_ids": ["a"]}) == "one"
            assert await generate(world, url, {"input_embeds": [[0.5]]}) == "one"
            assert counted(world, "pdserve_router_prompt_tokens_total", source="none") == 1

    run_world(scenario)


def test_endpoints_are_those_that_the_router_can_reach() -> None:
    found = endpoints_of(facts_of(("tcp://0.0.0.0:5557", "tcp://[::]:5558"), ("ipc:///tmp/x", None)), "10.1.2.3")
    assert [(one.events, one.replay) for one in found.values()] == [
        ("tcp://10.1.2.3:5557", "tcp://10.1.2.3:5558"),
        ("ipc:///tmp/x", None),
    ]
    assert endpoints_of(facts_of(("tcp://*:5557", None)), "fe80::1")[0].events == "tcp://[fe80::1]:5557"
    with pytest.raises(NoEventsError, match=r"only its own machine reaches.*tcp://\*:5557"):
        endpoints_of(facts_of(("tcp://127.0.0.1:5557", None)), "192.0.2.7")
    with pytest.raises(NoEventsError, match="publishes no KV events"):
        endpoints_of({"kv_events": None}, "127.0.0.1")
    with pytest.raises(ValueError, match="replica 0 has no kv_events_keys"):
        endpoints_of({"kv_events": {}, "internal_states": [{"facts": {}}]}, "127.0.0.1")
    with pytest.raises(ValueError, match="no state"):
        endpoints_of({"kv_events": {}, "internal_states": []}, "127.0.0.1")
