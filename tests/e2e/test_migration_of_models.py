"""Streams that move keep their tokens: of several ranks, with adapters and drafters, and with KV of all kinds."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.adapters import write_adapter
from tests.e2e.harness import Server
from tests.e2e.moves import assert_equal, greedy, migrate, refusal, seeded, servers, with_grammar
from tests.mtp import write_with_mtp
from tests.tiny import EOS_ID, WINDOW_FAMILIES, Family, make_tiny
from tests.unit.model.native_kit import needs_kernels

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

COMMON = ("--dtype", "float32", "--max-total-tokens", "16384", "--disaggregation-transfer-backend", "shm")
CACHED = "--disaggregation-decode-enable-radix-cache"
TP2 = ("--tp-size", "2", CACHED)
DP2 = ("--dp-size", "2", CACHED)
NEXTN = ("--speculative-algorithm", "NEXTN", "--speculative-num-steps", "3", "--no-speculative-adaptive")
NGRAM = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "4", "--no-speculative-adaptive")


def test_servers_of_one_and_two_ranks(tiny_checkpoint: Callable[[Family], Path]) -> None:
    """TP 2 to 2, 2 to 1 and 1 to 2: seeds, penalties, log probabilities and grammars go along, with stages."""
    bodies = (seeded(), with_grammar())
    with servers(str(tiny_checkpoint("llama")), [TP2, TP2, (CACHED,)], *COMMON) as made:
        two, other, one = made.decodes
        for source, target in ((two, other), (two, one), (one, two)):
            answers = made.check_moves(source, target, *bodies)
            assert all(answer["num_stages"] for answer in answers), answers
            assert target.counter("migrations_in") >= len(bodies)


def test_servers_of_one_and_two_replicas(tiny_checkpoint: Callable[[Family], Path]) -> None:
    """DP 2 to 2, 2 to 1 and 1 to 2, four streams at a time. The replica that takes a request has all of its stages."""
    bodies = [greedy(400, length=150, seed=number) for number in (1, 2)] + [seeded(400), with_grammar(400)]
    with servers(str(tiny_checkpoint("llama")), [DP2, DP2, (CACHED,)], *COMMON) as made, ThreadPoolExecutor(4) as pool:
        two, other, one = made.decodes
        expected = [made.run(one, body) for body in bodies]
        for source, target in ((two, other), (other, two), (two, one), (one, other)):
            for server in (source, target):
                assert requests.post(f"{server.url}/flush_cache?timeout=20", timeout=30).status_code == 200
            cached = target.counter("decode_cached_tokens")

            def move(body: dict[str, Any], source: Server = source, target: Server = target) -> tuple[Any, Any]:
                return made.moved(source, target, body)

            moved = list(pool.map(move, bodies))
            for (found, answer), should, body in zip(moved, expected, bodies, strict=True):
                assert_equal(found, should, body)
                assert answer["num_stages"], answer
            prompts = sum(len(body["input_ids"]) // 16 * 16 for body in bodies)
            assert target.counter("decode_cached_tokens") - cached >= prompts, "stages are where their requests are"


@needs_kernels
@pytest.mark.parametrize("replicas", [(), ("--dp-size", "2")], ids=["one replica", "two replicas"])
def test_servers_with_an_mtp_module(replicas: tuple[str, ...], tmp_path: Path) -> None:
    """The hidden state that the next draft begins with goes along, and tokens are those without drafts."""
    sizes = {"linear_key_head_dim": 32, "linear_value_head_dim": 16, "eos_token_id": EOS_ID}
    model = str(write_with_mtp("qwen3_5_text", tmp_path / "model", agrees=0.05, **sizes))
    flags = ("--dtype", "bfloat16", *COMMON[2:])
    bodies = (greedy(200), seeded(200), with_grammar(200))
    with servers(model, [()], *flags) as plain:
        expected = [plain.run(plain.decodes[0], body) for body in bodies]
    with servers(model, [replicas, replicas], *flags, *NEXTN) as made:
        for source, target in (made.decodes, made.decodes[::-1]):
            before = target.counter("spec_accepted_tokens")
            for body, should in zip(bodies, expected, strict=True):
                assert_equal(made.moved(source, target, body)[0], should, body)
            assert target.counter("spec_accepted_tokens") > before, "the drafts go on"


def test_a_request_moves_with_its_adapter(tmp_path: Path) -> None:
    base = make_tiny("qwen3", tmp_path / "base")
    paths = {name: write_adapter(tmp_path / name, base, seed=seed) for seed, name in enumerate(("one", "two"))}
    both = ("--lora-paths", f"one={paths['one']}", f"two={paths['two']}")
    decodes = [both, both, ("--lora-paths", f"one={paths['one']}"), ("--lora-paths", f"two={paths['one']}")]
    with servers(str(base), decodes, *COMMON, "--enable-lora", prefill=both) as made:
        source, target, without, other = made.decodes
        bodies = [greedy() | {"lora_path": name} for name in paths]
        made.check_moves(source, target, *bodies)
        found = made.run(source, bodies[1])
        assert found["ids"] != made.run(source, bodies[0])["ids"]
        for server in (without, other):  # it lacks the adapter, or has other weights under its name

            def refused(rid: str, to: str = server.url) -> None:
                assert refusal(migrate(source, rid, to)) == (409, "migration_refused", "lora_path")

            assert made.run(source, bodies[1], refused)["ids"] == found["ids"]


@pytest.mark.parametrize("algorithm", ["NGRAM", "STANDALONE"])
def test_servers_with_drafters(algorithm: str, tiny_checkpoint: Callable[[Family], Path]) -> None:
    model = str(tiny_checkpoint("qwen3"))
    flags = NGRAM
    if algorithm == "STANDALONE":
        draft = ("--speculative-algorithm", algorithm, "--speculative-draft-model-path", model)
        flags = (*draft, "--speculative-num-steps", "3", "--no-speculative-adaptive")
    with servers(model, [(), ()], *COMMON, *flags) as made:
        source, target = made.decodes
        before = target.counter("spec_accepted_tokens")
        made.check_moves(source, target, greedy(), seeded())
        assert target.counter("spec_accepted_tokens") > before, "the drafts go on"


@pytest.mark.parametrize("family", ["mistral", "qwen3"])
def test_models_with_windows(family: Family, tmp_path: Path) -> None:
    model = str(make_tiny(family, tmp_path, **WINDOW_FAMILIES[family]))
    with servers(model, [(), ()], *COMMON) as made:
        made.check_moves(*made.decodes, greedy(), seeded())


@pytest.mark.parametrize("family", ["deepseek_v2", "qwen3_5_text", "gemma2"])
def test_models_with_latents_and_states(family: str, family_checkpoint: Callable[[str], Path]) -> None:
    with servers(str(family_checkpoint(family)), [(), ("--tp-size", "2")], *COMMON) as made:
        one, two = made.decodes
        made.check_moves(one, two, greedy(), seeded())
        made.check_moves(two, one, greedy())


@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "int8"])
def test_eight_bit_kv(kv_cache_dtype: str, tiny_checkpoint: Callable[[Family], Path]) -> None:
    flags = (*COMMON, "--kv-cache-dtype", kv_cache_dtype)
    with servers(str(tiny_checkpoint("llama")), [(CACHED,), (CACHED,)], *flags) as made:
        answers = made.check_moves(*made.decodes, greedy(), seeded())
        assert all(answer["num_stages"] for answer in answers), answers
