"""What was computed once is not computed again, and what decode has is not sent again; tokens stay the same."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from pdserve.transfer.aux import MetadataBuffers
from tests.e2e.harness import Pair, Server, assert_idle, generate_all, running_monolith, running_pair
from tests.reference import load_reference, reference_greedy
from tests.tiny import VOCAB_SIZE, Family

PAGE = 16
PREFIX, NUM_REQUESTS, NEW_TOKENS = 1000, 64, 8
SHARED = PREFIX // PAGE * PAGE
FLAGS = ("--dtype", "float32", "--page-size", str(PAGE), "--served-model-name", "tiny")


def tokens(rng: random.Random, count: int, vocab_size: int) -> list[int]:
    return [rng.randrange(3, vocab_size) for _ in range(count)]


def prompts_with_shared_prefix(vocab_size: int) -> list[list[int]]:
    """Alike in the first PREFIX tokens and different from there on."""
    rng = random.Random(3)
    prefix = tokens(rng, PREFIX, vocab_size)
    tails = [[3 + i, *tokens(rng, rng.randrange(8, 24), vocab_size)] for i in range(NUM_REQUESTS)]
    return [prefix + tail for tail in tails]


def body(prompt: list[int], new_tokens: int = NEW_TOKENS) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    return {"input_ids": prompt, "sampling_params": sampling}


def check_computed_once(served: Server | Pair, prompts: list[list[int]]) -> list[list[int]]:
    """All at once: the shared whole pages are computed by one of them. Returns the output tokens."""
    computes = served.workers[0]
    answers = generate_all(served.url, [body(prompt) for prompt in prompts])
    cached = sorted(answer["meta_info"]["cached_tokens"] for answer in answers)
    assert cached == [0] + [SHARED] * (NUM_REQUESTS - 1)
    counters, metrics = computes.state()["counters"], computes.metrics()
    num_tokens = sum(map(len, prompts))
    assert counters["prompt_tokens"] == metrics["sglang:prompt_tokens_total"] == num_tokens
    assert counters["cached_tokens"] == metrics["sglang:cached_tokens_total"] == SHARED * (NUM_REQUESTS - 1)
    assert num_tokens - counters["cached_tokens"] == SHARED + sum(len(prompt) - SHARED for prompt in prompts)
    assert_idle(*served.workers)
    return [answer["output_ids"] for answer in answers]


def check_usage(served: Server | Pair, prompt: list[int]) -> None:
    """A prompt that came before: everything but the page of its last token is cached, and the client is told."""
    fields = {"model": "tiny", "prompt": prompt, "max_tokens": 2, "temperature": 0}
    answer = requests.post(f"{served.url}/v1/completions", json=fields, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": (len(prompt) - 1) // PAGE * PAGE}


@pytest.mark.slow
def test_a_shared_prefix_is_computed_once_by_the_monolith(tiny_checkpoint: Callable[[Family], Path]) -> None:
    model = tiny_checkpoint("llama")
    prompts = prompts_with_shared_prefix(VOCAB_SIZE)
    flags = (*FLAGS, "--chunked-prefill-size", "256", "--max-total-tokens", "16384")
    with running_monolith(str(model), *flags) as server:
        got = check_computed_once(server, prompts)
        check_usage(server, prompts[5])
    reference = load_reference(model)
    assert got == [reference_greedy(reference, prompt, NEW_TOKENS) for prompt in prompts]


@pytest.fixture(scope="module")
def pair(tiny_checkpoint: Callable[[Family], Path]) -> Iterator[Pair]:
    flags = (*FLAGS, "--chunked-prefill-size", "256", "--max-total-tokens", "81920")
    with running_pair(str(tiny_checkpoint("llama")), *flags) as started:
        yield started


def test_a_shared_prefix_is_computed_once_by_prefill(pair: Pair, tiny_checkpoint: Callable[[Family], Path]) -> None:
    prompts = prompts_with_shared_prefix(VOCAB_SIZE)
    got = check_computed_once(pair, prompts)
    check_usage(pair, prompts[5])
    reference = load_reference(tiny_checkpoint("llama"))
    assert got == [reference_greedy(reference, prompt, NEW_TOKENS) for prompt in prompts]


@pytest.mark.slow
def test_a_shared_prefix_with_a_real_model(smollm2_directory: Path) -> None:
    prompts = prompts_with_shared_prefix(49152)
    flags = (*FLAGS, "--chunked-prefill-size", "512", "--max-total-tokens", "81920")
    with running_pair(str(smollm2_directory), *flags) as served:
        got = check_computed_once(served, prompts)
    reference = load_reference(smollm2_directory)
    for i in (0, 31, 63):
        assert got[i] == reference_greedy(reference, prompts[i], NEW_TOKENS), f"request {i}"


def test_flush_cache_empties_it(pair: Pair) -> None:
    prompt = tokens(random.Random(11), 100, VOCAB_SIZE)
    cached = [pair.generate(**body(prompt))["meta_info"]["cached_tokens"] for _ in range(2)]
    assert cached == [0, 96]
    assert_idle(*pair.workers)
    answer = requests.post(f"{pair.prefill.url}/flush_cache", timeout=30)
    assert answer.status_code == 200, answer.text
    memory = pair.prefill.state()["memory"]
    assert memory["pages_free"] == memory["pages_total"] and memory["pages_cached"] == 0
    assert pair.generate(**body(prompt))["meta_info"]["cached_tokens"] == 0


# ---------------------------------------------------------------------- decode's own cache


@pytest.fixture(scope="module")
def remembering_pair(tiny_checkpoint: Callable[[Family], Path]) -> Iterator[Pair]:
    flags = (*FLAGS, "--max-total-tokens", "8192")
    radix = ("--disaggregation-decode-enable-radix-cache",)
    with running_pair(str(tiny_checkpoint("llama")), *flags, decode_flags=radix) as started:
        yield started


def test_requests_of_other_salts_share_no_pages_on_either_server(remembering_pair: Pair) -> None:
    prompt = tokens(random.Random(12), 100, VOCAB_SIZE)
    found = [
        remembering_pair.generate(**body(prompt), **salt)
        for salt in ({}, {"cache_salt": "a"}, {"cache_salt": "a"}, {"extra_key": "b"}, {})
    ]
    assert [answer["meta_info"]["cached_tokens"] for answer in found] == [0, 0, 96, 0, 96]
    assert [answer["meta_info"]["timing"]["kv_pages"] for answer in found] == [7, 7, 1, 7, 1]
    assert len({tuple(answer["output_ids"]) for answer in found}) == 1
    assert_idle(*remembering_pair.workers)


def moved(pair: Pair, prompt: list[int], num_new: int) -> tuple[list[int], int, int]:
    """The output, pages and bytes of pages that were sent for it; the aux slot goes along exactly once."""
    before = pair.prefill.counter("kv_transfer_bytes")
    answer = pair.generate(**body(prompt, num_new))
    timing = answer["meta_info"]["timing"]
    assert pair.prefill.counter("kv_transfer_bytes") - before == timing["kv_bytes"]
    return answer["output_ids"], timing["kv_pages"], timing["kv_bytes"] - MetadataBuffers(1).slot_bytes


def check_second_turn(served: Pair, model: Path, vocab_size: int) -> tuple[list[int], list[int]]:
    """A conversation of two turns: of the second only the new pages are sent. Its second prompt and answer."""
    rng = random.Random(5)
    page_bytes = PAGE * served.decode.state()["facts"]["kv_token_bytes"]
    reference = load_reference(model)
    first = tokens(rng, 100, vocab_size)
    answer, num_pages, num_bytes = moved(served, first, 30)
    assert (num_pages, num_bytes) == (7, 7 * page_bytes)
    assert answer == reference_greedy(reference, first, 30)

    second = first + answer + tokens(rng, 40, vocab_size)
    cached_before = served.decode.counter("decode_cached_tokens")
    known_pages = (100 + 30 - 1) // PAGE  # the last token's KV was never computed
    new_pages = -(-len(second) // PAGE) - known_pages
    again, num_pages, num_bytes = moved(served, second, 20)
    assert (num_pages, num_bytes) == (new_pages, new_pages * page_bytes) == (3, 3 * page_bytes)
    assert served.decode.counter("decode_cached_tokens") - cached_before == known_pages * PAGE
    assert again == reference_greedy(reference, second, 20)
    assert_idle(*served.workers)
    return second, again


def test_a_second_turn_sends_only_new_pages(
    remembering_pair: Pair, pair: Pair, tiny_checkpoint: Callable[[Family], Path]
) -> None:
    second, again = check_second_turn(remembering_pair, tiny_checkpoint("llama"), VOCAB_SIZE)
    page_bytes = PAGE * pair.decode.state()["facts"]["kv_token_bytes"]
    without = moved(pair, second, 20)
    longer = second + again + [7]
    cached = remembering_pair.generate(**body(longer, 1))["meta_info"]["cached_tokens"]
    assert cached == (len(second) + len(again) - 1) // PAGE * PAGE, "decode's prefix counts, prefill's is shorter"
    assert without == (again, 11, 11 * page_bytes), "without it all pages of the prompt are sent"
    assert_idle(*pair.workers)


@pytest.mark.slow
def test_a_second_turn_with_a_real_model(smollm2_directory: Path) -> None:
    flags = (*FLAGS, "--max-total-tokens", "4096")
    radix = ("--disaggregation-decode-enable-radix-cache",)
    with running_pair(str(smollm2_directory), *flags, decode_flags=radix) as served:
        check_second_turn(served, smollm2_directory, 49152)


def test_a_prompt_that_decode_has_whole_sends_no_page(
    remembering_pair: Pair, tiny_checkpoint: Callable[[Family], Path]
) -> None:
    prompt = tokens(random.Random(6), 8 * PAGE, VOCAB_SIZE)
    expected = reference_greedy(load_reference(tiny_checkpoint("llama")), prompt, 12)
    page_bytes = PAGE * remembering_pair.decode.state()["facts"]["kv_token_bytes"]
    assert moved(remembering_pair, prompt, 12) == (expected, 8, 8 * page_bytes)
    assert moved(remembering_pair, prompt, 12) == (expected, 0, 0)
    assert_idle(*remembering_pair.workers)


def test_many_conversations_at_once_send_only_new_pages(
    remembering_pair: Pair, tiny_checkpoint: Callable[[Family], Path]
) -> None:
    rng = random.Random(8)
    reference = load_reference(tiny_checkpoint("llama"))
    talks = [tokens(rng, rng.randrange(10, 90), VOCAB_SIZE) for _ in range(8)]
    known = [0] * len(talks)
    for _ in range(3):
        answers = generate_all(remembering_pair.url, [body(talk, 10) for talk in talks])
        for i, answer in enumerate(answers):
            assert answer["output_ids"] == reference_greedy(reference, talks[i], 10)
            assert answer["meta_info"]["timing"]["kv_pages"] == -(-len(talks[i]) // PAGE) - known[i]
            talks[i] += answer["output_ids"]
            known[i] = (len(talks[i]) - 1) // PAGE
            talks[i] += tokens(rng, rng.randrange(1, 40), VOCAB_SIZE)
    assert_idle(*remembering_pair.workers)
