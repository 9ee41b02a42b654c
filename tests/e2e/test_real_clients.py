"""Clients of other projects against a pair behind the router, unchanged: lm-eval, litellm, bench_serving, anthropic."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import ollama
import pytest
import requests
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.harness import Pair, assert_idle, running_pair
from tests.tiny import Family

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
TASKS = Path(__file__).parent / "lm_eval"
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


@pytest.fixture(scope="module")
def clients() -> Path:
    """The Python that has them."""
    subprocess.run([ROOT / "scripts" / "setup_clients.sh"], check=True, timeout=900)
    return ROOT / ".venv-clients" / "bin" / "python"


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Callable[[Family], Path]) -> Path:
    return tiny_checkpoint("llama")


@pytest.fixture(scope="module")
def pair(model: Path) -> Iterator[Pair]:
    with running_pair(
        str(model),
        "--served-model-name",
        "tiny",
        "--max-total-tokens",
        "8192",
        "--dtype",
        "float32",
        "--enable-ollama-api",
    ) as it:
        yield it


def run(*argv: object, timeout: float = 300) -> str:
    """What the program printed; it must end well."""
    done = subprocess.run(
        [str(word) for word in argv],
        env={**os.environ, **OFFLINE},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def test_lm_eval_sees_the_likelihoods_of_transformers(clients: Path, pair: Pair, model: Path, tmp_path: Path) -> None:
    """Its multiple choice asks for echo, no tokens, and log probabilities of prompts, which prefill hands over."""
    data = TASKS / "pages_choice.jsonl"
    task = (TASKS / "pages_choice.yaml").read_text() + f"dataset_kwargs:\n  data_files:\n    test: {data}\n"
    (tmp_path / "pages_choice.yaml").write_text(task)
    args = f"model=tiny,tokenizer={model},base_url={pair.url}/v1/completions,tokenized_requests=False,num_concurrent=2"
    output = tmp_path / "out"
    run(
        *(clients, "-m", "lm_eval", "--model", "local-completions", "--model_args", args),
        *("--include_path", tmp_path, "--tasks", "pages_choice", "--output_path", output, "--log_samples"),
    )
    (samples,) = output.rglob("samples_*.jsonl")
    tokenizer, reference = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    assert len(rows) == 8
    for row in rows:
        question = tokenizer.encode(row["doc"]["question"])
        for choice, response in zip(row["doc"]["choices"], row["resps"], strict=True):
            ids = tokenizer.encode(row["doc"]["question"] + choice)
            with torch.inference_mode():
                logprobs = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
            expected = sum(float(logprobs[i - 1, ids[i]]) for i in range(len(question), len(ids)))
            assert float(response[0][0]) == pytest.approx(expected, abs=1e-2)
    assert_idle(pair.prefill, pair.decode)


@pytest.mark.parametrize("backend", ["sglang", "sglang-oai", "sglang-oai-chat", "vllm"])
def test_bench_serving_of_sglang(clients: Path, pair: Pair, model: Path, tmp_path: Path, backend: str) -> None:
    (script,) = (ROOT / ".venv-clients").rglob("sglang/bench_serving.py")
    results = tmp_path / "results.jsonl"
    run(
        *(clients, script, "--backend", backend, "--base-url", pair.url, "--model", model, "--tokenizer", model),
        *(
            "--served-model-name",
            "tiny",
            "--dataset-name",
            "random-ids",
            "--num-prompts",
            "12",
            "--output-file",
            results,
        ),
        *("--random-input-len", "40", "--random-output-len", "16", "--seed", "3"),
    )
    result: dict[str, Any] = json.loads(results.read_text())
    assert result["completed"] == 12
    assert_idle(pair.prefill, pair.decode)


def test_litellm(clients: Path, pair: Pair) -> None:
    program = (
        "import litellm, sys\n"
        "ask = dict(model='openai/tiny', api_base=sys.argv[1], api_key='none', max_tokens=8, temperature=0)\n"
        "ask['messages'] = [{'role': 'user', 'content': 'Tell me of pages.'}]\n"
        "whole = litellm.completion(**ask).choices[0].message.content\n"
        "parts = litellm.completion(stream=True, **ask)\n"
        "assert ''.join(part.choices[0].delta.content or '' for part in parts) == whole, whole\n"
        "print('same', len(whole))\n"
    )
    assert "same" in run(clients, "-c", program, f"{pair.url}/v1")
    assert_idle(pair.prefill, pair.decode)


def test_anthropic(pair: Pair) -> None:
    """The SDK, through the router: whole, streamed, counted, and a key in its own header."""
    with anthropic.Anthropic(base_url=pair.url, api_key="none", max_retries=0) as client:
        ask: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Tell me of pages."}]}
        greedy: Any = {"extra_body": {"temperature": 0, "ignore_eos": True}}
        whole = client.messages.create(**ask, max_tokens=12, **greedy)
        assert (whole.stop_reason, whole.usage.output_tokens) == ("max_tokens", 12)
        with client.messages.stream(**ask, max_tokens=12, **greedy) as stream:
            streamed = stream.get_final_message()
        assert [block.to_dict() for block in streamed.content] == [block.to_dict() for block in whole.content]
        used = streamed.usage
        counted = client.messages.count_tokens(**ask).input_tokens
        assert used.input_tokens + (used.cache_read_input_tokens or 0) == counted
        assert [model.id for model in client.models.list()] == ["tiny"] and client.models.retrieve("tiny").id == "tiny"
        image: Any = {"type": "image", "source": {"type": "url", "url": "http://x"}}
        with pytest.raises(anthropic.BadRequestError, match="image"):
            client.messages.create(model="tiny", max_tokens=1, messages=[{"role": "user", "content": [image]}])
    assert_idle(pair.prefill, pair.decode)


def test_a_session_of_a_coding_tool_over_anthropics_api(pair: Pair) -> None:
    """The shapes of Claude Code: betas, many system blocks and tools, thinking, a tool's result, errors, no version."""
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "properties": {}}
    mark: Any = {"cache_control": {"type": "ephemeral"}}
    shape: dict[str, Any] = {
        "model": "tiny",
        "system": [{"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1;"}]
        + [{"type": "text", "text": f"Rule {number}.", **mark} for number in range(40)],
        "tools": [{"name": f"mcp__server__tool_{number}", "input_schema": schema} for number in range(20)],
        "metadata": {"user_id": "user_1_session_2"},
        "thinking": {"type": "adaptive"},
        "betas": ["claude-code-20250219", "interleaved-thinking-2025-05-14"],
    }
    first: Any = {"role": "user", "content": [{"type": "text", "text": "Read the pages.", **mark}]}
    with anthropic.Anthropic(base_url=pair.url, api_key="none", max_retries=0) as client:
        prompt = {name: value for name, value in shape.items() if name != "metadata"}
        counted = client.beta.messages.count_tokens(**prompt, messages=[first]).input_tokens
        with client.beta.messages.stream(**shape, messages=[first], max_tokens=16) as stream:
            said = stream.get_final_message()
        used = said.usage
        assert used.input_tokens + (used.cache_read_input_tokens or 0) == counted
        call: Any = {"type": "tool_use", "id": "toolu_1", "name": "mcp__server__tool_3", "input": {}}
        thought: Any = {"type": "thinking", "thinking": "Which page?", "signature": "of another server"}
        result: Any = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "p. 1"}]}
        turns: Any = [first, {"role": "assistant", "content": [thought, *said.to_dict()["content"], call]}]
        turns.append({"role": "user", "content": [{**result, "is_error": False, **mark}]})
        again = client.beta.messages.create(**shape, messages=turns, max_tokens=8)
        assert again.usage.input_tokens + (again.usage.cache_read_input_tokens or 0) > counted
        for changes, field in (
            ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
            ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ):
            with pytest.raises(anthropic.BadRequestError) as refused:
                client.beta.messages.create(**{**shape, "messages": [first], "max_tokens": 8, **changes})
            assert refused.value.body["error"]["param"] == field and refused.value.request_id  # type: ignore[index]
    bare = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "Tell me."}]}
    assert requests.post(f"{pair.url}/v1/messages", json=bare, timeout=60).status_code == 200  # without a version
    assert_idle(pair.prefill, pair.decode)


def test_ollama(pair: Pair) -> None:
    """The client, through the router."""
    client = ollama.Client(host=pair.url)
    options: Any = {"temperature": 0, "num_predict": 12}
    messages = [{"role": "user", "content": "Tell me of pages."}]
    whole = client.chat("tiny", messages, options=options)
    assert whole.done_reason in ("stop", "length") and whole.eval_count is not None and whole.eval_count <= 12
    parts = list(client.chat("tiny", messages, options=options, stream=True))
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert client.generate("tiny", "Tell me", raw=True, options=options).eval_count is not None
    assert [model.model for model in client.list().models] == ["tiny"] and client.show("tiny").capabilities
    assert_idle(pair.prefill, pair.decode)


def test_litellm_over_anthropics_api(clients: Path, pair: Pair) -> None:
    program = (
        "import litellm, sys\n"
        "ask = dict(model='anthropic/tiny', api_base=sys.argv[1], api_key='none', max_tokens=8, temperature=0)\n"
        "ask['messages'] = [{'role': 'user', 'content': 'Tell me of pages.'}]\n"
        "whole = litellm.completion(**ask).choices[0].message.content\n"
        "parts = litellm.completion(stream=True, **ask)\n"
        "assert ''.join(part.choices[0].delta.content or '' for part in parts) == whole, whole\n"
        "print('same', len(whole))\n"
    )
    assert "same" in run(clients, "-c", program, pair.url)
    assert_idle(pair.prefill, pair.decode)
