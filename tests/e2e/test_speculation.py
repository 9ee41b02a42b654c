"""Speculative decoding changes no answer: token by token, and bit by bit in log probabilities, with and without drafts.

The CPU kernels compute a verify step with the bits of decode steps, so answers are compared exactly: of a monolith, of
pairs over Mooncake and shared memory, of two ranks; greedy and drawn, with penalties, biases, grammars and stops.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.e2e.harness import (
    Pair,
    Server,
    assert_idle,
    generate_all,
    generate_batch,
    generate_while_some_leave,
    running_monolith,
    running_pair,
)
from tests.tiny import EOS_ID, VOCAB_SIZE, Family
from tests.unit.model.native_kit import needs_kernels

pytestmark = [needs_kernels, pytest.mark.timeout(300)]
Served = Server | Pair
Body = dict[str, Any]

COMMON = ("--dtype", "bfloat16", "--max-total-tokens", "16384", "--chunked-prefill-size", "64")
NGRAM = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "6")
ALWAYS = (*NGRAM, "--no-speculative-adaptive", "--speculative-ngram-min-match-window-size", "1")
"""Drafts behind every token that has occurred before, most of them wrong."""
LITTLE = ("--max-total-tokens", "768", "--schedule-conservativeness", "0.1", "--num-reserved-decode-tokens", "8")
OFFLOAD = "--disaggregation-decode-retraction-backup=cpu_tensor"
NEW_TOKENS = 56
FEW = {"70": 14.0, "71": 14.0, "72": 14.0}
"""A bias with which nearly all draws are of three tokens, so that drafts are right by chance."""
SOME = {str(token): 9.0 for token in range(70, 82)}
PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["abc", "abd"]}, "ages": {"type": "array", "items": {"enum": [11, 12]}}},
    "required": ["name", "ages"],
    "additionalProperties": False,
}


def drawn(seed: int, **more: Any) -> Body:
    return {"temperature": 1.0, "sampling_seed": seed, **more}


SAMPLINGS: dict[str, Body] = {
    "greedy": {"temperature": 0},
    "drawn": drawn(1),
    "drawn among few": drawn(2, logit_bias=FEW),
    "drawn among two": drawn(3, top_k=2),
    "nucleus": drawn(4, top_p=0.6, logit_bias=SOME),
    "min_p": drawn(5, min_p=0.2, logit_bias=SOME),
    "hot": {"temperature": 1.7, "sampling_seed": 6, "logit_bias": FEW},
    "greedy with a bias": {"temperature": 0, "logit_bias": {"75": 4.0, "76": 4.0, "77": -50.0}},
    "greedy with penalties": {"temperature": 0, "repetition_penalty": 1.2, "frequency_penalty": 0.1},
    "drawn with penalties": drawn(7, frequency_penalty=0.6, presence_penalty=0.4, logit_bias=FEW),
    "repetition penalty": drawn(8, repetition_penalty=1.3, logit_bias=SOME),
    "EOS banned at first": drawn(9, logit_bias={**FEW, str(EOS_ID): 13.0}, min_new_tokens=23, ignore_eos=False),
    "stop token": drawn(10, logit_bias={**FEW, "75": 11.5}, stop_token_ids=[75], min_new_tokens=9),
    "regex": drawn(11, regex="(ab|ac|b){12,40}"),
    "greedy regex": {"temperature": 0, "regex": "(abc|abd){5,30}"},
    "JSON": {"temperature": 0, "json_schema": json.dumps(PERSON)},
    "drawn JSON": drawn(12, json_schema=json.dumps(PERSON)),
    "one token": drawn(13, max_new_tokens=1, logit_bias=FEW),
    "two tokens": drawn(14, max_new_tokens=2, logit_bias=FEW),
    "cut in a run": drawn(15, max_new_tokens=13, logit_bias=FEW),
}


def bodies() -> list[Body]:
    """A request for each of `SAMPLINGS`. Prompts repeat themselves, and some begin alike."""
    rng = random.Random(31)
    phrases = [[rng.randrange(3, VOCAB_SIZE) for _ in range(5)] for _ in range(4)]
    shared = [token for _ in range(8) for token in rng.choice(phrases)]
    made = []
    for number, sampling in enumerate(SAMPLINGS.values()):
        own = [token for _ in range(1 + 5 * (number % 5)) for token in rng.choice(phrases)]
        made.append(
            {
                "input_ids": shared + own if number % 3 else own,
                "sampling_params": {"max_new_tokens": NEW_TOKENS, "ignore_eos": True, **sampling},
                "return_logprob": True,
                "top_logprobs_num": 3,
                "token_ids_logprob": [70, 71],
            }
        )
    return made


def leaving_bodies() -> list[Body]:
    rng = random.Random(32)
    sampling = {"max_new_tokens": 300, "ignore_eos": True, **drawn(20, logit_bias=FEW)}
    return [
        {"input_ids": [rng.randrange(3, VOCAB_SIZE) for _ in range(20 + 30 * number)], "sampling_params": sampling}
        for number in range(5)
    ]


def exact(answer: dict[str, Any]) -> dict[str, Any]:
    """Everything that must be equal; floats as the JSON had them, which is every bit."""
    meta = answer["meta_info"]
    names = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs", "finish_reason")
    lists = {name: meta.get(name) for name in names}
    return {"ids": answer["output_ids"], "text": answer["text"], "count": meta["completion_tokens"], **lists}


def compare(answers: Sequence[dict[str, Any]], expected: Sequence[dict[str, Any]], when: str) -> None:
    """Compare the answers to `bodies()`."""
    for name, answer, wanted in zip(SAMPLINGS, answers, expected, strict=True):
        assert answer["output_ids"] == wanted["output_ids"], f"{name}, {when}"
        assert exact(answer) == exact(wanted), f"{name}, {when}"


def check(served: Served, expected: Sequence[dict[str, Any]], *, retracts: bool = False) -> None:
    """All at once from an empty cache; then from cached prompts one by one, and while other clients leave."""
    decode = served.workers[-1]
    compare(generate_batch(served.url, bodies()), expected, "all at once")
    assert (decode.counter("requests_retracted") > 0) == retracts
    alone = [generate_all(served.url, [body])[0] for body in bodies()]
    compare(alone, expected, "alone")
    assert any(answer["meta_info"]["cached_tokens"] for answer in alone)
    compare(generate_while_some_leave(served.url, bodies(), leaving_bodies()), expected, "while clients leave")
    assert decode.counter("requests_aborted") > 0
    assert_idle(*served.workers)
    check_numbers(decode, alone)


def check_numbers(decode: Server, alone: Sequence[dict[str, Any]]) -> None:
    """What the answers and the server say of their drafts adds up."""
    found = [answer["meta_info"] for answer in alone if "spec_verify_ct" in answer["meta_info"]]
    assert len(found) > len(alone) // 2
    for meta in found:
        histogram = meta["spec_accept_histogram"]
        assert sum(histogram) == meta["spec_verify_ct"] > 0
        assert sum(k * count for k, count in enumerate(histogram)) == meta["spec_accept_token_num"]
        assert meta["spec_accept_token_num"] <= meta["spec_draft_token_num"]
        assert meta["spec_accept_token_num"] + meta["spec_verify_ct"] <= meta["completion_tokens"]
    accepted, drafts = (sum(meta[name] for meta in found) for name in ("spec_accept_token_num", "spec_draft_token_num"))
    assert 0 < accepted < drafts, "right and wrong drafts"
    counters = decode.state()["counters"]
    by_position = [value for name, value in sorted(counters.items()) if name.startswith("spec_accepted_at.")]
    assert counters["spec_accepted_tokens"] == sum(by_position) >= accepted
    assert counters["spec_draft_tokens"] >= counters["spec_verify_steps"] > 0
    metrics = decode.metrics()
    assert metrics["pdserve:spec_accepted_tokens_total"] == counters["spec_accepted_tokens"]
    assert metrics["sglang:spec_accept_length"] >= 0


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Callable[[Family], Path]) -> str:
    return str(tiny_checkpoint("qwen3"))


@pytest.fixture(scope="module")
def plain(model: str) -> Iterator[Server]:
    """A monolith without speculation."""
    with running_monolith(model, *COMMON) as server:
        yield server
        assert_idle(server)


@pytest.fixture(scope="module")
def expected(plain: Server) -> list[dict[str, Any]]:
    """What the monolith without speculation answers."""
    answers = generate_all(plain.url, bodies())
    ends = {name: answer["meta_info"]["finish_reason"]["type"] for name, answer in zip(SAMPLINGS, answers, strict=True)}
    assert {ends[name] for name in ("stop token", "EOS banned at first", "JSON")} == {"stop"}, ends
    assert not [name for answer in answers for name in answer["meta_info"] if name.startswith("spec_")]
    return answers


def test_a_monolith(model: str, plain: Server, expected: list[dict[str, Any]]) -> None:
    with running_monolith(model, *COMMON, *ALWAYS) as server:
        check(server, expected)
        check_stop_strings(plain, server)
        check_streams(plain, server)
        check_turned_off(server, expected)
        assert server.state()["speculative_algorithm"] == "NGRAM"


def check_stop_strings(plain: Server, speculating: Served) -> None:
    """Every piece of a text as its stop string: most matches end inside a run of accepted tokens."""
    body = bodies()[2]
    text = generate_all(plain.url, [body])[0]["text"]
    stops = sorted({text[at : at + 3] for at in range(8, len(text) - 3, 4)})
    asked = [
        {**body, "sampling_params": {**body["sampling_params"], "stop": [stop], "no_stop_trim": number % 2 == 0}}
        for number, stop in enumerate(stops)
    ]
    asked.append(
        {**body, "sampling_params": {**body["sampling_params"], "stop_regex": r"F[GH]+F", "max_new_tokens": 40}}
    )
    expected = [exact(answer) for answer in generate_all(plain.url, asked)]
    answers = generate_all(speculating.url, asked)
    assert [exact(answer) for answer in answers] == expected
    assert sum(answer["finish_reason"]["type"] == "stop" for answer in expected) >= len(stops)
    assert all(answer["meta_info"].get("spec_draft_token_num") for answer in answers), "numbers come with stops, too"


def check_streams(plain: Served, speculating: Served) -> None:
    """Streams of `/generate` and of completions: the pieces together are the whole answer."""
    for number in (0, 2, 13):
        body = bodies()[number]
        whole = exact(generate_all(plain.url, [body])[0])
        with requests.post(
            f"{speculating.url}/generate", json={**body, "stream": True}, stream=True, timeout=120
        ) as answer:
            events = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith(b"data: {")]
        assert exact(events[-1]) == whole
        assert len(events) < whole["count"], "some events have several tokens"
    chat = {
        "messages": [{"role": "user", "content": "one two one two"}],
        "seed": 3,
        "max_tokens": 40,
        "logit_bias": FEW,
    }
    answers = [
        requests.post(
            f"{served.url}/v1/chat/completions", json={**chat, "logprobs": True, "top_logprobs": 2}, timeout=120
        )
        for served in (plain, speculating)
    ]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].json()["choices"] == answers[1].json()["choices"]
    details = answers[1].json()["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"] > 0


def check_turned_off(server: Server, expected: Sequence[dict[str, Any]]) -> None:
    """With `speculative` false no drafts are verified, and the answers are the same."""
    before = server.counter("spec_verify_steps")
    off = [{**body, "sampling_params": {**body["sampling_params"], "speculative": False}} for body in bodies()]
    compare(generate_all(server.url, off), expected, "turned off")
    assert server.counter("spec_verify_steps") == before


@pytest.mark.slow
def test_an_adaptive_monolith(model: str, expected: list[dict[str, Any]]) -> None:
    with running_monolith(model, *COMMON, *NGRAM) as server:
        compare(generate_all(server.url, bodies()), expected, "adaptive")
        compare(generate_all(server.url, bodies()), expected, "with past outputs")
        assert_idle(server)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), (OFFLOAD,)], ids=["recompute", "offload"])
def test_a_monolith_short_of_memory(flags: tuple[str, ...], model: str, expected: list[dict[str, Any]]) -> None:
    with running_monolith(model, *COMMON, *ALWAYS, *LITTLE, *flags) as server:
        check(server, expected, retracts=True)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["mooncake", "shm"])
@pytest.mark.parametrize("page_size", ["1", "16"])
def test_a_pair(backend: str, page_size: str, model: str, plain: Server, expected: list[dict[str, Any]]) -> None:
    flags = (*COMMON, "--page-size", page_size, "--disaggregation-transfer-backend", backend)
    with running_pair(model, *flags, decode_flags=ALWAYS) as pair:
        check(pair, expected)
        check_stop_strings(plain, pair)
        check_streams(plain, pair)
        assert pair.prefill.counter("kv_transfer_bytes") > 0
        assert pair.prefill.counter("spec_verify_steps") == 0


@pytest.mark.slow
def test_a_pair_short_of_memory(model: str, expected: list[dict[str, Any]]) -> None:
    with running_pair(model, *COMMON, *ALWAYS, decode_flags=LITTLE) as pair:
        check(pair, expected, retracts=True)


@pytest.mark.slow
def test_two_ranks(model: str) -> None:
    """Their sums have other bits than those of one rank, so they are compared with two ranks."""
    with running_monolith(model, *COMMON, "--tp-size", "2") as server:
        expected = generate_all(server.url, bodies())
    with running_monolith(model, *COMMON, "--tp-size", "2", *ALWAYS) as server:
        check(server, expected)
    sides = {"prefill_flags": ("--tp-size", "2"), "decode_flags": ("--tp-size", "2", *ALWAYS)}
    with running_pair(model, *COMMON, **sides) as pair:
        check(pair, expected)


@pytest.mark.slow
def test_a_real_model(smollm2_directory: Path) -> None:
    """Editing a given text: long runs are accepted, greedily and drawn."""
    text = " ".join(f"Item {number}: the red fox number {number} is in the garden." for number in range(12))
    messages = [{"role": "user", "content": f"Repeat this text, but write blue instead of red.\n\n{text}"}]
    bodies = [
        {"messages": messages, "max_tokens": 120, "logprobs": True, "top_logprobs": 3, **sampling}
        for sampling in (
            {"temperature": 0},
            {"temperature": 1, "seed": 5},
            {"temperature": 0, "frequency_penalty": 0.2},
        )
    ]

    def ask(url: str) -> list[dict[str, Any]]:
        with ThreadPoolExecutor(len(bodies)) as pool:
            answers = list(
                pool.map(lambda one: requests.post(f"{url}/v1/chat/completions", json=one, timeout=240), bodies)
            )
        assert [answer.status_code for answer in answers] == [200] * len(bodies)
        return [answer.json() for answer in answers]

    flags = ("--dtype", "bfloat16", "--max-total-tokens", "8192")
    with running_monolith(str(smollm2_directory), *flags) as server:
        expected = ask(server.url)
    with running_pair(str(smollm2_directory), *flags, decode_flags=NGRAM) as pair:
        answers = ask(pair.url)
        assert [answer["choices"] for answer in answers] == [answer["choices"] for answer in expected]
        assert pair.decode.state()["internal_states"][0]["avg_spec_accept_length"] > 1.5
        assert_idle(*pair.workers)
