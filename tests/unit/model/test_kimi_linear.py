"""Kimi Linear in native code: greedy fp32 tokens of monolith and pair equal transformers' own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from safetensors.torch import load_file, save_file

from pdserve.errors import ModelError, UnsupportedModelError
from pdserve.memory.layout import GroupKind
from pdserve.model.config import kv_layout, spec_from_config
from pdserve.model.layer_spec import GatedDeltaSpec, MLASpec, MLPSpec, MoeSpec
from pdserve.model.loader import read_spec
from tests.driver import Driver, build
from tests.model_families import KIMI, LENGTHS, deep_hybrid, prompts_of
from tests.model_pair import running_models

NEW_TOKENS, LONG = 8, 60
FEW_TOKENS = 384
"""Tokens of a pool that is too small for the load of `LONG` tokens each."""


@pytest.mark.parametrize("chunk", [64, pytest.param(-1, marks=pytest.mark.slow)])
def test_a_monolith_gives_transformers_tokens(chunk: int, hybrid_checkpoint: Callable[[str], Path]) -> None:
    path, prompts = hybrid_checkpoint(KIMI), prompts_of((*LENGTHS, 64, 5))
    expected = deep_hybrid(KIMI).reference_tokens(path, prompts, NEW_TOKENS)
    with running_models(path, pair=False, model_impl="native", chunk=chunk) as server:
        assert server.generate(prompts[4:5], NEW_TOKENS) == expected[4:5]
        assert server.generate(prompts, NEW_TOKENS) == expected, "at once, with a prefix hit"
        assert server.answering.state().counters["cached_tokens"] >= 256
        server.assert_idle()


@pytest.mark.parametrize("layerwise", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_pair_gives_transformers_tokens_with_retractions(
    layerwise: bool, hybrid_checkpoint: Callable[[str], Path]
) -> None:
    path, prompts, load = hybrid_checkpoint(KIMI), prompts_of(LENGTHS), prompts_of((63, 64, 65, 40), seed=1)
    expected = deep_hybrid(KIMI).reference_tokens(path, prompts, NEW_TOKENS)
    long = deep_hybrid(KIMI).reference_tokens(path, load, LONG)
    impls: dict[str, Any] = {"prefill_impl": "native", "model_impl": "native"}
    with running_models(
        path, pair=True, max_total_tokens=FEW_TOKENS, offload=layerwise, layerwise=layerwise, **impls
    ) as pair:
        assert [pair.generate([prompt], NEW_TOKENS)[0] for prompt in prompts] == expected
        assert pair.generate(prompts, NEW_TOKENS) == expected, "at once"
        answers = pair.generate([*load, load[0]], LONG, aborted={4: 5})
        assert answers[:4] == long, "with too little memory"
        assert answers[4] == long[0][: len(answers[4])], "what came before the abort"
        assert pair.answering.state().counters["requests_retracted"] > 0
        pair.assert_idle()


@pytest.mark.parametrize("is_pair", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_turns_and_branches_continue_from_a_cached_state(
    is_pair: bool, hybrid_checkpoint: Callable[[str], Path]
) -> None:
    path, (shared, *tails) = hybrid_checkpoint(KIMI), prompts_of((150, 60, 20, 30, 70), seed=3)
    prompts = [shared + tail for tail in tails[:3]]
    prompts.append(prompts[0] + tails[3])
    expected = deep_hybrid(KIMI).reference_tokens(path, prompts, NEW_TOKENS)
    impls: dict[str, Any] = {"prefill_impl": "native", "model_impl": "native"}
    with running_models(path, pair=is_pair, chunk=512, **impls) as server:
        prefill, cached = server.prefill or server.answering, []
        for prompt, tokens in zip(prompts, expected, strict=True):
            before = prefill.state().counters.get("cached_tokens", 0)
            assert server.generate([prompt], NEW_TOKENS) == [tokens]
            cached.append(prefill.state().counters.get("cached_tokens", 0) - before)
        assert cached == [0, 0, 128, 192], "150 shared tokens reach the second multiple of 64, 210 the third"
        server.assert_idle()


def test_layers_and_groups_follow_the_config(hybrid_checkpoint: Callable[[str], Path]) -> None:
    spec = read_spec(hybrid_checkpoint(KIMI))
    kinds = [tuple(map(type, layer.operations)) for layer in spec.layers]
    assert kinds == [(GatedDeltaSpec, MLPSpec), *[(GatedDeltaSpec, MoeSpec)] * 2, (MLASpec, MoeSpec)]
    delta, attention = spec.operations[0], spec.layers[3].operations[0]
    assert isinstance(delta, GatedDeltaSpec) and isinstance(attention, MLASpec)
    assert delta.channel_decay and spec.has_channel_decay and attention.rope is None and spec.rotations == ()
    assert spec.max_positions == 2048
    latent, state = kv_layout(spec, 16, "bfloat16").groups
    assert (latent.kind, latent.layers, state.kind, state.layers) == (GroupKind.MLA, (3,), GroupKind.STATE, (0, 1, 2))
    assert [(plane.name, plane.num_heads, plane.rows, plane.width, plane.dtype) for plane in state.planes] == [
        ("conv_q", 4, 8, 3, "bfloat16"), ("conv_k", 4, 8, 3, "bfloat16"), ("conv_v", 4, 8, 3, "bfloat16"),
        ("state", 4, 8, 8, "float32"),
    ]  # fmt: skip


def config_of(**fields: Any) -> dict[str, Any]:
    return {
        "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "vocab_size": 64, "hidden_size": 32,
        "num_hidden_layers": 8, "num_attention_heads": 4, "intermediate_size": 48, **fields,
    }  # fmt: skip


LINEAR = {
    "full_attn_layers": [4, 8], "kda_layers": [1, 2, 3, 5, 6, 7], "head_dim": 64, "num_heads": 16,
    "short_conv_kernel_size": 3,
}  # fmt: skip


@pytest.mark.parametrize("fields", [{}, {"linear_attn_config": LINEAR, "first_k_dense_replace": 2}], ids=len)
def test_the_values_are_those_of_transformers(fields: dict[str, Any]) -> None:
    """Of a config that names as little as may be, and of one with the object that checkpoints have."""
    spec, theirs = (
        spec_from_config(config_of(**fields), {}, where="here"),
        transformers.KimiLinearConfig(**config_of(**fields)),
    )
    delta, moe = spec.operations[0], spec.moe
    attention = next(op for op in spec.operations if isinstance(op, MLASpec))
    assert isinstance(delta, GatedDeltaSpec) and moe is not None
    ops = [layer.operations for layer in spec.layers]
    kinds = ["linear_attention" if isinstance(op[0], GatedDeltaSpec) else "full_attention" for op in ops]
    assert kinds == theirs.layer_types
    assert [{MLPSpec: "dense", MoeSpec: "sparse"}[type(op[1])] for op in ops] == theirs.mlp_layer_types
    assert (delta.num_key_heads, delta.num_value_heads) == (theirs.linear_num_heads,) * 2
    assert (delta.key_dim, delta.value_dim) == (theirs.linear_head_dim,) * 2
    assert delta.conv_kernel == theirs.linear_conv_kernel_dim
    assert (moe.num_experts, moe.top_k, moe.intermediate_size) == (
        theirs.num_local_experts, theirs.num_experts_per_tok, theirs.moe_intermediate_size,
    )  # fmt: skip
    assert moe.shared_intermediate_size == theirs.n_shared_experts * theirs.moe_intermediate_size
    assert (moe.routed_scale, moe.norm_top_k, moe.num_groups) == (
        theirs.routed_scaling_factor, theirs.norm_topk_prob, theirs.n_group,
    )  # fmt: skip
    assert (attention.q_lora_rank, attention.kv_lora_rank, attention.rope_dim, attention.nope_dim) == (
        theirs.q_lora_rank, theirs.kv_lora_rank, theirs.qk_rope_head_dim, theirs.qk_nope_head_dim,
    )  # fmt: skip
    assert (spec.max_positions, spec.rms_norm_eps) == (theirs.max_position_embeddings, theirs.rms_norm_eps)


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts"])
def test_fields_may_have_either_name(name: str) -> None:
    spec = spec_from_config(
        config_of(**{name: 16, "num_experts_per_token": 2, "moe_renormalize": False}), {}, where="here"
    )
    assert spec.moe is not None and (spec.moe.num_experts, spec.moe.top_k, spec.moe.norm_top_k) == (16, 2, False)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"num_experts": 0}, "num_experts is 0"),
        ({"num_experts_per_token": 300}, "num_experts_per_token is 300, but there are 256"),
        ({"num_expert_group": 3, "topk_group": 1}, "num_expert_group 3 does not divide"),
        ({"model_max_length": -1}, "model_max_length is -1"),
        ({"mla_use_nope": False}, "mla_use_nope False is not supported"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func 'softmax'"),
        ({"linear_head_dim": 0}, "linear_head_dim is 0"),
        ({"layer_types": ["linear_attention"]}, "layer_types has 1 entries"),
        ({"linear_attn_config": 3}, "linear_attn_config is 3"),
        ({"linear_attn_config": {**LINEAR, "head_dim": -4}}, "linear_attn_config: head_dim is -4"),
        ({"linear_attn_config": {**LINEAR, "kda_layers": [1, 2]}}, "do not name each of the 8 layers once"),
        ({"linear_attn_config": {**LINEAR, "kda_layers": "all"}}, "linear_attn_config: kda_layers is 'all'"),
    ],
)  # fmt: skip
def test_bad_fields_are_refused_by_name(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        spec_from_config(config_of(**fields), {}, where="here")


def test_a_model_of_recurrent_layers_only_is_refused() -> None:
    linear = {**LINEAR, "full_attn_layers": [], "kda_layers": list(range(1, 9))}
    with pytest.raises(UnsupportedModelError, match="full_attn_layers of linear_attn_config is empty"):
        spec_from_config(config_of(linear_attn_config=linear), {}, where="here")


def test_dense_layers_have_the_names_of_checkpoints_too(
    hybrid_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """transformers saves the feed-forward of a dense layer as it does experts; published checkpoints do not."""
    path = hybrid_checkpoint(KIMI)
    for file in path.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).symlink_to(file)
    tensors = load_file(path / "model.safetensors")
    dense = "model.layers.0.block_sparse_moe."
    assert f"{dense}gate_proj.weight" in tensors
    save_file(
        {name.replace(dense, "model.layers.0.mlp."): value for name, value in tensors.items()},
        tmp_path / "model.safetensors",
    )
    found = []
    for directory in (path, tmp_path):
        built = build(directory, dtype="float32", cpu_kernels="torch")
        found.append((Driver(built).generate(prompts_of([40]), 6), built.executor.weights_fingerprint))
        built.executor.close()
    assert found[0] == found[1]
