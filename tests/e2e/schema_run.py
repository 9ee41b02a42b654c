"""Random JSON schemas against real servers: every answer parses and validates, streamed or not, and a monolith and a
pair say the same. Used by the tests of structured output; as a command, a larger run:

    python -m tests.e2e.schema_run --count 200
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import requests

from tests.e2e.harness import assert_idle, running, running_pair, start_server
from tests.schemas import Schema, check, random_schema

MODEL = "smollm2"
FLAGS = ("--enable-deterministic-inference", "--max-total-tokens", "40000")
"""So that tokens do not depend on what else is computed, and may be compared however the requests meet."""
MAX_TOKENS = 1500
TASKS = ("Invent an example.", "Describe a parcel on its way.", "What did you have for breakfast?", "Say something.")


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a client sees of one answer."""

    text: str
    finish_reason: str
    num_tokens: int


def ask(url: str, schema: Schema, task: str, *, stream: bool) -> Answer:
    """One chat with `response_format`, greedy."""
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": f"{task} Answer in JSON."}],
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
    }
    if not stream:
        answer = requests.post(f"{url}/v1/chat/completions", json=body, timeout=900)
        assert answer.status_code == 200, answer.text
        value = answer.json()
        choice = value["choices"][0]
        return Answer(choice["message"]["content"], choice["finish_reason"], value["usage"]["completion_tokens"])
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    with requests.post(f"{url}/v1/chat/completions", json=body, stream=True, timeout=900) as answer:
        assert answer.status_code == 200, answer.text
        lines = [line[6:] for line in answer.iter_lines() if line.startswith(b"data: ")]
    assert lines[-1] == b"[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    assert len(reasons) == 1
    return Answer(text, reasons[0], chunks[-1]["usage"]["completion_tokens"])


def try_schema(urls: Sequence[str], schema: Schema, task: str) -> Answer:
    """The answer of all `urls`, streamed and not; raises where they differ, or where it does not follow `schema`."""
    answers = [ask(url, schema, task, stream=stream) for url in urls for stream in (False, True)]
    assert len(set(answers)) == 1, f"{answers} for {json.dumps(schema)}"
    assert answers[0].finish_reason == "stop", f"{answers[0]} for {json.dumps(schema)}"
    check(answers[0].text, schema)
    return answers[0]


def main() -> None:
    """See the file's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="schemas")
    parser.add_argument("--seed", type=int, default=0, help="of the first schema")
    parser.add_argument("--concurrency", type=int, default=8, help="schemas that are tried at once")
    args = parser.parse_args()
    monolith = start_server(MODEL, "null", *FLAGS)
    with running(monolith), running_pair(MODEL, *FLAGS) as pair:
        urls = (monolith.url, pair.url)
        began_s = time.monotonic()

        def one(seed: int) -> Answer | str:
            rng = random.Random(seed)
            try:
                return try_schema(urls, random_schema(rng, depth=2), rng.choice(TASKS))
            except Exception as error:
                return f"seed {seed}: {type(error).__name__}: {error}"

        with ThreadPoolExecutor(args.concurrency) as threads:
            results = list(threads.map(one, range(args.seed, args.seed + args.count)))
        assert_idle(monolith, pair.prefill, pair.decode)
        wrong = [result for result in results if isinstance(result, str)]
        good = [result for result in results if isinstance(result, Answer)]
        tokens = sum(answer.num_tokens for answer in good)
        print("\n".join(wrong))
        print(
            f"{len(good)} of {args.count} schemas: all answers parse, validate, and are equal over monolith and pair, "
            f"streamed and not; {tokens} tokens an answer's way, {4 * tokens} in all, "
            f"{time.monotonic() - began_s:.0f} s at {args.concurrency} at once"
        )
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
