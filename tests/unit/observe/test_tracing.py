"""Spans of servers and router, as a collector sees them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import aiohttp
import pytest
from aiohttp import web

from pdserve.config.groups import DisaggMode
from pdserve.errors import ConfigError
from pdserve.observe.tracing import open_tracing, traces_url
from pdserve.protocol.messages import FinishReason, RequestTiming
from pdserve.router.app import make_app
from pdserve.router.config.config import RouterConfig, WorkerRole, WorkerSpec
from pdserve.server.text.tokenizer import Tokenizer
from tests.unit.observe.collector import Collector, assert_one_connected_trace
from tests.unit.observe.test_server_metrics import body
from tests.unit.server.server_kit import bench

pytestmark = pytest.mark.timeout(60)

TRACE, CLIENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADERS = {"traceparent": f"00-{TRACE}-{CLIENT}-01"}
TIMING = RequestTiming(
    bootstrap_s=0.001, queue_s=0.002, prefill_s=0.004, transfer_s=0.001, kv_bytes=4096, chunks=[(0.002, 4), (0.004, 11)]
)
STAGES: dict[DisaggMode, set[str]] = {
    "null": {"request", "intake", "queue", "compute", "chunk", "generate"},
    "prefill": {"request", "intake", "bootstrap", "queue", "compute", "chunk", "transfer"},
    "decode": {"request", "intake", "bootstrap", "transfer", "generate"},
}
KINDS: dict[DisaggMode, str] = {"null": "unified", "prefill": "prefill", "decode": "decode"}


@pytest.fixture
def collector() -> Iterator[Collector]:
    found = Collector()
    yield found
    found.close()


def traced(collector: Collector) -> dict[str, object]:
    return {"enable_trace": True, "otlp_traces_endpoint": collector.endpoint}


@pytest.mark.parametrize("mode", ["null", "prefill", "decode"])
async def test_a_server_s_stages_are_children_of_its_span_in_the_client_s_trace(
    tokenizer: Tokenizer, collector: Collector, mode: DisaggMode
) -> None:
    async with bench(tokenizer, mode, observe=traced(collector)) as b:
        b.scheduler.timing = TIMING
        answer = await b.http.post("/v1/completions", json=body(mode, 7), headers=HEADERS)
        assert answer.status_code == 200
        assert b.scheduler.requests[0].traced
        wanted = {f"{KINDS[mode]}.{stage}" for stage in STAGES[mode]}
        spans = await asyncio.to_thread(collector.wait, lambda seen: wanted <= {span.name for span in seen})
        assert_one_connected_trace(spans, TRACE, CLIENT)
        assert {span.name for span in spans} == wanted
        request = next(span for span in spans if span.name.endswith(".request"))
        assert request.parent == CLIENT and request.service == f"pdserve-{KINDS[mode]}"
        assert request.attributes["http.response.status_code"] == 200
        chunks = sorted((span for span in spans if span.name.endswith(".chunk")), key=lambda span: span.start)
        assert [span.attributes["pdserve.tokens_computed"] for span in chunks] == ([] if mode == "decode" else [4, 11])


async def test_a_request_that_fails_has_a_span_that_says_so(tokenizer: Tokenizer, collector: Collector) -> None:
    async with bench(tokenizer, observe=traced(collector)) as b:
        b.scheduler.script = lambda request: FinishReason(
            type="abort", message="gone", status_code=502, err_type="peer_gone"
        )
        answer = await b.http.post("/generate", json={"text": "hi"}, headers=HEADERS)
        assert answer.status_code == 502
        wanted = {"unified.request", "unified.intake", "unified.failed"}
        spans = await asyncio.to_thread(collector.wait, lambda seen: wanted <= {span.name for span in seen})
        failed = next(span for span in spans if span.name == "unified.failed")
        assert failed.attributes["error.type"] == "peer_gone"


async def test_what_the_client_does_not_sample_is_not_recorded(tokenizer: Tokenizer, collector: Collector) -> None:
    async with bench(tokenizer, observe=traced(collector)) as b:
        quiet = {"traceparent": f"00-{TRACE}-{CLIENT}-00"}
        assert (await b.http.post("/generate", json={"text": "hi"}, headers=quiet)).status_code == 200
        assert not b.scheduler.requests[0].traced
        assert (await b.http.post("/generate", json={"text": "hi"}, headers=HEADERS)).status_code == 200
        named = "unified.request"
        spans = await asyncio.to_thread(collector.wait, lambda seen: named in {span.name for span in seen})
        assert len([span for span in spans if span.name == named]) == 1


async def test_without_the_flag_nothing_is_traced(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        assert (await b.http.post("/generate", json={"text": "hi"}, headers=HEADERS)).status_code == 200
        assert not b.scheduler.requests[0].traced


async def test_the_router_s_span_is_between_the_client_and_both_servers(collector: Collector) -> None:
    seen: dict[str, str] = {}

    def worker(name: str) -> web.Application:
        async def answer(request: web.Request) -> web.Response:
            if request.method == "POST":
                seen[name] = request.headers["traceparent"]
            return web.json_response({"disaggregation_bootstrap_port": 7000})

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        return app

    runners = [web.AppRunner(worker(name)) for name in ("prefill", "decode")]
    urls = []
    for runner in runners:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        urls.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
    specs = (
        WorkerSpec(role=WorkerRole.PREFILL, url=urls[0], bootstrap_port=7000),
        WorkerSpec(role=WorkerRole.DECODE, url=urls[1]),
    )
    router = web.AppRunner(make_app(RouterConfig(pd=True, workers=specs, otlp_traces_endpoint=collector.endpoint)))
    await router.setup()
    await web.TCPSite(router, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{router.addresses[0][1]}"
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{url}/generate", json={"text": "hi"}, headers=HEADERS) as answer:
            assert answer.status == 200
    names = {"router.request", "router.prefill", "router.decode"}
    spans = await asyncio.to_thread(collector.wait, lambda spans: names <= {span.name for span in spans})
    assert_one_connected_trace(spans, TRACE, CLIENT)
    by_name = {span.name: span for span in spans}
    for name in ("prefill", "decode"):
        assert seen[name] == f"00-{TRACE}-{by_name[f'router.{name}'].span}-01"
        assert by_name[f"router.{name}"].parent == by_name["router.request"].span
    for runner in (router, *runners):
        await runner.cleanup()


def test_where_spans_go() -> None:
    assert traces_url("localhost:4318") == "http://localhost:4318/v1/traces"
    assert traces_url("https://otel.example") == "https://otel.example/v1/traces"
    assert traces_url("http://otel.example/custom") == "http://otel.example/custom"


def test_without_the_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"pdserve\[otel\]"):
        open_tracing("prefill", "m", "localhost:4318")
