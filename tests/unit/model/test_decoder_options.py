"""Dense families with options of their own, in native code with torch: greedy fp32 tokens equal transformers' own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdserve.errors import ModelError
from pdserve.memory.layout import GroupKind
from pdserve.model.config import kv_layout, spec_from_config
from pdserve.model.loader import read_spec
from pdserve.transfer.peers import check_facts
from tests.driver import Driver, build
from tests.model_families import DENSE, FAMILIES, PLAIN_DENSE, prompts_of
from tests.share import rest_slow
from tests.unit.model.family_kit import NATIVE, NEW_TOKENS, check_chunks, check_pair

ALL = (*DENSE, *PLAIN_DENSE)


@pytest.mark.parametrize("name", rest_slow(ALL, keep=3))
def test_tokens_equal_transformers_alone_and_in_chunks(name: str, family_checkpoint: Callable[[str], Path]) -> None:
    check_chunks(FAMILIES[name], family_checkpoint(name), alone=True)


@pytest.mark.parametrize("name", rest_slow(ALL, keep=2))
def test_tokens_equal_transformers_with_a_prefix_hit_and_in_a_pair(
    name: str, family_checkpoint: Callable[[str], Path]
) -> None:
    offload = ALL.index(name) % 2 == 0
    check_pair(FAMILIES[name], family_checkpoint(name), at_once=slice(1, None), num_hits=256, offload=offload, **NATIVE)


@pytest.mark.parametrize("name", rest_slow(["gemma2", "olmo3", "granite"]))
def test_the_deterministic_mode_has_the_options_too(name: str, family_checkpoint: Callable[[str], Path]) -> None:
    check_chunks(FAMILIES[name], family_checkpoint(name), deterministic=True, cpu_kernels="torch")


def test_windows_are_a_group_beside_full_attention(family_checkpoint: Callable[[str], Path]) -> None:
    for name in ("gemma2", "gemma3_text", "olmo3", "ministral"):
        full, window = kv_layout(read_spec(family_checkpoint(name)), 16, "float32").groups
        assert (full.kind, full.layers, window.kind, window.layers, window.window) == (
            GroupKind.FULL, (1,), GroupKind.WINDOW, (0,), 24,
        )  # fmt: skip


def test_older_configs_of_gemma3_have_two_bases(family_checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    new = json.loads((family_checkpoint("gemma3_text") / "config.json").read_text())
    ropes = new.pop("rope_parameters")
    old = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    ropes["full_attention"] |= {"rope_type": "linear", "factor": 8.0}
    specs = [spec_from_config(new | fields, {}, where="here") for fields in ({"rope_parameters": ropes}, old)]
    assert specs[0] == specs[1]
    local, full = (op.rope for op in specs[0].attentions)
    assert local is not None and full is not None
    assert (local.theta, local.type, full.theta, full.type, full.factor) == (1e4, "default", 1e6, "linear", 8.0)


def test_a_sparse_config_of_gemma3_has_the_usual_values() -> None:
    """As in the text_config of published vision-language checkpoints."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    spec = spec_from_config(config, {}, where="here")
    attention = spec.attentions[0]
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim, attention.window) == (8, 4, 256, 1024)
    assert [layer.operations[0] == attention for layer in spec.layers].count(False) == 5
    assert (spec.vocab_size, spec.tied_embeddings, spec.max_positions) == (262208, True, 131072)
    assert (attention.scale, spec.embedding_scale, spec.norm_offset) == (None, 2560**0.5, 1.0)


def test_longrope_takes_the_factors_of_the_context(tmp_path: Path) -> None:
    """transformers takes the long factors for prompts that are longer than the original context."""
    import dataclasses

    short, long = [1.0, 1.5, 2.0, 2.5], [1.0, 4.0, 16.0, 20.0]
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": short, "long_factor": long}
    family = dataclasses.replace(
        FAMILIES["phi3"], changes={"original_max_position_embeddings": 32, "rope_parameters": rope}
    )
    family.write(tmp_path)
    prompts = prompts_of((65, 300))
    expected = family.reference_tokens(tmp_path, prompts, NEW_TOKENS)
    driver = Driver(build(tmp_path, dtype="float32", model_impl="native"))
    assert driver.generate(prompts, NEW_TOKENS, chunk=40) == expected
    config = json.loads((tmp_path / "config.json").read_text())
    changed = config | {"max_position_embeddings": 32, "original_max_position_embeddings": 32}
    changed["rope_parameters"] = rope | {"original_max_position_embeddings": 32}
    (shorter,) = spec_from_config(changed, {}, where="here").attentions
    assert shorter.rope is not None and shorter.rope.freq_divisors == tuple(short)


def test_native_code_and_transformers_are_no_pair_for_interleaved_heads(
    family_checkpoint: Callable[[str], Path],
) -> None:
    facts = []
    for impl in ("native", "transformers"):
        built = build(family_checkpoint("glm4"), dtype="float32", model_impl=impl)
        facts.append({**built.layout.fields(), "model": built.spec.digest()})
        built.executor.close()
    from pdserve.errors import HandshakeError

    with pytest.raises(HandshakeError) as error:
        check_facts(*facts)
    assert error.value.field == "model"


BASE = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 512,
}  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "fields", "reason"),
    [
        ("Gemma2ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
        ("Gemma2ForCausalLM", {"hidden_activation": "relu"}, "hidden_activation 'relu'"),
        ("Gemma3ForCausalLM", {"layer_types": ["full_attention"]}, "layer_types has 1 entries"),
        ("Gemma3ForCausalLM", {"query_pre_attn_scalar": -1}, "query_pre_attn_scalar is -1"),
        ("Gemma2ForCausalLM", {"attn_logit_softcapping": "x"}, "attn_logit_softcapping is 'x'"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1]}, "no_rope_layers has 1 entries"),
        ("GraniteForCausalLM", {"residual_multiplier": -1.0}, "residual_multiplier is -1.0"),
        ("Glm4ForCausalLM", {"head_dim": 6}, "rotates 3 of 6 dimensions"),
        ("Phi3ForCausalLM", {"rope_scaling": {"type": "su", "short_factor": [1.0]}}, "factors of 1 pairs"),
        ("Phi3ForCausalLM", {"rope_scaling": {"type": "longrope", "short_factor": [0.0] * 4}}, "short_factor"),
        ("Phi3ForCausalLM", {"original_max_position_embeddings": 64, "rope_scaling": {"type": "su"}}, "long_factor"),
        ("Olmo3ForCausalLM", {"sliding_window": 0}, "sliding_window is 0"),
    ],
)
def test_bad_fields_are_refused_by_name(architecture: str, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        spec_from_config({**BASE, **fields, "architectures": [architecture]}, {}, where="here")
