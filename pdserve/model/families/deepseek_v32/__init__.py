"""DeepSeek-V3.2: DeepSeek-V3 whose tokens attend to those that an index selects (DSA).

The layers behind the last one, which draft tokens, are not read.
"""

from __future__ import annotations

import dataclasses

from pdserve.model.families.deepseek_v3 import DEFAULTS, ONLY
from pdserve.model.families.family import Family, HFConfig
from pdserve.model.families.mixture import read_grouped_moe
from pdserve.model.families.mla import NAMES, deepseek_layers, read_index, read_mla
from pdserve.model.layer_spec import DecoderLayerSpec
from pdserve.model.rope import RopeSpec


def _layers(config: HFConfig, rope: RopeSpec, where: str) -> tuple[DecoderLayerSpec, ...]:
    attention = read_mla(config, rope, where)
    attention = dataclasses.replace(attention, index=read_index(config, where, attention, num_heads=64))
    moe = dataclasses.replace(read_grouped_moe(config, where), scoring="sigmoid", correction_bias=True)
    return deepseek_layers(config, attention, moe, where)


FAMILIES = (
    Family(
        architecture="DeepseekV32ForCausalLM",
        model_type="deepseek_v32",
        max_positions=163840,
        read_layers=_layers,
        names=NAMES,
        layer_types=frozenset({"indexed_attention"}),
        defaults=DEFAULTS,
        only=ONLY,
        unread_layers="num_nextn_predict_layers",
    ),
)
