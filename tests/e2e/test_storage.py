"""Servers that share a store: what one has computed, another one reads."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.e2e.harness import (
    Server,
    assert_idle,
    assert_refused,
    generate_all,
    running,
    running_monolith,
    running_pair,
    start_router,
    start_server,
    until,
)
from tests.mooncake_master import Master
from tests.tiny import VOCAB_SIZE, Family

PAGE = 16
TIER = ("--dtype", "float32", "--page-size", str(PAGE), "--enable-hierarchical-cache", "--hicache-ratio", "2")
DEADLINE_S = 1.0
Tiny = Callable[[Family], Path]


def storage_flags(backend: str, policy: str = "timeout", **options: object) -> tuple[str, ...]:
    """Flags of a store that is asked for any page."""
    options = {"prefetch_threshold": 16, "prefetch_timeout_base": DEADLINE_S, **options}
    extra = json.dumps(options)
    return (
        *("--hicache-storage-backend", backend, "--hicache-storage-prefetch-policy", policy),
        *("--hicache-storage-backend-extra-config", extra),
    )


def prompts_of(seed: int, count: int, length: int = 200) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for _ in range(count)]


def body(prompt: list[int], new_tokens: int = 8) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    return {"input_ids": prompt, "sampling_params": sampling}


def outputs(url: str, prompts: list[list[int]], new_tokens: int = 8) -> list[list[int]]:
    return [answer["output_ids"] for answer in generate_all(url, [body(prompt, new_tokens) for prompt in prompts])]


def until_stored(server: Server, num_tokens: int) -> None:
    """Wait until a server has sent what it computed."""
    until(lambda: server.counter("backuped_tokens") >= num_tokens, 20.0, f"{num_tokens} tokens are stored")


def test_a_server_reads_what_only_the_store_has(tiny_checkpoint: Tiny, tmp_path: Path) -> None:
    model, prompts = str(tiny_checkpoint("llama")), prompts_of(1, 3)
    flags = (*TIER, *storage_flags("file", "wait_complete", directory=str(tmp_path)), "--max-total-tokens", "2048")
    with running_monolith(model, *flags) as server:
        expected = outputs(server.url, prompts)
        until_stored(server, 3 * 192)
        assert_idle(server)
        assert requests.post(f"{server.url}/flush_cache?timeout=20", timeout=30).status_code == 200
        answers = generate_all(server.url, [body(prompt) for prompt in prompts])
        assert [answer["output_ids"] for answer in answers] == expected
        assert [answer["meta_info"]["cached_tokens"] for answer in answers] == [192] * 3
        assert server.counter("prefetched_tokens") == server.counter("storage_prefetch_hit_tokens") == 3 * 192
        metrics, facts = server.metrics(), server.state()
        assert metrics["sglang:prefetched_tokens_total"] == 3 * 192
        assert "hicache_storage_breaker" in json.dumps(facts)
        assert_idle(server)
        cleared = requests.post(f"{server.url}/hicache/storage-backend/clear", timeout=30)
        assert cleared.status_code == 200, cleared.text
        until(lambda: not list(tmp_path.rglob("*.kv")), 20.0, "the store is empty")


def sources(url: str, prompts: list[list[int]]) -> list[tuple[list[int], int, dict[str, int]]]:
    """Output, cached tokens and their sources of prompts that run one at a time."""
    answers = [answer for prompt in prompts for answer in generate_all(url, [body(prompt)])]
    found = [(answer["output_ids"], answer["meta_info"]) for answer in answers]
    return [(tokens, meta["cached_tokens"], meta["cached_tokens_details"]) for tokens, meta in found]


@pytest.mark.slow
def test_decode_answers_where_prefill_found_cached_tokens(tiny_checkpoint: Tiny, tmp_path: Path) -> None:
    """Prefill's device holds two of six prompts, its host tier all of them, and the store all of them."""
    store = storage_flags("file", "wait_complete", directory=str(tmp_path))
    prefill = (TIER[4], "--hicache-ratio", "8", *store)
    shape, prompts = (*TIER[:4], "--max-total-tokens", "512"), prompts_of(11, 6)
    with running_pair(str(tiny_checkpoint("llama")), *shape, prefill_flags=prefill) as pair:
        first = sources(pair.url, prompts)
        assert [(cached, details) for _, cached, details in first] == [(0, {"device": 0, "host": 0, "storage": 0})] * 6
        until_stored(pair.prefill, 6 * 192)
        again = sources(pair.url, prompts)
        assert [tokens for tokens, _, _ in again] == [tokens for tokens, _, _ in first]
        assert [sum(details.values()) for _, _, details in again] == [192] * 6
        host = sum(details["host"] for _, _, details in again)
        assert host == pair.prefill.counter("load_back_tokens") >= 4 * 192
        assert sum(details["storage"] for _, _, details in again) == 0
        flushed = requests.post(f"{pair.prefill.url}/flush_cache?timeout=20", timeout=30)
        assert flushed.status_code == 200, flushed.text
        stored = sources(pair.url, prompts)
        assert [tokens for tokens, _, _ in stored] == [tokens for tokens, _, _ in first]
        assert [details for _, _, details in stored] == [{"device": 0, "host": 0, "storage": 192}] * 6
        asked = {"model": "tiny", "prompt": prompts[5], "max_tokens": 2, "return_cached_tokens_details": True}
        whole = requests.post(f"{pair.url}/v1/completions", json=asked, timeout=60).json()
        cached = whole["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert sum(whole["sglext"]["cached_tokens_details"].values()) == cached == 192
        for server, label in ((pair.prefill, "storage_file"), (pair.decode, "storage_unknown")):
            lines = requests.get(f"{server.url}/metrics", timeout=10).text.splitlines()
            samples = [line for line in lines if line.startswith("sglang:cached_tokens_total{")]
            by_source = {line.split('cache_source="')[1].split('"')[0]: float(line.split()[-1]) for line in samples}
            assert by_source[label] == 6 * 192 and by_source["host"] == host
            assert sum(by_source.values()) == 13 * 192
        for server in (pair.prefill, pair.decode):
            assert_idle(server)


@pytest.mark.slow
def test_other_weights_do_not_share(tiny_checkpoint: Tiny, tmp_path: Path) -> None:
    """Random weights of another seed are another namespace; so is another dtype."""
    flags = (*TIER, *storage_flags("file", "wait_complete", directory=str(tmp_path)), "--max-total-tokens", "2048")
    prompts = prompts_of(2, 2)
    with running_monolith(str(tiny_checkpoint("llama")), *flags) as server:
        outputs(server.url, prompts)
        until_stored(server, 2 * 192)
    for others in (("--dtype", "bfloat16"), ("--page-size", "32")):
        with running_monolith(str(tiny_checkpoint("llama")), *flags, *others) as server:
            outputs(server.url, prompts)
            assert server.counter("storage_prefetch_hit_tokens") == 0


@pytest.mark.slow
@pytest.mark.parametrize("shape", [("--tp-size", "2"), ("--pp-size", "2")], ids=["tp", "pp"])
def test_ranks_have_parts_of_their_own(tiny_checkpoint: Tiny, tmp_path: Path, shape: tuple[str, ...]) -> None:
    model, prompts = str(tiny_checkpoint("llama")), prompts_of(3, 3)
    flags = (*TIER, *storage_flags("file", "wait_complete", directory=str(tmp_path)), "--max-total-tokens", "2048")
    with running_monolith(model, *flags) as server:
        expected = outputs(server.url, prompts)
        until_stored(server, 3 * 192)
    stored = len(list(tmp_path.rglob("*.kv")))
    for hits in (0, 3 * 192):
        with running_monolith(model, *flags, *shape) as server:
            assert outputs(server.url, prompts) == expected
            until_stored(server, 3 * 192 - hits)
            assert server.counter("prefetched_tokens") == hits, "ranks of another shape have other objects"
            assert_idle(server)
    files = list(tmp_path.rglob("*.kv"))
    assert len(files) == 3 * stored
    next(path for path in files if "of2" in path.name).unlink()
    with running_monolith(model, *flags, *shape) as server:
        assert outputs(server.url, prompts) == expected
        assert server.counter("prefetched_tokens") < 3 * 192, "the rank that lacks a page decides"


@pytest.mark.slow
def test_a_server_reads_what_an_earlier_one_has_computed(tiny_checkpoint: Tiny, tmp_path: Path) -> None:
    model, prompts = str(tiny_checkpoint("llama")), prompts_of(9, 3)
    flags = (*TIER, *storage_flags("file", "wait_complete", directory=str(tmp_path)), "--max-total-tokens", "2048")
    with running_monolith(model, *flags) as server:
        expected = outputs(server.url, prompts)
        until_stored(server, 3 * 192)
    with running_monolith(model, *flags) as server:
        assert outputs(server.url, prompts) == expected
        assert server.counter("cached_tokens") == server.counter("prefetched_tokens") == 3 * 192


@pytest.mark.slow
def test_damaged_objects_are_computed_again(tiny_checkpoint: Tiny, tmp_path: Path) -> None:
    model, prompts = str(tiny_checkpoint("llama")), prompts_of(4, 3)
    flags = (*TIER, *storage_flags("file", "wait_complete", directory=str(tmp_path)), "--max-total-tokens", "2048")
    with running_monolith(model, *flags) as server:
        expected = outputs(server.url, prompts)
        until_stored(server, 3 * 192)
    for number, path in enumerate(sorted(tmp_path.rglob("*.kv"))):
        content = bytearray(path.read_bytes())
        content[200 + number] ^= 1
        path.write_bytes(content[: len(content) - number % 2])
    with running_monolith(model, *flags) as server:
        assert outputs(server.url, prompts) == expected
        assert server.counter("prefetched_tokens") == 0


@pytest.mark.slow
def test_the_next_turn_finds_what_decode_has_generated(tiny_checkpoint: Tiny, tmp_path: Path) -> None:
    model = str(tiny_checkpoint("llama"))
    store = storage_flags("file", "wait_complete", directory=str(tmp_path))
    flags = ("--dtype", "float32", "--page-size", str(PAGE), "--max-total-tokens", "4096", *store)
    offload = ("--disaggregation-decode-enable-offload-kvcache",)
    prompt = prompts_of(5, 1)[0]
    with running_pair(model, *flags, prefill_flags=("--enable-hierarchical-cache",), decode_flags=offload) as pair:
        first = pair.generate(**body(prompt, 100))["output_ids"]
        until(lambda: pair.decode.counter("backuped_tokens") >= 288, 20.0, "decode has stored the turn")
    with running_monolith(model, *TIER, *store, "--max-total-tokens", "4096") as server:
        turn = body([*prompt, *first, 7, 8, 9])
        answer = generate_all(server.url, [turn])[0]
        assert answer["meta_info"]["cached_tokens"] == 288
        (tmp_path / "empty").mkdir()
    with running_monolith(model, "--dtype", "float32", "--page-size", str(PAGE)) as alone:
        assert generate_all(alone.url, [turn])[0]["output_ids"] == answer["output_ids"]


@pytest.mark.slow
def test_a_decode_server_that_dies_leaves_what_it_has_generated(tiny_checkpoint: Tiny, tmp_path: Path) -> None:
    """It stores a running request in strides."""
    model, prompt = str(tiny_checkpoint("llama")), prompts_of(10, 1)[0]
    alone_flags = ("--dtype", "float32", "--page-size", str(PAGE), "--max-total-tokens", "4096")
    with running_monolith(model, *alone_flags) as alone:
        generated = outputs(alone.url, [prompt], 100)[0]
        turn = body([*prompt, *generated])
        expected = generate_all(alone.url, [turn])[0]["output_ids"]
    store = storage_flags("file", "wait_complete", directory=str(tmp_path), decode_offload_stride=32)
    offload = ("--disaggregation-decode-enable-offload-kvcache",)
    with running_pair(model, *alone_flags, *store, prefill_flags=TIER[4:], decode_flags=offload) as pair:
        endless = {**body(prompt, 3800), "stream": True}
        with requests.post(f"{pair.url}/generate", json=endless, stream=True, timeout=60) as stream:
            assert stream.status_code == 200
            until(lambda: pair.decode.counter("backuped_tokens") >= 256, 20.0, "decode stores what it generates")
            pair.decode.kill()
    with running_monolith(model, *alone_flags, *store, *TIER[4:]) as server:
        answer = generate_all(server.url, [turn])[0]
        assert answer["output_ids"] == expected
        assert answer["meta_info"]["cached_tokens"] >= 256


@pytest.mark.slow
def test_wrong_flags_are_named(tiny_checkpoint: Tiny, tmp_path: Path) -> None:
    model = str(tiny_checkpoint("llama"))
    assert_refused(model, ["--hicache-storage-backend", "nothing", *TIER[4:]], "hicache_storage_backend")
    assert_refused(model, ["--hicache-storage-backend", "file"], "hicache_storage_backend")
    wrong = ["--hicache-storage-backend", "file", "--hicache-storage-backend-extra-config", "{", *TIER[4:]]
    assert_refused(model, wrong, "hicache_storage_backend_extra_config")
    alone = ["--disaggregation-mode", "decode", "--disaggregation-decode-enable-offload-kvcache"]
    assert_refused(model, alone, "disaggregation_decode_enable_offload_kvcache")


# ---------------------------------------------------------------------- a real master


def mooncake_flags(master: Master, segment: str, **options: object) -> tuple[str, ...]:
    """Flags of a client that gives so much memory."""
    more = {"master_server_address": f"127.0.0.1:{master.port}", "global_segment_size": segment}
    return storage_flags("mooncake", "timeout", **more, **options)


def is_connected(server: Server) -> bool:
    """Whether the server's client is set up and its breaker closed."""
    return str(state_of(server)["hicache_storage_breaker"]) == "closed"


def state_of(server: Server) -> dict[str, Any]:
    """The facts of the storage tier, wherever `/get_server_info` has them."""
    found: dict[str, Any] = {}

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            for name, inner in value.items():
                if name.startswith("hicache_storage_"):
                    found[name] = inner
                walk(inner)

    walk(server.state())
    return found


@pytest.mark.slow
def test_two_prefill_servers_share_a_prefix_over_mooncake(tiny_checkpoint: Tiny, master: Master) -> None:
    """Only one has computed it; the other one reads it from the first one's memory."""
    model = str(tiny_checkpoint("llama"))
    flags = (*TIER, "--max-total-tokens", "4096", *mooncake_flags(master, "64mb"))
    first, second = (start_server(model, "prefill", *flags, name=name) for name in ("first", "second"))
    decode = start_server(model, "decode", "--dtype", "float32", "--page-size", str(PAGE))
    prompts = prompts_of(6, 4)
    with running(first, second, decode):
        for server in (first, second):
            until(lambda server=server: is_connected(server), 30.0, "the store is connected")
        router = start_router([first], [decode])
        with running(router):
            expected = outputs(router.url, prompts)
            until_stored(first, 4 * 192)
        router = start_router([second], [decode])
        with running(router):
            assert outputs(router.url, prompts) == expected
        assert second.counter("prefetched_tokens") == 4 * 192
        assert second.counter("cached_tokens") == 4 * 192
        assert_idle(first, second, decode)
