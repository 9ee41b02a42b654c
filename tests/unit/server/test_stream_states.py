"""A stream that broke off at any event goes on at another server: together they are the stream that did not break."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import pytest

from pdserve.base.stream_state import MARK, RESUME_FIELD, STATE_HEADER, split_event
from pdserve.protocol.cached_tokens import CachedTokensDetails
from pdserve.protocol.failure import Failure
from pdserve.router.proxy.stream_retry import MIGRATED, Moved, StreamProgress, stream_form
from pdserve.router.workers.outcome import WORKER_FAILED
from pdserve.server.engine_client import client as engine_client
from pdserve.server.generation import Generation, GenerationUpdate
from pdserve.server.sglang_api.migrate import MigratedError
from pdserve.server.text.tokenizer import Tokenizer
from tests.unit.server.chat_kit import ASK, HERMES, NOW, WEATHER, long_context
from tests.unit.server.server_kit import VOCAB, Bench, bench, token_ids

TEXT = "Größe: 10 🙂 and ENd END of it"
ANSWER = f"<think>\nhm 🙂\n</think>\n{HERMES}"
PARSERS: dict[str, Any] = {"reasoning_parser": "qwen3", "tool_call_parser": "hermes", "enable_ollama_api": True}
SOURCES = {"return_cached_tokens_details": True}
CALLS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "completions": ("/v1/completions", TEXT, {"prompt": "a", "stop": "END", "max_tokens": 90} | SOURCES),
    "offsets": ("/v1/completions", TEXT, {"prompt": "a", "logprobs": 2, "echo": True, "max_tokens": 20}),
    "regex": ("/v1/completions", TEXT, {"prompt": ["a"], "stop_regex": "EN[A-Z]+ of", "max_tokens": 90}),
    "generate": ("/generate", TEXT, {"text": "a", "sampling_params": {"stop": ["D of"], "max_new_tokens": 90}}),
    "logprobs": (
        "/generate",
        TEXT,
        {"text": "a", "return_logprob": True, "top_logprobs_num": 1, "sampling_params": {"max_new_tokens": 15}},
    ),
    "tools": (
        "/v1/chat/completions",
        ANSWER,
        {
            "messages": ASK,
            "tools": [WEATHER, NOW],
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
    ),
    "messages": (
        "/v1/messages",
        ANSWER,
        {
            "messages": ASK,
            "max_tokens": 400,
            "tools": [{"name": name, "input_schema": {"type": "object"}} for name in ("get_weather", "now")],
        },
    ),
    "ollama": ("/api/generate", TEXT, {"prompt": "a", "options": {"stop": "END", "num_predict": 90}}),
    "ollama tools": (
        "/api/chat",
        ANSWER,
        {"messages": ASK, "tools": [WEATHER, NOW], "options": {"num_predict": 400}},
    ),
    "late thoughts": ("/v1/chat/completions", ANSWER, {"messages": ASK, "stream_reasoning": False, "logprobs": True}),
}
VOLATILE = (
    "id", "e2e_latency", "timing", "created_at", "total_duration", "prompt_eval_duration", "eval_duration",
)  # fmt: skip
"""They differ between two runs of a request; times are of the server that ends a stream."""

__all__ = ["long_context"]
_numbers = itertools.count(1000)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", CALLS)
def test_a_stream_goes_on_where_it_broke_off(
    name: str, size: int, tokenizer: Tokenizer, long_context: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, text, body = CALLS[name]
    monkeypatch.setattr(engine_client, "Generation", Unmerged)

    async def scenario() -> None:
        async with bench(tokenizer, **PARSERS) as b:
            b.scheduler.script = lambda request: token_ids(tokenizer, text)
            b.scheduler.tokens_per_output = size
            details = CachedTokensDetails(device=1, host=2)
            b.scheduler.cached_details = lambda request: None if request.prior_output_ids else details
            whole = await told(b, path, body)
            plain = parsed(path, await b.http.post(path, json={**body, "stream": True}))
            assert client_view(path, shown(whole)) == client_view(path, plain), "told or not"
            b.scheduler.cached = lambda request: 99 if request.prior_output_ids else 3
            cuts = range(1, len(whole), max(2, len(whole) // 12))
            for cut in cuts:
                await go_on(b, path, body, whole, cut)

    asyncio.run(scenario())


@pytest.mark.parametrize("name", CALLS)
def test_a_moved_stream_tells_of_tokens_whose_text_is_held_back(
    name: str, tokenizer: Tokenizer, long_context: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So its reader goes on where the request does, and nothing is computed again."""
    path, text, body = CALLS[name]
    monkeypatch.setattr(engine_client, "Generation", Unmerged)
    ids = token_ids(tokenizer, text)
    most = 14 if text == TEXT else len(ids)  # before a stop string, and all limits of tokens

    async def no_other(resumed: dict[str, Any], error: Exception) -> None:
        raise AssertionError("the stream is computed again")

    async def scenario(b: Bench, cut: int) -> None:
        attached: list[dict[str, Any]] = []

        async def attach(resumed: dict[str, Any], moved: Moved) -> None:
            attached.append(resumed)

        b.scheduler.script = lambda request: ids[:cut]
        Unmerged.num_tokens = 0
        asking = asyncio.create_task(told(b, path, body))
        async with asyncio.timeout(10):
            while Unmerged.num_tokens < cut:
                await asyncio.sleep(0)
        b.client.hand_over(b.scheduler.requests[-1].rid, MigratedError("http://d", "m1", cut))
        form = stream_form(path)
        stream = StreamProgress(body, 1, no_other, attach, form)
        for event in await asking:
            stream.feed(event + form.end)
        assert stream.failure is not None and stream.failure.code == MIGRATED
        with pytest.raises(AssertionError, match="computed again"):
            await stream.go_on(stream.failure)  # the other worker does not answer
        assert [it[RESUME_FIELD]["token_ids"] for it in attached] == [ids[:cut]], cut

    async def scenarios() -> None:
        async with bench(tokenizer, **PARSERS) as b:
            b.scheduler.hold = True
            for cut in range(most // 3, most, max(1, most // 12)):
                await scenario(b, cut)

    asyncio.run(scenarios())


@pytest.mark.parametrize("name", CALLS)
def test_a_prefill_server_answers_its_part_of_a_resumed_stream(
    name: str, tokenizer: Tokenizer, long_context: None
) -> None:
    path, text, body = CALLS[name]

    async def scenario() -> None:
        async with bench(tokenizer, "prefill", **PARSERS) as b:
            prior = token_ids(tokenizer, text)[:5]
            b.scheduler.script = lambda request: token_ids(tokenizer, text)[:6]
            room = {"bootstrap_host": "h", "bootstrap_port": 1, "bootstrap_room": 7, "stream": True}
            resume: dict[str, Any] = {"head": {"id": "a"}, "token_ids": prior}
            if path == "/generate" and body.get("return_logprob"):
                resume["logprobs"] = [{"logprob": -0.5}] * len(prior)
            answer = await b.http.post(path, json={**body, **room, RESUME_FIELD: resume})
            assert answer.status_code == 200, answer.text
            assert b.scheduler.requests[-1].prior_output_ids == prior

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("path", "body", "resume"),
    [
        ("/v1/completions", {"prompt": "a"}, {"token_ids": [1]}),  # no head
        ("/v1/completions", {"prompt": "a"}, {"head": {"id": 1}, "token_ids": [1]}),
        ("/v1/completions", {"prompt": "a"}, {"head": {"id": "x" * 2000}, "token_ids": [1]}),
        ("/v1/completions", {"prompt": "a"}, {"head": {"id": "a"}, "token_ids": [VOCAB]}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 3}, {"head": {"id": "a"}, "token_ids": [73] * 3}),
        ("/v1/completions", {"prompt": "a", "n": 2}, {"head": {"id": "a"}, "token_ids": [73]}),
        ("/v1/completions", {"prompt": "a", "stream": False}, {"head": {"id": "a"}, "token_ids": [73]}),
        ("/v1/completions", {"prompt": "a", "stop": "j"}, {"head": {"id": "a"}, "token_ids": [75, 76]}),
        ("/generate", {"text": ["a"]}, {"head": {"id": "a"}, "token_ids": [73]}),
        ("/generate", {"text": "a", "return_logprob": True}, {"head": {"id": "a"}, "token_ids": [73]}),
    ],
)
def test_what_cannot_be_gone_on_with_is_refused(
    path: str, body: dict[str, Any], resume: dict[str, Any], tokenizer: Tokenizer
) -> None:
    async def scenario() -> None:
        async with bench(tokenizer) as b:
            answer = await b.http.post(path, json={"stream": True, **body, RESUME_FIELD: resume})
            assert answer.status_code == 400, answer.text
            assert answer.json()["param"].startswith(RESUME_FIELD), answer.text
            assert not b.scheduler.requests

    asyncio.run(scenario())


@pytest.mark.parametrize("mode", ["decode", "prefill"])
def test_tokens_of_other_weights_are_not_gone_on_with(mode: Any, tokenizer: Tokenizer) -> None:
    """Either half says so, in an error that may be tried again."""

    async def scenario() -> None:
        async with bench(tokenizer, mode) as b:
            room = {"bootstrap_host": "h", "bootstrap_port": 1, "bootstrap_room": 7}
            resume = {"head": {"id": "a"}, "token_ids": [73], "weights": "other@f"}
            body = {"prompt": "a", "stream": True, **room, RESUME_FIELD: resume}
            answer = await b.http.post("/v1/completions", json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "weights_mismatch"), answer.text
            assert answer.headers["Retry-After"] == "1" and not b.scheduler.requests

    asyncio.run(scenario())


class Unmerged(Generation):
    """An event for each output, however fast they come."""

    num_tokens = 0
    """Tokens of all updates so far."""

    def put(self, update: GenerationUpdate) -> None:
        """See `Generation`."""
        self._unfinished -= update.finish is not None
        Unmerged.num_tokens += len(update.token_ids)
        self._pending[next(_numbers)] = update
        self._news.set()


async def go_on(b: Bench, path: str, body: dict[str, Any], whole: list[bytes], cut: int) -> None:
    """Break the stream behind its first `cut` events."""
    bodies: list[dict[str, Any]] = []

    async def again(resumed: dict[str, Any], error: Exception) -> None:
        bodies.append(resumed)

    form = stream_form(path)
    stream = StreamProgress(body, 1, again, form=form)
    passed = [stream.feed(event + form.end) for event in whole[:cut]]
    if stream.ending is not None:
        passed.append(stream.ending)
    else:
        assert await stream.go_on(Failure(code=WORKER_FAILED, message="gone")) is None
        passed += [event + form.end for event in map(client_part, await told(b, path, bodies[0]))]
        (resumed,) = bodies
        resume = resumed.get(RESUME_FIELD, {"token_ids": []})
        assert RESUME_FIELD in resumed or not any(passed[:cut])
        assert b.scheduler.requests[-1].prior_output_ids == resume["token_ids"]
    together = events_of(path, b"".join(passed))
    assert form.is_last(together[-1]) and together.count(together[-1]) == 1
    expected, found = client_view(path, shown(whole)), client_view(path, shown(together))
    assert found == expected, f"cut behind {cut} of {len(whole)} events"


async def told(b: Bench, path: str, body: dict[str, Any]) -> list[bytes]:
    """A stream's events with what is told of them."""
    answer = await b.http.post(path, json={**body, "stream": True}, headers={STATE_HEADER: "1"})
    assert answer.status_code == 200, answer.text
    events = events_of(path, answer.content)
    assert all(event.startswith(MARK) for event in events[:-1] if b'"migrated"' not in event)
    return events


def events_of(path: str, content: bytes) -> list[bytes]:
    """The events of a stream, each with its line of state, if there is one."""
    end = stream_form(path).end
    events: list[bytes] = []
    for part in filter(None, content.split(end)):
        if events and b"\n" not in events[-1] and events[-1].startswith(MARK):
            events[-1] += end + part
        else:
            events.append(part)
    return events


def client_part(event: bytes) -> bytes:
    return split_event(event)[1]


def shown(events: list[bytes]) -> list[Any]:
    parts = [part if part[:1] == b"{" else part.partition(b"data: ")[2] for part in map(client_part, events)]
    return [steady(json.loads(part)) for part in parts if part != b"[DONE]"]


def parsed(path: str, answer: Any) -> list[Any]:
    return shown(events_of(path, answer.content))


def message_view(events: list[dict[str, Any]]) -> Any:
    """What a client makes of a stream of Anthropic's API."""
    blocks: list[dict[str, Any]] = []
    others = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append({"type": event["content_block"]["type"], "name": event["content_block"].get("name")})
        elif event["type"] == "content_block_delta":
            delta, block = event["delta"], blocks[event["index"]]
            name = delta["type"]
            block[name] = block.get(name, "") + next(text for field, text in delta.items() if field != "type")
        else:
            others.append(event)
    others[0]["message"].pop("id")
    return blocks, others


def steady(event: dict[str, Any]) -> dict[str, Any]:
    """Without what differs between two runs of one request: ids, times."""
    event = {**event, "id": "", "created": 0} | {name: 0 for name in VOLATILE if name in event}
    if "meta_info" in event:
        event["meta_info"] = {
            name: value for name, value in event["meta_info"].items() if name not in (*VOLATILE, "id")
        }
    for choice in event.get("choices", []):
        for call in choice.get("delta", {}).get("tool_calls", []):
            call.pop("id", None)
    return event


def client_view(path: str, events: list[dict[str, Any]]) -> Any:
    """What a client makes of a stream, however the text was cut into events."""
    if path == "/generate":
        return events[-1]
    if path == "/v1/messages":
        return message_view(events)
    if path.startswith("/api/"):
        said = [event.get("message", {"content": event.get("response")}) for event in events]
        texts = {name: "".join(one.get(name, "") for one in said) for name in ("content", "thinking")}
        return texts, [call for one in said for call in one.get("tool_calls", [])], events[-1]
    fields: dict[str, Any] = {"text": "", "content": "", "reasoning": "", "roles": 0, "calls": {}, "logprobs": []}
    for event in events:
        for choice in event["choices"]:
            delta = choice.get("delta", {})
            fields["text"] += choice.get("text", "")
            fields["content"] += delta.get("content", "")
            fields["reasoning"] += delta.get("reasoning_content") or ""
            fields["roles"] += "role" in delta
            for call in delta.get("tool_calls", []):
                name, arguments = fields["calls"].get(call["index"], ("", ""))
                function = call["function"]
                fields["calls"][call["index"]] = (name + function.get("name", ""), arguments + function["arguments"])
            logprobs = choice.get("logprobs")
            if logprobs:
                fields["logprobs"] += logprobs.get("content") or list(zip(*logprobs.values(), strict=True))
            fields["finish"] = choice["finish_reason"], choice["matched_stop"]
        fields["usage"] = event.get("usage")
    return fields
