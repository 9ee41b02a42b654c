"""What is left to steps and graphs when the KV pool of a CUDA device is sized; models and devices are made up."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from pdserve.config.groups import KernelConfig, MemoryConfig, ServerConfig
from pdserve.config.schedule_group import ScheduleConfig
from pdserve.errors import ConfigError
from pdserve.executor.graphs import graph_sizes
from pdserve.executor.memory_sizing import LIBRARIES_BYTES, graph_bytes, pool_tokens, step_bytes
from pdserve.executor.pools import captured_sizes, longest_chunk
from pdserve.memory.layout import KVLayout, attention_group
from pdserve.model.config import ModelSpec, spec_from_config
from pdserve.model.families.family import pre_norm_layer
from pdserve.model.layer_spec import MoeSpec

CUDA = torch.device("cuda")
LAYOUT = KVLayout(
    (
        attention_group(
            num_layers=36, page_tokens=16, num_kv_heads=8,
            head_dim=128, dtype="bfloat16",
        ),
    )
)  # fmt: skip


def spec_of_8b() -> ModelSpec:
    config = {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151_936, "hidden_size": 4096,
        "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "rms_norm_eps": 1e-6,
    }  # fmt: skip
    return spec_from_config(config, {}, where="8B")


def test_a_step_holds_at_least_its_widest_activations_and_logits() -> None:
    spec = spec_of_8b()
    gate_up_and_product = 2048 * 3 * 12_288 * 2
    logits = 256 * 151_936 * 4
    assert gate_up_and_product + logits < step_bytes(spec, 2, 2048, 256) < 4 * (gate_up_and_product + logits)
    assert step_bytes(spec, 2, 2048, 0, tp_size=4) < step_bytes(spec, 2, 2048, 0)
    moe = MoeSpec(num_experts=128, top_k=8, intermediate_size=768, norm_top_k=True)
    layers = (pre_norm_layer(spec.attentions[0], moe),) * 36
    routed = step_bytes(dataclasses.replace(spec, layers=layers), 2, 2048, 0)
    assert routed > 2048 * 8 * (3 * 768 + 2 * 4096) * 2, "each token's row for each of its experts"


def test_graphs_share_the_largest_ones_tensors_and_have_lists_of_their_own() -> None:
    spec, sizes = spec_of_8b(), graph_sizes(256)
    whole = graph_bytes(spec, 2, sizes, max_pages=2560)
    assert graph_bytes(spec, 2, (), max_pages=2560) == 0
    assert step_bytes(spec, 2, 256, 256) + 4 * sum(sizes) * 2560 < whole < 2 << 30
    assert whole - graph_bytes(spec, 2, sizes, max_pages=0) == 4 * sum(sizes) * 2560


@pytest.mark.parametrize(("flag", "expected"), [(None, 2048), (512, 512), (100_000, 4096), (-1, 4096)])
def test_the_longest_step_is_a_chunk_or_without_chunks_a_whole_prompt(flag: int | None, expected: int) -> None:
    config = ServerConfig(schedule=ScheduleConfig(chunked_prefill_size=flag))
    assert longest_chunk(config, context_length=4096) == expected


def test_decode_steps_are_captured_up_to_the_flag_or_the_rows_that_there_are() -> None:
    assert captured_sizes(KernelConfig(cuda_graph_max_bs=24), 256) == (1, 2, 4, 8, 16, 24)
    assert captured_sizes(KernelConfig(cuda_graph_max_bs=24), 3) == (1, 2, 3)
    assert captured_sizes(KernelConfig(), 1000)[-1] == 256
    assert captured_sizes(KernelConfig(disable_cuda_graph=True), 256) == ()


def test_what_comes_after_the_pool_finds_room_whatever_fraction_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    free, total = 64 << 30, 80 << 30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total))
    reserved = LIBRARIES_BYTES + (3 << 30)

    def left(fraction: float | None, reserved: int) -> int:
        memory = MemoryConfig(mem_fraction_static=fraction)
        tokens = pool_tokens(memory, LAYOUT, CUDA, context_length=1 << 20, max_rows=4096, reserved_bytes=reserved)
        return free - tokens * LAYOUT.token_bytes

    page = 16 * LAYOUT.token_bytes
    assert 0 <= left(0.99, reserved) - reserved < page
    assert 0 <= left(0.5, reserved) - (40 << 30) < page, "a fraction that leaves more is honoured"
    assert 0 <= left(None, 0) - int(0.12 * total) <= page
    with pytest.raises(ConfigError, match=r"65536 MB are left to steps and graphs"):
        left(0.99, 64 << 30)
