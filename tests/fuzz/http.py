"""Mutated HTTP bodies against the server's application over a scripted scheduler: real parsing, no socket, no model.

Called by `tests.fuzz.__main__` with many bodies, by `test_fuzz` with few. Whatever a body says, the answer is no 500,
errors are JSON with a message, the event loop is not held up, and memory stays flat.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import gc
import json
import random
import time
from collections import Counter
from typing import Any

import httpx

from pdserve.http.error_forms import inner_error
from tests.fuzz.structs import change_bytes, change_tree
from tests.fuzz.watch import LoopWatch, rss_mb
from tests.unit.server.server_kit import Bench, bench, tiny_tokenizer

MAX_STALL_S = 3.0
"""Of the event loop, on a machine that others use, too."""
MAX_ANSWER_S = 20.0
MAX_GROWTH_MB = 128.0
WARM_UP = 1000
"""Bodies after which memory counts: grammars, regular expressions and parsers have caches that fill first."""
ALLOWED_5XX = {503, 504}
LEFT_OUT = frozenset({"/pd_role_switch", "/start_profile", "/stop_profile"})
"""They change what the server is, or write files."""
UNDO = {
    "/pause_generation": "/continue_generation",
    "/release_memory_occupation": "/resume_memory_occupation",
}
HEADERS = {"Content-Type": "application/json"}
CHAT, COMPLETIONS, GENERATE, RESPONSES = "/v1/chat/completions", "/v1/completions", "/generate", "/v1/responses"
MESSAGES = "/v1/messages"
_TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}},
}
_SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^[a-c]+$"}}, "required": ["a"]}
_HELLO = [{"role": "user", "content": "hello"}]
SEEDS: tuple[tuple[str, dict[str, Any]], ...] = (
    (CHAT, {"model": "tiny", "messages": _HELLO, "max_tokens": 3}),
    (CHAT, {"messages": _HELLO, "stream": True, "stream_options": {"include_usage": True}, "n": 2, "seed": 5}),
    (CHAT, {"messages": _HELLO, "tools": [_TOOL], "tool_choice": "auto", "parallel_tool_calls": False}),
    (
        CHAT,
        {
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "be brief"}]},
                {"role": "user", "content": "1+1?", "name": "ann"},
                {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]},
                {"role": "tool", "tool_call_id": "c", "content": "2"},
            ],
            "logprobs": True,
            "top_logprobs": 3,
            "logit_bias": {"5": -2.5},
            "chat_template_kwargs": {"enable_thinking": False},
        },
    ),
    (CHAT, {"messages": _HELLO, "response_format": {"type": "json_schema", "json_schema": {"schema": _SCHEMA}}}),
    (CHAT, {"messages": _HELLO, "structured_outputs": {"choice": ["yes", "no"]}}),
    (COMPLETIONS, {"model": "tiny", "prompt": "hello", "max_tokens": 3, "temperature": 0.5, "top_p": 0.9}),
    (COMPLETIONS, {"prompt": ["a", "b"], "n": 2, "best_of": 3, "echo": True, "logprobs": 2, "stop": ["x", "\n"]}),
    (COMPLETIONS, {"prompt": [[5, 6], [7]], "stream": True, "stop_token_ids": [5], "min_tokens": 1}),
    (COMPLETIONS, {"prompt": "a", "regex": "(a|b){1,3}c*"}),
    (COMPLETIONS, {"prompt": "a", "ebnf": 'root ::= "a" | "b" root', "stop_regex": ["a+b"]}),
    (COMPLETIONS, {"prompt": "a", "json_schema": json.dumps(_SCHEMA), "presence_penalty": 1.0}),
    (GENERATE, {"text": "hello", "sampling_params": {"max_new_tokens": 3}}),
    (GENERATE, {"input_ids": [5, 6, 7], "stream": True, "return_logprob": True, "top_logprobs_num": 2}),
    (GENERATE, {"text": ["a", "b"], "sampling_params": [{"max_new_tokens": 1}, {"n": 2}], "rid": ["r1", "r2"]}),
    (GENERATE, {"text": "a", "logprob_start_len": 0, "token_ids_logprob": [5], "bootstrap_room": 7, "priority": 1}),
    (RESPONSES, {"model": "tiny", "input": "hello", "max_output_tokens": 3}),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}]}], "stream": True}),
    (MESSAGES, {"model": "tiny", "messages": _HELLO, "max_tokens": 3, "stream": True}),
    (
        MESSAGES,
        {
            "system": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "1+1?"}]},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"x": 1}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "2"}]},
            ],
            "max_tokens": 3,
            "tools": [{"name": "f", "input_schema": _SCHEMA}],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "stop_sequences": ["x"],
            "metadata": {"user_id": "u"},
        },
    ),
    (f"{MESSAGES}/count_tokens", {"messages": _HELLO}),
    ("/api/chat", {"messages": _HELLO, "options": {"num_predict": 3, "stop": ["x"]}, "think": "low", "tools": [_TOOL]}),
    ("/api/generate", {"prompt": "hello", "format": _SCHEMA, "raw": True, "options": {"num_predict": 3}}),
    ("/tokenize", {"prompt": "hello", "add_special_tokens": True}),
    ("/tokenize", {"messages": _HELLO, "add_generation_prompt": True}),
    ("/detokenize", {"tokens": [5, 6]}),
    ("/abort_request", {"rid": "r1", "abort_all": False}),
    ("/pause_generation", {"mode": "abort"}),
    ("/continue_generation", {}),
    ("/flush_cache", {}),
)
"""Bodies that are answered, which between them have most fields."""


@dataclasses.dataclass
class HttpReport:
    """What a run has come to."""

    num_bodies: int = 0
    statuses: Counter[int] = dataclasses.field(default_factory=Counter)
    slowest_s: float = 0.0
    worst_stall_s: float = 0.0
    worst_body: str = ""
    growth_mb: float = 0.0
    seconds: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.num_bodies} bodies in {self.seconds:.0f} s ({self.num_bodies / max(self.seconds, 1e-9):.0f}/s): "
            f"{dict(sorted(self.statuses.items()))}; slowest answer {self.slowest_s:.2f} s, loop held up "
            f"{self.worst_stall_s:.2f} s at worst (by {self.worst_body[:100]!r}), memory {self.growth_mb:+.1f} MB"
        )


class Bodies:
    """Makes bodies: seeds with fields changed, taken from one another, or named in the OpenAPI document."""

    def __init__(self, rng: random.Random, document: dict[str, Any]) -> None:
        self._rng = rng
        self._values = [(name, value) for _, body in SEEDS for name, value in body.items()]
        self._names = sorted({name for name, _ in self._values} | set(_properties(document)))
        self._paths = sorted(set(_posted(document)) - LEFT_OUT)

    def next(self) -> tuple[str, bytes]:
        """A path and what is posted there."""
        rng = self._rng
        path, seed = rng.choice(SEEDS)
        tree: Any = copy.deepcopy(seed)
        if rng.random() < 0.1:
            path = rng.choice(self._paths)
        for _ in range(rng.choice((0, 0, 1, 1, 2))):
            name, value = rng.choice(self._values)
            tree[name if rng.random() < 0.5 else rng.choice(self._names)] = copy.deepcopy(value)
        tree = change_tree(tree, rng, rng.choice((0, 1, 1, 2, 3)))
        data = json.dumps(tree, default=lambda value: value.decode("latin-1")).encode()
        return path, change_bytes(data, rng) if rng.random() < 0.15 else data


async def run(num_bodies: int, seed: int) -> HttpReport:
    """Post so many bodies. Raises AssertionError with the body in it."""
    report, rng = HttpReport(), random.Random(seed)
    tokenizer = tiny_tokenizer()
    began = time.monotonic()
    async with bench(tokenizer, enable_ollama_api=True) as server, LoopWatch() as watch:
        document = (await server.http.get("/openapi.json")).json()
        bodies = Bodies(rng, document)
        base = rss_mb()
        for number in range(num_bodies):
            path, body = bodies.next()
            watch.worst_s = 0.0
            await post(server, path, body, report)
            if watch.worst_s > report.worst_stall_s:
                report.worst_stall_s, report.worst_body = watch.worst_s, f"{path} {body[:200]!r}"
            assert watch.worst_s < MAX_STALL_S, f"the loop stood still for {watch.worst_s:.1f} s: {path} {body!r}"
            if path in UNDO:
                await server.http.post(UNDO[path])
            server.scheduler.requests.clear()
            server.scheduler.aborts.clear()
            if number == min(WARM_UP, num_bodies // 2):
                gc.collect()
                base = rss_mb()
        sound = await server.http.post(COMPLETIONS, json=SEEDS[6][1])
        assert sound.status_code == 200, f"it no longer answers: {sound.text}"
    gc.collect()
    report.growth_mb = rss_mb() - base
    report.seconds = time.monotonic() - began
    assert report.growth_mb < MAX_GROWTH_MB, str(report)
    return report


async def post(server: Bench, path: str, body: bytes, report: HttpReport) -> None:
    """One body, and what must hold of its answer."""
    began = time.monotonic()
    try:
        answer = await asyncio.wait_for(server.http.post(path, content=body, headers=HEADERS), MAX_ANSWER_S)
    except TimeoutError:
        raise AssertionError(f"no answer within {MAX_ANSWER_S:g} s: {path} {body!r}") from None
    report.slowest_s = max(report.slowest_s, time.monotonic() - began)
    report.num_bodies += 1
    report.statuses[answer.status_code] += 1
    status = answer.status_code
    assert status < 500 or status in ALLOWED_5XX, f"{status}: {answer.text[:300]}\n{path} {body!r}"
    if status >= 400:
        assert error_message(answer), f"{status} without a message: {answer.text[:300]}\n{path} {body!r}"


def error_message(answer: httpx.Response) -> str:
    """What an error says; empty when it is no error object."""
    try:
        return str(inner_error(answer.json())["message"])
    except (ValueError, KeyError):
        return ""


def _posted(document: dict[str, Any]) -> list[str]:
    return [path for path, methods in document["paths"].items() if "post" in methods]


def _properties(node: Any) -> list[str]:
    """The names of all fields that a document describes."""
    if isinstance(node, dict):
        own = list(node.get("properties", {})) if isinstance(node.get("properties"), dict) else []
        return own + [name for value in node.values() for name in _properties(value)]
    return [name for value in node for name in _properties(value)] if isinstance(node, list) else []
