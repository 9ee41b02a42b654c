"""Qwen3-Next: GatedDeltaNet layers, every fourth layer gated full attention; experts and a shared expert behind both.

The projections of a GatedDeltaNet layer are interleaved by key head. Norms have `1 + w`.
"""

from __future__ import annotations

from pdserve.model.families.family import Family, HFConfig, read_mlp, read_num_layers
from pdserve.model.families.hybrid import LAYER_TYPES, MTP_NAMES, hybrid_layers, read_shared_moe
from pdserve.model.fields import read_count, read_counts
from pdserve.model.layer_spec import DecoderLayerSpec, MLPSpec, MoeSpec, WeightNames
from pdserve.model.rope import RopeSpec


def _layers(config: HFConfig, rope: RopeSpec, where: str) -> tuple[DecoderLayerSpec, ...]:
    step = read_count(config, "decoder_sparse_step", where, default=1)
    always_dense = read_counts(config, "mlp_only_layers", where)
    moe = read_shared_moe(config, where, norm_top_k=bool(config.get("norm_topk_prob", True)))

    def feed_forward(index: int) -> MLPSpec | MoeSpec:
        return read_mlp(config, where) if index in always_dense or (index + 1) % step else moe

    layers = [feed_forward(index) for index in range(read_num_layers(config, where))]
    return hybrid_layers(config, rope, where, layers, num_kv_heads=2, interleaved=True)


FAMILIES = (
    Family(
        architecture="Qwen3NextForCausalLM",
        model_type="qwen3_next",
        max_positions=32768,
        read_layers=_layers,
        names=WeightNames(ignored=("mtp.",), mtp=MTP_NAMES),
        layer_types=LAYER_TYPES,
        norm_offset=1.0,
        may_be_partial=True,
    ),
)
