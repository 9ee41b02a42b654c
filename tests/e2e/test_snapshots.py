"""Real requests that stop and go on: in an LLM, in another one, and over HTTP with grammar and log probabilities."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pdserve import LLM, InvalidRequestError, RequestOutput, SamplingParams
from tests.e2e.test_python_api import QUIET, SMALL
from tests.tiny import VOCAB_SIZE, Family
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("forked_hosts")

NUM_TOKENS = 250
PROMPT = [(7 * j) % (VOCAB_SIZE - 3) + 3 for j in range(40)]
LONG: dict[str, Any] = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.9, "seed": 3, "frequency_penalty": 0.5, "logprobs": 2},
    "unseeded": {"temperature": 1.0},
}


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Callable[[Family], Path]) -> str:
    return str(tiny_checkpoint("llama"))


@pytest.fixture(scope="module")
def mono(model: str) -> Iterator[LLM]:
    with LLM(model, **SMALL) as llm:
        yield llm


@pytest.fixture(scope="module")
def pair(model: str) -> Iterator[LLM]:
    with LLM(model, disaggregation=True, **SMALL) as llm:
        yield llm


def stopped(llm: LLM, params: SamplingParams, stop: Callable[[str], Any], **given: Any) -> tuple[RequestOutput, Any]:
    """Run a request and stop it early; its output so far, and what `stop` returned."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(llm.generate, [PROMPT], params, request_ids=["a"], **QUIET, **given)
        wait_until(lambda: "a" in llm.running() or running.done(), "the request runs")
        kept = stop("a")
        return running.result()[0], kept


def assert_same(output: RequestOutput, expected: RequestOutput) -> None:
    """Tokens are equal; log probabilities up to the last bits, which depend on how a prompt is cut."""
    one, other = output.outputs[0], expected.outputs[0]
    assert (one.token_ids, one.text, one.finish_reason) == (other.token_ids, other.text, other.finish_reason)
    assert len(one.logprobs or ()) == len(other.logprobs or ())
    for line, wanted in zip(one.logprobs or (), other.logprobs or (), strict=True):
        values = {token: entry.logprob for token, entry in wanted.items()}
        assert {token: entry.logprob for token, entry in line.items()} == pytest.approx(values, abs=1e-3)


@pytest.mark.parametrize(
    "kind", ["seeded", pytest.param("greedy", marks=pytest.mark.slow), pytest.param("unseeded", marks=pytest.mark.slow)]
)
def test_an_extracted_request_goes_on_with_the_same_tokens(mono: LLM, kind: str) -> None:
    params = SamplingParams(**LONG, **KINDS[kind])
    output, snapshot = stopped(mono, params, lambda rid: mono.extract(rid, kv="bytes", keep=True))
    for kv in ("require", "ignore"):
        assert_same(mono.restore(snapshot, kv=kv), output)
    begun, snapshot = stopped(mono, params, mono.extract)
    answer = begun.outputs[0]
    assert answer.finish_reason == "suspended" and len(answer.token_ids) < NUM_TOKENS
    if kind != "unseeded":  # each call without a seed draws another one
        assert_same(mono.restore(snapshot), output)
    assert mono.running() == [] and mono.reset_prefix_cache()


@pytest.mark.slow
def test_a_request_of_a_pair_goes_on_elsewhere_and_back(mono: LLM, pair: LLM) -> None:
    params = SamplingParams(**LONG, **KINDS["seeded"])
    whole = mono.generate([PROMPT], params, **QUIET)[0]
    begun, snapshot = stopped(pair, params, lambda rid: pair.extract(rid, kv="bytes"))
    assert begun.outputs[0].finish_reason == "suspended"
    for restored in (mono.restore(snapshot), pair.restore(snapshot), pair.restore(snapshot, kv="ignore")):
        assert_same(restored, whole)
    assert mono.reset_prefix_cache() and pair.reset_prefix_cache()


def test_a_suspended_request_is_resumed_and_what_is_wrong_is_said(mono: LLM) -> None:
    params = SamplingParams(**LONG, **KINDS["greedy"])
    whole = mono.generate([PROMPT], params, **QUIET)[0]
    stopped(mono, params, mono.suspend)
    assert_same(asyncio.run(mono.resume_async("a")), whole)
    for call in (mono.resume, mono.suspend, mono.extract):
        with pytest.raises(InvalidRequestError) as caught:
            call("a")
        assert caught.value.field in ("rid", "request_id")
    _, snapshot = stopped(mono, params, mono.extract)
    with pytest.raises(InvalidRequestError) as caught:
        mono.restore(snapshot[:-1])
    assert caught.value.field == "snapshot.length"
