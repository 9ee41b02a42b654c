"""DeepSeek-V3.2: DeepSeek-V3 whose tokens attend to those that an index selects (DSA).

The layers behind the last one, which draft tokens, are not read.
"""

from __future__ import annotations

import dataclasses

from pdserve.errors import ModelError, UnsupportedModelError
from pdserve.model.families.family import Family, HFConfig
from pdserve.model.families.mixture import read_grouped_moe
from pdserve.model.families.mla import NAMES, deepseek_layers, read_mla
from pdserve.model.fields import MAX_HEAD_DIM, MAX_HEADS, read_count, read_texts
from pdserve.model.layer_spec import DecoderLayerSpec, IndexSpec, MoeSpec
from pdserve.model.rope import RopeSpec


def _layers(config: HFConfig, rope: RopeSpec, where: str) -> tuple[DecoderLayerSpec, ...]:
    attention = dataclasses.replace(read_mla(config, rope, where), index=_index(config, where))
    if attention.q_lora_rank is None:
        raise UnsupportedModelError(f"{where}: q_lora_rank null is not supported for this architecture")
    if attention.index is not None and attention.rope_dim > attention.index.head_dim:
        raise ModelError(
            f"{where}: qk_rope_head_dim {attention.rope_dim} is more than index_head_dim {attention.index.head_dim}"
        )
    moe = dataclasses.replace(read_grouped_moe(config, where), scoring="sigmoid", correction_bias=True)
    layers = deepseek_layers(config, attention, moe, where)
    kinds = read_texts(config, "mlp_layer_types", where)
    own = tuple("sparse" if isinstance(layer.operations[1], MoeSpec) else "dense" for layer in layers)
    if kinds and kinds != own:
        raise UnsupportedModelError(f"{where}: mlp_layer_types is not dense in the first first_k_dense_replace layers")
    return layers


def _index(config: HFConfig, where: str) -> IndexSpec:
    return IndexSpec(
        num_heads=read_count(config, "index_n_heads", where, default=64, most=MAX_HEADS),
        head_dim=read_count(config, "index_head_dim", where, default=128, most=MAX_HEAD_DIM),
        top_k=read_count(config, "index_topk", where, default=2048),
    )


FAMILIES = (
    Family(
        architecture="DeepseekV32ForCausalLM",
        model_type="deepseek_v32",
        max_positions=163840,
        read_layers=_layers,
        names=NAMES,
        layer_types=frozenset({"indexed_attention"}),
        defaults={
            "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 3,
            "n_group": 8, "topk_group": 4, "moe_intermediate_size": 2048,
        },
        only={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
        unread_layers="num_nextn_predict_layers",
    ),
)  # fmt: skip
