"""How bodies limit the reasoning: SGLang's `custom_params`, and `thinking.budget_tokens` of the Messages API."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.protocol.sampling import Grammar, ThinkingBudget
from pdserve.server.text.tokenizer import Tokenizer
from tests.unit.server.chat_kit import ASK, long_context
from tests.unit.server.server_kit import bench, token_ids

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60), pytest.mark.usefixtures("long_context")]
__all__ = ["long_context"]
BUDGET = {"thinking_budget": 7}
ANY = Grammar(kind="any_text", text="")
GENERATE = {"text": "hello <think>", "sampling_params": {"custom_params": BUDGET}}
CHAT = {"messages": ASK, "custom_params": BUDGET}
MESSAGES: dict[str, Any] = {"messages": ASK, "max_tokens": 9, "thinking": {"type": "enabled", "budget_tokens": 7}}
BODIES = [
    ("/generate", GENERATE, True),
    ("/generate", {**GENERATE, "text": "hello"}, False),
    ("/v1/completions", {"prompt": ["a <think>\n"], "custom_params": BUDGET}, True),
    ("/v1/completions", {"prompt": "a </think> b", "custom_params": BUDGET}, False),
    ("/v1/chat/completions", CHAT, False),
    ("/v1/messages", MESSAGES, False),
]


@pytest.mark.parametrize(("path", "body", "inside"), BODIES)
async def test_the_budget_reaches_the_scheduler(
    tokenizer: Tokenizer, path: str, body: dict[str, Any], inside: bool
) -> None:
    async with bench(tokenizer, reasoning_parser="glm45") as b:
        assert (await b.http.post(path, json=body)).status_code == 200
        sampling = b.scheduler.requests[0].sampling
        closing = tuple(token_ids(tokenizer, "\n</think>"))
        ends = ("</think>", "<tool_call>")
        assert sampling.thinking == ThinkingBudget(
            num_tokens=7, closing_ids=closing, opening="<think>", ends=ends, inside=inside
        )
        assert sampling.grammar == ANY


async def test_a_grammar_stays_and_a_closed_prompt_needs_no_budget(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer, reasoning_parser="deepseek-r1") as b:
        await b.http.post("/v1/chat/completions", json={**CHAT, "regex": "a+"})
        sampling = b.scheduler.requests[0].sampling
        assert sampling.thinking is not None and sampling.thinking.inside
        assert sampling.grammar is not None and sampling.grammar.kind == "structural_tag"
        for fields in ({"custom_params": {}}, {"custom_params": {"thinking_budget": None}}):
            await b.http.post("/v1/chat/completions", json={"messages": ASK, **fields})
            assert b.scheduler.requests[-1].sampling.thinking is None
        await b.http.post("/generate", json={**GENERATE, "text": "a</think>"})
        assert b.scheduler.requests[-1].sampling.thinking is None and b.scheduler.requests[-1].sampling.grammar is None


async def test_gpt_oss_goes_on_in_its_final_channel(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer, reasoning_parser="gpt-oss") as b:
        await b.http.post("/v1/chat/completions", json=CHAT)
        thinking = b.scheduler.requests[0].sampling.thinking
        assert thinking is not None and thinking.opening == "<|channel|>analysis<|message|>" and not thinking.inside
        closing = "<|end|><|start|>assistant<|channel|>final<|message|>"
        assert thinking.closing_ids == tuple(token_ids(tokenizer, closing))


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("/generate", {**GENERATE, "sampling_params": {"custom_params": {"budget": 1}}},
     "sampling_params.custom_params.budget"),
    ("/generate", {**GENERATE, "text": ["a", "b"], "sampling_params": [{}, {"custom_params": {"thinking_budget": -1}}]},
     "sampling_params[1].custom_params.thinking_budget"),
    ("/v1/chat/completions", {**CHAT, "custom_params": {"thinking_budget": "5"}}, "custom_params.thinking_budget"),
    ("/v1/chat/completions", {**CHAT, "custom_params": {"thinking_budget": True}}, "custom_params.thinking_budget"),
    ("/v1/completions", {"prompt": "a", "custom_params": 5}, "custom_params"),
    ("/v1/messages", {**MESSAGES, "custom_params": BUDGET}, "custom_params"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "field"), WRONG)
async def test_a_wrong_budget_is_refused_by_name(
    tokenizer: Tokenizer, path: str, body: dict[str, Any], field: str
) -> None:
    async with bench(tokenizer, reasoning_parser="qwen3") as b:
        answer = await b.http.post(path, json=body)
        assert answer.status_code == 400 and field in answer.text, answer.text
        assert b.scheduler.requests == []


@pytest.mark.parametrize(("path", "body"), [(path, body) for path, body, _ in BODIES[:5]])
async def test_a_server_without_a_reasoning_parser_refuses_a_budget(
    tokenizer: Tokenizer, path: str, body: dict[str, Any]
) -> None:
    async with bench(tokenizer) as b:
        answer = await b.http.post(path, json=body)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"].endswith("custom_params.thinking_budget") and "--reasoning-parser" in error["message"]


async def test_messages_of_a_model_that_does_not_reason_are_answered(tokenizer: Tokenizer) -> None:
    """Coding tools ask every model to think."""
    async with bench(tokenizer) as b:
        assert (await b.http.post("/v1/messages", json=MESSAGES)).status_code == 200
        assert b.scheduler.requests[0].sampling.thinking is None
