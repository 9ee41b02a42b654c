"""Who waits, and for how long: a full queue says when to come back, and a long prompt does not hold up a short one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import requests

from tests.e2e.harness import Pair, Server, assert_idle, generate_all, running_monolith, running_pair, until
from tests.tiny import VOCAB_SIZE, make_tiny

FLAGS = ("--dtype", "float32", "--max-total-tokens", "16384", "--chunked-prefill-size", "64")
RUNNING, QUEUED, FLOOD = 2, 3, 20
FULL = ("--max-running-requests", str(RUNNING), "--max-queued-requests", str(QUEUED))
Served = Server | Pair


def body(num_prompt: int, new_tokens: int, seed: int = 0) -> dict[str, Any]:
    rng = random.Random(1000 * num_prompt + seed)
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    return {"input_ids": [rng.randrange(3, VOCAB_SIZE) for _ in range(num_prompt)], "sampling_params": sampling}


def post(url: str, fields: dict[str, Any]) -> requests.Response:
    return requests.post(f"{url}/generate", json=fields, timeout=240)


def num_refused(server: Server) -> float:
    """By its scheduler, and by its API process while the scheduler has not seen those before."""
    return server.counter("requests_refused") + server.metrics()["pdserve:requests_refused_by_api_total"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One with a long context."""
    return str(make_tiny("llama", tmp_path_factory.mktemp("long"), max_position_embeddings=16384))


@pytest.fixture(scope="module")
def monolith(model: str) -> Iterator[Server]:
    with running_monolith(model, *FLAGS, *FULL) as server:
        yield server


@pytest.fixture(scope="module")
def pair(model: str) -> Iterator[Pair]:
    with running_pair(model, *FLAGS, decode_flags=FULL) as started:
        yield started


@pytest.fixture(params=["monolith", "pair"])
def served(request: pytest.FixtureRequest) -> Served:
    deployment: Served = request.getfixturevalue(request.param)
    return deployment


def test_a_full_queue_says_when_to_come_back_and_the_server_goes_on(served: Served) -> None:
    url, generates = served.url, served.workers[-1]
    expected = generate_all(url, [body(20, 4)])[0]["output_ids"]
    refused = num_refused(generates)
    with ThreadPoolExecutor(FLOOD) as pool:
        answers = list(pool.map(lambda i: post(url, body(20, 300, seed=i)), range(FLOOD)))
    assert {answer.status_code for answer in answers} == {200, 503}
    for answer in answers:
        if answer.status_code == 200:
            assert len(answer.json()["output_ids"]) == 300
        else:
            assert 1 <= int(answer.headers["Retry-After"]) <= 60
            assert answer.json()["error"]["code"] == "queue_full"
    num_taken = sum(answer.status_code == 200 for answer in answers)
    assert num_taken >= QUEUED, "those that were let in were answered"
    assert num_refused(generates) - refused >= FLOOD - num_taken
    assert_idle(*served.workers)
    assert generate_all(url, [body(20, 4)])[0]["output_ids"] == expected


def test_a_full_queue_on_the_openai_endpoint(monolith: Server) -> None:
    fields = {"prompt": [5, 6, 7], "max_tokens": 300, "ignore_eos": True}
    with ThreadPoolExecutor(FLOOD) as pool:
        answers = list(
            pool.map(lambda _: requests.post(f"{monolith.url}/v1/completions", json=fields, timeout=240), range(FLOOD))
        )
    full = [answer for answer in answers if answer.status_code == 503]
    assert full and all(int(answer.headers["Retry-After"]) >= 1 for answer in full)
    assert {answer.json()["error"]["code"] for answer in full} == {"queue_full"}, full[0].text
    assert_idle(monolith)


def test_a_short_prompt_overtakes_a_long_one(served: Served) -> None:
    """188 chunks of the long prompt are under way when the short one comes, and the short one is answered first."""
    url, computes = served.url, served.workers[0]
    ended: list[str] = []
    with ThreadPoolExecutor(4) as pool:
        calls: list[Future[requests.Response]] = []

        def ask(name: str, fields: dict[str, Any]) -> None:
            call = pool.submit(post, url, fields)
            call.add_done_callback(lambda _: ended.append(name))
            calls.append(call)

        ask("long", body(12_000, 1))
        until(lambda: computes.state()["num_running_reqs"] == 1, 20, "the long prompt is being computed")
        ask("short", body(100, 1))
        answers = [call.result() for call in calls]
    assert [answer.status_code for answer in answers] == [200, 200], [answer.text for answer in answers]
    assert ended == ["short", "long"]
    assert_idle(*served.workers)


PRIORITIES = ("--max-running-requests", "1", "--max-queued-requests", "3", "--enable-priority-scheduling")


@pytest.fixture(scope="module")
def urgent_monolith(model: str) -> Iterator[Server]:
    with running_monolith(model, *FLAGS, *PRIORITIES) as server:
        yield server


@pytest.fixture(scope="module")
def urgent_pair(model: str) -> Iterator[Pair]:
    with running_pair(model, *FLAGS, *PRIORITIES) as started:
        yield started


@pytest.mark.slow
@pytest.mark.parametrize("deployment", ["urgent_monolith", "urgent_pair"])
def test_an_urgent_request_takes_the_row_of_a_running_one_which_goes_on_later(
    request: pytest.FixtureRequest, deployment: str
) -> None:
    served: Served = request.getfixturevalue(deployment)
    url, generates = served.url, served.workers[-1]
    bodies = [body(20, 1500, seed=1), body(30, 300, seed=2), body(40, 40, seed=3)]
    expected = [generate_all(url, [fields])[0]["output_ids"] for fields in bodies]
    ended: list[int] = []
    with ThreadPoolExecutor(len(bodies)) as pool:
        calls: list[Future[requests.Response]] = []
        for index, priority in enumerate((0, 10, 20)):
            call = pool.submit(post, url, bodies[index] | {"priority": priority})
            call.add_done_callback(lambda _, index=index: ended.append(index))
            calls.append(call)
            until(lambda: generates.state()["num_running_reqs"] == 1, 20, "the first request is running")
        answers = [call.result().json() for call in calls]
    assert ended == [2, 1, 0], "the second is urgent by no more than the threshold"
    assert [answer["output_ids"] for answer in answers] == expected
    assert generates.counter("requests_preempted") == 1
    assert_idle(*served.workers)
