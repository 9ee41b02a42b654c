"""Models through transformers: layouts from the probe, refusals by name, and the tokens of servers in one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdserve.config.groups import KernelConfig, MemoryConfig, ModelConfig, ModelImpl, ParallelConfig, ServerConfig
from pdserve.errors import ConfigError, HandshakeError, ModelError
from pdserve.executor.factory import LoadedEngine, build_executor
from pdserve.launch_checks import check_model
from pdserve.memory.layout import GroupKind, attention_group
from pdserve.model.attention.page_gather import GroupPool
from pdserve.model.forward_batch import ForwardBatch
from pdserve.model.hf.config import read_source
from pdserve.model.hf.model import load_transformers_model
from pdserve.model.hf.self_check import check_against
from pdserve.model.parallel import SingleRank
from pdserve.transfer.peers import check_facts
from tests.model_families import FAMILIES, LENGTHS, PAGE, page_with, prompts_of, table
from tests.model_pair import running_models
from tests.share import rest_slow
from tests.unit.model.family_kit import check_pair

NEW_TOKENS, LONG = 12, 100
QUICK = ("gpt_oss", "qwen3_next")


def write_config(directory: Path, architecture: str, model_type: str, **fields: Any) -> Path:
    """Write a config without weights."""
    config = {"architectures": [architecture], "model_type": model_type, "vocab_size": 64, **fields}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def build(path: Path, **groups: Any) -> LoadedEngine:
    defaults: dict[str, Any] = {
        "model": ModelConfig(model_path=str(path), dtype="float32"),
        "memory": MemoryConfig(page_size=16, max_total_tokens=1024),
        "kernels": KernelConfig(device="cpu", cpu_threads=1),
    }
    return build_executor(ServerConfig(**(defaults | groups)), max_rows=4)


def test_layers_with_other_heads_and_windows_are_groups_of_their_own(family_checkpoint: Callable[[str], Path]) -> None:
    source = read_source(family_checkpoint("mimo_v2_flash"))
    full, window = source.layout(source.probe("bfloat16"), 16).groups
    assert (full.kind, full.layers, window.kind, window.layers) == (GroupKind.FULL, (0,), GroupKind.WINDOW, (1,))
    assert [(plane.num_heads, plane.width, plane.dtype) for plane in full.planes] == [
        (2, 8, "bfloat16"), (2, 12, "bfloat16"),
    ]  # fmt: skip
    assert [(plane.num_heads, plane.width) for plane in window.planes] == [(4, 8), (4, 12)]
    assert window.window == 24


def test_recurrent_layers_have_state_and_latents_are_one_plane(family_checkpoint: Callable[[str], Path]) -> None:
    source = read_source(family_checkpoint("kimi_linear"))
    latent, state = source.layout(source.probe("float32"), 16).groups
    assert (latent.kind, latent.layers, latent.planes[0].width) == (GroupKind.MLA, (1,), 16 + 8)
    assert (state.kind, state.layers) == (GroupKind.STATE, (0,))
    assert [(plane.name, plane.num_heads, plane.rows, plane.width) for plane in state.planes] == [
        ("conv0", 1, 96, 4), ("state0", 4, 8, 8),
    ]  # fmt: skip


def test_index_keys_are_a_group_and_models_with_windows_only_keep_all_tokens(
    family_checkpoint: Callable[[str], Path],
) -> None:
    sparse, windows = read_source(family_checkpoint("deepseek_v32")), read_source(family_checkpoint("mistral"))
    layout = sparse.layout(sparse.probe("float32"), 16)
    assert [group.kind for group in layout.groups] == [GroupKind.MLA, GroupKind.INDEX]
    assert layout.state_type == "nsa"
    assert [group.kind for group in windows.layout(windows.probe("float32"), 16).groups] == [GroupKind.FULL]


@pytest.mark.parametrize(
    ("architecture", "model_type", "fields", "reason"),
    [
        ("T5ForConditionalGeneration", "t5", {}, "is_encoder_decoder"),
        ("NoSuchForCausalLM", "nosuch", {"auto_map": {"AutoModel": "x.Y"}}, "auto_map names remote code"),
        ("BertModel", "bert", {}, "no language-model head"),
        (
            "HeliumForCausalLM", "helium",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rope_type 'dynamic'",
        ),
        ("HeliumForCausalLM", "helium", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        (
            "Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl",
            {"text_config": {"quantization_config": {"quant_method": "fp8"}}}, "quantization_config",
        ),
        (
            "Mamba2ForCausalLM", "mamba2",
            {"hidden_size": 16, "num_heads": 4, "head_dim": 8, "n_groups": 1, "num_hidden_layers": 1},
            "recurrent layers only",
        ),
        (
            "RecurrentGemmaForCausalLM", "recurrent_gemma",
            {
                "hidden_size": 16, "num_attention_heads": 2, "lru_width": 16, "num_hidden_layers": 3,
                "intermediate_size": 16, "head_dim": 8,
            },
            "keeps state in its module",
        ),
        (
            "BartForCausalLM", "bart",
            {"is_encoder_decoder": False, "d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2},
            "takes no position_ids",
        ),
        (
            "Llama4ForCausalLM", "llama4_text",
            {
                "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2,
                "intermediate_size": 16, "intermediate_size_mlp": 16, "num_local_experts": 2, "head_dim": 8,
                "attention_chunk_size": 32, "layer_types": ["chunked_attention", "full_attention"],
            },
            "neither causal nor a window",
        ),
    ],
)  # fmt: skip
def test_a_model_that_neither_way_can_run_is_refused_before_its_weights_are_read(
    architecture: str, model_type: str, fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    path = write_config(tmp_path, architecture, model_type, **fields)
    with pytest.raises(ModelError, match=reason):
        build(path)


@pytest.mark.parametrize(
    ("field", "groups"),
    [
        ("tp_size", {"parallel": ParallelConfig(tp_size=2)}),
        ("pp_size", {"parallel": ParallelConfig(pp_size=2)}),
        (
            "enable_deterministic_inference",
            {"kernels": KernelConfig(device="cpu", cpu_threads=1, enable_deterministic_inference=True)},
        ),
    ],
)
def test_flags_that_need_native_code_are_refused_by_name(
    field: str, groups: dict[str, Any], family_checkpoint: Callable[[str], Path]
) -> None:
    with pytest.raises(ConfigError) as caught:
        build(family_checkpoint("mimo_v2_flash"), **groups)
    assert caught.value.field == field


def test_the_launcher_refuses_to_split_a_model_without_native_code(family_checkpoint: Callable[[str], Path]) -> None:
    model = ModelConfig(model_path=str(family_checkpoint("mimo_v2_flash")))
    with pytest.raises(ConfigError, match=r"--pp-size does not fit a model through transformers") as caught:
        check_model(ServerConfig(model=model, parallel=ParallelConfig(pp_size=2)))
    assert caught.value.field == "pp_size"


def test_native_only_refuses_what_it_does_not_know(family_checkpoint: Callable[[str], Path]) -> None:
    path = family_checkpoint("mimo_v2_flash")
    with pytest.raises(ModelError, match="MiMoV2FlashForCausalLM"):
        build(path, model=ModelConfig(model_path=str(path), model_impl="native"))


def test_a_missing_tensor_is_named(family_checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    for file in family_checkpoint("mimo_v2_flash").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.self_attn.q_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"1 missing keys, such as model\.layers\.1\.self_attn\.q_proj\.weight"):
        build(tmp_path)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "glm4_moe"])
def test_both_builds_of_a_family_have_the_same_layout_config_and_weights(
    name: str, family_checkpoint: Callable[[str], Path]
) -> None:
    path = family_checkpoint(name)

    def facts(impl: Any, load_format: Any) -> tuple[object, ...]:
        model = ModelConfig(model_path=str(path), dtype="float32", model_impl=impl, load_format=load_format)
        built = build(path, model=model)
        return built.layout.fields(), built.spec.digest(), built.executor.weights_fingerprint

    assert facts("native", "auto") == facts("transformers", "auto")
    assert facts("native", "dummy") == facts("transformers", "dummy")
    assert facts("native", "auto") != facts("native", "dummy")


def test_builds_with_other_weights_are_refused_as_a_pair(
    family_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    FAMILIES["qwen3_moe"].write(tmp_path, seed=1)

    def facts(path: Path, impl: ModelImpl) -> dict[str, str | int]:
        built = build(path, model=ModelConfig(model_path=str(path), dtype="float32", model_impl=impl))
        return {**built.layout.fields(), "weights": built.executor.weights_fingerprint}

    with pytest.raises(HandshakeError) as caught:
        check_facts(facts(family_checkpoint("qwen3_moe"), "native"), facts(tmp_path, "transformers"))
    assert caught.value.field == "weights"


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES])
def test_weights_have_the_names_and_values_of_the_checkpoint(
    name: str, family_checkpoint: Callable[[str], Path]
) -> None:
    path = family_checkpoint(name)
    source = read_source(path)
    model = load_transformers_model(
        source, source.probe("float32"), "float32", torch.device("cpu"), SingleRank(), load_format="auto", seed=0
    )
    samples = model.params.samples()
    weights = load_file(path / "model.safetensors")
    assert samples.keys() <= weights.keys()
    for weight, values in samples.items():
        flat = weights[weight].flatten()
        assert all(float(flat[position]) == value for position, value in values.items()), weight


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in FAMILIES]
)
def test_pair_gives_transformers_tokens_with_retractions_and_an_abort(
    name: str, family_checkpoint: Callable[[str], Path]
) -> None:
    flags = {"num_new": NEW_TOKENS, "num_long": LONG, "offload": sorted(FAMILIES).index(name) % 2 == 0}
    check_pair(FAMILIES[name], family_checkpoint(name), at_once=slice(1, 4), **flags)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(FAMILIES))
def test_monolith_gives_transformers_tokens(name: str, family_checkpoint: Callable[[str], Path]) -> None:
    path, prompts = family_checkpoint(name), prompts_of(LENGTHS)
    expected = FAMILIES[name].reference_tokens(path, prompts, NEW_TOKENS)
    with running_models(path, pair=False) as server:
        assert [server.generate([prompt], NEW_TOKENS)[0] for prompt in prompts] == expected
        assert server.generate(prompts[1:], NEW_TOKENS) == expected[1:], "four at once"
        server.assert_idle()


@pytest.mark.parametrize(
    ("name", "prefill_impl", "decode_impl"),
    rest_slow(
        [
            ("qwen3_moe", "native", "transformers"),
            ("qwen3_moe", "transformers", "native"),
            ("llama", "native", "transformers"),
            ("llama", "transformers", "native"),
        ]
    ),
)
def test_a_native_and_a_transformers_server_are_a_pair(
    name: str, prefill_impl: ModelImpl, decode_impl: ModelImpl, family_checkpoint: Callable[[str], Path]
) -> None:
    path, prompts = family_checkpoint(name), prompts_of(LENGTHS)
    expected = FAMILIES[name].reference_tokens(path, prompts, NEW_TOKENS)
    with running_models(path, pair=True, prefill_impl=prefill_impl, model_impl=decode_impl) as pair:
        assert pair.generate(prompts, NEW_TOKENS) == expected
        pair.assert_idle()


@pytest.mark.slow
def test_the_table_of_families_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page_with(table()), "python -m tests.model_families --write"


def test_the_self_check_refuses_hidden_states_of_another_model() -> None:
    group = attention_group(page_tokens=16, num_kv_heads=1, head_dim=8, dtype="float32", num_layers=1)
    pools = [GroupPool(group, 4, torch.device("cpu"))]
    own = [torch.ones(length, 4) for length in (5, 7)]
    lengths = []

    def same(batch: ForwardBatch) -> torch.Tensor:
        lengths.append(batch.num_tokens)
        return torch.ones(batch.num_tokens, 4)

    check_against(own, same, pools, 100, "here")
    assert lengths == [4 + 6, 2], "two prompts, then a token of each"
    with pytest.raises(ModelError, match="here: over pages the model's hidden states differ"):
        check_against(own, lambda batch: -same(batch), pools, 100, "here")
