"""What `pdserve bench` measures of one request: exact times by a stepped clock, tokens, and kinds of errors."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from pdserve.bench import client as client_module
from pdserve.bench.client import BenchClient, BenchRecord, BenchTarget, EventReader, backend_of
from pdserve.bench.load import arrival_times, run_load, single
from pdserve.bench.metrics import Slo, detailed, percentile, summarize
from pdserve.errors import ConfigError
from tests.unit.bench.kit import FakeService, SteppedClock, event, piece, plain, serving, usage


async def ask(service: FakeService, clock: SteppedClock | None = None, **target: Any) -> BenchRecord:
    async with serving(service):
        asked = BenchTarget(base_url=service.url + "/v1", model="tiny", **target)
        async with BenchClient(asked, *([] if clock is None else [clock])) as client:
            return await client.send("hello" if asked.backend == "openai-chat" else [11, 12, 13], 4)


async def test_the_times_are_those_of_the_events() -> None:
    clock = SteppedClock()
    writes = [
        (0.2, piece(" a")),
        (0.05, piece(" b")),
        (0.01, piece("")),
        (0.03, piece(" c") + piece(" d")),
        (0.0, usage(3, 5, 2)),
    ]
    record = await ask(FakeService(lambda body, path: writes, clock), clock)
    assert record.error_kind is None and record.text == " a b c d"
    assert record.arrivals_s == pytest.approx([0.2, 0.25, 0.29, 0.29])
    assert record.ttft_s == pytest.approx(0.2) and record.ttst_s == pytest.approx(0.25)
    assert record.itls_s == pytest.approx([0.05, 0.04, 0.0])
    assert record.end_s == pytest.approx(0.29)
    assert record.tpot_s == pytest.approx((0.29 - 0.2) / 4), "by the tokens of the usage, which counts one without text"
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (3, 5, 2)
    assert record.counted_by == "usage"


async def test_chat_counts_content_reasoning_and_tool_calls_but_not_the_role() -> None:
    deltas = [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "hm"},
        {"content": "a"},
        {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": "{}"}}]},
        {},
    ]
    clock = SteppedClock()
    writes = [(0.1, event({"choices": [{"delta": delta}]})) for delta in deltas]
    record = await ask(
        FakeService(lambda body, path: [*writes, (0.1, event(None))], clock), clock, backend="openai-chat"
    )
    assert record.arrivals_s == pytest.approx([0.2, 0.3, 0.4]) and record.end_s == pytest.approx(0.5)
    assert (record.output_tokens, record.counted_by) == (3, "events"), "the service sends no usage"


async def test_generate_has_its_whole_text_in_each_event() -> None:
    clock = SteppedClock()
    metas = [{"prompt_tokens": 3, "completion_tokens": count, "cached_tokens": 1} for count in (1, 2, 3)]
    writes = [(0.1, event({"text": "ab"[:index], "meta_info": meta})) for index, meta in enumerate(metas)]
    service = FakeService(lambda body, path: [*writes, (0.0, event(None))], clock)
    record = await ask(service, clock, backend="sglang", ignore_eos=True, sampling={"temperature": 0.0})
    assert record.arrivals_s == pytest.approx([0.1, 0.2, 0.3]), "the first token has no text yet"
    assert (record.text, record.output_tokens, record.prompt_tokens, record.cached_tokens) == ("ab", 3, 3, 1)
    assert service.bodies == [
        {
            "input_ids": [11, 12, 13],
            "sampling_params": {"temperature": 0.0, "max_new_tokens": 4, "ignore_eos": True},
            "stream": True,
        }
    ]


@pytest.mark.parametrize(
    ("answer", "kind", "told"),
    [
        (web.json_response({"error": {"message": "busy"}}, status=503), "http_503", "busy"),
        ([(0.0, piece("a") + event({"error": {"message": "decode died"}}))], "error_event", "decode died"),
        ([(0.0, piece("a"))], "truncated", "without [DONE]"),
        ([(0.0, b"data: {nonsense\n\n")], "invalid_answer", "JSONDecodeError"),
        ([(0.0, event(None))], "invalid_answer", "no event with a choice"),
        ([(0.0, event({"meta_info": {"finish_reason": {"type": "abort", "message": "out of memory"}}}) + event(None))],
         "error_event", "out of memory"),
    ],
)  # fmt: skip
async def test_errors_have_kinds(answer: Any, kind: str, told: str) -> None:
    record = await ask(FakeService(lambda body, path: answer))
    assert record.error_kind == kind and told in record.error


async def test_a_failed_request_is_in_flight_until_it_fails() -> None:
    clock = SteppedClock()
    writes = [(0.1, piece("a")), (0.3, event({"error": {"message": "decode died"}}))]
    record = await ask(FakeService(lambda body, path: writes, clock), clock)
    assert record.error_kind == "error_event" and record.end_s == pytest.approx(0.4)
    beside = BenchRecord(start_s=record.start_s + 0.3, end_s=0.2, error_kind="timeout")
    assert summarize([record, beside], 1.0)["max_concurrent_requests"] == 2


async def test_tokens_without_text_have_the_times_of_their_events() -> None:
    clock = SteppedClock()
    writes = [(0.1, piece("")), (0.2, piece("")), (0.4, piece("")), (0.0, usage(3, 4))]
    record = await ask(FakeService(lambda body, path: writes, clock), clock)
    assert record.error_kind is None and record.output_tokens == 4
    assert record.ttft_s == pytest.approx(0.1) and record.itls_s == pytest.approx([0.2, 0.4])
    assert record.tpot_s == pytest.approx((0.7 - 0.1) / 3), "as vllm bench serve counts them"


async def test_usage_without_a_number_of_tokens_leaves_the_events() -> None:
    writes = [(0.0, piece("a") + piece("b") + event({"choices": [], "usage": {"prompt_tokens": 7}}) + event(None))]
    record = await ask(FakeService(lambda body, path: writes))
    assert (record.prompt_tokens, record.output_tokens, record.counted_by) == (7, 2, "events")


async def test_the_end_may_lack_its_newlines() -> None:
    record = await ask(FakeService(lambda body, path: [(0.0, piece("a") + b"data: [DONE]")]))
    assert record.error_kind is None and record.text == "a"


async def test_requests_share_a_connection() -> None:
    """The end of the answer comes in a packet of its own, after the client has read `[DONE]`."""
    connections = set()

    class Counting(FakeService):
        async def handle(self, request: web.Request) -> web.StreamResponse:
            connections.add(request.transport)
            return await super().handle(request)

    clock = SteppedClock()
    async with serving(Counting(lambda body, path: [(0.1, piece("a") + event(None))], clock)) as service:
        async with BenchClient(BenchTarget(base_url=service.url), clock) as client:
            records = [await client.send([11], 1) for _ in range(3)]
    assert [record.error_kind for record in records] == [None] * 3 and len(connections) == 1


async def test_an_answer_whose_connection_does_not_end_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "DRAIN_S", 0.01)
    over = asyncio.Event()

    class Open(FakeService):
        async def handle(self, request: web.Request) -> web.StreamResponse:
            response = await super().handle(request)
            await over.wait()
            return response

    async with serving(Open(lambda body, path: [(0.0, piece("a") + event(None))])) as service:
        async with BenchClient(BenchTarget(base_url=service.url)) as client:
            record = await client.send([11], 1)
        over.set()
    assert record.whole and record.text == "a"


async def test_a_prompt_that_json_cannot_have_is_told() -> None:
    async with BenchClient(BenchTarget(base_url="http://a")) as client:
        with pytest.raises(ConfigError, match="cannot be sent as JSON") as raised:
            await client.send("\ud800", 1)
    assert raised.value.field == "prompt"


async def test_a_service_that_is_gone_is_an_error_of_the_request() -> None:
    async with serving(FakeService(plain)) as service:
        url = service.url
    async with BenchClient(BenchTarget(base_url=url)) as client:
        record = await client.send([11], 1)
        with pytest.raises(ConfigError, match="nothing answers at"):
            await client.first_model()
    assert record.error_kind == "connection"


async def test_a_list_of_models_has_a_limit() -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        with contextlib.suppress(OSError):
            while True:
                await response.write(b"[" * (1 << 20))
        return response

    app = web.Application()
    app.router.add_get("/v1/models", endless)
    async with TestServer(app) as server, BenchClient(BenchTarget(base_url=str(server.make_url("")))) as client:
        with pytest.raises(ConfigError, match="lists no model"):
            await client.first_model()


def test_bodies_follow_the_backend() -> None:
    chat = BenchTarget(base_url="http://a", backend="openai-chat", model="m", extra_body={"x": 1}, ignore_eos=True)
    assert chat.url == "http://a/v1/chat/completions"
    body = chat.body("hello", 3)
    assert (body["messages"], body["max_completion_tokens"], body["x"]) == (
        [{"role": "user", "content": "hello"}],
        3,
        1,
    )
    assert body["stream_options"] == {"include_usage": True} and body["ignore_eos"] is True
    with pytest.raises(ConfigError, match="chat takes text") as raised:
        chat.body([1, 2], 3)
    assert raised.value.field == "prompt"
    with pytest.raises(ConfigError, match="needs --backend openai-chat"):
        BenchTarget(base_url="http://a").body([{"role": "user", "content": "x"}], 3)
    assert [backend_of(path) for path in ("", "/v1/chat/completions", "/generate")] == [
        "openai",
        "openai-chat",
        "sglang",
    ]


def test_an_event_in_pieces_is_one_event() -> None:
    reader = EventReader(record := BenchRecord())
    for index, byte in enumerate(piece(" a") + usage(1, 1)):
        reader.feed(bytes([byte]), index / 1000)
    reader.finish()
    assert record.error_kind is None and len(record.arrivals_s) == 1 and record.output_tokens == 1


async def test_a_run_has_exact_figures() -> None:
    """Two requests, one after the other: 0.1 s to the first token, 0.2 s between tokens; the second is refused."""
    clock = SteppedClock()
    answers: list[Any] = [
        [(0.1, piece(" a")), (0.2, piece(" b")), (0.2, piece(" c")), (0.0, usage(10, 3))],
        [(0.3, piece(" a")), (0.4, piece(" b")), (0.0, usage(20, 2))],
        web.Response(status=429, text="too many"),
    ]
    service = FakeService(lambda body, path: answers[len(service.bodies) - 1], clock)
    async with serving(service):
        async with BenchClient(BenchTarget(base_url=service.url, model="tiny"), clock) as client:
            outcome = await run_load(
                client,
                single([[1], [2], [3]], 3),
                arrivals_s=[0, 0, 0],
                max_concurrency=1,
                clock=clock,
                sleep=clock.sleep,
            )
    found = summarize(outcome.records, outcome.duration_s, slo=Slo.parse(["ttft:200", "tpot:250"]))
    assert found["duration"] == pytest.approx(1.2)
    assert (found["completed"], found["failed"], found["error_kinds"]) == (2, 1, {"http_429": 1})
    assert found["error_messages"] == ["http_429: too many"]
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (30, 5)
    assert found["request_throughput"] == pytest.approx(2 / 1.2)
    assert found["output_throughput"] == pytest.approx(5 / 1.2)
    assert found["total_token_throughput"] == pytest.approx(35 / 1.2)
    assert found["request_goodput"] == pytest.approx(1 / 1.2) and found["goodput_share"] == pytest.approx(1 / 3)
    expected = {"ttft": (100, 300), "ttst": (300, 700), "tpot": (200, 400), "e2el": (500, 700)}
    for name, (low, high) in expected.items():
        assert found[f"mean_{name}_ms"] == pytest.approx((low + high) / 2)
        assert found[f"median_{name}_ms"] == found[f"p50_{name}_ms"] == pytest.approx((low + high) / 2)
        assert found[f"p90_{name}_ms"] == pytest.approx(low + 0.9 * (high - low))
        assert found[f"p99_{name}_ms"] == pytest.approx(low + 0.99 * (high - low))
        assert found[f"std_{name}_ms"] == pytest.approx((high - low) / 2)
    assert found["median_itl_ms"] == pytest.approx(200) and found["max_concurrent_requests"] == 1
    values = detailed(outcome.records)
    assert values["start_times"] == pytest.approx([0, 0.5, 1.2]) and values["errors"][2] == "http_429: too many"


def test_percentiles_interpolate() -> None:
    assert percentile([4, 1, 3, 2], 50) == 2.5
    assert percentile([1, 2, 3, 4, 5], 90) == pytest.approx(4.6)
    assert percentile([7], 99) == 7


def test_nothing_measured_is_none() -> None:
    found = summarize([], 1.0, slo=Slo.parse(["ttft:1"]))
    assert found["mean_ttft_ms"] is None and found["goodput_share"] == 0.0


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 4.0])
def test_arrivals_keep_the_rate(burstiness: float) -> None:
    times = arrival_times(200, 4.0, burstiness, seed=3)
    assert times == sorted(times) and times[-1] == pytest.approx(50)
    assert times == arrival_times(200, 4.0, burstiness, seed=3) != arrival_times(200, 4.0, burstiness, seed=4)


def test_bursty_arrivals_have_more_varied_gaps() -> None:
    def spread(burstiness: float) -> float:
        times = arrival_times(2000, 1.0, burstiness, seed=1)
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        return sum((gap - 1) ** 2 for gap in gaps) / len(gaps)

    assert spread(0.5) == pytest.approx(2.0, rel=0.2) and spread(1) == pytest.approx(1, rel=0.2)
    assert spread(4) == pytest.approx(0.25, rel=0.2)
    assert arrival_times(3, float("inf"), 1.0, 0) == [0, 0, 0]


@pytest.mark.parametrize("word", ["ttft", "ttft:", "ttft:x", "itl:5", "ttft:0", "ttft:1.2.3"])
def test_a_wrong_limit_is_named(word: str) -> None:
    with pytest.raises(ConfigError, match=f"--goodput {word}") as raised:
        Slo.parse([word])
    assert raised.value.field == "goodput"
