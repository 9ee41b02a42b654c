"""Writes tiny checkpoints as gguf files, as llama.cpp's `convert_hf_to_gguf.py` does, without a tokenizer.

The names of tensors are those of the `gguf` package. Fields and reordered rows follow the classes of that script.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file
from torch import Tensor

_ARCHITECTURES = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
_PAIRS = ("llama", "granite", "smollm3")
"""Architectures whose rows of Q and K are reordered for a rotation of neighbouring dimensions."""
_SIGMOID, _SOFTMAX = gguf.ExpertGatingFuncType.SIGMOID, gguf.ExpertGatingFuncType.SOFTMAX


def write_gguf(
    checkpoint: Path,
    target: Path,
    arch: str,
    divisors: list[float] | None = None,
    *,
    kind: str | None = None,
    expert_kind: str | None = None,
    is_old: bool = False,
    fields: Mapping[str, float] | None = None,
) -> Path:
    """Write the checkpoint in the directory `checkpoint` as the file `target` of the gguf architecture `arch`.

    `divisors`: those of the rotary frequencies. `kind`: the type of matrices, `expert_kind` that of experts. With
    `is_old` the file is one of before llama.cpp divided the expansion of latents. `fields` are added.
    """
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(str(target), arch)
    _add_fields(writer, arch, config, is_old=is_old)
    for key, value in (fields or {}).items():
        writer.add_float32(key, value)
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(divisors, dtype=np.float32))
    names = gguf.get_tensor_name_map(_ARCHITECTURES[arch], config["num_hidden_layers"])
    for hf_name, tensor in _tensors(load_file(checkpoint / "model.safetensors"), arch, config, is_old=is_old):
        name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        assert name is not None, hf_name
        wanted = expert_kind if expert_kind is not None and "_exps.weight" in name else kind
        if wanted is None or tensor.ndim == 1:
            writer.add_tensor(name, tensor)
        else:
            quantization = gguf.GGMLQuantizationType[wanted]
            writer.add_tensor(name, gguf.quantize(tensor, quantization), raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def _add_fields(writer: gguf.GGUFWriter, arch: str, config: dict[str, Any], *, is_old: bool) -> None:
    """Add what the script's base class adds, then what the class of the architecture does."""
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(1 if arch == "deepseek2" and not is_old else config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope.get("beta_fast", 32.0))
        writer.add_rope_scaling_yarn_beta_slow(rope.get("beta_slow", 1.0))
    experts = next((config[n] for n in ("num_local_experts", "num_experts", "n_routed_experts") if config.get(n)), None)
    if experts is not None:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if config.get("n_group"):
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
    if config.get("head_dim") and arch not in ("deepseek2", "phi3", "granite"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if isinstance(config.get("eos_token_id"), int):
        writer.add_eos_token_id(config["eos_token_id"])
    if arch in ("qwen3moe", "qwen2moe"):
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if arch == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if arch in ("gemma3", "gpt-oss"):
        writer.add_sliding_window(config["sliding_window"])
    if arch == "gpt-oss":
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    if arch == "phi3":
        _add_phi3(writer, config, rope)
    if arch == "glm4":
        writer.add_rope_dimension_count(int(config["head_dim"] * rope.get("partial_rotary_factor", 0.5)))
    if arch == "granite":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if arch == "olmo2" and "layer_types" in config:
        writer.add_sliding_window(config["sliding_window"])
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    if arch == "deepseek2":
        _add_deepseek2(writer, config, rope, is_old=is_old)


def _add_phi3(writer: gguf.GGUFWriter, config: dict[str, Any], rope: dict[str, Any]) -> None:
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    writer.add_rope_scaling_orig_ctx_len(
        rope.get("original_max_position_embeddings", config["max_position_embeddings"])
    )
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    writer.add_sliding_window(config.get("sliding_window") or 0)
    if "long_factor" in rope:
        scale = config["max_position_embeddings"] / rope["original_max_position_embeddings"]
        writer.add_rope_scaling_attn_factors(
            float(np.sqrt(1 + np.log(scale) / np.log(rope["original_max_position_embeddings"])))
        )
        writer.add_tensor("rope_factors_long.weight", np.array(rope["long_factor"], dtype=np.float32))
        writer.add_tensor("rope_factors_short.weight", np.array(rope["short_factor"], dtype=np.float32))


def _add_deepseek2(writer: gguf.GGUFWriter, config: dict[str, Any], rope: dict[str, Any], *, is_old: bool) -> None:
    rotated, latent = config["qk_rope_head_dim"], config["kv_lora_rank"]
    key, value = config["qk_nope_head_dim"] + rotated, config["v_head_dim"]
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_vocab_size(config["vocab_size"])
    if config.get("q_lora_rank") is not None:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(latent)
    writer.add_key_length(key if is_old else latent + rotated)
    writer.add_value_length(value if is_old else latent)
    if not is_old:
        writer.add_key_length_mla(key)
        writer.add_value_length_mla(value)
        writer.add_expert_gating_func(_SIGMOID if config["model_type"] == "deepseek_v3" else _SOFTMAX)
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    if config.get("norm_topk_prob"):
        writer.add_expert_weights_norm(True)
    writer.add_rope_dimension_count(rotated)
    if rope.get("mscale_all_dim") is not None:
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def _tensors(
    tensors: dict[str, Tensor], arch: str, config: dict[str, Any], *, is_old: bool
) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """Yield HF names and values as the script's `modify_tensors` does."""
    for full_name, tensor in _experts_stacked(tensors).items():
        name, values = full_name, tensor.numpy()
        if arch in _PAIRS and ("q_proj" in name or "k_proj" in name):
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            pairs = values.reshape(heads, 2, -1, *values.shape[1:])
            values = np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(values.shape))
        if arch == "gemma3" and name.endswith("norm.weight"):
            values = values + 1.0
        if name.endswith("sinks"):
            name += ".weight"
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        if arch == "gpt-oss" and ".experts." in name:
            yield from _gpt_oss_experts(name, values)
        elif name.endswith("kv_b_proj.weight") and not is_old:
            rows = values.reshape(config["num_attention_heads"], -1, values.shape[-1])
            keys, rest = np.split(rows, [config["qk_nope_head_dim"]], axis=1)
            yield name.replace("kv_b_proj", "k_b_proj"), np.ascontiguousarray(keys.swapaxes(1, 2))
            yield name.replace("kv_b_proj", "v_b_proj"), np.ascontiguousarray(rest)
        else:
            yield name, values


def _gpt_oss_experts(name: str, values: npt.NDArray[Any]) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """Gate and up are two tensors, and matrices are `[experts, out, in]`."""
    suffix = "bias" if name.endswith("_bias") else "weight"
    values = values if suffix == "bias" else values.swapaxes(1, 2)
    base = name.removesuffix("_bias")
    if "gate_up_proj" in base:
        for first, kind in enumerate(("gate_proj", "up_proj")):
            yield f"{base.replace('gate_up_proj', kind)}.{suffix}", np.ascontiguousarray(values[:, first::2])
    else:
        yield f"{base}.{suffix}", np.ascontiguousarray(values)


def _experts_stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """One tensor for each projection of all experts of a layer, in place of one for each expert."""
    stacked: dict[str, dict[int, Tensor]] = {}
    others: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        found = re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*)", name)
        if found is None:
            others[name] = tensor
        else:
            stacked.setdefault(f"{found[1]}.{found[3]}", {})[int(found[2])] = tensor
    return others | {name: torch.stack([each[i] for i in range(len(each))]) for name, each in stacked.items()}
