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
DECODE = """
import json, sys
import msgspec
from vllm.distributed.kv_events import KVEventBatch
for line in sys.stdin:
    batch = msgspec.msgpack.decode(bytes.fromhex(line.strip()), type=KVEventBatch)
    print(json.dumps([[type(event).__name__, len(getattr(event, "block_hashes", []))] for event in batch.events]))
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
def test_vllm_reads_every_batch(monolith: Server) -> None:
    reader = follow(monolith)
    try:
        for prompt in prompts(12, seed=8):
            generate(monolith.url, prompt)
        assert requests.post(f"{monolith.url}/flush_cache?timeout=20", timeout=30).status_code == 200
        catch_up(monolith, reader)
        batches = [payload for _, payload in reader.replay(0)]
    finally:
        reader.close()
    lines = "".join(f"{payload.hex()}\n" for payload in batches)
    run = subprocess.run(
        [str(VLLM_PYTHON), "-c", DECODE], input=lines, capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    ours = [[[type(event).__name__, len(getattr(event, "block_hashes", []))] for event in events_of(payload)]
            for payload in batches]  # fmt: skip
    assert [json.loads(line) for line in run.stdout.splitlines() if line.startswith("[[")] == ours
    assert {name for events in ours for name, _ in events} == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}
