"""Log probabilities and what stands beside them on `/v1/completions` and `/generate`, over a scripted scheduler."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from pdserve.protocol.logprobs import Logprobs
from pdserve.protocol.messages import RoomAddress, TokenLogprob
from pdserve.server.generation import GenerationUpdate
from pdserve.server.openai.completions import mean_logprob
from pdserve.server.text.tokenizer import Tokenizer
from tests.unit.server.server_kit import Bench, bench, sse
from tests.waiting import until

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]
Ids = Callable[[str], list[int]]
COMPLETIONS = "/v1/completions"
ROOM = {"bootstrap_host": "p", "bootstrap_port": 9, "bootstrap_room": 77}


async def _choice(b: Bench, **body: Any) -> dict[str, Any]:
    answer = await b.http.post(COMPLETIONS, json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json()["choices"][0])


async def test_echo_puts_the_prompt_before_the_answer(tokenizer: Tokenizer, ids: Ids) -> None:
    async with bench(tokenizer) as b:
        b.scheduler.script = lambda request: ids("ab")
        plain = await _choice(b, prompt="xyz", echo=True)
        assert plain["text"] == "xyzab" and plain["logprobs"] is None
        assert b.scheduler.requests[0].logprobs is None
        told = await _choice(b, prompt="xyz", echo=True, logprobs=2, max_tokens=2)
        assert b.scheduler.requests[1].logprobs == Logprobs(top=2, prompt_from=0, to_decode=True)
        lines = told["logprobs"]
        assert lines["tokens"] == ["x", "y", "z", "a", "b"]
        assert lines["token_logprobs"] == [None, -1.0, -2.0, -0.25, -0.25]
        assert lines["text_offset"] == [0, 1, 2, 3, 4]
        assert lines["top_logprobs"][0] is None
        assert len(lines["top_logprobs"][1]) == 3 and lines["top_logprobs"][1]["y"] == -1.0
        by_id = await _choice(b, prompt=ids("xyz"), echo=True, max_tokens=1)
        assert by_id["text"] == "xyza"


async def test_the_prompt_alone_is_a_completion_of_no_tokens(tokenizer: Tokenizer, ids: Ids) -> None:
    async with bench(tokenizer) as b:
        answer = (
            await b.http.post(COMPLETIONS, json={"prompt": "xyz", "echo": True, "logprobs": 0, "max_tokens": 0})
        ).json()
        choice = answer["choices"][0]
        assert choice["text"] == "xyz" and choice["finish_reason"] == "length"
        assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -2.0]
        assert choice["logprobs"]["top_logprobs"] == [None] * 3
        assert answer["usage"] == {
            "prompt_tokens": 3,
            "completion_tokens": 0,
            "total_tokens": 3,
            "prompt_tokens_details": {"cached_tokens": 3},
        }
        assert b.scheduler.requests[0].sampling.max_new_tokens == 0


async def test_a_stream_begins_with_the_echo(tokenizer: Tokenizer, ids: Ids) -> None:
    async with bench(tokenizer) as b:
        b.scheduler.script = lambda request: ids("ab")
        body = {"prompt": ["xyz", "yo"], "echo": True, "logprobs": 1, "stream": True, "max_tokens": 2}
        events = [json.loads(event) for event in sse((await b.http.post(COMPLETIONS, json=body)).text)[:-1]]
        for index, (text, count) in enumerate((("xyz", 3), ("yo", 2))):
            choices = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
            assert choices[0]["text"] == text and len(choices[0]["logprobs"]["tokens"]) == count
            assert "".join(choice["text"] for choice in choices) == f"{text}ab"
            offsets = [at for choice in choices if choice["logprobs"] for at in choice["logprobs"]["text_offset"]]
            assert offsets == list(range(count + 2))


async def test_best_of_answers_those_with_the_highest_mean(tokenizer: Tokenizer, ids: Ids) -> None:
    async with bench(tokenizer) as b:
        body = {"prompt": ["x", "y"], "n": 2, "best_of": 3, "max_tokens": 2, "seed": 5}
        answer = (await b.http.post(COMPLETIONS, json=body)).json()
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        assert len(b.scheduler.requests) == 6 and answer["usage"]["completion_tokens"] == 12
        assert {request.sampling.seed for request in b.scheduler.requests} == {5, 6, 7}
        assert all(choice["logprobs"] is None for choice in answer["choices"]), "txyz were for the ranking"
        assert b.scheduler.requests[0].logprobs == Logprobs(to_decode=True)
        await b.http.post(COMPLETIONS, json={"prompt": "x", "n": 2, "best_of": 2, "stream": True, "max_tokens": 1})
        assert b.scheduler.requests[-1].logprobs is None, "nothing to choose between"
    long, short = (
        GenerationUpdate(0, logprobs=[TokenLogprob(-0.5)] * 4),
        GenerationUpdate(1, logprobs=[TokenLogprob(-0.6)]),
    )
    assert mean_logprob(long) > mean_logprob(short), "a longer answer is not worse for being longer"


async def test_prompt_logprobs_as_vllm_has_them(tokenizer: Tokenizer, ids: Ids) -> None:
    async with bench(tokenizer) as b:
        choice = await _choice(b, prompt="xyz", prompt_logprobs=1, logprobs=0, max_tokens=1)
        first, second, _ = choice["prompt_logprobs"]
        assert first is None
        assert second[str(ids("y")[0])] == {"logprob": -1.0, "rank": 2, "decoded_token": "y"}
        assert second["2"]["rank"] == 1 and second["2"]["logprob"] == -0.5
        assert choice["logprobs"]["top_logprobs"] == [None], "logprobs: 0 is of the tokens themselves"
        body = {"messages": [{"role": "user", "content": "hi"}], "prompt_logprobs": 0, "max_tokens": 1}
        chat = (await b.http.post("/v1/chat/completions", json=body)).json()
        assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
        assert chat["choices"][0]["logprobs"] is None


async def test_generate_asks_and_answers_in_sglangs_shapes(tokenizer: Tokenizer, ids: Ids) -> None:
    async with bench(tokenizer) as b:
        b.scheduler.script = lambda request: ids("a")
        body = {
            "text": "xyz!",
            "return_logprob": True,
            "logprob_start_len": 1,
            "top_logprobs_num": 1,
            "token_ids_logprob": [9, 4],
            "return_text_in_logprobs": True,
            "sampling_params": {"max_new_tokens": 1},
        }
        meta = (await b.http.post("/generate", json=body)).json()["meta_info"]
        y, z, bang = ids("yz!")
        assert meta["input_token_logprobs"] == [[None, y, "y"], [-2.0, z, "z"], [-3.0, bang, "!"]]
        two = tokenizer.token_text(2)
        assert meta["input_top_logprobs"] == [None, [[-0.5, 2, two]], [[-0.5, 2, two]]]
        picks = [[-0.75, 9, tokenizer.token_text(9)], [-0.75, 4, tokenizer.token_text(4)]]
        assert meta["input_token_ids_logprobs"] == [None, picks, picks]
        assert meta["output_token_ids_logprobs"] == [picks]
        logprob_params = b.scheduler.requests[0].logprobs
        assert logprob_params == Logprobs(top=1, token_ids=(9, 4), prompt_from=1, to_decode=True)
        batch = {
            "text": ["xyz!", "yo"],
            "return_logprob": [True, True],
            "logprob_start_len": [0, -1],
            "token_ids_logprob": [None, [3]],
        }
        first, second = (await b.http.post("/generate", json=batch)).json()
        assert len(first["meta_info"]["input_token_logprobs"]) == 4
        assert second["meta_info"]["input_token_logprobs"] == []
        assert "output_token_ids_logprobs" not in first["meta_info"]
        assert second["meta_info"]["input_token_ids_logprobs"] == []


@pytest.mark.parametrize("mode", ["prefill", "decode"])
async def test_each_list_is_in_one_half_or_can_be_told_apart(tokenizer: Tokenizer, mode: Any) -> None:
    """A router puts prefill's `input_token_logprobs` before decode's of an answer that is no list, and nothing else."""
    async with bench(tokenizer, mode) as b:
        body = {"text": "xyz", "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1, **ROOM}
        meta = (await b.http.post("/generate", json=body)).json()["meta_info"]
        assert len(meta["input_token_logprobs"]) == (3 if mode == "prefill" else 0)
        assert len(meta["input_top_logprobs"]) == 3
        plain = {**body, "top_logprobs_num": 0}
        await b.http.post("/generate", json=plain)
        prompt_logprob_params = [request.logprobs for request in b.scheduler.requests]
        assert [
            logprob_params is not None and logprob_params.to_decode for logprob_params in prompt_logprob_params
        ] == [True, False]
        many = {**plain, "text": ["xyz", "yo"], "bootstrap_room": [1, 2]}
        answers = (await b.http.post("/generate", json=many)).json()
        assert [len(answer["meta_info"]["input_token_logprobs"]) for answer in answers] == [3, 2]


async def test_a_replica_is_chosen_by_its_rank(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        await b.http.post("/generate", json={"text": "x", "data_parallel_rank": 0})
        await b.http.post(COMPLETIONS, json={"prompt": "x", "data_parallel_rank": 0})
        assert [request.replica for request in b.scheduler.requests] == [0, 0]
        for path, body in (("/generate", {"text": "x"}), (COMPLETIONS, {"prompt": "x"})):
            answer = await b.http.post(path, json={**body, "data_parallel_rank": 1})
            assert answer.status_code == 400 and answer.json()["param"] == "data_parallel_rank"


async def test_best_of_takes_rooms_one_after_the_other(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer, "decode") as b:
        await b.http.post(COMPLETIONS, json={"prompt": "x", "best_of": 3, "max_tokens": 1, **ROOM})
        rooms = [request.room for request in b.scheduler.requests]
        assert rooms == [RoomAddress(host="p", port=9, room=77 + i) for i in range(3)]


async def test_a_stop_regex_ends_the_text(tokenizer: Tokenizer, ids: Ids) -> None:
    async with bench(tokenizer) as b:
        b.scheduler.script = lambda request: ids("total: 42 and more")
        body = {"text": "x", "sampling_params": {"stop_regex": r"\d+", "max_new_tokens": 30}}
        answer = (await b.http.post("/generate", json=body)).json()
        assert answer["text"] == "total: "
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": r"\d+"}
        choice = await _choice(b, prompt="x", stop_regex=["zzz", "an."], max_tokens=30, no_stop_trim=True)
        assert choice["text"] == "total: 42 and" and choice["matched_stop"] == "an."


async def test_a_stop_regex_that_is_slow_on_the_text_ends_its_request(
    tokenizer: Tokenizer, ids: Ids, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.server.text.stop_regex.SLOW_S", -1.0)
    monkeypatch.setattr("pdserve.server.text.stop_regex.QUICK_S", -1.0)
    async with bench(tokenizer) as b:
        b.scheduler.script = lambda request: ids("some text that goes on")
        b.scheduler.hold = True
        body = {"prompt": "x", "stop_regex": "never", "max_tokens": 30}
        answer = await b.http.post(COMPLETIONS, json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "stop_regex_too_slow", "stop_regex")
        await until(lambda: len(b.scheduler.aborts) == 1)
        streamed = await b.http.post(COMPLETIONS, json={**body, "stream": True})
        assert json.loads(sse(streamed.text)[0])["error"]["code"] == "stop_regex_too_slow"
        await until(lambda: len(b.scheduler.aborts) == 2)
        b.scheduler.hold = False
        assert (await _choice(b, prompt="x", max_tokens=30))["text"] == "some text that goes on"


BAD = [
    ("/generate", {"text": "xyz", "return_logprob": True, "logprob_start_len": 4}, "logprob_start_len"),
    ("/generate", {"text": "xyz", "return_logprob": True, "logprob_start_len": -2}, "logprob_start_len"),
    ("/generate", {"text": "xyz", "return_logprob": True, "token_ids_logprob": [999]}, "token_ids_logprob"),
    ("/generate", {"text": "xyz", "return_logprob": True, "token_ids_logprob": "a"}, "token_ids_logprob"),
    ("/generate", {"text": "xyz", "return_logprob": True, "token_ids_logprob": [[1], [2]]}, "token_ids_logprob"),
    ("/generate", {"text": "xyz", "return_logprob": True, "token_ids_logprob": [1] * 2000}, "token_ids_logprob"),
    ("/generate", {"text": ["a", "b"], "return_logprob": True, "token_ids_logprob": [[1], 2]}, "token_ids_logprob"),
    ("/generate", {"text": "xyz", "data_parallel_rank": "x"}, "data_parallel_rank"),
    ("/generate", {"text": "x", "sampling_params": {"stop_regex": "(?:ab?c*){15000}x"}}, "sampling_params.stop_regex"),
    ("/generate", {"text": "xyz", "sampling_params": {"stop_regex": "("}}, "sampling_params.stop_regex"),
    ("/generate", {"text": "xyz", "sampling_params": {"stop_regex": "a*"}}, "sampling_params.stop_regex"),
    ("/generate", {"text": "xyz", "sampling_params": {"stop_regex": 5}}, "sampling_params.stop_regex"),
    ("/generate", {"text": "xyz", "sampling_params": {"stop_regex": ["a"] * 9}}, "sampling_params.stop_regex"),
    ("/generate", {"text": ["x"] * 80, "sampling_params": {"stop_regex": ["a"] * 4}}, "sampling_params.stop_regex"),
    ("/generate", {"text": ["x"] * 100, "sampling_params": {"n": 100}}, "sampling_params.n"),
    ("/generate", {"text": "xyz", "sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": -1}, "max_tokens"),
    (COMPLETIONS, {"prompt": "x", "n": 3, "best_of": 2}, "best_of"),
    (COMPLETIONS, {"prompt": "x", "best_of": 200}, "best_of"),
    (COMPLETIONS, {"prompt": "x", "best_of": 2, "stream": True}, "best_of"),
    (COMPLETIONS, {"prompt": "x", "echo": 1}, "echo"),
    (COMPLETIONS, {"prompt": "x", "suffix": "y"}, "suffix"),
    (COMPLETIONS, {"prompt": "x", "prompt_logprobs": 21}, "prompt_logprobs"),
    (COMPLETIONS, {"prompt": "x", "prompt_logprobs": -1}, "prompt_logprobs"),
    (COMPLETIONS, {"prompt": "x", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    (COMPLETIONS, {"prompt": "x", "logprobs": 21, "echo": True}, "logprobs"),
]


@pytest.mark.parametrize(
    ("path", "body", "field"), BAD, ids=[f"{path}-{field}-{i}" for i, (path, _, field) in enumerate(BAD)]
)
async def test_bad_wishes_are_refused_by_name(
    tokenizer: Tokenizer, path: str, body: dict[str, Any], field: str
) -> None:
    async with bench(tokenizer) as b:
        answer = await b.http.post(path, json=body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["param"] == field and answer.json()["error"]["message"]
        assert not b.scheduler.requests
