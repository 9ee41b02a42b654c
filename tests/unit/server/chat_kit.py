"""A server over a scripted scheduler, spoken to through the real `openai` client."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import openai
import pytest

from pdserve.server.text.tokenizer import Tokenizer
from tests.unit.server import server_kit
from tests.unit.server.server_kit import Bench, bench, token_ids

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather somewhere",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
ASK: Any = [{"role": "user", "content": "hi"}]
HERMES = (
    'Let me see 🙂.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "東京 e\u0301"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)


@pytest.fixture
def long_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every byte is a token here, and prompts with tools are long."""
    monkeypatch.setattr(server_kit, "CONTEXT", 1024)


@contextlib.asynccontextmanager
async def openai_bench(tokenizer: Tokenizer, text: str, **serving: Any) -> AsyncIterator[tuple[Bench, Any]]:
    """A server whose model always writes `text`, and a client of it."""
    async with bench(tokenizer, **serving) as b:
        b.scheduler.script = lambda request: token_ids(tokenizer, text)
        transport = httpx2.ASGITransport(app=b.app, raise_app_exceptions=False)
        async with httpx2.AsyncClient(transport=transport) as http:
            yield b, openai.AsyncOpenAI(base_url="http://server/v1", api_key="none", max_retries=0, http_client=http)
