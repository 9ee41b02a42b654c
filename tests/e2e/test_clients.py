"""What clients see through the router equals what an aggregated server gives: OpenAI's client, `/generate`, probes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import requests

from pdserve.cli.main import main as pdserve
from tests.e2e.harness import Pair, Server, assert_idle, running, running_pair, start_server
from tests.tiny import Family
from tests.waiting import wait_until

FLAGS = ("--served-model-name", "tiny", "--max-total-tokens", "8192", "--dtype", "float32")


@pytest.fixture(scope="module")
def pair(tiny_checkpoint: Callable[[Family], Path]) -> Iterator[Pair]:
    with running_pair(str(tiny_checkpoint("qwen3")), *FLAGS) as started:
        yield started


@pytest.fixture(scope="module")
def monolith(tiny_checkpoint: Callable[[Family], Path]) -> Iterator[Server]:
    server = start_server(str(tiny_checkpoint("qwen3")), "null", *FLAGS)
    with running(server):
        yield server


def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


def test_the_openai_client_streams_what_it_gets_whole(pair: Pair, monolith: Server) -> None:
    messages: Any = [{"role": "user", "content": "Tell me about pages of keys and values."}]
    texts = []
    for server in (pair.router, monolith):
        whole = client(server).chat.completions.create(model="tiny", messages=messages, max_tokens=24, temperature=0)
        stream = client(server).chat.completions.create(
            model="tiny",
            messages=messages,
            max_tokens=24,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        streamed, usage = "", None
        for chunk in stream:
            streamed += "".join(choice.delta.content or "" for choice in chunk.choices)
            usage = chunk.usage or usage
        assert usage is not None and whole.usage is not None
        cached = {"prompt_tokens_details": True}
        assert usage.model_dump(exclude=cached) == whole.usage.model_dump(exclude=cached)
        assert usage.prompt_tokens_details is not None, "the second time the prompt is cached"
        assert streamed == whole.choices[0].message.content
        texts.append(streamed)
    assert texts[0] == texts[1]
    assert_idle(pair.prefill, pair.decode)


def test_responses_are_the_same_whole_streamed_and_from_one_server(pair: Pair, monolith: Server) -> None:
    texts = []
    for server in (pair.router, monolith):
        asked: Any = {"model": "tiny", "input": "Tell me about pages.", "max_output_tokens": 12, "temperature": 0}
        whole = client(server).responses.create(**asked)
        with client(server).responses.stream(**asked) as stream:
            streamed = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert streamed == whole.output_text
        texts.append(streamed)
    assert texts[0] == texts[1] != ""
    assert_idle(pair.prefill, pair.decode)


def test_responses_go_on_in_the_background(pair: Pair, monolith: Server) -> None:
    asked: Any = {"model": "tiny", "input": "Tell me about pages.", "max_output_tokens": 12, "temperature": 0}
    for server in (pair.router, monolith):
        api = client(server)
        whole = api.responses.create(**asked)
        made = api.responses.create(**asked, background=True)
        assert made.status == "queued" and made.background is True

        def status(name: str, api: openai.OpenAI = api) -> str | None:
            return api.responses.retrieve(name).status

        wait_until(lambda made=made: status(made.id) not in ("queued", "in_progress"), "the response has ended")
        found = api.responses.retrieve(made.id)
        assert (found.status, found.output_text) == (whole.status, whole.output_text)
        stream = api.responses.create(**asked, background=True, stream=True)
        name = next(event.response.id for event in stream if event.type == "response.created")
        stream.close()
        again = list(api.responses.retrieve(name, stream=True, starting_after=1))
        assert (
            "".join(event.delta for event in again if event.type == "response.output_text.delta") == whole.output_text
        )
        assert [event.sequence_number for event in again] == list(range(2, len(again) + 2))
        endless = {**asked, "max_output_tokens": 3000, "extra_body": {"ignore_eos": True}}
        stream = api.responses.create(**endless, background=True, stream=True)
        name = next(event.response.id for event in stream if event.type == "response.in_progress")
        assert api.responses.cancel(name).status == "cancelled"
        assert list(stream)[-1].type == "response.incomplete"
        follow = api.responses.create(**{**asked, "input": "And then?"}, previous_response_id=made.id)
        assert follow.status in ("completed", "incomplete")
    assert_idle(pair.prefill, pair.decode, monolith)


def test_a_session_continues_through_the_pair_as_at_one_server(pair: Pair, monolith: Server) -> None:
    told: list[list[Any]] = []
    for server in (pair.router, monolith):
        session = requests.post(f"{server.url}/open_session", json={"capacity_of_str_len": 10_000}, timeout=60).json()
        outputs: list[Any] = []

        def ask(text: str, rid: str, *, stream: bool = False, server: Server = server, **more: Any) -> dict[str, Any]:
            fields = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
            body = {"text": text, "rid": rid, "sampling_params": fields, "stream": stream, **more}
            answer = requests.post(f"{server.url}/generate", json=body, timeout=60)
            assert answer.status_code == 200, answer.text
            events = [line for line in answer.text.splitlines() if line.startswith("data: {")]
            return dict(json.loads(events[-1].removeprefix("data: ")) if stream else answer.json())

        for turn, stream in enumerate((False, True, False)):
            params = {"id": session, **({"rid": str(turn - 1)} if turn else {})}
            found = ask(f"Turn {turn}: tell me about pages.", str(turn), stream=stream, session_params=params)
            assert found["meta_info"]["id"] == str(turn)
            outputs.append((found["output_ids"], found["meta_info"]["prompt_tokens"]))
        told.append(outputs)
        assert requests.post(f"{server.url}/close_session", json={"session_id": session}, timeout=60).status_code == 200
    assert told[0] == told[1] and told[0][0][1] < told[0][1][1] < told[0][2][1]
    assert_idle(pair.prefill, pair.decode, monolith)


def test_several_answers_and_prompts_at_once(pair: Pair) -> None:
    api = client(pair.router)
    chat = api.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hello"}], max_tokens=5, n=3, seed=11, temperature=1.0
    )
    assert [choice.index for choice in chat.choices] == [0, 1, 2]
    done = api.completions.create(model="tiny", prompt=["one", "two two"], max_tokens=5, n=2, temperature=0)
    assert [choice.index for choice in done.choices] == [0, 1, 2, 3]
    assert done.choices[0].text == done.choices[1].text
    assert_idle(pair.prefill, pair.decode)


def test_logprobs_of_the_pair_are_those_of_the_monolith(pair: Pair, monolith: Server) -> None:
    values = []
    for server in (pair.router, monolith):
        answer = client(server).completions.create(
            model="tiny", prompt="The quick brown fox", max_tokens=6, temperature=0, logprobs=3
        )
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None and logprobs.token_logprobs is not None and logprobs.top_logprobs is not None
        assert len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 6, "the first token's came with the KV"
        values.append(logprobs.token_logprobs)
    assert values[0] == pytest.approx(values[1], abs=1e-3)


def test_a_seed_gives_the_same_tokens_apart_and_together(pair: Pair, monolith: Server) -> None:
    body = {
        "text": "In the beginning",
        "sampling_params": {"max_new_tokens": 16, "temperature": 1.0, "sampling_seed": 5, "ignore_eos": True},
    }
    outputs = [
        requests.post(f"{server.url}/generate", json=body, timeout=60).json()["output_ids"]
        for server in (pair.router, pair.router, monolith)
    ]
    assert outputs[0] == outputs[1] == outputs[2]


def test_penalties_count_the_first_token(pair: Pair, monolith: Server) -> None:
    sampling = {"max_new_tokens": 24, "temperature": 0, "frequency_penalty": 1.5, "ignore_eos": True}
    body = {"text": "one one one one", "sampling_params": sampling}
    outputs = [
        requests.post(f"{server.url}/generate", json=body, timeout=60).json()["output_ids"]
        for server in (pair.router, monolith)
    ]
    assert outputs[0] == outputs[1]


def test_a_request_that_ends_with_its_first_token(pair: Pair) -> None:
    first = pair.generate(text="hello", sampling_params={"max_new_tokens": 1, "temperature": 0})
    token = first["output_ids"][0]
    assert first["meta_info"]["finish_reason"] == {"type": "length", "length": 1}
    stopped = pair.generate(
        text="hello", sampling_params={"max_new_tokens": 9, "temperature": 0, "stop_token_ids": [token]}
    )
    assert stopped["output_ids"] == [token]
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": token}
    assert_idle(pair.prefill, pair.decode)


def test_a_stop_string_ends_the_request_on_both_servers(pair: Pair) -> None:
    sampling = {"max_new_tokens": 200, "temperature": 0, "ignore_eos": True}
    text = pair.generate(text="hello", sampling_params=sampling)["text"]
    stop = text[10:13]
    answer = pair.generate(text="hello", sampling_params=sampling | {"stop": stop})
    assert answer["text"] == text[: text.index(stop)]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert answer["meta_info"]["timing"]["first_decode_step_s"] > 0, "known before the stop string ended the request"
    assert_idle(pair.prefill, pair.decode)


def test_the_parts_of_ttft_and_what_was_moved(pair: Pair) -> None:
    answer = pair.generate(input_ids=list(range(3, 103)), sampling_params={"max_new_tokens": 3, "ignore_eos": True})
    timing = answer["meta_info"]["timing"]
    assert timing["kv_pages"] == 7
    facts = pair.decode.state()["facts"]
    assert timing["kv_bytes"] >= 7 * 16 * facts["kv_token_bytes"]
    parts = [timing[part] for part in ("queue_s", "bootstrap_s", "prefill_s", "transfer_s", "first_decode_step_s")]
    assert all(part is not None and part >= 0 for part in parts), timing


def test_probes_and_load_of_the_workers(pair: Pair) -> None:
    for server in (pair.prefill, pair.decode):
        for path in ("/health", "/health_generate", "/get_model_info", "/model_info", "/server_info", "/v1/models"):
            answer = requests.get(server.url + path, timeout=60)
            assert answer.status_code == 200, (path, answer.text)
        load = requests.get(f"{server.url}/get_load", timeout=60).json()
        assert isinstance(load, list) and load[0]["num_tokens"] == 0
        assert requests.post(f"{server.url}/flush_cache", timeout=60).status_code == 200
    assert requests.get(f"{pair.router.url}/health", timeout=60).status_code == 200
    assert_idle(pair.prefill, pair.decode)


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions", "/generate"])
def test_the_benchmark_compares_pair_and_monolith(pair: Pair, monolith: Server, tmp_path: Path, endpoint: str) -> None:
    out, page = tmp_path / "out.json", tmp_path / "out.html"
    words = ["bench", "--base-url", pair.url, "--compare", monolith.url, "--endpoint", endpoint, "--ignore-eos"]
    words += ["--num-prompts", "4", "--random-input-len", "20", "--random-output-len", "5", "--vocab-size", "200"]
    assert pdserve([*words, "--max-concurrency", "2", "--output-json", str(out), "--output-html", str(page)]) == 0
    results = json.loads(out.read_text())["results"]
    assert [(one["completed"], one["failed"], one["total_output_tokens"]) for one in results] == [(4, 0, 20)] * 2
    assert results[0]["total_input_tokens"] == results[1]["total_input_tokens"] >= 80
    assert all(one["output_tokens_counted_by"] == ["usage"] for one in results)
    assert all(0 < one["mean_ttft_ms"] < one["mean_ttst_ms"] < one["mean_e2el_ms"] for one in results)
    assert "<svg" in page.read_text()
    assert_idle(pair.prefill, pair.decode)


def test_what_a_benchmark_cuts_leaves_nothing_behind(pair: Pair, tmp_path: Path) -> None:
    out, chart = tmp_path / "out.json", tmp_path / "out.svg"
    words = ["bench", "--base-url", pair.url, "--ignore-eos", "--vocab-size", "200", "--num-prompts", "500"]
    words += ["--random-input-len", "20", "--random-output-len", "100", "--max-concurrency", "4", "--duration", "1.5"]
    words += ["--background-concurrency", "0", "2", "--background-input-len", "200", "--output-json", str(out)]
    assert pdserve(words) == 0
    results = json.loads(out.read_text())["results"]
    assert all(0 < one["unfinished"] <= 4 and not one["failed"] for one in results)
    assert results[1]["background_failed"] == 0
    assert pdserve(["bench", "compare", str(out), "--metric", "output_throughput", "--output-svg", str(chart)]) == 0
    assert "beside 2 x 200-token prompts" in chart.read_text()
    assert_idle(pair.prefill, pair.decode)
