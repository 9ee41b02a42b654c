"""What load balancers of other projects read of a server: their rules, written down here, applied to what it exports.

Sources, at the commits that were read: `extractor/metrics/{factories,extractor,spec}.go` of llm-d-inference-scheduler
520af478, `pkg/kvevents/engineadapter/{vllm_adapter,common}.go` of llm-d-kv-cache 7be76e1, `connector_sglang.go` of the
same scheduler, and the model server protocol of gateway-api-inference-extension 84436a96. Dynamo's indexer runs itself.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import requests
import zmq
from prometheus_client.parser import text_string_to_metric_families

from pdserve.config.groups import DisaggMode, ServerConfig
from pdserve.config.kv_events_group import parse_kv_events
from pdserve.protocol.messages import MAX_ROOM
from tests.rules.deploy_kit import POD_IP, example, of_kind, parse_command, pod_command, pods, rendered_chart
from tests.rules.test_dashboards import exported_by_server
from tests.unit.memory.kit import PAGE_TOKENS
from tests.unit.observe.test_kv_publisher import Cache
from tests.waiting import wait_until

DYNAMO_PYTHON = Path(__file__).parents[2] / ".venv-peers" / "dynamo" / "bin" / "python"
"""`scripts/setup_peers.sh dynamo` makes it."""
SGLANG = {
    "WaitingQueueSize": "sglang:num_queue_reqs",
    "RunningRequestsSize": "sglang:num_running_reqs",
    "KVCacheUsagePercent": "sglang:token_usage",
}
"""The picker's built-in names of the engine `sglang`."""
UNIX_NS_OF_THE_YEAR_2100 = 4_102_444_800 * 10**9


def extracted(text: str) -> dict[str, float]:
    """What llm-d's picker takes from `/metrics`: of each family the first sample of those with the newest time."""
    families = {family.name: family for family in text_string_to_metric_families(text)}
    found = {}
    for field, name in SGLANG.items():
        assert families[name].type == "gauge", name
        found[field] = families[name].samples[0].value
    labels = families["sglang:cache_config_info"].samples[0].labels
    return found | {"CacheBlockSize": int(labels["page_size"]), "CacheNumBlocks": int(labels["num_pages"])}


@pytest.mark.parametrize("mode", ["null", "prefill", "decode"])
def test_the_picker_finds_load_and_size_of_the_cache(mode: DisaggMode) -> None:
    text = exported_by_server(mode)
    found = extracted(text)
    assert (found["WaitingQueueSize"], found["RunningRequestsSize"]) == (1, 1), "the total, before those by priority"
    assert found["KVCacheUsagePercent"] == 0.5
    families = {one.name: one.samples[0].value for one in text_string_to_metric_families(text) if one.samples}
    assert found["CacheBlockSize"] == families["sglang:page_size"] == 2
    assert found["CacheNumBlocks"] == families["sglang:num_pages"] == 1


def converted(event: list[Any]) -> dict[str, Any]:
    """An event as llm-d's adapter for vLLM reads it, which its picker uses for all engines: an array by position."""

    def at(index: int, *kinds: type) -> Any:
        value = event[index] if index < len(event) else None
        assert value is None or isinstance(value, kinds), (index, value)
        return value

    assert isinstance(event, list), "maps are refused"
    match event[0]:
        case "BlockStored":
            hashes, tokens = event[1], event[3]
            assert len(event) >= 5 and all(isinstance(one, int) for one in (*hashes, *tokens, event[4]))
            parent = 0 if event[2] is None else event[2] % 2**64
            extra = at(8, list)
            assert extra is None or all(one is None or isinstance(one, list) for one in extra)
            at(5, int), at(7, str), at(10, str), at(11, int)
            assert at(9, int) is None or event[9] >= 0
            stored = {"hashes": [one % 2**64 for one in hashes], "parent": parent, "tokens": tokens, "tier": at(6, str)}
            return stored | {"block_size": event[4]}
        case "BlockRemoved":
            at(3, int)
            return {"hashes": [one % 2**64 for one in event[1]], "tier": at(2, str)}
        case "AllBlocksCleared":
            return {}
    raise AssertionError(event)


def test_llm_d_reads_events_as_arrays_under_its_topic() -> None:
    fields = '"endpoint": "tcp://127.0.0.1:0", "bind": true, "replay_endpoint": "tcp://127.0.0.1:0"'
    with ExitStack() as stack:
        cache = Cache(stack, f'{fields}, "format": "array", "topic": "kv@10.0.0.1:30000@model"')
        cache.insert("ab")

        def change() -> None:
            cache.insert("abc")
            cache.clear()

        topics, events = events_until(cache.publisher.endpoint, "kv@", change, "AllBlocksCleared")
    assert topics == {"kv@10.0.0.1:30000@model"}
    stored = [converted(event) for event in events if event[0] == "BlockStored"]
    assert [one["tokens"] for one in stored[-1:]] == [[ord("c"), 7]] and stored[-1]["tier"] == "GPU"
    assert stored[-1]["parent"] == stored[-2]["hashes"][-1]
    assert all(len(one["tokens"]) == one["block_size"] * len(one["hashes"]) for one in stored)


def events_until(endpoint: str, prefix: str, act: Callable[[], None], last: str) -> tuple[set[str], list[list[Any]]]:
    """The topics, and all events undecoded from the first batch with blocks up to one named `last`.

    `act` is called when the first batch has arrived.
    """
    topics: set[str] = set()
    found: list[list[Any]] = []
    with zmq.Context() as context, context.socket(zmq.SUB) as socket_:
        socket_.set(zmq.LINGER, 0)
        socket_.set(zmq.RCVTIMEO, 20_000)
        socket_.connect(endpoint)
        socket_.subscribe(prefix)
        while not found or found[-1][0] != last:
            topic, _, payload = socket_.recv_multipart()
            topics.add(topic.decode())
            if not found:
                act()
            found += msgspec.msgpack.decode(payload)[1]
    return topics, found


def test_rooms_of_the_sidecar_are_valid() -> None:
    """llm-d's sidecar draws a room from the time in nanoseconds, plus up to 999."""
    assert UNIX_NS_OF_THE_YEAR_2100 + 999 <= MAX_ROOM


def test_the_example_has_the_labels_and_events_that_the_picker_wants() -> None:
    documents = rendered_chart(example("gateway"))
    for pod in pods(documents):
        config = parse_command(pod_command(pod, documents))
        if isinstance(config, ServerConfig):
            role = config.disagg.disaggregation_mode
            assert (pod.labels["llm-d.ai/role"], pod.labels["llm-d.ai/engine-type"]) == (role, "sglang")
            assert config.observe.kv_events_config is not None
            events = parse_kv_events(config.observe.kv_events_config, 1)
            assert events is not None
            assert events.topic == f"kv@{POD_IP}:{config.serving.port}@{config.model.served_model_name}"
    (policy,) = (one for one in of_kind(documents, "NetworkPolicy") if one["metadata"]["name"] == "pdserve-servers")
    assert [entry["port"] for entry in policy["spec"]["ingress"][-1]["ports"]] == ["http", 5557, 5558]


@pytest.fixture
def indexer() -> Iterator[str]:
    """The URL of Dynamo's standalone KV indexer."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    url, command = f"http://127.0.0.1:{port}", [str(DYNAMO_PYTHON), "-m", "dynamo.indexer", "--port", str(port)]
    process = subprocess.Popen(command, env=os.environ | {"DYN_LOG": "error"})
    try:
        wait_until(lambda: answers(url), "the indexer answers", 60)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def answers(url: str) -> bool:
    try:
        return requests.get(f"{url}/health", timeout=5).status_code == 200
    except requests.ConnectionError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not DYNAMO_PYTHON.exists(), reason="needs Dynamo in .venv-peers")
@pytest.mark.parametrize("form", ["map", "array"])
def test_dynamos_indexer_follows_a_cache_and_replays_what_it_missed(indexer: str, form: str) -> None:
    fields = '"endpoint": "tcp://127.0.0.1:0", "bind": true, "replay_endpoint": "tcp://127.0.0.1:0"'

    def matched(text: str) -> int:
        """Tokens of the prompt that the indexer says are cached."""
        tokens = [token for letter in text for token in (ord(letter), 7)]
        asked = {"token_ids": tokens, "model_name": "tiny"}
        found: Mapping[str, Any] = requests.post(f"{indexer}/query", json=asked, timeout=5).json()["scores"]
        return int(found.get("7", {}).get("0", 0))

    with ExitStack() as stack:
        cache = Cache(stack, f'{fields}, "format": "{form}"')
        cache.insert("abcd")  # before the indexer subscribes
        worker = {"instance_id": 7, "model_name": "tiny", "block_size": PAGE_TOKENS}
        worker |= {"endpoint": cache.publisher.endpoint, "replay_endpoint": cache.publisher.replay_endpoint}
        assert requests.post(f"{indexer}/register", json=worker, timeout=5).status_code == 201
        wait_until(lambda: matched("abcd") == 4 * PAGE_TOKENS, "the content of the cache has arrived")
        cache.insert("abxy")
        wait_until(lambda: matched("abxy") == 4 * PAGE_TOKENS, "a further prompt has arrived")
        assert (matched("abcz"), matched("zz")) == (3 * PAGE_TOKENS, 0)
        cache.clear()
        wait_until(lambda: matched("abcd") == 0, "the flush has arrived")
