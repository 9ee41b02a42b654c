"""`/metrics` and `/observe` of a server over a scripted scheduler."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdserve.config.groups import DisaggMode
from pdserve.config.schedule_group import MIN_PRIORITY, ScheduleConfig
from pdserve.observe.engine_metrics import MAX_PEERS, pages_by_state
from pdserve.observe.metrics import TTFT_PARTS, RequestRecord, ServerMetrics
from pdserve.protocol.cached_tokens import CachedTokensDetails
from pdserve.protocol.engine_state import EngineState, Flow, PeerLoad
from pdserve.protocol.messages import FinishReason, GenerateRequest
from pdserve.protocol.replicas import merge_states
from pdserve.protocol.sampling import CoreSamplingParams
from pdserve.server.text.tokenizer import Tokenizer
from tests.unit.server.server_kit import Bench, bench
from tests.waiting import until

pytestmark = pytest.mark.timeout(60)

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def read(text: str, *drop: str) -> Samples:
    """Samples by name and labels, without those labels that all have, and those in `drop`."""
    ignored = {"model_name", "engine_type", *drop}
    return {
        (sample.name, frozenset((k, v) for k, v in sample.labels.items() if k not in ignored)): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, frozenset(labels.items())]


async def scrape(b: Bench) -> Samples:
    answer = await b.http.get("/metrics")
    assert answer.status_code == 200
    return read(answer.text)


def body(mode: DisaggMode, room: int, **more: Any) -> dict[str, Any]:
    trio = {} if mode == "null" else {"bootstrap_host": "127.0.0.1", "bootstrap_port": 9, "bootstrap_room": room}
    return {"prompt": "hello world", "max_tokens": 3, **trio, **more}


@pytest.mark.parametrize("mode", ["null", "prefill", "decode"])
async def test_the_parts_of_the_first_token_s_time_add_up_in_the_metrics(
    tokenizer: Tokenizer, mode: DisaggMode
) -> None:
    async with bench(tokenizer, mode) as b:
        for room in range(1, 6):
            assert (await b.http.post("/v1/completions", json=body(mode, room))).status_code == 200
        samples = await scrape(b)
        whole = value(samples, "sglang:time_to_first_token_seconds_sum")
        parts = [value(samples, "pdserve:ttft_part_seconds_sum", part=part) for part in TTFT_PARTS]
        assert whole > 0 and math.isclose(sum(parts), whole, rel_tol=1e-9)
        assert all(value(samples, "pdserve:ttft_part_seconds_count", part=part) == 5 for part in TTFT_PARTS)
        assert value(samples, "sglang:e2e_request_latency_seconds_count") == 5
        assert value(samples, "sglang:inter_token_latency_seconds_count") == 10
        assert value(samples, "sglang:generation_tokens_histogram_sum") == 15


async def test_memory_and_cpu_time_by_process(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        samples = await scrape(b)
        resident = value(samples, "process_resident_memory_bytes", process="api")
        assert value(samples, "pdserve:process_peak_memory_bytes", process="api") >= resident > 1 << 20
        assert value(samples, "process_cpu_seconds_total", process="api") > 0
        assert value(samples, "process_start_time_seconds", process="api") > 1e9


def test_the_parts_of_a_start_have_sglang_s_names() -> None:
    metrics = ServerMetrics("m", "unified")
    facts = {
        "startup_load_weight_s": 2.0,
        "startup_pack_weight_s": 0.5,
        "startup_kv_cache_allocation_s": 0.25,
        "startup_scheduler_e2e_s": 4.0,
        "weight_bytes": 3 << 30,
        "kv_pool_bytes": 1 << 29,
        "startup_available_bytes": 5 << 30,
        "graph_bytes": 1 << 28,
        "graph_s": 7.0,
    }
    metrics.set_api_startup(1.5)
    samples = read(metrics.render(state(facts=facts)).decode())
    assert value(samples, "sglang:startup_time_seconds", phase="load_weight") == 2.0
    assert value(samples, "sglang:startup_time_seconds", phase="scheduler_e2e") == 4.0
    assert value(samples, "sglang:engine_startup_time") == 4.0
    assert value(samples, "sglang:engine_load_weights_time") == 2.5
    assert value(samples, "sglang:weight_memory_usage_gb") == 3.0
    assert value(samples, "sglang:kv_cache_memory_usage_gb") == 0.5
    assert value(samples, "sglang:startup_available_gpu_memory_gb") == 5.0
    assert value(samples, "sglang:graph_memory_usage_gb", phase="decode") == 0.25
    assert value(samples, "sglang:startup_cuda_graph_time_seconds", phase="decode") == 7.0
    assert value(samples, "sglang:startup_time_seconds", phase="tokenizer_e2e") == 1.5


async def test_how_requests_end_is_counted(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        await b.http.post("/v1/completions", json=body("null", 1, max_tokens=2))
        b.scheduler.script = lambda request: []
        await b.http.post("/v1/completions", json=body("null", 1))
        b.scheduler.script = lambda request: FinishReason(
            type="abort", message="gone", status_code=502, err_type="peer_gone"
        )
        await b.http.post("/v1/completions", json=body("null", 1))
        samples = await scrape(b)
        for outcome in ("length", "stop", "abort"):
            assert value(samples, "pdserve:requests_ended_total", outcome=outcome) == 1, outcome
        found = (await b.http.get("/observe")).json()["requests"]
        assert [request["outcome"] for request in found] == ["abort", "stop", "length"]
        assert found[0]["error"] == "gone" and found[0]["ttft_s"] is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/completions", {"prompt": [5] * 8, "max_tokens": 0, "echo": True, "logprobs": 1}),
        ("/generate", {"input_ids": [5] * 8, "sampling_params": {"max_new_tokens": 0}}),
    ],
)
async def test_a_prompt_that_is_read_alone_is_counted_once(
    tokenizer: Tokenizer, path: str, asked: dict[str, Any], stream: bool
) -> None:
    async with bench(tokenizer) as b:
        b.scheduler.cached = lambda request: 6
        assert (await b.http.post(path, json={**asked, "stream": stream})).status_code == 200
        samples = await scrape(b)
        assert value(samples, "sglang:prompt_tokens_total") == 8
        assert value(samples, "sglang:cached_tokens_total", cache_source="device") == 6
        assert value(samples, "sglang:cache_hit_rate") == 0.75
        for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "prompt_tokens_histogram"):
            assert value(samples, f"sglang:{name}_count") == 1, name
        assert value(samples, "pdserve:ttft_part_seconds_count", part="prefill") == 1
        assert value(samples, "sglang:generation_tokens_total") == 0
        assert value(samples, "sglang:inter_token_latency_seconds_count") == 0
        (told,) = (await b.http.get("/observe")).json()["requests"]
        assert told["cached_tokens"] == 6 and sum(told["ttft_parts"].values()) == pytest.approx(told["ttft_s"])


@pytest.mark.parametrize(("backend", "label"), [("file", "storage_file"), (None, "storage_unknown")])
def test_cached_tokens_have_a_sample_for_each_source(backend: str | None, label: str) -> None:
    metrics = ServerMetrics("m", "decode", storage_backend=backend)
    request = GenerateRequest(rid="r", input_ids=[1], sampling=CoreSamplingParams())
    record = RequestRecord(request=request, name="r", path="/generate")

    def cached() -> dict[str, float]:
        samples = read(metrics.render(state()).decode())
        found = {labels: number for (name, labels), number in samples.items() if name == "sglang:cached_tokens_total"}
        return {dict(labels)["cache_source"]: number for labels, number in found.items()}

    metrics.prompt_done(record, 100, 30)
    assert cached() == {"device": 30}, "as without a host tier"
    metrics.prompt_done(record, 100, 50, CachedTokensDetails(device=5, host=15, storage=30))
    metrics.prompt_done(record, 100, 7, CachedTokensDetails(device=0, host=7, storage=0))
    assert cached() == {"device": 35, "host": 22, label: 30}, "the sum is that of all cached tokens"


async def test_a_prompt_that_is_given_up_has_no_first_token(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        b.scheduler.script = lambda request: FinishReason(type="abort", message="aborted", status_code=499)
        assert (await b.http.post("/v1/completions", json={"prompt": [5] * 8})).status_code == 200
        samples = await scrape(b)
        assert value(samples, "sglang:time_to_first_token_seconds_count") == 0
        assert value(samples, "sglang:cached_tokens_total", cache_source="device") == 0
        assert value(samples, "sglang:prompt_tokens_total") == 0, "as of cached tokens: of prompts that were read"
        assert value(samples, "sglang:num_aborted_requests_total") == value(samples, "sglang:num_requests_total") == 1


@pytest.mark.parametrize("mode", ["null", "prefill", "decode"])
async def test_health_probes_are_no_traffic(tokenizer: Tokenizer, tmp_path: Path, mode: DisaggMode) -> None:
    observe = {"log_requests": True, "log_requests_target": str(tmp_path / "log.jsonl")}
    async with bench(tokenizer, mode, observe=observe) as b:
        before = await scrape(b)
        assert (await b.http.get("/health_generate")).status_code == 200
        b.scheduler.script = lambda request: FinishReason(type="abort", message="broken", status_code=500)
        assert (await b.http.get("/health_generate")).status_code == 503
        assert all(request.probe for request in b.scheduler.requests) and len(b.scheduler.requests) == 2
        changed = {name for (name, _), value in (await scrape(b)).items() if before.get((name, _)) != value}
        assert {name for name in changed if "process_" not in name and ":http_" not in name} == set()
        b.scheduler.script = lambda request: [73]
        assert (await b.http.post("/v1/completions", json=body(mode, 1, rid="mine"))).status_code == 200
        assert not b.scheduler.requests[-1].probe
        assert value(await scrape(b), "sglang:num_requests_total") == 1
        await until(lambda: (tmp_path / "log.jsonl").read_text().count("\n") == 2)
    told = (tmp_path / "log.jsonl").read_text()
    assert "health-" not in told and told.count('"rid":"mine"') == 2


async def test_metrics_can_be_turned_off(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer, observe={"enable_metrics": False}) as b:
        assert (await b.http.get("/metrics")).status_code == 404


def state(**fields: Any) -> EngineState:
    memory = {"pages_total": 64, "pages_free": 20, "pages_cached": 30, "pages_evictable": 25, "pages_held_remote": 4}
    known: dict[str, Any] = {
        "queues": {"num_running_reqs": 2},
        "memory": memory,
        "counters": {},
        "facts": {"control_endpoint": "10.0.0.1:5", "disaggregation_mode": "prefill", "instance": "me"},
        "num_running_reqs": 2,
        "num_queue_reqs": 0,
        "num_used_tokens": 5,
        "max_total_tokens": 100,
    }
    return EngineState(**(known | fields))


def peer(number: int, num_bytes: int) -> PeerLoad:
    return PeerLoad(
        endpoint=f"10.1.0.{number}:7",
        instance=f"peer{number}",
        state="ready",
        heartbeat_age_s=0.5,
        sent=Flow(bytes=num_bytes, transfers=3, failures=1, write_s=0.5, in_flight=2, recent_bytes_s=2e9),
    )


def test_pages_by_state_are_a_partition() -> None:
    parts = pages_by_state(state())
    assert parts == {"free": 20, "evictable": 25, "locked": 5, "leased": 14}
    assert sum(parts.values()) == 64
    one = state()
    told = read(ServerMetrics("m", "decode").render(one).decode())
    page_tokens = one.max_total_tokens // 64
    assert value(told, "sglang:kv_available_tokens") == 20 * page_tokens
    assert value(told, "sglang:kv_evictable_tokens") == 25 * page_tokens


def test_the_host_tier_has_sglang_s_gauges() -> None:
    memory = {**state().memory, "hicache_host_used_tokens": 96, "hicache_host_total_tokens": 512}
    told = read(ServerMetrics("m", "null").render(state(memory=memory)).decode())
    assert value(told, "sglang:hicache_host_used_tokens") == 96
    assert value(told, "sglang:hicache_host_total_tokens") == 512


def test_peers_failures_and_replicas_have_labels() -> None:
    one = state(failures={"peer_gone": 2}, peers=[peer(1, 1000)])
    metrics = ServerMetrics("m", "prefill")
    alone = read(metrics.render(one, {0: True}).decode())
    assert value(alone, "pdserve:request_failures_total", cause="peer_gone") == 2
    assert value(alone, "pdserve:kv_pages", state="leased") == 14
    assert value(alone, "pdserve:pages_held_remote") == 4
    assert value(alone, "pdserve:peer_bytes_total", peer="10.1.0.1:7", direction="sent") == 1000
    assert value(alone, "pdserve:peer_gb_per_second", peer="10.1.0.1:7", direction="sent") == 2.0
    assert value(alone, "pdserve:peer_transfer_failures_total", peer="10.1.0.1:7", direction="sent") == 1
    assert value(alone, "pdserve:peer_heartbeat_age_seconds", peer="10.1.0.1:7") == 0.5
    both = read(metrics.render(merge_states([one, state()]), {0: True, 1: False}).decode())
    for rank in ("0", "1"):
        assert value(both, "sglang:num_running_reqs", dp_rank=rank) == 2
        assert value(both, "pdserve:kv_pages", dp_rank=rank, state="free") == 20
    assert value(both, "pdserve:scheduler_alive", dp_rank="1") == 0
    assert ("sglang:num_running_reqs", frozenset()) not in both, "a sum would be counted twice"


def test_the_ages_of_what_should_pass_soon_are_told() -> None:
    metrics = ServerMetrics("m", "decode")
    calm = read(metrics.render(state(peers=[peer(1, 0)])).decode())
    assert value(calm, "pdserve:quarantined_pages_age_seconds") == value(calm, "pdserve:silent_peer_age_seconds") == 0
    silent = [msgspec.structs.replace(peer(number, 0), silent_s=age_s) for number, age_s in ((1, 4.0), (2, 25.5))]
    told = read(metrics.render(state(peers=[*silent, peer(3, 0)], oldest_orphan_s=12.5)).decode())
    assert value(told, "pdserve:quarantined_pages_age_seconds") == 12.5
    assert value(told, "pdserve:silent_peer_age_seconds") == 25.5


def test_the_number_of_peers_with_a_label_is_bounded() -> None:
    peers = [peer(number, 10 + number) for number in range(MAX_PEERS + 9)]
    samples = read(ServerMetrics("m", "prefill").render(state(peers=peers)).decode())
    labels = {dict(labels)["peer"] for name, labels in samples if name == "pdserve:peer_bytes_total"}
    assert len(labels) == MAX_PEERS + 1
    total = sum(v for (name, _), v in samples.items() if name == "pdserve:peer_bytes_total")
    assert total == sum(10 + number for number in range(MAX_PEERS + 9)), "what has no label of its own is in `other`"


async def test_observe_is_the_page_s_picture(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer, "prefill") as b:
        b.scheduler.state = lambda: state(peers=[peer(1, 1000)])  # type: ignore[method-assign]
        answer = await b.http.post("/v1/completions", json=body("prefill", (1 << 62) + 1))
        assert answer.status_code == 200
        seen = (await b.http.get("/observe")).json()
        assert seen["server"]["mode"] == "prefill" and seen["server"]["status"] == "ready"
        (replica,) = seen["replicas"]
        assert replica["alive"] and replica["state"]["pages"] == {"total": 64, **pages_by_state(state())}
        (edge,) = seen["edges"]
        assert (edge["from"], edge["to"]) == ("10.0.0.1:5", "10.1.0.1:7")
        assert (edge["gb_per_s"], edge["in_flight"], edge["bytes"]) == (2.0, 2, 1000)
        assert edge["gb_per_s_writing"] == pytest.approx(1000 / 0.5 / 1e9)
        (request,) = seen["requests"]
        assert request["room"] == str((1 << 62) + 1)
        assert sum(request["ttft_parts"].values()) == pytest.approx(request["ttft_s"])
        assert request["completion_tokens"] == 3 and request["path"] == "/v1/completions"


async def test_probes_are_no_requests_of_anybody_s(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        assert (await b.http.get("/health_generate")).status_code == 200
        assert (await b.http.get("/observe")).json()["requests"] == []


def test_messages_of_before_can_still_be_read() -> None:
    """What is new in a state has a default, so that the two processes need not agree on it."""
    fields = msgspec.to_builtins(state())
    for name in ("failures", "peers", "replicas", "audit"):
        del fields[name]
    assert msgspec.convert(fields, EngineState) == state()


async def test_http_calls_by_endpoint_and_status(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        for _ in range(2):
            assert (await b.http.post("/v1/completions", json=body("null", 1))).status_code == 200
        assert (await b.http.post("/v1/completions", json={"prompt": 5.5})).status_code == 400
        assert (await b.http.get("/no/such/path")).status_code == 404
        samples = await scrape(b)
        where = {"endpoint": "/v1/completions", "method": "POST"}
        assert value(samples, "sglang:http_requests_total", **where) == 3
        assert value(samples, "sglang:http_responses_total", **where, status_code="200") == 2
        assert value(samples, "sglang:http_responses_total", **where, status_code="400") == 1
        assert value(samples, "sglang:http_requests_active", **where) == 0
        assert value(samples, "sglang:http_requests_active", endpoint="/metrics", method="GET") == 1, "this scrape"
        assert not any("/no/such" in str(labels) for _, labels in samples)


def test_requests_in_progress_by_routing_key() -> None:
    metrics = ServerMetrics("m", "unified")
    records = []
    for key, count in (("a", 1), ("b", 3), ("c", 201), (None, 4)):
        for index in range(count):
            request = GenerateRequest(rid="r", input_ids=[1], sampling=CoreSamplingParams())
            ttft_s = 1.0 if key == "b" or index == 0 else None
            records.append(RequestRecord(request=request, name="r", routing_key=key, ttft_s=ttft_s))
            metrics.started(records[-1])

    def keys(name: str) -> dict[str, float]:
        samples = read(metrics.render(None).decode())
        labels = [(dict(pairs), count) for (metric, pairs), count in samples.items() if metric == f"sglang:{name}"]
        return {f"{pairs['gt']}-{pairs['le']}": count for pairs, count in labels if count}

    assert keys("routing_key_all_req_count") == {"0-1": 1, "2-3": 1, "200-+Inf": 1}
    assert keys("routing_key_running_req_count") == {"0-1": 2, "2-3": 1}
    samples = read(metrics.render(None).decode())
    assert value(samples, "sglang:num_unique_running_routing_keys") == 3
    assert sum(name == "sglang:routing_key_all_req_count" for name, _ in samples) == 11
    for record in records:
        record.outcome = "stop"
        metrics.ended(record)
    assert keys("routing_key_all_req_count") == {}


async def test_the_routing_key_of_a_call_reaches_its_sequences(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        seen: list[dict[str, float]] = []

        def look(request: GenerateRequest) -> list[int]:
            seen.append(read(b.metrics.render(None).decode()))  # type: ignore[arg-type]
            return [73]

        b.scheduler.script = look
        headers = {"X-SMG-Routing-Key": "mine"}
        assert (await b.http.post("/v1/completions", json=body("null", 1), headers=headers)).status_code == 200
        assert value(seen[0], "sglang:routing_keys_active") == 1  # type: ignore[arg-type]
        assert value(seen[0], "sglang:routing_key_all_req_count", gt="0", le="1") == 1  # type: ignore[arg-type]
        samples = await scrape(b)
        assert value(samples, "sglang:routing_keys_active") == 0
        assert value(samples, "sglang:routing_key_all_req_count", gt="0", le="1") == 0


@pytest.mark.parametrize(
    ("queues", "depths"),
    [
        ({"num_queue_reqs": 5, "num_running_reqs": 1, "num_retracted_reqs": 2}, (3, 2)),
        ({"num_queue_reqs": 5, "num_prefill_bootstrap_queue_reqs": 4, "num_prefill_inflight_queue_reqs": 9}, (9, 0)),
        ({"num_queue_reqs": 5, "num_decode_prealloc_queue_reqs": 4, "num_retracted_reqs": 3}, (0, 3)),
    ],
    ids=["monolith", "prefill", "decode"],
)
def test_what_waits_for_prefill_and_what_was_retracted(queues: dict[str, int], depths: tuple[int, int]) -> None:
    facts = {"num_prefill_inflight_reqs": 6}
    samples = read(ServerMetrics("m", "unified").render(state(queues=queues, facts=facts)).decode())
    assert (value(samples, "sglang:prefill_queue_depth"), value(samples, "sglang:decode_queue_depth")) == depths
    assert value(samples, "sglang:num_prefill_inflight_reqs") == 6


def test_counters_with_a_label_have_sglang_s_names() -> None:
    counters = {"realtime_tokens.decode": 4.0, "scheduler_stage_seconds.idle": 2.0, "scheduler_idle_seconds": 2.0}
    samples = read(ServerMetrics("m", "unified").render(state(counters=counters)).decode())
    assert value(samples, "sglang:realtime_tokens_total", mode="decode") == 4
    assert value(samples, "sglang:realtime_tokens_total", mode="prefill_compute") == 0
    assert value(samples, "sglang:forward_execution_seconds_total", category="mixed") == 0
    assert value(samples, "sglang:scheduler_stage_seconds_total", category="idle") == 2
    assert value(samples, "sglang:scheduler_idle_seconds_total") == 2
    assert value(samples, "sglang:process_cpu_seconds_total", component="tokenizer") > 0


ESSENTIAL = """
num_running_reqs num_used_tokens token_usage gen_throughput num_queue_reqs num_grammar_queue_reqs prefill_queue_depth
decode_queue_depth num_prefill_inflight_reqs cache_hit_rate spec_accept_length prompt_tokens_total
generation_tokens_total cached_tokens_total num_requests_total time_to_first_token_seconds inter_token_latency_seconds
e2e_request_latency_seconds http_requests_active routing_keys_active num_unique_running_routing_keys
routing_key_running_req_count routing_key_all_req_count weight_memory_usage_gb kv_cache_memory_usage_gb
graph_memory_usage_gb startup_available_gpu_memory_gb startup_time_seconds startup_cuda_graph_time_seconds
scheduler_idle_seconds_total scheduler_process_cpu_seconds_total scheduler_stage_seconds_total
estimated_flops_per_gpu_total estimated_read_bytes_per_gpu_total estimated_write_bytes_per_gpu_total
realtime_tokens_total forward_execution_seconds_total process_cpu_seconds_total
"""
"""What SGLang's own test of its metrics looks for."""
WITHOUT_MEANING = {
    "spec_accept_length",
    "estimated_flops_per_gpu_total",
    "estimated_read_bytes_per_gpu_total",
    "estimated_write_bytes_per_gpu_total",
}


@pytest.mark.parametrize("mode", ["null", "prefill", "decode"])
async def test_sglang_s_essential_metrics_are_exported_but_for_those_without_meaning(
    tokenizer: Tokenizer, mode: DisaggMode
) -> None:
    async with bench(tokenizer, mode) as b:
        assert (await b.http.post("/v1/completions", json=body(mode, 1))).status_code == 200
        facts = {"startup_load_weight_s": 1.0, "weight_bytes": 1, "kv_pool_bytes": 1, "startup_available_bytes": 1}
        facts |= {"graph_bytes": 0, "graph_s": 0.0, "num_prefill_inflight_reqs": 0}
        text = b.metrics.render(state(facts=facts, counters={"scheduler_stage_seconds.idle": 1.0})).decode()
    assert {name for name in ESSENTIAL.split() if f"sglang:{name}" not in text} == WITHOUT_MEANING


def test_the_page_says_why_some_of_sglang_s_metrics_do_not_exist() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "observability.md").read_text()
    assert all(f"`{name}`" in page for name in WITHOUT_MEANING)


async def test_requests_are_labelled_with_their_priority(tokenizer: Tokenizer) -> None:
    schedule = ScheduleConfig(enable_priority_scheduling=True)
    async with bench(tokenizer, schedule=schedule) as b:
        for priority in (1, 5, None):
            asked = body("null", 1, max_tokens=2) | ({} if priority is None else {"priority": priority})
            assert (await b.http.post("/v1/completions", json=asked)).status_code == 200
        samples = await scrape(b)
    for priority in ("", "1", "5"):
        for name in ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"):
            assert value(samples, f"sglang:{name}_count", priority=priority) == 1, name
        for name, number in (("num_requests_total", 1), ("generation_tokens_total", 2), ("prompt_tokens_total", 2)):
            assert value(samples, f"sglang:{name}", priority=priority) == number, name
    assert value(samples, "sglang:num_running_reqs", priority="") == 0


def test_gauges_of_queues_have_a_sample_by_priority() -> None:
    metrics = ServerMetrics("m", "decode", by_priority=True)
    queues = {"num_decode_prealloc_queue_reqs": 3}
    counts = {"num_running_reqs": {MIN_PRIORITY: 1, -7: 1}, "num_decode_prealloc_queue_reqs": {2: 3}}
    samples = read(metrics.render(state(queues=queues, by_priority=counts)).decode())
    name = "sglang:num_running_reqs"
    found = {dict(labels)["priority"]: number for (sample, labels), number in samples.items() if sample == name}
    assert found == {"": 2, "None": 1, "-7": 1}
    assert value(samples, "sglang:num_decode_prealloc_queue_reqs", priority="2") == 3
    samples = read(metrics.render(state(by_priority={"num_running_reqs": {0: 2}})).decode())
    assert (value(samples, name, priority="-7"), value(samples, name, priority="0")) == (0, 2)
    samples = read(metrics.render(state(by_priority={"num_running_reqs": dict.fromkeys(range(100), 1)})).decode())
    assert (value(samples, name, priority="61"), value(samples, name, priority="other")) == (1, 36 + 1)


def test_without_priority_scheduling_no_metric_has_the_label() -> None:
    assert "priority" not in ServerMetrics("m", "unified").render(state()).decode()
