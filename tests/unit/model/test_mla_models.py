"""DeepSeek models in native code: greedy tokens equal transformers' own, alone, in chunks, in pairs, by the kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdserve.errors import ConfigError, ModelError
from pdserve.memory.layout import GroupKind
from pdserve.model.config import kv_layout, spec_from_config
from pdserve.model.hf.config import read_source
from pdserve.model.layer_spec import MLASpec, MoeSpec
from pdserve.model.loader import read_spec
from pdserve.model.parallel import SingleRank
from tests.driver import Driver, build
from tests.model_families import FAMILIES, LATENT, LENGTHS, prompts_of
from tests.model_pair import running_models
from tests.share import rest_slow
from tests.tiny import VOCAB_SIZE
from tests.unit.executor.native_ranks import divergence, outcome
from tests.unit.model.family_kit import NATIVE, NEW_TOKENS, check_chunks, check_pair
from tests.unit.model.native_kit import needs_kernels

YARN = {
    "rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 64, "mscale": 0.7,
    "mscale_all_dim": 0.9, "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip
GROUPS = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "routed_scaling_factor": 2.5}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "v3, groups": ("deepseek_v3", GROUPS),
    "v2, groups, yarn": ("deepseek_v2", {**GROUPS, "topk_method": "group_limited_greedy", "rope_parameters": YARN}),
    "v2-lite": ("deepseek_v2", {"q_lora_rank": None, "n_shared_experts": 2, "first_k_dense_replace": 0}),
    "v3, halves, biases": ("deepseek_v3", {"rope_interleave": False, "attention_bias": True, "norm_topk_prob": False}),
}


def write(directory: Path, name: str, **changes: Any) -> Path:
    """Write the tiny checkpoint of a family with these changes of its config."""
    family = FAMILIES[name]
    dataclasses.replace(family, changes={**family.changes, **changes}).write(directory)
    return directory


@pytest.mark.parametrize("name", rest_slow(LATENT, keep=2))
def test_tokens_equal_transformers_alone_and_in_chunks(name: str, family_checkpoint: Callable[[str], Path]) -> None:
    check_chunks(FAMILIES[name], family_checkpoint(name), alone=True)


@pytest.mark.parametrize("name", rest_slow(VARIANTS))
def test_variants_of_a_family_equal_transformers(name: str, tmp_path: Path) -> None:
    family, changes = VARIANTS[name]
    check_chunks(FAMILIES[family], write(tmp_path, family, **changes), lengths=(1, 65, 300), chunk=70)


@pytest.mark.parametrize("name", rest_slow(LATENT))
def test_tokens_equal_transformers_with_a_prefix_hit_and_in_a_pair(
    name: str, family_checkpoint: Callable[[str], Path]
) -> None:
    offload = name == "deepseek_v3"
    check_pair(FAMILIES[name], family_checkpoint(name), at_once=slice(1, None), num_hits=256, offload=offload, **NATIVE)


@pytest.mark.parametrize(
    ("name", "prefill_impl"),
    rest_slow([("deepseek_v2", "native"), *((name, impl) for name in LATENT for impl in ("native", "transformers"))]),
)
def test_a_native_and_a_transformers_server_are_a_pair(
    name: str, prefill_impl: str, family_checkpoint: Callable[[str], Path]
) -> None:
    path, prompts = family_checkpoint(name), prompts_of((1, 65, 300), seed=2)
    expected = FAMILIES[name].reference_tokens(path, prompts, NEW_TOKENS)
    decode_impl = "transformers" if prefill_impl == "native" else "native"
    with running_models(path, pair=True, prefill_impl=prefill_impl, model_impl=decode_impl) as pair:
        assert pair.generate(prompts, NEW_TOKENS) == expected
        pair.assert_idle()


@pytest.mark.parametrize("name", LATENT)
def test_native_code_and_transformers_have_the_same_latents(
    name: str, family_checkpoint: Callable[[str], Path]
) -> None:
    path = family_checkpoint(name)
    source = read_source(path)
    native = kv_layout(read_spec(path), 16, "float32")
    assert native.fields() == source.layout(source.probe("float32"), 16).fields()
    latent, *index = native.groups
    assert (latent.kind, latent.layers, latent.head_dim, latent.num_kv_heads) == (
        GroupKind.MLA, tuple(range(native.num_layers)), 24, 1,
    )  # fmt: skip
    with_index = {"deepseek_v32": (0, 1), "glm_moe_dsa": (0, 2)}.get(name)
    assert [(group.kind, group.layers, group.head_dim) for group in index] == (
        [] if with_index is None else [(GroupKind.INDEX, with_index, 16)]
    )


@needs_kernels
@pytest.mark.parametrize("name", LATENT)
def test_logits_of_the_kernels_are_near_float32(name: str, family_checkpoint: Callable[[str], Path]) -> None:
    path = family_checkpoint(name)
    truth = outcome(SingleRank(), path, VOCAB_SIZE, "torch", "float32").logprobs
    mine, torchs = (outcome(SingleRank(), path, VOCAB_SIZE, kernels).logprobs for kernels in ("native", "torch"))
    assert divergence(mine, truth) < max(1e-3, 1.2 * divergence(torchs, truth))


@needs_kernels
@pytest.mark.parametrize(
    ("name", "quantization"),
    [
        ("deepseek_v3", None),
        ("deepseek_v3", "int8"),
        ("deepseek_v32", None),
        *rest_slow([("glm_moe_dsa", None), ("deepseek_v32", "int8")], keep=0),
    ],
)
def test_a_pair_of_the_kernels_gives_the_tokens_of_the_monolith(
    name: str, quantization: str | None, family_checkpoint: Callable[[str], Path]
) -> None:
    path, prompts = family_checkpoint(name), prompts_of(LENGTHS)
    driver = Driver(build(path, dtype="bfloat16", cpu_kernels="native", quantization=quantization))
    assert driver.built.arithmetic != "torch"
    expected = driver.generate(prompts, NEW_TOKENS, chunk=40)
    assert [driver.generate([prompt], NEW_TOKENS)[0] for prompt in prompts] == expected, "the bits of any batch"
    if quantization is None:
        with running_models(path, pair=True, prefill_impl="native", model_impl="native", dtype="bfloat16") as pair:
            assert pair.generate(prompts, NEW_TOKENS) == expected
            pair.assert_idle()


def config_of(architecture: str, **fields: Any) -> dict[str, Any]:
    """A small config, as its file has it."""
    return {
        "architectures": [architecture], "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "intermediate_size": 48, "moe_intermediate_size": 16, "num_experts_per_tok": 2,
        **fields,
    }  # fmt: skip


V2, V3, V32 = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM")
LITE, GLM = "Glm4MoeLiteForCausalLM", "GlmMoeDsaForCausalLM"


@pytest.mark.parametrize(
    ("architecture", "fields", "reason"),
    [
        (V3, {"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        (V3, {"topk_method": "greedy"}, "topk_method 'greedy'"),
        (V2, {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc'"),
        (V2, {"norm_topk_prob": True}, "norm_topk_prob True"),
        (V2, {"moe_layer_freq": 2}, "moe_layer_freq 2"),
        (V3, {"n_group": 7}, "n_group 7 does not divide"),
        (V3, {"topk_group": 9}, "topk_group is 9"),
        (V3, {"n_routed_experts": 8, "topk_group": 1}, "topk_group 1 of 8 groups have fewer"),
        (V3, {"qk_rope_head_dim": 63}, "qk_rope_head_dim is 63"),
        (V3, {"kv_lora_rank": 0}, "kv_lora_rank is 0"),
        (V2, {"q_lora_rank": "x"}, "q_lora_rank is 'x'"),
        (V32, {"q_lora_rank": None}, "q_lora_rank null"),
        (V32, {"index_head_dim": 32}, "qk_rope_head_dim 64 is more than index_head_dim 32"),
        (V32, {"index_topk": 0}, "index_topk is 0"),
        (V32, {"mlp_layer_types": ["dense"]}, "mlp_layer_types has 1 entries"),
        (LITE, {"mlp_layer_types": ["dense", "x"]}, "mlp_layer_types has x"),
        (GLM, {"index_topk_pattern": "F"}, "indexer_types has 1 entries"),
        (GLM, {"indexer_types": ["shared", "full"]}, "begins with shared"),
        (V3, {"quantization_config": {"quant_method": "bitsandbytes"}}, "quant_method 'bitsandbytes'"),
    ],
)
def test_bad_fields_are_refused_by_name(architecture: str, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        spec_from_config(config_of(architecture, **fields), {}, where="here")


def test_a_sparse_config_has_the_usual_values() -> None:
    """Old field names, as in published checkpoints."""
    rope = {
        "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0,
        "beta_fast": 32, "beta_slow": 1,
    }  # fmt: skip
    config = {
        "architectures": [V3], "vocab_size": 129280, "hidden_size": 7168, "num_hidden_layers": 61,
        "num_attention_heads": 128, "intermediate_size": 18432, "max_position_embeddings": 163840,
        "rope_scaling": rope, "rope_theta": 10000, "num_nextn_predict_layers": 1,
    }  # fmt: skip
    spec = spec_from_config(config, {}, where="here")
    (mla,) = (op for op in spec.operations if isinstance(op, MLASpec))
    assert (mla.q_lora_rank, mla.latent_dim, mla.key_dim, mla.value_dim) == (1536, 576, 192, 128)
    assert mla.scale == pytest.approx(192**-0.5 * 1.3688879454113936**2)
    assert mla.rope is not None and mla.rope.attention_factor == 1.0 and mla.rope.interleaved
    moe = spec.moe
    assert isinstance(moe, MoeSpec) and (moe.num_groups, moe.top_groups, moe.num_experts) == (8, 4, 256)
    assert spec.moe_layers == tuple(range(3, 61))
    assert spec.names.ignored == ("model.layers.61.",)
    assert spec.names.mtp is not None and spec.names.mtp.project == "model.layers.61.eh_proj"
    assert kv_layout(spec, 64, "bfloat16").token_bytes == 61 * 576 * 2


def test_a_period_names_the_layers_with_an_index() -> None:
    config = config_of(GLM, num_hidden_layers=7, index_topk_freq=2, index_skip_topk_offset=3)
    found = [layer.operations[0] for layer in spec_from_config(config, {}, where="here").layers]
    shared = [isinstance(op, MLASpec) and op.index is not None and op.index.shared for op in found]
    assert shared == [False, False, False, True, False, True, False]
    other = spec_from_config(config_of(GLM, num_hidden_layers=7, index_topk_pattern="FFFSFSF"), {}, where="here")
    assert other.layers == spec_from_config(config, {}, where="here").layers


def test_deterministic_inference_needs_the_kernels(family_checkpoint: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match="attention over latents") as error:
        build(family_checkpoint("deepseek_v3"), dtype="float32", deterministic=True)
    assert error.value.field == "enable_deterministic_inference"
