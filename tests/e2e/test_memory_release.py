"""Servers give their KV pools and weights back to the system, and answer as before once they have taken them again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
from safetensors.torch import load_file

from tests.e2e.harness import Server, assert_idle, ranks_of, running_monolith, running_pair, until
from tests.tiny import make_tiny

pytestmark = pytest.mark.timeout(300)
POOL = ("--max-total-tokens", "131072")
PROMPT = list(range(20, 120))
BODY = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 12, "temperature": 0.0, "ignore_eos": True}}
WIDE = {"hidden_size": 256, "intermediate_size": 8192, "num_attention_heads": 4, "num_key_value_heads": 4}


def post(url: str, path: str, body: dict[str, Any] | None = None, status: int = 200) -> Any:
    answer = requests.post(f"{url}{path}", json=body, timeout=120)
    assert answer.status_code == status, answer.text
    return answer.json()


def resident_bytes(server: Server) -> int:
    """Memory of the engine's processes."""
    return sum(rank.memory_info().rss for rank in ranks_of(server))


def weight_bytes(path: Path) -> int:
    return sum(tensor.numel() for tensor in load_file(path / "model.safetensors").values()) * 2


def release_and_resume(url: str, servers: Sequence[Server], path: Path) -> None:
    """All memory goes back and comes again; the weights of a second release do so alone."""
    until_ready(url)
    expected = post(url, "/generate", BODY)["output_ids"]
    assert post(url, "/generate", BODY)["output_ids"] == expected
    name = "model.layers.1.mlp.gate_proj.weight"
    for server in servers:
        before = resident_bytes(server)
        released = post(server.url, "/release_memory_occupation", {})
        assert released["released"] == ["kv_cache", "weights", "cuda_graph"]
        assert before - resident_bytes(server) > 0.9 * weight_bytes(path), "the weights, and the pages that were used"
        health = requests.get(f"{server.url}/health", timeout=20)
        assert (health.status_code, health.json()["status"]) == (200, "memory_released")
        assert server.state()["facts"]["memory_released"] == "kv_cache,weights,cuda_graph"
        refused = post(server.url, "/generate", BODY, 503)["error"]
        assert refused["code"] == "memory_released", refused
        assert requests.get(f"{server.url}/ready", timeout=20).status_code == 503
        assert post(server.url, "/get_weights_by_name", {"name": name}, 400)["error"]["param"] == "name"
        assert post(server.url, "/pd_role_switch", {"new_role": "null"}, 409 if len(servers) > 1 else 503)
    for server in servers:
        assert post(server.url, "/resume_memory_occupation", {"tags": ["weights"]})["released"] != []
        post(server.url, "/generate", BODY, 503)
        assert post(server.url, "/resume_memory_occupation")["released"] == []
        assert requests.get(f"{server.url}/health", timeout=20).json()["status"] == "ok"
    until_ready(url)
    answer = post(url, "/generate", BODY)
    assert answer["output_ids"] == expected and answer["meta_info"]["cached_tokens"] == 0
    for server in servers:
        post(server.url, "/release_memory_occupation", {"tags": ["weights"]})
        assert post(server.url, "/resume_memory_occupation", {"tags": ["weights"]})["released"] == []
        read = np.array(post(server.url, "/get_weights_by_name", {"name": name, "truncate_size": 3}))
        wanted = load_file(path / "model.safetensors")[name][:3].bfloat16().float().numpy()
        assert read.shape == wanted.shape and np.array_equal(read.astype(np.float32), wanted)
        missing = post(server.url, "/get_weights_by_name", {"name": "nothing"}, 404)["error"]
        assert (missing["code"], missing["param"]) == ("no_such_tensor", "name")
    until_ready(url)
    assert post(url, "/generate", BODY)["output_ids"] == expected


def until_ready(url: str) -> None:
    """A router sees by its health checks that its workers take requests again."""
    until(lambda: requests.get(f"{url}/ready", timeout=20).status_code == 200, 30.0, "the workers take requests again")


def test_a_pair_releases_its_memory_and_takes_it_again(tmp_path: Path) -> None:
    path = make_tiny("llama", tmp_path / "model", **WIDE)
    with running_pair(str(path), *POOL, "--dtype", "bfloat16") as pair:
        release_and_resume(pair.url, pair.workers, path)
        assert_idle(*pair.workers, deadline_s=40.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--tp-size", "2"),
        ("--dp-size", "2"),
        ("--pp-size", "2", "--cpu-kernels", "torch"),
        ("--no-disable-overlap-schedule", "--speculative-algorithm", "NGRAM"),
        ("--enable-hierarchical-cache",),
    ],
    ids=lambda flags: " ".join(flags) or "plain",
)
def test_a_monolith_does_so_too(flags: tuple[str, ...], tmp_path: Path) -> None:
    path = make_tiny("llama", tmp_path / "model", **WIDE)
    with running_monolith(str(path), *POOL, "--dtype", "bfloat16", *flags) as server:
        release_and_resume(server.url, [server], path)
        assert_idle(server, deadline_s=40.0)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["shm", "nixl"])
@pytest.mark.parametrize("flags", [(), ("--tp-size", "2")], ids=["one rank", "tp2"])
def test_pairs_over_other_transports_do_so(backend: str, flags: tuple[str, ...], tmp_path: Path) -> None:
    path = make_tiny("llama", tmp_path / "model", **WIDE)
    with running_pair(
        str(path), *POOL, "--dtype", "bfloat16", "--disaggregation-transfer-backend", backend, *flags
    ) as pair:
        release_and_resume(pair.url, pair.workers, path)
        assert_idle(*pair.workers, deadline_s=40.0)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_next", "gpt_oss", "deepseek_v3"])
def test_recurrent_states_windows_and_latents_are_released(
    family: str, family_checkpoint: Callable[[str], Path]
) -> None:
    path = family_checkpoint(family)
    with running_pair(str(path), "--max-total-tokens", "8192") as pair:
        expected = post(pair.url, "/generate", BODY)["output_ids"]
        for server in pair.workers:
            post(server.url, "/release_memory_occupation", {})
        for server in pair.workers:
            assert post(server.url, "/resume_memory_occupation")["released"] == []
        until_ready(pair.url)
        assert post(pair.url, "/generate", BODY)["output_ids"] == expected
        assert_idle(*pair.workers, deadline_s=40.0)
