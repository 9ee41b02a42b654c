"""Servers whose prompts are more than device memory holds: prefixes come back from host memory with the same tokens."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import Server, assert_idle, generate_all, running_monolith, running_pair, until
from tests.tiny import VOCAB_SIZE, Family

PAGE, PREFIX = 16, 192
TIER = ("--enable-hierarchical-cache", "--hicache-ratio", "8")
SMALL = ("--dtype", "float32", "--page-size", str(PAGE), "--max-total-tokens", "512")
Tiny = Callable[[Family], Path]


def prompts_of(seed: int, count: int, length: int = PREFIX + 8) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for _ in range(count)]


def one_by_one(url: str, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Answers of prompts that run one at a time."""
    sampling = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
    bodies = [{"input_ids": prompt, "sampling_params": sampling} for prompt in prompts]
    return [answer for body in bodies for answer in generate_all(url, [body])]


def until_saved(server: Server, num_tokens: int) -> None:
    until(lambda: server.counter("hicache_backup_tokens") >= num_tokens, 20.0, f"{num_tokens} tokens are saved")


def assert_comes_back(server: Server, url: str) -> None:
    """Six prompts of 192 cached tokens each, where the device holds 512 tokens, twice."""
    prompts = prompts_of(1, 6)
    first = one_by_one(url, prompts)
    until_saved(server, 6 * PREFIX)
    again = one_by_one(url, prompts)
    assert [answer["output_ids"] for answer in again] == [answer["output_ids"] for answer in first]
    assert [answer["meta_info"]["cached_tokens"] for answer in first] == [0] * 6
    assert all(answer["meta_info"]["cached_tokens"] >= PREFIX for answer in again)
    assert server.counter("load_back_tokens") >= 4 * PREFIX, "the device cannot have had them"
    details = [answer["meta_info"]["cached_tokens_details"] for answer in again]
    parts = [one["device"] + one["host"] for one in details]
    assert parts == [answer["meta_info"]["cached_tokens"] for answer in again]
    assert sum(one["host"] for one in details) == server.counter("load_back_tokens")
    metrics = server.metrics()
    assert metrics["sglang:hicache_host_total_tokens"] == 8 * 512
    assert 6 * PREFIX <= metrics["sglang:hicache_host_used_tokens"] <= 8 * 512
    assert_idle(server)


def test_prefixes_come_back_from_host_memory(tiny_checkpoint: Tiny) -> None:
    with running_monolith(str(tiny_checkpoint("llama")), *SMALL, *TIER) as server:
        assert_comes_back(server, server.url)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [("--tp-size", "2"), ("--pp-size", "2")], ids=["tp", "pp"])
def test_ranks_bring_prefixes_back_together(tiny_checkpoint: Tiny, shape: tuple[str, ...]) -> None:
    with running_monolith(str(tiny_checkpoint("llama")), *SMALL, *TIER, *shape) as server:
        assert_comes_back(server, server.url)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["write_back", "write_through_selective"])
def test_write_policies(tiny_checkpoint: Tiny, policy: str) -> None:
    flags = (*SMALL, *TIER, "--hicache-write-policy", policy)
    with running_monolith(str(tiny_checkpoint("llama")), *flags) as server:
        prompts = prompts_of(2, 6)
        first = one_by_one(server.url, prompts)
        for prompt in prompts[-1:]:
            one_by_one(server.url, [prompt])
        again = one_by_one(server.url, prompts)
        assert [answer["output_ids"] for answer in again] == [answer["output_ids"] for answer in first]
        assert server.counter("hicache_backup_tokens") > 0
        assert_idle(server)


@pytest.mark.slow
def test_a_pair_brings_prefixes_back_on_both_sides(tiny_checkpoint: Tiny) -> None:
    radix = ("--disaggregation-decode-enable-radix-cache",)
    with running_pair(str(tiny_checkpoint("llama")), *SMALL, *TIER, decode_flags=radix) as pair:
        prompts = prompts_of(3, 6)
        first = one_by_one(pair.url, prompts)
        until_saved(pair.decode, 6 * PREFIX)
        again = one_by_one(pair.url, prompts)
        assert [answer["output_ids"] for answer in again] == [answer["output_ids"] for answer in first]
        assert pair.decode.counter("load_back_tokens") >= 4 * PREFIX
        for server in (pair.prefill, pair.decode):
            assert_idle(server)
