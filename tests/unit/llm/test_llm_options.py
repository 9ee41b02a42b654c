"""Keyword arguments of `LLM` become the right servers, or are refused by name before anything starts."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from pdserve.base import cpu_affinity as cores
from pdserve.errors import ConfigError
from pdserve.llm.options import deal_devices, plan

MODEL = {"model": "somewhere"}


def test_names_of_vllm_and_sglang_mean_our_flags() -> None:
    given: dict[str, Any] = {
        "tensor_parallel_size": 2, "max_model_len": 100, "gpu_memory_utilization": 0.5, "max_num_seqs": 7, "seed": 3,
        "block_size": 32, "enable_prefix_caching": False, "tokenizer": "elsewhere", "disable_overlap_schedule": True,
        "chunked_prefill_size": -1,
    }  # fmt: skip
    (server,) = plan({"model_path": "somewhere", **given}, None, {}, {}).servers
    config = server.config
    assert server.mode == "null"
    assert (config.model.model_path, config.model.tokenizer_path) == ("somewhere", "elsewhere")
    assert (config.model.context_length, config.model.random_seed) == (100, 3)
    assert (config.parallel.tp_size, config.memory.mem_fraction_static, config.memory.page_size) == (2, 0.5, 32)
    assert config.memory.disable_radix_cache
    assert config.schedule.disable_overlap_schedule is True
    assert config.schedule.chunked_prefill_size == -1
    assert server.most_requests == 14


def test_vllms_speculative_config_means_our_flags() -> None:
    def speculation(**config: Any) -> tuple[Any, ...]:
        (server,) = plan({**MODEL, "speculative_config": config}, None, {}, {}).servers
        found = server.config.speculative
        lowest, most = found.speculative_ngram_min_match_window_size, found.speculative_ngram_max_match_window_size
        return found.speculative_algorithm, found.max_drafts, found.speculative_draft_model_path, lowest, most

    lookup = {"prompt_lookup_min": 3, "prompt_lookup_max": 5}
    assert speculation(method="ngram", num_speculative_tokens=4, **lookup) == ("NGRAM", 4, None, 3, 5)
    assert speculation(method="eagle3", model="head", num_speculative_tokens=2)[:3] == ("EAGLE3", 2, "head")
    assert speculation(model="small", num_speculative_tokens=5)[:3] == ("STANDALONE", 5, "small")
    for method in ("mtp", "qwen3_next_mtp"):
        assert speculation(method=method, num_speculative_tokens=1)[:2] == ("NEXTN", 1)
    (prefill, decode) = plan(MODEL, (1, 1), {}, {"speculative_config": {"method": "ngram"}}).servers
    assert [one.config.speculative.is_on for one in (prefill, decode)] == [False, True]
    wrong: list[Any] = [{"method": "medusa"}, {}, {"method": "ngram", "num_tokens": 3}, "ngram", True]
    wrong.append({"method": "ngram", "num_speculative_tokens": "3"})
    for config in wrong:
        with pytest.raises(ConfigError) as refused:
            plan({**MODEL, "speculative_config": config}, None, {}, {})
        assert refused.value.field == "speculative_config"


def test_vllms_runner_means_an_embedding_model() -> None:
    for runner, expected in (("pooling", True), ("generate", False), ("auto", False)):
        (server,) = plan({**MODEL, "runner": runner}, None, {}, {}).servers
        assert server.config.embedding.is_embedding is expected
    for given, pairs, field in (({"runner": "draft"}, None, "runner"), ({"runner": ["pooling"]}, None, "runner"),
                                ({"runner": "pooling"}, (1, 1), "is_embedding")):  # fmt: skip
        with pytest.raises(ConfigError) as refused:
            plan({**MODEL, **given}, pairs, {}, {})
        assert refused.value.field == field


def test_no_server_is_given_more_than_it_lets_wait() -> None:
    (server,) = plan({**MODEL, "max_running_requests": 4, "max_queued_requests": 1, "dp_size": 2}, None, {}, {}).servers
    assert server.most_requests == 9
    for unbounded in ({}, {"max_queued_requests": -1}):
        (server,) = plan({**MODEL, "max_running_requests": 4, **unbounded}, None, {}, {}).servers
        assert server.most_requests == 8


def test_pairs_share_the_cores_and_get_the_flags_of_their_side_only() -> None:
    given: dict[str, Any] = {
        **MODEL, "device": "cpu", "disaggregation_layerwise_transfer": True, "num_reserved_decode_tokens": 9,
    }  # fmt: skip
    deployment = plan(given, (2, 1), {"page_size": 32}, {"page_size": 32, "max_running_requests": 5})
    assert [server.name for server in deployment.servers] == ["prefill-0", "prefill-1", "decode-0"]
    prefill, _, decode = (server.config for server in deployment.servers)
    assert prefill.disagg.disaggregation_layerwise_transfer and not decode.disagg.disaggregation_layerwise_transfer
    assert (prefill.schedule.num_reserved_decode_tokens, decode.schedule.num_reserved_decode_tokens) == (512, 9)
    assert decode.schedule.max_running_requests == 5
    assert {prefill.kernels.cpu_threads, decode.kernels.cpu_threads} == {deployment.threads}
    assert prefill.disagg.disaggregation_bootstrap_timeout_s > 3600, "in a batch nobody waits for one answer"
    assert prefill.disagg.disaggregation_transfer_backend == "shm", "no port is opened on a machine without a GPU"


def test_servers_of_a_pair_are_pinned_to_cores_that_no_other_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "granted_cores", lambda: frozenset(range(8)))
    servers = plan({"model": "m", "cpu_pin": "2-7"}, (1, 2), {}, {}).servers
    pinned = [server.config.kernels for server in servers]
    assert [(each.cpu_pin, each.cpu_threads) for each in pinned] == [("2,3", 2), ("4,5", 2), ("6,7", 2)]


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"port": 80}, "port"),
        ({"disaggregation_mode": "decode"}, "disaggregation_mode"),
        ({"api_key": "k"}, "api_key"),
        ({"tp_size": 2, "tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"page_size": 1000}, "page_size"),
        ({"dtype": "int8"}, "dtype"),
        ({"enforce_eager": True}, "--enforce-eager"),
        ({"lora_backend": "x"}, "--lora-backend"),
        ({"lora_paths": ["a,b=x"]}, "lora_paths"),
        ({"lora_paths": {"a": 1}}, "lora_paths"),
        ({"lora_paths": [{"lora_name": "a"}]}, "lora_paths"),
        ({"served_model_name": ["a", "b"]}, "served_model_name"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(given: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan({**MODEL, **given}, None, {}, {})
    assert caught.value.field == field


@pytest.mark.parametrize(
    "given",
    [
        "a=x,b=y",
        {"a": "x", "b": "y"},
        ["a=x", "b=y"],
        [{"lora_name": "a", "lora_path": "x"}, {"lora_name": "b", "lora_path": "y"}],
    ],
)
def test_adapters_are_given_as_sglang_gives_them(given: Any) -> None:
    for server in plan({**MODEL, "lora_paths": given, "max_loras": 3}, (1, 1), {}, {}).servers:
        lora = server.config.lora
        assert lora.adapters == {"a": "x", "b": "y"} and lora.max_loras_per_batch == 3


def test_flags_of_one_side_need_sides() -> None:
    with pytest.raises(ConfigError, match="disaggregation"):
        plan(MODEL, None, {"page_size": 32}, {})
    with pytest.raises(ConfigError, match="at least 1"):
        plan(MODEL, (1, 0), {}, {})


def test_servers_get_devices_of_their_own_where_there_are_enough() -> None:
    servers = plan({**MODEL, "device": "cpu"}, (1, 1), {"tp_size": 2}, {}).servers
    dealt = deal_devices(servers, ["3", "1", "0", "2"])
    assert [server.devices for server in dealt] == [("3", "1"), ("0",)]
    assert [server.devices for server in deal_devices(servers, ["0", "1"])] == [None, None]


def test_importing_the_package_costs_nothing() -> None:
    code = """
import sys, pdserve
assert "LLM" in dir(pdserve)
heavy = {"torch", "transformers", "fastapi", "numpy", "msgspec"} & sys.modules.keys()
assert not heavy, heavy
from pdserve import LLM, SamplingParams
SamplingParams(temperature=0)
assert not {"torch", "transformers"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
