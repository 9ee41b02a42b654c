"""Health, facts, load, metrics, commands, and what is left of them without an engine."""

from __future__ import annotations

import asyncio

import pytest

from pdserve.protocol.messages import FinishReason
from pdserve.server.text.tokenizer import Tokenizer
from tests.unit.server.server_kit import bench
from tests.waiting import until

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]


async def test_health_follows_the_engine(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer, ready=False) as b:
        assert (await b.http.get("/health")).status_code == 503
        answer = await b.http.post("/v1/completions", json={"prompt": "x"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_starting")
        assert (await b.http.get("/server_info")).json()["status"] == "not_ready"
        assert (await b.http.get("/metrics")).status_code == 200
    async with bench(tokenizer) as b:
        assert (await b.http.get("/health")).status_code == 200
        b.die()
        assert (await b.http.get("/health")).status_code == 503
        answer = await b.http.post("/v1/completions", json={"prompt": "x"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")


async def test_the_probe_generates_one_token(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        assert (await b.http.get("/health_generate")).status_code == 200
        assert b.scheduler.requests[0].sampling.max_new_tokens == 1
        assert b.scheduler.requests[0].room is None
        b.scheduler.script = lambda request: FinishReason(type="abort", message="broken", status_code=400)
        assert (await b.http.get("/health_generate")).status_code == 503
        b.scheduler.script = lambda request: FinishReason(type="abort", message="aborted", status_code=499)
        assert (await b.http.get("/health_generate")).status_code == 503
    async with bench(tokenizer, "prefill") as b:
        assert (await b.http.get("/health_generate")).status_code == 200
        room = b.scheduler.requests[0].room
        assert room is not None
        assert room.host == "2.2.2.2"


async def test_facts(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer, "decode") as b:
        for path in ("/get_server_info", "/server_info"):
            info = (await b.http.get(path)).json()
            assert info["disaggregation_mode"] == "decode"
            assert (info["served_model_name"], info["model_path"]) == ("tiny", "/models/tiny")
            assert (info["tp_size"], info["dp_size"], info["model_type"]) == (1, 1, "llama")
            assert info["architectures"] == ["LlamaForCausalLM"]
            assert info["page_size"] == 64
            assert info["memory"]["pages_free"] == 60
            assert info["queues"]["num_prefill_bootstrap_queue_reqs"] == 2
            assert info["memory"]["pages_cached"] == 3
            assert info["audit"] == info["internal_states"][0]["audit"] == ["page 7 has no owner", "room 9 has two"]
        for path in ("/get_model_info", "/model_info"):
            assert (await b.http.get(path)).json()["is_generation"] is True
        load = (await b.http.get("/get_load")).json()
        assert load[0]["num_tokens"] == 42


async def test_info_names_the_endpoints_of_kv_events(tokenizer: Tokenizer) -> None:
    """`null` where they are off, and where the server has no prefix cache."""
    config = '{"publisher": "zmq", "endpoint": "tcp://*:7000", "topic": "t", "format": "array"}'
    async with bench(tokenizer, observe={"kv_events_config": config}) as b:
        events = (await b.http.get("/get_server_info")).json()["kv_events"]
    assert (events["publisher"], events["endpoint"], events["endpoint_port_base"]) == ("zmq", "tcp://*:7000", 7000)
    assert (events["endpoint_host"], events["replay_endpoint_port_base"]) == ("*", None)
    assert (events["topic"], events["format"], events["block_size"], events["dp_size"]) == ("t", "array", 64, 1)
    async with bench(tokenizer) as b:
        assert (await b.http.get("/get_server_info")).json()["kv_events"] is None
    async with bench(tokenizer, "decode", observe={"kv_events_config": config}) as b:
        assert (await b.http.get("/get_server_info")).json()["kv_events"] is None


async def test_info_names_the_endpoint_of_load_events(tokenizer: Tokenizer) -> None:
    observe = {"kv_events_config": '{"publisher": "zmq", "endpoint": "tcp://*:7000"}', "load_publish_endpoint": "auto"}
    async with bench(tokenizer, observe=observe) as b:
        info = (await b.http.get("/get_server_info")).json()
    assert (info["kv_events"]["load_endpoint_port_base"], info["kv_events"]["load_topic"]) == (7001, "load")
    assert info["load_events"]["endpoint"] == "tcp://*:7001"
    async with bench(tokenizer, "decode", observe={"load_publish_endpoint": "tcp://127.0.0.1:7000"}) as b:
        info = (await b.http.get("/get_server_info")).json()
    assert info["kv_events"] is None and info["load_events"]["load_endpoint_port_base"] == 7000
    async with bench(tokenizer) as b:
        assert (await b.http.get("/get_server_info")).json()["load_events"] is None


async def test_metrics_have_sglang_names_and_memory_gauges(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer, "prefill") as b:
        body = {"prompt": "x", "bootstrap_room": 1, "max_tokens": 3}
        await b.http.post("/v1/completions", json=body)
        text = (await b.http.get("/metrics")).text
        labels = '{engine_type="prefill",model_name="tiny"}'
        for line in (
            f"sglang:num_running_reqs{labels} 0.0",
            f"sglang:num_queue_reqs{labels} 1.0",
            f"sglang:num_used_tokens{labels} 42.0",
            f"sglang:num_prefill_bootstrap_queue_reqs{labels} 2.0",
            f"sglang:num_decode_transfer_queue_reqs{labels} 0.0",
            f"sglang:num_bootstrap_failed_reqs_total{labels} 0.0",
            f"sglang:num_transfer_failed_reqs_total{labels} 1.0",
            f"sglang:kv_transfer_bytes_total{labels} 5.0",
            f"pdserve:control_frames_refused_total{labels} 2.0",
            f"pdserve:pages_free{labels} 60.0",
            f"pdserve:rooms_live{labels} 1.0",
            f"pdserve:pages_cached{labels} 3.0",
            f"pdserve:audit_differences{labels} 2.0",
            f"sglang:num_retracted_requests_total{labels} 6.0",
            f"sglang:num_retracted_reqs{labels} 4.0",
            f"sglang:new_token_ratio{labels} 0.5",
            f"pdserve:offloaded_pages_total{labels} 7.0",
            f"sglang:num_requests_total{labels} 1.0",
            f"sglang:generation_tokens_total{labels} 3.0",
            f"pdserve:live_requests{labels} 0.0",
        ):
            assert _same_sample(line, text), line


def _same_sample(line: str, text: str) -> bool:
    """True when `text` has the sample of `line`, whatever the order of its labels."""
    wanted = _parts(line)
    return any(_parts(other) == wanted for other in text.splitlines() if not other.startswith("#"))


def _parts(line: str) -> tuple[str, frozenset[str], str]:
    name, _, rest = line.partition("{")
    labels, _, value = rest.partition("} ")
    return name, frozenset(labels.split(",")), value


async def test_a_silent_scheduler_leaves_the_last_state(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        assert await b.client.state(5.0) == b.scheduler.state()
        b.scheduler.silent_queries = True
        assert await b.client.state(0.01) == b.scheduler.state()
        assert (await b.http.get("/get_load")).json()[0]["num_tokens"] == 42


async def test_flush_is_400_when_busy(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        assert (await b.http.post("/flush_cache")).status_code == 200
        assert (await b.http.get("/flush_cache")).status_code == 200
        b.scheduler.busy = True
        refused = await b.http.post("/flush_cache")
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "busy")
        assert refused.json()["message"] == "requests are running"


async def test_flush_waits_for_idle_as_long_as_it_is_told_to(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        b.scheduler.busy = True
        call = asyncio.create_task(b.http.post("/flush_cache?timeout=20"))
        await until(lambda: b.scheduler.num_flushes >= 2)
        assert not call.done()
        b.scheduler.busy = False
        assert (await call).status_code == 200
        b.scheduler.busy = True
        assert (await b.http.post("/flush_cache?timeout=0.05")).status_code == 400


@pytest.mark.parametrize("timeout", ["-1", "nan", "inf", "soon", "", "1e9"])
async def test_flush_refuses_what_is_no_time(tokenizer: Tokenizer, timeout: str) -> None:
    async with bench(tokenizer) as b:
        answer = await b.http.post("/flush_cache", params={"timeout": timeout})
        assert (answer.status_code, answer.json()["param"]) == (400, "timeout")
        assert b.scheduler.num_flushes == 0


async def test_abort_all_and_a_missing_rid(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        assert (await b.http.post("/abort_request", json={})).json()["param"] == "rid"
        b.scheduler.hold = True
        calls = [asyncio.create_task(b.http.post("/generate", json={"text": "x"})) for _ in range(3)]
        await until(lambda: b.client.num_live == 3)
        assert (await b.http.post("/abort_request", json={"abort_all": True})).json() == {"num_aborted": 3}
        for answer in await asyncio.gather(*calls):
            assert answer.json()["meta_info"]["finish_reason"]["type"] == "abort"


BATCH = {"text": ["a", "b"], "sampling_params": {"n": 2}}


async def test_the_rid_of_a_batch_aborts_all_of_it_and_nothing_else(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        b.scheduler.hold = True
        asked = {"mine": BATCH, "mine_2": {"text": "x"}, "mine2": BATCH, "listed": {**BATCH, "rid": ["mine3", "min"]}}
        calls = {
            rid: asyncio.create_task(b.http.post("/generate", json={"rid": rid, **body})) for rid, body in asked.items()
        }
        await until(lambda: b.client.num_live == 13)

        async def abort(rid: str) -> int:
            answer = await b.http.post("/abort_request", json={"rid": rid})
            assert answer.status_code == 200
            num_aborted: int = answer.json()["num_aborted"]
            return num_aborted

        assert await abort("min") == 2, "one prompt of a list, with its two answers"
        assert await abort("mine_1") == 2
        assert await abort("mine_9") == await abort("mi") == 0
        await until(lambda: b.client.num_live == 9)
        again = await b.http.post("/generate", json={"text": "x", "rid": "mine"})
        assert (again.status_code, again.json()["param"]) == (400, "rid"), "else an abort would mean both"
        assert await abort("mine") == 2
        results = (await calls["mine"]).json()
        assert [one["meta_info"]["id"] for one in results] == ["mine_0", "mine_0", "mine_1", "mine_1"]
        assert {one["meta_info"]["finish_reason"]["type"] for one in results} == {"abort"}
        assert b.client.num_live == 7 and not any(calls[rid].done() for rid in ("mine_2", "mine2", "listed"))
        b.scheduler.hold = False
        assert (await b.http.post("/generate", json={"text": "x", "rid": "mine"})).status_code == 200
        assert await abort("mine2") == 4 and await abort("mine_2") == 1 and await abort("mine3") == 2
        assert {(await call).status_code for call in calls.values()} == {200}


async def test_the_rid_of_a_batch_of_completions(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        b.scheduler.hold = True
        call = asyncio.create_task(b.http.post("/v1/completions", json={"prompt": ["a", "b", "c"], "rid": "r"}))
        await until(lambda: b.client.num_live == 3)
        assert (await b.http.post("/abort_request", json={"rid": "r"})).json() == {"num_aborted": 3}
        assert [choice["finish_reason"] for choice in (await call).json()["choices"]] == ["abort"] * 3


async def test_death_of_the_engine_fails_all_that_wait(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        b.scheduler.hold = True
        b.scheduler.script = lambda request: []
        calls = [
            asyncio.create_task(b.http.post("/v1/completions", json={"prompt": "x", "stream": stream}))
            for stream in (False, True)
        ]
        await until(lambda: b.client.num_live == 2)
        b.die()
        assert [answer.status_code for answer in await asyncio.gather(*calls)] == [503, 503]
