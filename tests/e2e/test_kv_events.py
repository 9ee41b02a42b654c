"""KV events of real servers: a reader's copy has exactly the pages that the server says it has cached."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import requests
import zmq

from pdserve.observe.kv_keys import PromptKeys
from pdserve.router.workers.kv_events import endpoints_of
from tests.e2e.harness import Server, generate_batch, running_monolith, running_pair
from tests.kv_reader import Subscriber, events_of
from tests.tiny import VOCAB_SIZE, Family

PAGE = 16
FLAGS = ("--dtype", "float32", "--page-size", str(PAGE), "--max-total-tokens", "2048")
EVENTS = {
    "publisher": "zmq",
    "endpoint": "tcp://127.0.0.1:0",
    "bind": True,
    "replay_endpoint": "tcp://127.0.0.1:0",
    "topic": "kv@pod@tiny",
}
VLLM_PYTHON = Path(__file__).parents[2] / ".venv-peers" / "vllm" / "bin" / "python"
REPLAY = """
import json, sys, time
import msgspec, zmq
from vllm.distributed.kv_events import AllBlocksCleared, KVEventBatch, ZmqEventPublisher

decoder = msgspec.msgpack.Decoder(KVEventBatch)

def replay(endpoint, topic, start):
    found = []
    with zmq.Context.instance().socket(zmq.DEALER) as dealer:
        dealer.connect(endpoint)
        dealer.send_multipart([b"", start.to_bytes(8, "big")])
        while True:
            assert dealer.poll(20000), "no answer"
            frames = dealer.recv_multipart()
            if not frames[-1]:
                return found
            empty, sent_topic, seq, payload = frames
            assert (empty, sent_topic) == (b"", topic)
            found.append((int.from_bytes(seq, "big"), decoder.decode(payload)))

def numbers(endpoint, topic, start):
    return [seq for seq, _ in replay(endpoint, topic, start)]

own = ZmqEventPublisher(0, "inproc://events", "inproc://replay", topic="own")
for _ in range(3):
    own.publish(KVEventBatch(ts=1.0, events=[AllBlocksCleared()]))
end = time.monotonic() + 20
while numbers("inproc://replay", b"own", 0) != [0, 1, 2] and time.monotonic() < end:
    time.sleep(0.01)
theirs = [numbers("inproc://replay", b"own", start) for start in (0, 2, 3)]
own.shutdown()

endpoint, topic = sys.argv[1], sys.argv[2].encode()
batches = replay(endpoint, topic, 0)
last = batches[-1][0]
ours = [numbers(endpoint, topic, start) for start in (last - 1, last, last + 1)]
events = [[[type(event).__name__, len(getattr(event, "block_hashes", []))] for event in batch.events]
          for _, batch in batches]
print(json.dumps({"theirs": theirs, "ours": ours, "numbers": [seq for seq, _ in batches], "events": events}))
"""
"""Run with vLLM: its replay client is a DEALER since its pull request 45177 (tests/distributed/conftest.py,
`MockSubscriber.receive_replay`). The loop here reads vLLM's own publisher first, and then a server.
"""


def events_flag(**more: Any) -> tuple[str, str]:
    return "--kv-events-config", json.dumps({**EVENTS, **more})


def prompts(count: int, seed: int = 5) -> list[list[int]]:
    """Some share their first pages; together they are more than the pool."""
    rng = random.Random(seed)
    shared = [rng.randrange(3, VOCAB_SIZE) for _ in range(5 * PAGE)]
    tails = [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(10, 300))] for _ in range(count)]
    return [(shared if i % 2 else []) + tail for i, tail in enumerate(tails)]


def generate(url: str, prompt: list[int]) -> None:
    sampling = {"temperature": 0, "max_new_tokens": 20, "ignore_eos": True}
    answer = requests.post(f"{url}/generate", json={"input_ids": prompt, "sampling_params": sampling}, timeout=60)
    assert answer.status_code == 200, answer.text


def follow(server: Server) -> Subscriber:
    info = requests.get(f"{server.url}/get_server_info", timeout=30).json()["kv_events"]
    assert info["endpoint"] == f"tcp://127.0.0.1:{info['endpoint_port_base']}"
    return Subscriber(info["endpoint"], info["replay_endpoint"], "kv@pod@")


def catch_up(server: Server, reader: Subscriber) -> None:
    """Read all batches of an idle server; then the copy has as many pages, each with its parents."""
    for _ in range(100):
        state = server.state()
        if (state["facts"]["kv_events_queued"], state["facts"]["kv_events_batches"]) == (0, reader.follower.next_seq):
            break
        reader.poll(0.2)
    assert len(reader.follower.copy.prompts()) == state["memory"]["pages_cached"]


def check(server: Server, url: str, first: Subscriber) -> None:
    """Prompts that evict each other, a reader that joins in the middle, a flush."""
    given = prompts(16)
    for prompt in given[:8]:
        generate(url, prompt)
    late = follow(server)
    try:
        for prompt in given[8:]:
            generate(url, prompt)
        for reader in (first, late):
            catch_up(server, reader)
            assert reader.topics == {b"kv@pod@tiny"}
        last = given[-1]
        assert tuple(last[: len(last) // PAGE * PAGE]) in late.follower.copy.prompts()
        assert late.follower.copy.blocks == first.follower.copy.blocks
        state = server.state()
        assert state["facts"]["kv_events_blocks"] == state["memory"]["pages_cached"]
        assert state["facts"]["kv_events_lost"] == 0
        assert requests.post(f"{server.url}/flush_cache?timeout=20", timeout=30).status_code == 200
        for reader in (first, late):
            reader.until(set())
    finally:
        late.close()


@pytest.fixture(scope="module")
def monolith(tiny_checkpoint: Callable[[Family], Path]) -> Iterator[Server]:
    load = ("--load-publish-endpoint", "auto")
    with running_monolith(str(tiny_checkpoint("llama")), *FLAGS, *events_flag(), *load) as server:
        yield server


def test_a_reader_of_its_load_has_the_memory_that_an_idle_server_reports(monolith: Server) -> None:
    generate(monolith.url, prompts(1)[0])
    info = monolith.state()
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.RCVTIMEO, 30_000)
        socket.connect(f"tcp://127.0.0.1:{info['kv_events']['load_endpoint_port_base']}")
        socket.subscribe(info["kv_events"]["load_topic"])
        name, *load = msgspec.msgpack.decode(socket.recv_multipart()[2])
    assert (name, load[0], load[1], load[2], load[4]) == ("LoadStat", 0, 0, info["num_used_tokens"], 0)
    assert load[3] == info["max_total_tokens"] and load[8] >= info["counters"]["realtime_tokens.prefill_compute"] > 0


def test_a_reader_of_a_monolith_has_its_cache(monolith: Server) -> None:
    reader = follow(monolith)
    try:
        check(monolith, monolith.url, reader)
        assert monolith.state()["counters"]["evicted_pages"] > 0
    finally:
        reader.close()


def test_the_keys_that_a_server_states_give_the_hashes_of_its_events(monolith: Server) -> None:
    """As the router's policy kv_aware uses them, which `test_kv_routing.py` tests."""
    reader, given = follow(monolith), dict(zip(("", "tenant"), prompts(2, seed=9), strict=True))
    try:
        for salt, one in given.items():
            body = {"input_ids": one, "sampling_params": {"max_new_tokens": 1}, "cache_salt": salt or None}
            assert requests.post(f"{monolith.url}/generate", json=body, timeout=60).status_code == 200
        catch_up(monolith, reader)
    finally:
        reader.close()
    [replica] = endpoints_of(monolith.state(), "127.0.0.1").values()
    assert replica.topic == EVENTS["topic"]
    for right, one in given.items():
        for salt in ("", "tenant", "other"):
            prompt = PromptKeys(one, salt=salt)
            root = replica.keys.root(prompt)
            assert root is not None
            hashes = prompt.hashes(replica.keys.namespace, root, len(one))
            assert len(hashes) == len(one) // PAGE > 0
            assert (set(hashes) <= reader.follower.copy.blocks[0].keys()) is (salt == right)


@pytest.mark.slow
def test_readers_of_prefill_and_decode_have_their_caches(tiny_checkpoint: Callable[[Family], Path]) -> None:
    flags = (*FLAGS, *events_flag(format="array"))
    decode_flags = ("--disaggregation-decode-enable-radix-cache",)
    with running_pair(str(tiny_checkpoint("llama")), *flags, decode_flags=decode_flags) as pair:
        for server in (pair.prefill, pair.decode):
            reader = follow(server)
            try:
                check(server, pair.url, reader)
            finally:
                reader.close()


@pytest.mark.slow
def test_each_replica_publishes_on_its_port(tiny_checkpoint: Callable[[Family], Path]) -> None:
    """Two replicas of two tensor ranks; only the first rank of each publishes."""
    flags = (*FLAGS, "--dp-size", "2", "--tp-size", "2", *events_flag())
    with running_monolith(str(tiny_checkpoint("llama")), *flags) as server:
        sampling = {"temperature": 0, "max_new_tokens": 20, "ignore_eos": True}
        generate_batch(server.url, [{"input_ids": prompt, "sampling_params": sampling} for prompt in prompts(8)])
        replicas = server.state()["internal_states"]
        assert len({replica["facts"]["kv_events_endpoint"] for replica in replicas}) == 2
        for replica in replicas:
            reader = Subscriber(replica["facts"]["kv_events_endpoint"], replica["facts"]["kv_events_replay_endpoint"])
            try:
                for _ in range(100):
                    if len(reader.follower.copy.prompts()) == replica["memory"]["pages_cached"]:
                        break
                    reader.poll(0.2)
                assert len(reader.follower.copy.prompts()) == replica["memory"]["pages_cached"] > 0
            finally:
                reader.close()


@pytest.mark.slow
@pytest.mark.skipif(not VLLM_PYTHON.exists(), reason="needs vLLM in .venv-peers")
def test_vllm_reads_every_batch_and_replays(monolith: Server) -> None:
    """vLLM's structs decode every batch, in answers that its client reads as it reads those of vLLM's publisher."""
    reader = follow(monolith)
    try:
        for prompt in prompts(12, seed=8):
            generate(monolith.url, prompt)
        assert requests.post(f"{monolith.url}/flush_cache?timeout=20", timeout=30).status_code == 200
        catch_up(monolith, reader)
        batches = reader.replay(0)
    finally:
        reader.close()
    endpoint = monolith.state()["facts"]["kv_events_replay_endpoint"]
    command = [str(VLLM_PYTHON), "-c", REPLAY, endpoint, EVENTS["topic"]]
    run = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["theirs"] == [[0, 1, 2], [2], []]
    last = batches[-1][0]
    assert found["ours"] == [[last - 1, last], [last], []]
    assert found["numbers"] == [seq for seq, _ in batches] == list(range(last + 1))
    ours = [[[type(event).__name__, len(getattr(event, "block_hashes", []))] for event in events_of(payload)]
            for _, payload in batches]  # fmt: skip
    assert found["events"] == ours
    assert {name for events in ours for name, _ in events} == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}
