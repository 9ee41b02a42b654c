"""Thinking budgets, logit processors, sessions and stored responses of real servers: a monolith and a pair."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import requests

from tests.e2e import harness
from tests.e2e.harness import Pair, Server, assert_idle, running, running_pair, start_server
from tests.example_plugins import installed_in
from tests.tiny import Family, tiny_tokenizer

FLAGS = (
    "--dtype", "float32", "--max-total-tokens", "8192", "--reasoning-parser", "deepseek-r1",
    "--logit-processors", "only_tokens", "--speculative-algorithm", "NGRAM",
)  # fmt: skip
CLOSING = tiny_tokenizer().encode("\n</think>", add_special_tokens=False)
BUDGET = 9
ASK: Any = [{"role": "user", "content": "Think about it."}]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def servers(
    tiny_checkpoint: Callable[[Family], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Pair]]:
    """With the example plug-ins installed."""
    model = str(tiny_checkpoint("llama"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness, "fork_server", None)  # its processes read no other PYTHONPATH
        for entry in reversed(installed_in(tmp_path_factory.mktemp("plugins") / "installed")):
            patch.setenv("PYTHONPATH", entry, prepend=":")
        monolith = start_server(model, "null", *FLAGS)
        with running(monolith), running_pair(model, *FLAGS, "--disaggregation-transfer-backend", "shm") as pair:
            yield monolith, pair
            assert_idle(monolith, pair.prefill, pair.decode)


def generate(url: str, **body: Any) -> dict[str, Any]:
    answer = requests.post(f"{url}/generate", json=body, timeout=200)
    assert answer.status_code == 200, answer.text
    made: dict[str, Any] = answer.json()
    return made


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1, "sampling_seed": 4}])
def test_a_thinking_budget_ends_the_reasoning_at_one_place(
    servers: tuple[Server, Pair], sampling: dict[str, Any]
) -> None:
    params = {"max_new_tokens": 40, "ignore_eos": True, "custom_params": {"thinking_budget": BUDGET}, **sampling}
    answers = [
        generate(server.url, input_ids=list(range(5, 30)), sampling_params={**params, "speculative": speculative})
        for server in servers
        for speculative in (True, False)
    ]
    outputs = [answer["output_ids"] for answer in answers]
    assert outputs[1:] == outputs[:-1]
    assert outputs[0][BUDGET : BUDGET + len(CLOSING)] == CLOSING
    for budget in (0, 1):
        params["custom_params"] = {"thinking_budget": budget}
        found = generate(servers[1].url, input_ids=[7, 8], sampling_params=params)["output_ids"]
        assert found[budget : budget + len(CLOSING)] == CLOSING, "prefill samples the first token"


def test_chats_and_messages_have_their_budget_through_the_router(servers: tuple[Server, Pair]) -> None:
    url = servers[1].url
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=200)
    extra = {"custom_params": {"thinking_budget": BUDGET}, "ignore_eos": True}
    made = client.chat.completions.create(model="m", messages=ASK, max_tokens=40, extra_body=extra)
    assert made.usage is not None and made.usage.completion_tokens_details is not None
    assert made.usage.completion_tokens_details.reasoning_tokens == BUDGET + len(CLOSING)
    followed = client.chat.completions.create(
        model="m", messages=ASK, max_tokens=60, extra_body={**extra, "regex": "[ab]{9}"}
    )
    assert re.fullmatch("[ab]{9}", followed.choices[0].message.content or ""), followed
    body = {"model": "m", "messages": ASK, "max_tokens": 40, "ignore_eos": True,
            "thinking": {"type": "enabled", "budget_tokens": BUDGET}}  # fmt: skip
    answer = requests.post(f"{url}/v1/messages", json=body, timeout=200).json()
    assert answer["usage"]["output_tokens_details"]["thinking_tokens"] == BUDGET + len(CLOSING), answer


def test_a_logit_processor_of_an_installed_package(servers: tuple[Server, Pair]) -> None:
    ids = [40, 50, 60]
    for server in servers:
        params = {"max_new_tokens": 12, "ignore_eos": True, "custom_params": {"token_ids": ids}}
        body = {"input_ids": [5, 6, 7], "sampling_params": params, "custom_logit_processor": "only_tokens"}
        assert set(generate(server.url, **body)["output_ids"]) <= set(ids)
        params["custom_params"] = {}
        answer = requests.post(f"{server.url}/generate", json=body, timeout=200)
        assert answer.status_code == 400 and "custom_logit_processor of this request failed" in answer.text


@pytest.mark.parametrize("through", ["monolith", "router"])
def test_a_session_has_the_answers_of_whole_prompts(servers: tuple[Server, Pair], through: str) -> None:
    url = servers[through == "router"].url
    session = requests.post(f"{url}/open_session", json={"capacity_of_str_len": 5000}, timeout=60).json()
    prompt: list[int] = []
    rid = None
    for new in ([5, 6, 7], [8], [9, 10]):
        params: Any = {"temperature": 0, "max_new_tokens": 8}
        fields = {"id": session, **({} if rid is None else {"rid": rid})}
        answer = generate(url, input_ids=new, sampling_params=params, session_params=fields)
        rid = answer["meta_info"]["id"]
        prompt += new
        whole = generate(url, input_ids=prompt, sampling_params=params)
        assert answer["output_ids"] == whole["output_ids"]
        assert answer["meta_info"]["prompt_tokens"] == len(prompt)
        prompt += answer["output_ids"]
    assert requests.post(f"{url}/close_session", json={"session_id": session}, timeout=60).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_stored_responses_of_monolith_and_router(servers: tuple[Server, Pair], stream: bool) -> None:
    texts = []
    for server in servers:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=200)

        def ask(text: str, client: openai.OpenAI = client, **fields: Any) -> Any:
            made = client.responses.create(
                model="m", input=text, stream=stream, temperature=0, max_output_tokens=8, **fields
            )
            return list(made)[-1].response if stream else made

        first = ask("one")
        second = ask("two", previous_response_id=first.id)
        third = ask("three", previous_response_id=second.id)
        items = client.responses.input_items.list(third.id, order="asc").data
        assert len(items) == 3 + len(first.output) + len(second.output)
        assert client.responses.retrieve(third.id).model_dump() == third.model_dump()
        client.responses.delete(third.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(third.id)
        texts.append([[item.model_dump(exclude={"id"}) for item in each.output] for each in (first, second, third)])
    assert texts[0] == texts[1]
