"""Models of many families through transformers: greedy fp32 tokens of monolith and 1P1D over Mooncake equal
transformers' own, also with clients that leave and with too little memory where text is generated.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from safetensors.torch import save_file

from tests.e2e.harness import (
    assert_idle,
    generate_all,
    generate_batch,
    generate_while_some_leave,
    running,
    running_monolith,
    running_pair,
    start_server,
)
from tests.model_families import DENSE, FAMILIES, LATENT, LENGTHS, SPARSE, TinyFamily, prompts_of
from tests.tiny import tiny_tokenizer

NEW_TOKENS = 12
NUMBERS = ("--dtype", "float32", "--chunked-prefill-size", "96")
COMMON = (*NUMBERS, "--model-impl", "transformers")
SHORT = ("--max-total-tokens", "384", "--schedule-conservativeness", "0.1", "--num-reserved-decode-tokens", "8")
"""Memory of a decode server for half of the requests of the load."""
LONG = 100
UNEQUAL = [
    *((name, *sizes) for number, name in enumerate((*DENSE, *SPARSE)) for sizes in [((2, 1), (1, 2))[number % 2]]),
    *((name, *sizes) for name in LATENT for sizes in ((2, 1), (1, 2))),
]
"""Families that run natively, and the tensor ranks of their prefill and decode servers."""


def bodies_of(prompts: Sequence[list[int]], num_new: int) -> list[dict[str, Any]]:
    sampling = {"temperature": 0, "max_new_tokens": num_new, "ignore_eos": True}
    return [{"input_ids": prompt, "sampling_params": sampling} for prompt in prompts]


def tokens_of(answers: Sequence[dict[str, Any]]) -> list[list[int]]:
    return [answer["output_ids"] for answer in answers]


def check_split(
    family: TinyFamily, path: Path, prefill: str, decode: str, *flags: str, at_once: slice = slice(None)
) -> None:
    """Assert that a pair has transformers' tokens, also when clients leave and decode's memory is short.

    `prefill`, `decode`: flags of one server. `at_once`: prompts of one call, after a call for each prompt.
    """
    prompts, load = prompts_of(LENGTHS), prompts_of((63, 64, 65, 40), seed=1)
    expected = family.reference_tokens(path, prompts, NEW_TOKENS)
    long = family.reference_tokens(path, load, LONG)
    sides = {"prefill_flags": prefill.split(), "decode_flags": (*decode.split(), *SHORT)}
    with running_pair(str(path), *flags, **sides) as pair:
        bodies = bodies_of(prompts, NEW_TOKENS)
        assert [tokens_of(generate_all(pair.url, [body]))[0] for body in bodies] == expected
        assert tokens_of(generate_batch(pair.url, bodies[at_once])) == expected[at_once], "at once, with prefix hits"
        bodies = bodies_of(load, LONG)
        assert tokens_of(generate_while_some_leave(pair.url, bodies, bodies[:2])) == long, "with too little memory"
        assert pair.decode.counter("requests_retracted") > 0 and pair.decode.counter("requests_aborted") > 0
        assert_idle(*pair.workers)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_monolith(name: str, family_checkpoint: Callable[[str], Path]) -> None:
    path, prompts = family_checkpoint(name), prompts_of(LENGTHS)
    expected = FAMILIES[name].reference_tokens(path, prompts, NEW_TOKENS)
    with running_monolith(str(path), *COMMON) as server:
        bodies = bodies_of(prompts, NEW_TOKENS)
        assert [tokens_of(generate_all(server.url, [body]))[0] for body in bodies] == expected
        assert tokens_of(generate_batch(server.url, bodies[1:])) == expected[1:], "four at once"
        assert_idle(server)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_pair_over_mooncake(name: str, family_checkpoint: Callable[[str], Path]) -> None:
    check_split(FAMILIES[name], family_checkpoint(name), "", "", *COMMON, at_once=slice(1, None))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "prefill", "decode"), UNEQUAL)
def test_native_pair_on_unequal_splits(
    name: str, prefill: int, decode: int, family_checkpoint: Callable[[str], Path]
) -> None:
    flags = (*NUMBERS, "--model-impl", "native", "--cpu-kernels", "torch")
    sizes = f"--tp-size {prefill}", f"--tp-size {decode}"
    check_split(FAMILIES[name], family_checkpoint(name), *sizes, *flags, at_once=slice(1, None))


@pytest.mark.slow
def test_replicas_of_a_decode_server_give_transformers_tokens(family_checkpoint: Callable[[str], Path]) -> None:
    path, prompts = family_checkpoint("qwen3_next"), prompts_of(LENGTHS)
    expected = FAMILIES["qwen3_next"].reference_tokens(path, prompts, NEW_TOKENS)
    with running_pair(str(path), *COMMON, decode_flags=("--dp-size", "2")) as pair:
        assert tokens_of(generate_batch(pair.url, bodies_of(prompts, NEW_TOKENS))) == expected
        assert_idle(*pair.workers)


CHANGED: dict[str, tuple[str, dict[str, Any]]] = {
    "state.conv0.rows": ("qwen3_next", {"linear_value_head_dim": 16}),
    "window.window": ("gemma3_text", {"sliding_window": 40}),
    "mla.head_dim": ("deepseek_v32", {"kv_lora_rank": 24}),
    "index.head_dim": ("deepseek_v32", {"index_head_dim": 24}),
}
"""By the field of a refusal, a family and the change of its config."""


@pytest.mark.slow
@pytest.mark.parametrize("field", CHANGED)
def test_a_pair_whose_groups_differ_is_refused_on_both_sides_by_the_planes_field(
    field: str, family_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    name, changes = CHANGED[field]
    family = FAMILIES[name]
    dataclasses.replace(family, changes=family.changes | changes).write(tmp_path)
    _check_refused(field, (str(family_checkpoint(name)), *COMMON), (str(tmp_path), *COMMON))


@pytest.mark.slow
def test_a_native_and_a_transformers_server_of_a_moe_model_are_a_pair_only_with_the_same_weights(
    family_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    path, prompts = family_checkpoint("qwen3_moe"), prompts_of(LENGTHS)
    expected = FAMILIES["qwen3_moe"].reference_tokens(path, prompts, NEW_TOKENS)
    impls = (("--model-impl", "native"), ("--model-impl", "transformers"))
    for prefill_flags, decode_flags in (impls, impls[::-1]):
        with running_pair(str(path), *NUMBERS, prefill_flags=prefill_flags, decode_flags=decode_flags) as pair:
            assert tokens_of(generate_batch(pair.url, bodies_of(prompts, NEW_TOKENS))) == expected
            assert_idle(*pair.workers)
    FAMILIES["qwen3_moe"].write(tmp_path, seed=1)
    prefill = start_server(str(path), "prefill", *NUMBERS, *impls[0])
    servers = [prefill, start_server(str(tmp_path), "decode", *NUMBERS, *impls[1])]
    with running(*servers):
        room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": prefill.bootstrap_port, "bootstrap_room": 4711}
        body = {"input_ids": [5, 6], **room}
        with ThreadPoolExecutor(2) as pool:
            halves = pool.map(lambda it: requests.post(f"{it.url}/generate", json=body, timeout=60), servers)
        for half in halves:
            assert half.status_code == 503 and half.json()["error"]["code"] == "weights_mismatch", half.text
        assert_idle(*servers)


def _check_refused(field: str, prefill: Sequence[str], decode: Sequence[str]) -> None:
    """Two servers, each given by its model and flags, refuse each other by the name of `field`."""
    servers = (start_server(prefill[0], "prefill", *prefill[1:]), start_server(decode[0], "decode", *decode[1:]))
    with running(*servers):
        room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": servers[0].bootstrap_port, "bootstrap_room": 4711}
        answer = requests.post(f"{servers[1].url}/generate", json={"input_ids": [5, 6], **room}, timeout=60)
        assert answer.status_code == 500, answer.text
        assert field in answer.text
        for server in servers:
            assert field in server.state()["facts"]["last_handshake_refusal"]
        assert_idle(*servers)


UNSUPPORTED: dict[str, dict[str, Any]] = {
    "the model has recurrent layers only": {
        "architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "hidden_size": 16, "num_heads": 4,
        "head_dim": 8, "n_groups": 1, "num_hidden_layers": 1,
    },
    "the attention mask of layer 0 is neither causal nor a window": {
        "architectures": ["Llama4ForCausalLM"], "model_type": "llama4_text", "hidden_size": 16,
        "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2, "intermediate_size": 16,
        "intermediate_size_mlp": 16, "num_local_experts": 2, "head_dim": 8, "attention_chunk_size": 32,
        "layer_types": ["chunked_attention", "full_attention"],
    },
    "rope_parameters has rope_type 'dynamic'": {
        "architectures": ["HeliumForCausalLM"], "model_type": "helium",
        "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    },
}  # fmt: skip
"""By the reason of a refusal, a config that neither native code nor transformers can run here."""


@pytest.mark.slow
@pytest.mark.parametrize("reason", UNSUPPORTED)
def test_a_model_that_neither_way_can_run_ends_the_start_in_one_sentence(reason: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 64, **UNSUPPORTED[reason]}))
    tiny_tokenizer().save_pretrained(tmp_path)
    save_file({"unused": torch.zeros(1)}, tmp_path / "model.safetensors")
    server = start_server(str(tmp_path), "null", name="refused")
    try:
        assert server.child.wait_exit(60.0), "it goes on"
    finally:
        status = server.child.end(5.0)
    assert status != 0
    assert sum(reason in line for line in server.lines) == 1, list(server.lines)
