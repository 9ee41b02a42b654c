"""GLM-MoE-DSA (GLM-5): sparse attention over latents; `indexer_types` names the layers that have an index of their own.

The other layers' tokens attend to those that the last index before has selected. The layers behind the last one, which
draft tokens, are not read.
"""

from __future__ import annotations

import dataclasses

from pdserve.errors import ModelError, UnsupportedModelError
from pdserve.model.families.deepseek_v3 import ONLY
from pdserve.model.families.family import Family, HFConfig, read_num_layers
from pdserve.model.families.mixture import read_grouped_moe
from pdserve.model.families.mla import NAMES, latent_layers, read_index, read_mla
from pdserve.model.fields import read_count, read_texts
from pdserve.model.layer_spec import DecoderLayerSpec
from pdserve.model.rope import RopeSpec

_FULL, _SHARED = "full", "shared"
_LETTERS = {"F": _FULL, "S": _SHARED}


def _layers(config: HFConfig, rope: RopeSpec, where: str) -> tuple[DecoderLayerSpec, ...]:
    attention = read_mla(config, rope, where)
    own = dataclasses.replace(read_index(config, where, attention, num_heads=32), interleaved=True)
    kinds = {
        _FULL: dataclasses.replace(attention, index=own),
        _SHARED: dataclasses.replace(attention, index=dataclasses.replace(own, shared=True)),
    }
    moe = dataclasses.replace(read_grouped_moe(config, where), scoring="sigmoid", correction_bias=True)
    return latent_layers(config, where, [kinds[kind] for kind in _indexers(config, where)], moe)


def _indexers(config: HFConfig, where: str) -> tuple[str, ...]:
    """Read which layers have an index: by `indexer_types`, `index_topk_pattern`, or the period `index_topk_freq`."""
    num_layers, pattern = read_num_layers(config, where), config.get("index_topk_pattern")
    kinds = read_texts(config, "indexer_types", where)
    if not kinds and isinstance(pattern, str):
        kinds = tuple(_LETTERS.get(letter, letter) for letter in pattern)
    elif not kinds and pattern is not None:
        kinds = read_texts(config, "index_topk_pattern", where)
    elif not kinds:
        period = read_count(config, "index_topk_freq", where, default=1)
        offset = read_count(config, "index_skip_topk_offset", where, default=2, least=0)
        kinds = tuple(_SHARED if max(i - offset + 1, 0) % period else _FULL for i in range(num_layers))
    if len(kinds) != num_layers:
        raise ModelError(f"{where}: indexer_types has {len(kinds)} entries, num_hidden_layers is {num_layers}")
    other = sorted(set(kinds) - {_FULL, _SHARED})
    if other:
        raise UnsupportedModelError(f"{where}: indexer_types has {', '.join(other)}; supported: {_FULL}, {_SHARED}")
    if kinds[0] == _SHARED:
        raise ModelError(f"{where}: indexer_types begins with {_SHARED}: no layer before has an index")
    return kinds


FAMILIES = (
    Family(
        architecture="GlmMoeDsaForCausalLM",
        model_type="glm_moe_dsa",
        max_positions=202752,
        read_layers=_layers,
        names=NAMES,
        layer_types=frozenset({"indexed_attention"}),
        defaults={
            "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 3,
            "moe_intermediate_size": 2048, "q_lora_rank": 2048, "qk_nope_head_dim": 192, "v_head_dim": 256,
        },
        only=ONLY,
        unread_layers="num_nextn_predict_layers",
    ),
)  # fmt: skip
