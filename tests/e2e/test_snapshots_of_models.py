"""Snapshots with KV of all kinds: windows, states, latents, 8-bit KV, adapters, and KV of a server with a host tier."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdserve import LLM, RequestOutput, SamplingParams
from pdserve.protocol.snapshot import RequestSnapshot, decode
from tests.adapters import write_adapter
from tests.e2e.test_python_api import QUIET, SMALL
from tests.e2e.test_snapshots import KINDS, LONG, PROMPT, assert_same, stopped
from tests.tiny import WINDOW_FAMILIES, Family, make_tiny
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

GREEDY = SamplingParams(**LONG, **KINDS["greedy"])
SHORT = {**SMALL, "max_model_len": 512}
"""For families whose tiny models have 512 positions."""


def with_kv(llm: LLM, **given: Any) -> tuple[RequestSnapshot, bytes]:
    """Run a request, and stop it once a snapshot has KV of output tokens; that snapshot, read and as bytes."""

    def stop(rid: str) -> None:
        def has_kv() -> bool:
            kept.append(llm.extract(rid, kv="bytes", keep=True))
            kv = decode(kept[-1])[0].kv
            return kv is not None and kv.num_tokens > len(PROMPT)

        wait_until(has_kv, "the request has KV of output tokens")
        llm.extract(rid)

    kept: list[bytes] = []
    output, _ = stopped(llm, GREEDY, stop, **given)
    assert output.outputs[0].finish_reason == "suspended"
    return decode(kept[-1])[0], kept[-1]


def assert_goes_on(llm: LLM, whole: RequestOutput, *, recomputed: bool = True, **given: Any) -> None:
    """Also with an empty prefix cache. `recomputed`: without its KV too."""
    read, snapshot = with_kv(llm, **given)
    assert 0 < len(read.output_ids) < len(whole.outputs[0].token_ids)
    for kv in ("require", "ignore") if recomputed else ("require",):
        assert llm.reset_prefix_cache()
        assert_same(llm.restore(snapshot, kv=kv), whole)
    assert llm.running() == [] and llm.reset_prefix_cache()


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_windows_go_with_the_kv(family: Family, tmp_path: Path) -> None:
    with LLM(str(make_tiny(family, tmp_path, **WINDOW_FAMILIES[family])), **SMALL) as llm:
        assert_goes_on(llm, llm.generate([PROMPT], GREEDY, **QUIET)[0])


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v32", "qwen3_5_text", "gemma2"])
def test_latents_and_states_go_with_the_kv(family: str, family_checkpoint: Callable[[str], Path]) -> None:
    with LLM(str(family_checkpoint(family)), **SHORT) as llm:
        assert_goes_on(llm, llm.generate([PROMPT], GREEDY, **QUIET)[0])


@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "int8"])
def test_eight_bit_kv_goes_as_it_is(kv_cache_dtype: str, tiny_checkpoint: Callable[[Family], Path]) -> None:
    """Computed again it may differ: a chunk sees its own keys and values before they are rounded."""
    with LLM(str(tiny_checkpoint("llama")), kv_cache_dtype=kv_cache_dtype, **SMALL) as llm:
        assert_goes_on(llm, llm.generate([PROMPT], GREEDY, **QUIET)[0], recomputed=False)


def test_an_adapter_goes_with_its_request(tmp_path: Path) -> None:
    base = make_tiny("qwen3", tmp_path / "base")
    paths = {name: str(write_adapter(tmp_path / name, base, seed=seed)) for seed, name in enumerate(("one", "two"))}
    with LLM(str(base), enable_lora=True, lora_paths=paths, **SMALL) as llm:
        whole = {name: llm.generate([PROMPT], GREEDY, lora_path=name, **QUIET)[0] for name in paths}
        assert whole["one"].outputs[0].token_ids != whole["two"].outputs[0].token_ids
        for name, output in whole.items():
            assert_goes_on(llm, output, lora_path=name)


def test_a_server_with_a_host_tier_takes_requests_back(tiny_checkpoint: Callable[[Family], Path]) -> None:
    """Other requests push the prompt to host memory while this one is stopped."""
    small = {**SMALL, "max_total_tokens": 512, "max_model_len": 512}
    tier = {"enable_hierarchical_cache": True, "hicache_ratio": 8.0}
    with LLM(str(tiny_checkpoint("llama")), **small, **tier) as llm:
        whole = llm.generate([PROMPT], GREEDY, **QUIET)[0]
        _, snapshot = with_kv(llm)
        others = [[3 + (11 * i + j * (i + 2)) % 300 for j in range(200)] for i in range(6)]
        for kv in ("require", "ignore"):
            llm.generate(others, SamplingParams(temperature=0, max_tokens=4), **QUIET)
            assert_same(llm.restore(snapshot, kv=kv), whole)
        stopped(llm, GREEDY, llm.suspend)
        llm.generate(others, SamplingParams(temperature=0, max_tokens=4), **QUIET)
        assert_same(llm.resume("a"), whole)
        assert llm.running() == [] and llm.reset_prefix_cache()
