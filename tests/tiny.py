"""Tiny random checkpoints as HF directories, with a tokenizer, for tests that need a real model in no time."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

Family = Literal["llama", "qwen2", "qwen3", "qwen3_moe", "mistral"]
DENSE_FAMILIES: tuple[Family, ...] = ("llama", "qwen2", "qwen3")
FAMILIES: tuple[Family, ...] = (*DENSE_FAMILIES, "qwen3_moe")
"""Families with full attention in every layer."""
WINDOW = 24
WINDOW_FAMILIES: dict[Family, dict[str, Any]] = {
    "mistral": {"sliding_window": WINDOW},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "qwen3": {
        "use_sliding_window": True, "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}  # fmt: skip
"""Changes of the config for layers that attend to a window: all of Mistral's, some of the others'."""
VOCAB_SIZE = 320
EOS_ID = 1

_CLASSES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
}
_CORPUS = [
    "The quick brown fox jumps over the lazy dog, and then there was another question about the weather.",
    "Prefill and decode are two servers; pages of keys and values travel from the one to the other.",
    "What is the capital of France? The capital of France is Paris. One two three four five six seven.",
    "In the beginning the universe was created. This has made a lot of people very angry.",
]
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


def make_tiny(family: Family, directory: Path, *, seed: int = 0, dtype: str = "float32", **overrides: Any) -> Path:
    """Save a random model of `family` into `directory` and return it; `overrides` go to the HF config.

    Weights are wider than a fresh model's, so that the greedy tokens of different contexts differ.
    """
    config_class, model_class = _CLASSES[family]
    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": EOS_ID,
        "pad_token_id": None,
    }
    if family in ("qwen3", "qwen3_moe"):
        settings["head_dim"] = 32
    if family == "qwen3_moe":
        settings |= {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
    torch.manual_seed(seed)
    model = model_class(config_class(**(settings | overrides)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0.0, 0.4 if name.endswith("bias") else 0.15)
    directory.mkdir(parents=True, exist_ok=True)
    model.to(getattr(torch, dtype)).save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of exactly VOCAB_SIZE tokens: any text goes in, any token comes out."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=1,
        special_tokens=["<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>")
    fast.chat_template = _CHAT_TEMPLATE
    return fast
