"""Bad input gets a 4xx that names the field; nothing reaches the scheduler, and the server still serves."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.errors import RequestError
from pdserve.protocol.sampling import CoreSamplingParams, Grammar
from pdserve.server.request.intake import check_size, prompt_request
from pdserve.server.request.sampling_fields import RequestLimits
from pdserve.server.text.tokenizer import Tokenizer
from tests.unit.server.server_kit import bench, tiny_hf_tokenizer

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
MESSAGES = {"messages": [{"role": "user", "content": "hi"}]}
PROMPT = {"prompt": "hi"}


def tool(name: str, description: str = "") -> dict[str, Any]:
    """A function without parameters."""
    return {"type": "function", "function": {"name": name, "description": description}}


def schema_format(fields: dict[str, Any]) -> dict[str, Any]:
    """A `response_format` with these fields of `json_schema`."""
    return {"type": "json_schema", "json_schema": fields}


BAD: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "hi"}, "messages"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (CHAT, {"messages": [{"content": "x"}]}, "messages[0]"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0]"),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 500}]}, "messages"),
    (CHAT, {**MESSAGES, "tools": [{"type": "function"}]}, "tools[0].function"),
    (CHAT, {**MESSAGES, "tools": [tool(f"f{i}") for i in range(257)]}, "tools"),
    (CHAT, {**MESSAGES, "tools": [tool("f", "x" * (1 << 20))]}, "tools"),
    (CHAT, {**MESSAGES, "response_format": {"type": "json"}}, "response_format.type"),
    (CHAT, {**MESSAGES, "response_format": "json_object"}, "response_format"),
    (CHAT, {**MESSAGES, "response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (CHAT, {**MESSAGES, "response_format": schema_format({"name": "x"})}, "response_format.json_schema.schema"),
    (CHAT, {**MESSAGES, "response_format": schema_format({"schema": 5})}, "response_format.json_schema.schema"),
    (
        CHAT,
        {**MESSAGES, "response_format": schema_format({"schema": {"type": "nonsense"}})},
        "response_format.json_schema.schema",
    ),
    (
        CHAT,
        {**MESSAGES, "response_format": schema_format({"schema": {}, "strict": "yes"})},
        "response_format.json_schema.strict",
    ),
    (CHAT, {**MESSAGES, "response_format": {"type": "structural_tag"}}, "response_format"),
    (CHAT, {**MESSAGES, "guided_choice": []}, "guided_choice"),
    (CHAT, {**MESSAGES, "guided_choice": ["a", 5]}, "guided_choice[1]"),
    (CHAT, {**MESSAGES, "structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    (CHAT, {**MESSAGES, "structured_outputs": {"wishes": "x"}}, "structured_outputs.wishes"),
    (COMPLETIONS, {**PROMPT, "regex": "a", "guided_json": {}}, "guided_json"),
    (COMPLETIONS, {**PROMPT, "json_schema": {"allOf": [{"not": {}}]}}, "json_schema"),
    (COMPLETIONS, {**PROMPT, "json_schema": {"type": "string", "minLength": 2, "maxLength": 1}}, "json_schema"),
    (CHAT, {**MESSAGES, "max_completion_tokens": 1000}, "max_completion_tokens"),
    (CHAT, {**MESSAGES, "max_tokens": -1}, "max_tokens"),
    (CHAT, {**MESSAGES, "logprobs": 5}, "logprobs"),
    (CHAT, {**MESSAGES, "top_logprobs": 5}, "top_logprobs"),
    (CHAT, {**MESSAGES, "logprobs": True, "top_logprobs": 50}, "top_logprobs"),
    (CHAT, {**MESSAGES, "chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    (CHAT, {**MESSAGES, "stream": "yes"}, "stream"),
    (CHAT, {**MESSAGES, "stream_options": 5}, "stream_options"),
    (COMPLETIONS, {}, "prompt"),
    (COMPLETIONS, {"prompt": ""}, "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": ["ok", ""]}, "prompt[1]"),
    (COMPLETIONS, {"prompt": [[5], []]}, "prompt[1]"),
    (COMPLETIONS, {"prompt": ["a", [1, 2]]}, "prompt[1]"),
    (COMPLETIONS, {"prompt": [[1, 2], [3], "a"]}, "prompt[2]"),
    (COMPLETIONS, {"prompt": [[1, 2], 5]}, "prompt[1]"),
    (COMPLETIONS, {"prompt": ["a", 5]}, "prompt[1]"),
    (COMPLETIONS, {"prompt": ["a", None]}, "prompt[1]"),
    (COMPLETIONS, {"prompt": [None, "a"]}, "prompt[0]"),
    (COMPLETIONS, {"prompt": [{"prompt": "a"}]}, "prompt[0]"),
    (COMPLETIONS, {"prompt": [5, [6]]}, "prompt"),
    (COMPLETIONS, {"prompt": [[5], [6, 320]]}, "prompt[1]"),
    (COMPLETIONS, {"prompt": [[5], [5] * 128]}, "prompt[1]"),
    (COMPLETIONS, {"prompt": [1.5, 2]}, "prompt"),
    (COMPLETIONS, {"prompt": True}, "prompt"),
    (COMPLETIONS, {"prompt": [5, "x"]}, "prompt"),
    (COMPLETIONS, {"prompt": {"a": 1}}, "prompt"),
    (COMPLETIONS, {"prompt": [5, True]}, "prompt"),
    (COMPLETIONS, {"prompt": [5, -1]}, "prompt"),
    (COMPLETIONS, {"prompt": [5, 320]}, "prompt"),
    (COMPLETIONS, {"prompt": [5, 1 << 70]}, "prompt"),
    (COMPLETIONS, {"prompt": [5, 1.5]}, "prompt"),
    (COMPLETIONS, {"prompt": [5] * 128}, "prompt"),
    (COMPLETIONS, {"prompt": [5] * 100, "max_tokens": 29}, "max_tokens"),
    (COMPLETIONS, {**PROMPT, "max_tokens": -1}, "max_tokens"),
    (COMPLETIONS, {**PROMPT, "max_tokens": "5"}, "max_tokens"),
    (COMPLETIONS, {**PROMPT, "max_tokens": 1 << 80}, "max_tokens"),
    (COMPLETIONS, {**PROMPT, "min_tokens": -1}, "min_tokens"),
    (COMPLETIONS, {**PROMPT, "max_tokens": 5, "min_tokens": 6}, "min_tokens"),
    (COMPLETIONS, {**PROMPT, "temperature": -0.1}, "temperature"),
    (COMPLETIONS, {**PROMPT, "temperature": "hot"}, "temperature"),
    (COMPLETIONS, {**PROMPT, "top_p": 0}, "top_p"),
    (COMPLETIONS, {**PROMPT, "top_p": 1.5}, "top_p"),
    (COMPLETIONS, {**PROMPT, "top_k": 0}, "top_k"),
    (COMPLETIONS, {**PROMPT, "top_k": -2}, "top_k"),
    (COMPLETIONS, {**PROMPT, "min_p": -1}, "min_p"),
    (COMPLETIONS, {**PROMPT, "repetition_penalty": 0}, "repetition_penalty"),
    (COMPLETIONS, {**PROMPT, "frequency_penalty": 3}, "frequency_penalty"),
    (COMPLETIONS, {**PROMPT, "presence_penalty": -3}, "presence_penalty"),
    (COMPLETIONS, {**PROMPT, "seed": 1 << 64}, "seed"),
    (COMPLETIONS, {**PROMPT, "n": 0}, "n"),
    (COMPLETIONS, {**PROMPT, "n": 1000}, "n"),
    (COMPLETIONS, {**PROMPT, "stop": ""}, "stop"),
    (COMPLETIONS, {**PROMPT, "stop": ["a", 5]}, "stop[1]"),
    (COMPLETIONS, {**PROMPT, "stop": ["a"] * 100}, "stop"),
    (COMPLETIONS, {**PROMPT, "stop_token_ids": [320]}, "stop_token_ids"),
    (COMPLETIONS, {**PROMPT, "logit_bias": {"x": 1}}, "logit_bias"),
    (COMPLETIONS, {**PROMPT, "logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    (COMPLETIONS, {**PROMPT, "logit_bias": {str(i): 1 for i in range(4097)}}, "logit_bias"),
    (COMPLETIONS, {"prompt": ["hi"] * 200, "n": 10, "logit_bias": {str(i): 1 for i in range(300)}}, "logit_bias"),
    (COMPLETIONS, {"prompt": ["hi"] * 200, "n": 10, "stop_token_ids": [5] * 300}, "stop_token_ids"),
    (COMPLETIONS, {**PROMPT, "stop_token_ids": [5] * 1025}, "stop_token_ids"),
    (COMPLETIONS, {"prompt": "a b " * 500_000}, "prompt"),
    (COMPLETIONS, {"prompt": ["hi", "a b " * 500_000]}, "prompt[1]"),
    (GENERATE, {"text": "a b " * 500_000}, "text"),
    (GENERATE, {"input_ids": [5] * 500_000}, "input_ids"),
    (CHAT, {"messages": [{"role": "user", "content": "a b " * 500_000}]}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": "x"}] * 4097}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 16385}]}, "messages"),
    (CHAT, {**MESSAGES, "chat_template_kwargs": {"x": "y" * (1 << 20)}}, "chat_template_kwargs"),
    (CHAT, {**MESSAGES, "chat_template_kwargs": {f"n{i}": 1 for i in range(1025)}}, "chat_template_kwargs"),
    (CHAT, {**MESSAGES, "documents": [{"x": "y" * (1 << 20)}]}, "documents"),
    ("/v1/responses", {"input": [{"role": "user", "content": "x"}] * 4097}, "input"),
    ("/v1/responses", {"input": "a b " * 500_000}, "input"),
    ("/tokenize", {"prompt": "a b " * 700_000}, "prompt"),
    ("/tokenize", {"prompt": ["a b " * 1000] * 300}, "prompt[65]"),
    ("/tokenize", {"prompt": ["a"] * 4097}, "prompt"),
    ("/tokenize", {"messages": [{"role": "user", "content": "x"}] * 4097}, "messages"),
    ("/detokenize", {"tokens": [[5]] * 4097}, "tokens"),
    (COMPLETIONS, {**PROMPT, "logit_bias": {"999": 1}}, "logit_bias"),
    (COMPLETIONS, {**PROMPT, "logprobs": -1}, "logprobs"),
    (COMPLETIONS, {**PROMPT, "echo": "yes"}, "echo"),
    (COMPLETIONS, {**PROMPT, "suffix": "x"}, "suffix"),
    (COMPLETIONS, {**PROMPT, "best_of": 0}, "best_of"),
    (COMPLETIONS, {**PROMPT, "rid": 5}, "rid"),
    (COMPLETIONS, {**PROMPT, "model": 5}, "model"),
    (GENERATE, {}, "text"),
    (GENERATE, {"text": "a", "input_ids": [5]}, "text"),
    (GENERATE, {"text": ""}, "text"),
    (GENERATE, {"text": 5}, "text"),
    (GENERATE, {"text": [5]}, "text[0]"),
    (GENERATE, {"text": []}, "text"),
    (GENERATE, {"text": ["a", [5]]}, "text[1]"),
    (GENERATE, {"text": ["a", "b" * 500]}, "text[1]"),
    (GENERATE, {"text": ["a", ""]}, "text[1]"),
    (GENERATE, {"input_ids": [[5], 5]}, "input_ids[1]"),
    (GENERATE, {"input_ids": [[5], "a"]}, "input_ids[1]"),
    (GENERATE, {"input_ids": ["a", [5]]}, "input_ids[0]"),
    (GENERATE, {"input_ids": [5, [5]]}, "input_ids"),
    (GENERATE, {"input_ids": [[5], [5, -1]]}, "input_ids[1]"),
    ("/tokenize", {"prompt": ["a", [5]]}, "prompt[1]"),
    ("/tokenize", {"prompt": ["a", 5]}, "prompt[1]"),
    ("/tokenize", {"prompt": 5}, "prompt"),
    ("/v1/tokenize", {"prompt": [[5]]}, "prompt[0]"),
    ("/detokenize", {"tokens": [[5], 6]}, "tokens[1]"),
    ("/detokenize", {"tokens": [[5], "a"]}, "tokens[1]"),
    ("/detokenize", {"tokens": [[5], [6, 999]]}, "tokens[1]"),
    ("/detokenize", {"tokens": [5, [6]]}, "tokens"),
    ("/detokenize", {"tokens": "a"}, "tokens"),
    ("/v1/detokenize", {}, "tokens"),
    (GENERATE, {"input_ids": "a"}, "input_ids"),
    (GENERATE, {"input_ids": []}, "input_ids"),
    (GENERATE, {"input_ids": [5] * 200}, "input_ids"),
    (GENERATE, {"text": "a", "sampling_params": 5}, "sampling_params"),
    (GENERATE, {"text": "a", "sampling_params": [{}, {}]}, "sampling_params"),
    (GENERATE, {"text": "a", "sampling_params": {"nonsense": 1}}, "sampling_params.nonsense"),
    (GENERATE, {"text": "a", "sampling_params": {"top_k": "1"}}, "sampling_params.top_k"),
    (GENERATE, {"text": "a", "sampling_params": {"regex": "a+("}}, "sampling_params.regex"),
    (GENERATE, {"text": "a", "sampling_params": {"regex": "(" * 1000}}, "sampling_params.regex"),
    (GENERATE, {"text": "a", "sampling_params": {"regex": "a" * 300_000}}, "sampling_params.regex"),
    (GENERATE, {"text": "a", "sampling_params": {"ebnf": "root ::= missing"}}, "sampling_params.ebnf"),
    (GENERATE, {"text": "a", "sampling_params": {"json_schema": "{"}}, "sampling_params.json_schema"),
    (GENERATE, {"text": "a", "sampling_params": {"json_schema": "[]"}}, "sampling_params.json_schema"),
    (GENERATE, {"text": "a", "sampling_params": {"json_schema": "{}", "regex": "a"}}, "sampling_params.regex"),
    (GENERATE, {"text": "a", "sampling_params": {"structural_tag": "{}"}}, "sampling_params.structural_tag"),
    (GENERATE, {"text": "a", "sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens"),
    (GENERATE, {"text": "a", "sampling_params": {"max_new_tokens": 128}}, "sampling_params.max_new_tokens"),
    (GENERATE, {"text": "a", "sampling_params": {"top_p": 0}}, "sampling_params.top_p"),
    (GENERATE, {"text": "a", "sampling_params": {"n": 0}}, "sampling_params.n"),
    (GENERATE, {"text": "a", "sampling_params": {"stop_regex": "("}}, "sampling_params.stop_regex"),
    (GENERATE, {"text": "a", "sampling_params": {"sampling_seed": 1 << 64}}, "sampling_params.sampling_seed"),
    (GENERATE, {"text": ["a", "b"], "sampling_params": [{}, {"top_k": "1"}]}, "sampling_params[1].top_k"),
    (GENERATE, {"text": ["a", "b"], "sampling_params": [{}, {"top_k": 0}]}, "sampling_params[1].top_k"),
    (GENERATE, {"text": ["a", "b"], "sampling_params": [{}, {"ebnf": "root ::= x"}]}, "sampling_params[1].ebnf"),
    (GENERATE, {"text": ["a", "b"], "sampling_params": {"top_k": 0}}, "sampling_params.top_k"),
    (GENERATE, {"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]}, "sampling_params.n"),
    (GENERATE, {"text": ["a", "b"], "rid": ["x", "x"]}, "rid"),
    (GENERATE, {"text": "a", "rid": "x" * 1000}, "rid"),
    (GENERATE, {"text": "a", "return_logprob": "x"}, "return_logprob"),
    (GENERATE, {"text": "a", "return_logprob": True, "top_logprobs_num": 129}, "top_logprobs_num"),
    (GENERATE, {"text": "a", "return_logprob": True, "logprob_start_len": 2}, "logprob_start_len"),
    (GENERATE, {"text": "a", "image_data": "x"}, "image_data"),
]


@pytest.mark.parametrize(("path", "body", "param"), BAD)
async def test_a_bad_field_is_named(tokenizer: Tokenizer, path: str, body: dict[str, Any], param: str) -> None:
    async with bench(tokenizer) as b:
        answer = await b.http.post(path, json=body)
        assert answer.status_code == 400, answer.text
        value = answer.json()
        assert value["error"]["param"] == param
        assert param.split(".")[-1] in value["error"]["message"]
        assert {key: value[key] for key in ("object", "type", "param", "code")} == {
            "object": "error",
            "type": "invalid_request_error",
            "param": param,
            "code": 400,
        }
        assert b.scheduler.requests == []
        assert (await b.http.post(COMPLETIONS, json=PROMPT)).status_code == 200


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "presence_penalty"])
async def test_nan_and_infinity_literals_name_their_field(tokenizer: Tokenizer, field: str, literal: str) -> None:
    async with bench(tokenizer) as b:
        for path, text, param in (
            (COMPLETIONS, f'{{"prompt": "x", "{field}": {literal}}}', field),
            (GENERATE, f'{{"text": "x", "sampling_params": {{"{field}": {literal}}}}}', f"sampling_params.{field}"),
        ):
            answer = await b.http.post(path, content=text)
            assert answer.status_code == 400
            assert answer.json()["param"] == param


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"5", b"null", b'"x"', b"\xff\xfe", b'{"prompt": "\\ud800"}', b"[" * 100_000, b'{"prompt": x}'],
)
async def test_malformed_json_is_400(tokenizer: Tokenizer, body: bytes) -> None:
    async with bench(tokenizer) as b:
        for path in (CHAT, COMPLETIONS, GENERATE, "/abort_request"):
            answer = await b.http.post(path, content=body)
            assert answer.status_code == 400
            assert answer.json()["error"]["code"] == "invalid_json"


async def test_another_model_is_404_where_names_are_strict(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer, strict_model_name=True) as b:
        for path, body in ((CHAT, MESSAGES), (COMPLETIONS, PROMPT), (GENERATE, {"text": "a"})):
            answer = await b.http.post(path, json={**body, "model": "gpt-4"})
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == "model_not_found"
            for name in (b.config.model.served_model_name, b.config.model.model_path, "default", ""):
                assert (await b.http.post(path, json={**body, "model": name})).status_code == 200


async def test_an_oversized_body_is_413(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer, max_request_bytes=1000) as b:
        assert (await b.http.post(COMPLETIONS, json={"prompt": "x" * 1000})).status_code == 413

        async def parts() -> Any:
            for _ in range(20):
                yield b"x" * 100

        assert (await b.http.post(COMPLETIONS, content=parts())).status_code == 413


async def test_one_bad_prompt_refuses_the_whole_batch(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        answer = await b.http.post(COMPLETIONS, json={"prompt": ["ok", "x" * 500]})
        assert (answer.status_code, answer.json()["param"]) == (400, "prompt[1]")
        assert b.scheduler.requests == []


async def test_a_model_without_a_chat_template_says_so() -> None:
    plain = tiny_hf_tokenizer()
    plain.chat_template = None
    async with bench(Tokenizer(plain)) as b:
        answer = await b.http.post(CHAT, json=MESSAGES)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "no_chat_template")


async def test_unknown_paths_and_methods_have_the_same_form(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        assert (await b.http.get("/nothing")).json()["error"]["type"] == "not_found_error"
        answer = await b.http.get(COMPLETIONS)
        assert (answer.status_code, answer.json()["code"]) == (405, 405)


async def test_what_one_body_asks_for_in_all_is_bounded() -> None:
    limits = RequestLimits("null", 320, 4096, 1 << 20)
    assert (limits.most_prompt_tokens, limits.most_body_tokens) == (4095, 1 << 20)
    assert RequestLimits("null", 320, 1 << 20, 1 << 19).most_body_tokens == 8 << 19
    grammar = Grammar(kind="regex", text="a" * 200_000)
    prompts = [prompt_request([5] * 1024, CoreSamplingParams(grammar=grammar))] * 4
    check_size(prompts, 64, limits.most_body_tokens, "prompt")
    with pytest.raises(RequestError, match="more than 1048576") as refused:
        check_size(prompts, 257, limits.most_body_tokens, "prompt")
    assert refused.value.field == "n"
    with pytest.raises(RequestError, match="characters") as refused:
        check_size(prompts, 128, limits.most_body_tokens, "prompt")
    assert refused.value.field == "n"


async def test_an_error_does_not_say_back_all_that_was_sent(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        for body in ({**PROMPT, "model": "m" * 100_000}, {"prompt": [5, "x" * 100_000]}, {"prompt": [5, "x"] * 50_000}):
            answer = await b.http.post(COMPLETIONS, json=body)
            assert answer.status_code in (400, 404) and len(answer.content) < 10_000
