"""What Gemma-2 and Gemma-3 read alike from an HF config: layers with norms before and behind each operation.

Norms have `1 + w`, the feed-forward has GELU, embeddings are multiplied by the square root of the hidden size, and
scores have a scale that the config names.
"""

from __future__ import annotations

import dataclasses
import math

from pdserve.model.families.family import HFConfig, Scales, read_attention, read_mlp, sandwich_layer
from pdserve.model.fields import MAX_WIDTH, read_count, read_number
from pdserve.model.layer_spec import DecoderLayerSpec
from pdserve.model.rope import RopeSpec

ACTIVATIONS = frozenset({"gelu_pytorch_tanh"})
ONLY = {"use_bidirectional_attention": False}
_NORMS = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
)  # fmt: skip


def read_cap(config: HFConfig, name: str, where: str) -> float | None:
    """Read a soft cap; None: the config sets none."""
    return None if config.get(name) is None else read_number(config, name, where, default=1.0)


def gemma_layer(config: HFConfig, rope: RopeSpec, where: str, *, qk_norm: bool, window: int | None) -> DecoderLayerSpec:
    """Return a layer. `qk_norm` and `window`: see `AttentionSpec`."""
    bias = bool(config.get("attention_bias", False))
    attention = read_attention(config, rope, where, qkv_bias=bias, o_bias=bias, qk_norm=qk_norm, window=window)
    scalar = read_number(config, "query_pre_attn_scalar", where, default=float(attention.head_dim))
    attention = dataclasses.replace(
        attention,
        scale=None if scalar == attention.head_dim else scalar**-0.5,
        softcap=read_cap(config, "attn_logit_softcapping", where),
    )
    return sandwich_layer(attention, read_mlp(config, where, act="gelu_tanh"), _NORMS)


def read_scales(config: HFConfig, where: str) -> Scales:
    """Read the scale of embeddings, and the soft cap of logits."""
    hidden_size = read_count(config, "hidden_size", where, most=MAX_WIDTH)
    return Scales(embedding=math.sqrt(hidden_size), logit_softcap=read_cap(config, "final_logit_softcapping", where))
