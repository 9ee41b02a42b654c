"""Published shapes of models, for runs with random weights; and a small one that has all their parts, for CPUs."""

from __future__ import annotations

from typing import Any

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
QWEN3_06B: dict[str, Any] = _QWEN3 | {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
}
QWEN3_8B: dict[str, Any] = _QWEN3 | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
QWEN3_30B_A3B: dict[str, Any] = _QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
}
_QWEN3_HYBRID: dict[str, Any] = _QWEN3 | {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000000,
    "full_attention_interval": 4,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
QWEN3_NEXT_SLICE: dict[str, Any] = _QWEN3_HYBRID | {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "linear_num_value_heads": 32,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
}
"""8 of the 48 layers of Qwen3-Next-80B-A3B, 27 GB in bfloat16: all of them exceed one GPU."""
QWEN35_SMALL: dict[str, Any] = _QWEN3_HYBRID | {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 248320,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "linear_num_value_heads": 16,
    "tie_word_embeddings": True,
}
"""A shape like that of Qwen3.5-0.8B."""
_SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": QWEN3_06B,
    "Qwen3-8B": QWEN3_8B,
    "Qwen3-30B-A3B": QWEN3_30B_A3B,
}
LATENT_MODELS: dict[str, dict[str, Any]] = {
    "DeepSeek-V2-Lite": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "first_k_dense_replace": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "topk_group": 1,
        "max_position_embeddings": 163840,
        "torch_dtype": "bfloat16",
    },
}
LATENT_MODELS["DeepSeek-V3.2"] = LATENT_MODELS["DeepSeek-V2-Lite"] | {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "topk_group": 4,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
}
"""Models with MLA."""
HYBRID_MODELS: dict[str, dict[str, Any]] = {
    "Qwen3.5-0.8B": QWEN35_SMALL,
    "Qwen3-Next-8-layers": QWEN3_NEXT_SLICE,
}
TINY_MODELS: dict[str, dict[str, Any]] = {
    "tiny": QWEN3_06B | _SMALL,
    "tiny-moe": QWEN3_30B_A3B | _SMALL | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}
TINY_HYBRID_MODELS: dict[str, dict[str, Any]] = {
    "tiny-hybrid": QWEN3_NEXT_SLICE
    | _SMALL
    | {
        "num_hidden_layers": 2,
        "full_attention_interval": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
}
