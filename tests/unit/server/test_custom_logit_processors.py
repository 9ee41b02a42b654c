"""How requests name a logit processor: only those of the server's flag, and never code."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdserve.config import validate
from pdserve.config.groups import GrammarConfig, ModelConfig, ServerConfig
from pdserve.errors import ConfigError
from pdserve.protocol.sampling import Grammar, ProcessorParams
from pdserve.server.text.tokenizer import Tokenizer
from tests.unit.server.chat_kit import ASK, long_context
from tests.unit.server.server_kit import bench

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("long_context")]
__all__ = ["long_context"]
NAME = {"custom_logit_processor": "mine"}
PARAMS = {"custom_params": {"token_ids": [1, 2], "thinking_budget": 5}}
DILL = json.dumps({"callable": "8004950a"})


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GrammarConfig, "processor_names", ("mine", "other"))


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "a", "sampling_params": PARAMS, **NAME}),
        ("/v1/completions", {"prompt": "a", **PARAMS, **NAME}),
        ("/v1/chat/completions", {"messages": ASK, **PARAMS, **NAME}),
        ("/v1/messages", {"messages": ASK, "max_tokens": 5, "custom_params": {"token_ids": [1, 2]}, **NAME,
                          "thinking": {"type": "enabled", "budget_tokens": 5}}),
        ("/v1/responses", {"input": "a", **PARAMS, **NAME}),
    ],
)  # fmt: skip
async def test_the_name_and_the_parameters_reach_the_scheduler(
    tokenizer: Tokenizer, path: str, body: dict[str, Any]
) -> None:
    async with bench(tokenizer, reasoning_parser="qwen3") as b:
        assert (await b.http.post(path, json=body)).status_code == 200
        sampling = b.scheduler.requests[0].sampling
        assert sampling.processor is not None and sampling.processor.name == "mine"
        assert json.loads(sampling.processor.params) == PARAMS["custom_params"]
        assert sampling.thinking is not None and sampling.thinking.num_tokens == 5
        assert sampling.grammar == Grammar(kind="any_text", text="")


@pytest.mark.asyncio
async def test_each_prompt_of_a_batch_has_its_own(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        body = {"text": ["a", "b"], "custom_logit_processor": ["other", None]}
        assert (await b.http.post("/generate", json=body)).status_code == 200
        found = [request.sampling.processor for request in b.scheduler.requests]
        assert found == [ProcessorParams(name="other"), None]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("body", "field", "text"),
    [
        ({"text": "a", "custom_logit_processor": DILL}, "custom_logit_processor", "takes no code"),
        ({"text": "a", "custom_logit_processor": "x" * 300}, "custom_logit_processor", "takes no code"),
        ({"text": "a", "custom_logit_processor": "none"}, "custom_logit_processor", "there is mine, other"),
        ({"text": "a", "custom_logit_processor": 5}, "custom_logit_processor", ""),
        ({"text": ["a", "b"], "custom_logit_processor": ["mine"]}, "custom_logit_processor", "1 entries"),
        ({"text": "a", "sampling_params": {"custom_params": {"a": 1}}}, "sampling_params.custom_params.a",
         "no processor"),
        ({"text": "a", **NAME, "sampling_params": {"custom_params": {"a": "x" * 70000}}},
         "sampling_params.custom_params", "maximum is 65536"),
    ],
)  # fmt: skip
async def test_what_is_no_processor_is_refused_by_name(
    tokenizer: Tokenizer, body: dict[str, Any], field: str, text: str
) -> None:
    async with bench(tokenizer) as b:
        answer = await b.http.post("/generate", json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, field) and text in error["message"]
        assert b.scheduler.requests == []


def test_the_flag_takes_installed_processors_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    config = ServerConfig(model=ModelConfig(model_path="m"), grammar=GrammarConfig(logit_processors="a,b"))
    assert config.grammar.processor_names == ("a", "b")
    with pytest.raises(ConfigError, match="--logit-processors is 'a'"):
        validate.check(config)
